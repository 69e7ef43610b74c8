#define SALA_IMPLEMENTATION
#include "../sala.h"
// make lossless-test [DEVICE=cuda]: 10,000 tokens of sala-tiny with every kind of draft, greedy and sampled, must be
// those of plain decoding. Not part of make test, which compares the same in shorter streams: this takes minutes on a CPU.
#include "check.h"

enum { TOKENS = 10000, SAMPLINGS = 2 };

static const char *device = "auto";
static int32_t plain[SAMPLINGS][TOKENS], got[TOKENS];

typedef struct drafts {
    const char *spec, *test, *tree, *head;
} drafts;

// One stream of TOKENS tokens. Returns what its drafts did.
static sala_timings stream(const drafts *d, int sampled, int32_t *out) {
    sala_error err = {0, ""};
    sala_options o;
    sala_request ask;
    sala_event ev;
    sala_timings done;
    memset(&o, 0, sizeof o);
    memset(&ask, 0, sizeof ask);
    memset(&done, 0, sizeof done);
    o.device = device;
    o.max_sequences = 1;
    o.spec = d->spec;
    o.spec_test = d->test;
    o.spec_tree = d->tree;
    o.draft = d->head;
    ask.text = "User: Write a JSON list of five animals. Bot:";
    ask.max_tokens = TOKENS;
    ask.ignore_eos = 1;
    ask.seed = 11;
    ask.temperature = sampled ? 0.8f : 0;
    ask.top_p = sampled ? 0.95f : 0;
    if (d->test) {
        ask.guess = plain[sampled];
        ask.guess_count = TOKENS;
    }
    sala *s = sala_open("models/sala-tiny", &o, &err);
    int64_t n = 0;
    int code = s && sala_submit(s, &ask, &err) > 0 ? 1 : -1;
    while (code > 0 && (code = sala_step(s, &err)) > 0)
        while (sala_next_event(s, &ev)) {
            if (ev.type == SALA_EVENT_TOKEN && n < TOKENS) out[n++] = ev.token;
            if (ev.type == SALA_EVENT_FINISH) done = ev.timings;
        }
    if (code < 0) printf("%s\n", err.text), exit(2);
    sala_close(s);
    if (n != TOKENS) printf("%lld tokens came\n", (long long)n), exit(2);
    return done;
}

static void test_streams(void) {
    static const drafts kinds[] = {{"ngram", NULL, NULL, NULL},
                                   {"auto", "oracle:80", NULL, NULL},
                                   {"eagle", "oracle", "7,2,15", NULL},
                                   {"eagle", "oracle:60", "15,4,32", NULL},
                                   {"eagle", "oracle:80", "15,1,16", NULL},
                                   {"eagle", "random", "5,2,11", NULL},
                                   {"eagle", "adversarial", "3,3,12", NULL},
                                   {"eagle", NULL, "7,2,15", "models/sala-tiny-eagle3"},
                                   {"auto", NULL, NULL, "models/sala-tiny-eagle3/nvfp4"}};
    static const drafts off = {"off", NULL, NULL, NULL};
    for (int sampled = 0; sampled < SAMPLINGS; sampled++) {
        stream(&off, sampled, plain[sampled]);
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            const drafts *d = &kinds[i];
            sala_timings t = stream(d, sampled, got);
            int64_t steps = t.verifies[0] + t.verifies[1] + t.verifies[2], same = 0;
            while (same < TOKENS && got[same] == plain[sampled][same]) same++;
            printf("      %s, spec %s %s %s %s: %.2f tokens a step\n",
                   sampled ? "sampled" : "greedy", d->spec, d->test ? d->test : "",
                   d->tree ? d->tree : "", d->head ? d->head : "",
                   (double)(TOKENS - 1) / (double)steps);
            CHECK(same == TOKENS, "another token at %lld", (long long)same);
            CHECK(t.verifies[1] + t.verifies[2] > 0, "nothing was drafted");
        }
    }
}

int main(int argc, char **argv) {
    if (argc > 1) device = argv[1];
    static const check_entry tests[] = {TEST(test_streams)};
    return check_main(tests, 1, 1, argv);
}
