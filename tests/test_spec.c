#define SALA_IMPLEMENTATION
#include "../sala.h"
// Speculation: n-gram chains against brute force, what runs when, drafts of tests; then the same text with
// every setting. Whether verify itself is right, test_tree.c and test_loop.c know.
#include "check.h"
#include "model.h"

// ---- one request without a model: what would be drafted for a text that is known ----

typedef struct walk {
    sala s;
    sala__sequence q;
    sala__request r;
    int steps, tokens;             // all of them
    int chains, chain_tokens;      // of n-grams
    int offered[16], accepted[16]; // by depth
    double (*cost)(int rows);      // seconds of a verify; NULL: nothing is measured
    double noise, seconds;         // each third verify takes so many times as long; of all of them
} walk;

static walk *walk_new(const char *spec, const int32_t *tokens, int64_t prompt, int64_t total) {
    walk *w = (walk *)need(calloc(1, sizeof *w));
    w->s.options.spec = spec;
    w->s.config.dims.block = 64;
    w->s.config.dims.vocab = 1000;
    w->s.sequences = &w->q;
    w->q.tokens = (int32_t *)(uintptr_t)tokens;
    w->q.page_count = (int32_t)(total + 63) / 64;
    w->q.token_count = (size_t)prompt + 1;
    w->r.chosen = 1;
    w->r.max_tokens = total - prompt;
    if (sala__spec_open(&w->s, NULL) < 0) die("walk", "a bad setting");
    return w;
}

// One verify. Returns how many tokens it gave, 0 at the end.
static int walk_step(walk *w) {
    sala__request *active = &w->r;
    sala_error err = {0, ""};
    if (w->r.chosen >= w->r.max_tokens) return 0;
    w->q.stored = (int32_t)w->q.token_count - 1;
    w->q.root = w->q.tokens[w->q.stored];
    int64_t left = w->r.max_tokens - w->r.chosen;
    w->r.spec.deepest = (int32_t)(left < SALA_MAX_PATH ? left : SALA_MAX_PATH) - 1;
    if (sala__plan_trees(&w->s, &active, 1, 32, &err) < 0) die("a plan", err.text);
    const sala_tree *t = &w->r.spec.tree;
    int at = 0, given = 0, next = 0;
    while (next >= 0) {
        given++;
        next = -1;
        for (int i = at + 1; i < t->count; i++) {
            if (t->parent[i] != at) continue;
            w->offered[t->depth[i]] += next < 0;
            if (t->token[i] == w->q.tokens[w->q.token_count - 1 + (size_t)given]) next = i;
        }
        if (next >= 0) w->accepted[t->depth[at = next]]++;
    }
    CHECK(w->r.chosen + given <= w->r.max_tokens, "a tree is deeper than the request is long");
    if (w->r.spec.source == SALA_DRAFT_NGRAM) w->chains++, w->chain_tokens += given;
    if (w->cost) {
        double seconds = w->cost(t->count) * (w->steps % 3 == 1 && w->noise > 0 ? w->noise : 1);
        sala__plan_learn(&w->s, t->count, seconds);
        w->seconds += w->cost(t->count);
    }
    w->steps++;
    w->tokens += given;
    w->r.chosen += given;
    w->q.token_count += (size_t)given;
    return given;
}

static void walk_free(walk *w) {
    free(w->r.spec.chain_head);
    free(w->r.spec.chain_next);
    free(w);
}

// ---- n-grams ----

// What the index must find, looked for without it.
static int brute_match(const int32_t *t, int64_t count, int64_t *place) {
    int best = 0, hops = 0;
    for (int64_t e = count - 2; e >= 3 && hops < 8; e--) {
        int n = 0;
        while (n < 32 && n <= e && t[e - n] == t[count - 1 - n]) n++;
        if (n < 4) continue;
        hops++;
        if (n > best) best = n, *place = e;
    }
    return best;
}

static void test_ngrams_against_brute_force(void) {
    enum { LENGTH = 1500 };
    int32_t tokens[LENGTH];
    int found = 0;
    for (int alphabet = 2; alphabet <= 300; alphabet *= 12) {
        check_seed = (uint64_t)alphabet;
        for (int i = 0; i < LENGTH; i++) { // new tokens, and pieces of what was
            int from = below(i + 1), n = 1 + below(40);
            if (i > 50 && below(3) == 0)
                for (; n > 0 && i < LENGTH - 1 && from < i; n--) tokens[i++] = tokens[from++];
            tokens[i] = below(alphabet);
        }
        walk *w = walk_new("ngram", tokens, 40, LENGTH);
        for (int count = 41; count <= LENGTH; count += 1 + below(4)) {
            w->q.token_count = (size_t)count;
            if (sala__ngram_index(&w->s, &w->r, NULL) < 0) die("index", "out of memory");
            int64_t place = -1, want = -1;
            int n = sala__ngram_match(&w->r.spec, tokens, count, &place);
            int m = brute_match(tokens, count, &want);
            // Other hashes in the same chain may use up the eight places: then less is found, never more.
            CHECK(n <= m && (n < m || n == 0 || place == want || tokens[place] == tokens[want]),
                  "%d tokens of %d: %d at %lld, not %d at %lld", count, alphabet, n,
                  (long long)place, m, (long long)want);
            found += n > 0 && n == m && place == want;
        }
        walk_free(w);
    }
    CHECK(found > 800, "only %d matches were compared", found);
}

