/*  cli.h - what the commands of the program share: exit codes, options and their help, signals,
    progress, JSON output, output files, opening a model.

    main.c and the tools are one translation unit: main.c includes sala.h with its implementation,
    then this file, then tools/NAME.c. A command is `int sala_NAME(int argc, char **argv)`, argv[0]
    being its name. It describes itself in a cli_command, reads its options with cli_next, opens the
    model with cli_open, looks at cli_signal between steps, and returns an exit code. */
#ifndef SALA_CLI_H
#define SALA_CLI_H

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { // exit codes; 128 + the signal's number (Ctrl-C: 130) when a signal ended it
    CLI_OK = 0,
    CLI_FAILED = 1, // the model, a file or the run failed
    CLI_USAGE = 2,  // the command line is wrong
    CLI_OUTPUT = 3  // stdout or an output file could not be written
};

/* ---- messages and progress ---------------------------------------------------------------------
   Everything that is not a result goes to stderr. The progress line exists only on a terminal;
   whatever else is printed erases it first. */

static int cli_quiet;          // --quiet: no progress, no start and end lines
static int cli_progress_width; // columns of the progress line that stands there now, 0: none
static double cli_progress_shown;

static double cli_now(void) { // seconds, monotonic
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void cli_progress_clear(void) {
    if (cli_progress_width) fprintf(stderr, "\r%*s\r", cli_progress_width, "");
    cli_progress_width = 0;
}

// Rewrite the progress line, at most ten times a second. `left`: seconds to go, negative: not
// known.
static void cli_progress(const char *what, double fraction, double left) {
    char line[160];
    double now = cli_now();
    if (cli_quiet || !isatty(STDERR_FILENO)) return;
    if (cli_progress_width && fraction < 1 && now - cli_progress_shown < 0.1) return;
    int n = snprintf(line, sizeof line, "%.100s %3.0f %%", what, 100 * fraction);
    if (left >= 0 && left < 60) snprintf(line + n, sizeof line - (size_t)n, ", %.0f s left", left);
    if (left >= 60) {
        int seconds = (int)fmin(left, 1e8);
        snprintf(line + n, sizeof line - (size_t)n, ", %d:%02d left", seconds / 60, seconds % 60);
    }
    cli_progress_clear();
    cli_progress_width = fprintf(stderr, "%s", line);
    cli_progress_shown = now;
}

// Progress of something that began at time `start`: the time left follows from the fraction done.
static void cli_progress_since(const char *what, double fraction, double start) {
    double spent = cli_now() - start;
    cli_progress(what, fraction, fraction > 0 ? spent * (1 - fraction) / fraction : -1);
}

static int cli_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int cli_fail(int code, const char *format, ...) { // say what is wrong; returns the exit code
    va_list args;
    cli_progress_clear();
    va_start(args, format);
    fprintf(stderr, "sala: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return code;
}

// Everything printed so far must have reached stdout. Returns 0, or CLI_OUTPUT, and says so once.
static int cli_flush(void) {
    static int said;
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return CLI_OK;
    if (!said) cli_fail(0, "cannot write to stdout: %s", errno ? strerror(errno) : "write error");
    said = 1;
    return CLI_OUTPUT;
}

/* ---- memory, numbers, text ------------------------------------------------------------------ */

typedef struct cli_buffer { // a growing array of bytes, zeroed when new
    char *data;
    size_t size, capacity;
} cli_buffer;

static void *cli_resize(void *pointer, size_t size) { // realloc; a command line may give up here
    void *p = realloc(pointer, size ? size : 1);
    if (!p) exit(cli_fail(CLI_FAILED, "out of memory: %zu bytes", size));
    return p;
}

// Append bytes; a zero that is not counted always follows them.
static void cli_append(cli_buffer *b, const void *bytes, size_t count) {
    if (count >= SIZE_MAX / 4 - b->size) exit(cli_fail(CLI_FAILED, "out of memory"));
    if (b->size + count + 1 > b->capacity) {
        b->capacity = 2 * (b->size + count + 1);
        b->data = (char *)cli_resize(b->data, b->capacity);
    }
    if (count) memcpy(b->data + b->size, bytes, count);
    b->size += count;
    b->data[b->size] = 0;
}

static void cli_free(cli_buffer *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

static char *cli_copy(const char *text) {
    size_t n = strlen(text) + 1;
    return (char *)memcpy(cli_resize(NULL, n), text, n);
}

// A whole file ("-": stdin), zero-terminated. Returns an exit code.
static int cli_read_file(const char *path, cli_buffer *out) {
    int is_stdin = strcmp(path, "-") == 0, code = CLI_OK;
    FILE *f = is_stdin ? stdin : fopen(path, "rb");
    char part[16384];
    size_t n = 0;
    if (!f) return cli_fail(CLI_FAILED, "%s: cannot open: %s", path, strerror(errno));
    cli_append(out, "", 0);
    while (errno = 0, (n = fread(part, 1, sizeof part, f)) > 0) cli_append(out, part, n);
    if (ferror(f)) code = cli_fail(CLI_FAILED, "%s: cannot read: %s", path, strerror(errno));
    if (!is_stdin) fclose(f);
    return code;
}

#define CLI_HASH 0xCBF29CE484222325u // of nothing

static uint64_t cli_hash(uint64_t h, const void *data, size_t size) { // FNV-1a
    for (size_t i = 0; i < size; i++) h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001B3u;
    return h;
}

// "15.6 MiB", into a buffer of 32 bytes that is returned.
static const char *cli_bytes(double bytes, char out[32]) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    for (; fabs(bytes) >= 1024 && u < 4; u++) bytes /= 1024;
    snprintf(out, 32, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
    return out;
}

// "1,234,567", into a buffer of 32 bytes that is returned.
static const char *cli_count(int64_t value, char out[32]) {
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)value), at = 0;
    for (int i = 0; i < n; i++) {
        out[at++] = digits[i];
        if (digits[i] != '-' && i + 1 < n && (n - 1 - i) % 3 == 0) out[at++] = ',';
    }
    out[at] = 0;
    return out;
}

// The bytes of one well-formed UTF-8 character at s, 0 when it is not one.
static size_t cli_utf8_length(const unsigned char *s, size_t left) {
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = s[0] < 0x80   ? 1
               : s[0] < 0xC2 ? 0
               : s[0] < 0xE0 ? 2
               : s[0] < 0xF0 ? 3
               : s[0] < 0xF5 ? 4
                             : 0;
    unsigned code = n < 2 ? s[0] : s[0] & (0x7Fu >> n);
    if (n > left) return 0;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
        code = code << 6 | (s[i] & 63);
    }
    return code < least[n] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) ? 0 : n;
}

