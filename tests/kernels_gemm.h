// The kernels norm, gemm, gemm_swiglu and gemm_norm against their C twins. For test_kernels.c; the
// cases serve the products of prefill too (prefill_gemm.h).
//
// Tolerances: a sum of products may be off by 2^-17 of the sum of their magnitudes (tensor cores
// drop what lies below their accumulators); BF16 results then by one rounding.

static const sala_dims gemm_dims = {.vocab = 256,
                                    .hidden = 1088,
                                    .ffn = 256,
                                    .layers = 1,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = 128,
                                    .block = 64,
                                    .kernel = 32,
                                    .stride = 16,
                                    .init_blocks = 1,
                                    .local_blocks = 4,
                                    .top_k = 8,
                                    .dense_len = 512,
                                    .lin_heads = 2,
                                    .lin_kv_heads = 2,
                                    .lin_dim = 128,
                                    .eps = 1e-6f,
                                    .rope_theta = 10000,
                                    .embed_scale = 1,
                                    .residual_scale = 0.2475f,
                                    .logit_divisor = 1,
                                    .attn_scale = 1,
                                    .lin_scale = 1};

static sala__cpu gemm_cpu;
static int gemm_prefill; // the form that the products take

// The weights of the tests: BF16, or 4 bits: NVFP4, INT4 with groups of 32, of 128, of 32 with zeros.
enum { GEMM_BF16 = -1, GEMM_NVFP4, GEMM_INT4, GEMM_INT4_128, GEMM_INT4_ZERO, GEMM_LAYOUTS };
static int gemm_layout = GEMM_BF16;

static void gemm_begin(void) {
    const unsigned units = device_units;
    static const sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err = {0, ""};
    check_seed = 7;
    if (gemm_layout >= 0) device_units = gemm_layout == GEMM_NVFP4 ? 16 : 32;
    device_open(&gemm_dims);
    device_units = units;
    gpu->prefill = gemm_prefill;
    if (sala__cpu_open(&env, 1, sala__gemm_scratch(), &gemm_cpu, &err) < 0) exit(2);
}

static void gemm_end(void) {
    device_close();
    sala__cpu_close(&gemm_cpu);
}

static sala_act *gemm_random(size_t count, float scale) {
    sala_act *x = (sala_act *)malloc(count * sizeof *x + 1);
    for (size_t i = 0; i < count; i++) x[i] = sala_store(check_uniform() * scale);
    return x;
}

static void *gemm_space(size_t bytes) { // host memory that is poisoned like the device's
    void *p = malloc(bytes + 1);
    memset(p, 0xFF, bytes);
    return p;
}

// A random 4-bit weight in the host's form. Codes and scales of all values, also E4M3's subnormals and 0 (large scales are rare, so
// that sums have small terms too).
static sala_weight gemm_weight4(int layout, int n, int k, float scale) {
    int group = layout == GEMM_NVFP4 ? 16 : layout != GEMM_INT4_128 ? 32 : k % 128 ? 64 : 128;
    size_t groups = (size_t)n * (size_t)(k / group), codes = (size_t)n * (size_t)k / 2;
    uint8_t *data = (uint8_t *)malloc(codes + 1), *zero = (uint8_t *)malloc(groups + 1);
    uint8_t *scales = (uint8_t *)malloc(2 * groups + 1);
    float *alpha = (float *)malloc((size_t)n * sizeof *alpha);
    sala_weight w = {data, SALA_NVFP4, n, k, scales, NULL, alpha, 0, group};
    for (size_t i = 0; i < codes; i++) data[i] = (uint8_t)check_random();
    for (size_t i = 0; i < groups; i++) {
        uint16_t wide = sala_f32_bf16(check_uniform() * 0.3f);
        if (layout != GEMM_NVFP4)
            memcpy(scales + 2 * i, &wide, 2);
        else
            scales[i] = (uint8_t)(check_random() % 7 ? check_random() % 64 : check_random() % 127);
        zero[i] = (uint8_t)(check_random() % 17);
    }
    for (int i = 0; i < n; i++)
        alpha[i] = scale * (layout ? 0.5f : 0.005f) * (1 + 0.5f * check_uniform());
    if (layout != GEMM_NVFP4) w.format = SALA_INT4;
    if (layout == GEMM_INT4_ZERO || layout == GEMM_INT4_128) w.zero = zero;
    if (!w.zero) free(zero);
    return w;
}

