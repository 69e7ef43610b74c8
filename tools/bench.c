/*  bench.c - `sala bench`: how fast the engine is on this machine, beside what the machine can do.

    Included by main.c. Every repetition measures, one after the other and in the same process, the read bandwidth,
    one prompt with its answer, and (with --gemm and for the prefill yardstick) OpenBLAS on the model's own
    shapes; the best of all repetitions counts for each, because on a shared machine a pass can only be slowed
    down. Shapes come from the engine's bound weights, so this file reads the engine's inside. */
#include "bench_gpu.c"
#include "roofline.h"

enum {
    BENCH_PROMPT = CLI_OWN,
    BENCH_GEN,
    BENCH_REPEAT,
    BENCH_PARALLEL,
    BENCH_SAMPLED,
    BENCH_FILL,
    BENCH_CHAINS,
    BENCH_KERNELS,
    BENCH_GEMM,
    BENCH_TOKENIZE,
    BENCH_NO_ROOFLINE,
    BENCH_SPEC,
    BENCH_PROMPTS,
    BENCH_GOALS,
    BENCH_SOAR, // of --soar and --context, up to the last one
    BENCH_CONCURRENCY,
    BENCH_NUM_PROMPTS,
    BENCH_NATURAL,
    BENCH_BASELINE,
    BENCH_EVAL,
    BENCH_SPEC_TEST,
    BENCH_CONTEXT,
    BENCH_MAX_CONTEXT
};

static const cli_option bench_options[] = {
    {BENCH_PROMPT, "prompt-tokens", "N", "length of the random prompt (default 512)"},
    {BENCH_GEN, "gen-tokens", "N", "tokens to generate after it (default 64; with --spec all 160)"},
    {BENCH_PARALLEL, "parallel", "N", "sequences at once, each with such a prompt (default 1)"},
    {BENCH_REPEAT, "repeat", "N", "repetitions; the best counts, the median is shown (default 5)"},
    {BENCH_SAMPLED, "sampled", NULL, "choose with temperature 0.8 and top-p 0.95, not greedily"},
    {BENCH_FILL, "fill", NULL,
     "GPU: do not read the prompt; fill its K/V cache with random numbers (long contexts)"},
    {BENCH_CHAINS, "chains", NULL,
     "GPU, with --fill: time verify passes of one chain of 16 nodes (--gen-tokens of them)"},
    {BENCH_KERNELS, "kernels", NULL,
     "GPU: also a table of where the time of a step (--fill) or of the prompt (with SALA_TRACE=1 "
     "in "
     "the environment) goes"},
    {BENCH_GEMM, "gemm", NULL,
     "the model's matrix products alone, by number of rows, in every form its weights allow"},
    {BENCH_TOKENIZE, "tokenize", "FILE", "only encode a text file, on one core"},
    {BENCH_NO_ROOFLINE, "no-roofline", NULL, "do not measure read bandwidth and OpenBLAS"},
    {BENCH_SPEC, "spec", "KIND",
     "drafts: off (default), auto, ngram, eagle (with --draft); all: compare them on prompts of "
     "six "
     "classes, or "
     "(synthetic) with drafts that are right as often as is asked for"},
    {BENCH_PROMPTS, "prompts", "FILE",
     "of --spec all: lines {\"class\": .., \"prompt\": ..} (default "
     "tests/data/spec_prompts.jsonl)"},
    {BENCH_GOALS, "goals", NULL, "of --spec all: for developers, fail where a goal is missed"},
    {BENCH_SOAR, "soar", "FILE",
     "the speed test of the SOAR contest: lines {\"question\": .., \"model_response\": ..}; "
     "(synthetic) {\"prompt_tokens\": .., \"completion_tokens\": ..}"},
    {BENCH_CONCURRENCY, "concurrency", "LIST",
     "of --soar: requests at once; 0 or max: all (default 1,8,max)"},
    {BENCH_NUM_PROMPTS, "num-prompts", "N", "of --soar: only the first N, once shuffled"},
    {BENCH_NATURAL, "natural-tokens", "N",
     "of --soar: the longest natural answer (default: as long as the forced one)"},
    {BENCH_BASELINE, "baseline", "FILE", "of --soar: an earlier --json, for the score"},
    {BENCH_EVAL, "eval", "FILE", "of --soar: a --json of sala eval, for the score"},
    {BENCH_SPEC_TEST, "spec-test", "KIND",
     "of --soar with --spec all: drafts by order, oracle:P (right with P %), oracle, random or "
     "adversarial"},
    {BENCH_CONTEXT, "context", NULL,
     "tokens a second by context, 2K, 4K ... up to --max-context, in one sequence that grows; "
     "prints CSV"},
    {BENCH_MAX_CONTEXT, "max-context", "N",
     "where --context ends (default 1M, or what fits; CPU: 32K); else the longest sequence"},
    {CLI_JSON, "json", NULL, "print one JSON object"},
    {0, NULL, NULL, NULL},
};

