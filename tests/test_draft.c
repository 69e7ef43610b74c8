// The draft head: what it computes against a plain reference in double precision, its cache, its trees. On the
// CPU; `test_draft device` compares the simulator (SALA_SIM) or a GPU (SALA_TEST_GPU=N) with the CPU.
#define SALA_IMPLEMENTATION
#include "../sala.h"

#include "check.h"
#include "counted.h"

#include <math.h>

// ---- engines with random weights, and sequences that no target has seen ----

static const char *const head_file = SCRATCH "test_draft_head.json";

// A head whose shape is not the target's: K/V heads 2 against 1.
static void write_head(int fc_norm, int raw) {
    FILE *f = fopen(head_file, "w");
    if (!f) exit(2);
    fprintf(
        f,
        "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"model_type\": \"llama\",\n"
        "\"hidden_size\": 256, \"intermediate_size\": 384, \"num_attention_heads\": 2,\n"
        "\"num_key_value_heads\": 2, \"head_dim\": 128, \"num_hidden_layers\": 1,\n"
        "\"vocab_size\": 2048, \"draft_vocab_size\": 1000, \"rms_norm_eps\": 1e-6,\n"
        "\"rope_theta\": 10000.0, \"max_position_embeddings\": 2048, \"hidden_act\": \"silu\",\n"
        "\"fc_norm\": %s, \"norm_output\": %s,\n"
        "\"eagle_config\": {\"eagle_aux_hidden_state_layer_ids\": [1, 3, 5]}}\n",
        fc_norm ? "true" : "false", raw ? "false" : "true");
    fclose(f);
}

static sala *open_engine(const char *device, const char *weights, int window, int sequences) {
    sala_options o;
    sala_error err;
    memset(&o, 0, sizeof o);
    o.synthetic = 1;
    o.synthetic_seed = 7;
    o.device = device;
    o.weights = weights;
    o.threads = 2;
    o.max_sequences = sequences;
    o.context = 1024;
    o.chunk = 128;
    o.draft = head_file;
    o.spec_tree = "15,4,32";
    o.draft_window = window;
    sala *s = sala_open("models/sala-tiny/config.json", &o, &err);
    if (!s) {
        printf("%s\n", err.text);
        exit(2);
    }
    return s;
}

static void must(int code, const sala_error *err) {
    if (code >= 0) return;
    printf("  in %s: %s\n", check_test, err->text);
    exit(2);
}

static void enter(sala *s) {
    sala_error err;
    if (s->on_gpu) must(sala__cuda_enter(&s->gpu.cuda, &err), &err);
}

static void leave(sala *s) {
    if (s->on_gpu) sala__cuda_leave(&s->gpu.cuda);
}

// A sequence of `count` random tokens without a cache. The last of them is the root.
static sala__sequence *fake(sala *s, int slot, int count, uint64_t seed) {
    sala__sequence *q = &s->sequences[slot];
    sala_error err;
    check_seed = seed;
    q->id = slot + 1;
    q->stored = 0;
    must(sala__grow(&s->env, (void **)&q->tokens, &q->token_capacity, (size_t)count, 4, "a test",
                    &err),
         &err);
    for (int i = 0; i < count; i++) q->tokens[i] = (int32_t)(check_random() % 2048);
    q->token_count = (size_t)count;
    q->request = 1; // others cannot have its place
    must(sala__draft_forget(s, slot, &err), &err);
    return q;
}

// Feature f of the token at a position: the same for every engine.
static sala_act feature(uint64_t seed, int position, int f) {
    uint64_t z = sala_mix64(seed + (uint64_t)position * 4096 + (uint64_t)f);
    return sala_store((float)(int16_t)z * (1.0f / 16384));
}

// The sequence grows to `stored` tokens; their features wait. Features of nodes that were refused are there too.
static void commit(sala *s, sala__sequence *q, int stored, uint64_t seed) {
    int width = 3 * s->config.dims.hidden;
    sala_act row[3 * 256];
    sala_error err;
    for (int t = q->stored; t < stored + 5; t++) {
        size_t at = (size_t)(q->draft.place - 1) * SALA_DRAFT_DEBT + (size_t)t % SALA_DRAFT_DEBT;
        for (int f = 0; f < width; f++) row[f] = t < stored ? feature(seed, t, f) : sala_store(9);
        must(sala__put(s, s->draft.debt + at * (size_t)width, row, sizeof row, &err), &err);
    }
    q->stored = stored;
    q->root = q->tokens[stored];
}

