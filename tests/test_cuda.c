// The whole engine on a CUDA device: the simulator (default) or a GPU (SALA_TEST_GPU=N). The promises are compared
// in bits; the CPU is the judge of the numbers.
#define SALA_IMPLEMENTATION
#include "../sala.h"

#include "check.h"
#include "device.h"
#include "model.h"
#include "plant.h"
#include "features.h"
#include "quant_files.h"
#include <dirent.h>

#define GEOM "tests/data/vectors/geom/config.json"

static int quick = 1; // the simulator is slow: fewer tokens

static const char *cuda_name(void) {
    static char name[32];
    const char *ordinal = getenv("SALA_TEST_GPU");
    quick = ordinal == NULL;
    snprintf(name, sizeof name, "cuda:%s", ordinal ? ordinal : "0");
    return name;
}

static sala_options cuda_options(int sequences, int logits_rows) {
    sala_options o = small_options(256, logits_rows);
    o.device = cuda_name();
    o.max_sequences = sequences;
    return o;
}

// A prompt that is long enough for block selection in sala-tiny (dense below 512, 8 blocks of 64).
static int long_prompt(int32_t *tokens) {
    int n = quick ? 560 : 900;
    check_seed = 11;
    random_tokens(tokens, n, 2000);
    return n;
}

// ---- numbers: against the CPU ----

// The same tokens are forced on both devices; rows are compared where both have them.
static void against_cpu(const char *path, int synthetic, const int32_t *tokens, int prompt,
                        int forced, double most, int most_other, const char *what) {
    sala_options o = cuda_options(1, prompt + forced);
    o.synthetic = synthetic;
    o.synthetic_seed = 1;
    session g = session_open(path, &o);
    o.device = "cpu";
    session c = session_open(path, &o);
    sala_request r = request_of(tokens, prompt, forced);
    request_force(&r, tokens + prompt, forced);
    r.want_rows = SALA_ROWS_ALL;
    outcome *a = session_do(&g, &r), *b = session_do(&c, &r);
    size_t vocab = (size_t)g.info.vocab;
    double sum = 0, worst = 0;
    int n = 0, other = 0;
    for (int p = 0; p < prompt + forced - 1; p++) {
        CHECK(a->seen[p] && b->seen[p], "%s: position %d is missing", what, p);
        const float *x = a->logits + (size_t)p * vocab, *y = b->logits + (size_t)p * vocab;
        double d = relative(x, y, vocab);
        sum += d;
        if (d > worst) worst = d;
        n++;
        int32_t best = sala__sampler_argmax(y, (int32_t)vocab);
        float second = -INFINITY;
        for (int32_t t = 0; t < (int32_t)vocab; t++)
            if (t != best && y[t] > second) second = y[t];
        if (y[best] - second > 0.3f && sala__sampler_argmax(x, (int32_t)vocab) != best) other++;
    }
    printf("      %s: |GPU - CPU| / |CPU| of logits: mean %.4f, worst %.4f of %d rows\n", what,
           sum / n, worst, n);
    CHECK(sum / n < most, "%s: mean difference %.4f, allowed %.4f", what, sum / n, most);
    CHECK(other <= most_other, "%s: %d rows with a clear best token choose another", what, other);
    session_close(&g);
    session_close(&c);
}

static void test_short_prompt(void) {
    int32_t tokens[120];
    check_seed = 3;
    random_tokens(tokens, 120, 2000);
    against_cpu(SALA_TINY, 0, tokens, 80, 20, 0.02, 0, "sala-tiny, 80 + 20 tokens");
}

static void test_long_prompt(void) {
    int32_t tokens[1000];
    int n = long_prompt(tokens);
    // Random text has near-ties of block scores: where a device picks the other block, rows differ.
    against_cpu(SALA_TINY, 0, tokens, n - 16, 16, 0.02, n / 100, "sala-tiny, with block selection");
}

