#!/bin/sh
# Teaches sala-tiny multiple choice: one command, one GPU, at most SECONDS (default 580) from start to end.
#
#     OUT=DIR sh tools/tiny/h200.sh [SECONDS]
#
# Goes on from models/sala-tiny's weights, then measures the new weights and the present ones on the same fresh items.
# Leaves in DIR: model.safetensors (BF16; every half minute the newest), log.csv, train.log, scores.json, base.json,
# verdict.txt. Called again it goes on from build/tiny/state.pt, if that is still there. The verdict comes last.
# For a rehearsal without a GPU: DEVICE=cpu TRAIN="--steps 3 --length 256 --long 512 ..." (test_torch.py does it).
set -u
begun=$(date +%s)
cd "$(dirname "$0")/../.." || exit 1
total=${1:-580} out=${OUT:-build/tiny-out} work=${WORK:-build/tiny} python=${PYTHON:-python3} device=${DEVICE:-cuda}
mkdir -p "$out" "$work"
left() { echo $((total - ($(date +%s) - begun))); }
say() { echo "== [$(($(date +%s) - begun)) s] $*"; }

# For the measurements: 110 s for the new weights, 80 s for the old.
reserved=${MEASURE:-190}
budget=$(($(left) - reserved))
[ "$budget" -ge 20 ] || { echo "h200.sh: $total seconds are too few: $reserved go to the measurements" >&2; exit 1; }

keep() { # the newest weights and log, whole
    for name in model.safetensors log.csv; do
        [ ! -e "$work/$name" ] || { cp "$work/$name" "$out/$name.new" && mv "$out/$name.new" "$out/$name"; }
    done
}
(while sleep 30; do keep; done) >/dev/null 2>&1 &
keeper=$!
trap 'kill $keeper 2>/dev/null' EXIT

train() { # SECONDS OPTION...
    seconds=$1
    shift
    # shellcheck disable=SC2086
    timeout -k 5 $((seconds + 20)) "$python" -u tools/tiny/train.py "$work" --budget "$seconds" --mix letters --seed 3 \
        --rate 3e-3 --init models/sala-tiny/model.safetensors --device "$device" "$@" ${TRAIN:-} >>"$out/train.log" 2>&1
}
say "training, $budget s"
if ! train "$budget"; then
    tail -n 5 "$out/train.log"
    if [ ! -e "$work/model.safetensors" ] && [ $((budget = $(left) - reserved)) -ge 60 ]; then
        say "once more, without compiling, $budget s"
        train "$budget" --no-compile --long-batch 1 || tail -n 5 "$out/train.log"
    fi
fi
kill $keeper 2>/dev/null
keep
tail -n 3 "$out/train.log"
[ -e "$work/model.safetensors" ] || { say "VERDICT: no weights came out: see train.log"; exit 1; }

measure() { # FOLDER FILE SECONDS
    # shellcheck disable=SC2086
    timeout -k 5 $(($3 + 15)) "$python" -u tools/tiny/evaluate.py "$1" "$2" --device "$device" --budget "$3" ${EVALUATE:-} 2>&1
}
say "measuring the new weights"
measure "$work" "$out/scores.json" $(($(left) - reserved * 8 / 19 - 15))
say "measuring the present weights"
measure models/sala-tiny "$out/base.json" $(($(left) - 20))
say "verdict"
[ -e "$out/scores.json" ] && [ -e "$out/base.json" ] ||
    { say "VERDICT: not good: the weights are there, the measurements are not"; exit 1; }
"$python" tools/tiny/evaluate.py --verdict "$out/base.json" "$out/scores.json" | tee "$out/verdict.txt"
grep -q '^VERDICT: good' "$out/verdict.txt"
