// The CUDA simulator (tests/sim): that it does what the kernels need, and catches what it must.
// SALA_SIM names the library (default build/libsala_sim.so).
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "check.h"
#include "sim/selftest.h"

enum { THREADS = 128, LAUNCH_FAILED = 719 };

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

// ---- the library ----

typedef struct launch_attribute {
    unsigned id;
    char pad[4];
    union {
        char pad[64];
        int allowed;
    } value;
} launch_attribute;

typedef struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

// The driver's and NVRTC's functions that are called here: X(name, arguments).
#define FUNCTIONS(X)                                                                               \
    X(cuInit, unsigned)                                                                            \
    X(cuDeviceGetName, char *, int, int)                                                           \
    X(cuDeviceGetAttribute, int *, int, int)                                                       \
    X(cuDevicePrimaryCtxRetain, void **, int)                                                      \
    X(cuDevicePrimaryCtxRelease_v2, int)                                                           \
    X(cuCtxPushCurrent_v2, void *)                                                                 \
    X(cuCtxPopCurrent_v2, void **)                                                                 \
    X(cuMemGetInfo_v2, size_t *, size_t *)                                                         \
    X(cuMemAlloc_v2, uint64_t *, size_t)                                                           \
    X(cuMemFree_v2, uint64_t)                                                                      \
    X(cuMemHostAlloc, void **, size_t, unsigned)                                                   \
    X(cuMemFreeHost, void *)                                                                       \
    X(cuMemcpyHtoDAsync_v2, uint64_t, const void *, size_t, void *)                                \
    X(cuMemcpyDtoHAsync_v2, void *, uint64_t, size_t, void *)                                      \
    X(cuMemcpyDtoDAsync_v2, uint64_t, uint64_t, size_t, void *)                                    \
    X(cuMemsetD8Async, uint64_t, unsigned char, size_t, void *)                                    \
    X(cuStreamCreate, void **, unsigned)                                                           \
    X(cuStreamDestroy_v2, void *)                                                                  \
    X(cuStreamSynchronize, void *)                                                                 \
    X(cuStreamBeginCapture_v2, void *, int)                                                        \
    X(cuStreamEndCapture, void *, void **)                                                         \
    X(cuGraphInstantiateWithFlags, void **, void *, unsigned long long)                            \
    X(cuGraphLaunch, void *, void *)                                                               \
    X(cuGraphExecDestroy, void *)                                                                  \
    X(cuGraphDestroy, void *)                                                                      \
    X(cuModuleLoadData, void **, const void *)                                                     \
    X(cuModuleUnload, void *)                                                                      \
    X(cuModuleGetFunction, void **, void *, const char *)                                          \
    X(cuFuncSetAttribute, void *, int, int)                                                        \
    X(cuFuncGetAttribute, int *, int, void *)                                                      \
    X(cuLaunchKernelEx, const launch_config *, void *, void **, void **)                           \
    X(cuEventCreate, void **, unsigned)                                                            \
    X(cuEventRecord, void *, void *)                                                               \
    X(cuEventSynchronize, void *)                                                                  \
    X(cuEventElapsedTime, float *, void *, void *)                                                 \
    X(cuEventDestroy_v2, void *)                                                                   \
    X(cuGetErrorName, int, const char **)                                                          \
    X(nvrtcVersion, int *, int *)                                                                  \
    X(nvrtcCreateProgram, void **, const char *, const char *, int, const char *const *,           \
      const char *const *)                                                                         \
    X(nvrtcCompileProgram, void *, int, const char *const *)                                       \
    X(nvrtcGetCUBINSize, void *, size_t *)                                                         \
    X(nvrtcGetCUBIN, void *, char *)                                                               \
    X(nvrtcGetProgramLogSize, void *, size_t *)                                                    \
    X(nvrtcGetProgramLog, void *, char *)                                                          \
    X(nvrtcDestroyProgram, void **)
#define DECLARE(name, ...) static int (*name)(__VA_ARGS__);
FUNCTIONS(DECLARE)
static long (*sala_sim_leaks)(void);
static const char *(*sala_sim_error)(void);
static long (*sala_sim_launches)(void);

static void *context, *stream, *module;
static char *cubin;
static size_t cubin_size;
static int missing; // there is no compiler, so no library, and the tests have nothing to do

static void *symbol(void *library, const char *name) {
    void *p = dlsym(library, name);
    if (!p) printf("  %s is not in the library\n", name);
    if (!p) exit(1);
    return p;
}

static char *read_text(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    char *text = calloc(1, 1 << 20);
    size_t n = fread(text, 1, (1 << 20) - 1, f);
    fclose(f);
    text[n] = 0;
    return text;
}

