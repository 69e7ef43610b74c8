// W4A4 against its C twin: bit for bit, with BF16 tensor cores and (simulator, sm_120a) FP4 ones.

static int fp4_on; // 1 FP4 tensor cores, 2 without them, see sala__gpu

static void fp4_begin(int mode, unsigned units) {
    static const sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err = {0, ""};
    check_seed = 11;
    fp4_on = device_fp4 = mode;
    if (mode == 1) setenv("SALA_SIM_ARCH", "120", 1); // there codes lie as FP4 MMAs want them
    device_open_units(&gemm_dims, units);
    unsetenv("SALA_SIM_ARCH");
    device_fp4 = 0;
    gpu->prefill = 1;
    if (sala__cpu_open(&env, 2, sala__gemm_scratch(), &gemm_cpu, &err) < 0) exit(2);
}

// Activations of all kinds: groups of zeros (one of them -0), tiny ones, some beyond the range.
static sala_act *fp4_rows(int rows, int k) {
    sala_act *x = gemm_random((size_t)rows * (size_t)k, 1);
    for (int i = 0; i < rows * k / 16; i++) {
        int kind = (int)(check_random() % 12);
        for (int j = 0; j < 16; j++) {
            float v = sala_act_f32(x[i * 16 + j]);
            if (kind == 0) v *= 0;
            if (kind == 1) v *= 40000;
            if (kind == 2) v *= 1e-4f;
            if (kind == 3) v *= sala_bits_f32((uint32_t)(check_random() % 64 + 90) << 23);
            x[i * 16 + j] = sala_store(v);
        }
    }
    return x;
}

static sala_quant fp4_space(int rows, int k, float scale) { // poisoned, on the host
    sala_quant q = {(uint8_t *)gemm_space((size_t)rows * (size_t)k / 2),
                    (uint8_t *)gemm_space((size_t)(rows + 3) * (size_t)k / 16), scale,
                    (rows + 3) & ~3};
    return q;
}

// Words of codes from the order of a file to the device's, or back.
static void fp4_order(uint8_t *codes, size_t bytes, int back) {
    int order = sala_code_order(SALA_NVFP4, gpu->cuda.major);
    for (size_t i = 0; i < bytes; i += 4) {
        uint32_t word;
        memcpy(&word, codes + i, 4);
        word = back ? sala_nibbles_out(order, word) : sala_nibbles_in(order, word);
        memcpy(codes + i, &word, 4);
    }
}

static sala_quant fp4_device(const sala_quant *host, int rows, int k) { // NULL: poisoned
    size_t codes = (size_t)rows * (size_t)k / 2,
           scales = (size_t)((rows + 3) & ~3) * (size_t)k / 16;
    uint8_t *ordered = host ? (uint8_t *)malloc(codes) : NULL;
    if (host) memcpy(ordered, host->codes, codes), fp4_order(ordered, codes, 0);
    sala_quant q = {(uint8_t *)on_device(ordered, codes),
                    (uint8_t *)on_device(host ? host->scales : NULL, scales), 0.003f,
                    (rows + 3) & ~3};
    free(ordered);
    return q;
}

static int fp4_equal(const sala_quant *want, const sala_quant *on_gpu, int rows, int k) {
    size_t codes = (size_t)rows * (size_t)k / 2,
           scales = (size_t)((rows + 3) & ~3) * (size_t)k / 16;
    uint8_t *got = (uint8_t *)malloc(codes + scales);
    from_device(got, on_gpu->codes, codes);
    from_device(got + codes, on_gpu->scales, scales);
    fp4_order(got, codes, 1);
    int same = memcmp(got, want->codes, codes) == 0;
    same &= memcmp(got + codes, want->scales, scales) == 0;
    free(got);
    return same;
}

static void fp4_free(sala_quant *q) {
    free(q->codes), free(q->scales);
}

static sala_quant fp4_quantized(const sala_act *x, int rows, int k) {
    sala_quantize_args a = {rows, k, x, fp4_space(rows, k, 0.003f)};
    sala__op_quantize(&gemm_cpu, &a);
    return a.quant;
}

