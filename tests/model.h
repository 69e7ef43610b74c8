/*  model.h - what the whole-model tests share: an engine with the record of all that its requests gave, and a
    look at the memory of a sequence. Included after sala.h (with its implementation) and check.h.
    All paths are relative to the top folder of the project. */
#ifndef SALA_TEST_MODEL_H
#define SALA_TEST_MODEL_H

#define HELPER static __attribute__((unused)) // not every test needs every helper

#define TINY "tests/data/vectors/tiny"
#define TINY_CONFIG "tests/data/vectors/tiny/config.json"
#define SALA_TINY "models/sala-tiny"

HELPER void die(const char *what, const char *why) { // a test that cannot even begin
    printf("  in %s: %s: %s\n", check_test, what, why);
    exit(2);
}

HELPER void *need(void *p) {
    if (!p) die("test", "out of memory");
    return p;
}

// ---- one engine and its requests ----

typedef struct outcome { // what one request gave
    int64_t id, sequence, first_position;
    int finished, reason;
    int32_t *tokens; // [count] chosen
    float *logprobs; // [count]
    int64_t count, token_capacity;
    char *text; // [bytes] zero-terminated
    size_t bytes, text_capacity;
    int64_t prefill_done, prefill_total;
    sala_timings timings;
    // Rows by absolute position, where the request wanted them.
    unsigned char *seen; // [context]
    float *logits;       // [context, vocab]
    float *hidden;       // [context, layers + 2, hidden] or NULL
    int32_t *blocks;     // [context, sparse layers, kv_heads, top_k] or NULL
} outcome;

typedef struct session {
    sala *engine;
    sala_info info;
    size_t hidden_row, blocks_row; // elements
    outcome *out;                  // [count] in order of submission
    int count, capacity;
    void (*after_step)(sala *engine); // the poison tests
} session;

HELPER session session_open(const char *path, const sala_options *options) {
    session t;
    sala_error err;
    memset(&t, 0, sizeof t);
    t.engine = sala_open(path, options, &err);
    if (!t.engine) die(path, err.text);
    sala_get_info(t.engine, &t.info);
    if (options && options->hidden_states) {
        t.hidden_row = (size_t)(t.info.layers + 2) * (size_t)t.info.hidden;
        t.blocks_row =
            (size_t)t.info.sparse_layers * (size_t)t.info.kv_heads * (size_t)t.info.top_k;
    }
    return t;
}

// Options of most tests here: a small engine with two threads.
HELPER sala_options small_options(int chunk, int logits_rows) {
    sala_options o;
    memset(&o, 0, sizeof o);
    o.threads = 2;
    o.max_sequences = 4;
    o.context = 1024;
    o.chunk = chunk;
    o.logits_rows = logits_rows;
    return o;
}

HELPER outcome *outcome_of(session *t, int64_t request) {
    for (int i = 0; i < t->count; i++)
        if (t->out[i].id == request) return &t->out[i];
    die("an event", "names a request that nobody made");
    return NULL;
}

// A fresh outcome, with room for rows if they are wanted.
HELPER outcome *outcome_new(session *t, int64_t request, int rows) {
    if (t->count == t->capacity) {
        t->capacity = t->capacity ? 2 * t->capacity : 16;
        t->out = (outcome *)need(realloc(t->out, (size_t)t->capacity * sizeof *t->out));
    }
    outcome *o = &t->out[t->count++];
    memset(o, 0, sizeof *o);
    o->id = request;
    o->text = (char *)need(calloc(1, 1));
    if (rows) {
        size_t context = (size_t)t->info.context;
        o->seen = (unsigned char *)need(calloc(context, 1));
        o->logits = (float *)need(malloc(context * (size_t)t->info.vocab * 4));
        if (t->hidden_row) o->hidden = (float *)need(malloc(context * t->hidden_row * 4));
        if (t->hidden_row) o->blocks = (int32_t *)need(malloc(context * t->blocks_row * 4 + 4));
    }
    return o;
}

// Submit; the answer is the index of the outcome, or -1 with an error.
HELPER int session_try(session *t, const sala_request *ask, sala_error *err) {
    int64_t id = sala_submit(t->engine, ask, err);
    if (id < 0) return -1;
    return (int)(outcome_new(t, id, ask->want_rows) - t->out);
}

HELPER int session_ask(session *t, const sala_request *ask) {
    sala_error err;
    int i = session_try(t, ask, &err);
    if (i < 0) die("a request was refused", err.text);
    return i;
}

