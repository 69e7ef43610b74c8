#define SALA_IMPLEMENTATION
#include "../sala.h"
// Loading of 4-bit checkpoints: models in every layout, written by quant_files.h, give exactly the numbers that
// were written, and what their unquantised copies compute; faults have their own messages.
#include "check.h"
#include "counted.h"
#include "model.h"
#include "quant_files.h"
#include <dirent.h>

// ---- a folder and counted memory ----

static counter counted;

static const sala__env env = {&counted, counting, logging, NULL};

static char folder[512];

static void folder_make(void) {
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/sala-quant-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) die(folder, "cannot make a folder");
}

static void folder_remove(void) {
    char path[1200];
    DIR *d = opendir(folder);
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    if (d) closedir(d);
    rmdir(folder);
}

// ---- loading ----

typedef struct loaded {
    sala__config config;
    sala__checkpoint checkpoint;
    sala__weights weights;
} loaded;

static void unload(loaded *l) {
    sala__weights_free(&env, &l->weights);
    sala__checkpoint_close(&l->checkpoint);
    sala__config_free(&env, &l->config);
}

static int load(loaded *l, sala_error *err) { // nothing is left on errors
    char path[1200];
    memset(l, 0, sizeof *l);
    err->code = 0;
    err->text[0] = 0;
    snprintf(path, sizeof path, "%s/config.json", folder);
    int code = sala__config_read(&env, path, &l->config, err);
    if (code == 0) code = sala__scheme_files_read(&env, folder, &l->config, err);
    if (code == 0) code = sala__checkpoint_open(&env, folder, &l->checkpoint, err);
    counted.bytes = 0;
    if (code == 0) code = sala__weights_bind(&env, &l->checkpoint, &l->config, &l->weights, err);
    if (code == 0) code = sala__weights_load(&env, &l->checkpoint, &l->config, &l->weights, err);
    if (code == 0) code = sala__weights_check(&env, &l->config, &l->weights, &l->checkpoint, err);
    if (code < 0) unload(l);
    return code;
}

// Every element, bit by bit; plain weights by their sums in the model that a hash makes.
static void compare(const char *what, const quant_model *m, loaded *l) {
    sala__item item;
    int at = 0, quantised = 0;
    for (int i = 0; i < sala__item_count(&l->config); i++) {
        if (!sala__item_at(&l->config, &l->weights, i, &item)) continue;
        const quant_layer *want = &m->layers[at++];
        const sala_weight *w = item.weight;
        int64_t wrong = quant_differing(m, want, w);
        CHECK(strcmp(want->item.name, item.name) == 0, "%s", item.name);
        CHECK((w->format >= SALA_NVFP4) == (want->kind > SALA__PLAIN), "%s: %s has format %d", what,
              item.name, w->format);
        if (want->kind > SALA__PLAIN) {
            quantised++;
            CHECK(w->group == want->group && w->alpha, "%s: %s: groups of %d", what, item.name,
                  w->group);
            CHECK(!w->zero == !(w->format == SALA_INT4 && m->o.asymmetric), "%s: %s: zero points",
                  what, item.name);
        }
        CHECK(wrong == 0, "%s: %s: %lld of %d x %d elements differ", what, item.name,
              (long long)wrong, w->n, w->k);
    }
    CHECK(at == m->layer_count && quantised > 0, "%s: %d tensors, %d quantised", what, at,
          quantised);
}

