#!/bin/sh
# What only a GPU can tell, in stages of at most ten minutes each:
#
#   sh tools/gpu_check.sh kernels     every kernel against its C twin (build/test_kernels, build/test_prefill)
#   sh tools/gpu_check.sh engine      the whole engine, its promises and golden texts (build/test_cuda)
#   sh tools/gpu_check.sh sanitizer   compute-sanitizer over a short run, where it is installed
#   sh tools/gpu_check.sh needles     sala-tiny's needle tasks at 2K to 16K tokens beside its model card
#   sh tools/gpu_check.sh bench       decoding: compile times, tokens a second, and PyTorch beside them
#   sh tools/gpu_check.sh prefill     prompts of 32K to 1M tokens, where their time goes, yardsticks
#   sh tools/gpu_check.sh four        weights of four bits: kernels, decoding, prompts, products, public kernels beside
#   sh tools/gpu_check.sh spec        drafts: the same texts, what they bring, what they cost; the verdicts come last
#   sh tools/gpu_check.sh soar        many requests: the SOAR benchmark, 256 sequences, host time, speed by context to 1M
#   sh tools/gpu_check.sh sessions    saved and loaded on the device: the same bits; 128K tokens at the disk's speed
#   sh tools/gpu_check.sh dump        features for a draft head: the same bits, and what they cost beside the prompt alone
#   sh tools/gpu_check.sh reuse       prefixes: the same bits, what it costs to leave them, what they save
#   sh tools/gpu_check.sh accuracy    what four bits cost sala-tiny in answers and perplexity (tools/accuracy.sh)
#   sh tools/gpu_check.sh train       sala-tiny's draft head from nothing (tools/tiny/draft.sh): PyTorch with CUDA is needed
#   sh tools/gpu_check.sh all
#
# SALA_TEST_GPU is the number of the device (0). MARLIN_DIR is a clone of IST-DASLab/marlin, with which `four` then
# compares. The logs of all steps, and what they write, go to $OUT
# (bench/). The last line is "N passed, N failed, N skipped"; the exit status is 0 only without a failure.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-bench}
gpu=${SALA_TEST_GPU:-0}
export SALA_TEST_GPU="$gpu" SALA_CACHE="$PWD/build/gpu-cache"
device="cuda:$gpu"
nine_config=bench/configs/minicpm-sala-9b.json
passed=0
failed=0
skipped=0
mkdir -p "$out" build

seconds_since() {
    awk -v from="$1" -v to="$(date +%s.%N)" 'BEGIN { printf "%.1f", to - from }'
}

# step NAME SECONDS COMMAND...: run it, keep what it prints in NAME.log, show the end of that.
step() {
    name=$1
    limit=$2
    shift 2
    began=$(date +%s.%N)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    { echo "== $name: $*" && cat "$out/$name.log"; } >>"$out/gpu-check.log" # all in one file
    tail -n "${SHOW:-12}" "$out/$name.log" | sed 's/^/    /'
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
        verdict=ok
    else
        failed=$((failed + 1))
        verdict="FAILED with $status"
        [ $status -eq 124 ] && verdict="FAILED: not done after $limit s"
    fi
    echo "  $name: $verdict, $(seconds_since "$began") s: $*"
}

skip() { # NAME REASON
    skipped=$((skipped + 1))
    echo "  $1: skipped, $2"
}

header() {
    echo "== $1, $(date -u '+%Y-%m-%d %H:%M UTC')"
    nvidia-smi -i "$gpu" --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem \
        --format=csv,noheader 2>/dev/null | sed 's/^/  /'
}

build() {
    step build 300 make -j4 sala build/test_kernels build/test_prefill build/test_cuda
}

kernels() {
    header "kernels against their C twins"
    build
    SHOW=40 step kernels 300 build/test_kernels
    SHOW=40 step prefill-kernels 300 build/test_prefill
}

engine() {
    header "the engine"
    build
    SHOW=40 step engine 560 build/test_cuda
}

sanitizer() {
    header "compute-sanitizer"
    build
    if ! command -v compute-sanitizer >/dev/null 2>&1; then
        skip sanitizer "compute-sanitizer is not installed"
        return
    fi
    ./sala run -n 1 --device "$device" >/dev/null 2>&1 # so that the kernels are compiled
    if compute-sanitizer ./sala run -n 1 --device "$device" 2>&1 | grep -q 'Device not supported'; then
        skip sanitizer "compute-sanitizer does not support this device here"
        return
    fi
    for tool in memcheck racecheck initcheck; do
        step "sanitizer-$tool" 150 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            ./sala run -n 8 --device "$device"
    done
    # synccheck wants all threads at the same instruction; the roles of prefill_gla meet from different ones.
    step sanitizer-synccheck 150 compute-sanitizer --tool synccheck --error-exitcode 9 \
        --kernel-name-exclude kernel_substring=prefill_gla ./sala run -n 8 --device "$device"
}

