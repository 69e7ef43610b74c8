/*  roofline.h - what this machine can do at most: read bandwidth, multiply-add rate, OpenBLAS.

    The yardsticks for `sala bench`: decode is compared with the read bandwidth, prefill with
    OpenBLAS. All functions start their own threads, need nothing of sala.h, and return the best of
    several passes, because on a shared machine a pass can only be slowed down. Rates are per
    second; 0 means "could not be measured".

    OpenBLAS is opened at run time if it is there. It chooses its kernels by the CPU, unless the
    environment variable OPENBLAS_CORETYPE says otherwise: unset it for an honest comparison, and
    print roofline_blas.core, the name of the kernels in use. */
#ifndef ROOFLINE_H
#define ROOFLINE_H

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROOFLINE_THREADS 256

#if defined(__AVX512F__) // bytes of a vector: the machine's width
#define ROOFLINE_VECTOR 64
#elif defined(__AVX__)
#define ROOFLINE_VECTOR 32
#else
#define ROOFLINE_VECTOR 16
#endif

typedef struct roofline_team roofline_team;
typedef struct roofline_member {
    roofline_team *team;
    int thread;
} roofline_member;

struct roofline_team {
    void (*pass)(void *context, int thread, int threads);
    void *context;
    int threads, ready, go, done; // the last three are shared by the threads
    roofline_member members[ROOFLINE_THREADS];
};

static double roofline_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Wait until *value is `wanted`: awake, because a thread that gave its processor away may come back
// late.
static void roofline_await(const int *value, int wanted) {
    for (long spins = 0; __atomic_load_n(value, __ATOMIC_ACQUIRE) != wanted; spins++)
        if (spins > 1000000) sched_yield();
}

static void *roofline_run(void *argument) {
    roofline_member *m = (roofline_member *)argument;
    __atomic_fetch_add(&m->team->ready, 1, __ATOMIC_ACQ_REL);
    roofline_await(&m->team->go, 1);
    m->team->pass(m->team->context, m->thread, m->team->threads);
    __atomic_fetch_add(&m->team->done, 1, __ATOMIC_ACQ_REL);
    return NULL;
}

// Seconds that `threads` threads take for one pass each, from a common start; negative when none
// could start.
static double roofline_time(int threads, void (*pass)(void *context, int thread, int threads),
                            void *context) {
    roofline_team team;
    pthread_t handles[ROOFLINE_THREADS];
    memset(&team, 0, sizeof team);
    team.pass = pass;
    team.context = context;
    team.threads = threads;
    if (threads < 1 || threads > ROOFLINE_THREADS) return -1;
    int started = 0;
    for (int i = 1; i < threads; i++, started++) {
        team.members[i].team = &team;
        team.members[i].thread = i;
        if (pthread_create(&handles[i], NULL, roofline_run, &team.members[i])) break;
    }
    roofline_await(&team.ready, started);
    double start = roofline_now();
    __atomic_store_n(&team.go, 1, __ATOMIC_RELEASE);
    pass(context, 0, threads);
    roofline_await(&team.done, started);
    double seconds = roofline_now() - start;
    for (int i = 1; i <= started; i++) pthread_join(handles[i], NULL);
    return started == threads - 1 ? seconds : -1;
}

// ---- read bandwidth ----

typedef uint64_t roofline_word __attribute__((vector_size(ROOFLINE_VECTOR)));
typedef uint64_t roofline_word_memory
    __attribute__((vector_size(ROOFLINE_VECTOR), aligned(8), may_alias));

typedef struct roofline_read_pass {
    const unsigned char *data; // [bytes]
    size_t bytes;
    uint64_t sums[ROOFLINE_THREADS]; // so that no compiler leaves the reading out
} roofline_read_pass;

static void roofline_read_slice(void *context, int thread, int threads) {
    roofline_read_pass *p = (roofline_read_pass *)context;
    size_t slice = p->bytes / (size_t)threads / 512 * 512;
    const unsigned char *from = p->data + slice * (size_t)thread;
    roofline_word s0, s1, s2, s3;
    memset(&s0, 0, sizeof s0);
    s1 = s2 = s3 = s0;
    for (size_t at = 0; at < slice; at += 4 * ROOFLINE_VECTOR) {
        const roofline_word_memory *v = (const roofline_word_memory *)(from + at);
        s0 += v[0], s1 += v[1], s2 += v[2], s3 += v[3];
    }
    s0 += s1 + s2 + s3;
    p->sums[thread] = s0[0] + s0[1];
}

// Bytes a second. `data` should be far larger than the caches, and written to before (untouched
// pages are one and the same page of zeros).
static double roofline_read(const void *data, size_t bytes, int threads, int passes) {
    roofline_read_pass *p = (roofline_read_pass *)calloc(1, sizeof *p);
    if (!p || threads < 1) return free(p), 0.0;
    p->data = (const unsigned char *)data;
    p->bytes = bytes;
    double best = 0;
    for (int i = 0; i < passes; i++) {
        double seconds = roofline_time(threads, roofline_read_slice, p);
        double rate = (double)(bytes / (size_t)threads / 512 * 512 * (size_t)threads) / seconds;
        if (seconds > 0 && rate > best) best = rate;
    }
    free(p);
    return best;
}

