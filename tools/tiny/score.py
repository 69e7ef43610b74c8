"""The scoring rules of tools/eval.c (`sala eval`), again in Python; test_tiny.py compares the two answer by answer.

score(item, answer): item is a line of a tasks file: task, gold (text, number or a list of them), target if there is one."""
import re

ANY = {"niah", "qa", "lcx", "needle", "needle_word"}  # one of the gold strings suffices
SHARE = {"cwe", "fwe", "freq", "common"}  # the share of them that occurs
SPACE = " \t\n\v\f\r"
UPPER = {ord(c): ord(c) + 32 for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
LETTERS = (re.compile(r"answer[ \t\n\v\f\r]*:[ \t\n\v\f\r]*([a-dA-D])", re.I | re.A),
           re.compile(r"\\boxed\{\\text\{([A-D])\}\}"), re.compile(r"\\boxed\{([A-D])\}"))


def lower(text):
    """Of ASCII letters only, as the C does it."""
    return text.translate(UPPER)


def final(text):
    """What counts of an answer: after the last </think>, without space around it."""
    at = text.rfind("</think>")
    return text if at < 0 else text[at + len("</think>"):].strip(SPACE)


def golds(item):
    gold = item.get("gold", item.get("target"))
    gold = gold if isinstance(gold, list) else [gold]
    return [str(g) for g in gold if g is not None and str(g) != ""]


def letter(text):
    for pattern in LETTERS:
        found = pattern.search(text)
        if found:
            return lower(found.group(1))
    return None


def score(item, answer):
    wanted, task = golds(item), item["task"]
    if not answer or not wanted:
        return 0.0
    if task == "mcq":
        return float(letter(final(answer)) == lower(wanted[0]))
    text = lower(final(answer) if task in ANY | SHARE else answer)
    hits = sum(lower(g) in text for g in wanted)
    return hits / len(wanted) if task in SHARE else float(hits > 0)


def exact(item, answer, ended):
    return bool(ended) and item.get("target") == answer


def loops(answer):
    """Does a piece of 1 to 512 bytes stand at least five times in a row and fill at least 240 bytes?"""
    text = answer.encode()
    for period in range(1, min(512, len(text) - 1) + 1):
        need, run = max(5 * period, 240), period
        for i in range(period, len(text) if need <= len(text) else 0):
            run = run + 1 if text[i] == text[i - period] else period
            if run >= need:
                return True
    return False
