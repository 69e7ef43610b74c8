/*  kernels_sparse.h - tests of the kernels select_normaliser, select_score, select_top, attend and
    attend_combine: each against its C twin, and bit by bit where bits are promised. Included by
    test_kernels.c after device.h.

    A world is a set of sequences with their pages and a forest of nodes, whose numbers (q, k, v,
    gate) belong to the node. A pass is a choice of nodes, closed under ancestors, in some order.
    Any two passes over a world must give the same bits for the same node. */

enum { SPARSE_SEQS = 56, SPARSE_NODES = 200, SPARSE_BUCKET = 256 };

static const float SPARSE_SCORE_ERROR = 1e-4f; // of a block's score, relative
// Attention rounds P to BF16, the twin does not: 2^-9 of each term. After that both round twice
// (sum, gate), and a rounding may fall on the other side. In steps of
// 2^-7 of the head's largest element, and as root mean square of all elements.
static const float SPARSE_STEPS = 3.0f, SPARSE_RMS = 0.004f;

// ---- a world ----

typedef struct sparse_world {
    sala_dims dims;
    int seqs, nodes, pages, capacity; // pages in the pools, blocks of the longest sequence
    int stored[SPARSE_SEQS];
    int32_t *list[SPARSE_SEQS]; // [capacity] pages of a sequence
    int seq[SPARSE_NODES], parent[SPARSE_NODES], position[SPARSE_NODES];
    sala_act *q, *k, *v, *gate; // of the nodes
    sala_pages pool;            // on the host
    sala_pages on_device;       // the same on the device
    int32_t *list_on_device[SPARSE_SEQS];
} sparse_world;

static size_t sparse_key_width(const sala_dims *m) {
    return (size_t)m->kv_heads * 128;
}

static size_t sparse_width(const sala_dims *m) {
    return (size_t)m->heads * 128;
}

// A sequence of `stored` tokens and a tree of `nodes` nodes: each hangs on the one before with
// probability `chain` / 8, else on any of the tree.
static void sparse_add(sparse_world *w, int stored, int nodes, int chain) {
    int s = w->seqs++, first = w->nodes;
    w->stored[s] = stored;
    for (int n = 0; n < nodes; n++) {
        int id = w->nodes++, up = -1;
        if (n > 0) up = first + (sparse_below(8) < chain ? n - 1 : sparse_below(n));
        while (up >= 0 && w->position[up] - stored >= SALA_MAX_PATH - 1) up = w->parent[up];
        w->seq[id] = s;
        w->parent[id] = up;
        w->position[id] = up < 0 ? stored : w->position[up] + 1;
        if (w->position[id] / 64 + 1 > w->capacity) w->capacity = w->position[id] / 64 + 1;
    }
}

static sparse_world *sparse_world_make(const sala_dims *dims) {
    sparse_world *w = (sparse_world *)calloc(1, sizeof *w);
    if (!w) exit(2);
    w->dims = *dims;
    return w;
}

// The compressed rows that are in the pages of sequence s.
static void sparse_fill_tiers(sparse_world *w, int s) {
    sala_seq seq = {0, 0, 1, w->stored[s], 0, 0, w->list[s]};
    sala_store_args a;
    memset(&a, 0, sizeof a);
    a.dims = &w->dims;
    a.pages = w->pool;
    for (int tier = 1; tier <= 2; tier++)
        for (int j = 0; j < sala_tier_rows(&w->dims, tier, w->stored[s]); j++)
            for (int g = 0; g < w->dims.kv_heads; g++)
                sala__tier_mean(&a, &seq, tier, 0, g, j,
                                sala__tier_slot(&w->dims, &seq,
                                                tier == 1 ? w->pool.tier1 : w->pool.tier2, tier, g,
                                                j));
}

static void sparse_upload_pool(sparse_world *w) {
    size_t page = sparse_key_width(&w->dims) * sizeof(sala_act), all = (size_t)w->pages * page;
    w->on_device.k = (sala_act *)on_device(w->pool.k, all * 64);
    w->on_device.v = (sala_act *)on_device(w->pool.v, all * 64);
    w->on_device.tier1 = (sala_act *)on_device(w->pool.tier1, all * 4);
    w->on_device.tier2 = (sala_act *)on_device(w->pool.tier2, all);
}

