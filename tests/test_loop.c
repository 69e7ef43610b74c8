#define SALA_IMPLEMENTATION
#include "../sala.h"
// The loop: conversations, cancelling, memory, stop conditions, edges of every length. Where two ways lead to the
// same history, they must give the same bits. Every session_close checks that nothing is left behind.
#include "check.h"
#include "model.h"

static void fresh_tokens(int32_t *tokens, int count, uint64_t seed) {
    check_seed = seed;
    random_tokens(tokens, count, 97);
}

static int has(const sala_error *err, const char *word) {
    return strstr(err->text, word) != NULL;
}

static session tiny_engine(int chunk, int sequences) {
    sala_options o = small_options(chunk, chunk);
    o.max_sequences = sequences;
    o.hidden_states = 1;
    return session_open(TINY, &o);
}

// ---- conversations ----

enum { TURNS = 5 };
static const int turn_tokens[TURNS] = {30, 1, 77, 0, 200}, turn_output[TURNS] = {10, 1, 25, 3, 6};

static sala_request turn(const int32_t *tokens, int i, int64_t sequence) {
    int from = 0;
    for (int k = 0; k < i; k++) from += turn_tokens[k];
    sala_request r = request_of(tokens + from, turn_tokens[i], turn_output[i]);
    r.sequence = sequence;
    r.keep = 1;
    r.want_rows = SALA_ROWS_ALL;
    return r;
}

// A chat of sampled turns, and the same with the answers forced in another engine: the same bits everywhere.
static void test_chat_replay(void) {
    int32_t tokens[400];
    fresh_tokens(tokens, 400, 301);
    session a = tiny_engine(64, 3), b = tiny_engine(256, 2);
    int64_t chat = 0, replay = 0, position = 0;
    for (int i = 0; i < TURNS; i++) {
        sala_request r = turn(tokens, i, chat);
        request_sampled(&r, 77);
        outcome *x = session_do(&a, &r);
        CHECK(x->timings.prompt_tokens == turn_tokens[i] + (i > 0), "turn %d prefilled %lld tokens",
              i, (long long)x->timings.prompt_tokens);
        CHECK(i == 0 || x->sequence == chat, "the sequence changed its name");
        chat = x->sequence;
        for (int noise = 0; noise < 2; noise++) { // others come and go between the turns
            sala_request n = request_of(tokens + 100, 50 + 30 * noise, 4);
            session_do(&a, &n);
        }
        x = &a.out[3 * i];
        r = turn(tokens, i, replay);
        request_force(&r, x->tokens, x->count);
        request_sampled(&r, 77);
        outcome *y = session_do(&b, &r);
        replay = y->sequence;
        int64_t from = position, to = x->first_position + x->count - 1;
        position = to;
        CHECK(same_choices(x, y), "turn %d: other tokens or log-probabilities", i);
        int64_t d = first_difference(&a, x, y, from, to);
        CHECK(d < 0, "turn %d: position %lld differs", i, (long long)d);
        memory m = memory_of(&a, chat), n = memory_of(&b, replay);
        CHECK(memory_same(&m, &n), "turn %d: the memory differs", i);
        free(m.data);
        free(n.data);
    }
    session_give_up(&a, chat);
    session_give_up(&b, replay);
    session_close(&a);
    session_close(&b);
}

// Within the tolerance between prefill and verify a chat is its history prefilled at once: no token of it is
// lost or doubled, none is at another position.
static void test_chat_is_its_history(void) {
    int32_t tokens[400], history[600];
    int64_t chat = 0;
    int n = 0, from = 0;
    fresh_tokens(tokens, 400, 302);
    session t = tiny_engine(256, 2);
    for (int i = 0; i < TURNS; i++) {
        sala_request r = turn(tokens, i, chat);
        int at = session_ask(&t, &r);
        while (!t.out[at].finished) session_step(&t);
        memcpy(history + n, tokens + from, (size_t)turn_tokens[i] * 4);
        n += turn_tokens[i];
        from += turn_tokens[i];
        sala_request once = request_of(history, n, 1);
        once.want_rows = SALA_ROWS_PROMPT;
        outcome *y = session_do(&t, &once), *x = &t.out[at];
        size_t last = (size_t)n - 1, vocab = (size_t)t.info.vocab;
        double e = relative(x->logits + last * vocab, y->logits + last * vocab, vocab);
        CHECK(x->seen[last] && e < 0.06, "turn %d: the logits of position %zu differ by %g", i,
              last, e);
        CHECK(x->first_position == n, "turn %d: the answer begins at %lld, not %d", i,
              (long long)x->first_position, n);
        memcpy(history + n, x->tokens, (size_t)x->count * 4);
        n += (int)x->count;
        chat = x->sequence;
    }
    session_give_up(&t, chat);
    session_close(&t);
}

