#define SALA_IMPLEMENTATION
#include "../sala.h"
// The scheduler: who is admitted, who reads how much of its prompt, who generates, in which order events come. Every
// step is looked at as a caller sees it; outputs are those of the requests run alone.
#include "check.h"
#include "model.h"

enum { VOCAB = 97, PROMPT = 4096 };

static int32_t words[PROMPT];

typedef struct watch {
    session *t;
    int64_t read[400], chosen[400], first_step[400]; // by request; first_step: of its first token
    int began[400], ended[400];
    int64_t step,
        most_read; // most that a step read while a request that it did not begin with waited
    int order;     // events of tokens of one kind came out of the order of arrival
} watch;

// One step. Events: prefill (and a first token, perhaps an end) in order of arrival, then tokens of verifies in order
// of arrival; of one request prefill, tokens, the end.
static int watched_step(watch *w) {
    sala_error err;
    sala_event ev;
    int64_t read = 0, behind = 0, last[2] = {0, 0}, now = w->step++;
    int generating = 0, code, verifying = 0, seen[400] = {0};
    for (int i = 0; i < w->t->count; i++) generating += w->chosen[i] > 0 && !w->ended[i];
    if ((code = sala_step(w->t->engine, &err)) < 0) die("sala_step", err.text);
    while (sala_next_event(w->t->engine, &ev)) {
        int i = (int)(ev.request - w->t->out[0].id);
        take_event(w->t, &ev);
        CHECK(!w->ended[i], "request %d: an event behind its end", i);
        if (ev.type == SALA_EVENT_PREFILL) {
            CHECK(!w->chosen[i], "request %d reads behind its first token", i);
            w->order += verifying;
            read += ev.done - w->read[i];
            if (generating) behind += ev.done - w->read[i];
            w->read[i] = ev.done;
        }
        if (ev.type == SALA_EVENT_TOKEN) {
            if (!w->chosen[i]) w->first_step[i] = now, generating++;
            verifying |= w->chosen[i] && w->first_step[i] < now;
            if (w->chosen[i] && !seen[i]) {
                w->order += i < last[1];
                last[1] = i;
            }
            seen[i] = w->chosen[i] > 0;
            w->chosen[i]++;
        }
        if (ev.type == SALA_EVENT_FINISH) w->ended[i] = 1, generating -= w->chosen[i] > 0;
        if (ev.type == SALA_EVENT_PREFILL) {
            w->order += i < last[0];
            last[0] = i;
        }
    }
    if (behind > w->most_read) w->most_read = behind;
    for (int i = 0; i < w->t->count; i++) // whoever generates goes on in every step
        CHECK(!w->chosen[i] || w->ended[i] || seen[i] || w->first_step[i] == now,
              "request %d had no token in step %lld", i, (long long)now);
    CHECK(read <= w->t->info.chunk, "a step read %lld tokens", (long long)read);
    return code;
}

static session sched_engine(int sequences, int64_t context, int64_t kv_tokens, int chunk,
                            const char *reuse) {
    sala_options o;
    check_seed = 41;
    random_tokens(words, PROMPT, VOCAB);
    memset(&o, 0, sizeof o);
    o.threads = 2;
    o.max_sequences = sequences;
    o.context = context;
    o.kv_tokens = kv_tokens;
    o.chunk = chunk;
    o.reuse = reuse;
    o.reuse_memory = strcmp(reuse, "off") ? 20 * 3 * 6 * 16 * 16 * 4 : 0;
    return session_open(TINY, &o);
}

// ---- budgets ----

// While anything generates a step reads 512 tokens of prompts at most, also in the step in which it began to.
static void test_no_stall(void) {
    session t = sched_engine(4, 4096, 3 * 4096, 2048, "off");
    watch w;
    memset(&w, 0, sizeof w);
    w.t = &t;
    sala_request first = request_of(words, 100, 40), second = request_of(words, 3000, 10),
                 third = request_of(words + 7, 1500, 10);
    session_ask(&t, &second); // alone: whole chunks
    watched_step(&w);
    CHECK(w.read[0] == 2048, "%lld tokens of the first prompt", (long long)w.read[0]);
    session_ask(&t, &first);
    session_ask(&t, &third);
    while (!w.chosen[0]) watched_step(&w);
    CHECK(w.read[1] + w.read[2] <= 512, "%lld and %lld tokens of others behind its first token",
          (long long)w.read[1], (long long)w.read[2]);
    CHECK(w.chosen[0] == 2, "its second token waited");
    int64_t before = w.step;
    while (watched_step(&w)) continue;
    CHECK(w.most_read <= 512, "a step read %lld tokens while others waited",
          (long long)w.most_read);
    CHECK(w.first_step[2] - before >= 2, "the third prompt came in one piece");
    CHECK(w.order == 0, "%d events out of order", w.order);
    session_close(&t);
}

// ---- many ----

static sala_request crowd_request(int i) {
    sala_request r = request_of(words + 11 * (i % 50), 3 + i * 37 % 90, 1 + i * 13 % 24);
    if (i % 3 == 0) request_sampled(&r, (uint64_t)i);
    if (i % 7 == 0) r.repetition_penalty = 1.1f;
    r.logprobs = 1;
    return r;
}

