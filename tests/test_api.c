#define SALA_IMPLEMENTATION
#include "../sala.h"
// The public functions from a caller's side: misuse and every error, hooks, plans, engines side by side, and an
// allocator that fails at every place in turn.
#include "check.h"
#include "model.h"
#include <unistd.h>

static sala_options tiny_options(void) {
    sala_options o = small_options(64, 64);
    o.synthetic = 1;
    o.synthetic_seed = 5;
    o.context = 256;
    return o;
}

// An error is a code, one clear sentence that names what is wrong, and it makes no difference who listens.
#define REFUSED(call_with, want, word)                                                             \
    do {                                                                                           \
        sala_error err, *e = &err;                                                                 \
        memset(&err, 0x55, sizeof err);                                                            \
        int64_t code = (int64_t)(call_with);                                                       \
        CHECK(code == (want) && err.code == (want), "code %lld, error %d, wanted %d: %.200s",      \
              (long long)code, err.code, (want), err.text);                                        \
        CHECK(memchr(err.text, 0, sizeof err.text) && strstr(err.text, word),                      \
              "\"%s\" is not in: %.200s", (word), err.text);                                       \
        e = NULL;                                                                                  \
        code = (int64_t)(call_with);                                                               \
        CHECK(code == (want), "without an error struct: %lld", (long long)code);                   \
    } while (0)

static int open_code(const char *path, const sala_options *o,
                     sala_error *err) { // 0 or the error of opening
    sala_error mine;
    sala *s = sala_open(path, o, err ? err : &mine);
    sala_close(s);
    if (!err && !s) CHECK(sala_open(path, o, NULL) == NULL, "without an error struct it opens");
    return s ? 0 : err ? err->code : mine.code;
}

// ---- opening ----

static void test_open_errors(void) {
    sala_options o = tiny_options(), bad;
    REFUSED(open_code(NULL, &o, e), SALA_E_ARGUMENT, "path");
    REFUSED(open_code("no/such/config.json", &o, e), SALA_E_FILE, "no/such/config.json");
    REFUSED(open_code("no/such/folder", NULL, e), SALA_E_FILE, "no/such/folder");
    REFUSED(open_code("tests/check.h", NULL, e), SALA_E_FILE, "tests/check.h");
    REFUSED(open_code("tests", NULL, e), SALA_E_FILE, "config.json");
    REFUSED(open_code("tests/check.h", &o, e), SALA_E_FILE, "tests/check.h"); // not JSON
    REFUSED(open_code(SALA_TINY "/generation_config.json", &o, e), SALA_E_MODEL, "model_type");
    bad = o, bad.threads = -1;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "threads");
    bad = o, bad.max_sequences = 257;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "max-sequences");
    bad = o, bad.context = -5;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "context");
    bad = o, bad.kv_tokens = 100;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "kv-tokens");
    bad = o, bad.chunk = 100;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "chunk");
    bad = o, bad.dense_len = -2;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "dense-len");
    bad = o, bad.logits_rows = -1;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "logits-rows");
    bad = o, bad.hidden_states = 2;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "hidden-states");
    bad = o, bad.synthetic = 7;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "synthetic");
    bad = o, bad.device = "abacus";
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "abacus");
    bad = o, bad.chat_template = "alpaca";
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_ARGUMENT, "alpaca");
    bad = o, bad.memory_limit = 1000;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_MEMORY,
            "max-sequences (4)"); // and the other options with their numbers
    bad = o, bad.context = bad.kv_tokens = 1 << 30, bad.memory_limit = 1 << 20;
    REFUSED(open_code(TINY_CONFIG, &bad, e), SALA_E_MEMORY, "context (1073741824)");
    o.device = "cpu";
    sala_error err;
    sala *s = sala_open(TINY_CONFIG, &o, &err);
    CHECK(s && err.code == 0, "%s", err.text);
    sala_close(s);
    sala_close(NULL);
}

