#!/bin/sh
# Tests of the command line, with a POSIX shell and its usual tools only. Runs ./sala (or $SALA)
# with models/sala-tiny. `sh tests/test_cli.sh [word]` runs the tests whose names contain the word; those
# named in $SKIP are left out.
cd "$(dirname "$0")/.." || exit 1
sala=${SALA:-./sala}
only=$1
tiny=models/sala-tiny
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
unset SALA_MODEL
LC_ALL=C
export LC_ALL
passed=0 failed=0

# ---- helpers ----

# check NAME COMMAND...: the test passes when the command does; what it printed is shown when not.
check() {
    name=$1
    shift
    case $name in *"$only"*) ;; *) return ;; esac
    case " ${SKIP:-} " in *" $name "*) return ;; esac
    rm -rf "$work" && mkdir "$work" && : >"$work/out" && : >"$work/err" || exit 1
    if "$@" >"$work/log" 2>&1; then
        passed=$((passed + 1))
        echo "ok     $name"
    else
        failed=$((failed + 1))
        echo "FAILED $name"
        sed 's/^/    /' "$work/log" "$work/err" | head -n 20
    fi
}

# exits CODE ARGUMENTS...: run sala with empty input and compare the exit code; stdout goes to
# $work/out, stderr to $work/err.
exits() {
    wanted=$1
    shift
    "$sala" "$@" </dev/null >"$work/out" 2>"$work/err"
    got=$?
    [ "$got" -eq "$wanted" ] || { echo "sala $*: exit code $got, expected $wanted"; return 1; }
}

says() { grep -q -e "$1" "$work/err" || { echo "stderr does not say: $1"; return 1; }; }
prints() { grep -q -e "$1" "$work/out" || { echo "stdout does not say: $1"; return 1; }; }
silent() { [ ! -s "$work/out" ] || { echo "stdout is not empty"; return 1; }; }
lines() { # lines N FILE: the file has so many lines, beside the one that says why no GPU is used
    got=$(grep -vc '^sala: no GPU used: ' "$2")
    [ "$got" -eq "$1" ] || { echo "$2 has $got lines, expected $1"; return 1; }
}
field() { sed -n "s/.*\"$1\": \([0-9.]*\).*/\1/p" "$work/out"; } # a number in one line of JSON

# is_json FILE: exactly one JSON value, and nothing else.
is_json() {
    awk '
    BEGIN { number = "^-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]+)?" }
    function bad(what) { if (!broken) print "not JSON at byte " at ": " what; broken = 1 }
    function skip() { while (at <= n && index(" \t\r\n", substr(s, at, 1))) at++ }
    function text() {
        if (substr(s, at, 1) != "\"") { bad("no string"); return }
        for (at++; at <= n; at++) {
            c = substr(s, at, 1)
            if (c == "\"") { at++; return }
            if (c < " ") { bad("control character"); return }
            if (c != "\\") continue
            c = substr(s, ++at, 1)
            if (c == "u") {
                for (i = 1; i < 5; i++)
                    if (substr(s, at + i, 1) !~ /^[0-9a-fA-F]$/) { bad("\\u"); return }
                at += 4
            } else if (!index("\"\\/bfnrt", c)) { bad("escape"); return }
        }
        bad("string without end")
    }
    function value(depth,    open, c) {
        skip()
        c = substr(s, at, 1)
        if (c == "{" || c == "[") {
            open = c
            at++
            skip()
            if (substr(s, at, 1) == (open == "{" ? "}" : "]")) { at++; return }
            while (!broken) {
                if (open == "{") {
                    skip()
                    text()
                    skip()
                    if (substr(s, at++, 1) != ":") bad("no colon")
                }
                value(depth + 1)
                skip()
                c = substr(s, at++, 1)
                if (c == (open == "{" ? "}" : "]")) return
                if (c != ",") bad("no comma")
            }
        } else if (c == "\"") text()
        else if (match(substr(s, at, 32), number)) at += RLENGTH
        else if (match(substr(s, at, 5), /^(true|false|null)/)) at += RLENGTH
        else bad("no value")
    }
    { s = s $0 "\n" }
    END {
        n = length(s)
        at = 1
        value(0)
        skip()
        if (at <= n) bad("more text")
        exit broken
    }' "$1"
}

# until COMMAND...: wait (20 s at most) for it to succeed.
until_true() {
    for _ in $(seq 200); do
        "$@" && return 0
        sleep 0.1
    done
    echo "timed out: $*"
    return 1
}

# ended PID CODE: wait for a background sala and compare its exit code.
ended() {
    wait "$1"
    got=$?
    [ "$got" -eq "$2" ] || { echo "exit code $got, expected $2"; return 1; }
}

long_run="run -q -p Once --ignore-eos -n 30000"

# ---- usage and exit codes ----

t_help() {
    exits 0 help && prints 'SALA_MODEL' && prints 'Exit codes' && exits 0 --help &&
        prints 'usage' &&
        for c in run chat info logits eval bench dump-features; do
            exits 0 help $c && prints "usage: sala $c" && prints 'Examples' &&
            exits 0 $c --help || return 1
        done
    exits 0 run -h && prints '--max-tokens N' && exits 0 --version && prints '^sala [0-9]'
}
t_no_command() { exits 2 && silent && says 'usage: sala COMMAND'; }
t_unknown_command() { exits 2 frobnicate && silent && says "unknown command 'frobnicate'" &&
        exits 2 help frobnicate; }
