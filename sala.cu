/*  sala.cu - every kernel of sala, in the order in which a token meets them.

    Compiled at run time by NVRTC for one model on one device: SALA_DIMS holds the model's shape, so
    every loop bound below is a constant. Each kernel is the twin of a plain C function in sala.h
    that defines what it computes; kernels.h holds their arguments and says what lies where.

    Rules that all of them keep:
    - sala_launch_next() first, so that the next kernel's blocks may move in early; then
      sala_wait_grid() by every thread before anything is read or written but weights and what only
      earlier passes and the copy at the head of this one write (rows, states, pending paths).
    - The bits of a row depend on that row alone: partitions stand at absolute positions, sums have
      one fixed order, no atomics on floats, every fused multiply-add is written fmaf.
    - Row counts and lengths are read on the device; grids depend on the bucket and the capacity.
*/
#include "kernels.h"

// ---- 1. wrappers: what C has no words for. The simulator in tests/sim replaces just these.

#define SALA_DEVICE static __device__ __forceinline__

// Has the target FP4 tensor cores? Only the architectures with an "a" (or "f") in their name do.
#ifndef SALA_FP4
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define SALA_FP4 1
#elif defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define SALA_FP4 (__CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200)
#else
#define SALA_FP4 0
#endif
#endif

#ifndef SALA_SIM
// The block's dynamic shared memory.
SALA_DEVICE unsigned char *sala_shared(void) {
    extern __shared__ __align__(1024) unsigned char sala_shared_memory[];
    return sala_shared_memory;
}

// Programmatic dependent launch: wait until the kernel before this one is complete and its writes
// are visible; allow the next kernel's blocks to start.
#ifdef SALA_TRACE // benchmarks: when the first block of each kernel came to wait, and could go on
__device__ unsigned long long sala_trace[2 + 2 * 1024];

SALA_DEVICE unsigned long long sala_clock(void) { // nanoseconds
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
    return ns;
}
#endif

SALA_DEVICE void sala_wait_grid(void) {
#ifdef SALA_TRACE
    unsigned long long came = sala_clock();
#endif
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifdef SALA_TRACE
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
        unsigned long long at = atomicAdd(&sala_trace[0], 1ull) % 1024;
        sala_trace[2 + 2 * at] = came;
        sala_trace[3 + 2 * at] = sala_clock();
    }
#endif
}

SALA_DEVICE void sala_launch_next(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// d[16x8] += a[16x16] b[16x8], BF16 inputs, FP32 sums. With lane = 4g + c: a = rows g, g+8, g, g+8
// at k 2c, 2c, 2c+8, 2c+8 (two each); b = column g at k 2c, 2c+8; d = rows g, g, g+8, g+8 at
// columns 2c, 2c+1, 2c, 2c+1.
SALA_DEVICE void sala_mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16x8] += a[16x64] b[64x8] of E2M1 codes with an E4M3 scale for every 16 k, FP32 sums; only where
// there are FP4 tensor cores. a = rows g, g+8, g, g+8 at k 8c, 8c, 32+8c, 32+8c (eight each, the
// first in the low bits); b = column g at k 8c, 32+8c; d as above. A word of scales is those of the
// 64 k of row g + 8 * (c & 1) and of column g.
#if SALA_FP4
SALA_DEVICE void sala_fp4_mma(float d[4], const uint32_t a[4], const uint32_t b[2],
                              uint32_t scale_a, uint32_t scale_b) {
    asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
                 ".f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
                 "{%10}, {0,0}, {%11}, {0,0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
                   "r"(scale_b));
}
#endif

// 2 ^ x in one instruction, denormals are 0: relative error 2^-22.
SALA_DEVICE float sala_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers as a pair of BF16.
SALA_DEVICE uint32_t sala_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a * b + c of two pairs of BF16, each rounded once.
SALA_DEVICE uint32_t sala_fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The low or the high (a constant) of two BF16 as both: sala_fma2 takes it from its place.
SALA_DEVICE uint32_t sala_twice(uint32_t pair, int high) {
    uint32_t both;
    if (high)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(both) : "r"(pair));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(both) : "r"(pair));
    return both;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
SALA_DEVICE void sala_ldmatrix4(uint32_t r[4], const void *shared) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

SALA_DEVICE void sala_ldmatrix4_trans(uint32_t r[4], const void *shared) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// 16 bytes from global to shared memory in the background; they are there after a commit and a
// wait (of this thread; a barrier makes them visible to the others).
// (A hint that weights may leave the L2 cache first would fit, but NVRTC 13.0 assembles cp.async with
// a cache hint wrongly for sm_90 and later.)
SALA_DEVICE void sala_copy16_or_zero(void *shared, const void *global, bool valid) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

SALA_DEVICE void sala_copy16(void *shared, const void *global) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}

SALA_DEVICE void sala_copy4_or_zero(void *shared, const void *global, bool valid) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

SALA_DEVICE void sala_copy_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

#define SALA_COPY_WAIT(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

// A barrier of all the block's threads that its warps may reach from different code, which
// __syncthreads does not allow.
#define SALA_MEET(threads) asm volatile("bar.sync 1, %0;" ::"n"(threads) : "memory")

// The same for teams of threads of a block; `team` counts from 0.
#define SALA_MEET_TEAM(team, threads)                                                              \
    asm volatile("bar.sync %0, %1;" ::"r"((team) + 1), "r"(threads) : "memory")

// Four bytes of a and b; unlike __byte_perm, bit 3 of a nibble of the selector asks for the sign of the
// byte, eight times.
SALA_DEVICE uint32_t sala_permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// x, computed here: not before a loop whose registers are few.
SALA_DEVICE int sala_here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// 16 bytes of a weight that is read once.
SALA_DEVICE uint4 sala_load_once(const void *global) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(global));
    return v;
}

// Count this block in (call it from one thread, after a barrier): how many came before. All that
// the block wrote is visible to who sees the count.
SALA_DEVICE int sala_arrive(int *counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

SALA_DEVICE void sala_await(const int *counter, int target) {
    int seen;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen != target);
}
#endif

constexpr sala_dims MODEL = {SALA_DIMS};
#define SALA_MAJOR (__CUDA_ARCH__ / 100) // of compute capability

// Is a kernel of this unit wanted? (see SALA_KERNELS)
#define SALA_HAS(unit) (SALA_UNIT == unit)

// ---- 2. small helpers

// The bits of two E2M1 codes where a pair of BF16 has signs, the ends of exponents and the starts of
// mantissas: the numbers times 2^-126. In spread order (see sala_code_bits) shifts bring three pairs of a
// word there; the last one needs 8, 13 and 18 to the left, into the other half.
#define SALA_E2M1_PAIR 0x81C081C0u
SALA_DEVICE uint32_t sala_spread_last(uint32_t word) {
    uint64_t last = (uint64_t)(word & 0x6C006C00u) * 0x42100u;
    return __byte_perm((uint32_t)last, (uint32_t)(last >> 32), 0x3254) & SALA_E2M1_PAIR;
}

SALA_DEVICE float sala_low(uint32_t pair) { // the two halves of a pair of BF16
    return __uint_as_float(pair << 16);
}

SALA_DEVICE float sala_high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

// Sum over the warp, the same tree for every lane.
SALA_DEVICE float sala_warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

SALA_DEVICE float sala_warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
}

// Sum over the block of up to 32 warps; `partial` [warps] floats of shared memory. All threads call it.
SALA_DEVICE float sala_block_sum(float x, float *partial) {
    int warps = (int)blockDim.x >> 5;
    x = sala_warp_sum(x);
    __syncthreads(); // `partial` may still be read from the call before
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < warps; w++) sum += partial[w];
    return sum;
}

SALA_DEVICE int32_t sala_round_up(int32_t n, int32_t to) {
    return (n + to - 1) / to * to;
}

SALA_DEVICE float sala_sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

SALA_DEVICE float sala_swiglu(float gate, float up) {
    gate = sala_round(gate);
    return sala_round(gate * sala_sigmoid(gate)) * sala_round(up);
}

// Two elements of the gate kernel: norm and gate, each optional.
SALA_DEVICE uint32_t sala_gate_pair(uint32_t o, float inverse, bool normed, uint32_t weight,
                                    bool gated, uint32_t gate) {
    float low = sala_low(o), high = sala_high(o);
    if (normed) {
        low = sala_round(sala_round(low * inverse) * sala_low(weight));
        high = sala_round(sala_round(high * inverse) * sala_high(weight));
    }
    if (gated) {
        low *= sala_round(sala_sigmoid(sala_low(gate)));
        high *= sala_round(sala_sigmoid(sala_high(gate)));
    }
    return sala_pair(low, high);
}

// A head of q or k of 128 elements lies in a warp as two pairs a lane: elements 2l, 2l+1 and
// 64+2l, 64+2l+1, so that RoPE's partners meet in one lane.
SALA_DEVICE uint2 sala_head_load(const sala_act *head) {
    const uint32_t *pair = (const uint32_t *)head;
    int lane = (int)threadIdx.x & 31;
    return make_uint2(pair[lane], pair[32 + lane]);
}

SALA_DEVICE void sala_head_store(sala_act *head, uint2 x) {
    uint32_t *pair = (uint32_t *)head;
    int lane = (int)threadIdx.x & 31;
    pair[lane] = x.x;
    pair[32 + lane] = x.y;
}

SALA_DEVICE float sala_head_squares(uint2 x) { // sum over the head, for every lane
    float sum = sala_low(x.x) * sala_low(x.x);
    sum = fmaf(sala_high(x.x), sala_high(x.x), sum);
    sum = fmaf(sala_low(x.y), sala_low(x.y), sum);
    sum = fmaf(sala_high(x.y), sala_high(x.y), sum);
    return sala_warp_sum(sum);
}

// RMSNorm of a pair: x * inverse and its product with the weight are both rounded, as upstream does.
SALA_DEVICE uint32_t sala_normed2(uint32_t x, float inverse, uint32_t by) {
    return sala_pair(sala_round(sala_low(x) * inverse) * sala_low(by),
                     sala_round(sala_high(x) * inverse) * sala_high(by));
}

// The same of two pairs, given the head's sum of squares.
SALA_DEVICE uint2 sala_head_norm(uint2 x, float squares, float eps, uint2 weight) {
    float inverse = 1.0f / sqrtf(squares / 128.0f + eps);
    return make_uint2(sala_normed2(x.x, inverse, weight.x), sala_normed2(x.y, inverse, weight.y));
}

// RoPE: turn = cos, sin of the lane's two frequencies.
SALA_DEVICE uint2 sala_head_rope(uint2 x, float4 turn) {
    float low = sala_low(x.x), low_end = sala_low(x.y);
    float high = sala_high(x.x), high_end = sala_high(x.y);
    return make_uint2(
        sala_pair(fmaf(low, turn.x, -(low_end * turn.y)), fmaf(high, turn.z, -(high_end * turn.w))),
        sala_pair(fmaf(low_end, turn.x, low * turn.y), fmaf(high_end, turn.z, high * turn.w)));
}

#if SALA_HAS(0)

// ---- 3. embedding, positions, norms of heads, gates

// x[r] = act(embed_scale * table[token[r]]). Blocks: (rows, shares of 2048 columns). A run of eight
// k is two words of each of two lane pieces. Reads 4 * hidden bytes a row, of which it wants half,
// and writes 2 * hidden. Twin: sala__op_embed.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_embed(const __grid_constant__ sala_embed_args a) {
    sala_launch_next();
    sala_wait_grid();
    int r = (int)blockIdx.x;
    if (r >= a.rows->count) return;
    int n = a.rows->token[r];
    bool odd = n & 8;
#pragma unroll 1
    for (int k = 2048 * (int)blockIdx.y + 8 * (int)threadIdx.x; k < MODEL.hidden;
         k += 2048 * (int)gridDim.y) {
        const uint16_t *table = (const uint16_t *)a.table.data;
        uint4 first = *(const uint4 *)(table + (sala_packed(n, k, MODEL.vocab) & ~7ll));
        uint4 second = *(const uint4 *)(table + (sala_packed(n, k + 4, MODEL.vocab) & ~7ll));
        uint32_t word[4] = {odd ? first.y : first.x, odd ? first.w : first.z,
                            odd ? second.y : second.x, odd ? second.w : second.z};
        for (int i = 0; i < 4; i++)
            word[i] = sala_pair(sala_low(word[i]) * MODEL.embed_scale,
                                sala_high(word[i]) * MODEL.embed_scale);
        *(uint4 *)(a.x + (int64_t)r * MODEL.hidden + k) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// cos and sin of every row's position. One block a row, one thread a frequency. The angle is an
// FP32 product as upstream's; cos and sin in double reach every position. Twin:
// sala__op_rope_table.
extern "C" __global__ void __launch_bounds__(64, 2)
    sala_rope_table(const __grid_constant__ sala_rope_args a) {
    sala_launch_next();
    sala_wait_grid();
    int r = (int)blockIdx.x, i = (int)threadIdx.x;
    if (r >= a.rows->count || i >= a.dim / 2) return;
    float angle = (float)a.rows->position[r] * a.frequency[i];
    double sine, cosine;
    sincos((double)angle, &sine, &cosine);
    *(float2 *)(a.cos_sin + (int64_t)r * a.dim + 2 * i) = make_float2((float)cosine, (float)sine);
}

// q and k of a sparse layer in place: norm (if there are weights), rotation (if there is a table).
// One warp a (row, head). Twin: sala__op_qk_norm_rope.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_qk_norm_rope(const __grid_constant__ sala_qk_args a) {
    sala_launch_next();
    sala_wait_grid();
    int all = a.heads + a.kv_heads, lane = (int)threadIdx.x & 31;
    int item = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5));
    int64_t r = item / all;
    int h = item % all;
    if (r >= a.rows) return;
    bool is_q = h < a.heads;
    sala_act *head =
        is_q ? a.q + (r * a.heads + h) * 128 : a.k + (r * a.kv_heads + h - a.heads) * 128;
    const sala_act *weight = (const sala_act *)(is_q ? a.q_norm.data : a.k_norm.data);
    uint2 x = sala_head_load(head);
    if (weight) x = sala_head_norm(x, sala_head_squares(x), a.eps, sala_head_load(weight));
    if (a.cos_sin) x = sala_head_rope(x, ((const float4 *)(a.cos_sin + r * 128))[lane]);
    sala_head_store(head, x);
}

// The sum of squares of a pair, added to `sum` in order.
SALA_DEVICE float sala_gate_squares(uint32_t x, float sum) {
    return fmaf(sala_high(x), sala_high(x), fmaf(sala_low(x), sala_low(x), sum));
}

// y = RMSNorm(o) * weight (if given) * sigmoid(gate) (if given), after lightning attention. Blocks:
// (rows, shares of 512 columns): each sums the squares of the whole row, all in the same order, and
// a thread gates two columns. Reads o in every share, and gate once; writes y once. Twin:
// sala__op_gate.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_gate(const __grid_constant__ sala_gate_args a) {
    constexpr int PAIRS = MODEL.lin_heads * 64, PIECES = (PAIRS + 1023) / 1024;
    int t = (int)threadIdx.x, at = 256 * (int)blockIdx.y + t;
    int64_t first = (int64_t)blockIdx.x * PAIRS;
    const uint32_t *o = (const uint32_t *)a.o + first;
    uint32_t weight = 0, x = 0, gate = 0;
    uint4 all[PIECES];
    float sum = 0, inverse = 0, *partial = (float *)sala_shared();
    bool own = PAIRS % 256 == 0 || at < PAIRS, normed = a.norm.data;
    sala_launch_next();
    if (own && normed) weight = ((const uint32_t *)a.norm.data)[at];
    sala_wait_grid();
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        all[p] =
            1024 * p + 4 * t < PAIRS ? ((const uint4 *)o)[256 * p + t] : make_uint4(0, 0, 0, 0);
    if (own) x = o[at];
    if (own && a.gate) gate = ((const uint32_t *)a.gate)[first + at];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        sum = sala_gate_squares(all[p].y, sala_gate_squares(all[p].x, sum));
        sum = sala_gate_squares(all[p].w, sala_gate_squares(all[p].z, sum));
    }
    if (normed) {
        sum = sala_warp_sum(sum);
        if ((t & 31) == 0) partial[t >> 5] = sum;
        __syncthreads();
        sum = 0;
        for (int w = 0; w < 8; w++) sum += partial[w];
        inverse = 1.0f / sqrtf(sum / (2 * PAIRS) + a.eps);
    }
    x = sala_gate_pair(x, inverse, normed, weight, a.gate, gate);
    if (own) ((uint32_t *)a.y)[first + at] = x;
}

#endif
#if SALA_HAS(0) || SALA_HAS(4) || SALA_HAS(5)

// ---- 4. matrix products: what a step's time is spent on
// Decoding reads every weight once, so the loop is a pipeline of copies into shared memory with
// just enough arithmetic behind it. An item is a tile of weight rows, one split of k and some rows
// of x; a block takes every gridDim.x-th item, the copies running on from one item to the next. A
// stage is 64 k of both: weights that lie together, and 128 bytes of each row of x. All products of
// a format are this one kernel: its code stays in the instruction cache while weights stream by,
// and a step comes back to it four times a layer.
//
// BF16: four warps, two by two, of 32 rows of weights and 32 of x each. 4 bits: a weight must be widened
// only once, so a warp has all rows of x. Four teams, each with a ring of stages of its own, take the
// quarters of k; their sums are added in order. With up to 16 rows of x a warp has 32 rows of weights: 16
// warps hide what they wait for. With more it has 64, for each x that it reads four products, and eight
// warps have the registers. The bits of a row of x thus depend on nothing but that row, in all kernels.

#if SALA_HAS(0)
enum {
    SALA_NORM_THREADS = SALA_GEMM_THREADS,
    SALA_SHARED = SALA_GEMM_SHARED,
    SALA_BLOCK = 64 * 128, // bytes of 64 rows of weights in a stage
    SALA_WIDEST = 4        // groups of 8 rows of x of a warp
};
#else
enum {
    SALA_NORM_THREADS = SALA_GEMM4_THREADS,
    SALA_SHARED = SALA_GEMM4_SHARED,
    SALA_WEIGHTS = 1024 + 128,                                 // codes, scales
    SALA_BLOCK = SALA_HAS(4) ? SALA_BLOCK4 : SALA_BLOCK4_BIAS, // of 64 rows
    SALA_WIDEST = SALA_GEMM4_TOKENS(SALA_TEAMS_SHARED) / 8
};
#endif
enum {
    SALA_TEAMS = SALA_HAS(0) ? 1 : 4,
    SALA_TILES = SALA_HAS(0) ? 2 : 4,                           // most of 16 weight rows of a warp
    SALA_ROWS = SALA_HAS(0) ? SALA_GEMM_ROWS : SALA_GEMM4_ROWS, // of weights, of an item
    SALA_RESULT = 8 * SALA_ROWS,                                // floats: eight rows of x
    SALA_ALPHAS = SALA_HAS(0) ? 0 : SALA_ROWS,                  // floats before results
    SALA_X = SALA_ROWS / 64 * SALA_BLOCK,                       // where x begins in a stage
    SALA_CHUNK = SALA_GEMM_K / 64
};

// Of a kernel whose stages have room for `wide` groups of 8 rows of x: tiles of 16 weight rows of a warp,
// threads of a team, results that teams leave for the sum.
SALA_DEVICE constexpr int sala_gemm_tiles(int wide) {
    return wide > 2 && !SALA_HAS(0) ? 4 : 2;
}

SALA_DEVICE constexpr int sala_gemm_team(int wide) {
    return SALA_HAS(0) ? 128 : 256 / sala_gemm_tiles(wide);
}

SALA_DEVICE constexpr int sala_gemm_areas(int wide) {
    return wide > 2 && SALA_WIDEST > 6 ? 4 : 2;
}

// One item: which weight, its tile, the split of k and the first row of x.
typedef struct sala_gemm_item {
    int weight, tile, split, row;
} sala_gemm_item;

// The copies of one thread: where the next ones come from and go to.
typedef struct sala_gemm_feed {
    int item, left;         // stages of the item that are still to be copied
    int slot;               // offset in the ring of the stage to be written
    int rows;               // rows of x in the item
    int scales;             // 4 bits: units of 16 bytes of scales and biases
    int stride;             // bytes from a tile's stage to its next
    const unsigned char *w; // BF16: the first 16 bytes of weights; 4 bits: their block
#if SALA_HAS(0)
    const unsigned char *x; // the first 16 of x
#else
    int x; // the same, from the start of x: registers are few
#endif
} sala_gemm_feed;

// Of a team's ring: bytes of a stage for `wide` groups of 8 rows of x; how many there are; all bytes.
SALA_DEVICE constexpr int sala_gemm_stage(int wide) {
    return SALA_X + (SALA_HAS(0) ? SALA_GEMM_TOKENS : wide * 8) * 128;
}

SALA_DEVICE constexpr int sala_gemm_stages(int wide) { // results and alphas lie behind the rings
    const int behind = SALA_HAS(0) ? 0 : 4 * (sala_gemm_areas(wide) * SALA_RESULT + SALA_ALPHAS);
    const int shared = SALA_HAS(0) || wide <= 2 ? SALA_SHARED : SALA_TEAMS_SHARED;
    const int most = (shared - behind) / SALA_TEAMS / sala_gemm_stage(wide);
    return SALA_HAS(0) || most < 4 ? most : 4; // with more, x waits longer
}

static_assert(sala_gemm_stages(SALA_WIDEST) >= 2, "one is filled while the other is read");

SALA_DEVICE constexpr int sala_gemm_stride(int wide) { // stages between two barriers
    return !SALA_HAS(0) && wide <= 2 && sala_gemm_stages(wide) >= 4 ? 2 : 1;
}

SALA_DEVICE constexpr int sala_gemm_ring_bytes(int wide) {
    return sala_gemm_stages(wide) * sala_gemm_stage(wide);
}

SALA_DEVICE unsigned char *sala_gemm_ring(int wide, int thread) { // of this thread's team
    int team = SALA_TEAMS == 1 ? 0 : thread / sala_gemm_team(wide);
    return sala_shared() + team * sala_gemm_ring_bytes(wide);
}

// Stages of an item: all, or those of the thread's team, the first of which is `from`.
SALA_DEVICE int sala_gemm_depth(const sala_product_args *a, int wide, int *from) {
    int share = (a->depth + SALA_TEAMS - 1) / SALA_TEAMS;
    *from = SALA_TEAMS == 1 ? 0 : min((int)threadIdx.x / sala_gemm_team(wide) * share, a->depth);
    return min(share, a->depth - *from);
}

// Which weight an item's tile is of; the tiles before that weight's are taken off.
SALA_DEVICE int sala_gemm_weight(const sala_product_args *a, int *tile) {
    int weight = 0;
#pragma unroll 1
    while (*tile >= a->tiles[weight]) *tile -= a->tiles[weight++];
    return weight;
}

// The rows of x vary fastest, so that blocks which share weights run together.
SALA_DEVICE sala_gemm_item sala_gemm_find(const sala_product_args *a, int item) {
    sala_gemm_item found;
    int unit = a->row_tiles == 1 ? item : (int)((unsigned)item / (unsigned)a->row_tiles);
    found.row = (item - unit * a->row_tiles) * a->tokens;
    found.split = unit & (a->splits - 1); // a power of two
    found.tile = unit >> (__ffs(a->splits) - 1);
    found.weight = sala_gemm_weight(a, &found.tile);
    return found;
}

// Where a thread's copies of an item's weights begin, and how far it is to the next stage.
SALA_DEVICE void sala_gemm_feed_weights(const sala_product_args *a, const sala_gemm_item *at,
                                        int wide, int64_t stage, sala_gemm_feed *feed) {
    const sala_weight *w = &a->gemm.w[at->weight];
    const unsigned char *data = (const unsigned char *)w->data;
    int thread = (int)threadIdx.x % sala_gemm_team(wide), tiles = a->tiles[at->weight];
    if (SALA_HAS(0)) {
        feed->w = data + (stage * tiles + at->tile) * SALA_X + thread * 16;
        feed->stride = tiles * SALA_X;
        return;
    }
    int block = sala_block4(w->format, w->group, w->zero != nullptr);
    tiles = ((a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1) * w->n + 63) >> 6; // an item is two tiles,
    int tile = min(at->tile * 2 + thread / (sala_gemm_team(wide) / 2), tiles - 1);
    feed->w = data + (stage * tiles + tile) * block;
    feed->stride = tiles * block;
    feed->scales = (block - 2048) / 16;
}

// Turn to the next stage; the first call turns to the first one of the block.
SALA_DEVICE void sala_gemm_next(const sala_product_args *a, int wide, sala_gemm_feed *feed) {
    feed->slot += sala_gemm_stage(wide);
    if (feed->slot == sala_gemm_ring_bytes(wide)) feed->slot = 0;
    feed->w += feed->stride;
    feed->x += 128;
    if (--feed->left > 0) return;
    feed->item += (int)gridDim.x;
    if (feed->item >= a->items) return;
    sala_gemm_item at = sala_gemm_find(a, feed->item);
    int k = a->gemm.w[0].k, thread = (int)threadIdx.x % sala_gemm_team(wide), from;
    feed->left = sala_gemm_depth(a, wide, &from);
    if (feed->left == 0) feed->item = a->items; // a team that has nothing to do
    int row = at.row + (thread >> 3), stage = at.split * a->depth + from;
    sala_gemm_feed_weights(a, &at, wide, stage, feed);
    int x = (row * k + stage * 64) * 2 + (thread & 7) * 16;
#if SALA_HAS(0)
    feed->x = (const unsigned char *)a->gemm.x + x;
#else
    feed->x = x;
#endif
    feed->rows = min(a->gemm.rows - at.row, a->tokens);
}

SALA_DEVICE void sala_gemm_copy_weights(const sala_product_args *a, int wide, int thread,
                                        const sala_gemm_feed *feed) {
    unsigned char *to = sala_gemm_ring(wide, thread) + feed->slot;
    thread %= sala_gemm_team(wide);
#if SALA_HAS(0)
    if (feed->item >= a->items) return;
    for (int i = 0; i < SALA_X; i += sala_gemm_team(wide) * 16)
        sala_copy16(to + thread * 16 + i, feed->w + i);
#else
    const int tiles = sala_gemm_tiles(wide);
    int lane = thread & 31, warp = thread >> 5, part = warp & (4 / tiles - 1);
    int codes = part * 1024 + lane * 16, scales = 2048 + part * 128 + lane * 4;
    bool valid = feed->item < a->items; // without branches: nothing is read, and zeros are written
    to += warp / (4 / tiles) * SALA_BLOCK;
#pragma unroll
    for (int i = 0; i < tiles * 512; i += 512)
        sala_copy16_or_zero(to + codes + i, feed->w + codes + i, valid);
    if (tiles == 2) sala_copy4_or_zero(to + scales, feed->w + scales, valid);
    if (tiles == 2 && SALA_HAS(5) && feed->scales > 16)
        sala_copy4_or_zero(to + scales + 256, feed->w + scales + 256, valid);
    if (tiles == 4 && lane < (SALA_HAS(4) ? 16 : feed->scales))
        sala_copy16_or_zero(to + 2048 + lane * 16, feed->w + 2048 + lane * 16, valid);
#endif
}

// Units 0..3 and 4..7 of every other row change places: a quarter of a warp that reads four units
// of two rows then meets all 32 banks. Rows that do not exist are not copied: columns of an MMA do
// not mix, and theirs are not stored.
SALA_DEVICE void sala_gemm_copy_x(const sala_product_args *a, int wide, int thread,
                                  const sala_gemm_feed *feed) {
    unsigned char *to = sala_gemm_ring(wide, thread) + feed->slot + SALA_X;
    int step = sala_gemm_team(wide) / 8, row = thread % sala_gemm_team(wide) >> 3;
    int unit = (thread & 7) ^ (row & 1) * 4, rows = SALA_HAS(0) ? SALA_GEMM_TOKENS : wide * 8;
    to += row * 128 + unit * 16;
#if SALA_HAS(0)
    int64_t stride = (int64_t)a->gemm.w[0].k * 2 * step;
    const unsigned char *from = feed->x;
#else
    int stride = a->gemm.w[0].k * 2 * step;
    const unsigned char *from = (const unsigned char *)a->gemm.x + feed->x;
#endif
    if (feed->item >= a->items) return;
#pragma unroll
    for (int i = 0; i * step < rows; i++)
        if (row + i * step < feed->rows) sala_copy16(to + i * step * 128, from + i * stride);
}

// INT4: a row's word holds a scale and a bias; or the scales of two runs; or the biases are beyond.
enum { SALA_INT4_WIDE, SALA_INT4_FINE, SALA_INT4_ZEROS };

SALA_DEVICE int sala_gemm_layout(const sala_product_args *a, int weight) {
    const sala_weight *w = &a->gemm.w[weight];
    return w->group > 32 ? SALA_INT4_WIDE : w->zero ? SALA_INT4_ZEROS : SALA_INT4_FINE;
}

#if SALA_HAS(0)
// One stage of a warp: 32 weight rows, `groups` (a constant) times 8 rows of x; all loads of 32 k
// come before their products, and no sum waits for the product before it.
SALA_DEVICE void sala_gemm_multiply(const unsigned char *w, const unsigned char *x, int groups,
                                    float sum[SALA_WIDEST][2][4]) {
    int lane = (int)threadIdx.x & 31, row = lane >> 2, unit = lane & 3;
#pragma unroll
    for (int run = 0; run < 2; run++) {
        const unsigned char *xs = x + row * 128 + ((run ^ (row & 1)) * 4 + unit) * 16;
        uint4 a[4], b[4]; // a: tile, then step of 16 k
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = *(const uint4 *)(w + (i >> 1) * 2048 + (run * 2 + (i & 1)) * 512 + lane * 16);
#pragma unroll
        for (int group = 0; group < groups; group++) b[group] = *(const uint4 *)(xs + group * 1024);
#pragma unroll
        for (int i = 0; i < 4 * groups; i++) { // step, then group, then tile
            int tile = i & 1, group = (i >> 1) % groups, step = (i >> 1) / groups;
            const uint4 v = a[tile * 2 + step], u = b[group];
            const uint32_t as[4] = {v.x, v.y, v.z, v.w};
            const uint32_t bs[2] = {step ? u.z : u.x, step ? u.w : u.y};
            sala_mma(sum[group][tile], as, bs);
        }
    }
}

// The stage of `slot`, `groups` of it.
SALA_DEVICE void sala_gemm_stage_of(int, int, int groups, int thread, int slot,
                                    float sum[SALA_WIDEST][2][4]) {
    int warp = thread >> 5;
    const unsigned char *w = sala_shared() + slot + (warp >> 1) * 4096;
    const unsigned char *x = sala_shared() + slot + SALA_X + (warp & 1) * 32 * 128;
    if (groups > 2)
        sala_gemm_multiply(w, x, 4, sum);
    else if (groups == 2)
        sala_gemm_multiply(w, x, 2, sum);
    else if (groups == 1)
        sala_gemm_multiply(w, x, 1, sum);
}
#else
// Eight codes -> four pairs of BF16 (see sala_code_bits). INT4: 128 + code. NVFP4: times 2^-126, a
// code's bits being the sign, the last two of the exponent and the first of the mantissa.
SALA_DEVICE void sala_gemm_widen(uint32_t word, uint32_t pair[4]) {
#if SALA_HAS(5)
    for (int i = 0; i < 4; i++) pair[i] = (word >> 4 * i & 0x000F000Fu) | 0x43004300u;
#elif __CUDA_ARCH__ >= 1200 // native: codes i and i + 4
    for (int i = 0; i < 4; i++) {
        uint32_t top = word << (12 - 4 * i);
        pair[i] = (top & 0x80008000u) | (top >> 6 & 0x01C001C0u);
    }
#else
    for (int i = 0; i < 3; i++) pair[i] = word << 3 * i & SALA_E2M1_PAIR;
    pair[3] = sala_spread_last(word);
#endif
}

// Eight elements of x in the order in which weights are widened.
SALA_DEVICE uint4 sala_gemm_order(uint4 x) {
#if SALA_HAS(4) && __CUDA_ARCH__ >= 1200
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
#endif
    return x;
}

// NVFP4: the scales of a tile of 16 rows: [run of 32 k], of rows g and g + 8, times 2^118. Bytes << 4
// as BF16 are 2^-120 of the scale, subnormal or not; the 0 beside a byte is its sign.
SALA_DEVICE uint2 sala_gemm_scales(const unsigned char *scales, int lane) {
    const uint32_t big = 0x7B007B00u, zero = 0x80008000u; // 2^119, -0
    uint2 word = *(const uint2 *)(scales + (lane >> 2) * 8);
    uint32_t from = 0xC480 + 0x1111 * (lane >> 1 & 1); // bytes 0 and 4, or 1 and 5
    uint32_t first = sala_permute(word.x, word.y, from) * 16;
    uint32_t second = sala_permute(word.x, word.y, from + 0x2222) * 16;
    return make_uint2(sala_fma2(sala_fma2(first, big, zero), big, zero),
                      sala_fma2(sala_fma2(second, big, zero), big, zero));
}

// INT4: the scales of one run of 32 k and what brings 128 + code to code - zero, of rows g and g + 8,
// each twice. `biases`: how far they are from the scales.
SALA_DEVICE uint4 sala_gemm_scales_int4(int layout, const unsigned char *scales, int biases,
                                        int run) {
    bool fine = layout != SALA_INT4_WIDE;
    uint2 word = *(const uint2 *)scales, bias = word;
    if (fine) bias = make_uint2(0xC308C308u, 0xC308C308u); // -(128 + 8)
    if (layout == SALA_INT4_ZEROS) bias = *(const uint2 *)(scales + biases);
    uint32_t by = fine && run ? 0x3232 : 0x1010, to = fine && !run ? 0x1010 : 0x3232;
    return make_uint4(__byte_perm(word.x, 0, by), __byte_perm(word.y, 0, by),
                      __byte_perm(bias.x, 0, to), __byte_perm(bias.y, 0, to));
}

// A word of row g + 8 * half -> the pairs of the A operands of two steps of 16 k. INT4: BF16 of (128 +
// code + bias) * scale.
SALA_DEVICE void sala_gemm_dequant(uint32_t word, uint32_t scale, uint32_t bias, int half,
                                   uint32_t a[2][4]) {
    const uint32_t zero = 0x80008000u, one = 0x3F803F80u;
    uint32_t pair[4];
    sala_gemm_widen(word, pair);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (SALA_HAS(5)) pair[i] = sala_fma2(pair[i], one, bias);
        a[i >> 1][(i & 1) * 2 + half] = sala_fma2(pair[i], scale, zero);
    }
}

// Both words of a tile of 16 rows in a run of 32 k -> the A operands of its two steps.
SALA_DEVICE void sala_gemm_dequant_tile(int layout, const uint4 *word, uint2 scale,
                                        const unsigned char *scales, int run, uint32_t a[2][4]) {
    uint32_t first = run ? word->z : word->x, second = run ? word->w : word->y;
    if (SALA_HAS(4)) {
        uint32_t two = run ? scale.y : scale.x;
        sala_gemm_dequant(first, sala_twice(two, 0), 0, 0, a);
        sala_gemm_dequant(second, sala_twice(two, 1), 0, 1, a);
    } else {
        uint4 s = sala_gemm_scales_int4(layout, scales, 256, run);
        sala_gemm_dequant(first, s.x, s.z, 0, a);
        sala_gemm_dequant(second, s.y, s.w, 1, a);
    }
}

// One stage of a warp: `tiles` of 16 weight rows, `wide` (constants) times 8 rows of x, at `x` the lane's;
// `sums` sums for every 8 rows of x.
SALA_DEVICE void sala_team_multiply(int layout, int tiles, int wide, int lane,
                                    const unsigned char *w, const unsigned char *scales,
                                    const unsigned char *x, int sums, float (*sum)[4]) {
    int row = lane >> 2;
    uint4 word[SALA_TILES];
    uint2 scale[SALA_TILES] = {};
#pragma unroll
    for (int tile = 0; tile < tiles; tile++) {
        word[tile] = *(const uint4 *)(w + tile * 512 + lane * 16);
        if (SALA_HAS(4)) scale[tile] = sala_gemm_scales(scales + tile * 64, lane);
    }
#pragma unroll
    for (int run = 0; run < 2; run++) {
        uint32_t a[SALA_TILES][2][4]; // tile, step
#pragma unroll
        for (int tile = 0; tile < tiles; tile++)
            sala_gemm_dequant_tile(layout, &word[tile], scale[tile], scales + tile * 64 + row * 8,
                                   run, a[tile]);
        int unit = (run ^ (row & 1)) * 4 + (lane & 3),
            batch = SALA_HAS(5) && wide > 6 ? 1 : min(wide, 2);
#pragma unroll
        for (int first = 0; first < wide; first += batch) { // of groups: registers are few
            uint4 b[2];
#pragma unroll
            for (int i = 0; i < batch; i++)
                b[i] = sala_gemm_order(*(const uint4 *)(x + (first + i) * 1024 + unit * 16));
#pragma unroll
            for (int i = 0; i < 2 * tiles * batch; i++) { // step, then group, then tile
                int tile = i % tiles, group = i / tiles % batch, step = i / tiles / batch;
                const uint32_t bs[2] = {step ? b[group].z : b[group].x,
                                        step ? b[group].w : b[group].y};
                sala_mma(sum[(first + group) * sums + tile], a[tile][step], bs);
            }
        }
    }
}

