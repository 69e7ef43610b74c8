/*  kernels_sample.h - tests of the kernels sample, pack and fill. Included by test_kernels.c after device.h.
    All of them promise bits: tokens are compared with sala__sample, weights with memcmp. */

enum { SAMPLE_ROWS = 12, SAMPLE_BUCKET = 16, SAMPLE_SLOTS = 18, SAMPLE_SHAPES = 15 };

// Dimensions that a device accepts; these kernels take their sizes from their arguments.
static sala_dims sample_dims(void) {
    sala_dims m = {64, 64, 64, 2,     2,        1,     128,  0,    1,       64,
                   32, 16, 1,  4,     8,        512,   2,    2,    128,     1,
                   1,  1,  1,  1e-6f, 10000.0f, 12.0f, 0.5f, 1.0f, 0.0884f, 0.0884f};
    return m;
}

static void *sample_memory(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size);
    if (!p) exit(2);
    return p;
}

static int sample_below(int n) {
    return (int)(check_random() % (uint64_t)n);
}

static float sample_normal(void) { // nearly: the sum of 12 uniform numbers
    float sum = 0;
    for (int i = 0; i < 12; i++) sum += check_uniform();
    return sum * 0.5f;
}

// ---- sample ----

static float sample_logit(int32_t i, int32_t n, int shape) {
    static const float specials[] = {0.0f, -0.0f, 0.0f, -0.0f, 1e-40f, -1e-40f};
    switch (shape) {
    case 0: return sample_normal();
    case 1: return 8 * sample_normal();
    case 2: return (float)sample_below(4);                            // ties everywhere
    case 3: return 1.5f;                                              // uniform
    case 4: return -INFINITY;                                         // one is set later
    case 5: return 3e38f * check_uniform();                           // huge
    case 6: return sample_below(3) ? -INFINITY : sample_normal();     // many forbidden
    case 7: return (float)i * (30.0f / (float)n);                     // ascending
    case 8: return -(float)i * (30.0f / (float)n);                    // descending
    case 9: return sala_bf16_f32(sala_f32_bf16(4 * sample_normal())); // ties are common
    case 10: return specials[sample_below(6)];                        // zeros of both signs
    case 11: return 20 + 0x1p-17f * sample_normal(); // a few units of the last place
    case 12: return sample_below(50) ? -25 + sample_normal() : 5 * sample_normal(); // a far floor
    case 13: return sample_below(2) ? 1 : 1 - 9.99f;                                // two levels
    default:
        return i ? -20.9f - 0.7f * fabsf(check_uniform()) : 0; // weights of 1 or 0, but for one
    }
}

// Logits of one row, and at times something unusable or forbidden in them.
static void sample_fill(float *x, int32_t n, int shape) {
    const float bad[] = {NAN, -NAN, INFINITY, sala_bits_f32(0x7F800001u), -INFINITY, -INFINITY};
    for (int32_t i = 0; i < n; i++) x[i] = sample_logit(i, n, shape);
    if ((shape == 4 && sample_below(4)) || shape == 6) x[sample_below(n)] = 3;
    if (sample_below(12) == 0) x[sample_below(n)] = bad[sample_below(6)];
}

