#define SALA_IMPLEMENTATION
#include "../../sala.h"
// Saved sessions. Input: an allocation that fails, the kind of checksums (even: right ones, so that what lies behind
// them is reached), then changes of four bytes each to a good file: where, and what. With a second byte above 250
// the rest of the input is the file. What loads must run to its end, whatever it says.
#include "fuzz.h"

#define CONFIG "tests/data/vectors/tiny/config.json"

static unsigned char *good; // a request in the middle of its output
static int64_t good_size;
static char path[] = "/tmp/sala-fuzz-XXXXXX";

static sala *engine(fuzz_memory *memory) {
    sala_options o;
    sala_error err;
    memset(&o, 0, sizeof o);
    o.synthetic = 1;
    o.threads = 1;
    o.max_sequences = 2;
    o.context = 128;
    o.hooks.user = memory;
    o.hooks.allocate = fuzz_allocate;
    o.hooks.log = fuzz_log;
    sala *s = sala_open(CONFIG, &o, &err);
    REQUIRE(s);
    return s;
}

static void write_file(const uint8_t *data, size_t size) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f && fwrite(data, 1, size, f) == size && fclose(f) == 0);
}

static void make_good(void) {
    static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2};
    static const int32_t stop[] = {96}, guess[] = {5, 6};
    static const sala_bias bias[] = {{7, 0.5f}};
    fuzz_memory memory = {0, 0, 0};
    sala_request r;
    sala_error err;
    sala__file f;
    REQUIRE(close(mkstemp(path)) == 0);
    memset(&r, 0, sizeof r);
    r.tokens = tokens, r.token_count = 20, r.max_tokens = 9, r.temperature = 1;
    r.repetition_penalty = 1.5f, r.force = tokens, r.force_count = 2;
    r.stop_tokens = stop, r.stop_token_count = 1, r.guess = guess, r.guess_count = 2;
    r.biases = bias, r.bias_count = 1;
    sala *s = engine(&memory);
    REQUIRE(sala_submit(s, &r, &err) == 1);
    for (int i = 0; i < 3; i++) {
        sala_event e;
        REQUIRE(sala_step(s, &err) == 1);
        while (sala_next_event(s, &e)) continue;
    }
    REQUIRE(sala_save(s, 1, path, &err) == 0 && sala__map_file(path, &f, &err) == 0);
    good_size = f.size;
    good = (unsigned char *)malloc((size_t)good_size);
    memcpy(good, f.data, (size_t)good_size);
    sala__unmap_file(&f);
    sala_close(s);
}

static void seal(unsigned char *data, int64_t size) { // of one block
    sala__session f;
    memset(&f, 0, sizeof f);
    f.total = size - SALA__SESSION_START - 8;
    REQUIRE(f.total > 0 && f.total < (int64_t)SALA__SESSION_BLOCK - 8);
    sala__session_start(&f, data);
    uint64_t own = sala__checksum(0, data + SALA__SESSION_START + 8, (size_t)f.total);
    uint64_t sum = sala__checksum(f.sum, &own, 8);
    memcpy(data + SALA__SESSION_START, &sum, 8);
}

static int take(sala *s, fuzz_memory *memory, unsigned fail) {
    sala_error err;
    sala_event e;
    memory->calls = 0;
    memory->fail_at = fail;
    int64_t id = sala_load(s, path, NULL, &err);
    memory->fail_at = 0;
    if (id < 0) {
        fuzz_error((int)id, &err);
        return 0;
    }
    int steps = 0, code;
    while ((code = sala_step(s, &err)) > 0) {
        while (sala_next_event(s, &e)) continue;
        REQUIRE(++steps < 400);
    }
    if (code < 0) fuzz_error(code, &err);
    sala_release(s, id, NULL); // kept, or gone
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const size_t reach = SALA__SESSION_START + 8 + 96 + 100 + sizeof(sala_timings) + 800;
    fuzz_memory memory = {0, 0, 0};
    if (!good) make_good();
    if (size < 2) return 0;
    if (data[1] > 250) {
        write_file(data + 2, size - 2);
    } else {
        unsigned char *copy = (unsigned char *)malloc((size_t)good_size);
        memcpy(copy, good, (size_t)good_size);
        for (size_t i = 2; i + 4 <= size && i < 64; i += 4) {
            size_t at = (size_t)(data[i] + 256 * data[i + 1]) % reach;
            copy[at] = data[i + 2];
            copy[at + 1] = data[i + 3];
        }
        if (data[1] % 2 == 0) seal(copy, good_size);
        write_file(copy, (size_t)good_size);
        free(copy);
    }
    sala *s = engine(&memory);
    take(s, &memory, data[0]);
    if (data[1] <= 250) write_file(good, (size_t)good_size);
    if (data[1] <= 250) REQUIRE(take(s, &memory, 0)); // it is as good as ever
    sala_info info;
    sala_get_info(s, &info);
    REQUIRE(info.sequences_resident == 0 && info.requests_active == 0 &&
            info.kv_tokens_reserved == 0);
    sala_close(s);
    REQUIRE(memory.live == 0);
    unlink(path);
    return 0;
}