// Numbers for everything; what no token has reached is NaN.
static void sparse_world_fill(sparse_world *w) {
    size_t kw = sparse_key_width(&w->dims), qw = sparse_width(&w->dims), nodes = (size_t)w->nodes;
    w->pages = 3;
    for (int s = 0; s < w->seqs; s++) w->pages += w->stored[s] / 64 + 2;
    w->pool.k = (sala_act *)sparse_memory((size_t)w->pages * kw * 64 * 2);
    w->pool.v = (sala_act *)sparse_memory((size_t)w->pages * kw * 64 * 2);
    w->pool.tier1 = (sala_act *)sparse_memory((size_t)w->pages * kw * 4 * 2);
    w->pool.tier2 = (sala_act *)sparse_memory((size_t)w->pages * kw * 2);
    int32_t *order = (int32_t *)sparse_memory((size_t)w->pages * 4), next = 0;
    for (int i = 0; i < w->pages; i++) {
        int j = sparse_below(i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (int s = 0; s < w->seqs; s++) {
        w->list[s] = (int32_t *)sparse_memory((size_t)(w->capacity + 1) * 4);
        for (int b = 0; b <= (w->stored[s] + 15) / 64; b++) w->list[s][b] = order[next++];
        for (int u = 0; u < w->stored[s]; u++)
            for (int g = 0; g < w->dims.kv_heads; g++) {
                size_t at = (size_t)w->list[s][u / 64] * kw * 64 + (size_t)g * 64 * 128 +
                            (size_t)(u % 64) * 128;
                if (u % 16) // runs of alike keys, so that their means differ as much as keys
                    for (int x = 0; x < 128; x++)
                        w->pool.k[at + (size_t)x] =
                            sala_f32_bf16(0.9f * sala_bf16_f32(w->pool.k[at - 128 + (size_t)x]) +
                                          0.4f * check_uniform());
                else
                    sparse_noise(w->pool.k + at, 128, 2);
                sparse_noise(w->pool.v + at, 128, 1);
            }
        sparse_fill_tiers(w, s);
        w->list_on_device[s] =
            (int32_t *)on_device(w->list[s], (size_t)(w->capacity + 1) * sizeof(int32_t));
    }
    w->q = (sala_act *)sparse_memory(nodes * qw * 2);
    w->gate = (sala_act *)sparse_memory(nodes * qw * 2);
    w->k = (sala_act *)sparse_memory(nodes * kw * 2);
    w->v = (sala_act *)sparse_memory(nodes * kw * 2);
    sparse_noise(w->q, nodes * qw, 2);
    sparse_noise(w->gate, nodes * qw, 3);
    sparse_noise(w->k, nodes * kw, 2);
    sparse_noise(w->v, nodes * kw, 1);
    sparse_upload_pool(w);
    free(order);
}

static void sparse_world_free(sparse_world *w) {
    for (int s = 0; s < w->seqs; s++) free(w->list[s]);
    void *all[] = {w->pool.k, w->pool.v, w->pool.tier1, w->pool.tier2, w->q, w->gate, w->k, w->v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w);
}

// ---- a pass ----

typedef struct sparse_pass {
    sparse_world *w;
    int count, seq_count, bucket; // rows, sequences, rows with padding
    int node[SPARSE_NODES];       // of each row
    int gated;
    sala_seq seq[SPARSE_SEQS];
    int32_t *position, *of, *path; // [bucket]
    sala_act *q, *gate;            // [bucket, ...]
    sala_nodes nodes;
    // out
    int32_t *blocks, *counts;
    float *normaliser, *score;
    sala_act *o;
} sparse_pass;

typedef struct sparse_device { // the same on the device, and a description of the results
    sala_select_args select;
    sala_attend_args attend;
} sparse_device;

static int sparse_parts(int capacity) {
    return (capacity + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
}

// Rows of a pass: the nodes that `wanted` marks, with their ancestors; sequences in the order of
// `turn` (first .. last or last .. first), nodes of a sequence in a random order that puts parents
// first if `shuffle`.
static void sparse_choose(sparse_pass *p, const unsigned char *wanted, int backwards, int shuffle) {
    sparse_world *w = p->w;
    unsigned char take[SPARSE_NODES] = {0}, done[SPARSE_NODES] = {0};
    for (int n = w->nodes - 1; n >= 0; n--) {
        take[n] |= wanted ? wanted[n] : 1;
        if (take[n] && w->parent[n] >= 0) take[w->parent[n]] = 1;
    }
    for (int i = 0; i < w->seqs; i++) {
        int s = backwards ? w->seqs - 1 - i : i, first = p->count, left = 0;
        for (int n = 0; n < w->nodes; n++) left += take[n] && w->seq[n] == s;
        if (!left) continue;
        while (left) {
            int skip = shuffle ? sparse_below(3) : 0, last = -1;
            for (int n = 0; n < w->nodes; n++) {
                if (!take[n] || done[n] || w->seq[n] != s) continue;
                if (w->parent[n] >= 0 && !done[w->parent[n]]) continue;
                last = n;
                if (skip-- == 0) break;
            }
            done[last] = 1;
            p->node[p->count++] = last;
            left--;
        }
        sala_seq seq = {s, first, p->count - first, w->stored[s], 0, 0, w->list[s]};
        p->seq[p->seq_count++] = seq;
    }
}

static void sparse_gather(sparse_pass *p) { // rows from their nodes
    sparse_world *w = p->w;
    size_t kw = sparse_key_width(&w->dims), qw = sparse_width(&w->dims);
    int row_of[SPARSE_NODES], s = 0;
    for (int r = 0; r < p->count; r++) {
        int n = p->node[r];
        row_of[n] = r;
        while (r >= p->seq[s].first_row + p->seq[s].rows) s++;
        p->of[r] = s;
        p->position[r] = w->position[n];
        for (int a = n; a >= 0; a = w->parent[a])
            p->path[r * SALA_MAX_PATH + w->position[a] - p->seq[s].stored] = row_of[a];
        memcpy(p->q + (size_t)r * qw, w->q + (size_t)n * qw, qw * 2);
        memcpy(p->gate + (size_t)r * qw, w->gate + (size_t)n * qw, qw * 2);
        memcpy(p->nodes.k + (size_t)r * kw, w->k + (size_t)n * kw, kw * 2);
        memcpy(p->nodes.v + (size_t)r * kw, w->v + (size_t)n * kw, kw * 2);
    }
}

static sparse_pass *sparse_pass_make(sparse_world *w, const unsigned char *wanted, int backwards,
                                     int shuffle) {
    sparse_pass *p = (sparse_pass *)calloc(1, sizeof *p);
    if (!p) exit(2);
    p->w = w;
    p->gated = 1;
    sparse_choose(p, wanted, backwards, shuffle);
    for (p->bucket = 1; p->bucket < p->count;) p->bucket *= 2;
    const sala_dims *m = &w->dims;
    size_t rows = (size_t)p->bucket, kw = sparse_key_width(m), qw = sparse_width(m),
           lists = rows * (size_t)m->kv_heads, capacity = (size_t)w->capacity;
    p->position = (int32_t *)sparse_memory(rows * 4);
    p->of = (int32_t *)sparse_memory(rows * 4);
    p->path = (int32_t *)sparse_memory(rows * SALA_MAX_PATH * 4);
    p->q = (sala_act *)sparse_memory(rows * qw * 2);
    p->gate = (sala_act *)sparse_memory(rows * qw * 2);
    p->nodes.k = (sala_act *)sparse_memory(rows * kw * 2);
    p->nodes.v = (sala_act *)sparse_memory(rows * kw * 2);
    p->nodes.tier1 = (sala_act *)sparse_memory(rows * kw * 2);
    p->nodes.tier2 = (sala_act *)sparse_memory(rows * kw * 2);
    p->blocks = (int32_t *)sparse_memory(lists * (size_t)m->top_k * 4);
    p->counts = (int32_t *)sparse_memory(lists * 4);
    p->normaliser =
        (float *)sparse_memory(rows * (size_t)m->heads * (size_t)sparse_parts(w->capacity) * 8);
    p->score = (float *)sparse_memory(lists * capacity * 4);
    p->o = (sala_act *)sparse_memory(rows * qw * 2);
    sparse_gather(p);
    return p;
}

static void sparse_pass_free(sparse_pass *p) {
    void *all[] = {p->position,   p->of,      p->path,        p->q,          p->gate,
                   p->nodes.k,    p->nodes.v, p->nodes.tier1, p->blocks,     p->counts,
                   p->normaliser, p->score,   p->o,           p->nodes.tier2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p);
}

static int sparse_attend_parts(const sala_dims *m) { // of the longest list
    int dense = (m->dense_len + 63) / 64, most = m->top_k > dense ? m->top_k : dense;
    return (most + SALA_ATTEND_PART - 1) / SALA_ATTEND_PART;
}

static const sala_rows *sparse_upload_rows(const sparse_pass *p) {
    sala_seq seq[SPARSE_SEQS];
    sala_rows rows;
    size_t bucket = (size_t)p->bucket;
    memset(&rows, 0, sizeof rows);
    for (int s = 0; s < p->seq_count; s++) {
        seq[s] = p->seq[s];
        seq[s].pages = p->w->list_on_device[seq[s].slot];
    }
    rows.count = p->count;
    rows.seq_count = p->seq_count;
    rows.verify = 1;
    rows.seqs = (sala_seq *)on_device(seq, (size_t)p->seq_count * sizeof *seq);
    rows.position = (int32_t *)on_device(p->position, bucket * 4);
    rows.seq = (int32_t *)on_device(p->of, bucket * 4);
    rows.path = (int32_t *)on_device(p->path, bucket * SALA_MAX_PATH * 4);
    return (const sala_rows *)on_device(&rows, sizeof rows);
}

static sparse_device sparse_upload(const sparse_pass *p) {
    const sala_dims *m = &p->w->dims;
    sparse_device d;
    size_t rows = (size_t)p->bucket, kw = rows * sparse_key_width(m) * 2,
           qw = rows * sparse_width(m) * 2, lists = rows * (size_t)m->kv_heads,
           parts = rows * (size_t)sparse_attend_parts(m) * (size_t)m->heads;
    memset(&d, 0, sizeof d);
    d.select.dims = m;
    d.select.rows = sparse_upload_rows(p);
    d.select.q = (sala_act *)on_device(p->q, qw);
    d.select.nodes.k = (sala_act *)on_device(p->nodes.k, kw);
    d.select.nodes.v = (sala_act *)on_device(p->nodes.v, kw);
    d.select.nodes.tier1 = (sala_act *)on_device(NULL, kw);
    d.select.nodes.tier2 = (sala_act *)on_device(NULL, kw);
    d.select.pages = p->w->on_device;
    d.select.blocks = (int32_t *)on_device(NULL, lists * (size_t)m->top_k * 4);
    d.select.count = (int32_t *)on_device(NULL, lists * 4);
    d.select.capacity = p->w->capacity;
    d.select.normaliser = (float *)on_device(NULL, rows * (size_t)m->heads *
                                                       (size_t)sparse_parts(p->w->capacity) * 8);
    d.select.score = (float *)on_device(NULL, lists * (size_t)p->w->capacity * 4);
    d.attend.dims = m;
    d.attend.rows = d.select.rows;
    d.attend.q = d.select.q;
    d.attend.nodes = d.select.nodes;
    d.attend.pages = d.select.pages;
    d.attend.blocks = d.select.blocks;
    d.attend.count = d.select.count;
    d.attend.gate = p->gated ? (sala_act *)on_device(p->gate, qw) : NULL;
    d.attend.o = (sala_act *)on_device(NULL, qw);
    d.attend.parts = sparse_attend_parts(m);
    d.attend.part_o = (float *)on_device(NULL, parts * 128 * 4);
    d.attend.part_max_sum = (float *)on_device(NULL, parts * 2 * 4);
    return d;
}

// Selection and attention on the device; the results come back.
static void sparse_run(sparse_pass *p) {
    const sala_dims *m = &p->w->dims;
    sparse_device d = sparse_upload(p);
    size_t rows = (size_t)p->bucket, kw = rows * sparse_key_width(m) * 2,
           lists = rows * (size_t)m->kv_heads;
    gpu->rows = p->bucket;
    gpu->seqs = p->seq_count;
    sala__launch_select(gpu, &d.select);
    sala__launch_attend(gpu, &d.attend);
    device_sync();
    from_device(p->nodes.tier1, d.select.nodes.tier1, kw);
    from_device(p->nodes.tier2, d.select.nodes.tier2, kw);
    from_device(p->blocks, d.select.blocks, lists * (size_t)m->top_k * 4);
    from_device(p->counts, d.select.count, lists * 4);
    from_device(p->normaliser, d.select.normaliser,
                rows * (size_t)m->heads * (size_t)sparse_parts(p->w->capacity) * 8);
    from_device(p->score, d.select.score, lists * (size_t)p->w->capacity * 4);
    from_device(p->o, d.attend.o, rows * sparse_width(m) * 2);
    if (p->count == p->seq_count) return;
    sala_act *o = (sala_act *)sparse_memory(rows * sparse_width(m) * 2); // row by row: the same
    gpu->seqs = p->bucket;
    d.attend.o = (sala_act *)on_device(NULL, rows * sparse_width(m) * 2);
    sala__launch_attend(gpu, &d.attend);
    device_sync();
    from_device(o, d.attend.o, rows * sparse_width(m) * 2);
    CHECK(!memcmp(o, p->o, rows * sparse_width(m) * 2), "rows in groups and by themselves differ");
    free(o);
}

// ---- against the C twins ----

typedef struct sparse_twin { // the same pass on the host
    sala__cpu cpu;
    sala_rows rows;
    sala_select_args select;
    sala_attend_args attend;
    float *score, *block_score; // of one row
} sparse_twin;

static void sparse_twin_open(sparse_twin *t, const sparse_pass *p) {
    const sala_dims *m = &p->w->dims;
    size_t rows = (size_t)p->bucket, kw = rows * sparse_key_width(m) * 2;
    int context = p->w->capacity * 64 + 64;
    sala_error err;
    sala__env env;
    memset(t, 0, sizeof *t);
    memset(&env, 0, sizeof env);
    if (sala__cpu_open(&env, 1, sala__ops_scratch(m, context), &t->cpu, &err)) exit(2);
    t->rows.count = p->count;
    t->rows.seq_count = p->seq_count;
    t->rows.verify = 1;
    t->rows.seqs = p->seq;
    t->rows.position = p->position;
    t->rows.seq = p->of;
    t->rows.path = p->path;
    t->select.dims = t->attend.dims = m;
    t->select.rows = t->attend.rows = &t->rows;
    t->select.q = t->attend.q = p->q;
    t->select.nodes = p->nodes;
    t->select.nodes.tier1 = (sala_act *)sparse_memory(kw);
    t->select.nodes.tier2 = (sala_act *)sparse_memory(kw);
    t->attend.nodes = t->select.nodes;
    t->select.pages = t->attend.pages = p->w->pool;
    t->select.blocks = (int32_t *)sparse_memory(rows * (size_t)(m->kv_heads * m->top_k) * 4);
    t->select.count = (int32_t *)sparse_memory(rows * (size_t)m->kv_heads * 4);
    t->attend.blocks = p->blocks; // the device's own lists
    t->attend.count = p->counts;
    t->attend.gate = p->gated ? p->gate : NULL;
    t->attend.o = (sala_act *)sparse_memory(rows * sparse_width(m) * 2);
    t->score = (float *)sparse_memory((size_t)(context / 16 + 128) * SALA__QUERY_TILE * 4);
    t->block_score = (float *)sparse_memory((size_t)(p->w->capacity + 2) * 4);
}

static void sparse_twin_close(sparse_twin *t) {
    void *all[] = {t->select.nodes.tier1, t->select.nodes.tier2, t->select.blocks,
                   t->select.count,       t->attend.o,           t->score,
                   t->block_score};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sala__cpu_close(&t->cpu);
}

static int sparse_selects(const sala_dims *m, int position) {
    return position + 1 >= m->dense_len && position / 64 + 1 > m->top_k;
}

// The C twin's block scores of a row, to t->block_score.
static void sparse_twin_scores(sparse_twin *t, int r, int g) {
    const sala_dims *m = t->select.dims;
    sala__tile tile = {&t->rows.seqs[t->rows.seq[r]], r, 1, g};
    size_t width = (size_t)sala__round_up(sala_tier_rows(m, 1, t->rows.position[r] + 1), 64);
    sala__row_scores(&t->select, &tile, (float *)sala__cpu_scratch(&t->cpu, 0), t->score, width);
    sala__select_row(&t->select, r, g, t->score, t->block_score);
}

static int sparse_lists(const int32_t *list, int count, int block) {
    for (int i = 0; i < count; i++)
        if (list[i] == block) return 1;
    return 0;
}

// A row's list and scores: the list follows from the device's own scores exactly, these are close
// to the twin's, and where the lists differ the twin's scores are near ties.
static void sparse_check_list(sparse_twin *t, const sparse_pass *p, int r, int g) {
    const sala_dims *m = &p->w->dims;
    int list = r * m->kv_heads + g, blocks = p->position[r] / 64 + 1;
    int count = p->counts[list], k = m->top_k < blocks ? m->top_k : blocks, bad = 0;
    const int32_t *got = p->blocks + (size_t)list * (size_t)m->top_k;
    const int32_t *twin = t->select.blocks + (size_t)list * (size_t)m->top_k;
    const float *score = p->score + (size_t)list * (size_t)p->w->capacity;
    int32_t expect[256];
    CHECK(count == t->select.count[list], "row %d position %d: count %d, twin %d", r,
          p->position[r], count, t->select.count[list]);
    if (count < 0) return;
    if (!sparse_selects(m, p->position[r])) {
        CHECK(!memcmp(got, twin, (size_t)k * 4), "row %d: all blocks", r);
        return;
    }
    sala__top_k(score, blocks, k, expect);
    CHECK(!memcmp(got, expect, (size_t)k * 4), "row %d position %d: not its own scores' best", r,
          p->position[r]);
    sparse_twin_scores(t, r, g);
    float threshold = INFINITY;
    for (int i = 0; i < k; i++)
        if (t->block_score[twin[i]] < threshold) threshold = t->block_score[twin[i]];
    for (int b = 0; b < blocks; b++) {
        float x = score[b], y = t->block_score[b];
        if (x == y) continue;
        bad += !(fabsf(x - y) <= SPARSE_SCORE_ERROR * fabsf(y));
        if (sparse_lists(got, k, b) != sparse_lists(twin, k, b))
            bad += fabsf(y - threshold) > 2 * SPARSE_SCORE_ERROR * threshold;
    }
    CHECK(!bad, "row %d position %d head %d: %d scores or choices", r, p->position[r], g, bad);
}

static void sparse_check_attention(const sparse_twin *t, const sparse_pass *p) {
    size_t heads = (size_t)p->w->dims.heads;
    float worst = 0;
    double error = 0, norm = 0;
    for (size_t i = 0; i < (size_t)p->count * heads; i++) {
        float scale = 1e-30f, most = 0;
        for (size_t x = i * 128; x < (i + 1) * 128; x++) {
            float a = sala_bf16_f32(p->o[x]), b = sala_bf16_f32(t->attend.o[x]);
            if (!(fabsf(a - b) <= most)) most = fabsf(a - b);
            if (fabsf(b) > scale) scale = fabsf(b);
            error += (double)((a - b) * (a - b));
            norm += (double)(b * b);
        }
        most *= 128.0f / scale;
        if (!(most <= worst)) worst = most;
        CHECK(most <= SPARSE_STEPS, "row %d position %d head %d: %g steps", (int)(i / heads),
              p->position[i / heads], (int)(i % heads), (double)most);
    }
    CHECK(sqrt(error / norm) <= (double)SPARSE_RMS, "attention: root mean square");
    printf("       attention: at most %.2f steps, root mean square %.5f\n", (double)worst,
           sqrt(error / norm));
}

static int sparse_untouched(const void *memory, size_t from, size_t to) {
    for (size_t i = from; i < to; i++)
        if (((const unsigned char *)memory)[i] != 0xFF) return 0;
    return 1;
}

static void sparse_check_padding(const sparse_pass *p) {
    const sala_dims *m = &p->w->dims;
    size_t from = (size_t)p->count, to = (size_t)p->bucket, lists = (size_t)m->kv_heads * 4,
           kept = lists * (size_t)m->top_k, q = sparse_width(m) * 2, s = (size_t)p->w->capacity;
    CHECK(sparse_untouched(p->o, from * q, to * q), "attention of padding");
    CHECK(sparse_untouched(p->counts, from * lists, to * lists), "counts of padding");
    CHECK(sparse_untouched(p->blocks, from * kept, to * kept), "lists of padding");
    CHECK(sparse_untouched(p->score, from * lists * s, to * lists * s), "scores of padding");
}

static void sparse_check(sparse_pass *p) {
    const sala_dims *m = &p->w->dims;
    size_t kw = (size_t)p->bucket * sparse_key_width(m) * 2;
    sparse_twin t;
    sparse_twin_open(&t, p);
    sparse_run(p);
    sala__op_select(&t.cpu, &t.select);
    CHECK(!memcmp(p->nodes.tier1, t.select.nodes.tier1, kw), "rows of tier 1 differ");
    CHECK(!memcmp(p->nodes.tier2, t.select.nodes.tier2, kw), "rows of tier 2 differ");
    for (int r = 0; r < p->count; r++)
        for (int g = 0; g < m->kv_heads; g++) sparse_check_list(&t, p, r, g);
    sala__op_attend(&t.cpu, &t.attend);
    sparse_check_attention(&t, p);
    sparse_check_padding(p);
    sparse_twin_close(&t);
}

// ---- the same bits in every company ----

static int sparse_same_row(const sparse_pass *a, int ra, const sparse_pass *b, int rb) {
    const sala_dims *m = &a->w->dims;
    size_t qw = sparse_width(m), lists = (size_t)m->kv_heads, x = (size_t)ra, y = (size_t)rb;
    int position = a->position[ra], k = m->top_k;
    if (memcmp(a->o + x * qw, b->o + y * qw, qw * 2)) return 0;
    for (size_t g = 0; g < lists; g++) {
        int count = a->counts[x * lists + g];
        size_t list = (size_t)k * lists * 4, bytes = (size_t)(count < 0 ? 0 : count) * 4;
        if (count != b->counts[y * lists + g]) return 0;
        if (memcmp((char *)a->blocks + x * list + g * (size_t)k * 4,
                   (char *)b->blocks + y * list + g * (size_t)k * 4, bytes))
            return 0;
        if (sparse_selects(m, position) &&
            memcmp(a->score + (x * lists + g) * (size_t)a->w->capacity,
                   b->score + (y * lists + g) * (size_t)b->w->capacity,
                   (size_t)(position / 64 + 1) * 4))
            return 0;
    }
    return 1;
}

static void sparse_compare(const sparse_pass *all, const sparse_pass *some, const char *what) {
    int differ = 0;
    for (int r = 0; r < some->count; r++)
        for (int full = 0; full < all->count; full++)
            if (all->node[full] == some->node[r]) differ += !sparse_same_row(all, full, some, r);
    CHECK(!differ, "%s: %d of %d rows differ", what, differ, some->count);
}

static void sparse_check_company(sparse_world *w, const sparse_pass *all) {
    unsigned char wanted[SPARSE_NODES];
    int multiprocessors = gpu->multiprocessors;
    for (int round = 0; round < 6; round++) {
        for (int n = 0; n < w->nodes; n++) wanted[n] = round < 4 ? sparse_below(6) == 0 : 0;
        if (round >= 4) wanted[sparse_below(w->nodes)] = 1; // one path alone
        gpu->multiprocessors = round % 2 ? 1 : 132;
        sparse_pass *some = sparse_pass_make(w, wanted, round & 1, 1);
        some->gated = all->gated;
        sparse_run(some);
        sparse_compare(all, some, round < 4 ? "another choice and order" : "alone");
        sparse_pass_free(some);
    }
    gpu->multiprocessors = multiprocessors;
}

// Every node again with its ancestors in pages: token by token a tree's path gives the same bits.
// `all` ran before.
static void sparse_check_commit(sparse_world *w, const sparse_pass *all, int leaf) {
    int path[SALA_MAX_PATH], depth = 0;
    unsigned char wanted[SPARSE_NODES] = {0};
    for (int n = leaf; n >= 0; n = w->parent[n]) path[depth++] = n;
    int s = w->seq[leaf], stored = w->stored[s], root = w->parent[leaf];
    sala_rows rows = {0};
    sala_commit_args commit;
    memset(&commit, 0, sizeof commit);
    rows.position = all->position;
    commit.dims = &w->dims;
    commit.rows = &rows;
    commit.nodes = &all->nodes;
    commit.pages = &w->pool;
    for (int r = 0; r < all->count; r++)
        for (int i = 1; i < depth; i++)
            if (all->node[r] == path[i]) sala__commit_sparse(&commit, &all->seq[all->of[r]], 0, r);
    sparse_upload_pool(w);
    w->stored[s] = w->position[leaf];
    w->parent[leaf] = -1;
    wanted[leaf] = 1;
    sparse_pass *one = sparse_pass_make(w, wanted, 0, 0);
    one->gated = all->gated;
    CHECK(one->count == 1, "%d rows", one->count);
    sparse_run(one);
    sparse_compare(all, one, "token by token");
    sparse_pass_free(one);
    w->stored[s] = stored;
    w->parent[leaf] = root;
}

// ---- the tests ----

// One-node trees around every edge, and trees whose paths cross them.
static void sparse_edges(sparse_world *w) {
    const sala_dims *m = &w->dims;
    int limit = m->top_k * 64, dense = m->dense_len;
    int alone[] = {0,     1,          15,         16,        30,    31,        32,
                   47,    62,         63,         64,        65,    126,       127,
                   128,   129,        dense - 2,  dense - 1, dense, limit - 2, limit - 1,
                   limit, limit + 63, limit + 64, 767};
    int trees[] = {0, 22, 55, 120, dense - 6, limit - 9, limit + 57, 700};
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        sparse_add(w, alone[i] > 0 ? alone[i] : 0, 1, 0);
    for (size_t i = 0; i < sizeof trees / sizeof *trees; i++)
        sparse_add(w, trees[i] > 0 ? trees[i] : 0, 14, 5);
    sparse_add(w, 1015, 16, 8);
}

static void sparse_test(int heads, int kv_heads, int local, int top_k, int dense_len, int gated) {
    sala_dims m = sparse_dims(heads, kv_heads, local, top_k, dense_len);
    device_open(&m);
    sparse_world *w = sparse_world_make(&m);
    sparse_edges(w);
    sparse_world_fill(w);
    sparse_pass *p = sparse_pass_make(w, NULL, 0, 0);
    p->gated = gated;
    sparse_check(p);
    sparse_check_company(w, p);
    for (int i = 0; i < 6; i++) sparse_check_commit(w, p, w->nodes - 1 - 10 * i);
    sparse_pass_free(p);
    sparse_world_free(w);
    device_close();
}

static void test_sparse_group_1(void) {
    sparse_test(2, 2, 0, 5, 300, 1); // no window: rows that nodes complete count
}
static void test_sparse_group_2(void) {
    sparse_test(2, 1, 2, 6, 0, 1);
}
static void test_sparse_group_3(void) {
    sparse_test(6, 2, 2, 5, 300, 1);
}
static void test_sparse_group_8(void) {
    sparse_test(16, 2, 2, 7, 512, 1);
}
static void test_sparse_group_16(void) {
    sparse_test(16, 1, 1, 5, 321, 0);
}

// Contexts of several parts, trees around the parts' edges (rows of tier 2, blocks).
static void test_sparse_long(void) {
    sala_dims m = sparse_dims(32, 2, 2, 24, 1024);
    device_open(&m);
    sparse_world *w = sparse_world_make(&m);
    sparse_add(w, 128 * 64 - 3, 6, 6);  // blocks: the second part begins
    sparse_add(w, 128 * 64 + 9, 10, 6); // tier 1: the second part's first row
    sparse_add(w, 129 * 64 - 9, 12, 6); // tier 2: the first part is full
    sparse_add(w, 130 * 64 - 5, 8, 6);  // tier 2: the second part begins
    sparse_add(w, 256 * 64 - 4, 7, 7);  // blocks: the third part begins
    sparse_add(w, 300 * 64 + 33, 1, 0);
    sparse_add(w, 900, 12, 4); // dense
    sparse_world_fill(w);
    sparse_pass *p = sparse_pass_make(w, NULL, 0, 0);
    sparse_check(p);
    sparse_check_company(w, p);
    sparse_pass_free(p);
    sparse_world_free(w);
    device_close();
}

// Scores that are hard for a radix select.
static float sparse_hard_score(int pattern, int i) {
    static const float special[] = {0.0f,   -0.0f, INFINITY, -INFINITY, 1e-45f,  -1e-45f,
                                    1e-38f, 1.0f,  1.0f,     -1.0f,     3.4e38f, 1.17549435e-38f};
    switch (pattern) {
    case 0: return 0.25f;
    case 1: return special[sparse_below(12)];
    case 2: return sala_bits_f32(0x3E800000u + (uint32_t)sparse_below(3)); // ties in the last digit
    case 3: return (float)i;
    case 4: return -(float)(i / 7);
    case 5: return expf(4 * check_uniform() * check_uniform() - 3);
    case 6: return i % 97 ? -INFINITY : 1.0f;
    case 7: return i % 3 ? 0.0f : -0.0f;
    default: return sala_bits_f32((uint32_t)check_random() & 0xBFFFFFFFu); // any finite bits
    }
}

static void test_sparse_top_k(void) {
    static const int sizes[] = {97, 98, 127, 1023, 1024, 1025, 2048, 5000, 16384, 20000};
    enum { PATTERNS = 9, ROWS = PATTERNS * (int)(sizeof sizes / sizeof *sizes), CAPACITY = 20000 };
    sala_dims m = sparse_dims(32, 2, 32, 96, 64);
    int lists = ROWS * 2, differ = 0;
    device_open(&m);
    float *score = (float *)sparse_memory((size_t)lists * CAPACITY * 4);
    int32_t position[ROWS], *count = (int32_t *)sparse_memory((size_t)lists * 4), expect[96];
    int32_t *blocks = (int32_t *)sparse_memory((size_t)lists * 96 * 4);
    for (int r = 0; r < ROWS; r++) {
        position[r] = sizes[r / PATTERNS] * 64 - 1 - sparse_below(64);
        for (int g = 0; g < 2; g++)
            for (int i = 0; i < sizes[r / PATTERNS]; i++)
                score[(size_t)(2 * r + g) * CAPACITY + (size_t)i] =
                    sparse_hard_score(r % PATTERNS, i);
    }
    sala_rows rows;
    sala_select_args a;
    memset(&rows, 0, sizeof rows);
    memset(&a, 0, sizeof a);
    rows.count = ROWS;
    rows.position = (int32_t *)on_device(position, sizeof position);
    a.rows = (sala_rows *)on_device(&rows, sizeof rows);
    a.score = (float *)on_device(score, (size_t)lists * CAPACITY * 4);
    a.count = (int32_t *)on_device(NULL, (size_t)lists * 4);
    a.blocks = (int32_t *)on_device(NULL, (size_t)lists * 96 * 4);
    a.capacity = CAPACITY;
    sala__launch(gpu, SALA__KERNEL_select_top, (unsigned)lists, 1, 1, SALA_SELECT_TOP_SHARED, &a);
    from_device(count, a.count, (size_t)lists * 4);
    from_device(blocks, a.blocks, (size_t)lists * 96 * 4);
    for (int i = 0; i < lists; i++) {
        sala__top_k(score + (size_t)i * CAPACITY, sizes[i / 2 / PATTERNS], 96, expect);
        differ += count[i] != 96 || memcmp(expect, blocks + (size_t)i * 96, 96 * 4) != 0;
    }
    CHECK(!differ, "%d of %d lists", differ, lists);
    free(score);
    free(count);
    free(blocks);
    device_close();
}
