"""Questions for `sala eval --tasks` in any number, as those of sala-tiny's model card but with other seeds. Same SEED,
same items.

    python3 tools/tiny/questions.py NUMBER [SEED] >questions.jsonl

Half of them are about long texts: needles in haystacks of 250 to 3,500 tokens, and stories."""
import json
import random
import sys

import gen

ROOMS = (250, 500, 1000, 1800, 3500)  # tokens of the haystacks
TEXTS = (0, 0, 700, 1500)  # and of the texts that questions are asked about


def main():
    if len(sys.argv) not in (2, 3) or not all(a.isdigit() for a in sys.argv[1:]):
        sys.exit(__doc__)
    number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 0
    r = random.Random(gen.EVAL_SEED + 1000000 * (seed + 1))  # the model card's are all smaller
    long = ("needle", "needle_word", "qa")
    short = [t for t in gen.EVAL_TASKS if t not in long]
    asked = set()  # short tasks repeat themselves: what is asked twice measures nothing new
    i = 0
    while len(asked) < number:
        task = short[i // 2 % len(short)] if i % 2 else long[i // 2 % 3]
        room = ROOMS[i // 6 % 5] if task.startswith("needle") else TEXTS[i // 6 % 4] if task == "qa" else 1500
        i += 1
        user, answer, gold = gen.task(r, "choice" if task == "mc" else task, room, True).turns[0]  # as it was taught
        if user in asked:
            continue
        asked.add(user)
        print(json.dumps({"id": f"{task}-{i}", "task": task, "user": user, "gold": [gold], "target": answer},
                         ensure_ascii=False))


main()