SALA_DEVICE void sala_gemm_stage_of(int layout, int wide, int, int thread, int slot,
                                    float sum[SALA_WIDEST][SALA_TILES][4]) {
    const int tiles = sala_gemm_tiles(wide), parts = 4 / tiles; // of a block of weights
    const unsigned char *ring = sala_gemm_ring(wide, thread) + slot;
    int lane = thread & 31, warp = thread % sala_gemm_team(wide) >> 5, part = warp % parts;
    const unsigned char *block = ring + warp / parts * SALA_BLOCK;
    sala_team_multiply(layout, tiles, wide, lane, block + part * 1024, block + 2048 + part * 128,
                       ring + SALA_X + (lane >> 2) * 128, SALA_TILES, sum[0]);
}
#endif

// The result of an item passes through shared memory so that a small loop can write it in order:
// [rows of x, weight rows] FP32, the columns of every other pair of rows shifted by 8 for the banks.
SALA_DEVICE int sala_gemm_place(int row, int column) {
    return row * SALA_ROWS + (column ^ (row & 6) << 2);
}

// Four weight rows of one row of x. 4 bits: the sum of the teams, which left `areas` of them (a
// constant), times alpha, with the power of two that NVFP4's weights lack.
SALA_DEVICE float4 sala_gemm_value(int areas, int r, int column, const float *result) {
    const float *from = result + SALA_ALPHAS + sala_gemm_place(r, column);
    float4 v = *(const float4 *)from;
#if !SALA_HAS(0)
    const float4 alpha = *(const float4 *)(result + column);
    const float repair = SALA_HAS(4) ? 256 : 1;
    float4 u = {};
    if (areas > 1) u = *(const float4 *)(from + SALA_RESULT);
    if (areas == 4) { // the teams 2 and 3 are not in yet
        float4 v2 = *(const float4 *)(from + 2 * SALA_RESULT);
        float4 u2 = *(const float4 *)(from + 3 * SALA_RESULT);
        v.x += v2.x, v.y += v2.y, v.z += v2.z, v.w += v2.w;
        u.x += u2.x, u.y += u2.y, u.z += u2.z, u.w += u2.w;
    }
    v.x = (v.x + u.x) * repair * alpha.x, v.y = (v.y + u.y) * repair * alpha.y;
    v.z = (v.z + u.z) * repair * alpha.z, v.w = (v.w + u.w) * repair * alpha.w;
#endif
    return v;
}

// Logits, of a vocabulary of any size.
SALA_DEVICE void sala_gemm_put_logits(const sala_product_args *a, const sala_gemm_item *at,
                                      int areas, int first, int rows, const float *result) {
    const int width = SALA_ROWS, step = (int)blockDim.x * 4;
    int n = a->gemm.w[at->weight].n;
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < rows * width; i += step) {
        int r = i / width, from = i % width, c = at->tile * width + from;
        float *to = a->gemm.y_f32 + (int64_t)(at->row + first + r) * n + c;
        if (c >= n) continue;
        float4 v = sala_gemm_value(areas, r, from, result);
        to[0] = v.x;
        if (c + 1 < n) to[1] = v.y;
        if (c + 2 < n) to[2] = v.z;
        if (c + 3 < n) to[3] = v.w;
    }
}

// `rows` rows of x of an item, beginning with its row `first`. Four columns at a time: all these
// matrices have a multiple of four rows.
SALA_DEVICE void sala_gemm_put(const sala_product_args *a, const sala_gemm_item *at, int areas,
                               int first, int rows, const float *result) {
    int n = a->gemm.w[at->weight].n;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, width = SALA_ROWS >> pair;
    if (a->gemm.y_f32) {
        sala_gemm_put_logits(a, at, areas, first, rows, result);
        return;
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x * 4; i < rows * width; i += (int)blockDim.x * 4) {
        int r = i / width, from = i & (width - 1);
        int column = at->tile * width + from;
        int64_t place = (int64_t)(at->row + first + r) * n + column;
        if (column >= n) continue;
        if (pair) from = (from >> 3) * 16 + (from & 7);
        float4 v = sala_gemm_value(areas, r, from, result);
        if (a->kind == SALA_PRODUCT_NORM) {
            *(float4 *)(a->partial + (int64_t)at->split * a->gemm.rows * n + place) = v;
            continue;
        }
        if (a->kind == SALA_PRODUCT_PARTS) {
            place = ((int64_t)at->split * a->gemm.rows + at->row + first + r) * a->gemm.parts_width;
            *(float4 *)(a->gemm.parts + place + a->gemm.parts_at[at->weight] + column) = v;
            continue;
        }
        if (pair) {
            float4 up = sala_gemm_value(areas, r, from + 8, result);
            v.x = sala_swiglu(v.x, up.x), v.y = sala_swiglu(v.y, up.y);
            v.z = sala_swiglu(v.z, up.z), v.w = sala_swiglu(v.w, up.w);
        }
        *(uint2 *)(a->gemm.y[at->weight] + place) =
            make_uint2(sala_pair(v.x, v.y), sala_pair(v.z, v.w));
    }
}

// One group of a warp's sums, of `tiles` tiles: rows of x vary first, then weight rows.
SALA_DEVICE void sala_gemm_lay(const float (*sum)[4], int tiles, int row, int column, bool add,
                               float *result) {
    int lane = (int)threadIdx.x & 31;
    row += (lane & 3) * 2, column += lane >> 2;
#pragma unroll
    for (int i = 0; i < 4 * tiles; i++) {
        float *to = result + SALA_ALPHAS +
                    sala_gemm_place(row + (i & 1), column + i / 4 * 16 + (i & 2) * 4);
        *to = add ? *to + sum[i / 4][i & 3] : sum[i / 4][i & 3];
    }
}

#if SALA_HAS(0)
// Through the stage that was read last, which nobody needs until the next barrier.
SALA_DEVICE void sala_gemm_store(const sala_product_args *a, const sala_gemm_item *at, int groups,
                                 int slot, float sum[SALA_WIDEST][2][4]) {
    int thread = (int)threadIdx.x, rows = min(a->gemm.rows - at->row, a->tokens);
    float *result = (float *)(sala_shared() + slot);
    __syncthreads(); // all have read the stage
#pragma unroll
    for (int group = 0; group < 4; group++) {
        if (group >= groups) break;
        int row = (thread & 32) + group * 8;
        sala_gemm_lay(sum[group], 2, row, (thread >> 6) * 32, false, result);
    }
    __syncthreads();
    sala_gemm_put(a, at, 1, 0, rows, result);
}
#else
// Through memory of its own, eight rows of x after the other.
SALA_DEVICE void sala_gemm_store(const sala_product_args *a, const sala_gemm_item *at, int wide,
                                 float alpha, float sum[SALA_WIDEST][SALA_TILES][4]) {
    const int tiles = sala_gemm_tiles(wide), areas = sala_gemm_areas(wide);
    int thread = (int)threadIdx.x, team = thread / sala_gemm_team(wide);
    int column = thread % sala_gemm_team(wide) / 32 * 16 * tiles;
    int rows = min(a->gemm.rows - at->row, a->tokens);
    float *result = (float *)(sala_shared() + SALA_TEAMS * sala_gemm_ring_bytes(wide));
#pragma unroll 1
    for (int first = 0; first < rows; first += 8) {
        __syncthreads(); // the rows before are written
        float *area = result + team % areas * SALA_RESULT;
        if (thread < SALA_ROWS) result[thread] = alpha;
        if (team < areas) sala_gemm_lay(sum[0], tiles, 0, column, false, area);
        if (areas < SALA_TEAMS) {
            __syncthreads();
            if (team >= areas) sala_gemm_lay(sum[0], tiles, 0, column, true, area);
        }
#pragma unroll
        for (int i = 16; i < SALA_WIDEST * 16; i++) // the next eight rows
            sum[(i >> 4) - 1][i >> 2 & 3][i & 3] = sum[i >> 4][i >> 2 & 3][i & 3];
        __syncthreads();
        sala_gemm_put(a, at, areas, first, min(rows - first, 8), result);
    }
}
#endif

// Wait until all but the latest n (0 to 4) of this thread's groups of copies are there.
SALA_DEVICE void sala_gemm_wait(int n) {
    if (n == 0) SALA_COPY_WAIT(0);
    if (n == 1) SALA_COPY_WAIT(1);
    if (n == 2) SALA_COPY_WAIT(2);
    if (n == 3) SALA_COPY_WAIT(3);
    if (n == 4) SALA_COPY_WAIT(4);
}

SALA_DEVICE void sala_gemm_meet(int wide) { // the team
    if (SALA_TEAMS == 1) __syncthreads();
    if (SALA_TEAMS > 1) SALA_MEET_TEAM(threadIdx.x / sala_gemm_team(wide), sala_gemm_team(wide));
}

// `stages` stages: total += their sum.
SALA_DEVICE void sala_gemm_chunk(const sala_product_args *a, sala_gemm_feed *feed, int layout,
                                 int stages, int wide, int groups,
                                 float total[SALA_WIDEST][SALA_TILES][4]) {
    const int stride = sala_gemm_stride(wide), size = sala_gemm_stage(wide);
    const int ring = sala_gemm_ring_bytes(wide);
    float sum[SALA_WIDEST][SALA_TILES][4] = {};
#pragma unroll 1
    for (; stages > 0; stages -= stride) {
        const int thread =
            wide > 6 ? sala_here((int)threadIdx.x) : (int)threadIdx.x; // few registers
        int slot = 0;                                                  // to be read
        if (stride > 1) slot = feed->slot + stride * size;
        if (stride > 1 && slot >= ring) slot -= ring;
        sala_gemm_wait(sala_gemm_stages(wide) - 2 * stride);
        sala_gemm_meet(wide); // these stages are there for all, and all are done with those before
#pragma unroll
        for (int i = 0; i < stride; i++) {
            if (i > 0 && i >= stages) break;
            sala_gemm_copy_weights(a, wide, thread, feed);
            sala_gemm_copy_x(a, wide, thread, feed);
            sala_copy_commit();
            sala_gemm_next(a, wide, feed);
        }
        if (stride == 1) slot = feed->slot; // is the same
#pragma unroll
        for (int i = 0; i < stride; i++) {
            if (i > 0 && i >= stages) break;
            sala_gemm_stage_of(layout, wide, groups, thread, slot, sum);
            if (stride > 1) slot = slot + size == ring ? 0 : slot + size;
        }
    }
#pragma unroll
    for (int i = 0; i < SALA_WIDEST * SALA_TILES * 4; i++)
        total[i / 4 / SALA_TILES][i / 4 % SALA_TILES][i & 3] +=
            sum[i / 4 / SALA_TILES][i / 4 % SALA_TILES][i & 3];
}

// The first stages: weights, without waiting for the kernel before this one; then x.
SALA_DEVICE sala_gemm_feed sala_gemm_begin(const sala_product_args *a, int wide) {
    const int ahead = sala_gemm_stages(wide) - sala_gemm_stride(wide); // stages in flight
    const int early = wide > 2 && !SALA_HAS(0) ? 1 : ahead; // x would stand in line behind more
    sala_gemm_feed feed = {};
    feed.item = (int)blockIdx.x - (int)gridDim.x;
    feed.left = 1;
    feed.slot = -sala_gemm_stage(wide);
    sala_gemm_next(a, wide, &feed);
    sala_gemm_feed x = feed;
#pragma unroll 1
    for (int i = 0; i < early; i++) {
        sala_gemm_copy_weights(a, wide, (int)threadIdx.x, &feed);
        sala_gemm_next(a, wide, &feed);
    }
    sala_wait_grid();
#pragma unroll 1
    for (int i = 0; i < ahead; i++) { // the first group also holds the weights before
        sala_gemm_copy_x(a, wide, (int)threadIdx.x, &x);
        if (i >= early) sala_gemm_copy_weights(a, wide, (int)threadIdx.x, &x);
        sala_copy_commit();
        sala_gemm_next(a, wide, &x);
    }
    return x;
}

// 4 bits: the alpha of one of an item's rows.
SALA_DEVICE float sala_gemm_alpha(const sala_product_args *a, const sala_gemm_item *at) {
    const sala_weight *w = &a->gemm.w[at->weight];
    int rows = SALA_ROWS, row = at->tile * rows + (int)threadIdx.x;
    int n = (a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1) * w->n;
    return row < n && row < (at->tile + 1) * rows ? w->alpha[row] : 0;
}

// All items of this block; `wide` is a constant. BF16: two blocks of 128 threads a multiprocessor keep
// 80 KiB of weights in flight (35 suffice for 4.5 TB/s at 1 us). 8 KiB of weights take 420 clocks of an H200
// to arrive; with 64 rows of x they cost 384 clocks of shared memory and 105 of the tensor cores, with 16
// rows 152 and 26; x adds rows / SALA_ROWS times the weights' bytes in reads of L2 (4 bits: 0.25 to 2 times).
SALA_DEVICE void sala_gemm_run(const sala_product_args *a, int wide) {
    sala_gemm_feed feed = sala_gemm_begin(a, wide);
#pragma unroll 1
    for (int item = (int)blockIdx.x; item < a->items; item += (int)gridDim.x) {
        float total[SALA_WIDEST][SALA_TILES][4] = {};
        int from, left = sala_gemm_depth(a, wide, &from);
        sala_gemm_item at = sala_gemm_find(a, item);
#if SALA_HAS(0)
        int groups = (a->gemm.rows - at.row - ((int)threadIdx.x >> 5 & 1) * 32 + 7) >> 3;
#pragma unroll 1
        for (; left > 0; left -= SALA_CHUNK)
            sala_gemm_chunk(a, &feed, 0, min(left, SALA_CHUNK), wide, groups, total);
        sala_gemm_store(a, &at, groups, feed.slot, total);
#else
        int layout = SALA_HAS(5) ? sala_gemm_layout(a, at.weight) : 0;
        float alpha = sala_gemm_alpha(a, &at); // well before it is needed
        sala_gemm_chunk(a, &feed, layout, left, wide, wide, total);
        at = sala_gemm_find(a, sala_here(item));
        sala_gemm_store(a, &at, wide, alpha, total);
#endif
    }
}

#if !SALA_HAS(0)
// 4 bits and more rows of x than that: what bounds a product are the tensor cores and the x that every
// multiprocessor reads of L2. So a block, one a multiprocessor, takes 128 rows of weights and up to 96 of
// x, in eight warps of 32 rows of weights and `part` (half of them) times 8 rows of x. Weights are
// widened one run of 32 k ahead of their products. The quarters of k come in the order 0, 2, 1, 3: three
// sums a thread are then enough for the bits of the teams above, (t0 + t2) + (t1 + t3).
enum { SALA_BROAD_X = 2 * (SALA_HAS(4) ? SALA_BLOCK4 : SALA_BLOCK4_BIAS) };

SALA_DEVICE constexpr int sala_broad_stage(int part) { // bytes: two blocks of weights, x
    return SALA_BROAD_X + part * 2048;
}

SALA_DEVICE constexpr int sala_broad_stages(int part) { // five or seven
    return SALA_SHARED / sala_broad_stage(part) < 7 ? SALA_SHARED / sala_broad_stage(part) : 7;
}

// The copies of a thread: where those of the next stage come from and go to.
typedef struct sala_broad_feed {
    const unsigned char *w, *x; // of the item's first stage
    int stage, turn, left;      // to be copied next; turn of its quarter, and what is left of it
    int slot;                   // offset in the ring
    int stride, bytes;          // from a stage's weights to the next one's; of a stage's weights
    int rows;                   // of x, less this thread's first
} sala_broad_feed;

// The stages of a quarter, the first of which is `from`.
SALA_DEVICE int sala_broad_quarter(const sala_product_args *a, int turn, int *from) {
    int share = (a->depth + 3) / 4;
    *from = min(((turn & 1) * 2 + (turn >> 1)) * share, a->depth);
    return min(share, a->depth - *from);
}

SALA_DEVICE sala_broad_feed sala_broad_begin(const sala_product_args *a, const sala_gemm_item *at) {
    const sala_weight *w = &a->gemm.w[at->weight];
    int thread = (int)threadIdx.x, first = at->split * a->depth;
    int blocks = ((a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1) * w->n + 63) >> 6;
    int block = sala_block4(w->format, w->group, w->zero != nullptr);
    sala_broad_feed feed = {};
    feed.stride = blocks * block;
    feed.bytes = min(blocks - at->tile * 2, 2) * block; // the last tile may be alone
    feed.w = (const unsigned char *)w->data + (int64_t)first * feed.stride + at->tile * 2 * block +
             thread * 16;
    feed.x = (const unsigned char *)a->gemm.x + (thread & 7) * 16 +
             ((int64_t)(at->row + (thread >> 3)) * w->k + first * 64) * 2;
    feed.rows = min(a->gemm.rows - at->row, a->tokens) - (thread >> 3);
    feed.left = sala_broad_quarter(a, 0, &feed.stage);
    return feed;
}

// Turn to the next stage; behind the last one `left` is 0.
SALA_DEVICE void sala_broad_next(const sala_product_args *a, int part, sala_broad_feed *feed) {
    feed->slot += sala_broad_stage(part);
    if (feed->slot == sala_broad_stages(part) * sala_broad_stage(part)) feed->slot = 0;
    feed->stage++;
    feed->left--;
#pragma unroll 1
    while (feed->left <= 0 && feed->turn < 3)
        feed->left = sala_broad_quarter(a, ++feed->turn, &feed->stage);
}

SALA_DEVICE void sala_broad_copy_weights(const sala_broad_feed *feed) {
    unsigned char *to = sala_shared() + feed->slot + threadIdx.x * 16;
    const unsigned char *from = feed->w + (int64_t)feed->stage * feed->stride;
    if (feed->left <= 0) return;
    if ((int)threadIdx.x * 16 < feed->bytes) sala_copy16(to, from);
    if ((int)threadIdx.x * 16 + 4096 < feed->bytes) sala_copy16(to + 4096, from + 4096);
}

// Units of x lie as in sala_gemm_copy_x.
SALA_DEVICE void sala_broad_copy_x(const sala_product_args *a, int part,
                                   const sala_broad_feed *feed) {
    int row = (int)threadIdx.x >> 3, unit = ((int)threadIdx.x & 7) ^ (row & 1) * 4;
    unsigned char *to = sala_shared() + feed->slot + SALA_BROAD_X + row * 128 + unit * 16;
    const unsigned char *from = feed->x + feed->stage * 128;
    if (feed->left <= 0) return;
#pragma unroll
    for (int i = 0; i < part * 16; i += 32)
        if (i < feed->rows) sala_copy16(to + i * 128, from + (int64_t)i * 2 * a->gemm.w[0].k);
}

// What a warp's lane holds of the weights: a stage's words of two tiles of 16 rows and their scales
// (NVFP4: x and y, of both runs; INT4: of one run), and the A operands of two runs: [run][tile][step].
typedef struct sala_broad_weights {
    uint4 word[2], scale[2];
    uint32_t a[2][2][2][4];
} sala_broad_weights;

// The words and scales (INT4: those of `run` alone) of the stage at `stage`.
SALA_DEVICE void sala_broad_load(const unsigned char *stage, int block, int layout, int run,
                                 sala_broad_weights *w) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    stage += (warp >> 1 & 1) * block;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        int sixteen = (warp & 1) * 2 + tile;
        const unsigned char *scales = stage + 2048 + sixteen * 64;
        if (run == 0) w->word[tile] = *(const uint4 *)(stage + sixteen * 512 + lane * 16);
        if (SALA_HAS(5)) {
            scales += (lane >> 2) * 8;
            w->scale[tile] = sala_gemm_scales_int4(layout, scales, 256, run);
        } else if (run == 0) {
            uint2 both = sala_gemm_scales(scales, lane);
            w->scale[tile].x = both.x, w->scale[tile].y = both.y;
        }
    }
}

// Widen word i of the four that a run has: two of each tile.
SALA_DEVICE void sala_broad_widen(int run, int i, sala_broad_weights *w) {
    int tile = i >> 1, half = i & 1;
    const uint4 word = w->word[tile], scale = w->scale[tile];
    uint32_t by = half ? scale.y : scale.x, bias = half ? scale.w : scale.z;
    uint32_t codes = run ? (half ? word.w : word.z) : half ? word.y : word.x;
    if (SALA_HAS(4)) by = sala_twice(run ? scale.y : scale.x, half), bias = 0;
    sala_gemm_dequant(codes, by, bias, half, w->a[run][tile]);
}

// The products of the stage at `slot`; the first operands of the stage at `next` are made on the way.
SALA_DEVICE void sala_broad_stage_of(const sala_product_args *a, int layout, int part, int block,
                                     int slot, int next, sala_broad_feed *feed,
                                     sala_broad_weights *w, uint4 b[2][3],
                                     float sum[SALA_WIDEST][2][4]) {
    const int batch = (part + 1) / 2; // groups whose products with the same weights come together
    int lane = (int)threadIdx.x & 31, row = lane >> 2;
    const unsigned char *shared = sala_shared();
    const unsigned char *x = shared + SALA_BROAD_X + ((int)threadIdx.x >> 7) * part * 1024 +
                             row * 128 + ((row & 1) * 4 + (lane & 3)) * 16;
    const int other = 64 - (row & 1) * 128; // from x of the first run to that of the second
#pragma unroll
    for (int q = 0; q < 4; q++) { // a run's first and second batch
        const int run = q >> 1, first = (q & 1) * batch, to = (~q & 1) * batch;
        const unsigned char *from = x + (q == 1 || q == 2 ? other : 0) + (q == 3 ? next : slot);
        if (first == 0 && (run || SALA_HAS(5)))
            sala_broad_load(shared + (run ? next : slot), block, layout, run ^ 1, w);
#pragma unroll
        for (int i = 0; i < batch; i++)
            if (to + i < part)
                b[~q & 1][i] = sala_gemm_order(*(const uint4 *)(from + (to + i) * 1024));
        sala_broad_widen(run ^ 1, (q & 1) * 2, w);
        sala_broad_widen(run ^ 1, (q & 1) * 2 + 1, w);
#pragma unroll
        for (int i = 0; i < 4 * batch; i++) { // step, then tile, then group
            int step = i / 2 / batch, tile = i / batch & 1, group = i % batch;
            const uint4 v = b[q & 1][group];
            const uint32_t bs[2] = {step ? v.z : v.x, step ? v.w : v.y};
            if (first + group < part) sala_mma(sum[first + group][tile], w->a[run][tile][step], bs);
        }
        if (q == 0) {
            sala_broad_copy_weights(feed);
            sala_broad_copy_x(a, part, feed);
        }
    }
    sala_copy_commit();
    sala_broad_next(a, part, feed);
}

// All stages of an item, the first of them under way.
SALA_DEVICE void sala_broad_multiply(const sala_product_args *a, sala_broad_feed *feed, int layout,
                                     int block, int part, float total[SALA_WIDEST][2][4]) {
    const int size = sala_broad_stage(part), stages = sala_broad_stages(part);
    int lane = (int)threadIdx.x & 31, row = lane >> 2, slot = 0, from;
    const unsigned char *x = sala_shared() + SALA_BROAD_X + ((int)threadIdx.x >> 7) * part * 1024 +
                             row * 128 + ((row & 1) * 4 + (lane & 3)) * 16;
    float odd[SALA_WIDEST][2][4] = {};
    sala_broad_weights w = {};
    uint4 b[2][3] = {};
    sala_gemm_wait(stages - 3);
    __syncthreads();
    sala_broad_load(sala_shared(), block, layout, 0, &w);
#pragma unroll
    for (int i = 0; i < 4; i++) sala_broad_widen(0, i, &w);
#pragma unroll
    for (int i = 0; i < (part + 1) / 2; i++)
        b[0][i] = sala_gemm_order(*(const uint4 *)(x + i * 1024));
#pragma unroll 1
    for (int turn = 0; turn < 4; turn++) {
        float sum[SALA_WIDEST][2][4] = {};
#pragma unroll 1
        for (int left = sala_broad_quarter(a, turn, &from); left > 0; left--) {
            int next = slot + size == stages * size ? 0 : slot + size;
            sala_gemm_wait(stages - 3);
            __syncthreads(); // the next stage is there for all, and all are done with the one before
            sala_broad_stage_of(a, layout, part, block, slot, next, feed, &w, b, sum);
            slot = next;
        }
#pragma unroll
        for (int i = 0; i < part * 8; i++) {
            float *t = &total[i >> 3][i >> 2 & 1][i & 3], *u = &odd[i >> 3][i >> 2 & 1][i & 3];
            if (turn < 2)
                *t += sum[i >> 3][i >> 2 & 1][i & 3];
            else
                *u += sum[i >> 3][i >> 2 & 1][i & 3];
            if (turn == 3) *t += *u;
        }
    }
}

// All items of this block. `part` is a constant.
SALA_DEVICE void sala_broad_run(const sala_product_args *a, int part) {
    float *result = (float *)sala_shared();
#pragma unroll 1
    for (int item = (int)blockIdx.x; item < a->items; item += (int)gridDim.x) {
        sala_gemm_item at = sala_gemm_find(a, item);
        const sala_weight *w = &a->gemm.w[at.weight];
        int layout = SALA_HAS(5) ? sala_gemm_layout(a, at.weight) : 0;
        int block = sala_block4(w->format, w->group, w->zero != nullptr);
        sala_broad_feed feed = sala_broad_begin(a, &at), x = feed;
        float total[SALA_WIDEST][2][4] = {};
#pragma unroll 1
        for (int i = 1; i < sala_broad_stages(part); i++, sala_broad_next(a, part, &feed))
            sala_broad_copy_weights(&feed);
        if (item == (int)blockIdx.x) sala_wait_grid();
#pragma unroll 1
        for (int i = 1; i < sala_broad_stages(part); i++, sala_broad_next(a, part, &x)) {
            sala_broad_copy_x(a, part, &x);
            sala_copy_commit(); // the first group also holds all those weights
        }
        sala_broad_multiply(a, &feed, layout, block, part, total);
        at = sala_gemm_find(a, sala_here(item));
        float alpha = sala_gemm_alpha(a, &at);
        SALA_COPY_WAIT(0);
        __syncthreads(); // all have read the last stage
        if (threadIdx.x < SALA_ROWS) result[threadIdx.x] = alpha;
#pragma unroll
        for (int i = 0; i < part; i++)
            sala_gemm_lay(total[i], 2, ((int)threadIdx.x >> 7) * part * 8 + i * 8,
                          ((int)threadIdx.x >> 5 & 3) * 32, false, result);
        __syncthreads();
        sala_gemm_put(a, &at, 1, 0, min(a->gemm.rows - at.row, a->tokens), result);
        __syncthreads();
    }
}
#endif

// ---- 5. the norm, alone and behind a product

enum { SALA_NORM_STEP = 4 * SALA_NORM_THREADS }; // columns that the block takes at once

// One row by SALA_NORM_THREADS threads of a block; the branch is BF16 in memory, or `splits` partial
// sums, or there is none (splits 0, branch NULL). Everything comes into shared memory first, by
// copies that are all in flight together: [splits, width] FP32, x [width], weight [width]. Small
// loops on purpose: this code runs once and must be fetched first. Twin: sala__op_norm_row.
SALA_DEVICE void sala_norm_row(const sala_norm_args *a, const float *partial, int splits, int row) {
    int width = a->width; // a block may have more threads than work here
    int thread = threadIdx.x < SALA_NORM_THREADS ? (int)threadIdx.x : width;
    int64_t at = (int64_t)row * width, stride = (int64_t)a->rows * width;
    float *parts = (float *)sala_shared(), *warps = parts + SALA_SHARED / 4 - 32;
    sala_act *x = (sala_act *)(parts + splits * width), *weight = x + width,
             *branch = weight + width;
    const sala_act *from = (const sala_act *)a->weight.data;
#pragma unroll 1
    for (int c = thread * 8; c < width; c += SALA_NORM_THREADS * 8) {
        sala_copy16(x + c, a->x + at + c);
        sala_copy16(weight + c, from + c);
        if (splits == 0 && a->branch) sala_copy16(branch + c, a->branch + at + c);
    }
#pragma unroll 1
    for (int split = 0; split < splits; split++)
#pragma unroll 2
        for (int c = thread * 4; c < width; c += SALA_NORM_THREADS * 4)
            sala_copy16(parts + split * width + c, partial + split * stride + at + c);
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
    float sum = 0;
#pragma unroll 1
    for (int c0 = thread * 4; c0 < width; c0 += 4 * SALA_NORM_STEP) { // four at a time hide latency
        float4 b[4] = {};
#pragma unroll 1
        for (int split = 0; split < splits; split++)
#pragma unroll
            for (int u = 0; u < 4; u++) {
                int c = c0 + u * SALA_NORM_STEP < width ? c0 + u * SALA_NORM_STEP : c0;
                float4 p = *(const float4 *)(parts + split * width + c);
                b[u].x += p.x, b[u].y += p.y, b[u].z += p.z, b[u].w += p.w;
            }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            int c = c0 + u * SALA_NORM_STEP;
            if (c >= width) break;
            uint2 old = *(const uint2 *)(x + c);
            float v[4] = {sala_low(old.x), sala_high(old.x), sala_low(old.y), sala_high(old.y)};
            if (splits == 0 && a->branch) {
                uint2 add = *(const uint2 *)(branch + c);
                b[u] = make_float4(sala_low(add.x), sala_high(add.x), sala_low(add.y),
                                   sala_high(add.y));
            }
            if (splits > 0 || a->branch) {
                const float add[4] = {b[u].x, b[u].y, b[u].z, b[u].w};
                for (int i = 0; i < 4; i++)
                    v[i] = sala_round(v[i] + sala_round(sala_round(add[i]) * a->scale));
                old = make_uint2(sala_pair(v[0], v[1]), sala_pair(v[2], v[3]));
                *(uint2 *)(x + c) = old;
                *(uint2 *)(a->x + at + c) = old;
            }
            for (int i = 0; i < 4; i++) sum = fmaf(v[i], v[i], sum);
        }
    }
    float inverse = 1.0f / sqrtf(sala_block_sum(sum, warps) / (float)width + a->eps);
#pragma unroll 4
    for (int c = thread * 4; c < width; c += SALA_NORM_STEP) { // as above: its own columns
        uint2 old = *(const uint2 *)(x + c), by = *(const uint2 *)(weight + c);
        float v[4] = {sala_low(old.x), sala_high(old.x), sala_low(old.y), sala_high(old.y)};
        const float w[4] = {sala_low(by.x), sala_high(by.x), sala_low(by.y), sala_high(by.y)};
        for (int i = 0; i < 4; i++) v[i] = sala_round(v[i] * inverse) * w[i];
        *(uint2 *)(a->y + at + c) = make_uint2(sala_pair(v[0], v[1]), sala_pair(v[2], v[3]));
    }
    if (a->divisor != 1) // once a step, before the head
#pragma unroll 1
        for (int c = thread * 4; c < width; c += SALA_NORM_STEP)
#pragma unroll 1
            for (int i = 0; i < 4; i++)
                a->y[at + c + i] = sala_f32_bf16(sala_bf16_f32(a->y[at + c + i]) / a->divisor);
    __syncthreads(); // another row may come
}

#if SALA_HAS(0)
// Grid: one block a row. Twin: sala__op_norm.
extern "C" __global__ void __launch_bounds__(SALA_GEMM_THREADS, 2)
    sala_norm(const __grid_constant__ sala_norm_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_norm_row(&a, nullptr, 0, (int)blockIdx.x);
}
#endif

// The last blocks of a product with a norm to arrive finish the rows, when all have arrived. They
// wait while others run, which cannot lock: at most half of the grid waits, so not more blocks than
// there are multiprocessors, and as long as somebody is missing at least one fewer; the blocks of
// the next kernel start only when all of this one have.
SALA_DEVICE void sala_gemm_finish(const sala_product_args *a) {
    int *place = (int *)sala_shared(), grid = (int)gridDim.x, rows = a->norm.rows;
    int finishers = rows < (grid + 1) / 2 ? rows : (grid + 1) / 2;
    SALA_COPY_WAIT(0);
    __syncthreads(); // all partial sums are written, and shared memory is free
    if (threadIdx.x == 0) {
        int mine = sala_arrive(&a->arrivals[0]) - (grid - finishers);
        if (mine >= 0) sala_await(&a->arrivals[0], grid);
        *place = mine;
    }
    __syncthreads();
    int row = *place;
    __syncthreads();
    if (row < 0) return;
#pragma unroll 1
    for (; row < rows; row += finishers) sala_norm_row(&a->norm, a->partial, a->splits, row);
    if (threadIdx.x == 0 && atomicAdd(&a->arrivals[1], 1) == finishers - 1)
        a->arrivals[0] = a->arrivals[1] = 0; // the last one out
}

// y = x w^T for up to four weights; or with SwiGLU behind it (gate and up in turn, eight rows each, so the
// lane that has a gate has its up); or, k split so that a narrow product feeds all multiprocessors, with
// residual and norm. Grid: min(items, 2 * multiprocessors); 4 bits: min(items, multiprocessors). Reads the
// weights once for every SALA_GEMM_TOKENS (4 bits: SALA_GEMM4_TOKENS) rows of x. Twins: sala__op_gemm,
// sala__op_gemm_swiglu, sala__op_gemm_norm.
#if SALA_HAS(0)
extern "C" __global__ void __launch_bounds__(SALA_GEMM_THREADS, 2)
    sala_gemm(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    sala_gemm_run(&a, 4);
    if (a.kind == SALA_PRODUCT_NORM) sala_gemm_finish(&a);
}
#else
#if SALA_HAS(4)
#define SALA_NARROW sala_gemm_nvfp4
#define SALA_WIDE sala_gemm_nvfp4_wide
#define SALA_BROAD sala_gemm_nvfp4_broad
#else
#define SALA_NARROW sala_gemm_int4
#define SALA_WIDE sala_gemm_int4_wide
#define SALA_BROAD sala_gemm_int4_broad
#endif
extern "C" __global__ void __launch_bounds__(SALA_GEMM4_NARROW, 1)
    SALA_NARROW(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    if (a.tokens <= 8)
        sala_gemm_run(&a, 1);
    else
        sala_gemm_run(&a, 2);
    if (a.kind == SALA_PRODUCT_NORM) sala_gemm_finish(&a);
}

extern "C" __global__ void __launch_bounds__(4 * sala_gemm_team(4), 1)
    SALA_WIDE(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    if (a.tokens <= 32)
        sala_gemm_run(&a, 4);
    else if (SALA_WIDEST > 6 && a.tokens > 48)
        sala_gemm_run(&a, SALA_WIDEST);
    else
        sala_gemm_run(&a, 6);
    if (a.kind == SALA_PRODUCT_NORM) sala_gemm_finish(&a);
}

// The same with tiles of more rows of x (sala__is_broad). Grid: min(items, multiprocessors), a block is 128
// rows of weights x up to SALA_BROAD_TOKENS of x, a warp 32 x half of them. Reads the weights once for
// every SALA_BROAD_TOKENS rows of x, and x once for every 128 rows of weights. Bound on an H200, 64 k of
// 128 x 96: 665 clocks of tensor cores, 580 for x out of L2, 270 for weights. Twins: as above.
extern "C" __global__ void __launch_bounds__(SALA_GEMM4_THREADS, 1)
    SALA_BROAD(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    if (a.tokens <= 64)
        sala_broad_run(&a, 4);
    else
        sala_broad_run(&a, 6);
    if (a.kind == SALA_PRODUCT_NORM) sala_gemm_finish(&a);
}

#if SALA_HAS(4)
// NVFP4 and one or two rows of x: the time goes from the end of one product to the beginning of the next.
// So nobody waits while one block makes a norm: a product with a norm (whole) has items of 32 rows and all
// of k, a warp for each quarter of each split, and adds its rows to x; every block that reads the norm makes
// it (due). A warp has a ring of its own and waits for nobody. Before the kernel in front is complete only
// half of the ring is asked for: x would stand in line behind the rest.
enum {
    SALA_ROW_STAGES = 4,
    SALA_ROW_EARLY = 2,
    SALA_ROW_RING = SALA_ROW_STAGES * SALA_WEIGHTS, // of a warp
    SALA_ROW_XS = 16 * SALA_ROW_RING, // x: two rows with a norm, or a warp's 256 bytes a stage
    SALA_ROW_X = SALA_ROW_STAGES * 256,
    SALA_ROW_RESULT =
        SALA_ROW_XS + 4 * SALA_ROW_K, // twice: 4 quarters x 2 rows x 128, alphas, old x
    SALA_ROW_FLOATS = 1024 + 128 + 32
};

