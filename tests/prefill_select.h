/*  prefill_select.h - tests of the kernels prefill_store and prefill_score, with select_top behind
    them: against their C twins, and bit by bit over other cuts of the same prompt. Included by
    test_prefill.c after device.h. */

static const float SELECT_SCORE_ERROR = 1e-4f; // of a block's score, relative
enum { SELECT_CUTS = 40 };

// One sequence: numbers for all of its tokens, its pages on the host as the C twin fills them.
typedef struct select_world {
    sala_dims dims;
    int total, pages, base; // tokens; pages in the pools, the device calls them base, base + 1, ...
    int capacity;           // blocks
    int from;               // the first token that is selected for
    int32_t *list;
    sala_act *q, *k, *v;
    sala_pages pool;
    sala__cpu cpu;
    // what the device made of it
    sala_pages got;
    float *score;            // [total - from, kv_heads, capacity]
    int32_t *blocks, *count; // [total - from, kv_heads, top_k]
} select_world;

// Elements of the four pools of `pages` pages, in the order k, v, tier1, tier2.
static size_t select_size(const select_world *w, int pool, int pages) {
    return (size_t)pages * (size_t)w->dims.kv_heads * 128 * (pool < 2 ? 64 : pool == 2 ? 4 : 1);
}

static void select_pools(sala_pages *p, sala_act **all[4]) {
    all[0] = &p->k, all[1] = &p->v, all[2] = &p->tier1, all[3] = &p->tier2;
}

// NaN that no kernel makes.
static void select_allocate(select_world *w, sala_pages *p) {
    sala_act **all[4];
    select_pools(p, all);
    for (int i = 0; i < 4; i++) {
        size_t n = select_size(w, i, w->pages);
        *all[i] = (sala_act *)sparse_memory(n * 2);
        for (size_t e = 0; e < n; e++) (*all[i])[e] = 0x7FA5;
    }
}

static sala_rows select_rows(const sala_seq *seq, const int32_t *position, const int32_t *of,
                             int count) {
    sala_rows rows = {count, 1, 0, seq, NULL, position, of, NULL};
    return rows;
}

// Keys are runs of alike ones, so that their means differ as much as keys. `loud`: how large
// queries are.
static select_world *select_make(sala_dims dims, int total, int from, int base, float loud) {
    select_world *w = (select_world *)calloc(1, sizeof *w);
    sala_error err;
    sala__env env;
    if (!w) exit(2);
    w->dims = dims, w->total = total, w->from = from, w->base = base;
    w->capacity = (total + 63) / 64;
    w->pages = w->capacity + 3;
    size_t kw = (size_t)dims.kv_heads * 128, qw = (size_t)dims.heads * 128, n = (size_t)total,
           lists = (size_t)(total - from) * (size_t)dims.kv_heads;
    w->q = (sala_act *)sparse_memory(n * qw * 2);
    w->k = (sala_act *)sparse_memory(n * kw * 2);
    w->v = (sala_act *)sparse_memory(n * kw * 2);
    w->score = (float *)sparse_memory(lists * (size_t)w->capacity * 4);
    w->count = (int32_t *)sparse_memory(lists * 4);
    w->blocks = (int32_t *)sparse_memory(lists * (size_t)dims.top_k * 4);
    for (size_t i = 0; i < n * qw; i++) w->q[i] = sala_f32_bf16(loud * check_uniform());
    for (size_t i = 0; i < n * kw; i++) {
        w->v[i] = sala_f32_bf16(check_uniform());
        float before = i / kw % 16 ? 0.9f * sala_bf16_f32(w->k[i - kw]) : 0;
        w->k[i] = sala_f32_bf16(before + (i / kw % 16 ? 0.4f : 2.0f) * check_uniform());
    }
    w->list = (int32_t *)sparse_memory((size_t)w->pages * 4);
    for (int i = 0; i < w->pages; i++) {
        int j = (int)(check_random() % (unsigned)(i + 1));
        w->list[i] = w->list[j];
        w->list[j] = i;
    }
    select_allocate(w, &w->pool);
    select_allocate(w, &w->got);
    memset(&env, 0, sizeof env);
    if (sala__cpu_open(&env, 1, sala__ops_scratch(&dims, total + 64), &w->cpu, &err)) exit(2);
    return w;
}

static void select_free(select_world *w) {
    void *all[] = {w->list,   w->q,          w->k,          w->v,         w->pool.k,
                   w->pool.v, w->pool.tier1, w->pool.tier2, w->got.k,     w->got.v,
                   w->score,  w->count,      w->got.tier1,  w->got.tier2, w->blocks};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sala__cpu_close(&w->cpu);
    free(w);
}

// ---- on the device ----

