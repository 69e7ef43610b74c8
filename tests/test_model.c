#define SALA_IMPLEMENTATION
#include "../sala.h"
// Whole models: against the float64 reference (tests/reference, tools/make_vectors.py) and sala-tiny's golden
// file within tolerances, and the promises of the engine against itself, bit by bit. Built twice: as the engine
// is, with BF16 between operations, and as test_model_fp32 with FP32 there, which must meet the reference.
#include "check.h"
#include "model.h"
#include "poison.h"

#ifdef SALA_ACT_FP32
#define FP32 1
#else
#define FP32 0
#endif

// ---- the reference's files ----

typedef struct vectors {
    const char *name;
    int synthetic, logits_step, hidden_step; // as tools/make_vectors.py has them
    uint64_t seed;
    double bf16_drift; // of the reference itself with BF16 activations (make_vectors.py prints it)
} vectors;

static const vectors vector_cases[] = {
    {"tiny", 0, 1, 5, 0, 0.028},
    {"always", 0, 1, 5, 0, 0.014},
    {"geom", 1, 5, 65, 1, 0.009},
    {"plain", 1, 3, 7, 2, 0.014},
};
enum { VECTORS = (int)(sizeof vector_cases / sizeof vector_cases[0]) };

static void *read_file(const char *folder, const char *name, size_t *size) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) die(path, "cannot be opened (run from the top folder of the project)");
    fseek(f, 0, SEEK_END);
    long bytes = ftell(f);
    rewind(f);
    void *data = need(malloc((size_t)bytes + 1));
    if (fread(data, 1, (size_t)bytes, f) != (size_t)bytes) die(path, "cannot be read");
    fclose(f);
    *size = (size_t)bytes;
    return data;
}

typedef struct judge { // one case, read
    const vectors *v;
    char folder[128];
    int32_t *tokens; // [count]
    int64_t count;
    float *logits,
        *hidden; // [every logits_step-th, vocab], [layers + 2, every hidden_step-th, hidden]
    sala__json blocks;
} judge;

static judge judge_open(const vectors *v) {
    judge j;
    size_t size;
    sala_error err;
    static const sala__env none = {NULL, NULL, NULL, NULL};
    memset(&j, 0, sizeof j);
    j.v = v;
    snprintf(j.folder, sizeof j.folder, "tests/data/vectors/%s", v->name);
    j.tokens = (int32_t *)read_file(j.folder, "tokens.i32", &size);
    j.count = (int64_t)(size / 4);
    j.logits = (float *)read_file(j.folder, "logits.f32", &size);
    j.hidden = (float *)read_file(j.folder, "hidden.f32", &size);
    char path[256];
    snprintf(path, sizeof path, "%s/blocks.json", j.folder);
    if (sala__json_file(&none, path, 1 << 28, &j.blocks, &err) < 0) die(path, err.text);
    return j;
}

static void judge_close(judge *j) {
    free(j->tokens);
    free(j->logits);
    free(j->hidden);
    sala__json_free(&j->blocks);
}

static session judge_engine(const judge *j, int chunk) {
    sala_options o = small_options(chunk, chunk);
    char path[256];
    o.hidden_states = 1;
    o.max_sequences = 2;
    o.context = j->count + 16;
    o.synthetic = j->v->synthetic;
    o.synthetic_seed = j->v->seed;
    snprintf(path, sizeof path, "%s%s", j->folder, o.synthetic ? "/config.json" : "");
    session t = session_open(path, &o);
    CHECK(t.info.vocab > 0 && j->count > 100, "a model and a test of some length");
    return t;
}

// All of a case's tokens as the prompt, or all but the first as forced output.
static outcome *judge_run(const judge *j, session *t, int step) {
    sala_request r = request_of(j->tokens, step ? 1 : j->count, 1);
    if (step) request_force(&r, j->tokens + 1, j->count - 1);
    if (step) r.max_tokens++;
    r.want_rows = SALA_ROWS_ALL;
    return session_do(t, &r);
}

// What is asserted: FP32 meets the float64 reference to `all` over everything and `row` for each single row of
// logits or hidden state; BF16 stays within twice the drift that the reference itself has with BF16 activations.
static double limit_all(const vectors *v) {
    return FP32 ? 2e-6 : 2 * v->bf16_drift;
}

