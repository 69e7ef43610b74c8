/*  logits.c - `sala logits`: the logits of every position of a token sequence, as a file.

    Part of main.c's translation unit. */

#include "cli.h"

enum { LOGITS_TOKENS = CLI_OWN, LOGITS_OUT, LOGITS_MODE, LOGITS_HIDDEN, LOGITS_BLOCKS };

static const cli_option logits_options[] = {
    {LOGITS_TOKENS, "tokens", "IN.i32", "token ids: int32, little-endian"},
    {LOGITS_OUT, "out", "OUT.f32", "logits of every position: float32 [tokens, vocabulary]"},
    {LOGITS_MODE, "mode", "MODE",
     "prefill: by chunks (default); step: one by one, as when decoding"},
    {LOGITS_HIDDEN, "hidden", "FILE.f32",
     "also float32 [layers + 2, tokens, hidden]: embedding, layers, norm"},
    {LOGITS_BLOCKS, "blocks", "FILE.i32",
     "also int32 [sparse layers, tokens, K/V heads, top_k]: the blocks"},
    {0, NULL, NULL, NULL},
};

static const cli_command logits_command = {
    "logits",
    "logits [-m DIR] --tokens IN.i32 --out OUT.f32 [options]\n\n"
    "Writes the logits that the model gives at every position of a token sequence, for\n"
    "comparisons with another program. Blocks are ascending and padded with -1; -2 stands for\n"
    "dense attention. The files appear when they are complete, not before. The chunk size does\n"
    "not change a bit of them.\n",
    logits_options,
    CLI_ENGINE,
    "  sala logits --tokens prompt.i32 --out a.f32\n"
    "  sala logits --tokens prompt.i32 --out b.f32 --mode step\n",
};

typedef struct logits_job {
    const char *in, *paths[3];
    int step;
    cli_buffer tokens; // int32 [count]
    int64_t count;
    cli_output files[3]; // logits, hidden states, blocks
} logits_job;

// Is an output without a name, or the same file as another or as the input?
static int logits_paths_clash(const logits_job *job) {
    const char *all[4] = {job->in, job->paths[0], job->paths[1], job->paths[2]};
    for (int i = 0; i < 4; i++) {
        if (all[i] && (!*all[i] || (i > 0 && strcmp(all[i], "-") == 0))) return 1;
        for (int j = 0; all[i] && j < i; j++) {
            struct stat x, y;
            if (!all[j]) continue;
            if (strcmp(all[i], all[j]) == 0) return 1;
            if (stat(all[i], &x) < 0 || stat(all[j], &y) < 0 || !S_ISREG(x.st_mode)) continue;
            if (x.st_dev == y.st_dev && x.st_ino == y.st_ino) return 1;
        }
    }
    return 0;
}

static int logits_arguments(cli_args *a, logits_job *job) { // returns 0, or -1: return a->code
    int id;
    while ((id = cli_next(a)) > 0) {
        if (id == LOGITS_TOKENS) job->in = a->value;
        if (id == LOGITS_OUT) job->paths[0] = a->value;
        if (id == LOGITS_HIDDEN) job->paths[1] = a->value;
        if (id == LOGITS_BLOCKS) job->paths[2] = a->value;
        if (id != LOGITS_MODE) continue;
        job->step = strcmp(a->value, "step") == 0;
        if (!job->step && strcmp(a->value, "prefill") != 0) {
            a->code = cli_fail(CLI_USAGE, "--mode: '%s' is neither prefill nor step", a->value);
            return -1;
        }
    }
    if (id < 0) return -1;
    if (!job->in || !job->paths[0])
        a->code = cli_fail(CLI_USAGE, "logits needs --tokens and --out");
    else if (logits_paths_clash(job))
        a->code =
            cli_fail(CLI_USAGE, "--tokens, --out, --hidden and --blocks must name four files");
    else
        a->code = cli_read_file(job->in, &job->tokens);
    job->count = (int64_t)(job->tokens.size / sizeof(int32_t));
    if (a->code == CLI_OK && (job->count == 0 || job->tokens.size % sizeof(int32_t)))
        a->code = cli_fail(CLI_FAILED, "%s: %zu bytes are not one or more int32 tokens", job->in,
                           job->tokens.size);
    // The engine is made as large as this one sequence needs, where the options do not say
    // otherwise.
    if (!a->options.chunk) a->options.chunk = 512;
    if (!a->options.max_sequences) a->options.max_sequences = 1;
    if (!a->options.context) a->options.context = job->count + 1;
    a->options.logits_rows = a->options.chunk;
    if (a->code == CLI_OK) a->code = cli_one_prompt(a);
    a->options.hidden_states = job->paths[1] || job->paths[2];
    return a->code == CLI_OK ? 0 : -1;
}

