/*  check_kernels.c - `make check-kernels`: compile the kernels for every target and look at what they need.

    No GPU is used, only NVRTC. For each kernel and target one table shows the registers, shared memory and
    what was spilled, a second one the bytes of code: kernels that run once a layer stall on their instructions
    unless all of them stay in a cache of about 100 KB. The program fails if a target does not compile, if
    anything is spilled or kept in local memory, or if a block wants more shared memory than the target has.
    Targets that this NVRTC does not know are named and skipped.

        check_kernels [SALA.CU KERNELS.H]     without files: the sources that are built in */
#define SALA_IMPLEMENTATION
#include "../sala.h"

#define CHECK_TARGETS 7
static const char *const targets[CHECK_TARGETS] = {"sm_80",  "sm_86",   "sm_89",  "sm_90",
                                                   "sm_100", "sm_120a", "sm_121a"};

static const int target_shared[CHECK_TARGETS] = { // bytes that a block may ask for
    163 << 10, 99 << 10, 99 << 10, 227 << 10, 227 << 10, 99 << 10, 99 << 10};

static const struct check_model {
    const char *name;
    sala_dims dims;
} models[] = {
    {"9B", {73448, 4096,  16384, 32, 32,          2,  128,          0,           1, 64, 32,
            16,    1,     32,    64, 8192,        32, 32,           128,         1, 1,  1,
            1,     1e-6f, 10000, 12, 0.24748737f, 16, 0.088388348f, 0.088388348f}},
    {"sala-tiny",
     {2048,        256, 768,          8,           2, 1,   128, 0, 1, 64, 32,    16,    1,
      4,           8,   512,          2,           2, 128, 1,   1, 1, 1,  1e-6f, 10000, 12,
      0.49497475f, 1,   0.088388348f, 0.088388348f}},
};

// Bytes of dynamic shared memory, as the launchers in sala.h ask for it; all others use none.
static long dynamic_shared(const char *kernel, const sala_dims *m, int target) {
    const struct {
        const char *kernel;
        long bytes;
    } known[] = {{"sala_gemm", SALA_GEMM_SHARED},
                 {"sala_gemm_nvfp4", SALA_GEMM4_SHARED},
                 {"sala_gemm_nvfp4_wide", target_shared[target]},
                 {"sala_gemm_int4", SALA_GEMM4_SHARED},
                 {"sala_gemm_int4_wide", target_shared[target]},
                 {"sala_gemm_nvfp4_broad", SALA_GEMM4_SHARED},
                 {"sala_gemm_nvfp4_row", SALA_GEMM4_SHARED},
                 {"sala_gemm_int4_broad", SALA_GEMM4_SHARED},
                 {"sala_norm", SALA_GEMM_SHARED},
                 {"sala_prefill_gemm", SALA_PREFILL_SHARED},
                 {"sala_prefill_fp4", SALA_FP4_SHARED},
                 {"sala_norm_quant", 16},
                 {"sala_gla_verify", SALA__GLA_SHARED},
                 {"sala_prefill_gla", SALA_GLA_TILES_SHARED},
                 {"sala_select_normaliser", SALA_SELECT_NORMALISER_SHARED},
                 {"sala_select_score", SALA_SELECT_SCORE_SHARED},
                 {"sala_select_top", SALA_SELECT_TOP_SHARED},
                 {"sala_attend", SALA_ATTEND_SHARED},
                 {"sala_attend_trees", SALA_ATTEND_SHARED},
                 {"sala_attend_combine", SALA_ATTEND_COMBINE_SHARED},
                 {"sala_sample", SALA_SAMPLE_SHARED},
                 {"sala_prefill_dense", SALA_PREFILL_DENSE_SHARED},
                 {"sala_prefill_sparse", SALA_PREFILL_SPARSE_SHARED(m->top_k)},
                 {"sala_prefill_store", SALA_PREFILL_STORE_SHARED},
                 {"sala_prefill_score", SALA_PREFILL_SCORE_SHARED},
                 {"sala_capture", 32 * 4},
                 {"sala_draft_input", SALA__DRAFT_INPUT_SHARED},
                 {"sala_draft_top", SALA__DRAFT_TOP_SHARED},
                 {"sala_draft_grow", SALA__DRAFT_GROW_SHARED}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(kernel, known[i].kernel) == 0) return known[i].bytes;
    return 0;
}

