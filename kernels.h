/*  kernels.h - the contract between host and device: valid C, C++ and CUDA (NVRTC, no include
    path).

    In it stand the number formats, the constants that both sides must agree on, one argument struct
    per operation, and the list of all operations. An operation has two bodies that compute the same
    thing: a plain C function in sala.h (the definition, and the CPU back end) and a kernel in
    sala.cu.

    Shapes are written behind each pointer, row-major, the last index fastest. `act` is the type of
    activations, K/V and compressed keys between operations: BF16 bits, as the released model.
*/
#ifndef SALA_KERNELS_H
#define SALA_KERNELS_H

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#include <string.h>
#endif
#ifdef __CUDACC__
#define SALA_FN static __device__ __forceinline__
#else
#define SALA_FN static inline
#endif

// ---- number formats ----

SALA_FN float sala_bits_f32(uint32_t bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

SALA_FN uint32_t sala_f32_bits(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
#endif
}

// BF16: the upper half of an FP32. Round to nearest, ties to even; NaN stays NaN (quiet; on a GPU
// always 0x7FFF).
SALA_FN float sala_bf16_f32(uint16_t h) {
    return sala_bits_f32((uint32_t)h << 16);
}

SALA_FN uint16_t sala_f32_bf16(float x) {
#ifdef __CUDACC__
    uint16_t h; // one instruction for the same
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#endif
    uint32_t u = sala_f32_bits(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// F16 (IEEE binary16). Scaling by 2^112 moves its exponent range onto FP32's and handles
// subnormals.
SALA_FN float sala_f16_f32(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7FFFu) << 13, sign = (uint32_t)(h & 0x8000u) << 16;
    if (magnitude >= 0x0F800000u) return sala_bits_f32(sign | 0x70000000u | magnitude); // Inf, NaN
    return sala_bits_f32(sign | sala_f32_bits(sala_bits_f32(magnitude) * 0x1p112f));
}

SALA_FN uint16_t sala_f32_f16(float x) {
    uint32_t u = sala_f32_bits(x), sign = (u >> 16) & 0x8000u, m = u & 0x7FFFFFFFu;
    if (m > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | (m >> 13 & 0x3FFu));
    if (m >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); // 65520 and above round to infinity
    if (m < 0x38800000u) { // subnormal: one FP32 addition rounds at 2^-24, ties to even
        float magic = sala_bits_f32(m) + 0.5f;
        return (uint16_t)(sign | (sala_f32_bits(magic) - 0x3F000000u));
    }
    m += 0xFFFu + (m >> 13 & 1u);
    return (uint16_t)(sign | ((m - 0x38000000u) >> 13));
}

// E4M3 (bias 7, no infinity, 0x7F and 0xFF are NaN).
SALA_FN float sala_e4m3_f32(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80u) << 24, e = (uint32_t)(b >> 3) & 15u, m = b & 7u;
    if ((b & 0x7Fu) == 0x7Fu) return sala_bits_f32(sign | 0x7FC00000u);
    if (e == 0) return sala_bits_f32(sign | sala_f32_bits((float)m * 0x1p-9f));
    return sala_bits_f32(sign | (e + 120u) << 23 | m << 20);
}

// Round to nearest, ties to even, saturating at 448 (as cvt.rn.satfinite.e4m3x2.f32); NaN gives
// 0x7F.
SALA_FN uint8_t sala_f32_e4m3(float x) {
    uint32_t u = sala_f32_bits(x), sign = (u >> 24) & 0x80u, m = u & 0x7FFFFFFFu;
    if (m > 0x7F800000u) return (uint8_t)(sign | 0x7Fu);
    if (m >= 0x43E00000u) return (uint8_t)(sign | 0x7Eu); // >= 448
    if (m < 0x3C800000u) { // below 2^-6: steps of 2^-9, rounded by one FP32 addition
        float magic = sala_bits_f32(m) + 0x1p14f;
        return (uint8_t)(sign | (sala_f32_bits(magic) - 0x46800000u));
    }
    m += 0x7FFFFu + (m >> 20 & 1u);
    return (uint8_t)(sign | ((m - 0x3C000000u) >> 20));
}

// E2M1: 0 0.5 1 1.5 2 3 4 6 and their negatives; nearest, ties to even, saturating. Callers refuse
// NaN first.
SALA_FN float sala_e2m1_f32(uint8_t code) {
    uint32_t sign = (uint32_t)(code & 8u) << 28, e = (uint32_t)(code >> 1) & 3u, m = code & 1u;
    float a = e == 0 ? 0.5f * (float)m : sala_bits_f32((e + 126u) << 23 | m << 22);
    return sala_bits_f32(sign | sala_f32_bits(a));
}

SALA_FN uint8_t sala_f32_e2m1(float x) {
    float a = x < 0 ? -x : x;
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) +
               (a > 5.0f);
    return (uint8_t)((sala_f32_bits(x) >> 28 & 8u) | (uint32_t)code);
}

// Activations. SALA_ACT_FP32 is for tests alone: it shows that the arithmetic, without BF16's
// rounding, meets the float64 reference.
#ifdef SALA_ACT_FP32
typedef float sala_act;
SALA_FN float sala_act_f32(sala_act x) {
    return x;
}
SALA_FN sala_act sala_store(float x) {
    return x;
}
#else
typedef uint16_t sala_act;
SALA_FN float sala_act_f32(sala_act x) {
    return sala_bf16_f32(x);
}
SALA_FN sala_act sala_store(float x) {
    return sala_f32_bf16(x);
}
#endif
SALA_FN float sala_round(float x) { // to the activation type and back
    return sala_act_f32(sala_store(x));
}

// ---- constants of both sides ----

#define SALA_TILE                                                                                  \
    64 // tokens of a prefill tile: cut at a segment's start and at absolute multiples of it
#define SALA_MAX_PATH                                                                              \
    16 // longest path of a verify tree, root included; also the longest pending path
#define SALA_MAX_ROWS 256 // rows of one verify pass
#define SALA_MAX_NODES 32 // of a verify tree, root included
#define SALA_MAX_TOPK 4   // candidates that a draft head adds to a node
#define SALA_GEMM_K 512 // a dot product is a sum, in order, of partial sums over this many elements
#define SALA_LANES 16   // each of which is 16 interleaved fma chains, folded as a tree 8, 4, 2, 1

// ---- the model's shape ----

typedef struct sala_dims {
    int32_t vocab, hidden, ffn, layers;
    // sparse (InfLLM-v2) layers
    int32_t heads, kv_heads, head_dim;
    int32_t sparse_rope, sparse_gate;           // attn_use_rope, attn_use_output_gate
    int32_t block, kernel, stride, init_blocks; // tier 1: kernel, stride; tier 2: four times both
    int32_t local_blocks, top_k;                // window / block; top_k counts the forced blocks
    int32_t dense_len;                          // dense attention while fewer tokens exist
    // lightning (SimpleGLA) layers
    int32_t lin_heads, lin_kv_heads, lin_dim;
    int32_t lin_rope, lin_qk_norm, lin_norm, lin_gate;
    // scalars
    float eps, rope_theta, embed_scale, residual_scale, logit_divisor, attn_scale, lin_scale;
} sala_dims;

// Rows of the compressed tiers (1 or 2) that exist once `n` tokens do (model.md 6.1).
SALA_FN int32_t sala_tier_rows(const sala_dims *d, int tier, int32_t n) {
    int32_t scale = tier == 1 ? 1 : 4, kernel = d->kernel * scale, stride = d->stride * scale;
    return n < kernel ? 0 : (n - kernel) / stride + 1;
}

