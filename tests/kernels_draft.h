/*  kernels_draft.h - tests of the draft head's own kernels against their C twins. Included by test_kernels.c after
    kernels_gla.h. Copies, choices and trees are compared bit by bit, norms and logarithms with a tolerance. */

enum { DRAFT_HIDDEN = 2112, DRAFT_KV = 3, DRAFT_VOCAB = 200 };

static sala_dims draft_dims(void) {
    sala_dims m = sparse_dims(3, DRAFT_KV, 1, 4, 512);
    m.hidden = DRAFT_HIDDEN;
    m.vocab = DRAFT_VOCAB;
    return m;
}

static void draft_open(void) {
    sala_dims m = draft_dims();
    device_open_units(&m, 1 << 7);
    memset(gla_kept, 0, sizeof gla_kept); // of another device context
}

static sala_weight draft_vector(const uint16_t *data, int width) {
    return sala_plain_weight(data, SALA_BF16, width, 1);
}

// Two roundings of numbers that differ by the order of a sum.
static int draft_near(const uint16_t *x, const uint16_t *y, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!(fabsf(sala_bf16_f32(x[i]) - sala_bf16_f32(y[i])) <=
              fabsf(sala_bf16_f32(y[i])) * 0x1p-6f))
            return 0;
    return 1;
}

static void test_draft_capture_keep(void) {
    enum { ROWS = 9, W = DRAFT_HIDDEN, SLOTS = 4, PLACES = 2 };
    draft_open();
    size_t row = 3 * W, debt = (size_t)PLACES * SALA_DRAFT_DEBT * row;
    uint16_t *x = gla_noise((size_t)ROWS * W, 2, 0), *by = gla_noise(W, 0.5f, 1);
    uint16_t *want = (uint16_t *)gla_memory(ROWS * row * 2),
             *got = (uint16_t *)gla_memory(ROWS * row * 2);
    sala_capture_args c;
    memset(&c, 0, sizeof c);
    c.rows = ROWS, c.width = W, c.eps = 1e-6f, c.x = x, c.features = want;
    sala_capture_args d = c;
    d.x = (sala_act *)on_device(x, (size_t)ROWS * W * 2);
    d.features = (sala_act *)on_device(got, ROWS * row * 2);
    for (int third = 0; third < 3; third++) {
        c.third = d.third = third;
        c.norm = d.norm = draft_vector(third == 1 ? by : NULL, W);
        for (size_t i = 0; i < (size_t)ROWS * W; i++) x[i] ^= (uint16_t)(0x10 << third);
        to_device((void *)(uintptr_t)d.x, x, (size_t)ROWS * W * 2);
        if (third == 1) d.norm.data = on_device(by, W * 2);
        sala__op_capture(gla_cpu(&device_dims), &c);
        sala__launch_capture(gpu, &d);
        device_sync();
    }
    from_device(got, d.features, ROWS * row * 2);
    for (int r = 0; r < ROWS; r++)
        for (int third = 0; third < 3; third++) {
            uint16_t *g = got + (size_t)r * row + (size_t)third * W, *w = want + (g - got);
            CHECK(third == 1 ? draft_near(g, w, W) : memcmp(g, w, W * 2) == 0, "row %d, third %d",
                  r, third);
        }
    // keep: three sequences, one of which has no place; positions pass the end of the ring
    sala_seq seq[3];
    memset(seq, 0, sizeof seq);
    seq[0].slot = 2, seq[1].slot = 0, seq[2].slot = 3;
    int32_t position[ROWS] = {255, 256, 256, 7, 8, 9, 40, 41, 42},
            of[ROWS] = {0, 0, 0, 1, 1, 1, 2, 2, 2};
    int32_t accepted[3] = {2, 3, 1}, rows[3 * SALA_MAX_PATH] = {0, 2}, place[SLOTS] = {-1, 0, 1, 0};
    rows[SALA_MAX_PATH] = 3, rows[SALA_MAX_PATH + 1] = 4, rows[SALA_MAX_PATH + 2] = 5;
    rows[2 * SALA_MAX_PATH] = 6;
    uint16_t *kept = (uint16_t *)gla_memory(debt * 2), *there = (uint16_t *)gla_memory(debt * 2);
    sala_rows on_host = {ROWS, 3, 1, seq, NULL, position, of, NULL};
    sala_keep_args k = {&on_host, (int32_t)row, accepted, rows, place, got, kept}, l = k;
    l.rows = gla_device_rows(ROWS, 3, seq, position, NULL, of, NULL);
    l.accepted = (const int32_t *)on_device(accepted, sizeof accepted);
    l.accepted_rows = (const int32_t *)on_device(rows, sizeof rows);
    l.place = (const int32_t *)on_device(place, sizeof place);
    l.features = d.features;
    l.debt = (sala_act *)on_device(there, debt * 2);
    gpu->rows = ROWS, gpu->seqs = 4;
    sala__launch_keep(gpu, &l);
    device_sync();
    from_device(there, l.debt, debt * 2);
    sala__op_keep(NULL, &k);
    CHECK(memcmp(there, kept, debt * 2) == 0, "the debt");
    CHECK(memcmp(kept + (SALA_DRAFT_DEBT + 255) * row, got, row * 2) == 0, "position 255");
    CHECK(memcmp(kept + SALA_DRAFT_DEBT * row, got + 2 * row, row * 2) == 0, "position 256");
    // gather: some of it back, one row left alone
    int32_t from[4] = {SALA_DRAFT_DEBT + 255, -1, 40, SALA_DRAFT_DEBT};
    sala_gather_args g = {4, (int32_t)row, from, kept, want}, h = g;
    h.from = (const int32_t *)on_device(from, sizeof from);
    h.features = l.debt;
    memcpy(got, want, 4 * row * 2);
    h.to = (sala_act *)on_device(got, 4 * row * 2);
    sala__launch_gather(gpu, &h);
    device_sync();
    from_device(got, h.to, 4 * row * 2);
    sala__op_gather(NULL, &g);
    CHECK(memcmp(got, want, 4 * row * 2) == 0, "gathered");
    free(x), free(by), free(want), free(got), free(kept), free(there);
    device_close();
}

