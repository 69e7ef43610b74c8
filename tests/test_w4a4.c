#define SALA_IMPLEMENTATION
#include "../sala.h"
// Prefill in W4A4: which operations read what, on the CPU. The arithmetic is tested in prefill_fp4.h.
#include "check.h"
#include "model.h"

enum { TOKENS = 333, NEW = 6 };

// A weight of the engine in BF16, instead of NVFP4.
static void widen_weight(sala_weight *w) {
    if (!w->data) return;
    uint16_t *wide = (uint16_t *)need(malloc((size_t)w->n * (size_t)w->k * 2));
    for (int n = 0; n < w->n; n++)
        for (int k = 0; k < w->k; k += 16) {
            float v[16];
            sala__load_weight4(w, n, k, v);
            for (int i = 0; i < 16; i++) wide[n * w->k + k + i] = sala_f32_bf16(v[i] * w->alpha[n]);
        }
    *w = sala_plain_weight(wide, SALA_BF16, w->n, w->k);
}

static void drop_weight(sala_weight *w) {
    if (w->format == SALA_BF16) free((void *)(uintptr_t)w->data);
}

static void layer_weights(sala__layer *l, sala_weight *w[8]) {
    sala_weight *all[8] = {&l->q, &l->k,        &l->v,      &l->gate,
                           &l->o, &l->mlp_gate, &l->mlp_up, &l->mlp_down};
    memcpy(w, all, sizeof all);
}

// An engine whose linear layers are NVFP4 but for those of `plain`, a bit each in the order above.
static session open_engine(const char *prefill, int chunk, unsigned plain) {
    sala_options o = small_options(chunk, 512);
    sala_weight *w[8];
    o.hidden_states = o.synthetic = 1;
    o.weights = "nvfp4";
    o.prefill = prefill;
    session t = session_open(TINY_CONFIG, &o);
    for (int l = 0; l < t.info.layers; l++) {
        layer_weights(&t.engine->weights.layers[l], w);
        for (int i = 0; i < 8; i++)
            if (plain >> (i + l) % 8 & 1) widen_weight(w[i]);
    }
    return t;
}

static void close_engine(session *t) {
    sala_weight *w[8];
    for (int l = 0; l < t->info.layers; l++) {
        layer_weights(&t->engine->weights.layers[l], w);
        for (int i = 0; i < 8; i++) drop_weight(w[i]);
    }
    session_close(t);
}

static outcome *run(session *t) {
    int32_t tokens[TOKENS];
    check_seed = 17;
    random_tokens(tokens, TOKENS, 97);
    sala_request r = request_of(tokens, TOKENS, NEW);
    r.want_rows = SALA_ROWS_ALL;
    return session_do(t, &r);
}

// Promise 2: a prompt gives the same bits for every chunk, whatever of the model is NVFP4.
static void test_chunks(void) {
    static const unsigned plain[] = {0, 0x04, 0x40, 0x91, 0x6A};
    for (int i = 0; i < 5; i++) {
        session a = open_engine("w4a4", 64, plain[i]), b = open_engine("w4a4", 256, plain[i]);
        outcome *x = run(&a), *y = run(&b);
        CHECK(same_choices(x, y), "other tokens");
        int64_t d = first_difference(&a, x, y, 0, TOKENS + NEW - 1);
        CHECK(d < 0, "plain %x: position %lld differs", plain[i], (long long)d);
        close_engine(&a), close_engine(&b);
    }
}

// x is really quantised, all of it, and that costs about what FP4's grid costs; without it nothing is.
static void test_distance(void) {
    session a = open_engine("w4a16", 256, 0), b = open_engine("w4a4", 256, 0);
    session c = open_engine("w4a4", 256, 0xFF), d = open_engine("w4a16", 256, 0xFF);
    outcome *x = run(&a), *y = run(&b);
    double e = relative(y->logits, x->logits, (size_t)TOKENS * (size_t)a.info.vocab);
    CHECK(e > 0.02 && e < 0.5, "logits of W4A4 and W4A16 differ by %g", e);
    size_t width = (size_t)a.info.hidden;
    for (int l = 1; l <= a.info.layers; l++) {
        size_t at = (size_t)200 * a.hidden_row + (size_t)l * width;
        double h = relative(y->hidden + at, x->hidden + at, width);
        CHECK(h > 0.005 && h < 0.5, "hidden state %d differs by %g", l, h);
    }
    x = run(&c), y = run(&d);
    CHECK(first_difference(&c, x, y, 0, TOKENS + NEW - 1) < 0, "BF16 weights want no W4A4");
    close_engine(&a), close_engine(&b), close_engine(&c), close_engine(&d);
}

// Verify does not quantise x: what W4A4 prefilled goes on as W4A16 would, given the same memory.
static void test_verify(void) {
    session a = open_engine("w4a4", 256, 0), b = open_engine("w4a16", 256, 0);
    int32_t one[1] = {5}, more[12] = {5, 9, 1, 7, 3, 3, 8, 2, 4, 6, 11, 90};
    sala_request r = request_of(one, 1, 12);
    request_force(&r, more, 12);
    r.want_rows = SALA_ROWS_ALL;
    a.engine->w4a4 = 0; // the prompt alone in W4A16
    int i = session_ask(&a, &r);
    while (!a.out[i].count) session_step(&a);
    a.engine->w4a4 = 1;
    while (!a.out[i].finished) session_step(&a);
    outcome *y = session_do(&b, &r);
    CHECK(first_difference(&a, &a.out[i], y, 0, 12) < 0, "verify quantises");
    close_engine(&a), close_engine(&b);
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {TEST(test_chunks), TEST(test_distance), TEST(test_verify)};
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
