"""Needle tasks for `sala eval --tasks`, the ones that sala-tiny's model card reports: a sentence to be found in a haystack
of about LENGTH tokens. Same seeds, same items.

    python3 tools/tiny/needles.py LENGTH [NUMBER] >needles.jsonl       NUMBER items of each of the two kinds"""
import json
import os
import random
import sys

import gen

BASELINE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "models", "sala-tiny", "eval_baseline.json")

CARD = {512: 96, 1024: 96, 2048: 96, 4096: 64, 8192: 48, 16384: 32, 32768: 8}  # items of each kind


def main():
    if len(sys.argv) not in (2, 3) or not all(a.isdigit() for a in sys.argv[1:]):
        sys.exit(__doc__)
    length = int(sys.argv[1])
    number = int(sys.argv[2]) if len(sys.argv) == 3 else CARD.get(length, 8)
    with open(BASELINE, encoding="utf-8") as f:
        seed = json.load(f).get("needle_seed", 1000)
    for kind in ("needle", "needle_word"):
        r = random.Random(gen.EVAL_SEED + seed + length)
        for i in range(number):
            user, answer, gold = gen.task(r, kind, length, True).turns[0]
            print(json.dumps({"id": f"{kind}-{length}-{i}", "task": kind, "user": user, "gold": [gold], "target": answer},
                             ensure_ascii=False))


main()
