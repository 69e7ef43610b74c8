// Kernels for tests/test_sim.c: each shows one thing that the simulator must do, or must catch.
#include "selftest.h"

#define THREADS 128
#define KERNEL(name)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
        self_##name(const __grid_constant__ selftest_args a)
#define ALL 0xFFFFFFFFu

// out[block, thread] = their coordinates, packed.
KERNEL(indices) {
    sala_wait_grid();
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned *out = (unsigned *)a.out;
    out[block * THREADS + thread] = blockIdx.x | blockIdx.y << 4 | blockIdx.z << 8 |
                                    threadIdx.x << 12 | threadIdx.y << 20 | threadIdx.z << 24;
}

// Two groups of copies, looked at before and after each wait. out[stage, thread].
KERNEL(copies) {
    sala_wait_grid();
    unsigned *out = (unsigned *)a.out, t = threadIdx.x;
    uint4 *shared = (uint4 *)sala_shared();
    const uint4 *in = (const uint4 *)a.in;
    for (int i = 0; i < 4; i++) shared[i * THREADS + t] = make_uint4(7, 7, 7, 7);
    sala_copy16(&shared[t], &in[t]);
    sala_copy_commit();
    sala_copy16(&shared[THREADS + t], &in[THREADS + t]);
    sala_copy_commit();
    sala_copy16_or_zero(&shared[2 * THREADS + t], &in[2 * THREADS + t], t % 2);
    sala_copy16(&shared[3 * THREADS + t], &in[t]);
    for (int i = 0; i < 4; i++) out[i * THREADS + t] = shared[i * THREADS + t].x;
    SALA_COPY_WAIT(1);
    for (int i = 0; i < 4; i++) out[(4 + i) * THREADS + t] = shared[i * THREADS + t].x;
    SALA_COPY_WAIT(0);
    for (int i = 0; i < 4; i++) out[(8 + i) * THREADS + t] = shared[i * THREADS + t].x;
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    for (int i = 0; i < 4; i++) out[(12 + i) * THREADS + t] = shared[i * THREADS + t].x;
}

// Copies that are wrong: the mode says how.
KERNEL(wrong_copy) {
    sala_wait_grid();
    unsigned char *shared = sala_shared();
    const unsigned char *in = (const unsigned char *)a.in;
    if (a.mode == 0) sala_copy16(shared + 8, in);
    if (a.mode == 1) sala_copy16(shared, in + 4);
    if (a.mode == 2) sala_copy16(shared + 1024, in); // the block has 1024 bytes
    if (a.mode == 3) sala_copy16(shared, in + a.count);
    if (a.mode == 4) sala_load_once(in + a.count);
    if (a.mode == 5) sala_load_once(in + 8);
    if (a.mode == 6) sala_copy16((void *)in, in);
}

// One m16n8k16 product a warp: in = A [16, 16], B [16, 8] bf16, D [16, 8] f32; out [16, 8].
KERNEL(mma) {
    sala_wait_grid();
    const unsigned short *in_a = (const unsigned short *)a.in, *in_b = in_a + 256;
    const float *in_d = (const float *)(in_b + 128);
    int lane = (int)threadIdx.x & 31, g = lane >> 2, c = 2 * (lane & 3);
    uint32_t fa[4], fb[2];
    float fd[4];
    for (int i = 0; i < 4; i++) {
        const unsigned short *p = &in_a[(g + 8 * (i & 1)) * 16 + c + 8 * (i >> 1)];
        fa[i] = p[0] | (uint32_t)p[1] << 16;
        fd[i] = in_d[(g + 8 * (i >> 1)) * 8 + c + (i & 1)];
    }
    for (int i = 0; i < 2; i++) {
        const unsigned short *p = &in_b[(c + 8 * i) * 8 + g];
        fb[i] = p[0] | (uint32_t)p[8] << 16;
    }
    for (int i = 0; i < a.count; i++) sala_mma(fd, fa, fb);
    float *out = (float *)a.out + (threadIdx.x >> 5) * 128;
    for (int i = 0; i < 4; i++) out[(g + 8 * (i >> 1)) * 8 + c + (i & 1)] = fd[i];
}