// Compiles a source with one header and the given options; returns NVRTC's code. The log is the
// caller's to free.
static int compile(const char *source, const char *const *options, int count, char **log) {
    char *header = read_text("tests/sim/selftest.h");
    const char *headers[] = {header}, *names[] = {"selftest.h"};
    void *program;
    size_t log_size;
    int code = nvrtcCreateProgram(&program, source, "selftest.cu", 1, headers, names);
    if (code == 0) code = nvrtcCompileProgram(program, count, options);
    nvrtcGetProgramLogSize(program, &log_size);
    *log = malloc(log_size);
    nvrtcGetProgramLog(program, *log);
    free(cubin);
    nvrtcGetCUBINSize(program, &cubin_size);
    cubin = malloc(cubin_size + 1);
    nvrtcGetCUBIN(program, cubin);
    nvrtcDestroyProgram(&program);
    free(header);
    return code;
}

static int compile_selftest(void) {
    static const char *const options[] = {"--gpu-architecture=sm_90", "--fmad=false", "-std=c++17",
                                          "-DWORD='a b'"};
    char *source = read_text("tests/sim/selftest.cu"), *log = NULL;
    int code = source ? compile(source, options, 4, &log) : -1;
    if (code)
        printf("  the compiler says:\n%s\n", source ? log : "tests/sim/selftest.cu is missing");
    free(log);
    free(source);
    return code;
}

// Opens the library and starts the simulator once; false if there is no compiler for it.
static int setup(void) {
    static int done;
    if (done) return !missing;
    done = 1;
    if (system("${CXX:-c++} --version >/dev/null 2>&1") != 0) {
        printf("  skipped: no C++ compiler\n");
        missing = 1;
        return 0;
    }
    const char *path = getenv("SALA_SIM");
    void *library = dlopen(path ? path : "build/libsala_sim.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) printf("  %s\n", dlerror());
    if (!library) exit(1);
#define LOAD(name, ...) *(void **)&name = symbol(library, #name);
    FUNCTIONS(LOAD)
    LOAD(sala_sim_leaks, void)
    LOAD(sala_sim_error, void)
    LOAD(sala_sim_launches, void)
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxPushCurrent_v2(context) ||
        compile_selftest() || cuStreamCreate(&stream, 1) || cuModuleLoadData(&module, cubin)) {
        printf("  the simulator does not start: %s\n", sala_sim_error());
        exit(1);
    }
    return 1;
}

// ---- helpers ----

// After a failed kernel the context is dead: everything is made anew.
static void revive(void) {
    if (module) cuModuleUnload(module);
    if (stream) cuStreamDestroy_v2(stream);
    cuDevicePrimaryCtxRelease_v2(0);
    cuDevicePrimaryCtxRetain(&context, 0);
    CHECK(cuStreamCreate(&stream, 1) == 0 && cuModuleLoadData(&module, cubin) == 0, " ");
}

static uint64_t device_new(const void *data, size_t size) {
    uint64_t p = 0;
    CHECK(cuMemAlloc_v2(&p, size) == 0, "%zu bytes", size);
    if (data) CHECK(cuMemcpyHtoDAsync_v2(p, data, size, stream) == 0, " ");
    CHECK(cuStreamSynchronize(stream) == 0, " ");
    return p;
}

static void fetch(void *to, uint64_t from, size_t size) {
    CHECK(cuMemcpyDtoHAsync_v2(to, from, size, stream) == 0, " ");
    CHECK(cuStreamSynchronize(stream) == 0, " ");
}

static selftest_args arguments(uint64_t in, uint64_t out, uint64_t counter, int mode, int count) {
    selftest_args a = {(void *)(uintptr_t)in, (void *)(uintptr_t)out, (int *)(uintptr_t)counter,
                       mode, count};
    return a;
}

static int launch(const char *name, unsigned blocks, unsigned shared, int dependent,
                  selftest_args a) {
    void *function, *params[] = {&a};
    launch_attribute attribute = {.id = 6, .value.allowed = 1};
    launch_config c = {{blocks, 1, 1}, {THREADS, 1, 1}, shared,
                       stream,         &attribute,      dependent ? 1u : 0u};
    char full[64];
    snprintf(full, sizeof full, "self_%s", name);
    int code = cuModuleGetFunction(&function, module, full);
    CHECK(code == 0, "%s: %d", full, code);
    return code ? code : cuLaunchKernelEx(&c, function, params, NULL);
}

static void run(const char *name, unsigned blocks, unsigned shared, selftest_args a) {
    int code = launch(name, blocks, shared, 0, a);
    CHECK(code == 0, "%s: %d", name, code);
    code = cuStreamSynchronize(stream);
    CHECK(code == 0, "%s: %d", name, code);
}

// The kernel must fail with a text that holds `word`.
static void run_fails(const char *name, unsigned blocks, unsigned shared, selftest_args a,
                      const char *word) {
    int code = launch(name, blocks, shared, 0, a);
    if (code == 0) code = cuStreamSynchronize(stream);
    CHECK(code == LAUNCH_FAILED, "%s mode %d: %d, not an error: %s", name, a.mode, code, word);
    CHECK(strstr(sala_sim_error(), word), "%s mode %d: %s", name, a.mode, sala_sim_error());
    CHECK(cuStreamSynchronize(stream) == LAUNCH_FAILED, "the error does not stay");
    revive();
}