// ---- cancelling ----

// Cancelled in the middle of its prompt and kept: what is there is the prefix, and going on is going on.
static void test_cancel_in_prefill(void) {
    int32_t tokens[400], other[400];
    fresh_tokens(tokens, 400, 303);
    random_tokens(other, 400, 97);
    memcpy(other, tokens, 128 * 4);
    session t = tiny_engine(64, 2);
    sala_request r = request_of(tokens, 300, 10);
    r.keep = 1;
    r.want_rows = SALA_ROWS_ALL;
    int i = session_ask(&t, &r);
    session_step(&t);
    session_step(&t);
    session_cancel(&t, i);
    session_run(&t);
    outcome *o = &t.out[i];
    CHECK(o->reason == SALA_FINISH_CANCELLED && o->count == 0 && o->timings.prompt_tokens == 128,
          "%lld tokens, reason %d", (long long)o->timings.prompt_tokens, o->reason);
    int64_t kept = o->sequence;
    CHECK(kept > 0 && sequence_of(&t, kept)->stored == 128, "not kept");
    // Continue with other tokens, and a penalty that would notice a token that never was.
    r = request_of(other + 128, 150, 30);
    r.sequence = kept;
    r.want_rows = SALA_ROWS_ALL;
    r.repetition_penalty = 4;
    session_do(&t, &r);
    r = request_of(other, 278, 30);
    r.want_rows = SALA_ROWS_ALL;
    r.repetition_penalty = 4;
    session_do(&t, &r);
    CHECK(same_choices(&t.out[1], &t.out[2]),
          "going on after a cancelled prompt gives other tokens than the prompt itself");
    CHECK(first_difference(&t, &t.out[1], &t.out[2], 128, 278 + 29) < 0, "rows differ");
    session_close(&t);
}

static void test_cancel_in_decode(void) {
    int32_t tokens[400];
    fresh_tokens(tokens, 400, 304);
    session t = tiny_engine(64, 3);
    sala_request r = request_of(tokens, 50, 100);
    r.keep = 1;
    int i = session_ask(&t, &r);
    while (t.out[i].count < 9) session_step(&t);
    session_cancel(&t, i);
    session_run(&t);
    CHECK(t.out[i].reason == SALA_FINISH_CANCELLED && t.out[i].sequence > 0, "reason %d",
          t.out[i].reason);
    int64_t first = t.out[i].sequence;
    r = request_of(tokens, 50, 1);
    request_force(&r, t.out[i].tokens, t.out[i].count);
    r.keep = 1;
    int64_t second = session_do(&t, &r)->sequence;
    for (int k = 0; k < 2; k++) {
        r = request_of(tokens + 60, 40, 20);
        r.sequence = k ? second : first;
        r.want_rows = SALA_ROWS_ALL;
        session_do(&t, &r);
    }
    CHECK(same_choices(&t.out[2], &t.out[3]), "tokens differ");
    int64_t from = 50 + t.out[i].count - 1;
    CHECK(first_difference(&t, &t.out[2], &t.out[3], from, from + 60) < 0, "rows differ");
    session_close(&t);
}