// ---- multiply-add rate ----

typedef float roofline_floats __attribute__((vector_size(ROOFLINE_VECTOR)));

#define ROOFLINE_FMA_STEPS 2000000

// The sums are variables, not an array, so that they surely are in registers, and unequal, or the
// compiler would merge them. It may fuse * and +, whatever the rest of the program asks for.
#ifndef __clang__
__attribute__((optimize("fp-contract=fast")))
#endif
static void
roofline_fma_loop(void *context, int thread, int threads) {
#ifdef __clang__
#pragma STDC FP_CONTRACT ON
#endif
    roofline_floats a, b, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;
    (void)threads;
    // The sums stay near thread + 1: with b = 0 they would become subnormal, which is slow.
    for (int i = 0; i < ROOFLINE_VECTOR / 4; i++)
        a[i] = 0.999f, b[i] = 0.001f * (float)(thread + 1);
    s0 = a, s1 = s0 + a, s2 = s1 + a, s3 = s2 + a, s4 = s3 + a, s5 = s4 + a;
    s6 = s5 + a, s7 = s6 + a, s8 = s7 + a, s9 = s8 + a, s10 = s9 + a, s11 = s10 + a;
    for (int step = 0; step < ROOFLINE_FMA_STEPS; step++) {
        s0 = s0 * a + b, s1 = s1 * a + b, s2 = s2 * a + b, s3 = s3 * a + b;
        s4 = s4 * a + b, s5 = s5 * a + b, s6 = s6 * a + b, s7 = s7 * a + b;
        s8 = s8 * a + b, s9 = s9 * a + b, s10 = s10 * a + b, s11 = s11 * a + b;
    }
    s0 += s1 + s2 + s3 + s4 + s5 + s6 + s7 + s8 + s9 + s10 + s11;
    ((float *)context)[thread] = s0[0];
}

// FP32 operations a second; a multiply-add counts as two.
static double roofline_fma(int threads, int passes) {
    float out[ROOFLINE_THREADS];
    double best = 0;
    for (int i = 0; i < passes; i++) {
        double seconds = roofline_time(threads, roofline_fma_loop, out);
        double rate = 2.0 * (ROOFLINE_VECTOR / 4) * 12 * ROOFLINE_FMA_STEPS * threads / seconds;
        if (seconds > 0 && rate > best) best = rate;
    }
    return best;
}

// ---- OpenBLAS ----

typedef struct roofline_blas {
    void *library; // NULL: not there
    const char *core;
    void (*set_threads)(int threads);
    void (*sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                  const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
} roofline_blas;

static int roofline_blas_open(roofline_blas *blas) { // 1 when it is there
    char *(*core)(void) = NULL;
    void *symbol;
    memset(blas, 0, sizeof *blas);
    blas->library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!blas->library) return 0;
    // POSIX says that a data pointer holds a function's address; ISO C has no cast for it.
    if ((symbol = dlsym(blas->library, "openblas_get_corename")))
        memcpy(&core, &symbol, sizeof symbol);
    if ((symbol = dlsym(blas->library, "openblas_set_num_threads")))
        memcpy(&blas->set_threads, &symbol, sizeof symbol);
    if ((symbol = dlsym(blas->library, "cblas_sgemm")))
        memcpy(&blas->sgemm, &symbol, sizeof symbol);
    blas->core = core ? core() : "unknown";
    if (blas->sgemm && blas->set_threads) return 1;
    dlclose(blas->library);
    blas->library = NULL;
    return 0;
}

static void roofline_blas_close(roofline_blas *blas) {
    if (blas->library) dlclose(blas->library);
    blas->library = NULL;
}

// y[rows, n] = x[rows, k] * w[n, k]^T in FP32, the product that a linear layer is. Seconds of one
// call.
static double roofline_sgemm_once(roofline_blas *blas, int rows, int n, int k, int threads,
                                  const float *x, const float *w, float *y) {
    const int row_major = 101, plain = 111, transposed = 112;
    blas->set_threads(threads);
    double start = roofline_now();
    blas->sgemm(row_major, plain, transposed, rows, n, k, 1.0f, x, k, w, k, 0.0f, y, n);
    return roofline_now() - start;
}

// FP32 operations a second of that product, best of `passes`; 0 without memory or library.
static double roofline_sgemm(roofline_blas *blas, int rows, int n, int k, int threads, int passes) {
    size_t xs = (size_t)rows * (size_t)k, ws = (size_t)n * (size_t)k, ys = (size_t)rows * (size_t)n;
    float *x = (float *)malloc((xs + ws + ys) * sizeof(float));
    double best = 0;
    if (!x || !blas->library) return free(x), 0.0;
    for (size_t i = 0; i < xs + ws + ys; i++)
        x[i] = (float)(i * 2654435761u % 2048) / 1024.0f - 1.0f;
    for (int i = 0; i < passes; i++) {
        double seconds = roofline_sgemm_once(blas, rows, n, k, threads, x, x + xs, x + xs + ws);
        double rate = 2.0 * rows * n * (double)k / seconds;
        if (rate > best) best = rate;
    }
    free(x);
    return best;
}

#endif