// Keys and values in the head's cache, in order.
static sala_act *cache_of(sala *s, const sala__sequence *q) {
    const sala_dims *m = &s->draft_config.dims;
    size_t kv = (size_t)m->kv_heads, d = (size_t)m->head_dim, n = (size_t)q->draft.filled;
    sala_act *out = (sala_act *)calloc(2 * n * kv * d + 1, sizeof *out);
    const int32_t *table = s->draft.tables + (size_t)(q->draft.place - 1) * (size_t)s->draft.blocks;
    const size_t bytes =
        (size_t)s->draft.places * (size_t)s->draft.blocks * 64 * kv * d * sizeof *out;
    sala_act *k = s->draft.pages.k, *v = s->draft.pages.v;
    if (s->on_gpu) { // the pools as they lie there
        sala_error err;
        k = (sala_act *)malloc(bytes), v = (sala_act *)malloc(bytes);
        if (!k || !v) exit(2);
        must(sala__cuda_download(&s->gpu.cuda, k, sala__on_gpu(s->draft.pages.k), bytes, &err),
             &err);
        must(sala__cuda_download(&s->gpu.cuda, v, sala__on_gpu(s->draft.pages.v), bytes, &err),
             &err);
        must(sala__cuda_wait(&s->gpu.cuda, &err), &err);
    }
    for (size_t u = 0; u < n && out; u++)
        for (size_t g = 0; g < kv; g++) {
            size_t at = (((size_t)table[u / 64] * kv + g) * 64 + u % 64) * d;
            memcpy(out + ((2 * u) * kv + g) * d, k + at, d * sizeof *out);
            memcpy(out + ((2 * u + 1) * kv + g) * d, v + at, d * sizeof *out);
        }
    if (s->on_gpu) free(k), free(v);
    return out;
}

// ---- the reference: double precision, one row after the other ----

enum { H = 256, HEADS = 2, KV = 2, DIM = 128, FFN = 384, DRAFT_VOCAB = 1000, MOST = 300 };

typedef struct reference {
    const sala *s;
    double key[MOST][KV * DIM], value[MOST][KV * DIM]; // of the tokens, then of a path
    double logits[DRAFT_VOCAB], y[H];
} reference;

static double weight_of(const sala_weight *w, int n, int k) {
    size_t at = (size_t)n * (size_t)w->k + (size_t)k;
    return (double)sala_bf16_f32(((const uint16_t *)w->data)[at]);
}

static void times(const sala_weight *w, const double *x, double *y) {
    for (int n = 0; n < w->n; n++) {
        y[n] = 0;
        for (int k = 0; k < w->k; k++) y[n] += weight_of(w, n, k) * x[k];
    }
}

static void normed(const sala_weight *w, const double *x, int n, double *y) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    double inverse = 1 / sqrt(sum / n + 1e-6);
    for (int i = 0; i < n; i++) y[i] = x[i] * inverse * weight_of(w, i, 0);
}

static void turned(double *x, int heads, int position) {
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < DIM / 2; i++) {
            double angle = position * pow(10000, -2.0 * i / DIM), c = cos(angle), n = sin(angle);
            double a = x[h * DIM + i], b = x[h * DIM + i + DIM / 2];
            x[h * DIM + i] = a * c - b * n;
            x[h * DIM + i + DIM / 2] = b * c + a * n;
        }
}

