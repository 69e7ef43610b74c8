/*  bench_gemm.c - `sala bench --gemm`: the model's matrix products alone, on the CPU or a GPU. Included by bench.c.

    A product is what one launch multiplies: the projections that read the same x together, gate and up with SwiGLU,
    o and down with the norm behind them, the head; and each distinct matrix by itself. Every form that the model's
    weights allow is timed: verify (decoding, W4A16), prefill (BF16, or 4 bits unpacked to BF16), and W4A4. Launches
    of a graph go round the layers, so that weights come from memory and not from a cache: their bytes are shown, and
    a note where they are less than four times the L2 cache. Beside the sum of a pass's products stands, on a GPU, what
    they take as one graph, each reading what the one before it wrote: the linear layers alone. */

enum {
    BENCH_GEMM_ROWS = 512,
    BENCH_COPIES = 64,
    BENCH_PRODUCTS = 40,
    BENCH_SPLITS = 32, // more sums of k than any product is cut into
    BENCH_ENTRIES = 2048
};

static const int bench_gemm_rows[] = {1, 2, 4, 8, 16, 32, 48, 64, 128, 256, BENCH_GEMM_ROWS};

enum { BENCH_VERIFY, BENCH_PREFILL, BENCH_W4A4, BENCH_FORMS };

typedef struct bench_product {
    char name[48];
    int kind, count, copies, logits;            // kind: SALA_PRODUCT_PLAIN ...
    int layers;                                 // that launch it in a pass; 0: no pass does
    sala_weight w[BENCH_COPIES][SALA_GEMM_MAX]; // of the same shapes and formats
    sala_weight up[BENCH_COPIES], norm;         // SwiGLU's second matrix; the norm's vector
    int n, k;                                   // n: of all weights
    int64_t bytes;                              // of one copy
} bench_product;

typedef struct bench_entry { // a measurement
    const bench_product *product;
    int rows, form;
    double seconds, share; // share: of the roofline, or 0
    double blas;           // OpenBLAS's seconds, or 0
} bench_entry;

typedef struct bench_total { // all linear layers of a pass, without the head
    const char *form;        // NULL: a layer of another format has no such form
    double seconds, one;     // the sum of its products; that with one row of x
    double bytes, flops, least;
    double together; // seconds of one graph of them, or 0
} bench_total;

typedef struct bench_gemms {
    bench *b;
    sala *s;
    bench_product products[BENCH_PRODUCTS];
    int product_count, json, counting; // counting: layers are being seen for the first time
    bench_entry entries[BENCH_ENTRIES];
    int entry_count;
    bench_total totals[sizeof bench_gemm_rows / sizeof *bench_gemm_rows][BENCH_FORMS];
    double read, mma[BENCH_FORMS]; // bytes and operations a second; 0: not known
    int64_t l2;                    // bytes, 0: not known
    int most_k;
    sala_act *x, *y, *scratch, *residual; // [512, most k], [512, most n], [512, ffn], [512, hidden]
    sala_act *normed;                     // [512, hidden]
    float *partial;
    int32_t *arrivals;
    sala_quant qx; // [512, most k]
    void *taken[16];
    int taken_count;
} bench_gemms;

static const char *bench_format(int format) {
    static const char *const names[] = {"BF16", "F16", "F32", "NVFP4", "INT4"};
    return format >= 0 && format < 5 ? names[format] : "?";
}

static const char *bench_form(const bench_entry *e) {
    int format = e->product->w[0][0].format;
    if (e->form == BENCH_VERIFY) return "verify";
    if (e->form == BENCH_W4A4) return "w4a4";
    return format == SALA_NVFP4 || format == SALA_INT4 ? "w4a16" : "prefill";
}

/* ---- which products there are ---- */

static int bench_like(const sala_weight *a, const sala_weight *b) { // b's memory can stand for a
    return a->format == b->format && a->k == b->k && a->group == b->group && b->data &&
           !a->zero == !b->zero && b->n >= a->n;
}

// One more place where the weights of p may be read. The same place counts once.
static void bench_add_copy(bench_product *p, const sala_weight *const *w, const sala_weight *up) {
    if (p->copies == BENCH_COPIES) return;
    for (int i = 0; i < p->count; i++)
        if (!bench_like(&p->w[0][i], w[i])) return;
    for (int c = 0; c < p->copies; c++)
        if (p->w[c][0].data == w[0]->data) return;
    for (int i = 0; i < p->count; i++) {
        sala_weight *to = &p->w[p->copies][i];
        *to = *w[i];
        to->n = p->w[0][i].n;
    }
    if (up) p->up[p->copies] = *up;
    p->copies++;
}