// Any combination of settings, for a token of position *at. `s` gets what the device's row has; its
// tables are filled apart.
static sala_sampling sample_settings(sala__sampler *s, int32_t vocab, uint64_t *at) {
    static const float temperatures[] = {0, 1e-3f, 0.1f, 0.7f, 1, 1, 1.5f, 100};
    static const float shares[] = {1, 1, 0.999f, 0.95f, 0.5f, 0.01f, 1e-9f};
    static const float floors[] = {1e-5f, 0.05f, 0.5f, 1};
    const int32_t heads[] = {0, 0, 1, 2, 5, 40, vocab, vocab + 7};
    sala_sampling d;
    memset(s, 0, sizeof *s);
    memset(&d, 0, sizeof d);
    d.temperature = temperatures[sample_below(8)];
    d.top_k = heads[sample_below(8)];
    d.top_p = shares[sample_below(7)];
    d.min_p_log = sample_below(3) ? -INFINITY : logf(floors[sample_below(4)]);
    d.repetition = sample_below(2) ? 1 : sample_below(2) ? 1.3f : 0.6f;
    d.presence = sample_below(2) ? 0 : 2 * check_uniform();
    d.frequency = sample_below(2) ? 0 : 2 * check_uniform();
    d.penalties = sample_below(2);
    d.biased = sample_below(3) == 0;
    d.forced = sample_below(5) ? -1 : sample_below(vocab);
    s->seed = check_random() >> sample_below(64);
    *at = check_random() >> (1 + sample_below(63));
    d.random = sala_random(s->seed, *at);
    s->vocab = vocab;
    s->temperature = d.temperature;
    s->top_k = d.top_k;
    s->top_p = d.top_p;
    s->min_p_log = d.min_p_log;
    s->repetition = d.repetition;
    s->presence = d.presence;
    s->frequency = d.frequency;
    return d;
}

typedef struct sample_pass { // one launch, on the host
    int32_t vocab;
    float *logits, *biases; // [SAMPLE_ROWS, vocab], [SAMPLE_SLOTS, vocab]
    int32_t *counts;        // [SAMPLE_SLOTS, vocab]
    void *scratch;
    sala__sampler sampler[SAMPLE_ROWS];
    uint64_t at[SAMPLE_ROWS];              // the place that random numbers are drawn for
    sala_sampling sampling[SAMPLE_BUCKET]; // of padding too, where it is random
    int32_t token[SAMPLE_ROWS], position[SAMPLE_ROWS], of[SAMPLE_ROWS];
    int32_t path[SAMPLE_ROWS * SALA_MAX_PATH];
    sala_seq seq;
} sample_pass;

static sample_pass *sample_pass_make(int32_t vocab) {
    sample_pass *p = (sample_pass *)sample_memory(1, sizeof *p);
    size_t n = (size_t)vocab;
    p->vocab = vocab;
    p->logits = (float *)sample_memory(SAMPLE_ROWS * n, 4);
    p->biases = (float *)sample_memory(SAMPLE_SLOTS * n, 4);
    p->counts = (int32_t *)sample_memory(SAMPLE_SLOTS * n, 4);
    p->scratch = sample_memory(sala__sampler_scratch(vocab), 1);
    return p;
}

static void sample_pass_free(sample_pass *p) {
    free(p->logits);
    free(p->biases);
    free(p->counts);
    free(p->scratch);
    free(p);
}

// New logits, settings and tables. The rows are the nodes of one tree: a random parent each.
static void sample_pass_fill(sample_pass *p) {
    size_t n = (size_t)p->vocab;
    p->seq.stored = 1000;
    for (int r = 0; r < SAMPLE_ROWS; r++) {
        sample_fill(p->logits + (size_t)r * n, p->vocab, sample_below(SAMPLE_SHAPES));
        sala_sampling *d = &p->sampling[r];
        *d = sample_settings(&p->sampler[r], p->vocab, &p->at[r]);
        d->slot = (5 * r + 2) % SAMPLE_SLOTS;
        float *bias = p->biases + (size_t)d->slot * n;
        int32_t *count = p->counts + (size_t)d->slot * n, mostly = sample_below(4);
        for (size_t t = 0; t < n; t++) {
            bias[t] = sample_below(8) ? INFINITY : 5 * check_uniform();
            if (sample_below(64) == 0) bias[t] = -INFINITY;
            count[t] = sample_below(4) < mostly ? sample_below(9) : 0;
        }
        p->sampler[r].biases = d->biased ? bias : NULL;
        p->sampler[r].counts = d->penalties ? count : NULL;
        p->token[r] = sample_below(2) ? sample_below(p->vocab) : 0; // repeats are common
        int32_t *path = p->path + r * SALA_MAX_PATH, parent = r ? sample_below(r) : 0;
        int32_t depth = r ? p->position[parent] - p->seq.stored + 1 : 0;
        memcpy(path, p->path + parent * SALA_MAX_PATH, (size_t)depth * 4);
        path[depth] = r;
        p->position[r] = p->seq.stored + depth;
        d->ahead = sample_below(depth + 1);
        if (sample_below(10) == 0) d->slot = -1; // nothing is wanted of the row
    }
    for (int r = SAMPLE_ROWS; r < SAMPLE_BUCKET; r++) {
        p->sampling[r] = p->sampling[r - SAMPLE_ROWS];
        p->sampling[r].ahead = sample_below(1 << 30);
        p->sampling[r].slot = sample_below(1 << 30);
    }
}

