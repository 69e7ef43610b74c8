/*  bench_gpu.c - what `sala bench` measures on a GPU beside tokens a second: the read bandwidth of the device, the
    time of each kernel of a step, and contexts whose K/V cache is filled with random numbers instead of a prompt.
    Included by bench.c. */
#include <sys/resource.h>

// Every page holds random numbers, as if prompts had been read.
static int bench_fill_cache(sala *s, sala_error *err) {
    const sala__plan *p = &s->plan;
    sala__gpu *g = &s->gpu;
    size_t page = 2 * p->page_kv + p->page_tier1 + p->page_tier2;
    int code = sala__cuda_enter(&g->cuda, err);
    if (code < 0) return code;
    for (int l = 0; l < s->sparse_layers; l++) {
        sala_fill_args a = {s->pages[l].k,     77 + (uint64_t)l, 1.5f, 0,
                            (int32_t)p->pages, (int32_t)page,    0};
        sala__launch_fill(g, &a);
    }
    code = g->error.code ? sala__fail(err, g->error.code, "%s", g->error.text)
                         : sala__cuda_wait(&g->cuda, err);
    sala__cuda_leave(&g->cuda);
    return code;
}

// All waiting requests are admitted and generate at once, behind prompts that nobody read.
static int bench_skip_prompt(sala *s, sala_error *err) {
    int code = sala__cuda_enter(&s->gpu.cuda, err);
    if (code < 0) return code;
    code = sala__admit_waiting(s, err);
    for (sala__request *r = s->requests; r && code == 0; r = r->next) {
        if (r->state != SALA__PREFILL || r->prefilled) continue;
        sala__sequence *q = &s->sequences[r->slot];
        code = sala__note_phase(s, q, 0, 0, err);
        r->prefilled = r->token_count;
        r->state = SALA__DECODE;
        q->stored = (int32_t)r->token_count - 1;
        q->root = r->tokens[q->stored]; // the last token of the prompt is the first verify's root
    }
    sala__cuda_leave(&s->gpu.cuda);
    return code;
}

// Chains of the tokens that are forced anyway, so that all of them are accepted: what a draft that is
// always right would cost.
static void bench_plant_chains(sala *s, sala__request **active, int count, int rows) {
    (void)s;
    for (int i = 0; i < count && rows >= count * SALA_MAX_PATH; i++) {
        const sala__request *r = active[i];
        sala_tree *t = &active[i]->spec.tree;
        for (int n = 1; n <= r->spec.deepest && r->chosen - 1 + n < r->force_count; n++) {
            t->token[n] = r->force[r->chosen - 1 + n];
            t->parent[n] = n - 1;
            t->depth[n] = n;
            t->count = n + 1;
        }
    }
}

// Bytes of device memory that are gone since the engine asked how much was free; 0: not known.
static int64_t bench_memory_taken(sala *s) {
    double free_mib = 0, total_mib = 0;
    if (sala__cuda_enter(&s->gpu.cuda, NULL) < 0) return 0;
    sala__cuda_free_memory(&s->gpu.cuda, &free_mib, &total_mib);
    sala__cuda_leave(&s->gpu.cuda);
    return s->gpu_free + SALA__DRIVER_NEEDS - (int64_t)(free_mib * 1048576);
}

// Bytes of memory: taken of the device so far, or resident at most.
static double bench_peak(sala *s) {
    struct rusage use;
    if (s->on_gpu) return (double)bench_memory_taken(s);
    return getrusage(RUSAGE_SELF, &use) == 0 ? 1024.0 * (double)use.ru_maxrss : 0;
}

// Seconds of one of `count` launches of a recorded pass, back to back.
static double bench_graph_seconds(sala *s, sala__cu_exec exec, int count) {
    sala__cuda *c = &s->gpu.cuda;
    sala__cu_event begin = NULL, end = NULL;
    float ms = 0;
    c->api.cuEventCreate(&begin, 0);
    c->api.cuEventCreate(&end, 0);
    c->api.cuGraphLaunch(exec, c->stream);
    c->api.cuEventRecord(begin, c->stream);
    for (int i = 0; i < count; i++) c->api.cuGraphLaunch(exec, c->stream);
    c->api.cuEventRecord(end, c->stream);
    c->api.cuEventSynchronize(end);
    c->api.cuEventElapsedTime(&ms, begin, end);
    c->api.cuEventDestroy_v2(begin);
    c->api.cuEventDestroy_v2(end);
    return ms * 1e-3 / count;
}

