// The host side of CUDA without a GPU: finding driver and compiler, every refusal, compiling, the
// cache, launches. The driver and the compiler are fakes: this same file, compiled as a library by
// `fake()` below with -DFAKE_DRIVER. Where a toolkit is installed, our declarations are compared
// with its headers, and its real NVRTC compiles too.
#ifdef FAKE_DRIVER

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// What happens is said by $FAKE: "version=12040,cuInit=999": a value, or what a function returns.
static unsigned value(const char *name, unsigned otherwise) {
    const char *at = getenv("FAKE");
    size_t n = strlen(name);
    for (; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, n) == 0 && at[n] == '=') return (unsigned)atoi(at + n + 1);
    return otherwise;
}

// What is open at the moment; the tests read these.
int fake_contexts, fake_depth, fake_streams, fake_modules, fake_memory, fake_execs, fake_programs;
int fake_compiled, fake_launch[10]; // compilations so far; the last launch
static int something;               // handles point to it

static unsigned count(const char *name, int *counter, int by) {
    unsigned result = value(name, 0);
    if (result == 0) __atomic_fetch_add(counter, by, __ATOMIC_SEQ_CST);
    return result;
}

static unsigned make(const char *name, int *counter, void **handle) {
    *handle = &something;
    return count(name, counter, 1);
}

unsigned cuInit(unsigned flags) {
    return flags ? 1 : value("cuInit", 0);
}
unsigned cuDriverGetVersion(int *version) {
    *version = (int)value("version", 13000);
    return 0;
}
unsigned cuGetErrorName(unsigned result, const char **name) {
    *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return result == 12345;
}
unsigned cuGetErrorString(unsigned result, const char **text) {
    *text = result == 2 ? "out of memory" : "a fake error";
    return result == 12345;
}
unsigned cuDeviceGetCount(int *devices) {
    *devices = (int)value("count", 2);
    return value("cuDeviceGetCount", 0);
}
unsigned cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return value("cuDeviceGet", 0);
}
unsigned cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "Fake %d", device);
    return 0;
}
unsigned cuDeviceGetAttribute(int *result, unsigned attribute, int device) {
    (void)device;
    *result = (int)(attribute == 75   ? value("major", 9)
                    : attribute == 76 ? value("minor", 0)
                                      : attribute);
    return 0;
}
unsigned cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)80 << 20;
    return 0;
}
unsigned cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    return make("cuDevicePrimaryCtxRetain", &fake_contexts, context);
}
unsigned cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    return count("", &fake_contexts, -1);
}
unsigned cuCtxPushCurrent_v2(void *context) {
    return context ? count("cuCtxPushCurrent", &fake_depth, 1) : 1;
}
unsigned cuCtxPopCurrent_v2(void **context) {
    return (void)context, count("", &fake_depth, -1);
}
unsigned cuMemGetInfo_v2(size_t *available, size_t *total) {
    *available = (size_t)10 << 20;
    *total = (size_t)80 << 20;
    return fake_depth ? 0 : 201;
}
unsigned cuMemAlloc_v2(void **memory, size_t bytes) {
    *memory = malloc(bytes);
    if (!value("cuMemAlloc", 0)) return count("", &fake_memory, 1);
    free(*memory);
    return value("cuMemAlloc", 0);
}
unsigned cuMemFree_v2(void *memory) {
    free(memory);
    return count("", &fake_memory, -1);
}
unsigned cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    return flags ? 1 : value("cuMemHostAlloc", 0) ? 2 : cuMemAlloc_v2(memory, bytes);
}
unsigned cuMemFreeHost(void *memory) {
    return cuMemFree_v2(memory);
}
unsigned cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    memcpy(to, from, stream ? bytes : 0);
    return value("cuMemcpyHtoDAsync", 0);
}
unsigned cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    memcpy(to, from, stream ? bytes : 0);
    return 0;
}
unsigned cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, void *stream) {
    return cuMemcpyDtoHAsync_v2(to, from, bytes, stream);
}
unsigned cuMemsetD8Async(void *to, unsigned char byte, size_t bytes, void *stream) {
    memset(to, byte, stream ? bytes : 0);
    return 0;
}
unsigned cuStreamCreate(void **stream, unsigned flags) {
    return flags == 1 ? make("cuStreamCreate", &fake_streams, stream) : 1;
}
unsigned cuStreamDestroy_v2(void *stream) {
    return (void)stream, count("", &fake_streams, -1);
}
unsigned cuStreamSynchronize(void *stream) {
    return (void)stream, value("cuStreamSynchronize", 0);
}
unsigned cuStreamBeginCapture_v2(void *stream, unsigned mode) {
    return stream && mode == 1 ? value("cuStreamBeginCapture", 0) : 1;
}
unsigned cuStreamEndCapture(void *stream, void **graph) {
    (void)stream;
    return make("cuStreamEndCapture", &fake_execs, graph);
}
unsigned cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    return graph && !flags ? make("cuGraphInstantiateWithFlags", &fake_execs, exec) : 1;
}
unsigned cuGraphLaunch(void *exec, void *stream) {
    return exec && stream ? 0 : 1;
}
unsigned cuGraphExecDestroy(void *exec) {
    return (void)exec, count("", &fake_execs, -1);
}
unsigned cuGraphDestroy(void *graph) {
    return (void)graph, count("", &fake_execs, -1);
}
unsigned cuModuleLoadData(void **module, const char *image) {
    *module = strdup(image);
    if (strncmp(image, "FAKE", 4) == 0 || strncmp(image, "\177ELF", 4) == 0)
        return count("", &fake_modules, 1);
    free(*module);
    return 200;
}
unsigned cuModuleUnload(void *module) {
    free(module);
    return count("", &fake_modules, -1);
}
unsigned cuModuleGetFunction(void **function, const char *module, const char *name) {
    *function = &something;
    return strstr(module, name) ? 0 : 500;
}
unsigned cuFuncSetAttribute(void *function, unsigned attribute, int bytes) {
    return function && attribute == 8 && bytes <= 101376 ? 0 : 1;
}
unsigned cuFuncGetAttribute(int *result, unsigned attribute, void *function) {
    return *result = 0, (void)function, (void)attribute, 0u;
}
unsigned cuLaunchKernelEx(const void *config, void *function, void **args, void **extra) {
    struct {
        unsigned numbers[7];
        void *stream;
        const int *attributes;
        unsigned attribute_count;
    } c;
    memcpy(&c, config, sizeof c);
    memcpy(fake_launch, c.numbers, sizeof c.numbers);
    fake_launch[7] = (int)c.attribute_count;
    fake_launch[8] = c.attribute_count && c.attributes[0] == 6 ? c.attributes[2] : 0;
    fake_launch[9] = *(int *)args[0];
    return function && c.stream && !extra ? value("cuLaunchKernelEx", 0) : 1;
}
unsigned cuEventCreate(void **event, unsigned flags) {
    return (void)flags, *event = &something, 0u;
}
unsigned cuEventRecord(void *event, void *stream) {
    return (void)event, (void)stream, 0u;
}
unsigned cuEventSynchronize(void *event) {
    return (void)event, 0u;
}
unsigned cuEventElapsedTime(float *ms, void *from, void *to) {
    return *ms = 0, (void)from, (void)to, 0u;
}
unsigned cuEventDestroy_v2(void *event) {
    return (void)event, 0u;
}

