#!/usr/bin/env python3
"""Trains an EAGLE-3 draft head for sala (docs/training.md).

    sala dump-features --data prompts.jsonl --regenerate --out build/features
    python3 tools/train_draft.py train --data build/features --target models/sala-tiny --out build/draft
    python3 tools/train_draft.py train --data build/features --target models/sala-tiny --out build/draft-qat \\
        --init build/draft/head --qat --steps 400
    python3 tools/train_draft.py export --head build/draft/head --target models/sala-tiny --out build/draft-rtn
    python3 tools/train_draft.py evaluate --data build/features --target models/sala-tiny --head build/draft/head

`train` leaves in --out: head/ (BF16, or with --qat NVFP4), checkpoint.safetensors (the same command goes on from
it), train.csv, train.svg. It needs PyTorch (1.13 or later) and numpy. Everything is seeded: on a CPU a run that was
interrupted ends with the bits of one that was not."""
import argparse
import concurrent.futures
import csv
import glob
import json
import math
import os
import signal
import sys
import time

try:
    import numpy as np
    import torch
except ImportError as e:
    sys.exit(f"train_draft.py: {e}: install PyTorch and numpy (Debian: python3-torch; or pip install torch numpy)")

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import draft_model as dm  # noqa: E402

STEPS = 7  # of the unroll: the deepest tree that is drawn by itself
ANCHOR = 4  # positions that offsets leave alone
DECAY = 0.99  # of the mean of alpha
ETA = 3.0
HELD = 0.02  # share of samples held out
LAST = 0.1  # share of the steps with L_alpha alone and frozen tensor scales
WEIGHT = 0.8  # of a step's loss for each step before it


# ---- the target ----


def target_tensors(folder, name):
    """The file of a target's folder that has this tensor."""
    index, file = os.path.join(folder, "model.safetensors.index.json"), "model.safetensors"
    if os.path.exists(index):
        with open(index) as f:
            file = json.load(f)["weight_map"].get(name, "")
    path = os.path.join(folder, file)
    return dm.read_safetensors(path)[0] if file and os.path.exists(path) else {}


def target_matrix(folder, name):
    found = target_tensors(folder, name)
    if name not in found:
        sys.exit(f"{folder}: tensor {name} is missing: --target must be the checkpoint before its head was quantised")
    return dm.as_tensor(*found[name])


def target_config(folder):
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    for n in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        if n not in config:
            sys.exit(f"{path}: {n} is missing: --target is the folder of the model")
    return config


def target_head(folder):
    tied = target_config(folder).get("tie_word_embeddings", False)
    return target_matrix(folder, "model.embed_tokens.weight" if tied else "lm_head.weight")