// A chunk: the tokens first .. first + count - 1, what it takes and gives is uploaded before any
// kernel runs.
typedef struct select_chunk {
    int first, count;
    sala_store_args store;
    sala_select_args select;
} select_chunk;

static void select_upload(const select_world *w, select_chunk *c, const sala_pages *pages,
                          const int32_t *list) {
    const sala_dims *m = &w->dims;
    size_t kw = (size_t)m->kv_heads * 128, n = (size_t)c->count, first = (size_t)c->first,
           lists = n * (size_t)m->kv_heads, qw = (size_t)m->heads * 128;
    int32_t *position = (int32_t *)sparse_memory(n * 4), *of = (int32_t *)calloc(n, 4);
    sala_seq seq = {0, 0, c->count, c->first + c->count, c->first, 0, list};
    if (!of) exit(2);
    for (int i = 0; i < c->count; i++) position[i] = c->first + i;
    sala_rows rows =
        select_rows((sala_seq *)on_device(&seq, sizeof seq), (int32_t *)on_device(position, n * 4),
                    (int32_t *)on_device(of, n * 4), c->count);
    memset(&c->store, 0, sizeof c->store);
    memset(&c->select, 0, sizeof c->select);
    c->store.dims = c->select.dims = m;
    c->store.rows = c->select.rows = (sala_rows *)on_device(&rows, sizeof rows);
    c->store.pages = c->select.pages = *pages;
    c->store.nodes.k = (sala_act *)on_device(w->k + first * kw, n * kw * 2);
    c->store.nodes.v = (sala_act *)on_device(w->v + first * kw, n * kw * 2);
    c->select.capacity = w->capacity;
    if (c->first >= w->from) {
        c->select.q = (sala_act *)on_device(w->q + first * qw, n * qw * 2);
        c->select.blocks = (int32_t *)on_device(NULL, lists * (size_t)m->top_k * 4);
        c->select.count = (int32_t *)on_device(NULL, lists * 4);
        c->select.score = (float *)on_device(NULL, lists * (size_t)w->capacity * 4);
    }
    free(position);
    free(of);
}

// The whole prompt in chunks that end at `cuts` (the last at its end): no host between kernels.
static void select_run(select_world *w, const int *cuts, int n) {
    static select_chunk chunk[SELECT_CUTS];
    const sala_dims *m = &w->dims;
    sala_pages on, shifted;
    sala_act **at[4], **to[4], **got[4];
    int32_t *list = (int32_t *)sparse_memory((size_t)w->capacity * 4);
    select_pools(&on, at);
    select_pools(&shifted, to);
    select_pools(&w->got, got);
    for (int i = 0; i < 4; i++) { // as if there were `base` pages before those that there are
        *at[i] = (sala_act *)on_device(*got[i], select_size(w, i, w->pages) * 2);
        *to[i] = (sala_act *)((uintptr_t)*at[i] - select_size(w, i, w->base) * 2);
    }
    for (int i = 0; i < w->capacity; i++) list[i] = w->list[i] + w->base;
    const int32_t *list_on = (int32_t *)on_device(list, (size_t)w->capacity * 4);
    for (int i = 0; i < n; i++) {
        chunk[i].first = i ? cuts[i - 1] : 0;
        chunk[i].count = cuts[i] - chunk[i].first;
        select_upload(w, &chunk[i], &shifted, list_on);
    }
    gpu->seqs = 1, gpu->prefill = 1;
    for (int i = 0; i < n; i++) {
        gpu->rows = chunk[i].count;
        sala__launch_store_prefill(gpu, &chunk[i].store);
        if (chunk[i].first >= w->from) sala__launch_select_prefill(gpu, &chunk[i].select);
    }
    device_sync();
    for (int i = 0; i < 4; i++) from_device(*got[i], *at[i], select_size(w, i, w->pages) * 2);
    for (int i = 0; i < n; i++) {
        const sala_select_args *a = &chunk[i].select;
        if (chunk[i].first < w->from) continue;
        size_t row = (size_t)(chunk[i].first - w->from) * (size_t)m->kv_heads,
               lists = (size_t)chunk[i].count * (size_t)m->kv_heads, k = (size_t)m->top_k;
        from_device(w->score + row * (size_t)w->capacity, a->score,
                    lists * (size_t)w->capacity * 4);
        from_device(w->count + row, a->count, lists * 4);
        from_device(w->blocks + row * k, a->blocks, lists * k * 4);
    }
    free(list);
}

// ---- against the C twins ----