// Weights that read the same x have the largest of their input scales, or none.
static void compare_inputs(const char *what, const quant_model *m, loaded *l) {
    for (int i = 0; i < l->config.dims.layers; i++) {
        sala__layer *w = &l->weights.layers[i];
        float most = 0, pair = 0, down = 0;
        int missing = 0;
        for (int t = 0; t < m->layer_count; t++) {
            const quant_layer *q = &m->layers[t];
            if (q->item.layer != i || q->item.k == 1) continue;
            if (!quant_is_nvfp4(q)) continue; // reads x as it is
            float x = m->o.weight_only ? 0 : q->input;
            const char *name = strstr(q->item.name, "layers.");
            if (strstr(name, "q_proj") || strstr(name, "k_proj") || strstr(name, "v_proj") ||
                strstr(name, "z_proj") || strstr(name, "o_gate")) {
                most = x > most ? x : most;
                missing |= x == 0;
            } else if (strstr(name, "mlp.gate") || strstr(name, "mlp.up")) {
                pair = pair < 0 || x == 0 ? -1 : x > pair ? x : pair;
            } else if (strstr(name, "down")) {
                down = x;
            }
        }
        if (missing) most = 0;
        if (pair < 0) pair = 0;
        // A divisor is rounded when it is written and again when it is read.
        float slack = m->o.kind == SALA__COMPRESSED || !m->o.kind ? 1e-6f : 0;
        const sala_weight *have[] = {&w->q,        &w->k,      &w->v,       &w->gate,
                                     &w->mlp_gate, &w->mlp_up, &w->mlp_down};
        const float want[] = {most, most, most, most, pair, pair, down};
        for (int x = 0; x < 7; x++) {
            float scale = have[x]->format == SALA_NVFP4 ? want[x] : 0;
            CHECK(fabsf(have[x]->input_scale - scale) <= slack * scale,
                  "%s: layer %d: input scale %d is %g, not %g", what, i, x,
                  (double)have[x]->input_scale, (double)scale);
        }
    }
}

typedef struct variant {
    const char *what, *config, *format;
    quant_options o;
} variant;

#define BIG SALA_TINY "/config.json"
#define G SALA__GPTQ
#define C SALA__COMPRESSED
#define M SALA__MODELOPT

// .kind, group, asymmetric, v2, f16, g_idx, weight_only, fused, head, powers, shards, beside
static const variant variants[] = {
    {"ModelOpt", TINY_CONFIG, "NVFP4, BF16 head", {.kind = M}},
    {"ModelOpt, two shards, hf_quant_config.json",
     TINY_CONFIG,
     "NVFP4, BF16 head",
     {.kind = M, .shards = 2, .beside = 1}},
    {"ModelOpt, weights alone, head",
     TINY_CONFIG,
     "NVFP4",
     {.kind = M, .weight_only = 1, .head = 1}},
    {"ModelOpt, fused, one scale",
     TINY_CONFIG,
     "NVFP4, BF16 head",
     {.kind = M, .fused = QUANT_FUSED, .powers = 1}},
    {"ModelOpt, fused, a scale each",
     TINY_CONFIG,
     "NVFP4, BF16 head",
     {.kind = M, .fused = QUANT_FUSED_EACH}},
    {"ModelOpt, fused, scales by name",
     TINY_CONFIG,
     "NVFP4, BF16 head",
     {.kind = M, .fused = QUANT_FUSED_NAMES}},
    {"ModelOpt, sala-tiny", BIG, "NVFP4, BF16 head", {.kind = M, .shards = 2}},
    {"compressed-tensors", TINY_CONFIG, "NVFP4, BF16 head", {.kind = C, .powers = 1}},
    {"compressed-tensors, weights alone",
     TINY_CONFIG,
     "NVFP4",
     {.kind = C, .powers = 1, .weight_only = 1, .head = 1}},
    {"compressed-tensors, fused",
     TINY_CONFIG,
     "NVFP4, BF16 head",
     {.kind = C, .powers = 1, .fused = QUANT_FUSED_EACH}},
    {"GPTQ, 32", TINY_CONFIG, "INT4, BF16 head", {.kind = G, .group = 32, .g_idx = 1}},
    {"GPTQ, 32, asymmetric, F16",
     TINY_CONFIG,
     "INT4, BF16 head",
     {.kind = G, .group = 32, .asymmetric = 1, .f16 = 1, .beside = 1}},
    {"GPTQ v2, 32, asymmetric",
     TINY_CONFIG,
     "INT4, BF16 head",
     {.kind = G, .group = 32, .asymmetric = 1, .v2 = 1}},
    {"GPTQ v2, symmetric", TINY_CONFIG, "INT4, BF16 head", {.kind = G, .group = 32, .v2 = 1}},
    {"GPTQ, whole rows, F16", TINY_CONFIG, "INT4, BF16 head", {.kind = G, .group = -1, .f16 = 1}},
    {"GPTQ, 64, sala-tiny, head", BIG, "INT4", {.kind = G, .group = 64, .head = 1}},
    {"GPTQ, 128, asymmetric, sala-tiny",
     BIG,
     "INT4, BF16 head",
     {.kind = G, .group = 128, .asymmetric = 1}},
    {"GPTQ, fused", TINY_CONFIG, "INT4, BF16 head", {.kind = G, .group = 32, .fused = QUANT_FUSED}},
    {"all in turn",
     TINY_CONFIG,
     "NVFP4 + INT4 + BF16, BF16 head",
     {.kind = 0, .group = 32, .asymmetric = 1, .powers = 1}},
};