// The copies of a lane: where the next four stages come from, and how many the item still has.
typedef struct sala_row_feed {
    const unsigned char *w, *x;
    int scales, stride; // bytes from codes to scales; from a stage to the next
    int item, left;
} sala_row_feed;

SALA_DEVICE void sala_row_find(const sala_product_args *a, bool whole, sala_row_feed *feed) {
    int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31, half = warp & 1;
    int share = (a->depth + 3) / 4, from = (warp >> 2) * share, tile = feed->item;
    feed->left = tile < a->items ? max(min(share, a->depth - from), 0) : 0;
    if (feed->left == 0) return;
    const sala_weight *w = &a->gemm.w[sala_gemm_weight(a, &tile)];
    int tiles = ((a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1) * w->n + 63) >> 6;
    if (whole)
        from += (warp & 3) * a->depth, half = tile & 1, tile >>= 1;
    else
        tile = min(tile * 2 + (warp >> 1 & 1), tiles - 1); // the last one may be alone
    feed->stride = tiles * SALA_BLOCK4;
    feed->scales = 2048 - half * (1024 - 128) - lane * 12;
    feed->w = (const unsigned char *)w->data + ((int64_t)from * tiles + tile) * SALA_BLOCK4 +
              half * 1024 + lane * 16;
    feed->x = (const unsigned char *)a->gemm.x + ((lane >> 3 & 1) * w->k + from * 64) * 2 +
              (lane & 7) * 16;
}

// Stage i of the next four, to slot i of the ring.
SALA_DEVICE void sala_row_copy(const sala_row_feed *feed, int i) {
    int lane = (int)threadIdx.x & 31;
    unsigned char *to = sala_shared() + (threadIdx.x >> 5) * SALA_ROW_RING + i * SALA_WEIGHTS;
    const unsigned char *from = feed->w + (int64_t)i * feed->stride;
    if (i >= feed->left) return;
    sala_copy16(to + lane * 16, from);
    sala_copy16(to + lane * 16 + 512, from + 512);
    sala_copy4_or_zero(to + lane * 4 + 1024, from + feed->scales, true);
}

SALA_DEVICE void sala_row_copy_x(const sala_product_args *a, const sala_row_feed *feed, int i) {
    int row = (int)threadIdx.x >> 3 & 3, unit = ((int)threadIdx.x & 7) ^ (row & 1) * 4;
    unsigned char *to = sala_shared() + SALA_ROW_XS + (threadIdx.x >> 5) * SALA_ROW_X + i * 256;
    if (i < feed->left && row < a->gemm.rows)
        sala_copy16(to + row * 128 + unit * 16, feed->x + i * 128);
}

// Turn to the next four; an item may end with fewer.
SALA_DEVICE void sala_row_next(const sala_product_args *a, bool whole, sala_row_feed *feed) {
    if (feed->left == 0) return;
    feed->w += (int64_t)SALA_ROW_STAGES * feed->stride, feed->x += SALA_ROW_STAGES * 128;
    feed->left -= SALA_ROW_STAGES;
    if (feed->left > 0) return;
    feed->item += (int)gridDim.x;
    sala_row_find(a, whole, feed);
}

// x normed into shared memory, with the sums of sala_norm_row; `by`: this thread's weights.
SALA_DEVICE void sala_row_norm(const sala_norm_args *a, int rows, uint4 by, float *partial) {
    int width = a->width, t = (int)threadIdx.x, step = 4 * SALA_NORM_THREADS;
    for (int r = 0; r < rows; r++) {
        const sala_act *x = a->x + (int64_t)r * width;
        unsigned char *to = sala_shared() + SALA_ROW_XS + r * SALA_ROW_K * 2;
        uint4 v = {};
        uint2 all[SALA_ROW_K / (4 * SALA_NORM_THREADS)] = {};
        float sum = 0;
        if (t * 8 < width) v = *(const uint4 *)(x + t * 8);
#pragma unroll
        for (int u = 0; u * step < SALA_ROW_K; u++)
            if (t < SALA_NORM_THREADS && u * step + t * 4 < width)
                all[u] = *(const uint2 *)(x + u * step + t * 4);
#pragma unroll
        for (int u = 0; u * step < SALA_ROW_K; u++) {
            sum = fmaf(sala_low(all[u].x), sala_low(all[u].x), sum);
            sum = fmaf(sala_high(all[u].x), sala_high(all[u].x), sum);
            sum = fmaf(sala_low(all[u].y), sala_low(all[u].y), sum);
            sum = fmaf(sala_high(all[u].y), sala_high(all[u].y), sum);
        }
        float inverse = 1.0f / sqrtf(sala_block_sum(sum, partial) / (float)width + a->eps);
        v = make_uint4(sala_normed2(v.x, inverse, by.x), sala_normed2(v.y, inverse, by.y),
                       sala_normed2(v.z, inverse, by.z), sala_normed2(v.w, inverse, by.w));
        if (t * 8 < width) *(uint4 *)(to + (t ^ (r & 1) * 4) * 16) = v; // see sala_gemm_copy_x
    }
    __syncthreads();
}

// Four columns of row r: the sum of the quarters in the order of the other kernels, times alpha.
SALA_DEVICE float4 sala_row_value(const float *result, int r, int column) {
    const float *from = result + r * 128 + column;
    float4 alpha = *(const float4 *)(result + 1024 + column), t[4];
#pragma unroll
    for (int i = 0; i < 4; i++) t[i] = *(const float4 *)(from + i * 256);
    return make_float4(((t[0].x + t[2].x) + (t[1].x + t[3].x)) * 256 * alpha.x,
                       ((t[0].y + t[2].y) + (t[1].y + t[3].y)) * 256 * alpha.y,
                       ((t[0].z + t[2].z) + (t[1].z + t[3].z)) * 256 * alpha.z,
                       ((t[0].w + t[2].w) + (t[1].w + t[3].w)) * 256 * alpha.w);
}

// 128 rows of weights, or 64 of gate and of up.
SALA_DEVICE void sala_row_put(const sala_product_args *a, int item, const float *result) {
    int pair = a->kind == SALA_PRODUCT_SWIGLU;
    int r = (int)threadIdx.x >> (5 - pair), c = ((int)threadIdx.x & (31 >> pair)) * 4;
    if (r >= a->gemm.rows) return;
    int weight = sala_gemm_weight(a, &item);
    int n = a->gemm.w[weight].n, column = item * (128 >> pair) + c;
    if (column >= n) return;
    if (pair) c = (c >> 3) * 16 + (c & 7);
    float4 v = sala_row_value(result, r, c);
    if (pair) {
        float4 up = sala_row_value(result, r, c + 8);
        v.x = sala_swiglu(v.x, up.x), v.y = sala_swiglu(v.y, up.y);
        v.z = sala_swiglu(v.z, up.z), v.w = sala_swiglu(v.w, up.w);
    }
    *(uint2 *)(a->gemm.y[weight] + (int64_t)r * n + column) =
        make_uint2(sala_pair(v.x, v.y), sala_pair(v.z, v.w));
}

// 32 rows of weights: the sum of the splits is added to x.
SALA_DEVICE void sala_row_put_whole(const sala_product_args *a, int item, const float *result) {
    int r = (int)threadIdx.x >> 3, c = ((int)threadIdx.x & 7) * 4;
    if (r >= a->gemm.rows) return;
    uint2 old = *(const uint2 *)((const sala_act *)(result + 1024 + 128) + r * 32 + c);
    const float x[4] = {sala_low(old.x), sala_high(old.x), sala_low(old.y), sala_high(old.y)};
    float v[4] = {};
    for (int split = 0; split < 4; split++) {
        float4 u = sala_row_value(result, r, split * 32 + c);
        v[0] += u.x, v[1] += u.y, v[2] += u.z, v[3] += u.w;
    }
    for (int i = 0; i < 4; i++)
        v[i] = sala_round(x[i] + sala_round(sala_round(v[i]) * a->norm.scale));
    *(uint2 *)(a->norm.x + (int64_t)r * a->norm.width + item * 32 + c) =
        make_uint2(sala_pair(v[0], v[1]), sala_pair(v[2], v[3]));
}

// What an item's end needs comes in the background too: alphas,
SALA_DEVICE void sala_row_copy_alphas(const sala_product_args *a, bool whole, int item,
                                      float *result) {
    int t = (int)threadIdx.x;
    if (item >= a->items || t >= 128) return;
    const sala_weight *w = &a->gemm.w[sala_gemm_weight(a, &item)];
    int row = whole ? item * 32 + (t & 31) : item * 128 + t;
    int n = (a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1) * w->n;
    sala_copy4_or_zero(result + 1024 + t, w->alpha + min(row, n - 1), true);
}

// and the 64 bytes of each row of x that are added to.
SALA_DEVICE void sala_row_copy_old(const sala_product_args *a, int item, float *result) {
    int t = (int)threadIdx.x;
    if (t < a->gemm.rows * 4)
        sala_copy16(result + 1024 + 128 + t * 4,
                    a->norm.x + (int64_t)(t >> 2) * a->norm.width + item * 32 + (t & 3) * 8);
}

// The stages of an item. `at`: where the lane's row of x begins, `turn` bytes a stage.
SALA_DEVICE void sala_row_multiply(const sala_product_args *a, bool whole, int stages,
                                   const unsigned char *at, sala_row_feed *feed,
                                   float sum[SALA_WIDEST][2][4]) {
    const unsigned char *w = sala_shared() + (threadIdx.x >> 5) * SALA_ROW_RING;
    const int lane = (int)threadIdx.x & 31, turn = whole ? 256 : 128;
#pragma unroll 1
    for (; stages > 0; stages -= SALA_ROW_STAGES) {
#pragma unroll
        for (int i = 0; i < SALA_ROW_STAGES; i++) {
            SALA_COPY_WAIT(SALA_ROW_STAGES - 1);
            __syncwarp();
            if (i < stages)
                sala_team_multiply(0, 2, 1, lane, w + i * SALA_WEIGHTS, w + i * SALA_WEIGHTS + 1024,
                                   at + i * turn, 2, sum[0]);
            __syncwarp();
            sala_row_copy(feed, i);
            if (whole) sala_row_copy_x(a, feed, i);
            sala_copy_commit();
        }
        sala_row_next(a, whole, feed);
        if (!whole) at += SALA_ROW_STAGES * turn;
    }
}

// All items. `whole` is a constant.
SALA_DEVICE void sala_row_run(const sala_product_args *a, bool whole) {
    const int t = (int)threadIdx.x, warp = t >> 5, lane = t & 31, share = (a->depth + 3) / 4;
    const int from = min((warp >> 2) * share, a->depth), stages = min(share, a->depth - from);
    unsigned char *xs = sala_shared() + SALA_ROW_XS;
    float *result = (float *)(sala_shared() + SALA_ROW_RESULT);
    int other = SALA_ROW_FLOATS; // to the other of two results
    sala_row_feed feed = {};
    uint4 by = {};
    feed.item = (int)blockIdx.x;
    sala_row_find(a, whole, &feed);
    sala_row_copy_alphas(a, whole, (int)blockIdx.x, result);
#pragma unroll
    for (int i = 0; i < SALA_ROW_EARLY; i++) {
        sala_row_copy(&feed, i);
        sala_copy_commit();
    }
    if (!whole && t * 8 < a->norm.width) by = ((const uint4 *)a->norm.weight.data)[t];
    sala_wait_grid();
    if (!whole) sala_row_norm(&a->norm, a->gemm.rows, by, result);
#pragma unroll
    for (int i = whole ? 0 : SALA_ROW_EARLY; i < SALA_ROW_STAGES; i++) {
        if (i >= SALA_ROW_EARLY) sala_row_copy(&feed, i);
        if (whole) sala_row_copy_x(a, &feed, i);
        sala_copy_commit();
    }
    sala_row_next(a, whole, &feed);
    xs += whole ? warp * SALA_ROW_X : from * 128;
    xs += (lane >> 2 & 1) * (whole ? 128 : SALA_ROW_K * 2);
#pragma unroll 1
    for (int item = (int)blockIdx.x; item < a->items; item += (int)gridDim.x) {
        float sum[SALA_WIDEST][2][4] = {};
        if (whole) sala_row_copy_old(a, item, result);
        if (item != (int)blockIdx.x) sala_row_copy_alphas(a, whole, item, result);
        sala_row_multiply(a, whole, stages, xs, &feed, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) { // lanes that have rows 0 and 1 of x
            int column = (warp & 3) * 32 + (lane >> 2) + i / 4 * 16 + (i & 2) * 4;
            float *to = result + (warp >> 2) * 256 + (i & 1) * 128 + column;
            if ((lane & 3) == 0) *to = sum[0][i / 4][i & 3];
        }
        if (stages <= SALA_ROW_STAGES) SALA_COPY_WAIT(0); // alphas and old x may be on their way
        __syncthreads();
        if (whole)
            sala_row_put_whole(a, item, result);
        else
            sala_row_put(a, item, result);
        result += other, other = -other;
    }
}

// Products as above: PLAIN and SWIGLU with a norm in front, NORM without its norm. Grid:
// min(items, multiprocessors), an item is 128 rows of weights (whole: 32), a warp 32 of them and a quarter of k
// (of a split's). Reads weights once, x in every block. Bound on an H200, 64 k of 16 warps: 1,060 clocks for
// weights, 670 to issue; 900 pass, and 3 us from one product's last to the next's first. Twins: as above.
extern "C" __global__ void __launch_bounds__(SALA_GEMM4_NARROW, 1)
    sala_gemm_nvfp4_row(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    if (a.whole)
        sala_row_run(&a, true);
    else
        sala_row_run(&a, false);
}
#endif
#endif

#endif
#if SALA_HAS(0)

// ---- 6. lightning attention: verify and decode

// A block owns 32 columns of one head's state S[128 keys][128 values] of one sequence, in
// registers: two slices of 8 KiB that lie together in memory (sala_state_place), four warps each.
// Thread = four keys x four columns; a warp has 32 keys, its lanes are eight groups of keys x four of
// columns.
#define SALA_GLA_WIDTH (2 * SALA_GLA_COLUMNS)
#define SALA_GLA_BLOCKS (128 / SALA_GLA_WIDTH) // of a head

typedef struct sala_gla_shared { // of the pending path, then of as many nodes at a time
    sala_act k[SALA_MAX_PATH][128], q[SALA_MAX_PATH][128];
    sala_act v[SALA_MAX_PATH][SALA_GLA_WIDTH];
    float turn[SALA_MAX_PATH][128];            // cos, sin
    float o[SALA_MAX_PATH][4][SALA_GLA_WIDTH]; // of the keys of each warp
    int32_t fork[SALA_MAX_PATH];               // see sala_gla_args
} sala_gla_shared; // then [tree_slots][4][256 threads] float4: states that later nodes grow from
static_assert(sizeof(sala_gla_shared) == 25664, "the host asks for this much");

// Where a block stands.
typedef struct sala_gla_place {
    int32_t first_row, rows;       // of the sequence, that are still to come
    int32_t count;                 // of the pending path, or of the rows at a time
    int32_t head, kv_head, column; // first of 32
    float decay;
    float *state; // of this thread: element (its first key, its first column)
    sala_gla_shared *shared;
} sala_gla_place;

SALA_DEVICE void sala_gla_four(uint2 pairs, float x[4]) {
    x[0] = sala_low(pairs.x);
    x[1] = sala_high(pairs.x);
    x[2] = sala_low(pairs.y);
    x[3] = sala_high(pairs.y);
}

SALA_DEVICE int sala_gla_key(void) { // the thread's first key and column
    return ((int)threadIdx.x & 127) >> 2 << 2;
}

SALA_DEVICE int sala_gla_column(void) {
    return ((int)threadIdx.x >> 7) * SALA_GLA_COLUMNS + ((int)threadIdx.x & 3) * 4;
}

SALA_DEVICE void sala_gla_store(const sala_gla_place *at, const float4 s[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) *(float4 *)(at->state + j * SALA_GLA_COLUMNS) = s[j];
}

// One token: S = fma(k, v, decay * S). The only place where a state changes.
SALA_DEVICE void sala_gla_step(const sala_gla_place *at, int i, float4 s[4]) {
    float k[4], v[4];
    sala_gla_four(*(const uint2 *)&at->shared->k[i][sala_gla_key()], k);
    sala_gla_four(*(const uint2 *)&at->shared->v[i][sala_gla_column()], v);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        s[j].x = fmaf(k[j], v[0], at->decay * s[j].x);
        s[j].y = fmaf(k[j], v[1], at->decay * s[j].y);
        s[j].z = fmaf(k[j], v[2], at->decay * s[j].z);
        s[j].w = fmaf(k[j], v[3], at->decay * s[j].w);
    }
}

// A thread's share of S q: over its four keys, of its four columns.
SALA_DEVICE float4 sala_gla_dot(const sala_gla_place *at, int i, const float4 s[4]) {
    float q[4];
    float4 x = make_float4(0, 0, 0, 0);
    sala_gla_four(*(const uint2 *)&at->shared->q[i][sala_gla_key()], q);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x.x = fmaf(q[j], s[j].x, x.x);
        x.y = fmaf(q[j], s[j].y, x.y);
        x.z = fmaf(q[j], s[j].z, x.z);
        x.w = fmaf(q[j], s[j].w, x.w);
    }
    return x;
}

// Its sum over the eight key groups of the warp, always in the same order, halving the columns at each
// exchange. Lanes without bit 2 write.
SALA_DEVICE void sala_gla_sum(const sala_gla_place *at, int i, float4 x) {
    int lane = (int)threadIdx.x & 31;
    bool back = lane & 16, odd = lane & 8;
    float even_sum = (back ? x.z : x.x) + __shfl_xor_sync(0xFFFFFFFFu, back ? x.x : x.z, 16);
    float odd_sum = (back ? x.w : x.y) + __shfl_xor_sync(0xFFFFFFFFu, back ? x.y : x.w, 16);
    float sum = odd ? odd_sum : even_sum;
    sum += __shfl_xor_sync(0xFFFFFFFFu, odd ? even_sum : odd_sum, 8);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
    if (!(lane & 4))
        at->shared->o[i][threadIdx.x >> 5 & 3][sala_gla_column() + 2 * back + odd] = sum;
}

// The pending path, already normed and rotated, into shared memory.
SALA_DEVICE void sala_gla_pending(const sala_gla_args *a, const sala_gla_place *at, int slot) {
    constexpr int STEP = MODEL.lin_kv_heads * 128;
    int i = (int)threadIdx.x >> 4, part = ((int)threadIdx.x & 15) * 8;
    int64_t first = (int64_t)slot * SALA_MAX_PATH * STEP + at->kv_head * 128;
#pragma unroll 1
    for (; i < at->count; i += 16) {
        sala_copy16(&at->shared->k[i][part], a->pending_k + first + i * STEP + part);
        if (part < SALA_GLA_WIDTH)
            sala_copy16(&at->shared->v[i][part],
                        a->pending_v + first + i * STEP + at->column + part);
    }
}

// q, k as projected, v and the turns of the rows into shared memory: a row is copied by one warp.
SALA_DEVICE void sala_gla_fetch(const sala_gla_args *a, const sala_gla_place *at) {
    sala_gla_shared *m = at->shared;
    int t = (int)threadIdx.x, lane = t & 31, part = (lane & 15) * 8;
    bool is_q = lane & 16;
    if (a->tree_slots && t < at->count) m->fork[t] = a->forks[at->first_row + t];
#pragma unroll 1
    for (int i = t >> 5; i < at->count; i += 8) {
        int64_t r = at->first_row + i;
        int64_t q = (r * MODEL.lin_heads + at->head) * 128 + part;
        int64_t k = (r * MODEL.lin_kv_heads + at->kv_head) * 128;
        sala_copy16(is_q ? &m->q[i][part] : &m->k[i][part], is_q ? a->q + q : a->raw_k + k + part);
        if (a->cos_sin) sala_copy16(&m->turn[i][lane * 4], a->cos_sin + r * 128 + lane * 4);
        if (lane < 4) sala_copy16(&m->v[i][part], a->v + k + at->column + part);
    }
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
}

// Norm and rotate q and k of the rows: even warps take k, odd warps q, two at a time, whose sums then
// wait for each other. The first block of a K/V head keeps its k.
SALA_DEVICE void sala_gla_heads(const sala_gla_args *a, const sala_gla_place *at, bool normed,
                                uint2 weight) {
    sala_gla_shared *m = at->shared;
    bool is_q = threadIdx.x >> 5 & 1;
    bool keep = !is_q && at->column == 0 && at->head % (MODEL.lin_heads / MODEL.lin_kv_heads) == 0;
    sala_act(*heads)[128] = is_q ? m->q : m->k;
#pragma unroll 1
    for (int i = (int)threadIdx.x >> 6; i < at->count; i += 8) {
        uint2 x[2];
        int next = min(i + 4, SALA_MAX_PATH - 1); // may be one that is not there
        x[0] = sala_head_load(heads[i]);
        x[1] = sala_head_load(heads[next]);
        if (normed) {
            float squares[2] = {sala_head_squares(x[0]), sala_head_squares(x[1])};
            x[0] = sala_head_norm(x[0], squares[0], MODEL.eps, weight);
            x[1] = sala_head_norm(x[1], squares[1], MODEL.eps, weight);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int row = i + 4 * j;
            if (row >= at->count) break;
            if (a->cos_sin)
                x[j] = sala_head_rope(x[j], *(const float4 *)&m->turn[row][4 * (threadIdx.x & 31)]);
            sala_head_store(heads[row], x[j]);
            int64_t r = at->first_row + row;
            if (keep) sala_head_store(a->k + (r * MODEL.lin_kv_heads + at->kv_head) * 128, x[j]);
        }
    }
    __syncthreads();
}

SALA_DEVICE float4 *sala_gla_saved(const sala_gla_place *at, int slot) { // this thread's part
    return (float4 *)(at->shared + 1) + slot * 1024 + threadIdx.x;
}

// Advance the state by the rows. Their products with q are summed up a row later, so that neither
// waits for the other.
SALA_DEVICE void sala_gla_advance(const sala_gla_place *at, bool branched, float4 s[4]) {
    float4 before = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = 0; i < at->count; i++) {
        int fork = branched ? at->shared->fork[i] : 0, save = fork >> 4;
        if (fork & 15)
#pragma unroll
            for (int j = 0; j < 4; j++) s[j] = sala_gla_saved(at, (fork & 15) - 1)[j * 256];
        sala_gla_step(at, i, s);
        float4 x = sala_gla_dot(at, i, s);
        sala_gla_sum(at, max(i - 1, 0), before); // the first is written twice
        before = x;
        if (save)
#pragma unroll
            for (int j = 0; j < 4; j++) sala_gla_saved(at, save - 1)[j * 256] = s[j];
    }
    sala_gla_sum(at, at->count - 1, before);
    __syncthreads();
}

// o of the rows from the sums of the warps.
SALA_DEVICE void sala_gla_write(const sala_gla_args *a, const sala_gla_place *at) {
    int i = (int)threadIdx.x >> 4, pair = ((int)threadIdx.x & 15) * 2;
    if (i >= at->count) return;
    float low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        low += at->shared->o[i][w][pair];
        high += at->shared->o[i][w][pair + 1];
    }
    int64_t row = at->first_row + i;
    sala_act *o = a->o + (row * MODEL.lin_heads + at->head) * 128 + at->column + pair;
    *(uint32_t *)o = sala_pair(MODEL.lin_scale * low, MODEL.lin_scale * high);
}

SALA_DEVICE sala_gla_place sala_gla_here(const sala_gla_args *a, const sala_seq *seq) {
    sala_gla_place at;
    at.first_row = seq->first_row;
    at.rows = a->o ? seq->rows : 0;
    at.count = seq->pending;
    at.head = (int)blockIdx.x / SALA_GLA_BLOCKS;
    at.kv_head = at.head / (MODEL.lin_heads / MODEL.lin_kv_heads);
    at.column = (int)blockIdx.x % SALA_GLA_BLOCKS * SALA_GLA_WIDTH;
    at.decay = a->decay[at.head];
    at.state = a->state + ((int64_t)seq->slot * MODEL.lin_heads + at.head) * 128 * 128 +
               sala_state_place(sala_gla_key(), at.column + sala_gla_column());
    at.shared = (sala_gla_shared *)sala_shared();
    return at;
}

// The state with the pending path folded in, which is stored too.
SALA_DEVICE sala_gla_place sala_gla_begin(const sala_gla_args *a, const sala_seq *seq,
                                          float4 s[4]) {
    sala_gla_place at = sala_gla_here(a, seq);
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = *(const float4 *)(at.state + j * SALA_GLA_COLUMNS);
    sala_gla_pending(a, &at, seq->slot);
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < at.count; i++) sala_gla_step(&at, i, s);
    if (at.count) sala_gla_store(&at, s);
    return at;
}

// Lightning attention over trees, whose rows come depth first. Blocks: (four of each head,
// sequences). The state is read once; the pending path is replayed and that state stored; then every
// node advances its parent's state once: chains stay in registers, branches wait in shared memory.
// Moves 128 KiB of state a head (half of it when nothing is pending). Twin: sala__op_gla_verify.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_gla_verify(const __grid_constant__ sala_gla_args a) {
    sala_launch_next();
    // Ahead of the wait: rows, states and pending paths come from a copy and from passes before it,
    // no kernel of this pass but this one writes them.
    const sala_act *norm = (const sala_act *)(threadIdx.x & 32 ? a.q_norm.data : a.k_norm.data);
    uint2 weight = norm ? sala_head_load(norm) : make_uint2(0, 0);
    float4 s[4];
    if ((int)blockIdx.y >= a.rows->seq_count) {
        sala_wait_grid();
        return;
    }
    sala_gla_place at = sala_gla_begin(&a, &a.rows->seqs[blockIdx.y], s);
    sala_wait_grid();
#pragma unroll 1
    for (; at.rows > 0; at.rows -= at.count, at.first_row += at.count) {
        at.count = min(at.rows, SALA_MAX_PATH);
        __syncthreads(); // what is there has been read
        sala_gla_fetch(&a, &at);
        sala_gla_heads(&a, &at, norm, weight);
        sala_gla_advance(&at, a.tree_slots, s);
        sala_gla_write(&a, &at);
    }
}

// ---- 7. after the tokens are chosen

// The path of each tree that its choices go along. Blocks: sequences, a lane a node. Reads 16 bytes a
// node, writes the path. Twin: sala__op_accept.
extern "C" __global__ void __launch_bounds__(32, 1)
    sala_accept(const __grid_constant__ sala_accept_args a) {
    sala_launch_next();
    sala_wait_grid();
    int i = (int)blockIdx.x, lane = (int)threadIdx.x, parent = -1, token = -1, chosen = -1,
        count = 0;
    if (i >= a.rows->seq_count) return;
    const sala_seq *s = &a.rows->seqs[i];
    if (lane < s->rows) {
        int r = s->first_row + lane, depth = a.rows->position[r] - s->stored;
        chosen = a.chosen[r];
        if (depth > 0) {
            token = a.rows->token[r];
            parent = a.rows->path[r * SALA_MAX_PATH + depth - 1] - s->first_row;
        }
    }
#pragma unroll 1
    for (int at = 0; at >= 0; count++) { // counts from the sequence's first row
        if (lane == 0) a.accepted_rows[i * SALA_MAX_PATH + count] = s->first_row + at;
        int next = __shfl_sync(0xFFFFFFFFu, chosen, at);
        at = __ffs((int)__ballot_sync(0xFFFFFFFFu, parent == at && token == next)) - 1;
    }
    if (lane == 0) a.accepted[i] = count;
}

// Copy K, V and completed compressed rows of node r into the pages of its sequence.
SALA_DEVICE void sala_commit_sparse(const sala_commit_args *a, const sala_seq *s, int layer,
                                    int r) {
    constexpr int PIECES = MODEL.head_dim / 8; // of 16 bytes
    const sala_dims m = MODEL;
    const sala_nodes *nodes = &a->nodes[layer];
    const sala_pages *pages = &a->pages[layer];
    int u = a->rows->position[r];
    int64_t page = s->pages[u / MODEL.block];
    for (int i = (int)threadIdx.x; i < MODEL.kv_heads * PIECES; i += 128) {
        int64_t g = i / PIECES, from = (int64_t)r * MODEL.kv_heads * PIECES + i;
        int64_t to = ((page * MODEL.kv_heads + g) * MODEL.block + u % MODEL.block) * PIECES;
        ((uint4 *)pages->k)[to + i % PIECES] = ((const uint4 *)nodes->k)[from];
        ((uint4 *)pages->v)[to + i % PIECES] = ((const uint4 *)nodes->v)[from];
        for (int tier = 1; tier <= 2; tier++) {
            int j = sala_tier_rows(&m, tier, u + 1) - 1, slots = sala_tier_slots(&m, tier);
            if (j < 0 || sala_tier_last(&m, tier, j) != u) continue;
            int slot = u % MODEL.block / (MODEL.stride * (tier == 1 ? 1 : 4));
            to = ((page * MODEL.kv_heads + g) * slots + slot) * PIECES + i % PIECES;
            const sala_act *row = tier == 1 ? nodes->tier1 : nodes->tier2;
            ((uint4 *)(tier == 1 ? pages->tier1 : pages->tier2))[to] = ((const uint4 *)row)[from];
        }
    }
}

// Move k, v of node r to place n of the pending path.
SALA_DEVICE void sala_commit_lightning(const sala_commit_args *a, const sala_seq *s, int layer,
                                       int r, int n) {
    constexpr int PIECES = MODEL.lin_kv_heads * MODEL.lin_dim / 8;
    int64_t from = ((int64_t)layer * a->node_rows + r) * PIECES;
    int64_t to = (((int64_t)layer * a->slots + s->slot) * SALA_MAX_PATH + n) * PIECES;
    for (int i = (int)threadIdx.x; i < PIECES; i += 128) {
        uint4 k = ((const uint4 *)a->node_k)[from + i], v = ((const uint4 *)a->node_v)[from + i];
        ((uint4 *)a->pending_k)[to + i] = k;
        ((uint4 *)a->pending_v)[to + i] = v;
    }
}

// The accepted nodes become part of their sequences. Blocks: (layers: sparse, then lightning;
// sequences; places on the path), each copies one node. Twin: sala__op_commit.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_commit(const __grid_constant__ sala_commit_args a) {
    sala_launch_next();
    sala_wait_grid();
    int layer = (int)blockIdx.x, i = (int)blockIdx.y, n = (int)blockIdx.z;
    if (i >= a.rows->seq_count || n >= a.accepted[i]) return;
    const sala_seq *s = &a.rows->seqs[i];
    int r = a.accepted_rows[i * SALA_MAX_PATH + n];
    if (layer < a.sparse_layers)
        sala_commit_sparse(&a, s, layer, r);
    else
        sala_commit_lightning(&a, s, layer - a.sparse_layers, r, n);
}

#endif

// ---- 8. sparse attention: compressed rows, block selection, attention over blocks
// blockIdx.x is a list: (row of the pass, K/V head); blockIdx.y, in strides of gridDim.y, a part of
// it. Lists are innermost, so that the nodes of a tree meet in the L2 cache. Parts stand at absolute
// positions; how many there are is read on the device. Code that lies cold between other kernels
// costs more than what it does: data goes to shared memory in the background, loops stay loops.

#define SALA_INFINITY __uint_as_float(0x7F800000u)
#define SALA_GROUP (MODEL.heads / MODEL.kv_heads) // query heads of a K/V head: rows of an MMA

// A list's row and what it sees.
typedef struct sala_view {
    int row, head, position, stored;
    const int32_t *pages; // of its sequence
    const int32_t *path;  // rows of the nodes at positions stored, stored + 1, ...
} sala_view;

// The list's row and position; false if there is no such row.
SALA_DEVICE bool sala_view_row(sala_view *v, const sala_rows *rows) {
    v->row = (int)blockIdx.x / MODEL.kv_heads;
    v->head = (int)blockIdx.x % MODEL.kv_heads;
    if (v->row >= rows->count) return false;
    v->position = rows->position[v->row];
    return true;
}

SALA_DEVICE void sala_view_open(sala_view *v, const sala_rows *rows) { // the rest
    const sala_seq *seq = &rows->seqs[rows->seq[v->row]];
    v->stored = seq->stored;
    v->pages = seq->pages;
    v->path = rows->path + v->row * SALA_MAX_PATH;
}

// Page of a block of the row's sequence; 0 if all its tokens lie with nodes.
SALA_DEVICE int sala_view_page(const sala_view *v, int block) {
    return block * MODEL.block < v->stored ? v->pages[block] : 0;
}

// The K/V head's vector of a row of the pass among the nodes.
SALA_DEVICE int64_t sala_node_at(const sala_view *v, int row) {
    return ((int64_t)row * MODEL.kv_heads + v->head) * 128;
}

SALA_DEVICE int sala_tier_of(int tier, int n) { // rows of a tier that n tokens complete
    const sala_dims m = MODEL;
    return sala_tier_rows(&m, tier, n);
}

// Can selection drop any block of a token at this position?
SALA_DEVICE bool sala_selects(int position) {
    return position + 1 >= MODEL.dense_len && position / MODEL.block + 1 > MODEL.top_k;
}

// Maximum and sum over the four lanes of a quad.
SALA_DEVICE float sala_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

SALA_DEVICE float sala_quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// ---- 9. vectors in shared memory and their products

// Where piece p (16 bytes) of vector n lies: eight vectors' same pieces are in different banks.
SALA_DEVICE int sala_vector_at(int n, int p) {
    return n * 128 + (p ^ (n & 7)) * 8;
}

// The queries of a group to shared memory, in the background; rows beyond the group are zero.
SALA_DEVICE void sala_query_load(sala_act *to, const sala_act *q, const sala_view *v) {
    const sala_act *from = q + ((int64_t)v->row * MODEL.heads + v->head * SALA_GROUP) * 128;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 256; i += (int)blockDim.x)
        sala_copy16_or_zero(to + sala_vector_at(i >> 4, i & 15), from + i * 8, i >> 4 < SALA_GROUP);
}

// All scores, maxima and logarithms of sums are binary, since exp2f is half the code of expf.
#define SALA_SCORE_SCALE (MODEL.attn_scale * 1.44269504f)

// s[i] = q . k * attn_scale / ln 2 of the heads and keys 8i .. 8i + 7, of `keys`, a constant.
SALA_DEVICE void sala_score_keys(float (*s)[4], const sala_act *q, const sala_act *k, int keys) {
    int lane = (int)threadIdx.x & 31, row = lane & 15;
#pragma unroll
    for (int i = 0; i < keys / 2; i++) s[i / 4][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        int at = sala_vector_at(row, lane >> 4) ^ (step * 16); // two pieces a step
        uint32_t a[4], b[4];
        sala_ldmatrix4(a, q + at);
#pragma unroll
        for (int i = 0; i < keys / 8; i += 2) {
            sala_ldmatrix4(b, k + i * 8 * 128 + at);
            uint32_t low[2] = {b[0], b[2]}, high[2] = {b[1], b[3]};
            sala_mma(s[i], a, low);
            sala_mma(s[i + 1], a, high);
        }
    }
#pragma unroll
    for (int i = 0; i < keys / 2; i++) s[i / 4][i % 4] *= SALA_SCORE_SCALE;
}

// Element x of a compressed row: the mean of its window's keys, summed in position order as on the
// CPU, the same bits.
SALA_DEVICE sala_act sala_window_mean(const sala_act *keys, int count) {
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < count; i++) sum += sala_act_f32(keys[i * 128]);
    return sala_store(sum * (count == 32 ? 1.0f / 32 : 1.0f / 128)); // a power of two: exact
}

#if SALA_HAS(0)

// ---- 10. selection, 1: compressed rows and normalisers

typedef struct sala_normaliser_shared {
    sala_act q[16 * 128];
    sala_act keys[SALA_SELECT_PART * 128]; // rows of tier 2
    sala_act window[128 * 128];            // keys of the tokens of a new row
    float max[8][16], sum[8][16];
} sala_normaliser_shared;

