/*  fp4_probe.c - what FP4 tensor cores really give; for tools/fp4_first_run.sh.

    Runs the instruction (mma.sync m16n8k64 kind::mxf4nvf4) on random fragments and compares its FP32 results
    with the definition that sala computes everywhere else: the exact sum of each group of 16 products, added
    in order. Also the conversion to E2M1 against sala's. A device without FP4 tensor cores is named; there is
    nothing to measure then. The exit status is 1 only if something could not be run.

        fp4_probe [DEVICE]      number of the device (0) */
#define SALA_IMPLEMENTATION
#include "../sala.h"

enum { WARPS = 4096, FLOATS = 1 << 20 };

typedef struct probe_args {                    // of both kernels
    const uint32_t *a, *b, *scale_a, *scale_b; // [steps, WARPS, 32][4, 2, 1, 1]
    const float *c;                            // [WARPS, 32, 4]; or what is converted, [FLOATS]
    float *d;
    uint8_t *codes; // [FLOATS / 2]
    int32_t steps, pad;
} probe_args;

static const char probe_source[] =
    "\n"
    "typedef struct probe_args {\n"
    "    const uint32_t *a, *b, *scale_a, *scale_b;\n"
    "    const float *c;\n"
    "    float *d;\n"
    "    uint8_t *codes;\n"
    "    int32_t steps, pad;\n"
    "} probe_args;\n"
    "extern \"C\" __global__ void __launch_bounds__(32, 1) sala_probe_mma(probe_args p) {\n"
    "    int at = (int)(blockIdx.x * 32 + threadIdx.x), all = (int)gridDim.x * 32;\n"
    "    float d[4];\n"
    "    sala_wait_grid();\n"
    "    for (int i = 0; i < 4; i++) d[i] = p.c[at * 4 + i];\n"
    "#pragma unroll 1\n"
    "    for (int step = 0; step < p.steps; step++, at += all)\n"
    "        sala_fp4_mma(d, p.a + at * 4, p.b + at * 2, p.scale_a[at], p.scale_b[at]);\n"
    "    at -= all * p.steps;\n"
    "    for (int i = 0; i < 4; i++) p.d[at * 4 + i] = d[i];\n"
    "}\n"
    "extern \"C\" __global__ void __launch_bounds__(32, 1) sala_probe_cvt(probe_args p) {\n"
    "    int at = (int)(blockIdx.x * 32 + threadIdx.x);\n"
    "    sala_wait_grid();\n"
    "#ifndef SALA_SIM\n"
    "    uint16_t two;\n"
    "    asm(\"{.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u16.u8 %0, b;}\"\n"
    "        : \"=h\"(two) : \"f\"(p.c[2 * at + 1]), \"f\"(p.c[2 * at]));\n"
    "    p.codes[at] = (uint8_t)two;\n"
    "#else\n"
    "    p.codes[at] = (uint8_t)(sala_f32_e2m1(p.c[2 * at]) | sala_f32_e2m1(p.c[2 * at + 1]) << "
    "4);\n"
    "#endif\n"
    "}\n";

static sala__gpu gpu;
static uint64_t seed = 88172645463325252u;

static uint32_t bits(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (uint32_t)(seed >> 16);
}

static void must(int code, const sala_error *err) {
    if (code >= 0) return;
    printf("fp4_probe: %s\n", err->text);
    exit(1);
}

static void *device(const void *from, size_t size) {
    sala_error err = {0, ""};
    void *p = sala__gpu_take(&gpu, size, "the probe", &err);
    must(p ? 0 : -1, &err);
    if (from) must(sala__cuda_upload(&gpu.cuda, sala__on_gpu(p), from, size, &err), &err);
    must(sala__cuda_wait(&gpu.cuda, &err), &err);
    return p;
}

static void fetch(void *to, const void *from, size_t size) {
    sala_error err = {0, ""};
    must(sala__cuda_download(&gpu.cuda, to, sala__on_gpu(from), size, &err), &err);
    must(sala__cuda_wait(&gpu.cuda, &err), &err);
}

// Scales: 0 all codes but NaN, 1 near 1, 2 many subnormal ones.
static uint32_t scales(int kind) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = kind == 1                 ? 0x30 + bits() % 16
                     : kind == 2 && bits() % 2 ? bits() % 8
                                               : bits() % 127;
        word |= s << (8 * i);
    }
    return word;
}

