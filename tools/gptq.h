/*  gptq.h - the arithmetic of tools/quantize.c: grids of NVFP4 and INT4, GPTQ, errors.

    After sala.h with its implementation; needs LAPACKE and OpenBLAS. */
#ifndef SALA_GPTQ_H
#define SALA_GPTQ_H

#include <cblas.h>
#include <lapacke.h>

/* ---- settings ------------------------------------------------------------------------------- */

enum { QUANT_OFF, QUANT_MSE, QUANT_GPTQ }; // Four Over Six: how 4 or 6 is judged
enum { QUANT_MODELOPT, QUANT_COMPRESSED, QUANT_GPTQ_V1 };
enum { QUANT_SETS = 4, QUANT_MOST = 8 }; // inputs of a layer; matrices of a layer at most
enum { QUANT_BLOCK = 128, QUANT_ROWS = 32 };

typedef struct quant_settings {
    const char *in, *out, *calib;
    int format, gptq, act_order, asym, layout, four_six;
    int group; // of INT4; -1: whole rows
    int length, samples;
    double damp;          // added to the diagonal of H, in units of its mean
    const char *keep[16]; // patterns of matrices that stay as they are
    int keep_count;
} quant_settings;

// One matrix of a layer, in numbers that a file can hold: offsets are those in the layer's memory.
typedef struct quant_record {
    char name[96];               // without ".weight"
    int32_t item, set, n, k;     // item: see sala__item_at
    int32_t group;               // k that share a scale
    float divisor, global;       // NVFP4: 6 S / max |w| of the set, and 1 / that
    float in_divisor, in_global; // 2688 / max |x|, and 1 / that; 0: not known
    double output[2], weight[2]; // sums of squares: of the error, of all
    int64_t blocks, fours;       // NVFP4: blocks of 16, those whose largest number is mapped to 4
    uint64_t codes, scales, zeros, alpha; // offsets, 0: none; as a sala_weight has them
} quant_record;

typedef struct quant_layer {
    char magic[8];
    uint64_t hash, bytes; // of all that follows `hash`; of everything
    int32_t layer, count;
    double seconds;
    quant_record record[QUANT_MOST];
} quant_layer;

static void *quant_at(const quant_layer *l, uint64_t offset) {
    return offset ? (char *)(uintptr_t)l + offset : NULL;
}

static sala_weight quant_weight(const quant_layer *l, const quant_record *r, int format) {
    sala_weight w = sala_plain_weight(quant_at(l, r->codes), format, r->n, r->k);
    w.scale = quant_at(l, r->scales);
    w.zero = (const uint8_t *)quant_at(l, r->zeros);
    w.alpha = (const float *)quant_at(l, r->alpha);
    w.group = r->group;
    return w;
}

/* ---- numbers ------------------------------------------------------------------------------------
   The grid of a group: the numbers that its codes can mean. All in FP32, rounded to nearest, in the
   order of nvfp4.md 1.3: enc = 6 S / max, dec = 1 / enc, s = E4M3(b / 6 * enc), x * (1 / (dec * s)). */

typedef struct quant_grid {
    float inverse, step, global; // a code's value is code * step * global; NVFP4's step is E4M3
    int zero;
    uint16_t scale; // as it is stored
} quant_grid;

static quant_grid quant_fp4_grid(uint8_t scale, float global) {
    float step = sala_e4m3_f32(scale);
    quant_grid g = {step > 0 ? 1 / (global * step) : 0, step, global, 0, scale};
    return g;
}

// The grid whose 6 (or, `four`, whose 4) is the largest number b of a group.
static quant_grid quant_fp4_fit(float b, float divisor, float global, int four) {
    float s = b / 6 * divisor;
    uint8_t scale = sala_f32_e4m3(four ? s * 1.5f : s);
    if (b > 0 && scale == 0) scale = 1; // or a block of small numbers would be erased
    return quant_fp4_grid(b > 0 ? scale : 0, global);
}

static quant_grid quant_int4_grid(uint16_t scale, int zero) {
    float step = sala_bf16_f32(scale);
    quant_grid g = {step > 0 ? 1 / step : 0, step, 1, zero, scale};
    return g;
}