// A product of these weights, unless there is one of the same shape; it becomes a copy of all that it
// can stand for.
static void bench_add_product(bench_gemms *g, const char *name, int kind, int count,
                              const sala_weight *const *w, const sala_weight *up,
                              const sala_weight *norm) {
    int known = 0;
    for (int i = 0; i < g->product_count; i++) {
        bench_product *p = &g->products[i];
        int same = p->count == count;
        if (p->kind == SALA_PRODUCT_NORM && same && p->n == w[0]->n && p->k == w[0]->k &&
            kind == SALA_PRODUCT_PLAIN)
            return; // alone it would be cut into fewer sums than any pass cuts it
        if (p->kind != kind || !same || p->logits) continue;
        for (int j = 0; j < count; j++)
            same &= p->w[0][j].n == w[j]->n && bench_like(&p->w[0][j], w[j]);
        if (same) p->layers += g->counting;
        known |= same;
        bench_add_copy(p, w, up);
    }
    if (known || g->product_count == BENCH_PRODUCTS) return;
    bench_product *p = &g->products[g->product_count++];
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", name);
    p->kind = kind;
    p->count = count;
    p->k = w[0]->k;
    if (norm) p->norm = *norm;
    for (int i = 0; i < count; i++) p->w[0][i] = *w[i], p->n += w[i]->n;
    for (int i = 0; i < count; i++) p->bytes += sala__weight_bytes(w[i]);
    if (up) p->up[0] = *up, p->n += up->n, p->bytes += sala__weight_bytes(up);
    p->copies = 1;
    p->layers = g->counting;
}

static void bench_add_layer(bench_gemms *g, const sala__layer *w, int single) {
    const sala_weight *mixer[] = {&w->q, &w->k, &w->v, &w->gate}, *o = &w->o;
    const sala_weight *gate = &w->mlp_gate, *down = &w->mlp_down;
    const sala_weight *all[] = {&w->q, &w->k, &w->v, &w->gate, &w->o, &w->mlp_gate, &w->mlp_down};
    if (!single) {
        const char *const names[2][2] = {{"lightning q k v", "lightning q k v gate"},
                                         {"sparse q k v", "sparse q k v gate"}};
        bench_add_product(g, names[w->sparse != 0][w->gate.data != NULL], SALA_PRODUCT_PLAIN,
                          w->gate.data ? 4 : 3, mixer, NULL, NULL);
        bench_add_product(g, "o, norm", SALA_PRODUCT_NORM, 1, &o, NULL, &w->post_norm);
        bench_add_product(g, "gate up, SwiGLU", SALA_PRODUCT_SWIGLU, 1, &gate, &w->mlp_up, NULL);
        bench_add_product(g, "down, norm", SALA_PRODUCT_NORM, 1, &down, NULL, &w->post_norm);
        return;
    }
    for (int i = 0; i < 7; i++) // gate alone: on a GPU the first half of the pair's memory
        if (all[i]->data)
            bench_add_product(g, "a matrix", SALA_PRODUCT_PLAIN, 1, &all[i], NULL, NULL);
}

static void bench_find_products(bench_gemms *g) {
    const sala__weights *w = g->s->on_gpu ? &g->s->gpu_weights : &g->s->weights;
    const sala_weight *head = &w->head;
    int layers = g->s->config.dims.layers;
    for (int single = 0; single < 2; single++) // twice: a later layer may stand for an earlier one
        for (int l = 0; l < 2 * layers; l++) {
            g->counting = !single && l < layers;
            bench_add_layer(g, &w->layers[l % layers], single);
        }
    g->counting = 0;
    int before = g->product_count;
    bench_add_product(g, "head", SALA_PRODUCT_PLAIN, 1, &head, NULL, NULL);
    if (g->product_count > before) g->products[before].logits = 1;
}

/* ---- memory ---- */

static void *bench_take(bench_gemms *g, size_t bytes, sala_error *err) { // zeroed; NULL: an error
    sala *s = g->s;
    if (!s->on_gpu) {
        void *p = calloc(bytes, 1);
        if (!p) sala__fail(err, SALA_E_MEMORY, "out of memory: %zu bytes for products", bytes);
        if (p) g->taken[g->taken_count++] = p;
        return p;
    }
    void *p = sala__gpu_take(&s->gpu, bytes, "the products of a benchmark", err);
    if (p && sala__cuda_fill(&s->gpu.cuda, sala__on_gpu(p), 0, bytes, err) < 0) return NULL;
    return p;
}