typedef struct draft_trees { // what trees grow in, on the host
    int32_t token[64], parent[64], flat[64], path[64 * SALA_MAX_PATH], limit[6],
        best_token[64 * SALA_MAX_TOPK];
    float score[64], best_score[64 * SALA_MAX_TOPK];
} draft_trees;

static sala_growth draft_growth(draft_trees *t, int topk, int depth) {
    sala_growth g = {3,         topk,    depth,    5,       t->limit,      t->token,
                     t->parent, t->flat, t->score, t->path, t->best_token, t->best_score};
    return g;
}

static void draft_fill(draft_trees *t, int topk) {
    memset(t, 0, sizeof *t);
    for (int i = 0; i < 64 * topk; i++) {
        t->best_token[i] = sparse_below(9) ? sparse_below(DRAFT_VOCAB) : -1;
        t->best_score[i] = sparse_below(3) ? -fabsf(check_uniform()) : 0;
    }
    for (int i = 0; i < 5; i++) t->token[i] = sparse_below(DRAFT_VOCAB);
    for (int i = 0; i < 3; i++) t->limit[2 * i] = 4 - i, t->limit[2 * i + 1] = 4 + 5 * i;
}

// The input of step 0 and of all later steps, then the trees.
static void draft_check_input(int topk, int biased) {
    enum { W = DRAFT_HIDDEN, MOST = 12, PACKED = (DRAFT_VOCAB + 63) / 64 * 64 };
    static draft_trees t, u;
    const int depth = 4;
    uint16_t *table = gla_noise((size_t)DRAFT_VOCAB * W, 1, 0),
             *packed = (uint16_t *)gla_memory((size_t)PACKED * W * 2);
    uint16_t *norm[3], *x[2], *got = (uint16_t *)gla_memory(2 * MOST * W * 2),
                              *wide = (uint16_t *)gla_memory(2 * MOST * W * 2);
    for (int i = 0; i < 3; i++) norm[i] = gla_noise(W, 0.5f, i < 2);
    for (int i = 0; i < 2; i++) x[i] = gla_noise(MOST * W, 3, 0);
    for (int n = 0; n < DRAFT_VOCAB; n++)
        for (int k = 0; k < W; k++)
            packed[sala_packed(n, k, DRAFT_VOCAB)] = table[(size_t)n * W + (size_t)k];
    draft_fill(&t, topk);
    draft_trees *there = (draft_trees *)on_device(&t, sizeof t);
    sala_draft_input_args a;
    memset(&a, 0, sizeof a);
    a.width = W, a.eps = 1e-6f, a.growth = draft_growth(&t, topk, depth), a.u = wide;
    a.embed = sala_plain_weight(table, SALA_BF16, DRAFT_VOCAB, W);
    a.input_norm = draft_vector(norm[0], W), a.hidden_norm = draft_vector(norm[1], W);
    a.bias = draft_vector(biased ? norm[2] : NULL, W);
    sala_draft_input_args d = a;
    d.growth = draft_growth(there, topk, depth);
    d.embed.data = on_device(packed, (size_t)PACKED * W * 2);
    d.input_norm.data = on_device(norm[0], W * 2), d.hidden_norm.data = on_device(norm[1], W * 2);
    if (biased) d.bias.data = on_device(norm[2], W * 2);
    d.u = (sala_act *)on_device(NULL, 2 * MOST * W * 2);
    sala_act *on[2] = {(sala_act *)on_device(x[0], MOST * W * 2),
                       (sala_act *)on_device(x[1], MOST * W * 2)};
    float *parts = (float *)gla_memory(3 * 5 * W * 4); // of step 0
    for (int i = 0; i < 3 * 5 * W; i++) parts[i] = 2 * check_uniform();
    for (int i = 0; i < 5 * W; i++)
        x[0][i] = sala_f32_bf16(parts[i] + parts[5 * W + i] + parts[10 * W + i]);
    d.parts = (const float *)on_device(parts, 3 * 5 * W * 4);
    d.splits = 3;
    for (int step = 0; step < depth; step++) {
        a.rows = d.rows = step ? 3 * topk : 5;
        a.step = d.step = step;
        a.x = x[step & 1], d.x = on[step & 1];
        a.f = step ? x[(step - 1) & 1] : NULL, d.f = step ? on[(step - 1) & 1] : NULL;
        sala__launch_draft_input(gpu, &d);
        device_sync();
        sala__op_draft_input(gla_cpu(&device_dims), &a);
        size_t count = (size_t)a.rows * W;
        from_device(got, d.x, count * 2);
        CHECK(memcmp(got, a.x, count * 2) == 0, "x of step %d", step);
        from_device(got, d.u, 2 * count * 2);
        CHECK(draft_near(got, wide, 2 * count), "u of step %d", step);
        sparse_noise(a.x, MOST * W, 3); // what the layer makes of it, another for each row
        to_device(d.x, a.x, MOST * W * 2);
    }
    from_device(&u, there, sizeof u);
    CHECK(memcmp(&u, &t, sizeof t) == 0, "what was chosen, topk %d", topk);
    sala_tree trees[3], want[3];
    memset(trees, 0, sizeof trees);
    sala_draft_grow_args grow = {a.growth, want},
                         kernel = {d.growth, (sala_tree *)on_device(trees, sizeof trees)};
    sala__launch_draft_grow(gpu, &kernel);
    device_sync();
    from_device(trees, kernel.trees, sizeof trees);
    sala__op_draft_grow(gla_cpu(&device_dims), &grow);
    CHECK(memcmp(trees, want, sizeof want) == 0, "trees, topk %d", topk);
    free(table), free(packed), free(got), free(wide), free(parts);
    for (int i = 0; i < 5; i++) free(i < 3 ? norm[i] : x[i - 3]);
}