// The chain is what followed; where it reaches its own place it goes round.
static void test_chain_repeats_a_period(void) {
    int32_t tokens[200];
    for (int i = 0; i < 200; i++) tokens[i] = i % 3;
    walk *w = walk_new("ngram", tokens, 40, 200);
    while (walk_step(w)) continue;
    CHECK(w->chains == w->steps && w->tokens == 159, "%d of %d steps, %d tokens", w->chains,
          w->steps, w->tokens);
    CHECK(w->steps == 10, "%d steps for 159 tokens that repeat", w->steps); // 9 of 16 and 15
    walk_free(w);
}

static void test_chain_lengths(void) {
    static const int rows[][5] = {// match, misses, a tree is there, at most, length
                                  {3, 0, 0, 15, 0},  {4, 0, 0, 15, 4}, {4, 0, 1, 15, 0},
                                  {5, 1, 0, 15, 8},  {5, 0, 1, 15, 0}, {6, 0, 1, 15, 12},
                                  {7, 0, 0, 15, 15}, {7, 2, 0, 15, 0}, {7, 2, 1, 15, 0},
                                  {8, 2, 1, 15, 15}, {32, 3, 0, 4, 4}, {32, 0, 0, 0, 0},
                                  {10, 4, 1, 15, 15}};
    sala__spec c;
    memset(&c, 0, sizeof c);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        c.misses = rows[i][1];
        int n = sala__ngram_length(&c, rows[i][0], rows[i][2], rows[i][3]);
        CHECK(n == rows[i][4], "match %d, misses %d: %d", rows[i][0], rows[i][1], n);
    }
    c.misses = 0;
    c.chains_from = 10;
    c.step = 9;
    CHECK(sala__ngram_length(&c, 32, 0, 15) == 0, "a pause");
    c.step = 10;
    CHECK(sala__ngram_length(&c, 32, 0, 15) == 15, "after the pause");
}

// Two failures in a row: only long matches; four: a pause of 32 steps; one success: all is forgotten.
static void test_streaks(void) {
    sala__spec c;
    memset(&c, 0, sizeof c);
    c.step = 100;
    c.tree.count = 16;
    static const int accepted[] = {0, 1, 0, 2, 1, 5, 1, 3, 1, 0, 0, 0, 4};
    static const int misses[] = {1, 2, 3, 3, 4, 0, 1, 0, 1, 2, 3, 4, 0};
    for (int i = 0; i < 13; i++) {
        sala__ngram_learn(&c, accepted[i]);
        CHECK(c.misses == misses[i], "after chain %d: %d misses", i, c.misses);
        CHECK((c.chains_from == 132) == (i >= 4), "after chain %d: a pause until %lld", i,
              (long long)c.chains_from);
    }
    c.tree.count = 2; // one token was offered, and right: no failure
    sala__ngram_learn(&c, 1);
    CHECK(c.misses == 0, "a chain of one");
    CHECK(c.chains == 14 && c.got == 19, "%d chains gave %g", c.chains, c.got);
}

// The same key, each time followed by something else: chains are refuted, fewer and fewer are tried, and
// never twice the same tokens at the same place.
static void test_refuted_chains_stop(void) {
    enum { LENGTH = 4000 };
    int32_t *tokens = (int32_t *)need(malloc(LENGTH * 4)), refuted = -1;
    check_seed = 3;
    for (int i = 0; i < LENGTH; i++) tokens[i] = i % 10 < 5 ? i % 10 : 100 + below(800);
    walk *w = walk_new("ngram", tokens, 60, LENGTH);
    int64_t place = -1;
    for (int given; (given = walk_step(w)) > 0;) {
        const sala_tree *t = &w->r.spec.tree;
        for (int i = 1; i < t->count; i++)
            CHECK(place != w->q.stored + i || t->token[i] != refuted,
                  "token %d is offered again for position %lld", refuted, (long long)place);
        place = given < t->count ? w->q.stored + given : -1;
        refuted = given < t->count ? t->token[given] : -1;
    }
    CHECK(w->chains == 8, "%d chains in %d steps", w->chains, w->steps);
    walk_free(w);
    free(tokens);
}

// Records of which one value changes: a chain that it refuted is resumed behind it, and gives a whole record.
static void test_resumed_chains(void) {
    enum { LENGTH = 2000 };
    int32_t tokens[LENGTH];
    check_seed = 4;
    for (int i = 0; i < LENGTH; i++) tokens[i] = i % 14 < 13 ? i % 14 : 100 + below(800);
    walk *w = walk_new("ngram", tokens, 60, LENGTH);
    while (walk_step(w)) continue;
    CHECK(w->tokens >= 13 * w->steps && w->chains >= w->steps - 2,
          "%d tokens in %d steps, %d chains", w->tokens, w->steps, w->chains);
    CHECK(w->accepted[13] > 100, "%d whole records", w->accepted[13]);
    walk_free(w);
    w = walk_new("ngram", tokens, 55, LENGTH); // the last token is a new value
    sala__request *r = &w->r;
    r->spec.aligned = 41;
    r->spec.run = 9;
    r->spec.deepest = 15;
    sala__tree_root(&r->spec.tree, 0);
    CHECK(sala__plan_chain(&w->s, r, 1, 1, 31, NULL) == 15 && r->spec.resumed, "nothing resumed");
    r->spec.aligned = 41; // little was right before, and then nothing: little is offered
    r->spec.run = 3;
    r->spec.lost = 1;
    sala__tree_root(&r->spec.tree, 0);
    CHECK(sala__plan_chain(&w->s, r, 1, 1, 31, NULL) == 6, "too much is resumed");
    r->spec.aligned = 41;
    w->s.policy.trees = 1; // a head's trees do not stand back for that
    CHECK(sala__plan_chain(&w->s, r, 1, 1, 31, NULL) == 0, "in place of a tree");
    walk_free(w);
}