t_unknown_option() {
    exits 2 run --promt x && silent && says 'unknown option --promt; did you mean --prompt?' &&
        exits 2 run --temprature 1 && says 'did you mean --temperature?' && exits 2 run --tmp=1 &&
        says 'did you mean --temp?' &&
        exits 2 run --qqqqqqqqqq && says 'sala help run' && exits 2 run -z &&
        says 'unknown option -z' &&
        exits 2 info --top-p 1 && says 'unknown option --top-p' && exits 2 bench --temp 1 && says 'sala help bench. lists' &&
        exits 2 eval --tasks x --seed 1 && says 'unknown option --seed'
}
t_bad_values() {
    exits 2 run -n 0 && says 'max-tokens' && exits 2 run --temp -1 && says 'temperature' &&
        exits 2 run --temp=x &&
        exits 2 run --chunk 100 && says '64' && exits 2 run --top-p 2 && exits 2 run --bias 3 &&
        says 'ID:VALUE' &&
        exits 2 run --bias 3: && exits 2 run --bias :1 && exits 2 run --bias 3:nan &&
        exits 2 run --stop-token -1 && exits 2 run --stop-token 99999 && says '--stop-token: there is no token 99999' &&
        exits 2 chat --bias 2048:1 && says '--bias: there is no token 2048: the vocabulary has 0 to 2047' &&
        exits 2 run --kv-tokens 5 && says 'kv-tokens (5)' && exits 2 run --weights int4 && says 'for synthetic' &&
        exits 1 run --memory-limit 1 && says '0.000001 MiB are allowed' &&
        exits 2 run --stop '' && exits 2 run --template alpaca && exits 2 run --threads 1.5 &&
        exits 2 eval --tasks x --parallel 0 && exits 2 logits --mode sideways &&
        says 'prefill nor step' && silent
}
t_bad_usage() {
    exits 2 run -p && says '--prompt needs a value' && exits 2 run --json=1 &&
        says 'takes no value' &&
        exits 2 run hello && says "unexpected argument 'hello'" && exits 2 run -p a -f b &&
        exits 2 run --system x &&
        exits 2 run --logprobs 2 && exits 2 run --reuse prefix && says 'run has one prompt' &&
        exits 2 logits --out x && exits 2 eval &&
        exits 2 eval --tasks a --ppl b &&
        exits 2 eval --tasks a --window 5 && exits 2 eval --ppl a --limit 3 && silent &&
        exits 2 info --against a && says 'belongs to --check' && exits 2 info --check --text a && silent
}
t_missing_model() {
    exits 1 run -m "$work/none" && silent && says "$work/none" && exits 1 info -m "$work/none" &&
        says "$work/none" &&
        exits 1 chat -m "$work/none" &&
        exits 1 eval -m "$work/none" --tasks $tiny/eval_tasks.jsonl --limit 1 &&
        mkdir -p "$work/empty" && exits 1 run -m "$work/empty" && says 'config.json'
}
t_missing_file() {
    exits 1 run -f "$work/none" && says "$work/none: cannot open" && silent &&
        exits 1 run -f "$work" && says 'cannot read' &&
        exits 1 eval --tasks "$work/none" && exits 1 eval --ppl "$work/none" &&
        exits 1 logits --tokens "$work/none" --out "$work/x" && [ ! -e "$work/x" ]
}
t_model_from_environment() {
    (
        export SALA_MODEL
        SALA_MODEL=$work/none
        exits 1 run && says "$work/none" && exits 0 run -q -m $tiny -n 3 || exit 1
        SALA_MODEL=$tiny
        exits 0 run -n 3 && says "$tiny"
    )
}
t_model_beside_the_program() {
    here=$(pwd)
    case $sala in /*) program=$sala ;; *) program=$here/$sala ;; esac
    mkdir -p "$work/a/models" "$work/b" && cp "$program" "$work/a/sala" &&
        ln -s "$here/$tiny" "$work/a/models/sala-tiny" &&
        (cd "$work/b" && "$work/a/sala" run -n 3 >out 2>err) &&
        grep -q "$work/a/models/sala-tiny" "$work/b/err" &&
        cp "$program" "$work/b/sala" && (cd "$work/b" &&
        ./sala run -n 3 >out 2>err; [ $? -eq 1 ]) &&
        grep -q 'no model: name one with -m DIR' "$work/b/err"
}

# ---- run ----

t_story() {
    exits 0 run -n 64 && prints '^Once upon a time there was a brave fox named Pip. [A-Z"]' &&
        says 'tokens' && says 't/s' &&
        says "$tiny" && says 'bits per weight' && says 'KV and states' && says 'context 32,768' &&
        lines 2 "$work/err" && [ "$(head -n 1 "$work/err" | wc -c)" -lt 250 ] && [ -z "$(tail -c 1 "$work/out")" ]
}
t_golden_text() {
    text='Lily had a good friend named Ted, who was a turtle. One night Lily heard a strange sound.'
    grep -q "$text" $tiny/golden.json &&
        exits 0 run -q -p 'Once upon a time there was a lazy cat named Lily.' -n 64 &&
        [ "$(head -n 1 "$work/out")" = "$text" ] && [ ! -s "$work/err" ]
}
t_json() {
    exits 0 run -q --chat -p 'What does the cow say?' --json && lines 1 "$work/out" &&
        is_json "$work/out" &&
        prints '"prompt_tokens": 16, "tokens": \[916, 1524, 643, 679, 273, 2046\], "text": "It says moo."' &&
        prints '"finish_reason": "stop"' && exits 0 run -q --json -n 5 && is_json "$work/out" &&
        prints '"finish_reason": "length"' && prints '"output_tokens": 5'
}
t_json_of_any_bytes() {
    printf 'a"b\\c\001\377\nd\000e' >"$work/bytes" &&
        exits 0 run -q -f "$work/bytes" --json --echo -n 20 --temp 2 --seed 5 &&
        is_json "$work/out" && prints '"prompt": "a\\"b\\\\c\\u0001\\ufffd\\nd\\u0000e"'
}
t_logprobs() {
    exits 0 run -q -p Once --json -n 3 --logprobs 2 && is_json "$work/out" &&
        prints '"logprobs": \[{"token": ' &&
        [ "$(tr '{' '\n' <"$work/out" | grep -c logprob)" -eq 10 ] # 1 name + 3 x (1 + 2)
}
t_file_and_stdin() {
    printf 'The bear said:' >"$work/p" && exits 0 run -q -p 'The bear said:' -n 8 &&
        cp "$work/out" "$work/a" &&
        exits 0 run -q -f "$work/p" -n 8 && cmp "$work/out" "$work/a" &&
        "$sala" run -q -f - -n8 <"$work/p" | cmp - "$work/a"
}
t_option_forms() {
    exits 0 run -q -p Once -n 8 && cp "$work/out" "$work/a" &&
        exits 0 run --quiet --prompt=Once --max-tokens=8 --temperature=0 --model=$tiny &&
        cmp "$work/out" "$work/a" &&
        exits 0 run -q -pOnce -n8 --max-tokens 8 --context 1K && cmp "$work/out" "$work/a"
}
t_sampling_options() {
    exits 0 run -q -p Once -n 12 --temp 1 --seed 3 && cp "$work/out" "$work/a" &&
        exits 0 run -q -p Once -n 12 --temp 1 --seed 3 && cmp "$work/out" "$work/a" &&
        exits 0 run -q -p Once -n 12 --temp 1 --seed 4 && ! cmp -s "$work/out" "$work/a" &&
        exits 0 run -q -p Once -n 12 --temp 1 --top-k 1 && cp "$work/out" "$work/b" &&
        exits 0 run -q -p Once -n 12 && cmp "$work/out" "$work/b"
}
t_stopping() {
    q='What does the cow say?'
    exits 0 run -q --chat -p "$q" --stop ' moo' --json && prints '"text": "It says"' &&
        prints '"stop"' &&
        exits 0 run -q --chat -p "$q" --stop xyz --stop says --json && prints '"text": "It "' &&
        exits 0 run -q --chat -p "$q" --stop-token 1524 --json &&
        prints '"tokens": \[916, 1524\]' &&
        exits 0 run -q --chat -p "$q" --bias 2046:-inf -n 8 --json && prints '"length"' &&
        exits 0 run -q --chat -p "$q" --ignore-eos -n 8 --json && prints '2046, ' &&
        prints '"length"' &&
        exits 0 run -q --chat -p "$q" --special-text && prints 'moo.<|im_end|>'
}
t_system_prompt() {
    exits 0 run -q --chat -p Hi --json -n 1 && a=$(field prompt_tokens) &&
        exits 0 run -q --chat --system 'Be kind.' -p Hi --json -n 1 && b=$(field prompt_tokens) &&
        [ "$b" -gt $((a + 5)) ]
}
t_too_long() {
    exits 1 run -q -p 'Once upon a time' -n 8 --context 10 && silent && says 'context' &&
        lines 1 "$work/err" &&
        exits 0 run -q -p 'Once upon a time' -n 8 --context 64
}

# ---- output that cannot be written ----

t_closed_stdout() {
    "$sala" run -q -n 5 >&- 2>"$work/err"
    [ $? -eq 3 ] && says 'cannot write to stdout' && lines 1 "$work/err" || return 1
    "$sala" help >&- 2>"$work/err"
    [ $? -eq 3 ] && says 'cannot write to stdout' || return 1
    # The results file must not get the number of the closed stdout, and the table with it.
    "$sala" eval -q --tasks $tiny/eval_tasks.jsonl --only math --limit 1 --out "$work/r" >&- 2>"$work/err"
    [ $? -eq 3 ] && lines 1 "$work/r"
}
t_full_disk() {
    [ -c /dev/full ] || return 0
    for c in 'run -q -n 5' 'run -q -n 5 --json' 'info' 'info --json' 'help' 'help run' '--version' \
        "eval -q --tasks $tiny/eval_tasks.jsonl --only math --limit 1"; do
        "$sala" $c >/dev/full 2>"$work/err" </dev/null
        got=$?
        [ $got -eq 3 ] &&
        says 'cannot write to stdout: No space' || { echo "sala $c: exit code $got"; return 1; }
    done
    printf 'What does the cow say?\n' | "$sala" chat -q >/dev/full 2>"$work/err"
    [ $? -eq 3 ]
}
t_broken_pipe() {
    { "$sala" $long_run 2>"$work/err"; echo $? >"$work/code"; } | head -c 20 >/dev/null
    [ "$(cat "$work/code")" -eq 3 ] && says 'cannot write to stdout: Broken pipe' &&
        lines 1 "$work/err"
}

# ---- Ctrl-C ----

t_interrupt() {
    "$sala" run -p Once --ignore-eos -n 30000 >"$work/out" 2>"$work/err" &
    pid=$!
    until_true test -s "$work/out" && kill -INT $pid && ended $pid 130 && says 't/s' &&
        lines 2 "$work/err" &&
        [ "$(wc -c <"$work/out")" -lt 100000 ]
}
t_interrupt_json() {
    "$sala" run -p Once --ignore-eos -n 30000 --json >"$work/out" 2>"$work/err" &
    pid=$!
    until_true grep -q 'sala' "$work/err" && sleep 0.5 && kill -INT $pid && ended $pid 130 &&
        is_json "$work/out" &&
        prints '"finish_reason": "cancelled"'
}

# ---- chat ----

chat() { printf "$1" | "$sala" chat $2 >"$work/out" 2>"$work/err"; }

# rendered ANSWER: the conversation of the next two tests up to its second answer, as HF renders it.
rendered() {
    printf '<|im_start|>user\nWhat does the cow say?<|im_end|>\n<|im_start|>assistant\n'
    printf '%s<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n' "$1"
}

t_chat() {
    chat 'What does the cow say?\n/stats\nWhat is 3 + 4?\n/stats\n' -q &&
        printf 'It says moo.\n3 + 4 = 7\n' | cmp - "$work/out" &&
        says 'turns: 1; conversation: 22 of 32768' && says 'last turn: 16 tokens read, 6 written' &&
        says 'turns: 2;' || return 1
    # The second turn reads the pending <|im_end|> and what is new; the whole is what HF renders.
    new=$(sed -n 's/^last turn: \([0-9]*\) tokens read.*/\1/p' "$work/err" | tail -n 1)
    whole=$(sed -n 's/^turns: 2; conversation: \([0-9]*\) of.*/\1/p' "$work/err")
    last=$(sed -n 's/^last turn: [0-9]* tokens read, \([0-9]*\) .*/\1/p' "$work/err" | tail -n 1)
    rendered 'It says moo.' >"$work/p"
    exits 0 run -q -f "$work/p" --json && prints '"text": "3 + 4 = 7"' || return 1
    all=$(field prompt_tokens)
    echo "read $new, whole $whole, last answer $last, rendered $all"
    [ "$((whole - last))" -eq "$all" ] && [ "$new" -eq $((all - 22 + 1)) ]
}
t_chat_after_length() { # the answer was cut off: <|im_end|> is supplied
    chat 'What does the cow say?\n/stats\nWhat is 3 + 4?\n/stats\n' '-n 2' &&
        says 'conversation: 18 of' && says 'max-tokens' &&
        [ "$(sed -n 2p "$work/out")" = '3 +' ] || return 1
    rendered 'It says' >"$work/p"
    whole=$(sed -n 's/^turns: 2; conversation: \([0-9]*\) of.*/\1/p' "$work/err")
    exits 0 run -q -f "$work/p" --json -n 2 && [ "$((whole - 2))" -eq "$(field prompt_tokens)" ]
}
t_chat_commands() {
    input='What does the cow say?\n/reset\n/stats\n/system Be kind.\nHi\n/stats\n/frob\n/help\n/quit\nHi\n'
    chat "$input" '-q -n 4' &&
        says 'turns: 0; conversation: 0 of' && says 'unknown command /frob' &&
        says '/system TEXT' && lines 2 "$work/out" || return 1
    read=$(sed -n 's/^last turn: \([0-9]*\) tokens read.*/\1/p' "$work/err")
    exits 0 run -q --chat --system 'Be kind.' -p Hi --json -n 4 &&
        [ "$(field prompt_tokens)" -eq "$read" ]
}
t_chat_lines() {
    chat 'What is\\\n3 + 4?\n\n\n/stats\r\n' '-q -n 1' && lines 1 "$work/out" &&
        says 'turns: 1' || return 1
    read=$(sed -n 's/^last turn: \([0-9]*\) tokens read.*/\1/p' "$work/err")
    exits 0 run -q --chat -p 'What is
3 + 4?' --json -n 1 && [ "$(field prompt_tokens)" -eq "$read" ] || return 1
    chat 'What is 3 + 4?' -q && prints '3 + 4 = 7' # without a newline at the end
}
t_chat_reuse() { # a new conversation goes on from the old one's prefix, and answers the same
    input='What does the cow say?\n/stats\n/reset\nWhat does the cow say?\n/stats\n'
    long=Be$(seq -f 'kind%.0f.' 60 | tr -d '\n')
    chat "$input" "-q -n 9 --system $long" && ! says 'were there already' >/dev/null && return 1
    [ "$(grep -c 'more were there already' "$work/err")" -eq 1 ] &&
        [ "$(sort -u "$work/out" | wc -l)" -eq 1 ] || return 1
    cp "$work/out" "$work/p"
    chat "$input" "-q -n 9 --reuse off --system $long" && cmp "$work/p" "$work/out" &&
        ! says 'were there already' >/dev/null && exits 2 chat --reuse always && says 'prefix off history' &&
        exits 2 chat --reuse-memory 1K && says 'holds no snapshot'
}
t_chat_full() {
    # from a pipe a message that was refused shows in the exit code
    ! chat 'What does the cow say?\nWhat is 3 + 4?\n/reset\nWhat is 3 + 4?\n' '-q --context 40' &&
        says 'the context is full' &&
        says '/reset' && printf 'It says moo.\n3 + 4 = 7\n' | cmp - "$work/out" &&
        chat 'What does the cow say?\n' '--context 20' && says 'stopped after 4 tokens: the context is full (--context)' &&
        chat 'What does the cow say?\n' '-n 4' && says 'stopped after 4 tokens: no more were asked for (--max-tokens)'
}
t_chat_interrupt() {
    mkfifo "$work/in" &&
        { "$sala" chat --ignore-eos -n 30000 <"$work/in" >"$work/out" 2>"$work/err" & } && pid=$!
    exec 4>"$work/in"
    printf 'What does the cow say?\n' >&4
    until_true test -s "$work/out" && kill -INT $pid && printf '/stats\n' >&4 &&
        until_true grep -q 'turns: 1' "$work/err" &&
        printf '/reset\n/stats\n' >&4 && until_true grep -q 'turns: 0' "$work/err" && kill -INT $pid
    ok=$?
    ended $pid 130 || ok=1
    exec 4>&-
    return $ok
}