// One row: place `at` of the keys, where `at` + 1 are seen. f is overwritten with y; logits if wanted.
static void reference_row(reference *r, double *f, int token, int position, int at, int wanted) {
    const sala__weights *w = &r->s->draft_weights;
    const sala__layer *l = &w->layers[0];
    static double u[2 * H], e[H], q[HEADS * DIM], o[HEADS * DIM], z[H], gate[FFN], up[FFN], add[H];
    for (int i = 0; i < H; i++) e[i] = weight_of(&w->embed, token, i);
    normed(&l->input_norm, e, H, u);
    normed(&w->hidden_norm, f, H, u + H);
    times(&l->k, u, r->key[at]);
    times(&l->v, u, r->value[at]);
    turned(r->key[at], KV, position);
    if (!wanted) return;
    times(&l->q, u, q);
    turned(q, HEADS, position);
    for (int h = 0; h < HEADS; h++) {
        double score[MOST], sum = 0, most = -1e30;
        const int g = h / (HEADS / KV) * DIM;
        for (int t = 0; t <= at; t++) {
            score[t] = 0;
            for (int i = 0; i < DIM; i++) score[t] += q[h * DIM + i] * r->key[t][g + i];
            score[t] /= sqrt((double)DIM);
            most = fmax(most, score[t]);
        }
        for (int t = 0; t <= at; t++) sum += score[t] = exp(score[t] - most);
        for (int i = 0; i < DIM; i++) {
            o[h * DIM + i] = 0;
            for (int t = 0; t <= at; t++) o[h * DIM + i] += score[t] / sum * r->value[t][g + i];
        }
    }
    times(&l->o, o, add);
    for (int i = 0; i < H; i++) f[i] += add[i];
    normed(&l->post_norm, f, H, z);
    times(&l->mlp_gate, z, gate);
    times(&l->mlp_up, z, up);
    for (int i = 0; i < FFN; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    times(&l->mlp_down, gate, add);
    for (int i = 0; i < H; i++) f[i] += add[i];
    memcpy(r->y, f, sizeof r->y);
    normed(&w->final_norm, f, H, z);
    times(&w->head, r->s->draft_config.raw_output ? f : z, r->logits);
}

static void reference_feature(const sala *s, uint64_t seed, int position, double *f) {
    static double g[3 * H];
    for (int i = 0; i < 3 * H; i++) g[i] = (double)sala_act_f32(feature(seed, position, i));
    times(&s->draft_weights.fc, g, f);
    for (int i = 0; i < H && s->draft_weights.fc_bias.data; i++)
        f[i] += weight_of(&s->draft_weights.fc_bias, i, 0);
}

// log q of a target's token, or 1 if the head does not know it.
static double log_of(const reference *r, int token) {
    double most = -1e300, sum = 0;
    int at = -1;
    for (int i = 0; i < DRAFT_VOCAB; i++) {
        if (r->s->draft_weights.target_ids[i] == token) at = i;
        most = fmax(most, r->logits[i]);
    }
    for (int i = 0; i < DRAFT_VOCAB; i++) sum += exp(r->logits[i] - most);
    return at < 0 ? 1 : r->logits[at] - most - log(sum);
}

// Keys of all stored tokens; r->y and r->logits of the last.
static void reference_begin(reference *r, const sala__sequence *q, uint64_t seed) {
    double f[H];
    for (int t = 0; t < q->stored; t++) {
        reference_feature(r->s, seed, t, f);
        reference_row(r, f, q->tokens[t + 1], t, t, t == q->stored - 1);
    }
}

// Every node's score along its path, by the reference. Returns the largest difference.
static double tree_error(reference *r, const sala__sequence *q, uint64_t seed, const sala_tree *t) {
    double error = 0;
    reference_begin(r, q, seed);
    double y0[H], first[DRAFT_VOCAB];
    memcpy(y0, r->y, sizeof y0);
    memcpy(first, r->logits, sizeof first);
    for (int n = 1; n < t->count; n++) {
        int path[SALA_MAX_PATH], depth = t->depth[n];
        double f[H], score = 0;
        for (int i = n, d = depth; d > 0; d--, i = t->parent[i]) path[d] = i;
        memcpy(f, y0, sizeof f);
        memcpy(r->logits, first, sizeof first);
        for (int d = 1; d <= depth; d++) {
            score += log_of(r, t->token[path[d]]);
            if (d < depth)
                reference_row(r, f, t->token[path[d]], q->stored - 1 + d, q->stored + d - 1, 1);
        }
        error = fmax(error, fabs(score - (double)t->score[n]));
    }
    return error;
}

// ---- trees are trees ----

static void check_tree(const sala_tree *t, const sala__shape *shape, int root) {
    CHECK(t->count >= 1 && t->count <= shape->nodes, "%d nodes", t->count);
    CHECK(t->token[0] == root && t->parent[0] == -1 && t->depth[0] == 0, "root %d", t->token[0]);
    for (int n = 1; n < t->count; n++) {
        int p = t->parent[n];
        CHECK(p >= 0 && p < n, "node %d below %d", n, p);
        if (p < 0 || p >= n) continue;
        CHECK(t->depth[n] == t->depth[p] + 1 && t->depth[n] <= shape->depth, "depth %d",
              t->depth[n]);
        CHECK(t->score[n] <= (p ? t->score[p] : 0), "node %d above its parent", n);
        for (int i = 1; i < n; i++)
            CHECK(t->parent[i] != p || t->token[i] != t->token[n], "siblings %d, %d", i, n);
    }
}

static void test_draft_reference(void) {
    reference *r = (reference *)calloc(1, sizeof *r);
    if (!r) exit(2);
    for (int kind = 0; kind < 3; kind++) {
        write_head(0, kind == 1);
        sala *s = open_engine("cpu", "bf16", 0, 2);
        sala_act bias[H];
        for (int i = 0; i < H; i++) bias[i] = sala_f32_bf16(0.5f * check_uniform());
        if (kind == 2) s->draft_weights.fc_bias = sala_plain_weight(bias, SALA_BF16, H, 1);
        const int32_t slots[2] = {1, 0};
        const sala__shape shapes[2] = {{4, 3, 16}, {3, 2, 9}};
        sala__sequence *q[2] = {fake(s, 1, 160, 11), fake(s, 0, 90, 12)};
        sala_tree trees[2];
        sala_error err;
        r->s = s;
        commit(s, q[0], 137, 5);
        commit(s, q[1], 70, 6);
        for (int round = 0; round < 2; round++) {
            must(sala__draft_propose(s, slots, shapes, 2, trees, &err), &err);
            for (int i = 0; i < 2; i++) {
                check_tree(&trees[i], &shapes[i], q[i]->root);
                CHECK(trees[i].count == shapes[i].nodes, "%d nodes", trees[i].count);
                double error = tree_error(r, q[i], (uint64_t)(5 + i), &trees[i]);
                CHECK(error < (kind == 1 ? 0.4 : 0.12), "kind %d, tree %d: %g", kind, i, error);
            }
            commit(s, q[0], 140, 5);
            commit(s, q[1], 71, 6);
        }
        sala_close(s);
    }
    free(r);
}

// Extended one by one, by many, in chunks, between refused trees: the same cache, and the same next tree.
static void test_draft_cache(void) {
    write_head(0, 0);
    sala *s = open_engine("cpu", "bf16", 0, 4);
    const sala__shape shape = {5, 2, 11};
    sala_act *want = NULL;
    sala_tree tree, first;
    sala_error err;
    for (int32_t way = 0; way < 4; way++) {
        sala__sequence *q = fake(s, way, 260, 21);
        for (int end = 1; end <= 230; end += way == 0 ? 1 : way == 1 ? 7 : way == 2 ? 229 : 33) {
            commit(s, q, end, 3);
            if (way != 3) must(sala__draft_propose(s, &way, &shape, 1, &tree, &err), &err);
            if (way == 3) must(sala__draft_fill(s, q, end, NULL, &err), &err);
        }
        commit(s, q, 230, 3);
        must(sala__draft_propose(s, &way, &shape, 1, &tree, &err), &err);
        CHECK(q->draft.filled == 230 && q->draft.seen == 230, "%d filled", q->draft.filled);
        sala_act *cache = cache_of(s, q);
        size_t bytes = (size_t)230 * 2 * KV * DIM * sizeof *cache;
        if (!want) want = cache, first = tree;
        CHECK(memcmp(want, cache, bytes) == 0, "another cache in way %d", way);
        CHECK(memcmp(&tree, &first, sizeof tree) == 0, "another tree in way %d", way);
        if (want != cache) free(cache);
    }
    free(want);
    sala_close(s);
}

// A small window: the oldest behind the first page go, and what is kept is what was there.
static void test_draft_window(void) {
    write_head(0, 0);
    sala *s = open_engine("cpu", "bf16", 128, 2), *all = open_engine("cpu", "bf16", 0, 2);
    sala__sequence *q = fake(s, 0, 900, 31), *w = fake(all, 0, 900, 31);
    const int32_t slot = 0;
    const sala__shape shape = {3, 2, 7};
    sala_tree tree;
    sala_error err;
    int dropped = 0;
    CHECK(s->draft.blocks == 1 + 2 + 2, "%d pages", s->draft.blocks);
    for (int end = 3; end < 800; end += 5) {
        int before = q->draft.filled;
        commit(s, q, end, 8);
        commit(all, w, end, 8);
        must(sala__draft_propose(s, &slot, &shape, 1, &tree, &err), &err);
        must(sala__draft_propose(all, &slot, &shape, 1, &tree, &err), &err);
        dropped += q->draft.filled < before;
        CHECK(q->draft.filled <= 320 && (end < 320 || q->draft.filled > 64 + 128), "%d filled",
              q->draft.filled);
        sala_act *few = cache_of(s, q), *many = cache_of(all, w);
        size_t row = 2 * KV * DIM, recent = (size_t)(q->draft.filled - 64);
        if (q->draft.filled < 64) recent = 0;
        CHECK(memcmp(few, many, (size_t)(end < 64 ? end : 64) * row * sizeof *few) == 0, "anchor");
        CHECK(memcmp(few + ((size_t)q->draft.filled - recent) * row,
                     many + ((size_t)w->draft.filled - recent) * row,
                     recent * row * sizeof *few) == 0,
              "window at %d", end);
        free(few);
        free(many);
    }
    CHECK(dropped >= 3, "dropped %d times", dropped);
    int before = q->draft.filled; // as many at once as can wait
    commit(s, q, 798 + 100, 8);
    commit(all, w, 798 + 100, 8);
    must(sala__draft_fill(s, q, 898, NULL, &err), &err);
    must(sala__draft_fill(all, w, 898, NULL, &err), &err);
    CHECK(before > 220 && q->draft.filled > 64 + 128 && q->draft.filled <= 320, "%d, %d filled",
          before, q->draft.filled);
    sala_act *few = cache_of(s, q), *many = cache_of(all, w);
    size_t row = 2 * KV * DIM, recent = (size_t)(q->draft.filled - 64);
    CHECK(memcmp(few, many, 64 * row * sizeof *few) == 0, "anchor");
    CHECK(memcmp(few + 64 * row, many + ((size_t)w->draft.filled - recent) * row,
                 recent * row * sizeof *few) == 0,
          "window");
    free(few);
    free(many);
    sala_close(s);
    sala_close(all);
}

// ---- growth against a brute force ----

typedef struct branch { // a candidate
    float score;
    int token, parent, depth, row; // parent: branch or -1
} branch;

static void grow_plain(const sala_growth *g, int seq, const sala__shape *shape, sala_tree *t) {
    branch all[SALA_CANDIDATES];
    int count = 0, beam[SALA_MAX_TOPK], width = 0, chosen[SALA_CANDIDATES] = {0},
        at[SALA_CANDIDATES];
    for (int step = 0; step < g->depth; step++) {
        int from = count;
        for (int m = 0; m < (step ? width : 1); m++)
            for (int j = 0; j < g->topk; j++) {
                int row = sala_growth_row(g, step, seq, m);
                float best = g->best_score[row * g->topk + j];
                branch b = {best, g->best_token[row * g->topk + j], step ? beam[m] : -1, step + 1,
                            0};
                if (step) b.score = all[beam[m]].score + best;
                if (b.token < 0 || (step && all[beam[m]].token < 0)) b.score = -INFINITY;
                all[count++] = b;
            }
        width = g->topk;
        for (int m = 0; m < width; m++) { // the best that is not yet taken
            int best = -1;
            for (int i = from; i < count; i++) {
                int taken = 0;
                for (int k = 0; k < m; k++) taken |= beam[k] == i;
                if (!taken && (best < 0 || all[i].score > all[best].score)) best = i;
            }
            beam[m] = best;
        }
    }
    for (int n = 1; n < shape->nodes; n++) {
        int best = -1;
        for (int i = 0; i < count; i++)
            if (!chosen[i] && all[i].depth <= shape->depth && all[i].score > -INFINITY &&
                (best < 0 || all[i].score > all[best].score))
                best = i;
        if (best >= 0) chosen[best] = 1;
    }
    sala__tree_root(t, g->token[seq]);
    for (int i = 0; i < count; i++) {
        if (!chosen[i]) continue;
        int n = at[i] = t->count++;
        t->token[n] = all[i].token;
        t->parent[n] = all[i].parent < 0 ? 0 : at[all[i].parent];
        t->depth[n] = all[i].depth;
        t->score[n] = all[i].score;
    }
}

static void test_draft_grow(void) {
    enum { ROWS = 2 * (1 + (SALA_MAX_PATH - 2) * SALA_MAX_TOPK) };
    static int32_t token[ROWS], parent[ROWS], flat[ROWS], path[ROWS * SALA_MAX_PATH],
        best_token[ROWS * SALA_MAX_TOPK];
    static float score[ROWS], best_score[ROWS * SALA_MAX_TOPK];
    int32_t limit[4], full = 0;
    for (int turn = 0; turn < 6000; turn++) {
        sala_growth g = {2,
                         turn % SALA_MAX_TOPK + 1,
                         1 + (int)(check_random() % 15),
                         2,
                         limit,
                         token,
                         parent,
                         flat,
                         score,
                         path,
                         best_token,
                         best_score};
        int ties = turn / 4 % 3;
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < g.topk; j++) {
                float x = -2 * fabsf(check_uniform());
                if (ties == 1) x = check_random() % 2 ? 0 : -1; // q = 1 is common
                if (ties == 2) x = 0;
                best_token[r * g.topk + j] = (int)(check_random() % 500) * SALA_MAX_TOPK + j;
                best_score[r * g.topk + j] = x;
                if (turn % 7 == 0 && check_random() % 8 == 0) best_token[r * g.topk + j] = -1;
            }
        for (int i = 0; i < 2; i++) {
            token[i] = i + 5;
            limit[2 * i] = 1 + (int)(check_random() % 15);
            limit[2 * i + 1] = 1 + (int)(check_random() % SALA_MAX_NODES);
        }
        for (int step = 1; step < g.depth; step++)
            for (int r = 0; r < 2 * g.topk; r++) sala__growth_choose(&g, step, r);
        sala_tree got[2], want;
        sala_draft_grow_args a = {g, got};
        for (int i = 0; i < 2; i++) {
            sala__shape shape = {limit[2 * i] < g.depth ? limit[2 * i] : g.depth, 0,
                                 limit[2 * i + 1]};
            sala__op_draft_grow_seq(&a, i, 0);
            grow_plain(&g, i, &shape, &want);
            CHECK(memcmp(&got[i], &want, sizeof want) == 0, "topk %d depth %d nodes %d", g.topk,
                  g.depth, shape.nodes);
            check_tree(&got[i], &shape, i + 5);
            full += got[i].count == SALA_MAX_NODES;
            for (int step = 1; step < g.depth; step++)
                for (int m = 0; m < g.topk; m++) { // the path is the row's, from step 1 on
                    int r = sala_growth_row(&g, step, i, m), up = r;
                    for (int d = step; d > 0; d--, up = parent[up])
                        CHECK(path[r * SALA_MAX_PATH + d - 1] == up, "path of row %d", r);
                }
        }
    }
    CHECK(full > 50, "%d trees of %d nodes", full, SALA_MAX_NODES);
}