// 300 requests for 256 slots: each gives what it gives alone; all slots are used, and no more.
static void test_256(void) {
    session t = sched_engine(256, 256, 256 * 128, 2048, "prefix"), alone;
    watch w;
    memset(&w, 0, sizeof w);
    w.t = &t;
    for (int i = 0; i < 300; i++) {
        sala_request r = crowd_request(i);
        session_ask(&t, &r);
    }
    int resident = 0, code;
    do {
        sala_info info;
        code = watched_step(&w);
        sala_get_info(t.engine, &info);
        CHECK(info.requests_active <= 256 && info.sequences_resident <= 256, "%d resident",
              info.sequences_resident);
        if (info.sequences_resident > resident) resident = info.sequences_resident;
    } while (code);
    CHECK(resident > 200, "%d sequences at once", resident);
    CHECK(w.order == 0, "%d events out of order", w.order);
    CHECK(w.most_read <= 512, "a step read %lld tokens", (long long)w.most_read);
    alone = sched_engine(1, 256, 256, 64, "off");
    for (int i = 0; i < 300; i++) {
        sala_request r = crowd_request(i);
        outcome *b = session_do(&alone, &r), *a = &t.out[i];
        CHECK(same_choices(a, b), "request %d: %lld tokens, alone %lld", i, (long long)a->count,
              (long long)b->count);
    }
    session_close(&t);
    session_close(&alone);
}

// ---- order ----

// Nobody overtakes: a large request that must wait is not passed by small ones behind it; whoever was admitted ends.
static void test_arrival(void) {
    session t = sched_engine(8, 512, 1024, 64, "prefix");
    for (int i = 0; i < 40; i++) {
        sala_request r =
            request_of(words + i, i % 4 == 3 ? 400 : 5 + i % 60, i % 4 == 3 ? 100 : 5 + i % 9);
        session_ask(&t, &r);
    }
    int waited = 0, code;
    do {
        code = session_step(&t);
        int waits = 0;
        for (const sala__request *r = t.engine->requests; r; r = r->next) {
            CHECK(!waits || r->state == SALA__WAITING, "request %lld has overtaken",
                  (long long)r->id);
            waits += r->state == SALA__WAITING;
        }
        waited += waits > 0;
    } while (code);
    for (int i = 0; i < 40; i++) {
        CHECK(t.out[i].reason == SALA_FINISH_LENGTH, "request %d ended by reason %d", i,
              t.out[i].reason);
        CHECK(t.out[i].timings.queue_seconds >= 0, "request %d never waited", i);
    }
    CHECK(waited > 20, "%d steps with waiting requests", waited);
    session_close(&t);
}

// ---- cancelling ----

// At any time: one finish event for each, in the next step; the others do not notice.
static void test_cancel(void) {
    enum { COUNT = 90 };
    session t = sched_engine(6, 512, 1200, 64, "history"), alone;
    int64_t stop_at[COUNT];
    int cancelled = 0, waiting = 0, reading = 0, generating = 0;
    sala_error err;
    check_seed = 5;
    for (int i = 0; i < COUNT; i++) {
        sala_request r = crowd_request(i);
        if (i % 5 == 0) r.token_count = 300;
        session_ask(&t, &r);
        stop_at[i] = below(2) ? below(120) : -1;
    }
    for (int64_t step = 0;; step++) {
        for (int i = 0; i < COUNT; i++) {
            outcome *o = &t.out[i];
            if (stop_at[i] != step || o->finished) continue;
            waiting += !o->prefill_done;
            reading += o->prefill_done && !o->count;
            generating += o->count > 0;
            session_cancel(&t, i);
            if (i % 2) session_cancel(&t, i); // once more
            cancelled++;
        }
        if (!session_step(&t)) break;
        for (int i = 0; i < COUNT; i++)
            CHECK(stop_at[i] != step || t.out[i].finished, "request %d goes on", i);
    }
    CHECK(sala_cancel(t.engine, t.out[0].id, &err) == SALA_E_ARGUMENT, "cancelled behind its end");
    alone = sched_engine(1, 512, 512, 64, "off");
    for (int i = 0; i < COUNT; i++) {
        sala_request r = crowd_request(i);
        if (i % 5 == 0) r.token_count = 300;
        outcome *b = session_do(&alone, &r), *a = &t.out[i];
        CHECK(a->reason == b->reason || a->reason == SALA_FINISH_CANCELLED, "request %d: reason %d",
              i, a->reason);
        CHECK(!a->count ||
                  (a->count <= b->count && !memcmp(a->tokens, b->tokens, (size_t)a->count * 4)),
              "request %d: other tokens", i);
    }
    printf("      cancelled %d waiting, %d reading, %d generating\n", waiting, reading, generating);
    CHECK(waiting > 3 && reading > 0 && generating > 3, "of %d", cancelled);
    session_close(&t);
    session_close(&alone);
}

// ---- buckets ----

// Rows of a graph: never fewer than there are, never more than there is room for, few graphs.
static void test_buckets(void) {
    for (int most = 1; most <= 256; most++) {
        int graphs = 0, last = 0;
        for (int n = 1; n <= most; n++) {
            int b = sala__bucket(n, most);
            CHECK(b >= n && b <= most && b >= last, "%d rows of %d: bucket %d", n, most, b);
            CHECK(b <= n + (n < 16 ? n : n <= 64 ? 7 : 15), "%d rows of %d: bucket %d", n, most, b);
            graphs += b != last;
            last = b;
        }
        CHECK(graphs <= 24, "%d graphs", graphs);
    }
}

TEST_MAIN(TEST(test_no_stall), TEST(test_256), TEST(test_arrival), TEST(test_cancel),
          TEST(test_buckets))
