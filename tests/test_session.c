#define SALA_IMPLEMENTATION
#define SALA__SESSION_BLOCK ((size_t)2048) // so that files have many
#include "../sala.h"
// Sessions: what is saved anywhere in a request goes on as if nothing had happened, bit by bit; every other file is
// refused, and nothing is left of it.
#include "check.h"
#include "counted.h"
#include "device.h"
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
    unlink(path); // what has mapped the old one keeps it
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

// What a test saves and where it goes on.
typedef struct plan {
    const char *model;
    sala_options a, b;           // saves; loads
    sala_request first, r, next; // three turns; the second is saved at every step
    int from, stride;            // steps that are tried
    int same;                    // speculation too is that of the engine that saved
} plan;

static outcome at[64]; // of the second turn when it was saved
static char saved[64][96];

// Save before every step of the second turn. Returns how often; the first time it still waits.
static int save_steps(session *a, const plan *c, int i, int64_t sequence) {
    int n = 0;
    for (; n < 64 && !a->out[i].finished; n++) {
        snprintf(saved[n], sizeof *saved, "%s/step-%d", folder, n);
        at[n] = outcome_copy(&a->out[i]);
        must_save(a, n % 2 ? a->out[i].id : sequence, saved[n]);
        session_step(a);
    }
    CHECK(n > c->from && a->out[i].finished, "%d saves", n);
    return n;
}

// What is loaded and saved at once is what was saved.
static void relay(const plan *c, const char *path) {
    session t = session_open(c->model, &c->b);
    must_save(&t, must_load(&t, path, NULL), path);
    sala_close(t.engine); // with all that is in it
}

// Load one of these files, with others at work, and run to the end.
static int64_t go_on(session *b, const plan *c, int k, const outcome *whole) {
    sala_session found;
    outcome *rest;
    sala_request noise = c->first;
    noise.keep = 0;
    if (noise.tokens) noise.token_count = 9;
    if (k % 2 && !b->engine->on_gpu) session_ask(b, &noise), session_step(b);
    if (c->stride == 1 && k % 3 == 1) relay(c, saved[k]);
    int64_t id = must_load(b, saved[k], &found);
    CHECK(found.sequence == id && found.request == (k ? id : 0), "step %d: request %lld", k,
          (long long)found.request);
    if (k == 0) { // the sequence alone: ask the same
        CHECK((c->first.text || found.token_count == c->first.token_count + c->first.max_tokens) &&
                  found.last >= 0,
              "%lld tokens", (long long)found.token_count);
        sala_request again = c->r;
        again.sequence = id;
        rest = session_do(b, &again);
    } else {
        CHECK(sala_release(b->engine, id, NULL) == SALA_E_STATE, "released at work");
        rest = session_adopt(b, found.request, &at[k]);
        while (!rest->finished) session_step(b);
    }
    CHECK(same_choices(whole, rest), "step %d: other tokens or text", k);
    CHECK(whole->timings.prompt_tokens == rest->timings.prompt_tokens &&
              rest->timings.prefill_seconds > 0 && rest->timings.queue_seconds >= 0,
          "step %d: %lld prompt tokens", k, (long long)rest->timings.prompt_tokens);
    if (c->r.want_rows)
        same_rows(b, whole, rest, whole->first_position + whole->count - 1, saved[k]);
    return id;
}

