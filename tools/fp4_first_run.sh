#!/bin/sh
# The first run on a GPU with FP4 tensor cores (sm_120, sm_121), in one command:
#
#   sh tools/fp4_first_run.sh
#
#   1. does the FP4 instruction give the bits that sala computes elsewhere, and how far off is it if not;
#      does the hardware's conversion to E2M1 agree with sala's (tools/fp4_probe.c)
#   2. the products of W4A4 against their C twins: emulated, which must agree in every bit, and native, which
#      do exactly if 1 says so
#   3. the whole test of a GPU and its benchmarks (tools/gpu_check.sh all)
#
# On other GPUs 1 says so, and 2 and 3 run what there is. SALA_TEST_GPU is the number of the device (0); logs
# go to $OUT (bench/). Whatever differs is wanted: please send bench/fp4-first-run.log.
set -u
cd "$(dirname "$0")/.." || exit 2
export SALA_TEST_GPU="${SALA_TEST_GPU:-0}" OUT="${OUT:-bench}"
mkdir -p "$OUT" build
log=$OUT/fp4-first-run.log
failed=0

run() { # TITLE COMMAND...: what it prints also goes to the log
    title=$1
    shift
    {
        echo "== $title"
        "$@" 2>&1
        echo "exit status $?"
    } | tee -a "$log" | tail -n 60
    tail -n 1 "$log" | grep -q 'exit status 0$' || failed=$((failed + 1))
}

date -u '+%Y-%m-%d %H:%M UTC' >"$log"
nvidia-smi -i "$SALA_TEST_GPU" --query-gpu=name,compute_cap,driver_version --format=csv,noheader >>"$log" 2>/dev/null
make -j4 build/fp4_probe build/test_prefill >build/fp4-first-run-build.log 2>&1 || {
    cat build/fp4-first-run-build.log
    echo "fp4_first_run.sh: the build has failed" >&2
    exit 1
}
run "the instruction and the conversion" build/fp4_probe "$SALA_TEST_GPU"
[ $failed -eq 0 ] || { # it counts what differs, and fails only without a device
    echo "fp4_first_run.sh: no GPU could be used, so nothing else is run; $log says why" >&2
    exit 1
}
run "products of W4A4 against their C twins" build/test_prefill fp4
[ "${1:-}" = --quick ] || run "everything else" sh tools/gpu_check.sh all
echo "$failed of these failed; all of it is in $log"
[ $failed -eq 0 ]
