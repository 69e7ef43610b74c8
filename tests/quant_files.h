/*  quant_files.h - random models in exactly the layouts that 4-bit checkpoints have (nvfp4.md 4): the released
    ones are large. Used by the tests and by tools/make_models.c; included after sala.h with its implementation.

    A linear layer is a set of numbers (codes, scales, zero points: functions of a seed) and each layout a way of
    writing them down. quant_value is what an element then means, so a test can say what a loader must find.
    `dequantised` writes the same model with plain numbers. */
#ifndef SALA_QUANT_FILES_H
#define SALA_QUANT_FILES_H

#include <ctype.h>

enum { QUANT_OWN, QUANT_FUSED, QUANT_FUSED_EACH, QUANT_FUSED_NAMES }; // see `fused`

typedef struct quant_options {
    int kind;        // SALA__PLAIN, SALA__GPTQ, SALA__COMPRESSED, SALA__MODELOPT; 0: all, in turn
    int group;       // GPTQ: k that share a scale, -1: all
    int asymmetric;  // GPTQ: zero points other than 8
    int v2, f16;     // GPTQ: checkpoint_format gptq_v2; scales in F16
    int g_idx;       // GPTQ: with the (trivial) g_idx
    int weight_only; // NVFP4: no scales of inputs
    int fused; // qkv_proj and gate_up_proj: with one F32 scale, with one for each part in one tensor,
               // or with those of the parts under their own names
    int head;   // the head too
    int powers; // F32 scales are powers of two
    int shards; // files; 0: one
    int beside; // the scheme stands in hf_quant_config.json or quantize_config.json, not in config.json
    const char *dequantised; // NULL, or "BF16" or "F32": the same numbers, unquantised
    // Of an EAGLE-3 head: its target's config.json (NULL: a whole model), and what heads differ in.
    const char *target;
    int names;  // QUANT_SPECFORGE ..
    int bias;   // fc.bias
    int embed;  // an embedding of its own
    int shared; // no lm_head: the target's
    int tables; // d2t 1, t2d 2
    uint64_t seed;
} quant_options;

enum { QUANT_SPECFORGE, QUANT_PREFIXED, QUANT_NEMO }; // midlayer., model.midlayer., layers.0.

typedef struct quant_layer { // one tensor of the model
    sala__item item;
    int kind, group, index;
    uint64_t seed;
    float global, input; // F32 scales: multipliers
} quant_layer;

typedef struct quant_tensor { // one tensor of the file
    char name[200];
    const char *dtype;
    int rank;
    int64_t shape[2];
    const quant_layer *part[3];
    int parts;
    float values[3]; // if it is F32 scales
    // Faults that a test wants: other contents, or one or two other bytes.
    int zeros, poked;
    int64_t poke_at;
} quant_tensor;

typedef struct quant_model {
    sala__config config;
    sala__weights weights; // shapes alone
    quant_layer *layers;   // [layer_count]
    quant_tensor *tensors; // [tensor_count]
    int64_t *d2t;          // [draft_vocab]
    int layer_count, tensor_count;
    quant_options o;
} quant_model;

static inline void quant_die(const char *what, const char *why) {
    int named = strncmp(why, what, strlen(what)) == 0;
    fprintf(stderr, "cannot make a model: %s%s%s\n", named ? "" : what, named ? "" : ": ", why);
    exit(2);
}

// ---- the numbers ----

static inline uint64_t quant_hash(const quant_layer *l, int salt, int64_t n, int64_t k) {
    return sala_mix64(l->seed + (uint64_t)salt * 0x9E3779B97F4A7C15u +
                      (uint64_t)(n * l->item.k + k) * 0xBF58476D1CE4E5B9u);
}

static inline int quant_code(const quant_layer *l, int64_t n, int64_t k) {
    return (int)(quant_hash(l, 1, n, k) >> 60);
}

static inline int quant_is_nvfp4(const quant_layer *l) {
    return l->kind == SALA__COMPRESSED || l->kind == SALA__MODELOPT;
}

static inline uint8_t quant_e4m3(const quant_layer *l, int64_t n,
                                 int64_t g) { // 64 .. 240, and the odd ones
    static const uint8_t odd[] = {0x00, 0x01, 0x07, 0x08, 0x7E};
    uint64_t h = quant_hash(l, 2, n, g);
    return (uint8_t)(h % 97 < 5 ? odd[h % 97] : 0x68 + (h >> 32) % 16);
}

