"""Makes what belongs to new weights of sala-tiny: golden.json from the float64 reference, the evaluation set and its
baseline, the model card. Needs numpy; minutes on one core.

    python3 tools/tiny/finish.py golden MODEL OUT.json [--only NAME,...]    only: of story, chat, chinese, needle_900,
                                                                            needle_3000, odd_text; the others stay away
    python3 tools/tiny/finish.py check MODEL [--only NAME,...]              MODEL/golden.json against the reference
    python3 tools/tiny/finish.py folder MODEL.safetensors SCORES.json BASE.json LOG.csv OUT
                                    OUT: all files of the model but golden.json, from new weights, their scores and
                                    those of the weights before, and the log of the training

After new weights, in this order: folder, golden, `make test`. The tests that quote what the model says are
t_story and t_golden_text in tests/test_cli.sh; README.md and docs/figures.md quote scores."""
import argparse
import csv
import json
import multiprocessing
import os
import random
import shutil
import sys

import numpy as np

import evaluate
import gen
import tok

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "reference"))
import sala_ref  # noqa: E402

GOLDEN_SEED, TOKENS = 7, 64
ARITHMETIC = ("float64 throughout from the BF16 weights (tests/reference/sala_ref.py), sparse rule active (dense_len 512), "
              "BOS prepended, special tokens in the prompt text are parsed, end tokens do not stop it")
FIELDS = "margins: logit distance of the best to the second token at each generated position"


# ---- golden.json ----

def needle_prompt(r, tk, length):
    while True:
        text = evaluate.prompt(gen.task(r, "needle", length, True).turns[0][0])
        if abs(len(tk.encode(text)) - length) < length * 0.03 + 10:
            return text


def candidates(tk):
    """Several prompts of each kind; of a kind, the one whose smallest margin is the widest is kept, so that rounding
    elsewhere does not change a token."""
    r, chat = random.Random(gen.EVAL_SEED + GOLDEN_SEED), evaluate.prompt
    heroes = ("brave fox", "kind girl", "shy owl", "clever boy", "proud lion", "happy frog", "lazy cat", "wise turtle")
    names = ("Pip", "Lily", "Hugo", "Tom", "Leo", "Finn", "Mia", "Otto")
    odd = ("  Two  spaces,\ttab, caf\u00e9, \u201cquotes\u201d, \U0001F642\U0001F680 \u00fc\u00f1 \u041f\u0440\u0438\u0432"
           "\u0435\u0442\n\n\nA line   with   gaps.\r\nEnd: 5\u20ac \u2192 \u03b1\u03b2 \u4f60\u597d \n ")
    return {
        "story": [f"Once upon a time there was a {heroes[i]} named {names[(i + k) % 8]}." for k in (0, 3, 5) for i in range(8)],
        "chat": [chat(f"What is the capital of {c}?") for c in ("France", "Italy", "Japan", "Egypt")] +
                [chat(q) for q in ("Who are you?", "What does the cow say?", "Tell me a story about Lily.")],
        "chinese": [f"从前有一个孩子，名字叫{n}。" for n in ("小明", "小红", "小丽", "大伟", "阿宝", "李明")],
        "needle_900": [needle_prompt(r, tk, 900) for _ in range(6)],
        "needle_3000": [needle_prompt(r, tk, 3000) for _ in range(6)],
        "odd_text": [odd + w for w in ("One day,", "Once upon a time", "This is the story of", "Long ago, in the town of",
                                       "One night")]}


def after(config, weights, prompt):
    """A decoder that has read the prompt, and the logits behind it. The whole-sequence path reads; what a step would have
    left behind is made from the inputs of the layers."""
    read, d = sala_ref.forward(config, weights, prompt, hidden=True), sala_ref.Decoder(config, weights)
    d.n, pos, same = len(prompt), np.arange(len(prompt)), sala_ref.ident
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}."
        x = sala_ref.rmsnorm(read["hidden"][i], weights[p + "input_layernorm.weight"], config.rms_norm_eps)
        if config.is_sparse(i):
            _, k, v = sala_ref.sparse_qkv(config, weights, p + "self_attn.", x, pos, same)
            for tier, size, stride in (("k1", config.ks1, config.st1), ("k2", config.ks2, config.st2)):
                rows = sala_ref.n_rows(d.n, size, stride)
                d.st[i][tier] = [k[j * stride:j * stride + size].mean(0) for j in range(rows)]
            d.st[i]["k"], d.st[i]["v"] = list(k), list(v)
        else:
            _, k, v = sala_ref.lightning_qkv(config, weights, p + "self_attn.", x, pos, same)
            age = np.exp(-sala_ref.slopes(config.lightning_nh)[None] * (d.n - 1 - pos)[:, None])  # [T, heads]
            d.st[i] = np.einsum("th,thk,thv->hkv", age, k, v, optimize=True)
    return d, read["logits"][-1]


