#define SALA_IMPLEMENTATION
#include "../../sala.h"
// config.json: what is accepted must satisfy everything that the engine takes for granted, and no
// sum over the model's tensors may overflow. The first byte may ask for an allocation to fail; from 'e'
// on it is the config.json of a draft head for a model of the usual size.
#include "fuzz.h"

static void check_config(const sala__env *env, const sala__config *c) {
    const sala_dims *d = &c->dims;
    const float *scalars[] = {
        &d->eps,           &d->rope_theta, &d->embed_scale, &d->residual_scale,
        &d->logit_divisor, &d->attn_scale, &d->lin_scale};
    for (int i = 0; i < 7; i++) REQUIRE(*scalars[i] > 0 && isfinite(*scalars[i]));
    REQUIRE(d->vocab >= 1 && d->layers >= 1 && d->layers <= 1024);
    REQUIRE(d->hidden >= 16 && d->hidden % 16 == 0 && d->ffn >= 16 && d->ffn % 16 == 0);
    REQUIRE(d->head_dim >= 16 && d->head_dim % 16 == 0 && d->lin_dim >= 16 && d->lin_dim % 16 == 0);
    REQUIRE(d->heads * d->head_dim == d->hidden && d->heads % d->kv_heads == 0);
    REQUIRE(d->lin_kv_heads >= 1 && d->lin_heads % d->lin_kv_heads == 0);
    REQUIRE(d->stride >= 1 && d->kernel >= d->stride && d->kernel % d->stride == 0);
    REQUIRE(d->block >= d->stride && d->block % d->stride == 0 && d->init_blocks >= 0);
    REQUIRE(d->top_k >= d->init_blocks + d->local_blocks + 1 && d->dense_len >= 0);
    REQUIRE(sala_tier_slots(d, 1) >= 1 && sala_tier_slots(d, 2) >= 1 &&
            sala_tier_rows(d, 2, INT32_MAX) >= 0);
    REQUIRE(c->bos >= -1 && c->bos < d->vocab && c->pad >= -1 && c->pad < d->vocab);
    REQUIRE(c->eos_count >= 0 && c->eos_count <= SALA__MAX_EOS && (c->eos_count == 0 || c->eos));
    for (int i = 0; i < c->eos_count; i++) REQUIRE(c->eos[i] >= 0 && c->eos[i] < d->vocab);
    for (int i = 0; i < d->layers; i++) REQUIRE(c->sparse[i] == 0 || c->sparse[i] == 1);
    const sala__scheme *q = &c->scheme;
    REQUIRE(q->kind == 0 || (q->kind >= SALA__GPTQ && q->kind <= SALA__MODELOPT));
    REQUIRE(q->group >= -1 && (q->zero_offset | 1) == 1 && (q->symmetric | 1) == 1);
    sala__weights w;
    sala_error err;
    int code = sala__weights_plan(env, c, &w, &err);
    if (code < 0) {
        fuzz_error(code, &err);
        REQUIRE(code == SALA_E_MEMORY);
        return;
    }
    REQUIRE(w.parameters > 0 && w.bytes == 2 * w.parameters && w.decode_bytes > 0);
    REQUIRE(w.decode_bytes <= w.bytes + sala__weight_bytes(&w.head));
    sala__weights_free(env, &w);
}

static void check_draft(const sala__env *env, const sala__config *c, const sala__config *target) {
    REQUIRE(c->eagle && c->dims.hidden == target->dims.hidden && c->dims.layers == 1);
    REQUIRE(c->aux[0] >= 0 && c->aux[1] > c->aux[0] && c->aux[2] > c->aux[1]);
    REQUIRE(c->aux[2] < target->dims.layers);
    REQUIRE(c->draft_vocab >= 1 && c->draft_vocab <= target->dims.vocab);
    for (int i = 0; i < c->dims.head_dim / 2; i++)
        REQUIRE(c->frequency[i] > 0 && c->frequency[i] <= 1);
    check_config(env, c);
}

// config.json of a model, or of a draft head for `target`.
static int parse(const sala__env *env, const sala__json *j, int draft, sala__config *c,
                 sala_error *err) {
    static const char model[] = "{\"model_type\":\"minicpm_sala\",\"num_hidden_layers\":7,"
                                "\"mixer_types\":[\"minicpm4\",\"minicpm4\",\"minicpm4\","
                                "\"minicpm4\",\"minicpm4\",\"minicpm4\",\"minicpm4\"]}";
    sala__env plain = {NULL, NULL, NULL, NULL};
    sala__json m;
    sala__config target;
    if (!draft) return sala__config_parse(env, j, "fuzz", c, err);
    REQUIRE(sala__json_parse(&plain, "model", model, sizeof model - 1, &m, err) == 0);
    REQUIRE(sala__config_parse(&plain, &m, "model", &target, err) == 0);
    int code = sala__draft_config_parse(env, j, "fuzz", &target, c, err);
    if (code == 0) check_draft(env, c, &target);
    sala__config_free(&plain, &target);
    sala__json_free(&m);
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_memory memory = {0, 0, 0};
    sala__env env = {&memory, fuzz_allocate, fuzz_log, NULL};
    sala__json j;
    sala__config c;
    sala_error err;
    if (size == 0) return 0;
    if (data[0] < 32) memory.fail_at = data[0];
    int code = sala__json_parse(&env, "fuzz", data + 1, size - 1, &j, &err);
    if (code < 0) {
        fuzz_error(code, &err);
    } else {
        code = parse(&env, &j, data[0] >= 'e', &c, &err);
        sala__json_free(&j);
        if (code < 0) {
            fuzz_error(code, &err);
        } else {
            check_config(&env, &c);
            sala__config_free(&env, &c);
        }
    }
    REQUIRE(memory.live == 0);
    return 0;
}
