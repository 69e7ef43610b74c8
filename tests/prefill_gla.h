/*  prefill_gla.h - tests of the kernel prefill_gla: against its C twin, and bit by bit for the same tokens in
    other chunks. Included by test_prefill.c after device.h. */

enum { TILES_SLOTS = 3, TILES_SPARE = 40 }; // rows behind the ends of q, k, v, o: NaN on the device

// A stretch of one sequence's prompt, on the host.
typedef struct tiles {
    sala_dims dims;
    int rows, position, slot; // of the first row
    int plain;                // neither norm nor rotation
    uint16_t *q, *k, *v, *o;  // [rows, heads, 128]
    uint16_t *q_norm, *k_norm;
    float *cos_sin, *state, *slopes; // state: [TILES_SLOTS, heads, 128, 128] as the CPU has it
    int copies, copy_after[SALA_GLA_COPIES];
    float *copied[SALA_GLA_COPIES]; // [copies] of [heads, 128, 128]
} tiles;

static void *tiles_memory(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) exit(2);
    memset(p, 0x5A, bytes);
    return p;
}

static uint16_t *tiles_noise(size_t count, float scale, float offset) {
    uint16_t *x = (uint16_t *)tiles_memory(2 * count);
    for (size_t i = 0; i < count; i++) x[i] = sala_f32_bf16(offset + scale * check_uniform());
    return x;
}

static size_t tiles_q_width(const tiles *p) {
    return (size_t)p->dims.lin_heads * 128;
}
static size_t tiles_k_width(const tiles *p) {
    return (size_t)p->dims.lin_kv_heads * 128;
}
static size_t tiles_slot(const tiles *p) { // elements of one slot's states
    return (size_t)p->dims.lin_heads * 128 * 128;
}
static size_t tiles_states(const tiles *p) {
    return TILES_SLOTS * tiles_slot(p);
}

static sala_dims tiles_dims(int heads, int kv_heads) {
    sala_dims m = {64, 128, 192, 2,     4,        2,     128,   0,        1,     64,
                   32, 16,  1,   4,     8,        512,   heads, kv_heads, 128,   1,
                   1,  1,   1,   1e-6f, 10000.0f, 12.0f, 0.5f,  16.0f,    0.09f, 0.0883883461f};
    return m;
}

// Slopes of the heads: from the steepest to the flattest of the released model.
static tiles *tiles_make(const sala_dims *m, int rows, int position) {
    tiles *p = (tiles *)tiles_memory(sizeof *p);
    size_t n = (size_t)rows;
    memset(p, 0, sizeof *p);
    p->dims = *m;
    p->rows = rows;
    p->position = position;
    p->slot = 1;
    p->plain = 1;
    p->q = tiles_noise(n * tiles_q_width(p), 1.7f, 0);
    p->k = tiles_noise(n * tiles_k_width(p), 1.7f, 0);
    p->v = tiles_noise(n * tiles_k_width(p), 1, 0);
    p->o = (uint16_t *)tiles_memory(n * tiles_q_width(p) * 2);
    p->q_norm = tiles_noise(128, 0.5f, 1);
    p->k_norm = tiles_noise(128, 0.5f, 1);
    p->cos_sin = (float *)tiles_memory(n * 512);
    for (size_t i = 0; i < n * 64; i++) {
        float angle = 3.2f * check_uniform();
        p->cos_sin[2 * i] = cosf(angle);
        p->cos_sin[2 * i + 1] = sinf(angle);
    }
    p->state = (float *)tiles_memory(tiles_states(p) * 4);
    for (size_t i = 0; i < tiles_states(p); i++) p->state[i] = 4 * check_uniform();
    p->slopes = (float *)tiles_memory((size_t)m->lin_heads * 4);
    for (int h = 0; h < m->lin_heads; h++)
        p->slopes[h] =
            exp2f(-0.25f - 7.75f * (float)h / (float)(m->lin_heads - (m->lin_heads > 1)));
    return p;
}

static void tiles_free(tiles *p) {
    void *all[] = {p->q, p->k, p->v, p->o, p->q_norm, p->k_norm, p->cos_sin, p->state, p->slopes};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p);
}

static sala_weight tiles_vector(const void *data) {
    sala_weight w = sala_plain_weight(data, SALA_BF16, 128, 1);
    return w;
}

// Rows on the device, the spare ones behind them NaN.
static void *tiles_put(const void *rows, size_t count, size_t bytes) {
    void *to = on_device(NULL, (count + TILES_SPARE) * bytes);
    to_device(to, rows, count * bytes);
    return to;
}