// From the least and the largest number of a group. Zeros are 1 .. 15: GPTQ files hold zero - 1.
static quant_grid quant_int4_fit(const float *x, int count, int asym) {
    float low = 0, high = 0;
    for (int i = 0; i < count; i++) {
        if (x[i] < low) low = x[i];
        if (x[i] > high) high = x[i];
    }
    if (!asym) {
        float most = high > -low ? high : -low;
        return quant_int4_grid(sala_f32_bf16(2 * most / 15), 8);
    }
    uint16_t scale = sala_f32_bf16((high - low) / 15);
    float step = sala_bf16_f32(scale);
    int zero = step > 0 ? (int)rintf(-low / step) : 8;
    if (zero < 1) { // all above 0: code 0 is of no use
        scale = sala_f32_bf16(high / 14);
        zero = 1;
    }
    return quant_int4_grid(scale, zero > 15 ? 15 : zero);
}

static inline float quant_round(int format, const quant_grid *g, float x, uint8_t *code) {
    if (format == SALA_NVFP4) {
        *code = sala_f32_e2m1(x * g->inverse);
        return sala_e2m1_f32(*code) * g->step * g->global;
    }
    float c = rintf(x * g->inverse) + (float)g->zero;
    *code = (uint8_t)(c < 0 ? 0 : c > 15 ? 15 : (int)c);
    return sala_round((float)(*code - g->zero) * g->step);
}

static float quant_largest(const float *x, int64_t count) {
    float b = 0;
    for (int64_t i = 0; i < count; i++)
        if (fabsf(x[i]) > b) b = fabsf(x[i]);
    return b;
}

// The grid of a group by its own numbers alone. *four: NVFP4 chose 4, by the sum of squared errors.
static quant_grid quant_fit(const quant_settings *s, const quant_record *r, const float *x,
                            int *four) {
    *four = 0;
    if (s->format == SALA_INT4) return quant_int4_fit(x, r->group, s->asym);
    float b = quant_largest(x, 16), error[2] = {0, 0};
    quant_grid grid[2] = {quant_fp4_fit(b, r->divisor, r->global, 0),
                          quant_fp4_fit(b, r->divisor, r->global, 1)};
    for (int c = 0; c < 2; c++)
        for (int i = 0; i < 16; i++) {
            uint8_t code;
            float e = quant_round(SALA_NVFP4, &grid[c], x[i], &code) - x[i];
            error[c] += e * e;
        }
    *four = s->four_six != QUANT_OFF && error[1] < error[0]; // ties go to 6
    return grid[*four];
}

static float quant_element(const sala_weight *w, int64_t i) {
    if (w->format == SALA_F32) return ((const float *)w->data)[i];
    uint16_t h = ((const uint16_t *)w->data)[i];
    return w->format == SALA_F16 ? sala_f16_f32(h) : sala_bf16_f32(h);
}

/* ---- GPTQ ---------------------------------------------------------------------------------------
   Columns are treated one after the other; the error of one is made up for by all that follow:
   e = (w_i - Q(w_i)) / U_ii, w_j -= e U_ij, where U is upper triangular and U^T U the inverse of H.
   Rows do not depend on each other. */

typedef struct quant_job {
    const quant_settings *s;
    quant_record *r;
    sala_weight to;          // what is written
    float *w;                // [n, k] columns in the order of treatment
    float *e;                // [n, QUANT_BLOCK] errors of a block of columns
    const float *u;          // [k, k]
    const int32_t *order;    // [k] column of the file; NULL: natural
    int from, count;         // the block
    const sala_weight *have; // the original
} quant_job;

static void quant_put_code(const quant_job *job, int64_t row, int column, uint8_t code) {
    uint8_t *at = (uint8_t *)(uintptr_t)job->to.data + (row * job->r->k + column) / 2;
    *at = (uint8_t)(column & 1 ? (*at & 15) | code << 4 : (*at & 0xF0) | code);
}

static void quant_put_grid(const quant_job *job, int64_t row, int group, const quant_grid *g) {
    int64_t at = row * (job->r->k / job->r->group) + group;
    if (job->s->format == SALA_NVFP4)
        ((uint8_t *)(uintptr_t)job->to.scale)[at] = (uint8_t)g->scale;
    else
        ((uint16_t *)(uintptr_t)job->to.scale)[at] = g->scale;
    if (job->to.zero) ((uint8_t *)(uintptr_t)job->to.zero)[at] = (uint8_t)g->zero;
}

static quant_grid quant_get_grid(const quant_job *job, int64_t row, int group) {
    int64_t at = row * (job->r->k / job->r->group) + group;
    if (job->s->format == SALA_NVFP4)
        return quant_fp4_grid(((const uint8_t *)job->to.scale)[at], job->r->global);
    return quant_int4_grid(((const uint16_t *)job->to.scale)[at],
                           job->to.zero ? job->to.zero[at] : 8);
}

