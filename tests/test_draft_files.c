#define SALA_IMPLEMENTATION
#include "../sala.h"
// The draft head's files: heads in every layout load with the numbers that were written, and every way in which
// a head can be wrong, or another model's, is one clear sentence.
#include "check.h"
#include "counted.h"
#include "model.h"
#include "quant_files.h"
#include <dirent.h>

static counter counted;

static const sala__env env = {&counted, counting, logging, NULL};

static char folder[512];

static const char *in_folder(const char *name) {
    static char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void folder_make(void) {
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/sala-draft-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) die(folder, "cannot make a folder");
}

static void folder_empty(void) {
    DIR *d = opendir(folder);
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d))
        if (e->d_name[0] != '.') unlink(in_folder(e->d_name));
    if (d) closedir(d);
}

static void folder_remove(void) {
    folder_empty();
    rmdir(folder);
}

// ---- the configuration, with one text replaced by another ----

#define VOCAB 2048 // of the target
#define OWN 512    // of the head

static const char config_text[] =
    "{\"architectures\":[\"LlamaForCausalLMEagle3\"],\"model_type\":\"llama\",\"vocab_size\":2048,"
    "\"draft_vocab_size\":512,\"hidden_size\":256,\"intermediate_size\":384,\"num_hidden_layers\":"
    "1,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"head_dim\":128,\"hidden_act\":\"silu\","
    "\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-6,\"rope_theta\":10000,"
    "\"rope_scaling\":null,\"tie_word_embeddings\":false,"
    "\"eagle_config\":{\"eagle_aux_hidden_state_layer_ids\":[1,3,5],\"use_aux_hidden_state\":true}"
    "}";

static void put_config(const char *name, const char *from, const char *to) {
    const char *at = from ? strstr(config_text, from) : config_text;
    if (!at) die("put_config", from);
    FILE *f = fopen(in_folder(name), "wb");
    if (!f) die(name, "cannot write");
    fprintf(f, "%.*s%s%s", (int)(at - config_text), config_text, from ? to : "",
            at + (from ? strlen(from) : 0));
    fclose(f);
}

static sala__config target; // sala-tiny

static int read_config(sala__config *c, const char *from, const char *to, sala_error *err) {
    put_config("config.json", from, to);
    err->code = 0;
    err->text[0] = 0;
    return sala__draft_config_read(&env, in_folder("config.json"), &target, c, err);
}

static void begin(void) {
    sala_error err;
    folder_make();
    memset(&counted, 0, sizeof counted);
    if (sala__config_read(&env, SALA_TINY "/config.json", &target, &err) < 0)
        die(SALA_TINY, err.text);
}

static void end(void) {
    sala__config_free(&env, &target);
    CHECK(counted.live == 0, "%lld allocations are left", (long long)counted.live);
    folder_remove();
}

static void configs(void) {
    static const struct {
        const char *from, *to;
        int32_t aux[3], vocab;
    } good[] = {
        {NULL, NULL, {1, 3, 5}, OWN},
        {"[1,3,5]", "[2,4,6]", {1, 3, 5}, OWN},
        {"[1,3,5]", "[1,6,7]", {1, 6, 7}, OWN},
        {"[1,3,5]", "[2,3,8]", {1, 2, 7}, OWN}, // read before the norm, which is no layer
        {"\"eagle_aux_hidden_state_layer_ids\":[1,3,5],", "", {1, 3, 4}, OWN},
        {"[1,3,5]", "null", {1, 3, 4}, OWN},
        {"\"eagle_aux_hidden_state_layer_ids\":[1", "\"sala_output_layers\":[0", {0, 3, 5}, OWN},
        {"\"draft_vocab_size\":512", "\"draft_vocab_size\":null", {1, 3, 5}, VOCAB},
        {"\"draft_vocab_size\":512,", "", {1, 3, 5}, VOCAB},
        {"\"hidden_size\":256", "\"hidden_size\":256,\"target_hidden_size\":256", {1, 3, 5}, OWN},
        {"\"hidden_act\"",
         "\"norm_before_fc\":false,\"attention_bias\":false,\"hidden_act\"",
         {1, 3, 5},
         OWN},
    };
    begin();
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        sala__config c;
        sala_error err;
        int code = read_config(&c, good[i].from, good[i].to, &err);
        CHECK(code == 0, "case %d: %s", (int)i, err.text);
        if (code < 0) continue;
        CHECK(memcmp(c.aux, good[i].aux, sizeof c.aux) == 0, "case %d: layers %d %d %d", (int)i,
              c.aux[0], c.aux[1], c.aux[2]);
        CHECK(c.draft_vocab == good[i].vocab, "case %d: %d tokens", (int)i, c.draft_vocab);
        CHECK(c.eagle && c.dims.layers == 1 && c.sparse[0] && c.dims.sparse_rope, "dims");
        CHECK(c.dims.hidden == 256 && c.dims.vocab == VOCAB && c.dims.ffn == 384, "dims");
        CHECK(c.dims.embed_scale == 1 && c.dims.residual_scale == 1 && c.dims.logit_divisor == 1,
              "the target's multipliers");
        sala__config_free(&env, &c);
    }
    end();
}

