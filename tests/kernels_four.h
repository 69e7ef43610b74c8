// 4-bit weights on the device: pack4, fill4 and unpack4 against C, bit for bit, and products of a W4A16
// prefill on them. For test_prefill.c, whose cases and tolerances of products it uses.

enum { FOUR_UNITS = 1 | 2 | 8 };

typedef struct four_kind { // the layouts of a block
    const char *name;
    int format, group, zeros;
} four_kind;

static const four_kind four_kinds[] = {{"nvfp4", SALA_NVFP4, 16, 0},
                                       {"int4, groups of 32", SALA_INT4, 32, 0},
                                       {"int4, groups of 32, zeros", SALA_INT4, 32, 1},
                                       {"int4, groups of 64, zeros", SALA_INT4, 64, 1},
                                       {"int4, groups of 128", SALA_INT4, 128, 0},
                                       {"int4, one group, zeros", SALA_INT4, 0, 1}};
enum { FOUR_KINDS = (int)(sizeof four_kinds / sizeof four_kinds[0]) };

static void four_begin(int prefill) {
    static const sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err = {0, ""};
    check_seed = 17;
    device_open_units(&gemm_dims, FOUR_UNITS);
    gpu->prefill = prefill;
    if (sala__cpu_open(&env, 1, sala__gemm_scratch(), &gemm_cpu, &err) < 0) exit(2);
}

// A random matrix as the host has it: every code, every scale byte (subnormal, 0), every zero.
static sala_weight four_weight(const four_kind *kind, int n, int k, float size) {
    sala_weight w = sala_plain_weight(NULL, kind->format, n, k);
    w.group = kind->group ? kind->group : k;
    size_t groups = (size_t)n * (size_t)(k / w.group), bytes = (size_t)n * (size_t)k / 2;
    uint8_t *codes = (uint8_t *)malloc(bytes), *zeros = (uint8_t *)malloc(groups);
    uint16_t *scales = (uint16_t *)malloc(groups * 2);
    float *alpha = (float *)malloc((size_t)n * 4);
    for (size_t i = 0; i < bytes; i++) codes[i] = (uint8_t)check_random();
    for (size_t i = 0; i < groups; i++) {
        uint8_t byte = (uint8_t)(check_random() % 127);
        zeros[i] = (uint8_t)(check_random() % 17);
        if (kind->format == SALA_NVFP4)
            ((uint8_t *)scales)[i] = byte;
        else
            scales[i] = sala_f32_bf16(check_uniform() * size);
    }
    float unit = kind->format == SALA_NVFP4 ? size / 64 : 0.25f;
    for (int i = 0; i < n; i++) alpha[i] = unit * (1 + 0.5f * check_uniform());
    w.data = codes, w.scale = scales, w.alpha = alpha;
    w.zero = kind->zeros ? zeros : NULL;
    if (!kind->zeros) free(zeros);
    return w;
}

static void four_free(const sala_weight *w) {
    gemm_free(w->data), gemm_free(w->scale), gemm_free(w->zero), gemm_free(w->alpha);
}