static double number(uint32_t word, int at, uint32_t scale_word, int group) {
    return (double)sala_e2m1_f32(word >> 4 * at & 15) *
           (double)sala_e4m3_f32((uint8_t)(scale_word >> 8 * group));
}

typedef struct probe_data {
    uint32_t *a, *b, *scale_a, *scale_b;
    float *c, *d;
    int steps;
} probe_data;

// One result by the definition; `magnitude` of what was added.
static float expected(const probe_data *p, int warp, int lane, int i, double *magnitude) {
    int g = (lane >> 2), row = g + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
    float sum = p->c[(warp * 32 + lane) * 4 + i];
    *magnitude = fabs((double)sum);
    for (int step = 0; step < p->steps; step++) {
        size_t at = ((size_t)step * WARPS + (size_t)warp) * 32;
        uint32_t of_a = p->scale_a[at + (size_t)(g * 4 + (row >> 3))];
        uint32_t of_b = p->scale_b[at + (size_t)(column * 4)];
        for (int group = 0; group < 4; group++) {
            double part = 0;
            for (int k = 16 * group; k < 16 * group + 16; k++) {
                size_t quad = (size_t)(k >> 3 & 3), word = (size_t)(k >> 5);
                uint32_t a = p->a[(at + (size_t)g * 4 + quad) * 4 + 2 * word + (size_t)(row >> 3)];
                uint32_t b = p->b[(at + (size_t)column * 4 + quad) * 2 + word];
                part += number(a, k & 7, of_a, group) * number(b, k & 7, of_b, group);
            }
            sum += (float)part;
            *magnitude += fabs(part);
        }
    }
    return sum;
}

static void compare(const probe_data *p, int kind, int warps) {
    static const char *const names[] = {"all scales", "scales near 1", "many subnormal scales"};
    long wrong = 0, all = 0;
    double most = 0, total = 0;
    for (int warp = 0; warp < warps; warp++)
        for (int j = 0; j < 128; j++, all++) {
            double magnitude;
            float want = expected(p, warp, j / 4, j % 4, &magnitude), got = p->d[warp * 128 + j];
            double off = magnitude > 0 ? fabs((double)got - (double)want) / magnitude : 0;
            wrong += memcmp(&want, &got, 4) != 0 && !(want == 0 && got == 0);
            most = off > most || off != off ? off : most;
            total += off;
        }
    printf(
        "  %d k, %s: %ld of %ld results have other bits; off by at most %.3g (2^%.1f), on average "
        "%.3g of the magnitudes\n",
        64 * p->steps, names[kind], wrong, all, most, most > 0 ? log2(most) : -99.0,
        total / (double)all);
}

static void mma(sala__cuda_kernel *kernel, int steps, int kind) {
    sala_error err = {0, ""};
    size_t lanes = (size_t)WARPS * 32, n = lanes * (size_t)steps;
    probe_data p = {(uint32_t *)malloc(n * 16),
                    (uint32_t *)malloc(n * 8),
                    (uint32_t *)malloc(n * 4),
                    (uint32_t *)malloc(n * 4),
                    (float *)malloc(lanes * 16),
                    (float *)malloc(lanes * 16),
                    steps};
    if (!p.a || !p.b || !p.scale_a || !p.scale_b || !p.c || !p.d) exit(1);
    for (size_t i = 0; i < n * 4; i++) p.a[i] = bits() ^ bits() << 16;
    for (size_t i = 0; i < n * 2; i++) p.b[i] = bits() ^ bits() << 16;
    for (size_t i = 0; i < n; i++) p.scale_a[i] = scales(kind), p.scale_b[i] = scales(kind);
    for (size_t i = 0; i < lanes * 4; i++)
        p.c[i] = steps > 1 ? 0 : ((float)bits() - 2147483648.0f) * (kind == 0 ? 1e-3f : 1e-8f);
    probe_args a = {(uint32_t *)device(p.a, n * 16),
                    (uint32_t *)device(p.b, n * 8),
                    (uint32_t *)device(p.scale_a, n * 4),
                    (uint32_t *)device(p.scale_b, n * 4),
                    (float *)device(p.c, lanes * 16),
                    (float *)device(NULL, lanes * 16),
                    NULL,
                    steps,
                    0};
    sala__cuda_launch(&gpu.cuda, kernel, WARPS, 1, 1, 32, 0, &a, 0, &err);
    must(err.code, &err);
    fetch(p.d, a.d, lanes * 16);
    compare(&p, kind, steps > 1 ? 64 : WARPS);
    free(p.a), free(p.b), free(p.scale_a), free(p.scale_b), free(p.c), free(p.d);
}