// Save at every step of a request, load in another engine, and run to the end; then a further turn on top.
// Returns how often it was saved.
static int every_step(const plan *c) {
    session a = session_open(c->model, &c->a);
    int64_t sequence = session_do(&a, &c->first)->sequence;
    sala_request r = c->r, next = c->next;
    r.sequence = next.sequence = sequence;
    int i = session_ask(&a, &r), n = save_steps(&a, c, i, sequence);
    int last = session_ask(&a, &next);
    session_run(&a);
    char end[96], mine[96];
    snprintf(end, sizeof end, "%s/end", folder);
    snprintf(mine, sizeof mine, "%s/mine", folder);
    must_save(&a, sequence, end);
    memory m = {NULL, 0, 0}, want = m;
    if (!c->same) want = memory_of(&a, sequence);
    for (int k = c->from; k < n; k += c->stride) {
        session b = session_open(c->model, &c->b);
        if (!c->b.draft && !b.engine->on_gpu)
            b.after_step = poison; // nothing is used but what was loaded
        int64_t id = go_on(&b, c, k, &a.out[i]);
        next.sequence = id;
        outcome *y = session_do(&b, &next);
        CHECK(same_choices(&a.out[last], y), "step %d: the next turn differs", k);
        sala__sequence *q = sequence_of(&b, id), *p = sequence_of(&a, sequence);
        CHECK(q->phase_count == 6 && memcmp(q->phases, p->phases, 6 * sizeof *p->phases) == 0,
              "step %d: %zu phases", k, q->phase_count);
        if (c->same) must_save(&b, id, mine);
        if (!c->same) m = memory_of(&b, id);
        CHECK(c->same ? same_files(end, mine) : memory_same(&want, &m),
              "step %d: the memory differs", k);
        free(m.data);
        m.data = NULL;
        session_run(&b);
        session_give_up(&b, id);
        session_close(&b);
    }
    for (int k = 0; k < n; k++) outcome_copy_free(&at[k]), unlink(saved[k]);
    unlink(end);
    unlink(mine);
    free(want.data);
    session_give_up(&a, sequence);
    session_close(&a);
    return n;
}

static plan plan_of(const char *model, const int32_t *tokens) {
    plan c;
    memset(&c, 0, sizeof c);
    c.model = model;
    c.a = c.b = engine_options(64);
    c.first = request_of(tokens, 70, 9);
    c.r = asked(tokens + 100, 200, 24);
    c.next = request_of(tokens + 400, 50, 6);
    c.first.keep = c.r.keep = c.next.keep = 1;
    c.next.want_rows = SALA_ROWS_ALL;
    c.stride = 1;
    return c;
}

// Other chunks, another context, other threads, and no speculation where there were n-grams.
static void test_every_step(void) {
    int32_t tokens[500];
    check_seed = 91;
    random_tokens(tokens, 500, 97);
    plan c = plan_of(TINY, tokens);
    c.a.spec = "ngram";
    c.b.context = c.b.kv_tokens = 900;
    c.b.chunk = 128;
    c.b.threads = 1;
    c.b.spec = "off";
    every_step(&c);
}

// Text: half characters, special tokens, and always something held back: stop strings that begin everywhere in the
// text and end nowhere.
static void test_text(void) {
    enum { STOPS = 40 };
    char stop[STOPS][16];
    const char *stops[STOPS];
    plan c = plan_of(SALA_TINY, NULL);
    memset(&c.r, 0, sizeof c.r);
    memset(&c.next, 0, sizeof c.next);
    c.first = c.r;
    c.a.hidden_states = c.b.hidden_states = c.a.logits_rows = c.b.logits_rows = 0;
    c.first.text = "Once upon a time there was a brave fox named Pip.";
    c.r.text = " The fox said: a b \xC3\xA9 \xE2\x82\xAC a \xC3\xA9";
    c.next.text = " Then";
    c.first.keep = c.r.keep = c.next.keep = 1;
    c.first.max_tokens = 5;
    c.r.max_tokens = 30;
    c.r.temperature = 1.5f;
    c.r.repetition_penalty = 1.2f;
    c.r.special_text = c.r.ignore_eos = c.first.ignore_eos = c.next.ignore_eos = 1;
    c.next.max_tokens = 4;
    c.stride = 5;
    session t = session_open(SALA_TINY, &c.a);
    sala_request r = c.r;
    r.sequence = session_do(&t, &c.first)->sequence;
    const outcome *o = session_do(&t, &r);
    CHECK(o->bytes > 50, "%zu bytes of text", o->bytes);
    for (int i = 0; i < STOPS; i++) {
        size_t from = (o->bytes - 8) * (size_t)i / STOPS;
        snprintf(stop[i], sizeof stop[i], "%.*s~~~", 8, o->text + from);
        stops[i] = stop[i];
    }
    session_give_up(&t, o->sequence);
    session_close(&t);
    c.r.stop = stops;
    c.r.stop_count = STOPS;
    every_step(&c);
}

