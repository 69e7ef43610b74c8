/*  kernels_gla.h - tests of the kernels embed, rope_table, qk_norm_rope, gate, gla_verify and
    commit: each against its C twin, and bit by bit where bits are promised. Included by
    test_kernels.c after device.h. */

enum { GLA_ROWS = 160, GLA_SEQS = 4, GLA_SLOTS = 6, GLA_UNTOUCHED = 0x5A };

// Dimensions that a device accepts; small but for what a test is about.
static sala_dims gla_dims(int lin_heads, int lin_kv_heads, int hidden) {
    sala_dims m = {64,       hidden, 192,  2,     4,         2,
                   128,      0,      1,    64,    32,        16,
                   1,        4,      8,    512,   lin_heads, lin_kv_heads,
                   128,      1,      1,    1,     1,         1e-6f,
                   10000.0f, 12.0f,  0.5f, 16.0f, 0.09f,     0.0883883461f};
    return m;
}

static sala__cpu *gla_cpu(const sala_dims *m) { // one thread, opened once and never closed
    static sala__cpu cpu;
    static int opened;
    sala_error err;
    sala__env env;
    memset(&env, 0, sizeof env);
    if (!opened && sala__cpu_open(&env, 1, sala__ops_scratch(m, 4096), &cpu, &err)) {
        printf("  %s\n", err.text);
        exit(2);
    }
    opened = 1;
    return &cpu;
}

static void *gla_memory(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) exit(2);
    memset(p, GLA_UNTOUCHED, bytes);
    return p;
}

static uint16_t *gla_noise(size_t count, float scale, float offset) {
    uint16_t *x = (uint16_t *)gla_memory(2 * count);
    for (size_t i = 0; i < count; i++) x[i] = sala_f32_bf16(offset + scale * check_uniform());
    return x;
}

static int gla_below(int n) {
    return (int)(check_random() % (uint64_t)n);
}

// The largest |a - b| over `count` numbers, in units of one BF16 step (2^-7) of the largest |b|.
static float gla_steps(const uint16_t *a, const uint16_t *b, size_t count) {
    float most = 0, scale = 1e-30f;
    for (size_t i = 0; i < count; i++) {
        float x = sala_bf16_f32(a[i]), y = sala_bf16_f32(b[i]);
        if (!(fabsf(x - y) <= most)) most = fabsf(x - y); // NaN counts
        if (fabsf(y) > scale) scale = fabsf(y);
    }
    return most / scale * 128.0f;
}

// ---- a pass over trees, on the host ----

typedef struct gla_pass {
    sala_dims dims;
    int rows, seqs;               // real ones
    int bucket_rows, bucket_seqs; // and with padding
    int tree_slots, no_norm, no_rope, no_output;
    sala_seq seq[GLA_SEQS];
    int32_t position[GLA_ROWS], path[GLA_ROWS * SALA_MAX_PATH], of[GLA_ROWS], parent[GLA_ROWS];
    int32_t forks[GLA_ROWS];
    uint16_t *q, *raw_k, *v, *k, *o; // [GLA_ROWS, ...]
    uint16_t *pending_k, *pending_v; // [GLA_SLOTS, ...]
    uint16_t *q_norm, *k_norm;
    float *cos_sin, *state, *decay;
} gla_pass;

static size_t gla_q_width(const sala_dims *m) {
    return (size_t)m->lin_heads * 128;
}
static size_t gla_k_width(const sala_dims *m) {
    return (size_t)m->lin_kv_heads * 128;
}
static size_t gla_state_width(const sala_dims *m) {
    return (size_t)m->lin_heads * 128 * 128;
}

static gla_pass *gla_pass_make(const sala_dims *m) {
    gla_pass *p = (gla_pass *)gla_memory(sizeof *p);
    size_t qw = gla_q_width(m), kw = gla_k_width(m), states = GLA_SLOTS * gla_state_width(m);
    memset(p, 0, sizeof *p);
    p->dims = *m;
    p->q = gla_noise(GLA_ROWS * qw, 2, 0);
    p->raw_k = gla_noise(GLA_ROWS * kw, 2, 0);
    p->v = gla_noise(GLA_ROWS * kw, 1, 0);
    p->k = (uint16_t *)gla_memory(GLA_ROWS * kw * 2);
    p->o = (uint16_t *)gla_memory(GLA_ROWS * qw * 2);
    p->pending_k = gla_noise(GLA_SLOTS * SALA_MAX_PATH * kw, 2, 0);
    p->pending_v = gla_noise(GLA_SLOTS * SALA_MAX_PATH * kw, 1, 0);
    p->q_norm = gla_noise(128, 0.5f, 1);
    p->k_norm = gla_noise(128, 0.5f, 1);
    p->cos_sin = (float *)gla_memory(GLA_ROWS * 128 * 4);
    for (int i = 0; i < GLA_ROWS * 64; i++) {
        float angle = 3.2f * check_uniform();
        p->cos_sin[2 * i] = cosf(angle);
        p->cos_sin[2 * i + 1] = sinf(angle);
    }
    p->state = (float *)gla_memory(states * 4);
    for (size_t i = 0; i < states; i++) p->state[i] = check_uniform();
    p->decay = (float *)gla_memory((size_t)m->lin_heads * 4);
    for (int h = 0; h < m->lin_heads; h++) p->decay[h] = 0.75f + 0.24f * check_uniform();
    return p;
}