// The blocks as kernels.h describes them, element by element; of a pair with `up`. Starts all zero, with
// the codes and biases of INT4's padding.
static uint8_t *four_expected(const sala_weight *w, const sala_weight *up, int block,
                              size_t *bytes) {
    int rows = up ? 2 * w->n : w->n, padded = (rows + 63) / 64 * 64, k = w->k;
    int order = sala_code_order(w->format, gpu->cuda.major);
    *bytes = (size_t)(padded / 64) * (size_t)(k / 64) * (size_t)block;
    uint8_t *to = (uint8_t *)calloc(1, *bytes);
    for (int row = 0; row < padded; row++) {
        const sala_weight *from = up && row / 8 % 2 ? up : w;
        int n = up ? row / 16 * 8 + row % 8 : row, exists = n < w->n;
        for (int i = 0; i < k; i++) {
            size_t at = (size_t)n * (size_t)k + (size_t)i;
            uint32_t code = w->format == SALA_INT4 ? 8 : 0;
            if (exists) code = ((const uint8_t *)from->data)[at / 2] >> at % 2 * 4 & 15;
            uint32_t *word = (uint32_t *)(void *)(to + sala_packed4(row, i, rows, block));
            *word |= sala_code_bits(order, i & 7, code);
        }
        for (int i = 0; i < k; i += 64) {
            uint8_t *stage =
                to + sala_packed4(0, i, rows, block) + (size_t)(row / 64) * (size_t)block;
            uint16_t *word = (uint16_t *)(void *)(stage + sala_scale_word(row & 63));
            for (int j = 0; j < 64 / 16 && w->format == SALA_NVFP4 && exists; j++)
                ((uint8_t *)word)[j] =
                    ((const uint8_t *)
                         from->scale)[(size_t)n * (size_t)(k / 16) + (size_t)(i / 16 + j)];
            for (int j = 0; j < 2 && w->format == SALA_INT4; j++) {
                size_t group =
                    (size_t)n * (size_t)(k / w->group) + (size_t)((i + j * 32) / w->group);
                int zero = exists && from->zero ? from->zero[group] : 8;
                uint16_t bias = sala_f32_bf16((float)(-128 - zero));
                uint16_t scale = exists ? ((const uint16_t *)from->scale)[group] : 0;
                if (w->group == 32) word[j] = scale;
                if (w->group > 32) word[0] = scale, word[1] = bias;
                if (block == SALA_BLOCK4_BIAS) word[128 + j] = bias;
            }
        }
    }
    return to;
}

static void four_compare(const void *device, const void *want, size_t bytes, const char *what,
                         const char *kind, int n, int k) {
    unsigned char *got = (unsigned char *)malloc(bytes + 256);
    size_t at = 0, behind = 0;
    from_device(got, device, bytes + 256);
    while (at < bytes && got[at] == ((const unsigned char *)want)[at]) at++;
    for (size_t i = bytes; i < bytes + 256; i++) behind += got[i] != 0xFF;
    CHECK(at == bytes && behind == 0, "%s, %s, %d x %d: byte %zu of %zu, %zu behind the end", what,
          kind, n, k, at, bytes, behind);
    free(got);
}

// Rows to the device in slabs of `step` rows.
static void four_pack(const sala_weight *w, int pair, int block, int step, void *to) {
    size_t groups = (size_t)(w->k / w->group), size = w->format == SALA_INT4 ? 2 : 1;
    for (int first = 0; first < w->n; first += step) {
        size_t rows = (size_t)(w->n - first < step ? w->n - first : step), at = (size_t)first;
        sala_pack4_args a = {NULL,  NULL,  NULL,      (uint8_t *)to, w->format, w->group,
                             block, first, (int)rows, w->n,          w->k,      pair};
        size_t row = (size_t)w->k / 2;
        a.codes = (const uint8_t *)on_device((const char *)w->data + at * row, rows * row);
        a.scales = on_device((const char *)w->scale + at * groups * size, rows * groups * size);
        if (w->zero) a.zeros = (const uint8_t *)on_device(w->zero + at * groups, rows * groups);
        sala__launch_pack4(gpu, &a);
    }
    device_sync();
}

// The same matrix, or pair, as a GPU has it, with its alphas.
static sala_weight four_on_gpu(const sala_weight *w, const sala_weight *up) {
    size_t rows = (size_t)sala__padded(w->n) * (up ? 2 : 1);
    int block = sala_block4(w->format, w->group, w->zero != NULL);
    size_t bytes = rows / 64 * (size_t)(w->k / 64) * (size_t)block;
    sala_weight on_gpu = *w;
    float *alpha = (float *)malloc(rows * 4);
    for (int n = 0; n < w->n; n++) {
        alpha[up ? sala_packed_pair(n, 0) : n] = w->alpha[n];
        if (up) alpha[sala_packed_pair(n, 1)] = up->alpha[n];
    }
    on_gpu.data = on_device(NULL, bytes);
    on_gpu.alpha = (const float *)on_device(alpha, rows * 4);
    on_gpu.scale = NULL;
    four_pack(w, up != NULL, block, 1 << 20, (void *)(uintptr_t)on_gpu.data);
    if (up) four_pack(up, 2, block, 1 << 20, (void *)(uintptr_t)on_gpu.data);
    free(alpha);
    return on_gpu;
}