// ---- in the engine ----

typedef struct story { // what two requests of one sequence gave
    int32_t tokens[200];
    int count, filled;
    sala_act *cache;
    double accepted;
} story;

// A prompt and its continuation, the second after a second prompt. Some prompts and answers are short.
static story tell(const char *device, int window, int shorter, const char *spec, const char *tree,
                  const char *test, int chunk, const story *guess) {
    sala_options o;
    sala_request r;
    sala_event e;
    sala_error err;
    story t;
    int32_t prompt[250], answer = shorter ? 6 : 45;
    memset(&o, 0, sizeof o);
    memset(&t, 0, sizeof t);
    o.synthetic = 1, o.synthetic_seed = 9, o.threads = 2, o.max_sequences = 2, o.context = 512;
    o.device = device, o.chunk = chunk, o.draft = head_file, o.spec = spec, o.spec_tree = tree;
    o.spec_test = test, o.draft_window = window;
    sala *s = sala_open("models/sala-tiny/config.json", &o, &err);
    must(s ? 0 : -1, &err);
    check_seed = 77;
    for (int i = 0; i < 250; i++) prompt[i] = 5 + (int32_t)(check_random() % 2000);
    int64_t sequence = 0;
    for (int turn = 0; turn < 2; turn++) {
        memset(&r, 0, sizeof r);
        r.tokens = prompt, r.token_count = (turn ? 20 : 250) / (1 + 9 * shorter),
        r.sequence = sequence, r.keep = 1;
        r.max_tokens = answer, r.ignore_eos = 1, r.temperature = turn ? 0.8f : 0, r.seed = 3;
        if (guess) r.guess = guess->tokens + answer * turn, r.guess_count = answer;
        must(sala_submit(s, &r, &err) < 0 ? -1 : 0, &err);
        for (int code = 1; code > 0;) {
            must(code = sala_step(s, &err), &err);
            while (sala_next_event(s, &e)) {
                if (e.type == SALA_EVENT_TOKEN && t.count < 200) t.tokens[t.count++] = e.token;
                if (e.type != SALA_EVENT_FINISH) continue;
                sequence = e.sequence;
                t.accepted += (double)e.timings.accepted[SALA_DRAFT_EAGLE][1];
            }
        }
    }
    sala__sequence *q = &s->sequences[0];
    if (s->has_draft) {
        enter(s);
        must(sala__draft_fill(s, q, q->stored - 1, NULL, &err), &err);
        t.cache = cache_of(s, q);
        t.filled = q->draft.filled;
        leave(s);
    }
    sala_close(s);
    return t;
}

