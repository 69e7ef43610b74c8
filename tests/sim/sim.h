/*  sim.h - CUDA for plain C++: what a kernel sees when it runs on the simulator (sim.cpp).

    The simulator is one shared library, libsala_sim.so, that stands in for two others: the CUDA
    driver and NVRTC. Its NVRTC compiles the kernels with the C++ compiler, this header
    force-included before them, into a shared object (the "cubin"); its driver loads that object and
    runs every CUDA thread as a fibre. The header defines the CUDA built-ins and simulated bodies
    for the wrappers of sala.cu's first section, which SALA_SIM hides.

    The simulator is hostile. Whatever CUDA leaves open is decided by a seeded generator, against
    the program: lanes, warps and blocks run in random order; shared memory and new device memory
    hold NaN; cp.async lands at its wait and not before; a kernel launched as a programmatic
    dependent starts before the kernel that it depends on; streams do nothing until somebody waits
    for them; device memory is out of the host's reach. What would be undefined is an error that
    names kernel, block, thread and line.

    Environment, read when used:
      CXX              the C++ compiler (c++)
      SALA_SIM_FLAGS   more flags for it, as -fsanitize=address,undefined; without it the sanitizers
                       that the library was built with
      SALA_SIM_SEED    seed of every random choice (1)
      SALA_SIM_ARCH    compute capability of the device (90)
      SALA_SIM_SMS     its multiprocessors (4)
      SALA_SIM_MEMORY  its memory in bytes (2147483648)
      SALA_SIM_PDL     threads of a dependent kernel that may start early (2048); 0: none
      SALA_SIM_KEEP    set: keep the folders with what was compiled
      SALA_SIM_SOURCE  a file that is compiled instead of every source (see mutate.sh)
    Exported besides the driver's and NVRTC's functions:
      long sala_sim_leaks(void)           objects alive, and those lost when a context was released
      const char *sala_sim_error(void)    text of the last error ("" if there was none)
      long sala_sim_launches(void)        kernels run so far
*/
#ifndef SALA_SIM_H
#define SALA_SIM_H

#include <stddef.h>
#include <stdint.h>

// ---- what kernel objects and the library agree on ----

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

// The part of a fibre that a kernel reads.
struct sala_sim_thread {
    uint3 thread_index, block_index;
    dim3 block_dim, grid_dim;
    unsigned char *shared;
};

enum sala_sim_kind {
    SALA_SIM_SYNCWARP,
    SALA_SIM_SHFL,
    SALA_SIM_SHFL_UP,
    SALA_SIM_SHFL_DOWN,
    SALA_SIM_SHFL_XOR,
    SALA_SIM_BALLOT,
    SALA_SIM_ANY,
    SALA_SIM_ALL,
    SALA_SIM_LDMATRIX,
    SALA_SIM_LDMATRIX_TRANS,
    SALA_SIM_MMA,
    SALA_SIM_FP4_MMA,
    SALA_SIM_COLLECTIVES, // those above are rendezvous of a warp, those below of a block or a grid
    SALA_SIM_SYNCTHREADS,
    SALA_SIM_SYNCTHREADS_OR,
    SALA_SIM_SYNCTHREADS_AND,
    SALA_SIM_SYNCTHREADS_COUNT,
    SALA_SIM_AWAIT,
    SALA_SIM_WAIT_GRID,
    SALA_SIM_TEAM, // one of each team
    SALA_SIM_TEAM_LAST = SALA_SIM_TEAM + 3
};

// What a lane brings to a rendezvous of its warp, and what it takes away.
struct sala_sim_operand {
    uint64_t value, result;
    int argument, width;
    const void *address; // ldmatrix
    uint32_t *r;         // ldmatrix
    float *d;            // mma; of FP4, `value` holds both words of scales
    const uint32_t *a, *b;
};

