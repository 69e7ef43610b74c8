// The quantiser: grids against the golden block, GPTQ against a naive one in FP64 that inverts H itself, and the program
// on sala-tiny: what it writes, read by a decoder of its own; a run that is stopped; every refusal.
#if !defined(__has_include) || !__has_include(<lapacke.h>) || !__has_include(<cblas.h>)
#include <stdio.h>
int main(void) {
    printf("skipped: no LAPACKE and OpenBLAS here\n1 passed, 0 failed\n");
    return 0;
}
#else
#define SALA_IMPLEMENTATION
#define QUANT_NO_MAIN
#include "../tools/quantize.c"
#include "check.h"
#include <sys/resource.h>
#include <sys/wait.h>

// ---- numbers ----

static void golden_block(void) { // nvfp4.md 1.3
    static const float x[16] = {.013f,  -.020f,  .0071f, 0,       -.0334f, .0405f, -.0009f, .025f,
                                .0302f, -.0118f, .0164f, -.0267f, .0058f,  .0389f, -.0012f, .0087f};
    static const struct {
        float most;
        int four;
        uint8_t scale, packed[8];
        double error;
    } want[3] = {{448, 0, 0x71, {0xd4, 0x02, 0x7e, 0x68, 0xc6, 0xe4, 0x72, 0x38}, 7.7107e-05},
                 {256, 0, 0x6a, {0xd4, 0x02, 0x7f, 0x68, 0xc6, 0xe5, 0x72, 0x38}, 6.8720e-05},
                 {256, 1, 0x70, {0xc2, 0x01, 0x6d, 0x48, 0xa5, 0xd3, 0x61, 0x28}, 7.1812e-05}};
    quant_settings s = {0};
    quant_record r = {{0}, 0, 0, 1, 16, 16, 0, 0, 0, 0, {0}, {0}, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < 3; i++) {
        float divisor = 6 * want[i].most / 0.125f, b = quant_largest(x, 16);
        quant_grid g = quant_fp4_fit(b, divisor, 1 / divisor, want[i].four);
        double error = 0;
        CHECK(g.scale == want[i].scale, "rule %d: scale %#x", i, g.scale);
        for (int j = 0; j < 16; j++) {
            uint8_t code;
            float e = quant_round(SALA_NVFP4, &g, x[j], &code) - x[j];
            error += (double)e * (double)e;
            CHECK(code == (want[i].packed[j / 2] >> j % 2 * 4 & 15), "rule %d: code %d is %d", i, j,
                  code);
        }
        CHECK(fabs(error / want[i].error - 1) < 1e-4, "rule %d: error %g", i, error);
    }
    int four = 1;
    s.format = SALA_NVFP4;
    s.four_six = QUANT_MSE;
    r.divisor = 6 * 256 / 0.125f;
    r.global = 1 / r.divisor;
    CHECK(quant_fit(&s, &r, x, &four).scale == 0x6a && !four, "4 was chosen");
    static const float near[16] = {1, .75f, .75f, .75f, .75f, .75f, .5f}; // 3 of 4: none of 6
    r.divisor = 6 * 256;
    r.global = 1 / r.divisor;
    CHECK(quant_fit(&s, &r, near, &four).scale == 0x7C && four, "6 was chosen");
}

static void small_and_empty_blocks(void) {
    CHECK(quant_fp4_fit(0, 100, 0.01f, 0).scale == 0, "an empty block has a scale");
    CHECK(quant_fp4_fit(1e-9f, 100, 0.01f, 0).scale == 1, "a small block is erased");
    CHECK(quant_fp4_fit(1e9f, 100, 0.01f, 0).scale == 0x7E, "no saturation");
    uint8_t code;
    quant_grid none = quant_fp4_fit(0, 100, 0.01f, 0);
    CHECK(quant_round(SALA_NVFP4, &none, 0, &code) == 0 && code == 0, "0 is not 0");
}

static void int4_grids(void) {
    for (int turn = 0; turn < 200; turn++) {
        float x[32], offset = turn % 4 == 3 ? 1.5f : turn % 4 == 2 ? -1.5f : 0;
        for (int i = 0; i < 32; i++) x[i] = check_uniform() + offset;
        quant_grid g = quant_int4_fit(x, 32, 1);
        CHECK(g.zero >= 1 && g.zero <= 15, "zero %d", g.zero);
        for (int i = 0; i < 32; i++) {
            uint8_t code;
            float y = quant_round(SALA_INT4, &g, x[i], &code);
            CHECK(code <= 15 && fabsf(y - x[i]) < 0.62f * g.step + 0.01f, "%g became %g, step %g",
                  (double)x[i], (double)y, (double)g.step);
        }
    }
}

