/*  The vectors, threads and matrix products of the CPU back end (section [7] of sala.h). */
#define SALA_IMPLEMENTATION
#include "../sala.h"

#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

#pragma GCC diagnostic ignored                                                                     \
    "-Wpsabi" // 64-byte vectors are only passed to functions that are inlined

static const sala__env env = {NULL, NULL, NULL, NULL};

static void open_cpu(sala__cpu *cpu, int threads, size_t scratch) {
    sala_error err = {0, ""};
    int code = sala__cpu_open(&env, threads, scratch, cpu, &err);
    CHECK(code == 0, "%d threads: %s", threads, err.text);
    if (code < 0) exit(1);
}

// ---- lanes ----

static void loads_and_stores(void) {
    // Every upper half, and the low halves at which rounding changes its mind.
    static const uint32_t low[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD};
    int wrong = 0;
    for (uint32_t high = 0; high < 65536; high += 2) {
        float in[16], out[16];
        sala_act rounded[16];
        for (int i = 0; i < 16; i++)
            in[i] = sala_bits_f32((high + (uint32_t)(i / 8)) << 16 | low[i % 8]);
        sala__store_act16(rounded, sala__load16(in));
        sala__store16(out, sala__load_act16(rounded));
        for (int i = 0; i < 16; i++) {
            sala_act expect = sala_store(in[i]);
            float loaded = sala_act_f32(expect);
            if (memcmp(&rounded[i], &expect, sizeof expect) || memcmp(&out[i], &loaded, 4)) wrong++;
        }
    }
    CHECK(wrong == 0, "%d numbers", wrong);
}

static void weights(void) {
    int wrong = 0;
    for (uint32_t from = 0; from < 65536; from += 16) {
        uint16_t half[17];
        float f[17], out[16];
        for (uint32_t i = 0; i < 17; i++)
            half[i] = (uint16_t)(from + i - 1), f[i] = sala_bits_f32((from + i - 1) * 65539u);
        sala__store16(out, sala__load_weight16(half, SALA_BF16, 1));
        for (int i = 0; i < 16; i++)
            wrong += sala_f32_bits(out[i]) != sala_f32_bits(sala_bf16_f32(half[i + 1]));
        sala__store16(out, sala__load_weight16(half, SALA_F16, 1));
        for (int i = 0; i < 16; i++)
            wrong += sala_f32_bits(out[i]) != sala_f32_bits(sala_f16_f32(half[i + 1]));
        sala__store16(out, sala__load_weight16(f, SALA_F32, 1));
        wrong += memcmp(out, f + 1, 64) != 0;
    }
    CHECK(wrong == 0, "%d numbers", wrong);
}

static void folds(void) {
    int wrong = 0;
    for (int round = 0; round < 10000; round++) {
        float a[16], b[16], c[16], out[16], tree[16], most = -1e30f;
        for (int i = 0; i < 16; i++) {
            a[i] = check_uniform() * (float)(1 << (round % 20));
            b[i] = check_uniform();
            c[i] = -a[i] * b[i] *
                   (1 + check_uniform() *
                            1e-6f); // much cancels: one rounding or two makes a difference
            if (a[i] > most) most = a[i];
            tree[i] = a[i];
        }
        sala__store16(out, sala__fma16(sala__load16(a), sala__load16(b), sala__load16(c)));
        for (int i = 0; i < 16; i++)
            wrong += sala_f32_bits(out[i]) != sala_f32_bits(fmaf(a[i], b[i], c[i]));
        for (int half = 8; half > 0; half /= 2)
            for (int i = 0; i < half; i++) tree[i] = tree[i] + tree[i + half];
        wrong += sala_f32_bits(sala__sum16(sala__load16(a))) != sala_f32_bits(tree[0]);
        wrong += sala__max16(sala__load16(a)) != most;
        sala__store16(out, sala__set16(a[0]));
        for (int i = 0; i < 16; i++) wrong += sala_f32_bits(out[i]) != sala_f32_bits(a[0]);
    }
    CHECK(wrong == 0, "%d numbers", wrong);
}