static void bench_gemm_noise(bench_gemms *g, sala_act *to, int rows, int k, float scale) {
    sala_fill_args a = {(uint16_t *)to, 5, scale, 0, rows, k, 0};
    if (g->s->on_gpu)
        sala__launch_fill(&g->s->gpu, &a);
    else
        for (size_t i = 0; i < (size_t)rows * (size_t)k; i++)
            to[i] = sala_synthetic(sala_synthetic_hash(5, i), i, scale, 0);
}

static int bench_gemm_memory(bench_gemms *g, sala_error *err) {
    const sala_dims *m = &g->s->config.dims;
    size_t rows = BENCH_GEMM_ROWS, y = 0, splits = g->s->on_gpu ? BENCH_SPLITS : 1;
    for (int i = 0; i < g->product_count; i++) {
        const bench_product *p = &g->products[i];
        size_t bytes = rows * (size_t)p->n * (p->logits ? 4 : sizeof(sala_act));
        if (p->k > g->most_k) g->most_k = p->k;
        if (bytes > y) y = bytes;
    }
    size_t k = (size_t)g->most_k, hidden = (size_t)m->hidden, act = sizeof(sala_act);
    g->x = (sala_act *)bench_take(g, rows * k * act, err);
    g->y = (sala_act *)bench_take(g, y, err);
    g->scratch = (sala_act *)bench_take(g, rows * (size_t)(m->ffn + m->hidden) * act, err);
    g->residual = (sala_act *)bench_take(g, rows * hidden * act, err);
    g->normed = (sala_act *)bench_take(g, rows * hidden * act, err);
    g->partial = (float *)bench_take(g, splits * rows * hidden * 4, err);
    g->arrivals = (int32_t *)bench_take(g, 64, err);
    g->qx.codes = (uint8_t *)bench_take(g, rows * k / 2, err);
    g->qx.scales = (uint8_t *)bench_take(g, rows * k / 16, err);
    if (!g->x || !g->y || !g->scratch || !g->residual || !g->normed || !g->partial ||
        !g->arrivals || !g->qx.codes || !g->qx.scales)
        return SALA_E_MEMORY;
    bench_gemm_noise(g, g->x, BENCH_GEMM_ROWS, g->most_k, 1);
    return 0;
}

/* ---- one product ---- */

static sala_norm_args bench_norm_args(bench_gemms *g, const bench_product *p, int rows,
                                      sala_act *y) {
    sala_norm_args a;
    memset(&a, 0, sizeof a);
    a.rows = rows;
    a.width = p->n;
    a.eps = g->s->config.dims.eps;
    a.scale = 1e-3f; // the residual is added to time and again
    a.branch = g->scratch;
    a.weight = p->norm;
    a.x = g->residual;
    a.y = y;
    a.divisor = 1;
    return a;
}

static void bench_launch(bench_gemms *g, const bench_product *p, int copy, int rows, int form,
                         const sala_act *x, sala_act *y) {
    sala_quant qx = g->qx;
    qx.scale = p->w[copy][0].input_scale;
    if (form != BENCH_W4A4) memset(&qx, 0, sizeof qx);
    g->s->gpu.prefill = form != BENCH_VERIFY;
    if (p->kind == SALA_PRODUCT_NORM) {
        sala_gemm_norm_args a;
        memset(&a, 0, sizeof a);
        a.input = x;
        a.w = p->w[copy][0];
        a.norm = bench_norm_args(g, p, rows, y);
        a.partial = g->partial;
        a.arrivals = g->arrivals;
        a.qx = qx;
        sala__op(g->s, SALA__OP_gemm_norm, &a);
    } else if (p->kind == SALA_PRODUCT_SWIGLU) {
        sala_gemm_swiglu_args a;
        memset(&a, 0, sizeof a);
        a.rows = rows;
        a.x = x;
        a.gate = p->w[copy][0];
        a.up = p->up[copy];
        a.y = y;
        a.scratch = g->scratch;
        a.qx = qx;
        sala__op(g->s, SALA__OP_gemm_swiglu, &a);
    } else {
        sala_gemm_args a;
        sala_act *to = y;
        memset(&a, 0, sizeof a);
        a.rows = rows;
        a.count = p->count;
        a.x = x;
        for (int i = 0; i < p->count; i++, to += (size_t)rows * (size_t)a.w[i - 1].n)
            a.w[i] = p->w[copy][i], a.y[i] = to;
        if (p->logits) a.y_f32 = (float *)(void *)y, a.y[0] = NULL;
        a.qx = qx;
        sala__op(g->s, SALA__OP_gemm, &a);
    }
    g->s->gpu.prefill = 0;
}