// ---- what runs when ----

static void test_levels_by_load(void) {
    static const int rows[][3] = {// sequences, steps, the level then
                                  {1, 1, 2},   {2, 40, 2},  {3, 1, 1},  {2, 40, 1},  {1, 15, 1},
                                  {2, 1, 1},   {1, 15, 1},  {1, 1, 2},  {16, 1, 1},  {17, 1, 0},
                                  {15, 40, 0}, {14, 15, 0}, {14, 1, 1}, {16, 40, 1}, {64, 1, 0},
                                  {1, 16, 1},  {1, 15, 1},  {1, 1, 2},  {64, 1, 0},  {14, 15, 0},
                                  {15, 1, 0},  {14, 15, 0}, {1, 1, 1}};
    sala s;
    memset(&s, 0, sizeof s);
    s.options.spec = "eagle";
    s.has_draft = 1;
    CHECK(sala__spec_open(&s, NULL) == 0, "eagle");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int k = 0; k < rows[i][1]; k++) sala__choose_level(&s.policy, rows[i][0]);
        CHECK(s.policy.level == rows[i][2], "row %zu (%d sequences): level %d", i, rows[i][0],
              s.policy.level);
    }
    s.options.spec_tree = "3,1,4";
    CHECK(sala__spec_open(&s, NULL) == 0, "a shape");
    for (int k = 0; k < 40; k++) sala__choose_level(&s.policy, 200);
    CHECK(s.policy.level == 2 && s.policy.shape[2].nodes == 4, "a given shape stays");
}

// Trees that cost more than they give are left after 16 steps, tried again later, less and less often.
static void test_levels_by_measurement(void) {
    sala s;
    sala__policy *p = &s.policy;
    memset(&s, 0, sizeof s);
    s.has_draft = 1;
    CHECK(sala__spec_open(&s, NULL) == 0, "auto");
    for (int k = 0; k < 3; k++) {
        sala__plan_learn(&s, 1, 1e-3);
        sala__plan_learn(&s, 15, 1.25e-3);
        for (int l = 1; l < 3; l++) sala__least_add(&p->draft[l], 0.25e-3);
    }
    int used[3] = {0, 0, 0}, trials = 0;
    for (p->step = 1; p->step < 50000;
         p->step++) { // 1.2 tokens a tree, 1.3 or 1.5 plain steps each
        int before = p->level;
        sala__choose_level(p, 1);
        used[p->level]++;
        trials += p->level > before;
        if (p->level) p->yield[p->level] += (1.2 - p->yield[p->level]) / 64;
    }
    CHECK(used[1] + used[2] < 1500 && trials >= 2 && trials <= 8, "%d + %d steps in %d trials",
          used[1], used[2], trials);
    CHECK(p->level == 0, "level %d", p->level);
    for (; p->level == 0 && p->step < 200000; p->step++) sala__choose_level(p, 1);
    for (int k = 0; k < 500; k++, p->step++) { // now they give 2.5
        sala__choose_level(p, 1);
        if (p->level) p->yield[p->level] += (2.5 - p->yield[p->level]) / 64;
    }
    CHECK(p->level == 2, "trees that pay run at level %d", p->level);
    for (int k = 0; k < 900; k++, p->step++) { // small trees pay where large ones do not
        sala__choose_level(p, 1);
        if (p->level) p->yield[p->level] += (1.45 - p->yield[p->level]) / 64;
    }
    CHECK(p->level == 1, "trees that hardly pay run at level %d", p->level);
    for (int k = 0; k < 500; k++, p->step++) { // and what they give speaks for large ones
        sala__choose_level(p, 1);
        if (p->level) p->yield[p->level] += (2.5 - p->yield[p->level]) / 64;
    }
    CHECK(p->level == 2, "trees that pay again run at level %d", p->level);
    char text[256];
    sala__spec_text(&s, text, sizeof text);
    CHECK(strstr(text, "auto: n-gram chains and EAGLE-3 trees of 7,2,15") == text, "%s", text);
    p->level = 0;
    sala__spec_text(&s, text, sizeof text);
    CHECK(strstr(text, "do not pay"), "%s", text);
}