typedef struct program {
    char *source, *cubin;
} program;

unsigned nvrtcVersion(int *major, int *minor) {
    *major = (int)value("nvrtc", 13000) / 1000;
    *minor = (int)value("nvrtc", 13000) % 1000 / 10;
    return 0;
}
unsigned nvrtcCreateProgram(program **p, const char *source, const char *name, int headers,
                            const char *const *texts, const char *const *names) {
    if (value("nvrtcCreateProgram", 0)) return value("nvrtcCreateProgram", 0);
    if (strcmp(name, "sala.cu") || headers != 1 || strcmp(names[0], "kernels.h")) return 3;
    size_t size = strlen(source) + strlen(texts[0]) + 2;
    *p = calloc(1, sizeof **p);
    (*p)->source = calloc(1, size);
    snprintf((*p)->source, size, "%s%s", texts[0], source);
    return count("", &fake_programs, 1);
}
unsigned nvrtcDestroyProgram(program **p) {
    free((*p)->source);
    free((*p)->cubin);
    free(*p);
    *p = NULL;
    return count("", &fake_programs, -1);
}
unsigned nvrtcCompileProgram(program *p, int option_count, const char *const *options) {
    usleep(1000 * value("sleep", 0));
    count("", &fake_compiled, 1);
    if (strstr(p->source, "#error")) return 6;
    p->cubin = calloc(1, 65536);
    strcpy(p->cubin, "FAKE ");
    for (int i = 0; i < option_count; i++) strcat(strcat(p->cubin, options[i]), " ");
    strcat(p->cubin, p->source);
    return 0;
}
unsigned nvrtcGetCUBINSize(program *p, size_t *size) {
    *size = strlen(p->cubin) + 1;
    return 0;
}
unsigned nvrtcGetCUBIN(program *p, char *cubin) {
    strcpy(cubin, p->cubin);
    return 0;
}
static const char a_log[] = "sala.cu(1): warning: odd\nsala.cu(3): error: no such \"thing\"\n\n";
unsigned nvrtcGetProgramLogSize(program *p, size_t *size) {
    return (void)p, *size = sizeof a_log, 0u;
}
unsigned nvrtcGetProgramLog(program *p, char *log) {
    return (void)p, memcpy(log, a_log, sizeof a_log), 0u;
}

#else // the tests

#define SALA_IMPLEMENTATION
#include "../sala.h"
#include "check.h"
#include <sys/time.h>

#if defined(__has_include)
#if __has_include(<cuda.h>) && __has_include(<nvrtc.h>)
#include <cuda.h>
#include <nvrtc.h>
#if CUDA_VERSION >= 12000
#define HAVE_TOOLKIT 1
#endif
#endif
#endif

// ---- what the tests share ----

static char folder[64]; // temporary
static char log_text[4096];
static int log_lines[2]; // by level
static double progress_last;
static int progress_calls;

static void on_log(void *user, int level, const char *line) {
    (void)user;
    log_lines[level]++;
    snprintf(log_text, sizeof log_text, "%s", line);
}

static void on_progress(void *user, const char *what, double fraction) {
    (void)user;
    CHECK(strncmp(what, "compiling kernels for sm_", 25) == 0, "%s", what);
    if (progress_last == 1) progress_last = 0; // the next compilation
    CHECK(fraction >= progress_last && fraction <= 1, "%g after %g", fraction, progress_last);
    progress_last = fraction;
    progress_calls++;
}

static const sala__env env = {NULL, NULL, on_log, on_progress};

static char *path_of(const char *name) { // in the temporary folder; a few may live at once
    static char paths[8][512];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}