// A sequence that goes on without a prompt: its text joins what was before, spaces included.
static void test_joined(void) {
    char joined[2000] = "";
    const int32_t *tokens;
    sala_error err;
    sala_options o = engine_options(64);
    o.logits_rows = o.hidden_states = 0;
    session t = session_open(SALA_TINY, &o);
    sala_request r;
    memset(&r, 0, sizeof r);
    r.text = "Once upon a time";
    r.max_tokens = 24;
    r.keep = 1;
    session_do(&t, &r);
    r.max_tokens = 3;
    session_do(&t, &r);
    for (int k = 0; k < 8; k++) {
        const outcome *whole = &t.out[0], *part = &t.out[k + 1];
        CHECK(part->bytes < 200, "%zu bytes", part->bytes);
        strncat(joined, part->text, part->bytes);
        must_save(&t, part->sequence, file);
        session_give_up(&t, part->sequence);
        r.sequence = must_load(&t, file, NULL);
        r.text = NULL;
        int64_t n = sala_history(t.engine, r.sequence, &tokens, &err);
        CHECK(n > 3 * k + 3 && tokens[n - 1] == whole->tokens[3 * k + 2], "%lld tokens",
              (long long)n);
        if (k < 7) session_do(&t, &r);
    }
    const outcome *whole = &t.out[0];
    CHECK(strlen(joined) == whole->bytes && memcmp(joined, whole->text, whole->bytes) == 0,
          "\"%s\" is not \"%s\"", joined, whole->text);
    CHECK(sala_history(t.engine, 999, &tokens, &err) == SALA_E_ARGUMENT && strstr(err.text, "999"),
          "%s", err.text);
    session_give_up(&t, r.sequence);
    session_give_up(&t, whole->sequence);
    session_close(&t);
    unlink(file);
}

// A head for models of sala-tiny's shape.
static const char *write_head(const char *name, int vocab) {
    static char path[2][96];
    char *to = path[vocab != 300];
    snprintf(to, sizeof path[0], "%s/%s", folder, name);
    put_head(to, 2, vocab);
    return to;
}

// The draft head goes on with its trees; another one begins anew, and the text is the same.
static void test_draft(void) {
    int32_t tokens[500];
    check_seed = 93;
    random_tokens(tokens, 500, 250);
    const char *head = write_head("head.json", 300), *other = write_head("other.json", 200);
    for (int way = 0; way < 4; way++) {
        plan c = plan_of(SALA_TINY "/config.json", tokens);
        c.r.token_count = 90;
        c.r.max_tokens = 10;
        c.next = request_of(tokens + 400, 5, 2);
        c.next.keep = 1;
        c.stride = way ? 6 : 3;
        c.a.synthetic = c.b.synthetic = 1;
        c.a.draft = head;
        c.a.spec = "eagle";
        c.a.spec_tree = "4,2,9";
        c.a.draft_window = 128;
        if (way < 3) c.b = c.a;
        c.same = way == 0;
        if (way == 1) c.b.draft = other;
        if (way == 2) c.b.draft_window = 64;
        every_step(&c); // way 3: no head at all
    }
    unlink(head);
    unlink(other);
}