static inline uint16_t quant_scale16(const quant_layer *l, int f16, int powers, int64_t n,
                                     int64_t g) {
    double u = (double)(quant_hash(l, 3, n, g) >> 40) / 16777216.0;
    float x = (float)((0.5 + u) * (double)l->global);
    if (powers) x = (float)exp2(floor(log2((double)x)));
    return f16 ? sala_f32_f16(x) : sala_f32_bf16(x);
}

static inline int quant_zero(const quant_layer *l, const quant_options *o, int64_t n, int64_t g) {
    int v = (int)(quant_hash(l, 4, n, g) >> 60);
    return o->asymmetric ? v + !o->v2 : 8; // 1 .. 16 in v1, 0 .. 15 in v2
}

// Element (n, k) of the layer.
static inline float quant_value(const quant_layer *l, const quant_options *o, int64_t n,
                                int64_t k) {
    static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    int code = quant_code(l, n, k);
    int64_t g = k / l->group;
    if (quant_is_nvfp4(l)) {
        float q = code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
        return l->global * (q * sala_e4m3_f32(quant_e4m3(l, n, g)));
    }
    uint16_t bits = quant_scale16(l, o->f16, o->powers, n, g);
    float scale = o->f16 ? sala_f16_f32(bits) : sala_bf16_f32(bits);
    float steps = (float)(code - quant_zero(l, o, n, g));
    if (l->group == l->item.k) return scale * steps; // a row's scale is not rounded
    return sala_bf16_f32(sala_f32_bf16(sala_bf16_f32(sala_f32_bf16(scale)) * steps));
}

// ---- the tensors ----

static inline quant_tensor *quant_add(quant_model *m, const char *base, const char *suffix,
                                      const char *dtype, int64_t n,
                                      int64_t k) { // k < 0: a vector, n < 0: a scalar
    quant_tensor *t = &m->tensors[m->tensor_count++];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s.%s", base, suffix);
    t->dtype = dtype;
    t->rank = n < 0 ? 0 : k < 0 ? 1 : 2;
    t->shape[0] = n;
    t->shape[1] = k;
    return t;
}

static inline int quant_wants(const quant_model *m, const quant_layer *l) { // is it quantised?
    return l->kind > SALA__PLAIN && !m->o.dequantised;
}

// F32 scales, as `fused` says.
static inline void quant_add_scales(quant_model *m, const char *base, const char *suffix,
                                    quant_layer **l, int parts, int input, int divisor) {
    float value[3];
    for (int i = 0; i < parts; i++) {
        float x = input ? l[i]->input : l[i]->global;
        value[i] = divisor ? 1 / x : x;
    }
    int names = parts > 1 && m->o.fused == QUANT_FUSED_NAMES,
        each = parts > 1 && m->o.fused == QUANT_FUSED_EACH;
    for (int i = 0; i < (names ? parts : 1); i++) {
        char own[128];
        snprintf(own, sizeof own, "%.*s", (int)strlen(l[i]->item.name) - 7, l[i]->item.name);
        // ModelOpt writes scalars, compressed-tensors vectors of one.
        quant_tensor *t = quant_add(m, names ? own : base, suffix, "F32",
                                    each      ? parts
                                    : divisor ? 1
                                              : -1,
                                    -1);
        memcpy(t->values, value + i, sizeof *value * (size_t)(each ? parts : 1));
    }
}

// The target's token of each of a head's: the lower half of the lowest, the upper half of the highest.
static inline int64_t quant_target(const quant_model *m, int64_t i) {
    int64_t count = m->config.draft_vocab;
    return i < count / 2 ? i : m->config.dims.vocab - count + i;
}

static inline void quant_fill_table(const quant_model *m, const quant_tensor *t, char *to) {
    if (strcmp(t->dtype, "I64") == 0) memcpy(to, m->d2t, (size_t)t->shape[0] * 8);
    if (strcmp(t->dtype, "I64") == 0) return;
    memset(to, 0, (size_t)t->shape[0]);
    for (int64_t i = 0; i < m->config.draft_vocab; i++) to[quant_target(m, i)] = 1;
}