// A turn that is cancelled when it is admitted but not begun, or not even admitted, changes nothing: the last
// chosen token is still there.
static void test_cancel_before_prefill(void) {
    int32_t tokens[600];
    fresh_tokens(tokens, 600, 305);
    for (int admitted = 0; admitted < 2; admitted++) {
        session t = tiny_engine(64, 3);
        int64_t kept[2];
        for (int k = 0; k < 2; k++) {
            sala_request r = request_of(tokens, 40, 5);
            r.keep = 1;
            kept[k] = session_do(&t, &r)->sequence;
        }
        sala_request busy = request_of(tokens, 500, 2); // takes the budget of every step
        session_ask(&t, &busy);
        sala_request r = request_of(tokens + 70, 30, 6);
        r.sequence = kept[0];
        r.keep = 1;
        int i = session_ask(&t, &r);
        if (admitted) session_step(&t);
        session_cancel(&t, i);
        session_run(&t);
        CHECK(t.out[i].reason == SALA_FINISH_CANCELLED && t.out[i].sequence == kept[0] &&
                  t.out[i].timings.prompt_tokens == 0,
              "admitted %d: reason %d", admitted, t.out[i].reason);
        for (int k = 0; k < 2; k++) {
            r = request_of(tokens + 200, 20, 12);
            r.sequence = kept[k];
            r.want_rows = SALA_ROWS_ALL;
            r.repetition_penalty = 4; // would notice the cancelled turn's tokens
            session_do(&t, &r);
        }
        outcome *a = &t.out[t.count - 2], *b = &t.out[t.count - 1];
        CHECK(a->timings.prompt_tokens == 21 && b->timings.prompt_tokens == 21,
              "admitted %d: %lld tokens prefilled", admitted, (long long)a->timings.prompt_tokens);
        CHECK(same_choices(a, b), "admitted %d: other tokens than without the cancelled turn",
              admitted);
        CHECK(first_difference(&t, a, b, 44, 76) < 0, "admitted %d: rows differ", admitted);
        session_close(&t);
    }
}

// ---- lengths ----

static void test_prompt_lengths(void) {
    static const int lengths[] = {1, 15, 16, 17, 31, 32, 33, 59, 60, 61, 63, 64, 65, 127, 128, 129};
    int32_t tokens[200];
    fresh_tokens(tokens, 200, 306);
    session t = tiny_engine(64, 2);
    for (int i = 0; i < 16; i++) {
        sala_request r = request_of(tokens, lengths[i], 1);
        r.want_rows = SALA_ROWS_ALL;
        outcome *o = session_do(&t, &r);
        const float *x = o->logits + (size_t)(lengths[i] - 1) * 97;
        int best = 0;
        for (int k = 1; k < 97; k++)
            if (x[k] > x[best]) best = k;
        CHECK(o->count == 1 && o->tokens[0] == best && o->first_position == lengths[i] &&
                  o->reason == SALA_FINISH_LENGTH,
              "a prompt of %d: %lld tokens from position %lld, reason %d", lengths[i],
              (long long)o->count, (long long)o->first_position, o->reason);
        CHECK(o->prefill_done == lengths[i] && o->prefill_total == lengths[i],
              "progress %lld of %lld", (long long)o->prefill_done, (long long)o->prefill_total);
        CHECK(!o->seen[lengths[i]], "a row of the token that nobody asked to continue");
    }
    session_close(&t);
}

static void test_full_context(void) {
    int32_t tokens[200];
    sala_error err;
    fresh_tokens(tokens, 200, 307);
    sala_options o = small_options(64, 64);
    o.context = 128;
    o.kv_tokens = 256;
    o.max_sequences = 2;
    session t = session_open(TINY, &o);
    sala_request r = request_of(tokens, 100, 28);
    CHECK(session_do(&t, &r)->count == 28, "%lld tokens into an exactly full context",
          (long long)t.out[0].count);
    r = request_of(tokens, 127, 1);
    CHECK(session_do(&t, &r)->count == 1, "one token more");
    r = request_of(tokens, 100, 29);
    CHECK(session_try(&t, &r, &err) < 0 && err.code == SALA_E_ARGUMENT && has(&err, "100") &&
              has(&err, "29") && has(&err, "128"),
          "one too many: %s", err.text);
    r = request_of(tokens, 128, 1);
    CHECK(session_try(&t, &r, &err) < 0 && err.code == SALA_E_ARGUMENT,
          "a prompt that fills the context: %s", err.text);
    r = request_of(tokens, 60, 8); // and a continued one, exactly full: 60 + 8, then 50 + 10
    r.keep = 1;
    int64_t kept = session_do(&t, &r)->sequence;
    r = request_of(tokens, 50, 11);
    r.sequence = kept;
    CHECK(session_try(&t, &r, &err) < 0 && has(&err, "118") && has(&err, "11"),
          "too long with what is there: %s", err.text);
    r.max_tokens = 10;
    CHECK(session_do(&t, &r)->count == 10, "the sequence can fill the context");
    session_close(&t);
}

// ---- memory ----

