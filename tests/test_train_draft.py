#!/usr/bin/env python3
"""Tests of tools/train_draft.py and tools/draft_model.py: `make draft-test`. They need PyTorch (on the CPU) and
build/draft_lib.so, which is sala.h; they end with "N passed, N failed"."""
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback

try:
    import numpy as np
    import torch
except ImportError as e:
    sys.exit(f"test_train_draft: {e}: install PyTorch (pip install torch) or name a Python that has it: "
             "make draft-test PYTHON=...")

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, os.path.join(ROOT, "tools"))
import draft_model as dm  # noqa: E402
import train_draft as td  # noqa: E402

MODEL = os.path.join(ROOT, "models", "sala-tiny")
AUX, H, V = [1, 3, 4], 256, 2048
TEXT = [1] + [int(x) for x in np.random.default_rng(5).integers(3, 2000, 150)]


class Engine:
    lib = None

    def __init__(self, draft=None, tree="7,2,15"):
        if not Engine.lib:
            Engine.lib = ctypes.CDLL(os.path.join(os.environ.get("BUILD", "build"), "draft_lib.so"))
            Engine.lib.lib_open.restype = ctypes.c_void_p
            Engine.lib.lib_weight.restype = ctypes.c_int64
        error = ctypes.create_string_buffer(2048)
        self.s = Engine.lib.lib_open(MODEL.encode(), draft and draft.encode(), tree.encode(), error)
        if not self.s:
            raise RuntimeError(error.raw[4:].split(b"\0")[0].decode())
        self.s = ctypes.c_void_p(self.s)

    def close(self):
        Engine.lib.lib_close(self.s)

    def rows(self, ids):
        out = np.zeros((10, len(ids), H), np.float32)
        assert Engine.lib.lib_rows(self.s, at(np.array(ids, np.int32)), len(ids), at(out)) == 0
        return out

    def weight(self, name, n, k):
        codes, alpha = np.zeros((n, k), np.float32), np.zeros(n, np.float32)
        assert Engine.lib.lib_weight(self.s, name.encode(), at(codes), at(alpha)) == n * k
        return codes, alpha

    def generate(self, ids, most, trees=0):
        out, t, f = np.zeros(most, np.int32), np.zeros((trees, 98), np.int32), np.zeros((trees, 32), np.float32)
        n = Engine.lib.lib_generate(self.s, at(np.array(ids, np.int32)), len(ids), at(out), most,
                                    at(t) if trees else None, at(f), trees)
        assert n >= 0
        return [int(x) for x in out[:n]], [(x, f[i]) for i, x in enumerate(t) if x[1]]


def at(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def embedding():
    return td.target_matrix(MODEL, "model.embed_tokens.weight")


def random_head(vocab=1000, seed=1, dtype=torch.bfloat16, aux=AUX):
    c = dm.Config(H, 384, 2, 1, 128, V, vocab, list(aux))
    ids = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(V)[:vocab]))
    head = dm.Head(c, embedding(), ids, "cpu", dtype)
    head.init(seed)
    return head


# ---- NVFP4 ----


def test_numbers():
    """E2M1 and E4M3 as sala_f32_e2m1 and sala_f32_e4m3 round them: every kind of tie, and random bits."""
    Engine(None).close()
    r = np.random.default_rng(1)
    x = np.concatenate([np.arange(-4000, 4000) / 512, np.arange(0, 3000) / 16384, 2.0 ** np.arange(-12, 9),
                        (r.integers(0, 2 ** 32, 200000, dtype=np.uint64).astype(np.uint32)).view(np.float32)])
    x = x[np.isfinite(x)].astype(np.float32)
    two, four = np.zeros_like(x), np.zeros_like(x)
    Engine.lib.lib_numbers(at(x), len(x), at(two), at(four))
    same(dm.round_e2m1(torch.from_numpy(x)).numpy(), two)
    same(dm.round_e4m3(torch.from_numpy(np.abs(x))).numpy(), four)


def same(a, b):
    a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
    assert a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all(), \
        f"{(a.view(np.uint32) != b.view(np.uint32)).sum()} of {a.size} differ"


def test_golden_block():
    """The block of nvfp4.md 1.3: scales 0x6a and 0x70 of max 6 and max 4; 6 wins."""
    x = torch.tensor([.013, -.020, .0071, 0, -.0334, .0405, -.0009, .025, .0302, -.0118, .0164, -.0267, .0058, .0389,
                      -.0012, .0087])[None]
    divisor = torch.tensor(1536.0) / torch.tensor(0.125)
    for four, byte, error in ((False, 0x6a, 6.8720e-05), (True, 0x70, 7.1812e-05)):
        s, q = dm.fit_blocks(x, divisor, 1 / divisor, four)
        assert int(s.to(torch.float8_e4m3fn).view(torch.uint8)) == byte
        assert abs(float(dm.block_error(x, s, q, 1 / divisor)) / error - 1) < 1e-3
    assert float(dm.nvfp4(x, divisor)[1]) == 80


