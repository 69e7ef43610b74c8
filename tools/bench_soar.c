/*  bench_soar.c - `sala bench --soar FILE`: the speed test of the SOAR contest (OpenBMB/SOAR-Toolkit,
    bench_serving.sh), without its HTTP server. Included by bench.c; docs/benchmarks.md says what is as there and what
    is not.

    Two rows for each number of requests at once. `forced` is the contest's: the raw prompt, as many tokens as
    model_response has, end tokens ignored. Forced lengths make a model repeat itself, and repetitions are what n-grams
    guess best; so the second row, `natural`, asks the same by the chat template and lets answers end, and no gain of
    speculation is shown without it. Every run of a row must give the same tokens. */
#include "soar_set.h"

#define SOAR_LEVELS 8

static const int soar_scored[3] = {1, 8, 0}; // levels of the score

typedef struct soar_row { // one run of all requests
    int level, natural;   // level: at most so many at once, 0: all
    const char *spec;
    double seconds, ttft[3], tpot[3]; // percentiles 50, 90, 99
    double bytes, busy;               // of steps that only decode
    double pause;                     // the longest that a sequence waited for its next token
    int64_t pause_steps, beside; // the same in steps; prompt tokens read in a step beside others
    int64_t input, output;
    int ended;        // by themselves
    sala_timings sum; // of all requests
} soar_row;

typedef struct soar_bench {
    bench *b;
    cli_args *a;
    soar_set set;
    soar_row rows[4 * SOAR_LEVELS], *now;
    int level[SOAR_LEVELS], level_count, row_count;
    int running, done; // of the present run: sequences with a first token, finished ones
    int64_t first, steps;
    double baseline[2][3]; // seconds of forced and natural at the scored levels; 0: not known
    double accuracy;       // overall of --eval; 0: not given
} soar_bench;

// ---- running ----

static int soar_at_once(const soar_bench *x, int level) { // requests, with so few of them
    return level && level < x->set.count ? level : x->set.count;
}

static int soar_most(const soar_bench *x) { // requests that there may be at once
    int most = 1;
    for (int i = 0; i < x->level_count; i++)
        if (soar_at_once(x, x->level[i]) > most) most = soar_at_once(x, x->level[i]);
    return most;
}