static void gemm_free_weight(const sala_weight *w) {
    free((void *)(uintptr_t)w->data), free((void *)(uintptr_t)w->scale);
    free((void *)(uintptr_t)w->zero), free((void *)(uintptr_t)w->alpha);
}

static sala_weight gemm_weight(int n, int k, float scale) {
    if (gemm_layout >= 0 && k > 1) return gemm_weight4(gemm_layout, n, k, scale);
    sala_weight w = sala_plain_weight(gemm_random((size_t)n * (size_t)k, scale), SALA_BF16, n, k);
    return w;
}

// One word of eight codes from column k, and its scales, into the blocks of a matrix.
static void gemm_pack_word(const sala_weight *w, int n, int k, int row, int rows, uint8_t *to) {
    int order = sala_code_order(w->format, gpu->cuda.major),
        block = sala_block4(w->format, w->group, w->zero != NULL);
    size_t groups = (size_t)(w->k / w->group), group = (size_t)n * groups + (size_t)(k / w->group);
    uint32_t word;
    memcpy(&word, (const char *)w->data + ((size_t)n * (size_t)w->k + (size_t)k) / 2, 4);
    word = sala_nibbles_in(order, word);
    memcpy(to + sala_packed4(row, k, rows, block), &word, 4);
    uint8_t *scales = to + sala_packed4(row, k, rows, block) / block * block + sala_scale_word(row);
    if (w->format == SALA_NVFP4) {
        scales[k >> 4 & 3] = ((const uint8_t *)w->scale)[group];
        return;
    }
    uint16_t bias = sala_f32_bf16(-128.0f - (w->zero ? w->zero[group] : 8));
    int place = w->group == 32 ? k >> 5 & 1 : 0;
    memcpy(scales + 2 * place, (const uint16_t *)w->scale + group, 2);
    if (w->group > 32) memcpy(scales + 2, &bias, 2);
    if (block == SALA_BLOCK4_BIAS) memcpy(scales + 256 + 2 * place, &bias, 2);
}

// As gemm_pack, of 4-bit weights.
static sala_weight gemm_pack4(const sala_weight *w, const sala_weight *up) {
    int rows = up ? 2 * w->n : w->n, tiles = (rows + 63) / 64;
    size_t bytes = (size_t)tiles * (size_t)(w->k / 64) *
                   (size_t)sala_block4(w->format, w->group, w->zero != NULL);
    uint8_t *packed = (uint8_t *)calloc(1, bytes);
    float *alpha = (float *)calloc((size_t)tiles * 64, sizeof *alpha);
    sala_weight on_gpu = *w;
    for (int which = 0; which < (up ? 2 : 1); which++)
        for (int n = 0; n < w->n; n++) {
            int row = up ? sala_packed_pair(n, which) : n;
            alpha[row] = (which ? up : w)->alpha[n];
            for (int k = 0; k < w->k; k += 8)
                gemm_pack_word(which ? up : w, n, k, row, rows, packed);
        }
    on_gpu.data = on_device(packed, bytes);
    on_gpu.alpha = (const float *)on_device(alpha, (size_t)tiles * 64 * sizeof *alpha);
    on_gpu.scale = NULL;
    free(packed), free(alpha);
    return on_gpu;
}

static float gemm_element(const sala_weight *w, int n, int k) { // without alpha
    float out[16];
    if (!sala__is_4bit(w->format))
        return sala_bf16_f32(((const uint16_t *)w->data)[(size_t)n * (size_t)w->k + (size_t)k]);
    sala__load_weight4(w, n, k & ~15, out);
    return out[k & 15];
}

// The same matrix as a GPU has it; with `up` the two as one packed pair.
static sala_weight gemm_pack(const sala_weight *w, const sala_weight *up) {
    if (sala__is_4bit(w->format)) return gemm_pack4(w, up);
    int rows = up ? 2 * w->n : w->n, padded = (rows + SALA_GEMM_ROWS - 1) / SALA_GEMM_ROWS;
    size_t bytes = (size_t)padded * SALA_GEMM_ROWS * (size_t)w->k * 2;
    uint16_t *packed = (uint16_t *)calloc(1, bytes);
    sala_weight on_gpu = *w;
    for (int which = 0; which < (up ? 2 : 1); which++)
        for (int n = 0; n < w->n; n++)
            for (int k = 0; k < w->k; k++) {
                int row = up ? sala_packed_pair(n, which) : n;
                const uint16_t *from = (const uint16_t *)(which ? up : w)->data;
                packed[sala_packed(row, k, rows)] = from[(size_t)n * (size_t)w->k + (size_t)k];
            }
    on_gpu.data = on_device(packed, bytes);
    free(packed);
    return on_gpu;
}