static void config_faults(void) {
    static const struct {
        const char *from, *to, *a;
    } bad[] = {
        {"LlamaForCausalLMEagle3", "LlamaForCausalLM", "architectures names \"LlamaForCausalLM\""},
        {"\"llama\"", "\"speculators\"", "model_type is \"speculators\"; expected llama"},
        {"\"hidden_size\":256", "\"hidden_size\":512",
         "hidden_size is 512; expected 256, the model's"},
        {"\"hidden_size\"", "\"target_hidden_size\":128,\"hidden_size\"",
         "target_hidden_size is 128"},
        {"\"vocab_size\":2048", "\"vocab_size\":4096", "vocab_size is 4096; expected 2048"},
        {"512", "2049", "draft_vocab_size is 2049"},
        {"\"num_attention_heads\":2", "\"num_attention_heads\":4", "is not hidden_size 256"},
        {"\"num_hidden_layers\":1", "\"num_hidden_layers\":2",
         "num_hidden_layers is 2; expected 1"},
        {"silu", "gelu", "hidden_act is \"gelu\"; expected silu"},
        {"\"tie_word_embeddings\":false", "\"tie_word_embeddings\":true",
         "tie_word_embeddings is true"},
        {"\"hidden_act\"", "\"norm_before_fc\":true,\"hidden_act\"", "norm_before_fc is true"},
        {"\"use_aux", "\"norm_before_residual\":true,\"use_aux",
         "eagle_config.norm_before_residual is"},
        {"\"hidden_act\"", "\"parallel_drafting\":true,\"hidden_act\"",
         "parallel_drafting is true"},
        {"\"hidden_act\"", "\"attention_bias\":true,\"hidden_act\"", "attention_bias is true"},
        {"state\":true", "state\":false", "eagle_config.use_aux_hidden_state is false"},
        {"[1,3,5]", "[3,4,5]", "begins neither with 1 (outputs of layers) nor with 2"},
        {"[1,3,5]", "[0,3,5]", "begins neither with 1"},
        {"[1,3,5]", "[1,5,3]", "three rising layers of the 8"},
        {"[1,3,5]", "[1,1,3]", "three rising layers"},
        {"[1,3,5]", "[1,3,8]", "three rising layers"},
        {"[1,3,5]", "[2,3,9]", "three rising layers"},
        {"[1,3,5]", "[1,\"3\",5]", "three rising layers"},
        {"[1,3,5]", "[1,3]", "expected three rising layers"},
        {"\"use_aux", "\"sala_window\":448,\"use_aux", "eagle_config.sala_window is 448"},
        {"\"use_aux", "\"sala_window\":1000,\"use_aux", "expected a multiple of 64"},
        {"[1,3,5]", "7", "eagle_config.eagle_aux_hidden_state_layer_ids is 7"},
        {"\"rope_scaling\":null", "\"rope_scaling\":{\"rope_type\":\"longrope\"}",
         "rope_scaling.rope_type is \"longrope\"; expected default linear llama3 yarn"},
        {"\"rope_scaling\":null", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}",
         "rope_scaling.type is \"dynamic\""},
        {"\"rope_scaling\":null", "\"rope_scaling\":{\"type\":\"linear\"}",
         "rope_scaling.factor is missing"},
        {"\"rope_scaling\":null", "\"rope_scaling\":7", "rope_scaling is no object"},
        {"\"rope_scaling\":null",
         "\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8,"
         "\"low_freq_factor\":4,\"high_freq_factor\":1}",
         "rope_parameters.high_freq_factor is 1"},
        {"\"rope_scaling\":null", "\"rope_parameters\":{\"partial_rotary_factor\":0.5}",
         "rope_parameters.partial_rotary_factor is 0.5; expected 1"},
        {"1e-6", "\"small\"", "rms_norm_eps is \"small\""},
        {"{\"arch", "[{\"arch", "config.json"},
    };
    begin();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        sala__config c;
        sala_error err;
        int code = read_config(&c, bad[i].from, bad[i].to, &err);
        CHECK(code < 0 && err.code == code, "case %d (%s) is taken", (int)i, bad[i].a);
        CHECK(code == 0 || strstr(err.text, bad[i].a), "case %d: \"%s\" lacks \"%s\"", (int)i,
              err.text, bad[i].a);
        if (code == 0) sala__config_free(&env, &c);
    }
    end();
}

