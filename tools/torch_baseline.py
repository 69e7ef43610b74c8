#!/usr/bin/env python3
"""What PyTorch does with the same work: the yardstick for `sala bench` on a CUDA device.

A decode loop of MiniCPM-SALA's 9B geometry in BF16 with random weights, as a careful PyTorch
programmer writes it: q, k, v and the gate of a layer in one matrix, gate and up of an MLP in one
matrix, the lightning layers as a recurrence on an FP32 state, the sparse layers as dense attention
over a full KV cache (the context is below dense_len, so the model itself asks for that), argmax
sampling, and the whole step in one CUDA graph. It runs with eager elementwise code and again with
torch.compile around what stands between the matrix products; for a single sequence it measures
which of PyTorch's matrix-vector products is the fastest for each shape. The best run counts.

    python3 tools/torch_baseline.py                 batch 1, 8 and 64 after 4096 tokens
    python3 tools/torch_baseline.py --device cpu --tiny    only whether it runs

Bytes are what a step must move: every weight but the embedding once, every state read and written,
every K and V read. If batch 1 moves them at less than 70 % of the bandwidth measured in the same
run, the baseline is void: then PyTorch was held back by something else than the memory.
"""
import argparse
import dataclasses
import json
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F


@dataclasses.dataclass
class Model:  # the 9B model; see docs and config.json of the release
    vocab: int = 73448
    hidden: int = 4096
    ffn: int = 16384
    layers: int = 32
    sparse: tuple = (0, 9, 16, 17, 22, 29, 30, 31)
    heads: int = 32
    kv_heads: int = 2
    dim: int = 128
    eps: float = 1e-6
    theta: float = 10000.0
    embed_scale: float = 12.0
    scale_depth: float = 1.4
    logit_divisor: float = 16.0

    @property
    def width(self):
        return self.heads * self.dim

    @property
    def kv_width(self):
        return self.kv_heads * self.dim

    @property
    def residual(self):
        return self.scale_depth / math.sqrt(self.layers)


TINY = Model(vocab=512, hidden=256, ffn=512, layers=3, sparse=(1,), heads=2, kv_heads=1)


# ---- what stands between the matrix products; compiled or not ----


def rms_norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm(x, branch, weight, scale, eps):
    """x + scale * branch, and its norm."""
    x = x + scale * branch
    return x, rms_norm(x, weight, eps)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def heads_of(p, q_norm, k_norm, cos, sin, eps, dim):
    """q, k, v as FP32 [batch, heads, dim] and the gate, from one projection."""
    q, k, v, z = p.chunk(4, -1)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
    q = rotate(rms_norm(q, q_norm, eps).float(), cos, sin)
    k = rotate(rms_norm(k, k_norm, eps).float(), cos, sin)
    return q * dim**-0.5, k, v.float(), z


def lightning_eager(p, state, q_norm, k_norm, o_norm, cos, sin, decay, eps, dim):
    """S = decay S + k v^T, o = q S: in place, by library calls."""
    q, k, v, z = heads_of(p, q_norm, k_norm, cos, sin, eps, dim)
    s = state.flatten(0, 1)
    state.mul_(decay)
    s.baddbmm_(k.flatten(0, 1).unsqueeze(-1), v.flatten(0, 1).unsqueeze(-2))
    o = torch.bmm(q.flatten(0, 1).unsqueeze(-2), s).to(p.dtype).view(p.shape[0], -1)
    return rms_norm(o, o_norm, eps) * torch.sigmoid(z)


def lightning_fused(p, state, q_norm, k_norm, o_norm, cos, sin, decay, eps, dim):
    """The same as one expression: the compiler reads and writes the state once."""
    q, k, v, z = heads_of(p, q_norm, k_norm, cos, sin, eps, dim)
    new = decay * state + k.unsqueeze(-1) * v.unsqueeze(-2)
    o = (q.unsqueeze(-1) * new).sum(-2)
    state.copy_(new)
    return rms_norm(o.to(p.dtype).flatten(-2), o_norm, eps) * torch.sigmoid(z)