static double ulps(float got,
                   long double exact) { // how far off, in units of the last place of `exact`
    int e;
    frexpl(exact, &e);
    if (e < -125) e = -125; // subnormal: the last place is 2^-149
    return (double)fabsl(((long double)got - exact) / ldexpl(1, e - 24));
}

static void exponential(void) {
    double worst = 0;
    float worst_at = 0, before = 0;
    int falls = 0;
    for (float from = -104.5f; from < 88.72f;) {
        float x[16], y[16];
        for (int i = 0; i < 16; i++, from += 1.0f / 16384 * (1 + fabsf(check_uniform())))
            x[i] = from;
        sala__store16(y, sala__exp16(sala__load16(x)));
        for (int i = 0; i < 16; i++) {
            if (x[i] > 88.72f) continue;
            double off = ulps(y[i], expl((long double)x[i]));
            if (off > worst) worst = off, worst_at = x[i];
            falls += y[i] < before;
            before = y[i];
        }
    }
    CHECK(worst <= 1.0, "worst error %g ulp at %.9g", worst, (double)worst_at);
    CHECK(falls == 0, "falls %d times", falls);
    printf("      exp16: at most %.3f ulp\n", worst);
}

// The same bits from every compiler and on every machine: a hash of 100,000 results.
static void exponential_bits(void) {
    uint32_t hash = 2166136261u;
    check_seed = 7;
    for (int round = 0; round < 6250; round++) {
        float v[16];
        for (int i = 0; i < 16; i++) v[i] = check_uniform() * 104;
        sala__store16(v, sala__exp16(sala__load16(v)));
        for (int i = 0; i < 16; i++) hash = (hash ^ sala_f32_bits(v[i])) * 16777619u;
    }
    CHECK(hash == 0x90486EBDu, "0x%08Xu", hash);
}

