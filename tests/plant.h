/*  plant.h - trees in the place of drafts, for tests of the loop: two engines run the same requests, one without
    speculation, then one whose trees are planted here with the first one's output in mind. Included after model.h. */
#ifndef SALA_TEST_PLANT_H
#define SALA_TEST_PLANT_H

enum {                 // what a planted tree is like
    PLANT_RANDOM,      // any shape; the right tokens along some path, as far as some depth
    PLANT_ORACLE,      // the right tokens along a path that is as long as it can be
    PLANT_ADVERSARIAL, // the right token is the last of its siblings
    PLANT_WRONG,       // no token is right
    PLANT_MIXED,       // each time one of the above, or the root alone
    PLANT_CHAIN        // the longest chain, mostly all right
};

static struct {
    session *truth; // its requests have the same numbers
    int mode, most; // most: nodes of a tree
    int64_t trees;
} plant;

// A shape: parents and depths of `count` nodes, none deeper than `deepest`.
HELPER void plant_shape(sala_tree *t, int count, int deepest, int shape) {
    for (int n = 0; n < count; n++) {
        int parent = shape == 0   ? n - 1
                     : shape == 1 ? (n > 2 ? n - 2 : 0) // two chains side by side
                     : shape == 2 ? (n - 1) / 2
                                  : below(n ? n : 1); // chain, chains, binary, any
        while (n && t->depth[parent] >= deepest) parent = t->parent[parent];
        t->parent[n] = n ? parent : -1;
        t->depth[n] = n ? t->depth[parent] + 1 : 0;
    }
    t->count = count;
}

// The node at which the path of right tokens ends.
HELPER int plant_end(const sala_tree *t, int mode) {
    int end = mode == PLANT_RANDOM ? below(t->count) : 0;
    for (int n = 1; n < t->count; n++) {
        if (mode == PLANT_ADVERSARIAL && t->parent[n] == end) end = n;
        if (mode == PLANT_ORACLE && t->depth[n] > t->depth[end]) end = n;
        if (mode == PLANT_ADVERSARIAL && t->parent[n] == t->parent[end]) end = n;
    }
    return end;
}

HELPER int plant_is_sibling(const sala_tree *t, int n, int32_t token) {
    for (int k = 1; k < t->count; k++)
        if (k != n && t->parent[k] == t->parent[n] && t->token[k] == token) return 1;
    return 0;
}

HELPER void plant_tree(sala *s, sala__request *r, int mode, int most) {
    sala_tree *t = &r->spec.tree;
    const outcome *truth = outcome_of(plant.truth, r->id);
    int32_t root = t->token[0], right[SALA_MAX_NODES] = {0};
    int deepest = r->spec.deepest, vocab = s->config.dims.vocab;
    if (mode == PLANT_RANDOM && deepest && below(2)) deepest = 1 + below(deepest);
    int count = mode == PLANT_RANDOM ? 1 + below(most) : most;
    if (mode == PLANT_CHAIN && count > deepest + 1) count = deepest + 1;
    if (!deepest) count = 1;
    memset(t, 0, sizeof *t);
    plant_shape(t, count, deepest,
                mode == PLANT_CHAIN         ? 0
                : mode == PLANT_ADVERSARIAL ? 2
                                            : below(4));
    for (int n = 0; n < count; n++) t->token[n] = n ? -1 : root;
    int end = mode == PLANT_CHAIN   ? below(4) ? count - 1 : below(count)
                : mode == PLANT_WRONG ? 0
                                    : plant_end(t, mode);
    for (; end > 0; end = t->parent[end]) right[end] = 1;
    for (int n = 1; n < count; n++) {
        int64_t at = r->chosen - 1 + t->depth[n];
        if (right[n] && at < truth->count) t->token[n] = truth->tokens[at];
    }
    for (int n = 1; n < count; n++) {
        int64_t at = r->chosen - 1 + t->depth[n];
        while (t->token[n] < 0) {
            int32_t token = below(vocab);
            int is_right = at < truth->count && token == truth->tokens[at];
            if (!plant_is_sibling(t, n, token) && !(mode == PLANT_WRONG && is_right))
                t->token[n] = token;
        }
    }
    r->spec.source = mode % 3;
    plant.trees++;
}

HELPER void plant_trees(sala *s, sala__request **active, int count, int rows) {
    for (int i = 0; i < count; i++) {
        int most = rows - (count - 1 - i), mode = plant.mode;
        if (most > plant.most) most = plant.most;
        if (mode == PLANT_MIXED) mode = below(6);
        if (mode == PLANT_MIXED) most = 1;
        plant_tree(s, active[i], mode == PLANT_MIXED ? PLANT_RANDOM : mode, most);
        rows -= active[i]->spec.tree.count;
    }
}

// Run all waiting requests of t with planted trees; the same requests have run in `truth`.
HELPER void plant_run(session *t, session *truth, int mode, int most) {
    plant.truth = truth;
    plant.mode = mode;
    plant.most = most;
    t->engine->plant = plant_trees;
    session_run(t);
}

