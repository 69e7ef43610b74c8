#define SALA_IMPLEMENTATION
#include "../sala.h"
// Sessions: what is saved anywhere in a request goes on as if nothing had happened, bit by bit; every other file is
// refused, and nothing is left of it.
#include "check.h"
#include "model.h"
#include "poison.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static char folder[64], file[96];

static void must_save(session *t, int64_t id, const char *path) {
    sala_error err;
    if (sala_save(t->engine, id, path, &err) < 0) die("sala_save", err.text);
}

static int64_t must_load(session *t, const char *path, sala_session *found) {
    sala_error err;
    int64_t id = sala_load(t->engine, path, found, &err);
    if (id < 0) die("sala_load", err.text);
    return id;
}

// An outcome for the request that a file brought: its events are collected like those of others.
static outcome *adopt(session *t, const sala_session *found, const outcome *before) {
    t->out = (outcome *)need(realloc(t->out, (size_t)(t->count + 1) * sizeof *t->out));
    t->capacity = t->count + 1;
    outcome *o = &t->out[t->count++];
    memset(o, 0, sizeof *o);
    o->id = found->request;
    o->text = (char *)need(calloc(1, 1));
    size_t context = (size_t)t->info.context;
    o->seen = (unsigned char *)need(calloc(context, 1));
    o->logits = (float *)need(malloc(context * (size_t)t->info.vocab * 4));
    if (t->hidden_row) o->hidden = (float *)need(malloc(context * t->hidden_row * 4));
    if (t->hidden_row) o->blocks = (int32_t *)need(malloc(context * t->blocks_row * 4 + 4));
    // What came before the save is in the outcome already: tokens are counted on.
    o->count = before->count;
    o->token_capacity = before->count + 64;
    o->tokens = (int32_t *)need(calloc((size_t)o->token_capacity, 4));
    o->logprobs = (float *)need(calloc((size_t)o->token_capacity, 4));
    if (before->count) {
        memcpy(o->tokens, before->tokens, (size_t)before->count * 4);
        memcpy(o->logprobs, before->logprobs, (size_t)before->count * 4);
    }
    o->first_position = before->first_position;
    o->prefill_done = before->prefill_done;
    o->bytes = before->bytes;
    o->text = (char *)need(realloc(o->text, before->bytes + 1));
    memcpy(o->text, before->text, before->bytes + 1);
    return o;
}

static outcome copy_of(const outcome *o) { // as it is now
    outcome c = *o;
    c.tokens = (int32_t *)need(malloc((size_t)o->count * 4 + 4));
    c.logprobs = (float *)need(malloc((size_t)o->count * 4 + 4));
    c.text = (char *)need(malloc(o->bytes + 1));
    if (o->count) memcpy(c.tokens, o->tokens, (size_t)o->count * 4);
    if (o->count) memcpy(c.logprobs, o->logprobs, (size_t)o->count * 4);
    memcpy(c.text, o->text, o->bytes + 1);
    return c;
}

static void copy_free(outcome *c) {
    free(c->tokens);
    free(c->logprobs);
    free(c->text);
}

// The positions that both have must be the same, and from `from` on the second must have all.
static void same_rows(const session *t, const outcome *whole, const outcome *rest, int64_t to,
                      const char *what) {
    int64_t from = 0;
    while (from < to && !rest->seen[from]) from++;
    CHECK(first_difference(t, whole, rest, from, to) < 0, "%s: position %lld differs", what,
          (long long)first_difference(t, whole, rest, from, to));
}

static sala_options engine_options(int chunk) {
    sala_options o = small_options(chunk, 64);
    o.hidden_states = 1;
    o.context = 600;
    return o;
}

HELPER void write_bytes(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) die(path, "cannot write");
}

static sala__file read_bytes(const char *path) {
    sala__file f;
    sala_error err;
    if (sala__map_file(path, &f, &err) < 0) die(path, err.text);
    return f;
}

static int same_files(const char *a, const char *b) {
    sala__file x = read_bytes(a), y = read_bytes(b);
    int same = x.size == y.size && memcmp(x.data, y.data, (size_t)x.size) == 0;
    sala__unmap_file(&x);
    sala__unmap_file(&y);
    return same;
}

// ---- going on ----

// A request of a chat's third turn, with all that it can ask for.
static sala_request asked(const int32_t *tokens, int prompt, int more) {
    static const sala_bias biases[] = {{3, 1.5f}, {17, -INFINITY}};
    static const int32_t stop[] = {96};
    sala_request r = request_of(tokens, prompt, more);
    request_sampled(&r, 4711);
    r.min_p = 0.01f;
    r.top_k = 60;
    r.repetition_penalty = 1.3f;
    r.presence_penalty = 0.2f;
    r.frequency_penalty = 0.1f;
    r.biases = biases;
    r.bias_count = 2;
    r.stop_tokens = stop;
    r.stop_token_count = 1;
    r.force = tokens + 20;
    r.force_count = 3;
    r.logprobs = 2;
    r.keep = 1;
    r.want_rows = SALA_ROWS_ALL;
    return r;
}