// The prompts of sala-tiny's golden file with their continuations, forced: the best token of each
// row is the file's wherever its margin is above 0.3.
static void test_golden(void) {
    static const sala__env none = {NULL, NULL, NULL, NULL};
    enum { LONGEST = 3072, MORE = 64 };
    sala__json j;
    sala_error err;
    if (sala__json_file(&none, SALA_TINY "/golden.json", 1 << 24, &j, &err) < 0)
        die("golden.json", err.text);
    sala_options o = cuda_options(1, 64);
    o.context = 4096;
    session t = session_open(SALA_TINY, &o);
    int judged = 0, node = j.nodes[sala__json_get(&j, 0, "prompts")].child;
    for (; node >= 0; node = j.nodes[node].next) {
        int32_t prompt[LONGEST], want[MORE];
        double margin[MORE];
        int count = json_list(&j, node, "prompt_ids", prompt, NULL, LONGEST);
        int more = json_list(&j, node, "continuation_ids", want, NULL, MORE);
        json_list(&j, node, "margins", NULL, margin, MORE);
        if (quick && count > 100) continue;
        if (quick) more = 20;
        sala_request r = request_of(prompt, count, more);
        request_force(&r, want, more);
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *out = session_do(&t, &r);
        for (int i = 1; i < more; i++) { // the row of position count + i - 1 chooses token i
            const float *x = out->logits + (size_t)(count + i - 1) * (size_t)t.info.vocab;
            int32_t best = sala__sampler_argmax(x, t.info.vocab);
            if (margin[i] <= 0.3) continue;
            judged++;
            CHECK(best == want[i], "a prompt of %d, token %d: %d instead of %d, margin %g", count,
                  i, (int)best, (int)want[i], margin[i]);
        }
    }
    CHECK(judged > 20, "%d clear tokens", judged);
    printf("      %d clear tokens of golden prompts\n", judged);
    session_close(&t);
    sala__json_free(&j);
}

static void test_released_geometry(void) {
    int32_t tokens[300];
    check_seed = 5;
    random_tokens(tokens, 300, 90);
    int n = 300;
    against_cpu(GEOM, 1, tokens, quick ? 70 : 280, 12, 0.05, n / 100,
                "heads and blocks as released");
}

// ---- promises ----

static sala_request member(int i, const int32_t *tokens) {
    static const int lengths[] = {1, 17, 64, 40, 130};
    sala_request r = request_of(tokens + 5 * i, lengths[i], 6);
    if (i % 2) request_sampled(&r, 700 + (uint64_t)i);
    if (i == 3) r.repetition_penalty = 1.2f;
    r.want_rows = SALA_ROWS_GENERATED;
    return r;
}

static void test_batch_invariance(void) {
    int32_t tokens[300];
    check_seed = 21;
    random_tokens(tokens, 300, 2000);
    sala_options o = cuda_options(1, 64);
    session alone = session_open(SALA_TINY, &o);
    for (int i = 0; i < 5; i++) {
        sala_request r = member(i, tokens);
        session_do(&alone, &r);
    }
    for (int sequences = quick ? 5 : 3; sequences <= 5; sequences += 2) {
        o = cuda_options(sequences, 64);
        session t = session_open(SALA_TINY, &o);
        for (int i = 4; i >= 0; i--) {
            sala_request r = member(i, tokens);
            session_ask(&t, &r);
        }
        session_run(&t);
        for (int i = 0; i < 5; i++) {
            sala_request r = member(i, tokens);
            outcome *b = &t.out[4 - i];
            CHECK(same_choices(b, &alone.out[i]), "%d sequences, request %d: other tokens",
                  sequences, i);
            int64_t d = first_difference(&t, b, &alone.out[i], r.token_count, r.token_count + 5);
            CHECK(d < 0, "%d sequences, request %d: position %lld differs", sequences, i,
                  (long long)d);
        }
        session_close(&t);
    }
    session_close(&alone);
}

static void test_chunk_invariance_and_determinism(void) {
    int32_t tokens[1000];
    int n = long_prompt(tokens), runs = quick ? 2 : 3;
    if (quick) n = 200; // selection is compared in test_long_prompt
    outcome *first = NULL;
    session t[3];
    for (int i = 0; i < runs; i++) {
        sala_options o = cuda_options(2, 64);
        o.chunk = i == 0 ? 64 : 512;
        o.logits_rows = 512;
        t[i] = session_open(SALA_TINY, &o);
        sala_request r = request_of(tokens, n, 6);
        request_sampled(&r, 9);
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *out = session_do(&t[i], &r);
        if (i == 0) first = out;
        CHECK(same_choices(out, first), "run %d (chunk %d): other tokens", i, o.chunk);
        CHECK(first_difference(&t[i], out, first, n, n + 5) < 0, "run %d (chunk %d): other bits", i,
              o.chunk);
    }
    for (int i = 0; i < runs; i++) session_close(&t[i]);
}

