"""The EAGLE-3 head that sala.h runs (its sections [4] and [11], docs/speculation.md), in PyTorch: its layer and
unroll, the losses, NVFP4 with straight-through gradients, and its folder. tools/train_draft.py trains it.

Shapes: B rows of T tokens, S chosen slots of each, H hidden, V the target's vocabulary, Vd the draft's. Arithmetic
is the engine's: BF16 weights (or exact E2M1 * E4M3 numbers), norms and softmax in FP32; `dtype` is that of
activations."""
import dataclasses
import json
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

# ---- safetensors, without its package ----

KINDS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8,
         "BOOL": np.uint8, "F8_E4M3": np.uint8}  # BF16 and F8 as their bits


def read_safetensors(path):
    """-> {name: (dtype, array)}, {metadata}; the arrays are views of the mapped file."""
    raw = np.memmap(path, np.uint8, "r") if os.path.getsize(path) >= 8 else np.zeros(8, np.uint8)
    size = int.from_bytes(raw[:8].tobytes(), "little")
    if not 0 < size <= len(raw) - 8:
        raise ValueError(f"{path}: not a safetensors file")
    out = {}
    try:
        head = json.loads(raw[8:8 + size].tobytes())
        meta = head.pop("__metadata__", {})
        for name, t in head.items():
            begin, end = (8 + size + x for x in t["data_offsets"])
            if t["dtype"] not in KINDS:
                raise ValueError(f"tensor {name} has dtype {t['dtype']}, which is not read here")
            if not 8 + size <= begin <= end <= len(raw):
                raise ValueError(f"tensor {name} ends beyond the file")
            out[name] = t["dtype"], raw[begin:end].view(KINDS[t["dtype"]]).reshape(t["shape"])
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ValueError(f"{path}: damaged, or not a safetensors file: {e}") from e
    return out, meta


def write_safetensors(path, tensors, meta=None):
    """tensors: {name: (dtype, array)}. Written beside and renamed: a folder never has half a file."""
    head, at, data = {"__metadata__": {"format": "pt", **(meta or {})}}, 0, []
    for name, (kind, array) in tensors.items():
        array = np.asarray(array, KINDS[kind])
        head[name] = dict(dtype=kind, shape=list(array.shape), data_offsets=[at, at + array.nbytes])
        at += array.nbytes
        data.append(array)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".tmp", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in data:
            f.write(array.tobytes())
    os.replace(path + ".tmp", path)


def as_tensor(kind, array):
    """A tensor of a file as floating point: BF16 stays BF16."""
    if kind == "BF16":
        return torch.from_numpy(array.copy().view(np.int16)).view(torch.bfloat16)
    if kind in ("F16", "F32"):
        return torch.from_numpy(np.array(array, np.float32))
    raise ValueError(f"{kind}, expected BF16, F16 or F32")


def bf16_bits(x):
    return x.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


# ---- NVFP4 (nvfp4.md 1.3 and 2): the arithmetic of tools/gptq.h, operation by operation, so that the bits agree ----

E4M3_MOST, ENCODE = 448.0, 6.0 * 256  # with 4-or-6 the largest block's scale is 256, or 384


def round_e2m1(x):
    """The nearest of 0 0.5 1 1.5 2 3 4 6 and their negatives, ties to even, at most 6."""
    a = x.abs()
    step = 0.5 + 0.5 * (a >= 2) + (a >= 4)
    return torch.copysign((torch.round(a / step) * step).clamp(max=6), x)


def e4m3_power(x):
    """Exponent of the distance of E4M3 numbers at x >= 0, FP32: -9 below 2^-6, then the power of two below x less 3.
    From the bits: powers and logarithms of a GPU need not be exact."""
    return ((x.contiguous().view(torch.int32) >> 23) - 130).clamp(min=-9)


def round_e4m3(x):  # x >= 0; ties to even
    x = x.clamp(max=E4M3_MOST)
    step = (e4m3_power(x) + 127 << 23).view(torch.float32)
    return torch.round(x / step) * step


def e4m3_bits(x):  # of E4M3 numbers >= 0
    power = e4m3_power(x)
    code = x / (power + 127 << 23).view(torch.float32) + 8 * (power + 9)  # subnormals count on from 0
    return code.to(torch.uint8)


def fit_blocks(blocks, divisor, scale, four):
    """Scales [.., 1] and numbers [.., 16] of E2M1, the largest of a block being 6 (`four`: 4)."""
    most = blocks.abs().amax(-1, keepdim=True)
    s = most / torch.full_like(most, 6) * divisor  # by a plain 6, PyTorch may multiply with its reciprocal
    s = round_e4m3(s * 1.5 if four else s)
    s = torch.where((most > 0) & (s == 0), torch.full_like(s, 2.0 ** -9), s)  # else a small block would be erased
    s = torch.where(most > 0, s, torch.zeros_like(s))
    inverse = torch.where(s > 0, 1 / (scale * s), torch.zeros_like(s))
    return s, round_e2m1(blocks * inverse)