// Against Hugging Face's formulas, worked out in Python.
static void rotary(void) {
    static const int at[5] = {0, 24, 32, 36, 63};
    static const struct {
        const char *scaling;
        double want[5], scale;
    } cases[] = {
        {"\"rope_scaling\":null", {1, 0.0316227766, 0.01, 0.00562341325, 0.000115478198}, 1},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}",
         {0.25, 0.00790569415, 0.0025, 0.00140585331, 2.88695496e-05},
         1},
        {"\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":500000,\"factor\":8,"
         "\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":8192}",
         {1, 0.00729266474, 0.000524846161, 7.78465527e-05, 3.06892599e-07},
         1},
        {"\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":32}",
         {1, 0.0218197159, 0.0038, 0.00126526798, 3.6086937e-06},
         1.3465735902799727},
        {"\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":32,\"attention_factor\":1.25}",
         {1, 0.0218197159, 0.0038, 0.00126526798, 3.6086937e-06},
         1.25},
    };
    begin();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sala__config c;
        sala_error err;
        if (read_config(&c, "\"rope_scaling\":null", cases[i].scaling, &err) < 0)
            die("rotary", err.text);
        for (int k = 0; k < 5; k++)
            CHECK(fabs((double)c.frequency[at[k]] / cases[i].want[k] - 1) < 1e-6,
                  "case %d: pair %d: %g", (int)i, at[k], (double)c.frequency[at[k]]);
        double scale = cases[i].scale * cases[i].scale / sqrt(128.0);
        CHECK(fabs((double)c.dims.attn_scale / scale - 1) < 1e-6, "case %d: scale %g", (int)i,
              (double)c.dims.attn_scale);
        sala__config_free(&env, &c);
    }
    end();
}

// The table of speculation.md 1.4.
static void parameters(void) {
    static const struct {
        int kv_heads, ffn, vocab;
        int64_t count;
    } rows[] = {{2, 16384, 32000, 437272576}, {8, 16384, 32000, 449855488},
                {2, 14336, 32000, 412106752}, {2, 16384, 32768, 440418304},
                {2, 16384, 16000, 371736576}, {2, 16384, 73448, 607043584}};
    sala__config release, c;
    sala__weights w;
    sala_error err;
    sala_options o = {0};
    if (sala__config_read(&env, "bench/configs/minicpm-sala-9b.json", &release, &err) < 0 ||
        sala__draft_config_read(&env, "bench/configs/eagle3-437m.json", &release, &c, &err) < 0)
        die("bench/configs", err.text);
    CHECK(c.aux[0] == 1 && c.aux[1] == 15 && c.aux[2] == 28, "layers %d %d %d", c.aux[0], c.aux[1],
          c.aux[2]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        c.dims.kv_heads = rows[i].kv_heads;
        c.dims.ffn = rows[i].ffn;
        c.draft_vocab = rows[i].vocab;
        o.weights = NULL;
        if (sala__synthetic_plan(&env, &c, &w, &o, &err) < 0) die("plan", err.text);
        CHECK(w.parameters == rows[i].count, "%lld, expected %lld", (long long)w.parameters,
              (long long)rows[i].count);
        sala__weights_free(&env, &w);
        o.weights = "nvfp4"; // all matrices, fc and head too
        if (sala__synthetic_plan(&env, &c, &w, &o, &err) < 0) die("plan", err.text);
        CHECK(w.fc.format == SALA_NVFP4 && w.head.format == SALA_NVFP4 &&
                  w.layers[0].mlp_down.format == SALA_NVFP4,
              "formats");
        sala__weights_free(&env, &w);
    }
    sala__config_free(&env, &c);
    sala__config_free(&env, &release);
}

// ---- files ----

typedef struct loaded {
    sala__config config;
    sala__checkpoint checkpoint, target_checkpoint;
    sala__weights weights, target_weights;
} loaded;