// Hidden states are shown by a pass without a graph: the same bits as with one.
static void test_graphs_change_nothing(void) {
    int32_t tokens[100];
    check_seed = 31;
    random_tokens(tokens, 100, 2000);
    sala_options o = cuda_options(2, 128);
    session with = session_open(SALA_TINY, &o);
    o.hidden_states = 1;
    session without = session_open(SALA_TINY, &o);
    sala_request r = request_of(tokens, 90, 5);
    r.want_rows = SALA_ROWS_ALL;
    outcome *a = session_do(&with, &r), *b = session_do(&without, &r);
    CHECK(same_choices(a, b), "other tokens");
    CHECK(first_difference(&with, a, b, 0, 94) < 0, "other logits");
    CHECK(with.engine->gpu.graph_count > 0 && without.engine->gpu.graph_count == 0,
          "%d and %d graphs", with.engine->gpu.graph_count, without.engine->gpu.graph_count);
    session_close(&with);
    session_close(&without);
}

// A chat of two turns: a prompt of `prompt` tokens, `chosen` tokens, then `more` tokens of which the first ones end
// a pending path; all tokens are forced, so that every engine has the same history.
static outcome *two_turns(session *t, const int32_t *tokens, int prompt, int chosen, int more) {
    sala_request r = request_of(tokens, prompt, chosen);
    request_force(&r, tokens + prompt, chosen);
    r.keep = 1;
    int64_t sequence = session_do(t, &r)->sequence;
    r = request_of(tokens + prompt + chosen, more, 5);
    r.sequence = sequence;
    r.want_rows = SALA_ROWS_ALL;
    return session_do(t, &r);
}

// The second turn begins where no tile begins, on states into which a pending path was folded.
static void test_continued_sequence(void) {
    int32_t tokens[400];
    check_seed = 41;
    random_tokens(tokens, 400, 2000);
    const int prompt = 70, chosen = 5, more = quick ? 80 : 300, all = prompt + chosen + more;
    outcome *first = NULL;
    session t[2];
    for (int i = 0; i < 2; i++) {
        sala_options o = cuda_options(2, 64);
        o.chunk = i ? 64 : 512;
        t[i] = session_open(SALA_TINY, &o);
        outcome *b = two_turns(&t[i], tokens, prompt, chosen, more);
        if (i == 0) first = b;
        CHECK(same_choices(b, first), "chunks of %d: other tokens", o.chunk);
        CHECK(first_difference(&t[i], b, first, all, all + 4) < 0, "chunks of %d: other bits",
              o.chunk);
    }
    sala_options o = cuda_options(1, 64); // and on the CPU
    o.device = "cpu";
    session c = session_open(SALA_TINY, &o);
    outcome *b = two_turns(&c, tokens, prompt, chosen, more);
    size_t vocab = (size_t)c.info.vocab;
    for (int p = prompt + chosen; p < all; p += 7) { // rows of the second turn's prompt
        const float *x = first->logits + (size_t)p * vocab, *y = b->logits + (size_t)p * vocab;
        CHECK(relative(x, y, vocab) < 0.1, "position %d: |GPU - CPU| / |CPU| is %g", p,
              relative(x, y, vocab));
    }
    session_close(&c);
    session_close(&t[0]);
    session_close(&t[1]);
}