static void gla_pass_free(gla_pass *p) {
    void *all[] = {p->q,         p->raw_k,  p->v,      p->k,       p->o,     p->pending_k,
                   p->pending_v, p->q_norm, p->k_norm, p->cos_sin, p->state, p->decay};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p);
}

// Add a sequence of `nodes` nodes. Shapes: 0 chain, 1 star, 2 binary, 3 any; 4 two chains in turn.
static void gla_pass_add(gla_pass *p, int nodes, int shape, int pending) {
    sala_seq *s = &p->seq[p->seqs];
    int deepest = shape == 3 ? 1 + gla_below(SALA_MAX_PATH - 1) : SALA_MAX_PATH - 1;
    memset(s, 0, sizeof *s);
    s->slot = (5 * p->seqs + 2) % GLA_SLOTS;
    s->first_row = p->rows;
    s->rows = nodes;
    s->stored = 100 + 17 * p->seqs;
    s->pending = pending;
    sala_tree t;
    int32_t row[SALA_MAX_NODES];
    t.count = nodes;
    for (int n = 0; n < nodes; n++) {
        int up = n - 1;
        if (shape == 1) up = 0;
        if (shape == 2) up = (n - 1) / 2;
        if (shape == 3 && n) up = gla_below(n);
        if (shape == 4) up = n > 2 ? n - 2 : 0;
        while (n && t.depth[up] >= deepest) up = t.parent[up];
        t.parent[n] = n ? up : -1;
        t.depth[n] = n ? t.depth[up] + 1 : 0;
    }
    int wait = sala__tree_rows(&t, row);
    if (wait > p->tree_slots) p->tree_slots = wait;
    sala__tree_forks(&t, row, p->forks + p->rows);
    for (int n = 0; n < nodes; n++) {
        int r = p->rows + row[n], depth = t.depth[n];
        p->parent[r] = n ? s->first_row + row[t.parent[n]] : -1;
        p->position[r] = s->stored + depth;
        p->of[r] = p->seqs;
        for (int k = 0; k < SALA_MAX_PATH; k++) p->path[r * SALA_MAX_PATH + k] = -1;
        for (int k = 0; k < depth; k++)
            p->path[r * SALA_MAX_PATH + k] = p->path[p->parent[r] * SALA_MAX_PATH + k];
        p->path[r * SALA_MAX_PATH + depth] = r;
    }
    p->rows += nodes;
    p->seqs++;
    p->bucket_rows = p->rows;
    p->bucket_seqs = p->seqs;
}

static sala_weight gla_vector(const void *data, int n) {
    sala_weight w = sala_plain_weight(data, SALA_BF16, n, 1);
    return w;
}

// Device memory that the next pass of the same device uses again: hundreds of passes are run.
enum { GLA_KEPT = 20 };
static struct {
    void *at;
    size_t bytes;
} gla_kept[GLA_KEPT];
static int gla_kept_next; // counts through a pass

static void gla_open(const sala_dims *m) {
    memset(gla_kept, 0, sizeof gla_kept);
    device_open(m);
}

static void *gla_put(const void *host, size_t bytes) {
    int i = gla_kept_next++ % GLA_KEPT;
    if (gla_kept[i].bytes >= bytes) {
        to_device(gla_kept[i].at, host, bytes);
    } else {
        gla_kept[i].at = on_device(host, bytes);
        gla_kept[i].bytes = bytes;
    }
    return gla_kept[i].at;
}

// Rows on the device.
static const sala_rows *gla_device_rows(int rows, int seqs, const sala_seq *seq,
                                        const int32_t *position, const int32_t *path,
                                        const int32_t *of, const int32_t *token) {
    sala_rows on = {rows, seqs, 1, NULL, NULL, NULL, NULL, NULL};
    size_t n = (size_t)rows * 4;
    on.seqs = (const sala_seq *)gla_put(seq, (size_t)seqs * sizeof *seq);
    if (token) on.token = (const int32_t *)gla_put(token, n);
    on.position = (const int32_t *)gla_put(position, n);
    on.seq = (const int32_t *)gla_put(of, n);
    if (path) on.path = (const int32_t *)gla_put(path, n * SALA_MAX_PATH);
    return (const sala_rows *)gla_put(&on, sizeof on);
}