static void set_seed(int seed) {
    char text[16];
    snprintf(text, sizeof text, "%d", seed);
    setenv("SALA_SIM_SEED", text, 1);
}

// ---- the tests ----

static void device(void) {
    if (!setup()) return;
    char name[64] = "";
    int value = 0;
    cuDeviceGetName(name, sizeof name, 0);
    CHECK(!strcmp(name, "sala simulator"), "%s", name);
    CHECK(cuDeviceGetAttribute(&value, 75, 0) == 0 && value == 9, "%d", value);
    CHECK(cuDeviceGetAttribute(&value, 76, 0) == 0 && value == 0, "%d", value);
    CHECK(cuDeviceGetAttribute(&value, 97, 0) == 0 && value == 232448, "%d", value);
    CHECK(cuDeviceGetAttribute(&value, 16, 0) == 0 && value == 4, "%d", value);
    void *popped = NULL;
    CHECK(cuCtxPopCurrent_v2(&popped) == 0 && popped == context, " ");
    uint64_t p;
    CHECK(cuMemAlloc_v2(&p, 16) == 201, "works without a context");
    CHECK(cuCtxPushCurrent_v2(context) == 0, " ");
}

static void indices(void) {
    if (!setup()) return;
    enum { BLOCKS = 3 * 2 * 2 };
    uint64_t out = device_new(NULL, BLOCKS * THREADS * 4);
    static unsigned got[BLOCKS * THREADS];
    void *function;
    selftest_args a = arguments(0, out, 0, 0, 0);
    void *params[] = {&a};
    launch_config c = {{3, 2, 2}, {16, 4, 2}, 0, stream, NULL, 0};
    CHECK(cuModuleGetFunction(&function, module, "self_indices") == 0, " ");
    CHECK(cuModuleGetFunction(&(void *){NULL}, module, "self_nothing") == 500, " ");
    int threads = 0;
    CHECK(cuFuncGetAttribute(&threads, 0, function) == 0 && threads == THREADS, "%d", threads);
    CHECK(cuLaunchKernelEx(&c, function, params, NULL) == 0, " ");
    fetch(got, out, sizeof got);
    int wrong = 0;
    for (unsigned b = 0; b < BLOCKS; b++)
        for (unsigned t = 0; t < THREADS; t++) {
            unsigned want = b % 3 | (b / 3 % 2) << 4 | (b / 6) << 8 | (t % 16) << 12 |
                            (t / 16 % 4) << 20 | (t / 64) << 24;
            wrong += got[b * THREADS + t] != want;
        }
    CHECK(wrong == 0, "%d", wrong);
    c.block[0] = 32; // more than its bounds
    CHECK(cuLaunchKernelEx(&c, function, params, NULL) == 1, " ");
    c.block[0] = 16;
    c.shared = 65536; // more than was allowed
    CHECK(cuLaunchKernelEx(&c, function, params, NULL) == 1, " ");
    CHECK(cuFuncSetAttribute(function, 8, 65536) == 0, " ");
    CHECK(cuFuncSetAttribute(function, 8, 232449) == 1, " ");
    CHECK(cuLaunchKernelEx(&c, function, params, NULL) == 0, " ");
    CHECK(cuStreamSynchronize(stream) == 0, " ");
    cuMemFree_v2(out);
}

static void copies(void) {
    if (!setup()) return;
    static unsigned in[3 * THREADS * 4], got[16 * THREADS];
    for (unsigned i = 0; i < 3 * THREADS * 4; i++) in[i] = i;
    uint64_t from = device_new(in, sizeof in), out = device_new(NULL, sizeof got);
    for (int seed = 1; seed <= 4; seed++) {
        set_seed(seed);
        run("copies", 1, 4 * THREADS * 16, arguments(from, out, 0, 0, 0));
        fetch(got, out, sizeof got);
        for (unsigned stage = 0; stage < 4; stage++)
            for (unsigned t = 0; t < THREADS; t++) {
                unsigned none = 0xFFFFFFFFu, zero = t % 2 ? (2 * THREADS + t) * 4 : 0;
                unsigned want[] = {stage > 0 ? t * 4 : none, stage > 1 ? (THREADS + t) * 4 : none,
                                   stage > 2 ? zero : none, stage > 2 ? t * 4 : none};
                for (unsigned i = 0; i < 4; i++) {
                    unsigned value = got[(stage * 4 + i) * THREADS + t];
                    CHECK(value == want[i], "stage %u, copy %u, thread %u: %x", stage, i, t, value);
                }
            }
    }
    static const char *const words[] = {
        "16-byte aligned",   "16-byte aligned", "outside of shared", "outside of device",
        "outside of device", "16-byte aligned", "outside of shared"};
    for (int mode = 0; mode < 7; mode++) {
        from = device_new(in, sizeof in); // gone with the failed context
        run_fails("wrong_copy", 1, 1024, arguments(from, 0, 0, mode, sizeof in), words[mode]);
    }
}