static void test_draft_input_grow(void) {
    draft_open();
    for (int topk = 1; topk <= SALA_MAX_TOPK; topk++) draft_check_input(topk, topk & 1);
    device_close();
}

// With and without q, with and without pages; rows of padding are computed, not stored.
static void test_draft_turn(void) {
    enum {
        ROWS = 6,
        PAGES = 5,
        HEADS = 3,
        ROW = DRAFT_KV * 128,
        Q = HEADS * 128,
        PAGE = 64 * ROW,
        SPLITS = 3
    };
    enum { ALL = 2 * ROW + Q };
    draft_open();
    int32_t position[ROWS] = {0, 63, 64, 127, 5, 6}, of[ROWS] = {0, 0, 0, 1, -1, -1},
            table[2][2] = {{3, 1}, {0, 4}};
    uint16_t *rows_of[3] = {gla_noise(ROWS * ROW, 1, 0), gla_noise(ROWS * ROW, 1, 0),
                            gla_noise(ROWS * Q, 1, 0)};
    uint16_t *pages = (uint16_t *)gla_memory(2 * PAGES * PAGE * 2),
             *got = (uint16_t *)gla_memory(2 * PAGES * PAGE * 2);
    float *parts = (float *)gla_memory(SPLITS * ROWS * ALL * 4),
          *turn = (float *)gla_memory(ROWS * 128 * 4);
    sala_seq seq[2];
    memset(seq, 0, sizeof seq);
    seq[0].pages = table[0], seq[1].pages = table[1];
    const int32_t *there = (const int32_t *)on_device(table, sizeof table);
    sala_seq far[2] = {seq[0], seq[1]};
    far[0].pages = there, far[1].pages = there + 2;
    sala_rows rows = {ROWS, 2, 1, seq, NULL, position, of, NULL};
    for (int i = 0; i < ROWS * 128; i++) turn[i] = check_uniform();
    for (int form = 0; form < 3; form++) { // all; no q; no pages
        const int width = form == 1 ? 2 * ROW : ALL;
        for (int i = 0; i < SPLITS * ROWS * width; i++) parts[i] = check_uniform();
        for (int i = 0; i < ROWS * width; i++) {
            int r = i / width, c = i % width;
            float sum = parts[i] + parts[ROWS * width + i] + parts[2 * ROWS * width + i];
            uint16_t *to = c < ROW       ? rows_of[0] + r * ROW + c
                           : c < 2 * ROW ? rows_of[1] + r * ROW + c - ROW
                                         : rows_of[2] + r * Q + c - 2 * ROW;
            *to = sala_f32_bf16(sum);
        }
        sala_draft_turn_args a;
        memset(&a, 0, sizeof a);
        a.dims = &device_dims, a.rows = &rows, a.count = ROWS, a.heads = form == 1 ? 0 : HEADS,
        a.splits = SPLITS;
        a.cos_sin = turn, a.k = rows_of[0], a.v = rows_of[1], a.q = rows_of[2];
        if (form < 2) a.pages.k = pages, a.pages.v = pages + PAGES * PAGE;
        sala_draft_turn_args d = a;
        d.rows = gla_device_rows(ROWS, 2, far, position, NULL, of, NULL);
        d.parts = (const float *)on_device(parts, (size_t)(SPLITS * ROWS * width) * 4);
        d.cos_sin = (const float *)on_device(turn, ROWS * 128 * 4);
        d.k = (sala_act *)on_device(NULL, ROWS * ROW * 2),
        d.v = (sala_act *)on_device(NULL, ROWS * ROW * 2);
        d.q = (sala_act *)on_device(NULL, ROWS * Q * 2);
        if (form < 2)
            d.pages.k = (sala_act *)on_device(pages, 2 * PAGES * PAGE * 2),
            d.pages.v = d.pages.k + PAGES * PAGE;
        sala__launch_draft_turn(gpu, &d);
        device_sync();
        sala__op_draft_turn(gla_cpu(&device_dims), &a);
        if (form < 2) from_device(got, d.pages.k, 2 * PAGES * PAGE * 2);
        if (form < 2) CHECK(memcmp(got, pages, 2 * PAGES * PAGE * 2) == 0, "pages, form %d", form);
        from_device(got, d.k, ROWS * ROW * 2);
        CHECK(memcmp(got, a.k, ROWS * ROW * 2) == 0, "k, form %d", form);
        from_device(got, d.v, ROWS * ROW * 2);
        CHECK(memcmp(got, a.v, ROWS * ROW * 2) == 0, "v, form %d", form);
        from_device(got, d.q, ROWS * Q * 2);
        if (form != 1) CHECK(memcmp(got, a.q, ROWS * Q * 2) == 0, "q, form %d", form);
        if (form < 2)
            CHECK(memcmp(pages + PAGE + 128 * 64, a.k + 2 * ROW + 128, 256) == 0,
                  "position 64, head 1");
    }
    for (int i = 0; i < 3; i++) free(rows_of[i]);
    free(pages), free(got), free(parts), free(turn);
    device_close();
}

