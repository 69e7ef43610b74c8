/*  prefill_attend.h - tests of the kernels prefill_dense and prefill_sparse: each against its C twin, and bit by
    bit where bits are promised: a row is the same in every chunk. Included by test_prefill.c.

    A world is one sequence with everything that attention needs, of which `start` tokens lie before the prompt's
    own. A run is a chunk of it: tokens behind the chunk are NaN in the pages, as is all that nobody wrote. */

// P is rounded to BF16, the twin's is not: 2^-9 of each term. After that both round twice (sum, gate), and a
// rounding may fall on the other side. In steps of 2^-7 of the head's largest element, and as root mean square.
static const float ATTEND_STEPS = 3.0f, ATTEND_RMS = 0.004f;

typedef struct attend_world {
    sala_dims dims;
    int start, count, pages, base; // pages of the pools, and the number of the first
    int gated;
    int32_t *list, *blocks, *counts; // pages of the sequence; a list for each row and K/V head
    sala_act *q, *gate, *k, *v;      // [count, heads * 128], pools
} attend_world;

static sala_dims attend_dims(int heads, int kv_heads, int top_k, int dense_len) {
    return sparse_dims(heads, kv_heads, 1, top_k, dense_len);
}

// Elements from a token's key or value of a K/V head to the pool's beginning.
static size_t attend_at(const attend_world *w, int token, int g) {
    size_t page = (size_t)(w->list[token / 64] - w->base);
    return ((page * (size_t)w->dims.kv_heads + (size_t)g) * 64 + (size_t)(token % 64)) * 128;
}

static size_t attend_pool(const attend_world *w) { // bytes
    return (size_t)w->pages * (size_t)w->dims.kv_heads * 64 * 128 * 2;
}

// Any blocks, ascending, but always the row's own.
static void attend_lists(attend_world *w) {
    const sala_dims *m = &w->dims;
    for (int i = 0; i < w->count * m->kv_heads; i++) {
        int position = w->start + i / m->kv_heads, own = position / 64, n = 0;
        int32_t *to = w->blocks + (size_t)i * (size_t)m->top_k;
        int wanted = own + 1 < m->top_k ? own + 1 : m->top_k;
        w->counts[i] = position + 1 < m->dense_len ? -1 : wanted;
        if (w->counts[i] < 0) continue;
        for (int b = 0; b <= own; b++)
            if (b == own || sparse_below(own - b) < wanted - 1 - n) to[n++] = b;
    }
}

static attend_world *attend_make(const sala_dims *dims, int start, int count, int base) {
    attend_world *w = (attend_world *)calloc(1, sizeof *w);
    if (!w) exit(2);
    int end = start + count, blocks = (end + 63) / 64;
    size_t rows = (size_t)count, width = (size_t)dims->heads * 128;
    w->dims = *dims;
    w->start = start, w->count = count, w->base = base, w->gated = 1;
    w->pages = blocks + 2;
    w->list = (int32_t *)sparse_memory((size_t)w->pages * 4);
    for (int i = 0; i < w->pages; i++) {
        int j = sparse_below(i + 1);
        w->list[i] = w->list[j];
        w->list[j] = base + i;
    }
    w->k = (sala_act *)sparse_memory(attend_pool(w));
    w->v = (sala_act *)sparse_memory(attend_pool(w));
    for (int t = 0; t < end; t++) // now and then a key that moves the maximum far
        for (int g = 0; g < dims->kv_heads; g++) {
            sparse_noise(w->k + attend_at(w, t, g), 128, sparse_below(50) ? 2 : 9);
            sparse_noise(w->v + attend_at(w, t, g), 128, 1);
        }
    w->q = (sala_act *)sparse_memory(rows * width * 2);
    w->gate = (sala_act *)sparse_memory(rows * width * 2);
    sparse_noise(w->q, rows * width, 2);
    sparse_noise(w->gate, rows * width, 3);
    w->counts = (int32_t *)sparse_memory(rows * (size_t)dims->kv_heads * 4);
    w->blocks = (int32_t *)sparse_memory(rows * (size_t)dims->kv_heads * (size_t)dims->top_k * 4);
    attend_lists(w);
    return w;
}

static void attend_free(attend_world *w) {
    void *all[] = {w->list, w->blocks, w->counts, w->q, w->gate, w->k, w->v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w);
}

