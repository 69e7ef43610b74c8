/*  compare.c - `sala info --check --against DIR`: how far a model, say a quantised one, is from another of the same
    geometry. Both read the same text (one after the other, so that only one is in memory); layer by layer their hidden
    states are compared, and at the end their logits. Included by main.c. */

#include "cli.h"

enum { COMPARE_TOKENS = 2048 }; // of the text at most

static const char compare_text[] =
    "The library stood at the end of a narrow street, and nobody remembered who had built it. "
    "Every\n"
    "morning Mrs. Alder opened the door at nine, lit two lamps, and put the kettle on. \"You are\n"
    "early,\" she said to the boy who waited on the steps. He had come to ask about the river: "
    "how\n"
    "old it was, why it froze only once in 1963, and whether the mill had really burned down "
    "twice.\n"
    "She took three books from a shelf, 27 pages in all were marked, and they began to read.\n\n"
    "def mean(values):\n    total = 0.0\n    for x in values:\n        total += x\n"
    "    return total / len(values) if values else None\n\n"
    "\xE4\xBB\x8E\xE5\x89\x8D\xE6\x9C\x89\xE4\xB8\x80\xE4\xB8\xAA\xE5\xAD\xA9\xE5\xAD\x90\xEF\xBC"
    "\x8C"
    "\xE4\xBB\x96\xE4\xBD\x8F\xE5\x9C\xA8\xE6\xB2\xB3\xE8\xBE\xB9\xE3\x80\x82\n\n"
    "{\"name\": \"Lily\", \"age\": 7, \"city\": \"Oakham\", \"sum\": [12, 30, 42]}\n\n"
    "The capital of France is Paris, that of Japan is Tokyo, and 17 + 25 = 42. In the beginning "
    "God\n"
    "created the heaven and the earth. And the earth was without form, and void; and darkness was\n"
    "upon the face of the deep. When the tea was cold the boy had found what he was looking for.\n";

typedef struct compare_run { // what a model makes of the text
    sala_info info;
    float *hidden; // [layers + 2, count, hidden]
    float *logits; // [count, vocab]
} compare_run;

typedef struct compare_row {           // of one hidden state, or of the logits
    double cosine, worst, norm, error; // means over tokens; norm: |b| / |a|, error: |b - a| / |a|
    int64_t at;                        // the token that is worst
} compare_row;

