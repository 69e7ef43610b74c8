// The products of prefill against their C twins: the cases and tolerances of kernels_gemm.h (one chain
// of MMAs along k was measured to be off by 2^-18.7 of the magnitudes at k 16384), for every shape of
// tiles.

static void prefill_gemm_begin(void) {
    gemm_prefill = 1;
    gemm_begin();
    gemm_prefill = 0;
}

// A shape by its number, 0: the one that the launcher takes.
static void prefill_gemm_shapes(int shape) {
    static const int several[] = {64, 128, 40, 8}, wide[] = {320}, last[] = {8, 256};
    gpu->shape = shape;
    test_gemm_case(1, 64, 4, several, 0);
    test_gemm_case(63, 192, 1, wide, 0);
    test_gemm_case(65, 64, 2, last, 0);
    test_gemm_case(130, 128, 2, several, 0);
    test_gemm_case(17, 832, 1, several, 0);
}

static void prefill_gemm_plain(void) {
    prefill_gemm_begin();
    for (int shape = 0; shape <= SALA__PREFILL_SHAPE_COUNT; shape++) prefill_gemm_shapes(shape);
    gemm_end();
}

// More rows than a band has, in two shapes; the last band is narrower.
static void prefill_gemm_band(void) {
    static const int n[] = {64, 128};
    prefill_gemm_begin();
    gpu->shape = 1;
    test_gemm_case(SALA_PREFILL_BAND + 150, 64, 2, n, 0);
    gpu->shape = 4;
    test_gemm_case(SALA_PREFILL_BAND + 33, 64, 1, n, 0);
    gemm_end();
}

static void prefill_gemm_swiglu(void) {
    prefill_gemm_begin();
    for (int shape = 0; shape <= SALA__PREFILL_SHAPE_COUNT; shape++) {
        gpu->shape = shape;
        test_gemm_swiglu_case(1, 128, 64);
        test_gemm_swiglu_case(67, 192, 192);
    }
    gemm_end();
}

// The residual is exact: x is what the twin makes of the rounded branch, or its neighbour.
static void prefill_gemm_norm(void) {
    prefill_gemm_begin();
    for (int shape = 0; shape <= SALA__PREFILL_SHAPE_COUNT; shape++) {
        gpu->shape = shape;
        test_gemm_norm_case(1, 128, 64, 2);
        test_gemm_norm_case(70, 64, 320, 2);
    }
    gemm_end();
}

enum { PREFILL_GEMM_K = 576, PREFILL_GEMM_N = 192, PREFILL_GEMM_ROWS = 200 };

// Rows `from` to `to` by one launch. What lies behind the ends is NaN, and must stay.
static void prefill_gemm_rows(int kind, const sala_act *x, const sala_weight *w, int from, int to,
                              sala_act *y) {
    size_t in = (size_t)PREFILL_GEMM_K * 2, out = (size_t)PREFILL_GEMM_N * 2;
    size_t rows = (size_t)(to - from), guard = 64 * out;
    sala_act *host = (sala_act *)malloc(rows * out + guard);
    memset(host, 0xFF, rows * out + guard);
    memcpy(host, y + (size_t)from * PREFILL_GEMM_N, rows * out);
    sala_act *result = (sala_act *)on_device(host, rows * out + guard);
    const sala_act *here = x + (size_t)from * PREFILL_GEMM_K;
    sala_product_args a;
    memset(&a, 0, sizeof a);
    a.kind = kind;
    a.gemm.rows = to - from, a.gemm.count = 1, a.gemm.w[0] = *w, a.gemm.y[0] = result;
    a.gemm.x = (const sala_act *)on_device(here, rows * in);
    a.norm.rows = to - from, a.norm.width = PREFILL_GEMM_N, a.norm.divisor = 1, a.norm.eps = 1;
    a.norm.scale = 0.2475f, a.norm.x = result;
    a.norm.y = (sala_act *)on_device(NULL, rows * out);
    a.norm.weight.data = on_device(x, out);
    sala__launch_product(gpu, &a);
    device_sync();
    from_device(host, result, rows * out + guard);
    memcpy(y + (size_t)from * PREFILL_GEMM_N, host, rows * out);
    int written = 0;
    for (size_t i = 0; i < guard; i++)
        written += ((const unsigned char *)host)[rows * out + i] != 0xFF;
    CHECK(written == 0, "kind %d, rows %d to %d: %d bytes behind the end", kind, from, to, written);
    free(host);
}