// A JSON string of any bytes: what is not UTF-8 becomes U+FFFD. NULL is written as null.
static void cli_json_text(FILE *f, const char *text, size_t bytes) {
    if (!text) {
        fprintf(f, "null");
        return;
    }
    putc('"', f);
    for (size_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        size_t n = cli_utf8_length((const unsigned char *)text + i, bytes - i);
        if (c == '"' || c == '\\')
            fprintf(f, "\\%c", c);
        else if (c == '\n')
            fprintf(f, "\\n");
        else if (c < 0x20 || c == 0x7F)
            fprintf(f, "\\u%04x", c);
        else if (n)
            fwrite(text + i, 1, n, f);
        else
            fprintf(f, "\\ufffd");
        i += n ? n : 1;
    }
    putc('"', f);
}

static void cli_json_number(FILE *f, double value) { // JSON knows no NaN and no infinity
    if (isfinite(value))
        fprintf(f, "%.9g", value);
    else
        fprintf(f, "null");
}

/* ---- output files and signals ------------------------------------------------------------------
   An output file is written under a temporary name beside its place and renamed when complete, so
   that no half-written file ever stands under its name. A device or a pipe is written directly. */

typedef struct cli_output {
    char *path;
    char *temporary; // NULL: written directly
    int fd;
} cli_output;

static volatile sig_atomic_t cli_signal;           // the signal that asks to stop, 0: none
static char *volatile cli_temporaries[4] = {NULL}; // for the handler: what a sudden end must remove

static void cli_on_signal(int number) { // the first asks, the second ends at once
    if (cli_signal) {
        for (int i = 0; i < 4; i++)
            if (cli_temporaries[i]) unlink(cli_temporaries[i]);
        _exit(128 + number);
    }
    cli_signal = number;
}

static void cli_catch_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    action.sa_handler = cli_on_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction old; // of a terminal that closes, unless nohup took care
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    action.sa_handler = SIG_IGN; // a closed pipe is a write error, reported as one
    sigaction(SIGPIPE, &action, NULL);
}

