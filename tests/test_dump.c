/*  test_dump.c - features and what the head reads, as events and as the files of `sala dump-features`, on the CPU (a
    device: test_cuda.c). Run in the repository. */
#define main program_main
#define take_event program_take_event // model.h has one too
#include "../main.c"
#undef main
#undef take_event
#include "check.h"
#include "model.h"

#include "features.h"

#include <sys/wait.h>

#define WORK SCRATCH "dump-test"

// ---- events ----

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
    enum { N = 70 };
    int32_t tokens[N];
    for (int m = 0; m < 4; m++)
        for (int hidden = 0; hidden < 2 - (m == 1); hidden++) {
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

// A loaded head captures the same, chunks change nothing.
static void as_a_head_captures(void) {
    enum { N = 140 };
    static const char *const formats[] = {"bf16", "nvfp4"};
    int32_t tokens[N];
    check_seed = 5;
    random_tokens(tokens, N, 2048);
    for (int f = 0; f < 2; f++) {
        shown c = shown_by("cpu", formats[f], tokens, N);
        shown_free(&c);
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
    features_write(
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
    features_write(path, out.data);
    cli_free(&file), cli_free(&out);
}

// Answers that the model wrote when decoding are what its head says of the rows that were dumped.
static void regenerated_answers(void) {
    write_questions(WORK "/q.jsonl", 7);
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
    CHECK(judged > 150 && f.samples == 8, "%d positions of %lld samples", judged,
          (long long)f.samples);
    CHECK(same >= 0.995 * judged, "%d of %d", same, judged);
    free(logits), cli_free(&f.file), sala_close(s);
}

// Nothing but the options that are noted changes a byte; a killed run goes on to the same bytes.
static void resumed_and_parallel(void) {
    const char base[] = "--regenerate --answer-tokens 8 --temperature 0.9 --seed 5 --max-tokens 60 "
                        "--shard-tokens 64";
    char more[256];
    int status = 0, n;
    write_questions(WORK "/r.jsonl", 9);
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
    features_write(WORK "/r2/features-00007.safetensors.tmp-1", "x");
    CHECK(dump(WORK "/r.jsonl", WORK "/r2", more) == CLI_OK, "failed");
    n = same_folders(WORK "/r1", WORK "/r2");
    CHECK(n > 5, "%d shards are the same", n);
    CHECK(access(WORK "/r2/features-00007.safetensors.tmp-1", F_OK) != 0, "left by a killed run");
    CHECK(dump(WORK "/r.jsonl", WORK "/r2", base) == CLI_OK &&
              same_folders(WORK "/r1", WORK "/r2") == n,
          "a run with nothing to do");
    int other = open(WORK "/r1", O_RDONLY);
    CHECK(flock(other, LOCK_EX) == 0 && dump(WORK "/r.jsonl", WORK "/r1", base) == CLI_OUTPUT,
          "two runs write there");
    close(other);
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {
        TEST(head_input_gives_logits), TEST(refusals),
        TEST(masks_and_rows),          TEST(regenerated_answers),
        TEST(resumed_and_parallel),    TEST(as_a_head_captures),
    };
    features_files();
    mkdir(WORK, 0777);
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