struct sala_sim_api {
    sala_sim_thread *self; // the running thread
    void (*collective)(int kind, int line, unsigned mask, sala_sim_operand *operand);
    int (*barrier)(int kind, int line, int predicate);
    void (*copy)(void *shared, const void *global, int size, bool valid, int line);
    void (*copy_commit)(void);
    void (*copy_wait)(int pending, int line);
    void (*check)(const void *global, size_t size, size_t alignment, int line);
    void (*await)(const int *counter, int target, int line);
    void (*wait_grid)(int line);
    void (*yield)(bool sure); // others may go first: now and then, or (sure) half of the time
    void (*fail)(int line, const char *text);
    void (*meet_team)(int team, int threads, int line);
};

struct sala_sim_kernel {
    const char *name;
    void (*run)(const void *args);
    size_t args_size;
    int threads; // of __launch_bounds__, 0 without
};

#define SALA_SIM_ATTACH "sala_sim_attach" // const sala_sim_kernel *(sala_sim_api *)

#ifndef SALA_SIM_LIBRARY

// ---- built-ins ----

#include <math.h>
#include <stdio.h>
#include <string.h>

static sala_sim_api *sala_sim;

#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
// __global__ and __launch_bounds__ are read, and removed, by the simulator's NVRTC

#define threadIdx (sala_sim->self->thread_index)
#define blockIdx (sala_sim->self->block_index)
#define blockDim (sala_sim->self->block_dim)
#define gridDim (sala_sim->self->grid_dim)
#define warpSize 32

// The line of a call, for messages, and to see that all lanes of a warp make the same call.
#define SALA_SIM_LINE int line = __builtin_LINE()

#define SALA_SIM_VECTORS(X)                                                                        \
    X(char, char, 1)                                                                               \
    X(uchar, unsigned char, 1)                                                                     \
    X(short, short, 2)                                                                             \
    X(ushort, unsigned short, 2)                                                                   \
    X(int, int, 4)                                                                                 \
    X(uint, unsigned, 4)                                                                           \
    X(float, float, 4)
#define SALA_SIM_VECTOR(name, type, size)                                                          \
    struct alignas(2 * size) name##2 {                                                             \
        type x, y;                                                                                 \
    };                                                                                             \
    struct alignas(4 * size) name##4 {                                                             \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    static inline name##2 make_##name##2(type x, type y) {                                         \
        return {x, y};                                                                             \
    }                                                                                              \
    static inline name##4 make_##name##4(type x, type y, type z, type w) {                         \
        return {x, y, z, w};                                                                       \
    }
SALA_SIM_VECTORS(SALA_SIM_VECTOR)
struct alignas(16) double2 {
    double x, y;
};
static inline double2 make_double2(double x, double y) {
    return {x, y};
}

#define SALA_SIM_MIN_MAX(type)                                                                     \
    static inline type min(type a, type b) {                                                       \
        return a < b ? a : b;                                                                      \
    }                                                                                              \
    static inline type max(type a, type b) {                                                       \
        return a > b ? a : b;                                                                      \
    }
SALA_SIM_MIN_MAX(int)
SALA_SIM_MIN_MAX(unsigned)
SALA_SIM_MIN_MAX(long)
SALA_SIM_MIN_MAX(unsigned long)
SALA_SIM_MIN_MAX(long long)
SALA_SIM_MIN_MAX(unsigned long long)
static inline float min(float a, float b) {
    return fminf(a, b);
}
static inline float max(float a, float b) {
    return fmaxf(a, b);
}

// Bits of a number as another type.
template <class To, class From> static inline To sala_sim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "types of one size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) {
    return sala_sim_bits<unsigned>(x);
}
static inline float __uint_as_float(unsigned x) {
    return sala_sim_bits<float>(x);
}
static inline int __float_as_int(float x) {
    return sala_sim_bits<int>(x);
}
static inline float __int_as_float(int x) {
    return sala_sim_bits<float>(x);
}
static inline long long __double_as_longlong(double x) {
    return sala_sim_bits<long long>(x);
}
static inline double __longlong_as_double(long long x) {
    return sala_sim_bits<double>(x);
}

