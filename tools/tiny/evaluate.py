"""Measures a sala-tiny: tasks of fresh seeds, needles by length, held-out text. Needs torch, but for --verdict and --sets.

    python3 tools/tiny/evaluate.py MODEL OUT.json [--budget SECONDS] [--device cuda|cpu] [--quick]
    python3 tools/tiny/evaluate.py --verdict BASE.json NEW.json     did multiple choice come, did anything else go?
    python3 tools/tiny/evaluate.py --tasks SEED NUMBER              the questions themselves, as JSON lines

MODEL is a folder with model.safetensors; sparse rule, greedy, BF16 on a GPU. OUT.json is written after every part, so
that a run that is cut short leaves what it has. A part that the budget does not reach is left out and named in "left_out".
The scores are those of `sala eval` (score.py); "exact" is: the whole answer and its end are the target's."""
import argparse
import json
import math
import os
import random
import sys
import time

import gen
import score
import tok

HERE = os.path.dirname(os.path.abspath(__file__))
SETS = {"public": (12, 200), "private": (13, 600)}  # name: (seed, items). New weights want new seeds.
LENGTHS = {512: (96, 48), 1024: (96, 32), 2048: (96, 16), 4096: (64, 8), 8192: (48, 4), 16384: (32, 2), 32768: (8, 1)}
LONG_SEED, TEXT_SEED = 21000, 11  # added to gen.EVAL_SEED, as the sets' seeds
LONGEST_ANSWER = 256  # as `sala eval`
ROOMS, TEXTS = (250, 500, 1000, 1800, 3500), (0, 0, 700, 1500)


def prompt(user):
    return f"{tok.IM_START}user\n{user}{tok.IM_END}\n{tok.IM_START}assistant\n"


def task_set(seed, number, tk):
    """Items of a set: long tasks and multiple choice first, then the others in turn. Same seed, same items."""
    r, out = random.Random(gen.EVAL_SEED + seed), []
    share = number / 200
    plan = [t for t, n in (("needle", 40), ("needle_word", 20), ("qa", 24), ("mc", 24)) for _ in range(int(n * share))]
    rest = [t for t in gen.EVAL_TASKS if t not in plan]
    plan = (plan + rest * number)[:number]
    for i, name in enumerate(plan):
        room = ROOMS[i % 5] if name.startswith("needle") else TEXTS[i % 4] if name == "qa" else 1500
        user, target, gold = gen.task(r, "choice" if name == "mc" else name, room, True).turns[0]
        out.append(dict(id=i, task=name, user=user, prompt=prompt(user), prompt_tokens=len(tk.encode(prompt(user))),
                        gold=[gold], target=target))
    return out


def heldout_texts():
    r = random.Random(gen.EVAL_SEED + TEXT_SEED)
    kinds = dict(story=lambda: gen.paragraphs(r, gen.story(r)[0]), dialogue=lambda: gen.dialogue(r),
                 chinese=lambda: gen.zplain(r), code=lambda: gen.code_doc(r))
    out = {k: [make() for _ in range(60)] for k, make in kinds.items()}
    bible = [t for _, t in gen.bible(heldout=True)]
    out["bible_heldout"] = bible[:12]
    out["bible_heldout_long"] = [" ".join(bible)[:36000]]
    return out


