#!/usr/bin/env python3
"""Where the issue slots of the FP4 product's inner loop go, from its machine code; no GPU is needed.

    python3 tools/issue_slots.py [--target sm_120a] [--kernel sala_prefill_fp4] [--unit 6] [-D...]

Compiles a unit of sala.cu for the 9B with NVRTC (SALA_NVRTC names the library), disassembles it with nvdisasm
(NVDISASM), and counts the instructions of every loop that holds MMAs: a warp's loop is one step of 64 k.
"""
import argparse, collections, ctypes, os, re, shutil, subprocess, sys, tempfile

DIMS = ("73448,4096,16384,32,32,2,128,0,1,64,32,16,1,32,64,8192,32,32,128,1,1,1,1,"
        "1e-6f,10000.f,12.f,0.24748737f,16.f,0.088388348f,0.088388348f")
KINDS = [("FP4 MMA", "OMMA"), ("MMA", "HMMA|QMMA|IMMA"), ("shared loads", "LDS|LDSM"),
         ("async copies", "LDGSTS"), ("empty, behind FP4 MMAs", "NOP"), ("barriers", "BAR|DEPBAR|LDGDEPBAR|WARPSYNC|BSYNC|BSSY"),
         ("shuffles", "SHFL"), ("FP32, BF16", "FADD|FMUL|FFMA|HFMA2|HMUL2|HADD2|FSEL"),
         ("branches", "BRA|EXIT|CALL|RET"), ("uniform", "U[A-Z0-9]+|R2UR|S2UR"), ("integer, moves", ".*")]


def compile_unit(target, unit, more):
    names = [os.environ.get("SALA_NVRTC"), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so",
             "/usr/local/cuda/lib64/libnvrtc.so"]
    for name in filter(None, names):
        try:
            lib = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        sys.exit("issue_slots.py: no NVRTC: set SALA_NVRTC")
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    source, header = (open(os.path.join(here, f), "rb").read() for f in ("sala.cu", "kernels.h"))
    options = ["--gpu-architecture=" + target, "-DSALA_UNIT=%d" % unit, "-DSALA_DIMS=" + DIMS, "-std=c++17",
               "--fmad=false"] + more
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), source, b"sala.cu", 1, (ctypes.c_char_p * 1)(header),
                           (ctypes.c_char_p * 1)(b"kernels.h"))
    code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(
        *[o.encode() for o in options]))
    if code:
        sys.exit("issue_slots.py: sala.cu does not compile for %s (NVRTC error %d)" % (target, code))
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    return cubin.raw


def disassemble(cubin, kernel):
    tool = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if not tool:
        sys.exit("issue_slots.py: no nvdisasm: set NVDISASM")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([tool, "-c", f.name], check=True, capture_output=True, text=True).stdout
    text = text[text.index("\n.text.%s:" % kernel) + 1:]
    code, labels = [], {}
    for line in text.splitlines()[1:]:
        if line.startswith("//---"):
            break
        label = re.match(r"\s*(\.L_x_\d+):", line)
        if label:
            labels[label.group(1)] = len(code)
        word = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)\S*\s*(.*)", line)
        if word:
            code.append((word.group(1), word.group(2)))
    return code, labels


def loops(code, labels):
    """The innermost loops (backward branches) that hold MMAs: (first, end)."""
    found = []
    for i, (name, operands) in enumerate(code):
        target = re.search(r"(\.L_x_\d+)", operands)
        if name == "BRA" and target and labels.get(target.group(1), i + 1) <= i:
            found.append((labels[target.group(1)], i + 1))
    holds = [f for f in found if any(re.fullmatch("OMMA|HMMA", n) for n, _ in code[f[0]:f[1]])]
    return sorted(f for f in holds if not any(g != f and f[0] <= g[0] and g[1] <= f[1] for g in holds))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--target", default="sm_120a")
    arguments.add_argument("--kernel", default="sala_prefill_fp4")
    arguments.add_argument("--unit", type=int, default=6)
    given, more = arguments.parse_known_args()
    code, labels = disassemble(compile_unit(given.target, given.unit, more), given.kernel)
    print("%s for %s: %d instructions; of a warp and a turn of each loop with MMAs:" %
          (given.kernel, given.target, len(code)))
    for first, end in loops(code, labels):
        counts = collections.Counter()
        for name, _ in code[first:end]:
            counts[next(k for k, pattern in KINDS if re.fullmatch(pattern, name))] += 1
        total = end - first
        print("  %4d instructions: " % total + ", ".join("%s %d" % (k, counts[k]) for k, _ in KINDS if counts[k]))


main()
