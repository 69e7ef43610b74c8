#!/bin/sh
# The program at the head of sala.h, compiled as a stranger would: as C11 and as C++17, without and with
# optimisation, with SALA_STATIC, with gcc and clang, every warning an error; then linked, run and looked at.
# Run from the top folder. Compilers that are not installed are left out.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
: "${ARCH:=native}"

result() { # name, 0 when it went well
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok $1"
    else
        failed=$((failed + 1))
        echo "FAILED $1"
        [ -f "$dir/$1.log" ] && cat "$dir/$1.log"
    fi
}

# name, compiler, flags: in the background, at most two at a time; the status goes to a file
build() {
    name=$1 compiler=$2
    shift 2
    command -v "$compiler" >/dev/null || return
    names="$names $name"
    (
        "$compiler" -Wall -Wextra -Wpedantic -Wshadow -Werror -march="$ARCH" "$@" -I. >"$dir/$name.log" 2>&1
        echo $? >"$dir/$name.status"
    ) &
    running=$((running + 1))
    if [ "$running" -ge 2 ]; then
        wait
        running=0
    fi
}
names='' running=0
link='-lm -lpthread'
c='-x c tests/dropin.c'
cxx='-std=c++17 -x c++ tests/dropin.c'

# The slow ones first, in pairs.
build gcc-c11-O3 gcc -std=c11 -O3 $c -o "$dir/gcc-c11-O3" $link
build clang-cxx17-O3 clang++ -O3 -c $cxx -o "$dir/clang-cxx17-O3.o"
build gcc-c11-O0 gcc -std=c11 -O0 $c -o "$dir/gcc-c11-O0" $link
build gcc-cxx17-O0 g++ -O0 $cxx -o "$dir/gcc-cxx17-O0" $link
build gcc-gnu11-static gcc -std=gnu11 -O0 -DSALA_STATIC -c $c -o "$dir/gcc-gnu11-static.o"
build gcc-cxx17-static g++ -O0 -DSALA_STATIC -c $cxx -o "$dir/gcc-cxx17-static.o"
build clang-c11-O0 clang -std=c11 -O0 -c $c -o "$dir/clang-c11-O0.o"
build clang-c11-static clang -std=c11 -O0 -DSALA_STATIC -c $c -o "$dir/clang-c11-static.o"
if [ "$(uname -m)" = x86_64 ]; then # what other machines have: AVX2 without AVX-512, and no SIMD beyond SSE2
    for other in x86-64-v3 x86-64; do
        build "gcc-$other" gcc -std=c11 -O0 -march="$other" $c -o "$dir/gcc-$other" $link
        build "gcc-cxx17-$other" g++ -O0 -march="$other" -c $cxx -o "$dir/gcc-cxx17-$other.o"
        build "clang-$other" clang -std=c11 -O0 -march="$other" -c $c -o "$dir/clang-$other.o"
    done
fi
wait
for name in $names; do result "$name" "$(cat "$dir/$name.status")"; done

# The copy in tests is the one in the header.
sed -n '/#define SALA_IMPLEMENTATION/,/^    LIMITS/p' sala.h | sed -n '/^        #include <stdio.h>/,/^        }/p' |
    sed 's/^        //' >"$dir/head"
sed -n '/^#include <stdio.h>/,$p' tests/dropin.c >"$dir/copy"
[ -s "$dir/head" ] && cmp "$dir/head" "$dir/copy" >"$dir/same-as-in-header.log" 2>&1
result same-as-in-header $?

# It tells the same story however it was compiled.
# (Without hardware FMA, -march=x86-64, it would too, ten times slower.)
for name in gcc-c11-O3 gcc-c11-O0 gcc-cxx17-O0 gcc-x86-64-v3; do
    case " $names " in *" $name "*) ;; *) continue ;; esac
    [ -x "$dir/$name" ] && "$dir/$name" >"$dir/$name.out" 2>"$dir/run-$name.log" && [ "$(wc -c <"$dir/$name.out")" -gt 40 ] &&
        cmp "$dir/gcc-c11-O3.out" "$dir/$name.out" >"$dir/run-$name.log" 2>&1
    result "run-$name" $?
done

# The header alone, in C++, against the implementation in C; several files may include it.
printf '#include "sala.h"\n#include "sala.h"\nint main() { return sala_version()[0] ? 0 : 1; }\n' >"$dir/user.cpp"
printf '#define SALA_IMPLEMENTATION\n#include "sala.h"\n' >"$dir/sala.c"
gcc -std=gnu11 -O0 -march="$ARCH" -I. -c "$dir/sala.c" -o "$dir/sala.o" >"$dir/two-files.log" 2>&1
result implementation-alone $?
if command -v g++ >/dev/null; then
    g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I. "$dir/user.cpp" "$dir/sala.o" -o "$dir/user" $link \
        >"$dir/two-files.log" 2>&1 && "$dir/user"
    result two-files $?
fi

# What the linker sees: only names that begin with sala_, and with SALA_STATIC nothing but main.
if command -v nm >/dev/null; then
    nm -g --defined-only "$dir/sala.o" | awk '{print $3}' >"$dir/names"
    [ "$(wc -l <"$dir/names")" -gt 15 ] && ! grep -qvE '^sala_[a-z]' "$dir/names"
    result exported-names $?
    [ "$(nm -g --defined-only "$dir/gcc-gnu11-static.o" | awk '{print $3}')" = main ]
    result static-exports-nothing $?
fi

# -ffast-math is refused by name.
gcc -ffast-math -march="$ARCH" -I. -c "$dir/sala.c" -o "$dir/fast.o" 2>&1 | grep -q 'ffast-math'
result fast-math-is-refused $?

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
