#!/usr/bin/env python3
"""Independent NumPy float64 reference for MiniCPM-SALA: the judge of tests/test_model.c.

Two deliberately different formulations of the same rule:
  forward(cfg, W, tokens)  whole sequence at once: quadratic decay-masked lightning
                           attention, mask-matrix sparse attention.
  Decoder(cfg, W).step(t)  one token at a time: recurrent state, growing compressed-key
                           caches, gathered attention.
`python3 sala_ref.py selftest` asserts that both agree; `export DIR` writes a random
model as config.json + model.safetensors (BF16) with expected results beside it.
Weights are plain float64 arrays whose values are exactly representable in BF16.
"""
import argparse, json, math, os, struct, sys
import numpy as np

SPARSE, LIGHTNING = "minicpm4", "lightning-attn"
DEFAULTS = dict(
    architectures=["MiniCPMSALAForCausalLM"], model_type="minicpm_sala", dtype="bfloat16",
    vocab_size=73448, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, hidden_act="silu",
    max_position_embeddings=524288, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None,
    attention_bias=False, attention_dropout=0.0, scale_emb=12, scale_depth=1.4,
    dim_model_base=256, mup_denominator=32, attn_use_rope=False, attn_use_output_gate=True,
    lightning_nh=32, lightning_nkv=32, lightning_head_dim=128, lightning_use_rope=True,
    lightning_scale="1/sqrt(d)", qk_norm=True, use_output_gate=True, use_output_norm=True,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=[2, 73440], pad_token_id=2,
    sparse_config=dict(kernel_size=32, kernel_stride=16, init_blocks=1, block_size=64,
                       window_size=2048, topk=64, use_nope=False, dense_len=8192),
    mixer_types=[SPARSE if i in (0, 9, 16, 17, 22, 29, 30, 31) else LIGHTNING for i in range(32)])


class Cfg:
    """Config object built from released defaults plus overrides; derived values as attributes."""
    def __init__(self, **over):
        sc = {**DEFAULTS["sparse_config"], **over.pop("sparse_config", {})}
        d = {**DEFAULTS, **over, "sparse_config": sc}
        self.d = d
        for k, v in d.items():
            setattr(self, k, v)
        assert len(self.mixer_types) == self.num_hidden_layers
        assert self.hidden_size == self.num_attention_heads * self.head_dim
        assert self.num_attention_heads % self.num_key_value_heads == 0
        assert self.lightning_nh % self.lightning_nkv == 0
        assert not self.attention_bias and not sc["use_nope"] and self.rope_scaling is None
        self.ks1, self.st1 = sc["kernel_size"], sc["kernel_stride"]      # tier 1 (scores)
        self.ks2, self.st2 = 4 * self.ks1, 4 * self.st1                  # tier 2 (normaliser)
        self.bs, self.init, self.dense_len = sc["block_size"], sc["init_blocks"], sc["dense_len"]
        assert self.bs % self.st1 == 0 and self.ks1 % self.st1 == 0 and sc["window_size"] % self.bs == 0
        self.local = sc["window_size"] // self.bs
        self.topk = sc["topk"] + self.local                              # effective top-k
        assert self.topk >= self.init + self.local + 1, "forced blocks must fit in the top-k"
        self.res = self.scale_depth / math.sqrt(self.num_hidden_layers)
        self.logit_div = self.hidden_size / self.dim_model_base
        d_l = self.lightning_head_dim
        self.lscale = {"1/sqrt(d)": d_l ** -0.5, "1/d": 1.0 / d_l}.get(self.lightning_scale, 1.0)

    def is_sparse(self, i):
        return self.mixer_types[i] == SPARSE