static void exponential_edges(void) {
    static const float in[16] = {-INFINITY, -1e30f,   -104.0f, -103.97f, -103.9f, -0.0f,
                                 0.0f,      1e-30f,   -1e-30f, 88.72f,   88.73f,  89.0f,
                                 1e30f,     INFINITY, -87.0f,  -88.0f};
    float out[16], nan[16];
    sala__store16(out, sala__exp16(sala__load16(in)));
    for (int i = 0; i < 3; i++)
        CHECK(sala_f32_bits(out[i]) == 0, "e^%g = %g", (double)in[i], (double)out[i]);
    CHECK(out[4] == 0x1p-149f, "e^-103.9 = %g", (double)out[4]);
    for (int i = 5; i < 9; i++) CHECK(out[i] == 1.0f, "e^%g = %g", (double)in[i], (double)out[i]);
    CHECK(out[9] < INFINITY && out[9] > 3.39e38f, "e^88.72 = %g", (double)out[9]);
    for (int i = 10; i < 14; i++)
        CHECK(out[i] == INFINITY, "e^%g = %g", (double)in[i], (double)out[i]);
    for (int i = 0; i < 16; i++) nan[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? 1.0f : -NAN;
    sala__store16(out, sala__exp16(sala__load16(nan)));
    for (int i = 0; i < 16; i++)
        CHECK(isnan(out[i]) == (i % 3 != 1), "lane %d: %g", i, (double)out[i]);
}

static void sigmoid(void) {
    static const float in[16] = {-INFINITY, -200, -100, -88, -20, -1,  -0.0f,    0,
                                 1,         2,    20,   88,  100, 200, INFINITY, NAN};
    float s[16], silu[16];
    sala__store16(s, sala__sigmoid16(sala__load16(in)));
    sala__store16(silu, sala__silu16(sala__load16(in)));
    for (int i = 1; i < 14; i++) {
        double exact = 1 / (1 + exp(-(double)in[i]));
        CHECK(fabs((double)s[i] - exact) <= 2e-7 * exact + 1e-38, "sigmoid(%g) = %g", (double)in[i],
              (double)s[i]);
        CHECK(fabs((double)silu[i] - in[i] * exact) <= 4e-7 * fabs(in[i] * exact) + 1e-36,
              "silu(%g) = %g", (double)in[i], (double)silu[i]);
    }
    CHECK(s[0] == 0 && s[14] == 1 && isnan(s[15]), "%g %g %g", (double)s[0], (double)s[14],
          (double)s[15]);
    CHECK(silu[14] == INFINITY && isnan(silu[15]), "%g %g", (double)silu[14], (double)silu[15]);
}

// ---- threads ----

typedef struct count_context {
    int32_t *count; // [items]
    int threads;
    int wrong_thread;
    sala__cpu *cpu;
} count_context;

static void count_body(void *context, int64_t item, int thread) {
    count_context *c = (count_context *)context;
    c->count[item]++; // not atomic: each item must be run by one thread alone
    if (thread < 0 || thread >= c->threads) __atomic_store_n(&c->wrong_thread, 1, __ATOMIC_RELAXED);
    int64_t *scratch =
        (int64_t *)sala__cpu_scratch(c->cpu, thread); // nor may two threads have one number
    scratch[0]++;
}

static void many_jobs(void) {
    int threads[] = {1, 2, 3, 8};
    for (int t = 0; t < 4; t++) {
        sala__cpu cpu;
        open_cpu(&cpu, threads[t], 64);
        static int32_t count[1000];
        count_context c = {count, threads[t], 0, &cpu};
        int wrong = 0, jobs = t < 2 ? 100000 : 10000;
        int64_t ran = 0, expected = 0;
        for (int i = 0; i < threads[t]; i++) memset(sala__cpu_scratch(&cpu, i), 0, 64);
        for (int job = 0; job < jobs; job++) {
            int64_t items = job % 1000 == 0 ? 1000 : job % 9;
            memset(count, 0, sizeof(int32_t) * (size_t)items);
            sala__parallel(&cpu, items, count_body, &c);
            for (int64_t i = 0; i < items; i++) wrong += count[i] != 1;
            expected += items;
            if (job % 5000 == 4999) usleep(2000); // long enough for the workers to fall asleep
        }
        for (int i = 0; i < threads[t]; i++) {
            void *scratch = sala__cpu_scratch(&cpu, i);
            CHECK((uintptr_t)scratch % 64 == 0, "scratch of thread %d is not aligned", i);
            ran += *(int64_t *)scratch;
        }
        CHECK(wrong == 0 && !c.wrong_thread, "%d items did not run once", wrong);
        CHECK(ran == expected, "%d threads: ran %lld of %lld", threads[t], (long long)ran,
              (long long)expected);
        sala__cpu_close(&cpu);
    }
}

static void open_and_close(void) {
    static int32_t count[100];
    for (int round = 0; round < 50; round++) {
        sala__cpu outer, inner;
        open_cpu(&outer, 3, 64);
        open_cpu(&inner, 4, 64);
        count_context a = {count, 3, 0, &outer}, b = {count, 4, 0, &inner};
        memset(count, 0, sizeof count);
        sala__parallel(&outer, 100, count_body, &a);
        sala__parallel(&inner, 100, count_body, &b);
        sala__cpu_close(&inner);
        sala__parallel(&outer, 100, count_body, &a);
        sala__cpu_close(&outer);
        for (int i = 0; i < 100; i++) CHECK(count[i] == 3, "item %d ran %d times", i, count[i]);
    }
    sala__cpu never;
    memset(&never, 0, sizeof never);
    sala__cpu_close(&never); // what failed to open may be closed
}

static void bad_options(void) {
    sala__cpu cpu;
    sala_error err = {0, ""};
    CHECK(sala__cpu_open(&env, 100000, 0, &cpu, &err) == SALA_E_ARGUMENT, "%s", err.text);
    CHECK(strstr(err.text, "100000") != NULL, "%s", err.text);
    CHECK(sala__cpu_open(&env, 1, SIZE_MAX / 2, &cpu, &err) == SALA_E_MEMORY, "%s", err.text);
    open_cpu(&cpu, 0, 0);
    CHECK(cpu.threads >= 1, "%d", cpu.threads);
    sala__cpu_close(&cpu);
}

static int allocations_left; // -1: any number
static int allocations_held;
static void *limited(void *user, void *pointer, size_t size) {
    (void)user;
    if (size && allocations_left == 0) return NULL;
    if (size && allocations_left > 0) allocations_left--;
    if (size && !pointer) allocations_held++;
    if (!size && pointer) allocations_held--;
    if (size) return realloc(pointer, size);
    free(pointer);
    return NULL;
}

static void out_of_memory(void) {
    sala__env tight = {NULL, limited, NULL, NULL};
    for (int left = 0; left < 8; left++) {
        sala__cpu cpu;
        sala_error err = {0, ""};
        allocations_left = left;
        int code = sala__cpu_open(&tight, 2, 1000, &cpu, &err);
        if (code == 0)
            sala__cpu_close(&cpu);
        else
            CHECK(code == SALA_E_MEMORY && err.text[0], "%d %s", code, err.text);
        CHECK(left > 0 || code < 0, "opened without memory");
        CHECK(allocations_held == 0, "%d allocations: %d left over", left, allocations_held);
    }
}

static void idle_takes_no_cpu(void) {
    sala__cpu cpu;
    static int32_t count[100];
    open_cpu(&cpu, 3, 64);
    count_context c = {count, 3, 0, &cpu};
    sala__parallel(&cpu, 100, count_body, &c);
    usleep(20000); // now all are asleep
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    usleep(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    double used = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
    CHECK(used < 0.02, "%g s of CPU time in 0.2 s of rest", used);
    sala__cpu_close(&cpu);
}

static int seen_threads[3];
static void seen_body(void *context, int64_t item, int thread) {
    (void)context, (void)item;
    __atomic_store_n(&seen_threads[thread], 1, __ATOMIC_RELAXED);
    usleep(1000);
}

static void sleepers_wake(void) {
    sala__cpu cpu;
    open_cpu(&cpu, 3, 64);
    for (int round = 0; round < 3; round++) {
        memset(seen_threads, 0, sizeof seen_threads);
        usleep(10000);
        sala__parallel(&cpu, 100, seen_body, NULL);
        for (int i = 0; i < 3; i++) CHECK(seen_threads[i], "thread %d did not take part", i);
    }
    sala__cpu_close(&cpu);
}

static int blocked_signals;
static void signal_body(void *context, int64_t item, int thread) {
    (void)context, (void)item;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, NULL, &set);
    int blocked = sigismember(&set, SIGINT) == 1;
    if (blocked != (thread != 0)) __atomic_store_n(&blocked_signals, -1, __ATOMIC_RELAXED);
    usleep(1000); // so that every thread gets an item
}

static void signals(void) {
    sala__cpu cpu;
    open_cpu(&cpu, 3, 64);
    blocked_signals = 0;
    sala__parallel(&cpu, 12, signal_body, NULL);
    CHECK(blocked_signals == 0, "SIGINT must reach the caller's thread, and it alone");
    sala__cpu_close(&cpu);
}

// ---- matrix products ----

#define MAX_ROWS 300
#define MAX_N 720
#define MAX_K 2320

static sala_act x[MAX_ROWS * MAX_K], y[4][MAX_ROWS * MAX_N], z[4][MAX_ROWS * MAX_N];
static float w_f32[MAX_N * MAX_K], y_f32[MAX_ROWS * MAX_N];
static uint16_t w_half[MAX_N * MAX_K];

static void fill_x(size_t count) {
    for (size_t i = 0; i < count; i++) x[i] = sala_store(check_uniform() * 4);
}

static const void *fill_w(int32_t format, size_t count) {
    for (size_t i = 0; i < count; i++) {
        w_f32[i] = check_uniform();
        if (format == SALA_BF16) w_half[i] = sala_f32_bf16(w_f32[i]);
        if (format == SALA_F16) w_half[i] = sala_f32_f16(w_f32[i]);
        if (format == SALA_BF16) w_f32[i] = sala_bf16_f32(w_half[i]);
        if (format == SALA_F16) w_f32[i] = sala_f16_f32(w_half[i]);
    }
    return format == SALA_F32 ? (const void *)w_f32 : (const void *)w_half;
}

static sala_gemm_args product(int rows, const void *w, int32_t format, int n, int k) {
    sala_gemm_args a;
    memset(&a, 0, sizeof a);
    a.rows = rows;
    a.count = 1;
    a.x = x;
    a.w[0].data = w;
    a.w[0].format = format;
    a.w[0].n = n;
    a.w[0].k = k;
    a.y[0] = y[0];
    return a;
}

// The product against the scalar definition, bit for bit; x and w_f32 are filled. Returns the wrong
// elements.
static int against_reference(sala__cpu *cpu, const void *w, int32_t format, int rows, int n, int k,
                             int step) {
    static float xr[MAX_K];
    sala_gemm_args a = product(rows, w, format, n, k);
    int wrong = 0;
    memset(y_f32, 0xEE, sizeof(float) * (size_t)(rows * n + 1));
    a.y_f32 = y_f32;
    sala__op_gemm(cpu, &a);
    wrong += sala_f32_bits(y_f32[rows * n]) != 0xEEEEEEEEu; // nothing behind the end is written
    memset(y[0], 0xEE, sizeof(sala_act) * (size_t)(rows * n));
    a.y_f32 = NULL;
    sala__op_gemm(cpu, &a);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < k; i++) xr[i] = sala_act_f32(x[r * k + i]);
        for (int c = r % step; c < n; c += step) {
            float expect = sala__dot_reference(xr, w_f32 + (size_t)c * (size_t)k, k);
            sala_act rounded = sala_store(expect);
            wrong += sala_f32_bits(expect) != sala_f32_bits(y_f32[r * n + c]);
            wrong += memcmp(&rounded, &y[0][r * n + c], sizeof rounded) != 0;
        }
    }
    return wrong;
}