// Rows of a tier that one page has room for: a row lives with the page of its last token.
SALA_FN int32_t sala_tier_slots(const sala_dims *d, int tier) {
    int32_t stride = d->stride * (tier == 1 ? 1 : 4);
    return (d->block + stride - 1) / stride;
}

SALA_FN int32_t sala_tier_last(const sala_dims *d, int tier,
                               int32_t row) { // position of a row's last token
    int32_t scale = tier == 1 ? 1 : 4;
    return (d->stride * row + d->kernel) * scale - 1;
}

// ---- what a pass works on ----

// One sequence in a pass.
typedef struct sala_seq {
    int32_t slot;            // its place in the pools of states and pending paths
    int32_t first_row, rows; // its rows in the pass
    int32_t stored; // tokens whose K/V and compressed rows are in pages: prefill counts the chunk
                    // itself (stored before it is read), verify only what is committed
    int32_t segment_start; // prefill: position at which the segment began
    int32_t pending;       // nodes of the pending path, at positions stored - pending .. stored - 1
    const int32_t *pages;  // [blocks] page of each block of the sequence
} sala_seq;

// The rows of a pass: a chunk of a prompt (prefill), or trees (verify). A verify row is a node; its
// path is the list of its ancestors from the root to itself.
typedef struct sala_rows {
    int32_t count, seq_count;
    int32_t verify;          // which of the two forms
    const sala_seq *seqs;    // [seq_count]
    const int32_t *token;    // [count]
    const int32_t *position; // [count]
    const int32_t *seq;      // [count] index into seqs
    const int32_t *path;     // verify: [count, SALA_MAX_PATH] rows from the root to the row itself,
                             // which stands at depth position - stored
} sala_rows;

// A verify tree. Node 0 is the root, the last chosen token; parents stand before their children;
// siblings have different tokens.
typedef struct sala_tree {
    int32_t count;
    int32_t token[SALA_MAX_NODES];
    int32_t parent[SALA_MAX_NODES]; // -1: the root
    int32_t depth[SALA_MAX_NODES];  // below SALA_MAX_PATH
    float score[SALA_MAX_NODES];    // of a draft head: log of the probability of the path, else 0
} sala_tree;

// Pools of one sparse layer. A page holds one block of one sequence.
typedef struct sala_pages {
    sala_act *k, *v; // [pages, kv_heads, block, head_dim]
    sala_act *tier1; // [pages, kv_heads, tier_slots(1), head_dim]
    sala_act *tier2; // [pages, kv_heads, tier_slots(2), head_dim]
} sala_pages;

// What verify keeps of its nodes until it is known which of them are accepted, one sparse layer.
typedef struct sala_nodes {
    sala_act *k, *v; // [rows, kv_heads, head_dim]
    sala_act *tier1,
        *tier2; // [rows, kv_heads, head_dim] the row that this node's token completes, if it does
} sala_nodes;

// Weight formats. The 4-bit ones (nvfp4.md): NVFP4 is alpha[n] * E4M3 scale of 16 k * E2M1 code; INT4
// is alpha[n] * BF16(BF16 scale of `group` k * (code - zero)).
enum { SALA_BF16 = 0, SALA_F16 = 1, SALA_F32 = 2, SALA_NVFP4 = 3, SALA_INT4 = 4 };

typedef struct sala_weight {
    const void *data; // [n, k]; 4 bits: [n, k/2], even k in the low nibble (GPU: see sala_packed4)
    int32_t format;   // SALA_BF16 ...
    int32_t n, k;     // outputs, inputs; a vector has k = 1
    // What only 4-bit weights have.
    const void *scale;   // NVFP4: [n, k/16] E4M3; INT4: [n, k/group] BF16; GPU: inside data
    const uint8_t *zero; // INT4: [n, k/group] the code that means 0, at most 16; NULL: 8
                         // GPU: not NULL says that blocks are of SALA_BLOCK4_BIAS bytes
    const float *alpha;  // 4 bits: [n] a factor of each output row; NULL: 1
    float input_scale;   // NVFP4: x may be quantised in units of this (nvfp4.md 8); 0: it may not
    int32_t group;       // k that share a scale: NVFP4 16; INT4 a multiple of 32
} sala_weight;

SALA_FN sala_weight sala_plain_weight(const void *data, int32_t format, int32_t n, int32_t k) {
    sala_weight w = {data, format, n, k, 0, 0, 0, 0, 0};
    return w;
}

// Rows of x in NVFP4, for W4A4: x = scale * E4M3 scale of 16 k * E2M1 code. codes NULL: there are none.
typedef struct sala_quant {
    uint8_t *codes; // [rows, k/2], even k in the low nibble (GPU: words as sala_code_bits has them)
    uint8_t *scales; // [k/64, rows, 4], see sala_quant_place
    float scale;     // the weights' input_scale
    int32_t rows;    // that it has room for: a multiple of four
} sala_quant;

// Where the scale of a row's 16 k from k on lies: the four of 64 k are a word, as the FP4 MMA wants
// them, and the words of all rows lie together, as a stage of a product wants them.
SALA_FN int64_t sala_quant_place(const sala_quant *q, int32_t row, int32_t k) {
    return ((int64_t)(k >> 6) * q->rows + row) * 4 + (k >> 4 & 3);
}

// The scale of a group whose largest BF16 magnitude has these bits. Infinity or NaN make it NaN (0x7F).
SALA_FN uint8_t sala_quant_scale(uint32_t most, float scale) {
    if (most >= 0x7F80u) return 0x7F;
    return sala_f32_e4m3(sala_bf16_f32((uint16_t)most) * (1.0f / (6.0f * scale)));
}

// What the group is multiplied by before it becomes E2M1 codes; 0: all codes are 0.
SALA_FN float sala_quant_factor(uint8_t group_scale, float scale) {
    if (group_scale == 0 || group_scale == 0x7F) return 0;
    return 1.0f / (sala_e4m3_f32(group_scale) * scale);
}

// ---- operations: one argument struct each ----
// Where an operation has a prefill and a verify form (the arithmetic differs), it has two names. On
// a GPU all pointers are device pointers, `rows` counts are those of the pass's bucket (padding rows
// are computed, and write to no page, state or node), and matrices are packed (see sala_packed). A
// GPU's prefill has rows of one sequence, seqs[0], at consecutive positions, and no padding.

// x[r] = act(embed_scale * table[token[r]])
typedef struct sala_embed_args {
    const sala_dims *dims;
    const sala_rows *rows;
    sala_weight table; // [vocab, hidden]
    sala_act *x;       // [rows, hidden]
} sala_embed_args;

// cos and sin of position * theta^(-2i/d): FP32 product, full-range functions (model.md 4.3)
typedef struct sala_rope_args {
    const sala_rows *rows;
    int32_t dim;
    const float *frequency; // [dim/2] theta^(-2i/dim)
    float *cos_sin;         // [rows, dim/2, 2]
} sala_rope_args;

// x += residual_scale * branch (if there is a branch); y = RMSNorm(x) * weight
typedef struct sala_norm_args {
    int32_t rows, width;
    float eps, scale;
    const sala_act *branch; // [rows, width] or NULL
    sala_weight weight;     // [width]
    sala_act *x;            // [rows, width] in, out
    sala_act *y;            // [rows, width] or, where quant is enough, NULL
    float divisor;          // y is divided by it (1 but for the final norm)
    sala_quant quant;       // y once more, quantised, or codes NULL
} sala_norm_args;

