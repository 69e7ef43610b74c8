/*  test_dump.c - features and what the head reads, as events and as the files of `sala dump-features`. On the CPU,
    and the events on the simulator (SALA_SIM) or a GPU (SALA_TEST_GPU=N) too. Run in the repository. */
#define main program_main
#define take_event program_take_event // model.h has one too
#include "../main.c"
#undef main
#undef take_event
#include "check.h"
#include "model.h"

#include <sys/wait.h>

#define WORK "build/dump-test"

// ---- events ----

typedef struct shown { // what a prompt shows
    float *logits;     // [n, vocab]
    uint16_t *rows[4]; // [n, hidden]
    int vocab, hidden;
} shown;

static void shown_free(shown *s) {
    free(s->logits);
    for (int i = 0; i < 4; i++) free(s->rows[i]);
}

// Read a prompt; with hidden states, features must be those of the three layers.
static shown show(sala *s, const int32_t *tokens, int n, int want) {
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

static int same_rows(const shown *a, const shown *b, int n) {
    size_t bytes = (size_t)n * (size_t)a->hidden * 2;
    int same = 1;
    for (int i = 0; i < 4; i++) same &= memcmp(a->rows[i], b->rows[i], bytes) == 0;
    return same;
}

// What the head of a model that is open on the CPU makes of rows. To be freed.
static float *multiply(sala *s, const uint16_t *rows, int n) {
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

static sala *open_model(const char *path, sala_options *o, int a, int b, int c) {
    sala_error err;
    o->features[0] = a, o->features[1] = b, o->features[2] = c;
    sala *s = sala_open(path, o, &err);
    if (!s) die(path, err.text);
    return s;
}

// sala-tiny's shape, but what the head reads is divided by 4; and a head for it.
static const char config_4[] = WORK "/config.json", head_file[] = WORK "/head.json";

static void write_text(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0) die("cannot write", path);
}

static void make_files(void) {
    cli_buffer text = {0};
    mkdir("build", 0777), mkdir(WORK, 0777);
    if (cli_read_file(SALA_TINY "/config.json", &text)) exit(2);
    char *base = strstr(text.data, "\"dim_model_base\": 256");
    if (!base) die("config.json", "has no dim_model_base of 256");
    memcpy(base, "\"dim_model_base\":  64", 21);
    write_text(config_4, text.data);
    cli_free(&text);
    write_text(head_file,
               "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"model_type\": \"llama\",\n"
               "\"hidden_size\": 256, \"intermediate_size\": 384, \"num_attention_heads\": 2,\n"
               "\"num_key_value_heads\": 2, \"head_dim\": 128, \"num_hidden_layers\": 1,\n"
               "\"vocab_size\": 2048, \"draft_vocab_size\": 1000, \"rms_norm_eps\": 1e-6,\n"
               "\"rope_theta\": 10000.0, \"hidden_act\": \"silu\",\n"
               "\"eagle_config\": {\"eagle_aux_hidden_state_layer_ids\": [1, 2, 6]}}\n");
}

// The rows that the head reads give the logits that the engine reports, bit for bit, whatever is shown beside.
static void head_input_gives_logits(void) {
    static const struct {
        const char *path, *weights, *prefill;
        int a, b, c;
    } models[] = {
        {TINY, NULL, NULL, 0, 2, 3},
        {config_4, "bf16", NULL, 1, 3, 4},
        {config_4, "nvfp4-head", "w4a4", 0, 6, 7},
        {config_4, "int4", NULL, -1, 0, 0},
    };
    enum { N = 150 };
    int32_t tokens[N];
    for (int m = 0; m < 4; m++)
        for (int hidden = 0; hidden < 2; hidden++) {
            sala_options o = small_options(128, 64);
            o.device = "cpu";
            o.synthetic = models[m].weights != NULL;
            o.weights = models[m].weights;
            o.prefill = models[m].prefill;
            o.hidden_states = hidden;
            sala *s = open_model(models[m].path, &o, models[m].a, models[m].b, models[m].c);
            check_seed = 3;
            random_tokens(tokens, N, s->config.dims.vocab);
            CHECK(s->config.dims.logit_divisor == 4.0f, "%g", (double)s->config.dims.logit_divisor);
            shown all = show(s, tokens, N, SALA_ROWS_PROMPT | SALA_ROWS_FEATURES);
            shown one = show(s, tokens, N, SALA_ROWS_FEATURES);
            float *made = multiply(s, one.rows[3], N);
            CHECK(memcmp(made, all.logits, (size_t)N * (size_t)all.vocab * 4) == 0,
                  "model %d: the logits are others", m);
            CHECK(same_rows(&all, &one, N), "model %d: features with logits are others", m);
            free(made), shown_free(&all), shown_free(&one), sala_close(s);
        }
}

static void refusals(void) {
    static const int wrong[][3] = {{2, 1, 3}, {0, 0, 1}, {1, 3, 8}, {3, 4, 4}, {1, 0, 0}};
    const int32_t token = 5;
    sala_error err;
    sala_options o = small_options(64, 0);
    o.device = "cpu";
    for (int i = 0; i < 5; i++) {
        memcpy(o.features, wrong[i], sizeof wrong[i]);
        sala *s = sala_open(SALA_TINY, &o, &err);
        CHECK(!s && err.code == SALA_E_ARGUMENT && strstr(err.text, "three rising"), "%s",
              err.text);
        sala_close(s);
    }
    sala *s = open_model(SALA_TINY, &o, 0, 0, 0);
    sala_request r = request_of(&token, 1, 1);
    r.want_rows = SALA_ROWS_FEATURES;
    CHECK(sala_submit(s, &r, &err) == SALA_E_ARGUMENT && strstr(err.text, "features"), "%s",
          err.text);
    sala_close(s);
    s = open_model(SALA_TINY, &o, -1, 0, 0);
    r.want_rows |= SALA_ROWS_PROMPT;
    CHECK(sala_submit(s, &r, &err) == SALA_E_ARGUMENT && strstr(err.text, "logits-rows"), "%s",
          err.text);
    sala_close(s);
}

// What a head that is loaded captured of the last pass, as planes.
static void captured(sala *s, int n, uint16_t *out) {
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
static shown shown_by(const char *device, const char *weights, const int32_t *tokens, int n) {
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

static const char *device_name(void) { // as in test_draft.c; NULL: none
    static char name[32];
    const char *simulator = getenv("SALA_SIM"), *ordinal = getenv("SALA_TEST_GPU");
    snprintf(name, sizeof name, "cuda:%s", ordinal ? ordinal : "0");
    if (ordinal) return name;
    if (!simulator || !sala__file_exists(simulator)) return NULL;
    setenv("SALA_CUDA", simulator, 1);
    setenv("SALA_NVRTC", simulator, 1);
    return name;
}

static void features_on_devices(void) {
    enum { N = 140 };
    static const char *const formats[] = {"bf16", "nvfp4"};
    int32_t tokens[N];
    const char *name = device_name();
    check_seed = 5;
    random_tokens(tokens, N, 2048);
    for (int f = 0; f < 2; f++) {
        shown c = shown_by("cpu", formats[f], tokens, N);
        if (!name) {
            shown_free(&c);
            continue;
        }
        shown g = shown_by(name, formats[f], tokens, N);
        sala_options o = small_options(64, 0);
        o.synthetic = 1, o.device = "cpu", o.weights = formats[f];
        sala *s = open_model(config_4, &o, 0, 0, 0);
        float *made = multiply(s, g.rows[3], N);
        double d = relative(made, g.logits, (size_t)N * 2048);
        CHECK(d < 1e-4, "%s: what the head read gives other logits: %g", name, d);
        for (int i = 0; i < 4; i++) {
            float *x = (float *)need(malloc(2 * N * 256 * sizeof(float))), *y = x + N * 256;
            for (int k = 0; k < N * 256; k++)
                x[k] = sala_bf16_f32(g.rows[i][k]), y[k] = sala_bf16_f32(c.rows[i][k]);
            d = relative(x, y, N * 256);
            CHECK(d < 0.05, "%s, %s: plane %d is not the CPU's: %g", name, formats[f], i, d);
            free(x);
        }
        free(made), shown_free(&g), shown_free(&c), sala_close(s);
    }
}

// ---- files ----

typedef struct shard {
    cli_buffer file;
    const int32_t *ids;
    const int64_t *starts;
    const uint16_t *features, *hidden;
    const uint8_t *mask;
    int64_t tokens, samples;
} shard;

static const void *tensor(const shard *s, const sala__json *j, const char *name, const char *dtype,
                          int64_t *rows) {
    int t = sala__json_get(j, 0, name), shape = sala__json_get(j, t, "shape"),
        place = sala__json_get(j, t, "data_offsets");
    if (!sala__json_is(j, sala__json_get(j, t, "dtype"), dtype)) die(name, "is of another dtype");
    *rows = j->nodes[j->nodes[shape].child].integer;
    return s->file.data + 8 + *(const uint64_t *)(const void *)s->file.data +
           j->nodes[j->nodes[place].child].integer;
}

static shard shard_open(const char *folder, int k) {
    static const sala__env none = {NULL, NULL, NULL, NULL};
    shard s;
    sala__json j;
    sala_error err;
    char path[256];
    int64_t n;
    memset(&s, 0, sizeof s);
    snprintf(path, sizeof path, "%s/features-%05d.safetensors", folder, k);
    if (cli_read_file(path, &s.file)) die(path, "is not there");
    uint64_t size = *(const uint64_t *)(const void *)s.file.data;
    CHECK(size % 8 == 0, "the data begin at %llu", (unsigned long long)size);
    if (sala__json_parse(&none, path, s.file.data + 8, (size_t)size, &j, &err)) die(path, err.text);
    s.starts = (const int64_t *)tensor(&s, &j, "starts", "I64", &n);
    s.samples = n - 1;
    s.ids = (const int32_t *)tensor(&s, &j, "ids", "I32", &s.tokens);
    s.features = (const uint16_t *)tensor(&s, &j, "features", "BF16", &n);
    s.hidden = (const uint16_t *)tensor(&s, &j, "hidden", "BF16", &n);
    s.mask = (const uint8_t *)tensor(&s, &j, "loss_mask", "U8", &n);
    CHECK(n == s.tokens && s.starts[s.samples] == n && s.starts[0] == 0, "%lld rows", (long long)n);
    sala__json_free(&j);
    return s;
}

static int dump(const char *data, const char *folder,
                const char *more) { // options separated by spaces
    char text[512], *argv[40] = {NULL}, *save = NULL;
    int argc = 0;
    snprintf(text, sizeof text, "dump-features -q --device cpu --data %s --out %s %s", data, folder,
             more);
    for (char *t = strtok_r(text, " ", &save); t; t = strtok_r(NULL, " ", &save)) argv[argc++] = t;
    return sala_dump_features(argc, argv);
}

static void empty_folder(const char *folder) {
    char path[512];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (e->d_name[0] != '.') unlink(path);
    }
    if (d) closedir(d);
}

// Do two folders hold the same bytes? Returns the number of shards, -1: they differ.
static int same_folders(const char *a, const char *b) {
    int n = 0;
    for (char path[2][256];; n++) {
        cli_buffer x = {0}, y = {0};
        snprintf(path[0], 256, "%s/features-%05d.safetensors", a, n);
        snprintf(path[1], 256, "%s/features-%05d.safetensors", b, n);
        int there = access(path[0], F_OK) == 0;
        if (there != (access(path[1], F_OK) == 0)) return -1;
        if (!there) return n;
        if (cli_read_file(path[0], &x) || cli_read_file(path[1], &y)) return -1;
        int same = x.size == y.size && memcmp(x.data, y.data, x.size) == 0;
        cli_free(&x), cli_free(&y);
        if (!same) return -1;
    }
}

// What is under the loss, and that it is read back as the engine shows it.
static void masks_and_rows(void) {
    static const char *const want[] = {"[9][77]", "Once upon a time.", "It says moo.<|im_end|>",
                                       "\"Hi!\"", "A<|im_end|>B b<|im_end|>"};
    write_text(
        WORK "/a.jsonl",
        "{\"tokens\": [1, 5, 9, 77], \"loss_mask\": [0, false, 1, true]}\n\n"
        "{\"text\": \"Once upon a time.\"}\r\n"
        "{\"messages\": [{\"role\": \"system\", \"content\": \"Be.\"}, {\"role\": \"user\", "
        "\"content\": \"What does the cow say?\"}, "
        "{\"role\": \"assistant\", \"content\": \"It says moo.\"}]}\n"
        "{\"prompt\": \"The bear said:\", \"answer\": \" \\\"Hi!\\\"\"}\n"
        "{\"tokens\": [3, 4], \"loss_mask\": [0, 0]}\n"
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"A\"}, {\"role\": \"user\", "
        "\"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"B b\"}]}");
    empty_folder(WORK "/a");
    CHECK(dump(WORK "/a.jsonl", WORK "/a", "--layers 1,4,6 --shard-tokens 64") == CLI_OK, "failed");
    sala_options o = small_options(64, 0);
    o.device = "cpu";
    sala *s = open_model(SALA_TINY, &o, 1, 4, 6);
    int sample = 0;
    for (int k = 0; k < 2; k++) {
        shard f = shard_open(WORK "/a", k);
        CHECK(f.tokens <= 64, "%lld tokens in a shard", (long long)f.tokens);
        for (int64_t i = 0; i < f.samples && sample < 5; i++, sample++) {
            int64_t from = f.starts[i], n = f.starts[i + 1] - from, under = 0;
            int32_t ids[64];
            for (int64_t t = from; t < from + n; t++)
                if (f.mask[t]) ids[under++] = f.ids[t];
            char *text = sala_detokenize(s, ids, under, 1, NULL, NULL);
            const char *skip = sample == 1 ? strchr(text, 'O') : text; // behind BOS
            if (sample)
                CHECK(skip && strcmp(skip, want[sample]) == 0, "sample %d: '%s'", sample, text);
            else
                CHECK(under == 2 && ids[0] == 9 && ids[1] == 77, "the mask of a list");
            sala_free(s, text);
            shown e = show(s, f.ids + from, (int)n, SALA_ROWS_FEATURES);
            for (size_t t = 0; t < (size_t)n; t++) {
                size_t at = (size_t)from + t;
                for (size_t p = 0; p < 3; p++)
                    CHECK(memcmp(f.features + (3 * at + p) * 256, e.rows[p] + t * 256, 512) == 0,
                          "sample %d: features of token %zu", sample, t);
                CHECK(memcmp(f.hidden + at * 256, e.rows[3] + t * 256, 512) == 0,
                      "sample %d: what the head reads of token %zu", sample, t);
            }
            shown_free(&e);
        }
        cli_free(&f.file);
    }
    CHECK(sample == 5, "%d samples: one has nothing under loss", sample);
    sala_close(s);
}

// Questions of the evaluation as prompts, chats of two turns among them.
static void write_questions(const char *path, int most) {
    cli_buffer file = {0}, out = {0};
    sala__json j;
    if (cli_read_file(SALA_TINY "/eval_tasks.jsonl", &file)) exit(2);
    char *save = NULL, *line = strtok_r(file.data, "\n", &save);
    for (int n = 0; line && n < most; line = strtok_r(NULL, "\n", &save)) {
        if (sala__json_parse(&dump_env, path, line, strlen(line), &j, NULL) < 0) exit(2);
        const char *q = sala__json_text(&j, sala__json_get(&j, 0, "user"));
        if (q && strlen(q) < 400 && !strpbrk(q, "\"\\\n")) {
            char text[2048];
            const char *again = n % 3 ? ""
                                      : ", {\"role\": \"assistant\", \"content\": \"?\"}, "
                                        "{\"role\": \"user\", \"content\": \"And 2 + 3?\"}";
            snprintf(text, sizeof text,
                     "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}%s]}\n", q, again);
            cli_append(&out, text, strlen(text));
            n++;
        }
        sala__json_free(&j);
    }
    const char story_line[] = "{\"prompt\": \"Once upon a time there was\", \"answer\": \"?\"}\n";
    cli_append(&out, story_line, strlen(story_line));
    write_text(path, out.data);
    cli_free(&file), cli_free(&out);
}

// Answers that the model wrote when decoding are what its head says of the rows that were dumped.
static void regenerated_answers(void) {
    write_questions(WORK "/q.jsonl", 30);
    empty_folder(WORK "/q");
    CHECK(dump(WORK "/q.jsonl", WORK "/q", "--regenerate --answer-tokens 60") == CLI_OK, "failed");
    sala_options o = small_options(64, 0);
    o.device = "cpu";
    sala *s = open_model(SALA_TINY, &o, 0, 0, 0);
    shard f = shard_open(WORK "/q", 0);
    float *logits = multiply(s, f.hidden, (int)f.tokens);
    int judged = 0, same = 0;
    for (int64_t t = 0; t + 1 < f.tokens; t++) {
        if (!f.mask[t + 1]) continue;
        judged++;
        same += sala__sampler_argmax(logits + t * 2048, 2048) == f.ids[t + 1];
    }
    printf("      the head's choice is the token of the answer at %d of %d\n", same, judged);
    CHECK(judged > 300 && f.samples == 31, "%d positions of %lld samples", judged,
          (long long)f.samples);
    CHECK(same >= 0.995 * judged, "%d of %d", same, judged);
    free(logits), cli_free(&f.file), sala_close(s);
}

// Nothing but the options that are noted changes a byte; a killed run goes on to the same bytes.
static void resumed_and_parallel(void) {
    const char base[] =
        "--regenerate --answer-tokens 24 --temperature 0.9 --seed 5 --max-tokens 90 "
        "--shard-tokens 300";
    char more[256];
    int status = 0, n;
    write_questions(WORK "/r.jsonl", 40);
    empty_folder(WORK "/r1"), empty_folder(WORK "/r2");
    CHECK(dump(WORK "/r.jsonl", WORK "/r1", base) == CLI_OK, "failed");
    snprintf(more, sizeof more, "%s --parallel 3 --chunk 64 --threads 1 --spec off", base);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(dump(WORK "/r.jsonl", WORK "/r2", more));
    while (access(WORK "/r2/features-00001.safetensors", F_OK) != 0 &&
           waitpid(child, &status, WNOHANG) == 0)
        usleep(500);
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status), "it ended before it was killed: %d", status);
    write_text(WORK "/r2/features-00007.safetensors.tmp-1", "x");
    CHECK(dump(WORK "/r.jsonl", WORK "/r2", more) == CLI_OK, "failed");
    n = same_folders(WORK "/r1", WORK "/r2");
    CHECK(n > 5, "%d shards are the same", n);
    CHECK(access(WORK "/r2/features-00007.safetensors.tmp-1", F_OK) != 0, "left by a killed run");
    CHECK(dump(WORK "/r.jsonl", WORK "/r2", base) == CLI_OK &&
              same_folders(WORK "/r1", WORK "/r2") == n,
          "a run with nothing to do");
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {
        TEST(head_input_gives_logits), TEST(refusals),
        TEST(masks_and_rows),          TEST(regenerated_answers),
        TEST(resumed_and_parallel),    TEST(features_on_devices),
    };
    make_files();
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
