/*  bench_context.c - `sala bench --context`: prefill and decode tokens a second by context, as CSV. Included by bench.c.

    One sequence grows: up to 2K, 4K ... --max-context tokens the difference is read, and of each length the last
    --gen-tokens are decoded. So a line's prefill rate is that of the stretch since the line before, and its decode rate
    that of its length. tools/plot.py draws such files. */

typedef struct context_row {
    int64_t context, prompt, decoded;
    double prefill, decode; // seconds
    double gb;              // read a second
    double memory;          // bytes taken of the device so far, or resident
} context_row;

typedef struct context_bench {
    bench *b;
    context_row rows[32];
    int count;
    int64_t sequence; // that grows; 0: none yet
    int32_t *tokens;  // the prompt's, up to the longest context
} context_bench;

// Bring the sequence from `from` to `to` tokens. Returns an exit code.
static int context_extend(context_bench *x, int64_t from, int64_t to, int last) {
    sala *s = x->b->engine;
    context_row *r = &x->rows[x->count];
    sala_request ask;
    sala_error err;
    sala_event e;
    int step, reason = 0;
    char title[48];
    double began = cli_now();
    memset(&ask, 0, sizeof ask);
    ask.max_tokens = x->b->gen;
    ask.token_count = to - from - ask.max_tokens;
    ask.tokens = x->tokens + from;
    ask.sequence = x->sequence;
    ask.keep = !last;
    ask.ignore_eos = 1;
    if (sala_submit(s, &ask, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    snprintf(title, sizeof title, "up to %lld tokens", (long long)to);
    while ((step = sala_step(s, &err)) > 0) {
        while (sala_next_event(s, &e)) {
            if (e.type == SALA_EVENT_PREFILL)
                cli_progress_since(title, (double)e.done / (double)e.total, began);
            if (e.type != SALA_EVENT_FINISH) continue;
            x->sequence = e.sequence;
            reason = e.finish_reason;
            r->context = to;
            r->prompt = e.timings.prompt_tokens;
            r->decoded = e.timings.output_tokens - 1; // the first belongs to the prompt
            r->prefill = e.timings.prefill_seconds;
            r->decode = e.timings.decode_seconds;
            r->gb = 1e-9 * (double)e.timings.decode_bytes / (double)e.timings.output_tokens *
                    cli_rate((double)r->decoded, r->decode);
            r->memory = bench_peak(s);
            bench_add_drafts(&x->b->drafts, &e.timings);
        }
        if (cli_signal) return 128 + (int)cli_signal;
    }
    if (step < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    if (reason != SALA_FINISH_LENGTH)
        return cli_fail(CLI_FAILED, "at %lld tokens: %s", (long long)to,
                        reason == SALA_FINISH_NAN
                            ? "the logits are not numbers"
                            : "the K/V cache is too small: raise --kv-tokens");
    x->count++;
    return CLI_OK;
}

static void context_print(const context_row *r, int first) { // each line as soon as it is known
    if (first)
        printf("context,prompt_tokens,prefill_seconds,prefill_tokens_per_second,decode_tokens,"
               "decode_seconds,"
               "decode_tokens_per_second,decode_gb_per_second,memory_bytes\n");
    printf("%lld,%lld,%.6f,%.3f,%lld,%.6f,%.3f,%.3f,%.0f\n", (long long)r->context,
           (long long)r->prompt, r->prefill, cli_rate((double)r->prompt, r->prefill),
           (long long)r->decoded, r->decode, cli_rate((double)r->decoded, r->decode), r->gb,
           r->memory);
}

static void context_json(const context_bench *x) {
    sala_info info;
    sala_get_info(x->b->engine, &info);
    printf("{\"device\": ");
    cli_json_text(stdout, info.device, strlen(info.device));
    printf(", \"weights\": \"%s\", \"planned_bytes\": %lld, \"longest_context\": %lld, "
           "\"speculation\": ",
           info.weight_format, (long long)info.total_bytes, (long long)info.longest_context);
    cli_json_spec(&x->b->engine->options, &x->b->drafts);
    printf(", \"rows\": [");
    for (const context_row *r = x->rows; r < x->rows + x->count; r++)
        printf(
            "%s{\"context\": %lld, \"prompt_tokens\": %lld, \"prefill_tokens_per_second\": %.3f, "
            "\"decode_tokens_per_second\": %.3f, \"decode_gb_per_second\": %.3f, \"memory_bytes\": "
            "%.0f}",
            r == x->rows ? "" : ", ", (long long)r->context, (long long)r->prompt,
            cli_rate((double)r->prompt, r->prefill), cli_rate((double)r->decoded, r->decode), r->gb,
            r->memory);
    printf("]}\n");
}

// The longest context that is asked for and fits; says so where that is less than was asked for. 0: none.
static int64_t context_limit(cli_args *a, const char *model, int64_t wanted) {
    sala_options o = a->options;
    sala_info info;
    sala_error err;
    int64_t most = wanted;
    o.context = wanted;
    int code = sala_plan(model, &o, &info, &err);
    if (code == SALA_E_MEMORY) most = info.longest_context / 64 * 64;
    if (code < 0 && code != SALA_E_MEMORY) return cli_fail(0, "%s", err.text);
    if (!a->options.context && strncmp(info.device, "CPU", 3) == 0 && most > 32768)
        return 32768; // a minute, not an hour
    if (most < wanted)
        fprintf(stderr,
                "sala: the series ends at %lld tokens, which is the longest context that fits, not "
                "at %lld\n",
                (long long)most, (long long)wanted);
    return most;
}

// The whole command. Returns an exit code.
static int bench_context(bench *b, cli_args *a) {
    context_bench *x = (context_bench *)memset(cli_resize(NULL, sizeof *x), 0, sizeof *x);
    char room[4096];
    const char *model = cli_model_path(a->model, room);
    int64_t from = 0, to = 2048;
    x->b = b;
    a->options.max_sequences = 1;
    int64_t most =
        model ? context_limit(a, model, a->options.context ? a->options.context : 1 << 20) : 0;
    int code = most > 0 ? CLI_OK : CLI_FAILED;
    if (most > 0 && most <= b->gen + 1)
        code = cli_fail(CLI_FAILED, "%lld tokens are no context for --gen-tokens %lld",
                        (long long)most, (long long)b->gen);
    while (to <= b->gen) to *= 2; // the first line is of the first length that holds them
    a->options.context = a->options.kv_tokens = most;
    if (code == CLI_OK) b->engine = cli_open(a);
    if (code == CLI_OK && !b->engine) code = a->code;
    if (code == CLI_OK) {
        x->tokens = (int32_t *)cli_resize(NULL, (size_t)most * sizeof *x->tokens);
        for (int64_t i = 0; i < most; i++)
            x->tokens[i] = (int32_t)((sala_random(0, (uint64_t)i) >> 33) %
                                     (uint64_t)b->engine->config.dims.vocab);
    }
    for (; code == CLI_OK && from < most; from = to, to *= 2) {
        if (to > most) to = most;
        if (to - from <= b->gen) break; // nothing to read before the last stretch
        code = context_extend(x, from, to, to == most);
        cli_progress_clear();
        if (code == CLI_OK && !a->json) context_print(&x->rows[x->count - 1], x->count == 1);
        if (code == CLI_OK) code = cli_flush();
    }
    if (code == CLI_OK && a->json) context_json(x);
    free(x->tokens);
    free(x);
    return code ? code : cli_flush();
}
