#define SALA_IMPLEMENTATION
#include "../sala.h"
// Verify passes over trees: every node must see and give the bits that decoding its path one token at a time
// gives, and an accepted path must leave the cache, the tiers and the states as that decoding does. The loop
// builds one-node trees only, so the passes here are made by hand; they go through the engine's own layer loop.
#include "check.h"
#include "model.h"

enum { NODES = 32, TREES = 3, DEPTHS = SALA_MAX_PATH, TREE_CONTEXT = 512 };

typedef struct tree {
    int64_t sequence;
    int count, parent[NODES],
        depth[NODES]; // nodes in any order that has parents first; node 0 is the root
    int32_t token[NODES];
} tree;

typedef struct rows { // what a pass gave
    float *logits, *hidden;
    int32_t *blocks;
} rows;

// ---- passes by hand ----

static rows rows_make(const session *t, int count) {
    rows r;
    size_t n = (size_t)count;
    r.logits = (float *)need(malloc(n * (size_t)t->info.vocab * 4));
    r.hidden = (float *)need(malloc(n * t->hidden_row * 4));
    r.blocks = (int32_t *)need(malloc(n * t->blocks_row * 4));
    return r;
}

static void rows_free(rows *r) {
    free(r->logits);
    free(r->hidden);
    free(r->blocks);
}

static int rows_same(const session *t, const rows *a, int i, const rows *b, int j) {
    size_t v = (size_t)t->info.vocab, h = t->hidden_row, l = t->blocks_row, x = (size_t)i,
           y = (size_t)j;
    return memcmp(a->logits + x * v, b->logits + y * v, v * 4) == 0 &&
           memcmp(a->hidden + x * h, b->hidden + y * h, h * 4) == 0 &&
           memcmp(a->blocks + x * l, b->blocks + y * l, l * 4) == 0;
}

// One verify pass over all trees. The engine's pass arrays keep its rows for the commit.
static void tree_pass(session *t, const tree *trees, int count, rows *out) {
    sala *s = t->engine;
    int row = 0;
    sala__pass p;
    memset(&p, 0, sizeof p);
    sala__step_layout(s, s->plan.node_rows);
    for (int i = 0; i < count; i++) {
        const tree *tr = &trees[i];
        sala__sequence *q = sequence_of(t, tr->sequence);
        sala_seq seq = {
            (int32_t)(q - s->sequences), row, tr->count, q->stored, 0, q->pending, q->pages};
        s->seqs[i] = seq;
        for (int n = 0; n < tr->count; n++) {
            int32_t *path = s->paths + (row + n) * SALA_MAX_PATH;
            sala__row(s, row + n, i, tr->token[n], q->stored + tr->depth[n]);
            for (int k = 0; k < SALA_MAX_PATH; k++)
                path[k] = -1; // beyond the node itself nothing may be read
            if (n > 0)
                memcpy(path, s->paths + (row + tr->parent[n]) * SALA_MAX_PATH,
                       (size_t)tr->depth[n] * 4);
            path[tr->depth[n]] = row + n;
        }
        row += tr->count;
    }
    if (row > s->plan.node_rows) die("tree_pass", "too many rows");
    p.rows = sala__rows(s, row, count, 1);
    p.logits = out->logits;
    p.logits_rows = row;
    p.hidden = out->hidden;
    p.hidden_l = (size_t)t->info.hidden;
    p.hidden_r = t->hidden_row;
    p.blocks = out->blocks;
    p.blocks_l = (size_t)t->info.kv_heads * (size_t)t->info.top_k;
    p.blocks_r = t->blocks_row;
    p.on_device = &p.rows;
    p.bucket = p.rows.count;
    sala__forward(s, &p);
}

