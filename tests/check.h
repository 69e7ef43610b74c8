/*  check.h - the whole test framework. A test program includes this, then sala.h with its implementation,
    writes functions `static void name(void)` that call CHECK, lists them in TESTS and ends with TEST_MAIN.
    A failed CHECK prints file, line and values and marks the test as failed; the program goes on.
    `./test_x [word ...]` runs the tests whose names contain one of the words. The last line is
    "N passed, N failed"; the exit status is 0 only when nothing failed and something ran. */
#ifndef SALA_CHECK_H
#define SALA_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__ // tests write files that begin so: a sanitized build may run beside another one
#define SCRATCH "build/sanitized-"
#else
#define SCRATCH "build/"
#endif

static int check_failures; // of the running test
static const char *check_test;

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            check_failed(__FILE__, __LINE__, #condition), printf("      " __VA_ARGS__),            \
                printf("\n");                                                                      \
    } while (0)

static void check_failed(const char *file, int line, const char *text) {
    check_failures++;
    printf("  %s:%d: in %s: %s is false\n", file, line, check_test, text);
}

typedef struct check_entry {
    const char *name;
    void (*run)(void);
} check_entry;

static int check_main(const check_entry *tests, int count, int argc, char **argv) {
    int passed = 0, failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < count; i++) {
        int wanted = argc < 2;
        for (int a = 1; a < argc; a++) wanted |= strstr(tests[i].name, argv[a]) != NULL;
        if (!wanted) continue;
        check_failures = 0;
        check_test = tests[i].name;
        tests[i].run();
        printf("%s %s\n", check_failures ? "FAILED" : "ok    ", tests[i].name);
        if (check_failures)
            failed++;
        else
            passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}

#define TEST(name)                                                                                 \
    { #name, name }
#define TEST_MAIN(...)                                                                             \
    int main(int argc, char **argv) {                                                              \
        static const check_entry tests[] = {__VA_ARGS__};                                          \
        return check_main(tests, (int)(sizeof tests / sizeof tests[0]), argc, argv);               \
    }

// A small generator for test inputs (splitmix64): the same numbers everywhere.
static uint64_t check_seed = 1;
static inline uint64_t check_random(void) {
    uint64_t z = (check_seed += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static inline float check_uniform(void) { // [-1, 1)
    return (float)(check_random() >> 40) * (1.0f / 8388608.0f) - 1.0f;
}

#endif