static void compare_logits(const judge *j, const session *t, const outcome *o, const char *what) {
    size_t vocab = (size_t)t->info.vocab, rows = 0;
    float *got = (float *)need(malloc((size_t)j->count * vocab * 4));
    double worst = 0;
    for (int64_t p = 0; p < j->count; p += j->v->logits_step, rows++) {
        CHECK(o->seen[p], "%s %s: no logits at %lld", j->v->name, what, (long long)p);
        memcpy(got + rows * vocab, o->logits + (size_t)p * vocab, vocab * 4);
        double e = relative(got + rows * vocab, j->logits + rows * vocab, vocab);
        if (!(e <= worst)) worst = e;
    }
    double all = relative(got, j->logits, rows * vocab);
    CHECK(all <= limit_all(j->v), "%s %s: logits differ by %.3g", j->v->name, what, all);
    CHECK(!FP32 || worst <= 1e-5, "%s %s: a row of logits differs by %.3g", j->v->name, what,
          worst);
    free(got);
}

static void compare_hidden(const judge *j, const session *t, const outcome *o, const char *what) {
    size_t width = (size_t)t->info.hidden,
           rows = ((size_t)j->count - 1) / (size_t)j->v->hidden_step + 1;
    for (size_t l = 0; l < (size_t)t->info.layers + 2; l++) {
        double sum = 0, worst = 0;
        for (size_t i = 0; i < rows; i++) {
            size_t p = i * (size_t)j->v->hidden_step;
            double e = relative(o->hidden + p * t->hidden_row + l * width,
                                j->hidden + (l * rows + i) * width, width);
            if (!(e <= worst)) worst = e;
            sum += e;
        }
        double limit = l == 0 ? (FP32 ? 1e-7 : 3e-3) : limit_all(j->v) + (FP32 ? 0 : 5e-3);
        CHECK(sum / (double)rows <= limit, "%s %s: hidden state %zu differs by %.3g", j->v->name,
              what, l, sum / (double)rows);
        CHECK(!FP32 || worst <= 1e-5, "%s %s: a row of hidden state %zu differs by %.3g",
              j->v->name, what, l, worst);
    }
}

static void test_vectors(void) {
    for (int c = 0; c < VECTORS; c++) {
        judge j = judge_open(&vector_cases[c]);
        for (int chunk = 64; chunk <= 256; chunk *= 2) {
            session t = judge_engine(&j, chunk);
            outcome *o = judge_run(&j, &t, 0);
            compare_logits(&j, &t, o, "prefill");
            compare_hidden(&j, &t, o, "prefill");
            session_close(&t);
        }
        session t = judge_engine(&j, 64);
        outcome *o = judge_run(&j, &t, 1);
        compare_logits(&j, &t, o, "step");
        compare_hidden(&j, &t, o, "step");
        session_close(&t);
        judge_close(&j);
    }
}

// One list of the file against one of the engine. Returns 1 when they are equal.
static int same_blocks(const sala__json *file, int node, const int32_t *got, int top_k) {
    if (sala__json_at(file, node)->type == SALA__NULL) return got[0] == -2;
    int i = 0;
    for (int n = file->nodes[node].child; n >= 0; n = file->nodes[n].next, i++)
        if (i >= top_k || got[i] != (int32_t)file->nodes[n].integer) return 0;
    return i == top_k || got[i] == -1;
}