SALA_DEVICE int sala_normaliser_parts(int position) {
    if (!sala_selects(position)) return 0;
    return (sala_tier_of(2, position + 1) + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
}

// The keys of the tokens first .. first + count - 1, of at most two blocks, to shared memory.
SALA_DEVICE void sala_window_load(const sala_select_args *a, const sala_view *v, int first,
                                  int count, sala_act *to) {
    int low = sala_view_page(v, first / 64), high = sala_view_page(v, first / 64 + 1);
    int piece = ((int)threadIdx.x & 15) * 8;
#pragma unroll 1
    for (int i = (int)threadIdx.x >> 4; i < count; i += 16) {
        int u = first + i, page = u / 64 == first / 64 ? low : high;
        const sala_act *from =
            a->pages.k + (((int64_t)page * MODEL.kv_heads + v->head) * 64 + u % 64) * 128;
        if (u >= v->stored) from = a->nodes.k + sala_node_at(v, v->path[u - v->stored]);
        sala_copy16(to + i * 128 + piece, from + piece);
    }
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
}

SALA_DEVICE bool sala_completes(int position) { // does its token complete compressed rows?
    return position >= 31 && position % 16 == 15;
}

// The compressed rows that the row's token completes: half of the block makes each tier's. `part`
// >= 0 instead: the row of tier 2 that a node of the path completed, if the part has it, into the
// part's keys (another block may be making it for the nodes).
SALA_DEVICE void sala_complete_tiers(const sala_select_args *a, const sala_view *v, int part,
                                     sala_normaliser_shared *shared) {
    int end = v->position + 1, row = sala_tier_of(2, end) - 1, x = (int)threadIdx.x & 127;
    int count = part >= 0 || (row >= 0 && row * 64 + 128 == end) ? 128 : 32;
    int own = threadIdx.x < 128 ? 32 : 128, local = row - part * SALA_SELECT_PART;
    sala_act *to = threadIdx.x < 128 ? a->nodes.tier1 : a->nodes.tier2;
    if (part >= 0) {
        if (row < sala_tier_of(2, v->stored) || local >= SALA_SELECT_PART) return;
        end = row * 64 + 128;
    }
    sala_window_load(a, v, end - count, count, shared->window);
    if (own <= count && (part < 0 || own == 128)) {
        sala_act mean = sala_window_mean(shared->window + (count - own) * 128 + x, own);
        if (part < 0)
            to[sala_node_at(v, v->row) + x] = mean;
        else
            shared->keys[sala_vector_at(local, x >> 3) + (x & 7)] = mean;
    }
    __syncthreads();
}

// A warp's 16 rows of tier 2 to shared memory, those that lie in pages.
SALA_DEVICE void sala_normaliser_load(const sala_select_args *a, const sala_view *v, int first,
                                      sala_act *keys) {
    int lane = (int)threadIdx.x & 31, in_pages = sala_tier_of(2, v->stored) - first;
    int page = (lane & 15) < in_pages ? v->pages[first + (lane & 15) + 1] : 0; // of its last token
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        int row = 2 * i + (lane >> 4);
        int64_t at = (int64_t)__shfl_sync(0xFFFFFFFFu, page, row) * MODEL.kv_heads + v->head;
        if (row < in_pages)
            sala_copy16(keys + sala_vector_at(row, lane & 15),
                        a->pages.tier2 + at * 128 + (lane & 15) * 8);
    }
    sala_copy_commit();
}

// One part of a row's normalisers: 128 rows of tier 2, 16 a warp. For each head the maximum of the
// scores and the sum of exp2(score - maximum).
SALA_DEVICE void sala_normaliser_part(const sala_select_args *a, const sala_view *v, int part,
                                      sala_normaliser_shared *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, h = lane >> 2, c = lane & 3;
    int visible = sala_tier_of(2, v->position + 1) - part * SALA_SELECT_PART - warp * 16 - 2 * c;
    float s[2][4];
    SALA_COPY_WAIT(0);
    __syncthreads();
    sala_score_keys(s, shared->q, shared->keys + warp * 16 * 128, 16);
#pragma unroll
    for (int half = 0; half < 2; half++) { // heads h and h + 8
        float max = -SALA_INFINITY;
        for (int i = 0; i < 4; i++)
            if (i / 2 * 8 + i % 2 < visible) max = fmaxf(max, s[i / 2][2 * half + i % 2]);
        max = sala_quad_max(max);
        if (c == 0) shared->max[warp][h + 8 * half] = max;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = -SALA_INFINITY, sum = 0;
        for (int w = 0; w < 8; w++) max = fmaxf(max, shared->max[w][h + 8 * half]);
        for (int i = 0; i < 4; i++)
            if (i / 2 * 8 + i % 2 < visible) sum += exp2f(s[i / 2][2 * half + i % 2] - max);
        sum = sala_quad_sum(sum);
        if (c == 0) shared->sum[warp][h + 8 * half] = sum;
    }
    __syncthreads();
    if (threadIdx.x < SALA_GROUP) {
        int own = (int)threadIdx.x, parts = (a->capacity + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
        float max = -SALA_INFINITY, sum = 0;
        for (int w = 0; w < 8; w++) max = fmaxf(max, shared->max[w][own]);
        for (int w = 0; w < 8; w++) sum += shared->sum[w][own];
        int64_t to = ((int64_t)v->row * MODEL.heads + v->head * SALA_GROUP + own) * parts + part;
        *(float2 *)(a->normaliser + 2 * to) = make_float2(max, sum);
    }
    __syncthreads();
}

// The compressed rows that nodes complete (blockIdx.y 0), then the normalisers' parts. Reads the
// rows of tier 2, 32 KiB a part. Twin: sala__op_store_tiers, the first half of sala__row_scores.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_select_normaliser(const __grid_constant__ sala_select_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_normaliser_shared *shared = (sala_normaliser_shared *)sala_shared();
    int part = (int)blockIdx.y - 1, warp = (int)threadIdx.x >> 5;
    sala_view v;
    if (!sala_view_row(&v, a.rows)) return;
    int parts = sala_normaliser_parts(v.position);
    if (part < 0 && !sala_completes(v.position)) part += (int)gridDim.y;
    if (part >= parts) return;
    sala_view_open(&v, a.rows);
    if (parts) sala_query_load(shared->q, a.q, &v);
#pragma unroll 1
    for (; part < parts; part += (int)gridDim.y) {
        if (part >= 0)
            sala_normaliser_load(&a, &v, part * SALA_SELECT_PART + warp * 16,
                                 shared->keys + warp * 16 * 128);
        sala_complete_tiers(&a, &v, part, shared);
        if (part >= 0) sala_normaliser_part(&a, &v, part, shared);
    }
}

// ---- 11. selection, 2: block scores
// The page of block b holds rows 4b-1 .. 4b+2 of tier 1: those whose last token lies in b. A warp's
// tile of 16 rows is four pages; a part of 128 blocks is 32 tiles, and the first row of the next
// page, which its last block shares with the next part: both compute it alike.

#define SALA_SCORE_ROUNDS 5 // tiles of a warp: the fifth is warp 0's, for the shared row

typedef struct sala_score_shared {
    sala_act q[16 * 128];
    sala_act keys[8][2][16 * 128];      // of each warp, two rounds
    float lse[16];                      // log-sum-exp of tier 2 of each head
    float sum[SALA_SCORE_ROUNDS * 128]; // row scores: [x] is of row 4 * first block - 1 + x
} sala_score_shared;

SALA_DEVICE int sala_score_parts(int position) {
    if (!sala_selects(position)) return 0;
    return position / MODEL.block / SALA_SELECT_PART + 1;
}

// Log-sum-exp of each head from the parts of the normaliser: 16 lanes a head, lane i takes parts i,
// i + 16, ... in order, then a tree. No row of tier 2: infinity, so that all scores are 0.
SALA_DEVICE void sala_score_lse(const sala_select_args *a, const sala_view *v, float *lse) {
    int h = (int)threadIdx.x >> 4, i = (int)threadIdx.x & 15;
    int parts = sala_normaliser_parts(v->position);
    int stride = (a->capacity + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
    const float2 *from =
        (const float2 *)a->normaliser +
        ((int64_t)v->row * MODEL.heads + v->head * SALA_GROUP + min(h, SALA_GROUP - 1)) * stride;
    float max = -SALA_INFINITY, sum = 0;
#pragma unroll 1
    for (int p = 0; p < parts; p += 16)
        if (p + i < parts) max = fmaxf(max, from[p + i].x);
    for (int step = 8; step > 0; step >>= 1)
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, step));
#pragma unroll 1
    for (int p = 0; p < parts; p += 16) {
        float2 own = p + i < parts ? from[p + i] : make_float2(max, 0);
        sum = fmaf(own.y, exp2f(own.x - max), sum);
    }
    for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (i == 0) lse[h] = parts ? max + log2f(sum) : SALA_INFINITY;
}

// What a lane must know to load its keys of the warp's tiles: tile warp + 8i in round i.
typedef struct sala_score_lane {
    const sala_act *pool, *own; // its piece of a page's first row, and of the row of a node
    int page;                   // lane 4i + b: page of the tile's block b in round i
    int rows, own_row;          // rows of the part in pages, the one that lies with a node (or -1)
} sala_score_lane;

SALA_DEVICE sala_score_lane sala_score_lane_of(const sala_select_args *a, const sala_view *v,
                                               int part) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, piece = (lane & 15) * 8;
    int first = part * SALA_SELECT_PART, block = first + 4 * (warp + 8 * (lane >> 2)) + (lane & 3);
    int rows = sala_tier_of(1, v->position + 1), in_pages = min(sala_tier_of(1, v->stored), rows);
    sala_score_lane l = {a->pages.tier1 + v->head * 512 + lane * 8, NULL, 0, 0, -1};
    if (block <= first + SALA_SELECT_PART) l.page = sala_view_page(v, block);
    l.rows = min(in_pages - (4 * first - 1), 4 * SALA_SELECT_PART + 1);
    if (rows > in_pages) { // at most one: paths are short
        int node = v->path[16 * (rows - 1) + 31 - v->stored];
        l.own = a->nodes.tier1 + sala_node_at(v, node) + piece;
        l.own_row = rows - 1 - (4 * first - 1);
    }
    return l;
}

SALA_DEVICE void sala_score_load(sala_act *keys, const sala_score_lane *l, int i) {
    int lane = (int)threadIdx.x & 31, first = 16 * (((int)threadIdx.x >> 5) + 8 * i);
    int own = l->own_row - first, rows = l->rows - first;
#pragma unroll 1
    for (int b = 0; b < 4; b++) {
        int row = 4 * b + (lane >> 4), page = __shfl_sync(0xFFFFFFFFu, l->page, 4 * i + b);
        const sala_act *from = l->pool + (int64_t)page * (MODEL.kv_heads * 512);
        int at = sala_vector_at(row, lane & 15);
        if (row < rows) sala_copy16(keys + at, from);
        if (row + 2 < rows) sala_copy16(keys + ((at + 256) ^ 16), from + 256);
    }
    if (own >= 0 && own < 16) sala_copy16(keys + sala_vector_at(own, lane & 15), l->own);
    sala_copy_commit();
}

// sum[x] = sum over the heads of the group of exp2(score - lse), always the same tree.
SALA_DEVICE void sala_score_heads(const float s[2][4], const float *lse, float *sum) {
    int lane = (int)threadIdx.x & 31, g = lane >> 2;
    float low = lse[g], high = lse[g + 8], x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = g < SALA_GROUP ? exp2f(s[i / 2][i % 2] - low) : 0;
        if (g + 8 < SALA_GROUP) x[i] += exp2f(s[i / 2][i % 2 + 2] - high);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
        for (int i = 0; i < 4; i++) x[i] += __shfl_xor_sync(0xFFFFFFFFu, x[i], step);
    if (g == 0) *(float2 *)(sum + 2 * lane) = make_float2(x[0], x[1]);
    if (g == 0) *(float2 *)(sum + 2 * lane + 8) = make_float2(x[2], x[3]);
}

// One block's score from the row scores of its part, as sala__select_row pools them.
SALA_DEVICE float sala_score_pool(const sala_view *v, int first_block, int b, const float *sum) {
    int n1 = sala_tier_of(1, v->position + 1), own = v->position / MODEL.block;
    float best = -SALA_INFINITY;
    if (b < MODEL.init_blocks || b >= own - MODEL.local_blocks) return SALA_INFINITY;
    for (int j = 4 * b - 1; j < 4 * b + 4; j++) {
        float score = sum[j - (4 * first_block - 1)];
        if (j >= 0 && j < n1 && score > best) best = score;
    }
    return best;
}

// Two rounds of keys are on their way while one is multiplied; rows that are not there give scores
// that nobody reads.
SALA_DEVICE void sala_score_part(const sala_select_args *a, const sala_view *v, int part,
                                 sala_score_shared *shared) {
    int warp = (int)threadIdx.x >> 5, b = part * SALA_SELECT_PART + (int)threadIdx.x;
    sala_score_lane l = sala_score_lane_of(a, v, part);
#pragma unroll 1
    for (int round = -2; round < SALA_SCORE_ROUNDS; round++) {
        sala_act *keys = shared->keys[warp][round & 1];
        float s[2][4];
        if (round == 0) sala_score_lse(a, v, shared->lse);
        if (round >= 0) {
            SALA_COPY_WAIT(1);
            __syncthreads();
            sala_score_keys(s, shared->q, keys, 16);
            __syncwarp();
        }
        sala_score_load(keys, &l, round + 2);
        if (round >= 0) sala_score_heads(s, shared->lse, shared->sum + 16 * warp + 128 * round);
    }
    __syncthreads();
    if (threadIdx.x < SALA_SELECT_PART && b <= v->position / MODEL.block)
        a->score[((int64_t)v->row * MODEL.kv_heads + v->head) * a->capacity + b] =
            sala_score_pool(v, part * SALA_SELECT_PART, b, shared->sum);
    __syncthreads();
}

// Block scores of the rows that select: 128 blocks a part, 128 KiB of tier 1. Twin: the second half
// of sala__row_scores and the pooling of sala__select_row.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_select_score(const __grid_constant__ sala_select_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_score_shared *shared = (sala_score_shared *)sala_shared();
    sala_view v;
    if (!sala_view_row(&v, a.rows)) return;
    int parts = sala_score_parts(v.position);
    if ((int)blockIdx.y >= parts) return;
    sala_view_open(&v, a.rows);
    sala_query_load(shared->q, a.q, &v);
#pragma unroll 1
    for (int part = (int)blockIdx.y; part < parts; part += (int)gridDim.y)
        sala_score_part(&a, &v, part, shared);
}

// ---- 12. selection, 3: the best blocks

#define SALA_TOP_BINS 2048  // of a histogram: digits of 11 bits
#define SALA_TOP_HELD 16384 // values that shared memory has room for

typedef struct sala_top_shared {
    int histogram[SALA_TOP_BINS];
    int warp[2][32];
    int digit, need, found; // what a pass of the radix select decides
} sala_top_shared;          // then the keys of the first SALA_TOP_HELD values

// A list's keys, and the run of them that a warp takes: 128 at a time, a run's end may lie beyond n.
typedef struct sala_top_values {
    uint32_t *key;     // in shared memory if there is room, else in place of the scores
    int first, run, n; // first: of the lane
} sala_top_values;

// The order of floats as that of unsigned integers, as sala__order_key.
SALA_DEVICE uint32_t sala_top_key(uint32_t bits) {
    uint32_t u = __float_as_uint(__uint_as_float(bits) + 0.0f); // -0 equals 0
    return u ^ ((uint32_t)((int)u >> 31) | 0x80000000u);
}

SALA_DEVICE uint32_t sala_top_at(const sala_top_values *v, int i) { // 0 is no float's key
    return i < v->n ? v->key[i] : 0;
}

// Sum over the lanes up to this one.
SALA_DEVICE int sala_warp_scan(int x) {
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(0xFFFFFFFFu, x, step);
        if (((int)threadIdx.x & 31) >= step) x += below;
    }
    return x;
}

// The keys of the warp's run. Each lane reads what it wrote.
SALA_DEVICE void sala_top_load(const sala_top_values *v, const uint32_t *value) {
#pragma unroll 1
    for (int at = 0; at < v->run; at += 128) {
        uint32_t x[4];
        int i = v->first + at;
#pragma unroll
        for (int n = 0; n < 4; n++) x[n] = i + 32 * n < v->n ? value[i + 32 * n] : 0;
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (i + 32 * n < v->n) v->key[i + 32 * n] = sala_top_key(x[n]);
    }
}

// From the histogram of a digit, which is emptied: the digit of the need-th largest value, how many
// values with that digit are needed, and how many there are. Thread t stands for the digits
// 2047 - 2t and 2046 - 2t.
SALA_DEVICE void sala_top_digit(sala_top_shared *shared, int need) {
    int t = (int)threadIdx.x, lane = t & 31, warp = t >> 5;
    int2 *at = (int2 *)shared->histogram + (SALA_TOP_BINS / 2 - 1 - t), own = *at;
    int upto = sala_warp_scan(own.x + own.y);
    *at = make_int2(0, 0);
    if (lane == 31) shared->warp[0][warp] = upto;
    __syncthreads();
    int before = sala_warp_scan(shared->warp[0][lane]);
    before = warp ? __shfl_sync(0xFFFFFFFFu, before, warp - 1) : 0;
    need -= before + upto - own.x - own.y; // of the values below those of the threads before
    if (need > 0 && need <= own.x + own.y) {
        bool second = need > own.y;
        shared->digit = SALA_TOP_BINS - 1 - 2 * t - second;
        shared->need = second ? need - own.y : need;
        shared->found = second ? own.x : own.y;
    }
    __syncthreads();
}

// What a radix select finds: the k-th largest key as far as it matters (*mask), and how many values
// that are equal to it there belong to the k.
SALA_DEVICE uint32_t sala_top_threshold(const sala_top_values *v, uint32_t *mask, int *ties,
                                        sala_top_shared *shared) {
    uint32_t prefix = 0;
#pragma unroll 1
    for (int shift = 21; shift >= 0; shift = shift > 10 ? 10 : shift - 10) { // 21, 10, 0
#pragma unroll 1
        for (int at = 0; at < v->run; at += 128) {
            uint32_t key[4];
#pragma unroll
            for (int n = 0; n < 4; n++) key[n] = sala_top_at(v, v->first + at + 32 * n);
#pragma unroll
            for (int n = 0; n < 4; n++)
                if ((key[n] & *mask) == prefix)
                    atomicAdd(&shared->histogram[key[n] >> shift & (SALA_TOP_BINS - 1)], 1);
        }
        __syncthreads();
        sala_top_digit(shared, *ties);
        *ties = shared->need;
        prefix |= (uint32_t)shared->digit << shift;
        *mask |= (uint32_t)(SALA_TOP_BINS - 1) << shift;
        if (shared->found == *ties) break; // all of them
    }
    return prefix;
}

// The k largest of n values, the lower index first among equals, ascending: sala__top_k. Every warp
// counts and then lists what it takes of its run.
SALA_DEVICE void sala_top_k(uint32_t *value, int n, int k, int32_t *out, sala_top_shared *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, run = (n + 4095) / 4096 * 128;
    int above = 0, equal = 0, ties = k;
    uint32_t mask = 0, below = (1u << lane) - 1;
    sala_top_values v = {n <= SALA_TOP_HELD ? (uint32_t *)(shared + 1) : value, warp * run + lane,
                         run, n};
    ((int2 *)shared->histogram)[threadIdx.x] = make_int2(0, 0);
    sala_top_load(&v, value);
    __syncthreads();
    uint32_t threshold = sala_top_threshold(&v, &mask, &ties, shared);
#pragma unroll 1
    for (int at = 0; at < run; at += 128) {
        uint32_t key[4];
#pragma unroll
        for (int j = 0; j < 4; j++) key[j] = sala_top_at(&v, v.first + at + 32 * j) & mask;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            above += __popc(__ballot_sync(0xFFFFFFFFu, key[j] > threshold));
            equal += __popc(__ballot_sync(0xFFFFFFFFu, key[j] == threshold));
        }
    }
    if (lane == 0) shared->warp[0][warp] = above, shared->warp[1][warp] = equal;
    __syncthreads();
    above = lane < warp ? shared->warp[0][lane] : 0;
    equal = lane < warp ? shared->warp[1][lane] : 0;
    for (int step = 16; step > 0; step >>= 1) {
        above += __shfl_xor_sync(0xFFFFFFFFu, above, step);
        equal += __shfl_xor_sync(0xFFFFFFFFu, equal, step);
    }
#pragma unroll 1
    for (int at = 0; at < run; at += 32) {
        uint32_t key = sala_top_at(&v, v.first + at) & mask;
        uint32_t over = __ballot_sync(0xFFFFFFFFu, key > threshold);
        uint32_t same = __ballot_sync(0xFFFFFFFFu, key == threshold);
        if (!(over | same)) continue;
        int tie = equal + __popc(same & below);
        if (key > threshold || (key == threshold && tie < ties))
            out[above + __popc(over & below) + min(tie, ties)] = v.first + at;
        above += __popc(over);
        equal += __popc(same);
    }
}

// The list of blocks of each (row, K/V head), one block each. Reads 4 bytes a block of context.
// Twin: sala__select_row from the block scores on.
extern "C" __global__ void __launch_bounds__(1024, 1)
    sala_select_top(const __grid_constant__ sala_select_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_view v;
    int64_t list = blockIdx.x;
    if (!sala_view_row(&v, a.rows)) return;
    int blocks = v.position / MODEL.block + 1, k = min(MODEL.top_k, blocks);
    bool dense = v.position + 1 < MODEL.dense_len;
    int32_t *out = a.blocks + list * MODEL.top_k;
    if (threadIdx.x == 0) a.count[list] = dense ? -1 : k;
    if (dense) return;
    if (sala_selects(v.position)) {
        sala_top_k((uint32_t *)a.score + list * a.capacity, blocks, k, out,
                   (sala_top_shared *)sala_shared());
        return;
    }
    for (int b = (int)threadIdx.x; b < k; b += 1024) out[b] = b;
}

// ---- 13. attention over the listed blocks

// Blocks that a list of `count` (-1: dense) has.
SALA_DEVICE int sala_attend_entries(int count, int position) {
    return count < 0 ? position / MODEL.block + 1 : count;
}

#define SALA_ATTEND_WARP (16 * SALA_ATTEND_PART) // tokens of a part that each of four warps takes
#define SALA_ATTEND_PITCH 136 // floats between the heads of a warp's result: no bank conflicts

typedef struct sala_attend_shared {
    sala_act q[16 * 128];
    union {
        sala_act kv[2][SALA_ATTEND_WARP * 128]; // keys and values of a warp's tokens
        float o[16 * SALA_ATTEND_PITCH];        // then its result
    } warp[4];
    float max[4][16], sum[4][16]; // of each warp
    float part_max[16];
} sala_attend_shared;

// Keys and values of a warp's tokens first, first + 1, ... (of one page, or nodes) to shared memory,
// in the background; zeros for tokens that the row does not see.
SALA_DEVICE void sala_attend_load(const sala_attend_args *a, const sala_view *v, int first,
                                  int page, sala_act kv[2][SALA_ATTEND_WARP * 128]) {
    int lane = (int)threadIdx.x & 31, high = lane >> 4, piece = lane & 15;
    int seen = v->position + 1 - first, in_pages = v->stored - first;
    int64_t at = (((int64_t)page * MODEL.kv_heads + v->head) * 64 + (first & 63)) * 128 + lane * 8;
    const sala_act *k = a->pages.k + at, *value = a->pages.v + at;
#pragma unroll 1
    for (int i = high; i < SALA_ATTEND_WARP; i += 2, k += 256, value += 256) {
        int to = sala_vector_at(i, piece);
        if (i >= in_pages && i < seen) {
            at = sala_node_at(v, v->path[i - in_pages]) + piece * 8;
            k = a->nodes.k + at, value = a->nodes.v + at;
        }
        sala_copy16_or_zero(kv[0] + to, k, i < seen);
        sala_copy16_or_zero(kv[1] + to, value, i < seen);
    }
    sala_copy_commit();
}

// Scores of a warp's tokens to exp2(score - maximum), the maximum over the part, 0 for the tokens
// from `visible` on. Sums go to shared memory, as maxima did before.
SALA_DEVICE void sala_attend_softmax(float s[SALA_ATTEND_WARP / 8][4], int visible,
                                     sala_attend_shared *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, h = lane >> 2, c = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) { // heads h and h + 8
        float max = -SALA_INFINITY;
        for (int i = 0; i < SALA_ATTEND_WARP / 4; i++) {
            float *x = &s[i / 2][2 * half + i % 2];
            if (i / 2 * 8 + i % 2 >= visible - 2 * c) *x = -SALA_INFINITY;
            max = fmaxf(max, *x);
        }
        max = sala_quad_max(max);
        if (c == 0) shared->max[warp][h + 8 * half] = max;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = -SALA_INFINITY, sum = 0;
        for (int w = 0; w < 4; w++) max = fmaxf(max, shared->max[w][h + 8 * half]);
        for (int i = 0; i < SALA_ATTEND_WARP / 4; i++) {
            float *x = &s[i / 2][2 * half + i % 2];
            *x = exp2f(*x - max);
            sum += *x;
        }
        sum = sala_quad_sum(sum);
        if (c == 0) shared->sum[warp][h + 8 * half] = sum, shared->part_max[h + 8 * half] = max;
    }
}

// to[16 heads][128] = p v for a warp's tokens, p in BF16 as upstream. The values give way to it.
SALA_DEVICE void sala_attend_weigh(const float p[SALA_ATTEND_WARP / 8][4], const sala_act *values,
                                   float *to) {
    int lane = (int)threadIdx.x & 31;
    float o[16][4];
#pragma unroll
    for (int n = 0; n < 16; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
#pragma unroll
    for (int step = 0; step < SALA_ATTEND_WARP / 16; step++) { // 16 tokens
        const float *x = p[2 * step], *y = p[2 * step + 1];
        uint32_t w[4] = {sala_pair(x[0], x[1]), sala_pair(x[2], x[3]), sala_pair(y[0], y[1]),
                         sala_pair(y[2], y[3])};
#pragma unroll
        for (int n = 0; n < 16; n += 2) { // 16 dims
            uint32_t v[4];
            int at = sala_vector_at(16 * step + (lane & 15), lane >> 4) ^ (n * 8);
            sala_ldmatrix4_trans(v, values + at);
            sala_mma(o[n], w, v);
            sala_mma(o[n + 1], w, v + 2);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int h = (lane >> 2) + i / 16 * 8;
        if (h < SALA_GROUP)
            *(float2 *)(to + h * SALA_ATTEND_PITCH + i % 16 * 8 + 2 * (lane & 3)) =
                make_float2(o[i % 16][i / 16 * 2], o[i % 16][i / 16 * 2 + 1]);
    }
}

// The results of the four warps to one.
SALA_DEVICE void sala_attend_merge(const sala_attend_args *a, const sala_view *v, int part,
                                   const sala_attend_shared *shared) {
    int64_t heads = ((int64_t)v->row * a->parts + part) * MODEL.heads + v->head * SALA_GROUP;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < SALA_GROUP * 32; i += 128) {
        int h = i >> 5, x = (i & 31) * 4;
        float sum = 0;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float4 add = *(const float4 *)(shared->warp[w].o + h * SALA_ATTEND_PITCH + x);
            o.x += add.x, o.y += add.y, o.z += add.z, o.w += add.w;
            sum += shared->sum[w][h];
        }
        ((float4 *)a->part_o)[heads * 32 + i] = o;
        if (x == 0)
            *(float2 *)(a->part_max_sum + 2 * (heads + h)) = make_float2(shared->part_max[h], sum);
    }
}

// A part by four warps; a warp without a block, or that sees nothing of it, has weights 0.
SALA_DEVICE void sala_attend_part(const sala_attend_args *a, const sala_view *v, int part,
                                  int count, sala_attend_shared *shared) {
    int warp = (int)threadIdx.x >> 5, entry = part * SALA_ATTEND_PART + warp * SALA_ATTEND_PART / 4;
    int block = entry, first = v->position + 1, page = 0;
    sala_act(*kv)[SALA_ATTEND_WARP * 128] = shared->warp[warp].kv;
    float s[SALA_ATTEND_WARP / 8][4];
    if (entry < sala_attend_entries(count, v->position)) {
        if (count >= 0)
            block = a->blocks[((int64_t)v->row * MODEL.kv_heads + v->head) * MODEL.top_k + entry];
        page = sala_view_page(v, block);
        first = block * 64 + warp * SALA_ATTEND_WARP % 64;
    }
    sala_attend_load(a, v, first, page, kv);
    SALA_COPY_WAIT(0);
    __syncthreads();
    sala_score_keys(s, shared->q, kv[0], SALA_ATTEND_WARP);
    sala_attend_softmax(s, v->position + 1 - first, shared);
    sala_attend_weigh(s, kv[1], shared->warp[warp].o);
    __syncthreads();
    sala_attend_merge(a, v, part, shared);
    __syncthreads();
}

// Nodes of a tree see nearly the same blocks. Four rows of a sequence that follow each other are a
// group. Every row does the last of its parts by itself, those with tokens that lie with nodes; the
// first row's blocks do the others of all four, and where the four have the same blocks, these lie in
// shared memory once.
#define SALA_ATTEND_GROUP 4
static_assert(SALA_ATTEND_PART == 2, "a part is a pair of blocks");

typedef struct sala_attend_group {
    int first, rows; // of the pass
    int row, tail;   // this lane's row (the last ones repeat it), its first part with nodes
    int count;       // of its list
    int2 pair;       // and its blocks of the part
} sala_attend_group;

SALA_DEVICE sala_attend_group sala_attend_group_of(const sala_attend_args *a, const sala_view *v) {
    const sala_seq *seq = &a->rows->seqs[a->rows->seq[v->row]];
    sala_attend_group g;
    g.first = seq->first_row + (v->row - seq->first_row) / SALA_ATTEND_GROUP * SALA_ATTEND_GROUP;
    g.rows = min(seq->first_row + seq->rows - g.first, SALA_ATTEND_GROUP);
    g.row = g.first + min((int)threadIdx.x & 31, g.rows - 1);
    int position = a->rows->position[g.row];
    g.count = a->count[g.row * MODEL.kv_heads + v->head];
    g.tail = sala_attend_entries(g.count, position) - 1 - (position / 64 - v->stored / 64);
    g.tail =
        max(g.tail, 0) / SALA_ATTEND_PART; // the last blocks of a list are those before the row
    return g;
}

// Do all rows of the group have the same blocks in this part, and no nodes?
SALA_DEVICE bool sala_attend_common(const sala_attend_args *a, const sala_view *v, int part,
                                    sala_attend_group *g) {
    int64_t list = (int64_t)g->row * MODEL.kv_heads + v->head;
    g->pair = make_int2(2 * part, 2 * part + 1);
    if (g->count >= 0 && part < g->tail) {
        const int32_t *from = a->blocks + list * MODEL.top_k + 2 * part;
        g->pair = make_int2(from[0], from[1]);
    }
    int x = __shfl_sync(0xFFFFFFFFu, g->pair.x, 0), y = __shfl_sync(0xFFFFFFFFu, g->pair.y, 0);
    bool same = g->pair.x == x && g->pair.y == y;
    return __all_sync(0xFFFFFFFFu, same && part < g->tail);
}

// 32 tokens of keys or values by a warp, in the background.
SALA_DEVICE void sala_attend_copy(sala_act *to, const sala_act *from) {
    int lane = (int)threadIdx.x & 31;
#pragma unroll 1
    for (int i = lane >> 4; i < SALA_ATTEND_WARP; i += 2)
        sala_copy16(to + sala_vector_at(i, lane & 15), from + i * 128 + (lane & 15) * 8);
}

// s = scores of one row with all 128 tokens of the part; q are its queries, as sala_ldmatrix4 gives them.
SALA_DEVICE void sala_attend_scores(float s[16][4], const uint32_t q[8][4],
                                    const sala_attend_shared *shared) {
    int lane = (int)threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 16; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const sala_act *k = shared->warp[i / 4].kv[0] + i % 4 * 8 * 128;
#pragma unroll
        for (int step = 0; step < 8; step++) {
            uint32_t b[4];
            sala_ldmatrix4(b, k + (sala_vector_at(lane & 15, lane >> 4) ^ (step * 16)));
            uint32_t low[2] = {b[0], b[2]}, high[2] = {b[1], b[3]};
            sala_mma(s[i], q[step], low);
            sala_mma(s[i + 1], q[step], high);
        }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) s[i / 4][i % 4] *= SALA_SCORE_SCALE;
}

// Scores to exp2(score - maximum), in pairs of BF16; the maximum and the sum to memory. The sum is that
// of four warps: each 32 tokens by themselves, then added up.
SALA_DEVICE void sala_attend_weights(const sala_attend_args *a, int64_t heads, float s[16][4],
                                     uint32_t p[16][2]) {
    int lane = (int)threadIdx.x & 31, h = lane >> 2;
#pragma unroll
    for (int half = 0; half < 2; half++) { // heads h and h + 8
        float max = -SALA_INFINITY, total = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) max = fmaxf(max, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
        max = sala_quad_max(max);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float *x = &s[4 * w + i / 2][2 * half + i % 2];
                *x = exp2f(*x - max);
                sum += *x;
            }
            total += sala_quad_sum(sum);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) p[i][half] = sala_pair(s[i][2 * half], s[i][2 * half + 1]);
        if ((lane & 3) == 0 && h + 8 * half < SALA_GROUP)
            *(float2 *)(a->part_max_sum + 2 * (heads + h + 8 * half)) = make_float2(max, total);
    }
}

// p v over the part, 16 dims at a time: again 32 tokens by themselves, then added up.
SALA_DEVICE void sala_attend_sum(const sala_attend_args *a, int64_t heads, const uint32_t p[16][2],
                                 const sala_attend_shared *shared) {
    int lane = (int)threadIdx.x & 31, h = lane >> 2;
#pragma unroll 1
    for (int n = 0; n < 16; n += 2) {
        float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float o[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
            for (int step = 0; step < 2; step++) {
                const uint32_t(*x)[2] = p + 4 * w + 2 * step;
                uint32_t weights[4] = {x[0][0], x[0][1], x[1][0], x[1][1]}, v[4];
                int at = sala_vector_at(16 * step + (lane & 15), lane >> 4) ^ (n * 8);
                sala_ldmatrix4_trans(v, shared->warp[w].kv[1] + at);
                sala_mma(o[0], weights, v);
                sala_mma(o[1], weights, v + 2);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i / 4][i % 4] += o[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (h + i / 2 * 8 < SALA_GROUP)
                *(float2 *)(a->part_o + (heads + h + i / 2 * 8) * 128 + (n + i % 2) * 8 +
                            2 * (lane & 3)) =
                    make_float2(sum[i % 2][i / 2 * 2], sum[i % 2][i / 2 * 2 + 1]);
    }
}

// A part for all rows of a group, a warp each: the numbers that sala_attend_part makes of each row.
SALA_DEVICE void sala_attend_shared_part(const sala_attend_args *a, const sala_view *v, int part,
                                         const sala_attend_group *g, sala_attend_shared *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, row = g->first + warp;
    int page = v->pages[warp < 2 ? g->pair.x : g->pair.y];
    int64_t at = (((int64_t)page * MODEL.kv_heads + v->head) * 64 + warp % 2 * 32) * 128;
    int64_t heads = ((int64_t)row * a->parts + part) * MODEL.heads + v->head * SALA_GROUP;
    const sala_act *q = a->q + ((int64_t)row * MODEL.heads + v->head * SALA_GROUP) * 128;
    sala_act(*kv)[SALA_ATTEND_WARP * 128] = shared->warp[warp].kv;
    uint32_t queries[8][4], p[16][2];
    float s[16][4];
    sala_attend_copy(kv[0], a->pages.k + at);
#pragma unroll 1
    for (int i = lane; i < 256; i += 32) // they wait where values will lie
        sala_copy16_or_zero(kv[1] + sala_vector_at(i >> 4, i & 15), q + i * 8,
                            warp < g->rows && i >> 4 < SALA_GROUP);
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < 8; step++)
        sala_ldmatrix4(queries[step], kv[1] + (sala_vector_at(lane & 15, lane >> 4) ^ (step * 16)));
    __syncwarp();
    sala_attend_copy(kv[1], a->pages.v + at);
    sala_copy_commit();
    if (warp < g->rows) {
        sala_attend_scores(s, queries, shared);
        sala_attend_weights(a, heads, s, p);
    }
    SALA_COPY_WAIT(0);
    __syncthreads();
    if (warp < g->rows) sala_attend_sum(a, heads, p, shared);
    __syncthreads();
}

// A part of one row of a group.
SALA_DEVICE void sala_attend_row_part(const sala_attend_args *a, const sala_view *v, int row,
                                      int part, sala_attend_shared *shared) {
    sala_view own = *v;
    own.row = row;
    own.position = a->rows->position[row];
    own.path = a->rows->path + row * SALA_MAX_PATH;
    sala_query_load(shared->q, a->q, &own);
    sala_attend_part(a, &own, part, a->count[row * MODEL.kv_heads + v->head], shared);
}

// Attention of a row over the listed blocks, SALA_ATTEND_PART a part. Reads 32 KiB a block, writes
// 8 KiB a part of 16 heads. Twin: sala__op_attend, whose P is FP32.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_attend(const __grid_constant__ sala_attend_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_attend_shared *shared = (sala_attend_shared *)sala_shared();
    sala_view v;
    if (!sala_view_row(&v, a.rows)) return;
    int count = a.count[blockIdx.x], entries = sala_attend_entries(count, v.position);
    if ((int)blockIdx.y * SALA_ATTEND_PART >= entries) return;
    sala_view_open(&v, a.rows);
    sala_query_load(shared->q, a.q, &v);
#pragma unroll 1
    for (int part = (int)blockIdx.y; part * SALA_ATTEND_PART < entries; part += (int)gridDim.y)
        sala_attend_part(&a, &v, part, count, shared);
}