static void test_waiting_for_memory(void) {
    int32_t tokens[200];
    sala_info info;
    fresh_tokens(tokens, 200, 308);
    sala_options o = small_options(64, 64);
    o.context = o.kv_tokens = 128;
    session t = session_open(TINY, &o);
    for (int i = 0; i < 3; i++) {
        sala_request r = request_of(tokens, 80, 20);
        session_ask(&t, &r);
    }
    sala_request small = request_of(tokens, 5, 3); // would fit, but nobody overtakes
    session_ask(&t, &small);
    session_step(&t);
    sala_get_info(t.engine, &info);
    CHECK(info.requests_active == 1 && info.requests_waiting == 3 && info.kv_tokens_reserved == 112,
          "%d active, %d wait, %lld reserved", info.requests_active, info.requests_waiting,
          (long long)info.kv_tokens_reserved);
    session_run(&t);
    for (int i = 1; i < 3; i++) CHECK(same_choices(&t.out[i], &t.out[0]), "request %d differs", i);
    CHECK(t.out[3].count == 3, "the last one: %lld tokens", (long long)t.out[3].count);
    CHECK(t.out[2].timings.queue_seconds >= t.out[1].timings.queue_seconds, "the order of arrival");
    session_close(&t);
}

static void test_kept_sequences_hold_all(void) {
    int32_t tokens[200];
    fresh_tokens(tokens, 200, 309);
    for (int slots = 0; slots < 2; slots++) { // either the pages or the slots are the limit
        sala_options o = small_options(64, 64);
        o.context = 128;
        o.kv_tokens = slots ? 1024 : 128;
        o.max_sequences = slots ? 1 : 4;
        session t = session_open(TINY, &o);
        sala_request r = request_of(tokens, 60, 20);
        r.keep = 1;
        int64_t kept = session_do(&t, &r)->sequence;
        r = request_of(tokens, 60, 5);
        outcome *x = session_do(&t, &r);
        CHECK(x->reason == SALA_FINISH_MEMORY && x->count == 0 && x->sequence == 0,
              "slots %d: reason %d", slots, x->reason);
        r = request_of(tokens + 9, 10, 5); // the kept one itself may go on
        r.sequence = kept;
        x = session_do(&t, &r);
        CHECK(x->reason == SALA_FINISH_LENGTH && x->count == 5, "slots %d: reason %d", slots,
              x->reason);
        r = request_of(tokens, 60, 5); // it was not kept again
        CHECK(session_do(&t, &r)->count == 5, "slots %d: the memory did not come back", slots);
        session_close(&t);
    }
}

// Damaged weights end the request that meets them, and no other.
static void test_not_a_number(void) {
    int32_t tokens[60], bad[20];
    sala_error err;
    sala_options o = small_options(64, 64);
    fresh_tokens(tokens, 60, 310);
    for (int i = 0; i < 60; i++) tokens[i] %= 90;
    for (int i = 0; i < 20; i++) bad[i] = i == 10 ? 95 : 3;
    o.synthetic = 1;
    session t = session_open(TINY_CONFIG, &o), good = session_open(TINY_CONFIG, &o);
    uint16_t *embed = (uint16_t *)(uintptr_t)t.engine->weights.embed.data;
    CHECK(sala_check_weights(t.engine, &err) == 0, "%s", err.text);
    embed[95 * 64 + 3] = 0x7FC0;
    CHECK(sala_check_weights(t.engine, &err) < 0 && has(&err, "embed_tokens"), "%s", err.text);
    sala_bias never = {95, -INFINITY};
    sala_request r = request_of(tokens, 60, 20), q = request_of(bad, 20, 20);
    r.biases = &never;
    r.bias_count = 1;
    session_ask(&t, &q);
    session_ask(&t, &r);
    session_run(&t);
    session_do(&good, &r);
    CHECK(t.out[0].reason == SALA_FINISH_NAN && t.out[0].count == 0, "reason %d", t.out[0].reason);
    CHECK(same_choices(&t.out[1], &good.out[0]), "a neighbour was disturbed");
    session_do(&t, &r); // the slot and the pages that held NaN serve the next
    CHECK(same_choices(&t.out[2], &good.out[0]), "a successor was disturbed");
    session_close(&t);
    session_close(&good);
}

// ---- dense_len ----

