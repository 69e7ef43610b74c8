// The sampler: decisions against slow independent implementations, frequencies against exact probabilities.
#define SALA_IMPLEMENTATION
#include "../sala.h"
#include "check.h"

static const sala__env env; // no hooks

// ---- helpers ----

static sala__sampler make(const sala_request *r, int32_t vocab) {
    sala__sampler s;
    sala_error err;
    memset(&err, 0, sizeof err);
    int code = sala__sampler_init(&env, r, vocab, &s, &err);
    if (code < 0) {
        printf("a test's request was refused: %s\n", err.text);
        exit(2);
    }
    return s;
}

static void *scratch_for(int32_t vocab) {
    void *p = malloc(sala__sampler_scratch(vocab));
    memset(p, 0xFF, sala__sampler_scratch(vocab)); // as floats NaN, as integers -1
    return p;
}

static int32_t draw(const sala__sampler *s, const float *x, int64_t position, void *scratch) {
    return sala__sample(s, x, position, NULL, 0, scratch, NULL, NULL, NULL);
}

static float normal(void) { // nearly: the sum of 12 uniform numbers
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += check_uniform();
    return sum * 0.5f;
}

static int below(int n) {
    return (int)(check_random() % (uint64_t)n);
}

// Logits of many shapes, most of them unkind.
enum { SHAPES = 15 };
static void fill(float *x, int32_t n, int shape) {
    static const float specials[] = {0.0f, -0.0f, 0.0f, -0.0f, 1e-40f, -1e-40f};
    for (int32_t i = 0; i < n; i++) {
        switch (shape) {
        case 0: x[i] = normal(); break;
        case 1: x[i] = 8 * normal(); break;
        case 2: x[i] = (float)below(4); break;                 // ties everywhere
        case 3: x[i] = 1.5f; break;                            // uniform
        case 4: x[i] = -INFINITY; break;                       // one-hot: one is set below
        case 5: x[i] = 3e38f * check_uniform(); break;         // huge
        case 6: x[i] = below(3) ? -INFINITY : normal(); break; // many forbidden
        case 7: x[i] = (float)i * (30.0f / (float)n); break;   // ascending
        case 8: x[i] = -(float)i * (30.0f / (float)n); break;  // descending
        case 9: x[i] = sala_round(4 * normal()); break;        // BF16: ties are common
        case 10: x[i] = specials[below(6)]; break;             // zeros of both signs, subnormals
        case 11: x[i] = 20 + 0x1p-17f * normal(); break; // within a few units in the last place
        case 12: x[i] = below(50) ? -25 + normal() : 5 * normal(); break; // a few above a far floor
        case 13: x[i] = below(2) ? 1 : 1 - 9.99f; break; // two levels about e^10 apart
        default: x[i] = 1e30f; break;
        }
    }
    if (shape == 4 || shape == 6) x[below(n)] = 3;
}

static const int32_t vocabs[] = {1, 2, 97, 300, 2048};

// ---- the pieces ----

static void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t x[4], y[4];
    memcpy(x, counter, sizeof x);
    for (uint32_t i = 0; i < 10; i++) {
        uint64_t p0 = (uint64_t)0xD2511F53 * x[0], p1 = (uint64_t)0xCD9E8D57 * x[2];
        y[0] = (uint32_t)(p1 >> 32) ^ x[1] ^ (key[0] + i * 0x9E3779B9u);
        y[1] = (uint32_t)p1;
        y[2] = (uint32_t)(p0 >> 32) ^ x[3] ^ (key[1] + i * 0xBB67AE85u);
        y[3] = (uint32_t)p0;
        memcpy(x, y, sizeof x);
    }
    memcpy(out, x, sizeof x);
}

static void
random_numbers(void) { // the authors' known answers (Random123, kat_vectors, philox4x32 10)
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        philox(known[i], known[i] + 4, out);
        CHECK(memcmp(out, known[i] + 6, 16) == 0, "the test's own Philox, vector %d", i);
    }
    CHECK(sala_random(0, 0) == 0xe169c58d6627e8d5u, "%llx", (unsigned long long)sala_random(0, 0));
    for (int i = 0; i < 1000; i++) {
        uint64_t seed = check_random() >> below(64), position = check_random() >> below(64);
        uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0}, out[4];
        uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
        philox(counter, key, out);
        uint64_t want = (uint64_t)out[1] << 32 | out[0], got = sala_random(seed, position);
        CHECK(got == want, "seed %llx position %llx", (unsigned long long)seed,
              (unsigned long long)position);
    }
    static const uint64_t sums[] = {1, 2, 3, 1u << 30, 1000000007, (uint64_t)1 << 47};
    for (int i = 0; i < 6; i++) { // a coin near 1 stays inside
        CHECK(sala_scale_random(UINT64_MAX, sums[i]) == sums[i] - 1, "sum %d", i);
        CHECK(sala_scale_random(0, sums[i]) == 0, "sum %d", i);
    }
}