static void unload(loaded *l) {
    sala__weights_free(&env, &l->weights);
    sala__weights_free(&env, &l->target_weights);
    sala__checkpoint_close(&l->checkpoint);
    sala__checkpoint_close(&l->target_checkpoint);
    sala__config_free(&env, &l->config);
}

static int load(loaded *l, sala_error *err) { // nothing is left on errors
    memset(l, 0, sizeof *l);
    err->code = 0;
    err->text[0] = 0;
    sala__config *c = &l->config;
    int code = sala__checkpoint_open(&env, SALA_TINY, &l->target_checkpoint, err);
    if (code == 0)
        code = sala__weights_bind(&env, &l->target_checkpoint, &target, &l->target_weights, err);
    if (code == 0) code = sala__draft_config_read(&env, in_folder("config.json"), &target, c, err);
    if (code == 0) code = sala__scheme_files_read(&env, folder, c, err);
    if (code == 0) code = sala__checkpoint_open(&env, folder, &l->checkpoint, err);
    if (code == 0)
        code = sala__draft_bind(&env, &l->checkpoint, c, &target, &l->target_weights, &l->weights,
                                err);
    if (code == 0) code = sala__weights_load(&env, &l->checkpoint, c, &l->weights, err);
    if (code == 0) code = sala__weights_check(&env, c, &l->weights, &l->checkpoint, err);
    if (code < 0) unload(l);
    return code;
}

static const char *draft_json(const char *from,
                              const char *to) { // the configuration without a scheme
    static char path[1024];
    put_config("draft.json", from, to);
    snprintf(path, sizeof path, "%s", in_folder("draft.json"));
    return path;
}

static void make(quant_model *m, quant_options o, const char *from, const char *to) {
    o.target = SALA_TINY "/config.json";
    if (!o.group) o.group = 32;
    quant_make(draft_json(from, to), &o, m);
}

// Every element of every tensor that was written, and the tables.
static void compare(const char *what, const quant_model *m, loaded *l) {
    sala__item item;
    int at = 0;
    for (int i = 0; i < sala__item_count(&l->config); i++) {
        if (!sala__item_at(&l->config, &l->weights, i, &item)) continue;
        const quant_layer *want = &m->layers[at++];
        int64_t wrong = quant_differing(m, want, item.weight);
        CHECK(strcmp(want->item.name, item.name) == 0, "%s: %s", what, item.name);
        CHECK((item.weight->format >= SALA_NVFP4) == (want->kind > SALA__PLAIN),
              "%s: %s has format %d", what, item.name, item.weight->format);
        CHECK(wrong == 0, "%s: %s: %lld elements differ", what, item.name, (long long)wrong);
    }
    CHECK(at == m->layer_count, "%s: %d tensors", what, at);
    CHECK(l->weights.embed.data &&
              (l->weights.embed.data == l->target_weights.embed.data) == !m->o.embed,
          "%s: whose embedding", what);
    CHECK(l->weights.head.data &&
              (l->weights.head.data == l->target_weights.head.data) == m->o.shared,
          "%s: whose head", what);
    for (int i = 0; i < l->config.draft_vocab; i++)
        CHECK(l->weights.target_ids[i] == quant_target(m, i), "%s: token %d is %d", what, i,
              l->weights.target_ids[i]);
}

