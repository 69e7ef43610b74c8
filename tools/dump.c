/*  dump.c - `sala dump-features`: what an EAGLE-3 head is trained with, out of the model that runs.

    Part of main.c's translation unit (it reads JSON with the parser inside sala.h).

    A sample is a line of --data: tokens, and which of them are under the loss. The engine reads it as
    it reads a prompt, with the weights, the prefill and the sparse attention of a deployment, and shows
    what tools/train_draft.py wants to see. A file of --out, features-00000.safetensors ..., has T tokens
    of n samples one after the other:

        starts     I64 [n + 1]   where samples begin, and T
        ids        I32 [T]
        features   BF16 [T, 3 H] residual stream behind the three layers
        hidden     BF16 [T, H]   what the head multiplies: normed, divided by H / dim_model_base
        loss_mask  U8 [T]        1: this token is to be predicted

    and in __metadata__ all that the numbers depend on. A sample never lies in two files. What a file
    holds follows from data and options alone, so an interrupted run goes on behind the last whole
    file, and ends with the bytes of one that was never interrupted. */

#include "cli.h"

#include <dirent.h>
#include <sys/file.h>

enum {
    DUMP_DATA = CLI_OWN,
    DUMP_OUT,
    DUMP_LAYERS,
    DUMP_MAX,
    DUMP_LIMIT,
    DUMP_SHARD,
    DUMP_REGENERATE,
    DUMP_ANSWER,
    DUMP_TEMPERATURE,
    DUMP_SEED,
    DUMP_PARALLEL
};

static const cli_option dump_options[] = {
    {DUMP_DATA, "data", "FILE", "samples: JSON lines, see above"},
    {DUMP_OUT, "out", "DIR", "folder of the shards; made if it is not there"},
    {DUMP_LAYERS, "layers", "A,B,C",
     "three layers, from 0 (default: those of --draft, else 1, L/2 - 1, L - 4 of the model's L)"},
    {DUMP_MAX, "max-tokens", "N", "cut samples to N tokens (default: they must fit the context)"},
    {DUMP_LIMIT, "limit", "N", "only the first N samples"},
    {DUMP_SHARD, "shard-tokens", "N", "tokens of a shard at most, or one sample (default 65536)"},
    {DUMP_REGENERATE, "regenerate", NULL, "the model itself writes all answers anew"},
    {DUMP_ANSWER, "answer-tokens", "N", "longest answer that it writes (default 1024)"},
    {DUMP_TEMPERATURE, "temperature", "X", "of its answers; 0: always the likeliest (default 0)"},
    {DUMP_SEED, "seed", "N", "of its answers (default 0)"},
    {DUMP_PARALLEL, "parallel", "N", "answers in flight at once (default 8)"},
    {CLI_JSON, "json", NULL, "print one JSON object at the end"},
    {0, NULL, NULL, NULL},
};

static const cli_command dump_command = {
    "dump-features",
    "dump-features [-m DIR] --data FILE --out DIR [options]\n\n"
    "Writes what a draft head is trained with: of every token the outputs of three layers and\n"
    "what the head of the model reads, as safetensors. A sample is a line of FILE:\n\n"
    "  {\"tokens\": [1, 5, ...], \"loss_mask\": [0, 1, ...]}   no mask: all is under loss\n"
    "  {\"text\": \"...\"}                                    all is under loss\n"
    "  {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, ...]}\n"
    "      by the chat template; under loss is what the assistant says, with its end token\n"
    "  {\"prompt\": \"...\", \"answer\": \"...\"}   raw text; the answer is under loss\n"
    "  {\"prompt\": \"...\"}   with --regenerate; so are messages that end with a question\n\n"
    "The same command goes on behind the last whole shard; with other options, another model\n"
    "or other data it refuses to. Take the model, --prefill and --dense-len to be deployed.\n",
    dump_options,
    CLI_ENGINE,
    "  sala dump-features --data chats.jsonl --out features\n"
    "  sala dump-features --data prompts.jsonl --out features --regenerate --temperature 0.7\n"
    "  sala dump-features -m /models/SALA-NVFP4 --data chats.jsonl --out /data/f --max-tokens "
    "4096\n",
};

enum { DUMP_TOKENS, DUMP_TEXT, DUMP_MESSAGES, DUMP_PROMPT, DUMP_KINDS };

typedef struct dump_sample {
    char where[512];  // "FILE:LINE"
    int64_t line;     // from 1
    sala__json json;  // the line
    int kind, node;   // DUMP_*; of messages: the next one
    cli_buffer token; // int32 [n] so far
    cli_buffer mask;  // uint8 [n]
    int64_t request;  // that writes an answer now; 0: none
    int done;
} dump_sample;

typedef struct dump_job {
    cli_args *args;
    const char *data, *out;
    int64_t max_tokens, limit, shard_tokens, answer_tokens, parallel;
    int regenerate, lock; // lock: of the folder
    sala *engine;
    sala_info info;
    int64_t most;                 // tokens of a sample
    sala__file file;              // the data,
    size_t at;                    // and where reading is:
    int64_t line, samples, total; // lines and samples so far; samples in all
    // Samples that were read: the first `taken`, of `tokens`, are the shard, the others wait for their
    // answers. Lines up to last_line are in it or, `skipped` since the last shard, were left out.
    dump_sample **queue;
    int64_t count, taken, tokens, skipped, last_line;
    char *settings; // all that the numbers depend on, as members of JSON
    int64_t shards, resumed;
    int64_t sums[4], bytes; // of them all, see dump_sums
    cli_output output;
    int64_t hidden_at, features_at; // in the file: of the first token of the sample that is read
    int64_t reading;                // its request
    cli_buffer rows;                // of one event, in the order of the file
    double start;
} dump_job;