static void exponential(void) {
    double worst = 0;
    for (int i = 0; i < 2000000; i++) {
        float x = -87.0f * (float)(check_random() >> 40) / 16777216.0f;
        if (i & 1) x *= (float)(check_random() >> 40) / 16777216.0f * 0.1f;
        long double want = expl((long double)x);
        int exponent;
        frexpl(want, &exponent);
        double ulps =
            (double)fabsl(((long double)sala_exp_negative(x) - want) / ldexpl(1, exponent - 24));
        if (ulps > worst) worst = ulps;
    }
    printf("      worst error of exp: %.2f units in the last place\n", worst);
    CHECK(worst < 2, "%g", worst);
    CHECK(sala_exp_negative(0.0f) == 1.0f && sala_exp_negative(-0.0f) == 1.0f, "exp(0)");
    CHECK(sala_exp_negative(-INFINITY) == sala_exp_negative(-87.0f), "far below");
    CHECK(sala_exp_negative(-3e38f) > 0 && sala_exp_negative(-3e38f) < 2e-38f, "far below");
}

static void argmax(void) {
    static const int32_t sizes[] = {1, 2, 97, 1023, 1024, 1025, 2048, 73448};
    for (int v = 0; v < 8; v++) {
        int32_t n = sizes[v];
        float *x = (float *)malloc((size_t)n * sizeof *x);
        for (int trial = 0; trial < 60; trial++) {
            fill(x, n, trial % SHAPES);
            int32_t want = 0;
            for (int32_t i = 1; i < n; i++)
                if (x[i] > x[want]) want = i;
            CHECK(sala__sampler_argmax(x, n) == want, "n %d shape %d: %d, not %d", (int)n,
                  trial % SHAPES, (int)sala__sampler_argmax(x, n), (int)want);
        }
        for (int32_t i = 0; i < n; i++) x[i] = 0;
        int32_t a = below(n), b = below(n);
        x[a] = x[b] = 7;
        CHECK(sala__sampler_argmax(x, n) == (a < b ? a : b), "a tie of %d and %d", (int)a, (int)b);
        for (int32_t i = 0; i < n; i++) x[i] = i < n / 2 ? -0.0f : 0.0f;
        CHECK(sala__sampler_argmax(x, n) == 0, "-0 equals +0: the lowest id");
        free(x);
    }
}

static void unusable_logits(void) {
    static const int32_t sizes[] = {1, 2, 97, 1024, 1500};
    float bad[] = {NAN, -NAN, INFINITY, sala_bits_f32(0x7F800001u), sala_bits_f32(0xFF800001u)};
    for (int v = 0; v < 5; v++) {
        int32_t n = sizes[v];
        float *x = (float *)malloc((size_t)n * sizeof *x);
        void *scratch = scratch_for(n);
        for (int kind = 0; kind < 3; kind++) { // greedy; sampled; with penalties and bias
            sala_request r = {0};
            sala_bias bias = {0, -INFINITY};
            if (kind > 0) r.temperature = 0.8f;
            if (kind > 0) r.top_p = 0.9f;
            if (kind > 1) r.repetition_penalty = 1.2f;
            sala__sampler s = make(&r, n);
            for (int32_t at = 0; at<n; at += n> 100 ? 37 : 1)
                for (int b = 0; b < 5; b++) {
                    for (int32_t i = 0; i < n; i++) x[i] = -(float)i;
                    x[at] = bad[b];
                    CHECK(draw(&s, x, at, scratch) == -1, "n %d at %d bad %d kind %d", (int)n,
                          (int)at, b, kind);
                }
            for (int32_t i = 0; i < n; i++) x[i] = -INFINITY;
            CHECK(draw(&s, x, 5, scratch) == -1, "all -infinity, n %d kind %d", (int)n, kind);
            x[n - 1] = -3e38f; // one token left, however unlikely
            CHECK(draw(&s, x, 5, scratch) == n - 1, "one token left, n %d kind %d", (int)n, kind);
            sala__sampler_free(&env, &s);
            r.biases = &bias;
            r.bias_count = 1;
            s = make(&r, n);
            for (int32_t i = 1; i < n; i++) x[i] = -INFINITY;
            x[0] = 0;
            CHECK(draw(&s, x, 5, scratch) == -1, "the only token is forbidden, n %d kind %d",
                  (int)n, kind);
            sala__sampler_free(&env, &s);
        }
        free(x);
        free(scratch);
    }
}

// ---- penalties ----

typedef struct history {
    int32_t token[64];
    int is_output[64];
    int count;
} history;

// A finite logit stays finite unless a bias forbids the token.
static float clamped(float from, float to, float bias) {
    if (from == -INFINITY || bias == -INFINITY) return -INFINITY;
    if (to == INFINITY) return FLT_MAX;
    return to == -INFINITY ? -FLT_MAX : to;
}

// The definition, one token at a time.
static float adjusted_slowly(const sala_request *r, const history *h, float logit, int32_t token) {
    int prompt = 0, output = 0, forbidden = 0;
    for (int i = 0; i < r->bias_count; i++)
        forbidden |= r->biases[i].token == token && r->biases[i].bias == -INFINITY;
    for (int i = 0; i < h->count; i++) {
        if (h->token[i] != token) continue;
        if (h->is_output[i])
            output++;
        else
            prompt++;
    }
    float x = logit;
    for (int i = 0; i < r->bias_count; i++)
        if (r->biases[i].token == token) x = clamped(x, x + r->biases[i].bias, r->biases[i].bias);
    float repetition = r->repetition_penalty == 0 ? 1 : r->repetition_penalty;
    if (prompt + output > 0) {
        if (x > 0)
            x = x / repetition;
        else
            x = x * repetition;
    }
    volatile float repeated =
        (float)output * r->frequency_penalty; // volatile: no fma, whatever the flags
    if (output > 0) x = x - (r->presence_penalty + repeated);
    return clamped(logit, x, forbidden ? -INFINITY : 0);
}

