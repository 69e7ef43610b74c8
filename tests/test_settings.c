// Options and request fields by name, and the checks of whole structs.
#define SALA_IMPLEMENTATION
#include "../sala.h"
#include "check.h"

#include <locale.h>

// ---- by name ----

typedef struct accepted {
    const char *name, *value;
    double want; // what the field then holds
} accepted;

typedef struct refusal {
    const char *name, *value;
    const char *says; // the error names the field and says this
} refusal;

static double option_value(const sala_options *o, const char *name) {
    if (!strcmp(name, "threads")) return o->threads;
    if (!strncmp(name, "max", 3)) return o->max_sequences;
    if (!strcmp(name, "context")) return (double)o->context;
    if (!strcmp(name, "kv-tokens")) return (double)o->kv_tokens;
    if (!strncmp(name, "memory", 6)) return (double)o->memory_limit;
    if (!strcmp(name, "chunk")) return o->chunk;
    if (!strcmp(name, "dense-len")) return o->dense_len;
    if (!strcmp(name, "logits-rows")) return o->logits_rows;
    if (!strcmp(name, "hidden-states")) return o->hidden_states;
    if (!strcmp(name, "synthetic")) return o->synthetic;
    return (double)o->synthetic_seed;
}

static const accepted good_options[] = {
    {"threads", "1", 1},
    {"threads", "256", 256},
    {"threads", "007", 7},
    {"max-sequences", "256", 256},
    {"max_sequences", "3", 3},
    {"context", "128K", 131072},
    {"context", "1", 1},
    {"context", "1G", 1073741824},
    {"context", "1m", 1048576},
    {"kv-tokens", "2M", 2097152},
    {"kv-tokens", "5000000000", 5e9},
    {"memory-limit", "2G", 2147483648.0},
    {"memory-limit", "6g", 6442450944.0},
    {"memory_limit", "123", 123},
    {"chunk", "64", 64},
    {"chunk", "2K", 2048},
    {"chunk", "65536", 65536},
    {"chunk", "64k", 65536},
    {"dense-len", "8192", 8192},
    {"dense-len", "8K", 8192},
    {"dense-len", "0", SALA_DENSE_NEVER},
    {"dense-len", "0K", SALA_DENSE_NEVER},
    {"logits-rows", "0", 0},
    {"logits-rows", "256", 256},
    {"hidden-states", "1", 1},
    {"hidden-states", "no", 0},
    {"hidden-states", NULL, 1},
    {"synthetic", "true", 1},
    {"synthetic", "off", 0},
    {"synthetic-seed", "0", 0},
    {"synthetic-seed", "18446744073709551615", 18446744073709551615.0},
};

static const refusal bad_options[] = {
    {"threads", "0", "at least 1 and at most 256"},
    {"threads", "-1", "at least 1"},
    {"threads", "257", "at most 256"},
    {"threads", "1K", "an integer"}, // not a size
    {"threads", "4 ", "\"4 \""},
    {"threads", " 4", "\" 4\""},
    {"threads", "+4", "an integer"},
    {"threads", "", "\"\""},
    {"threads", "four", "\"four\""},
    {"threads", "4.0", "an integer"},
    {"threads", "0x10", "an integer"},
    {"threads", "1e2", "an integer"},
    {"threads", "18446744073709551617", "at most 256"},  // 2^64 + 1
    {"threads", "4294967297", "at most 256"},            // 2^32 + 1
    {"threads", "18446744073709551620", "at most 256"},  // 4, if a product could wrap
    {"threads", "-18446744073709551611", "at most 256"}, // 5, if a sign could
    {"threads", "--4", "an integer"},
    {"threads", "-", "an integer"},
    {"threads", NULL, "needs a value"},
    {"max-sequences", "257", "at most 256"},
    {"context", "0", "at least 1"},
    {"context", "2G", "at most 1073741824"},
    {"context", "128KB", "K, M and G"},
    {"context", "128T", "K, M and G"},
    {"context", "K", "K, M and G"},
    {"context", "1.5K", "K, M and G"},
    {"kv-tokens", "-4096", "at least 1"},
    {"memory-limit", "17179869184G", "at most"}, // 2^64
    {"memory-limit", "9999999999999999999999", "at most"},
    {"memory-limit", "0", "at least 1"},
    {"chunk", "0", "at least 64"},
    {"chunk", "100", "a multiple of 64"},
    {"chunk", "96", "a multiple of 64"},
    {"chunk", "65600", "at most 65536"},
    {"dense-len", "-1", "at least 0"},
    {"dense-len", "2G", "at most"},
    {"logits-rows", "-1", "at least 0"},
    {"hidden-states", "2", "0 or 1"},
    {"hidden-states", "", "0 or 1"},
    {"synthetic-seed", "-1", "from 0 to 18446744073709551615"},
    {"synthetic-seed", "18446744073709551616", "from 0 to 18446744073709551615"},
    {"synthetic-seed", "1K", "an integer"},
    {"device", "gpu", "auto cpu"},
    {"device", "", "auto cpu"},
    {"device", "auto cpu", "one of"},
    {"device", "cp", "one of"},
    {"device", NULL, "needs a value"},
    {"template", "llama", "chatml"},
};

