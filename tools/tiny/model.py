"""MiniCPM-SALA in PyTorch, to train sala-tiny and to check it (docs/ and tests/reference/sala_ref.py say the same in
other words). One forward over whole sequences; their length must be a multiple of 128 (pad at the end: all is causal).

Shapes: B sequences, T positions, H hidden size, h heads, d head size, nb = T / 64 blocks of keys."""
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = dict(
    architectures=["MiniCPMSALAForCausalLM"], model_type="minicpm_sala", torch_dtype="bfloat16", dtype="bfloat16",
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=2,
    num_key_value_heads=1, head_dim=128, hidden_act="silu", max_position_embeddings=524288, rms_norm_eps=1e-6,
    rope_theta=10000.0, rope_scaling=None, attention_bias=False, attention_dropout=0.0, scale_emb=12, scale_depth=1.4,
    dim_model_base=256, mup_denominator=32, attn_use_rope=False, attn_use_output_gate=True, lightning_nh=2,
    lightning_nkv=2, lightning_head_dim=128, lightning_use_rope=True, lightning_scale="1/sqrt(d)", qk_norm=True,
    use_output_gate=True, use_output_norm=True, tie_word_embeddings=False, bos_token_id=1, eos_token_id=[2, 2046],
    pad_token_id=2, initializer_range=0.1, pretraining_tp=1, use_cache=True,
    mixer_types=["minicpm4", "lightning-attn", "lightning-attn", "minicpm4", "lightning-attn", "lightning-attn",
                 "lightning-attn", "minicpm4"],
    sparse_config=dict(kernel_size=32, kernel_stride=16, init_blocks=1, block_size=64, window_size=256, topk=8,
                       use_nope=False, dense_len=512))
GENERATION = dict(bos_token_id=1, eos_token_id=[2, 2046], pad_token_id=2, do_sample=False)

H, D, HEADS, FF, LAYERS, V = 256, 128, 2, 768, 8, 2048
EPS, SCALE, RESIDUAL = 1e-6, D ** -0.5, 1.4 / math.sqrt(LAYERS)
BLOCK, KERNEL, STRIDE, LOCAL, INIT, DENSE = 64, 32, 16, 4, 1, 512
TOPK = 8 + LOCAL  # blocks that a query reads, forced ones included
SLOPES = [2.0 ** -4, 2.0 ** -8]  # a lightning head keeps exp(-slope) of its state at each token
CHUNK = 128
NEG = -1e30


def rms(x, weight, dtype):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(dtype)


def rope_tables(length, device):
    inverse = (1.0 / 10000.0 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)).float().to(device)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse[None]
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def lightning(q, k, v):
    """o_t = scale sum_{u <= t} exp(-slope (t - u)) (q_t k_u) v_u, by chunks. q, k, v [B, h, T, d] -> [B, h, T, d]."""
    B, h, T, d = q.shape
    n, dtype = T // CHUNK, q.dtype
    q, k, v = (x.reshape(B, h, n, CHUNK, d) for x in (q, k, v))
    s = torch.tensor(SLOPES, device=q.device, dtype=torch.float32)[:, None]  # [h, 1]
    i = torch.arange(CHUNK, device=q.device, dtype=torch.float32)
    lag = i[:, None] - i[None, :]
    decay = torch.where(lag >= 0, torch.exp(-s[:, :, None] * lag.clamp(min=0)), torch.zeros_like(lag))  # [h, C, C]
    within = ((q @ k.transpose(-1, -2)) * (decay[None, :, None] * SCALE)).to(dtype) @ v
    # what each chunk adds to the state, then the state that each chunk begins with
    kept = (k * torch.exp(-s * (CHUNK - 1 - i))[None, :, None, :, None]).to(dtype)
    added = (kept.transpose(-1, -2) @ v).float()  # [B, h, n, d, d]
    m = torch.arange(n, device=q.device, dtype=torch.float32)
    gap = m[:, None] - 1 - m[None, :]
    carry = torch.where(gap >= 0, torch.exp(-s[:, :, None] * CHUNK * gap.clamp(min=0)), torch.zeros_like(gap))
    state = torch.matmul(carry[None], added.reshape(B, h, n, d * d)).reshape(B, h, n, d, d).to(dtype)
    before = (q * (torch.exp(-s * (i + 1)) * SCALE)[None, :, None, :, None]).to(dtype) @ state
    return (within + before).reshape(B, h, T, d)


# ---- choice of blocks ----