static void penalties(void) {
    for (int trial = 0; trial < 3000; trial++) {
        int32_t n = vocabs[trial % 5];
        float x[2048], out[2048];
        sala_bias biases[8];
        sala_request r = {0};
        if (below(3)) r.repetition_penalty = below(2) ? 1.3f : 0.5f;
        if (below(2)) r.presence_penalty = 2 * check_uniform();
        if (below(2)) r.frequency_penalty = 2 * check_uniform();
        for (int i = 0; i < 8 && i < n; i++) { // distinct tokens in any order
            biases[i].token = n < 97 ? n - 1 - i : (i * 37 + trial) % n;
            biases[i].bias = below(4) ? 3 * check_uniform() : -INFINITY;
            r.biases = biases;
            r.bias_count = below(2) ? i + 1 : r.bias_count;
        }
        fill(x, n, trial % SHAPES);
        history h;
        h.count = below(60);
        int path_count = h.count < 16 ? below(h.count + 1) : below(17);
        int32_t path[16];
        sala__sampler s = make(&r, n);
        for (int i = 0; i < h.count; i++) {
            int in_path = i >= h.count - path_count;
            h.token[i] = below(3) ? below(n) : below(n < 5 ? n : 5);
            h.is_output[i] = in_path || i > h.count / 2;
            if (in_path)
                path[i - (h.count - path_count)] = h.token[i];
            else
                sala__sampler_note(&s, h.token[i], h.is_output[i]);
        }
        sala__sampler_adjust(&s, x, path, path_count, out);
        int32_t want = -1;
        for (int32_t t = 0; t < n; t++) {
            float slow = adjusted_slowly(&r, &h, x[t], t);
            CHECK(sala_f32_bits(slow) == sala_f32_bits(out[t]), "trial %d token %d: %g, not %g",
                  trial, (int)t, (double)out[t], (double)slow);
            if (slow > (want < 0 ? -INFINITY : adjusted_slowly(&r, &h, x[want], want))) want = t;
        }
        void *scratch = scratch_for(n);
        int32_t got = sala__sample(&s, x, 9, path, path_count, scratch, NULL, NULL, NULL);
        CHECK(got == want, "trial %d: token %d, not %d", trial, (int)got, (int)want);
        // Told of the path instead: the same sampler, drawn at a temperature.
        s.temperature = 0.7f;
        got = sala__sample(&s, x, 9, path, path_count, scratch, NULL, NULL, NULL);
        for (int i = 0; i < path_count; i++) sala__sampler_note(&s, path[i], 1);
        want = draw(&s, x, 9, scratch);
        CHECK(got == want, "trial %d: %d with a path, %d when told", trial, (int)got, (int)want);
        free(scratch);
        sala__sampler_free(&env, &s);
    }
}

static void penalties_by_hand(void) {
    float x[6] = {2, 2, -2, -2, 1, 1}, out[6];
    sala_bias bias = {4, -3}; // first: 1 - 3 = -2, which the repetition penalty then multiplies
    sala_request r = {0};
    r.repetition_penalty = 2;
    r.presence_penalty = 0.5f;
    r.frequency_penalty = 0.25f;
    r.biases = &bias;
    r.bias_count = 1;
    sala__sampler s = make(&r, 6);
    sala__sampler_note(&s, 0, 0); // prompt: repetition alone
    sala__sampler_note(&s, 2, 1);
    sala__sampler_note(&s, 2, 1);
    sala__sampler_note(&s, 4, 0);
    sala__sampler_note(&s, -1, 1); // outside the vocabulary: nothing
    sala__sampler_note(&s, 6, 1);
    int32_t path[3] = {1, 1, 2};
    sala__sampler_adjust(&s, x, path, 3, out);
    static const float want[6] = {1, 1 - 0.5f - 0.5f, -4 - 0.5f - 0.75f, -2, -4, 1};
    for (int t = 0; t < 6; t++)
        CHECK(out[t] == want[t], "token %d: %g, not %g", t, (double)out[t], (double)want[t]);
    sala__sampler_free(&env, &s);
}

// ---- kept sets ----

typedef struct ranked {
    float x;
    int32_t id;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *p = (const ranked *)a, *q = (const ranked *)b;
    if (p->x != q->x) return p->x > q->x ? -1 : 1;
    return p->id - q->id;
}

// The integer weight of a logit as the section's banner defines it.
static uint64_t weight_of(const sala_request *r, float x, float largest) {
    float y = (x - largest) / r->temperature;
    return (uint64_t)(sala_exp_negative(y) * 1073741824.0f + 0.5f);
}