static void test_dense_len(void) {
    static const int dense_len[] = {0, SALA_DENSE_NEVER, 1 << 30, 100};
    int32_t tokens[300];
    session t[4];
    fresh_tokens(tokens, 300, 311);
    for (int i = 0; i < 4; i++) {
        sala_options o = small_options(64, 64);
        o.dense_len = dense_len[i];
        o.hidden_states = 1;
        t[i] = session_open(TINY, &o);
        sala_request r = request_of(tokens, 200, 1);
        request_force(&r, tokens + 200, 61);
        r.want_rows = SALA_ROWS_ALL;
        outcome *x = session_do(&t[i], &r);
        int first = i == 0   ? 60
                    : i == 1 ? 0
                    : i == 2 ? 261
                             : 100; // tokens that must exist for sparse attention
        CHECK(t[i].info.dense_len == (i == 1         ? 0
                                      : first == 261 ? 1 << 30
                                                     : first),
              "info says %d", t[i].info.dense_len);
        for (int p = 0; p < 260; p++)
            CHECK((x->blocks[(size_t)p * t[i].blocks_row] == -2) == (p + 1 < first),
                  "dense_len %d: position %d", dense_len[i], p);
    }
    // With 5 blocks of 16, the first 80 tokens are all selected: sparse and dense are the same bits there.
    size_t vocab = 97;
    for (int i = 0; i < 4; i++)
        CHECK(memcmp(t[i].out[0].logits, t[2].out[0].logits, 80 * vocab * 4) == 0,
              "dense_len %d differs below 80", dense_len[i]);
    CHECK(memcmp(t[1].out[0].logits + 80 * vocab, t[2].out[0].logits + 80 * vocab, vocab * 4) !=
                  0 &&
              memcmp(t[1].out[0].logits + 90 * vocab, t[2].out[0].logits + 90 * vocab, vocab * 4) !=
                  0,
          "selection has no effect");
    CHECK(memcmp(t[3].out[0].logits, t[2].out[0].logits, 99 * vocab * 4) == 0,
          "dense_len 100 is not dense below 100");
    CHECK(memcmp(t[0].out[0].logits, t[1].out[0].logits, 200 * vocab * 4) == 0,
          "dense below 60 is not the same as sparse");
    for (int i = 0; i < 4; i++) session_close(&t[i]);
}

// ---- how a request ends ----

static session text_engine(void) {
    sala_options o = small_options(512, 0);
    return session_open(SALA_TINY, &o);
}

static const char *const stop_texts[] = {
    "Once upon a time there was a brave fox named Pip. Pip said: \"No, no, no!\" and ran to the "
    "old old oak.",
    "caf\xC3\xA9, \xE2\x80\x9Cquotes\xE2\x80\x9D, \xF0\x9F\x99\x82\xF0\x9F\x9A\x80\xF0\x9F\x9A\x80 "
    "\xC3\xBC\xC3\xB1 "
    "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82 "
    "\xE4\xBB\x8E\xE5\x89\x8D\xE6\x9C\x89\xE4\xB8\x80\xE4\xB8\xAA.\n\n\tEnd",
    "aaaaaaaabaaaaaaab aaab ababababc abcabcabd  abc",
};

// Where a text that grows token by token ends, by the plainest rule: as soon as a stop string stands in it, at the
// first place where one stands. Returns the number of tokens; *bytes is the length of what is shown.
static int64_t stops_at(sala *s, const int32_t *tokens, int64_t count, const char *const *stop,
                        int stops, char *text, size_t *bytes) {
    sala_text_stream *stream = sala_stream_open(s, 0, NULL);
    *bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        size_t n;
        const char *piece = sala_stream_next(stream, tokens[i], &n);
        memcpy(text + *bytes, piece, n + 1);
        *bytes += n;
        const char *first = NULL;
        for (int k = 0; k < stops; k++) {
            const char *found = strstr(text, stop[k]);
            if (found && (!first || found < first)) first = found;
        }
        if (!first) continue;
        *bytes = (size_t)(first - text);
        sala_stream_close(stream);
        return i + 1;
    }
    sala_stream_close(stream);
    return 0;
}

