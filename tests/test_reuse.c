#define SALA_IMPLEMENTATION
#include "../sala.h"
// Prefix reuse: what a request gives and leaves has the bits that it has in an engine that reuses nothing, whatever
// came before; and every page, slot and snapshot is accounted for after every step.
#include "check.h"
#include "counted.h"
#include "model.h"
#include "poison.h"

enum { VOCAB = 97, LONGEST = 700 };

static sala_options reuse_options(const char *reuse, int chunk) {
    sala_options o = small_options(chunk, 64);
    o.reuse = reuse;
    return o;
}

// Holders of every page are those that hold it, and the free ones are in the list. Then the rest is poisoned.
static void check_pages(sala *s) {
    int block = s->config.dims.block;
    int64_t pages = s->plan.pages, idle = 0, held = 0;
    int32_t *users = (int32_t *)need(calloc((size_t)pages, 8)), *cached = users + pages;
    for (int i = 0; i < s->plan.slots; i++)
        for (int k = 0; s->sequences[i].id && k < s->sequences[i].page_count; k++)
            users[s->sequences[i].pages[k]]++;
    for (int i = 0; i < s->plan.snapshots; i++) {
        const sala__prefix *p = &s->prefixes[i];
        CHECK(p->length % SALA_TILE == 0 && p->length % block == 0, "a prefix of %d", p->length);
        for (int k = 0; k < p->length / block; k++) cached[sala__prefix_pages(p)[k]]++;
    }
    for (int64_t i = 0; i < pages; i++) {
        CHECK(users[i] == s->page_users[i] && cached[i] == s->page_cached[i],
              "page %lld: %d users and %d prefixes, not %d and %d", (long long)i, s->page_users[i],
              s->page_cached[i], users[i], cached[i]);
        held += users[i] || cached[i];
        idle += !users[i] && cached[i];
    }
    CHECK(held + s->free_page_count == pages, "%lld held, %lld free of %lld", (long long)held,
          (long long)s->free_page_count, (long long)pages);
    CHECK(idle == s->idle_page_count, "%lld idle, not %lld", (long long)s->idle_page_count,
          (long long)idle);
    free(users);
}

static void check_and_poison(sala *s) {
    check_pages(s);
    poison(s);
}

static session reuse_engine(const sala_options *o) {
    session t = session_open(TINY, o);
    t.after_step = check_and_poison;
    poison(t.engine);
    return t;
}

// The same request in both engines, kept: tokens, log-probabilities, rows of the output, K/V, rows of both tiers,
// states, all in bits. Returns the tokens that were reused.
static int64_t compare(session *t, session *plain, sala_request r) {
    r.want_rows |= SALA_ROWS_GENERATED;
    r.keep = 1;
    session_do(t, &r);
    session_do(plain, &r);
    outcome *a = &t->out[t->count - 1], *b = &plain->out[plain->count - 1];
    CHECK(same_choices(a, b), "a prompt of %lld: other tokens", (long long)r.token_count);
    CHECK(first_difference(t, a, b, r.token_count, r.token_count + a->count - 1) < 0, "other rows");
    memory x = memory_of(t, a->sequence), y = memory_of(plain, b->sequence);
    CHECK(memory_same(&x, &y), "a prompt of %lld: the memory differs", (long long)r.token_count);
    free(x.data);
    free(y.data);
    CHECK(a->timings.prompt_tokens + a->timings.reused_tokens == r.token_count &&
              a->prefill_done == r.token_count && a->prefill_total == r.token_count,
          "%lld prefilled, %lld reused of %lld", (long long)a->timings.prompt_tokens,
          (long long)a->timings.reused_tokens, (long long)r.token_count);
    CHECK(b->timings.reused_tokens == 0, "off reuses");
    session_give_up(t, a->sequence);
    session_give_up(plain, b->sequence);
    return a->timings.reused_tokens;
}

// Prompts that go along for `stem` tokens; the i-th parts there.
static void prompt_of(int32_t *out, int stem, int i) {
    check_seed = 900;
    random_tokens(out, LONGEST, VOCAB);
    check_seed = 901 + (uint64_t)i;
    random_tokens(out + stem, LONGEST - stem, VOCAB);
    out[stem] = (out[stem - (stem > 0)] + 1 + i) % VOCAB; // two of them differ there for certain
}