// Sort, then walk. kept[id] is set to 1; returns how many. *share: the weight share kept, *before: without the last.
static int keep_slowly(const sala_request *r, const float *x, int32_t n, char *kept) {
    ranked *order = (ranked *)malloc((size_t)n * sizeof *order);
    int count = 0, keep = 0;
    if (!order || n < 1) exit(2);
    for (int32_t i = 0; i < n; i++) order[i].x = x[i], order[i].id = i;
    qsort(order, (size_t)n, sizeof *order, by_rank);
    float largest = order[0].x;
    uint64_t total = 0, sum = 0;
    for (int32_t i = 0; i < n; i++) {
        if (weight_of(r, order[i].x, largest) == 0) continue;
        if (r->min_p > 0 && (order[i].x - largest) / r->temperature < (float)log((double)r->min_p))
            continue;
        if (r->top_k > 0 && count >= r->top_k) break;
        order[count++] = order[i];
        total += weight_of(r, order[i].x, largest);
    }
    double share = r->top_p > 0 ? (double)r->top_p : 1;
    memset(kept, 0, (size_t)n);
    while (keep < count && (keep == 0 || (double)sum < share * (double)total)) {
        kept[order[keep].id] = 1;
        sum += weight_of(r, order[keep++].x, largest);
    }
    free(order);
    return keep;
}

static void random_cuts(sala_request *r, int32_t n) {
    static const float temperatures[] = {1, 0.7f, 0.1f, 2, 100, 1e-3f, 1e-42f};
    static const float shares[] = {0, 1, 0.999f, 0.95f, 0.5f, 0.1f, 1e-6f, 1e-30f, 0.99999994f};
    static const float floors[] = {0, 0, 0, 0.01f, 0.5f, 1, 1e-30f};
    int ks[] = {0, 0, 1, 2, 5, 40, n - 1, n, n + 10, INT32_MAX};
    memset(r, 0, sizeof *r);
    r->temperature = temperatures[below(below(2) ? 7 : 4)];
    r->top_p = shares[below(9)];
    r->min_p = floors[below(7)];
    r->top_k = ks[below(10)];
    r->seed = check_random();
}

// Kept sets, and the token drawn from them, for one distribution.
static void compare_kept(const sala_request *r, const float *x, int32_t n, int64_t position,
                         void *scratch, const char *what) {
    static char kept[73448];
    int32_t *weight = (int32_t *)scratch + n, *list = weight + n;
    sala__sampler s = make(r, n);
    uint64_t sum = 0, want_sum = 0;
    int32_t largest = sala__sampler_argmax(x, n), bad = 0;
    int want = keep_slowly(r, x, n, kept);
    int32_t got = sala__sampler_keep(&s, x, x[largest], weight, list, &sum);
    for (int32_t i = 0; i < got; i++) bad += !kept[list[i]] || (i && list[i] <= list[i - 1]);
    for (int32_t i = 0; i < n; i++) want_sum += kept[i] ? weight_of(r, x[i], x[largest]) : 0;
    CHECK(got == want && bad == 0 && sum == want_sum,
          "%s: n %d T %g k %d p %g min %g: %d kept, not %d; %d wrong", what, (int)n,
          (double)r->temperature, r->top_k, (double)r->top_p, (double)r->min_p, (int)got, want,
          (int)bad);
    uint64_t at = sala_scale_random(sala_random(r->seed, (uint64_t)position), want_sum), so_far = 0;
    int32_t token = draw(&s, x, position, scratch), expected = -1;
    for (int32_t i = 0; i < n && expected < 0; i++) {
        so_far += kept[i] ? weight_of(r, x[i], x[largest]) : 0;
        if (so_far > at) expected = i;
    }
    CHECK(token == expected, "%s: token %d, not %d", what, (int)token, (int)expected);
    sala__sampler_free(&env, &s);
}

static void kept_sets(void) {
    float *x = (float *)malloc(73448 * sizeof *x);
    void *scratch = scratch_for(73448);
    char what[32];
    for (int trial = 0; trial < 12000; trial++) {
        sala_request r;
        int32_t n = vocabs[trial % 5];
        int shape = below(SHAPES);
        if (trial % 200 == 0) n = 73448;
        fill(x, n, shape);
        if (n > 1 && below(2)) x[below(n)] = -INFINITY;
        if (sala__sampler_argmax(x, n) < 0) continue;
        random_cuts(&r, n);
        snprintf(what, sizeof what, "trial %d shape %d", trial, shape);
        compare_kept(&r, x, n, (int64_t)(check_random() >> 40), scratch, what);
    }
    free(x);
    free(scratch);
}

// The kept set of top-p against long double exponentials: no more than rounding may separate them.
static void top_p_mass(void) {
    static char kept[2048];
    float x[2048];
    ranked order[2048];
    void *scratch = scratch_for(2048);
    for (int trial = 0; trial < 2000; trial++) {
        static const float shares[] = {0.99f, 0.95f, 0.9f, 0.5f, 0.1f};
        int32_t n = 2048;
        sala_request r = {0};
        fill(x, n, trial % 2 ? 1 : 9);
        r.temperature = trial % 3 ? 1 : 0.6f;
        r.top_p = shares[trial % 5];
        sala__sampler s = make(&r, n);
        int32_t *weight = (int32_t *)scratch + n, *list = weight + n,
                best = sala__sampler_argmax(x, n);
        uint64_t sum;
        int32_t got = sala__sampler_keep(&s, x, x[best], weight, list, &sum);
        memset(kept, 0, sizeof kept);
        for (int32_t i = 0; i < got; i++) kept[list[i]] = 1;
        long double total = 0, inside = 0, last = 0;
        for (int32_t i = 0; i < n; i++) {
            order[i].x = x[i];
            order[i].id = i;
            total += expl(((long double)x[i] - x[best]) / r.temperature);
        }
        qsort(order, (size_t)n, sizeof *order, by_rank);
        for (int32_t i = 0; i < got; i++) {
            CHECK(kept[order[i].id], "trial %d: rank %d is not kept", trial, (int)i);
            last = expl(((long double)order[i].x - x[best]) / r.temperature);
            inside += last;
        }
        CHECK(inside >= ((long double)r.top_p - 1e-6L) * total, "trial %d: too few", trial);
        CHECK(inside - last < ((long double)r.top_p + 1e-6L) * total, "trial %d: too many", trial);
        sala__sampler_free(&env, &s);
    }
    free(scratch);
}