// ---- pack4, unpack4 ----

// A block of pair's rows is unpacked beside the other's; numbers as sala__load_weight4 gives them.
static void four_unpacked(const sala_weight *w, const sala_weight *up, const uint8_t *blocks,
                          int block, const char *kind) {
    int rows = up ? 2 * w->n : w->n, padded = (rows + 63) / 64 * 64, k = w->k;
    size_t bytes = (size_t)padded * (size_t)k * 2;
    uint16_t *want = (uint16_t *)calloc(1, bytes);
    for (int row = 0; row < rows; row++) {
        const sala_weight *from = up && row / 8 % 2 ? up : w;
        int n = up ? row / 16 * 8 + row % 8 : row;
        if (n >= w->n) continue;
        for (int i = 0; i < k; i += 16) {
            float x[16];
            sala__load_weight4(from, n, i, x);
            for (int j = 0; j < 16; j++) want[sala_packed(row, i + j, rows)] = sala_f32_bf16(x[j]);
        }
    }
    sala_unpack4_args a = {
        blocks, (uint16_t *)on_device(NULL, bytes + 256), w->format, w->group, block, padded, k};
    unsigned count = (unsigned)(padded / 64 * (k / 64));
    sala__launch(gpu, SALA__KERNEL_unpack4, (count + 7) / 8, 1, 1, 0, &a);
    device_sync();
    four_compare(a.to, want, bytes, up ? "unpacked pair" : "unpacked", kind, w->n, k);
    free(want);
}

static void four_pack_case(const four_kind *kind, int n, int k, int pair, int step) {
    sala_weight w = four_weight(kind, n, k, 1), up = four_weight(kind, n, k, 1);
    int block = sala_block4(kind->format, w.group, kind->zeros);
    size_t bytes;
    uint8_t *want = four_expected(&w, pair ? &up : NULL, block, &bytes);
    uint8_t *to = (uint8_t *)on_device(NULL, bytes + 256);
    four_pack(&w, pair, block, step, to);
    if (pair) four_pack(&up, 2, block, step, to);
    four_compare(to, want, bytes, pair ? "packed pair" : "packed", kind->name, n, k);
    four_unpacked(&w, pair ? &up : NULL, to, block, kind->name);
    four_free(&w), four_free(&up), free(want);
}

static void prefill_four_pack_unpack(void) {
    four_begin(1);
    for (int i = 0; i < FOUR_KINDS; i++) {
        const four_kind *kind = &four_kinds[i];
        int k = kind->group == 128 ? 256 : 192;
        four_pack_case(kind, 1, k, 0, 16);
        four_pack_case(kind, 72, k, 0, 48);
        four_pack_case(kind, 130, k, 0, 130);
        four_pack_case(kind, 8, k, 1, 16);
        four_pack_case(kind, 96, k, 1, 32);
    }
    gemm_end();
}

// Every code with every scale of NVFP4, and every code with every zero of INT4.
static void prefill_four_all_codes(void) {
    four_begin(1);
    for (int kind = 0; kind < 3; kind += 2) {
        sala_weight w = four_weight(&four_kinds[kind], 127, 64, 1);
        uint8_t *codes = (uint8_t *)(uintptr_t)w.data;
        for (int i = 0; i < 127 * 32; i++) codes[i] = (uint8_t)(i % 8 * 2 | (i % 8 * 2 + 1) << 4);
        for (int i = 0; i < 127 * 4 && kind == 0; i++)
            ((uint8_t *)(uintptr_t)w.scale)[i] = (uint8_t)(i % 127);
        for (int i = 0; i < 127 * 2 && kind; i++) ((uint8_t *)(uintptr_t)w.zero)[i] = i % 17;
        int block = sala_block4(w.format, w.group, kind);
        sala_weight there = four_on_gpu(&w, NULL);
        four_unpacked(&w, NULL, (const uint8_t *)there.data, block, four_kinds[kind].name);
        four_free(&w);
    }
    gemm_end();
}

