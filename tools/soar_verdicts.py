#!/usr/bin/env python3
"""What `sh tools/gpu_check.sh soar` measured in the folder named, beside what is wanted. Python's standard library only."""

import csv
import json
import os
import re
import sys

folder = sys.argv[1]


def text(name):
    path = os.path.join(folder, name)
    return open(path, encoding="utf-8").read() if os.path.exists(path) else ""


def rows(name):
    """{"off": row, "auto": row} of the forced runs in a report; nothing where it was not written."""
    try:
        return {r["speculation"]["spec"]: r for r in json.loads(text(name + ".json"))["rows"] if r["row"] == "forced"}
    except (ValueError, KeyError):
        return {}


def want(what, got, wanted, at_most=False, unit=""):
    met = got is not None and (got <= wanted if at_most else got >= wanted)
    value = "not measured" if got is None else f"{got:.5g}{unit}"
    print(f"{'met   ' if met else 'MISSED'} {what}: {value} (wanted: {'at most' if at_most else 'at least'} {wanted:.7g}{unit})")


def number(pattern, name):
    found = re.search(pattern, text(name), re.M)
    return float(found.group(1)) if found else None


for name in ("soar-one-bf16", "soar-one", "soar-eight-bf16", "soar-eight", "soar-long", "soar-max", "soar-wide"):
    for spec, r in rows(name).items():
        print(f"       {name}, drafts {spec}: {r['seconds']:.2f} s, {r['output_tokens'] / r['seconds']:.0f} tokens/s, first "
              f"token after {r['ttft'][0]:.3f} s, {1e3 * r['tpot'][0]:.2f} ms a token (median), "
              f"{r['speculation']['tokens_per_step']:.2f} tokens a step, {r['decode_gb_per_second']:.0f} GB/s")
for name, at_once, goal in (("soar-one", 1, 4), ("soar-eight", 8, 2.2)):
    plain, ours = rows(name + "-bf16").get("off"), rows(name)
    for spec in ("auto", "off"):
        gain = plain["seconds"] / ours[spec]["seconds"] if plain and spec in ours else None
        if spec == "auto":
            want(f"0.1k to 4k, {at_once} at once: BF16 without drafts / NVFP4 with them", gain, goal, unit="x")
        elif gain:
            print(f"       the same without drafts: {gain:.2f}x")

want("256 sequences at 2K", number(r"^decode .*: ([0-9.]+) t/s", "soar-256-nvfp4-head.log"), 9000, unit=" t/s")
taken = number(r"planned, ([0-9.]+) GiB taken", "soar-256-nvfp4-head.log")
want("their memory", taken and taken * 1.073741824, 32, at_most=True, unit=" GB")
excess = number(r"GiB taken \(([-+0-9.]+) %\)", "soar-256-nvfp4-head.log")
want("memory taken beside the plan", None if excess is None else abs(excess), 2, at_most=True, unit=" %")
wide = rows("soar-wide").get("off")
want("steps until the next token, at most", wide and wide["longest_wait_steps"], 1, at_most=True)
want("prompt tokens in a step while others generate", wide and wide["prompt_tokens_beside"], 512, at_most=True)
if wide:
    print(f"       the longest wait of a sequence: {1e3 * wide['longest_wait']:.1f} ms")

for n in (1, 8, 64):
    log = f"soar-host-{n}-nvfp4-head.log"
    rate, graph = number(r"^decode .*: ([0-9.]+) t/s", log), number(r"^the step as a graph +\d+ +([0-9.]+)", log)
    share = 100 * (1 - graph * 1e-6 * rate / n) if rate and graph else None
    want(f"host time that is not hidden, {n} at once", share, 2, at_most=True, unit=" %")

if text("context.csv"):
    by_length = {int(float(r["context"])): float(r["decode_tokens_per_second"]) for r in
                 csv.DictReader(text("context.csv").splitlines())}
    for context, rate in by_length.items():
        print(f"       {context} tokens: decodes {rate:.1f} t/s")
    want("speed by context reaches", max(by_length, default=None), 1 << 20, unit=" tokens")
    if 1 << 16 in by_length and 1 << 20 in by_length:
        want("decoding at 1M / at 64K", by_length[1 << 20] / by_length[1 << 16], 0.85)
else:
    want("speed by context reaches", None, 1 << 20, unit=" tokens")
