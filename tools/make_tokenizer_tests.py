"""Writes tests/data/tokenizer: a second tokenizer, and what the Hugging Face `tokenizers` library gives for
thousands of texts. tests/test_tokenizer.c compares sala with it. Needs `pip install tokenizers jinja2`, and 8 GB.

    python tools/make_tokenizer_tests.py MODEL_FOLDER TEXT.txt[.gz] GENERATOR.py OUT_FOLDER
    python tools/make_tokenizer_tests.py --check

The second form writes nothing: it compares the committed files with what the installed library gives (in the
repository's root; only `tokenizers` is needed).

MODEL_FOLDER holds the tokenizer.json to test beside the second one (models/sala-tiny); TEXT is an English text and
GENERATOR a module with plain(random) -> segments (str: text) that yields Chinese and code among other things; both
are what the second tokenizer is trained on. Everything is deterministic.

Written:
  second/tokenizer.json, tokenizer_config.json    Metaspace, merges as pairs, added tokens of every kind but single_word
  cases.json   {"encode": [[text, model ids, its plain ids or 0, second ids, its plain ids or 0], ...],
                "decode": {name: [[ids, text, text with special tokens], ...]}, "single": {name: hashes},
                "chat": {name: [[[role, content], ...], ids]}, "long": {name: [[pattern, bytes, count, hash], ...]}}
  small.json   [[tokenizer.json as a string, [[text, ids, plain ids or 0, decoded], ...]], ...] odd configurations
Ids are without BOS except in "chat". "plain ids" (special tokens not parsed) are 0 where they are the same."""
import gzip
import importlib.util
import json
import os
import random
import re
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPACE = "\u2581"
MARKS = ["<|im_end|>", "<|im_start|>"]


def fnv(data, h=0xCBF29CE484222325):
    for b in data:
        h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def ids_hash(ids):
    return "%016x" % fnv(b"".join(i.to_bytes(4, "little") for i in ids))


def encode(tok, text, special):
    tok.encode_special_tokens = not special
    return tok.encode(text, add_special_tokens=False).ids


def both(tok, text):
    a, b = encode(tok, text, True), encode(tok, text, False)
    return [a, 0 if a == b else b]


# ---- the second tokenizer ----

def training_text(text_path, generator_path):
    opened = gzip.open(text_path, "rt", encoding="utf-8") if text_path.endswith(".gz") else open(text_path, encoding="utf-8")
    with opened as f:
        lines = f.read()[:3_000_000].split("\n")
    sys.path.insert(0, os.path.dirname(os.path.abspath(generator_path)))
    spec = importlib.util.spec_from_file_location("generator", generator_path)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    r = random.Random(11)
    for _ in range(1500):
        lines += ["".join(s if isinstance(s, str) else s[0] if isinstance(s[0], str) else "" for s in generator.plain(r))]
    with open(generator_path, encoding="utf-8") as f:
        lines += [line[:200] for line in f.read().split("\n")]  # code
    return lines


def added(content, id, **flags):
    base = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
    base.update(flags)
    return dict(id=id, content=content, **base)


def unllama(strip):
    last = [dict(type="Strip", content=" ", start=1, stop=0)] if strip else []
    return dict(type="Sequence", decoders=[dict(type="Replace", pattern=dict(String=SPACE), content=" "), dict(type="ByteFallback"), dict(type="Fuse")] + last)