static void reference(void) {
    static const int rows[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12,
                               13, 14, 15, 16, 17, 31, 48, 49, 63, 64, 65, 129};
    static const int ks[] = {16, 32, 48, 496, 512, 528, 1008, 1024, 1040, 2048, 2064, 2304};
    sala__cpu cpu[2];
    open_cpu(&cpu[0], 2, 0);
    open_cpu(&cpu[1], 5, 0);
    int shape = 0;
    for (int32_t format = SALA_BF16; format <= SALA_F32; format++) {
        const void *w = fill_w(format, 71 * MAX_K);
        fill_x(129 * MAX_K);
        for (int i = 0; i < (int)(sizeof rows / sizeof *rows); i++) {
            for (int j = 0; j < (int)(sizeof ks / sizeof *ks); j++, shape++) {
                int n = 1 + (shape * 37 + i) % 70, step = 1 + rows[i] / 8;
                int wrong = against_reference(&cpu[shape % 2], w, format, rows[i], n, ks[j], step);
                CHECK(wrong == 0, "format %d, rows %d, n %d, k %d: %d wrong", format, rows[i], n,
                      ks[j], wrong);
            }
        }
        for (int n = 1; n <= 70; n++) {
            int wrong = against_reference(&cpu[0], w, format, 3, n, 528, 1) +
                        against_reference(&cpu[0], w, format, 6, n, 528, 1);
            CHECK(wrong == 0, "format %d, n %d: %d wrong", format, n, wrong);
        }
    }
    const void *w = fill_w(SALA_BF16, MAX_N * 1040);
    fill_x(257 * 1040);
    static const int large[][2] = {{1, 720}, {4, 719}, {16, 257}, {256, 300}, {257, 513}};
    for (int i = 0; i < 5; i++) {
        int wrong = against_reference(&cpu[i % 2], w, SALA_BF16, large[i][0], large[i][1], 1040,
                                      1 + large[i][0] / 8);
        CHECK(wrong == 0, "rows %d, n %d: %d wrong", large[i][0], large[i][1], wrong);
    }
    sala__cpu_close(&cpu[0]);
    sala__cpu_close(&cpu[1]);
}