static void compare_blocks(const judge *j, const session *t, const outcome *o, const char *what) {
    const sala__json *file = &j->blocks;
    int picks = sala__json_get(file, 0, "blocks"), gaps = sala__json_get(file, 0, "gaps"),
        sparse = 0, dense = 0, exact = 0, clear = 0;
    int wrong = 0;
    for (int l = 0; l < t->info.layers; l++) {
        char key[16];
        snprintf(key, sizeof key, "%d", l);
        int rows = sala__json_get(file, picks, key), gap_rows = sala__json_get(file, gaps, key);
        if (rows < 0) continue;
        rows = file->nodes[rows].child;
        gap_rows = file->nodes[gap_rows].child;
        for (int64_t p = 0; p < j->count;
             p++, rows = file->nodes[rows].next, gap_rows = file->nodes[gap_rows].next) {
            int list = file->nodes[rows].child, gap = file->nodes[gap_rows].child;
            for (int g = 0; g < t->info.kv_heads;
                 g++, list = file->nodes[list].next, gap = file->nodes[gap].next) {
                const sala__json_node *n = &file->nodes[gap];
                const int32_t *got = o->blocks + (size_t)p * t->blocks_row +
                                     (size_t)((sparse * t->info.kv_heads + g) * t->info.top_k);
                int dropped = n->type == SALA__NUMBER;
                if (dropped && n->number != 0 && n->number <= 1e-4)
                    continue; // two different rows nearly equal
                dense += file->nodes[list].type == SALA__NULL;
                exact += dropped && n->number == 0;
                clear += dropped && n->number != 0;
                if (same_blocks(file, list, got, t->info.top_k)) continue;
                wrong++;
                CHECK(wrong > 3, "%s %s: layer %d, position %lld, K/V head %d: other blocks",
                      j->v->name, what, l, (long long)p, g);
            }
        }
        sparse++;
    }
    CHECK(wrong == 0, "%s %s: %d selections differ", j->v->name, what, wrong);
    CHECK(sparse == t->info.sparse_layers && clear > 50 && exact > 20,
          "%s: only %d clear selections and %d ties", j->v->name, clear, exact);
    CHECK((dense > 0) == (t->info.dense_len > 1), "%s: %d rows are dense", j->v->name, dense);
}

static void
test_selections(void) { // BF16 moves the scores of the layers after the first: FP32 only
    for (int c = 0; FP32 && c < VECTORS; c++) {
        judge j = judge_open(&vector_cases[c]);
        session t = judge_engine(&j, 128);
        compare_blocks(&j, &t, judge_run(&j, &t, 0), "prefill");
        compare_blocks(&j, &t, judge_run(&j, &t, 1), "step");
        session_close(&t);
        judge_close(&j);
    }
}

// What is shown changes nothing: hidden states on or off, rows wanted or not.
static void test_rows_are_only_shown(void) {
    judge j = judge_open(&vector_cases[0]);
    session t = judge_engine(&j, 64);
    sala_options o = small_options(64, 64);
    session plain = session_open(j.folder, &o);
    sala_request r = request_of(j.tokens, 200, 40);
    outcome *none = session_do(&t, &r);
    r.want_rows = SALA_ROWS_ALL;
    session_do(&t, &r);
    session_do(&plain, &r);
    CHECK(same_choices(&t.out[0], &t.out[1]) && same_choices(&t.out[0], &plain.out[0]),
          "tokens differ");
    none = &plain.out[0];
    for (size_t p = 0; p < 239; p++)
        CHECK(none->seen[p] && memcmp(none->logits + p * 97, t.out[1].logits + p * 97, 97 * 4) == 0,
              "logits of %zu differ", p);
    session_close(&plain);
    session_close(&t);
    judge_close(&j);
}

// ---- sala-tiny's golden file ----

typedef struct golden {
    sala__json json;
    int prompts; // first node of the list
} golden;

static golden golden_open(void) {
    golden g;
    sala_error err;
    static const sala__env none = {NULL, NULL, NULL, NULL};
    if (sala__json_file(&none, SALA_TINY "/golden.json", 1 << 24, &g.json, &err) < 0)
        die("golden", err.text);
    g.prompts = g.json.nodes[sala__json_get(&g.json, 0, "prompts")].child;
    return g;
}

static session golden_engine(void) {
    sala_options o = small_options(512, 64);
    o.context = 4096;
    o.kv_tokens = 6144;
    return session_open(SALA_TINY, &o);
}

enum { GOLDEN_TOKENS = 64, GOLDEN_PROMPT = 3072 };

