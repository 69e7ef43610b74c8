/*  quantize.c - `sala-quantize IN OUT`: a model in 4 bits, NVFP4 or INT4, by GPTQ or rounding.

    cc -std=gnu11 -O3 -march=native tools/quantize.c -llapacke -lopenblas -lm -lpthread

    For each layer: the engine runs the layer over the calibration text and every input x of a matrix
    product goes into a Hessian H = 2/n sum x x^T; GPTQ rounds the layer's matrices so that x w^T
    changes little; the engine runs the layer again with what came out, which the next layer reads.
    The result of a layer is a file in OUT.partial, from which a later run goes on. At the end the
    model's folder is written there too, and renamed.

    Resident, for the 9B: the hidden states of the calibration text (samples * length * hidden * 2
    bytes: 1 GiB), a layer's Hessians in FP32 (K = 16384: 1 GiB; while it is factored, 4 GiB), one
    matrix in FP32, and what has come out so far (5 GB at the end). The model itself is mapped.

    Sections: the engine, a layer, its file, the folder, the report, the calibration text, main. The
    arithmetic is in gptq.h. */
#define SALA_IMPLEMENTATION
#include "../sala.h"

#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wunused-function" // of what the commands share, not all is needed
#endif
#include "cli.h"
#ifdef __GNUC__
#pragma GCC diagnostic warning "-Wunused-function"
#endif

#include "gptq.h"

#include <dirent.h>
#include <fnmatch.h>

/* ---- the engine ------------------------------------------------------------------------------ */

static const char *const quant_set_names[QUANT_SETS] = {"q, k, v and gate", "o_proj", "gate and up",
                                                        "down_proj"};

typedef struct quantiser {
    quant_settings set;
    sala *engine;
    sala__cpu pool;   // threads of GPTQ
    uint64_t made_of; // hash of settings, model and calibration text
    int32_t *tokens;  // [samples, length]
    int samples;
    sala_act *hidden; // [samples, length, hidden] what the next layer reads
    int32_t *pages;   // [blocks] of the one sequence
    int layer, collecting;
    float *hessian[QUANT_SETS]; // [k, k] sums of x x^T: the upper triangle, until they are finished
    float amax[QUANT_SETS];
    float *x; // [length, widest k] rows on their way into a Hessian
    int code; // an exit code that the observer met
    double started;
    int began;          // the layer at which the work of this run began
    quant_layer **done; // [layers]
} quantiser;

static int quant_layers(const quantiser *q) {
    return q->engine->config.dims.layers;
}

static int quant_set_width(const quantiser *q, int set) {
    const sala__layer *l = &q->engine->weights.layers[q->layer];
    return set == 1 ? l->o.k : set == 3 ? l->mlp_down.k : q->engine->config.dims.hidden;
}

static void quant_progress(const quantiser *q, const char *what, double part) {
    char text[64];
    double all = quant_layers(q), done = (q->layer + part - q->began) / (all - q->began);
    snprintf(text, sizeof text, "layer %d of %d: %s", q->layer + 1, quant_layers(q), what);
    double spent = cli_now() - q->started;
    cli_progress(text, (q->layer + part) / all, done > 0 ? spent * (1 - done) / done : -1);
}

// Add the rows that the matrices of a set read.
static void quant_collect(quantiser *q, int set, const sala_act *x, int rows) {
    sala *s = q->engine;
    int k = quant_set_width(q, set);
    int64_t count = (int64_t)rows * k;
    const sala_act *from = x;
    sala_act *copy = NULL;
    if (s->on_gpu) {
        copy = (sala_act *)cli_resize(NULL, (size_t)count * sizeof *copy);
        sala_error *e = &s->gpu.error;
        if (!e->code)
            sala__cuda_download(&s->gpu.cuda, copy, sala__on_gpu(x), (size_t)count * sizeof *x, e);
        if (!e->code) sala__cuda_wait(&s->gpu.cuda, e);
        if (e->code) q->code = cli_fail(CLI_FAILED, "%s", e->text);
        from = copy;
    }
    for (int64_t i = 0; i < count && !q->code; i++) {
        q->x[i] = sala_act_f32(from[i]);
        if (!(fabsf(q->x[i]) <= FLT_MAX))
            q->code = cli_fail(CLI_FAILED, "layer %d: the input of %s is NaN or infinite", q->layer,
                               quant_set_names[set]);
        else if (fabsf(q->x[i]) > q->amax[set])
            q->amax[set] = fabsf(q->x[i]);
    }
    free(copy);
    if (q->hessian[set] && !q->code)
        cblas_ssyrk(CblasRowMajor, CblasUpper, CblasTrans, k, rows, 1, q->x, k, 1, q->hessian[set],
                    k);
}

static void quant_observe(void *user, int operation, const void *args) {
    quantiser *q = (quantiser *)user;
    const sala__weights *w = q->engine->on_gpu ? &q->engine->gpu_weights : &q->engine->weights;
    if (!q->collecting || q->code) return;
    if (operation == SALA__OP_gemm) {
        const sala_gemm_args *a = (const sala_gemm_args *)args;
        quant_collect(q, 0, a->x, a->rows);
    } else if (operation == SALA__OP_gemm_norm) {
        const sala_gemm_norm_args *a = (const sala_gemm_norm_args *)args;
        quant_collect(q, a->w.data == w->layers[q->layer].o.data ? 1 : 3, a->input, a->norm.rows);
    } else if (operation == SALA__OP_gemm_swiglu) {
        const sala_gemm_swiglu_args *a = (const sala_gemm_swiglu_args *)args;
        quant_collect(q, 2, a->x, a->rows);
    }
}

// The pass of one whole calibration sequence.
static void quant_pass(quantiser *q, int sample, sala__pass *p) {
    sala *s = q->engine;
    int n = q->set.length;
    memset(p, 0, sizeof *p);
    sala__step_layout(s, s->plan.rows);
    for (int i = 0; i < n; i++) sala__row(s, i, 0, q->tokens[(int64_t)sample * n + i], i);
    sala_seq seq = {0, 0, n, n, 0, 0, s->on_gpu ? s->page_tables : q->pages};
    s->seqs[0] = seq;
    p->rows = sala__rows(s, n, 1, 0);
    p->bucket = n;
    p->on_device = &p->rows;
    if (!s->on_gpu) return;
    s->gpu.prefill = s->gpu.seqs = 1;
    s->gpu.rows = n;
    p->on_device = sala__publish_rows(s, &p->rows);
    sala__send_step(s);
}

static void quant_copy(quantiser *q, int to_engine, sala_act *host) {
    sala *s = q->engine;
    size_t bytes = (size_t)q->set.length * (size_t)s->config.dims.hidden * sizeof *host;
    sala_error *e = &s->gpu.error;
    if (!s->on_gpu)
        memcpy(to_engine ? s->x : host, to_engine ? host : s->x, bytes);
    else if (!e->code && to_engine)
        sala__cuda_upload(&s->gpu.cuda, sala__on_gpu(s->x), host, bytes, e);
    else if (!e->code)
        sala__cuda_download(&s->gpu.cuda, host, sala__on_gpu(s->x), bytes, e);
    if (s->on_gpu && !e->code) sala__cuda_wait(&s->gpu.cuda, e);
}

// One sequence through q->layer (-1: the embedding), from q->hidden; back to it if `keep`.
static void quant_run_one(quantiser *q, int sample, int keep) {
    sala *s = q->engine;
    const sala_dims *m = &s->config.dims;
    const sala__weights *w = s->on_gpu ? &s->gpu_weights : &s->weights;
    sala_act *hidden = q->hidden + (int64_t)sample * q->set.length * m->hidden;
    sala__pass p;
    quant_pass(q, sample, &p);
    if (q->layer < 0) {
        sala_embed_args embed = {m, p.on_device, w->embed, s->x};
        sala__op(s, SALA__OP_embed, &embed);
        quant_copy(q, 0, hidden);
        return;
    }
    quant_copy(q, 1, hidden);
    int index = 0; // among the layers of its kind
    for (int l = 0; l < q->layer; l++) index += w->layers[l].sparse == w->layers[q->layer].sparse;
    if (!w->layers[q->layer].sparse) {
        float *state = s->states + (size_t)index * (size_t)s->plan.slots * s->plan.state;
        if (s->on_gpu)
            sala__cuda_fill(&s->gpu.cuda, sala__on_gpu(state), 0, s->plan.state * 4, &s->gpu.error);
        else
            memset(state, 0, s->plan.state * 4);
    }
    sala_rope_args rope = {p.on_device, m->lin_dim, s->frequency, s->cos_sin};
    sala__op(s, SALA__OP_rope_table, &rope);
    if (m->sparse_rope) {
        rope.dim = m->head_dim;
        rope.frequency = s->sparse_frequency;
        rope.cos_sin = s->sparse_cos_sin;
        sala__op(s, SALA__OP_rope_table, &rope);
    }
    sala_norm_args norm;
    sala__norm_args(s, q->set.length, &w->layers[q->layer].input_norm, 1, &norm);
    sala__op(s, SALA__OP_norm, &norm);
    sala__run_layer(s, &p, q->layer, index);
    if (keep) quant_copy(q, 0, hidden);
}