// 4-bit weights: w_f32 holds what the codes mean, one by one, and alpha multiplies the definition's sum.
static uint8_t codes4[71 * MAX_K / 2], scales4[71 * MAX_K / 8], zeros4[71 * MAX_K / 32];
static float alpha4[71];

static sala_weight fill_w4(int32_t format, int32_t group, int n, int k) {
    sala_weight w = sala_plain_weight(codes4, format, n, k);
    uint16_t *wide = (uint16_t *)(void *)scales4;
    w.group = group;
    w.scale = scales4;
    w.zero = format == SALA_INT4 && group == 32 ? zeros4 : NULL;
    w.alpha = alpha4;
    for (int i = 0; i < n * k / 2; i++) codes4[i] = (uint8_t)check_random();
    for (int i = 0; i < n * k / group; i++) {
        zeros4[i % (int)sizeof zeros4] = (uint8_t)(check_random() % 17);
        if (format == SALA_NVFP4) scales4[i] = (uint8_t)(check_random() % 0x7F);
        if (format == SALA_INT4) wide[i] = sala_f32_bf16(check_uniform());
    }
    for (int i = 0; i < n; i++) alpha4[i] = check_uniform();
    for (int i = 0; i < n * k; i++) {
        int code = codes4[i / 2] >> i % 2 * 4 & 15, g = i / group;
        float step = format == SALA_NVFP4 ? sala_e2m1_f32((uint8_t)code)
                                          : (float)(code - (w.zero ? zeros4[g] : 8));
        float scale = format == SALA_NVFP4 ? sala_e4m3_f32(scales4[g]) : sala_bf16_f32(wide[g]);
        w_f32[i] = sala_bf16_f32(sala_f32_bf16(step * scale));
    }
    return w;
}