typedef struct usage { // of one kernel on one target; registers 0: nothing is known
    long registers, shared, stack, stores, loads, code,
        fp4; // fp4: instructions of FP4 tensor cores
} usage;

typedef struct table {
    usage of[SALA__KERNEL_COUNT][CHECK_TARGETS];
    double seconds[CHECK_TARGETS]; // -1: this NVRTC does not know the target
} table;

static char *read_text(const char *path) {
    FILE *f = fopen(path, "rb");
    char *text = f ? (char *)calloc(1, (size_t)1 << 22) : NULL;
    if (!text || fread(text, 1, ((size_t)1 << 22) - 1, f) == 0) {
        fprintf(stderr, "check_kernels: cannot read %s\n", path);
        exit(2);
    }
    fclose(f);
    return text;
}

static int kernel_number(const char *name, size_t size) {
    for (int i = 0; i < SALA__KERNEL_COUNT; i++)
        if (strlen(sala__kernels[i].name) == size && memcmp(sala__kernels[i].name, name, size) == 0)
            return i;
    return -1;
}

// The number before a word of a line of ptxas, as in "16 bytes smem".
static long number_before(const char *line, const char *end, const char *word) {
    const char *at = strstr(line, word);
    if (!at || at > end) return 0;
    while (at > line && (at[-1] == ' ' || (at[-1] >= '0' && at[-1] <= '9'))) at--;
    return strtol(at, NULL, 10);
}

// What ptxas -v says: "Compiling entry function 'NAME' ...", then two lines with its figures.
static void read_log(const char *log, int target, table *t) {
    usage *u = NULL;
    for (const char *line = log; *line;) {
        const char *end = strchr(line, '\n');
        if (!end) end = line + strlen(line);
        const char *name = strstr(line, "entry function '");
        if (name && name < end) {
            name += strlen("entry function '");
            int number = kernel_number(name, strcspn(name, "'"));
            u = number < 0 ? NULL : &t->of[number][target];
        }
        if (u && number_before(line, end, " registers")) {
            u->registers = number_before(line, end, " registers");
            u->shared = number_before(line, end, " bytes smem");
        }
        const char *frame = strstr(line, " bytes stack frame");
        if (u && frame && frame < end) {
            u->stack = number_before(line, end, " bytes stack frame");
            u->stores = number_before(line, end, " bytes spill stores");
            u->loads = number_before(line, end, " bytes spill loads");
        }
        line = *end ? end + 1 : end;
    }
}

static uint64_t little_endian(const unsigned char *from, int bytes) {
    uint64_t x = 0;
    for (int i = bytes - 1; i >= 0; i--) x = x << 8 | from[i];
    return x;
}

// The sizes of the sections ".text.NAME" of a cubin, which is an ELF file of 64 bits.
static void read_cubin(const unsigned char *elf, size_t size, int target, table *t) {
    static const char text[] = ".text.";
    enum { OMMA = 0x47F }; // mma.sync of kind mxf4nvf4 on sm_120a and sm_121a
    if (size < 64 || memcmp(elf, "\177ELF\2", 5) != 0) return;
    uint64_t first = little_endian(elf + 0x28, 8), each = little_endian(elf + 0x3A, 2);
    uint64_t count = little_endian(elf + 0x3C, 2), names = little_endian(elf + 0x3E, 2);
    if (first > size || each < 64 || count > (size - first) / each || names >= count) return;
    uint64_t strings = little_endian(elf + first + names * each + 0x18, 8);
    for (uint64_t i = 0; i < count; i++) {
        const unsigned char *section = elf + first + i * each;
        uint64_t at = strings + little_endian(section, 4);
        const char *name = (const char *)elf + at;
        if (at >= size || strncmp(name, text, sizeof text - 1) != 0) continue;
        name += sizeof text - 1;
        int number = kernel_number(name, strlen(name));
        if (number < 0) continue;
        uint64_t from = little_endian(section + 0x18, 8), bytes = little_endian(section + 0x20, 8);
        usage *u = &t->of[number][target];
        u->code = (long)bytes;
        if (from > size || bytes > size - from) continue;
        for (uint64_t j = 0; j + 16 <= bytes;
             j += 16) // an instruction; its lowest 12 bits say what
            u->fp4 += (little_endian(elf + from + j, 2) & 0xFFF) == OMMA;
    }
}