static void layouts(void) {
    const struct {
        const char *what, *from, *to;
        quant_options o;
    } cases[] = {
        {"SpecForge", NULL, NULL, {.kind = SALA__PLAIN, .tables = 3}},
        {"champion",
         NULL,
         NULL,
         {.kind = SALA__MODELOPT,
          .fused = QUANT_FUSED_NAMES,
          .names = QUANT_PREFIXED,
          .tables = 3}},
        {"all in NVFP4", NULL, NULL, {.kind = SALA__MODELOPT, .head = 1, .tables = 1, .beside = 1}},
        {"compressed-tensors",
         NULL,
         NULL,
         {.kind = SALA__COMPRESSED, .names = QUANT_NEMO, .tables = 3}},
        {"GPTQ", NULL, NULL, {.kind = SALA__GPTQ, .tables = 3, .head = 1, .asymmetric = 1}},
        {"mixed", NULL, NULL, {.kind = 0, .tables = 3}},
        {"NeMo", NULL, NULL, {.kind = SALA__PLAIN, .names = QUANT_NEMO, .tables = 1, .bias = 1}},
        {"shards",
         NULL,
         NULL,
         {.kind = SALA__PLAIN, .names = QUANT_PREFIXED, .tables = 3, .shards = 3}},
        {"norms",
         "\"hidden_act\"",
         "\"fc_norm\":true,\"hidden_act\"",
         {.kind = SALA__PLAIN, .tables = 3}},
        {"own embedding", NULL, NULL, {.kind = SALA__PLAIN, .tables = 3, .embed = 1}},
        {"whole vocabulary", "512", "null", {.kind = SALA__PLAIN}},
        {"the target's head", "512", "null", {.kind = SALA__PLAIN, .tables = 2, .shared = 1}},
        {"other widths",
         "\"num_key_value_heads\":1,\"head_dim\":128",
         "\"num_key_value_heads\":2",
         {.kind = SALA__PLAIN, .tables = 3}},
    };
    begin();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quant_model m;
        loaded l;
        sala_error err;
        make(&m, cases[i].o, cases[i].from, cases[i].to);
        quant_write(&m, folder, in_folder("draft.json"));
        counted.warnings = 0;
        int code = load(&l, &err);
        CHECK(code == 0, "%s: %s", cases[i].what, err.text);
        CHECK(counted.warnings == 0, "%s: %d warnings", cases[i].what, counted.warnings);
        if (code == 0) compare(cases[i].what, &m, &l), unload(&l);
        quant_free(&m);
        folder_empty();
    }
    end();
}

// The target's own embedding in the file is the target's; a token of the end that is not drafted is told.
static void tables(void) {
    quant_options o = {.kind = SALA__PLAIN, .tables = 1, .embed = 1};
    quant_model m;
    loaded l;
    sala_error err;
    sala__checkpoint tiny;
    begin();
    make(&m, o, NULL, NULL);
    for (int i = 0; i < OWN; i++) m.d2t[i] = 3 + i; // 3, 5, 7 ..: neither 2 nor 2046
    quant_write(&m, folder, in_folder("draft.json"));
    if (sala__checkpoint_open(&env, SALA_TINY, &tiny, &err) < 0) die(SALA_TINY, err.text);
    sala__checkpoint own;
    if (sala__checkpoint_open(&env, folder, &own, &err) < 0) die(folder, err.text);
    const sala__tensor *from = sala__checkpoint_find(&tiny, "model.embed_tokens.weight");
    const sala__tensor *to = sala__checkpoint_find(&own, "embed_tokens.weight");
    long offset = (long)((const char *)to->data - (const char *)own.shards[0].file.data);
    FILE *f = fopen(in_folder("model.safetensors"), "r+b");
    CHECK(from && from->bytes == to->bytes && f, "no embedding");
    fseek(f, offset, SEEK_SET);
    fwrite(from->data, 1, (size_t)from->bytes, f);
    fclose(f);
    sala__checkpoint_close(&own);
    sala__checkpoint_close(&tiny);
    counted.warnings = 0;
    int code = load(&l, &err);
    CHECK(code == 0, "%s", err.text);
    CHECK(counted.warnings == 2, "%d warnings for two end tokens", counted.warnings);
    if (code == 0) {
        CHECK(!l.config.own_embed && l.weights.embed.data == l.target_weights.embed.data, "a copy");
        CHECK(l.weights.target_ids[0] == 3 && l.weights.target_ids[7] == 17, "ids");
        unload(&l);
    }
    quant_free(&m);
    end();
}

