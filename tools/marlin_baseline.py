#!/usr/bin/env python3
"""Public kernels on the shapes of `sala bench --gemm`: the yardstick for products with 4-bit weights.

    MARLIN_DIR=~/marlin python3 tools/marlin_baseline.py [--json FILE] [--rows 1,8,16] [--quick] [--sala FILE]

Marlin is IST-DASLab/marlin (Apache-2.0), which is not part of this project: MARLIN_DIR is a clone of it. Its kernel
is compiled by nvcc with one change, the cache hint of its cp.async, an illegal instruction on Hopper, is taken out.
Beside it: PyTorch's _weight_int4pack_mm (4 bits, groups of 128 as for Marlin) and cuBLAS in BF16. Every way reads
weights that have left the L2 cache: the calls of one CUDA graph go round several gigabytes of copies. The best
replay counts. Without MARLIN_DIR, or where a way does not exist, its rows are left out and that is said. --sala takes
what `sala bench --gemm --json` printed and compares the times of the same shapes.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys

import torch

GROUP = 128
SHAPES = ((16384, 4096), (4096, 16384), (4096, 4096))  # N, K
HINTED = '''    "   .reg .b64 p;\\n"
    "   createpolicy.fractional.L2::evict_first.b64 p, 1.0;"
    "   cp.async.cg.shared.global.L2::cache_hint [%0], [%1], %2, p;\\n"'''
PLAIN = '    "   cp.async.cg.shared.global [%0], [%1], %2;\\n"'
ENTRY = '''
extern "C" int marlin(const void* x, const void* w, void* y, void* scales, int m, int n, int k,
                      void* locks, int group, void* stream) {
    return marlin_cuda(x, w, y, scales, m, n, k, locks, group, 0, (cudaStream_t)stream);
}
'''


def build(folder, capability):
    """The shared library of Marlin's kernel; returns its function."""
    source = os.path.join(folder, "marlin", "marlin_cuda_kernel.cu")
    text = open(source).read()
    if HINTED not in text:
        sys.exit(f"{source}: its cp.async is not where this script looks for it; it knows the commit 2f6d7c1")
    os.makedirs("build", exist_ok=True)
    with open("build/marlin.cu", "w") as f:
        f.write(text.replace(HINTED, PLAIN) + ENTRY)
    subprocess.run(["nvcc", "-O3", "-w", "--expt-relaxed-constexpr", f"-arch=sm_{capability}", "-shared", "-Xcompiler",
                    "-fPIC", "-o", "build/libmarlin.so", "build/marlin.cu"], check=True)
    function = ctypes.CDLL(os.path.abspath("build/libmarlin.so")).marlin
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 3 + [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return function


class Marlin:
    name = "Marlin int4 g128"
    bits = 4 + 16 / GROUP

    def __init__(self, function):
        self.function = function

    def start(self, words, n, k):
        self.weights, self.n, self.k = words, n, k
        self.scales = torch.full((k // GROUP, n), 0.01, dtype=torch.float16, device="cuda").repeat(len(words), 1, 1)
        self.locks = torch.zeros(n // 128 * 16, dtype=torch.int32, device="cuda")
        self.check()

    def check(self):  # all codes 9, which mean 1: the sum of x
        ones = torch.full((self.k * self.n // 8,), -0x66666667, dtype=torch.int32, device="cuda")
        x = torch.randn(16, self.k, device="cuda").half()
        y = self.run(x, ones, self.scales[0])
        want = (0.01 * x.float().sum(1, keepdim=True)).expand_as(y)
        if not torch.allclose(y.float(), want, atol=2e-2, rtol=2e-2):
            sys.exit(f"Marlin's results are wrong here: {y[0, 0]} instead of {want[0, 0]}")

    def run(self, x, w, scales):
        y = torch.empty(x.shape[0], self.n, dtype=torch.float16, device="cuda")
        code = self.function(x.data_ptr(), w.data_ptr(), y.data_ptr(), scales.data_ptr(), x.shape[0], self.n, self.k,
                             self.locks.data_ptr(), GROUP, torch.cuda.current_stream().cuda_stream)
        if code:
            sys.exit(f"Marlin refuses {x.shape[0]} x {self.n} x {self.k}: {code}")
        return y

    def call(self, x, i):
        return self.run(x, self.weights[i], self.scales[i])

    def input(self, m):
        return torch.randn(m, self.k, device="cuda").half()


class Int4Pack:
    name = "torch int4pack g128"
    bits = 4 + 32 / GROUP

    def start(self, words, n, k):
        self.k = k
        self.weights = [w.view(n // 8, k // 128, 32, 4) for w in words]
        one = torch.full((k // GROUP, n, 2), 0.01, dtype=torch.bfloat16, device="cuda")
        self.scales = one.repeat(len(words), 1, 1, 1)

    def call(self, x, i):
        return torch.ops.aten._weight_int4pack_mm(x, self.weights[i], GROUP, self.scales[i])

    def input(self, m):
        return torch.randn(m, self.k, device="cuda", dtype=torch.bfloat16)


class Cublas:
    name = "cuBLAS BF16"
    bits = 16

    def start(self, words, n, k):
        self.k = k
        copies = max(2, len(words) // 4)
        self.weights = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16)

    def call(self, x, i):
        return torch.nn.functional.linear(x, self.weights[i % len(self.weights)])

    input = Int4Pack.input


def seconds(way, m, copies):
    """Of one call: a graph of `copies` calls, each with other weights."""
    x = way.input(m)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            way.call(x, i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(copies):
            way.call(x, i)
    best = 1e9
    for i in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i:  # the first one warms up
            best = min(best, begin.elapsed_time(end) * 1e-3 / copies)
    return best


def measure(ways, rows, total):
    table = []
    for n, k in SHAPES:
        copies = max(4, total // (n * k // 2))
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (copies, n * k // 8), dtype=torch.int32, device="cuda")
        for way in list(ways):
            try:
                way.start(words, n, k)
                for m in rows:
                    s = seconds(way, m, copies)
                    entry = {"kernel": way.name, "n": n, "k": k, "m": m, "us": s * 1e6,
                             "gb_per_second": n * k * way.bits / 8 / s * 1e-9, "tflops": 2 * m * n * k / s * 1e-12}
                    table.append(entry)
                    print("%6d %6d %4d  %-20s %9.2f us %9.1f GB/s %8.1f TFLOP/s" % (
                        n, k, m, way.name, entry["us"], entry["gb_per_second"], entry["tflops"]), flush=True)
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                print(f"{way.name}: left out: {str(error).splitlines()[0]}")
                ways.remove(way)
            way.weights = way.scales = None
            torch.cuda.empty_cache()
    return table


def against(sala, table):
    """Times of sala's verify form beside those of the others."""
    print("\n%6s %6s %4s  %-28s %9s   time, of that of" % ("N", "K", "M", "sala", "us"))
    for e in json.load(open(sala))["products"]:
        others = [t for t in table if (t["n"], t["k"], t["m"]) == (e["n"], e["k"], e["rows"])]
        if e["form"] == "verify" and others:
            print("%6d %6d %4d  %-28s %9.2f   %s" % (
                e["n"], e["k"], e["rows"], f"{e['format']}, {e['product']}", e["us"],
                ", ".join("%s %.2f" % (t["kernel"].split()[0], e["us"] / t["us"]) for t in others)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the table to this file too")
    parser.add_argument("--rows", default="1,8,16,32,48,64", help="M, separated by commas")
    parser.add_argument("--sala", help="what sala bench --gemm --json printed, to compare with")
    parser.add_argument("--quick", action="store_true", help="1 GiB of weights instead of 3")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device")
    ways, folder = [Int4Pack(), Cublas()], os.environ.get("MARLIN_DIR")
    if folder:
        ways.insert(0, Marlin(build(folder, "%d%d" % torch.cuda.get_device_capability())))
    else:
        print("Marlin: left out: MARLIN_DIR is not set")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    with torch.inference_mode():
        table = measure(ways, [int(m) for m in args.rows.split(",")], (1 if args.quick else 3) << 30)
    if args.sala:
        against(args.sala, table)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "table": table}, f, indent=1)


main()