// ---- fill4 ----

static void four_fill_case(int format, int group, int n, int k, int pair) {
    four_kind kind = {format == SALA_NVFP4 ? "nvfp4" : "int4", format, group, 0};
    sala_weight w[2];
    size_t bytes;
    uint64_t seeds[2] = {check_random(), check_random()};
    for (int i = 0; i < 2; i++) {
        w[i] = four_weight(&kind, n, k, 1);
        int half = n / 2; // any rows may be made alone
        sala__synthetic_fill4(&w[i], half, n - half, seeds[i]);
        sala__synthetic_fill4(&w[i], 0, half, seeds[i]);
    }
    int block = sala_block4(format, group, 0);
    uint8_t *want = four_expected(&w[0], pair ? &w[1] : NULL, block, &bytes);
    uint8_t *to = (uint8_t *)on_device(NULL, bytes + 256);
    for (int i = 0; i < (pair ? 2 : 1); i++) {
        sala_fill4_args a = {to, seeds[i], format, group, block, n, k, pair ? i + 1 : 0};
        sala__launch_fill4(gpu, &a);
    }
    device_sync();
    four_compare(to, want, bytes, pair ? "filled pair" : "filled", kind.name, n, k);
    double square = 0, sum = 0; // what alpha reckons with
    for (int r = 0; r < n; r++)
        for (int i = 0; i < k; i += 16) {
            float x[16];
            sala__load_weight4(&w[0], r, i, x);
            for (int j = 0; j < 16; j++) square += (double)(x[j] * x[j]), sum += (double)x[j];
        }
    float alpha[1];
    sala_weight one = w[0];
    one.n = 1;
    sala__synthetic_alpha(alpha, &one, 0, 1.7320508f); // times 1 +- 1/4
    double count = (double)n * k, sigma = sqrt(square / count) * (double)alpha[0];
    CHECK(count < 5000 || (fabs(sigma - 1) < 0.3 && fabs(sum) < 4 * sqrt(square)),
          "%s: sigma %g, mean %g", kind.name, sigma, sum / count);
    four_free(&w[0]), four_free(&w[1]), free(want);
}

static void prefill_four_fill(void) {
    four_begin(1);
    for (int pair = 0; pair < 2; pair++) {
        four_fill_case(SALA_NVFP4, 16, 72, 192, pair);
        four_fill_case(SALA_NVFP4, 16, 1, 64, pair);
        four_fill_case(SALA_INT4, 32, 72, 64, pair);
        four_fill_case(SALA_INT4, 128, 72, 256, pair);
    }
    gemm_end();
}

// ---- products of prefill ----

// What a product may be off by: 2^-17 of the sum of the magnitudes.
static float four_slack(const sala_act *x, const sala_weight *w, int n) {
    float sum = 0, row[16];
    for (int i = 0; i < w->k; i++) {
        if (i % 16 == 0 && w->format != SALA_BF16) sala__load_weight4(w, n, i, row);
        if (w->format == SALA_BF16)
            row[i % 16] =
                sala_bf16_f32(((const uint16_t *)w->data)[(size_t)n * (size_t)w->k + (size_t)i]);
        sum += fabsf(sala_act_f32(x[i]) * row[i % 16]);
    }
    return sum * (w->alpha ? w->alpha[n] : 1) * 0x1p-17f;
}

static void four_scratch(size_t elements) {
    gpu->unpacked_bytes = elements * 2;
    gpu->unpacked = on_device(NULL, gpu->unpacked_bytes);
}