def continuation(folder, name, text):
    """Greedy in float64, token by token."""
    tk, (config, weights) = tok.load(folder), sala_ref.read_hf(folder)
    prompt, out, margins, ends = tk.encode(text), [], [], set(config.eos_token_id)
    decoder, logits = after(config, weights, prompt)
    top = np.argsort(-logits, kind="stable")[:5]
    top5 = [int(t) for t in top], [round(float(logits[t]), 6) for t in top]
    for _ in range(TOKENS):
        best, second = np.argsort(-logits, kind="stable")[:2]
        out.append(int(best))
        margins.append(float(logits[best] - logits[second]))
        logits = decoder.step(out[-1])["logits"]
    first = next((k for k, t in enumerate(out) if t in ends), None)
    return dict(name=name, prompt=text, prompt_ids=prompt, continuation_ids=out,
                continuation_text=tk.decode(out, skip_special=False), first_eos=first, top5_ids=top5[0],
                top5_logits=top5[1], margins=[round(m, 4) for m in margins],
                worst=min(margins[:TOKENS if first is None else first + 1]))


def all_continuations(folder, wanted):
    """[(name, prompt)] -> their continuations, on two cores."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.Pool(2) as pool:
        return pool.starmap(continuation, [(folder, n, t) for n, t in wanted], chunksize=1)


def golden(folder, only):
    kinds = candidates(tok.load(folder))
    done = all_continuations(folder, [(n, t) for n, texts in kinds.items() if not only or n in only for t in texts])
    prompts = []
    for name in kinds:
        of_kind = [x for x in done if x["name"] == name]
        if of_kind:
            best = max(of_kind, key=lambda x: x["worst"])
            print(f"{name}: {len(best['prompt_ids'])} tokens, smallest margin {best['worst']:.3f}: "
                  f"{best['continuation_text'][:70]!r}")
            prompts.append({k: v for k, v in best.items() if k != "worst"})
    return dict(arithmetic=ARITHMETIC, fields=FIELDS, prompts=prompts)


def differences(there, here):
    """Of one prompt: what differs between golden.json and the reference, and by how much."""
    fields = ("prompt_ids", "continuation_ids", "continuation_text", "first_eos", "top5_ids")
    wrong = [k for k in fields if there[k] != here[k]]
    logits = max(abs(a - b) for a, b in zip(there["top5_logits"], here["top5_logits"]))
    return wrong, logits, max(abs(a - b) for a, b in zip(there["margins"], here["margins"]))


def check(folder, only):
    """golden.json may have been made in float32: logits within 1e-5, margins (of 64 positions) within 2e-4."""
    prompts = [p for p in evaluate.read(os.path.join(folder, "golden.json"))["prompts"] if not only or p["name"] in only]
    good = bool(prompts)
    for p, q in zip(prompts, all_continuations(folder, [(p["name"], p["prompt"]) for p in prompts])):
        wrong, logits, margins = differences(p, q)
        good = good and not wrong and logits <= 1e-5 and margins <= 2e-4
        print(f"{p['name']}: logits differ by {logits:.1e}, margins by {margins:.1e}"
              f"{'; other ' + ', '.join(wrong) if wrong else ''}")
    return good


# ---- the folder and its card ----

def share(x):
    return f"{x:.2f}" if abs(100 * x - round(100 * x)) < 1e-6 else f"{x:.3f}"


def accuracy_table(sets):
    names = list(sets)
    tasks = [t for t in sets[names[0]]["accuracy"] if t != "all"] + ["all"]
    head = ["| task | " + " | ".join(f"{n}, n" + " | score | exact" for n in names) + " |", "|---" * (1 + 3 * len(names)) + "|"]
    rows = []
    for t in tasks:
        cells = [sets[n]["accuracy"][t] for n in names]
        rows.append(f"| {t} | " + " | ".join(f"{c['n']} | {share(c['score'])} | {share(c['exact'])}" for c in cells) + " |")
    return "\n".join(head + rows)


def needle_table(needles):
    lengths = sorted(needles, key=int)

    def line(title, cell):
        return f"| {title} | " + " | ".join(cell(needles[n]) for n in lengths) + " |"

    def score_of(kind):
        return lambda row: share(row[kind + "_sparse"]) + (f" ({share(row[kind + '_dense'])})" if kind + "_dense" in row else "")

    return "\n".join([line("tokens", lambda row: str(row["tokens"])), "|---" * (1 + len(lengths)) + "|",
                      line("n", lambda row: str(row["n"])), line("number", score_of("needle")),
                      line("word", score_of("needle_word"))])


def card(scores, base, log):
    """MODEL_CARD.md from card.md: every {field} is filled from what was measured."""
    text = {k: v["bits_per_byte"] for k, v in scores["heldout_text"].items()}
    lines, good = evaluate.verdict(base, scores)
    with open(os.path.join(HERE, "card.md"), encoding="utf-8") as f:
        template = f.read()
    sets = scores["sets"]
    return template.format(
        steps=log[-1]["step"], tokens=round(int(log[-1]["tokens"]) / 1e6), seconds=round(float(log[-1]["seconds"])),
        accuracy=accuracy_table(sets), needles=needle_table(scores["needle_by_length"]),
        seeds=", ".join(f"{n} {s['seed']}" for n, s in sets.items()), verdict="\n".join("    " + x for x in lines),
        text=", ".join(f"{k.replace('_', ' ')} {v}" for k, v in text.items()),
        mc=", ".join(f"{share(s['accuracy']['mc']['score'])} ({n})" for n, s in sets.items()),
        before=", ".join(f"{share(s['accuracy']['mc']['score'])} ({n})" for n, s in base["sets"].items()))


def baseline(scores):
    """eval_baseline.json: what tools/gpu_check.sh and the tests compare with."""
    public = scores["sets"]["public"]
    return dict(arithmetic="BF16 activations on the GPU, FP32 residual stream, sparse rule, greedy",
                metric="score: as sala eval; exact: the whole output up to <|im_end|> equals target",
                accuracy=public["accuracy"], needle_seed=evaluate.LONG_SEED,
                needle_by_length={n: {k: v for k, v in row.items() if k != "right"}
                                  for n, row in scores["needle_by_length"].items()},
                heldout_text=scores["heldout_text"],
                outputs=[{k: x[k] for k in ("id", "exact", "output")} for x in public["outputs"]])


def write_json(path, what, indent):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(what, f, ensure_ascii=False, indent=indent)


def folder(weights, scores_path, base_path, log_path, out):
    """Geometry and tokenizer are the present model's."""
    present = os.path.join(HERE, "..", "..", "models", "sala-tiny")
    scores, base = evaluate.read(scores_path), evaluate.read(base_path)
    with open(log_path, newline="", encoding="utf-8") as f:
        log = list(csv.DictReader(f))
    os.makedirs(out, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if os.path.realpath(present) != os.path.realpath(out):
            shutil.copyfile(os.path.join(present, name), os.path.join(out, name))
    if os.path.realpath(weights) != os.path.realpath(os.path.join(out, "model.safetensors")):
        shutil.copyfile(weights, os.path.join(out, "model.safetensors"))
    public = scores["sets"]["public"]
    with open(os.path.join(out, "eval_tasks.jsonl"), "w", encoding="utf-8") as f:
        for x in evaluate.task_set(public["seed"], public["n"], tok.load(out)):
            f.write(json.dumps(x, ensure_ascii=False) + "\n")
    write_json(os.path.join(out, "eval_baseline.json"), baseline(scores), 1)
    with open(os.path.join(out, "MODEL_CARD.md"), "w", encoding="utf-8") as f:
        f.write(card(scores, base, log))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("golden", "check", "folder"))
    p.add_argument("paths", nargs="+")
    p.add_argument("--only", default="", help="kinds of golden prompts")
    a = p.parse_args()
    only, wanted = [x for x in a.only.split(",") if x], dict(golden=2, check=1, folder=5)[a.what]
    if len(a.paths) != wanted:
        p.error(f"{a.what} wants {wanted} paths, not {len(a.paths)}")
    if a.what == "golden":
        write_json(a.paths[1], golden(a.paths[0], only), 1)
    elif a.what == "check":
        sys.exit(0 if check(a.paths[0], only) else 1)
    else:
        folder(*a.paths)


if __name__ == "__main__":
    try:
        main()
    except (OSError, RuntimeError, ValueError) as e:
        sys.exit(f"finish.py: {e}")