// A request that began with another one's pages: saved at every step, it goes on in its own engine, in one
// that knows nothing and in one that has such a prefix too.
static void test_prefixes(void) {
    int32_t tokens[400];
    sala_options off = engine_options(64), on = off;
    off.reuse = "off";
    const char *model = TINY;
    random_tokens(tokens, 400, 97);
    sala_request first = request_of(tokens, 200, 4), r = request_of(tokens, 390, 8);
    r.keep = 1;
    session w = session_open(model, &off), a = session_open(model, &on);
    outcome *whole = session_do(&w, &r);
    memory want = memory_of(&w, whole->sequence);
    session_do(&a, &first);
    int i = session_ask(&a, &r), n = 0;
    for (session_step(&a); !a.out[i].finished; n++, session_step(&a)) {
        snprintf(saved[n], sizeof *saved, "%s/step-%d", folder, n);
        at[n] = outcome_copy(&a.out[i]);
        must_save(&a, a.out[i].id, saved[n]);
    }
    CHECK(n >= 8 && a.out[i].timings.reused_tokens == 192, "%d saves, %lld tokens reused", n,
          (long long)a.out[i].timings.reused_tokens);
    for (int k = 0; k < n; k++) {
        sala_session found;
        session b = session_open(model, &on), *t = k % 3 ? &b : &a;
        if (k % 3 == 2) session_do(&b, &first);
        int64_t id = must_load(t, saved[k], &found);
        outcome *rest = session_adopt(t, found.request, &at[k]);
        while (!rest->finished) session_step(t);
        memory m = memory_of(t, id);
        CHECK(same_choices(whole, rest) && memory_same(&want, &m), "step %d differs", k);
        CHECK(rest->timings.reused_tokens == 192 && rest->timings.prompt_tokens == 198,
              "step %d: %lld of the prompt, %lld reused", k, (long long)rest->timings.prompt_tokens,
              (long long)rest->timings.reused_tokens);
        free(m.data);
        session_give_up(t, id);
        session_close(&b);
        outcome_copy_free(&at[k]), unlink(saved[k]);
    }
    sala_info info;
    session_give_up(&a, a.out[i].sequence);
    sala_get_info(a.engine, &info);
    CHECK(info.kv_tokens_reserved == 0 && info.prefixes > 0, "%lld tokens are held",
          (long long)info.kv_tokens_reserved);
    free(want.data);
    session_give_up(&w, whole->sequence);
    session_close(&a);
    session_close(&w);
}

// On a GPU or the simulator: the same, between slots and pages that are others.
static void test_device(void) {
    int32_t tokens[500];
#ifdef __SANITIZE_ADDRESS__
    printf("skipped: the simulator is too slow under a sanitizer, as for test_cuda\n");
    return;
#endif
    if (!device_exists()) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        return;
    }
    check_seed = 94;
    random_tokens(tokens, 500, 250);
    const char *head = write_head("head.json", 300), *gpu_there = getenv("SALA_TEST_GPU");
    plan c = plan_of(gpu_there ? SALA_TINY "/config.json" : SALA_TINY, tokens);
    c.a.device = "cuda:0";
    c.a.hidden_states = 0;
    if (gpu_there) { // the simulator takes long to make weights
        c.a.synthetic = 1;
        c.a.draft = head;
        c.a.spec = "eagle";
        c.a.spec_tree = "3,2,7";
    }
    c.first = request_of(tokens, 59, 2); // the second turn's prompt goes beyond a chunk of 64
    c.r.token_count = 7;
    c.r.max_tokens = 4;
    c.r.force_count = 0;
    c.next = request_of(tokens + 90, 1, 2);
    c.first.keep = c.next.keep = 1;
    c.b = c.a;
    c.from = c.same = 1;
    c.stride = gpu_there ? 1 : 2;
    every_step(&c);
    unlink(head);
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

// ---- what is refused ----

enum { BLOCK = (int)SALA__SESSION_BLOCK };

static void refused(session *t, const char *path, int code, const char *word) {
    sala_error err;
    sala_session found;
    int64_t got = sala_load(t->engine, path, &found, &err);
    CHECK(got == code && err.code == code, "%lld instead of %d: %s", (long long)got, code,
          got < 0 ? err.text : "loaded");
    CHECK(got >= 0 || strstr(err.text, word), "\"%s\" is not in: %s", word, err.text);
    if (got > 0) sala_release(t->engine, got, NULL);
}