def make_second(lines, folder):
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    start = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=16000, special_tokens=start, show_progress=False, limit_alphabet=1500, max_token_length=16)
    tok.train_from_iterator(lines, trainer)
    js = json.loads(tok.to_str())
    vocab, n = js["model"]["vocab"], len(js["model"]["vocab"])
    extra = [(MARKS[0], dict(special=True)), (MARKS[1], dict(special=True)), ("<think>", dict(normalized=True)),
             ("</think>", dict(normalized=True)), ("<tool>", dict(special=True, lstrip=True, rstrip=True)), ("<right>", dict(rstrip=True)),
             ("<left>", dict(lstrip=True)), ("New York", dict(normalized=True)), ("e.g.", {}),
             ("    ", {}), ("        ", {}), ("<|x|>", dict(special=True)), ("<|x|>y", {}), ("\r\n\r\n", dict(normalized=True)),
             ("\u00e9t\u00e9", {}), ("<none>", dict(special=True, normalized=True))]
    js["added_tokens"] = [added(t, i, special=True) for i, t in enumerate(start[:3])]
    for t, flags in extra:  # some are in the vocabulary already
        js["added_tokens"].append(added(t, vocab.get(t, n + sum(a["id"] >= n for a in js["added_tokens"])), **flags))
    js["added_tokens"].sort(key=lambda a: a["id"])
    js["normalizer"] = dict(type="Replace", pattern=dict(String="\r\n"), content="\n")
    js["decoder"] = unllama(1)
    js["post_processor"] = dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))],
                                pair=[dict(Sequence=dict(id="A", type_id=0)), dict(Sequence=dict(id="B", type_id=1))],
                                special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])})
    js["model"]["merges"] = [m if isinstance(m, list) else m.split(" ") for m in js["model"]["merges"]]
    assert sorted(vocab.values()) == list(range(n))
    template = ("{% for message in messages %}\n    {{- \"<|im_start|>\" + message.role + \"\\n\" + message.content + \"<|im_end|>\\n\" }}\n"
                "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- \"<|im_start|>assistant\\n\" }}\n{%- endif %}\n")
    config = dict(add_bos_token=True, bos_token=added("<s>", 1, special=True), eos_token="</s>", chat_template=template)
    os.makedirs(folder, exist_ok=True)
    for name, value in (("tokenizer.json", js), ("tokenizer_config.json", config)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False, separators=(",", ":"), sort_keys=name != "tokenizer.json")
    return template


# ---- texts ----

# sala differs on purpose where an added token with rstrip swallows white space in which there is another added token.
SWALLOWED = re.compile(r"(<right>|<tool>)\s*(    |\r\n\r\n)")


FIXED = ["", " ", "  ", "   ", "\n", "\n\n", "\t", "a", "A b", " a", "a ", "  a  b  ", "Hello, my name is", "How are you", SPACE, SPACE * 3,
         "a" + SPACE + " b", "\u0000", "\u0001\u0002\u001f\u007f", "\r\n", "a\r\nb\r\n\r\nc", "<s>", "</s><s>", "<unk>", "<s> a </s>",
         "x<|im_start|>user\nHi<|im_end|>\n", "<|im_start", "<|im_start|", "<|im_<|im_start|>", "<0x41>", "<0xE5><0x8F>", "  <tool>  x  <tool>\n\n<tool>",
         "<right>   <right> a <left>  <left>b   <left>", "I live in New York. New Yorker, xNew York, New  York New York", "e.g. this, e.g.that, (e.g.)",
         "\u00e9t\u00e9 l'\u00e9t\u00e9\u0301 \u4e2d\u00e9t\u00e9", "<think>so</think> <think>", "<|x|>yes <|x|>no", "<none> a<none>", " " * 23, "a" + " " * 40 + "b",
         "\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\U0001F468\u200D\U0001F469\u200D\U0001F467\u200D\U0001F466 \U0001F1E9\U0001F1EA \U0001F44D\U0001F3FD \u2764\uFE0F",
         "e\u0301 a\u0308\u0323 \u0928\u093F \uAC01 \u1112\u1161\u11AB", "\u202Eabc\u202C \uFEFF\u200B", "\uFFFD\uFFFE\uFFFF\U0010FFFF", "\u00a0\u3000\u2003 x",
         "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
         "https://example.org/?q=a%20b&c=1#x", "3.14159265358979 1,000,000 1e-9", "\ud7ff\ue000", "''\"\"``", "<|im_end|>" * 3, "the" * 50]