// All tensors of one layer, or of up to three that are fused.
static inline void quant_add_linear(quant_model *m, const char *base, quant_layer **l, int parts) {
    const quant_options *o = &m->o;
    int64_t rows = 0, k = l[0]->item.k, groups = k / l[0]->group;
    int first = m->tensor_count, kind = quant_wants(m, l[0]) ? l[0]->kind : SALA__PLAIN;
    for (int i = 0; i < parts; i++) rows += l[i]->item.n;
    if (kind == SALA__PLAIN) {
        int plain = !o->dequantised || l[0]->kind == SALA__PLAIN;
        quant_add(m, base, "weight", plain ? "BF16" : o->dequantised, rows,
                  l[0]->item.k == 1 ? -1 : k);
    } else if (kind == SALA__GPTQ) {
        quant_add(m, base, "qweight", "I32", k / 8, rows);
        quant_add(m, base, "qzeros", "I32", groups, rows / 8);
        quant_add(m, base, "scales", o->f16 ? "F16" : "BF16", groups, rows);
        if (o->g_idx) quant_add(m, base, "g_idx", "I32", k, -1);
    } else {
        int divisor = kind == SALA__COMPRESSED;
        quant_add(m, base, divisor ? "weight_packed" : "weight", "U8", rows, k / 2);
        quant_add(m, base, "weight_scale", "F8_E4M3", rows, k / 16);
        quant_add_scales(m, base, divisor ? "weight_global_scale" : "weight_scale_2", l, parts, 0,
                         divisor);
        if (!o->weight_only)
            quant_add_scales(m, base, divisor ? "input_global_scale" : "input_scale", l, parts, 1,
                             divisor);
    }
    for (int i = first; i < m->tensor_count; i++) {
        m->tensors[i].parts = parts;
        for (int p = 0; p < parts; p++) m->tensors[i].part[p] = l[p];
    }
}

static inline int64_t quant_size(const char *dtype) {
    return strcmp(dtype, "I64") == 0                                 ? 8
           : strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0  ? 4
           : strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0 ? 2
                                                                     : 1;
}

static inline int64_t quant_bytes(const quant_tensor *t) {
    return (t->rank > 0 ? t->shape[0] : 1) * (t->rank > 1 ? t->shape[1] : 1) * quant_size(t->dtype);
}

static inline int quant_ends(const quant_tensor *t, const char *suffix) {
    size_t n = strlen(t->name), s = strlen(suffix);
    return n > s && t->name[n - s - 1] == '.' && strcmp(t->name + n - s, suffix) == 0;
}

// Row n of a whole: which part's, and the row there.
static inline const quant_layer *quant_row(const quant_tensor *t, int64_t *n) {
    int p = 0;
    while (*n >= t->part[p]->item.n) *n -= t->part[p++]->item.n;
    return t->part[p];
}

static inline void quant_fill_plain(const quant_model *m, const quant_tensor *t, char *to) {
    int64_t rows = t->shape[0], k = t->rank > 1 ? t->shape[1] : 1, size = quant_size(t->dtype);
    for (int64_t r = 0; r < rows; r++) {
        int64_t n = r;
        const quant_layer *l = quant_row(t, &n);
        if (l->kind == SALA__PLAIN) { // the numbers of a synthetic model
            uint64_t seed;
            float scale, offset;
            sala__synthetic_shape(&m->config, &m->weights, &l->item, m->o.seed, l->index, &seed,
                                  &scale, &offset);
            sala__synthetic_fill((uint16_t *)(void *)to + r * k, (uint64_t)(n * k), (uint64_t)k,
                                 seed, scale, offset);
            continue;
        }
        for (int64_t i = 0; i < k; i++) {
            float x = quant_value(l, &m->o, n, i);
            uint16_t half = sala_f32_bf16(x);
            memcpy(to + (r * k + i) * size, size == 4 ? (void *)&x : (void *)&half, (size_t)size);
        }
    }
}