// ---- the same bits ----

// Where prompts leave prefixes, and who finds them.
static void test_prefixes(void) {
    static const struct {
        int stem, which, count;
        int reused[3]; // with chunks of 64, 256 and 1024
    } steps[] = {
        {200, 0, 300, {0, 0, 0}},       // leaves 256
        {200, 1, 310, {0, 0, 0}},       // parts at 200: leaves 192, and 256
        {200, 2, 300, {192, 192, 192}}, // the third of a kind
        {200, 0, 300, {256, 256, 256}}, // the first one once more
        {200, 0, 500, {256, 256, 256}}, // and extended
        {200, 0, 257, {256, 256, 256}}, // something is left to be done: never the whole prompt
        {200, 0, 256, {192, 192, 192}},
        {200, 1, 64, {0, 0, 0}},        // up to 64 nothing can be reused, and nothing is left
        {640, 5, 680, {192, 192, 192}}, // leaves 640 and, in chunks, 640 or 512
        {570, 6, 700, {192, 512, 192}}, // another question about the same
        {570, 7, 700, {512, 512, 512}},
        {0, 9, 200, {0, 0, 0}},
    };
    static const int chunks[] = {64, 256, 1024};
    int32_t tokens[LONGEST];
    for (int c = 0; c < 3; c++) {
        sala_options o = reuse_options(c == 1 ? NULL : "prefix", chunks[c]);
        session t = reuse_engine(&o);
        o.reuse = "off";
        session plain = session_open(TINY, &o);
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            prompt_of(tokens, steps[i].stem, steps[i].which);
            sala_request r = request_of(tokens, steps[i].count, 20);
            r.logprobs = 1;
            if (i % 2) request_sampled(&r, i);
            if (i % 3 == 1) r.repetition_penalty = 1.3f;
            int64_t reused = compare(&t, &plain, r);
            CHECK(reused == steps[i].reused[c], "chunk %d, step %zu: %lld reused, not %d",
                  chunks[c], i, (long long)reused, steps[i].reused[c]);
        }
        session_close(&t);
        session_close(&plain);
    }
}

// Decoded tokens are no prefix: a prompt that repeats a whole conversation prefills the answers, with the bits of a
// prompt. Rows of a prompt that somebody wants are computed.
static void test_only_prefilled(void) {
    int32_t tokens[LONGEST];
    prompt_of(tokens, 0, 11);
    sala_options o = reuse_options("prefix", 256);
    session t = reuse_engine(&o);
    o.reuse = "off";
    session plain = session_open(TINY, &o);
    sala_request r = request_of(tokens, 130, 200);
    outcome *a = session_do(&t, &r);
    memcpy(tokens + 130, a->tokens, 200 * 4);
    r = request_of(tokens, 400, 9);
    int64_t reused = compare(&t, &plain, r);
    CHECK(reused == 128, "%lld reused", (long long)reused);
    r.want_rows = SALA_ROWS_ALL;
    compare(&t, &plain, r);
    outcome *x = &t.out[t.count - 1], *y = &plain.out[plain.count - 1];
    CHECK(x->timings.reused_tokens == 0 && first_difference(&t, x, y, 0, 400) < 0,
          "rows of the prompt");
    CHECK(compare(&t, &plain, request_of(tokens, 400, 9)) == 384, "what the second prompt left");
    session_close(&t);
    session_close(&plain);
}

// Prompts that arrive together share what those before them leave in the same step, also where all their memory was
// reserved before that was there.
static void test_burst(void) {
    int32_t tokens[6][LONGEST];
    static const int64_t reused[] = {0, 0, 192, 192, 192, 192};
    sala_options o = reuse_options("prefix", 1024);
    o.max_sequences = 6;
    o.kv_tokens = 6 * 1024;
    session t = reuse_engine(&o), plain;
    o.reuse = "off";
    plain = session_open(TINY, &o);
    for (int i = 0; i < 6; i++) {
        prompt_of(tokens[i], 230, i);
        sala_request r = request_of(tokens[i], 300 + i, 30);
        session_ask(&t, &r);
        session_ask(&plain, &r);
    }
    session_run(&t);
    session_run(&plain);
    for (int i = 0; i < 6; i++) {
        CHECK(same_choices(&t.out[i], &plain.out[i]), "request %d", i);
        CHECK(t.out[i].timings.reused_tokens == reused[i], "request %d: %lld reused", i,
              (long long)t.out[i].timings.reused_tokens);
    }
    session_close(&t);
    session_close(&plain);
}