// The numbers of sala_attend where sequences have several rows. Grid as there: (lists; blocks that share
// its parts). Reads the K/V of a block, 32 KiB, once for the four rows of a group that list it at the same
// place, else for each; writes as sala_attend. The last parts come first: rows do them one by one.
// Twin: sala__op_attend.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_attend_trees(const __grid_constant__ sala_attend_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_attend_shared *shared = (sala_attend_shared *)sala_shared();
    sala_view v;
    if (!sala_view_row(&v, a.rows)) return;
    int count = a.count[blockIdx.x], last = (sala_attend_entries(count, v.position) - 1) / 2;
    sala_view_open(&v, a.rows);
    sala_attend_group g = sala_attend_group_of(&a, &v);
    bool leads = v.row == g.first;
    int own = __shfl_sync(0xFFFFFFFFu, g.tail, v.row - g.first), tail = g.tail;
    for (int step = 1; step < SALA_ATTEND_GROUP; step *= 2)
        tail = max(tail, __shfl_xor_sync(0xFFFFFFFFu, tail, step));
    tail = __shfl_sync(0xFFFFFFFFu, tail, 0); // the last of the group
    int end = leads ? 0 : own;
#pragma unroll 1
    for (int part = max(last + 1, tail) - 1 - (int)blockIdx.y; part >= end;
         part -= (int)gridDim.y) {
        if (leads && sala_attend_common(&a, &v, part, &g)) {
            sala_attend_shared_part(&a, &v, part, &g, shared);
            continue;
        }
#pragma unroll 1
        for (int row = g.first; row < g.first + g.rows; row++) {
            bool nodes = part >= __shfl_sync(0xFFFFFFFFu, g.tail, row - g.first);
            if (nodes ? row == v.row && part <= last : leads)
                sala_attend_row_part(&a, &v, row, part, shared);
        }
    }
}

// The parts of a row's head to one, in shared memory, a warp's share: parts warp, warp + 8, ... in
// order, four dims a lane. Returns the sum that they are to be divided by, of all parts.
SALA_DEVICE float sala_combine_parts(const sala_attend_args *a, int row, int head, int parts,
                                     float (*to)[128]) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t first = (int64_t)row * a->parts * MODEL.heads + head;
    const float2 *max_sum = (const float2 *)a->part_max_sum + first;
    const float4 *from = (const float4 *)a->part_o + first * 32 + lane;
    float max = -SALA_INFINITY, sum = 0;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int p = 0; p < parts; p += 32)
        if (p + lane < parts) max = fmaxf(max, max_sum[(p + lane) * MODEL.heads].x);
    max = sala_warp_max(max);
#pragma unroll 1
    for (int p = 0; p < parts; p += 32) { // lane i holds the maximum and sum of part p + i
        float2 own = make_float2(-SALA_INFINITY, 0);
        float4 add[4];
        if (p + lane < parts) own = max_sum[(p + lane) * MODEL.heads];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            add[i] = make_float4(0, 0, 0, 0);
            if (p + warp + 8 * i < parts) add[i] = from[(p + warp + 8 * i) * (MODEL.heads * 32)];
        }
        own.x = exp2f(own.x - max);
        sum = fmaf(own.y, own.x, sum);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float scale = __shfl_sync(0xFFFFFFFFu, own.x, warp + 8 * i);
            o.x = fmaf(add[i].x, scale, o.x), o.y = fmaf(add[i].y, scale, o.y);
            o.z = fmaf(add[i].z, scale, o.z), o.w = fmaf(add[i].w, scale, o.w);
        }
    }
    *(float4 *)(to[warp] + 4 * lane) = o;
    return sala_warp_sum(sum);
}

// Element x of a head from the warps' shares, rounded.
SALA_DEVICE sala_act sala_combine_element(const float (*from)[128], int x, float sum) {
    float o = 0;
#pragma unroll
    for (int w = 0; w < 8; w++) o += from[w][x];
    return sala_store(o * (1.0f / sum));
}

// The parts of a head's attention to one, then the gate. Blocks: (rows, heads). Reads 512 bytes a
// part. Twin: the end of sala__op_attend_tile, sala__op_gate.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_attend_combine(const __grid_constant__ sala_attend_args a) {
    sala_launch_next();
    sala_wait_grid();
    float(*shared)[128] = (float(*)[128])sala_shared(); // of each warp
    int row = (int)blockIdx.x, head = (int)blockIdx.y, t = (int)threadIdx.x;
    if (row >= a.rows->count) return;
    int64_t at = ((int64_t)row * MODEL.heads + head) * 128 + t;
    int count = a.count[row * MODEL.kv_heads + head / SALA_GROUP];
    int entries = sala_attend_entries(count, a.rows->position[row]);
    sala_act gate = t < 128 && a.gate ? a.gate[at] : 0;
    float sum = sala_combine_parts(&a, row, head, (entries - 1) / SALA_ATTEND_PART + 1, shared);
    __syncthreads();
    if (t >= 128) return;
    float x = sala_act_f32(sala_combine_element(shared, t, sum));
    if (a.gate) x *= sala_round(sala_sigmoid(sala_act_f32(gate)));
    a.o[at] = sala_store(x);
}

#endif
#if SALA_HAS(1) || SALA_HAS(6)

// ---- 14. prefill: matrix products
// With many rows of x the tensor cores are the limit, so here a block keeps a tile of results in
// registers, four warps of up to 64 x 64, and walks along all of k. Weights are the MMA's A operand,
// as they lie packed. Every result is one chain of MMAs along k, whatever the shape of the tile: the
// same bits for every number of rows. Two blocks a multiprocessor: one multiplies while the other
// waits, begins or stores.

// The place of a tile. Its first weight row counts from the beginning of its weight.
typedef struct sala_prefill_tile {
    int weight, row, token;
} sala_prefill_tile;

// In a band the rows of x vary fastest, so that the blocks which run at the same time make up a
// square of results, and find most of what they read in L2.
SALA_DEVICE sala_prefill_tile sala_prefill_find(const sala_product_args *a, int rows, int tokens) {
    sala_prefill_tile at;
    int columns = a->items / a->row_tiles, wide = SALA_PREFILL_BAND / tokens;
    int first = (int)blockIdx.x / (columns * wide) * wide;
    int item = (int)blockIdx.x - first * columns;
    if (wide > a->row_tiles - first) wide = a->row_tiles - first;
    at.token = (first + item % wide) * tokens;
    at.row = item / wide;
    at.weight = 0;
#pragma unroll 1
    while (at.row >= a->tiles[at.weight]) at.row -= a->tiles[at.weight++];
    at.row *= rows;
    return at;
}

// Where a lane's i-th eight results go: -1, or their place in y or the residual stream. With gate and
// up, `wide` rounds of 8 rows of x give all columns of the warp, otherwise 32 of them.
SALA_DEVICE int64_t sala_prefill_place(const sala_product_args *a, const sala_prefill_tile *at,
                                       int tall, int wide, int i) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, n = a->gemm.w[at->weight].n;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, eight = i / wide * 4 + (lane & 3);
    int column = ((at->row + (warp & 1) * tall * 16) >> pair) + eight * 8;
    int token = at->token + ((warp >> 1) * wide + i % wide) * 8 + (lane >> 2);
    bool exists = token < a->gemm.rows && column < n && (!pair || eight < tall);
    return exists ? (int64_t)token * n + column : -1;
}

// alpha of the lane's row in the warp's `eight`-th eight weight rows.
SALA_DEVICE float sala_prefill_alpha(const sala_product_args *a, const sala_prefill_tile *at,
                                     int tall, int eight) {
    int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    int row = at->row + (warp & 1) * tall * 16 + eight * 8 + (lane >> 2);
    const sala_weight *w = &a->gemm.w[at->weight];
    bool exists = row < w->n << (a->kind == SALA_PRODUCT_SWIGLU);
    return w->alpha && exists ? w->alpha[row] : 1.0f;
}

#endif
#if SALA_HAS(1)

// The copies of one thread: where the next ones come from and go to.
typedef struct sala_prefill_feed {
    int left, slot;             // stages that are still to be copied; where the next one goes
    int rows, tiles;            // rows of x from the thread's first, tiles of 64 weight rows
    int64_t stride;             // bytes from a tile's stage to its next
    const unsigned char *w, *x; // the first 16 bytes of each
} sala_prefill_feed;

SALA_DEVICE sala_prefill_feed sala_prefill_begin(const sala_product_args *a,
                                                 const sala_prefill_tile *at) {
    sala_prefill_feed feed;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, thread = (int)threadIdx.x;
    int k = a->gemm.w[0].k, tiles = ((a->gemm.w[at->weight].n << pair) + 63) >> 6;
    feed.left = k >> 6;
    feed.slot = 0;
    feed.rows = a->gemm.rows - at->token - (thread >> 3);
    feed.tiles = tiles - (at->row >> 6);
    feed.stride = (int64_t)tiles * 8192;
    feed.w =
        (const unsigned char *)a->gemm.w[at->weight].data + (int64_t)at->row * 128 + thread * 16;
    feed.x = (const unsigned char *)(a->gemm.x + (int64_t)(at->token + (thread >> 3)) * k) +
             (thread & 7) * 16;
    return feed;
}

SALA_DEVICE int sala_prefill_turn(int tall, int wide, int slot) { // to the next stage's place
    slot += SALA_PREFILL_STAGE(tall, wide);
    return slot == SALA_PREFILL_STAGES(tall, wide) * SALA_PREFILL_STAGE(tall, wide) ? 0 : slot;
}

// Copy a stage and turn to the next one: weights as they lie, and x, where units 0..3 and 4..7 of
// every other row change places (see sala_gemm_copy_x). What does not exist is not copied: the rows
// and columns of an MMA do not mix, and its results are not stored.
SALA_DEVICE void sala_prefill_copy(const sala_product_args *a, int tall, int wide,
                                   sala_prefill_feed *feed) {
    int thread = (int)threadIdx.x, row = thread >> 3, unit = (thread & 7) ^ (row & 1) * 4;
    unsigned char *to = sala_shared() + feed->slot,
                  *to_x = to + tall * 4096 + row * 128 + unit * 16;
    int tiles = feed->left > 0 ? feed->tiles : 0, rows = feed->left > 0 ? feed->rows : 0;
    int64_t step = (int64_t)a->gemm.w[0].k * 32; // 16 rows
#pragma unroll
    for (int i = 0; i < tall * 2; i++)
        if (i / 4 < tiles) sala_copy16(to + i * 2048 + thread * 16, feed->w + i * 2048);
#pragma unroll
    for (int i = 0; i < wide; i++)
        if (i * 16 < rows) sala_copy16(to_x + i * 2048, feed->x + i * step);
    sala_copy_commit();
    feed->left--;
    feed->w += feed->stride;
    feed->x += 128;
    feed->slot = sala_prefill_turn(tall, wide, feed->slot);
}

SALA_DEVICE void sala_prefill_wait(int stages) { // until at most that many are on their way
    if (stages == 1) SALA_COPY_WAIT(1);
    if (stages == 2) SALA_COPY_WAIT(2);
    if (stages == 4) SALA_COPY_WAIT(4);
    if (stages == 6) SALA_COPY_WAIT(6);
}

// What a warp multiplies: weights of a step of 16 k and of the next one, x of 32 k.
typedef struct sala_prefill_warp {
    const unsigned char *from_w, *from_x; // the lane's first bytes in a stage
    int flip;                             // from the first 32 k of x to the second
    uint4 w[2][4], x[8];
    float sum[4][8][4]; // tile of 16 weight rows, of eight rows of x
} sala_prefill_warp;

SALA_DEVICE void sala_prefill_load_w(int tall, int slot, int step, sala_prefill_warp *m) {
#pragma unroll
    for (int i = 0; i < tall; i++)
        m->w[step & 1][i] = *(const uint4 *)(m->from_w + slot + i * 2048 + step * 512);
}

SALA_DEVICE void sala_prefill_load_x(int j, int slot, int step, sala_prefill_warp *m) {
    m->x[j] = *(const uint4 *)(m->from_x + slot + (step >> 1) * m->flip + j * 1024);
}

// One stage, four steps; operands are loaded one step ahead. Before the last step all of the stage
// is in registers and the next one must be there: that is where the barrier stands. The first step
// has the stage before this one overwritten.
SALA_DEVICE void sala_prefill_multiply(const sala_product_args *a, int tall, int wide,
                                       sala_prefill_feed *feed, int *slot, sala_prefill_warp *m) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        int next = (step + 1) & 3;
        if (next == 0) {
            *slot = sala_prefill_turn(tall, wide, *slot);
            sala_prefill_wait(SALA_PREFILL_STAGES(tall, wide) - 2);
            __syncthreads();
        }
        sala_prefill_load_w(tall, *slot, next, m);
#pragma unroll
        for (int j = 0; j < wide; j++) {
#pragma unroll
            for (int i = 0; i < tall; i++) {
                const uint4 v = m->w[step & 1][i], u = m->x[j];
                const uint32_t as[4] = {v.x, v.y, v.z, v.w};
                const uint32_t bs[2] = {step & 1 ? u.z : u.x, step & 1 ? u.w : u.y};
                sala_mma(m->sum[i][j], as, bs);
            }
            if (j == 0 && step == 0) sala_prefill_copy(a, tall, wide, feed);
            if (step & 1) sala_prefill_load_x(j, *slot, next, m);
        }
    }
}

// Times alpha, for weights that were unpacked.
SALA_DEVICE void sala_prefill_scale(const sala_product_args *a, const sala_prefill_tile *at,
                                    int tall, int wide, sala_prefill_warp *m) {
    int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    int row = at->row + (warp & 1) * tall * 16 + (lane >> 2);
    const sala_weight *w = &a->gemm.w[at->weight];
    if (!w->alpha) return;
#pragma unroll
    for (int i = 0; i < 2 * tall; i++, row += 8) {
        bool exists = row < w->n << (a->kind == SALA_PRODUCT_SWIGLU);
        float alpha = exists ? w->alpha[row] : 0.0f;
#pragma unroll
        for (int j = 0; j < wide; j++) {
            m->sum[i / 2][j][i % 2 * 2] *= alpha;
            m->sum[i / 2][j][i % 2 * 2 + 1] *= alpha;
        }
    }
}

// The results of a warp, rounded, pass through shared memory of its own, where after a last barrier
// nobody reads ahead any more: blocks of 8 x 8, a row of x across, rotated for the banks;
// ldmatrix turns four of them and gives each lane eight columns of a row of x. With gate and up the
// blocks come in turns. What is added to comes there first, all of it at once.
SALA_DEVICE void sala_prefill_store(const sala_product_args *a, const sala_prefill_tile *at,
                                    int tall, int wide, const sala_prefill_warp *m) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, bytes = tall * wide * 256;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, add = a->kind == SALA_PRODUCT_NORM;
    int rounds = pair ? wide : tall * wide / 2, row = (lane >> 3) * 2 + (lane & 1);
    unsigned char *own = sala_shared() + warp * bytes, *old = own + 4 * bytes + lane * 16;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; add && i < rounds; i++) {
        int64_t place = sala_prefill_place(a, at, tall, wide, i);
        if (place >= 0) sala_copy16(old + i * 512, a->norm.x + place);
    }
    sala_copy_commit();
#pragma unroll
    for (int i = 0; i < 2 * tall * wide; i++) {
        const float *d = &m->sum[i / wide / 2][i % wide][i / wide % 2 * 2];
        int turned = ((lane >> 2) + i / wide * 2) & 7;
        *(uint32_t *)(own + i * 128 + turned * 16 + (lane & 3) * 4) = sala_pair(d[0], d[1]);
    }
    SALA_COPY_WAIT(0);
#pragma unroll 1
    for (int i = 0; i < rounds; i++) {
        __syncwarp(); // the blocks are there, and the warp is together
        int block = pair ? (lane & 6) & (2 * tall - 1) : i / wide * 4 + (lane >> 1 & 3);
        const unsigned char *from = own + (block * wide + i % wide) * 128;
        int64_t place = sala_prefill_place(a, at, tall, wide, i);
        uint32_t r[4], up[4];
        sala_ldmatrix4_trans(r, from + ((row + block * 2) & 7) * 16);
        if (pair) sala_ldmatrix4_trans(up, from + wide * 128 + ((row + block * 2 + 2) & 7) * 16);
        if (place < 0) continue;
        uint4 v = add ? *(const uint4 *)(old + i * 512) : make_uint4(0, 0, 0, 0);
        const uint32_t x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float low = sala_low(r[e]), high = sala_high(r[e]);
            if (pair)
                r[e] = sala_pair(sala_swiglu(low, sala_low(up[e])),
                                 sala_swiglu(high, sala_high(up[e])));
            if (add)
                r[e] = sala_pair(sala_low(x[e]) + sala_round(low * a->norm.scale),
                                 sala_high(x[e]) + sala_round(high * a->norm.scale));
        }
        sala_act *to = add ? a->norm.x : a->gemm.y[at->weight];
        *(uint4 *)(to + place) = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

// One tile of results.
SALA_DEVICE void sala_prefill_run(const sala_product_args *a, int tall, int wide) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, odd = lane >> 2 & 1, slot = 0;
    sala_prefill_tile at = sala_prefill_find(a, tall * 32, wide * 16);
    sala_prefill_feed feed = sala_prefill_begin(a, &at);
    sala_prefill_warp m = {};
    m.from_w = sala_shared() + (warp & 1) * tall * 2048 + lane * 16;
    m.from_x = sala_shared() + tall * 4096 + (warp >> 1) * wide * 1024 + (lane >> 2) * 128 +
               odd * 64 + (lane & 3) * 16;
    m.flip = odd ? -64 : 64;
#pragma unroll 1
    for (int i = 1; i < SALA_PREFILL_STAGES(tall, wide); i++)
        sala_prefill_copy(a, tall, wide, &feed);
    sala_prefill_wait(SALA_PREFILL_STAGES(tall, wide) - 2);
    __syncthreads();
    sala_prefill_load_w(tall, 0, 0, &m);
#pragma unroll
    for (int j = 0; j < wide; j++) sala_prefill_load_x(j, 0, 0, &m);
#pragma unroll 1
    for (int left = a->gemm.w[0].k >> 6; left > 0; left--)
        sala_prefill_multiply(a, tall, wide, &feed, &slot, &m);
    sala_prefill_scale(a, &at, tall, wide, &m);
    sala_prefill_store(a, &at, tall, wide, &m);
}

// y = x w^T, with SwiGLU, or onto the residual stream (the norm is a kernel of its own), where there
// are many rows. Grid: one block a tile. Reads, from L2 for the most part, weights once for every
// tile of rows of x and x once for every tile of weight rows; writes y once. Twins: sala__op_gemm,
// sala__op_gemm_swiglu, sala__op_gemm_norm.
extern "C" __global__ void __launch_bounds__(SALA_PREFILL_THREADS, 2)
    sala_prefill_gemm(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    sala_wait_grid();
#define SALA_PREFILL_CASE(number, tall, wide, clocks)                                              \
    if (a.shape == number) sala_prefill_run(&a, tall, wide);
    SALA_PREFILL_SHAPES(SALA_PREFILL_CASE)
#undef SALA_PREFILL_CASE
}

// ---- 15. prefill: lightning attention
// A block takes 32 columns of a head's state through all tiles of the chunk (the chunk form,
// model.md 4), with warps in three roles. Four keepers have the state, as S^T of 32 keys each, in
// the accumulators of mma; four readers have 16 rows of the tile each; two feeders copy. A role's
// loop is short: all of them together must stay in the instruction cache. Whatever is not BF16 by
// nature (the state, decayed scores and values) enters an mma as two BF16 parts, so that errors stay
// near 2^-16. Two barriers divide a tile:
//   keepers:  decay v   |  S' = decay^size S + k^T v          |  show S' in shared memory
//   readers:  q k^T     |  decay it; o = q S, decayed; load v |  o += q k^T v; store o
//   feeders:            |  wait for the next tile             |  copy the one after it

#define SALA_GLA_WIDE 32 // columns of a block

typedef struct sala_gla_tiles {
    sala_act q[2][64][128], k[2][64][128]; // of two tiles, in pieces of 16 bytes, swizzled
    sala_act v[3][64][SALA_GLA_WIDE];      // of three
    uint4 state[8][4][32]; // operands b of 16 keys x 8 columns, a lane's words: high, low parts
    uint2 fade[64];        // decay^i and decay^(i - 1) as pairs of BF16: high, low parts
    float power[68];       // decay^i
    float scaled[132];     // lin_scale decay^(i - 64), 0 where that is negative
} sala_gla_tiles;
static_assert(sizeof(sala_gla_tiles) == 95520, "the host asks for this much");

// Where a block and a warp stand.
typedef struct sala_gla_chunk {
    int head, kv_head, column; // first of 32
    int rows, first, tiles;    // of the chunk, of its first tile; number of tiles
    int start, size;           // a tile: first row, rows,
    int stage, stage_v;        // and its places in shared memory
    int which;                 // of the warps of a role
    int lane, row, pair;       // row and pair of columns of the lane in an accumulator
    sala_gla_tiles *shared;
} sala_gla_chunk;

SALA_DEVICE void sala_gla_meet(void) { // the roles, each from its own loop
    SALA_MEET(320);
}

SALA_DEVICE void sala_gla_tile(sala_gla_chunk *at, int t) {
    at->start = t ? at->first + 64 * (t - 1) : 0;
    at->size = t ? min(64, at->rows - at->start) : at->first;
    at->stage = t & 1;
    at->stage_v = t % 3;
}

// Two numbers as BF16, and what that lost, again as BF16.
SALA_DEVICE void sala_split(float x, float y, uint32_t *high, uint32_t *low) {
    *high = sala_pair(x, y);
    *low = sala_pair(x - sala_low(*high), y - sala_high(*high));
}

// The lane's address of a piece of 16 bytes of a row of q or k, of v.
SALA_DEVICE const sala_act *sala_gla_wide(const sala_act (*tile)[128], int row, int piece) {
    return &tile[row][(piece ^ (row & 7)) * 8];
}

SALA_DEVICE const sala_act *sala_gla_narrow(const sala_act (*tile)[SALA_GLA_WIDE], int row,
                                            int piece) {
    return &tile[row][(piece ^ (row >> 1 & 3)) * 8];
}

// ---- keepers: s[16 columns][8 keys] of S^T, keys 32 * which ..

SALA_DEVICE void sala_gla_move(float *states, const sala_gla_chunk *at, bool back,
                               float s[2][4][4]) {
    float *state = states + (int64_t)at->head * 16384;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float *own = state + sala_state_place(32 * at->which + 8 * (i & 3) + at->pair,
                                              at->column + 16 * (i >> 2) + at->row);
#pragma unroll
        for (int e = 0; e < 4; e++) { // a key on, eight columns on
            float *x = own + (e & 1) * SALA_GLA_COLUMNS + (e >> 1) * 8;
            if (back)
                *x = s[i >> 2][i & 3][e];
            else
                s[i >> 2][i & 3][e] = *x;
        }
    }
}

// S to shared memory, as the readers want it.
SALA_DEVICE void sala_gla_show(const sala_gla_chunk *at, const float s[2][4][4]) {
#pragma unroll
    for (int i = 0; i < 8; i++) { // 16 keys, 8 columns
        int k = i >> 2, m = i >> 1 & 1, e = 2 * (i & 1);
        uint4 own;
        sala_split(s[m][2 * k][e], s[m][2 * k][e + 1], &own.x, &own.z);
        sala_split(s[m][2 * k + 1][e], s[m][2 * k + 1][e + 1], &own.y, &own.w);
        at->shared->state[2 * at->which + k][i & 3][at->lane] = own;
    }
}

// v^T of the tile, decayed to its end.
SALA_DEVICE void sala_gla_values(const sala_gla_chunk *at, uint32_t high[4][2][4],
                                 uint32_t low[4][2][4]) {
    int row = (at->lane & 7) + (at->lane >> 4 << 3), piece = at->lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < 8; i++) { // 16 rows, 16 columns
        int j = i >> 1, m = i & 1;
        uint32_t v[4];
        sala_ldmatrix4_trans(
            v, sala_gla_narrow(at->shared->v[at->stage_v], 16 * j + row, 2 * m + piece));
#pragma unroll
        for (int x = 0; x < 4; x++) { // v * high is 16 bits long: what its rounding lost is BF16
            int after = at->size - 1 - 16 * j - 8 * (x >> 1) - at->pair; // < 0: v is 0
            uint2 by = at->shared->fade[max(0, after)];
            high[j][m][x] = sala_fma2(v[x], by.x, 0x80008000u);
            low[j][m][x] = sala_fma2(v[x], by.x, high[j][m][x] ^ 0x80008000u);
            low[j][m][x] = sala_fma2(v[x], by.y, low[j][m][x]);
        }
    }
}

// S^T = decay^size S^T + v^T k
SALA_DEVICE void sala_gla_update(const sala_gla_chunk *at, const uint32_t high[4][2][4],
                                 const uint32_t low[4][2][4], float s[2][4][4]) {
    int row = at->lane & 15, piece = 4 * at->which + (at->lane >> 4);
    float by = at->shared->power[at->size];
#pragma unroll
    for (int e = 0; e < 32; e++) s[e >> 4][e >> 2 & 3][e & 3] *= by;
#pragma unroll
    for (int j = 0; j < 4; j++) { // 16 rows
        uint32_t k[8];
        for (int i = 0; i < 4; i += 2)
            sala_ldmatrix4_trans(k + 2 * i,
                                 sala_gla_wide(at->shared->k[at->stage], 16 * j + row, i + piece));
#pragma unroll
        for (int i = 0; i < 16; i++) // high parts first: eight sums are under way
            sala_mma(s[i & 1][i >> 1 & 3], i < 8 ? high[j][i & 1] : low[j][i & 1], k + (i & 6));
    }
}

SALA_DEVICE void sala_gla_keep(const sala_gla_args *a, sala_gla_chunk at) {
    float s[2][4][4], *own = a->state + (int64_t)a->rows->seqs[0].slot * MODEL.lin_heads * 16384;
    uint32_t high[4][2][4], low[4][2][4];
    sala_gla_move(own, &at, false, s);
    sala_gla_show(&at, s);
    sala_gla_meet();
    int t = 0;
#pragma unroll 1
    for (int copy = 0; copy <= a->copies; copy++) { // the last one is the state itself
        bool last = copy == a->copies;
        int end = last ? at.tiles : 1 + (a->copy_after[copy] - at.first) / 64;
#pragma unroll 1
        for (; t < end; t++) {
            sala_gla_tile(&at, t);
            sala_gla_values(&at, high, low);
            sala_gla_meet();
            sala_gla_update(&at, high, low, s);
            sala_gla_meet();
            sala_gla_show(&at, s);
        }
        sala_gla_move(last ? own : a->copy_to[copy], &at, true, s);
    }
}

// ---- readers: 16 rows of the tile each

// q k^T with all rows of the tile: later ones, if finite, will count for nothing, and leaving them
// out is slower.
SALA_DEVICE void sala_gla_scores(const sala_gla_chunk *at, uint32_t q[8][4], float p[4][2][4]) {
    int row = at->lane & 15, piece = at->lane >> 4;
#pragma unroll
    for (int e = 0; e < 32; e++) p[e >> 3][e >> 2 & 1][e & 3] = 0;
#pragma unroll
    for (int s = 0; s < 8; s++)
        sala_ldmatrix4(
            q[s], sala_gla_wide(at->shared->q[at->stage], 16 * at->which + row, 2 * s + piece));
    row = (at->lane & 7) + (at->lane >> 4 << 3), piece = at->lane >> 3 & 1;
#pragma unroll
    for (int i = 0; i < 32; i++) { // of two blocks of rows at a time
        int j = i >> 4 << 1 | (i & 1), s = i >> 1 & 7;
        uint32_t k[4];
        sala_ldmatrix4(k, sala_gla_wide(at->shared->k[at->stage], 16 * j + row, 2 * s + piece));
        sala_mma(p[j][0], q[s], k);
        sala_mma(p[j][1], q[s], k + 2);
    }
}

// The scores with 16 rows that stand `behind` blocks before, decayed, as operand a.
SALA_DEVICE void sala_gla_decay(const sala_gla_chunk *at, int behind, const float p[2][4],
                                uint32_t high[4], uint32_t low[4]) {
    const float *scaled = at->shared->scaled + 64;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        int by = 16 * behind + at->row + 8 * (x & 1) - at->pair - 8 * (x >> 1); // < 0: times 0
        sala_split(p[x >> 1][2 * (x & 1)] * scaled[by], p[x >> 1][2 * (x & 1) + 1] * scaled[by - 1],
                   &high[x], &low[x]);
    }
}

// o = q S, decayed up to each row: with the high parts of S, and with the low ones. And v.
SALA_DEVICE void sala_gla_recall(const sala_gla_chunk *at, const uint32_t q[8][4], float o[2][4][4],
                                 uint32_t v[4][8]) {
    const float *scaled = at->shared->scaled + 64 + 1 + 16 * at->which + at->row;
    int row = at->lane & 15, piece = at->lane >> 4;
#pragma unroll
    for (int e = 0; e < 32; e++) o[e >> 4][e >> 2 & 3][e & 3] = 0;
#pragma unroll
    for (int s = 0; s < 8; s++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint4 own = at->shared->state[s][n][at->lane];
            uint32_t high[2] = {own.x, own.y}, low[2] = {own.z, own.w};
            sala_mma(o[0][n], q[s], high);
            sala_mma(o[1][n], q[s], low);
        }
#pragma unroll
    for (int i = 0; i < 8; i++)
        sala_ldmatrix4_trans(
            v[i >> 1] + 4 * (i & 1),
            sala_gla_narrow(at->shared->v[at->stage_v], 16 * (i >> 1) + row, 2 * (i & 1) + piece));
#pragma unroll
    for (int e = 0; e < 32; e++) o[e >> 4][e >> 2 & 3][e & 3] *= scaled[8 * (e >> 1 & 1)];
}

// o += scores v
SALA_DEVICE void sala_gla_weigh(const sala_gla_chunk *at, const uint32_t high[4][4],
                                const uint32_t low[4][4], const uint32_t v[4][8],
                                float o[2][4][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > at->which) break;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sala_mma(o[i & 1][i >> 1], i & 1 ? low[j] : high[j], v[j] + (i & 6));
    }
}

// Four lanes have pairs of columns of four times eight columns: each gets the eight of one.
SALA_DEVICE uint4 sala_gla_turn(const uint32_t x[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    uint32_t a = __shfl_xor_sync(0xFFFFFFFFu, odd ? x[0] : x[1], 1);
    uint32_t b = __shfl_xor_sync(0xFFFFFFFFu, odd ? x[2] : x[3], 1);
    uint2 low = odd ? make_uint2(a, x[1]) : make_uint2(x[0], a);
    uint2 high = odd ? make_uint2(b, x[3]) : make_uint2(x[2], b);
    uint32_t c = __shfl_xor_sync(0xFFFFFFFFu, upper ? low.x : high.x, 2);
    uint32_t d = __shfl_xor_sync(0xFFFFFFFFu, upper ? low.y : high.y, 2);
    return upper ? make_uint4(c, d, high.x, high.y) : make_uint4(low.x, low.y, c, d);
}

SALA_DEVICE void sala_gla_put(const sala_gla_args *a, const sala_gla_chunk *at,
                              const float o[2][4][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = 16 * at->which + at->row + 8 * r;
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            x[n] =
                sala_pair(o[0][n][2 * r] + o[1][n][2 * r], o[0][n][2 * r + 1] + o[1][n][2 * r + 1]);
        uint4 all = sala_gla_turn(x);
        if (row < at->size)
            *(uint4 *)(a->o + ((int64_t)(at->start + row) * MODEL.lin_heads + at->head) * 128 +
                       at->column + 4 * at->pair) = all;
    }
}

SALA_DEVICE void sala_gla_read(const sala_gla_args *a, sala_gla_chunk at) {
    float p[4][2][4], o[2][4][4];
    uint32_t q[8][4], high[4][4], low[4][4], v[4][8];
    sala_gla_meet();
#pragma unroll 1
    for (int t = 0; t < at.tiles; t++) {
        sala_gla_tile(&at, t);
        sala_gla_scores(&at, q, p);
        sala_gla_meet();
#pragma unroll
        for (int j = 0; j < 4; j++) sala_gla_decay(&at, at.which - j, p[j], high[j], low[j]);
        sala_gla_recall(&at, q, o, v);
        sala_gla_meet();
        sala_gla_weigh(&at, high, low, v, o);
        sala_gla_put(a, &at, o);
    }
}

// ---- feeders

// 64 rows of `pieces` pieces of 16 bytes (16 or 4), `step` apart; rows that the tile lacks are zeros.
SALA_DEVICE void sala_gla_copy(const sala_gla_chunk *at, const sala_act *from, int step, int pieces,
                               sala_act *to) {
    int thread = (int)threadIdx.x & 63, part = thread & (pieces - 1), row = thread / pieces;
    from += (int64_t)(at->start + row) * step + part * 8;
    to += row * pieces * 8;
    part ^= pieces == 4 ? row >> 1 & 3 : row; // swizzled
#pragma unroll
    for (int i = 0; i < pieces; i++) {
        int r = 64 / pieces * i, turned = pieces == 4 ? part : part ^ (i & 1) * 4;
        sala_copy16_or_zero(to + (r * pieces + turned) * 8, from + r * step, r + row < at->size);
    }
}

SALA_DEVICE void sala_gla_feed(const sala_gla_args *a, sala_gla_chunk at, int t) {
    constexpr int STEP = MODEL.lin_heads * 128, KV_STEP = MODEL.lin_kv_heads * 128;
    if (t < at.tiles) {
        sala_gla_tile(&at, t);
        int kv = at.kv_head * 128;
        sala_gla_copy(&at, a->k + kv, KV_STEP, 16, at.shared->k[at.stage][0]);
        sala_gla_copy(&at, a->v + kv + at.column, KV_STEP, 4, at.shared->v[at.stage_v][0]);
        sala_gla_copy(&at, a->q + at.head * 128, STEP, 16, at.shared->q[at.stage][0]);
    }
    sala_copy_commit();
}

SALA_DEVICE void sala_gla_feed_all(const sala_gla_args *a, const sala_gla_chunk *at) {
    sala_gla_feed(a, *at, 0);
    SALA_COPY_WAIT(0);
    sala_gla_meet();
    sala_gla_feed(a, *at, 1);
#pragma unroll 1
    for (int t = 0; t < at->tiles; t++) {
        sala_gla_meet();
        SALA_COPY_WAIT(0);
        sala_gla_meet();
        sala_gla_feed(a, *at, t + 2);
    }
}

SALA_DEVICE sala_gla_chunk sala_gla_enter(const sala_gla_args *a) {
    sala_gla_chunk at;
    int position = a->rows->position[0];
    at.head = (int)blockIdx.x / (128 / SALA_GLA_WIDE);
    at.kv_head = at.head / (MODEL.lin_heads / MODEL.lin_kv_heads);
    at.column = (int)blockIdx.x % (128 / SALA_GLA_WIDE) * SALA_GLA_WIDE;
    at.rows = a->rows->count;
    at.first = min(64 - position % 64, at.rows); // tiles end at absolute multiples of 64
    at.tiles = 1 + (at.rows - at.first + 63) / 64;
    at.start = at.size = at.stage = at.stage_v = 0;
    at.which = 0;
    at.lane = (int)threadIdx.x & 31;
    at.row = at.lane >> 2;
    at.pair = (at.lane & 3) * 2;
    at.shared = (sala_gla_tiles *)sala_shared();
    return at;
}

// Powers of the decay, by 129 threads.
SALA_DEVICE void sala_gla_powers(sala_gla_tiles *m, float slope, int thread) {
    int i = thread - 64;
    float power = i < 0 ? 0 : (float)exp(-(double)slope * i);
    uint16_t high = sala_f32_bf16(power), low = sala_f32_bf16(power - sala_bf16_f32(high));
    uint16_t *fade = (uint16_t *)m->fade;
    m->scaled[thread] = MODEL.lin_scale * power;
    if (i >= 0) m->power[i] = power;
    if (i >= 0 && i < 64) fade[4 * i] = high, fade[4 * i + 2] = low;
    if (i >= -1 && i < 63) fade[4 * i + 5] = high, fade[4 * i + 7] = low;
}

// Lightning attention over a chunk, in chunk form. Blocks: four (of 32 columns) a head. Reads q and
// k of a head four times, v once, and the state; writes o, the state and its copies. Twin:
// sala__op_gla_prefill.
extern "C" __global__ void __launch_bounds__(320, 1)
    sala_prefill_gla(const __grid_constant__ sala_gla_args a) {
    sala_launch_next();
    int thread = (int)threadIdx.x, warp = thread >> 5;
    sala_wait_grid();
    sala_gla_chunk at = sala_gla_enter(&a);
    if (thread < 129) sala_gla_powers(at.shared, a.slopes[at.head], thread);
    at.which = warp < 4 ? 3 - warp : warp & 3;
    if (warp < 4) sala_gla_read(&a, at);
    if (warp >= 4 && warp < 8) sala_gla_keep(&a, at);
    if (warp >= 8) sala_gla_feed_all(&a, &at);
}

#endif
#if SALA_HAS(2)

// ---- 16. prefill: the cache, and block selection

// K and V of the chunk's tokens to their pages, and the compressed rows that they complete. Blocks:
// (blocks of the sequence that the chunk touches, K/V heads), each gathers the keys of its tokens
// and of the block before, where windows begin. Reads 48 KiB, writes 32 and five rows. Twin:
// sala__op_store_prefill.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_prefill_store(const __grid_constant__ sala_store_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_act *keys = (sala_act *)sala_shared(); // [128][128], the last 64 of the block itself
    const int32_t *pages = a.rows->seqs[0].pages;
    int start = a.rows->position[0], end = start + a.rows->count, head = (int)blockIdx.y;
    int block = start / 64 + (int)blockIdx.x, piece = ((int)threadIdx.x & 15) * 8;
    if (block * 64 >= end) return;
    int64_t own = (int64_t)pages[block] * MODEL.kv_heads + head;
    int64_t before = (int64_t)pages[block ? block - 1 : 0] * MODEL.kv_heads + head;
#pragma unroll 2
    for (int i = (int)threadIdx.x >> 4; i < 128; i += 16) {
        int u = block * 64 - 64 + i;
        if (u < 0 || u >= end) continue;
        int64_t node = ((int64_t)(u - start) * MODEL.kv_heads + head) * 128 + piece;
        int64_t at = (i < 64 ? before : own) * 8192 + u % 64 * 128 + piece;
        sala_copy16(keys + i * 128 + piece, u < start ? a.pages.k + at : a.nodes.k + node);
        if (u < start || i < 64) continue;
        *(uint4 *)(a.pages.k + at) = *(const uint4 *)(a.nodes.k + node);
        *(uint4 *)(a.pages.v + at) = *(const uint4 *)(a.nodes.v + node);
    }
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
    int x = (int)threadIdx.x & 127, last = block * 64 + 63; // half of the threads for each tier
    if (threadIdx.x >= 128 && block > 0 && last >= start && last < end)
        a.pages.tier2[own * 128 + x] = sala_window_mean(keys + x, 128);
#pragma unroll 1
    for (int slot = 0; slot < 4 && threadIdx.x < 128; slot++) {
        last = block * 64 + 16 * slot + 15;
        if (last >= 31 && last >= start && last < end)
            a.pages.tier1[(own * 4 + slot) * 128 + x] =
                sala_window_mean(keys + (48 + 16 * slot) * 128 + x, 32);
    }
}