// Seconds of `steps` steps in units of plain ones, over those that plain decoding takes for the same tokens. A tree
// takes `price` and gives `given`; with other work beside the first 70 steps trees take four times as long there.
static double trees_against_plain(int on_gpu, int busy, double price, int given, int steps,
                                  int *level) {
    sala s;
    sala__request r;
    memset(&s, 0, sizeof s);
    memset(&r, 0, sizeof r);
    s.has_draft = 1;
    s.on_gpu = on_gpu;
    CHECK(sala__spec_open(&s, NULL) == 0, "auto");
    double seconds = 0;
    sala__policy *p = &s.policy;
    for (p->step = 1; p->step < steps; p->step++) {
        sala__plan_review(p, &r);
        sala__choose_level(p, 1);
        int tree = p->level && sala__least_known(&p->cost[0]);
        double step = tree ? (busy && p->step < 70 ? 4 : 1) * price : 1;
        if (tree) {
            sala__least_add(&p->draft[p->level], 0.25 * step);
            r.spec.source = SALA_DRAFT_EAGLE;
            r.spec.level = p->level;
        }
        sala__plan_learn(&s, tree ? p->shape[p->level].nodes : 1, (tree ? 0.75 : 1) * step);
        r.chosen += tree ? given : 1;
        seconds += step;
    }
    *level = p->level;
    return seconds / (double)r.chosen;
}

// What a head may lose before it is left: little, however dear its trees are.
static void test_trials_are_cheap(void) {
    static const struct {
        int on_gpu, busy;
        double price;
        int given, steps;
        double most;
        int level;
    } rows[] = {
        {0, 0, 8, 1, 60, 1, 0},     {0, 0, 8, 2, 200, 1.08, 0},    {0, 0, 8, 2, 3000, 1.02, 0},
        {0, 0, 3, 2, 400, 1.05, 0}, {0, 0, 1.6, 3, 400, 0.7, 2},   {0, 1, 3, 4, 700, 0.9, 2},
        {1, 0, 8, 2, 200, 1.12, 0}, {1, 0, 1.65, 1, 400, 1.04, 0}, {1, 0, 1.65, 3, 400, 0.56, 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int level;
        double ratio = trees_against_plain(rows[i].on_gpu, rows[i].busy, rows[i].price,
                                           rows[i].given, rows[i].steps, &level);
        CHECK(ratio <= rows[i].most && level == rows[i].level,
              "row %zu: %.3f of plain decoding, level %d", i, ratio, level);
    }
}

// Steps, not trees: a step of three sequences has three trees, in the time of four plain steps.
static void test_what_a_trial_may_lose(void) {
    sala s;
    memset(&s, 0, sizeof s);
    s.has_draft = 1;
    s.on_gpu = 1;
    CHECK(sala__spec_open(&s, NULL) == 0, "auto");
    sala__policy *p = &s.policy;
    p->level = 1;
    for (int i = 0; i < 2; i++) {
        sala__plan_learn(&s, 3, 1e-3);
        sala__plan_learn(&s, 3 * p->shape[1].nodes, 3e-3);
        sala__least_add(&p->draft[1], 1e-3);
    }
    for (int steps = 1; steps < 6;
         steps++) { // that give one token a tree: three plain steps are lost
        p->tried[1] = p->given[1] = 3 * steps;
        CHECK(sala__level_failed(p, 3) == (3 * steps > 8), "%d steps", steps);
    }
}

static double flat(int rows) { // memory-bound
    return 1e-3 + 1e-6 * rows;
}
static double steep(int rows) { // compute-bound
    return 1e-4 + 0.5e-4 * (rows - 1);
}

// A chain runs only where its rows cost less than the tokens that it may give.
static void test_chains_by_measurement(void) {
    int32_t tokens[3000];
    check_seed = 9;
    for (int i = 0; i < 3000; i++) tokens[i] = i % 40 < 12 ? i % 40 : below(900);
    walk *w[3] = {walk_new("auto", tokens, 100, 3000), walk_new("auto", tokens, 100, 3000),
                  walk_new("auto", tokens, 100, 3000)};
    w[0]->cost = flat;
    w[1]->cost = steep;
    for (int i = 0; i < 3; i++)
        while (walk_step(w[i])) continue;
    CHECK(w[0]->chains > 20, "%d chains where rows are free", w[0]->chains);
    CHECK(w[1]->tokens * steep(1) > 0.8 * w[1]->seconds,
          "%d tokens at %g steps each where each row costs half a step", w[1]->tokens,
          w[1]->seconds / w[1]->tokens / steep(1));
    CHECK(w[2]->chains > 20, "%d chains where nothing is measured", w[2]->chains);
    int chains = w[0]->chains;
    for (int i = 0; i < 3; i++) walk_free(w[i]);
    w[0] = walk_new("auto", tokens, 100, 3000);
    w[0]->cost = flat;
    w[0]->noise = 30;
    while (walk_step(w[0])) continue;
    CHECK(w[0]->chains > 0.9 * chains, "%d chains beside noise, %d without", w[0]->chains, chains);
    walk_free(w[0]);
    w[0] = walk_new("auto", tokens, 10, 31); // too short a text
    w[1] = walk_new("auto", tokens, 100, 3000);
    w[1]->r.sampler.temperature = 1.1f; // too wild
    w[0]->cost = w[1]->cost = flat;
    for (int i = 0; i < 2; i++) {
        while (walk_step(w[i])) continue;
        CHECK(w[i]->chains == 0, "case %d: %d chains", i, w[i]->chains);
        walk_free(w[i]);
    }
}

// Prices are the least that was measured; noise moves nothing, lasting change does.
static void test_prices(void) {
    sala__least m = {0, 0, 0};
    sala__least_add(&m, 50);
    CHECK(!sala__least_known(&m), "one measurement is none");
    for (int i = 0; i < 40; i++) sala__least_add(&m, i % 5 ? 20 : 1);
    CHECK(sala__least_value(&m) == 1, "%g", sala__least_value(&m));
    for (int i = 0; i < 20; i++) sala__least_add(&m, 3 + i);
    CHECK(sala__least_value(&m) == 1, "%g beside noise", sala__least_value(&m));
    for (int i = 0; i < 64; i++) sala__least_add(&m, 3 + i % 2);
    CHECK(sala__least_value(&m) == 3, "%g after a change", sala__least_value(&m));
    sala__policy p;
    memset(&p, 0, sizeof p);
    CHECK(sala__cost(&p, 5) == 0, "nothing is known");
    p.cost[sala__cost_index(4)] = (sala__least){4, 9, 9};
    CHECK(sala__cost(&p, 1) == 4 && sala__cost(&p, 200) == 4, "the nearest");
    p.cost[sala__cost_index(12)] = (sala__least){20, 0, 9};
    CHECK(sala__cost(&p, 8) == 12 && sala__cost(&p, 7) == 12 && sala__cost(&p, 3) == 4,
          "between: %g", sala__cost(&p, 8));
    p.cost[sala__cost_index(12)] = (sala__least){3, 0, 9};
    CHECK(sala__cost(&p, 2) == 3, "more rows took less");
}

// ---- drafts of tests ----

static int tree_is_sound(const sala_tree *t, const sala__shape *shape) {
    int deepest = 0, widest = 0;
    if (t->count > shape->nodes || t->count < shape->depth + 1 || t->parent[0] != -1) return 0;
    for (int i = 1; i < t->count; i++) {
        int p = t->parent[i], children = 0;
        if (p < 0 || p >= i || t->depth[i] != t->depth[p] + 1 || t->token[i] < 0) return 0;
        for (int k = 1; k < t->count; k++) {
            if (t->parent[k] != p) continue;
            children++;
            if (k != i && t->token[k] == t->token[i]) return 0;
        }
        if (children > widest) widest = children;
        if (t->depth[i] > deepest) deepest = t->depth[i];
    }
    return deepest == shape->depth && widest <= shape->topk;
}

static void test_drafts_of_tests(void) {
    static const char *const tests[] = {"oracle", "oracle:80", "oracle:50", "random",
                                        "adversarial"};
    static const char *const shapes[] = {"7,2,15", "5,2,11", "3,1,4",   "7,2,16", "15,1,16",
                                         "5,4,32", "1,4,5",  "15,4,32", "1,1,2"};
    enum { LENGTH = 3000 };
    int32_t tokens[LENGTH];
    check_seed = 5;
    for (int i = 0; i < LENGTH; i++) tokens[i] = below(1000);
    for (size_t k = 0; k < sizeof tests / sizeof *tests; k++)
        for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
            double tau[2];
            for (int again = 0; again < 2; again++) {
                walk *w = walk_new("off", tokens, 100, LENGTH);
                w->s.options.spec = "eagle";
                w->s.options.spec_test = tests[k];
                w->s.options.spec_tree = shapes[n];
                w->r.guess = tokens + 100;
                w->r.guess_count = LENGTH - 100;
                w->r.sampler.seed = 7;
                CHECK(sala__spec_open(&w->s, NULL) == 0, "%s", shapes[n]);
                const sala__shape *shape = &w->s.policy.shape[1];
                int sound = 1;
                for (int steps = 0; walk_step(w); steps++)
                    if (w->r.max_tokens - w->r.chosen > 20)
                        sound &= tree_is_sound(&w->r.spec.tree, shape);
                CHECK(sound, "%s of %s: a tree is not one", tests[k], shapes[n]);
                tau[again] = (double)w->tokens / w->steps;
                double p = k == 1 ? 0.8 : k == 2 ? 0.5 : k == 3 ? 0 : 1, want = 1, each = 1;
                for (int d = 0; d < shape->depth; d++) want += each *= p;
                CHECK(fabs(tau[again] / want - 1) < (k == 1 || k == 2 ? 0.12 : 0.02),
                      "%s of %s: tau %g, not %g", tests[k], shapes[n], tau[again], want);
                walk_free(w);
            }
            CHECK(tau[0] == tau[1], "%s of %s is another at each run", tests[k], shapes[n]);
        }
}