// Accept of each tree the path from its root to node last[i].
static void tree_commit(session *t, const tree *trees, int count, const int *last) {
    sala *s = t->engine;
    int rows_in_pass = s->seqs[count - 1].first_row + s->seqs[count - 1].rows;
    int32_t accepted[TREES], list[TREES * SALA_MAX_PATH];
    for (int i = 0; i < count; i++) {
        accepted[i] = trees[i].depth[last[i]] + 1;
        for (int n = last[i]; n >= 0; n = n ? trees[i].parent[n] : -1)
            list[i * SALA_MAX_PATH + trees[i].depth[n]] = s->seqs[i].first_row + n;
    }
    sala_rows pass = sala__rows(s, rows_in_pass, count, 1);
    sala_commit_args a = {&s->config.dims,  &pass,
                          s->sparse_layers, s->lightning_layers,
                          s->plan.slots,    s->plan.node_rows,
                          accepted,         list,
                          s->nodes,         s->pages,
                          s->node_k,        s->node_v,
                          s->pending_k,     s->pending_v};
    sala__op(s, SALA__OP_commit, &a);
    for (int i = 0; i < count; i++) {
        sala__sequence *q = sequence_of(t, trees[i].sequence);
        q->stored += accepted[i];
        q->pending = accepted[i];
    }
}

// ---- a copy of everything that a pass and a commit change ----

typedef struct pools {
    memory m;
    sala__sequence *sequences;
} pools;

// Copy the pools out (`restore` 0) or back (1).
static void pools_copy(session *t, pools *p, int restore) {
    sala *s = t->engine;
    size_t act = sizeof(sala_act), at = 0, slots = (size_t)s->plan.slots;
    size_t page = 2 * s->plan.page_kv + s->plan.page_tier1 + s->plan.page_tier2;
    size_t lightning = (size_t)s->lightning_layers,
           pending = lightning * slots * s->plan.pending * act;
    for (int i = 0; i < s->sparse_layers + 3; i++) {
        void *of[3] = {s->states, s->pending_k, s->pending_v};
        size_t sizes[3] = {lightning * slots * s->plan.state * 4, pending, pending};
        void *pool = i < 3 ? of[i] : s->pages[i - 3].k;
        size_t size = i < 3 ? sizes[i] : (size_t)s->plan.pages * page * act;
        if (restore)
            memcpy(pool, p->m.data + at, size);
        else
            memory_add(&p->m, pool, size);
        at += size;
    }
    if (!restore) p->sequences = (sala__sequence *)need(malloc(slots * sizeof *p->sequences));
    if (restore)
        memcpy(s->sequences, p->sequences, slots * sizeof *p->sequences); // no list grows meanwhile
    else
        memcpy(p->sequences, s->sequences, slots * sizeof *p->sequences);
}

static pools pools_save(session *t) {
    pools p = {{NULL, 0, 0}, NULL};
    pools_copy(t, &p, 0);
    return p;
}

static void pools_free(pools *p) {
    free(p->m.data);
    free(p->sequences);
}

// ---- trees ----

static void tree_random(tree *tr, int64_t sequence, int most, int vocab) {
    int shape = below(4), deepest = 1 + below(DEPTHS - 1);
    tr->sequence = sequence;
    tr->count = 1 + below(most);
    for (int n = 0; n < tr->count; n++) {
        int parent = shape == 0   ? n - 1
                     : shape == 1 ? 0
                     : shape == 2 ? (n - 1) / 2
                                  : below(n ? n : 1); // chain, star, binary, any
        while (n && tr->depth[parent] >= deepest) parent = tr->parent[parent];
        tr->parent[n] = n ? parent : -1;
        tr->depth[n] = n ? tr->depth[parent] + 1 : 0;
        tr->token[n] = below(vocab);
    }
}

static int tree_is_leaf(const tree *tr, int node) {
    for (int n = node + 1; n < tr->count; n++)
        if (tr->parent[n] == node) return 0;
    return 1;
}

static void step_once(session *t, int64_t sequence, int32_t token,
                      rows *out) { // a tree of one node, accepted
    tree one;
    int last = 0;
    memset(&one, 0, sizeof one);
    one.sequence = sequence;
    one.count = 1;
    one.token[0] = token;
    tree_pass(t, &one, 1, out);
    tree_commit(t, &one, 1, &last);
}