// The states as a GPU has them, or back.
static float *gla_states(const sala_dims *m, const float *from, int back) {
    size_t count = GLA_SLOTS * gla_state_width(m);
    float *to = (float *)gla_memory(count * 4);
    for (size_t i = 0; i < count; i++) {
        int key = (int)(i % 16384) / 128, column = (int)(i % 128);
        size_t there = i / 16384 * 16384 + (size_t)sala_state_place(key, column);
        to[back ? i : there] = from[back ? there : i];
    }
    return to;
}

// Run the pass on the device: state, k and o change as they do there.
static void gla_device(gla_pass *p) {
    const sala_dims *m = &p->dims;
    size_t qw = gla_q_width(m) * 2, kw = gla_k_width(m) * 2, pool = GLA_SLOTS * SALA_MAX_PATH * kw;
    sala_gla_args a;
    gla_kept_next = 0;
    memset(&a, 0, sizeof a);
    a.rows = gla_device_rows(p->rows, p->seqs, p->seq, p->position, p->path, p->of, NULL);
    a.q_norm = gla_vector(p->no_norm ? NULL : gla_put(p->q_norm, 256), 128);
    a.k_norm = gla_vector(p->no_norm ? NULL : gla_put(p->k_norm, 256), 128);
    a.cos_sin = p->no_rope ? NULL : (const float *)gla_put(p->cos_sin, GLA_ROWS * 512);
    a.decay = (const float *)gla_put(p->decay, (size_t)m->lin_heads * 4);
    a.q = (sala_act *)gla_put(p->q, GLA_ROWS * qw);
    a.raw_k = (const sala_act *)gla_put(p->raw_k, GLA_ROWS * kw);
    a.k = (sala_act *)gla_put(p->k, GLA_ROWS * kw);
    a.v = (const sala_act *)gla_put(p->v, GLA_ROWS * kw);
    float *states = gla_states(m, p->state, 0), *ordered;
    a.state = (float *)gla_put(states, GLA_SLOTS * gla_state_width(m) * 4);
    a.pending_k = (const sala_act *)gla_put(p->pending_k, pool);
    a.pending_v = (const sala_act *)gla_put(p->pending_v, pool);
    a.o = p->no_output ? NULL : (sala_act *)gla_put(p->o, GLA_ROWS * qw);
    a.forks = (const int32_t *)gla_put(p->forks, sizeof p->forks);
    gpu->rows = p->bucket_rows;
    gpu->seqs = p->bucket_seqs;
    gpu->tree_slots = p->tree_slots;
    sala__launch_gla_verify(gpu, &a);
    device_sync();
    from_device(states, a.state, GLA_SLOTS * gla_state_width(m) * 4);
    ordered = gla_states(m, states, 1);
    memcpy(p->state, ordered, GLA_SLOTS * gla_state_width(m) * 4);
    free(states);
    free(ordered);
    from_device(p->k, a.k, GLA_ROWS * kw);
    if (a.o) from_device(p->o, a.o, GLA_ROWS * qw);
}

static void gla_twin(gla_pass *p) { // the same by the C body
    sala_rows rows = {p->rows, p->seqs, 1, p->seq, NULL, p->position, p->of, p->path};
    sala_gla_args a;
    memset(&a, 0, sizeof a);
    a.dims = &p->dims;
    a.rows = &rows;
    a.q_norm = gla_vector(p->no_norm ? NULL : p->q_norm, 128);
    a.k_norm = gla_vector(p->no_norm ? NULL : p->k_norm, 128);
    a.cos_sin = p->no_rope ? NULL : p->cos_sin;
    a.decay = p->decay;
    a.q = (sala_act *)gla_memory(GLA_ROWS * gla_q_width(&p->dims) * 2);
    memcpy(a.q, p->q, GLA_ROWS * gla_q_width(&p->dims) * 2);
    a.raw_k = p->raw_k;
    a.k = p->k;
    a.v = p->v;
    a.state = p->state;
    a.pending_k = p->pending_k;
    a.pending_v = p->pending_v;
    a.o = p->no_output ? NULL : p->o;
    sala__op_gla_verify(gla_cpu(&p->dims), &a);
    free(a.q);
}

typedef struct gla_result { // what a pass wrote
    float *state;
    uint16_t *k, *o;
} gla_result;

static gla_result gla_copy(const gla_pass *p) {
    size_t qw = gla_q_width(&p->dims) * 2, kw = gla_k_width(&p->dims) * 2;
    size_t states = GLA_SLOTS * gla_state_width(&p->dims) * 4;
    gla_result r = {(float *)gla_memory(states), (uint16_t *)gla_memory(GLA_ROWS * kw),
                    (uint16_t *)gla_memory(GLA_ROWS * qw)};
    memcpy(r.state, p->state, states);
    memcpy(r.k, p->k, GLA_ROWS * kw);
    memcpy(r.o, p->o, GLA_ROWS * qw);
    return r;
}

