#define SALA_IMPLEMENTATION
#include "../sala.h"
// make soak-test [REQUESTS=2000]: a crowd in too little memory. Random prompts that share beginnings, random lengths,
// samplers, stops and seeds, chats of up to three turns, cancels at any time, sessions that are saved in the middle
// of an answer and loaded again, speculation that changes its level with the load. Each answer must be the one that
// the same request gets alone, without speculation and without reuse; at the end nothing may be left.
#include "check.h"
#include "model.h"

enum { TURNS = 3, OPEN = 40, STEM = 330, PROMPT = 420 };

typedef struct job {
    sala_request ask[TURNS]; // in order; those behind the first one continue its sequence
    int32_t tokens[TURNS][PROMPT], stop[TURNS];
    int turns, turn;              // how many; which one is at work
    int index[TURNS];             // of its outcome
    int cancel_at, save_at;       // of the turn at work: after so many tokens; -1: never
    int cancelled, saved, loaded; // its request was told to end; the file is there; and was read
    int64_t sequence;             // kept by the turn before, or 0
    outcome then;                 // what it had given when it was saved
    char file[96];
} job;

static char folder[64];
static int64_t counts[8]; // of what happened

enum { REQUESTS, TOKENS, CANCELS, LOADS, REUSED, TREES, CHAINS, MOST };

// ---- one job ----

static void job_make(job *j, const int32_t *stems) {
    memset(j, 0, sizeof *j);
    j->turns = below(4) ? 1 : 1 + below(TURNS);
    for (int t = 0; t < j->turns; t++) {
        int own = below(3) ? 1 + below(30) : 1 + below(90), shared = 0;
        if (t == 0 && below(3)) shared = 1 + below(STEM);
        memcpy(j->tokens[t], stems + below(3) * STEM, (size_t)shared * 4);
        random_tokens(j->tokens[t] + shared, own, 300);
        sala_request r = request_of(j->tokens[t], shared + own, 1 + below(below(4) ? 20 : 60));
        r.keep = t + 1 < j->turns;
        if (below(2)) request_sampled(&r, check_random());
        if (!below(4)) r.repetition_penalty = 1.2f, r.presence_penalty = 0.3f;
        if (!below(4)) r.logprobs = 1 + below(3);
        if (!below(3)) r.ignore_eos = 0;
        j->stop[t] = below(300);
        if (!below(3)) r.stop_tokens = &j->stop[t], r.stop_token_count = 1;
        j->ask[t] = r;
    }
    j->cancel_at = below(5) ? -1 : below(30);
    j->save_at = below(4) ? -1 : 1 + below(12);
}

static void job_submit(session *t, job *j) {
    j->ask[j->turn].sequence = j->sequence;
    j->index[j->turn] = session_ask(t, &j->ask[j->turn]);
    counts[REQUESTS]++;
}

// What is at work goes to a file, and its request is told to end.
static void job_save(session *t, job *j) {
    sala_error err;
    const outcome *o = &t->out[j->index[j->turn]];
    snprintf(j->file, sizeof j->file, "%s/%lld", folder, (long long)o->id);
    if (sala_save(t->engine, o->id, j->file, &err) < 0) die("sala_save", err.text);
    j->then = outcome_copy(o);
    j->saved = 1;
}

// The file becomes a request again, as soon as there is room. Its outcome goes on from what it had given.
static void job_load(session *t, job *j) {
    sala_error err;
    sala_session found = {0, 0, 0, 0};
    if (sala_load(t->engine, j->file, &found, &err) < 0) {
        if (err.code != SALA_E_MEMORY) die("sala_load", err.text);
        return;
    }
    const outcome *o = session_adopt(t, found.request, &j->then);
    j->index[j->turn] = (int)(o - t->out);
    outcome_copy_free(&j->then);
    CHECK(found.request == found.sequence && !o->finished, "a file of request %lld",
          (long long)j->then.id);
    unlink(j->file);
    j->loaded = 1;
    counts[LOADS]++;
}

// After a step: cancel, save, load, the next turn. Returns 1 when the job is over.
static int job_advance(session *t, job *j) {
    outcome *o = &t->out[j->index[j->turn]];
    if (!o->finished && !j->cancelled) {
        int save = j->save_at > 0 && o->count >= j->save_at && !j->saved;
        if (save) job_save(t, j);
        if (save || (j->cancel_at >= 0 && o->count >= j->cancel_at)) {
            session_cancel(t, j->index[j->turn]);
            j->cancelled = 1;
        }
    }
    if (!o->finished) return 0;
    if (j->saved && !j->loaded) { // that was the original, which is not needed any more
        if (o->sequence) session_give_up(t, o->sequence);
        o->sequence = 0;
        job_load(t, j);
        if (j->loaded) j->cancelled = 0;
        return 0;
    }
    counts[CANCELS] += o->reason == SALA_FINISH_CANCELLED;
    counts[TOKENS] += o->count;
    counts[REUSED] += o->timings.reused_tokens;
    counts[TREES] += o->timings.verifies[SALA_DRAFT_EAGLE];
    counts[CHAINS] += o->timings.verifies[SALA_DRAFT_NGRAM];
    j->sequence = o->sequence;
    int goes_on = o->reason == SALA_FINISH_STOP || o->reason == SALA_FINISH_LENGTH;
    if (goes_on && j->turn + 1 < j->turns) {
        j->turn++;
        j->cancelled = j->saved = j->loaded = 0;
        job_submit(t, j);
        return 0;
    }
    if (j->sequence) session_give_up(t, j->sequence);
    return 1;
}

