#!/bin/sh
# sala-tiny's draft head, from nothing: prompts, features of the answers that the model gives to them, training in BF16
# with and without offsets, NVFP4 rounded and trained on, and tau of all four in the engine. Meant for eight minutes of
# an H200; on two cores name fewer SAMPLES and STEPS (docs/training.md).
#
#   sh tools/tiny/draft.sh            results: build/draft/, and $OUT/{draft.tar,draft-table.md,draft.log}
#   INIT=DIR sh tools/tiny/draft.sh   goes on with that head (BF16), with long texts beside the short ones
#
# LONG_TEXTS: how many. LONG: tokens of a row for them. THETA: what the head's rotation is changed to.
# MODEL, DEVICE (auto, cpu, cuda), PYTHON: what to use. SECONDS_ALL: of the whole (470; the trainings take what the rest
# leaves), or STEPS, QAT_STEPS. SAMPLES, EACH: prompts to train with, and of a class to measure with. LAYERS: what the
# head reads. VOCAB: tokens that it knows. SEED: of data and training. The results are always those that are there by
# now: a run may be cut. What is there already is not made again: remove build/draft.
set -eu
cd "$(dirname "$0")/../.." || exit 2
model=${MODEL:-models/sala-tiny} device=${DEVICE:-auto} python=${PYTHON:-python3} seed=${SEED:-1}
total=${SECONDS_ALL:-470} work=build/draft init=${INIT:-}
out=${OUT:-$work}
mkdir -p "$work" "$out"
log="$out/draft.log"
: >"$log"
began=$(date +%s)
say() {
    echo "[$(($(date +%s) - began)) s] $*" | tee -a "$log"
}
left() { echo $((total - ($(date +%s) - began))); }

"$python" -c 'import torch, numpy' || { say "draft.sh: $python has no PyTorch or no numpy"; exit 2; }
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"

say "prompts"
fresh=$seed
[ -z "$init" ] || fresh=$((seed + 1)) # others than those that the head has seen
[ -x ./sala ] || make sala >>"$log" 2>&1 &
builder=$!
[ -s "$work/prompts.jsonl" ] ||
    "$python" tools/tiny/draft_data.py train "${SAMPLES:-24000}" "$fresh" >"$work/prompts.jsonl"
[ -z "$init" ] || [ -s "$work/long-0.jsonl" ] ||
    "$python" tools/tiny/draft_data.py long "${LONG_TEXTS:-400}" "$fresh" |
    awk -v to="$work/long-" '{ print >(to NR % 3 ".jsonl") }'
[ -s "$work/bench.jsonl" ] || "$python" tools/tiny/draft_data.py bench "${EACH:-24}" "$seed" >"$work/bench.jsonl"
wait $builder || { tail -n 3 "$log"; exit 1; }

say "features of the model's own answers" # cut short, whole shards are as good
dump() { # NAME CONTEXT PARALLEL
    timeout -k 10 -s INT "${DUMP_SECONDS:-90}" ./sala dump-features -q -m "$model" --device "$device" --context "$2" \
        --layers "${LAYERS:-1,6,7}" --data "$work/$1.jsonl" --out "$work/dump-$1" --regenerate --answer-tokens 200 \
        --parallel "$3" --json >>"$log" 2>&1 || true
    for shard in "$PWD/$work/dump-$1"/features-*.safetensors; do
        [ ! -e "$shard" ] || ln -sf "$shard" "$work/features/features-$1-${shard##*-}"
    done
}
mkdir -p "$work/features"
dumps=
[ -z "$init" ] || for i in 0 1 2; do # one after the other: a long prompt is read faster while nothing is written
    dump long-$i 24K 1 &
    dumps="$dumps $!"
done
dump prompts 8K "${PARALLEL:-128}"
# shellcheck disable=SC2086 # several
[ -z "$dumps" ] || wait $dumps
[ -n "$(ls "$work/features")" ] || { tail -n 3 "$log"; exit 1; }
say "$(find "$work/features" -name '*.safetensors' | wc -l) shards"

