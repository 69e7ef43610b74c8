/*  main.c - the command line of sala: run, chat, info here; logits, eval, bench and dump-features in
    tools/.

    cc -std=gnu11 -O3 -march=native main.c -o sala -lm -lpthread

    stdout carries results and nothing else; progress, the start line and the end line go to stderr.
    Every command reads its options, opens the model, hands in requests and takes events: nothing
    here is more than the public API of sala.h gives to anybody. */
#define SALA_IMPLEMENTATION
#include "sala.h"

#include "tools/cli.h"
#include "tools/logits.c"
#include "tools/eval.c"
#include "tools/bench.c"
#include "tools/dump.c"
#include "tools/compare.c"
#include "tools/show_tree.c"

/* ---- generating: what run and chat share ---------------------------------------------------- */

typedef struct generation {
    sala *engine;
    int print;               // the text goes to stdout as it comes
    cli_buffer text;         // all of it, for --json
    cli_buffer tokens;       // int32 [chosen]
    FILE *logprobs;          // entries of a JSON array, or NULL
    const cli_buffer *shown; // a prompt to print before the text, or NULL
    sala_text_stream *echo;  // has read that prompt; or NULL
    int finish_reason;
    int64_t sequence; // what was kept
    sala_timings timings;
    double started;
    int broken;       // the engine failed: only sala_close is left
    const char *save; // interrupted, the request is saved there before it is cancelled
    tree_shower tree; // --show-tree
} generation;

static const char *finish_name(int reason) {
    static const char *const names[] = {"", "stop", "length", "cancelled", "memory", "nan"};
    return reason > 0 && reason < (int)(sizeof names / sizeof *names) ? names[reason] : "unknown";
}

static void add_logprobs(FILE *f, const sala_event *e) {
    fprintf(f, "%s{\"token\": %d, \"logprob\": ", ftell(f) > 0 ? ", " : "", e->token);
    cli_json_number(f, (double)e->logprob);
    fprintf(f, ", \"top\": [");
    for (int i = 0; i < e->top_count; i++) {
        fprintf(f, "%s{\"token\": %d, \"logprob\": ", i ? ", " : "", e->top[i].token);
        cli_json_number(f, (double)e->top[i].logprob);
        fprintf(f, "}");
    }
    fprintf(f, "]}");
}

// A text that stands alone begins without its first space. After a printed prompt that space is
// wanted: let the stream that has read the prompt tell.
static void add_space(generation *g, const sala_event *e) {
    size_t bytes;
    const char *piece = sala_stream_next(g->echo, e->token, &bytes);
    if (piece && bytes && piece[0] == ' ' && (!e->text_bytes || e->text[0] != ' ')) putchar(' ');
    sala_stream_close(g->echo);
    g->echo = NULL;
}

// Print the prompt; what follows is to be spaced as its continuation. Returns an exit code.
static int show_prompt(generation *g, int as_text) {
    int32_t *tokens;
    int64_t n =
        sala_tokenize(g->engine, g->shown->data, g->shown->size, SALA_PARSE_SPECIAL, &tokens, NULL);
    fwrite(g->shown->data, 1, g->shown->size, stdout);
    if (!as_text)
        putchar('\n'); // a question, not the beginning of the text
    else if (n > 0)
        g->echo = sala_stream_open(g->engine, 0, NULL);
    if (g->echo) sala_stream_next(g->echo, tokens[n - 1], NULL);
    if (n >= 0) sala_free(g->engine, tokens);
    return cli_flush();
}

// Take over one event. Returns an exit code: only writing to stdout can fail.
static int take_event(generation *g, const sala_event *e) {
    if (e->type == SALA_EVENT_PREFILL && e->done < e->total)
        cli_progress_since("reading the prompt", (double)e->done / (double)e->total, g->started);
    if (e->type == SALA_EVENT_TOKEN) {
        cli_append(&g->tokens, &e->token, sizeof e->token);
        if (g->logprobs) add_logprobs(g->logprobs, e);
        if (g->echo) add_space(g, e);
    }
    if (e->type == SALA_EVENT_TREE) tree_show(&g->tree, e);
    if (e->type == SALA_EVENT_FINISH) {
        g->finish_reason = e->finish_reason;
        g->sequence = e->sequence;
        g->timings = e->timings;
    }
    if (!e->text_bytes) return CLI_OK; // prompts, rows and trees have none
    const char last = e->text[e->text_bytes - 1];
    cli_append(&g->text, e->text, e->text_bytes);
    if (!g->print) return CLI_OK;
    cli_progress_clear();
    fwrite(e->text, 1, e->text_bytes, stdout);
    cli_text_open = last != '\n';
    return cli_flush();
}

static int save(sala *engine, int64_t id, const char *path) { // returns an exit code
    sala_error err;
    int code = sala_save(engine, id, path, &err);
    cli_progress_clear();
    return code == 0 ? CLI_OK : cli_fail(CLI_OUTPUT, "cannot save the session: %s", err.text);
}

static int load(sala *engine, const char *path, sala_session *session) { // returns an exit code
    sala_error err;
    int64_t id = sala_load(engine, path, session, &err);
    cli_progress_clear();
    return id > 0 ? CLI_OK : cli_fail(CLI_FAILED, "%s", err.text);
}

static int generate_on(generation *g, int64_t id);

