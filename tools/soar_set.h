/*  soar_set.h - the requests of a SOAR set: read from JSON lines, counted by the model's tokenizer, in the order in which
    the toolkit sends them. Included by bench_soar.c. */
#ifndef SALA_SOAR_SET_H
#define SALA_SOAR_SET_H

#include "cli.h"
#include "soar.h"

static const sala_hooks soar_env; // libc's memory, no log

typedef struct soar_item { // one request
    int line;
    char *text; // [bytes] the question; NULL with a model that has no words
    size_t bytes;
    int64_t prompt, output, chat; // tokens: raw prompt, forced answer, prompt in the template
    cli_buffer truth[2], got;     // int32: what the first run of each row gave, what this one gives
    double sent, first, last;     // seconds; of the first and the latest token
    int64_t step, read;           // of the latest token; prompt tokens read
} soar_item;

typedef struct soar_set {
    const char *path;
    soar_item *items; // [count] in the order of sending
    int count, left_out;
    uint64_t hash; // of all that the requests are
} soar_set;

static int soar_bad(const char *path, const soar_item *it, const char *what) {
    return cli_fail(CLI_FAILED, "%s:%d: %s", path, it->line, what);
}

#define SOAR_MOST ((int64_t)1 << 30) // tokens of a prompt or an answer: what a context can be

static int64_t soar_number(const sala__json *j, const char *key) { // 0: there is none that can be
    const sala__json_node *n = sala__json_at(j, sala__json_get(j, 0, key));
    int fits = n->type == SALA__NUMBER && n->is_integer && n->integer > 0;
    return fits && n->integer <= SOAR_MOST ? n->integer : 0;
}

// The prompt is the first of three names that is not empty, as the toolkit has it. -1: there is none.
static int soar_question(const sala__json *j) {
    static const char *const names[] = {"question", "input", "prompt"};
    for (int i = 0; i < 3; i++) {
        int node = sala__json_get(j, 0, names[i]);
        if (sala__json_text(j, node) && sala__json_at(j, node)->text_size) return node;
    }
    return -1;
}