// Block scores. A warp holds the queries of four tokens in registers, as columns of MMAs whose rows
// are compressed keys: all warps of a block share them, they stream by in stages of 64. Row x of a
// stream is row x - 1 of its tier, so that a page's rows (slots 0 .. 3, or the one of tier 2) are an
// aligned run; nobody sees row -1. Tokens take turns by pairs: while the tensor cores work for one,
// the scores of the other become exponentials.
#define SALA_SCORE_TOKENS 4                      // of a warp
#define SALA_SCORE_HALVES ((SALA_GROUP + 7) / 8) // of the group's heads, eight columns each
#define SALA_SCORE_SLACK 32.0f // how far a score may exceed the maximum before that is raised

typedef struct sala_prefill_shared {
    sala_act keys[3][64 * 128];             // stages
    float score[8][SALA_SCORE_TOKENS][132]; // row scores of a warp's tokens: of row x at x % 128
} sala_prefill_shared;

static_assert(sizeof(sala_prefill_shared) == 66048, "the host asks for this much");

// A warp's tokens, a lane's share: with lane = 4g + c, heads 8 * half + 2c and the one after.
typedef struct sala_scorer {
    uint32_t q[SALA_SCORE_TOKENS][SALA_SCORE_HALVES][8][2]; // B operands, eight steps of 16 k
    float max[SALA_SCORE_TOKENS][SALA_SCORE_HALVES][2];     // then the log-sum-exp
    float sum[SALA_SCORE_TOKENS][SALA_SCORE_HALVES][2];     // of exp2(score - max)
    int row, rows, position; // the first token's row, how many there are, its position
} sala_scorer;

// The products of a pair's heads and 16 rows, of which x is the lane's first, the other is x + 8.
typedef struct sala_scores {
    float s[2][SALA_SCORE_HALVES][4];
    int x;
} sala_scores;

// The copies of one thread: four rows of a stage, their pages looked up a stage ahead.
typedef struct sala_tier_feed {
    const sala_act *pool;
    const int32_t *pages;
    int blocks;  // that are wanted
    int page[4]; // -1: none
} sala_tier_feed;

SALA_DEVICE void sala_tier_look(sala_tier_feed *f, int tier, int stage) {
    int run = 16 * stage + ((int)threadIdx.x >> 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int block = tier == 1 ? run : 4 * run + i;
        f->page[i] = block < f->blocks ? f->pages[block] : -1;
    }
}

SALA_DEVICE void sala_tier_copy(sala_tier_feed *f, int tier, int stage, sala_act *keys) {
    int row = ((int)threadIdx.x >> 4) * 4, piece = (int)threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64_t page = (int64_t)f->page[i] * MODEL.kv_heads;
        const sala_act *from = f->pool + (tier == 1 ? page * 4 + i : page) * 128;
        if (f->page[i] >= 0) sala_copy16(keys + sala_vector_at(row + i, piece), from);
    }
    sala_copy_commit();
    sala_tier_look(f, tier, stage + 1);
}

// Normalisers from the scores of a pair, in steps 0 .. 6. A lane adds up its own rows in order; the
// maximum is raised where a score exceeds it by much, which is nearly never.
SALA_DEVICE void sala_scorer_normalise(sala_scorer *w, int pair, int step, sala_scores *p,
                                       float most[2][SALA_SCORE_HALVES][2]) {
    int t = step / SALA_SCORE_HALVES, half = step % SALA_SCORE_HALVES;
    if (step < 2 * SALA_SCORE_HALVES) {
        unsigned visible = (unsigned)sala_tier_of(2, w->position + 2 * pair + t + 1);
        float *s = p->s[t][half], *max = w->max[2 * pair + t][half];
#pragma unroll
        for (int i = 0; i < 4; i++)
            if ((unsigned)(p->x + i / 2 * 8 - 1) >= visible) s[i] = -SALA_INFINITY;
        for (int i = 0; i < 2; i++)
            most[t][half][i] = fmaf(fmaxf(s[i], s[2 + i]), SALA_SCORE_SCALE, -max[i]);
    } else if (step == 4) {
        float peak = -SALA_INFINITY;
#pragma unroll
        for (int i = 0; i < 4 * SALA_SCORE_HALVES; i++)
            peak = fmaxf(peak, most[i & 1][i / 4][i / 2 & 1]);
        if (!(peak > SALA_SCORE_SLACK)) return;
#pragma unroll
        for (int i = 0; i < 4 * SALA_SCORE_HALVES; i++) {
            const float *s = p->s[i & 1][i / 4] + (i / 2 & 1);
            float *max = &w->max[2 * pair + (i & 1)][i / 4][i / 2 & 1];
            if (!(most[i & 1][i / 4][i / 2 & 1] > SALA_SCORE_SLACK)) continue;
            float top = fmaxf(s[0], s[2]) * SALA_SCORE_SCALE;
            w->sum[2 * pair + (i & 1)][i / 4][i / 2 & 1] *= sala_exp2(*max - top);
            *max = top;
        }
    } else if (step == 5 || step == 6) {
#pragma unroll
        for (int i = 0; i < 2 * SALA_SCORE_HALVES; i++) {
            const float *s = p->s[step - 5][i / 2] + (i & 1);
            float max = w->max[2 * pair + step - 5][i / 2][i & 1];
            w->sum[2 * pair + step - 5][i / 2][i & 1] +=
                sala_exp2(fmaf(s[0], SALA_SCORE_SCALE, -max)) +
                sala_exp2(fmaf(s[2], SALA_SCORE_SCALE, -max));
        }
    }
}

// Row scores of a pair, in steps 0 .. 6: sums over a lane's heads, then the quad, always the same
// tree, which leaves lane 4g + c with row x + 8 (c % 2) of token c / 2.
SALA_DEVICE void sala_scorer_add(const sala_scorer *w, int pair, int step, const sala_scores *p,
                                 float v[2][2], float *score) {
    int c = (int)threadIdx.x & 3, t = step / SALA_SCORE_HALVES, half = step % SALA_SCORE_HALVES;
    if (step < 2 * SALA_SCORE_HALVES) {
        const float *s = p->s[t][half], *lse = w->max[2 * pair + t][half];
        for (int i = 0; i < 2; i++) {
            float sum = sala_exp2(fmaf(s[2 * i], SALA_SCORE_SCALE, -lse[0])) +
                        sala_exp2(fmaf(s[2 * i + 1], SALA_SCORE_SCALE, -lse[1]));
            v[t][i] = half ? v[t][i] + sum : sum;
        }
    } else if (step == 4) {
        for (int i = 0; i < 2; i++) {
            float other = __shfl_xor_sync(0xFFFFFFFFu, c & 1 ? v[i][0] : v[i][1], 1);
            v[i][0] = (c & 1 ? v[i][1] : v[i][0]) + other;
        }
    } else if (step == 5) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, c & 2 ? v[0][0] : v[1][0], 2);
        v[0][0] = (c & 2 ? v[1][0] : v[0][0]) + other;
    } else if (step == 6) {
        int x = p->x + (c & 1) * 8, token = 2 * pair + (c >> 1);
        unsigned visible = (unsigned)sala_tier_of(1, w->position + token + 1);
        score[token * 132 + (x & 127)] = (unsigned)(x - 1) < visible ? v[0][0] : -SALA_INFINITY;
    }
}

// The products of a pair and a tile of 16 rows, among them what becomes of the scores before.
SALA_DEVICE void sala_scorer_unit(sala_scorer *w, int tier, int pair, const sala_act *keys,
                                  sala_scores *now, sala_scores *before, float *score) {
    int lane = (int)threadIdx.x & 31, at = sala_vector_at(lane & 15, lane >> 4);
    float most[2][SALA_SCORE_HALVES][2], v[2][2];
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8 * SALA_SCORE_HALVES; i++) now->s[i & 1][i / 8][i / 2 & 3] = 0;
    sala_ldmatrix4(a[0], keys + at);
#pragma unroll
    for (int step = 0; step < 8; step++) {
        if (step < 7) // two pieces a step
            sala_ldmatrix4(a[(step + 1) % 2],
                           keys + (at ^ (step + 1) % 4 * 16) + (step + 1) / 4 * 64);
#pragma unroll
        for (int i = 0; i < 2 * SALA_SCORE_HALVES; i++)
            sala_mma(now->s[i / SALA_SCORE_HALVES][i % SALA_SCORE_HALVES], a[step % 2],
                     w->q[2 * pair + i / SALA_SCORE_HALVES][i % SALA_SCORE_HALVES][step]);
        if (tier == 2)
            sala_scorer_normalise(w, 1 - pair, step, before, most);
        else
            sala_scorer_add(w, 1 - pair, step, before, v, score);
    }
}

// The lanes' sums to log-sum-exps. Infinity, so that a score is 0: no such head, or no row of tier 2.
SALA_DEVICE void sala_scorer_merge(sala_scorer *w) {
#pragma unroll
    for (int i = 0; i < SALA_SCORE_TOKENS * SALA_SCORE_HALVES * 2; i++) {
        int t = i & 3, half = i / 8, head = 8 * half + 2 * ((int)threadIdx.x & 3) + (i / 4 & 1);
        float *max = &w->max[t][half][i / 4 & 1], sum = w->sum[t][half][i / 4 & 1], top = *max;
        for (int step = 4; step < 32; step *= 2)
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
        sum *= sala_exp2(*max - top);
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        bool any = head < SALA_GROUP && sala_tier_of(2, w->position + t + 1) > 0;
        *max = any ? top + log2f(sum) : SALA_INFINITY;
    }
}

// Blocks from 16 * stage - 1 on, whose rows' scores are there, to memory: 16 of them, or all that
// are left (`rest`), which are in every window.
SALA_DEVICE void sala_scorer_pool(const sala_select_args *a, const sala_scorer *w, int stage,
                                  bool rest, const float *score) {
    int lane = (int)threadIdx.x & 31;
    __syncwarp();
#pragma unroll 1
    for (int t = lane >> 4; t < min(w->rows, SALA_SCORE_TOKENS); t += 2) {
        int own = (w->position + t) / MODEL.block, end = rest ? own : min(own, 16 * stage + 14);
        float *to =
            a->score + ((int64_t)(w->row + t) * MODEL.kv_heads + (int)blockIdx.y) * a->capacity;
        if (!sala_selects(w->position + t)) continue;
#pragma unroll 1
        for (int b = 16 * stage - 1 + (lane & 15); b <= end; b += 16) {
            float best = -SALA_INFINITY;
            for (int i = 0; i < 5; i++) best = fmaxf(best, score[t * 132 + ((4 * b + i) & 127)]);
            if (b < MODEL.init_blocks || b + MODEL.local_blocks >= own) best = SALA_INFINITY;
            if (b >= 0) to[b] = best;
        }
    }
}

// All stages of a tier, a constant, for what the token at `last` sees.
SALA_DEVICE void sala_scorer_run(const sala_select_args *a, sala_scorer *w, int tier, int last,
                                 int stages) {
    sala_prefill_shared *shared = (sala_prefill_shared *)sala_shared();
    const sala_act *pool = tier == 1 ? a->pages.tier1 : a->pages.tier2;
    int slots = tier == 1 ? 4 : 1, slot = 0;
    float *score = shared->score[threadIdx.x >> 5][0], most[2][SALA_SCORE_HALVES][2], v[2][2];
    sala_tier_feed feed = {pool + (int)blockIdx.y * slots * 128 + ((int)threadIdx.x & 15) * 8,
                           a->rows->seqs[0].pages,
                           min(last / MODEL.block + 1, stages * 64 / slots)};
    sala_scores s[2] = {};
    s[1].x = ((int)threadIdx.x >> 2 & 7) - 16; // before all rows: nobody sees them
    __syncthreads();                           // the last stages of the tier before have been read
    sala_tier_look(&feed, tier, 0);
    sala_tier_copy(&feed, tier, 0, shared->keys[0]);
    sala_tier_copy(&feed, tier, 1, shared->keys[1]);
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
        const sala_act *keys = shared->keys[slot];
        SALA_COPY_WAIT(1);
        __syncthreads(); // all copies of the stage are there, all warps done with the one before
        sala_tier_copy(&feed, tier, stage + 2, shared->keys[slot ? slot - 1 : 2]);
        slot = slot == 2 ? 0 : slot + 1;
#pragma unroll 1
        for (int tile = 0; tile < 4; tile++) {
            s[0].x = s[1].x + 16;
            sala_scorer_unit(w, tier, 0, keys + tile * 2048, &s[0], &s[1], score);
            s[1].x = s[0].x;
            sala_scorer_unit(w, tier, 1, keys + tile * 2048, &s[1], &s[0], score);
            if (tier == 1 && tile == 0 && stage > 0) // now the rows of the stage before are whole
                sala_scorer_pool(a, w, stage - 1, false, score);
        }
    }
#pragma unroll
    for (int step = 0; step < 7; step++)
        if (tier == 2)
            sala_scorer_normalise(w, 1, step, &s[1], most);
        else
            sala_scorer_add(w, 1, step, &s[1], v, score);
    if (tier == 1) sala_scorer_pool(a, w, stages - 1, true, score);
}

// Normalisers from tier 2, then block scores from tier 1, of the rows that select. Blocks: (runs of
// 32 rows, K/V heads), each reads what its last row sees: 20 KiB for 1024 tokens. Twin:
// sala__row_scores and the pooling of sala__select_row.
extern "C" __global__ void __launch_bounds__(256, 1)
    sala_prefill_score(const __grid_constant__ sala_select_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_scorer w;
    int lane = (int)threadIdx.x & 31, start = a.rows->position[0];
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * 8 * SALA_SCORE_TOKENS; // the longest first
    int last = min(first + 8 * SALA_SCORE_TOKENS, a.rows->count) - 1;
    if (last < first || !sala_selects(start + last)) return;
    w.row = first + ((int)threadIdx.x >> 5) * SALA_SCORE_TOKENS;
    w.rows = last + 1 - w.row;
    w.position = start + w.row;
#pragma unroll
    for (int t = 0; t < SALA_SCORE_TOKENS; t++) {
        int64_t row = min(w.row + t, last); // there may be fewer
        const uint32_t *q = (const uint32_t *)a.q + row * (MODEL.heads * 64) +
                            ((int)blockIdx.y * SALA_GROUP + (lane >> 2)) * 64 + (lane & 3);
#pragma unroll
        for (int i = 0; i < SALA_SCORE_HALVES * 16; i++) {
            bool real = i / 16 * 8 + (lane >> 2) < SALA_GROUP;
            w.q[t][i / 16][i / 2 % 8][i % 2] = real ? q[i / 16 * 512 + i % 16 * 4] : 0;
        }
#pragma unroll
        for (int i = 0; i < SALA_SCORE_HALVES * 2; i++)
            w.max[t][i / 2][i % 2] = -1e30f, w.sum[t][i / 2][i % 2] = 0;
    }
    last += start;
    sala_scorer_run(&a, &w, 2, last, sala_tier_of(2, last + 1) / 64 + 1);
    sala_scorer_merge(&w);
    // Of tier 1 only what lies before the last token's window.
    sala_scorer_run(&a, &w, 1, last, max(last / MODEL.block - MODEL.local_blocks, 0) / 16 + 1);
}

// ---- 17. prefill: attention
// Running softmax of tiles of 16 rows. A row's maximum is a score that it met, at most 2^8 below the
// largest: it moves, and the sums with it, only when it must, which is rare; weights then reach 2^8,
// as exact in BF16 as those up to 1. Whether it moves is each row's own affair, so the bits are.

#define SALA_SLACK 8.0f
#define SALA_LOWEST -1e30f // a maximum before the first score: finite, so that no difference is NaN

typedef struct sala_running { // of rows lane / 4 and lane / 4 + 8
    float max[2], sum[2];     // the sum is of the lane's own columns
    float o[16][4];
} sala_running;

constexpr sala_running SALA_START = {{SALA_LOWEST, SALA_LOWEST}, {0, 0}, {{0}}};

// s = q k of the tiles first .. end - 1 of q, one after the other, and `keys` keys; all constants.
SALA_DEVICE void sala_running_scores(float s[2][8][4], const sala_act *q, const sala_act *k,
                                     int keys, int first, int end) {
    int lane = (int)threadIdx.x & 31;
#pragma unroll
    for (int i = first * 32; i < end * 32; i++) s[i / 32][i / 4 % 8][i % 4] = 0;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        int at = sala_vector_at(lane & 15, lane >> 4) ^ (step * 16);
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int t = first; t < end; t++) sala_ldmatrix4(a[t], q + t * (16 * 128) + at);
#pragma unroll
        for (int i = 0; i < keys / 8; i += 2) {
            sala_ldmatrix4(b, k + i * 8 * 128 + at);
            uint32_t low[2] = {b[0], b[2]}, high[2] = {b[1], b[3]};
#pragma unroll
            for (int t = first; t < end; t++) {
                sala_mma(s[t][i], a[t], low);
                sala_mma(s[t][i + 1], a[t], high);
            }
        }
    }
}

// Those of a tile to weights exp2(score - maximum).
SALA_DEVICE void sala_running_weights(sala_running *run, float (*s)[4], int keys) {
    float top[2] = {-SALA_INFINITY, -SALA_INFINITY}, shrink[2];
#pragma unroll
    for (int i = 0; i < keys / 2; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i / 4][i % 4]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        top[half] = sala_quad_max(top[half]) * SALA_SCORE_SCALE;
        if (top[half] <= run->max[half] + SALA_SLACK) top[half] = run->max[half];
    }
    if (__any_sync(0xFFFFFFFFu, top[0] != run->max[0] || top[1] != run->max[1])) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            shrink[half] = exp2f(run->max[half] - top[half]); // 1 where it stays
            run->max[half] = top[half];
            run->sum[half] *= shrink[half];
        }
#pragma unroll
        for (int i = 0; i < 64; i++) run->o[i / 4][i % 4] *= shrink[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < keys / 2; i++) {
        float *x = &s[i / 4][i % 4];
        *x = sala_exp2(fmaf(*x, SALA_SCORE_SCALE, -run->max[i / 2 % 2]));
        run->sum[i / 2 % 2] += *x;
    }
}

// o += p v of 16 keys, those of p[..][i] and p[..][i + 1]; `mask` lets some of their values through.
// Where they lie is one number that is turned, not eight that a loop would keep in registers.
SALA_DEVICE void sala_running_add(sala_running run[2], float p[2][8][4], int i,
                                  const sala_act *values, int first, int end,
                                  const uint32_t mask[2]) {
    const sala_act *shared = (const sala_act *)sala_shared();
    int lane = (int)threadIdx.x & 31;
    int at = (int)(values - shared) + sala_vector_at(lane & 15, lane >> 4);
    uint32_t w[2][4], v[4];
#pragma unroll
    for (int t = first; t < end; t++)
        for (int j = 0; j < 4; j++) { // with sala_pair, a register too many on sm_100
            const float *two = &p[t][i + j / 2][j % 2 * 2];
            w[t][j] = (uint32_t)sala_store(two[0]) | (uint32_t)sala_store(two[1]) << 16;
        }
#pragma unroll
    for (int n = 0; n < 16; n += 2) { // 16 dims
        sala_ldmatrix4_trans(v, shared + (at ^ (n * 8)));
        for (int j = 0; j < 4; j++) v[j] &= mask[j % 2];
#pragma unroll
        for (int t = first; t < end; t++) {
            sala_mma(run[t].o[n], w[t], v);
            sala_mma(run[t].o[n + 1], w[t], v + 2);
        }
    }
}

// Eight elements of a result, rounded, from element `at` of o on.
SALA_DEVICE void sala_prefill_result(const sala_attend_args *a, int64_t at, uint4 x) {
    if (a->gate) {
        uint4 gate = *(const uint4 *)(a->gate + at);
        x.x = sala_gate_pair(x.x, 0, false, 0, true, gate.x);
        x.y = sala_gate_pair(x.y, 0, false, 0, true, gate.y);
        x.z = sala_gate_pair(x.z, 0, false, 0, true, gate.z);
        x.w = sala_gate_pair(x.w, 0, false, 0, true, gate.w);
    }
    *(uint4 *)(a->o + at) = x;
}

// Dense rows. The rows of a K/V head are its tokens' query heads one after the other; a block takes
// 128 of them, a warp two tiles of 16, which share the keys and values that it reads.
#define SALA_DENSE_ROWS 128

typedef struct sala_dense_shared {
    sala_act kv[2][2][64 * 128]; // keys and values of a block of tokens, and of the next
    sala_act q[SALA_DENSE_ROWS * 128];
} sala_dense_shared;
static_assert(sizeof(sala_dense_shared) == 98304, "the host asks for this much");

typedef struct sala_dense { // what a block works on
    int head, first, all;   // K/V head, the block's first row, rows of the pass
    int start, last;        // position of the pass's first token, of the block's last
} sala_dense;

// Where the vector of a row lies in q, o and gate.
SALA_DEVICE int64_t sala_dense_at(const sala_dense *d, int row) {
    int64_t token = row / SALA_GROUP, head = d->head * SALA_GROUP + row % SALA_GROUP;
    return (token * MODEL.heads + head) * 128;
}

// Keys and values of a block of tokens, in the background; zeros behind the last token.
SALA_DEVICE void sala_dense_load(const sala_attend_args *a, const sala_dense *d, int block) {
    int row = (int)threadIdx.x >> 4, piece = (int)threadIdx.x & 15;
    sala_act(*kv)[64 * 128] = ((sala_dense_shared *)sala_shared())->kv[block & 1];
    int64_t page = a->rows->seqs[0].pages[block];
    int64_t from = (page * MODEL.kv_heads + d->head) * (64 * 128) + piece * 8;
#pragma unroll
    for (int i = row; i < 64; i += 8) {
        bool valid = i <= d->last - block * 64;
        sala_copy16_or_zero(kv[0] + sala_vector_at(i, piece), a->pages.k + from + i * 128, valid);
        sala_copy16_or_zero(kv[1] + sala_vector_at(i, piece), a->pages.v + from + i * 128, valid);
    }
    sala_copy_commit();
}

// Keys of a block that a row's token does not see.
SALA_DEVICE void sala_dense_mask(const sala_dense *d, float s[2][8][4], int block) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = d->first + warp * 32 + i * 8 + (lane >> 2);
        int seen = d->start + row / SALA_GROUP + 1 - block * 64 - 2 * (lane & 3);
#pragma unroll
        for (int k = 0; k < 16; k++)
            if (k / 2 * 8 + k % 2 >= seen) s[i / 2][k / 2][i % 2 * 2 + k % 2] = -SALA_INFINITY;
    }
}

// The next block of tokens for the warp's rows; q: their queries.
SALA_DEVICE void sala_dense_step(const sala_dense *d, sala_running run[2], const sala_act *q,
                                 int block) {
    sala_act(*kv)[64 * 128] = ((sala_dense_shared *)sala_shared())->kv[block & 1];
    const uint32_t all[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
    float s[2][8][4];
    sala_running_scores(s, q, kv[0], 64, 0, 2);
    if (block * 64 + 63 > d->start + d->first / SALA_GROUP) sala_dense_mask(d, s, block);
    sala_running_weights(&run[0], s[0], 64);
    sala_running_weights(&run[1], s[1], 64);
#pragma unroll
    for (int i = 0; i < 8; i += 2) sala_running_add(run, s, i, kv[1] + i * (8 * 128), 0, 2, all);
}

// The results of the warp's dense rows, through the place of its queries: 16 bytes a lane.
SALA_DEVICE void sala_dense_store(const sala_attend_args *a, const sala_dense *d,
                                  sala_running run[2], sala_act *kept) {
    int lane = (int)threadIdx.x & 31, piece = lane & 15,
        row = d->first + (int)threadIdx.x / 32 * 32;
    __syncwarp(); // the queries were read
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float inverse = 1.0f / sala_quad_sum(run[i / 2].sum[i % 2]);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float *o = run[i / 2].o[n] + i % 2 * 2;
            *(uint32_t *)(kept + sala_vector_at(i * 8 + (lane >> 2), n) + 2 * (lane & 3)) =
                sala_pair(o[0] * inverse, o[1] * inverse);
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane >> 4; i < 32 && row + i < d->all; i += 2)
        if (a->count[(row + i) / SALA_GROUP * MODEL.kv_heads + d->head] < 0)
            sala_prefill_result(a, sala_dense_at(d, row + i) + piece * 8,
                                *(const uint4 *)(kept + sala_vector_at(i, piece)));
}

// Causal attention of prefill rows without a list. A block takes SALA_DENSE_ROWS rows of a K/V head,
// the last rows first: theirs is the longest way. It reads 512 bytes a token up to its last one.
// Blocks of tokens stand at absolute positions; those ahead of a row, if finite, change nothing in it.
// Twin: sala__op_attend, whose P is FP32.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_prefill_dense(const __grid_constant__ sala_attend_args a) {
    sala_launch_next();
    sala_wait_grid();
    int unit = (int)(gridDim.x - 1 - blockIdx.x), warp = (int)threadIdx.x >> 5;
    sala_act *q = ((sala_dense_shared *)sala_shared())->q;
    sala_dense d;
    d.head = unit % MODEL.kv_heads;
    d.first = unit / MODEL.kv_heads * SALA_DENSE_ROWS;
    d.all = a.rows->count * SALA_GROUP;
    d.start = a.rows->position[0];
    d.last = d.start + (min(d.first + SALA_DENSE_ROWS, d.all) - 1) / SALA_GROUP;
    int own = min(d.first + (int)threadIdx.x, d.all - 1) / SALA_GROUP;
    if (!__syncthreads_or(a.count[own * MODEL.kv_heads + d.head] < 0)) return;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < SALA_DENSE_ROWS * 16; i += 128) // behind the last row: it
        sala_copy16(q + sala_vector_at(i / 16, i % 16),
                    a.q + sala_dense_at(&d, min(d.first + i / 16, d.all - 1)) + i % 16 * 8);
    sala_dense_load(&a, &d, 0);
    sala_running run[2] = {SALA_START, SALA_START};
#pragma unroll 1
    for (int block = 0; block <= d.last / 64; block++) {
        SALA_COPY_WAIT(0);
        __syncthreads();
        if (block < d.last / 64) sala_dense_load(&a, &d, block + 1);
        sala_dense_step(&d, run, q + warp * (32 * 128), block);
    }
    sala_dense_store(&a, &d, run, q + warp * (32 * 128));
}

// Rows with lists. The query heads of a K/V head are one tile of 16 rows; a block takes two tokens,
// whose lists have much in common, and each of four warps a quarter of every block that one of them
// lists: its own copies, maxima and sums, no barriers. What bounds it is reading the L2 cache.
#define SALA_SPARSE_END 0x7FFFFFFF // the block behind a list's last

typedef struct sala_sparse_shared {
    union {
        sala_act kv[2][2][16 * 128]; // keys, values of the block at hand and of the next
        float o[2][16 * 128];        // then each token's results
    } warp[4];
    sala_act q[2][16 * 128];
    float max[4][2][16], sum[4][2][16];
    int2 list[2][MODEL.top_k + 1]; // block, page
} sala_sparse_shared;
static_assert(sizeof(sala_sparse_shared) == 74752 + 16 * (MODEL.top_k + 1),
              "the host asks for this much");

typedef struct sala_sparse_walk { // through the blocks that either token lists
    int at[2];
    int block, page, takes; // takes: a bit for each token
} sala_sparse_walk;

// The lists of tokens first and first + 1, with pages. Returns whether there are any.
SALA_DEVICE bool sala_sparse_lists(const sala_attend_args *a, int first, int head,
                                   sala_sparse_shared *shared) {
    int t = (int)threadIdx.x >> 6, count = 0;
    int64_t list = (int64_t)(first + t) * MODEL.kv_heads + head;
    if (first + t < a->rows->count) count = max(a->count[list], 0);
#pragma unroll 1
    for (int i = (int)threadIdx.x & 63; i <= count; i += 64) {
        int block = i < count ? a->blocks[list * MODEL.top_k + i] : SALA_SPARSE_END;
        shared->list[t][i] = make_int2(block, i < count ? a->rows->seqs[0].pages[block] : 0);
    }
    return __syncthreads_or(count > 0);
}

SALA_DEVICE void sala_sparse_next(sala_sparse_walk *walk, const sala_sparse_shared *shared) {
    int2 x = shared->list[0][walk->at[0]], y = shared->list[1][walk->at[1]];
    walk->block = min(x.x, y.x);
    walk->page = x.x < y.x ? x.y : y.y;
    walk->takes = (x.x <= y.x) + 2 * (y.x <= x.x);
    if (walk->block == SALA_SPARSE_END) return; // and stay there
    walk->at[0] += walk->takes & 1;
    walk->at[1] += walk->takes >> 1;
}

// The queries of both tokens to shared memory, in the background. Rows beyond the group, or a token
// beyond the last, are the last once more.
SALA_DEVICE void sala_sparse_queries(const sala_attend_args *a, int first, int head,
                                     sala_sparse_shared *shared) {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 2 * 16 * 16; i += 128) {
        int64_t token = min(first + i / 256, a->rows->count - 1);
        int h = head * SALA_GROUP + min(i / 16 % 16, SALA_GROUP - 1);
        sala_copy16(shared->q[0] + sala_vector_at(i / 16, i % 16),
                    a->q + (token * MODEL.heads + h) * 128 + i % 16 * 8);
    }
}

// The warp's keys and values of a block, in the background.
SALA_DEVICE void sala_sparse_load(const sala_attend_args *a, int head, const sala_sparse_walk *walk,
                                  sala_act kv[2][16 * 128]) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int64_t at = ((int64_t)walk->page * MODEL.kv_heads + head) * (64 * 128) + warp * (16 * 128);
    if (walk->block == SALA_SPARSE_END) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int to = sala_vector_at(2 * i + (lane >> 4), lane & 15);
        sala_copy16(kv[0] + to, a->pages.k + at + i * 256 + lane * 8);
        sala_copy16(kv[1] + to, a->pages.v + at + i * 256 + lane * 8);
    }
    sala_copy_commit();
}

// The warp's 16 keys of a block for the tokens first .. end - 1, constants. One token alone sees the
// first `seen` of them: what lies in the others may be anything, even NaN, which a weight of 0 would
// not stop. Two see them all.
SALA_DEVICE void sala_sparse_step(sala_running run[2], const sala_act *q,
                                  const sala_act kv[2][16 * 128], int first, int end, int seen) {
    uint32_t mask[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
    float s[2][8][4];
    sala_running_scores(s, q, kv[0], 16, first, end);
    if (end - first == 1) {
        seen -= 2 * ((int)threadIdx.x & 3); // of the lane's keys 0, 1, 8, 9
        for (int i = 0; i < 8; i++)
            if (seen <= i / 4 * 8 + i % 2) s[first][i / 4][i % 4] = -SALA_INFINITY;
        for (int i = 0; i < 2; i++)
            mask[i] = seen > 8 * i + 1 ? 0xFFFFFFFFu : seen > 8 * i ? 0xFFFFu : 0;
    }
#pragma unroll
    for (int t = first; t < end; t++) sala_running_weights(&run[t], s[t], 16);
    sala_running_add(run, s, 0, kv[1], first, end, mask);
}

// The warp's results to shared memory. Rows lie so that no two of four meet in a bank.
SALA_DEVICE void sala_sparse_keep(sala_running *run, int t, sala_sparse_shared *shared) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, c = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = (lane >> 2) + 8 * half;
        float sum = sala_quad_sum(run->sum[half]);
        if (c == 0) shared->max[warp][t][h] = run->max[half], shared->sum[warp][t][h] = sum;
#pragma unroll
        for (int n = 0; n < 16; n++)
            *(float2 *)(shared->warp[warp].o[t] + h * 128 + ((n * 8 + 2 * c) ^ (h & 3) * 8)) =
                make_float2(run->o[n][2 * half], run->o[n][2 * half + 1]);
    }
}

// The results of the four warps to one, for the tokens that have a list.
SALA_DEVICE void sala_sparse_merge(const sala_attend_args *a, int first, int head,
                                   const sala_sparse_shared *shared) {
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 2 * SALA_GROUP * 16; i += 128) {
        int h = i / 16 % SALA_GROUP, t = i / 16 / SALA_GROUP, x = i % 16 * 8;
        if (shared->list[t][0].x == SALA_SPARSE_END) continue;
        float max = SALA_LOWEST, sum = 0, o[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int w = 0; w < 4; w++) max = fmaxf(max, shared->max[w][t][h]);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float scale = exp2f(shared->max[w][t][h] - max);
            const float *add = shared->warp[w].o[t] + h * 128 + (x ^ (h & 3) * 8);
            for (int j = 0; j < 8; j++) o[j] = fmaf(add[j], scale, o[j]);
            sum = fmaf(shared->sum[w][t][h], scale, sum);
        }
        for (int j = 0; j < 8; j++) o[j] *= 1.0f / sum;
        int64_t at = ((int64_t)(first + t) * MODEL.heads + head * SALA_GROUP + h) * 128 + x;
        sala_prefill_result(a, at,
                            make_uint4(sala_pair(o[0], o[1]), sala_pair(o[2], o[3]),
                                       sala_pair(o[4], o[5]), sala_pair(o[6], o[7])));
    }
}