static const cli_command bench_command = {
    "bench",
    "bench [-m DIR | --synthetic -m CONFIG.json] [options]\n\n"
    "Prefills a random prompt and decodes after it, several times. Decode is compared with the "
    "machine's read\n"
    "bandwidth, prefill with the rate at which OpenBLAS (if libopenblas.so.0 is installed) "
    "multiplies FP32\n"
    "matrices of the same shapes on as many threads; both are measured between the repetitions.\n",
    bench_options,
    CLI_ENGINE,
    "  sala bench\n"
    "  sala bench --synthetic -m bench/configs/synthetic-1b.json --prompt-tokens 1024\n"
    "  sala bench --synthetic -m bench/configs/synthetic-1b.json --gemm\n"
    "  sala bench --spec all\n",
};

#define BENCH_REPEATS 100
#define BENCH_SHAPES 32

typedef struct bench_shape { // one distinct matrix product of a forward pass
    int n, k, count;
    const sala_weight *weight;
    double blas; // best OpenBLAS seconds of one product
} bench_shape;

typedef struct bench {
    int64_t prompt, gen, parallel, repeat;
    int gemm, roofline, sampled, fill, chains, kernels;
    int32_t *force;   // --chains: the output
    const char *text; // file to encode
    int spec, goals;  // --spec all, --goals
    const char *prompts;
    const char *soar, *concurrency, *baseline, *eval, *spec_test; // --soar and what belongs to it
    int64_t num_prompts, natural_tokens;
    int context, of_soar, sized; // --context; an option of --soar, --prompt-tokens was there
    sala_timings drafts;         // of all requests
    sala *engine;
    bench_shape shapes[BENCH_SHAPES];
    int shape_count, blas_rows;
    roofline_blas blas;
    unsigned char *buffer; // read to measure the bandwidth
    size_t buffer_bytes;
    double read[BENCH_REPEATS], prefill[BENCH_REPEATS], decode[BENCH_REPEATS],
        bytes[BENCH_REPEATS]; // rates a second
    int done;
} bench;

static void bench_add_shape(bench *b, const sala_weight *w) {
    if (!w->n) return; // there is none
    for (int i = 0; i < b->shape_count; i++)
        if (b->shapes[i].n == w->n && b->shapes[i].k == w->k) {
            b->shapes[i].count++;
            return;
        }
    if (b->shape_count == BENCH_SHAPES) return;
    bench_shape s = {w->n, w->k, 1, w, 0};
    b->shapes[b->shape_count++] = s;
}

static void
bench_find_shapes(bench *b) { // the linear layers: all that a prompt's tokens go through
    for (int l = 0; l < b->engine->config.dims.layers; l++) {
        const sala__layer *w = &b->engine->weights.layers[l];
        const sala_weight *all[] = {&w->q, &w->k,        &w->v,      &w->gate,
                                    &w->o, &w->mlp_gate, &w->mlp_up, &w->mlp_down};
        for (int i = 0; i < 8; i++) bench_add_shape(b, all[i]);
    }
}

static double bench_flops(const bench *b) { // of one token in the linear layers
    double sum = 0;
    for (int i = 0; i < b->shape_count; i++)
        sum += 2.0 * b->shapes[i].n * (double)b->shapes[i].k * b->shapes[i].count;
    return sum;
}