// Options of 4-bit weights, and what is said of them.
static void test_four_bit_options(void) {
    static const struct {
        int synthetic;
        const char *weights, *prefill, *says; // the prefill, or part of an error
    } cases[] = {{1, NULL, NULL, "BF16"},
                 {1, "bf16", "w4a16", "BF16"},
                 {1, "nvfp4", NULL, "W4A16"}, // a CPU's own choice
                 {1, "nvfp4-head", "w4a4", "W4A4"},
                 {1, "int4", "auto", "W4A16"},
                 {1, "int4", "w4a4", "no linear layer of this model is NVFP4"},
                 {1, "bf16", "w4a4", "prefill w4a4"},
                 {0, NULL, "w4a4", "prefill w4a4"},
                 {0, "nvfp4", NULL, "weights (nvfp4) is for synthetic models"},
                 {1, "fp8", NULL, "weights is \"fp8\""},
                 {1, "nvfp4", "fast", "prefill is \"fast\""}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sala_options o = tiny_options();
        sala_error err;
        sala_info info;
        o.synthetic = cases[i].synthetic;
        o.weights = cases[i].weights;
        o.prefill = cases[i].prefill;
        sala *s = sala_open(o.synthetic ? TINY_CONFIG : TINY, &o, &err);
        if (s) sala_get_info(s, &info);
        CHECK(strstr(s ? info.prefill : err.text, cases[i].says), "case %d: %s", (int)i,
              s ? info.prefill : err.text);
        if (s) sala_close(s);
    }
    sala_options o = tiny_options();
    sala_error err;
    o.synthetic = 1;
    o.weights = "nvfp4-head";
    CHECK(!sala_open("tests/data/vectors/plain/config.json", &o, &err) &&
              strstr(err.text, "tie_word_embeddings"),
          "%s", err.text);
}

static void test_settings_by_name(void) {
    sala_options o;
    sala_request r;
    memset(&o, 0, sizeof o);
    memset(&r, 0, sizeof r);
    REFUSED(sala_set_option(&o, "colour", "red", e), SALA_E_ARGUMENT, "colour");
    REFUSED(sala_set_option(&o, "chunk", "65", e), SALA_E_ARGUMENT, "chunk");
    REFUSED(sala_set_option(&o, "chunk", NULL, e), SALA_E_ARGUMENT, "chunk");
    REFUSED(sala_set_option(NULL, "chunk", "64", e), SALA_E_ARGUMENT, "option");
    REFUSED(sala_set_option(&o, NULL, "64", e), SALA_E_ARGUMENT, "option");
    REFUSED(sala_set_request(&r, "temprature", "1", e), SALA_E_ARGUMENT, "temperature");
    REFUSED(sala_set_request(&r, "top-p", "1.5", e), SALA_E_ARGUMENT, "top-p");
    REFUSED(sala_set_request(NULL, "top-p", "0.5", e), SALA_E_ARGUMENT, "request");
    CHECK(sala_set_option(&o, "chunk", "192", NULL) == 0 && o.chunk == 192, "chunk is %d", o.chunk);
    CHECK(sala_set_option(&o, "dense_len", "0", NULL) == 0 && o.dense_len == SALA_DENSE_NEVER,
          "dense_len is %d", o.dense_len);
    CHECK(sala_set_request(&r, "max-tokens", "2K", NULL) == 0 && r.max_tokens == 2048,
          "max_tokens is %lld", (long long)r.max_tokens);
}