// Integers.
static inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
static inline int __ffs(int x) {
    return __builtin_ffs(x);
}
static inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
static inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline int __mulhi(int a, int b) {
    return (int)((int64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
static inline unsigned sala_permute(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> (4 * i) & 15u, byte = (unsigned)(bytes >> (8 * (s & 7u))) & 255u;
        if (s & 8u) byte = byte & 128u ? 255u : 0u; // copies of the sign
        r |= byte << (8 * i);
    }
    return r;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    return sala_permute(a, b, selector & 0x7777u); // as CUDA's intrinsic
}

// Floating point: those whose rounding is defined.
static inline float __fadd_rn(float a, float b) {
    return a + b;
}
static inline float __fsub_rn(float a, float b) {
    return a - b;
}
static inline float __fmul_rn(float a, float b) {
    return a * b;
}
static inline float __fdiv_rn(float a, float b) {
    return a / b;
}
static inline float __frcp_rn(float a) {
    return 1.0f / a;
}
static inline float __fsqrt_rn(float a) {
    return sqrtf(a);
}
static inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
static inline float rsqrtf(float a) {
    return (float)(1.0 / sqrt((double)a));
}
static inline int __float2int_rn(float a) {
    return (int)rintf(a);
}
static inline int __float2int_rz(float a) {
    return (int)a;
}
static inline float __int2float_rn(int a) {
    return (float)a;
}
static inline float __uint2float_rn(unsigned a) {
    return (float)a;
}

// ---- memory ----

template <class T> static inline T __ldg(const T *p) {
    return *p;
}
static inline void __threadfence(void) {
}
static inline void __threadfence_block(void) {
}
static inline void __trap(SALA_SIM_LINE) {
    sala_sim->fail(line, "__trap");
}
static inline void __nanosleep(unsigned) {
    sala_sim->yield(true);
}

// No atomics on floats: their sum would depend on the order.
#define SALA_SIM_ATOMIC(name, type, expression)                                                    \
    static inline type atomic##name(type *p, type v) {                                             \
        sala_sim->yield(false);                                                                    \
        type old = *p;                                                                             \
        *p = (type)(expression);                                                                   \
        return old;                                                                                \
    }
#define SALA_SIM_ATOMICS(type)                                                                     \
    SALA_SIM_ATOMIC(Add, type, old + v)                                                            \
    SALA_SIM_ATOMIC(Sub, type, old - v)                                                            \
    SALA_SIM_ATOMIC(Max, type, old > v ? old : v)                                                  \
    SALA_SIM_ATOMIC(Min, type, old < v ? old : v)                                                  \
    SALA_SIM_ATOMIC(And, type, old &v)                                                             \
    SALA_SIM_ATOMIC(Or, type, old | v)                                                             \
    SALA_SIM_ATOMIC(Xor, type, old ^ v)                                                            \
    SALA_SIM_ATOMIC(Exch, type, v)                                                                 \
    static inline type atomicCAS(type *p, type compare, type v) {                                  \
        sala_sim->yield(false);                                                                    \
        type old = *p;                                                                             \
        if (old == compare) *p = v;                                                                \
        return old;                                                                                \
    }
SALA_SIM_ATOMICS(int)
SALA_SIM_ATOMICS(unsigned)
SALA_SIM_ATOMICS(unsigned long)
SALA_SIM_ATOMICS(unsigned long long)

// ---- rendezvous of a block and of a warp ----

static inline void __syncthreads(SALA_SIM_LINE) {
    sala_sim->barrier(SALA_SIM_SYNCTHREADS, line, 0);
}
static inline int __syncthreads_or(int predicate, SALA_SIM_LINE) {
    return sala_sim->barrier(SALA_SIM_SYNCTHREADS_OR, line, predicate);
}
static inline int __syncthreads_and(int predicate, SALA_SIM_LINE) {
    return sala_sim->barrier(SALA_SIM_SYNCTHREADS_AND, line, predicate);
}
static inline int __syncthreads_count(int predicate, SALA_SIM_LINE) {
    return sala_sim->barrier(SALA_SIM_SYNCTHREADS_COUNT, line, predicate);
}
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, SALA_SIM_LINE) {
    sala_sim_operand o = {};
    sala_sim->collective(SALA_SIM_SYNCWARP, line, mask, &o);
}