// Siblings can differ only where there are more tokens than nodes: 33 are enough, 32 are refused.
static void test_drafts_of_few_tokens(void) {
    static const char *const tests[] = {"oracle:50", "random", "adversarial"};
    static const sala__shape shape = {15, 4, 32};
    int32_t tokens[600];
    for (int i = 0; i < 600; i++) tokens[i] = below(32);
    for (int vocab = 33; vocab >= 31; vocab--)
        for (int k = 0; k < 3; k++) {
            walk *w = walk_new("off", tokens, 100, 600);
            sala_error err = {0, ""};
            w->s.options.spec = "eagle";
            w->s.options.spec_test = tests[k];
            w->s.options.spec_tree = "15,4,32";
            w->s.config.dims.vocab = vocab;
            w->r.guess = tokens + 100;
            w->r.guess_count = 300; // then it is not known
            int code = sala__spec_open(&w->s, &err), sound = 1;
            CHECK(code == (vocab > 32 ? 0 : SALA_E_ARGUMENT), "%d tokens: %s", vocab, err.text);
            CHECK(code == 0 || strstr(err.text, "needs more than 32 tokens"), "%s", err.text);
            while (code == 0 && walk_step(w))
                if (w->r.max_tokens - w->r.chosen > 20)
                    sound &= tree_is_sound(&w->r.spec.tree, &shape);
            CHECK(sound, "%s: a tree is not one", tests[k]);
            walk_free(w);
        }
}

