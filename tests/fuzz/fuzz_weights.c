#define SALA_IMPLEMENTATION
#include "../../sala.h"
// The tensors of 4-bit checkpoints. Input: a layout, an allocation that fails, then changes of four bytes each to a
// good model: which tensor, what about it, and a value. What the header's rules guarantee (as many bytes as
// dtype and shape say) holds; all else may be wrong. What loads must be numbers that may be multiplied.
#include "fuzz.h"
#include "../quant_files.h"

#define CONFIG "tests/data/vectors/tiny/config.json"

static quant_model models[8];
static char *bytes[8][512]; // [layout][tensor] as written

static const quant_model *good_model(int layout) {
    quant_model *m = &models[layout];
    quant_options o;
    if (m->tensors) return m;
    memset(&o, 0, sizeof o);
    o.kind = layout % 4 == 0 ? 0 : SALA__PLAIN + layout % 4;
    o.group = 32;
    o.fused = layout > 4 ? QUANT_FUSED_EACH : QUANT_OWN;
    o.asymmetric = o.g_idx = layout > 3;
    quant_make(CONFIG, &o, m);
    REQUIRE(m->tensor_count < 512);
    for (int i = 0; i < m->tensor_count; i++) {
        bytes[layout][i] = (char *)calloc((size_t)quant_bytes(&m->tensors[i]) + 1, 1);
        quant_fill(m, &m->tensors[i], bytes[layout][i]);
    }
    return m;
}

// One change. A tensor of another size has other bytes, exactly as many as it wants.
static void change(sala__checkpoint *c, const uint8_t *four) {
    static const char *const dtypes[] = {"U8",  "I8",   "I32",     "F32",
                                         "F16", "BF16", "F8_E4M3", "F8_E8M0"};
    static const char *const suffixes[] = {
        "qweight",         "weight", "weight_scale", "weight_packed",
        "pre_quant_scale", "scales", "k_scale",      "weight_global_scale"};
    sala__tensor *t = &c->tensors[four[0] % c->tensor_count];
    int64_t value = four[2] + 256 * (four[3] & 63), count = 1;
    char *data = (char *)(uintptr_t)t->data;
    switch (four[1] % 6) {
    case 0:
        if (t->bytes) data[value * 37 % t->bytes] = (char)four[3];
        return;
    case 1:
        if (t->bytes >= 4) memcpy(data, &four[2], 2), memcpy(data + 2, &four[2], 2);
        return;
    case 2: t->rank = four[2] % 4; break;
    case 3: t->shape[four[3] >> 6 & 1] = value; break;
    case 4: sala__dtype_read(dtypes[value % 8], t); break;
    case 5: { // its name becomes another of the same layer
        char *name = (char *)(uintptr_t)t->name, *dot = strrchr(name, '.');
        if (dot) snprintf(dot + 1, 40, "%s", suffixes[value % 8]);
        return;
    }
    }
    for (int i = 0; i < t->rank; i++)
        count *= t->shape[i] < 4096 ? t->shape[i] : t->shape[i] % 4096;
    for (int i = 0; i < t->rank; i++) t->shape[i] %= 4096;
    int64_t size = quant_size(t->dtype) * count;
    if (size == t->bytes) return;
    if (size > 1 << 24) t->rank = 1, t->shape[0] = size = 0;
    char *other = (char *)malloc(size ? (size_t)size : 1);
    for (int64_t i = 0; i < size; i++) other[i] = (char)(t->bytes ? data[i % t->bytes] : 0);
    free(data);
    t->data = other;
    t->bytes = size;
}

static void checkpoint_make(const quant_model *m, int layout, sala__checkpoint *c) {
    c->folder = (char *)(uintptr_t) "fuzz";
    c->tensors = (sala__tensor *)calloc((size_t)m->tensor_count, sizeof *c->tensors);
    c->tensor_count = (size_t)m->tensor_count;
    for (int i = 0; i < m->tensor_count; i++) {
        const quant_tensor *from = &m->tensors[i];
        sala__tensor *t = &c->tensors[i];
        char *name = (char *)calloc(1, 256);
        snprintf(name, 200, "%s", from->name);
        sala__dtype_read(from->dtype, t);
        t->name = name;
        t->file = "fuzz/model.safetensors";
        t->rank = from->rank;
        for (int d = 0; d < t->rank; d++) t->shape[d] = from->shape[d];
        t->bytes = quant_bytes(from);
        char *data = (char *)malloc(t->bytes ? (size_t)t->bytes : 1);
        memcpy(data, bytes[layout][i], (size_t)t->bytes);
        t->data = data;
    }
}

static void check_weights(const sala__config *c, sala__weights *w) {
    sala__item item;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        const sala_weight *x = item.weight;
        REQUIRE(x->data && x->n == item.n && x->k == item.k);
        if (x->format < SALA_NVFP4) continue;
        REQUIRE(x->group >= 16 && x->k % x->group == 0 && x->input_scale >= 0 &&
                x->input_scale <= FLT_MAX);
        REQUIRE(item.layer >= 0 || x == &w->head);
        for (int n = 0; n < x->n; n++)
            for (int k = 0; k < x->k; k += 16) {
                float out[16];
                sala__load_weight4(x, n, k, out);
                for (int e = 0; e < 16; e++) REQUIRE(!isnan(out[e] * x->alpha[n]) || isinf(out[e]));
            }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_memory memory = {0, 0, 0};
    sala__env env = {&memory, fuzz_allocate, fuzz_log, NULL};
    sala__checkpoint c;
    sala__weights w;
    sala_error err;
    if (size < 2) return 0;
    int layout = data[0] & 7;
    const quant_model *m = good_model(layout);
    sala__config config = m->config; // its lists are only read
    config.scheme.kind = m->o.kind ? m->o.kind : SALA__GPTQ;
    config.scheme.zero_offset = data[0] >> 3 & 1;
    config.scheme.symmetric = data[0] >> 4 & 1;
    memory.fail_at = data[1];
    memset(&c, 0, sizeof c);
    checkpoint_make(m, layout, &c);
    for (size_t i = 2; i + 4 <= size && i < 64; i += 4) change(&c, data + i);
    int code = sala__tensors_sort(&c, &err);
    if (code == 0) code = sala__weights_bind(&env, &c, &config, &w, &err);
    if (code == 0) {
        code = sala__weights_load(&env, &c, &config, &w, &err);
        if (code == 0) check_weights(&config, &w);
        if (code == 0) code = sala__weights_check(&env, &config, &w, &c, &err);
        sala__weights_free(&env, &w);
    }
    if (code < 0) fuzz_error(code, &err);
    for (size_t i = 0; i < c.tensor_count; i++) {
        free((void *)(uintptr_t)c.tensors[i].data);
        free((void *)(uintptr_t)c.tensors[i].name);
    }
    free(c.tensors);
    REQUIRE(memory.live == 0);
    return 0;
}