// Four weights of one product: NVFP4, BF16, INT4 (groups of 64 and zeros), NVFP4.
static void four_plain_case(int rows, int k) {
    static const int n[4] = {64, 40, 72, 8}, kinds[4] = {0, -1, 3, 0};
    sala_gemm_args cpu, a;
    memset(&cpu, 0, sizeof cpu);
    cpu.rows = rows, cpu.count = 4;
    sala_act *x = gemm_random((size_t)rows * (size_t)k, 1);
    cpu.x = x;
    a = cpu;
    a.x = (const sala_act *)on_device(x, (size_t)rows * (size_t)k * 2);
    four_scratch((size_t)(64 + 128 + 64) * (size_t)k); // not a row more
    for (int i = 0; i < 4; i++) {
        size_t bytes = (size_t)rows * (size_t)n[i] * 2;
        cpu.w[i] =
            kinds[i] < 0 ? gemm_weight(n[i], k, 1) : four_weight(&four_kinds[kinds[i]], n[i], k, 1);
        a.w[i] = kinds[i] < 0 ? gemm_pack(&cpu.w[i], NULL) : four_on_gpu(&cpu.w[i], NULL);
        cpu.y[i] = (sala_act *)gemm_space(bytes);
        a.y[i] = (sala_act *)on_device(NULL, bytes);
    }
    sala__launch_gemm(gpu, &a);
    sala__op_gemm(&gemm_cpu, &cpu);
    device_sync();
    for (int i = 0; i < 4; i++) {
        size_t count = (size_t)rows * (size_t)n[i];
        sala_act *got = (sala_act *)malloc(count * 2);
        int wrong = 0;
        from_device(got, a.y[i], count * 2);
        for (int j = 0; j < (int)count; j++) {
            float is = sala_act_f32(got[j]), want = sala_act_f32(cpu.y[i][j]);
            float slack = four_slack(x + j / n[i] * k, &cpu.w[i], j % n[i]);
            wrong += !(fabsf(is - want) <= slack + gemm_ulp(want));
        }
        CHECK(wrong == 0, "%d rows, k %d, weight %d: %d values", rows, k, i, wrong);
        four_free(&cpu.w[i]), free(cpu.y[i]), free(got);
    }
    free(x);
}

static void prefill_four_plain(void) {
    four_begin(1);
    for (int shape = 0; shape <= SALA__PREFILL_SHAPE_COUNT; shape++) {
        gpu->shape = shape;
        four_plain_case(shape ? 33 : 1, 64);
    }
    gpu->shape = 0;
    four_plain_case(130, 192);
    gemm_end();
}

// Rows `from` to `to` of gate and up, or of a product onto x, of all that a launch writes.
static void four_rows(int kind, const sala_act *x, const sala_weight *w, int from, int to,
                      sala_act *y) {
    prefill_gemm_rows(kind, x, w, from, to, y);
}

// SwiGLU and the residual in every shape of tiles: one row of 4-bit numbers must give what the same numbers
// give in FP32 with alpha on the CPU; and the same bits for every cut into chunks.
static void prefill_four_chunks(void) {
    enum { ROWS = PREFILL_GEMM_ROWS, N = PREFILL_GEMM_N, K = PREFILL_GEMM_K, COUNT = ROWS * N };
    static const int cuts[][4] = {{0, 200, 0, 0}, {0, 64, 200, 0}, {0, 128, 192, 200}};
    four_begin(1);
    sala_act *x = gemm_random(ROWS * K, 1), *first = gemm_random(COUNT, 1);
    sala_act *y = (sala_act *)malloc(COUNT * 2), *want = (sala_act *)malloc(COUNT * 2);
    sala_act *branch = (sala_act *)malloc(COUNT * 2), *up_y = (sala_act *)malloc(COUNT * 2);
    for (int format = 0; format < 2; format++) {
        const four_kind *of = &four_kinds[format ? 3 : 0];
        sala_weight w = four_weight(of, N, K, 0.1f), up = four_weight(of, N, K, 0.1f);
        sala_weight there[3] = {four_on_gpu(&w, NULL), four_on_gpu(&w, &up), four_on_gpu(&w, NULL)};
        four_scratch((size_t)2 * N * K);
        for (int i = 0; i < 3 * 3 * 2; i++) {
            int kind = i / 6, cut = i / 2 % 3;
            gpu->shape = i % 2 == 0 ? 0 : (i * 5 + cut) % SALA__PREFILL_SHAPE_COUNT + 1;
            memcpy(y, first, COUNT * 2);
            for (int part = 0; part < 3 && cuts[cut][part + 1]; part++)
                four_rows(kind, x, &there[kind], cuts[cut][part], cuts[cut][part + 1], y);
            if (i % 6 == 0) memcpy(want, y, COUNT * 2);
            if (i == 0) memcpy(branch, y, COUNT * 2);
            CHECK(memcmp(y, want, COUNT * 2) == 0, "%s, kind %d, cut %d, shape %d", of->name, kind,
                  cut, gpu->shape);
            if (i != 6) continue;
            sala_gemm_swiglu_args cpu = {
                ROWS, x, w, up, y, up_y, {NULL, NULL, 0, 0}, {NULL, NULL, 0, 0}};
            sala__op_gemm_swiglu(&gemm_cpu, &cpu);
            int wrong = 0;
            for (int j = 0; j < COUNT; j++) {
                float is = sala_act_f32(want[j]), right = sala_act_f32(y[j]);
                wrong += !(fabsf(is - right) <= 4 * gemm_ulp(right) + 0x1p-12f);
            }
            CHECK(wrong == 0, "%s: swiglu: %d values", of->name, wrong);
        }
        int wrong = prefill_gemm_wrong(y, branch, first);
        CHECK(wrong == 0, "%s: %d of x", of->name, wrong);
        four_free(&w), four_free(&up);
    }
    free(x), free(first), free(y), free(want), free(branch), free(up_y);
    gemm_end();
}