// Run one request to its end. Returns an exit code.
static int generate(generation *g, const sala_request *request) {
    sala_error err;
    int64_t id = sala_submit(g->engine, request, &err);
    if (id < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    if (request->want_trees) tree_begin(&g->tree, g->engine, request);
    int code = g->shown ? show_prompt(g, request->text != NULL) : CLI_OK;
    int other = generate_on(g, id);
    return code ? code : other;
}

// Run the request that is at work to its end; Ctrl-C or a failed write cancels it.
static int generate_on(generation *g, int64_t id) {
    sala_error err;
    sala_event e;
    int code = CLI_OK, cancelled = 0, step;
    g->started = cli_now();
    while ((step = sala_step(g->engine, &err)) > 0) {
        while (sala_next_event(g->engine, &e)) {
            int failed = take_event(g, &e);
            if (failed) code = failed;
        }
        if ((cli_signal || code) && !cancelled) {
            int unsaved = g->save && !g->finish_reason ? save(g->engine, id, g->save) : CLI_OK;
            if (!code) code = unsaved;
            sala_cancel(g->engine, id, NULL); // an error only says that it has finished meanwhile
            cancelled = 1;
        }
    }
    cli_progress_clear();
    tree_plain(&g->tree);
    g->broken = step < 0;
    if (g->broken) return cli_fail(CLI_FAILED, "%s", err.text);
    if (g->finish_reason == SALA_FINISH_NAN)
        return cli_fail(CLI_FAILED,
                        "the logits are not numbers: the weights are damaged (sala info --check)");
    if (g->finish_reason == SALA_FINISH_MEMORY)
        return cli_fail(CLI_FAILED,
                        "the K/V cache is too small for this request: raise --kv-tokens");
    return code ? code : cli_signal ? 128 + (int)cli_signal : CLI_OK;
}

static void generation_free(generation *g) {
    cli_free(&g->text);
    cli_free(&g->tokens);
    if (g->logprobs) fclose(g->logprobs);
    sala_stream_close(g->echo);
}

/* ---- run ------------------------------------------------------------------------------------ */

enum { RUN_CHAT = CLI_OWN, RUN_SYSTEM, RUN_ECHO, RUN_TREE, RUN_SAVE, RUN_LOAD };

static const char story[] = "Once upon a time there was a brave fox named Pip.";

static const cli_option run_options[] = {
    {'p', "prompt", "TEXT", "the prompt (default: a story about a fox, told with --echo)"},
    {'f', "file", "FILE", "read the prompt from a file, - is stdin"},
    {RUN_CHAT, "chat", NULL, "the prompt is a question: put the model's chat template around it"},
    {RUN_SYSTEM, "system", "TEXT", "with --chat: the system prompt before it"},
    {RUN_ECHO, "echo", NULL, "print the prompt too"},
    {RUN_TREE, "show-tree", NULL,
     "show on stderr, also with --quiet, what was drafted in each step and what of it was right"},
    {RUN_SAVE, "save", "FILE", "save the sequence at the end; after Ctrl-C, in the middle of it"},
    {RUN_LOAD, "load", "FILE",
     "go on with a saved one: with what was interrupted, or with the prompt (default: none)"},
    {CLI_JSON, "json", NULL, "print one JSON object at the end instead of text as it comes"},
    {0, NULL, NULL, NULL},
};

static const cli_command run_command = {
    "run",
    "run [-m DIR] [-p TEXT | -f FILE] [options]\n\n"
    "Continues a text. The prompt is raw: the model's BOS stands before it and special tokens\n"
    "in it count (with --chat they are plain text). The text streams to stdout, and nothing\n"
    "else goes there. A line on stderr says at the start what runs and at the end how fast it\n"
    "was. Ctrl-C ends the text where it is, a second one ends the program.\n",
    run_options,
    CLI_REQUEST | CLI_ENGINE,
    "  sala run\n"
    "  sala run -p 'The bear said:' -n 40 --temp 0.8 --seed 7\n"
    "  sala run -p '<li>bell</li> <li>duck</li> <li>silk</li> <li>boat</li>' -n 60 --spec ngram "
    "--show-tree\n"
    "  sala run --chat -p 'What does the cow say?' --json\n"
    "  sala run -m /models/MiniCPM-SALA -f book.txt --context 200K -n 500 --save book.session\n"
    "  sala run -m /models/MiniCPM-SALA --load book.session --context 200K -p ' In short:'\n",
};

typedef struct run_input {
    const char *file, *system, *save, *load;
    int chat, echo;
    cli_buffer prompt; // the text
    cli_buffer tokens; // int32, with --chat
} run_input;

static int run_arguments(cli_args *a, run_input *in) { // returns 0, or -1: return a->code
    int id;
    while ((id = cli_next(a)) > 0) {
        if (id == 'f') in->file = a->value;
        if (id == RUN_CHAT) in->chat = 1;
        if (id == RUN_SYSTEM) in->system = a->value;
        if (id == RUN_ECHO) in->echo = 1;
        if (id == RUN_TREE) a->request.want_trees = 1, a->asked = "show-tree";
        if (id == RUN_SAVE) in->save = a->value;
        if (id == RUN_LOAD) in->load = a->value;
        if (id != 'p') continue;
        cli_free(&in->prompt);
        cli_append(&in->prompt, a->value, strlen(a->value));
    }
    if (id < 0) return -1;
    if (in->file && in->prompt.data)
        a->code = cli_fail(CLI_USAGE, "give --prompt or --file, not both");
    if (in->system && !in->chat) a->code = cli_fail(CLI_USAGE, "--system needs --chat");
    if (a->request.logprobs && !a->json) a->code = cli_fail(CLI_USAGE, "--logprobs needs --json");
    if (a->code == CLI_OK && in->file) a->code = cli_read_file(in->file, &in->prompt);
    if (in->load && in->chat) a->code = cli_fail(CLI_USAGE, "--load and --chat: use sala chat");
    if (a->code == CLI_OK) a->code = cli_one_prompt(a);
    if (a->code == CLI_OK && in->save) a->code = cli_check_place(in->save);
    a->request.keep = in->save != NULL;
    if (a->code == CLI_OK && in->prompt.data && !in->prompt.size && !in->chat && !cli_quiet)
        fprintf(stderr, "sala: the prompt is empty: the text begins with whatever is likeliest\n");
    if (a->code == CLI_OK && !in->prompt.data && !in->load) {
        cli_append(&in->prompt, story, strlen(story));
        in->echo |= !a->json && !in->chat;
    }
    return a->code == CLI_OK ? 0 : -1;
}

// Append the tokens of one turn of a chat. Returns 0 or the engine's error code.
static int add_turn(sala *engine, cli_buffer *out, const char *role, const char *text, size_t bytes,
                    int first, int reply, sala_error *err) {
    int32_t *tokens;
    int64_t n = sala_chat_turn(engine, role, text, bytes, first, reply, &tokens, err);
    if (n < 0) return (int)n;
    cli_append(out, tokens, (size_t)n * sizeof *tokens);
    sala_free(engine, tokens);
    return 0;
}

// Make the request's prompt from the input. Returns an exit code.
static int run_prompt(cli_args *a, sala *engine, run_input *in) {
    sala_error err;
    int code = 0;
    if (!in->chat) {
        a->request.text = in->prompt.size || !in->load ? in->prompt.data : NULL;
        a->request.text_bytes = in->prompt.size;
        return CLI_OK;
    }
    if (in->system)
        code = add_turn(engine, &in->tokens, "system", in->system, strlen(in->system), 1, 0, &err);
    if (code == 0)
        code = add_turn(engine, &in->tokens, "user", in->prompt.data, in->prompt.size, !in->system,
                        1, &err);
    a->request.tokens = (const int32_t *)(void *)in->tokens.data;
    a->request.token_count = (int64_t)(in->tokens.size / sizeof(int32_t));
    return code < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

static void run_json(const cli_args *a, const generation *g, const run_input *in,
                     const char *logprobs) {
    const sala_timings *t = &g->timings;
    const int32_t *tokens = (const int32_t *)(const void *)g->tokens.data;
    printf("{\"prompt_tokens\": %lld, \"tokens\": [", (long long)t->prompt_tokens);
    for (size_t i = 0; i < g->tokens.size / sizeof *tokens; i++)
        printf("%s%d", i ? ", " : "", tokens[i]);
    printf("], \"text\": ");
    cli_json_text(stdout, g->text.data ? g->text.data : "", g->text.size);
    printf(", \"finish_reason\": \"%s\"", finish_name(g->finish_reason));
    if (in->echo) {
        printf(", \"prompt\": ");
        cli_json_text(stdout, in->prompt.data, in->prompt.size);
    }
    if (logprobs) printf(", \"logprobs\": [%s]", logprobs);
    printf(", \"timings\": {\"output_tokens\": %lld, \"reused_tokens\": %lld, \"queue_seconds\": "
           "%.6f, "
           "\"prefill_seconds\": %.6f, ",
           (long long)t->output_tokens, (long long)t->reused_tokens, t->queue_seconds,
           t->prefill_seconds);
    printf("\"decode_seconds\": %.6f, \"decode_bytes\": %lld, \"first_token_seconds\": ",
           t->decode_seconds, (long long)t->decode_bytes);
    if (t->output_tokens)
        printf("%.6f, ", t->queue_seconds + t->prefill_seconds);
    else
        printf("null, ");
    printf("\"prefill_tokens_per_second\": %.3f, \"decode_tokens_per_second\": %.3f, "
           "\"decode_gb_per_second\": %.3f}, \"speculation\": ",
           cli_rate((double)t->prompt_tokens, t->prefill_seconds),
           cli_rate((double)(t->output_tokens - 1), t->decode_seconds),
           cli_rate((double)t->decode_bytes * 1e-9, t->decode_seconds));
    cli_json_spec(&a->options, t);
    printf("}\n");
}

static int run_generate(cli_args *a, sala *engine, run_input *in) {
    generation g = {0};
    char *logprobs = NULL;
    size_t logprobs_size = 0;
    int code = run_prompt(a, engine, in);
    sala_session session = {0};
    g.engine = engine;
    g.print = !a->json;
    g.save = in->save;
    if (code == CLI_OK && in->load) code = load(engine, in->load, &session);
    if (session.request && in->prompt.data)
        code = cli_fail(CLI_USAGE,
                        "%s was saved in the middle of a text: give no prompt, and it goes on",
                        in->load);
    else if (session.request && a->asked)
        code = cli_fail(CLI_USAGE,
                        "%s was saved in the middle of a text, which goes on as it was asked for: "
                        "give no --%s",
                        in->load, a->asked);
    a->request.sequence = session.sequence;
    if (a->request.logprobs) g.logprobs = open_memstream(&logprobs, &logprobs_size);
    if (in->echo && g.print && in->prompt.data) g.shown = &in->prompt;
    if (code == CLI_OK) {
        code = session.request ? generate_on(&g, session.request) : generate(&g, &a->request);
        if (g.save && g.sequence && g.finish_reason != SALA_FINISH_CANCELLED) {
            int unsaved = save(engine, g.sequence, g.save);
            if (unsaved) code = unsaved;
        } else if (g.save && code == CLI_OK) // only a C program saves such requests
            code = cli_fail(CLI_OUTPUT, "%s: not saved: the request in %s keeps no sequence",
                            g.save, in->load);
        if (g.logprobs) fflush(g.logprobs);
        if (g.finish_reason && a->json) run_json(a, &g, in, logprobs);
        // A text ends with a newline, but for one that another run may continue: its pieces join.
        if (g.print && g.text.size && g.text.data[g.text.size - 1] != '\n' &&
            (!in->save || isatty(STDOUT_FILENO)))
            putchar('\n'), cli_text_open = 0;
        int unwritten = cli_flush();
        if (unwritten) code = unwritten;
        if (g.finish_reason && !cli_quiet) cli_print_timings(&g.timings);
    }
    generation_free(&g);
    free(logprobs);
    return code;
}

static int sala_run(int argc, char **argv) {
    cli_args a;
    run_input in = {0};
    sala *engine = NULL;
    cli_start(&a, &run_command, argc, argv);
    if (run_arguments(&a, &in) == 0 && (engine = cli_open(&a)) != NULL)
        a.code = cli_check_tokens(&a, engine);
    if (engine && a.code == CLI_OK) a.code = run_generate(&a, engine, &in);
    sala_close(engine);
    cli_free(&in.prompt);
    cli_free(&in.tokens);
    cli_end(&a);
    return a.code;
}

/* ---- chat --------------------------------------------------------------------------------------
   The sequence stays in the engine from turn to turn and only the new turn is prefilled. A turn in
   the template is "<|im_start|>ROLE\nTEXT<|im_end|>\n". An answer that ended by <|im_end|> has
   left that token as the last chosen one, so the next turn begins with the tokens of "\n"; after
   an answer that ended otherwise <|im_end|> is supplied too. */

enum { CHAT_SYSTEM = CLI_OWN, CHAT_SESSION };

static const cli_option chat_options[] = {
    {CHAT_SYSTEM, "system", "TEXT", "system prompt (default: none)"},
    {CHAT_SESSION, "session", "FILE",
     "go on with the conversation saved there; save it at the end, also when the terminal goes"},
    {0, NULL, NULL, NULL},
};

static const char chat_help[] =
    "/reset       forget the conversation, at the end in the file of --session too\n"
    "/system TEXT set the system prompt and forget the conversation\n"
    "/stats       what the conversation holds and what the last turn cost\n"
    "/save [FILE] save the conversation now (default: the file of --session)\n"
    "/quit        end (so does Ctrl-D)\n"
    "A backslash at the end of a line continues the message in the next one.\n"
    "Ctrl-C stops an answer; at the prompt it ends the program.\n";

static const cli_command chat_command = {
    "chat",
    "chat [-m DIR] [--system TEXT] [options]\n\n"
    "A conversation by the model's chat template. It stays in the K/V cache and the states:\n"
    "each turn reads only what is new. From a pipe every line is a turn. Lines that begin with\n"
    "/ are commands: /help, /reset, /system TEXT, /stats, /save [FILE], /quit.\n",
    chat_options,
    CLI_REQUEST | CLI_ENGINE,
    "  sala chat\n"
    "  sala chat --system 'Answer in one sentence.' --temp 0.7 -n 1000\n"
    "  sala chat --session farm.session\n"
    "  printf 'What does the cow say?\\nWhat is 3 + 4?\\n' | sala chat --quiet\n",
};

typedef struct chat {
    cli_args *args;
    sala *engine;
    char *system;
    int64_t sequence; // in the engine; 0: the conversation is empty
    int64_t length;   // tokens of the conversation, the pending one included
    int32_t last;     // the pending token: chosen last and not yet processed; -1: none
    cli_buffer owed;  // int32: what is left of a turn whose reading was interrupted
    int64_t turns;
    const char *session;  // the file of the conversation, or NULL
    int forgotten;        // the user gave up the conversation, so that its file is out of date
    int refused;          // a message did not fit: an exit code, where nobody reads along
    sala_timings timings; // of the last turn
} chat;

static void chat_reset(chat *c) {
    if (c->sequence) sala_release(c->engine, c->sequence, NULL);
    c->sequence = c->length = c->turns = 0;
    c->last = -1;
    cli_free(&c->owed);
    memset(&c->timings, 0, sizeof c->timings);
}

// The tokens that turn the conversation so far into one that waits for the answer to `text`.
static int chat_prompt(chat *c, const char *text, cli_buffer *out, sala_error *err) {
    static const char end[] = "<|im_end|>\n";
    int32_t *tokens;
    int64_t n, skip;
    int code = 0, empty = c->sequence == 0;
    cli_append(out, c->owed.data, c->owed.size);
    if (!empty) {
        n = sala_tokenize(c->engine, end, strlen(end), SALA_PARSE_SPECIAL, &tokens, err);
        if (n < 0) return (int)n;
        skip = n > 0 && c->owed.size == 0 && c->last == tokens[0];
        cli_append(out, tokens + skip, (size_t)(n - skip) * sizeof *tokens);
        sala_free(c->engine, tokens);
    } else if (c->system) {
        code = add_turn(c->engine, out, "system", c->system, strlen(c->system), 1, 0, err);
    }
    if (code < 0) return code;
    return add_turn(c->engine, out, "user", text, strlen(text), empty && !c->system, 1, err);
}

// Note what the engine now holds, after a request with `tokens` that ended in whatever way.
static void chat_note(chat *c, const generation *g, const cli_buffer *tokens) {
    int64_t pending = c->last >= 0,
            read = g->timings.prompt_tokens + g->timings.reused_tokens - pending;
    c->sequence = g->sequence;
    c->timings = g->timings;
    c->turns++;
    cli_free(&c->owed);
    if (read < 0)
        read = 0; // cancelled before it began: the pending token still is one
    else
        c->last = -1;
    c->length += read + g->timings.output_tokens;
    if (g->tokens.size) {
        memcpy(&c->last, g->tokens.data + g->tokens.size - sizeof c->last, sizeof c->last);
    } else if (c->sequence) { // interrupted while reading: the rest comes before the next turn
        size_t done = (size_t)read * sizeof(int32_t);
        if (done < tokens->size) cli_append(&c->owed, tokens->data + done, tokens->size - done);
    }
    if (!c->sequence) chat_reset(c);
}

// One turn. Returns an exit code only when the program must end, else 0.
static int chat_turn(chat *c, const char *text) {
    sala_request request = c->args->request;
    sala_error err;
    sala_info info;
    generation g = {0};
    cli_buffer tokens = {0};
    int code = chat_prompt(c, text, &tokens, &err);
    if (code < 0) {
        cli_free(&tokens);
        return cli_fail(CLI_FAILED, "%s", err.text);
    }
    sala_get_info(c->engine, &info);
    request.tokens = (const int32_t *)(void *)tokens.data;
    request.token_count = (int64_t)(tokens.size / sizeof(int32_t));
    request.sequence = c->sequence;
    request.keep = 1;
    if (!request.max_tokens) request.max_tokens = 256;
    int64_t room = info.context - c->length - request.token_count;
    int full = request.max_tokens > room; // the context ends before the answer has to
    if (full) request.max_tokens = room;
    if (room < 1) {
        cli_fail(0,
                 "the context is full: %lld tokens of conversation and %lld of this message do not "
                 "fit %lld; "
                 "/reset begins a new conversation, --context N makes room for more",
                 (long long)c->length, (long long)request.token_count, (long long)info.context);
        cli_free(&tokens);
        c->refused = 1;
        return CLI_OK;
    }
    g.engine = c->engine;
    g.print = 1;
    code = generate(&g, &request);
    if (g.finish_reason) chat_note(c, &g, &tokens);
    if (code == 128 + SIGINT) code = cli_signal = 0; // it stopped this answer and no more
    if (code == CLI_FAILED && !g.broken) code = CLI_OK;
    if (g.text.size && g.text.data[g.text.size - 1] != '\n') putchar('\n');
    if (cli_flush()) code = CLI_OUTPUT;
    if (g.finish_reason == SALA_FINISH_LENGTH && !cli_quiet)
        fprintf(stderr, "sala: (stopped after %lld tokens: %s)\n",
                (long long)g.timings.output_tokens,
                full ? "the context is full (--context)" : "no more were asked for (--max-tokens)");
    generation_free(&g);
    cli_free(&tokens);
    return code;
}

static void chat_stats(const chat *c) {
    sala_info i;
    sala_get_info(c->engine, &i);
    fprintf(stderr, "turns: %lld; conversation: %lld of %lld tokens%s\n", (long long)c->turns,
            (long long)c->length, (long long)i.context,
            c->length && !c->turns ? ", all of them from the file" : "");
    if (!c->turns) return;
    fprintf(stderr, "last turn: %lld tokens read, %lld written\n",
            (long long)c->timings.prompt_tokens, (long long)c->timings.output_tokens);
    cli_print_timings(&c->timings);
}

// Returns an exit code.
static int chat_save(const chat *c, const char *path) {
    int code = c->sequence ? save(c->engine, c->sequence, path) : CLI_OK;
    if (code == CLI_OK && c->owed.size)
        fprintf(stderr, "sala: warning: %s has no more of the last message than was read\n", path);
    if (code != CLI_OK || cli_quiet) return code;
    if (c->sequence)
        fprintf(stderr, "The conversation of %lld tokens is in %s.\n", (long long)c->length, path);
    else
        fprintf(stderr, "There is no conversation to save.\n");
    return code;
}

// At the end: what was said goes to the file, and what was forgotten from it. Returns an exit code.
static int chat_end(const chat *c) {
    if (c->sequence) return chat_save(c, c->session);
    if (!c->forgotten || access(c->session, F_OK) != 0) return CLI_OK;
    if (unlink(c->session) != 0)
        return cli_fail(CLI_OUTPUT, "%s: cannot remove: %s", c->session, strerror(errno));
    if (!cli_quiet) fprintf(stderr, "The conversation was forgotten: %s is removed.\n", c->session);
    return CLI_OK;
}

// A line that begins with '/'. Returns 1 when it ends the program.
static int chat_slash(chat *c, const char *line) {
    size_t word = strcspn(line, " ");
    const char *rest = line + word + strspn(line + word, " ");
    if (word == 5 && memcmp(line, "/quit", word) == 0) return 1;
    if (word == 5 && memcmp(line, "/help", word) == 0) {
        fputs(chat_help, stderr);
    } else if (word == 6 && memcmp(line, "/stats", word) == 0) {
        chat_stats(c);
    } else if (word == 5 && memcmp(line, "/save", word) == 0) {
        if (*rest || c->session)
            chat_save(c, *rest ? rest : c->session);
        else
            cli_fail(0, "/save needs a file: there is no --session");
    } else if (word == 6 && memcmp(line, "/reset", word) == 0) {
        chat_reset(c);
        c->forgotten = 1;
    } else if (word == 7 && memcmp(line, "/system", word) == 0) {
        free(c->system);
        c->system = *rest ? cli_copy(rest) : NULL;
        chat_reset(c);
        c->forgotten = 1;
    } else {
        cli_fail(0, "unknown command %.*s; /help lists them", (int)word, line);
    }
    return 0;
}

static int chat_loop(chat *c) {
    cli_reader reader = {0};
    cli_buffer message = {0};
    int code = CLI_OK, terminal = isatty(STDIN_FILENO), got;
    char *line;
    if (terminal && !cli_quiet) fprintf(stderr, "Type a message, or /help.\n");
    for (;;) {
        if (terminal) fprintf(stderr, "%s", message.size ? "... " : "> ");
        if ((got = cli_read_line(&reader, &line)) <= 0) break;
        size_t n = strlen(line);
        int more = n > 0 && line[n - 1] == '\\';
        cli_append(&message, line, n - (size_t)more);
        if (more) cli_append(&message, "\n", 1);
        if (more) continue;
        if (message.data[0] == '/' && chat_slash(c, message.data)) break;
        if (message.data[0] && message.data[0] != '/') code = chat_turn(c, message.data);
        if (code) break;
        message.size = 0;
    }
    if (terminal && got <= 0) fprintf(stderr, "\n");
    if (got == 0 && code == CLI_OK && message.size)
        code = chat_turn(c, message.data); // "...\\" at the end
    if (code == CLI_OK && !terminal && c->refused) code = CLI_FAILED;
    if (got < 0) code = 128 + (int)cli_signal;
    cli_free(&reader.data);
    cli_free(&message);
    return code;
}

// What the last but `back` turn of a conversation says, for sala_free; NULL: there is no such turn.
static char *chat_turn_text(sala *engine, const int32_t *tokens, int64_t count, int back) {
    static const char begin[] = "<|im_start|>";
    int32_t *mark;
    int64_t n = sala_tokenize(engine, begin, strlen(begin), SALA_PARSE_SPECIAL, &mark, NULL), at;
    for (at = count - n; n > 0 && at >= 0; at--) {
        if (memcmp(tokens + at, mark, (size_t)n * sizeof *mark) != 0) continue;
        if (back-- == 0) break;
        count = at;
    }
    if (n >= 0) sala_free(engine, mark);
    if (n <= 0 || at < 0) return NULL;
    char *text = sala_detokenize(engine, tokens + at + n, count - at - n, 0, NULL, NULL);
    char *line = text ? strchr(text, '\n') : NULL; // behind the role
    size_t bytes = line ? strlen(line + 1) : 0;
    while (bytes && strchr(" \n", line[bytes])) bytes--;
    if (line) memmove(text, line + 1, bytes);
    if (text) text[bytes] = 0;
    return text;
}

// Show what was said last: the question and its answer. Returns an exit code.
static int chat_recall(const chat *c) {
    const int32_t *tokens = NULL;
    int64_t count = sala_history(c->engine, c->sequence, &tokens, NULL);
    char *question = chat_turn_text(c->engine, tokens, count, 1);
    char *answer = chat_turn_text(c->engine, tokens, count, 0);
    int code = question && answer ? CLI_OK : CLI_FAILED;
    if (code != CLI_OK)
        cli_fail(code, "%s is no conversation, as it has no turns: sala run --load goes on with it",
                 c->session);
    else if (!cli_quiet)
        fprintf(stderr, "A conversation of %lld tokens goes on. Its end:\n> %s\n%s\n",
                (long long)c->length, question, answer);
    sala_free(c->engine, question);
    sala_free(c->engine, answer);
    return code;
}

// Take up the conversation of the file, if there is one. Returns an exit code.
static int chat_load(chat *c) {
    const char *path = c->session;
    sala_session session = {0};
    if (access(path, F_OK) != 0) return CLI_OK;
    int code = load(c->engine, path, &session);
    if (code != CLI_OK) return code;
    if (session.request)
        return cli_fail(CLI_FAILED, "%s was saved in the middle of a text: sala run --load ends it",
                        path);
    c->sequence = session.sequence;
    c->length = session.token_count;
    c->last = session.last;
    if ((code = chat_recall(c)) != CLI_OK) return code;
    if (c->system)
        fprintf(stderr,
                "sala: warning: the conversation in %s has begun without this --system, which "
                "begins the next one (/reset)\n",
                path);
    return CLI_OK;
}

static int sala_chat(int argc, char **argv) {
    cli_args a;
    chat c = {0};
    int id;
    cli_start(&a, &chat_command, argc, argv);
    while ((id = cli_next(&a)) > 0) {
        if (id == CHAT_SESSION) {
            c.session = a.value;
            continue;
        }
        free(c.system);
        c.system = a.value[0] ? cli_copy(a.value) : NULL;
    }
    if (id == 0 && a.request.logprobs)
        a.code = cli_fail(id = CLI_USAGE, "chat does not print log-probabilities");
    if (id == 0 && c.session) a.code = id = cli_check_place(c.session);
    if (id == 0) c.engine = cli_open(&a);
    c.args = &a;
    chat_reset(&c);
    if (c.engine) a.code = cli_check_tokens(&a, c.engine);
    if (c.engine && a.code == CLI_OK && c.session) a.code = chat_load(&c);
    if (c.engine && a.code == CLI_OK) {
        a.code = chat_loop(&c);
        int unsaved = c.session ? chat_end(&c) : CLI_OK;
        if (unsaved) a.code = unsaved;
    }
    chat_reset(&c);
    sala_close(c.engine);
    free(c.system);
    cli_end(&a);
    return a.code;
}

/* ---- info ----------------------------------------------------------------------------------- */

enum { INFO_CHECK = CLI_OWN, INFO_AGAINST, INFO_TEXT, INFO_TOKENS };

static const cli_option info_options[] = {
    {INFO_CHECK, "check", NULL, "read every weight: NaN and infinity are errors"},
    {INFO_AGAINST, "against", "DIR",
     "with --check: compare hidden states and logits with those of this model"},
    {INFO_TEXT, "text", "FILE", "what both read for that (default: a text that is built in)"},
    {INFO_TOKENS, "tokens", "TEXT", "show how the tokenizer splits a text"},
    {CLI_JSON, "json", NULL, "print one JSON object"},
    {0, NULL, NULL, NULL},
};

static const cli_command info_command = {
    "info",
    "info [-m DIR] [options]\n\n"
    "What a model is and what running it would take: the plan of every byte, and the longest\n"
    "context that fits. Nothing is allocated, and a plan that does not fit is shown all the\n"
    "same. Only --check and --tokens open the model.\n",
    info_options,
    CLI_ENGINE,
    "  sala info\n"
    "  sala info -m /models/MiniCPM-SALA --context 1M --max-sequences 1 --memory-limit 20G\n"
    "  sala info --tokens 'Hello, <|im_end|>' --check\n"
    "  sala info -m models/tiny-nvfp4 --check --against models/sala-tiny\n",
};

enum { INFO_GROUP, INFO_COUNT, INFO_BYTES };

typedef struct info_row {
    const char *key; // in JSON; NULL: a heading
    const char *title;
    int kind;
    int64_t value;
} info_row;

// Fill the rows of everything that is a number. Returns their count, at most 48.
static int info_rows(const sala_info *i, info_row *rows) {
    const info_row all[] = {
        {NULL, "Model", INFO_GROUP, 0},
        {"parameters", "parameters", INFO_COUNT, i->parameters},
        {"vocab", "vocabulary", INFO_COUNT, i->vocab},
        {"hidden", "hidden width", INFO_COUNT, i->hidden},
        {"layers", "layers", INFO_COUNT, i->layers},
        {"sparse_layers", "  sparse attention", INFO_COUNT, i->sparse_layers},
        {"lightning_layers", "  lightning attention", INFO_COUNT, i->lightning_layers},
        {"heads", "sparse: query heads", INFO_COUNT, i->heads},
        {"kv_heads", "  K/V heads", INFO_COUNT, i->kv_heads},
        {"head_dim", "  head width", INFO_COUNT, i->head_dim},
        {"block", "  tokens a block", INFO_COUNT, i->block},
        {"top_k", "  blocks a token attends to", INFO_COUNT, i->top_k},
        {"dense_len", "  dense below (tokens)", INFO_COUNT, i->dense_len},
        {"lightning_heads", "lightning: heads", INFO_COUNT, i->lightning_heads},
        {"lightning_head_dim", "  head width", INFO_COUNT, i->lightning_head_dim},
        {"bos", "BOS token (-1: none)", INFO_COUNT, i->bos},
        {NULL, "Settings", INFO_GROUP, 0},
        {"context", "context (tokens)", INFO_COUNT, i->context},
        {"max_sequences", "sequences", INFO_COUNT, i->max_sequences},
        {"kv_tokens_total", "K/V cache (tokens)", INFO_COUNT, i->kv_tokens_total},
        {"kv_tokens_reserved", "  in use", INFO_COUNT, i->kv_tokens_reserved},
        {"kv_tokens_idle", "  of prefixes alone", INFO_COUNT, i->kv_tokens_idle},
        {"snapshots", "snapshots of prefixes", INFO_COUNT, i->snapshots},
        {"chunk", "prefill chunk (tokens)", INFO_COUNT, i->chunk},
        {"threads", "threads", INFO_COUNT, i->threads},
        {NULL, "Memory plan", INFO_GROUP, 0},
        {"weight_bytes", "weights", INFO_BYTES, i->weight_bytes},
        {"draft_weight_bytes", "draft head", INFO_BYTES, i->draft_weight_bytes},
        {"draft_kv_bytes", "draft head's cache", INFO_BYTES, i->draft_kv_bytes},
        {"kv_bytes", "K/V cache", INFO_BYTES, i->kv_bytes},
        {"state_bytes", "lightning states", INFO_BYTES, i->state_bytes},
        {"pending_bytes", "pending paths", INFO_BYTES, i->pending_bytes},
        {"unpack_bytes", "4-bit weights, unpacked", INFO_BYTES, i->unpack_bytes},
        {"reuse_bytes", "snapshots of prefixes", INFO_BYTES, i->reuse_bytes},
        {"scratch_bytes", "scratch", INFO_BYTES, i->scratch_bytes},
        {"total_bytes", "total", INFO_BYTES, i->total_bytes},
        {NULL, "Scale", INFO_GROUP, 0},
        {"kv_bytes_per_token", "K/V cache per token", INFO_BYTES, i->kv_bytes_per_token},
        {"state_bytes_per_sequence", "states per sequence", INFO_BYTES,
         i->state_bytes_per_sequence},
        {"decode_bytes", "read to decode one token", INFO_BYTES, i->decode_bytes},
        {"node_bytes", "verify scratch a row", INFO_BYTES, i->node_bytes},
        {"longest_context", "longest context that fits", INFO_COUNT, i->longest_context},
    };
    memcpy(rows, all, sizeof all);
    return (int)(sizeof all / sizeof *all);
}

static void info_print(const sala_info *i, const char *path) {
    info_row rows[48];
    char human[32], exact[32];
    int n = info_rows(i, rows);
    printf("%-28s %s\n", "path", path);
    printf("%-28s %s\n", "device", i->device);
    printf("%-28s %s\n", "weight format", i->weight_format);
    printf("%-28s %s\n", "prefill", i->prefill);
    printf("%-28s %s\n", "weights", i->weight_kinds);
    printf("%-28s %s\n", "drafts", i->spec);
    printf("%-28s %s\n", "reuse", i->reuse);
    if (i->draft[0]) printf("%-28s %s\n", "draft head", i->draft);
    if (i->chat_template) printf("%-28s %s\n", "chat template", i->chat_template);
    printf("%-28s %.2f\n", "bits per weight", i->bits_per_weight);
    for (int k = 0; i->eos && k < i->eos_count; k++)
        printf("%-28s %d\n", k ? "" : "end tokens", i->eos[k]);
    for (int r = 0; r < n; r++) {
        cli_count(rows[r].value, exact);
        cli_bytes((double)rows[r].value, human);
        if (rows[r].kind == INFO_GROUP) printf("\n%s\n", rows[r].title);
        if (rows[r].kind == INFO_COUNT) printf("  %-30s %14s\n", rows[r].title, exact);
        if (rows[r].kind == INFO_BYTES)
            printf("  %-30s %14s  (%s bytes)\n", rows[r].title, human, exact);
    }
}

static void info_json_word(const char *key, const char *value) {
    printf("\"%s\": ", key);
    cli_json_text(stdout, value, value ? strlen(value) : 0);
    printf(", ");
}

static void info_json(const sala_info *i, const char *path) {
    info_row rows[48];
    int n = info_rows(i, rows);
    printf("{");
    info_json_word("version", sala_version());
    info_json_word("path", path);
    info_json_word("device", i->device);
    info_json_word("weight_format", i->weight_format);
    info_json_word("prefill", i->prefill);
    info_json_word("weight_kinds", i->weight_kinds);
    info_json_word("draft", i->draft);
    info_json_word("chat_template", i->chat_template);
    info_json_word("spec", i->spec);
    info_json_word("reuse", i->reuse);
    for (int r = 0; r < n; r++)
        if (rows[r].key) printf("\"%s\": %lld, ", rows[r].key, (long long)rows[r].value);
    printf("\"eos\": [");
    for (int k = 0; i->eos && k < i->eos_count; k++) printf("%s%d", k ? ", " : "", i->eos[k]);
    printf("], \"sequences_resident\": %d, \"requests_waiting\": %d, \"requests_active\": %d, ",
           i->sequences_resident, i->requests_waiting, i->requests_active);
    printf("\"bits_per_weight\": %.6g", i->bits_per_weight);
}

// Show how a text is split, one token a line or as a JSON array.
static int info_tokens(sala *engine, const char *text, int json) {
    sala_error err;
    int32_t *tokens;
    int64_t n =
        sala_tokenize(engine, text, strlen(text), SALA_ADD_BOS | SALA_PARSE_SPECIAL, &tokens, &err);
    if (n < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    printf(json ? ", \"tokens\": [" : "\nTokens (%lld)\n", (long long)n);
    for (int64_t k = 0; k < n; k++) {
        size_t bytes;
        char *piece = sala_detokenize(engine, tokens + k, 1, 1, &bytes, NULL);
        printf(json ? "%s{\"id\": %d, \"text\": " : "%s  %8d  ", json && k ? ", " : "", tokens[k]);
        cli_json_text(stdout, piece, piece ? bytes : 0);
        printf(json ? "}" : "\n");
        sala_free(engine, piece);
    }
    if (json) printf("]");
    sala_free(engine, tokens);
    return CLI_OK;
}

// The plan of a model that is not opened: *fits tells whether it would be. Returns an exit code.
static int info_plan(cli_args *a, const char *path, sala_info *info, int *fits) {
    sala_error err;
    int code = sala_plan(path, &a->options, info, &err);
    *fits = code == 0;
    if (code == SALA_E_MEMORY && info->total_bytes > 0) {
        if (!a->json) printf("does not fit: %s\n\n", err.text);
        return CLI_OK;
    }
    return code < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

static int info_show(cli_args *a, int check, const char *text, const char *against,
                     const char *file) {
    char room[4096];
    const char *path = cli_model_path(a->model, room);
    sala_info info = {0};
    sala_error err;
    sala *engine = NULL;
    int fits = 1;
    if (!path) return CLI_FAILED;
    a->model = path;
    if (cli_check_engine(a, path) != CLI_OK) return a->code;
    if (!check && !text) {
        a->code = info_plan(a, path, &info, &fits);
    } else if ((engine = cli_open(a)) != NULL) {
        sala_get_info(engine, &info);
        if (check && sala_check_weights(engine, &err) < 0)
            a->code = cli_fail(CLI_FAILED, "%s", err.text);
    }
    if (a->code != CLI_OK) {
        sala_close(engine);
        return a->code;
    }
    if (a->json)
        info_json(&info, path);
    else if (!against)
        info_print(&info, path);
    if (a->json) printf(", \"fits\": %s", fits ? "true" : "false");
    if (a->json && check) printf(", \"weights_finite\": true");
    if (!a->json && check) printf("\nevery weight is a finite number\n");
    int code = text ? info_tokens(engine, text, a->json) : CLI_OK;
    if (code == CLI_OK && against) code = compare_models(a, &engine, against, file);
    if (a->json) printf("}\n");
    sala_close(engine);
    return code;
}

static int sala_info_command(int argc, char **argv) {
    cli_args a;
    const char *text = NULL, *against = NULL, *file = NULL;
    int check = 0, id;
    cli_start(&a, &info_command, argc, argv);
    while ((id = cli_next(&a)) > 0) {
        if (id == INFO_CHECK) check = 1;
        if (id == INFO_TOKENS) text = a.value;
        if (id == INFO_AGAINST) against = a.value;
        if (id == INFO_TEXT) file = a.value;
    }
    if (id == 0 && against && !check)
        a.code = cli_fail(id = CLI_USAGE, "--against belongs to --check");
    if (id == 0 && file && !against)
        a.code = cli_fail(id = CLI_USAGE, "--text belongs to --against");
    if (against) compare_options(&a);
    if (id == 0) a.code = info_show(&a, check, text, against, file);
    cli_end(&a);
    return a.code;
}

/* ---- the program ---------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *what;
} commands[] = {
    {"run", sala_run, "continue a text (alone: tells a story with models/sala-tiny)"},
    {"chat", sala_chat, "a conversation"},
    {"info", sala_info_command, "what a model is, and the memory that running it takes"},
    {"logits", sala_logits, "logits of every position of a token sequence, as a file"},
    {"eval", sala_eval, "score answers to a set of questions; perplexity of a text"},
    {"bench", sala_bench, "speed: prefill, decode, many requests"},
    {"dump-features", sala_dump_features, "what a draft head is trained with, as safetensors"},
};

static void print_overview(FILE *f) {
    fprintf(f, "sala %s runs MiniCPM-SALA models.\n\nusage: sala COMMAND [options]\n\n",
            sala_version());
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(f, "  %-13s %s\n", commands[i].name, commands[i].what);
    fprintf(
        f,
        "\n`sala help COMMAND` shows its options; `sala --version` prints the version.\n\n"
        "Environment variables\n"
        "  SALA_MODEL   the model folder when -m is not given\n"
        "  SALA_CACHE   folder of compiled kernels (default ~/.cache/sala); off: compile each "
        "time\n"
        "  SALA_NVRTC   path of NVRTC, CUDA's compiler library; SALA_CUDA: of the driver\n\n"
        "Exit codes\n"
        "  0 done   1 model or run failed   2 wrong command line   3 output could not be written\n"
        "  130 interrupted by Ctrl-C (128 + the signal's number)\n");
}

static int run_command_named(const char *name, int argc, char **argv) {
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(commands[i].name, name) == 0) return commands[i].run(argc, argv);
    return cli_fail(CLI_USAGE, "unknown command '%s'; `sala help` lists them", name);
}

static int dispatch(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    static char help[] = "--help";
    if (argc < 2) {
        print_overview(stderr);
        return CLI_USAGE;
    }
    if (strcmp(name, "--version") == 0) {
        printf("sala %s\n", sala_version());
        return CLI_OK;
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        char *args[] = {argc > 2 ? argv[2] : NULL, help, NULL};
        if (argc > 2) return run_command_named(argv[2], 2, args);
        print_overview(stdout);
        return CLI_OK;
    }
    return run_command_named(name, argc - 1, argv + 1);
}

int main(int argc, char **argv) {
    // Where a standard stream is closed, a model file would take its number: put something harmless
    // there, opened the wrong way round, so that reading or writing fails as it should.
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
    cli_catch_signals();
    int code = dispatch(argc, argv);
    int unwritten = cli_flush();
    if (!unwritten && fclose(stdout) != 0)
        unwritten = cli_fail(CLI_OUTPUT, "cannot write to stdout: %s", strerror(errno));
    return unwritten ? unwritten : code;
}