static void gemm_free(const void *p) {
    free((void *)(uintptr_t)p);
}

// What a product may be off by: 2^-17 of the sum of the magnitudes.
static float gemm_slack(const sala_act *x, const sala_weight *w, int n) {
    float sum = 0;
    for (int i = 0; i < w->k; i++) sum += fabsf(sala_act_f32(x[i]) * gemm_element(w, n, i));
    return sum * (w->alpha ? w->alpha[n] : 1) * 0x1p-17f;
}

static float gemm_ulp(float x) { // of BF16
    return sala_bits_f32(sala_f32_bits(fabsf(x)) & 0x7F800000u) * 0x1p-7f;
}

// ---- norm ----

// y must be the norm of the x that the kernel wrote, x within `slack` and a rounding of the twin's.
static void gemm_check_norm(const sala_norm_args *a, const sala_act *x, const sala_act *y,
                            const sala_act *want_x, const char *what) {
    int bad_x = 0, bad_y = 0;
    const sala_act *weight = (const sala_act *)a->weight.data;
    for (int r = 0; r < a->rows; r++) {
        double square = 0;
        for (int i = 0; i < a->width; i++) {
            float got = sala_act_f32(x[r * a->width + i]),
                  want = sala_act_f32(want_x[r * a->width + i]);
            bad_x += !(fabsf(got - want) <= 2 * gemm_ulp(want) + 0.01f);
            square += (double)got * (double)got;
        }
        double inverse = 1 / sqrt(square / a->width + (double)a->eps);
        for (int i = 0; i < a->width; i++) {
            double want =
                sala_act_f32(x[r * a->width + i]) * inverse * (double)sala_act_f32(weight[i]);
            want /= (double)a->divisor;
            double got = (double)sala_act_f32(y[r * a->width + i]);
            bad_y += !(fabs(got - want) <= fabs(want) * 0x1p-6 + 1e-30);
        }
    }
    CHECK(bad_x == 0 && bad_y == 0, "%s, %d rows of %d: %d of x, %d of y are wrong", what, a->rows,
          a->width, bad_x, bad_y);
}

static inline void test_norm_case(int rows, int width, int branch, float divisor) {
    size_t count = (size_t)rows * (size_t)width, bytes = count * sizeof(sala_act);
    sala_norm_args cpu = {rows,
                          width,
                          1e-6f,
                          0.2475f,
                          branch ? gemm_random(count, 2) : NULL,
                          gemm_weight(width, 1, 1.5f),
                          gemm_random(count, 3),
                          (sala_act *)gemm_space(bytes),
                          divisor,
                          {NULL, NULL, 0, 0}};
    sala_norm_args a = cpu;
    sala_act *x = (sala_act *)malloc(bytes), *y = (sala_act *)malloc(bytes);
    if (branch) a.branch = (const sala_act *)on_device(cpu.branch, bytes);
    a.weight.data = on_device(cpu.weight.data, (size_t)width * 2);
    a.x = (sala_act *)on_device(cpu.x, bytes);
    a.y = (sala_act *)on_device(NULL, bytes);
    sala__launch_norm(gpu, &a);
    device_sync();
    from_device(x, a.x, bytes);
    from_device(y, a.y, bytes);
    sala__op_norm(&gemm_cpu, &cpu);
    CHECK(memcmp(x, cpu.x, bytes) == 0, "x of %d rows of %d", rows, width);
    gemm_check_norm(&cpu, x, y, cpu.x, "norm");
    gemm_free(cpu.branch), gemm_free(cpu.weight.data), free(cpu.x), free(cpu.y), free(x), free(y);
}

static inline void test_norm(void) {
    gemm_begin();
    test_norm_case(1, 1088, 1, 1);
    test_norm_case(3, 1088, 0, 1);
    test_norm_case(5, 64, 1, 16);
    test_norm_case(17, 192, 0, 3);
    gemm_end();
}

// ---- gemm ----

