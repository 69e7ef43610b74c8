#!/bin/sh
# What only a GPU can tell, in stages of at most ten minutes each:
#
#   sh tools/gpu_check.sh kernels     every kernel against its C twin (build/test_kernels)
#   sh tools/gpu_check.sh engine      the whole engine, its promises and golden texts (build/test_cuda)
#   sh tools/gpu_check.sh sanitizer   compute-sanitizer over a short run, where it is installed
#   sh tools/gpu_check.sh bench       compile times, tokens a second, and PyTorch beside them
#   sh tools/gpu_check.sh all
#
# SALA_TEST_GPU is the number of the device (0). The logs of all steps, and what they write, go to $OUT
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
    step build 300 make -j4 sala build/test_kernels build/test_cuda
}

kernels() {
    header "kernels against their C twins"
    build
    SHOW=40 step kernels 560 build/test_kernels
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
    for tool in memcheck racecheck initcheck synccheck; do
        step "sanitizer-$tool" 150 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            ./sala run -n 8 --device "$device"
    done
}

# nine NAME ARGUMENTS...: sala bench of the 9B geometry with random weights and a random cache
nine() {
    name=$1
    shift
    step "$name" 120 ./sala bench --device "$device" --synthetic -m "$nine_config" --fill "$@"
}

bench() {
    header "speed"
    build
    rm -rf "$SALA_CACHE"
    for cache in cold warm; do # seconds until the first token: kernels compiled, then from the cache
        SHOW=1 step "first-token-$cache" 120 ./sala run -n 1 --device "$device"
    done
    SHOW=4 nine decode-1 --prompt-tokens 4096 --gen-tokens 256 --repeat 3
    SHOW=4 nine decode-8 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 8 --no-roofline
    SHOW=4 nine decode-16 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 16 --no-roofline
    SHOW=4 nine decode-64 --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --parallel 64 --no-roofline
    SHOW=4 nine chains --prompt-tokens 8192 --gen-tokens 200 --repeat 2 --chains --no-roofline
    SHOW=4 nine decode-8k --prompt-tokens 8192 --gen-tokens 200 --repeat 2 --no-roofline
    SHOW=4 nine decode-512k --prompt-tokens 524288 --gen-tokens 200 --repeat 2 --no-roofline
    SHOW=4 nine sampled --prompt-tokens 4096 --gen-tokens 200 --repeat 2 --no-roofline --sampled
    export SALA_TRACE=1 # kernels in their place in the step
    SHOW=60 nine table-1 --prompt-tokens 4096 --gen-tokens 8 --repeat 1 --no-roofline --kernels
    SHOW=60 nine table-64 --prompt-tokens 4096 --gen-tokens 8 --repeat 1 --no-roofline --kernels --parallel 64
    SHOW=60 nine table-1m --prompt-tokens 1048500 --gen-tokens 8 --repeat 1 --no-roofline --kernels --chains
    unset SALA_TRACE
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        SHOW=40 step torch 240 python3 tools/torch_baseline.py --json "$out/torch.json"
    else
        skip torch "there is no PyTorch with CUDA"
    fi
}

[ $# -gt 0 ] || set -- all
for stage in "$@"; do
    case $stage in
    kernels | engine | sanitizer | bench) $stage ;;
    all)
        kernels
        engine
        sanitizer
        bench
        ;;
    *)
        echo "gpu_check.sh: there is no stage '$stage'; there are: kernels engine sanitizer bench all" >&2
        exit 2
        ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
