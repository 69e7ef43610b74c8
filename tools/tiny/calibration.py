"""Calibration text for sala-quantize: documents like those that sala-tiny was trained with, from seeds that neither training
nor evaluation uses. Same SEED, same text.

    python3 tools/tiny/calibration.py [DOCUMENTS] [SEED] >calibration.jsonl       (default 1000 documents, seed 0)"""
import json
import random
import sys

import gen


def main():
    if len(sys.argv) > 3 or not all(a.isdigit() for a in sys.argv[1:]):
        sys.exit(__doc__)
    documents, seed = [int(a) for a in sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1:]]
    r = random.Random(gen.EVAL_SEED // 2 + seed)
    for _ in range(documents):
        segments = [s[0] for s in gen.document(r, 1900, p_long=0.1)]
        text = "".join({gen.BOS: "", gen.EOS: "</s>"}[s] if isinstance(s, int) else s for s in segments)
        print(json.dumps({"text": text}, ensure_ascii=False))  # the reader puts the first token in front


main()