// Attention of prefill rows that have a list. A block takes two tokens of a K/V head; it reads 32 KiB
// for each block of tokens that one of them lists. Twin: sala__op_attend, whose P is FP32.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_prefill_sparse(const __grid_constant__ sala_attend_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_sparse_shared *shared = (sala_sparse_shared *)sala_shared();
    int head = (int)blockIdx.x % MODEL.kv_heads, first = (int)blockIdx.x / MODEL.kv_heads * 2;
    int warp = (int)threadIdx.x >> 5;
    if (!sala_sparse_lists(&a, first, head, shared)) return;
    sala_act(*kv)[2][16 * 128] = shared->warp[warp].kv;
    int position = a.rows->position[0] + first - warp * 16;
    sala_sparse_walk walk = {{0, 0}, 0, 0, 0};
    sala_running run[2] = {SALA_START, SALA_START};
    sala_sparse_queries(&a, first, head, shared);
    sala_sparse_next(&walk, shared);
    sala_sparse_load(&a, head, &walk, kv[0]);
    SALA_COPY_WAIT(0);
    __syncthreads(); // of the queries
#pragma unroll 1
    for (int stage = 0; walk.block != SALA_SPARSE_END; stage ^= 1) {
        int seen = position + 1 - walk.block * 64, takes = walk.takes;
        SALA_COPY_WAIT(0);
        __syncwarp();
        sala_sparse_next(&walk, shared);
        sala_sparse_load(&a, head, &walk, kv[stage ^ 1]);
        if (takes == 3 && seen >= 16) {
            sala_sparse_step(run, shared->q[0], kv[stage], 0, 2, 16);
        } else {
            if (takes & 1) sala_sparse_step(run, shared->q[0], kv[stage], 0, 1, seen);
            if (takes & 2) sala_sparse_step(run, shared->q[0], kv[stage], 1, 2, seen + 1);
        }
    }
    __syncwarp();
    sala_sparse_keep(&run[0], 0, shared);
    sala_sparse_keep(&run[1], 1, shared);
    __syncthreads();
    sala_sparse_merge(&a, first, head, shared);
}

#endif
#if SALA_HAS(0)

// ---- 18. sample: from rows of logits to tokens (the steps are those of sala.h section [6])

// Rank of +infinity: NaN ranks above it, whatever its sign.
#define SALA_RANK_INFINITE 0xFF000001u

// The largest weight, 2^30, as bits of a float. Weights have 24 significant bits at most, so that
// a float holds them, and its bits rank them.
#define SALA_WEIGHT_MOST 0x4E800000u

#define SALA_ROW_WORDS ((int)sizeof(sala_sampling) / 4)

// What a selection orders the tokens by.
enum { SALA_BY_WEIGHT, SALA_BY_LOGIT, SALA_BY_ID };

typedef struct sala_sample_memory {    // of the block, in shared memory
    uint32_t number[SALA_SAMPLE_BINS]; // of tokens in each bin, the best bin first, and their
    uint32_t low[SALA_SAMPLE_BINS], high[SALA_SAMPLE_BINS]; // weight in two words
    uint64_t partial[32];                                   // of block-wide sums
    uint64_t need, found_weight;                            // see sala_histogram_find
    uint32_t count, found, found_number;
    int32_t before; // blocks that arrived before this one
    union {
        sala_sampling row;
        uint32_t row_words[SALA_ROW_WORDS];
    };
    const float *biases;         // 0: no token has one
    const int32_t *counts;       // 0: no penalties
    int32_t path[SALA_MAX_PATH]; // the tokens that row.ahead counts
} sala_sample_memory;
static_assert(sizeof(sala_sample_memory) <= SALA_SAMPLE_SHARED, "SALA_SAMPLE_SHARED is too small");

// A head of the ranking: the tokens whose weight, as bits of a float, is at least `least`, but of
// those of that very weight only the ones with a sala_sample_key of at most `last`.
typedef struct sala_head {
    const float *logits, *weights; // of the row
    int32_t vocab;
    uint32_t least;
    uint64_t last;
} sala_head;

SALA_DEVICE sala_sample_memory *sala_sample_shared(void) {
    return (sala_sample_memory *)sala_shared();
}

// Order of logits as order of integers: 0 for -infinity.
SALA_DEVICE uint32_t sala_rank(float x) {
    return (uint32_t)sala_float_order(x) - 0x807FFFFFu;
}

SALA_DEVICE float sala_unrank(uint32_t rank) {
    uint32_t order = rank + 0x807FFFFFu;
    return sala_bits_f32(order ^ (order >> 31 ? 0x7FFFFFFFu : 0));
}

// A logit after bias and penalties.
static __device__ __noinline__ float sala_logit(float x, int32_t token) {
    const sala_sample_memory *m = sala_sample_shared();
    float bias = m->biases ? m->biases[token] : sala_bits_f32(0x7F800000u);
    int32_t count = 0;
    if (m->counts) {
        count = m->counts[token];
#pragma unroll 1
        for (int i = 0; i < m->row.ahead; i++) count += m->path[i] == token ? 2 : 0;
    }
    return sala_adjust(x, bias, count, m->row.repetition, m->row.presence, m->row.frequency);
}

// A key of its own for each token: of two, the one with the larger logit has the smaller key, of
// equal ones the one with the lower id.
SALA_DEVICE uint64_t sala_sample_key(float x, int32_t token) {
    return (uint64_t)~sala_rank(x) << 32 | (uint32_t)token;
}

// The smallest of the block. All threads call it.
static __device__ __noinline__ uint64_t sala_block_least(uint64_t x) {
    uint64_t *partial = sala_sample_shared()->partial;
#pragma unroll 1
    for (int round = 0;; round++) {
#pragma unroll 1
        for (int step = 16; step > 0; step >>= 1) {
            uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
            x = other < x ? other : x;
        }
        if (round == 1) return x;
        __syncthreads(); // `partial` may still be read from the call before
        if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = x;
        __syncthreads();
        x = partial[threadIdx.x & 31];
    }
}

SALA_DEVICE uint64_t sala_warp_total(uint64_t x) {
#pragma unroll 1
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    return x;
}

typedef struct sala_sums {
    uint64_t before, total; // over the threads before this one, over all
} sala_sums;

// Sums of x over the block. All threads call it.
static __device__ __noinline__ sala_sums sala_block_sums(uint64_t x) {
    uint64_t *partial = sala_sample_shared()->partial, within = 0;
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
#pragma unroll 1
    for (int round = 0;; round++) {
        uint64_t before = 0;
#pragma unroll 1
        for (int step = 1; step < 32; step <<= 1) { // sums of twice as many lanes each time
            uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
            if (lane & step) before += other;
            x += other;
        }
        if (round == 1) return {within + __shfl_sync(0xFFFFFFFFu, before, warp), x};
        within = before;
        __syncthreads(); // `partial` may still be read from the call before
        if (lane == 0) partial[warp] = x;
        __syncthreads();
        x = partial[lane];
    }
}

// Four of a row's logits, of tokens first, first + 1024 ...
SALA_DEVICE float4 sala_sample_load(const float *logits, int32_t first, int32_t vocab) {
    const float none = -sala_bits_f32(0x7F800000u);
    const int32_t end = vocab - first;
    const float *x = logits + first;
    return {end > 0 ? x[0] : none, end > 1024 ? x[1024] : none, end > 2048 ? x[2048] : none,
            end > 3072 ? x[3072] : none};
}

// The smallest of their keys after bias and penalties; but a logit that is NaN or +infinity before
// them is the largest.
SALA_DEVICE uint64_t sala_sample_best(float4 x, float limit, int32_t first, int32_t vocab) {
    uint64_t best = ~(uint64_t)0;
#pragma unroll 1
    for (int i = 0; i < 4 && first < vocab; i++, first += 1024) {
        if (x.x < limit) x.x = sala_logit(x.x, first);
        uint64_t key = sala_sample_key(x.x, first);
        best = key < best ? key : best;
        x.x = x.y, x.y = x.z, x.z = x.w;
    }
    return best;
}

// Write the weights of all tokens, as floats: 0 if min-p drops the token. Below -22 exp is less
// than half a unit of weight. Returns this thread's sum. Two loads are in flight.
SALA_DEVICE uint64_t sala_sample_weigh(const float *logits, float limit, float largest,
                                       int32_t vocab, float *weights) {
    const sala_sampling *s = &sala_sample_shared()->row;
    const float temperature = s->temperature, floor = fmaxf(s->min_p_log, -22.0f);
    float x = 0, next = 0, after = 0;
    uint64_t sum = 0;
#pragma unroll 1
    for (int32_t t = (int32_t)threadIdx.x - 2 * 1024; t < vocab; t += 1024) {
        x = next;
        next = after;
        if (t + 2 * 1024 < vocab) after = logits[t + 2 * 1024];
        if (t < 0) continue;
        if (x < limit) x = sala_logit(x, t);
        float y = (x - largest) / temperature;
        int32_t weight = y >= floor ? sala_draw_weight(y) : 0;
        weights[t] = (float)weight;
        sum += (uint32_t)weight;
    }
    return sum;
}

// Enter each lane's token if it is a member; whole warps call it. Equal logits would queue up at
// one bin: a warp that agrees on the bin sends one lane.
SALA_DEVICE void sala_histogram_add(sala_sample_memory *m, bool member, uint32_t bin,
                                    uint32_t weight) {
    uint32_t entering = __ballot_sync(0xFFFFFFFFu, member);
    if (entering == 0) return;
    int leader = __ffs((int)entering) - 1;
    uint32_t first = __shfl_sync(0xFFFFFFFFu, bin, leader), number = 1;
    uint64_t sum = member ? weight : 0;
    if (__ballot_sync(0xFFFFFFFFu, member && bin == first) == entering) {
        sum = sala_warp_total(sum);
        number = (uint32_t)__popc(entering);
        entering = 1u << leader;
    }
    if (!(entering >> (threadIdx.x & 31) & 1)) return;
    uint32_t low = (uint32_t)sum, before = atomicAdd(&m->low[bin], low);
    uint32_t high = (uint32_t)(sum >> 32) + (before + low < low);
    if (high) atomicAdd(&m->high[bin], high);
    atomicAdd(&m->number[bin], number);
}

// The bin in which the ranking reaches `count` tokens or the weight `need`, whichever comes first,
// or the last. What lies before it is subtracted from both, in m. All threads call it.
SALA_DEVICE void sala_histogram_find(sala_sample_memory *m, uint32_t count, uint64_t need) {
    uint32_t number = m->number[threadIdx.x];
    uint64_t weight = (uint64_t)m->high[threadIdx.x] << 32 | m->low[threadIdx.x];
    uint64_t numbers = sala_block_sums(number).before, weights = sala_block_sums(weight).before;
    bool reached = numbers + number >= count || weights + weight >= need;
    if (numbers < count && weights < need && (reached || threadIdx.x == SALA_SAMPLE_BINS - 1)) {
        m->found = threadIdx.x; // true for one thread
        m->found_number = number;
        m->found_weight = weight;
        m->count = count - (uint32_t)numbers;
        m->need = need - weights;
    }
    __syncthreads();
}

// One round of a selection: the histogram of a head's tokens whose key begins as `prefix`, over the
// ten bits of the key from `shift` on.
SALA_DEVICE void sala_sample_round(sala_sample_memory *m, const sala_head *head, int by,
                                   uint64_t prefix, int shift) {
    const uint4 *from = (const uint4 *)head->weights;
    const int32_t end = sala_sample_stride(head->vocab) / 4, step = SALA_SAMPLE_BINS;
    int32_t at = (int32_t)threadIdx.x;
    m->number[at] = m->low[at] = m->high[at] = 0;
    __syncthreads();
    uint4 next = from[at < end ? at : 0];
#pragma unroll 1
    for (; (at & ~31) < end; at += step) { // whole warps
        uint4 v = next;
        next = from[at + step < end ? at + step : 0];
#pragma unroll 1
        for (int32_t token = at * 4; token < at * 4 + 4; token++) {
            bool member = token < head->vocab && v.x >= head->least;
            uint64_t key = (uint32_t)token;
            if (by == SALA_BY_WEIGHT) key = (uint64_t)(SALA_WEIGHT_MOST - v.x) << 2;
            if (member && v.x == head->least) {
                uint64_t own = sala_sample_key(sala_logit(head->logits[token], token), token);
                member = own <= head->last;
                if (by == SALA_BY_LOGIT) key = own;
            } else if (by == SALA_BY_LOGIT)
                member = false;
            __syncwarp();
            key = (key ^ prefix) >> shift;
            sala_histogram_add(m, member && key < SALA_SAMPLE_BINS, (uint32_t)key,
                               (uint32_t)__uint_as_float(v.x));
            v.x = v.y, v.y = v.z, v.z = v.w;
        }
    }
    __syncthreads();
}

// Find the token at which a head's tokens, smaller keys first, reach `count` tokens or the weight
// `need`, whichever comes first, by a radix selection. Returns its key; if they are ordered by
// weight, the least weight of what is not behind it, and m->found_number may share its place.
SALA_DEVICE uint64_t sala_sample_select(const sala_head *head, int by, uint32_t count,
                                        uint64_t need) {
    sala_sample_memory *m = sala_sample_shared();
    uint64_t prefix = 0;
#pragma unroll 1
    for (int shift = by == SALA_BY_LOGIT ? 60 : 20;; shift -= 10) {
        sala_sample_round(m, head, by, prefix, shift);
        sala_histogram_find(m, count, need);
        prefix |= (uint64_t)m->found << shift;
        if (shift == 0) return prefix;
        if (by == SALA_BY_WEIGHT && m->found_number <= 1) return prefix | ((1u << shift) - 1);
        count = m->count;
        need = m->need;
    }
}

// Draw one of a head's tokens, which have the weight `sum`, after the cuts of top-k and top-p
// (sala__sampler_cut): 0 top-k by weight, 1 those of its last weight by logit; 2, 3 top-p; 4 the
// draw. All threads call it.
SALA_DEVICE int32_t sala_sample_draw(sala_head head, uint64_t sum) {
    const uint64_t all = ~(uint64_t)0;
    sala_sample_memory *m = sala_sample_shared();
    uint64_t asked = all;
#pragma unroll 1
    for (int step = 0;; step++) {
        const int by = step == 4 ? SALA_BY_ID : step & 1 ? SALA_BY_LOGIT : SALA_BY_WEIGHT;
        uint32_t count = by == SALA_BY_LOGIT ? m->count : ~0u;
        uint64_t need = by == SALA_BY_LOGIT ? m->need : all;
        if (step == 0 && m->row.top_k > 0) count = (uint32_t)m->row.top_k;
        if (step == 2 && m->row.top_p < 1) need = sala_top_p_need(m->row.top_p, sum, sum);
        if (step == 4) need = sala_scale_random(m->row.random, sum) + 1;
        if (by == SALA_BY_WEIGHT) asked = need;
        if (count != ~0u || need != all) {
            uint64_t key = sala_sample_select(&head, by, count, need);
            if (by == SALA_BY_ID) return (int32_t)key;
            if (by == SALA_BY_LOGIT) head.last = key;
            uint32_t least = SALA_WEIGHT_MOST - ((uint32_t)key >> 2);
            if (by == SALA_BY_WEIGHT && least > head.least) head.least = least, head.last = all;
            sum = asked - m->need + m->found_weight;
            step += by == SALA_BY_WEIGHT && m->found_number <= 1;
        } else
            step++;
    }
}

// Note what changes the logits of row `r`: those below the returned number. All threads call it.
SALA_DEVICE float sala_sample_note(const sala_sample_args *a, int32_t r) {
    sala_sample_memory *m = sala_sample_shared();
    const sala_rows *rows = a->rows;
    int64_t table = (int64_t)m->row.slot * a->vocab;
    int32_t back = (int32_t)threadIdx.x;
    const float infinity = sala_bits_f32(0x7F800000u);
    m->biases = m->row.biased ? a->biases + table : nullptr; // the same by all threads
    m->counts = m->row.penalties ? a->counts + table : nullptr;
    if (m->row.penalties && back < m->row.ahead) {
        int32_t depth = rows->position[r] - rows->seqs[rows->seq[r]].stored;
        m->path[back] = rows->token[rows->path[r * SALA_MAX_PATH + depth - back]];
    }
    __syncthreads();
    return m->row.biased | m->row.penalties ? infinity : -infinity;
}

// Choose the token of each row. Grid: (blocks that share a row's SALA_SAMPLE_TILE tokens, rows);
// each finds the largest of its logits, the one of a row that arrives last goes on alone. With a
// temperature it reads the logits once more and writes weights, which each cut and the draw read
// two or three times. C twin: sala__sample.
extern "C" __global__ void __launch_bounds__(1024, 1)
    sala_sample(const __grid_constant__ sala_sample_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_sample_memory *m = sala_sample_shared();
    const int32_t r = (int32_t)blockIdx.y, vocab = a.vocab, thread = (int32_t)threadIdx.x;
    const int32_t blocks = (int32_t)gridDim.x, word = thread < SALA_ROW_WORDS ? thread : 0;
    const float *logits = a.logits + (int64_t)r * vocab;
    float *weights = a.weight + (int64_t)r * sala_sample_stride(vocab), limit = 0;
    uint64_t *found = (uint64_t *)weights, best = ~(uint64_t)0; // [blocks]
    m->row_words[word] = ((const uint32_t *)(a.sampling + r))[word];
    const bool exists = r < a.rows->count;
#pragma unroll 1
    for (int32_t tile = (int32_t)blockIdx.x; tile * SALA_SAMPLE_TILE < vocab; tile += blocks) {
        int32_t first = tile * SALA_SAMPLE_TILE + thread;
        float4 x = sala_sample_load(logits, first, vocab);
        if (tile < blocks) { // the first loads are on their way before the row is known
            __syncthreads();
            if (!exists || m->row.slot < 0) return;
            limit = sala_sample_note(&a, r);
        }
        uint64_t key = sala_sample_best(x, limit, first, vocab);
        best = key < best ? key : best;
    }
    best = sala_block_least(best);
    if (thread == 0) {
        found[blockIdx.x] = best;
        m->before = sala_arrive(&a.arrivals[r]);
    }
    __syncthreads();
    if (m->before < blocks - 1) return;
#pragma unroll 1
    for (int32_t i = thread; i < blocks; i += 1024) best = found[i] < best ? found[i] : best;
    best = sala_block_least(best);
    if (thread == 0) m->found_weight = best; // through memory, so that the compiler sees
    __syncthreads();                         // that no warp is divided
    best = m->found_weight;
    uint32_t rank = ~(uint32_t)(best >> 32);
    int32_t token = rank == 0 || rank >= SALA_RANK_INFINITE ? -1 : (int32_t)(uint32_t)best;
    const bool forced = token >= 0 && m->row.forced >= 0;
    if (forced) token = m->row.forced;
    if (token >= 0 && !forced && m->row.temperature > 0) {
        uint64_t sum = sala_sample_weigh(logits, limit, sala_unrank(rank), vocab, weights);
        const sala_head head = {logits, weights, vocab, 1, ~(uint64_t)0};
        token = sala_sample_draw(head, sala_block_sums(sum).total);
    }
    if (thread == 0) {
        a.arrivals[r] = 0;
        a.token[r] = token;
    }
}

// ---- 19. pack, fill: weights on their way into GPU memory

// One lane's share of a packed row tile and a run of 32 k (see sala_packed): k 8c .. 8c+7 of rows g
// (`low`) and g + 8 (`high`), of which one may belong to another call.
SALA_DEVICE void sala_store_packed(uint16_t *to, int32_t tile, int32_t run, int32_t lane,
                                   int32_t rows, uint4 low, uint4 high, bool has_low,
                                   bool has_high) {
    int64_t stage = (int64_t)(run >> 1) * ((rows + 63) >> 6) + (tile >> 2);
    uint4 *at = (uint4 *)(to + stage * 4096 + ((tile & 3) * 4 + (run & 1) * 2) * 256) + lane;
    if (has_low && has_high) {
        at[0] = make_uint4(low.x, high.x, low.y, high.y);
        at[32] = make_uint4(low.z, high.z, low.w, high.w);
        return;
    }
    uint32_t *word = (uint32_t *)at;
    if (has_low) word[0] = low.x, word[2] = low.y, word[128] = low.z, word[130] = low.w;
    if (has_high) word[1] = high.x, word[3] = high.y, word[129] = high.z, word[131] = high.w;
}

// An element of any format as BF16.
SALA_DEVICE uint16_t sala_load1(const void *from, int64_t index, int32_t format) {
    if (format == SALA_F32) return sala_f32_bf16(((const float *)from)[index]);
    uint16_t bits = ((const uint16_t *)from)[index];
    return format == SALA_F16 ? sala_f32_bf16(sala_f16_f32(bits)) : bits;
}

// Eight consecutive elements of any format as BF16; `index` is a multiple of 8.
SALA_DEVICE uint4 sala_load8(const void *from, int64_t index, int32_t format) {
    if (format == SALA_BF16) return sala_load_once((const uint16_t *)from + index);
    float x[8];
    if (format == SALA_F32) {
        uint4 a = sala_load_once((const float *)from + index);
        uint4 b = sala_load_once((const float *)from + index + 4);
        uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        for (int i = 0; i < 8; i++) x[i] = __uint_as_float(bits[i]);
    } else {
        uint4 a = sala_load_once((const uint16_t *)from + index);
        uint32_t pairs[4] = {a.x, a.y, a.z, a.w};
        for (int i = 0; i < 8; i++) x[i] = sala_f16_f32((uint16_t)(pairs[i / 2] >> i % 2 * 16));
    }
    return make_uint4(sala_pair(x[0], x[1]), sala_pair(x[2], x[3]), sala_pair(x[4], x[5]),
                      sala_pair(x[6], x[7]));
}

// Eight elements of a synthetic tensor from `element` on, a multiple of 4: two hashes.
SALA_DEVICE uint4 sala_fill8(const sala_fill_args *a, uint64_t element) {
    uint32_t pairs[4];
    for (int i = 0; i < 4; i++) {
        uint64_t hash = sala_synthetic_hash(a->seed, element + i / 2 * 4), of4 = i % 2 * 2;
        pairs[i] = (uint32_t)sala_synthetic(hash, of4, a->scale, a->offset) |
                   (uint32_t)sala_synthetic(hash, of4 + 1, a->scale, a->offset) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Which rows and k the threads of sala_pack and sala_fill take: a warp a row tile and a run of 32
// k, the runs of a tile one after the other. In a pair a call has eight rows of a tile.
typedef struct sala_packed_place {
    int32_t tile, run, lane, k; // k: the first of eight
    int32_t row[2];             // low, high; the same row twice in a pair
    bool mine[2];               // low, high: whether it belongs to this matrix
} sala_packed_place;

SALA_DEVICE sala_packed_place sala_place(int32_t first_tile, int32_t columns, int32_t pair) {
    sala_packed_place p;
    int32_t warp = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)), runs = columns / 32;
    p.tile = first_tile + warp / runs;
    p.run = warp % runs;
    p.lane = (int)threadIdx.x & 31;
    p.k = p.run * 32 + (p.lane & 3) * 8;
    p.row[0] = p.tile * (pair ? 8 : 16) + (p.lane >> 2);
    p.row[1] = p.row[0] + (pair ? 0 : 8);
    p.mine[0] = pair != 2;
    p.mine[1] = pair != 1;
    return p;
}

// Rows of a matrix as in the file -> BF16, still row-major: eight elements a thread.
SALA_DEVICE void sala_pack_rows(const sala_pack_args *a) {
    int64_t count = (int64_t)a->rows * a->k, before = (int64_t)a->first * a->k;
    int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (first + 8 <= count && before % 8 == 0) {
        *(uint4 *)(a->to + before + first) = sala_load8(a->from, first, a->format);
        return;
    }
    for (int64_t i = first; i < first + 8 && i < count; i++)
        a->to[before + i] = sala_load1(a->from, i, a->format);
}

// Rows of a matrix as in the file -> packed BF16. A thread: eight k of two rows, 32 bytes written.
// Grid: row tiles that the rows touch * k / 32 warps; rows * k / 8 threads when not packed.
// C twin: sala_packed.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_pack(const __grid_constant__ sala_pack_args a) {
    sala_launch_next();
    sala_wait_grid();
    if (a.pair < 0) {
        sala_pack_rows(&a);
        return;
    }
    int32_t end = a.first + a.rows;
    int32_t padded = end == a.n ? sala_round_up(a.n, SALA_GEMM_ROWS / (a.pair ? 2 : 1)) : end;
    sala_packed_place p = sala_place(a.first / (a.pair ? 8 : 16), a.k, a.pair);
    uint4 value[2];
    for (int i = 0; i < 2; i++) {
        value[i] = make_uint4(0, 0, 0, 0);
        p.mine[i] = p.mine[i] && p.row[i] >= a.first && p.row[i] < padded;
        if (p.mine[i] && p.row[i] < end)
            value[i] = sala_load8(a.from, (int64_t)(p.row[i] - a.first) * a.k + p.k, a.format);
    }
    sala_store_packed(a.to, p.tile, p.run, p.lane, a.pair > 0 ? 2 * a.n : a.n, value[0], value[1],
                      p.mine[0], p.mine[1]);
}

// Synthetic weights, row-major: eight elements a thread.
SALA_DEVICE void sala_fill_rows(const sala_fill_args *a) {
    int64_t count = (int64_t)a->n * a->k;
    int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (first >= count) return;
    uint4 value = sala_fill8(a, (uint64_t)first);
    if (first + 8 <= count) {
        *(uint4 *)(a->to + first) = value;
        return;
    }
    uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 7; i++)
        if (first + i < count) a->to[first + i] = (uint16_t)(pairs[i / 2] >> i % 2 * 16);
}

// Synthetic weights in any layout; writes as pack does. Grid: n * k / 8 threads (row-major), else
// row tiles * k / 32 warps. C twin: sala__synthetic_fill.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_fill(const __grid_constant__ sala_fill_args a) {
    sala_launch_next();
    sala_wait_grid();
    if (a.layout == 0) {
        sala_fill_rows(&a);
        return;
    }
    int32_t pair = a.layout - 1, padded = sala_round_up(a.n, SALA_GEMM_ROWS / (pair ? 2 : 1));
    sala_packed_place p = sala_place(0, a.k, pair);
    uint4 value[2];
    for (int i = 0; i < 2; i++) {
        value[i] = make_uint4(0, 0, 0, 0);
        p.mine[i] = p.mine[i] && p.row[i] < padded;
        if (p.mine[i] && p.row[i] < a.n)
            value[i] = sala_fill8(&a, (uint64_t)p.row[i] * (uint64_t)a.k + (uint64_t)p.k);
    }
    sala_store_packed(a.to, p.tile, p.run, p.lane, pair ? 2 * a.n : a.n, value[0], value[1],
                      p.mine[0], p.mine[1]);
}

// A long read, for the benchmark's yardstick: 16 bytes a thread, eight loads in flight. Grid: 16
// blocks a multiprocessor.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_read(const __grid_constant__ sala_read_args a) {
    sala_launch_next();
    sala_wait_grid();
    const uint4 *from = (const uint4 *)a.from;
    int64_t count = a.bytes / 16, stride = (int64_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; u++)
            v[u] = i + u * stride < count ? sala_load_once(from + i + u * stride)
                                          : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < 8; u++) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345678u) *a.out = sum; // so that nothing is optimised away
}

#endif
#if SALA_HAS(3)

// ---- 20. four bits: pack, fill, unpack, quantize

// What a warp of sala_pack4 and sala_fill4 takes: 16 rows of the matrix (of a pair: eight of its own)
// and 64 k; a lane the codes of k 8c .. 8c+7 of both runs of 32, in rows g and g + 8.
typedef struct sala_row4 {
    uint32_t codes[2];    // of the two runs, as in a file
    uint32_t scale, bias; // see sala_scale_word; lanes with c = 0 store them
} sala_row4;

SALA_DEVICE uint32_t sala_bias4(uint32_t zero) { // BF16 of -(128 + zero)
    return 0xC300u | zero;
}

SALA_DEVICE sala_row4 sala_pad4(int32_t format, int32_t group) { // 64 numbers 0
    sala_row4 r = {{0, 0}, 0, 0};
    if (format != SALA_INT4) return r;
    r.codes[0] = r.codes[1] = 0x88888888u;
    r.scale = group > 32 ? sala_bias4(8) << 16 : 0;
    r.bias = sala_bias4(8) * 0x10001u;
    return r;
}

// 64 k from k on of the call's row `row`.
SALA_DEVICE sala_row4 sala_load_row4(const sala_pack4_args *a, int32_t row, int32_t k) {
    sala_row4 r = {};
    const uint8_t *codes = a->codes + ((int64_t)row * a->k + k) / 2 + (threadIdx.x & 3) * 4;
    int64_t group = (int64_t)row * (a->k / a->group) + k / a->group;
    r.codes[0] = *(const uint32_t *)codes;
    r.codes[1] = *(const uint32_t *)(codes + 16);
    if (a->format == SALA_NVFP4) {
        r.scale = *(const uint32_t *)((const uint8_t *)a->scales + group);
        return r;
    }
    const uint16_t *scales = (const uint16_t *)a->scales + group;
    uint32_t first = sala_bias4(a->zeros ? a->zeros[group] : 8), second = first;
    if (a->group == 32 && a->zeros) second = sala_bias4(a->zeros[group + 1]);
    r.scale = scales[0] | (a->group == 32 ? (uint32_t)scales[1] : first) << 16;
    r.bias = first | second << 16;
    return r;
}

SALA_DEVICE sala_row4 sala_fill_row4(const sala_fill4_args *a, int32_t row, int32_t k) {
    sala_row4 r = {};
    uint64_t element = (uint64_t)row * (uint64_t)a->k + (uint64_t)k;
    int32_t c = (int)threadIdx.x & 3, stride = a->format == SALA_NVFP4 ? 16 : 32;
    for (int run = 0; run < 2; run++)
        r.codes[run] = (uint32_t)(sala_synthetic_codes(a->seed, element + run * 32 + (c >> 1) * 16,
                                                       a->format) >>
                                  (c & 1) * 32);
    if (c) return r;
    if (a->group > 32) {
        element -= (uint64_t)(k % a->group);
        r.scale = sala_synthetic_scale(a->seed, element, a->format) | sala_bias4(8) << 16;
        return r;
    }
    for (int i = 0; i < 64 / stride; i++)
        r.scale |= (uint32_t)sala_synthetic_scale(a->seed, element + i * stride, a->format)
                   << i * (stride / 2);
    return r;
}

SALA_DEVICE void sala_store_row4(int32_t format, uint8_t *block, int32_t bytes, int32_t row,
                                 sala_row4 r) {
    int32_t c = (int)threadIdx.x & 3, order = sala_code_order(format, SALA_MAJOR);
    uint32_t *codes = (uint32_t *)(block + sala_packed4(row & 63, c * 8, 64, 0));
    codes[0] = sala_nibbles_in(order, r.codes[0]);
    codes[2] = sala_nibbles_in(order, r.codes[1]);
    if (c) return;
    uint32_t *scale = (uint32_t *)(block + sala_scale_word(row & 63));
    scale[0] = r.scale;
    if (bytes == SALA_BLOCK4_BIAS) scale[64] = r.bias;
}

// The rows of one warp. `pack` or `fill`, the other is NULL.
SALA_DEVICE void sala_place4(const sala_pack4_args *pack, const sala_fill4_args *fill, uint8_t *to,
                             int32_t first, int32_t rows, int32_t n, int32_t k, int32_t pair,
                             int32_t format, int32_t group, int32_t bytes) {
    int32_t warp = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)), stages = k >> 6;
    int32_t stage = warp % stages, end = first + rows, each = pair ? 8 : 16;
    int32_t padded = end == n ? sala_round_up(n, SALA_GEMM_ROWS / (pair ? 2 : 1)) : end;
    int32_t tiles = sala_round_up(pair ? 2 * n : n, SALA_GEMM_ROWS) / SALA_GEMM_ROWS;
    for (int half = 0; half < (pair ? 1 : 2); half++) {
        int32_t row = first + warp / stages * each + half * 8 + (((int)threadIdx.x & 31) >> 2);
        int32_t there = pair ? sala_packed_pair(row, pair - 1) : row;
        if (row >= padded) continue;
        sala_row4 r = row >= end ? sala_pad4(format, group)
                      : pack     ? sala_load_row4(pack, row - first, stage * 64)
                                 : sala_fill_row4(fill, row, stage * 64);
        sala_store_row4(format, to + ((int64_t)stage * tiles + (there >> 6)) * bytes, bytes, there,
                        r);
    }
}

// Rows of a 4-bit matrix as in the file -> blocks of sala_packed4. Grid: row tiles of 16 (of a pair:
// eight rows) * k / 64 warps. Reads and writes n * k / 2 bytes and scales. C twin: sala_packed4.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_pack4(const __grid_constant__ sala_pack4_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_place4(&a, nullptr, a.to, a.first, a.rows, a.n, a.k, a.pair, a.format, a.group, a.block);
}

// Synthetic 4-bit weights, placed as pack4 does. Grid: the same. Writes n * k / 2 bytes and scales.
// C twin: sala__synthetic_fill4.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_fill4(const __grid_constant__ sala_fill4_args a) {
    sala_launch_next();
    sala_wait_grid();
    sala_place4(nullptr, &a, a.to, 0, a.n, a.n, a.k, a.pair, a.format, a.group, a.block);
}

// Eight codes of a word as pairs of BF16 (see sala_code_bits), k 0 and 1, 2 and 3 ...: NVFP4's times
// 2^-126, INT4's plus 128.
SALA_DEVICE void sala_spread4(int32_t format, uint32_t word, uint32_t pair[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (format == SALA_INT4) {
            pair[i] = (word >> 4 * i & 0x000F000Fu) | 0x43004300u;
        } else if (sala_code_order(format, SALA_MAJOR) == SALA_NATIVE) {
            uint32_t two = (word >> i * 8 & 0xFu) | (word >> i * 8 & 0xF0u) << 12;
            pair[i] = (two & 0x00080008u) << 12 | (two & 0x00070007u) << 6;
        } else {
            pair[i] = i < 3 ? word << 3 * i & SALA_E2M1_PAIR : sala_spread_last(word);
        }
    }
}

// Eight numbers as pairs of BF16, exactly, from their codes and the scale (and bias) of both halves.
// A product is exact or rounded once; adding -0 keeps the sign of a zero.
SALA_DEVICE void sala_widen4(int32_t format, uint32_t word, uint32_t scale, uint32_t bias,
                             uint32_t out[4]) {
    sala_spread4(format, word, out);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t by = format == SALA_NVFP4 ? 0x7E807E80u : 0x3F803F80u; // 2^126, 1
        out[i] = sala_fma2(out[i], by, format == SALA_NVFP4 ? 0x80008000u : bias);
        out[i] = sala_fma2(out[i], scale, 0x80008000u);
    }
}

// The scale (twice) and bias of a lane's eight k in a run of 32, from the words of its row.
SALA_DEVICE void sala_scales4(const sala_unpack4_args *a, uint32_t word, uint32_t biases, int run,
                              uint32_t *scale, uint32_t *bias) {
    if (a->format == SALA_NVFP4) { // E4M3 read as BF16 is 2^-120 of it
        uint32_t byte = word >> (run * 16 + ((int)threadIdx.x & 2) * 4) & 0xFFu;
        *scale = sala_fma2(byte * 0x100010u, 0x7B807B80u, 0x80008000u);
        *bias = 0;
        return;
    }
    bool large = a->group > 32;
    *scale = (word >> (large ? 0 : run * 16) & 0xFFFFu) * 0x10001u;
    *bias = ((large ? word >> 16 : biases >> run * 16) & 0xFFFFu) * 0x10001u;
}

// Blocks of sala_packed4 -> packed BF16 without alpha, for a prefill's product. A warp: a block of 64
// rows x 64 k. Grid: all blocks / 8. Reads 0.56 bytes a weight, writes 2. C twin: sala__load_weight4.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_unpack4(const __grid_constant__ sala_unpack4_args a) {
    sala_launch_next();
    sala_wait_grid();
    int64_t blocks = (int64_t)((a.n + 63) >> 6) * (a.k >> 6);
    int64_t at = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = (int)threadIdx.x & 31;
    if (at >= blocks) return;
    const uint8_t *from = a.from + at * a.block;
    uint4 *to = (uint4 *)(a.to + at * 4096) + lane;
    uint4 codes[4];
    uint2 scale[4], bias[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint2 *words = (const uint2 *)(from + sala_scale_word(i * 16 + (lane >> 2)));
        codes[i] = sala_load_once(from + i * 512 + lane * 16);
        scale[i] = words[0];
        bias[i] = a.block == SALA_BLOCK4_BIAS ? words[32] : make_uint2(0xC308C308u, 0xC308C308u);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int run = i & 1;
        const uint4 v = codes[i / 2];
        const uint2 s = scale[i / 2], b = bias[i / 2];
        uint32_t low[4], high[4], times, plus;
        sala_scales4(&a, s.x, b.x, run, &times, &plus);
        sala_widen4(a.format, run ? v.z : v.x, times, plus, low);
        sala_scales4(&a, s.y, b.y, run, &times, &plus);
        sala_widen4(a.format, run ? v.w : v.y, times, plus, high);
        to[i * 64] = make_uint4(low[0], high[0], low[1], high[1]);
        to[i * 64 + 32] = make_uint4(low[2], high[2], low[3], high[3]);
    }
}