// Are grids taken when the columns before their group are done, or all at first, from w itself?
static int quant_grids_late(const quant_settings *s, const quant_record *r) {
    if (!s->gptq) return 0;
    if (s->format == SALA_NVFP4) return s->four_six == QUANT_GPTQ;
    return !s->act_order && QUANT_BLOCK % r->group == 0;
}

// Columns that stay together in activation order: single ones, scattered over the whole loop, or
// groups, which can have their grids late.
static int quant_together(const quant_settings *s, const quant_record *r) {
    return quant_grids_late(s, r) ? r->group : 1;
}

// All grids of a few rows from the original numbers, dead columns aside; without GPTQ the codes too.
static void quant_static_rows(void *context, int64_t part, int thread) {
    const quant_job *job = (const quant_job *)context;
    const quant_record *r = job->r;
    int64_t fours = 0;
    (void)thread;
    for (int64_t row = part * QUANT_ROWS; row < r->n && row < (part + 1) * QUANT_ROWS; row++) {
        for (int g = 0; g < r->k / r->group; g++) {
            const float *x = job->w + row * r->k + g * r->group;
            int four;
            quant_grid grid = quant_fit(job->s, r, x, &four);
            quant_put_grid(job, row, g, &grid);
            fours += four;
            for (int i = 0; i < r->group && !job->s->gptq; i++) {
                uint8_t code;
                quant_round(job->s->format, &grid, x[i], &code);
                quant_put_code(job, row, g * r->group + i, code);
            }
        }
    }
    __atomic_fetch_add(&job->r->fours, fours, __ATOMIC_RELAXED);
}

// 16 columns of one row with a grid: codes, errors; x is what is left of them. Returns the loss. u: of
// the first column's diagonal element.
static float quant_sixteen(int format, const quant_grid *grid, int grids, float x[16],
                           const float *u, int64_t stride, uint8_t code[16], float e[16]) {
    float loss = 0;
    for (int i = 0; i < 16; i++, u += stride + 1) {
        const quant_grid *g = &grid[grids == 1 ? 0 : i];
        e[i] = (x[i] - quant_round(format, g, x[i], &code[i])) / u[0];
        loss += e[i] * e[i];
        for (int j = 1; j < 16 - i; j++) x[i + j] -= e[i] * u[j];
    }
    return loss;
}

// Both grids of a group of 16 run through its columns; the one of less loss stays.
static quant_grid quant_try_both(const quant_job *job, const float *x, const float *u,
                                 int64_t *fours) {
    const quant_record *r = job->r;
    float b = quant_largest(x, 16), loss[2];
    quant_grid grid[2];
    for (int c = 0; c < 2; c++) {
        float copy[16], e[16];
        uint8_t code[16];
        memcpy(copy, x, sizeof copy);
        grid[c] = quant_fp4_fit(b, r->divisor, r->global, c);
        loss[c] = quant_sixteen(SALA_NVFP4, &grid[c], 1, copy, u, r->k, code, e);
    }
    *fours += loss[1] < loss[0];
    return grid[loss[1] < loss[0]];
}

// One row, the columns of a block: first + 0 .. count - 1.
static int64_t quant_block_row(const quant_job *job, int64_t row, int late) {
    const quant_record *r = job->r;
    float *w = job->w + row * r->k + job->from, *e = job->e + row * QUANT_BLOCK;
    int64_t fours = 0;
    quant_grid grid[16];
    for (int i = 0; i < job->count; i += 16) {
        int at = job->from + i, group = (job->order ? job->order[at] : at) / r->group;
        int grids = job->order && !late ? 16 : 1;
        const float *u = job->u + (int64_t)at * r->k + at;
        uint8_t code[16];
        if (late && at % r->group == 0) {
            int four;
            grid[0] = job->s->format == SALA_NVFP4 ? quant_try_both(job, w + i, u, &fours)
                                                   : quant_fit(job->s, r, w + i, &four);
            quant_put_grid(job, row, group, &grid[0]);
        }
        for (int j = 0; j < grids; j++)
            grid[j] = quant_get_grid(job, row, grids > 1 ? job->order[at + j] / r->group : group);
        quant_sixteen(job->s->format, grid, grids, w + i, u, r->k, code, e + i);
        for (int j = 0; j < 16; j++) {
            quant_put_code(job, row, job->order ? job->order[at + j] : at + j, code[j]);
            const float *uj = u + (int64_t)j * r->k - i; // of the block's first column
            for (int c = i + 16; c < job->count; c++) w[c] -= e[i + j] * uj[c];
        }
    }
    return fours;
}