// The file again with right checksums, whatever stands between them.
static void seal(unsigned char *data, int64_t size) {
    uint64_t sum, own;
    sala__session f;
    memset(&f, 0, sizeof f);
    f.total = size - SALA__SESSION_START;
    f.total -= (f.total + (int64_t)SALA__SESSION_BLOCK - 1) / (int64_t)SALA__SESSION_BLOCK * 8;
    sala__session_start(&f, data);
    sum = f.sum;
    for (int64_t i = SALA__SESSION_START; i < size; i += (int64_t)SALA__SESSION_BLOCK) {
        int64_t n = size - i;
        if (n > (int64_t)SALA__SESSION_BLOCK) n = (int64_t)SALA__SESSION_BLOCK;
        own = sala__checksum(0, data + i + 8, (size_t)n - 8);
        sum = sala__checksum(sum, &own, 8);
        memcpy(data + i, &sum, 8);
    }
}

// A small session with a request in the middle of its output, and one in the middle of its prompt.
static session small_session(int64_t *id, int prompt) {
    int32_t tokens[200];
    check_seed = 95;
    random_tokens(tokens, 200, 97);
    sala_options o = engine_options(64);
    o.threads = 1;
    session t = session_open(TINY, &o);
    sala_request r = asked(tokens, prompt, 9);
    session_ask(&t, &r);
    *id = t.out[0].id;
    session_step(&t);
    session_step(&t);
    return t;
}

static void small_end(session *t) {
    session_cancel(t, 0);
    session_run(t);
    session_give_up(t, t->out[0].sequence);
    session_close(t);
}

// One byte or block is another, or the end is missing: every byte, every length.
static void test_damage(void) {
    int64_t id;
    sala_options o = engine_options(64);
    session t = small_session(&id, 30), b = session_open(TINY, &o);
    must_save(&t, id, file);
    sala__file f = read_bytes(file);
    unsigned char *data = (unsigned char *)need(malloc((size_t)f.size));
    const int64_t size = f.size;
    memcpy(data, f.data, (size_t)size);
    sala__unmap_file(&f);
    int fd = open(file, O_RDWR), loaded = 0;
    sala_error err;
    for (int64_t i = 0; i < size; i++) {
        unsigned char other = data[i] ^ (unsigned char)(1 << below(8));
        if (pwrite(fd, &other, 1, i) != 1) die(file, "pwrite");
        loaded += sala_load(b.engine, file, NULL, &err) >= 0 || err.code != SALA_E_FILE;
        if (pwrite(fd, data + i, 1, i) != 1) die(file, "pwrite");
    }
    for (int64_t i = SALA__SESSION_START; i + 2 * BLOCK <= size; i += BLOCK) { // two change places
        if (pwrite(fd, data + i, BLOCK, i + BLOCK) != BLOCK ||
            pwrite(fd, data + i + BLOCK, BLOCK, i) != BLOCK)
            die(file, "pwrite");
        loaded += sala_load(b.engine, file, NULL, &err) >= 0 || err.code != SALA_E_FILE;
        if (pwrite(fd, data + i, 2 * BLOCK, i) != 2 * BLOCK) die(file, "pwrite");
    }
    CHECK(size > SALA__SESSION_START + 9 * BLOCK, "one window holds %lld bytes", (long long)size);
    CHECK(loaded == 0, "%d of %lld altered files were taken", loaded, (long long)size);
    must_load(&b, file, NULL); // it is whole again, and the engine too
    for (int64_t n = size - 1; n >= 0; n--) {
        if (ftruncate(fd, n) != 0) die(file, "ftruncate");
        loaded += sala_load(b.engine, file, NULL, &err) >= 0 || err.code != SALA_E_FILE;
    }
    CHECK(loaded == 0, "%d shortened files were taken", loaded);
    data = (unsigned char *)need(realloc(data, (size_t)size + 1));
    data[size] = 0;
    write_bytes(file, data, (size_t)size + 1);
    refused(&b, file, SALA_E_FILE, "cut short or altered");
    close(fd);
    free(data);
    unlink(file);
    sala_close(b.engine); // with a request at work
    small_end(&t);
}

