"""tau of draft heads from `sala bench --spec all --json`: a table of classes and heads, then what was wanted of them.

    python3 tools/tiny/draft_table.py [--log train.log] bf16=a.json rtn=b.json qat=c.json plain=d.json

tau: tokens a verify, of verifies whose tree the head drew. bf16: trained with offsets; rtn, qat: the same head in
NVFP4, rounded and trained on; plain: trained without offsets. The log: what the trainer said of bf16."""
import json
import re
import sys


def taus(path):
    """{class: (tau, [share of right guesses by depth])} of a report."""
    out = {}
    with open(path) as f:
        for run in json.load(f):
            s = run["speculation"]
            if s["spec"] == "eagle" and "eagle" in s:
                e = s["eagle"]
                rights = [a / o for a, o in zip(e.get("accepted", []), e.get("offered", [])) if o]
                out[run["class"]] = e["tokens"] / max(1, e["steps"]), rights
    return out


def agreement(path):
    """Share of the answers' tokens that the teacher thinks the likeliest, by the trainer's log; None: it does not say."""
    with open(path) as f:
        found = re.findall(r"agrees in ([0-9.]+) %", f.read())
    return float(found[-1]) / 100 if found else None


def verdicts(heads, agreed):
    mean = lambda head: sum(x[0] for x in heads[head].values()) / len(heads[head])
    wanted = []
    if "bf16" in heads:
        tau = {c: x[0] for c, x in heads["bf16"].items()}
        wanted += [(f"tau on {c}", tau[c], 3.5) for c in ("story", "chat") if c in tau]
        if "retrieval-1k" in tau and "retrieval-16k" in tau:
            wanted.append(("tau at 16K / at 1K", tau["retrieval-16k"] / tau["retrieval-1k"], 0.85))
            if "plain" in heads:
                x = heads["plain"]
                wanted.append(("the same without offsets (for comparison)", x["retrieval-16k"][0] / x["retrieval-1k"][0], 0))
        if "qat" in heads:
            wanted.append(("mean tau of QAT / of BF16", mean("qat") / mean("bf16"), 0.98))
    if agreed is not None:
        wanted.append(("the teacher's likeliest token is the engine's", agreed, 0.995))
    for what, got, least in wanted:
        print(f"{'met   ' if got >= least else 'MISSED'} {what}: {got:.3f} (wanted: at least {least})")


def main():
    words, agreed = sys.argv[1:], None
    if words[:1] == ["--log"]:
        agreed, words = agreement(words[1]), words[2:]
    if not words or not all("=" in a for a in words):
        sys.exit(__doc__)
    heads = {name: taus(path) for name, path in (a.split("=", 1) for a in words)}
    classes = list(dict.fromkeys(c for h in heads.values() for c in h))
    print("| | " + " | ".join(heads) + " | right by depth, % (" + next(iter(heads)) + ") |")
    print("|---" * (len(heads) + 2) + "|")
    for c in classes:
        first = next(iter(heads.values())).get(c, (0, []))[1]
        cells = [f"{h[c][0]:.2f}" if c in h else "-" for h in heads.values()]
        print(f"| {c} | " + " | ".join(cells) + " | " + " ".join(f"{100 * x:.0f}" for x in first) + " |")
    print()
    verdicts(heads, agreed)


try:
    main()
except (OSError, ValueError) as e:
    sys.exit(f"draft_table.py: {e}")
except (KeyError, TypeError) as e:
    sys.exit(f"draft_table.py: a report is not of `sala bench --spec all --json`: {e}")