// Whatever is drafted and refused, and however prompts are cut: the same text, and the same cache of the head.
static void test_draft_engine(void) {
    write_head(1, 0);
    story plain = tell("cpu", 128, 0, "off", NULL, NULL, 512, NULL);
    story base = tell("cpu", 0, 0, "eagle", "3,2,7", NULL, 512, NULL);
    CHECK(plain.count == 90, "%d tokens", plain.count);
    const struct {
        const char *tree, *test;
        int chunk;
    } ways[] = {{"1,1,2", NULL, 512},      {"6,4,30", NULL, 64},
                {"4,2,9", "oracle", 128},  {"7,2,15", "oracle:60", 512},
                {"5,2,11", "random", 192}, {"5,2,11", "adversarial", 512}};
    for (int i = 0; i < 6; i++) {
        story t = tell("cpu", 128, 0, "eagle", ways[i].tree, ways[i].test, ways[i].chunk, &plain);
        CHECK(t.count == plain.count && memcmp(t.tokens, plain.tokens, sizeof t.tokens) == 0,
              "another text in way %d", i);
        size_t row = 2 * KV * DIM * sizeof *t.cache, n = (size_t)(t.filled - 64);
        CHECK(t.filled > 250 && t.filled < 320, "%d filled", t.filled);
        CHECK(base.filled - t.filled == 250 - 128 - 64, "%d of %d filled", t.filled, base.filled);
        CHECK(memcmp(t.cache, base.cache, 64 * row) == 0, "another anchor in way %d", i);
        CHECK(memcmp((char *)t.cache + 64 * row,
                     (char *)base.cache + ((size_t)base.filled - n) * row, n * row) == 0,
              "another window in way %d", i);
        if (i == 2) CHECK(t.accepted > 10, "%g accepted", t.accepted);
        free(t.cache);
    }
    CHECK(memcmp(base.tokens, plain.tokens, sizeof base.tokens) == 0, "another text");
    free(base.cache);
}

