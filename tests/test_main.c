/*  test_main.c - what tests/test_cli.sh cannot see of the command line: scoring rules, text helpers,
    and that a chat's tokens are those of the whole conversation as Hugging Face renders it. Run in
    the repository. */
#define main program_main
#include "../main.c"
#undef main
#include "check.h"

// ---- helpers ----

static void json_text(void) {
    static const struct {
        const char *in, *out;
        size_t bytes;
    } cases[] = {
        {"a\"b\\c", "\"a\\\"b\\\\c\"", 5},
        {"\n\t\001\177", "\"\\n\\u0009\\u0001\\u007f\"", 4},
        {"\303\251\346\230\245\360\237\246\212", "\"\303\251\346\230\245\360\237\246\212\"", 9},
        {"x\377y", "\"x\\ufffdy\"", 3},
        {"\300\200", "\"\\ufffd\\ufffd\"", 2},                       // overlong zero
        {"\355\240\200", "\"\\ufffd\\ufffd\\ufffd\"", 3},            // surrogate
        {"\364\220\200\200", "\"\\ufffd\\ufffd\\ufffd\\ufffd\"", 4}, // above U+10FFFF
        {"\340\237\277", "\"\\ufffd\\ufffd\\ufffd\"", 3},            // overlong
        {"\346\230", "\"\\ufffd\\ufffd\"", 2},                       // cut off
        {"", "\"\"", 0},
        {NULL, "null", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = NULL;
        size_t size = 0;
        FILE *f = open_memstream(&text, &size);
        cli_json_text(f, cases[i].in, cases[i].bytes);
        fclose(f);
        CHECK(strcmp(text, cases[i].out) == 0, "case %zu: %s instead of %s", i, text, cases[i].out);
        free(text);
    }
}

static void numbers(void) {
    char out[32];
    int64_t v = 7;
    CHECK(strcmp(cli_count(0, out), "0") == 0, "%s", out);
    CHECK(strcmp(cli_count(999, out), "999") == 0, "%s", out);
    CHECK(strcmp(cli_count(-1234567, out), "-1,234,567") == 0, "%s", out);
    CHECK(strcmp(cli_count(INT64_MIN, out), "-9,223,372,036,854,775,808") == 0, "%s", out);
    CHECK(strcmp(cli_bytes(1023, out), "1023 bytes") == 0, "%s", out);
    CHECK(strcmp(cli_bytes(1536, out), "1.5 KiB") == 0, "%s", out);
    CHECK(strcmp(cli_bytes(5e15, out), "4547.5 TiB") == 0, "%s", out);
    CHECK(cli_integer("x", "12", 0, 12, &v) == CLI_OK && v == 12, "%lld", (long long)v);
    CHECK(cli_integer("x", "13", 0, 12, &v) == CLI_USAGE && v == 12, "%lld", (long long)v);
    CHECK(cli_integer("x", "99999999999999999999", 0, INT64_MAX, &v) == CLI_USAGE, "accepted");
    CHECK(cli_integer("x", "", 0, 12, &v) == CLI_USAGE, "accepted");
    CHECK(cli_integer("x", "1x", 0, 12, &v) == CLI_USAGE, "accepted");
}

static void distances(void) {
    CHECK(sala__name_distance("", "abc") == 3, "%d", sala__name_distance("", "abc"));
    CHECK(sala__name_distance("kitten", "sitting") == 3, "%d",
          sala__name_distance("kitten", "sitting"));
    CHECK(sala__name_distance("seed", "seed") == 0, "%d", sala__name_distance("seed", "seed"));
    CHECK(sala__name_distance("promt", "prompt") == 1, "%d",
          sala__name_distance("promt", "prompt"));
}

// ---- scoring ----

static void letters(void) {
    static const struct {
        const char *text;
        int letter;
    } cases[] = {
        {"ANSWER: B", 'B'},
        {"the answer \n:\t c.", 'C'},
        {"Answer: E, no, answer: D", 'D'}, // the first that fits
        {"ANSWER: A ... ANSWER: B", 'A'},
        {"ANSWER B", 0},
        {"\\boxed{C}", 'C'},
        {"\\boxed{c}", 0}, // case counts in a box
        {"\\boxed{A} and \\boxed{\\text{B}}", 'B'},
        {"\\boxed{\\text{B} }", 0},
        {"\\boxed{A} but answer:d", 'D'},
        {"answer:", 0},
        {"", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int got = eval_letter(cases[i].text, strlen(cases[i].text));
        CHECK(got == cases[i].letter, "'%s': %d instead of %d", cases[i].text, got,
              cases[i].letter);
    }
}

// The score of an answer whose gold strings are separated by '|'.
static double score(const char *task, const char *gold, const char *answer) {
    eval_item item;
    double got;
    char word[64];
    memset(&item, 0, sizeof item);
    item.task = cli_copy(task);
    while (*gold) {
        size_t n = strcspn(gold, "|");
        snprintf(word, sizeof word, "%.*s", (int)n, gold);
        cli_append(&item.gold, word, n + 1);
        item.gold_count++;
        gold += n + (gold[n] == '|');
    }
    cli_append(&item.answer, answer, strlen(answer));
    eval_judge(&item);
    got = item.score;
    eval_free_item(&item);
    return got;
}

static void scores(void) {
    static const struct {
        const char *task, *gold, *answer;
        double score;
    } cases[] = {
        {"niah", "4711|PARIS", "it is Paris", 1},
        {"niah", "4711", "it is 4712", 0},
        {"niah", "4711", "4711</think> no", 0}, // only what follows the last mark counts
        {"niah", "4711", "a</think>b</think>4711", 1},
        {"niah", "x", "", 0},
        {"qa", "a b", "xA By", 1},
        {"lcx", "abc", "ab c", 0},
        {"cwe", "one|two|three|four", "Two, FOUR", 0.5},
        {"fwe", "one|two", "one two", 1},
        {"common", "proud", "The word in both lists is proud.", 1},
        {"mcq", "b", "ANSWER: B", 1},
        {"mcq", "BC", "ANSWER: B", 0},
        {"mcq", "A", "ANSWER: A </think> ANSWER: C", 0},
        {"mc", "The answer is B.", "It is Friday. The answer is B.", 1},
        {"other", "yes", "YES</think>no", 1}, // the whole answer, thoughts included
        {"other", "yes", "no", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double got = score(cases[i].task, cases[i].gold, cases[i].answer);
        CHECK(got == cases[i].score, "%s '%s' '%s': %g instead of %g", cases[i].task, cases[i].gold,
              cases[i].answer, got, cases[i].score);
    }
}

static void loops(void) {
    char text[4096];
    memset(text, 'x', sizeof text);
    CHECK(eval_loops(text, 240), "240 times one byte");
    CHECK(!eval_loops(text, 239), "239 bytes are too few");
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + i % 20 + i / 20 % 3);
    CHECK(eval_loops(text, 300), "five times 60 bytes");
    CHECK(!eval_loops(text, 299), "not quite five times");
    check_seed = 5;
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + check_random() % 8);
    CHECK(!eval_loops(text, sizeof text), "random text");
    memmove(text + 1000 + 200, text + 1000, 4 * 200);
    for (size_t i = 1200; i < 2000; i++) text[i] = text[i - 200];
    CHECK(eval_loops(text, sizeof text), "a loop in the middle, five times 200 bytes");
    text[1500] ^= 1;
    CHECK(!eval_loops(text, sizeof text), "the same with one byte changed");
    CHECK(!eval_loops("", 0) && !eval_loops("a", 1), "nothing");
}

// ---- chat ----

static void same_tokens(const cli_buffer *got, sala *engine, const char *rendered) {
    int32_t *want;
    const int32_t *have = (const int32_t *)(const void *)got->data;
    int64_t n = sala_tokenize(engine, rendered, strlen(rendered), SALA_ADD_BOS | SALA_PARSE_SPECIAL,
                              &want, NULL);
    int64_t count = (int64_t)(got->size / sizeof *have), at = 0;
    while (at < n && at < count && have[at] == want[at]) at++;
    CHECK(n == count && at == n, "%lld tokens, expected %lld, the same up to %lld",
          (long long)count, (long long)n, (long long)at);
    sala_free(engine, want);
}

// Everything the engine holds of the conversation, then what the next turn would add to it.
static void whole(chat *c, const char *next, cli_buffer *out) {
    const sala__sequence *q = sala__find_sequence(c->engine, c->sequence);
    sala_error err;
    out->size = 0;
    CHECK(q && (int64_t)q->token_count == c->length,
          "the engine holds %lld tokens, the chat counts %lld", q ? (long long)q->token_count : -1,
          (long long)c->length);
    if (q) cli_append(out, q->tokens, q->token_count * sizeof *q->tokens);
    CHECK(chat_prompt(c, next, out, &err) == 0, "%s", err.text);
}

static void chat_open(chat *c, cli_args *a) {
    sala_error err;
    memset(c, 0, sizeof *c);
    memset(a, 0, sizeof *a);
    cli_quiet = 1;
    a->options.chunk = 64;
    a->options.context = 2048;
    a->options.max_sequences = 1;
    c->args = a;
    c->engine = sala_open("models/sala-tiny", &a->options, &err);
    CHECK(c->engine, "%s", err.text);
    chat_reset(c);
}

#define TURN(role, text) "<|im_start|>" role "\n" text "<|im_end|>\n"
#define REPLY "<|im_start|>assistant\n"
#define COW "What does the cow say?"
#define SUM "What is 3 + 4?"

static void chat_tokens(void) {
    chat c;
    cli_args a;
    cli_buffer tokens = {NULL, 0, 0};
    chat_open(&c, &a);
    CHECK(chat_turn(&c, COW) == CLI_OK, "turn 1");
    whole(&c, SUM, &tokens);
    same_tokens(&tokens, c.engine,
                TURN("user", COW) TURN("assistant", "It says moo.") TURN("user", SUM) REPLY);
    CHECK(chat_turn(&c, SUM) == CLI_OK, "turn 2");
    whole(&c, "  x ", &tokens);
    same_tokens(&tokens, c.engine,
                TURN("user", COW) TURN("assistant", "It says moo.") TURN("user", SUM)
                    TURN("assistant", "3 + 4 = 7") TURN("user", "  x ") REPLY);
    CHECK(c.timings.prompt_tokens < 30, "turn 2 read %lld tokens",
          (long long)c.timings.prompt_tokens);
    chat_reset(&c);
    c.system = cli_copy("Be kind.");
    a.request.max_tokens = 2; // cut off: <|im_end|> is supplied
    CHECK(chat_turn(&c, COW) == CLI_OK, "turn with a system prompt");
    whole(&c, SUM, &tokens);
    const char *text =
        c.engine ? sala_detokenize(c.engine,
                                   sala__find_sequence(c.engine, c.sequence)->tokens + c.length - 2,
                                   2, 0, NULL, NULL)
                 : NULL;
    char rendered[512];
    snprintf(rendered, sizeof rendered, "%s<|im_start|>assistant\n%s<|im_end|>\n%s",
             TURN("system", "Be kind.") TURN("user", COW), text ? text : "",
             TURN("user", SUM) REPLY);
    same_tokens(&tokens, c.engine, rendered);
    sala_free(c.engine, (void *)(uintptr_t)text);
    chat_reset(&c);
    free(c.system);
    cli_free(&tokens);
    sala_close(c.engine);
}

// Ctrl-C while a long question is read: the next turn first reads what is left of it.
static void chat_interrupted(void) {
    chat c;
    cli_args a;
    cli_buffer first = {NULL, 0, 0}, tokens = {NULL, 0, 0}, question = {NULL, 0, 0},
               rendered = {NULL, 0, 0};
    sala_error err;
    for (int i = 0; i < 20; i++) cli_append(&question, "Once there was a fox named Pip. ", 32);
    for (int turn = 0; turn < 2; turn++) { // interrupted at the beginning, and after a whole turn
        chat_open(&c, &a);
        if (turn) CHECK(chat_turn(&c, COW) == CLI_OK, "a whole turn");
        int64_t before = c.length;
        rendered.size = first.size = tokens.size = 0;
        CHECK(chat_prompt(&c, question.data, &first, &err) == 0, "%s", err.text);
        cli_signal = SIGINT;
        CHECK(chat_turn(&c, question.data) == CLI_OK && cli_signal == 0,
              "the signal ends the turn only");
        int64_t read = c.length - before;
        CHECK(read > 0 && read < 100 && c.owed.size, "%lld tokens were read", (long long)read);
        if (turn)
            cli_append(&tokens, sala__find_sequence(c.engine, c.sequence)->tokens,
                       (size_t)before * 4);
        cli_append(&tokens, first.data, (size_t)read * 4);
        CHECK(chat_prompt(&c, SUM, &tokens, &err) == 0, "%s", err.text);
        if (turn)
            cli_append(&rendered, TURN("user", COW) TURN("assistant", "It says moo."),
                       strlen(TURN("user", COW) TURN("assistant", "It says moo.")));
        cli_append(&rendered, "<|im_start|>user\n", 17);
        cli_append(&rendered, question.data, question.size);
        cli_append(&rendered, "<|im_end|>\n" REPLY "<|im_end|>\n" TURN("user", SUM) REPLY,
                   strlen("<|im_end|>\n" REPLY "<|im_end|>\n" TURN("user", SUM) REPLY));
        same_tokens(&tokens, c.engine, rendered.data);
        CHECK(chat_turn(&c, SUM) == CLI_OK && c.owed.size == 0 && c.turns == 2 + turn,
              "the next turn");
        CHECK(c.length == (int64_t)(tokens.size / 4) + c.timings.output_tokens, "%lld tokens",
              (long long)c.length);
        chat_reset(&c);
        sala_close(c.engine);
    }
    cli_free(&first);
    cli_free(&tokens);
    cli_free(&question);
    cli_free(&rendered);
}

// A request of a C program that keeps no sequence: what ended it cannot be saved, and that is said.
static void unkept(void) {
    char folder[] = "/tmp/test-main-XXXXXX", from[64], to[64];
    sala_error err;
    sala_request ask = {0};
    CHECK(mkdtemp(folder), "%s", folder);
    snprintf(from, sizeof from, "%s/from", folder);
    snprintf(to, sizeof to, "%s/to", folder);
    sala_options o = {0};
    o.device = "cpu";
    sala *s = sala_open("models/sala-tiny", &o, &err);
    CHECK(s, "%s", err.text);
    ask.text = "Once upon a time";
    ask.max_tokens = 3;
    int64_t id = sala_submit(s, &ask, &err);
    CHECK(sala_step(s, &err) > 0 && sala_save(s, id, from, &err) == 0, "%s", err.text);
    sala_close(s);
    char *run[] = {"sala", "run",    "-q", "-m", "models/sala-tiny", "--device", "cpu", "--load",
                   from,   "--save", to,   NULL};
    CHECK(dispatch(11, run) == CLI_OUTPUT && access(to, F_OK) != 0, "saved in silence");
    unlink(from);
    rmdir(folder);
}

TEST_MAIN(TEST(json_text), TEST(numbers), TEST(distances), TEST(letters), TEST(scores), TEST(loops),
          TEST(chat_tokens), TEST(chat_interrupted), TEST(unkept))