static void test_golden_tokenizer(void) {
    golden g = golden_open();
    session t = golden_engine();
    for (int node = g.prompts; node >= 0; node = g.json.nodes[node].next) {
        int32_t want[GOLDEN_PROMPT], *got;
        sala_error err;
        int text = sala__json_get(&g.json, node, "prompt"),
            count = json_list(&g.json, node, "prompt_ids", want, NULL, GOLDEN_PROMPT);
        int64_t n =
            sala_tokenize(t.engine, sala__json_text(&g.json, text), g.json.nodes[text].text_size,
                          SALA_ADD_BOS | SALA_PARSE_SPECIAL, &got, &err);
        CHECK(n == count && memcmp(got, want, (size_t)count * 4) == 0,
              "a prompt of %d tokens became %lld others", count, (long long)n);
        sala_free(t.engine, got);
    }
    session_close(&t);
    sala__json_free(&g.json);
}

// Greedy tokens (FP32), or the choice at each position of the file's own continuation where its margin is clear.
static void test_golden_tokens(void) {
    golden g = golden_open();
    session t = golden_engine();
    int prompts = 0, judged = 0;
    for (int node = g.prompts; node >= 0; node = g.json.nodes[node].next, prompts++) {
        int32_t prompt[GOLDEN_PROMPT], want[GOLDEN_TOKENS];
        double margin[GOLDEN_TOKENS];
        int count = json_list(&g.json, node, "prompt_ids", prompt, NULL, GOLDEN_PROMPT);
        int tokens = json_list(&g.json, node, "continuation_ids", want, NULL, GOLDEN_TOKENS);
        json_list(&g.json, node, "margins", NULL, margin, GOLDEN_TOKENS);
        sala_request r = request_of(prompt, count, tokens);
        r.special_text = 1;
        CHECK(tokens == GOLDEN_TOKENS, "%d tokens in the file", tokens);
        if (FP32) {
            outcome *o = session_do(&t, &r);
            CHECK(o->count == tokens && memcmp(o->tokens, want, sizeof want) == 0,
                  "prompt %d: greedy tokens differ", prompts);
            int text = sala__json_get(&g.json, node, "continuation_text");
            CHECK(o->bytes == g.json.nodes[text].text_size &&
                      memcmp(o->text, sala__json_text(&g.json, text), o->bytes) == 0,
                  "prompt %d: the text is\n%s\nnot\n%s", prompts, o->text,
                  sala__json_text(&g.json, text));
        }
        request_force(&r, want, tokens);
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *o = session_do(&t, &r);
        for (int i = 1; i < tokens; i++) { // the row of position count + i - 1 chooses token i
            const float *x = o->logits + (size_t)(count + i - 1) * 2048;
            int best = 0;
            for (int k = 1; k < 2048; k++)
                if (x[k] > x[best]) best = k;
            if (margin[i] <= (FP32 ? 1e-3 : 0.3)) continue;
            judged++;
            CHECK(best == want[i], "prompt %d, token %d: %d instead of %d, margin %g", prompts, i,
                  best, want[i], margin[i]);
        }
    }
    CHECK(prompts == 6 && judged > 200, "%d prompts, %d clear tokens", prompts, judged);
    session_close(&t);
    sala__json_free(&g.json);
}

static void test_golden_logits(void) { // the five best after the prompt
    golden g = golden_open();
    session t = golden_engine();
    for (int node = g.prompts; node >= 0; node = g.json.nodes[node].next) {
        int32_t prompt[GOLDEN_PROMPT], ids[5];
        double logits[5];
        int count = json_list(&g.json, node, "prompt_ids", prompt, NULL, GOLDEN_PROMPT);
        json_list(&g.json, node, "top5_ids", ids, NULL, 5);
        json_list(&g.json, node, "top5_logits", NULL, logits, 5);
        if (!FP32 && count > 1000) continue;
        sala_request r = request_of(prompt, count, 1);
        r.want_rows = SALA_ROWS_PROMPT;
        const float *x = session_do(&t, &r)->logits + (size_t)(count - 1) * 2048;
        for (int i = 0; i < 5; i++) {
            double d = fabs((double)x[ids[i]] - logits[i]),
                   limit = FP32 ? 1e-3 : 0.05 * fabs(logits[0]);
            CHECK(d <= limit, "prompt of %d: logit %d is %g, not %g", count, ids[i],
                  (double)x[ids[i]], logits[i]);
        }
        session_forget(&t);
    }
    session_close(&t);
    sala__json_free(&g.json);
}

