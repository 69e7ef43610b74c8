"""Tests of what makes sala-tiny, without torch: generator, tokenizer, scores, verdict, golden.json. Needs numpy and
tokenizers; ./sala for the scores.      python3 tools/tiny/test_tiny.py [WORD...]    only tests whose names hold a WORD"""
import collections
import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np

import evaluate
import finish  # finds the reference, too
import gen
import sala_ref
import score
import tok

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
MODEL = os.path.join(ROOT, "models", "sala-tiny")
SALA = os.path.abspath(os.environ.get("SALA", os.path.join(ROOT, "sala")))


def same(path, other):
    with open(path, "rb") as f, open(other, "rb") as g:
        return f.read() == g.read()


# ---- tokenizer ----

def test_tokenizer_files(folder):
    tok.save(tok.load(MODEL), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert same(os.path.join(folder, name), os.path.join(MODEL, name)), name


def test_tokenizer_training(folder):
    """Same seed, same bytes; the trainer finds the merge that counting by hand finds."""
    texts = tok.training_texts(chars=200_000)
    tok.save(tok.train(texts, 700), folder + "/a")
    tok.save(tok.train(tok.training_texts(chars=200_000), 700), folder + "/b")
    assert same(folder + "/a/tokenizer.json", folder + "/b/tokenizer.json")
    pairs = collections.Counter()
    for t in texts:
        for piece in tok.PIECE.findall(tok.SPACE + t.replace(" ", tok.SPACE)):
            pairs.update(zip(piece, piece[1:]))
    merges = tok.load(folder + "/a").merges
    assert merges[0] == max(pairs.items(), key=lambda x: (x[1], x[0]))[0]
    assert len(tok.load(folder + "/a").vocab) == 700 and merges != tok.load(MODEL).merges[:len(merges)]


def test_tokenizer_against_hf():
    from tokenizers import Tokenizer
    a, b, r = tok.load(MODEL), Tokenizer.from_file(os.path.join(MODEL, "tokenizer.json")), random.Random(gen.EVAL_SEED + 99)
    texts = ["".join(s[0] for s in gen.document(r, 700) if isinstance(s[0], str)) for _ in range(60)]
    odd = list("abcXYZ   \n\n0123.,\"'(){}<>|_") + [tok.SPACE, "小", "明", "\U0001F642", "é", "\t", "\r", "\x00", "<s>",
                                                   tok.IM_END, tok.IM_START, " the", " Lily"]
    texts += ["".join(r.choice(odd) for _ in range(r.randint(0, 60))) for _ in range(600)] + ["", " ", "  ", "\n", "<s>"]
    for t in texts:
        ids, theirs = a.encode(t), b.encode(t).ids
        assert ids == theirs, (t[:80], ids[:30], theirs[:30])
        if t.isprintable():
            assert a.decode(ids[1:], False) == b.decode(theirs[1:], skip_special_tokens=False), t[:80]


# ---- generator ----

def test_generator_keeps_its_streams(folder):
    """Prompts, needles and the golden prompts were drawn from it: they come out again."""
    out = subprocess.run([sys.executable, os.path.join(HERE, "prompts.py")], capture_output=True, check=True).stdout
    with open(os.path.join(ROOT, "tests", "data", "spec_prompts.jsonl"), "rb") as f:
        assert out == f.read()
    kinds = finish.candidates(tok.load(MODEL))
    for p in evaluate.read(os.path.join(MODEL, "golden.json"))["prompts"]:
        assert p["prompt"] in kinds[p["name"]], p["name"]
    assert [x["user"] for x in evaluate.task_set(12, 40, tok.load(MODEL))] == \
        [x["user"] for x in evaluate.task_set(12, 40, tok.load(MODEL))]


def options(user):
    return dict(re.findall(r"\n([A-D])\. (.*)", user))


def test_multiple_choice():
    """Distinct options; the letter of the content; the content in front of the letter; all letters as often."""
    r, letters, counts = random.Random(1), collections.Counter(), collections.Counter()
    for _ in range(600):
        for name in ("choice", "letter"):
            user, answer, gold = gen.task(r, name, 300).turns[0]
            menu = options(user)
            assert len(set(menu.values())) == len(menu) >= 2, user
            named = re.findall(r"(\S.*?) is ([A-D])\.", answer)
            for content, letter in named:
                if "answer" not in content:
                    assert content.endswith(menu[letter]), (user, answer)
                letters[letter] += 1
            if gold.startswith("The answer"):
                assert answer.endswith(gold) and gold[-2] in menu
                assert f" {menu[gold[-2]]} is {gold[-2]}. " + gold in answer, answer
            counts[len(menu)] += name == "letter"
    total = sum(letters.values())
    assert all(0.22 < n / total < 0.28 for n in letters.values()), letters
    assert set(counts) == {2, 3, 4}
    assert "letter" not in gen.EVAL_TASKS and "choice" not in gen.EVAL_TASKS


def test_letters_in_training_text():
    """--mix letters gives several thousand letters to a million tokens, and finds each of them."""
    import train
    counts = {}
    for mix in ("plain", "letters"):
        w, n, found = train.Writer(MODEL, 5, mix), 0, 0
        while n < 60_000:
            ids, weights = w.document(1500, 0.1)
            at = [i for i, x in enumerate(weights) if x == train.LETTER_WEIGHT]
            assert all(ids[i] in w.letters and ids[i - 1] == w.is_ for i in at)
            n, found = n + len(ids), found + len(at)
        counts[mix] = 1e6 * found / n
    assert counts["letters"] > 3000 and counts["letters"] > 3 * counts["plain"], counts


def test_spliced():
    """The Bible's words, each pair of neighbours from it, but no passage of it; --hold's training text has it."""
    import train
    text = " ".join(t for _, t in gen.bible())
    words = text.split(" ")
    pairs, r = set(zip(words, words[1:])), random.Random(4)
    made = [gen.spliced(r) for _ in range(20)]
    assert made[0] == gen.spliced(random.Random(4)) and all(100 <= len(t.split(" ")) <= 600 for t in made)
    assert all(p in pairs for t in made for p in zip(t.split(" "), t.split(" ")[1:]))
    assert not any(t in text for t in made)
    w, r = train.Writer(MODEL, 5, "letters", 1.0), random.Random(5)
    ids, weights = w.document(1500, 0.1)
    assert r.random() < 1 and ids == [1] + w.tok.text(gen.spliced(r)) + [2] and weights == [0] + [1] * (len(ids) - 1)


# ---- scores ----

ANSWERS = ["", "MOO", "it says moo.", "<think>moo</think> baa", "a</think>  woof\n", "ANSWER: b", "The answer : C and answer:d",
           "answer B", r"\boxed{\text{D}}", r"\boxed{a} \boxed{B}", "answer: e answer: a", "É moo É", "42", "1,5 and 2.5",
           "ab " * 100, "x" * 239, "x" * 240, "0123456789" * 24, ("y" * 60) * 4, "The answer is B.", "\u2003moo", "moo baa woof"]
GOLDS = [["moo"], ["MOO", "baa"], ["b"], ["C"], [42], [2.5], ["D", "A"], "moo", ["é"], ["The answer is B."], ["it says moo."]]
TASKS = ("mcq", "niah", "qa", "lcx", "cwe", "fwe", "needle", "needle_word", "freq", "common", "mc", "own")


def sala_scores(folder, items, answers):
    """What `sala eval` makes of these answers: it judges again what an earlier run wrote down. One task each."""
    tasks, results = os.path.join(folder, "tasks.jsonl"), os.path.join(folder, "results.jsonl")
    with open(tasks, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(x, ensure_ascii=False) + "\n" for x in items)
    command = [SALA, "eval", "-q", "-m", MODEL, "--tasks", tasks, "--out", results, "-n", "1", "--json"]
    if not os.path.exists(results):
        subprocess.run(command, capture_output=True, check=True)
    with open(results, encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    with open(results, "w", encoding="utf-8") as f:
        for x in lines:
            answer, ended = answers[x["index"]]
            x.update(answer=answer, finish_reason="stop" if ended else "length")
            f.write(json.dumps(x, ensure_ascii=False) + "\n")
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["tasks"]


def test_scores_as_sala(folder):
    """Answer by answer the score, the exact match and the loops of tools/eval.c."""
    if not os.path.exists(SALA):
        sys.exit(f"test_tiny.py: {SALA} is missing: make")
    r, compared, right = random.Random(4), 0, 0
    pairs = [(a, g) for a in ANSWERS for g in GOLDS]
    r.shuffle(pairs)
    for k in range(0, len(pairs), 8):  # with every task eight of the pairs, other ones each time
        items, answers = [], []
        for i, task in enumerate(TASKS):
            answer, gold = pairs[(k + i) % len(pairs)]
            target = answer if r.random() < 0.5 else "x"
            items.append(dict(task=task, question=f"What is {i}?", gold=gold, target=target))
            answers.append((answer, r.random() < 0.8))
        got = sala_scores(folder, items, answers)
        for x, (answer, ended) in zip(items, answers):
            there = got[x["task"]]
            assert abs(there["score"] - score.score(x, answer)) < 1e-5, (x, answer, there)
            assert there["exact"] == score.exact(x, answer, ended), (x, answer, ended, there)
            assert there["loops"] == score.loops(answer), (x, answer, there)
            compared, right = compared + 1, right + (there["score"] > 0)
    assert compared > 300 and 50 < right < compared - 50, (compared, right)


# ---- the end of a training ----

def scores(mc, qa, bits, needle):
    outputs = [dict(id=i, task=t, score=x) for t, right in (("mc", mc), ("qa", qa)) for i, x in enumerate(right)]
    return dict(sets=dict(public=dict(outputs=outputs)), heldout_text=dict(story=dict(bits_per_byte=bits)),
                needle_by_length={"512": dict(right=dict(needle_sparse=needle))}, left_out=[])


def test_verdict():
    base = scores([0] * 30, [1] * 20, 0.2, [1] * 20)
    for new, good in ((scores([1] * 28 + [0] * 2, [1] * 20, 0.2, [1] * 20), True),
                      (scores([1] * 26 + [0] * 4, [1] * 20, 0.2, [1] * 20), False),  # 0.867
                      (scores([1] * 30, [1] * 16 + [0] * 4, 0.2, [1] * 20), True),  # 4 lost: p 0.06
                      (scores([1] * 30, [1] * 15 + [0] * 5, 0.2, [1] * 20), False),
                      (scores([1] * 30, [1] * 20, 0.205, [1] * 20), False),
                      (scores([1] * 30, [1] * 20, 0.2, [0] * 6 + [1] * 14), False),
                      (dict(scores([1] * 30, [1] * 20, 0.2, [1] * 20), left_out=["text"]), False),
                      (scores([], [1] * 20, 0.2, [1] * 20), False)):
        before = base if new["sets"]["public"]["outputs"][0]["task"] == "mc" else new
        lines, got = evaluate.verdict(before, new)
        assert got == good and lines[-1].startswith("VERDICT: " + ("good" if good else "not good")), lines
    less = dict(base, needle_by_length={}, left_out=["needles of 512"])
    assert "not compared: needles of 512 (of the weights before)" in evaluate.verdict(less, base)[0]
    less["sets"] = {}
    assert "mc was not measured" in evaluate.verdict(less, base)[0][-1]
    try:
        evaluate.verdict(base, scores([1] * 29, [1] * 20, 0.2, [1] * 20))
        raise AssertionError("other items were compared")
    except SystemExit as e:
        assert "not the same" in str(e)


def test_folder(folder):
    """From weights, scores and a log to all files of the model."""
    tk = tok.load(MODEL)
    report = {}
    for name in ("base", "scores"):
        report[name] = dict(sets={}, needle_by_length={}, heldout_text=dict(story=dict(bits_per_byte=0.2)), left_out=[])
        for which, (seed, _) in evaluate.SETS.items():
            items = evaluate.task_set(seed, 200, tk)
            given = [(x["target"] if name == "scores" or x["task"] != "mc" else "No.", True) for x in items]
            accuracy, rows = evaluate.tables(items, given)
            report[name]["sets"][which] = dict(seed=seed, n=200, accuracy=accuracy, outputs=rows)
        for n in evaluate.LENGTHS:
            report[name]["needle_by_length"][str(n)] = dict(
                n=4, tokens=n, needle_sparse=1.0, needle_word_sparse=0.75, right=dict(needle_sparse=[1] * 4))
        finish.write_json(f"{folder}/{name}.json", report[name], 1)
    with open(folder + "/log.csv", "w", encoding="utf-8") as f:
        f.write("seconds,step,tokens\n10,200,13000000\n300.5,4000,262000000\n")
    out = folder + "/out"
    finish.folder(os.path.join(MODEL, "model.safetensors"), f"{folder}/scores.json", f"{folder}/base.json",
                  f"{folder}/log.csv", out)
    assert sorted(os.listdir(out) + ["golden.json"]) == sorted(os.listdir(MODEL))
    with open(out + "/MODEL_CARD.md", encoding="utf-8") as f:
        text = f.read()
    for part in ("4000 more steps, 262M tokens in 300 s", "| mc | 24 | 1.00 | 1.00 | 24 | 1.00 |", "VERDICT: good",
                 "0.00 (public), 0.00 (private). Now: 1.00 (public)", "| tokens | 512 | 1024 |"):
        assert part in text, (part, text)
    assert "{" not in text.replace("{1,", ""), text
    public = evaluate.read(out + "/eval_baseline.json")
    with open(out + "/eval_tasks.jsonl", encoding="utf-8") as f:
        tasks = [json.loads(line) for line in f]
    assert [x["id"] for x in tasks] == [x["id"] for x in public["outputs"]] and len(tasks) == 200
    assert all(x["target"] == y["output"] for x, y in zip(tasks, public["outputs"]))


def test_after():
    """A decoder that read a prompt at once goes on like one that took steps: with 25 tokens all is dense and a window
    of the second tier is not complete, 59 and 60 are on both sides of the sparse rule's beginning."""
    config = sala_ref.small_config()
    weights, tokens = sala_ref.make_model(config, 3), sala_ref.make_tokens(config, 200, 3)
    for n in (25, 59, 60, 128):
        steps = sala_ref.Decoder(config, weights)
        for t in tokens[:n]:
            logits = steps.step(t)["logits"]
        decoder, last = finish.after(config, weights, tokens[:n])
        assert np.abs(last - logits).max() < 1e-9, n
        for t in tokens[n:n + 60]:
            here, there = decoder.step(t), steps.step(t)
            assert np.abs(here["logits"] - there["logits"]).max() < 1e-9 and here["blocks"] == there["blocks"], n


def test_golden():
    """golden.json's short prompts, decoded again in float64; a changed number is noticed."""
    assert finish.check(MODEL, ["story", "odd_text"])
    there = evaluate.read(os.path.join(MODEL, "golden.json"))["prompts"][0]
    wrong = dict(there, top5_logits=[there["top5_logits"][0] + 2e-5] + there["top5_logits"][1:])
    wrong["continuation_ids"] = [0] + there["continuation_ids"][1:]
    chosen = finish.golden(MODEL, ["chinese"])["prompts"]
    assert [p["prompt"] for p in chosen] == [p["prompt"] for p in evaluate.read(os.path.join(MODEL, "golden.json"))["prompts"]
                                             if p["name"] == "chinese"]
    names, logits, margins = finish.differences(wrong, there)
    assert names == ["continuation_ids"] and logits > 1e-5 and margins == 0


def run(tests, words):
    """Calls each test, with a folder of its own if it takes one; prints what CI adds up."""
    passed = failed = 0
    for name, test in sorted(tests.items()):
        if not name.startswith("test_") or not callable(test) or (words and not any(w in name for w in words)):
            continue
        folder = tempfile.mkdtemp()
        try:
            test(*[folder] * len(inspect.signature(test).parameters))
            print("ok", name[5:], flush=True)
            passed += 1
        except (Exception, SystemExit) as e:  # counted, and the others go on
            import traceback
            traceback.print_exc()
            print("FAILED", name[5:], type(e).__name__, flush=True)
            failed += 1
        finally:
            shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed")
    return failed == 0 and passed > 0


if __name__ == "__main__":
    sys.exit(0 if run(globals(), sys.argv[1:]) else 1)