// A crowd over a few stems in little memory: cancels, continued sequences, sampling, drafts, evictions. Each request
// that ends gave what it gives alone; after each step all pages are accounted for.
typedef struct crowd_request {
    int32_t tokens[LONGEST];
    sala_request ask;
    int64_t cancel_at; // tokens that it may have; -1: none, -2: never
    int asked, done;
} crowd_request;

static void crowd_make(crowd_request *c, int i) {
    static const int stems[] = {0, 64, 100, 128, 190, 200, 256, 300};
    int stem = stems[below(8)], which = below(3), count = stem + 1 + below(120);
    uint64_t seed = check_seed;
    memset(c, 0, sizeof *c);
    prompt_of(c->tokens, stem, which);
    check_seed = seed;
    c->ask = request_of(c->tokens, count, 1 + below(40));
    if (below(2)) request_sampled(&c->ask, (uint64_t)i);
    if (below(4) == 0) c->ask.repetition_penalty = 1.2f;
    c->ask.logprobs = 1;
    c->cancel_at = below(2) ? -2 : below(12) - 1;
}

static void test_crowd(void) {
    enum { CROWD = 120 };
    crowd_request *crowd = (crowd_request *)need(calloc(CROWD, sizeof *crowd));
    sala_options o = reuse_options("prefix", 128);
    o.context = 512;
    o.kv_tokens = 1400; // of three sequences or four
    o.reuse_memory = 5 * 3 * 6 * 16 * 16 * 4;
    session t = reuse_engine(&o);
    o.reuse = "off";
    session plain = session_open(TINY, &o);
    CHECK(t.info.snapshots == 5, "%d snapshots", t.info.snapshots);
    int64_t reused = 0, cancelled = 0;
    check_seed = 77;
    for (int i = 0; i < CROWD; i++) {
        crowd_make(&crowd[i], i);
        crowd[i].asked = session_ask(&t, &crowd[i].ask);
        for (int step = below(4); step > 0; step--) session_step(&t);
        for (int k = 0; k <= i; k++) {
            outcome *a = &t.out[crowd[k].asked];
            if (a->finished || crowd[k].cancel_at == -2 || a->count <= crowd[k].cancel_at) continue;
            session_cancel(&t, crowd[k].asked);
            crowd[k].cancel_at = -2;
        }
    }
    session_run(&t);
    for (int i = 0; i < CROWD; i++) {
        outcome *a = &t.out[i], *b = session_do(&plain, &crowd[i].ask);
        reused += a->timings.reused_tokens;
        cancelled += a->reason == SALA_FINISH_CANCELLED;
        int64_t n = a->count < b->count ? a->count : b->count;
        CHECK(a->reason == SALA_FINISH_CANCELLED || a->count == b->count, "request %d: %lld tokens",
              i, (long long)a->count);
        CHECK(!n || (!memcmp(a->tokens, b->tokens, (size_t)n * 4) &&
                     !memcmp(a->logprobs, b->logprobs, (size_t)n * 4)),
              "request %d: other tokens", i);
    }
    printf("      %lld tokens reused, %lld requests cancelled\n", (long long)reused,
           (long long)cancelled);
    CHECK(reused > 3000 && cancelled > 10, "%lld tokens reused, %lld cancelled", (long long)reused,
          (long long)cancelled);
    session_close(&t);
    session_close(&plain);
    free(crowd);
}

// ---- memory ----