static quant_tensor *tensor_of(quant_model *m, const char *name) {
    for (int i = 0; i < m->tensor_count; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    die("no such tensor", name);
    return NULL;
}

static void drop(quant_model *m, const char *name) {
    quant_tensor *t = tensor_of(m, name);
    *t = m->tensors[--m->tensor_count];
}

static void reshape(quant_model *m, const char *name, const char *dtype, int64_t n, int64_t k) {
    quant_tensor *t = tensor_of(m, name);
    t->dtype = dtype;
    t->rank = k < 0 ? 1 : 2;
    t->shape[0] = n;
    t->shape[1] = k;
    t->zeros = 1;
}

static void add(quant_model *m, const char *base, const char *suffix) {
    quant_add(m, base, suffix, "BF16", 4, -1)->zeros = 1;
}

#define Q "midlayer.self_attn.q_proj"

static void damage(quant_model *m, int which) {
    switch (which) {
    case 0: drop(m, "d2t"); break;
    case 1:
        for (int i = 0; i < OWN; i++) m->d2t[i] += i; // absolute ids, seen by their range
        break;
    case 2: m->d2t[9] = m->d2t[8] - 1; break;
    case 3: m->d2t[3] = -4; break;
    case 4: m->d2t[OWN - 1] = VOCAB - OWN + 1; break;
    case 5: m->d2t[5] = INT64_MAX; break;
    case 6: m->d2t[5] = INT64_MIN; break;
    case 7:
        for (int i = 0; i < OWN; i++) m->d2t[i] = i; // a default, seen by t2d
        break;
    case 8:
        for (int i = 0; i < OWN; i++) m->d2t[i] = 0;
        break;
    case 9: reshape(m, "d2t", "F32", OWN, -1); break;
    case 10: reshape(m, "d2t", "I32", OWN, -1); break;
    case 11: reshape(m, "d2t", "I64", OWN - 1, -1); break;
    case 12: reshape(m, "t2d", "BOOL", VOCAB - 1, -1); break;
    case 13: reshape(m, "t2d", "U8", VOCAB, -1); break;
    case 14: reshape(m, "t2d", "BOOL", VOCAB, -1); break;
    case 15: reshape(m, "fc.weight", "BF16", 256, 512); break;
    case 16: reshape(m, Q ".weight", "BF16", 256, 256); break;
    case 17: reshape(m, "lm_head.weight", "BF16", VOCAB, 256); break;
    case 18: drop(m, "lm_head.weight"); break;
    case 19: drop(m, "midlayer.hidden_norm.weight"); break;
    case 20: drop(m, "fc.weight"); break;
    case 21: add(m, Q, "bias"); break;
    case 22: add(m, "layers.1.self_attn.q_proj", "weight"); break;
    case 23: add(m, "model.norm", "weight"); break;
    case 24: add(m, "layers.0.self_attn.q_proj", "weight"); break;
    case 25: add(m, "midlayer.self_attn.q_norm", "weight"); break;
    case 26: add(m, "fc_norm.0", "weight"); break;
    case 27: add(m, "midlayer.self_attn.qkv_proj", "weight"); break;
    case 28: tensor_of(m, "norm.weight")->poked = 0x7FC0; break;
    case 29: tensor_of(m, "fc.weight")->poked = 0x7F80; break;
    case 30: reshape(m, "embed_tokens.weight", "BF16", VOCAB, 128); break;
    case 31:
        tensor_of(m, "midlayer.mlp.down_proj.weight_scale")->poked = 0x7F;
        break; // 31 ..: ModelOpt
    case 32: drop(m, "midlayer.self_attn.k_proj.weight_scale_2"); break;
    case 33: tensor_of(m, "midlayer.mlp.up_proj.input_scale")->values[0] = -1; break;
    case 34: drop(m, "midlayer.self_attn.qkv_proj.weight"); break;
    case 35: drop(m, "midlayer.mlp.gate_up_proj.weight_scale"); break;
    }
}

static void file_faults(void) {
    static const char *const said[] = {
        "tensor d2t is missing: it says which of the 2048 tokens the 512",
        "tensor d2t: element 256 is 1792",
        "tensor d2t: element 9 is -1; its tokens (element + its place) must rise",
        "tensor d2t: element 3 is -4",
        "must rise and lie below 2048",
        "element 5 is 9223372036854775807",
        "element 5 is -9223372036854775808",
        "tensor t2d is true for token 1, but by d2t the head lacks it",
        "tensor t2d is false for token 256, but by d2t the head knows it",
        "tensor d2t is F32 [512]; expected I64 [512]",
        "tensor d2t is I32 [512]; expected I64 [512]",
        "tensor d2t is I64 [511]; expected I64 [512]",
        "tensor t2d is BOOL [2047]; expected BOOL [2048]",
        "tensor t2d is U8",
        "tensor t2d is false for token 0",
        "tensor fc.weight has shape [256, 512], expected [256, 768] (hidden_size x 3 * "
        "hidden_size)",
        "tensor " Q ".weight has shape [256, 256], expected [256, 512]",
        "tensor lm_head.weight has shape [2048, 256], expected [512, 256] (draft_vocab_size x",
        "tensor lm_head.weight is missing",
        "tensor midlayer.hidden_norm.weight is missing",
        "tensor fc.weight is missing",
        "tensor " Q ".bias has no place in the model",
        "tensor layers.1.self_attn.q_proj.weight has no place in the model",
        "tensor norm.weight exists twice",
        "tensor " Q ".weight exists twice",
        "tensor midlayer.self_attn.q_norm.weight has no place",
        "tensor fc_norm.0.weight has no place",
        Q " is there by itself and as a part of midlayer.self_attn.qkv_proj",
        "tensor norm.weight: row 0, column 0 is NaN or infinite",
        "tensor fc.weight: row 0, column 0 is NaN or infinite",
        "tensor embed_tokens.weight has shape [2048, 128], expected [2048, 256]",
        "tensor midlayer.mlp.down_proj.weight_scale: row 0, group 0 is the byte 0x7F",
        "tensor midlayer.self_attn.qkv_proj.weight_scale_2 is missing beside",
        "tensor midlayer.mlp.up_proj.input_scale is -1; expected a positive number",
        "tensor midlayer.self_attn.q_proj.weight and 2 more are missing",
        "tensor midlayer.mlp.gate_up_proj.weight_scale is missing beside",
    };
    begin();
    for (int i = 0; i < (int)(sizeof said / sizeof *said); i++) {
        quant_options o = {.kind = i < 31 ? SALA__PLAIN : SALA__MODELOPT, .tables = i == 1 ? 1 : 3};
        quant_model m;
        loaded l;
        sala_error err;
        if (i == 30) o.embed = 1;
        if (i > 30) o.fused = QUANT_FUSED_NAMES;
        make(&m, o, NULL, NULL);
        damage(&m, i);
        quant_write(&m, folder, in_folder("draft.json"));
        int code = load(&l, &err);
        CHECK(code < 0 && err.code == code, "case %d (%s) is taken", i, said[i]);
        CHECK(code == 0 || strstr(err.text, said[i]), "case %d: \"%s\" lacks \"%s\"", i, err.text,
              said[i]);
        if (code == 0) unload(&l);
        quant_free(&m);
        folder_empty();
    }
    end();
}

// Wherever memory ends, an error and nothing left behind.
static void failing_memory(void) {
    quant_options o = {.kind = SALA__MODELOPT, .fused = QUANT_FUSED_NAMES, .tables = 3};
    quant_model m;
    loaded l;
    sala_error err;
    int code = -1, at = 0;
    begin();
    make(&m, o, NULL, NULL);
    quant_write(&m, folder, in_folder("draft.json"));
    int64_t before = counted.live;
    while (code < 0 && at < 500) {
        counted.calls = 0;
        counted.fail_at = ++at;
        code = load(&l, &err);
        CHECK(code == 0 || code == SALA_E_MEMORY, "allocation %d: %s", at, err.text);
        if (code < 0) CHECK(counted.live == before, "allocation %d leaves memory", at);
    }
    counted.fail_at = 0;
    CHECK(code == 0 && at > 20, "%d allocations", at);
    if (code == 0) unload(&l);
    quant_free(&m);
    end();
}

// ---- the engine ----

static sala_options engine_options(const char *draft) {
    sala_options o = small_options(64, 0);
    o.device = "cpu";
    o.draft = draft;
    o.hooks = env;
    return o;
}

static void engine(void) {
    quant_options q = {.kind = SALA__PLAIN, .tables = 3};
    quant_model m;
    sala_info with, without;
    sala_error err;
    begin();
    make(&m, q, NULL, NULL);
    quant_write(&m, folder, in_folder("draft.json"));
    sala_options o = engine_options(folder);
    int code = sala_plan(SALA_TINY, &o, &with, &err);
    CHECK(code == 0, "%s", err.text);
    CHECK(strcmp(with.draft, "1.0 M parameters, BF16, layers 1 3 5, window 32768") == 0, "\"%s\"",
          with.draft);
    CHECK(with.draft_weight_bytes == 2 * m.weights.parameters, "%lld bytes",
          (long long)with.draft_weight_bytes);
    o.spec = "off";
    CHECK(sala_plan(SALA_TINY, &o, &without, &err) == 0, "%s", err.text);
    CHECK(!without.draft[0] && without.draft_weight_bytes == 0, "loaded although spec is off");
    o.spec = NULL;
    sala *s = sala_open(SALA_TINY, &o, &err);
    CHECK(s, "%s", err.text);
    if (s) {
        CHECK(s->has_draft && s->draft_weights.embed.data == s->weights.embed.data, "no head");
        CHECK(sala_check_weights(s, &err) == 0, "%s", err.text);
    }
    sala_close(s);
    tensor_of(&m, "midlayer.mlp.up_proj.weight")->poked = 0x7F80;
    quant_write(&m, folder, in_folder("draft.json"));
    s = sala_open(SALA_TINY, &o, &err); // opening reads no numbers
    CHECK(s && sala_check_weights(s, &err) == SALA_E_MODEL && strstr(err.text, "up_proj"), "%s",
          err.text);
    sala_close(s);
    quant_free(&m);
    end();
}

static void engine_faults(void) {
    static const char *const said[] = {"no such folder", "not a folder", "config.json",
                                       "neither model.safetensors", "truncated"};
    quant_options q = {.kind = SALA__PLAIN, .tables = 3};
    quant_model m;
    sala_error err;
    char path[1024];
    begin();
    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s",
                 i == 0   ? in_folder("none")
                 : i == 1 ? in_folder("config.json")
                          : folder);
        if (i == 1 || i == 3) put_config("config.json", NULL, NULL);
        if (i == 4) {
            make(&m, q, NULL, NULL);
            quant_write(&m, folder, in_folder("draft.json"));
            if (truncate(in_folder("model.safetensors"), 100) < 0) die(folder, "cannot truncate");
            quant_free(&m);
        }
        sala_options o = engine_options(path);
        sala *s = sala_open(SALA_TINY, &o, &err);
        CHECK(!s && strstr(err.text, said[i]), "case %d: \"%s\" lacks \"%s\"", i, err.text,
              said[i]);
        sala_close(s);
        folder_empty();
    }
    end();
}