static void test_plan(void) {
    for (int files = 0; files < 2; files++) {
        sala_options o = tiny_options();
        sala_error err;
        sala_info plan, info;
        o.memory_limit = 1 << 28;
        o.hidden_states = 1;
        o.synthetic = !files;
        const char *path = files ? TINY : TINY_CONFIG;
        CHECK(sala_plan(path, &o, &plan, &err) == 0 && err.code == 0, "%s", err.text);
        sala *s = sala_open(path, &o, &err);
        if (!s) die(path, err.text);
        sala_get_info(s, &info);
        CHECK(strcmp(info.path, path) == 0 && strstr(info.device, "CPU, 2 threads") &&
                  strcmp(info.weight_format, "BF16") == 0,
              "%s, %s, %s", info.path, info.device, info.weight_format);
        CHECK(info.eos_count == 2 && info.eos[1] == 96 && info.bos == 1, "special tokens");
        CHECK(plan.path == NULL && plan.chat_template == NULL, "strings in a plan");
        info.path = info.chat_template = NULL;
        info.eos = NULL;
        info.eos_count = 0;
        CHECK(memcmp(&plan, &info, sizeof info) == 0, "the plan is not what the engine says");
        CHECK(info.total_bytes == info.weight_bytes + info.kv_bytes + info.state_bytes +
                                      info.pending_bytes + info.scratch_bytes + info.reuse_bytes,
              "the sum");
        CHECK(info.state_bytes == info.state_bytes_per_sequence * 4 &&
                  info.state_bytes_per_sequence == 3 * 6 * 16 * 16 * 4,
              "states");
        CHECK(info.parameters == 212160 && info.weight_bytes == 2 * 212160, "%lld parameters",
              (long long)info.parameters);
        CHECK(info.kv_bytes_per_token > 0 && info.kv_tokens_total >= 256, "pages");
        o.context = o.kv_tokens = info.longest_context; // what is said to fit does
        CHECK(sala_plan(path, &o, &plan, &err) == 0, "the longest context does not fit: %s",
              err.text);
        o.context = o.kv_tokens = info.longest_context / 4 * 5; // and not much more
        CHECK(sala_plan(path, &o, &plan, &err) == SALA_E_MEMORY,
              "a quarter more than the longest context fits");
        CHECK(plan.total_bytes > o.memory_limit, "a plan that does not fit is not shown");
        sala_close(s);
    }
    sala_info info;
    REFUSED(sala_plan(NULL, NULL, &info, e), SALA_E_ARGUMENT, "path");
    REFUSED(sala_plan("no/such/folder", NULL, &info, e), SALA_E_FILE, "no/such/folder");
}

// Snapshots of prefixes give way to all else, unless their memory was asked for.
static void test_plan_snapshots(void) {
    sala_options o = tiny_options();
    sala_error err;
    sala_info all, some;
    o.synthetic = 1;
    CHECK(sala_plan(TINY_CONFIG, &o, &all, &err) == 0 && all.snapshots == 16, "%s", err.text);
    int64_t each = all.reuse_bytes / 16;
    for (int left = 16; left >= 0; left--) {
        o.memory_limit = all.total_bytes - (16 - left) * each;
        CHECK(sala_plan(TINY_CONFIG, &o, &some, &err) == 0, "%s", err.text);
        CHECK(some.snapshots == left && some.reuse_bytes == left * each &&
                  some.total_bytes <= o.memory_limit &&
                  strcmp(some.reuse, left ? "prefix" : "off") == 0,
              "%d snapshots instead of %d, reuse %s", some.snapshots, left, some.reuse);
        CHECK(some.longest_context >= o.context && some.longest_context <= all.longest_context,
              "%lld tokens fit", (long long)some.longest_context);
        sala *s = left % 8 ? NULL : sala_open(TINY_CONFIG, &o, &err);
        CHECK(s || left % 8, "%s", err.text);
        sala_close(s);
    }
    o.reuse = "prefix";
    CHECK(sala_plan(TINY_CONFIG, &o, &some, &err) == SALA_E_MEMORY && some.snapshots == 1,
          "reuse prefix was asked for, and %d snapshots do not fit", some.snapshots);
    o.memory_limit += each;
    CHECK(sala_plan(TINY_CONFIG, &o, &some, &err) == 0 && some.snapshots == 1, "%s", err.text);
    o.reuse_memory = 2 * each;
    CHECK(sala_plan(TINY_CONFIG, &o, &some, &err) == SALA_E_MEMORY && some.snapshots == 2,
          "reuse-memory was asked for, and %d snapshots do not fit", some.snapshots);
}

// ---- requests ----

