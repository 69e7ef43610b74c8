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

TEST_MAIN(TEST(test_modes))
