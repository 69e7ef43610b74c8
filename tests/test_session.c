#define SALA_IMPLEMENTATION
#include "../sala.h"
// Sessions: what is saved anywhere in a request goes on as if nothing had happened, bit by bit; every other file is
// refused, and nothing is left of it.
#include "check.h"
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

// What a test saves and where it goes on.
typedef struct plan {
    const char *model;
    sala_options a, b;           // saves; loads
    sala_request first, r, next; // three turns; the second is saved at every step
    int most;                    // steps that are tried
    int same;                    // speculation too is that of the engine that saved
} plan;

static outcome at[64]; // of the second turn when it was saved
static char saved[64][96];

// Save before every step of the second turn. Returns how often; the first time it still waits.
static int save_steps(session *a, const plan *c, int i, int64_t sequence) {
    int n = 0;
    for (; n < 64 && !a->out[i].finished; n++) {
        snprintf(saved[n], sizeof *saved, "%s/step-%d", folder, n);
        at[n] = copy_of(&a->out[i]);
        must_save(a, n % 2 ? a->out[i].id : sequence, saved[n]);
        session_step(a);
    }
    CHECK(n >= c->most && a->out[i].finished, "%d saves", n);
    return n;
}

// Load one of these files, with others at work, and run to the end.
static int64_t go_on(session *b, const plan *c, int k, const outcome *whole) {
    sala_session found;
    outcome *rest;
    sala_request noise = c->first;
    noise.keep = 0;
    if (k % 2) session_ask(b, &noise), session_step(b);
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
        rest = adopt(b, &found, &at[k]);
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
    for (int k = 0; k < n; k += k < 3 || k >= n - 2 ? 1 : (n - 4 + c->most) / c->most) {
        session b = session_open(c->model, &c->b);
        if (!c->b.draft) b.after_step = poison; // nothing is used but what was loaded
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
    for (int k = 0; k < n; k++) copy_free(&at[k]), unlink(saved[k]);
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
    c.most = 8;
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

// Text: half characters, beginnings of stop strings, special tokens.
static void test_text(void) {
    static const char *const stops[] = {"zebra zebra", "fox named Pip. Pip", "a \xC3\xA9"};
    plan c = plan_of(SALA_TINY, NULL);
    memset(&c.r, 0, sizeof c.r);
    memset(&c.next, 0, sizeof c.next);
    c.first = c.r;
    c.a.hidden_states = c.b.hidden_states = c.a.logits_rows = c.b.logits_rows = 0;
    c.first.tokens = NULL;
    c.first.text = "Once upon a time there was a brave fox named Pip.";
    c.r.text = " The fox said: a b \xC3\xA9 \xE2\x82\xAC a \xC3\xA9";
    c.next.text = " Then";
    c.first.keep = c.r.keep = c.next.keep = 1;
    c.first.max_tokens = 5;
    c.r.max_tokens = 40;
    c.r.temperature = 1.5f;
    c.r.repetition_penalty = 1.2f;
    c.r.stop = stops;
    c.r.stop_count = 3;
    c.r.special_text = c.r.ignore_eos = c.first.ignore_eos = c.next.ignore_eos = 1;
    c.next.max_tokens = 4;
    every_step(&c);
}

// A head for models of sala-tiny's shape.
static const char *write_head(const char *name, int vocab) {
    static char path[2][96];
    char *to = path[vocab != 300];
    snprintf(to, sizeof path[0], "%s/%s", folder, name);
    FILE *f = fopen(to, "wb");
    if (!f) die(to, "cannot write");
    fprintf(f,
            "{\"draft_vocab_size\":%d,\"intermediate_size\":640,\"num_attention_heads\":2,"
            "\"eagle_config\":{\"eagle_aux_hidden_state_layer_ids\":[1,3,5]}}",
            vocab);
    fclose(f);
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
        c.r.max_tokens = 12;
        c.most = way ? 2 : 4;
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

// On a GPU or the simulator: the same, between slots and pages that are others.
static void test_device(void) {
    int32_t tokens[500];
    if (!device_exists()) {
        printf("skipped: no simulator (build/libsala_sim.so) and no SALA_TEST_GPU\n");
        return;
    }
    check_seed = 94;
    random_tokens(tokens, 500, 250);
    const char *head = write_head("head.json", 300);
    plan c = plan_of(SALA_TINY "/config.json", tokens);
    c.a.device = "cuda:0";
    c.a.synthetic = 1;
    c.a.hidden_states = 0;
    c.a.draft = head;
    c.a.spec = "eagle";
    c.a.spec_tree = "3,2,7";
    c.first = request_of(tokens, 20, 3);
    c.r.token_count = 70;
    c.r.max_tokens = 8;
    c.next = request_of(tokens + 90, 3, 2);
    c.first.keep = c.next.keep = 1;
    c.b = c.a;
    c.most = c.same = 1;
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
        TEST(test_every_step), TEST(test_text),      TEST(test_draft),
        TEST(test_device),     TEST(test_same_file), TEST(test_nothing_is_left),
    };
    check_test = "main";
    temporary();
    return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);
}
