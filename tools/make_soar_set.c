/*  make_soar_set.c - writes a set of requests for `sala bench --soar`:

        make build/make_soar_set
        build/make_soar_set --lengths v2 --count 96 >counts.jsonl
        gzip -dc tools/tiny/kjv.txt.gz | build/make_soar_set -m models/sala-tiny --text - --scale 0.05 >set.jsonl

    The contest's own set is not public; what contestants report of its lengths is in the tables below. With a model and a
    text, questions and answers are pieces of that text, cut and counted by the model's tokenizer; without them the lines
    hold numbers of tokens alone, for models without a tokenizer. The same options give the same file. */
#define SALA_IMPLEMENTATION
#include "../sala.h"

#pragma GCC diagnostic ignored "-Wunused-function" // of what the commands share, not all is needed
#include "cli.h"
#include "soar.h"
#pragma GCC diagnostic warning "-Wunused-function"

enum { SET_TEXT = CLI_OWN, SET_LENGTHS, SET_COUNT, SET_SEED, SET_SCALE };

static const cli_option set_options[] = {
    {SET_LENGTHS, "lengths", "KIND",
     "v2 (the contest's last distribution, the default), v1 (its first), or IN:OUT,IN:OUT.. in "
     "turn, "
     "as 100:4096,60000:512"},
    {SET_COUNT, "count", "N", "requests (default 12; the contest: 12, 36 and 96)"},
    {SET_SEED, "seed", "N", "another choice of lengths and pieces (default 0)"},
    {SET_SCALE, "scale", "X", "multiplies all lengths (default 1)"},
    {SET_TEXT, "text", "FILE",
     "where questions and answers are cut from, - is stdin; -m names the tokenizer that counts"},
    {0, NULL, NULL, NULL},
};

static const cli_command set_command = {
    "--help",
    "make_soar_set [--text FILE [-m DIR]] [options]\n\n"
    "Writes JSON lines for `sala bench --soar` to stdout. Within a class of lengths the logarithm "
    "is\n"
    "uniform; the longest answers go with the shortest prompts, as in the contest (coding against "
    "long\n"
    "documents). A question is a piece of the text and \"Go on with this text.\" A text should be "
    "longer\n"
    "than the longest piece: what is longer repeats it, and n-grams profit from that.\n",
    set_options,
    0,
    "  build/make_soar_set --lengths v2 --count 96\n"
    "  build/make_soar_set --lengths 100:4096 --count 8\n"
    "  build/make_soar_set --text book.txt --lengths 2000:200 --count 8\n",
};

typedef struct set_class { // [least, most) tokens, percent of the requests
    int least, most, share;
} set_class;

#define SET_CLASSES 6

static const set_class set_v2_in[SET_CLASSES] = {{100, 4096, 16},      {4096, 16384, 8},
                                                 {16384, 32768, 8},    {32768, 131072, 25},
                                                 {131072, 262144, 26}, {262144, 524288, 17}};
static const set_class set_v2_out[SET_CLASSES] = {
    {10, 512, 58}, {512, 2048, 17}, {2048, 4096, 6}, {4096, 16384, 9}, {16384, 32768, 10}};
static const set_class set_v1_in[SET_CLASSES] = {{100, 4096, 25},
                                                 {4096, 16384, 10},
                                                 {16384, 32768, 15},
                                                 {32768, 131072, 35},
                                                 {131072, 163840, 15}};
static const set_class set_v1_out[SET_CLASSES] = {
    {10, 512, 35}, {512, 2048, 25}, {2048, 4096, 10}, {4096, 16384, 15}, {16384, 32768, 15}};

typedef struct set_maker {
    const char *text, *lengths;
    int64_t count, seed;
    double scale;
    soar_random random;
    double *in, *out; // [count] tokens
    sala__tokenizer tokenizer;
    int32_t *corpus; // [corpus_count] the text's tokens
    int64_t corpus_count;
} set_maker;