# At most two of a length's tasks (of a kind, 32 to 96) may fall out otherwise than on the model card.
needles() {
    header "needle tasks by length"
    build
    for length in 2048 4096 8192 16384; do
        tasks=build/needles-$length.jsonl
        python3 tools/tiny/needles.py "$length" >"$tasks"
        ./sala eval --device "$device" --context 20480 --tasks "$tasks" --json -q >build/needles.json
        SHOW=2 step "needles-$length" 60 python3 -c "
import json
card = json.load(open('models/sala-tiny/eval_baseline.json'))['needle_by_length']['$length']
got = json.load(open('build/needles.json'))['tasks']
for kind in ('needle', 'needle_word'):
    n, here, there = got[kind]['n'], got[kind]['exact'], card[kind + '_sparse']
    print('%s of $length tokens, %d tasks: %.3f exact, model card %.3f' % (kind, n, here, there))
    assert abs(here - there) * n < 2.5"
    done
}

# nine NAME ARGUMENTS...: sala bench of the 9B geometry with random weights
nine() {
    name=$1
    shift
    step "$name" "${LIMIT:-120}" ./sala bench --device "$device" --synthetic -m "$nine_config" --no-roofline "$@"
}

filled() { # the same with a random cache instead of a prompt
    nine "$@" --fill
}

bench() {
    header "decoding"
    build
    rm -rf "$SALA_CACHE"
    for cache in cold warm; do # seconds until the first token: kernels compiled, then from the cache
        SHOW=1 step "first-token-$cache" 120 ./sala run -n 1 --device "$device"
    done
    export SHOW=4
    step decode-1 120 ./sala bench --device "$device" --synthetic -m "$nine_config" --fill \
        --prompt-tokens 4096 --gen-tokens 256 --repeat 3 # with the read bandwidth
    filled decode-8 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 8
    filled decode-16 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 16
    filled decode-64 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 64
    filled chains --prompt-tokens 8192 --gen-tokens 200 --repeat 2 --chains
    filled decode-8k --prompt-tokens 8192 --gen-tokens 200 --repeat 2
    filled decode-64k --prompt-tokens 65536 --gen-tokens 200 --repeat 2
    filled decode-512k --prompt-tokens 524288 --gen-tokens 200 --repeat 2
    filled decode-1m --prompt-tokens 1048320 --gen-tokens 200 --repeat 2
    filled sampled --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --sampled
    export SALA_TRACE=1 SHOW=60 # kernels in their place in the step
    filled table-1 --prompt-tokens 4096 --gen-tokens 8 --repeat 1 --kernels
    filled table-64 --prompt-tokens 4096 --gen-tokens 8 --repeat 1 --kernels --parallel 64
    filled table-1m --prompt-tokens 1048320 --gen-tokens 8 --repeat 1 --kernels --chains
    unset SALA_TRACE SHOW
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        SHOW=40 step torch 240 python3 tools/torch_baseline.py --json "$out/torch.json"
    else
        skip torch "there is no PyTorch with CUDA"
    fi
}

prefill() {
    header "prompts"
    build
    export SHOW=4
    nine prompt-64 --prompt-tokens 64 --gen-tokens 4 --repeat 5
    nine prompt-512 --prompt-tokens 512 --gen-tokens 4 --repeat 5
    nine prompt-2k --prompt-tokens 2048 --gen-tokens 4 --repeat 5
    nine prompt-8k --prompt-tokens 8192 --gen-tokens 4 --repeat 3
    nine prompt-32k --prompt-tokens 32768 --gen-tokens 64 --repeat 2
    nine prompt-128k --prompt-tokens 131072 --gen-tokens 64 --repeat 2
    export SALA_TRACE=1 SHOW=30
    nine shares-8k --prompt-tokens 8192 --gen-tokens 1 --repeat 1 --kernels
    nine shares-128k --prompt-tokens 131072 --gen-tokens 1 --repeat 1 --kernels
    unset SALA_TRACE
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        SHOW=12 step torch-prefill 120 python3 tools/torch_prefill.py --json "$out/torch_prefill.json"
    else
        skip torch-prefill "there is no PyTorch with CUDA"
    fi
    export SHOW=4 LIMIT=240
    nine prompt-512k --prompt-tokens 524288 --gen-tokens 128 --repeat 1
    nine prompt-1m --prompt-tokens 1048320 --gen-tokens 128 --repeat 1
    unset SHOW LIMIT
}

