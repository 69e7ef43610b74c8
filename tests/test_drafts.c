#define SALA_IMPLEMENTATION
#include "../sala.h"
// Speculation in the loop, with planted trees: whatever they are, everything that a request gives and leaves is that
// of plain decoding, bit by bit.
#include "check.h"
#include "model.h"
#include "plant.h"
#include "poison.h"

// ---- what must hold after every step, on the CPU ----

// Rows of both tiers are those that the keys in the pages give.
static void check_tiers(sala *s) {
    const sala_dims *m = &s->config.dims;
    sala_act mean[256];
    for (int i = 0; i < s->plan.slots; i++) {
        const sala__sequence *q = &s->sequences[i];
        if (!q->id) continue;
        sala_seq seq = {i, 0, 0, q->stored, 0, 0, q->pages};
        for (int l = 0; l < s->sparse_layers; l++) {
            sala_store_args a;
            memset(&a, 0, sizeof a);
            a.dims = m;
            a.pages = s->pages[l];
            for (int tier = 1; tier <= 2; tier++)
                for (int k = 0; k < sala_tier_rows(m, tier, q->stored) * m->kv_heads; k++) {
                    int j = k / m->kv_heads, g = k % m->kv_heads;
                    sala_act *pool = tier == 1 ? a.pages.tier1 : a.pages.tier2;
                    sala__tier_mean(&a, &seq, tier, 0, g, j, mean);
                    CHECK(memcmp(mean, sala__tier_slot(m, &seq, pool, tier, g, j),
                                 (size_t)m->head_dim * sizeof(sala_act)) == 0,
                          "tier %d, row %d of %d tokens", tier, j, q->stored);
                }
        }
    }
}

static void check_and_poison(sala *s) {
    check_tiers(s);
    poison(s);
}

static const int tiny_lengths[] = {2,  5,  7,  14, 15, 16, 28,  31,  45,  50,  56,  58, 59,
                                   62, 64, 70, 79, 80, 95, 113, 126, 127, 128, 200, 333};
enum { TINY_LENGTHS = (int)(sizeof tiny_lengths / sizeof *tiny_lengths) };

// tiny: blocks of 16, tiers 8/4 and 32/16, dense below 60, blocks dropped from 80 on. Outputs cross all of these.
static void test_modes(void) {
    static const char *const names[] = {"random", "oracle", "adversarial",
                                        "wrong",  "mixed",  "chain"};
    sala_timings all;
    memset(&all, 0, sizeof all);
    check_seed = 401;
    plant.trees = 0;
    for (int mode = 0; mode <= PLANT_CHAIN; mode++) {
        sala_timings sum;
        memset(&sum, 0, sizeof sum);
        plant_case c = {TINY,
                        NULL,
                        mode % 3 == 2 ? SALA_DENSE_NEVER : 0,
                        tiny_lengths,
                        TINY_LENGTHS,
                        1 + (3 * mode + 2) % 8,
                        mode == PLANT_RANDOM ? 70 : 40,
                        mode,
                        32,
                        check_and_poison};
        plant_compare(&c, &sum);
        printf("      %-12s %.2f tokens a verify\n", names[mode],
               (double)sum.verify_tokens[0] / (double)sum.verifies[0]);
        CHECK(mode != PLANT_WRONG || sum.verify_tokens[0] == sum.verifies[0],
              "a wrong token was taken");
        CHECK(mode == PLANT_WRONG || sum.verify_tokens[0] > sum.verifies[0],
              "%s: nothing was accepted", names[mode]);
        for (int d = 0; d < SALA_DEPTHS; d++) {
            all.offered[0][d] += sum.offered[0][d];
            all.accepted[0][d] += sum.accepted[0][d];
        }
    }
    printf("      %lld trees\n", (long long)plant.trees);
    CHECK(plant.trees > 2000, "%lld trees", (long long)plant.trees);
    for (int d = 1; d < SALA_DEPTHS; d++)
        CHECK(all.accepted[0][d] > 0 && all.accepted[0][d] < all.offered[0][d],
              "depth %d: %lld of %lld accepted", d, (long long)all.accepted[0][d],
              (long long)all.offered[0][d]);
}