// ---- GPTQ ----

enum { N = 24, K = 208, DEAD = 37 };

typedef struct problem {
    quant_settings s;
    quant_layer l; // not a real one: its offsets lead into what follows
    uint8_t codes[N * K / 2], scales[N * K / 16 * 2], zeros[N * K / 16];
    float alpha[N], w[N * K], u[K * K], h[K * K];
    uint16_t original[N * K];
    int32_t *order;
    quant_job job;
} problem;

static void problem_make(problem *p, int format, int four_six, int act_order, int group) {
    static float x[3 * K][K];
    float most = 0;
    memset(p, 0, sizeof *p);
    for (int t = 0; t < 3 * K; t++) { // correlated inputs of different sizes
        float common = check_uniform();
        for (int k = 0; k < K; k++)
            x[t][k] =
                k == DEAD ? 0 : (check_uniform() + common) * (0.2f + (float)(k * 7 % 31) / 10);
    }
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++)
            for (int t = 0; t < 3 * K; t++) p->h[i * K + j] += x[t][i] * x[t][j] * (2.0f / (3 * K));
    for (int i = 0; i < N * K; i++) {
        p->original[i] = sala_f32_bf16(check_uniform() * check_uniform());
        p->w[i] = sala_bf16_f32(p->original[i]);
        if (fabsf(p->w[i]) > most) most = fabsf(p->w[i]);
        if (i % K == DEAD) p->w[i] = 0;
    }
    quant_record *r = &p->l.record[0];
    p->s.format = format;
    p->s.gptq = 1;
    p->s.four_six = four_six;
    p->s.act_order = act_order;
    p->s.asym = format == SALA_INT4;
    p->s.damp = 0.01;
    r->n = N;
    r->k = K;
    r->group = group;
    r->divisor = 6 * 256 / most;
    r->global = 1 / r->divisor;
    r->codes = offsetof(problem, codes) - offsetof(problem, l);
    r->scales = offsetof(problem, scales) - offsetof(problem, l);
    r->zeros = p->s.asym ? offsetof(problem, zeros) - offsetof(problem, l) : 0;
    r->alpha = offsetof(problem, alpha) - offsetof(problem, l);
    for (int i = 0; i < N; i++) p->alpha[i] = format == SALA_NVFP4 ? r->global : 1;
    p->order = act_order ? quant_order(p->h, K, quant_together(&p->s, r)) : NULL;
    p->job.s = &p->s;
    p->job.r = r;
    p->job.to = quant_weight(&p->l, r, format);
    p->job.w = p->w;
    p->job.u = p->u;
    p->job.order = p->order;
}

static void invert(const float *h, double damp, double out[K][K]) { // Gauss and Jordan
    static double a[K][2 * K];
    double mean = 0;
    for (int i = 0; i < K; i++) mean += (i == DEAD ? 1 : (double)h[i * K + i]) / K;
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++) {
            a[i][j] = (double)h[i * K + j] + (i == j ? damp * mean + (i == DEAD) : 0);
            a[i][K + j] = i == j;
        }
    for (int i = 0; i < K; i++) {
        double pivot = a[i][i];
        for (int j = 0; j < 2 * K; j++) a[i][j] /= pivot;
        for (int r = 0; r < K; r++) {
            double f = a[r][i];
            for (int j = 0; j < 2 * K && r != i; j++) a[r][j] -= f * a[i][j];
        }
    }
    for (int i = 0; i < K; i++) memcpy(out[i], a[i] + K, sizeof out[i]);
}

