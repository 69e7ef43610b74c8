/*  bench_spec.c - `sala bench --spec all`: what drafts bring, beside plain decoding of the same requests. Included by
    bench.c.

    With a model of words: the prompts of a file (--prompts), class by class, plain, with n-grams, with trees of the draft
    head and with both as they come. With a synthetic model, whose text nobody can foresee: drafts of tests, right as often
    as is asked for, at full cost. Every run must give the tokens of the plain one. */

typedef struct spec_prompt {
    char class[16];
    int32_t *tokens; // [count] of malloc
    int64_t count;
    cli_buffer truth, got; // int32: the plain output, that of the latest run
} spec_prompt;

typedef struct spec_run {
    const char *class, *spec, *test, *tree; // spec_test and spec_tree, or NULL
    int sequences;                          // at once
    double seconds, steps, tokens; // of steps that only decode, after the first `skip` tokens
    sala_timings sum;              // of all requests
    double plain;                  // tokens a second of the plain run beside it
} spec_run;

#define SPEC_RUNS 64

typedef struct spec_bench {
    bench *b;
    spec_prompt *prompts;
    const char *tree; // of the command line
    int prompt_count, run_count, json, missed;
    spec_run runs[SPEC_RUNS];
} spec_bench;

static double spec_step(const spec_run *r) { // seconds
    return r->steps > 0 ? r->seconds / r->steps : 0;
}
static double spec_verify(const spec_run *r) {
    return cli_rate(r->sum.verify_seconds, cli_verifies(&r->sum));
}
static double spec_rate(const spec_run *r) {
    return cli_rate(r->tokens, r->seconds);
}

// Steps until all requests are done. Those that read prompts are not timed, nor the first `skip` tokens of
// a sequence: counted in tokens, since with drafts they may be the work of few steps.
static int spec_steps(spec_bench *x, spec_prompt *p, int n, spec_run *r, int64_t first, int skip) {
    sala_error err;
    sala_event e;
    double made = 0;
    for (;;) {
        double begin = cli_now(), tokens = 0;
        int decoding = 1, step = sala_step(x->b->engine, &err);
        double seconds = cli_now() - begin;
        if (step < 0) return cli_fail(CLI_FAILED, "%s", err.text);
        if (step == 0) return CLI_OK;
        while (sala_next_event(x->b->engine, &e)) {
            if (e.type == SALA_EVENT_PREFILL) decoding = 0;
            if (e.type == SALA_EVENT_FINISH) bench_add_drafts(&r->sum, &e.timings);
            if (e.type != SALA_EVENT_TOKEN || e.request - first >= n) continue;
            cli_append(&p[e.request - first].got, &e.token, sizeof e.token);
            tokens++;
        }
        if (cli_signal) return 128 + (int)cli_signal;
        made += tokens;
        if (!decoding || tokens == 0 || made - tokens < (double)skip * n) continue;
        r->seconds += seconds;
        r->steps++;
        r->tokens += tokens;
    }
}

// --fill: every run finds the same random cache, its sequences the same pages.
static int spec_fill(sala *s, sala_error *err) {
    for (int64_t i = 0; i < s->plan.pages; i++) s->free_pages[i] = (int32_t)(s->plan.pages - 1 - i);
    return bench_fill_cache(s, err);
}