// The prompt of a request, made inside the time that is measured. Returns an exit code.
static int soar_prompt(soar_bench *x, soar_item *it, sala_request *ask, int32_t **tokens) {
    sala *s = x->b->engine;
    sala_error err;
    if (it->text && !x->now->natural) {
        ask->text = it->text;
        ask->text_bytes = it->bytes;
        return CLI_OK;
    }
    ask->token_count = it->prompt;
    if (x->now->natural)
        ask->token_count = sala_chat_turn(s, "user", it->text, it->bytes, 1, 1, tokens, &err);
    else
        *tokens = (int32_t *)cli_resize(NULL, (size_t)it->prompt * sizeof **tokens);
    for (int64_t k = 0; k < it->prompt && !it->text; k++)
        (*tokens)[k] = (int32_t)((sala_random((uint64_t)it->line, (uint64_t)k) >> 33) %
                                 (uint64_t)s->config.dims.vocab);
    ask->tokens = *tokens;
    return ask->token_count < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

// Hand in request i, of at most `limit` tokens. Returns an exit code.
static int soar_send(soar_bench *x, int i, int64_t limit) {
    soar_item *it = &x->set.items[i];
    const cli_buffer *guess = &it->truth[x->now->natural];
    sala_request ask;
    sala_error err;
    int32_t *tokens = NULL;
    int64_t id = -1;
    memset(&ask, 0, sizeof ask);
    it->sent = cli_now();
    it->first = it->last = 0;
    it->step = it->read = 0;
    it->got.size = 0;
    int code = soar_prompt(x, it, &ask, &tokens);
    ask.max_tokens = x->now->natural && x->b->natural_tokens ? x->b->natural_tokens : it->output;
    if (ask.max_tokens > limit) ask.max_tokens = limit;
    ask.ignore_eos = !x->now->natural;
    ask.guess = (const int32_t *)(const void *)guess->data;
    ask.guess_count = (int64_t)(guess->size / sizeof(int32_t));
    if (code == CLI_OK) id = sala_submit(x->b->engine, &ask, &err);
    if (code == CLI_OK && id < 0)
        code = cli_fail(CLI_FAILED, "%s:%d: %s", x->set.path, it->line, err.text);
    if (i == 0) x->first = id;
    if (x->now->natural)
        sala_free(x->b->engine, tokens);
    else
        free(tokens);
    return code;
}

static void soar_token(soar_bench *x, soar_item *it, const sala_event *e, double now) {
    soar_row *r = x->now;
    if (it->step && it->step != x->steps) {
        r->pause = fmax(r->pause, now - it->last);
        if (x->steps - it->step > r->pause_steps) r->pause_steps = x->steps - it->step;
    }
    x->running += !it->step;
    if (!it->step) it->first = now;
    it->last = now;
    it->step = x->steps;
    cli_append(&it->got, &e->token, sizeof e->token);
}

static int soar_finish(soar_bench *x, const soar_item *it,
                       const sala_event *e) { // returns an exit code
    soar_row *r = x->now;
    x->done++;
    x->running--;
    r->ended += e->finish_reason == SALA_FINISH_STOP;
    r->input += e->timings.prompt_tokens;
    r->output += e->timings.output_tokens;
    bench_add_drafts(&r->sum, &e->timings);
    if (e->finish_reason == SALA_FINISH_MEMORY)
        return soar_bad(x->set.path, it, "needs more K/V cache: raise --kv-tokens");
    if (e->finish_reason == SALA_FINISH_NAN)
        return soar_bad(x->set.path, it, "got logits that are not numbers");
    return CLI_OK;
}

static int soar_step(soar_bench *x) { // one step and its events; returns an exit code
    soar_row *r = x->now;
    sala_error err;
    sala_event e;
    int64_t read = 0;
    int others = x->running, verified = 0, code = CLI_OK;
    double begin = cli_now();
    if (sala_step(x->b->engine, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    double now = cli_now();
    x->steps++;
    while (sala_next_event(x->b->engine, &e)) {
        soar_item *it = &x->set.items[e.request - x->first];
        if (e.type == SALA_EVENT_PREFILL) read += e.done - it->read, it->read = e.done;
        if (e.type == SALA_EVENT_TOKEN)
            verified += it->step != x->steps, soar_token(x, it, &e, now);
        if (e.type == SALA_EVENT_FINISH && soar_finish(x, it, &e) != CLI_OK) code = CLI_FAILED;
    }
    if (others && read > r->beside) r->beside = read;
    if (!read && verified) {
        r->bytes += (double)sala__verify_bytes(x->b->engine, verified);
        r->busy += now - begin;
    }
    return cli_signal ? 128 + (int)cli_signal : code;
}

// The first `count` requests, at most `level` at once (0: all). Returns an exit code.
static int soar_requests(soar_bench *x, int count, int level, int64_t limit) {
    char title[64];
    int sent = 0, code = CLI_OK;
    double began = cli_now();
    x->done = x->running = 0;
    x->steps = 0;
    snprintf(title, sizeof title, "%d at once, %s, drafts %s", level ? level : count,
             x->now->natural ? "natural" : "forced", x->now->spec);
    while (x->done < count && code == CLI_OK) {
        while (sent < count && (!level || sent - x->done < level) && code == CLI_OK)
            code = soar_send(x, sent++, limit);
        if (code == CLI_OK) code = soar_step(x);
        cli_progress_since(title, x->done / (double)count, began);
    }
    x->now->seconds = cli_now() - began;
    return code;
}

static void soar_percentiles(soar_bench *x, int of_first, double out[3]) {
    static const double percents[] = {50, 90, 99};
    double *all = (double *)cli_resize(NULL, (size_t)x->set.count * sizeof *all);
    int n = 0;
    for (int i = 0; i < x->set.count; i++) {
        const soar_item *it = &x->set.items[i];
        size_t tokens = it->got.size / sizeof(int32_t);
        if (of_first || tokens > 1)
            all[n++] =
                of_first ? it->first - it->sent : (it->last - it->first) / (double)(tokens - 1);
    }
    soar_sort(all, n);
    for (int k = 0; k < 3; k++) out[k] = soar_percentile(all, n, percents[k]);
    free(all);
}

static int soar_run(soar_bench *x, int level, int natural, const char *spec) {
    sala *s = x->b->engine;
    sala_error err;
    soar_row *r = &x->rows[x->row_count],
             fresh = {.level = level, .natural = natural, .spec = spec};
    *r = fresh;
    x->now = r;
    s->options.spec = spec; // the plan of the memory holds for all
    s->options.spec_test = strcmp(spec, "off") ? x->b->spec_test : NULL;
    if (sala__spec_open(s, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    int code = soar_requests(x, 1, 1, 32); // the first one warms up
    *r = fresh;
    if (code == CLI_OK) code = soar_requests(x, x->set.count, level, INT64_MAX);
    for (int i = 0; i < x->set.count && code == CLI_OK; i++) {
        const cli_buffer *got = &x->set.items[i].got, *truth = &x->set.items[i].truth[natural];
        if (!truth->size) cli_append(&x->set.items[i].truth[natural], got->data, got->size);
        if (truth->size != got->size || memcmp(truth->data, got->data, got->size) != 0)
            code = soar_bad(x->set.path, &x->set.items[i],
                            "got other tokens than in the run before: this is a bug");
    }
    soar_percentiles(x, 1, r->ttft);
    soar_percentiles(x, 0, r->tpot);
    x->row_count += code == CLI_OK;
    return code;
}

// The level before this one that is the same run, as there are so few requests; -1: none.
static int soar_twin(const soar_bench *x, int l) {
    for (int k = 0; k < l; k++)
        if (soar_at_once(x, x->level[k]) == soar_at_once(x, x->level[l])) return x->level[k];
    return -1;
}

static int soar_all(soar_bench *x) {
    const char *spec = x->b->engine->options.spec;
    int words = x->b->engine->has_tokenizer, code = CLI_OK, twin;
    for (int l = 0; l < x->level_count && code == CLI_OK; l++) {
        if ((twin = soar_twin(x, l)) >= 0) {
            for (int i = 0, n = x->row_count; i < n; i++) {
                if (x->rows[i].level != twin) continue;
                x->rows[x->row_count] = x->rows[i];
                x->rows[x->row_count++].level = x->level[l];
            }
            continue;
        }
        for (int natural = 0; natural <= words; natural++) {
            if (code == CLI_OK && x->b->spec) code = soar_run(x, x->level[l], natural, "off");
            if (code == CLI_OK) code = soar_run(x, x->level[l], natural, spec);
        }
    }
    return code;
}

// ---- the report ----

static double soar_seconds(const soar_bench *x, int level, int natural,
                           int drafts) { // 0: no such run
    for (const soar_row *r = x->rows; r < x->rows + x->row_count; r++)
        if (r->level == level && r->natural == natural && (strcmp(r->spec, "off") != 0) == drafts)
            return r->seconds;
    return 0;
}

static double soar_gain(const soar_bench *x, int level, int natural) { // of drafts; 0: not known
    return cli_rate(soar_seconds(x, level, natural, 0), soar_seconds(x, level, natural, 1));
}

// 100 x the baseline's seconds / ours (with drafts where both ran) at scored level i; 0: not known.
static double soar_relative(const soar_bench *x, int natural, int i) {
    double own = soar_seconds(x, soar_scored[i], natural, 1);
    if (!(own > 0)) own = soar_seconds(x, soar_scored[i], natural, 0);
    return cli_rate(100 * x->baseline[natural][i], own);
}

static double soar_score_of(const soar_bench *x,
                            int natural) { // times C where it is known; NAN: not known
    double s[3];
    for (int i = 0; i < 3; i++)
        if (!((s[i] = soar_relative(x, natural, i)) > 0)) return NAN;
    return soar_score(s[0], s[1], s[2]) * (x->accuracy > 0 ? soar_factor(x->accuracy) : 1);
}

static const char *soar_level(int level, char out[16]) {
    snprintf(out, 16, level ? "S%d" : "Smax", level);
    return out;
}

static void soar_print_row(const soar_bench *x, const soar_row *r) {
    char name[16], first[40], each[48];
    snprintf(first, sizeof first, "%.0f/%.0f/%.0f", 1e3 * r->ttft[0], 1e3 * r->ttft[1],
             1e3 * r->ttft[2]);
    snprintf(each, sizeof each, "%.2f/%.2f/%.2f", 1e3 * r->tpot[0], 1e3 * r->tpot[1],
             1e3 * r->tpot[2]);
    printf("%-6s %-8s %-6s %9.3f %9.1f %9.1f %19s %19s %6.2f %8.2f %8.1f %5d\n",
           soar_level(r->level, name), r->natural ? "natural" : "forced", r->spec, r->seconds,
           cli_rate((double)r->input, r->seconds), cli_rate((double)r->output, r->seconds), first,
           each, cli_tau(&r->sum), cli_rate(1e-9 * r->bytes, r->busy), 1e3 * r->pause, r->ended);
    if (x->b->engine->options.reuse && strcmp(x->b->engine->options.reuse, "off") != 0)
        printf("                       %lld of %lld prompt tokens were there already\n",
               (long long)r->sum.reused_tokens, (long long)(r->input + r->sum.reused_tokens));
    if (!(cli_tau(&r->sum) > 1)) return;
    cli_print_spec(stdout, "                       ", &r->sum);
    printf("\n");
}

static void soar_print_gain(const soar_bench *x, int level) {
    char name[16];
    double natural = soar_gain(x, level, 1), forced = soar_gain(x, level, 0);
    if (!(forced > 0)) return;
    printf("drafts at %s: ", soar_level(level, name));
    if (natural > 0)
        printf("%.2f times as fast on natural answers, %.2f on forced lengths\n", natural, forced);
    else if (x->b->spec_test)
        printf("%.2f times as fast, where they are right as often as was asked for (%s)\n", forced,
               x->b->spec_test);
    else
        printf("no gain is given: forced lengths alone flatter them\n");
}

static void soar_print_score(const soar_bench *x, int natural) {
    double score = soar_score_of(x, natural);
    char name[16];
    int any = 0;
    for (int i = 0; i < 3; i++) {
        double s = soar_relative(x, natural, i);
        if (!(s > 0)) continue;
        if (!any++)
            printf("%s, 100 x the baseline's seconds / ours:", natural ? "natural" : "forced");
        printf(" %s %.2f,", soar_level(soar_scored[i], name), s);
    }
    if (!any) return;
    if (isnan(score))
        printf(" no score: it takes the levels 1, 8 and max\n");
    else if (x->accuracy > 0)
        printf(" score %.2f, C = %.2f by an accuracy of %.2f\n", score, soar_factor(x->accuracy),
               x->accuracy);
    else
        printf(" score %.2f x C (C: --eval)\n", score);
}

static void soar_print(const soar_bench *x, const sala_info *info) {
    char peak[32], planned[32];
    printf(
        "%d requests, %d left out (fewer than two tokens); K/V cache of %lld tokens, %d sequences\n"
        "t/s: over all the seconds. t/step: tokens a step. GB/s: of steps that only decode. wait: "
        "the longest of a\n"
        "sequence for its next token. ended: by themselves.\n\n"
        "level  row      drafts   seconds    in t/s   out t/s  ms to 1st 50/90/99 ms a token "
        "50/90/99 "
        "t/step     GB/s  wait ms ended\n",
        x->set.count, x->set.left_out, (long long)info->kv_tokens_total, info->max_sequences);
    for (int i = 0; i < x->row_count; i++) soar_print_row(x, &x->rows[i]);
    printf("\n");
    for (int l = 0, twin; l < x->level_count; l++) {
        char name[16], other[16];
        if ((twin = soar_twin(x, l)) >= 0)
            printf("%s is the run of %s: there are %d requests\n", soar_level(x->level[l], name),
                   soar_level(twin, other), x->set.count);
    }
    if (!x->b->engine->has_tokenizer)
        printf("no natural rows: a model without a tokenizer has no answers that end\n");
    for (int l = 0; l < x->level_count; l++) soar_print_gain(x, x->level[l]);
    for (int natural = 0; natural < 2; natural++) soar_print_score(x, natural);
    printf("memory: %s planned, %s %s\n", cli_bytes((double)info->total_bytes, planned),
           cli_bytes(bench_peak(x->b->engine), peak),
           x->b->engine->on_gpu ? "taken" : "resident at most, mapped weights included");
}

static void soar_json_row(const soar_bench *x, const soar_row *r) {
    sala_options o = x->b->engine->options;
    o.spec = r->spec;
    o.spec_test = strcmp(r->spec, "off") ? x->b->spec_test : NULL;
    printf("%s{\"concurrency\": %d, \"row\": \"%s\", \"seconds\": %.6f, \"prompt_tokens\": %lld, "
           "\"output_tokens\": %lld, \"reused_tokens\": %lld, \"ended\": %d, ",
           r == x->rows ? "" : ", ", r->level, r->natural ? "natural" : "forced", r->seconds,
           (long long)r->input, (long long)r->output, (long long)r->sum.reused_tokens, r->ended);
    printf("\"ttft\": [%.6f, %.6f, %.6f], \"tpot\": [%.9f, %.9f, %.9f], \"decode_gb_per_second\": "
           "%.3f, ",
           r->ttft[0], r->ttft[1], r->ttft[2], r->tpot[0], r->tpot[1], r->tpot[2],
           cli_rate(1e-9 * r->bytes, r->busy));
    printf("\"longest_wait\": %.6f, \"longest_wait_steps\": %lld, \"prompt_tokens_beside\": %lld, "
           "\"speculation\": ",
           r->pause, (long long)r->pause_steps, (long long)r->beside);
    cli_json_spec(&o, &r->sum);
    printf("}");
}

static void soar_json(const soar_bench *x, const sala_info *info) {
    int any = 0;
    printf("{\"soar\": ");
    cli_json_text(stdout, x->set.path, strlen(x->set.path));
    printf(", \"set\": \"%016llx\", \"device\": ", (unsigned long long)x->set.hash);
    cli_json_text(stdout, info->device, strlen(info->device));
    printf(", \"weights\": \"%s\", \"requests\": %d, \"left_out\": %d, \"planned_bytes\": %lld, "
           "\"peak_bytes\": %.0f, "
           "\"rows\": [",
           info->weight_format, x->set.count, x->set.left_out, (long long)info->total_bytes,
           bench_peak(x->b->engine));
    for (int i = 0; i < x->row_count; i++) soar_json_row(x, &x->rows[i]);
    printf("], \"gains\": [");
    for (int l = 0; l < x->level_count;
         l++) { // forced lengths alone show only what drafts by order bring
        double natural = soar_gain(x, x->level[l], 1), forced = soar_gain(x, x->level[l], 0);
        if (!(forced > 0) || !(natural > 0 || x->b->spec_test)) continue;
        printf("%s{\"concurrency\": %d, \"forced\": %.4f, \"natural\": ", any++ ? ", " : "",
               x->level[l], forced);
        cli_json_number(stdout, natural > 0 ? natural : NAN);
        printf("}");
    }
    printf("], \"accuracy\": ");
    cli_json_number(stdout, x->accuracy > 0 ? x->accuracy : NAN);
    printf(", \"score\": ");
    cli_json_number(stdout, soar_score_of(x, 0));
    printf(", \"natural_score\": ");
    cli_json_number(stdout, soar_score_of(x, 1));
    printf("}\n");
}

// ---- the command ----

// The accuracy of an eval file, the seconds of an earlier --json of the same set. Returns an exit code.
static int soar_read_json(soar_bench *x, const char *path, int is_eval) {
    char set[24];
    sala_error err;
    sala__json j;
    int code = CLI_OK;
    if (sala__json_file(&soar_env, path, 1 << 24, &j, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    int rows = sala__json_get(&j, 0, "rows");
    snprintf(set, sizeof set, "%016llx", (unsigned long long)x->set.hash);
    if (is_eval) x->accuracy = sala__json_at(&j, sala__json_get(&j, 0, "overall"))->number;
    if (is_eval && !(x->accuracy > 0))
        code =
            cli_fail(CLI_FAILED,
                     "%s: is not what sala eval --json writes, or no answer is right there", path);
    if (!is_eval && rows < 0)
        code = cli_fail(CLI_FAILED, "%s: is not what sala bench --soar --json writes", path);
    else if (!is_eval && !sala__json_is(&j, sala__json_get(&j, 0, "set"), set))
        code = cli_fail(
            CLI_FAILED,
            "%s: of other requests (file, --num-prompts, --natural-tokens or tokenizer)", path);
    for (int row = is_eval ? -1 : sala__json_at(&j, rows)->child; row >= 0;
         row = j.nodes[row].next) {
        const sala__json_node *level = sala__json_at(&j, sala__json_get(&j, row, "concurrency"));
        double *known = x->baseline[sala__json_is(&j, sala__json_get(&j, row, "row"), "natural")];
        for (int i = 0; i < 3; i++)
            if (level->is_integer && level->integer == soar_scored[i] && !(known[i] > 0))
                known[i] = sala__json_at(&j, sala__json_get(&j, row, "seconds"))->number;
    }
    sala__json_free(&j);
    return code;
}

// "1,8,max": 0 and max mean all. Returns an exit code.
static int soar_read_levels(soar_bench *x, const char *at) {
    for (;; at++) {
        char word[32]; // a longer one is no number either
        int64_t level = 0;
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        if (strcmp(word, "max") != 0 &&
            cli_integer("concurrency", word, 0, 100000, &level) != CLI_OK)
            return CLI_USAGE;
        if (x->level_count == SOAR_LEVELS)
            return cli_fail(CLI_USAGE, "--concurrency: at most %d levels", SOAR_LEVELS);
        x->level[x->level_count++] = (int)level;
        at += strcspn(at, ",");
        if (!*at) return CLI_OK;
    }
}

static int bench_soar(bench *b, cli_args *a) { // returns an exit code
    soar_bench *x = (soar_bench *)memset(cli_resize(NULL, sizeof *x), 0, sizeof *x);
    char room[4096];
    const char *model = cli_model_path(a->model, room);
    sala_info info;
    x->b = b;
    x->a = a;
    int code = model ? soar_read_levels(x, b->concurrency) : CLI_FAILED;
    if (code == CLI_OK)
        code = soar_read(&x->set, b->soar, (int)b->num_prompts, a->options.synthetic ? NULL : model,
                         a->options.chat_template);
    soar_hash(&x->set, &b->natural_tokens, sizeof b->natural_tokens);
    if (code == CLI_OK && b->baseline) code = soar_read_json(x, b->baseline, 0);
    if (code == CLI_OK && b->eval) code = soar_read_json(x, b->eval, 1);
    if (code == CLI_OK) {
        soar_plan(&x->set, a, model, soar_most(x), b->natural_tokens);
        b->engine = cli_open(a);
        code = b->engine ? soar_all(x) : a->code;
        cli_progress_clear();
    }
    if (code == CLI_OK) sala_get_info(b->engine, &info);
    if (code == CLI_OK && a->json) soar_json(x, &info);
    if (code == CLI_OK && !a->json) soar_print(x, &info);
    for (int i = 0; i < x->set.count; i++) soar_drop(&x->set.items[i]);
    free(x->set.items);
    free(x);
    return code ? code : cli_flush();
}