static int64_t submit_code(sala *s, const sala_request *r, sala_error *err) {
    return sala_submit(s, r, err);
}

static void test_request_errors(void) {
    sala_options o = tiny_options();
    int32_t tokens[300] = {1, 2, 3}, wrong[2] = {5, 97}, negative[2] = {5, -1};
    const char *stop[2] = {"x", ""};
    sala_bias biases[2] = {{3, 1}, {3, 2}}, beyond = {97, 0}, nan_bias = {3, NAN};
    session t = session_open(TINY_CONFIG, &o);
    sala *s = t.engine;
    sala_request good = request_of(tokens, 3, 4), r;
#define BAD(change, want, word)                                                                    \
    r = good, change;                                                                              \
    REFUSED(submit_code(s, &r, e), want, word)
    BAD(r.token_count = 0, SALA_E_ARGUMENT, "prompt");
    BAD(r.token_count = -1, SALA_E_ARGUMENT, "token_count");
    BAD(r.tokens = NULL, SALA_E_ARGUMENT, "tokens");
    BAD((r.tokens = wrong, r.token_count = 2), SALA_E_ARGUMENT, "97");
    BAD((r.tokens = negative, r.token_count = 2), SALA_E_ARGUMENT, "-1");
    BAD((r.force = wrong, r.force_count = 2), SALA_E_ARGUMENT, "force");
    BAD(r.force_count = 2, SALA_E_ARGUMENT, "force");
    BAD((r.stop_tokens = negative, r.stop_token_count = 2), SALA_E_ARGUMENT, "stop_tokens");
    BAD(r.stop_token_count = -2, SALA_E_ARGUMENT, "stop_token_count");
    BAD((r.stop = stop, r.stop_count = 2), SALA_E_ARGUMENT, "stop string 1");
    BAD((r.stop = stop, r.stop_count = 1), SALA_E_STATE, "tokenizer");
    BAD(r.stop_count = 65, SALA_E_ARGUMENT, "stop_count");
    BAD((r.biases = biases, r.bias_count = 2), SALA_E_ARGUMENT, "twice");
    BAD((r.biases = &beyond, r.bias_count = 1), SALA_E_ARGUMENT, "97");
    BAD((r.biases = &nan_bias, r.bias_count = 1), SALA_E_ARGUMENT, "bias");
    BAD(r.text = "both", SALA_E_ARGUMENT, "both");
    BAD((r.token_count = 0, r.text = "text"), SALA_E_STATE, "tokenizer");
    BAD((r.token_count = 0, r.text_bytes = 3), SALA_E_ARGUMENT, "text");
    BAD(r.max_tokens = -1, SALA_E_ARGUMENT, "max-tokens");
    BAD(r.max_tokens = 254, SALA_E_ARGUMENT, "context");
    BAD(r.temperature = -1, SALA_E_ARGUMENT, "temperature");
    BAD(r.temperature = NAN, SALA_E_ARGUMENT, "temperature");
    BAD(r.top_p = 1.5f, SALA_E_ARGUMENT, "top-p");
    BAD(r.top_k = -1, SALA_E_ARGUMENT, "top-k");
    BAD(r.min_p = 2, SALA_E_ARGUMENT, "min-p");
    BAD(r.repetition_penalty = -1, SALA_E_ARGUMENT, "repetition-penalty");
    BAD(r.logprobs = 21, SALA_E_ARGUMENT, "logprobs");
    BAD(r.want_rows = 8, SALA_E_ARGUMENT, "want-rows");
    BAD(r.keep = 2, SALA_E_ARGUMENT, "keep");
    BAD(r.sequence = 77, SALA_E_ARGUMENT, "77");
    BAD(r.sequence = -1, SALA_E_ARGUMENT, "sequence");
#undef BAD
    sala_event ev;
    CHECK(sala_step(s, NULL) == 0 && sala_next_event(s, &ev) == 0,
          "a refused request left something");
    CHECK(session_do(&t, &good)->count == 4, "and a good one runs");
    session_close(&t);
}