// What the residual stream must be, exactly: the plain product is the branch.
static int prefill_gemm_wrong(const sala_act *x, const sala_act *branch, const sala_act *old) {
    int wrong = 0;
    for (int i = 0; i < PREFILL_GEMM_ROWS * PREFILL_GEMM_N; i++) {
        float want = sala_act_f32(old[i]) + sala_round(sala_act_f32(branch[i]) * 0.2475f);
        wrong += want == want && x[i] != sala_store(want);
    }
    return wrong;
}

// Promise 2: the same bits for every cut into chunks and every shape of tiles. One row of x is NaN,
// and nothing else is.
static void prefill_gemm_bits(void) {
    enum { COUNT = PREFILL_GEMM_ROWS * PREFILL_GEMM_N, SPOILT = 70 };
    static const int cuts[][4] = {{0, 200, 0, 0}, {0, 64, 200, 0}, {0, 128, 192, 200}};
    prefill_gemm_begin();
    sala_act *x = gemm_random(PREFILL_GEMM_ROWS * PREFILL_GEMM_K, 1),
             *first = gemm_random(COUNT, 1);
    sala_weight w = gemm_weight(PREFILL_GEMM_N, PREFILL_GEMM_K, 0.1f);
    sala_weight up = gemm_weight(PREFILL_GEMM_N, PREFILL_GEMM_K, 0.1f);
    sala_weight packed[3] = {gemm_pack(&w, NULL), gemm_pack(&w, &up), gemm_pack(&w, NULL)};
    sala_act *y = (sala_act *)malloc(COUNT * 2), *want = (sala_act *)malloc(COUNT * 2);
    sala_act *branch = (sala_act *)malloc(COUNT * 2);
    x[SPOILT * PREFILL_GEMM_K + 99] = 0x7FC0;
    for (int i = 0; i < 3 * 3 * 2; i++) {
        int kind = i / 6, cut = i / 2 % 3, spoilt = 0;
        gpu->shape = i % 2 == 0 ? 0 : (i * 5 + cut) % SALA__PREFILL_SHAPE_COUNT + 1;
        memcpy(y, first, COUNT * 2);
        for (int part = 0; part < 3 && cuts[cut][part + 1]; part++)
            prefill_gemm_rows(kind, x, &packed[kind], cuts[cut][part], cuts[cut][part + 1], y);
        if (i % 6 == 0) memcpy(want, y, COUNT * 2);
        if (i == 0) memcpy(branch, y, COUNT * 2);
        CHECK(memcmp(y, want, COUNT * 2) == 0, "kind %d, cut %d, shape %d", kind, cut, gpu->shape);
        for (int j = 0; j < COUNT; j++)
            spoilt += (sala_act_f32(y[j]) != sala_act_f32(y[j])) != (j / PREFILL_GEMM_N == SPOILT);
        CHECK(spoilt == 0, "kind %d, cut %d, shape %d: %d", kind, cut, gpu->shape, spoilt);
    }
    int wrong = prefill_gemm_wrong(y, branch, first);
    CHECK(wrong == 0, "%d of x", wrong);
    gemm_free(w.data), gemm_free(up.data), free(x), free(first), free(y), free(want), free(branch);
    gemm_end();
}

#define PREFILL_GEMM_TESTS                                                                         \
    TEST(prefill_gemm_plain), TEST(prefill_gemm_band), TEST(prefill_gemm_swiglu),                  \
        TEST(prefill_gemm_norm), TEST(prefill_gemm_bits)