// Instead: every row draws among the tokens of the smallest weights, at the end of the running sum.
static void sample_pass_far(sample_pass *p) {
    for (int r = 0; r < SAMPLE_ROWS; r++) {
        sala_sampling *d = &p->sampling[r];
        sala__sampler *s = &p->sampler[r];
        d->temperature = s->temperature = 1;
        d->top_p = s->top_p = sample_below(2) ? 1 : 0.9999999f;
        d->min_p_log = s->min_p_log = -INFINITY;
        d->top_k = s->top_k = sample_below(2) * (p->vocab - 1);
        d->penalties = d->biased = 0;
        d->forced = -1;
        s->biases = NULL;
        s->counts = NULL;
        while ((d->random = sala_random(s->seed, p->at[r])) < (uint64_t)0xFFFFF << 44) p->at[r]++;
        for (int32_t t = 0; t < p->vocab; t++)
            p->logits[(size_t)r * (size_t)p->vocab + (size_t)t] =
                sample_logit(t, p->vocab, SAMPLE_SHAPES - 1);
    }
}

static void sample_pass_check(const sample_pass *p, const int32_t *got) {
    for (int r = 0; r < SAMPLE_ROWS; r++) {
        const sala_sampling *d = &p->sampling[r];
        int32_t ahead[SALA_MAX_PATH], depth = p->position[r] - p->seq.stored;
        for (int i = 0; i < d->ahead; i++)
            ahead[i] = p->token[p->path[r * SALA_MAX_PATH + depth - i]];
        int32_t want =
            sala__sample(&p->sampler[r], p->logits + (size_t)r * (size_t)p->vocab,
                         (int64_t)p->at[r], ahead, d->ahead, p->scratch, NULL, NULL, NULL);
        if (want >= 0 && d->forced >= 0) want = d->forced;
        if (d->slot < 0) want = -1;
        CHECK(
            got[r] == want,
            "vocabulary %d, row %d: %d, not %d (temperature %g, top-k %d, top-p %g, min-p log %g, "
            "penalties %d, biases %d, ahead %d, slot %d)",
            (int)p->vocab, r, (int)got[r], (int)want, (double)d->temperature, (int)d->top_k,
            (double)d->top_p, (double)d->min_p_log, (int)d->penalties, (int)d->biased,
            (int)d->ahead, (int)d->slot);
    }
    for (int r = SAMPLE_ROWS; r < SAMPLE_BUCKET; r++)
        CHECK(got[r] == -1, "a row of padding was written: %d", (int)got[r]);
}