// ---- promise 1: batch invariance ----

enum { LONG = 1400 };

static const sala_options *crowd_options(sala_options *o, int threads, int sequences) {
    *o = small_options(256, 256);
    o->threads = threads;
    o->max_sequences = sequences;
    o->context = LONG + 64;
    o->kv_tokens = 4 * LONG + 128 * sequences;
    o->hidden_states = 1;
    return o;
}

// The requests whose answers must not depend on their company; request i of a fixed list.
static sala_request crowd_member(int i, const int32_t *tokens) {
    static const int lengths[] = {1, 63, 64, 200, 700, LONG - 100};
    sala_request r = request_of(tokens + 7 * i, lengths[i], 24);
    if (i % 2) request_sampled(&r, 1000 + (uint64_t)i);
    r.want_rows =
        i == 4 ? SALA_ROWS_GENERATED : SALA_ROWS_ALL; // with rows of the prompt, prefill goes alone
    return r;
}

static void company(session *t, const int32_t *tokens,
                    int more) { // random requests beside the one in question
    sala_info info;
    sala_get_info(t->engine, &info);
    for (; more > 0 && info.requests_waiting + more < 6; more--) {
        sala_request r = request_of(tokens + below(LONG / 2), 1 + below(LONG / 4), 1 + below(60));
        if (below(2)) request_sampled(&r, check_random());
        session_ask(t, &r);
    }
}

static void test_batch_invariance(void) {
    static const int threads[] = {1, 2, 3, 7, 2, 2}, sequences[] = {9, 2, 3, 8, 5, 9};
    int32_t tokens[LONG + 100];
    sala_options o;
    check_seed = 101;
    random_tokens(tokens, LONG + 100, 97);
    session alone = session_open(TINY, crowd_options(&o, 2, 1));
    for (int i = 0; i < 6; i++) {
        sala_request r = crowd_member(i, tokens);
        session_do(&alone, &r);
    }
    for (int round = 0; round < 6; round++) {
        session t = session_open(TINY, crowd_options(&o, threads[round], sequences[round]));
        for (int i = 0; i < 6; i++) {
            company(&t, tokens, below(sequences[round]));
            for (int steps = below(8); steps > 0; steps--) session_step(&t);
            sala_request r = crowd_member(i, tokens);
            int at = session_ask(&t, &r);
            while (!t.out[at].finished) {
                if (below(4) == 0) company(&t, tokens, 1 + below(2));
                session_step(&t);
            }
            int64_t n = r.token_count, from = r.want_rows & SALA_ROWS_PROMPT ? 0 : n;
            CHECK(same_choices(&t.out[at], &alone.out[i]), "round %d, request %d: other tokens",
                  round, i);
            int64_t d = first_difference(&t, &t.out[at], &alone.out[i], from, n + 23);
            CHECK(d < 0, "round %d (%d threads, %d sequences), request %d: position %lld differs",
                  round, threads[round], sequences[round], i, (long long)d);
        }
        session_run(&t);
        session_close(&t);
    }
    session_close(&alone);
}

// ---- promise 2: chunk invariance ----