// All sequences through q->layer. Returns an exit code.
static int quant_run(quantiser *q, int keep, const char *what, double from, double to) {
    sala *s = q->engine;
    sala_error err;
    if (s->on_gpu && sala__cuda_enter(&s->gpu.cuda, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    for (int i = 0; i < q->samples && !q->code && !cli_signal; i++) {
        if (q->layer >= 0) quant_progress(q, what, from + (to - from) * i / q->samples);
        quant_run_one(q, i, keep);
        if (s->on_gpu && s->gpu.error.code) q->code = cli_fail(CLI_FAILED, "%s", s->gpu.error.text);
    }
    if (s->on_gpu) sala__cuda_leave(&s->gpu.cuda);
    return cli_signal ? 128 + cli_signal : q->code;
}

// A matrix of the layer to where a GPU's kernels read it: as BF16, with one rounding more.
static void quant_swap_gpu(sala *s, const quant_record *r, const sala_weight *w, void *slab) {
    uint16_t *plain = (uint16_t *)cli_resize(NULL, (size_t)r->n * (size_t)r->k * 2);
    sala__item item;
    for (int64_t row = 0; row < r->n; row++)
        for (int k = 0; k < r->k; k += 16) {
            float x[16];
            sala__load_weight4(w, (int)row, k, x);
            for (int c = 0; c < 16; c++)
                plain[row * r->k + k + c] = sala_f32_bf16(x[c] * w->alpha[row]);
        }
    sala_weight bf16 = sala_plain_weight(plain, SALA_BF16, r->n, r->k);
    sala__item_at(&s->config, &s->gpu_weights, r->item, &item);
    const sala_weight *gate = sala__gate_of(&item, &s->gpu_weights);
    sala__gpu_upload(&s->gpu, &bf16, slab, (void *)(uintptr_t)(gate ? gate : item.weight)->data,
                     sala__gpu_place_of(&item, &s->gpu_weights).layout);
    free(plain);
}

// What came out of a layer takes its place in the engine. Returns an exit code.
static int quant_swap(quantiser *q, const quant_layer *l) {
    sala *s = q->engine;
    sala__item item;
    sala_error *e = &s->gpu.error;
    sala__cu_memory slab = 0;
    if (s->on_gpu && sala__cuda_enter(&s->gpu.cuda, e) == 0)
        sala__cuda_alloc(&s->gpu.cuda, (size_t)SALA__SLAB, "a matrix on its way", &slab, e);
    for (int i = 0; i < l->count; i++) {
        sala_weight w = quant_weight(l, &l->record[i], q->set.format);
        sala__item_at(&s->config, &s->weights, l->record[i].item, &item);
        if (s->on_gpu && !e->code)
            quant_swap_gpu(s, &l->record[i], &w, (void *)(uintptr_t)slab);
        else if (!s->on_gpu)
            *item.weight = w;
    }
    if (!s->on_gpu) return CLI_OK;
    sala__cuda_release(&s->gpu.cuda, slab, (size_t)SALA__SLAB);
    sala__cuda_leave(&s->gpu.cuda);
    return e->code ? cli_fail(CLI_FAILED, "%s", e->text) : CLI_OK;
}

/* ---- a layer -------------------------------------------------------------------------------- */

static uint64_t quant_hash(uint64_t h, const void *data, size_t bytes) {
    const char *p = (const char *)data;
    for (uint64_t word; bytes >= 8; p += 8, bytes -= 8) {
        memcpy(&word, p, 8);
        h = sala_mix64(h ^ word);
    }
    for (; bytes; p++, bytes--) h = sala_mix64(h ^ (uint8_t)*p ^ 0x100);
    return h;
}

// Is this item a matrix of a layer, and one that is to be quantised (1) or kept (0)? -1: neither.
static int quant_wanted(const quant_settings *s, const sala__item *item) {
    char name[96];
    if (item->layer < 0 || item->k == 1) return -1;
    snprintf(name, sizeof name, "%.*s", (int)(strlen(item->name) - strlen(".weight")), item->name);
    for (int i = 0; i < s->keep_count; i++)
        if (fnmatch(s->keep[i], name, 0) == 0) return 0;
    return 1;
}

static int quant_keeps(quantiser *q, const char *pattern) { // does it fit any?
    sala *s = q->engine;
    quant_settings one = {0};
    sala__item item;
    one.keep[0] = pattern;
    one.keep_count = 1;
    for (int i = 0; i < sala__item_count(&s->config); i++)
        if (sala__item_at(&s->config, &s->weights, i, &item) && quant_wanted(&one, &item) == 0)
            return 1;
    return 0;
}

static uint64_t quant_place(uint64_t *at, int64_t bytes) { // a stretch of a layer's memory
    uint64_t here = (*at + 63) / 64 * 64;
    *at = here + (uint64_t)bytes;
    return here;
}

// The matrices of q->layer and where their results go; nothing in them yet.
static quant_layer *quant_layer_new(quantiser *q) {
    sala *s = q->engine;
    const quant_settings *set = &q->set;
    quant_layer head;
    uint64_t at = sizeof head;
    sala__item item;
    memset(&head, 0, sizeof head);
    memcpy(head.magic, "SALAQ1\n", 8);
    head.layer = q->layer;
    for (int i = 0; i < sala__item_count(&s->config); i++) {
        if (!sala__item_at(&s->config, &s->weights, i, &item)) continue;
        if (item.layer != q->layer || quant_wanted(set, &item) != 1) continue;
        quant_record *r = &head.record[head.count++];
        memcpy(r->name, item.name, strlen(item.name) - strlen(".weight"));
        r->item = i;
        const sala__layer *w = &s->weights.layers[q->layer];
        r->set = item.weight == &w->o ? 1 : item.weight == &w->mlp_down ? 3 : 0;
        if (item.weight == &w->mlp_gate || item.weight == &w->mlp_up) r->set = 2;
        r->n = item.n;
        r->k = item.k;
        r->group = set->format == SALA_NVFP4 ? 16 : set->group < 0 ? item.k : set->group;
        int64_t groups = (int64_t)r->n * (r->k / r->group);
        r->codes = quant_place(&at, (int64_t)r->n * r->k / 2);
        r->scales = quant_place(&at, groups * (set->format == SALA_NVFP4 ? 1 : 2));
        r->zeros = set->asym ? quant_place(&at, groups) : 0;
        r->alpha = quant_place(&at, (int64_t)r->n * 4);
    }
    head.bytes = at;
    quant_layer *l = (quant_layer *)cli_resize(NULL, at);
    memset(l, 0, at);
    memcpy(l, &head, sizeof head);
    return l;
}

// The scales that all matrices of a set share, so that engines can fuse them.
static void quant_shared(const quantiser *q, quant_layer *l, int set) {
    const quant_settings *s = &q->set;
    float most = 0, enc = s->four_six == QUANT_OFF ? 6 * 448 : 6 * 256;
    sala__item item;
    for (int i = 0; i < l->count; i++) {
        const quant_record *r = &l->record[i];
        sala__item_at(&q->engine->config, &q->engine->weights, r->item, &item);
        for (int64_t j = 0; j < (int64_t)r->n * r->k && r->set == set; j++)
            most = fmaxf(most, fabsf(quant_element(item.weight, j)));
    }
    for (int i = 0; i < l->count; i++) {
        quant_record *r = &l->record[i];
        float *alpha = (float *)quant_at(l, r->alpha);
        if (r->set != set) continue;
        if (s->format == SALA_NVFP4) {
            r->divisor = most > 0 ? enc / most : 1;
            r->global = 1 / r->divisor;
            r->in_divisor = q->amax[set] > 0 ? 6 * 448 / q->amax[set] : 0;
            r->in_global = r->in_divisor > 0 ? 1 / r->in_divisor : 0;
        }
        for (int row = 0; row < r->n; row++) alpha[row] = s->format == SALA_NVFP4 ? r->global : 1;
    }
}

// One matrix, and how far off it is.
static void quant_one(quantiser *q, quant_layer *l, quant_record *r, const float *h, const float *u,
                      const int32_t *order) {
    size_t cells = (size_t)r->n * (size_t)r->k;
    quant_job job;
    sala__item item;
    memset(&job, 0, sizeof job);
    sala__item_at(&q->engine->config, &q->engine->weights, r->item, &item);
    job.s = &q->set;
    job.r = r;
    job.to = quant_weight(l, r, q->set.format);
    job.have = item.weight;
    job.u = u;
    job.order = order;
    job.w = (float *)cli_resize(NULL, cells * sizeof(float));
    job.e = (float *)cli_resize(NULL, (size_t)r->n * QUANT_BLOCK * sizeof(float));
    for (size_t i = 0; i < cells; i++) job.w[i] = quant_element(item.weight, (int64_t)i);
    for (size_t k = 0; u && k < (size_t)r->k; k++)
        for (size_t i = k; i < cells && !(h[k * (size_t)r->k + k] > 0); i += (size_t)r->k)
            job.w[i] = 0; // a dead channel
    quant_matrix(&q->pool, &job);
    free(job.e);
    float *spare = h ? (float *)cli_resize(NULL, cells * sizeof *spare) : NULL;
    quant_measure(&job, h, spare);
    free(spare);
    free(job.w);
}

// All matrices that read the same input. Returns an exit code.
static int quant_set(quantiser *q, quant_layer *l, int set) {
    float *h = q->hessian[set], *u = NULL;
    int k = quant_set_width(q, set), bad = 0;
    int32_t *order = NULL;
    quant_shared(q, l, set);
    if (h) quant_finish_hessian(h, k, (double)q->samples * q->set.length);
    if (q->set.gptq) {
        const quant_record *first = l->record; // groups are of one size
        order = q->set.act_order ? quant_order(h, k, quant_together(&q->set, first)) : NULL;
        u = (float *)cli_resize(NULL, (size_t)k * (size_t)k * sizeof *u);
        bad = quant_factor(h, k, order, q->set.damp, u);
    }
    if (bad < 0) cli_fail(0, "out of memory: the Hessian of %d x %d in FP64", k, k);
    if (bad > 0)
        cli_fail(0,
                 "layer %d, %s: the Hessian is not positive definite with damping %g: raise --damp "
                 "or give more calibration text",
                 q->layer, quant_set_names[set], q->set.damp);
    for (int i = 0; i < l->count && !bad && !cli_signal; i++)
        if (l->record[i].set == set) quant_one(q, l, &l->record[i], h, u, order);
    free(u);
    free(order);
    return bad ? CLI_FAILED : cli_signal ? 128 + cli_signal : CLI_OK;
}

// The next layer: *made is what came of it. Returns an exit code.
static int quant_do_layer(quantiser *q, quant_layer **made) {
    double start = cli_now();
    int code = CLI_OK, members[QUANT_SETS] = {0};
    quant_layer *l = quant_layer_new(q);
    for (int i = 0; i < l->count; i++) members[l->record[i].set]++;
    for (int set = 0; set < QUANT_SETS; set++) {
        size_t k = (size_t)quant_set_width(q, set);
        q->amax[set] = 0;
        q->hessian[set] = NULL;
        if (!q->samples || !members[set]) continue;
        q->hessian[set] = (float *)calloc(k * k, sizeof(float));
        if (!q->hessian[set])
            code = cli_fail(CLI_FAILED, "out of memory: a Hessian of %zu squared", k);
    }
    q->collecting = 1;
    if (code == CLI_OK) code = quant_run(q, 0, "reading the calibration text", 0, 0.4);
    q->collecting = 0;
    for (int set = 0; set < QUANT_SETS; set++) {
        if (code == CLI_OK && members[set]) {
            quant_progress(q, quant_set_names[set], 0.4 + 0.05 * set);
            code = quant_set(q, l, set);
        }
        free(q->hessian[set]);
        q->hessian[set] = NULL;
    }
    l->seconds = cli_now() - start;
    l->hash = quant_hash(0, &l->bytes, l->bytes - offsetof(quant_layer, bytes));
    if (code == CLI_OK) {
        *made = l;
        return CLI_OK;
    }
    free(l);
    return code;
}

/* ---- what is kept on the way ----------------------------------------------------------------- */

static char *quant_path(const quantiser *q, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static char *quant_path(const quantiser *q, const char *format, ...) { // OUT and what follows it
    char tail[256];
    va_list args;
    va_start(args, format);
    vsnprintf(tail, sizeof tail, format, args);
    va_end(args);
    char *path = (char *)cli_resize(NULL, strlen(q->set.out) + strlen(tail) + 1);
    return strcat(strcpy(path, q->set.out), tail);
}

static int quant_write_file(const char *path, const void *data, size_t bytes) {
    cli_output o;
    int code = cli_output_open(&o, path);
    if (code == CLI_OK) code = cli_output_write(&o, 0, data, bytes);
    return cli_output_close(&o, code);
}

// A layer's file, if it is there and whole: NULL otherwise. (It was written by a rename, so only
// another hand makes it less than whole.)
static quant_layer *quant_load(const quantiser *q, int layer) {
    char *path = quant_path(q, ".partial/layer-%03d", layer);
    cli_buffer file = {NULL, 0, 0};
    quant_layer *l = NULL;
    if (access(path, F_OK) == 0 && cli_read_file(path, &file) == CLI_OK) {
        l = (quant_layer *)(void *)file.data;
        if (file.size < sizeof *l || l->bytes != file.size || l->layer != layer ||
            memcmp(l->magic, "SALAQ1\n", 8) != 0 ||
            l->hash != quant_hash(0, &l->bytes, file.size - offsetof(quant_layer, bytes))) {
            cli_fail(0, "%s is damaged: this layer is done again", path);
            free(l);
            l = NULL;
        }
    }
    free(path);
    return l;
}

static void quant_describe(const quant_settings *s, cli_buffer *text);

// OUT.partial: new, or that of an earlier run of the same command. Returns an exit code.
static int quant_open_partial(quantiser *q) {
    char *folder = quant_path(q, ".partial"), *file = quant_path(q, ".partial/settings");
    cli_buffer want = {NULL, 0, 0}, have = {NULL, 0, 0};
    char made_of[32];
    int code = CLI_OK;
    snprintf(made_of, sizeof made_of, "made of %016llx\n", (unsigned long long)q->made_of);
    quant_describe(&q->set, &want);
    cli_append(&want, made_of, strlen(made_of));
    rmdir(folder); // an empty one is of a run that was killed before it wrote its settings
    if (mkdir(folder, 0777) == 0) {
        code = quant_write_file(file, want.data, want.size);
        if (code != CLI_OK) rmdir(folder);
    } else if (errno != EEXIST)
        code = cli_fail(CLI_OUTPUT, "%s: cannot create: %s", folder, strerror(errno));
    else if (access(file, F_OK) != 0 || cli_read_file(file, &have) != CLI_OK ||
             have.size != want.size || memcmp(have.data, want.data, want.size) != 0)
        code = cli_fail(CLI_FAILED,
                        "%s is of a run with other settings, another model or other calibration "
                        "text: remove it, or name another output",
                        folder);
    cli_free(&want);
    cli_free(&have);
    free(folder);
    free(file);
    return code;
}

static void quant_say(const quantiser *q, const quant_layer *l) { // a layer is done
    double error = 0, blocks = 0, fours = 0;
    for (int i = 0; i < l->count; i++) {
        const quant_record *r = &l->record[i];
        error += quant_ratio(q->samples ? r->output : r->weight) / l->count;
        blocks += (double)r->blocks;
        fours += (double)r->fours;
    }
    cli_progress_clear();
    if (cli_quiet) return;
    fprintf(stderr, "sala: layer %d of %d: %.1f s, mean error of %s %.3f %%", l->layer + 1,
            quant_layers(q), l->seconds, q->samples ? "outputs" : "weights", 100 * error);
    if (fours > 0) fprintf(stderr, ", %.1f %% of blocks chose 4", 100 * fours / blocks);
    fprintf(stderr, "\n");
}

// All layers, from the first that is not in OUT.partial. Returns an exit code.
static int quant_do_layers(quantiser *q) {
    int layers = quant_layers(q), code = CLI_OK;
    q->started = cli_now();
    q->layer = -1;
    if (q->samples) code = quant_run(q, 1, "", 0, 0);
    for (q->layer = 0; q->layer < layers && code == CLI_OK; q->layer++) {
        sala__layer before = q->engine->weights.layers[q->layer];
        quant_layer *l = quant_load(q, q->layer);
        int known = l != NULL;
        if (known) q->began = q->layer + 1;
        if (!known) code = quant_do_layer(q, &l);
        if (!known && code == CLI_OK) {
            char *path = quant_path(q, ".partial/layer-%03d", q->layer);
            code = quant_write_file(path, l, l->bytes);
            free(path);
        }
        int last = q->layer == layers - 1;
        if (code == CLI_OK && q->samples && !last) code = quant_swap(q, l);
        if (code == CLI_OK && q->samples && !last)
            code = quant_run(q, 1, "running it in 4 bits", 0.6, 1);
        q->engine->weights.layers[q->layer] = before;
        q->done[q->layer] = l;
        if (code == CLI_OK && !known) quant_say(q, l);
    }
    return code;
}

/* ---- the folder ------------------------------------------------------------------------------ */

static void quant_print(cli_buffer *b, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void quant_print(cli_buffer *b, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cli_append(b, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

static const char *const quant_four_six_names[] = {"off", "mse", "gptq"};
static const char *const quant_layout_names[] = {"modelopt", "compressed-tensors", "gptq"};

static void quant_describe(const quant_settings *s, cli_buffer *text) { // what decides the result
    quant_print(text, "{\"format\": \"%s\", \"method\": \"%s\", \"group\": %d",
                s->format == SALA_NVFP4 ? "nvfp4" : "int4", s->gptq ? "gptq" : "rtn", s->group);
    if (s->format == SALA_NVFP4)
        quant_print(text, ", \"four_over_six\": \"%s\"", quant_four_six_names[s->four_six]);
    else
        quant_print(text, ", \"asymmetric\": %s", s->asym ? "true" : "false");
    if (s->gptq)
        quant_print(text, ", \"damping\": %.9g, \"act_order\": %s", s->damp,
                    s->act_order ? "true" : "false");
    quant_print(text, ", \"layout\": \"%s\", \"length\": %d, \"samples\": %d, \"keep\": [",
                quant_layout_names[s->layout], s->length, s->samples);
    for (int i = 0; i < s->keep_count; i++)
        quant_print(text, "%s\"%s\"", i ? ", " : "", s->keep[i]);
    quant_print(text, "]}\n");
}

// A tensor of the output: bytes that lie somewhere, or, `from`, a GPTQ file's transposed words.
typedef struct quant_tensor {
    char name[128];
    const char *dtype;
    int32_t rank;
    int64_t shape[SALA__MAX_RANK], bytes, offset;
    const void *data;
    const quant_layer *layer;
    const quant_record *from;
    int shard;
} quant_tensor;

typedef struct quant_list {
    quant_tensor *tensors;
    size_t count;
    int shards;
} quant_list;

static quant_tensor *quant_add(quant_list *list, const char *name, const char *tail,
                               const char *dtype, int64_t rows, int64_t columns, int element,
                               const void *data) {
    list->tensors =
        (quant_tensor *)cli_resize(list->tensors, (list->count + 1) * sizeof(quant_tensor));
    quant_tensor *t = &list->tensors[list->count++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s%s", name, tail);
    t->dtype = dtype;
    t->rank = columns > 0 ? 2 : rows > 0 ? 1 : 0;
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->bytes = (rows > 0 ? rows : 1) * (columns > 0 ? columns : 1) * element;
    t->data = data;
    return t;
}

static void quant_add_matrix(const quantiser *q, quant_list *list, const quant_layer *l,
                             const quant_record *r) {
    const void *codes = quant_at(l, r->codes), *scales = quant_at(l, r->scales);
    int64_t n = r->n, k = r->k, groups = k / r->group;
    if (q->set.layout == QUANT_MODELOPT) {
        quant_add(list, r->name, ".weight", "U8", n, k / 2, 1, codes);
        quant_add(list, r->name, ".weight_scale", "F8_E4M3", n, groups, 1, scales);
        quant_add(list, r->name, ".weight_scale_2", "F32", 0, 0, 4, &r->global);
        if (r->in_global > 0)
            quant_add(list, r->name, ".input_scale", "F32", 0, 0, 4, &r->in_global);
    } else if (q->set.layout == QUANT_COMPRESSED) {
        quant_add(list, r->name, ".weight_packed", "U8", n, k / 2, 1, codes);
        quant_add(list, r->name, ".weight_scale", "F8_E4M3", n, groups, 1, scales);
        quant_add(list, r->name, ".weight_global_scale", "F32", 1, 0, 4, &r->divisor);
        if (r->in_divisor > 0)
            quant_add(list, r->name, ".input_global_scale", "F32", 1, 0, 4, &r->in_divisor);
    } else {
        quant_add(list, r->name, ".qweight", "I32", k / 8, n, 4, NULL);
        quant_add(list, r->name, ".qzeros", "I32", groups, n / 8, 4, NULL);
        quant_add(list, r->name, ".scales", "BF16", groups, n, 2, NULL);
        quant_add(list, r->name, ".g_idx", "I32", k, 0, 4, NULL);
        for (size_t i = list->count - 4; i < list->count; i++) {
            list->tensors[i].layer = l;
            list->tensors[i].from = r;
        }
    }
}

static int64_t quant_shard_most = 5000000000; // bytes of a file

// All tensors of the output in the order of the input's names, and the file that each goes into.
static void quant_plan_files(const quantiser *q, quant_list *list) {
    const sala__checkpoint *ck = &q->engine->checkpoint;
    memset(list, 0, sizeof *list);
    for (size_t i = 0; i < ck->tensor_count; i++) {
        const sala__tensor *t = &ck->tensors[i];
        const quant_record *r = NULL;
        const quant_layer *l = NULL;
        for (int layer = 0; layer < quant_layers(q) && !r; layer++) {
            l = q->done[layer];
            for (int m = 0; m < l->count && !r; m++) {
                size_t size = strlen(l->record[m].name);
                if (strncmp(t->name, l->record[m].name, size) == 0 &&
                    strcmp(t->name + size, ".weight") == 0)
                    r = &l->record[m];
            }
        }
        if (r) {
            quant_add_matrix(q, list, l, r);
            continue;
        }
        quant_tensor *copy = quant_add(list, t->name, "", t->dtype, 0, 0, 1, t->data);
        copy->rank = t->rank;
        memcpy(copy->shape, t->shape, sizeof t->shape);
        copy->bytes = t->bytes;
    }
    int64_t filled = 0;
    for (size_t i = 0; i < list->count; i++) {
        quant_tensor *t = &list->tensors[i];
        if (filled && filled + t->bytes > quant_shard_most) {
            list->shards++;
            filled = 0;
        }
        t->shard = list->shards;
        t->offset = filled;
        filled += t->bytes;
    }
    list->shards++;
}

static void quant_shard_name(const quant_list *list, int shard, char out[64]) {
    if (list->shards == 1)
        strcpy(out, "model.safetensors");
    else
        snprintf(out, 64, "model-%05d-of-%05d.safetensors", shard + 1, list->shards);
}

static char *quant_in_model(const quantiser *q, const char *name) {
    return quant_path(q, ".partial/model/%s", name);
}

// One safetensors file. Returns an exit code.
static int quant_write_shard(const quantiser *q, const quant_list *list, int shard) {
    cli_buffer head = {NULL, 0, 0};
    char name[64];
    quant_shard_name(list, shard, name);
    quant_print(&head, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < list->count; i++) {
        const quant_tensor *t = &list->tensors[i];
        if (t->shard != shard) continue;
        quant_print(&head, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int d = 0; d < t->rank; d++)
            quant_print(&head, "%s%lld", d ? "," : "", (long long)t->shape[d]);
        quant_print(&head, "],\"data_offsets\":[%lld,%lld]}", (long long)t->offset,
                    (long long)(t->offset + t->bytes));
    }
    quant_print(&head, "}");
    while (head.size % 8) quant_print(&head, " ");
    uint64_t size = head.size;
    char *path = quant_in_model(q, name);
    cli_output o;
    int code = cli_output_open(&o, path);
    if (code == CLI_OK) code = cli_output_write(&o, 0, &size, 8);
    if (code == CLI_OK) code = cli_output_write(&o, 8, head.data, head.size);
    for (size_t i = 0; i < list->count && code == CLI_OK; i++) {
        const quant_tensor *t = &list->tensors[i];
        if (t->shard != shard) continue;
        void *made = t->from
                         ? quant_gptq_words(t->layer, t->from, strrchr(t->name, '.') + 1, t->bytes)
                         : NULL;
        code = cli_output_write(&o, (int64_t)(8 + size) + t->offset, made ? made : t->data,
                                (size_t)t->bytes);
        free(made);
        cli_progress("writing the model", (double)i / (double)list->count, -1);
        if (code == CLI_OK && cli_signal) code = 128 + cli_signal;
    }
    cli_free(&head);
    free(path);
    return cli_output_close(&o, code);
}

static int quant_write_text(const quantiser *q, const char *name, const cli_buffer *text) {
    char *path = quant_in_model(q, name);
    int code = quant_write_file(path, text->data, text->size);
    free(path);
    return code;
}

static int quant_write_index(const quantiser *q, const quant_list *list) {
    cli_buffer b = {NULL, 0, 0};
    char name[64];
    int64_t total = 0;
    if (list->shards == 1) return CLI_OK;
    for (size_t i = 0; i < list->count; i++) total += list->tensors[i].bytes;
    quant_print(&b, "{\n  \"metadata\": {\"total_size\": %lld},\n  \"weight_map\": {",
                (long long)total);
    for (size_t i = 0; i < list->count; i++) {
        quant_shard_name(list, list->tensors[i].shard, name);
        quant_print(&b, "%s\n    \"%s\": \"%s\"", i ? "," : "", list->tensors[i].name, name);
    }
    quant_print(&b, "\n  }\n}\n");
    int code = quant_write_text(q, "model.safetensors.index.json", &b);
    cli_free(&b);
    return code;
}

// A JSON value as it was read, numbers in the shortest form that is read back the same; its member
// `without` is left out.
static void quant_json(FILE *f, const sala__json *j, int node, int indent, const char *without) {
    const sala__json_node *v = &j->nodes[node];
    int object = v->type == SALA__OBJECT, members = 0, digits = 1;
    char text[40] = "null";
    if (v->type == SALA__BOOL) strcpy(text, v->number != 0 ? "true" : "false");
    if (v->type == SALA__NUMBER && v->is_integer)
        snprintf(text, sizeof text, "%lld", (long long)v->integer);
    else if (v->type == SALA__NUMBER)
        do snprintf(text, sizeof text, "%.*g", digits, v->number);
        while (digits++ < 17 && strtod(text, NULL) != v->number);
    if (v->type == SALA__STRING)
        cli_json_text(f, j->strings.data + v->text, v->text_size);
    else if (v->type != SALA__ARRAY && !object)
        fprintf(f, "%s%s", text, v->is_integer || strpbrk(text, ".eu") ? "" : ".0");
    if (v->type != SALA__ARRAY && !object) return;
    fprintf(f, object ? "{" : "[");
    for (int n = v->child; n >= 0; n = j->nodes[n].next) {
        if (object && without && strcmp(sala__json_key(j, n), without) == 0) continue;
        fprintf(f, "%s\n%*s", members++ ? "," : "", indent + 2, "");
        if (object) {
            cli_json_text(f, j->strings.data + j->nodes[n].key, j->nodes[n].key_size);
            fprintf(f, ": ");
        }
        quant_json(f, j, n, indent + 2, NULL);
    }
    fprintf(f, "\n%*s%s", indent, "", object ? "}" : "]");
}

// The matrices that --keep names, each between `before` and `after`.
static void quant_kept(const quantiser *q, cli_buffer *b, const char *before, const char *after) {
    sala__item item;
    for (int i = 0; i < sala__item_count(&q->engine->config); i++)
        if (sala__item_at(&q->engine->config, &q->engine->weights, i, &item) &&
            quant_wanted(&q->set, &item) == 0)
            quant_print(b, "%s%.*s%s", before, (int)(strlen(item.name) - strlen(".weight")),
                        item.name, after);
}

// quantization_config to b; what older readers look for in a file of its own, its name in *file.
static void quant_config(const quantiser *q, cli_buffer *b, const char **file, cli_buffer *older) {
    const quant_settings *s = &q->set;
    const char *algo = q->samples ? "NVFP4" : "W4A16_NVFP4", *version = sala_version();
    const char *group = "\"num_bits\": 4, \"type\": \"float\", \"strategy\": \"tensor_group\", "
                        "\"group_size\": 16, \"symmetric\": true";
    cli_buffer plain = {NULL, 0, 0};
    quant_print(&plain, "[\"lm_head\"");
    quant_kept(q, &plain, ", \"", "\"");
    quant_print(&plain, "]");
    *file = NULL;
    if (s->layout == QUANT_MODELOPT) {
        *file = "hf_quant_config.json";
        quant_print(b, "{\"quant_method\": \"modelopt\", \"quant_algo\": \"%s\", ", algo);
        quant_print(b, "\"group_size\": 16, \"kv_cache_quant_algo\": null, \"ignore\": ");
        cli_append(b, plain.data, plain.size);
        quant_print(b, ", \"exclude_modules\": ");
        cli_append(b, plain.data, plain.size);
        quant_print(b, ", \"producer\": {\"name\": \"sala-quantize\", \"version\": \"%s\"}}",
                    version);
        quant_print(older,
                    "{\n  \"producer\": {\"name\": \"sala-quantize\", \"version\": \"%s\"},\n"
                    "  \"quantization\": {\"quant_algo\": \"%s\", \"kv_cache_quant_algo\": null,\n"
                    "    \"group_size\": 16, \"exclude_modules\": ",
                    version, algo);
        cli_append(older, plain.data, plain.size);
        quant_print(older, "}\n}\n");
    } else if (s->layout == QUANT_COMPRESSED) {
        quant_print(b, "{\"quant_method\": \"compressed-tensors\", \"format\": "
                       "\"nvfp4-pack-quantized\", \"quantization_status\": \"compressed\", "
                       "\"kv_cache_scheme\": null, \"ignore\": ");
        cli_append(b, plain.data, plain.size);
        quant_print(b,
                    ", \"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"], "
                    "\"weights\": {%s, \"dynamic\": false}, \"output_activations\": null, ",
                    group);
        if (q->samples)
            quant_print(b, "\"input_activations\": {%s, \"dynamic\": \"local\"}}}}", group);
        else
            quant_print(b, "\"input_activations\": null}}}");
    } else {
        *file = "quantize_config.json";
        quant_print(b,
                    "{\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": %d, \"desc_act\": "
                    "false, \"sym\": %s, \"lm_head\": false, \"checkpoint_format\": \"gptq\"",
                    s->group, s->asym ? "false" : "true");
        if (s->keep_count) { // GPTQModel's way; a pattern each
            quant_print(b, ", \"dynamic\": {\"-:lm_head\": {}");
            quant_kept(q, b, ", \"-:", "$\": {}");
            quant_print(b, "}");
        }
        quant_print(b, "}");
        cli_append(older, b->data, b->size);
        quant_print(older, "\n");
    }
    cli_free(&plain);
}

static int quant_write_config(const quantiser *q) {
    cli_buffer config = {NULL, 0, 0}, own = {NULL, 0, 0}, older = {NULL, 0, 0};
    const char *path = q->engine->checkpoint.folder, *file; // its name ends with '/'
    char name[4096], *text = NULL;
    size_t size;
    sala__json j;
    sala_error err;
    snprintf(name, sizeof name, "%sconfig.json", path);
    int code = sala__json_file(&q->engine->env, name, SALA__CONFIG_LIMIT, &j, &err);
    if (code < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    FILE *f = open_memstream(&text, &size);
    if (!f) exit(cli_fail(CLI_FAILED, "out of memory"));
    quant_json(f, &j, 0, 0, "quantization_config");
    fclose(f);
    sala__json_free(&j);
    quant_config(q, &own, &file, &older);
    cli_append(&config, text, size - 2); // without the last line, "}"
    free(text);
    quant_print(&config, ",\n  \"quantization_config\": ");
    cli_append(&config, own.data, own.size);
    quant_print(&config, "\n}\n");
    code = quant_write_text(q, "config.json", &config);
    if (code == CLI_OK && file) code = quant_write_text(q, file, &older);
    cli_free(&config);
    cli_free(&own);
    cli_free(&older);
    return code;
}

// Files beside the weights that go with any precision of the model.
static int quant_goes_along(const char *name) {
    static const char *const begin[] = {"tokenizer", "special_tokens", "added_tokens",  "vocab.",
                                        "merges.",   "generation_",    "chat_template", "LICENSE"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++)
        if (strncmp(name, begin[i], strlen(begin[i])) == 0) return 1;
    return n > 3 && strcmp(name + n - 3, ".py") == 0;
}

static int quant_copy_files(const quantiser *q) {
    DIR *folder = opendir(q->set.in);
    int code =
        folder ? CLI_OK : cli_fail(CLI_FAILED, "%s: cannot open: %s", q->set.in, strerror(errno));
    for (struct dirent *d; code == CLI_OK && (d = readdir(folder)) != NULL;) {
        struct stat st;
        cli_buffer file = {NULL, 0, 0};
        char *from = (char *)cli_resize(NULL, strlen(q->set.in) + strlen(d->d_name) + 2);
        sprintf(from, "%s/%s", q->set.in, d->d_name);
        if (quant_goes_along(d->d_name) && stat(from, &st) == 0 && S_ISREG(st.st_mode)) {
            code = cli_read_file(from, &file);
            if (code == CLI_OK) code = quant_write_text(q, d->d_name, &file);
        }
        cli_free(&file);
        free(from);
    }
    if (folder) closedir(folder);
    return code;
}

static void quant_remove(char *path, int itself) { // a folder of files; frees the path
    DIR *folder = opendir(path);
    for (struct dirent *d; folder && (d = readdir(folder)) != NULL;) {
        char *file = (char *)cli_resize(NULL, strlen(path) + strlen(d->d_name) + 2);
        sprintf(file, "%s/%s", path, d->d_name);
        if (strcmp(d->d_name, ".") != 0 && strcmp(d->d_name, "..") != 0) unlink(file);
        free(file);
    }
    if (folder) closedir(folder);
    if (itself) rmdir(path);
    free(path);
}

/* ---- the report ------------------------------------------------------------------------------ */

static void quant_report_layer(const quantiser *q, const quant_layer *l, cli_buffer *b) {
    const char *kind = q->engine->config.sparse[l->layer] ? "sparse" : "lightning";
    quant_print(b, "    {\"layer\": %d, \"kind\": \"%s\", \"seconds\": %.2f, \"tensors\": [",
                l->layer, kind, l->seconds);
    printf("%5d  %-9s", l->layer, kind);
    for (int i = 0; i < l->count; i++) {
        const quant_record *r = &l->record[i];
        quant_print(b, "%s\n      {\"name\": \"%s\", ", i ? "," : "", r->name);
        if (q->samples)
            quant_print(b, "\"output_error\": %.6g, \"input_max\": %.6g, ", quant_ratio(r->output),
                        r->in_divisor > 0 ? 6 * 448 / (double)r->in_divisor : 0);
        quant_print(b, "\"weight_error\": %.6g", quant_ratio(r->weight));
        if (r->blocks && q->set.four_six)
            quant_print(b, ", \"share_of_four\": %.4f", (double)r->fours / (double)r->blocks);
        quant_print(b, "}");
        const char *name = strrchr(r->name, '.') + 1, *proj = strstr(name, "_proj");
        printf("  %.*s %.3f", (int)(proj ? proj - name : 16), name,
               100 * quant_ratio(q->samples ? r->output : r->weight));
    }
    quant_print(b, "\n    ]}");
    printf("\n");
}

// To stdout, and to a file of the folder. Returns an exit code.
static int quant_report(const quantiser *q) {
    cli_buffer b = {NULL, 0, 0};
    double seconds = 0, blocks = 0, fours = 0;
    double output = 0, weight[2] = {0, 0};
    int count = 0;
    quant_print(&b, "{\n  \"settings\": ");
    quant_describe(&q->set, &b);
    quant_print(&b, "  , \"sequences\": %d, \"layers\": [\n", q->samples);
    printf("error of each matrix's %s, percent of the sum of squares\n",
           q->samples ? "output on the calibration text" : "weights");
    for (int layer = 0; layer < quant_layers(q); layer++) {
        const quant_layer *l = q->done[layer];
        if (layer) quant_print(&b, ",\n");
        quant_report_layer(q, l, &b);
        seconds += l->seconds;
        for (int i = 0; i < l->count; i++, count++) {
            output += quant_ratio(l->record[i].output);
            blocks += (double)l->record[i].blocks;
            fours += (double)l->record[i].fours;
            for (int w = 0; w < 2; w++) weight[w] += l->record[i].weight[w];
        }
    }
    quant_print(&b, "\n  ],\n  \"weight_error\": %.6g, \"seconds\": %.2f", quant_ratio(weight),
                seconds);
    if (q->samples) {
        quant_print(&b, ", \"mean_output_error\": %.6g", output / count);
        printf("mean error of outputs %.3f %%, ", 100 * output / count);
    }
    printf("error of weights %.3f %%, %.1f s\n", 100 * quant_ratio(weight), seconds);
    if (q->set.four_six && q->set.format == SALA_NVFP4) {
        double share = fours / blocks;
        quant_print(&b, ", \"share_of_four\": %.4f", share);
        printf("%.1f %% of the blocks of 16 chose 4 over 6%s\n", 100 * share,
               share < 0.30 || share > 0.47 ? ": suspicious, 30 to 47 % are usual" : "");
    }
    quant_print(&b, "\n}\n");
    int code = quant_write_text(q, "quantize_report.json", &b);
    cli_free(&b);
    return code;
}

// The model's folder beside its place, then in it.
static int quant_finish(quantiser *q) {
    quant_list list;
    char *model = quant_path(q, ".partial/model");
    quant_remove(quant_path(q, ".partial/model"), 1); // of a run that was ended in the middle
    int code = mkdir(model, 0777) == 0
                   ? CLI_OK
                   : cli_fail(CLI_OUTPUT, "%s: cannot create: %s", model, strerror(errno));
    quant_plan_files(q, &list);
    for (int shard = 0; shard < list.shards && code == CLI_OK; shard++)
        code = quant_write_shard(q, &list, shard);
    if (code == CLI_OK) code = quant_write_index(q, &list);
    if (code == CLI_OK) code = quant_write_config(q);
    if (code == CLI_OK) code = quant_copy_files(q);
    cli_progress_clear();
    if (code == CLI_OK) code = quant_report(q);
    if (code == CLI_OK && rename(model, q->set.out) != 0)
        code =
            cli_fail(CLI_OUTPUT, "%s: cannot rename to %s: %s", model, q->set.out, strerror(errno));
    if (code == CLI_OK)
        quant_remove(quant_path(q, ".partial"), 1);
    else
        quant_remove(quant_path(q, ".partial/model"), 1);
    free(list.tensors);
    free(model);
    return code;
}

/* ---- the calibration text --------------------------------------------------------------------- */

static void quant_add_text(quantiser *q, cli_buffer *tokens, const char *text, size_t bytes,
                           int *code) {
    int32_t *ids = NULL;
    sala_error err;
    int64_t n =
        sala_tokenize(q->engine, text, bytes, SALA_ADD_BOS | SALA_PARSE_SPECIAL, &ids, &err);
    if (n < 0) *code = cli_fail(CLI_FAILED, "%s: %s", q->set.calib, err.text);
    if (n > 0) cli_append(tokens, ids, (size_t)n * sizeof *ids);
    sala_free(q->engine, ids);
}

// A line of JSON: {"text": ...} or {"prompt": ..., "answer": ...}.
static void quant_add_line(quantiser *q, cli_buffer *tokens, const char *line, size_t bytes,
                           int number, int *code) {
    cli_buffer text = {NULL, 0, 0};
    sala__json j;
    sala_error err;
    if (sala__json_parse(&q->engine->env, q->set.calib, line, bytes, &j, &err) < 0) {
        *code = cli_fail(CLI_FAILED, "line %d: %s", number, err.text);
        return;
    }
    static const char *const names[] = {"text", "prompt", "answer"};
    for (int i = 0; i < 3; i++) {
        int node = sala__json_get(&j, 0, names[i]);
        if (!sala__json_text(&j, node)) continue;
        cli_append(&text, j.strings.data + j.nodes[node].text, j.nodes[node].text_size);
    }
    if (text.size)
        quant_add_text(q, tokens, text.data, text.size, code);
    else
        *code =
            cli_fail(CLI_FAILED, "%s: line %d has neither \"text\" nor \"prompt\" and \"answer\"",
                     q->set.calib, number);
    cli_free(&text);
    sala__json_free(&j);
}

// Read --calib and cut its tokens into sequences. Returns an exit code.
static int quant_read_text(quantiser *q) {
    cli_buffer file = {NULL, 0, 0}, tokens = {NULL, 0, 0};
    size_t length = (size_t)q->set.length;
    if (!q->set.calib) return CLI_OK;
    int code = cli_read_file(q->set.calib, &file), number = 0;
    if (code == CLI_OK && !file.size)
        code = cli_fail(CLI_FAILED, "%s is empty: give calibration text", q->set.calib);
    if (code == CLI_OK && file.data[strspn(file.data, " \n\r\t")] != '{') {
        quant_add_text(q, &tokens, file.data, file.size, &code);
    } else {
        for (size_t at = 0; at < file.size && code == CLI_OK; number++) {
            if (tokens.size / 4 >= length * (size_t)q->set.samples) break;
            const char *line = file.data + at,
                       *end = (const char *)memchr(line, '\n', file.size - at);
            size_t n = end ? (size_t)(end - line) : file.size - at;
            if (strspn(line, " \r\t") < n) quant_add_line(q, &tokens, line, n, number + 1, &code);
            at += n + 1;
        }
    }
    int64_t have = (int64_t)(tokens.size / 4);
    q->samples =
        (int)(have / q->set.length < q->set.samples ? have / q->set.length : q->set.samples);
    if (code == CLI_OK && !q->samples)
        code = cli_fail(CLI_FAILED,
                        "%s: %lld tokens are less than one sequence of %d: give more text or a "
                        "smaller --length",
                        q->set.calib, (long long)have, q->set.length);
    q->tokens = (int32_t *)(void *)tokens.data;
    cli_free(&file);
    return code;
}

/* ---- the command ------------------------------------------------------------------------------ */

enum {
    QUANT_FORMAT = CLI_OWN,
    QUANT_METHOD,
    QUANT_CALIB,
    QUANT_LENGTH,
    QUANT_SAMPLES,
    QUANT_FOUR_SIX,
    QUANT_ACT_ORDER,
    QUANT_DAMP,
    QUANT_GROUP,
    QUANT_ASYM,
    QUANT_KEEP,
    QUANT_LAYOUT,
    QUANT_DEVICE,
    QUANT_THREADS
};

static const cli_option quant_options[] = {
    {QUANT_FORMAT, "format", "NAME", "nvfp4 (default) or int4"},
    {QUANT_METHOD, "method", "NAME", "gptq (default), or rtn: round to nearest"},
    {QUANT_CALIB, "calib", "FILE", "calibration text: plain, or lines of JSON (see above)"},
    {QUANT_LENGTH, "length", "N", "tokens of a calibration sequence (default 2048)"},
    {QUANT_SAMPLES, "samples", "N", "sequences at most (default 64)"},
    {QUANT_FOUR_SIX, "four-over-six", "RULE",
     "nvfp4: a block's largest number becomes 4 or 6 by gptq (the loss; default), mse, off"},
    {QUANT_ACT_ORDER, "act-order", NULL,
     "columns of large inputs first; blocks of them where 4 or 6 is by gptq"},
    {QUANT_DAMP, "damp", "D", "added to the Hessian's diagonal, of its mean (default 0.01)"},
    {QUANT_GROUP, "group", "N", "int4: 32, 64, 128 (default) or -1, whole rows, share a scale"},
    {QUANT_ASYM, "asym", NULL, "int4: with zero points"},
    {QUANT_KEEP, "keep", "PATTERN",
     "matrices that stay as they are, like '*.layers.0.*' (name without .weight); repeatable"},
    {QUANT_LAYOUT, "layout", "NAME", "nvfp4: modelopt (default), compressed-tensors; int4: gptq"},
    {QUANT_DEVICE, "device", "NAME",
     "where the layers run: auto, cpu, cuda or cuda:N (default cpu)"},
    {QUANT_THREADS, "threads", "N", "CPU threads (default: the processors there are)"},
    {0, NULL, NULL, NULL},
};

static const cli_command quant_command = {
    "--help",
    "quantize IN OUT --calib FILE [options]\n\n"
    "Writes the model of folder IN to the new folder OUT, its linear layers in 4 bits; embedding,\n"
    "head and norms stay as they are. The calibration text should be like what the model will\n"
    "read, not what it is measured with; sequences longer than the model's dense length show it\n"
    "sparse attention. A line of JSON is {\"text\": ...} or {\"prompt\": ..., \"answer\": ...};\n"
    "special tokens in it are read as such. Without --calib only --method rtn works, and weights\n"
    "alone can be quantised by those who read OUT.\n\n"
    "Work on the way is kept in OUT.partial: the same command goes on where it was stopped.\n",
    quant_options,
    0,
    "  sala-quantize models/sala-tiny tiny-nvfp4 --calib calibration.jsonl\n"
    "  sala-quantize DIR OUT --calib text.txt --format int4 --group 64 --asym\n",
};

static int quant_choose(const char *option, const char *value, const char *const *names, int count,
                        int *chosen) {
    for (int i = 0; i < count; i++) {
        if (strcmp(value, names[i]) != 0) continue;
        *chosen = i;
        return CLI_OK;
    }
    return cli_fail(CLI_USAGE, "--%s: unknown '%s'; `sala-quantize --help` lists what there is",
                    option, value);
}

static int quant_option(cli_args *a, quant_settings *s, int id) {
    static const char *const formats[] = {"nvfp4", "int4"}, *const methods[] = {"rtn", "gptq"};
    int64_t n = 0;
    int i = 0, code;
    char *end;
    sala_error err;
    switch (id) {
    case QUANT_FORMAT:
        code = quant_choose("format", a->value, formats, 2, &i);
        s->format = i ? SALA_INT4 : SALA_NVFP4;
        return code;
    case QUANT_METHOD: return quant_choose("method", a->value, methods, 2, &s->gptq);
    case QUANT_CALIB: s->calib = a->value; return CLI_OK;
    case QUANT_LENGTH:
        code = cli_integer("length", a->value, SALA_TILE, 1 << 16, &n);
        s->length = (int)n;
        return code;
    case QUANT_SAMPLES:
        code = cli_integer("samples", a->value, 1, 1 << 20, &n);
        s->samples = (int)n;
        return code;
    case QUANT_FOUR_SIX:
        return quant_choose("four-over-six", a->value, quant_four_six_names, 3, &s->four_six);
    case QUANT_ACT_ORDER: s->act_order = 1; return CLI_OK;
    case QUANT_DAMP:
        s->damp = strtod(a->value, &end);
        if (end != a->value && !*end && s->damp >= 0 && s->damp <= 1) return CLI_OK;
        return cli_fail(CLI_USAGE, "--damp: '%s' is not a number from 0 to 1", a->value);
    case QUANT_GROUP:
        code = cli_integer("group", a->value, -1, 128, &n);
        s->group = (int)n;
        if (code != CLI_OK || n == -1 || n == 32 || n == 64 || n == 128) return code;
        return cli_fail(CLI_USAGE, "--group: '%s' is none of 32, 64, 128 and -1", a->value);
    case QUANT_ASYM: s->asym = 1; return CLI_OK;
    case QUANT_KEEP:
        if (s->keep_count == 16 || strpbrk(a->value, "\"\\"))
            return cli_fail(CLI_USAGE,
                            "--keep: at most 16 patterns, without quotes and backslashes");
        s->keep[s->keep_count++] = a->value;
        return CLI_OK;
    case QUANT_LAYOUT: return quant_choose("layout", a->value, quant_layout_names, 3, &s->layout);
    default:
        code =
            sala_set_option(&a->options, id == QUANT_DEVICE ? "device" : "threads", a->value, &err);
        return code < 0 ? cli_fail(CLI_USAGE, "--%s", err.text) : CLI_OK;
    }
}

// What fits together. Returns an exit code.
static int quant_check(quant_settings *s) {
    struct stat st;
    int int4 = s->format == SALA_INT4, gptq_layout = s->layout == QUANT_GPTQ_V1;
    if (s->layout < 0)
        s->layout = int4 ? QUANT_GPTQ_V1 : QUANT_MODELOPT;
    else if (int4 != gptq_layout)
        return cli_fail(CLI_USAGE, "--layout %s has no %s", quant_layout_names[s->layout],
                        int4 ? "int4 here: take gptq" : "nvfp4");
    if (!int4 && (s->group || s->asym))
        return cli_fail(CLI_USAGE, "--group and --asym are for --format int4");
    if (int4 && s->four_six >= 0)
        return cli_fail(CLI_USAGE, "--four-over-six is for --format nvfp4");
    if (!s->gptq && s->act_order) return cli_fail(CLI_USAGE, "--act-order is for --method gptq");
    if (s->four_six == QUANT_GPTQ && !s->gptq)
        return cli_fail(CLI_USAGE, "--four-over-six gptq is for --method gptq");
    if (s->gptq && !s->calib) return cli_fail(CLI_USAGE, "--method gptq needs --calib FILE");
    if (s->four_six < 0) s->four_six = int4 ? QUANT_OFF : s->gptq ? QUANT_GPTQ : QUANT_MSE;
    if (!s->group) s->group = int4 ? 128 : 16;
    if (!s->calib) s->length = s->samples = 0;
    if (!*s->out) return cli_fail(CLI_USAGE, "OUT must be the name of a folder");
    if (lstat(s->out, &st) == 0)
        return cli_fail(CLI_FAILED, "%s exists: name another output", s->out);
    return CLI_OK;
}

// The engine, and a model that can be quantised. Returns an exit code.
static int quant_open(quantiser *q, sala_options *o) {
    sala__item item;
    sala_error err;
    int wanted = 0;
    o->hooks.log = cli_log;
    o->hooks.progress = cli_load_progress;
    o->max_sequences = 1;
    o->chunk = ((q->set.length ? q->set.length : 64) + 63) / 64 * 64;
    o->context = o->kv_tokens = o->chunk + 64;
    o->prefill = "w4a16";
    if (!o->device) o->device = "cpu";
    q->engine = sala_open(q->set.in, o, &err);
    cli_progress_clear();
    if (!q->engine) return cli_fail(CLI_FAILED, "%s", err.text);
    sala *s = q->engine;
    q->made_of = 1;
    for (int i = 0; i < sala__item_count(&s->config); i++) {
        if (!sala__item_at(&s->config, &s->weights, i, &item)) continue;
        if (sala__is_4bit(item.weight->format))
            return cli_fail(CLI_FAILED, "%s: %s is in 4 bits: take the original model", q->set.in,
                            item.name);
        wanted += quant_wanted(&q->set, &item) == 1;
        if (quant_wanted(&q->set, &item) == 1 && q->set.group > 0 && item.k % q->set.group)
            return cli_fail(CLI_FAILED, "%s: %s: %d columns are not groups of %d", q->set.in,
                            item.name, item.k, q->set.group);
    }
    if (!wanted) return cli_fail(CLI_FAILED, "--keep leaves nothing to be quantised");
    for (int i = 0; i < q->set.keep_count; i++)
        if (!quant_keeps(q, q->set.keep[i]))
            return cli_fail(CLI_USAGE,
                            "--keep '%s' fits no matrix of a layer; they have names like "
                            "model.layers.0.mlp.down_proj",
                            q->set.keep[i]);
    if (sala_check_weights(s, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    for (size_t i = 0; i < s->checkpoint.tensor_count; i++) {
        const sala__tensor *t = &s->checkpoint.tensors[i];
        q->made_of = quant_hash(q->made_of, t->name, strlen(t->name));
        q->made_of = quant_hash(q->made_of, t->data, (size_t)t->bytes);
    }
    return CLI_OK;
}

static int quant_prepare(quantiser *q, const sala_options *o) {
    sala *s = q->engine;
    sala_error err;
    if (q->set.calib && !s->has_tokenizer)
        return cli_fail(CLI_FAILED, "%s has no tokenizer.json: it cannot read --calib", q->set.in);
    int code = quant_read_text(q);
    if (code != CLI_OK) return code;
    size_t tokens = (size_t)q->samples * (size_t)q->set.length,
           hidden = (size_t)s->config.dims.hidden;
    int widest = sala__max(s->config.dims.ffn, sala__query_width(&s->config.dims));
    q->made_of = quant_hash(q->made_of, q->tokens, tokens * 4);
    q->made_of = quant_hash(q->made_of, &s->config.dims, sizeof s->config.dims);
    q->made_of = quant_hash(q->made_of, &s->on_gpu, sizeof s->on_gpu); // which rounds otherwise
    q->hidden = (sala_act *)cli_resize(NULL, tokens * hidden * sizeof(sala_act));
    q->x = (float *)cli_resize(NULL,
                               (size_t)q->set.length * (size_t)sala__max(widest, (int)hidden) * 4);
    q->done = (quant_layer **)cli_resize(NULL, (size_t)quant_layers(q) * sizeof *q->done);
    memset(q->done, 0, (size_t)quant_layers(q) * sizeof *q->done);
    q->pages = (int32_t *)cli_resize(NULL, (size_t)s->plan.pages * 4);
    for (int32_t i = 0; i < s->plan.pages; i++) q->pages[i] = i;
    if (s->on_gpu) {
        code = sala__cuda_enter(&s->gpu.cuda, &err);
        if (code == 0)
            code = sala__put(s, s->page_tables, q->pages, (size_t)s->plan.blocks * 4, &err);
        if (code < 0) return cli_fail(CLI_FAILED, "%s", err.text);
        sala__cuda_leave(&s->gpu.cuda);
    }
    s->observe = quant_observe;
    s->observer = q;
    openblas_set_num_threads(s->options.threads);
    if (sala__cpu_open(&s->env, o->threads, 0, &q->pool, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    return quant_open_partial(q);
}

static void quant_free(quantiser *q) {
    for (int i = 0; q->done && i < quant_layers(q); i++) free(q->done[i]);
    sala__cpu_close(&q->pool);
    free(q->done);
    free(q->pages);
    free(q->x);
    free(q->hidden);
    free(q->tokens);
    if (q->engine) sala_close(q->engine);
}

static int quant_main(int argc, char **argv) {
    quantiser q;
    cli_args args;
    int id, code = CLI_OK, named = argc > 2 && argv[1][0] != '-' && argv[2][0] != '-';
    cli_program = "sala-";
    cli_help = "sala-quantize";
    memset(&q, 0, sizeof q);
    q.set.in = named ? argv[1] : NULL;
    q.set.out = named ? argv[2] : NULL;
    for (size_t n = named ? strlen(argv[2]) : 0; n > 1 && argv[2][n - 1] == '/';) argv[2][--n] = 0;
    q.set.format = SALA_NVFP4;
    q.set.gptq = 1;
    q.set.layout = q.set.four_six = -1;
    q.set.length = 2048;
    q.set.samples = 64;
    q.set.damp = 0.01;
    cli_start(&args, &quant_command, argc - 2 * named, argv + 2 * named);
    while (code == CLI_OK && (id = cli_next(&args)) > 0) code = quant_option(&args, &q.set, id);
    if (code == CLI_OK && id < 0) {
        cli_end(&args);
        return args.code;
    }
    if (code == CLI_OK && (!named || args.model))
        code = cli_fail(CLI_USAGE, "usage: sala-quantize IN OUT --calib FILE; --help says more");
    if (code == CLI_OK) code = quant_check(&q.set);
    if (code == CLI_OK) code = quant_open(&q, &args.options);
    if (code == CLI_OK) code = quant_prepare(&q, &args.options);
    if (code == CLI_OK) code = quant_do_layers(&q);
    if (code == CLI_OK) code = quant_finish(&q);
    if (code > 128)
        cli_fail(0, "stopped; the same command goes on with %s.partial", q.set.out);
    else if (code == CLI_OK)
        code = cli_flush();
    if (code == CLI_OK && !cli_quiet)
        fprintf(stderr, "sala: %s is there, in %.0f s; sala info -m %s --check --against %s\n",
                q.set.out, cli_now() - q.started, q.set.out, q.set.in);
    quant_free(&q);
    cli_end(&args);
    return code;
}

#ifndef QUANT_NO_MAIN
int main(int argc, char **argv) {
    cli_catch_signals();
    return quant_main(argc, argv);
}
#endif