// Trees that give nothing are left after sixteen, tried again later and less and less often.
static void test_fallback(void) {
    enum { LENGTH = 9000 };
    static int32_t tokens[LENGTH];
    for (int i = 0; i < LENGTH; i++) tokens[i] = below(1000);
    for (int forced = 0; forced < 2; forced++) {
        walk *w = walk_new("off", tokens, 100, LENGTH);
        w->cost = flat;
        w->s.options.spec = forced ? "eagle" : "auto";
        w->s.options.spec_test = "random";
        CHECK(sala__spec_open(&w->s, NULL) == 0, "random");
        int trees = 0, first_pause = 0, second = 0, paused = 0;
        while (walk_step(w)) {
            int tree = w->r.spec.source == SALA_DRAFT_EAGLE;
            trees += tree;
            first_pause += trees == 16 && !tree;
            second += trees == 32 && !tree;
            paused += w->r.spec.paused;
        }
        if (forced)
            CHECK(trees >= w->steps - 1 && !paused, "%d trees in %d steps", trees, w->steps);
        else
            CHECK(first_pause > 2000 && second > 4000 && trees <= 48 && paused > 8000,
                  "%d trees, pauses %d %d, %d steps that say so", trees, first_pause, second,
                  paused);
        walk_free(w);
    }
}

// ---- settings ----

// A request whose own trees give less than 1.3 tokens does without them for a while, then for longer; what
// others gain beside it changes nothing in that.
static void test_pause_of_one(void) {
    sala__policy p;
    sala__request r[2];
    memset(&p, 0, sizeof p);
    memset(r, 0, sizeof r);
    for (int round = 1, pause = 256; round <= 6; round++) {
        for (int k = 0; k < 64; k++)
            for (int i = 0; i < 2; i++) {
                r[i].spec.source = SALA_DRAFT_EAGLE;
                r[i].spec.level = 1;
                r[i].chosen += i ? 3 : 1;
                sala__plan_review(&p, &r[i]);
            }
        CHECK(r[0].spec.trees_from == r[0].spec.step + pause, "round %d: from %lld at %lld", round,
              (long long)r[0].spec.trees_from, (long long)r[0].spec.step);
        CHECK(r[1].spec.trees_from == 0, "trees that pay go on");
        pause = pause < 4096 ? 2 * pause : 4096;
    }
}

static void test_settings(void) {
    static const char *const good[][2] = {
        {"spec", "auto"},           {"spec", "off"},          {"spec", "ngram"},
        {"spec", "eagle"},          {"draft", "some/folder"}, {"spec-tree", "7,2,15"},
        {"spec_tree", "15,1,16"},   {"spec-tree", "15,4,32"}, {"draft-window", "32K"},
        {"spec-test", "oracle:85"}, {"spec-test", "oracle"},  {"spec-test", "adversarial"}};
    static const char *const bad[][3] = {
        {"spec", "on", "one of: auto off ngram eagle"},
        {"draft", "", "a folder"},
        {"spec-tree", "7,2", "depth,topk,nodes like 7,2,15"},
        {"spec-tree", "7,2,15,1", "depth,topk,nodes"},
        {"spec-tree", "16,2,20", "with depth 1 to 15"},
        {"spec-tree", "7,5,15", "with topk 1 to 4"},
        {"spec-tree", "7,2,33", "from 8, depth + 1, to 32"},
        {"spec-tree", "7,2,7", "from 8, depth"},
        {"spec-tree", "3,1,5", "3 levels of topk 1 hold no more than 4 nodes"},
        {"spec-tree", "0,2,15", "with depth 1"},
        {"spec-tree", "7, 2,15", "depth"},
        {"spec-tree", "", "depth"},
        {"draft-window", "100", "a multiple of 64"},
        {"spec-test", "oracle:", "one of"},
        {"spec-test", "oracle:high", "one of"}};
    sala_options o;
    sala_error err;
    memset(&o, 0, sizeof o);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK(sala_set_option(&o, good[i][0], good[i][1], &err) == 0, "%s", err.text);
    CHECK(o.draft_window == 32768 && strcmp(o.spec_tree, "15,4,32") == 0, "values");
    CHECK(sala__check_options(&o, &err) == 0, "%s", err.text);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(sala_set_option(&o, bad[i][0], bad[i][1], &err) == SALA_E_ARGUMENT &&
                  strstr(err.text, bad[i][2]) && strstr(err.text, bad[i][0]),
              "%s %s: %s", bad[i][0], bad[i][1], err.text);
    o.spec_tree = "7,2,99";
    CHECK(sala__check_options(&o, &err) == SALA_E_ARGUMENT && strstr(err.text, "spec-tree"), "%s",
          err.text);
    static const char *const together[][3] = {// spec, spec_test, what open says
                                              {"eagle", NULL, "needs a draft head"},
                                              {"off", "oracle", "does not go with spec off"},
                                              {"ngram", "random", "does not go with spec ngram"}};
    for (size_t i = 0; i < sizeof together / sizeof *together; i++) {
        sala_options p = small_options(64, 0);
        p.spec = together[i][0];
        p.spec_test = together[i][1];
        sala *s = sala_open(TINY, &p, &err);
        CHECK(!s && strstr(err.text, together[i][2]), "%s: %s", together[i][0], err.text);
        sala_close(s);
    }
}