// Right checksums and wrong numbers: refused or harmless. `tests/fuzz/fuzz_session.c` tries many more.
static void test_forged(void) {
    static const int32_t values[] = {-1, 0, 1, 2, 7, 64, 97, 1000, 1 << 20, INT32_MAX, INT32_MIN};
    int64_t id;
    for (int prompt = 30; prompt < 200; prompt += 140) {
        session t = small_session(&id, prompt), b = session_open(TINY, NULL);
        must_save(&t, id, file);
        sala__file f = read_bytes(file);
        unsigned char *data = (unsigned char *)need(malloc((size_t)f.size));
        int refusals = 0;
        int64_t n, most = 96 + 16 + 9 * 4 + 30 * 4 + 100 + (int64_t)sizeof(sala_timings) + 300;
        for (int64_t at_byte = 32; at_byte < 32 + most; at_byte += 4) {
            memcpy(data, f.data, (size_t)f.size);
            int32_t *word = (int32_t *)(void *)(data + at_byte), old = *word;
            *word = values[below(11)];
            seal(data, f.size);
            write_bytes(file, data, (size_t)f.size);
            sala_error err;
            n = sala_load(b.engine, file, NULL, &err);
            refusals += n < 0;
            CHECK(n < 0 || *word != -1 || old == -1 || at_byte > 180, "byte %d: -1 for %d",
                  (int)at_byte, old);
            if (n < 0) continue;
            sala_cancel(b.engine, n, NULL);
            for (sala_event e; sala_step(b.engine, &err) > 0;)
                while (sala_next_event(b.engine, &e)) continue;
            sala_release(b.engine, n, NULL);
        }
        CHECK(refusals > most / 16, "%d of %d forged files were refused", refusals, (int)most / 4);
        sala__unmap_file(&f);
        free(data);
        session_close(&b);
        small_end(&t);
    }
    unlink(file);
}

static void forge(const unsigned char *data, int64_t size, size_t offset, const void *value,
                  size_t bytes) { // of the head
    unsigned char *copy = (unsigned char *)need(malloc((size_t)size));
    memcpy(copy, data, (size_t)size);
    memcpy(copy + SALA__SESSION_START + 8 + offset, value, bytes);
    seal(copy, size);
    write_bytes(file, copy, (size_t)size);
    free(copy);
}