static void bench_quantize_x(bench_gemms *g, const bench_product *p) {
    sala_quantize_args a = {BENCH_GEMM_ROWS, p->k, g->x, g->qx};
    a.quant.scale = p->w[0][0].input_scale;
    sala__op(g->s, SALA__OP_quantize, &a);
}

// Can the product be run so? W4A4 wants NVFP4 throughout, an input scale and its kernels; prefill with
// 4-bit weights wants the memory to unpack them: the engine has what its own prefill uses, a try tells.
static int bench_has_form(bench_gemms *g, const bench_product *p, int form) {
    sala_error *error = &g->s->gpu.error;
    if (form == BENCH_VERIFY) return 1;
    if (p->logits || (form == BENCH_PREFILL && !g->s->on_gpu)) return 0; // there is one form
    for (int i = 0; i < p->count && form == BENCH_W4A4; i++)
        if (p->w[0][i].format != SALA_NVFP4 || !(p->w[0][i].input_scale > 0)) return 0;
    if (!g->s->on_gpu) return 1;
    if (form == BENCH_W4A4 && !g->s->gpu.kernels[SALA__KERNEL_prefill_fp4].function) return 0;
    bench_launch(g, p, 0, 1, form, g->x, g->y);
    if (error->code != SALA_E_STATE) return !error->code;
    memset(error, 0, sizeof *error);
    return 0;
}

// Seconds of a graph, which is then gone; the best of some that take `least` seconds each.
static double bench_time_graph(bench_gemms *g, sala__cu_exec exec, double least) {
    double best = 1e30;
    if (!exec) return best;
    double once = bench_graph_seconds(g->s, exec, 1);
    int count = once > 0 && once < least ? (int)(least / once) + 1 : 1;
    for (int i = 0; i < 3 + (int)g->b->repeat; i++)
        best = fmin(best, bench_graph_seconds(g->s, exec, count));
    sala__cuda_graph_free(&g->s->gpu.cuda, exec);
    return best;
}

// Seconds of one launch of many in a graph, each with other weights.
static double bench_time_gpu(bench_gemms *g, const bench_product *p, int rows, int form) {
    sala__gpu *gpu = &g->s->gpu;
    sala__cu_exec exec = NULL;
    int launches = (24 + p->copies - 1) / p->copies * p->copies;
    if (sala__cuda_capture_begin(&gpu->cuda, &gpu->error) < 0) return 1e30;
    for (int i = 0; i < launches; i++) bench_launch(g, p, i % p->copies, rows, form, g->x, g->y);
    sala__cuda_capture_end(&gpu->cuda, &exec, &gpu->error);
    gpu->due.norm.rows = 0; // the norm of the last one is left out as those of the others are
    return bench_time_graph(g, exec, 5e-3) / launches;
}

// The product of n rows of weights that begin with these; 0: there is no place for it in the tables.
static int bench_launch_of(bench_gemms *g, int kind, const sala_weight *w, int n, int rows,
                           int form, const sala_act *x, sala_act *y) {
    for (int i = 0; i < g->product_count; i++) {
        const bench_product *p = &g->products[i];
        if (p->kind != kind || !p->layers || p->n != n) continue;
        for (int c = 0; c < p->copies; c++)
            if (p->w[c][0].data == w->data) {
                bench_launch(g, p, c, rows, form, x, y);
                return 1;
            }
    }
    return 0;
}