HELPER void take_rows(session *t, outcome *o, const sala_event *ev) {
    size_t vocab = (size_t)t->info.vocab, width = (size_t)t->info.hidden;
    size_t lists = t->info.sparse_layers ? t->blocks_row / (size_t)t->info.sparse_layers : 0;
    size_t rows = (size_t)ev->row_count;
    CHECK(o->seen != NULL, "request %lld did not want rows", (long long)ev->request);
    CHECK(!t->hidden_row == !ev->hidden && !t->hidden_row == !ev->blocks,
          "hidden states and blocks");
    if (!o->seen || !t->hidden_row != !ev->hidden) return;
    for (size_t r = 0; r < rows; r++) {
        size_t at = (size_t)ev->first_position + r;
        CHECK(!o->seen[at], "the row of position %zu comes twice", at);
        o->seen[at] = 1;
        memcpy(o->logits + at * vocab, ev->logits + r * vocab, vocab * 4);
        for (size_t l = 0; t->hidden_row && l < (size_t)t->info.layers + 2; l++)
            memcpy(o->hidden + at * t->hidden_row + l * width, ev->hidden + (l * rows + r) * width,
                   width * 4);
        for (size_t l = 0; t->hidden_row && l < (size_t)t->info.sparse_layers; l++)
            memcpy(o->blocks + at * t->blocks_row + l * lists, ev->blocks + (l * rows + r) * lists,
                   lists * 4);
    }
}

HELPER void take_event(session *t, const sala_event *ev) {
    outcome *o = outcome_of(t, ev->request);
    CHECK(!o->finished, "request %lld has an event after its end", (long long)ev->request);
    CHECK(ev->text && strlen(ev->text) >= ev->text_bytes, "an event's text");
    if (ev->type == SALA_EVENT_ROWS) take_rows(t, o, ev);
    if (ev->type == SALA_EVENT_PREFILL) {
        CHECK(ev->done > o->prefill_done && ev->done <= ev->total, "prefill %lld of %lld",
              (long long)ev->done, (long long)ev->total);
        o->prefill_done = ev->done;
        o->prefill_total = ev->total;
    }
    if (ev->type == SALA_EVENT_TOKEN) {
        if (o->count == o->token_capacity) {
            o->token_capacity = 2 * o->token_capacity + 64;
            o->tokens = (int32_t *)need(realloc(o->tokens, (size_t)o->token_capacity * 4));
            o->logprobs = (float *)need(realloc(o->logprobs, (size_t)o->token_capacity * 4));
        }
        if (!o->count) o->first_position = ev->position;
        CHECK(ev->position == o->first_position + o->count, "token %lld is at %lld",
              (long long)o->count, (long long)ev->position);
        o->tokens[o->count] = ev->token;
        o->logprobs[o->count++] = ev->logprob;
    }
    if (ev->text_bytes) {
        o->text = (char *)need(realloc(o->text, o->bytes + ev->text_bytes + 1));
        memcpy(o->text + o->bytes, ev->text, ev->text_bytes);
        o->bytes += ev->text_bytes;
        o->text[o->bytes] = 0;
    }
    if (ev->type == SALA_EVENT_FINISH) {
        o->finished = 1;
        o->reason = ev->finish_reason;
        o->sequence = ev->sequence;
        o->timings = ev->timings;
        CHECK(ev->timings.output_tokens == o->count, "%lld output tokens, %lld came",
              (long long)ev->timings.output_tokens, (long long)o->count);
    }
}

HELPER int session_step(session *t) { // one turn, its events taken
    sala_error err;
    sala_event ev;
    int code = sala_step(t->engine, &err);
    if (code < 0) die("sala_step", err.text);
    while (sala_next_event(t->engine, &ev)) take_event(t, &ev);
    if (t->after_step) t->after_step(t->engine);
    return code;
}

HELPER void session_run(session *t) {
    while (session_step(t)) continue;
}

HELPER outcome *session_do(session *t, const sala_request *ask) { // alone, to its end
    int i = session_ask(t, ask);
    while (!t->out[i].finished) {
        if (session_step(t)) continue;
        die("a request", "never finished");
    }
    return &t->out[i];
}

HELPER void session_cancel(session *t, int i) {
    sala_error err;
    if (sala_cancel(t->engine, t->out[i].id, &err) < 0) die("sala_cancel", err.text);
}

HELPER void session_give_up(session *t, int64_t sequence) {
    sala_error err;
    if (sala_release(t->engine, sequence, &err) < 0) die("sala_release", err.text);
}

