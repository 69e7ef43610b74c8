"""Tests of what makes sala-tiny that need torch: the model against the engine, training, evaluation, a rehearsal of
h200.sh. On the CPU, with tiny sizes.      python3 tools/tiny/test_torch.py [WORD...]    (make tiny-test)
SALA_FP32: the program built with -DSALA_ACT_FP32."""
import csv
import json
import os
import random
import subprocess
import sys
import tarfile
import time

import numpy as np

try:
    import torch
except ImportError:
    sys.exit("test_torch.py: torch is missing: pip install torch (the CPU's will do)")

import evaluate
import gen
import model
import test_tiny
import tok
import train

HERE, MODEL, SALA = test_tiny.HERE, test_tiny.MODEL, test_tiny.SALA
FP32 = os.path.abspath(os.environ.get("SALA_FP32", os.path.join(test_tiny.ROOT, "build", "sala_fp32")))
SMALL = ["--device", "cpu", "--no-compile", "--length", "256", "--long", "512", "--long-batch", "1", "--batch", "2",
         "--rows", "21", "--workers", "2", "--every", "1"]
torch.set_num_threads(1)


def story(tokens):
    """A needle's haystack and its question, of so many ids."""
    tk, r = tok.load(MODEL), random.Random(gen.EVAL_SEED + 5)
    return tk.encode(evaluate.prompt(gen.task(r, "needle", tokens, True).turns[0][0]))[-tokens:]


def engine(folder, program, ids, *options):
    np.array(ids, "<i4").tofile(folder + "/ids")
    subprocess.run([program, "logits", "-q", "-m", MODEL, "--tokens", folder + "/ids", "--out", folder + "/logits", *options],
                   check=True)
    return np.fromfile(folder + "/logits", "<f4").reshape(len(ids), -1)


def ours(ids, dtype=torch.float32, **more):
    net = model.load(MODEL + "/model.safetensors")
    with torch.no_grad():
        h, _ = net(model.pad([ids]), more.pop("mode", "sparse"), dtype, exact_ties=True, **more)
        return net.logits(h[0, :len(ids)]).float().numpy()


def clear(x, margin):
    top = np.sort(x, -1)
    return top[:, -1] - top[:, -2] > margin


def test_engine_fp32(folder):
    """Same numbers as the engine with FP32 activations, over blocks that are chosen; other blocks give others."""
    ids = story(1000)
    there, here = engine(folder, FP32, ids, "--dense-len", "64"), ours(ids, dense_len=64)
    assert np.abs(there - here).max() < 2e-3, np.abs(there - here).max()
    sure = clear(here, 5e-3)
    assert sure.mean() > 0.98 and (there.argmax(-1) == here.argmax(-1))[sure].all()
    dense = ours(ids, mode="dense")
    assert np.abs(there - dense)[832:].max() > 0.05, "the sparse rule changed nothing: the test is too short"


def test_engine(folder):
    """The engine as it is delivered, BF16 activations: close, and the same choices where they are clear."""
    ids = story(600)
    there, here = engine(folder, SALA, ids, "--dense-len", "64"), ours(ids, dense_len=64)
    assert np.abs(there - here).mean() < 0.06, np.abs(there - here).mean()
    sure = clear(here, 0.5)
    assert sure.mean() > 0.6 and (there.argmax(-1) == here.argmax(-1))[sure].all()
    half = ours(ids, dtype=torch.bfloat16, dense_len=64)  # rounds elsewhere than the engine, as little
    assert np.abs(half - here).mean() < 0.06, np.abs(half - here).mean()


def test_golden_prompts():
    """The choices of golden.json's short prompts, and the five best logits after each."""
    for p in evaluate.read(MODEL + "/golden.json")["prompts"]:
        n = len(p["prompt_ids"])
        if n < 1000:
            x = ours(p["prompt_ids"] + p["continuation_ids"])
            assert x[n - 1:-1].argmax(-1).tolist() == p["continuation_ids"], p["name"]
            assert np.abs(x[n - 1][p["top5_ids"]] - p["top5_logits"]).max() < 1e-4


