/*  sim.cpp - the CUDA simulator: libsala_sim.so. What it is and how to steer it stands in sim.h.

    Sections: [1] errors and settings, [2] fibres, [3] the memory of the device, [4] rendezvous of a
    warp, [5] barriers, copies and waits, [6] the scheduler of a grid, [7] streams, [8] modules,
    [9] the driver's functions, [10] NVRTC's functions.

    One lock guards everything; kernels run in the thread that waits for their stream.
*/
#define SALA_SIM_LIBRARY
#include "sim.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SALA_SIM_HEADER
#define SALA_SIM_HEADER "tests/sim/sim.h" // relative to the folder in which this file is compiled
#endif
__asm__(".pushsection .rodata\n"
        ".global sala_sim_header\n.hidden sala_sim_header\nsala_sim_header:\n"
        ".incbin \"" SALA_SIM_HEADER "\"\n.byte 0\n"
        ".popsection\n");
extern "C" const char sala_sim_header[];

#define INLINE inline __attribute__((always_inline)) // where a return would be mispredicted
#define API extern "C" __attribute__((visibility("default")))

// AddressSanitizer's interface, there when the program or this library was built with it.
#define WEAK extern "C" __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *size);
WEAK void __asan_poison_memory_region(const volatile void *p, size_t size);
WEAK void __asan_unpoison_memory_region(const volatile void *p, size_t size);

static void poison(void *p, size_t size) {
    if (__asan_poison_memory_region && size) __asan_poison_memory_region(p, size);
}
static void unpoison(void *p, size_t size) {
    if (__asan_unpoison_memory_region && size) __asan_unpoison_memory_region(p, size);
}

// ---- [1] errors and settings ----

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901
};

static std::recursive_mutex lock;
static std::string last_error;
static int sticky; // the error that a failed kernel left in the context
static long lost;  // objects alive when the context was released
static long launches;

static long long setting(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}
static int architecture() {
    return (int)setting("SALA_SIM_ARCH", 90);
}

// An error of the program under test: told on stderr and kept for sala_sim_error().
__attribute__((format(printf, 2, 3))) static int refuse(int code, const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    last_error = text;
    fprintf(stderr, "sala simulator: %s\n", text);
    return code;
}