static const accepted good_fields[] = {
    {"temperature", "0", 0},
    {"temperature", "-0", 0},
    {"temperature", "0.7", 0.7f},
    {"temperature", "1e-1", 0.1f},
    {"temperature", "100", 100},
    {"top-p", "0.95", 0.95f},
    {"top_p", "1", 1},
    {"top-p", "0.000001", 0.000001f},
    {"min-p", "0", 0},
    {"min-p", "5E-2", 0.05f},
    {"repetition-penalty", "1.05", 1.05f},
    {"repetition_penalty", "0.5", 0.5f},
    {"presence-penalty", "-1.5", -1.5f},
    {"frequency-penalty", "0.3", 0.3f},
    {"top-k", "0", 0},
    {"top-k", "2147483647", 2147483647},
    {"logprobs", "20", 20},
    {"max-tokens", "1", 1},
    {"max-tokens", "4K", 4096},
    {"seed", "9223372036854775808", 9223372036854775808.0},
    {"ignore-eos", NULL, 1},
    {"ignore-eos", "0", 0},
    {"special-text", "yes", 1},
    {"keep", "on", 1},
    {"sequence", "12", 12},
    {"want-rows", "7", 7},
};

static double field_value(const sala_request *r, const char *name) {
    if (!strcmp(name, "temperature")) return (double)r->temperature;
    if (!strcmp(name, "top-p") || !strcmp(name, "top_p")) return (double)r->top_p;
    if (!strcmp(name, "min-p")) return (double)r->min_p;
    if (!strncmp(name, "repetition", 10)) return (double)r->repetition_penalty;
    if (!strcmp(name, "presence-penalty")) return (double)r->presence_penalty;
    if (!strcmp(name, "frequency-penalty")) return (double)r->frequency_penalty;
    if (!strcmp(name, "top-k")) return r->top_k;
    if (!strcmp(name, "logprobs")) return r->logprobs;
    if (!strcmp(name, "max-tokens")) return (double)r->max_tokens;
    if (!strcmp(name, "seed")) return (double)r->seed;
    if (!strcmp(name, "ignore-eos")) return r->ignore_eos;
    if (!strcmp(name, "special-text")) return r->special_text;
    if (!strcmp(name, "keep")) return r->keep;
    if (!strcmp(name, "sequence")) return (double)r->sequence;
    return r->want_rows;
}

static const refusal bad_fields[] = {
    {"max-tokens", "0", "at least 1"},
    {"max-tokens", "-5", "at least 1"},
    {"max-tokens", "many", "\"many\""},
    {"temperature", "-0.1", "at least 0"},
    {"temperature", "100.1", "at most 100"},
    {"temperature", "nan", "a number"},
    {"temperature", "inf", "a number"},
    {"temperature", "1e999", "at most 100"},
    {"temperature", "0,7", "a number"},
    {"temperature", ".7", "a number"},
    {"temperature", "7.", "a number"},
    {"temperature", "0.7f", "a number"},
    {"temperature", "0.7 ", "a number"},
    {"temperature", "0x1p-1", "a number"},
    {"temperature", "1e", "a number"},
    {"temperature", "-", "a number"},
    {"temperature", "", "a number"},
    {"temperature", "+1", "a number"},
    {"temperature", NULL, "needs a value"},
    {"top-p", "0", "above 0, at most 1"},
    {"top-p", "1e-60", "above 0, at most 1"}, // 0 as a float
    {"top-p", "1.0001", "at most 1"},
    {"min-p", "-0.1", "at least 0"},
    {"min-p", "1.5", "at most 1"},
    {"repetition-penalty", "0", "above 0"},
    {"repetition-penalty", "-1", "above 0"},
    {"presence-penalty", "101", "at most 100"},
    {"top-k", "-1", "at least 0"},
    {"top-k", "2147483648", "at most 2147483647"},
    {"logprobs", "21", "at most 20"},
    {"seed", "-1", "an integer from 0"},
    {"seed", "1.5", "an integer from 0"},
    {"sequence", "-1", "at least 0"},
    {"want-rows", "8", "at most 7"},
    {"ignore-eos", "maybe", "0 or 1"},
};