// The same turns, each alone in an engine that neither drafts nor reuses.
static void job_judge(const session *t, job *j, session *plain) {
    int64_t sequence = 0;
    for (int k = 0; k <= j->turn; k++) {
        const outcome *a = &t->out[j->index[k]];
        sala_request r = j->ask[k];
        r.sequence = sequence;
        const outcome *b = session_do(plain, &r);
        int whole = a->reason == b->reason && a->count == b->count;
        int part = k == j->turn && a->count <= b->count &&
                   (a->reason == SALA_FINISH_CANCELLED || a->reason == SALA_FINISH_MEMORY);
        CHECK(whole || part, "turn %d: reason %d after %lld tokens, alone %d after %lld", k,
              a->reason, (long long)a->count, b->reason, (long long)b->count);
        size_t size = (size_t)(a->count < b->count ? a->count : b->count) * 4;
        CHECK(!size ||
                  (!memcmp(a->tokens, b->tokens, size) && !memcmp(a->logprobs, b->logprobs, size)),
              "turn %d: other tokens than alone", k);
        sequence = b->sequence;
    }
    if (sequence) session_give_up(plain, sequence);
    session_idle(plain);
    session_forget(plain);
}

// ---- all of them ----

static int requests = 2000;

static void soak(void) {
    static int32_t stems[3 * STEM];
    static char head[96];
    job *open[OPEN] = {NULL};
    sala_options o = small_options(128, 0), alone;
    o.synthetic = 1;
    o.max_sequences = 20; // trees of two sizes, and none from 17 sequences on
    o.context = 900;
    o.kv_tokens = 4800;
    o.draft_window = 128;
    alone = o;
    alone.spec = alone.reuse = "off";
    alone.draft = NULL;
    alone.kv_tokens = 0;
    alone.max_sequences = 1;
    snprintf(folder, sizeof folder, "/tmp/sala-soak-XXXXXX");
    if (!mkdtemp(folder)) die(folder, "mkdtemp");
    snprintf(head, sizeof head, "%s/head.json", folder);
    put_head(head, 2, 300);
    o.draft = head;
    session t = session_open(SALA_TINY "/config.json", &o);
    session plain = session_open(SALA_TINY "/config.json", &alone);
    random_tokens(stems, 3 * STEM, 300);
    int live = 0, wave = 0;
    while (live || counts[REQUESTS] < requests) {
        if (!below(40)) wave = below(OPEN); // the load comes and goes
        for (int i = 0; i < OPEN; i++)
            if (!open[i] && live < wave + 1 && counts[REQUESTS] < requests && below(2)) {
                job_make(open[i] = (job *)need(malloc(sizeof(job))), stems);
                job_submit(&t, open[i]);
                live++;
            }
        session_step(&t);
        sala_get_info(t.engine, &t.info);
        if (t.info.requests_active > counts[MOST]) counts[MOST] = t.info.requests_active;
        for (int i = 0; i < OPEN; i++)
            if (open[i] && job_advance(&t, open[i])) {
                job_judge(&t, open[i], &plain);
                free(open[i]);
                open[i] = NULL;
                live--;
            }
        if (!live) session_idle(&t);
    }
    session_close(&t);
    session_close(&plain);
    unlink(o.draft);
    CHECK(rmdir(folder) == 0, "%s: something is left", folder);
    printf("      %lld requests, at most %lld at once: %lld tokens, %lld cancelled, %lld saved and "
           "loaded, "
           "%lld prompt tokens reused, %lld trees, %lld chains\n",
           (long long)counts[REQUESTS], (long long)counts[MOST], (long long)counts[TOKENS],
           (long long)counts[CANCELS], (long long)counts[LOADS], (long long)counts[REUSED],
           (long long)counts[TREES], (long long)counts[CHAINS]);
    if (requests < 100) return;
    CHECK(counts[CANCELS] > requests / 30 && counts[LOADS] > requests / 30 &&
              counts[REUSED] > requests && (requests < 1000 || counts[TREES] > 0) &&
              (requests < 1000 || counts[CHAINS] > 0) && (requests < 1000 || counts[MOST] > 16),
          "not all of it happened");
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {TEST(soak)};
    if (argc > 1) requests = atoi(argv[1]);
    check_seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    return check_main(tests, 1, 1, argv);
}