def gated(o, gate):
    return o * torch.sigmoid(gate)


def swiglu(p):
    gate, up = p.chunk(2, -1)
    return F.silu(gate) * up


# ---- matrix products ----


def by_linear(x, w):
    return F.linear(x, w)


def by_mv(x, w):
    return torch.mv(w, x[0]).unsqueeze(0)


def by_padding(x, w):
    return F.linear(F.pad(x, (0, 0, 0, 8 - x.shape[0])), w)[: x.shape[0]]


def by_sum(x, w):  # compiled, this is a kernel of its own for one row
    return (w.float() * x.float()).sum(-1).to(x.dtype).unsqueeze(0)


class Products:
    """Picks, for one row, the fastest of PyTorch's ways for each shape; more rows: F.linear."""

    def __init__(self, compiled):
        self.compiled = torch.compile(by_sum, dynamic=False) if compiled else None
        self.best = {}

    def choose(self, name, weights, batch):
        self.best[name] = by_linear
        if batch > 1 or not weights[0].is_cuda:
            return
        ways = {"F.linear": by_linear, "mv": by_mv, "linear of 8 rows": by_padding}
        if self.compiled:
            ways["compiled sum"] = self.compiled
        x = torch.randn(1, weights[0].shape[1], device="cuda", dtype=weights[0].dtype)
        times = {way: time_call(lambda f=f: [f(x, w) for w in weights]) for way, f in ways.items()}
        way = min(times, key=times.get)
        self.best[name] = ways[way]
        rate = sum(w.numel() * w.element_size() for w in weights) / times[way]
        print(f"  {name:12s} {way}: {rate / 1e12:.2f} TB/s", flush=True)

    def __call__(self, name, x, w):
        return self.best[name](x, w)


