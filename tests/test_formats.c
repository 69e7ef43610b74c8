#define SALA_IMPLEMENTATION
#include "../sala.h"
// Number formats and the geometry of the compressed tiers (kernels.h), against slow definitions of
// their own.
#include "check.h"

// A format as a list: every finite non-negative value in ascending order; the index is the code.
// The nearest of a list, ties to the even code, is the definition of rounding here. All arithmetic
// is in double, which holds every value and every middle of two neighbours exactly.
typedef struct format {
    double
        value[32769]; // [count], and the first value beyond the range (for formats with infinity)
    int count;
} format;

// Values of a format with `mantissa` bits and `bias`, codes 0 .. count - 1.
static void format_fill(format *f, int mantissa, int bias, int count) {
    f->count = count;
    for (int code = 0; code <= count; code++) {
        int e = code >> mantissa, m = code & ((1 << mantissa) - 1);
        f->value[code] =
            e ? ldexp((1 << mantissa) + m, e - bias - mantissa) : ldexp(m, 1 - bias - mantissa);
    }
}

// Code of the nearest value to a >= 0 by binary search. Beyond the range: `count` (the overflow
// code), from the middle between the last value and the one that would follow.
static int format_nearest(const format *f, double a) {
    int low = 0, high = f->count; // value[low] <= a < value[high]
    if (a >= f->value[high]) return high;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (f->value[middle] <= a)
            low = middle;
        else
            high = middle;
    }
    double below = a - f->value[low], above = f->value[high] - a;
    return below < above ? low : below > above ? high : low % 2 == 0 ? low : high;
}

static format bf16, f16, e4m3, e2m1;

static void formats_fill(void) {
    format_fill(&bf16, 7, 127, 0x7F80);
    format_fill(&f16, 10, 15, 0x7C00);
    format_fill(&e4m3, 3, 7, 0x7F);
    format_fill(&e2m1, 1, 1, 8);
}

static int failures_shown; // so that a broken function does not print millions of lines

static void one_float(uint32_t bits) {
    float x = sala_bits_f32(bits);
    uint32_t sign = bits >> 31;
    if (failures_shown > 20) return;
    if (isnan(x)) {
        uint16_t b = sala_f32_bf16(x), h = sala_f32_f16(x);
        int good = (b & 0x7FC0) == 0x7FC0 && b >> 15 == sign && (h & 0x7E00) == 0x7E00 &&
                   h >> 15 == sign && (sala_f32_e4m3(x) & 0x7F) == 0x7F;
        failures_shown += !good;
        CHECK(good, "NaN %08x gives bf16 %04x, f16 %04x, e4m3 %02x", bits, b, h, sala_f32_e4m3(x));
        return;
    }
    double a = isinf(x) ? 1e300 : fabs((double)x);
    int b = format_nearest(&bf16, a), h = format_nearest(&f16, a), e = format_nearest(&e4m3, a),
        q = format_nearest(&e2m1, a);
    if (e > 0x7E) e = 0x7E; // these two saturate
    if (q > 7) q = 7;
    int good = sala_f32_bf16(x) == (sign << 15 | (uint32_t)b) &&
               sala_f32_f16(x) == (sign << 15 | (uint32_t)h) &&
               sala_f32_e4m3(x) == (sign << 7 | (uint32_t)e) &&
               sala_f32_e2m1(x) == (sign << 3 | (uint32_t)q);
    failures_shown += !good;
    CHECK(good,
          "%a: bf16 %04x for %04x, f16 %04x for %04x, e4m3 %02x for %02x, e2m1 %x for %x "
          "(magnitudes)",
          x, sala_f32_bf16(x), b, sala_f32_f16(x), h, sala_f32_e4m3(x), e, sala_f32_e2m1(x), q);
}

static void one_float_and_neighbours(float x) {
    uint32_t bits = sala_f32_bits(x) & 0x7FFFFFFFu;
    for (int32_t d = -2; d <= 2; d++) {
        uint32_t near = bits + (uint32_t)d;
        if (near > 0x7FFFFFFFu) continue;
        one_float(near);
        one_float(near | 0x80000000u);
    }
}

// Every value and every middle of every format, each with its neighbours among the floats: all
// places where the answer changes.
static void boundaries(void) {
    const format *all[] = {&bf16, &f16, &e4m3, &e2m1};
    formats_fill();
    failures_shown = 0;
    for (int k = 0; k < 4; k++) {
        for (int code = 0; code <= all[k]->count; code++) {
            one_float_and_neighbours((float)all[k]->value[code]);
            if (code)
                one_float_and_neighbours(
                    (float)((all[k]->value[code - 1] + all[k]->value[code]) / 2));
        }
    }
    one_float_and_neighbours(0x1.fffffep127f); // the largest float
    one_float(0x7F800000u);                    // infinities
    one_float(0xFF800000u);
    for (uint32_t nan = 0; nan < 23; nan++)
        one_float(0x7F800000u | 1u << nan), one_float(0xFF800000u | 1u << nan);
}