// Nothing may be left of requests and sequences: counters at zero, and every page in the free list once.
HELPER void session_idle(session *t) {
    sala *s = t->engine;
    sala_info info;
    sala_event ev;
    sala_get_info(s, &info);
    CHECK(info.sequences_resident == 0, "%d sequences are left", info.sequences_resident);
    CHECK(info.requests_waiting == 0 && info.requests_active == 0,
          "%d requests wait, %d are active", info.requests_waiting, info.requests_active);
    CHECK(info.kv_tokens_reserved == 0, "%lld tokens are reserved",
          (long long)info.kv_tokens_reserved);
    CHECK(sala_next_event(s, &ev) == 0, "an event is left");
    for (int i = 0; i < s->plan.snapshots; i++)
        if (s->prefixes[i].length) sala__prefix_drop(s, &s->prefixes[i]);
    CHECK(s->idle_page_count == 0, "%lld pages are idle", (long long)s->idle_page_count);
    for (int64_t i = 0; i < s->plan.pages; i++)
        CHECK(!s->page_users[i] && !s->page_cached[i], "page %lld has %d + %d holders",
              (long long)i, s->page_users[i], s->page_cached[i]);
    unsigned char *free_page = (unsigned char *)need(calloc((size_t)s->plan.pages + 1, 1));
    for (int64_t i = 0; i < s->free_page_count; i++) free_page[s->free_pages[i]]++;
    for (int64_t i = 0; i < s->plan.pages; i++)
        CHECK(free_page[i] == 1, "page %lld is %d times free", (long long)i, free_page[i]);
    free(free_page);
}

HELPER void outcome_free(outcome *o) {
    free(o->tokens);
    free(o->logprobs);
    free(o->text);
    free(o->seen);
    free(o->logits);
    free(o->hidden);
    free(o->blocks);
}

// What an outcome is now, but for its rows.
HELPER outcome outcome_copy(const outcome *o) {
    outcome c = *o;
    c.token_capacity = o->count + 64;
    c.tokens = (int32_t *)need(calloc((size_t)c.token_capacity, 4));
    c.logprobs = (float *)need(calloc((size_t)c.token_capacity, 4));
    c.text = (char *)need(malloc(o->bytes + 1));
    if (o->count) memcpy(c.tokens, o->tokens, (size_t)o->count * 4);
    if (o->count) memcpy(c.logprobs, o->logprobs, (size_t)o->count * 4);
    memcpy(c.text, o->text, o->bytes + 1);
    return c;
}

HELPER void outcome_copy_free(outcome *c) {
    free(c->tokens);
    free(c->logprobs);
    free(c->text);
}

// An outcome for a request that a file brought, which goes on from what came before it was saved.
HELPER outcome *session_adopt(session *t, int64_t request, const outcome *before) {
    outcome *o = outcome_new(t, request, before->seen != NULL), c = outcome_copy(before);
    free(o->text);
    o->tokens = c.tokens;
    o->logprobs = c.logprobs;
    o->text = c.text;
    o->count = c.count;
    o->bytes = c.bytes;
    o->token_capacity = c.token_capacity;
    o->first_position = c.first_position;
    o->prefill_done = c.prefill_done;
    return o;
}

HELPER void session_forget(session *t) { // the outcomes so far
    for (int i = 0; i < t->count; i++) {
        CHECK(t->out[i].finished, "request %lld did not finish", (long long)t->out[i].id);
        outcome_free(&t->out[i]);
    }
    t->count = 0;
}

HELPER void session_close(session *t) {
    session_idle(t);
    session_forget(t);
    free(t->out);
    sala_close(t->engine);
    memset(t, 0, sizeof *t);
}

// ---- requests ----

HELPER sala_request request_of(const int32_t *tokens, int64_t count, int64_t max_tokens) {
    sala_request r;
    memset(&r, 0, sizeof r);
    r.tokens = tokens;
    r.token_count = count;
    r.max_tokens = max_tokens;
    r.ignore_eos = 1;
    return r;
}

HELPER void request_force(sala_request *r, const int32_t *tokens, int64_t count) {
    r->force = tokens;
    r->force_count = count;
    r->max_tokens = count;
}

HELPER void request_sampled(sala_request *r, uint64_t seed) {
    r->temperature = 0.8f;
    r->top_p = 0.95f;
    r->seed = seed;
}

// A config of an EAGLE-3 head for sala-tiny, whose weights a hash makes.
HELPER void put_head(const char *path, int heads, int vocab) {
    FILE *f = fopen(path, "wb");
    if (!f) die(path, "cannot write");
    fprintf(f,
            "{\"draft_vocab_size\":%d,\"intermediate_size\":640,\"num_attention_heads\":%d,"
            "\"eagle_config\":{\"eagle_aux_hidden_state_layer_ids\":[1,3,5]}}",
            vocab, heads);
    fclose(f);
}

HELPER int below(int n) {
    return (int)(check_random() % (uint64_t)n);
}

// Tokens in runs over a small alphabet, as the reference makes them: blocks of keys then differ in the mean.
HELPER void random_tokens(int32_t *out, int count, int vocab) {
    for (int i = 0; i < count;) {
        int32_t pool[3] = {below(vocab), below(vocab), below(vocab)};
        for (int run = 4 + below(13); run > 0 && i < count; run--) out[i++] = pool[below(3)];
    }
}