def test_checkpoint(folder):
    model.write_safetensors(folder + "/w", model.read_safetensors(MODEL + "/model.safetensors"))
    assert test_tiny.same(folder + "/w", MODEL + "/model.safetensors")
    names = {k: tuple(v.shape) for k, v in model.Sala().state_dict().items()}
    assert names == {k: tuple(v.shape) for k, v in model.read_safetensors(folder + "/w").items()}
    with open(MODEL + "/config.json", encoding="utf-8") as f:
        assert json.load(f) == json.loads(json.dumps(model.CONFIG))


def test_orthogonal():
    """Newton-Schulz gives singular values near 1, whatever the shape."""
    torch.manual_seed(1)
    for shape in ((3, 24, 64), (2, 64, 24)):
        s = torch.linalg.svdvals(train.Optimizer.orthogonal(torch.randn(*shape)))
        assert 0.5 < s.min() and s.max() < 1.3, s


def trained(out, *options, fine=True):
    run = subprocess.run([sys.executable, HERE + "/train.py", out, "--budget", "200", *SMALL, *options],
                         capture_output=True, text=True)
    assert run.returncode == 0 or not fine, run.stderr
    return run


def log(out):
    with open(out + "/log.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_training(folder):
    """Steps from nothing lower the loss; a stopped run goes on; weights come in the release's layout."""
    trained(folder, "--steps", "3", "--rate", "0.5")  # the rate rises over 300 steps
    rows, first = log(folder), model.read_safetensors(folder + "/model.safetensors")
    assert [r["step"] for r in rows] == ["1", "2", "3"] and rows[0]["mode"] == "dense"
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) < 8, rows
    again = trained(folder, "--steps", "1")
    assert "going on from step 3" in again.stdout and log(folder)[-1]["step"] == "4"
    second = model.read_safetensors(folder + "/model.safetensors")
    assert set(second) == set(first) and any(not torch.equal(first[k], second[k]) for k in first)