// Prompts of all these lengths with every chunk size: the same rows, the same memory afterwards; and a prompt's
// rows do not depend on what follows.
static void chunk_invariance(const char *path, const int *lengths, int count, int32_t vocab,
                             int hidden) {
    static const int chunks[] = {64, 128, 192, 512, 2048};
    int32_t tokens[LONG];
    memory want[32];
    session first;
    memset(&first, 0, sizeof first);
    random_tokens(tokens, LONG, vocab);
    for (int c = 0; c < 5; c++) {
        sala_options o = small_options(chunks[c], chunks[c]);
        o.context = LONG + 16;
        o.max_sequences = 2;
        o.threads = 1 + c % 3;
        o.hidden_states = hidden;
        session t = session_open(path, &o);
        for (int i = 0; i < count; i++) {
            sala_request r = request_of(tokens, lengths[i], 1);
            request_force(&r, tokens + 5, 3);
            r.want_rows = SALA_ROWS_ALL;
            r.keep = 1;
            outcome *got = session_do(&t, &r);
            memory m = memory_of(&t, got->sequence);
            session_give_up(&t, got->sequence);
            if (c == 0) {
                want[i] = m;
                int64_t d = i ? first_difference(&t, got, &t.out[i - 1], 0, lengths[i - 1]) : -1;
                CHECK(d < 0, "length %d: position %lld differs from that of a shorter prompt",
                      lengths[i], (long long)d);
                continue;
            }
            int64_t d = first_difference(&t, got, &first.out[i], 0, lengths[i] + 2);
            CHECK(d < 0, "length %d: with chunks of %d position %lld differs", lengths[i],
                  chunks[c], (long long)d);
            CHECK(memory_same(&m, &want[i]),
                  "length %d: with chunks of %d the cache or the states differ", lengths[i],
                  chunks[c]);
            free(m.data);
        }
        if (c == 0)
            first = t;
        else
            session_close(&t);
    }
    session_close(&first);
    for (int i = 0; i < count; i++) free(want[i].data);
}

static void test_chunk_invariance(void) {
    // Around tiles of 64, its blocks of 16 and tiers (8/4, 32/16), its dense_len of 60, and far beyond.
    static const int lengths[] = {1,  7,  8,   15,  16,  17,  31,  32,  33,  59,  60,  61,   63,
                                  64, 65, 127, 128, 129, 191, 192, 193, 512, 513, 600, 1037, 1300};
    check_seed = 102;
    chunk_invariance(TINY, lengths, (int)(sizeof lengths / sizeof lengths[0]), 97, 1);
}

static void
test_chunk_invariance_sala_tiny(void) { // the released block geometry; it drops blocks from 768 on
    static const int lengths[] = {511, 1090};
    check_seed = 103;
    chunk_invariance(SALA_TINY, lengths, 2, 2046, 0);
}

// ---- compressed rows ----

// Every row of both tiers is the mean of its window, summed in order of position: exactly, after prefill in
// uneven chunks and decoding.
static void test_tier_rows(void) {
    static const char *const paths[] = {TINY_CONFIG, "tests/data/vectors/plain/config.json"};
    int32_t tokens[300];
    check_seed = 106;
    random_tokens(tokens, 300, 97);
    for (int c = 0; c < 2; c++) {
        sala_options o = small_options(64, 0);
        o.synthetic = 1;
        session t = session_open(paths[c], &o);
        const sala_dims *d = &t.engine->config.dims;
        sala_request r = request_of(tokens, 150, 1);
        request_force(&r, tokens + 150, 150);
        r.keep = 1;
        int64_t id = session_do(&t, &r)->sequence;
        sala__sequence *q = sequence_of(&t, id);
        sala_seq seq = {0, 0, 0, q->stored, 0, 0, q->pages};
        CHECK(q->stored == 299, "%d tokens are stored", q->stored);
        for (int l = 0; l < t.engine->sparse_layers; l++)
            for (int g = 0; g < d->kv_heads; g++)
                for (int tier = 1; tier <= 2; tier++) {
                    sala_pages *pages = &t.engine->pages[l];
                    int kernel = d->kernel * (tier == 1 ? 1 : 4),
                        stride = d->stride * (tier == 1 ? 1 : 4);
                    int rows = (q->stored - kernel) / stride + 1;
                    CHECK(rows == sala_tier_rows(d, tier, q->stored) && rows > 5, "%d rows", rows);
                    for (int j = 0; j < rows; j++) {
                        const sala_act *row = sala__tier_slot(
                            d, &seq, tier == 1 ? pages->tier1 : pages->tier2, tier, g, j);
                        for (int x = 0; x < d->head_dim; x++) {
                            float sum = 0;
                            for (int u = stride * j; u < stride * j + kernel; u++)
                                sum += sala_act_f32(
                                    sala__kv_at(d, NULL, &seq, pages->k, NULL, 0, g, u)[x]);
                            sala_act want = sala_store(sum / (float)kernel);
                            CHECK(memcmp(&want, &row[x], sizeof want) == 0,
                                  "layer %d, head %d, tier %d, row %d, element %d", l, g, tier, j,
                                  x);
                        }
                    }
                }
        session_give_up(&t, id);
        session_close(&t);
    }
}

