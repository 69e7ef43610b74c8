#!/usr/bin/env python3
"""Compares configurations of a model by what `sala eval --out` wrote: the same questions, pair by pair.

    python3 tools/compare_eval.py FOLDER BASE NAME... [--json FILE]

FOLDER holds, for BASE and each NAME, NAME.answers.jsonl (sala eval --tasks F --out), and if wanted NAME.text.jsonl
(sala eval --ppl F --out) and NAME.states.json (sala info --check --against BASE --json). Prints Markdown: a table of
configurations and one of tasks. Score, its difference from BASE's with a 95 % interval (percentiles of a paired
bootstrap over the questions), the share of BASE's score that is kept; answers that only one of the two got right and
the exact McNemar test on them; perplexity and its ratio with a 95 % interval (bootstrap over windows).
"""
import argparse
import json
import math
import os
import random
import sys

ROUNDS = 4000


def lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def load(folder, name):
    answers = {a["index"]: a for a in lines(os.path.join(folder, name + ".answers.jsonl"))}
    text, states = (os.path.join(folder, name + end) for end in (".text.jsonl", ".states.json"))
    return {
        "name": name,
        "answers": [answers[i] for i in sorted(answers)],
        "text": lines(text) if os.path.exists(text) else None,
        "states": json.load(open(states))["against"] if os.path.exists(states) else None,
    }


def paired(base, other, key):
    a, b = base[key], other[key]
    field = "task" if key == "answers" else "tokens"
    if len(a) != len(b) or any(x[field] != y[field] for x, y in zip(a, b)):
        sys.exit(f"{other['name']}.{key}.jsonl does not belong to the same questions or text as {base['name']}'s")
    return list(zip(a, b))


def interval(pairs, statistic):
    """95 % of the statistic over resampled pairs. Pairs that are alike are drawn together: most are."""
    kinds = {}
    for p in pairs:
        kinds[p] = kinds.get(p, 0) + 1
    values, weights = list(kinds), list(kinds.values())
    r, got = random.Random(1), []
    for _ in range(ROUNDS):
        got.append(statistic(r.choices(values, weights, k=len(pairs))))
    got.sort()
    return got[int(0.025 * ROUNDS)], got[int(0.975 * ROUNDS)]


def mcnemar(lost, won):
    """Two-sided p of so uneven a split, if both were as likely."""
    n, k = lost + won, min(lost, won)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2 ** n) if n else 1.0


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def difference(pairs):
    return mean(b for _, b in pairs) - mean(a for a, _ in pairs)


def ratio(windows):  # of perplexities; a window: tokens, nats of the base, nats of the other
    return math.exp(sum(b - a for _, a, b in windows) / sum(n for n, _, _ in windows))


def compare(base, other):
    both = paired(base, other, "answers")
    scores = [(a["score"], b["score"]) for a, b in both]
    lost = sum(a["score"] > b["score"] for a, b in both)
    won = sum(a["score"] < b["score"] for a, b in both)
    row = {
        "name": other["name"], "n": len(both), "score": mean(b for _, b in scores),
        "difference": difference(scores), "kept": mean(b for _, b in scores) / mean(a for a, _ in scores),
        "lost": lost, "won": won, "p": mcnemar(lost, won),
        "changed": sum(a["answer"] != b["answer"] for a, b in both),
    }
    row["low"], row["high"] = interval(scores, difference)
    for key, of in (("exact", lambda x: x["exact"]), ("ended", lambda x: x["finish_reason"] == "stop"),
                    ("loops", lambda x: x["loop"])):
        row[key] = mean(of(b) for _, b in both)
    if base["text"] and other["text"]:
        windows = [(a["tokens"], a["nats"], b["nats"]) for a, b in paired(base, other, "text")]
        row["ppl"] = math.exp(sum(w[2] for w in windows) / sum(w[0] for w in windows))
        row["ppl_ratio"] = ratio(windows)
        row["ppl_low"], row["ppl_high"] = interval(windows, ratio)
    if other["states"]:
        layers = [s for s in other["states"]["states"] if s["after"].startswith("layer")]
        worst = min(layers, key=lambda s: s["cosine"])
        row["cosine"], row["cosine_at"] = worst["cosine"], worst["after"]
        row["kl"] = other["states"]["kl"]
    return row


def configurations(rows):
    print("| configuration | score | difference (95 %) | of the base | lost, won, p | exact | ended | loops | "
          "perplexity | ratio (95 %) | least cosine of a layer | KL |")
    print("|---|" + "---|" * 11)
    for r in rows:
        based = r is rows[0]
        cells = [r["name"], f"{100 * r['score']:.2f} %",
                 "" if based else f"{100 * r['difference']:+.2f} ({100 * r['low']:+.2f} .. {100 * r['high']:+.2f})",
                 "" if based else f"{100 * r['kept']:.2f} %",
                 "" if based else f"{r['lost']}, {r['won']}, {r['p']:.2g}",
                 f"{100 * r['exact']:.2f} %", f"{100 * r['ended']:.2f} %", f"{r['loops'] * r['n']:.0f}",
                 f"{r['ppl']:.4f}" if "ppl" in r else "",
                 f"{r['ppl_ratio']:.4f} ({r['ppl_low']:.4f} .. {r['ppl_high']:.4f})"
                 if "ppl" in r and not based else "",
                 f"{r['cosine']:.4f} ({r['cosine_at']})" if "cosine" in r and not based else "",
                 f"{r['kl']:.4f}" if "kl" in r and not based else ""]
        print("| " + " | ".join(cells) + " |")


def tasks(sets):
    names = list(dict.fromkeys(a["task"] for a in sets[0]["answers"]))
    print("\n| task | n | " + " | ".join(s["name"] for s in sets) + " |\n|---|---|" + "---|" * len(sets))
    for task in names:
        of = [[a["score"] for a in s["answers"] if a["task"] == task] for s in sets]
        print(f"| {task} | {len(of[0])} | " + " | ".join(f"{100 * mean(x):.1f}" for x in of) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("base")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", help="write the rows to this file too")
    args = parser.parse_args()
    try:
        sets = [load(args.folder, name) for name in [args.base] + args.names]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"compare_eval.py: {error}")
    rows = [compare(sets[0], s) for s in sets]
    print(f"{rows[0]['n']} questions, 95 % intervals by paired bootstrap\n")
    configurations(rows)
    tasks(sets)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(rows, f, indent=1)


main()