// Decode one token after the other along the path to `leaf`; every node on it must equal its row in `got`.
static void check_path(session *t, const tree *tr, const rows *got, int first_row, int leaf) {
    int path[DEPTHS];
    rows single = rows_make(t, 1);
    for (int n = leaf; n >= 0; n = n ? tr->parent[n] : -1) path[tr->depth[n]] = n;
    for (int k = 0; k <= tr->depth[leaf] && check_failures < 10; k++) {
        int stored = sequence_of(t, tr->sequence)->stored;
        step_once(t, tr->sequence, tr->token[path[k]], &single);
        CHECK(rows_same(t, got, first_row + path[k], &single, 0),
              "%d nodes after %d tokens: node %d at depth %d differs", tr->count, stored - k,
              path[k], k);
    }
    rows_free(&single);
}

// One round: trees for all sequences in one pass, each path against single steps, then a commit of one path each.
static void tree_round(session *t, const int64_t *sequences, int count, int most, int vocab) {
    tree trees[TREES];
    int last[TREES], total = 0, first = 0;
    memset(trees, 0, sizeof trees);
    for (int i = 0; i < count; i++) {
        tree_random(&trees[i], sequences[i], most, vocab);
        last[i] = below(trees[i].count);
        total += trees[i].count;
    }
    rows got = rows_make(t, total);
    pools before = pools_save(t);
    tree_pass(t, trees, count, &got);
    tree_commit(t, trees, count, last);
    pools after = pools_save(t);
    for (int i = 0; i < count; first += trees[i++].count) {
        pools_copy(t, &after, 1);
        memory committed = memory_of(t, sequences[i]);
        for (int n = 0; n < trees[i].count; n++) {
            if (n != last[i] && !tree_is_leaf(&trees[i], n)) continue;
            pools_copy(t, &before, 1);
            check_path(t, &trees[i], &got, first, n);
            if (n != last[i]) continue;
            memory stepped = memory_of(t, sequences[i]);
            CHECK(memory_same(&committed, &stepped),
                  "a path of %d accepted: cache or states differ from stepping",
                  trees[i].depth[n] + 1);
            free(stepped.data);
        }
        free(committed.data);
    }
    pools_copy(t, &after, 1);
    pools_free(&before);
    pools_free(&after);
    rows_free(&got);
}

// A resident sequence of the first `length` tokens, the last of them decoded: it is the pending path, if wanted.
// It has pages for some more. `tokens` goes on behind `length`.
static int64_t start_sequence(session *t, const int32_t *tokens, int length, int pending) {
    sala_request r = request_of(tokens, length - 1, 2 + 4 * SALA_MAX_PATH);
    r.force = tokens + length - 1;
    r.force_count = 2;
    r.keep = 1;
    int i = session_ask(t, &r);
    while (t->out[i].count < 2) session_step(t);
    session_cancel(t, i);
    session_run(t);
    sala__sequence *q = sequence_of(t, t->out[i].sequence);
    if (!pending) sala__materialise(t->engine, (int)(q - t->engine->sequences), NULL);
    if (q->stored != length || q->pending != pending)
        die("start_sequence", "the loop does not step as thought");
    return q->id;
}

static session tree_engine(const char *path, int dense_len) {
    sala_options o = small_options(256, 64);
    o.hidden_states = 1;
    o.max_sequences = TREES * NODES; // as many rows has a verify pass
    o.context = TREE_CONTEXT;
    o.kv_tokens = TREES * TREE_CONTEXT;
    o.dense_len = dense_len;
    return session_open(path, &o);
}

static void tree_lengths(const char *path, int dense_len, const int *lengths, int count,
                         int rounds) {
    int32_t tokens[TREE_CONTEXT];
    session t = tree_engine(path, dense_len);
    for (int i = 0; i < count; i++) {
        int64_t sequences[TREES];
        int n = 1 + i % TREES;
        for (int k = 0; k < n; k++) {
            random_tokens(tokens, TREE_CONTEXT, t.info.vocab);
            sequences[k] = start_sequence(&t, tokens, lengths[(i + k) % count], (i + k) % 4 > 0);
        }
        for (int r = 0; r < rounds; r++)
            tree_round(&t, sequences, n, n == 1 ? NODES : 14, t.info.vocab);
        for (int k = 0; k < n; k++) session_give_up(&t, sequences[k]);
    }
    session_close(&t);
}