static void test_gemm_case(int rows, int k, int count, const int *n, int f32) {
    sala_gemm_args cpu, a;
    memset(&cpu, 0, sizeof cpu);
    cpu.rows = rows, cpu.count = count;
    sala_act *x = gemm_random((size_t)rows * (size_t)k, 1);
    cpu.x = x;
    a = cpu;
    a.x = (const sala_act *)on_device(x, (size_t)rows * (size_t)k * 2);
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)rows * (size_t)n[i] * (f32 ? 4 : 2);
        cpu.w[i] = gemm_weight(n[i], k, 1);
        a.w[i] = gemm_pack(&cpu.w[i], NULL);
        if (f32) cpu.y_f32 = (float *)gemm_space(bytes), a.y_f32 = (float *)on_device(NULL, bytes);
        if (!f32) cpu.y[i] = (sala_act *)gemm_space(bytes);
        if (!f32) a.y[i] = (sala_act *)on_device(NULL, bytes);
    }
    sala__launch_gemm(gpu, &a);
    sala__op_gemm(&gemm_cpu, &cpu);
    device_sync();
    for (int i = 0; i < count; i++) {
        size_t bytes = (size_t)rows * (size_t)n[i] * (f32 ? 4 : 2);
        void *got = malloc(bytes);
        int wrong = 0;
        from_device(got, f32 ? (void *)a.y_f32 : (void *)a.y[i], bytes);
        for (int j = 0; j < rows * n[i]; j++) {
            float is = f32 ? ((float *)got)[j] : sala_act_f32(((sala_act *)got)[j]);
            float want = f32 ? cpu.y_f32[j] : sala_act_f32(cpu.y[i][j]);
            float slack = gemm_slack(x + j / n[i] * k, &cpu.w[i], j % n[i]);
            wrong += !(fabsf(is - want) <= slack + (f32 ? 0 : gemm_ulp(want)));
        }
        CHECK(wrong == 0, "%d rows, k %d, weight %d of %d rows: %d values", rows, k, i, n[i],
              wrong);
        gemm_free_weight(&cpu.w[i]), free(cpu.y[i]), free(got);
    }
    free(x), free(cpu.y_f32);
}

static inline void test_gemm(void) {
    static const int one[] = {64}, several[] = {64, 128, 40, 8}, logits[] = {77}, wide[] = {300};
    gemm_begin();
    for (int rows = 1; rows <= 17; rows++) test_gemm_case(rows, 64, 1, one, 0);
    test_gemm_case(1, 512, 4, several, 0);
    test_gemm_case(9, 128, 4, several, 0);
    test_gemm_case(48, 192, 2, several, 0);
    test_gemm_case(49, 64, 1, logits, 1);
    test_gemm_case(64, 64, 3, several, 0);
    test_gemm_case(65, 128, 1, one, 0);
    test_gemm_case(130, 64, 2, several, 0);
    test_gemm_case(3, 576, 1, logits, 1);
    test_gemm_case(2, 1024, 1, wide, 1);
    test_gemm_case(1, 1600, 1, one, 1);
    gemm_end();
}

// ---- gate and up ----

static void test_gemm_swiglu_case(int rows, int k, int n) {
    size_t bytes = (size_t)rows * (size_t)n * 2;
    sala_act *x = gemm_random((size_t)rows * (size_t)k, 1), *got = (sala_act *)malloc(bytes);
    float scale = 2 / sqrtf((float)k);
    sala_gemm_swiglu_args cpu = {rows,
                                 x,
                                 gemm_weight(n, k, scale),
                                 gemm_weight(n, k, scale),
                                 (sala_act *)gemm_space(bytes),
                                 (sala_act *)gemm_space(bytes),
                                 {NULL, NULL, 0, 0},
                                 {NULL, NULL, 0, 0}};
    sala_gemm_swiglu_args a = cpu;
    a.x = (const sala_act *)on_device(x, (size_t)rows * (size_t)k * 2);
    a.gate = gemm_pack(&cpu.gate, &cpu.up);
    a.y = (sala_act *)on_device(NULL, bytes);
    sala__launch_gemm_swiglu(gpu, &a);
    sala__op_gemm_swiglu(&gemm_cpu, &cpu);
    device_sync();
    from_device(got, a.y, bytes);
    int wrong = 0;
    for (int i = 0; i < rows * n; i++) { // gate and up are rounded, and the products of them
        float want = sala_act_f32(cpu.y[i]), is = sala_act_f32(got[i]);
        wrong += !(fabsf(is - want) <= 4 * gemm_ulp(want) + 0x1p-12f);
    }
    CHECK(wrong == 0, "%d rows, k %d, %d columns: %d values", rows, k, n, wrong);
    gemm_free_weight(&cpu.gate), gemm_free_weight(&cpu.up);
    free(x), free(got), free(cpu.y), free(cpu.scratch);
}