def test_training_goes_on_from_weights(folder):
    """--init: the sparse rule at once, and a loss far below a beginner's. It ends by the clock, all of it used."""
    begun = time.time()
    run = subprocess.run([sys.executable, HERE + "/train.py", folder, "--budget", "45", "--init", MODEL + "/model.safetensors",
                          "--mix", "letters", *SMALL], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    rows = log(folder)
    assert rows[0]["mode"] == "sparse" and float(rows[0]["loss"]) < 2.5, rows[0]
    step = max(float(r["ms_a_step"]) for r in rows) / 1000  # seconds; the last may begin just before the end
    assert time.time() - begun < 60 + 2 * step, (rows[-1], time.time() - begun)
    assert step > 10 or float(rows[-1]["progress"]) > 0.5, rows[-1]


def test_held():
    """What is no answer costs its divergence from the other model: nothing, and without a pull, where both agree."""
    torch.manual_seed(2)
    target, weight = torch.randint(2048, (2, 6)), torch.tensor([[1, 1, 0, 2, 1, 1], [1, 1, 1, 6, 24, 1]], dtype=torch.uint8)
    hidden, net = torch.randn(2, 6, 256, requires_grad=True), model.Sala(1)
    same = net.logits(hidden).detach()
    loss, sums = model.losses(net, hidden, target, weight, 24, same)
    nats = torch.nn.functional.cross_entropy(same.flatten(0, 1), target.flatten(), reduction="none").reshape(2, 6)
    w = weight.float()
    assert abs(loss.item() - ((nats * w)[1, 3:5].sum() / w.sum()).item()) < 1e-5 and abs(sums[-1].item()) < 1e-6
    loss.backward()
    pull = hidden.grad.abs().amax(-1)
    assert pull[1, 3:5].min() > 1e-5 and pull[0].max() < 1e-8 and pull[1, [0, 1, 2, 5]].max() < 1e-8, pull
    other = torch.randn(2, 6, 2048)
    loss, sums = model.losses(net, hidden, target, weight, 24, other)
    p, q = (x.double().log_softmax(-1) for x in (other, same))
    away = (p.exp() * (p - q)).sum(-1)
    cost = torch.where(weight > 4, nats.double(), away)
    assert abs(loss.item() - ((cost * w).sum() / w.sum()).item()) < 1e-4
    assert abs(sums[-1].item() - away[weight == 1].mean().item()) < 1e-4
    free = model.losses(net, hidden, target, weight, 24)[0]
    assert abs(free.item() - ((nats * w).sum() / w.sum()).item()) < 1e-5


def test_training_holds(folder):
    """--hold: text costs next to nothing at the start, and the loss is far below the one without."""
    weights = MODEL + "/model.safetensors"
    trained(folder + "/a", "--steps", "1", "--init", weights)
    trained(folder + "/b", "--steps", "1", "--init", weights, "--hold", weights)
    free, held = log(folder + "/a")[0], log(folder + "/b")[0]
    assert float(free["held"]) == 0 and float(held["held"]) < 1e-4 < float(held["text_nats"]), held
    assert float(held["loss"]) < 0.5 * float(free["loss"]), (free, held)


def test_training_says_what_is_wrong(folder):
    bad = trained(folder, "--init", folder + "/none", fine=False)
    assert bad.returncode != 0 and "none" in bad.stderr
    if not torch.cuda.is_available():
        bad = trained(folder, "--device", "cuda", fine=False)
        assert bad.returncode != 0 and "no CUDA device" in bad.stderr


def test_evaluation_as_sala(folder):
    """Same questions, same answers, same scores as `sala eval`, but where BF16 tips a greedy choice."""
    judge = evaluate.Judge(MODEL, "cpu")
    items = [x for x in evaluate.task_set(3, 200, judge.tok) if x["task"] in ("fact", "math", "count", "reverse", "json", "mc")
             and x["prompt_tokens"] < 250][-16:]
    with open(folder + "/tasks.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(x, ensure_ascii=False) + "\n" for x in items)
    subprocess.run([FP32, "eval", "-q", "-m", MODEL, "--tasks", folder + "/tasks.jsonl", "--out", folder + "/out"],
                   check=True, capture_output=True)
    with open(folder + "/out", encoding="utf-8") as f:
        there = {x["index"]: x for x in map(json.loads, f)}
    _, rows = evaluate.tables(items, judge.answers(items))
    for i, row in enumerate(rows):
        assert row["output"] == there[i]["answer"] and row["exact"] == there[i]["exact"], (row, there[i])
        assert row["score"] == there[i]["score"] and row["loop"] == there[i]["loop"]
    assert any(r["exact"] for r in rows) and len(rows) == 16


def test_exact_is_generation():
    """One forward over prompt and target tells what generation would say, also of wrong targets."""
    judge = evaluate.Judge(MODEL, "cpu")
    items = [x for x in evaluate.task_set(3, 120, judge.tok) if x["task"] in ("fact", "math")][:3]
    ids = [judge.tok.encode(x["prompt"]) for x in items]
    said = [(judge.tok.decode(x), ended) for x, ended in judge.generate(ids, 30)]
    targets = [said[0][0], said[1][0] + " No", said[2][0][:-1]]
    assert all(e for _, e in said) and judge.exact(ids, targets) == [True, False, False]


def test_rehearsal(folder):
    """h200.sh from start to verdict, with one step and a few items of each kind."""
    small = " ".join(SMALL[2:] + ["--steps", "1"])
    run = subprocess.run(["sh", HERE + "/h200.sh", "400"], capture_output=True, text=True, timeout=420, env=dict(
        os.environ, OUT=folder + "/out", WORK=folder + "/work", PYTHON=sys.executable, DEVICE="cpu", TRAIN=small,
        EVALUATE="--quick", MEASURE="200"))
    files = sorted(os.listdir(folder + "/out"))
    assert files == ["model.safetensors", "report.tgz"], (files, run.stdout)
    with tarfile.open(folder + "/out/report.tgz") as f:
        assert sorted(f.getnames()) == ["base.json", "log.csv", "scores.json", "train.log", "verdict.txt"], f.getnames()
    assert run.returncode == 1 and "VERDICT: not good: mc" in run.stdout.splitlines()[-1], run.stdout
    assert os.path.getsize(folder + "/out/model.safetensors") == os.path.getsize(MODEL + "/model.safetensors")


if __name__ == "__main__":
    sys.exit(0 if test_tiny.run(globals(), sys.argv[1:]) else 1)