# ---------------------------------------------------------------- small pieces
def bf16_bits(x):
    """float array -> uint16 BF16 bits, round to nearest even."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bits_bf16(b):
    return (b.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16(x):
    return bits_bf16(bf16_bits(x)).reshape(np.shape(x))


ident = lambda x: x
sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))


def rmsnorm(x, w, eps, R=ident):
    return R(R(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)) * w)


def slopes(n):
    """Per-head decay rates; head h keeps exp(-slopes[h]) of its state per token."""
    p = 1 << (n.bit_length() - 1)                     # largest power of two <= n
    s = [2.0 ** (-8.0 * (i + 1) / p) for i in range(p)]
    if p < n:
        s += [2.0 ** (-8.0 * (i + 1) / (2 * p)) for i in range(0, 2 * p, 2)][: n - p]
    return np.array(s)


def rope(x, pos, theta):
    """x [T, heads, d]; pair (i, i+d/2). Frequencies and angles are rounded to FP32 as upstream."""
    d = x.shape[-1]
    inv = (1.0 / theta ** (np.arange(0, d, 2) / d)).astype(np.float32)
    ang = (np.asarray(pos, np.float32)[:, None] * inv[None, :]).astype(np.float64)[:, None, :]
    c, s = np.cos(ang), np.sin(ang)
    a, b = x[..., : d // 2], x[..., d // 2:]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def n_rows(n, ks, st):
    """Compressed rows available once n tokens exist (complete windows only)."""
    return 0 if n < ks else (n - ks) // st + 1


def pool_window(cfg, b, n1):
    """Half-open range of tier-1 rows whose score feeds block b."""
    r, pad = cfg.bs // cfg.st1, cfg.ks1 // cfg.st1 - 1
    return max(b * r - pad, 0), min(b * r + r, n1)


def forced(cfg, b, qb):
    return b < cfg.init or qb - cfg.local <= b <= qb


def mlp(W, p, x, R):
    g, u = R(x @ W[p + "mlp.gate_proj.weight"].T), R(x @ W[p + "mlp.up_proj.weight"].T)
    return R(R(R(g * sigmoid(g)) * u) @ W[p + "mlp.down_proj.weight"].T)


def project(W, p, x, heads, kvh, d, R):
    q = R(x @ W[p + "q_proj.weight"].T).reshape(-1, heads, d)
    k = R(x @ W[p + "k_proj.weight"].T).reshape(-1, kvh, d)
    v = R(x @ W[p + "v_proj.weight"].T).reshape(-1, kvh, d)
    return q, k, v


def lightning_qkv(cfg, W, p, x, pos, R):
    nh, nkv, d = cfg.lightning_nh, cfg.lightning_nkv, cfg.lightning_head_dim
    q, k, v = project(W, p, x, nh, nkv, d, R)
    if cfg.qk_norm:
        q = rmsnorm(q, W[p + "q_norm.weight"], cfg.rms_norm_eps, R)
        k = rmsnorm(k, W[p + "k_norm.weight"], cfg.rms_norm_eps, R)
    if cfg.lightning_use_rope:
        q, k = R(rope(q, pos, cfg.rope_theta)), R(rope(k, pos, cfg.rope_theta))
    return q, np.repeat(k, nh // nkv, 1), np.repeat(v, nh // nkv, 1)


def gated_out(W, p, x, o, gate, R):
    if gate:
        o = R(o * R(sigmoid(R(x @ W[p + gate].T))))
    return R(o @ W[p + "o_proj.weight"].T)


def lightning_out(cfg, W, p, x, o, R):
    o = R(o.reshape(len(x), -1))
    if cfg.use_output_norm:
        o = rmsnorm(o, W[p + "o_norm.weight"], cfg.rms_norm_eps, R)
    return gated_out(W, p, x, o, cfg.use_output_gate and "z_proj.weight", R)


def sparse_qkv(cfg, W, p, x, pos, R):
    q, k, v = project(W, p, x, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, R)
    if cfg.attn_use_rope:
        q, k = R(rope(q, pos, cfg.rope_theta)), R(rope(k, pos, cfg.rope_theta))
    return q, k, v


def sparse_out(cfg, W, p, x, o, R):
    return gated_out(W, p, x, R(o.reshape(len(x), -1)), cfg.attn_use_output_gate and "o_gate.weight", R)


def head_logits(cfg, W, h, R):
    h = rmsnorm(h, W["model.norm.weight"], cfg.rms_norm_eps, R)
    w = W["model.embed_tokens.weight" if cfg.tie_word_embeddings else "lm_head.weight"]
    return h, R(R(h / cfg.logit_div) @ w.T)


# ---------------------------------------------------------------- whole-sequence path
def sparse_attn_full(cfg, q, k, v, R):
    """All positions at once. Returns o [T,heads,d], blocks[t][kvh] (None where dense) and
    gaps[t][kvh]: relative score gap between the last chosen and the first dropped block."""
    T, H, d = q.shape
    nkv, G = k.shape[1], H // k.shape[1]
    t = np.arange(T); n = t + 1; sc = d ** -0.5
    o = np.zeros_like(q)
    picks, gaps = [[None] * nkv for _ in t], [[None] * nkv for _ in t]
    nb = (T + cfg.bs - 1) // cfg.bs; blk = t // cfg.bs
    for g in range(nkv):
        qg, kg, vg = q[:, g * G:(g + 1) * G].transpose(1, 0, 2), k[:, g], v[:, g]
        allow = np.tril(np.ones((T, T), bool))
        if T >= max(cfg.dense_len, 1):
            n1 = n_rows(T, cfg.ks1, cfg.st1); n2 = n_rows(T, cfg.ks2, cfg.st2)
            k1 = R(np.array([kg[j * cfg.st1: j * cfg.st1 + cfg.ks1].mean(0) for j in range(n1)]).reshape(n1, d))
            k2 = R(np.array([kg[j * cfg.st2: j * cfg.st2 + cfg.ks2].mean(0) for j in range(n2)]).reshape(n2, d))
            vis1 = (np.arange(n1) * cfg.st1 + cfg.ks1)[None] <= n[:, None]
            vis2 = (np.arange(n2) * cfg.st2 + cfg.ks2)[None] <= n[:, None]
            s1 = (qg @ k1.T) * sc if n1 else np.zeros((G, T, 0))
            s2 = np.where(vis2, (qg @ k2.T) * sc if n2 else np.zeros((G, T, 0)), -np.inf)
            m = s2.max(-1, initial=-np.inf, keepdims=True)
            ok = np.isfinite(m)                                   # any tier-2 row visible?
            m = np.where(ok, m, 0.0)
            lse = np.where(ok, m + np.log(np.where(ok, np.exp(s2 - m).sum(-1, keepdims=True), 1.0)), np.inf)
            P = np.where(vis1, np.exp(s1 - lse), 0.0).sum(0)      # [T, n1]; zeros if no tier-2 row
            pooled = np.full((T, nb), -np.inf)
            for b in range(nb):
                lo, hi = pool_window(cfg, b, n1)
                if hi > lo:
                    w = np.where(vis1[:, lo:hi], P[:, lo:hi], -np.inf)
                    pooled[:, b] = w.max(-1)
            for i in range(T):
                if n[i] < cfg.dense_len:
                    continue
                qb = blk[i]
                s = pooled[i, : qb + 1].copy()
                for b in range(qb + 1):
                    if forced(cfg, b, qb):
                        s[b] = np.inf
                order = np.lexsort((np.arange(qb + 1), -s))       # score desc, then index asc
                sel = np.sort(order[: min(cfg.topk, qb + 1)])
                picks[i][g] = [int(b) for b in sel]
                allow[i] &= np.isin(blk, sel)
                if qb + 1 > cfg.topk:
                    a, b = s[order[cfg.topk - 1]], s[order[cfg.topk]]
                    gaps[i][g] = min(1.0, float(1.0 - b / a)) if np.isfinite(a) and a > 0 else float(a > b)
        S = np.where(allow, (qg @ kg.T) * sc, -np.inf)
        E = np.exp(S - S.max(-1, keepdims=True))
        o[:, g * G:(g + 1) * G] = ((E / E.sum(-1, keepdims=True)) @ vg).transpose(1, 0, 2)
    return o, picks, gaps


def lightning_full(cfg, q, k, v):
    t = np.arange(len(q)); lag = t[:, None] - t[None, :]
    sl = slopes(cfg.lightning_nh); o = np.zeros(q.shape)
    for h in range(cfg.lightning_nh):
        D = np.where(lag >= 0, np.exp(-sl[h] * np.maximum(lag, 0)), 0.0)
        o[:, h] = ((q[:, h] @ k[:, h].T) * cfg.lscale * D) @ v[:, h]
    return o


def forward(cfg, W, tokens, hidden=False, blocks=False, bf16_acts=False):
    """Logits for every position. Returns dict(logits[, hidden][, blocks, gaps]).
    hidden: [embedding output, layer 0 output, ..., final-norm output], each [T, H].
    blocks, gaps: {layer: x[t][kvh]}, see sparse_attn_full.
    bf16_acts rounds at the upstream rounding points, to see how far BF16 drifts."""
    R = bf16 if bf16_acts else ident
    x = R(W["model.embed_tokens.weight"][np.asarray(tokens)] * cfg.scale_emb)
    pos = np.arange(len(x)); hs, bl, gp = [x], {}, {}
    for i in range(cfg.num_hidden_layers):
        p = f"model.layers.{i}."; a = p + "self_attn."
        y = rmsnorm(x, W[p + "input_layernorm.weight"], cfg.rms_norm_eps, R)
        if cfg.is_sparse(i):
            q, k, v = sparse_qkv(cfg, W, a, y, pos, R)
            o, bl[i], gp[i] = sparse_attn_full(cfg, q, k, v, R)
            y = sparse_out(cfg, W, a, y, o, R)
        else:
            q, k, v = lightning_qkv(cfg, W, a, y, pos, R)
            y = lightning_out(cfg, W, a, y, lightning_full(cfg, q, k, v), R)
        x = R(x + R(y * cfg.res))
        y = rmsnorm(x, W[p + "post_attention_layernorm.weight"], cfg.rms_norm_eps, R)
        x = R(x + R(mlp(W, p, y, R) * cfg.res)); hs.append(x)
    h, logits = head_logits(cfg, W, x, R); hs.append(h)
    out = dict(logits=logits)
    if hidden: out["hidden"] = hs
    if blocks: out.update(blocks=bl, gaps=gp)
    return out


# ---------------------------------------------------------------- token-by-token path
class Decoder:
    """One sequence, one token per step, with caches. step() -> dict(logits, hidden, blocks)."""
    def __init__(self, cfg, W):
        self.cfg, self.W, self.n = cfg, W, 0
        self.st = []
        for i in range(cfg.num_hidden_layers):
            if cfg.is_sparse(i):
                self.st.append(dict(k=[], v=[], k1=[], k2=[]))
            else:
                d = cfg.lightning_head_dim
                self.st.append(np.zeros((cfg.lightning_nh, d, d)))
        self.decay = np.exp(-slopes(cfg.lightning_nh))[:, None, None]

    def _sparse(self, c, q, k, v):
        cfg, n, d = self.cfg, self.n, self.cfg.head_dim
        nkv = cfg.num_key_value_heads; G = cfg.num_attention_heads // nkv; sc = d ** -0.5
        c["k"].append(k); c["v"].append(v)
        for key, ks, st in (("k1", cfg.ks1, cfg.st1), ("k2", cfg.ks2, cfg.st2)):
            if n >= ks and (n - ks) % st == 0:          # the newest token completes a window
                c[key].append(sum(c["k"][n - ks: n]) / ks)
        o, picks = [], []
        for g in range(nkv):
            if n < cfg.dense_len:
                sel, toks = None, range(n)
            else:
                qb = (n - 1) // cfg.bs; score = [0.0] * len(c["k1"])
                if c["k2"]:
                    for h in range(g * G, (g + 1) * G):
                        z = [float(q[h] @ r[g]) * sc for r in c["k2"]]
                        m = max(z); lse = m + math.log(sum(math.exp(a - m) for a in z))
                        for j, r in enumerate(c["k1"]):
                            score[j] += math.exp(float(q[h] @ r[g]) * sc - lse)
                bsc = []
                for b in range(qb + 1):
                    lo, hi = pool_window(cfg, b, len(score))
                    bsc.append(math.inf if forced(cfg, b, qb) else max(score[lo:hi], default=-math.inf))
                sel = sorted(sorted(range(qb + 1), key=lambda b: (-bsc[b], b))[: cfg.topk])
                toks = [t for b in sel for t in range(b * cfg.bs, min((b + 1) * cfg.bs, n))]
            picks.append(sel)
            K = np.array([c["k"][t][g] for t in toks]); V = np.array([c["v"][t][g] for t in toks])
            for h in range(g * G, (g + 1) * G):
                s = (K @ q[h]) * sc; e = np.exp(s - s.max())
                o.append((e @ V) / e.sum())
        return np.array(o), picks

    def step(self, token):
        cfg, W, R = self.cfg, self.W, ident
        pos = [self.n]; self.n += 1
        x = W["model.embed_tokens.weight"][[token]] * cfg.scale_emb; hs, bl = [x[0]], {}
        for i in range(cfg.num_hidden_layers):
            p = f"model.layers.{i}."; a = p + "self_attn."
            y = rmsnorm(x, W[p + "input_layernorm.weight"], cfg.rms_norm_eps)
            if cfg.is_sparse(i):
                q, k, v = sparse_qkv(cfg, W, a, y, pos, R)
                o, bl[i] = self._sparse(self.st[i], q[0], k[0], v[0])
                y = sparse_out(cfg, W, a, y, o[None], R)
            else:
                q, k, v = lightning_qkv(cfg, W, a, y, pos, R)
                self.st[i] = self.st[i] * self.decay + k[0][:, :, None] * v[0][:, None, :]
                o = np.einsum("hk,hkv->hv", q[0] * cfg.lscale, self.st[i])
                y = lightning_out(cfg, W, a, y, o[None], R)
            x = x + y * cfg.res
            y = rmsnorm(x, W[p + "post_attention_layernorm.weight"], cfg.rms_norm_eps)
            x = x + mlp(W, p, y, R) * cfg.res; hs.append(x[0])
        h, logits = head_logits(cfg, W, x, R); hs.append(h[0])
        return dict(logits=logits[0], hidden=hs, blocks=bl)


# ---------------------------------------------------------------- random models and files
def tensor_shapes(cfg):
    """Every checkpoint tensor name with its shape, in file order."""
    H, I, V, d = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size, cfg.head_dim
    out = {"model.embed_tokens.weight": (V, H)}
    for i in range(cfg.num_hidden_layers):
        p = f"model.layers.{i}."; a = p + "self_attn."
        out[p + "input_layernorm.weight"] = (H,)
        if cfg.is_sparse(i):
            qd, kd, D = cfg.num_attention_heads * d, cfg.num_key_value_heads * d, d
            gate = "o_gate.weight" if cfg.attn_use_output_gate else None
        else:
            D = cfg.lightning_head_dim
            qd, kd = cfg.lightning_nh * D, cfg.lightning_nkv * D
            gate = "z_proj.weight" if cfg.use_output_gate else None
        out[a + "q_proj.weight"], out[a + "k_proj.weight"] = (qd, H), (kd, H)
        out[a + "v_proj.weight"], out[a + "o_proj.weight"] = (kd, H), (H, qd)
        if gate: out[a + gate] = (qd, H)
        if not cfg.is_sparse(i):
            if cfg.qk_norm: out[a + "q_norm.weight"] = out[a + "k_norm.weight"] = (D,)
            if cfg.use_output_norm: out[a + "o_norm.weight"] = (qd,)
        out[p + "post_attention_layernorm.weight"] = (H,)
        out[p + "mlp.gate_proj.weight"] = out[p + "mlp.up_proj.weight"] = (I, H)
        out[p + "mlp.down_proj.weight"] = (H, I)
    out["model.norm.weight"] = (H,)
    if not cfg.tie_word_embeddings: out["lm_head.weight"] = (V, H)
    return out


def make_model(cfg, seed=0, qk_gain=3.0):
    """Seeded random weights, rounded to BF16. qk_gain sharpens the sparse layers' q and k so
    that block scores differ clearly (fewer near-ties when another precision is compared)."""
    rng = np.random.default_rng(seed); W = {}
    for name, shape in tensor_shapes(cfg).items():
        w = rng.standard_normal(shape)
        if len(shape) == 1:
            w = 1.0 + 0.1 * w
        elif "embed_tokens" in name:
            w = w / cfg.scale_emb
        else:
            w = w / math.sqrt(shape[1])
            if ("q_proj" in name or "k_proj" in name) and cfg.is_sparse(int(name.split(".")[2])):
                w = w * qk_gain
        if "lm_head" in name:
            w = w * cfg.logit_div
        W[name] = bf16(w)
    return W


def make_tokens(cfg, n, seed=0, run=None):
    """Random tokens in runs that share a small alphabet, so that key blocks differ in the mean."""
    rng = np.random.default_rng(seed + 1); run = run or cfg.bs; out = []
    while len(out) < n:
        pool = rng.integers(0, cfg.vocab_size, 3)
        out += [int(a) for a in rng.choice(pool, int(rng.integers(run // 2, run + 1)))]
    return out[:n]


def write_hf(path, cfg, W):
    """config.json + model.safetensors (BF16). Layout: u64 LE header size, JSON header, data."""
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(cfg.d, f, indent=2)
    head, off = {"__metadata__": {"format": "pt"}}, 0
    for name, w in W.items():
        head[name] = dict(dtype="BF16", shape=list(w.shape), data_offsets=[off, off + 2 * w.size])
        off += 2 * w.size
    js = json.dumps(head, separators=(",", ":")).encode()
    js += b" " * (-len(js) % 8)
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(js))); f.write(js)
        for w in W.values():
            f.write(bf16_bits(w).astype("<u2").tobytes())


def read_hf(path):
    with open(os.path.join(path, "config.json")) as f:
        cfg = Cfg(**json.load(f))
    with open(os.path.join(path, "model.safetensors"), "rb") as f:
        n, = struct.unpack("<Q", f.read(8)); head = json.loads(f.read(n)); raw = f.read()
    W = {}
    for name, e in head.items():
        if name == "__metadata__": continue
        assert e["dtype"] == "BF16"; a, b = e["data_offsets"]
        W[name] = bits_bf16(np.frombuffer(raw[a:b], "<u2")).reshape(e["shape"])
    return cfg, W


# ---------------------------------------------------------------- small configurations
def small_config(kind="tiny"):
    if kind == "tiny":      # group 2, odd lightning head count, grouped lightning kv, short blocks
        return Cfg(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=5,
                   num_attention_heads=4, num_key_value_heads=2, head_dim=16, dim_model_base=16,
                   lightning_nh=6, lightning_nkv=3, lightning_head_dim=16, eos_token_id=[2, 96],
                   mixer_types=[SPARSE, LIGHTNING, LIGHTNING, SPARSE, LIGHTNING],
                   sparse_config=dict(kernel_size=8, kernel_stride=4, block_size=16, window_size=32,
                                      topk=3, init_blocks=1, dense_len=60))
    if kind == "always":    # no dense phase at all: selection from the first token
        c = small_config("tiny").d
        return Cfg(**{**c, "sparse_config": {**c["sparse_config"], "dense_len": 0}})
    if kind == "geom":      # released geometry (d=128, 16 heads a group, 32/16/64), one group, short window
        return Cfg(vocab_size=320, hidden_size=2048, intermediate_size=256, num_hidden_layers=2,
                   num_attention_heads=16, num_key_value_heads=1, head_dim=128, eos_token_id=[2, 319],
                   lightning_nh=4, lightning_nkv=4, mixer_types=[SPARSE, LIGHTNING],
                   sparse_config=dict(window_size=128, topk=3, dense_len=320))
    raise SystemExit("unknown kind: " + kind)


def selftest():
    assert np.allclose(slopes(32), [2 ** (-(h + 1) / 4) for h in range(32)])
    assert np.allclose(slopes(6), [.25, .0625, 2 ** -6, 2 ** -8, .5, .125])
    for kind, n, seed in (("tiny", 330, 0), ("tiny", 330, 7), ("always", 250, 3), ("geom", 520, 1)):
        cfg = small_config(kind); W = make_model(cfg, seed); toks = make_tokens(cfg, n, seed)
        full = forward(cfg, W, toks, hidden=True, blocks=True)
        dec, worst, hworst, sel, drop = Decoder(cfg, W), 0.0, 0.0, 0, 0
        for t, tok in enumerate(toks):
            r = dec.step(tok)
            worst = max(worst, np.abs(r["logits"] - full["logits"][t]).max())
            hworst = max(hworst, max(np.abs(a - b[t]).max() for a, b in zip(r["hidden"], full["hidden"])))
            for i, b in r["blocks"].items():
                assert b == full["blocks"][i][t], (kind, i, t, b, full["blocks"][i][t])
                for s in b:
                    if s is not None:
                        sel += 1; drop += len(s) < t // cfg.bs + 1
        scale = np.abs(full["logits"]).max()
        assert worst < 1e-9 * max(1.0, scale) and hworst < 1e-9, (kind, worst, hworst)
        cut = n * 2 // 3                                  # a prefix must not depend on what follows
        pre = forward(cfg, W, toks[:cut])["logits"]
        assert np.abs(pre - full["logits"][:cut]).max() < 1e-9 * max(1.0, scale)
        lo = forward(cfg, W, toks, blocks=True, bf16_acts=True)
        mg = np.array([x for l in full["gaps"].values() for r in l for x in r if x is not None])
        flips = sum(a != b for i in full["blocks"] for x, y in zip(full["blocks"][i], lo["blocks"][i])
                    for a, b in zip(x, y))
        rel = np.linalg.norm(lo["logits"] - full["logits"]) / np.linalg.norm(full["logits"])
        print(f"{kind:7s} seed {seed} T={n}: max |dlogit| {worst:.1e} (|logit| <= {scale:.1f}), hidden {hworst:.1e}; "
              f"{sel} selections, {drop} drop blocks, {np.sum(mg == 0)} exact ties at the cut, other margins "
              f"median {np.median(mg[mg > 0]):.2f} min {mg[mg > 0].min():.1e}; "
              f"bf16 acts: {flips} selections differ, logits rel {rel:.1e}", flush=True)
    import tempfile
    with tempfile.TemporaryDirectory() as d:
        write_hf(d, cfg, W); c2, W2 = read_hf(d)
        assert c2.d == cfg.d and W2.keys() == W.keys() and all((W2[k] == W[k]).all() for k in W)
    total = sum(int(np.prod(s)) for s in tensor_shapes(Cfg()).values())
    assert total == 9477203968, total
    print("file round trip ok; released shape list holds", total, "parameters\nselftest passed")


def export(path, kind, seed, n):
    """Random model plus tokens.i32, logits.f32 [T, vocab], hidden.f32 [L+2, T, H], and
    blocks.json {blocks, gaps}; a reader may accept another choice where the gap is tiny."""
    cfg = small_config(kind); W = make_model(cfg, seed); toks = make_tokens(cfg, n, seed)
    write_hf(path, cfg, W)
    r = forward(cfg, W, toks, hidden=True, blocks=True)
    np.array(toks, "<i4").tofile(os.path.join(path, "tokens.i32"))
    r["logits"].astype("<f4").tofile(os.path.join(path, "logits.f32"))
    np.array(r["hidden"]).astype("<f4").tofile(os.path.join(path, "hidden.f32"))
    with open(os.path.join(path, "blocks.json"), "w") as f:
        json.dump(dict(blocks=r["blocks"], gaps=r["gaps"]), f)
    print(f"wrote {path}: {len(W)} tensors, {n} tokens, logits {r['logits'].shape}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("cmd", choices=["selftest", "export"]); ap.add_argument("dir", nargs="?")
    ap.add_argument("--kind", default="tiny", choices=["tiny", "always", "geom"])
    ap.add_argument("--seed", type=int, default=0); ap.add_argument("--tokens", type=int, default=330)
    a = ap.parse_args()
    if a.cmd == "export" and not a.dir:
        sys.exit("export needs a directory")
    selftest() if a.cmd == "selftest" else export(a.dir, a.kind, a.seed, a.tokens)