// ---- a whole model's weights ----

// What lies on the device for the same tensor of two models.
static void four_same_item(const sala__item *a, const sala__item *b, const sala__gpu_place *p) {
    size_t bytes = (size_t)p->data + (p->block ? (size_t)p->rows * 4 : 0);
    unsigned char *x = (unsigned char *)malloc(bytes + 1), *y = (unsigned char *)malloc(bytes + 1);
    from_device(x, a->weight->data, bytes);
    from_device(y, b->weight->data, bytes);
    CHECK(memcmp(x, y, bytes) == 0 && a->weight->format == p->format, "%s differs", a->name);
    const char *at = (const char *)a->weight->data;
    CHECK(!p->block || p->layout == 3 || (const char *)a->weight->alpha == at + p->data,
          "%s: alpha", a->name);
    free(x), free(y);
}

// Gate and up of layer 0 with different formats become BF16, rounded once.
static void four_mixed_pair(const sala__weights *host, const sala__weights *there) {
    sala_weight gate = host->layers[0].mlp_gate, up = host->layers[0].mlp_up;
    int n = gate.n, k = gate.k;
    size_t bytes = (size_t)sala__padded(n) * (size_t)k * 4;
    uint16_t *want = (uint16_t *)calloc(1, bytes), *got = (uint16_t *)malloc(bytes);
    for (int which = 0; which < 2; which++)
        for (int row = 0; row < n; row++)
            for (int i = 0; i < k; i += 16) {
                const sala_weight *w = which ? &up : &gate;
                const uint16_t *plain = (const uint16_t *)w->data + (size_t)row * (size_t)k;
                float x[16];
                if (sala__is_4bit(w->format)) sala__load_weight4(w, row, i, x);
                for (int j = 0; j < 16; j++) {
                    uint16_t *to = want + sala_packed(sala_packed_pair(row, which), i + j, 2 * n);
                    *to =
                        w->format == SALA_BF16 ? plain[i + j] : sala_f32_bf16(x[j] * w->alpha[row]);
                }
            }
    from_device(got, there->layers[0].mlp_gate.data, bytes);
    CHECK(memcmp(got, want, bytes) == 0, "the pair differs");
    CHECK(there->layers[0].mlp_up.data == there->layers[0].mlp_gate.data &&
              there->layers[0].mlp_up.format == SALA_BF16 && !there->layers[0].mlp_gate.alpha,
          "the pair is not BF16");
    free(want), free(got);
}