// A head that makes no numbers drafts the root alone; and more sequences than it has places for are no fault.
static void test_draft_nothing(void) {
    write_head(0, 0);
    sala *s = open_engine("cpu", "bf16", 128, 18);
    sala__sequence *q;
    const sala__shape shape = {4, 2, 9};
    int32_t slots[18];
    sala__shape shapes[18];
    sala_tree trees[18];
    sala_error err;
    for (int i = 0; i < 18; i++) {
        slots[i] = i, shapes[i] = shape;
        q = fake(s, i, 40, (uint64_t)(60 + i));
        if (q->draft.place) commit(s, q, 10 + i, (uint64_t)i);
        if (!q->draft.place) q->stored = 10, q->root = q->tokens[10];
    }
    must(sala__draft_propose(s, slots, shapes, 18, trees, &err), &err);
    for (int i = 0; i < 18; i++) {
        check_tree(&trees[i], &shape, s->sequences[i].root);
        CHECK(trees[i].count == (i < SALA__DRAFTS ? 9 : 1), "sequence %d: %d nodes", i,
              trees[i].count);
    }
    sala_tree alone; // the same tree without the others
    s->sequences[3].draft.seen--, s->sequences[3].draft.filled--;
    must(sala__draft_propose(s, slots + 3, shapes, 1, &alone, &err), &err);
    CHECK(memcmp(&alone, &trees[3], sizeof alone) == 0, "another tree alone");
    sala__draft_drop(s, 3); // its place is for whoever asks next
    must(sala__draft_forget(s, 17, &err), &err);
    CHECK(s->sequences[17].draft.place == 4, "place %d", s->sequences[17].draft.place);
    uint16_t *norm = (uint16_t *)(uintptr_t)s->draft_weights.final_norm.data;
    for (int i = 0; i < H; i++) norm[i] = 0x7FC0; // NaN
    commit(s, &s->sequences[0], 12, 0);
    must(sala__draft_propose(s, slots, shapes, 1, trees, &err), &err);
    CHECK(trees[0].count == 1, "%d nodes of NaN", trees[0].count);
    sala_close(s);
}