static void tiles_reorder(size_t count, float *to, const float *from, int back) {
    for (size_t i = 0; i < count; i++) {
        size_t there =
            i / 16384 * 16384 + (size_t)sala_state_place((int)(i % 16384) / 128, (int)(i % 128));
        to[back ? i : there] = from[back ? there : i];
    }
}

// One chunk on the device.
static void tiles_chunk(const tiles *p, sala_gla_args a, int first, int count) {
    int32_t *position = (int32_t *)tiles_memory((size_t)count * 4);
    sala_seq seq = {p->slot, 0, count, p->position + first + count, p->position, 0, NULL};
    sala_rows rows = {count, 1, 0, NULL, NULL, NULL, NULL, NULL};
    for (int i = 0; i < count; i++) position[i] = p->position + first + i;
    rows.seqs = (const sala_seq *)on_device(&seq, sizeof seq);
    rows.position = (const int32_t *)on_device(position, (size_t)count * 4);
    a.rows = (const sala_rows *)on_device(&rows, sizeof rows);
    a.q += (size_t)first * tiles_q_width(p);
    a.k += (size_t)first * tiles_k_width(p);
    a.v += (size_t)first * tiles_k_width(p);
    a.o += (size_t)first * tiles_q_width(p);
    a.raw_k = a.k;
    if (a.cos_sin) a.cos_sin += first * 128;
    gpu->rows = count;
    gpu->seqs = 1;
    gpu->prefill = 1;
    sala__launch_gla_prefill(gpu, &a);
    device_sync();
    free(position);
}

// The stretch on the device, cut after `every` rows (a multiple of 64, counted from position 0): o and state
// change as they do there. Nothing may be written behind the end of o.
static void tiles_device(tiles *p, int every) {
    size_t n = (size_t)p->rows, qw = tiles_q_width(p) * 2, kw = tiles_k_width(p) * 2;
    float *states = (float *)tiles_memory(tiles_states(p) * 4);
    uint16_t *o = (uint16_t *)tiles_memory((n + TILES_SPARE) * qw);
    sala_gla_args a;
    memset(&a, 0, sizeof a);
    a.q_norm = tiles_vector(p->plain ? NULL : on_device(p->q_norm, 256));
    a.k_norm = tiles_vector(p->plain ? NULL : on_device(p->k_norm, 256));
    a.cos_sin = p->plain ? NULL : (const float *)tiles_put(p->cos_sin, n, 512);
    a.slopes = (const float *)on_device(p->slopes, (size_t)p->dims.lin_heads * 4);
    a.q = (sala_act *)tiles_put(p->q, n, qw);
    a.k = (sala_act *)tiles_put(p->k, n, kw);
    a.v = (const sala_act *)tiles_put(p->v, n, kw);
    a.o = (sala_act *)on_device(NULL, (n + TILES_SPARE) * qw);
    tiles_reorder(tiles_states(p), states, p->state, 0);
    a.state = (float *)on_device(states, tiles_states(p) * 4);
    a.copies = p->copies;
    for (int i = 0; i < p->copies; i++) {
        a.copy_after[i] = p->copy_after[i];
        a.copy_to[i] = (float *)on_device(NULL, tiles_slot(p) * 4);
    }
    for (int at = 0, end; at < p->rows; at = end) {
        end = every - (p->position + at) % every + at;
        tiles_chunk(p, a, at, (end < p->rows ? end : p->rows) - at);
    }
    from_device(states, a.state, tiles_states(p) * 4);
    tiles_reorder(tiles_states(p), p->state, states, 1);
    for (int i = 0; i < p->copies; i++) {
        from_device(states, a.copy_to[i], tiles_slot(p) * 4);
        tiles_reorder(tiles_slot(p), p->copied[i], states, 1);
    }
    from_device(o, a.o, (n + TILES_SPARE) * qw);
    memcpy(p->o, o, n * qw);
    for (size_t i = n * qw / 2; i < (n + TILES_SPARE) * qw / 2; i++)
        if (o[i] != 0xFFFF) {
            CHECK(0, "written behind the end: element %zu", i);
            break;
        }
    free(states);
    free(o);
}

