// TEMP harness: bandwidth of unpack4, prefill products.
#define SALA_IMPLEMENTATION
#include "../sala.h"
#include "check.h"
#include "device.h"
static double seconds(void (*go)(void *), void *arg, int count) {
    sala__cuda *c = &gpu->cuda;
    sala__cu_event b, e; float ms, best = 1e9f;
    sala__cu_exec exec = NULL;
    sala__cuda_capture_begin(c, &gpu->error);
    for (int i = 0; i < count; i++) go(arg);
    sala__cuda_capture_end(c, &exec, &gpu->error);
    if (gpu->error.code) { printf("%s\n", gpu->error.text); exit(1); }
    c->api.cuEventCreate(&b, 0); c->api.cuEventCreate(&e, 0);
    for (int r = 0; r < 6; r++) {
        c->api.cuEventRecord(b, c->stream); c->api.cuGraphLaunch(exec, c->stream);
        c->api.cuEventRecord(e, c->stream); c->api.cuEventSynchronize(e);
        c->api.cuEventElapsedTime(&ms, b, e); if (ms < best) best = ms;
    }
    return best * 1e-3 / count;
}
typedef struct job { sala_unpack4_args u[4]; int turn; sala_gemm_swiglu_args g; sala_gemm_args p; int kind; } job;
static void go_unpack(void *a) { job *j = a; sala_unpack4_args *u = &j->u[j->turn++ % 4];
    unsigned blocks = (unsigned)(u->n / 64 * (u->k / 64)); sala__launch(gpu, SALA__KERNEL_unpack4, (blocks + 7) / 8, 1, 1, 0, u); }