#define COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))

static void refused(int code, const sala_error *err, const char *name, const char *value,
                    const char *says) {
    char plain[64];
    snprintf(plain, sizeof plain, "%s", name);
    for (char *c = plain; *c; c++)
        if (*c == '_') *c = '-';
    CHECK(code == SALA_E_ARGUMENT && err->code == code && strstr(err->text, plain) == err->text &&
              strstr(err->text, says),
          "%s %s: %d \"%s\", without \"%s\"", name, value ? value : "(no value)", code, err->text,
          says);
}

static void options_by_name(void) {
    sala_error err;
    for (int i = 0; i < COUNT(good_options); i++) {
        sala_options o = {0};
        int code = sala_set_option(&o, good_options[i].name, good_options[i].value, &err);
        double got = option_value(&o, good_options[i].name);
        CHECK(code == 0 && got == good_options[i].want, "%s %s: %d, %.17g", good_options[i].name,
              good_options[i].value ? good_options[i].value : "(no value)", code, got);
        CHECK(sala__check_options(&o, &err) == 0, "%s",
              err.text); // what a name sets, the check accepts
    }
    for (int i = 0; i < COUNT(bad_options); i++) {
        sala_options o = {0}, same = {0};
        int code = sala_set_option(&o, bad_options[i].name, bad_options[i].value, &err);
        refused(code, &err, bad_options[i].name, bad_options[i].value, bad_options[i].says);
        CHECK(memcmp(&o, &same, sizeof o) == 0, "%s: changed by an error", bad_options[i].name);
    }
    sala_options o = {0};
    static const char word[] = "cpu";
    CHECK(sala_set_option(&o, "device", word, NULL) == 0 && o.device == word,
          "the text itself is kept");
    CHECK(sala_set_option(&o, "template", "chatml", NULL) == 0 &&
              !strcmp(o.chat_template, "chatml"),
          "template");
    CHECK(sala_set_option(&o, "threads", "0", NULL) == SALA_E_ARGUMENT,
          "without a place for the error");
    CHECK(sala_set_option(NULL, "threads", "1", &err) == SALA_E_ARGUMENT, "no struct");
    CHECK(sala_set_option(&o, NULL, "1", &err) == SALA_E_ARGUMENT, "no name");
}

static void fields_by_name(void) {
    sala_error err;
    for (int i = 0; i < COUNT(good_fields); i++) {
        sala_request r = {0};
        int code = sala_set_request(&r, good_fields[i].name, good_fields[i].value, &err);
        double got = field_value(&r, good_fields[i].name);
        CHECK(code == 0 && got == good_fields[i].want, "%s %s: %d, %.17g", good_fields[i].name,
              good_fields[i].value ? good_fields[i].value : "(no value)", code, got);
        r.text = "x";
        CHECK(sala__check_request_fields(&r, &err) == 0, "%s", err.text);
    }
    for (int i = 0; i < COUNT(bad_fields); i++) {
        sala_request r = {0}, same = {0};
        int code = sala_set_request(&r, bad_fields[i].name, bad_fields[i].value, &err);
        refused(code, &err, bad_fields[i].name, bad_fields[i].value, bad_fields[i].says);
        CHECK(memcmp(&r, &same, sizeof r) == 0, "%s: changed by an error", bad_fields[i].name);
    }
}

