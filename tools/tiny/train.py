"""Trains sala-tiny, or goes on from its weights. Needs numpy and torch; meant for one GPU, runs (slowly) on a CPU too.

    python3 tools/tiny/train.py OUT --budget SECONDS [options]

OUT/model.safetensors   BF16, the release's layout: every minute and at the end
OUT/state.pt            everything else: the same command goes on from there, in what is left of a new budget
OUT/log.csv             a line every 200 steps

The budget is wall-clock time from start to end, compiling included. Phases, by the share of it that is gone:
    0 to 0.42    dense attention
    to 0.5       dense attention and the selection loss: block scores learn dense attention's mass on each block
    to 1         the sparse rule and that loss; every eighth step with long sequences; the learning rate falls
With --init FILE all of it is the last phase, at full rate until the middle. --mix letters is what teaches
multiple choice (gen.LETTER_MIX). With --hold FILE only answers are learned from the text: elsewhere the loss is the
divergence from the predictions of the weights in FILE, so that what they know stays as it is."""
import argparse
import csv
import ctypes
import multiprocessing
import os
import random
import sys
import time

import numpy as np

import gen
import tok

HERE = os.path.dirname(os.path.abspath(__file__))
AUX, SPARSE, DECAY = 0.42, 0.5, 0.5
SELECTION, CLIP = 0.1, 1.0
SPLICED = 0.12  # of the documents, with --hold: on text known by heart the weights in FILE do not show how they guess
LETTER_WEIGHT = 24  # of the one token that multiple choice is about; other tokens of answers weigh 6
COLUMNS = ["seconds", "step", "progress", "mode", "rate", "loss", "answer_nats", "answer_sure", "letter_nats",
           "letter_right", "text_nats", "held", "selection", "ms_a_step", "tokens", "fresh"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out")
    p.add_argument("--budget", type=float, required=True, help="seconds")
    p.add_argument("--steps", type=int, default=1 << 30, help="stop after as many, for tests")
    p.add_argument("--init", help="a model.safetensors to begin with")
    p.add_argument("--hold", help="a model.safetensors whose predictions of plain text are kept")
    p.add_argument("--mix", choices=("plain", "letters"), default="plain")
    p.add_argument("--tokenizer", default=os.path.join(HERE, "..", "..", "models", "sala-tiny"), help="its folder")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--rate", type=float, default=4e-3, help="of Muon; AdamW has 0.75 and 0.5 of it")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--long", type=int, default=16384, help="0: no long sequences")
    p.add_argument("--long-batch", type=int, default=4)
    p.add_argument("--rows", type=int, default=16384, help="rows of text kept; workers replace them one by one")
    p.add_argument("--workers", type=int, default=max(2, min(15, (os.cpu_count() or 2) - 1)))
    p.add_argument("--every", type=int, default=200, help="steps between two lines of the log")
    p.add_argument("--device", default="cuda")
    p.add_argument("--no-compile", action="store_true")
    return p.parse_args()


# ---- text: processes fill a pool of rows, the trainer draws from it ----

def letter_places(ids, weights, letters, is_):
    """Where an answer says "is A", "is B", "is C" or "is D"."""
    return [i for i in range(1, len(ids)) if ids[i] in letters and ids[i - 1] == is_ and weights[i] == 6]


class Writer:
    """Fills rows with documents one behind the other. Same seed, same rows."""

    def __init__(self, folder, seed, mix, spliced=0.0):
        self.tok, self.r, self.spliced = tok.load(folder), random.Random(seed), spliced
        self.mix = gen.LETTER_MIX if mix == "letters" else gen.TASK_MIX
        self.letters = {self.tok.vocab[tok.SPACE + x] for x in "ABCD"}
        self.is_ = self.tok.vocab[tok.SPACE + "is"]

    def document(self, room, p_long):
        if room < 150:
            return self.tok.document([(1, 0), (gen.plain(self.r), 1), (2, 1)])
        if self.r.random() < self.spliced:
            return self.tok.document([(1, 0), (gen.spliced(self.r), 1), (2, 1)])
        room = room if self.r.random() < 0.5 else min(room, 1200)
        ids, weights = self.tok.document(gen.document(self.r, room, 0.3, p_long, self.mix))
        for i in letter_places(ids, weights, self.letters, self.is_):
            weights[i] = LETTER_WEIGHT
        return ids, weights

    def fill(self, ids, weights, p_long):
        at = 0
        while at < len(ids):
            x, w = self.document(len(ids) - at, p_long)
            n = min(len(x), len(ids) - at)
            ids[at:at + n], weights[at:at + n] = x[:n], w[:n]
            at += n