def test_qat_bits(folder):
    """What QAT multiplies with is, bit for bit, what the engine has loaded from the export; also with frozen scales."""
    head = random_head(dtype=torch.float32)
    head.quantised = True
    with torch.no_grad():
        head.master["lm_head"][3] = 0  # blocks of zeros, of one large number, of tiny ones
        head.master["fc"][5, :16] *= 1e-9
        head.master["fc"][6, 40] = 3
    for frozen in (False, True):
        if frozen:
            head.scales()
            head.frozen = True
            with torch.no_grad():
                head.master["midlayer.mlp.up_proj"] *= 1.9  # beyond the frozen scale's reach: saturates
        dm.export(head, folder, "nvfp4")
        e = Engine(folder)
        weights = head.weights()
        for name, shape in dm.shapes(head.c).items():
            w, scale = weights[name]
            codes, alpha = e.weight(name + ".weight", *(shape + (1,))[:2])
            same(codes.reshape(shape), w.detach().numpy())
            assert (scale is not None) == (len(shape) == 2)
            same(alpha, np.full_like(alpha, 1 if scale is None else float(scale)))
        e.close()


def test_straight_through():
    """Masters get the gradient that the quantised weights (codes * scale * tensor scale) would get."""
    torch.manual_seed(3)
    w, x = torch.randn(32, 64, requires_grad=True), torch.randn(5, 64)
    divisor = dm.nvfp4_divisor([w])
    g = torch.randn(5, 32)
    ((x @ dm.Through.apply(w, divisor).T / divisor) * g).sum().backward()
    assert torch.allclose(w.grad, g.T @ x, rtol=1e-4, atol=1e-5)
    q, s, scale = dm.nvfp4(w, divisor)
    share = float(((q.abs().amax(-1) == 4).float()).mean())
    assert 0.30 < share < 0.55, share  # nvfp4.md 2: about 45 % of a Gaussian's blocks take 4
    assert float(((q * s * scale).reshape(w.shape) - w).pow(2).mean() / w.pow(2).mean()) < 0.009


# ---- the head ----


def features_of(rows, aux=AUX):
    return torch.from_numpy(np.concatenate([rows[1 + a] for a in aux], -1)).to(torch.bfloat16)


def path_scores(head, features, ids, root, paths):
    """log q of each token of the paths below the root at position `root`: lists of them."""
    depth = max(len(p) for p in paths)
    tokens = torch.tensor([list(ids[:root + 1]) + p + [0] * (depth - len(p)) for p in paths])
    t = tokens.shape[1]
    f = torch.zeros(len(paths), t, 3 * H, dtype=torch.bfloat16)
    f[:, :root] = features[:root]
    position = torch.arange(t).expand(len(paths), t)
    slots = torch.full((len(paths), 1), root - 1)
    known = {int(x): i for i, x in enumerate(head.ids)}
    out, best = [[] for _ in paths], []
    with torch.no_grad():
        for k, z in enumerate(head.unroll(f, tokens, position, torch.zeros_like(tokens), slots, depth)):
            log_q = torch.log_softmax(z[:, 0], -1)
            best.append(log_q.topk(2, -1))
            for i, p in enumerate(paths):
                if k < len(p):
                    out[i].append(float(log_q[i, known[p[k]]]))
    return out, best


def check_trees(head, folder, fmt, tolerance):
    dm.export(head, folder, fmt)
    e = Engine(folder)
    answer, trees = e.generate(TEXT, 40, 12)
    ids = TEXT + answer
    features = features_of(e.rows(ids))
    e.close()
    assert len(trees) >= 8
    worst, firm = 0, 0
    for tree, score in trees:
        root, n = int(tree[0]), int(tree[1])
        token, parent = tree[2:2 + n], tree[34:34 + n]
        assert ids[root] == token[0] and n == 15, (root, n)
        paths = {0: []}
        for i in range(1, n):
            paths[i] = paths[int(parent[i])] + [int(token[i])]
        got, best = path_scores(head, features, ids, root, [paths[i] for i in range(1, n)])
        error = max(abs(sum(got[i - 1]) - float(score[i])) for i in range(1, n))
        worst = max(worst, error)
        top = best[0]
        margin = float(top.values[0, 0] - top.values[0, 1])
        if margin > 2 * tolerance:  # the greedy draft
            firm += 1
            first = max((i for i in range(1, n) if parent[i] == 0), key=lambda i: score[i])
            assert int(token[first]) == int(head.ids[top.indices[0, 0]]), "another greedy draft"
    assert worst < tolerance, f"log probabilities differ by {worst}"
    return worst, firm


def test_engine_bf16(folder):
    """The engine's trees, drawn by an exported head: every node's log probability, and the first greedy draft."""
    worst, firm = check_trees(random_head(), folder, "bf16", 0.12)
    assert firm >= 3, firm
    print(f"  largest difference of a path's log probability {worst:.4f}, {firm} firm greedy drafts")


def test_engine_nvfp4(folder):
    head = random_head(seed=2, aux=[2, 4, 5])  # also layers that do not begin with 1
    head.quantised = True
    global AUX
    kept, AUX = AUX, [2, 4, 5]
    try:
        features_of.__defaults__ = (AUX,)
        check_trees(head, folder, "nvfp4", 0.12)
    finally:
        AUX = kept
        features_of.__defaults__ = (AUX,)


if __name__ == "__main__":
    os.chdir(ROOT)
    torch.set_num_threads(2)
    passed = failed = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (sys.argv[1:] and not any(w in name for w in sys.argv[1:])):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                test(*[os.path.join(folder, "x")][:test.__code__.co_argcount])
                passed += 1
                print("ok", name)
            except Exception:
                failed += 1
                traceback.print_exc()
                print("FAILED", name)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)
