// The engine as a shared object for tests/test_train_draft.py, by ctypes: what a head's weights are
// once loaded, what it drafts, and what the target says of tokens.
#define SALA_IMPLEMENTATION
#include "../sala.h"

sala *lib_open(const char *model, const char *draft, const char *tree, sala_error *err);
int lib_generate(sala *s, const int32_t *tokens, int count, int32_t *out, int most, int32_t *trees,
                 float *scores, int trees_most);
int lib_rows(sala *s, const int32_t *tokens, int count, float *hidden);
int64_t lib_weight(sala *s, const char *name, float *codes, float *alpha);
void lib_numbers(const float *x, int count, float *e2m1, float *e4m3);
void lib_close(sala *s);

sala *lib_open(const char *model, const char *draft, const char *tree, sala_error *err) {
    sala_options o;
    memset(&o, 0, sizeof o);
    o.device = "cpu";
    o.threads = 2;
    o.context = 4096;
    o.chunk = 512;
    o.max_sequences = 1;
    o.logits_rows = 512;
    o.hidden_states = 1;
    o.draft = draft;
    o.spec = draft ? "eagle" : "off";
    o.spec_tree = draft ? tree : NULL;
    return sala_open(model, &o, err);
}

// A greedy answer of at most `most` tokens. Returns their number, or -1. trees: [trees_most][2 + 3 * 32]
// position of the root, nodes, then the nodes' tokens, parents and whether they were accepted; scores:
// [trees_most][32]. Trees that the head did not draw are left out; the first row without one has no nodes.
int lib_generate(sala *s, const int32_t *tokens, int count, int32_t *out, int most, int32_t *trees,
                 float *scores, int trees_most) {
    sala_request r;
    sala_error err;
    sala_event e;
    int made = 0, drawn = 0;
    memset(&r, 0, sizeof r);
    r.tokens = tokens;
    r.token_count = count;
    r.max_tokens = most;
    r.want_trees = trees != NULL;
    if (sala_submit(s, &r, &err) < 0) return -1;
    while (sala_step(s, &err) > 0)
        while (sala_next_event(s, &e)) {
            if (e.type == SALA_EVENT_TOKEN && made < most) out[made++] = e.token;
            if (e.type != SALA_EVENT_TREE || e.source != SALA_DRAFT_EAGLE || drawn == trees_most)
                continue;
            int32_t *t = trees + drawn * (2 + 3 * 32);
            t[0] = (int32_t)e.position;
            t[1] = e.node_count;
            for (int n = 0; n < e.node_count && n < 32; n++) {
                t[2 + n] = e.node_token[n];
                t[2 + 32 + n] = e.node_parent[n];
                t[2 + 64 + n] = e.node_accepted[n];
                scores[drawn * 32 + n] = e.node_score[n];
            }
            drawn++;
        }
    return made;
}

// hidden: [layers + 2, count, hidden] as an event has it, of all rows.
int lib_rows(sala *s, const int32_t *tokens, int count, float *hidden) {
    sala_request r;
    sala_error err;
    sala_event e;
    const size_t width = (size_t)s->config.dims.hidden;
    memset(&r, 0, sizeof r);
    r.tokens = tokens;
    r.token_count = count;
    r.max_tokens = 1;
    r.want_rows = SALA_ROWS_PROMPT;
    if (sala_submit(s, &r, &err) < 0) return -1;
    int code;
    while ((code = sala_step(s, &err)) > 0)
        while (sala_next_event(s, &e)) {
            if (e.type != SALA_EVENT_ROWS) continue;
            for (size_t l = 0; l < (size_t)s->config.dims.layers + 2; l++)
                memcpy(hidden + (l * (size_t)count + (size_t)e.first_position) * width,
                       e.hidden + l * (size_t)e.row_count * width,
                       (size_t)e.row_count * width * sizeof *hidden);
        }
    return code;
}

// A matrix of the head as products read it: [n, k] numbers, and what multiplies each row's sum. Returns
// n * k; 0: there is none of that name.
int64_t lib_weight(sala *s, const char *name, float *codes, float *alpha) {
    sala__item item;
    for (int i = 0; i < sala__item_count(&s->draft_config); i++) {
        if (!sala__item_at(&s->draft_config, &s->draft_weights, i, &item) ||
            strcmp(item.name, name) != 0)
            continue;
        const sala_weight *w = item.weight;
        for (int n = 0; n < w->n; n++) {
            float *to = codes + (int64_t)n * w->k;
            alpha[n] = w->alpha ? w->alpha[n] : 1;
            for (int k = 0; k < w->k && w->format == SALA_NVFP4; k += 16)
                sala__load_weight4(w, n, k, to + k);
            for (int k = 0; k < w->k && w->format == SALA_BF16; k++)
                to[k] = sala_bf16_f32(((const uint16_t *)w->data)[(int64_t)n * w->k + k]);
        }
        return (int64_t)w->n * w->k;
    }
    return 0;
}

void lib_numbers(const float *x, int count, float *e2m1, float *e4m3) {
    for (int i = 0; i < count; i++) {
        e2m1[i] = sala_e2m1_f32(sala_f32_e2m1(x[i]));
        e4m3[i] = sala_e4m3_f32(sala_f32_e4m3(fabsf(x[i])));
    }
}

void lib_close(sala *s) {
    sala_close(s);
}