// Without Cholesky: after each column that column leaves the inverse. Grids come from the problem's
// result where they are static; where they are taken on the way, by the same rules from FP64 numbers.
static void naive_row(const problem *p, double inverse[K][K], int row, uint8_t code[K]) {
    static double a[K][K];
    const quant_record *r = p->job.r;
    double w[K];
    quant_grid grid = {0};
    memcpy(a, inverse, sizeof a);
    for (int k = 0; k < K; k++)
        w[k] = k == DEAD ? 0 : (double)sala_bf16_f32(p->original[row * K + k]);
    for (int i = 0; i < K; i++) {
        int c = p->order ? p->order[i] : i;
        if (i % r->group == 0 && quant_grids_late(&p->s, r)) { // columns c, c + 1, ... in any order
            float x[128];
            int four;
            for (int j = 0; j < r->group; j++) x[j] = (float)w[c + j];
            if (p->s.format == SALA_INT4) {
                grid = quant_fit(&p->s, r, x, &four);
            } else { // both, to the end of the group
                double loss[2] = {0, 0};
                quant_grid both[2];
                for (int f = 0; f < 2; f++) {
                    static double b[K][K];
                    double v[16];
                    memcpy(b, a, sizeof b);
                    memcpy(v, w + c, sizeof v);
                    both[f] = quant_fp4_fit(quant_largest(x, 16), r->divisor, r->global, f);
                    for (int j = 0; j < 16; j++) {
                        uint8_t q;
                        double d = b[c + j][c + j];
                        double e =
                            v[j] - (double)quant_round(SALA_NVFP4, &both[f], (float)v[j], &q);
                        loss[f] += e * e / d;
                        for (int k = j; k < 16; k++) v[k] -= e / d * b[c + j][c + k];
                        for (int y = c + j + 1; y < c + 16; y++)
                            for (int z = c + j + 1; z < c + 16; z++)
                                b[y][z] -= b[y][c + j] * b[c + j][z] / d;
                    }
                }
                grid = both[loss[1] < loss[0]];
            }
        } else if (!quant_grids_late(&p->s, r)) {
            grid = quant_get_grid(&p->job, row, c / r->group);
        }
        double d = a[c][c],
               e = (w[c] - (double)quant_round(p->s.format, &grid, (float)w[c], &code[c])) / d;
        for (int j = i; j < K; j++) {
            int k = p->order ? p->order[j] : j;
            w[k] -= e * a[c][k];
        }
        for (int y = i + 1; y < K; y++)
            for (int z = i + 1; z < K; z++) {
                int yy = p->order ? p->order[y] : y, zz = p->order ? p->order[z] : z;
                a[yy][zz] -= a[yy][c] * a[c][zz] / d;
            }
    }
}

static void against_naive(int format, int four_six, int act_order, int group) {
    static problem p;
    static double inverse[K][K];
    sala__cpu pool;
    int same = 0;
    problem_make(&p, format, four_six, act_order, group);
    float *e = (float *)malloc(N * QUANT_BLOCK * sizeof *e);
    p.job.e = e;
    CHECK(quant_factor(p.h, K, p.order, p.s.damp, p.u) == 0, "not positive definite");
    CHECK(sala__cpu_open(&(sala__env){0}, 2, 0, &pool, NULL) == 0, "no threads");
    quant_matrix(&pool, &p.job);
    sala__cpu_close(&pool);
    invert(p.h, p.s.damp, inverse);
    for (int row = 0; row < N; row++) {
        uint8_t code[K];
        naive_row(&p, inverse, row, code);
        for (int k = 0; k < K; k++)
            same += code[k] == (p.codes[(row * K + k) / 2] >> k % 2 * 4 & 15);
        CHECK(format == SALA_INT4 || (p.codes[(row * K + DEAD) / 2] >> DEAD % 2 * 4 & 7) == 0,
              "a dead channel has a weight");
    }
    // FP32 and FP64 part where a number lies in the middle of two codes.
    CHECK(same >= N * K * 98 / 100, "%d of %d codes are the same", same, N * K);
    free(p.order);
    free(e);
}

static void gptq_static(void) {
    against_naive(SALA_NVFP4, QUANT_MSE, 0, 16);
}

static void gptq_four_over_six(void) {
    against_naive(SALA_NVFP4, QUANT_GPTQ, 0, 16);
}

static void gptq_act_order(void) {
    against_naive(SALA_NVFP4, QUANT_MSE, 1, 16);
    against_naive(SALA_NVFP4, QUANT_GPTQ, 1, 16); // whole groups
    against_naive(SALA_INT4, QUANT_OFF, 1, 16);
}

static void gptq_int4(void) {
    against_naive(SALA_INT4, QUANT_OFF, 0, 16);
    against_naive(SALA_INT4, QUANT_OFF, 0, K);
}

static void not_positive_definite(void) {
    static float h[4] = {1, 2, 2, 1}, u[4];
    CHECK(quant_factor(h, 2, NULL, 0.01, u) == 1, "a Hessian with a negative eigenvalue passed");
}