// y_i[r, n] = sum_k x[r, k] * w_i[n, k] for up to four weights that read the same x. The same bits
// for every number of rows, thread and place: the order of the sum is fixed by SALA_GEMM_K (and on
// the CPU SALA_LANES, on a GPU sala_gemm_splits); in a GPU's prefill it is one chain along k.
#define SALA_GEMM_MAX 4
typedef struct sala_gemm_args {
    int32_t rows, count;
    const sala_act *x; // [rows, k]
    sala_weight w[SALA_GEMM_MAX];
    sala_act *y[SALA_GEMM_MAX]; // [rows, n_i]; or
    float *y_f32;               // [rows, n_0] instead of y[0] (the logits)
    // W4A4 (prefill, all weights NVFP4): read instead of x, codes NULL: x is. One sum along k: the
    // products of 16 k exactly, then added in FP32; y = sum * (alpha[n] * qx.scale).
    sala_quant qx;
    // Verify on a GPU, or NULL: instead of y sums of `splits` shares of k, which the reader adds in order:
    // [splits, rows, parts_width], weight i from column parts_at[i] on.
    float *parts;
    int32_t splits, parts_width, parts_at[SALA_GEMM_MAX];
} sala_gemm_args;

// branch = input w^T, then the norm above. A GPU never writes the branch: the blocks that arrive
// last add up the splits and finish the rows; in prefill it goes into x at once, and the norm is a
// kernel of its own.
typedef struct sala_gemm_norm_args {
    const sala_act *input; // [rows, k]
    sala_weight w;         // [width, k]
    sala_norm_args norm;   // norm.branch is scratch of the CPU
    float *partial;        // GPU: [splits, rows, width]
    int32_t *arrivals;     // GPU: [2] zero before and after
    sala_quant qx;         // as in sala_gemm_args
} sala_gemm_norm_args;

// y = silu(x gate^T) * (x up^T)
typedef struct sala_gemm_swiglu_args {
    int32_t rows;
    const sala_act *x;    // [rows, k]
    sala_weight gate, up; // [ffn, k]; a GPU has both in gate.data (see sala_packed_pair)
    sala_act *y;          // [rows, ffn]
    sala_act *scratch;    // CPU: [rows, ffn]
    sala_quant qx;        // as in sala_gemm_args
    sala_quant quant;     // y quantised instead of y, or codes NULL
} sala_gemm_swiglu_args;

// x quantised (nvfp4.md 8), IEEE arithmetic: b = max |x| of 16, s = E4M3(b * (1 / (6 * scale))), codes
// E2M1(x * (1 / (s * scale))); s = 0 makes all codes 0, and a group that is not finite has s = NaN.
typedef struct sala_quantize_args {
    int32_t rows, width;
    const sala_act *x; // [rows, width]
    sala_quant quant;
} sala_quantize_args;

// q, k of a layer in place: RMSNorm over each head (if weights are given), then RoPE (if a table is
// given)
typedef struct sala_qk_args {
    int32_t rows, heads, kv_heads, dim;
    float eps;
    sala_weight q_norm, k_norm; // [dim] or data NULL
    const float *cos_sin;       // [rows, dim/2, 2] or NULL
    sala_act *q;                // [rows, heads, dim]
    sala_act *k;                // [rows, kv_heads, dim]
} sala_qk_args;

#define SALA_GLA_COPIES 3 // of a state, in one pass of prefill

// Lightning attention. q and k are first normed and rotated as in sala_qk_args. State S[key][value]
// of each head: S = decay * S + k v^T, o = scale * S^T q.
// prefill: chunk form, tiles of SALA_TILE. verify: one fma per element and token, in path order:
// S = fma(k, v, decay * S); first replays the pending path and stores that state.
typedef struct sala_gla_args {
    const sala_dims *dims;
    const sala_rows *rows;
    sala_weight q_norm, k_norm; // [lin_dim] or data NULL
    const float *cos_sin;       // [rows, lin_dim/2, 2] or NULL
    const float *decay;         // [lin_heads] exp(-slope)
    const float *slopes;        // [lin_heads]
    sala_act *q;           // [rows, lin_heads, lin_dim] raw (the CPU norms and rotates in place)
    const sala_act *raw_k; // [rows, lin_kv_heads, lin_dim] as projected
    sala_act *k;           // [rows, lin_kv_heads, lin_dim] out: normed and rotated
    const sala_act *v;     // [rows, lin_kv_heads, lin_dim]
    float *state;          // [slots, lin_heads, lin_dim, lin_dim] this layer's pool
    const sala_act *pending_k,
        *pending_v; // [slots, SALA_MAX_PATH, lin_kv_heads, lin_dim] this layer's pool
    sala_act *o;    // [rows, lin_heads, lin_dim]; NULL: only fold the pending paths into the states
    // GPU: states of branches that wait at once, 0: the trees are chains. A row whose parent is not the
    // row before it begins at the state in place fork & 15 (counted from 1, 0: it goes on), a row
    // that others grow from than the next leaves its state in place fork >> 4.
    int32_t tree_slots;
    const int32_t *forks; // [rows]
    // Prefill: states that others will go on from. Behind so many rows, ascending, each the end of a
    // tile, the state of all heads is copied there.
    int32_t copies;
    int32_t copy_after[SALA_GLA_COPIES];
    float *copy_to[SALA_GLA_COPIES]; // [lin_heads, lin_dim, lin_dim]
} sala_gla_args;

// Prefill: copy k, v of the rows into pages; then the compressed rows that the chunk's tokens
// complete. Means are summed in position order.
typedef struct sala_store_args {
    const sala_dims *dims;
    const sala_rows *rows;
    sala_nodes nodes; // k, v of the rows
    sala_pages pages;
} sala_store_args;

// Which blocks a row attends to, one list per K/V head (model.md 8). count: -1 where the row is
// dense. Verify first makes the compressed rows that nodes complete: nodes.tier1, nodes.tier2.
// A GPU runs three kernels: normalisers from tier 2, block scores from tier 1, the top k. In prefill
// the first two are one, which keeps the normalisers to itself.
typedef struct sala_select_args {
    const sala_dims *dims;
    const sala_rows *rows;
    const sala_act *q; // [rows, heads, head_dim]
    sala_nodes nodes;
    sala_pages pages;
    int32_t *blocks; // [rows, kv_heads, top_k] ascending
    int32_t *count;  // [rows, kv_heads]
    // GPU only
    int32_t capacity;  // blocks that the longest context has
    float *normaliser; // verify: [rows, heads, ceil(capacity / SALA_SELECT_PART), 2] maximum, sum
    float *score;      // [rows, kv_heads, capacity]
} sala_select_args;

// Softmax attention over the listed blocks (all blocks where count is -1), tokens u <= position.
// Blocks ascending, one running-softmax step a block. Then o = o * sigmoid(gate) (if given). A GPU
// runs two kernels for verify rows: parts of SALA_ATTEND_PART list entries, then their combination in
// list order; and two for prefill rows, one for dense rows, one for those with a list.
typedef struct sala_attend_args {
    const sala_dims *dims;
    const sala_rows *rows;
    const sala_act *q; // [rows, heads, head_dim]
    sala_nodes nodes;
    sala_pages pages;
    const int32_t *blocks, *count; // as sala_select_args
    const sala_act *gate;          // [rows, heads * head_dim] or NULL
    sala_act *o;                   // [rows, heads, head_dim]
    // GPU only
    int32_t parts; // of the longest list: max(top_k, blocks of a dense row) / SALA_ATTEND_PART
    float *part_o; // [rows, parts, heads, head_dim] sums of exp(s - max) v
    float *part_max_sum; // [rows, parts, heads, 2]
} sala_attend_args;