// Tokens of a text, raw or as a question in the template, into *count. Returns an exit code.
static int soar_count(const sala__tokenizer *t, const char *text, size_t bytes, int chat,
                      int64_t *count) {
    int32_t *tokens = NULL;
    sala_error err;
    *count = chat ? sala__chat_turn(t, "user", text, bytes, 1, 1, &tokens, &err)
                  : sala__encode(t, text, bytes, SALA_ADD_BOS | SALA_PARSE_SPECIAL, &tokens, &err);
    sala__release(t->env, tokens);
    return *count < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

// One line of the file. `t` NULL: a model without words takes the lengths alone. Returns an exit code.
static int soar_line(const sala__tokenizer *t, const sala__json *j, const char *path,
                     soar_item *it) {
    int question = soar_question(j), answer = sala__json_get(j, 0, "model_response");
    it->prompt = soar_number(j, "prompt_tokens");
    it->output = soar_number(j, "completion_tokens");
    if (!t && !(it->prompt && it->output))
        return soar_bad(
            path, it,
            "lacks prompt_tokens or completion_tokens, from 1 to 2^30: a model without a tokenizer "
            "needs both");
    if (!t) return CLI_OK;
    if (question < 0) return soar_bad(path, it, "lacks a question (or input, or prompt)");
    if (!sala__json_text(j, answer)) return soar_bad(path, it, "lacks a model_response");
    it->bytes = sala__json_at(j, question)->text_size;
    it->text = (char *)cli_resize(NULL, it->bytes + 1);
    memcpy(it->text, sala__json_text(j, question), it->bytes + 1);
    int code = soar_count(t, it->text, it->bytes, 0, &it->prompt);
    if (code == CLI_OK) code = soar_count(t, it->text, it->bytes, 1, &it->chat);
    return code ? code
                : soar_count(t, sala__json_text(j, answer), sala__json_at(j, answer)->text_size, 0,
                             &it->output);
}

// All lines of the file, in its order; `at`: its text, with a zero behind. Returns an exit code.
static int soar_lines(soar_set *x, const sala__tokenizer *t, const char *at, size_t left) {
    sala_error err;
    int code = CLI_OK, number = 1;
    for (size_t bytes, all; code == CLI_OK && left; at += all, left -= all, number++) {
        sala__json j;
        const char *end = (const char *)memchr(at, '\n', left);
        bytes = end ? (size_t)(end - at) : left;
        all = bytes + (end != NULL);
        if (strspn(at, " \t\r") >= bytes) continue; // blank
        char where[4200];
        snprintf(where, sizeof where, "%s:%d", x->path, number);
        if (sala__json_parse(&soar_env, where, at, bytes, &j, &err) < 0)
            return cli_fail(CLI_FAILED, "%s", err.text);
        x->items = (soar_item *)cli_resize(x->items, (size_t)(x->count + 1) * sizeof *x->items);
        soar_item *it = (soar_item *)memset(&x->items[x->count++], 0, sizeof *it);
        it->line = number;
        code = soar_line(t, &j, x->path, it);
        sala__json_free(&j);
    }
    return code;
}

static void soar_drop(soar_item *it) {
    free(it->text);
    cli_free(&it->truth[0]);
    cli_free(&it->truth[1]);
    cli_free(&it->got);
}

static void soar_hash(soar_set *x, const void *bytes, size_t count) { // FNV-1a
    for (size_t i = 0; i < count; i++)
        x->hash = (x->hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

// The order of the toolkit: shuffle all, leave out what has less than two tokens, take so many as are wanted.
static int soar_order(soar_set *x, int wanted) {
    int n = x->count;
    int32_t *order = (int32_t *)cli_resize(NULL, (size_t)n * sizeof *order);
    soar_item *sorted = (soar_item *)cli_resize(NULL, (size_t)n * sizeof *sorted);
    soar_shuffle(1, order, n);
    x->hash = 0xcbf29ce484222325u;
    x->count = 0;
    for (int i = 0; i < n; i++) {
        soar_item *it = &x->items[order[i]];
        int full = x->count == wanted;
        x->left_out += !full && (it->prompt < 2 || it->output < 2);
        if (full || it->prompt < 2 || it->output < 2) {
            soar_drop(it);
            continue;
        }
        sorted[x->count++] = *it;
        soar_hash(x, &it->prompt, sizeof it->prompt);
        soar_hash(x, &it->output, sizeof it->output);
        soar_hash(x, it->text, it->bytes);
    }
    free(order);
    free(x->items);
    x->items = sorted;
    return x->count
               ? CLI_OK
               : cli_fail(CLI_FAILED, "%s: no request with two tokens and two of answer is in it",
                          x->path);
}

// The set of a file, its first `wanted` requests (0: all). `model`: whose tokenizer counts; NULL: nobody's. Returns an
// exit code.
static int soar_read(soar_set *x, const char *path, int wanted, const char *model,
                     const char *chat_template) {
    cli_buffer file = {0};
    sala__tokenizer t;
    sala_error err;
    memset(&t, 0, sizeof t);
    x->path = path;
    int code = cli_read_file(path, &file);
    if (code == CLI_OK && model &&
        sala__tokenizer_open(&soar_env, model, 1 << 20, chat_template, &t, &err) < 0)
        code = cli_fail(CLI_FAILED, "%s", err.text);
    if (code == CLI_OK) code = soar_lines(x, model ? &t : NULL, file.data, file.size);
    if (model) sala__tokenizer_close(&t);
    cli_free(&file);
    return code ? code : soar_order(x, wanted ? wanted : x->count);
}

// Where the command line is silent: memory for the `most` largest requests at once, or for what fits; requests wait for
// each other then. `natural_tokens`: the longest natural answer, 0: as the forced one.
static void soar_plan(const soar_set *x, cli_args *a, const char *model, int most,
                      int64_t natural_tokens) {
    sala_options *o = &a->options;
    double *need = (double *)cli_resize(NULL, (size_t)x->count * sizeof *need), sum = 0;
    for (int i = 0; i < x->count; i++) { // tokens of the longer of its two rows, in whole pages
        const soar_item *it = &x->items[i];
        int64_t raw = it->prompt + it->output,
                natural = it->chat + (natural_tokens ? natural_tokens : it->output);
        need[i] = ceil((double)(it->text && natural > raw ? natural : raw) / 64) * 64;
    }
    soar_sort(need, x->count);
    if (most > 256) most = 256;
    if (!o->max_sequences) o->max_sequences = most;
    if (!o->context) o->context = (int64_t)need[x->count - 1];
    for (int i = 0; i < most; i++) sum += need[x->count - 1 - i];
    free(need);
    if (o->kv_tokens) return;
    sala_info info;
    sala_error err;
    o->kv_tokens = (int64_t)fmax(sum, (double)o->context);
    while (o->kv_tokens > o->context && sala_plan(model, o, &info, &err) == SALA_E_MEMORY)
        o->kv_tokens = (int64_t)fmax(0.8 * (double)o->kv_tokens, (double)o->context);
}

#endif