static const char *const dump_sums[] = {"samples", "tokens", "loss_tokens", "skipped"};
static const sala__env dump_env = {NULL, NULL, NULL, NULL}; // the C library's allocator

static int64_t dump_length(const dump_sample *s) {
    return (int64_t)s->mask.size;
}

/* ---- samples: JSON lines, tokens, masks ------------------------------------------------------ */

static int dump_bad(const dump_sample *s, const char *what) {
    return cli_fail(CLI_FAILED, "%s: %s", s->where, what);
}

// The tokens of a line as they are; `add` 0: only look at them.
static int dump_take_tokens(const dump_job *job, dump_sample *s, int add) {
    const sala__json *j = &s->json;
    int mask = sala__json_get(j, 0, "loss_mask"), tokens = sala__json_get(j, 0, "tokens");
    int count = sala__json_at(j, tokens)->count, node = sala__json_at(j, tokens)->child;
    if (sala__json_at(j, tokens)->type != SALA__ARRAY || count < 1)
        return dump_bad(s, "tokens must be a list of one or more token ids");
    if (mask >= 0 && (j->nodes[mask].type != SALA__ARRAY || j->nodes[mask].count != count))
        return cli_fail(CLI_FAILED, "%s: loss_mask must be a list as long as tokens: %d, not %d",
                        s->where, count, j->nodes[mask].count);
    int under = mask >= 0 ? j->nodes[mask].child : -1;
    for (int i = 0; i < count; i++, node = j->nodes[node].next) {
        const sala__json_node *t = &j->nodes[node], *m = sala__json_at(j, under);
        int32_t id = (int32_t)t->integer;
        uint8_t one = mask < 0 || m->number != 0;
        if (t->type != SALA__NUMBER || !t->is_integer || t->integer < 0 ||
            t->integer >= job->info.vocab)
            return cli_fail(CLI_FAILED, "%s: token %d of the list is none of the %d of the model",
                            s->where, i, job->info.vocab);
        if (mask >= 0 && m->type != SALA__BOOL &&
            (m->type != SALA__NUMBER || (m->number != 0 && m->number != 1)))
            return dump_bad(s, "loss_mask must hold 0 and 1");
        if (mask >= 0) under = m->next;
        if (!add) continue;
        cli_append(&s->token, &id, sizeof id);
        cli_append(&s->mask, &one, 1);
    }
    return CLI_OK;
}

static int dump_is_answer(const sala__json *j, int message) {
    return sala__json_is(j, sala__json_get(j, message, "role"), "assistant");
}

static int dump_check_messages(const dump_job *job, const dump_sample *s) {
    const sala__json *j = &s->json;
    int before = -1, answers = 0;
    if (sala__json_at(j, s->node)->type != SALA__ARRAY || j->nodes[s->node].count < 1)
        return dump_bad(s, "messages must be a list of one or more messages");
    for (int n = j->nodes[s->node].child; n >= 0; before = n, n = j->nodes[n].next) {
        int role = sala__json_get(j, n, "role"), answer = dump_is_answer(j, n);
        if (!sala__json_text(j, sala__json_get(j, n, "content")) ||
            (!answer && !sala__json_is(j, role, "user") && !sala__json_is(j, role, "system")))
            return dump_bad(s, "a message needs a content and the role system, user or assistant");
        if (answer && job->regenerate && (before < 0 || dump_is_answer(j, before)))
            return dump_bad(s, "an answer can be written again only behind a question");
        answers += answer;
    }
    if (!answers && !job->regenerate)
        return dump_bad(s,
                        "no message is the assistant's: use --regenerate, and the model answers");
    return CLI_OK;
}