// `n` prompts at once. A plain run without a truth sets it, every other one must give the same.
static int spec_requests(spec_bench *x, spec_prompt *p, int n, spec_run *r, int skip) {
    bench *b = x->b;
    sala_error err;
    int64_t first = 0;
    int code = CLI_OK;
    for (int i = 0; i < n; i++) {
        sala_request ask;
        memset(&ask, 0, sizeof ask);
        ask.tokens = p[i].tokens;
        ask.token_count = p[i].count;
        ask.max_tokens = b->gen;
        ask.ignore_eos = b->engine->options.synthetic;
        ask.guess = (const int32_t *)(const void *)p[i].truth.data;
        ask.guess_count = (int64_t)(p[i].truth.size / sizeof(int32_t));
        p[i].got.size = 0;
        int64_t id = sala_submit(b->engine, &ask, &err);
        if (id < 0) return cli_fail(CLI_FAILED, "a prompt of class %s: %s", p[i].class, err.text);
        if (!i) first = id;
    }
    if (b->fill && (spec_fill(b->engine, &err) < 0 || bench_skip_prompt(b->engine, &err) < 0))
        return cli_fail(CLI_FAILED, "%s", err.text);
    code = spec_steps(x, p, n, r, first, skip);
    for (int i = 0; i < n && code == CLI_OK; i++) {
        if (!p[i].truth.size) cli_append(&p[i].truth, p[i].got.data, p[i].got.size);
        if (p[i].got.size != p[i].truth.size ||
            memcmp(p[i].got.data, p[i].truth.data, p[i].truth.size) != 0)
            code = cli_fail(CLI_FAILED, "%s, spec %s: another text than plain decoding gives",
                            r->class, r->spec);
    }
    return code;
}