// ---- promise 4: determinism ----

static void test_determinism(void) {
    int32_t tokens[LONG];
    sala_options o;
    check_seed = 104;
    random_tokens(tokens, LONG, 97);
    session t = session_open(TINY, crowd_options(&o, 2, 6));
    int first = -1;
    for (int round = 0; round < 6; round++) {
        int64_t kept[5]; // shuffle slots and pages: keep some sequences, free them in another order
        for (int i = 0; i < 5; i++) {
            sala_request r = request_of(tokens + below(300), 1 + below(400), 2);
            r.keep = 1;
            kept[i] = session_do(&t, &r)->sequence;
        }
        int hold = below(5); // this one stays during the run
        for (int i = 4; i > 0; i--) {
            int with = below(i + 1);
            int64_t swap = kept[i];
            kept[i] = kept[with];
            kept[with] = swap;
        }
        for (int i = 0; i < 5; i++)
            if (i != hold) session_give_up(&t, kept[i]);
        sala_request r = request_of(tokens, 777, 40);
        request_sampled(&r, 5);
        r.want_rows = SALA_ROWS_ALL;
        session_do(&t, &r);
        session_give_up(&t, kept[hold]);
        if (round == 0) first = t.count - 1;
        CHECK(same_choices(&t.out[t.count - 1], &t.out[first]), "round %d: other tokens", round);
        int64_t d = first_difference(&t, &t.out[t.count - 1], &t.out[first], 0, 777 + 39);
        CHECK(d < 0, "round %d: position %lld differs", round, (long long)d);
    }
    session fresh = session_open(TINY, crowd_options(&o, 1, 2));
    sala_request r = request_of(tokens, 777, 40);
    request_sampled(&r, 5);
    r.want_rows = SALA_ROWS_ALL;
    outcome *again = session_do(&fresh, &r);
    CHECK(same_choices(again, &t.out[first]), "a fresh engine chooses other tokens");
    CHECK(first_difference(&t, again, &t.out[first], 0, 777 + 39) < 0,
          "a fresh engine has other logits");
    r.seed++;
    CHECK(!same_choices(session_do(&fresh, &r), &t.out[first]),
          "another seed gives the same tokens");
    session_close(&fresh);
    session_close(&t);
}

// ---- poison: what is not part of the history is never read ----

static void test_poison(void) {
    int32_t tokens[LONG + 100];
    sala_options o;
    check_seed = 105;
    random_tokens(tokens, LONG + 100, 97);
    session clean = session_open(TINY, crowd_options(&o, 2, 3));
    session t = session_open(TINY, crowd_options(&o, 2, 3));
    t.after_step = poison;
    poison(t.engine);
    for (int i = 0; i < 6; i++) {
        sala_request r = crowd_member(i, tokens);
        session_ask(&clean, &r);
        session_ask(&t, &r);
    }
    session_run(&clean);
    session_run(&t);
    for (int i = 0; i < 6; i++) {
        sala_request r = crowd_member(i, tokens);
        int64_t n = r.token_count, from = r.want_rows & SALA_ROWS_PROMPT ? 0 : n;
        CHECK(same_choices(&t.out[i], &clean.out[i]), "request %d: other tokens", i);
        CHECK(first_difference(&t, &t.out[i], &clean.out[i], from, n + 23) < 0,
              "request %d: garbage was read", i);
        CHECK(t.out[i].reason == SALA_FINISH_LENGTH, "request %d: reason %d", i, t.out[i].reason);
    }
    session_close(&t);
    session_close(&clean);
}

TEST_MAIN(TEST(test_vectors), TEST(test_selections), TEST(test_rows_are_only_shown),
          TEST(test_golden_tokenizer), TEST(test_golden_tokens), TEST(test_golden_logits),
          TEST(test_batch_invariance), TEST(test_chunk_invariance),
          TEST(test_chunk_invariance_sala_tiny), TEST(test_tier_rows), TEST(test_determinism),
          TEST(test_poison))
