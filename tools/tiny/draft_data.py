"""Prompts for sala-tiny's draft head: those it is trained with (`sala dump-features --regenerate` has the model
answer them), and those that tau is measured with, from other seeds. Same arguments, same prompts.

    python3 tools/tiny/draft_data.py train NUMBER [SEED [PERCENT]] >prompts.jsonl   of long texts (8 %)
    python3 tools/tiny/draft_data.py bench EACH [SEED] >bench.jsonl     for `sala bench --spec all --prompts`"""
import json
import random
import sys

import gen
import prompts

SHORT = [t for t in gen.TASKS if t not in ("needle", "needle_word", "story")]


def asked(text):
    return {"messages": [{"role": "user", "content": text}]}


def retrieval(r, room):
    return gen.task(r, gen.pick(r, ("needle", "needle_word", "qa")), room, True).turns[0][0]


def long_talk(r):
    """Up to four questions about one text of 1,000 to 16,000 tokens; the model answers each before the next."""
    turns, least = [("", "", "")], 1000 * 12 ** r.random() * gen.CPT
    while len(turns[0][0]) < least:
        turns = gen.task(r, gen.pick(r, ("needle", "needle_word", "qa")), 16000).turns[:4]
    talk = [m for question, answer, _ in turns for m in (("user", question), ("assistant", answer))]
    return {"messages": [dict(role=role, content=text) for role, text in talk[:-1]]}


def sample(r, long):
    """A third stories, a third chat of all kinds, the rest text that repeats itself, and looking things up; `long`
    of all look up in long texts."""
    if r.random() < long:
        return long_talk(r)
    k = r.random()
    if k < 0.2:
        return {"prompt": prompts.story(r)}
    if k < 0.35:
        return asked(gen.task(r, "story", 400).turns[0][0])
    if k < 0.68:
        return asked(gen.task(r, gen.pick(r, SHORT), r.choice((100, 100, 400))).turns[0][0])
    if k < 0.8:
        return {"prompt": prompts.records(r)}
    if k < 0.92:
        return {"prompt": prompts.code(r)}
    return asked(retrieval(r, int(250 * 12 ** r.random())))  # 250 .. 3,000 tokens


def chat(r):
    return gen.task(r, "story" if r.random() < 0.5 else gen.pick(r, SHORT), 400).turns[0][0]


def bench(each, seed):
    makers = {"story": prompts.story, "chat": lambda r: prompts.chat(chat(r)), "json": prompts.records,
              "code": prompts.code, "retrieval-1k": lambda r: prompts.chat(retrieval(r, 1000)),
              "retrieval-16k": lambda r: prompts.chat(retrieval(r, 16000))}
    for name, make in makers.items():
        r = random.Random(gen.EVAL_SEED + 70000 + 1000000 * seed)
        for _ in range(each):
            yield {"class": name, "prompt": make(r)}


def main():
    kind, words = sys.argv[1:2], sys.argv[2:]
    if kind not in (["train"], ["bench"]) or not 0 < len(words) < 4 or not all(a.isdigit() for a in words):
        sys.exit(__doc__)
    number, seed, percent = [int(a) for a in words] + [0, 8][len(words) - 1:]
    if percent > 100:
        sys.exit(f"draft_data.py: {percent} of 100 prompts cannot be of long texts")
    r = random.Random(gen.EVAL_SEED // 2 + 1000000 * (seed + 1))  # neither the model's training nor its calibration
    for line in bench(number, seed) if kind == ["bench"] else (sample(r, percent / 100) for _ in range(number)):
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