// ---- frequencies ----

// Upper limit of chi-square with `freedom` degrees at a false-alarm rate of 1e-9 (Wilson and Hilferty; z = 6.0).
static double chi_limit(int freedom) {
    double a = 2.0 / (9.0 * freedom), z = 1 - a + 6.0 * sqrt(a);
    return freedom * z * z * z;
}

// Pearson's statistic with cells of expectation below 10 merged.
static double chi_square(const int64_t *seen, const double *p, int n, double draws, int *freedom) {
    double sum = 0, rest_seen = 0, rest_expected = 0;
    int cells = 0;
    for (int i = 0; i < n; i++) {
        double expected = p[i] * draws;
        if (expected < 10) {
            rest_seen += (double)seen[i];
            rest_expected += expected;
            continue;
        }
        sum += ((double)seen[i] - expected) * ((double)seen[i] - expected) / expected;
        cells++;
    }
    if (rest_expected >= 1) {
        sum += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        cells++;
    } else if (rest_seen > rest_expected * 40 + 40) {
        sum = HUGE_VAL;
    }
    *freedom = cells - 1;
    return sum;
}

static void frequencies(void) {
    enum { N = 60, DRAWS = 400000 };
    static const struct {
        float temperature, top_p, min_p;
        int top_k;
    } settings[] = {{1, 0, 0, 0}, {0.7f, 0, 0, 0}, {2, 0, 0, 0},         {1, 0.9f, 0, 0},
                    {1, 0, 0, 7}, {1, 0, 0.1f, 0}, {0.8f, 0.95f, 0, 20}, {100, 0, 0, 0}};
    void *scratch = scratch_for(N);
    for (int k = 0; k < 8; k++) {
        float x[N];
        char kept[N];
        double p[N] = {0}, wrong[N] = {0};
        int64_t seen[N] = {0};
        sala_request r = {0};
        check_seed = 77 + (uint64_t)k;
        for (int i = 0; i < N; i++) x[i] = 1.5f * normal();
        r.temperature = settings[k].temperature;
        r.top_p = settings[k].top_p;
        r.min_p = settings[k].min_p;
        r.top_k = settings[k].top_k;
        r.seed = 1000 + (uint64_t)k;
        keep_slowly(&r, x, N, kept);
        long double total = 0, wrong_total = 0;
        for (int i = 0; i < N; i++) {
            total += kept[i] ? expl((long double)x[i] / r.temperature) : 0;
            wrong_total += kept[i] ? expl((long double)x[i] / (r.temperature * 1.05L)) : 0;
        }
        for (int i = 0; i < N; i++) {
            p[i] = kept[i] ? (double)(expl((long double)x[i] / r.temperature) / total) : 0;
            wrong[i] =
                kept[i] ? (double)(expl((long double)x[i] / (r.temperature * 1.05L)) / wrong_total)
                        : 0;
        }
        sala__sampler s = make(&r, N);
        for (int64_t position = 0; position < DRAWS; position++) {
            int32_t token = draw(&s, x, position, scratch);
            CHECK(token >= 0 && token < N && kept[token], "setting %d: token %d is not kept", k,
                  (int)token);
            seen[token]++;
        }
        int freedom;
        double chi = chi_square(seen, p, N, DRAWS, &freedom), limit = chi_limit(freedom);
        CHECK(chi < limit, "setting %d: chi-square %.1f, limit %.1f at %d degrees", k, chi, limit,
              freedom);
        // The test must be able to see a temperature that is wrong by 5 % (at 100 all are nearly equal).
        chi = chi_square(seen, wrong, N, DRAWS, &freedom);
        if (r.temperature < 50)
            CHECK(chi > limit, "setting %d: a wrong temperature passes with %.1f < %.1f", k, chi,
                  limit);
        sala__sampler_free(&env, &s);
    }
    free(scratch);
}

