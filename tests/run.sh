#!/bin/sh
# Runs the test programs given and the command-line tests, adds up their "N passed, N failed" lines and ends
# with one of its own. A program that dies without such a line counts as one failure.
# The CPU is meant, also on a machine with a GPU: tests of CUDA name their driver themselves.
export SALA_CUDA="${SALA_CUDA:-/no/cuda/driver}" SALA_CACHE="${SALA_CACHE:-$PWD/build/kernel-cache}"
passed=0 failed=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
run() {
    began=$(date +%s)
    "$@" >"$log" 2>&1
    status=$?
    echo "== $* ($(($(date +%s) - began)) s)"
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    if [ -z "$line" ]; then
        cat "$log"
        echo "FAILED $1 ended with status $status and no result"
        failed=$((failed + 1))
        return
    fi
    grep -v '^ok ' "$log"
    p=${line%% passed*}
    f=${line#* passed, }
    f=${f% failed}
    passed=$((passed + p))
    failed=$((failed + f))
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "FAILED $1 ended with status $status"
        failed=$((failed + 1))
    fi
}
replay() { # a fuzz target over its corpus: each file is a test, and a crash a failure
    corpus=tests/fuzz/corpus/${1##*/fuzz_}
    echo "== $1 $corpus"
    if "$1" "$corpus"/* >"$log" 2>&1; then
        passed=$((passed + $(ls "$corpus" | wc -l)))
    else
        tail -n 20 "$log"
        failed=$((failed + 1))
    fi
}
for program in "$@"; do
    case $program in
    */fuzz_*) replay "$program" ;;
    *) run "$program" ;;
    esac
done
[ -n "${NO_CLI:-}" ] || run sh tests/test_cli.sh
[ -n "${EXTRA:-}" ] || run sh tests/test_cuda_cli.sh
[ -n "${EXTRA:-}" ] || run sh tests/test_dropin.sh # it brings its own flags
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