static void test_sequence_errors(void) {
    sala_options o = tiny_options();
    int32_t tokens[40] = {1, 2, 3};
    session t = session_open(TINY_CONFIG, &o);
    sala *s = t.engine;
    sala_request r = request_of(tokens, 40, 20);
    REFUSED(sala_cancel(s, 1, e), SALA_E_ARGUMENT, "request 1");
    REFUSED(sala_release(s, 1, e), SALA_E_ARGUMENT, "sequence 1");
    REFUSED(sala_release(s, 0, e), SALA_E_ARGUMENT, "sequence 0"); // the id of a free slot
    r.keep = 1;
    int first = session_ask(&t, &r);
    session_step(&t);
    int64_t running = t.out[first].id;
    REFUSED(sala_release(s, running, e), SALA_E_STATE, "cancel");
    session_run(&t);
    int64_t kept = t.out[first].sequence;
    REFUSED(sala_cancel(s, running, e), SALA_E_ARGUMENT, "request");
    r.sequence = kept;
    r.keep = 0;
    int second = session_ask(&t, &r);
    REFUSED(submit_code(s, &r, e), SALA_E_STATE, "busy");
    REFUSED(sala_release(s, kept, e), SALA_E_STATE, "in use");
    session_cancel(&t, second);
    session_cancel(&t, second); // twice is once
    session_run(&t);
    CHECK(t.out[second].reason == SALA_FINISH_CANCELLED, "reason %d", t.out[second].reason);
    session_give_up(&t, kept); // it had not begun: the sequence was still kept
    REFUSED(sala_release(s, kept, e), SALA_E_ARGUMENT, "sequence");
    r.sequence = 0;
    r.keep = 1; // an engine may be closed with requests, sequences and events in it
    session_ask(&t, &r);
    sala_step(s, NULL);
    sala_close(s);
    for (int i = 0; i < t.count; i++) outcome_free(&t.out[i]);
    free(t.out);
}

static void test_success_clears_the_error(void) {
    sala_options o = tiny_options();
    sala_error err;
    int32_t tokens[3] = {1, 2, 3};
    session t = session_open(TINY_CONFIG, &o);
    sala_request r = request_of(tokens, 3, 4);
    sala_event ev;
    int64_t kept = 0;
#define CLEAR(call)                                                                                \
    memset(&err, 0x55, sizeof err);                                                                \
    CHECK((call) >= 0 && err.code == 0 && !err.text[0], "code %d after success: %.40s", err.code,  \
          err.text)
    r.keep = 1;
    CLEAR(sala_submit(t.engine, &r, &err));
    CLEAR(sala_cancel(t.engine, 1, &err));
    CLEAR(sala_step(t.engine, &err));
    while (sala_next_event(t.engine, &ev)) continue;
    CLEAR(sala_submit(t.engine, &r, &err));
    while (sala_step(t.engine, NULL) > 0)
        while (sala_next_event(t.engine, &ev)) kept = ev.sequence;
    CLEAR(sala_release(t.engine, kept, &err));
    CLEAR(sala_check_weights(t.engine, &err));
    CLEAR(sala_set_option(&o, "threads", "2", &err));
    CLEAR(sala_set_request(&r, "top-k", "2", &err));
#undef CLEAR
    session_close(&t);
}

// ---- text ----

static void test_without_tokenizer(void) {
    sala_options o = tiny_options();
    int32_t *tokens, one = 1;
    size_t bytes;
    session t = session_open(TINY_CONFIG, &o);
    sala *s = t.engine;
    CHECK(strcmp(t.info.chat_template, "none") == 0 && t.info.bos == 1, "%s", t.info.chat_template);
    REFUSED(sala_tokenize(s, "x", 1, 0, &tokens, e), SALA_E_STATE, "tokenizer");
    REFUSED(sala_chat_turn(s, "user", "x", 1, 1, 1, &tokens, e), SALA_E_STATE, "tokenizer");
    sala_error err;
    CHECK(sala_detokenize(s, &one, 1, 0, &bytes, &err) == NULL && err.code == SALA_E_STATE, "%s",
          err.text);
    CHECK(sala_stream_open(s, 0, &err) == NULL && err.code == SALA_E_STATE, "%s", err.text);
    CHECK(sala_stream_open(s, 0, NULL) == NULL &&
              sala_detokenize(s, &one, 1, 0, &bytes, NULL) == NULL,
          "without an error struct");
    sala_stream_close(NULL);
    sala_free(s, NULL);
    session_close(&t);
}

