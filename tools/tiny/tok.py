"""Byte-fallback BPE in the Llama/MiniCPM style: trainer, encoder, decoder, and the two files of Hugging Face's layout.

    python3 tools/tiny/tok.py OUT [SEED]     trains on 8 MB of the generator's text and writes OUT/tokenizer.json and
                                             OUT/tokenizer_config.json (5 seconds on one core; same SEED, same bytes)

No merge crosses a boundary of PIECE, so encoding piece by piece, with a cache, gives the ids that BPE over the whole
text without a pre-tokenizer gives, which is what tokenizer.json says."""
import collections
import json
import os
import random
import re
import sys

SPACE = "\u2581"  # what the vocabulary writes for a space
BOS, EOS = 1, 2
IM_END, IM_START = "<|im_end|>", "<|im_start|>"
SPECIALS = ("<unk>", "<s>", "</s>", IM_END, IM_START)
BYTE = 3  # id of <0x00>; the other bytes follow
VOCAB, TRAIN_SEED, TRAIN_CHARS = 2048, 7, 8_000_000
PIECE = re.compile(r"\n|\u2581*[A-Za-z]+|\u2581*[!-/:-@\[-`{-~]+|\u2581+|[0-9]|[\u4e00-\u9fff]+|.", re.S)
SPECIAL = re.compile(r"(<unk>|<s>|</s>|<\|im_end\|>|<\|im_start\|>)")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


class Tok:
    def __init__(self, vocab, merges):
        self.vocab, self.merges = vocab, [tuple(m) for m in merges]
        self.rank = {m: i for i, m in enumerate(self.merges)}
        self.names = {i: t for t, i in vocab.items()}
        self.special = {t: vocab[t] for t in SPECIALS}
        self.cache = {}

    def piece(self, p):
        ids = self.cache.get(p)
        if ids is not None:
            return ids
        parts = list(p)
        while len(parts) > 1:
            k = min(range(len(parts) - 1), key=lambda i: self.rank.get((parts[i], parts[i + 1]), 1 << 30))
            if (parts[k], parts[k + 1]) not in self.rank:
                break
            parts[k:k + 2] = [parts[k] + parts[k + 1]]
        ids = []
        for t in parts:
            ids += [self.vocab[t]] if t in self.vocab else [BYTE + b for b in t.encode()]
        if len(self.cache) < 400000:
            self.cache[p] = ids
        return ids

    def text(self, s, prefix=True):
        """ids of a text without special tokens; `prefix`: with the space that a text begins with."""
        if not s:
            return []
        s = (SPACE if prefix else "") + s.replace(" ", SPACE)
        return [i for p in PIECE.findall(s) for i in self.piece(p)]

    def encode(self, s, bos=True):
        out = [BOS] if bos else []
        for part in SPECIAL.split(s):
            out += [self.special[part]] if part in self.special else self.text(part)
        return out

    def decode(self, ids, skip_special=True):
        out = b""
        for i in ids:
            t = self.names[i]
            if t in self.special:
                out += b"" if skip_special else t.encode()
            else:
                out += bytes([i - BYTE]) if BYTE <= i < BYTE + 256 else t.replace(SPACE, " ").encode()
        s = out.decode("utf-8", "replace")
        return s[1:] if s[:1] == " " else s

    def document(self, segments):
        """[(text | id, weight[, "join"])] -> ids, weights; "join" goes on where the text before it stopped."""
        ids, weights = [], []
        for s in segments:
            t = s[0]
            if isinstance(t, int):
                x = [t]
            else:
                x = [self.special[t]] if t in self.special else self.text(t, prefix=len(s) < 3)
            ids += x
            weights += [s[1]] * len(x)
        return ids, weights


# ---- training ----

def alphabet(counts):
    """Characters with a token of their own: ASCII, newline, and Chinese ones that occur 20 times."""
    chars = collections.Counter()
    for piece, n in counts.items():
        for c in piece:
            chars[c] += n
    chinese = {c for c, n in chars.items() if n >= 20 and ("\u4e00" <= c <= "\u9fff" or c in "，。？！：；、“”")}
    return {chr(i) for i in range(33, 127)} | {"\n", SPACE} | chinese