static void tiles_twin(tiles *p) { // the same by the C body
    static sala__cpu cpu;
    static int opened; // once, never closed
    sala_error err;
    sala__env env;
    int32_t *position = (int32_t *)tiles_memory((size_t)p->rows * 4);
    sala_seq seq = {p->slot, 0, p->rows, p->position + p->rows, p->position, 0, NULL};
    sala_rows rows = {p->rows, 1, 0, &seq, NULL, position, NULL, NULL};
    sala_gla_args a;
    memset(&env, 0, sizeof env);
    memset(&a, 0, sizeof a);
    if (!opened && sala__cpu_open(&env, 1, sala__ops_scratch(&p->dims, 4096), &cpu, &err)) exit(2);
    opened = 1;
    for (int i = 0; i < p->rows; i++) position[i] = p->position + i;
    a.dims = &p->dims;
    a.rows = &rows;
    a.q_norm = tiles_vector(p->plain ? NULL : p->q_norm);
    a.k_norm = tiles_vector(p->plain ? NULL : p->k_norm);
    a.cos_sin = p->plain ? NULL : p->cos_sin;
    a.slopes = p->slopes;
    a.q = p->q;
    a.raw_k = a.k = p->k;
    a.v = p->v;
    a.state = p->state;
    a.o = p->o;
    a.copies = p->copies;
    memcpy(a.copy_after, p->copy_after, sizeof a.copy_after);
    memcpy(a.copy_to, p->copied, sizeof a.copy_to);
    sala__op_gla_prefill(&cpu, &a);
    free(position);
}

// Largest difference of two heads of a state, in parts of the largest element.
static double tiles_state_error(const float *a, const float *b) {
    double most = 0, scale = 1e-30;
    for (int i = 0; i < 128 * 128; i++) {
        if (!(fabs((double)a[i] - b[i]) <= most)) most = fabs((double)a[i] - b[i]); // NaN counts
        if (fabs((double)b[i]) > scale) scale = fabs((double)b[i]);
    }
    return most / scale;
}

// The stretch by the device, cut every so many rows, and (left in *p) by the twin, from the same states.
static void tiles_both(tiles *p, int every, float *state, uint16_t *o) {
    size_t states = tiles_states(p) * 4;
    float *before = (float *)tiles_memory(states);
    memcpy(before, p->state, states);
    tiles_device(p, every);
    memcpy(state, p->state, states);
    memcpy(o, p->o, (size_t)p->rows * tiles_q_width(p) * 2);
    memcpy(p->state, before, states);
    tiles_twin(p);
    free(before);
}

// The device against the twin. Parts of BF16 are good for 2^-16 of each term, so a state is within 5e-5 of its
// largest element (one part alone: 2e-3), and few o round to another BF16 than the twin's, by one step at most.
static void tiles_check(int heads, int kv_heads, int position, int rows) {
    sala_dims m = tiles_dims(heads, kv_heads);
    tiles *p = tiles_make(&m, rows, position);
    size_t count = (size_t)rows * tiles_q_width(p), other = 0;
    float *state = (float *)tiles_memory(tiles_states(p) * 4);
    uint16_t *o = (uint16_t *)tiles_memory(count * 2);
    tiles_both(p, 65536, state, o);
    for (size_t i = 0; i < tiles_states(p) / 16384; i++) {
        double most = i / (size_t)heads == (size_t)p->slot ? 5e-5 : 0, // others' are untouched
            error = tiles_state_error(state + i * 16384, p->state + i * 16384);
        CHECK(error <= most, "%d/%d heads, %d rows from %d: state %zu is off by %g", heads,
              kv_heads, rows, position, i, error);
    }
    for (size_t i = 0; i < count; i++) {
        float x = sala_bf16_f32(o[i]), y = sala_bf16_f32(p->o[i]), scale = 0;
        if (o[i] == p->o[i]) continue;
        other++;
        for (size_t c = i / 128 * 128; c < i / 128 * 128 + 128; c++)
            scale = fmaxf(scale, fabsf(sala_bf16_f32(p->o[c])));
        if (!(fabsf(x - y) <= fabsf(y) * 0x1p-7f + 1e-4f * scale)) {
            CHECK(0, "%d/%d heads, %d rows from %d: row %zu, head %zu: %g, not %g", heads, kv_heads,
                  rows, position, i / 128 / (size_t)heads, i / 128 % (size_t)heads, (double)x,
                  (double)y);
            break;
        }
    }
    CHECK(other <= 2 + count / 50, "%d/%d heads: %zu of %zu o differ", heads, kv_heads, other,
          count);
    free(state);
    free(o);
    tiles_free(p);
}