// Seconds of all linear layers of a pass as one graph, or 0.
static double bench_time_layers(bench_gemms *g, int rows, int form) {
    sala__gpu *gpu = &g->s->gpu;
    sala__cu_exec exec = NULL;
    sala_act *normed = g->normed, *y = g->y;
    int all = 1;
    if (sala__cuda_capture_begin(&gpu->cuda, &gpu->error) < 0) return 0;
    for (int i = 0; i < g->s->config.dims.layers && all; i++) {
        const sala__layer *w = &g->s->gpu_weights.layers[i];
        int mixer = w->q.n + w->k.n + w->v.n + (w->gate.data ? w->gate.n : 0);
        int up = w->mlp_gate.n + w->mlp_up.n;
        all = bench_launch_of(g, SALA_PRODUCT_PLAIN, &w->q, mixer, rows, form, normed, y) &&
              bench_launch_of(g, SALA_PRODUCT_NORM, &w->o, w->o.n, rows, form, y, normed) &&
              bench_launch_of(g, SALA_PRODUCT_SWIGLU, &w->mlp_gate, up, rows, form, normed, y) &&
              bench_launch_of(g, SALA_PRODUCT_NORM, &w->mlp_down, w->mlp_down.n, rows, form, y,
                              normed);
    }
    sala__take_due(gpu, NULL, NULL, 0, NULL);
    sala__cuda_capture_end(&gpu->cuda, &exec, &gpu->error);
    double seconds = exec ? bench_time_graph(g, exec, 2e-2) : 0;
    return all ? seconds : 0;
}

static double bench_time_cpu(bench_gemms *g, const bench_product *p, int rows, int form) {
    double best = 1e30;
    bench_settle(g->b);
    for (int i = 0; i < (int)g->b->repeat; i++) {
        if (g->b->roofline) // empty the caches
            roofline_read(g->b->buffer, g->b->buffer_bytes, g->s->options.threads, 1);
        double start = cli_now();
        bench_launch(g, p, i % p->copies, rows, form, g->x, g->y);
        best = fmin(best, cli_now() - start);
    }
    return best;
}

// The least time: of the bytes that must be read and written, or of the operations.
static double bench_roofline(const bench_gemms *g, const bench_product *p, int rows, int form) {
    double bytes = (double)p->bytes + (double)rows * sizeof(sala_act) * p->k;
    double out = p->kind == SALA_PRODUCT_SWIGLU ? p->n / 2 : p->n, seconds = 0;
    bytes += (double)rows * out * (p->logits ? 4 : sizeof(sala_act));
    if (g->read > 0) seconds = bytes / g->read;
    if (g->mma[form] > 0) seconds = fmax(seconds, 2.0 * rows * p->n * (double)p->k / g->mma[form]);
    return seconds;
}

/* ---- the tensor cores' peak ---- */

static const char bench_mma_source[] =
    "struct args { float *out; int rounds; };\n"
    "extern \"C\" __global__ void bench_mma(const __grid_constant__ args a) {\n"
    "    float d[8][4] = {};\n"
    "    unsigned x = threadIdx.x;\n"
    "    for (int i = 0; i < a.rounds; i++)\n"
    "#pragma unroll\n"
    "        for (int j = 0; j < 8; j++)\n"
    "            asm volatile(\n"
    "#ifdef FP4\n"
    "                "
    "\"mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col\"\n"
    "                \".f32.e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, \"\n"
    "                \"{%0, %1, %2, %3}, {%4}, {0, 0}, {%4}, {0, 0};\"\n"
    "#else\n"
    "                \"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, \"\n"
    "                \"{%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};\"\n"
    "#endif\n"
    "                : \"+f\"(d[j][0]), \"+f\"(d[j][1]), \"+f\"(d[j][2]), \"+f\"(d[j][3]) : "
    "\"r\"(x));\n"
    "    if (d[0][0] + d[1][1] + d[2][2] + d[3][3] + d[4][0] + d[5][1] + d[6][2] + d[7][3] == 7)\n"
    "        *a.out = 1;\n"
    "}\n";

// The function of that source, or 0 where it does not compile (the simulator).
static int bench_mma_kernel(sala__cuda *c, int fp4, sala__cu_module *module,
                            sala__cuda_kernel *kernel) {
    char architecture[48];
    const char *options[] = {architecture, "-DFP4"};
    sala__cu_program program = NULL;
    size_t size = 0;
    char *cubin = NULL;
    snprintf(architecture, sizeof architecture, "--gpu-architecture=%s", c->architecture);
    int ok =
        c->api.nvrtcCreateProgram(&program, bench_mma_source, "bench_mma.cu", 0, NULL, NULL) == 0 &&
        c->api.nvrtcCompileProgram(program, 1 + fp4, options) == 0 &&
        c->api.nvrtcGetCUBINSize(program, &size) == 0 && size > 0;
    if (ok) cubin = (char *)cli_resize(NULL, size);
    ok = ok && c->api.nvrtcGetCUBIN(program, cubin) == 0 &&
         c->api.cuModuleLoadData(module, cubin) == 0 &&
         c->api.cuModuleGetFunction(&kernel->function, *module, "bench_mma") == 0;
    kernel->name = "bench_mma";
    free(cubin);
    if (program) c->api.nvrtcDestroyProgram(&program);
    return ok;
}