# ---- info ----

t_info() {
    exits 0 info && prints 'weights .*(16,397,824 bytes)' && prints 'total' &&
        prints 'longest context that fits' &&
        prints 'parameters *8,198,912' && prints 'verify scratch a row .*(8,192 bytes)' && [ ! -s "$work/err" ] && exits 0 info --json &&
        lines 1 "$work/out" && is_json "$work/out" &&
        prints '"fits": true' &&
        [ "$(($(field weight_bytes) + $(field kv_bytes) + $(field state_bytes) + $(field pending_bytes) + \
            $(field scratch_bytes) + $(field reuse_bytes)))" -eq "$(field total_bytes)" ]
}
t_info_does_not_fit() {
    exits 0 info --json --context 1M --memory-limit 10M && is_json "$work/out" &&
        prints '"fits": false' &&
        prints '"context": 1048576' && exits 0 info --context 1M --memory-limit 10M &&
        prints 'does not fit' &&
        exits 1 run --context 1M --memory-limit 10M && says 'memory\|MiB'
}
t_info_check() {
    exits 0 info -q --check && prints 'finite' &&
        exits 0 info -q --check --json --tokens 'a "b" <|im_end|>' && is_json "$work/out" &&
        prints '"weights_finite": true' && prints '"device": "' &&
        prints '{"id": 2046, "text": "<|im_end|>"}' &&
        exits 0 info -q --tokens Once && prints 'Tokens ([0-9]*)'
}

# ---- logits ----

# tokens N FILE: the ids of a text in an order that nobody can guess, N of them, little-endian int32.
tokens() {
    "$sala" info -q --json --tokens 'Once upon a time there was a brave fox named Pip, who lived near the river.' |
        sed 's/.*"tokens"//' | tr '{' '\n' | sed -n 's/^"id": \([0-9]*\),.*/\1/p' |
        awk -v n="$1" '{ id[NR] = $1 } END { for (i = 0; i < n; i++) { t = id[i * 7 % NR + 1]
            printf "\\0%o\\0%o\\0000\\0000", t % 256, int(t / 256) } }' >"$work/octal"
    printf '%b' "$(cat "$work/octal")" >"$2"
}

# close_floats A B LIMIT: as many floats in both, no difference above the limit; prints the largest.
close_floats() {
    for f in "$1" "$2"; do od -An -v -t f4 "$f" | tr -s ' ' '\n' | grep . >"$f.txt"; done
    awk -v limit="$3" -v other="$2.txt" '
        {
            if ((getline b < other) <= 0 || ($1 " " b) ~ /nan|inf/) bad = 1
            d = $1 < b ? b - $1 : $1 - b
            if (d > most) most = d
        }
        END {
            if ((getline b < other) > 0) bad = 1
            print NR " pairs, largest difference " most
            exit bad || most > limit || NR == 0
        }' "$1.txt"
}

t_logits() {
    tokens 300 "$work/t" && [ "$(wc -c <"$work/t")" -eq 1200 ] &&
        exits 0 logits -q --tokens "$work/t" --out "$work/a" --chunk 64 &&
        exits 0 logits -q --tokens "$work/t" --out "$work/b" --chunk 2048 &&
        cmp "$work/a" "$work/b" &&
        [ "$(wc -c <"$work/a")" -eq $((300 * 2048 * 4)) ] &&
        [ "$(ls "$work" | grep -c tmp-)" -eq 0 ] && silent &&
        exits 0 logits -q --tokens "$work/t" --out "$work/s" --mode step &&
        [ "$(wc -c <"$work/s")" -eq $((300 * 2048 * 4)) ] &&
        ! cmp -s "$work/a" "$work/s"
}
t_logits_step_agrees() {
    tokens 120 "$work/t" && exits 0 logits -q --tokens "$work/t" --out "$work/a" --dense-len 0 &&
        exits 0 logits -q --tokens "$work/t" --out "$work/b" --mode step --dense-len 0 &&
        close_floats "$work/a" "$work/b" 0.75
}
t_logits_extras() {
    tokens 100 "$work/t" &&
        exits 0 logits -q --tokens "$work/t" --out "$work/a" --hidden "$work/h" --blocks "$work/b" &&
        [ "$(wc -c <"$work/h")" -eq $((10 * 100 * 256 * 4)) ] && [ "$(wc -c <"$work/b")" -gt 0 ] &&
        exits 0 logits -q --tokens "$work/t" --out "$work/a2" --hidden "$work/h2" --blocks "$work/b2" --chunk 64 &&
        cmp "$work/h" "$work/h2" && cmp "$work/b" "$work/b2"
}
t_logits_bad_input() {
    printf 'abc' >"$work/t" && exits 1 logits --tokens "$work/t" --out "$work/x" &&
        says '3 bytes' && : >"$work/t" &&
        exits 1 logits --tokens "$work/t" --out "$work/x" && printf '\377\377\377\177' >"$work/t" &&
        exits 1 logits -q --tokens "$work/t" --out "$work/x" && says 'vocabulary' &&
        [ ! -e "$work/x" ] &&
        tokens 3 "$work/t" && exits 3 logits -q --tokens "$work/t" --out "$work/none/x" &&
        says 'cannot create' || return 1
    [ ! -c /dev/full ] || { exits 3 logits -q --tokens "$work/t" --out /dev/full &&
        says 'No space' && [ -c /dev/full ]; }
}
t_logits_interrupted() { # no file, whole or partial, is left behind; an older one stays as it was
    tokens 6000 "$work/t" && mkdir -p "$work/d" && echo old >"$work/d/x" || return 1
    for signals in 1 2; do
        "$sala" logits -q --tokens "$work/t" --out "$work/d/x" --mode step >"$work/out" 2>"$work/err" &
        pid=$!
        until_true sh -c "ls '$work/d' | grep -q tmp-" && kill -INT $pid || return 1
        [ $signals -eq 1 ] || kill -INT $pid 2>/dev/null
        ended $pid 130 && [ "$(ls "$work/d")" = x ] && [ "$(cat "$work/d/x")" = old ] || return 1
    done
}

# ---- eval ----

pick() { grep -E "\"task\": \"($1)\"" $tiny/eval_tasks.jsonl; }