// Bytes a second of a long read of random numbers, the best of five. 0: no memory for it.
static double bench_gpu_read(sala *s) {
    sala__gpu *g = &s->gpu;
    sala__cu_memory buffer = 0;
    size_t bytes = (size_t)8 << 30;
    double best = 0;
    if (sala__cuda_enter(&g->cuda, NULL) < 0) return 0;
    while (bytes > (size_t)1 << 26 &&
           sala__cuda_alloc(&g->cuda, bytes, "reading", &buffer, NULL) < 0)
        bytes /= 2;
    if (buffer) {
        void *p = (void *)(uintptr_t)buffer;
        sala_fill_args fill = {(uint16_t *)p, 1, 1, 0, (int32_t)(bytes >> 13), 4096, 0};
        sala_read_args read = {p, (int64_t)bytes, (uint32_t *)(void *)s->arrivals};
        sala__cu_exec exec = NULL;
        sala__launch_fill(g, &fill);
        sala__cuda_wait(&g->cuda, &g->error);
        sala__cuda_capture_begin(&g->cuda, &g->error);
        sala__launch(g, SALA__KERNEL_read, (unsigned)g->multiprocessors * 16, 1, 1, 0, &read);
        sala__cuda_capture_end(&g->cuda, &exec, &g->error);
        for (int i = 0; i < 5 && exec; i++)
            best = fmax(best, (double)bytes / bench_graph_seconds(s, exec, 2));
        sala__cuda_graph_free(&g->cuda, exec);
        sala__cuda_release(&g->cuda, buffer, bytes);
    }
    sala__cuda_leave(&g->cuda);
    return best;
}

enum { BENCH_KINDS = 4 * SALA__KERNEL_COUNT }; // kernel and variant

static const char *bench_kind(int kind) {
    static char name[64];
    static const char *const variants[] = {"", " + swiglu", " + norm", ""};
    snprintf(name, sizeof name, "%s%s", sala__kernels[kind / 4].name + 5, variants[kind % 4]);
    return name;
}

// Where the kernels of each unit keep their trace, 0: the unit is not loaded. Returns 0: there is none.
typedef struct bench_traces {
    sala__cu_memory at[SALA__GPU_UNITS];
} bench_traces;

static int bench_traces_find(sala *s, bench_traces *t) {
    sala__cuda *c = &s->gpu.cuda;
    size_t bytes = 0;
    int found = 0, module = 0;
    sala__cu_result (*get_global)(sala__cu_memory *, size_t *, sala__cu_module, const char *);
    void *symbol = dlsym(c->driver, "cuModuleGetGlobal_v2");
    memcpy(&get_global, &symbol, sizeof symbol);
    memset(t, 0, sizeof *t);
    if (!symbol || sala__cuda_enter(c, NULL) < 0) return 0;
    for (int unit = 0; unit < SALA__GPU_UNITS; unit++) {
        if (!(s->gpu.units >> unit & 1)) continue;
        if (get_global(&t->at[unit], &bytes, c->modules[module++], "sala_trace")) t->at[unit] = 0;
        found |= t->at[unit] != 0;
    }
    sala__cuda_leave(c);
    return found;
}

static void bench_traces_clear(sala *s, const bench_traces *t) {
    for (int unit = 0; unit < SALA__GPU_UNITS; unit++)
        if (t->at[unit]) sala__cuda_fill(&s->gpu.cuda, t->at[unit], 0, 8, NULL);
}

// With SALA_TRACE set kernels were compiled to note when their first block could go on. Wait for the
// `launches` in `log` and add the microseconds from there to the same moment of the next kernel: what
// each cost in its place, overlap and gaps included. The last one is not seen.
static void bench_trace_add(sala *s, const bench_traces *t, const int *log, int launches,
                            double sum[BENCH_KINDS], int count[BENCH_KINDS]) {
    static uint64_t trace[SALA__GPU_UNITS][2 + 2 * 1024];
    int next[SALA__GPU_UNITS] = {0};
    uint64_t before = 0;
    for (int unit = 0; unit < SALA__GPU_UNITS; unit++)
        if (t->at[unit])
            sala__cuda_download(&s->gpu.cuda, trace[unit], t->at[unit], sizeof trace[unit], NULL);
    sala__cuda_wait(&s->gpu.cuda, NULL);
    for (int i = 0; i < launches && launches <= 1000; i++) {
        int unit = sala__kernels[log[i] / 4].unit;
        uint64_t went_on = trace[unit][3 + 2 * next[unit]++];
        if (i) sum[log[i - 1]] += (double)(went_on - before) * 1e-3, count[log[i - 1]]++;
        before = went_on;
    }
}