static inline void quant_fill_gptq(const quant_model *m, const quant_tensor *t, char *to) {
    const quant_options *o = &m->o;
    int64_t rows = t->shape[0], columns = t->rank > 1 ? t->shape[1] : 1;
    int codes = quant_ends(t, "qweight"), zeros = quant_ends(t, "qzeros");
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            uint32_t word = 0;
            int64_t n = zeros ? 8 * c : c;
            const quant_layer *l = quant_row(t, &n);
            for (int i = 0; i < 8 && codes; i++)
                word |= (uint32_t)quant_code(l, n, 8 * r + i) << 4 * i;
            for (int i = 0; i < 8 && zeros; i++)
                word |= (uint32_t)(quant_zero(l, o, n + i, r) - !o->v2) << 4 * i;
            if (quant_ends(t, "g_idx")) word = (uint32_t)(r / t->part[0]->group);
            if (quant_ends(t, "scales")) {
                uint16_t half = quant_scale16(l, o->f16, o->powers, n, r);
                memcpy(to + 2 * (r * columns + c), &half, 2);
            } else {
                memcpy(to + 4 * (r * columns + c), &word, 4);
            }
        }
}

static inline void quant_fill(const quant_model *m, const quant_tensor *t, char *to) {
    int64_t rows = t->shape[0], columns = t->shape[1];
    if (t->zeros) {
        memset(to, 0, (size_t)quant_bytes(t));
    } else if (!t->parts) {
        quant_fill_table(m, t, to);
    } else if (t->values[0] != 0) {
        memcpy(to, t->values, (size_t)quant_bytes(t));
    } else if (quant_size(t->dtype) == 1) {
        for (int64_t r = 0; r < rows; r++) {
            int64_t n = r;
            const quant_layer *l = quant_row(t, &n);
            for (int64_t c = 0; c < columns; c++)
                to[r * columns + c] =
                    (char)(quant_ends(t, "weight_scale")
                               ? quant_e4m3(l, n, c)
                               : quant_code(l, n, 2 * c) | quant_code(l, n, 2 * c + 1) << 4);
        }
    } else if (quant_ends(t, "weight") || quant_ends(t, "bias")) {
        quant_fill_plain(m, t, to);
    } else {
        quant_fill_gptq(m, t, to);
    }
}

// ---- the files ----

static inline FILE *quant_create(const char *folder, const char *name) {
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f) quant_die(path, "cannot write");
    return f;
}

static inline void quant_close(FILE *f, const char *name) {
    if (ferror(f) || fclose(f) != 0) quant_die(name, "cannot write: is the disk full?");
}

static inline int quant_shard_of(const quant_model *m, int tensor) {
    int shards = m->o.shards > 1 ? m->o.shards : 1;
    return (int)((int64_t)tensor * shards / m->tensor_count);
}

static inline void quant_shard_name(const quant_model *m, int shard, char name[64]) {
    if (m->o.shards > 1)
        snprintf(name, 64, "model-%05d-of-%05d.safetensors", shard + 1, m->o.shards);
    else
        snprintf(name, 64, "model.safetensors");
}