static void test_text_calls(void) {
    static const char text[] =
        "<|im_start|>user\nWhat does the cow say?<|im_end|>\n<|im_start|>assistant\n",
                      *shown;
    sala_options o = small_options(64, 0);
    sala_error err;
    int32_t *tokens, *turn, bad = 2048;
    size_t bytes, n;
    session t = session_open(SALA_TINY, &o);
    sala *s = t.engine;
    int64_t count =
        sala_tokenize(s, text, strlen(text), SALA_ADD_BOS | SALA_PARSE_SPECIAL, &tokens, &err);
    int64_t same = sala_chat_turn(s, "user", "What does the cow say?", 22, 1, 1, &turn, &err);
    CHECK(count == 16 && same == count && memcmp(tokens, turn, 64) == 0, "%lld and %lld tokens",
          (long long)count, (long long)same);
    char *back = sala_detokenize(s, tokens, count, 1, &bytes, &err);
    CHECK(back && bytes == strlen(back) && strstr(back, "cow say?<|im_end|>"), "%s",
          back ? back : err.text);
    sala_text_stream *stream = sala_stream_open(s, 1, &err);
    char joined[256] = "";
    for (int64_t i = 0; i <= count; i++) {
        const char *piece = sala_stream_next(stream, i < count ? tokens[i] : -1, &n);
        CHECK(piece && strlen(piece) == n, "a piece");
        strncat(joined, piece, n);
    }
    CHECK(back && strcmp(joined, back) == 0, "the stream gives \"%s\"", joined);
    CHECK(sala_stream_next(stream, bad, &n) == NULL && n == 0, "a token beyond the vocabulary");
    shown = sala_stream_next(stream, tokens[3], NULL);
    CHECK(shown != NULL, "the stream is no longer usable");
    CHECK(sala_detokenize(s, &bad, 1, 0, &bytes, &err) == NULL && err.code == SALA_E_ARGUMENT, "%s",
          err.text);
    sala_stream_close(stream);
    sala_free(s, turn);
    CHECK(sala_tokenize(s, "", 0, 0, &turn, &err) == 0, "empty text");
    sala_free(s, turn);
    sala_free(s, back);
    sala_free(s, tokens);
    session_close(&t);
}

// ---- hooks ----

typedef struct recorder {
    int logs, calls;
    double last;
    char line[256], what[64];
    void *self;
} recorder;

static void record_log(void *user, int level, const char *line) {
    recorder *r = (recorder *)user;
    r->logs++;
    snprintf(r->line, sizeof r->line, "%d %s", level, line);
}

static void record_progress(void *user, const char *what, double fraction) {
    recorder *r = (recorder *)user;
    CHECK(fraction >= r->last && fraction <= 1, "progress goes from %g to %g", r->last, fraction);
    r->last = fraction;
    r->calls++;
    snprintf(r->what, sizeof r->what, "%s", what);
}