// Request i gave the same in both: tokens, log-probabilities, text, the rows of the output, all in bits.
HELPER void plant_same(session *t, session *truth, int i, int64_t prompt) {
    outcome *a = &t->out[i], *b = &truth->out[i];
    CHECK(same_choices(a, b),
          "request %d: %lld tokens, reason %d; without speculation %lld, reason %d; \"%s\", \"%s\"",
          i, (long long)a->count, a->reason, (long long)b->count, b->reason, a->text, b->text);
    if (!a->seen || !b->seen || a->count != b->count) return;
    int64_t d = first_difference(t, a, b, prompt, prompt + b->count - 1);
    CHECK(d < 0, "request %d: position %lld differs", i, (long long)d);
    for (int64_t p = prompt + b->count - 1; p < t->info.context; p++)
        CHECK(!a->seen[p], "request %d: a row of position %lld, beyond the end", i, (long long)p);
}

// What happened to trees, summed up over sources and requests.
HELPER void plant_sums(const session *t, sala_timings *sum) {
    for (int i = 0; i < t->count; i++)
        for (int k = 0; k < 3; k++) {
            const sala_timings *of = &t->out[i].timings;
            sum->verifies[0] += of->verifies[k];
            sum->verify_tokens[0] += of->verify_tokens[k];
            for (int d = 0; d < SALA_DEPTHS; d++) {
                sum->offered[0][d] += of->offered[k][d];
                sum->accepted[0][d] += of->accepted[k][d];
            }
        }
}

// ---- a crowd of requests, plainly and with trees ----

typedef struct plant_case {
    const char *path, *device;
    int dense_len;
    const int *lengths; // [count] of prompts
    int count, sequences, output, mode, most;
    void (*after_step)(sala *engine);
} plant_case;

enum { PLANT_PROMPT = 2048 };
static int32_t plant_tokens[PLANT_PROMPT];

// Request i of a crowd: every way to choose tokens.
HELPER sala_request plant_request(const plant_case *c, int i, int output) {
    static const sala_bias biases[] = {{17, 1.5f}, {33, -2}, {60, -INFINITY}};
    sala_request r =
        request_of(plant_tokens + 7 * (i % 40), c->lengths[i % c->count], output - i % 7);
    r.logprobs = i % 3 ? 0 : 1 + i % 5;
    r.want_rows = i % 2 ? SALA_ROWS_GENERATED : 0;
    r.want_trees = i % 2;
    if (i % 4) request_sampled(&r, 100 + (uint64_t)i);
    if (i % 4 == 2) r.top_p = 0.7f, r.top_k = 30;
    if (i % 5 == 1) r.repetition_penalty = 1.3f;
    if (i % 5 == 2) r.frequency_penalty = 0.4f, r.presence_penalty = 0.3f;
    if (i % 6 == 3) r.biases = biases, r.bias_count = 3;
    if (i % 7 == 4) r.force = plant_tokens + 500 + i, r.force_count = output > 9 ? 9 : 2;
    r.keep = 1;
    return r;
}

HELPER session plant_engine(const plant_case *c, int off) {
    sala_options o = small_options(256, 64);
    o.device = c->device;
    o.max_sequences = c->sequences;
    o.hidden_states = !c->device; // on a GPU they would go without graphs
    o.dense_len = c->dense_len;
    o.kv_tokens = (int64_t)(c->sequences + 1) * o.context;
    o.spec = off ? "off" : NULL;
    return session_open(c->path, &o);
}

// One request for each of `n` kept sequences (turn 1), or that begin (turn 0), in both engines.
HELPER void plant_turn(session *a, session *b, const plant_case *c, int first, int n, int turn) {
    int64_t from[16] = {0};
    for (int i = 0; i < n; i++) {
        sala_request r = plant_request(c, first + i, turn ? 6 : c->output);
        int64_t other = 0;
        if (turn) {
            r.sequence = a->out[a->count - n].sequence;
            other = b->out[b->count - n].sequence;
            from[i] = sequence_of(a, r.sequence)->stored + 1;
            r.keep = 0;
            r.token_count = 5 + i;
        }
        from[i] += r.token_count;
        session_ask(a, &r);
        r.sequence = other;
        session_ask(b, &r);
    }
    session_run(a);
    plant_run(b, a, c->mode, c->most);
    for (int i = 0; i < n; i++) {
        int at = a->count - n + i;
        plant_same(b, a, at, from[i]);
        if (turn || c->device) continue;
        memory x = memory_of(a, a->out[at].sequence), y = memory_of(b, b->out[at].sequence);
        CHECK(memory_same(&x, &y), "request %d: the memory differs", at);
        free(x.data);
        free(y.data);
    }
}

// The crowd in two engines. Each sequence goes on with a second request, whose prompt is prefilled on what the first
// one left. What happened to trees is added to `sum`.
HELPER void plant_compare(const plant_case *c, sala_timings *sum) {
    random_tokens(plant_tokens, PLANT_PROMPT, c->device ? 2000 : 97);
    session a = plant_engine(c, 1), b = plant_engine(c, 0);
    b.after_step = c->after_step;
    for (int first = 0; first < c->count; first += c->sequences) {
        int n = c->count - first < c->sequences ? c->count - first : c->sequences;
        plant_turn(&a, &b, c, first, n, 0);
        plant_turn(&a, &b, c, first, n, 1);
    }
    plant_sums(&b, sum);
    session_close(&a);
    session_close(&b);
}

#endif