static void unknown_names(void) {
    static const char *const near[][2] = {{"thread", "threads"},
                                          {"dense_length", "dense-len"},
                                          {"chunks", "chunk"},
                                          {"max-sequence", "max-sequences"},
                                          {"memory_limt", "memory-limit"},
                                          {"divice", "device"},
                                          {"contxt", "context"},
                                          {"", ""}};
    sala_error err;
    for (int i = 0; near[i][0][0]; i++) {
        sala_options o = {0};
        char want[80];
        snprintf(want, sizeof want, "unknown option \"%s\"; did you mean \"%s\"?", near[i][0],
                 near[i][1]);
        CHECK(sala_set_option(&o, near[i][0], "1", &err) == SALA_E_ARGUMENT &&
                  !strcmp(err.text, want),
              "%s", err.text);
    }
    sala_request r = {0};
    CHECK(sala_set_request(&r, "tempurature", "1", &err) == SALA_E_ARGUMENT &&
              strstr(err.text, "\"temperature\"?"),
          "%s", err.text);
    CHECK(sala_set_request(&r, "topp", "1", &err) == SALA_E_ARGUMENT &&
              strstr(err.text, "\"top-p\"?"),
          "%s", err.text);
    // Nothing near: all names are listed.
    CHECK(sala_set_request(&r, "grammar", "1", &err) == SALA_E_ARGUMENT &&
              strstr(err.text, "min-p") && strstr(err.text, "want-rows"),
          "%s", err.text);
    // Prefixes and longer names are not the name; capitals are not folded.
    CHECK(sala_set_request(&r, "see", "1", NULL) == SALA_E_ARGUMENT, "a prefix");
    CHECK(sala_set_request(&r, "seeds", "1", NULL) == SALA_E_ARGUMENT, "a longer name");
    CHECK(sala_set_request(&r, "Seed", "1", NULL) == SALA_E_ARGUMENT, "a capital");
    CHECK(sala_set_request(&r, "", "1", NULL) == SALA_E_ARGUMENT, "no name at all");
    char longest[5000];
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = 0;
    CHECK(sala_set_request(&r, longest, "1", &err) == SALA_E_ARGUMENT &&
              strstr(err.text, "want-rows"),
          "%s", err.text);
    CHECK(sala_set_request(&r, "seed", longest, &err) == SALA_E_ARGUMENT &&
              strstr(err.text, "seed") == err.text,
          "%s", err.text);
}

static void any_locale(void) { // the host program's locale must not change what a number means
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "de_DE", "fr_FR.UTF-8",
                                        "pl_PL.UTF-8"};
    const char *set = NULL;
    for (int i = 0; i < 5 && !set; i++) set = setlocale(LC_ALL, names[i]);
    printf("      locale: %s\n",
           set ? set : "none with a decimal comma is installed; the C locale is tested again");
    fields_by_name();
    options_by_name();
    setlocale(LC_ALL, "C");
}

// ---- whole structs ----

