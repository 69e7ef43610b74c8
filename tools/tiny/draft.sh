#!/bin/sh
# sala-tiny's draft head, from nothing: prompts, features of the answers that the model gives to them, training in BF16
# with and without offsets, NVFP4 rounded and trained on, and tau of all four in the engine. Meant for eight minutes of
# an H200; on two cores name fewer SAMPLES and STEPS (docs/training.md).
#
#   sh tools/tiny/draft.sh            results: build/draft/, and $OUT/{draft.tar,draft-table.md,draft.log}
#
# MODEL, DEVICE (auto, cpu, cuda), PYTHON: what to use. SAMPLES, MINUTES, QAT_MINUTES or STEPS, QAT_STEPS: how much.
# VOCAB: tokens of the draft. SEED: of data and training. What is there already is not made again: remove build/draft.
set -eu
cd "$(dirname "$0")/../.." || exit 2
model=${MODEL:-models/sala-tiny} device=${DEVICE:-auto} python=${PYTHON:-python3} seed=${SEED:-1}
work=build/draft
out=${OUT:-$work}
mkdir -p "$work" "$out"
log="$out/draft.log"
: >"$log"
began=$(date +%s)
say() {
    echo "[$(($(date +%s) - began)) s] $*" | tee -a "$log"
}

"$python" -c 'import torch, numpy' || { say "draft.sh: $python has no PyTorch or no numpy"; exit 2; }
[ -x ./sala ] || make sala >>"$log" 2>&1

say "prompts"
"$python" tools/tiny/draft_data.py train "${SAMPLES:-12000}" "$seed" >"$work/prompts.jsonl"
"$python" tools/tiny/draft_data.py bench "${EACH:-8}" "$seed" >"$work/bench.jsonl"

say "features of the model's own answers" # cut short, whole shards are as good
timeout -s INT "${DUMP_SECONDS:-100}" ./sala dump-features -q -m "$model" --device "$device" --context 8K \
    --data "$work/prompts.jsonl" --out "$work/features" --regenerate --answer-tokens 200 \
    --parallel "${PARALLEL:-64}" --json >>"$log" 2>&1 ||
    [ -e "$work/features/features-00000.safetensors" ] || { tail -n 3 "$log"; exit 1; }

train() { # NAME RATE MINUTES STEPS OPTIONS...
    name=$1
    amount="--lr $2 --minutes $3"
    [ -z "$4" ] || amount="--lr $2 --steps $4"
    shift 4
    [ ! -e "$work/$name/head/config.json" ] || return 0
    say "training $name"
    # shellcheck disable=SC2086 # several words
    "$python" tools/train_draft.py train --data "$work/features" --target "$model" --out "$work/$name" --seed "$seed" \
        --every "${EVERY:-100}" --length "${LENGTH:-1024}" --rows "${ROWS:-16}" $amount "$@" >>"$log" 2>&1 ||
        { tail -n 5 "$log"; exit 1; }
    grep ' held ' "$log" | tail -n 1
}
vocab="--draft-vocab ${VOCAB:-1024}"
# shellcheck disable=SC2086
train bf16 2e-3 "${MINUTES:-1.8}" "${STEPS:-}" --offset 32768 $vocab
train qat 7e-4 "${QAT_MINUTES:-0.5}" "${QAT_STEPS:-}" --offset 32768 --init "$work/bf16/head" --qat
# shellcheck disable=SC2086
train plain 2e-3 "${MINUTES:-1.8}" "${STEPS:-}" --offset 0 $vocab
"$python" tools/train_draft.py export --head "$work/bf16/head" --target "$model" --out "$work/rtn/head" >>"$log"

set --
for name in bf16 rtn qat plain; do
    say "tau of $name"
    ./sala bench -q -m "$model" --device "$device" --spec all --prompts "$work/bench.jsonl" --repeat 1 --json \
        --draft "$work/$name/head" --spec-tree 7,2,15 --max-context 24K >"$work/$name.json" 2>>"$log" ||
        { tail -n 3 "$log"; exit 1; }
    set -- "$@" "$name=$work/$name.json"
done
"$python" tools/tiny/draft_table.py "$@" >"$out/draft-table.md"
tar cf "$out/draft.tar" -C "$work" bf16/head bf16/train.csv bf16/train.svg qat/head qat/train.csv rtn/head \
    plain/train.csv
say "done"
cat "$out/draft-table.md"