// tiny: blocks of 16, tiers 8/4 and 32/16, dense below 60, blocks dropped from 80 on. Trees cross all of these.
static void test_trees(void) {
    static const int lengths[] = {2,  5,  7,  14, 15, 16, 28,  31,  45,  50,  56,  58,  59,
                                  62, 64, 70, 79, 80, 95, 113, 126, 127, 128, 200, 333, 400};
    check_seed = 201;
    tree_lengths(TINY, 0, lengths, (int)(sizeof lengths / sizeof lengths[0]), 3);
}

static void test_trees_always_sparse(void) {
    static const int lengths[] = {2, 3, 11, 30, 31, 47, 75, 90, 111, 250};
    check_seed = 202;
    tree_lengths(TINY, SALA_DENSE_NEVER, lengths, 10, 3);
}

static void
test_trees_plain(void) { // rotated sparse layers, no gates, blocks of 32, tier windows of 12 and 48
    static const int lengths[] = {3, 11, 35, 44, 47, 100, 127, 128, 150, 300};
    sala_options o = small_options(256, 64);
    int32_t tokens[TREE_CONTEXT];
    check_seed = 203;
    o.hidden_states = o.synthetic = 1;
    o.max_sequences = NODES;
    o.context = TREE_CONTEXT;
    session t = session_open("tests/data/vectors/plain/config.json", &o);
    random_tokens(tokens, TREE_CONTEXT, t.info.vocab);
    for (int i = 0; i < 10; i++) {
        int64_t sequence = start_sequence(&t, tokens, lengths[i], i % 2);
        for (int r = 0; r < 3; r++) tree_round(&t, &sequence, 1, NODES, t.info.vocab);
        session_give_up(&t, sequence);
    }
    session_close(&t);
}

static void
test_trees_sala_tiny(void) { // the released block geometry, where it begins to drop blocks
    static const int lengths[] = {500, 767, 760};
    sala_options o = small_options(512, 64);
    int32_t tokens[1024];
    check_seed = 204;
    random_tokens(tokens, 1024, 2046);
    o.hidden_states = 1;
    o.max_sequences = 16;
    session t = session_open(SALA_TINY, &o);
    for (int i = 0; i < 3; i++) {
        int64_t sequence = start_sequence(&t, tokens, lengths[i], 1);
        for (int r = 0; r < 2; r++) tree_round(&t, &sequence, 1, 16, 2046);
        session_give_up(&t, sequence);
    }
    session_close(&t);
}

// The steps made by hand above are those of the loop.
static void test_steps_are_the_loop(void) {
    int32_t tokens[300];
    check_seed = 205;
    random_tokens(tokens, 300, 97);
    session t = tree_engine(TINY, 0);
    sala_request r = request_of(tokens, 40, 1);
    request_force(&r, tokens + 40, 66);
    r.want_rows = SALA_ROWS_GENERATED;
    r.keep = 1;
    outcome *o = session_do(&t, &r);
    int64_t loop = o->sequence, hand = start_sequence(&t, tokens, 41, 1);
    rows one = rows_make(&t, 1);
    o = &t.out[0]; // the list may have moved
    for (int p = 41; p < 105 && !check_failures; p++) {
        step_once(&t, hand, tokens[p], &one);
        size_t at = (size_t)p, vocab = (size_t)t.info.vocab;
        CHECK(memcmp(one.logits, o->logits + at * vocab, vocab * 4) == 0, "logits of %d differ", p);
        CHECK(memcmp(one.hidden, o->hidden + at * t.hidden_row, t.hidden_row * 4) == 0,
              "hidden states of %d differ", p);
        CHECK(memcmp(one.blocks, o->blocks + at * t.blocks_row, t.blocks_row * 4) == 0,
              "blocks of %d differ", p);
    }
    memory a = memory_of(&t, loop), b = memory_of(&t, hand);
    CHECK(memory_same(&a, &b), "the memory differs");
    free(a.data);
    free(b.data);
    rows_free(&one);
    session_give_up(&t, loop);
    session_give_up(&t, hand);
    session_close(&t);
}

TEST_MAIN(TEST(test_steps_are_the_loop), TEST(test_trees), TEST(test_trees_always_sparse),
          TEST(test_trees_plain), TEST(test_trees_sala_tiny))