static void test_foreign(void) {
    int64_t id;
    int32_t number = 99;
    sala_options o = engine_options(64);
    session t = small_session(&id, 30), b = session_open(TINY, &o);
    must_save(&t, id, file);
    sala__file f = read_bytes(file);
    refused(&b, "no/such/file", SALA_E_FILE, "no/such/file: cannot open: No such file");
    refused(&b, "tests", SALA_E_FILE, "tests: not a session");
    refused(&b, "tests/check.h", SALA_E_FILE, "tests/check.h: not a session");
    refused(&b, "/dev/null", SALA_E_FILE, "not a session");
    refused(&b, "", SALA_E_ARGUMENT, "no path");
    forge(f.data, f.size, offsetof(sala__session_head, device), "cuda sm_90", 11);
    refused(&b, file, SALA_E_DEVICE, "made on cuda sm_90, but this engine runs on cpu");
    number = 1;
    forge(f.data, f.size, offsetof(sala__session_head, w4a4), &number, 4);
    refused(&b, file, SALA_E_MODEL, "open the engine with prefill w4a4");
    forge(f.data, f.size, offsetof(sala__session_head, act_bytes), &number, 4);
    refused(&b, file, SALA_E_MODEL, "another model");
    unsigned char *copy = (unsigned char *)need(malloc((size_t)f.size));
    memcpy(copy, f.data, (size_t)f.size);
    copy[8] = 1;
    write_bytes(file, copy, (size_t)f.size);
    refused(&b, file, SALA_E_FILE, "a session of version 1, but sala");
    write_bytes(file, f.data, (size_t)f.size);
    free(copy);
    sala__unmap_file(&f);
    session_close(&b);
    o.dense_len = 128;
    b = session_open(TINY, &o);
    refused(&b, file, SALA_E_MODEL, "made with dense-len 60, but this engine has 128");
    session_close(&b);
    o.dense_len = 0;
    o.logits_rows = 64;
    for (int k = 0; k < 3; k++) { // too small for what its request may add, and for what is there
        o.context = k == 0 ? 38 : k == 1 ? 20 : 1;
        b = session_open(TINY, &o);
        refused(&b, file, SALA_E_ARGUMENT, "needs 39 tokens, more than the context of");
        session_close(&b);
    }
    o = engine_options(64);
    o.logits_rows = o.hidden_states = 0;
    b = session_open(TINY, &o);
    refused(&b, file, SALA_E_ARGUMENT, "its request cannot go on here: want_rows");
    session_close(&b);
    o = engine_options(64);
    o.max_sequences = 2;
    o.context = 64;
    o.kv_tokens = 80;
    b = session_open(TINY, &o);
    int64_t first = must_load(&b, file, NULL);
    refused(&b, file, SALA_E_MEMORY, "pages of the K/V cache, of which 2 are free");
    sala_close(b.engine);
    o.max_sequences = 1;
    b = session_open(TINY, &o);
    CHECK(first == 1 && must_load(&b, file, NULL) == 1, "the first sequence is %lld",
          (long long)first);
    refused(&b, file, SALA_E_MEMORY, "all 1 sequences are taken");
    sala_close(b.engine);
    b = session_open(SALA_TINY, NULL);
    refused(&b, file, SALA_E_MODEL, "another model");
    session_close(&b);
    o = (sala_options){.synthetic = 1, .threads = 1};
    b = session_open(TINY_CONFIG, &o); // of the same shape
    refused(&b, file, SALA_E_MODEL, "other weights");
    session_close(&b);
    unlink(file);
    small_end(&t);
}

// ---- what fails ----

static void not_saved(session *t, int64_t id, const char *path, int code, const char *word) {
    sala_error err;
    int got = sala_save(t->engine, id, path, &err);
    CHECK(got == code && err.code == code && strstr(err.text, word), "%d: %s", got, err.text);
}

static void test_no_room(void) {
    int64_t id;
    session t = small_session(&id, 30);
    struct rlimit old, low;
    char path[160], to[160];
    snprintf(path, sizeof path, "%s/no/such", folder);
    not_saved(&t, id, path, SALA_E_FILE, "cannot create: No such file");
    not_saved(&t, id, "/dev/full", SALA_E_FILE, "not a regular file");
    not_saved(&t, id, folder, SALA_E_FILE, "not a regular file");
    not_saved(&t, id, "", SALA_E_ARGUMENT, "no path");
    not_saved(&t, 77, file, SALA_E_ARGUMENT, "no sequence 77");
    not_saved(&t, 0, file, SALA_E_ARGUMENT, "no sequence 0");
    int32_t token = 5;
    sala_request later = request_of(&token, 1, 2);
    session_ask(&t, &later);
    not_saved(&t, t.out[t.count - 1].id, file, SALA_E_STATE,
              "still waits, so there is nothing to save of it");
    session_cancel(&t, t.count - 1);
    write_bytes(file, "what was there", 14);
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 3000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &low);
    not_saved(&t, id, file, SALA_E_FILE, "cannot write: File too large");
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, SIG_DFL);
    sala__file f = read_bytes(file);
    CHECK(f.size == 14 && memcmp(f.data, "what was there", 14) == 0, "the old file is gone");
    sala__unmap_file(&f);
    snprintf(path, sizeof path, "%s/link", folder); // leads to the file, and still does
    if (symlink(file, path) != 0) die(path, "symlink");
    must_save(&t, id, path);
    f = read_bytes(file);
    CHECK(f.size > 14 && readlink(path, to, sizeof to) > 0, "the link is no link any more");
    sala__unmap_file(&f);
    unlink(path);
    unlink(file);
    small_end(&t);
}