# left SECONDS: do so many of the stage's ten minutes (SECONDS_OF_FOUR) remain? Late steps are skipped, not cut.
left() {
    [ $(($(date +%s) - stage_began + $1)) -le "${SECONDS_OF_FOUR:-590}" ]
}

timely() { # NAME SECONDS COMMAND...: a step, if it can still be done in time
    if left "$2"; then
        step "$@"
    else
        skip "$1" "the stage's time is over"
    fi
}

timely_nine() { # NAME SECONDS FORMAT ARGUMENTS...: sala bench of the 9B geometry in that format
    name=$1
    limit=$2
    format=$3
    shift 3
    timely "$name-$format" "$limit" ./sala bench --device "$device" --synthetic -m "$nine_config" \
        --weights "$format" "$@"
}

four() { # what matters most comes first
    header "four bits"
    stage_began=$(date +%s)
    build
    export SHOW=3
    for format in nvfp4 nvfp4-head int4 bf16; do # one sequence: with the read bandwidth
        timely_nine decode-1 25 "$format" --fill --prompt-tokens 4096 --gen-tokens 256 --repeat 3
    done
    timely_nine prompt-128k 30 nvfp4 --no-roofline --prompt-tokens 131072 --gen-tokens 16 --repeat 1
    for format in nvfp4-head int4; do # the sums of all layers are the last lines
        SHOW=24 timely_nine gemm 30 "$format" --gemm --repeat 1
    done
    for format in nvfp4-head int4; do
        if [ -n "${MARLIN_DIR:-}" ] && left 70; then
            ./sala bench -q --device "$device" --synthetic -m "$nine_config" --weights "$format" --gemm \
                --repeat 1 --json >"$out/gemm-$format.json"
            SHOW=70 timely "marlin-$format" 45 python3 tools/marlin_baseline.py --quick --rows 1,8,16,32,48 \
                --json "$out/marlin.json" --sala "$out/gemm-$format.json"
        else
            skip "marlin-$format" "MARLIN_DIR is not set, or the stage's time is over"
        fi
    done
    for n in 8 16 32 64; do
        for format in nvfp4 nvfp4-head int4 bf16; do
            timely_nine "decode-$n" 25 "$format" --no-roofline --fill --prompt-tokens 4096 --gen-tokens 200 \
                --repeat 2 --parallel $n
        done
    done
    export SALA_TRACE=1
    SHOW=40 timely_nine table-1 30 nvfp4 --no-roofline --fill --prompt-tokens 4096 --gen-tokens 8 \
        --repeat 1 --kernels
    SHOW=40 timely_nine shares-32k 30 nvfp4 --no-roofline --prompt-tokens 32768 --gen-tokens 1 \
        --repeat 1 --kernels
    unset SALA_TRACE
    for format in nvfp4 int4 bf16; do
        timely_nine prompt-32k 25 "$format" --no-roofline --prompt-tokens 32768 --gen-tokens 16 --repeat 2
    done
    for format in int4 bf16; do
        timely_nine prompt-128k 30 "$format" --no-roofline --prompt-tokens 131072 --gen-tokens 16 --repeat 1
    done
    SHOW=24 timely_nine gemm 30 bf16 --gemm --repeat 1
    SHOW=24 timely_nine gemm-w4a4 60 nvfp4 --gemm --repeat 1 --prefill w4a4
    unset SHOW
    SHOW=20 timely four-kernels 90 build/test_kernels four nvfp4 int4
    SHOW=20 timely four-prefill 90 build/test_prefill four nvfp4 int4 fp4
    SHOW=20 timely four-engine 120 build/test_cuda four nvfp4 int4
}

read_seconds() { # NAME: of the prompt, from the log of that step
    sed -n 's/^prefill .* \([0-9.]*\) s in all.*/\1/p' "$out/$1.log"
}