// Where a prompt goes on from a prefix, its bits are those of computing it. Pages and snapshots hold NaN at first.
static void test_prefix_reuse(void) {
    int32_t tokens[140];
    check_seed = 43;
    random_tokens(tokens, 140, 2000);
    sala_options o = cuda_options(2, 64);
    session t[2];
    for (int i = 0; i < 2; i++) {
        o.reuse = i ? "off" : "prefix";
        t[i] = session_open(SALA_TINY, &o);
        sala *s = t[i].engine;
        const sala__plan *p = &s->plan;
        size_t page = 2 * p->page_kv + p->page_tier1 + p->page_tier2;
        sala__cuda *c = &s->gpu.cuda;
        int code = sala__cuda_enter(c, NULL);
        for (int l = 0; l < s->sparse_layers && code == 0; l++)
            code = sala__cuda_fill(c, sala__on_gpu(s->pages[l].k), 0xFF,
                                   (size_t)p->pages * page * sizeof(sala_act), NULL);
        if (code == 0 && i == 0)
            code =
                sala__cuda_fill(c, sala__on_gpu(s->snapshots), 0xFF, (size_t)p->reuse_bytes, NULL);
        if (code < 0 || sala__cuda_wait(c, NULL) < 0) die("cuda", "cannot fill memory");
        sala__cuda_leave(c);
        sala_request r =
            request_of(tokens, 131, 2); // its one pass copies the states behind row 128
        if (i == 0) session_do(&t[i], &r);
        r = request_of(tokens, 139, 4);
        r.want_rows = SALA_ROWS_GENERATED;
        session_do(&t[i], &r);
    }
    outcome *a = &t[0].out[1], *b = &t[1].out[0];
    CHECK(a->timings.reused_tokens == 128, "%lld tokens reused",
          (long long)a->timings.reused_tokens);
    CHECK(same_choices(a, b), "other tokens");
    CHECK(first_difference(&t[0], a, b, 139, 142) < 0, "other bits");
    session_close(&t[0]);
    session_close(&t[1]);
}

// What sala_open takes is what the plan says. A driver hands memory out in pieces of up to 2 MiB.
static void test_memory_plan(void) {
    sala_options o = cuda_options(4, 64);
    o.context = quick ? 4096 : 1 << 20;
    o.chunk = 2048;
    double before, after, total;
    session holds = session_open(SALA_TINY, &o); // the context and what else the driver takes once
    sala__cuda *c = &holds.engine->gpu.cuda;
    if (sala__cuda_enter(c, NULL) < 0) die("cuda", "enter");
    sala__cuda_free_memory(c, &before, &total);
    session t = session_open(SALA_TINY, &o);
    sala__cuda_free_memory(c, &after, &total);
    sala__cuda_leave(c);
    double taken = before - after, planned = (double)t.info.total_bytes / (1 << 20);
    printf("      %.1f MiB planned, %.1f MiB taken\n", planned, taken);
    CHECK(taken > planned * 0.98 && taken < planned * 1.02 + (quick ? 0.1 : 100),
          "%.1f MiB planned, %.1f MiB taken", planned, taken);
    session_close(&t);
    session_close(&holds);
}

// ---- 4-bit weights ----

// Random weights of sala-tiny's shape: against the CPU, and the same bits in other chunks and company.
// Where x is quantised, a difference of a bit before it may be a step of FP4 behind it.
static void four_bits(const char *kind, const char *prefill, int promises) {
    int32_t tokens[200];
    check_seed = 61;
    random_tokens(tokens, 200, 2000);
    const int prompt = 100, more = 4;
    sala_options o = cuda_options(promises ? 2 : 1, 64);
    o.synthetic = 1;
    o.weights = kind;
    o.prefill = prefill;
    o.chunk = 64;
    session t = session_open(SALA_TINY "/config.json", &o);
    const int w4a4 = strcmp(prefill, "w4a4") == 0;
    CHECK(strncmp(t.info.prefill, w4a4 ? "W4A4" : "W4A16", 4 + !w4a4) == 0, "%s", t.info.prefill);
    CHECK(t.info.unpack_bytes == (w4a4 ? 0 : (int64_t)2 * 768 * 256 * 2), "%lld bytes to unpack",
          (long long)t.info.unpack_bytes);
    sala_request r = request_of(tokens, prompt, more), beside = request_of(tokens + 150, 9, more);
    request_force(&r, tokens + prompt, more);
    r.want_rows = SALA_ROWS_GENERATED;
    if (promises) session_ask(&t, &beside);
    int first = session_ask(&t, &r);
    session_run(&t);
    for (int other = 0; other < 2; other++) { // on the CPU, and alone in one chunk
        if (other && !promises) continue;
        o.max_sequences = 1;
        o.chunk = 512;
        o.device = other ? cuda_name() : "cpu";
        session s = session_open(SALA_TINY "/config.json", &o);
        outcome *b = session_do(&s, &r), *a = &t.out[first];
        size_t vocab = (size_t)s.info.vocab;
        for (int p = prompt; p < prompt + more - 1 && !other; p++) {
            double d =
                relative(a->logits + (size_t)p * vocab, b->logits + (size_t)p * vocab, vocab);
            CHECK(d < (w4a4 ? 0.2 : 0.05), "%s %s, position %d: |GPU - CPU| / |CPU| is %g", kind,
                  prefill, p, d);
        }
        if (other) CHECK(same_choices(a, b), "%s: other tokens", kind);
        if (other)
            CHECK(first_difference(&s, a, b, prompt, prompt + more - 1) < 0, "%s: other bits",
                  kind);
        session_close(&s);
    }
    session_close(&t);
}