// All prompts of the run's class, `sequences` at a time, as often as asked: the fastest time counts.
static int spec_measure(spec_bench *x, spec_run r, double plain, int skip) {
    sala *s = x->b->engine;
    sala_error err;
    s->options.spec = r.spec; // the plan of the memory is that of speculation anyway
    s->options.spec_test = r.test;
    s->options.spec_tree = r.tree ? r.tree : x->tree;
    if (sala__spec_open(s, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    int code = CLI_OK;
    spec_run best = r;
    for (int64_t again = 0; again < x->b->repeat && code == CLI_OK; again++) {
        spec_run now = r;
        for (int i = 0; i < x->prompt_count && code == CLI_OK; i += now.sequences) {
            if (strcmp(x->prompts[i].class, r.class) != 0 || i + now.sequences > x->prompt_count)
                continue;
            code = spec_requests(x, x->prompts + i, now.sequences, &now, skip);
        }
        if (!again || spec_rate(&now) > spec_rate(&best)) best = now;
    }
    best.plain = plain > 0 ? plain : spec_rate(&best);
    if (code == CLI_OK && x->run_count < SPEC_RUNS) x->runs[x->run_count++] = best;
    cli_progress("comparing", x->run_count / (double)SPEC_RUNS, -1);
    return code;
}

// ---- what to compare ----

static int spec_add_prompt(spec_bench *x, const char *class, const int32_t *tokens, int64_t count) {
    size_t n = (size_t)x->prompt_count++;
    x->prompts = (spec_prompt *)cli_resize(x->prompts, (n + 1) * sizeof *x->prompts);
    spec_prompt *p = &x->prompts[n];
    memset(p, 0, sizeof *p);
    snprintf(p->class, sizeof p->class, "%s", class);
    for (char *c = p->class; *c; c++) // what a file says must not steer a terminal
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?';
    p->tokens = (int32_t *)cli_resize(NULL, (size_t)count * sizeof *tokens);
    memcpy(p->tokens, tokens, (size_t)count * sizeof *tokens);
    p->count = count;
    return CLI_OK;
}

// One prompt a line: {"class": ..., "prompt": ...}, special tokens parsed.
static int spec_read_prompts(spec_bench *x, const char *path) {
    cli_buffer file = {0};
    sala_error err;
    int code = cli_read_file(path, &file), number = 0;
    for (char *line = file.data, *next; code == CLI_OK && line && *line; line = next) {
        sala__json j;
        int32_t *tokens = NULL;
        next = strchr(line, '\n');
        size_t bytes = next ? (size_t)(next - line) : strlen(line);
        next = next ? next + 1 : line + bytes;
        number++;
        char where[4200];
        snprintf(where, sizeof where, "%s:%d", path, number);
        if (sala__json_parse(&x->b->engine->env, where, line, bytes, &j, &err) < 0) {
            code = cli_fail(CLI_FAILED, "%s", err.text);
            break;
        }
        const char *class = sala__json_text(&j, sala__json_get(&j, 0, "class"));
        const char *prompt = sala__json_text(&j, sala__json_get(&j, 0, "prompt"));
        if (!class || !prompt) {
            code = cli_fail(CLI_FAILED, "%s: lacks class or prompt", where);
        } else {
            int64_t n = sala_tokenize(x->b->engine, prompt, strlen(prompt),
                                      SALA_ADD_BOS | SALA_PARSE_SPECIAL, &tokens, &err);
            code =
                n < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : spec_add_prompt(x, class, tokens, n);
        }
        sala_free(x->b->engine, tokens);
        sala__json_free(&j);
    }
    if (code == CLI_OK && !x->prompt_count)
        code = cli_fail(CLI_FAILED, "%s: no prompt is in it", path);
    cli_free(&file);
    return code;
}

static int spec_words(spec_bench *x) { // a model with a tokenizer: class by class
    static const char *const kinds[] = {"off", "ngram", "eagle", "auto"};
    int code = CLI_OK, each = x->b->engine->has_draft ? 4 : 3;
    for (int i = 0; i < x->prompt_count && code == CLI_OK; i++) {
        double plain = 0;
        if (i && strcmp(x->prompts[i].class, x->prompts[i - 1].class) == 0) continue;
        if (x->run_count + each > SPEC_RUNS)
            return cli_fail(CLI_FAILED, "prompts of more than %d classes", SPEC_RUNS / each);
        for (int k = 0; k < 4 && code == CLI_OK; k++) {
            spec_run r = {.class = x->prompts[i].class, .spec = kinds[k], .sequences = 1};
            if (k == 2 && !x->b->engine->has_draft) continue;
            code = spec_measure(x, r, plain, 0);
            if (code == CLI_OK && !k) plain = x->runs[x->run_count - 1].plain;
        }
    }
    return code;
}

static int spec_synthetic(spec_bench *x) { // random weights: drafts of tests
    static const spec_run cases[] = {
        {.spec = "eagle", .test = "oracle", .tree = "7,2,15", .sequences = 1},
        {.spec = "eagle", .test = "oracle:80", .tree = "7,2,15", .sequences = 1},
        {.spec = "eagle", .test = "oracle:60", .tree = "7,2,15", .sequences = 1},
        {.spec = "eagle", .test = "random", .tree = "7,2,15", .sequences = 1},
        {.spec = "ngram", .sequences = 1},
        {.spec = "auto", .test = "random", .sequences = 1},
        {.spec = "off", .sequences = 8},
        {.spec = "eagle", .test = "oracle:80", .tree = "5,2,11", .sequences = 8},
        {.spec = "eagle", .test = "oracle:60", .tree = "5,2,11", .sequences = 8},
        {.spec = "eagle", .test = "oracle:80", .tree = "3,1,4", .sequences = 8},
        {.spec = "auto", .test = "oracle:80", .sequences = 8},
    };
    spec_run plain = {.class = "1", .spec = "off", .sequences = 1};
    int all = x->prompt_count, code, limit = x->b->parallel > 1 ? 11 : 6;
    x->prompt_count = 1;
    code = spec_measure(x, plain, 0, 0);
    for (int i = 0; i < limit && code == CLI_OK; i++) {
        spec_run r = cases[i];
        // Where the policy decides, the tokens until it has decided are not counted.
        int skip = r.test && r.spec[0] == 'a' ? (int)(x->b->gen * 3 / 4) : 0;
        r.class = "1";
        if (r.sequences > 1) r.sequences = all;
        x->prompt_count = r.sequences == 1 ? 1 : all;
        const spec_run *beside = r.sequences == 1 ? &x->runs[0] : &x->runs[7];
        code = spec_measure(x, r, r.spec[0] == 'o' ? 0 : spec_rate(beside), skip);
    }
    x->prompt_count = all;
    return code;
}

// ---- the report ----

static void spec_print_heading(void) {
    printf(
        "t/step: tokens a step. drafted: steps that verified a draft, and the tokens that each of "
        "those "
        "gave.\n"
        "ms of a step: all of it; of that making drafts, verifying, the rest. x: tokens a second / "
        "those of off.\n"
        "right: of the drafted tokens at depth 1, 2, ... whose parent was right, %%.\n\n"
        "class     at once, drafts        t/step   drafted    ms/step   draft  verify    rest"
        "      t/s     x  right\n");
}

static void spec_print(const spec_run *r) {
    char name[64], rights[80] = "";
    int n = 0;
    snprintf(name, sizeof name, "%s%s%s%s%s", r->spec, r->test ? " " : "", r->test ? r->test : "",
             r->tree ? " " : "", r->tree ? r->tree : "");
    for (int d = 1; d <= 7; d++) {
        double offered = 0, right = 0;
        for (int k = 1; k < 3; k++)
            offered += (double)r->sum.offered[k][d], right += (double)r->sum.accepted[k][d];
        if (offered > 0)
            n += snprintf(rights + n, sizeof rights - (size_t)n, " %3.0f", 100 * right / offered);
    }
    double drafted = (double)(r->sum.verifies[1] + r->sum.verifies[2]);
    double given = (double)(r->sum.verify_tokens[1] + r->sum.verify_tokens[2]);
    double draft = cli_rate(r->sum.draft_seconds, cli_verifies(&r->sum));
    double rest = fmax(0, spec_step(r) - draft - spec_verify(r)); // not all steps are timed
    printf("%-9s %2d %-22s %5.2f %3.0f%% %5.2f %8.3f %7.3f %7.3f %7.3f %8.1f %5.2f %s\n", r->class,
           r->sequences, name, cli_tau(&r->sum), 100 * cli_rate(drafted, cli_verifies(&r->sum)),
           cli_rate(given, drafted), 1e3 * spec_step(r), 1e3 * draft, 1e3 * spec_verify(r),
           1e3 * rest, spec_rate(r), cli_rate(spec_rate(r), r->plain), rights);
}

static void spec_print_json(const spec_bench *x, const spec_run *r) {
    sala_options o = x->b->engine->options;
    o.spec = r->spec;
    o.spec_test = r->test;
    o.spec_tree = r->tree ? r->tree : x->tree;
    printf("%s{\"class\": ", r == x->runs ? "[" : ", ");
    cli_json_text(stdout, r->class, strlen(r->class));
    printf(", \"sequences\": %d, ", r->sequences);
    if (r->test) printf("\"test\": \"%s\", ", r->test);
    printf("\"step_seconds\": %.9f, \"tokens_per_second\": %.3f, \"times_plain\": %.4f, "
           "\"speculation\": ",
           spec_step(r), spec_rate(r), cli_rate(spec_rate(r), r->plain));
    cli_json_spec(&o, &r->sum);
    printf("}");
}

// One figure that was wanted.
static void spec_want(spec_bench *x, const char *what, double got, double wanted, int at_most) {
    int met = at_most ? got <= wanted : got >= wanted;
    x->missed += !met;
    fprintf(x->json ? stderr : stdout, "%s %s: %.3f (wanted: %s %g)\n", met ? "met   " : "MISSED",
            what, got, at_most ? "at most" : "at least", wanted);
}

static const spec_run *spec_find(const spec_bench *x, const char *class, const char *spec,
                                 const char *test, int many) {
    for (const spec_run *r = x->runs; r < x->runs + x->run_count; r++)
        if (!strcmp(r->class, class) && !strcmp(r->spec, spec) && (r->sequences > 1) == many &&
            !strcmp(r->test ? r->test : "", test))
            return r;
    return NULL;
}

static void spec_verdicts(spec_bench *x) {
    static const char *const repeating[] = {"json", "code", "copy"};
    const spec_run *r = x->runs, *end = r + x->run_count;
    int on_gpu = x->b->engine->on_gpu; // a CPU has other work beside
    char what[80];
    if (x->b->engine->has_tokenizer) {
        for (int k = 0; k < 3; k++)
            if ((r = spec_find(x, repeating[k], "ngram", "", 0)) != NULL) {
                snprintf(what, sizeof what, "tokens a step with n-grams on %s", r->class);
                spec_want(x, what, cli_tau(&r->sum), 4, 0);
            }
        for (r = x->runs; r < end && on_gpu; r++) {
            if (strcmp(r->spec, "auto") != 0) continue;
            const spec_run *alone = spec_find(x, r->class, "ngram", "", 0);
            snprintf(what, sizeof what, "auto / the better of n-grams and nothing on %s", r->class);
            spec_want(x, what, spec_rate(r) / fmax(spec_rate(alone), r->plain), 0.95, 0);
        }
        return;
    }
    const spec_run *plain = x->runs, *tree = spec_find(x, "1", "eagle", "oracle", 0),
                   *left = spec_find(x, "1", "auto", "random", 0),
                   *plain8 = spec_find(x, "1", "off", "", 1),
                   *tree8 = spec_find(x, "1", "eagle", "oracle:80", 1),
                   *auto8 = spec_find(x, "1", "auto", "oracle:80", 1);
    if (!on_gpu || !left) return;
    spec_want(x, "one sequence: step with 7,2,15 / plain", spec_step(tree) / spec_step(plain), 1.7,
              1);
    spec_want(x, "verify of 15 nodes / of one", spec_verify(tree) / spec_verify(plain), 1.25, 1);
    spec_want(x, "step of auto that has left the trees / plain", spec_step(left) / spec_step(plain),
              1.01, 1);
    if (!auto8) return;
    snprintf(what, sizeof what, "%d sequences: step with 5,2,11 / plain", plain8->sequences);
    spec_want(x, what, spec_step(tree8) / spec_step(plain8), 2.6, 1);
    double gain = spec_rate(auto8) / spec_rate(plain8);
    snprintf(what, sizeof what, "%d sequences: auto at 80 %% right / plain", plain8->sequences);
    spec_want(x, what, gain, gain < 1.05 ? 0.99 : 1.1, 0); // it says off, or it gains
}

static int bench_spec(bench *b, int json) {
    spec_bench *x = (spec_bench *)cli_resize(NULL, sizeof *x);
    int code = CLI_OK, words = b->engine->has_tokenizer;
    memset(x, 0, sizeof *x);
    x->b = b;
    x->json = json;
    x->tree = b->engine->options.spec_tree;
    if (words) code = spec_read_prompts(x, b->prompts);
    int32_t *tokens = (int32_t *)cli_resize(NULL, (size_t)b->prompt * sizeof *tokens);
    for (int i = 0; i < b->parallel && !words; i++) {
        for (int64_t k = 0; k < b->prompt; k++)
            tokens[k] = (int32_t)((uint32_t)(k + 1 + 1000 * i) * 2654435761u / 65536 %
                                  (uint32_t)b->engine->config.dims.vocab);
        spec_add_prompt(x, "1", tokens, b->prompt);
    }
    free(tokens);
    if (code == CLI_OK) code = words ? spec_words(x) : spec_synthetic(x);
    cli_progress_clear();
    if (!json && x->run_count) spec_print_heading();
    for (int i = 0; i < x->run_count; i++) {
        if (json)
            spec_print_json(x, &x->runs[i]);
        else
            spec_print(&x->runs[i]);
    }
    if (json && x->run_count) printf("]\n");
    int untimed = 0;
    for (int i = 0; i < x->run_count; i++) untimed += x->runs[i].steps == 0;
    if (untimed)
        fprintf(
            stderr,
            "sala: warning: %d of %d rows have no time, since each of their steps read a prompt or "
            "came before the policy had decided: take more --gen-tokens\n",
            untimed, x->run_count);
    if (b->goals && untimed)
        x->missed++;
    else if (b->goals && code == CLI_OK)
        spec_verdicts(x);
    if (x->missed) code = CLI_FAILED;
    for (int i = 0; i < x->prompt_count; i++) {
        free(x->prompts[i].tokens);
        cli_free(&x->prompts[i].truth);
        cli_free(&x->prompts[i].got);
    }
    free(x->prompts);
    free(x);
    return code ? code : cli_flush();
}