static void check_stops(session *t, const int32_t *tokens, int64_t count, const char *const *stop,
                        int stops) {
    char text[512];
    size_t bytes;
    int64_t end = stops_at(t->engine, tokens, count, stop, stops, text, &bytes);
    sala_request r = request_of(tokens, 1, 1);
    request_force(&r, tokens, count);
    r.stop = stop;
    r.stop_count = stops;
    outcome *o = session_do(t, &r);
    CHECK(o->count == (end ? end : count) &&
              o->reason == (end ? SALA_FINISH_STOP : SALA_FINISH_LENGTH) && o->bytes == bytes &&
              memcmp(o->text, text, bytes) == 0,
          "stops \"%s\" \"%s\" \"%s\": %lld tokens, reason %d, \"%s\"; expected %lld tokens, "
          "\"%.*s\"",
          stop[0], stops > 1 ? stop[1] : "", stops > 2 ? stop[2] : "", (long long)o->count,
          o->reason, o->text, (long long)end, (int)bytes, text);
    session_forget(t);
}

static size_t character_start(const char *text, size_t at) { // move to the beginning of a character
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80) at--;
    return at;
}

static void test_stop_strings(void) {
    session t = text_engine();
    check_seed = 312;
    for (int k = 0; k < 3; k++) {
        const char *text = stop_texts[k];
        int32_t *tokens;
        int64_t count = sala_tokenize(t.engine, text, strlen(text), 0, &tokens, NULL);
        if (count < 10) die("a text", "is hardly any tokens");
        for (int round = 0; round < 25 && !check_failures; round++) {
            char words[3][40];
            const char *stop[3] = {words[0], words[1], words[2]};
            int stops = 1 + below(3);
            for (int i = 0; i < stops; i++) { // pieces of the text, some with another end
                size_t at = character_start(text, (size_t)below((int)strlen(text) - 1));
                size_t end = at + 1 + (size_t)below(k == 2 ? 6 : 14);
                if (end > strlen(text)) end = strlen(text);
                while (((unsigned char)text[end] & 0xC0) == 0x80) end++;
                memcpy(words[i], text + at, end - at);
                words[i][end - at] = 0;
                if (below(3) == 0) strcat(words[i], "z");
            }
            check_stops(&t, tokens, count, stop, stops);
        }
        sala_free(t.engine, tokens);
    }
    session_close(&t);
}

// The awkward ones by hand.
static void test_stop_strings_overlap(void) {
    static const char *const sets[][3] = {
        {"O", NULL, NULL}, // within the very first token
        {"Once upon a time there was a brave fox named Pip", NULL, NULL},
        {"fox named Pip.x", "named",
         NULL}, // the inner one is complete while the outer may still come
        {"fox named Pip. Pip said", "named Pip. P", "brave fox named Pip. Pip said: \"Yes"},
        {"oak.", "oak", NULL}, // one is the beginning of the other
        {"oak", "oak.", NULL},
        {"the old old oak.", "old oak!", NULL}, // at the very end
        {"oak.z", "k.", NULL}, // complete in the last token, while a longer one could follow
        {"never", "at", "all"},
    };
    session t = text_engine();
    int32_t *tokens;
    int64_t count = sala_tokenize(t.engine, stop_texts[0], strlen(stop_texts[0]), 0, &tokens, NULL);
    for (int i = 0; i < (int)(sizeof sets / sizeof sets[0]); i++)
        check_stops(&t, tokens, count, sets[i], sets[i][2] ? 3 : sets[i][1] ? 2 : 1);
    sala_free(t.engine, tokens);
    session_close(&t);
}