static void shell(const char *format, ...) SALA__PRINTF(1, 2);
static void shell(const char *format, ...) {
    char command[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    int status = system(command);
    CHECK(status == 0, "%s: %d", command, status);
}

static void forget(void) {
    shell("rm -rf '%s'", folder);
}

// The path of the fake library, built at the first call, with a clean environment that uses it.
static const char *fake(const char *behaviour) {
    if (!folder[0]) {
        const char *tmp = getenv("TMPDIR"), *cc = getenv("CC");
        snprintf(folder, sizeof folder, "%.40s/sala-cuda-XXXXXX", tmp && *tmp ? tmp : "/tmp");
        if (!mkdtemp(folder)) perror(folder), exit(1);
        atexit(forget);
        shell("%s -std=gnu11 -shared -fPIC -DFAKE_DRIVER -o '%s' '%s'", cc && *cc ? cc : "cc",
              path_of("fake.so"), __FILE__);
    }
    setenv("FAKE", behaviour, 1);
    setenv("SALA_CUDA", path_of("fake.so"), 1);
    setenv("SALA_NVRTC", path_of("fake.so"), 1);
    setenv("SALA_CACHE", path_of("cache"), 1);
    progress_calls = log_lines[0] = log_lines[1] = 0;
    progress_last = 0;
    log_text[0] = 0;
    return path_of("fake.so");
}

static int *counter(const char *name) {
    void *library = dlopen(path_of("fake.so"), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    int *at = library ? (int *)dlsym(library, name) : NULL;
    if (!at) printf("no %s in the fake library\n", name), exit(1);
    dlclose(library);
    return at;
}

static void check_balance(const char *when) { // all that was opened is closed
    static const char *const names[] = {"fake_contexts", "fake_depth",  "fake_streams",
                                        "fake_modules",  "fake_memory", "fake_execs",
                                        "fake_programs"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        CHECK(*counter(names[i]) == 0, "%s: %s is %d", when, names[i], *counter(names[i]));
}

static const char tiny_header[] = "// tiny\nstruct tiny { float *p, v; };\n";
static const char tiny_source[] =
    "#include \"kernels.h\"\n"
    "extern \"C\" __global__ void sala_tiny(const __grid_constant__ tiny a) { *a.p = a.v; }\n";

// An open device with tiny kernels.
static int open_tiny(sala__cuda *c, sala_error *err) {
    int code = sala__cuda_open(&env, 0, c, err);
    c->source = tiny_source;
    c->header = tiny_header;
    return code;
}

// Open, compile in two units, close. Returns the number of compilations; negative on error.
static int compile_tiny(const char *option, sala_error *err) {
    sala__cuda c;
    int before = *counter("fake_compiled");
    memset(err, 0, sizeof *err);
    int code = open_tiny(&c, err);
    CHECK(code == 0, "%s", err->text);
    if (code == 0) code = sala__cuda_enter(&c, err);
    if (code < 0) return code;
    code = sala__cuda_compile(&c, &option, 1, 3, err);
    CHECK(c.module_count == (code < 0 ? 0 : 2), "%d modules", c.module_count);
    sala__cuda_leave(&c);
    sala__cuda_close(&c);
    check_balance("after compile_tiny");
    return code < 0 ? code : *counter("fake_compiled") - before;
}

// ---- declarations ----

static void toolkit(void) {
#ifdef HAVE_TOOLKIT
#define SAME(ours, a, theirs, b)                                                                   \
    CHECK(offsetof(ours, a) == offsetof(theirs, b) &&                                              \
              sizeof((ours *)0)->a == sizeof((theirs *)0)->b,                                      \
          "%s", #b)
    CHECK(sizeof(sala__cu_launch) == sizeof(CUlaunchConfig), "size");
    CHECK(sizeof(sala__cu_attribute) == sizeof(CUlaunchAttribute), "size");
    SAME(sala__cu_launch, grid_x, CUlaunchConfig, gridDimX);
    SAME(sala__cu_launch, grid_y, CUlaunchConfig, gridDimY);
    SAME(sala__cu_launch, grid_z, CUlaunchConfig, gridDimZ);
    SAME(sala__cu_launch, block_x, CUlaunchConfig, blockDimX);
    SAME(sala__cu_launch, block_y, CUlaunchConfig, blockDimY);
    SAME(sala__cu_launch, block_z, CUlaunchConfig, blockDimZ);
    SAME(sala__cu_launch, shared_bytes, CUlaunchConfig, sharedMemBytes);
    SAME(sala__cu_launch, stream, CUlaunchConfig, hStream);
    SAME(sala__cu_launch, attributes, CUlaunchConfig, attrs);
    SAME(sala__cu_launch, attribute_count, CUlaunchConfig, numAttrs);
    SAME(sala__cu_attribute, id, CUlaunchAttribute, id);
    SAME(sala__cu_attribute, value, CUlaunchAttribute, value);
    SAME(sala__cu_attribute, value.allowed, CUlaunchAttribute,
         value.programmaticStreamSerializationAllowed);
    static const int values[][2] = {
        {SALA__CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY},
        {SALA__CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE},
        {SALA__CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND},
        {SALA__CU_DEVICE_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {SALA__CU_DEVICE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        {SALA__CU_DEVICE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
        {SALA__CU_FUNCTION_MAX_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES},
        {SALA__CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING},
        {SALA__CU_CAPTURE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL},
        {SALA__CU_LAUNCH_PROGRAMMATIC, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION},
    };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        CHECK(values[i][0] == values[i][1], "value %zu: %d, in cuda.h %d", i, values[i][0],
              values[i][1]);
#else
    printf("  no CUDA toolkit: declarations are not compared\n");
#endif
}

#ifdef HAVE_TOOLKIT
// Our list with the toolkit's types in it: a pointer to each of the toolkit's functions must be of
// that type, or this does not compile.
#define sala__cu_result CUresult
#define sala__cu_memory CUdeviceptr
#define sala__cu_device CUdevice
#define sala__cu_context CUcontext
#define sala__cu_stream CUstream
#define sala__cu_event CUevent
#define sala__cu_module CUmodule
#define sala__cu_function CUfunction
#define sala__cu_graph CUgraph
#define sala__cu_exec CUgraphExec
#define sala__cu_launch CUlaunchConfig
#define sala__cu_program nvrtcProgram
#define DRIVER_TYPE(name, parameters)                                                              \
    __attribute__((unused)) static __typeof__(&name) type_of_##name = (CUresult(*) parameters)0;
#define COMPILER_TYPE(name, parameters)                                                            \
    __attribute__((unused)) static __typeof__(&name) type_of_##name = (nvrtcResult(*) parameters)0;
SALA__CU_DRIVER(DRIVER_TYPE)
SALA__CU_COMPILER(COMPILER_TYPE)
#undef sala__cu_result
#undef sala__cu_memory
#undef sala__cu_device
#undef sala__cu_context
#undef sala__cu_stream
#undef sala__cu_event
#undef sala__cu_module
#undef sala__cu_function
#undef sala__cu_graph
#undef sala__cu_exec
#undef sala__cu_launch
#undef sala__cu_program
#endif

// ---- choosing and opening ----

static void device_names(void) {
    static const struct {
        const char *text;
        int code, kind, ordinal;
    } cases[] = {
        {NULL, 0, SALA__DEVICE_AUTO, 0},
        {"auto", 0, SALA__DEVICE_AUTO, 0},
        {"cpu", 0, SALA__DEVICE_CPU, 0},
        {"cuda", 0, SALA__DEVICE_CUDA, 0},
        {"cuda:0", 0, SALA__DEVICE_CUDA, 0},
        {"cuda:17", 0, SALA__DEVICE_CUDA, 17},
        {"cuda:9999", 0, SALA__DEVICE_CUDA, 9999},
        {"", -1, 0, 0},
        {"CPU", -1, 0, 0},
        {"cpu ", -1, 0, 0},
        {"cuda:", -1, 0, 0},
        {"cuda:x", -1, 0, 0},
        {"cuda:1x", -1, 0, 0},
        {"cuda:-1", -1, 0, 0},
        {"cuda: 1", -1, 0, 0},
        {"cuda:+1", -1, 0, 0},
        {"cuda:12345", -1, 0, 0},
        {"cuda1", -1, 0, 0},
        {"gpu", -1, 0, 0},
        {"autocuda", -1, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int kind = 9, ordinal = 9;
        sala_error err = {0, ""};
        int code = sala__parse_device(cases[i].text, &kind, &ordinal, &err);
        const char *text = cases[i].text ? cases[i].text : "NULL";
        CHECK(code == (cases[i].code ? SALA_E_ARGUMENT : 0), "%s: %d %s", text, code, err.text);
        if (code < 0)
            CHECK(strstr(err.text, "is none of auto, cpu, cuda, cuda:N"), "%s", err.text);
        else
            CHECK(kind == cases[i].kind && ordinal == cases[i].ordinal, "%s: %d %d", text, kind,
                  ordinal);
    }
}

static void no_driver(void) {
    sala__cuda c;
    sala_error err;
    fake("");
    setenv("SALA_CUDA", path_of("nowhere/libcuda.so.1"), 1);
    char begin[600];
    snprintf(begin, sizeof begin,
             "cannot load the CUDA driver: %s: ", path_of("nowhere/libcuda.so.1"));
    static const char end[] = "; install the NVIDIA driver, or use device cpu";
    int code = sala__cuda_select(&env, "cuda", &c, &err);
    CHECK(code == SALA_E_DEVICE, "%d", code);
    CHECK(strncmp(err.text, begin, strlen(begin)) == 0, "%s", err.text);
    CHECK(strstr(err.text, end) && !strstr(err.text, end)[sizeof end - 1], "%s", err.text);
    CHECK(!c.driver && log_lines[0] == 0, "something is left");

    code = sala__cuda_select(&env, "auto", &c, &err);
    CHECK(code == 0, "%d", code);
    CHECK(strncmp(log_text, "no GPU used: cannot load the CUDA driver: ", 42) == 0, "%s", log_text);
    CHECK(log_lines[0] == 1 && log_lines[1] == 0, "%d %d", log_lines[0], log_lines[1]);
    code = sala__cuda_select(&env, "cpu", &c, &err);
    CHECK(code == 0 && log_lines[0] == 1, "%d, %d lines", code, log_lines[0]);

    setenv("SALA_CUDA", "libm.so.6", 1); // a library, but no driver
    code = sala__cuda_open(&env, 0, &c, &err);
    CHECK(code == SALA_E_DEVICE &&
              strcmp(err.text, "CUDA driver libm.so.6 is version 0.0 without cuInit, but 12.0 is "
                               "needed: update the NVIDIA driver") == 0,
          "%s", err.text);
}

// Every refusal of sala__cuda_open: one sentence, and all that was opened is closed again.
static void refusals(void) {
    static const struct {
        const char *behaviour, *text; // @: the path of the fake library
        int code, ordinal;
    } cases[] = {
        {"version=11080",
         "CUDA driver @ is version 11.8, but 12.0 is needed: update the NVIDIA driver",
         SALA_E_DEVICE, 0},
        {"cuInit=999", "CUDA driver @: starting it: error 999, CUDA_ERROR_FAKE (a fake error)",
         SALA_E_DEVICE, 0},
        {"cuInit=12345", "CUDA driver @: starting it: error 12345, unknown (no description)",
         SALA_E_DEVICE, 0},
        {"count=0",
         "CUDA driver @ finds no device: see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or use "
         "device cpu",
         SALA_E_DEVICE, 0},
        {"cuInit=100,cuDeviceGetCount=3",
         "CUDA driver @ finds no device: see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or use "
         "device cpu",
         SALA_E_DEVICE, 0},
        {"cuDeviceGetCount=100",
         "CUDA driver @ finds no device: see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or use "
         "device cpu",
         SALA_E_DEVICE, 0},
        {"", "there is no device cuda:2, the last one is cuda:1", SALA_E_DEVICE, 2},
        {"cuDeviceGet=46", "CUDA driver @: finding it: error 46, CUDA_ERROR_FAKE (a fake error)",
         SALA_E_DEVICE, 0},
        {"major=7,minor=5",
         "cuda:1 (Fake 1) has compute capability 7.5, but 8.0 is needed: use another device, or "
         "device cpu",
         SALA_E_DEVICE, 1},
        {"nvrtc=11080",
         "@ is NVRTC 11.8, but sm_90 needs 12.0: install that, or let SALA_NVRTC name it",
         SALA_E_DEVICE, 0},
        {"major=12,nvrtc=12060",
         "@ is NVRTC 12.6, but sm_120a needs 12.8: install that, or let SALA_NVRTC name it",
         SALA_E_DEVICE, 0},
        {"major=12,minor=1,nvrtc=12080",
         "@ is NVRTC 12.8, but sm_121a needs 12.9: install that, or let SALA_NVRTC name it",
         SALA_E_DEVICE, 0},
        {"version=12040",
         "@ is NVRTC 13.0, too new for the CUDA driver 12.4: update the NVIDIA driver, or let "
         "SALA_NVRTC name a libnvrtc.so.12",
         SALA_E_DEVICE, 0},
        {"cuDevicePrimaryCtxRetain=2",
         "cuda:0 (Fake 0): creating a context: error 2, CUDA_ERROR_OUT_OF_MEMORY (out of memory)",
         SALA_E_MEMORY, 0},
        {"cuDevicePrimaryCtxRetain=46",
         "cuda:0 (Fake 0): creating a context: error 46, CUDA_ERROR_FAKE (a fake error)",
         SALA_E_DEVICE, 0},
        {"cuCtxPushCurrent=709",
         "cuda:0 (Fake 0): entering the context: error 709, CUDA_ERROR_FAKE (a fake error); this "
         "process can no longer use the device: restart it",
         SALA_E_DEVICE, 0},
        {"cuStreamCreate=1",
         "cuda:0 (Fake 0): creating a stream: error 1, CUDA_ERROR_FAKE (a fake error)",
         SALA_E_DEVICE, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sala__cuda c;
        sala_error err = {0, ""};
        const char *path = fake(cases[i].behaviour), *at = strchr(cases[i].text, '@');
        char text[1020];
        int before = at ? (int)(at - cases[i].text) : 0;
        snprintf(text, sizeof text, "%.*s%s%s", before, cases[i].text, at ? path : "",
                 at ? at + 1 : cases[i].text);
        int code = sala__cuda_open(&env, cases[i].ordinal, &c, &err);
        CHECK(code == cases[i].code && err.code == code, "%s: %d", cases[i].behaviour, code);
        CHECK(strcmp(err.text, text) == 0, "\n%s\n%s", err.text, text);
        CHECK(!c.driver && !c.compiler && !c.context, "%s: left open", cases[i].behaviour);
        check_balance(cases[i].behaviour);
    }
}

static void opens(void) {
    static const struct {
        const char *behaviour, *architecture;
    } cases[] = {
        {"major=8", "sm_80"},
        {"major=8,minor=6", "sm_86"},
        {"version=12000,nvrtc=12000", "sm_90"},
        {"major=10", "sm_100"},
        {"major=12,nvrtc=12080,version=12080", "sm_120a"},
        {"major=12,minor=1,nvrtc=12090", "sm_121a"},
        {"version=14020,nvrtc=14010", "sm_90"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sala__cuda c;
        sala_error err = {0, ""};
        fake(cases[i].behaviour);
        int code = sala__cuda_select(&env, i % 2 ? "cuda:1" : "auto", &c, &err);
        CHECK(code == 1, "%s: %d %s", cases[i].behaviour, code, err.text);
        if (code != 1) continue;
        CHECK(strcmp(c.architecture, cases[i].architecture) == 0, "%s", c.architecture);
        CHECK(c.ordinal == (int)i % 2 && c.multiprocessors == 16, "%d %d", c.ordinal,
              c.multiprocessors);
        CHECK(strcmp(c.name, i % 2 ? "Fake 1" : "Fake 0") == 0, "%s", c.name);
        CHECK(c.total_bytes == (size_t)80 << 20, "%zu", c.total_bytes);
        CHECK(*counter("fake_depth") == 0 && *counter("fake_contexts") == 1, "not a good guest");
        sala__cuda_close(&c);
        check_balance(cases[i].behaviour);
    }
}

// Where NVRTC is found: SALA_NVRTC is the last word; a package of Python's is good enough, and an
// old one that fits is preferred to a new one that does not.
static void compiler_search(void) {
    sala__cuda c;
    sala_error err;
    fake("version=12040,nvrtc=12030");
    setenv("SALA_NVRTC", path_of("nowhere/libnvrtc.so"), 1);
    int code = sala__cuda_open(&env, 0, &c, &err);
    CHECK(code == SALA_E_DEVICE && strncmp(err.text, "cannot load NVRTC: ", 19) == 0 &&
              strstr(err.text, "nowhere/libnvrtc.so"),
          "%s", err.text);
    setenv("SALA_NVRTC", "libm.so.6", 1);
    code = sala__cuda_open(&env, 0, &c, &err);
    CHECK(code == SALA_E_DEVICE && strncmp(err.text, "libm.so.6 is NVRTC 0.0, but ", 28) == 0, "%s",
          err.text);

    const char *place = path_of("venv/lib/python3.99/site-packages/nvidia/cuda_nvrtc/lib");
    shell("mkdir -p '%s' && cp '%s' '%s/libnvrtc.so.12'", place, path_of("fake.so"), place);
    unsetenv("SALA_NVRTC");
    setenv("VIRTUAL_ENV", path_of("venv"), 1);
    code = sala__cuda_open(&env, 0, &c, &err);
    CHECK(code == 0 && c.compiler_version / 1000 == 12, "%s", err.text);
    if (code == 0) sala__cuda_close(&c);
    unsetenv("VIRTUAL_ENV");
    check_balance("search");
}

static void memory(void) {
    sala__cuda c;
    sala_error err = {0, ""};
    fake("");
    if (open_tiny(&c, &err) < 0 || sala__cuda_enter(&c, &err) < 0) {
        CHECK(0, "%s", err.text);
        return;
    }
    double available, total;
    sala__cuda_free_memory(&c, &available, &total);
    CHECK(available == 10 && total == 80, "%g %g", available, total);
    sala__cu_memory a, b;
    void *host;
    char back[8] = "";
    CHECK(sala__cuda_alloc(&c, 8, "words", &a, &err) == 0, "%s", err.text);
    CHECK(sala__cuda_alloc(&c, 0, "nothing", &b, &err) == 0 && b, "%s", err.text);
    CHECK(sala__cuda_alloc_host(&c, 100, "rows", &host, &err) == 0, "%s", err.text);
    CHECK(c.taken_bytes == 8, "%zu", c.taken_bytes);
    CHECK(sala__cuda_upload(&c, a, "ABCDEFG", 8, &err) == 0, "%s", err.text);
    CHECK(sala__cuda_fill(&c, a, 'x', 3, &err) == 0, "%s", err.text);
    CHECK(sala__cuda_download(&c, back, a, 8, &err) == 0, "%s", err.text);
    CHECK(sala__cuda_wait(&c, &err) == 0 && strcmp(back, "xxxDEFG") == 0, "%s", back);
    sala__cuda_release(&c, a, 8);
    sala__cuda_release(&c, b, 0);
    sala__cuda_release(&c, 0, 0);
    sala__cuda_release_host(&c, host);
    sala__cuda_release_host(&c, NULL);
    CHECK(c.taken_bytes == 0, "%zu", c.taken_bytes);

    fake("cuMemAlloc=2,cuMemHostAlloc=1,cuStreamSynchronize=700,cuMemcpyHtoDAsync=719");
    int code = sala__cuda_alloc(&c, (size_t)5 << 20, "weights", &a, &err);
    CHECK(code == SALA_E_MEMORY && a == 0 && c.taken_bytes == 0, "%d", code);
    CHECK(strcmp(err.text,
                 "cuda:0 (Fake 0): taking 5 MiB for weights: error 2, "
                 "CUDA_ERROR_OUT_OF_MEMORY (out of memory); 10 of its 80 MiB are free") == 0,
          "%s", err.text);
    code = sala__cuda_alloc_host(&c, (size_t)3 << 20, "rows", &host, &err);
    CHECK(code == SALA_E_MEMORY && !host &&
              strstr(err.text, "locking 3 MiB of host memory for rows"),
          "%s", err.text);
    code = sala__cuda_upload(&c, a, "", 0, &err);
    CHECK(code == SALA_E_DEVICE && strstr(err.text, "copying to the device: error 719") &&
              strstr(err.text, "restart it"),
          "%s", err.text);
    code = sala__cuda_wait(&c, &err);
    CHECK(code == SALA_E_DEVICE && strstr(err.text, "running kernels: error 700") &&
              strstr(err.text, "restart it"),
          "%s", err.text);
    fake("");
    sala__cuda_leave(&c);
    sala__cuda_close(&c);
    check_balance("memory");
}

static void launches(void) {
    static const char *const behaviours[] = {"major=9", "major=8"};
    for (int early = 0; early < 4; early++) {
        sala__cuda c;
        sala_error err = {0, ""};
        fake(behaviours[early / 2]);
        if (open_tiny(&c, &err) < 0 || sala__cuda_enter(&c, &err) < 0) continue;
        CHECK(sala__cuda_compile(&c, NULL, 0, 3, &err) == 0, "%s", err.text);
        sala__cuda_kernel k;
        CHECK(sala__cuda_get_kernel(&c, 0, "sala_tiny", 101376, &k, &err) == 0, "%s", err.text);
        int args = 77 + early, *seen = counter("fake_launch");
        int code = sala__cuda_launch(&c, &k, 5, 6, 7, 128, 4096, &args, early % 2, &err);
        CHECK(code == 0, "%s", err.text);
        const int want[10] = {5, 6, 7, 128, 1, 1, 4096, early == 1, early == 1, args};
        CHECK(memcmp(seen, want, sizeof want) == 0, "launch %d", early);

        sala__cu_exec exec = NULL;
        CHECK(sala__cuda_capture_begin(&c, &err) == 0, "%s", err.text);
        CHECK(sala__cuda_capture_end(&c, &exec, &err) == 0 && exec, "%s", err.text);
        CHECK(sala__cuda_graph_launch(&c, exec, &err) == 0, "%s", err.text);
        sala__cuda_graph_free(&c, exec);
        CHECK(sala__cuda_capture_begin(&c, &err) == 0, "%s", err.text);
        CHECK(sala__cuda_capture_end(&c, NULL, &err) == 0, "%s", err.text);

        code = sala__cuda_get_kernel(&c, 0, "sala_other", 0, &k, &err);
        CHECK(code == SALA_E_DEVICE && strstr(err.text, "preparing the kernel sala_other with 0"),
              "%s", err.text);
        code = sala__cuda_get_kernel(&c, 0, "sala_tiny", 200000, &k, &err);
        CHECK(code == SALA_E_DEVICE && strstr(err.text, "sala_tiny with 200000 bytes"), "%s",
              err.text);
        fake("cuLaunchKernelEx=701,cuGraphInstantiateWithFlags=1");
        code = sala__cuda_launch(&c, &k, 5, 6, 7, 128, 4096, &args, 0, &err);
        CHECK(code == SALA_E_DEVICE &&
                  strstr(err.text, "launching sala_tiny with 5 x 6 x 7 blocks: error 701, "
                                   "CUDA_ERROR_FAKE (a fake error)"),
              "%s", err.text);
        CHECK(sala__cuda_capture_begin(&c, &err) == 0, "%s", err.text);
        code = sala__cuda_capture_end(&c, &exec, &err);
        CHECK(code == SALA_E_DEVICE && !exec && strstr(err.text, "making a graph"), "%s", err.text);
        sala__cuda_leave(&c);
        sala__cuda_close(&c);
        check_balance("launches");
    }
}

// ---- compiling and the cache ----

static int files_like(const char *name, const char *pattern) { // in a folder of ours
    glob_t found;
    char path[600];
    snprintf(path, sizeof path, "%s/%s", path_of(name), pattern);
    int count = glob(path, 0, NULL, &found) == 0 ? (int)found.gl_pathc : 0;
    if (count) globfree(&found);
    return count;
}

static void compiling(void) {
    sala_error err;
    sala__cuda c;
    fake("sleep=700");
    shell("rm -rf '%s'", path_of("cache"));
    int compiled = compile_tiny("-DX=1", &err);
    CHECK(compiled == 2, "%d %s", compiled, err.text);
    CHECK(progress_calls >= 3 && progress_calls <= 8 && progress_last == 1, "%d calls, %g",
          progress_calls, progress_last);
    CHECK(log_lines[0] + log_lines[1] == 0, "%s", log_text);

    fake("");
    if (open_tiny(&c, &err) < 0 || sala__cuda_enter(&c, &err) < 0) return;
    c.source = "#error";
    int code = sala__cuda_compile(&c, NULL, 0, 3, &err);
    CHECK(code == SALA_E_DEVICE && c.module_count == 0, "%d", code);
    CHECK(strcmp(err.text, "NVRTC 13.0 cannot compile sala.cu for sm_90, error 6: sala.cu(3): "
                           "error: no such \"thing\"  ") == 0,
          "%s", err.text);
    fake("nvrtcCreateProgram=1");
    code = sala__cuda_compile(&c, NULL, 0, 3, &err);
    CHECK(code == SALA_E_DEVICE && strstr(err.text, "error 1: no log"), "%s", err.text);
    const char *many[SALA__CUDA_OPTIONS] = {""};
    for (int i = 0; i < SALA__CUDA_OPTIONS; i++) many[i] = "-DX";
    code = sala__cuda_compile(&c, many, SALA__CUDA_OPTIONS, 1, &err);
    CHECK(code == SALA_E_ARGUMENT, "%s", err.text);
    code = sala__cuda_compile(&c, NULL, 0, 1u << SALA__CUDA_MODULES, &err);
    CHECK(code == SALA_E_ARGUMENT, "%s", err.text);
    sala__cuda_leave(&c);
    sala__cuda_close(&c);
    check_balance("compiling");
}

static void cache_hits(void) {
    sala_error err;
    fake("");
    shell("rm -rf '%s'", path_of("cache"));
    CHECK(compile_tiny("-DX=1", &err) == 2, "first: %s", err.text);
    CHECK(files_like("cache", "*") == 2 && files_like("cache", "*.cubin") == 2, "two files");
    CHECK(compile_tiny("-DX=1", &err) == 0, "again");
    CHECK(compile_tiny("-DX=2", &err) == 2, "another option");
    fake("nvrtc=12050");
    CHECK(compile_tiny("-DX=1", &err) == 2, "another NVRTC");
    fake("major=8,minor=9");
    CHECK(compile_tiny("-DX=1", &err) == 2, "another device");
    fake("");
    CHECK(compile_tiny("-DX=1", &err) == 0, "as at first");
    CHECK(files_like("cache", "*") == 8, "eight files");
    CHECK(log_lines[0] + log_lines[1] == 0, "%s", log_text);
}

static void put(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f)) perror(path), exit(1);
}

// Files that are cut, longer, changed in any part, or another key's: each is compiled again and
// replaced by a good one.
static void cache_damage(void) {
    sala_error err;
    fake("");
    shell("rm -rf '%s'", path_of("cache"));
    compile_tiny("-DX=1", &err);
    glob_t found;
    if (glob(path_of("cache/*.cubin"), 0, NULL, &found) || found.gl_pathc != 2) {
        CHECK(0, "no cache");
        return;
    }
    const char *path = found.gl_pathv[1];
    sala__file file;
    if (sala__map_file(path, &file, &err) < 0) exit(1);
    size_t size = (size_t)file.size;
    unsigned char *good = (unsigned char *)malloc(size + 1),
                  *bad = (unsigned char *)malloc(size + 1);
    memcpy(good, file.data, size);
    good[size] = 0;
    sala__unmap_file(&file);
    const size_t cuts[] = {
        0, 1, 7, sizeof(sala__cuda_head), sizeof(sala__cuda_head) + 1, size - 1, size + 1};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        put(path, good, cuts[i]);
        fake("");
        CHECK(compile_tiny("-DX=1", &err) == 1 && log_lines[0] == 1 && log_lines[1] == 0,
              "cut to %zu of %zu", cuts[i], size);
        CHECK(strstr(log_text, path) && strstr(log_text, "is damaged: compiling again"), "%s",
              log_text);
        CHECK(compile_tiny("-DX=1", &err) == 0 && log_lines[0] == 1, "after the cut to %zu",
              cuts[i]);
    }
    for (size_t i = 0; i < size; i += i < sizeof(sala__cuda_head) ? 4 : 61) {
        memcpy(bad, good, size);
        bad[i] ^= 0x10;
        put(path, bad, size);
        fake("");
        CHECK(compile_tiny("-DX=1", &err) == 1 && log_lines[0] == 1, "byte %zu", i);
    }
    shell("cp '%s' '%s'", found.gl_pathv[0], path); // another unit's
    CHECK(compile_tiny("-DX=1", &err) == 1, "a foreign file");
    CHECK(compile_tiny("-DX=1", &err) == 0, "after the foreign file");

    shell("rm '%s' && mkdir -p '%s/x'", path, path); // can be neither read nor replaced
    fake("");
    CHECK(compile_tiny("-DX=1", &err) == 1 && log_lines[1] == 1, "a folder: %s", log_text);
    shell("rm -r '%s'", path);
    CHECK(files_like("cache", "*") == 1, "a part is left");
    free(good);
    free(bad);
    globfree(&found);
}

// A good file whose cubin the driver does not take (a driver older than the one it was made for).
static void cache_refused(void) {
    sala_error err;
    fake("");
    shell("rm -rf '%s'", path_of("cache"));
    compile_tiny("-DX=1", &err);
    sala__cuda c;
    if (open_tiny(&c, &err) < 0) exit(1);
    sala__cuda_unit unit;
    const char *option = "-DX=1";
    if (sala__cuda_make_unit(&c, 1, &option, 1, path_of("cache"), &unit, &err) < 0) exit(1);
    CHECK(sala__file_exists(unit.path), "%s", unit.path);
    struct {
        sala__cuda_head head;
        char cubin[8];
    } whole = {{"", {0}, 0, {0}}, "REFUSED"};
    sala__cuda_make_head(&unit, whole.cubin, 8, &whole.head);
    put(unit.path, &whole, sizeof whole);
    sala__release(&env, unit.path);
    sala__cuda_close(&c);
    fake("");
    int compiled = compile_tiny("-DX=1", &err);
    CHECK(compiled == 2, "%d %s", compiled, err.text);
    CHECK(log_lines[0] == 1 && strstr(log_text, "the driver refuses cached kernels"), "%s",
          log_text);
    CHECK(compile_tiny("-DX=1", &err) == 0, "after the refusal");
}

static void cache_folders(void) {
    sala_error err;
    fake("");
    shell("rm -rf '%s' '%s'", path_of("cache"), path_of("home"));
    setenv("SALA_CACHE", "off", 1);
    setenv("XDG_CACHE_HOME", path_of("home/xdg"), 1);
    setenv("HOME", path_of("home/me"), 1);
    CHECK(compile_tiny("-DX=1", &err) == 2 && compile_tiny("-DX=1", &err) == 2, "off");
    CHECK(!sala__file_exists(path_of("home")), "off, but something was written");
    setenv("SALA_CACHE", "", 1);
    CHECK(compile_tiny("-DX=1", &err) == 2 && compile_tiny("-DX=1", &err) == 0, "XDG");
    CHECK(files_like("home/xdg/sala", "*.cubin") == 2, "XDG_CACHE_HOME");
    unsetenv("SALA_CACHE");
    unsetenv("XDG_CACHE_HOME");
    CHECK(compile_tiny("-DX=1", &err) == 2 && compile_tiny("-DX=1", &err) == 0, "HOME");
    CHECK(files_like("home/me/.cache/sala", "*.cubin") == 2, "HOME");
    CHECK(log_lines[0] + log_lines[1] == 0, "%s", log_text);
    unsetenv("HOME");
    CHECK(compile_tiny("-DX=1", &err) == 2 && log_lines[1] == 0, "no folder at all");

    put(path_of("plain"), "", 0);
    setenv("SALA_CACHE", path_of("plain/cache"), 1); // cannot be made, not even by root
    CHECK(compile_tiny("-DX=1", &err) == 2, "unwritable: %s", err.text);
    CHECK(log_lines[1] == 1 && strstr(log_text, "cannot write the kernel cache in ") &&
              strstr(log_text, "plain/cache"),
          "%d: %s", log_lines[1], log_text);
}

static void cache_leftovers(void) {
    sala_error err;
    fake("");
    shell("rm -rf '%s' && mkdir '%s'", path_of("cache"), path_of("cache"));
    static const char *const names[] = {"sala-part-old", "sala-part-new", "other-old"};
    for (int i = 0; i < 3; i++) {
        char path[600];
        snprintf(path, sizeof path, "%s/%s", path_of("cache"), names[i]);
        put(path, "x", 1);
        struct timeval times[2] = {{time(NULL) - 2 * 86400, 0}, {time(NULL) - 2 * 86400, 0}};
        if (i != 1 && utimes(path, times)) perror(path);
    }
    CHECK(compile_tiny("-DX=1", &err) == 2, "%s", err.text);
    CHECK(files_like("cache", "sala-part-old") == 0, "a leftover of two days");
    CHECK(files_like("cache", "sala-part-new") == 1, "somebody is writing this");
    CHECK(files_like("cache", "other-old") == 1, "not ours");
}

static void *compile_beside(void *result) {
    sala_error err;
    sala__cuda c;
    sala__env quiet;
    memset(&quiet, 0, sizeof quiet);
    int code = sala__cuda_open(&quiet, 0, &c, &err);
    c.source = tiny_source;
    c.header = tiny_header;
    if (code == 0) code = sala__cuda_enter(&c, &err);
    if (code == 0) code = sala__cuda_compile(&c, NULL, 0, 3, &err);
    if (code == 0) sala__cuda_leave(&c);
    if (code == 0) sala__cuda_close(&c);
    *(int *)result = code;
    return NULL;
}

static void cache_together(void) {
    for (int round = 0; round < 5; round++) {
        enum { THREADS = 6 };
        pthread_t threads[THREADS];
        int results[THREADS];
        fake(round % 2 ? "" : "sleep=3");
        shell("rm -rf '%s'", path_of("cache"));
        for (int i = 0; i < THREADS; i++)
            if (pthread_create(&threads[i], NULL, compile_beside, &results[i])) exit(1);
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        for (int i = 0; i < THREADS; i++) CHECK(results[i] == 0, "thread %d", i);
        CHECK(files_like("cache", "*") == 2, "%d files", files_like("cache", "*"));
        int before = *counter("fake_compiled"), code;
        compile_beside(&code);
        CHECK(code == 0 && *counter("fake_compiled") == before, "the files are not good");
        check_balance("together");
    }
}

// ---- the real compiler, where there is one ----

static void real_compiler(void) {
    sala__cuda c;
    sala_error err = {0, ""};
    fake("");
    unsetenv("SALA_NVRTC");
    shell("rm -rf '%s'", path_of("cache"));
    if (open_tiny(&c, &err) < 0) {
        CHECK(strstr(err.text, "NVRTC"), "%s", err.text);
        printf("  skipped: %s\n", err.text);
        return;
    }
    double start = sala__now();
    CHECK(sala__cuda_enter(&c, &err) == 0, "%s", err.text);
    int code = sala__cuda_compile(&c, NULL, 0, 1, &err);
    CHECK(code == 0 && c.module_count == 1, "%s", err.text);
    double middle = sala__now();
    code = sala__cuda_compile(&c, NULL, 0, 1, &err);
    CHECK(code == 0 && c.module_count == 2, "%s", err.text);
    printf("  NVRTC %d: compiled in %.0f ms, from the cache in %.1f ms\n", c.compiler_version,
           1e3 * (middle - start), 1e3 * (sala__now() - middle));
    c.source = "#include \"kernels.h\"\n\n__global__ void f(tiny a) { *a.p = nonsense; }\n";
    code = sala__cuda_compile(&c, NULL, 0, 3, &err);
    CHECK(code == SALA_E_DEVICE && c.module_count == 2, "%d", code);
    CHECK(strstr(err.text, "sala.cu(3): error: identifier \"nonsense\" is undefined"), "%s",
          err.text);
    c.source = tiny_source;
    strcpy(c.architecture, "sm_999");
    code = sala__cuda_compile(&c, NULL, 0, 1, &err);
    CHECK(code == SALA_E_DEVICE && strstr(err.text, "architecture"), "%s", err.text);
    printf("  %s\n", err.text);
    sala__cuda_leave(&c);
    sala__cuda_close(&c);
    check_balance("real compiler");
}

TEST_MAIN(TEST(toolkit), TEST(device_names), TEST(no_driver), TEST(refusals), TEST(opens),
          TEST(compiler_search), TEST(memory), TEST(launches), TEST(compiling), TEST(cache_hits),
          TEST(cache_damage), TEST(cache_refused), TEST(cache_folders), TEST(cache_leftovers),
          TEST(cache_together), TEST(real_compiler))

#endif