// Operations a second of mma.sync, best of five: BF16, or FP4 where the device has it.
static double bench_mma_rate(sala *s, int fp4) {
    enum { ROUNDS = 4096, BLOCKS = 2, WARPS = 8 };
    sala__cuda *c = &s->gpu.cuda;
    sala__cu_module module = NULL;
    sala__cuda_kernel kernel;
    sala__cu_exec exec = NULL;
    struct {
        float *out;
        int rounds;
    } a = {(float *)(void *)s->arrivals, ROUNDS};
    unsigned blocks = (unsigned)(BLOCKS * s->gpu.multiprocessors);
    double best = 0, flops = 2.0 * 16 * 8 * (fp4 ? 64 : 16) * 8 * ROUNDS * WARPS * blocks;
    if (!bench_mma_kernel(c, fp4, &module, &kernel)) return 0;
    if (sala__cuda_capture_begin(c, NULL) == 0) {
        sala__cuda_launch(c, &kernel, blocks, 1, 1, 32 * WARPS, 0, &a, 0, NULL);
        sala__cuda_capture_end(c, &exec, NULL);
    }
    for (int i = 0; i < 5 && exec; i++) best = fmax(best, flops / bench_graph_seconds(s, exec, 4));
    sala__cuda_graph_free(c, exec);
    c->api.cuModuleUnload(module);
    return best;
}

static void bench_gemm_peaks(bench_gemms *g) {
    enum { L2_CACHE_SIZE = 38 }; // CU_DEVICE_ATTRIBUTE_...
    sala *s = g->s;
    int threads = s->options.threads, l2 = 0;
    if (!g->b->roofline) return;
    if (!s->on_gpu) {
        g->read = roofline_read(g->b->buffer, g->b->buffer_bytes, threads, 5);
        g->mma[0] = g->mma[1] = g->mma[2] = roofline_fma(threads, 3);
        return;
    }
    g->read = bench_gpu_read(s);
    g->mma[0] = g->mma[1] = g->mma[2] = bench_mma_rate(s, 0);
    if (s->gpu.cuda.major == 12) g->mma[BENCH_W4A4] = bench_mma_rate(s, 1);
    if (s->gpu.cuda.api.cuDeviceGetAttribute(&l2, L2_CACHE_SIZE, s->gpu.cuda.device) == 0)
        g->l2 = l2;
}

/* ---- the tables ---- */

static void bench_gemm_json(const bench_gemms *g) {
    sala_info i;
    sala_get_info(g->s, &i);
    printf("{\"device\": \"%s\", \"read_gb_per_second\": %.3f, \"mma_gflops\": %.3f, "
           "\"fp4_mma_gflops\": %.3f, \"l2_bytes\": %lld, \"products\": [",
           i.device, g->read * 1e-9, g->mma[BENCH_VERIFY] * 1e-9, g->mma[BENCH_W4A4] * 1e-9,
           (long long)g->l2);
    for (int j = 0; j < g->entry_count; j++) {
        const bench_entry *e = &g->entries[j];
        const bench_product *p = e->product;
        printf(
            "%s\n{\"product\": \"%s\", \"format\": \"%s\", \"n\": %d, \"k\": %d, \"layers\": %d, "
            "\"bytes\": %lld, "
            "\"rotated_bytes\": %lld, \"rows\": %d, \"form\": \"%s\", ",
            j ? "," : "", p->name, bench_format(p->w[0][0].format), p->n, p->k, p->layers,
            (long long)p->bytes, (long long)(p->bytes * p->copies), e->rows, bench_form(e));
        printf("\"us\": %.3f, \"gb_per_second\": %.3f, \"gflops\": %.3f, \"roofline\": %.4f, "
               "\"openblas_us\": %.3f}",
               e->seconds * 1e6, (double)p->bytes / e->seconds * 1e-9,
               2.0 * e->rows * p->n * (double)p->k / e->seconds * 1e-9, e->share, e->blas * 1e6);
    }
    printf("], \"layers\": [");
    for (size_t j = 0, some = 0; j < sizeof g->totals / sizeof g->totals[0][0]; j++) {
        const bench_total *t = &g->totals[j / BENCH_FORMS][j % BENCH_FORMS];
        if (!t->form) continue;
        printf("%s\n{\"rows\": %d, \"form\": \"%s\", \"bytes\": %.0f, ", some++ ? "," : "",
               bench_gemm_rows[j / BENCH_FORMS], t->form, t->bytes);
        printf("\"us\": %.3f, \"roofline\": %.4f, \"in_a_row_us\": %.3f}", t->seconds * 1e6,
               t->least / t->seconds, t->together * 1e6);
    }
    printf("]}\n");
}