train() { # NAME RATE SECONDS STEPS OPTIONS...: its log is NAME.log
    name=$1
    amount="--lr $2 --minutes $(awk -v s="$3" 'BEGIN { printf "%.2f", (s < 12 ? 12 : s) / 60 }')"
    [ -z "$4" ] || amount="--lr $2 --steps $4"
    shift 4
    [ ! -e "$work/$name/head/config.json" ] || return 0
    # shellcheck disable=SC2086 # several words
    "$python" -u tools/train_draft.py train --data "$work/features" --target "$model" --out "$work/$name" \
        --seed "$seed" --every "${EVERY:-100}" --length "${LENGTH:-1024}" --rows "${ROWS:-16}" $amount "$@" \
        >>"$work/$name.log" 2>&1
}
trained() { # NAME: what its log says
    grep -e agrees -e 'draft vocabulary' "$work/$1.log" | tee -a "$log" || true
    grep ' held ' "$work/$1.log" | tail -n 1 | tee -a "$log" || true
    [ -e "$work/$1/head/config.json" ] || { say "$1: no head: $(tail -n 3 "$work/$1.log")" && return 1; }
}
measure() { # NAME: tau
    ./sala bench -q -m "$model" --device "$device" --spec all --prompts "$work/bench.jsonl" --repeat 1 --json \
        --gen-tokens "${GEN:-160}" --draft "$work/$1/head" --spec-tree 7,2,15 --max-context 24K >"$work/$1.new" \
        2>"$work/$1.err" && mv "$work/$1.new" "$work/$1.json" || say "$1: no tau: $(tail -n 2 "$work/$1.err")"
}
results() { # whatever there is by now
    set -- # NAME=FILE...
    for name in bf16 rtn qat plain; do
        [ ! -s "$work/$name.json" ] || set -- "$@" "$name=$work/$name.json"
    done
    [ $# -eq 0 ] || "$python" tools/tiny/draft_table.py --log "$work/bf16.log" "$@" >"$out/draft-table.md" || true
    (cd "$work" && find . -name config.json -o -name 'train.*' -o -name '*.log' -o -name '*.json' -o -name bench.jsonl \
        -o -path '*/head/model.safetensors' | tar cf draft.new -T -)
    mv "$work/draft.new" "$out/draft.tar"
}

vocab="--draft-vocab ${VOCAB:-1024}"
# Behind the long trainings, which run beside each other: NVFP4 (a quarter of them), and 35 s to measure it.
long=$((($(left) - 55) * 4 / 5)) # two starts of PyTorch
rows=
if [ -n "$init" ]; then
    long=$((($(left) - 55) * 7 / 10)) rows="--long ${LONG:-20480}"
    say "training with long rows, from $init, $long s"
    # shellcheck disable=SC2086
    train bf16 "${RATE:-1e-3}" "$long" "${STEPS:-}" --offset 32768 --init "$init" --theta "${THETA:-1e6}" $rows || true
else
    say "training with and without offsets, $long s"
    # shellcheck disable=SC2086
    (train plain 2e-3 "$long" "${STEPS:-}" --offset 0 $vocab || true; trained plain && measure plain || true) &
    # shellcheck disable=SC2086
    train bf16 2e-3 "$long" "${STEPS:-}" --offset 32768 $vocab || true
fi
trained bf16 || exit 1
results
(
    "$python" tools/train_draft.py export --head "$work/bf16/head" --target "$model" --out "$work/rtn/head" \
        >>"$work/rtn.log" && measure rtn
) &
measure bf16 &
say "training in NVFP4"
# shellcheck disable=SC2086
train qat "${QAT_RATE:-7e-4}" $(($(left) - 45)) "${QAT_STEPS:-}" --offset 32768 --init "$work/bf16/head" --qat $rows || true
results
trained qat && measure qat
wait
results
say "done"
cat "$out/draft-table.md" || exit 1