static void draft_check_top(int vocab, int topk) {
    enum { ROWS = 8, MOST = 16 * SALA_TOP_TILE + 700 };
    static float logits[ROWS * MOST], want[ROWS * SALA_MAX_TOPK], got[ROWS * SALA_MAX_TOPK];
    int32_t ids[MOST], token[ROWS * SALA_MAX_TOPK], there[ROWS * SALA_MAX_TOPK];
    for (int i = 0; i < vocab; i++) ids[i] = 3 * i + 1;
    for (int r = 0; r < ROWS; r++) {
        float *x = logits + (size_t)r * (size_t)vocab;
        for (int i = 0; i < vocab; i++) {
            x[i] = 6 * check_uniform();
            if (r == 1) x[i] = (float)sparse_below(3);      // ties
            if (r == 2) x[i] = -INFINITY;                   // few candidates
            if (r == 3) x[i] = -300 + check_uniform();      // far from 0
            if (r == 4) x[i] = i == vocab / 2 ? 200 : -200; // q = 1
        }
        if (r == 2) x[vocab - 1] = -250, x[vocab - 2] = -251;
        if (r == 5) x[sparse_below(vocab)] = NAN;
        if (r == 6) x[sparse_below(vocab)] = -NAN;
        if (r == 7) x[sparse_below(vocab)] = INFINITY;
        if (r == 3) x[0] = -INFINITY;
    }
    size_t tiles = (size_t)8 * sala__top_blocks(vocab), bytes = (size_t)(ROWS * vocab) * 4;
    int32_t arrivals[ROWS] = {0};
    sala_draft_top_args a = {ROWS,  vocab, topk, logits, topk & 1 ? ids : NULL,
                             token, want,  NULL, NULL},
                        d = a;
    memset(there, GLA_UNTOUCHED, sizeof there);
    d.logits = (const float *)on_device(logits, bytes);
    d.target_ids = topk & 1 ? (const int32_t *)on_device(ids, (size_t)vocab * 4) : NULL;
    d.best_token = (int32_t *)on_device(there, sizeof there);
    d.best_score = (float *)on_device(got, sizeof got);
    d.tops = (sala_top *)on_device(NULL, ROWS * tiles * sizeof(sala_top));
    d.arrivals = (int32_t *)on_device(arrivals, sizeof arrivals);
    sala__op_draft_top(gla_cpu(&device_dims), &a);
    for (int pass = 0; pass < 2; pass++) { // the second finds what the first left
        sala__launch_draft_top(gpu, &d);
        device_sync();
        from_device(there, d.best_token, sizeof there);
        from_device(got, d.best_score, sizeof got);
        from_device(arrivals, d.arrivals, sizeof arrivals);
        for (int i = 0; i < ROWS; i++) CHECK(arrivals[i] == 0, "a counter is %d", arrivals[i]);
        for (int i = 0; i < ROWS * topk; i++) {
            CHECK(there[i] == token[i], "vocab %d, row %d: %d, not %d", vocab, i / topk, there[i],
                  token[i]);
            CHECK(fabsf(got[i] - want[i]) <= 1e-5f * (1 + fabsf(want[i])) && got[i] <= 0,
                  "row %d: %g, not %g", i / topk, (double)got[i], (double)want[i]);
        }
    }
    const float *x = logits + vocab; // row 1 against a plain search
    for (int j = 0, last = -1; j < topk; j++) {
        int best = -1;
        for (int i = 0; i < vocab; i++) {
            int taken = 0;
            for (int k = 0; k < j; k++) taken |= token[topk + k] == (topk & 1 ? ids[i] : i);
            if (!taken && (best < 0 || x[i] > x[best])) best = i;
        }
        last = topk & 1 ? ids[best] : best;
        CHECK(token[topk + j] == last, "the best of ties: %d, not %d", token[topk + j], last);
    }
    for (int j = 0; j < topk; j++) {
        CHECK((token[2 * topk + j] < 0) == (j > 1), "only two logits are numbers");
        for (int r = 5; r < 8; r++) CHECK(token[r * topk + j] == -1, "row %d is unusable", r);
    }
    CHECK(want[4 * topk] == 0, "q = 1: %g", (double)want[4 * topk]);
}

