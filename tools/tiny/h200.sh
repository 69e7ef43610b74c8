#!/bin/sh
# Teaches sala-tiny multiple choice: one command, one GPU, at most SECONDS (default 380) from start to end.
#
#     OUT=DIR sh tools/tiny/h200.sh [SECONDS]
#
# Goes on from models/sala-tiny's weights and holds to what they say of plain text, then measures the new weights and
# the present ones on the same fresh items (the latter once). Leaves in DIR two files:
# model.safetensors (BF16; every half minute the newest) and report.tgz: log.csv, train.log, scores.json, base.json,
# verdict.txt. Called again it goes on from build/tiny/state.pt, if that is still there. The verdict comes last.
# For a rehearsal without a GPU: DEVICE=cpu TRAIN="--steps 3 --length 256 --long 512 ..." (test_torch.py does it).
set -u
begun=$(date +%s)
cd "$(dirname "$0")/../.." || exit 1
total=${1:-380} out=${OUT:-build/tiny-out} work=${WORK:-build/tiny} python=${PYTHON:-python3} device=${DEVICE:-cuda}
mkdir -p "$out" "$work"
left() { echo $((total - ($(date +%s) - begun))); }
say() { echo "== [$(($(date +%s) - begun)) s] $*"; }

# For the measurements: 50 s for the new weights, 40 s for the old. An H200 took 27 s and 38 s.
reserved=${MEASURE:-90}
budget=$(($(left) - reserved))
[ "$budget" -ge 20 ] || { echo "h200.sh: $total seconds are too few: $reserved go to the measurements" >&2; exit 1; }

keep() { # the newest weights, whole
    [ ! -e "$work/model.safetensors" ] ||
        { cp "$work/model.safetensors" "$out/new" && mv "$out/new" "$out/model.safetensors"; }
}
pack() {
    for name in log.csv train.log scores.json base.json verdict.txt; do
        [ ! -e "$work/$name" ] || echo "$name"
    done | tar -czf "$out/report.tgz" -C "$work" -T -
}
(while sleep 30; do keep; done) >/dev/null 2>&1 &
keeper=$!
trap 'kill $keeper 2>/dev/null; pack' EXIT

present=models/sala-tiny/model.safetensors
train() { # SECONDS OPTION...
    seconds=$1
    shift
    # shellcheck disable=SC2086
    timeout -k 5 $((seconds + 20)) "$python" -u tools/tiny/train.py "$work" --budget "$seconds" --mix letters --seed 3 \
        --rate 3e-3 --init "$present" --hold "$present" --device "$device" "$@" ${TRAIN:-} >>"$work/train.log" 2>&1
}
say "training, $budget s"
if ! train "$budget"; then
    tail -n 5 "$work/train.log"
    if [ ! -e "$work/model.safetensors" ] && [ $((budget = $(left) - reserved)) -ge 60 ]; then
        say "once more, without compiling, $budget s"
        train "$budget" --no-compile --long-batch 1 || tail -n 5 "$work/train.log"
    fi
fi
kill $keeper 2>/dev/null
keep
tail -n 3 "$work/train.log"
[ -e "$work/model.safetensors" ] || { say "VERDICT: no weights came out: see train.log"; exit 1; }

measure() { # FOLDER FILE SECONDS
    # shellcheck disable=SC2086
    timeout -k 5 $(($3 + 15)) "$python" -u tools/tiny/evaluate.py "$1" "$2" --device "$device" --budget "$3" ${EVALUATE:-} 2>&1
}
rm -f "$work/scores.json"
say "measuring the new weights"
rest=$((reserved * 4 / 9))
[ ! -e "$work/base.json" ] || rest=10
measure "$work" "$work/scores.json" $(($(left) - rest))
if [ ! -e "$work/base.json" ]; then
    say "measuring the present weights"
    measure models/sala-tiny "$work/base.json" $(($(left) - 10))
fi
say "verdict"
[ -e "$work/scores.json" ] && [ -e "$work/base.json" ] ||
    { say "VERDICT: not good: the weights are there, the measurements are not"; exit 1; }
"$python" tools/tiny/evaluate.py --verdict "$work/base.json" "$work/scores.json" | tee "$work/verdict.txt"
grep -q '^VERDICT: good' "$work/verdict.txt"