static int cli_output_open(cli_output *o, const char *path) { // returns an exit code
    struct stat st;
    int exists = stat(path, &st) == 0;
    o->path = exists ? realpath(path, NULL) : cli_copy(path); // through a link, to where it points
    if (!o->path) o->path = cli_copy(path);
    if (exists && !S_ISREG(st.st_mode)) {
        o->fd = open(o->path, O_WRONLY | O_CLOEXEC);
    } else {
        o->temporary = (char *)cli_resize(NULL, strlen(o->path) + 32);
        sprintf(o->temporary, "%s.tmp-%ld", o->path, (long)getpid());
        o->fd = open(o->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
        for (int i = 0; i < 4 && o->fd >= 0; i++) {
            if (cli_temporaries[i]) continue;
            cli_temporaries[i] = o->temporary;
            break;
        }
    }
    return o->fd >= 0 ? CLI_OK
                      : cli_fail(CLI_OUTPUT, "%s: cannot create: %s", path, strerror(errno));
}

// Could sala_save write there? It makes a file beside it, and puts that in its place. Returns an exit code.
static int cli_check_place(const char *path) {
    struct stat st;
    char *real = realpath(path, NULL), *folder = real ? real : cli_copy(path); // links are followed
    char *slash = strrchr(folder, '/');
    int code = CLI_OK;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        code = cli_fail(CLI_OUTPUT, "%s: cannot be saved there: not a regular file", path);
    if (slash) slash[slash == folder] = 0;
    if (code == CLI_OK && (!*path || access(slash ? folder : ".", W_OK | X_OK) != 0))
        code = cli_fail(CLI_OUTPUT, "'%s': cannot be saved there: %s", path,
                        strerror(*path ? errno : ENOENT));
    free(folder);
    return code;
}

static int cli_output_write(cli_output *o, int64_t offset, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n =
            pwrite(o->fd, (const char *)data + done, bytes - done, (off_t)offset + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return cli_fail(CLI_OUTPUT, "%s: cannot write: %s", o->path, strerror(errno));
        done += (size_t)n;
    }
    return CLI_OK;
}

// Put the file in its place (`code` 0), or remove it. Returns the exit code, a failure of its own
// included.
static int cli_output_close(cli_output *o, int code) {
    if (o->path && o->fd >= 0) {
        int bad = code == 0 && o->temporary && fsync(o->fd) != 0;
        bad |= close(o->fd) != 0;
        if (code == 0 && !bad && o->temporary) bad = rename(o->temporary, o->path) != 0;
        if (bad && code == 0)
            code = cli_fail(CLI_OUTPUT, "%s: cannot finish: %s", o->path, strerror(errno));
        if (code && o->temporary) unlink(o->temporary);
    }
    for (int i = 0; i < 4; i++)
        if (cli_temporaries[i] && cli_temporaries[i] == o->temporary) cli_temporaries[i] = NULL;
    free(o->temporary);
    free(o->path);
    memset(o, 0, sizeof *o);
    return code;
}

typedef struct cli_reader { // stdin by lines; a signal interrupts the waiting, unlike with stdio
    cli_buffer data;
    size_t at;
    int ended;
} cli_reader;

// Returns 1 and a line without its end (valid until the next call), 0 at the end, -1 on a signal.
static int cli_read_line(cli_reader *r, char **line) {
    char part[4096];
    for (;;) {
        char *start = r->data.data ? r->data.data + r->at : NULL;
        size_t left = r->data.size - r->at;
        char *newline = left ? (char *)memchr(start, '\n', left) : NULL;
        if (newline || (r->ended && left)) {
            size_t n = newline ? (size_t)(newline - start) : left;
            r->at += n + (newline != NULL);
            if (n && start[n - 1] == '\r') n--;
            start[n] = 0;
            *line = start;
            return 1;
        }
        if (r->ended) return 0;
        if (r->at) memmove(r->data.data, r->data.data + r->at, left);
        r->data.size = left;
        r->at = 0;
        struct pollfd wait = {STDIN_FILENO, POLLIN, 0};
        int ready = cli_signal ? -1 : poll(&wait, 1, -1);
        if (cli_signal) return -1;
        if (ready < 0 && errno == EINTR) continue;
        ssize_t n = read(STDIN_FILENO, part, sizeof part);
        if (n > 0)
            cli_append(&r->data, part, (size_t)n);
        else
            r->ended = 1;
    }
}

/* ---- options -----------------------------------------------------------------------------------
   Tables of options make both the parser and the help. What belongs to the engine or to a request
   is handed to sala_set_option or sala_set_request by its name: the engine is the judge of values
   and ranges. */

typedef struct cli_option {
    int id;            // > 0: handed to the command (a letter: its short form); 0: the engine's
    const char *name;  // long form, without dashes
    const char *value; // what the help calls its value; NULL: a flag
    const char *help;
} cli_option;

enum { CLI_ENGINE = 1, CLI_REQUEST = 2 }; // groups that a command takes beside its own
enum {
    CLI_JSON = 256,
    CLI_STOP,
    CLI_STOP_TOKEN,
    CLI_BIAS,
    CLI_OWN = 300
}; // ids; a command's from CLI_OWN

typedef struct cli_command {
    const char *name;
    const char *about;     // usage line and what it does
    const cli_option *own; // up to a row without name
    int groups;            // CLI_ENGINE | CLI_REQUEST
    const char *examples;
} cli_command;

static const cli_option cli_common[] = {
    {'m', "model", "DIR", "model folder (default: $SALA_MODEL, else models/sala-tiny)"},
    {'q', "quiet", NULL, "nothing on stderr but warnings and errors"},
    {'h', "help", NULL, "this text"},
    {0, NULL, NULL, NULL},
};

static const cli_option cli_engine[] = {
    {0, "device", "NAME", "auto, cpu, cuda or cuda:N (default auto: a GPU if one can be used)"},
    {0, "threads", "N", "CPU threads (default: the processors this process may use)"},
    {0, "context", "N", "longest sequence, tokens (default 32768)"},
    {0, "max-sequences", "N", "sequences resident at once, 1..256 (default 8)"},
    {0, "kv-tokens", "N",
     "tokens of KV cache for all sequences (default: one context, 4096 per other)"},
    {0, "memory-limit", "BYTES",
     "what may be taken beyond the mapped weights (default: what is free)"},
    {0, "chunk", "N", "prefill chunk, tokens, a multiple of 64 (default 2048)"},
    {0, "dense-len", "N",
     "sparse layers are dense below N tokens (default: the model's; 0: never)"},
    {0, "prefill", "KIND",
     "of NVFP4 weights: w4a4 (FP4 activations), w4a16, auto (default: w4a4 where it is native)"},
    {0, "spec", "KIND",
     "drafts, which never change the text: auto (default), off, ngram (what was there before), "
     "eagle"},
    {0, "draft", "DIR", "folder of an EAGLE-3 draft head (with --synthetic its config.json)"},
    {0, "spec-tree", "D,K,N",
     "its trees: depth, candidates a node, nodes (default: 7,2,15, less under load)"},
    {0, "draft-window", "N",
     "tokens that it sees at most (default: as it was trained, else 32768)"},
    {0, "reuse", "KIND",
     "what a prompt may begin with: prefix (of an earlier prompt; default), history (also a kept "
     "conversation), off (default of bench; run and logits, which have one prompt, take only "
     "that)"},
    {0, "reuse-memory", "BYTES",
     "snapshots of lightning states for it (default: up to 16, as fit)"},
    {0, "template", "chatml", "chat template (default: recognised from the model's files)"},
    {0, "synthetic", NULL,
     "-m is a config.json; weights are made by a hash, there is no tokenizer"},
    {0, "synthetic-seed", "N", "seed of such weights (default 0)"},
    {0, "weights", "FORMAT", "of such weights: bf16 (default), nvfp4, int4, nvfp4-head"},
    {0, NULL, NULL, NULL},
};

static const cli_option cli_request[] = {
    {'n', "max-tokens", "N", "tokens to generate at most (default 256)"},
    {0, "temperature", "T", "0: the likeliest token always (default 0); --temp is the same"},
    {0, "top-k", "N", "choose among the N likeliest (default 0: all)"},
    {0, "top-p", "P", "choose among the likeliest that make up P (default 1: all)"},
    {0, "min-p", "P", "drop tokens less likely than P times the likeliest (default 0: none)"},
    {0, "repetition-penalty", "R", "divides the logits of tokens seen (default 1: none)"},
    {0, "presence-penalty", "R", "taken from logits of tokens in the output (default 0)"},
    {0, "frequency-penalty", "R", "the same, for each occurrence (default 0)"},
    {0, "seed", "N", "of the random numbers (default 0)"},
    {CLI_STOP, "stop", "TEXT", "text that ends the answer and is not part of it; repeatable"},
    {CLI_STOP_TOKEN, "stop-token", "ID", "token that ends it, beside the model's own; repeatable"},
    {CLI_BIAS, "bias", "ID:VALUE", "added to a token's logit, -inf forbids it; repeatable"},
    {0, "ignore-eos", NULL, "the model's end tokens do not end it"},
    {0, "special-text", NULL, "special tokens appear in the text"},
    {0, "logprobs", "N",
     "with --json: log-probabilities of each token and of the N best, at most 20"},
    {0, NULL, NULL, NULL},
};

typedef struct cli_args {
    const cli_command *command;
    int argc, at; // `at`: the next argument to look at
    char **argv;
    const char *value; // of the option that cli_next returned
    int code;          // exit code when cli_next returned -1 or cli_open NULL
    int json;
    const char *model;
    const char *asked; // the last option that a request has, NULL: none
    sala_options options;
    sala_request request;
    cli_buffer stops, stop_tokens, biases; // what request.stop and the like point to
} cli_args;

// Options of a group, but for those that the command has its own of.
static void cli_print_options(const char *title, const cli_option *o, const cli_option *own) {
    if (!o || !o->name) return;
    printf("\n%s\n", title);
    for (; o->name; o++) {
        char left[64];
        const cli_option *same = own;
        while (same && same->name && strcmp(same->name, o->name) != 0) same++;
        if (same && same->name) continue;
        int n = o->id > 0 && o->id < 256
                    ? snprintf(left, sizeof left, "  -%c, --%s", o->id, o->name)
                    : snprintf(left, sizeof left, "      --%s", o->name);
        if (o->value) snprintf(left + n, sizeof left - (size_t)n, " %s", o->value);
        printf("%-30s %s\n", left, o->help);
    }
}

// A program of its own (tools/quantize.c) says otherwise.
static const char *cli_program = "sala ", *cli_help = "sala help";

static void cli_print_help(const cli_command *c) {
    printf("usage: %s%s", cli_program, c->about);
    cli_print_options("Options of this command", c->own, NULL);
    cli_print_options("Model and output", cli_common, c->own);
    if (c->groups & CLI_REQUEST) cli_print_options("What is generated", cli_request, c->own);
    if (c->groups & CLI_ENGINE)
        cli_print_options("The engine (sizes may end in K, M or G, powers of 1024)", cli_engine,
                          c->own);
    printf("\nExamples\n%s", c->examples);
    printf(
        "\nExit codes: 0 done, 1 model or run failed, 2 wrong command line, 3 output could not be\n"
        "written, 130 interrupted (Ctrl-C).\n");
}

// The four tables of a command, one after the other; NULL for a group that it does not take.
static const cli_option *cli_table(const cli_command *c, int i) {
    if (i == 0) return c->own;
    if (i == 1) return cli_common;
    if (i == 2) return c->groups & CLI_REQUEST ? cli_request : NULL;
    return c->groups & CLI_ENGINE ? cli_engine : NULL;
}

// The row of an option by its long name, or by its letter where that is not 0; and its table. NULL:
// unknown.
static const cli_option *cli_find(const cli_command *c, const char *name, int letter, int *table) {
    for (*table = 0; *table < 4; ++*table)
        for (const cli_option *o = cli_table(c, *table); o && o->name; o++)
            if (letter ? o->id == letter : strcmp(o->name, name) == 0) return o;
    return NULL;
}

static int cli_unknown(const cli_command *c, const char *name) {
    const char *nearest = NULL;
    int best = (int)strlen(name) / 3 + 1; // a third of it may be wrong
    for (int i = 0; i < 4; i++) {
        for (const cli_option *o = cli_table(c, i); o && o->name; o++) {
            int d = sala__name_distance(o->name, name);
            if (d >= best) continue;
            best = d;
            nearest = o->name;
        }
    }
    if ((c->groups & CLI_REQUEST) && sala__name_distance("temp", name) < best) nearest = "temp";
    if (nearest)
        return cli_fail(CLI_USAGE, "unknown option --%s; did you mean --%s?", name, nearest);
    return cli_fail(CLI_USAGE, "unknown option --%s; `%s %s` lists them", name, cli_help, c->name);
}

// A whole number within bounds. Returns an exit code.
static int cli_integer(const char *name, const char *text, int64_t least, int64_t most,
                       int64_t *value) {
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno || v < least || v > most) {
        return cli_fail(CLI_USAGE, "--%s: '%s' is not a whole number from %lld to %lld", name, text,
                        (long long)least, (long long)most);
    }
    *value = v;
    return CLI_OK;
}

