#define SALA_IMPLEMENTATION
#include "../sala.h"
// make real-test MODEL=DIR: the released weights, or a 4-bit copy of them, against what others saw them do (model.md 10:
// third-party figures of the BF16 weights). Not part of make test: the weights are 19 GB, or 6.
#include "check.h"

static const int32_t golden[] = {2132,  1417,  1523,  7089, 1520,  1606,  5,     1975,
                                 19020, 59324, 59342, 63,   59377, 59320, 16091, 1525};
enum { COUNT = sizeof golden / sizeof *golden };

static sala *engine;
static int quantised; // then the golden tokens need only be near the top

static void run(const char *text, const int32_t *force, int count, int rank[COUNT],
                double norms[3]) {
    sala_request ask;
    sala_error err;
    sala_event ev;
    sala_info info;
    sala_get_info(engine, &info);
    memset(&ask, 0, sizeof ask);
    ask.text = text;
    ask.max_tokens = count;
    ask.force = force;
    ask.force_count = count;
    ask.ignore_eos = 1;
    ask.logprobs = 20;
    ask.want_rows = SALA_ROWS_PROMPT;
    if (sala_submit(engine, &ask, &err) < 0) printf("%s\n", err.text), exit(2);
    int at = 0, code;
    memset(norms, 0, 3 * sizeof *norms);
    while ((code = sala_step(engine, &err)) > 0)
        while (sala_next_event(engine, &ev)) {
            if (ev.type == SALA_EVENT_TOKEN && at < count) {
                rank[at] = 99;
                for (int i = ev.top_count - 1; i >= 0; i--)
                    if (ev.top[i].token == force[at]) rank[at] = i;
                at++;
            }
            for (int l = 0; ev.type == SALA_EVENT_ROWS && ev.hidden && l < 3; l++) {
                size_t size = (size_t)ev.row_count * (size_t)info.hidden;
                const float *x = ev.hidden + (size_t)(l + 1) * size;
                for (size_t i = 0; i < size; i++) norms[l] += (double)x[i] * (double)x[i];
            }
        }
    if (code < 0) printf("%s\n", err.text), exit(2);
    for (int l = 0; l < 3; l++) norms[l] = sqrt(norms[l]);
}

static void tokens(void) { // 4 and 6, BOS included
    static const char *const texts[] = {"How are you", "Hello, my name is"};
    for (int i = 0; i < 2; i++) {
        int32_t *ids = NULL;
        sala_error err = {0, ""};
        int64_t n = sala_tokenize(engine, texts[i], strlen(texts[i]), SALA_ADD_BOS, &ids, &err);
        CHECK(n == 4 + 2 * i, "\"%s\" is %lld tokens, not %d %s", texts[i], (long long)n, 4 + 2 * i,
              err.text);
        sala_free(engine, ids);
    }
}

static void continuation(void) { // each golden token, given those before it
    int rank[COUNT], first = 0;
    double norms[3];
    run("Hello, my name is", golden, COUNT, rank, norms);
    for (int i = 0; i < COUNT; i++) {
        first += rank[i] == 0;
        CHECK(rank[i] <= (quantised ? 4 : 0), "token %d (%d) is number %d of the choices", i,
              golden[i], rank[i] + 1);
    }
    printf("  %d of %d golden tokens are the best choice\n", first, COUNT);
    CHECK(first >= (quantised ? COUNT * 3 / 4 : COUNT), "%d of %d golden tokens", first, COUNT);
}

static void
hidden(void) { // the residual stream after layers 0, 1 and 2, and the token that follows
    static const double want[] = {59.49, 73.91, 87.38};
    static const int32_t next[] = {74};
    int rank[COUNT];
    double norms[3];
    run("How are you", next, 1, rank, norms);
    for (int l = 0; l < 3; l++)
        CHECK(fabs(norms[l] / want[l] - 1) < (quantised ? 0.05 : 0.01),
              "layer %d: norm %.2f, expected %.2f", l, norms[l], want[l]);
    CHECK(rank[0] <= (quantised ? 4 : 0), "token 74 is number %d of the choices", rank[0] + 1);
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {TEST(tokens), TEST(continuation), TEST(hidden)};
    sala_options o;
    sala_error err;
    sala_info info;
    memset(&o, 0, sizeof o);
    o.context = 4096;
    o.max_sequences = 1;
    o.logits_rows = 64;
    o.hidden_states = 1;
    if (argc != 2 || !*argv[1]) {
        fprintf(stderr, "real-test: no model: make real-test MODEL=DIR with the folder of the "
                        "released weights\n");
        return 2;
    }
    engine = sala_open(argv[1], &o, &err);
    if (!engine) return fprintf(stderr, "real-test: %s\n", err.text), 2;
    sala_get_info(engine, &info);
    quantised = info.bits_per_weight < 15;
    printf("%s: %s, %s\n", argv[1], info.weight_format, info.device);
    int code = sala_check_weights(engine, &err);
    if (code < 0) return fprintf(stderr, "real-test: %s\n", err.text), 2;
    code = check_main(tests, 3, 1, argv);
    puts(code ? "FAIL: not what others saw these weights do" : "PASS");
    sala_close(engine);
    return code;
}