template <class T>
static inline T sala_sim_shuffle(int kind, unsigned mask, T value, int argument, int width,
                                 int line) {
    sala_sim_operand o = {};
    memcpy(&o.value, &value, sizeof value);
    o.argument = argument;
    o.width = width;
    sala_sim->collective(kind, line, mask, &o);
    memcpy(&value, &o.result, sizeof value);
    return value;
}
#define SALA_SIM_SHUFFLES(type)                                                                    \
    static inline type __shfl_sync(unsigned mask, type value, int from, int width = 32,            \
                                   SALA_SIM_LINE) {                                                \
        return sala_sim_shuffle(SALA_SIM_SHFL, mask, value, from, width, line);                    \
    }                                                                                              \
    static inline type __shfl_up_sync(unsigned mask, type value, unsigned delta, int width = 32,   \
                                      SALA_SIM_LINE) {                                             \
        return sala_sim_shuffle(SALA_SIM_SHFL_UP, mask, value, (int)delta, width, line);           \
    }                                                                                              \
    static inline type __shfl_down_sync(unsigned mask, type value, unsigned delta, int width = 32, \
                                        SALA_SIM_LINE) {                                           \
        return sala_sim_shuffle(SALA_SIM_SHFL_DOWN, mask, value, (int)delta, width, line);         \
    }                                                                                              \
    static inline type __shfl_xor_sync(unsigned mask, type value, int lanes, int width = 32,       \
                                       SALA_SIM_LINE) {                                            \
        return sala_sim_shuffle(SALA_SIM_SHFL_XOR, mask, value, lanes, width, line);               \
    }
SALA_SIM_SHUFFLES(int)
SALA_SIM_SHUFFLES(unsigned)
SALA_SIM_SHUFFLES(long)
SALA_SIM_SHUFFLES(unsigned long)
SALA_SIM_SHUFFLES(long long)
SALA_SIM_SHUFFLES(unsigned long long)
SALA_SIM_SHUFFLES(float)
SALA_SIM_SHUFFLES(double)

static inline unsigned sala_sim_vote(int kind, unsigned mask, int predicate, int line) {
    sala_sim_operand o = {};
    o.argument = predicate;
    sala_sim->collective(kind, line, mask, &o);
    return (unsigned)o.result;
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, SALA_SIM_LINE) {
    return sala_sim_vote(SALA_SIM_BALLOT, mask, predicate, line);
}
static inline int __any_sync(unsigned mask, int predicate, SALA_SIM_LINE) {
    return (int)sala_sim_vote(SALA_SIM_ANY, mask, predicate, line);
}
static inline int __all_sync(unsigned mask, int predicate, SALA_SIM_LINE) {
    return (int)sala_sim_vote(SALA_SIM_ALL, mask, predicate, line);
}

// ---- the wrappers of sala.cu ----