static void go_swiglu(void *a) { job *j = a; sala__launch_gemm_swiglu(gpu, &j->g); }
static void go_gemm(void *a) { job *j = a; sala__launch_gemm(gpu, &j->p); }
static void go_read(void *a) { sala__launch(gpu, SALA__KERNEL_read, (unsigned)gpu->multiprocessors * 16, 1, 1, 0, a); }
int main(void) {
    sala_dims m = {73448, 4096,  16384, 32, 32,          2,  128,          0,           1, 64, 32, 16,    1,     32,    64, 8192,        32, 32,           128,         1, 1,  1, 1,     1e-6f, 10000, 12, 0.24748737f, 16, 0.088388348f, 0.088388348f};
    device_open_units(&m, 1 | 2 | 8);
    static const int shapes[][2] = {{32768, 4096}, {4096, 16384}, {4096, 4096}, {256, 4096}};
    static const int formats[][3] = {{SALA_NVFP4, 16, 0}, {SALA_INT4, 128, 0}, {SALA_INT4, 32, 1}};
    size_t big = (size_t)32768 * 4096;
    uint16_t *out = on_device(NULL, big * 2), *bf = on_device(NULL, big * 2);
    sala_read_args rd = {bf, (int64_t)big * 2, on_device(NULL, 4)};
    sala_fill_args fb = {bf, 1, 0.01f, 0, 16384, 4096, 2}; sala__launch_fill(gpu, &fb); fb.layout = 3; sala__launch_fill(gpu, &fb); device_sync();
    double t = seconds(go_read, &rd, 8); printf("read of 268 MB: %.0f GB/s\n", (double)big * 2 / t * 1e-9);
    for (int f = 0; f < 3; f++) for (int s = 0; s < 4; s++) {
        job j; memset(&j, 0, sizeof j); int n = shapes[s][0], k = shapes[s][1], block = sala_block4(formats[f][0], formats[f][1], formats[f][2]);
        size_t bytes = (size_t)n / 64 * (size_t)(k / 64) * (size_t)block; uint8_t *from = on_device(NULL, 4 * bytes);
        for (int i = 0; i < 4; i++) { sala_fill4_args a = {from + i * bytes, 3 + i, formats[f][0], formats[f][1], block, n, k, 0}; sala__launch_fill4(gpu, &a);
            sala_unpack4_args u = {a.to, out, formats[f][0], formats[f][1], block, n, k}; j.u[i] = u; }
        device_sync(); t = seconds(go_unpack, &j, 16);
        printf("unpack format %d group %d %d x %d: %.1f us, %.0f GB/s\n", formats[f][0], formats[f][1], n, k, t * 1e6, ((double)bytes + 2.0 * n * k) / t * 1e-9);
    }
    gpu->prefill = 1; gpu->rows = 2048;
    gpu->unpacked = out, gpu->unpacked_bytes = big * 2;
    sala_act *x = on_device(NULL, 2048 * 16384 * 2), *y = on_device(NULL, 2048 * 16384 * 2);
    sala_fill_args fx = {x, 9, 1, 0, 2048, 4096, 0}; sala__launch_fill(gpu, &fx);
    float *alpha = malloc(32768 * 4); for (int i = 0; i < 32768; i++) alpha[i] = 0.01f; const float *ga = on_device(alpha, 32768 * 4);
    uint8_t *from = on_device(NULL, big / 64 / 64 * 2304);
    for (int i = 1; i < 3; i++) { sala_fill4_args a = {from, 3, SALA_NVFP4, 16, 2304, 16384, 4096, i}; sala__launch_fill4(gpu, &a); }
    device_sync();
    for (int rows = 512; rows <= 8192 / 4; rows *= 2) for (int four = 0; four < 3; four++) {
        job j; memset(&j, 0, sizeof j);
        sala_weight w = sala_plain_weight(four == 2 ? (void *)from : bf, four == 2 ? SALA_NVFP4 : SALA_BF16, 16384, 4096); w.group = 16; if (four) w.alpha = ga;
        j.g.rows = rows, j.g.x = x, j.g.gate = j.g.up = w, j.g.y = y;
        t = seconds(go_swiglu, &j, 4); printf("gate+up %d rows, %s: %.1f us, %.0f TFLOP/s\n", rows, four == 2 ? "nvfp4 unpacked" : four ? "bf16 with alpha" : "bf16", t * 1e6, 4.0 * rows * 16384 * 4096 / t * 1e-12);
        if (four == 2) continue;
        j.p.rows = rows, j.p.x = x, j.p.count = 4; for (int i = 0; i < 4; i++) { j.p.w[i] = w, j.p.w[i].n = 4096; j.p.y[i] = y; }
        t = seconds(go_gemm, &j, 4); printf("qkvz %d rows, %s: %.1f us, %.0f TFLOP/s\n", rows, four ? "bf16 with alpha" : "bf16", t * 1e6, 8.0 * rows * 4096 * 4096 / t * 1e-12);
    }
    { // slabs
        int n = 73448, k = 4096; size_t bytes = (size_t)(n + 63) / 64 * 64 * 2304;
        sala_weight w = sala_plain_weight(malloc((size_t)n * k / 2), SALA_NVFP4, n, k);
        w.scale = malloc((size_t)n * k / 16); w.group = 16;
        sala__synthetic_fill4(&w, 0, n, 5);
        sala__gpu_place p = {1, SALA_NVFP4, 16, 2304, (n + 63) / 64 * 64, (int64_t)bytes, 0};
        void *slab = on_device(NULL, SALA__SLAB); uint8_t *a = on_device(NULL, bytes), *b = on_device(NULL, bytes);
        sala__gpu_upload4(gpu, &w, slab, a, &p);
        sala_fill4_args f = {b, 5, SALA_NVFP4, 16, 2304, n, k, 0}; sala__launch_fill4(gpu, &f); device_sync();
        char *x = malloc(bytes), *y = malloc(bytes); from_device(x, a, bytes); from_device(y, b, bytes);
        printf("slabs: %s\n", memcmp(x, y, bytes) ? "DIFFER" : "same");
    }
    device_close();
    return 0;
}