// Every byte of the pools, those that nobody writes too.
static void select_check_pools(select_world *w) {
    static const char *const names[] = {"k", "v", "tier1", "tier2"};
    int32_t *position = (int32_t *)sparse_memory((size_t)w->total * 4);
    int32_t *of = (int32_t *)calloc((size_t)w->total, 4);
    sala_seq seq = {0, 0, w->total, w->total, 0, 0, w->list};
    sala_rows rows = select_rows(&seq, position, of, w->total);
    sala_act **got[4], **twin[4];
    sala_store_args a;
    for (int i = 0; i < w->total; i++) position[i] = i;
    memset(&a, 0, sizeof a);
    a.dims = &w->dims, a.rows = &rows, a.pages = w->pool;
    a.nodes.k = w->k, a.nodes.v = w->v;
    sala__op_store_prefill(&w->cpu, &a);
    select_pools(&w->got, got);
    select_pools(&w->pool, twin);
    for (int i = 0; i < 4; i++)
        CHECK(!memcmp(*got[i], *twin[i], select_size(w, i, w->pages) * 2), "%s differs", names[i]);
    free(position);
    free(of);
}

static int select_has(const int32_t *list, int count, int block) {
    for (int i = 0; i < count; i++)
        if (list[i] == block) return 1;
    return 0;
}

// A list as the twin's, but for near ties; scores close to the twin's, blocks exactly the best of the
// device's own; nothing is written where none are wanted.
static void select_check_list(select_world *w, int at, const sala_select_args *a, int g,
                              float *row_score, float *block_score) {
    const sala_dims *m = &w->dims;
    size_t list = (size_t)at * (size_t)m->kv_heads + (size_t)g;
    int position = w->from + at, blocks = position / 64 + 1, bad = 0;
    int k = m->top_k < blocks ? m->top_k : blocks;
    const float *score = w->score + list * (size_t)w->capacity;
    const int32_t *got = w->blocks + list * (size_t)m->top_k;
    int32_t expect[256];
    int dense = position + 1 < m->dense_len, selects = !dense && blocks > m->top_k;
    CHECK(w->count[list] == (dense ? -1 : k), "position %d: count %d", position, w->count[list]);
    for (int b = selects ? blocks : 0; b < w->capacity; b++)
        bad += sala_f32_bits(score[b]) != 0xFFFFFFFFu;
    CHECK(!bad, "position %d: %d scores that nobody asked for", position, bad);
    if (dense) return;
    for (int b = 0; b < k; b++) expect[b] = b;
    if (selects) sala__top_k(score, blocks, k, expect);
    CHECK(!memcmp(got, expect, (size_t)k * 4), "position %d: not its own scores' best", position);
    if (!selects) return;
    sala__tile tile = {&a->rows->seqs[0], at, 1, g};
    size_t width = (size_t)sala__round_up(sala_tier_rows(m, 1, position + 1), 64);
    sala__row_scores(a, &tile, (float *)sala__cpu_scratch(&w->cpu, 0), row_score, width);
    sala__select_row(a, at, g, row_score, block_score);
    const int32_t *twin = a->blocks + list * (size_t)m->top_k;
    float threshold = INFINITY;
    for (int i = 0; i < k; i++)
        if (block_score[twin[i]] < threshold) threshold = block_score[twin[i]];
    for (int b = 0; b < blocks; b++) {
        float x = score[b], y = block_score[b];
        if (x == y) continue;
        bad += !(fabsf(x - y) <= SELECT_SCORE_ERROR * fabsf(y));
        if (select_has(got, k, b) != select_has(twin, k, b))
            bad += fabsf(y - threshold) > 2 * SELECT_SCORE_ERROR * threshold;
    }
    CHECK(!bad, "position %d head %d: %d scores or choices", position, g, bad);
}

static void select_check_lists(select_world *w) {
    const sala_dims *m = &w->dims;
    int n = w->total - w->from;
    size_t lists = (size_t)n * (size_t)m->kv_heads;
    int32_t *position = (int32_t *)sparse_memory((size_t)n * 4);
    int32_t *of = (int32_t *)calloc((size_t)n, 4);
    sala_seq seq = {0, 0, n, w->total, w->from, 0, w->list};
    sala_rows rows = select_rows(&seq, position, of, n);
    float *row_score = (float *)sparse_memory((size_t)(w->total / 16 + 128) * 4);
    float *block_score = (float *)sparse_memory((size_t)(w->capacity + 2) * 4);
    sala_select_args a;
    for (int i = 0; i < n; i++) position[i] = w->from + i;
    memset(&a, 0, sizeof a);
    a.dims = m, a.rows = &rows, a.pages = w->pool;
    a.q = w->q + (size_t)w->from * (size_t)m->heads * 128;
    a.blocks = (int32_t *)sparse_memory(lists * (size_t)m->top_k * 4);
    a.count = (int32_t *)sparse_memory(lists * 4);
    for (int r = 0; r < n; r++)
        for (int g = 0; g < m->kv_heads; g++)
            select_check_list(w, r, &a, g, row_score, block_score);
    free(position);
    free(of);
    free(row_score);
    free(block_score);
    free(a.blocks);
    free(a.count);
}