// Rows of `width` elements of 4 bytes for `planes` layers, each at its place in [planes, count,
// width].
static int logits_planes(cli_output *file, const void *data, int64_t planes, int64_t count,
                         int64_t width, const sala_event *e) {
    int64_t rows = e->row_count * width * 4;
    int code = CLI_OK;
    for (int64_t p = 0; p < planes && code == CLI_OK; p++) {
        int64_t to = (p * count + e->first_position) * width * 4;
        code = cli_output_write(file, to, (const char *)data + p * rows, (size_t)rows);
    }
    return code;
}

static int logits_rows(logits_job *job, const sala_info *i, const sala_event *e) {
    int64_t list = (int64_t)i->kv_heads * i->top_k;
    int code = logits_planes(&job->files[0], e->logits, 1, job->count, i->vocab, e);
    if (code == CLI_OK && job->paths[1])
        code = logits_planes(&job->files[1], e->hidden, i->layers + 2, job->count, i->hidden, e);
    if (code == CLI_OK && job->paths[2])
        code = logits_planes(&job->files[2], e->blocks, i->sparse_layers, job->count, list, e);
    return code;
}

static int logits_compute(cli_args *a, sala *engine, logits_job *job) {
    const int32_t *tokens = (const int32_t *)(void *)job->tokens.data;
    sala_request request = a->request;
    sala_error err;
    sala_event e;
    sala_info info;
    int64_t done = 0;
    int code = CLI_OK, step = 1;
    double start = cli_now();
    sala_get_info(engine, &info);
    for (int64_t i = 0; i < job->count; i++)
        if (tokens[i] < 0 || tokens[i] >= info.vocab)
            return cli_fail(CLI_FAILED, "%s: token %lld is %d, but the vocabulary has %d tokens",
                            job->in, (long long)i, tokens[i], info.vocab);
    request.tokens = tokens;
    request.token_count = job->step ? 1 : job->count;
    request.force = job->step ? tokens + 1 : NULL;
    request.force_count = job->step ? job->count - 1 : 0;
    request.max_tokens = job->step ? job->count : 1; // the last one is chosen, never processed
    request.ignore_eos = 1;
    request.want_rows = job->step ? SALA_ROWS_ALL : SALA_ROWS_PROMPT;
    if (sala_submit(engine, &request, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    while (code == CLI_OK && (step = sala_step(engine, &err)) > 0) {
        while (code == CLI_OK && sala_next_event(engine, &e)) {
            if (e.type != SALA_EVENT_ROWS) continue;
            code = logits_rows(job, &info, &e);
            done += e.row_count;
            cli_progress_since("computing logits", (double)done / (double)job->count, start);
        }
        if (cli_signal && code == CLI_OK) code = 128 + (int)cli_signal;
    }
    cli_progress_clear();
    if (step < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    if (code == CLI_OK && done != job->count)
        code = cli_fail(CLI_FAILED, "only %lld of %lld positions were computed", (long long)done,
                        (long long)job->count);
    return code;
}

static int sala_logits(int argc, char **argv) {
    cli_args a;
    logits_job job = {0};
    sala *engine = NULL;
    cli_start(&a, &logits_command, argc, argv);
    if (logits_arguments(&a, &job) == 0) engine = cli_open(&a);
    for (int i = 0; engine && i < 3 && a.code == CLI_OK; i++)
        if (job.paths[i]) a.code = cli_output_open(&job.files[i], job.paths[i]);
    if (engine && a.code == CLI_OK) a.code = logits_compute(&a, engine, &job);
    for (int i = 0; i < 3; i++)
        if (job.files[i].path) a.code = cli_output_close(&job.files[i], a.code);
    sala_close(engine);
    cli_free(&job.tokens);
    cli_end(&a);
    return a.code;
}
