/*  features.h - what test_dump.c and test_cuda.c share: the features that a prompt shows, and models for them. Included
    after model.h. */
#ifndef SALA_TEST_FEATURES_H
#define SALA_TEST_FEATURES_H

#define FEATURES_DIR SCRATCH "features-test"

typedef struct shown { // what a prompt shows
    float *logits;     // [n, vocab]
    uint16_t *rows[4]; // [n, hidden]
    int vocab, hidden;
} shown;

HELPER void shown_free(shown *s) {
    free(s->logits);
    for (int i = 0; i < 4; i++) free(s->rows[i]);
}

// Read a prompt; with hidden states, features must be those of the three layers.
HELPER shown show(sala *s, const int32_t *tokens, int n, int want) {
    shown out = {NULL, {NULL}, s->config.dims.vocab, s->config.dims.hidden};
    size_t vocab = (size_t)out.vocab, width = (size_t)out.hidden;
    sala_request r = request_of(tokens, n, 1);
    sala_error err;
    sala_event e;
    int seen = 0;
    r.want_rows = want;
    if (sala_submit(s, &r, &err) < 0) die("sala_submit", err.text);
    out.logits = (float *)need(calloc((size_t)n, vocab * 4));
    for (int i = 0; i < 4; i++) out.rows[i] = (uint16_t *)need(calloc((size_t)n, width * 2));
    while (sala_step(s, &err) > 0)
        while (sala_next_event(s, &e)) {
            if (e.type != SALA_EVENT_ROWS) continue;
            size_t rows = (size_t)e.row_count, at = (size_t)e.first_position;
            CHECK(!e.logits == !(want & SALA_ROWS_PROMPT), "logits that were not wanted, or none");
            CHECK(!e.features == !(want & SALA_ROWS_FEATURES), "features not wanted, or none");
            CHECK((int)at == seen, "position %zu after %d rows", at, seen);
            seen += e.row_count;
            if (e.logits) memcpy(out.logits + at * vocab, e.logits, rows * vocab * 4);
            for (size_t i = 0; i < 4 && e.features; i++)
                memcpy(out.rows[i] + at * width, e.features + i * rows * width, rows * width * 2);
            for (size_t i = 0; i < 3 && e.hidden && e.features; i++) {
                const float *x = e.hidden + (size_t)(s->options.features[i] + 1) * rows * width;
                int same = 1;
                for (size_t k = 0; k < rows * width; k++)
                    same &= sala_bf16_f32(e.features[i * rows * width + k]) == x[k];
                CHECK(same, "features of layer %d are not its output", s->options.features[i]);
            }
        }
    CHECK(seen == (want ? n : 0), "%d of %d rows", seen, n);
    return out;
}

HELPER int same_rows(const shown *a, const shown *b, int n) {
    size_t bytes = (size_t)n * (size_t)a->hidden * 2;
    int same = 1;
    for (int i = 0; i < 4; i++) same &= memcmp(a->rows[i], b->rows[i], bytes) == 0;
    return same;
}

// What the head of a model that is open on the CPU makes of rows. To be freed.
HELPER float *multiply(sala *s, const uint16_t *rows, int n) {
    sala_gemm_args a;
    memset(&a, 0, sizeof a);
    a.rows = n;
    a.count = 1;
    a.x = (const sala_act *)rows;
    a.w[0] = s->weights.head;
    a.y_f32 = (float *)need(calloc((size_t)n, (size_t)s->config.dims.vocab * 4));
    sala__run_cpu(&s->cpu, SALA__OP_gemm, &a);
    return a.y_f32;
}

HELPER sala *open_model(const char *path, sala_options *o, int a, int b, int c) {
    sala_error err;
    o->features[0] = a, o->features[1] = b, o->features[2] = c;
    sala *s = sala_open(path, o, &err);
    if (!s) die(path, err.text);
    return s;
}