// ---- sala-tiny ----

#define PROMPTS 32

typedef struct prompt {
    char class[16];
    int32_t *tokens; // for sala_free
    int64_t count;
} prompt;

// The prompts of tests/data/spec_prompts.jsonl, as tokens of this engine. Returns how many.
static int read_prompts(sala *engine, prompt out[PROMPTS]) {
    FILE *f = fopen("tests/data/spec_prompts.jsonl", "r");
    sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err;
    char *line = (char *)need(malloc(65536));
    int n = 0;
    memset(out, 0, PROMPTS * sizeof *out);
    if (!f) die("spec_prompts.jsonl", "is missing");
    for (; n < PROMPTS && fgets(line, 65536, f); n++) {
        sala__json j;
        if (sala__json_parse(&env, "prompts", line, strlen(line), &j, &err) < 0)
            die("spec_prompts.jsonl", err.text);
        const char *text = sala__json_text(&j, sala__json_get(&j, 0, "prompt"));
        snprintf(out[n].class, sizeof out[n].class, "%s",
                 sala__json_text(&j, sala__json_get(&j, 0, "class")));
        out[n].count = sala_tokenize(engine, text, strlen(text), SALA_ADD_BOS | SALA_PARSE_SPECIAL,
                                     &out[n].tokens, &err);
        if (out[n].count < 0) die("a prompt", err.text);
        sala__json_free(&j);
    }
    fclose(f);
    free(line);
    return n;
}

static void random_prompts(prompt out[PROMPTS]) { // of a model without a tokenizer, 97 tokens
    memset(out, 0, PROMPTS * sizeof *out);
    check_seed = 11;
    for (int i = 0; i < PROMPTS - 1; i++) {
        out[i].count = 40 + below(80);
        out[i].tokens = (int32_t *)need(malloc((size_t)out[i].count * 4));
        random_tokens(out[i].tokens, (int)out[i].count, 97);
    }
}

// Where a text repeats itself or its prompt, chains give at least four tokens each verify.
static void test_chains_of_sala_tiny(void) {
    static const char *const classes[] = {"json", "code", "copy"};
    enum { OUTPUT = 160 };
    prompt prompts[PROMPTS];
    sala_options o = small_options(512, 0);
    o.context = 4096;
    o.spec = "off";
    session t = session_open(SALA_TINY, &o);
    int n = read_prompts(t.engine, prompts), steps[3] = {0}, tokens[3] = {0}, chains[3] = {0},
        chained[3] = {0};
    for (int i = 0; i < n; i++) {
        int class = 0;
        while (class < 3 && strcmp(classes[class], prompts[i].class) != 0) class ++;
        if (class == 3) continue;
        sala_request r = request_of(prompts[i].tokens, prompts[i].count, OUTPUT);
        r.ignore_eos = 0;
        outcome *x = session_do(&t, &r);
        size_t total = (size_t)(prompts[i].count + x->count);
        int32_t *all = (int32_t *)need(malloc(total * 4));
        memcpy(all, prompts[i].tokens, (size_t)prompts[i].count * 4);
        memcpy(all + prompts[i].count, x->tokens, (size_t)x->count * 4);
        walk *w = walk_new("ngram", all, prompts[i].count, (int64_t)total);
        while (walk_step(w)) continue;
        steps[class] += w->steps;
        tokens[class] += w->tokens;
        chains[class] += w->chains;
        chained[class] += w->chain_tokens;
        walk_free(w);
        free(all);
    }
    for (int c = 0; c < 3; c++) {
        double tau = (double)tokens[c] / steps[c], of_chains = (double)chained[c] / chains[c];
        printf("  %s: %.2f tokens a verify, %.2f a chain\n", classes[c], tau, of_chains);
        CHECK(tau >= 4 && of_chains >= 4, "%s: %.2f tokens a verify", classes[c], tau);
    }
    for (int i = 0; i < n; i++) sala_free(t.engine, prompts[i].tokens);
    session_close(&t);
}

// ---- the same text, whatever is drafted ----

enum { STREAMS = 5, STREAM_TOKENS = 48 };

// Greedy and sampled, with penalties, a stop string, log-probabilities; texts that repeat themselves and one
// that does not; and a second turn of the first.
static void ask_streams(session *t, const prompt *prompts, const outcome *truth) {
    static const int which[STREAMS] = {8, 12, 16, 0, 9};
    for (int i = 0; i < STREAMS; i++) {
        sala_request r =
            request_of(prompts[which[i]].tokens, prompts[which[i]].count, STREAM_TOKENS + 7 * i);
        static const char *const stop[] = {"the en"};
        if (i % 2) request_sampled(&r, (uint64_t)i);
        if (i == 1) r.repetition_penalty = 1.1f, r.frequency_penalty = 0.2f;
        if (i == 2) r.logprobs = 3;
        if (i == 3 && t->engine->has_tokenizer) r.stop = stop, r.stop_count = 1;
        r.keep = i == 0;
        if (truth) r.guess = truth[i].tokens, r.guess_count = truth[i].count;
        session_ask(t, &r);
        for (int k = 0; k < 3 * i; k++) session_step(t); // the load changes
    }
    session_run(t);
    sala_request r = request_of(prompts[13].tokens, prompts[13].count, STREAM_TOKENS);
    r.sequence = t->out[0].sequence;
    if (truth) r.guess = truth[STREAMS].tokens, r.guess_count = truth[STREAMS].count;
    session_do(t, &r);
}

