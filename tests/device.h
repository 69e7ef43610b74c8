/*  device.h - a CUDA device for kernel tests: the simulator of tests/sim by default, a GPU where SALA_TEST_GPU
    is set. Included after sala.h (with its implementation) and check.h. */
#ifndef SALA_TEST_DEVICE_H
#define SALA_TEST_DEVICE_H

static sala__gpu device_gpu;
static sala__gpu *const gpu = &device_gpu; // for the launchers
static sala_dims device_dims;
static int device_is_open;
static int device_fp4;        // see sala__gpu
static int device_shared;     // the same
static unsigned device_units; // what most tests of a program need, see device_open_units

// Which libraries stand for the driver and the compiler. 0: neither GPU nor simulator is there.
static int device_exists(void) {
    const char *simulator = getenv("SALA_SIM");
    if (getenv("SALA_TEST_GPU")) return 1;
    if (!simulator) simulator = "build/libsala_sim.so";
    if (!sala__file_exists(simulator)) return 0;
    setenv("SALA_CUDA", simulator, 1);
    setenv("SALA_NVRTC", simulator, 1);
    return 1;
}

static void device_must(int code, const sala_error *err) {
    if (code >= 0 && !gpu->error.code) return;
    printf("  in %s: %s\n", check_test, code < 0 ? err->text : gpu->error.text);
    exit(2);
}

static void device_close(void) {
    if (!device_is_open) return;
    sala__cuda_leave(&gpu->cuda);
    sala__gpu_close(gpu);
    device_is_open = 0;
}

// Kernels for a model of this shape, those of some units or (0) all; what was open is closed.
static inline void device_open_units(const sala_dims *dims, unsigned units) {
    sala_error err;
    sala__env env;
    const char *ordinal = getenv("SALA_TEST_GPU");
    memset(&err, 0, sizeof err);
    memset(&env, 0, sizeof env);
    device_close();
    memset(gpu, 0, sizeof *gpu);
    device_dims = *dims;
    gpu->units = units;
    gpu->fp4 = device_fp4;
    gpu->shared = device_shared;
    device_must(sala__cuda_open(&env, ordinal ? atoi(ordinal) : 0, &gpu->cuda, &err), &err);
    device_must(sala__cuda_enter(&gpu->cuda, &err), &err);
    device_must(sala__gpu_open(gpu, &device_dims, &err), &err);
    device_is_open = 1;
}

static inline void device_open(const sala_dims *dims) {
    device_open_units(dims, device_units);
}

static inline void device_sync(void) {
    sala_error err;
    memset(&err, 0, sizeof err);
    device_must(sala__cuda_wait(&gpu->cuda, &err), &err);
}

// Device memory until device_close: a copy of `host`, or (NULL) all ones, which are NaN.
static inline void *on_device(const void *host, size_t bytes) {
    sala_error err;
    memset(&err, 0, sizeof err);
    void *p = sala__gpu_take(gpu, bytes, "a test", &err);
    device_must(p ? 0 : -1, &err);
    if (host)
        device_must(sala__cuda_upload(&gpu->cuda, sala__on_gpu(p), host, bytes, &err), &err);
    else
        device_must(sala__cuda_fill(&gpu->cuda, sala__on_gpu(p), 0xFF, bytes, &err), &err);
    device_sync();
    return p;
}

static inline void to_device(void *device, const void *host, size_t bytes) {
    sala_error err;
    memset(&err, 0, sizeof err);
    device_must(sala__cuda_upload(&gpu->cuda, sala__on_gpu(device), host, bytes, &err), &err);
    device_sync();
}

static inline void from_device(void *host, const void *device, size_t bytes) {
    sala_error err;
    memset(&err, 0, sizeof err);
    device_must(sala__cuda_download(&gpu->cuda, host, sala__on_gpu(device), bytes, &err), &err);
    device_sync();
}

// ---- what tests of sparse attention share ----

// Dimensions that a device accepts; small but for what a test is about.
static inline sala_dims sparse_dims(int heads, int kv_heads, int local, int top_k, int dense_len) {
    sala_dims m;
    memset(&m, 0, sizeof m);
    m.vocab = 64, m.hidden = 128, m.ffn = 192, m.layers = 2;
    m.heads = heads, m.kv_heads = kv_heads, m.head_dim = 128, m.sparse_gate = 1;
    m.block = 64, m.kernel = 32, m.stride = 16, m.init_blocks = 1, m.local_blocks = local;
    m.top_k = top_k, m.dense_len = dense_len;
    m.lin_heads = m.lin_kv_heads = 2, m.lin_dim = 128;
    m.eps = 1e-6f, m.rope_theta = 1e4f, m.embed_scale = m.residual_scale = m.logit_divisor = 1;
    m.attn_scale = m.lin_scale = 0.08838834764f;
    return m;
}

static inline void *sparse_memory(size_t bytes) { // all ones: NaN
    void *p = malloc(bytes ? bytes : 1);
    if (!p) exit(2);
    memset(p, 0xFF, bytes);
    return p;
}

static inline int sparse_below(int n) {
    return (int)(check_random() % (uint64_t)n);
}

static inline void sparse_noise(sala_act *to, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) to[i] = sala_f32_bf16(scale * check_uniform());
}

#endif