// Lengths by class, shortest first: request i of n stands at (i + a random number) / n of the distribution.
static void set_draw(set_maker *m, const set_class *classes, double *lengths) {
    for (int64_t i = 0; i < m->count; i++) {
        double at = 100 * ((double)i + (double)soar_word(&m->random) * 0x1p-32) / (double)m->count,
               below = 0;
        int k = 0;
        while (k + 1 < SET_CLASSES && classes[k + 1].share && at >= below + classes[k].share)
            below += classes[k++].share;
        double part = (at - below) / classes[k].share, least = classes[k].least;
        lengths[i] = least * pow(classes[k].most / least, part);
    }
    soar_sort(lengths, (int)m->count);
}

// "IN:OUT,IN:OUT" in turn. Returns an exit code.
static int set_read_lengths(set_maker *m) {
    const char *at = m->lengths;
    for (int64_t i = 0; i < m->count; i++) {
        char *end, *end2 = NULL;
        long in = strtol(at, &end, 10), out = *end == ':' ? strtol(end + 1, &end2, 10) : 0;
        if (in < 2 || out < 2 || in > 1 << 24 || out > 1 << 24 || !end2 || (*end2 && *end2 != ','))
            return cli_fail(
                CLI_USAGE,
                "--lengths: '%s' is neither v1, v2 nor IN:OUT,IN:OUT.., 2 to 2^24 tokens each",
                m->lengths);
        m->in[i] = (double)in;
        m->out[i] = (double)out;
        at = *end2 ? end2 + 1 : m->lengths;
    }
    return CLI_OK;
}

static int set_lengths(set_maker *m) { // returns an exit code
    int v1 = strcmp(m->lengths, "v1") == 0, listed = !v1 && strcmp(m->lengths, "v2") != 0;
    m->in = (double *)cli_resize(NULL, (size_t)m->count * sizeof *m->in);
    m->out = (double *)cli_resize(NULL, (size_t)m->count * sizeof *m->out);
    soar_seed(&m->random, (uint32_t)m->seed);
    if (listed && set_read_lengths(m) != CLI_OK) return CLI_USAGE;
    if (!listed) {
        set_draw(m, v1 ? set_v1_in : set_v2_in, m->in);
        set_draw(m, v1 ? set_v1_out : set_v2_out, m->out);
    }
    for (int64_t i = 0; !listed && i < m->count / 2; i++) { // the longest first
        double other = m->out[i];
        m->out[i] = m->out[m->count - 1 - i];
        m->out[m->count - 1 - i] = other;
    }
    for (int64_t i = 0; i < m->count; i++) {
        m->in[i] = fmax(2, floor(m->in[i] * m->scale));
        m->out[i] = fmax(2, floor(m->out[i] * m->scale));
    }
    return CLI_OK;
}

// A piece of the text, `wanted` tokens with BOS (if there is one) and `after`; appended to `out`, its tokens as the
// model will count them to *count. Returns an exit code.
static int set_piece(set_maker *m, int64_t wanted, const char *after, cli_buffer *out,
                     int64_t *count) {
    sala_error err;
    size_t bytes = 0;
    int32_t *tokens = NULL;
    int64_t extra = sala__encode(&m->tokenizer, after, strlen(after), SALA_ADD_BOS, &tokens, &err);
    sala__release(m->tokenizer.env, tokens);
    int64_t n = extra < 0 || wanted - extra < 1 ? 1 : wanted - extra;
    int32_t *piece = (int32_t *)cli_resize(NULL, (size_t)n * sizeof *piece);
    int64_t from = (int64_t)soar_below(&m->random, (uint32_t)m->corpus_count);
    for (int64_t i = 0; i < n; i++) piece[i] = m->corpus[(from + i) % m->corpus_count];
    char *text = sala__decode(&m->tokenizer, piece, n, 0, &bytes, &err);
    free(piece);
    out->size = 0;
    cli_append(out, text, text ? bytes : 0);
    cli_append(out, after, strlen(after));
    if (text)
        *count = sala__encode(&m->tokenizer, out->data, out->size, SALA_ADD_BOS, &tokens, &err);
    sala__release(m->tokenizer.env, tokens);
    sala__release(m->tokenizer.env, text);
    return text && *count >= 0 ? CLI_OK : cli_fail(CLI_FAILED, "%s", err.text);
}

