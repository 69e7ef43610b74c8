#define SALA_IMPLEMENTATION
#include "../../sala.h"
// A safetensors file in memory. Input: one byte (an allocation that fails), then the file without
// its length field: a header up to the first zero byte, then the data. So a mutation inside the
// header does not also have to correct the length. With a first byte of 255 the input is the plain
// file.
#include "fuzz.h"

static void check_tensors(sala__checkpoint *c, const uint8_t *file, size_t size) {
    for (size_t i = 0; i < c->tensor_count; i++) {
        const sala__tensor *t = &c->tensors[i];
        const uint8_t *p = (const uint8_t *)t->data;
        REQUIRE(p >= file + 8 && t->bytes >= 0 && p + t->bytes <= file + size);
        REQUIRE(t->rank >= 0 && t->rank <= SALA__MAX_RANK && !t->used);
        REQUIRE(t->format >= -1 && t->format <= SALA_F32);
        if (t->format >= 0) {
            int64_t count = t->format == SALA_F32 ? 4 : 2;
            for (int k = 0; k < t->rank; k++) count *= t->shape[k];
            REQUIRE(count == t->bytes);
        }
        REQUIRE(sala__checkpoint_find(c, t->name) == t);
        REQUIRE(i == 0 || strcmp(c->tensors[i - 1].name, t->name) < 0);
        uint8_t sum = 0; // touch every byte
        for (int64_t k = 0; k < t->bytes; k++) sum = (uint8_t)(sum + p[k]);
        volatile uint8_t keep = sum;
        (void)keep;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_memory memory = {0, 0, 0};
    sala__checkpoint c;
    sala_error err;
    char *strings = NULL;
    if (size == 0) return 0;
    memset(&c, 0, sizeof c);
    c.env.user = &memory;
    c.env.allocate = fuzz_allocate;
    if (data[0] < 32) memory.fail_at = data[0];
    int plain = data[0] == 255;
    data++;
    size--;
    const uint8_t *zero = size ? (const uint8_t *)memchr(data, 0, size) : NULL;
    uint64_t header = zero ? (uint64_t)(zero - data) : size;
    size_t total = plain ? size : size - (zero != NULL) + 8;
    uint8_t *file = (uint8_t *)malloc(total ? total : 1);
    if (plain) {
        memcpy(file, data, size);
    } else {
        memcpy(file, &header, 8);
        memcpy(file + 8, data, header);
        if (zero) memcpy(file + 8 + header, zero + 1, size - header - 1);
    }
    int code = sala__safetensors_parse(&c, "fuzz", file, (int64_t)total, &strings, &err);
    if (code == 0) code = sala__tensors_sort(&c, &err);
    if (code < 0)
        fuzz_error(code, &err);
    else
        check_tensors(&c, file, total);
    sala__release(&c.env, strings);
    sala__checkpoint_close(&c);
    free(file);
    REQUIRE(memory.live == 0);
    return 0;
}
