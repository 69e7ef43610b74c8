"""Prompts for sala-tiny's draft head: those it is trained with (`sala dump-features --regenerate` has the model
answer them), and those that tau is measured with, from other seeds. Same arguments, same prompts.

    python3 tools/tiny/draft_data.py train NUMBER [SEED] >prompts.jsonl
    python3 tools/tiny/draft_data.py long NUMBER [SEED] >long.jsonl    questions about texts of up to 16,000 tokens
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
    """Up to six questions about one text of 1,000 to 16,000 tokens; the model answers each before the next."""
    turns, least = [("", "", "")], 1000 * 12 ** r.random() * gen.CPT
    while len(turns[0][0]) < least:
        turns = gen.task(r, gen.pick(r, ("needle", "needle_word", "qa")), 16000).turns[:6]
    talk = [m for question, answer, _ in turns for m in (("user", question), ("assistant", answer))]
    return {"messages": [dict(role=role, content=text) for role, text in talk[:-1]]}


def sample(r):
    """A third stories, a third chat of all kinds, the rest text that repeats itself, and looking things up."""
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
    kinds, words = {"train": sample, "long": long_talk, "bench": None}, sys.argv[2:]
    if len(words) not in (1, 2) or sys.argv[1] not in kinds or not all(a.isdigit() for a in words):
        sys.exit(__doc__)
    number, seed, make = int(words[0]), int(words[1]) if len(words) == 2 else 0, kinds[sys.argv[1]]
    r = random.Random(gen.EVAL_SEED // 2 + 1000000 * (seed + 1))  # neither the model's training nor its calibration
    if make is long_talk:
        r.seed(gen.EVAL_SEED // 2 + 1000000 * (seed + 1) + 500000)
    for line in (make(r) for _ in range(number)) if make else bench(number, seed):
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
