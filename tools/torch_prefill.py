#!/usr/bin/env python3
"""What PyTorch and fla do with the heavy parts of a prompt: the yardsticks for `sala bench --kernels`.

At MiniCPM-SALA's 9B geometry, BF16, random numbers, GPU time alone (CUDA graphs, median of several):
- the five products of the linear layers at 2,048 rows through torch.matmul (cuBLAS);
- causal attention of an 8,192-token prompt, 32 query heads on 2 K/V heads, through
  scaled_dot_product_attention with the flash backend (grouped heads, or K/V expanded: the faster);
- simple GLA with a constant decay per head through fla's chunk_simple_gla (if flash-linear-attention
  is installed), 2,048 tokens, 32 heads of 128, FP32 state in and out.

    python3 tools/torch_prefill.py [--json FILE]
"""
import argparse
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def time_graph(f, count=10, repeat=7):
    """Median seconds of one call of f, `count` calls in a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            f()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def products(rows):
    result, total, flops = {}, 0.0, 0.0
    for name, n, k, layers in (("qkvz", 16384, 4096, 24), ("qkv + gate", 8704, 4096, 8), ("o", 4096, 4096, 32),
                               ("gate + up", 32768, 4096, 32), ("down", 4096, 16384, 32)):
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        seconds = time_graph(lambda: F.linear(x, w))
        work = 2.0 * rows * n * k
        result[name] = {"us": seconds * 1e6, "tflops": work / seconds * 1e-12}
        total += seconds * layers
        flops += work * layers
        print(f"{name:12s} N {n:6d} K {k:6d}: {seconds * 1e6:8.1f} us, {work / seconds * 1e-12:6.1f} TFLOP/s")
    print(f"all linear layers, {rows} rows: {total * 1e3:.2f} ms, {flops / total * 1e-12:.1f} TFLOP/s")
    result["all"] = {"ms": total * 1e3, "tflops": flops / total * 1e-12}
    return result


def attention(tokens):
    best = None
    q = torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = [x.repeat_interleave(16, 1).contiguous() for x in (k, v)]
    forms = (("grouped heads", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
             ("expanded K/V", lambda: F.scaled_dot_product_attention(q, *wide, is_causal=True)))
    for name, f in forms:
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                seconds = time_graph(f)
        except RuntimeError as error:
            print(f"attention, {name}: {str(error).splitlines()[0]}")
            continue
        rate = 2.0 * 2 * 32 * 128 * tokens * tokens / 2 / seconds * 1e-12
        print(f"causal attention of {tokens}, flash, {name}: {seconds * 1e3:.3f} ms, {rate:.1f} TFLOP/s")
        if best is None or seconds < best["ms"] * 1e-3:
            best = {"form": name, "ms": seconds * 1e3, "tflops": rate}
    return best


def simple_gla(tokens):
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"fla: {error}")
        return None
    q, k, v = (torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    state = torch.randn(1, 32, 128, 128, device="cuda", dtype=torch.float32)
    decay = -torch.exp2(-0.25 * torch.arange(1, 33, device="cuda", dtype=torch.float32))

    def f():
        with torch.no_grad():
            return chunk_simple_gla(q, k, v, g_gamma=decay, scale=128**-0.5, initial_state=state,
                                    output_final_state=True)

    seconds = time_graph(f)
    print(f"fla chunk_simple_gla, {tokens} tokens, 32 heads: {seconds * 1e6:.1f} us")
    return {"us": seconds * 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="also write the results to this file")
    o = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch_prefill.py: no CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    result = {"products": products(2048), "attention": attention(8192), "fla": simple_gla(2048)}
    if o.json:
        with open(o.json, "w") as f:
            json.dump(result, f, indent=1)


main()