// A pool as the kernels and the twin get it: page 0 lies w->base pages before its first.
static sala_act *attend_shift(const attend_world *w, const void *pool) {
    uintptr_t page = (uintptr_t)w->dims.kv_heads * 64 * 128 * 2;
    return (sala_act *)((uintptr_t)pool - (uintptr_t)w->base * page);
}

// A pool without the tokens from `end` on.
static void *attend_upload_pool(const attend_world *w, const sala_act *pool, int end) {
    sala_act *copy = (sala_act *)sparse_memory(attend_pool(w));
    memcpy(copy, pool, attend_pool(w));
    for (int t = end; t < w->start + w->count; t++)
        for (int g = 0; g < w->dims.kv_heads; g++) memset(copy + attend_at(w, t, g), 0xFF, 256);
    void *p = on_device(copy, attend_pool(w));
    free(copy);
    return p;
}

static int attend_untouched(const sala_act *o, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        if (o[i] != 0xFFFF) return 0;
    return 1;
}

// Rows first .. first + count - 1 as a chunk; the results go to o.
static void attend_run(const attend_world *w, int first, int count, sala_act *o) {
    enum { GUARD = 4096 };
    const sala_dims *m = &w->dims;
    size_t width = (size_t)m->heads * 128, rows = (size_t)count, from = (size_t)first;
    size_t lists = (size_t)m->kv_heads, all = rows * width + GUARD;
    int32_t *position = (int32_t *)sparse_memory(rows * 4);
    for (int i = 0; i < count; i++) position[i] = w->start + first + i;
    sala_seq seq = {0, 0, count, w->start + first + count, w->start, 0, NULL};
    sala_rows r;
    sala_attend_args a;
    memset(&r, 0, sizeof r);
    memset(&a, 0, sizeof a);
    seq.pages = (int32_t *)on_device(w->list, (size_t)w->pages * 4);
    r.count = count, r.seq_count = 1;
    r.seqs = (sala_seq *)on_device(&seq, sizeof seq);
    r.position = (int32_t *)on_device(position, rows * 4);
    a.dims = m;
    a.rows = (sala_rows *)on_device(&r, sizeof r);
    a.q = (sala_act *)on_device(w->q + from * width, rows * width * 2);
    a.gate = w->gated ? (sala_act *)on_device(w->gate + from * width, rows * width * 2) : NULL;
    a.pages.k = attend_shift(w, attend_upload_pool(w, w->k, seq.stored));
    a.pages.v = attend_shift(w, attend_upload_pool(w, w->v, seq.stored));
    a.count = (int32_t *)on_device(w->counts + from * lists, rows * lists * 4);
    a.blocks = (int32_t *)on_device(w->blocks + from * lists * (size_t)m->top_k,
                                    rows * lists * (size_t)m->top_k * 4);
    a.o = (sala_act *)on_device(NULL, all * 2);
    sala_act *got = (sala_act *)sparse_memory(all * 2);
    gpu->rows = count;
    gpu->seqs = 1;
    gpu->prefill = 1;
    sala__launch_attend_prefill(gpu, &a);
    device_sync();
    from_device(got, a.o, all * 2);
    CHECK(attend_untouched(got, rows * width, all), "behind the last row of %d", count);
    memcpy(o, got, rows * width * 2);
    free(got);
    free(position);
}

static void attend_twin(const attend_world *w, sala_act *o) {
    sala__cpu cpu;
    sala_error err;
    sala__env env;
    sala_seq seq = {0, 0, w->count, w->start + w->count, w->start, 0, w->list};
    sala_rows rows;
    sala_attend_args a;
    memset(&env, 0, sizeof env);
    memset(&rows, 0, sizeof rows);
    memset(&a, 0, sizeof a);
    if (sala__cpu_open(&env, 1, sala__ops_scratch(&w->dims, w->pages * 64), &cpu, &err)) exit(2);
    int32_t *position = (int32_t *)sparse_memory((size_t)w->count * 4);
    int32_t *of = (int32_t *)calloc((size_t)w->count, 4);
    for (int i = 0; i < w->count; i++) position[i] = w->start + i;
    rows.count = w->count, rows.seq_count = 1;
    rows.seqs = &seq, rows.position = position, rows.seq = of;
    a.dims = &w->dims, a.rows = &rows, a.q = w->q, a.gate = w->gated ? w->gate : NULL;
    a.pages.k = attend_shift(w, w->k), a.pages.v = attend_shift(w, w->v);
    a.blocks = w->blocks, a.count = w->counts, a.o = o;
    sala__op_attend(&cpu, &a);
    sala__cpu_close(&cpu);
    free(position);
    free(of);
}

