#!/usr/bin/env python3
"""Make tests/data/vectors: small models with the results that the float64 reference computes for them.

    python3 -m venv venv && venv/bin/pip install numpy && venv/bin/python tools/make_vectors.py

The same files come out on every machine but for the last bits of the numbers. Each case is a folder:

    config.json, tokens.i32 [T]
    logits.f32 [rows, vocab]               of every `logits`-th position, counted from 0
    hidden.f32 [layers + 2, rows, hidden]  of every `hidden`-th position; embedding, layers, final norm
    blocks.json                            {blocks, gaps} by sparse layer, position and K/V head: null stands
                                           for dense attention, or for nothing dropped
    model.safetensors                      BF16; not for the synthetic cases, whose weights
                                           sala_options.synthetic makes again from config.json and a seed

The synthetic weights are made here by an implementation of their own, which so tests the generator in sala.h.
"""
import json
import os
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "reference"))
import sala_ref as ref  # noqa: E402

OUT = os.path.join(HERE, "..", "tests", "data", "vectors")


def plain_config():
    """Every option of the architecture the other way round: rotated sparse layers of another width than the
    lightning ones, no norms or gates in the mixers, tied embeddings, scale 1/d, no window but the own block."""
    tiny = ref.small_config("tiny").d
    return ref.Cfg(**{**tiny, "vocab_size": 101, "hidden_size": 96, "num_attention_heads": 3, "head_dim": 32,
                      "num_key_value_heads": 1, "lightning_nh": 2, "lightning_nkv": 2, "lightning_head_dim": 16,
                      "attn_use_rope": True, "attn_use_output_gate": False, "lightning_use_rope": False,
                      "lightning_scale": "1/d", "qk_norm": False, "use_output_gate": False,
                      "use_output_norm": False, "tie_word_embeddings": True, "num_hidden_layers": 3,
                      "rope_theta": 500.0, "rms_norm_eps": 1e-5, "dim_model_base": 32, "scale_emb": 3,
                      "mixer_types": [ref.LIGHTNING, ref.SPARSE, ref.SPARSE],
                      "sparse_config": {**tiny["sparse_config"], "kernel_size": 12, "kernel_stride": 4,
                                        "block_size": 32, "window_size": 0, "topk": 4, "init_blocks": 2,
                                        "dense_len": 40}})


# name: (config, seed, tokens, are the weights synthetic, stride of logits, of hidden states)
CASES = {
    "tiny": (lambda: ref.small_config("tiny"), 11, 330, False, 1, 5),
    "always": (lambda: ref.small_config("always"), 12, 250, False, 1, 5),
    "geom": (lambda: ref.small_config("geom"), 1, 520, True, 5, 65),
    "plain": (plain_config, 2, 400, True, 3, 7),
}

# ---- the generator of sala.h, again ----

LAYER_TENSORS = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_gate",
                 "self_attn.o_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
                 "self_attn.k_norm", "self_attn.o_norm", "self_attn.z_proj", "self_attn.o_proj",
                 "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SPARSE_ONLY, LIGHTNING_ONLY = range(1, 6), range(6, 14)  # places in this list
GOLDEN = 0x9E3779B97F4A7C15
M64 = (1 << 64) - 1