// ---- the program ----

static char folder[256]; // of the running test

static const char *in_folder(const char *name) {
    static char paths[4][512];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}

static void folder_remove(void) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command)) perror(folder);
}

static void folder_make(void) {
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/sala-quantize-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) perror(folder), exit(2);
}

static char said[65536]; // what the last run printed on stderr

// Start `sala-quantize IN OUT options`, a list of words. The child's files cannot become larger than
// `most` bytes, when that is not 0: a disk that is full.
static pid_t start(const char *in, const char *out, const char *options, rlim_t most) {
    char words[512],
        *argv[40] = {(char *)"sala-quantize", (char *)(uintptr_t)in, (char *)(uintptr_t)out};
    int argc = 3;
    fflush(NULL);
    pid_t child = fork();
    if (child) return child;
    snprintf(words, sizeof words, "%s", options);
    for (char *w = strtok(words, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
    if (!freopen(in_folder("stderr"), "w", stderr) || !freopen("/dev/null", "w", stdout)) _exit(99);
    struct rlimit limit = {most, most};
    if (most) setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_IGN);
    cli_catch_signals();
    exit(quant_main(argc, argv));
}

static int finish(pid_t child) { // the exit code; fills `said`
    cli_buffer text = {NULL, 0, 0};
    int status = 0;
    waitpid(child, &status, 0);
    cli_read_file(in_folder("stderr"), &text);
    snprintf(said, sizeof said, "%s", text.data);
    cli_free(&text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define TINY "models/sala-tiny"
#define SMALL "--calib CONTRIBUTING.md --length 64 --samples 6 --threads 2 "

static int run(const char *in, const char *out, const char *options) {
    return finish(start(in, out, options, 0));
}

static int there(const char *path) {
    return access(path, F_OK) == 0;
}

static int same_file(const char *a, const char *b) {
    cli_buffer x = {NULL, 0, 0}, y = {NULL, 0, 0};
    int same = cli_read_file(a, &x) == 0 && cli_read_file(b, &y) == 0 && x.size == y.size &&
               memcmp(x.data, y.data, x.size) == 0;
    cli_free(&x);
    cli_free(&y);
    return same;
}

// ---- a decoder of the three layouts, from nvfp4.md 4 alone ----

static const void *tensor(sala__checkpoint *c, const char *x, const char *tail, const char *dtype,
                          int64_t rows, int64_t columns) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", x, tail);
    const sala__tensor *t = sala__checkpoint_find(c, name);
    CHECK(t, "%s is missing", name);
    if (!t) return NULL;
    int rank = columns ? 2 : rows ? 1 : 0;
    CHECK(strcmp(t->dtype, dtype) == 0, "%s has dtype %s", name, t->dtype);
    CHECK(t->rank == rank && (rank < 1 || t->shape[0] == rows) &&
              (rank < 2 || t->shape[1] == columns),
          "%s has another shape", name);
    return t->data;
}

static float decode_fp4(const uint8_t *codes, const uint8_t *scales, float g, int64_t i) {
    static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    int code = i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15, b = scales[i / 16];
    double s = b < 8 ? ldexp(b, -9) : ldexp(8 + b % 8, b / 8 - 10);
    return (code & 8 ? -1 : 1) * magnitude[code & 7] * (float)s * g;
}

static float decode_gptq(const void *const *t, int64_t n, int64_t row, int64_t k) {
    const uint32_t *words = (const uint32_t *)t[0], *zeros = (const uint32_t *)t[1];
    uint32_t g = ((const uint32_t *)t[3])[k];
    int q = words[k / 8 * n + row] >> k % 8 * 4 & 15,
        z = zeros[g * (n / 8) + row / 8] >> row % 8 * 4 & 15;
    uint32_t bits = (uint32_t)((const uint16_t *)t[2])[g * n + row] << 16;
    float s;
    memcpy(&s, &bits, 4);
    return s * (float)(q - z - 1);
}

// The square of the error of a matrix in a folder, of the original's squares.
static double decode(sala__checkpoint *from, sala__checkpoint *c, const char *x, int layout,
                     int group) {
    char name[160];
    snprintf(name, sizeof name, "%s.weight", x);
    const sala__tensor *t = sala__checkpoint_find(from, name);
    int64_t n = t->shape[0], k = t->shape[1];
    double error = 0, all = 0;
    const void *p[4] = {NULL};
    float g = 0;
    if (layout == QUANT_MODELOPT) {
        p[0] = tensor(c, x, "weight", "U8", n, k / 2);
        p[1] = tensor(c, x, "weight_scale", "F8_E4M3", n, k / 16);
        p[2] = tensor(c, x, "weight_scale_2", "F32", 0, 0);
        p[3] = tensor(c, x, "input_scale", "F32", 0, 0);
        if (p[2]) memcpy(&g, p[2], 4);
    } else if (layout == QUANT_COMPRESSED) {
        p[0] = tensor(c, x, "weight_packed", "U8", n, k / 2);
        p[1] = tensor(c, x, "weight_scale", "F8_E4M3", n, k / 16);
        p[2] = p[3] = tensor(c, x, "weight_global_scale", "F32", 1, 0);
        if (p[2]) memcpy(&g, p[2], 4), g = 1 / g;
    } else {
        p[0] = tensor(c, x, "qweight", "I32", k / 8, n);
        p[1] = tensor(c, x, "qzeros", "I32", k / group, n / 8);
        p[2] = tensor(c, x, "scales", "BF16", k / group, n);
        p[3] = tensor(c, x, "g_idx", "I32", k, 0);
    }
    if (!p[0] || !p[1] || !p[2] || !p[3]) return -1;
    for (int64_t i = 0; i < n * k; i++) {
        double w = (double)sala_bf16_f32(((const uint16_t *)t->data)[i]);
        double q = layout == QUANT_GPTQ_V1
                       ? (double)decode_gptq(p, n, i / k, i % k)
                       : (double)decode_fp4((const uint8_t *)p[0], (const uint8_t *)p[1], g, i);
        error += (q - w) * (q - w);
        all += w * w;
    }
    return error / all;
}

// Everything that the report says of a folder's weights is so; the other tensors are the original's.
static void check_folder(const char *out, int layout, int group, double least, double most,
                         const char *kept, int count) {
    sala__env none = {0};
    sala__checkpoint from, c;
    sala__json j;
    sala_error err;
    char path[600];
    int matrices = 0;
    snprintf(path, sizeof path, "%s/quantize_report.json", out);
    CHECK(sala__checkpoint_open(&none, TINY, &from, &err) == 0, "%s", err.text);
    CHECK(sala__checkpoint_open(&none, out, &c, &err) == 0, "%s", err.text);
    CHECK(sala__json_file(&none, path, 1 << 20, &j, &err) == 0, "%s", err.text);
    int layers = sala__json_get(&j, 0, "layers");
    for (int l = j.nodes[layers].child; l >= 0; l = j.nodes[l].next)
        for (int t = j.nodes[sala__json_get(&j, l, "tensors")].child; t >= 0; t = j.nodes[t].next) {
            const char *name = sala__json_text(&j, sala__json_get(&j, t, "name"));
            double says = j.nodes[sala__json_get(&j, t, "weight_error")].number;
            double is = decode(&from, &c, name, layout, group);
            // INT4 is rounded to BF16 once more by the engine, not by this decoder.
            CHECK(fabs(is / says - 1) < (layout == QUANT_GPTQ_V1 ? 0.02 : 1e-4), "%s: %g, not %g",
                  name, is, says);
            CHECK(is > least && is < most, "%s: error %g", name, is);
            matrices++;
        }
    CHECK(matrices == count, "%d matrices", matrices);
    for (size_t i = 0; i < from.tensor_count; i++) {
        const sala__tensor *a = &from.tensors[i], *b = sala__checkpoint_find(&c, a->name);
        int linear = strstr(a->name, "_proj") || strstr(a->name, "o_gate");
        if (linear && !strstr(a->name, kept)) continue;
        CHECK(b && a->bytes == b->bytes && memcmp(a->data, b->data, (size_t)a->bytes) == 0,
              "%s is not the original's", a->name);
    }
    sala__json_free(&j);
    sala__checkpoint_close(&from);
    sala__checkpoint_close(&c);
}

static int config_says(const char *out, const char *file, const char *what) {
    cli_buffer text = {NULL, 0, 0};
    char path[600];
    snprintf(path, sizeof path, "%s/%s", out, file);
    int found = there(path) && cli_read_file(path, &text) == 0 && strstr(text.data, what) != NULL;
    cli_free(&text);
    return found;
}

static void layouts(void) {
    folder_make();
    CHECK(run(TINY, in_folder("a"),
              SMALL "--layout compressed-tensors --method rtn --keep *.3.mlp.*") == 0,
          "%s", said);
    quant_shard_most = 2000000;
    check_folder(in_folder("a"), QUANT_COMPRESSED, 16, 0.004, 0.012, "layers.3.mlp", 61);
    CHECK(config_says(in_folder("a"), "config.json", "nvfp4-pack-quantized"), "no format");
    CHECK(config_says(in_folder("a"), "config.json",
                      "[\"lm_head\", \"model.layers.3.mlp.gate_proj\", "),
          "not ignored");
    CHECK(config_says(in_folder("a"), "config.json", "\"dynamic\": \"local\""), "no activations");
    CHECK(run(TINY, in_folder("b/"),
              SMALL "--format int4 --group 32 --asym --act-order --keep *.layers.0.*") == 0,
          "%s", said);
    check_folder(in_folder("b"), QUANT_GPTQ_V1, 32, 0.002, 0.2, "layers.0.", 56);
    CHECK(config_says(in_folder("b"), "config.json", "\"rms_norm_eps\": 1e-06"),
          "config.json changed");
    CHECK(config_says(in_folder("b"), "quantize_config.json", "\"sym\": false"),
          "no quantize_config.json");
    CHECK(there(in_folder("b/model.safetensors.index.json")), "one file");
    CHECK(there(in_folder("b/tokenizer.json")) && !there(in_folder("b/golden.json")),
          "other files");
    CHECK(!there(in_folder("b.partial")), "b.partial is left");
    quant_shard_most = 5000000000;
    folder_remove();
}

static void stop_and_resume(void) {
    folder_make();
    CHECK(run(TINY, in_folder("whole"), SMALL) == 0, "%s", said);
    CHECK(!strstr(said, "layer 8 of 8: 0.0 s"), "%s", said);
    check_folder(in_folder("whole"), QUANT_MODELOPT, 16, 0.004, 0.1, "no", 64);
    CHECK(config_says(in_folder("whole"), "hf_quant_config.json", "\"NVFP4\""),
          "no hf_quant_config.json");
    CHECK(run(TINY, in_folder("whole"), SMALL) == 1 && strstr(said, "exists"), "%s", said);
    // Ctrl-C after the third layer.
    pid_t child = start(TINY, in_folder("cut"), SMALL, 0);
    for (int i = 0; i < 6000 && !there(in_folder("cut.partial/layer-002")); i++) usleep(5000);
    kill(child, SIGINT);
    CHECK(finish(child) == 130 && strstr(said, "goes on with"), "%s", said);
    CHECK(!there(in_folder("cut")) && there(in_folder("cut.partial/layer-002")), "cut is there");
    CHECK(!there(in_folder("cut.partial/layer-007")), "it did not stop");
    CHECK(run(TINY, in_folder("cut"), SMALL "--damp 0.02") == 1 && strstr(said, "other settings"),
          "%s", said);
    // One of its files is damaged: that layer alone is done again.
    FILE *f = fopen(in_folder("cut.partial/layer-001"), "r+b");
    CHECK(f && fseek(f, 5000, SEEK_SET) == 0 && fputc(77, f) == 77 && fclose(f) == 0, "no file");
    // The disk is full when the model is written: nothing of it stays, the layers do.
    CHECK(finish(start(TINY, in_folder("cut"), SMALL, 2000000)) == 3 &&
              strstr(said, "cannot write"),
          "%s", said);
    CHECK(strstr(said, "layer-001 is damaged") && !strstr(said, "layer 1 of 8") &&
              strstr(said, "layer 2 of 8") && !strstr(said, "layer 3 of 8") &&
              strstr(said, "layer 8 of 8"),
          "%s", said);
    CHECK(!there(in_folder("cut")) && !there(in_folder("cut.partial/model")),
          "half a model is left");
    CHECK(run(TINY, in_folder("cut"), SMALL) == 0 && !strstr(said, "layer 8 of 8"), "%s", said);
    CHECK(same_file(in_folder("cut/model.safetensors"), in_folder("whole/model.safetensors")),
          "other bits");
    CHECK(same_file(in_folder("cut/config.json"), in_folder("whole/config.json")), "other bits");
    folder_remove();
}

static void refusals(void) {
    static const struct {
        const char *options;
        int code;
        const char *says;
    } cases[] = {
        {"--calib CONTRIBUTING.md --length 65536", 1, "less than one sequence"},
        {"--calib /dev/null", 1, "is empty"},
        {"--calib /nowhere", 1, "cannot open"},
        {"--calib CONTRIBUTING.md --length 64 --samples 1 --damp 0", 1,
         "layer 0, q, k, v and gate: the Hessian is not positive definite"},
        {"", 2, "needs --calib"},
        {"--format int5", 2, "unknown 'int5'"},
        {"--clib x", 2, "did you mean --calib"},
        {"--calib x --group 64", 2, "for --format int4"},
        {"--calib x --format int4 --group 48", 2, "none of 32, 64, 128"},
        {"--calib x --format int4 --layout modelopt", 2, "has no int4"},
        {"--calib x --method rtn --four-over-six gptq", 2, "is for --method gptq"},
        {"--calib x --damp -1", 2, "not a number from 0 to 1"},
        {"--calib CONTRIBUTING.md --keep *", 1, "nothing to be quantised"},
        {"--calib x --length 63", 2, "64 to"},
    };
    folder_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int code = run(TINY, in_folder("out"), cases[i].options);
        CHECK(code == cases[i].code && strstr(said, cases[i].says), "%s: %d, %s", cases[i].options,
              code, said);
        CHECK(!there(in_folder("out")), "%s left a folder", cases[i].options);
        char command[300];
        snprintf(command, sizeof command, "rm -rf '%s'", in_folder("out.partial"));
        if (system(command)) perror(command);
    }
    CHECK(run("/nowhere", in_folder("out"), "--calib CONTRIBUTING.md") == 1, "%s", said);
    CHECK(run(TINY, in_folder("none/out"), SMALL) == 3 && strstr(said, "cannot create"), "%s",
          said);
    CHECK(run(TINY, "", SMALL) == 2 && strstr(said, "name of a folder"), "%s", said);
    // Killed before it wrote anything: an empty OUT.partial is in nobody's way.
    CHECK(mkdir(in_folder("out.partial"), 0777) == 0 &&
              run(TINY, in_folder("out"), "--method rtn --keep *.[1-7].*") == 0,
          "%s", said);
    folder_remove();
}

// sala-tiny with one number of a tensor changed.
static void copy_with(const char *to, const char *name, float value) {
    sala__checkpoint c;
    sala_error err;
    char path[600];
    cli_buffer text = {NULL, 0, 0};
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json",
                                        "model.safetensors"};
    CHECK(mkdir(to, 0777) == 0 && sala__checkpoint_open(&(sala__env){0}, TINY, &c, &err) == 0, "%s",
          to);
    const sala__tensor *t = sala__checkpoint_find(&c, name);
    size_t at = (size_t)((const char *)t->data - (const char *)c.shards[0].file.data);
    uint16_t bits = sala_f32_bf16(value);
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, TINY "/%s", files[i]);
        text.size = 0;
        cli_read_file(path, &text);
        if (i == 3) memcpy(text.data + at, &bits, 2);
        snprintf(path, sizeof path, "%s/%s", to, files[i]);
        CHECK(quant_write_file(path, text.data, text.size) == 0, "%s", path);
    }
    cli_free(&text);
    sala__checkpoint_close(&c);
}

static void bad_numbers(void) {
    folder_make();
    copy_with(in_folder("nan"), "model.layers.5.mlp.up_proj.weight", NAN);
    CHECK(run(in_folder("nan"), in_folder("out"), SMALL) == 1 &&
              strstr(said, "model.layers.5.mlp.up_proj.weight: row 0, column 0 is NaN"),
          "%s", said);
    copy_with(in_folder("inf"), "model.layers.1.input_layernorm.weight", 3e38f);
    CHECK(run(in_folder("inf"), in_folder("out"), SMALL) == 1 &&
              strstr(said, "layer 1: the input of q, k, v and gate is NaN or infinite"),
          "%s", said);
    CHECK(!there(in_folder("out")), "a folder is left");
    folder_remove();
}

TEST_MAIN(TEST(golden_block), TEST(small_and_empty_blocks), TEST(int4_grids), TEST(gptq_static),
          TEST(gptq_four_over_six), TEST(gptq_act_order), TEST(gptq_int4),
          TEST(not_positive_definite), TEST(layouts), TEST(stop_and_resume), TEST(refusals),
          TEST(bad_numbers))
#endif