// sala-tiny's shape, but what the head reads is divided by 4; and a head for it.
HELPER const char config_4[] = FEATURES_DIR "/config.json", head_file[] = FEATURES_DIR "/head.json";

HELPER void features_write(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) die("cannot write", path);
}

HELPER void features_files(void) {
    char *text = (char *)need(calloc(1, 65536));
    FILE *f = fopen(SALA_TINY "/config.json", "r");
    mkdir("build", 0777), mkdir(FEATURES_DIR, 0777);
    if (!f || !fread(text, 1, 65535, f)) die("config.json", "cannot be read");
    fclose(f);
    char *base = strstr(text, "\"dim_model_base\": 256");
    if (!base) die("config.json", "has no dim_model_base of 256");
    memcpy(base, "\"dim_model_base\":  64", 21);
    features_write(config_4, text);
    free(text);
    features_write(head_file,
                   "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"model_type\": \"llama\",\n"
                   "\"hidden_size\": 256, \"intermediate_size\": 384, \"num_attention_heads\": 2,\n"
                   "\"num_key_value_heads\": 2, \"head_dim\": 128, \"num_hidden_layers\": 1,\n"
                   "\"vocab_size\": 2048, \"draft_vocab_size\": 1000, \"rms_norm_eps\": 1e-6,\n"
                   "\"rope_theta\": 10000.0, \"hidden_act\": \"silu\",\n"
                   "\"eagle_config\": {\"eagle_aux_hidden_state_layer_ids\": [1, 2, 6]}}\n");
}

// What a head that is loaded captured of the last pass, as planes.
HELPER void captured(sala *s, int n, uint16_t *out) {
    size_t width = (size_t)s->config.dims.hidden, bytes = 3 * (size_t)n * width * 2;
    uint16_t *rows = (uint16_t *)need(malloc(bytes));
    sala_error err;
    if (s->on_gpu) {
        sala__cuda *c = &s->gpu.cuda;
        if (sala__cuda_enter(c, &err) < 0 ||
            sala__cuda_download(c, rows, sala__on_gpu(s->draft.features), bytes, &err) < 0 ||
            sala__cuda_wait(c, &err) < 0)
            die("download", err.text);
        sala__cuda_leave(c);
    } else {
        memcpy(rows, s->draft.features, bytes);
    }
    for (size_t r = 0; r < (size_t)n; r++)
        for (size_t i = 0; i < 3; i++)
            memcpy(out + (i * (size_t)n + r) * width, rows + (3 * r + i) * width, width * 2);
    free(rows);
}

// On one device: a loaded head captures the same, and chunks change nothing. Returns what was shown.
HELPER shown shown_by(const char *device, const char *weights, const int32_t *tokens, int n) {
    shown out[2];
    for (int k = 0; k < 2; k++) {
        sala_options o = small_options(k ? 64 : 256, 64);
        o.device = device;
        o.synthetic = 1;
        o.weights = weights;
        o.draft = head_file;
        sala *s = open_model(config_4, &o, -1, 0, 0);
        CHECK(s->options.features[1] == 2 && s->options.features[2] == 6, "not the head's layers");
        out[k] = show(s, tokens, n, SALA_ROWS_FEATURES | (k ? SALA_ROWS_PROMPT : 0));
        uint16_t *head = (uint16_t *)need(calloc(3 * (size_t)n, 256 * 2));
        if (!k) captured(s, n, head); // of one chunk
        for (size_t i = 0; i < 3 && !k; i++)
            CHECK(memcmp(head + i * (size_t)n * 256, out[k].rows[i], (size_t)n * 512) == 0,
                  "%s, %s: the head captured another layer %zu", device, weights, i);
        free(head), sala_close(s);
    }
    CHECK(same_rows(&out[0], &out[1], n), "%s, %s: the chunk changes features", device, weights);
    shown_free(&out[0]);
    return out[1];
}

#endif