// Every allocation of saving and loading fails once: an error, and nothing is lost or left.
static void test_no_memory(void) {
    int32_t tokens[64];
    check_seed = 96;
    random_tokens(tokens, 64, 97);
    counter m;
    memset(&m, 0, sizeof m);
    sala_options o = engine_options(64);
    o.hooks.user = &m;
    o.hooks.allocate = counting;
    session t = session_open(TINY, &o);
    sala_request r = asked(tokens, 30, 9);
    session_ask(&t, &r);
    int64_t id = t.out[0].id;
    session_step(&t);
    sala_error err;
    int fails = 0, code = -1;
    for (; code < 0 && fails < 50; fails++) {
        m.fail_at = m.calls + fails + 1;
        int64_t live = m.live;
        code = sala_save(t.engine, id, file, &err);
        CHECK(code == 0 || code == SALA_E_MEMORY, "%d: %s", code, err.text);
        CHECK(m.live == live, "%lld allocations are left", (long long)(m.live - live));
    }
    CHECK(fails > 2 && code == 0, "%d allocations of saving", fails);
    int64_t got = -1;
    for (fails = 0; got < 0 && fails < 50; fails++) {
        int64_t live = m.live;
        m.fail_at = m.calls + fails + 1;
        got = sala_load(t.engine, file, NULL, &err);
        CHECK(got > 0 || got == SALA_E_MEMORY, "%lld: %s", (long long)got, err.text);
        CHECK(got > 0 || m.live <= live + 1, // the slot keeps its page list
              "%lld allocations are left", (long long)(m.live - live));
    }
    m.fail_at = 0;
    CHECK(fails > 8 && got > 0, "%d allocations of loading", fails);
    sala_cancel(t.engine, got, NULL);
    for (sala_event e; sala_step(t.engine, NULL) > 0;)
        while (sala_next_event(t.engine, &e))
            if (e.request == id) take_event(&t, &e);
    CHECK(t.out[0].finished, "the original did not end");
    session_give_up(&t, got);
    session_give_up(&t, t.out[0].sequence);
    session_close(&t);
    CHECK(m.live == 0, "%lld allocations are left in the end", (long long)m.live);
    unlink(file);
}

static void die_saving(void *user, const char *what, double fraction) {
    if (*(int *)user && strcmp(what, "saving") == 0 && fraction > 0.3) raise(SIGKILL);
}

// Killed in the middle of a save: the old file is there, and a part that nobody takes for one.
static void test_kill(void) {
    int32_t tokens[64];
    int deadly = 0, status = 0;
    check_seed = 97;
    random_tokens(tokens, 64, 97);
    sala_options o = engine_options(64);
    o.hooks.user = &deadly;
    o.hooks.progress = die_saving;
    session t = session_open(SALA_TINY, &o); // a file of several blocks
    sala_request r = request_of(tokens, 60, 2);
    r.keep = 1;
    int64_t id = session_do(&t, &r)->sequence;
    write_bytes(file, "what was there", 14);
    pid_t child = fork();
    if (child == 0) {
        deadly = 1;
        sala_save(t.engine, id, file, NULL);
        _exit(0);
    }
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it ended with %d", status);
    sala__file f = read_bytes(file);
    CHECK(f.size == 14 && memcmp(f.data, "what was there", 14) == 0, "the old file is gone");
    sala__unmap_file(&f);
    char command[128];
    snprintf(command, sizeof command, "rm %s/session.part-??????", folder);
    CHECK(system(command) == 0, "there is no part");
    must_save(&t, id, file);
    session_give_up(&t, must_load(&t, file, NULL));
    session_give_up(&t, id);
    session_close(&t);
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
        TEST(test_every_step), TEST(test_text),
        TEST(test_joined),     TEST(test_draft),
        TEST(test_prefixes),   TEST(test_device),
        TEST(test_same_file),  TEST(test_damage),
        TEST(test_forged),     TEST(test_foreign),
        TEST(test_no_room),    TEST(test_no_memory),
        TEST(test_kill),       TEST(test_nothing_is_left),
    };
    check_test = "main";
    temporary();
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