// Pairs of random numbers that plain use puts side by side must look independent.
static void independence(void) {
    enum { SIDE = 32, PAIRS = 400000 };
    static double p[SIDE * SIDE];
    static int64_t seen[SIDE * SIDE];
    static const char *const names[] = {"position, position + 1",
                                        "position, position + 2",
                                        "position, position + 64",
                                        "seed, seed + 1",
                                        "low bits",
                                        "seed and position swapped"};
    for (int i = 0; i < SIDE * SIDE; i++) p[i] = 1.0 / (SIDE * SIDE);
    for (int kind = 0; kind < 6; kind++) {
        double xy = 0, mean = 0;
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < PAIRS; i++) {
            uint64_t a = sala_random(5, i), b = sala_random(5, i + 1);
            if (kind == 1) b = sala_random(5, i + 2);
            if (kind == 2) b = sala_random(5, i + 64);
            if (kind == 3) a = sala_random(i, 4096), b = sala_random(i + 1, 4096);
            if (kind == 4) a <<= 32, b <<= 32;
            if (kind == 5) a = sala_random(i, i + 1), b = sala_random(i + 1, i);
            seen[(a >> 59) * SIDE + (b >> 59)]++;
            double u = (double)a * 0x1p-64 - 0.5, v = (double)b * 0x1p-64 - 0.5;
            xy += u * v * 12;
            mean += u;
        }
        int freedom;
        double chi = chi_square(seen, p, SIDE * SIDE, PAIRS, &freedom), limit = chi_limit(freedom);
        CHECK(chi < limit && freedom == SIDE * SIDE - 1, "%s: chi-square %.1f, limit %.1f",
              names[kind], chi, limit);
        // Correlation: standard deviation 1 / sqrt(n); the mean's: sqrt(1 / 12n). Six of them: 2e-9.
        CHECK(fabs(xy / PAIRS) < 6 / sqrt(PAIRS), "%s: correlation %g", names[kind], xy / PAIRS);
        CHECK(fabs(mean / PAIRS) < 6 / sqrt(12.0 * PAIRS), "%s: mean %g", names[kind],
              mean / PAIRS);
    }
    // The same through whole draws: 32 equal logits, consecutive positions.
    float x[SIDE] = {0};
    sala_request r = {0};
    r.temperature = 1;
    sala__sampler s = make(&r, SIDE);
    void *scratch = scratch_for(SIDE);
    memset(seen, 0, sizeof seen);
    for (int64_t i = 0; i < PAIRS; i++)
        seen[draw(&s, x, i, scratch) * SIDE + draw(&s, x, i + 1, scratch)]++;
    int freedom;
    double chi = chi_square(seen, p, SIDE * SIDE, PAIRS, &freedom);
    CHECK(chi < chi_limit(freedom), "draws: chi-square %.1f, limit %.1f", chi, chi_limit(freedom));
    free(scratch);
}

// Two equal logits share 2^31 units of weight. Seed 0 has positions whose random number is the last unit of the
// first token, the first of the second, and the last of all: found by search, 1 in 2^31 each.
static void edges_of_the_draw(void) {
    static const struct {
        int64_t position;
        uint64_t unit;
        int32_t token;
    } edges[] = {{1856579368, 0x3FFFFFFF, 0}, {1928099871, 0x3FFFFFFF, 0},
                 {4332806593, 0x40000000, 1}, {6160044809, 0x40000000, 1},
                 {772027091, 0x7FFFFFFF, 1},  {4299710281, 0x7FFFFFFF, 1}};
    float x[4] = {-INFINITY, 0.25f, 0.25f, -INFINITY};
    sala_request r = {0};
    r.temperature = 1;
    sala__sampler s = make(&r, 4);
    void *scratch = scratch_for(4);
    for (int i = 0; i < 6; i++) {
        uint64_t unit = sala_random(0, (uint64_t)edges[i].position) >> 33;
        CHECK(unit == edges[i].unit, "position %lld", (long long)edges[i].position);
        int32_t token = draw(&s, x, edges[i].position, scratch);
        CHECK(token == 1 + edges[i].token, "position %lld: token %d", (long long)edges[i].position,
              (int)token);
    }
    sala__sampler_free(&env, &s);
    free(scratch);
}

// ---- the whole ----

static void only_its_inputs(void) {
    int32_t n = 2048;
    float x[2048], copy[2048];
    size_t bytes = sala__sampler_scratch(n);
    unsigned char *scratch = (unsigned char *)malloc(bytes);
    for (int trial = 0; trial < 300; trial++) {
        sala_request r;
        int32_t path[3] = {1, 2, 3};
        random_cuts(&r, n);
        r.logprobs = trial % 21;
        r.repetition_penalty = trial % 2 ? 1.1f : 0;
        fill(x, n, trial % SHAPES);
        memcpy(copy, x, sizeof x);
        sala__sampler s = make(&r, n);
        int32_t first = -1;
        float first_logprob = 0;
        sala_logprob first_top[20];
        int first_count = 0;
        for (int fill_kind = 0; fill_kind < 4; fill_kind++) {
            float logprob = -1;
            sala_logprob top[20];
            int count = -1;
            if (fill_kind < 3)
                memset(scratch, fill_kind == 0 ? 0 : fill_kind == 1 ? 0xFF : 0x7F, bytes);
            else
                for (size_t i = 0; i < bytes; i++) scratch[i] = (unsigned char)check_random();
            int32_t token =
                sala__sample(&s, x, 1000 + trial, path, 3, scratch, &logprob, top, &count);
            if (fill_kind == 0) {
                first = token;
                first_logprob = logprob;
                first_count = count;
                memcpy(first_top, top, sizeof top);
            }
            CHECK(token == first && logprob == first_logprob && count == first_count,
                  "trial %d fill %d", trial, fill_kind);
            CHECK(memcmp(top, first_top, (size_t)count * sizeof *top) == 0, "trial %d fill %d",
                  trial, fill_kind);
        }
        CHECK(memcmp(x, copy, sizeof x) == 0, "the logits were changed");
        sala__sampler_free(&env, &s);
    }
    free(scratch);
}