// A matrix of random codes, with all scales but NaN.
static sala_weight fp4_weight(int n, int k) {
    size_t groups = (size_t)n * (size_t)k / 16;
    uint8_t *codes = (uint8_t *)malloc(groups * 8), *scales = (uint8_t *)malloc(groups);
    float *alpha = (float *)malloc((size_t)n * 4);
    for (size_t i = 0; i < groups * 8; i++) codes[i] = (uint8_t)check_random();
    for (size_t i = 0; i < groups; i++) scales[i] = (uint8_t)(check_random() % 127);
    for (int i = 0; i < n; i++) alpha[i] = check_uniform() * 0.001f;
    sala_weight w = {codes, SALA_NVFP4, n, k, scales, NULL, alpha, 0.003f, 16};
    return w;
}

// The same in blocks of sala_packed4, with `up` as a pair. Padding is of codes that would be seen.
static sala_weight fp4_pack(const sala_weight *w, const sala_weight *up) {
    int rows = up ? 2 * w->n : w->n, padded = (rows + 63) & ~63;
    size_t bytes = (size_t)padded * (size_t)w->k / 64 * SALA_BLOCK4 / 64;
    uint8_t *packed = (uint8_t *)gemm_space(bytes);
    float *alpha = (float *)gemm_space((size_t)padded * 4);
    for (int which = 0; which < (up ? 2 : 1); which++)
        for (int n = 0; n < w->n; n++) {
            int row = up ? sala_packed_pair(n, which) : n;
            alpha[row] = (which ? up : w)->alpha[n];
            for (int k = 0; k < w->k; k += 8)
                gemm_pack_word(which ? up : w, n, k, row, rows, packed);
        }
    sala_weight on_gpu = *w;
    on_gpu.data = on_device(packed, bytes);
    on_gpu.alpha = (const float *)on_device(alpha, (size_t)padded * 4);
    free(packed), free(alpha);
    return on_gpu;
}

// ---- the twin itself: the definition, written down once more ----

static double fp4_number(const uint8_t *codes, int k, uint8_t scale) {
    return (double)sala_e2m1_f32(codes[k / 2] >> k % 2 * 4 & 15) * (double)sala_e4m3_f32(scale);
}

static void fp4_twin(void) {
    enum { ROWS = 7, N = 35, K = 1552 };
    static const sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err = {0, ""};
    check_seed = 5;
    if (sala__cpu_open(&env, 2, sala__gemm_scratch(), &gemm_cpu, &err) < 0) exit(2);
    sala_act *x = fp4_rows(ROWS, K), y[2][ROWS * N];
    sala_quant q = fp4_quantized(x, ROWS, K);
    sala_weight w[2] = {fp4_weight(N, K), fp4_weight(N - 3, K)};
    sala_gemm_args a = {ROWS, 2, x, {w[0], w[1]}, {y[0], y[1]}, NULL, q, NULL, 0, 0, {0}};
    sala__op_gemm(&gemm_cpu, &a);
    int wrong = 0;
    for (int i = 0; i < ROWS * N * 2; i++) {
        const sala_weight *v = &w[i % 2];
        int r = i / 2 / N, n = i / 2 % N;
        if (n >= v->n) continue;
        float sum = 0;
        for (int g = 0; g < K / 16; g++) {
            double p = 0;
            for (int k = g * 16; k < g * 16 + 16; k++)
                p += fp4_number(q.codes + r * K / 2, k, q.scales[sala_quant_place(&q, r, k)]) *
                     fp4_number((const uint8_t *)v->data + n * K / 2, k,
                                ((const uint8_t *)v->scale)[n * (K / 16) + g]);
            CHECK((double)(float)p == p, "a group's sum is not exact: %g", p);
            sum += (float)p;
        }
        wrong += y[i % 2][r * v->n + n] != sala_store(sum * (v->alpha[n] * q.scale));
    }
    CHECK(wrong == 0, "%d of the results", wrong);
    gemm_free_weight(&w[0]), gemm_free_weight(&w[1]), fp4_free(&q), free(x);
    sala__cpu_close(&gemm_cpu);
}