static void test_hooks(void) {
    sala_options o = tiny_options();
    recorder r;
    sala_error err;
    char path[] = "/tmp/sala-test-XXXXXX", config[8192];
    memset(&r, 0, sizeof r);
    FILE *f = fopen(TINY_CONFIG, "rb");
    size_t n = f ? fread(config, 1, sizeof config - 1, f) : 0;
    if (f) fclose(f);
    config[n] = 0;
    char *scale = strstr(config, "1/sqrt(d)"); // another scale is taken as 1, with a warning
    int fd = mkstemp(path);
    if (!scale || fd < 0) die(TINY_CONFIG, "cannot be changed");
    memcpy(scale, "odd scale", 9);
    CHECK(write(fd, config, n) == (ssize_t)n, "cannot write");
    close(fd);
    o.hooks.user = &r;
    o.hooks.log = record_log;
    o.hooks.progress = record_progress;
    o.device = "cpu"; // no word about a missing GPU
    sala *s = sala_open(path, &o, &err);
    unlink(path);
    CHECK(s && r.logs == 1 && r.line[0] == '0' + SALA_LOG_WARNING &&
              strstr(r.line, "lightning_scale"),
          "%d lines: %s", r.logs, r.line);
    CHECK(r.calls >= 3 && r.last == 1, "%d calls, the last at %g (%s)", r.calls, r.last, r.what);
    sala_close(s);
    CHECK(strcmp(sala_version(), SALA_VERSION) == 0, "%s", sala_version());
    int major = SALA_VERSION_NUMBER / 10000, minor = SALA_VERSION_NUMBER / 100 % 100,
        patch = SALA_VERSION_NUMBER % 100;
    snprintf(r.line, sizeof r.line, "%d.%d.%d", major, minor, patch);
    CHECK(strcmp(r.line, SALA_VERSION) == 0, "%s is not %s", r.line, SALA_VERSION);
}

// ---- an allocator that fails ----

typedef struct allocator {
    int64_t calls, fail_at; // the number of the call that fails; all later ones too if `forever`
    int64_t live;
    int forever, failed;
} allocator;

static void *failing_allocate(void *user, void *pointer, size_t size) {
    allocator *a = (allocator *)user;
    if (size == 0) {
        if (pointer) a->live--;
        free(pointer);
        return NULL;
    }
    a->calls++;
    if (a->fail_at && (a->calls == a->fail_at || (a->forever && a->calls > a->fail_at))) {
        a->failed++;
        return NULL;
    }
    void *p = realloc(pointer, size);
    if (p && !pointer) {
        a->live++;
        memset(p, 0xA5, size); // fresh memory is not zero
    }
    return p;
}

enum { SHORT_TOKENS = 6 };

// Open, one short request, close. Returns the tokens that came (as many as position says); *code the first error.
static const char *short_weights; // of a synthetic model

static int short_life(const char *path, int synthetic, allocator *a, int32_t *tokens, int *code) {
    static const int32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
    static const char *const stop[] = {"zebra", "quagga"};
    static const int32_t stop_tokens[] = {4};
    sala_options o = tiny_options();
    sala_error err;
    sala_event ev;
    int came = 0, errors = 0, steps = 0;
    o.synthetic = synthetic;
    o.weights = synthetic ? short_weights : NULL;
    o.hooks.user = a;
    o.hooks.allocate = failing_allocate;
    o.max_sequences = 2;
    memset(&err, 0, sizeof err);
    *code = 0;
    sala *s = sala_open(path, &o, &err);
    if (!s) {
        *code = err.code;
        CHECK(err.code == SALA_E_MEMORY && strstr(err.text, "out of memory"), "call %lld: %d %s",
              (long long)a->fail_at, err.code, err.text);
        return 0;
    }
    sala_bias bias = {20, 0.5f};
    sala_request r = request_of(prompt, 10, SHORT_TOKENS);
    r.repetition_penalty = 1.3f;
    r.stop_tokens = stop_tokens;
    r.stop_token_count = 1;
    r.stop = stop;
    r.stop_count = synthetic ? 0 : 2;
    r.biases = &bias;
    r.bias_count = 1;
    r.logprobs = 2;
    r.keep = 1;
    int64_t id = sala_submit(s, &r, &err);
    if (id < 0) *code = err.code;
    while (errors < 3 && steps++ < 30) {
        int step = sala_step(s, &err);
        if (step == 0) break;
        if (step < 0) {
            errors++;
            if (!*code) *code = err.code;
            CHECK(err.code == step && err.text[0], "call %lld: %d %s", (long long)a->fail_at,
                  err.code, err.text);
        }
        while (sala_next_event(s, &ev))
            if (ev.type == SALA_EVENT_TOKEN && ev.position >= 10 && ev.position < 10 + SHORT_TOKENS)
                tokens[ev.position - 10] = ev.token, came++;
    }
    sala_close(s);
    return came;
}