// A head beside a synthetic model: every format, ids that rise, and room for it in the plan.
static void synthetic(void) {
    static const char *const weights[] = {"bf16", "nvfp4", "int4", "nvfp4-head"};
    begin();
    FILE *f = fopen(in_folder("head.json"), "wb");
    if (!f) die(folder, "cannot write");
    fputs("{\"draft_vocab_size\":40,\"intermediate_size\":96,\"num_attention_heads\":2,"
          "\"num_key_value_heads\":1,"
          "\"eagle_config\":{\"eagle_aux_hidden_state_layer_ids\":[1,2,4],\"sala_window\":1024}}",
          f);
    fclose(f);
    char path[1024];
    snprintf(path, sizeof path, "%s", in_folder("head.json"));
    for (int i = 0; i < 4; i++) {
        sala_options o = engine_options(path);
        sala_info info;
        sala_error err;
        o.synthetic = 1;
        o.weights = weights[i];
        o.reuse = "off"; // snapshots would give way to the limit below
        sala *s = sala_open(TINY_CONFIG, &o, &err);
        CHECK(s, "%s: %s", weights[i], err.text);
        if (!s) continue;
        sala__weights *w = &s->draft_weights;
        int format = i == 0 ? SALA_BF16 : i == 2 ? SALA_INT4 : SALA_NVFP4;
        sala_get_info(s, &info);
        CHECK(w->fc.format == format && w->head.format == format && w->layers[0].q.format == format,
              "%s: formats", weights[i]);
        CHECK(w->embed.data == s->weights.embed.data && w->fc.data, "%s: data", weights[i]);
        for (int t = 1; t < s->draft_config.draft_vocab; t++)
            CHECK(w->target_ids[t] > w->target_ids[t - 1] && w->target_ids[t] < info.vocab, "ids");
        CHECK(sala_check_weights(s, &err) == 0, "%s", err.text);
        CHECK(info.draft_weight_bytes == w->bytes && info.draft_weight_bytes > 0, "bytes");
        CHECK(strstr(info.draft, ", window 1024") && s->options.draft_window == 1024,
              "trained with 1,024 tokens, but \"%s\"", info.draft);
        sala_close(s);
        o.draft_window = 128;
        CHECK(sala_plan(TINY_CONFIG, &o, &info, &err) == 0 && strstr(info.draft, ", window 128"),
              "asked for 128, but \"%s\"", info.draft);
        o.draft_window = 0;
        sala_plan(TINY_CONFIG, &o, &info, &err);
        o.memory_limit = info.total_bytes - 1;
        CHECK(sala_plan(TINY_CONFIG, &o, &info, &err) == SALA_E_MEMORY &&
                  strstr(err.text, "draft head"),
              "%s", err.text);
    }
    end();
}

TEST_MAIN(TEST(configs), TEST(config_faults), TEST(rotary), TEST(parameters), TEST(layouts),
          TEST(tables), TEST(file_faults), TEST(failing_memory), TEST(engine), TEST(engine_faults),
          TEST(synthetic))