static void test_requests_win(void) {
    int32_t tokens[LONGEST];
    sala_info info;
    sala_options o = reuse_options("prefix", 256);
    o.context = o.kv_tokens = 640;
    o.max_sequences = 2;
    session t = reuse_engine(&o);
    for (int i = 0; i < 3; i++) {
        prompt_of(tokens, 0, 20 + i);
        sala_request r = request_of(tokens, 600, 40);
        CHECK(session_do(&t, &r)->count == 40, "prompt %d had to wait for prefixes", i);
        sala_get_info(t.engine, &info);
        CHECK(info.kv_tokens_reserved == 0 && info.kv_tokens_idle == 576 && info.prefixes == 2,
              "%lld reserved, %lld idle, %d prefixes", (long long)info.kv_tokens_reserved,
              (long long)info.kv_tokens_idle, info.prefixes);
    }
    sala_request r = request_of(tokens, 600, 40); // what it shares need not be there twice
    CHECK(session_do(&t, &r)->timings.reused_tokens == 576, "the last prompt's prefix is gone");
    prompt_of(tokens, 0, 31); // a small one takes no more than it needs
    r = request_of(tokens, 60, 40);
    session_do(&t, &r);
    sala_get_info(t.engine, &info);
    CHECK(info.kv_tokens_idle == 512 && info.prefixes == 1, "%lld idle, %d prefixes",
          (long long)info.kv_tokens_idle, info.prefixes);
    session_close(&t);
}

static void test_options(void) {
    sala_error err;
    sala_info info;
    sala_options o = reuse_options("off", 256);
    sala *s = sala_open(TINY, &o, &err);
    sala_get_info(s, &info);
    CHECK(info.snapshots == 0 && info.reuse_bytes == 0 && !strcmp(info.reuse, "off"), "off: %d",
          info.snapshots);
    int64_t without = info.total_bytes - info.scratch_bytes;
    sala_close(s);
    o.reuse = NULL;
    s = sala_open(TINY, &o, &err);
    sala_get_info(s, &info);
    CHECK(info.snapshots == 16 && info.reuse_bytes == 16 * info.state_bytes_per_sequence &&
              info.total_bytes - info.scratch_bytes == without + info.reuse_bytes &&
              !strcmp(info.reuse, "prefix"),
          "by default %d snapshots, %lld bytes", info.snapshots, (long long)info.reuse_bytes);
    sala_close(s);
    o.reuse_memory = info.state_bytes_per_sequence - 1;
    s = sala_open(TINY, &o, &err);
    CHECK(!s && err.code == SALA_E_ARGUMENT && strstr(err.text, "reuse-memory"), "%s", err.text);
    CHECK(sala_set_option(&o, "reuse", "history", &err) == 0 && !strcmp(o.reuse, "history") &&
              sala_set_option(&o, "reuse-memory", "1G", &err) == 0 && o.reuse_memory == 1 << 30,
          "%s", err.text);
    CHECK(sala_set_option(&o, "reuse", "always", &err) < 0 &&
              strstr(err.text, "prefix off history"),
          "%s", err.text);
}

// Blocks that do not divide a tile: prefixes end where both do.
static void test_odd_blocks(void) {
    static const char path[] = SCRATCH "test_reuse_config.json";
    int32_t tokens[LONGEST];
    FILE *f = fopen(TINY_CONFIG, "r"), *to = fopen(path, "w");
    char line[256];
    if (!f || !to) die(path, "cannot be written");
    while (fgets(line, sizeof line, f))
        fputs(strstr(line, "\"block_size\"")    ? "\"block_size\": 48,\n"
              : strstr(line, "\"window_size\"") ? "\"window_size\": 96,\n"
                                                : line,
              to);
    fclose(f);
    fclose(to);
    sala_options o = reuse_options("prefix", 64);
    o.synthetic = 1;
    session t = session_open(path, &o), plain;
    t.after_step = check_pages;
    o.reuse = "off";
    plain = session_open(path, &o);
    prompt_of(tokens, 0, 40);
    CHECK(compare(&t, &plain, request_of(tokens, 500, 9)) == 0, "reused from nowhere");
    CHECK(compare(&t, &plain, request_of(tokens, 520, 9)) == 384, "not 384 = 8 blocks, 6 tiles");
    session_close(&t);
    session_close(&plain);
    remove(path);
}