static void fail_everywhere(const char *path, int synthetic, int forever) {
    int32_t want[SHORT_TOKENS], got[SHORT_TOKENS];
    allocator a;
    int code;
    memset(&a, 0, sizeof a);
    CHECK(short_life(path, synthetic, &a, want, &code) == SHORT_TOKENS && code == 0 && a.live == 0,
          "undisturbed: code %d, %lld live", code, (long long)a.live);
    int64_t total = a.calls;
    for (int64_t n = 1; n <= total; n++) {
        memset(&a, 0, sizeof a);
        a.fail_at = n;
        a.forever = forever;
        memset(got, 0xFF, sizeof got);
        short_life(path, synthetic, &a, got, &code);
        CHECK(a.live == 0, "call %lld: %lld blocks are lost", (long long)n, (long long)a.live);
        CHECK(a.failed && code == SALA_E_MEMORY, "call %lld failed unnoticed (code %d)",
              (long long)n, code);
        for (int i = 0; i < SHORT_TOKENS; i++) // what comes, comes right
            CHECK(got[i] == -1 || got[i] == want[i], "call %lld: token %d is %d, not %d",
                  (long long)n, i, got[i], want[i]);
    }
    printf("       %s: %lld allocations\n", path, (long long)total);
}

static void test_out_of_memory_synthetic(void) {
    fail_everywhere(TINY_CONFIG, 1, 0);
    fail_everywhere(TINY_CONFIG, 1, 1);
    short_weights = "nvfp4-head"; // has alphas beside
    fail_everywhere(TINY_CONFIG, 1, 0);
    short_weights = NULL;
}

static void test_out_of_memory_files(void) {
    fail_everywhere(SALA_TINY, 0, 0);
}

// ---- two engines in two threads ----

typedef struct parallel_life {
    int64_t seed;
    outcome *out;
    session t;
} parallel_life;

static void *live_in_parallel(void *argument) {
    parallel_life *p = (parallel_life *)argument;
    int32_t tokens[200];
    for (int i = 0; i < 200; i++) tokens[i] = (int32_t)((i / 9 * 31 + p->seed * 7) % 97);
    for (int round = 0; round < 5; round++) {
        sala_request r = request_of(tokens, 150, 60);
        request_sampled(&r, (uint64_t)p->seed);
        p->out = session_do(&p->t, &r);
    }
    return NULL;
}

static void test_two_engines(void) {
    parallel_life life[4]; // two at once, then the same two one after the other
    pthread_t threads[2];
    sala_options o = tiny_options();
    for (int i = 0; i < 4; i++) {
        memset(&life[i], 0, sizeof life[i]);
        life[i].seed = 1 + i % 2;
        o.synthetic_seed = (uint64_t)life[i].seed;
        life[i].t = session_open(TINY_CONFIG, &o);
    }
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, live_in_parallel, &life[i]))
            die("a thread", "cannot be made");
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 2; i < 4; i++) live_in_parallel(&life[i]);
    for (int i = 0; i < 2; i++)
        CHECK(same_choices(life[i].out, life[i + 2].out), "engine %d was disturbed", i);
    CHECK(!same_choices(life[0].out, life[1].out), "two seeds, one model");
    for (int i = 0; i < 4; i++) session_close(&life[i].t);
}

TEST_MAIN(TEST(test_open_errors), TEST(test_four_bit_options), TEST(test_settings_by_name),
          TEST(test_plan), TEST(test_plan_snapshots), TEST(test_request_errors),
          TEST(test_sequence_errors), TEST(test_success_clears_the_error),
          TEST(test_without_tokenizer), TEST(test_text_calls), TEST(test_hooks),
          TEST(test_out_of_memory_synthetic), TEST(test_out_of_memory_files),
          TEST(test_two_engines))