class Pool:
    """Rows of length + 1 tokens with their weights, in memory that processes share."""

    def __init__(self, rows, length, workers, p_long):
        self.shape, self.p_long, self.workers = (rows, length + 1), p_long, workers
        self.raw = [multiprocessing.RawArray(t, rows * (length + 1)) for t in (ctypes.c_uint16, ctypes.c_uint8)]
        self.made = multiprocessing.RawArray(ctypes.c_long, workers)
        self.drawn = multiprocessing.RawValue(ctypes.c_long, 0)
        self.ids, self.weights = (np.frombuffer(a, dtype=t).reshape(self.shape)
                                  for a, t in zip(self.raw, (np.uint16, np.uint8)))

    def share(self, k):
        return range(k * self.shape[0] // self.workers, (k + 1) * self.shape[0] // self.workers)

    def work(self, k, *writer):
        """Fills its share of the rows, then replaces them, as many as were drawn."""
        writer = Writer(*writer)
        while True:
            for row in self.share(k):
                while self.made[k] >= len(self.share(k)) + self.drawn.value / self.workers:
                    time.sleep(0.01)
                writer.fill(self.ids[row], self.weights[row], self.p_long)
                self.made[k] += 1

    def ready(self):
        return np.concatenate([np.arange(s.start, s.start + min(self.made[k], len(s)))
                               for k, s in enumerate(map(self.share, range(self.workers)))])

    def draw(self, rng, batch, torch, device):
        rows = rng.choice(self.ready(), batch)
        self.drawn.value += batch
        ids = torch.from_numpy(self.ids[rows].astype(np.int64))
        return ids.to(device, non_blocking=True), torch.from_numpy(self.weights[rows]).to(device, non_blocking=True)


def start_pools(a):
    """-> [short rows, long rows or None], processes."""
    long_workers = max(1, a.workers // 4) if a.long else 0
    pools = [Pool(a.rows, a.length, max(1, a.workers - long_workers), 0.1),
             Pool(max(a.long_batch, a.rows // 21), a.long, long_workers, 0.35) if a.long else None]
    fork, processes = multiprocessing.get_context("fork"), []
    spliced = SPLICED if a.hold else 0.0
    gen.spliced(random.Random(0))  # the Bible is read once, before the processes part
    for which, pool in enumerate(pools):
        for k in range(pool.workers if pool else 0):
            seed = (a.seed * 2 + which) * 100003 + k
            processes.append(fork.Process(target=pool.work, args=(k, a.tokenizer, seed, a.mix, spliced), daemon=True))
            processes[-1].start()
    return pools, processes


def wait_for(pools, processes, a, end):
    for pool, batch in zip(pools, (a.batch, a.long_batch)):
        while pool and len(pool.ready()) < min(pool.shape[0], 8 * batch):
            if not all(p.is_alive() for p in processes):
                sys.exit("train.py: a process that writes text has died")
            if time.time() > end:
                sys.exit("train.py: the budget is gone before there was text to train on")
            time.sleep(0.1)


# ---- optimizers ----

class Optimizer:
    """Muon for the layers' matrices, AdamW for embedding, head and norms."""

    def __init__(self, net, torch, rate):
        self.torch, self.rate, self.named = torch, rate, dict(net.named_parameters())
        matrices = [n for n, p in self.named.items() if p.dim() == 2 and "layers" in n]
        self.groups = {}  # shape: names; matrices of a shape are orthogonalised together
        for n in matrices:
            self.groups.setdefault(tuple(self.named[n].shape), []).append(n)
        self.momentum = {s: torch.zeros(len(n), *s, device=self.named[n[0]].device) for s, n in self.groups.items()}
        rest = [n for n in self.named if n not in matrices]
        self.rest = [self.named[n] for n in rest]
        wide = [n for n in rest if self.named[n].dim() == 2]
        self.adam = torch.optim.AdamW([dict(params=[self.named[n] for n in wide], weight_decay=0.01),
                                       dict(params=[self.named[n] for n in rest if n not in wide], weight_decay=0.0)],
                                      lr=rate, betas=(0.9, 0.95))

    @staticmethod
    def orthogonal(g):
        """Newton-Schulz, five steps: U V^T of a stack of matrices, roughly."""
        x, tall = g.bfloat16() if g.is_cuda else g, g.shape[-2] > g.shape[-1]
        x = x.mT if tall else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            y = x @ x.mT
            x = 3.4445 * x + (-4.7750 * y + 2.0315 * (y @ y)) @ x
        return (x.mT if tall else x).float()

    def step(self, factor):
        torch, rate = self.torch, self.rate * factor
        torch.nn.utils.clip_grad_norm_(self.rest, CLIP)
        for group, share in zip(self.adam.param_groups, (0.75, 0.5)):
            group["lr"] = rate * share
        self.adam.step()
        with torch.no_grad():
            for shape, names in self.groups.items():
                g, m = torch.stack([self.named[n].grad for n in names]), self.momentum[shape]
                m.mul_(0.95).add_(g, alpha=0.05)
                update = self.orthogonal(g.lerp(m, 0.95)) * (0.2 * max(shape) ** 0.5)
                for n, u in zip(names, update):
                    self.named[n].mul_(1 - rate * 0.1).sub_(u, alpha=rate)

    def state(self):
        return dict(momentum=self.momentum, adam=self.adam.state_dict())

    def restore(self, state):
        for shape, m in self.momentum.items():
            m.copy_(state["momentum"][shape])
        self.adam.load_state_dict(state["adam"])


# ---- training ----

class Trainer:
    def __init__(self, a):
        self.a, self.started = a, time.time()
        os.makedirs(a.out, exist_ok=True)
        self.pools, self.processes = start_pools(a)  # before CUDA begins
        import torch
        import model
        self.torch, self.model = torch, model
        if a.device == "cuda" and not torch.cuda.is_available():
            sys.exit("train.py: no CUDA device: give --device cpu, or run it where there is one")
        torch.manual_seed(a.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
        self.net = model.Sala(a.seed).to(a.device)
        if a.init:
            self.net.load_state_dict({k: v.float() for k, v in model.read_safetensors(a.init).items()})
        self.held = model.load(a.hold, a.device).requires_grad_(False) if a.hold else None
        self.optimizer = Optimizer(self.net, torch, a.rate)
        self.step, self.tokens, self.progress = 0, 0, 0.0
        self.resume()
        self.rng = np.random.default_rng([a.seed, self.step])
        self.loss = model.losses if a.no_compile else torch.compile(model.losses, dynamic=False)
        if not a.no_compile:
            import torch._dynamo
            torch._dynamo.config.recompile_limit = 64
            model.Layer.forward = torch.compile(model.Layer.forward, dynamic=False)

    # -- files --

    def resume(self):
        path = os.path.join(self.a.out, "state.pt")
        if not os.path.exists(path):
            return
        state = self.torch.load(path, map_location=self.a.device)
        self.net.load_state_dict(state["net"])
        self.optimizer.restore(state["optimizer"])
        self.step, self.tokens, self.progress = state["step"], state["tokens"], state["progress"]
        print(f"going on from step {self.step}, progress {self.progress:.3f}", flush=True)

    def save(self):
        """Whole files or none."""
        state, weights = (os.path.join(self.a.out, n) for n in ("state.pt", "model.safetensors"))
        self.torch.save(dict(net=self.net.state_dict(), optimizer=self.optimizer.state(), step=self.step,
                             tokens=self.tokens, progress=self.progress), state + ".new")
        self.model.write_safetensors(weights + ".new", self.net.state_dict())
        os.replace(state + ".new", state)
        os.replace(weights + ".new", weights)

    def log(self, mode, factor, sums, steps, seconds):
        ce, answers, sure, letter, letters, right, text, held, selection, loss = (sums / steps).tolist()
        row = [round(time.time() - self.started, 1), self.step, round(self.progress, 4), mode,
               f"{self.a.rate * factor:.2e}", *(f"{x:.4f}" for x in (
                   loss, ce / max(answers, 1e-9), sure / max(answers, 1e-9), letter / max(letters, 1e-9),
                   right / max(letters, 1e-9), text, held, selection)), f"{1000 * seconds / steps:.1f}", self.tokens,
               round(sum(self.pools[0].made) / max(1, self.step * self.a.batch), 3)]
        path = os.path.join(self.a.out, "log.csv")
        new = not os.path.exists(path)
        with open(path, "a", newline="", encoding="utf-8") as f:
            csv.writer(f).writerows([COLUMNS, row] if new else [row])
        print(" ".join(f"{k} {v}" for k, v in zip(COLUMNS, row)), flush=True)
        if not np.isfinite(loss):
            sys.exit("train.py: the loss is not a number: the last checkpoint stands")

    # -- steps --

    def forward_backward(self, mode, long):
        a = self.a
        ids, weights = self.pools[long].draw(self.rng, a.long_batch if long else a.batch, self.torch, a.device)
        text, held = ids[:, :-1].contiguous(), None
        if self.held is not None:
            with self.torch.no_grad():
                held = self.held.logits(self.held(text, mode, self.dtype)[0])
        hidden, selection = self.net(text, mode, self.dtype)
        loss, sums = self.loss(self.net, hidden, ids[:, 1:].contiguous(), weights[:, 1:].contiguous(), LETTER_WEIGHT, held)
        (loss + SELECTION * selection).backward()
        extra = [x.detach() if self.torch.is_tensor(x) else loss.new_zeros(()) for x in (selection, loss)]
        return self.torch.cat([sums, self.torch.stack(extra)]), ids.numel()

    def schedule(self, step):
        """-> mode, long sequences?, factor of the learning rate. step: of this run"""
        p = self.progress
        mode = "sparse" if self.a.init or p >= SPARSE else "aux" if p >= AUX else "dense"
        long = int(bool(self.a.long) and mode == "sparse" and self.step % 8 == 7)
        fall = 1 if p < DECAY else max(0.01, (1 - p) / (1 - DECAY))
        return mode, long, fall * min(1, (step + 1) / (60 if self.a.init or self.step > step else 300))

    def warm_up(self):
        """Everything is compiled before the phases begin."""
        modes = ["sparse"] if self.a.init or self.progress >= SPARSE else ["dense", "aux", "sparse"]
        for mode, long in [(m, 0) for m in modes] + ([("sparse", 1)] if self.a.long else []):
            t = time.time()
            self.forward_backward(mode, long)
            self.net.zero_grad(set_to_none=True)
            print(f"{mode}, {self.a.long if long else self.a.length} tokens: first step {time.time() - t:.1f} s", flush=True)

    def run(self):
        a, torch = self.a, self.torch
        end = self.started + a.budget - 5
        wait_for(self.pools, self.processes, a, end)
        if not a.no_compile:
            self.warm_up()
        begun = last = saved = time.time()
        first, p0 = self.step, self.progress
        sums, steps = 0, 0
        while time.time() < end and self.step - first < a.steps:
            self.progress = p0 + (1 - p0) * (time.time() - begun) / max(end - begun, 1e-9)
            mode, long, factor = self.schedule(self.step - first)
            more, tokens = self.forward_backward(mode, long)
            self.optimizer.step(factor)
            self.net.zero_grad(set_to_none=True)
            sums, steps = sums + more, steps + 1
            self.step, self.tokens = self.step + 1, self.tokens + tokens
            if self.step % a.every == 0:
                self.log(mode, factor, sums, steps, time.time() - last)
                sums, steps, last = 0, 0, time.time()
            if time.time() - saved > 60 and torch.isfinite(more).all():
                self.save()
                saved = time.time()
        if steps and not torch.isfinite(sums).all():
            sys.exit("train.py: the loss is not a number: the last checkpoint stands")
        if steps:
            self.log(mode, factor, sums, steps, time.time() - last)
        self.save()
        for p in self.processes:
            p.terminate()
        print(f"{self.step - first} steps, {self.tokens / 1e6:.0f}M tokens, {time.time() - self.started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        Trainer(arguments()).run()
    except OSError as e:
        sys.exit(f"train.py: {e}")