// Save at every step of a request, load in another engine (other chunk, context, company), and run to the end; then
// a further turn on top.
static void test_every_step(void) {
    int32_t tokens[500];
    sala_session found;
    check_seed = 91;
    random_tokens(tokens, 500, 97);
    sala_options o = engine_options(64), other = engine_options(128);
    other.context = other.kv_tokens = 900;
    other.threads = 1;
    other.spec = "off";
    o.spec = "ngram";
    session a = session_open(TINY, &o);
    outcome at[40];
    char path[40][96];
    int saved = 0, phases = 0;
    sala_request first = request_of(tokens, 70, 9), r = asked(tokens + 100, 200, 24);
    first.keep = 1;
    r.sequence = session_do(&a, &first)->sequence;
    int i = session_ask(&a, &r);
    for (; saved < 40 && !a.out[i].finished; saved++) {
        if (saved) { // at work
            snprintf(path[saved], sizeof *path, "%s/step-%d", folder, saved);
            at[saved] = copy_of(&a.out[i]);
            must_save(&a, saved % 2 ? a.out[i].id : r.sequence, path[saved]);
        } else { // waiting: the sequence alone
            at[saved] = copy_of(&a.out[i]);
            snprintf(path[saved], sizeof *path, "%s/kept", folder);
            must_save(&a, r.sequence, path[saved]);
        }
        session_step(&a);
    }
    outcome *whole = &a.out[i];
    CHECK(saved > 10 && whole->finished, "%d saves", saved);
    sala_request next = request_of(tokens + 400, 50, 6);
    next.sequence = whole->sequence;
    next.keep = 1;
    next.want_rows = SALA_ROWS_ALL;
    int last = session_ask(&a, &next);
    session_run(&a);
    whole = &a.out[i];
    memory end = memory_of(&a, r.sequence);
    for (int k = 0; k < saved; k += k < 4 || k > saved - 3 ? 1 : 3) {
        session b = session_open(TINY, &other);
        b.after_step = poison; // nothing but what was loaded is used
        sala_request noise = request_of(tokens + 30, 40, 30);
        if (k % 2) session_ask(&b, &noise), session_step(&b);
        int64_t id = must_load(&b, path[k], &found);
        CHECK(found.sequence == id && (found.request == id) == (k > 0), "step %d: request %lld", k,
              (long long)found.request);
        outcome *rest;
        if (k == 0) { // nothing but the sequence: ask the same
            CHECK(found.token_count == 79 && found.last == a.out[0].tokens[8], "%lld tokens",
                  (long long)found.token_count);
            sala_request again = r;
            again.sequence = id;
            rest = session_do(&b, &again);
        } else {
            CHECK(sala_release(b.engine, id, NULL) == SALA_E_STATE, "released at work");
            rest = adopt(&b, &found, &at[k]);
            while (!rest->finished) session_step(&b);
        }
        CHECK(same_choices(whole, rest), "step %d: other tokens or text", k);
        CHECK(whole->timings.prompt_tokens == rest->timings.prompt_tokens &&
                  rest->timings.prefill_seconds > 0,
              "step %d: %lld prompt tokens", k, (long long)rest->timings.prompt_tokens);
        same_rows(&b, whole, rest, 79 + 200 + whole->count - 1, path[k]);
        sala_request again = next;
        again.sequence = id;
        outcome *y = session_do(&b, &again);
        CHECK(same_choices(&a.out[last], y), "step %d: the next turn differs", k);
        memory m = memory_of(&b, id);
        CHECK(memory_same(&end, &m), "step %d: the memory differs", k);
        phases = (int)sequence_of(&b, id)->phase_count;
        CHECK(phases == 6, "step %d: %d phases", k, phases);
        session_run(&b);
        free(m.data);
        session_give_up(&b, id);
        session_close(&b);
    }
    const sala__phase *p = sequence_of(&a, r.sequence)->phases;
    static const int32_t firsts[] = {0, 70, 78, 279};
    for (int k = 0; k < 4; k++)
        CHECK(p[k].first == firsts[k] && p[k].verified == k % 2, "phase %d begins at %d", k,
              p[k].first);
    for (int k = 0; k < saved; k++) copy_free(&at[k]), unlink(path[k]);
    free(end.data);
    session_give_up(&a, r.sequence);
    session_close(&a);
}

// Saved, loaded, saved: the same file. Nothing of others, and nothing that chance left in a page, is in it.
static void test_same_file(void) {
    int32_t tokens[300];
    char again[96];
    check_seed = 92;
    random_tokens(tokens, 300, 97);
    snprintf(again, sizeof again, "%s/again", folder);
    for (int prompt = 15; prompt < 300; prompt += 47) {
        session a = session_open(TINY, NULL), b = session_open(TINY, NULL);
        a.after_step = b.after_step = poison;
        sala_request r = request_of(tokens, prompt, 5);
        r.keep = 1;
        int64_t id = session_do(&a, &r)->sequence;
        session_do(&b, &r); // so that pages are others
        must_save(&a, id, file);
        int64_t loaded = must_load(&b, file, NULL);
        must_save(&b, loaded, again);
        CHECK(same_files(file, again), "a prompt of %d: another file", prompt);
        unlink(again);
        session_give_up(&a, id);
        session_give_up(&b, loaded);
        session_give_up(&b, b.out[0].sequence);
        session_close(&a);
        session_close(&b);
    }
    unlink(file);
}

static void temporary(void) {
    snprintf(folder, sizeof folder, "/tmp/sala-session-XXXXXX");
    if (!mkdtemp(folder)) die(folder, "mkdtemp");
    snprintf(file, sizeof file, "%s/session", folder);
}

static void test_nothing_is_left(void) {
    CHECK(rmdir(folder) == 0, "%s is not empty", folder);
}

int main(int argc, char **argv) {
    static const check_entry tests[] = {
        TEST(test_every_step),
        TEST(test_same_file),
        TEST(test_nothing_is_left),
    };
    check_test = "main";
    temporary();
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