// Parse a line, and find everything that is wrong with it without its tokens being known.
static int dump_parse(const dump_job *job, dump_sample *s, const char *line, size_t size) {
    sala_error err;
    static const char *const kinds[] = {"tokens", "text", "messages", "prompt"};
    const sala__json *j = &s->json;
    int found = 0;
    if (sala__json_parse(&dump_env, s->where, line, size, &s->json, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    for (int k = 0; k < DUMP_KINDS; k++) {
        int node = sala__json_get(j, 0, kinds[k]);
        if (node < 0) continue;
        found++;
        s->kind = k;
        s->node = node;
    }
    if (found != 1) return dump_bad(s, "needs one of tokens, text, messages and prompt");
    if (job->regenerate && s->kind < DUMP_MESSAGES)
        return dump_bad(s, "--regenerate needs messages or a prompt; this has no answer to write");
    if (s->kind == DUMP_TOKENS) return dump_take_tokens(job, s, 0);
    if (s->kind == DUMP_MESSAGES) return dump_check_messages(job, s);
    if (!sala__json_text(j, s->node)) return dump_bad(s, "text and prompt must be strings");
    if (s->kind == DUMP_TEXT && !j->nodes[s->node].text_size)
        return dump_bad(s, "the text is empty");
    if (s->kind == DUMP_PROMPT && !job->regenerate &&
        !sala__json_text(j, sala__json_get(j, 0, "answer")))
        return dump_bad(s, "needs an answer beside the prompt, or --regenerate");
    return CLI_OK;
}

// Append tokens, of which those from `from` to `to` - 1 are under the loss.
static void dump_add(dump_sample *s, const int32_t *tokens, int64_t n, int64_t from, int64_t to) {
    cli_append(&s->token, tokens, (size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) {
        uint8_t one = i >= from && i < to;
        cli_append(&s->mask, &one, 1);
    }
}

// The model is to write what follows, if there is room for it.
static int dump_ask(dump_job *job, dump_sample *s) {
    sala_request request = job->args->request;
    sala_error err;
    int64_t room = job->most - dump_length(s);
    if (room < job->answer_tokens && !job->max_tokens)
        return cli_fail(CLI_FAILED,
                        "%s: %lld tokens and an answer of %lld do not fit the context of %lld: "
                        "raise --context, lower --answer-tokens or let --max-tokens cut it",
                        s->where, (long long)dump_length(s), (long long)job->answer_tokens,
                        (long long)job->info.context);
    if (room < 1) return s->done = 1, CLI_OK;
    request.tokens = (const int32_t *)(void *)s->token.data;
    request.token_count = dump_length(s);
    request.max_tokens = room < job->answer_tokens ? room : job->answer_tokens;
    request.seed ^= sala_mix64((uint64_t)s->line); // samples draw different numbers
    s->request = sala_submit(job->engine, &request, &err);
    return s->request < 0 ? cli_fail(CLI_FAILED, "%s: %s", s->where, err.text) : CLI_OK;
}

// What closes an answer and is not there yet: as in a chat, its end token and the end of the line.
static int dump_close_answer(dump_job *job, dump_sample *s, sala_error *err) {
    static const char end[] = "<|im_end|>\n";
    int32_t *tokens, last = ((const int32_t *)(void *)s->token.data)[dump_length(s) - 1];
    int64_t n = sala_tokenize(job->engine, end, strlen(end), SALA_PARSE_SPECIAL, &tokens, err);
    if (n < 0) return -1;
    int skip = n > 0 && tokens[0] == last;
    dump_add(s, tokens + skip, n - skip, 0, 0);
    sala_free(job->engine, tokens);
    return 0;
}

// One turn. An answer begins with what a question ends with where an answer is to follow.
static int dump_turn(dump_job *job, dump_sample *s, int message, int reply, sala_error *err) {
    static const char head[] = "<|im_start|>assistant\n";
    const sala__json *j = &s->json;
    const sala__json_node *text = &j->nodes[sala__json_get(j, message, "content")];
    const char *role = sala__json_text(j, sala__json_get(j, message, "role"));
    int32_t *tokens, *start = NULL;
    int64_t first = dump_length(s) == 0, from = 0, to = 0, m = 0;
    int64_t n = sala_chat_turn(job->engine, role, j->strings.data + text->text, text->text_size,
                               (int)first, reply, &tokens, err);
    if (n < 0) return -1;
    if (dump_is_answer(j, message)) {
        m = sala_tokenize(job->engine, head, strlen(head), SALA_PARSE_SPECIAL, &start, err);
        int64_t bos = first && n > 0 && tokens[0] == job->info.bos;
        for (to = n; to > 0 && tokens[to - 1] != job->engine->tokenizer.im_end;) to--;
        for (from = bos; from < to && from - bos < m && tokens[from] == start[from - bos];) from++;
    }
    if (m >= 0) dump_add(s, tokens, n, from, to);
    sala_free(job->engine, start);
    sala_free(job->engine, tokens);
    return m < 0 ? -1 : 0;
}

// The conversation up to its end, or to the next answer that the model writes.
static int dump_talk(dump_job *job, dump_sample *s) {
    const sala__json *j = &s->json;
    sala_error err;
    while (s->node >= 0) {
        int message = s->node, next = j->nodes[message].next;
        int reply = job->regenerate && (next < 0 || dump_is_answer(j, next));
        if (s->mask.size && s->mask.data[s->mask.size - 1] && dump_close_answer(job, s, &err) < 0)
            return dump_bad(s, err.text);
        if (dump_turn(job, s, message, reply, &err) < 0) return dump_bad(s, err.text);
        s->node = reply && next >= 0 ? j->nodes[next].next : next; // what it answered is left out
        if (reply) return dump_ask(job, s);
    }
    s->done = 1;
    return CLI_OK;
}

// A text, or a prompt and its answer: what both have in common with the prompt alone is not under loss.
static int dump_text(dump_job *job, dump_sample *s) {
    const int flags = SALA_ADD_BOS | SALA_PARSE_SPECIAL;
    const sala__json *j = &s->json;
    const sala__json_node *a = &j->nodes[s->node],
                          *b = sala__json_at(j, sala__json_get(j, 0, "answer"));
    int32_t *prompt = NULL, *tokens = NULL;
    int64_t from = 0, m = 0, n;
    sala_error err;
    cli_buffer all = {0};
    cli_append(&all, j->strings.data + a->text, a->text_size);
    if (s->kind == DUMP_PROMPT) {
        m = sala_tokenize(job->engine, all.data, all.size, flags, &prompt, &err);
        if (!job->regenerate) cli_append(&all, j->strings.data + b->text, b->text_size);
    }
    n = m < 0 ? -1 : sala_tokenize(job->engine, all.data, all.size, flags, &tokens, &err);
    cli_free(&all);
    if (n < 0) return sala_free(job->engine, prompt), dump_bad(s, err.text);
    while (from < m && from < n && prompt[from] == tokens[from]) from++;
    dump_add(s, tokens, n, from, n);
    sala_free(job->engine, prompt);
    sala_free(job->engine, tokens);
    if (dump_length(s) == 0) return dump_bad(s, "the sample is empty");
    if (s->kind == DUMP_PROMPT && job->regenerate) return dump_ask(job, s);
    return s->done = 1, CLI_OK;
}

static void dump_free_sample(dump_sample *s) {
    sala__json_free(&s->json);
    cli_free(&s->token);
    cli_free(&s->mask);
    free(s);
}

// The next line that is not blank. Returns 0 at the end, or where --limit ends it.
static int dump_next_line(dump_job *job, dump_sample *s, const char **line, size_t *size) {
    const char *data = (const char *)job->file.data;
    size_t end = (size_t)job->file.size;
    while (job->at < end && (!job->limit || job->samples < job->limit)) {
        const char *from = data + job->at,
                   *newline = (const char *)memchr(from, '\n', end - job->at);
        *line = from;
        *size = newline ? (size_t)(newline - from) : end - job->at;
        job->at += *size + 1;
        job->line++;
        size_t blank = 0;
        while (blank < *size && strchr(" \t\r", from[blank]) && from[blank]) blank++;
        if (blank == *size) continue;
        memset(s, 0, sizeof *s);
        s->line = job->line;
        snprintf(s->where, sizeof s->where, "%.480s:%lld", job->data, (long long)job->line);
        job->samples++;
        return 1;
    }
    return 0;
}

// See that every line is right before anything is computed, and count them.
static int dump_check_data(dump_job *job) {
    dump_sample s;
    const char *line;
    size_t size;
    int code = CLI_OK;
    while (code == CLI_OK && dump_next_line(job, &s, &line, &size)) {
        code = dump_parse(job, &s, line, size);
        sala__json_free(&s.json);
        if (cli_signal && code == CLI_OK) code = 128 + (int)cli_signal;
    }
    job->total = job->samples;
    job->at = 0;
    job->line = job->samples = 0;
    return code != CLI_OK || job->total
               ? code
               : cli_fail(CLI_FAILED, "%s: there is no sample in it", job->data);
}

// Read one more sample to the end of the queue. Returns an exit code.
static int dump_read(dump_job *job, const char *line, size_t size, dump_sample *read) {
    dump_sample *s = (dump_sample *)cli_resize(NULL, sizeof *s);
    *s = *read;
    job->queue = (dump_sample **)cli_resize(job->queue, (size_t)(job->count + 1) * sizeof(s));
    job->queue[job->count++] = s;
    s->json.where = s->where;
    int code = dump_parse(job, s, line, size);
    if (code != CLI_OK) return code;
    if (s->kind == DUMP_MESSAGES) {
        s->node = s->json.nodes[s->node].child;
        return dump_talk(job, s);
    }
    if (s->kind != DUMP_TOKENS) return dump_text(job, s);
    s->done = 1;
    return dump_take_tokens(job, s, 1);
}

/* ---- shards: safetensors --------------------------------------------------------------------- */

static void dump_path(const dump_job *job, char path[4096]) { // of the next shard
    snprintf(path, 4096, "%.4000s/features-%05lld.safetensors", job->out, (long long)job->shards);
}

// Bytes of the tensors of n samples of `tokens` tokens; at[i] is where the i-th begins.
static int64_t dump_places(const dump_job *job, int64_t n, int64_t tokens, int64_t at[5]) {
    const int64_t h = job->info.hidden;
    at[0] = 0;
    at[1] = 8 * (n + 1);
    at[2] = at[1] + 4 * tokens;
    at[3] = at[2] + 6 * h * tokens;
    at[4] = at[3] + 2 * h * tokens;
    return at[4] + tokens;
}

// The header with its length: the settings, `sums`, the last line, the model's name, then the tensors.
static void dump_header(const dump_job *job, const int64_t sums[4], cli_buffer *out) {
    static const char *const names[] = {"starts", "ids", "features", "hidden", "loss_mask"},
                             *const dtypes[] = {"I64", "I32", "BF16", "BF16", "U8"};
    const int64_t rows[] = {job->taken + 1, job->tokens, job->tokens, job->tokens, job->tokens},
                  width[] = {0, 0, 3 * job->info.hidden, job->info.hidden, 0};
    const char *slash = strrchr(job->args->model, '/'),
               *model = slash && slash[1] ? slash + 1 : job->args->model;
    int64_t at[6];
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) exit(cli_fail(CLI_FAILED, "out of memory"));
    at[5] = dump_places(job, job->taken, job->tokens, at);
    fprintf(f, "{\"__metadata__\": {%s", job->settings);
    for (int i = 0; i < 4; i++) fprintf(f, ", \"%s\": \"%lld\"", dump_sums[i], (long long)sums[i]);
    fprintf(f, ", \"last_line\": \"%lld\", \"model\": ", (long long)job->last_line);
    cli_json_text(f, model, strlen(model));
    fprintf(f, "}");
    for (int i = 0; i < 5; i++) {
        fprintf(f, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [%lld", names[i], dtypes[i],
                (long long)rows[i]);
        if (width[i]) fprintf(f, ", %lld", (long long)width[i]);
        fprintf(f, "], \"data_offsets\": [%lld, %lld]}", (long long)at[i], (long long)at[i + 1]);
    }
    fprintf(f, "}%*s", (int)(-ftell(f) - 1) & 7, ""); // the data begin at a multiple of 8
    fclose(f);
    uint64_t length = size;
    cli_append(out, &length, 8);
    cli_append(out, text, size);
    free(text);
}

// Header, starts, ids and mask of the shard; where the others go is noted.
static int dump_begin_shard(dump_job *job, const char *path) {
    int64_t at[5], start = 0, sums[4] = {job->taken, job->tokens, 0, job->skipped};
    cli_buffer header = {0}, starts = {0}, ids = {0}, mask = {0};
    for (int64_t i = 0; i < job->taken; i++) {
        const dump_sample *s = job->queue[i];
        cli_append(&starts, &start, sizeof start);
        cli_append(&ids, s->token.data, s->token.size);
        cli_append(&mask, s->mask.data, s->mask.size);
        start += dump_length(s);
    }
    cli_append(&starts, &start, sizeof start);
    for (size_t i = 0; i < mask.size; i++) sums[2] += mask.data[i];
    dump_header(job, sums, &header);
    job->bytes += dump_places(job, job->taken, job->tokens, at) + (int64_t)header.size;
    const cli_buffer *const parts[] = {&header, &starts, &ids, &mask};
    const int64_t data = (int64_t)header.size, to[] = {0, data, data + at[1], data + at[4]};
    int code = cli_output_open(&job->output, path);
    for (int i = 0; i < 4 && code == CLI_OK; i++)
        code = cli_output_write(&job->output, to[i], parts[i]->data, parts[i]->size);
    for (int i = 0; i < 4; i++) job->sums[i] += sums[i];
    job->features_at = data + at[2];
    job->hidden_at = data + at[3];
    cli_free(&header), cli_free(&starts), cli_free(&ids), cli_free(&mask);
    return code;
}

// Rows of the sample that is read, to their places.
static int dump_rows(dump_job *job, const sala_event *e) {
    const size_t rows = (size_t)e->row_count, bytes = 2 * (size_t)job->info.hidden;
    const char *from = (const char *)(const void *)e->features;
    const int64_t at = e->first_position * (int64_t)bytes;
    if (job->rows.capacity < 3 * rows * bytes) {
        job->rows.capacity = 3 * rows * bytes;
        job->rows.data = (char *)cli_resize(job->rows.data, job->rows.capacity);
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < 3; i++)
            memcpy(job->rows.data + (3 * r + i) * bytes, from + (i * rows + r) * bytes, bytes);
    int code =
        cli_output_write(&job->output, job->features_at + 3 * at, job->rows.data, 3 * rows * bytes);
    return code ? code
                : cli_output_write(&job->output, job->hidden_at + at, from + 3 * rows * bytes,
                                   rows * bytes);
}

/* ---- the engine ------------------------------------------------------------------------------ */

static int dump_event(dump_job *job, const sala_event *e) {
    if (e->type == SALA_EVENT_FINISH && e->finish_reason == SALA_FINISH_NAN)
        return cli_fail(CLI_FAILED,
                        "the logits are not numbers: the weights are damaged (sala info --check)");
    if (e->type == SALA_EVENT_FINISH && e->finish_reason == SALA_FINISH_MEMORY)
        return cli_fail(CLI_FAILED, "the K/V cache is too small: raise --kv-tokens");
    if (e->request == job->reading) {
        if (e->type == SALA_EVENT_FINISH) job->reading = 0;
        return e->type == SALA_EVENT_ROWS ? dump_rows(job, e) : CLI_OK;
    }
    dump_sample **at = job->queue + job->taken, *s;
    while ((*at)->request != e->request) at++;
    s = *at;
    if (e->type == SALA_EVENT_TOKEN) dump_add(s, &e->token, 1, 0, 1);
    if (e->type != SALA_EVENT_FINISH) return CLI_OK;
    s->request = 0;
    if (s->kind == DUMP_MESSAGES) return dump_talk(job, s);
    return s->done = 1, CLI_OK;
}

static int dump_step(dump_job *job) {
    char what[96], done[32];
    sala_error err;
    sala_event e;
    int code = CLI_OK, step = sala_step(job->engine, &err);
    if (step <= 0)
        return cli_fail(CLI_FAILED, "%s", step ? err.text : "nothing runs any more: this is a bug");
    while (code == CLI_OK && sala_next_event(job->engine, &e)) code = dump_event(job, &e);
    snprintf(what, sizeof what, "%s: %s tokens dumped",
             job->reading ? "reading" : "writing answers", cli_count(job->sums[1], done));
    cli_progress_since(what, (double)job->samples / (double)job->total, job->start);
    return code == CLI_OK && cli_signal ? 128 + (int)cli_signal : code;
}

// The next sample, whose tokens are known: take it into the shard, cut if need be, or leave it out where
// nothing of it is under the loss. Returns 1 if no more go into this shard.
static int dump_take(dump_job *job, int *code) {
    dump_sample *s = job->queue[job->taken];
    int64_t n = dump_length(s) < job->most ? dump_length(s) : job->most;
    sala__json_free(&s->json);
    if (n < dump_length(s) && !job->max_tokens) {
        *code = cli_fail(CLI_FAILED,
                         "%s: %lld tokens do not fit the context of %lld: raise --context, or let "
                         "--max-tokens cut them",
                         s->where, (long long)dump_length(s), (long long)job->info.context);
        return 1;
    }
    s->mask.size = (size_t)n;
    s->token.size = (size_t)n * sizeof(int32_t);
    int loss = memchr(s->mask.data, 1, s->mask.size) != NULL;
    if (loss && job->taken && job->tokens + n > job->shard_tokens) return 1;
    job->last_line = s->line;
    job->taken += loss;
    job->tokens += loss ? n : 0;
    if (loss) return 0;
    job->skipped++;
    job->count--;
    memmove(job->queue + job->taken, job->queue + job->taken + 1,
            (size_t)(job->count - job->taken) * sizeof(s));
    dump_free_sample(s);
    return 0;
}

// Bring the samples of the next shard together, with their answers.
static int dump_gather(dump_job *job) {
    const char *line;
    size_t size;
    dump_sample next;
    int code = CLI_OK, more = 1, full = 0;
    job->taken = job->tokens = job->skipped = 0;
    while (code == CLI_OK && !full) {
        while (code == CLI_OK && more && job->count - job->taken < job->parallel)
            if ((more = dump_next_line(job, &next, &line, &size)) != 0)
                code = dump_read(job, line, size, &next);
        while (code == CLI_OK && !full && job->taken < job->count && job->queue[job->taken]->done)
            full = dump_take(job, &code);
        if (!more && job->taken == job->count) break;
        if (code == CLI_OK && !full && job->taken < job->count) code = dump_step(job);
    }
    return code;
}

// Write the shard: its samples are read one after the other, while other answers go on.
static int dump_shard(dump_job *job) {
    char path[4096];
    sala_error err;
    dump_path(job, path);
    int code = dump_begin_shard(job, path);
    for (int64_t i = 0; i < job->taken && code == CLI_OK; i++) {
        const dump_sample *s = job->queue[i];
        sala_request request;
        memset(&request, 0, sizeof request);
        request.tokens = (const int32_t *)(void *)s->token.data;
        request.token_count = dump_length(s);
        request.max_tokens = request.ignore_eos = 1;
        request.want_rows = SALA_ROWS_FEATURES;
        job->reading = sala_submit(job->engine, &request, &err);
        if (job->reading < 0) code = cli_fail(CLI_FAILED, "%s: %s", s->where, err.text);
        while (code == CLI_OK && job->reading) code = dump_step(job);
        job->hidden_at += 2 * dump_length(s) * job->info.hidden;
        job->features_at += 6 * dump_length(s) * job->info.hidden;
    }
    if (job->output.path) code = cli_output_close(&job->output, code);
    if (code != CLI_OK) return code;
    job->shards++;
    for (int64_t i = 0; i < job->taken; i++) dump_free_sample(job->queue[i]);
    job->count -= job->taken;
    memmove(job->queue, job->queue + job->taken, (size_t)job->count * sizeof *job->queue);
    job->taken = 0;
    return CLI_OK;
}

/* ---- going on: what the numbers depend on, and what is there already ------------------------- */

static uint64_t dump_hash_file(uint64_t h, const char *folder, const char *name) { // if it is there
    char path[4096];
    sala__file file;
    snprintf(path, sizeof path, "%.3000s%s%.1000s", folder, *name ? "/" : "", name);
    if (sala__map_file(path, &file, NULL) < 0) return h;
    h = cli_hash(h, file.data, (size_t)file.size);
    sala__unmap_file(&file);
    return h;
}

// Of the model: its small files, and of every tensor the name, the shape and 64 pieces of 64 bytes.
static uint64_t dump_fingerprint(const dump_job *job) {
    static const char *const names[] = {"config.json", "generation_config.json",
                                        "hf_quant_config.json", "tokenizer.json"};
    const sala__checkpoint *ck = &job->engine->checkpoint;
    const sala_options *o = &job->args->options;
    uint64_t h = cli_hash(CLI_HASH, &o->synthetic_seed, sizeof o->synthetic_seed);
    if (o->synthetic) return dump_hash_file(h, job->args->model, "");
    for (int i = 0; i < 4; i++) h = dump_hash_file(h, job->args->model, names[i]);
    for (size_t i = 0; i < ck->tensor_count; i++) {
        const sala__tensor *t = &ck->tensors[i];
        h = cli_hash(h, t->name, strlen(t->name) + 1);
        h = cli_hash(h, t->dtype, strlen(t->dtype) + 1);
        h = cli_hash(h, t->shape, (size_t)t->rank * sizeof *t->shape);
        for (int64_t k = 0; k < 64; k++) {
            int64_t at = t->bytes / 64 * k, left = t->bytes - at;
            h = cli_hash(h, (const char *)t->data + at, (size_t)(left < 64 ? left : 64));
        }
    }
    return h;
}

static void dump_describe(dump_job *job) {
    const sala_info *i = &job->info;
    const int *f = job->engine->options.features;
    const sala_request *r = &job->args->request;
    size_t size;
    FILE *out = open_memstream(&job->settings, &size);
    if (!out) exit(cli_fail(CLI_FAILED, "out of memory"));
    fprintf(out, "\"format\": \"pt\", \"version\": \"sala features 1\", ");
    fprintf(out, "\"layers\": \"%d,%d,%d\", \"fingerprint\": \"%016llx\", ", f[0], f[1], f[2],
            (unsigned long long)dump_fingerprint(job));
    fprintf(out, "\"weights\": \"%s\", \"prefill\": \"%s\", \"dense_len\": \"%d\", ",
            i->weight_format, i->prefill, i->dense_len);
    fprintf(out, "\"device\": \"%s\", \"template\": \"%s\", \"data\": \"%016llx\", ",
            job->engine->on_gpu ? "cuda" : "cpu", i->chat_template ? i->chat_template : "none",
            (unsigned long long)cli_hash(CLI_HASH, job->file.data, (size_t)job->file.size));
    fprintf(out, "\"limit\": \"%lld\", \"max_tokens\": \"%lld\", \"shard_tokens\": \"%lld\", ",
            (long long)job->limit, (long long)job->max_tokens, (long long)job->shard_tokens);
    fprintf(out, "\"regenerate\": \"%d\"", job->regenerate);
    if (job->regenerate)
        fprintf(out, ", \"answer_tokens\": \"%lld\", \"temperature\": \"%.9g\", \"seed\": \"%llu\"",
                (long long)job->answer_tokens, (double)r->temperature, (unsigned long long)r->seed);
    fclose(out);
}

// The first member of both, lists of JSON members, that is not the same: *at is where it begins. Returns its
// length in a.
static int dump_differs(const char *a, const char *b, size_t *at) {
    *at = 0;
    for (size_t i = 0; a[i] && a[i] == b[i]; i++)
        if (i > 2 && memcmp(a + i - 3, "\", \"", 4) == 0) *at = i;
    const char *end = strstr(a + *at, "\", \"");
    return (int)(end ? end + 1 - (a + *at) : (ptrdiff_t)strlen(a + *at));
}

// The text of an earlier run's header: was it made as this run would make it, and is it whole?
static int dump_check_shard(dump_job *job, const char *path, const char *text, int64_t data) {
    static const char begin[] = "{\"__metadata__\": {",
                      rest[] = ", \"samples\": \"%lld\", \"tokens\": \"%lld\", \"loss_tokens\": "
                               "\"%lld\", \"skipped\": \"%lld\", \"last_line\": \"%lld\"";
    long long n[5] = {0, 0, 0, 0, 0};
    size_t from, ours = strlen(job->settings);
    int64_t at[5];
    int whole = strncmp(text, begin, strlen(begin)) == 0;
    if (whole) text += strlen(begin);
    if (whole && strncmp(text, job->settings, ours) != 0) {
        int other = dump_differs(text, job->settings, &from);
        int own = dump_differs(job->settings, text, &from);
        return cli_fail(CLI_FAILED,
                        "%s was made with %.*s, this run has %.*s: give --out another folder, or "
                        "the options, the model and the data of the first run",
                        path, other, text + from, own, job->settings + from);
    }
    if (!whole || sscanf(text + ours, rest, &n[0], &n[1], &n[2], &n[3], &n[4]) != 5 || n[0] < 1 ||
        n[0] > n[1] || n[1] > data || dump_places(job, n[0], n[1], at) != data)
        return cli_fail(CLI_FAILED, "%s is damaged: remove it and those that follow it", path);
    for (int i = 0; i < 4; i++) job->sums[i] += n[i];
    job->last_line = n[4];
    return CLI_OK;
}

// Returns an exit code; -1: there is no such shard.
static int dump_resume_shard(dump_job *job) {
    char path[4096];
    sala__file file;
    sala_error err;
    uint64_t size = 0;
    cli_buffer text = {0};
    dump_path(job, path);
    if (access(path, F_OK) != 0) return -1;
    if (sala__map_file(path, &file, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    if (file.size >= 8) memcpy(&size, file.data, 8);
    if (file.size < 8 || size > (uint64_t)file.size - 8) size = 0;
    cli_append(&text, size ? file.data + 8 : NULL, (size_t)size);
    int code = dump_check_shard(job, path, text.data, file.size - 8 - (int64_t)size);
    job->bytes += file.size;
    job->shards += code == CLI_OK;
    cli_free(&text);
    sala__unmap_file(&file);
    return code;
}

// Take the folder, clear it of what a killed run left, and go on behind the whole shards there.
static int dump_resume(dump_job *job) {
    const char *line;
    size_t size;
    dump_sample s;
    int code, files = 0;
    DIR *folder = NULL;
    if (mkdir(job->out, 0777) < 0 && errno != EEXIST)
        return cli_fail(CLI_OUTPUT, "%s: cannot make the folder: %s", job->out, strerror(errno));
    job->lock = open(job->out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (job->lock < 0 || (folder = opendir(job->out)) == NULL)
        return cli_fail(CLI_OUTPUT, "%s: cannot open: %s", job->out, strerror(errno));
    int taken = flock(job->lock, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    for (struct dirent *d; !taken && (d = readdir(folder)) != NULL;) {
        if (strncmp(d->d_name, "features-", 9) != 0) continue;
        if (strstr(d->d_name, ".safetensors.tmp-")) unlinkat(job->lock, d->d_name, 0);
        size_t n = strlen(d->d_name);
        files += n > 12 && strcmp(d->d_name + n - 12, ".safetensors") == 0;
    }
    closedir(folder);
    if (taken) return cli_fail(CLI_OUTPUT, "%s: another run writes there", job->out);
    while ((code = dump_resume_shard(job)) == CLI_OK) continue;
    if (code > 0) return code;
    if (job->shards != files)
        return cli_fail(CLI_FAILED, "%s: holds %d shards, but features-%05lld is missing", job->out,
                        files, (long long)job->shards);
    job->resumed = job->shards;
    while (job->line < job->last_line && dump_next_line(job, &s, &line, &size)) continue;
    return CLI_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static void dump_report(const dump_job *job, int64_t before) {
    double seconds = cli_now() - job->start,
           rate = cli_rate((double)(job->sums[1] - before), seconds);
    char size[32], count[32];
    if (job->args->json) {
        printf("{\"out\": ");
        cli_json_text(stdout, job->out, strlen(job->out));
        printf(", \"shards\": %lld, \"resumed\": %lld", (long long)job->shards,
               (long long)job->resumed);
        for (int i = 0; i < 4; i++) printf(", \"%s\": %lld", dump_sums[i], (long long)job->sums[i]);
        printf(", \"bytes\": %lld, \"seconds\": %.3f, \"tokens_per_second\": %.1f, %s}\n",
               (long long)job->bytes, seconds, rate, job->settings);
    }
    if (cli_quiet) return;
    fprintf(stderr, "sala: %lld samples (%lld without loss left out) of %s tokens in %lld shards ",
            (long long)job->sums[0], (long long)job->sums[3], cli_count(job->sums[1], count),
            (long long)job->shards);
    fprintf(stderr, "(%lld were there), %s; %.0f t/s\n", (long long)job->resumed,
            cli_bytes((double)job->bytes, size), rate);
}

static int dump_all(dump_job *job) {
    int64_t before, trailing = 0;
    sala_get_info(job->engine, &job->info);
    job->most = job->info.context - 1; // the engine chooses a token behind the last
    if (job->max_tokens && job->max_tokens > job->most)
        return cli_fail(CLI_USAGE, "--max-tokens %lld needs a --context of %lld at least",
                        (long long)job->max_tokens, (long long)job->max_tokens + 1);
    if (job->max_tokens) job->most = job->max_tokens;
    int code = dump_check_data(job);
    if (code == CLI_OK) dump_describe(job);
    if (code == CLI_OK) code = dump_resume(job);
    before = job->sums[1];
    job->start = cli_now();
    while (code == CLI_OK) {
        code = dump_gather(job);
        trailing = job->skipped;
        if (code != CLI_OK || !job->taken) break;
        code = dump_shard(job);
    }
    cli_progress_clear();
    if (code == CLI_OK && !job->shards)
        return cli_fail(CLI_FAILED, "%s: no token of its samples is under loss", job->data);
    job->sums[3] += code == CLI_OK ? trailing : 0; // behind the last shard
    if (code == CLI_OK) dump_report(job, before);
    if (code > 128)
        cli_fail(0, "interrupted with %lld whole shards; the same command goes on from there",
                 (long long)job->shards);
    return code;
}

static int dump_layers(cli_args *a, const char *text) { // "1,15,28"
    int *f = a->options.features, used = 0;
    if (sscanf(text, "%4d,%4d,%4d%n", &f[0], &f[1], &f[2], &used) == 3 && !text[used] &&
        f[0] >= 0 && f[1] > f[0] && f[2] > f[1])
        return CLI_OK;
    return cli_fail(CLI_USAGE, "--layers: '%s' is not three rising layers like 1,15,28", text);
}

static int dump_arguments(cli_args *a, dump_job *job) { // returns 0, or -1: return a->code
    const struct {
        int id, of_answers;
        const char *name;
        int64_t *value, most;
    } numbers[] = {
        {DUMP_MAX, 0, "max-tokens", &job->max_tokens, 1 << 29},
        {DUMP_LIMIT, 0, "limit", &job->limit, INT64_MAX},
        {DUMP_SHARD, 0, "shard-tokens", &job->shard_tokens, 1 << 29},
        {DUMP_ANSWER, 1, "answer-tokens", &job->answer_tokens, 1 << 29},
        {DUMP_PARALLEL, 1, "parallel", &job->parallel, 255},
        {DUMP_TEMPERATURE, 1, "temperature", NULL, 0},
        {DUMP_SEED, 1, "seed", NULL, 0},
    };
    const char *of_answers = NULL;
    sala_error err;
    int id = 0, code = CLI_OK;
    while (code == CLI_OK && (id = cli_next(a)) > 0) {
        if (id == DUMP_DATA) job->data = a->value;
        if (id == DUMP_OUT) job->out = a->value;
        if (id == DUMP_LAYERS) code = dump_layers(a, a->value);
        if (id == DUMP_REGENERATE) job->regenerate = 1;
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
            const char *name = numbers[i].name;
            if (id != numbers[i].id) continue;
            if (numbers[i].of_answers) of_answers = name;
            if (numbers[i].value)
                code = cli_integer(name, a->value, 1, numbers[i].most, numbers[i].value);
            else if (sala_set_request(&a->request, name, a->value, &err) < 0)
                code = cli_fail(CLI_USAGE, "--%s", err.text);
        }
    }
    if (code == CLI_OK && id < 0) return -1;
    if (code == CLI_OK && (!job->data || !job->out || !*job->out))
        code = cli_fail(CLI_USAGE, "dump-features needs --data FILE and --out DIR");
    if (code == CLI_OK && of_answers && !job->regenerate)
        code = cli_fail(CLI_USAGE, "--%s belongs to --regenerate", of_answers);
    if (!a->options.features[2]) a->options.features[0] = -1;
    if (!a->options.context && job->max_tokens) a->options.context = job->max_tokens + 1;
    if (!a->options.max_sequences)
        a->options.max_sequences = job->regenerate ? (int)job->parallel + 1 : 1;
    a->code = code;
    return code == CLI_OK ? 0 : -1;
}

static int sala_dump_features(int argc, char **argv) {
    char room[4096];
    cli_args a;
    dump_job job;
    sala_error err;
    memset(&job, 0, sizeof job);
    job.args = &a;
    job.shard_tokens = 65536;
    job.answer_tokens = 1024;
    job.parallel = 8;
    job.lock = -1;
    cli_start(&a, &dump_command, argc, argv);
    if (dump_arguments(&a, &job) == 0) {
        a.model = cli_model_path(a.model, room);
        if (!a.model)
            a.code = CLI_FAILED;
        else if (sala__map_file(job.data, &job.file, &err) < 0)
            a.code = cli_fail(CLI_FAILED, "%s", err.text);
        else if ((job.engine = cli_open(&a)) != NULL)
            a.code = dump_all(&job);
    }
    sala_close(job.engine);
    for (int64_t i = 0; i < job.count; i++) dump_free_sample(job.queue[i]);
    free(job.queue);
    free(job.settings);
    cli_free(&job.rows);
    sala__unmap_file(&job.file);
    if (job.lock >= 0) close(job.lock);
    cli_end(&a);
    return a.code;
}