// The released geometry of blocks, where it begins to select and to drop blocks; a vocabulary of 2048.
static void test_modes_sala_tiny(void) {
    static const int lengths[] = {490, 505, 511, 760, 767};
    sala_timings sum;
    memset(&sum, 0, sizeof sum);
    check_seed = 403;
    plant_case c = {SALA_TINY, NULL, 0, lengths, 5, 5, 24, PLANT_MIXED, 16, check_and_poison};
    plant_compare(&c, &sum);
    CHECK(sum.verify_tokens[0] > sum.verifies[0], "nothing was accepted");
}

// ---- the order of rows ----

// States that wait at once when sala_gla_verify walks these rows: kept where a node other than the next one grows from
// it, until the last of them did.
static int rows_wait(const int *parent, int count) {
    int last_child[SALA_MAX_NODES] = {0}, held = 0, most = 0;
    for (int r = 1; r < count; r++) last_child[parent[r]] = r;
    for (int r = 0; r < count; r++) {
        if (r && parent[r] != r - 1 && last_child[parent[r]] == r) held--;
        if (last_child[r] > r + 1) held++;
        if (held > most) most = held;
    }
    return most;
}

static void test_row_order(void) {
    check_seed = 404;
    for (int i = 0; i < 3000; i++) {
        sala_tree t;
        int32_t row[SALA_MAX_NODES];
        int count = 1 + below(SALA_MAX_NODES), leaves = 0, bound = 0;
        int parent[SALA_MAX_NODES], seen[SALA_MAX_NODES] = {0};
        memset(&t, 0, sizeof t);
        plant_shape(&t, count, 1 + below(SALA_MAX_PATH - 1), i % 4);
        int wait = sala__tree_rows(&t, row);
        for (int n = 0; n < count; n++) {
            int leaf = 1;
            for (int k = 1; k < count; k++) leaf &= t.parent[k] != n;
            leaves += leaf;
            CHECK(row[n] >= 0 && row[n] < count && !seen[row[n]]++, "node %d has row %d", n,
                  (int)row[n]);
            parent[row[n]] = n ? row[t.parent[n]] : -1;
            CHECK(parent[row[n]] < row[n], "node %d comes before its parent", n);
        }
        while (2 << bound <= leaves) bound++;
        CHECK(wait == rows_wait(parent, count), "%d states wait, not %d", rows_wait(parent, count),
              wait);
        CHECK(wait <= bound, "%d states wait for %d leaves", wait, leaves);
    }
}

// ---- how a request ends in the middle of a path ----

typedef struct ends { // stop conditions of one round
    int32_t stop_tokens[2];
    char words[2][24];
    const char *stop[2];
} ends;

// Anything that ends the reference output somewhere, or never: a token of it, a piece of its text, a length.
static void ends_choose(sala_request *r, ends *e, const outcome *all) {
    int kind = below(6);
    r->max_tokens = kind == 0 ? 1 + below((int)all->count) : all->count;
    r->ignore_eos = below(2);
    for (int i = 0; i < 2; i++) {
        e->stop_tokens[i] = below(3) ? all->tokens[below((int)all->count)] : below(2048);
        size_t at = all->bytes ? (size_t)below((int)all->bytes) : 0, n = 1 + (size_t)below(12);
        if (n > all->bytes - at) n = all->bytes - at;
        memcpy(e->words[i], all->text + at, n);
        strcpy(e->words[i] + n, below(3) ? "" : "z");
        e->stop[i] = e->words[i];
        if (!e->words[i][0]) strcpy(e->words[i], "never");
    }
    r->stop_tokens = e->stop_tokens;
    r->stop_token_count = kind == 1 || kind == 5 ? 1 + below(2) : 0;
    r->stop = e->stop;
    r->stop_count = kind >= 2 ? 1 + below(2) : 0;
}