// The golden block of nvfp4.md 1.3 (amax 0.125, S 448), and what has no scale.
static void fp4_quantize_twin(void) {
    static const float block[16] = {.013f,   -.020f, .0071f,  0,       -.0334f, .0405f,
                                    -.0009f, .025f,  .0302f,  -.0118f, .0164f,  -.0267f,
                                    .0058f,  .0389f, -.0012f, .0087f};
    static const uint8_t golden[8] = {0xd4, 0x02, 0x7e, 0x68, 0xc6, 0xe4, 0x72, 0x38};
    sala_act x[5][16];
    uint8_t codes[5 * 8], scales[8 * 4];
    for (int i = 0; i < 16; i++) {
        x[0][i] = sala_store(block[i]);
        x[1][i] = sala_store(i % 2 ? -0.0f : 0);        // zeros
        x[2][i] = sala_store(i == 3 ? -1e30f : 1e-10f); // saturates
        x[3][i] = sala_store(i == 15 ? (float)-INFINITY : 1);
        x[4][i] = sala_store(i == 0 ? (float)NAN : 0);
    }
    sala_quantize_args a = {5, 16, x[0], {codes, scales, 0.125f / 2688, 8}};
    for (int r = 0; r < 5; r++) sala__quantize_row(&a, r, 0);
    CHECK(scales[0] == 0x71 && memcmp(codes, golden, 8) == 0, "scale %02x", scales[0]);
    for (int i = 0; i < 8; i++) CHECK(codes[8 + i] == 0, "zeros: %02x", codes[8 + i]);
    CHECK(scales[4] == 0 && scales[8] == 0x7E && codes[17] == 0xF0, "%02x %02x, %02x", scales[4],
          scales[8], codes[17]);
    CHECK(scales[12] == 0x7F && scales[16] == 0x7F, "%02x %02x", scales[12], scales[16]);
}

// ---- kernels ----

static void fp4_quantize_case(int rows, int k) {
    sala_act *x = fp4_rows(rows, k);
    if (rows > 2) x[k * 2 + 5] = 0x7FC0, x[k + k / 2] = 0xFF80;
    sala_quant want = fp4_quantized(x, rows, k);
    sala_quantize_args a = {rows, k, (const sala_act *)on_device(x, (size_t)rows * (size_t)k * 2),
                            fp4_device(NULL, rows, k)};
    sala__launch_quantize(gpu, &a);
    device_sync();
    CHECK(fp4_equal(&want, &a.quant, rows, k), "%d rows of %d", rows, k);
    fp4_free(&want), free(x);
}

static void fp4_plain_case(int rows, int k, int count, const int *n) {
    sala_gemm_args cpu, a;
    sala_act *x = fp4_rows(rows, k);
    memset(&cpu, 0, sizeof cpu);
    cpu.rows = rows, cpu.count = count;
    cpu.qx = fp4_quantized(x, rows, k);
    a = cpu;
    a.qx = fp4_device(&cpu.qx, rows, k);
    for (int i = 0; i < count; i++) {
        cpu.w[i] = fp4_weight(n[i], k);
        a.w[i] = fp4_pack(&cpu.w[i], NULL);
        cpu.y[i] = (sala_act *)gemm_space((size_t)rows * (size_t)n[i] * 2);
        a.y[i] = (sala_act *)on_device(NULL, (size_t)rows * (size_t)n[i] * 2);
    }
    sala__launch_gemm(gpu, &a);
    sala__op_gemm(&gemm_cpu, &cpu);
    device_sync();
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)rows * (size_t)n[i] * 2;
        sala_act *got = (sala_act *)malloc(bytes);
        int wrong = 0;
        from_device(got, a.y[i], bytes);
        for (int j = 0; j < rows * n[i]; j++) wrong += got[j] != cpu.y[i][j];
        CHECK(wrong == 0, "mode %d, shape %d, %d rows, k %d, weight %d of %d rows: %d values",
              fp4_on, gpu->shape, rows, k, i, n[i], wrong);
        gemm_free_weight(&cpu.w[i]), free(cpu.y[i]), free(got);
    }
    fp4_free(&cpu.qx), free(x);
}