static void gla_restore(gla_pass *p, const gla_result *r) {
    memcpy(p->state, r->state, GLA_SLOTS * gla_state_width(&p->dims) * 4);
    memcpy(p->k, r->k, GLA_ROWS * gla_k_width(&p->dims) * 2);
    memcpy(p->o, r->o, GLA_ROWS * gla_q_width(&p->dims) * 2);
}

static int gla_same(const gla_pass *p, const gla_result *r) { // all bits, untouched ones too
    return !memcmp(p->state, r->state, GLA_SLOTS * gla_state_width(&p->dims) * 4) &&
           !memcmp(p->k, r->k, GLA_ROWS * gla_k_width(&p->dims) * 2) &&
           !memcmp(p->o, r->o, GLA_ROWS * gla_q_width(&p->dims) * 2);
}

static void gla_result_free(gla_result *r) {
    free(r->state);
    free(r->k);
    free(r->o);
}

// The device against the twin. The stored state is the same operations on the same numbers: equal
// bits. A norm sums its squares in another order, which may move a BF16 by a step, and RoPE adds
// two such: k within two steps of its head's largest. o is a sum over 128 of them, of which few
// moved: within two steps of its head's largest. What nobody may write must not change.
static void gla_check_twin(gla_pass *p, const char *what) {
    const sala_dims *m = &p->dims;
    gla_result before = gla_copy(p), device;
    gla_device(p);
    device = gla_copy(p);
    gla_restore(p, &before);
    gla_twin(p);
    CHECK(!memcmp(p->state, device.state, GLA_SLOTS * gla_state_width(m) * 4),
          "%s: the stored state", what);
    size_t kw = gla_k_width(m), qw = gla_q_width(m), rows = (size_t)p->rows;
    for (size_t h = 0; h < rows * (size_t)m->lin_kv_heads && !p->no_output; h++)
        CHECK(gla_steps(device.k + h * 128, p->k + h * 128, 128) <= 2, "%s: k, vector %zu", what,
              h);
    for (size_t h = 0; h < rows * (size_t)m->lin_heads && !p->no_output; h++)
        CHECK(gla_steps(device.o + h * 128, p->o + h * 128, 128) <= 2, "%s: o, vector %zu: %g",
              what, h, gla_steps(device.o + h * 128, p->o + h * 128, 128));
    if (p->no_output) rows = 0;
    CHECK(!memcmp(before.k + rows * kw, device.k + rows * kw, (GLA_ROWS - rows) * kw * 2) &&
              !memcmp(before.o + rows * qw, device.o + rows * qw, (GLA_ROWS - rows) * qw * 2),
          "%s: a padding row was written", what);
    gla_restore(p, &before);
    gla_result_free(&before);
    gla_result_free(&device);
}

static const int gla_groups[3][2] = {{4, 4}, {4, 2}, {4, 1}}; // heads, K/V heads

static void test_gla_verify_twin(void) {
    for (int g = 0; g < 3; g++) {
        sala_dims m = gla_dims(gla_groups[g][0], gla_groups[g][1], 128);
        gla_open(&m);
        for (int pending = 0; pending <= SALA_MAX_PATH; pending += g == 0 ? 1 : 8) {
            gla_pass *p = gla_pass_make(&m);
            gla_pass_add(p, 1, 0, pending);
            gla_pass_add(p, pending % 2 ? 16 : 5, pending % 3 ? 0 : 2, SALA_MAX_PATH - pending);
            p->bucket_rows = p->rows + 3;
            p->bucket_seqs = 4;
            p->no_norm = pending % 5 == 1;
            p->no_rope = pending % 5 == 2;
            gla_check_twin(p, "one node and some");
            p->no_output = 1;
            gla_check_twin(p, "only fold");
            gla_pass_free(p);
        }
        device_close();
    }
}

// Decode the path to row `leaf` token by token, one-node passes that commit each node, and compare
// every node with what the tree's pass gave.
static void gla_check_path(const gla_pass *tree, const gla_result *got, int leaf) {
    const sala_dims *m = &tree->dims;
    const sala_seq *s = &tree->seq[tree->of[leaf]];
    size_t qw = gla_q_width(m), kw = gla_k_width(m), slot = (size_t)s->slot;
    gla_pass *one = gla_pass_make(m);
    int depth = tree->position[leaf] - s->stored;
    memcpy(one->state, tree->state, GLA_SLOTS * gla_state_width(m) * 4);
    memcpy(one->decay, tree->decay, (size_t)m->lin_heads * 4);
    memcpy(one->q_norm, tree->q_norm, 256);
    memcpy(one->k_norm, tree->k_norm, 256);
    memcpy(one->pending_k, tree->pending_k, GLA_SLOTS * SALA_MAX_PATH * kw * 2);
    memcpy(one->pending_v, tree->pending_v, GLA_SLOTS * SALA_MAX_PATH * kw * 2);
    gla_pass_add(one, 1, 0, s->pending);
    one->seq[0].slot = s->slot;
    for (int d = 0; d <= depth; d++) {
        size_t r = (size_t)tree->path[leaf * SALA_MAX_PATH + d];
        memcpy(one->q, tree->q + r * qw, qw * 2);
        memcpy(one->raw_k, tree->raw_k + r * kw, kw * 2);
        memcpy(one->v, tree->v + r * kw, kw * 2);
        memcpy(one->cos_sin, tree->cos_sin + r * 128, 512);
        gla_device(one);
        CHECK(!memcmp(one->o, got->o + r * qw, qw * 2), "row %zu at depth %d: o", r, d);
        CHECK(!memcmp(one->k, got->k + r * kw, kw * 2), "row %zu at depth %d: k", r, d);
        if (d == 0 && s->pending)
            CHECK(!memcmp(one->state, got->state, gla_state_width(m) * 4), "the stored state");
        memcpy(one->pending_k + slot * SALA_MAX_PATH * kw, one->k, kw * 2);
        memcpy(one->pending_v + slot * SALA_MAX_PATH * kw, one->v, kw * 2);
        one->seq[0].pending = 1;
    }
    gla_pass_free(one);
}