static void four_bits(void) {
    static const int rows[] = {1, 2, 3, 4, 5, 16, 17, 65}, ks[] = {64, 192, 512, 576, 2304};
    static float xr[MAX_K];
    sala__cpu cpu;
    open_cpu(&cpu, 3, 0);
    fill_x(65 * MAX_K);
    for (int i = 0; i < 8 * 5 * 4; i++) {
        int m = rows[i % 8], k = ks[i / 8 % 5], kind = i / 40, n = 1 + i * 37 % 70, wrong = 0;
        sala_gemm_args a = product(m, NULL, 0, n, k);
        a.w[0] = fill_w4(kind == 0 ? SALA_NVFP4 : SALA_INT4,
                         kind == 0   ? 16
                         : kind == 1 ? 32
                         : kind == 2 ? 64
                                     : k,
                         n, k);
        a.y_f32 = y_f32;
        sala__op_gemm(&cpu, &a);
        for (int r = 0; r < m; r++) {
            for (int c = 0; c < k; c++) xr[c] = sala_act_f32(x[r * k + c]);
            for (int c = 0; c < n; c++)
                wrong += sala_f32_bits(y_f32[r * n + c]) !=
                         sala_f32_bits(sala__dot_reference(xr, w_f32 + c * k, k) * alpha4[c]);
        }
        CHECK(wrong == 0, "kind %d, rows %d, n %d, k %d: %d wrong", kind, m, n, k, wrong);
    }
    sala__cpu_close(&cpu);
}