static float bf16_value(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void mma(void) {
    if (!setup()) return;
    struct {
        uint16_t a[16][16], b[16][8];
        float d[16][8];
    } in;
    static float got[4][16][8];
    for (int i = 0; i < 256; i++)
        in.a[i / 16][i % 16] =
            (uint16_t)(0x3F00 + check_random() % 256 + (check_random() % 2 << 15));
    for (int i = 0; i < 128; i++) {
        in.b[i / 8][i % 8] = (uint16_t)(0x3F00 + check_random() % 256 + (check_random() % 2 << 15));
        in.d[i / 8][i % 8] = check_uniform();
    }
    uint64_t from = device_new(&in, sizeof in), out = device_new(NULL, sizeof got);
    run("mma", 1, 0, arguments(from, out, 0, 0, 1));
    fetch(got, out, sizeof got);
    int wrong = 0;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            float sum = in.d[i][j];
            for (int k = 0; k < 16; k++) sum += bf16_value(in.a[i][k]) * bf16_value(in.b[k][j]);
            for (int warp = 0; warp < 4; warp++) wrong += sum != got[warp][i][j];
        }
    CHECK(wrong == 0, "%d of 512 differ", wrong);
    cuMemFree_v2(from);
    cuMemFree_v2(out);
}

static void ldmatrix(void) {
    if (!setup()) return;
    uint16_t in[4][8][8];
    uint32_t got[2][32][4];
    for (int i = 0; i < 256; i++) in[i / 64][i / 8 % 8][i % 8] = (uint16_t)(i * 7);
    uint64_t from = device_new(in, sizeof in), out = device_new(NULL, sizeof got);
    run("ldmatrix", 1, 512, arguments(from, out, 0, 0, 0));
    fetch(got, out, sizeof got);
    int wrong = 0;
    for (int lane = 0; lane < 32; lane++)
        for (int j = 0; j < 4; j++) {
            int g = lane / 4, c = lane % 4 * 2;
            wrong += got[0][lane][j] != (in[j][g][c] | (uint32_t)in[j][g][c + 1] << 16);
            wrong += got[1][lane][j] != (in[j][c][g] | (uint32_t)in[j][c + 1][g] << 16);
        }
    CHECK(wrong == 0, "%d of 256 differ", wrong);
    run_fails("ldmatrix", 1, 544, arguments(from, out, 0, 1, 0), "16-byte aligned");
    from = device_new(in, sizeof in), out = device_new(NULL, sizeof got);
    run_fails("ldmatrix", 1, 544, arguments(from, out, 0, 2, 0), "outside of shared");
}

static void shuffles(void) {
    if (!setup()) return;
    static int got[13][THREADS];
    uint64_t out = device_new(NULL, sizeof got);
    for (int seed = 1; seed <= 5; seed++) {
        set_seed(seed);
        run("shuffles", 1, 0, arguments(0, out, 0, 0, 0));
        fetch(got, out, sizeof got);
        int wrong = 0;
        for (int t = 0; t < THREADS; t++) {
            int warp = t & ~31, lane = t & 31;
            unsigned ballot = 0;
            for (int i = 0; i < 32; i++) ballot |= (unsigned)((warp + i) % 3 == 0) << i;
            int want[] = {warp + 5,
                          t ^ 9,
                          lane < 3 ? t : t - 3,
                          lane > 28 ? t : t + 3,
                          t ^ 4,
                          (t & ~3) + 1,
                          (int)ballot,
                          warp == 32,
                          warp < 64,
                          26,
                          1,
                          0,
                          warp + 7};
            for (int i = 0; i < 13; i++) {
                wrong += want[i] != got[i][t];
                if (want[i] != got[i][t] && wrong < 5)
                    printf("  %d, thread %d: %d, not %d\n", i, t, got[i][t], want[i]);
            }
        }
        CHECK(wrong == 0, "seed %d: %d differ", seed, wrong);
    }
    cuMemFree_v2(out);
}

// Runs `reverse` with some seeds and counts those with a wrong result.
static int reverse_errors(int mode) {
    int in[THREADS], got[THREADS], errors = 0;
    for (int i = 0; i < THREADS; i++) in[i] = i * i;
    uint64_t from = device_new(in, sizeof in), out = device_new(NULL, sizeof got);
    for (int seed = 1; seed <= 8; seed++) {
        set_seed(seed);
        run("reverse", 1, THREADS * 4, arguments(from, out, 0, mode, 0));
        fetch(got, out, sizeof got);
        int wrong = 0;
        for (int t = 0; t < THREADS; t++)
            wrong |= got[t] != in[mode >= 2 ? t ^ 31 : THREADS - 1 - t];
        errors += wrong;
    }
    cuMemFree_v2(from);
    cuMemFree_v2(out);
    return errors;
}