class Judge:
    def __init__(self, folder, device):
        import torch
        import model
        self.torch, self.model, self.device = torch, model, device
        torch.backends.cuda.matmul.allow_tf32 = False
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.tok = tok.load(folder if os.path.exists(os.path.join(folder, "tokenizer.json")) else
                            os.path.join(HERE, "..", "..", "models", "sala-tiny"))
        self.net = model.load(os.path.join(folder, "model.safetensors"), device).eval()
        self.ends = (tok.EOS, self.tok.special[tok.IM_END])

    def hidden(self, sequences, mode="sparse"):
        with self.torch.no_grad():
            return self.net(self.model.pad(sequences, self.device), mode, self.dtype)[0]

    def generate(self, prompts, limit=LONGEST_ANSWER, mode="sparse"):
        """Greedy; the whole sequence again for each token. -> [(ids without the end, did it end?)]"""
        torch, sequences, ended = self.torch, [list(p) for p in prompts], [False] * len(prompts)
        for _ in range(limit):
            at = torch.tensor([len(s) - 1 for s in sequences], device=self.device)
            h = self.hidden(sequences, mode)[torch.arange(len(sequences), device=self.device), at]
            for i, best in enumerate(self.net.logits(h).float().argmax(-1).tolist()):
                if not ended[i]:
                    ended[i] = best in self.ends
                    sequences[i] += [] if ended[i] else [best]
            if all(ended):
                break
        return [(s[len(p):], e) for s, p, e in zip(sequences, prompts, ended)]

    def exact(self, prompts, targets, mode="sparse"):
        """Would the greedy answer be the target and end there? By one forward: under the target's own prefix every
        best token is the target's."""
        tails = [self.tok.text(t, prefix=False) + [self.tok.special[tok.IM_END]] for t in targets]
        h, out = self.hidden([p + t for p, t in zip(prompts, tails)], mode), []
        for i, (p, t) in enumerate(zip(prompts, tails)):
            best = self.net.logits(h[i, len(p) - 1:len(p) + len(t) - 1]).float().argmax(-1)
            out.append(best.tolist() == t)
        return out

    def answers(self, items, limit=LONGEST_ANSWER, batch=20):
        """-> [(answer, ended)] in the items' order; only what is not exactly the target is generated."""
        ids = [self.tok.encode(x["prompt"]) for x in items]
        order = sorted(range(len(items)), key=lambda i: len(ids[i]))
        out, missed = {}, []
        for k in range(0, len(order), batch):
            part = order[k:k + batch]
            for i, right in zip(part, self.exact([ids[i] for i in part], [items[i]["target"] for i in part])):
                out[i] = (items[i]["target"], True)
                missed += [] if right else [i]
        for k in range(0, len(missed), batch):
            part = missed[k:k + batch]
            for i, (answer, ended) in zip(part, self.generate([ids[i] for i in part], limit)):
                out[i] = (self.tok.decode(answer), ended)
        return [out[i] for i in range(len(items))]

    def nats(self, texts, mode="sparse"):
        total = tokens = size = 0
        for t in texts:
            ids = [tok.BOS] + self.tok.text(t) + [tok.EOS]
            lg = self.net.logits(self.hidden([ids], mode)[0, :len(ids) - 1]).float()
            goal = self.torch.tensor(ids[1:], device=self.device)
            with self.torch.no_grad():
                total += self.torch.nn.functional.cross_entropy(lg, goal, reduction="sum").item()
            tokens, size = tokens + len(ids) - 1, size + len(t.encode())
        return dict(nats_per_token=round(total / tokens, 4), bits_per_byte=round(total / size / math.log(2), 4),
                    tokens=tokens)

    def needles(self, length, number, batch):
        row = dict(n=number, right={})
        for kind in ("needle", "needle_word"):
            r = random.Random(gen.EVAL_SEED + LONG_SEED + length)
            turns = [gen.task(r, kind, length, True).turns[0] for _ in range(number)]
            ids, targets = [self.tok.encode(prompt(u)) for u, _, _ in turns], [a for _, a, _ in turns]
            for mode in ("sparse", "dense") if length in (2048, 16384) else ("sparse",):
                ok = [x for i in range(0, number, batch) for x in self.exact(ids[i:i + batch], targets[i:i + batch], mode)]
                row[f"{kind}_{mode}"] = round(sum(ok) / number, 4)
                row["right"][f"{kind}_{mode}"] = [int(x) for x in ok]
            row["tokens"] = round(sum(map(len, ids)) / number)
        return row


def tables(items, answers):
    """-> {task: {n, score, exact, ended, loops}}, and a line for each item."""
    rows, by = [], {}
    for x, (answer, ended) in zip(items, answers):
        rows.append(dict(id=x["id"], task=x["task"], score=score.score(x, answer), exact=score.exact(x, answer, ended),
                         ended=ended, loop=score.loops(answer), output=answer))
        for name in (x["task"], "all"):
            by.setdefault(name, []).append(rows[-1])
    return {name: dict(n=len(v), score=round(sum(x["score"] for x in v) / len(v), 4),
                       exact=round(sum(x["exact"] for x in v) / len(v), 4),
                       ended=round(sum(x["ended"] for x in v) / len(v), 4), loops=sum(x["loop"] for x in v))
            for name, v in by.items()}, rows


def measure(judge, out, budget, quick):
    """Every part of the measurement while there is time; `out` is written again after each."""
    begun, report = time.time(), dict(sets={}, needle_by_length={}, heldout_text={})

    def one_set(name):
        seed, number = SETS[name]
        items = task_set(seed, 100 if quick else number, judge.tok)
        if quick:
            items = list({x["task"]: x for x in items if x["prompt_tokens"] < 250}.values())
        accuracy, rows = tables(items, judge.answers(items, 8 if quick else LONGEST_ANSWER))
        report["sets"][name] = dict(seed=seed, n=len(items), accuracy=accuracy, outputs=rows)
        print(name, json.dumps({k: v["score"] for k, v in accuracy.items()}), flush=True)

    def one_length(length):
        number, batch = LENGTHS[length]
        row = judge.needles(length, 2 if quick else number, batch)
        report["needle_by_length"][str(length)] = row
        print(length, json.dumps({k: v for k, v in row.items() if k != "right"}), flush=True)

    def text():
        for name, texts in heldout_texts().items():
            texts = [t[:500] for t in texts[:2]] if quick else texts
            report["heldout_text"][name] = judge.nats(texts)
            if name == "bible_heldout_long":
                report["heldout_text"][name + "_dense"] = judge.nats(texts, "dense")
        print(json.dumps({k: v["bits_per_byte"] for k, v in report["heldout_text"].items()}), flush=True)

    parts = [(f"set {n}", one_set, n) for n in SETS] + [("text", lambda _: text(), None)]
    parts += [(f"needles of {n}", one_length, n) for n in sorted(LENGTHS) if not quick or n <= 512]
    report["left_out"] = [name for name, _, _ in parts]  # until it is done
    for name, part, argument in parts:
        if time.time() - begun > budget:
            break
        part(argument)
        report["left_out"].remove(name)
        report["seconds"] = round(time.time() - begun, 1)
        with open(out + ".new", "w", encoding="utf-8") as f:
            json.dump(report, f, ensure_ascii=False, indent=1)
        os.replace(out + ".new", out)
    if report["left_out"]:
        print("left out:", ", ".join(report["left_out"]), flush=True)