static void sample_passes(int32_t vocab, int passes, int far) {
    sala_dims m = sample_dims();
    size_t n = (size_t)vocab;
    device_open(&m);
    sample_pass *p = sample_pass_make(vocab);
    void *logits = on_device(NULL, SAMPLE_BUCKET * n * 4),
         *list = on_device(NULL, SAMPLE_BUCKET * (size_t)sala_sample_stride(vocab) * 4);
    void *biases = on_device(NULL, SAMPLE_SLOTS * n * 4);
    void *counts = on_device(NULL, SAMPLE_SLOTS * n * 4);
    int32_t arrived[SAMPLE_BUCKET] = {0}, *arrivals;
    arrivals = (int32_t *)on_device(arrived, sizeof arrived);
    for (int i = 0; i < passes; i++) {
        int32_t got[SAMPLE_BUCKET];
        sample_pass_fill(p);
        if (far) sample_pass_far(p);
        sala_rows rows = {SAMPLE_ROWS, 1, 1, NULL, NULL, NULL, NULL, NULL};
        rows.seqs = (const sala_seq *)on_device(&p->seq, sizeof p->seq);
        rows.token = (const int32_t *)on_device(p->token, sizeof p->token);
        rows.position = (const int32_t *)on_device(p->position, sizeof p->position);
        rows.seq = (const int32_t *)on_device(p->of, sizeof p->of);
        rows.path = (const int32_t *)on_device(p->path, sizeof p->path);
        to_device(logits, p->logits, SAMPLE_ROWS * n * 4);
        to_device(biases, p->biases, SAMPLE_SLOTS * n * 4);
        to_device(counts, p->counts, SAMPLE_SLOTS * n * 4);
        sala_sample_args a;
        memset(&a, 0, sizeof a);
        a.rows = (const sala_rows *)on_device(&rows, sizeof rows);
        a.vocab = vocab;
        a.logits = (const float *)logits;
        a.sampling = (const sala_sampling *)on_device(p->sampling, sizeof p->sampling);
        a.counts = (const int32_t *)counts;
        a.biases = (const float *)biases;
        a.weight = (float *)list;
        a.arrivals = arrivals;
        a.token = (int32_t *)on_device(NULL, sizeof got);
        gpu->rows = SAMPLE_BUCKET;
        gpu->seqs = 1;
        gpu->multiprocessors = SAMPLE_BUCKET * (1 + i % 3); // so many blocks may share a row
        sala__launch_sample(gpu, &a);
        device_sync();
        from_device(got, a.token, sizeof got);
        sample_pass_check(p, got);
        from_device(arrived, arrivals, sizeof arrived);
        for (int r = 0; r < SAMPLE_BUCKET; r++)
            CHECK(arrived[r] == 0, "row %d: %d arrivals are left", r, (int)arrived[r]);
    }
    sample_pass_free(p);
    device_close();
}

static void sample_small_vocabularies(void) {
    sample_passes(1, 12, 0);
    sample_passes(2, 24, 0);
    sample_passes(7, 48, 0);
    sample_passes(97, 48, 0);
}
// Rows of several tiles, which one to three blocks share; they begin at any address.
static void sample_tiles(void) {
    sample_passes(4096, 3, 0);
    sample_passes(4097, 6, 0);
    sample_passes(8195, 6, 0);
    sample_passes(14001, 6, 0);
}
static void sample_1023(void) {
    sample_passes(1023, 48, 0);
}
static void sample_2048(void) {
    sample_passes(2048, 48, 0);
}
static void sample_5000(void) {
    sample_passes(5000, 24, 0);
}
static void sample_73448(void) {
    sample_passes(73448, 1, 0);
}

static void sample_far_tail(void) {
    sample_passes(3000, 4, 1);
}

// ---- accept ----

enum { ACCEPT_SEQS = 5, ACCEPT_ROWS = ACCEPT_SEQS * SALA_MAX_NODES };

typedef struct accept_pass { // one launch, on the host
    sala_seq seq[ACCEPT_SEQS];
    int32_t token[ACCEPT_ROWS], position[ACCEPT_ROWS], of[ACCEPT_ROWS];
    int32_t path[ACCEPT_ROWS * SALA_MAX_PATH], chosen[ACCEPT_ROWS];
    int32_t result[ACCEPT_SEQS * (1 + SALA_MAX_PATH)]; // accepted, accepted_rows
} accept_pass;