// Norm and rotation come first, in place. Their rounding may move a BF16 of q or k by a step (see kernels_gla.h),
// so a sum over 128 of them is only near the twin's.
static void tiles_check_normed(int heads, int kv_heads, int position, int rows) {
    sala_dims m = tiles_dims(heads, kv_heads);
    tiles *p = tiles_make(&m, rows, position);
    size_t count = (size_t)rows * tiles_q_width(p), first = (size_t)(p->slot * heads) * 16384;
    float *state = (float *)tiles_memory(tiles_states(p) * 4);
    uint16_t *o = (uint16_t *)tiles_memory(count * 2);
    p->plain = 0;
    tiles_both(p, 64, state, o);
    for (size_t i = first; i < first + (size_t)heads * 16384; i += 16384) {
        double error = tiles_state_error(state + i, p->state + i);
        CHECK(error <= 4e-3, "state %zu is off by %g", i / 16384, error);
    }
    for (size_t i = 0; i < count; i += 128) {
        float most = 0, scale = 1e-30f;
        for (size_t c = i; c < i + 128; c++) {
            float x = sala_bf16_f32(o[c]), y = sala_bf16_f32(p->o[c]);
            if (!(fabsf(x - y) <= most)) most = fabsf(x - y);
            scale = fmaxf(scale, fabsf(y));
        }
        CHECK(most <= scale * 0x1p-6f, "o, vector %zu is off by %g of %g", i / 128, (double)most,
              (double)scale);
    }
    free(state);
    free(o);
    tiles_free(p);
}

static void prefill_gla_normed(void) {
    sala_dims m = tiles_dims(2, 1);
    device_open_units(&m, 3);
    tiles_check_normed(2, 1, 50, 40);
}

// The same tokens in one chunk and in several: equal bits, of what nobody wrote too.
static void prefill_gla_bits(void) {
    sala_dims m = tiles_dims(2, 1);
    device_open_units(&m, 3);
    tiles *p = tiles_make(&m, 300, 21);
    size_t states = tiles_states(p) * 4, count = 300 * tiles_q_width(p) * 2;
    float *before = (float *)tiles_memory(states), *state = (float *)tiles_memory(states);
    uint16_t *o = (uint16_t *)tiles_memory(count);
    memcpy(before, p->state, states);
    tiles_device(p, 65536);
    memcpy(state, p->state, states);
    memcpy(o, p->o, count);
    for (int every = 64; every <= 192; every += 64) {
        memcpy(p->state, before, states);
        memset(p->o, 0, count);
        tiles_device(p, every);
        CHECK(!memcmp(p->state, state, states) && !memcmp(p->o, o, count), "cut every %d", every);
    }
    free(before);
    free(state);
    free(o);
    tiles_free(p);
}

// Copies of the state on the way are what a chunk that ended there would have left, and change nothing.
static void prefill_gla_copies(void) {
    static const int after[][SALA_GLA_COPIES] = {
        {43, 171, 235}, {43, 107, 299}, {299, 0, 0}, {64, 192, 256}};
    sala_dims m = tiles_dims(2, 1);
    device_open_units(&m, 3);
    for (int round = 0; round < 4; round++)
        for (int twin = 0; twin < 2; twin++) {
            check_seed = 7;
            tiles *p = tiles_make(&m, 299, round < 3 ? 21 : 128);
            p->copies = round == 2 ? 1 : SALA_GLA_COPIES;
            size_t bytes = tiles_slot(p) * 4, own = (size_t)p->slot * tiles_slot(p);
            for (int i = 0; i < p->copies; i++) {
                p->copy_after[i] = after[round][i];
                p->copied[i] = (float *)tiles_memory(bytes);
            }
            if (twin)
                tiles_twin(p);
            else
                tiles_device(p, 65536);
            for (int i = 0; i <= p->copies; i++) {
                check_seed = 7;
                tiles *q = tiles_make(&m, 299, round < 3 ? 21 : 128);
                if (i < p->copies) q->rows = p->copy_after[i];
                if (twin)
                    tiles_twin(q);
                else
                    tiles_device(q, 65536);
                const float *is = i < p->copies ? p->copied[i] : p->state + own;
                CHECK(!memcmp(is, q->state + own, bytes), "twin %d: copy %d of round %d", twin, i,
                      round);
                tiles_free(q);
            }
            for (int i = 0; i < p->copies; i++) free(p->copied[i]);
            tiles_free(p);
        }
}

static void prefill_gla_twin(void) {
    static const int size[][2] = {{0, 1}, {5, 63}, {128, 64}, {63, 66}, {37, 200}};
    sala_dims m = tiles_dims(2, 2);
    device_open_units(&m, 3);
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        tiles_check(2, 2, size[i][0], size[i][1]);
}

static void prefill_gla_groups(void) {
    static const int heads[][2] = {{3, 1}, {4, 2}, {16, 1}};
    for (int i = 0; i < 3; i++) {
        sala_dims m = tiles_dims(heads[i][0], heads[i][1]);
        device_open_units(&m, 3);
        tiles_check(heads[i][0], heads[i][1], 60, i < 2 ? 70 : 20);
    }
}

static void prefill_gla_long(void) { // nothing drifts
    sala_dims m = tiles_dims(1, 1);
    device_open_units(&m, 3);
    tiles_check(1, 1, 1000, 2000);
}