// The numbers of a list in a JSON object; returns how many. `ids`, `numbers`: or NULL.
HELPER int json_list(const sala__json *j, int object, const char *key, int32_t *ids,
                     double *numbers, int capacity) {
    int node = sala__json_get(j, object, key), count = 0;
    if (sala__json_at(j, node)->type != SALA__ARRAY) die("golden.json lacks", key);
    for (int n = j->nodes[node].child; n >= 0 && count < capacity; n = j->nodes[n].next, count++) {
        if (ids) ids[count] = (int32_t)j->nodes[n].integer;
        if (numbers) numbers[count] = j->nodes[n].number;
    }
    return count;
}

// ---- comparing ----

// The first position from `from` to `to` - 1 whose rows differ in a bit (or are missing in one), or -1.
HELPER int64_t first_difference(const session *t, const outcome *a, const outcome *b, int64_t from,
                                int64_t to) {
    size_t vocab = (size_t)t->info.vocab;
    for (int64_t p = from; p < to; p++) {
        size_t at = (size_t)p;
        if (!a->seen[at] || !b->seen[at]) return p;
        if (memcmp(a->logits + at * vocab, b->logits + at * vocab, vocab * 4) != 0) return p;
        if (!a->hidden || !b->hidden) continue;
        if (memcmp(a->hidden + at * t->hidden_row, b->hidden + at * t->hidden_row,
                   t->hidden_row * 4) != 0)
            return p;
        if (memcmp(a->blocks + at * t->blocks_row, b->blocks + at * t->blocks_row,
                   t->blocks_row * 4) != 0)
            return p;
    }
    return -1;
}

HELPER int same_choices(const outcome *a,
                        const outcome *b) { // tokens, and the bits of their log-probabilities
    return a->count == b->count && a->reason == b->reason && a->bytes == b->bytes &&
           memcmp(a->tokens, b->tokens, (size_t)a->count * 4) == 0 &&
           memcmp(a->logprobs, b->logprobs, (size_t)a->count * 4) == 0 &&
           memcmp(a->text, b->text, a->bytes) == 0;
}

// |a - b| / |b| of two vectors
HELPER double relative(const float *a, const float *b, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        difference += d * d;
        norm += (double)b[i] * (double)b[i];
    }
    return norm > 0 ? sqrt(difference / norm) : difference > 0 ? INFINITY : 0; // NaN stays
}

// ---- the memory of a sequence ----

HELPER sala__sequence *sequence_of(session *t, int64_t id) {
    sala__sequence *q = sala__find_sequence(t->engine, id);
    if (!q) die("sequence", "is not resident");
    return q;
}

// One contiguous copy of what a sequence has: K, V and compressed rows of its stored tokens in order of position,
// and its states, with the pending path folded in. Nothing depends on slot or pages.
typedef struct memory {
    unsigned char *data; // [size]
    size_t size, capacity;
} memory;

HELPER void memory_add(memory *m, const void *data, size_t size) {
    if (m->size + size > m->capacity) {
        m->capacity = 2 * (m->size + size) + 4096;
        m->data = (unsigned char *)need(realloc(m->data, m->capacity));
    }
    memcpy(m->data + m->size, data, size);
    m->size += size;
}

HELPER memory memory_of(session *t, int64_t id) {
    sala *s = t->engine;
    const sala_dims *d = &s->config.dims;
    sala__sequence *q = sequence_of(t, id);
    memory m = {NULL, 0, 0};
    int slot = (int)(q - s->sequences);
    sala__materialise(s, slot, NULL);
    sala_seq seq = {slot, 0, 0, q->stored, 0, 0, q->pages};
    size_t vector = (size_t)d->head_dim * sizeof(sala_act);
    for (int l = 0; l < s->sparse_layers; l++)
        for (int g = 0; g < d->kv_heads; g++) {
            for (int u = 0; u < q->stored; u++) {
                memory_add(&m, sala__kv_at(d, NULL, &seq, s->pages[l].k, NULL, 0, g, u), vector);
                memory_add(&m, sala__kv_at(d, NULL, &seq, s->pages[l].v, NULL, 0, g, u), vector);
            }
            for (int tier = 1; tier <= 2; tier++)
                for (int j = 0; j < sala_tier_rows(d, tier, q->stored); j++)
                    memory_add(&m,
                               sala__tier_slot(d, &seq,
                                               tier == 1 ? s->pages[l].tier1 : s->pages[l].tier2,
                                               tier, g, j),
                               vector);
        }
    for (int l = 0; l < s->lightning_layers; l++)
        memory_add(&m,
                   s->states + ((size_t)l * (size_t)s->plan.slots + (size_t)slot) * s->plan.state,
                   s->plan.state * 4);
    return m;
}

HELPER int memory_same(const memory *a, const memory *b) {
    return a->size == b->size && memcmp(a->data, b->data, a->size) == 0;
}

#endif