// A tree of `count` rows from row `first` on; mostly the token that is chosen at a row is that of a child.
static void accept_tree(accept_pass *p, int i, int first, int count) {
    sala_seq *s = &p->seq[i];
    int shape = sample_below(3), luck = sample_below(2) ? 3 : 60;
    s->first_row = first, s->rows = count, s->stored = 30 * i;
    for (int n = 0; n < count; n++) {
        int r = first + n, parent = shape == 0   ? n - 1
                                    : shape == 1 ? n / 2
                                                 : sample_below(n ? n : 1);
        while (n && p->position[first + parent] - s->stored == SALA_MAX_PATH - 1)
            parent =
                p->path[(first + parent) * SALA_MAX_PATH + sample_below(SALA_MAX_PATH - 1)] - first;
        int depth = n ? p->position[first + parent] - s->stored + 1 : 0;
        int32_t *path = p->path + r * SALA_MAX_PATH;
        if (n) memcpy(path, p->path + (first + parent) * SALA_MAX_PATH, (size_t)depth * 4);
        path[depth] = r;
        p->of[r] = i;
        p->position[r] = s->stored + depth;
        p->token[r] = n; // in all sequences the same, but siblings differ
        p->chosen[r] = sample_below(8) ? sample_below(SALA_MAX_NODES) : -1;
        if (n && sample_below(luck)) p->chosen[first + parent] = n;
    }
}

// `seqs` sequences in a pass, of as many nodes as there can be, or fewer.
static void accept_once(accept_pass *p, int seqs, int most) {
    int total = 0;
    memset(p, 0, sizeof *p);
    for (int i = 0; i < seqs; i++) {
        int count = most ? SALA_MAX_NODES : 1 + sample_below(SALA_MAX_NODES);
        accept_tree(p, i, total, count);
        total += count;
    }
    sala_rows rows = {total, seqs, 1, p->seq, p->token, p->position, p->of, p->path}, there = rows;
    sala_accept_args a = {&rows, p->chosen, p->result, p->result + ACCEPT_SEQS}, d;
    memset(p->result, 0xFF, sizeof p->result);
    sala__op_accept(NULL, &a);
    there.seqs = (const sala_seq *)on_device(p->seq, sizeof p->seq);
    there.token = (const int32_t *)on_device(p->token, sizeof p->token);
    there.position = (const int32_t *)on_device(p->position, sizeof p->position);
    there.seq = (const int32_t *)on_device(p->of, sizeof p->of);
    there.path = (const int32_t *)on_device(p->path, sizeof p->path);
    d.rows = (const sala_rows *)on_device(&there, sizeof there);
    d.chosen = (const int32_t *)on_device(p->chosen, sizeof p->chosen);
    d.accepted = (int32_t *)on_device(NULL, sizeof p->result);
    d.accepted_rows = d.accepted + ACCEPT_SEQS;
    gpu->seqs = ACCEPT_SEQS; // some are padding
    sala__launch_accept(gpu, &d);
    device_sync();
    int32_t got[ACCEPT_SEQS * (1 + SALA_MAX_PATH)];
    from_device(got, d.accepted, sizeof got);
    CHECK(memcmp(got, p->result, sizeof got) == 0, "%d sequences: the device takes other paths",
          seqs);
}

static void sample_accept(void) {
    sala_dims m = sample_dims();
    accept_pass *p = (accept_pass *)sample_memory(1, sizeof *p);
    int lengths[SALA_MAX_PATH + 1] = {0};
    check_seed = 71;
    device_open(&m);
    for (int i = 0; i < 100; i++) {
        accept_once(p, 1 + i % ACCEPT_SEQS, i % 4 == 0);
        for (int k = 0; k <= i % ACCEPT_SEQS; k++) lengths[p->result[k]]++;
    }
    for (int n = 1; n <= SALA_MAX_PATH; n++) CHECK(lengths[n] > 0, "no path of %d", n);
    free(p);
    device_close();
}

// ---- pack, fill ----