static int cli_set_bias(cli_args *a, const char *text) {
    sala_bias bias;
    char *end, *end2;
    errno = 0;
    long token = strtol(text, &end, 10);
    bias.token = (int32_t)token;
    bias.bias = *end == ':' ? strtof(end + 1, &end2) : 0;
    if (end == text || *end != ':' || end2 == end + 1 || *end2 || token < 0 || token > INT32_MAX ||
        isnan(bias.bias)) {
        return cli_fail(CLI_USAGE, "--bias: '%s' is not ID:VALUE, like 42:-1.5 or 42:-inf", text);
    }
    cli_append(&a->biases, &bias, sizeof bias);
    a->request.biases = (const sala_bias *)(void *)a->biases.data;
    a->request.bias_count++;
    return CLI_OK;
}

static int cli_set_stop_token(cli_args *a, const char *text) {
    int64_t number = 0;
    int32_t token;
    if (cli_integer("stop-token", text, 0, INT32_MAX, &number)) return CLI_USAGE;
    token = (int32_t)number;
    cli_append(&a->stop_tokens, &token, sizeof token);
    a->request.stop_tokens = (const int32_t *)(void *)a->stop_tokens.data;
    a->request.stop_token_count++;
    return CLI_OK;
}

static int cli_set_stop(cli_args *a, const char *text) {
    if (!text[0]) return cli_fail(CLI_USAGE, "--stop: the text is empty");
    cli_append(&a->stops, &text, sizeof text);
    a->request.stop = (const char *const *)(void *)a->stops.data;
    a->request.stop_count++;
    return CLI_OK;
}