// Without memory for its list of tokens a prefix is not made, and nothing else happens.
static void test_no_memory(void) {
    int32_t tokens[LONGEST];
    counter c;
    memset(&c, 0, sizeof c);
    sala_options o = reuse_options("prefix", 64);
    o.hooks.user = &c;
    o.hooks.allocate = counting;
    prompt_of(tokens, 0, 50);
    session t = reuse_engine(&o);
    sala_request r = request_of(tokens, 70, 3);
    session_do(&t, &r);
    sala__request one;
    memset(&one, 0, sizeof one);
    one.tokens = tokens + 1;
    one.token_count = 70;
    c.fail_at = c.calls + 1;
    CHECK(sala__prefix_new(t.engine, &one, 64) == NULL, "a prefix without memory");
    check_pages(t.engine);
    session_close(&t);
    CHECK(c.live == 0, "%lld allocations are left", (long long)c.live);
}

// ---- histories ----

// A prompt that repeats a kept conversation goes on with it, as if it had named it.
static void test_history(void) {
    int32_t tokens[LONGEST];
    prompt_of(tokens, 0, 60);
    sala_options o = reuse_options("history", 64);
    session t = reuse_engine(&o), plain;
    o.reuse = "off";
    plain = session_open(TINY, &o);
    sala_request r = request_of(tokens, 100, 30);
    r.keep = 1;
    session_do(&t, &r);
    session_do(&plain, &r);
    int64_t kept = t.out[0].sequence, other = plain.out[0].sequence;
    memcpy(tokens + 100, t.out[0].tokens, 30 * 4);
    for (int turn = 1; turn < 4;
         turn++) { // the third one has no new tokens: only the last chosen one
        int64_t had = 90 + 40 * turn, fresh = turn == 3 ? 0 : 10;
        r = request_of(tokens, had + fresh, 30);
        r.keep = 1;
        r.repetition_penalty = 1.5f;
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *a = session_do(&t, &r);
        r.tokens += had;
        r.token_count = fresh;
        r.sequence = other;
        outcome *b = session_do(&plain, &r);
        CHECK(a->sequence == kept && b->sequence == other, "turn %d: another sequence", turn);
        CHECK(a->timings.reused_tokens == had - 1 && a->timings.prompt_tokens == fresh + 1,
              "turn %d: %lld reused", turn, (long long)a->timings.reused_tokens);
        CHECK(same_choices(a, b), "turn %d: other tokens than by name", turn);
        memory x = memory_of(&t, kept), y = memory_of(&plain, other);
        CHECK(memory_same(&x, &y), "turn %d: other memory than by name", turn);
        free(x.data);
        free(y.data);
        memcpy(tokens + had + fresh, a->tokens, 30 * 4);
    }
    session_give_up(&plain, other);
    // Not taken: an empty one, one that differs, a busy one.
    r = request_of(tokens + 300, 300,
                   2); // takes the budget of a step, in which another one is admitted
    session_ask(&t, &r);
    r = request_of(tokens + 350, 200, 5);
    r.keep = 1;
    int empty = session_ask(&t, &r);
    session_step(&t);
    session_cancel(&t, empty);
    session_run(&t);
    CHECK(sequence_of(&t, t.out[empty].sequence)->token_count == 0, "it is not empty");
    tokens[50] = (tokens[50] + 1) % VOCAB;
    r = request_of(tokens, 240, 5);
    outcome *a = session_do(&t, &r);
    CHECK(a->sequence == 0 && a->timings.reused_tokens == 0, "another history");
    session_give_up(&t, t.out[empty].sequence);
    tokens[50] = (tokens[50] + VOCAB - 1) % VOCAB;
    r = request_of(tokens, 240, 5);
    r.keep = 1;
    int first = session_ask(&t, &r), second = session_ask(&t, &r);
    session_run(&t);
    CHECK(t.out[first].sequence == kept && t.out[second].sequence != kept, "both have it");
    session_give_up(&t, t.out[second].sequence);
    int32_t *all = sequence_of(&t, kept)->tokens;
    size_t count = sequence_of(&t, kept)->token_count;
    memcpy(tokens, all, count * 4);
    r = request_of(tokens, (int64_t)count + 5, 5); // not kept: it goes with its request
    r.want_rows = 0;
    CHECK(session_do(&t, &r)->timings.reused_tokens == (int64_t)count - 1, "not taken over");
    session_close(&t);
    session_close(&plain);
}