static int64_t sample_padded_rows(int32_t n, int pair) { // of a packed matrix
    int64_t rows = pair > 0 ? 2 * (int64_t)n : n;
    return (rows + SALA_GEMM_ROWS - 1) / SALA_GEMM_ROWS * SALA_GEMM_ROWS;
}

// Where element (row, column) belongs. pair: as in sala_pack_args.
static int64_t sample_place(int32_t row, int32_t column, int32_t n, int32_t k, int pair) {
    if (pair < 0) return (int64_t)row * k + column;
    return sala_packed(pair ? sala_packed_pair(row, pair == 2) : row, column, pair ? 2 * n : n);
}

// What a call leaves in memory that was all ones: the matrix, zeros in its padding, ones elsewhere.
static uint16_t *sample_expected(const uint16_t *matrix, int32_t n, int32_t k, int pair,
                                 size_t *count) {
    int64_t rows = pair < 0 ? n : sample_padded_rows(n, pair);
    *count = (size_t)(rows * k) + 64;
    uint16_t *want = (uint16_t *)sample_memory(*count, 2);
    memset(want, 0xFF, *count * 2);
    int32_t mine = (int32_t)(pair > 0 ? rows / 2 : rows);
    for (int32_t row = 0; row < mine; row++)
        for (int32_t column = 0; column < k; column++)
            want[sample_place(row, column, n, k, pair)] =
                row < n ? matrix[(int64_t)row * k + column] : 0;
    return want;
}

static void sample_check_memory(const void *device, const uint16_t *want, size_t count,
                                const char *what, int n, int k, int pair) {
    uint16_t *got = (uint16_t *)sample_memory(count, 2);
    from_device(got, device, count * 2);
    size_t at = 0; // a GPU makes all NaN the same one
    while (at < count &&
           (got[at] == want[at] ||
            ((got[at] & 0x7FFF) > 0x7F80 && got[at] != 0xFFFF && (want[at] & 0x7FFF) > 0x7F80)))
        at++;
    CHECK(at == count, "%s [%d, %d], pair %d: %04x, not %04x at %d", what, n, k, pair,
          at < count ? got[at] : 0, at < count ? want[at] : 0, (int)at);
    free(got);
}

static float sample_element(const void *from, int64_t i, int32_t format) {
    if (format == SALA_F32) return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return format == SALA_F16 ? sala_f16_f32(bits) : sala_bf16_f32(bits);
}

// Pack random bits (NaN and infinity among them), in slabs of at most `most` rows.
static void sample_pack_one(int32_t n, int32_t k, int pair, int32_t format, int32_t most) {
    size_t size = format == SALA_F32 ? 4 : 2, total = (size_t)n * (size_t)k, count;
    char *from = (char *)sample_memory(total, size);
    for (size_t i = 0; i < total * size; i++) from[i] = (char)check_random();
    uint16_t *matrix = (uint16_t *)sample_memory(total, 2);
    for (size_t i = 0; i < total; i++)
        matrix[i] = format == SALA_BF16
                        ? ((const uint16_t *)(const void *)from)[i] // NaN stays as it is
                        : sala_f32_bf16(sample_element(from, (int64_t)i, format));
    uint16_t *want = sample_expected(matrix, n, k, pair, &count), *to;
    to = (uint16_t *)on_device(NULL, count * 2);
    for (int32_t first = 0, rows; first < n; first += rows) {
        rows = 1 + sample_below(most);
        if (rows > n - first) rows = n - first;
        size_t row = (size_t)k * size;
        sala_pack_args a = {NULL, to, format, first, rows, n, k, pair};
        a.from = on_device(from + (size_t)first * row, (size_t)rows * row);
        sala__launch_pack(gpu, &a);
    }
    device_sync();
    sample_check_memory(to, want, count, "pack", (int)n, (int)k, pair);
    free(from);
    free(matrix);
    free(want);
}