// y = RMSNorm(o) * weight (if given) * sigmoid(gate) (if given)
typedef struct sala_gate_args {
    int32_t rows, width;
    float eps;
    sala_weight norm;     // [width] or data NULL
    const sala_act *gate; // [rows, width] or NULL
    const sala_act *o;    // [rows, width]
    sala_act *y;          // [rows, width] on a GPU not o, which other blocks still read
} sala_gate_args;

// The row of the tree below `row` whose token it is, or -1.
SALA_FN int32_t sala_child_row(const sala_rows *rows, const sala_seq *s, int32_t row,
                               int32_t token) {
    int32_t depth = rows->position[row] - s->stored;
    for (int32_t r = s->first_row + 1; r < s->first_row + s->rows; r++)
        if (rows->token[r] == token && rows->position[r] - s->stored == depth + 1 &&
            rows->path[r * SALA_MAX_PATH + depth] == row)
            return r;
    return -1;
}

// Which path of each tree the choices go along: from a row to its child that has the token chosen
// there, as long as there is one. Choices of other rows are not read.
typedef struct sala_accept_args {
    const sala_rows *rows;  // at most SALA_MAX_NODES of a sequence
    const int32_t *chosen;  // [rows] -1: unusable logits
    int32_t *accepted;      // [seq_count] nodes of the path, the root included
    int32_t *accepted_rows; // [seq_count, SALA_MAX_PATH] the path, root first
} sala_accept_args;

// After the tokens are chosen. accepted[s] nodes of sequence s become part of it, listed root first
// in accepted_rows[s]: sparse layers copy K, V and completed rows into pages, lightning layers move
// k, v to the pending path. One call for all layers.
typedef struct sala_commit_args {
    const sala_dims *dims;
    const sala_rows *rows;
    int32_t sparse_layers, lightning_layers, slots, node_rows;
    const int32_t *accepted;         // [seq_count]
    const int32_t *accepted_rows;    // [seq_count, SALA_MAX_PATH]
    const sala_nodes *nodes;         // [sparse_layers]
    const sala_pages *pages;         // [sparse_layers]
    const sala_act *node_k, *node_v; // [lightning_layers, node_rows, lin_kv_heads, lin_dim]
    sala_act *pending_k,
        *pending_v; // [lightning_layers, slots, SALA_MAX_PATH, lin_kv_heads, lin_dim]
} sala_commit_args;

// The operations in the order in which a token meets them: X(name, args). The argument struct is
// sala_<args>_args; the C body is sala__op_<name>.
#define SALA_OPERATIONS(X)                                                                         \
    X(embed, embed)                                                                                \
    X(rope_table, rope)                                                                            \
    X(norm, norm)                                                                                  \
    X(gemm, gemm)                                                                                  \
    X(qk_norm_rope, qk)                                                                            \
    X(gla_prefill, gla)                                                                            \
    X(gla_verify, gla)                                                                             \
    X(gate, gate)                                                                                  \
    X(quantize, quantize)                                                                          \
    X(store_prefill, store)                                                                        \
    X(select, select)                                                                              \
    X(attend, attend)                                                                              \
    X(gemm_norm, gemm_norm)                                                                        \
    X(gemm_swiglu, gemm_swiglu)                                                                    \
    X(accept, accept)                                                                              \
    X(commit, commit)                                                                              \
    X(capture, capture)                                                                            \
    X(keep, keep)                                                                                  \
    X(gather, gather)                                                                              \
    X(draft_input, draft_input)                                                                    \
    X(draft_turn, draft_turn)                                                                      \
    X(draft_top, draft_top)                                                                        \
    X(draft_grow, draft_grow)

// ---- sampling: arithmetic that both sides must share ----
// and that of synthetic weights: the same bits on every machine, so no fma and no library function.

// Order of floats as order of integers; -0 becomes +0. NaN lies beyond both infinities.
SALA_FN int32_t sala_float_order(float x) {
    uint32_t u = sala_f32_bits(x + 0.0f);
    return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) & 0x7FFFFFFFu));
}

// The random 64 bits of (seed, position): Philox4x32, ten rounds, the first two of its four words.
SALA_FN uint64_t sala_random(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (uint64_t)c[1] << 32 | c[0];
}

// floor(r * n / 2^64): a number below n from 64 random bits.
SALA_FN uint64_t sala_scale_random(uint64_t r, uint64_t n) {
#ifdef __CUDACC__
    return __umul64hi(r, n);
#else
    __extension__ typedef unsigned __int128 wide;
    return (uint64_t)((wide)r * n >> 64);
#endif
}

// exp(x) for x <= 0, within 2 units in the last place; below -87 as at -87. Cody-Waite reduction
// (the first product is exact) and Cephes' polynomial: any compiler vectorises it.
SALA_FN float sala_exp_negative(float x) {
    float y = x > -87.0f ? x : -87.0f;
    float shifted = y * 1.44269504f + 12582912.0f; // + 1.5 * 2^23 rounds to an integer
    float n = shifted - 12582912.0f;
    float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return p * sala_bits_f32((uint32_t)((int32_t)n + 127) << 23);
}

// The weight of a token in units of 2^-30; y = (its logit - the largest) / temperature.
SALA_FN int32_t sala_draw_weight(float y) {
    return (int32_t)(sala_exp_negative(y) * 1073741824.0f + 0.5f);
}

// Only a bias of -infinity forbids a token: arithmetic alone never makes a finite logit infinite.
SALA_FN float sala_finite(float x) { // NaN stays
    const float most = 0x1.fffffep127f;
    return x > most ? most : x < -most ? -most : x;
}

// Bias (infinity: none), repetition, presence and frequency for one token, which was `count` / 2
// times in the output; `count` is odd if it is in the prompt.
SALA_FN float sala_adjust(float x, float bias, int32_t count, float repetition, float presence,
                          float frequency) {
    const float infinity = sala_bits_f32(0x7F800000u);
    if (x == -infinity || bias == -infinity) return -infinity;
    if (bias < infinity) x = sala_finite(x + bias);
    if (count) x = sala_finite(x > 0 ? x / repetition : x * repetition);
    if (count > 1) x = sala_finite(x - (presence + (float)(count / 2) * frequency));
    return x;
}

// The weight that top-p asks for, of tokens that have the weight `of`; at most `available`, which
// only rounding can exceed: a double holds sums of 2^23 tokens exactly.
SALA_FN uint64_t sala_top_p_need(float top_p, uint64_t of, uint64_t available) {
    double target = (double)top_p * (double)of;
    uint64_t need = (uint64_t)target;
    if ((double)need < target || need == 0) need++;
    return need < available ? need : available;
}