// An option that is not the command's own. Returns an exit code.
static int cli_shared_option(cli_args *a, const cli_option *o, int table) {
    sala_error err;
    int code;
    if (table == 2) a->asked = o->name;
    switch (o->id) {
    case 'm':
        a->model = a->value;
        return *a->value ? CLI_OK : cli_fail(CLI_USAGE, "--model: the name is empty");
    case 'q': cli_quiet = 1; return CLI_OK;
    case CLI_JSON: a->json = 1; return CLI_OK;
    case CLI_STOP: return cli_set_stop(a, a->value);
    case CLI_STOP_TOKEN: return cli_set_stop_token(a, a->value);
    case CLI_BIAS: return cli_set_bias(a, a->value);
    default: break;
    }
    if (table == 2)
        code = sala_set_request(&a->request, o->name, a->value, &err);
    else
        code = sala_set_option(&a->options, o->name, a->value, &err);
    return code < 0 ? cli_fail(CLI_USAGE, "--%s", err.text) : CLI_OK;
}

static void cli_start(cli_args *a, const cli_command *command, int argc, char **argv) {
    memset(a, 0, sizeof *a);
    a->command = command;
    a->argc = argc;
    a->argv = argv;
    a->at = 1;
}

static void cli_end(cli_args *a) {
    cli_free(&a->stops);
    cli_free(&a->stop_tokens);
    cli_free(&a->biases);
}