// A synthetic model made on the host and brought over as files are is the one that is made on the device;
// both take what the plan says.
static void four_upload_as(const char *kind, int mixed) {
    static const sala__env none = {NULL, NULL, NULL, NULL};
    sala__config c;
    sala__weights host, made, moved;
    sala_error err;
    sala_options o;
    memset(&o, 0, sizeof o);
    o.weights = kind;
    o.synthetic_seed = 7;
    if (sala__config_read(&none, "tests/data/vectors/geom/config.json", &c, &err) < 0 ||
        sala__weights_allocate(&none, &c, &host, &o, &err) < 0)
        device_must(-1, &err);
    sala__weights_fill(&c, &host, 7, 0, 1);
    device_open_units(&c.dims, FOUR_UNITS);
    sala_weight *up = &host.layers[0].mlp_up;
    if (mixed) *up = gemm_weight(up->n, up->k, 1); // another format than gate's
    double total = (double)sala__gpu_weights_total(&c, &host) / (1 << 20), before, after, all;
    sala__cuda_free_memory(&gpu->cuda, &before, &all);
    if (sala__gpu_weights(gpu, &c, &host, &o, &moved, &err) < 0) device_must(-1, &err);
    sala__cuda_free_memory(&gpu->cuda, &after, &all);
    CHECK(before - after >= total - 0.001 && before - after < total + 2.1,
          "%g MiB taken, %g planned", before - after, total);
    if (mixed) {
        four_mixed_pair(&host, &moved);
        gemm_free(up->data);
    } else {
        o.synthetic = 1;
        if (sala__gpu_weights(gpu, &c, &host, &o, &made, &err) < 0) device_must(-1, &err);
        sala__item a, b, h;
        for (int i = 0; i < sala__item_count(&c); i++) {
            if (!sala__item_at(&c, &made, i, &a) || !sala__item_at(&c, &moved, i, &b)) continue;
            sala__item_at(&c, &host, i, &h);
            sala__gpu_place p = sala__gpu_place_of(&h, &host);
            four_same_item(&a, &b, &p);
        }
        sala__weights_free(&none, &made);
    }
    sala__weights_free(&none, &moved);
    sala__weights_free(&none, &host);
    sala__config_free(&none, &c);
    device_close();
}

static void prefill_four_upload(void) {
    four_upload_as("nvfp4-head", 0);
    four_upload_as("int4", 0);
    four_upload_as("nvfp4", 1);
}

// Bits a 4-bit weight takes on the device, all included, at the released geometry; and how much of it is
// padding in sala-tiny's.
static void prefill_four_bits(void) {
    static const sala__env none = {NULL, NULL, NULL, NULL};
    static const char *const paths[] = {"bench/configs/minicpm-sala-9b.json",
                                        "models/sala-tiny/config.json"};
    for (int i = 0; i < 4; i++) {
        sala__config c;
        sala__weights w;
        sala__item item;
        sala_error err;
        sala_options o;
        memset(&o, 0, sizeof o);
        o.weights = i / 2 ? "int4" : "nvfp4";
        if (sala__config_read(&none, paths[i % 2], &c, &err) < 0 ||
            sala__synthetic_plan(&none, &c, &w, &o, &err) < 0)
            device_must(-1, &err);
        int64_t bytes = 0, count = 0, padding = 0;
        for (int j = 0; j < sala__item_count(&c); j++) {
            if (!sala__item_at(&c, &w, j, &item) || !item.weight->group) continue;
            sala__gpu_place p = sala__gpu_place_of(&item, &w);
            bytes += p.bytes;
            count += (int64_t)item.n * item.k;
            padding += sala__padded(item.n) - item.n;
        }
        double bits = 8.0 * (double)bytes / (double)count;
        printf("      %s, %s: %.3f bits a weight, %lld rows of padding\n", paths[i % 2], o.weights,
               bits, (long long)padding);
        CHECK(bits <= (i % 2 ? 4.65 : 4.52) && padding == 0, "%g bits", bits);
        sala__weights_free(&none, &w);
        sala__config_free(&none, &c);
    }
}

#define FOUR_TESTS                                                                                 \
    TEST(prefill_four_pack_unpack), TEST(prefill_four_all_codes), TEST(prefill_four_fill),         \
        TEST(prefill_four_plain), TEST(prefill_four_chunks), TEST(prefill_four_upload),            \
        TEST(prefill_four_bits)