static void bench_add_drafts(sala_timings *sum, const sala_timings *t) {
    for (int k = 0; k < 3; k++) {
        sum->verifies[k] += t->verifies[k];
        sum->verify_tokens[k] += t->verify_tokens[k];
        for (int d = 0; d < SALA_DEPTHS; d++) {
            sum->offered[k][d] += t->offered[k][d];
            sum->accepted[k][d] += t->accepted[k][d];
        }
    }
    sum->reused_tokens += t->reused_tokens;
    sum->draft_seconds += t->draft_seconds;
    sum->verify_seconds += t->verify_seconds;
}

static double bench_best(const double *x, int n) {
    double best = 0;
    for (int i = 0; i < n; i++) best = fmax(best, x[i]);
    return best;
}

static int bench_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double bench_median(const double *x, int n) {
    double sorted[BENCH_REPEATS];
    memcpy(sorted, x, (size_t)n * sizeof *x);
    qsort(sorted, (size_t)n, sizeof *sorted, bench_order);
    return n ? (sorted[(n - 1) / 2] + sorted[n / 2]) / 2 : 0;
}

// All sequences once; the rates of the whole batch. Returns an exit code.
static int bench_once(bench *b, const int32_t *tokens) {
    sala_error err;
    sala_event e;
    double prompt_end = 0, begin = cli_now(), end, bytes = 0, decode_tokens = 0;
    int step;
    for (int64_t i = 0; i < b->parallel; i++) {
        sala_request ask;
        memset(&ask, 0, sizeof ask);
        ask.tokens = tokens;
        ask.token_count = b->prompt;
        ask.max_tokens = b->gen * (b->chains ? SALA_MAX_PATH : 1) + 1; // the first: from prefill
        ask.ignore_eos = 1;
        ask.force = b->force;
        ask.force_count = b->force ? ask.max_tokens : 0;
        if (b->sampled) {
            ask.temperature = 0.8f;
            ask.top_p = 0.95f;
            ask.seed = (uint64_t)i;
        }
        if (sala_submit(b->engine, &ask, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    }
    if (b->fill) {
        if (bench_skip_prompt(b->engine, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
        prompt_end = begin = cli_now();
        if (b->chains) b->engine->plant = bench_plant_chains;
    }
    while ((step = sala_step(b->engine, &err)) > 0) {
        int decoding = 1;
        double now = cli_now();
        while (sala_next_event(b->engine, &e)) {
            if (e.type == SALA_EVENT_PREFILL) decoding = 0;
            if (e.type == SALA_EVENT_FINISH) bytes = fmax(bytes, (double)e.timings.decode_bytes);
            if (e.type == SALA_EVENT_FINISH) bench_add_drafts(&b->drafts, &e.timings);
            if (e.type == SALA_EVENT_TOKEN && decoding && prompt_end > 0) decode_tokens++;
            if (e.type == SALA_EVENT_FINISH && b->parallel == 1 && !b->fill) {
                b->prefill[b->done] = (double)b->prompt / e.timings.prefill_seconds;
                b->decode[b->done] = (double)b->gen / e.timings.decode_seconds;
                b->bytes[b->done] = bytes / e.timings.decode_seconds;
            }
        }
        if (!decoding) prompt_end = now;
        if (cli_signal) return 128 + (int)cli_signal;
    }
    if (step < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    end = cli_now();
    if (b->parallel > 1 || b->fill) { // steps that only decode, after the last prompt
        b->prefill[b->done] =
            b->fill ? 0 : (double)(b->prompt * b->parallel) / (prompt_end - begin);
        b->decode[b->done] = decode_tokens / (end - prompt_end);
        b->bytes[b->done] = bytes / (double)(b->gen + b->fill) *
                            (decode_tokens / (double)b->parallel) / (end - prompt_end);
    }
    return CLI_OK;
}

static void bench_yardsticks(bench *b) { // one pass of each
    int threads = b->engine->options.threads;
    if (!b->roofline) return;
    if (b->engine->on_gpu) {
        b->read[b->done] = bench_gpu_read(b->engine);
        return;
    }
    b->read[b->done] = roofline_read(b->buffer, b->buffer_bytes, threads, 1);
    for (int i = 0; b->blas.library && i < b->shape_count; i++) {
        bench_shape *s = &b->shapes[i];
        double rate = roofline_sgemm(&b->blas, b->blas_rows, s->n, s->k, threads, 2);
        double seconds = rate > 0 ? 2.0 * b->blas_rows * s->n * (double)s->k / rate : 0;
        if (seconds > 0 && (s->blas == 0 || seconds < s->blas)) s->blas = seconds;
    }
}

static void
bench_settle(const bench *b) { // idle OpenBLAS threads spin for a while: not on our time
    struct timespec t = {0, 200000000};
    if (b->blas.library) nanosleep(&t, NULL);
}

static double bench_blas_rate(const bench *b) { // FP32 operations a second over all linear layers
    double seconds = 0;
    for (int i = 0; i < b->shape_count; i++) seconds += b->shapes[i].blas * b->shapes[i].count;
    return seconds > 0 ? bench_flops(b) * b->blas_rows / seconds : 0;
}

static void bench_print(const bench *b, int json) {
    double read = bench_best(b->read, b->done), blas = bench_blas_rate(b), flops = bench_flops(b);
    double prefill = bench_best(b->prefill, b->done), decode = bench_best(b->decode, b->done);
    double bytes = bench_best(b->bytes, b->done);
    double taken = b->engine->on_gpu ? (double)bench_memory_taken(b->engine) : 0;
    sala_info i;
    sala_get_info(b->engine, &i);
    if (json) {
        printf("{\"device\": \"%s\", \"parameters\": %lld, \"prompt_tokens\": %lld, "
               "\"gen_tokens\": %lld, \"parallel\": %lld, ",
               i.device, (long long)i.parameters, (long long)b->prompt, (long long)b->gen,
               (long long)b->parallel);
        printf("\"repeat\": %d, \"prefill_tokens_per_second\": %.3f, \"prefill_median\": %.3f, "
               "\"prefill_gflops\": %.3f, ",
               b->done, prefill, bench_median(b->prefill, b->done), prefill * flops * 1e-9);
        printf("\"decode_tokens_per_second\": %.3f, \"decode_median\": %.3f, "
               "\"decode_gb_per_second\": %.3f, ",
               decode, bench_median(b->decode, b->done), bytes * 1e-9);
        printf("\"planned_bytes\": %lld, \"taken_bytes\": %.0f, ", (long long)i.total_bytes, taken);
        printf("\"reused_tokens\": %lld, \"speculation\": ", (long long)b->drafts.reused_tokens);
        cli_json_spec(&b->engine->options, &b->drafts);
        printf(", \"read_gb_per_second\": %.3f, \"openblas_gflops\": %.3f, \"openblas_core\": "
               "\"%s\"}\n",
               read * 1e-9, blas * 1e-9, b->blas.library ? b->blas.core : "");
        return;
    }
    if (taken > 0)
        printf("memory   %.2f GiB planned, %.2f GiB taken (%+.1f %%)\n",
               (double)i.total_bytes / (1 << 30), taken / (1 << 30),
               100 * (taken / (double)i.total_bytes - 1));
    if (b->chains) {
        printf("chains   of %d tokens behind %lld: %.1f t/s, %.3f ms a pass\n", SALA_MAX_PATH,
               (long long)b->prompt, decode, 1e3 * SALA_MAX_PATH * (double)b->parallel / decode);
        return;
    }
    if (b->fill)
        printf("prefill  none: a cache of random numbers stands for %lld x %lld tokens",
               (long long)b->parallel, (long long)b->prompt);
    else
        printf(
            "prefill  %lld x %lld tokens: %.1f t/s (median %.1f), %.3f s in all, %.1f GFLOP/s in "
            "the linear layers",
            (long long)b->parallel, (long long)b->prompt, prefill,
            bench_median(b->prefill, b->done), (double)(b->parallel * b->prompt) / prefill,
            prefill * flops * 1e-9);
    if (blas > 0)
        printf(" = %.0f %% of OpenBLAS sgemm (%s kernels, %.1f GFLOP/s at %d rows)",
               100 * prefill * flops / blas, b->blas.core, blas * 1e-9, b->blas_rows);
    printf("\ndecode   %lld x %lld tokens: %.2f t/s (median %.2f), %.2f GB/s",
           (long long)b->parallel, (long long)b->gen, decode, bench_median(b->decode, b->done),
           bytes * 1e-9);
    if (read > 0)
        printf(" = %.0f %% of the read bandwidth (%.2f GB/s)", 100 * bytes / read, read * 1e-9);
    printf("\n");
    if (b->drafts.reused_tokens)
        printf("reuse    %lld of %lld prompt tokens were there already; prefill counts them too\n",
               (long long)b->drafts.reused_tokens, (long long)(b->prompt * b->parallel * b->done));
    if (strncmp(i.spec, "off", 3) == 0) return;
    printf("drafts   %s: ", b->engine->options.spec);
    if (cli_tau(&b->drafts) > 1)
        cli_print_spec(stdout, "", &b->drafts);
    else
        printf("1.00 tokens a step (this random prompt gives them nothing)");
    printf("\n");
}

#include "bench_gemm.c"
#include "bench_spec.c"
#include "bench_soar.c"
#include "bench_context.c"

static int bench_tokenize(bench *b) { // megabytes a second of sala_tokenize
    cli_buffer text = {0};
    sala_error err;
    int64_t n = 0;
    double best = 1e30;
    int code = cli_read_file(b->text, &text);
    for (int64_t i = 0; i < b->repeat && code == CLI_OK; i++) {
        int32_t *tokens;
        double start = cli_now();
        n = sala_tokenize(b->engine, text.data, text.size, 0, &tokens, &err);
        best = fmin(best, cli_now() - start);
        if (n < 0)
            code = cli_fail(CLI_FAILED, "%s", err.text);
        else
            sala_free(b->engine, tokens);
    }
    if (code == CLI_OK)
        printf("tokenize %.2f MB to %lld tokens: %.1f MB/s\n", (double)text.size * 1e-6,
               (long long)n, (double)text.size * 1e-6 / best);
    cli_free(&text);
    return code ? code : cli_flush();
}

// ---- the command ----

static int bench_run(bench *b, cli_args *a) {
    int code = CLI_OK;
    sala_error err;
    int32_t *tokens = (int32_t *)cli_resize(NULL, (size_t)b->prompt * sizeof *tokens);
    uint32_t vocab = (uint32_t)b->engine->config.dims.vocab;
    for (int64_t i = 0; i < b->prompt; i++)
        tokens[i] = (int32_t)((uint32_t)(i + 1) * 2654435761u / 65536 % vocab);
    int64_t forced = b->chains ? b->gen * SALA_MAX_PATH + 1 : 0;
    if (forced) b->force = (int32_t *)cli_resize(NULL, (size_t)forced * sizeof *tokens);
    for (int64_t i = 0; i < forced; i++) b->force[i] = tokens[i % b->prompt];
    bench_find_shapes(b);
    b->blas_rows =
        (int)(b->prompt < b->engine->options.chunk ? b->prompt : b->engine->options.chunk);
    if (b->fill && bench_fill_cache(b->engine, &err) < 0)
        code = cli_fail(CLI_FAILED, "%s", err.text);
    if (b->roofline && !b->engine->on_gpu) {
        b->buffer_bytes = (size_t)1 << 29;
        b->buffer = (unsigned char *)cli_resize(NULL, b->buffer_bytes);
        memset(b->buffer, 1, b->buffer_bytes);
        if (!roofline_blas_open(&b->blas))
            fprintf(stderr, "sala: no libopenblas.so.0: prefill has no yardstick\n");
        if (b->blas.library && getenv("OPENBLAS_CORETYPE"))
            fprintf(
                stderr,
                "sala: warning: OPENBLAS_CORETYPE is set: OpenBLAS may not use its best kernels\n");
    }
    if (b->gemm) {
        code = bench_gemm(b, a->json);
    } else {
        double start = cli_now();
        for (; b->done < b->repeat && code == CLI_OK; b->done++) {
            bench_yardsticks(b);
            bench_settle(b);
            if ((code = bench_once(b, tokens)) != CLI_OK) break;
            cli_progress_since("measuring", (double)(b->done + 1) / (double)b->repeat, start);
        }
        cli_progress_clear();
        if (code == CLI_OK) bench_print(b, a->json);
        if (code == CLI_OK && b->kernels && !b->fill &&
            bench_prompt_kernels(b->engine, tokens, b->prompt, &err) < 0)
            code = cli_fail(CLI_FAILED, "%s", err.text);
        if (code == CLI_OK && b->kernels && b->fill)
            bench_kernels(b->engine, "\nwhere a step's time goes");
        if (code == CLI_OK) code = cli_flush();
    }
    roofline_blas_close(&b->blas);
    free(b->buffer);
    free(b->force);
    free(tokens);
    return code;
}

// One option of --soar or --context. Returns an exit code.
static int bench_scenario_option(bench *b, cli_args *a, int id) {
    sala_error err;
    b->of_soar |= id > BENCH_SOAR && id < BENCH_CONTEXT;
    switch (id) {
    case BENCH_SOAR: b->soar = a->value; break;
    case BENCH_CONCURRENCY: b->concurrency = a->value; break;
    case BENCH_BASELINE: b->baseline = a->value; break;
    case BENCH_EVAL: b->eval = a->value; break;
    case BENCH_CONTEXT: b->context = 1; break;
    case BENCH_NUM_PROMPTS:
        return cli_integer("num-prompts", a->value, 1, INT32_MAX, &b->num_prompts);
    case BENCH_NATURAL:
        return cli_integer("natural-tokens", a->value, 1, 1 << 30, &b->natural_tokens);
    case BENCH_SPEC_TEST:
        b->spec_test = a->value;
        if (sala_set_option(&a->options, "spec-test", a->value, &err) == 0) break;
        return cli_fail(CLI_USAGE, "--%s", err.text);
    default: // BENCH_MAX_CONTEXT
        if (sala_set_option(&a->options, "context", a->value, &err) == 0) break;
        return cli_fail(CLI_USAGE, "--max-%s", err.text);
    }
    return CLI_OK;
}

// What does not go together with --soar and --context. Returns an exit code.
static int bench_scenario_check(const bench *b) {
    int scenario = b->soar || b->context, others = b->gemm || b->text || b->sampled || b->fill ||
                                                   b->chains || b->kernels || b->parallel > 1 ||
                                                   b->repeat || b->goals || b->prompts;
    if (!b->soar && b->of_soar)
        return cli_fail(CLI_USAGE,
                        "--concurrency, --num-prompts, --natural-tokens, --baseline, --eval and "
                        "--spec-test go with --soar");
    if (b->soar && b->context) return cli_fail(CLI_USAGE, "give --soar or --context, not both");
    if (scenario && others)
        return cli_fail(CLI_USAGE, "--soar and --context go with none of the other measurements");
    if (b->soar && (b->sized || b->gen))
        return cli_fail(CLI_USAGE, "--prompt-tokens and --gen-tokens do not go with --soar, whose "
                                   "lines say how long they are");
    if (b->context && b->sized)
        return cli_fail(CLI_USAGE, "--prompt-tokens does not go with --context, which grows up to "
                                   "--max-context");
    if (b->context && b->spec) return cli_fail(CLI_USAGE, "--spec all does not go with --context");
    if (b->spec_test && !b->spec)
        return cli_fail(
            CLI_USAGE,
            "--spec-test goes with --spec all: the plain run tells which drafts are right");
    return CLI_OK;
}

// All but --soar and --context, with room for sequences of `need` tokens. Returns an exit code.
static int bench_measure(bench *b, cli_args *a, int64_t need) {
    sala_options *o = &a->options;
    if (!o->context) o->context = need;
    if (!o->max_sequences) o->max_sequences = (int)b->parallel;
    if (!o->kv_tokens) o->kv_tokens = (need + 64) * b->parallel;
    if (o->kv_tokens < o->context) o->kv_tokens = o->context;
    b->engine = cli_open(a);
    if (!b->engine) return a->code;
    if (!b->engine->on_gpu && (b->fill || b->kernels))
        return cli_fail(CLI_USAGE, "--fill and --kernels need a GPU: this is the CPU");
    if (b->spec) return bench_spec(b, a->json);
    return b->text ? bench_tokenize(b) : bench_run(b, a);
}

static int sala_bench(int argc, char **argv) {
    cli_args a;
    bench *b = (bench *)cli_resize(NULL, sizeof *b);
    sala_error err;
    int id;
    memset(b, 0, sizeof *b);
    b->prompt = 512;
    b->parallel = 1;
    b->roofline = 1;
    cli_start(&a, &bench_command, argc, argv);
    while ((id = cli_next(&a)) > 0) {
        int code = CLI_OK;
        if (id == BENCH_PROMPT)
            code = cli_integer("prompt-tokens", a.value, 1, 1 << 24, &b->prompt), b->sized = 1;
        if (id == BENCH_GEN) code = cli_integer("gen-tokens", a.value, 1, 1 << 20, &b->gen);
        if (id == BENCH_PARALLEL) code = cli_integer("parallel", a.value, 1, 256, &b->parallel);
        if (id == BENCH_REPEAT) code = cli_integer("repeat", a.value, 1, BENCH_REPEATS, &b->repeat);
        if (id == BENCH_GEMM) b->gemm = 1;
        if (id == BENCH_SAMPLED) b->sampled = 1;
        if (id == BENCH_FILL) b->fill = 1;
        if (id == BENCH_CHAINS) b->chains = 1;
        if (id == BENCH_KERNELS) b->kernels = 1;
        if (id == BENCH_TOKENIZE) b->text = a.value;
        if (id == BENCH_NO_ROOFLINE) b->roofline = 0;
        if (id == BENCH_PROMPTS) b->prompts = a.value;
        if (id == BENCH_GOALS) b->goals = 1;
        if (id >= BENCH_SOAR) code = bench_scenario_option(b, &a, id);
        if (id == BENCH_SPEC) b->spec = strcmp(a.value, "all") == 0;
        if (id == BENCH_SPEC && !b->spec && sala_set_option(&a.options, "spec", a.value, &err) < 0)
            code = cli_fail(CLI_USAGE, "--%s all", err.text); // its list of kinds comes last
        if (code == CLI_OK) continue;
        a.code = code;
        id = -1;
        break;
    }
    if (id == 0 && (a.code = bench_scenario_check(b)) != CLI_OK) id = -1;
    if (id == 0 && b->chains && !b->fill)
        a.code = cli_fail(id = CLI_USAGE, "--chains goes with --fill (on a GPU)");
    if (id == 0 && !b->spec && (b->prompts || b->goals))
        a.code = cli_fail(id = CLI_USAGE, "--prompts and --goals go with --spec all");
    if (!b->concurrency) b->concurrency = "1,8,max";
    if (!b->prompts) b->prompts = "tests/data/spec_prompts.jsonl";
    if (!b->gen) b->gen = b->spec ? 160 : 64;
    if (!b->repeat) b->repeat = b->spec ? 2 : 5;
    if (id == 0 && b->spec && (b->gemm || b->text || b->sampled))
        a.code = cli_fail(id = CLI_USAGE,
                          "--spec all goes neither with --gemm, --tokenize nor --sampled");
    if (b->spec || !a.options.spec) a.options.spec = b->spec || b->chains ? "auto" : "off";
    if (!a.options.reuse) a.options.reuse = "off"; // prompts are repeated, and all to be read
    if (id == 0) {
        int64_t need = b->prompt + b->gen * (b->chains ? SALA_MAX_PATH : 1) + 1;
        if (b->spec && !a.options.synthetic) need = 8192; // the prompts of a file
        if (b->soar)
            a.code = bench_soar(b, &a);
        else
            a.code = b->context ? bench_context(b, &a) : bench_measure(b, &a, need);
    }
    sala_close(b->engine);
    free(b);
    cli_end(&a);
    return a.code;
}