// Sequences that are only kept hold no place that one at work could have; one of those that goes on later
// has a place again.
static void test_draft_places(void) {
    sala_options o;
    sala_error err;
    sala_event e;
    int64_t kept[18], offered[19] = {0};
    write_head(1, 0);
    memset(&o, 0, sizeof o);
    o.synthetic = 1, o.device = "cpu", o.threads = 2, o.max_sequences = 18, o.context = 128;
    o.draft = head_file, o.spec = "eagle", o.spec_tree = "2,2,5";
    sala *s = sala_open("models/sala-tiny/config.json", &o, &err);
    must(s ? 0 : -1, &err);
    for (int i = 0; i < 19; i++) {
        const int32_t prompt[] = {5, 6, 7, 8 + i};
        sala_request r;
        memset(&r, 0, sizeof r);
        r.tokens = prompt, r.token_count = 4, r.max_tokens = 4, r.ignore_eos = r.keep = 1;
        if (i == 18) r.sequence = kept[0];
        must(sala_submit(s, &r, &err) < 0 ? -1 : 0, &err);
        for (int code = 1; code > 0;) {
            must(code = sala_step(s, &err), &err);
            while (sala_next_event(s, &e)) {
                if (e.type != SALA_EVENT_FINISH) continue;
                if (i < 18) kept[i] = e.sequence;
                offered[i] = e.timings.offered[SALA_DRAFT_EAGLE][1];
            }
        }
        CHECK(offered[i] > 0, "request %d had no tree", i);
    }
    for (int i = 0; i < s->draft.places; i++)
        CHECK(s->sequences[s->draft.owner[i] - 1].draft.place == i + 1, "place %d", i);
    sala_close(s);
}

// Wherever memory ends while an engine with a head is opened, one sentence says so and nothing is lost.
static void test_draft_memory(void) {
    write_head(1, 0);
    for (int fail_at = 1, opened = 0; !opened && fail_at < 1000; fail_at += 3) {
        counter c = {0, 0, 0, fail_at, 0, 0};
        sala_options o;
        sala_error err = {0, ""};
        memset(&o, 0, sizeof o);
        o.synthetic = 1, o.threads = 1, o.max_sequences = 2, o.context = 256, o.device = "cpu";
        o.draft = head_file, o.hooks.allocate = counting, o.hooks.user = &c;
        sala *s = sala_open("models/sala-tiny/config.json", &o, &err);
        opened = s != NULL;
        CHECK(s || (err.code == SALA_E_MEMORY && *err.text), "allocation %d: %s", fail_at,
              err.text);
        sala_close(s);
        CHECK(c.live == 0, "%lld allocations live after %d", (long long)c.live, fail_at);
        CHECK(fail_at < 900, "never opened");
    }
}

// What the head reads of a pass is the output of its three layers.
static void test_draft_features(void) {
    sala_options o;
    sala_request r;
    sala_event e;
    sala_error err;
    int32_t prompt[50];
    int seen = 0;
    write_head(0, 0);
    memset(&o, 0, sizeof o);
    memset(&r, 0, sizeof r);
    o.synthetic = 1, o.threads = 2, o.max_sequences = 1, o.context = 256, o.device = "cpu";
    o.draft = head_file, o.logits_rows = 64, o.hidden_states = 1;
    sala *s = sala_open("models/sala-tiny/config.json", &o, &err);
    must(s ? 0 : -1, &err);
    for (int i = 0; i < 50; i++) prompt[i] = 5 + i * 31;
    r.tokens = prompt, r.token_count = 50, r.max_tokens = 1, r.want_rows = SALA_ROWS_PROMPT;
    must(sala_submit(s, &r, &err) < 0 ? -1 : 0, &err);
    must(sala_step(s, &err), &err);
    while (sala_next_event(s, &e)) {
        if (e.type != SALA_EVENT_ROWS) continue;
        for (int i = 0; i < e.row_count * 3 * H; i++) {
            int row = i / (3 * H), third = i / H % 3, layer = 1 + 2 * third;
            float want =
                e.hidden[((size_t)(layer + 1) * (size_t)e.row_count + (size_t)row) * H + i % H];
            seen += sala_act_f32(s->draft.features[i]) == want;
        }
    }
    CHECK(seen == 50 * 3 * H, "%d of %d features", seen, 50 * 3 * H);
    sala_close(s);
}