static void read_code(sala__cuda *c, sala__cu_program program, int target, table *t) {
    size_t size = 0;
    if (c->api.nvrtcGetCUBINSize(program, &size) != 0 || size == 0) return;
    char *cubin = (char *)calloc(1, size + 1);
    if (cubin && c->api.nvrtcGetCUBIN(program, cubin) == 0)
        read_cubin((const unsigned char *)cubin, size, target, t);
    free(cubin);
}

// Compile one unit of the source. Returns 1, 0 when this NVRTC does not know the target, -1 on an error.
static int compile_unit(sala__cuda *c, int target, int unit, const char *dims, table *t) {
    enum { INVALID_OPTION = 5 };
    char architecture[48], number[32], shared[48];
    snprintf(shared, sizeof shared, "-DSALA_TEAMS_SHARED=%d", target_shared[target]);
    snprintf(architecture, sizeof architecture, "--gpu-architecture=%s", targets[target]);
    snprintf(number, sizeof number, "-DSALA_UNIT=%d", unit);
    const char *options[] = {architecture,         number, dims, "-std=c++17", "--fmad=false",
                             "--ptxas-options=-v", shared};
    const char *name = "kernels.h";
    sala__cu_program program = NULL;
    size_t size = 0;
    unsigned code = c->api.nvrtcCreateProgram(&program, c->source, "sala.cu", 1, &c->header, &name);
    if (code == 0)
        code =
            c->api.nvrtcCompileProgram(program, (int)(sizeof options / sizeof *options), options);
    c->api.nvrtcGetProgramLogSize(program, &size);
    char *log = (char *)calloc(1, size + 1);
    if (log && size) c->api.nvrtcGetProgramLog(program, log);
    if (code == 0) read_code(c, program, target, t);
    c->api.nvrtcDestroyProgram(&program);
    if (log && code == 0) read_log(log, target, t);
    if (code && code != INVALID_OPTION)
        fprintf(stderr, "%s: %s\n", targets[target], log ? log : "out of memory");
    free(log);
    return code == 0 ? 1 : code == INVALID_OPTION ? 0 : -1;
}

// All targets. Returns how many did not compile.
static int compile_all(sala__cuda *c, const sala_dims *m, table *t) {
    int failed = 0, units = strstr(c->source, "SALA_UNIT") ? SALA__GPU_UNITS : 1;
    char dims[1024];
    memset(t, 0, sizeof *t);
    sala__gpu_dims_option(m, dims);
    for (int target = 0; target < CHECK_TARGETS; target++) {
        double began = sala__now();
        int code = 1;
        for (int unit = 0; unit < units && code == 1; unit++)
            code = compile_unit(c, target, unit, dims, t);
        t->seconds[target] = code ? sala__now() - began : -1;
        failed += code < 0;
    }
    return failed;
}

// One line of the table. Returns how many faults were found.
static int print_kernel(int kernel, const sala_dims *m, const table *t) {
    const char *name = sala__kernels[kernel].name;
    long shared[CHECK_TARGETS], most = 0;
    int faults = 0;
    for (int i = 0; i < CHECK_TARGETS; i++) {
        shared[i] = t->of[kernel][i].shared + dynamic_shared(name, m, i);
        if (shared[i] > most) most = shared[i];
    }
    printf("%-24s %5d %8ld", name, (int)sala__kernels[kernel].threads, most);
    for (int i = 0; i < CHECK_TARGETS; i++) {
        const usage *u = &t->of[kernel][i];
        char cell[64] = "-";
        int spilled = u->stack || u->stores || u->loads;
        if (u->registers) snprintf(cell, sizeof cell, "%ld%s", u->registers, spilled ? "!" : "");
        printf(" %8s", cell);
        faults += t->seconds[i] >= 0 && (spilled || u->registers == 0);
    }
    printf("\n");
    for (int i = 0; i < CHECK_TARGETS; i++) {
        const usage *u = &t->of[kernel][i];
        if (u->stack || u->stores || u->loads)
            printf("  ! %s: stack frame %ld, spill stores %ld, spill loads %ld bytes\n", targets[i],
                   u->stack, u->stores, u->loads);
        if (t->seconds[i] >= 0 && u->registers == 0) printf("  ! %s: not compiled\n", targets[i]);
        if (shared[i] <= target_shared[i]) continue;
        printf("  ! %s: more than %d bytes of shared memory\n", targets[i], target_shared[i]);
        faults++;
    }
    return faults;
}