// The smallest number of rows from which a prefill form is faster than verify, for good.
static void bench_crossover(const bench_entry *e, int count) {
    int forms = 0, from = 0;
    for (int i = 0; i < count; i += forms) {
        int faster = 0;
        for (forms = 1; i + forms < count && e[i + forms].rows == e[i].rows; forms++)
            faster |= e[i + forms].seconds < e[i].seconds;
        if (!faster) from = 0;
        if (faster && !from) from = e[i].rows;
    }
    if (forms < 2) return;
    if (from)
        printf("  crossover: a prefill form is faster from M = %d on\n", from);
    else
        printf("  crossover: none, verify is the fastest up to M = %d\n", e[count - 1].rows);
}

static void bench_product_head(const bench_gemms *g, const bench_product *p) {
    double rotated = (double)p->bytes * p->copies;
    printf("\n%s: N %d, K %d, %s, %.1f MB, rotated over %.0f MB%s\n", p->name, p->n, p->k,
           bench_format(p->w[0][0].format), (double)p->bytes * 1e-6, rotated * 1e-6,
           g->l2 && rotated < 4.0 * (double)g->l2 ? " (less than four times the L2 cache)" : "");
    printf("%6s %-8s %10s %9s %9s %9s%s\n", "M", "form", "us", "GB/s", "GFLOP/s", "roofline",
           g->b->blas.library ? "  of OpenBLAS" : "");
}

static void bench_entry_print(const bench_entry *e) {
    const bench_product *p = e->product;
    printf("%6d %-8s %10.2f %9.1f %9.0f", e->rows, bench_form(e), e->seconds * 1e6,
           (double)p->bytes / e->seconds * 1e-9,
           2.0 * e->rows * p->n * (double)p->k / e->seconds * 1e-9);
    if (e->share > 0) printf(" %7.1f %%", 100 * e->share);
    if (e->blas > 0) printf(" %10.0f %%", 100 * e->blas / e->seconds);
    printf("\n");
}

// What the layers of a pass take in all, launch after launch, the head left out.
static void bench_gemm_total(bench_gemms *g, int rows, int form, bench_total *t) {
    int wanted = 0, got = 0;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < g->product_count; i++) wanted += g->products[i].layers;
    for (int j = 0; j < g->entry_count; j++) {
        const bench_entry *e = &g->entries[j];
        const bench_product *p = e->product;
        double layers = p->layers;
        if (e->form == form && e->rows == 1) t->one += layers * e->seconds;
        if (e->form != form || e->rows != rows || !p->layers) continue;
        t->seconds += layers * e->seconds;
        t->bytes += layers * (double)p->bytes;
        t->flops += layers * 2.0 * e->rows * p->n * (double)p->k;
        t->least += layers * e->seconds * e->share;
        got += p->layers;
        t->form = bench_form(e);
    }
    if (got < wanted) t->form = NULL;
    if (t->form && g->s->on_gpu) t->together = bench_time_layers(g, rows, form);
}

static int bench_gemm_totals(bench_gemms *g) {
    for (size_t r = 0; r < sizeof bench_gemm_rows / sizeof *bench_gemm_rows; r++)
        for (int form = 0; form < BENCH_FORMS; form++)
            bench_gemm_total(g, bench_gemm_rows[r], form, &g->totals[r][form]);
    return g->s->gpu.error.code ? cli_fail(CLI_FAILED, "%s", g->s->gpu.error.text) : CLI_OK;
}

static void bench_totals_print(const bench_gemms *g) {
    printf("\nall linear layers of a pass, without the head\n%6s %-8s %10s %9s %9s %9s %9s%s\n",
           "M", "form", "us", "GB/s", "GFLOP/s", "roofline", "of M = 1",
           g->s->on_gpu ? "  in a row, us      GB/s  roofline" : "");
    for (size_t i = 0; i < sizeof g->totals / sizeof g->totals[0][0]; i++) {
        const bench_total *t = &g->totals[i / BENCH_FORMS][i % BENCH_FORMS];
        if (!t->form) continue;
        printf("%6d %-8s %10.1f %9.1f %9.0f %7.1f %% %8.2fx", bench_gemm_rows[i / BENCH_FORMS],
               t->form, t->seconds * 1e6, t->bytes / t->seconds * 1e-9,
               t->flops / t->seconds * 1e-9, 100 * t->least / t->seconds, t->seconds / t->one);
        if (t->together > 0)
            printf(" %13.1f %9.1f %7.1f %%", t->together * 1e6, t->bytes / t->together * 1e-9,
                   100 * t->least / t->together);
        printf("\n");
    }
}