spec() { # ends within 270 s; what was wanted comes last
    header "drafts"
    stage_began=$(date +%s)
    SECONDS_OF_FOUR=270
    build
    rm -f "$out"/drafts*.log
    export SHOW=20
    timely_nine drafts 60 nvfp4-head --no-roofline --spec all --goals --draft bench/configs/eagle3-437m.json --fill \
        --prompt-tokens 4096 --gen-tokens 448 --parallel 8
    SHOW=30 timely drafts-tiny 30 ./sala bench --spec all --goals --device "$device" --gen-tokens 160 --repeat 3
    SHOW=16 timely drafts-same 80 make lossless-test DEVICE="$device"
    export SHOW=3
    for head in '--spec off' '--spec eagle --draft bench/configs/eagle3-437m.json'; do
        name=drafts-prompt${head##*/}
        # shellcheck disable=SC2086 # several words
        timely_nine "${name%% *}" 35 nvfp4-head --no-roofline --prompt-tokens 131072 --gen-tokens 16 --repeat 1 $head
    done
    SHOW=8 timely drafts-cuda 60 build/test_cuda planted draft_head
    unset SHOW SECONDS_OF_FOUR
    {
        grep -h -e '^met ' -e '^MISSED ' "$out"/drafts*.log
        awk -v plain="$(read_seconds drafts-prompt-nvfp4-head)" -v head="$(read_seconds drafts-prompteagle3-437m.json-nvfp4-head)" '
            BEGIN { printf "%s prompt of 128K tokens, seconds for the head: %.3f (wanted: at most 1)\n",
                    plain > 0 && head > 0 && head - plain <= 1 ? "met   " : "MISSED", head - plain }'
    } | tee -a "$out/gpu-check.log"
}

dump() {
    header "features for a draft head"
    step build-dump 300 make -j4 sala build/test_cuda
    step dump-test 120 build/test_cuda features
    rm -rf build/dump && mkdir -p build/dump
    awk 'BEGIN { srand(1); for (i = 0; i < 12; i++) { printf "{\"tokens\": [%d", 70000 * rand()
            for (t = 1; t < 4096; t++) printf ", %d", 70000 * rand(); print "]}" } }' >build/dump/long.jsonl
    awk -F'"user": ' 'NR <= 400 { sub(/, "[a-z_]*": .*/, "", $2); print "{\"messages\": [{\"role\": \"user\", \"content\": " $2 "}]}" }' \
        models/sala-tiny/eval_tasks.jsonl >build/dump/questions.jsonl
    # 1.6 GB; beside it the same tokens as a prompt: dumping should cost at most a third more
    SHOW=4 step dump-nine 120 ./sala dump-features --device "$device" -m "$nine_config" --synthetic --weights nvfp4 \
        --data build/dump/long.jsonl --out build/dump/nine --max-tokens 4096 --json
    SHOW=6 step dump-prompt 120 ./sala bench --device "$device" -m "$nine_config" --synthetic --weights nvfp4 --no-roofline \
        --prompt-tokens 4096 --gen-tokens 2 --repeat 3
    SHOW=4 step dump-tiny 120 ./sala dump-features --device "$device" --data build/dump/questions.jsonl --out build/dump/tiny \
        --regenerate --answer-tokens 128 --parallel 64 --json
    rm -rf build/dump
}

soar_nine() { # NAME SECONDS FORMAT SET ARGUMENTS...: sala bench --soar of the 9B geometry, its report in NAME.json
    name=$1
    limit=$2
    format=$3
    set=$4
    shift 4
    # shellcheck disable=SC2016 # the inner shell's
    timely "$name" "$limit" sh -c 'to=$1; shift; ./sala bench -q --json "$@" >"$to"' sh "$out/$name.json" \
        --device "$device" --synthetic -m "$nine_config" --weights "$format" --soar "$set" "$@"
}