static uint64_t generator = 1;
static inline uint32_t random_bits() { // splitmix64
    uint64_t z = (generator += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}
static size_t random_below(size_t n) {
    return (size_t)((uint64_t)random_bits() * n >> 32);
}

// ---- [2] fibres ----
// A fibre is a stack and a saved stack pointer. A switch saves the registers that a call keeps.

#if defined(__x86_64__)
// The jump (rather than a return) goes nearly always to the same place, which is well predicted.
__asm__(".text\n.type sala_sim_switch,%function\nsala_sim_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
        "popq %rcx\njmp *%rcx\n");
static const int SAVED_WORDS = 7, ENTRY_WORD = 6;
#elif defined(__aarch64__)
__asm__(".text\n.type sala_sim_switch,%function\nsala_sim_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
        "stp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
        "ldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
static const int SAVED_WORDS = 20, ENTRY_WORD = 11;
#else
#error "the simulator knows how to switch stacks on x86-64 and aarch64 only"
#endif
extern "C" __attribute__((visibility("hidden"))) void sala_sim_switch(void **save, void *to);

struct Stack {
    void *sp;           // of a fibre that does not run
    const void *bottom; // lowest address
    size_t size;
    void *fake; // AddressSanitizer's
};

struct Copy { // a cp.async in flight
    void *to;
    const void *from;
    int group, size;
    bool valid, read; // zeros if not valid; read: the data was taken when it was issued
    unsigned char data[16];
};

struct Block;
struct Warp;

struct Fibre : sala_sim_thread {
    Stack stack;
    size_t colour;
    Block *block;
    Warp *warp;
    int lane;
    int wait, line;     // where it waits (sala_sim_kind), or -1
    const int *counter; // sala_await
    int target;
    bool waited; // called sala_wait_grid
    int groups;  // committed copies
    std::vector<Copy> copies;
};

static sala_sim_api api; // api.self is the running fibre
static Stack scheduler;  // the stack of the thread that runs the kernels
static Stack *previous;  // the stack that was left last
static std::vector<Fibre *> idle_fibres;

static inline Fibre *self() {
    return static_cast<Fibre *>(api.self);
}

static size_t page_size() {
    static const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    return size;
}

// Leaves `from` for `to`; comes back when somebody switches to `from`.
INLINE static void switch_stack(Stack *from, Stack *to, bool for_good) {
    previous = from;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(for_good ? NULL : &from->fake, to->bottom, to->size);
    sala_sim_switch(&from->sp, to->sp);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(from->fake, &previous->bottom, &previous->size);
}

static void fibre_main();
static void fibre_entry() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(NULL, &previous->bottom, &previous->size);
    fibre_main();
}

// A fibre ready to enter fibre_main; from the idle ones, or a new one with a page below its stack
// that faults.
static Fibre *fibre_take() {
    static size_t count;
    if (idle_fibres.empty()) {
        size_t guard = page_size(), size = __sanitizer_start_switch_fiber ? 512 << 10 : 64 << 10;
        void *p = mmap(NULL, guard + size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return NULL;
        mprotect(p, guard, PROT_NONE);
        Fibre *f = new Fibre();
        f->stack.bottom = (char *)p + guard;
        f->stack.size = size;
        f->colour = 448 * (count++ % 37); // or all stacks would use the same lines of the cache
        idle_fibres.push_back(f);
    }
    Fibre *f = idle_fibres.back();
    idle_fibres.pop_back();
    unpoison((void *)f->stack.bottom, f->stack.size); // what an abandoned fibre left
    void **top = (void **)((char *)f->stack.bottom + f->stack.size - 64 - f->colour);
    void **sp = top - SAVED_WORDS - (SAVED_WORDS & 1); // a function starts 8 off 16 on x86-64
    memset(sp, 0, (size_t)((char *)top - (char *)sp));
    sp[ENTRY_WORD] = (void *)fibre_entry;
    f->stack.sp = sp;
    return f;
}

static void fibres_free() { // the idle ones
    for (Fibre *f : idle_fibres) {
        munmap((char *)f->stack.bottom - page_size(), f->stack.size + page_size());
        delete f;
    }
    idle_fibres.clear();
}

// ---- [3] the memory of the device ----
// Each allocation lies in its own pages, its end close to pages that fault; the bytes between hold a
// pattern. While no kernel runs, the host cannot touch any of it.

struct Memory {
    unsigned char *p, *base; // of the mapping
    size_t size, mapped;
    bool host; // cuMemHostAlloc
};

static const size_t FENCE = 16 << 20; // address space only
static const unsigned char PATTERN = 0xA5;
static std::map<uintptr_t, Memory> memories;
static size_t memory_used;

static void memory_reach(bool open) { // lets the host touch the memory of the device, or not
    for (auto &entry : memories) {
        Memory &m = entry.second;
        if (!m.host)
            mprotect(m.base + FENCE, m.mapped - 2 * FENCE,
                     open ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
}

static Memory *memory_new(size_t size, bool host) {
    size_t round = (size + 255) / 256 * 256, pages = (round + page_size() - 1) & ~(page_size() - 1);
    size_t mapped = pages + 2 * FENCE;
    void *p = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    Memory m = {(unsigned char *)p + FENCE + pages - round, (unsigned char *)p, size, mapped, host};
    memset(m.base + FENCE, PATTERN, pages);
    memset(m.p, 0xFF, size);
    poison(m.base + FENCE, pages - round);
    poison(m.p + size, round - size);
    mprotect(m.base, FENCE, PROT_NONE);
    mprotect(m.base + mapped - FENCE, FENCE, PROT_NONE);
    if (!host) {
        memory_used += size;
        mprotect(m.base + FENCE, pages, PROT_NONE);
    }
    return &(memories[(uintptr_t)m.p] = m);
}

__attribute__((no_sanitize("address"))) static bool
pattern_holds(const unsigned char *from, const unsigned char *to, unsigned char pattern) {
    for (; from < to; from++)
        if (*from != pattern) return false;
    return true;
}

// Whether nothing was written around an allocation (which must be within reach).
static bool memory_intact(const Memory &m) {
    unsigned char *from = m.base + FENCE, *to = m.base + m.mapped - FENCE;
    return pattern_holds(from, m.p, PATTERN) && pattern_holds(m.p + m.size, to, PATTERN);
}

static void memory_delete(Memory m) {
    if (!m.host) memory_used -= m.size;
    memories.erase((uintptr_t)m.p);
    unpoison(m.base + FENCE, m.mapped - 2 * FENCE);
    munmap(m.base, m.mapped);
}

// The allocation that holds p, or NULL.
static Memory *memory_of(const void *p) {
    static uintptr_t last; // most calls ask for the same one
    uintptr_t address = (uintptr_t)p;
    auto entry = memories.find(last);
    if (entry == memories.end() || address < entry->first ||
        address >= entry->first + entry->second.size) {
        entry = memories.upper_bound(address);
        if (entry == memories.begin()) return NULL;
        --entry;
        if (address >= entry->first + entry->second.size) return NULL;
        last = entry->first;
    }
    return &entry->second;
}

static bool memory_holds(const void *p, size_t size) {
    Memory *m = memory_of(p);
    return m && size <= m->size - (size_t)((unsigned char *)p - m->p);
}

// Words that are addresses of host memory are replaced by addresses of nothing: a kernel could follow
// them here, but not on a device. Addresses of the heap, of stacks and of libraries are large, and a
// number that is none hardly ever hits a page that exists; but a small int or a float like 1, 16 or
// 1e-6 (which is odd) beside padding, which may hold half of an address, could.
static const uint64_t NOWHERE = 0x6BAD00000000u;

static void hide_host_pointers(void *data, size_t size) {
    for (size_t at = 0; at + 8 <= size; at += 8) {
        uint64_t word;
        unsigned char there;
        memcpy(&word, (char *)data + at, 8);
        if (word < 1ull << 46 || word >= 1ull << 48 || (uint32_t)word < 1u << 20 ||
            (word & 0xFFFFF) == 0 || (word & 1))
            continue;
        if (memory_of((void *)(uintptr_t)word) || memory_of((void *)(uintptr_t)(word - 1)))
            continue;
        void *page = (void *)(uintptr_t)(word & ~(uint64_t)(page_size() - 1));
        if (mincore(page, 1, &there) || !(there & 1)) continue; // (sanitizers reserve terabytes)
        word = NOWHERE + at;
        memcpy((char *)data + at, &word, 8);
    }
}

// ---- [4] rendezvous of a warp ----

struct Warp {
    Block *block;
    Fibre *lanes[32];
    uint32_t live, runnable, arrived; // a bit per lane
    bool queued;                      // in block->ready
    uint32_t priority;
    int kind, line; // of the rendezvous that the arrived lanes are at
    sala_sim_operand *operand[32];
};

struct Grid;

struct Block {
    Grid *grid;
    uint3 index;
    unsigned char *shared, *mapping; // shared memory and what was allocated for it
    int threads, exited;
    std::vector<Warp> warps;
    std::vector<Warp *> ready; // those with a runnable lane
    uint32_t priority;
    int arrived, barrier_kind, barrier_line, barrier_sum, barrier_result;
    int team_arrived[4];
};

static const char *kind_name(int kind) {
    static const char *const names[] = {"__syncwarp",
                                        "__shfl_sync",
                                        "__shfl_up_sync",
                                        "__shfl_down_sync",
                                        "__shfl_xor_sync",
                                        "__ballot_sync",
                                        "__any_sync",
                                        "__all_sync",
                                        "sala_ldmatrix4",
                                        "sala_ldmatrix4_trans",
                                        "sala_mma",
                                        "sala_fp4_mma",
                                        "",
                                        "__syncthreads",
                                        "__syncthreads_or",
                                        "__syncthreads_and",
                                        "__syncthreads_count",
                                        "sala_await",
                                        "sala_wait_grid",
                                        "a team's barrier",
                                        "a team's barrier",
                                        "a team's barrier",
                                        "a team's barrier"};
    return kind < 0 ? "nothing" : names[kind];
}

static void kernel_failed(const char *text); // ends the running kernel

// Ends the running kernel with an error of the running thread; does not return.
__attribute__((format(printf, 2, 3), noreturn)) static void fail(int line, const char *format,
                                                                 ...) {
    char text[512], whole[768];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    uint3 b = self()->block_index, t = self()->thread_index;
    char place[32] = "";
    if (line) snprintf(place, sizeof place, ", line %d", line);
    snprintf(whole, sizeof whole, "block (%u, %u, %u), thread (%u, %u, %u)%s: %s", b.x, b.y, b.z,
             t.x, t.y, t.z, place, text);
    kernel_failed(whole);
    switch_stack(&self()->stack, &scheduler, true);
    abort();
}

static Warp *turn; // the warp that runs: it is not queued

static void make_runnable(Warp *w, uint32_t lanes) {
    w->runnable |= lanes;
    if (w->queued || !w->runnable || w == turn) return;
    w->queued = true;
    w->block->ready.push_back(w);
}

INLINE static Fibre *pick_lane(Warp *w) { // a random runnable one
    unsigned shift = random_bits() >> 27;
    uint32_t turned = w->runnable >> shift | w->runnable << ((32 - shift) & 31);
    return w->lanes[((unsigned)__builtin_ctz(turned) + shift) & 31];
}

// Leaves the running fibre for another lane of its warp, or for the scheduler if no lane can run
// or `reschedule` is set. The caller has cleared its bit in `runnable` if it must wait.
INLINE static void leave(bool reschedule, bool for_good) {
    Fibre *f = self();
    Warp *w = f->warp;
    if (w->runnable && !reschedule) {
        Fibre *next = pick_lane(w);
        if (next == f) return;
        api.self = next;
        switch_stack(&f->stack, &next->stack, for_good);
    } else {
        switch_stack(&f->stack, &scheduler, for_good);
    }
}

INLINE static void wait_at(int kind, int line) {
    Fibre *f = self();
    f->wait = kind;
    f->line = line;
    f->warp->runnable &= ~(1u << f->lane);
    leave(false, false);
    f->wait = -1;
}

// Who goes first among warps and among blocks is a random order that holds until it is drawn anew, so
// that a warp or a block may be left behind for long.
static void new_priorities(Warp *w) {
    w->priority = random_bits();
    w->block->priority = random_bits();
}

typedef float Row8 __attribute__((vector_size(32)));

static float bf16(uint32_t bits) {
    float x;
    bits <<= 16;
    memcpy(&x, &bits, 4);
    return x;
}

// mma.sync.m16n8k16.row.col.f32.bf16.bf16.f32: the exact products are added one by one in k order.
static void mma(Warp *w) {
    float a[16][16];
    Row8 b[16], d[16];
    for (int lane = 0; lane < 32; lane++) {
        const sala_sim_operand *o = w->operand[lane];
        int g = lane >> 2, c = 2 * (lane & 3);
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[g + 8 * (i & 1)][c + 8 * (i >> 1) + half] = bf16(o->a[i] >> (16 * half) & 0xFFFF);
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++)
                b[c + 8 * i + half][g] = bf16(o->b[i] >> (16 * half) & 0xFFFF);
        for (int i = 0; i < 4; i++) d[g + 8 * (i >> 1)][c + (i & 1)] = o->d[i];
    }
    for (int row = 0; row < 16; row += 2) {
        Row8 sum0 = d[row], sum1 = d[row + 1];
        for (int k = 0; k < 16; k++) {
            sum0 += a[row][k] * b[k];
            sum1 += a[row + 1][k] * b[k];
        }
        d[row] = sum0;
        d[row + 1] = sum1;
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            w->operand[lane]->d[i] = d[(lane >> 2) + 8 * (i >> 1)][2 * (lane & 3) + (i & 1)];
}

// mma.sync.m16n8k64 kind::mxf4nvf4 with a scale for 16 k: the exact sums of groups of 16, added in
// FP32 in k order. What the hardware does inside is not documented. A word of scales is that of the
// lane c = 0 of a quad; of row g + 8, of the lane c = 1.
static void fp4_mma(Warp *w) {
    static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float a[16][64], b[64][8];
    auto number = [](uint32_t word, int at, uint64_t scales, int group) {
        uint32_t code = word >> (4 * at) & 15, s = (uint32_t)(scales >> (8 * group)) & 127;
        float scale = s == 127 ? NAN
                      : s < 8  ? ldexpf((float)s, -9)
                               : ldexpf(8.0f + (float)(s & 7), (int)(s >> 3) - 10);
        return (code & 8 ? -scale : scale) * magnitude[code & 7];
    };
    for (int lane = 0; lane < 32; lane++)
        for (int word = 0; word < 2; word++)
            for (int i = 0; i < 8; i++) {
                int g = lane >> 2, k = 32 * word + 8 * (lane & 3) + i;
                const sala_sim_operand *o = w->operand[lane], *low = w->operand[lane & ~3];
                a[g][k] = number(o->a[2 * word], i, low->value, k >> 4);
                a[g + 8][k] =
                    number(o->a[2 * word + 1], i, w->operand[(lane & ~3) + 1]->value, k >> 4);
                b[k][g] = number(o->b[word], i, low->value >> 32, k >> 4);
            }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = (lane >> 2) + 8 * (i >> 1), column = 2 * (lane & 3) + (i & 1);
            for (int group = 0; group < 4; group++) {
                float sum = 0; // of at most 20 bits
                for (int k = 16 * group; k < 16 * group + 16; k++) sum += a[row][k] * b[k][column];
                w->operand[lane]->d[i] += sum;
            }
        }
}

static bool in_shared(const Block *b, const void *p, size_t size);

// ldmatrix.x4: lane 8j + i brings the address of row i of matrix j (8 x 8 of 16 bits).
static void ldmatrix(Warp *w, bool transposed) {
    uint16_t m[4][8][8];
    for (int lane = 0; lane < 32; lane++)
        memcpy(m[lane >> 3][lane & 7], w->operand[lane]->address, 16);
    for (int lane = 0; lane < 32; lane++) {
        int g = lane >> 2, c = 2 * (lane & 3);
        for (int j = 0; j < 4; j++)
            w->operand[lane]->r[j] = transposed ? m[j][c][g] | (uint32_t)m[j][c + 1][g] << 16
                                                : m[j][g][c] | (uint32_t)m[j][g][c + 1] << 16;
    }
}

// The lane whose value `lane` gets; its own where the segment ends.
static int shuffle_source(int kind, int lane, int argument, int width) {
    int first = lane & ~(width - 1), from = lane;
    if (kind == SALA_SIM_SHFL) return first | (argument & (width - 1));
    if (kind == SALA_SIM_SHFL_UP) from = lane - argument;
    if (kind == SALA_SIM_SHFL_DOWN) from = lane + argument;
    if (kind == SALA_SIM_SHFL_XOR)
        return (lane ^ argument) < first + width ? lane ^ argument : lane;
    return from < first || from >= first + width ? lane : from;
}

static void vote(Warp *w) {
    uint32_t ballot = 0;
    for (int lane = 0; lane < 32; lane++)
        ballot |= (uint32_t)(w->operand[lane]->argument != 0) << lane;
    uint32_t result = w->kind == SALA_SIM_BALLOT ? ballot
                      : w->kind == SALA_SIM_ANY  ? ballot != 0
                                                 : ballot == 0xFFFFFFFFu;
    for (int lane = 0; lane < 32; lane++) w->operand[lane]->result = result;
}

static void perform(Warp *w) { // all lanes are here
    switch (w->kind) {
    case SALA_SIM_SYNCWARP: break;
    case SALA_SIM_BALLOT:
    case SALA_SIM_ANY:
    case SALA_SIM_ALL: vote(w); break;
    case SALA_SIM_LDMATRIX: ldmatrix(w, false); break;
    case SALA_SIM_LDMATRIX_TRANS: ldmatrix(w, true); break;
    case SALA_SIM_MMA: mma(w); break;
    case SALA_SIM_FP4_MMA: fp4_mma(w); break;
    default: // shuffles
        for (int lane = 0; lane < 32; lane++) {
            sala_sim_operand *o = w->operand[lane];
            o->result = w->operand[shuffle_source(w->kind, lane, o->argument, o->width)]->value;
        }
    }
}

static void check_operand(const Fibre *f, int kind, int line, const sala_sim_operand *o) {
    if (kind == SALA_SIM_LDMATRIX || kind == SALA_SIM_LDMATRIX_TRANS) {
        if (!in_shared(f->block, o->address, 16))
            fail(line, "%s reads outside of shared memory", kind_name(kind));
        if ((uintptr_t)o->address % 16)
            fail(line, "%s reads a row that is not 16-byte aligned", kind_name(kind));
    }
    if (kind >= SALA_SIM_SHFL && kind <= SALA_SIM_SHFL_XOR &&
        (o->width < 1 || o->width > 32 || (o->width & (o->width - 1))))
        fail(line, "%s with a width of %d", kind_name(kind), o->width);
}

static void collective(int kind, int line, unsigned mask, sala_sim_operand *operand) {
    Fibre *f = self();
    Warp *w = f->warp;
    if (mask != 0xFFFFFFFFu) fail(line, "%s with the partial mask %08x", kind_name(kind), mask);
    if (w->live != 0xFFFFFFFFu)
        fail(line, "divergent collective: %s after lanes of the warp have left (%08x are there)",
             kind_name(kind), w->live);
    if (w->arrived && (w->kind != kind || w->line != line))
        fail(line, "divergent collective: %s, but other lanes are at %s at line %d",
             kind_name(kind), kind_name(w->kind), w->line);
    check_operand(f, kind, line, operand);
    w->kind = kind;
    w->line = line;
    w->operand[f->lane] = operand;
    w->arrived |= 1u << f->lane;
    if (w->arrived != 0xFFFFFFFFu) {
        wait_at(kind, line);
        return;
    }
    w->arrived = 0;
    perform(w);
    w->runnable = 0xFFFFFFFFu;
    if (random_bits() >> 28) return;
    new_priorities(w); // now and then another warp's turn
    leave(true, false);
}

// ---- [5] barriers, copies and waits ----

static const size_t SHARED_LIMIT = 232448, SHARED_GUARD = 4096, SHARED_ALIGNMENT = 1024;

static bool in_shared(const Block *b, const void *p, size_t size);

struct Function;

struct Launch {
    Function *function;
    dim3 grid, block;
    unsigned shared;
    bool dependent; // programmatic stream serialization
    std::vector<unsigned char> args;
};

// A running kernel. A started block is `active` (its warps get turns), `parked` (it can run, but
// others are active) or `waiting` (none of its warps can run).
struct Grid {
    const Launch *launch;
    std::vector<uint32_t> order; // of the blocks
    size_t next;
    std::vector<Block *> active, parked, waiting;
    std::vector<Fibre *> awaiting; // at sala_await
    bool released;                 // sala_wait_grid goes on
    size_t fibres;
};

static bool in_shared(const Block *b, const void *p, size_t size) {
    size_t have = b->grid->launch->shared, at = (size_t)((const unsigned char *)p - b->shared);
    return at <= have && size <= have - at;
}

static void wake(Block *b, int kind) { // who waits at this barrier
    for (Warp &w : b->warps) {
        uint32_t there = 0;
        for (int lane = 0; lane < 32; lane++)
            if ((w.live >> lane & 1) && w.lanes[lane]->wait == kind) there |= 1u << lane;
        make_runnable(&w, there);
    }
}

static void barrier_open(Block *b) {
    b->arrived = 0;
    b->barrier_result = b->barrier_sum;
    wake(b, b->barrier_kind);
}

// The barrier of a team of threads; others may be at other barriers meanwhile.
static void meet_team(int team, int threads, int line) {
    Fibre *f = self();
    Block *b = f->block;
    if (team < 0 || team > 3) fail(line, "a block has four teams at most");
    f->wait = SALA_SIM_TEAM + team;
    f->line = line;
    f->warp->runnable &= ~(1u << f->lane);
    bool opened = ++b->team_arrived[team] == threads;
    if (opened) {
        b->team_arrived[team] = 0;
        wake(b, SALA_SIM_TEAM + team);
    }
    leave(opened, false);
    f->wait = -1;
}

// Like the real one, the barrier does not wait for threads that have left.
static int barrier(int kind, int line, int predicate) {
    Fibre *f = self();
    Block *b = f->block;
    if (b->arrived && (b->barrier_kind != kind || b->barrier_line != line))
        fail(line, "divergent barrier: %s, but other threads are at %s at line %d", kind_name(kind),
             kind_name(b->barrier_kind), b->barrier_line);
    if (!b->arrived) b->barrier_sum = kind == SALA_SIM_SYNCTHREADS_AND;
    b->barrier_kind = kind;
    b->barrier_line = line;
    if (kind == SALA_SIM_SYNCTHREADS_OR) b->barrier_sum |= predicate != 0;
    if (kind == SALA_SIM_SYNCTHREADS_AND) b->barrier_sum &= predicate != 0;
    if (kind == SALA_SIM_SYNCTHREADS_COUNT) b->barrier_sum += predicate != 0;
    f->wait = kind;
    f->line = line;
    f->warp->runnable &= ~(1u << f->lane);
    if (++b->arrived + b->exited == b->threads) barrier_open(b);
    bool opened = b->arrived == 0;
    leave(opened, false); // after the barrier any warp may be first
    f->wait = -1;
    return b->barrier_result;
}

// cp.async: from now to its wait the destination holds NaN; the source is read now or then.
static void copy(void *to, const void *from, int size, bool valid, int line) {
    Fibre *f = self();
    if (!in_shared(f->block, to, (size_t)size)) fail(line, "cp.async to outside of shared memory");
    if ((uintptr_t)to % (unsigned)size)
        fail(line, "cp.async to an address that is not %d-byte aligned", size);
    if (valid && (uintptr_t)from % (unsigned)size)
        fail(line, "cp.async from an address that is not %d-byte aligned", size);
    if (valid && !memory_holds(from, (size_t)size))
        fail(line, "cp.async from outside of device memory");
    Copy c = {to, from, f->groups, size, valid, false, {0}};
    c.read = valid && (random_bits() & 1u << 31);
    if (c.read) memcpy(c.data, from, (size_t)size);
    memset(to, 0xFF, (size_t)size);
    f->copies.push_back(c);
}

static void copy_commit() {
    self()->groups++;
}

static void copy_wait(int pending, int line) {
    Fibre *f = self();
    if (pending < 0) fail(line, "SALA_COPY_WAIT(%d)", pending);
    size_t landed = 0;
    for (Copy &c : f->copies) {
        if (c.group >= f->groups - pending) break;
        if (c.valid && !c.read) memcpy(c.data, c.from, (size_t)c.size);
        memcpy(c.to, c.data, (size_t)c.size);
        landed++;
    }
    f->copies.erase(f->copies.begin(), f->copies.begin() + (long)landed);
}

static void check_global(const void *p, size_t size, size_t alignment, int line) {
    if ((uintptr_t)p % alignment)
        fail(line, "a load from an address that is not %zu-byte aligned", alignment);
    if (!memory_holds(p, size)) fail(line, "a load from outside of device memory");
}

static void await(const int *counter, int target, int line) {
    Fibre *f = self();
    if ((uintptr_t)counter % 4 || !memory_holds(counter, 4))
        fail(line, "sala_await on an address outside of device memory");
    if (*(const volatile int *)counter == target) return;
    f->counter = counter;
    f->target = target;
    f->block->grid->awaiting.push_back(f);
    wait_at(SALA_SIM_AWAIT, line);
}

static void wait_grid(int line) {
    Fibre *f = self();
    f->waited = true;
    if (!f->block->grid->released) wait_at(SALA_SIM_WAIT_GRID, line);
}

// A point at which others may notice what this thread has done. Half of the time (`sure`), or now and
// then, it is left behind: the block and the warp become the last in order.
static void yield(bool sure) {
    uint32_t r = random_bits() >> 29;
    Warp *w = self()->warp;
    if (r < (sure ? 4 : 1)) {
        w->priority = w->block->priority = 0;
        leave(true, false);
    } else if (r == 7) {
        leave(false, false); // another lane first
    }
}

static void fail_with(int line, const char *text) {
    fail(line, "%s", text);
}

// ---- [6] the scheduler of a grid ----

struct Module;

struct Function {
    Module *module;
    const sala_sim_kernel *kernel;
    int dynamic_shared; // largest allowed
};

// An access to memory that is not there ends the kernel. (AddressSanitizer has its own handler.)
static void fault(int number, siginfo_t *info, void *) {
    char *p = (char *)info->si_addr;
    if (!turn) { // not in a kernel
        signal(number, SIG_DFL);
        return;
    }
    Fibre *f = self();
    uint64_t nowhere = (uint64_t)(uintptr_t)p - NOWHERE;
    if (nowhere < 1ull << 32)
        fail(0, "follows a host pointer (about byte %llu of the argument or of an upload)",
             (unsigned long long)nowhere);
    if (p < (char *)f->stack.bottom && p + page_size() >= (char *)f->stack.bottom)
        fail(0, "the thread's stack overflows");
    for (auto &entry : memories) {
        Memory &m = entry.second;
        if (p >= (char *)m.base && p < (char *)m.base + m.mapped)
            fail(0, "illegal address: byte %ld of an allocation of %zu", (long)(p - (char *)m.p),
                 m.size);
    }
    fail(0, "illegal address: %p", (void *)p);
}

static void catch_faults(bool on) {
    static struct sigaction before[2];
    static const int numbers[2] = {SIGSEGV, SIGBUS};
    static char stack[65536];
    static stack_t old_stack;
    struct sigaction action = {};
    stack_t alternative = {};
    if (__asan_poison_memory_region) return;
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 2; i++)
        sigaction(numbers[i], on ? &action : &before[i], on ? &before[i] : NULL);
    sigaltstack(on ? &alternative : &old_stack, on ? &old_stack : NULL);
}

static const size_t ACTIVE_BLOCKS = 3, FIBRE_LIMIT = 16384;

static Grid *running; // for messages
static bool failed;   // the running kernel has failed

static void kernel_failed(const char *text) {
    failed = true;
    refuse(0, "kernel %s, %s (seed %lld)", running->launch->function->kernel->name, text,
           setting("SALA_SIM_SEED", 1));
}

// Where a thread starts, and ends.
static void fibre_main() {
    Fibre *f = self();
    Block *b = f->block;
    const Launch *launch = b->grid->launch;
    launch->function->kernel->run(launch->args.data());
    if (!f->waited) fail(0, "a thread left without sala_wait_grid");
    Warp *w = f->warp;
    uint32_t bit = 1u << f->lane;
    w->live &= ~bit;
    w->runnable &= ~bit;
    if (w->arrived)
        fail(0, "divergent collective: a lane has left while others are at %s at line %d",
             kind_name(w->kind), w->line);
    b->exited++;
    if (b->arrived && b->arrived + b->exited == b->threads) barrier_open(b);
    leave(false, true);
    abort();
}

static Grid *grid_new(const Launch *launch) {
    Grid *g = new Grid();
    g->launch = launch;
    g->order.resize((size_t)launch->grid.x * launch->grid.y * launch->grid.z);
    for (size_t i = 0; i < g->order.size(); i++) g->order[i] = (uint32_t)i;
    for (size_t i = g->order.size(); i > 1; i--)
        std::swap(g->order[i - 1], g->order[random_below(i)]);
    return g;
}

// Shared memory: NaN, with a guard on both sides.
static bool shared_new(Block *b) {
    size_t size = b->grid->launch->shared, room = SHARED_GUARD + size + SHARED_GUARD;
    b->mapping = (unsigned char *)aligned_alloc(SHARED_ALIGNMENT, (room + 1023) / 1024 * 1024);
    if (!b->mapping) return false;
    b->shared = b->mapping + SHARED_GUARD;
    memset(b->mapping, PATTERN, room);
    memset(b->shared, 0xFF, size);
    poison(b->mapping, SHARED_GUARD);
    poison(b->shared + size, SHARED_GUARD);
    return true;
}

static bool shared_delete(Block *b) { // whether the guards are whole
    size_t size = b->grid->launch->shared;
    if (!b->mapping) return true;
    unpoison(b->mapping, SHARED_GUARD);
    unpoison(b->shared + size, SHARED_GUARD);
    bool whole = pattern_holds(b->mapping, b->shared, PATTERN) &&
                 pattern_holds(b->shared + size, b->shared + size + SHARED_GUARD, PATTERN);
    free(b->mapping);
    return whole;
}

static bool thread_new(Block *b, int i) {
    const Launch *launch = b->grid->launch;
    Fibre *f = fibre_take();
    if (!f) return false;
    unsigned x = launch->block.x, y = launch->block.y, at = (unsigned)i;
    f->thread_index = {at % x, at / x % y, at / x / y};
    f->block_index = b->index;
    f->block_dim = launch->block;
    f->grid_dim = launch->grid;
    f->shared = b->shared;
    f->block = b;
    f->warp = &b->warps[at / 32];
    f->lane = i % 32;
    f->wait = -1;
    f->line = f->target = f->groups = 0;
    f->waited = false;
    f->copies.clear();
    f->warp->block = b;
    f->warp->lanes[i % 32] = f;
    f->warp->live |= 1u << (i % 32);
    return true;
}

static void block_delete(Block *b) {
    for (Warp &w : b->warps)
        for (Fibre *f : w.lanes)
            if (f) idle_fibres.push_back(f);
    b->grid->fibres -= (size_t)b->threads;
    delete b;
}

static Block *block_new(Grid *g, uint32_t index) {
    const dim3 &size = g->launch->grid, &block = g->launch->block;
    Block *b = new Block();
    b->grid = g;
    b->index = {index % size.x, index / size.x % size.y, index / size.x / size.y};
    b->threads = (int)(block.x * block.y * block.z);
    b->warps.resize((size_t)(b->threads + 31) / 32);
    g->fibres += (size_t)b->threads;
    bool good = shared_new(b);
    for (int i = 0; good && i < b->threads; i++) good = thread_new(b, i);
    if (!good || g->fibres > FIBRE_LIMIT) {
        kernel_failed(good ? "too many blocks wait at once" : "the simulator is out of memory");
        shared_delete(b);
        block_delete(b);
        return NULL;
    }
    for (Warp &w : b->warps) {
        new_priorities(&w);
        make_runnable(&w, w.live);
    }
    return b;
}

static void block_finish(Block *b) {
    uint3 i = b->index;
    if (!shared_delete(b)) {
        char text[128];
        snprintf(text, sizeof text, "block (%u, %u, %u): a write beyond its shared memory", i.x,
                 i.y, i.z);
        kernel_failed(text);
    }
    block_delete(b);
}

static Block *take(std::vector<Block *> &list, size_t i) {
    Block *b = list[i];
    list[i] = list.back();
    list.pop_back();
    return b;
}

// Makes one more block active: a parked one, or a new one. While the grid waits for another, only so
// many threads as allowed.
static bool activate(Grid *g, size_t limit) {
    if (!g->parked.empty()) {
        g->active.push_back(take(g->parked, random_below(g->parked.size())));
        return true;
    }
    const dim3 &block = g->launch->block;
    if (g->next == g->order.size()) return false;
    if (g->fibres + block.x * block.y * block.z > limit) return false;
    Block *b = block_new(g, g->order[g->next++]);
    if (b) g->active.push_back(b);
    return b != NULL;
}

// Moves blocks that can run again from waiting to parked.
static void wake(Grid *g) {
    for (size_t i = 0; i < g->awaiting.size();) {
        Fibre *f = g->awaiting[i];
        if (*(const volatile int *)f->counter != f->target) {
            i++;
            continue;
        }
        make_runnable(f->warp, 1u << f->lane);
        g->awaiting[i] = g->awaiting.back();
        g->awaiting.pop_back();
    }
    for (size_t i = 0; i < g->waiting.size();)
        if (g->waiting[i]->ready.empty())
            i++;
        else
            g->parked.push_back(take(g->waiting, i));
}

template <class T> static size_t highest(const std::vector<T *> &list) {
    size_t best = 0;
    for (size_t i = 1; i < list.size(); i++)
        if (list[i]->priority > list[best]->priority) best = i;
    return best;
}

static void run_warp(Block *b) { // the first in order, until none of its lanes can go on
    size_t i = highest(b->ready);
    Warp *w = b->ready[i];
    if (random_bits() >> 28 == 0) new_priorities(w);
    b->ready[i] = b->ready.back();
    b->ready.pop_back();
    w->queued = false;
    Fibre *f = pick_lane(w);
    api.self = f;
    turn = w;
    switch_stack(&scheduler, &f->stack, false);
    turn = NULL;
    make_runnable(w, 0);
}

static std::string deadlock_text(const Grid *g) {
    std::string text;
    char line[256];
    bool divergent = false;
    for (size_t i = 0; i < g->waiting.size(); i++) {
        const Block *b = g->waiting[i];
        std::map<std::pair<int, int>, int> places;
        const Fibre *waits = NULL;
        for (const Warp &w : b->warps) {
            divergent |= w.arrived != 0;
            for (int lane = 0; lane < 32; lane++)
                if (w.live >> lane & 1) {
                    places[{w.lanes[lane]->wait, w.lanes[lane]->line}]++;
                    if (w.lanes[lane]->wait == SALA_SIM_AWAIT) waits = w.lanes[lane];
                }
        }
        if (i >= 4) continue;
        snprintf(line, sizeof line, "; block (%u, %u, %u):", b->index.x, b->index.y, b->index.z);
        text += line;
        for (auto &place : places) {
            snprintf(line, sizeof line, " %d at %s at line %d", place.second,
                     kind_name(place.first.first), place.first.second);
            text += line;
        }
        if (waits) {
            snprintf(line, sizeof line, " (the counter is %d, not %d)", *waits->counter,
                     waits->target);
            text += line;
        }
    }
    snprintf(line, sizeof line, "deadlock of %zu blocks", g->waiting.size());
    return line + std::string(divergent ? " (divergent collective)" : "") + text;
}

// Runs a grid to its end, or, while the one before it has not run, as far as it goes. False: it
// failed.
static bool grid_run(Grid *g, size_t limit) {
    running = g;
    for (;;) {
        wake(g);
        while (!failed && g->active.size() < ACTIVE_BLOCKS && activate(g, limit)) {}
        if (failed) return false;
        if (g->active.empty()) break;
        size_t i = highest(g->active);
        Block *b = g->active[i];
        run_warp(b);
        if (failed) return false;
        if (b->exited == b->threads)
            block_finish(take(g->active, i));
        else if (b->ready.empty())
            g->waiting.push_back(take(g->active, i));
        if (failed) return false;
    }
    if (!g->released || g->waiting.empty()) return true;
    kernel_failed(deadlock_text(g).c_str());
    return false;
}

static void grid_release(Grid *g) { // the grid before it has ended
    g->released = true;
    for (Block *b : g->waiting)
        for (Warp &w : b->warps)
            for (int lane = 0; lane < 32; lane++)
                if ((w.live >> lane & 1) && w.lanes[lane]->wait == SALA_SIM_WAIT_GRID)
                    make_runnable(&w, 1u << lane);
}

static void grid_delete(Grid *g) {
    for (auto *list : {&g->active, &g->parked, &g->waiting})
        for (Block *b : *list) {
            shared_delete(b);
            block_delete(b);
        }
    delete g;
}

// ---- [7] streams ----

struct Event {
    bool recorded, done;
    struct timespec time;
};

enum OpKind { OP_COPY_IN, OP_COPY_OUT, OP_COPY, OP_SET, OP_LAUNCH, OP_EVENT };

struct Op {
    OpKind kind;
    void *to;
    const void *from;
    size_t size;
    int value;
    Event *event;
    Launch launch;
    bool first; // of a graph: overlaps with nothing before it
};

struct Graph {
    std::vector<Op> ops;
};

struct Stream {
    std::deque<Op> queue;
    Graph *capture;
    int mode; // of the capture
    bool spoilt;
};

static std::vector<Stream *> streams;
static std::vector<Event *> events;
static std::vector<Graph *> graphs, executables;
static std::vector<Module *> modules;
static Stream default_stream;

template <class T> static bool known(const std::vector<T *> &list, const T *p) {
    return std::find(list.begin(), list.end(), p) != list.end();
}
template <class T> static void forget(std::vector<T *> &list, T *p) {
    list.erase(std::find(list.begin(), list.end(), p));
}

// Runs queue[0], a launch. If the next one depends on it programmatically, that one begins first.
static bool run_launch(Stream *s, Grid **early) {
    Grid *g = *early ? *early : grid_new(&s->queue[0].launch);
    size_t limit = (size_t)setting("SALA_SIM_PDL", 2048);
    if (limit == 1) limit = 2048;
    *early = NULL;
    bool good = true;
    if (s->queue.size() > 1 && limit) {
        Op &next = s->queue[1];
        if (next.kind == OP_LAUNCH && next.launch.dependent && !next.first) {
            *early = grid_new(&next.launch);
            good = grid_run(*early, limit);
        }
    }
    grid_release(g);
    good = good && grid_run(g, SIZE_MAX);
    launches += good;
    grid_delete(g);
    return good;
}

static void run_op(const Op &op) {
    if (op.kind == OP_SET) memset(op.to, op.value, op.size);
    if (op.kind == OP_COPY_IN || op.kind == OP_COPY_OUT) memcpy(op.to, op.from, op.size);
    if (op.kind == OP_COPY_IN && op.size <= 65536) hide_host_pointers(op.to, op.size);
    if (op.kind == OP_COPY) memmove(op.to, op.from, op.size);
    if (op.kind == OP_EVENT) {
        op.event->done = true;
        clock_gettime(CLOCK_MONOTONIC, &op.event->time);
    }
}

static bool check_fences() {
    for (auto &entry : memories)
        if (!memory_intact(entry.second)) {
            refuse(0, "a write beyond the end (or before the start) of the allocation of %zu bytes",
                   entry.second.size);
            return false;
        }
    return true;
}

// Runs what is queued, up to an event or all of it.
static int stream_run(Stream *s, const Event *until) {
    if (s->queue.empty() || sticky) return sticky;
    static uint64_t runs;
    generator = (uint64_t)setting("SALA_SIM_SEED", 1) * 0xD1342543DE82EF95u + runs++;
    memory_reach(true);
    catch_faults(true);
    Grid *early = NULL;
    bool good = true, more = true;
    while (good && more && !s->queue.empty()) {
        Op &op = s->queue[0];
        if (op.kind == OP_LAUNCH)
            good = run_launch(s, &early);
        else
            run_op(op);
        more = op.kind != OP_EVENT || op.event != until;
        s->queue.pop_front();
    }
    if (early) grid_delete(early);
    good = check_fences() && good;
    catch_faults(false);
    memory_reach(false);
    failed = false;
    if (good) return SUCCESS;
    s->queue.clear();
    return sticky = LAUNCH_FAILED;
}

static int run_all() {
    for (Stream *s : streams) stream_run(s, NULL);
    return stream_run(&default_stream, NULL);
}

static int submit(Stream *s, Op op) {
    if (s->capture)
        s->capture->ops.push_back(op);
    else
        s->queue.push_back(op);
    return SUCCESS;
}

static bool capturing() { // in a mode that forbids what is not asynchronous
    for (Stream *s : streams)
        if (s->capture && s->mode != 2) {
            s->spoilt = true;
            return true;
        }
    return false;
}

// A copy to host memory may come at any time: until then the place holds NaN, unless earlier work of
// the stream reads it.
static void spoil_destination(Stream *s, void *to, size_t size) {
    for (const Op &op : s->queue)
        if (op.kind == OP_COPY_IN && (char *)op.from < (char *)to + size &&
            (char *)to < (char *)op.from + op.size)
            return;
    memset(to, 0xFF, size);
}

// ---- [8] modules ----
// The "cubin" is this header and a shared object.

struct Image {
    char magic[8];
    uint64_t size, checksum; // of the shared object
    uint32_t arch, needs;    // needs: features of the CPU
    uint64_t interface;      // checksum of sim.h
    uint64_t header;         // checksum of what is above
};

struct Module {
    void *library;
    std::string folder;
    std::vector<Function *> functions;
};

static uint64_t checksum(const void *p, size_t size) { // FNV-1a
    const unsigned char *bytes = (const unsigned char *)p;
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < size; i++) h = (h ^ bytes[i]) * 0x100000001B3u;
    return h;
}

static uint32_t cpu_features() { // 1: AVX2 and FMA
#ifdef __x86_64__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

static std::string folder_new() {
    const char *top = getenv("TMPDIR");
    std::string name = std::string(top && *top ? top : "/tmp") + "/sala_sim_XXXXXX";
    return mkdtemp(&name[0]) ? name : "";
}

static void folder_delete(const std::string &folder, const std::vector<std::string> &files) {
    if (folder.empty()) return;
    if (getenv("SALA_SIM_KEEP")) {
        fprintf(stderr, "sala simulator: kept %s\n", folder.c_str());
        return;
    }
    for (const std::string &file : files) unlink((folder + "/" + file).c_str());
    rmdir(folder.c_str());
}

static bool write_file(const std::string &path, const void *data, size_t size) {
    FILE *f = fopen(path.c_str(), "wb");
    if (!f) return false;
    bool good = fwrite(data, 1, size, f) == size;
    return fclose(f) == 0 && good;
}

static bool read_file(const std::string &path, std::string *text) {
    FILE *f = fopen(path.c_str(), "rb");
    if (!f) return false;
    char buffer[65536];
    size_t n;
    text->clear();
    while ((n = fread(buffer, 1, sizeof buffer, f)) > 0) text->append(buffer, n);
    fclose(f);
    return true;
}

static int module_open(Module *m, const void *image) {
    Image head;
    memcpy(head.magic, image, sizeof head.magic);
    if (memcmp(head.magic, "SALASIM1", 8)) return INVALID_IMAGE;
    memcpy(&head, image, sizeof head);
    const char *object = (const char *)image + sizeof head;
    if (head.header != checksum(&head, offsetof(Image, header))) return INVALID_IMAGE;
    if (head.interface != checksum(sala_sim_header, strlen(sala_sim_header))) return INVALID_IMAGE;
    if (head.size < 64 || memcmp(object, "\177ELF", 4)) return INVALID_IMAGE;
    if (head.checksum != checksum(object, (size_t)head.size)) return INVALID_IMAGE;
    if (head.arch != (uint32_t)architecture()) return NO_BINARY_FOR_GPU;
    if (head.needs & ~cpu_features()) return INVALID_IMAGE;
    m->folder = folder_new();
    std::string path = m->folder + "/module.so";
    if (m->folder.empty() || !write_file(path, object, (size_t)head.size)) return OUT_OF_MEMORY;
    m->library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!m->library) return refuse(INVALID_IMAGE, "%s", dlerror());
    if (!__asan_poison_memory_region) { // whose reports read it
        folder_delete(m->folder, {"module.so"});
        m->folder.clear();
    }
    typedef const sala_sim_kernel *(*Attach)(sala_sim_api *);
    Attach attach = (Attach)dlsym(m->library, SALA_SIM_ATTACH);
    if (!attach) return INVALID_IMAGE;
    for (const sala_sim_kernel *k = attach(&api); k->name; k++)
        m->functions.push_back(new Function{m, k, 49152});
    return SUCCESS;
}

static void module_delete(Module *m) {
    for (Function *f : m->functions) delete f;
    if (m->library) dlclose(m->library);
    folder_delete(m->folder, {"module.so"});
    delete m;
}

// ---- [9] the driver's functions ----
// Types as in cuda.h: CUdeviceptr is 64 bits, handles are pointers, CUdevice an int.

typedef uint64_t DevicePointer;

struct LaunchAttribute {
    unsigned id;
    char pad[4];
    union {
        char pad[64];
        int allowed;
    } value;
};

struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    Stream *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
};