static void test_draft_top(void) {
    draft_open();
    draft_check_top(70, 1);
    draft_check_top(8 * SALA_TOP_TILE, 2);
    draft_check_top(8 * SALA_TOP_TILE + 3, 3);
    draft_check_top(16 * SALA_TOP_TILE + 700, 4);
    device_close();
}

// Products in shares of k: the parts of two weights, added, are the product; and they are the same for any number
// of rows and whatever weights stand behind.
static void test_draft_parts(void) {
    enum { ROWS = 20, K = 2048, N = 192, M = 64, SPLITS = 4, WIDTH = N + M };
    for (gemm_layout = GEMM_BF16; gemm_layout <= GEMM_NVFP4; gemm_layout++) {
        gemm_begin();
        sala_weight w[2] = {gemm_weight(N, K, 0.1f), gemm_weight(M, K, 0.1f)};
        sala_act *x = gemm_random(ROWS * K, 1);
        float *parts = (float *)gemm_space(SPLITS * ROWS * WIDTH * 4),
              *fewer = (float *)gemm_space(SPLITS * 3 * N * 4);
        sala_gemm_args a;
        memset(&a, 0, sizeof a);
        a.rows = ROWS, a.count = 2, a.splits = SPLITS, a.parts_width = WIDTH, a.parts_at[1] = N;
        a.w[0] = gemm_pack(&w[0], NULL), a.w[1] = gemm_pack(&w[1], NULL);
        a.x = (const sala_act *)on_device(x, ROWS * K * sizeof *x);
        a.parts = (float *)on_device(NULL, SPLITS * ROWS * WIDTH * 4);
        sala__launch_gemm(gpu, &a);
        device_sync();
        from_device(parts, a.parts, SPLITS * ROWS * WIDTH * 4);
        for (int i = 0; i < ROWS * WIDTH; i++) {
            int r = i / WIDTH, n = i % WIDTH;
            const sala_weight *of = &w[n >= N];
            n -= n >= N ? N : 0;
            double sum = 0, want = 0;
            for (int split = 0; split < SPLITS; split++)
                sum += (double)parts[split * ROWS * WIDTH + i];
            for (int k = 0; k < K; k++)
                want += (double)sala_act_f32(x[r * K + k]) * (double)gemm_element(of, n, k);
            want *= of->alpha ? (double)of->alpha[n] : 1;
            CHECK(fabs(sum - want) <= (double)gemm_slack(x + r * K, of, n),
                  "row %d, %d: %g, not %g", r, n, sum, want);
        }
        a.rows = 3, a.count = 1, a.parts_width = N;
        sala__launch_gemm(gpu, &a);
        device_sync();
        from_device(fewer, a.parts, SPLITS * 3 * N * 4);
        for (int i = 0; i < SPLITS * 3; i++)
            CHECK(memcmp(fewer + i * N, parts + (i / 3 * ROWS + i % 3) * WIDTH, N * 4) == 0,
                  "other bits alone: %d", i);
        for (int i = 0; i < 2; i++) gemm_free_weight(&w[i]);
        free(x), free(parts), free(fewer);
        gemm_end();
    }
    gemm_layout = GEMM_BF16;
}

#define DRAFT_TESTS                                                                                \
    TEST(test_draft_capture_keep), TEST(test_draft_input_grow), TEST(test_draft_turn),             \
        TEST(test_draft_top), TEST(test_draft_parts)