static void random_floats(void) {
    formats_fill();
    failures_shown = 0;
    check_seed = 5;
    for (int i = 0; i < 1500000; i++) {
        uint64_t r = check_random();
        one_float((uint32_t)r);
        // and one in the range where all formats have values: exponents -30 .. 20
        one_float((uint32_t)((r >> 32) & 0x807FFFFFu) | (uint32_t)(97 + (r >> 40) % 51) << 23);
    }
}

static void round_trips(void) {
    int bad = 0;
    for (uint32_t h = 0; h < 65536 && bad < 20; h++) {
        float b = sala_bf16_f32((uint16_t)h), f = sala_f16_f32((uint16_t)h);
        uint32_t magnitude = h & 0x7FFF, quiet_b = h, quiet_f = h;
        if (magnitude > 0x7F80)
            quiet_b |= 0x40; // a signalling NaN becomes quiet, its payload stays
        if (magnitude > 0x7C00) quiet_f |= 0x200;
        int good_b = sala_f32_bf16(b) == quiet_b && !!isnan(b) == (magnitude > 0x7F80) &&
                     !!isinf(b) == (magnitude == 0x7F80) && !!signbit(b) == (int)(h >> 15);
        int good_f = sala_f32_f16(f) == quiet_f && !!isnan(f) == (magnitude > 0x7C00) &&
                     !!isinf(f) == (magnitude == 0x7C00) && !!signbit(f) == (int)(h >> 15);
        CHECK(good_b, "bf16 %04x is %g and comes back as %04x", h, b, sala_f32_bf16(b));
        CHECK(good_f, "f16 %04x is %g and comes back as %04x", h, f, sala_f32_f16(f));
        bad += !good_b + !good_f;
    }
}

static void decoding(void) { // against the formats' definitions
    formats_fill();
    for (int h = 0; h < 0x7F80; h++)
        CHECK(sala_bf16_f32((uint16_t)h) == bf16.value[h], "bf16 %04x", h);
    for (int h = 0; h < 0x7C00; h++)
        CHECK(sala_f16_f32((uint16_t)h) == f16.value[h], "f16 %04x", h);
    for (int c = 0; c < 256; c++) {
        float x = sala_e4m3_f32((uint8_t)c);
        int magnitude = c & 127;
        if (magnitude == 127) {
            CHECK(isnan(x), "e4m3 %02x is %g", c, x);
            continue;
        }
        CHECK(fabsf(x) == e4m3.value[magnitude] && !!signbit(x) == c >> 7, "e4m3 %02x is %g", c, x);
        CHECK(sala_f32_e4m3(x) == c, "e4m3 %02x comes back as %02x", c, sala_f32_e4m3(x));
    }
    static const struct {
        uint8_t code;
        float value;
    } e4m3_table[] = {{0x00, 0},   {0x01, 0x1p-9f},      {0x07, 7 * 0x1p-9f}, {0x08, 0x1p-6f},
                      {0x38, 1},   {0x70, 128},          {0x78, 256},         {0x7C, 384},
                      {0x7E, 448}, {0x87, -7 * 0x1p-9f}, {0xFE, -448}};
    for (size_t i = 0; i < sizeof e4m3_table / sizeof e4m3_table[0]; i++)
        CHECK(sala_e4m3_f32(e4m3_table[i].code) == e4m3_table[i].value, "e4m3 %02x",
              e4m3_table[i].code);
    static const float e2m1_table[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int c = 0; c < 16; c++) {
        float x = sala_e2m1_f32((uint8_t)c);
        CHECK(fabsf(x) == e2m1_table[c & 7] && !!signbit(x) == c >> 3, "e2m1 %x is %g", c, x);
        CHECK(sala_f32_e2m1(x) == c, "e2m1 %x comes back as %x", c, sala_f32_e2m1(x));
    }
}