static void barriers(void) {
    if (!setup()) return;
    int right = reverse_errors(0), none = reverse_errors(1);
    CHECK(right == 0, "%d seeds go wrong with the barrier", right);
    CHECK(none == 8, "only %d seeds go wrong without the barrier", none);
    int warp = reverse_errors(2), no_warp = reverse_errors(3);
    CHECK(warp == 0, "%d seeds go wrong with __syncwarp", warp);
    CHECK(no_warp == 8, "only %d seeds go wrong without __syncwarp", no_warp);
    int got[64];
    uint64_t out = device_new(NULL, sizeof got);
    run("leavers", 1, THREADS * 4, arguments(0, out, 0, 0, 0));
    fetch(got, out, sizeof got);
    for (int t = 0; t < 64; t++) CHECK(got[t] == 95 - t, "%d: %d", t, got[t]);
    cuMemFree_v2(out);
}

// Whether a child process that calls the function ends by a signal or with a status.
static int dies(void (*function)(const void *), const void *p) {
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(0);
        function(p);
        _exit(0);
    }
    return waitpid(child, &status, 0) == child && status != 0;
}

static void run_wrong(const void *a) {
    if (launch("wrong", 2, 1024, 0, *(const selftest_args *)a)) return;
    cuStreamSynchronize(stream);
}

static void run_first(const void *a) {
    if (launch("first", 1, 0, 0, *(const selftest_args *)a)) return;
    cuStreamSynchronize(stream);
}

static void read_directly(const void *p) {
    printf("%d", *(const volatile int *)p);
}

// What would work in one address space and does not on a device.
static void host_and_device(void) {
    if (!setup()) return;
    uint64_t p = device_new(NULL, 64), out = device_new(NULL, THREADS * 4);
    CHECK(dies(read_directly, (void *)(uintptr_t)p), "the host reads the memory of the device");
    // host pointers as an argument and in uploaded data: what is not followed does no harm
    void *words[4] = {&p, (void *)(uintptr_t)p, (void *)(uintptr_t)(p + 64),
                      (void *)0x7FFF00000040};
    uint64_t got[4], on_host = (uint64_t)(uintptr_t)words;
    run("first", 1, 0, arguments(on_host, out, on_host, 0, 0));
    CHECK(cuMemcpyHtoDAsync_v2(p, words, sizeof words, stream) == 0, " ");
    fetch(got, p, sizeof got);
    CHECK(got[0] != (uint64_t)(uintptr_t)&p && got[1] == p && got[2] == p + 64, " ");
    CHECK(got[3] == 0x7FFF00000040, " ");
    selftest_args a = arguments(0, on_host, 0, 0, 0);
    if (SANITIZED)
        CHECK(dies(run_first, &a), " ");
    else
        run_fails("first", 1, 0, a, "follows a host pointer");
    if (SANITIZED) revive();
}

static void errors(void) {
    if (!setup()) return;
    static const char *const words[] = {"without sala_wait_grid",
                                        "deadlock",
                                        "divergent collective",
                                        "divergent collective",
                                        "partial mask",
                                        "divergent collective",
                                        "divergent barrier",
                                        "divergent collective",
                                        "beyond its shared memory",
                                        "beyond the end",
                                        "__trap",
                                        "illegal address",
                                        "illegal address"};
    for (int mode = 0; mode < 13; mode++) {
        int wild = mode == 8 || mode == 9 || mode > 10; // AddressSanitizer ends the program
        uint64_t out = device_new(NULL, 500), counter = device_new(NULL, 4);
        selftest_args a = arguments(0, out, counter, mode, mode == 12 ? 384 : 380);
        if (SANITIZED && wild) {
            CHECK(dies(run_wrong, &a), "mode %d", mode);
            cuMemFree_v2(out);
            cuMemFree_v2(counter);
        } else {
            run_fails("wrong", 2, 1024, a, words[mode]);
        }
    }
}

static void dependent_launch(void) {
    if (!setup()) return;
    enum { BLOCKS = 12 };
    static int got[BLOCKS * THREADS];
    uint64_t value = device_new(NULL, THREADS * 4), out = device_new(NULL, sizeof got);
    CHECK(cuMemsetD8Async(value, 0, THREADS * 4, stream) == 0, " ");
    for (int mode = 0; mode < 2; mode++)
        for (int dependent = 0; dependent < 2; dependent++) {
            launch("first", 3, 0, dependent, arguments(0, value, 0, 0, 1));
            CHECK(cuStreamSynchronize(stream) == 0, " "); // nothing overlaps what was waited for
            launch("first", 3, 0, dependent, arguments(0, value, 0, 0, 2));
            launch("second", BLOCKS, 0, dependent, arguments(value, out, 0, mode, 0));
            fetch(got, out, sizeof got);
            int early = 0, late = 0;
            for (int i = 0; i < BLOCKS * THREADS; i++) early += got[i] == 1, late += got[i] == 2;
            int want = mode && dependent ? BLOCKS * THREADS : 0;
            CHECK(early == want && early + late == BLOCKS * THREADS,
                  "mode %d, %d: %d early, %d late", mode, dependent, early, late);
        }
    setenv("SALA_SIM_PDL", "0", 1);
    launch("first", 3, 0, 1, arguments(0, value, 0, 0, 3));
    launch("second", BLOCKS, 0, 1, arguments(value, out, 0, 1, 0));
    fetch(got, out, sizeof got);
    CHECK(got[0] == 3 && got[BLOCKS * THREADS - 1] == 3, "%d", got[0]);
    unsetenv("SALA_SIM_PDL");
    cuMemFree_v2(value);
    cuMemFree_v2(out);
}