static inline void test_gemm_swiglu(void) {
    gemm_begin();
    test_gemm_swiglu_case(1, 128, 64);
    test_gemm_swiglu_case(7, 64, 192);
    test_gemm_swiglu_case(33, 576, 64);
    test_gemm_swiglu_case(66, 64, 128);
    gemm_end();
}

// ---- a product and its norm ----

typedef struct gemm_norm_case {
    int rows, k, width;
    sala_gemm_norm_args cpu, a;
    sala_act *x, *y; // of the device
} gemm_norm_case;

static gemm_norm_case gemm_norm_open(int rows, int k, int width) {
    gemm_norm_case c = {rows, k, width, {0}, {0}, NULL, NULL};
    size_t count = (size_t)rows * (size_t)width, splits = (size_t)sala_gemm_splits(width, k);
    const int32_t zero[2] = {0, 0};
    c.cpu.input = gemm_random((size_t)rows * (size_t)k, 1);
    c.cpu.w = gemm_weight(width, k, 2 / sqrtf((float)k));
    sala_norm_args norm = {rows,
                           width,
                           1e-6f,
                           0.2475f,
                           (sala_act *)gemm_space(count * 2),
                           gemm_weight(width, 1, 1.5f),
                           gemm_random(count, 3),
                           (sala_act *)gemm_space(count * 2),
                           1,
                           {NULL, NULL, 0, 0}};
    c.cpu.norm = norm;
    c.a = c.cpu;
    c.a.input = (const sala_act *)on_device(c.cpu.input, (size_t)rows * (size_t)k * 2);
    c.a.w = gemm_pack(&c.cpu.w, NULL);
    c.a.norm.branch = NULL;
    c.a.norm.weight.data = on_device(norm.weight.data, (size_t)width * 2);
    c.a.norm.x = (sala_act *)on_device(norm.x, count * 2);
    c.a.norm.y = (sala_act *)on_device(NULL, count * 2);
    c.a.partial = (float *)on_device(NULL, splits * count * 4);
    c.a.arrivals = (int32_t *)on_device(zero, sizeof zero);
    c.x = (sala_act *)malloc(count * 2);
    c.y = (sala_act *)malloc(count * 2);
    return c;
}

static void gemm_norm_run(gemm_norm_case *c) {
    size_t bytes = (size_t)c->rows * (size_t)c->width * 2;
    int32_t arrivals[2];
    int before = gpu->launches;
    sala__launch_gemm_norm(gpu, &c->a);
    CHECK(gpu->launches == before + 1 + (gpu->prefill != 0), "%d launches",
          gpu->launches - before); // a prompt's norm is a kernel of its own
    sala__take_due(gpu, NULL, NULL, 0, NULL);
    device_sync();
    from_device(c->x, c->a.norm.x, bytes);
    from_device(c->y, c->a.norm.y, bytes);
    from_device(arrivals, c->a.arrivals, sizeof arrivals);
    CHECK(arrivals[0] == 0 && arrivals[1] == 0, "%d and %d arrivals are left", (int)arrivals[0],
          (int)arrivals[1]);
}

static void gemm_norm_close(gemm_norm_case *c) {
    gemm_free(c->cpu.input), gemm_free_weight(&c->cpu.w), gemm_free(c->cpu.norm.branch);
    gemm_free(c->cpu.norm.weight.data), free(c->cpu.norm.x), free(c->cpu.norm.y);
    free(c->x), free(c->y);
}

static void test_gemm_norm_case(int rows, int k, int width, int launches) {
    gemm_norm_case c = gemm_norm_open(rows, k, width);
    for (int i = 0; i < launches; i++) { // x goes on from what the launch before left
        gemm_norm_run(&c);
        sala__op_gemm_norm(&gemm_cpu, &c.cpu);
        gemm_check_norm(&c.cpu.norm, c.x, c.y, c.cpu.norm.x, "gemm_norm");
        memcpy(c.cpu.norm.x, c.x, (size_t)rows * (size_t)width * 2);
    }
    gemm_norm_close(&c);
}

