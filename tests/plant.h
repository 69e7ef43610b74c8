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
    PLANT_CHAIN        // the longest chain, all right
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
    int end = mode == PLANT_CHAIN ? count - 1 : mode == PLANT_WRONG ? 0 : plant_end(t, mode);
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

// Sums over all requests of the session.
HELPER sala_timings plant_sums(const session *t) {
    sala_timings sum;
    memset(&sum, 0, sizeof sum);
    for (int i = 0; i < t->count; i++)
        for (int k = 0; k < 3; k++) {
            const sala_timings *of = &t->out[i].timings;
            sum.verifies[0] += of->verifies[k];
            sum.verify_tokens[0] += of->verify_tokens[k];
            for (int d = 0; d < SALA_DEPTHS; d++) {
                sum.offered[0][d] += of->offered[k][d];
                sum.accepted[0][d] += of->accepted[k][d];
            }
        }
    return sum;
}

#endif