// The same prompt cut elsewhere: the same bytes everywhere.
static void select_check_cuts(select_world *w, const int *cuts, int n) {
    const sala_dims *m = &w->dims;
    select_world old = *w;
    size_t lists = (size_t)(w->total - w->from) * (size_t)m->kv_heads,
           scores = lists * (size_t)w->capacity * 4, kept = lists * (size_t)m->top_k * 4;
    sala_act **got[4], **before[4];
    select_allocate(w, &w->got);
    w->score = (float *)sparse_memory(scores);
    w->count = (int32_t *)sparse_memory(lists * 4);
    w->blocks = (int32_t *)sparse_memory(kept);
    select_run(w, cuts, n);
    select_pools(&w->got, got);
    select_pools(&old.got, before);
    for (int i = 0; i < 4; i++) {
        CHECK(!memcmp(*got[i], *before[i], select_size(w, i, w->pages) * 2), "pool %d", i);
        free(*before[i]);
    }
    CHECK(!memcmp(w->score, old.score, scores), "scores depend on the cuts");
    CHECK(!memcmp(w->count, old.count, lists * 4), "counts depend on the cuts");
    CHECK(!memcmp(w->blocks, old.blocks, kept), "lists depend on the cuts");
    free(old.score);
    free(old.count);
    free(old.blocks);
}

// ---- the tests ----

#define SELECT_COUNT(cuts) (int)(sizeof(cuts) / sizeof *(cuts))

// Tokens, pages and compressed rows alone; segments begin anywhere, the last page is not full.
static void prefill_store(void) {
    static const int some[] = {1, 64, 100, 128, 192, 193, 320, 420, 427},
                     others[] = {31, 63, 127, 384, 427};
    for (int heads = 2; heads <= 3; heads++) {
        sala_dims m = sparse_dims(heads, heads, 1, 4, 4096);
        device_open_units(&m, 5);
        // Offsets beyond 2^31 elements in every pool.
        select_world *w = select_make(m, 427, 427, heads == 2 ? 9000000 : 0, 2);
        select_run(w, some, SELECT_COUNT(some));
        select_check_pools(w);
        select_check_cuts(w, others, SELECT_COUNT(others));
        select_free(w);
        device_close();
    }
}

static void select_test(sala_dims m, int from, int total, int base, float loud, const int *cuts,
                        int n) {
    int whole[] = {from, total};
    device_open_units(&m, 5);
    select_world *w = select_make(m, total, from, base, loud);
    select_run(w, whole, 2);
    select_check_pools(w);
    select_check_lists(w);
    if (n) select_check_cuts(w, cuts, n);
    select_free(w);
    device_close();
}

// Around the edges: dense rows, rows that see all blocks, the first that select, ragged ends.
static void prefill_select_group_1(void) { // no window: every row counts
    static const int cuts[] = {250, 256, 320, 384, 448, 455};
    select_test(sparse_dims(2, 2, 0, 3, 300), 250, 455, 0, 2, cuts, SELECT_COUNT(cuts));
}
static void prefill_select_group_2(void) {
    static const int cuts[] = {256, 320, 321, 383, 391};
    select_test(sparse_dims(2, 1, 2, 4, 0), 256, 391, 0, 2, cuts, SELECT_COUNT(cuts));
}
static void prefill_select_group_3(void) {
    static const int cuts[] = {200, 264, 289};
    select_test(sparse_dims(6, 2, 1, 3, 100), 200, 289, 0, 2, cuts, SELECT_COUNT(cuts));
}
static void prefill_select_group_8(void) { // few blocks: no row of tier 2 yet
    sala_dims m = sparse_dims(8, 1, 0, 1, 0);
    m.init_blocks = 0;
    select_test(m, 60, 140, 0, 2, NULL, 0);
}
static void prefill_select_group_16(void) { // pages that lie far in their pools
    static const int cuts[] = {1000, 1024, 1088, 1100};
    select_test(sparse_dims(32, 2, 1, 5, 321), 1000, 1100, 9000000, 2, cuts, SELECT_COUNT(cuts));
}

// Several stages of both tiers; loud queries move the maximum by much.
static void prefill_select_long(void) {
    static const int cuts[] = {9001, 9024, 9034};
    select_test(sparse_dims(12, 1, 3, 24, 1024), 9001, 9034, 0, 30, cuts, SELECT_COUNT(cuts));
}