static void test_ends(void) {
    static const char *const texts[] = {
        "Once upon a time there was a", "{\"name\": \"", "The fox said:",
        "<|im_start|>user\nWhat does the cow say?<|im_end|>\n<|im_start|>assistant\n"};
    plant_case c = {SALA_TINY, NULL, 0, NULL, 0, 2, 0, 0, 0, NULL};
    session a = plant_engine(&c, 1), b = plant_engine(&c, 0);
    int reasons[8] = {0};
    sala_timings sum;
    memset(&sum, 0, sizeof sum);
    check_seed = 405;
    for (int round = 0; round < 36 && !check_failures; round++) {
        ends e;
        sala_request r = request_of(NULL, 0, 40);
        r.text = texts[round % 4];
        if (round % 3) request_sampled(&r, (uint64_t)round);
        if (round % 5 == 4) r.frequency_penalty = 0.5f, r.logprobs = 2;
        session_do(&a, &r);
        session_do(&b, &r); // the numbers of requests are those of a
        ends_choose(&r, &e, &a.out[a.count - 1]);
        r.keep = 1;
        session_ask(&a, &r);
        session_ask(&b, &r);
        session_run(&a);
        plant_run(&b, &a, round % 2 ? PLANT_CHAIN : PLANT_MIXED, 16);
        int at = a.count - 1;
        plant_same(&b, &a, at, 0);
        reasons[a.out[at].reason]++;
        memory x = memory_of(&a, a.out[at].sequence), y = memory_of(&b, b.out[at].sequence);
        CHECK(memory_same(&x, &y), "round %d: the memory differs", round);
        free(x.data);
        free(y.data);
        sala_request more = request_of(NULL, 0, 8);
        more.text = " and then";
        more.sequence = a.out[at].sequence;
        more.repetition_penalty = 2; // would notice a token that never was
        session_ask(&a, &more);
        more.sequence = b.out[at].sequence;
        session_ask(&b, &more);
        session_run(&a);
        plant_run(&b, &a, PLANT_ORACLE, 16);
        plant_same(&b, &a, a.count - 1, 0);
    }
    plant_sums(&b, &sum);
    printf("      %d stopped, %d at their length, %.2f tokens a verify\n",
           reasons[SALA_FINISH_STOP], reasons[SALA_FINISH_LENGTH],
           (double)sum.verify_tokens[0] / (double)sum.verifies[0]);
    CHECK(reasons[SALA_FINISH_STOP] > 12 && reasons[SALA_FINISH_LENGTH] > 5, "too few of a kind");
    session_close(&a);
    session_close(&b);
}

// A kept request that is cancelled between two steps, and goes on: as if its tokens had been forced.
static void test_cancel(void) {
    static const int lengths[] = {50, 61, 77};
    plant_case c = {TINY, NULL, 0, lengths, 3, 3, 100, 0, 0, NULL};
    session a = plant_engine(&c, 1), b = plant_engine(&c, 0);
    check_seed = 406;
    random_tokens(plant_tokens, PLANT_PROMPT, 97);
    for (int i = 0; i < 3; i++) {
        sala_request r = plant_request(&c, i, 100);
        session_ask(&a, &r);
        session_ask(&b, &r);
    }
    session_run(&a);
    plant.truth = &a, plant.mode = PLANT_MIXED, plant.most = 16;
    b.engine->plant = plant_trees;
    while (b.out[1].count < 20) session_step(&b);
    session_cancel(&b, 1);
    session_run(&b);
    CHECK(b.out[1].reason == SALA_FINISH_CANCELLED && b.out[1].sequence > 0, "reason %d",
          b.out[1].reason);
    plant_same(&b, &a, 0, lengths[0]);
    plant_same(&b, &a, 2, lengths[2]);
    session d = plant_engine(&c, 1);
    sala_request r = request_of(plant_tokens + 7, lengths[1], 1);
    request_force(&r, b.out[1].tokens, b.out[1].count);
    r.keep = 1;
    session_do(&d, &r);
    memory x = memory_of(&d, d.out[0].sequence), y = memory_of(&b, b.out[1].sequence);
    CHECK(memory_same(&x, &y), "the memory differs");
    free(x.data);
    free(y.data);
    for (int i = 0; i < 3; i++) {
        session_give_up(&a, a.out[i].sequence);
        session_give_up(&b, b.out[i].sequence);
    }
    session_give_up(&d, d.out[0].sequence);
    session_close(&a);
    session_close(&b);
    session_close(&d);
}

// ---- what is said about trees ----