static void test_end_tokens(void) {
    static const char question[] =
        "<|im_start|>user\nWhat does the cow say?<|im_end|>\n<|im_start|>assistant\n";
    session t = text_engine();
    sala_request r = request_of(NULL, 0, 20);
    r.text = question;
    outcome *all = session_do(&t, &r);
    CHECK(all->count == 20 && all->reason == SALA_FINISH_LENGTH, "ignore_eos: %lld tokens",
          (long long)all->count);
    r.ignore_eos = 0;
    outcome *o = session_do(&t, &r);
    all = &t.out[0];
    CHECK(o->reason == SALA_FINISH_STOP && o->count == 6 && o->tokens[5] == 2046,
          "eos: %lld tokens, reason %d", (long long)o->count, o->reason);
    CHECK(strcmp(o->text, "It says moo.") == 0, "the text is \"%s\"", o->text);
    r.special_text = 1;
    o = session_do(&t, &r);
    CHECK(strcmp(o->text, "It says moo.<|im_end|>") == 0, "with special text \"%s\"", o->text);
    r.special_text = 0;
    all = &t.out[0];
    r.stop_tokens = all->tokens + 3;
    r.stop_token_count = 1;
    o = session_do(&t, &r);
    all = &t.out[0];
    CHECK(o->reason == SALA_FINISH_STOP && o->count <= 4 &&
              o->tokens[o->count - 1] == all->tokens[3],
          "stop token: %lld tokens", (long long)o->count);
    r.stop_token_count = 0;
    r.force =
        all->tokens; // an end token among forced tokens does not end it; the next free one does
    r.force_count = 8;
    o = session_do(&t, &r);
    all = &t.out[0];
    CHECK(o->count > 8 && memcmp(o->tokens, all->tokens, (size_t)o->count * 4) == 0,
          "forced: %lld tokens", (long long)o->count);
    session_close(&t);
}

// A prompt as text is the prompt as tokens; and the answer comes in whole characters.
static void test_text_prompt(void) {
    static const char prompt[] = "\xE4\xBB\x8E\xE5\x89\x8D\xE6\x9C\x89\xE4\xB8\x80\xE4\xB8\xAA";
    int32_t *tokens;
    session t = text_engine();
    int64_t count = sala_tokenize(t.engine, prompt, strlen(prompt),
                                  SALA_ADD_BOS | SALA_PARSE_SPECIAL, &tokens, NULL);
    CHECK(count > 2 && tokens[0] == 1, "%lld tokens", (long long)count);
    sala_request r = request_of(tokens, count, 12);
    session_do(&t, &r);
    r = request_of(NULL, 0, 12);
    r.text = prompt;
    session_do(&t, &r);
    r.text_bytes = strlen(prompt);
    session_do(&t, &r);
    CHECK(same_choices(&t.out[0], &t.out[1]) && same_choices(&t.out[0], &t.out[2]), "not the same");
    CHECK(t.out[1].timings.prompt_tokens == count, "%lld tokens in the prompt",
          (long long)t.out[1].timings.prompt_tokens);
    sala_free(t.engine, tokens);
    session_close(&t);
}

// ---- what a request asks for ----

static double log_softmax(const float *x, int n, int token) {
    double sum = 0, most = (double)x[0];
    for (int i = 1; i < n; i++)
        if ((double)x[i] > most) most = (double)x[i];
    for (int i = 0; i < n; i++) sum += exp((double)x[i] - most);
    return (double)x[token] - most - log(sum);
}

// Log-probabilities are those of the row's logits, for free and for forced tokens.
static void test_logprobs(void) {
    int32_t tokens[100];
    sala_event ev;
    float row[97];
    int chosen = 0, have = 0;
    fresh_tokens(tokens, 100, 313);
    session t = tiny_engine(64, 2);
    sala_request r = request_of(tokens, 30, 40);
    request_sampled(&r, 3);
    r.force = tokens + 50;
    r.force_count = 20;
    r.logprobs = 20;
    r.want_rows = SALA_ROWS_ALL;
    CHECK(sala_submit(t.engine, &r, NULL) > 0, "refused");
    while (sala_step(t.engine, NULL) > 0)
        while (sala_next_event(t.engine, &ev)) {
            if (ev.type == SALA_EVENT_ROWS) {
                memcpy(row, ev.logits + (size_t)(ev.row_count - 1) * 97, sizeof row);
                have = 1;
            }
            if (ev.type != SALA_EVENT_TOKEN) continue;
            double sum = 0;
            CHECK(have && ev.top_count == 20, "%d best", ev.top_count);
            CHECK(fabs((double)ev.logprob - log_softmax(row, 97, ev.token)) < 1e-5,
                  "token %d (%s): %g, not %g", chosen, chosen < 20 ? "forced" : "free",
                  (double)ev.logprob, log_softmax(row, 97, ev.token));
            for (int i = 0; i < ev.top_count; i++) {
                CHECK(fabs((double)ev.top[i].logprob - log_softmax(row, 97, ev.top[i].token)) <
                          1e-5,
                      "best %d", i);
                CHECK(i == 0 || ev.top[i].logprob <= ev.top[i - 1].logprob,
                      "best %d is out of order", i);
                sum += exp((double)ev.top[i].logprob);
            }
            for (int k = 0; k < 97; k++)
                CHECK(log_softmax(row, 97, k) <= (double)ev.top[0].logprob + 1e-5, "%d is better",
                      k);
            CHECK(sum <= 1 + 1e-5, "the probabilities are %g together", sum);
            if (chosen < 20)
                CHECK(ev.token == tokens[50 + chosen], "token %d is not the forced one", chosen);
            chosen++;
            have = 0;
        }
    CHECK(chosen == 40, "%d tokens", chosen);
    session_close(&t);
}