// The mean of several launches of a recorded step.
static void bench_trace(sala *s, sala__cu_exec exec, const int *log, int launches) {
    enum { ROUNDS = 16, WARM = 4 };
    sala__cuda *c = &s->gpu.cuda;
    bench_traces traces;
    double sum[BENCH_KINDS] = {0}, total = 0;
    int count[BENCH_KINDS] = {0};
    if (!bench_traces_find(s, &traces) || launches > 1000) return;
    for (int round = 0; round < WARM + ROUNDS; round++) {
        bench_traces_clear(s, &traces);
        sala__cuda_graph_launch(c, exec, NULL);
        bench_trace_add(s, &traces, log, round < WARM ? 0 : launches, sum, count);
    }
    printf("\n%-20s %9s %11s %11s\n", "kernel in its place", "launches", "us a step", "us each");
    for (int k = 0; k < BENCH_KINDS; k++) {
        if (!count[k]) continue;
        printf("%-20s %9d %11.1f %11.2f\n", bench_kind(k), count[k] / ROUNDS, sum[k] / ROUNDS,
               sum[k] / count[k]);
        total += sum[k] / ROUNDS;
    }
    printf("%-20s %9s %11.1f\n\n", "sum", "", total);
}

// Where the time of a prompt goes: every chunk's kernels in their places, summed up. Prints a table.
static int bench_prompt_kernels(sala *s, const int32_t *tokens, int64_t count, sala_error *err) {
    sala__gpu *g = &s->gpu;
    sala__cuda *c = &g->cuda;
    double sum[BENCH_KINDS] = {0}, total = 0;
    int number[BENCH_KINDS] = {0}, log[1024], code = 1;
    sala_request ask;
    sala_event e;
    bench_traces traces;
    if (!bench_traces_find(s, &traces)) {
        printf(
            "no table of kernels: it needs SALA_TRACE=1 in the environment, and a real driver\n");
        return 0;
    }
    memset(&ask, 0, sizeof ask);
    ask.tokens = tokens;
    ask.token_count = count;
    ask.max_tokens = 1;
    if (sala_submit(s, &ask, err) < 0) return -1;
    g->log = log;
    while (code > 0) {
        g->launches = 0;
        if ((code = sala__cuda_enter(c, err)) < 0) break;
        bench_traces_clear(s, &traces);
        sala__cuda_leave(c);
        code = sala_step(s, err);
        while (sala_next_event(s, &e)) continue;
        if (code <= 0 || (code = sala__cuda_enter(c, err)) < 0) break;
        bench_trace_add(s, &traces, log, g->launches, sum, number);
        sala__cuda_leave(c);
        code = 1;
    }
    g->log = NULL;
    for (int k = 0; k < BENCH_KINDS; k++) total += sum[k];
    printf("\na prompt of %lld tokens, kernels in their places\n%-26s %9s %11s %7s\n",
           (long long)count, "kernel", "launches", "ms", "share");
    for (int k = 0; k < BENCH_KINDS; k++)
        if (number[k])
            printf("%-26s %9d %11.2f %5.1f %%\n", bench_kind(k), number[k], 1e-3 * sum[k],
                   100 * sum[k] / total);
    printf("%-26s %9s %11.2f\n", "sum", "", 1e-3 * total);
    return code;
}

// Where the time of the last step went: each kernel alone (all its launches of a step, back to back),
// their sum, and the whole step as it runs, where kernels overlap.
static void bench_kernels(sala *s, const char *title) {
    sala__gpu *g = &s->gpu;
    double sum = 0;
    int launches = 0, log[1024];
    sala__pass p;
    memset(&p, 0, sizeof p);
    p.rows = sala__rows(s, s->step_rows->count, s->step_rows->seq_count, 1);
    p.on_device = (const sala_rows *)sala__step_at(s, s->step_rows);
    p.bucket = g->rows;
    p.logits_rows = p.rows.count;
    sala__place_results(s, &p);
    if (sala__cuda_enter(&g->cuda, NULL) < 0) return;
    printf("%s, %d rows of %d sequences\n%-20s %9s %11s %11s\n", title, p.rows.count,
           p.rows.seq_count, "kernel alone", "launches", "us a step", "us each");
    for (int k = 0; k <= BENCH_KINDS; k++) {
        sala__cu_exec exec = NULL;
        int all = k == BENCH_KINDS;
        g->only = all ? 0 : k + 1;
        g->launches = 0;
        g->log = log;
        if (sala__cuda_capture_begin(&g->cuda, &g->error) < 0) break;
        sala__gpu_launch_pass(s, &p);
        sala__cuda_capture_end(&g->cuda, &exec, &g->error);
        if (!exec) break;
        double us = g->launches ? 1e6 * bench_graph_seconds(s, exec, 20) : 0;
        if (all) printf("%-20s %9d %11.1f\n", "sum", launches, sum);
        if (all) printf("%-20s %9d %11.1f\n", "the step as a graph", g->launches, us);
        if (all && getenv("SALA_TRACE")) bench_trace(s, exec, log, g->launches);
        sala__cuda_graph_free(&g->cuda, exec);
        if (all || !g->launches) continue;
        printf("%-20s %9d %11.1f %11.2f\n", bench_kind(k), g->launches, us, us / g->launches);
        sum += us;
        launches += g->launches;
    }
    g->only = 0;
    g->log = NULL;
    sala__cuda_leave(&g->cuda);
}