t_eval() {
    exits 0 eval -q --tasks $tiny/eval_tasks.jsonl --only math &&
        prints '^math  *8  100.0%  100.0%  100.0%  *0' &&
        prints '^all  *8 ' &&
        exits 0 eval -q --tasks $tiny/eval_tasks.jsonl --only fact --limit 3 --json &&
        is_json "$work/out" &&
        prints '"fact": {"n": 3, "score": 1, "exact": 1, "ended": 1, "loops": 0,' &&
        prints '"ori": 100.0000, "overall": 100.00'
}
t_eval_rules() { # the model answers "It says moo."
    q='"question": "What does the cow say?"'
    {
        printf '{"task":"niah",%s,"gold":["baa","MOO"]}\n\n' "$q"
        printf '{"task":"cwe",%s,"gold":["moo","baa"]}\n' "$q"
        printf '{"task":"own",%s,"gold":"it SAYS","target":"It says moo","x":[1]}\n' "$q"
        printf '{"task":"mcq",%s,"gold":"A"}' "$q"
    } >"$work/t.jsonl"
    exits 0 eval -q --tasks "$work/t.jsonl" --json && is_json "$work/out" &&
        prints '"niah": {"n": 1, "score": 1, "exact": null' &&
        prints '"cwe": {"n": 1, "score": 0.5,' &&
        prints '"own": {"n": 1, "score": 1, "exact": 0,' &&
        prints '"mcq": {"n": 1, "score": 0,' && prints '"all": {"n": 4, "score": 0.625,' &&
        prints '"ori": 62.5000, "overall": 78.12\|78.13'
}
t_eval_same_in_parallel() {
    pick 'math|fact' >"$work/t.jsonl"
    exits 0 eval -q --tasks "$work/t.jsonl" --parallel 1 --out "$work/1" &&
        exits 0 eval -q --tasks "$work/t.jsonl" --out "$work/8" &&
        lines 17 "$work/8" && sort "$work/1" >"$work/1s" && sort "$work/8" | cmp - "$work/1s"
}
t_eval_bad_tasks() {
    : >"$work/t.jsonl" && exits 1 eval -q --tasks "$work/t.jsonl" && says 'no questions' &&
        printf '{"task": "a", "question": "b", "gold": "c"}\n{oops\n' >"$work/t.jsonl" &&
        exits 1 eval -q --tasks "$work/t.jsonl" &&
        says 't.jsonl:2: not valid JSON at byte 1' &&
        echo '{"task": "a", "gold": "c"}' >"$work/t.jsonl" &&
        exits 1 eval -q --tasks "$work/t.jsonl" && says 't.jsonl:1: needs task' && silent &&
        exits 1 eval -q --tasks $tiny/eval_tasks.jsonl --only needle --context 512 &&
        says 'do not fit the context'
}
t_eval_resume() {
    pick 'math|fact|json|freq|common|copy|reverse|count' >"$work/t.jsonl"
    count=$(wc -l <"$work/t.jsonl")
    "$sala" eval -q --tasks "$work/t.jsonl" --out "$work/r" --parallel 1 >"$work/out" 2>"$work/err" &
    pid=$!
    until_true sh -c "[ -s '$work/r' ] && [ \$(wc -l <'$work/r') -ge 2 ]" && kill -INT $pid &&
        ended $pid 130 && silent &&
        says 'interrupted with [0-9]* of' || return 1
    have=$(wc -l <"$work/r")
    [ "$have" -lt "$count" ] && printf '{"index": 99, "key": "0' >>"$work/r" &&
        exits 0 eval -q --tasks "$work/t.jsonl" --out "$work/r" --json && is_json "$work/out" &&
        lines "$count" "$work/r" &&
        prints "\"resumed\": $have," && cp "$work/r" "$work/r1" &&
        exits 0 eval -q --tasks "$work/t.jsonl" --out "$work/r" --json &&
        prints "\"resumed\": $count," && cmp "$work/r" "$work/r1" &&
        exits 0 eval -q --tasks "$work/t.jsonl" --json --parallel 1 &&
        prints '"resumed": 0,' || return 1
    while read -r line; do printf '%s\n' "$line" >"$work/line" &&
        is_json "$work/line" || return 1; done <"$work/r"
}
t_eval_refuses_others() {
    pick math >"$work/t.jsonl" &&
        exits 0 eval -q --tasks "$work/t.jsonl" --out "$work/r" --limit 2 &&
        cp "$work/r" "$work/r1" &&
        exits 1 eval -q --tasks "$work/t.jsonl" --out "$work/r" -n 9 &&
        says 'r:1: a result of another model' &&
        pick fact >"$work/t.jsonl" && exits 1 eval -q --tasks "$work/t.jsonl" --out "$work/r" &&
        says 'another file' &&
        cmp "$work/r" "$work/r1" &&
        exits 3 eval -q --tasks "$work/t.jsonl" --out "$work/none/r" --limit 1 &&
        says 'cannot write' ||
        return 1
    [ ! -c /dev/full ] || { exits 3 eval -q --tasks "$work/t.jsonl" --out /dev/full --limit 1 &&
        says 'No space'; }
}
t_perplexity() {
    "$sala" run -q -n 200 --ignore-eos >"$work/p" && exits 0 eval -q --ppl "$work/p" --json &&
        is_json "$work/out" &&
        n=$(field tokens) && [ "$(field windows)" -eq 1 ] &&
        [ "$(field bytes)" -eq "$(wc -c <"$work/p")" ] &&
        awk -v x="$(field nats_per_token)" 'BEGIN { exit !(x > 0.02 && x < 2) }' && a=$(field nats_per_token) &&
        exits 0 eval -q --ppl "$work/p" --json --chunk 64 && [ "$(field nats_per_token)" = "$a" ] &&
        exits 0 eval -q --ppl "$work/p" --window 100 --json && [ "$(field tokens)" -eq "$n" ] &&
        [ "$(field windows)" -eq $(((n + 98) / 99)) ] && exits 0 eval -q --ppl "$work/p" &&
        prints '^bits per byte' &&
        exits 0 eval -q --ppl "$work/p" --window 100 --json --out "$work/w" &&
        lines $(((n + 98) / 99)) "$work/w" && awk -v all="$(field nats_per_token)" -v n="$n" -F '[:,}]' '
            { tokens += $4; nats += $6 } # of every window
            END { exit !(tokens == n && nats / n - all < 1e-6 && all - nats / n < 1e-6) }' "$work/w" &&
        exits 3 eval -q --ppl "$work/p" --out "$work/none/w" &&
        : >"$work/p" && exits 1 eval -q --ppl "$work/p" && says 'too short'
}

# Two result files of 100 questions, of which the second has ten wrong: an exact answer, by hand.
t_compare_eval() {
    command -v python3 >/dev/null 2>&1 || { echo "skipped: no python3" && return 0; }
    for set in a b; do
        i=0
        while [ $i -lt 100 ]; do
            score=1
            [ $set = a ] || [ $((i % 10)) -ne 3 ] || score=0
            echo "{\"index\": $i, \"task\": \"t$((i % 2))\", \"score\": $score, \"exact\": false, \"loop\": false," \
                "\"finish_reason\": \"stop\", \"tokens\": 3, \"answer\": \"$score\"}"
            i=$((i + 1))
        done >"$work/$set.answers.jsonl"
        echo "{\"window\": 0, \"tokens\": 10, \"nats\": $([ $set = a ] && echo 10 || echo 11)}" \
            >"$work/$set.text.jsonl"
    done
    python3 tools/compare_eval.py "$work" a b --json "$work/j" >"$work/out" &&
        prints '^| a | 100.00 % |' && prints '^| b | 90.00 % | -10.00 (-1[0-9.]* .. -[0-9.]*) | 90.00 % | 10, 0, 0.002 |' &&
        prints '| 3.0042 | 1.1052 (1.1052 .. 1.1052) |' && prints '^| t0 | 50 | 100.0 | 100.0 |' &&
        prints '^| t1 | 50 | 100.0 | 80.0 |' && grep -q '"kept": 0.9,' "$work/j" &&
        sed -i 1d "$work/b.answers.jsonl" && ! python3 tools/compare_eval.py "$work" a b 2>"$work/err" &&
        says 'same questions'
}
# A model beside itself, beside one with another weight, and beside another geometry.
t_compare_models() {
    exits 0 info -q --check --against $tiny && prints 'layer 7 *1.000000 *1.000000' &&
        prints 'KL divergence 0.000000' && prints '100.00 % of the' &&
        cp -r $tiny "$work/other" && size=$(wc -c <"$work/other/model.safetensors") &&
        printf '\075' | dd of="$work/other/model.safetensors" bs=1 seek=$((size - 1001)) conv=notrunc 2>/dev/null &&
        head -c 3000 $tiny/eval_tasks.jsonl >"$work/text" &&
        exits 0 info -q -m "$work/other" --check --against $tiny --text "$work/text" --json && is_json "$work/out" &&
        prints '"after": "embedding", "cosine": 1.0' && ! prints '"kl": 0.00000000' >/dev/null &&
        sed 's/"intermediate_size": *[0-9]*/"intermediate_size": 512/' $tiny/config.json >"$work/config.json" &&
        exits 1 info -q --synthetic -m $tiny/config.json --check --against "$work/config.json" &&
        says 'another geometry, MLP width: 512, but 768' &&
        exits 1 info -q --check --against "$work/none" && says "$work/none" && : >"$work/empty" &&
        exits 1 info -q --check --against $tiny --text "$work/empty" && says 'nothing to compare'
}
t_bench_gemm() {
    exits 0 bench -q --gemm --json --no-roofline --repeat 1 && is_json "$work/out" &&
        prints '"product": "gate up, SwiGLU", "format": "BF16", "n": 1536, "k": 256, "layers": 8, "bytes": 786432, .*"rows": 512' &&
        prints '"product": "head", "format": "BF16", "n": 2048' &&
        prints '"layers": \[' && prints '"rows": 512, "form": "verify", "bytes": [0-9]*, "us": '
}

# ---- drafts ----

markup='<li class="red">bell</li> <li class="red">duck</li> <li class="red">silk</li> <li class="red">boat</li>'