static int gla_is_leaf(const gla_pass *p, int row) {
    for (int r = row + 1; r < p->rows; r++)
        if (p->parent[r] == row) return 0;
    return 1;
}

// Any tree gives every node the bits of its own path alone, however many states can be saved.
static void test_gla_verify_trees(void) {
    sala_dims m = gla_dims(2, 1, 128);
    gla_open(&m);
    for (int round = 0; round < 10; round++) {
        gla_pass *p = gla_pass_make(&m);
        gla_pass_add(p,
                     round == 0  ? 16
                     : round < 5 ? 10 + 3 * round
                                 : 1 + gla_below(SALA_MAX_NODES),
                     round % 5, round % 2 ? gla_below(SALA_MAX_PATH + 1) : 0);
        gla_result before = gla_copy(p), first = before;
        for (int more = 0; more < 2; more++) {
            gla_restore(p, &before);
            p->tree_slots += more && p->tree_slots < 4;
            gla_device(p);
            if (!more) first = gla_copy(p);
            CHECK(gla_same(p, &first), "round %d: %d nodes, %d slots", round, p->rows,
                  p->tree_slots);
        }
        gla_restore(p, &before);
        for (int r = 0, left = 3; r < p->rows && left; r++)
            if (gla_is_leaf(p, r) && (gla_below(3) == 0 || r > p->rows - 3)) {
                gla_check_path(p, &first, r);
                left--;
            }
        gla_result_free(&before);
        gla_result_free(&first);
        gla_pass_free(p);
    }
    device_close();
}

// Sequences together and alone give the same bits; padding sequences and rows change nothing.
static void test_gla_verify_together(void) {
    static const int nodes[3] = {7, 1, 20}, shapes[3] = {3, 0, 2}, pending[3] = {3, 0, 16};
    sala_dims m = gla_dims(4, 2, 128);
    gla_open(&m);
    gla_pass *p = gla_pass_make(&m);
    for (int i = 0; i < 3; i++) gla_pass_add(p, nodes[i], shapes[i], pending[i]);
    p->bucket_rows = p->rows + 4;
    p->bucket_seqs = GLA_SEQS;
    gla_result before = gla_copy(p), together;
    gla_device(p);
    together = gla_copy(p);
    gla_restore(p, &before);
    sala_seq all[3];
    memcpy(all, p->seq, sizeof all);
    p->bucket_seqs = p->seqs = 1;
    int slots = p->tree_slots;
    for (int i = 0; i < 3; i++) { // each by itself, where it was: what is written adds up
        p->seq[0] = all[2 - i];
        p->tree_slots = all[2 - i].rows == 1 ? 0 : slots; // the same bits when there are none
        gla_device(p);
    }
    CHECK(gla_same(p, &together), "three sequences together and alone");
    gla_result_free(&before);
    gla_result_free(&together);
    gla_pass_free(p);
    device_close();
}

// ---- the small ones ----