static void across_blocks(void) {
    if (!setup()) return;
    enum { BLOCKS = 7 };
    int got[2], want = BLOCKS * THREADS * (THREADS - 1) / 2, errors = 0;
    uint64_t counter = device_new(NULL, 4), out = device_new(NULL, (2 + BLOCKS * THREADS) * 4);
    for (int mode = 0; mode < 3; mode++)
        for (int seed = 1; seed <= 20; seed++) {
            set_seed(seed);
            CHECK(cuMemsetD8Async(counter, 0, 4, stream) == 0, " ");
            CHECK(cuMemsetD8Async(out, 0, (2 + BLOCKS * THREADS) * 4, stream) == 0, " ");
            run("across", BLOCKS, 4, arguments(0, out, counter, mode, 0));
            fetch(got, out, sizeof got);
            if (mode < 2) CHECK(got[1] == want, "mode %d, seed %d: %d", mode, seed, got[1]);
            errors += mode == 2 && got[1] != want;
        }
    CHECK(errors >= 5, "only %d of 20 seeds see that a block arrives too early", errors);
    cuMemFree_v2(counter);
    cuMemFree_v2(out);
}

static void fresh_memory(void) {
    if (!setup()) return;
    unsigned got[THREADS];
    uint64_t out = device_new(NULL, sizeof got);
    fetch(got, out, sizeof got);
    CHECK(got[0] == 0xFFFFFFFFu && got[THREADS - 1] == 0xFFFFFFFFu, "%x", got[0]);
    run("fresh", 1, THREADS * 4, arguments(0, out, 0, 0, 0));
    fetch(got, out, sizeof got);
    for (int t = 0; t < THREADS; t++) CHECK(got[t] == 0xFFFFFFFFu, "%d: %x", t, got[t]);
    cuMemFree_v2(out);
}

static void built_ins(void) {
    if (!setup()) return;
    unsigned got[10];
    uint64_t out = device_new(NULL, 64), counter = device_new(NULL, 4);
    CHECK(cuMemsetD8Async(out, 0, 64, stream) == 0, " ");
    CHECK(cuMemsetD8Async(counter, 0, 4, stream) == 0, " ");
    run("atomics", 5, 0, arguments(0, out, counter, 0, 0));
    fetch(got, out, 20);
    CHECK(got[0] == 5 * THREADS - 1 && got[1] == 0xFFFFFFFFu, "%u %x", got[0], got[1]);
    CHECK(got[2] == 0 && got[3] == 2 * 5 * THREADS && got[4] == 5, "%u %u %u", got[2], got[3],
          got[4]);
    fetch(got, counter, 4);
    CHECK(got[0] == 5 * THREADS, "%u", got[0]);
    run("integers", 1, 0, arguments(0, out, 0, 0, 0x01234568));
    fetch(got, out, 36);
    unsigned want[] = {10, 4, 7, 0x16A2C480u, 0, 0, 0xFEBA0145u, 0x40200000u, 7};
    want[4] = (unsigned)((uint64_t)0x01234568 * 0x01234568 >> 32);
    want[5] = 0x01234568u * 0x01234568u;
    for (int i = 0; i < 9; i++) CHECK(got[i] == want[i], "%d: %x, not %x", i, got[i], want[i]);
    cuMemFree_v2(out);
    cuMemFree_v2(counter);
}