// Find the row of the option that an argument names; a->value becomes what is joined to it, or
// NULL.
static const cli_option *cli_lookup(cli_args *a, const char *arg, int *table) {
    const char *command = a->command->name;
    const cli_option *o;
    a->value = NULL;
    a->code = CLI_USAGE;
    if (arg[0] == '-' && arg[1] == '-' && arg[2]) {
        char name[64];
        size_t n = strcspn(arg + 2, "=");
        snprintf(name, sizeof name, "%.*s", (int)(n < 63 ? n : 63), arg + 2);
        if (arg[2 + n]) a->value = arg + 3 + n;
        o = cli_find(a->command, strcmp(name, "temp") ? name : "temperature", 0, table);
        if (!o) cli_unknown(a->command, name);
        return o;
    }
    if (arg[0] != '-' || !arg[1] || arg[1] == '-') {
        cli_fail(0, "unexpected argument '%s'; `%s %s` shows the options", arg, cli_help, command);
        return NULL;
    }
    o = cli_find(a->command, NULL, (unsigned char)arg[1], table);
    if (!o) cli_fail(0, "unknown option -%c; `%s %s` lists them", arg[1], cli_help, command);
    if (arg[2]) a->value = arg + 2;
    return o;
}

// The next of the command's own options: its id, with the value in a->value; 0 at the end; -1 when
// the command is to return a->code (help was printed, or an error).
static int cli_next(cli_args *a) {
    while (a->at < a->argc) {
        int table;
        const cli_option *o = cli_lookup(a, a->argv[a->at++], &table);
        if (!o) return -1;
        a->code = CLI_OK;
        if (!o->value) {
            if (a->value) a->code = cli_fail(CLI_USAGE, "--%s takes no value", o->name);
            a->value = "1";
        } else if (!a->value) {
            if (a->at == a->argc)
                a->code = cli_fail(CLI_USAGE, "--%s needs a value: %s", o->name, o->value);
            else
                a->value = a->argv[a->at++];
        }
        if (a->code == CLI_OK && o->id == 'h') {
            cli_print_help(a->command);
            return -1;
        }
        if (a->code == CLI_OK && table == 0 && o->id != CLI_JSON) return o->id;
        if (a->code == CLI_OK) a->code = cli_shared_option(a, o, table);
        if (a->code != CLI_OK) return -1;
    }
    return 0;
}

static int cli_text_open; // the text on stdout has not ended its line

// What stderr says next begins a line, where the text on stdout goes to the same place.
static void cli_fresh_line(void) {
    struct stat out, err;
    if (cli_text_open && fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
        out.st_dev == err.st_dev && out.st_ino == err.st_ino)
        putc('\n', stderr);
    cli_text_open = 0;
}

/* ---- opening a model ------------------------------------------------------------------------ */

static void cli_log(void *user, int level, const char *line) {
    (void)user;
    if (cli_quiet && level == SALA_LOG_INFO) return;
    cli_progress_clear();
    cli_fresh_line();
    fprintf(stderr, "sala: %s%s\n", level == SALA_LOG_WARNING ? "warning: " : "", line);
}

static void cli_load_progress(void *user, const char *what, double fraction) {
    (void)user;
    cli_progress(what, fraction, -1);
}

