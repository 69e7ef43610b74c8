"""Prompts of the classes that `sala bench --spec` compares, from seeds that no training saw: the file
tests/data/spec_prompts.jsonl.

    python3 tools/tiny/prompts.py >tests/data/spec_prompts.jsonl"""
import json
import random

import gen

EACH = 4


def chat(user):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def story(r):
    return " ".join(gen.story(r)[0][:4])


def question(r):
    return chat(gen.task(r, gen.pick(r, ("qa", "mc")), 400, True).turns[0][0])


def records(r):  # cut after the fourth of them
    rows = [dict(id=i + 1, name=gen.name(r), age=r.randint(3, 90), city=gen.town(r), active=r.random() < 0.5)
            for i in range(8)]
    text = json.dumps(rows, indent=2, ensure_ascii=False)
    return text[:text.index("\n", text.index('"id": 5'))]


def code(r):  # cut after two thirds of its lines
    while True:
        lines = gen.code_doc(r).split("\n")
        text = "\n".join(lines[:len(lines) * 2 // 3])
        if len(text) > 150 and text[0] not in "[{0123456789":
            return text


def copy(r):  # what sala-tiny was taught to repeat: a sentence, a list; of a longer text it tells another
    if r.random() < 0.5:
        return chat(f"Repeat this list: {', '.join(str(r.randint(0, 99)) for _ in range(10))}.")
    return chat("Repeat this text:\n" + max(gen.story(r)[0], key=len))


def retrieval(r):
    return chat(gen.task(r, gen.pick(r, ("needle", "needle_word")), 2000, True).turns[0][0])


def main():
    for make in (story, question, records, code, copy, retrieval):
        r = random.Random(gen.EVAL_SEED + 60000)
        name = {"question": "chat", "records": "json"}.get(make.__name__, make.__name__)
        for _ in range(2 if make is retrieval else EACH):
            print(json.dumps({"class": name, "prompt": make(r)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