static bool initialized;
static int retained;                             // count of the primary context
static char context;                             // its address is the handle
static thread_local std::vector<void *> current; // contexts pushed by this thread

#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)
#define ENTER                                                                                      \
    LOCKED;                                                                                        \
    if (!initialized) return NOT_INITIALIZED;                                                      \
    if (current.empty() || !current.back() || !retained)                                           \
        return refuse(INVALID_CONTEXT, "%s without a current context", __func__);                  \
    if (sticky) return sticky

API int cuInit(unsigned flags) {
    LOCKED;
    if (flags) return INVALID_VALUE;
    if (!initialized) {
        initialized = true;
        api = {NULL,         collective, barrier,   copy,  copy_commit, copy_wait,
               check_global, await,      wait_grid, yield, fail_with,   meet_team};
    }
    return SUCCESS;
}

API int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

API int cuDeviceGetCount(int *count) {
    if (!initialized) return NOT_INITIALIZED;
    *count = 1;
    return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (ordinal) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

API int cuDeviceGetName(char *name, int size, int device) {
    if (!initialized) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    snprintf(name, (size_t)size, "sala simulator");
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int table[][2] = {
        {1, 1024},                                  // max threads per block
        {2, 1024},                                  // max block dimensions
        {3, 1024},     {4, 64},    {5, 2147483647}, // max grid dimensions
        {6, 65535},    {7, 65535}, {8, 49152},      // shared memory per block
        {9, 65536},                                 // constant memory
        {10, 32},                                   // warp size
        {12, 65536},                                // registers per block
        {13, 1000000},                              // clock, kHz
        {18, 0},                                    // integrated
        {31, 1},                                    // concurrent kernels
        {33, 0},                                    // PCI bus
        {34, 0},                                    // PCI device
        {36, 1000000},                              // memory clock, kHz
        {37, 128},                                  // memory bus, bits
        {38, 4 << 20},                              // L2 cache
        {39, 2048},                                 // threads per multiprocessor
        {40, 1},                                    // async engines
        {41, 1},                                    // unified addressing
        {81, 233472},                               // shared memory per multiprocessor
        {82, 65536},                                // registers per multiprocessor
        {97, 232448},                               // shared memory per block, opt in
        {106, 32},                                  // blocks per multiprocessor
        {111, 1024},                                // shared memory reserved per block
        {115, 0},                                   // memory pools
    };
    if (!initialized) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (attribute == 16) *value = (int)setting("SALA_SIM_SMS", 4);
    if (attribute == 75) *value = architecture() / 10;
    if (attribute == 76) *value = architecture() % 10;
    if (attribute == 16 || attribute == 75 || attribute == 76) return SUCCESS;
    for (auto &row : table)
        if (row[0] == attribute) {
            *value = row[1];
            return SUCCESS;
        }
    return refuse(INVALID_VALUE, "cuDeviceGetAttribute: the simulator has no attribute %d",
                  attribute);
}

static size_t memory_total() {
    return (size_t)setting("SALA_SIM_MEMORY", 2147483648LL);
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (!initialized) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    *bytes = memory_total();
    return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(void **out, int device) {
    LOCKED;
    if (!initialized) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    retained++;
    *out = &context;
    return SUCCESS;
}

static long alive() {
    return (long)(memories.size() + streams.size() + events.size() + graphs.size() +
                  executables.size() + modules.size());
}

// What the last release of the context finds is lost, and counted.
static void context_destroy() {
    long count = alive();
    if (count)
        refuse(0,
               "the context goes with %zu allocations, %zu streams, %zu events, "
               "%zu graphs, %zu executable graphs and %zu modules alive",
               memories.size(), streams.size(), events.size(), graphs.size(), executables.size(),
               modules.size());
    lost += count;
    for (Stream *s : streams) delete s;
    for (Event *e : events) delete e;
    for (Graph *g : graphs) delete g;
    for (Graph *g : executables) delete g;
    for (Module *m : modules) module_delete(m);
    streams.clear();
    events.clear();
    graphs.clear();
    executables.clear();
    modules.clear();
    default_stream.queue.clear();
    fibres_free();
    while (!memories.empty()) memory_delete(memories.begin()->second);
    sticky = 0;
}

// When the program ends, or drops the library, with the context alive.
static struct AtExit {
    ~AtExit() {
        if (alive()) context_destroy();
        fibres_free();
    }
} at_exit;

API int cuDevicePrimaryCtxRelease_v2(int device) {
    LOCKED;
    if (!initialized) return NOT_INITIALIZED;
    if (device) return INVALID_DEVICE;
    if (!retained) return INVALID_CONTEXT;
    if (--retained == 0) {
        run_all();
        context_destroy();
    }
    return SUCCESS;
}

API int cuCtxPushCurrent_v2(void *c) {
    LOCKED;
    if (!initialized) return NOT_INITIALIZED;
    if (c != &context || !retained) return INVALID_CONTEXT;
    current.push_back(c);
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(void **c) {
    LOCKED;
    if (!initialized) return NOT_INITIALIZED;
    if (current.empty()) return INVALID_CONTEXT;
    if (c) *c = current.back();
    current.pop_back();
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER;
    *total = memory_total();
    *free_bytes = *total > memory_used ? *total - memory_used : 0;
    return SUCCESS;
}

API int cuMemAlloc_v2(DevicePointer *p, size_t size) {
    ENTER;
    if (capturing()) return CAPTURE_UNSUPPORTED;
    if (!p || !size) return INVALID_VALUE;
    if (memory_used + size > memory_total() || memory_used + size < size) return OUT_OF_MEMORY;
    Memory *m = memory_new(size, false);
    if (!m) return OUT_OF_MEMORY;
    *p = (DevicePointer)(uintptr_t)m->p;
    return SUCCESS;
}

static bool in_use(const Memory &m) { // by work that is queued
    const unsigned char *end = m.p + m.size;
    for (Stream *s : streams)
        for (const Op &op : s->queue)
            if ((op.from >= m.p && op.from < end) || (op.to >= m.p && op.to < end)) return true;
    return false;
}

// Frees even after a failed kernel, so that a program that cleans up is not said to leak.
static int memory_free(void *p, bool host) {
    if (!initialized) return NOT_INITIALIZED;
    if (current.empty() || !retained) return INVALID_CONTEXT;
    if (capturing()) return CAPTURE_UNSUPPORTED;
    auto entry = memories.find((uintptr_t)p);
    if (entry == memories.end() || entry->second.host != host)
        return refuse(INVALID_VALUE, "%p is freed, but was not allocated", p);
    if (host && in_use(entry->second))
        return refuse(INVALID_VALUE, "host memory is freed while queued work uses it");
    int code = run_all(); // as the real one, it waits
    memory_delete(entry->second);
    return code;
}

API int cuMemFree_v2(DevicePointer p) {
    LOCKED;
    return p ? memory_free((void *)(uintptr_t)p, false) : SUCCESS;
}

API int cuMemHostAlloc(void **p, size_t size, unsigned flags) {
    ENTER;
    if (!p || !size || flags & ~7u) return INVALID_VALUE;
    if (capturing()) return CAPTURE_UNSUPPORTED;
    Memory *m = memory_new(size, true);
    if (!m) return OUT_OF_MEMORY;
    *p = m->p;
    return SUCCESS;
}

API int cuMemFreeHost(void *p) {
    LOCKED;
    return memory_free(p, true);
}

static Stream *stream_of(Stream *s) {
    if (!s) return &default_stream;
    return known(streams, s) ? s : NULL;
}

static int queue_copy(const char *name, OpKind kind, void *to, const void *from, size_t size,
                      Stream *handle) {
    Stream *s = stream_of(handle);
    if (!s) return refuse(INVALID_HANDLE, "%s: no such stream", name);
    if (!size) return SUCCESS;
    bool device_to = kind != OP_COPY_OUT, device_from = kind == OP_COPY_OUT || kind == OP_COPY;
    if ((device_to && !memory_holds(to, size)) || (device_from && !memory_holds(from, size)))
        return refuse(INVALID_VALUE, "%s: %zu bytes are not all in one allocation", name, size);
    if ((device_to && memory_of(to)->host) || (device_from && memory_of(from)->host))
        return refuse(INVALID_VALUE, "%s: host memory where device memory should be", name);
    Op op = {};
    op.kind = kind;
    op.to = to;
    op.from = from;
    op.size = size;
    if (kind == OP_COPY_OUT && !s->capture) spoil_destination(s, to, size);
    return submit(s, op);
}

API int cuMemcpyHtoDAsync_v2(DevicePointer to, const void *from, size_t size, Stream *s) {
    ENTER;
    return queue_copy(__func__, OP_COPY_IN, (void *)(uintptr_t)to, from, size, s);
}

API int cuMemcpyDtoHAsync_v2(void *to, DevicePointer from, size_t size, Stream *s) {
    ENTER;
    return queue_copy(__func__, OP_COPY_OUT, to, (void *)(uintptr_t)from, size, s);
}

API int cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t size, Stream *s) {
    ENTER;
    return queue_copy(__func__, OP_COPY, (void *)(uintptr_t)to, (void *)(uintptr_t)from, size, s);
}

API int cuMemsetD8Async(DevicePointer to, unsigned char value, size_t size, Stream *handle) {
    ENTER;
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (!size) return SUCCESS;
    if (!memory_holds((void *)(uintptr_t)to, size))
        return refuse(INVALID_VALUE, "cuMemsetD8Async: %zu bytes are not all in one allocation",
                      size);
    Op op = {};
    op.kind = OP_SET;
    op.to = (void *)(uintptr_t)to;
    op.value = value;
    op.size = size;
    return submit(s, op);
}

API int cuStreamCreate(Stream **s, unsigned flags) {
    ENTER;
    if (!s || flags > 1) return INVALID_VALUE;
    *s = new Stream();
    streams.push_back(*s);
    return SUCCESS;
}

API int cuStreamDestroy_v2(Stream *s) {
    LOCKED;
    if (!known(streams, s)) return INVALID_HANDLE;
    int code = stream_run(s, NULL);
    delete s->capture;
    forget(streams, s);
    delete s;
    return code;
}

API int cuStreamSynchronize(Stream *handle) {
    ENTER;
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (s->capture || capturing()) {
        s->spoilt = true;
        return CAPTURE_UNSUPPORTED;
    }
    return stream_run(s, NULL);
}

API int cuStreamBeginCapture_v2(Stream *s, int mode) {
    ENTER;
    if (!known(streams, s)) return INVALID_HANDLE;
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (s->capture) return ILLEGAL_STATE;
    s->capture = new Graph();
    s->mode = mode;
    s->spoilt = false;
    return SUCCESS;
}

API int cuStreamEndCapture(Stream *s, Graph **graph) {
    ENTER;
    if (!known(streams, s)) return INVALID_HANDLE;
    if (!s->capture) return ILLEGAL_STATE;
    Graph *g = s->capture;
    s->capture = NULL;
    *graph = NULL;
    if (s->spoilt) {
        delete g;
        return CAPTURE_INVALIDATED;
    }
    if (!g->ops.empty()) g->ops[0].first = true;
    graphs.push_back(g);
    *graph = g;
    return SUCCESS;
}

API int cuGraphInstantiateWithFlags(Graph **executable, Graph *g, unsigned long long flags) {
    ENTER;
    if (!known(graphs, g)) return INVALID_HANDLE;
    (void)flags;
    *executable = new Graph(*g);
    executables.push_back(*executable);
    return SUCCESS;
}

API int cuGraphLaunch(Graph *executable, Stream *handle) {
    ENTER;
    Stream *s = stream_of(handle);
    if (!s || !known(executables, executable)) return INVALID_HANDLE;
    if (s->capture) return CAPTURE_UNSUPPORTED;
    for (const Op &op : executable->ops) {
        if (op.kind == OP_COPY_OUT) spoil_destination(s, op.to, op.size);
        submit(s, op);
    }
    return SUCCESS;
}

API int cuGraphExecDestroy(Graph *executable) {
    LOCKED;
    if (!known(executables, executable)) return INVALID_HANDLE;
    forget(executables, executable);
    delete executable;
    return sticky;
}

API int cuGraphDestroy(Graph *g) {
    LOCKED;
    if (!known(graphs, g)) return INVALID_HANDLE;
    forget(graphs, g);
    delete g;
    return sticky;
}

API int cuModuleLoadData(Module **out, const void *image) {
    ENTER;
    if (!out || !image) return INVALID_VALUE;
    Module *m = new Module();
    int code = module_open(m, image);
    if (code) {
        module_delete(m);
        return code;
    }
    modules.push_back(m);
    *out = m;
    return SUCCESS;
}

API int cuModuleUnload(Module *m) {
    LOCKED;
    if (!known(modules, m)) return INVALID_HANDLE;
    int code = run_all();
    forget(modules, m);
    module_delete(m);
    return code;
}

API int cuModuleGetFunction(Function **out, Module *m, const char *name) {
    ENTER;
    if (!known(modules, m)) return INVALID_HANDLE;
    for (Function *f : m->functions)
        if (!strcmp(f->kernel->name, name)) {
            *out = f;
            return SUCCESS;
        }
    return NOT_FOUND;
}

static bool function_known(const Function *f) {
    for (Module *m : modules)
        for (Function *other : m->functions)
            if (other == f) return true;
    return false;
}

API int cuFuncSetAttribute(Function *f, int attribute, int value) {
    ENTER;
    if (!function_known(f)) return INVALID_HANDLE;
    if (attribute == 9) return SUCCESS; // preferred carveout
    if (attribute != 8 || value < 0 || value > (int)SHARED_LIMIT)
        return refuse(INVALID_VALUE, "cuFuncSetAttribute(%s, %d, %d)", f->kernel->name, attribute,
                      value);
    f->dynamic_shared = value;
    return SUCCESS;
}

API int cuFuncGetAttribute(int *value, int attribute, Function *f) {
    ENTER;
    if (!function_known(f)) return INVALID_HANDLE;
    int threads = f->kernel->threads ? f->kernel->threads : 1024, arch = architecture();
    // threads, static shared memory, constants, local memory, registers, PTX, binary, cache, dynamic
    int table[] = {threads, 0, 0, 0, 64, arch, arch, 0, f->dynamic_shared};
    if (attribute < 0 || attribute > 8) return INVALID_VALUE;
    *value = table[attribute];
    return SUCCESS;
}

static int check_launch(const LaunchConfig *c, const Function *f) {
    const char *name = f->kernel->name;
    uint64_t threads = (uint64_t)c->block_x * c->block_y * c->block_z;
    if (!c->grid_x || !c->grid_y || !c->grid_z || c->grid_x > 2147483647u || c->grid_y > 65535 ||
        c->grid_z > 65535)
        return refuse(INVALID_VALUE, "%s: a grid of %u x %u x %u", name, c->grid_x, c->grid_y,
                      c->grid_z);
    if (!threads || threads > 1024 || c->block_z > 64)
        return refuse(INVALID_VALUE, "%s: a block of %u x %u x %u", name, c->block_x, c->block_y,
                      c->block_z);
    if (f->kernel->threads && threads != (uint64_t)f->kernel->threads)
        return refuse(INVALID_VALUE, "%s: %llu threads a block, but its __launch_bounds__ say %d",
                      name, (unsigned long long)threads, f->kernel->threads);
    if (c->shared > (unsigned)f->dynamic_shared)
        return refuse(INVALID_VALUE, "%s: %u bytes of shared memory, but only %d are allowed", name,
                      c->shared, f->dynamic_shared);
    return SUCCESS;
}

API int cuLaunchKernelEx(const LaunchConfig *c, Function *f, void **params, void **extra) {
    ENTER;
    if (!c || !function_known(f)) return INVALID_HANDLE;
    Stream *s = stream_of(c->stream);
    if (!s) return INVALID_HANDLE;
    if (extra || !params || !params[0]) return INVALID_VALUE;
    int code = check_launch(c, f);
    if (code) return code;
    Op op = {};
    op.kind = OP_LAUNCH;
    op.launch.function = f;
    op.launch.grid = {c->grid_x, c->grid_y, c->grid_z};
    op.launch.block = {c->block_x, c->block_y, c->block_z};
    op.launch.shared = c->shared;
    for (unsigned i = 0; i < c->attribute_count; i++) {
        const LaunchAttribute &a = c->attributes[i];
        if (a.id == 0) continue;
        if (a.id != 6)
            return refuse(NOT_SUPPORTED, "%s: the launch attribute %u", f->kernel->name, a.id);
        if (a.value.allowed && architecture() < 90)
            return refuse(NOT_SUPPORTED, "%s: no programmatic launch on this device",
                          f->kernel->name);
        op.launch.dependent = a.value.allowed != 0;
    }
    const unsigned char *args = (const unsigned char *)params[0];
    op.launch.args.assign(args, args + f->kernel->args_size);
    hide_host_pointers(op.launch.args.data(), f->kernel->args_size);
    return submit(s, op);
}

API int cuEventCreate(Event **e, unsigned flags) {
    ENTER;
    if (!e || flags > 3) return INVALID_VALUE;
    *e = new Event();
    events.push_back(*e);
    return SUCCESS;
}

API int cuEventRecord(Event *e, Stream *handle) {
    ENTER;
    Stream *s = stream_of(handle);
    if (!s || !known(events, e)) return INVALID_HANDLE;
    if (s->capture) return CAPTURE_UNSUPPORTED; // the simulator's graphs have no events
    e->recorded = true;
    e->done = false;
    Op op = {};
    op.kind = OP_EVENT;
    op.event = e;
    return submit(s, op);
}

static int event_run(Event *e) {
    std::vector<Stream *> all = streams;
    all.push_back(&default_stream);
    for (Stream *s : all)
        for (const Op &op : s->queue)
            if (op.kind == OP_EVENT && op.event == e) {
                int code = stream_run(s, e);
                if (code) return code;
                break;
            }
    return SUCCESS;
}

API int cuEventSynchronize(Event *e) {
    ENTER;
    if (!known(events, e)) return INVALID_HANDLE;
    while (e->recorded && !e->done) {
        int code = event_run(e);
        if (code) return code;
    }
    return SUCCESS;
}

API int cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    ENTER;
    if (!known(events, start) || !known(events, end)) return INVALID_HANDLE;
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    if (!start->done || !end->done) return NOT_READY;
    *milliseconds = (float)((double)(end->time.tv_sec - start->time.tv_sec) * 1e3 +
                            (double)(end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    return SUCCESS;
}

API int cuEventDestroy_v2(Event *e) {
    LOCKED;
    if (!known(events, e)) return INVALID_HANDLE;
    int code = event_run(e);
    forget(events, e);
    delete e;
    return code;
}

static const struct {
    int code;
    const char *name, *text;
} error_table[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

API int cuGetErrorName(int code, const char **text) {
    *text = NULL;
    for (auto &row : error_table)
        if (row.code == code) *text = row.name;
    return *text ? SUCCESS : INVALID_VALUE;
}

API int cuGetErrorString(int code, const char **text) {
    *text = NULL;
    for (auto &row : error_table)
        if (row.code == code) *text = row.text;
    return *text ? SUCCESS : INVALID_VALUE;
}

API long sala_sim_leaks(void) {
    LOCKED;
    return lost + alive();
}

API const char *sala_sim_error(void) {
    LOCKED;
    static std::string copy_of;
    copy_of = last_error;
    return copy_of.c_str();
}

API long sala_sim_launches(void) {
    LOCKED;
    return launches;
}

// ---- [10] NVRTC's functions ----

enum {
    NVRTC_SUCCESS,
    NVRTC_INVALID_INPUT = 3,
    NVRTC_INVALID_PROGRAM,
    NVRTC_INVALID_OPTION,
    NVRTC_COMPILATION,
    NVRTC_INTERNAL = 11
};

struct Program {
    std::string source, name, log, cubin;
    std::vector<std::string> headers, header_names;
};

// The options that are understood. Those with '=' take a value, in one word or two.
static const char nvrtc_options[] =
    " --gpu-architecture= -arch= --fmad= -fmad= --std= -std= --prec-div= -prec-div= --prec-sqrt= "
    "-prec-sqrt= --ftz= -ftz= --maxrregcount= -maxrregcount= --ptxas-options= -Xptxas= "
    "--split-compile= --diag-suppress= -diag-suppress= --optimization-info= "
    "--relocatable-device-code= -rdc= --extra-device-vectorization -extra-device-vectorization "
    "--generate-line-info -lineinfo --device-debug -G --restrict -restrict --disable-warnings -w "
    "--device-as-default-execution-space -default-device --minimal -minimal --no-source-include "
    "--display-error-number ";

struct Options {
    std::string defines;
    int arch;
    bool specific; // sm_120a and the like
    bool no_cubin; // for a virtual architecture NVRTC makes PTX only
};

static std::string quoted(const std::string &text) { // for the shell
    std::string r = "'";
    for (char c : text) r += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return r + "'";
}

static bool known_option(const std::string &name) {
    return name.find(' ') == std::string::npos && strstr(nvrtc_options, (" " + name + " ").c_str());
}

// -D and its long form: the definition; it may be the next word. Else "".
static std::string definition(const std::string &option, const char *next, bool *two_words) {
    *two_words = option == "-D" || option == "--define-macro";
    if (*two_words) return next ? next : "";
    if (option.compare(0, 15, "--define-macro=") == 0) return option.substr(15);
    return option.compare(0, 2, "-D") == 0 ? option.substr(2) : "";
}

static bool read_options(Program *p, int count, const char *const *options, Options *o) {
    o->arch = 75; // NVRTC's default
    for (int i = 0; i < count; i++) {
        std::string option = options[i], value;
        const char *next = i + 1 < count ? options[i + 1] : NULL;
        bool two_words;
        std::string define = definition(option, next, &two_words);
        if (!define.empty()) {
            o->defines += " " + quoted("-D" + define);
            i += two_words;
            continue;
        }
        size_t equals = option.find('=');
        if (equals != std::string::npos) {
            value = option.substr(equals + 1);
            option.resize(equals + 1);
        } else if (next && known_option(option + "=")) {
            option += "=";
            value = next;
            i++;
        }
        if (!known_option(option)) {
            p->log += "nvrtc: error: unrecognized option " + option + " found\n";
            return false;
        }
        if (option != "--gpu-architecture=" && option != "-arch=") continue;
        o->arch = atoi(value.c_str() + value.find('_') + 1);
        o->no_cubin = value.compare(0, 8, "compute_") == 0;
        o->specific = !value.empty() && value.back() == 'a';
    }
    return true;
}

static bool is_word(char c) {
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// The next word or sign of the text at *i, which moves behind it.
static std::string next_token(const std::string &text, size_t *i) {
    while (*i < text.size() && strchr(" \t\r\n", text[*i])) ++*i;
    size_t from = *i;
    if (from >= text.size()) return "";
    while (*i < text.size() && is_word(text[*i])) ++*i;
    if (*i == from) ++*i;
    return text.substr(from, *i - from);
}

// What stands between the bracket at *i - 1 and its partner, without what follows a comma.
static std::string first_argument(const std::string &text, size_t *i) {
    std::string first;
    bool comma = false;
    for (int depth = 1; *i < text.size(); ++*i) {
        char c = text[*i];
        if (c == '(') depth++;
        if (c == ')' && --depth == 0) break;
        if (c == ',' && depth == 1) comma = true;
        if (!comma) first += c;
    }
    if (*i < text.size()) ++*i;
    return first;
}

// Finds the kernels in the preprocessed source: blanks out __global__ and __launch_bounds__(...) and
// appends the table of kernels.
static void append_kernels(std::string *text) {
    std::string table;
    size_t at = 0;
    while ((at = text->find("__global__", at)) != std::string::npos) {
        std::string word, name, bounds = "0";
        size_t i = at;
        while ((word = next_token(*text, &i)) != "(" && !word.empty()) {
            if (word == "__launch_bounds__") {
                size_t from = i - word.size();
                next_token(*text, &i);
                bounds = first_argument(*text, &i);
                for (size_t j = from; j < i; j++)
                    if ((*text)[j] != '\n') (*text)[j] = ' ';
            } else {
                name = word;
            }
        }
        text->replace(at, 10, "          ");
        table += "    {\"" + name + "\", [](const void *args) { sala_sim_call(" + name +
                 ", args); }, sala_sim_args_size(" + name + "), (int)(" + bounds + ")},\n";
        at = i;
    }
    *text += "\nextern \"C\" __attribute__((visibility(\"default\")))\n"
             "const sala_sim_kernel *sala_sim_attach(sala_sim_api *api) {\n"
             "    sala_sim = api;\n    static const sala_sim_kernel kernels[] = {\n" +
             table + "    {nullptr, nullptr, 0, 0}};\n    return kernels;\n}\n";
}

static std::string base_name(const std::string &path) {
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? path : path.substr(slash + 1);
}

// Runs the compiler in the folder; what it says is added to the log.
static bool run_compiler(Program *p, const std::string &folder, const std::string &arguments) {
    const char *compiler = getenv("CXX");
    std::string command = "cd " + quoted(folder) + " && " +
                          (compiler && *compiler ? compiler : "c++") + " " + arguments +
                          " >log 2>&1";
    int status = system(command.c_str());
    std::string log;
    read_file(folder + "/log", &log);
    p->log += log;
    return status == 0;
}

// SALA_SIM_FLAGS; without them the sanitizers that this library was built with.
static std::string extra_flags() {
    const char *flags = getenv("SALA_SIM_FLAGS");
    if (flags) return flags;
#if defined(__SANITIZE_ADDRESS__)
    return "-fsanitize=address,undefined -fno-sanitize-recover=all";
#elif defined(__clang__)
#if __has_feature(address_sanitizer)
    return "-fsanitize=address,undefined -fno-sanitize=function,vptr -fno-sanitize-recover=all";
#endif
#endif
    return "";
}

// Preprocesses, appends the table of kernels, compiles; the object goes to p->cubin.
static bool compile(Program *p, const std::string &folder, const Options &o,
                    std::vector<std::string> *files) {
    std::string flags = "-std=c++17 -O1 -g1 -ffp-contract=off -fPIC -fvisibility=hidden", text;
    if (cpu_features()) flags += " -mavx2 -mfma";
    flags += " " + extra_flags();
    char defines[192];
    snprintf(
        defines, sizeof defines,
        " -DSALA_SIM -D__CUDA_ARCH__=%d -D__CUDA_ARCH_FAMILY_SPECIFIC__=%d -include sala_sim.h",
        o.arch * 10, o.specific ? o.arch * 10 : 0);
    std::string name = base_name(p->name.empty() ? "default_program" : p->name);
    *files = {"sala_sim.h", name, "log", "sala_sim.ii", "sala_sim.so"};
    bool good = write_file(folder + "/sala_sim.h", sala_sim_header, strlen(sala_sim_header)) &&
                write_file(folder + "/" + name, p->source.data(), p->source.size());
    for (size_t i = 0; i < p->headers.size(); i++) {
        std::string file = base_name(p->header_names[i]);
        files->push_back(file);
        good = good && write_file(folder + "/" + file, p->headers[i].data(), p->headers[i].size());
    }
    if (!good) return false;
    if (!run_compiler(p, folder,
                      flags + defines + o.defines + " -x c++ -E " + quoted(name) +
                          " -o sala_sim.ii"))
        return false;
    if (!read_file(folder + "/sala_sim.ii", &text)) return false;
    append_kernels(&text);
    if (!write_file(folder + "/sala_sim.ii", text.data(), text.size())) return false;
    return run_compiler(p, folder, flags + " -shared sala_sim.ii -o sala_sim.so") &&
           read_file(folder + "/sala_sim.so", &p->cubin);
}

// The source that takes the place of every other one; empty without SALA_SIM_SOURCE.
static std::string other_source() {
    const char *path = getenv("SALA_SIM_SOURCE");
    std::string text;
    if (path && !read_file(path, &text)) text = "#error SALA_SIM_SOURCE cannot be read\n";
    return text;
}

// The minor version names what else a cubin depends on, so that a cache of cubins keyed by the
// version is right.
API int nvrtcVersion(int *major, int *minor) {
    const char *compiler = getenv("CXX");
    std::string all = std::string(sala_sim_header) + "/" + extra_flags() + "/" +
                      (compiler ? compiler : "") + "/" + (cpu_features() ? "fma" : "") + "/" +
                      other_source();
    *major = 13;
    *minor = (int)(checksum(all.data(), all.size()) & 0xFFFFF);
    return NVRTC_SUCCESS;
}

API int nvrtcCreateProgram(Program **out, const char *source, const char *name, int count,
                           const char *const *headers, const char *const *names) {
    if (!out || !source || count < 0 || (count && (!headers || !names))) return NVRTC_INVALID_INPUT;
    Program *p = new Program();
    p->source = other_source();
    if (p->source.empty()) p->source = source;
    p->name = name ? name : "";
    for (int i = 0; i < count; i++) {
        p->headers.push_back(headers[i]);
        p->header_names.push_back(names[i]);
    }
    *out = p;
    return NVRTC_SUCCESS;
}

API int nvrtcDestroyProgram(Program **p) {
    if (!p || !*p) return NVRTC_INVALID_PROGRAM;
    delete *p;
    *p = NULL;
    return NVRTC_SUCCESS;
}

static void seal(Program *p, const Options &o) { // puts the header before the object
    Image head = {};
    memcpy(head.magic, "SALASIM1", 8);
    head.size = p->cubin.size();
    head.checksum = checksum(p->cubin.data(), p->cubin.size());
    head.arch = (uint32_t)o.arch;
    head.needs = cpu_features();
    head.interface = checksum(sala_sim_header, strlen(sala_sim_header));
    head.header = checksum(&head, offsetof(Image, header));
    p->cubin.insert(0, (const char *)&head, sizeof head);
}

API int nvrtcCompileProgram(Program *p, int count, const char *const *options) {
    if (!p) return NVRTC_INVALID_PROGRAM;
    Options o = {};
    p->log.clear();
    p->cubin.clear();
    if (!read_options(p, count, options, &o)) return NVRTC_INVALID_OPTION;
    std::string folder = folder_new();
    std::vector<std::string> files;
    bool good = !folder.empty() && compile(p, folder, o, &files);
    folder_delete(folder, files);
    if (!good || o.no_cubin) p->cubin.clear();
    if (folder.empty()) return NVRTC_INTERNAL;
    if (!good) return NVRTC_COMPILATION;
    if (!o.no_cubin) seal(p, o);
    return NVRTC_SUCCESS;
}

API int nvrtcGetCUBINSize(Program *p, size_t *size) {
    if (!p) return NVRTC_INVALID_PROGRAM;
    *size = p->cubin.size();
    return NVRTC_SUCCESS;
}

API int nvrtcGetCUBIN(Program *p, char *cubin) {
    if (!p) return NVRTC_INVALID_PROGRAM;
    memcpy(cubin, p->cubin.data(), p->cubin.size());
    return NVRTC_SUCCESS;
}

API int nvrtcGetProgramLogSize(Program *p, size_t *size) { // with its final zero
    if (!p) return NVRTC_INVALID_PROGRAM;
    *size = p->log.size() + 1;
    return NVRTC_SUCCESS;
}

API int nvrtcGetProgramLog(Program *p, char *log) {
    if (!p) return NVRTC_INVALID_PROGRAM;
    memcpy(log, p->log.c_str(), p->log.size() + 1);
    return NVRTC_SUCCESS;
}

API const char *nvrtcGetErrorString(int code) {
    static const char *const names[] = {"NVRTC_SUCCESS",
                                        "NVRTC_ERROR_OUT_OF_MEMORY",
                                        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT",
                                        "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION",
                                        "NVRTC_ERROR_COMPILATION",
                                        "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE"};
    if (code == NVRTC_INTERNAL) return "NVRTC_ERROR_INTERNAL_ERROR";
    return code >= 0 && code < 8 ? names[code] : "NVRTC_ERROR unknown";
}