t_spec_same_text() {
    exits 0 run -p "$markup" -n 60 --spec off && cp "$work/out" "$work/plain" && says 'drafts off' &&
        ! grep -q 'tokens a step' "$work/err" || return 1
    for kind in auto ngram; do
        exits 0 run -p "$markup" -n 60 --spec $kind && cmp "$work/out" "$work/plain" &&
            says "drafts $kind: n-gram chains" || return 1
    done
    says 'tokens a step (n-grams [0-9]* % of the steps: [0-9.]* tokens, [0-9]* % right)' &&
        exits 0 run -n 20 && ! grep -q 'tokens a step' "$work/err" &&
        printf 'one 1, two 2\nagain\n' | "$sala" chat -q --spec off >"$work/out" &&
        printf 'one 1, two 2\nagain\n' | "$sala" chat -q --spec ngram | cmp - "$work/out"
}
t_spec_json() {
    exits 0 run -q -p "$markup" -n 60 --spec ngram --json && is_json "$work/out" &&
        prints '"speculation": {"spec": "ngram", "tokens_per_step": [1-9]' &&
        prints '"plain": {"steps": [0-9]*, "tokens": [0-9]*}' && ! prints '"eagle"' >/dev/null &&
        prints '"ngram": {"steps": [1-9][0-9]*, "tokens": [1-9][0-9]*, "offered": \[[1-9][0-9, ]*[1-9][0-9]*\], "accepted"' &&
        exits 0 info --json && is_json "$work/out" && prints '"spec": "auto: n-gram chains; no draft head was named"' &&
        exits 0 info --spec off && prints '^drafts  *off'
}
t_spec_settings() {
    exits 2 run --spec on && says 'spec is "on"; it must be one of: auto off ngram eagle' &&
        exits 2 run --spec-tree 7,2 && says 'depth,topk,nodes like 7,2,15' &&
        exits 2 run --draft-window 100 && says 'a multiple of 64' &&
        exits 2 eval --draft '' && says 'draft is ""; it must be a folder' &&
        exits 2 run --spec eagle && says 'spec eagle needs a draft head: name its folder with --draft' && silent &&
        exits 2 info --spec eagle && says 'needs a draft head' && silent &&
        exits 0 info --spec-tree 5,2,11 && says 'none was named' && exits 2 run --spec-tree 3,1,9 && says 'hold no more than 4' &&
        exits 1 run --draft "$work/none" && says "$work/none: no such folder" && silent &&
        exits 0 run -q -n 1 --draft "$work/none" --spec off && says 'warning: --spec off leaves the draft head'
}
t_show_tree() {
    exits 0 run -q -p "$markup" -n 60 --spec ngram && cp "$work/out" "$work/plain" &&
        exits 0 run -q -p "$markup" -n 60 --spec ngram --show-tree && cmp "$work/out" "$work/plain" &&
        head -n 1 "$work/err" | grep -q '^Steps behind the first token: .* (+ right, - wrong)' &&
        says '^step [0-9]* at [0-9]*: n-gram chain of [0-9]* nodes, [0-9]* right, [0-9]* tokens; so far [0-9.]* a step$' &&
        says '^steps 1 to [0-9]*: no draft (nothing like it before)$' &&
        says ' +"' && says '^ ="' && ! grep -q "$(printf '\033')" "$work/err" &&
        [ "$(grep -c '^step .*: n' "$work/err")" -eq "$(grep -c ' ="' "$work/err")" ] &&
        exits 0 run -q -n 20 --spec off --show-tree && says '^steps 1 to 19: no draft (off)$' && lines 2 "$work/err" &&
        eval "$("$sala" help run | sed -n "s/^  sala \(run .*--show-tree\)$/exits 0 \1/p")" && says ': n-gram chain of [0-9]* nodes, [2-9]'
}
# A head of random numbers, as the README makes one: it changes no text, and auto leaves it.
t_spec_head() {
    make_models=${MAKE_MODELS:-build/make_models}
    [ -x "$make_models" ] || { echo "make $make_models first" && return 1; }
    make_head() { "$make_models" "$1" "$work/head" bf16 target=$tiny/config.json >"$work/out" 2>"$work/err"; }
    make_head bench/configs/eagle3-tiny.json && prints '15 tensors of bf16' &&
        ! make_head bench/configs/eagle3-tiny.json && says 'head: is there already: remove it' &&
        ! make_head "$work/none" && says "^cannot make a model: $work/none: cannot open" &&
        exits 0 run -q -n 200 --spec off && cp "$work/out" "$work/plain" &&
        exits 0 run -q -n 200 --spec eagle --draft "$work/head" && cmp "$work/out" "$work/plain" &&
        exits 0 run -n 200 --draft "$work/head" && cmp "$work/out" "$work/plain" &&
        says '^sala: the draft head does not pay: a tree gave [12][.][0-9]* tokens (mean of [0-9]*) in the time of [0-9.]*; it' &&
        [ "$(grep -c 'does not pay' "$work/err")" -eq 1 ] &&
        exits 0 run -q -n 12 --spec eagle --draft "$work/head" --show-tree && says '^step 1 at 16: tree of 15 nodes, ' &&
        says ': tree of [1-9][0-9]* nodes (few tokens are left), ' && says '^step [0-9]*: no draft (the last token)$' &&
        exits 0 run -q -n 12 --draft "$work/head" --json && is_json "$work/out" && prints '"tree": "by load", ' &&
        exits 0 info --draft "$work/head" && prints '^draft head  *1.4 M parameters, BF16, layers 1 3 4'
}
# The committed head guesses well, in both formats, and changes no text; auto on a CPU takes it where it pays.
t_spec_trained() {
    set -- run -p 'One day, Tom' -n 120
    exits 0 "$@" -q --spec off && cp "$work/out" "$work/plain" || return 1
    for head in $tiny-eagle3 $tiny-eagle3/nvfp4; do
        exits 0 "$@" --spec eagle --draft $head && cmp "$work/out" "$work/plain" &&
            says '[2-8][.][0-9]* tokens a step (trees [1-9][0-9]* % of the steps' &&
            exits 0 "$@" -q --draft $head && cmp "$work/out" "$work/plain" || return 1
    done
    exits 0 info --draft $tiny-eagle3/nvfp4 && prints '^draft head  *1.4 M parameters, NVFP4, layers 1 6 7'
}
t_bench_spec() {
    grep -e json -e code tests/data/spec_prompts.jsonl >"$work/prompts" &&
        exits 0 bench -q --spec all --prompts "$work/prompts" --gen-tokens 40 --repeat 1 &&
        prints '^json  *1 ngram' && prints '^code  *1 off  *1.00   0%' && ! prints 'wanted' >/dev/null &&
        exits 0 bench -q --spec all --prompts "$work/prompts" --gen-tokens 20 --repeat 1 --json && is_json "$work/out" &&
        prints '"class": "code", "sequences": 1, [^{]*"speculation": {"spec": "auto"' &&
        exits 1 bench -q --spec all --prompts "$work/prompts" --gen-tokens 3 --repeat 1 --goals &&
        prints 'MISSED .* json: [0-9.]* (wanted: at least 4)' &&
        exits 0 bench -q --spec ngram --no-roofline --repeat 1 && prints '^drafts   ngram: .* tokens a step' &&
        exits 0 bench -q --spec ngram --no-roofline --repeat 1 --json && is_json "$work/out" && prints '"speculation": {"spec": "ngram"' &&
        exits 2 bench --prompts "$work/prompts" && says 'go with --spec all' && exits 2 bench --synthetic && says 'must be a config.json' &&
        [ "$("$sala" help bench | grep -c -e '^ *--spec ')" -eq 1 ] &&
        exits 0 bench -q --spec all --synthetic -m $tiny/config.json --prompt-tokens 70 --gen-tokens 48 --repeat 1 \
            --parallel 4 &&
        prints 'eagle oracle 7,2,15  *[5678]' && prints 'eagle random 7,2,15  *1\.' && prints '^1  *4 eagle oracle:60 5,2,11' &&
        exits 2 bench --spec none && says 'auto off ngram eagle all$' &&
        exits 1 bench -q --spec all --prompts "$work/none" && says "$work/none" &&
        echo '{"class": "x"}' >"$work/prompts" && exits 1 bench -q --spec all --prompts "$work/prompts" &&
        says 'prompts:1: lacks class or prompt'
}
t_bench_spec_faults() { # nothing is left out silently, and what a file says cannot break the report
    for word in --gemm "--tokenize README.md" --sampled; do
        exits 2 bench --spec all $word && says '--spec all goes neither with' || return 1
    done
    : >"$work/prompts" && exits 1 bench -q --spec all --prompts "$work/prompts" --json && says 'no prompt is in it' && silent &&
        for i in $(seq 22); do echo "{\"class\": \"c$i\", \"prompt\": \"a\"}"; done >"$work/prompts" &&
        exits 1 bench -q --spec all --prompts "$work/prompts" --gen-tokens 2 --repeat 1 && says 'more than 21 classes' &&
        printf '%s\n' '{"class": "a\"\u001b[1m\\", "prompt": "Once"}' >"$work/prompts" &&
        exits 0 bench -q --spec all --prompts "$work/prompts" --gen-tokens 2 --repeat 1 && prints '^a"?\[1m' &&
        exits 0 bench -q --spec all --prompts "$work/prompts" --gen-tokens 1 --repeat 1 --json && is_json "$work/out"
}

# ---- sessions ----

t_session_run() { # interrupted anywhere, it goes on as if nothing had happened
    ask="-q -p Once --ignore-eos -n 1500 --temp 0.9 --seed 4"
    exits 0 run $ask --save "$work/w" && cp "$work/out" "$work/whole" || return 1
    { "$sala" run $ask --save "$work/s" >"$work/one" 2>"$work/err" & } && pid=$!
    until_true test -s "$work/one" && kill -INT $pid && ended $pid 130 && [ -s "$work/s" ] &&
        exits 0 run -q --load "$work/s" --save "$work/t" && cat "$work/one" "$work/out" | cmp - "$work/whole" &&
        exits 2 run -q --load "$work/s" -p and && says 'give no prompt, and it goes on' &&
        exits 2 run -q --load "$work/s" --stop . -n 7 && says 's was saved in the middle .*: give no --max-tokens' &&
        exits 2 run -q --load "$work/s" --show-tree && says 'give no --show-tree' && silent &&
        for context in 64 900; do
            exits 1 run -q --load "$work/s" --context $context && silent &&
            says "s: needs 150[0-9] tokens, more than the context of $context: raise --context" || return 1
        done
    exits 3 run -q -n 2 --save /dev/full && says '/dev/full: cannot be saved there: not a regular file' &&
        exits 3 run -q -n 2 --save "$work/none/s" && says 'none/s.: cannot be saved there: No such file' && silent &&
        exits 3 run -q -n 2 --save '' && exits 3 chat -q --session "$work" && says 'not a regular file' &&
        exits 0 run -q --load "$work/t" -n 5 --json && is_json "$work/out" && [ "$(field prompt_tokens)" -eq 1 ] &&
        exits 0 run -q --load "$work/t" -p ' and' -n 5 && exits 2 run --load "$work/t" --chat && says 'sala chat' &&
        exits 1 run --load "$work/none" && says 'cannot open: No such file' && ls "$work" | (! grep part-) &&
        exits 1 run --load README.md && says 'README.md: not a session' && exits 1 run --load "$work/t" --dense-len 128 &&
        says 'made with dense-len'
}
t_session_join() { # a finished text goes on with its space, and nothing is added to pieces; else a text ends its line
    exits 0 run -q -p 'Once upon a time' -n 6 && cp "$work/out" "$work/whole" && [ -z "$(tail -c 1 "$work/out")" ] &&
        "$sala" run -p 'Once upon a time' -n 3 --save "$work/s" >"$work/both" 2>&1 && grep -q '^sala: prompt' "$work/both" &&
        exits 0 run -q -p 'Once upon a time' -n 3 --save "$work/s" && mv "$work/out" "$work/one" &&
        exits 0 run -q --load "$work/s" -n 3 && cat "$work/one" "$work/out" | cmp - "$work/whole"
}
t_session_place() { # where nothing can be saved is known before anything is made
    exits 3 run -n 2 --save /dev/full && says '/dev/full: cannot be saved there: not a regular file' && silent &&
        exits 3 run -n 2 --save "$work/none/s" && says 'none/s.: cannot be saved there: No such file' && lines 1 "$work/err" &&
        exits 3 chat --session "$work/none/s" && says 'cannot be saved there' && exits 3 chat --session "$work" && silent &&
        exits 3 run --save "$work/out/s" && says 'cannot be saved there' && (cd "$work" && "$OLDPWD/$sala" run -m "$OLDPWD/$tiny" -q -n 1 --save s) &&
        [ -s "$work/s" ]
}
t_session_chat() { # saved and taken up again, a conversation is one
    printf 'What does the cow say?\nWhat is 3 + 4?\n/stats\n' | "$sala" chat -q >"$work/whole" 2>"$work/stats" || return 1
    chat 'What does the cow say?\n' "--session $work/s" && mv "$work/out" "$work/one" && [ -s "$work/s" ] &&
        says "The conversation of 22 tokens is in $work/s" && cp "$work/s" "$work/s1" &&
        chat 'What is 3 + 4?\n/stats\n' "--session $work/s" && says 'A conversation of 22 tokens goes on. Its end:' &&
        says '^> What does the cow say?$' && says '^It says moo.$' &&
        cat "$work/one" "$work/out" | cmp - "$work/whole" &&
        [ "$(grep -o 'conversation: [0-9]*' "$work/stats")" = "$(grep -o 'conversation: [0-9]*' "$work/err")" ] &&
        exits 0 chat -q --session "$work/new" && [ ! -e "$work/new" ] && cp "$work/s" "$work/bad" && echo x >>"$work/bad" &&
        cp "$work/bad" "$work/same" && exits 1 chat -q --session "$work/bad" && says 'cut short or altered' &&
        cmp "$work/bad" "$work/same" && chat '/stats\n/quit\n' "-q --session $work/s --system Other" && [ -s "$work/s" ] &&
        says 'warning: the conversation in .* has begun without this --system' && says 'all of them from the file'
}
t_session_chat_files() { # only a conversation goes on; what was forgotten is gone from the file; /save saves now
    exits 0 run -q -n 4 --save "$work/raw" && cp "$work/raw" "$work/same" && exits 1 chat -q --session "$work/raw" &&
        says 'raw is no conversation, as it has no turns: sala run --load' && cmp "$work/raw" "$work/same" &&
        chat 'What does the cow say?\n/save\n/save '"$work/a"'\n' "-q" && says '/save needs a file' && [ -s "$work/a" ] &&
        chat 'What is 3 + 4?\n/save\n/reset\n/quit\n' "--session $work/a" && says 'The conversation of [34][0-9] tokens is in' &&
        says 'a is removed' && [ ! -e "$work/a" ] && chat '/reset\nWhat is 3 + 4?\n' "-q --session $work/a" && [ -s "$work/a" ]
}
t_session_hangup() { # the terminal is closed: the conversation is saved
    awk '/^SigIgn/ { exit $2 ~ /[13579bdf]$/ }' /proc/self/status || { echo "skipped: hangups are ignored" && return 0; }
    mkfifo "$work/in" && { "$sala" chat -q --session "$work/s" <"$work/in" >"$work/out" 2>"$work/err" & } && pid=$!
    exec 4>"$work/in"
    printf 'What does the cow say?\n' >&4
    until_true test -s "$work/out" && kill -HUP $pid
    ok=$?
    ended $pid 129 || ok=1
    exec 4>&-
    [ $ok -eq 0 ] && [ -s "$work/s" ] && chat '/stats\n' "-q --session $work/s" && says 'conversation: [12][0-9] of'
}
t_session_terminal() { # what loads and saves leaves no progress behind
    command -v script >/dev/null && chat 'What does the cow say?\n' "-q --session $work/s" || return 0
    echo /quit | timeout 20 script -qec "$sala chat --session $work/s" "$work/tty" >/dev/null &&
        tr '\r' '\n' <"$work/tty" | grep -q '^A conversation' && tr '\r' '\n' <"$work/tty" | grep -q '^The conversation'
}

# ---- dump-features ----

t_dump() {
    printf '%s\n' '{"text": "Once upon a time."}' '' '{"prompt": "The bear said:", "answer": " yes"}' \
        '{"tokens": [5, 6], "loss_mask": [0, 0]}' >"$work/d" &&
        exits 0 dump-features -q --data "$work/d" --out "$work/f" --json && is_json "$work/out" && lines 0 "$work/err" &&
        prints '"shards": 1, "resumed": 0, "samples": 2, ' && prints '"skipped": 1, ' &&
        [ "$(field bytes)" -eq "$(wc -c <"$work/f/features-00000.safetensors")" ] &&
        exits 0 dump-features --data "$work/d" --out "$work/f" && silent && says '2 samples (1 without loss left out) of .* in 1 shards (1 were there)' &&
        exits 1 dump-features -q --data "$work/d" --out "$work/f" --layers 1,2,3 && silent &&
        says 'was made with "layers": "1,3,4", this run has "layers": "1,2,3": give' &&
        exits 1 dump-features -q --data "$work/d" --out "$work/f" --limit 1 && says 'with "limit": "0", this run has "limit": "1"' &&
        exits 1 dump-features -q --data "$work/d" --out "$work/f" --dense-len 0 && says '"dense_len": "512"' &&
        head -n 1 "$work/d" >"$work/e" && exits 1 dump-features -q --data "$work/e" --out "$work/f" && says 'with "data"' &&
        cp -r $tiny "$work/tiny" && sed -i 's/"eos_token_id": 2046/"eos_token_id": 2/; s/"rope_theta": 10000.0/"rope_theta": 10001.0/' \
            "$work/tiny/config.json" && exits 1 dump-features -q -m "$work/tiny" --data "$work/d" --out "$work/f" &&
        says 'with "fingerprint"' &&
        head -c 9000 "$work/f/features-00000.safetensors" >"$work/cut" && cp "$work/cut" "$work/f/features-00000.safetensors" &&
        exits 1 dump-features -q --data "$work/d" --out "$work/f" && says 'is damaged' &&
        mv "$work/f/features-00000.safetensors" "$work/f/features-00001.safetensors" &&
        exits 1 dump-features -q --data "$work/d" --out "$work/f" && says 'features-00000 is missing'
}
t_dump_usage() {
    exits 2 dump-features --data x && says 'needs --data FILE and --out DIR' && exits 2 dump-features --out x &&
        exits 2 dump-features --data x --out x --layers 3,2,1 && says 'three rising layers' &&
        exits 2 dump-features --data x --out x --layers 1,2,3x && exits 2 dump-features --data x --out x --seed 1 &&
        says 'seed belongs to --regenerate' && exits 2 dump-features --data x --out x --limit 0 &&
        exits 2 dump-features --data x --out x --regenerate --temperature -1 && silent &&
        exits 1 dump-features -q --data "$work/none" --out "$work/f" && says "$work/none: cannot open" &&
        echo '{"text": "a"}' >"$work/d" && exits 2 dump-features -q --data "$work/d" --out "$work/f" --layers 1,2,8 &&
        says 'three rising ones of the 8' &&
        exits 2 dump-features -q --data "$work/d" --out "$work/f" --max-tokens 50 --context 50 && says 'context of 51' &&
        exits 3 dump-features -q --data "$work/d" --out "$work/none/f" && says 'cannot make the folder' &&
        exits 3 dump-features -q --data "$work/d" --out "$work/d" && says 'cannot open' && silent &&
        echo '{"tokens": [5, 6], "loss_mask": [0, 0]}' >"$work/d" && exits 1 dump-features -q --data "$work/d" --out "$work/f" --json &&
        silent && says "$work/d: no token of its samples is under loss" && lines 1 "$work/err"
}
t_dump_hostile() { # each line is refused by its number, before anything is written
    n=0
    while read -r line; do
        n=$((n + 1))
        printf '{"text": "fine"}\n\n%s\n' "${line%%@*}" >"$work/d"
        exits 1 dump-features -q --data "$work/d" --out "$work/f" ${line##*@} && silent &&
            says "sala: $work/d:3: " && [ ! -e "$work/f" ] || { echo "line $n: $line"; return 1; }
    done <<'END'
{"text": "broken@
{"text": ""}@
{"text": 5}@
{"text": "a", "tokens": [1]}@
{"answer": "a"}@
[1, 2]@
{"tokens": []}@
{"tokens": [1, 2, 2048]}@
{"tokens": [1, -1]}@
{"tokens": [1, 1.5]}@
{"tokens": [1, "2"]}@
{"tokens": [1, 2], "loss_mask": [1]}@
{"tokens": [1, 2], "loss_mask": 1}@
{"tokens": [1, 2], "loss_mask": [1, 2]}@
{"tokens": [1, 2], "loss_mask": [1, "1"]}@
{"prompt": "a"}@
{"prompt": "a", "answer": 1}@
{"messages": []}@
{"messages": {"role": "user"}}@
{"messages": ["user"]}@
{"messages": [{"role": "user", "content": "a"}]}@
{"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}@
{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}@
END
    printf '{"text": "%s"}\n' "$(seq -s ' ' 99)" >"$work/d" && exits 1 dump-features -q --data "$work/d" --out "$work/f" --context 64 &&
        says 'd:1: [0-9]* tokens do not fit the context of 64' &&
        exits 0 dump-features -q --data "$work/d" --out "$work/f" --max-tokens 64 --json && prints '"tokens": 64,' &&
        echo '{"messages": [{"role": "assistant", "content": "a"}]}' >"$work/d" &&
        exits 1 dump-features -q --data "$work/d" --out "$work/g" --regenerate && says 'd:1: .*behind a question' &&
        echo '{"prompt": "a b c d"}' >"$work/d" &&
        exits 1 dump-features -q --data "$work/d" --out "$work/g" --regenerate --context 64 && says 'an answer of 1024 do not fit' &&
        exits 0 dump-features -q --data "$work/d" --out "$work/g" --regenerate --max-tokens 20 --json && prints '"tokens": 20,' &&
        : >"$work/d" && exits 1 dump-features -q --data "$work/d" --out "$work/g" && says 'there is no sample'
}
t_dump_interrupted() { # whole shards stay, and a full disk is one error
    for i in $(seq 300); do echo '{"text": "Once upon a time there was a brave fox named Pip. '"$i"'"}'; done >"$work/d"
    "$sala" dump-features -q --data "$work/d" --out "$work/f" --shard-tokens 200 >"$work/out" 2>"$work/err" &
    pid=$!
    for _ in $(seq 2000); do [ -e "$work/f/features-00001.safetensors" ] && break || sleep 0.01; done
    kill -INT $pid && ended $pid 130 && silent &&
        says 'interrupted with [0-9]* whole shards' && [ -z "$(ls "$work/f" | grep -v '^features-[0-9]*[.]safetensors$')" ] &&
        exits 0 dump-features -q --data "$work/d" --out "$work/f" --shard-tokens 200 --json && prints '"samples": 300, ' &&
        ! prints '"resumed": 0, ' >/dev/null || return 1
    (trap '' XFSZ && ulimit -f 20 && exec "$sala" dump-features -q --data "$work/d" --out "$work/g") >"$work/out" 2>"$work/err"
    [ $? -eq 3 ] && silent && says 'g/features-00000.safetensors: cannot write: ' && lines 1 "$work/err" && [ -z "$(ls "$work/g")" ]
}

# ---- the SOAR benchmark, speed by context ----

soar_counts() { # lines of so many prompt tokens; of seven Python's seed 1 sends the fourth first, the second last
    for i in ${*:-10 11 12 1300 14 15 16}; do echo "{\"prompt_tokens\": $i, \"completion_tokens\": 8}"; done
}
soar_words() {
    printf '%s\n' '{"question": "Once upon a time", "model_response": "there was a fox."}' '' \
        '{"question": "", "prompt": "The cow says: moo, moo, moo,", "model_response": "moo, moo, moo, moo."}' \
        '{"input": "<li>bell</li> <li>duck</li> <li>", "model_response": "silk</li>"}'
}
synthetic_soar() { exits 0 bench -q --synthetic -m $tiny/config.json --soar "$work/set" "$@"; }
t_bench_soar() { # two rows at every level, drafts beside, the same requests in both forms of the report
    soar_words >"$work/set"
    exits 0 bench -q --soar "$work/set" --natural-tokens 6 --spec all --concurrency 2,max &&
        prints '^3 requests, 0 left out' && [ "$(grep -c '^S2 .* forced  *off\|^Smax .* natural  *auto' "$work/out")" -eq 2 ] &&
        [ "$(grep -c '^S[2m].* off ' "$work/out")" -eq 4 ] && [ "$(grep -c '^S[2m].* auto ' "$work/out")" -eq 4 ] &&
        prints '^drafts at Smax: [0-9.]* times as fast on natural answers, [0-9.]* on forced lengths$' &&
        ! grep -q 'score' "$work/out" &&
        exits 0 bench -q --soar "$work/set" --natural-tokens 6 --concurrency 0 --json && is_json "$work/out" &&
        prints '"concurrency": 0, "row": "natural", ' && prints '"concurrency": 0, "row": "forced", ' &&
        prints '"gains": \[\], "accuracy": null, "score": null' &&
        echo '{"question": "What does the cow say?", "model_response": "The cow says moo, and moo, and moo."}' >"$work/set" &&
        exits 0 bench -q --soar "$work/set" --concurrency 1 --json &&
        prints '"prompt_tokens": 8, "output_tokens": 1[0-9], "reused_tokens": 0, "ended": 0.*"prompt_tokens": 16, "output_tokens": 6, "reused_tokens": 0, "ended": 1'
}
t_bench_soar_order() { # the order and the pruning of the toolkit; long prompts do not stop who generates
    soar_counts >"$work/set" && synthetic_soar --num-prompts 1 --concurrency 1 --json && is_json "$work/out" &&
        prints '"row": "forced", "seconds": [0-9.]*, "prompt_tokens": 1300, "output_tokens": 8' &&
        ! prints '"natural",' >/dev/null &&
        { soar_counts 1 9 && echo '{"prompt_tokens": 9, "completion_tokens": 1}'; } >"$work/set" &&
        synthetic_soar --concurrency 3 --json && prints '"requests": 1, "left_out": 2' && prints '"prompt_tokens": 9' &&
        for i in 1 2; do echo '{"question": "'"$(seq -s ' ' 90)"' '$i'?", "model_response": "a b c"}'; done >"$work/set2" &&
        exits 0 bench -q --soar "$work/set2" --reuse prefix --concurrency 1 && prints '^ *[1-9][0-9]* of [0-9]* prompt tokens were there already' &&
        exits 0 bench -q --soar "$work/set2" --reuse prefix --concurrency 1 --json && prints '"reused_tokens": [1-9]' &&
        soar_counts 10 1300 12 13 140 15 16 | sed 's/140, "completion_tokens": 8/14, "completion_tokens": 30/' >"$work/set" &&
        synthetic_soar --concurrency 2 --json && prints '"prompt_tokens": 1380' &&
        prints '"longest_wait_steps": 1, "prompt_tokens_beside": 512,'
}
t_bench_soar_drafts() { # by order, and none is praised for forced lengths alone
    trees() { # by the clock: on a busy machine they may look as if they did not pay
        synthetic_soar --num-prompts 3 --concurrency 3 --spec all --spec-test oracle:80 &&
            prints 'trees .* of the steps: [2-9][.0-9]* tokens'
    }
    soar_counts 10 11 12 13 | sed 's/: 8/: 30/' >"$work/set" && { trees || trees || trees || trees; } &&
        prints '^drafts at S3: [0-9.]* times as fast, where they are right as often as was asked for (oracle:80)' &&
        prints '^no natural rows: a model without' &&
        synthetic_soar --num-prompts 2 --concurrency 1 --spec all && prints '^drafts at S1: no gain is given' &&
        synthetic_soar --num-prompts 2 --concurrency 1 --spec all --json && prints '"gains": \[\]' &&
        exits 2 bench --soar "$work/set" --spec-test oracle && says '^sala: --spec-test goes with --spec all' &&
        exits 2 bench --soar "$work/set" --spec all --spec-test maybe && says '^sala: --spec-test is "maybe"'
}
t_bench_soar_score() {
    soar_counts 10 11 12 13 >"$work/set" && synthetic_soar --num-prompts 2 --json && cp "$work/out" "$work/base" &&
        sed 's/"seconds": [0-9.]*/"seconds": 1000/g' "$work/base" >"$work/slow" && echo '{"overall": 98.5}' >"$work/eval" &&
        synthetic_soar --num-prompts 2 --baseline "$work/slow" --eval "$work/eval" &&
        prints '^forced, 100 x the .*: S1 [0-9]*[0-9]\{4\}[.].* S8 .* Smax .* score [0-9.]*, C = 0.96 by an accuracy of 98.50' &&
        prints '^S8 .* forced ' && prints '^Smax .* forced ' && prints '^Smax is the run of S8: there are 2 requests$' &&
        synthetic_soar --num-prompts 2 --concurrency 1,8 --baseline "$work/base" && prints ' no score: it takes' &&
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" --num-prompts 3 --baseline "$work/base" &&
        says 'base: of other requests' && silent &&
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" --baseline "$work/eval" && says 'is not what sala bench' &&
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" --eval "$work/base" && says 'is not what sala eval' &&
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" --eval "$work/none" && says 'none: '
}
t_bench_soar_files() { # what is wrong with a file is said with its line
    bad() { # MESSAGE LINES...
        said=$1 && shift && printf '%s\n' "$@" >"$work/set" &&
            exits 1 bench -q --soar "$work/set" && says "$said" && silent
    }
    good='{"question": "Once upon", "model_response": "a time"}'
    bad 'set:2: lacks a question (or input, or prompt)' "$good" '{"model_response": "x"}' &&
        bad 'set:1: lacks a model_response' '{"question": "x"}' && bad 'set:3: lacks a question' "$good" '' '7' &&
        bad '^sala: [^ ]*set:2: not valid JSON at byte' "$good" '{"question"' && bad 'set:1: lacks a quest' '{"question": 5, "model_response": "x"}' &&
        bad 'set: no request with two tokens' '' && bad 'set: no request with' '{"question": "Once upon", "model_response": ""}' &&
        printf '%s\n' '{"prompt_tokens": 5}' >"$work/set" &&
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" && says 'set:1: lacks prompt_tokens or completion_tokens' &&
        printf '{"prompt_tokens": 9223372036854775807, "completion_tokens": 9}\n' >"$work/set" && # no sum of these overflows
        exits 1 bench -q --synthetic -m $tiny/config.json --soar "$work/set" && says 'set:1: lacks prompt_tokens .* from 1 to 2^30' &&
        printf '%s\n\000%s\n' "$good" "$good" >"$work/set" && # a zero does not end a file
        exits 1 bench -q --soar "$work/set" && says 'set:2: .*not valid JSON' && silent &&
        exits 1 bench -q --soar "$work/none" && says 'none: cannot open' && echo "$good" >"$work/set" &&
        exits 2 bench --soar "$work/set" --concurrency 1,two && says "concurrency: 'two' is not a whole number" &&
        exits 2 bench --soar "$work/set" --concurrency 1,,8 && says "concurrency: '' is not" &&
        exits 2 bench --soar "$work/set" --concurrency 10000000000000001 && says "concurrency: '10000000000000001' is not" &&
        exits 2 bench --soar "$work/set" --concurrency 1,2,3,4,5,6,7,8,9 && says 'at most 8 levels' &&
        exits 2 bench --soar "$work/set" --num-prompts 0 && says "num-prompts: '0'" && exits 2 bench --concurrency 1 && says 'go with --soar' &&
        exits 2 bench --soar "$work/set" --prompt-tokens 5 && says 'do not go with --soar' && exits 2 bench --soar x --gen-tokens 5 &&
        exits 2 bench --context --prompt-tokens 5 && says '^sala: --prompt-tokens does not go with --context' &&
        exits 2 bench --soar "$work/set" --gemm && says 'none of the other measurements' &&
        exits 2 bench --soar "$work/set" --context && says 'not both' &&
        exits 1 bench -q --soar "$work/set" --max-context 4 && says 'set:1: the prompt ([0-9]* tokens) and max-tokens .* --context'
}
t_make_soar_set() { # text of the length that is asked for, counted as the program counts it
    maker=${MAKE_SOAR_SET:-build/make_soar_set}
    [ -x "$maker" ] || { echo "make $maker first" && return 1; }
    "$maker" -q --lengths 20:8,9:30 --count 5 >"$work/out" && lines 5 "$work/out" && prints '{"index": 3, "prompt_tokens": 9, "completion_tokens": 30}' &&
        "$maker" -q --lengths v2 --count 50 >"$work/a" && "$maker" -q --count 50 >"$work/b" && cmp "$work/a" "$work/b" &&
        "$maker" -q --count 50 --seed 1 >"$work/b" && ! cmp -s "$work/a" "$work/b" && tr -d ,} <"$work/a" |
        awk '{ in_most += $4 >= 262144; out_least += $6 < 512; bad += $4 < 100 || $4 >= 524288 || $6 < 10 || $6 >= 32768 }
            END { exit !(NR == 50 && in_most >= 8 && in_most <= 9 && out_least == 29 && !bad) }' &&
        tail -n 20 sala.h | "$maker" -q -m $tiny --text - --lengths 40:6 --count 4 >"$work/set" && lines 4 "$work/set" &&
        exits 0 bench -q --soar "$work/set" --concurrency max --natural-tokens 2 --json &&
        in=$(field prompt_tokens) && out=$(field output_tokens) && [ "$in" ] &&
        sum() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" "$work/set" | awk '{ n += $1 } END { print n }'; } &&
        prints "\"row\": \"forced\", \"seconds\": [0-9.]*, \"prompt_tokens\": $(sum prompt_tokens), \"output_tokens\": $(sum completion_tokens)," &&
        [ "$(sum prompt_tokens)" -ge 148 ] && [ "$(sum prompt_tokens)" -le 168 ] &&
        ! "$maker" --abcdefgh x 2>"$work/err" && says '`build/make_soar_set --help` lists' &&
        ! "$maker" --lengths 5 2>"$work/err" && says 'neither v1, v2 nor IN:OUT' && ! "$maker" -m $tiny 2>"$work/err" &&
        says "-m goes with --text" && ! "$maker" --txt 2>"$work/err" && says "did you mean --text?" && ! "$maker" --qqqq 2>"$work/err" && says "make_soar_set --help. lists" && "$maker" --help >"$work/out" && prints '^usage: build/make_soar_set \[' &&
        tail -n 20 sala.h >"$work/text" && "$maker" --text "$work/text" --lengths 40:6 --count 1 2>"$work/err" >"$work/out" &&
        lines 1 "$work/err" && "$maker" --text "$work/text" --lengths 4000:6,40:6 --count 2 2>"$work/err" >"$work/out" &&
        says 'warning: 1 requests have more tokens than the text ([0-9]*) and repeat it' && : >"$work/empty" && ! "$maker" -m $tiny --text "$work/empty" 2>"$work/err" && says 'there is no text in it'
}
t_bench_context() {
    exits 0 bench -q --context --max-context 2100 --gen-tokens 8 && lines 3 "$work/out" &&
        prints '^context,prompt_tokens,prefill_seconds,prefill_tokens_per_second,decode_tokens,' &&
        prints '^2048,2040,[0-9.]*,[0-9.]*,7,' && prints '^2100,45,[0-9.]*,[0-9.]*,7,' &&
        exits 1 bench -q --context --max-context 64 && says '64 tokens are no context for --gen-tokens 64' && silent &&
        exits 0 bench -q --context --max-context 2100 --gen-tokens 2060 --json && prints '"rows": \[{"context": 2100, "prompt_tokens": 40' &&
        exits 2 bench --context --spec all && says '^sala: --spec all does not go with --context' &&
        exits 2 bench --max-context many && says '^sala: --max-context is "many"' &&
        exits 0 help bench && prints 'CPU: 32K' && exits 0 bench -q --context --max-context 1G --gen-tokens 8 --chunk 64 --memory-limit 4500K --spec ngram --json &&
        says 'the series ends at [0-9]* tokens' && is_json "$work/out" && prints '"rows": \[{"context": [0-9]*, [^{]*}\]'
}
t_plot() { # the curves of two files, nothing but XML; a file that is none is refused
    command -v python3 >/dev/null || return 0
    printf 'context,prefill_tokens_per_second,decode_tokens_per_second\n2048,1000,50\n4096,800,45.5\n' >"$work/a.csv" &&
        sed 's/45.5/20/; s/50/25/' "$work/a.csv" >"$work/b<&.csv" &&
        python3 tools/plot.py "$work/a.csv" "$work/b<&.csv" >"$work/out" 2>"$work/err" &&
        python3 -c "
import sys, xml.dom.minidom as dom
svg = dom.parse(sys.argv[1])
assert len(svg.getElementsByTagName('polyline')) == 4
assert any('b<&' in t.firstChild.data for t in svg.getElementsByTagName('text'))" "$work/out" &&
        ! python3 tools/plot.py README.md >"$work/out" 2>"$work/err" && says 'README.md: line 1: no column context' &&
        python3 tools/plot.py --help | grep -q 'tokens a second by context' && ! python3 tools/plot.py 2>"$work/err" &&
        printf 'context,decode_tokens_per_second\n2048,x\n' >"$work/a.csv" &&
        ! python3 tools/plot.py "$work/a.csv" >"$work/out" 2>"$work/err" && says 'a.csv: line 2: ' && silent &&
        for row in 1e308,1 2048,inf 0.5,1 "$(printf '%0200000d' 2),1" "$(printf '\377')"; do # no traceback
            printf 'context,decode_tokens_per_second\n%s\n' "$row" >"$work/a.csv"
            ! python3 tools/plot.py "$work/a.csv" >"$work/out" 2>"$work/err" && says '^plot.py: ' && lines 1 "$work/err" || return 1
        done &&
        printf '\357\273\277context,decode_tokens_per_second\r\n2048,5\r\n' >"$work/a.csv" && # as spreadsheets save it
        python3 tools/plot.py "$work/a.csv" >"$work/out"
}

# ---- all of them ----

for test in $(sed -n 's/^\(t_[a-z_]*\)() .*/\1/p' tests/test_cli.sh); do
    check "${test#t_}" "$test"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