// y as the twin's but for the sigmoid; the quantised result is that of this y.
static void fp4_swiglu_case(int rows, int k, int n) {
    size_t bytes = (size_t)rows * (size_t)n * 2;
    sala_act *x = fp4_rows(rows, k), *got = (sala_act *)malloc(bytes);
    sala_gemm_swiglu_args cpu, a;
    memset(&cpu, 0, sizeof cpu);
    cpu.rows = rows, cpu.gate = fp4_weight(n, k), cpu.up = fp4_weight(n, k);
    cpu.qx = fp4_quantized(x, rows, k);
    cpu.y = (sala_act *)gemm_space(bytes), cpu.scratch = (sala_act *)gemm_space(bytes);
    a = cpu;
    a.qx = fp4_device(&cpu.qx, rows, k);
    a.gate = fp4_pack(&cpu.gate, &cpu.up);
    a.y = (sala_act *)on_device(NULL, bytes);
    sala__launch_gemm_swiglu(gpu, &a);
    device_sync();
    from_device(got, a.y, bytes);
    a.quant = fp4_device(NULL, rows, n);
    sala__launch_gemm_swiglu(gpu, &a);
    device_sync();
    sala__op_gemm_swiglu(&gemm_cpu, &cpu);
    int wrong = 0;
    for (int i = 0; i < rows * n; i++) {
        float want = sala_act_f32(cpu.y[i]), is = sala_act_f32(got[i]);
        wrong += !(fabsf(is - want) <= 4 * gemm_ulp(want) + 0x1p-30f);
    }
    sala_quant want = fp4_quantized(got, rows, n);
    CHECK(wrong == 0, "mode %d, shape %d, %d rows, k %d, %d columns: %d values", fp4_on, gpu->shape,
          rows, k, n, wrong);
    CHECK(fp4_equal(&want, &a.quant, rows, n), "mode %d, shape %d, %d rows, k %d, %d columns",
          fp4_on, gpu->shape, rows, k, n);
    gemm_free_weight(&cpu.gate), gemm_free_weight(&cpu.up), fp4_free(&cpu.qx), fp4_free(&want);
    free(x), free(got), free(cpu.y), free(cpu.scratch);
}

// The residual stream bit for bit; its norm, quantised.
static void fp4_norm_case(int rows, int k, int width) {
    size_t bytes = (size_t)rows * (size_t)width * 2;
    sala_act *x = fp4_rows(rows, k), *got = (sala_act *)malloc(bytes);
    sala_act *y = (sala_act *)malloc(bytes);
    sala_gemm_norm_args cpu, a;
    memset(&cpu, 0, sizeof cpu);
    cpu.w = fp4_weight(width, k), cpu.qx = fp4_quantized(x, rows, k);
    cpu.norm.rows = rows, cpu.norm.width = width, cpu.norm.eps = 1e-6f, cpu.norm.scale = 0.2475f;
    cpu.norm.divisor = width == 192 ? 3 : 1;
    cpu.norm.branch = (sala_act *)gemm_space(bytes), cpu.norm.y = (sala_act *)gemm_space(bytes);
    cpu.norm.weight = gemm_weight(width, 1, 1.5f);
    cpu.norm.x = gemm_random((size_t)rows * (size_t)width, 3);
    a = cpu;
    a.w = fp4_pack(&cpu.w, NULL), a.qx = fp4_device(&cpu.qx, rows, k);
    a.norm.weight.data = on_device(cpu.norm.weight.data, (size_t)width * 2);
    a.norm.x = (sala_act *)on_device(cpu.norm.x, bytes);
    a.norm.y = (sala_act *)on_device(NULL, bytes);
    a.norm.quant = fp4_device(NULL, rows, width);
    sala__launch_gemm_norm(gpu, &a);
    sala__op_gemm_norm(&gemm_cpu, &cpu);
    device_sync();
    from_device(got, a.norm.x, bytes);
    from_device(y, a.norm.y, bytes);
    CHECK(memcmp(got, cpu.norm.x, bytes) == 0, "mode %d, shape %d, %d rows, k %d: x", fp4_on,
          gpu->shape, rows, k);
    gemm_check_norm(&cpu.norm, got, y, cpu.norm.x, "norm_quant");
    sala_quant want = fp4_quantized(y, rows, width);
    CHECK(fp4_equal(&want, &a.norm.quant, rows, width), "%d rows of %d", rows, width);
    gemm_free_weight(&cpu.w), fp4_free(&cpu.qx), fp4_free(&want), gemm_free(cpu.norm.branch);
    gemm_free(cpu.norm.weight.data), free(cpu.norm.x), free(cpu.norm.y);
    free(x), free(got), free(y);
}

static void fp4_all(int mode) {
    static const int several[] = {64, 128, 40, 8}, wide[] = {320}, last[] = {8, 256}, deep[] = {72};
    fp4_begin(mode, 1u << 6);
    for (int shape = 0; shape <= SALA__PREFILL_SHAPE_COUNT; shape++) {
        gpu->shape = shape;
        fp4_plain_case(1, 64, 4, several);
        fp4_plain_case(63, 192, 1, wide);
        fp4_plain_case(130, 448, 2, last);
        fp4_swiglu_case(67, 192, 192);
        fp4_norm_case(70, 64, 320);
    }
    gpu->shape = 4;
    fp4_plain_case(3, 16384, 1, deep);
    fp4_norm_case(5, 128, 192);
    gpu->shape = 0;
    gemm_end();
}