// Tensors of large elements first, so that all are aligned.
static inline void quant_write_shard(const quant_model *m, const char *folder, int shard) {
    char name[64], *header = (char *)calloc((size_t)m->tensor_count + 2, 320), *at = header;
    quant_shard_name(m, shard, name);
    int64_t offset = 0;
    at += sprintf(at, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int64_t size = 8; size > 0; size /= 2)
        for (int i = 0; i < m->tensor_count; i++) {
            const quant_tensor *t = &m->tensors[i];
            if (quant_size(t->dtype) != size || quant_shard_of(m, i) != shard) continue;
            at += sprintf(at, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
            for (int d = 0; d < t->rank; d++)
                at += sprintf(at, "%s%lld", d ? "," : "", (long long)t->shape[d]);
            at += sprintf(at, "],\"data_offsets\":[%lld,%lld]}", (long long)offset,
                          (long long)(offset + quant_bytes(t)));
            offset += quant_bytes(t);
        }
    at += sprintf(at, "}");
    while ((at - header) % 8) *at++ = ' ';
    uint64_t length = (uint64_t)(at - header);
    FILE *f = quant_create(folder, name);
    fwrite(&length, 8, 1, f);
    fwrite(header, 1, (size_t)length, f);
    free(header);
    for (int64_t size = 8; size > 0; size /= 2)
        for (int i = 0; i < m->tensor_count; i++) {
            const quant_tensor *t = &m->tensors[i];
            if (quant_size(t->dtype) != size || quant_shard_of(m, i) != shard) continue;
            char *bytes = (char *)malloc((size_t)quant_bytes(t));
            if (!bytes) quant_die(t->name, "out of memory");
            quant_fill(m, t, bytes);
            if (t->poked) memcpy(bytes + t->poke_at, &t->poked, t->poked > 0xFF ? 2 : 1);
            fwrite(bytes, 1, (size_t)quant_bytes(t), f);
            free(bytes);
        }
    quant_close(f, name);
}

static inline void quant_write_index(const quant_model *m, const char *folder) {
    char name[64];
    FILE *f = quant_create(folder, "model.safetensors.index.json");
    fprintf(f, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (int i = 0; i < m->tensor_count; i++) {
        quant_shard_name(m, quant_shard_of(m, i), name);
        fprintf(f, "%s\"%s\":\"%s\"", i ? "," : "", m->tensors[i].name, name);
    }
    fprintf(f, "}}");
    quant_close(f, "the index");
}

// What the makers of such files write about them.
static inline void quant_scheme_text(const quant_model *m, char out[1024]) {
    const quant_options *o = &m->o;
    if (o->kind == SALA__COMPRESSED)
        snprintf(
            out, 1024,
            "{\"quant_method\":\"compressed-tensors\",\"format\":\"nvfp4-pack-quantized\","
            "\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{\"num_bits\":4,"
            "\"type\":\"float\",\"strategy\":\"tensor_group\",\"group_size\":16,\"symmetric\":true,"
            "\"dynamic\":false},\"input_activations\":%s}},\"ignore\":[\"lm_head\"],"
            "\"kv_cache_scheme\":null}",
            o->weight_only ? "null"
                           : "{\"num_bits\":4,\"type\":\"float\",\"group_size\":16,"
                             "\"dynamic\":\"local\"}");
    else if (o->kind == SALA__MODELOPT)
        snprintf(out, 1024,
                 "{%s\"quant_algo\":\"%s\",\"group_size\":16,\"kv_cache_quant_algo\":null,"
                 "\"exclude_modules\":[\"lm_head\"]}",
                 o->beside ? "" : "\"quant_method\":\"modelopt\",",
                 o->weight_only ? "W4A16_NVFP4" : "NVFP4");
    else
        snprintf(out, 1024, "{%s\"bits\":4,\"group_size\":%d,\"sym\":%s,\"desc_act\":false%s}",
                 o->beside ? "" : "\"quant_method\":\"gptq\",", o->group ? o->group : 32,
                 o->asymmetric ? "false" : "true",
                 o->v2 ? ",\"checkpoint_format\":\"gptq_v2\"" : "");
}

// config.json with the scheme in it, or that beside it.
static inline void quant_write_configs(const quant_model *m, const char *folder,
                                       const char *config) {
    sala__file file;
    sala_error err;
    char scheme[1024];
    if (sala__map_file(config, &file, &err) < 0) quant_die(config, err.text);
    int64_t size = file.size;
    while (size > 0 && file.data[size - 1] != '}') size--;
    size--;
    while (size > 0 && isspace(file.data[size - 1])) size--;
    int quantised = m->o.kind != SALA__PLAIN && !m->o.dequantised;
    quant_scheme_text(m, scheme);
    FILE *f = quant_create(folder, "config.json");
    fwrite(file.data, 1, (size_t)size, f);
    if (quantised && !m->o.beside) fprintf(f, ",\n  \"quantization_config\": %s", scheme);
    fprintf(f, "\n}\n");
    quant_close(f, "config.json");
    sala__unmap_file(&file);
    if (!quantised || !m->o.beside) return;
    int modelopt = m->o.kind == SALA__MODELOPT;
    f = quant_create(folder, modelopt ? "hf_quant_config.json" : "quantize_config.json");
    fprintf(
        f,
        modelopt
            ? "{\"producer\":{\"name\":\"modelopt\",\"version\":\"0.29\"},\"quantization\":%s}\n"
            : "%s\n",
        scheme);
    quant_close(f, "the scheme");
}

// ---- a model ----

static inline void quant_free(quant_model *m) {
    sala__env env = {NULL, NULL, NULL, NULL};
    sala__weights_free(&env, &m->weights);
    sala__config_free(&env, &m->config);
    free(m->layers);
    free(m->tensors);
    free(m->d2t);
}

// Which layout a tensor has. With kind 0 they take turns; GPTQ wants a multiple of 8 outputs.
static inline int quant_kind_of(const quant_model *m, const sala__item *item, int turn) {
    int linear =
        item->k > 1 && item->weight != &m->weights.embed && (item->layer >= 0 || m->o.head);
    int kind = m->o.kind ? m->o.kind : SALA__PLAIN + turn % 4;
    return !linear || (kind == SALA__GPTQ && item->n % 8) ? SALA__PLAIN : kind;
}

static inline void quant_layer_numbers(const quant_options *o, quant_layer *l) {
    int64_t k = l->item.k;
    l->group = quant_is_nvfp4(l)                   ? 16
               : o->group > 0 && k % o->group == 0 ? o->group
               : o->group < 0                      ? (int)k
                                                   : 32;
    if (l->kind == SALA__PLAIN) l->group = 1;
    // Codes and scales have about these sizes; fused layers get different scales.
    double size = (quant_is_nvfp4(l) ? 2.93 * 130 : 4.6) * (1 + (double)(l->seed % 3)) / 2;
    l->global = (float)(1 / (sqrt((double)k) * size));
    l->input = (float)((4 + (double)(l->seed >> 8 & 7)) / 2688);
    if (o->powers) l->global = (float)exp2(floor(log2((double)l->global)));
}

static inline int quant_draft_config(const char *config, quant_model *m, sala_error *err) {
    sala__env env = {NULL, NULL, NULL, NULL};
    sala__config target;
    int code = sala__config_read(&env, m->o.target, &target, err);
    if (code == 0) code = sala__draft_config_read(&env, config, &target, &m->config, err);
    sala__config_free(&env, &target);
    m->config.fc_bias = m->o.bias;
    m->config.own_embed = m->o.embed;
    m->config.own_head = !m->o.shared;
    return code < 0;
}

// The tables of a head, and names as its maker has them.
static inline void quant_draft_tensors(quant_model *m) {
    int64_t count = m->config.draft_vocab;
    for (int i = 0; i < m->tensor_count; i++) {
        quant_tensor *t = &m->tensors[i];
        char name[200], *after = strstr(t->name, "midlayer.");
        int head = strncmp(t->name, "lm_head.", 8) == 0; // stands beside the model
        if (strcmp(t->name, "fc_bias.weight") == 0) strcpy(t->name, "fc.bias");
        snprintf(name, sizeof name, "%s%.180s",
                 after && m->o.names == QUANT_NEMO       ? "layers.0."
                 : !head && m->o.names == QUANT_PREFIXED ? "model."
                                                         : "",
                 after && m->o.names == QUANT_NEMO ? after + 9 : t->name);
        strcpy(t->name, name);
    }
    m->d2t = (int64_t *)calloc((size_t)count, sizeof *m->d2t);
    if (!m->d2t) quant_die("d2t", "out of memory");
    for (int64_t i = 0; i < count; i++) m->d2t[i] = quant_target(m, i) - i;
    for (int i = 0; i < 2; i++) {
        quant_tensor *t = &m->tensors[m->tensor_count];
        if (!(m->o.tables >> i & 1)) continue;
        memset(t, 0, sizeof *t);
        strcpy(t->name, i ? "t2d" : "d2t");
        t->dtype = i ? "BOOL" : "I64";
        t->rank = 1;
        t->shape[0] = i ? m->config.dims.vocab : count;
        m->tensor_count++;
    }
}

// All layers and tensors of a model of config's geometry.
static inline void quant_make(const char *config, const quant_options *o, quant_model *m) {
    sala__env env = {NULL, NULL, NULL, NULL};
    sala_error err;
    memset(m, 0, sizeof *m);
    m->o = *o;
    if (o->target ? quant_draft_config(config, m, &err)
                  : sala__config_read(&env, config, &m->config, &err) < 0)
        quant_die(config, err.text);
    memset(&m->config.scheme, 0, sizeof m->config.scheme);
    if (sala__weights_plan(&env, &m->config, &m->weights, &err) < 0) quant_die(config, err.text);
    int count = sala__item_count(&m->config);
    m->layers = (quant_layer *)calloc((size_t)count, sizeof *m->layers);
    m->tensors = (quant_tensor *)calloc((size_t)count * 5 + 2, sizeof *m->tensors);
    if (!m->layers || !m->tensors) quant_die(config, "out of memory");
    for (int i = 0; i < count; i++) {
        quant_layer *l = &m->layers[m->layer_count];
        if (!sala__item_at(&m->config, &m->weights, i, &l->item)) continue;
        l->index = i;
        l->seed = sala_mix64(o->seed * 1000003 + (uint64_t)i);
        l->kind = quant_kind_of(m, &l->item, m->layer_count++);
        quant_layer_numbers(o, l);
    }
    for (int i = 0; i < m->layer_count; i++) {
        quant_layer *l = &m->layers[i], *part[3] = {l, l + 1, l + 2};
        char base[128];
        int qkv = strstr(l->item.name, "q_proj.") != NULL,
            pair = strstr(l->item.name, "gate_proj.") != NULL;
        int parts = o->fused == QUANT_OWN ? 1 : qkv ? 3 : pair ? 2 : 1;
        for (int p = 1; p < parts && o->fused == QUANT_FUSED; p++)
            l[p].global = l->global, l[p].input = l->input;
        snprintf(base, sizeof base, "%.*s", (int)strlen(l->item.name) - 7, l->item.name);
        if (parts > 1) snprintf(strrchr(base, '.'), 16, ".%s", qkv ? "qkv_proj" : "gate_up_proj");
        quant_add_linear(m, base, part, parts);
        i += parts - 1;
    }
    if (o->target) quant_draft_tensors(m);
}

// Element (n, k) of a weight as kernels.h defines it, by itself.
static inline float quant_element(const sala_weight *w, int64_t n, int64_t k) {
    int64_t at = n * w->k + k,
            group = w->format >= SALA_NVFP4 ? n * (w->k / w->group) + k / w->group : 0;
    int code =
        w->format >= SALA_NVFP4 ? ((const uint8_t *)w->data)[at / 2] >> (at & 1) * 4 & 15 : 0;
    if (w->format == SALA_NVFP4)
        return w->alpha[n] *
               (sala_e2m1_f32((uint8_t)code) * sala_e4m3_f32(((const uint8_t *)w->scale)[group]));
    if (w->format == SALA_INT4) {
        int zero = w->zero ? w->zero[group] : 8;
        float x = (float)(code - zero) * sala_bf16_f32(((const uint16_t *)w->scale)[group]);
        return w->alpha[n] * sala_bf16_f32(sala_f32_bf16(x));
    }
    return w->format == SALA_F32 ? ((const float *)w->data)[at]
                                 : sala_bf16_f32(((const uint16_t *)w->data)[at]);
}

// Elements of a loaded weight that are not, bit by bit, those of the layer that was written.
static inline int64_t quant_differing(const quant_model *m, const quant_layer *want,
                                      const sala_weight *w) {
    uint64_t seed;
    float scale, offset;
    int64_t wrong = 0;
    sala__synthetic_shape(&m->config, &m->weights, &want->item, m->o.seed, want->index, &seed,
                          &scale, &offset);
    for (int64_t n = 0; n < w->n; n++)
        for (int64_t k = 0; k < w->k; k++) {
            uint64_t e = (uint64_t)(n * w->k + k);
            if (want->kind == SALA__PLAIN)
                wrong += ((const uint16_t *)w->data)[e] !=
                         sala_synthetic(sala_synthetic_hash(seed, e), e, scale, offset);
            else
                wrong += quant_element(w, n, k) != quant_value(want, &m->o, n, k);
        }
    return wrong;
}

// Write it all. `folder` must exist.
static inline void quant_write(const quant_model *m, const char *folder, const char *config) {
    for (int s = 0; s < (m->o.shards > 1 ? m->o.shards : 1); s++) quant_write_shard(m, folder, s);
    if (m->o.shards > 1) quant_write_index(m, folder);
    quant_write_configs(m, folder, config);
}

#endif