def train(texts, size):
    """The most frequent pair is merged until the vocabulary is full; the later pair in Unicode order wins a tie."""
    counts = collections.Counter()
    for t in texts:
        counts.update(PIECE.findall(SPACE + t.replace(" ", SPACE)))
    keep = alphabet(counts)
    vocab = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + sorted(keep)
    words = [(list(p), n) for p, n in counts.items() if len(p) > 1 and all(c in keep for c in p)]
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, (parts, n) in enumerate(words):
        for pair in zip(parts, parts[1:]):
            pairs[pair] += n
            where[pair].add(i)
    merges, have = [], set(vocab)
    while len(vocab) < size - 2:
        best = max(pairs.items(), key=lambda x: (x[1], x[0]))[0]
        new = best[0] + best[1]
        merges.append(best)
        if new not in have:
            vocab.append(new)
            have.add(new)
        for i in list(where[best]):
            merge(words[i], best, new, pairs, where, i)
        pairs.pop(best, None)
    return Tok({t: i for i, t in enumerate(vocab + [IM_END, IM_START])}, merges)


def merge(word, best, new, pairs, where, index):
    parts, n = word
    for pair in zip(parts, parts[1:]):
        pairs[pair] -= n
        where[pair].discard(index)
    i = 0
    while i < len(parts) - 1:
        if (parts[i], parts[i + 1]) == best:
            parts[i:i + 2] = [new]
        i += 1
    for pair in zip(parts, parts[1:]):
        pairs[pair] += n
        where[pair].add(index)


def training_texts(seed=TRAIN_SEED, chars=TRAIN_CHARS):
    import gen
    r, texts = random.Random(seed), []
    while chars > 0:
        for s in gen.document(r, 1500, p_plain=0.4):
            if isinstance(s[0], str) and not SPECIAL.match(s[0]):
                texts.append(s[0])
                chars -= len(s[0])
    return texts


# ---- files ----

def added_tokens(tok):
    return [dict(id=tok.vocab[t], content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
            for t in SPECIALS]


def tokenizer_json(tok):
    bos = [dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
    second = [dict(SpecialToken=dict(id="<s>", type_id=1)), dict(Sequence=dict(id="B", type_id=1))]
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=added_tokens(tok),
        normalizer=dict(type="Sequence", normalizers=[dict(type="Prepend", prepend=SPACE),
                                                      dict(type="Replace", pattern=dict(String=" "), content=SPACE)]),
        pre_tokenizer=None,
        post_processor=dict(type="TemplateProcessing", single=bos, pair=bos + second,
                            special_tokens={"<s>": dict(id="<s>", ids=[BOS], tokens=["<s>"])}),
        decoder=dict(type="Sequence", decoders=[dict(type="Replace", pattern=dict(String=SPACE), content=" "),
                                                dict(type="ByteFallback"), dict(type="Fuse"),
                                                dict(type="Strip", content=" ", start=1, stop=0)]),
        model=dict(type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=True, byte_fallback=True, ignore_merges=False,
                   vocab={t: i for t, i in tok.vocab.items() if t not in (IM_END, IM_START)},
                   merges=[" ".join(m) for m in tok.merges]))


def tokenizer_config(tok):
    added = {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in added_tokens(tok)}
    return dict(
        add_bos_token=True, add_eos_token=False, added_tokens_decoder=added,
        additional_special_tokens=[IM_END, IM_START], bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token=None, clean_up_tokenization_spaces=False, legacy=True, model_max_length=1000000000, sp_model_kwargs={},
        spaces_between_special_tokens=False, tokenizer_class="LlamaTokenizerFast", use_default_system_prompt=False,
        chat_template=CHAT_TEMPLATE)


def save(tok, folder):
    os.makedirs(folder, exist_ok=True)
    for name, what, indent in (("tokenizer.json", tokenizer_json, 1), ("tokenizer_config.json", tokenizer_config, 2)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(what(tok), f, ensure_ascii=False, indent=indent)


def load(folder):
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as f:
        js = json.load(f)
    vocab = dict(js["model"]["vocab"])
    vocab.update({a["content"]: a["id"] for a in js["added_tokens"]})
    return Tok(vocab, [m.split(" ") if isinstance(m, str) else m for m in js["model"]["merges"]])


def main():
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and not sys.argv[2].isdigit()):
        sys.exit(__doc__)
    texts = training_texts(int(sys.argv[2]) if len(sys.argv) == 3 else TRAIN_SEED)
    tok = train(texts, VOCAB)
    save(tok, sys.argv[1])
    sample = texts[:5000]
    print(f"{len(tok.vocab)} tokens, {len(tok.merges)} merges, "
          f"{sum(map(len, sample)) / sum(len(tok.text(t)) for t in sample):.3f} characters a token")


if __name__ == "__main__":
    main()