#endif
#if SALA_HAS(3) || SALA_HAS(6)

// The largest BF16 magnitude of eight, as bits; that of an infinity or NaN is larger than all others.
SALA_DEVICE uint32_t sala_fp4_most(const uint32_t pair[4]) {
    uint32_t most = 0;
    for (int i = 0; i < 4; i++) most = max(most, max(pair[i] & 0x7FFFu, pair[i] >> 16 & 0x7FFFu));
    return most;
}

// Write half of a group: the eight of row `row` from k on, of which this lane has the lower or upper
// half and its neighbour (lane ^ 1) the other. All lanes of the warp call it. Twin: sala__quantize16.
SALA_DEVICE void sala_fp4_put(const sala_quant *q, const uint32_t pair[4], bool exists, int row,
                              int k, int width) {
    uint32_t most = sala_fp4_most(pair), word = 0;
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    uint8_t scale = sala_quant_scale(most, q->scale);
    float factor = sala_quant_factor(scale, q->scale);
    if (!exists) return;
    for (int i = 0; i < 4; i++)
        word |= (uint32_t)sala_f32_e2m1(sala_low(pair[i]) * factor) << (8 * i) |
                (uint32_t)sala_f32_e2m1(sala_high(pair[i]) * factor) << (8 * i + 4);
    word = sala_nibbles_in(sala_code_order(SALA_NVFP4, SALA_MAJOR), word);
    *(uint32_t *)(q->codes + ((int64_t)row * width + k) / 2) = factor == 0 ? 0 : word;
    if ((k & 8) == 0) q->scales[sala_quant_place(q, row, k)] = scale;
}

#endif
#if SALA_HAS(3)

// Rows of x in NVFP4. Grid: (rows, shares of 2048 columns); a thread takes eight columns. Reads two
// bytes an element and writes 0.5625. Twin: sala__op_quantize.
extern "C" __global__ void __launch_bounds__(256, 4)
    sala_quantize(const __grid_constant__ sala_quantize_args a) {
    sala_launch_next();
    sala_wait_grid();
    int row = (int)blockIdx.x, k = 2048 * (int)blockIdx.y + 8 * (int)threadIdx.x;
    bool exists = k < a.width;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (exists) v = *(const uint4 *)(a.x + (int64_t)row * a.width + k);
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
    sala_fp4_put(&a.quant, pair, exists, row, k, a.width);
}

#endif
#if SALA_HAS(6)

// ---- 21. prefill: products in 4 bits on both sides
// As section 14, with weights and x in NVFP4: a stage of 64 k is one FP4 MMA deep. Every result is
// the chain acc = fl(acc + p), p the exact sum of 16 products of codes and scales, in k order; where
// there are no FP4 tensor cores, BF16 ones give p: codes times scales are exact BF16 numbers.

// The copies of one thread.
typedef struct sala_fp4_feed {
    int left, slot;             // stages that are still to be copied; where the next one goes
    int pieces, rows;           // 16 bytes of a stage's weights and rows of x, from the first on
    bool scales;                // the thread has scales of x to copy
    int64_t stride_w, stride_s; // bytes to the next stage
    const unsigned char *w, *x, *s; // the first 16 bytes of each, s: of the scales of x
} sala_fp4_feed;

SALA_DEVICE sala_fp4_feed sala_fp4_begin(const sala_product_args *a, const sala_prefill_tile *at,
                                         int wide) {
    sala_fp4_feed feed;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, thread = (int)threadIdx.x;
    int k = a->gemm.w[0].k, tiles = ((a->gemm.w[at->weight].n << pair) + 63) >> 6;
    int room = a->gemm.qx.rows, token = at->token + (SALA_PREFILL_THREADS - 1 - thread) * 4;
    feed.left = k >> 6;
    feed.slot = 0;
    feed.pieces = (tiles - (at->row >> 6)) * (SALA_BLOCK4 / 16) - thread;
    feed.rows = a->gemm.rows - at->token - (thread >> 1);
    feed.scales = token < room && token < at->token + wide * 16;
    feed.stride_w = (int64_t)tiles * SALA_BLOCK4;
    feed.stride_s = (int64_t)room * 4;
    feed.w = (const unsigned char *)a->gemm.w[at->weight].data +
             (int64_t)(at->row >> 6) * SALA_BLOCK4 + thread * 16;
    feed.x = a->gemm.qx.codes + (int64_t)(at->token + (thread >> 1)) * (k >> 1) + (thread & 1) * 16;
    feed.s = a->gemm.qx.scales + (int64_t)token * 4;
    return feed;
}

SALA_DEVICE int sala_fp4_turn(int tall, int wide, int slot) {
    slot += SALA_FP4_STAGE(tall, wide);
    return slot == SALA_FP4_STAGES * SALA_FP4_STAGE(tall, wide) ? 0 : slot;
}

// Copy a stage and turn to the next one. Of x all first halves come before all second halves, in which
// fours of rows change places: so the copies of a quarter of a warp meet all 32 banks, as ldmatrix
// does. The last threads copy scales, as they have fewer weights.
SALA_DEVICE void sala_fp4_copy(const sala_product_args *a, int tall, int wide,
                               sala_fp4_feed *feed) {
    int thread = (int)threadIdx.x, row = thread >> 1, half = thread & 1;
    unsigned char *to = sala_shared() + feed->slot, *to_x = to + tall * (SALA_BLOCK4 / 2);
    int pieces = feed->left > 0 ? feed->pieces : 0, rows = feed->left > 0 ? feed->rows : 0;
#pragma unroll
    for (int i = 0; i < tall * (SALA_BLOCK4 / 32); i += SALA_PREFILL_THREADS)
        if (i + thread < tall * (SALA_BLOCK4 / 32) && i < pieces)
            sala_copy16(to + (i + thread) * 16, feed->w + i * 16);
#pragma unroll
    for (int i = 0; i < wide * 16; i += SALA_PREFILL_THREADS / 2)
        if (i + row < wide * 16 && i < rows)
            sala_copy16(to_x + half * wide * 256 + ((i + row) ^ half * 4) * 16,
                        feed->x + (int64_t)i * (a->gemm.w[0].k >> 1));
    if (feed->scales && feed->left > 0)
        sala_copy16(to_x + wide * 512 + (SALA_PREFILL_THREADS - 1 - thread) * 16, feed->s);
    sala_copy_commit();
    feed->left--;
    feed->w += feed->stride_w;
    feed->x += 32;
    feed->s += feed->stride_s;
    feed->slot = sala_fp4_turn(tall, wide, feed->slot);
}

// What a warp multiplies: its sums, and where in a stage the lane's first words lie: codes and scales of
// its tiles of 16 weight rows (of row g, then of row g + 8), and of 8 rows of x.
typedef struct sala_fp4_warp {
    const unsigned char *w[4], *w_scales[4], *x, *x_scales;
    float sum[4][8][4];
} sala_fp4_warp;

SALA_DEVICE void sala_fp4_stage(int tall, int wide, int slot, sala_fp4_warp *m) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const unsigned char *w = sala_shared() + slot;
    m->x = w + tall * (SALA_BLOCK4 / 2);
    m->x_scales = m->x + wide * 512 + ((warp >> 1) * wide * 8 + (lane >> 2)) * 4;
#pragma unroll
    for (int i = 0; i < tall; i++) {
        int tile = (warp & 1) * tall + i;
        m->w[i] = w + (tile >> 2) * SALA_BLOCK4 + (tile & 3) * 512 + lane * 16;
        m->w_scales[i] =
            w + (tile >> 2) * SALA_BLOCK4 + sala_scale_word((tile & 3) * 16 + (lane >> 2));
    }
}

#if SALA_FP4

SALA_DEVICE void sala_fp4_multiply(int tall, int wide, sala_fp4_warp *m) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, half = lane >> 3 & 1;
    int first = (warp >> 1) * wide * 8 + (lane >> 4) * 8 + (lane & 7);
    uint32_t x[4][4], x_scales[8];
#pragma unroll
    for (int j = 0; j < wide; j++) x_scales[j] = *(const uint32_t *)(m->x_scales + j * 32);
#pragma unroll
    for (int j = 0; j < wide / 2; j++) // two tiles, both halves
        sala_ldmatrix4(x[j], m->x + half * wide * 256 + ((first + j * 16) ^ half * 4) * 16);
#pragma unroll
    for (int i = 0; i < tall; i++) {
        uint4 v = *(const uint4 *)m->w[i];
        const uint32_t a[4] = {v.x, v.y, v.z, v.w};
        uint32_t scale = *(const uint32_t *)(m->w_scales[i] + (lane & 1) * 4);
#pragma unroll
        for (int j = 0; j < wide; j++)
            sala_fp4_mma(m->sum[i][j], a, x[j >> 1] + (j & 1) * 2, scale, x_scales[j]);
    }
}

#else

// Lanes c < 2 of a quad have a word of one group of 16 k, the others of the next one, but an MMA wants
// four codes of a group in every lane. So they change halves of their words, in spread order: of the two
// groups each lane gets a word with codes in the first two places. Those of the last two come there
// from 6 and (see sala_spread_last) from elsewhere.
SALA_DEVICE void sala_fp4_mix(uint32_t word, uint32_t both[2]) {
    bool first = (threadIdx.x & 2) == 0;
    if (sala_code_order(SALA_NVFP4, SALA_MAJOR) == SALA_NATIVE)
        word = sala_nibbles_in(SALA_SPREAD, word);
    uint32_t back = (word << 6 & SALA_E2M1_PAIR) | sala_spread_last(word) >> 3;
    uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, first ? back : word, 2);
    both[0] = first ? word : other;
    both[1] = first ? other : back;
}

// 2^118 times a scale, twice: 2^-120 as it lies in a BF16, subnormals included, and on to 2^7 and 2^118.
// NaN stays NaN.
SALA_DEVICE uint32_t sala_fp4_scale(const unsigned char *scale) {
    uint32_t wide = sala_fma2(sala_fma2(*scale * 0x00100010u, 0x7F007F00u, 0x80008000u),
                              0x77007700u, 0x80008000u);
    return *scale == 0x7F ? 0x7FFF7FFFu : wide;
}

// The two codes of the first or second place times their scale and 2^-8: an E2M1 code in the bits of a
// BF16 is 2^-126 times its value, and the product has six bits.
SALA_DEVICE uint32_t sala_fp4_widen(uint32_t word, int place, uint32_t scale) {
    return sala_fma2(word << 3 * place & SALA_E2M1_PAIR, scale, 0x80008000u);
}

// One group: an MMA from zero gives its exact sums, times 2^-16.
SALA_DEVICE void sala_fp4_group(int tall, int wide, int group, const uint32_t w[4][2][2],
                                const uint32_t x[8][2], sala_fp4_warp *m) {
    uint32_t b[8][2];
#pragma unroll
    for (int j = 0; j < wide; j++) {
        uint32_t scale = sala_fp4_scale(m->x_scales + j * 32 + group);
        for (int i = 0; i < 2; i++) b[j][i] = sala_fp4_widen(x[j][0], i, scale);
    }
#pragma unroll
    for (int i = 0; i < tall; i++) {
        uint32_t a[4], scale[2] = {sala_fp4_scale(m->w_scales[i] + group),
                                   sala_fp4_scale(m->w_scales[i] + 4 + group)};
        for (int e = 0; e < 4; e++) a[e] = sala_fp4_widen(w[i][e & 1][0], e / 2, scale[e & 1]);
#pragma unroll
        for (int j = 0; j < wide; j++) {
            float part[4] = {0, 0, 0, 0};
            sala_mma(part, a, b[j]);
            for (int e = 0; e < 4; e++) m->sum[i][j][e] = fmaf(part[e], 65536.0f, m->sum[i][j][e]);
        }
    }
}

SALA_DEVICE void sala_fp4_multiply(int tall, int wide, sala_fp4_warp *m) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int first = (warp >> 1) * wide * 8 + (lane >> 2);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        uint32_t w[4][2][2], x[8][2];
        const unsigned char *from = m->x + half * wide * 256 + (first ^ half * 4) * 16;
#pragma unroll
        for (int i = 0; i < tall; i++) {
            uint2 v = *(const uint2 *)(m->w[i] + half * 8);
            sala_fp4_mix(v.x, w[i][0]);
            sala_fp4_mix(v.y, w[i][1]);
        }
#pragma unroll
        for (int j = 0; j < wide; j++)
            sala_fp4_mix(*(const uint32_t *)(from + j * 128 + (lane & 3) * 4), x[j]);
#pragma unroll 1
        for (int group = 0; group < 2;
             group++) { // the second group's come to the first one's place
            sala_fp4_group(tall, wide, 2 * half + group, w, x, m);
#pragma unroll
            for (int i = 0; i < 2 * tall; i++) w[i / 2][i % 2][0] = w[i / 2][i % 2][1];
#pragma unroll
            for (int j = 0; j < wide; j++) x[j][0] = x[j][1];
        }
    }
}

#endif

// Results times alpha and the scale of x, rounded, into shared memory of the warp's own; see
// sala_prefill_store.
SALA_DEVICE void sala_fp4_pass(const sala_product_args *a, const sala_prefill_tile *at, int tall,
                               int wide, const sala_fp4_warp *m, unsigned char *own) {
    int lane = (int)threadIdx.x & 31;
    float factor = 0;
#pragma unroll
    for (int i = 0; i < 2 * tall * wide; i++) {
        const float *d = &m->sum[i / wide / 2][i % wide][i / wide % 2 * 2];
        int turned = ((lane >> 2) + i / wide * 2) & 7;
        if (i % wide == 0) factor = sala_prefill_alpha(a, at, tall, i / wide) * a->gemm.qx.scale;
        *(uint32_t *)(own + i * 128 + turned * 16 + (lane & 3) * 4) =
            sala_pair(d[0] * factor, d[1] * factor);
    }
}

// As sala_prefill_store; with gate and up, y may be wanted quantised.
SALA_DEVICE void sala_fp4_store(const sala_product_args *a, const sala_prefill_tile *at, int tall,
                                int wide, const sala_fp4_warp *m) {
    int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    int pair = a->kind == SALA_PRODUCT_SWIGLU, add = a->kind == SALA_PRODUCT_NORM;
    int rounds = pair ? wide : tall * wide / 2, row = (lane >> 3) * 2 + (lane & 1);
    int n = a->gemm.w[at->weight].n;
    unsigned char *own = sala_shared() + warp * tall * wide * 256;
    __syncthreads();
    sala_fp4_pass(a, at, tall, wide, m, own);
#pragma unroll 1
    for (int i = 0; i < rounds; i++) {
        __syncwarp();
        int block = pair ? (lane & 6) & (2 * tall - 1) : i / wide * 4 + (lane >> 1 & 3);
        const unsigned char *from = own + (block * wide + i % wide) * 128;
        int64_t place = sala_prefill_place(a, at, tall, wide, i);
        uint32_t r[4], up[4];
        sala_ldmatrix4_trans(r, from + ((row + block * 2) & 7) * 16);
        if (pair) sala_ldmatrix4_trans(up, from + wide * 128 + ((row + block * 2 + 2) & 7) * 16);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (add && place >= 0) v = *(const uint4 *)(a->norm.x + place);
        const uint32_t x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float low = sala_low(r[e]), high = sala_high(r[e]);
            if (pair)
                r[e] = sala_pair(sala_swiglu(low, sala_low(up[e])),
                                 sala_swiglu(high, sala_high(up[e])));
            if (add)
                r[e] = sala_pair(sala_round(low * a->norm.scale) + sala_low(x[e]),
                                 sala_round(high * a->norm.scale) + sala_high(x[e]));
        }
        if (pair && a->norm.quant.codes) {
            int token = place < 0 ? 0 : (int)(place / n);
            sala_fp4_put(&a->norm.quant, r, place >= 0, token, (int)(place - (int64_t)token * n),
                         n);
        } else if (place >= 0) {
            sala_act *to = add ? a->norm.x : a->gemm.y[at->weight];
            *(uint4 *)(to + place) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
}

SALA_DEVICE void sala_fp4_run(const sala_product_args *a, int tall, int wide) {
    sala_prefill_tile at = sala_prefill_find(a, tall * 32, wide * 16);
    sala_fp4_feed feed = sala_fp4_begin(a, &at, wide);
    sala_fp4_warp m = {};
    int slot = 0;
#pragma unroll 1
    for (int i = 1; i < SALA_FP4_STAGES; i++) sala_fp4_copy(a, tall, wide, &feed);
#pragma unroll 1
    for (int left = a->gemm.w[0].k >> 6; left > 0; left--) {
        SALA_COPY_WAIT(SALA_FP4_STAGES - 2);
        __syncthreads(); // the stage is there, and all are done with the one before
        sala_fp4_copy(a, tall, wide, &feed);
        sala_fp4_stage(tall, wide, slot, &m);
        sala_fp4_multiply(tall, wide, &m);
        slot = sala_fp4_turn(tall, wide, slot);
    }
    sala_fp4_store(a, &at, tall, wide, &m);
}

// y = x w^T in W4A4, with SwiGLU (y or y quantised, norm.quant), or onto the residual stream. Grid: one
// block a tile. Reads, mostly from L2, 0.5625 bytes of a weight once for every tile of rows of x, and
// of x once for every tile of weight rows. Twins: sala__op_gemm and those that call it, with qx.
extern "C" __global__ void __launch_bounds__(SALA_PREFILL_THREADS, 2)
    sala_prefill_fp4(const __grid_constant__ sala_product_args a) {
    sala_launch_next();
    sala_wait_grid();
#define SALA_FP4_CASE(number, tall, wide, clocks)                                                  \
    if (a.shape == number) sala_fp4_run(&a, tall, wide);
    SALA_PREFILL_SHAPES(SALA_FP4_CASE)
#undef SALA_FP4_CASE
}

// The norm with a quantised result, and y as well where there is one; no branch. Its sums are those of
// sala_norm. Grid: one block a row. Reads x and writes 0.5625 bytes an element. Twin: sala__op_norm_row.
extern "C" __global__ void __launch_bounds__(SALA_GEMM_THREADS, 8)
    sala_norm_quant(const __grid_constant__ sala_norm_args a) {
    sala_launch_next();
    sala_wait_grid();
    float *warps = (float *)sala_shared(), sum = 0;
    int row = (int)blockIdx.x, width = a.width, thread = (int)threadIdx.x;
    const sala_act *x = a.x + (int64_t)row * width, *weight = (const sala_act *)a.weight.data;
#pragma unroll 4
    for (int c = thread * 4; c < width; c += SALA_GEMM_THREADS * 4) {
        uint2 v = *(const uint2 *)(x + c);
        sum = fmaf(sala_low(v.x), sala_low(v.x), sum);
        sum = fmaf(sala_high(v.x), sala_high(v.x), sum);
        sum = fmaf(sala_low(v.y), sala_low(v.y), sum);
        sum = fmaf(sala_high(v.y), sala_high(v.y), sum);
    }
    float inverse = 1.0f / sqrtf(sala_block_sum(sum, warps) / (float)width + a.eps);
#pragma unroll 1
    for (int from = 0; from < width; from += SALA_GEMM_THREADS * 8) {
        int c = from + thread * 8;
        bool exists = c < width;
        uint4 v = make_uint4(0, 0, 0, 0), by = v;
        if (exists) v = *(const uint4 *)(x + c), by = *(const uint4 *)(weight + c);
        uint32_t y[4] = {v.x, v.y, v.z, v.w};
        const uint32_t w[4] = {by.x, by.y, by.z, by.w};
        for (int i = 0; i < 4; i++) {
            y[i] = sala_normed2(y[i], inverse, w[i]);
            if (a.divisor != 1)
                y[i] = sala_pair(sala_low(y[i]) / a.divisor, sala_high(y[i]) / a.divisor);
        }
        if (exists && a.y)
            *(uint4 *)(a.y + (int64_t)row * width + c) = make_uint4(y[0], y[1], y[2], y[3]);
        sala_fp4_put(&a.quant, y, exists, row, c, width);
    }
}
#endif

#if SALA_HAS(7)

// ---- 22. the draft head: what its layer does not share with the model's

// Eight elements (four pairs): their squares added to `sum`, in order; their sum with others, rounded;
// and x * inverse * weight with upstream's two roundings.
SALA_DEVICE float sala_squares8(uint4 x, float sum) {
    const uint32_t pair[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4; i++) {
        sum = fmaf(sala_low(pair[i]), sala_low(pair[i]), sum);
        sum = fmaf(sala_high(pair[i]), sala_high(pair[i]), sum);
    }
    return sum;
}

SALA_DEVICE uint32_t sala_add2(uint32_t x, uint32_t y) {
    return sala_pair(sala_low(x) + sala_low(y), sala_high(x) + sala_high(y));
}

SALA_DEVICE uint4 sala_add8(uint4 x, uint4 y) {
    return make_uint4(sala_add2(x.x, y.x), sala_add2(x.y, y.y), sala_add2(x.z, y.z),
                      sala_add2(x.w, y.w));
}

SALA_DEVICE uint4 sala_normed8(uint4 x, float inverse, uint4 by) {
    return make_uint4(sala_normed2(x.x, inverse, by.x), sala_normed2(x.y, inverse, by.y),
                      sala_normed2(x.z, inverse, by.z), sala_normed2(x.w, inverse, by.w));
}

SALA_DEVICE void sala_copy_row(sala_act *to, const sala_act *from, int width) {
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < width / 8; i += (int)blockDim.x)
        ((uint4 *)to)[i] = ((const uint4 *)from)[i];
}

// One layer's x to its third of the features. Grid: one block a row. Reads and writes 2 * width bytes a
// row. Twin: sala__op_capture.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_capture(const __grid_constant__ sala_capture_args a) {
    sala_launch_next();
    sala_wait_grid();
    int64_t r = (int64_t)blockIdx.x;
    const uint4 *x = (const uint4 *)(a.x + r * a.width), *by = (const uint4 *)a.norm.data;
    uint4 *to = (uint4 *)(a.features + (3 * r + a.third) * a.width);
    float sum = 0, inverse = 0;
    int pieces = a.width / 8;
    if (by) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < pieces; i += 256) sum = sala_squares8(x[i], sum);
        sum = sala_block_sum(sum, (float *)sala_shared());
        inverse = 1.0f / sqrtf(sum / (float)a.width + a.eps);
    }
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < pieces; i += 256)
        to[i] = by ? sala_normed8(x[i], inverse, by[i]) : x[i];
}

// Features of accepted nodes to the debt of their sequence. Blocks: (sequences, places on the path).
// Reads and writes 2 * width bytes a node. Twin: sala__op_keep.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_keep(const __grid_constant__ sala_keep_args a) {
    sala_launch_next();
    sala_wait_grid();
    int i = (int)blockIdx.x, n = (int)blockIdx.y;
    if (i >= a.rows->seq_count || n >= a.accepted[i]) return;
    int place = a.place[a.rows->seqs[i].slot], r = a.accepted_rows[i * SALA_MAX_PATH + n];
    if (place < 0) return;
    int64_t to = (int64_t)place * SALA_DRAFT_DEBT + a.rows->position[r] % SALA_DRAFT_DEBT;
    sala_copy_row(a.debt + to * a.width, a.features + (int64_t)r * a.width, a.width);
}

// Rows of features to where they are wanted. Grid: one block a row. Reads and writes 2 * width bytes a
// row. Twin: sala__op_gather.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_gather(const __grid_constant__ sala_gather_args a) {
    sala_launch_next();
    sala_wait_grid();
    int64_t r = (int64_t)blockIdx.x, from = a.from[r];
    if (from >= 0) sala_copy_row(a.to + r * a.width, a.features + from * a.width, a.width);
}

// Eight columns of a sum of parts.
SALA_DEVICE uint4 sala_input_sum(const float *parts, int splits, int64_t stride) {
    float4 low = make_float4(0, 0, 0, 0), high = low;
#pragma unroll 4
    for (int split = 0; split < splits; split++) {
        const float4 *from = (const float4 *)(parts + split * stride);
        float4 x = from[0], y = from[1];
        low.x += x.x, low.y += x.y, low.z += x.z, low.w += x.w;
        high.x += y.x, high.y += y.y, high.z += y.z, high.w += y.w;
    }
    return make_uint4(sala_pair(low.x, low.y), sala_pair(low.z, low.w), sala_pair(high.x, high.y),
                      sala_pair(high.z, high.w));
}

typedef struct sala_input_shared {
    float sums[32];
    int32_t chosen;
    float score[SALA_MAX_TOPK * SALA_MAX_TOPK]; // of the candidates of the step before
    int32_t token[SALA_MAX_TOPK * SALA_MAX_TOPK];
} sala_input_shared;

// Which candidate of its sequence row r of a step is. All threads call it.
SALA_DEVICE int sala_input_choose(const sala_growth *g, int step, int r,
                                  sala_input_shared *shared) {
    int seq = r / g->topk, made = sala_growth_made(g, step - 1), c = (int)threadIdx.x;
    if (c < made) {
        int maker = sala_growth_maker(g, step - 1, seq, c);
        shared->score[c] = sala_growth_score(g, step - 1, seq, c);
        shared->token[c] = g->best_token[maker * g->topk + c % g->topk];
    }
    __syncthreads();
    if (c < made && sala_growth_rank(shared->score, made, c) == r % g->topk) shared->chosen = c;
    __syncthreads();
    return shared->chosen;
}

// What goes into the head's layer. Grid: one block a row. Reads 8 * width bytes (the embedding's row is
// half of what it reads of it), writes 6 * width. Twin: sala__op_draft_input.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_draft_input(const __grid_constant__ sala_draft_input_args a) {
    constexpr int PIECES = (MODEL.hidden + 2047) / 2048;
    sala_input_shared *shared = (sala_input_shared *)sala_shared();
    float squares[2] = {0, 0};
    int r = (int)blockIdx.x, parent = r, t = (int)threadIdx.x, chosen = 0, n;
    const sala_growth *g = &a.growth;
    uint4 e[PIECES], f[PIECES], by[2][PIECES];
    sala_launch_next();
#pragma unroll
    for (int i = 0; i < PIECES; i++) { // weights need not wait
        int k = min(2048 * i + 8 * t, MODEL.hidden - 8) / 8;
        by[0][i] = ((const uint4 *)a.input_norm.data)[k];
        by[1][i] = ((const uint4 *)a.hidden_norm.data)[k];
    }
    sala_wait_grid();
    if (a.step > 0) {
        chosen = sala_input_choose(g, a.step, r, shared);
        n = max(shared->token[chosen], 0);
        parent = a.step > 1 ? r / g->topk * g->topk + chosen / g->topk : r / g->topk;
    } else {
        n = g->token[r];
    }
    const sala_act *table = (const sala_act *)a.embed.data;
    const sala_act *from = a.f + (int64_t)parent * MODEL.hidden;
    const uint4 *bias = (const uint4 *)a.bias.data;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int k = 2048 * i + 8 * t;
        e[i] = f[i] = make_uint4(0, 0, 0, 0);
        if (k >= MODEL.hidden) continue;
        uint4 first = *(const uint4 *)(table + (sala_packed(n, k, a.embed.n) & ~7ll));
        uint4 second = *(const uint4 *)(table + (sala_packed(n, k + 4, a.embed.n) & ~7ll));
        e[i] = n & 8 ? make_uint4(first.y, first.w, second.y, second.w)
                     : make_uint4(first.x, first.z, second.x, second.z);
        f[i] = a.step > 0 ? *(const uint4 *)(from + k)
                          : sala_input_sum(a.parts + (int64_t)r * MODEL.hidden + k, a.splits,
                                           (int64_t)a.rows * MODEL.hidden);
        if (bias && a.step == 0) f[i] = sala_add8(f[i], bias[k / 8]);
        squares[0] = sala_squares8(e[i], squares[0]);
        squares[1] = sala_squares8(f[i], squares[1]);
    }
    for (int i = 0; i < 2; i++) {
        squares[i] = sala_block_sum(squares[i], shared->sums);
        squares[i] = 1.0f / sqrtf(squares[i] / (float)MODEL.hidden + a.eps);
    }
    sala_act *x = a.x + (int64_t)r * MODEL.hidden, *u = a.u + (int64_t)r * 2 * MODEL.hidden;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int k = 2048 * i + 8 * t;
        if (k >= MODEL.hidden) continue;
        *(uint4 *)(x + k) = f[i];
        *(uint4 *)(u + k) = sala_normed8(e[i], squares[0], by[0][i]);
        *(uint4 *)(u + MODEL.hidden + k) = sala_normed8(f[i], squares[1], by[1][i]);
    }
    if (t == 0 && a.step > 0) // for later steps
        sala_growth_take(g, a.step, r / g->topk, r % g->topk, chosen, shared->score[chosen]);
}

// The sum of a head's parts as pairs of BF16.
SALA_DEVICE uint2 sala_turn_sum(const float *parts, int splits, int64_t stride) {
    int lane = (int)threadIdx.x & 31;
    float2 low = make_float2(0, 0), high = low;
#pragma unroll 4
    for (int split = 0; split < splits; split++) {
        const float2 *from = (const float2 *)(parts + split * stride);
        float2 x = from[lane], y = from[32 + lane];
        low.x += x.x, low.y += x.y, high.x += y.x, high.y += y.y;
    }
    return make_uint2(sala_pair(low.x, low.y), sala_pair(high.x, high.y));
}

// q and k turned, v as it is, k and v to their pages. One warp a (row, head), heads as the columns are.
// Reads 512 bytes a split and head, writes 256, of k and v twice. Twin: sala__op_draft_turn.
extern "C" __global__ void __launch_bounds__(128, 2)
    sala_draft_turn(const __grid_constant__ sala_draft_turn_args a) {
    const int kv = MODEL.kv_heads, all = a.heads + 2 * kv, lane = (int)threadIdx.x & 31;
    int item = (int)blockIdx.x * 4 + ((int)threadIdx.x >> 5), r = item / all, h = item % all;
    sala_launch_next();
    sala_wait_grid();
    if (r >= a.count) return;
    const float4 *turn = (const float4 *)(a.cos_sin + (int64_t)r * 128);
    uint2 x = sala_turn_sum(a.parts + (int64_t)item * 128, a.splits, (int64_t)a.count * all * 128);
    int which = h / kv, seq = a.pages.k ? a.rows->seq[r] : -1; // 0: k, 1: v, 2 ..: q
    if (which != 1) x = sala_head_rope(x, turn[lane]);
    int64_t at = (int64_t)r * kv + h % kv;
    if (which > 1) at = (int64_t)r * a.heads + h - 2 * kv;
    sala_head_store((which == 0 ? a.k : which == 1 ? a.v : a.q) + at * 128, x);
    if (which > 1 || seq < 0) return;
    int u = a.rows->position[r];
    int64_t page = a.rows->seqs[seq].pages[u / MODEL.block];
    at = (page * kv + h % kv) * MODEL.block + u % MODEL.block;
    sala_head_store((which == 0 ? a.pages.k : a.pages.v) + at * 128, x);
}

// The best of the warp's keys below `limit`.
SALA_DEVICE uint64_t sala_top_warp(const uint64_t *key, int count, uint64_t limit) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < count; i++)
        if (key[i] < limit && key[i] > best) best = key[i];
    for (int step = 16; step > 0; step >>= 1) {
        uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
        best = other > best ? other : best;
    }
    return best;
}

// The best of the block's keys below `limit`. All threads call it; `partial`: [8] of shared memory.
SALA_DEVICE uint64_t sala_top_block(uint64_t key, uint64_t limit, uint64_t *partial) {
    uint64_t best = sala_top_warp(&key, 1, limit);
    __syncthreads(); // `partial` may still be read from the round before
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = best;
    __syncthreads();
    for (int w = 0; w < 8; w++) best = partial[w] > best ? partial[w] : best;
    return best;
}

// The tiles of a row to its candidates.
SALA_DEVICE void sala_top_merge(const sala_draft_top_args *a, int r, int tiles, float *sums,
                                uint64_t *partial) {
    const sala_top *tops = a->tops + (int64_t)r * tiles;
    uint64_t best = 0, limit = ~(uint64_t)0;
    float sum = 0, max = 0;
#pragma unroll 1
    for (int j = 0; j < a->topk; j++) {
        uint64_t own = 0; // the best that this thread's tiles have below the limit
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < tiles * a->topk; i += 256) {
            uint64_t key = tops[i / a->topk].key[i % a->topk];
            if (key < limit && key > own) own = key;
        }
        limit = sala_top_block(own, limit, partial);
        if (j == 0) {
            best = limit, max = sala_top_value(best);
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < tiles; i += 256)
                sum = fmaf(tops[i].sum, expf(tops[i].max - max), sum);
            sum = logf(sala_block_sum(sum, sums));
        }
        if (threadIdx.x == 0) sala_top_put(a, r, j, limit, best, max + sum);
    }
}

// The best logits of each row. Grid: (eight tiles of SALA_TOP_TILE logits, a warp each; rows); the block
// of a row that arrives last merges its tiles. Reads the logits once. Twin: sala__op_draft_top.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_draft_top(const __grid_constant__ sala_draft_top_args a) {
    uint64_t *partial = (uint64_t *)sala_shared(), key[8], limit = ~(uint64_t)0; // [8]
    float *sums = (float *)(partial + 8), value[8], sum = 0;                     // [8]
    int *before = (int *)(sums + 8), r = (int)blockIdx.y, lane = (int)threadIdx.x & 31;
    int tile = (int)(blockIdx.x * 256 + threadIdx.x) >> 5, tiles = (int)gridDim.x * 8;
    int first = tile * SALA_TOP_TILE + lane;
    sala_launch_next();
    sala_wait_grid();
    const float *logits = a.logits + (int64_t)r * a.vocab;
    sala_top *top = &a.tops[(int64_t)r * tiles + tile];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int id = first + 32 * i;
        value[i] = id < a.vocab ? logits[id] : -__uint_as_float(0x7F800000u);
        key[i] = id < a.vocab ? sala_top_key(value[i], id) : 0;
    }
#pragma unroll 1
    for (int j = 0; j < a.topk; j++) {
        limit = sala_top_warp(key, 8, limit);
        if (lane == 0) top->key[j] = limit;
        if (j > 0) continue;
        float max = limit >> 32 ? sala_top_value(limit) : 0; // all -infinity: the sum is 0
#pragma unroll
        for (int i = 0; i < 8; i++) sum += expf(value[i] - max);
        sum = sala_warp_sum(sum);
        if (lane == 0) top->max = sala_top_value(limit), top->sum = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) *before = sala_arrive(&a.arrivals[r]);
    __syncthreads();
    if (*before < (int)gridDim.x - 1) return;
    sala_top_merge(&a, r, tiles, sums, partial);
    if (threadIdx.x == 0) a.arrivals[r] = 0;
}

// The best candidates of each sequence as a tree. Grid: one block a sequence. Reads all candidates, a
// few hundred. Twin: sala__op_draft_grow.
extern "C" __global__ void __launch_bounds__(256, 2)
    sala_draft_grow(const __grid_constant__ sala_draft_grow_args a) {
    static_assert(SALA_CANDIDATES <= 256, "a thread a candidate");
    float *score = (float *)sala_shared();              // [256]
    int32_t *place = (int32_t *)(score + 256);          // [256] node of a chosen candidate, or -1
    int32_t *chosen = place + 256, s = (int)blockIdx.x; // [256]
    int32_t c = (int)threadIdx.x, all = sala_growth_all(&a.growth), at = 0, count = 0;
    sala_launch_next();
    sala_wait_grid();
    sala_tree *tree = &a.trees[s];
    const float nothing = -__uint_as_float(0x7F800000u);
    score[c] = nothing;
    if (c < all) score[c] = sala_growth_last(&a.growth, s, c);
    __syncthreads();
    chosen[c] = c < all && score[c] > nothing &&
                sala_growth_rank(score, all, c) < a.growth.limit[2 * s + 1] - 1;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < all; i++) at += i < c ? chosen[i] : 0, count += chosen[i];
    place[c] = chosen[c] ? 1 + at : -1;
    __syncthreads();
    if (chosen[c]) sala_growth_node(&a.growth, s, c, 1 + at, score[c], place, tree);
    if (c > 0) return;
    tree->count = 1 + count;
    tree->token[0] = a.growth.token[s];
    tree->parent[0] = -1;
    tree->depth[0] = 0;
    tree->score[0] = 0;
}
#endif