def time_call(f, repeat=5):
    """Seconds of one call, launches hidden by a graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
        f()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    graph.replay()
    return min(time_replays(graph, 1) for _ in range(repeat))


def time_replays(graph, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


# ---- the model ----


class Weights:
    def __init__(self, m, device):
        def matrix(n, k, scale=1.0):
            w = torch.empty(n, k, device=device, dtype=torch.bfloat16)
            return w.normal_(0, scale / math.sqrt(k))

        def vector(n):
            return torch.ones(n, device=device, dtype=torch.bfloat16)

        self.embed = matrix(m.vocab, m.hidden, math.sqrt(m.hidden) / m.embed_scale)
        self.head = matrix(m.vocab, m.hidden, m.logit_divisor)
        self.norm = vector(m.hidden)
        self.layers = []
        for i in range(m.layers):
            layer = {"sparse": i in m.sparse, "in": vector(m.hidden), "post": vector(m.hidden)}
            kv = m.kv_width if layer["sparse"] else m.width
            layer["qkvz"] = matrix(2 * m.width + 2 * kv, m.hidden)
            layer["o"] = matrix(m.hidden, m.width)
            layer["gate_up"] = matrix(2 * m.ffn, m.hidden)
            layer["down"] = matrix(m.hidden, m.ffn)
            if not layer["sparse"]:
                layer["q_norm"], layer["k_norm"] = vector(m.dim), vector(m.dim)
                layer["o_norm"] = vector(m.width)
            self.layers.append(layer)

    def step_bytes(self):
        count = self.head.numel() + self.norm.numel()
        for layer in self.layers:
            count += sum(t.numel() for t in layer.values() if torch.is_tensor(t))
        return 2 * count


class Decoder:
    """The sequences of a batch, all at the same position, and one step of them."""

    def __init__(self, m, w, batch, context, steps, compiled, device):
        self.m, self.w, self.batch, self.context = m, w, batch, context
        bf16 = {"device": device, "dtype": torch.bfloat16}
        kv = (batch, m.kv_heads, context, m.dim)
        self.state, self.k, self.v = {}, {}, {}
        for i, layer in enumerate(w.layers):
            if layer["sparse"]:
                self.k[i], self.v[i] = torch.randn(kv, **bf16), torch.randn(kv, **bf16)
            else:
                shape = (batch, m.heads, m.dim, m.dim)
                self.state[i] = torch.zeros(shape, device=device, dtype=torch.float32)
        slopes = 2.0 ** (-8.0 * torch.arange(1, m.heads + 1, device=device) / m.heads)
        self.decay = torch.exp(-slopes).view(m.heads, 1, 1)
        angles = torch.arange(context + 4 * steps, device=device, dtype=torch.float32).unsqueeze(1)
        angles = angles * m.theta ** (-torch.arange(0, m.dim, 2, device=device) / m.dim)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.token = torch.randint(m.vocab, (batch,), device=device)
        self.position = torch.full((1,), context, device=device, dtype=torch.int64)
        self.tokens = torch.zeros(4 * steps, batch, device=device, dtype=torch.int64)
        pick = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.add_norm, self.swiglu, self.gated = pick(add_norm), pick(swiglu), pick(gated)
        self.lightning = pick(lightning_fused) if compiled else lightning_eager
        self.product = Products(compiled and device == "cuda")
        for name in ("o", "gate_up", "down"):
            self.product.choose(name, [layer[name] for layer in w.layers], batch)
        for sparse in (0, 1):
            of = [layer["qkvz"] for layer in w.layers if layer["sparse"] == bool(sparse)]
            self.product.choose(("qkvz", "qkvz sparse")[sparse], of, batch)
        self.product.choose("head", [w.head], batch)

    def sparse(self, i, y, layer):
        """Dense attention: the heads of a K/V head are its queries. The cache is a ring."""
        m, b = self.m, self.batch
        p = self.product("qkvz sparse", y, layer["qkvz"])
        q, k, v, z = p.split((m.width, m.kv_width, m.kv_width, m.width), -1)
        slot = self.position % self.context
        self.k[i].index_copy_(2, slot, k.view(b, m.kv_heads, 1, m.dim))
        self.v[i].index_copy_(2, slot, v.view(b, m.kv_heads, 1, m.dim))
        q = q.reshape(b, m.kv_heads, m.heads // m.kv_heads, m.dim)
        o = F.scaled_dot_product_attention(q, self.k[i], self.v[i])
        return self.gated(o.reshape(b, m.width), z)

    def step(self):
        m, w = self.m, self.w
        cos, sin = self.cos[self.position], self.sin[self.position]
        x = F.embedding(self.token, w.embed) * m.embed_scale
        y = rms_norm(x, w.layers[0]["in"], m.eps)
        for i, layer in enumerate(w.layers):
            if layer["sparse"]:
                o = self.sparse(i, y, layer)
            else:
                o = self.lightning(self.product("qkvz", y, layer["qkvz"]), self.state[i],
                                   layer["q_norm"], layer["k_norm"], layer["o_norm"], cos, sin,
                                   self.decay, m.eps, m.dim)
            x, y = self.add_norm(x, self.product("o", o, layer["o"]), layer["post"], m.residual,
                                 m.eps)
            y = self.swiglu(self.product("gate_up", y, layer["gate_up"]))
            after = w.layers[i + 1]["in"] if i + 1 < m.layers else w.norm
            x, y = self.add_norm(x, self.product("down", y, layer["down"]), after, m.residual,
                                 m.eps)
        logits = self.product("head", y / m.logit_divisor, w.head)
        self.token.copy_(logits.argmax(-1))
        self.tokens.index_copy_(0, self.position - self.context, self.token.unsqueeze(0))
        self.position.add_(1)

    def step_bytes(self):
        states = sum(2 * s.numel() * s.element_size() for s in self.state.values())
        cache = sum(t.numel() * t.element_size() for c in (self.k, self.v) for t in c.values())
        return self.w.step_bytes() + states + cache

    def run(self, steps):
        """Seconds of `steps` steps: the median of three runs of one captured step."""
        if not self.token.is_cuda:
            began = time.time()
            for _ in range(steps):
                self.step()
            return time.time() - began
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        time_replays(graph, min(20, steps // 4))
        return statistics.median(time_replays(graph, steps) for _ in range(3))


# ---- the measurement ----


def bandwidth(device):
    """The best of a copy (bytes read and written) and a sum (bytes read), bytes a second."""
    if device != "cuda":
        return 0.0
    x = torch.zeros(1 << 30, device=device, dtype=torch.float32)  # 4 GiB
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    copy, read = 2 * size / time_call(lambda: y.copy_(x)), size / time_call(lambda: x.sum())
    print(f"device bandwidth: copy {copy / 1e12:.2f} TB/s, sum {read / 1e12:.2f} TB/s")
    return max(copy, read)


def measure(m, w, batch, o, compiled, peak):
    began = time.time()
    if compiled:
        torch.compiler.reset()
    d = Decoder(m, w, batch, o.context, o.tokens, compiled, o.device)
    seconds = d.run(o.tokens) / o.tokens
    result = {"batch": batch, "compiled": compiled, "ms": seconds * 1e3,
              "tokens_per_second": batch / seconds, "bytes_per_second": d.step_bytes() / seconds,
              "share": d.step_bytes() / seconds / peak if peak else 0.0}
    print(f"batch {batch:3d}, {'compiled' if compiled else 'eager   '}: "
          f"{result['tokens_per_second']:9.1f} tokens/s, {result['ms']:7.3f} ms a step, "
          f"{result['bytes_per_second'] / 1e12:5.2f} TB/s ({result['share'] * 100:3.0f} % of the "
          f"bandwidth); {time.time() - began:.0f} s to measure", flush=True)
    return result


def attempt(m, w, batch, o, compiled, peak):
    """None where torch.compile does not work on this machine."""
    try:
        return measure(m, w, batch, o, compiled, peak)
    except Exception as error:  # the eager figures stand without it
        if not compiled:
            raise
        print(f"batch {batch:3d}, compiled: failed: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        if o.device == "cuda":
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8,64", help="comma list (default 1,8,64)")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=200, help="steps of one run (default 200)")
    parser.add_argument("--compile", choices=("both", "yes", "no"), default="both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see whether it runs")
    parser.add_argument("--json", help="also write the results to this file")
    o = parser.parse_args()
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    m = TINY if o.tiny else Model()
    print(f"PyTorch {torch.__version__}, "
          f"{torch.cuda.get_device_name() if o.device == 'cuda' else 'CPU'}, context {o.context}, "
          f"{o.tokens} tokens a run")
    peak, w = bandwidth(o.device), Weights(m, o.device)
    print(f"weights that a step reads: {w.step_bytes() / 1e9:.2f} GB", flush=True)
    ways = {"both": (False, True), "yes": (True,), "no": (False,)}[o.compile]
    results = [attempt(m, w, int(b), o, c, peak) for b in o.batch.split(",") for c in ways]
    results = [r for r in results if r]
    best = {b: min((r for r in results if r["batch"] == b), key=lambda r: r["ms"])
            for b in sorted({r["batch"] for r in results})}
    for b, r in best.items():
        print(f"best of batch {b}: {r['tokens_per_second']:.1f} tokens/s "
              f"({'compiled' if r['compiled'] else 'eager'}), {r['share'] * 100:.0f} % of the bandwidth")
    void = 1 in best and peak > 0 and best[1]["share"] < 0.70
    if void:
        print("void: batch 1 reaches less than 70 % of the bandwidth")
    if o.json:
        with open(o.json, "w") as f:
            json.dump({"torch": torch.__version__, "bandwidth": peak, "results": results,
                       "void": void}, f, indent=1)
    return 1 if void else 0


if __name__ == "__main__":
    sys.exit(main())