static void check_counts(const outcome *x, const char *what, int64_t drafted[3]) {
    const sala_timings *c = &x->timings;
    int64_t tokens = 1; // the first one comes from the prompt's pass
    for (int k = 0; k < 3; k++) {
        tokens += c->verify_tokens[k];
        drafted[k] += c->verifies[k];
        CHECK(c->offered[k][0] == c->verifies[k] && c->accepted[k][0] == c->verifies[k],
              "%s: %lld roots of %lld verifies", what, (long long)c->offered[k][0],
              (long long)c->verifies[k]);
        for (int d = 1; d < SALA_DEPTHS; d++)
            CHECK(c->accepted[k][d] <= c->offered[k][d] &&
                      c->offered[k][d] <= c->accepted[k][d - 1],
                  "%s: source %d, depth %d: %lld of %lld", what, k, d, (long long)c->accepted[k][d],
                  (long long)c->offered[k][d]);
    }
    CHECK(tokens == x->count, "%s: %lld tokens of %lld were counted", what, (long long)tokens,
          (long long)x->count);
}

// Settings of one model, the first of them plain.
static void same_text(const char *path, const char *const (*settings)[4], int count) {
    prompt prompts[PROMPTS];
    session truth;
    memset(&truth, 0, sizeof truth);
    for (int k = 0; k < count; k++) {
        sala_options o = small_options(512, 0);
        char name[64];
        int64_t drafted[3] = {0, 0, 0};
        o.spec = settings[k][0];
        o.spec_test = settings[k][1];
        o.spec_tree = settings[k][2];
        o.draft = settings[k][3];
        snprintf(name, sizeof name, "%s %s %s", o.spec, o.spec_test ? o.spec_test : "",
                 o.spec_tree ? o.spec_tree : "");
        session t = session_open(path, &o);
        if (!k && t.engine->has_tokenizer)
            read_prompts(t.engine, prompts);
        else if (!k)
            random_prompts(prompts);
        ask_streams(&t, prompts, k ? truth.out : NULL);
        for (int i = 0; i <= STREAMS; i++) {
            check_counts(&t.out[i], name, drafted);
            if (k)
                CHECK(same_choices(&t.out[i], &truth.out[i]), "%s: request %d gives another text",
                      name, i);
        }
        CHECK((drafted[1] > 0) == (k && !o.spec_test && !o.draft), "%s: %lld chains", name,
              (long long)drafted[1]);
        CHECK((drafted[2] > 0) == (o.spec_test || o.draft), "%s: %lld trees", name,
              (long long)drafted[2]);
        CHECK((strstr(t.info.spec, "off") != NULL) == !k, "%s", t.info.spec);
        if (k)
            session_close(&t);
        else
            truth = t;
    }
    for (int i = 0; i < PROMPTS && prompts[i].tokens; i++)
        sala_free(truth.engine, prompts[i].tokens);
    session_close(&truth);
}

static void test_same_text(void) {
    // spec, spec_test, spec_tree, draft
    static const char *const words[][4] = {{"off", NULL, NULL, NULL},
                                           {"auto", NULL, NULL, NULL},
                                           {"ngram", NULL, NULL, NULL},
                                           {"auto", "oracle:70", NULL, NULL},
                                           {"eagle", NULL, NULL, SALA_TINY "-eagle3"},
                                           {"eagle", NULL, "5,2,11", SALA_TINY "-eagle3/nvfp4"}};
    static const char *const tokens[][4] = {
        {"off", NULL, NULL, NULL},
        {"ngram", NULL, NULL, NULL},
        {"eagle", "oracle", NULL, NULL},
        {"eagle", "oracle:80", "15,4,32", NULL},
        {"eagle", "oracle:50", "3,1,4", NULL},
        {"eagle", "random", "7,2,15", NULL},
        {"eagle", "adversarial", "5,2,11", NULL},
        {"eagle", "adversarial", "15,1,16", NULL},
    };
    same_text(SALA_TINY, words, 6);
    same_text(TINY, tokens, 8);
}

TEST_MAIN(TEST(test_ngrams_against_brute_force), TEST(test_chain_repeats_a_period),
          TEST(test_chain_lengths), TEST(test_streaks), TEST(test_refuted_chains_stop),
          TEST(test_resumed_chains), TEST(test_levels_by_load), TEST(test_levels_by_measurement),
          TEST(test_trials_are_cheap), TEST(test_what_a_trial_may_lose),
          TEST(test_chains_by_measurement), TEST(test_prices), TEST(test_drafts_of_tests),
          TEST(test_drafts_of_few_tokens), TEST(test_fallback), TEST(test_pause_of_one),
          TEST(test_settings), TEST(test_chains_of_sala_tiny), TEST(test_same_text))