// The model folder: as given, else from the environment, else sala-tiny here or beside the program.
// `room` holds 4096 bytes. NULL when there is none; it is said then.
static const char *cli_model_path(const char *given, char *room) {
    static const char tiny[] = "models/sala-tiny";
    const char *path = given ? given : getenv("SALA_MODEL");
    if (path && *path) return path;
    if (access(tiny, F_OK) == 0) return tiny;
    ssize_t n = readlink("/proc/self/exe", room, 4096 - sizeof tiny - 1);
    if (n > 0) {
        room[n] = 0;
        char *slash = strrchr(room, '/');
        strcpy(slash ? slash + 1 : room, tiny);
        if (access(room, F_OK) == 0) return room;
    }
    cli_fail(CLI_FAILED,
             "no model: name one with -m DIR or in SALA_MODEL (%s is neither here nor beside "
             "the program)",
             tiny);
    return NULL;
}

// One line that says what runs, and with what memory.
static void cli_describe(sala *engine) {
    sala_info i;
    char context[32], kv[32], total[32], reuse[80] = "", prefill[40] = "";
    sala_get_info(engine, &i);
    if (i.snapshots)
        snprintf(reuse, sizeof reuse, ", %d snapshot%s of prefixes %s", i.snapshots,
                 i.snapshots == 1 ? "" : "s", cli_bytes((double)i.reuse_bytes, total));
    if (strcmp(i.prefill, "BF16") != 0) // results depend on it
        snprintf(prefill, sizeof prefill, ", prefill %s", i.prefill);
    fprintf(stderr, "sala %s: %s; %s, %s, %.2f bits per weight%s, %s; ", sala_version(), i.device,
            i.path, i.weight_format, i.bits_per_weight, prefill,
            cli_bytes((double)i.weight_bytes, total));
    fprintf(stderr, "context %s, KV and states %s%s; drafts %.*s\n", cli_count(i.context, context),
            cli_bytes((double)(i.kv_bytes + i.state_bytes), kv), reuse, (int)strcspn(i.spec, ";"),
            i.spec);
}