static void prefill_fp4_emulated(void) {
    fp4_all(2);
}

// FP4 tensor cores: what the source asks of them, in the simulator, and what they give, on sm_120a.
static void prefill_fp4_native(void) {
    if (getenv("SALA_TEST_GPU")) {
        fp4_begin(0, 1u << 3);
        int there = gpu->cuda.major == 12;
        gemm_end();
        if (!there) printf("       no FP4 tensor cores on this device: not run\n");
        if (!there) return;
    }
    fp4_all(1);
}

static void prefill_fp4_quantize(void) {
    fp4_begin(0, 1u << 3);
    fp4_quantize_case(1, 64);
    fp4_quantize_case(5, 192);
    fp4_quantize_case(3, 2112);
    gemm_end();
}

// The norm with its result quantised has the same bits as the norm.
static void prefill_fp4_norm(void) {
    enum { ROWS = 3, WIDTH = 1088 };
    sala_act plain[ROWS * WIDTH], y[ROWS * WIDTH];
    fp4_begin(2, 1u | 1u << 6);
    sala_norm_args a;
    memset(&a, 0, sizeof a);
    sala_act *x = gemm_random(ROWS * WIDTH, 3), *weight = gemm_random(WIDTH, 1.5f);
    a.rows = ROWS, a.width = WIDTH, a.eps = 1e-6f, a.divisor = 1;
    a.weight.data = on_device(weight, WIDTH * 2);
    a.x = (sala_act *)on_device(x, sizeof plain), a.y = (sala_act *)on_device(NULL, sizeof plain);
    sala__launch_norm(gpu, &a);
    device_sync();
    from_device(plain, a.y, sizeof plain);
    a.y = (sala_act *)on_device(NULL, sizeof plain), a.quant = fp4_device(NULL, ROWS, WIDTH);
    sala__launch_norm(gpu, &a);
    device_sync();
    from_device(y, a.y, sizeof y);
    CHECK(memcmp(y, plain, sizeof y) == 0, "y");
    sala_quant want = fp4_quantized(plain, ROWS, WIDTH);
    CHECK(fp4_equal(&want, &a.quant, ROWS, WIDTH), "quantised");
    a.y = NULL, a.quant = fp4_device(NULL, ROWS, WIDTH);
    sala__launch_norm(gpu, &a);
    device_sync();
    CHECK(fp4_equal(&want, &a.quant, ROWS, WIDTH), "quantised alone");
    fp4_free(&want), free(x), free(weight);
    gemm_end();
}

// A row of x that is not finite gives NaN, and spoils no other.
static void fp4_nan_case(int mode) {
    enum { ROWS = 20, K = 128, N = 64, SPOILT = 9 };
    sala_act got[ROWS * N];
    fp4_begin(mode, 1u << 6);
    sala_act *x = fp4_rows(ROWS, K);
    x[SPOILT * K + 77] = 0xFF80;
    sala_quant q = fp4_quantized(x, ROWS, K);
    sala_weight w = fp4_weight(N, K), packed = fp4_pack(&w, NULL);
    sala_gemm_args a = {ROWS, 1, NULL, {packed}, {NULL}, NULL, fp4_device(&q, ROWS, K),
                        NULL, 0, 0,    {0}};
    a.y[0] = (sala_act *)on_device(NULL, sizeof got);
    sala__launch_gemm(gpu, &a);
    device_sync();
    from_device(got, a.y[0], sizeof got);
    for (int i = 0; i < ROWS * N; i++)
        CHECK((sala_act_f32(got[i]) != sala_act_f32(got[i])) == (i / N == SPOILT),
              "mode %d, row %d", mode, i / N);
    gemm_free_weight(&w), fp4_free(&q), free(x);
    gemm_end();
}

static void prefill_fp4_nan(void) {
    fp4_nan_case(2);
    if (!getenv("SALA_TEST_GPU")) fp4_nan_case(1);
}

#define PREFILL_FP4_TESTS                                                                          \
    TEST(fp4_twin), TEST(fp4_quantize_twin), TEST(prefill_fp4_quantize),                           \
        TEST(prefill_fp4_emulated), TEST(prefill_fp4_native), TEST(prefill_fp4_norm),              \
        TEST(prefill_fp4_nan)