// The same tokens on every compiler, optimisation level and machine: a digest of many draws. A change of it is a
// change of what users see for a given seed.
static void golden_draws(void) {
    static float x[73448];
    void *scratch = scratch_for(73448);
    uint64_t digest = 1469598103934665603u;
    check_seed = 2026;
    for (int trial = 0; trial < 600; trial++) {
        sala_request r;
        int32_t n = trial % 100 ? vocabs[trial % 5] : 73448, path[2] = {0, n - 1};
        random_cuts(&r, n);
        if (trial % 7 == 0) r.frequency_penalty = 0.5f, r.repetition_penalty = 1.1f;
        fill(x, n, trial % SHAPES);
        sala__sampler s = make(&r, n);
        for (int i = 0; i < 4; i++) {
            int32_t token = sala__sample(&s, x, i, path, 2, scratch, NULL, NULL, NULL);
            digest = (digest ^ (uint64_t)(token + 1)) * 1099511628211u;
        }
        sala__sampler_free(&env, &s);
    }
    CHECK(digest == 0x212f2937a96b38a4u, "digest %llx", (unsigned long long)digest);
    free(scratch);
}

static void logprobs(void) {
    static float x[73448];
    void *scratch = scratch_for(73448);
    double worst = 0;
    for (int trial = 0; trial < 400; trial++) {
        int32_t n = trial % 20 ? vocabs[trial % 5] : 73448;
        sala_bias bias = {0, -5};
        sala_request r = {0};
        r.logprobs = 1 + below(20);
        if (trial % 2) r.temperature = 0.9f, r.top_p = 0.8f, r.repetition_penalty = 1.5f;
        if (trial % 3 == 0)
            r.biases = &bias, r.bias_count = 1; // reported are the raw logits all the same
        fill(x, n, trial % SHAPES);
        sala__sampler s = make(&r, n);
        sala__sampler_note(&s, 0, 0);
        float logprob = 99;
        sala_logprob top[20];
        int count = -1, finite = 0;
        int32_t token = sala__sample(&s, x, trial, NULL, 0, scratch, &logprob, top, &count);
        ranked *order = (ranked *)malloc((size_t)n * sizeof *order);
        long double total = 0;
        for (int32_t i = 0; i < n; i++)
            order[i].x = x[i], order[i].id = i, finite += x[i] > -INFINITY;
        qsort(order, (size_t)n, sizeof *order, by_rank);
        for (int32_t i = 0; i < n; i++) total += expl((long double)x[i] - order[0].x);
        CHECK(token >= 0, "trial %d: no token", trial);
        CHECK(count == (finite < r.logprobs ? finite : r.logprobs), "trial %d: %d listed of %d",
              trial, count, r.logprobs);
        for (int i = -1; i < count; i++) {
            int32_t id = i < 0 ? token : order[i].id;
            long double want = (long double)x[id] - order[0].x - logl(total);
            float got = i < 0 ? logprob : top[i].logprob;
            double error = (double)fabsl(got - want) / (1 + (double)fabsl(want));
            if (error > worst) worst = error;
            CHECK(i < 0 || top[i].token == id, "trial %d place %d: token %d, not %d", trial, i,
                  (int)top[i].token, (int)id);
        }
        free(order);
        r.logprobs = 0; // the token does not depend on what is reported
        sala__sampler t = make(&r, n);
        sala__sampler_note(&t, 0, 0);
        CHECK(sala__sample(&t, x, trial, NULL, 0, scratch, &logprob, top, &count) == token,
              "trial %d", trial);
        CHECK(logprob == 0 && count == 0, "nothing was asked for");
        sala__sampler_free(&env, &t);
        sala__sampler_free(&env, &s);
    }
    printf("      worst error of a log-probability: %.2g of 1 + |log p|\n", worst);
    CHECK(worst < 3e-7, "%g", worst);
    free(scratch);
}

// ---- errors, memory ----

static void refused(const sala_request *r, int32_t vocab, const char *word, const char *value) {
    sala__sampler s;
    sala_error err;
    memset(&err, 0, sizeof err);
    int code = sala__sampler_init(&env, r, vocab, &s, &err);
    CHECK(code == SALA_E_ARGUMENT && strstr(err.text, word) && strstr(err.text, value),
          "%s %s: %d \"%s\"", word, value, code, err.text);
    CHECK(!s.counts && !s.biases, "something is left after an error");
}