// Four 8 x 8 matrices of 16 bits through ldmatrix, plain and transposed: out[2, lane, 4].
KERNEL(ldmatrix) {
    sala_wait_grid();
    unsigned char *shared = sala_shared();
    int t = (int)threadIdx.x, lane = t & 31;
    if (t < 32) sala_copy16(shared + 16 * t, (const unsigned char *)a.in + 16 * t);
    sala_copy_commit();
    SALA_COPY_WAIT(0);
    __syncthreads();
    uint32_t r[4], *out = (uint32_t *)a.out;
    const unsigned char *row = shared + 16 * lane;
    if (a.mode == 1) row += 8;
    if (a.mode == 2) row += 512;
    sala_ldmatrix4(r, row);
    for (int i = 0; i < 4 && t < 32; i++) out[lane * 4 + i] = r[i];
    sala_ldmatrix4_trans(r, row);
    for (int i = 0; i < 4 && t < 32; i++) out[128 + lane * 4 + i] = r[i];
}

// out[what, thread]
KERNEL(shuffles) {
    sala_wait_grid();
    int t = (int)threadIdx.x, *out = (int *)a.out;
    unsigned *bits = (unsigned *)a.out;
    out[t] = __shfl_sync(ALL, t, 5);
    out[THREADS + t] = __shfl_xor_sync(ALL, t, 9);
    out[2 * THREADS + t] = __shfl_up_sync(ALL, t, 3);
    out[3 * THREADS + t] = __shfl_down_sync(ALL, t, 3);
    out[4 * THREADS + t] = __shfl_xor_sync(ALL, t, 4, 8);
    out[5 * THREADS + t] = (int)__shfl_sync(ALL, (float)t + 0.5f, 1, 4);
    bits[6 * THREADS + t] = __ballot_sync(ALL, t % 3 == 0);
    out[7 * THREADS + t] = __any_sync(ALL, t == 40);
    out[8 * THREADS + t] = __all_sync(ALL, t < 64);
    out[9 * THREADS + t] = __syncthreads_count(t % 5 == 0);
    out[10 * THREADS + t] = __syncthreads_or(t == 77);
    out[11 * THREADS + t] = __syncthreads_and(t != 77);
    out[12 * THREADS + t] = __shfl_sync(ALL, (uint64_t)t << 40, 7) >> 40;
}

// out = in reversed through shared memory; mode 1: without the barrier; mode 2: within warps only.
KERNEL(reverse) {
    sala_wait_grid();
    int t = (int)threadIdx.x, *shared = (int *)sala_shared();
    shared[t] = ((const int *)a.in)[t];
    if (a.mode == 0) __syncthreads();
    if (a.mode == 2) __syncwarp();
    int other = a.mode >= 2 ? t ^ 31 : THREADS - 1 - t;
    ((int *)a.out)[t] = shared[other];
}

// Threads leave early, the others still meet at barriers.
KERNEL(leavers) {
    sala_wait_grid();
    int t = (int)threadIdx.x, *shared = (int *)sala_shared();
    if (t >= 96) return;
    shared[t] = t;
    __syncthreads();
    if (t >= 64) return;
    int sum = shared[95 - t];
    __syncthreads();
    ((int *)a.out)[t] = sum;
}

// Things that never end, or must not be done.
KERNEL(wrong) {
    if (a.mode == 0 && threadIdx.x == 5) return; // without waiting for the grid
    sala_wait_grid();
    int t = (int)threadIdx.x, lane = t & 31, *out = (int *)a.out;
    if (a.mode == 1) sala_await(a.counter, 99);
    if (a.mode == 2) {
        if (lane < 16)
            out[t] = __shfl_sync(ALL, t, 0);
        else
            out[t] = (int)__ballot_sync(ALL, t);
    }
    if (a.mode == 3 && lane < 31) __syncwarp();
    if (a.mode == 4) out[t] = __shfl_sync(0xFFFFu, t, 0);
    if (a.mode == 5) {
        if (lane == 3) return;
        __syncwarp();
    }
    if (a.mode == 6) {
        if (t < 64)
            __syncthreads();
        else
            __syncthreads();
    }
    if (a.mode == 7) {
        if (lane == 0) __syncthreads();
        if (lane != 0) __syncwarp();
        __syncthreads();
    }
    if (a.mode == 8) sala_shared()[1024 + t] = 1; // the block has 1024 bytes
    if (a.mode == 9) ((unsigned char *)a.out)[a.count + t] = 1;
    if (a.mode == 10) __trap();
    if (a.mode == 12) ((unsigned char *)a.out)[a.count + t + 128] = 1;
    if (a.mode == 11) ((unsigned char *)a.out)[a.count + (1 << 20)] = 1;
}

