#!/bin/sh
# The README's promise: gcc, make and a POSIX shell's usual tools are enough. Clones the tree and builds, runs and
# tests it with a PATH that holds nothing else. Arguments go to `make test`.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"
for tool in gcc cc make as ld sh cat cmp cp cut date dd env expr false grep head id kill ln ls mkdir mkfifo mktemp mv od \
    printf rm sed seq sleep sort tail test touch tr true uname wc awk chmod dirname basename stat timeout; do
    path=$(command -v "$tool" 2>/dev/null) || continue
    case $path in /*) ln -s "$path" "$work/bin/$tool" ;; esac
done
git clone --quiet "$top" "$work/sala"
cd "$work/sala"
env -i PATH="$work/bin" HOME="$work" make run >"$work/story.txt" 2>"$work/log.txt" || { cat "$work/log.txt"; exit 1; }
grep -q "Once upon a time" "$work/story.txt" || grep -qi "fox" "$work/story.txt"
cat "$work/story.txt"
env -i PATH="$work/bin" HOME="$work" TMPDIR="$work" make -j2 test "$@"