def random_texts(r, lines, pieces):
    alphabet = list("abcdefgXYZ      \n\t0123.,\"'(){}<>|_-") + [SPACE, "\u5c0f", "\u660e", "\U0001F642", "\u00e9", "\u0301", "\u200d", "\r\n", "\0"] + pieces
    texts = list(FIXED)
    chinese = [x for x in lines if any("\u4e00" <= c <= "\u9fff" for c in x)]
    for _ in range(500):
        line = r.choice(lines)
        at = r.randrange(len(line) + 1)
        texts.append(line[at:at + r.randint(1, 90)])
    for _ in range(400):
        line = r.choice(chinese)
        at = r.randrange(len(line))
        texts.append(line[at:at + r.randint(1, 40)])
    for _ in range(900):
        texts.append("".join(r.choice(alphabet) for _ in range(r.randint(1, 24))))
    for _ in range(200):
        texts.append("".join(r.choice(pieces + ["  ", " ", "a"]) for _ in range(r.randint(1, 8))))
    for _ in range(200):
        ranges = [(32, 127), (0xA0, 0x2000), (0x2000, 0x3000), (0x4E00, 0x9FFF), (0xE000, 0x110000), (0x1F300, 0x1FA00)]
        texts.append("".join(chr(r.randrange(*r.choice(ranges))) for _ in range(r.randint(1, 9))))
    code = 0
    while code < 0x110000:  # single code points, dense where it matters
        if not 0xD800 <= code < 0xE000:
            texts.append(chr(code))
        code += 1 if code < 0x180 else 61 if code < 0x3100 else 487 if code < 0x20000 else 7919
    return texts


LONG = ["a", "ab", " ", "<|im_", "<|im_end|>", "the", "\u5c0f\u660e", "th", "abcdefghijklmnopqrstuvwxyz", SPACE, "<", "in the beginning "]