// ---- on a device ----

// Which libraries stand for the driver and the compiler. NULL: neither GPU nor simulator is there.
static const char *device_name(void) {
    const char *simulator = getenv("SALA_SIM");
    if (getenv("SALA_TEST_GPU")) return "cuda:0";
    if (!simulator) simulator = "build/libsala_sim.so";
    if (!sala__file_exists(simulator)) return NULL;
    setenv("SALA_CUDA", simulator, 1);
    setenv("SALA_NVRTC", simulator, 1);
    return "cuda:0";
}

// Trees of the device by the reference, and beside those of the CPU; a step more is asked of the same graph.
static void test_draft_device(void) {
    const char *device = device_name(), *formats[] = {"bf16", "nvfp4"};
    reference *r = (reference *)calloc(1, sizeof *r);
    if (!r || !device) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        free(r);
        return;
    }
    write_head(1, 0);
    for (int f = 0; f < 2; f++) {
        sala *cpu = open_engine("cpu", formats[f], 128, 3),
             *gpu = open_engine(device, formats[f], 128, 3);
        const int32_t slots[3] = {2, 0, 1};
        const sala__shape shapes[3] = {{4, 3, 16}, {3, 2, 9}, {2, 1, 3}};
        int stored[3] = {3, 40, 66}, same = 0, nodes = 0;
        sala_tree want[3], got[3];
        sala_error err;
        enter(gpu);
        for (int i = 0; i < 3; i++) {
            fake(cpu, slots[i], 120, (uint64_t)(40 + i));
            fake(gpu, slots[i], 120, (uint64_t)(40 + i));
        }
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 3; i++) {
                commit(cpu, &cpu->sequences[slots[i]], stored[i], (uint64_t)i);
                commit(gpu, &gpu->sequences[slots[i]], stored[i], (uint64_t)i);
                stored[i] += 1 + i;
            }
            must(sala__draft_propose(cpu, slots, shapes, 3, want, &err), &err);
            must(sala__draft_propose(gpu, slots, shapes, 3, got, &err), &err);
            for (int i = 0; i < 3; i++) {
                const sala__sequence *q = &gpu->sequences[slots[i]];
                check_tree(&got[i], &shapes[i], q->root);
                CHECK(got[i].count == shapes[i].nodes, "%d nodes", got[i].count);
                r->s = cpu;
                double error = f ? 0 : tree_error(r, q, (uint64_t)i, &got[i]);
                CHECK(error < 0.12, "%s, round %d, tree %d: %g", formats[f], round, i, error);
                for (int n = 1; n < got[i].count; n++, nodes++)
                    same += got[i].token[n] == want[i].token[n] &&
                            fabsf(got[i].score[n] - want[i].score[n]) < 0.12f;
            }
        }
        CHECK(same * 10 >= nodes * 8, "%s: only %d of %d nodes as on the CPU", formats[f], same,
              nodes);
        printf("  %s: %d of %d nodes as on the CPU, %d graphs\n", formats[f], same, nodes,
               gpu->draft.graph_count);
        leave(gpu);
        sala_close(cpu);
        sala_close(gpu);
    }
    free(r);
}

// The engine there: captured layers, accepted nodes, several steps of recorded passes.
static void test_draft_device_engine(void) {
    const char *device = device_name();
    if (!device) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        return;
    }
    int shorter = getenv("SALA_TEST_GPU") == NULL;
    write_head(1, 0);
    story plain = tell(device, 128, shorter, "off", NULL, NULL, 64, NULL);
    story base = tell(device, 128, shorter, "eagle", "3,2,7", NULL, 64, NULL);
    story good = tell(device, 128, shorter, "eagle", "4,2,9", "oracle", 512, &plain);
    CHECK(plain.count == (shorter ? 12 : 90), "%d tokens", plain.count);
    CHECK(memcmp(plain.tokens, base.tokens, sizeof plain.tokens) == 0, "another text");
    CHECK(memcmp(plain.tokens, good.tokens, sizeof plain.tokens) == 0, "another text");
    CHECK(good.accepted > 1, "%g accepted", good.accepted);
    size_t n = (size_t)(base.filled < good.filled ? base.filled : good.filled);
    size_t row = 2 * KV * DIM * sizeof *base.cache, last = n < 64 ? 0 : n - 64;
    CHECK(n > 20 && memcmp(base.cache, good.cache, (n < 64 ? n : 64) * row) == 0, "another anchor");
    CHECK(memcmp((char *)base.cache + ((size_t)base.filled - last) * row,
                 (char *)good.cache + ((size_t)good.filled - last) * row, last * row) == 0,
          "another window");
    free(base.cache);
    free(good.cache);
}

TEST_MAIN(TEST(test_draft_grow), TEST(test_draft_reference), TEST(test_draft_cache),
          TEST(test_draft_window), TEST(test_draft_engine), TEST(test_draft_nothing),
          TEST(test_draft_places), TEST(test_draft_features), TEST(test_draft_memory),
          TEST(test_draft_device), TEST(test_draft_device_engine))