static void gla_check_gate(const sala_dims *m, int rows, int normed, int gated) {
    int width = m->lin_heads * 128;
    size_t size = (size_t)rows * (size_t)width;
    uint16_t *o = gla_noise(size, 3, 0), *gate = gla_noise(size, 6, 0),
             *norm = gla_noise((size_t)width, 0.5f, 1), *got = (uint16_t *)gla_memory(size * 2),
             *alone = (uint16_t *)gla_memory((size_t)width * 2);
    sala_gate_args a = {
        rows, width, m->eps, gla_vector(normed ? norm : NULL, width), gated ? gate : NULL, o, o};
    sala_gate_args d = a;
    if (normed) d.norm.data = on_device(norm, (size_t)width * 2);
    if (gated) d.gate = (const sala_act *)on_device(gate, size * 2);
    d.o = (const sala_act *)on_device(o, size * 2);
    d.y = (sala_act *)on_device(NULL, size * 2);
    sala__launch_gate(gpu, &d);
    device_sync();
    from_device(got, d.y, size * 2);
    d.rows = 1; // the last row by itself
    d.o = (const sala_act *)on_device(o + size - (size_t)width, (size_t)width * 2);
    d.y = (sala_act *)on_device(NULL, (size_t)width * 2);
    if (gated) d.gate = (const sala_act *)on_device(gate + size - (size_t)width, (size_t)width * 2);
    sala__launch_gate(gpu, &d);
    device_sync();
    from_device(alone, d.y, (size_t)width * 2);
    CHECK(!memcmp(alone, got + size - (size_t)width, (size_t)width * 2), "a row alone differs");
    sala__op_gate(gla_cpu(m), &a);
    for (size_t i = 0; i < size; i++) // three roundings, each of which may fall a step aside
        CHECK(fabsf(sala_bf16_f32(got[i]) - sala_bf16_f32(o[i])) <=
                  fabsf(sala_bf16_f32(o[i])) * (3.0f / 128),
              "gate %d %d, element %zu: %g, not %g", normed, gated, i, sala_bf16_f32(got[i]),
              sala_bf16_f32(o[i]));
    free(o);
    free(gate);
    free(norm);
    free(got);
    free(alone);
}

static void gla_check_embed(const sala_dims *m) {
    enum { ROWS = 5 };
    int32_t token[ROWS] = {0, m->vocab - 1, 9, 8, 9}, position[ROWS] = {0, 1, 2, 3, 4},
            of[ROWS] = {0};
    size_t hidden = (size_t)m->hidden, packed_rows = ((size_t)m->vocab + 63) / 64 * 64;
    uint16_t *table = gla_noise((size_t)m->vocab * hidden, 1, 0),
             *packed = (uint16_t *)gla_memory(packed_rows * hidden * 2),
             *x = (uint16_t *)gla_memory((ROWS + 1) * hidden * 2),
             *got = (uint16_t *)gla_memory((ROWS + 1) * hidden * 2);
    for (int n = 0; n < m->vocab; n++)
        for (int k = 0; k < m->hidden; k++)
            packed[sala_packed(n, k, m->vocab)] = table[(size_t)n * hidden + (size_t)k];
    sala_seq seq;
    memset(&seq, 0, sizeof seq);
    sala_rows rows = {ROWS, 1, 1, &seq, token, position, of, NULL};
    sala_embed_args a = {m, &rows, sala_plain_weight(table, SALA_BF16, m->vocab, m->hidden), x},
                    d = a;
    d.rows = gla_device_rows(ROWS, 1, &seq, position, NULL, of, token);
    d.table.data = on_device(packed, packed_rows * hidden * 2);
    d.x = (sala_act *)on_device(x, (ROWS + 1) * hidden * 2);
    gpu->rows = ROWS + 1; // one of padding
    sala__launch_embed(gpu, &d);
    device_sync();
    from_device(got, d.x, (ROWS + 1) * hidden * 2);
    sala__op_embed(gla_cpu(m), &a);
    CHECK(!memcmp(x, got, (ROWS + 1) * hidden * 2), "hidden %d", m->hidden);
    free(table);
    free(packed);
    free(x);
    free(got);
}

static void test_embed_gate(void) {
    static const int shapes[3][3] = {{2, 2, 192}, {17, 17, 2112}, {40, 8, 64}};
    for (int i = 0; i < 3; i++) {
        sala_dims m = gla_dims(shapes[i][0], shapes[i][1], shapes[i][2]);
        gla_open(&m);
        gla_check_embed(&m);
        for (int form = 0; form < 4; form++) gla_check_gate(&m, 1 + 2 * i, form & 1, form >> 1);
        device_close();
    }
}

static void gla_check_rope_table(void) {
    enum { ROWS = 7 };
    static const int32_t position[ROWS] = {0, 1, 63, 4097, 123456, 1000000, 2000000000};
    int32_t of[ROWS] = {0};
    sala_seq seq;
    float frequency[64], got[ROWS + 1][64][2], want[ROWS][64][2];
    memset(&seq, 0, sizeof seq);
    memset(got, GLA_UNTOUCHED, sizeof got);
    for (int i = 0; i < 64; i++) frequency[i] = (float)pow(10000.0, -2.0 * i / 128);
    sala_rows rows = {ROWS, 1, 1, &seq, NULL, position, of, NULL};
    sala_rope_args a = {&rows, 128, frequency, &want[0][0][0]}, d = a;
    d.rows = gla_device_rows(ROWS, 1, &seq, position, NULL, of, NULL);
    d.frequency = (const float *)on_device(frequency, sizeof frequency);
    d.cos_sin = (float *)on_device(got, sizeof got);
    gpu->rows = ROWS + 1;
    sala__launch_rope_table(gpu, &d);
    device_sync();
    from_device(got, d.cos_sin, sizeof got);
    sala__op_rope_table(gla_cpu(&device_dims), &a);
    for (int i = 0; i < ROWS * 128; i++) { // two libraries' double, rounded: at most one ulp
        float x = (&got[0][0][0])[i], y = (&want[0][0][0])[i];
        CHECK(fabsf(x - y) <= fabsf(y) * 0x1p-23f, "row %d, %d: %g, not %g", i / 128, i % 128, x,
              y);
    }
    CHECK(sala_f32_bits(got[ROWS][5][0]) == 0x5A5A5A5Au, "a padding row was written");
}