static inline unsigned char *sala_shared(void) {
    return sala_sim->self->shared;
}
static inline void sala_wait_grid(SALA_SIM_LINE) {
    sala_sim->wait_grid(line);
}
static inline void sala_launch_next(void) {
}
static inline float sala_exp2(float x) {
    return x < -126 ? 0 : exp2f(x);
}
static inline void sala_mma(float d[4], const uint32_t a[4], const uint32_t b[2], SALA_SIM_LINE) {
    sala_sim_operand o = {};
    o.d = d;
    o.a = a;
    o.b = b;
    sala_sim->collective(SALA_SIM_MMA, line, 0xFFFFFFFFu, &o);
}
static inline void sala_fp4_mma(float d[4], const uint32_t a[4], const uint32_t b[2],
                                uint32_t scale_a, uint32_t scale_b, SALA_SIM_LINE) {
    sala_sim_operand o = {};
    o.d = d;
    o.a = a;
    o.b = b;
    o.value = (uint64_t)scale_b << 32 | scale_a;
    sala_sim->collective(SALA_SIM_FP4_MMA, line, 0xFFFFFFFFu, &o);
}
static inline uint16_t sala_f32_bf16(float x); // of kernels.h
static inline uint32_t sala_pair(float low, float high) {
    return (uint32_t)sala_f32_bf16(low) | (uint32_t)sala_f32_bf16(high) << 16;
}
static inline uint32_t sala_sim_fma(uint32_t a, uint32_t b, uint32_t c) { // the low BF16 of each
    double exact = (double)__uint_as_float(a << 16) * (double)__uint_as_float(b << 16) +
                   (double)__uint_as_float(c << 16);
    float x = (float)exact;
    uint32_t u = __float_as_uint(x);
    if (x != x) return 0x7FFF;
    if ((double)x != exact && fabs((double)x) < HUGE_VAL) // to odd, so that it is rounded only once
        u = (u - (fabs((double)x) > fabs(exact))) | 1;
    return (u + 0x7FFFu + (u >> 16 & 1u)) >> 16;
}
static inline uint32_t sala_fma2(uint32_t a, uint32_t b, uint32_t c) {
    return sala_sim_fma(a, b, c) | sala_sim_fma(a >> 16, b >> 16, c >> 16) << 16;
}
static inline uint32_t sala_twice(uint32_t pair, int high) {
    return (high ? pair >> 16 : pair & 0xFFFFu) * 0x10001u;
}
static inline void sala_ldmatrix4(uint32_t r[4], const void *shared, SALA_SIM_LINE) {
    sala_sim_operand o = {};
    o.r = r;
    o.address = shared;
    sala_sim->collective(SALA_SIM_LDMATRIX, line, 0xFFFFFFFFu, &o);
}
static inline void sala_ldmatrix4_trans(uint32_t r[4], const void *shared, SALA_SIM_LINE) {
    sala_sim_operand o = {};
    o.r = r;
    o.address = shared;
    sala_sim->collective(SALA_SIM_LDMATRIX_TRANS, line, 0xFFFFFFFFu, &o);
}
static inline void sala_copy16(void *shared, const void *global, SALA_SIM_LINE) {
    sala_sim->copy(shared, global, 16, true, line);
}
static inline void sala_copy16_or_zero(void *shared, const void *global, bool valid,
                                       SALA_SIM_LINE) {
    sala_sim->copy(shared, global, 16, valid, line);
}
static inline void sala_copy4_or_zero(void *shared, const void *global, bool valid, SALA_SIM_LINE) {
    sala_sim->copy(shared, global, 4, valid, line);
}
static inline void sala_copy_commit(void) {
    sala_sim->copy_commit();
}
#define SALA_COPY_WAIT(n) sala_sim->copy_wait(n, __LINE__)
#define SALA_MEET(threads) __syncthreads()
#define SALA_MEET_TEAM(team, threads) sala_sim->meet_team((int)(team), threads, __LINE__)
static inline int sala_here(int x) {
    return x;
}
static inline uint4 sala_load_once(const void *global, SALA_SIM_LINE) {
    sala_sim->check(global, 16, 16, line);
    uint4 v;
    memcpy(&v, global, 16);
    return v;
}
static inline int sala_arrive(int *counter) {
    int old = atomicAdd(counter, 1);
    sala_sim->yield(true);
    return old;
}
static inline void sala_await(const int *counter, int target, SALA_SIM_LINE) {
    sala_sim->await(counter, target, line);
}

// ---- the table of kernels, which the simulator's NVRTC appends ----

template <class Args> static void sala_sim_call(void (*kernel)(Args), const void *args) {
    kernel(*(const Args *)args);
}
template <class Args> static constexpr size_t sala_sim_args_size(void (*)(Args)) {
    return sizeof(Args);
}

#endif // SALA_SIM_LIBRARY
#endif // SALA_SIM_H
