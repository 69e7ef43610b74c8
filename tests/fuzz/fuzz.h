/*  fuzz.h - what the fuzz targets share. Each target defines LLVMFuzzerTestOneInput. With libFuzzer:

        clang -g -O1 -fsanitize=fuzzer,address,undefined tests/fuzz/fuzz_json.c -lm -lpthread
        ./a.out -dict=tests/fuzz/words.dict tests/fuzz/corpus/json

    or, with any compiler, a program that runs it on every file that it is given:

        gcc -g -DREPLAY -fsanitize=address,undefined tests/fuzz/fuzz_json.c -lm -lpthread
        ./a.out tests/fuzz/corpus/json/[files]

    Allocations are counted: what is left after an input is a finding, and so is a request for more
    than 2 GB. */
#ifndef SALA_FUZZ_H
#define SALA_FUZZ_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition), abort(); \
    } while (0)

typedef struct fuzz_memory {
    int64_t live;
    uint64_t calls, fail_at; // fail_at: this allocation fails; 0: none
} fuzz_memory;

static inline void *fuzz_allocate(void *user, void *pointer, size_t size) {
    fuzz_memory *m = (fuzz_memory *)user;
    if (size == 0) {
        m->live -= pointer != NULL;
        free(pointer);
        return NULL;
    }
    REQUIRE(size < (size_t)1 << 31);
    if (++m->calls == m->fail_at) return NULL;
    void *p = realloc(pointer, size);
    m->live += p && !pointer;
    return p;
}

static inline void fuzz_log(void *user, int level, const char *line) {
    (void)user;
    (void)level;
    REQUIRE(strlen(line) > 0);
}

// An error is a code and one line of text that is not cut short in the middle of nothing.
static inline void fuzz_error(int code, const sala_error *err) {
    REQUIRE(code < 0 && code >= SALA_E_DEVICE && err->code == code);
    REQUIRE(strlen(err->text) > 10);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#ifdef REPLAY
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        sala__file file;
        sala_error err;
        if (sala__map_file(argv[i], &file, &err) < 0) {
            fprintf(stderr, "%s\n", err.text);
            return 1;
        }
        // A copy of exactly the file's size: reading beyond it is seen by a sanitizer.
        uint8_t *copy = (uint8_t *)malloc(file.size ? (size_t)file.size : 1);
        if (file.size) memcpy(copy, file.data, (size_t)file.size);
        LLVMFuzzerTestOneInput(copy, (size_t)file.size);
        free(copy);
        sala__unmap_file(&file);
    }
    printf("%d inputs passed\n", argc - 1);
    return argc < 2;
}
#endif

#endif