static void gla_check_qk(const sala_dims *m, int rows, int normed, int turned) {
    int heads = 3, kv_heads = 2;
    size_t q_size = (size_t)(rows * heads * 128), k_size = (size_t)(rows * kv_heads * 128);
    uint16_t *q = gla_noise(q_size, 2, 0), *k = gla_noise(k_size, 2, 0),
             *norm = gla_noise(256, 0.5f, 1), *got_q = (uint16_t *)gla_memory(q_size * 2),
             *got_k = (uint16_t *)gla_memory(k_size * 2);
    gla_pass *p = gla_pass_make(m); // for its table
    sala_qk_args a = {rows,
                      heads,
                      kv_heads,
                      128,
                      m->eps,
                      gla_vector(normed ? norm : NULL, 128),
                      gla_vector(normed ? norm + 128 : NULL, 128),
                      turned ? p->cos_sin : NULL,
                      q,
                      k};
    sala_qk_args d = a;
    if (normed) d.q_norm.data = on_device(norm, 256);
    if (normed) d.k_norm.data = on_device(norm + 128, 256);
    if (turned) d.cos_sin = (const float *)on_device(p->cos_sin, (size_t)rows * 512);
    d.q = (sala_act *)on_device(q, q_size * 2);
    d.k = (sala_act *)on_device(k, k_size * 2);
    sala__launch_qk_norm_rope(gpu, &d);
    device_sync();
    from_device(got_q, d.q, q_size * 2);
    from_device(got_k, d.k, k_size * 2);
    sala__op_qk_norm_rope(gla_cpu(m), &a);
    for (int h = 0; h < rows * heads; h++)
        CHECK(gla_steps(got_q + h * 128, q + h * 128, 128) <= 2, "q %d %d", normed, turned);
    for (int h = 0; h < rows * kv_heads; h++)
        CHECK(gla_steps(got_k + h * 128, k + h * 128, 128) <= 2, "k %d %d", normed, turned);
    gla_pass_free(p);
    free(q);
    free(k);
    free(norm);
    free(got_q);
    free(got_k);
}

static void test_rope_qk(void) {
    sala_dims m = gla_dims(2, 2, 64);
    gla_open(&m);
    gla_check_rope_table();
    for (int form = 0; form < 4; form++) gla_check_qk(&m, 1 + 4 * form, form & 1, form >> 1);
    device_close();
}

// ---- commit ----

enum { COMMIT_PAGES = 8, COMMIT_LAYERS = 2 };

typedef struct commit_memory { // what commit reads and writes: all of it, for one memcmp
    uint16_t *node[4], *page[4],
        *lin[4]; // k, v, tier1, tier2; node_k, node_v, pending_k, pending_v
    size_t node_bytes, page_bytes[4], lin_bytes[4];
} commit_memory;

static commit_memory commit_make(const sala_dims *m) {
    commit_memory c;
    size_t kv = (size_t)m->kv_heads * 128, lin = gla_k_width(m);
    size_t rows[4] = {(size_t)m->block, (size_t)m->block, (size_t)sala_tier_slots(m, 1),
                      (size_t)sala_tier_slots(m, 2)};
    c.node_bytes = COMMIT_LAYERS * GLA_ROWS * kv * 2;
    for (int i = 0; i < 4; i++) {
        c.page_bytes[i] = COMMIT_LAYERS * COMMIT_PAGES * rows[i] * kv * 2;
        c.lin_bytes[i] = COMMIT_LAYERS * lin * 2 * (i < 2 ? GLA_ROWS : GLA_SLOTS * SALA_MAX_PATH);
        c.node[i] = gla_noise(c.node_bytes / 2, 1, 0);
        c.page[i] = gla_noise(c.page_bytes[i] / 2, 1, 0);
        c.lin[i] = gla_noise(c.lin_bytes[i] / 2, 1, 0);
    }
    return c;
}