def long_text(pattern, size):  # the C test builds the same
    data = pattern.encode()
    return (data * (size // len(data))).decode()


# ---- the parts of cases.json ----

def decode_case(tok, ids):
    skipped, shown = tok.decode(ids), tok.decode(ids, skip_special_tokens=False)
    return [ids, skipped, 0 if shown == skipped else shown]


def decode_cases(tok, r):
    cases, n = [], tok.get_vocab_size()
    while len(cases) < 400:
        ids = [r.randrange(n) if r.random() < 0.7 else r.randrange(3, 131) for _ in range(r.randint(0, 9))]
        if r.random() < 0.4:
            k = r.randrange(len(ids) + 1)
            ids[k:k] = [3 + b for b in chr(r.randrange(0x80, 0xD800)).encode()]
        shown = tok.decode(ids, skip_special_tokens=False)
        if "\ufffd" in shown or "<none>" in shown:
            continue  # where sala differs on purpose: bytes that are not UTF-8, special and normalized
        cases.append(decode_case(tok, ids))
    return cases


def single_hashes(tok):
    """Of the text of every id alone, and of every id after another; bytes from 0x80 are left out."""
    alone = after = 0xCBF29CE484222325
    head = encode(tok, "a.", True)[-1]
    for i in range(tok.get_vocab_size()):
        if 3 + 128 <= i < 3 + 256:
            continue
        alone = fnv(tok.decode([i], skip_special_tokens=False).encode() + b"\0", alone)
        after = fnv(tok.decode([head, i], skip_special_tokens=False).encode() + b"\0", after)
    return [head, "%016x" % alone, "%016x" % after]


def chat_ids(tok, turns):
    tok.encode_special_tokens = False
    text = "".join("<|im_start|>%s\n%s<|im_end|>\n" % (role, content) for role, content in turns) + "<|im_start|>assistant\n"
    return text, tok.encode(text, add_special_tokens=True).ids


def chat_cases(tok, template, r, lines):
    import jinja2
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    cases = []
    fixed = ["Hi", "", " ", "\n", " a ", "\n\nx\n", "\u4f60\u597d", "<think>x</think>", "a\r\nb", "end."]
    for k in range(60):
        turns = [] if r.random() < 0.5 else [["system", r.choice(fixed)]]
        for _ in range(r.randint(1, 3)):
            for role in ("user", "assistant"):
                turns.append([role, fixed[k] if k < len(fixed) else r.choice(lines)[:80].replace("<", "(")])
        turns = turns[:len(turns) - r.randint(0, 1)]
        text, ids = chat_ids(tok, turns)
        assert text == env.from_string(template).render(messages=[dict(role=a, content=b) for a, b in turns], add_generation_prompt=True)
        cases.append([turns, ids])
    return cases


# ---- small.json: odd configurations ----

def small_tokenizers():
    """(tokenizer.json, texts) pairs that take the paths which the two real ones do not."""
    def build(merges="", chars="abcdefgh<>|_ims. " + SPACE + "\u00e9", bytes_=range(256), special=(), **model):
        vocab = {"<unk>": 0}
        for b in bytes_:
            vocab["<0x%02X>" % b] = len(vocab)
        for c in chars:
            vocab.setdefault(c, len(vocab))
        pairs = [m.split("+") for m in merges.split()]
        for a, b in pairs:
            vocab.setdefault(a + b, len(vocab))
        tokens = []
        for content, flags in special:
            tokens.append(added(content, vocab.get(content, len(vocab) + sum(t["content"] not in vocab for t in tokens)), **flags))
        base = dict(type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=True,
                    byte_fallback=True, ignore_merges=False, vocab=vocab, merges=pairs)
        base.update(model)
        return dict(version="1.0", truncation=None, padding=None, added_tokens=tokens, normalizer=None, pre_tokenizer=None, post_processor=None, decoder=None,
                    model=base)
    prepend, replace = dict(type="Prepend", prepend=SPACE), dict(type="Replace", pattern=dict(String=" "), content=SPACE)
    llama = dict(type="Sequence", normalizers=[prepend, replace])
    def meta(scheme, split):
        return dict(type="Metaspace", replacement=SPACE, prepend_scheme=scheme, split=split)
    ab = "a+b ab+c b+c bc+d a+a aa+a aa+aa ab+ab %s+a %s+%s c+%s" % (SPACE, SPACE, SPACE, SPACE)
    yield build(ab) | dict(decoder=unllama(0))
    yield build(ab, fuse_unk=False, unk_token=None) | dict(decoder=unllama(1))
    yield build("a+b <+m <m+> <unk>+a b+<unk> ab+a", special=[("<m>", dict(normalized=True))]) | dict(decoder=unllama(0))
    yield build(ab) | dict(pre_tokenizer=meta("always", True), decoder=unllama(1))
    yield build(ab) | dict(pre_tokenizer=meta("first", False), decoder=unllama(1))
    yield build(ab, special=[("<m>", {}), ("<s>", dict(special=True)), ("b c", dict(normalized=True))]) | dict(pre_tokenizer=meta("first", True), decoder=unllama(1))
    yield build(ab, special=[("<m>", dict(lstrip=True)), ("ab", dict(normalized=True)), ("_", dict(rstrip=True))]) | dict(
        pre_tokenizer=meta("never", True), decoder=unllama(0))
    yield build(ab, special=[("<m>", dict(normalized=True)), ("<n>", dict(lstrip=True, rstrip=True)), ("_", dict(rstrip=True)), (".", dict(lstrip=True))]) | dict(
        normalizer=llama, decoder=unllama(1))
    yield build(ab, special=[("<a", {}), ("<ab", {}), ("<abc|", {}), ("bc", {}), ("<s>", dict(special=True)), ("s>", {}), ("  ", dict(lstrip=True))]) | dict(
        normalizer=dict(type="Sequence", normalizers=[dict(type="Replace", pattern=dict(String="aba"), content="c"), prepend, replace]), decoder=unllama(1))
    yield build("a+b b+a a+b ab+a c+d cd+ab") | dict(normalizer=replace, decoder=dict(type="Sequence", decoders=[
        dict(type="Replace", pattern=dict(String="b"), content="bb"), dict(type="Replace", pattern=dict(String="bba"), content=" "), dict(type="ByteFallback"), dict(type="Fuse"),
        dict(type="Strip", content=" ", start=1, stop=0)]))


def small_case(tok, text):
    a, b = both(tok, text)
    d = tok.decode(a, skip_special_tokens=False)
    return [text, a, b, 0 if "\ufffd" in d else d]


def small_cases(r):
    out = []
    pieces = ["a", "b", "c", "d", "ab", "aa", "abc", " ", "  ", SPACE, "\u00e9", "\u00f1", "z", "\u4e2d", "<m>", "<n>", "<s>", "<a", "<ab", "<abc|", "b c", "aba", "_", "."]
    for js in small_tokenizers():
        text = json.dumps(js, ensure_ascii=False, separators=(",", ":"))
        tok = Tokenizer.from_str(text)
        out.append([text, [small_case(tok, "".join(r.choice(pieces) for _ in range(k // 6))) for k in range(150)]])
    return out


# ---- --check ----

def check():
    folder, counts, bad = "tests/data/tokenizer", {}, 0
    with open(os.path.join(folder, "cases.json"), encoding="utf-8") as f:
        cases = json.load(f)
    with open(os.path.join(folder, "small.json"), encoding="utf-8") as f:
        small = json.load(f)
    toks = dict(model=Tokenizer.from_file("models/sala-tiny/tokenizer.json"), second=Tokenizer.from_file(os.path.join(folder, "second", "tokenizer.json")))

    def compare(what, committed, now):
        nonlocal bad
        counts[what] = counts.get(what, 0) + 1
        if committed != now:
            bad += 1
            if bad <= 10:
                print("different:", what, repr(committed)[:300], "the library:", repr(now)[:300])

    for case in cases["encode"]:
        compare("texts", case, [case[0]] + both(toks["model"], case[0]) + both(toks["second"], case[0]))
    for name, tok in toks.items():
        for case in cases["decode"][name]:
            compare("decoded texts", case, decode_case(tok, case[0]))
        compare("tables of all ids", cases["single"][name], single_hashes(tok))
        for turns, ids in cases["chat"][name]:
            compare("chats", ids, chat_ids(tok, turns)[1])
        for pattern, size, count, hashed in cases["long"][name]:
            if size <= 50000:  # the library needs gigabytes for a longer one
                ids = encode(tok, long_text(pattern, size), True)
                compare("long texts", [count, hashed], [len(ids), ids_hash(ids)])
    for text, texts in small:
        tok = Tokenizer.from_str(text)
        for case in texts:
            compare("texts of small tokenizers", case, small_case(tok, case[0]))
    print("compared", ", ".join("%d %s" % (n, what) for what, n in counts.items()) + ":", bad, "different")
    return bad > 0


def main():
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    model, text, generator, out = sys.argv[1:]
    lines = training_text(text, generator)
    template = make_second(lines, os.path.join(out, "second"))
    with open(os.path.join(model, "tokenizer_config.json"), encoding="utf-8") as f:
        templates = [json.load(f)["chat_template"], template]
    toks = [Tokenizer.from_file(os.path.join(f, "tokenizer.json")) for f in (model, os.path.join(out, "second"))]
    names, r = ["model", "second"], random.Random(3)
    lines = [x for x in lines if x]
    pieces = MARKS + ["<s>", "</s>", "<unk>", "<think>", "</think>", "<tool>", "<right>", "<left>", "New York", "e.g.", "    ", "<|x|>", "<|x|>y", "\r\n\r\n",
                      "\u00e9t\u00e9", "<none>", "<|im_"]
    texts = [t for t in dict.fromkeys(random_texts(r, lines, pieces)) if not SWALLOWED.search(t)]
    cases = dict(encode=[[t] + both(toks[0], t) + both(toks[1], t) for t in texts], decode={}, single={}, chat={}, long={})
    for name, tok, template in zip(names, toks, templates):
        cases["decode"][name] = decode_cases(tok, r)
        cases["single"][name] = single_hashes(tok)
        cases["chat"][name] = chat_cases(tok, template, r, lines)
        cases["long"][name] = []
        for pattern in LONG:
            # The library needs gigabytes for a megabyte of short pieces, so only one pattern is that long.
            size = 1000000 if len(pattern) == 26 else 50000
            ids = encode(tok, long_text(pattern, size), True)
            cases["long"][name].append([pattern, size, len(ids), ids_hash(ids)])
    for name, value in (("cases.json", cases), ("small.json", small_cases(random.Random(4)))):
        with open(os.path.join(out, name), "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False, separators=(",", ":"))
    print(len(texts), "texts")


if __name__ == "__main__":
    main()