// Forcing what would be chosen anyway changes nothing.
static void test_force(void) {
    int32_t tokens[100];
    fresh_tokens(tokens, 100, 314);
    session t = tiny_engine(64, 2);
    sala_request r = request_of(tokens, 100, 30);
    r.want_rows = SALA_ROWS_ALL;
    r.logprobs = 1;
    outcome *a = session_do(&t, &r);
    r.force = a->tokens;
    r.force_count = 17;
    outcome *b = session_do(&t, &r);
    CHECK(same_choices(&t.out[0], b), "tokens differ");
    CHECK(first_difference(&t, &t.out[0], b, 0, 129) < 0, "rows differ");
    sala_bias only = {42, 1000};
    r.force_count = 0;
    r.biases = &only;
    r.bias_count = 1;
    CHECK(session_do(&t, &r)->tokens[11] == 42, "the bias");
    session_close(&t);
}

static void test_rows_need_room(void) {
    int32_t tokens[20] = {0};
    sala_error err;
    session t = text_engine(); // without logits_rows
    for (int want = 1; want <= 3; want++) {
        sala_request r = request_of(tokens, 20, 2);
        r.want_rows = want;
        CHECK(session_try(&t, &r, &err) < 0 && err.code == SALA_E_ARGUMENT &&
                  has(&err, "logits-rows"),
              "want_rows %d was not refused", want);
    }
    session_run(&t);
    session_close(&t);
}

// With events waiting a step is an error that changes nothing, however often it is tried.
static void test_events_wait(void) {
    int32_t tokens[300];
    sala_error err;
    fresh_tokens(tokens, 300, 315);
    session t = tiny_engine(64, 3), plain = tiny_engine(64, 3);
    for (int i = 0; i < 3; i++) {
        sala_request r = request_of(tokens + i, 20 + 90 * i, 15);
        r.want_rows = SALA_ROWS_ALL;
        session_ask(&t, &r);
        session_ask(&plain, &r);
    }
    session_run(&plain);
    int refused = 0;
    while (sala_step(t.engine, &err) > 0) {
        sala_event ev;
        for (;;) {
            int code = sala_step(t.engine, &err);
            if (!sala_next_event(t.engine, &ev)) {
                if (code >= 0)
                    die("a step with events waiting",
                        "was taken"); // none waited: this one was a real step
                break;
            }
            CHECK(code == SALA_E_STATE && err.code == SALA_E_STATE && err.text[0], "code %d", code);
            refused += code == SALA_E_STATE;
            take_event(&t, &ev);
            sala_info info;
            sala_get_info(t.engine, &info);
            if (t.engine->event_taken == t.engine->event_count) break;
        }
    }
    CHECK(refused > 50, "%d refusals", refused);
    for (int i = 0; i < 3; i++) {
        CHECK(same_choices(&t.out[i], &plain.out[i]), "request %d: tokens differ", i);
        CHECK(first_difference(&t, &t.out[i], &plain.out[i], 0, 20 + 90 * i + 14) < 0,
              "request %d: rows differ", i);
    }
    session_close(&t);
    session_close(&plain);
}

TEST_MAIN(TEST(test_chat_replay), TEST(test_chat_is_its_history), TEST(test_cancel_in_prefill),
          TEST(test_cancel_in_decode), TEST(test_cancel_before_prefill), TEST(test_prompt_lengths),
          TEST(test_full_context), TEST(test_waiting_for_memory),
          TEST(test_kept_sequences_hold_all), TEST(test_not_a_number), TEST(test_dense_len),
          TEST(test_stop_strings), TEST(test_stop_strings_overlap), TEST(test_end_tokens),
          TEST(test_text_prompt), TEST(test_logprobs), TEST(test_force), TEST(test_rows_need_room),
          TEST(test_events_wait))
