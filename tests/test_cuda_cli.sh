#!/bin/sh
# The command line on the CUDA simulator: devices, the kernel cache and what can go wrong with it.
# SALA names the program, SALA_SIM the simulator. Without a simulator everything is skipped.
cd "$(dirname "$0")/.." || exit 1
: "${SALA:=./sala}" "${SALA_SIM:=build/libsala_sim.so}"
passed=0 failed=0
if [ ! -f "$SALA_SIM" ]; then
    echo "skipped: no simulator ($SALA_SIM)"
    echo "0 passed, 0 failed"
    exit 0
fi
dir=$(mktemp -d) || exit 1
trap 'chmod -R u+w "$dir"; rm -rf "$dir"' EXIT
export SALA_CUDA="$PWD/$SALA_SIM" SALA_NVRTC="$PWD/$SALA_SIM" SALA_CACHE="$dir/cache"
case $SALA_SIM in /*) export SALA_CUDA="$SALA_SIM" SALA_NVRTC="$SALA_SIM" ;; esac

result() { # name, 0 when it went well
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $1"
    else
        failed=$((failed + 1))
        echo "FAILED $1"
        tail -n 5 "$dir/out" "$dir/err"
    fi
}

run() { # arguments of sala; output to files, status in $status
    timeout 120 "$SALA" run -p "Once upon a time" -n 3 "$@" >"$dir/out" 2>"$dir/err"
    status=$?
}

says() { # words in the messages
    grep -q -- "$1" "$dir/err"
}

run --device cuda
result runs-on-the-device "$([ $status -eq 0 ] && [ -s "$dir/out" ] && says 'cuda:0' && echo 0 || echo 1)"
cp "$dir/out" "$dir/first"
files=$(find "$dir/cache" -name '*.cubin' | wc -l)
result kernels-are-cached "$([ "$files" -gt 0 ] && echo 0 || echo 1)"
run --device cuda:0
result warm-start-says-the-same "$([ $status -eq 0 ] && cmp -s "$dir/out" "$dir/first" && echo 0 || echo 1)"
run
result auto-finds-the-device "$([ $status -eq 0 ] && says 'cuda:0' && echo 0 || echo 1)"
run --device cpu
result cpu-is-the-cpu "$([ $status -eq 0 ] && says 'CPU, ' && echo 0 || echo 1)"

for file in "$dir"/cache/*.cubin; do
    head -c 1000 "$file" >"$dir/part" && mv "$dir/part" "$file"
done
run --device cuda
result truncated-cubin-is-rebuilt "$([ $status -eq 0 ] && cmp -s "$dir/out" "$dir/first" && says 'compiling again' && echo 0 || echo 1)"
for file in "$dir"/cache/*.cubin; do
    printf 'xyz' | dd of="$file" bs=1 seek=5000 conv=notrunc 2>/dev/null
done
run --device cuda
result damaged-cubin-is-rebuilt "$([ $status -eq 0 ] && cmp -s "$dir/out" "$dir/first" && echo 0 || echo 1)"

# What measures on a GPU only (tools/gpu_check.sh) is gone through here, so that a visit does not end in a crash.
tiny() { # name, what its output has, arguments of sala bench
    name=$1 has=$2
    shift 2
    timeout 120 "$SALA" bench -q --device cuda --no-roofline --repeat 1 "$@" >"$dir/out" 2>"$dir/err"
    result "bench-$name" "$([ $? -eq 0 ] && grep -q "$has" "$dir/out" && echo 0 || echo 1)"
}
tiny fill 'decode   2 x 2 tokens' --fill --prompt-tokens 64 --gen-tokens 2 --parallel 2 --kernels
tiny chains 'chains   of 16 tokens' --fill --prompt-tokens 64 --gen-tokens 1 --chains

# Killed while it compiles for the first time: the next start is clean, also with several at once.
rm -rf "$dir/cache"
"$SALA" run -p "Once" -n 3 --device cuda >/dev/null 2>&1 &
victim=$!
sleep 0.6
kill -9 $victim 2>/dev/null
wait $victim 2>/dev/null
timeout 120 "$SALA" run -p "Once upon a time" -n 3 --device cuda >"$dir/other" 2>"$dir/other.err" &
run --device cuda
wait
result start-after-a-kill "$([ $status -eq 0 ] && cmp -s "$dir/out" "$dir/first" && cmp -s "$dir/other" "$dir/first" && echo 0 || echo 1)"

if [ "$(id -u)" -ne 0 ]; then
    mkdir -p "$dir/locked"
    chmod 555 "$dir/locked"
    SALA_CACHE="$dir/locked/cache" run --device cuda
else # root may write everywhere: a file where the folder should be
    : >"$dir/locked"
    SALA_CACHE="$dir/locked/cache" run --device cuda
fi
result unwritable-cache-warns "$([ $status -eq 0 ] && cmp -s "$dir/out" "$dir/first" && says 'kernel cache' && echo 0 || echo 1)"

run --device cuda:7
result no-such-device "$([ $status -eq 1 ] && says 'cuda:7' && echo 0 || echo 1)"
run --device cuda:x
result malformed-device "$([ $status -eq 2 ] && says 'cuda:N' && echo 0 || echo 1)"
run --device cuda --memory-limit 1M
result does-not-fit "$([ $status -eq 1 ] && says 'weights' && says 'lower context' && echo 0 || echo 1)"
SALA_SIM_MEMORY=20000000 run --device cuda
result device-is-full "$([ $status -eq 1 ] && [ "$(wc -l <"$dir/err")" -le 3 ] && echo 0 || echo 1)"
SALA_SIM_ARCH=75 run --device cuda
result device-too-old "$([ $status -eq 1 ] && says '7.5' && says '8.0' && echo 0 || echo 1)"
SALA_SIM_ARCH=75 run
result auto-falls-back "$([ $status -eq 0 ] && says 'no GPU used' && says 'CPU, ' && echo 0 || echo 1)"
SALA_NVRTC=/no/such/library run --device cuda
result no-compiler "$([ $status -eq 1 ] && says '/no/such/library' && echo 0 || echo 1)"
SALA_CUDA=/no/such/driver run --device cuda
result no-driver "$([ $status -eq 1 ] && says '/no/such/driver' && echo 0 || echo 1)"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