def block_error(blocks, s, q, scale):
    """Sum of squared errors [.., 1], added in the order of the elements."""
    e = q * s * scale - blocks
    e, total = e * e, torch.zeros_like(s)
    for i in range(16):
        total = total + e[..., i:i + 1]
    return total


def nvfp4_divisor(weights):
    """6 * 256 / the largest magnitude of matrices that share their tensor scale (engines may fuse them)."""
    most = max(w.detach().abs().amax() for w in weights)
    return torch.where(most > 0, torch.full_like(most, ENCODE) / most, torch.ones_like(most))


def nvfp4(w, divisor):
    """FP32 [n, k] -> E2M1 numbers [n, k/16, 16], E4M3 scales [n, k/16, 1], the tensor scale. 4 if it errs less."""
    blocks, scale = w.detach().float().reshape(w.shape[0], -1, 16), 1 / divisor
    six, four = (fit_blocks(blocks, divisor, scale, four) for four in (False, True))
    fits = block_error(blocks, *four, scale) < block_error(blocks, *six, scale)
    return torch.where(fits, four[1], six[1]), torch.where(fits, four[0], six[0]), scale


class Through(torch.autograd.Function):
    """E2M1 * E4M3 of a master matrix, exact in BF16. dQ(W)/dW is taken as 1, where Q(W) = this * the tensor scale."""

    @staticmethod
    def forward(ctx, master, divisor):
        q, s, ctx.scale = nvfp4(master, divisor)
        return (q * s).reshape(master.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.scale, None


# ---- the head ----


@dataclasses.dataclass
class Config:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    aux: list  # the layers whose outputs it reads
    eps: float = 1e-6
    theta: float = 10000.0
    window: int = 0  # tokens that it was trained to see at most


def shapes(c):
    a, m, q, kv = "midlayer.self_attn.", "midlayer.mlp.", c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {"fc": (c.hidden, 3 * c.hidden),
            "midlayer.input_layernorm": (c.hidden,), "midlayer.hidden_norm": (c.hidden,),
            a + "q_proj": (q, 2 * c.hidden), a + "k_proj": (kv, 2 * c.hidden), a + "v_proj": (kv, 2 * c.hidden),
            a + "o_proj": (c.hidden, q), "midlayer.post_attention_layernorm": (c.hidden,),
            m + "gate_proj": (c.ffn, c.hidden), m + "up_proj": (c.ffn, c.hidden), m + "down_proj": (c.hidden, c.ffn),
            "norm": (c.hidden,), "lm_head": (c.draft_vocab, c.hidden)}


# Matrices that read the same input share a tensor scale, as exports for fused engines want it.
SETS = [["fc"], ["midlayer.self_attn." + x for x in ("q_proj", "k_proj", "v_proj")], ["midlayer.self_attn.o_proj"],
        ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"], ["midlayer.mlp.down_proj"], ["lm_head"]]


def norm(x, w, eps):  # FP32 statistics, rounded, then times the weight
    r = x.float()
    r = r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + eps)
    return r.to(x.dtype) * w


def rates(c, device):
    rate = [1 / math.pow(c.theta, 2.0 * i / c.head_dim) for i in range(c.head_dim // 2)]
    return torch.tensor(rate, dtype=torch.float64).float().to(device)


def rope(x, position, rate):
    """x [.., heads, head_dim], position [..]: pairs (i, i + head_dim/2), angles as sala__op_rope_table has them."""
    angle = (position.float()[..., None, None] * rate).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x.float().split(len(rate), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def pick(x, slots):
    """x [B, T, ..] at slots [B, S] -> [B, S, ..]"""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], slots]


def attend(q, k, v, own, seen):
    """q [B, S, heads, d] over the keys k, v [B, T, kv, d] that `seen` [B, S, T] allows, and its `own` [(k, v)], each
    [B, S, kv, d] -> [B, S, heads * d]. A query always sees one key at least."""
    b, s, h, d = q.shape
    g, scale = k.shape[2], 1 / math.sqrt(q.shape[-1])
    q = q.float().reshape(b, s, g, h // g, d)
    score = torch.einsum("bsgrd,btgd->bsgrt", q, k.float()) * scale
    score = score.masked_fill(~seen[:, :, None, None], float("-inf"))
    mine = [(q * x[0].float()[:, :, :, None]).sum(-1, keepdim=True) * scale for x in own]
    p = torch.softmax(torch.cat([score, *mine], -1), -1).to(v.dtype)
    t = k.shape[1]
    o = torch.einsum("bsgrt,btgd->bsgrd", p[..., :t], v)
    for i, x in enumerate(own):
        o = o + p[..., t + i:t + i + 1] * x[1][:, :, :, None]
    return o.reshape(b, s, h * d)


class Head:
    """Master weights in FP32 by name, the target's embedding, and the target's token of each of its own."""

    def __init__(self, config, embedding, ids, device="cpu", dtype=torch.float32):
        self.c, self.dtype, self.device = config, dtype, device
        self.embedding = embedding.to(device, torch.bfloat16)  # [V, H], frozen
        self.ids = ids.to(device)  # [Vd] rising
        self.master, self.quantised, self.divisors, self.frozen = {}, False, {}, False

    def init(self, seed):
        make = torch.Generator().manual_seed(seed)
        for name, shape in shapes(self.c).items():
            w = torch.ones(shape)
            if len(shape) == 2:
                w = torch.randn(shape, generator=make) * shape[1] ** -0.5
            self.master[name] = w
        self.take(self.master)

    def take(self, weights):
        self.master = {n: weights[n].float().to(self.device).clone().requires_grad_(True) for n in shapes(self.c)}

    def scales(self):
        """Divisors of all sets, by the master weights as they are now, or as they were when they were frozen."""
        if not self.frozen or not self.divisors:
            self.divisors = {s[0]: nvfp4_divisor([self.master[n] for n in s]) for s in SETS}
        return {n: self.divisors[s[0]] for s in SETS for n in s}

    def weights(self):
        """{name: (what a product multiplies, tensor scale or None)}: exactly what an export holds."""
        out, divisors = {}, self.scales() if self.quantised else {}
        for name, w in self.master.items():
            if name in divisors:
                out[name] = Through.apply(w, divisors[name]).to(self.dtype), 1 / divisors[name]
            else:  # rounding to BF16 is straight-through by itself
                out[name] = w.to(torch.bfloat16).to(self.dtype), None
        return out

    def unroll(self, features, ids, position, segment, slots, steps):
        """Yields the logits [B, S, Vd] of steps 0 .. steps - 1 (speculation.md 6.2). features [B, T, 3H], ids,
        position and segment [B, T]: samples lie behind each other in a row, and see themselves alone. Slot t reads
        feature t and, at step k, token t + 1 + k; it guesses token t + 2 + k."""
        c, w, last, own, rate = self.c, self.weights(), ids.shape[1] - 1, [], rates(self.c, ids.device)
        heads = lambda x, n: x.reshape(*x.shape[:-1], n, c.head_dim)

        def linear(x, name):
            m, scale = w[name]
            y = F.linear(x, m)
            return y if scale is None else (y.float() * scale).to(y.dtype)

        def project(f, token, at, wants_q):
            e = norm(self.embedding[token].to(self.dtype), w["midlayer.input_layernorm"][0], c.eps)
            u = torch.cat((e, norm(f, w["midlayer.hidden_norm"][0], c.eps)), -1)
            a = "midlayer.self_attn."
            k, v = (heads(linear(u, a + x), c.kv_heads) for x in ("k_proj", "v_proj"))
            q = rope(heads(linear(u, a + "q_proj"), c.heads), at, rate) if wants_q else None
            return u, rope(k, at, rate), v, q

        t = torch.arange(ids.shape[1], device=ids.device)
        seen = (t <= slots[..., None]) & (segment[:, None] == pick(segment, slots)[..., None])
        f = linear(features.to(self.dtype), "fc")
        u, k0, v0, _ = project(f, ids[:, (t + 1).clamp(max=last)], position, False)
        f, u, at = pick(f, slots), pick(u, slots), pick(position, slots)
        q = rope(heads(linear(u, "midlayer.self_attn.q_proj"), c.heads), at, rate)
        for step in range(steps):
            if step:
                _, k, v, q = project(f, pick(ids, (slots + 1 + step).clamp(max=last)), at + step, True)
                own.append((k, v))
            f = f + linear(attend(q, k0, v0, own, seen), "midlayer.self_attn.o_proj")
            z = norm(f, w["midlayer.post_attention_layernorm"][0], c.eps)
            z = F.silu(linear(z, "midlayer.mlp.gate_proj")) * linear(z, "midlayer.mlp.up_proj")
            f = f + linear(z, "midlayer.mlp.down_proj")
            m, scale = w["lm_head"]
            y = F.linear(norm(f, w["norm"][0], c.eps), m).float()
            yield y if scale is None else y * scale


# ---- losses (speculation.md 6.3) ----


def overlap(logits, p):
    """logits [.., Vd], p the target's probabilities of the draft's tokens (their sum is the coverage) ->
    alpha = sum min(p, q), which a draw from q is accepted with, and -sum p' log q, p' being p made to sum to 1."""
    log_q = torch.log_softmax(logits, -1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    kl = -(p / p.sum(-1, keepdim=True).clamp(min=1e-20) * log_q).sum(-1)
    return alpha, kl


def blend(alpha, kl, share):
    """share * KL + (1 - share) * (1 - alpha); share None: -log alpha."""
    if share is None:
        return -torch.log(alpha.clamp(min=1e-6))
    return share * kl + (1 - share) * (1 - alpha)


# ---- its folder, in SpecForge's layout ----


def export(head, folder, fmt, note=None):
    """BF16, or NVFP4 as ModelOpt writes it (weights alone)."""
    c, tensors = head.c, {}
    divisors = {}
    if fmt == "nvfp4":
        quantised = head.quantised
        divisors = head.scales() if quantised else {
            n: d for s in SETS for d in [nvfp4_divisor([head.master[x] for x in s])] for n in s}
    for name, w in head.master.items():
        if name not in divisors:
            tensors[name + ".weight"] = "BF16", bf16_bits(w)
            continue
        q, s, scale = nvfp4(w.detach().cpu(), divisors[name].cpu())
        a, sign = (q.abs() * 2).to(torch.uint8), torch.signbit(q).to(torch.uint8)
        code = torch.tensor([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], dtype=torch.uint8)[a.long()] | sign << 3
        code = code.reshape(w.shape[0], -1, 2)
        tensors[name + ".weight"] = "U8", (code[..., 0] | code[..., 1] << 4).numpy()
        tensors[name + ".weight_scale"] = "F8_E4M3", e4m3_bits(s[..., 0]).numpy()
        tensors[name + ".weight_scale_2"] = "F32", np.float32(scale.numpy())
    ids = head.ids.cpu().numpy().astype(np.int64)
    known = np.zeros(c.vocab, np.uint8)
    known[ids] = 1
    tensors["d2t"], tensors["t2d"] = ("I64", ids - np.arange(len(ids))), ("BOOL", known)
    text = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", dtype="bfloat16", torch_dtype="bfloat16",
                hidden_size=c.hidden, intermediate_size=c.ffn, num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads, head_dim=c.head_dim, num_hidden_layers=1, vocab_size=c.vocab,
                draft_vocab_size=c.draft_vocab, rms_norm_eps=c.eps, rope_theta=c.theta, rope_scaling=None,
                max_position_embeddings=524288, hidden_act="silu", attention_bias=False, tie_word_embeddings=False,
                eagle_config=dict(eagle_aux_hidden_state_layer_ids=c.aux, use_aux_hidden_state=True))
    if c.aux[0] != 1:  # the key's usual meaning depends on its first number: see sala__draft_aux
        text["eagle_config"] = dict(sala_output_layers=c.aux, use_aux_hidden_state=True)
    if c.window:
        text["eagle_config"]["sala_window"] = c.window
    if fmt == "nvfp4":
        text["quantization_config"] = dict(quant_method="modelopt", quant_algo="W4A16_NVFP4", group_size=16)
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors, note)
    with open(os.path.join(folder, "config.json"), "w") as f:
        f.write(json.dumps(text, indent=2) + "\n")


def load(folder, embedding, device="cpu", dtype=torch.float32):
    """A BF16 head that `export` wrote."""
    with open(os.path.join(folder, "config.json")) as f:
        t = json.load(f)
    eagle = t["eagle_config"]
    c = Config(t["hidden_size"], t["intermediate_size"], t["num_attention_heads"], t["num_key_value_heads"],
               t["head_dim"], t["vocab_size"], t["draft_vocab_size"],
               eagle.get("sala_output_layers") or eagle["eagle_aux_hidden_state_layer_ids"],
               t["rms_norm_eps"], t["rope_theta"], eagle.get("sala_window", 0))
    tensors, _ = read_safetensors(os.path.join(folder, "model.safetensors"))
    if "fc.weight_scale" in tensors:
        raise ValueError(f"{folder}: its weights are NVFP4; training begins with those in BF16")
    ids = torch.from_numpy(tensors["d2t"][1] + np.arange(c.draft_vocab))
    head = Head(c, embedding, ids, device, dtype)
    head.take({n: as_tensor(*tensors[n + ".weight"]) for n in shapes(c)})
    return head