static int set_write(set_maker *m) { // returns an exit code
    cli_buffer question = {0}, answer = {0};
    int64_t in, out, sum_in = 0, sum_out = 0, longer = 0; // `longer`: than the text
    int code = CLI_OK;
    for (int64_t i = 0; i < m->count && code == CLI_OK; i++) {
        in = (int64_t)m->in[i];
        out = (int64_t)m->out[i];
        longer += m->text && (in > m->corpus_count || out > m->corpus_count);
        if (m->text) code = set_piece(m, in, "\n\nGo on with this text.", &question, &in);
        if (m->text && code == CLI_OK) code = set_piece(m, out, "", &answer, &out);
        if (code != CLI_OK) break;
        printf("{\"index\": %lld, ", (long long)i);
        if (m->text) {
            printf("\"question\": ");
            cli_json_text(stdout, question.data, question.size);
            printf(", \"model_response\": ");
            cli_json_text(stdout, answer.data, answer.size);
            printf(", ");
        }
        printf("\"prompt_tokens\": %lld, \"completion_tokens\": %lld}\n", (long long)in,
               (long long)out);
        sum_in += in;
        sum_out += out;
    }
    if (code == CLI_OK && !cli_quiet)
        fprintf(stderr, "%lld requests, %lld prompt tokens, %lld output tokens\n",
                (long long)m->count, (long long)sum_in, (long long)sum_out);
    if (code == CLI_OK && longer)
        fprintf(stderr,
                "sala: warning: %lld requests have more tokens than the text (%lld) and repeat it, "
                "which flatters n-grams: give a longer text, or less with --lengths or --scale\n",
                (long long)longer, (long long)m->corpus_count);
    cli_free(&question);
    cli_free(&answer);
    return code ? code : cli_flush();
}

static int set_read_text(set_maker *m, const char *model) { // returns an exit code
    static const sala_hooks env;
    cli_buffer text = {0};
    sala_error err;
    if (sala__tokenizer_open(&env, model, 1 << 20, NULL, &m->tokenizer, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    int code = cli_read_file(m->text, &text);
    if (code == CLI_OK) {
        m->corpus_count = sala__encode(&m->tokenizer, text.data, text.size, 0, &m->corpus, &err);
        if (m->corpus_count < 0) code = cli_fail(CLI_FAILED, "%s", err.text);
        if (m->corpus_count == 0)
            code = cli_fail(CLI_FAILED, "%s: there is no text in it", m->text);
    }
    cli_free(&text);
    return code;
}

int main(int argc, char **argv) {
    cli_args a;
    set_maker m;
    int id;
    memset(&m, 0, sizeof m);
    m.lengths = "v2";
    m.count = 12;
    m.scale = 1;
    cli_program = "build/";
    cli_help = "build/make_soar_set";
    cli_start(&a, &set_command, argc, argv);
    while ((id = cli_next(&a)) > 0) {
        char *end = NULL;
        if (id == SET_TEXT) m.text = a.value;
        if (id == SET_LENGTHS) m.lengths = a.value;
        if (id == SET_COUNT) a.code = cli_integer("count", a.value, 1, 1000000, &m.count);
        if (id == SET_SEED) a.code = cli_integer("seed", a.value, 0, UINT32_MAX, &m.seed);
        if (id == SET_SCALE) m.scale = strtod(a.value, &end);
        if (id == SET_SCALE && (*end || !(m.scale > 0 && m.scale <= 1000)))
            a.code =
                cli_fail(CLI_USAGE, "--scale: '%s' is not a number above 0, at most 1000", a.value);
        if (a.code != CLI_OK) break;
    }
    if (id == 0 && !m.text && a.model)
        a.code = cli_fail(id = CLI_USAGE, "-m goes with --text, which its tokenizer cuts");
    char room[4096];
    if (id == 0 && m.text && !(a.model = cli_model_path(a.model, room))) a.code = id = CLI_FAILED;
    if (id == 0) a.code = set_lengths(&m);
    if (id == 0 && a.code == CLI_OK && m.text) a.code = set_read_text(&m, a.model);
    if (id == 0 && a.code == CLI_OK) a.code = set_write(&m);
    if (m.text && a.model) sala__release(m.tokenizer.env, m.corpus);
    if (m.tokenizer.env) sala__tokenizer_close(&m.tokenizer);
    free(m.in);
    free(m.out);
    cli_end(&a);
    return a.code;
}