static void layouts(void) {
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        const variant *v = &variants[i];
        quant_model m;
        loaded l;
        sala_error err;
        folder_make();
        quant_make(v->config, &v->o, &m);
        quant_write(&m, folder, v->config);
        counted.notes = 0;
        int code = load(&l, &err);
        CHECK(code == 0, "%s: %s", v->what, err.text);
        if (code == 0) {
            char format[64], kinds[160];
            compare(v->what, &m, &l);
            compare_inputs(v->what, &m, &l);
            sala__formats_name(&l.config, &l.weights, format, kinds);
            CHECK(strcmp(format, v->format) == 0, "%s: %s, %s", v->what, format, kinds);
            CHECK(counted.notes == 0, "%s: %d notes", v->what, counted.notes);
            unload(&l);
        }
        CHECK(counted.live == 0, "%s: %lld allocations are left", v->what, (long long)counted.live);
        quant_free(&m);
        folder_remove();
    }
}

// What 4-bit weights take: codes, scales, zero points and the factors of rows.
static void sizes(void) {
    static const struct {
        quant_options o;
        double bits;
    } cases[] = {{{.kind = M}, 4.5 + 32.0 / 256},
                 {{.kind = G, .group = 128}, 4 + 16.0 / 128 + 32.0 / 256},
                 {{.kind = G, .group = 64, .asymmetric = 1}, 4 + 24.0 / 64 + 32.0 / 256}};
    for (int i = 0; i < 3; i++) {
        quant_model m;
        loaded l;
        sala_error err;
        folder_make();
        quant_make(BIG, &cases[i].o, &m);
        quant_write(&m, folder, BIG);
        if (load(&l, &err) < 0) die("sizes", err.text);
        const sala_weight *w = &l.weights.layers[1].q;
        CHECK(8.0 * (double)sala__weight_bytes(w) == cases[i].bits * w->n * w->k, "%lld bytes",
              (long long)sala__weight_bytes(w));
        // What the allocator gave: GPTQ's rows, NVFP4's factors, and little else.
        int64_t want = (int64_t)sizeof(sala__layer) * l.config.dims.layers;
        sala__item item;
        for (int t = 0; t < sala__item_count(&l.config); t++) {
            if (!sala__item_at(&l.config, &l.weights, t, &item)) continue;
            if (item.weight->format == SALA_NVFP4) want += 4 * item.n + 64;
            if (item.weight->format == SALA_INT4) want += sala__weight_bytes(item.weight) + 2 * 64;
        }
        CHECK(counted.bytes == want, "%lld bytes were taken, %lld expected",
              (long long)counted.bytes, (long long)want);
        CHECK(l.weights.copied == 0 || i > 0, "%lld bytes copied", (long long)l.weights.copied);
        // On a GPU they are given back.
        sala__weights_forget(&env, &l.config, &l.weights);
        CHECK(!l.weights.blocks && !w->alpha &&
                  sala__weights_check(&env, &l.config, &l.weights, NULL, &err) == 0,
              "%s", err.text);
        unload(&l);
        quant_free(&m);
        folder_remove();
    }
}

// ---- what they compute ----

enum { PROMPT = 70, NEW = 12 };