static void sample_pack(void) {
    static const int32_t shapes[][2] = {{1, 64}, {15, 64}, {64, 128}, {65, 64}, {130, 192}};
    sala_dims m = sample_dims();
    device_open(&m);
    for (int i = 0; i < 5; i++)
        for (int pair = -1; pair <= 2; pair++)
            for (int format = SALA_BF16; format <= SALA_F32; format++) {
                sample_pack_one(shapes[i][0], shapes[i][1], pair, format, 1000);
                sample_pack_one(shapes[i][0], shapes[i][1], pair, format, 40);
            }
    for (int format = SALA_BF16; format <= SALA_F32; format++) { // vectors and odd rows
        sample_pack_one(100, 1, -1, format, 1000);
        sample_pack_one(77, 1, -1, format, 10);
        sample_pack_one(9, 13, -1, format, 4);
    }
    device_close();
}

// Both halves of a pair in the same memory leave nothing of what was there.
static void sample_pack_both_halves(void) {
    const int32_t n = 96, k = 128;
    sala_dims m = sample_dims();
    size_t total = (size_t)(n * k), count;
    device_open(&m);
    uint16_t *matrix[2], *want[2], *to;
    for (int i = 0; i < 2; i++) {
        matrix[i] = (uint16_t *)sample_memory(total, 2);
        for (size_t e = 0; e < total; e++) matrix[i][e] = (uint16_t)(check_random() & 0x7FFF);
        want[i] = sample_expected(matrix[i], n, k, 1 + i, &count);
    }
    to = (uint16_t *)on_device(NULL, count * 2);
    for (int i = 0; i < 2; i++) {
        sala_pack_args a = {NULL, to, SALA_BF16, 0, n, n, k, 1 + i};
        a.from = on_device(matrix[i], total * 2);
        sala__launch_pack(gpu, &a);
    }
    device_sync();
    for (size_t e = 0; e < count; e++) want[0][e] &= want[1][e]; // each has ones where it is silent
    sample_check_memory(to, want[0], count, "both halves", (int)n, (int)k, 1);
    for (int i = 0; i < 2; i++) {
        free(matrix[i]);
        free(want[i]);
    }
    device_close();
}

static void sample_fill_one(int32_t n, int32_t k, int layout) {
    size_t total = (size_t)n * (size_t)k, count;
    uint16_t *matrix = (uint16_t *)sample_memory(total, 2);
    sala_fill_args a = {NULL, check_random(), check_uniform(), sample_below(2) ? 1.0f : 0.0f, n,
                        k,    layout};
    sala__synthetic_fill(matrix, 0, total, a.seed, a.scale, a.offset);
    uint16_t *want = sample_expected(matrix, n, k, layout - 1, &count);
    a.to = (uint16_t *)on_device(NULL, count * 2);
    sala__launch_fill(gpu, &a);
    device_sync();
    sample_check_memory(a.to, want, count, "fill", (int)n, (int)k, layout - 1);
    free(matrix);
    free(want);
}

static void sample_fill_weights(void) {
    static const int32_t shapes[][2] = {{1, 64}, {17, 64}, {64, 128}, {65, 192}, {300, 64}};
    sala_dims m = sample_dims();
    device_open(&m);
    for (int i = 0; i < 5; i++)
        for (int layout = 0; layout <= 3; layout++)
            sample_fill_one(shapes[i][0], shapes[i][1], layout);
    sample_fill_one(4096, 1, 0);
    sample_fill_one(1, 1, 0);
    sample_fill_one(77, 1, 0);
    sample_fill_one(5, 13, 0);
    device_close();
}

#define SAMPLE_TESTS                                                                               \
    TEST(sample_small_vocabularies), TEST(sample_tiles), TEST(sample_1023), TEST(sample_2048),     \
        TEST(sample_5000), TEST(sample_73448), TEST(sample_far_tail), TEST(sample_accept),         \
        TEST(sample_pack), TEST(sample_pack_both_halves), TEST(sample_fill_weights)