static inline void test_gemm_norm(void) {
    gemm_begin();
    test_gemm_norm_case(1, 64, 64, 3);
    test_gemm_norm_case(1, 1024, 1088, 2);
    test_gemm_norm_case(5, 2048, 128, 3);
    test_gemm_norm_case(16, 128, 192, 2);
    test_gemm_norm_case(49, 1024, 64, 2);
    test_gemm_norm_case(66, 64, 320, 2);
    gemm_end();
}

// ---- promise 1: the same bits whatever runs beside a row ----

// Rows `from` .. of a product among `rows` rows against the same rows alone; all three kernels.
static inline void test_gemm_alone_case(int rows, int from, int count, int k, int n) {
    size_t in = (size_t)k * 2, out = (size_t)n * 2, f32 = (size_t)n * 4;
    sala_act *x = gemm_random((size_t)rows * (size_t)k, 1);
    sala_weight w = gemm_weight(n, k, 1), up = gemm_weight(n, k, 1);
    sala_weight packed = gemm_pack(&w, NULL), pair = gemm_pack(&w, &up);
    char *all = (char *)malloc((size_t)rows * f32), *alone = (char *)malloc((size_t)count * f32);
    for (int part = 0; part < 2; part++) { // logits, gate and up
        for (int few = 0; few < 2; few++) {
            int now = few ? count : rows;
            void *y = on_device(NULL, (size_t)now * f32);
            const sala_act *from_x = x + (few ? (size_t)from * (size_t)k : 0);
            const sala_act *on_gpu = (const sala_act *)on_device(from_x, (size_t)now * in);
            sala_gemm_args a = {now,  1, on_gpu, {packed}, {NULL}, (float *)y, {NULL, NULL, 0, 0},
                                NULL, 0, 0,      {0}};
            sala_gemm_swiglu_args g = {now,
                                       on_gpu,
                                       pair,
                                       pair,
                                       (sala_act *)y,
                                       NULL,
                                       {NULL, NULL, 0, 0},
                                       {NULL, NULL, 0, 0}};
            if (part == 0) sala__launch_gemm(gpu, &a);
            if (part == 1) sala__launch_gemm_swiglu(gpu, &g);
            device_sync();
            from_device(few ? alone : all, y, (size_t)now * (part ? out : f32));
        }
        size_t row = part ? out : f32;
        CHECK(memcmp(all + (size_t)from * row, alone, (size_t)count * row) == 0,
              "%s: %d rows from %d of %d", part ? "gate and up" : "gemm", count, from, rows);
    }
    gemm_free_weight(&w), gemm_free_weight(&up), free(x), free(all), free(alone);
}

static inline void test_gemm_norm_alone_case(int rows, int from, int k, int width) {
    gemm_norm_case c = gemm_norm_open(rows, k, width), one = c;
    size_t row = (size_t)width * 2;
    one.rows = one.a.norm.rows = 1;
    one.a.input = (const sala_act *)on_device(c.cpu.input + from * k, (size_t)k * 2);
    one.a.norm.x = (sala_act *)on_device(c.cpu.norm.x + from * width, row);
    one.x = (sala_act *)malloc(row), one.y = (sala_act *)malloc(row);
    gemm_norm_run(&c);
    gemm_norm_run(&one);
    CHECK(memcmp(c.x + from * width, one.x, row) == 0, "x, row %d of %d", from, rows);
    CHECK(memcmp(c.y + from * width, one.y, row) == 0, "y, row %d of %d", from, rows);
    free(one.x), free(one.y);
    gemm_norm_close(&c);
}

static inline void test_gemm_alone(void) {
    gemm_begin();
    test_gemm_alone_case(2, 1, 1, 576, 64);
    test_gemm_alone_case(17, 16, 1, 128, 64);
    test_gemm_alone_case(40, 3, 9, 192, 128);
    test_gemm_alone_case(70, 60, 10, 64, 64);
    test_gemm_norm_alone_case(5, 4, 2048, 64);
    test_gemm_norm_alone_case(67, 65, 64, 192);
    gemm_end();
}