static void test_four_bits(void) {
    four_bits("nvfp4", "w4a16", 1);
    four_bits("nvfp4", "w4a4", 1);
    four_bits("int4", "w4a16", 0);
}

// Pages whose elements lie beyond 2^31 in their pools hold the same numbers as others: only on a
// GPU, where there is memory for them (30 GB).
static void test_far_pages(void) {
    int32_t tokens[1000];
    int n = long_prompt(tokens);
    outcome *first = NULL;
    session t[2];
    for (int i = 0; i < 2; i++) {
        sala_options o = cuda_options(2, 64);
        if (i) o.kv_tokens = (int64_t)18 << 20;
        t[i] = session_open(SALA_TINY, &o);
        sala *s = t[i].engine;
        for (int64_t p = 0; p < s->free_page_count && i; p++) s->free_pages[p] = (int32_t)p;
        CHECK(!i || (int64_t)s->plan.page_kv * s->free_page_count > (int64_t)1 << 31,
              "too few pages");
        sala_request r = request_of(tokens, n, 8);
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *out = session_do(&t[i], &r);
        if (i == 0) first = out;
        CHECK(same_choices(out, first), "other tokens");
        CHECK(first_difference(&t[i], out, first, n, n + 7) < 0, "other bits");
    }
    session_close(&t[0]);
    session_close(&t[1]);
}

// The tokens that the device chose are those that the sampler of the host chooses from its logits.
static void test_sampling(void) {
    int32_t tokens[64];
    check_seed = 51;
    random_tokens(tokens, 64, 2000);
    sala_options o = cuda_options(2, 64);
    session t = session_open(SALA_TINY, &o);
    sala__env env;
    memset(&env, 0, sizeof env);
    for (int i = 0; i < 8; i++) {
        sala_bias bias[2] = {{(int32_t)(10 + i), 3.0f}, {(int32_t)(20 + i), -INFINITY}};
        sala_request r = request_of(tokens, 20 + i, 8);
        r.temperature = i & 1 ? 1.3f : 0;
        r.top_k = i & 2 ? 40 : 0;
        r.top_p = i & 4 ? 0.9f : 1;
        r.min_p = i == 7 ? 0.05f : 0;
        r.frequency_penalty = i >= 4 ? 0.5f : 0;
        r.repetition_penalty = i == 6 ? 1.3f : 1;
        r.biases = bias;
        r.bias_count = i % 3 ? 2 : 0;
        r.seed = 5 + (uint64_t)i;
        r.want_rows = SALA_ROWS_GENERATED;
        outcome *out = session_do(&t, &r);
        sala__sampler s;
        sala_error err;
        if (sala__sampler_init(&env, &r, t.info.vocab, &s, &err) < 0) die("sampler", err.text);
        void *scratch = need(malloc(sala__sampler_scratch(t.info.vocab)));
        for (int j = 0; j < 20 + i; j++) sala__sampler_note(&s, tokens[j], 0);
        sala__sampler_note(&s, out->tokens[0], 1);
        for (int j = 1; j < out->count; j++) {
            int64_t p = 20 + i + j;
            int32_t token = sala__sample(&s, out->logits + (size_t)(p - 1) * (size_t)t.info.vocab,
                                         p, NULL, 0, scratch, NULL, NULL, NULL);
            CHECK(token == out->tokens[j], "request %d, token %d: the host chooses %d, not %d", i,
                  j, (int)token, (int)out->tokens[j]);
            sala__sampler_note(&s, out->tokens[j], 1);
        }
        free(scratch);
        sala__sampler_free(&env, &s);
    }
    session_close(&t);
}

