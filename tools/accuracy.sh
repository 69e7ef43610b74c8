#!/bin/sh
# What four bits cost in accuracy: quantises a model in several ways, asks all of them the same questions, and prints
# a Markdown table of the differences with 95 % intervals.
#
#   sh tools/accuracy.sh MODEL_DIR OUT_DIR
#
# The questions, the held-out text and the calibration text are sala-tiny's (tools/tiny), each with seeds of its own.
# OUT_DIR keeps the quantised models (they are not made again), the answers, and table.md. Environment: ITEMS questions
# (2400), KILOBYTES of text (400), DEVICE (auto), PARALLEL sequences (64), SALA (./sala), QUANTIZE (./sala-quantize).
set -eu
[ $# -eq 2 ] || { echo "usage: sh tools/accuracy.sh MODEL_DIR OUT_DIR" >&2; exit 2; }
model=$1
out=$2
tools=$(dirname "$0")
sala=${SALA:-./sala}
quantize=${QUANTIZE:-./sala-quantize}
device=${DEVICE:-auto}
names=

note() {
    echo "accuracy.sh: $*" >&2
}

# made FILE COMMAND...: what the command prints becomes the file, unless it is there; no half ones.
made() {
    file=$1
    shift
    [ -e "$file" ] && return
    "$@" >"$file.part"
    mv "$file.part" "$file"
}

# quantised NAME OPTIONS...: a model of OUT_DIR/models
quantised() {
    name=$1
    shift
    [ -d "$out/models/$name" ] && return
    note "$name: quantising"
    "$quantize" "$model" "$out/models/$name" --calib "$out/calibration.jsonl" --device "$device" "$@" \
        >"$out/$name.quantize.log"
}

# measured NAME MODEL OPTIONS...: its answers, the text's perplexity, how far it is from the original
measured() {
    name=$1
    from=$2
    shift 2
    note "$name: $from $*"
    rm -f "$out/$name.answers.jsonl"
    "$sala" eval -q -m "$from" --device "$device" "$@" --tasks "$out/questions.jsonl" --context 6144 \
        --parallel "${PARALLEL:-64}" --out "$out/$name.answers.jsonl" >"$out/$name.log"
    "$sala" eval -q -m "$from" --device "$device" "$@" --ppl "$out/text.txt" --window 2048 \
        --out "$out/$name.text.jsonl" >>"$out/$name.log"
    "$sala" info -q -m "$from" --device "$device" "$@" --check --against "$model" --text "$out/text.txt" --json \
        >"$out/$name.states.json"
    names="$names $name"
}

mkdir -p "$out/models"
made "$out/questions.jsonl" python3 "$tools/tiny/questions.py" "${ITEMS:-2400}"
made "$out/text.txt" python3 "$tools/tiny/text.py" "${KILOBYTES:-400}"
made "$out/calibration.jsonl" python3 "$tools/tiny/calibration.py"

quantised nvfp4-rtn --format nvfp4 --method rtn --four-over-six off
quantised nvfp4-rtn-46 --format nvfp4 --method rtn --four-over-six mse
quantised nvfp4-gptq --format nvfp4 --method gptq --four-over-six off
quantised nvfp4-gptq-46 --format nvfp4 --method gptq --four-over-six gptq
quantised nvfp4-gptq-46-act --format nvfp4 --method gptq --four-over-six mse --act-order
quantised int4-gptq --format int4 --method gptq --group 128

measured bf16 "$model"
for name in nvfp4-rtn nvfp4-rtn-46 nvfp4-gptq nvfp4-gptq-46 nvfp4-gptq-46-act; do
    measured "$name" "$out/models/$name" --prefill w4a16
done
for name in nvfp4-gptq-46 nvfp4-gptq-46-act; do
    measured "$name-w4a4" "$out/models/$name" --prefill w4a4
done
measured int4-gptq "$out/models/int4-gptq"
# shellcheck disable=SC2086
python3 "$tools/compare_eval.py" "$out" $names --json "$out/table.json" >"$out/table.md"
cat "$out/table.md"