// Promise 1: a row's result does not depend on its company, on its place, or on the threads.
static void batch_invariance(void) {
    const int k = 1552, n = 300, total = 257;
    static const int sizes[] = {257, 1, 2, 3, 4, 5, 16, 17, 48, 49, 64, 65, 256};
    static sala_act all[MAX_ROWS * MAX_K];
    sala__cpu cpu[3];
    for (int i = 0; i < 3; i++) open_cpu(&cpu[i], i == 2 ? 7 : i + 1, 0);
    for (int32_t format = SALA_BF16; format <= SALA_F32; format++) {
        const void *w = fill_w(format, (size_t)(n * k));
        fill_x((size_t)(total * k));
        memcpy(all, x, sizeof(sala_act) * (size_t)(total * k));
        sala_gemm_args a = product(total, w, format, n, k);
        a.y[0] = z[0];
        sala__op_gemm(&cpu[0], &a); // the yardstick: all rows at once
        for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++) {
            int of[MAX_ROWS], wrong = 0;
            for (int r = 0; r < sizes[i];
                 r++) { // rows drawn by chance: repeated, missing, in any order
                of[r] = (int)(check_random() % (uint64_t)total);
                memcpy(x + r * k, all + of[r] * k, sizeof(sala_act) * (size_t)k);
            }
            a = product(sizes[i], w, format, n, k);
            sala__op_gemm(&cpu[i % 3], &a);
            for (int r = 0; r < sizes[i]; r++)
                wrong += memcmp(y[0] + r * n, z[0] + of[r] * n, sizeof(sala_act) * (size_t)n) != 0;
            CHECK(wrong == 0, "format %d: %d of %d rows differ", format, wrong, sizes[i]);
        }
    }
    for (int i = 0; i < 3; i++) sala__cpu_close(&cpu[i]);
}

// Four weights in one call give what four calls give; and an output does not depend on n.
static void fused(void) {
    static const int rows[] = {1, 3, 4, 17, 70};
    const int k = 560, n[4] = {33, 256, 1, 130};
    sala__cpu cpu;
    open_cpu(&cpu, 2, 0);
    const void *bf16 = fill_w(SALA_BF16, (size_t)(420 * k));
    fill_x((size_t)(70 * k));
    for (int i = 0; i < 5; i++) {
        sala_gemm_args all = product(rows[i], NULL, SALA_BF16, 0, k);
        all.count = 4;
        for (int j = 0, at = 0; j < 4; at += n[j++]) {
            all.w[j].format = j == 1 ? SALA_F32 : SALA_BF16; // formats may be mixed
            all.w[j].data = j == 1 ? (const void *)(w_f32 + at * k)
                                   : (const void *)((const uint16_t *)bf16 + at * k);
            all.w[j].n = n[j];
            all.w[j].k = k;
            all.y[j] = z[j];
        }
        sala__op_gemm(&cpu, &all);
        for (int j = 0; j < 4; j++) {
            sala_gemm_args one = product(rows[i], all.w[j].data, all.w[j].format, n[j], k);
            sala__op_gemm(&cpu, &one);
            CHECK(!memcmp(y[0], z[j], sizeof(sala_act) * (size_t)(rows[i] * n[j])),
                  "rows %d: weight %d differs", rows[i], j);
        }
        all.y_f32 = y_f32; // takes the place of the first output, and of no other
        memset(z[1], 0, sizeof(sala_act) * (size_t)(rows[i] * n[1]));
        sala__op_gemm(&cpu, &all);
        sala_gemm_args second = product(rows[i], all.w[1].data, all.w[1].format, n[1], k);
        sala__op_gemm(&cpu, &second);
        CHECK(!memcmp(y[0], z[1], sizeof(sala_act) * (size_t)(rows[i] * n[1])), "rows %d: y_f32",
              rows[i]);
        sala_gemm_args less = product(rows[i], bf16, SALA_BF16, 20, k);
        sala__op_gemm(&cpu, &less);
        for (int r = 0; r < rows[i]; r++)
            CHECK(!memcmp(y[0] + r * 20, z[0] + r * 33, sizeof(sala_act) * 20),
                  "rows %d: row %d depends on n", rows[i], r);
    }
    sala__cpu_close(&cpu);
}