// A request that would take a sequence over and is cancelled before there was room: it has no sequence, and the
// other one is whose it was.
static void test_history_waits(void) {
    int32_t tokens[LONGEST];
    prompt_of(tokens, 0, 61);
    sala_options o = reuse_options("history", 64);
    o.kv_tokens = o.context;
    session t = reuse_engine(&o);
    sala_request r = request_of(tokens, 100, 20);
    r.keep = 1;
    session_do(&t, &r);
    int64_t kept = t.out[0].sequence;
    memcpy(tokens + 100, t.out[0].tokens, 20 * 4);
    r = request_of(tokens + 200, 300, 596); // all other pages
    int large = session_ask(&t, &r);
    session_step(&t);
    for (int keep = 0; keep < 2; keep++) {
        r = request_of(tokens, 130, 20);
        r.keep = keep;
        int i = session_ask(&t, &r);
        session_step(&t);
        CHECK(sequence_of(&t, kept)->request == t.out[i].id, "it does not wait for %lld",
              (long long)kept);
        session_cancel(&t, i);
        session_step(&t);
        CHECK(t.out[i].finished && t.out[i].sequence == 0, "a sequence that it never had: %lld",
              (long long)t.out[i].sequence);
        CHECK(sequence_of(&t, kept)->request == 0, "sequence %lld is busy", (long long)kept);
    }
    session_cancel(&t, large);
    session_step(&t);
    r = request_of(tokens + 120, 10, 20);
    r.sequence = kept;
    CHECK(session_do(&t, &r)->count == 20, "the sequence is not whole");
    session_close(&t);
}

// ---- drafts ----

static const char head_config[] =
    "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"model_type\": \"llama\",\n"
    "\"hidden_size\": 256, \"intermediate_size\": 384, \"num_attention_heads\": 2,\n"
    "\"num_key_value_heads\": 2, \"head_dim\": 128, \"num_hidden_layers\": 1,\n"
    "\"vocab_size\": 2048, \"draft_vocab_size\": 1000, \"rms_norm_eps\": 1e-6,\n"
    "\"rope_theta\": 10000.0, \"max_position_embeddings\": 2048, \"hidden_act\": \"silu\",\n"
    "\"fc_norm\": true, \"norm_output\": true,\n"
    "\"eagle_config\": {\"eagle_aux_hidden_state_layer_ids\": [1, 3, 5]}}\n";

// With a draft head too the tokens are the same; it sees what follows the prefix.
static void test_draft_head(void) {
    static const char head[] = SCRATCH "test_reuse_head.json";
    FILE *f = fopen(head, "w");
    if (!f) die(head, "cannot be written");
    fputs(head_config, f);
    fclose(f);
    int32_t tokens[LONGEST];
    session t[2];
    for (int i = 0; i < 2; i++) {
        sala_options o = reuse_options(i ? "off" : "prefix", 128);
        o.synthetic = 1;
        o.draft = head;
        o.spec = "eagle";
        t[i] = session_open(SALA_TINY "/config.json", &o);
    }
    prompt_of(tokens, 0, 70);
    for (int i = 0; i < 3; i++) {
        sala_request r = request_of(tokens, 200 + 30 * i, 20);
        outcome *a = session_do(&t[0], &r), *b = session_do(&t[1], &r);
        CHECK(same_choices(a, b), "request %d", i);
        CHECK(a->timings.reused_tokens == (i ? 192 : 0), "request %d: %lld reused", i,
              (long long)a->timings.reused_tokens);
        CHECK(a->timings.verifies[SALA_DRAFT_EAGLE] > 0, "no trees");
    }
    session_close(&t[0]);
    session_close(&t[1]);
    remove(head);
}

TEST_MAIN(TEST(test_prefixes), TEST(test_only_prefilled), TEST(test_burst), TEST(test_crowd),
          TEST(test_requests_win), TEST(test_options), TEST(test_odd_blocks), TEST(test_no_memory),
          TEST(test_history), TEST(test_history_waits), TEST(test_draft_head))