static void whole_options(void) {
    sala_error err;
    sala_options o = {0};
    CHECK(sala__check_options(&o, &err) == 0, "all defaults: %s", err.text);
    o.dense_len = SALA_DENSE_NEVER;
    o.device = "cpu";
    o.chat_template = "chatml";
    CHECK(sala__check_options(&o, &err) == 0, "%s", err.text);
#define WRONG(field, value, name, says)                                                            \
    do {                                                                                           \
        sala_options w = {0};                                                                      \
        w.field = value;                                                                           \
        memset(&err, 0, sizeof err);                                                               \
        refused(sala__check_options(&w, &err), &err, name, #value, says);                          \
    } while (0)
    WRONG(device, "cuda:", "device", "auto cpu cuda cuda:N");
    WRONG(device, "cuda:1x", "device", "auto cpu");
    WRONG(device, "cuda:N", "device", "auto cpu");
    o.device = "cuda:12";
    CHECK(sala__check_options(&o, &err) == 0, "%s", err.text);
    WRONG(threads, -1, "threads", "at least 1");
    WRONG(threads, 257, "threads", "at most 256");
    WRONG(max_sequences, 257, "max-sequences", "at most 256");
    WRONG(max_sequences, -1, "max-sequences", "-1");
    WRONG(context, -1, "context", "-1");
    WRONG(kv_tokens, -1, "kv-tokens", "-1");
    WRONG(memory_limit, INT64_MIN, "memory-limit", "-9223372036854775808");
    WRONG(chunk, 63, "chunk", "multiple of 64");
    WRONG(chunk, 65600, "chunk", "at most 65536");
    WRONG(chunk, -64, "chunk", "-64");
    WRONG(dense_len, -2, "dense-len", "-2");
    WRONG(logits_rows, -1, "logits-rows", "-1");
    WRONG(hidden_states, 2, "hidden-states", "0 or 1");
    WRONG(synthetic, -1, "synthetic", "0 or 1");
    WRONG(chat_template, "", "template", "chatml");
#undef WRONG
}

static void whole_requests(void) {
    static const int32_t tokens[3] = {1, 2, 3};
    static const char *stops[70];
    static char longest[1002];
    sala_error err;
    memset(&err, 0, sizeof err);
    memset(longest, 'x', 1001);
    for (int i = 0; i < 70; i++) stops[i] = "end";
#define WRONG(what, changes, says)                                                                 \
    do {                                                                                           \
        sala_request w = {0};                                                                      \
        w.text = "Hello";                                                                          \
        changes;                                                                                   \
        int code = sala__check_request_fields(&w, &err);                                           \
        CHECK(code == SALA_E_ARGUMENT && strstr(err.text, says), "%s: %d \"%s\"", what, code,      \
              err.text);                                                                           \
    } while (0)
#define RIGHT(what, changes)                                                                       \
    do {                                                                                           \
        sala_request w = {0};                                                                      \
        w.text = "Hello";                                                                          \
        changes;                                                                                   \
        CHECK(sala__check_request_fields(&w, &err) == 0, "%s: %s", what, err.text);                \
    } while (0)
    RIGHT("text", (void)0);
    RIGHT("tokens", (w.text = NULL, w.tokens = tokens, w.token_count = 3));
    RIGHT("text and an empty array", w.tokens = tokens);
    RIGHT("a sequence that goes on", (w.text = NULL, w.sequence = 7));
    WRONG("neither", w.text = NULL, "no prompt");
    WRONG("neither, but an array", (w.text = NULL, w.tokens = tokens), "no prompt");
    WRONG("both", (w.tokens = tokens, w.token_count = 3), "both tokens and text");
    WRONG("tokens NULL", (w.text = NULL, w.token_count = 3), "tokens is NULL");
    WRONG("text NULL", (w.text = NULL, w.sequence = 7, w.text_bytes = 3), "text is NULL");
    WRONG("negative tokens", w.token_count = -1, "token_count is -1");
    WRONG("max_tokens", w.max_tokens = -1, "max-tokens");
    WRONG("sequence", w.sequence = -1, "sequence");
    WRONG("keep", w.keep = 2, "keep");
    WRONG("want_rows", w.want_rows = 8, "want-rows");
    WRONG("want_rows", w.want_rows = -1, "want-rows");
    WRONG("logprobs", w.logprobs = 21, "logprobs");
    WRONG("force", w.force_count = 2, "force is NULL");
    WRONG("force", (w.force = tokens, w.force_count = -2), "force_count is -2");
    WRONG("NaN", w.temperature = NAN, "temperature");
    RIGHT("64 stops", (w.stop = stops, w.stop_count = 64));
    WRONG("65 stops", (w.stop = stops, w.stop_count = 65), "stop_count is 65");
    WRONG("stop NULL", w.stop_count = 1, "stop is NULL");
    WRONG("stop_count", w.stop_count = -1, "stop_count is -1");
    stops[1] = "";
    WRONG("empty stop", (w.stop = stops, w.stop_count = 2), "stop string 1 is empty");
    stops[1] = NULL;
    WRONG("missing stop", (w.stop = stops, w.stop_count = 2), "stop string 1 is NULL");
    stops[1] = longest;
    WRONG("long stop", (w.stop = stops, w.stop_count = 2),
          "stop string 1 is longer than 1000 bytes");
    longest[1000] = 0;
    RIGHT("a stop of 1000 bytes", (w.stop = stops, w.stop_count = 2));
    WRONG("stop tokens", w.stop_token_count = 1, "stop_tokens is NULL");
    WRONG("stop tokens", w.stop_token_count = -1, "stop_token_count is -1");
    WRONG("biases", w.bias_count = 1, "biases is NULL");
    sala_bias bias = {4, NAN};
    WRONG("NaN bias", (w.biases = &bias, w.bias_count = 1), "the bias of token 4");
    bias.bias = -INFINITY;
    RIGHT("a forbidden token", (w.biases = &bias, w.bias_count = 1));
#undef WRONG
#undef RIGHT
}

// Every row of the tables lies inside its struct, once, and has a name that can be told from the others.
static void tables(void) {
    static const sala__setting *const table[2] = {sala__option_table, sala__request_table};
    const int rows[2] = {SALA__ROWS(sala__option_table), SALA__ROWS(sala__request_table)};
    const size_t size[2] = {sizeof(sala_options), sizeof(sala_request)};
    for (int t = 0; t < 2; t++)
        for (int i = 0; i < rows[t]; i++) {
            const sala__setting *e = &table[t][i];
            CHECK(e->offset + 4 <= size[t] && e->minimum <= e->maximum, "%s", e->name);
            CHECK((e->kind == SALA__SET_WORD || e->kind == SALA__SET_TEXT) == (e->words != NULL),
                  "%s", e->name);
            for (int j = 0; j < i; j++)
                CHECK(strcmp(e->name, table[t][j].name) && e->offset != table[t][j].offset, "%s",
                      e->name);
        }
}

TEST_MAIN(TEST(options_by_name), TEST(fields_by_name), TEST(unknown_names), TEST(any_locale),
          TEST(whole_options), TEST(whole_requests), TEST(tables))