def mix64(z):
    """splitmix64's output function on an array of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def tensor_numbers(cfg):
    """Checkpoint name -> the number that the generator gives it."""
    numbers = {"model.embed_tokens.weight": 0}
    for layer in range(cfg.num_hidden_layers):
        for place, name in enumerate(LAYER_TENSORS):
            if place in (LIGHTNING_ONLY if cfg.is_sparse(layer) else SPARSE_ONLY):
                continue
            numbers[f"model.layers.{layer}.{name}.weight"] = 1 + layer * len(LAYER_TENSORS) + place
    last = cfg.num_hidden_layers * len(LAYER_TENSORS)
    numbers["model.norm.weight"], numbers["lm_head.weight"] = last + 1, last + 2
    return numbers


def synthetic_tensor(cfg, name, shape, number, seed):
    """BF16(mean + scale * u), u = (16 bits of a hash as a signed integer + 1/2) / 2^15."""
    sigma, mean = shape[-1] ** -0.5, 0.0
    if len(shape) == 1:
        sigma, mean = 0.1, 1.0
    elif "embed_tokens" in name:
        sigma = 1.0 / cfg.scale_emb
    elif "lm_head" in name:
        sigma *= float(np.float32(cfg.logit_div))
    elif name.split(".")[-2] in ("q_proj", "k_proj") and cfg.is_sparse(int(name.split(".")[2])):
        sigma *= 3
    scale = np.float32(sigma * 3 ** 0.5)
    count = int(np.prod(shape))
    with np.errstate(over="ignore"):
        start = mix64(np.array([(seed + number) & M64], np.uint64))
        groups = np.arange((count + 3) // 4, dtype=np.uint64) * np.uint64(GOLDEN)
        hashes = mix64(start + groups)
    u = (hashes.view("<i2")[:count].astype(np.float32) + np.float32(0.5)) / np.float32(32768)
    return ref.bf16(np.float32(mean) + scale * u).reshape(shape)


def synthetic_model(cfg, seed):
    numbers = tensor_numbers(cfg)
    return {name: synthetic_tensor(cfg, name, shape, numbers[name], seed)
            for name, shape in ref.tensor_shapes(cfg).items()}


# ---- the files ----


def make(name):
    config, seed, count, synthetic, logits_step, hidden_step = CASES[name]
    cfg = config()
    folder = os.path.join(OUT, name)
    os.makedirs(folder, exist_ok=True)
    weights = synthetic_model(cfg, seed) if synthetic else ref.make_model(cfg, seed)
    if synthetic:
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(cfg.d, f, indent=2)
    else:
        ref.write_hf(folder, cfg, weights)
    tokens = ref.make_tokens(cfg, count, seed)
    result = ref.forward(cfg, weights, tokens, hidden=True, blocks=True)
    np.array(tokens, "<i4").tofile(os.path.join(folder, "tokens.i32"))
    result["logits"][::logits_step].astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    np.array(result["hidden"])[:, ::hidden_step].astype("<f4").tofile(os.path.join(folder, "hidden.f32"))
    gaps = {layer: [[None if g is None else float(f"{g:.3g}") for g in row] for row in rows]
            for layer, rows in result["gaps"].items()}
    with open(os.path.join(folder, "blocks.json"), "w") as f:
        json.dump(dict(blocks=result["blocks"], gaps=gaps), f, separators=(",", ":"))
    flat = [g for rows in result["gaps"].values() for row in rows for g in row if g is not None]
    drift = ref.forward(cfg, weights, tokens, bf16_acts=True)["logits"] - result["logits"]
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    print(f"{name}: {count} tokens, {size / 1e6:.2f} MB; {len(flat)} selections drop blocks, {flat.count(0.0)} at an "
          f"exact tie; BF16 activations move the logits by {np.linalg.norm(drift) / np.linalg.norm(result['logits']):.1%}")


def check():
    """Make everything again beside the committed files and compare: 1 when anything differs."""
    global OUT
    committed, wrong = OUT, 0
    with tempfile.TemporaryDirectory() as OUT:
        for case in CASES:
            make(case)
            for name in sorted(os.listdir(os.path.join(OUT, case))):
                old, new = (open(os.path.join(d, case, name), "rb").read() for d in (committed, OUT))
                if name.endswith(".f32"):  # sums may be ordered otherwise on another machine
                    same = len(old) == len(new) and np.allclose(np.frombuffer(old, "<f4"), np.frombuffer(new, "<f4"),
                                                                rtol=1e-4, atol=1e-5)
                elif name == "blocks.json":
                    same = json.loads(old)["blocks"] == json.loads(new)["blocks"]
                else:
                    same = old == new
                if not same:
                    print(f"{case}/{name} is not what this program makes")
                    wrong = 1
    return wrong


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    for case in sys.argv[1:] or CASES:
        make(case)