static void wrong_requests(void) {
#define WRONG(field, wrong, word, value)                                                           \
    do {                                                                                           \
        sala_request r = {0};                                                                      \
        r.repetition_penalty = 1.5f;                                                               \
        r.field = wrong;                                                                           \
        refused(&r, 100, word, value);                                                             \
    } while (0)
    WRONG(temperature, -0.5f, "temperature", "-0.5");
    WRONG(temperature, NAN, "temperature", "nan");
    WRONG(temperature, INFINITY, "temperature", "inf");
    WRONG(top_p, 1.5f, "top-p", "1.5");
    WRONG(top_p, -0.25f, "top-p", "-0.25");
    WRONG(top_p, NAN, "top-p", "nan");
    WRONG(min_p, 1.0001f, "min-p", "1.0001");
    WRONG(min_p, NAN, "min-p", "nan");
    WRONG(top_k, -1, "top-k", "-1");
    WRONG(repetition_penalty, -1.0f, "repetition-penalty", "-1");
    WRONG(repetition_penalty, NAN, "repetition-penalty", "nan");
    WRONG(presence_penalty, 101.0f, "presence-penalty", "101");
    WRONG(frequency_penalty, -INFINITY, "frequency-penalty", "-inf");
    WRONG(logprobs, 21, "logprobs", "21");
    WRONG(logprobs, -1, "logprobs", "-1");
    WRONG(bias_count, 1, "biases", "NULL");
    WRONG(bias_count, -1, "bias_count", "-1");
#undef WRONG
    sala_bias biases[3] = {{5, 1}, {2, 1}, {7, 1}};
    sala_request r = {0};
    r.biases = biases;
    r.bias_count = 3;
    refused(&r, 7, "biases", "7");
    refused(&r, 0, "vocabulary", "0");
    biases[2].token = 5;
    refused(&r, 100, "biases", "token 5 appears twice");
    biases[2].token = -1;
    refused(&r, 100, "biases", "-1");
    biases[2].token = 9;
    biases[2].bias = NAN;
    refused(&r, 100, "biases", "nan");
    biases[2].bias = INFINITY;
    refused(&r, 100, "biases", "inf");
}

static int calls_left, living;
static void *failing(void *user, void *pointer, size_t size) {
    (void)user;
    if (size && --calls_left < 0) return NULL;
    living += (size && !pointer) - (!size && pointer);
    if (size) return realloc(pointer, size);
    free(pointer);
    return NULL;
}

static void out_of_memory(void) {
    sala__env hooks;
    memset(&hooks, 0, sizeof hooks);
    hooks.allocate = failing;
    sala_bias bias = {3, -INFINITY};
    sala_request r = {0};
    r.biases = &bias;
    r.bias_count = 1;
    r.presence_penalty = 1;
    for (int n = 0; n < 3; n++) {
        sala__sampler s;
        sala_error err;
        calls_left = n;
        int code = sala__sampler_init(&hooks, &r, 100, &s, &err);
        CHECK(code == (n < 2 ? SALA_E_MEMORY : 0), "%d allocations: %d", n, code);
        if (code == 0) sala__sampler_free(&hooks, &s);
        sala__sampler_free(&hooks, &s); // twice is fine
        CHECK(living == 0, "%d allocations: %d left", n, living);
    }
}

static void timing(void) { // printed, not judged
    enum { N = 73448 };
    static float peaked[N], tail[N], equal[N];
    static const struct {
        const char *name;
        float temperature, top_p, repetition;
        int top_k, logprobs, which;
    } settings[] = {{"greedy", 0, 0, 0, 0, 0, 0},
                    {"greedy, repetition penalty", 0, 0, 1.1f, 0, 0, 0},
                    {"temperature 1", 1, 0, 0, 0, 0, 0},
                    {"top-p 0.95", 1, 0.95f, 0, 0, 0, 0},
                    {"top-k 40, top-p 0.95", 1, 0.95f, 0, 40, 0, 0},
                    {"top-p 0.95, a long tail", 1, 0.95f, 0, 0, 0, 1},
                    {"top-k 40, top-p 0.95, a long tail", 1, 0.95f, 0, 40, 0, 1},
                    {"top-p 0.95, equal logits", 1, 0.95f, 0, 0, 0, 2},
                    {"greedy, 20 log-probabilities", 0, 0, 0, 0, 20, 0}};
    const float *const logits[] = {peaked, tail, equal};
    check_seed = 5;
    void *scratch = scratch_for(N);
    for (int32_t i = 0; i < N; i++) {
        peaked[i] = 2 * normal() + (below(3000) ? 0 : 14 + 2 * normal());
        tail[i] = 3 * normal();
    }
    for (int k = 0; k < 9; k++) {
        sala_request r = {0};
        r.temperature = settings[k].temperature;
        r.top_p = settings[k].top_p;
        r.top_k = settings[k].top_k;
        r.repetition_penalty = settings[k].repetition;
        r.logprobs = settings[k].logprobs;
        sala__sampler s = make(&r, N);
        double best = 1e9;
        float logprob;
        sala_logprob top[20];
        int count;
        for (int repeat = 0; repeat < 40; repeat++) {
            double from = sala__now();
            for (int i = 0; i < 5; i++)
                sala__sample(&s, logits[settings[k].which], i, NULL, 0, scratch, &logprob, top,
                             &count);
            double t = (sala__now() - from) / 5;
            if (t < best) best = t;
        }
        printf("      %-34s %7.1f us a token, vocabulary %d\n", settings[k].name, best * 1e6, N);
        sala__sampler_free(&env, &s);
    }
    free(scratch);
}

TEST_MAIN(TEST(random_numbers), TEST(exponential), TEST(argmax), TEST(unusable_logits),
          TEST(penalties), TEST(penalties_by_hand), TEST(kept_sets), TEST(top_p_mass),
          TEST(frequencies), TEST(independence), TEST(edges_of_the_draw), TEST(only_its_inputs),
          TEST(golden_draws), TEST(logprobs), TEST(wrong_requests), TEST(out_of_memory),
          TEST(timing))