static void known_roundings(void) {
    static const struct {
        float x;
        int bf16, f16, e4m3, e2m1;
    } cases[] = {
        {1.0f, 0x3F80, 0x3C00, 0x38, 2},
        {-2.0f, 0xC000, 0xC000, 0xC0, 12},
        {0x1p-10f, 0x3A80, 0x1400, 0x00, 0},  // e4m3: a tie with zero
        {0x1.8p-9f, 0x3B40, 0x1A00, 0x02, 0}, // e4m3: a tie with an odd code below
        {0x1.01p0f, 0x3F80, 0x3C04, 0x38, 2}, // bf16: a tie, down to even
        {0x1.03p0f, 0x3F82, 0x3C0C, 0x38, 2}, // bf16: a tie, up to even
        {65504.0f, 0x4780, 0x7BFF, 0x7E, 7},
        {65519.996f, 0x4780, 0x7BFF, 0x7E, 7},
        {65520.0f, 0x4780, 0x7C00, 0x7E, 7}, // f16: a tie with what would be 65536
        {0x1p-25f, 0x3300, 0x0000, 0x00, 0}, // f16: a tie with zero
        {0x1.000002p-25f, 0x3300, 0x0001, 0x00, 0},
        {464.0f, 0x43E8, 0x5F40, 0x7E, 7}, // saturates, never NaN
        {0.25f, 0x3E80, 0x3400, 0x28, 0},
        {0.75f, 0x3F40, 0x3A00, 0x34, 2},
        {2.5f, 0x4020, 0x4100, 0x42, 4},
        {3.5f, 0x4060, 0x4300, 0x46, 6},
        {5.0f, 0x40A0, 0x4500, 0x4A, 6},
        {-0.0f, 0x8000, 0x8000, 0x80, 8},
        {0x1.fffffep127f, 0x7F80, 0x7C00, 0x7E, 7}, // the largest float rounds to infinity in bf16
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        float x = cases[i].x;
        CHECK(sala_f32_bf16(x) == cases[i].bf16, "%a: bf16 %04x", x, sala_f32_bf16(x));
        CHECK(sala_f32_f16(x) == cases[i].f16, "%a: f16 %04x", x, sala_f32_f16(x));
        CHECK(sala_f32_e4m3(x) == cases[i].e4m3, "%a: e4m3 %02x", x, sala_f32_e4m3(x));
        CHECK(sala_f32_e2m1(x) == cases[i].e2m1, "%a: e2m1 %x", x, sala_f32_e2m1(x));
    }
    CHECK(sala_round(0x1.01p0f) == 1.0f && sala_act_f32(sala_store(-3.0f)) == -3.0f,
          "activations are BF16");
}

// Tiers by their definition: row j of tier 1 is the tokens [stride*j, stride*j + kernel), tier 2
// has four times both; a row exists when all its tokens do, and lives with the page of its last
// token.
static void tiers(void) {
    static const int geometries[][3] = {{32, 16, 64}, {8, 4, 16}, {16, 16, 64}, {64, 16, 64},
                                        {32, 8, 32},  {4, 1, 16}, {48, 16, 16}, {2, 2, 2},
                                        {16, 4, 8},   {1, 1, 1}};
    for (size_t g = 0; g < sizeof geometries / sizeof geometries[0]; g++) {
        sala_dims d;
        memset(&d, 0, sizeof d);
        d.kernel = geometries[g][0];
        d.stride = geometries[g][1];
        d.block = geometries[g][2];
        for (int tier = 1; tier <= 2; tier++) {
            int scale = tier == 1 ? 1 : 4, kernel = d.kernel * scale, stride = d.stride * scale;
            int most = 0, per_page[4096] = {0};
            for (int n = 0; n <= 2000; n++) {
                int rows = 0;
                while (stride * rows + kernel <= n) rows++;
                CHECK(sala_tier_rows(&d, tier, n) == rows,
                      "geometry %zu, tier %d, %d tokens: %d rows, not %d", g, tier, n,
                      sala_tier_rows(&d, tier, n), rows);
            }
            for (int j = 0; stride * j + kernel <= 2000; j++) {
                int last = stride * j + kernel - 1;
                CHECK(sala_tier_last(&d, tier, j) == last,
                      "geometry %zu, tier %d, row %d ends at %d, not %d", g, tier, j,
                      sala_tier_last(&d, tier, j), last);
                int on_page = ++per_page[last / d.block];
                if (on_page > most) most = on_page;
            }
            CHECK(sala_tier_slots(&d, tier) == most,
                  "geometry %zu, tier %d: %d slots, but %d rows on a page", g, tier,
                  sala_tier_slots(&d, tier), most);
        }
    }
    sala_dims release; // model.md 8, worked numbers
    memset(&release, 0, sizeof release);
    release.kernel = 32, release.stride = 16, release.block = 64;
    CHECK(sala_tier_rows(&release, 1, 10001) == 624 && sala_tier_rows(&release, 2, 10001) == 155,
          "t = 10000");
    CHECK(sala_tier_last(&release, 1, 623) == 9999 && sala_tier_last(&release, 2, 0) == 127,
          "last tokens");
    CHECK(sala_tier_slots(&release, 1) == 4 && sala_tier_slots(&release, 2) == 1, "slots");
    CHECK(sala_tier_rows(&release, 1, 1 << 20) == 65535 &&
              sala_tier_last(&release, 2, 16382) == (1 << 20) - 1,
          "a million tokens");
}

TEST_MAIN(TEST(round_trips), TEST(decoding), TEST(known_roundings), TEST(boundaries),
          TEST(random_floats), TEST(tiers))