// NaN, infinity and padding in one row stay there.
static inline void test_gemm_nan(void) {
    enum { ROWS = 12, K = 128, N = 64 };
    gemm_begin();
    sala_act *x = gemm_random(ROWS * K, 1);
    sala_weight w = gemm_weight(N, K, 1), packed = gemm_pack(&w, NULL);
    float clean[ROWS * N], got[ROWS * N];
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        if (spoilt) x[3 * K + 5] = 0x7FC0, memset(x + 9 * K, 0xFF, K * 2), x[10 * K] = 0x7F80;
        void *y = on_device(NULL, sizeof got);
        sala_gemm_args a = {ROWS,
                            1,
                            (const sala_act *)on_device(x, ROWS * K * 2),
                            {packed},
                            {NULL},
                            (float *)y,
                            {NULL, NULL, 0, 0},
                            NULL,
                            0,
                            0,
                            {0}};
        sala__launch_gemm(gpu, &a);
        device_sync();
        from_device(spoilt ? got : clean, y, sizeof got);
    }
    for (int r = 0; r < ROWS; r++) {
        int same = memcmp(got + r * N, clean + r * N, N * sizeof(float)) == 0;
        CHECK(same == (r != 3 && r != 9 && r != 10), "row %d", r);
    }
    gemm_free_weight(&w), free(x);
    gemm_end();
}

// ---- 4 bits ----

// One row of x for each of some columns, 1 there and 0 elsewhere: alpha times the weight, exactly.
static inline void test_gemm_exact_case(int k, int n) {
    int rows = 45;
    sala_act *x = (sala_act *)calloc((size_t)rows * (size_t)k, sizeof *x);
    float *got = (float *)malloc((size_t)rows * (size_t)n * sizeof *got);
    for (int r = 0; r < rows; r++) x[r * k + (r * 37 + 5) % k] = sala_store(1);
    sala_weight w = gemm_weight(n, k, 1), packed = gemm_pack(&w, NULL);
    sala_gemm_args a;
    memset(&a, 0, sizeof a);
    a.rows = rows, a.count = 1, a.w[0] = packed;
    a.x = (const sala_act *)on_device(x, (size_t)rows * (size_t)k * sizeof *x);
    a.y_f32 = (float *)on_device(NULL, (size_t)rows * (size_t)n * sizeof *got);
    sala__launch_gemm(gpu, &a);
    device_sync();
    from_device(got, a.y_f32, (size_t)rows * (size_t)n * sizeof *got);
    int wrong = 0;
    for (int i = 0; i < rows * n; i++)
        wrong += got[i] != gemm_element(&w, i % n, (i / n * 37 + 5) % k) * w.alpha[i % n];
    CHECK(wrong == 0, "layout %d, k %d, %d rows: %d of %d differ", gemm_layout, k, n, wrong,
          rows * n);
    gemm_free_weight(&w), free(x), free(got);
}

// A norm that its reader makes: the same bits as one that stands in memory, in all that read it.
static inline void test_gemm_due_case(int rows, int k, int width, int n) {
    gemm_norm_case c = gemm_norm_open(rows, k, width);
    sala_weight w = gemm_weight(n, width, 1), up = gemm_weight(n, width, 1);
    sala_weight packed = gemm_pack(&w, NULL), pair = gemm_pack(&w, &up);
    size_t bytes = (size_t)rows * (size_t)n * 2;
    char *got[4];
    int multiprocessors = gpu->multiprocessors;
    if (rows == 2) gpu->multiprocessors = 1; // a block has all items
    for (int i = 0; i < 4;
         i++) { // products, gate and up; the norm is made by its reader, or before
        sala_gemm_args a = {rows, 1, c.a.norm.y, {packed}, {NULL}, NULL, {NULL, NULL, 0, 0},
                            NULL, 0, 0,          {0}};
        sala_gemm_swiglu_args g;
        memset(&g, 0, sizeof g);
        g.rows = rows, g.x = a.x, g.gate = g.up = pair;
        g.y = a.y[0] = (sala_act *)on_device(NULL, bytes);
        c.a.norm.x = (sala_act *)on_device(c.cpu.norm.x, (size_t)rows * (size_t)width * 2);
        sala__launch_gemm_norm(gpu, &c.a);
        if (i & 1) sala__take_due(gpu, NULL, NULL, 0, NULL);
        int before = gpu->launches;
        if (i < 2) sala__launch_gemm(gpu, &a);
        if (i >= 2) sala__launch_gemm_swiglu(gpu, &g);
        CHECK(gpu->launches == before + 1 && gpu->due.norm.rows == 0, "%d launches",
              gpu->launches - before);
        device_sync();
        from_device(got[i] = (char *)malloc(bytes), g.y, bytes);
    }
    gpu->multiprocessors = multiprocessors;
    CHECK(memcmp(got[0], got[1], bytes) == 0, "%d rows", rows);
    CHECK(memcmp(got[2], got[3], bytes) == 0, "%d rows, gate and up", rows);
    for (int i = 0; i < 4; i++) free(got[i]);
    gemm_free_weight(&w), gemm_free_weight(&up);
    gemm_norm_close(&c);
}