// The event of a tree comes before its tokens, and the path that it marks is what they are.
static void test_tree_events(void) {
    static const int lengths[] = {40};
    plant_case c = {TINY, NULL, 0, lengths, 1, 1, 80, 0, 0, NULL};
    session a = plant_engine(&c, 1), b = plant_engine(&c, 0);
    check_seed = 407;
    random_tokens(plant_tokens, PLANT_PROMPT, 97);
    sala_request r = plant_request(&c, 1, 80);
    r.keep = 0;
    session_do(&a, &r);
    plant.truth = &a, plant.mode = PLANT_RANDOM, plant.most = 20;
    b.engine->plant = plant_trees;
    CHECK(sala_submit(b.engine, &r, NULL) > 0, "refused");
    int64_t trees = 0, position = 0, verifies = 0;
    int32_t expected[SALA_MAX_PATH], root = -1;
    int left = 0, at = 0;
    sala_event e;
    while (sala_step(b.engine, NULL) > 0)
        while (sala_next_event(b.engine, &e)) {
            if (e.type == SALA_EVENT_TREE) {
                CHECK(left == at && e.node_token[0] == root && e.position == position, "tree %lld",
                      (long long)trees);
                CHECK(e.node_parent[0] == -1 && e.node_accepted[0] == 1 && e.source >= 0,
                      "its root");
                left = at = 0;
                for (int n = 1, up = 0; n < e.node_count; n++) {
                    CHECK(e.node_parent[n] < n && e.node_score[n] == 0, "node %d", n);
                    if (e.node_accepted[n]) {
                        CHECK(e.node_parent[n] == up, "node %d is not on the path", n);
                        expected[left++] = e.node_token[n];
                        up = n;
                    }
                }
                expected[left++] = e.token;
                trees++;
            }
            if (e.type == SALA_EVENT_TOKEN) {
                if (trees)
                    CHECK(at < left && e.token == expected[at], "token %d after tree %lld", at,
                          (long long)trees);
                at += trees > 0;
                root = e.token;
                position = e.position;
            }
            if (e.type == SALA_EVENT_FINISH)
                for (int k = 0; k < 3; k++) {
                    verifies += e.timings.verifies[k];
                    CHECK(e.timings.offered[k][0] == e.timings.verifies[k], "source %d: roots", k);
                    int64_t tokens = 0;
                    for (int d = 0; d < SALA_DEPTHS; d++) tokens += e.timings.accepted[k][d];
                    CHECK(tokens == e.timings.verify_tokens[k],
                          "source %d: %lld tokens of %lld nodes", k,
                          (long long)e.timings.verify_tokens[k], (long long)tokens);
                    CHECK(e.timings.verify_seconds > 0 && e.timings.draft_seconds > 0, "seconds");
                }
        }
    CHECK(trees > 10 && trees == verifies, "%lld trees, %lld verifies", (long long)trees,
          (long long)verifies);
    session_close(&a);
    session_close(&b);
}

// ---- what is no tree ----

static int fault;
static void plant_fault(sala *s, sala__request **active, int count, int rows) {
    sala_tree *t = &active[0]->spec.tree;
    (void)s, (void)count, (void)rows;
    plant_shape(t, 12, 5, 2);
    for (int n = 1; n < 12; n++) t->token[n] = n;
    switch (fault) {
    case 1: t->parent[3] = 3; break;
    case 2: t->parent[3] = 9; break;
    case 3: t->depth[5] = 1; break;
    case 4: t->token[2] = t->token[1]; break;
    case 5: t->token[7] = 97; break;
    case 6: t->token[7] = -1; break;
    case 7: t->token[0]++; break;
    case 8: t->count = SALA_MAX_NODES + 1; break;
    case 9: t->count = 0; break;
    case 10: t->parent[0] = 0; break;
    case 11: plant_shape(t, 12, 11, 0); break; // deeper than max_tokens
    default: break;
    }
}

static void test_faults(void) {
    static const int lengths[] = {20};
    plant_case c = {TINY, NULL, 0, lengths, 1, 1, 0, 0, 0, NULL};
    check_seed = 408;
    random_tokens(plant_tokens, PLANT_PROMPT, 90);
    for (fault = 0; fault <= 11; fault++) {
        sala_error err;
        sala_event e;
        session t = plant_engine(&c, 0);
        sala_request r = request_of(plant_tokens, 20, 8);
        t.engine->plant = plant_fault;
        CHECK(sala_submit(t.engine, &r, NULL) > 0, "refused");
        int code = sala_step(t.engine, &err);
        CHECK(fault ? code == SALA_E_STATE && strstr(err.text, "no tree") : code == 1,
              "fault %d: code %d, \"%s\"", fault, code, err.text);
        while (sala_next_event(t.engine, &e)) continue;
        free(t.out);
        sala_close(t.engine);
    }
}

TEST_MAIN(TEST(test_row_order), TEST(test_modes), TEST(test_modes_sala_tiny), TEST(test_ends),
          TEST(test_cancel), TEST(test_tree_events), TEST(test_faults))
