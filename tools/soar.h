/*  soar.h - the arithmetic of the SOAR benchmark, apart from any engine: Python's random numbers and the order in
    which its harness sends requests, NumPy's percentiles, the contest's score. Needs nothing but libc. */
#ifndef SALA_SOAR_H
#define SALA_SOAR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ---- Python's random -----------------------------------------------------------------------------
   random.seed(n) is MT19937's init_by_array with the one word n (n < 2^32); random.getrandbits(k) the upper k bits
   of the next word; random.shuffle takes from below i + 1, i falling, and rejects what is too large. */

typedef struct soar_random {
    uint32_t state[624];
    int at;
} soar_random;

static void soar_seed(soar_random *r, uint32_t seed) {
    uint32_t *s = r->state;
    int i = 1;
    s[0] = 19650218u;
    for (int k = 1; k < 624; k++) s[k] = 1812433253u * (s[k - 1] ^ s[k - 1] >> 30) + (uint32_t)k;
    for (int k = 0; k < 624; k++) { // a key of one word: j is always 0
        s[i] = (s[i] ^ (s[i - 1] ^ s[i - 1] >> 30) * 1664525u) + seed;
        if (++i == 624) s[0] = s[623], i = 1;
    }
    for (int k = 0; k < 623; k++) {
        s[i] = (s[i] ^ (s[i - 1] ^ s[i - 1] >> 30) * 1566083941u) - (uint32_t)i;
        if (++i == 624) s[0] = s[623], i = 1;
    }
    s[0] = 0x80000000u;
    r->at = 624;
}

static uint32_t soar_word(soar_random *r) {
    uint32_t *s = r->state;
    for (int k = 0; r->at == 624 && k < 624; k++) {
        uint32_t y = (s[k] & 0x80000000u) | (s[(k + 1) % 624] & 0x7fffffffu);
        s[k] = s[(k + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    if (r->at == 624) r->at = 0;
    uint32_t y = s[r->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static uint32_t soar_below(soar_random *r, uint32_t n) { // 0 .. n - 1; n > 0
    int bits = 0;
    uint32_t x;
    while (bits < 32 && n >> bits) bits++;
    do x = soar_word(r) >> (32 - bits);
    while (x >= n);
    return x;
}

// The order in which random.seed(seed); random.shuffle(list) leaves a list of `count` items: their old places.
static void soar_shuffle(uint32_t seed, int32_t *order, int count) {
    soar_random r = {{0}, 0};
    soar_seed(&r, seed);
    for (int i = 0; i < count; i++) order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        int j = (int)soar_below(&r, (uint32_t)i + 1);
        int32_t other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
}

/* ---- figures ------------------------------------------------------------------------------------ */

static int soar_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void soar_sort(double *x, int count) {
    if (count) qsort(x, (size_t)count, sizeof *x, soar_compare);
}

// As numpy.percentile: linear between the two nearest of the `count` sorted values. 0: there are none.
static double soar_percentile(const double *sorted, int count, double percent) {
    double at = (count - 1) * percent / 100;
    int below = (int)at;
    if (count <= 0) return 0;
    if (below + 1 >= count) return sorted[count - 1];
    return sorted[below] + (sorted[below + 1] - sorted[below]) * (at - below);
}

// The contest's factor for accuracy, by the score relative to 80 (`overall` of sala eval). The bands are those
// that contestants report; the official page is not public.
static double soar_factor(double overall) {
    return overall <= 97 ? 0 : overall <= 98 ? 0.92 : overall <= 99 ? 0.96 : 1;
}

// 0.4 S1 + 0.3 S8 + 0.3 Smax; each S is 100 x the baseline's seconds / ours (the contest: the best one's seconds).
static double soar_score(double s1, double s8, double smax) {
    return 0.4 * s1 + 0.3 * s8 + 0.3 * smax;
}

#endif