def forced_ids(folder, vocab):
    """Tokens that belong into every draft vocabulary: ends, chat markers, digits, runs of white space."""
    ids = set()
    for name in ("config.json", "generation_config.json"):
        if os.path.exists(os.path.join(folder, name)):
            with open(os.path.join(folder, name)) as f:
                eos = json.load(f).get("eos_token_id", [])
            ids.update(eos if isinstance(eos, list) else [eos])
    path = os.path.join(folder, "tokenizer.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            t = json.load(f)
        marks = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
        ids.update(x["id"] for x in t.get("added_tokens", []) if x["content"] in marks)
        for text, i in t.get("model", {}).get("vocab", {}).items():
            plain = text.replace("\u2581", " ").replace("\u0120", " ").replace("\u010a", "\n")
            if plain.isspace() or text in ("<0x0A>", "<0x09>") or plain.strip(" ") in set("0123456789"):
                ids.add(i)
    return sorted(i for i in ids if i is not None and 0 <= i < vocab)


def choose_vocabulary(counts, size, forced):
    """Ids of the draft vocabulary, rising: those that are forced, then the most frequent."""
    vocab = len(counts)
    if size >= vocab:
        return np.arange(vocab)
    if len(forced) > size:
        sys.exit(f"--draft-vocab {size}: {len(forced)} tokens must be in it")
    order = np.lexsort((np.arange(vocab), -counts))
    rest = order[~np.isin(order, forced)]
    return np.sort(np.concatenate([np.array(forced, np.int64), rest[:size - len(forced)]]))


# ---- the data ----


class Shards:
    """features-*.safetensors as `sala dump-features` writes them, mapped; `samples` are (shard, begin, end)."""
    FORM = {"ids": "I32", "loss_mask": "U8", "features": "BF16", "hidden": "BF16", "starts": "I64"}

    def __init__(self, folder):
        self.shards, self.samples, self.meta = [], [], {}
        for path in sorted(glob.glob(os.path.join(folder, "features-*.safetensors"))):
            t, meta = dm.read_safetensors(path)
            for key in ("fingerprint", "layers"):
                if self.shards and meta.get(key) != self.meta.get(key):
                    sys.exit(f"{path}: {key} {meta.get(key)}, but {self.meta.get(key)} in the shards before it")
            self.meta = meta
            for name, kind in self.FORM.items():
                if name not in t or t[name][0] != kind:
                    sys.exit(f"{path}: expected a tensor {name} of {kind}: is it from `sala dump-features`?")
            s = {n: t[n][1] for n in self.FORM}
            n, starts = len(s["ids"]), s["starts"].astype(np.int64)
            h = self.shards[0]["hidden"].shape[1] if self.shards else s["hidden"].size // max(1, n)
            whole = [(n,), (n, 3 * h), (n, h)] == [s[x].shape for x in ("loss_mask", "features", "hidden")]
            if not whole or len(starts) < 2 or starts[0] or starts[-1] != n or (np.diff(starts) < 1).any():
                sys.exit(f"{path}: its tensors are not of the same {n} tokens, or starts does not rise to that")
            self.samples += [(len(self.shards), int(a), int(b)) for a, b in zip(starts[:-1], starts[1:])]
            self.shards.append(s)
        if not self.samples:
            sys.exit(f"{folder}: there is no features-*.safetensors: make them with `sala dump-features`")
        self.hidden = self.shards[0]["hidden"].shape[1]
        self.aux = None
        for key in ("layers", "aux"):
            if key in self.meta:
                self.aux = [int(x) for x in self.meta[key].strip("[]").replace(",", " ").split()]

    def check(self, folder, matrix):
        """Ends the program if these are not of the target whose head is `matrix`."""
        most = max(int(s["ids"].max()) for s in self.shards)
        if most >= len(matrix) or min(int(s["ids"].min()) for s in self.shards) < 0:
            sys.exit(f"{folder}: token {most}, but the target has {len(matrix)} tokens: it is of another model")
        if self.hidden != matrix.shape[1]:
            sys.exit(f"{folder}: features of width {self.hidden}, but the target's is {matrix.shape[1]}")

    def pieces(self, samples, length):
        """(shard, begin, end, position of the first) of at most `length` tokens, those without loss left out."""
        out = []
        for shard, begin, end in samples:
            for at in range(begin, end, length):
                stop = min(at + length, end)
                if self.shards[shard]["loss_mask"][at + 2:stop].any():
                    out.append((shard, at, stop, at - begin))
        return out


def pack(pieces, length):
    """Rows of pieces behind each other, at most `length` tokens, in the order given."""
    rows, room = [], 0
    for p in pieces:
        n = p[2] - p[1]
        if n > room:
            rows.append([])
            room = length
        rows[-1].append(p)
        room -= n
    return rows


def batches(pieces, args):
    """Rows in batches, in the order given: pieces that fit into --length `rows` at once, the longer ones in rows of
    --long tokens, a quarter as many (but of a long row most tokens cost only K and V)."""
    out = []
    for length, most in ((args.length, args.rows), (args.long, max(1, args.rows // 4))):
        fit = [p for p in pieces if (p[2] - p[1] <= args.length) == (length == args.length)]
        rows = pack(fit, length)
        out += [(rows[i:i + most], length) for i in range(0, len(rows), most)]
    return out


def place(first, n, draw, limit):
    """Positions of a piece (speculation.md 6.4). A quarter where they are; else all but the first four of a text by
    one offset further, half of the offsets log-uniform; a quarter without the anchor, as texts look that lost their
    first page."""
    position, kind = first + np.arange(n), draw.random()
    most = limit - first - n - STEPS
    if kind < 0.25 or most < 1:
        return position
    x = draw.random()
    offset = int(most * x) if draw.random() < 0.5 else int(math.exp(x * math.log(most)))
    return position + np.where((position < ANCHOR) & (kind < 0.75), 0, offset)


def assemble(data, rows, length, draw, limit, pinned=False):
    """A batch on the host: ids, features, segment (0: padding), position [B, T ..]; slots [B, S] and alive [B, K, S]:
    slot t of step k guesses token t + 2 + k, which must be of the same piece and under loss. hidden [B, P, H] is of the
    tokens before the guessed ones alone, and taught [B, K, S] says which of them each guess has."""
    b, h = len(rows), data.hidden
    ids, mask = np.zeros((b, length), np.int64), np.zeros((b, length), bool)
    segment, position = np.zeros((b, length), np.int64), np.zeros((b, length), np.int64)
    features = torch.empty(b, length, 3 * h, dtype=torch.bfloat16, pin_memory=pinned)
    bits = lambda x: x.view(torch.int16).numpy().view(np.uint16)
    to_features, source = bits(features), np.zeros((b, length), np.int64)
    for r, row in enumerate(rows):
        at = 0
        for i, (shard, begin, end, first) in enumerate(row):
            s, n = data.shards[shard], end - begin
            ids[r, at:at + n] = s["ids"][begin:end]
            mask[r, at:at + n] = s["loss_mask"][begin:end] != 0
            to_features[r, at:at + n] = s["features"][begin:end]
            source[r, at:at + n] = begin + np.arange(n)
            segment[r, at:at + n] = i + 1
            position[r, at:at + n] = place(first, n, draw, limit)
            at += n
        to_features[r, at:] = 0
    alive = np.zeros((b, STEPS, length), bool)
    for k in range(STEPS):
        alive[:, k, :-2 - k] = mask[:, 2 + k:] & (segment[:, 2 + k:] == segment[:, :-2 - k])
        if k:
            alive[:, k] &= alive[:, k - 1]
    most = max(1, int(alive[:, 0].sum(1).max()))
    slots, kept = np.zeros((b, most), np.int64), np.zeros((b, STEPS, most), bool)
    for r in range(b):
        t = np.nonzero(alive[r, 0])[0]
        slots[r, :len(t)] = t
        kept[r, :, :len(t)] = alive[r][:, t]
    before = np.minimum(slots[:, None] + 1 + np.arange(STEPS)[:, None], length - 1)
    read = [np.unique(before[r][kept[r]]) for r in range(b)]
    hidden = torch.zeros(b, max(1, max(len(x) for x in read)), h, dtype=torch.bfloat16)
    taught = np.zeros(kept.shape, np.int64)
    for r, row in enumerate(rows):
        taught[r] = np.where(kept[r], np.searchsorted(read[r], before[r]), 0)
        for i, (shard, *_) in enumerate(row):
            which = np.nonzero(segment[r, read[r]] == i + 1)[0]
            bits(hidden)[r, which] = data.shards[shard]["hidden"][source[r, read[r][which]]]
    tensors = [torch.from_numpy(x) for x in (ids, segment, position, slots, kept, taught)]
    names = ("ids", "segment", "position", "slots", "alive", "taught")
    return dict(zip(names, tensors), features=features, hidden=hidden)


class Feed:
    """Batches in an order that (seed, epoch) gives; one is read while another trains. `state` is where it stands."""

    def __init__(self, data, pieces, args, state=(0, 0)):
        self.data, self.all, self.args = data, pieces, args
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.epoch, self.batch = state
        self.open()
        self.ahead = None

    def open(self):
        draw = np.random.default_rng([self.args.seed, self.epoch])
        all_of_it = batches([self.all[i] for i in draw.permutation(len(self.all))], self.args)
        self.batches = [all_of_it[i] for i in draw.permutation(len(all_of_it))]

    def read(self, rows, length, epoch, batch):
        draw = np.random.default_rng([self.args.seed, 1 + epoch, batch])
        pinned = self.args.device.startswith("cuda")
        return assemble(self.data, rows, length, draw, self.args.offset, pinned)

    def begin(self):
        task = self.pool.submit(self.read, *self.batches[self.batch], self.epoch, self.batch)
        self.batch += 1
        if self.batch == len(self.batches):
            self.epoch, self.batch = self.epoch + 1, 0
            self.open()
        return task, (self.epoch, self.batch)

    def next(self):
        task, self.state = self.ahead or self.begin()
        self.ahead = self.begin()
        return task.result()


# ---- one batch ----


def teach(hidden, matrix, ids):
    """hidden [B, T, H], the input of the target's head `matrix`, FP32 [V, H] -> its probabilities of the draft's
    tokens [B, T, Vd], and its likeliest token [B, T]."""
    logits = hidden.float() @ matrix.T
    return torch.softmax(logits, -1)[..., ids], logits.argmax(-1)


class Course:
    """What is minimised: by the kind of loss and the mean of alpha of each step of the unroll."""

    def __init__(self, kind):
        self.kind, self.alpha = kind, [0.0] * STEPS

    def shares(self, last):
        if last:
            return [None] * STEPS
        return [{"kl": 1.0, "tv": 0.0}.get(self.kind, math.exp(-ETA * a)) for a in self.alpha]

    def learn(self, alpha):
        self.alpha = [DECAY * a + (1 - DECAY) * b if b == b else a for a, b in zip(self.alpha, alpha)]


def study(head, matrix, batch, shares=None):
    """The loss of a batch (shares given), what its steps did, and, for evaluation, hits [K, B, S]: 1 the guess is the
    target's likeliest token, 2 it is the second guess."""
    d = head.device
    b = {n: x.to(d, non_blocking=True) for n, x in batch.items()}
    with torch.no_grad():
        p_all, best_all = teach(b["hidden"], matrix, head.ids)
        inside = torch.zeros(matrix.shape[0], dtype=torch.bool, device=d)
        inside[head.ids] = True
    loss, hits, sums = 0.0, [], []
    steps = head.unroll(b["features"], b["ids"], b["position"], b["segment"], b["slots"], STEPS)
    for k, logits in enumerate(steps):
        at, alive = b["taught"][:, k], b["alive"][:, k]
        p, best = dm.pick(p_all, at), dm.pick(best_all, at)
        alpha, kl = dm.overlap(logits, p)
        if shares is not None:
            learnt = alive & inside[best]
            each = dm.blend(alpha, kl, shares[k])
            loss = loss + WEIGHT ** k * (each * learnt).sum() / learnt.sum().clamp(min=1)
        with torch.no_grad():
            guess = head.ids[logits.topk(2, -1).indices]
            right = guess == best[..., None]
            hits.append(torch.where(right[..., 0], 1, torch.where(right[..., 1], 2, 0)) * alive)
            n = alive.sum()
            sums.append(torch.stack([n.float(), (alpha * alive).sum(), (kl * alive).sum(), (hits[k] == 1).sum(),
                                     (hits[k] > 0).sum(), (p.sum(-1) * alive).sum()]))
    return loss / sum(WEIGHT ** k for k in range(STEPS)), torch.stack(sums), hits


def walk(hits, alive, slots):
    """Tokens and verifies of a chain that starts where the last one ended, as an engine goes through an answer: 1 + the
    guesses that are right in a row, each. hits [K, S], alive [K, S], slots [S] of one row."""
    tokens = verifies = 0
    right, live = (hits == 1).numpy(), alive.numpy()
    slots, i, n = slots.numpy(), 0, int(live[0].sum())
    while i < n:
        run = 0
        while run < STEPS and live[run, i] and right[run, i]:
            run += 1
        tokens, verifies = tokens + run + 1, verifies + 1
        after, i = slots[i] + run + 1, i + 1
        while i < n and slots[i] < after:
            if slots[i] != slots[i - 1] + 1:  # the next answer begins
                break
            i += 1
    return tokens, verifies


def figures(sums, tokens=0, verifies=0):
    """Of the sums of `study`: alpha, KL, top-1 and top-2 by step, coverage of p, tau of a chain."""
    x = sums.double().cpu().numpy()
    mean = x[:, 1:] / np.where(x[:, :1] > 0, x[:, :1], np.nan)
    alpha = np.nan_to_num(mean[:, 0])
    out = {f"alpha_{k + 1}": mean[k, 0] for k in range(STEPS)}
    out.update({f"top1_{k + 1}": mean[k, 2] for k in range(STEPS)})
    out.update({f"top2_{k + 1}": mean[k, 3] for k in range(STEPS)})
    out.update(kl=mean[0, 1], coverage=mean[0, 4], tau_alpha=1 + np.cumprod(alpha).sum())
    if verifies:
        out["tau_greedy"] = tokens / verifies
    return out


def examine(head, matrix, data, pieces, args):
    """The figures of held-out pieces where they are (no offsets)."""
    sums, tokens, verifies = torch.zeros(STEPS, 6), 0, 0
    for rows, length in batches(pieces, args):
        batch = assemble(data, rows, length, np.random.default_rng(0), 0)
        with torch.no_grad():
            _, s, hits = study(head, matrix, batch)
        sums += s.cpu()
        hits = torch.stack(hits).cpu()
        for r in range(hits.shape[1]):
            t, v = walk(hits[:, r], batch["alive"][r], batch["slots"][r])
            tokens, verifies = tokens + t, verifies + v
    return figures(sums, tokens, verifies)


def agreement(data, samples, matrix, device):
    """Share of the tokens under loss that are the target's likeliest by `hidden` and its head: of greedy answers all
    but the few where decoding and reading a prompt round differently. Less means that features, ids and head do not
    belong together."""
    same = count = 0
    for shard, begin, end in samples:
        s = data.shards[shard]
        mask = torch.from_numpy(s["loss_mask"][begin + 1:end] != 0)
        if not mask.any():
            continue
        hidden = dm.as_tensor("BF16", s["hidden"][begin:end - 1])[mask].to(device)
        ids = torch.from_numpy(s["ids"][begin + 1:end].astype(np.int64))[mask]
        same += int(((hidden.float() @ matrix.T).argmax(-1).cpu() == ids).sum())
        count += len(ids)
    return same / max(count, 1)


# ---- training ----


def rate(step, args):
    """Of learning: up over the first 2 %, then down to a twentieth along a cosine."""
    up = max(1, args.steps // 50)
    if step < up:
        return args.lr * (step + 1) / up
    x = (step - up) / max(1, args.steps - up)
    return args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * x)))


def new_head(args, data, samples, embedding):
    t = target_config(args.target)
    if args.ffn % 16:
        sys.exit(f"--ffn {args.ffn}: the engine takes multiples of 16")
    if args.init:
        head = dm.load(args.init, embedding, args.device, args.dtype)
    else:
        counts = np.zeros(t["vocab_size"], np.int64)
        for shard, begin, end in samples:
            s = data.shards[shard]
            counts += np.bincount(s["ids"][begin:end][s["loss_mask"][begin:end] != 0], minlength=len(counts))
        ids = choose_vocabulary(counts, args.draft_vocab or len(counts), forced_ids(args.target, len(counts)))
        layers = t["num_hidden_layers"]
        share = counts[ids].sum() / max(1, counts.sum())
        print(f"draft vocabulary: {len(ids)} of {len(counts)} tokens: {100 * share:.3f} % of the {counts.sum()} tokens "
              "under loss")
        heads = t["num_attention_heads"]
        c = dm.Config(t["hidden_size"], args.ffn or t["intermediate_size"], heads,
                      t.get("num_key_value_heads") or heads, t.get("head_dim") or t["hidden_size"] // heads,
                      t["vocab_size"], len(ids), data.aux or [1, layers // 2 - 1, layers - 4])
        head = dm.Head(c, embedding, torch.from_numpy(ids), args.device, args.dtype)
        head.init(args.seed)
    if data.aux and data.aux != list(head.c.aux):
        sys.exit(f"{args.data}: features of layers {data.aux}, but the head reads {list(head.c.aux)}: dump them with "
                 f"--layers {','.join(map(str, head.c.aux))}")
    if data.hidden != head.c.hidden:
        sys.exit(f"{args.data}: features of width {data.hidden}, but the target's is {head.c.hidden}")
    head.c.theta = args.theta or head.c.theta
    head.quantised, head.c.window = args.qat, max(head.c.window, -(-max(args.long, 512) // 64) * 64)
    return head


# What a run that goes on must have in common with its beginning.
SAME = ("data", "target", "init", "qat", "loss", "offset", "length", "long", "rows", "theta", "lr", "seed", "held",
        "asked", "minutes", "draft_vocab", "ffn", "precision", "content")


def save(path, head, adam, course, step, feed, args, seconds, seen, total):
    """`seen` tokens; `total`: the sums for the next line of the log."""
    state = dict(step=step, feed=list(feed), alpha=course.alpha, steps=args.steps, seconds=seconds, config=vars(head.c),
                 seen=seen, total=total.tolist(), settings={n: getattr(args, n) for n in SAME})
    tensors = {"ids": ("I64", head.ids.cpu().numpy())}
    for name, w in head.master.items():
        for part, x in (("master", w), ("mean", adam.state[w]["exp_avg"]), ("square", adam.state[w]["exp_avg_sq"])):
            tensors[f"{part}.{name}"] = "F32", x.detach().cpu().numpy()
    for name, x in head.divisors.items():
        tensors["divisor." + name] = "F32", x.cpu().numpy()
    dm.write_safetensors(path, tensors, {"state": json.dumps(state)})


def restore(path, args, embedding):
    """-> the head, its optimizer, the rest of the state"""
    tensors, meta = dm.read_safetensors(path)
    if "state" not in meta:
        sys.exit(f"{path} is no checkpoint of this program: remove it, or name another --out")
    ck = json.loads(meta["state"])
    for n in SAME:
        was = ck["settings"].get(n)
        if was != getattr(args, n):
            name = {"asked": "--steps", "content": "data of"}.get(n, "--" + n.replace("_", "-"))
            sys.exit(f"{path} is of a run with {name} {was}: remove it, or name another --out")
    part = lambda which: {n[len(which) + 1:]: torch.from_numpy(np.array(x)).to(args.device)
                          for n, (_, x) in tensors.items() if n.startswith(which + ".")}
    ids = torch.from_numpy(np.array(tensors["ids"][1]))
    head = dm.Head(dm.Config(**ck["config"]), embedding, ids, args.device, args.dtype)
    head.take(part("master"))
    head.quantised, head.divisors, args.steps = args.qat, part("divisor"), ck["steps"]
    adam, mean, square = optimizer(head, args), part("mean"), part("square")
    for name, w in head.master.items():
        adam.state[w] = dict(step=torch.tensor(float(ck["step"])), exp_avg=mean[name], exp_avg_sq=square[name])
    return head, adam, ck


def optimizer(head, args):
    return torch.optim.AdamW(head.master.values(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)


def log_row(path, row):
    """One line of the CSV; its first says the names."""
    new = not os.path.exists(path)
    with open(path, "a", newline="") as f:
        out = csv.writer(f)
        if new:
            out.writerow(row)
        out.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row.values()])


def cut_log(path, step):
    """Lines beyond the checkpoint are of steps that are done again."""
    if os.path.exists(path):
        with open(path, newline="") as f:
            rows = list(csv.DictReader(f))
        os.remove(path)
        for row in rows:
            if int(row["step"]) <= step:
                log_row(path, row)


def batch_size(data, args):
    """Rows and their length where the command line is silent: 8 of 2048, of a small set so few that an epoch is 16
    batches: memory and time of a step grow with both."""
    longest = max(e - b for _, b, e in data.samples)
    if not args.length:
        args.length = min(2048, max(256, -(-longest // 64) * 64))
    if not args.rows:
        args.rows = min(8, max(1, sum(e - b for _, b, e in data.samples) // (16 * args.length)))
    args.long = max(args.long, args.length)


class Patience:
    """Says on stderr where a run stands, every five seconds, and fits the steps into --minutes."""

    def __init__(self, args, step, spent):
        self.args, self.told = args, not args.minutes or (step > 0 and args.steps != args.asked)
        self.began, self.mark, self.said = time.time() - spent, None, time.time()

    def note(self, step, loss):
        """After a step. The first one is slow (compilers, caches), so the rest is judged by those behind it: a tenth of
        the time long, or 20 of them and a twentieth of the time."""
        now = time.time()
        if self.mark is None:
            self.mark = (step, now)
        steps, seconds, left = step - self.mark[0], now - self.mark[1], self.args.minutes * 60 - (now - self.began)
        spent = (now - self.began) / (60 * self.args.minutes or 1)
        if not self.told and steps and spent >= (0.05 if steps >= 20 else 0.1):
            self.args.steps = step + max(1, int(steps * left / seconds))
            self.told = True
        if now - self.said >= 5:
            self.said, rest = now, (self.args.steps - step) * seconds / max(1, steps)
            end = f"about {rest:.0f} s left" if self.told and steps else "steps are being timed"
            print(f"  step {step}, {now - self.began:.0f} s, loss {loss:.4f}, {end}", file=sys.stderr, flush=True)


class Interrupts:
    """The first SIGINT or SIGTERM asks to stop (`number`), the second ends the program."""

    def __enter__(self):
        self.number, self.old = 0, {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        for n in self.old:
            signal.signal(n, self.ask)
        return self

    def ask(self, number, _):
        self.number = number
        self.__exit__()

    def __exit__(self, *_):
        for n, handler in self.old.items():
            signal.signal(n, handler)


def train(args):
    os.makedirs(args.out, exist_ok=True)
    data = Shards(args.data)
    matrix = target_head(args.target).float().to(args.device)
    embedding = target_matrix(args.target, "model.embed_tokens.weight")
    data.check(args.data, matrix)
    batch_size(data, args)
    args.content = (f"{len(data.samples)} samples, {sum(e - b for _, b, e in data.samples)} tokens "
                    f"({data.meta.get('fingerprint')}, {data.meta.get('data')})")
    every = max(2, min(round(1 / args.held), len(data.samples)))
    if args.held == HELD:  # of a small set more, up to an eighth: tau of three samples says nothing
        every = min(every, max(8, len(data.samples) // 16))
    held = [s for i, s in enumerate(data.samples) if i % every == every - 1][:256]
    samples = [s for i, s in enumerate(data.samples) if i % every != every - 1 or i // every >= 256]
    pieces, tests = data.pieces(samples, args.long), data.pieces(held, args.long)
    if not pieces or not tests:
        sys.exit(f"{args.data}: {len(data.samples)} samples are too few, or have no tokens under loss")
    path, table = (os.path.join(args.out, x) for x in ("checkpoint.safetensors", "train.csv"))
    ck = None
    if os.path.exists(path):
        head, adam, ck = restore(path, args, embedding)
        print(f"going on at step {ck['step']} of {args.steps}")
    else:
        head = new_head(args, data, samples, embedding)
        adam = optimizer(head, args)
    cut_log(table, ck["step"] if ck else -1)
    parameters = sum(w.numel() for w in head.master.values())
    print(f"{parameters / 1e6:.1f} M parameters; {len(samples)} samples, {sum(e - b for _, b, e in samples)} tokens; "
          f"{len(held)} held out; the target's own answer agrees in "
          f"{100 * agreement(data, held, matrix, args.device):.2f} % of the tokens under loss", flush=True)
    epoch = batches(pieces, args)
    print(f"{args.rows} rows of {args.length} tokens a batch, {len(epoch)} batches an epoch, "
          f"{sum(length > args.length for _, length in epoch)} of long rows; sala_window {head.c.window}", flush=True)
    cut = sum(end - begin > args.long for _, begin, end in samples)
    if cut:
        print(f"warning: {cut} samples are longer than the longest rows, {args.long} tokens, and are cut: their "
              "answers may not see what they are about (--long)", flush=True)
    course, step, spent, seen, total = Course(args.loss), 0, 0.0, 0, torch.zeros(STEPS, 6)
    if ck:
        course.alpha, step, spent, seen = ck["alpha"], ck["step"], ck["seconds"], ck["seen"]
        total = torch.tensor(ck["total"])
    feed = Feed(data, pieces, args, tuple(ck["feed"]) if ck else (0, 0))
    clock = Patience(args, step, spent)

    def report(kind, loss, shares, out):
        row = dict(step=step, kind=kind, seconds=round(time.time() - clock.began, 1), lr=rate(step, args), loss=loss,
                   tokens=seen)
        row.update({f"lambda_{k + 1}": -1.0 if shares[k] is None else shares[k] for k in range(STEPS)})
        row.update(out)
        row.setdefault("tau_greedy", float("nan"))
        log_row(table, row)
        print(f"step {step}/{args.steps if clock.told else '?'} {kind} {row['seconds']:.0f} s loss {loss:.4f} alpha "
              + " ".join(f"{out[f'alpha_{k + 1}']:.3f}" for k in range(STEPS))
              + f" top1 {out['top1_1']:.3f} tau {out['tau_alpha']:.2f}"
              + (f" greedy {out['tau_greedy']:.2f}" if "tau_greedy" in out else ""), flush=True)

    with Interrupts() as stop:
        while step < args.steps and not stop.number:
            last = step >= args.steps * (1 - LAST)
            head.frozen = last and bool(head.divisors)
            shares = course.shares(last)
            batch = feed.next()
            for group in adam.param_groups:
                group["lr"] = rate(step, args)
            loss, sums, _ = study(head, matrix, batch, shares)
            adam.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.master.values(), 0.5)
            adam.step()
            step += 1
            sums = sums.cpu()
            course.learn([float(x[1] / x[0]) if x[0] > 0 else float("nan") for x in sums])
            total, seen = total + sums, seen + int((batch["segment"] > 0).sum())
            clock.note(step, loss.item())
            due = step % args.every == 0 or step == args.steps
            if due and not all(torch.isfinite(w).all() for w in head.master.values()):
                sys.exit(f"step {step}: the weights are no numbers any more: lower --lr ({args.lr}) and begin anew")
            if due:
                if step % (10 * args.every) == 0 or step == args.steps:
                    report("held", loss.item(), shares, examine(head, matrix, data, tests, args))
                report("train", loss.item(), shares, figures(total))
                total = torch.zeros(STEPS, 6)
            if due or stop.number:
                save(path, head, adam, course, step, feed.state, args, time.time() - clock.began, seen, total)
            if due:
                plot(table, os.path.join(args.out, "train.svg"))
    if step < args.steps:
        print(f"stopped behind step {step}; the same command goes on from {path}", flush=True)
        return 128 + stop.number
    dm.export(head, os.path.join(args.out, "head"), "nvfp4" if args.qat else "bf16",
              dict(trained_steps=str(args.steps), seed=str(args.seed)))
    print(f"{os.path.join(args.out, 'head')}: {'NVFP4' if args.qat else 'BF16'}")
    return 0


# ---- the plot ----


def plot(table, path):
    """alpha of each step of the unroll, and tau, over the steps, as SVG."""
    with open(table, newline="") as f:
        rows = list(csv.DictReader(f))
    last = max((int(r["step"]) for r in rows), default=0)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="900" height="640" font-family="sans-serif" font-size="12">'
           '<rect width="900" height="640" fill="white"/>']

    def panel(top, most, names, title):
        x = lambda step: 60 + 740 * step / max(last, 1)
        y = lambda value: top + 240 * (1 - value / most)
        out.append(f'<text x="60" y="{top - 10}" font-size="14">{title}</text>')
        for i in range(6):
            v = most * i / 5
            out.append(f'<path d="M60 {y(v):.1f}H800" stroke="#ddd"/><text x="20" y="{y(v) + 4:.1f}">{v:.1f}</text>'
                       f'<text x="{x(last * i / 5):.0f}" y="{top + 256}">{last * i // 5}</text>')
        for i, (name, kind, label) in enumerate(names):
            points = [(x(int(r["step"])), y(min(most, float(r[name])))) for r in rows
                      if r["kind"] == kind and r[name] not in ("", "nan")]
            colour = f"hsl({i * 300 // max(1, len(names))},70%,45%)"
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            out.append(f'<polyline fill="none" stroke="{colour}" points="{line}"/>'
                       f'<text x="806" y="{top + 12 + 16 * i}" fill="{colour}">{label}</text>')

    panel(40, 1.0, [(f"alpha_{k + 1}", "train", f"depth {k + 1}") for k in range(STEPS)],
          "alpha: expected overlap with the target, by depth of the unroll (training batches)")
    panel(350, 8.0, [("tau_alpha", "held", "temperature 1"), ("tau_greedy", "held", "greedy"),
                     ("tau_alpha", "train", "training")], "tau: tokens a verify of a chain, held-out samples")
    with open(path + ".tmp", "w") as f:
        f.write("\n".join(out) + "\n</svg>\n")
    os.replace(path + ".tmp", path)


# ---- the command line ----


def export_command(args):
    head = dm.load(args.head, target_matrix(args.target, "model.embed_tokens.weight"))
    dm.export(head, args.out, args.format, dict(made_of=os.path.basename(os.path.normpath(args.head))))
    print(f"{args.out}: {args.format.upper()}, rounded to the nearest")


def evaluate_command(args):
    data, matrix = Shards(args.data), target_head(args.target).float().to(args.device)
    data.check(args.data, matrix)
    batch_size(data, args)
    head = dm.load(args.head, target_matrix(args.target, "model.embed_tokens.weight"), args.device, args.dtype)
    out = examine(head, matrix, data, data.pieces(data.samples, args.long), args)
    out["agreement"] = agreement(data, data.samples, matrix, args.device)
    print(json.dumps({n: round(float(x), 5) for n, x in out.items()}, indent=1))


def within(kind, least, most):
    """A number from `least` to `most`, for argparse."""
    def read(text):
        try:
            x = kind(text)
        except ValueError:
            x = math.nan
        if not least <= x <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not {'a' if kind is float else 'a whole'} number "
                                             f"from {least} to {most}")
        return x
    return read


def main(words=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="command", required=True)
    t, x, e = (sub.add_parser(n) for n in ("train", "export", "evaluate"))
    for c in (t, x, e):
        c.add_argument("--target", required=True, help="the target's folder: its embedding and (unquantised) head")
    for c in (t, e):
        c.add_argument("--data", required=True, help="folder of `sala dump-features`")
        c.add_argument("--length", type=within(int, 16, 1 << 24),
                       help="tokens of a row; longer samples are cut (the longest, up to 2048)")
        c.add_argument("--long", type=within(int, 0, 1 << 24), default=0,
                       help="tokens of the rows for samples that are longer than that (default: they are cut)")
        c.add_argument("--rows", type=within(int, 1, 1 << 16),
                       help="rows of a batch (8; of a small set less); memory: rows x length^2")
        c.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        c.add_argument("--precision", choices=("bf16", "fp32"), help="of activations (GPU: bf16, CPU: fp32)")
    for c in (x, e):
        c.add_argument("--head", required=True, help="folder of a head in BF16")
    for c in (t, x):
        c.add_argument("--out", required=True)
    x.add_argument("--format", choices=("nvfp4", "bf16"), default="nvfp4")
    t.add_argument("--steps", type=within(int, 1, 10**9), default=2000)
    t.add_argument("--minutes", type=within(float, 0, 1e6), default=0,
                   help="instead of --steps: as many as fit, from the first one on")
    t.add_argument("--lr", type=within(float, 1e-12, 1), default=1e-4,
                   help="(%(default)s; small heads like 2e-3, --qat a third)")
    t.add_argument("--loss", choices=("lk", "kl", "tv"), default="lk")
    t.add_argument("--draft-vocab", type=within(int, 0, 1 << 24), default=0,
                   help="tokens that the head knows (default: all)")
    t.add_argument("--ffn", type=within(int, 0, 1 << 20), default=0, help="width of its MLP (default: the target's)")
    t.add_argument("--offset", type=within(int, 0, 1 << 30), default=524288,
                   help="positions are trained up to here; 0: no offsets")
    t.add_argument("--theta", type=within(float, 1, 1e12),
                   help="of its rotation; keys are found over about as many tokens (10000, or that of --init)")
    t.add_argument("--init", help="begin with this head, whose vocabulary is kept")
    t.add_argument("--qat", action="store_true", help="weights as NVFP4 has them, and the head as NVFP4")
    t.add_argument("--held", type=within(float, 1e-6, 0.5), default=HELD,
                   help="share of the samples held out (%(default)s; of few samples up to an eighth), at most 256")
    t.add_argument("--seed", type=within(int, 0, 2**63 - 1), default=1)
    t.add_argument("--every", type=within(int, 1, 10**9), default=50,
                   help="steps between lines of the log and checkpoints")
    args = p.parse_args(words)
    if args.command == "export":
        return export_command(args)
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as e:
        p.error(f"--device {args.device}: {e}")
    args.precision = args.precision or ("fp32" if args.device == "cpu" else "bf16")
    args.dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = True  # exact for products of BF16 numbers
    if args.command == "train":
        args.asked = args.steps
        return train(args)
    return evaluate_command(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as e:
        sys.exit(f"train_draft.py: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