static void print_targets(const char *title, const char *more) {
    printf("%-24s %14s", title, more);
    for (int i = 0; i < CHECK_TARGETS; i++) printf(" %8s", targets[i]);
    printf("\n");
}

static void print_code(const table *t) {
    long sums[CHECK_TARGETS] = {0};
    print_targets("bytes of code", "");
    for (int k = 0; k < SALA__KERNEL_COUNT; k++) {
        printf("%-24s %14s", sala__kernels[k].name, "");
        for (int i = 0; i < CHECK_TARGETS; i++) {
            printf(" %8ld", t->of[k][i].code);
            sums[i] += t->of[k][i].code;
        }
        printf("\n");
    }
    printf("%-24s %14s", "all", "");
    for (int i = 0; i < CHECK_TARGETS; i++) printf(" %8ld", sums[i]);
    printf("\n");
}

// Products of FP4 must be done by FP4 tensor cores where there are some: one instruction for each pair of
// tiles of each shape.
static int check_fp4(const table *t) {
    int faults = 0, kernel = kernel_number("sala_prefill_fp4", strlen("sala_prefill_fp4"));
    if (kernel < 0) return 0;
    long want = 0;
#define CHECK_SHAPE(number, tall, wide, clocks) want += (tall) * (wide);
    SALA_PREFILL_SHAPES(CHECK_SHAPE)
#undef CHECK_SHAPE
    for (int i = 0; i < CHECK_TARGETS; i++) {
        long mine = strchr(targets[i], 'a') ? want : 0, got = t->of[kernel][i].fp4;
        if (t->seconds[i] < 0 || (got == mine && !mine)) continue;
        printf("sala_prefill_fp4 on %s: %ld FP4 MMAs%s\n", targets[i], got,
               got == mine ? "" : " !");
        if (got != mine) printf("  ! there should be %ld\n", mine);
        faults += got != mine;
    }
    return faults;
}

static int check_model(sala__cuda *c, const struct check_model *model) {
    static table t;
    int faults = compile_all(c, &model->dims, &t), known = 0;
    print_targets(model->name, "block   shared");
    for (int i = 0; i < SALA__KERNEL_COUNT; i++) faults += print_kernel(i, &model->dims, &t);
    printf("%-24s %5s %8s", "seconds to compile", "", "");
    for (int i = 0; i < CHECK_TARGETS; i++) {
        if (t.seconds[i] >= 0)
            printf(" %8.1f", t.seconds[i]);
        else
            printf(" %8s", "skipped");
        known += t.seconds[i] >= 0;
    }
    printf("\n\n");
    faults += check_fp4(&t);
    print_code(&t);
    printf("\n");
    return known ? faults : faults + 1;
}

int main(int argc, char **argv) {
    sala__cuda c;
    sala_error err;
    memset(&c, 0, sizeof c);
    memset(&err, 0, sizeof err);
    c.major = 8;
    c.driver_version = 1000 * INT16_MAX; // there is none that a compiler could be too new for
    const char *own = sala__cuda_setting("SALA_NVRTC");
    int code = own ? sala__cuda_try_compiler(&c, own, &err) : SALA_E_DEVICE;
    for (int major = 13; major >= 12 && code < 0 && !own; major--)
        code = sala__cuda_search_compiler(&c, major, &err);
    if (code < 0) {
        fprintf(stderr, "check_kernels: no NVRTC: %s\n", err.code ? err.text : "set SALA_NVRTC");
        return 2;
    }
    c.source = argc == 3 ? read_text(argv[1]) : sala__source_cu;
    c.header = argc == 3 ? read_text(argv[2]) : sala__source_kernels;
    printf("NVRTC %d.%d; registers a thread for each target\n\n", c.compiler_version / 1000,
           c.compiler_version % 1000 / 10);
    int faults = 0;
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
        faults += check_model(&c, &models[i]);
    printf("%d faults\n", faults);
    return faults > 0;
}