static void convert(sala__cuda_kernel *kernel) {
    sala_error err = {0, ""};
    float *x = (float *)malloc(FLOATS * 4);
    uint8_t *codes = (uint8_t *)malloc(FLOATS / 2);
    static const float ties[8] = {0, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    long wrong = 0;
    if (!x || !codes) exit(1);
    for (int i = 0; i < FLOATS; i++) { // ties and their neighbours; of the range; any but NaN
        uint32_t u = i < 4096 ? sala_f32_bits(ties[i % 8]) + bits() % 5 - 2
                     : i % 2  ? sala_f32_bits((float)(bits() % 8000000) * 1e-6f)
                              : bits();
        if (i < 4096 && ties[i % 8] == 0) u = bits() % 3;
        if ((u & 0x7FFFFFFFu) > 0x7F800000u) u &= 0xBFFFFFFFu;
        x[i] = sala_bits_f32(u ^ (bits() & 0x80000000u));
    }
    probe_args a = {NULL,
                    NULL,
                    NULL,
                    NULL,
                    (float *)device(x, FLOATS * 4),
                    NULL,
                    (uint8_t *)device(NULL, FLOATS / 2),
                    0,
                    0};
    sala__cuda_launch(&gpu.cuda, kernel, FLOATS / 64, 1, 1, 32, 0, &a, 0, &err);
    must(err.code, &err);
    fetch(codes, a.codes, FLOATS / 2);
    for (int i = 0; i < FLOATS; i++)
        wrong += (codes[i / 2] >> i % 2 * 4 & 15) != sala_f32_e2m1(x[i]);
    printf("  conversion to E2M1: %ld of %d differ from sala's\n", wrong, FLOATS);
    free(x), free(codes);
}

int main(int argc, char **argv) {
    static const sala__env env = {NULL, NULL, NULL, NULL};
    static const sala_dims m = {.vocab = 256,
                                .hidden = 256,
                                .ffn = 256,
                                .layers = 1,
                                .heads = 2,
                                .kv_heads = 1,
                                .head_dim = 128,
                                .block = 64,
                                .kernel = 32,
                                .stride = 16,
                                .top_k = 8,
                                .lin_heads = 2,
                                .lin_kv_heads = 2,
                                .lin_dim = 128};
    sala__cuda_kernel kernels[2];
    sala_error err = {0, ""};
    must(sala__cuda_open(&env, argc > 1 ? atoi(argv[1]) : 0, &gpu.cuda, &err), &err);
    printf("%s, %s\n", gpu.cuda.label, gpu.cuda.architecture);
    if (!sala__cuda_has_fp4(&gpu.cuda)) {
        printf("  This device has no FP4 tensor cores: W4A4 is emulated, exactly. Nothing to "
               "compare.\n");
        sala__gpu_close(&gpu);
        return 0;
    }
    char *source = (char *)malloc(strlen(gpu.cuda.source) + sizeof probe_source);
    if (!source) return 1;
    strcat(strcpy(source, gpu.cuda.source), probe_source);
    gpu.cuda.source = source;
    gpu.units = 1u << 6;
    gpu.fp4 = 1;
    must(sala__cuda_enter(&gpu.cuda, &err), &err);
    must(sala__gpu_open(&gpu, &m, &err), &err);
    must(sala__cuda_get_kernel(&gpu.cuda, 0, "sala_probe_mma", 0, &kernels[0], &err), &err);
    must(sala__cuda_get_kernel(&gpu.cuda, 0, "sala_probe_cvt", 0, &kernels[1], &err), &err);
    for (int kind = 0; kind < 3; kind++) mma(&kernels[0], 1, kind);
    for (int kind = 0; kind < 3; kind++) mma(&kernels[0], 64, kind);
    convert(&kernels[1]);
    sala__cuda_leave(&gpu.cuda);
    sala__gpu_close(&gpu);
    free(source);
    return 0;
}