static float *run(const char *config, const quant_options *o, int *vocab, int32_t chosen[NEW]) {
    quant_model m;
    folder_make();
    quant_make(config, o, &m);
    quant_write(&m, folder, config);
    sala_options options = small_options(64, 64);
    options.context = 256;
    options.device = "cpu";
    session t = session_open(folder, &options);
    int32_t prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++) prompt[i] = (int32_t)(sala_mix64((uint64_t)i) % 90) + 3;
    sala_request ask;
    memset(&ask, 0, sizeof ask);
    ask.tokens = prompt;
    ask.token_count = PROMPT;
    ask.max_tokens = NEW;
    ask.ignore_eos = 1;
    ask.want_rows = SALA_ROWS_ALL;
    session_ask(&t, &ask);
    session_run(&t);
    *vocab = t.info.vocab;
    size_t count = (size_t)(PROMPT + NEW - 1) * (size_t)t.info.vocab;
    float *logits = (float *)need(malloc(count * sizeof *logits));
    memcpy(logits, t.out[0].logits, count * sizeof *logits);
    memcpy(chosen, t.out[0].tokens, NEW * sizeof *chosen);
    session_close(&t);
    quant_free(&m);
    folder_remove();
    return logits;
}

static void computes(void) {
    static const struct {
        const char *what, *config, *plain;
        quant_options o;
        double slack; // of logits; 0: the same bits
    } cases[] = {
        {"NVFP4", TINY_CONFIG, "BF16", {.kind = M, .powers = 1, .head = 1, .seed = 3}, 0},
        {"NVFP4, sala-tiny", BIG, "BF16", {.kind = C, .powers = 1, .seed = 3}, 0},
        {"NVFP4, any factors",
         TINY_CONFIG,
         "F32",
         {.kind = M, .fused = QUANT_FUSED_EACH, .seed = 3},
         0.02},
        {"INT4", TINY_CONFIG, "BF16", {.kind = G, .group = 32, .asymmetric = 1, .seed = 3}, 0},
        {"INT4, sala-tiny",
         BIG,
         "BF16",
         {.kind = G, .group = 128, .f16 = 1, .head = 1, .seed = 3},
         0},
        {"INT4, whole rows",
         TINY_CONFIG,
         "BF16",
         {.kind = G, .group = -1, .powers = 1, .seed = 3},
         0},
        {"all in turn",
         TINY_CONFIG,
         "BF16",
         {.kind = 0, .group = 32, .powers = 1, .asymmetric = 1, .seed = 3},
         0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quant_options plain = cases[i].o;
        plain.dequantised = cases[i].plain;
        int vocab;
        int32_t a_chosen[NEW], b_chosen[NEW];
        float *a = run(cases[i].config, &cases[i].o, &vocab, a_chosen);
        float *b = run(cases[i].config, &plain, &vocab, b_chosen);
        size_t count = (size_t)(PROMPT + (cases[i].slack > 0 ? 0 : NEW - 1)) * (size_t)vocab;
        double most = 0, size = 0;
        for (size_t k = 0; k < count; k++) {
            most = fmax(most, fabs((double)a[k] - (double)b[k]));
            size = fmax(size, fabs((double)b[k]));
        }
        CHECK(most <= cases[i].slack * size && size > 0.1, "%s: logits differ by %g of %g",
              cases[i].what, most, size);
        CHECK(cases[i].slack > 0 || memcmp(a, b, count * sizeof *a) == 0, "%s: other bits",
              cases[i].what);
        CHECK(cases[i].slack > 0 || memcmp(a_chosen, b_chosen, sizeof a_chosen) == 0,
              "%s: other tokens", cases[i].what);
        free(a);
        free(b);
    }
}

// ---- faults ----

static quant_tensor *tensor_of(quant_model *m, const char *name) {
    for (int i = 0; i < m->tensor_count; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    die(name, "no such tensor");
    return NULL;
}

static void drop(quant_model *m, const char *name) {
    *tensor_of(m, name) = m->tensors[m->tensor_count - 1];
    m->tensor_count--;
}

static void reshape(quant_model *m, const char *name, const char *dtype, int rank, int64_t n,
                    int64_t k) {
    quant_tensor *t = tensor_of(m, name);
    t->dtype = dtype;
    t->rank = rank;
    t->shape[0] = n;
    t->shape[1] = k;
    t->zeros = 1;
}

static void poke(quant_model *m, const char *name, int64_t at, int byte) {
    quant_tensor *t = tensor_of(m, name);
    t->poke_at = at;
    t->poked = byte;
}

static void add(quant_model *m, const char *base, const char *suffix, const char *dtype,
                int64_t n) {
    quant_add(m, base, suffix, dtype, n, -1)->zeros = 1;
}

#define L0 "model.layers.0.self_attn.q_proj" // [64, 64]
#define L1 "model.layers.1.mlp.down_proj"    // [64, 96]

static void fault(int number, quant_model *m) {
    switch (number) {
    case 0: drop(m, L0 ".weight_scale"); break;
    case 1: drop(m, L0 ".weight_scale_2"); break;
    case 2: reshape(m, L0 ".weight", "U8", 2, 64, 64); break;
    case 3: reshape(m, L0 ".weight_scale", "F8_E4M3", 2, 64, 2); break;
    case 4: reshape(m, L0 ".weight_scale", "U8", 2, 64, 4); break;
    case 5: reshape(m, L0 ".weight_scale", "F8_E8M0", 2, 64, 4); break;
    case 6: reshape(m, L0 ".weight", "F8_E4M3", 2, 64, 64); break;
    case 7: reshape(m, L0 ".weight", "I8", 2, 64, 64); break;
    case 8: reshape(m, L0 ".weight_scale_2", "F32", 0, 0, 0); break;
    case 9: tensor_of(m, L0 ".weight_scale_2")->values[0] = -1e-4f; break;
    case 10: tensor_of(m, L0 ".weight_scale_2")->values[0] = INFINITY; break;
    case 11: tensor_of(m, L0 ".weight_scale_2")->values[0] = NAN; break;
    case 12: tensor_of(m, L0 ".weight_scale_2")->values[0] = 5376; break;
    case 13: tensor_of(m, L0 ".weight_scale_2")->values[0] = 1e-12f; break;
    case 14: reshape(m, L0 ".weight_scale_2", "BF16", 1, 1, 0); break;
    case 15: reshape(m, L0 ".weight_scale_2", "F32", 1, 2, 0); break;
    case 16: poke(m, L1 ".weight_scale", 6 * 17 + 5, 0x7F); break;
    case 17: poke(m, L1 ".weight_scale", 6 * 63 + 5, 0xFF); break;
    case 18: poke(m, L1 ".weight_scale", 0, 0x88); break;
    case 19: tensor_of(m, L0 ".input_scale")->values[0] = -1; break;
    case 20: add(m, L0, "pre_quant_scale", "BF16", 64); break;
    case 21: add(m, L0, "weight.absmax", "F32", 64); break;
    case 22: add(m, L0, "weight_shape", "I64", 2); break;
    case 23: add(m, L0, "bias", "BF16", 64); break;
    case 24: add(m, "model.layers.0.self_attn.k_proj", "k_scale", "F32", -1); break; // is ignored
    case 25: add(m, "model.layers.0.self_attn.k_proj", "k_scales", "F32", -1); break;
    case 26: reshape(m, "model.embed_tokens.weight", "U8", 2, 97, 32); break;
    case 27: reshape(m, "model.norm.weight", "U8", 1, 64, 0); break;
    case 28: drop(m, L0 ".weight"); break;
    case 29: add(m, L0, "qweight", "I32", 64); break;
    case 30: add(m, L0, "weight_packed", "I32", 64); break;
    case 31: drop(m, L0 ".weight_packed"); break; // 31 .. 35: compressed-tensors
    case 32: drop(m, L0 ".weight_global_scale"); break;
    case 33: tensor_of(m, L0 ".weight_global_scale")->values[0] = 1.86e-4f; break;
    case 34: tensor_of(m, L0 ".weight_global_scale")->values[0] = 1e-44f; break;
    case 35: reshape(m, L0 ".weight_packed", "I32", 2, 64, 8); break;
    case 36: drop(m, L0 ".qzeros"); break; // 36 ..: GPTQ
    case 37: drop(m, L0 ".scales"); break;
    case 38: drop(m, L0 ".qweight"); break;
    case 39: reshape(m, L0 ".qweight", "I32", 2, 64, 8); break;
    case 40: reshape(m, L0 ".qweight", "I32", 2, 16, 64); break;
    case 41: reshape(m, L0 ".qweight", "I8", 2, 8, 64); break;
    case 42: reshape(m, L0 ".scales", "BF16", 2, 3, 64); break;
    case 43:
        reshape(m, L0 ".scales", "BF16", 2, 4, 64), reshape(m, L0 ".qzeros", "I32", 2, 4, 8);
        break;
    case 44: reshape(m, L0 ".scales", "F32", 2, 2, 64); break;
    case 45: reshape(m, L0 ".qzeros", "I32", 2, 2, 64); break;
    case 46: poke(m, L0 ".qzeros", 3, 0x67); break;
    case 47: poke(m, L0 ".g_idx", 4 * 40, 2); break;
    case 48: reshape(m, L0 ".g_idx", "I32", 1, 63, 0); break;
    case 49: poke(m, L0 ".scales", 2 * (64 + 9), 0x7FC0); break;
    case 50: tensor_of(m, L1 ".input_scale")->values[0] = 600; break;
    case 51: tensor_of(m, L0 ".input_scale")->values[0] = 1e-45f; break;
    case 52: tensor_of(m, L1 ".input_global_scale")->values[0] = 0.002f; break;
    case 53: add(m, "model.layers.0.self_attn.qkv_proj", "weight", "U8", 1); break;
    }
}

static void faults(void) {
    static const struct {
        int kind;
        const char *a, *b;
    } cases[] = {
        {M, "tensor " L0 ".weight_scale is missing beside", NULL},
        {M, "tensor " L0 ".weight_scale_2 is missing beside", NULL},
        {M, "tensor " L0 ".weight has shape [64, 64], expected [64, 32]", "64 x 64 weights"},
        {M, "tensor " L0 ".weight_scale has shape [64, 2], expected [64, 4]", NULL},
        {M, "tensor " L0 ".weight_scale has dtype U8; expected F8_E4M3", NULL},
        {M, "tensor " L0 ".weight_scale has dtype F8_E8M0; expected F8_E4M3", NULL},
        {M, "tensor " L0 ".weight has dtype F8_E4M3; expected BF16, F16 or F32", NULL},
        {M, "tensor " L0 ".weight has dtype I8; expected", NULL},
        {M, "tensor " L0 ".weight_scale_2 is 0; expected a positive number", NULL},
        {M, "tensor " L0 ".weight_scale_2 is -0.0001; expected a positive number", NULL},
        {M, "tensor " L0 ".weight_scale_2 is inf; expected a positive number", NULL},
        {M, "tensor " L0 ".weight_scale_2 is nan; expected a positive number", NULL},
        {M, "the weights of " L0 " reach ",
         "is its weight_scale_2, which must be a factor, a divisor?"},
        {M, "the weights of " L0 " reach ", NULL},
        {M, "tensor " L0 ".weight_scale_2 is BF16", "expected F32"},
        {M, "tensor " L0 ".weight_scale_2 is F32 and 8 bytes; expected F32 and one value", NULL},
        {M, "tensor " L1 ".weight_scale: row 17, group 5 is the byte 0x7F, NaN", NULL},
        {M, "tensor " L1 ".weight_scale: row 63, group 5 is the byte 0xFF, NaN", NULL},
        {M, "tensor " L1 ".weight_scale: row 0, group 0 is the byte 0x88, a negative scale", NULL},
        {M, "tensor " L0 ".input_scale is -1; expected a positive number", NULL},
        {M, "tensor " L0 ".pre_quant_scale: scaled inputs (NVFP4_AWQ): not supported", NULL},
        {M, "tensor " L0 ".weight.absmax: bitsandbytes: not supported", NULL},
        {M, "tensor " L0 ".weight_shape has no place in the model", NULL},
        {M, "tensor " L0 ".bias has no place in the model", NULL},
        {M, NULL, NULL},
        {M, "k_proj.k_scales has no place in the model", NULL},
        {M, "model.embed_tokens is quantised: only linear layers may be", NULL},
        {M, "model.norm is quantised: only linear layers may be", NULL},
        {M, "tensor " L0 ".weight is missing", NULL},
        {M, "tensor " L0 ".qweight has shape [64], expected [8, 64]", NULL},
        {M, "tensor " L0 ".weight_packed: compressed-tensors' INT4 (pack-quantized): not", NULL},
        {C, "tensor " L0 ".weight is missing", NULL},
        {C, "tensor " L0 ".weight_global_scale is missing beside", NULL},
        {C, "the weights of " L0 " reach ",
         "its weight_global_scale, which must be a divisor, a factor?"},
        {C, "tensor " L0 ".weight_global_scale is ", "expected a positive number"},
        {C, "tensor " L0 ".weight_packed: compressed-tensors' INT4 (pack-quantized): not", NULL},
        {G, "tensor " L0 ".qzeros is missing beside", NULL},
        {G, "tensor " L0 ".scales is missing beside", NULL},
        {G, "tensor " L0 ".weight is missing", NULL},
        {G, "tensor " L0 ".qweight: AWQ's layout is not supported", NULL},
        {G, "tensor " L0 ".qweight has shape [16, 64], expected [8, 64]", NULL},
        {G, "tensor " L0 ".qweight has dtype I8; expected I32", NULL},
        {G, "tensor " L0 ".qzeros has shape [2, 8], expected [3, 8]", NULL},
        {G, "tensor " L0 ".scales has 4 groups for 64 inputs", "group_size"},
        {G, "tensor " L0 ".scales has dtype F32; expected BF16 F16", NULL},
        {G, "tensor " L0 ".qzeros has shape [2, 64], expected [2, 8]", NULL},
        {G, "tensor " L0 ".qzeros has a zero point of 7; with sym true all are 8",
         "checkpoint_format"},
        {G, "tensor " L0 ".g_idx: input 40 is in group 2: activation order (desc_act)", NULL},
        {G, "tensor " L0 ".g_idx has shape [63], expected [64]", NULL},
        {G, "tensor " L0 ".scales: group 1, output 9 is NaN or infinite", NULL},
        {M, "the inputs of " L1 " reach 1.6128e+06, as its input_scale has it", "must be a factor"},
        {M, "the inputs of " L0 " reach ", NULL},
        {C, "the inputs of " L1 " reach 1.344e+06, as its input_global_scale has it",
         "must be a divisor"},
        {M, L0 " is there by itself and as a part of model.layers.0.self_attn.qkv_proj", NULL},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        quant_options o = {.kind = cases[i].kind, .group = 32, .g_idx = 1};
        quant_model m;
        loaded l;
        sala_error err;
        folder_make();
        quant_make(TINY_CONFIG, &o, &m);
        fault(i, &m);
        quant_write(&m, folder, TINY_CONFIG);
        int code = load(&l, &err);
        CHECK(code == (cases[i].a ? SALA_E_MODEL : 0), "fault %d: %d: %s", i, code, err.text);
        CHECK(!cases[i].a || strstr(err.text, cases[i].a), "fault %d: \"%s\" lacks \"%s\"", i,
              err.text, cases[i].a);
        CHECK(!cases[i].b || strstr(err.text, cases[i].b), "fault %d: \"%s\" lacks \"%s\"", i,
              err.text, cases[i].b);
        if (code == 0) unload(&l);
        CHECK(counted.live == 0, "fault %d: %lld allocations are left", i, (long long)counted.live);
        counted.live = 0;
        quant_free(&m);
        folder_remove();
    }
}

static void config_put(const char *name, const char *text) {
    FILE *f = quant_create(folder, name);
    fputs(text, f);
    quant_close(f, name);
}

// The configuration is checked against the tensors.
static void schemes(void) {
    static const struct {
        int kind;
        const char *name, *text, *message; // a file beside config.json, which says nothing
    } cases[] = {
        {M, NULL, NULL, NULL}, // NVFP4 says all that is needed
        {C, NULL, NULL, NULL},
        {G, NULL, NULL,
         "no quantization_config says in which checkpoint_format its zero points are"},
        {G, "quantize_config.json", "{\"bits\":4,\"group_size\":32}", NULL},
        {G, "quantize_config.json", "{\"bits\":4}", NULL},
        {G, "quantize_config.json", "{\"bits\":4,\"desc_act\":true}",
         ".g_idx is missing beside its other tensors"},
        {G, "quantize_config.json", "{\"bits\":8}", "quantize_config.json: bits is 8; expected 4"},
        {G, "quantize_config.json", "{\"bits\":4,\"group_size\":64}", "has 2 groups for 64 inputs"},
        {G, "quantize_config.json", "[]", "no object"},
        {G, "quantize_config.json", "{\"bits\":4,\"sym\":true,\"checkpoint_format\":\"gptq_v2\"}",
         "has a zero point of 7; with sym true"},
        {M, "quantize_config.json", "{\"bits\":4}",
         "quantised as GPTQ has it, but the tensors' scheme is: ModelOpt"},
        {G, "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":\"NVFP4\"}}",
         "quantised as ModelOpt has it, but the tensors' scheme is: GPTQ"},
        {M, "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":\"NVFP4_AWQ\"}}",
         "hf_quant_config.json: quantization.quant_algo is \"NVFP4_AWQ\""},
        {M, "hf_quant_config.json", "{}", "quantization is no object"},
        {SALA__PLAIN, "hf_quant_config.json", "{\"quantization\":{\"quant_algo\":\"NVFP4\"}}",
         "quantised as ModelOpt has it, but the tensors' scheme is: none"},
    };
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        quant_options o = {.kind = cases[i].kind, .group = 32};
        quant_model m;
        loaded l;
        sala_error err;
        char text[8192];
        folder_make();
        quant_make(TINY_CONFIG, &o, &m);
        quant_write(&m, folder, TINY_CONFIG);
        FILE *f = fopen(TINY_CONFIG, "rb");
        size_t size = f ? fread(text, 1, sizeof text - 1, f) : 0;
        if (f) fclose(f);
        text[size] = 0;
        config_put("config.json", text);
        if (cases[i].name) config_put(cases[i].name, cases[i].text);
        int code = load(&l, &err);
        CHECK(code == (cases[i].message ? SALA_E_MODEL : 0), "scheme %d: %d: %s", i, code,
              err.text);
        CHECK(!cases[i].message || strstr(err.text, cases[i].message),
              "scheme %d: \"%s\" lacks \"%s\"", i, err.text, cases[i].message);
        if (code == 0) unload(&l);
        CHECK(counted.live == 0, "scheme %d: %lld allocations are left", i,
              (long long)counted.live);
        counted.live = 0;
        quant_free(&m);
        folder_remove();
    }
}

// Each allocation fails in turn: an error, and nothing left.
static void failing_memory(void) {
    const int kinds[] = {M, G};
    for (int k = 0; k < 2; k++) {
        quant_options o = {.kind = kinds[k], .group = 32, .asymmetric = 1, .shards = 2};
        quant_model m;
        folder_make();
        quant_make(TINY_CONFIG, &o, &m);
        quant_write(&m, folder, TINY_CONFIG);
        int done = 0, n = 1;
        for (; n < 1000 && !done; n++) {
            loaded l;
            sala_error err;
            counted.calls = 0;
            counted.fail_at = n;
            int code = load(&l, &err);
            counted.fail_at = 0;
            done = code == 0;
            if (done) unload(&l);
            CHECK(done || (code == SALA_E_MEMORY && strstr(err.text, "out of memory")),
                  "allocation %d: %s", n, err.text);
            CHECK(counted.live == 0, "allocation %d: %lld left", n, (long long)counted.live);
            counted.live = 0;
        }
        CHECK(done && n > 40, "%d allocations", n);
        quant_free(&m);
        folder_remove();
    }
}

TEST_MAIN(TEST(layouts), TEST(sizes), TEST(computes), TEST(faults), TEST(schemes),
          TEST(failing_memory))