// Nothing runs before somebody waits, and host memory is read when the work runs.
static void streams(void) {
    if (!setup()) return;
    int in[THREADS], early[THREADS], got[THREADS];
    void *start = NULL, *end = NULL, *pinned = NULL;
    float time = -1;
    for (int i = 0; i < THREADS; i++) in[i] = 1;
    CHECK(cuMemHostAlloc(&pinned, sizeof in, 0) == 0, " ");
    uint64_t a = device_new(NULL, sizeof in), b = device_new(NULL, sizeof in);
    CHECK(cuEventCreate(&start, 0) == 0 && cuEventCreate(&end, 0) == 0, " ");
    memset(early, 0, sizeof early);
    CHECK(cuEventRecord(start, stream) == 0, " ");
    CHECK(cuMemcpyHtoDAsync_v2(a, in, sizeof in, stream) == 0, " ");
    CHECK(cuMemcpyDtoDAsync_v2(b, a, sizeof in, stream) == 0, " ");
    CHECK(cuMemcpyDtoHAsync_v2(early, b, sizeof in, stream) == 0, " ");
    CHECK(early[0] == -1, "%d", early[0]);
    CHECK(cuEventRecord(end, stream) == 0, " ");
    CHECK(cuMemsetD8Async(b, 0, sizeof in, stream) == 0, " ");
    CHECK(cuEventElapsedTime(&time, start, end) == 600, " ");
    for (int i = 0; i < THREADS; i++) in[i] = 2; // too early: the copy sees it
    CHECK(cuEventSynchronize(end) == 0, " ");
    CHECK(early[0] == 2, "%d", early[0]);
    CHECK(cuEventElapsedTime(&time, start, end) == 0 && time >= 0 && time < 1e4f, "%f", time);
    CHECK(cuMemcpyDtoHAsync_v2(pinned, b, sizeof in, stream) == 0, " ");
    CHECK(cuMemFreeHost(pinned) == 1, "freed while the copy is queued");
    CHECK(cuStreamSynchronize(stream) == 0, " ");
    memcpy(got, pinned, sizeof got);
    CHECK(got[0] == 0, "%d", got[0]);
    CHECK(cuMemcpyHtoDAsync_v2(a + 8, in, sizeof in, stream) == 1, "beyond the end");
    CHECK(cuMemsetD8Async(a + 1, 0, sizeof in, stream) == 1, "beyond the end");
    CHECK(cuMemcpyHtoDAsync_v2((uint64_t)(uintptr_t)in, in, 4, stream) == 1, "not device memory");
    cuEventDestroy_v2(start);
    cuEventDestroy_v2(end);
    CHECK(cuMemFreeHost(pinned) == 0 && cuMemFree_v2(a) == 0 && cuMemFree_v2(b) == 0, " ");
    CHECK(cuMemFree_v2(b) == 1, "freed twice");
}

static void capture(void) {
    if (!setup()) return;
    int got[THREADS], in[THREADS];
    void *graph = NULL, *executable = NULL;
    for (int i = 0; i < THREADS; i++) in[i] = 10;
    uint64_t value = device_new(in, sizeof in), out = device_new(in, sizeof in), p;
    CHECK(cuStreamBeginCapture_v2(stream, 1) == 0, " ");
    launch("first", 1, 0, 1, arguments(0, value, 0, 0, 3));
    launch("second", 1, 0, 1, arguments(value, out, 0, 0, 0)); // arguments are copied now
    CHECK(cuMemcpyDtoHAsync_v2(got, out, sizeof got, stream) == 0, " ");
    CHECK(cuMemsetD8Async(value, 0, sizeof in, stream) == 0, " ");
    CHECK(cuStreamEndCapture(stream, &graph) == 0 && graph, " ");
    CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0) == 0, " ");
    CHECK(cuGraphDestroy(graph) == 0, " ");
    fetch(got, value, sizeof got);
    CHECK(got[0] == 10, "the capture ran: %d", got[0]);
    for (int i = 0; i < 3; i++) {
        CHECK(cuGraphLaunch(executable, stream) == 0, " ");
        CHECK(got[0] == -1, "%d", got[0]);
        CHECK(cuStreamSynchronize(stream) == 0, " ");
        CHECK(got[0] == 3 && got[THREADS - 1] == 3, "%d", got[0]);
        fetch(got, value, sizeof got);
        CHECK(got[0] == 0, "%d", got[0]);
    }
    CHECK(cuGraphExecDestroy(executable) == 0, " ");
    CHECK(cuGraphLaunch(executable, stream) == 400, " ");
    CHECK(cuStreamBeginCapture_v2(stream, 1) == 0, " ");
    CHECK(cuMemAlloc_v2(&p, 16) == 900, "an allocation while capturing");
    CHECK(cuStreamEndCapture(stream, &graph) == 901 && !graph, " ");
    CHECK(cuStreamBeginCapture_v2(stream, 1) == 0, " ");
    CHECK(cuStreamSynchronize(stream) == 900, "waiting while capturing");
    CHECK(cuStreamEndCapture(stream, &graph) == 901, " ");
    CHECK(cuMemFree_v2(value) == 0 && cuMemFree_v2(out) == 0, " ");
}

static void images(void) {
    if (!setup()) return;
    void *other;
    CHECK(cubin_size > 1000, "%zu", cubin_size);
    for (size_t i = 0; i < 120; i++) { // header and ELF header, bit by bit
        cubin[i] ^= 1;
        int code = cuModuleLoadData(&other, cubin);
        CHECK(code == 200, "byte %zu: %d", i, code);
        cubin[i] ^= 1;
    }
    cubin[cubin_size - 1] ^= 64;
    CHECK(cuModuleLoadData(&other, cubin) == 200, " ");
    cubin[cubin_size - 1] ^= 64;
    setenv("SALA_SIM_ARCH", "80", 1);
    CHECK(cuModuleLoadData(&other, cubin) == 209, "of another device");
    unsetenv("SALA_SIM_ARCH");
    CHECK(cuModuleLoadData(&other, cubin) == 0, " ");
    CHECK(cuModuleUnload(other) == 0, " ");
    CHECK(cuModuleUnload(other) == 400, " ");
}

