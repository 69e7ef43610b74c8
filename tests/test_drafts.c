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
static void check_tiers(session *t) {
    sala *s = t->engine;
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

static session *watched; // by after_step, which only gets the engine
static void check_and_poison(sala *s) {
    check_tiers(watched);
    poison(s);
}

// ---- requests ----

enum { PROMPTS = 1200 };
static int32_t prompts[PROMPTS];

// Request i of a crowd: any length around the places where something changes, any way to choose tokens.
static sala_request crowd(int i, const int *lengths, int count, int output) {
    static const sala_bias biases[] = {{17, 1.5f}, {33, -2}, {60, -INFINITY}};
    sala_request r = request_of(prompts + 7 * (i % 40), lengths[i % count], output - i % 7);
    r.logprobs = i % 3 ? 0 : 1 + i % 5;
    r.want_rows = i % 2 ? SALA_ROWS_GENERATED : 0;
    r.want_trees = i % 2;
    if (i % 4) request_sampled(&r, 100 + (uint64_t)i);
    if (i % 4 == 2) r.top_p = 0.7f, r.top_k = 30;
    if (i % 5 == 1) r.repetition_penalty = 1.3f;
    if (i % 5 == 2) r.frequency_penalty = 0.4f, r.presence_penalty = 0.3f;
    if (i % 6 == 3) r.biases = biases, r.bias_count = 3;
    if (i % 7 == 4) r.force = prompts + 500 + i, r.force_count = 9;
    r.keep = 1;
    return r;
}

static session engine(const char *path, int sequences, int dense_len, int context, int off) {
    sala_options o = small_options(256, 64);
    o.max_sequences = sequences;
    o.hidden_states = 1;
    o.dense_len = dense_len;
    o.context = context;
    o.kv_tokens = (int64_t)(sequences + 1) * context;
    o.spec = off ? "off" : NULL;
    return session_open(path, &o);
}

// The same crowd plainly and with trees, in two engines; each sequence then goes on with a second request, whose
// prompt is prefilled on what the first one left.
static void compare(const char *path, int dense_len, const int *lengths, int count, int sequences,
                    int output, int mode, int most, sala_timings *sum) {
    session a = engine(path, sequences, dense_len, 1024, 1);
    session b = engine(path, sequences, dense_len, 1024, 0);
    watched = &b;
    b.after_step = check_and_poison;
    for (int first = 0; first < count; first += sequences) {
        int n = count - first < sequences ? count - first : sequences;
        for (int turn = 0; turn < 2; turn++) {
            int64_t from[16] = {0};
            for (int i = 0; i < n; i++) {
                sala_request r = crowd(first + i, lengths, count, turn ? 6 : output);
                if (turn) {
                    r.sequence = a.out[a.count - n].sequence;
                    from[i] = sequence_of(&a, r.sequence)->stored + 1;
                    r.keep = 0;
                }
                if (turn) r.token_count = 5 + i;
                from[i] += r.token_count;
                session_ask(&a, &r);
                if (turn) r.sequence = b.out[b.count - n].sequence;
                session_ask(&b, &r);
            }
            session_run(&a);
            plant_run(&b, &a, mode, most);
            for (int i = 0; i < n; i++) {
                int at = a.count - n + i;
                plant_same(&b, &a, at, from[i]);
                if (turn) continue;
                memory x = memory_of(&a, a.out[at].sequence), y = memory_of(&b, b.out[at].sequence);
                CHECK(memory_same(&x, &y), "request %d: the memory differs", at);
                free(x.data);
                free(y.data);
            }
        }
    }
    sala_timings got = plant_sums(&b);
    for (int d = 0; d < SALA_DEPTHS; d++) {
        sum->offered[0][d] += got.offered[0][d];
        sum->accepted[0][d] += got.accepted[0][d];
    }
    sum->verifies[0] += got.verifies[0];
    sum->verify_tokens[0] += got.verify_tokens[0];
    session_close(&a);
    session_close(&b);
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
    random_tokens(prompts, PROMPTS, 97);
    plant.trees = 0;
    for (int mode = 0; mode <= PLANT_CHAIN; mode++) {
        sala_timings sum;
        memset(&sum, 0, sizeof sum);
        compare(TINY, mode % 3 == 2 ? SALA_DENSE_NEVER : 0, tiny_lengths, TINY_LENGTHS,
                1 + (3 * mode + 2) % 8, mode == PLANT_RANDOM ? 70 : 40, mode, 32, &sum);
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

TEST_MAIN(TEST(test_modes))
