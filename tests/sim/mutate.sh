#!/bin/sh
# Are the kernel tests awake? Breaks sala.cu in many small ways (mutations.txt), one at a time, and runs the
# tests of the kernel that was broken on the simulator. Every mutation must make one of them fail.
#
#   sh tests/sim/mutate.sh PROGRAM [WORD ...]      PROGRAM: test_kernels; WORD: only lines that contain one
#
# Tests named prefill... are those of test_prefill beside it.
#
# SALA_SIM is the simulator (build/libsala_sim.so). JOBS run side by side (2). SHARE=1/2 (or any n of m) runs
# every m-th mutation from the n-th on; whether a line still fits sala.cu is looked at in all of them. After a change of sala.cu lines of
# the list may have to change too: broken are those that do not match once, or do not compile. The last line is
# "N caught, N survived, N broken".
set -u
cd "$(dirname "$0")/../.." || exit 2
program=${1:?which test_kernels?}
export SALA_SIM="${SALA_SIM:-build/libsala_sim.so}"
shift
limit=${LIMIT:-90} # seconds for one mutation; more is a hang, and counts as caught

# one FOLDER NUMBER: build and test one mutation; the verdict goes to FOLDER/NUMBER.verdict.
one() {
    source=$1/$2.cu log=$1/$2.log words=$(cat "$1/$2.tests")
    case $words in prefill*) program=${program%kernels}prefill ;; esac
    : >"$log"
    # shellcheck disable=SC2086
    SALA_SIM_SOURCE=$source SALA_CACHE=$1/$2.cache timeout "$limit" "$program" $words >"$log" 2>&1 &
    tests=$!
    while kill -0 $tests 2>/dev/null && ! grep -q ' is false$' "$log"; do sleep 0.1; done
    if kill $tests 2>/dev/null; then # a test has failed: the others need not end
        wait $tests 2>/dev/null
        verdict=caught
    else
        wait $tests
        case $? in
        0) verdict=SURVIVED ;;
        124) verdict="caught (hangs)" ;;
        *) verdict=caught ;;
        esac
    fi
    grep -q 'cannot compile' "$log" && verdict="BROKEN: does not compile"
    grep -Eq '^skipped' "$log" && verdict="BROKEN: no simulator"
    echo "$verdict" >"$1/$2.verdict"
    echo "$verdict: $(cat "$1/$2.name")"
    rm -rf "$1/$2.cache" "$source"
}
if [ "${1:-}" = --one ]; then
    one "$2" "$3"
    exit
fi

if ! "$program" test_gemm test_commit >/dev/null 2>&1; then
    echo "mutate.sh: $program fails as it is" >&2
    exit 2
fi
folder=$(mktemp -d) || exit 2
trap 'rm -rf "$folder"' EXIT
trap 'exit 2' INT TERM

# Each line of mutations.txt that is wanted becomes N.cu, N.name and N.tests. White space in it stands for any
# white space, so that only words matter.
awk -v out="$folder" -v wanted="$*" -v share="${SHARE:-1/1}" '
function trim(s) { gsub(/^[ \t]+|[ \t]+$/, "", s); return s }
function pattern(text,    i, c, p) {
    p = ""
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == " ") p = p "[ \n]+"
        else if (c ~ /[A-Za-z0-9_;,<>=:"#!%~@-]/) p = p c
        else if (c == "^" || c == "\\") p = p "\\" c
        else p = p "[" c "]"
    }
    return p
}
BEGIN {
    words = split(wanted, word, " ")
    split(share, part, "/")
    while ((getline line < "sala.cu") > 0) source = source line "\n"
    while ((getline line < "tests/sim/mutations.txt") > 0) {
        if (line ~ /^#/ || trim(line) == "") continue
        mine = words == 0
        for (i = 1; i <= words; i++) if (index(line, word[i])) mine = 1
        if (!mine) continue
        n++
        bar = index(line, " | "); name = trim(substr(line, 1, bar - 1)); rest = substr(line, bar + 3)
        bar = index(rest, " | "); tests = trim(substr(rest, 1, bar - 1)); rest = substr(rest, bar + 3)
        arrow = index(rest, " => ")
        if (arrow) { old = trim(substr(rest, 1, arrow - 1)); new = trim(substr(rest, arrow + 4)) }
        else { old = trim(rest); sub(/ =>$/, "", old); new = "" }
        file = out "/" n
        print name > (file ".name"); print tests > (file ".tests")
        close(file ".name"); close(file ".tests")
        p = pattern(old); times = 0; text = source; before = ""
        while (match(text, p)) {
            if (times++ == 0) { at = RSTART; size = RLENGTH }
            text = substr(text, RSTART + RLENGTH)
        }
        if (times != 1) {
            print "BROKEN: matches " times " times" > (file ".verdict"); close(file ".verdict")
            print "BROKEN: matches " times " times: " name
            continue
        }
        if (n % part[2] != part[1] % part[2]) continue
        printf "%s%s%s", substr(source, 1, at - 1), new, substr(source, at + size) > (file ".cu")
        close(file ".cu")
    }
}'
for source in "$folder"/*.cu; do
    [ -e "$source" ] || continue
    number=${source##*/}
    echo "${number%.cu}"
done | sort -n | xargs -P "${JOBS:-2}" -n 1 sh tests/sim/mutate.sh "$program" --one "$folder"

count() { cat "$folder"/*.verdict 2>/dev/null | grep -c "^$1"; }
caught=$(count caught) survived=$(count SURVIVED) broken=$(count BROKEN)
echo "$caught caught, $survived survived, $broken broken"
[ "$caught" -gt 0 ] && [ "$survived" -eq 0 ] && [ "$broken" -eq 0 ]