static void attend_compare(const attend_world *w, const sala_act *o) {
    size_t heads = (size_t)(w->count * w->dims.heads);
    sala_act *twin = (sala_act *)sparse_memory(heads * 256);
    double error = 0, norm = 0;
    float worst = 0;
    attend_twin(w, twin);
    for (size_t i = 0; i < heads; i++) {
        float most = 0, largest = 0;
        for (size_t x = i * 128; x < i * 128 + 128; x++) {
            float b = sala_act_f32(twin[x]), e = fabsf(sala_act_f32(o[x]) - b);
            largest = fmaxf(largest, fabsf(b));
            most = e <= most ? most : e; // NaN stays
            error += (double)(e * e);
            norm += (double)(b * b);
        }
        most /= largest / 128;
        worst = fmaxf(worst, most);
        CHECK(most <= ATTEND_STEPS, "row %d, head %d: %g steps", (int)i / w->dims.heads,
              (int)i % w->dims.heads, (double)most);
        if (check_failures > 3) break;
    }
    CHECK(sqrt(error / norm) <= (double)ATTEND_RMS, "root mean square %g", sqrt(error / norm));
    printf("       attention: at most %.2f steps, root mean square %.5f\n", (double)worst,
           sqrt(error / norm));
    free(twin);
}

// All rows as one chunk against the twin, then cut at multiples of `chunk`.
static void attend_check(attend_world *w, int chunk) {
    size_t width = (size_t)w->dims.heads * 128, bytes = (size_t)w->count * width * 2;
    sala_act *o = (sala_act *)sparse_memory(bytes), *cut = (sala_act *)sparse_memory(bytes);
    attend_run(w, 0, w->count, o);
    attend_compare(w, o);
    for (int first = 0, end; chunk && first < w->count; first = end) {
        end = (w->start + first) / chunk * chunk + chunk - w->start;
        if (end > w->count) end = w->count;
        attend_run(w, first, end - first, cut + (size_t)first * width);
    }
    if (chunk) CHECK(!memcmp(o, cut, bytes), "chunks of %d give other bits", chunk);
    free(o);
    free(cut);
}

static void attend_test(const sala_dims *m, int start, int count, int base, int gated, int chunk) {
    device_open_units(m, 5);
    attend_world *w = attend_make(m, start, count, base);
    w->gated = gated;
    attend_check(w, chunk);
    attend_free(w);
    device_close();
}

// ---- the tests ----

static void prefill_attend_group_1(void) {
    sala_dims m = attend_dims(2, 2, 3, 171);
    attend_test(&m, 37, 180, 0, 1, 64);
}
static void prefill_attend_group_2(void) { // lists shorter than top_k at first
    sala_dims m = attend_dims(2, 1, 4, 0);
    attend_test(&m, 0, 270, 0, 0, 128);
}
static void prefill_attend_group_3(void) {
    sala_dims m = attend_dims(6, 2, 3, 140);
    attend_test(&m, 90, 105, 0, 1, 64);
}
static void prefill_attend_group_8(void) {
    sala_dims m = attend_dims(8, 1, 2, 129);
    attend_test(&m, 100, 70, 0, 1, 64);
}
static void prefill_attend_group_16(void) {
    sala_dims m = attend_dims(32, 2, 3, 203);
    attend_test(&m, 185, 33, 0, 1, 64);
}

static void prefill_attend_ragged(void) { // every chunk's last rows
    static const int counts[] = {1, 2, 7, 63, 64, 65};
    sala_dims m = attend_dims(4, 1, 2, 90);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        attend_test(&m, i % 2 ? 62 : 25, counts[i], 0, 1, 0);
}

static void prefill_attend_dense(void) { // no list at all, a long cache
    sala_dims m = attend_dims(16, 1, 2, 4096);
    attend_test(&m, 600, 12, 0, 1, 0);
}

static void prefill_attend_long_lists(void) {
    sala_dims m = attend_dims(16, 1, 96, 0);
    attend_test(&m, 2300, 3, 0, 0, 0);
}

static void prefill_attend_far_pages(void) { // their places exceed 2^31 elements
    sala_dims m = attend_dims(4, 2, 3, 280);
    attend_test(&m, 256, 40, 140000, 1, 0);
}