static void test_logprobs_and_force(void) {
    int32_t tokens[64];
    check_seed = 61;
    random_tokens(tokens, 64, 2000);
    sala_options o = cuda_options(2, 64);
    session g = session_open(SALA_TINY, &o);
    o.device = "cpu";
    session c = session_open(SALA_TINY, &o);
    sala_request r = request_of(tokens, 40, 8);
    request_force(&r, tokens + 40, 8);
    r.logprobs = 3;
    outcome *a = session_do(&g, &r), *b = session_do(&c, &r);
    CHECK(a->count == 8 && memcmp(a->tokens, tokens + 40, 32) == 0, "forced tokens");
    for (int i = 0; i < 8; i++)
        CHECK(fabsf(a->logprobs[i] - b->logprobs[i]) < 0.3f, "token %d: %g, on the CPU %g", i,
              (double)a->logprobs[i], (double)b->logprobs[i]);
    session_close(&g);
    session_close(&c);
}

// ---- speculation ----

// Trees of all kinds, in graphs: what comes out is what comes out without.
static void test_planted_trees(void) {
    static const int lengths[] = {9,   14,  15,  16,  28,  31,  45,  50,  62,  64,  70,  100,
                                  126, 127, 128, 333, 495, 500, 505, 511, 512, 760, 767, 768};
    sala_timings sum;
    memset(&sum, 0, sizeof sum);
    check_seed = 402;
    plant.trees = 0;
    for (int mode = quick ? PLANT_MIXED : 0; mode <= (quick ? PLANT_MIXED : PLANT_CHAIN); mode++) {
        plant_case c = {SALA_TINY,
                        cuda_name(),
                        0,
                        lengths,
                        quick ? 3 : 24,
                        quick ? 3 : 1 + (3 * mode + 2) % 8,
                        quick ? 22 : 150,
                        mode,
                        quick ? 9 : 32,
                        NULL};
        plant_compare(&c, &sum);
        printf("      mode %d: %.2f tokens a verify, %lld trees\n", mode,
               (double)sum.verify_tokens[0] / (double)sum.verifies[0], (long long)plant.trees);
    }
    for (int d = 1; d < (quick ? 2 : SALA_DEPTHS); d++)
        CHECK(sum.accepted[0][d] > 0 && sum.accepted[0][d] < sum.offered[0][d], "depth %d", d);
}

// ---- many sequences, several engines, what cannot be ----

static void test_two_engines(void) {
    int32_t tokens[64];
    check_seed = 71;
    random_tokens(tokens, 64, 2000);
    sala_options o = cuda_options(2, 64);
    session a = session_open(SALA_TINY, &o), b = session_open(SALA_TINY, &o);
    sala_request r = request_of(tokens, 30, 6);
    int x = session_ask(&a, &r), y = session_ask(&b, &r);
    int busy = 1;
    while (busy) {
        busy = session_step(&a);
        busy |= session_step(&b);
    }
    CHECK(same_choices(&a.out[x], &b.out[y]), "two engines differ");
    session_close(&a);
    sala_request again = request_of(tokens, 20, 4);
    session_do(&b, &again);
    session_close(&b);
}

static char last_log[600];
static void note_log(void *user, int level, const char *line) {
    (void)user;
    (void)level;
    snprintf(last_log, sizeof last_log, "%s", line);
}

static void refused(const char *path, const sala_options *o, const char *words) {
    sala_error err;
    sala *s = sala_open(path, o, &err);
    CHECK(!s, "%s was opened", path);
    CHECK(strstr(err.text, words) != NULL, "\"%s\" has no \"%s\"", err.text, words);
    sala_close(s);
}

static void test_refusals(void) {
    sala_options o = cuda_options(2, 64);
    refused(TINY, &o, "the CUDA kernels need"); // head_dim
    o.device = "cuda:999";
    refused(SALA_TINY, &o, "999");
    o.device = "gpu";
    refused(SALA_TINY, &o, "cuda:N");
    o.device = cuda_name();
    o.memory_limit = 1 << 20;
    refused(SALA_TINY, &o, "weights");
    o.memory_limit = 0;
    o.device = "auto"; // falls back, and says why
    o.hooks.log = note_log;
    last_log[0] = 0;
    session t = session_open(TINY, &o);
    CHECK(strncmp(t.info.device, "CPU", 3) == 0, "device %s", t.info.device);
    CHECK(strstr(last_log, "no GPU used") != NULL, "log \"%s\"", last_log);
    session_close(&t);
    t = session_open(SALA_TINY, &o);
    CHECK(strncmp(t.info.device, "cuda", 4) == 0, "device %s", t.info.device);
    session_close(&t);
}