SALA_FN uint64_t sala_mix64(uint64_t z) { // splitmix64's output function
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Four elements of a synthetic tensor share a hash; this is one of them: BF16(offset + scale * u),
// u uniform in (-1, 1).
SALA_FN uint64_t sala_synthetic_hash(uint64_t seed, uint64_t element) {
    return sala_mix64(seed + element / 4 * 0x9E3779B97F4A7C15u);
}

SALA_FN uint16_t sala_synthetic(uint64_t hash, uint64_t element, float scale, float offset) {
    float u = ((float)(short)(hash >> element % 4 * 16) + 0.5f) * (1.0f / 32768.0f);
    return sala_f32_bf16(offset + scale * u);
}

// The same in 4 bits: the codes of 16 consecutive k of a row (`element`: a multiple of 16), k 0 lowest,
// and the scale of a group that begins there: E4M3 of 64 .. 240, or BF16 of 1 .. 2. INT4 is
// symmetric: no code 0.
SALA_FN uint64_t sala_synthetic_codes(uint64_t seed, uint64_t element, int32_t format) {
    uint64_t hash = sala_synthetic_hash(seed, element / 4), any = hash | hash >> 1;
    any = (any | any >> 2) & 0x1111111111111111u; // of a code: is a bit set?
    return format == SALA_INT4 ? hash | (any ^ 0x1111111111111111u) << 3 : hash;
}

SALA_FN uint16_t sala_synthetic_scale(uint64_t seed, uint64_t element, int32_t format) {
    uint64_t hash = sala_mix64(sala_synthetic_hash(seed, element / 4));
    return (uint16_t)(format == SALA_INT4 ? 0x3F80u + (hash & 0x7Fu) : 0x68u + (hash & 0xFu));
}

// ---- the draft head (speculation.md 1 and 2): what its layer does not share with the model's ----

#define SALA_DRAFT_DEBT 256 // tokens of a sequence whose features can wait for the head
#define SALA_CANDIDATES (SALA_MAX_TOPK + (SALA_MAX_PATH - 2) * SALA_MAX_TOPK * SALA_MAX_TOPK)

// features[r, third] = x[r], or RMSNorm(x[r]) * norm: what one layer of the target leaves for the head.
typedef struct sala_capture_args {
    int32_t rows, width, third;
    float eps;
    const sala_act *x;  // [rows, width]
    sala_weight norm;   // [width] or data NULL
    sala_act *features; // [rows, 3, width]
} sala_capture_args;

// Features of the accepted nodes to where they wait: debt[place of the slot, position % SALA_DRAFT_DEBT].
typedef struct sala_keep_args {
    const sala_rows *rows;
    int32_t width;                // 3 hidden
    const int32_t *accepted;      // as in sala_commit_args
    const int32_t *accepted_rows; // [seq_count, SALA_MAX_PATH]
    const int32_t *place;         // [slots] of the head's pools, -1: it does not know this sequence
    const sala_act *features;     // [rows, width]
    sala_act *debt;               // [places, SALA_DRAFT_DEBT, width]
} sala_keep_args;

// to[r] = features[from[r]]; rows with a negative `from` are left alone.
typedef struct sala_gather_args {
    int32_t rows, width;
    const int32_t *from;      // [rows]
    const sala_act *features; // [.., width]
    sala_act *to;             // [rows, width]
} sala_gather_args;

// q and k turned in place, see sala_qk_args; then, if there are pages, keys and values to those, but for
// rows with a negative seq, which are padding. A GPU takes all three from `parts` (see sala_gemm_args),
// columns k, v, q.
typedef struct sala_draft_turn_args {
    const sala_dims *dims;
    const sala_rows *rows;
    int32_t count, heads, splits; // rows; of q, 0: there is none
    const float *parts;
    const float *cos_sin; // [count, head_dim/2, 2]
    sala_act *q;          // [count, heads, head_dim]
    sala_act *k, *v;      // [count, kv_heads, head_dim]
    sala_pages pages;     // k, v or NULL
} sala_draft_turn_args;

// How trees grow. Step 0 is the last token of each sequence, rows 0 .. seqs-1; a later step d, 1 ..
// depth-1, has the `topk` best candidates that the step before it made, the best first. Each row makes
// `topk` candidates. Rows of all steps are numbered together, see sala_growth_row.
typedef struct sala_growth {
    int32_t seqs, topk, depth;
    int32_t first;        // row of step 1
    const int32_t *limit; // [seqs, 2] depth and nodes (root included) of each tree
    int32_t *token;       // [rows]
    int32_t *parent;      // [rows] row that made it a candidate
    int32_t *flat;        // [rows] its number among all candidates of its sequence
    float *score;         // [rows] log of the probability of its path
    int32_t *path;        // [rows, SALA_MAX_PATH] rows of step 1 .. its own
    int32_t *best_token;  // [rows, topk] candidates: the target's ids, -1: none
    float *best_score;    // [rows, topk] log of the probability
} sala_growth;

// Rows of a pass of the head: u = [RMSNorm_in(E[token]); RMSNorm_hid(f)], x = f (+ bias). Step 0: f is
// x itself, on a GPU the sum of parts. Later: the rows are first chosen, f is the parent's.
typedef struct sala_draft_input_args {
    int32_t rows, width, step;
    float eps;
    sala_weight embed, input_norm, hidden_norm, bias; // bias: [width] or data NULL
    const sala_act *f;  // [.., width] x of the step before; NULL: step 0
    const float *parts; // [splits, rows, width] of step 0
    int32_t splits;
    sala_act *x; // [rows, width]
    sala_act *u; // [rows, 2 width]
    sala_growth growth;
} sala_draft_input_args;

// The topk best logits of each row: log softmax, and the target's ids; the lower one first where two are
// equal. NaN or infinity in a row: it has no candidates.
#define SALA_TOP_TILE 256 // logits that a warp looks at
typedef struct sala_top { // of a tile: keys as sala_top_key, the best first
    float max, sum;       // of exp(x - max)
    uint64_t key[SALA_MAX_TOPK];
} sala_top;

typedef struct sala_draft_top_args {
    int32_t rows, vocab, topk;
    const float *logits;       // [rows, vocab]
    const int32_t *target_ids; // [vocab] or NULL: the same
    int32_t *best_token;       // [rows, topk]
    float *best_score;         // [rows, topk]
    sala_top *tops;            // GPU: [rows, tiles] scratch
    int32_t *arrivals;         // GPU: [rows] zero before and after
} sala_draft_top_args;

// Of all candidates of a sequence the best, as a tree.
typedef struct sala_draft_grow_args {
    sala_growth growth;
    sala_tree *trees; // [seqs]
} sala_draft_grow_args;

SALA_FN int32_t sala_growth_row(const sala_growth *g, int32_t step, int32_t seq, int32_t m) {
    return step == 0 ? seq : g->first + ((step - 1) * g->seqs + seq) * g->topk + m;
}

SALA_FN int32_t sala_growth_made(const sala_growth *g, int32_t step) { // candidates of a sequence
    return step == 0 ? g->topk : g->topk * g->topk;
}

// The row that makes candidate c of a step, and its place in best_token and best_score.
SALA_FN int32_t sala_growth_maker(const sala_growth *g, int32_t step, int32_t seq, int32_t c) {
    return sala_growth_row(g, step, seq, c / g->topk);
}

// Its score: -infinity if there is none.
SALA_FN float sala_growth_score(const sala_growth *g, int32_t step, int32_t seq, int32_t c) {
    int32_t row = sala_growth_maker(g, step, seq, c), at = row * g->topk + c % g->topk;
    if (g->best_token[at] < 0) return sala_bits_f32(0xFF800000u);
    return (step == 0 ? 0.0f : g->score[row]) + g->best_score[at];
}

// How many of n candidates are before candidate c: the lower one where two are equal, so that a child,
// which never scores above its parent, is never chosen without it.
SALA_FN int32_t sala_growth_rank(const float *score, int32_t n, int32_t c) {
    int32_t rank = 0;
    for (int32_t i = 0; i < n; i++) rank += score[i] > score[c] || (score[i] == score[c] && i < c);
    return rank;
}

// Row m of a step from 1 on becomes candidate c of the step before.
SALA_FN void sala_growth_take(const sala_growth *g, int32_t step, int32_t seq, int32_t m, int32_t c,
                              float score) {
    int32_t row = sala_growth_row(g, step, seq, m), made = sala_growth_made(g, 0);
    int32_t maker = sala_growth_maker(g, step - 1, seq, c);
    int32_t token = g->best_token[maker * g->topk + c % g->topk];
    g->token[row] = token < 0 ? 0 : token;
    g->parent[row] = maker;
    g->flat[row] = step == 1 ? c : made + (step - 2) * made * made + c;
    g->score[row] = score;
    for (int32_t d = 1; d < step; d++)
        g->path[row * SALA_MAX_PATH + d - 1] = g->path[maker * SALA_MAX_PATH + d - 1];
    g->path[row * SALA_MAX_PATH + step - 1] = row;
}

SALA_FN int32_t sala_growth_all(const sala_growth *g) { // candidates of all steps of a sequence
    return g->topk + (g->depth - 1) * g->topk * g->topk;
}

SALA_FN int32_t sala_growth_step(const sala_growth *g, int32_t flat) { // that made it
    return flat < g->topk ? 0 : 1 + (flat - g->topk) / (g->topk * g->topk);
}

SALA_FN int32_t sala_growth_local(const sala_growth *g, int32_t flat) { // its number in that step
    return flat < g->topk ? flat : (flat - g->topk) % (g->topk * g->topk);
}

// Score of candidate `flat` of all steps for the tree.
SALA_FN float sala_growth_last(const sala_growth *g, int32_t seq, int32_t flat) {
    int32_t step = sala_growth_step(g, flat);
    if (step >= g->limit[2 * seq]) return sala_bits_f32(0xFF800000u);
    return sala_growth_score(g, step, seq, sala_growth_local(g, flat));
}

// Node `at` of a tree becomes this candidate; place[flat] is the node of a chosen one.
SALA_FN void sala_growth_node(const sala_growth *g, int32_t seq, int32_t flat, int32_t at,
                              float score, const int32_t *place, sala_tree *tree) {
    int32_t step = sala_growth_step(g, flat), c = sala_growth_local(g, flat);
    int32_t maker = sala_growth_maker(g, step, seq, c);
    tree->token[at] = g->best_token[maker * g->topk + c % g->topk];
    tree->parent[at] = step == 0 ? 0 : place[g->flat[maker]];
    tree->depth[at] = step + 1;
    tree->score[at] = score;
}

// A key of its own for each token, larger for larger logits and, of equal ones, for lower ids. Its upper
// half is 0 for -infinity, and at least SALA_TOP_UNUSABLE for infinity and NaN.
#define SALA_TOP_UNUSABLE 0xFF000001u
SALA_FN uint64_t sala_top_key(float x, int32_t id) {
    uint32_t order = (uint32_t)sala_float_order(x) - 0x807FFFFFu;
    return (uint64_t)order << 32 | (uint32_t)~id;
}

SALA_FN float sala_top_value(uint64_t key) {
    uint32_t order = (uint32_t)(key >> 32) + 0x807FFFFFu;
    return sala_bits_f32(order ^ (order >> 31 ? 0x7FFFFFFFu : 0));
}

// Candidate j of row r from its key; `normaliser`: max + log of the sum. Rounding makes nothing certain.
SALA_FN void sala_top_put(const sala_draft_top_args *a, int64_t r, int32_t j, uint64_t key,
                          uint64_t best, float normaliser) {
    int32_t usable = best >> 32 < SALA_TOP_UNUSABLE && key >> 32 > 0, id = (int32_t) ~(uint32_t)key;
    float score = sala_top_value(key) - normaliser;
    a->best_token[r * a->topk + j] = !usable ? -1 : a->target_ids ? a->target_ids[id] : id;
    a->best_score[r * a->topk + j] = !usable ? 0 : score < 0 ? score : 0;
}

// ---- GPU only ----

// How a matrix [n, k] lies in GPU memory: tiles of 64 rows x 64 k, 8 KiB each, all tiles of the
// same k beside each other, so that blocks which walk along k together read one stretch of memory.
// Inside, 16 x 16 elements in the order in which the lanes of a warp want them as the A operand of
// mma.m16n8k16, 16 bytes a lane. Rows are padded with zeros to a multiple of SALA_GEMM_ROWS, k is a
// multiple of 64. In a run of 32 k, lane c of a quad holds k 8c .. 8c+7, so that the other operand
// is 16 contiguous bytes of a row of x: the dot product does not care about the order in the run.
SALA_FN int64_t sala_packed(int32_t n, int32_t k, int32_t rows) { // index of element (n, k) of rows
    int32_t lane = (n & 7) * 4 + (k >> 3 & 3), piece = k & 7; // piece: 4 * step + 2 * half + low
    int64_t stage = (int64_t)(k >> 6) * ((rows + 63) >> 6) + (n >> 6);
    int32_t tile = (n >> 4 & 3) * 4 + (k >> 5 & 1) * 2 + (piece >> 2);
    return stage * 4096 + tile * 256 + lane * 8 + (piece >> 1 & 1) * 4 + (n >> 3 & 1) * 2 +
           (piece & 1);
}

// gate and up of an MLP as one packed matrix of 2 * ffn rows: eight rows of gate, eight of up, ...
SALA_FN int32_t sala_packed_pair(int32_t n, int32_t is_up) { // row of the pair that holds row n
    return (n >> 3) * 16 + is_up * 8 + (n & 7);
}

// A 4-bit matrix: the same tiles in the same order, a block of SALA_BLOCK4 bytes each: 2 KiB of codes,
// then their scales, so that one stretch of memory feeds a stage. A lane's 16 bytes of a 16 x 64 tile
// are four words of eight codes, k 8c .. 8c+7 of: row g and g + 8 of the first 32 k, then of the second.
// These are the words a0 .. a3 of the FP4 mma.m16n8k64. The order of the eight in a word is that of
// sala_code_bits. alpha is an array beside it, padded as the rows are; of a pair, in the pair's order.
#define SALA_BLOCK4 2304
#define SALA_BLOCK4_BIAS 2560 // INT4 with groups of 32 and zeros
SALA_FN int64_t sala_packed4(int32_t n, int32_t k, int32_t rows,
                             int32_t block) { // byte of the word
    int32_t lane = (n & 7) * 4 + (k >> 3 & 3);
    int64_t stage = (int64_t)(k >> 6) * ((rows + 63) >> 6) + (n >> 6);
    return stage * block + (n >> 4 & 3) * 512 + lane * 16 + (k >> 5 & 1) * 8 + (n >> 3 & 1) * 4;
}

// Where the bits of a code lie in its word is ours to choose. Native: as the FP4 MMA wants them, where
// there is one. Spread: in every half of a word, shifts bring three codes one after the other to where
// a BF16 has its sign (bit 15), the end of its exponent and the start of its mantissa (8, 7, 6); the
// fourth gets what is left, halves changed. Halves: INT4, even k in the low half.
enum { SALA_NATIVE, SALA_SPREAD, SALA_HALVES };
SALA_FN int32_t sala_code_order(int32_t format, int32_t major) { // major: of compute capability
    return format == SALA_INT4 ? SALA_HALVES : major >= 12 ? SALA_NATIVE : SALA_SPREAD;
}

// The bits of code i (k & 7) in its word.
SALA_FN uint32_t sala_code_bits(int32_t order, int32_t i, uint32_t code) {
    if (order == SALA_NATIVE) return code << i * 4;
    if (order == SALA_HALVES) return code << (i >> 1) * 4 << (i & 1) * 16;
    uint32_t sign = code >> 3, low = code & 7;
    if (i < 6) return (sign << 15 | low << 6) >> (i >> 1) * 3 << (i & 1) * 16;
    // 8, 13 and 18 to the left, into the other half: 14 -> 6, 10, 11 -> 7, 8, 13 -> 15
    return (sign << 13 | (low & 1) << 14 | (low & 6) << 9) << (i & 1 ? 0 : 16);
}

// Eight codes in this order from their order in a file (code i in bits 4i .. 4i+3), and back.
SALA_FN uint32_t sala_nibbles_in(int32_t order, uint32_t codes) {
    uint32_t word = 0;
    for (int32_t i = 0; i < 8; i++) word |= sala_code_bits(order, i, codes >> i * 4 & 15);
    return word;
}

SALA_FN uint32_t sala_nibbles_out(int32_t order, uint32_t word) {
    uint32_t codes = 0;
    for (int32_t i = 0; i < 8; i++)
        for (uint32_t bit = 1; bit < 16; bit *= 2)
            if (word & sala_code_bits(order, i, bit)) codes |= bit << i * 4;
    return codes;
}

// Bytes of a block; the codes of a group of `zeros` are not all 8. (A GPU's sala_weight has a `zero`
// other than NULL only to say that.)
SALA_FN int32_t sala_block4(int32_t format, int32_t group, int32_t zeros) {
    return format == SALA_INT4 && group == 32 && zeros ? SALA_BLOCK4_BIAS : SALA_BLOCK4;
}

// Byte of the scales of row n in its block: a word. NVFP4: the E4M3 of the four groups of 16 k. INT4:
// two BF16, the scales of the two groups of 32 k or, where groups are larger, the scale and the bias
// -(128 + zero). In blocks of SALA_BLOCK4_BIAS the word 256 bytes further has both groups' biases.
SALA_FN int32_t sala_scale_word(int32_t n) {
    return 2048 + ((n >> 4 & 3) * 8 + (n & 7)) * 8 + (n >> 3 & 1) * 4;
}

// Where element (key, column) of a 128 x 128 lightning state lies in GPU memory: slices of 16
// columns, each what one block works on.
#define SALA_GLA_COLUMNS 16
SALA_FN int32_t sala_state_place(int32_t key, int32_t column) {
    return (column / SALA_GLA_COLUMNS * 128 + key) * SALA_GLA_COLUMNS + column % SALA_GLA_COLUMNS;
}

#define SALA_GEMM_THREADS 128
#define SALA_GEMM_ROWS 64   // rows of w a block takes at a time
#define SALA_GEMM_TOKENS 64 // and rows of x
#define SALA_GEMM_STAGES 6  // of 64 k each, in shared memory
#define SALA_GEMM_STAGE ((SALA_GEMM_ROWS + SALA_GEMM_TOKENS) * 128) // bytes
#define SALA_GEMM_SHARED (SALA_GEMM_STAGES * SALA_GEMM_STAGE)

#define SALA_GEMM4_THREADS 256 // with weights of 4 bits
#define SALA_GEMM4_NARROW 512  // and up to 16 rows of x
#define SALA_GEMM4_ROWS 128    // rows of w a block takes at a time
#define SALA_GEMM4_SHARED (99 << 10)
#ifndef SALA_TEAMS_SHARED // with more than 16 rows of x; the host says what the device has
#define SALA_TEAMS_SHARED SALA_GEMM4_SHARED
#endif
#define SALA_GEMM4_TOKENS(shared) ((shared) < 160 << 10 ? 48 : 64) // rows of x at a time
#define SALA_BROAD_TOKENS 96 // rows of x at a time where that is faster
#define SALA_ROW_K 4096      // NVFP4, one or two rows of x: most columns of x that a block keeps

// Into how many sums of consecutive k a block-spanning product is split, by the matrix's shape alone,
// so that about 256 blocks share it. A row's result is the sum of the splits in order, a split's the
// sum of its chunks of SALA_GEMM_K in order (4 bits: of its quarters, each one chain of products).
SALA_FN int32_t sala_gemm_splits(int32_t n, int32_t k) {
    int32_t tiles = (n + SALA_GEMM_ROWS - 1) / SALA_GEMM_ROWS, splits = 1;
    while (splits < 8 && tiles * splits * 2 <= 288 && k % (SALA_GEMM_K * splits * 2) == 0)
        splits *= 2;
    return splits;
}

// The kernel of all products: sala_gemm_args as they are, gate and up with SwiGLU, or with a norm.
enum { SALA_PRODUCT_PLAIN, SALA_PRODUCT_SWIGLU, SALA_PRODUCT_NORM, SALA_PRODUCT_PARTS };
typedef struct sala_product_args {
    int32_t kind;
    int32_t splits, row_tiles, items; // items: tiles * splits * row_tiles
    int32_t tiles[SALA_GEMM_MAX]; // of SALA_GEMM_ROWS (or a prefill shape's) rows, of each weight
    int32_t tokens, depth;        // rows of x of an item; stages of 64 k
    int32_t shape;                // prefill: index into SALA_PREFILL_SHAPES
    int32_t whole, due;           // one or two rows of x: see sala_row_run
    sala_gemm_args gemm;
    sala_norm_args norm; // this and what follows as in sala_gemm_norm_args
    float *partial;
    int32_t *arrivals;
} sala_product_args;

// Tiles of prefill's products: X(number, tall, wide, clocks). Four warps, two by two, of 16 * tall
// weight rows and 8 * wide rows of x each; as many stages of 64 k as there is room for. clocks: of a
// multiprocessor that takes two tiles 64 k further, on an H200; the launcher compares them.
#define SALA_PREFILL_SHAPES(X)                                                                     \
    X(0, 4, 8, 2130)                                                                               \
    X(1, 4, 4, 1343)                                                                               \
    X(2, 2, 4, 818)                                                                                \
    X(3, 2, 2, 626)
#define SALA_PREFILL_THREADS 128
#define SALA_PREFILL_BAND 2048 // rows of x that are multiplied with all weights before the next
#define SALA_PREFILL_SHARED (96 << 10)
#define SALA_PREFILL_STAGE(tall, wide) (((tall)*32 + (wide)*16) * 128) // bytes
#define SALA_PREFILL_STAGES(tall, wide) (SALA_PREFILL_SHARED / SALA_PREFILL_STAGE(tall, wide))

// The same tiles of products in 4 bits (section 21 of sala.cu). A stage: blocks of weights as they lie,
// the two halves of the codes of 64 k of each row of x, 16 bytes each, and its word of scales.
#define SALA_FP4_STAGES 5
#define SALA_FP4_STAGE(tall, wide) ((tall)*SALA_BLOCK4 / 2 + (wide)*16 * 36) // bytes
#define SALA_FP4_SHARED (SALA_FP4_STAGES * SALA_FP4_STAGE(4, 8))

#define SALA_SELECT_PART 128 // rows of tier 2, or blocks, that one unit of block selection takes
#define SALA_ATTEND_PART 2   // listed blocks that one unit of attention takes

// Row-major matrix -> packed.
typedef struct sala_pack_args {
    const void *from;          // [rows, k] as in the file
    uint16_t *to;              // BF16, packed
    int32_t format;            // of `from`: SALA_BF16 ...
    int32_t first, rows, n, k; // rows first .. first+rows-1 of n; the last call zeroes the padding
    int32_t pair;              // 0: a matrix; 1: gate, 2: up of a pair; -1: row-major, not packed
} sala_pack_args;

// Row-major 4-bit matrix -> blocks of sala_packed4. Rows first (a multiple of 16) .. first+rows-1 of n,
// whose codes, scales and zeros begin at the pointers; the last call zeroes the padding.
typedef struct sala_pack4_args {
    const uint8_t *codes; // [rows, k/2]
    const void *scales;   // [rows, k/group]
    const uint8_t *zeros; // [rows, k/group] or NULL
    uint8_t *to;
    int32_t format, group; // of a sala_weight
    int32_t block;         // SALA_BLOCK4 or SALA_BLOCK4_BIAS
    int32_t first, rows, n, k;
    int32_t pair; // 0: a matrix; 1: gate, 2: up of a pair
} sala_pack4_args;

// Blocks of sala_packed4 -> packed BF16 (see sala_packed), without alpha: the same numbers that a
// verify product multiplies with.
typedef struct sala_unpack4_args {
    const uint8_t *from;
    uint16_t *to;
    int32_t format, group, block;
    int32_t n, k; // rows of the (padded) matrix or pair
} sala_unpack4_args;

// Synthetic 4-bit weights: the codes and scales that sala__synthetic_fill4 gives the same tensor.
typedef struct sala_fill4_args {
    uint8_t *to;
    uint64_t seed;
    int32_t format, group, block; // of a sala_weight whose zero is NULL
    int32_t n, k;
    int32_t pair; // as in sala_pack4_args
} sala_fill4_args;

// Synthetic weights: the numbers that sala__synthetic_fill gives the same tensor. Element (n, k)
// has number n * columns + k.
typedef struct sala_fill_args {
    uint16_t *to;
    uint64_t seed;
    float scale, offset;
    int32_t n, k;
    int32_t layout; // 0: row-major, 1: packed, 2: gate, 3: up of a packed pair
} sala_fill_args;

typedef struct sala_read_args { // a benchmark's yardstick: read it all
    const void *from;
    int64_t bytes;
    uint32_t *out; // [1] written when the data is very odd
} sala_read_args;

// Choosing tokens: the steps of sala.h section [6], the same token for the same logits, bit for bit.
// Logits and sampling of padding rows are read, but not used.
typedef struct sala_sampling { // of one row
    float temperature;         // 0: greedy
    float top_p, min_p_log, repetition, presence, frequency;
    int32_t top_k;
    int32_t slot;      // of counts and biases; -1: nothing is wanted of this row
    int32_t penalties; // counts are in use
    int32_t biased;    // biases are in use
    int32_t ahead;     // nodes at the end of the row's path, itself included, not yet in counts
    int32_t forced; // the token that is chosen whatever the logits say (if they are numbers), or -1
    uint64_t random; // sala_random of the request's seed and the token's position
} sala_sampling;

#define SALA_SAMPLE_BINS 1024 // of a histogram: as many as the block has threads
#define SALA_SAMPLE_TILE 4096 // tokens that a block looks at together for the largest
#define SALA_SAMPLE_SHARED (13 * 1024)

SALA_FN int32_t sala_sample_stride(int32_t vocab) { // of rows that are read 16 bytes at a time
    return (vocab + 3) & ~3;
}

typedef struct sala_sample_args {
    const sala_rows *rows;
    int32_t vocab;
    const float *logits;           // [rows, vocab]
    const sala_sampling *sampling; // [rows]
    const int32_t *counts;         // [slots, vocab] see sala__sampler
    const float *biases;           // [slots, vocab]
    float *weight;                 // [rows, sala_sample_stride(vocab)] scratch
    int32_t *arrivals;             // [rows] zero before and after
    int32_t *token;                // [rows] out, -1: unusable logits
} sala_sample_args;

// All kernels: X(name, args, threads, unit). The kernel is sala_<name>; a unit is what NVRTC compiles
// by itself, side by side with the others: 0 what decoding needs, 1 and 2 what prefill does beside; and
// only for models that have such weights: 3 what is common to 4 bits, 4 products of NVFP4 and 5 of INT4
// in verify, 6 W4A4 in prefill. 7 is the draft head's, compiled with its dims as the others it uses are.
#define SALA_KERNELS(X)                                                                            \
    X(pack, sala_pack_args, 256, 0)                                                                \
    X(fill, sala_fill_args, 256, 0)                                                                \
    X(read, sala_read_args, 256, 0)                                                                \
    X(embed, sala_embed_args, 256, 0)                                                              \
    X(rope_table, sala_rope_args, 64, 0)                                                           \
    X(norm, sala_norm_args, 128, 0)                                                                \
    X(gemm, sala_product_args, 128, 0)                                                             \
    X(qk_norm_rope, sala_qk_args, 128, 0)                                                          \
    X(gla_verify, sala_gla_args, 256, 0)                                                           \
    X(gate, sala_gate_args, 256, 0)                                                                \
    X(select_normaliser, sala_select_args, 256, 0)                                                 \
    X(select_score, sala_select_args, 256, 0)                                                      \
    X(select_top, sala_select_args, 1024, 0)                                                       \
    X(attend, sala_attend_args, 128, 0)                                                            \
    X(attend_trees, sala_attend_args, 128, 0)                                                      \
    X(attend_combine, sala_attend_args, 256, 0)                                                    \
    X(sample, sala_sample_args, 1024, 0)                                                           \
    X(accept, sala_accept_args, 32, 0)                                                             \
    X(commit, sala_commit_args, 128, 0)                                                            \
    X(prefill_gemm, sala_product_args, 128, 1)                                                     \
    X(prefill_gla, sala_gla_args, 320, 1)                                                          \
    X(prefill_store, sala_store_args, 256, 2)                                                      \
    X(prefill_score, sala_select_args, 256, 2)                                                     \
    X(prefill_dense, sala_attend_args, 128, 2)                                                     \
    X(prefill_sparse, sala_attend_args, 128, 2)                                                    \
    X(pack4, sala_pack4_args, 256, 3)                                                              \
    X(fill4, sala_fill4_args, 256, 3)                                                              \
    X(unpack4, sala_unpack4_args, 256, 3)                                                          \
    X(quantize, sala_quantize_args, 256, 3)                                                        \
    X(gemm_nvfp4, sala_product_args, 512, 4)                                                       \
    X(gemm_nvfp4_wide, sala_product_args, 256, 4)                                                  \
    X(gemm_nvfp4_broad, sala_product_args, 256, 4)                                                 \
    X(gemm_nvfp4_row, sala_product_args, 512, 4)                                                   \
    X(gemm_int4, sala_product_args, 512, 5)                                                        \
    X(gemm_int4_wide, sala_product_args, 256, 5)                                                   \
    X(gemm_int4_broad, sala_product_args, 256, 5)                                                  \
    X(prefill_fp4, sala_product_args, 128, 6)                                                      \
    X(norm_quant, sala_norm_args, 128, 6)                                                          \
    X(capture, sala_capture_args, 256, 7)                                                          \
    X(keep, sala_keep_args, 256, 7)                                                                \
    X(gather, sala_gather_args, 256, 7)                                                            \
    X(draft_input, sala_draft_input_args, 256, 7)                                                  \
    X(draft_turn, sala_draft_turn_args, 128, 7)                                                    \
    X(draft_top, sala_draft_top_args, 256, 7)                                                      \
    X(draft_grow, sala_draft_grow_args, 256, 7)

#endif // SALA_KERNELS_H