static double bench_blas_seconds(const bench_gemms *g, const bench_product *p, int rows) {
    bench *b = g->b;
    if (!b->blas.library || p->count > 1 || p->kind != SALA_PRODUCT_PLAIN) return 0;
    double rate = roofline_sgemm(&b->blas, rows, p->n, p->k, g->s->options.threads, (int)b->repeat);
    return rate > 0 ? 2.0 * rows * p->n * (double)p->k / rate : 0;
}

// All numbers of rows and forms of one product. Returns an exit code.
static int bench_gemm_product(bench_gemms *g, const bench_product *p) {
    bench_entry *first = &g->entries[g->entry_count];
    if (!g->json) bench_product_head(g, p);
    int has[BENCH_FORMS];
    for (int form = 0; form < BENCH_FORMS; form++) has[form] = bench_has_form(g, p, form);
    if (has[BENCH_W4A4]) bench_quantize_x(g, p);
    for (size_t r = 0; r < sizeof bench_gemm_rows / sizeof *bench_gemm_rows; r++) {
        for (int form = 0; form < BENCH_FORMS; form++) {
            bench_entry e = {p, bench_gemm_rows[r], form, 0, 0, 0};
            if (!has[form] || g->entry_count == BENCH_ENTRIES) continue;
            e.seconds = g->s->on_gpu ? bench_time_gpu(g, p, e.rows, form)
                                     : bench_time_cpu(g, p, e.rows, form);
            if (g->s->gpu.error.code) return cli_fail(CLI_FAILED, "%s", g->s->gpu.error.text);
            e.share = bench_roofline(g, p, e.rows, form) / e.seconds;
            e.blas = form == BENCH_VERIFY ? bench_blas_seconds(g, p, e.rows) : 0;
            g->entries[g->entry_count++] = e;
            if (!g->json) bench_entry_print(&e);
            if (cli_signal) return 128 + (int)cli_signal;
        }
    }
    if (!g->json) bench_crossover(first, (int)(&g->entries[g->entry_count] - first));
    return cli_flush();
}

static int bench_gemm_run(bench_gemms *g) { // inside cuda_enter
    sala_error err;
    double start = cli_now();
    int code = CLI_OK;
    bench_find_products(g);
    if (bench_gemm_memory(g, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    bench_gemm_peaks(g);
    if (!g->json)
        printf("read bandwidth %.2f GB/s; multiply-add peak %.0f GFLOP/s%s%s\n", g->read * 1e-9,
               g->mma[BENCH_VERIFY] * 1e-9, g->b->blas.library ? "; OpenBLAS " : "",
               g->b->blas.library ? g->b->blas.core : "");
    for (int i = 0; i < g->product_count && code == CLI_OK; i++) {
        code = bench_gemm_product(g, &g->products[i]);
        if (g->json) cli_progress_since("products", (double)(i + 1) / g->product_count, start);
    }
    cli_progress_clear();
    if (code == CLI_OK) code = bench_gemm_totals(g);
    if (code == CLI_OK && g->json) bench_gemm_json(g);
    if (code == CLI_OK && !g->json) bench_totals_print(g);
    return code ? code : cli_flush();
}

static int bench_gemm(bench *b, int json) {
    bench_gemms *g = (bench_gemms *)cli_resize(NULL, sizeof *g);
    sala *s = b->engine;
    sala_error err;
    int code;
    memset(g, 0, sizeof *g);
    g->b = b;
    g->s = s;
    g->json = json;
    if (s->on_gpu && sala__cuda_enter(&s->gpu.cuda, &err) < 0) {
        free(g);
        return cli_fail(CLI_FAILED, "%s", err.text);
    }
    code = bench_gemm_run(g);
    if (s->on_gpu) sala__cuda_leave(&s->gpu.cuda);
    for (int i = 0; i < g->taken_count; i++) free(g->taken[i]);
    free(g);
    return code;
}