// Every number of rows up to 50, then some: each row's bits are those that it has alone, whether a block
// has one item or all of them.
static inline void test_gemm_every_count(int most, int k, int n) {
    size_t in = (size_t)k * sizeof(sala_act), out = (size_t)n * sizeof(float);
    sala_act *x = gemm_random((size_t)most * (size_t)k, 1);
    sala_weight w = gemm_weight(n, k, 1), packed = gemm_pack(&w, NULL);
    char *alone = (char *)malloc((size_t)most * out), *got = (char *)malloc((size_t)most * out);
    int multiprocessors = gpu->multiprocessors;
    for (int pass = -most; pass <= most; pass += pass < 50 ? 1 : 11) { // first each row alone
        int rows = pass <= 0 ? 1 : pass, first = pass <= 0 ? -pass : 0;
        gpu->multiprocessors = pass % 3 ? multiprocessors : 1;
        sala_gemm_args a;
        if (first == most) continue;
        memset(&a, 0, sizeof a);
        a.rows = rows, a.count = 1, a.w[0] = packed;
        a.x = (const sala_act *)on_device(x + first * k, (size_t)rows * in);
        a.y_f32 = (float *)on_device(NULL, (size_t)rows * out);
        sala__launch_gemm(gpu, &a);
        device_sync();
        from_device(pass <= 0 ? alone + (size_t)first * out : got, a.y_f32, (size_t)rows * out);
        if (pass > 0) CHECK(memcmp(got, alone, (size_t)rows * out) == 0, "%d rows", rows);
    }
    gpu->multiprocessors = multiprocessors;
    gemm_free_weight(&w), free(x), free(alone), free(got);
}

static void test_gemm_4bit(int layout) {
    static const int several[] = {64, 128, 40, 8}, logits[] = {77}, wide[] = {300};
    gemm_layout = layout;
    gemm_begin();
    test_gemm_exact_case(64, 64);
    test_gemm_exact_case(320, 200);
    test_gemm_case(1, 64, 4, several, 0);
    test_gemm_case(9, 192, 4, several, 0);
    test_gemm_case(17, 64, 1, logits, 1);
    test_gemm_case(49, 128, 2, several, 0);
    test_gemm_case(70, 128, 2, several, 0); // items of 96 rows, whatever a block may have
    test_gemm_case(3, 1600, 1, wide, 1);
    test_gemm_case(12, 1600, 1, logits, 1);
    test_gemm_swiglu_case(7, 64, 192);
    test_gemm_swiglu_case(33, 576, 96);
    test_gemm_norm_case(1, 1024, 1088, 2);
    test_gemm_norm_case(5, 2048, 128, 2);
    test_gemm_norm_case(50, 64, 320, 2);
    test_gemm_norm_alone_case(5, 4, 2048, 64);
    test_gemm_norm_alone_case(51, 49, 128, 192); // one of the wide kernel, one of the narrow
    test_gemm_norm_alone_case(20, 17, 2048, 64);
    if (layout == GEMM_NVFP4) {
        test_gemm_norm_case(2, 2048, 192, 2);
        test_gemm_norm_alone_case(2, 1, 2048, 96);
        test_gemm_norm_alone_case(3, 2, 6144, 192);
        test_gemm_due_case(1, 2048, 256, 200);
        test_gemm_due_case(2, 2048, 320, 200);
    }
    test_gemm_every_count(105, layout == GEMM_NVFP4 ? 704 : 320, 136);
    if (layout == GEMM_NVFP4) test_gemm_alone_case(70, 60, 10, 64, 64);
    gemm_end();
    gemm_layout = GEMM_BF16;
}

static inline void test_gemm_nvfp4(void) {
    test_gemm_4bit(GEMM_NVFP4);
}

// Where a block may have less shared memory.
static inline void test_gemm_small(void) {
    device_shared = SALA__SHARED_MOST;
    test_gemm_4bit(GEMM_NVFP4);
    test_gemm_4bit(GEMM_INT4);
    device_shared = 0;
}

static inline void test_gemm_int4(void) {
    for (int layout = GEMM_INT4; layout < GEMM_LAYOUTS; layout++) test_gemm_4bit(layout);
}
