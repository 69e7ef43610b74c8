/*  test_bench.c - the arithmetic of `sala bench --soar`: Python's random numbers and shuffles, kept as data, NumPy's
    percentiles, the contest's score. Run in the repository. */
#include <stdio.h>

#include "../tools/soar.h"
#include "check.h"

// The numbers behind the colon of each line that begins with `kind`; returns how many lines there were.
static int read_lines(const char *kind,
                      void (*each)(uint32_t seed, int count, const uint32_t *numbers)) {
    static char line[8192];
    static uint32_t numbers[1024];
    FILE *f = fopen("tests/data/python_random.txt", "r");
    int found = 0;
    while (f && fgets(line, sizeof line, f)) {
        char word[16] = "";
        unsigned seed = 0;
        int n = 0;
        if (sscanf(line, "%15s %u", word, &seed) != 2 || strcmp(word, kind) != 0) continue;
        for (char *at = strchr(line, ':') + 1; n < 1024; n++) {
            char *end;
            numbers[n] = (uint32_t)strtoul(at, &end, 10);
            if (end == at) break;
            at = end;
        }
        each(seed, n, numbers);
        found++;
    }
    if (f) fclose(f);
    return found;
}

static void check_words(uint32_t seed, int count, const uint32_t *numbers) {
    soar_random r;
    soar_seed(&r, seed);
    CHECK(count == 5, "%d", count);
    for (int i = 0; i < 1000; i++) {
        uint32_t word = soar_word(&r);
        int k = i < 4 ? i : i == 999 ? 4 : -1;
        if (k >= 0)
            CHECK(word == numbers[k], "seed %u, word %d: %u instead of %u", seed, i, word,
                  numbers[k]);
    }
}

static void words(void) {
    int n = read_lines("words", check_words);
    CHECK(n == 4, "%d lines", n);
}

static void check_shuffle(uint32_t seed, int count, const uint32_t *numbers) {
    static int32_t order[1024];
    soar_shuffle(seed, order, count);
    int wrong = 0;
    for (int i = 0; i < count; i++) wrong += order[i] != (int32_t)numbers[i];
    CHECK(wrong == 0, "seed %u, %d items: %d in other places", seed, count, wrong);
}

static void shuffles(void) {
    int n = read_lines("shuffle", check_shuffle);
    CHECK(n == 21, "%d lines", n);
}

static void below(void) { // in range, every number comes, also where the words are all bits
    int seen[5] = {0};
    soar_random r;
    soar_seed(&r, 3);
    for (int i = 0; i < 1000; i++) {
        uint32_t x = soar_below(&r, 5);
        CHECK(x < 5, "%u", x);
        if (x < 5) seen[x]++;
    }
    for (int i = 0; i < 5; i++) CHECK(seen[i] > 150 && seen[i] < 250, "%d: %d times", i, seen[i]);
    CHECK(soar_below(&r, 1) == 0, "below 1");
    CHECK(soar_below(&r, 0x80000001u) <= 0x80000000u, "below 2^31 + 1");
}

static void percentiles(void) { // as numpy.percentile says
    double x[] = {15, 1, 4, 2, 40}, one[] = {7};
    soar_sort(x, 5);
    CHECK(x[0] <= 1 && x[4] >= 40, "%g %g", x[0], x[4]);
    const double wanted[][2] = {{0, 1}, {50, 4}, {90, 30}, {99, 39}, {100, 40}, {10, 1.4}};
    for (int i = 0; i < 6; i++) {
        double p = soar_percentile(x, 5, wanted[i][0]);
        CHECK(fabs(p - wanted[i][1]) < 1e-9, "%g %%: %.12g instead of %g", wanted[i][0], p,
              wanted[i][1]);
    }
    CHECK(soar_percentile(one, 1, 99) >= 7 && soar_percentile(one, 1, 0) <= 7, "of one");
    CHECK(fabs(soar_percentile(x, 0, 50)) < 1e-9, "of none");
}

static void score(void) {
    const double bands[][2] = {{96, 0},      {97, 0},    {97.01, 0.92}, {98, 0.92},
                               {98.5, 0.96}, {99, 0.96}, {99.01, 1},    {100, 1}};
    for (int i = 0; i < 8; i++)
        CHECK(fabs(soar_factor(bands[i][0]) - bands[i][1]) < 1e-9, "C of %g is %g", bands[i][0],
              soar_factor(bands[i][0]));
    CHECK(fabs(soar_score(100, 100, 100) - 100) < 1e-9, "%g", soar_score(100, 100, 100));
    CHECK(fabs(soar_score(100, 99.99, 96.39) * soar_factor(97.5) - 91) <
              0.02, // as the champion's first week was scored
          "%g", soar_score(100, 99.99, 96.39) * soar_factor(97.5));
    CHECK(fabs(soar_score(300, 0, 0) - 120) < 1e-9 && fabs(soar_score(0, 10, 0) - 3) < 1e-9,
          "weights");
}

TEST_MAIN(TEST(words), TEST(shuffles), TEST(below), TEST(percentiles), TEST(score))