// The arguments over memory that begins at the given pointers.
static void commit_point(const sala_dims *m, sala_nodes nodes[COMMIT_LAYERS],
                         sala_pages pages[COMMIT_LAYERS], sala_act *const node[4],
                         sala_act *const page[4]) {
    size_t kv = (size_t)m->kv_heads * 128, n = GLA_ROWS * kv, p = COMMIT_PAGES * kv;
    size_t rows[3] = {(size_t)m->block, (size_t)sala_tier_slots(m, 1),
                      (size_t)sala_tier_slots(m, 2)};
    for (size_t l = 0; l < COMMIT_LAYERS; l++) {
        sala_nodes at = {node[0] + l * n, node[1] + l * n, node[2] + l * n, node[3] + l * n};
        sala_pages to = {page[0] + l * p * rows[0], page[1] + l * p * rows[0],
                         page[2] + l * p * rows[1], page[3] + l * p * rows[2]};
        nodes[l] = at;
        pages[l] = to;
    }
}

// Three sequences at odd places: one takes a whole chain over the end of a block and of windows of
// both tiers, one a path through a tree, one nothing.
static void test_commit(void) {
    static const int32_t pages[3][4] = {{3, 0, 5, 1}, {7, 2, 6, 4}, {0, 0, 0, 0}};
    static const int stored[3] = {120, 178, 40}, nodes[3] = {16, 22, 3}, shapes[3] = {0, 3, 0};
    sala_dims m = gla_dims(4, 2, 128);
    gla_open(&m);
    gla_pass *p = gla_pass_make(&m);
    int32_t accepted[3] = {16, 0, 0}, list[3 * SALA_MAX_PATH];
    memset(list, -1, sizeof list);
    for (int i = 0; i < 3; i++) {
        gla_pass_add(p, nodes[i], shapes[i], 0);
        for (int r = p->seq[i].first_row; r < p->rows; r++)
            p->position[r] += stored[i] - p->seq[i].stored;
        p->seq[i].stored = stored[i];
        p->seq[i].pages = pages[i];
    }
    accepted[1] = p->position[p->seq[2].first_row - 1] - stored[1] + 1;
    memcpy(list, p->path + 15 * SALA_MAX_PATH, 16 * 4);
    memcpy(list + SALA_MAX_PATH, p->path + (p->seq[2].first_row - 1) * SALA_MAX_PATH, 16 * 4);
    commit_memory c = commit_make(&m);
    sala_rows rows = {p->rows, 3, 1, p->seq, NULL, p->position, p->of, p->path};
    sala_nodes on_nodes[COMMIT_LAYERS];
    sala_pages on_pages[COMMIT_LAYERS];
    sala_commit_args a = {&m,       &rows,    COMMIT_LAYERS, COMMIT_LAYERS, GLA_SLOTS,
                          GLA_ROWS, accepted, list,          on_nodes,      on_pages,
                          c.lin[0], c.lin[1], c.lin[2],      c.lin[3]};
    sala_commit_args d = a;
    sala_act *node[4], *page[4], *lin[4];
    for (int i = 0; i < 4; i++) {
        node[i] = (sala_act *)on_device(c.node[i], c.node_bytes);
        page[i] = (sala_act *)on_device(c.page[i], c.page_bytes[i]);
        lin[i] = (sala_act *)on_device(c.lin[i], c.lin_bytes[i]);
    }
    commit_point(&m, on_nodes, on_pages, node, page);
    d.nodes = (const sala_nodes *)on_device(on_nodes, sizeof on_nodes);
    d.pages = (const sala_pages *)on_device(on_pages, sizeof on_pages);
    d.accepted = (const int32_t *)on_device(accepted, sizeof accepted);
    d.accepted_rows = (const int32_t *)on_device(list, sizeof list);
    d.node_k = lin[0];
    d.node_v = lin[1];
    d.pending_k = lin[2];
    d.pending_v = lin[3];
    sala_seq there[3];
    memcpy(there, p->seq, sizeof there);
    for (int i = 0; i < 3; i++)
        there[i].pages = (const int32_t *)on_device(pages[i], sizeof pages[i]);
    d.rows = gla_device_rows(p->rows, 3, there, p->position, p->path, p->of, NULL);
    gpu->rows = p->rows + 5;
    gpu->seqs = GLA_SEQS;
    sala__launch_commit(gpu, &d);
    device_sync();
    commit_point(&m, on_nodes, on_pages, c.node, c.page);
    sala__op_commit(gla_cpu(&m), &a);
    for (int i = 0; i < 4; i++) {
        uint16_t *got = (uint16_t *)gla_memory(c.page_bytes[i]);
        from_device(got, page[i], c.page_bytes[i]);
        CHECK(!memcmp(got, c.page[i], c.page_bytes[i]), "pages: pool %d", i);
        free(got);
        got = (uint16_t *)gla_memory(c.lin_bytes[i]);
        from_device(got, lin[i], c.lin_bytes[i]);
        CHECK(!memcmp(got, c.lin[i], c.lin_bytes[i]), "lightning: pool %d", i);
        free(got);
    }
    for (int i = 0; i < 4; i++) {
        free(c.node[i]);
        free(c.page[i]);
        free(c.lin[i]);
    }
    gla_pass_free(p);
    device_close();
}