# ---- the verdict ----

def worse(lost, won):
    """One-sided p of losing so many of the items on which two models differ, if both were as likely."""
    n = lost + won
    return sum(math.comb(n, k) for k in range(lost, n + 1)) / 2 ** n


def pairs(base, new):
    """-> {what: (scores of base, of new)} on the same items."""
    out = {}
    for name, there in new["sets"].items():
        if name not in base["sets"]:
            continue
        here = base["sets"][name]["outputs"]
        if [(x["id"], x["task"]) for x in here] != [(y["id"], y["task"]) for y in there["outputs"]]:
            sys.exit(f"evaluate.py: the set {name} is not the same in both files: measure both with the same SETS")
        for x, y in zip(here, there["outputs"]):
            a, b = out.setdefault(x["task"], ([], []))
            a.append(x["score"])
            b.append(y["score"])
    for length, there in new["needle_by_length"].items():
        for kind, right in there["right"].items():
            if kind in base["needle_by_length"].get(length, dict(right={}))["right"]:
                out[f"{kind} {length}"] = (base["needle_by_length"][length]["right"][kind], right)
    return out


def verdict(base, new):
    """-> (lines to print, is it good?)"""
    lines, bad = [], []
    for what, (a, b) in pairs(base, new).items():
        lost, won = sum(x > y for x, y in zip(a, b)), sum(x < y for x, y in zip(a, b))
        p, before, after = worse(lost, won), sum(a) / len(a), sum(b) / len(b)
        wrong = after < 0.9 if what == "mc" else lost > won and p < 0.05
        bad += [what] if wrong else []
        lines.append(f"{what:24s} n {len(a):4d}  before {before:.3f}  after {after:.3f}  lost {lost:3d} won {won:3d}"
                     f"  p {p:.3f}{'  BAD' if wrong else ''}")
    for what, y in new["heldout_text"].items():
        x = base["heldout_text"].get(what, y)
        wrong = y["bits_per_byte"] > 1.02 * x["bits_per_byte"]
        bad += [what] if wrong else []
        lines.append(f"{what:24s} bits a byte  before {x['bits_per_byte']:.4f}  after {y['bits_per_byte']:.4f}"
                     f"{'  BAD' if wrong else ''}")
    if not any(line.startswith("mc ") for line in lines):
        bad.append("mc was not measured")
    bad += [f"not measured: {x}" for x in new["left_out"]]
    lines += [f"not compared: {x} (of the weights before)" for x in base["left_out"]]
    lines.append("VERDICT: " + ("not good: " + ", ".join(bad) if bad else
                                "good: multiple choice is learned, nothing got worse"))
    return lines, not bad


def read(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?")
    p.add_argument("out", nargs="?")
    p.add_argument("--budget", type=float, default=600)
    p.add_argument("--device", default="cuda")
    p.add_argument("--quick", action="store_true", help="a short item of each kind")
    p.add_argument("--verdict", nargs=2, metavar=("BASE", "NEW"))
    p.add_argument("--tasks", nargs=2, type=int, metavar=("SEED", "NUMBER"))
    a = p.parse_args()
    if a.verdict:
        lines, good = verdict(*map(read, a.verdict))
        print("\n".join(lines))
        sys.exit(0 if good else 1)
    if a.tasks:
        for x in task_set(*a.tasks, tok.load(os.path.join(HERE, "..", "..", "models", "sala-tiny"))):
            print(json.dumps(x, ensure_ascii=False))
        return
    if not a.model or not a.out:
        p.error("MODEL and OUT.json are needed")
    measure(Judge(a.model, a.device), a.out, a.budget, a.quick)


if __name__ == "__main__":
    try:
        main()
    except (OSError, RuntimeError, ValueError) as e:
        sys.exit(f"evaluate.py: {e}")