// NaN and infinity reach the outputs that they belong to, and no other.
static void not_finite(void) {
    static const int rows[] = {1, 2, 5, 20};
    const int n = 37, k = 1040;
    sala__cpu cpu;
    open_cpu(&cpu, 2, 0);
    for (int i = 0; i < 4; i++) {
        fill_w(SALA_BF16, (size_t)(n * k));
        fill_x((size_t)(rows[i] * k));
        int row = rows[i] / 2, bad = 0;
        x[row * k + 700] = sala_store(NAN);
        w_half[9 * k + 1039] = 0x7F80; // infinity
        w_half[36 * k] = 0x7FC1;       // NaN
        sala_gemm_args a = product(rows[i], w_half, SALA_BF16, n, k);
        sala__op_gemm(&cpu, &a);
        for (int r = 0; r < rows[i]; r++) {
            for (int c = 0; c < n; c++) {
                float value = sala_act_f32(y[0][r * n + c]);
                if (r == row || c == 36)
                    bad += !isnan(value);
                else if (c == 9)
                    bad += !isinf(value);
                else
                    bad += !isfinite(value);
            }
        }
        CHECK(bad == 0, "rows %d: %d outputs are not what they should be", rows[i], bad);
    }
    sala__cpu_close(&cpu);
}

// Memory of `bytes` that ends where no page is: a read or write behind it ends the program.
static void *guarded(size_t bytes, void **block, size_t *total) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    *total = (bytes + page - 1) / page * page + page;
    char *p =
        (char *)mmap(NULL, *total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + *total - page, page, PROT_NONE)) exit(1);
    *block = p;
    return p + *total - page - bytes;
}

static void stays_inside(void) {
    static const int rows[] = {1, 2, 4, 5, 17, 65};
    static const int ns[] = {1, 2, 3, 5, 15, 17, 66};
    static const int ks[] = {16, 528, 2064};
    sala__cpu cpu;
    open_cpu(&cpu, 2, 0);
    for (int i = 0; i < 6 * 7 * 3 * 3; i++) {
        int32_t format = i % 3;
        int r = rows[i / 3 % 6], n = ns[i / 18 % 7], k = ks[i / 126];
        void *block[3];
        size_t total[3], size = format == SALA_F32 ? 4 : 2;
        sala_gemm_args a = product(r, NULL, format, n, k);
        a.x = (sala_act *)guarded(sizeof(sala_act) * (size_t)(r * k), &block[0], &total[0]);
        a.w[0].data = guarded(size * (size_t)(n * k), &block[1], &total[1]);
        a.y[0] = (sala_act *)guarded(sizeof(sala_act) * (size_t)(r * n), &block[2], &total[2]);
        memset(a.y[0], 0xEE, sizeof(sala_act) * (size_t)(r * n));
        sala__op_gemm(&cpu, &a);
        int wrong = 0;
        for (int j = 0; j < r * n; j++) wrong += sala_act_f32(a.y[0][j]) != 0;
        CHECK(wrong == 0, "format %d, rows %d, n %d, k %d: %d outputs not written", format, r, n, k,
              wrong);
        for (int j = 0; j < 3; j++) munmap(block[j], total[j]);
    }
    sala__cpu_close(&cpu);
}

static void no_rows(void) {
    sala__cpu cpu;
    open_cpu(&cpu, 2, 0);
    sala_gemm_args a = product(0, w_half, SALA_BF16, 16, 16);
    y[0][0] = sala_store(7);
    sala__op_gemm(&cpu, &a);
    CHECK(sala_act_f32(y[0][0]) == 7, "wrote something");
    sala__cpu_close(&cpu);
}

TEST_MAIN(TEST(loads_and_stores), TEST(weights), TEST(folds), TEST(exponential),
          TEST(exponential_bits), TEST(exponential_edges), TEST(sigmoid), TEST(many_jobs),
          TEST(open_and_close), TEST(bad_options), TEST(out_of_memory), TEST(idle_takes_no_cpu),
          TEST(sleepers_wake), TEST(signals), TEST(reference), TEST(four_bits),
          TEST(batch_invariance), TEST(fused), TEST(not_finite), TEST(stays_inside), TEST(no_rows))