static void quant_block_rows(void *context, int64_t part, int thread) {
    const quant_job *job = (const quant_job *)context;
    int late = quant_grids_late(job->s, job->r);
    int64_t fours = 0;
    (void)thread;
    for (int64_t row = part * QUANT_ROWS; row < job->r->n && row < (part + 1) * QUANT_ROWS; row++)
        fours += quant_block_row(job, row, late);
    __atomic_fetch_add(&job->r->fours, fours, __ATOMIC_RELAXED);
}

// The upper triangle of sums becomes H.
static void quant_finish_hessian(float *h, int64_t k, double tokens) {
    float scale = (float)(2 / tokens);
    for (int64_t i0 = 0; i0 < k; i0 += 64)
        for (int64_t j0 = i0; j0 < k; j0 += 64)
            for (int64_t i = i0; i < i0 + 64 && i < k; i++)
                for (int64_t j = j0 > i ? j0 : i; j < j0 + 64 && j < k; j++)
                    h[j * k + i] = h[i * k + j] *= scale;
}

static const float *quant_sort_diagonal; // of qsort's comparison

static int quant_larger_first(const void *a, const void *b) {
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    float x = quant_sort_diagonal[i], y = quant_sort_diagonal[j];
    return x > y ? -1 : x < y ? 1 : i - j;
}

// Columns by descending diagonal of H, or `together` of them by the sum of theirs.
static int32_t *quant_order(const float *h, int k, int together) {
    float *diagonal = (float *)cli_resize(NULL, (size_t)k * sizeof *diagonal);
    int32_t *order = (int32_t *)cli_resize(NULL, (size_t)k * sizeof *order);
    memset(diagonal, 0, (size_t)k * sizeof *diagonal);
    for (int64_t i = 0; i < k; i++) diagonal[i / together] += h[i * k + i];
    for (int i = 0; i < k / together; i++) order[i] = i;
    quant_sort_diagonal = diagonal;
    qsort(order, (size_t)(k / together), sizeof *order, quant_larger_first);
    for (int i = k - 1; i >= 0; i--) order[i] = order[i / together] * together + i % together;
    free(diagonal);
    return order;
}

// U [k, k] from H, its rows and columns in the given order. H = R R^T with R upper triangular, which
// is a Cholesky decomposition from the last row to the first; U = R^-1. Returns 0, 1 when H is not
// positive definite, -1 without memory.
static int quant_factor(const float *h, int k, const int32_t *order, double damp, float *u) {
    int64_t n = k;
    double mean = 0, *a = (double *)malloc((size_t)n * (size_t)n * sizeof *a);
    if (!a) return -1;
    for (int64_t i = 0; i < n; i++) mean += (h[i * n + i] > 0 ? h[i * n + i] : 1) / (double)n;
    for (int64_t i = 0; i < n; i++) { // reversed: a[i, j] = H[order[n - 1 - i], order[n - 1 - j]]
        int64_t hi = order ? order[n - 1 - i] : n - 1 - i;
        for (int64_t j = 0; j < n; j++)
            a[i * n + j] = h[hi * n + (order ? order[n - 1 - j] : n - 1 - j)];
        if (!(h[hi * n + hi] > 0)) a[i * n + i] = 1; // a dead channel: all of it is 0
        a[i * n + i] += damp * mean;
    }
    int bad = LAPACKE_dpotrf_work(LAPACK_COL_MAJOR, 'L', k, a, k) != 0;
    if (!bad) bad = LAPACKE_dtrtri_work(LAPACK_COL_MAJOR, 'L', 'N', k, a, k) != 0;
    for (int64_t i = 0; i < n && !bad; i++) {
        bad |= !isfinite(a[i * n + i]);
        for (int64_t j = 0; j < n; j++)
            u[i * n + j] = j < i ? 0 : (float)a[(n - 1 - j) * n + n - 1 - i];
    }
    free(a);
    return bad;
}