# SOAR_ORACLE: of 100 drafted tokens so many are right, as a trained head's would be.
soar() { # ends within 330 s; what was wanted comes last
    header "many requests"
    stage_began=$(date +%s)
    SECONDS_OF_FOUR=330
    build
    step build-set 60 make build/make_soar_set
    rm -f "$out"/soar-*.json "$out"/soar-*.log "$out/context.csv"
    drafts="--spec all --spec-test oracle:${SOAR_ORACLE:-80} --draft bench/configs/eagle3-437m.json"
    export SHOW=2
    for set in one:100:4096:1 eight:100:4096:8 long:60000:512:4 max:100:1024:64 wide:2048:96:128; do
        lengths=${set#*:}
        build/make_soar_set -q --lengths "${lengths%:*}" --count "${set##*:}" >"build/soar-${set%%:*}.jsonl"
    done
    soar_nine soar-one-bf16 60 bf16 build/soar-one.jsonl --concurrency 1
    # shellcheck disable=SC2086 # several words
    soar_nine soar-one 60 nvfp4-head build/soar-one.jsonl --concurrency 1 $drafts
    soar_nine soar-eight-bf16 70 bf16 build/soar-eight.jsonl --concurrency 8
    # shellcheck disable=SC2086
    soar_nine soar-eight 70 nvfp4-head build/soar-eight.jsonl --concurrency 8 $drafts
    timely_nine soar-256 30 nvfp4-head --no-roofline --fill --prompt-tokens 2048 --gen-tokens 64 --repeat 2 --parallel 256
    soar_nine soar-wide 50 nvfp4-head build/soar-wide.jsonl --concurrency 96 # prompts come while others generate
    for n in 1 8 64; do
        timely_nine "soar-host-$n" 25 nvfp4-head --no-roofline --fill --prompt-tokens 4096 --gen-tokens 100 --repeat 2 \
            --parallel $n --kernels
    done
    # shellcheck disable=SC2086
    soar_nine soar-long 60 nvfp4-head build/soar-long.jsonl --concurrency 8 $drafts
    # shellcheck disable=SC2086
    soar_nine soar-max 50 nvfp4-head build/soar-max.jsonl --concurrency max $drafts
    # shellcheck disable=SC2016
    timely soar-context 100 sh -c 'to=$1; shift; ./sala bench -q "$@" >"$to"' sh "$out/context.csv" --context \
        --device "$device" --synthetic -m "$nine_config" --weights nvfp4-head --max-context 1M --gen-tokens 64
    [ -s "$out/context.csv" ] && python3 tools/plot.py "$out/context.csv" >"$out/context.svg"
    unset SHOW SECONDS_OF_FOUR
    python3 tools/soar_verdicts.py "$out" | tee -a "$out/gpu-check.log"
}

reuse() { # copies of the states should cost nothing that can be measured, a prefix of 128K a few milliseconds
    header "prefix reuse"
    build
    SHOW=10 step reuse-kernel 100 build/test_prefill prefill_gla
    SHOW=10 step reuse-engine 100 build/test_cuda prefix_reuse
    export SHOW=5
    nine reuse-none-8k --prompt-tokens 8192 --gen-tokens 4 --repeat 1
    nine reuse-leaves-8k --prompt-tokens 8192 --gen-tokens 4 --repeat 1 --reuse prefix
    nine reuse-128k --prompt-tokens 131072 --gen-tokens 4 --repeat 2 --reuse prefix # the best is the second
    nine reuse-8-of-4k --prompt-tokens 4096 --gen-tokens 64 --parallel 8 --repeat 1 --reuse prefix
    unset SHOW
}

accuracy() {
    header "accuracy of four bits"
    step build-accuracy 200 make -j4 sala quantize
    # models that lie in build/accuracy/models already are taken as they are
    SHOW=40 step accuracy 560 env DEVICE="$device" sh tools/accuracy.sh models/sala-tiny build/accuracy
}

# Of the 9B shape with random weights; the file goes to $SESSION_DIR (/tmp), whose disk is the yardstick.
sessions() {
    header "sessions"
    step build-sessions 300 make -j4 build/test_session build/restore
    SHOW=8 step sessions-device 120 build/test_session device
    for tokens in 4096 131072; do
        SHOW=8 step "sessions-$tokens" 240 build/restore "$nine_config" "$device" "$tokens" \
            "${SESSION_DIR:-/tmp}/sala-$$.session"
    done
    grep -h -e '^met ' -e '^MISSED ' "$out"/sessions-[0-9]*.log | tee -a "$out/gpu-check.log"
}

train() { # the verdicts on tau come last
    header "training a draft head"
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        step build-train 100 make -j4 sala
        SHOW=20 step train 480 env DEVICE="$device" OUT="$out" sh tools/tiny/draft.sh
    else
        skip train "there is no PyTorch with CUDA"
    fi
}

[ $# -gt 0 ] || set -- all
for stage in "$@"; do
    case $stage in
    kernels | engine | sanitizer | needles | bench | prefill | four | spec | soar | reuse | dump | sessions | accuracy | train) $stage ;;
    all)
        for each in kernels engine sanitizer needles bench prefill four spec soar reuse dump sessions accuracy train; do $each; done
        ;;
    *)
        echo "gpu_check.sh: there is no stage '$stage'; there are: kernels engine sanitizer needles bench prefill" \
            "four spec soar reuse dump sessions accuracy train all" >&2
        exit 2
        ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