// Files as others write them, fused and of all kinds: what comes to the device is what the CPU has, and the host keeps
// no copy.
static void test_four_bit_files(void) {
    static const quant_options cases[] = {
        {.kind = SALA__MODELOPT, .fused = QUANT_FUSED_EACH, .head = 1, .shards = 2},
        {.kind = SALA__GPTQ, .group = 32, .asymmetric = 1, .f16 = 1},
        {.kind = 0, .group = 128}};
    static const char *const names[] = {"ModelOpt", "GPTQ", "all in turn"};
    int32_t tokens[80];
    check_seed = 62;
    random_tokens(tokens, 80, 2000);
    for (int i = 0; i < 3; i++) {
        char folder[] = "/tmp/sala-files-XXXXXX", path[600];
        quant_model m;
        if (!mkdtemp(folder)) die(folder, "cannot make a folder");
        quant_make(SALA_TINY "/config.json", &cases[i], &m);
        quant_write(&m, folder, SALA_TINY "/config.json");
        quant_free(&m);
        against_cpu(folder, 0, tokens, 66, 3, 0.05, 10, names[i]);
        sala_options o = cuda_options(1, 0);
        session t = session_open(folder, &o);
        CHECK(!t.engine->weights.blocks && t.info.bits_per_weight < 10, "%s: the host has a copy",
              names[i]);
        session_close(&t);
        DIR *d = opendir(folder);
        for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
            snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
            if (e->d_name[0] != '.') unlink(path);
        }
        if (d) closedir(d);
        rmdir(folder);
    }
}

// A draft head lies there as it does on the host, beside what it shares with the model.
static void draft_there(sala *s, const sala__weights *host) {
    sala__item item, there;
    sala__cuda *c = &s->gpu.cuda;
    sala__weights *w = &s->gpu_draft_weights, from = *host;
    int32_t count = s->draft_config.draft_vocab;
    uint16_t *bits = (uint16_t *)need(malloc((size_t)4 << 20));
    if (sala__cuda_enter(c, NULL) < 0) die("cuda", "enter");
    for (int i = 0; i < sala__item_count(&s->draft_config); i++) {
        if (!sala__item_at(&s->draft_config, &from, i, &item)) continue;
        if (!sala__item_at(&s->draft_config, w, i, &there)) continue;
        const sala_weight *x = item.weight, *y = there.weight;
        sala__gpu_place p = sala__gpu_place_of(&item, &from);
        int64_t wrong = 0;
        int bf16 = x->format == SALA_BF16;
        sala__cuda_download(c, bits, sala__on_gpu(bf16 ? y->data : (const void *)y->alpha),
                            (size_t)p.rows * (bf16 ? (size_t)x->k * 2 : 4), NULL);
        sala__cuda_wait(c, NULL);
        for (int32_t n = 0; n < x->n; n++) {
            int32_t row = p.layout > 1 ? sala_packed_pair(n, p.layout == 3) : n;
            if (!bf16) wrong += ((const float *)(const void *)bits)[row] != x->alpha[n];
            for (int32_t k = 0; k < x->k && bf16; k++)
                wrong += bits[p.layout ? sala_packed(row, k, (int32_t)p.rows) : n] !=
                         ((const uint16_t *)x->data)[(int64_t)n * x->k + k];
        }
        CHECK(wrong == 0, "%s: %lld elements differ", item.name, (long long)wrong);
    }
    sala__cuda_download(c, bits, sala__on_gpu(w->target_ids), (size_t)count * 4, NULL);
    sala__cuda_wait(c, NULL);
    sala__cuda_leave(c);
    CHECK(memcmp(bits, host->target_ids, (size_t)count * 4) == 0, "other tokens");
    CHECK(w->embed.data == s->gpu_weights.embed.data, "a copy of the embedding");
    free(bits);
}