// A matrix by GPTQ (u) or rounding. job->w holds the numbers, and is used up.
static void quant_matrix(sala__cpu *pool, quant_job *job) {
    const quant_record *r = job->r;
    int64_t parts = (r->n + QUANT_ROWS - 1) / QUANT_ROWS;
    job->r->blocks = job->s->format == SALA_NVFP4 ? (int64_t)r->n * r->k / 16 : 0;
    if (!quant_grids_late(job->s, r)) sala__parallel(pool, parts, quant_static_rows, job);
    if (!job->s->gptq) return;
    if (job->order) { // the grids are made: now the order of treatment
        float *row = (float *)cli_resize(NULL, (size_t)r->k * sizeof *row);
        for (int64_t i = 0; i < r->n; i++) {
            memcpy(row, job->w + i * r->k, (size_t)r->k * sizeof *row);
            for (int c = 0; c < r->k; c++) job->w[i * r->k + c] = row[job->order[c]];
        }
        free(row);
    }
    for (job->from = 0; job->from < r->k; job->from += QUANT_BLOCK) {
        int rest = r->k - job->from - QUANT_BLOCK;
        job->count = rest < 0 ? QUANT_BLOCK + rest : QUANT_BLOCK;
        sala__parallel(pool, parts, quant_block_rows, job);
        if (rest > 0)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, r->n, rest, QUANT_BLOCK, -1,
                        job->e, QUANT_BLOCK,
                        job->u + (int64_t)job->from * r->k + job->from + QUANT_BLOCK, r->k, 1,
                        job->w + job->from + QUANT_BLOCK, r->k);
    }
}

static double quant_ratio(const double sums[2]) {
    return sums[1] > 0 ? sums[0] / sums[1] : 0;
}

// Sums of squares of error and weight, by themselves and as the output sees them: tr(E H E^T),
// tr(W H W^T). w and spare: [n, k] scratch.
static void quant_measure(quant_job *job, const float *h, float *spare) {
    quant_record *r = job->r;
    for (int what = 0; what < 2; what++) {
        double sum = 0, seen = 0;
        for (int64_t row = 0; row < r->n; row++) {
            float *e = job->w + row * r->k;
            for (int k = 0; k < r->k; k++) e[k] = quant_element(job->have, row * r->k + k);
            for (int k = 0; k < r->k && what == 0; k += 16) {
                float q[16];
                sala__load_weight4(&job->to, (int)row, k, q);
                for (int i = 0; i < 16; i++) e[k + i] -= q[i] * job->to.alpha[row];
            }
            for (int k = 0; k < r->k; k++) sum += (double)e[k] * (double)e[k];
        }
        if (h)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, r->n, r->k, r->k, 1, job->w,
                        r->k, h, r->k, 0, spare, r->k);
        for (int64_t i = 0; h && i < (int64_t)r->n * r->k; i++)
            seen += (double)job->w[i] * (double)spare[i];
        r->weight[what] = sum;
        r->output[what] = seen;
    }
}

// What a tensor of a GPTQ file holds (nvfp4.md 4.3), `kind` is the end of its name.
static void *quant_gptq_words(const quant_layer *l, const quant_record *r, const char *kind,
                              int64_t bytes) {
    const uint8_t *codes = (const uint8_t *)quant_at(l, r->codes);
    const uint8_t *zeros = (const uint8_t *)quant_at(l, r->zeros);
    const uint16_t *scales = (const uint16_t *)quant_at(l, r->scales);
    int64_t n = r->n, k = r->k, groups = k / r->group;
    uint32_t *words = (uint32_t *)cli_resize(NULL, (size_t)bytes);
    memset(words, 0, (size_t)bytes);
    if (strcmp(kind, "qweight") == 0) {
        for (int64_t row = 0; row < n; row++)
            for (int64_t i = 0; i < k / 8; i++) // eight codes are four bytes, in the order wanted
                for (int b = 0; b < 4; b++)
                    words[i * n + row] |= (uint32_t)codes[row * k / 2 + i * 4 + b] << 8 * b;
    } else if (strcmp(kind, "qzeros") == 0) {
        for (int64_t row = 0; row < n; row++)
            for (int64_t g = 0; g < groups; g++)
                words[g * (n / 8) + row / 8] |=
                    (uint32_t)((zeros ? zeros[row * groups + g] : 8) - 1) << row % 8 * 4;
    } else if (strcmp(kind, "scales") == 0) {
        for (int64_t row = 0; row < n; row++)
            for (int64_t g = 0; g < groups; g++)
                ((uint16_t *)words)[g * n + row] = scales[row * groups + g];
    } else {
        for (int64_t i = 0; i < k; i++) words[i] = (uint32_t)(i / r->group);
    }
    return words;
}

#endif