static void compiler(void) {
    if (!setup()) return;
    static const char *const good[] = {"-D", "VALUE=3", "-arch", "sm_90"}, *const bad[] = {
                                                                               "--no-such-option"};
    static const char *const virtual[] = {"--gpu-architecture=compute_90"};
    char *kept = cubin, *log;
    cubin = NULL;
    size_t kept_size = cubin_size;
    CHECK(compile("int x = VALUE;\n", good, 4, &log) == 0, "%s", log);
    free(log);
    CHECK(compile("int x = VALUE;\nint y = nothing;\n", good, 4, &log) == 6, " ");
    CHECK(strstr(log, "selftest.cu:2:") && strstr(log, "nothing"), "%s", log);
    CHECK(cubin_size == 0, " ");
    free(log);
    CHECK(compile("int x;\n", virtual, 1, &log) == 0 && cubin_size == 0, "%zu", cubin_size);
    free(log);
    CHECK(compile("int x;\n", bad, 1, &log) == 5 && strstr(log, "--no-such-option"), "%s", log);
    free(log);
    free(cubin);
    cubin = kept;
    cubin_size = kept_size;
}

static void memory(void) {
    if (!setup()) return;
    size_t free_bytes, total;
    uint64_t p = 0, q = 0;
    setenv("SALA_SIM_MEMORY", "1000000", 1);
    CHECK(cuMemGetInfo_v2(&free_bytes, &total) == 0 && total == 1000000 && free_bytes == total,
          "%zu of %zu", free_bytes, total);
    CHECK(cuMemAlloc_v2(&p, 600000) == 0 && cuMemAlloc_v2(&q, 600000) == 2, " ");
    CHECK(cuMemGetInfo_v2(&free_bytes, &total) == 0 && free_bytes == 400000, "%zu", free_bytes);
    CHECK(cuMemFree_v2(p) == 0 && cuMemAlloc_v2(&q, 600000) == 0 && cuMemFree_v2(q) == 0, " ");
    CHECK(cuMemAlloc_v2(&p, 0) == 1, " ");
    unsetenv("SALA_SIM_MEMORY");
}

static void leaks(void) {
    if (!setup()) return;
    revive();
    long before = sala_sim_leaks();
    uint64_t p = 0;
    void *event = NULL;
    CHECK(cuMemAlloc_v2(&p, 100) == 0 && cuEventCreate(&event, 0) == 0, " ");
    CHECK(sala_sim_leaks() == before + 2, "%ld", sala_sim_leaks() - before);
    CHECK(cuEventDestroy_v2(event) == 0, " ");
    revive(); // loses p
    CHECK(sala_sim_leaks() == before + 1, "%ld", sala_sim_leaks() - before);
    CHECK(cuMemFree_v2(p) == 1, " ");
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void speed(void) {
    if (!setup()) return;
    enum { TIMES = 2000 };
    char in[1280] = {0};
    uint64_t from = device_new(in, sizeof in), out = device_new(NULL, 2048);
    double t0 = seconds();
    run("speed", 4, 0, arguments(0, out, 0, 0, TIMES));
    double t1 = seconds();
    run("speed", 4, 0, arguments(0, out, 0, 1, TIMES));
    double t2 = seconds();
    run("mma", 4, 0, arguments(from, out, 0, 0, TIMES));
    double t3 = seconds(), each = 1e9 / (TIMES * 16.0);
    printf("  a warp's shuffle %.0f ns, barrier %.0f ns, mma %.0f ns\n", (t1 - t0) * each,
           (t2 - t1) * each, (t3 - t2) * each);
    cuMemFree_v2(from);
    cuMemFree_v2(out);
}

// Nothing is left when everything has been given back.
static void ending(void) {
    if (!setup()) return;
    revive();
    long before = sala_sim_leaks();
    CHECK(cuModuleUnload(module) == 0 && cuStreamDestroy_v2(stream) == 0, " ");
    CHECK(sala_sim_leaks() == before - 2, "%ld", before - sala_sim_leaks());
    CHECK(cuCtxPopCurrent_v2(&context) == 0 && cuDevicePrimaryCtxRelease_v2(0) == 0, " ");
    CHECK(sala_sim_leaks() == before - 2, "%ld", before - sala_sim_leaks());
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == 201, "released too often");
    free(cubin);
}

TEST_MAIN(TEST(device), TEST(indices), TEST(copies), TEST(mma), TEST(ldmatrix), TEST(shuffles),
          TEST(barriers), TEST(host_and_device), TEST(errors), TEST(dependent_launch),
          TEST(across_blocks), TEST(fresh_memory), TEST(built_ins), TEST(streams), TEST(capture),
          TEST(images), TEST(compiler), TEST(memory), TEST(leaks), TEST(speed), TEST(ending))