// What the command line can be told before a model is opened. Returns an exit code, in a->code too.
static int cli_check_engine(cli_args *a, const char *path) {
    const sala_options *o = &a->options;
    struct stat st;
    a->code = CLI_OK;
    if (o->synthetic && stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        a->code =
            cli_fail(CLI_USAGE, "--synthetic: -m must be a config.json; %s is a folder", path);
    else if (o->spec && strcmp(o->spec, "eagle") == 0 && !o->draft)
        a->code =
            cli_fail(CLI_USAGE, "--spec eagle needs a draft head: name its folder with --draft");
    else if (o->spec_tree && !o->draft && !cli_quiet)
        fprintf(stderr, "sala: --spec-tree is for the trees of a draft head, and none was named "
                        "(--draft)\n");
    else if (o->draft && o->spec && (strcmp(o->spec, "off") == 0 || strcmp(o->spec, "ngram") == 0))
        fprintf(stderr, "sala: warning: --spec %s leaves the draft head %s alone\n", o->spec,
                o->draft);
    return a->code;
}

// Open the model that the arguments name. NULL: a->code is the exit code, and why has been said.
static sala *cli_open(cli_args *a) {
    char room[4096];
    sala_error err;
    const char *path = cli_model_path(a->model, room);
    sala *engine = NULL;
    a->code = CLI_FAILED;
    if (!path || cli_check_engine(a, path) != CLI_OK) return NULL;
    a->code = CLI_FAILED;
    a->options.hooks.log = cli_log;
    a->options.hooks.progress = cli_load_progress;
    engine = sala_open(path, &a->options, &err);
    cli_progress_clear();
    if (!engine) { // an option that was wrong, or a model
        a->code = cli_fail(err.code == SALA_E_ARGUMENT ? CLI_USAGE : CLI_FAILED, "%s", err.text);
        return NULL;
    }
    if (!cli_quiet) cli_describe(engine);
    a->code = CLI_OK;
    return engine;
}

// For a command that has one prompt: nothing was there before that it could begin with. Returns an exit code.
static int cli_one_prompt(cli_args *a) {
    const char *reuse = a->options.reuse;
    a->options.reuse = "off";
    if (!reuse || strcmp(reuse, "off") == 0) return CLI_OK;
    return cli_fail(CLI_USAGE, "--reuse %s: %s has one prompt, and none before it", reuse,
                    a->command->name);
}

// Tokens on the command line must be in the vocabulary. Returns an exit code.
static int cli_check_tokens(const cli_args *a, sala *engine) {
    const sala_request *r = &a->request;
    sala_info info;
    sala_get_info(engine, &info);
    for (int i = 0; i < r->bias_count + r->stop_token_count; i++) {
        int bias = i < r->bias_count;
        int32_t token = bias ? r->biases[i].token : r->stop_tokens[i - r->bias_count];
        if (token >= info.vocab)
            return cli_fail(CLI_USAGE, "--%s: there is no token %d: the vocabulary has 0 to %d",
                            bias ? "bias" : "stop-token", token, info.vocab - 1);
    }
    return CLI_OK;
}

static double cli_rate(double amount, double seconds) {
    return seconds > 0 ? amount / seconds : 0;
}

static double cli_verifies(const sala_timings *t) {
    return (double)(t->verifies[0] + t->verifies[1] + t->verifies[2]);
}

static double cli_tau(const sala_timings *t) { // tokens a step
    double tokens = 0;
    for (int k = 0; k < 3; k++) tokens += (double)t->verify_tokens[k];
    return cli_rate(tokens, cli_verifies(t));
}

static const char *const cli_sources[] = {"plain", "ngram", "eagle"}; // by SALA_DRAFT_*

// What drafts did, where they gained anything: tokens a step, then of each source its share of the steps,
// its yield and how many of the tokens that it offered on the way were right.
static void cli_print_spec(FILE *f, const char *before, const sala_timings *t) {
    int any = 0;
    for (int k = SALA_DRAFT_NGRAM; k <= SALA_DRAFT_EAGLE; k++) {
        double offered = 0, right = 0;
        if (t->verify_tokens[k] <= t->verifies[k]) continue;
        for (int d = 1; d < SALA_DEPTHS; d++)
            offered += (double)t->offered[k][d], right += (double)t->accepted[k][d];
        if (!any++) fprintf(f, "%s%.2f tokens a step", before, cli_tau(t));
        fprintf(f, " (%s %.0f %% of the steps: %.2f tokens, %.0f %% right)",
                k == SALA_DRAFT_NGRAM ? "n-grams" : "trees",
                100 * (double)t->verifies[k] / cli_verifies(t),
                cli_rate((double)t->verify_tokens[k], (double)t->verifies[k]),
                100 * cli_rate(right, offered));
    }
}

static void cli_json_depths(const char *key, const int64_t *count) { // up to the last that is not 0
    int n = SALA_DEPTHS;
    while (n > 1 && !count[n - 1]) n--;
    printf(", \"%s\": [", key);
    for (int d = 1; d < n; d++) printf("%s%lld", d > 1 ? ", " : "", (long long)count[d]);
    printf("]");
}

// The same as a JSON object: sources that ran, depths 1, 2, ... that occurred.
static void cli_json_spec(const sala_options *o, const sala_timings *t) {
    printf("{\"spec\": \"%s\", ", o->spec ? o->spec : "auto");
    if (o->draft || o->spec_test)
        printf("\"tree\": \"%s\", ", o->spec_tree ? o->spec_tree : "by load");
    printf("\"tokens_per_step\": %.4f, \"draft_seconds\": %.6f, \"verify_seconds\": %.6f",
           cli_tau(t), t->draft_seconds, t->verify_seconds);
    for (int k = 0; k < 3; k++) {
        if (!t->verifies[k]) continue;
        printf(", \"%s\": {\"steps\": %lld, \"tokens\": %lld", cli_sources[k],
               (long long)t->verifies[k], (long long)t->verify_tokens[k]);
        if (k) cli_json_depths("offered", t->offered[k]);
        if (k) cli_json_depths("accepted", t->accepted[k]);
        printf("}");
    }
    printf("}");
}

// One line: what was read and written, and how fast.
static void cli_print_timings(const sala_timings *t) {
    double rate = cli_rate((double)(t->output_tokens - 1), t->decode_seconds);
    cli_fresh_line();
    fprintf(stderr, "sala: %s %lld tokens in %.2f s, %.0f t/s; ",
            t->output_tokens ? "prompt" : "read of the prompt:", (long long)t->prompt_tokens,
            t->prefill_seconds, cli_rate((double)t->prompt_tokens, t->prefill_seconds));
    if (t->reused_tokens)
        fprintf(stderr, "%lld more were there already; ", (long long)t->reused_tokens);
    if (!t->output_tokens) {
        fprintf(stderr, "no token yet\n");
        return;
    }
    fprintf(stderr, "first token after %.2f s; ", t->queue_seconds + t->prefill_seconds);
    fprintf(stderr, "%lld tokens in %.2f s", (long long)t->output_tokens, t->decode_seconds);
    if (rate > 0)
        fprintf(stderr, ", %.1f t/s, %.2f GB/s", rate,
                cli_rate((double)t->decode_bytes * 1e-9, t->decode_seconds));
    cli_print_spec(stderr, "; ", t);
    fprintf(stderr, "\n");
}

#endif