// The first of two kernels: writes count to out.
KERNEL(first) {
    sala_launch_next();
    sala_wait_grid();
    if (blockIdx.x == 0) ((int *)a.out)[threadIdx.x] = a.count;
}

// The second: what stood there before and after the wait (mode 1), or after it.
KERNEL(second) {
    sala_launch_next();
    int t = (int)threadIdx.x, *out = (int *)a.out, block = (int)blockIdx.x;
    const int *in = (const int *)a.in;
    int before = a.mode ? in[t] : 0;
    sala_wait_grid();
    out[block * THREADS + t] = a.mode ? before : in[t];
}

// Every block adds its share to out[0]; block 0 waits for all others, then writes the sum to out[1].
// mode 1: nobody waits, the last block to arrive writes the sum; mode 2: as 1, arriving too early.
KERNEL(across) {
    sala_wait_grid();
    int t = (int)threadIdx.x, *parts = (int *)a.out + 2 + blockIdx.x * THREADS, sum = 0;
    int *shared = (int *)sala_shared();
    if (a.mode == 2 && t == 0) shared[0] = sala_arrive(a.counter);
    parts[t] = t;
    __syncthreads();
    if (a.mode != 2 && t == 0) shared[0] = sala_arrive(a.counter);
    __syncthreads();
    if (a.mode == 0) {
        if (blockIdx.x) return;
        if (t == 0) sala_await(a.counter, (int)gridDim.x);
        __syncthreads();
    } else if (shared[0] != (int)gridDim.x - 1) {
        return;
    }
    if (t) return;
    for (unsigned i = 0; i < gridDim.x * THREADS; i++) sum += ((int *)a.out)[2 + i];
    ((int *)a.out)[1] = sum;
}

// out = the block's shared memory as it starts, and whether it is aligned
KERNEL(fresh) {
    sala_wait_grid();
    unsigned *shared = (unsigned *)sala_shared();
    ((unsigned *)a.out)[threadIdx.x] = shared[threadIdx.x];
    if (threadIdx.x == 0) ((unsigned *)a.out)[0] += (unsigned)((uintptr_t)shared % 1024);
}

// counter += 1 from every thread; out[0] = max of all, bits of all lanes
KERNEL(atomics) {
    sala_wait_grid();
    atomicAdd(a.counter, 1);
    atomicMax((int *)a.out, (int)(blockIdx.x * THREADS + threadIdx.x));
    atomicOr((unsigned *)a.out + 1, 1u << (threadIdx.x & 31));
    atomicAdd((uint64_t *)a.out + 1, 1ull << 33);
    atomicCAS((int *)a.out + 4, 0, 5);
}

// The integer built-ins on one input, whose results the test knows.
KERNEL(integers) {
    sala_wait_grid();
    unsigned *out = (unsigned *)a.out, x = (unsigned)a.count;
    if (threadIdx.x) return;
    out[0] = (unsigned)__popc(x);
    out[1] = (unsigned)__ffs(a.count);
    out[2] = (unsigned)__clz(a.count);
    out[3] = __brev(x);
    out[4] = __umulhi(x, x);
    out[5] = (unsigned)__umul64hi((uint64_t)x << 32, (uint64_t)x << 32);
    out[6] = __byte_perm(x, ~x, 0x7531);
    out[7] = __float_as_uint(fmaf(3.0f, 0.5f, 1.0f));
    out[8] = (unsigned)min(a.count, 3) + max(4u, 2u);
}

// Speed: `count` shuffles a thread (mode 0) or barriers (mode 1).
KERNEL(speed) {
    sala_wait_grid();
    int x = (int)threadIdx.x;
    for (int i = 0; i < a.count; i++)
        if (a.mode)
            __syncthreads();
        else
            x = __shfl_xor_sync(ALL, x, 1) + 1;
    ((int *)a.out)[threadIdx.x] = x;
}