// Read the text with a model, all at once. Returns an exit code.
static int compare_read(sala *engine, const int32_t *tokens, int64_t count, compare_run *run) {
    sala_request request;
    sala_error err;
    sala_event e;
    int step;
    memset(&request, 0, sizeof request);
    sala_get_info(engine, &run->info);
    size_t hidden = (size_t)run->info.hidden, vocab = (size_t)run->info.vocab, n = (size_t)count;
    run->hidden = (float *)cli_resize(NULL, ((size_t)run->info.layers + 2) * n * hidden * 4);
    run->logits = (float *)cli_resize(NULL, n * vocab * 4);
    request.tokens = tokens;
    request.token_count = count;
    request.max_tokens = 1;
    request.want_rows = SALA_ROWS_PROMPT;
    if (sala_submit(engine, &request, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    while ((step = sala_step(engine, &err)) > 0) {
        while (sala_next_event(engine, &e)) {
            if (e.type == SALA_EVENT_FINISH && e.finish_reason == SALA_FINISH_NAN)
                return cli_fail(CLI_FAILED, "%s: the logits are not numbers", run->info.path);
            if (e.type != SALA_EVENT_ROWS) continue;
            size_t rows = (size_t)e.row_count, first = (size_t)e.first_position;
            memcpy(run->logits + first * vocab, e.logits, rows * vocab * 4);
            for (size_t l = 0; l < (size_t)run->info.layers + 2; l++)
                memcpy(run->hidden + (l * n + first) * hidden, e.hidden + l * rows * hidden,
                       rows * hidden * 4);
        }
        if (cli_signal) return 128 + (int)cli_signal;
    }
    return step < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

// Vectors a (of the reference) and b of `count` tokens.
static compare_row compare_vectors(const float *a, const float *b, int64_t count, int width) {
    compare_row r = {0, 2, 0, 0, 0};
    for (int64_t t = 0; t < count; t++, a += width, b += width) {
        double aa = 0, bb = 0, ab = 0, dd = 0;
        for (int i = 0; i < width; i++) {
            double x = (double)a[i], y = (double)b[i];
            aa += x * x;
            bb += y * y;
            ab += x * y;
            dd += (y - x) * (y - x);
        }
        double cosine = aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : aa == bb;
        r.cosine += cosine / (double)count;
        r.norm += (aa > 0 ? sqrt(bb / aa) : 1) / (double)count;
        r.error += (aa > 0 ? sqrt(dd / aa) : 0) / (double)count;
        if (cosine >= r.worst) continue;
        r.worst = cosine;
        r.at = t;
    }
    return r;
}

typedef struct compare_kl {
    double mean, worst, nats[2]; // nats: a token of the text costs, in the reference and here
    int64_t at, same;            // tokens that both would choose
} compare_kl;

static double compare_log_sum(const float *x, int n, int *best) {
    double sum = 0;
    *best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[*best]) *best = i;
    for (int i = 0; i < n; i++) sum += exp((double)x[i] - (double)x[*best]);
    return (double)x[*best] + log(sum);
}

// Kullback-Leibler divergence of b's choice of the next token from a's, in nats.
static compare_kl compare_logits(const float *a, const float *b, int64_t count, int vocab,
                                 const int32_t *tokens) {
    compare_kl r = {0, -1, {0, 0}, 0, 0};
    for (int64_t t = 0; t < count; t++, a += vocab, b += vocab) {
        int best_a, best_b;
        double log_a = compare_log_sum(a, vocab, &best_a),
               log_b = compare_log_sum(b, vocab, &best_b);
        double kl = 0;
        for (int i = 0; i < vocab; i++) {
            double p = (double)a[i] - log_a, q = (double)b[i] - log_b;
            kl += exp(p) * (p - q);
        }
        r.mean += kl / (double)count;
        r.same += best_a == best_b;
        if (kl > r.worst) r.worst = kl, r.at = t;
        if (t + 1 == count) break;
        r.nats[0] += (log_a - (double)a[tokens[t + 1]]) / (double)(count - 1);
        r.nats[1] += (log_b - (double)b[tokens[t + 1]]) / (double)(count - 1);
    }
    return r;
}

static const char *compare_state(int l, int layers) {
    static char name[32];
    if (l == 0) return "embedding";
    if (l == layers + 1) return "final norm";
    snprintf(name, sizeof name, "layer %d", l - 1);
    return name;
}

static void compare_print(const compare_run *a, const compare_run *b, const int32_t *tokens,
                          int64_t count, int json) {
    int layers = a->info.layers, width = a->info.hidden;
    size_t state = (size_t)count * (size_t)width;
    if (json) printf(", \"against\": {\"tokens\": %lld, \"states\": [", (long long)count);
    if (!json)
        printf("\nHidden states of %lld tokens, against %s\n  %-12s %10s %10s %8s %10s %10s\n",
               (long long)count, a->info.path, "after", "cosine", "worst", "token", "norm",
               "error");
    for (int l = 0; l < layers + 2; l++) {
        size_t at = (size_t)l * state;
        compare_row r = compare_vectors(a->hidden + at, b->hidden + at, count, width);
        printf(json ? "%s{\"after\": \"%s\", \"cosine\": %.8f, \"worst\": %.8f, \"token\": %lld, "
                      "\"norm\": %.6f, \"error\": %.6f}"
                    : "%s  %-12s %10.6f %10.6f %8lld %10.5f %10.5f\n",
               json && l ? ", " : "", compare_state(l, layers), r.cosine, r.worst, (long long)r.at,
               r.norm, r.error);
    }
    compare_kl kl = compare_logits(a->logits, b->logits, count, a->info.vocab, tokens);
    double same = (double)kl.same / (double)count;
    printf(json ? "], \"kl\": %.8f, \"kl_worst\": %.8f, \"kl_token\": %lld, \"same_choice\": %.6f, "
                  "\"nats\": %.6f, \"nats_against\": %.6f}"
                : "  logits: KL divergence %.6f nats, at worst %.6f (token %lld); both choose the "
                  "same for %.2f %% of the\n  tokens; the text costs %.4f nats a token, there %.4f "
                  "(a perplexity %.4f times as high)\n",
           kl.mean, kl.worst, (long long)kl.at, json ? same : 100 * same, kl.nats[1], kl.nats[0],
           exp(kl.nats[1] - kl.nats[0])); // (JSON leaves it out)
}

// Is the other model, which is not open yet, of the same geometry? Returns an exit code.
static int compare_shapes(const cli_args *args, const sala_info *a, const char *folder) {
    sala_info other = {0};
    const sala_info *b = &other;
    sala_error err;
    if (sala_plan(folder, &args->options, &other, &err) < 0 && !other.layers)
        return cli_fail(CLI_FAILED, "%s", err.text);
    const struct {
        const char *what;
        int64_t a, b;
    } rows[] = {
        {"vocabulary", a->vocab, b->vocab},
        {"layers", a->layers, b->layers},
        {"sparse layers", a->sparse_layers, b->sparse_layers},
        {"hidden width", a->hidden, b->hidden},
        {"MLP width", a->intermediate, b->intermediate},
        {"query heads", a->heads, b->heads},
        {"K/V heads", a->kv_heads, b->kv_heads},
        {"lightning heads", a->lightning_heads, b->lightning_heads},
        {"parameters", a->parameters, b->parameters},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].a != rows[i].b)
            return cli_fail(CLI_FAILED,
                            "--against: %s is another geometry, %s: %lld, but %lld in %s: only "
                            "models of one shape can be compared",
                            folder, rows[i].what, (long long)rows[i].b, (long long)rows[i].a,
                            args->model);
    return CLI_OK;
}

// The tokens of the text, fewer than COMPARE_TOKENS of them, to `out`. Returns an exit code.
static int compare_tokenize(sala *engine, const char *file, cli_buffer *out) {
    cli_buffer text = {0};
    sala_error err;
    int32_t *tokens;
    int code = file ? cli_read_file(file, &text) : CLI_OK;
    if (code != CLI_OK) return code;
    if (!file) cli_append(&text, compare_text, sizeof compare_text - 1);
    int64_t n = sala_tokenize(engine, text.data, text.size, SALA_ADD_BOS, &tokens, &err);
    cli_free(&text);
    if (n < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    if (n > COMPARE_TOKENS) n = COMPARE_TOKENS;
    cli_append(out, tokens, (size_t)n * sizeof *tokens);
    sala_free(engine, tokens);
    return n > 1 ? CLI_OK : cli_fail(CLI_FAILED, "--text: there is nothing to compare with");
}

// What the engine must be opened with, where a comparison will follow.
static void compare_options(cli_args *a) {
    a->options.hidden_states = 1;
    a->options.chunk = 512;
    a->options.logits_rows = 512;
    a->options.max_sequences = 1;
    a->options.context = COMPARE_TOKENS + 1;
}

// Compare *engine, which is closed on the way, with the model in `folder`, the reference. Returns an
// exit code.
static int compare_models(cli_args *a, sala **engine, const char *folder, const char *file) {
    cli_buffer own = {0}, tokens = {0};
    compare_run run[2] = {0};  // the reference, this model
    a->options.prefill = NULL; // was for this model: the reference may have no 4-bit weights
    sala_get_info(*engine, &run[1].info);
    int code = compare_shapes(a, &run[1].info, folder);
    if (code == CLI_OK) code = compare_tokenize(*engine, file, &own);
    const int32_t *ids = (const int32_t *)(void *)own.data;
    int64_t count = (int64_t)(own.size / sizeof *ids);
    if (code == CLI_OK) code = compare_read(*engine, ids, count, &run[1]);
    sala_close(*engine);
    a->model = folder;
    *engine = code == CLI_OK ? cli_open(a) : NULL;
    if (code == CLI_OK && !*engine) code = a->code;
    if (code == CLI_OK) code = compare_tokenize(*engine, file, &tokens);
    if (code == CLI_OK && (tokens.size != own.size || memcmp(tokens.data, own.data, own.size)))
        code = cli_fail(CLI_FAILED, "--against: %s splits the text into other tokens", folder);
    if (code == CLI_OK) code = compare_read(*engine, ids, count, &run[0]);
    if (code == CLI_OK) compare_print(&run[0], &run[1], ids, count, a->json);
    for (int i = 0; i < 2; i++) free(run[i].hidden), free(run[i].logits);
    cli_free(&own);
    cli_free(&tokens);
    return code;
}