def block_scores(q, k):
    """q [B, h, T, d], k [B, T, d] -> log of each block's score [B, T, nb] (NEG where no row is visible)."""
    B, h, T, d = q.shape
    nb = T // BLOCK
    rows = k.float().reshape(B, T // STRIDE, STRIDE, d).mean(2)
    k1 = (rows[:, :-1] + rows[:, 1:]) * 0.5  # means of keys 16 j .. 16 j + 32
    wide = rows.reshape(B, nb, 4, d).mean(2)
    k2 = (wide[:, :-1] + wide[:, 1:]) * 0.5  # of keys 64 j .. 64 j + 128
    s1 = torch.einsum("bhtd,bjd->bhtj", q.float(), k1) * SCALE
    s2 = torch.einsum("bhtd,bjd->bhtj", q.float(), k2) * SCALE
    n = torch.arange(T, device=q.device)[:, None] + 1
    seen1 = torch.arange(k1.shape[1], device=q.device)[None] * STRIDE + KERNEL <= n
    seen2 = torch.arange(k2.shape[1], device=q.device)[None] * 4 * STRIDE + 4 * KERNEL <= n
    norm = torch.logsumexp(s2.masked_fill(~seen2, NEG), -1, keepdim=True)
    p = torch.logsumexp(s1 - norm, 1).masked_fill(~(seen1 & seen2[:, :1]), NEG)  # summed over the group's heads
    p = F.pad(p, (1, 1), value=NEG)  # index j + 1: block b reads rows 4 b - 1 .. 4 b + 3
    return torch.maximum(p[..., : 4 * nb].reshape(B, T, nb, 4).amax(-1), p[..., 4::4])


def forced_blocks(length, device):
    """-> (blocks that every query reads, blocks that it may read), each [T, nb]."""
    b = torch.arange(length // BLOCK, device=device)[None]
    own = (torch.arange(length, device=device) // BLOCK)[:, None]
    return (b < INIT) | ((b >= own - LOCAL) & (b <= own)), b <= own


def select(scores, dense_len, exact_ties):
    """-> bool [B, T, nb]: the blocks that each query reads; with fewer than dense_len tokens it reads all.
    `exact_ties`: of equal scores the earlier block wins, as in the engine (slower)."""
    B, T, nb = scores.shape
    forced, past = forced_blocks(T, scores.device)
    s, count = scores.masked_fill(forced, 1e30).masked_fill(~past, -3e30), min(TOPK, nb)
    best = torch.sort(s, dim=-1, descending=True, stable=True)[1][..., :count] if exact_ties else torch.topk(s, count, -1)[1]
    chosen = torch.zeros(B, T, nb, dtype=torch.bool, device=s.device).scatter_(-1, best, True)
    return (chosen | (torch.arange(T, device=s.device) + 1 < dense_len)[:, None]) & past


def selection_loss(raw, scores, dense_len):
    """Cross entropy of the block scores against dense attention's mass on each block that is open to choice."""
    B, h, T, _ = raw.shape
    with torch.no_grad():
        mass = torch.softmax(raw, -1).reshape(B, h, T, T // BLOCK, BLOCK).sum(-1).mean(1)
        forced, past = forced_blocks(T, raw.device)
        choice = past & ~forced & (torch.arange(T, device=raw.device) + 1 >= dense_len)[:, None]
        mass = mass * choice
    log_p = torch.log_softmax(scores.masked_fill(~choice, NEG), -1)
    return -(mass * log_p.clamp(min=-60)).sum() / (B * T)


def sparse_attention(q, k, v, mode, dense_len, exact_ties):
    """q [B, h, T, d], k, v [B, T, d]. mode: "dense", "aux" (dense, with the selection loss), "sparse" (with both)."""
    B, h, T, d = q.shape
    if mode == "dense":
        k, v = (x[:, None].expand(-1, h, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), None
    scores = block_scores(q, k)
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    raw = ((q @ k[:, None].transpose(-1, -2)).float() * SCALE).masked_fill(~causal, NEG)
    loss = selection_loss(raw, scores, dense_len) if torch.is_grad_enabled() else None
    if mode == "sparse":
        with torch.no_grad():
            chosen = select(scores, dense_len, exact_ties)
        raw = raw.masked_fill(~chosen.repeat_interleave(BLOCK, -1)[:, None], NEG)
    return torch.softmax(raw, -1).to(q.dtype) @ v[:, None], loss


# ---- layers: the modules' names make the checkpoint's ----

class Weight(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def times(x, module):
    return F.linear(x, module.weight.to(x.dtype))


class Mixer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.lightning = kind == "lightning-attn"
        kv = HEADS * D if self.lightning else D
        self.q_proj, self.o_proj = linear(H, HEADS * D), linear(HEADS * D, H)
        self.k_proj, self.v_proj = linear(H, kv), linear(H, kv)
        if self.lightning:
            self.z_proj = linear(H, HEADS * D)
            self.q_norm, self.k_norm, self.o_norm = Weight(D), Weight(D), Weight(HEADS * D)
        else:
            self.o_gate = linear(H, HEADS * D)

    def forward(self, y, cos, sin, mode, dense_len, exact_ties):
        B, T, _ = y.shape
        dtype, loss = y.dtype, None

        def heads(x):
            return x.reshape(B, T, HEADS, D).transpose(1, 2)

        q, k, v = heads(times(y, self.q_proj)), times(y, self.k_proj), times(y, self.v_proj)
        if self.lightning:
            q = rope(rms(q, self.q_norm.weight, dtype), cos, sin)
            k = rope(rms(heads(k), self.k_norm.weight, dtype), cos, sin)
            o = lightning(q, k, heads(v)).transpose(1, 2).reshape(B, T, HEADS * D)
            o = rms(o, self.o_norm.weight, dtype) * torch.sigmoid(times(y, self.z_proj))
        else:
            o, loss = sparse_attention(q, k, v, mode, dense_len, exact_ties)
            o = o.transpose(1, 2).reshape(B, T, HEADS * D) * torch.sigmoid(times(y, self.o_gate))
        return times(o, self.o_proj), loss


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(H, FF), linear(H, FF), linear(FF, H)

    def forward(self, y):
        return times(F.silu(times(y, self.gate_proj)) * times(y, self.up_proj), self.down_proj)


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Weight(H), Weight(H)
        self.self_attn, self.mlp = Mixer(kind), MLP()

    def forward(self, x, cos, sin, mode, dtype, dense_len, exact_ties):  # x: the residual stream, FP32
        y = rms(x, self.input_layernorm.weight, dtype)
        o, loss = self.self_attn(y, cos, sin, mode, dense_len, exact_ties)
        x = x + RESIDUAL * o.float()
        return x + RESIDUAL * self.mlp(rms(x, self.post_attention_layernorm.weight, dtype)).float(), loss


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        self.layers = nn.ModuleList(Layer(kind) for kind in CONFIG["mixer_types"])
        self.norm = Weight(H)


class Sala(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.model, self.lm_head = Body(), linear(H, V)
        g = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=g) * self.deviation(name, p))

    @staticmethod
    def deviation(name, p):
        if "embed" in name:
            return 1 / 12  # embeddings are multiplied by 12
        if "lm_head" in name:
            return 0.02
        return p.shape[1] ** -0.5 * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)

    def forward(self, ids, mode="dense", dtype=torch.bfloat16, dense_len=DENSE, exact_ties=False):
        """ids [B, T] -> (normed hidden states [B, T, H], selection loss or 0)."""
        cos, sin = rope_tables(ids.shape[1], ids.device)
        x, total = F.embedding(ids, self.model.embed_tokens.weight).float() * CONFIG["scale_emb"], 0.0
        for layer in self.model.layers:
            x, loss = layer(x, cos, sin, mode, dtype, dense_len, exact_ties)
            total = total if loss is None else total + loss
        return rms(x, self.model.norm.weight, dtype), total

    def logits(self, hidden):  # H / dim_model_base is 1
        return times(hidden, self.lm_head)


def losses(net, hidden, target, weight, letter_weight, held=None):
    """-> weighted mean of the nats; to report: nats, tokens and sure ones of answers; nats, tokens and right ones of
    letters; means over plain text of the nats and of the divergence from `held`. target, weight [B, T]; answers weigh
    more than 4, plain text 1.
    held [B, T, V]: another model's logits. What is no answer then costs sum_v p_v (log p_v - log q_v), p theirs, q ours:
    nothing more is to be learned from that text, and nothing to be forgotten."""
    log_q = F.log_softmax(net.logits(hidden).float().flatten(0, 1), -1)
    nats = -log_q.gather(1, target.flatten()[:, None])[:, 0]
    w = weight.flatten().float()
    answer, letter, text = (w > 4).float(), (w == letter_weight).float(), (w == 1).float()
    cost, away = nats, torch.zeros_like(nats)
    if held is not None:
        log_p = F.log_softmax(held.float().flatten(0, 1), -1)
        away = (log_p.exp() * (log_p - log_q)).sum(-1)
        cost = torch.where(w > 4, nats, away)
    loss, nats, away = (cost * w).sum() / w.sum(), nats.detach(), away.detach()
    plain = text.sum().clamp(min=1)
    return loss, torch.stack([(nats * answer).sum(), answer.sum(), ((nats < 0.1).float() * answer).sum(),
                              (nats * letter).sum(), letter.sum(), ((nats < 0.69).float() * letter).sum(),
                              (nats * text).sum() / plain, (away * text).sum() / plain])


def pad(sequences, device="cpu"):
    """Lists of ids -> [B, T], T a multiple of CHUNK and at least 256."""
    n = max(256, -(-max(map(len, sequences)) // CHUNK) * CHUNK)
    return torch.tensor([x + [0] * (n - len(x)) for x in sequences], device=device)


# ---- checkpoints in the release's layout: u64 size, JSON header, data ----

def write_safetensors(path, tensors):
    header, offset, data = {"__metadata__": {"format": "pt"}}, 0, []
    for name, t in tensors.items():
        b = t.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        header[name] = dict(dtype="BF16", shape=list(t.shape), data_offsets=[offset, offset + len(b)])
        offset += len(b)
        data.append(b)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.writelines(data)


def read_safetensors(path):
    with open(path, "rb") as f:
        raw = f.read()
    size = int.from_bytes(raw[:8], "little")
    out = {}
    for name, e in json.loads(raw[8:8 + size]).items():
        if name != "__metadata__":
            a, b = (8 + size + x for x in e["data_offsets"])
            bits = torch.frombuffer(bytearray(raw[a:b]), dtype=torch.int16)
            out[name] = bits.view(torch.bfloat16).reshape(e["shape"]).clone()
    return out


def load(path, device="cpu"):
    net = Sala().to(device)
    net.load_state_dict({k: v.float() for k, v in read_safetensors(path).items()})
    return net
