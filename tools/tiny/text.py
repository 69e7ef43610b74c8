"""Text that sala-tiny never saw, for `sala eval --ppl`: stories, dialogues, Chinese and code of other seeds than
training's, and the four books of the Bible that training left out. Same SEED, same text.

    python3 tools/tiny/text.py KILOBYTES [SEED] >text.txt"""
import random
import sys

import gen


def main():
    if len(sys.argv) not in (2, 3) or not all(a.isdigit() for a in sys.argv[1:]):
        sys.exit(__doc__)
    room, seed = 1000 * int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 0
    r = random.Random(gen.EVAL_SEED + 1000000 * (seed + 1) + 1)
    bible = [words for _, text in gen.bible(heldout=True) for words in [text.split(" ")]]
    kinds = (lambda: gen.paragraphs(r, gen.story(r)[0]), lambda: gen.dialogue(r), lambda: gen.zplain(r),
             lambda: gen.code_doc(r))
    while room > 0:
        if r.random() < 0.1:  # about a third of the bytes
            words = r.choice(bible)
            at = r.randrange(len(words))
            text = " ".join(words[at:at + 400])
        else:
            text = r.choice(kinds)()
        room -= len(text.encode()) + 2
        print(text, end="\n\n")


main()