static void draft_head(const char *model, const char *draft, const char *weights) {
    sala_options o = cuda_options(1, 0);
    o.synthetic = weights != NULL;
    o.weights = weights;
    o.draft = draft;
    session g = session_open(model, &o);
    o.device = "cpu";
    session c = session_open(model, &o);
    draft_there(g.engine, &c.engine->draft_weights);
    CHECK(g.info.draft_weight_bytes > 0 && strcmp(g.info.draft, c.info.draft) == 0, "\"%s\"",
          g.info.draft);
    CHECK(!g.engine->weights.blocks && !g.engine->draft_weights.blocks, "the host has a copy");
    session_close(&g);
    session_close(&c);
}

// Made by a hash like the model; and an NVFP4 head of files beside a BF16 model.
static void test_draft_head(void) {
    static const char *const names[] = {"config.json", "model.safetensors", "head.json"};
    char folder[] = "/tmp/sala-head-XXXXXX", path[600];
    quant_options q = {.kind = SALA__MODELOPT, .fused = QUANT_FUSED_NAMES, .tables = 3};
    quant_model m;
    if (!mkdtemp(folder)) die(folder, "cannot make a folder");
    snprintf(path, sizeof path, "%s/head.json", folder);
    put_head(path, 2, 300);
    draft_head(SALA_TINY "/config.json", path, "bf16");
    draft_head(SALA_TINY "/config.json", path, "nvfp4");
    draft_head(SALA_TINY "/config.json", path, "int4");
    q.target = SALA_TINY "/config.json";
    quant_make(path, &q, &m);
    quant_write(&m, folder, path);
    quant_free(&m);
    draft_head(SALA_TINY, folder, NULL);
    put_head(path, 4, 300); // of 64 elements
    sala_options o = cuda_options(1, 0);
    o.synthetic = 1;
    o.draft = path;
    refused(SALA_TINY "/config.json", &o, "head_dim is 64, but the CUDA kernels need 128");
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

// What an EAGLE-3 head is trained with: as a head of this device captures it, near the CPU's, and what the model's
// head reads gives the logits.
static void test_features(void) {
    enum { N = 80 };
    int32_t tokens[N];
    check_seed = 5;
    random_tokens(tokens, N, 2048);
    features_files();
    shown c = shown_by("cpu", "nvfp4", tokens, N), g = shown_by(cuda_name(), "nvfp4", tokens, N);
    sala_options o = small_options(64, 0);
    o.synthetic = 1, o.device = "cpu", o.weights = "nvfp4";
    sala *s = open_model(config_4, &o, 0, 0, 0);
    float *made = multiply(s, g.rows[3], N);
    double d = relative(made, g.logits, (size_t)N * 2048);
    CHECK(d < 1e-4, "what the head read gives other logits: %g", d);
    for (int i = 0; i < 4; i++) {
        float *x = (float *)need(malloc(2 * N * 256 * sizeof(float))), *y = x + N * 256;
        for (int k = 0; k < N * 256; k++)
            x[k] = sala_bf16_f32(g.rows[i][k]), y[k] = sala_bf16_f32(c.rows[i][k]);
        d = relative(x, y, N * 256);
        CHECK(d < 0.05, "plane %d is not the CPU's: %g", i, d);
        free(x);
    }
    free(made), shown_free(&g), shown_free(&c), sala_close(s);
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {TEST(test_short_prompt),
                                        TEST(test_long_prompt),
                                        TEST(test_golden),
                                        TEST(test_released_geometry),
                                        TEST(test_batch_invariance),
                                        TEST(test_chunk_invariance_and_determinism),
                                        TEST(test_graphs_change_nothing),
                                        TEST(test_continued_sequence),
                                        TEST(test_prefix_reuse),
                                        TEST(test_memory_plan),
                                        TEST(test_four_bits),
                                        TEST(test_four_bit_files),
                                        TEST(test_draft_head),
                                        TEST(test_features),
                                        TEST(test_sampling),
                                        TEST(test_logprobs_and_force),
                                        TEST(test_planted_trees),
                                        TEST(test_two_engines),
                                        TEST(test_refusals),
                                        TEST(test_far_pages)}; // the last: not on the simulator
    int count = (int)(sizeof tests / sizeof tests[0]) - !getenv("SALA_TEST_GPU");
    if (!device_exists()) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        printf("0 passed, 0 failed\n");
        return 0;
    }
    return check_main(tests, count, argc, argv);
}
