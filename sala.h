/*  sala.h - runs MiniCPM-SALA, a hybrid of block-sparse and linear attention. C11 or C++17.

    In ONE source file, before any other include:

        #define SALA_IMPLEMENTATION
        #include "sala.h"

    and link with -lm -lpthread (and -ldl with glibc before 2.34). kernels.h and sala.cu, the source of
    the GPU's kernels, must lie beside this file, in the folder where the compiler runs or in one that
    -I names; the program carries them in itself. A whole program (tests/dropin.c compiles it as C and as C++):

        #define SALA_IMPLEMENTATION
        #include "sala.h"
        #include <stdio.h>
        #include <string.h>

        int main(void) {
            sala_error err;
            sala *s = sala_open("models/sala-tiny", NULL, &err);
            if (!s) return fprintf(stderr, "%s\n", err.text), 1;
            sala_request ask;
            memset(&ask, 0, sizeof ask); // zero means default
            ask.text = "Once upon a time there was a brave fox named Pip.";
            ask.max_tokens = 64;
            if (sala_submit(s, &ask, &err) < 0) return fprintf(stderr, "%s\n", err.text), 1;
            int more;
            while ((more = sala_step(s, &err)) > 0) {
                sala_event ev;
                while (sala_next_event(s, &ev)) fwrite(ev.text, 1, ev.text_bytes, stdout);
            }
            sala_close(s);
            printf("\n");
            return more < 0 ? fprintf(stderr, "%s\n", err.text), 1 : 0;
        }

    LIMITS
    - Models: MiniCPM-SALA checkpoints as Hugging Face folders (config.json, safetensors,
      tokenizer.json); BF16, F16 or F32 tensors, linear layers also in 4 bits: NVFP4 as ModelOpt and
      compressed-tensors write it, INT4 as GPTQ does. What is not understood is refused by name.
    - Little-endian 64-bit POSIX systems with GCC or Clang. Not Windows.
    - GPUs: NVIDIA, compute capability 8.0 or newer, driver 12.0 or newer, NVRTC as a library. Head
      width 128 and blocks of 32/16/64 as released; other shapes run on the CPU.
    - Compile with -march=native (or at least AVX2 + FMA): without hardware FMA every multiply-add
      is a call of fmaf() and everything is ten times slower. Never with -ffast-math (the header
      refuses it).
    - One engine is used from one thread at a time; several engines may live in one process.
    - Include sala.h before any system header, or compile with -std=gnu11: -std=c11 hides POSIX
      names.

    CONTENTS          find a section by its number, as "[4]"
      [1] public API          the whole contract; the rest is needed only to change or to understand
      --- below SALA_IMPLEMENTATION ---
      [2] base                errors, memory, strings, files
      [3] JSON                a small strict parser
      [4] checkpoint          safetensors, config.json, the model's shape
      [5] tokenizer           tokenizer.json: BPE with byte fallback; chat template
      [6] sampler             penalties, temperature, top-k/p, counter-based random numbers
      [7] CPU back end        threads, SIMD, one plain C body per operation: the readable definition
      [8] CUDA: the device    driver and NVRTC found at run time, compiling, the cache of kernels
      [9] CUDA: the kernels   launches of what stands in sala.cu, weights to the GPU
      [10] model and memory   weights bound by name, the plan of every byte, pages and slots
      [11] drafts             trees, n-gram chains, the EAGLE-3 head, what runs when
      [12] the loop           prefill, verify, events: one copy of the layer loop
      [13] sessions           a sequence to a file and back
*/
#ifndef SALA_H
#define SALA_H

#if defined(SALA_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE // POSIX names, and the affinity mask of the process
#endif
#include <stddef.h>
#include <stdint.h>

/* -----------------------------------------------------------------------------------------------
   [1] PUBLIC API

   Rules that hold for every function:
   - Functions that can fail take a sala_error (may be NULL) and return NULL or a negative SALA_E_*
     code; the error's text is one sentence that names the file, tensor or option at fault and what
     to do.
   - Nothing prints, nothing exits, there is no global state. Strings are UTF-8 and zero-terminated
     unless a length stands beside them. What the caller passes in is copied; what comes out as a
     pointer belongs to the engine and is valid until the time that its comment says.
   - Zero means default in every options field, so start from zeroed memory.
   -------------------------------------------------------------------------------------------- */

#define SALA_VERSION "0.8.0"
#define SALA_VERSION_NUMBER 800 // major * 10000 + minor * 100 + patch

#ifdef SALA_STATIC
#define SALA_API static __attribute__((unused))
#else
#define SALA_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sala sala; // an engine: one model on one device, and the sequences that live on it

enum {                    // error codes, also in sala_error.code
    SALA_E_ARGUMENT = -1, // an option or request field is wrong
    SALA_E_FILE = -2,     // a file is missing, unreadable, truncated or malformed
    SALA_E_MODEL = -3,    // the files are well-formed, but not a model that this engine runs
    SALA_E_MEMORY = -4,   // does not fit, or the allocator said no
    SALA_E_STATE = -5,    // the call does not fit the engine's present state
    SALA_E_DEVICE = -6    // the device is missing or failed
};

typedef struct sala_error {
    int code;        // SALA_E_*, 0 when there was no error
    char text[1020]; // one sentence, zero-terminated
} sala_error;

enum { SALA_LOG_INFO = 0, SALA_LOG_WARNING = 1 };

// Hooks. All may be NULL. `user` is handed back to each.
typedef struct sala_hooks {
    void *user;
    // Like realloc: size 0 frees and returns NULL, pointer NULL allocates. Memory of any use;
    // 16-byte aligned.
    void *(*allocate)(void *user, void *pointer, size_t size);
    // One line without newline: warnings (something odd in a file) and notes worth showing.
    void (*log)(void *user, int level, const char *line);
    // Called while sala_open, sala_save and sala_load work: what is done ("reading weights"), and how
    // far, 0..1.
    void (*progress)(void *user, const char *what, double fraction);
} sala_hooks;

typedef struct sala_options {
    const char *device; // "auto" (default: a GPU if one can be used, else the log says why not,
                        // if a driver is there), "cpu", "cuda" or "cuda:N"
    int threads;        // CPU threads; default: the processors this process may use
    int max_sequences;  // sequences resident at once, 1..256; default 8
    int64_t context;    // longest sequence in tokens; default 32768
    int64_t kv_tokens;  // tokens of KV cache for all sequences together; default: one full context
                        // and 4096 for each further sequence
    int64_t memory_limit; // bytes taken beyond the mapped weights, on a GPU with the weights;
                          // default: what is free
    int chunk;            // prefill chunk, a multiple of 64; default 2048
    int dense_len;     // sparse layers are dense below this many tokens; default: from the model;
                       // SALA_DENSE_NEVER: sparse from the first token
    int logits_rows;   // rows a SALA_EVENT_ROWS event can hold (0: such requests are refused)
    int hidden_states; // 1: those events also hold hidden states and selected blocks
    // Three rising layers whose outputs such an event can hold, beside what the head reads: what an
    // EAGLE-3 head is trained with. -1 first: those of the draft head, or else of a head that names none.
    int features[3];
    int synthetic; // 1: `path` is a config.json; weights are made by a hash, no tokenizer
    uint64_t synthetic_seed;
    // Of a synthetic model: "bf16" (default), "nvfp4", "int4": the linear layers; "nvfp4-head": those
    // and the head.
    const char *weights;
    const char *prefill;       // of NVFP4 weights, see sala_info: "auto" (default: W4A4 where the
                               // device has FP4 tensor cores and all weights input scales), "w4a4"
                               // (elsewhere an exact emulation, slow), "w4a16"
    const char *chat_template; // NULL: recognise it from the model's files; "chatml": take that
    // What prompts left behind begins others: "prefix" (default: a new prompt goes on where one that
    // was prefilled before began with the same tokens; the bits are those of computing it), "off", or
    // "history": also, a prompt that begins with all tokens of an idle kept sequence, the chosen ones
    // too, takes that sequence over, as if it had named it. That is exact as a continuation: decoded
    // tokens have other bits than prefilled ones. Not asked for, it is off where no snapshot fits.
    const char *reuse;
    int64_t reuse_memory; // bytes of snapshots of lightning states; default: up to 16, as fit
    // Speculation. It never changes the output, only the time that it takes.
    const char *spec;      // "auto" (default: what is there and pays), "off", "ngram", "eagle"
    const char *draft;     // folder of an EAGLE-3 head (synthetic: its config.json); NULL: none
    const char *spec_tree; // "depth,topk,nodes" of all trees, as "7,2,15"; NULL: by load
    int draft_window; // tokens that the draft head sees at most, a multiple of 64; default: as many
                      // as it was trained with, if its config says so (sala_window), or 32768
    // Tests and benchmarks: drafts are made at full cost, then their tokens replaced, from
    // sala_request.guess: "oracle" or "oracle:P" (a level is right with P percent), "random",
    // "adversarial" (the right token comes last among its siblings).
    const char *spec_test;
    sala_hooks hooks;
} sala_options;

#define SALA_DENSE_NEVER (-1)

// Open a model folder. `options` may be NULL. Weights are memory-mapped; everything else is planned
// and allocated here, and nothing on the device afterwards. Returns NULL on error. `error` may be
// NULL.
SALA_API sala *sala_open(const char *path, const sala_options *options, sala_error *error);
SALA_API void sala_close(sala *engine); // NULL is fine; frees everything, events included

// Set one option by its name ("chunk", "dense-len" ...) from text, as a command line or a server
// gets it. An unknown name, a malformed or out-of-range value is an error. String values are not
// copied.
SALA_API int sala_set_option(sala_options *options, const char *name, const char *value,
                             sala_error *error);

SALA_API const char *sala_version(void); // SALA_VERSION of the implementation that was linked

// ---- text and tokens ----

// Encode UTF-8 text (invalid bytes allowed). `flags`: SALA_ADD_BOS puts the model's BOS in front
// where its files say so; SALA_PARSE_SPECIAL reads "<|im_end|>" and its like as single tokens,
// without it such text is plain text (use this for text you do not trust). Returns the number of
// tokens, and in *tokens an array that the caller gives back to sala_free; negative on error.
enum { SALA_ADD_BOS = 1, SALA_PARSE_SPECIAL = 2 };
SALA_API int64_t sala_tokenize(sala *engine, const char *text, size_t bytes, int flags,
                               int32_t **tokens, sala_error *error);

// Decode tokens. Returns zero-terminated text for sala_free (NULL on error), *bytes its length.
// Special tokens are left out unless `special`.
SALA_API char *sala_detokenize(sala *engine, const int32_t *tokens, int64_t count, int special,
                               size_t *bytes, sala_error *error);

// Streaming decode: feed tokens one by one; out come only whole UTF-8 characters. `token` -1
// flushes what is held back. The text belongs to the stream and is valid until its next call.
typedef struct sala_text_stream sala_text_stream;
SALA_API sala_text_stream *sala_stream_open(sala *engine, int special, sala_error *error);
SALA_API const char *sala_stream_next(sala_text_stream *stream, int32_t token, size_t *bytes);
SALA_API void sala_stream_close(sala_text_stream *stream);

// The prompt for one turn of a chat, by the model's template. `role` is "system", "user" or
// "assistant". Returns tokens as sala_tokenize does; `first` starts a conversation (BOS), `reply`
// appends the prefix of the assistant's answer. Content is encoded as plain text: special tokens in
// it stay text.
SALA_API int64_t sala_chat_turn(sala *engine, const char *role, const char *content, size_t bytes,
                                int first, int reply, int32_t **tokens, sala_error *error);

SALA_API void sala_free(sala *engine, void *pointer); // what a function above said is for sala_free

// ---- requests ----

typedef struct sala_bias {
    int32_t token;
    float bias; // added to the logit; -INFINITY forbids the token
} sala_bias;

typedef struct sala_request {
    // The prompt: token ids, or else text (BOS added, special tokens parsed).
    const int32_t *tokens; // [token_count]
    int64_t token_count;
    const char *text;
    size_t text_bytes; // 0: up to the terminating zero
    // Continue a sequence that an earlier request kept: its id from the finish event. The new
    // tokens follow the last chosen one. 0: a new sequence. Without a prompt the text goes on where it
    // was, with the space that belongs there.
    int64_t sequence;
    int keep; // 1: the sequence stays resident after the request; continue or sala_release it

    int64_t max_tokens;       // tokens to generate; default 256
    float temperature;        // 0 (default): greedy
    int top_k;                // 0: all
    float top_p;              // 0 or 1: all
    float min_p;              // 0: all; keep tokens with p >= min_p * the largest p
    float repetition_penalty; // 0 or 1: none; applies to prompt and output
    float presence_penalty;   // applies to output
    float frequency_penalty;  // applies to output
    uint64_t seed; // the random number of a position is a function of (seed, position) alone
    const sala_bias *biases; // [bias_count]
    int bias_count;
    const char *const *stop; // [stop_count] strings that end the text (not included in it)
    int stop_count;
    const int32_t *stop_tokens; // [stop_token_count] beside the model's own end tokens
    int stop_token_count;
    int ignore_eos;   // 1: the model's end tokens do not stop it
    int logprobs;     // 0: none; n: log-probability of each token and of the n best, n <= 20
    int special_text; // 1: special tokens appear in the text
    // Teacher forcing: the first chosen tokens are these, whatever the logits say; end tokens among
    // them do not end it.
    const int32_t *force; // [force_count]
    int64_t force_count;
    // Tools and tests: what SALA_EVENT_ROWS events report. Logits need sala_options.logits_rows,
    // SALA_ROWS_FEATURES, of the prompt and with or without its logits, sala_options.features.
    int want_rows;        // SALA_ROWS_*
    int want_trees;       // 1: a SALA_EVENT_TREE for each verify
    const int32_t *guess; // [guess_count] for sala_options.spec_test: what the output will be
    int64_t guess_count;
} sala_request;

enum {
    SALA_ROWS_NONE = 0,
    SALA_ROWS_PROMPT = 1,
    SALA_ROWS_GENERATED = 2,
    SALA_ROWS_ALL = 3,
    SALA_ROWS_FEATURES = 4
};

// Set one request field by name ("temperature", "top-p" ...) from text. As sala_set_option.
SALA_API int sala_set_request(sala_request *request, const char *name, const char *value,
                              sala_error *error);

// Hand in a request. Everything is copied. Returns its id (> 0) or a negative error. It waits until
// memory for prompt + max_tokens can be reserved, so once started it always finishes.
SALA_API int64_t sala_submit(sala *engine, const sala_request *request, sala_error *error);

// One turn of the loop: admit requests, prefill at most one budget of prompt tokens (the chunk; 512
// while anything generates), then one verify of all sequences that generate. Returns 1 while there
// is work or there are events, 0 when idle, negative on error (only sala_close is left then). Take
// all events before the next call: with events waiting it is an error (SALA_E_STATE) that changes
// nothing.
SALA_API int sala_step(sala *engine, sala_error *error);

SALA_API int sala_cancel(sala *engine, int64_t request,
                         sala_error *error); // its finish event follows
SALA_API int sala_release(sala *engine, int64_t sequence,
                          sala_error *error); // give up a kept sequence

// The tokens of a kept sequence, the one chosen last included: *tokens is valid until the next call of
// sala_step, sala_load or sala_release. Returns how many, or a negative error.
SALA_API int64_t sala_history(sala *engine, int64_t sequence, const int32_t **tokens,
                              sala_error *error);

// ---- sessions ----

// Write a sequence to a file: `id` is that of a kept sequence or of a request at work, whose sequence
// is then saved with what is left of the request; a request that still waits holds nothing. Only
// between steps, where it changes nothing; events that were not taken are not in the file. The file
// is written beside its place ("PATH.part-......", which a killed process leaves behind), synced and
// renamed: there is the old file or the new one, never half of one. It is about as large as the
// sequence's K/V cache and states (see sala_info), and as private as the text.
SALA_API int sala_save(sala *engine, int64_t id, const char *path, sala_error *error);

typedef struct sala_session {
    int64_t sequence;    // its id in this engine
    int64_t request;     // of the request that goes on: the same id; 0: the sequence is kept
    int64_t token_count; // its history, prompts and answers
    int32_t last;        // the token chosen last, which nothing has read yet; -1: none
} sala_session;

// Read such a file. Returns the id of a new sequence and fills `session` (may be NULL). Kept, it is
// there to be continued or released; with a request at work the next steps go on as they would have,
// bit by bit: they give the events that were still to come. It needs the engine that saved it, but for
// memory, chunk, threads and speculation: the same model, dense-len, prefill and kind of device,
// since numbers of other ones differ in their last bits; what differs is an error. So is a damaged
// file, and one that does not fit; the engine stays as it was.
SALA_API int64_t sala_load(sala *engine, const char *path, sala_session *session,
                           sala_error *error);

// ---- events ----

enum {                      // sala_event.type
    SALA_EVENT_PREFILL = 1, // `done` of `total` prompt tokens are processed
    SALA_EVENT_TOKEN = 2,   // a token was chosen
    SALA_EVENT_FINISH = 3,  // the request is over; `text` may hold a last piece
    SALA_EVENT_ROWS = 4,    // logits of rows, if the request wants them
    SALA_EVENT_TREE = 5     // the tree of a verify, if the request wants it; before its tokens
};

enum { SALA_DRAFT_NONE = 0, SALA_DRAFT_NGRAM = 1, SALA_DRAFT_EAGLE = 2 }; // where a tree comes from

#define SALA_DEPTHS 16 // of a verify tree, root included

enum {                         // sala_event.finish_reason
    SALA_FINISH_STOP = 1,      // end token, stop token or stop string
    SALA_FINISH_LENGTH = 2,    // max_tokens reached
    SALA_FINISH_CANCELLED = 3, // sala_cancel
    SALA_FINISH_MEMORY = 4,    // can never be admitted while the kept sequences hold the cache
    SALA_FINISH_NAN = 5 // the logits are not numbers: damaged weights (see sala_check_weights)
};

typedef struct sala_logprob {
    int32_t token;
    float logprob; // natural log of softmax(raw logits)
} sala_logprob;

typedef struct sala_timings {
    int64_t prompt_tokens;  // prefilled by this request
    int64_t reused_tokens;  // of its prompt, which were there already: see sala_options.reuse
    int64_t output_tokens;  // chosen by this request
    double queue_seconds;   // from submit to admission
    double prefill_seconds; // from admission to the first token
    double decode_seconds;  // from the first to the last token
    int64_t decode_bytes;   // weights, states and K/V read by this request's decode steps
    // Speculation, by source (SALA_DRAFT_*): verifies; tokens that came out of them; at each depth
    // (the root is 0): verifies whose tree had a node there below an accepted one, and those that
    // accepted it. Mean tokens a verify ("tau") = tokens / verifies.
    int64_t verifies[3], verify_tokens[3];
    int64_t offered[3][SALA_DEPTHS], accepted[3][SALA_DEPTHS];
    double draft_seconds, verify_seconds; // of the steps that this request took part in
} sala_timings;

// Pointers are valid until the next sala_step or sala_close. `text` is never NULL.
typedef struct sala_event {
    int type;
    int64_t request;
    int64_t sequence; // finish: the kept sequence, or 0
    // token, finish
    int32_t token;
    int64_t position; // of the token in its sequence, from 0
    const char *text; // whole characters, final: held back while a stop string may begin
    size_t text_bytes;
    float logprob;
    const sala_logprob *top; // [top_count] best first
    int top_count;
    int finish_reason;
    sala_timings timings; // finish
    // prefill: what a prefix gave is done
    int64_t done, total;
    // rows: positions first_position .. first_position + row_count - 1
    int64_t first_position;
    int row_count;
    const float *logits; // [row_count, vocab] f32; NULL where only features are wanted
    // Where they are wanted: [4, row_count, hidden] BF16, the residual stream behind the three layers of
    // sala_options.features, then what the head multiplies.
    const uint16_t *features;
    // What follows is NULL unless the engine was opened with hidden_states.
    const float *hidden;   // [layers + 2, row_count, hidden] f32: embedding, layers, final norm
    const int32_t *blocks; // [sparse layers, row_count, kv_heads, top_k] ascending; -1: no more,
                           // -2: all (dense)
    // tree: `position` is that of the root, `token` the bonus token behind the last accepted node
    int node_count, source; // SALA_DRAFT_*
    int paused; // no draft, since such drafts have not paid of late: there will be another trial
    const int32_t *node_token, *node_parent; // [node_count]
    const int32_t *node_accepted;            // [node_count] 1 where the output goes along
    const float *node_score;                 // [node_count] log probability by the draft
} sala_event;

// Take the next event. Returns 1, or 0 when there is none.
SALA_API int sala_next_event(sala *engine, sala_event *event);

// ---- what runs ----

typedef struct sala_info {
    char device[320];       // "CPU, 2 threads, AVX-512", "cuda:0, NVIDIA H200, ..."
    const char *path;       // as opened
    char weight_format[64]; // linear layers and, if another, the head: "NVFP4, BF16 head"
    char weight_kinds[160]; // "attention NVFP4, MLP NVFP4, head BF16, embedding BF16, norms BF16"
    char prefill[24]; // of the linear layers: "BF16"; of 4-bit weights "W4A16" (activations in
                      // BF16, as in decoding) or "W4A4"; "W4A4, emulated"
    const char *chat_template; // "chatml" or "none"
    int vocab, hidden, layers, sparse_layers, lightning_layers, heads, kv_heads, head_dim;
    int lightning_heads, lightning_kv_heads, lightning_head_dim, intermediate;
    int block, top_k; // sparse attention: tokens a block, blocks a token attends to
    int dense_len;    // in use
    int chunk, threads, max_sequences;
    int64_t parameters;
    double bits_per_weight;
    int64_t context;         // longest sequence this engine was planned for
    int64_t longest_context; // longest single sequence that would fit the memory limit
    // Bytes, as planned at open; they sum to total_bytes.
    int64_t weight_bytes;  // mapped from the files (or made, when synthetic)
    int64_t kv_bytes;      // pages of K, V and both compressed tiers
    int64_t state_bytes;   // lightning states
    int64_t pending_bytes; // k, v of accepted tokens not yet folded into the states
    int64_t unpack_bytes;  // GPU: the 4-bit weights of one product of a W4A16 prefill, in BF16
    int64_t scratch_bytes; // activations of one pass, scores, logits
    int64_t reuse_bytes;   // snapshots of lightning states
    int64_t draft_weight_bytes, draft_kv_bytes; // of the draft head: its weights, its cache and the
                                                // features that wait for it
    int64_t total_bytes;
    int64_t kv_bytes_per_token, state_bytes_per_sequence;
    int64_t decode_bytes; // read for one token of one short sequence: linear layers, head, state
    char spec[256];     // "auto: n-gram chains and EAGLE-3 trees of 7,2,15 ...": what runs, and why
    char draft[160];    // "437 M parameters, NVFP4, layers 1 15 28, window 32768", or ""
    int64_t node_bytes; // verify scratch of one row: k, v of all layers, compressed
    const char *reuse;  // "off", "prefix" or "history"
    int snapshots;      // of prefixes, at most
    // Live counters.
    int sequences_resident, requests_waiting, requests_active;
    int prefixes; // that a prompt could begin with
    int64_t kv_tokens_total, kv_tokens_reserved;
    int64_t kv_tokens_idle; // of no sequence: only prefixes hold them, and give way to a request
    // Special ids: bos is -1 where the model has none.
    int32_t bos;
    int eos_count;
    const int32_t *eos; // [eos_count]
} sala_info;

SALA_API void sala_get_info(sala *engine, sala_info *info); // pointers valid until sala_close

// Read every weight once: NaN and infinity are an error that names tensor and index.
SALA_API int sala_check_weights(sala *engine, sala_error *error);

// The plan alone: what sala_open would take, without taking it. Pointers in `info` are then NULL.
SALA_API int sala_plan(const char *path, const sala_options *options, sala_info *info,
                       sala_error *error);

#ifdef __cplusplus
}
#endif
#endif // SALA_H
#ifdef SALA_IMPLEMENTATION
#ifndef SALA_IMPLEMENTED
#define SALA_IMPLEMENTED

#if defined(__FAST_MATH__)
#error "sala.h: -ffast-math breaks the bit-exact promises; compile without it"
#endif
#if !defined(__GNUC__) || defined(_WIN32) || (__SIZEOF_POINTER__ != 8) ||                          \
    (__BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__)
#error "sala.h: needs GCC or Clang on a little-endian 64-bit POSIX system"
#endif

// No product and sum may be fused unless the source says fma: the same bits at every optimisation
// level.
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

/* -----------------------------------------------------------------------------------------------
   [2] BASE: errors, memory, strings, files

   Everything that allocates takes a sala__env: the three hooks, and nothing more. Errors are
   written once, where they are found, as one sentence; callers pass the code upwards unchanged.
   -------------------------------------------------------------------------------------------- */

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels.h"

#if defined(__GNUC__)
#define SALA__PRINTF(f, a) __attribute__((format(printf, f, a)))
#define SALA__UNUSED __attribute__((unused))
#endif

// Write an error (if anybody wants it) and return its code: `return sala__fail(err, SALA_E_FILE,
// "...");`
static int sala__fail(sala_error *err, int code, const char *format, ...) SALA__PRINTF(3, 4);
static int sala__fail(sala_error *err, int code, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        err->code = code;
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        for (char *c = err->text; *c; c++) // names out of files must not steer a terminal
            if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?';
    }
    return code;
}

static void sala__clear(sala_error *err) { // public functions begin with it
    if (err) memset(err, 0, sizeof *err);
}

typedef sala_hooks sala__env;

static void *sala__realloc(const sala__env *env, void *pointer, size_t size) {
    if (env->allocate) return env->allocate(env->user, pointer, size);
    if (size == 0) {
        free(pointer);
        return NULL;
    }
    return realloc(pointer, size);
}

static void sala__release(const sala__env *env, void *pointer) {
    if (pointer) sala__realloc(env, pointer, 0);
}

// Zeroed memory for count * size bytes; NULL with an error that names `what`. Overflow is an error
// too.
static void *sala__alloc(const sala__env *env, size_t count, size_t size, const char *what,
                         sala_error *err) {
    size_t bytes;
    void *p = NULL;
    if (!__builtin_mul_overflow(count, size, &bytes)) {
        if (bytes == 0) bytes = 1;
        // calloc leaves untouched pages to the system: a large plan costs only what is used.
        p = env->allocate ? env->allocate(env->user, NULL, bytes) : calloc(1, bytes);
        if (p && env->allocate) memset(p, 0, bytes);
    }
    if (!p)
        sala__fail(err, SALA_E_MEMORY, "out of memory: %zu x %zu bytes for %s", count, size, what);
    return p;
}

// Make room for `need` elements in a growing array. Returns 0, or an error; the array is untouched
// then.
static int sala__grow(const sala__env *env, void **array, size_t *capacity, size_t need,
                      size_t size, const char *what, sala_error *err) {
    if (need <= *capacity) return 0;
    size_t cap = *capacity < 16 ? 16 : *capacity;
    while (cap < need) {
        if (cap > SIZE_MAX / 2)
            return sala__fail(err, SALA_E_MEMORY, "out of memory: %zu elements for %s", need, what);
        cap *= 2;
    }
    size_t bytes;
    void *p = __builtin_mul_overflow(cap, size, &bytes) ? NULL : sala__realloc(env, *array, bytes);
    if (!p)
        return sala__fail(err, SALA_E_MEMORY, "out of memory: %zu x %zu bytes for %s", cap, size,
                          what);
    *array = p;
    *capacity = cap;
    return 0;
}

static void sala__log(const sala__env *env, int level, const char *format, ...) SALA__PRINTF(3, 4);
static void sala__log(const sala__env *env, int level, const char *format, ...) {
    if (!env->log) return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    env->log(env->user, level, line);
}

static void sala__progress(const sala__env *env, const char *what, double fraction) {
    if (env->progress) env->progress(env->user, what, fraction);
}

static double sala__now(void) { // seconds, monotonic
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// A growing byte string, always zero-terminated once something was appended.
typedef struct sala__string {
    char *data;
    size_t size, capacity;
} sala__string;

static int sala__append(const sala__env *env, sala__string *s, const char *bytes, size_t count,
                        sala_error *err) {
    if (sala__grow(env, (void **)&s->data, &s->capacity, s->size + count + 1, 1, "text", err) < 0)
        return SALA_E_MEMORY;
    if (count) memcpy(s->data + s->size, bytes, count);
    s->size += count;
    s->data[s->size] = 0;
    return 0;
}

// "folder/name" in a fresh string, NULL when out of memory.
static char *sala__join(const sala__env *env, const char *folder, const char *name,
                        sala_error *err) {
    size_t a = strlen(folder), b = strlen(name);
    char *p = (char *)sala__alloc(env, a + b + 2, 1, "a path", err);
    if (!p) return NULL;
    memcpy(p, folder, a);
    if (a && folder[a - 1] != '/') p[a++] = '/';
    memcpy(p + a, name, b + 1);
    return p;
}

// A whole file, mapped read-only. Regular files only: a FIFO or a device could block or never end.
typedef struct sala__file {
    const unsigned char *data; // [size], NULL when empty
    int64_t size;
} sala__file;

static int sala__map_file(const char *path, sala__file *file, sala_error *err) {
    file->data = NULL;
    file->size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return sala__fail(err, SALA_E_FILE, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    int code = 0;
    if (fstat(fd, &st) < 0) {
        code = sala__fail(err, SALA_E_FILE, "%s: cannot stat: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        code = sala__fail(err, SALA_E_FILE, "%s: not a regular file", path);
    } else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            code = sala__fail(err, SALA_E_FILE, "%s: cannot map %lld bytes: %s", path,
                              (long long)st.st_size, strerror(errno));
        } else {
            file->data = (const unsigned char *)p;
            file->size = (int64_t)st.st_size;
        }
    }
    close(fd);
    return code;
}

static void sala__unmap_file(sala__file *file) {
    if (file->data) munmap((void *)(uintptr_t)file->data, (size_t)file->size);
    file->data = NULL;
    file->size = 0;
}

static int sala__file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}
/* -----------------------------------------------------------------------------------------------
   [3] JSON: a small strict parser (RFC 8259)

   The whole text becomes a flat array of nodes linked by index (first child, next sibling); strings
   are unescaped into one buffer. Nesting deeper than SALA__JSON_DEPTH is refused, so no input can
   overflow the stack. Errors name the file and the byte offset. Numbers are the nearest double in
   every locale.
   -------------------------------------------------------------------------------------------- */

#define SALA__JSON_DEPTH 64
#define SALA__JSON_VALUES                                                                          \
    4000000 // of the largest file: some 350 MB of nodes, ten times a real tokenizer

enum { SALA__NULL, SALA__BOOL, SALA__NUMBER, SALA__STRING, SALA__ARRAY, SALA__OBJECT };

typedef struct sala__json_node {
    int32_t type;
    int32_t count; // array, object: number of children
    int32_t child; // first child or -1
    int32_t next;  // next sibling or -1
    size_t key;    // object member: offset of its zero-terminated key in the string buffer
    size_t key_size;
    size_t text;      // string: offset
    size_t text_size; // string: bytes (may hold zero bytes)
    double number;    // number, bool
    int64_t integer;  // number: its value when it is an integer that fits, see is_integer
    int32_t is_integer;
} sala__json_node;

typedef struct sala__json {
    const sala__env *env;
    const char *where;         // file name for messages
    const unsigned char *data; // the input while parsing
    size_t size, at;
    sala__json_node *nodes; // nodes[0] is the root
    size_t node_count, node_capacity;
    sala__string strings;
} sala__json;

static int sala__json_fail(sala__json *j, sala_error *err, const char *what) {
    return sala__fail(err, SALA_E_FILE, "%s: not valid JSON at byte %zu: %s", j->where, j->at,
                      what);
}

static void sala__json_space(sala__json *j) {
    while (j->at < j->size) {
        unsigned char c = j->data[j->at];
        if (c != ' ' && c != '\t' && c != '\n' && c != '\r') break;
        j->at++;
    }
}

static int sala__json_hex4(sala__json *j, unsigned *value) {
    if (j->size - j->at < 4) return -1;
    *value = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char c = j->data[j->at + (size_t)i];
        unsigned d = c >= '0' && c <= '9'   ? c - '0' + 0u
                     : c >= 'a' && c <= 'f' ? c - 'a' + 10u
                     : c >= 'A' && c <= 'F' ? c - 'A' + 10u
                                            : 16u;
        if (d > 15) return -1;
        *value = *value * 16 + d;
    }
    j->at += 4;
    return 0;
}

// Encode one code point (no surrogates) as UTF-8; returns the bytes written, 1 to 4.
static int sala__utf8_put(unsigned code, char out[4]) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | (code >> 6));
        out[1] = (char)(0x80 | (code & 63));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | (code >> 12));
        out[1] = (char)(0x80 | ((code >> 6) & 63));
        out[2] = (char)(0x80 | (code & 63));
        return 3;
    }
    out[0] = (char)(0xF0 | (code >> 18));
    out[1] = (char)(0x80 | ((code >> 12) & 63));
    out[2] = (char)(0x80 | ((code >> 6) & 63));
    out[3] = (char)(0x80 | (code & 63));
    return 4;
}

// One escape after its backslash; a lone surrogate becomes U+FFFD.
static int sala__json_escape(sala__json *j, char out[4], sala_error *err) {
    unsigned code, low;
    switch (j->data[j->at++]) {
    case '"': out[0] = '"'; return 1;
    case '\\': out[0] = '\\'; return 1;
    case '/': out[0] = '/'; return 1;
    case 'b': out[0] = '\b'; return 1;
    case 'f': out[0] = '\f'; return 1;
    case 'n': out[0] = '\n'; return 1;
    case 'r': out[0] = '\r'; return 1;
    case 't': out[0] = '\t'; return 1;
    case 'u': break;
    default: j->at--; return sala__json_fail(j, err, "unknown escape");
    }
    if (sala__json_hex4(j, &code) < 0) return sala__json_fail(j, err, "\\u needs four hex digits");
    if (code >= 0xD800 && code < 0xE000) {
        size_t save = j->at;
        int pair = code < 0xDC00 && j->size - j->at >= 2 && j->data[j->at] == '\\' &&
                   j->data[j->at + 1] == 'u';
        if (pair) {
            j->at += 2;
            if (sala__json_hex4(j, &low) < 0)
                return sala__json_fail(j, err, "\\u needs four hex digits");
            pair = low >= 0xDC00 && low < 0xE000;
        }
        if (!pair) j->at = save;
        code = pair ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) : 0xFFFD;
    }
    return sala__utf8_put(code, out);
}

// A string, at its opening quote. Copies runs of plain bytes at once.
static int sala__json_string(sala__json *j, size_t *offset, size_t *size, sala_error *err) {
    int code;
    *offset = j->strings.size;
    j->at++;
    for (;;) {
        size_t from = j->at;
        while (j->at < j->size && j->data[j->at] != '"' && j->data[j->at] != '\\' &&
               j->data[j->at] >= 0x20)
            j->at++;
        code = sala__append(j->env, &j->strings, (const char *)j->data + from, j->at - from, err);
        if (code < 0) return code;
        if (j->at >= j->size) return sala__json_fail(j, err, "the text ends inside a string");
        unsigned char c = j->data[j->at];
        if (c < 0x20) return sala__json_fail(j, err, "control character in a string");
        j->at++;
        if (c == '"') break;
        char out[4];
        if (j->at >= j->size) return sala__json_fail(j, err, "the text ends inside a string");
        int n = sala__json_escape(j, out, err);
        if (n < 0) return n;
        code = sala__append(j->env, &j->strings, out, (size_t)n, err);
        if (code < 0) return code;
    }
    *size = j->strings.size - *offset;
    return sala__append(j->env, &j->strings, "", 1,
                        err); // the terminating zero is part of the buffer
}

// A number. strtod gets its digits without the point, and an exponent: so its answer is the nearest
// double and does not depend on the locale, whose decimal point it would otherwise expect.
static int sala__json_number(sala__json *j, sala__json_node *node, sala_error *err) {
    enum { KEEP = 780 }; // no double, and no middle of two, has more significant digits
    char text[KEEP + 16];
    uint64_t mantissa = 0;
    int negative = 0, kept = 0, rest = 0, exponent = 0, exact = 1, digits = 0;
    if (j->data[j->at] == '-') negative = 1, j->at++;
    size_t from = j->at;
    for (int fraction = 0; fraction < 2; fraction++) {
        if (fraction) {
            if (j->at >= j->size || j->data[j->at] != '.') break;
            j->at++;
            exact = 0;
            digits = 0;
        }
        for (; j->at < j->size && j->data[j->at] >= '0' && j->data[j->at] <= '9';
             j->at++, digits++) {
            char c = (char)j->data[j->at];
            if (kept == KEEP) { // drop it, but keep its weight, and whether anything was dropped
                rest |= c != '0';
                exponent += !fraction;
                continue;
            }
            if (kept < 19) mantissa = mantissa * 10 + (uint64_t)(c - '0');
            if (kept || c != '0') text[kept++] = c;
            exponent -= fraction;
        }
        if (!digits) return sala__json_fail(j, err, "a number needs digits");
        if (!fraction && digits > 1 && j->data[from] == '0')
            return sala__json_fail(j, err, "leading zero");
    }
    if (j->at < j->size && (j->data[j->at] == 'e' || j->data[j->at] == 'E')) {
        int minus = 0, e = 0;
        exact = 0;
        j->at++;
        if (j->at < j->size && (j->data[j->at] == '+' || j->data[j->at] == '-'))
            minus = j->data[j->at++] == '-';
        for (digits = 0; j->at < j->size && j->data[j->at] >= '0' && j->data[j->at] <= '9';
             j->at++, digits++)
            if (e < 100000000) e = e * 10 + (j->data[j->at] - '0');
        if (!digits) return sala__json_fail(j, err, "an exponent needs digits");
        exponent += minus ? -e : e;
    }
    if (rest) text[kept++] = '1', exponent--;
    if (!kept) text[kept++] = '0';
    snprintf(text + kept, sizeof text - (size_t)kept, "e%d", exponent);
    double v = strtod(text, NULL); // too large: infinity
    node->number = negative ? -v : v;
    if (exact && kept <= 19 && mantissa <= INT64_MAX) {
        node->is_integer = 1;
        node->integer = negative ? -(int64_t)mantissa : (int64_t)mantissa;
    }
    return 0;
}

static int sala__json_word(sala__json *j, const char *word) {
    size_t n = strlen(word);
    if (j->size - j->at < n || memcmp(j->data + j->at, word, n) != 0) return 0;
    j->at += n;
    return 1;
}

// One value and all below it; returns its node's index. Recursion is bounded by SALA__JSON_DEPTH.
static int64_t sala__json_value(sala__json *j, int depth, sala_error *err) {
    int code = 0;
    if (depth > SALA__JSON_DEPTH) return sala__json_fail(j, err, "nested too deeply");
    if (j->node_count >= SALA__JSON_VALUES) return sala__json_fail(j, err, "too many values");
    code = sala__grow(j->env, (void **)&j->nodes, &j->node_capacity, j->node_count + 1,
                      sizeof *j->nodes, "JSON", err);
    if (code < 0) return code;
    int64_t self = (int64_t)j->node_count++;
    memset(&j->nodes[self], 0, sizeof j->nodes[self]);
    j->nodes[self].child = j->nodes[self].next = -1;
    sala__json_space(j);
    unsigned char c = j->at < j->size ? j->data[j->at] : 0;
    if (c == '{' || c == '[') {
        int object = c == '{';
        int64_t last = -1;
        j->nodes[self].type = object ? SALA__OBJECT : SALA__ARRAY;
        j->at++;
        for (;;) {
            size_t key = 0, key_size = 0;
            sala__json_space(j);
            c = j->at < j->size ? j->data[j->at] : 0;
            if (c == (object ? '}' : ']') && last < 0) break; // empty
            if (object) {
                if (c != '"') return sala__json_fail(j, err, "expected a key");
                if ((code = sala__json_string(j, &key, &key_size, err)) < 0) return code;
                sala__json_space(j);
                if (j->at >= j->size || j->data[j->at] != ':')
                    return sala__json_fail(j, err, "expected ':'");
                j->at++;
            }
            int64_t child = sala__json_value(j, depth + 1, err);
            if (child < 0) return child;
            j->nodes[child].key = key;
            j->nodes[child].key_size = key_size;
            if (last < 0)
                j->nodes[self].child = (int32_t)child;
            else
                j->nodes[last].next = (int32_t)child;
            last = child;
            j->nodes[self].count++;
            sala__json_space(j);
            c = j->at < j->size ? j->data[j->at] : 0;
            if (c == (object ? '}' : ']')) break;
            if (c != ',')
                return sala__json_fail(j, err,
                                       object ? "expected ',' or '}'" : "expected ',' or ']'");
            j->at++;
        }
        j->at++;
    } else if (c == '"') {
        size_t text = 0, text_size = 0;
        j->nodes[self].type = SALA__STRING;
        code = sala__json_string(j, &text, &text_size, err);
        j->nodes[self].text = text;
        j->nodes[self].text_size = text_size;
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        j->nodes[self].type = SALA__NUMBER;
        code = sala__json_number(j, &j->nodes[self], err);
    } else if (sala__json_word(j, "true")) {
        j->nodes[self].type = SALA__BOOL;
        j->nodes[self].number = 1;
    } else if (sala__json_word(j, "false")) {
        j->nodes[self].type = SALA__BOOL;
    } else if (!sala__json_word(j, "null")) {
        code = sala__json_fail(j, err,
                               j->at < j->size ? "expected a value" : "the text ends too early");
    }
    return code < 0 ? code : self;
}

static void sala__json_free(sala__json *j) {
    if (!j->env) return;
    sala__release(j->env, j->nodes);
    sala__release(j->env, j->strings.data);
    memset(j, 0, sizeof *j);
}

// Parse `size` bytes. On success `j` keeps no pointer into `data`; free it with sala__json_free.
// `where` (a file name, for messages) must outlive it.
static int sala__json_parse(const sala__env *env, const char *where, const void *data, size_t size,
                            sala__json *j, sala_error *err) {
    memset(j, 0, sizeof *j);
    j->env = env;
    j->where = where;
    j->data = (const unsigned char *)data;
    j->size = size;
    int64_t root = sala__json_value(j, 0, err);
    if (root >= 0) {
        sala__json_space(j);
        if (j->at != j->size) root = sala__json_fail(j, err, "text after the end");
    }
    j->data = NULL;
    if (root < 0) {
        int code = (int)root;
        sala__json_free(j);
        return code;
    }
    return 0;
}

// Parse a whole file of at most `limit` bytes.
static int sala__json_file(const sala__env *env, const char *path, int64_t limit, sala__json *j,
                           sala_error *err) {
    sala__file file;
    int code = sala__map_file(path, &file, err);
    if (code < 0) return code;
    if (file.size == 0) {
        code = sala__fail(err, SALA_E_FILE, "%s: the file is empty", path);
    } else if (file.size > limit) {
        code = sala__fail(err, SALA_E_FILE,
                          "%s: %lld bytes, more than the %lld that such a file may have", path,
                          (long long)file.size, (long long)limit);
    } else {
        code = sala__json_parse(env, path, file.data, (size_t)file.size, j, err);
    }
    sala__unmap_file(&file);
    return code;
}

// Walking: indices of nodes; -1 means "not there" and is accepted everywhere.
static const sala__json_node *sala__json_at(const sala__json *j, int node) {
    static const sala__json_node nothing = {SALA__NULL, 0, -1, -1, 0, 0, 0, 0, 0, 0, 0};
    return node < 0 ? &nothing : &j->nodes[node];
}

static const char *sala__json_key(const sala__json *j, int node) {
    return j->strings.data + j->nodes[node].key;
}

static const char *sala__json_text(const sala__json *j, int node) { // NULL unless a string
    const sala__json_node *n = sala__json_at(j, node);
    return n->type == SALA__STRING ? j->strings.data + n->text : NULL;
}

static int sala__json_get(const sala__json *j, int object,
                          const char *key) { // the LAST member of that name
    int found = -1;
    if (sala__json_at(j, object)->type != SALA__OBJECT) return -1;
    size_t n = strlen(key);
    for (int c = j->nodes[object].child; c >= 0; c = j->nodes[c].next)
        if (j->nodes[c].key_size == n && memcmp(sala__json_key(j, c), key, n) == 0) found = c;
    return found;
}

static int sala__json_is(const sala__json *j, int node,
                         const char *text) { // a string equal to text?
    const char *t = sala__json_text(j, node);
    return t && sala__json_at(j, node)->text_size == strlen(text) && strcmp(t, text) == 0;
}

/* ------------------------------------------------------------------------------------------------
   [4] CHECKPOINT: safetensors, config.json, the model's shape

   Three steps, each usable alone:
   - sala__checkpoint_open maps the files and lists their tensors, sorted by name. All rules of the
     format are enforced here, so that afterwards every tensor's bytes lie inside its file and no
     two tensors share a byte.
   - sala__config_read turns config.json into sala_dims. A field that would change the arithmetic
     and is not supported is refused by its name: a model that loads and answers wrongly is the
     worst case.
   - sala__weights_bind gives every tensor of the model its place, exactly once, and accepts no
     tensor that nothing reads.
   Weights stay where they are, in the mapped files: opening a model reads its headers alone. A file
   that another program truncates while it is mapped ends the process with SIGBUS; POSIX offers no
   better.
   ------------------------------------------------------------------------------------------------ */

// ---- members of JSON objects ----

// Reads the members of one object. The first error is kept in `code`, and what fails later changes
// nothing: so a list of reads needs one check at its end.
typedef struct sala__fields {
    const sala__json *json;
    int object;
    const char *where;  // "FILE" or "FILE: tensor NAME", for messages
    const char *prefix; // "" or "sparse_config."
    sala_error *err;
    int error; // the code that errors have here
    int code;
} sala__fields;

// "WHERE: what is wrong", unless an error came before.
static int sala__fields_fail(sala__fields *f, const char *format, ...) SALA__PRINTF(2, 3);
static int sala__fields_fail(sala__fields *f, const char *format, ...) {
    char what[700];
    va_list args;
    if (f->code < 0) return f->code;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return f->code = sala__fail(f->err, f->error, "%s: %s", f->where, what);
}

static int sala__field(const sala__fields *f, const char *name) { // its node, -1: missing
    return sala__json_get(f->json, f->object, name);
}

// No control characters: names go into messages and onto terminals, and a zero byte would cut them.
static int sala__plain_name(const char *text, size_t size) {
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7F) return 0;
    return size > 0;
}

// A value as messages show it.
static const char *sala__json_show(const sala__json *j, int node, char out[64]) {
    static const char *const kinds[] = {"null", "false", "", "a string", "a list", "an object"};
    const sala__json_node *n = sala__json_at(j, node);
    if (n->type == SALA__NUMBER)
        snprintf(out, 64, n->is_integer ? "%.0f" : "%.9g", n->number);
    else if (n->type == SALA__STRING && sala__plain_name(sala__json_text(j, node), n->text_size))
        snprintf(out, 64, "\"%.60s\"", sala__json_text(j, node));
    else
        snprintf(out, 64, "%s", node < 0 ? "missing" : n->number != 0 ? "true" : kinds[n->type]);
    return out;
}

static void sala__field_refuse(sala__fields *f, const char *name, const char *expected) {
    char value[64];
    sala__json_show(f->json, sala__field(f, name), value);
    sala__fields_fail(f, "%s%s is %s; expected %s", f->prefix, name, value, expected);
}

static int sala__field_null(const sala__fields *f, const char *name) { // missing, or null
    return sala__json_at(f->json, sala__field(f, name))->type == SALA__NULL;
}

static double sala__field_number(sala__fields *f, const char *name, int whole, double fallback,
                                 double low, double high) {
    char expected[96];
    int node = sala__field(f, name);
    const sala__json_node *n = sala__json_at(f->json, node);
    if (node < 0) return fallback;
    if (n->type == SALA__NUMBER && n->is_integer >= whole && n->number >= low && n->number <= high)
        return n->number;
    snprintf(expected, sizeof expected, "a %snumber from %.10g to %.10g", whole ? "whole " : "",
             low, high);
    sala__field_refuse(f, name, expected);
    return fallback;
}

static int32_t sala__field_int(sala__fields *f, const char *name, int32_t fallback, int32_t low,
                               int32_t high) {
    return (int32_t)sala__field_number(f, name, 1, fallback, low, high);
}

static int32_t sala__field_int_or_null(sala__fields *f, const char *name, int32_t fallback,
                                       int32_t low, int32_t high) {
    return sala__field_null(f, name) ? fallback : sala__field_int(f, name, fallback, low, high);
}

static int32_t sala__field_bool(sala__fields *f, const char *name, int32_t fallback) {
    int node = sala__field(f, name);
    const sala__json_node *n = sala__json_at(f->json, node);
    if (node >= 0 && n->type != SALA__BOOL) sala__field_refuse(f, name, "true or false");
    return node < 0 ? fallback : n->number != 0;
}

// ---- safetensors ----

#define SALA__HEADER_LIMIT 100000000 // bytes; the limit of the official library
#define SALA__MAX_RANK 8

typedef struct sala__tensor {
    const char *name; // both strings belong to the checkpoint
    const char *file;
    const void *data; // [shape] in the mapped file
    int64_t bytes;
    int32_t format;    // SALA_BF16, SALA_F16, SALA_F32, or -1: another dtype
    const char *dtype; // as the file spells it
    int32_t rank;
    int64_t shape[SALA__MAX_RANK];
    int32_t used; // set when something was bound to it
} sala__tensor;

typedef struct sala__shard {
    char *path;
    sala__file file;
    char *strings; // the header's strings: tensor names point into it
} sala__shard;

typedef struct sala__checkpoint {
    sala__env env;
    char *folder;
    sala__shard *shards; // [shard_count]
    size_t shard_count, shard_capacity;
    sala__tensor *tensors; // [tensor_count] sorted by name once open
    size_t tensor_count, tensor_capacity;
} sala__checkpoint;

// Take a dtype by its name. Returns the bits of an element, 0: unknown.
static int32_t sala__dtype_read(const char *name, sala__tensor *t) {
    static const struct {
        const char *name;
        int32_t bits, format;
    } known[] = {
        {"BF16", 16, SALA_BF16}, {"F16", 16, SALA_F16},  {"F32", 32, SALA_F32},  {"F64", 64, -1},
        {"I64", 64, -1},         {"I32", 32, -1},        {"I16", 16, -1},        {"I8", 8, -1},
        {"U64", 64, -1},         {"U32", 32, -1},        {"U16", 16, -1},        {"U8", 8, -1},
        {"BOOL", 8, -1},         {"C64", 64, -1},        {"F8_E4M3", 8, -1},     {"F8_E5M2", 8, -1},
        {"F8_E8M0", 8, -1},      {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"F6_E2M3", 6, -1},
        {"F6_E3M2", 6, -1},      {"F4", 4, -1},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) != 0) continue;
        t->dtype = known[i].name;
        t->format = known[i].format;
        return known[i].bits;
    }
    return 0;
}

// The elements of a list, up to the first that is not a whole number from 0 on. Returns how many.
static int sala__json_sizes(const sala__json *j, int list, int64_t *out) { // out: [list's count]
    int count = 0;
    for (int n = j->nodes[list].child; n >= 0; n = j->nodes[n].next) {
        if (!j->nodes[n].is_integer || j->nodes[n].integer < 0) break;
        out[count++] = j->nodes[n].integer;
    }
    return count;
}

// "dtype", "shape" and "data_offsets" of one tensor. `data` is where offsets count from.
static int sala__tensor_read(sala__fields *f, const unsigned char *data, int64_t data_size,
                             sala__tensor *t) {
    const sala__json *j = f->json;
    int shape = sala__field(f, "shape"), offsets = sala__field(f, "data_offsets");
    const char *dtype = sala__json_text(j, sala__field(f, "dtype"));
    if (!dtype || sala__json_at(j, shape)->type != SALA__ARRAY ||
        sala__json_at(j, offsets)->type != SALA__ARRAY)
        return sala__fields_fail(f, "needs a dtype, a shape and data_offsets");
    int64_t bits = sala__dtype_read(dtype, t), at[2] = {0, 0};
    if (!bits) return sala__fields_fail(f, "unknown dtype \"%.40s\"", dtype);
    t->rank = j->nodes[shape].count;
    if (t->rank > SALA__MAX_RANK)
        return sala__fields_fail(f, "%d dimensions, more than %d", t->rank, SALA__MAX_RANK);
    int good = sala__json_sizes(j, shape, t->shape);
    if (good < t->rank)
        return sala__fields_fail(f, "element %d of its shape is not a whole number", good);
    for (int i = 0; i < t->rank; i++)
        if (__builtin_mul_overflow(bits, t->shape[i], &bits))
            return sala__fields_fail(f, "the product of its shape overflows 64 bits");
    if (j->nodes[offsets].count != 2 || sala__json_sizes(j, offsets, at) != 2)
        return sala__fields_fail(f, "data_offsets must be two whole numbers");
    long long begin = at[0], end = at[1];
    if (begin > end || end > data_size)
        return sala__fields_fail(f,
                                 "data_offsets [%lld, %lld] are not inside the %lld bytes of data",
                                 begin, end, (long long)data_size);
    if (bits % 8 != 0 || bits / 8 != end - begin)
        return sala__fields_fail(
            f, "data_offsets [%lld, %lld] hold %lld bytes, but dtype %s and shape need %lld", begin,
            end, end - begin, dtype, (long long)(bits / 8));
    t->data = data + begin;
    t->bytes = end - begin;
    return 0;
}

static int sala__tensor_by_place(const void *a, const void *b) {
    const sala__tensor *x = (const sala__tensor *)a, *y = (const sala__tensor *)b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int sala__tensor_by_name(const void *a, const void *b) {
    return strcmp(((const sala__tensor *)a)->name, ((const sala__tensor *)b)->name);
}

// The tensors of one file must cover its data exactly: no overlap, no hole, nothing behind the
// last. Hidden bytes are how one file can be two things; the official library refuses them too.
static int sala__tensors_cover(sala__fields *f, const unsigned char *data, int64_t data_size,
                               sala__tensor *t, size_t count) {
    long long end = 0; // of the tensors so far
    qsort(t, count, sizeof *t, sala__tensor_by_place);
    for (size_t i = 0; i < count; i++) {
        long long begin = (const unsigned char *)t[i].data - data;
        if (begin < end)
            return sala__fields_fail(
                f, "tensor %.200s at bytes [%lld, %lld) overlaps tensor %.200s, which ends at %lld",
                t[i].name, begin, begin + t[i].bytes, t[i - 1].name, end);
        if (begin > end)
            return sala__fields_fail(
                f, "the bytes [%lld, %lld) before tensor %.200s belong to no tensor", end, begin,
                t[i].name);
        end = begin + t[i].bytes;
    }
    if (end == data_size) return 0;
    return sala__fields_fail(f, "the bytes [%lld, %lld) at the end belong to no tensor", end,
                             (long long)data_size);
}

// The members of a parsed header, appended to c->tensors.
static int sala__header_read(sala__checkpoint *c, sala__fields *f, const unsigned char *data,
                             int64_t data_size) {
    const sala__json *j = f->json;
    size_t first = c->tensor_count, room = first + (size_t)j->nodes[0].count + 1;
    int code = sala__grow(&c->env, (void **)&c->tensors, &c->tensor_capacity, room,
                          sizeof *c->tensors, "the list of tensors", f->err);
    for (int n = j->nodes[0].child; n >= 0 && code == 0; n = j->nodes[n].next) {
        char where[1024];
        const char *name = sala__json_key(j, n);
        if (!sala__plain_name(name, j->nodes[n].key_size))
            return sala__fields_fail(
                f, "tensor number %zu has an empty name or a control character in it",
                c->tensor_count - first);
        if (strcmp(name, "__metadata__") == 0) continue; // free text of whoever wrote the file
        sala__tensor *t = &c->tensors[c->tensor_count++];
        memset(t, 0, sizeof *t);
        t->name = name;
        t->file = f->where;
        snprintf(where, sizeof where, "%s: tensor %.200s", f->where, name);
        sala__fields members = {j, n, where, "", f->err, f->error, 0};
        code = sala__tensor_read(&members, data, data_size, t);
    }
    if (code < 0) return code;
    return sala__tensors_cover(f, data, data_size, c->tensors + first, c->tensor_count - first);
}

// Append the tensors of a safetensors file in memory to c->tensors. Their names point into
// *strings, which the caller releases, on errors too. `file` and `bytes` must outlive the tensors.
static int sala__safetensors_parse(sala__checkpoint *c, const char *file,
                                   const unsigned char *bytes, int64_t size, char **strings,
                                   sala_error *err) {
    uint64_t header = 0;
    char where[1024];
    sala__json j;
    sala__fields f = {&j, 0, file, "", err, SALA_E_FILE, 0};
    *strings = NULL;
    if (size < 8)
        return sala__fields_fail(&f, "%d bytes are too few for a safetensors file", (int)size);
    memcpy(&header, bytes, 8);
    if (header > SALA__HEADER_LIMIT)
        return sala__fields_fail(&f, "not a safetensors file: a header of %llu bytes (at most %d)",
                                 (unsigned long long)header, SALA__HEADER_LIMIT);
    if ((int64_t)header > size - 8)
        return sala__fields_fail(&f, "truncated: a header of %d bytes in a file of %lld bytes",
                                 (int)header, (long long)size);
    if (header == 0 || bytes[8] != '{') // so that valid JSON can only be an object
        return sala__fields_fail(&f, "the header does not begin with '{'");
    snprintf(where, sizeof where, "%s, header", file);
    int code = sala__json_parse(&c->env, where, bytes + 8, (size_t)header, &j, err);
    if (code < 0) return code;
    code = sala__header_read(c, &f, bytes + 8 + header, size - 8 - (int64_t)header);
    *strings = j.strings.data; // keep the names, drop the rest
    j.strings.data = NULL;
    sala__json_free(&j);
    return code;
}

static int sala__shard_open(sala__checkpoint *c, const char *name, sala_error *err) {
    int code = sala__grow(&c->env, (void **)&c->shards, &c->shard_capacity, c->shard_count + 1,
                          sizeof *c->shards, "the list of shards", err);
    if (code < 0) return code;
    sala__shard *s = &c->shards[c->shard_count];
    memset(s, 0, sizeof *s);
    s->path = sala__join(&c->env, c->folder, name, err);
    if (!s->path) return SALA_E_MEMORY;
    c->shard_count++; // from here on sala__checkpoint_close cleans up
    if ((code = sala__map_file(s->path, &s->file, err)) < 0) return code;
    return sala__safetensors_parse(c, s->path, s->file.data, s->file.size, &s->strings, err);
}

// Sort by name for sala__checkpoint_find; a name may appear once only, in all files together.
static int sala__tensors_sort(sala__checkpoint *c, sala_error *err) {
    if (c->tensor_count)
        qsort(c->tensors, c->tensor_count, sizeof *c->tensors, sala__tensor_by_name);
    for (size_t i = 1; i < c->tensor_count; i++) {
        const sala__tensor *a = &c->tensors[i - 1], *b = &c->tensors[i];
        if (strcmp(a->name, b->name) == 0)
            return sala__fail(err, SALA_E_FILE, "%s: tensor %.200s exists twice: again in %s",
                              a->file, a->name, b->file);
    }
    return 0;
}

static sala__tensor *sala__checkpoint_find(sala__checkpoint *c, const char *name) {
    sala__tensor key;
    key.name = name;
    if (c->tensor_count == 0) return NULL;
    return (sala__tensor *)bsearch(&key, c->tensors, c->tensor_count, sizeof key,
                                   sala__tensor_by_name);
}

static const char *sala__file_name(const char *path) { // of a shard: its folder ends with '/'
    return strrchr(path, '/') + 1;
}

// Open each shard that the index names, once. Shards lie beside the index: a name with '/' or ".."
// could point anywhere and is refused.
static int sala__index_shards(sala__checkpoint *c, sala__fields *f) {
    const sala__json *j = f->json;
    for (int n = j->nodes[f->object].child; n >= 0; n = j->nodes[n].next) {
        const char *tensor = sala__json_key(j, n), *name = sala__json_text(j, n);
        if (!sala__plain_name(tensor, j->nodes[n].key_size))
            return sala__fields_fail(
                f, "weight_map has a name that is empty or has a control character");
        if (!name || !sala__plain_name(name, j->nodes[n].text_size))
            return sala__fields_fail(f, "weight_map names no file for tensor %.200s", tensor);
        if (strchr(name, '/') || strstr(name, ".."))
            return sala__fields_fail(
                f, "weight_map names the file \"%.200s\" outside the model's folder", name);
        size_t s = 0;
        while (s < c->shard_count && strcmp(sala__file_name(c->shards[s].path), name) != 0) s++;
        int code = s == c->shard_count ? sala__shard_open(c, name, f->err) : 0;
        if (code < 0) return code;
    }
    return sala__tensors_sort(c, f->err);
}

// Every tensor of the index in the shard that it names, and no tensor that the index does not know.
static int sala__index_agrees(sala__checkpoint *c, sala__fields *f) {
    const sala__json *j = f->json;
    for (int n = j->nodes[f->object].child; n >= 0; n = j->nodes[n].next) {
        const char *name = sala__json_key(j, n), *file = sala__json_text(j, n);
        sala__tensor *t = sala__checkpoint_find(c, name);
        if (!t || strcmp(sala__file_name(t->file), file) != 0)
            return sala__fields_fail(f, "tensor %.200s is not in %s%s%s", name, file,
                                     t ? " but in " : "", t ? t->file : "");
        t->used = 1;
    }
    for (size_t i = 0; i < c->tensor_count; i++) {
        sala__tensor *t = &c->tensors[i];
        if (!t->used)
            return sala__fields_fail(f, "tensor %.200s of %s is missing", t->name, t->file);
        t->used = 0;
    }
    return 0;
}

static int sala__index_open(sala__checkpoint *c, const char *path, sala_error *err) {
    sala__json j;
    int code = sala__json_file(&c->env, path, SALA__HEADER_LIMIT, &j, err);
    if (code < 0) return code;
    sala__fields f = {&j, sala__json_get(&j, 0, "weight_map"), path, "", err, SALA_E_FILE, 0};
    if (sala__json_at(&j, f.object)->type != SALA__OBJECT)
        code = sala__fields_fail(&f, "has no object \"weight_map\"");
    if (code == 0) code = sala__index_shards(c, &f);
    if (code == 0) code = sala__index_agrees(c, &f);
    sala__json_free(&j);
    return code;
}

static void sala__checkpoint_close(sala__checkpoint *c) {
    for (size_t i = 0; i < c->shard_count; i++) {
        sala__unmap_file(&c->shards[i].file);
        sala__release(&c->env, c->shards[i].path);
        sala__release(&c->env, c->shards[i].strings);
    }
    sala__release(&c->env, c->shards);
    sala__release(&c->env, c->tensors);
    sala__release(&c->env, c->folder);
    memset(c, 0, sizeof *c);
}

// Map a model folder's weights: model.safetensors, or else the shards of
// model.safetensors.index.json. Where both exist the single file is the model and the index is not
// read: it is a leftover of a merge.
static int sala__checkpoint_open(const sala__env *env, const char *folder, sala__checkpoint *c,
                                 sala_error *err) {
    memset(c, 0, sizeof *c);
    struct stat st;
    if (stat(folder, &st) < 0)
        return sala__fail(err, SALA_E_FILE, "%s: cannot open: %s", folder, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return sala__fail(err, SALA_E_FILE, "%s: not a folder", folder);
    c->env = *env;
    c->folder = sala__join(env, folder, "", err);
    char *single = c->folder ? sala__join(env, folder, "model.safetensors", err) : NULL;
    char *index = single ? sala__join(env, folder, "model.safetensors.index.json", err) : NULL;
    int code = SALA_E_MEMORY;
    if (index && sala__file_exists(single)) {
        code = sala__shard_open(c, "model.safetensors", err);
        if (code == 0) code = sala__tensors_sort(c, err);
    } else if (index && sala__file_exists(index)) {
        code = sala__index_open(c, index, err);
    } else if (index) {
        code = sala__fail(err, SALA_E_FILE,
                          "%s: holds neither model.safetensors nor model.safetensors.index.json",
                          folder);
    }
    sala__release(env, single);
    sala__release(env, index);
    if (code < 0) sala__checkpoint_close(c);
    return code;
}

// ---- config.json ----

#define SALA__CONFIG_LIMIT (4 << 20) // bytes
#define SALA__MAX_EOS 64

// How linear layers may be stored (nvfp4.md 4): see sala__bind_item.
enum { SALA__PLAIN = 1, SALA__GPTQ, SALA__COMPRESSED, SALA__MODELOPT };

// What configuration files say about that. The tensors decide; this is checked against them, and
// has what GPTQ's tensors do not tell.
typedef struct sala__scheme {
    int32_t kind;        // SALA__GPTQ ..; 0: nothing is said
    int32_t group;       // GPTQ: k that share a scale, -1: all
    int32_t zero_offset; // GPTQ: zero points are stored less this
    int32_t symmetric;   // GPTQ: all zero points are 8
    int32_t ordered;     // GPTQ: groups may be in the order of activations: X.g_idx must be there
} sala__scheme;

typedef struct sala__config {
    sala_dims dims;
    sala__scheme scheme;
    int32_t *sparse;  // [layers] 1: minicpm4, 0: lightning
    int32_t bos, pad; // -1: none
    int32_t *eos;     // [eos_count], room for SALA__MAX_EOS
    int32_t eos_count;
    int32_t tied;          // the head is the embedding
    int64_t max_positions; // what the model was made for; nothing is sized by it
    // Of an EAGLE-3 head (speculation.md 1.3) only: its dims have one layer, sparse, dense for ever,
    // whose q, k and v read two hidden widths, [embedding, feature].
    int32_t eagle;       // it is one
    int32_t aux[3];      // target layers whose output it reads
    int32_t draft_vocab; // rows of its head
    int32_t fc_norm;     // a norm in front of each third of fc
    int32_t raw_output;  // 1: logits of the feature without the final norm
    int32_t fc_bias;     // of the file, as the next two: 1: it has one
    int32_t own_embed;   // 1: the file's embedding; 0: the target's
    int32_t window;      // tokens that it was trained to see at most
    int32_t own_head;    // 1: the file's head; 0: the target's
    float *frequency;    // [head_dim / 2] of its rotary table
} sala__config;

// The same fields, one object deeper. The caller hands its error on: f->code = inner.code.
static sala__fields sala__fields_inside(const sala__fields *f, int object, const char *prefix) {
    sala__fields inner = *f;
    inner.object = object;
    inner.prefix = prefix;
    if (sala__json_at(f->json, object)->type != SALA__OBJECT && f->code == 0)
        sala__fields_fail(&inner, "%.*s is no object", (int)strlen(prefix) - 1, prefix);
    return inner;
}

// The same; of an object that is missing, or null, all fields are missing.
static sala__fields sala__fields_or_none(const sala__fields *f, const char *name,
                                         const char *prefix) {
    if (!sala__field_null(f, name)) return sala__fields_inside(f, sala__field(f, name), prefix);
    sala__fields none = *f;
    none.object = -1;
    none.prefix = prefix;
    return none;
}

// A field that, if it is there, must have one value.
static void sala__field_fixed(sala__fields *f, const char *name, int value, const char *why) {
    const sala__json_node *n = sala__json_at(f->json, sala__field(f, name));
    if (n->type != SALA__NULL && !(n->is_integer && n->integer == value))
        sala__field_refuse(f, name, why);
}

// The field is one of the words (separated by spaces), or missing.
static void sala__field_word(sala__fields *f, const char *name, const char *words) {
    const char *text = sala__json_text(f->json, sala__field(f, name));
    const char *at = text && *text && !strchr(text, ' ') ? strstr(words, text) : NULL;
    size_t size = at ? strlen(text) : 0;
    int whole = at && (at == words || at[-1] == ' ') && (at[size] == 0 || at[size] == ' ');
    if (!whole && !sala__field_null(f, name)) sala__field_refuse(f, name, words);
}

static void sala__scheme_gptq(sala__fields *f, sala__scheme *s) {
    s->kind = SALA__GPTQ;
    sala__field_fixed(f, "bits", 4, "4: other widths are not supported");
    sala__field_word(f, "checkpoint_format", "gptq gptq_v2");
    if (sala__field_bool(f, "is_marlin_format", 0))
        sala__field_refuse(f, "is_marlin_format", "false: Marlin's own order is not supported");
    const char *version = sala__json_text(f->json, sala__field(f, "checkpoint_format"));
    s->zero_offset = !version || strcmp(version, "gptq") == 0;
    s->group = sala__field_int_or_null(f, "group_size", 0, -1, 1 << 20);
    if (s->group == 0 && !sala__field_null(f, "group_size"))
        sala__field_refuse(f, "group_size", "the size of a group, or -1 for one group");
    s->ordered = sala__field_bool(f, "desc_act", 0);
    s->symmetric = sala__field_bool(f, "sym", 0);
}

static void sala__scheme_compressed(sala__fields *f, sala__scheme *s) {
    static const char formats[] = "nvfp4-pack-quantized mixed-precision";
    const sala__json *j = f->json;
    int groups = sala__field(f, "config_groups");
    s->kind = SALA__COMPRESSED;
    sala__field_word(f, "format", formats);
    for (int n = sala__json_at(j, groups)->child; n >= 0; n = j->nodes[n].next) {
        sala__fields g = sala__fields_inside(f, n, "quantization_config.config_groups.");
        sala__field_word(&g, "format", formats);
        int weights = sala__field(&g, "weights");
        sala__fields w =
            sala__fields_inside(&g, weights, "quantization_config.config_groups.weights.");
        sala__field_fixed(&w, "num_bits", 4, "4: other widths are not supported");
        sala__field_fixed(&w, "group_size", 16, "16, as NVFP4 has it");
        sala__field_word(&w, "type", "float");
        f->code = w.code;
    }
}

static void sala__scheme_modelopt(sala__fields *f, sala__scheme *s) {
    s->kind = SALA__MODELOPT;
    sala__field_word(f, "quant_algo", "NVFP4 W4A16_NVFP4 MIXED_PRECISION");
    sala__field_fixed(f, "group_size", 16, "16, as NVFP4 has it");
}

// f: at the object that describes the quantisation.
static void sala__scheme_read(sala__fields *f, sala__scheme *s) {
    sala__field_word(f, "quant_method", "gptq compressed-tensors modelopt modelopt_fp4");
    const char *method = sala__json_text(f->json, sala__field(f, "quant_method"));
    if (f->code < 0) return;
    if (method ? strcmp(method, "gptq") == 0 : sala__field(f, "bits") >= 0)
        sala__scheme_gptq(f, s);
    else if (method ? method[0] == 'c' : sala__field(f, "config_groups") >= 0)
        sala__scheme_compressed(f, s);
    else if (method || sala__field(f, "quant_algo") >= 0)
        sala__scheme_modelopt(f, s);
    else
        sala__field_refuse(f, "quant_method", "gptq, compressed-tensors or modelopt");
}

// In config.json: "quantization_config" or, in older files, "compression_config".
static void sala__config_scheme(sala__fields *f, sala__scheme *s) {
    static const char *const names[][2] = {{"quantization_config", "quantization_config."},
                                           {"compression_config", "compression_config."}};
    for (int i = 0; i < 2; i++) {
        if (sala__field_null(f, names[i][0]) || s->kind) continue;
        sala__fields q = sala__fields_inside(f, sala__field(f, names[i][0]), names[i][1]);
        sala__scheme_read(&q, s);
        f->code = q.code;
    }
}

// Which model this is, and everything that is refused whatever the rest says.
static void sala__config_refusals(sala__fields *f) {
    static const char *const must_be_null[][2] = {
        {"rope_scaling", "null: scaled positions are not supported"},
        {"rope_parameters", "null: give the base as rope_theta"},
    };
    const sala__json *j = f->json;
    int list = sala__field(f, "architectures"), act = sala__field(f, "hidden_act");
    int first = sala__json_at(j, list)->child;
    char value[64];
    if (!sala__json_is(j, sala__field(f, "model_type"), "minicpm_sala"))
        sala__field_refuse(f, "model_type", "\"minicpm_sala\"");
    if (list >= 0 && !sala__json_is(j, first, "MiniCPMSALAForCausalLM"))
        sala__fields_fail(f, "architectures names %s; this engine runs MiniCPMSALAForCausalLM",
                          sala__json_show(j, first, value));
    for (int i = 0; i < 2; i++)
        if (!sala__field_null(f, must_be_null[i][0]))
            sala__field_refuse(f, must_be_null[i][0], must_be_null[i][1]);
    if (sala__field_bool(f, "attention_bias", 0))
        sala__field_refuse(f, "attention_bias", "false: biases are not supported");
    if (act >= 0 && !sala__json_is(j, act, "silu")) sala__field_refuse(f, "hidden_act", "\"silu\"");
}

static void sala__config_shape(sala__fields *f, sala__config *c) {
    sala_dims *d = &c->dims;
    int32_t wide = 1 << 20;
    d->vocab = sala__field_int(f, "vocab_size", 73448, 1, 1 << 24);
    d->hidden = sala__field_int(f, "hidden_size", 4096, 1, wide);
    d->ffn = sala__field_int(f, "intermediate_size", 16384, 1, wide);
    d->layers = sala__field_int(f, "num_hidden_layers", 32, 1, 1024);
    d->heads = sala__field_int(f, "num_attention_heads", 32, 1, 4096);
    d->kv_heads = sala__field_int_or_null(f, "num_key_value_heads", d->heads, 1, d->heads);
    int32_t head_dim = sala__field(f, "head_dim") < 0 ? 128 : d->hidden / d->heads;
    d->head_dim = sala__field_int_or_null(f, "head_dim", head_dim, 1, 4096);
    d->sparse_rope = sala__field_bool(f, "attn_use_rope", 0);
    d->sparse_gate = sala__field_bool(f, "attn_use_output_gate", 1);
    d->lin_heads = sala__field_int_or_null(f, "lightning_nh", d->heads, 1, 4096);
    d->lin_kv_heads = sala__field_int_or_null(f, "lightning_nkv", d->kv_heads, 1, 4096);
    d->lin_dim = sala__field_int_or_null(f, "lightning_head_dim", d->head_dim, 1, 4096);
    d->lin_rope = sala__field_bool(f, "lightning_use_rope", 1);
    d->lin_qk_norm = sala__field_bool(f, "qk_norm", 1);
    d->lin_norm = sala__field_bool(f, "use_output_norm", 1);
    d->lin_gate = sala__field_bool(f, "use_output_gate", 1);
    c->tied = sala__field_bool(f, "tie_word_embeddings", 0);
    c->max_positions = sala__field_int(f, "max_position_embeddings", 524288, 1, INT32_MAX);
}

static void sala__config_scalars(sala__fields *f, const sala__env *env, sala_dims *d) {
    double depth = sala__field_number(f, "scale_depth", 0, 1.4, 1e-6, 1e6);
    double base = sala__field_number(f, "dim_model_base", 0, 256, 1e-3, 1e6);
    d->eps = (float)sala__field_number(f, "rms_norm_eps", 0, 1e-6, 1e-12, 1);
    d->rope_theta = (float)sala__field_number(f, "rope_theta", 0, 10000, 1, 1e12);
    d->embed_scale = (float)sala__field_number(f, "scale_emb", 0, 12, 1e-6, 1e6);
    d->residual_scale = (float)(depth / sqrt((double)d->layers));
    d->logit_divisor = (float)(d->hidden / base);
    d->attn_scale = (float)(1 / sqrt((double)d->head_dim));
    d->lin_scale = (float)(1 / sqrt((double)d->lin_dim));
    int scale = sala__field(f, "lightning_scale");
    if (scale < 0 || sala__json_is(f->json, scale, "1/sqrt(d)")) return;
    if (sala__json_is(f->json, scale, "1/d")) {
        d->lin_scale = (float)(1.0 / d->lin_dim);
    } else if (sala__json_text(f->json, scale)) {
        d->lin_scale = 1; // what the official code does with any other string
        sala__log(env, SALA_LOG_WARNING,
                  "%s: lightning_scale is neither \"1/sqrt(d)\" nor \"1/d\": taken as 1", f->where);
    } else {
        sala__field_refuse(f, "lightning_scale", "a string, \"1/sqrt(d)\" or \"1/d\"");
    }
}

static void sala__config_sparse(sala__fields *f, sala_dims *d) {
    int node = sala__field(f, "sparse_config"), type = sala__json_at(f->json, node)->type;
    if (type != SALA__OBJECT && type != SALA__NULL)
        sala__field_refuse(f, "sparse_config", "an object");
    f->object = node;
    f->prefix = "sparse_config.";
    d->kernel = sala__field_int(f, "kernel_size", 32, 1, 1 << 16);
    d->stride = sala__field_int(f, "kernel_stride", 16, 1, 1 << 16);
    d->block = sala__field_int(f, "block_size", 64, 1, 1 << 16);
    d->init_blocks = sala__field_int(f, "init_blocks", 1, 0, 1 << 16);
    d->dense_len = sala__field_int(f, "dense_len", 8192, 0, INT32_MAX);
    int32_t window = sala__field_int(f, "window_size", 2048, 0, 1 << 20);
    int32_t topk = sala__field_int(f, "topk", 64, 1, 1 << 16);
    if (sala__field_bool(f, "use_nope", 0))
        sala__field_refuse(f, "use_nope", "false: it is not supported");
    // model.md 8: compressed rows must tile blocks and windows, and top_k hold the forced blocks.
    if (d->kernel % d->stride != 0)
        sala__field_refuse(f, "kernel_size", "a multiple of kernel_stride");
    if (d->block % d->stride != 0)
        sala__field_refuse(f, "block_size", "a multiple of kernel_stride");
    if (window % d->block != 0) sala__field_refuse(f, "window_size", "a multiple of block_size");
    if (topk < d->init_blocks + 1) sala__field_refuse(f, "topk", "at least init_blocks + 1");
    d->local_blocks = window / d->block;
    d->top_k = topk + d->local_blocks; // the window is added to the configured number
    f->object = 0;
    f->prefix = "";
}

// What must fit together, and what the CPU's vector loops ask for.
static void sala__config_fits(sala__fields *f, const sala_dims *d) {
    if (d->heads * (int64_t)d->head_dim != d->hidden)
        sala__fields_fail(
            f, "num_attention_heads %d times head_dim %d is not hidden_size %d: not supported",
            d->heads, d->head_dim, d->hidden);
    if (d->heads % d->kv_heads != 0)
        sala__fields_fail(f, "num_attention_heads %d is not a multiple of num_key_value_heads %d",
                          d->heads, d->kv_heads);
    if (d->lin_heads % d->lin_kv_heads != 0)
        sala__fields_fail(f, "lightning_nh %d is not a multiple of lightning_nkv %d", d->lin_heads,
                          d->lin_kv_heads);
    if (d->lin_heads * (int64_t)d->lin_dim > 1 << 20)
        sala__fields_fail(f, "lightning_nh %d times lightning_head_dim %d is more than %d",
                          d->lin_heads, d->lin_dim, 1 << 20);
    const char *names[] = {"hidden_size", "intermediate_size", "head_dim", "lightning_head_dim"};
    int32_t values[] = {d->hidden, d->ffn, d->head_dim, d->lin_dim};
    for (int i = 0; i < 4; i++)
        if (values[i] % SALA_LANES != 0)
            sala__fields_fail(f, "%s is %d; expected a multiple of %d: others are not supported",
                              names[i], values[i], SALA_LANES);
}

static void sala__config_mixers(sala__fields *f, sala__config *c) { // c->sparse: [layers]
    const sala__json *j = f->json;
    int list = sala__field(f, "mixer_types"), layer = 0;
    char value[64];
    if (sala__json_at(j, list)->type != SALA__ARRAY)
        sala__field_refuse(f, "mixer_types", "a list with one string for each layer");
    else if (j->nodes[list].count != c->dims.layers)
        sala__fields_fail(f, "mixer_types has %d entries for num_hidden_layers %d",
                          j->nodes[list].count, c->dims.layers);
    for (int n = sala__json_at(j, list)->child; n >= 0 && f->code == 0; n = j->nodes[n].next) {
        c->sparse[layer] = sala__json_is(j, n, "minicpm4");
        if (!c->sparse[layer] && !sala__json_is(j, n, "lightning-attn") &&
            !sala__json_is(j, n, "lightning") && !sala__json_is(j, n, "lightning_attn"))
            sala__fields_fail(f,
                              "mixer_types[%d] is %s; expected \"minicpm4\" or \"lightning-attn\"",
                              layer, sala__json_show(j, n, value));
        layer++;
    }
}

// bos, pad and eos, where the file has them; eos is a number or a list.
static void sala__config_ids(sala__fields *f, sala__config *c) {
    const sala__json *j = f->json;
    int last = c->dims.vocab - 1, node = sala__field(f, "eos_token_id");
    int list = sala__json_at(j, node)->type == SALA__ARRAY;
    char value[64];
    c->bos = sala__field_int_or_null(f, "bos_token_id", c->bos, 0, last);
    c->pad = sala__field_int_or_null(f, "pad_token_id", c->pad, -1, last);
    if (sala__field_null(f, "eos_token_id")) return;
    c->eos_count = 0;
    for (int n = list ? j->nodes[node].child : node; n >= 0; n = list ? j->nodes[n].next : -1) {
        const sala__json_node *id = &j->nodes[n];
        if (!id->is_integer || id->integer < 0 || id->integer > last)
            sala__fields_fail(f, "eos_token_id holds %s; expected tokens from 0 to %d",
                              sala__json_show(j, n, value), last);
        else if (c->eos_count == SALA__MAX_EOS)
            sala__fields_fail(f, "eos_token_id lists more than %d tokens", SALA__MAX_EOS);
        else
            c->eos[c->eos_count++] = (int32_t)id->integer;
    }
}

static void sala__config_free(const sala__env *env, sala__config *c) {
    sala__release(env, c->sparse);
    sala__release(env, c->eos);
    sala__release(env, c->frequency);
    memset(c, 0, sizeof *c);
}

static int sala__config_parse(const sala__env *env, const sala__json *j, const char *path,
                              sala__config *c, sala_error *err) {
    static const int32_t eos[2] = {2, 73440}; // the release's; config.json may leave them out
    sala__fields f = {j, 0, path, "", err, SALA_E_MODEL, 0};
    memset(c, 0, sizeof *c);
    if (j->nodes[0].type != SALA__OBJECT) sala__fields_fail(&f, "not a JSON object");
    sala__config_refusals(&f);
    sala__config_scheme(&f, &c->scheme);
    sala__config_shape(&f, c);
    sala__config_scalars(&f, env, &c->dims);
    sala__config_sparse(&f, &c->dims);
    sala__config_fits(&f, &c->dims);
    if (f.code < 0) return f.code;
    size_t layers = (size_t)c->dims.layers;
    c->sparse = (int32_t *)sala__alloc(env, layers, sizeof *c->sparse, "mixer_types", err);
    c->eos = (int32_t *)sala__alloc(env, SALA__MAX_EOS, sizeof *c->eos, "eos_token_id", err);
    if (!c->sparse || !c->eos) f.code = SALA_E_MEMORY;
    if (f.code == 0) sala__config_mixers(&f, c);
    c->bos = sala__field(&f, "bos_token_id") < 0 && c->dims.vocab > 1 ? 1 : -1;
    c->pad = sala__field(&f, "pad_token_id") < 0 && c->dims.vocab > 2 ? 2 : -1;
    for (int i = 0; i < 2 && f.code == 0 && sala__field(&f, "eos_token_id") < 0; i++)
        if (eos[i] < c->dims.vocab) c->eos[c->eos_count++] = eos[i];
    if (f.code == 0) sala__config_ids(&f, c);
    if (f.code < 0) sala__config_free(env, c);
    return f.code;
}

// ---- config.json of an EAGLE-3 head (speculation.md 1.2, 1.3) ----

// A member that is missing or null has its usual value; the log says so.
static double sala__draft_number(sala__fields *f, const sala__env *env, const char *name,
                                 double usual, double low, double high) {
    if (!sala__field_null(f, name)) return sala__field_number(f, name, 0, usual, low, high);
    sala__log(env, SALA_LOG_INFO, "%s: %s%s is not given: taken as %g", f->where, f->prefix, name,
              usual);
    return usual;
}

// What would be another kind of head. f: at the file's object, or at eagle_config, where some have it.
static void sala__draft_refusals(sala__fields *f) {
    static const char *const must_be_false[] = {"norm_before_fc",    "norm_before_residual",
                                                "parallel_drafting", "attention_bias",
                                                "mlp_bias",          "tie_word_embeddings"};
    for (size_t i = 0; i < sizeof must_be_false / sizeof *must_be_false; i++) {
        const sala__json_node *n = sala__json_at(f->json, sala__field(f, must_be_false[i]));
        if (n->type != SALA__NULL && !(n->type == SALA__BOOL && n->number == 0))
            sala__field_refuse(f, must_be_false[i], "false: others are not supported");
    }
    if (!sala__field_bool(f, "use_aux_hidden_state", 1))
        sala__field_refuse(f, "use_aux_hidden_state", "true: EAGLE-3 reads three layers");
    const sala__json *j = f->json;
    const int first = sala__json_at(j, sala__field(f, "architectures"))->child;
    const char *name = sala__json_text(j, first);
    char value[64];
    if (first >= 0 && (!name || !strstr(name, "Eagle3")))
        sala__fields_fail(f, "architectures names %s; expected LlamaForCausalLMEagle3",
                          sala__json_show(j, first, value));
    sala__field_word(f, "model_type", "llama");
    sala__field_word(f, "hidden_act", "silu");
    sala__field_fixed(f, "num_hidden_layers", 1, "1: heads of more layers are not supported");
}

// Those whose outputs a head reads that does not say it.
static void sala__draft_layers(int32_t layers, int64_t *ids) {
    ids[0] = 1;
    ids[1] = layers / 2 - 1;
    ids[2] = layers - 4;
}

// Which layers' outputs it reads, of `layers`. Some files have the numbers of the layers that read
// those: they begin with 2 where the others begin with 1. What begins otherwise may be either.
static void sala__draft_aux(sala__fields *f, const sala__env *env, int32_t layers, int32_t *aux) {
    static const char *const names[] = {"eagle_aux_hidden_state_layer_ids", "sala_output_layers"};
    const sala__json *j = f->json;
    const int own = !sala__field_null(f, names[1]), list = sala__field(f, names[own]);
    int64_t ids[3];
    sala__draft_layers(layers, ids);
    if (sala__field_null(f, names[own]))
        sala__log(env, SALA_LOG_INFO, "%s: %s is not given: taken as [1, %d, %d]", f->where,
                  names[0], (int)ids[1], (int)ids[2]);
    else if (sala__json_at(j, list)->type != SALA__ARRAY || j->nodes[list].count != 3 ||
             sala__json_sizes(j, list, ids) != 3)
        sala__field_refuse(f, names[own], "three rising layers");
    const int64_t shift = own ? 0 : ids[0] - 1;
    if (shift != 0 && shift != 1)
        sala__fields_fail(f,
                          "%s begins neither with 1 (outputs of layers) nor with 2 (inputs): write "
                          "the layers whose output it reads as eagle_config.%s",
                          names[0], names[1]);
    else if (ids[1] <= ids[0] || ids[2] <= ids[1] || ids[2] - shift >= layers)
        sala__fields_fail(f, "%s must be three rising layers of the %d of the model", names[own],
                          layers);
    for (int i = 0; i < 3 && f->code == 0; i++) aux[i] = (int32_t)(ids[i] - shift);
}

// The pair of dimensions that turns so many times over `positions`.
static double sala__yarn_pair(double turns, double dim, double theta, double positions) {
    return dim * log(positions / (turns * 6.283185307179586)) / (2 * log(theta));
}

// c->frequency, as Hugging Face's modeling_rope_utils has it. f: at the object that describes the
// scaling. YaRN's factor of q and of k goes into the scale of their product.
static void sala__draft_frequencies(sala__fields *f, const sala__env *env, sala__config *c) {
    const char *kind = sala__json_text(f->json, sala__field(f, "rope_type"));
    if (!kind) kind = sala__json_text(f->json, sala__field(f, "type"));
    const int scaled = kind && *kind != 'd', yarn = scaled && *kind == 'y',
              llama = scaled && !yarn && kind[1] == 'l', dim = c->dims.head_dim;
    double factor = 1, old = (double)c->max_positions, low = 1, high = 1,
           theta = (double)c->dims.rope_theta;
    if (scaled) factor = sala__field_number(f, "factor", 0, 0, 1, 1e6);
    if (factor < 1) sala__field_refuse(f, "factor", "a number");
    if (yarn || llama)
        old = sala__draft_number(f, env, "original_max_position_embeddings", old, 1, 1e9);
    if (llama) {
        low = sala__draft_number(f, env, "low_freq_factor", 1, 1e-3, 1e6);
        high = sala__draft_number(f, env, "high_freq_factor", 4, 1e-3, 1e6);
        if (high <= low) sala__field_refuse(f, "high_freq_factor", "more than low_freq_factor");
    } else if (yarn) {
        double most = sala__draft_number(f, env, "beta_fast", 32, 1e-3, 1e6);
        double least = sala__draft_number(f, env, "beta_slow", 1, 1e-3, 1e6);
        double scale = 0.1 * log(factor) + 1;
        low = fmax(floor(sala__yarn_pair(most, dim, theta, old)), 0);
        high = fmin(ceil(sala__yarn_pair(least, dim, theta, old)), dim - 1);
        if (low == high) high += 0.001;
        scale = sala__draft_number(f, env, "attention_factor", scale, 1e-3, 1e3);
        c->dims.attn_scale *= (float)(scale * scale);
    }
    for (int i = 0; i < dim / 2 && c->frequency; i++) {
        double x = 1 / pow(theta, 2.0 * i / dim), part = scaled; // part: how much is slowed
        if (llama) part = 1 - (old * x / 6.283185307179586 - low) / (high - low);
        if (yarn) part = (i - low) / (high - low);
        part = fmin(fmax(part, 0), 1);
        c->frequency[i] = (float)(part * x / factor + (1 - part) * x);
    }
}

// Its base and scaling: newer exports have both in rope_parameters.
static void sala__draft_rope(sala__fields *f, const sala__env *env, sala__config *c) {
    static const char kinds[] = "default linear llama3 yarn", *const unknown[] = {"mscale",
                                                                                  "mscale_all_dim",
                                                                                  "truncate"};
    const int newer = !sala__field_null(f, "rope_parameters");
    const char *name = newer ? "rope_parameters" : "rope_scaling";
    sala__fields r = sala__fields_or_none(f, name, newer ? "rope_parameters." : "rope_scaling.");
    sala__field_word(&r, "rope_type", kinds);
    sala__field_word(&r, "type", kinds);
    sala__field_fixed(&r, "partial_rotary_factor", 1, "1: others are not supported");
    for (int i = 0; i < 3; i++)
        if (!sala__field_null(&r, unknown[i])) sala__field_refuse(&r, unknown[i], "none");
    if (r.code == 0) {
        sala__fields *at = sala__field_null(&r, "rope_theta") ? f : &r;
        c->dims.rope_theta = (float)sala__draft_number(at, env, "rope_theta", 1e4, 1.001, 1e12);
    }
    if (r.code == 0 && f->code == 0) sala__draft_frequencies(&r, env, c);
    if (f->code == 0) f->code = r.code;
}

// Its layer in the target's terms: sparse attention that never leaves the dense form, with pages of
// 64 tokens.
static void sala__draft_shape(sala__fields *f, const sala__env *env, const sala__config *target,
                              sala__config *c) {
    const sala_dims *t = &target->dims;
    sala_dims *d = &c->dims;
    char of_target[48];
    *d = *t;
    snprintf(of_target, sizeof of_target, "%d, the model's", t->hidden);
    sala__field_fixed(f, "hidden_size", t->hidden, of_target);
    sala__field_fixed(f, "target_hidden_size", t->hidden, of_target);
    snprintf(of_target, sizeof of_target, "%d, the model's", t->vocab);
    sala__field_fixed(f, "vocab_size", t->vocab, of_target);
    d->layers = 1;
    d->ffn = sala__field_int(f, "intermediate_size", t->ffn, 1, 1 << 20);
    d->heads = sala__field_int(f, "num_attention_heads", t->heads, 1, 4096);
    d->kv_heads = sala__field_int_or_null(f, "num_key_value_heads", d->heads, 1, d->heads);
    d->head_dim = sala__field_int_or_null(f, "head_dim", d->hidden / d->heads, 1, 4096);
    d->sparse_rope = 1;
    d->sparse_gate = 0;
    d->block = 64;
    d->kernel = 32;
    d->stride = 16;
    d->init_blocks = d->local_blocks = 1;
    d->top_k = 3;
    d->dense_len = INT32_MAX;
    d->eps = (float)sala__draft_number(f, env, "rms_norm_eps", 1e-6, 1e-12, 1);
    d->embed_scale = d->residual_scale = d->logit_divisor = 1;
    d->attn_scale = (float)(1 / sqrt((double)d->head_dim));
    c->draft_vocab = sala__field_int_or_null(f, "draft_vocab_size", d->vocab, 1, d->vocab);
    c->max_positions = sala__field_int(f, "max_position_embeddings", 2048, 1, INT32_MAX);
    c->fc_norm = sala__field_bool(f, "fc_norm", 0);
    c->raw_output = !sala__field_bool(f, "norm_output", 1);
    sala__config_fits(f, d);
}

static int sala__draft_config_parse(const sala__env *env, const sala__json *j, const char *path,
                                    const sala__config *target, sala__config *c, sala_error *err) {
    sala__fields f = {j, 0, path, "", err, SALA_E_MODEL, 0};
    memset(c, 0, sizeof *c);
    c->eagle = 1;
    c->bos = c->pad = -1;
    c->own_head = 1;
    if (j->nodes[0].type != SALA__OBJECT) sala__fields_fail(&f, "not a JSON object");
    sala__draft_refusals(&f);
    sala__config_scheme(&f, &c->scheme);
    sala__fields inner = sala__fields_or_none(&f, "eagle_config", "eagle_config.");
    sala__draft_refusals(&inner);
    sala__draft_aux(&inner, env, target->dims.layers, c->aux);
    c->window = sala__field_int_or_null(&inner, "sala_window", 32768, 512, 1 << 20);
    if (c->window % 64) sala__field_refuse(&inner, "sala_window", "a multiple of 64");
    f.code = inner.code;
    sala__draft_shape(&f, env, target, c);
    if (f.code < 0) return f.code;
    size_t half = (size_t)c->dims.head_dim / 2;
    c->sparse = (int32_t *)sala__alloc(env, 1, sizeof *c->sparse, "the draft head", err);
    c->frequency = (float *)sala__alloc(env, half, sizeof(float), "rotary tables", err);
    if (!c->sparse || !c->frequency) f.code = SALA_E_MEMORY;
    if (c->sparse) c->sparse[0] = 1;
    sala__draft_rope(&f, env, c);
    if (f.code < 0) sala__config_free(env, c);
    return f.code;
}

// The config.json of a head for `target`, or (NULL) of a model.
static int sala__draft_config_read(const sala__env *env, const char *path,
                                   const sala__config *target, sala__config *c, sala_error *err) {
    sala__json j;
    memset(c, 0, sizeof *c);
    int code = sala__json_file(env, path, SALA__CONFIG_LIMIT, &j, err);
    if (code < 0) return code;
    code = target ? sala__draft_config_parse(env, &j, path, target, c, err)
                  : sala__config_parse(env, &j, path, c, err);
    sala__json_free(&j);
    return code;
}

static int sala__config_read(const sala__env *env, const char *path, sala__config *c,
                             sala_error *err) {
    return sala__draft_config_read(env, path, NULL, c, err);
}

// generation_config.json, if the folder has one: its special tokens are newer than config.json's.
static int sala__generation_config_read(const sala__env *env, const char *folder, sala__config *c,
                                        sala_error *err) {
    char *path = sala__join(env, folder, "generation_config.json", err);
    if (!path) return SALA_E_MEMORY;
    sala__json j;
    sala__fields f = {&j, 0, path, "", err, SALA_E_MODEL, 0};
    if (sala__file_exists(path)) {
        f.code = sala__json_file(env, path, SALA__CONFIG_LIMIT, &j, err);
        if (f.code == 0) {
            if (j.nodes[0].type != SALA__OBJECT) sala__fields_fail(&f, "not a JSON object");
            sala__config_ids(&f, c);
            sala__json_free(&j);
        }
    }
    sala__release(env, path);
    return f.code;
}

// What ModelOpt and GPTQ write beside config.json, where that says nothing of quantisation.
static int sala__scheme_files_read(const sala__env *env, const char *folder, sala__config *c,
                                   sala_error *err) {
    static const char *const names[] = {"hf_quant_config.json", "quantize_config.json"};
    int code = 0;
    for (int i = 0; i < 2 && code == 0 && !c->scheme.kind; i++) {
        char *path = sala__join(env, folder, names[i], err);
        if (!path) return SALA_E_MEMORY;
        sala__json j;
        sala__fields f = {&j, 0, path, "", err, SALA_E_MODEL, 0};
        if (sala__file_exists(path)) {
            code = sala__json_file(env, path, SALA__CONFIG_LIMIT, &j, err);
            if (code == 0) {
                sala__fields q =
                    sala__fields_inside(&f, i == 0 ? sala__field(&f, "quantization") : 0,
                                        i == 0 ? "quantization." : "");
                sala__scheme_read(&q, &c->scheme);
                code = q.code;
                sala__json_free(&j);
            }
        }
        sala__release(env, path);
    }
    return code;
}

// The decay slope of each lightning head, the same in every layer (model.md 4.6): for a power of
// two, 2^(-8(h+1)/heads); otherwise those of the next lower power p, then every other one of 2p.
static void sala__slopes(int heads, float *out) { // out: [heads]
    int p = 1;
    while (p * 2 <= heads) p *= 2;
    for (int h = 0; h < heads; h++) {
        double step = h < p ? 8.0 * (h + 1) / p : 8.0 * (2 * (h - p) + 1) / (2.0 * p);
        out[h] = (float)exp2(-step);
    }
}

// ---- weights ----

typedef struct sala__layer {
    int32_t sparse;
    sala_weight input_norm, post_norm, q, k, v, o; // data NULL: this layer has none
    sala_weight gate;                              // o_gate or z_proj
    sala_weight q_norm, k_norm, o_norm;            // lightning only
    sala_weight mlp_gate, mlp_up, mlp_down;
} sala__layer;

typedef struct sala__weights {
    sala_weight embed, final_norm, head;
    sala_weight fc, fc_bias, fc_norm[3], hidden_norm; // of an EAGLE-3 head only
    int32_t *target_ids; // [draft_vocab] of its head: the target's token of each of its own
    sala__layer *layers; // [layers]
    int64_t parameters, bytes;
    int64_t decode_bytes; // of the linear layers and the head: read for each token
    int64_t copied;       // what sala__weights_load puts into memory
    void *owned;          // synthetic data or NULL
    float *alphas;        // of synthetic 4-bit weights, or NULL
    void *blocks;         // what loading 4-bit weights took: a list, each begins with the next
} sala__weights;

// One tensor that the model needs.
typedef struct sala__item {
    char name[96];
    int32_t layer;       // -1: outside the layers
    sala_weight *weight; // where it goes
    int32_t n, k;
    const char *n_name, *k_name; // what these are in config.json
} sala__item;

// A dimension of the model and what it is in config.json; a row of the table of a layer's tensors.
typedef struct sala__extent {
    int32_t size;
    const char *name;
} sala__extent;

typedef struct sala__rule {
    const char *name;
    int32_t present; // in this layer?
    sala_weight *weight;
    sala__extent n, k;
} sala__rule;

// The tensors of a model are numbered 0 .. sala__item_count - 1: embedding, layers, final norm,
// head. Numbers whose tensor this model lacks give 0, the others fill `item` and give 1.
enum { SALA__RULES = 18 }; // of a layer

enum { SALA__DRAFT_RULES = 18 }; // of an EAGLE-3 head, all its tensors

static int sala__item_count(const sala__config *c) {
    return c->eagle ? SALA__DRAFT_RULES : c->dims.layers * SALA__RULES + 3;
}

static int sala__item_set(sala__item *item, const sala__rule *rule, const char *prefix, int layer) {
    if (!rule->present) return 0;
    snprintf(item->name, sizeof item->name, "%s%s.weight", prefix, rule->name);
    item->layer = layer;
    item->weight = rule->weight;
    item->n = rule->n.size;
    item->k = rule->k.size;
    item->n_name = rule->n.name;
    item->k_name = rule->k.name;
    return 1;
}

// The same of an EAGLE-3 head: names as sala__draft_names makes them.
static int sala__draft_item_at(const sala__config *c, sala__weights *w, int index,
                               sala__item *item) {
    const sala_dims *d = &c->dims;
    sala__layer *l = &w->layers[0];
    const sala__extent one = {1, "1"}, vocab = {d->vocab, "vocab_size"},
                       own_vocab = {c->draft_vocab, "draft_vocab_size"},
                       hidden = {d->hidden, "hidden_size"},
                       twice = {2 * d->hidden, "2 * hidden_size"},
                       thrice = {3 * d->hidden, "3 * hidden_size"},
                       ffn = {d->ffn, "intermediate_size"},
                       q = {d->heads * d->head_dim, "num_attention_heads * head_dim"},
                       kv = {d->kv_heads * d->head_dim, "num_key_value_heads * head_dim"};
    const sala__rule rules[SALA__DRAFT_RULES] = {
        {"embed_tokens", c->own_embed, &w->embed, vocab, hidden},
        {"fc", 1, &w->fc, hidden, thrice},
        {"fc_bias", c->fc_bias, &w->fc_bias, hidden, one},
        {"fc_norm.0", c->fc_norm, &w->fc_norm[0], hidden, one},
        {"fc_norm.1", c->fc_norm, &w->fc_norm[1], hidden, one},
        {"fc_norm.2", c->fc_norm, &w->fc_norm[2], hidden, one},
        {"midlayer.input_layernorm", 1, &l->input_norm, hidden, one},
        {"midlayer.hidden_norm", 1, &w->hidden_norm, hidden, one},
        {"midlayer.self_attn.q_proj", 1, &l->q, q, twice},
        {"midlayer.self_attn.k_proj", 1, &l->k, kv, twice},
        {"midlayer.self_attn.v_proj", 1, &l->v, kv, twice},
        {"midlayer.self_attn.o_proj", 1, &l->o, hidden, q},
        {"midlayer.post_attention_layernorm", 1, &l->post_norm, hidden, one},
        {"midlayer.mlp.gate_proj", 1, &l->mlp_gate, ffn, hidden},
        {"midlayer.mlp.up_proj", 1, &l->mlp_up, ffn, hidden},
        {"midlayer.mlp.down_proj", 1, &l->mlp_down, hidden, ffn},
        {"norm", 1, &w->final_norm, hidden, one},
        {"lm_head", c->own_head, &w->head, own_vocab, hidden},
    };
    return sala__item_set(item, &rules[index], "", rules[index].name[0] == 'm' ? 0 : -1);
}

static int sala__item_at(const sala__config *c, sala__weights *w, int index, sala__item *item) {
    if (c->eagle) return sala__draft_item_at(c, w, index, item);
    const sala_dims *d = &c->dims;
    const int last = d->layers * SALA__RULES + 2, inside = index > 0 && index < last - 1;
    const int layer = inside ? (index - 1) / SALA__RULES : 0;
    const int row = inside  ? (index - 1) % SALA__RULES + 1
                    : index ? index - last + SALA__RULES + 2
                            : 0;
    sala__layer *l = &w->layers[layer];
    const int32_t sparse = c->sparse[layer], lin = !sparse, qk_norm = lin && d->lin_qk_norm;
    const sala__extent one = {1, "1"}, vocab = {d->vocab, "vocab_size"},
                       hidden = {d->hidden, "hidden_size"}, ffn = {d->ffn, "intermediate_size"},
                       q = {d->heads * d->head_dim, "num_attention_heads * head_dim"},
                       kv = {d->kv_heads * d->head_dim, "num_key_value_heads * head_dim"},
                       lin_q = {d->lin_heads * d->lin_dim, "lightning_nh * lightning_head_dim"},
                       lin_kv = {d->lin_kv_heads * d->lin_dim,
                                 "lightning_nkv * lightning_head_dim"},
                       lin_dim = {d->lin_dim, "lightning_head_dim"};
    const sala__rule rules[SALA__RULES + 3] = {
        {"model.embed_tokens", 1, &w->embed, vocab, hidden},
        {"input_layernorm", 1, &l->input_norm, hidden, one},
        {"self_attn.q_proj", sparse, &l->q, q, hidden},
        {"self_attn.k_proj", sparse, &l->k, kv, hidden},
        {"self_attn.v_proj", sparse, &l->v, kv, hidden},
        {"self_attn.o_gate", sparse && d->sparse_gate, &l->gate, q, hidden},
        {"self_attn.o_proj", sparse, &l->o, hidden, q},
        {"self_attn.q_proj", lin, &l->q, lin_q, hidden},
        {"self_attn.k_proj", lin, &l->k, lin_kv, hidden},
        {"self_attn.v_proj", lin, &l->v, lin_kv, hidden},
        {"self_attn.q_norm", qk_norm, &l->q_norm, lin_dim, one},
        {"self_attn.k_norm", qk_norm, &l->k_norm, lin_dim, one},
        {"self_attn.o_norm", lin && d->lin_norm, &l->o_norm, lin_q, one},
        {"self_attn.z_proj", lin && d->lin_gate, &l->gate, lin_q, hidden},
        {"self_attn.o_proj", lin, &l->o, hidden, lin_q},
        {"post_attention_layernorm", 1, &l->post_norm, hidden, one},
        {"mlp.gate_proj", 1, &l->mlp_gate, ffn, hidden},
        {"mlp.up_proj", 1, &l->mlp_up, ffn, hidden},
        {"mlp.down_proj", 1, &l->mlp_down, hidden, ffn},
        {"model.norm", 1, &w->final_norm, hidden, one},
        {"lm_head", !c->tied, &w->head, vocab, hidden},
    };
    char prefix[32] = "";
    if (inside) snprintf(prefix, sizeof prefix, "model.layers.%d.", layer);
    return sala__item_set(item, &rules[row], prefix, inside ? layer : -1);
}

static inline int sala__is_4bit(int32_t format) {
    return format == SALA_NVFP4 || format == SALA_INT4;
}

static inline int sala__scale_size(int32_t format) { // bytes of a 4-bit weight's scale
    return format == SALA_INT4 ? 2 : 1;
}

static int64_t sala__weight_bytes(const sala_weight *w) { // scales, zeros and alpha included
    int64_t elements = (int64_t)w->n * w->k;
    if (!sala__is_4bit(w->format)) return elements * (w->format == SALA_F32 ? 4 : 2);
    int64_t groups = elements / w->group, bytes = elements / 2 + (w->alpha ? 4 * w->n : 0);
    return bytes + groups * sala__scale_size(w->format) + (w->zero ? groups : 0);
}

static void sala__weights_free_blocks(const sala__env *env, sala__weights *w) {
    while (w->blocks) {
        void *next = *(void **)w->blocks;
        sala__release(env, w->blocks);
        w->blocks = next;
    }
}

static void sala__weights_free(const sala__env *env, sala__weights *w) {
    sala__weights_free_blocks(env, w);
    sala__release(env, w->layers);
    sala__release(env, w->owned);
    sala__release(env, w->alphas);
    memset(w, 0, sizeof *w);
}

// Once data or formats changed: a tied head, and the totals.
static void sala__weights_finish(const sala__config *c, sala__weights *w) {
    sala__item item;
    w->parameters = w->bytes = w->decode_bytes = w->copied = 0;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        int64_t bytes = sala__weight_bytes(item.weight);
        w->parameters += (int64_t)item.n * item.k;
        w->bytes += bytes;
        if (item.weight->format == SALA_INT4) w->copied += bytes;
        if (item.k > 1 && item.weight != &w->embed) w->decode_bytes += bytes;
    }
    if (!c->tied) return;
    w->head = w->embed;
    w->decode_bytes += sala__weight_bytes(&w->head);
}

// Every weight's n and k, in BF16, and the totals: what a synthetic model takes. No data yet.
static int sala__weights_plan(const sala__env *env, const sala__config *c, sala__weights *w,
                              sala_error *err) {
    sala__item item;
    size_t layers = (size_t)c->dims.layers;
    memset(w, 0, sizeof *w);
    w->layers = (sala__layer *)sala__alloc(env, layers, sizeof *w->layers, "the layers", err);
    if (!w->layers) return SALA_E_MEMORY;
    for (size_t i = 0; i < layers; i++) w->layers[i].sparse = c->sparse[i];
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        item.weight->n = item.n;
        item.weight->k = item.k;
    }
    sala__weights_finish(c, w);
    return 0;
}

// ---- linear layers as files store them ----
// A linear layer X of n outputs and k inputs is one of four things, which its tensors tell
// (nvfp4.md 4):
//
//   GPTQ      X.qweight I32 [k/8, n], X.qzeros I32 [groups, n/8], X.scales F16 or BF16 [groups, n],
//             X.g_idx I32 [k] or none
//   NVFP4 of  X.weight_packed U8 [n, k/2], X.weight_scale F8_E4M3 [n, k/16], X.weight_global_scale
//   compressed-tensors  F32 and X.input_global_scale F32 or none: divisors
//   ModelOpt  X.weight U8 [n, k/2], X.weight_scale F8_E4M3 [n, k/16], X.weight_scale_2 F32 and
//             X.input_scale F32 or none: factors
//   plain     X.weight BF16, F16 or F32 [n, k]
//
// X is the layer's own name or that of the whole into which an export fused it: qkv_proj has the
// rows of q, k and v, gate_up_proj those of gate and up. A whole has its F32 scales once, once for
// each part, or under the parts' own names; here they become one alpha for each row.
typedef struct sala__source {
    const sala__item *item;
    int32_t kind; // SALA__PLAIN ..; 0: there is no such tensor
    char base[96], own[96];
    int32_t first, rows; // the item's first row in the whole, and the rows of that
    int32_t part, parts; // its number among the fused, and how many they are
} sala__source;

static sala__tensor *sala__source_find(sala__checkpoint *ck, const char *base, const char *suffix) {
    char name[160];
    snprintf(name, sizeof name, "%s.%s", base, suffix);
    return sala__checkpoint_find(ck, name);
}

static int32_t sala__source_kind(sala__checkpoint *ck, const char *base) {
    if (sala__source_find(ck, base, "qweight")) return SALA__GPTQ;
    if (sala__source_find(ck, base, "weight_packed")) return SALA__COMPRESSED;
    const sala__tensor *t = sala__source_find(ck, base, "weight");
    return !t ? 0 : strcmp(t->dtype, "U8") == 0 ? SALA__MODELOPT : SALA__PLAIN;
}

// Make s the whole that has the item as a part. 0: no export fuses such a layer.
static int sala__source_fuse(sala__weights *w, sala__source *s) {
    const sala__item *item = s->item;
    if (item->layer < 0) return 0;
    sala__layer *l = &w->layers[item->layer];
    const sala_weight *const parts[2][3] = {{&l->q, &l->k, &l->v},
                                            {&l->mlp_gate, &l->mlp_up, NULL}};
    for (int set = 0; set < 2; set++) {
        int32_t rows = 0, first = -1, part = 0, count = set == 0 ? 3 : 2;
        for (int i = 0; i < count; i++) {
            if (parts[set][i] == item->weight) first = rows, part = i;
            rows += parts[set][i]->n;
        }
        if (first < 0) continue;
        snprintf(s->base, sizeof s->base, "%.*s.%s", (int)(strrchr(s->own, '.') - s->own), s->own,
                 set == 0 ? "qkv_proj" : "gate_up_proj");
        s->first = first;
        s->rows = rows;
        s->part = part;
        s->parts = count;
        return 1;
    }
    return 0;
}

static void sala__source_of(sala__checkpoint *ck, sala__weights *w, const sala__item *item,
                            sala__source *s) {
    memset(s, 0, sizeof *s);
    s->item = item;
    snprintf(s->own, sizeof s->own, "%.*s", (int)(strlen(item->name) - strlen(".weight")),
             item->name);
    memcpy(s->base, s->own, sizeof s->base);
    s->rows = item->n;
    s->parts = 1;
    s->kind = sala__source_kind(ck, s->base);
    if (!s->kind && sala__source_fuse(w, s)) s->kind = sala__source_kind(ck, s->base);
}

static const char *sala__shape_text(const int64_t *shape, int rank, char out[192]) {
    int at = snprintf(out, 192, "[");
    for (int i = 0; i < rank; i++)
        at += snprintf(out + at, 192 - (size_t)at, "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(out + at, 192 - (size_t)at, "]");
    return out;
}

static int sala__shape_is(const sala__tensor *t, int64_t n, int64_t k, int rank) {
    return t->rank == rank && t->shape[0] == n && (rank == 1 || t->shape[1] == k);
}

// Memory that lives as long as the weights do, with room for the link in front of it.
static void *sala__weights_take(const sala__env *env, sala__weights *w, size_t bytes,
                                const char *what, sala_error *err) {
    char *p = (char *)sala__alloc(env, bytes + 64, 1, what, err);
    if (!p) return NULL;
    *(void **)p = w->blocks;
    w->blocks = p;
    return p + 64;
}

// What loading has at hand.
typedef struct sala__binder {
    const sala__env *env;
    sala__checkpoint *ck;
    const sala__config *c;
    sala__weights *w;
    sala_error *err;
    int32_t found[SALA__MODELOPT + 1]; // matrices by their kind
} sala__binder;

// X.suffix, which must be there with one of the dtypes and this shape (k < 0: a vector).
static sala__tensor *sala__companion(sala__binder *b, const sala__source *s, const char *suffix,
                                     const char *dtypes, int64_t n, int64_t k) {
    sala__tensor *t = sala__source_find(b->ck, s->base, suffix);
    int64_t want[2] = {n, k};
    char have[192], wanted[192];
    if (!t) {
        sala__fail(b->err, SALA_E_MODEL, "%s: tensor %s.%s is missing beside its other tensors",
                   b->ck->folder, s->base, suffix);
    } else if (!strstr(dtypes, t->dtype)) {
        sala__fail(b->err, SALA_E_MODEL,
                   "%s: tensor %s has dtype %s; expected %s: other schemes "
                   "are not supported",
                   t->file, t->name, t->dtype, dtypes);
    } else if (!sala__shape_is(t, n, k, k < 0 ? 1 : 2)) {
        sala__fail(b->err, SALA_E_MODEL,
                   "%s: tensor %s has shape %s, expected %s for %d x %d weights", t->file, t->name,
                   sala__shape_text(t->shape, t->rank, have),
                   sala__shape_text(want, k < 0 ? 1 : 2, wanted), s->rows, s->item->k);
    } else {
        t->used = 1;
        return t;
    }
    return NULL;
}

// An F32 scale of a whole tensor. Returns 1, 0: there is none, or an error.
static int sala__global_scale(sala__binder *b, const sala__source *s, const char *suffix,
                              int divisor, float *out) {
    sala__tensor *t = sala__source_find(b->ck, s->base, suffix);
    int32_t parts = t ? s->parts : 1;
    float x = 0;
    if (!t) t = sala__source_find(b->ck, s->own, suffix);
    if (!t) return 0;
    int64_t count = t->bytes / 4;
    if (t->format != SALA_F32 || t->rank > 1 || (count != 1 && count != parts))
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s is %s and %lld bytes; expected F32 "
                          "and one value%s",
                          t->file, t->name, t->dtype, (long long)t->bytes,
                          parts > 1 ? " or one for each fused part" : "");
    memcpy(&x, (const char *)t->data + (count > 1 ? 4 * s->part : 0), 4);
    *out = divisor ? 1 / x : x;
    if (!(x > 0) || !(x <= FLT_MAX) || !(*out <= FLT_MAX))
        return sala__fail(b->err, SALA_E_MODEL, "%s: tensor %s is %g; expected a positive number",
                          t->file, t->name, (double)x);
    t->used = 1;
    return 1;
}

// Both layouts of NVFP4: the codes and scales stay in the file.
static int sala__bind_nvfp4(sala__binder *b, const sala__source *s) {
    const int divisor = s->kind == SALA__COMPRESSED;
    const char *global_name = divisor ? "weight_global_scale" : "weight_scale_2";
    sala_weight *w = s->item->weight;
    int32_t n = s->item->n, k = s->item->k;
    float global, input = 0;
    const sala__tensor *codes =
        sala__companion(b, s, divisor ? "weight_packed" : "weight", "U8", s->rows, k / 2);
    const sala__tensor *scales =
        codes ? sala__companion(b, s, "weight_scale", "F8_E4M3", s->rows, k / 16) : NULL;
    if (!scales) return SALA_E_MODEL;
    int code = sala__global_scale(b, s, global_name, divisor, &global);
    if (code == 0)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s.%s is missing beside its other tensors", b->ck->folder,
                          s->base, global_name);
    if (code > 0)
        code = sala__global_scale(b, s, divisor ? "input_global_scale" : "input_scale", divisor,
                                  &input);
    if (code < 0) return code;
    // It is the inputs' largest magnitude / 2688: 1e-5 to 10.
    if (code > 0 && (input > 100 || input < 1e-9f))
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: the inputs of %s reach %g, as its %s has it: that must be a %s",
                          b->ck->folder, s->own, 2688.0 * (double)input,
                          divisor ? "input_global_scale" : "input_scale",
                          divisor ? "divisor" : "factor");
    float *alpha =
        (float *)sala__weights_take(b->env, b->w, (size_t)n * 4, "factors of rows", b->err);
    if (!alpha) return SALA_E_MEMORY;
    for (int32_t i = 0; i < n; i++) alpha[i] = global;
    w->data = (const uint8_t *)codes->data + (int64_t)s->first * (k / 2);
    w->scale = (const uint8_t *)scales->data + (int64_t)s->first * (k / 16);
    w->alpha = alpha;
    w->input_scale = input;
    w->format = SALA_NVFP4;
    w->group = 16;
    return 0;
}

// GPTQ's tensors of one layer.
typedef struct sala__gptq {
    const sala__tensor *codes, *zeros, *scales;
    int32_t groups, group;
} sala__gptq;

static int32_t sala__word_at(const sala__tensor *t, int64_t index) { // at any address
    int32_t x;
    memcpy(&x, (const char *)t->data + 4 * index, 4);
    return x;
}

// The code that means 0 in group g of row n of the whole.
static int32_t sala__gptq_zero(const sala__scheme *scheme, const sala__gptq *t, int32_t rows,
                               int32_t g, int32_t n) {
    uint32_t word = (uint32_t)sala__word_at(t->zeros, (int64_t)g * (rows / 8) + n / 8);
    return (int32_t)(word >> n % 8 * 4 & 15) + scheme->zero_offset;
}

// X.g_idx says in which group each k is: groups must follow one another.
static int sala__gptq_order(sala__binder *b, const sala__source *s, const sala__gptq *t) {
    if (!b->c->scheme.ordered && !sala__source_find(b->ck, s->base, "g_idx")) return 0;
    const sala__tensor *order = sala__companion(b, s, "g_idx", "I32", s->item->k, -1);
    if (!order) return SALA_E_MODEL;
    for (int32_t i = 0; i < s->item->k; i++)
        if (sala__word_at(order, i) != i / t->group)
            return sala__fail(b->err, SALA_E_MODEL,
                              "%s: tensor %s: input %d is in group %d: "
                              "activation order (desc_act) is not supported",
                              order->file, order->name, i, sala__word_at(order, i));
    return 0;
}

static int sala__gptq_find(sala__binder *b, const sala__source *s, sala__gptq *t) {
    const int32_t rows = s->rows, k = s->item->k;
    const sala__tensor *q = sala__source_find(b->ck, s->base, "qweight");
    const sala__tensor *scales = sala__source_find(b->ck, s->base, "scales");
    if (rows % 8 || s->first % 8 || sala__shape_is(q, k, rows / 8, 2))
        return sala__fail(b->err, SALA_E_MODEL, "%s: tensor %s: %s", q->file, q->name,
                          rows % 8 || s->first % 8 ? "GPTQ needs a multiple of 8 outputs"
                                                   : "AWQ's layout is not supported");
    t->codes = sala__companion(b, s, "qweight", "I32", k / 8, rows);
    if (!t->codes) return SALA_E_MODEL;
    int64_t groups = scales && scales->rank == 2 ? scales->shape[0] : 1;
    t->groups = (int32_t)(groups < 1 || groups > k ? 1 : groups);
    t->group = k / t->groups;
    t->scales = sala__companion(b, s, "scales", "BF16 F16", t->groups, rows);
    t->zeros = t->scales ? sala__companion(b, s, "qzeros", "I32", t->groups, rows / 8) : NULL;
    if (!t->zeros) return SALA_E_MODEL;
    int32_t said = b->c->scheme.group == -1 ? k : b->c->scheme.group;
    if (k % t->groups || t->group % 32 || (t->group > 32 && t->group < k && t->group % 64) ||
        (said && said != t->group))
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s has %d groups for %d inputs; expected "
                          "groups of 32, of a multiple of 64, or one, as group_size says",
                          t->scales->file, t->scales->name, t->groups, k);
    return sala__gptq_order(b, s, t);
}

// Symmetric files have the zero point 8 everywhere; then no zeros are kept.
static int sala__bind_gptq(sala__binder *b, const sala__source *s) {
    sala_weight *w = s->item->weight;
    const sala__scheme *scheme = &b->c->scheme;
    int32_t n = s->item->n, other = 8;
    sala__gptq t;
    memset(&t, 0, sizeof t);
    if (!scheme->kind)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s.qweight is GPTQ's, but no "
                          "quantization_config says in which checkpoint_format its zero points are",
                          b->ck->folder, s->base);
    int code = sala__gptq_find(b, s, &t);
    if (code < 0) return code;
    for (int32_t g = 0; g < t.groups && other == 8; g++)
        for (int32_t i = 0; i < n && other == 8; i++)
            other = sala__gptq_zero(scheme, &t, s->rows, g, s->first + i);
    if (other != 8 && scheme->symmetric)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s has a zero point of %d; with sym true "
                          "all are 8: is checkpoint_format right?",
                          t.zeros->file, t.zeros->name, other);
    size_t zeros = other == 8 ? 0 : (size_t)n * (size_t)t.groups, scales = (size_t)n * 4;
    char *p = (char *)sala__weights_take(b->env, b->w, scales + zeros, "factors of rows", b->err);
    if (!p) return SALA_E_MEMORY;
    w->alpha = (float *)(void *)p;
    w->zero = zeros ? (uint8_t *)p + scales : NULL;
    w->format = SALA_INT4;
    w->group = t.group;
    return 0;
}

static int sala__bind_plain(sala__binder *b, const sala__source *s) {
    const sala__item *item = s->item;
    sala__tensor *t = sala__source_find(b->ck, s->base, "weight");
    int rank = item->k > 1 ? 2 : 1; // config.json cannot give a matrix one column
    int64_t want[2] = {s->rows, item->k};
    char have_text[192], want_text[192];
    if (!sala__shape_is(t, s->rows, item->k, rank))
        return sala__fail(b->err, SALA_E_MODEL, "%s: tensor %s has shape %s, expected %s (%s%s%s)",
                          t->file, t->name, sala__shape_text(t->shape, t->rank, have_text),
                          sala__shape_text(want, rank, want_text), item->n_name,
                          rank == 2 ? " x " : "", rank == 2 ? item->k_name : "");
    if (t->format < 0)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s has dtype %s; expected BF16, F16 or F32", t->file, t->name,
                          t->dtype);
    int64_t size = t->format == SALA_F32 ? 4 : 2;
    if ((uintptr_t)t->data % (uintptr_t)size != 0)
        return sala__fail(
            b->err, SALA_E_MODEL,
            "%s: tensor %s does not begin at a multiple of its element size: save the file again",
            t->file, t->name);
    t->used = 1;
    item->weight->data = (const char *)t->data + s->first * item->k * size;
    item->weight->format = t->format;
    return 0;
}

// Tensors beside a layer that change what it computes, and schemes that are not supported.
static int sala__bind_refusals(sala__binder *b, const sala__source *s) {
    static const char *const refused[][2] = {
        {"pre_quant_scale", "scaled inputs (NVFP4_AWQ)"},
        {"weight_zero_point", "compressed-tensors with zero points"},
        {"weight.absmax", "bitsandbytes"},
        {"weight.quant_state.bitsandbytes__nf4", "bitsandbytes"},
        {"weight_scale_inv", "FP8 weights"},
    };
    const sala__tensor *packed = sala__source_find(b->ck, s->base, "weight_packed");
    if (packed && strcmp(packed->dtype, "I32") == 0)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s: compressed-tensors' INT4 (pack-quantized): not supported",
                          packed->file, packed->name);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const sala__tensor *t = sala__source_find(b->ck, s->base, refused[i][0]);
        if (t)
            return sala__fail(b->err, SALA_E_MODEL, "%s: tensor %s: %s: not supported", t->file,
                              t->name, refused[i][1]);
    }
    return 0;
}

// Nobody can say which is meant where a file has a layer and the whole that it is a part of.
static int sala__bind_once(sala__binder *b, const sala__source *s) {
    sala__source whole = *s;
    if (s->parts > 1 || !sala__source_fuse(b->w, &whole) || !sala__source_kind(b->ck, whole.base))
        return 0;
    return sala__fail(b->err, SALA_E_MODEL, "%s: %s is there by itself and as a part of %s",
                      b->ck->folder, s->own, whole.base);
}

// Give one weight its place. Returns 1 if no tensor has it.
static int sala__bind_item(sala__binder *b, const sala__item *item) {
    sala__source s;
    sala__source_of(b->ck, b->w, item, &s);
    if (!s.kind) return 1;
    if (s.kind == SALA__PLAIN && item->k == 1) return sala__bind_plain(b, &s);
    int code = sala__bind_refusals(b, &s);
    if (code == 0) code = sala__bind_once(b, &s);
    if (code < 0) return code;
    b->found[s.kind]++;
    if (s.kind == SALA__PLAIN) return sala__bind_plain(b, &s);
    if (item->k == 1 || item->weight == &b->w->embed)
        return sala__fail(b->err, SALA_E_MODEL, "%s: %s is quantised: only linear layers may be",
                          b->ck->folder, s.base);
    return s.kind == SALA__GPTQ ? sala__bind_gptq(b, &s) : sala__bind_nvfp4(b, &s);
}

// A configuration that names a scheme names one that is there. It need not be the only one.
static int sala__scheme_agrees(const sala__binder *b) {
    static const char *const names[] = {"", "none", "GPTQ", "compressed-tensors", "ModelOpt"};
    int said = b->c->scheme.kind, most = SALA__PLAIN;
    if (!said || b->found[said]) return 0;
    for (int kind = SALA__GPTQ; kind <= SALA__MODELOPT; kind++)
        if (b->found[kind]) most = kind;
    return sala__fail(b->err, SALA_E_MODEL,
                      "%s: the configuration says that weights are quantised as %s has it, but the "
                      "tensors' scheme is: %s",
                      b->ck->folder, names[said], names[most]);
}

// [k/8, rows] words of 8 codes along k, the lowest k lowest -> the item's rows of [n, k/8] words. In
// pieces of 64 x 16 words, so that cache lines are read and written whole.
static void sala__gptq_codes(const sala__source *s, const sala__gptq *t, char *to) {
    int32_t n = s->item->n, words = s->item->k / 8;
    const char *from = (const char *)t->codes->data + (int64_t)s->first * 4;
    for (int32_t n0 = 0; n0 < n; n0 += 16)
        for (int32_t r0 = 0; r0 < words; r0 += 64)
            for (int32_t i = n0; i < n0 + 16 && i < n; i++)
                for (int32_t r = r0; r < r0 + 64 && r < words; r++)
                    memcpy(to + ((int64_t)i * words + r) * 4, from + ((int64_t)r * s->rows + i) * 4,
                           4);
}

// Scales in BF16, which is what a product rounds to in any case. A scale of a whole row becomes its
// alpha instead, and is exact.
static int sala__gptq_scales(sala__binder *b, const sala__source *s, const sala__gptq *t,
                             uint16_t *to) {
    sala_weight *w = s->item->weight;
    float *alpha = (float *)(uintptr_t)w->alpha;
    uint8_t *zero = (uint8_t *)(uintptr_t)w->zero;
    for (int32_t n = 0; n < w->n; n++) {
        alpha[n] = 1;
        for (int32_t g = 0; g < t->groups; g++) {
            size_t at = (size_t)n * (size_t)t->groups + (size_t)g;
            int64_t from = (int64_t)g * s->rows + s->first + n;
            uint16_t bits;
            memcpy(&bits, (const char *)t->scales->data + 2 * from, 2);
            float x = t->scales->format == SALA_F16 ? sala_f16_f32(bits) : sala_bf16_f32(bits);
            if (!(fabsf(x) <= FLT_MAX))
                return sala__fail(b->err, SALA_E_MODEL,
                                  "%s: tensor %s: group %d, output %d is NaN "
                                  "or infinite",
                                  t->scales->file, t->scales->name, g, s->first + n);
            if (t->groups == 1) alpha[n] = x;
            to[at] = sala_f32_bf16(t->groups == 1 ? 1 : x);
            if (zero)
                zero[at] = (uint8_t)sala__gptq_zero(&b->c->scheme, t, s->rows, g, s->first + n);
        }
    }
    return 0;
}

static int sala__load_gptq(sala__binder *b, const sala__source *s) {
    sala_weight *w = s->item->weight;
    sala__gptq t;
    int code = sala__gptq_find(b, s, &t);
    if (code < 0) return code;
    size_t codes = (size_t)w->n * (size_t)(w->k / 2), scales = 2 * (size_t)w->n * (size_t)t.groups;
    char *p = (char *)sala__weights_take(b->env, b->w, codes + scales, "4-bit weights", b->err);
    if (!p) return SALA_E_MEMORY;
    sala__gptq_codes(s, &t, p);
    w->data = p;
    w->scale = p + codes;
    return sala__gptq_scales(b, s, &t, (uint16_t *)(void *)(p + codes));
}

// A scale byte of 0x7F or more is NaN, or has a sign, which other formats use for purposes of
// their own. And a divisor read as a factor, or the reverse, is seen by the weights' size alone: that of
// a model lies in 0.001 .. 100, but 2688^2 / size comes out where the two are confused.
static int sala__check_nvfp4(sala__binder *b, const sala__source *s) {
    const sala_weight *w = s->item->weight;
    const uint8_t *scale = (const uint8_t *)w->scale;
    const int divisor = s->kind == SALA__COMPRESSED;
    int64_t groups = w->k / 16, count = w->n * groups, at = 0;
    uint8_t most = 0;
    for (int64_t i = 0; i < count; i++) most = scale[i] > most ? scale[i] : most;
    while (most >= 0x7F && scale[at] < 0x7F) at++;
    if (most >= 0x7F)
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: tensor %s.weight_scale: row %lld, group %lld is the byte 0x%02X, %s",
                          b->ck->folder, s->base, (long long)(at / groups) + s->first,
                          (long long)(at % groups), scale[at],
                          (scale[at] & 0x7F) == 0x7F ? "NaN" : "a negative scale: not NVFP4");
    double size = 6.0 * (double)sala_e4m3_f32(most) * (double)w->alpha[0];
    if (most && (size > 1000 || size < 1e-6))
        return sala__fail(b->err, SALA_E_MODEL,
                          "%s: the weights of %s reach %g: is its %s, which must be a %s, a %s?",
                          b->ck->folder, s->own, size,
                          divisor ? "weight_global_scale" : "weight_scale_2",
                          divisor ? "divisor" : "factor", divisor ? "factor" : "divisor");
    return 0;
}

// The head of a model with tied embeddings may be in the file all the same, if it is the same.
static int sala__bind_tied(sala__checkpoint *ck, sala_error *err) {
    sala__tensor *head = sala__checkpoint_find(ck, "lm_head.weight");
    const sala__tensor *embed = sala__checkpoint_find(ck, "model.embed_tokens.weight");
    if (!head) return 0;
    head->used = 1;
    if (head->dtype == embed->dtype && head->rank == embed->rank &&
        memcmp(head->shape, embed->shape, sizeof head->shape) == 0 &&
        memcmp(head->data, embed->data, (size_t)head->bytes) == 0)
        return 0;
    return sala__fail(err, SALA_E_MODEL,
                      "%s: tensor lm_head.weight differs from model.embed_tokens.weight although "
                      "tie_word_embeddings is true",
                      head->file);
}

// "tensor NAME ONE", or "tensor NAME and 2 more MANY".
static int sala__tensors_fail(const char *where, const char *name, int count, const char *one,
                              const char *many, sala_error *err) {
    char more[32] = "";
    if (count > 1) snprintf(more, sizeof more, " and %d more", count - 1);
    return sala__fail(err, SALA_E_MODEL, "%s: tensor %.200s%s %s", where, name, more,
                      count > 1 ? many : one);
}

// No tensor may be left over: an unread one means that config.json describes another model. But for
// tables of old exports, which are computed here, and scales of an FP8 K/V cache, which is BF16 here.
static int sala__bind_rest(const sala__env *env, sala__checkpoint *ck, sala_error *err) {
    static const char *const unneeded[] = {"rotary_emb.inv_freq", ".k_scale", ".v_scale"};
    const sala__tensor *first = NULL;
    int count = 0;
    for (size_t i = 0; i < ck->tensor_count; i++) {
        const sala__tensor *t = &ck->tensors[i];
        int needed = 1;
        if (t->used) continue;
        for (int u = 0; u < 3; u++) {
            const char *at = strstr(t->name, unneeded[u]);
            if (at && strcmp(at, unneeded[u]) == 0) needed = 0;
        }
        if (!needed)
            sala__log(env, SALA_LOG_INFO, "%s: tensor %.200s: not needed", t->file, t->name);
        else if (count++ == 0)
            first = t;
    }
    if (!first) return 0;
    return sala__tensors_fail(first->file, first->name, count,
                              "has no place in the model that config.json describes",
                              "have no place in the model that config.json describes", err);
}

// Weights that read the same x get one input_scale, so that x is quantised once for all: the
// largest, or none where one has none. Those that are not NVFP4 read x itself.
static void sala__share_input_scales(const sala__config *c, sala__weights *w) {
    for (int i = 0; i < c->dims.layers; i++) {
        sala__layer *l = &w->layers[i];
        sala_weight *sets[2][4] = {{&l->q, &l->k, &l->v, &l->gate},
                                   {&l->mlp_gate, &l->mlp_up, NULL, NULL}};
        for (int set = 0; set < 2; set++) {
            float most = 0;
            int all = 1;
            for (int m = 0; m < 4; m++) {
                const sala_weight *x = sets[set][m];
                if (!x || x->format != SALA_NVFP4) continue; // reads x in BF16, or is not there
                if (x->input_scale > most) most = x->input_scale;
                if (x->input_scale == 0) all = 0;
            }
            for (int m = 0; m < 4; m++)
                if (sets[set][m] && sets[set][m]->format == SALA_NVFP4)
                    sets[set][m]->input_scale = all ? most : 0;
        }
    }
}

// Give every tensor of the model its place in the mapped files. `ck` must outlive `w`. 4-bit weights
// want sala__weights_load before they are used.
static int sala__weights_bind(const sala__env *env, sala__checkpoint *ck, const sala__config *c,
                              sala__weights *w, sala_error *err) {
    sala__binder binder = {env, ck, c, w, err, {0}};
    sala__item item, first;
    int missing = 0, code = sala__weights_plan(env, c, w, err);
    for (int i = 0; i < sala__item_count(c) && code == 0; i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        code = sala__bind_item(&binder, &item);
        if (code == 1 && missing++ == 0) first = item;
        if (code == 1) code = 0;
    }
    if (code == 0 && missing)
        code =
            sala__tensors_fail(ck->folder, first.name, missing, "is missing", "are missing", err);
    if (code == 0 && c->tied) code = sala__bind_tied(ck, err);
    if (code == 0) code = sala__bind_rest(env, ck, err);
    if (code == 0) code = sala__scheme_agrees(&binder);
    if (code == 0) {
        sala__share_input_scales(c, w);
        sala__weights_finish(c, w);
    } else {
        sala__weights_free(env, w);
    }
    return code;
}

// ---- the tensors of an EAGLE-3 head ----

// One spelling for all exports: no "model." in front, "midlayer." for "layers.0.", and the bias of fc
// a weight like the others.
static int sala__draft_names(sala__checkpoint *ck, sala_error *err) {
    for (size_t i = 0; i < ck->tensor_count; i++) {
        sala__tensor *t = &ck->tensors[i];
        if (strncmp(t->name, "model.", 6) == 0) t->name += 6;
        if (strncmp(t->name, "layers.0.", 9) == 0) // in the checkpoint's own strings
            memcpy((char *)(uintptr_t)t->name, "midlayer.", 9);
        if (strcmp(t->name, "fc.bias") == 0) t->name = "fc_bias.weight";
    }
    return sala__tensors_sort(ck, err);
}

// One of its tables, or NULL if it has none.
static int sala__draft_table(sala__checkpoint *ck, const char *name, const char *dtype,
                             int32_t count, const char **data, sala_error *err) {
    char shape[192];
    const sala__tensor *t = sala__checkpoint_find(ck, name);
    *data = t ? (const char *)t->data : NULL;
    if (!t || (strcmp(t->dtype, dtype) == 0 && sala__shape_is(t, count, 0, 1))) return 0;
    return sala__fail(err, SALA_E_MODEL, "%s: tensor %s is %s %s; expected %s [%d]", t->file, name,
                      t->dtype, sala__shape_text(t->shape, t->rank, shape), dtype, count);
}

// d2t holds offsets: token i of the head is the target's i + d2t[i]. t2d is true for exactly those.
static int sala__draft_targets(sala__checkpoint *ck, const sala__config *c, int32_t *ids,
                               sala_error *err) {
    static const char ask[] = "does d2t hold tokens instead of offsets?";
    const int32_t count = c->draft_vocab, vocab = c->dims.vocab;
    const char *d2t, *t2d;
    int code = sala__draft_table(ck, "d2t", "I64", count, &d2t, err);
    if (code == 0) code = sala__draft_table(ck, "t2d", "BOOL", vocab, &t2d, err);
    if (code < 0) return code;
    if (!d2t && count != vocab)
        return sala__fail(err, SALA_E_MODEL,
                          "%s: tensor d2t is missing: it says which of the %d tokens the %d of the "
                          "draft head are",
                          ck->folder, vocab, count);
    for (int32_t i = 0, id = 0; i < count; i++, id++) { // id: beyond the one before
        int64_t offset = 0;
        if (d2t) memcpy(&offset, d2t + 8 * (int64_t)i, 8);
        if (offset < id - i || offset >= vocab - i)
            return sala__fail(
                err, SALA_E_MODEL,
                "%s: tensor d2t: element %d is %lld; its tokens (element + its place) "
                "must rise and lie below %d: %s",
                ck->folder, i, (long long)offset, vocab, ask);
        ids[i] = id = (int32_t)(i + offset);
    }
    for (int32_t id = 0, i = 0; id < vocab && t2d; id++) {
        int known = i < count && ids[i] == id;
        if (known != (t2d[id] != 0))
            return sala__fail(err, SALA_E_MODEL,
                              "%s: tensor t2d is %s for token %d, but by d2t the head %s it: %s",
                              ck->folder, known ? "false" : "true", id, known ? "knows" : "lacks",
                              ask);
        i += known;
    }
    return 0;
}

// w->target_ids from d2t and t2d, or (ck NULL: no files) spread evenly.
static int sala__draft_ids(const sala__env *env, sala__checkpoint *ck, const sala__config *c,
                           const sala__config *target, sala__weights *w, sala_error *err) {
    const int32_t count = c->draft_vocab;
    int32_t *ids = (int32_t *)sala__weights_take(env, w, (size_t)count * 4, "draft tokens", err);
    if (!ids) return SALA_E_MEMORY;
    w->target_ids = ids;
    for (int64_t i = 0; i < count && !ck; i++) ids[i] = (int32_t)(i * c->dims.vocab / count);
    if (!ck) return 0;
    int code = sala__draft_targets(ck, c, ids, err);
    for (int e = 0; e < target->eos_count && code == 0; e++) {
        int32_t at = 0;
        while (at < count && ids[at] != target->eos[e]) at++;
        if (at == count)
            sala__log(env, SALA_LOG_WARNING,
                      "%s: the end token %d is not in the draft vocabulary: ends are never drafted",
                      ck->folder, target->eos[e]);
    }
    return code;
}

// What a head has not is the target's.
static void sala__draft_share(const sala__config *c, sala__weights *w,
                              const sala__weights *target) {
    if (!c->own_embed) w->embed = target->embed;
    if (!c->own_head) w->head = target->head;
}

static int sala__same_embedding(const sala__tensor *t, const sala_weight *w) {
    return t->format == w->format && sala__shape_is(t, w->n, w->k, 2) && w->data &&
           memcmp(t->data, w->data, (size_t)t->bytes) == 0;
}

// sala__weights_bind of a head. What it may or may not have goes into `c`. `from` are the target's.
static int sala__draft_bind(const sala__env *env, sala__checkpoint *ck, sala__config *c,
                            const sala__config *target, const sala__weights *from, sala__weights *w,
                            sala_error *err) {
    static const char *const tables[] = {"d2t", "t2d"};
    int code = sala__draft_names(ck, err);
    if (code < 0) return code;
    sala__tensor *embed = sala__checkpoint_find(ck, "embed_tokens.weight");
    c->own_embed = embed && !sala__same_embedding(embed, &from->embed);
    if (embed) embed->used = !c->own_embed;
    c->fc_bias = sala__checkpoint_find(ck, "fc_bias.weight") != NULL;
    c->own_head = c->draft_vocab != c->dims.vocab || sala__source_kind(ck, "lm_head") != 0;
    for (int i = 0; i < 2; i++) {
        sala__tensor *t = sala__checkpoint_find(ck, tables[i]);
        if (t) t->used = 1;
    }
    if ((code = sala__weights_bind(env, ck, c, w, err)) < 0) return code;
    sala__draft_share(c, w, from);
    code = sala__draft_ids(env, ck, c, target, w, err);
    if (code < 0) sala__weights_free(env, w);
    return code;
}

// What 4-bit weights need beyond their place: GPTQ's are put into rows, in memory; NVFP4's stay in
// the file, but all their scales (a ninth of it) are read and checked.
static int sala__weights_load(const sala__env *env, sala__checkpoint *ck, const sala__config *c,
                              sala__weights *w, sala_error *err) {
    sala__binder binder = {env, ck, c, w, err, {0}};
    sala__item item;
    sala__source s;
    int code = 0, count = sala__item_count(c);
    for (int i = 0; i < count && code == 0; i++) {
        if (!sala__item_at(c, w, i, &item) || !sala__is_4bit(item.weight->format)) continue;
        if (item.weight->format == SALA_INT4 && item.weight->data) continue; // a second try
        sala__source_of(ck, w, &item, &s);
        if (s.kind == SALA__GPTQ)
            code = sala__load_gptq(&binder, &s);
        else
            code = sala__check_nvfp4(&binder, &s);
        sala__progress(env, "reading scales", 0.1 + 0.3 * i / count);
    }
    return code; // what was taken goes with the weights
}

static int sala__element_is_finite(const sala_weight *w, int64_t index) {
    if (w->format == SALA_F32) return fabsf(((const float *)w->data)[index]) <= FLT_MAX;
    uint16_t exponent = w->format == SALA_F16 ? 0x7C00 : 0x7F80;
    return (((const uint16_t *)w->data)[index] & exponent) != exponent;
}

// Once a GPU has the weights: what loading took is not needed any more. Formats and totals stay.
static void sala__weights_forget(const sala__env *env, const sala__config *c, sala__weights *w) {
    sala__item item;
    for (int i = 0; i < sala__item_count(c) && w->blocks; i++) {
        if (!sala__item_at(c, w, i, &item) || !sala__is_4bit(item.weight->format)) continue;
        item.weight->alpha = NULL;
        item.weight->zero = NULL;
        if (item.weight->format == SALA_INT4) item.weight->data = item.weight->scale = NULL;
    }
    sala__weights_free_blocks(env, w);
    w->target_ids = NULL;
}

// What kinds of tensors there are, for people: "NVFP4, BF16 head" and "attention NVFP4, MLP ...".
enum { SALA__ATTENTION, SALA__MLP, SALA__HEAD, SALA__EMBEDDING, SALA__NORMS, SALA__KINDS };

// Append the names of the formats in `mask`, the shortest first: "NVFP4 + BF16".
static void sala__formats_append(char *out, size_t size, const char *before, uint32_t mask,
                                 const char *after) {
    static const char *const names[] = {"BF16", "F16", "F32", "NVFP4", "INT4"};
    static const int32_t order[] = {SALA_NVFP4, SALA_INT4, SALA_BF16, SALA_F16, SALA_F32};
    if (!mask) return;
    for (int i = 0; i < 5; i++) {
        size_t at = strlen(out);
        if (!(mask >> order[i] & 1)) continue;
        snprintf(out + at, size - at, "%s%s", before, names[order[i]]);
        before = " + ";
    }
    snprintf(out + strlen(out), size - strlen(out), "%s", after);
}

static void sala__formats_name(const sala__config *c, sala__weights *w, char format[64],
                               char kinds[160]) {
    static const char *const titles[] = {"attention ", ", MLP ", ", head ", ", embedding ",
                                         ", norms "};
    uint32_t masks[SALA__KINDS] = {0};
    sala__item item;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        int kind = item.k == 1                  ? SALA__NORMS
                   : item.weight == &w->embed   ? SALA__EMBEDDING
                   : item.layer < 0             ? SALA__HEAD
                   : strstr(item.name, ".mlp.") ? SALA__MLP
                                                : SALA__ATTENTION;
        masks[kind] |= 1u << item.weight->format;
    }
    if (c->tied) masks[SALA__HEAD] = masks[SALA__EMBEDDING];
    uint32_t linear = masks[SALA__ATTENTION] | masks[SALA__MLP];
    format[0] = kinds[0] = 0;
    sala__formats_append(format, 64, "", linear, "");
    if (masks[SALA__HEAD] != linear)
        sala__formats_append(format, 64, ", ", masks[SALA__HEAD], " head");
    for (int i = 0; i < SALA__KINDS; i++) sala__formats_append(kinds, 160, titles[i], masks[i], "");
}

// Index of the first element, or with 4 bits the first scale, that is no number; -1: all are.
static int64_t sala__weight_nan(const sala_weight *w) {
    sala_weight all = *w;
    int64_t at = 0, count = (int64_t)w->n * w->k;
    if (sala__is_4bit(w->format)) count /= w->group;
    if (sala__is_4bit(w->format) && !w->scale) return -1; // a GPU has it; loading checked it
    if (w->format == SALA_NVFP4) {
        while (at < count && ((const uint8_t *)w->scale)[at] < 0x7F) at++;
    } else {
        if (w->format == SALA_INT4) all.data = w->scale, all.format = SALA_BF16;
        while (at < count && sala__element_is_finite(&all, at)) at++;
    }
    return at < count ? at : -1;
}

// Read every weight once. `ck` names the files; NULL for synthetic weights.
static int sala__weights_check(const sala__env *env, const sala__config *c, sala__weights *w,
                               sala__checkpoint *ck, sala_error *err) {
    sala__item item;
    int64_t done = 0;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        const sala__tensor *t = ck ? sala__checkpoint_find(ck, item.name) : NULL;
        const char *where = t ? t->file : ck ? ck->folder : "synthetic weights";
        long long at = sala__weight_nan(item.weight), row = item.k;
        if (sala__is_4bit(item.weight->format)) row /= item.weight->group;
        if (at >= 0)
            return sala__fail(
                err, SALA_E_MODEL, "%s: tensor %s: row %lld, %s %lld is NaN or infinite", where,
                item.name, at / row, row == item.k ? "column" : "the scale of group", at % row);
        done += sala__weight_bytes(item.weight);
        sala__progress(env, "checking weights", (double)done / (double)w->bytes);
    }
    return 0;
}

// ---- synthetic weights: any geometry, no file ----

// out[i] = BF16(offset + scale * u), u uniform in (-1, 1) by a hash of (seed, first_element + i):
// any range may be filled alone and in any order. Each hash gives four elements; computing it for
// each of them leaves a loop that compilers vectorise.
static void sala__synthetic_fill(uint16_t *out, uint64_t first_element, uint64_t count,
                                 uint64_t seed, float scale, float offset) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t element = first_element + i;
        out[i] = sala_synthetic(sala_synthetic_hash(seed, element), element, scale, offset);
    }
}

// Seed, scale and mean of the numbers of item `index`. Variances are such that activations keep
// their size from layer to layer: norms near 1, linear layers 1/k, the embedding and the head
// without the model's own multipliers. Sparse q and k are three times as large, so that attention
// is far from uniform and the choice of blocks means something.
static void sala__synthetic_shape(const sala__config *c, const sala__weights *w,
                                  const sala__item *item, uint64_t seed, int index,
                                  uint64_t *item_seed, float *scale, float *offset) {
    const sala__layer *l = item->layer < 0 ? NULL : &w->layers[item->layer];
    double sigma = 1 / sqrt((double)item->k), mean = 0;
    if (item->k == 1)
        sigma = 0.1, mean = 1;
    else if (item->weight == &w->embed)
        sigma = 1 / (double)c->dims.embed_scale;
    else if (item->weight == &w->head)
        sigma *= c->dims.logit_divisor;
    else if (l && l->sparse && (item->weight == &l->q || item->weight == &l->k))
        sigma *= 3;
    *item_seed = sala_mix64(seed + (uint64_t)index);
    *scale = (float)(sigma * sqrt(3.0)); // a uniform number in (-1, 1) has variance 1/3
    *offset = (float)mean;
}

// Rows of a 4-bit weight: see sala_synthetic_codes. Their variance is that of sala__synthetic_shape
// by alpha.
static void sala__synthetic_fill4(sala_weight *w, int64_t first, int64_t rows, uint64_t seed) {
    uint8_t *codes = (uint8_t *)(uintptr_t)w->data, *scales = (uint8_t *)(uintptr_t)w->scale;
    int size = sala__scale_size(w->format);
    int64_t end = (first + rows) * w->k;
    for (int64_t at = first * w->k; at < end; at += 16) {
        uint64_t eight = sala_synthetic_codes(seed, (uint64_t)at, w->format);
        memcpy(codes + at / 2, &eight, 8); // the host is little-endian
        if (at % w->group) continue;
        uint16_t scale = sala_synthetic_scale(seed, (uint64_t)at, w->format);
        memcpy(scales + at / w->group * size, &scale, (size_t)size);
    }
}

static void sala__synthetic_alpha(float *alpha, const sala_weight *w, uint64_t seed, float scale) {
    // root mean squares of code * block scale; `scale` is sqrt(3) times what is wanted
    float rms = w->format == SALA_INT4 ? 4.18330f * 1.52753f : 2.92617f * 148.324f;
    for (int n = 0; n < w->n; n++) {
        float u = (float)(int16_t)(sala_mix64(seed + (uint64_t)n) >> 48) / 32768;
        alpha[n] = scale * 0.57735f / rms * (1 + u / 4);
    }
}

// The formats that options.weights names, with alphas; the numbers come later.
static int sala__synthetic_formats(const sala__env *env, const sala__config *c, sala__weights *w,
                                   const sala_options *o, sala_error *err) {
    const char *kind = o->weights ? o->weights : "bf16";
    int format = strcmp(kind, "int4") == 0 ? SALA_INT4 : SALA_NVFP4;
    int head = strcmp(kind, "nvfp4-head") == 0;
    if (strcmp(kind, "bf16") == 0) return 0;
    if (head && c->tied)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "weights nvfp4-head: the head of this model is its embedding, which "
                          "stays BF16 (tie_word_embeddings); use nvfp4");
    sala__item item;
    size_t total = 0;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item) || item.k == 1) continue;
        if (item.layer < 0 && !c->eagle && !(head && item.weight == &w->head)) continue;
        int group = format == SALA_NVFP4 ? 16 : item.k % 128 == 0 ? 128 : 32;
        if (item.k % group)
            return sala__fail(err, SALA_E_ARGUMENT,
                              "weights %s: %s is %d, not a multiple of the %d that share a scale",
                              kind, item.k_name, item.k, group);
        item.weight->format = format;
        item.weight->group = group;
        if (format == SALA_NVFP4) item.weight->input_scale = 0x1p-8f; // activations up to 10
        total += (size_t)item.n;
    }
    w->alphas = (float *)sala__alloc(env, total, sizeof(float), "alphas", err);
    if (!w->alphas) return SALA_E_MEMORY;
    float *at = w->alphas;
    for (int i = 0; i < sala__item_count(c); i++) {
        uint64_t seed;
        float scale, offset;
        if (!sala__item_at(c, w, i, &item) || !sala__is_4bit(item.weight->format)) continue;
        sala__synthetic_shape(c, w, &item, o->synthetic_seed, i, &seed, &scale, &offset);
        sala__synthetic_alpha(at, item.weight, seed, scale);
        item.weight->alpha = at;
        at += item.n;
    }
    sala__weights_finish(c, w);
    return 0;
}

// What a synthetic model takes: shapes, formats, alphas. No other data yet.
static int sala__synthetic_plan(const sala__env *env, const sala__config *c, sala__weights *w,
                                const sala_options *o, sala_error *err) {
    int code = sala__weights_plan(env, c, w, err);
    if (code == 0) code = sala__synthetic_formats(env, c, w, o, err);
    if (code == 0 && c->eagle) code = sala__draft_ids(env, NULL, c, NULL, w, err);
    if (code < 0) sala__weights_free(env, w);
    return code;
}

// Fill slice `part` of `parts` of every tensor: threads call it with their own number each.
static void sala__weights_fill(const sala__config *c, sala__weights *w, uint64_t seed, int part,
                               int parts) {
    sala__item item;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        uint64_t count = (uint64_t)item.n * (uint64_t)item.k, piece = count / (uint64_t)parts;
        uint64_t from = piece * (uint64_t)part, to = part == parts - 1 ? count : from + piece;
        uint16_t *data = (uint16_t *)(uintptr_t)item.weight->data;
        uint64_t item_seed;
        float scale, offset;
        sala__synthetic_shape(c, w, &item, seed, i, &item_seed, &scale, &offset);
        if (sala__is_4bit(item.weight->format)) {
            int64_t first = (int64_t)item.n * part / parts;
            int64_t end = (int64_t)item.n * (part + 1) / parts;
            sala__synthetic_fill4(item.weight, first, end - first, item_seed);
        } else {
            sala__synthetic_fill(data + from, from, to - from, item_seed, scale, offset);
        }
    }
}

// All tensors in one allocation, each at a multiple of 64 bytes, for sala__weights_fill.
static int sala__weights_allocate(const sala__env *env, const sala__config *c, sala__weights *w,
                                  const sala_options *o, sala_error *err) {
    sala__item item;
    int code = sala__synthetic_plan(env, c, w, o, err);
    if (code < 0) return code;
    size_t bytes = (size_t)w->bytes + 128 * (size_t)(sala__item_count(c) + 1);
    w->owned = sala__alloc(env, bytes, 1, "synthetic weights", err);
    if (!w->owned) {
        sala__weights_free(env, w);
        return SALA_E_MEMORY;
    }
    char *at = (char *)w->owned;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item)) continue;
        at += -(uintptr_t)at % 64;
        item.weight->data = at;
        if (sala__is_4bit(item.weight->format)) {
            at += (int64_t)item.n * item.k / 2;
            at += -(uintptr_t)at % 64;
            item.weight->scale = at;
            at += (int64_t)item.n * (item.k / item.weight->group) *
                  sala__scale_size(item.weight->format);
        } else {
            at += sala__weight_bytes(item.weight);
        }
    }
    sala__weights_finish(c, w);
    return 0;
}

/* ----------------------------------------------------------------------------------------------
   [5] TOKENIZER: tokenizer.json (byte-fallback BPE of the Llama family), streaming decode, ChatML

   The judge is the Hugging Face `tokenizers` library: for valid UTF-8 the ids are the ones that it
   gives, and so is the text of a decode. A text passes through these stages, each the library's:

     added tokens as they stand -> normaliser -> normalised added tokens -> Metaspace -> BPE

   BPE repeats "join the adjacent pair of lowest rank, leftmost first". A heap over a linked list
   does that in O(n log n). Without a pre-tokenizer the whole text is one word, so the text is first
   cut where no merge can ever join (sala__joins): mostly between words, and the heap stays small.

   Every text can be written, because all 256 byte tokens "<0xNN>" must be there: a character that
   has no token of its own becomes its bytes, and the unknown token is never needed. What tokenizers
   of this family do not use is refused by name while loading.

   Where we differ from the library, on purpose:
   - Bytes that are not UTF-8 become byte tokens one by one, and byte tokens decode to the bytes
     that they name. (The library takes only valid text, and turns a whole run of byte tokens into
     U+FFFD when the run is not valid UTF-8.) So every byte string survives encode and decode.
   - Control tokens (special ones, BOS, EOS, the ChatML markers) come out of plain text in no way:
     merges that would build one are dropped. Users cannot forge the end of a turn.
   - A special token that is also "normalized" is left out of decoded text like all special ones.
   - White space that an added token with "rstrip" swallows is gone. (The library goes on to search
     it for added tokens made of white space, and puts those out a second time.)
   - The ids of added tokens are those of the file, also where it leaves ids out. (The library
     counts on from the vocabulary.) An id without a token decodes to nothing.
   ---------------------------------------------------------------------------------------------- */

#define SALA__TOKENIZER_FILE_MAX ((int64_t)64 << 20)
#define SALA__STEPS 4       // of a normaliser or a decoder
#define SALA__STEP_TEXT 32  // longest string in a step, bytes
#define SALA__STEP_GROWTH 4 // a step makes a text at most so many times longer
#define SALA__ADDED_MAX 128 // longest added token, bytes: bounds the work at each byte of a text
#define SALA__IM_START "<|im_start|>"
#define SALA__IM_END "<|im_end|>"

enum {                           // sala__token.flags; 0: no token has this id
    SALA__TOKEN_MODEL = 1,       // in model.vocab: BPE may produce it
    SALA__TOKEN_ADDED = 2,       // in added_tokens
    SALA__TOKEN_SPECIAL = 4,     // left out of decoded text
    SALA__TOKEN_CONTROL = 8,     // never made from plain text
    SALA__TOKEN_NORMALIZED = 16, // added: searched for after the normaliser
    SALA__TOKEN_LSTRIP = 32,     // added: swallows white space before it
    SALA__TOKEN_RSTRIP = 64,     // added: swallows white space after it
    SALA__TOKEN_BYTE = 128       // "<0xNN>"
};

typedef struct sala__token {
    uint32_t text, text_size;   // its string, in tokenizer.names
    uint32_t shown, shown_size; // what it decodes to, in tokenizer.names
    uint32_t flags;
} sala__token;

typedef struct sala__trie_node {
    int32_t id;    // of the added token that ends here, or -1
    int32_t child; // first node one byte deeper, or -1
    int32_t next;  // sibling, or -1
    int32_t byte;
} sala__trie_node;

typedef struct sala__trie { // added tokens, byte by byte
    sala__trie_node *nodes; // [count] the first 256 are the first bytes
    size_t count, capacity;
} sala__trie;

typedef struct sala__step { // replace `from` by `to`; if `from` is empty, put `to` in front
    int from_size, to_size;
    char from[SALA__STEP_TEXT], to[SALA__STEP_TEXT];
} sala__step;

typedef struct sala__steps {
    sala__step items[SALA__STEPS]; // [count]
    int count;
} sala__steps;

enum { SALA__PREFIX_NEVER, SALA__PREFIX_FIRST, SALA__PREFIX_ALWAYS };

typedef struct sala__merge { // a slot of the hash of merges; empty when id < 0
    int32_t left, right;     // token ids
    uint32_t rank;           // line in "merges": lower goes first
    int32_t id;              // of the token that they make
} sala__merge;

typedef struct sala__tokenizer {
    const sala__env *env;
    int32_t limit;       // rows of the embedding: ids are below it
    int32_t size;        // highest id + 1
    sala__token *tokens; // [limit]
    sala__string names;  // all strings of tokens
    int32_t *by_name;    // [by_name_mask + 1] hash of token strings, -1: empty
    uint32_t by_name_mask;
    int32_t bytes[256]; // the tokens "<0xNN>"

    sala__merge *merges; // [merges_mask + 1]
    uint32_t merges_mask;
    uint64_t *joins; // [(joins_mask + 1) / 64] bits, see sala__joins
    uint32_t joins_mask;

    sala__trie added[2]; // what is searched for before and after the normaliser
    sala__steps normalizer, decoder;
    sala__step metaspace; // the pre-tokenizer: space -> mark; from_size is 0 where there is none
    int prefix;           // SALA__PREFIX_*: where Metaspace puts the mark in front
    int split;            // Metaspace cuts before each mark
    int strip_space;      // a decoded text loses one space at its front

    int32_t bos, eos;          // or -1
    int add_bos;               // the model's files ask for BOS
    const char *template_name; // "chatml", "none" or "unrecognised"
    int32_t im_start, im_end;  // ChatML markers, or -1
} sala__tokenizer;

// ---- UTF-8 and characters ----

// The character at p: its length, and its code point; 0 when p does not begin with valid UTF-8.
static int sala__utf8_get(const unsigned char *p, size_t size, uint32_t *code) {
    if (size == 0) return 0;
    uint32_t c = p[0];
    *code = c;
    if (c < 0x80) return 1;
    if (c < 0xC2 || c > 0xF4 || size < 2 || (p[1] & 0xC0) != 0x80) return 0;
    if (c < 0xE0) {
        *code = (c & 31) << 6 | (p[1] & 63u);
        return 2;
    }
    if (size < 3 || (p[2] & 0xC0) != 0x80) return 0;
    if (c < 0xF0) {
        *code = (c & 15) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
        return *code < 0x800 || (*code >= 0xD800 && *code < 0xE000) ? 0 : 3;
    }
    if (size < 4 || (p[3] & 0xC0) != 0x80) return 0;
    *code = (c & 7) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
    return *code < 0x10000 || *code > 0x10FFFF ? 0 : 4;
}

// The character that ends at p + size, likewise.
static int sala__utf8_last(const unsigned char *p, size_t size, uint32_t *code) {
    for (size_t n = 1; n <= 4 && n <= size; n++)
        if (sala__utf8_get(p + size - n, n, code) == (int)n) return (int)n;
    return 0;
}

// Is p[0 .. size), 1 to 3 bytes, the beginning of a valid character but not all of it?
static int sala__utf8_partial(const unsigned char *p, size_t size) {
    static const unsigned char fill[2] = {0x80, 0xBF}; // if either completes it, it was a beginning
    uint32_t code;
    for (int f = 0; f < 2; f++) {
        unsigned char c[4] = {fill[f], fill[f], fill[f], fill[f]};
        memcpy(c, p, size);
        if (sala__utf8_get(c, 4, &code) > (int)size) return 1;
    }
    return 0;
}

static int sala__is_space(uint32_t c) { // Unicode White_Space
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// ---- steps: the small string operations that normalisers and decoders are made of ----

static int sala__starts(const char *text, size_t size, const char *with, int with_size) {
    return size >= (size_t)with_size && memcmp(text, with, (size_t)with_size) == 0;
}

// Append text with each `from` replaced by `to`, left to right without overlap.
static int sala__replace(const sala__env *env, const sala__step *s, const char *text, size_t size,
                         sala__string *out, sala_error *err) {
    size_t at = 0, n = (size_t)s->from_size;
    int code = 0;
    for (size_t i = 0; size - i >= n && code >= 0;) {
        const char *hit = (const char *)memchr(text + i, s->from[0], size - i - n + 1);
        if (!hit) break;
        i = (size_t)(hit - text);
        if (memcmp(hit, s->from, n) != 0) {
            i++;
            continue;
        }
        code = sala__append(env, out, text + at, i - at, err);
        if (code >= 0) code = sala__append(env, out, s->to, (size_t)s->to_size, err);
        at = i = i + n;
    }
    return code < 0 ? code : sala__append(env, out, text + at, size - at, err);
}

// All steps (NULL: none), one after the other; the result is in *out, *spare is working space. Both
// are overwritten.
static int sala__run_steps(const sala__env *env, const sala__steps *steps, const char *text,
                           size_t size, sala__string *out, sala__string *spare, sala_error *err) {
    out->size = 0;
    int code = sala__append(env, out, text, size, err);
    for (int i = 0; steps && i < steps->count && code >= 0; i++) {
        const sala__step *s = &steps->items[i];
        sala__string swap = *out;
        *out = *spare;
        *spare = swap; // holds the text so far
        out->size = 0;
        if (s->from_size) {
            code = sala__replace(env, s, spare->data, spare->size, out, err);
        } else { // nothing is put in front of nothing
            code = sala__append(env, out, s->to, spare->size ? (size_t)s->to_size : 0, err);
            if (code >= 0) code = sala__append(env, out, spare->data, spare->size, err);
        }
    }
    return code;
}

// ---- lookups ----

static uint32_t sala__hash_pair(int32_t a, int32_t b) {
    uint64_t h = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> 32) ^ (uint32_t)(h >> 11);
}

// The slot of a pair in merges: its own, or the empty one where it belongs.
static sala__merge *sala__merge_slot(const sala__tokenizer *t, int32_t left, int32_t right) {
    uint32_t i = sala__hash_pair(left, right) & t->merges_mask;
    while (t->merges[i].id >= 0 && (t->merges[i].left != left || t->merges[i].right != right))
        i = (i + 1) & t->merges_mask;
    return &t->merges[i];
}

/*  Can a merge ever join what is left of the border between the initial symbols a and b with what
    is right of it? If not, the text may be cut there: both sides are merged as if the other did not
    exist.

    Proof. A symbol is a run of initial symbols. Suppose that some merge (L, R) is the first to
    cross the border; then L ends with the initial symbol a and R begins with b. No merge names a
    byte token as a part (loading refuses that), so a symbol that takes part in merges consists of
    single-character tokens only, and its token's string is the string of those characters. So a is
    the token of the last character of L's string, b that of the first character of R's: exactly
    such pairs are in the hash set `joins`. It has no false negatives; a false positive only makes a
    stretch longer. Merges on one side do not depend on the other: each does its own lowest ranks
    first. */
static int sala__joins(const sala__tokenizer *t, int32_t a, int32_t b) {
    uint32_t bit = sala__hash_pair(a, b) & t->joins_mask;
    return (int)(t->joins[bit >> 6] >> (bit & 63) & 1);
}

static uint32_t sala__hash_text(const char *text, size_t size) { // FNV-1a
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < size; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001B3u;
    return (uint32_t)(h ^ h >> 32);
}

// The slot of a token string in by_name: its own, or the empty one where it belongs.
static uint32_t sala__name_slot(const sala__tokenizer *t, const char *text, size_t size) {
    uint32_t i = sala__hash_text(text, size) & t->by_name_mask;
    for (; t->by_name[i] >= 0; i = (i + 1) & t->by_name_mask) {
        const sala__token *k = &t->tokens[t->by_name[i]];
        if (k->text_size == size && memcmp(t->names.data + k->text, text, size) == 0) break;
    }
    return i;
}

// The id of a token string, or -1.
static int32_t sala__find_token(const sala__tokenizer *t, const char *text, size_t size) {
    return t->by_name[sala__name_slot(t, text, size)];
}

// The id of a token that BPE may put out for plain text, or -1.
static int32_t sala__find_plain(const sala__tokenizer *t, const char *text, size_t size) {
    int32_t id = sala__find_token(t, text, size);
    if (id < 0) return -1;
    uint32_t flags = t->tokens[id].flags & (SALA__TOKEN_MODEL | SALA__TOKEN_CONTROL);
    return flags == SALA__TOKEN_MODEL ? id : -1;
}

static int32_t sala__trie_child(const sala__trie *trie, int32_t node, char byte) {
    int32_t c = trie->nodes[node].child;
    while (c >= 0 && trie->nodes[c].byte != (unsigned char)byte) c = trie->nodes[c].next;
    return c;
}

// The longest added token that begins at p, or -1; `*length` becomes its bytes.
static int32_t sala__match_added(const sala__trie *trie, const char *p, size_t size,
                                 size_t *length) {
    int32_t node = (unsigned char)p[0], best = -1;
    if (trie->count == 0) return -1;
    for (size_t depth = 1; node >= 0; depth++) {
        if (trie->nodes[node].id >= 0) {
            best = trie->nodes[node].id;
            *length = depth;
        }
        if (depth == size) break;
        node = sala__trie_child(trie, node, p[depth]);
    }
    return best;
}

// ---- BPE ----

typedef struct sala__symbol {
    int32_t id;         // -1: was joined to the symbol before it
    int32_t prev, next; // positions of the neighbours; -1 and the count: none
} sala__symbol;

typedef struct sala__encoder {
    const sala__tokenizer *t;
    sala_error *err;
    int special;  // SALA_PARSE_SPECIAL
    int32_t *ids; // [count] the result
    size_t count, capacity;
    sala__symbol *symbols; // [symbol_count] the stretch that is being collected
    size_t symbol_count, symbol_capacity;
    uint64_t *heap; // [heap_count] rank << 32 | position of the left symbol
    size_t heap_count, heap_capacity;
    sala__string text, spare, piece;
} sala__encoder;

static int sala__push_id(sala__encoder *e, int32_t id) {
    int code = sala__grow(e->t->env, (void **)&e->ids, &e->capacity, e->count + 1, sizeof *e->ids,
                          "tokens", e->err);
    if (code < 0) return code;
    e->ids[e->count++] = id;
    return 0;
}

// Put the merge of the symbol at `left` and the next one, if there is one, into the heap.
static void sala__heap_push(sala__encoder *e, int32_t left) {
    const sala__symbol *s = e->symbols;
    if (s[left].next == (int32_t)e->symbol_count) return;
    const sala__merge *m = sala__merge_slot(e->t, s[left].id, s[s[left].next].id);
    if (m->id < 0) return;
    uint64_t key = (uint64_t)m->rank << 32 | (uint32_t)left;
    size_t i = e->heap_count++;
    for (; i > 0 && e->heap[(i - 1) / 2] > key; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = key;
}

static uint64_t sala__heap_pop(sala__encoder *e) {
    uint64_t *heap = e->heap, top = heap[0], key = heap[--e->heap_count];
    size_t n = e->heap_count, i = 0;
    for (size_t c = 1; c < n; c = 2 * i + 1) {
        if (c + 1 < n && heap[c + 1] < heap[c]) c++;
        if (heap[c] >= key) break;
        heap[i] = heap[c];
        i = c;
    }
    heap[i] = key;
    return top;
}

// Merge the stretch that was collected, and put it out.
static int sala__flush_symbols(sala__encoder *e) {
    sala__symbol *s = e->symbols;
    int32_t n = (int32_t)e->symbol_count;
    // A merge takes one entry and puts in at most two, so there are never more than 2n.
    int code = sala__grow(e->t->env, (void **)&e->heap, &e->heap_capacity, 2 * e->symbol_count,
                          sizeof *e->heap, "merging", e->err);
    if (code < 0) return code;
    for (int32_t i = 0; i < n; i++) sala__heap_push(e, i);
    while (e->heap_count) {
        uint64_t key = sala__heap_pop(e);
        int32_t i = (int32_t)(uint32_t)key, k = s[i].next;
        if (s[i].id < 0 || k == n) continue;
        const sala__merge *m = sala__merge_slot(e->t, s[i].id, s[k].id);
        if (m->id < 0 || m->rank != key >> 32) continue; // another pair stands here by now
        s[i].id = m->id;
        s[k].id = -1;
        s[i].next = s[k].next;
        if (s[i].next < n) s[s[i].next].prev = i;
        sala__heap_push(e, i);
        if (s[i].prev >= 0) sala__heap_push(e, s[i].prev);
    }
    for (int32_t i = 0; i < n && code >= 0; i = s[i].next) code = sala__push_id(e, s[i].id);
    e->symbol_count = 0;
    return code;
}

static int sala__push_symbol(sala__encoder *e, int32_t id) {
    int code = 0;
    if (e->symbol_count && !sala__joins(e->t, e->symbols[e->symbol_count - 1].id, id))
        code = sala__flush_symbols(e);
    if (code >= 0)
        code = sala__grow(e->t->env, (void **)&e->symbols, &e->symbol_capacity, e->symbol_count + 1,
                          sizeof *e->symbols, "symbols", e->err);
    if (code < 0) return code;
    int32_t at = (int32_t)e->symbol_count++;
    e->symbols[at].id = id;
    e->symbols[at].prev = at - 1;
    e->symbols[at].next = at + 1;
    return 0;
}

// The pre-tokenizer and BPE. `start`: the piece begins where the whole text begins.
static int sala__encode_piece(sala__encoder *e, const char *text, size_t size, int start) {
    const sala__tokenizer *t = e->t;
    const sala__step *m = &t->metaspace;
    int code = 0;
    if (m->from_size) {
        int prefix = t->prefix == SALA__PREFIX_ALWAYS || (t->prefix == SALA__PREFIX_FIRST && start);
        e->piece.size = 0;
        if (prefix && text[0] != ' ' && !sala__starts(text, size, m->to, m->to_size))
            code = sala__append(t->env, &e->piece, m->to, (size_t)m->to_size, e->err);
        if (code >= 0) code = sala__replace(t->env, m, text, size, &e->piece, e->err);
        if (code < 0) return code;
        text = e->piece.data;
        size = e->piece.size;
    }
    if (size > INT32_MAX)
        return sala__fail(e->err, SALA_E_ARGUMENT, "more than 2 GiB of text in one piece");
    const unsigned char *p = (const unsigned char *)text;
    for (size_t i = 0; i < size && code >= 0;) {
        uint32_t c;
        int n = sala__utf8_get(p + i, size - i, &c);
        int32_t id = n ? sala__find_plain(t, text + i, (size_t)n) : -1;
        if (t->split && sala__starts(text + i, size - i, m->to, m->to_size))
            code = sala__flush_symbols(e);
        if (id >= 0 && code >= 0) code = sala__push_symbol(e, id);
        if (n == 0) n = 1; // not UTF-8
        for (int b = 0; b < n && id < 0 && code >= 0; b++)
            code = sala__push_symbol(e, t->bytes[p[i + (size_t)b]]);
        i += (size_t)n;
    }
    return code < 0 ? code : sala__flush_symbols(e);
}

// ---- from text to pieces ----

static int sala__encode_stage(sala__encoder *e, int stage, const char *text, size_t size,
                              int start);

// Text without added tokens of `stage` goes on to what comes next.
static int sala__encode_between(sala__encoder *e, int stage, const char *text, size_t size,
                                int start) {
    const sala__tokenizer *t = e->t;
    if (size == 0) return 0;
    if (stage == 1) return sala__encode_piece(e, text, size, start);
    int code = sala__run_steps(t->env, &t->normalizer, text, size, &e->text, &e->spare, e->err);
    return code < 0 ? code : sala__encode_stage(e, 1, e->text.data, e->text.size, start);
}

// Cut a text at the added tokens, as the library does it: leftmost, longest, no overlap; a control
// token that is passed over in plain text still uses up its characters. `stage`: 0 before the
// normaliser, 1 after it. Linear: white space is only looked at back to the match before.
static int sala__encode_stage(sala__encoder *e, int stage, const char *text, size_t size,
                              int start) {
    const sala__tokenizer *t = e->t;
    const unsigned char *p = (const unsigned char *)text;
    size_t done = 0; // all before this was put out
    int code = 0, n;
    for (size_t at = 0; at < size && code >= 0;) {
        size_t length = 1, from = at;
        uint32_t c;
        int32_t id = sala__match_added(&t->added[stage], text + at, size - at, &length);
        at += length;
        if (id < 0 || (!e->special && (t->tokens[id].flags & SALA__TOKEN_CONTROL))) continue;
        if (t->tokens[id].flags & SALA__TOKEN_LSTRIP)
            while ((n = sala__utf8_last(p + done, from - done, &c)) > 0 && sala__is_space(c))
                from -= (size_t)n;
        if (t->tokens[id].flags & SALA__TOKEN_RSTRIP)
            while ((n = sala__utf8_get(p + at, size - at, &c)) > 0 && sala__is_space(c))
                at += (size_t)n;
        code = sala__encode_between(e, stage, text + done, from - done, start && done == 0);
        if (code >= 0) code = sala__push_id(e, id);
        done = at;
    }
    if (code < 0) return code;
    return sala__encode_between(e, stage, text + done, size - done, start && done == 0);
}

static void sala__encoder_start(sala__encoder *e, const sala__tokenizer *t, int special,
                                sala_error *err) {
    memset(e, 0, sizeof *e);
    e->t = t;
    e->err = err;
    e->special = special;
}

// Hand over the ids if `code` is no error; release everything else.
static int64_t sala__encoder_finish(sala__encoder *e, int code, int32_t **out) {
    const sala__env *env = e->t->env;
    if (code >= 0) // an array even when it is empty: the caller releases it in any case
        code = sala__grow(env, (void **)&e->ids, &e->capacity, 1, sizeof *e->ids, "tokens", e->err);
    *out = code < 0 ? NULL : e->ids;
    if (code < 0) sala__release(env, e->ids);
    sala__release(env, e->symbols);
    sala__release(env, e->heap);
    sala__release(env, e->text.data);
    sala__release(env, e->spare.data);
    sala__release(env, e->piece.data);
    return code < 0 ? code : (int64_t)e->count;
}

// Encode text. `flags`: SALA_ADD_BOS | SALA_PARSE_SPECIAL. Returns the number of ids, *out for
// sala__release.
static int64_t sala__encode(const sala__tokenizer *t, const char *text, size_t bytes, int flags,
                            int32_t **out, sala_error *err) {
    sala__encoder e;
    *out = NULL;
    int code = 0;
    sala__encoder_start(&e, t, (flags & SALA_PARSE_SPECIAL) != 0, err);
    if ((flags & SALA_ADD_BOS) && t->add_bos) code = sala__push_id(&e, t->bos);
    if (code >= 0) code = sala__encode_stage(&e, 0, text, bytes, 1);
    return sala__encoder_finish(&e, code, out);
}

// ---- decode ----

typedef struct sala__stream {
    const sala__tokenizer *t;
    int special; // show special tokens
    int begun;   // something has come out
    int held_size;
    char held[4]; // the beginning of a character
} sala__stream;

static void sala__stream_init(const sala__tokenizer *t, int special, sala__stream *s) {
    memset(s, 0, sizeof *s);
    s->t = t;
    s->special = special;
}

// Take one token; append to *out what is final now: whole characters, or bytes that are certainly
// not UTF-8. Ids without a token are nothing. On error the stream is as before.
static int sala__stream_push(sala__stream *s, int32_t token, sala__string *out, sala_error *err) {
    const sala__tokenizer *t = s->t;
    if (token < 0 || token >= t->limit)
        return sala__fail(err, SALA_E_ARGUMENT, "token %d: the vocabulary has the ids 0 to %d",
                          (int)token, (int)t->limit - 1);
    const sala__token *k = &t->tokens[token];
    if (!s->special && (k->flags & SALA__TOKEN_SPECIAL)) return 0;
    size_t base = out->size, end;
    int code = sala__append(t->env, out, s->held, (size_t)s->held_size, err);
    if (code >= 0) code = sala__append(t->env, out, t->names.data + k->shown, k->shown_size, err);
    if (code < 0) {
        out->size = base;
        return code;
    }
    s->held_size = 0;
    end = out->size;
    for (int n = 1; n <= 3 && (size_t)n <= end - base; n++) {
        if (!sala__utf8_partial((const unsigned char *)out->data + end - n, (size_t)n)) continue;
        s->held_size = n; // the longest such tail: a shorter one would begin inside it
    }
    end -= (size_t)s->held_size;
    memcpy(s->held, out->data + end, (size_t)s->held_size);
    size_t strip = t->strip_space && !s->begun && end > base && out->data[base] == ' ';
    s->begun |= end > base;
    memmove(out->data + base, out->data + base + strip, end - base - strip);
    out->size = end - strip;
    out->data[out->size] = 0;
    return 0;
}

// The end of the stream: what was held back, as it is. The stream can then start anew.
static int sala__stream_flush(sala__stream *s, sala__string *out, sala_error *err) {
    int code = sala__append(s->t->env, out, s->held, (size_t)s->held_size, err);
    if (code >= 0) sala__stream_init(s->t, s->special, s);
    return code;
}

// Decode tokens to zero-terminated text for sala__release, NULL on error; *bytes (may be NULL) is
// its length.
static char *sala__decode(const sala__tokenizer *t, const int32_t *tokens, int64_t count,
                          int special, size_t *bytes, sala_error *err) {
    sala__stream s;
    sala__string out = {NULL, 0, 0};
    int code = 0;
    sala__stream_init(t, special, &s);
    for (int64_t i = 0; i < count && code >= 0; i++)
        code = sala__stream_push(&s, tokens[i], &out, err);
    if (code >= 0) code = sala__stream_flush(&s, &out, err);
    if (code < 0) {
        sala__release(t->env, out.data);
        return NULL;
    }
    if (bytes) *bytes = out.size;
    return out.data;
}

// ---- loading ----

typedef struct sala__loader {
    sala__tokenizer *t;
    const sala__json *j; // tokenizer.json, or tokenizer_config.json
    sala_error *err;
} sala__loader;

// What is wrong with the file, or not supported.
static int sala__refuse(const sala__loader *l, const char *format, ...) SALA__PRINTF(2, 3);
static int sala__refuse(const sala__loader *l, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return sala__fail(l->err, SALA_E_MODEL, "%s: %s", l->j->where, text);
}

static const sala__json_node *sala__member(const sala__loader *l, int object, const char *key) {
    return sala__json_at(l->j, sala__json_get(l->j, object, key));
}

static const char *sala__kind(const sala__loader *l, int node) { // its "type", for messages
    const char *type = sala__json_text(l->j, sala__json_get(l->j, node, "type"));
    return type ? type : "without a type";
}

static int sala__is_kind(const sala__loader *l, int node, const char *type) {
    return sala__json_is(l->j, sala__json_get(l->j, node, "type"), type);
}

// true or false into *value, which stays as it is where the key is missing or null.
static int sala__read_flag(const sala__loader *l, int object, const char *key, int *value) {
    const sala__json_node *n = sala__member(l, object, key);
    if (n->type == SALA__NULL) return 0;
    if (n->type != SALA__BOOL) return sala__refuse(l, "\"%s\" must be true or false", key);
    *value = n->number != 0;
    return 0;
}

// The switches of "model": all but byte_fallback must be off.
static int sala__read_model(const sala__loader *l, int model) {
    static const char *const off[] = {"continuing_subword_prefix", "end_of_word_suffix", "dropout",
                                      "ignore_merges"};
    if (!sala__is_kind(l, model, "BPE"))
        return sala__refuse(l, "the model is %.40s, but only BPE is supported",
                            sala__kind(l, model));
    for (int i = 0; i < 4; i++) {
        const sala__json_node *n = sala__member(l, model, off[i]);
        if (n->number != 0 || n->text_size || n->count)
            return sala__refuse(l, "model.%s is not supported", off[i]);
    }
    if (sala__member(l, model, "byte_fallback")->number == 1) return 0;
    return sala__refuse(l, "model.byte_fallback is not true, so some texts could not be encoded; "
                           "this engine runs tokenizers with all 256 byte tokens");
}

// Put a token string into the vocabulary. Added tokens may repeat one of the model with its id.
static int sala__add_token(const sala__loader *l, const char *text, size_t size,
                           const sala__json_node *id, uint32_t flags) {
    sala__tokenizer *t = l->t;
    if (!id->is_integer || id->integer < 0 || id->integer >= t->limit)
        return sala__refuse(l, "the id of token \"%.60s\" is not from 0 to %d, the model's rows",
                            text, (int)t->limit - 1);
    int32_t slot = (int32_t)id->integer;
    sala__token *k = &t->tokens[slot];
    uint32_t name = sala__name_slot(t, text, size);
    int32_t other = t->by_name[name];
    int again = other == slot && !(k->flags & flags & (SALA__TOKEN_MODEL | SALA__TOKEN_ADDED));
    if ((other >= 0 || k->flags) && !again)
        return sala__refuse(l, "token \"%.60s\", id %d: its string or its id is there twice", text,
                            (int)slot);
    k->flags |= flags;
    if (again) return 0;
    k->text = (uint32_t)t->names.size;
    k->text_size = (uint32_t)size;
    t->by_name[name] = slot;
    if (slot >= t->size) t->size = slot + 1;
    int code = sala__append(t->env, &t->names, text, size, l->err);
    return code < 0 ? code : sala__append(t->env, &t->names, "", 1, l->err); // for messages
}

static int sala__read_added(const sala__loader *l, int node) {
    static const char *const keys[] = {"special", "normalized", "lstrip", "rstrip", "single_word"};
    static const uint32_t bits[] = {SALA__TOKEN_SPECIAL, SALA__TOKEN_NORMALIZED, SALA__TOKEN_LSTRIP,
                                    SALA__TOKEN_RSTRIP, 0};
    int content = sala__json_get(l->j, node, "content");
    const char *text = sala__json_text(l->j, content);
    uint32_t flags = SALA__TOKEN_ADDED;
    if (!text) return sala__refuse(l, "an added token without \"content\"");
    for (int i = 0; i < 5; i++) {
        int value = 0, code = sala__read_flag(l, node, keys[i], &value);
        if (code < 0) return code;
        if (value && !bits[i])
            return sala__refuse(l, "the added token \"%.60s\" is %s, which is not supported", text,
                                keys[i]);
        if (value) flags |= bits[i];
    }
    return sala__add_token(l, text, sala__json_at(l->j, content)->text_size,
                           sala__member(l, node, "id"), flags);
}

// model.vocab and added_tokens.
static int sala__load_vocabulary(const sala__loader *l, int model) {
    sala__tokenizer *t = l->t;
    const sala__json *j = l->j;
    const sala__json_node *vocab = sala__member(l, model, "vocab");
    const sala__json_node *added = sala__member(l, 0, "added_tokens");
    int code = 0;
    if (vocab->type != SALA__OBJECT || vocab->count == 0)
        return sala__refuse(l, "model.vocab must be an object of tokens and ids");
    uint64_t need = 2 * ((uint64_t)vocab->count + (uint64_t)added->count), slots = 16;
    while (slots < need) slots *= 2;
    t->by_name =
        (int32_t *)sala__alloc(t->env, slots, sizeof *t->by_name, "the vocabulary", l->err);
    if (!t->by_name) return SALA_E_MEMORY;
    memset(t->by_name, -1, slots * sizeof *t->by_name);
    t->by_name_mask = (uint32_t)slots - 1;
    t->tokens = (sala__token *)sala__alloc(t->env, (size_t)t->limit, sizeof *t->tokens,
                                           "the vocabulary", l->err);
    if (!t->tokens) return SALA_E_MEMORY;
    for (int c = vocab->child; c >= 0 && code >= 0; c = j->nodes[c].next)
        code = sala__add_token(l, sala__json_key(j, c), j->nodes[c].key_size, &j->nodes[c],
                               SALA__TOKEN_MODEL);
    for (int c = added->child; c >= 0 && code >= 0; c = j->nodes[c].next)
        code = sala__read_added(l, c);
    return code;
}

static int sala__load_bytes(const sala__loader *l) {
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        int32_t id = l->t->bytes[b] = sala__find_plain(l->t, name, 6);
        if (id < 0)
            return sala__refuse(l,
                                "the byte token %s is missing, or special: a tokenizer without "
                                "all 256 byte tokens is not supported",
                                name);
        l->t->tokens[id].flags |= SALA__TOKEN_BYTE;
    }
    return 0;
}

// The two strings of a line of "merges": "a b" or ["a", "b"].
static int sala__read_merge(const sala__loader *l, int node, uint32_t rank, const char *part[2],
                            size_t size[2]) {
    const sala__json *j = l->j;
    const sala__json_node *n = sala__json_at(j, node);
    const char *text = sala__json_text(j, node);
    if (text) {
        const char *space = (const char *)memchr(text, ' ', n->text_size);
        if (space && !memchr(space + 1, ' ', (size_t)(text + n->text_size - space - 1))) {
            part[0] = text;
            size[0] = (size_t)(space - text);
            part[1] = space + 1;
            size[1] = n->text_size - size[0] - 1;
            return 0;
        }
    } else if (n->type == SALA__ARRAY && n->count == 2) {
        for (int i = 0, c = n->child; i < 2; i++, c = j->nodes[c].next) {
            part[i] = sala__json_text(j, c);
            size[i] = sala__json_at(j, c)->text_size;
        }
        if (part[0] && part[1]) return 0;
    }
    return sala__refuse(l, "merge %u is not a pair of tokens", rank);
}

// Mark the border that the merge of two token strings joins; sala__joins says why.
static void sala__mark_join(sala__tokenizer *t, const char *part[2], const size_t size[2]) {
    uint32_t c;
    int left = sala__utf8_last((const unsigned char *)part[0], size[0], &c);
    int right = sala__utf8_get((const unsigned char *)part[1], size[1], &c);
    if (left == 0 || right == 0) return; // the empty string: no symbol ever is that
    int32_t a = sala__find_plain(t, part[0] + size[0] - left, (size_t)left);
    int32_t b = sala__find_plain(t, part[1], (size_t)right);
    if (a < 0 || b < 0) return; // cannot come about from single characters
    uint32_t bit = sala__hash_pair(a, b) & t->joins_mask;
    t->joins[bit >> 6] |= (uint64_t)1 << (bit & 63);
}

// One merge into the hash. `made` is working space for the joined string.
static int sala__add_merge(const sala__loader *l, int node, uint32_t rank, sala__string *made) {
    sala__tokenizer *t = l->t;
    const char *part[2] = {NULL, NULL};
    size_t size[2] = {0, 0};
    int32_t id[3] = {-1, -1, -1}; // left, right, both
    made->size = 0;
    int code = sala__read_merge(l, node, rank, part, size);
    for (int i = 0; i < 2 && code >= 0; i++)
        code = sala__append(t->env, made, part[i], size[i], l->err);
    if (code < 0) return code;
    for (int i = 0; i < 3; i++) {
        const char *text = i < 2 ? part[i] : made->data;
        id[i] = sala__find_token(t, text, i < 2 ? size[i] : made->size);
        uint32_t flags = id[i] < 0 ? 0 : t->tokens[id[i]].flags;
        if (!(flags & SALA__TOKEN_MODEL))
            return sala__refuse(l, "merge %u: \"%.60s\" is not in model.vocab", rank, text);
        if (i < 2 && (flags & SALA__TOKEN_BYTE)) // sala__joins relies on that
            return sala__refuse(l, "merge %u joins the byte token %s", rank, text);
        if (i == 2 && (flags & SALA__TOKEN_CONTROL)) return 0; // plain text must not become it
    }
    sala__merge *m = sala__merge_slot(t, id[0], id[1]);
    m->left = id[0]; // a repeated pair: the last one counts, as in the library
    m->right = id[1];
    m->rank = rank;
    m->id = id[2];
    sala__mark_join(t, part, size);
    return 0;
}

static int sala__load_merges(const sala__loader *l, int model) {
    sala__tokenizer *t = l->t;
    const sala__json_node *list = sala__member(l, model, "merges");
    sala__string made = {NULL, 0, 0};
    uint32_t rank = 0;
    int code = 0;
    if (list->type != SALA__ARRAY) return sala__refuse(l, "model.merges must be an array");
    uint64_t slots = 16, bits;
    while (slots < 2 * (uint64_t)list->count) slots *= 2;
    bits = slots * 8;
    t->merges_mask = (uint32_t)slots - 1;
    t->joins_mask = (uint32_t)bits - 1;
    t->merges = (sala__merge *)sala__alloc(t->env, slots, sizeof *t->merges, "merges", l->err);
    t->joins = (uint64_t *)sala__alloc(t->env, bits / 64, sizeof *t->joins, "merges", l->err);
    if (!t->merges || !t->joins) return SALA_E_MEMORY;
    for (uint64_t i = 0; i < slots; i++) t->merges[i].id = -1;
    for (int c = list->child; c >= 0 && code >= 0; c = l->j->nodes[c].next)
        code = sala__add_merge(l, c, rank++, &made);
    sala__release(t->env, made.data);
    return code;
}

// A short string of a step.
static int sala__read_text(const sala__loader *l, int node, const char *what, int at_least,
                           char *text, int *size) {
    const sala__json_node *n = sala__json_at(l->j, node);
    if (n->type != SALA__STRING || n->text_size < (size_t)at_least ||
        n->text_size > SALA__STEP_TEXT)
        return sala__refuse(l, "%s must be a string of %d to %d bytes", what, at_least,
                            SALA__STEP_TEXT);
    *size = (int)n->text_size;
    memcpy(text, sala__json_text(l->j, node), n->text_size);
    return 0;
}

// A Replace or Prepend.
static int sala__read_step(const sala__loader *l, int node, sala__steps *steps) {
    if (steps->count == SALA__STEPS)
        return sala__refuse(l, "more than %d steps of Replace and Prepend are not supported",
                            SALA__STEPS);
    sala__step *s = &steps->items[steps->count++];
    if (sala__is_kind(l, node, "Prepend"))
        return sala__read_text(l, sala__json_get(l->j, node, "prepend"), "the text of Prepend", 0,
                               s->to, &s->to_size);
    int pattern = sala__json_get(l->j, sala__json_get(l->j, node, "pattern"), "String");
    int content = sala__json_get(l->j, node, "content");
    if (pattern < 0) return sala__refuse(l, "the pattern of Replace must be a plain \"String\"");
    int code = sala__read_text(l, pattern, "the pattern of Replace", 1, s->from, &s->from_size);
    if (code >= 0)
        code = sala__read_text(l, content, "the content of Replace", 0, s->to, &s->to_size);
    if (code < 0 || s->to_size <= SALA__STEP_GROWTH * s->from_size) return code;
    return sala__refuse(l, "a Replace makes text over %d times longer", SALA__STEP_GROWTH);
}

static int sala__read_normalizer(const sala__loader *l, int node) {
    int code = 0, sequence = sala__is_kind(l, node, "Sequence"), c = node;
    if (sala__json_at(l->j, node)->type == SALA__NULL) return 0;
    if (sequence) c = sala__member(l, node, "normalizers")->child;
    while (c >= 0 && code >= 0) {
        if (!sala__is_kind(l, c, "Replace") && !sala__is_kind(l, c, "Prepend"))
            return sala__refuse(l,
                                "the normalizer %.40s is not supported; Llama/MiniCPM style "
                                "tokenizers have Prepend, Replace or none",
                                sala__kind(l, c));
        code = sala__read_step(l, c, &l->t->normalizer);
        c = sequence ? l->j->nodes[c].next : -1;
    }
    return code;
}

static int sala__read_pre_tokenizer(const sala__loader *l, int node) {
    static const char *const schemes[] = {"never", "first", "always"}; // SALA__PREFIX_*
    sala__tokenizer *t = l->t;
    if (sala__json_at(l->j, node)->type == SALA__NULL) return 0;
    if (!sala__is_kind(l, node, "Metaspace"))
        return sala__refuse(l,
                            "the pre_tokenizer %.40s is not supported; Llama/MiniCPM style "
                            "tokenizers have Metaspace or none",
                            sala__kind(l, node));
    int scheme = sala__json_get(l->j, node, "prepend_scheme");
    while (t->prefix < 3 && !sala__json_is(l->j, scheme, schemes[t->prefix])) t->prefix++;
    if (t->prefix == 3)
        return sala__refuse(l, "the prepend_scheme of Metaspace must be always, first or never");
    t->split = 1;
    t->metaspace.from[0] = ' ';
    t->metaspace.from_size = 1;
    int code =
        sala__read_text(l, sala__json_get(l->j, node, "replacement"),
                        "the replacement of Metaspace", 1, t->metaspace.to, &t->metaspace.to_size);
    return code < 0 ? code : sala__read_flag(l, node, "split", &t->split);
}

// The decoder: only the Llama sequence. Replace and ByteFallback see single tokens, so they are
// applied once for all at load (sala__load_texts); Strip sees the front of the whole text.
static int sala__read_decoder(const sala__loader *l, int node) {
    static const char *const order[] = {"ByteFallback", "Fuse", "Strip"};
    const sala__json *j = l->j;
    int code = 0, place = 0, last = -1, c = sala__member(l, node, "decoders")->child;
    for (; code >= 0 && sala__is_kind(l, c, "Replace"); c = j->nodes[c].next)
        code = sala__read_step(l, c, &l->t->decoder);
    for (; place < 3 && sala__is_kind(l, c, order[place]); place++) {
        last = c;
        c = j->nodes[c].next;
    }
    l->t->strip_space = place == 3;
    int one_space = sala__json_is(j, sala__json_get(j, last, "content"), " ") &&
                    sala__member(l, last, "start")->number == 1 &&
                    sala__member(l, last, "stop")->number == 0;
    if (code < 0 || (c < 0 && (place == 2 || (place == 3 && one_space)))) return code;
    return sala__refuse(l, "the decoder is not a Sequence of Replace, ByteFallback, Fuse and "
                           "perhaps Strip of one space at the start, as Llama style tokenizers "
                           "have it");
}

// Which token the post-processor puts in front; sets bos and add_bos.
static int sala__read_post_processor(const sala__loader *l, int node) {
    sala__tokenizer *t = l->t;
    const sala__json *j = l->j;
    int c = sala__member(l, node, "single")->child;
    int name = sala__json_get(j, sala__json_get(j, c, "SpecialToken"), "id");
    const char *text = sala__json_text(j, name);
    if (sala__json_at(j, node)->type == SALA__NULL) return 0;
    if (!sala__is_kind(l, node, "TemplateProcessing"))
        return sala__refuse(l,
                            "the post_processor %.40s is not supported; only "
                            "TemplateProcessing is",
                            sala__kind(l, node));
    if (text) {
        t->add_bos = 1;
        t->bos = sala__find_token(t, text, sala__json_at(j, name)->text_size);
        if (t->bos < 0)
            return sala__refuse(l, "the post_processor's %.40s is not in the vocabulary", text);
        c = j->nodes[c].next;
    }
    if (sala__json_get(j, c, "Sequence") < 0)
        return sala__refuse(l, "the post_processor must be one token (BOS), then the text");
    if (j->nodes[c].next >= 0)
        sala__log(t->env, SALA_LOG_WARNING,
                  "%s: what the post_processor adds after a text is left out", j->where);
    return 0;
}

// An added token that is to be searched for as `text`.
static int sala__trie_add(const sala__loader *l, sala__trie *trie, const char *text, size_t size,
                          int32_t id) {
    if (size == 0 || size > SALA__ADDED_MAX)
        return sala__refuse(l, "the added token %d must have 1 to %d bytes when normalized",
                            (int)id, SALA__ADDED_MAX);
    int code = sala__grow(l->t->env, (void **)&trie->nodes, &trie->capacity,
                          trie->count + 256 + size, sizeof *trie->nodes, "added tokens", l->err);
    if (code < 0) return code;
    if (trie->count == 0) {
        trie->count = 256;
        memset(trie->nodes, -1, 256 * sizeof *trie->nodes);
    }
    int32_t at = (unsigned char)text[0];
    for (size_t i = 1; i < size; i++) {
        int32_t next = sala__trie_child(trie, at, text[i]);
        if (next < 0) {
            sala__trie_node node = {-1, -1, trie->nodes[at].child, (unsigned char)text[i]};
            next = trie->nodes[at].child = (int32_t)trie->count;
            trie->nodes[trie->count++] = node;
        }
        at = next;
    }
    if (trie->nodes[at].id >= 0)
        return sala__refuse(l, "the added tokens %d and %d are the same after the normalizer",
                            (int)trie->nodes[at].id, (int)id);
    trie->nodes[at].id = id;
    return 0;
}

// Once for all: what the added tokens are searched for as, and what all tokens decode to. For
// "normalized" ones that is their normalised string, in both.
static int sala__load_texts(const sala__loader *l) {
    sala__tokenizer *t = l->t;
    sala__string text = {NULL, 0, 0}, shown = {NULL, 0, 0}, spare = {NULL, 0, 0};
    int code = 0;
    for (int32_t id = 0; id < t->size && code >= 0; id++) {
        sala__token *k = &t->tokens[id];
        int normalized = (k->flags & SALA__TOKEN_NORMALIZED) != 0;
        code = sala__run_steps(t->env, normalized ? &t->normalizer : NULL, t->names.data + k->text,
                               k->text_size, &text, &spare, l->err);
        if (code >= 0 && (k->flags & SALA__TOKEN_ADDED))
            code = sala__trie_add(l, &t->added[normalized], text.data, text.size, id);
        if (code >= 0)
            code =
                sala__run_steps(t->env, &t->decoder, text.data, text.size, &shown, &spare, l->err);
        if (code >= 0 && t->names.size + shown.size > UINT32_MAX)
            code = sala__refuse(l, "the vocabulary is too large");
        if (code < 0) break;
        if (k->flags & SALA__TOKEN_BYTE) {
            shown.data[0] = (char)strtol(t->names.data + k->text + 3, NULL, 16);
            shown.size = 1;
        }
        k->shown = (uint32_t)t->names.size;
        k->shown_size = (uint32_t)shown.size;
        code = sala__append(t->env, &t->names, shown.data, shown.size, l->err);
    }
    sala__release(t->env, text.data);
    sala__release(t->env, shown.data);
    sala__release(t->env, spare.data);
    return code;
}

// ---- the chat template ----

/*  No Jinja runs here: the one template that we can write ourselves, ChatML, is recognised by its
    text. For that it is reduced in place to what it puts out: {% %}, white space, quotes, + ~ ( ) -
    and {{ }} are dropped, and message['role'] becomes message.role. Line ends stay where they come
    from a string's \n, or stand outside of tags and no tag eats them. */
static void sala__reduce_template(char *s) {
    char *out = s, tag = 0; // '{' or '%': inside of such a tag
    int eat = 0;            // line ends, after "%}" and "-}}"
    // Until the end a line end that stands outside of tags is '\r'.
    for (const char *p = s; *p; p++) {
        if (!tag && p[0] == '{' && (p[1] == '{' || p[1] == '%')) {
            tag = *++p;
            while (p[1] == '-' && out > s && out[-1] == '\r') out--;
        } else if (tag && p[0] == (tag == '{' ? '}' : '%') && p[1] == '}') {
            eat = tag == '%' || p[-1] == '-';
            tag = 0;
            p++;
        } else if (*p == '\n' && !tag) {
            if (!eat) *out++ = '\r';
        } else if (tag != '%' && !strchr(" \t\r\n\v\f'\"+~()]-", *p)) {
            int escape = p[0] == '\\' && p[1] == 'n';
            *out++ = escape ? '\n' : *p == '[' ? '.' : *p;
            p += escape;
            eat = 0;
        }
    }
    *out = 0;
    for (out = s; *out; out++)
        if (*out == '\r') *out = '\n';
}

static int sala__accept(const char **p, const char *word) {
    size_t n = strlen(word);
    if (strncmp(*p, word, n) != 0) return 0;
    *p += n;
    return 1;
}

// Does <|im_start|> ROLE \n CONTENT <|im_end|> \n begin here?
static int sala__is_chatml_turn(const char *p) {
    if (!sala__accept(&p, SALA__IM_START)) return 0;
    if (!sala__accept(&p, "message.role") && !sala__accept(&p, "role") && !sala__accept(&p, "user"))
        return 0;
    if (!sala__accept(&p, "\n")) return 0;
    if (!sala__accept(&p, "message.content") && !sala__accept(&p, "content")) return 0;
    sala__accept(&p, "|trim");
    return sala__accept(&p, SALA__IM_END "\n");
}

static int sala__read_template(sala__tokenizer *t, const char *text, size_t size, sala_error *err) {
    static const char *const extras[][2] = {{SALA__IM_START "system", "system prompts"},
                                            {"tools", "tools"},
                                            {"enable_thinking", "enable_thinking"},
                                            {"trim", "trimming of contents"}};
    sala__string s = {NULL, 0, 0};
    char found[128] = "";
    int turn = 0, code = sala__append(t->env, &s, text, size, err);
    if (code < 0) return code;
    for (int i = 0; i < 4; i++) {
        size_t n = strlen(found);
        if (strstr(s.data, extras[i][0]))
            snprintf(found + n, sizeof found - n, "%s%s", n ? ", " : "", extras[i][1]);
    }
    sala__reduce_template(s.data);
    for (const char *p = s.data; (p = strstr(p, SALA__IM_START)) != NULL; p++)
        turn |= sala__is_chatml_turn(p);
    turn &= strstr(s.data, SALA__IM_START "assistant\n") != NULL;
    t->template_name = turn ? "chatml" : "unrecognised";
    if (turn && *found)
        sala__log(t->env, SALA_LOG_WARNING,
                  "the chat template is ChatML, but what it does about these is not reproduced: %s",
                  found);
    sala__release(t->env, s.data);
    return 0;
}

// ---- open ----

// "bos_token" and its like: a string, or an object with "content". Sets *id; leaves it when there
// is none.
static int sala__read_token_name(const sala__loader *l, const char *key, int32_t *id) {
    int node = sala__json_get(l->j, 0, key);
    if (sala__json_at(l->j, node)->type == SALA__OBJECT)
        node = sala__json_get(l->j, node, "content");
    const char *text = sala__json_text(l->j, node);
    if (!text) return 0;
    *id = sala__find_token(l->t, text, sala__json_at(l->j, node)->text_size);
    return *id >= 0 ? 0 : sala__refuse(l, "%s \"%.60s\" is not in the vocabulary", key, text);
}

// tokenizer_config.json.
static int sala__load_config(const sala__loader *l) {
    sala__tokenizer *t = l->t;
    int add_eos = 0;
    int code = sala__read_token_name(l, "bos_token", &t->bos);
    if (code >= 0) code = sala__read_token_name(l, "eos_token", &t->eos);
    if (code >= 0) code = sala__read_flag(l, 0, "add_bos_token", &t->add_bos);
    if (code >= 0) code = sala__read_flag(l, 0, "add_eos_token", &add_eos);
    if (code >= 0 && t->add_bos && t->bos < 0)
        code = sala__refuse(l, "add_bos_token is true, but no bos_token is named");
    if (code >= 0 && add_eos)
        sala__log(t->env, SALA_LOG_WARNING,
                  "%s: add_eos_token is ignored: EOS is never added to a text", l->j->where);
    return code;
}

// What must not come out of plain text.
static void sala__mark_control(sala__tokenizer *t) {
    t->im_start = sala__find_token(t, SALA__IM_START, strlen(SALA__IM_START));
    t->im_end = sala__find_token(t, SALA__IM_END, strlen(SALA__IM_END));
    int32_t named[4] = {t->bos, t->eos, t->im_start, t->im_end};
    for (int i = 0; i < 4; i++)
        if (named[i] >= 0) t->tokens[named[i]].flags |= SALA__TOKEN_CONTROL;
    for (int32_t id = 0; id < t->size; id++)
        if (t->tokens[id].flags & SALA__TOKEN_SPECIAL) t->tokens[id].flags |= SALA__TOKEN_CONTROL;
}

// From parsed files; config may be NULL, and so may jinja, whose template wins. Released on error.
static int sala__tokenizer_load(sala__tokenizer *t, const sala__json *j, const sala__json *config,
                                const sala__file *jinja, sala_error *err) {
    sala__loader l = {t, j, err}, c = {t, config, err};
    int model = sala__json_get(j, 0, "model");
    int code = sala__read_model(&l, model);
    if (code >= 0) code = sala__load_vocabulary(&l, model);
    if (code >= 0) code = sala__read_post_processor(&l, sala__json_get(j, 0, "post_processor"));
    if (code >= 0 && config) code = sala__load_config(&c);
    if (code < 0) return code;
    sala__mark_control(t);
    code = sala__load_bytes(&l);
    if (code >= 0) code = sala__load_merges(&l, model);
    if (code >= 0) code = sala__read_normalizer(&l, sala__json_get(j, 0, "normalizer"));
    if (code >= 0) code = sala__read_pre_tokenizer(&l, sala__json_get(j, 0, "pre_tokenizer"));
    if (code >= 0) code = sala__read_decoder(&l, sala__json_get(j, 0, "decoder"));
    if (code >= 0) code = sala__load_texts(&l);
    if (code < 0) return code;
    if (jinja) return sala__read_template(t, (const char *)jinja->data, (size_t)jinja->size, err);
    int node = config ? sala__json_get(config, 0, "chat_template") : -1;
    if (node < 0 || !sala__json_text(config, node)) return 0;
    return sala__read_template(t, sala__json_text(config, node),
                               sala__json_at(config, node)->text_size, err);
}

static void sala__tokenizer_close(sala__tokenizer *t) { // a tokenizer that is all zeros is fine
    if (!t->env) return;
    sala__release(t->env, t->tokens);
    sala__release(t->env, t->names.data);
    sala__release(t->env, t->by_name);
    sala__release(t->env, t->merges);
    sala__release(t->env, t->joins);
    for (int stage = 0; stage < 2; stage++) sala__release(t->env, t->added[stage].nodes);
    memset(t, 0, sizeof *t);
}

static void sala__tokenizer_start(sala__tokenizer *t, const sala__env *env, int vocab_limit) {
    memset(t, 0, sizeof *t);
    t->env = env;
    t->limit = vocab_limit > 0 ? vocab_limit : 0;
    t->bos = t->eos = t->im_start = t->im_end = -1;
    t->template_name = "none";
}

// Open the tokenizer of a model folder. `vocab_limit`: rows of the embedding. `template_override`:
// NULL or "chatml". `env` must outlive it. On error everything is released.
static int sala__tokenizer_open(const sala__env *env, const char *folder, int vocab_limit,
                                const char *template_override, sala__tokenizer *t,
                                sala_error *err) {
    static const char *const names[3] = {"tokenizer.json", "tokenizer_config.json",
                                         "chat_template.jinja"};
    char *paths[3] = {NULL, NULL, NULL};
    int exists[3] = {0, 0, 0}, code = 0; // of the last two: they may be missing
    sala__json j, c;
    sala__file jinja = {NULL, 0};
    memset(&j, 0, sizeof j);
    memset(&c, 0, sizeof c);
    memset(t, 0, sizeof *t);
    if (template_override && strcmp(template_override, "chatml") != 0)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "chat_template \"%.40s\" is unknown; only \"chatml\" can be asked for",
                          template_override);
    for (int i = 0; i < 3 && code >= 0; i++) {
        paths[i] = sala__join(env, folder, names[i], err);
        if (!paths[i]) code = SALA_E_MEMORY;
        exists[i] = paths[i] && sala__file_exists(paths[i]);
    }
    sala__tokenizer_start(t, env, vocab_limit);
    if (code >= 0) code = sala__json_file(env, paths[0], SALA__TOKENIZER_FILE_MAX, &j, err);
    if (code >= 0 && exists[1])
        code = sala__json_file(env, paths[1], SALA__TOKENIZER_FILE_MAX, &c, err);
    if (code >= 0 && exists[2]) code = sala__map_file(paths[2], &jinja, err);
    if (code >= 0)
        code = sala__tokenizer_load(t, &j, exists[1] ? &c : NULL, exists[2] ? &jinja : NULL, err);
    if (code < 0)
        sala__tokenizer_close(t);
    else if (template_override)
        t->template_name = "chatml";
    sala__unmap_file(&jinja);
    sala__json_free(&j);
    sala__json_free(&c);
    for (int i = 0; i < 3; i++) sala__release(env, paths[i]);
    return code;
}

// ---- chat ----

// Can we write this model's chat? The sentence in `err` says what is in the way.
static int sala__check_chat(const sala__tokenizer *t, sala_error *err) {
    if (strcmp(t->template_name, "chatml") != 0)
        return sala__fail(err, SALA_E_MODEL,
                          "the model has %s; if it was trained with ChatML, open it with "
                          "--template chatml (option chat_template=\"chatml\")",
                          strcmp(t->template_name, "none") == 0
                              ? "no chat template"
                              : "a chat template that was not recognised as ChatML");
    for (int i = 0; i < 2; i++) {
        int32_t id = i ? t->im_end : t->im_start;
        uint32_t flags = id < 0 ? 0 : t->tokens[id].flags;
        // With the other flags the ids would depend on what stands around the marker.
        if ((flags & (SALA__TOKEN_ADDED | SALA__TOKEN_NORMALIZED | SALA__TOKEN_LSTRIP |
                      SALA__TOKEN_RSTRIP)) != SALA__TOKEN_ADDED)
            return sala__fail(
                err, SALA_E_MODEL,
                "the ChatML marker %s is not in the vocabulary as an added token "
                "without normalized, lstrip and rstrip: this model has no ChatML chat",
                i ? SALA__IM_END : SALA__IM_START);
    }
    return 0;
}

// The ids of one turn: <|im_start|>ROLE\nCONTENT<|im_end|>\n, after BOS if `first` and the model
// has one, and followed by <|im_start|>assistant\n if `reply`. Role and content are plain text.
// Returns the number of ids, as sala__encode.
static int64_t sala__chat_turn(const sala__tokenizer *t, const char *role, const char *content,
                               size_t bytes, int first, int reply, int32_t **out, sala_error *err) {
    sala__encoder e;
    sala__string text = {NULL, 0, 0};
    *out = NULL;
    int code = sala__check_chat(t, err);
    if (code < 0) return code;
    sala__encoder_start(&e, t, 0, err);
    code = sala__append(t->env, &text, role, strlen(role), err);
    if (code >= 0) code = sala__append(t->env, &text, "\n", 1, err);
    if (code >= 0) code = sala__append(t->env, &text, content, bytes, err);
    if (code >= 0 && first && t->add_bos) code = sala__push_id(&e, t->bos);
    if (code >= 0) code = sala__push_id(&e, t->im_start);
    if (code >= 0) code = sala__encode_stage(&e, 0, text.data, text.size, 0);
    if (code >= 0) code = sala__push_id(&e, t->im_end);
    if (code >= 0) code = sala__encode_stage(&e, 0, "\n", 1, 0);
    if (code >= 0 && reply) code = sala__push_id(&e, t->im_start);
    if (code >= 0 && reply) code = sala__encode_stage(&e, 0, "assistant\n", 10, 0);
    sala__release(t->env, text.data);
    return sala__encoder_finish(&e, code, out);
}
/* ------------------------------------------------------------------------------------------------
   SETTINGS: options and request fields by name, and their ranges

   One table for sala_options and one for sala_request: name, kind, place, range. The same row reads
   a value from text and checks the field of a struct that a program filled in, so both know the
   same limits. In a struct 0 means "default"; said by name a 0 must be a value, so `max-tokens 0`
   is an error and `temperature 0` is not. Numbers are read without the C library, whose answer
   depends on the locale. Nothing is ignored: an unknown name is an error that suggests a known one.
   ------------------------------------------------------------------------------------------------ */

enum {               // sala__setting.kind: the type of the field
    SALA__SET_FLAG,  // int: 1 true on yes, 0 false off no; no value: 1
    SALA__SET_INT,   // int
    SALA__SET_LONG,  // int64_t
    SALA__SET_SEED,  // uint64_t, the whole range
    SALA__SET_FLOAT, // float
    SALA__SET_WORD,  // const char *, as the rest: one of `words`
    SALA__SET_TEXT,  // const char *, anything but ""
    SALA__SET_TREE   // const char *, "depth,topk,nodes"
};

enum {                   // sala__setting.rules
    SALA__SET_SIZE = 1,  // tokens or bytes: in text K, M, G multiply by 1024, 1024^2, 1024^3
    SALA__SET_ABOVE = 2, // in text above the minimum: at it, it would read as "default"
    SALA__SET_NEVER = 4, // in text 0 means SALA_DENSE_NEVER, which a struct may hold too
    SALA__SET_BLOCKS = 8 // a multiple of 64
};

// Of the trees of a draft head: levels below the root, candidates a node, nodes with the root.
typedef struct sala__shape {
    int32_t depth, topk, nodes;
} sala__shape;

typedef struct sala__setting {
    const char *name;
    int kind, rules;
    size_t offset;
    int64_t minimum, maximum; // in a struct 0 is right too: the default
    const char *words;        // separated by single spaces
} sala__setting;

#define SALA__OPTION(field) offsetof(sala_options, field)
static const sala__setting sala__option_table[] = {
    {"device", SALA__SET_WORD, 0, SALA__OPTION(device), 0, 0, "auto cpu cuda cuda:N"},
    {"threads", SALA__SET_INT, 0, SALA__OPTION(threads), 1, 256, NULL},
    {"max-sequences", SALA__SET_INT, 0, SALA__OPTION(max_sequences), 1, 256, NULL},
    {"context", SALA__SET_LONG, SALA__SET_SIZE, SALA__OPTION(context), 1, 1 << 30, NULL},
    {"kv-tokens", SALA__SET_LONG, SALA__SET_SIZE, SALA__OPTION(kv_tokens), 1, 1LL << 40, NULL},
    {"memory-limit", SALA__SET_LONG, SALA__SET_SIZE, SALA__OPTION(memory_limit), 1, 1LL << 50,
     NULL},
    {"chunk", SALA__SET_INT, SALA__SET_SIZE | SALA__SET_BLOCKS, SALA__OPTION(chunk), 64, 65536,
     NULL},
    {"dense-len", SALA__SET_INT, SALA__SET_SIZE | SALA__SET_NEVER, SALA__OPTION(dense_len), 0,
     1 << 30, NULL},
    {"logits-rows", SALA__SET_INT, 0, SALA__OPTION(logits_rows), 0, 1 << 20, NULL},
    {"hidden-states", SALA__SET_FLAG, 0, SALA__OPTION(hidden_states), 0, 1, NULL},
    {"synthetic", SALA__SET_FLAG, 0, SALA__OPTION(synthetic), 0, 1, NULL},
    {"synthetic-seed", SALA__SET_SEED, 0, SALA__OPTION(synthetic_seed), 0, 0, NULL},
    {"weights", SALA__SET_WORD, 0, SALA__OPTION(weights), 0, 0, "bf16 nvfp4 int4 nvfp4-head"},
    {"prefill", SALA__SET_WORD, 0, SALA__OPTION(prefill), 0, 0, "auto w4a4 w4a16"},
    {"template", SALA__SET_WORD, 0, SALA__OPTION(chat_template), 0, 0, "chatml"},
    {"reuse", SALA__SET_WORD, 0, SALA__OPTION(reuse), 0, 0, "prefix off history"},
    {"reuse-memory", SALA__SET_LONG, SALA__SET_SIZE, SALA__OPTION(reuse_memory), 1, 1LL << 50,
     NULL},
    {"spec", SALA__SET_WORD, 0, SALA__OPTION(spec), 0, 0, "auto off ngram eagle"},
    {"draft", SALA__SET_TEXT, 0, SALA__OPTION(draft), 0, 0, "a folder"},
    {"spec-tree", SALA__SET_TREE, 0, SALA__OPTION(spec_tree), 0, 0, NULL},
    {"draft-window", SALA__SET_INT, SALA__SET_SIZE | SALA__SET_BLOCKS, SALA__OPTION(draft_window),
     64, 1 << 20, NULL},
    {"spec-test", SALA__SET_WORD, 0, SALA__OPTION(spec_test), 0, 0,
     "oracle oracle:N random adversarial"},
};

#define SALA__FIELD(field) offsetof(sala_request, field)
static const sala__setting sala__request_table[] = {
    {"sequence", SALA__SET_LONG, 0, SALA__FIELD(sequence), 0, INT64_MAX, NULL},
    {"keep", SALA__SET_FLAG, 0, SALA__FIELD(keep), 0, 1, NULL},
    {"max-tokens", SALA__SET_LONG, SALA__SET_SIZE, SALA__FIELD(max_tokens), 1, 1 << 30, NULL},
    {"temperature", SALA__SET_FLOAT, 0, SALA__FIELD(temperature), 0, 100, NULL},
    {"top-k", SALA__SET_INT, 0, SALA__FIELD(top_k), 0, INT32_MAX, NULL},
    {"top-p", SALA__SET_FLOAT, SALA__SET_ABOVE, SALA__FIELD(top_p), 0, 1, NULL},
    {"min-p", SALA__SET_FLOAT, 0, SALA__FIELD(min_p), 0, 1, NULL},
    {"repetition-penalty", SALA__SET_FLOAT, SALA__SET_ABOVE, SALA__FIELD(repetition_penalty), 0,
     100, NULL},
    {"presence-penalty", SALA__SET_FLOAT, 0, SALA__FIELD(presence_penalty), -100, 100, NULL},
    {"frequency-penalty", SALA__SET_FLOAT, 0, SALA__FIELD(frequency_penalty), -100, 100, NULL},
    {"seed", SALA__SET_SEED, 0, SALA__FIELD(seed), 0, 0, NULL},
    {"ignore-eos", SALA__SET_FLAG, 0, SALA__FIELD(ignore_eos), 0, 1, NULL},
    {"logprobs", SALA__SET_INT, 0, SALA__FIELD(logprobs), 0, 20, NULL},
    {"special-text", SALA__SET_FLAG, 0, SALA__FIELD(special_text), 0, 1, NULL},
    {"want-rows", SALA__SET_INT, 0, SALA__FIELD(want_rows), 0, 7, NULL},
    {"want-trees", SALA__SET_FLAG, 0, SALA__FIELD(want_trees), 0, 1, NULL},
};
#define SALA__ROWS(table) ((int)(sizeof(table) / sizeof(table)[0]))

typedef struct sala__value { // of a field, by its kind
    int64_t integer;         // FLAG, INT, LONG; of a SEED the 64 bits
    float real;
    const char *word;
} sala__value;

// ---- reading ----

// Which of the words, -1: none. A word that ends in ":N" stands for up to three digits there.
static int sala__word_index(const char *text, const char *words) {
    size_t n = strlen(text);
    for (int i = 0;; i++) {
        size_t m = strcspn(words, " ");
        if (m == n && memcmp(text, words, n) == 0 && text[n - (n > 0)] != 'N') return i;
        if (m > 2 && words[m - 1] == 'N' && n >= m && n < m + 3 &&
            memcmp(text, words, m - 1) == 0 && strspn(text + m - 1, "0123456789") == n - m + 1)
            return i;
        if (!words[m]) return -1;
        words += m + 1;
    }
}

// A decimal integer, perhaps with a sign or K, M or G, in 64 bits: signed unless it is a seed.
static int sala__read_integer(const sala__setting *e, const char *text, int64_t *value) {
    static const char letters[] = "KkMmGg";
    int negative = *text == '-', digits = 0;
    uint64_t v = 0;
    for (text += negative; *text >= '0' && *text <= '9'; text++, digits++)
        if (__builtin_mul_overflow(v, (uint64_t)10, &v) ||
            __builtin_add_overflow(v, (uint64_t)(*text - '0'), &v))
            return -1;
    const char *letter = *text && (e->rules & SALA__SET_SIZE) ? strchr(letters, *text) : NULL;
    uint64_t scale = letter ? (uint64_t)1024 << (letter - letters) / 2 * 10 : 1;
    text += letter != NULL;
    if (!digits || *text || __builtin_mul_overflow(v, scale, &v)) return -1;
    if (e->kind == SALA__SET_SEED ? negative : v > INT64_MAX) return -1;
    *value = negative ? -(int64_t)v : (int64_t)v;
    return 0;
}

// A decimal number as JSON writes it; NaN: malformed.
static float sala__read_number(const char *text) {
    sala__json j;
    sala__json_node node;
    memset(&j, 0, sizeof j);
    memset(&node, 0, sizeof node);
    j.where = "";
    j.data = (const unsigned char *)text;
    j.size = strlen(text);
    if (j.size == 0 || sala__json_number(&j, &node, NULL) < 0 || j.at != j.size) return NAN;
    return (float)node.number;
}

// "depth,topk,nodes" of a tree that can be made. Returns 0, or what is wrong: SALA__SHAPE_*.
enum {
    SALA__SHAPE_FORM = 1,
    SALA__SHAPE_DEPTH,
    SALA__SHAPE_TOPK,
    SALA__SHAPE_NODES,
    SALA__SHAPE_MANY
};

static int sala__shape_read(const char *text, sala__shape *shape) {
    int32_t *const out[] = {&shape->depth, &shape->topk, &shape->nodes};
    for (int i = 0; i < 3; i++) {
        size_t digits = strspn(text, "0123456789");
        if (digits < 1 || digits > 2 || text[digits] != (i < 2 ? ',' : 0)) return SALA__SHAPE_FORM;
        *out[i] = digits == 1 ? text[0] - '0' : 10 * (text[0] - '0') + text[1] - '0';
        text += digits + 1;
    }
    int d = shape->depth, k = shape->topk, n = shape->nodes;
    if (d < 1 || d >= SALA_MAX_PATH) return SALA__SHAPE_DEPTH;
    if (k < 1 || k > SALA_MAX_TOPK) return SALA__SHAPE_TOPK;
    if (n <= d || n > SALA_MAX_NODES) return SALA__SHAPE_NODES;
    return n > 1 + k + (d - 1) * k * k ? SALA__SHAPE_MANY : 0;
}

static void sala__shape_advice(const char *text, char *right, size_t size) {
    sala__shape s = {0, 0, 0};
    int wrong = sala__shape_read(text, &s), n = 0;
    n = snprintf(right, size, "depth,topk,nodes like 7,2,15");
    right += n, size -= (size_t)n;
    if (wrong == SALA__SHAPE_DEPTH) snprintf(right, size, " with depth 1 to %d", SALA_MAX_PATH - 1);
    if (wrong == SALA__SHAPE_TOPK) snprintf(right, size, " with topk 1 to %d", SALA_MAX_TOPK);
    if (wrong == SALA__SHAPE_NODES)
        snprintf(right, size, " with nodes (the root is one) from %d, depth + 1, to %d",
                 s.depth + 1, SALA_MAX_NODES);
    if (wrong == SALA__SHAPE_MANY)
        snprintf(right, size, "; %d levels of topk %d hold no more than %d nodes", s.depth, s.topk,
                 1 + s.topk + (s.depth - 1) * s.topk * s.topk);
}

// ---- checking ----

// Is a value right for this row? In a struct the special values 0 and NULL count too.
static int sala__value_fits(const sala__setting *e, const sala__value *v, int in_struct) {
    sala__shape shape;
    switch (e->kind) {
    case SALA__SET_SEED: return 1;
    case SALA__SET_WORD: return v->word ? sala__word_index(v->word, e->words) >= 0 : in_struct;
    case SALA__SET_TEXT: return v->word ? v->word[0] != 0 : in_struct;
    case SALA__SET_TREE: return v->word ? sala__shape_read(v->word, &shape) == 0 : in_struct;
    case SALA__SET_FLOAT: // NaN fits nothing
        if (!in_struct && (e->rules & SALA__SET_ABOVE) && v->real <= (float)e->minimum) return 0;
        return v->real >= (float)e->minimum && v->real <= (float)e->maximum;
    }
    if (in_struct && v->integer == 0) return 1;
    if (in_struct && (e->rules & SALA__SET_NEVER) && v->integer == SALA_DENSE_NEVER) return 1;
    if ((e->rules & SALA__SET_BLOCKS) && v->integer % 64 != 0) return 0;
    return v->integer >= e->minimum && v->integer <= e->maximum;
}

// A malformed value or one out of range, quoted as `shown`: what could stand there.
static int sala__bad_setting(const sala__setting *e, const char *shown, sala_error *err) {
    const char *kind = e->kind == SALA__SET_FLOAT ? "a number" : "an integer";
    const char *blocks = e->rules & SALA__SET_BLOCKS ? ", a multiple of 64" : "";
    const char *size = e->rules & SALA__SET_SIZE ? " (K, M and G are powers of 1024)" : "";
    long long low = e->minimum, high = e->maximum;
    char right[160];
    if (e->kind == SALA__SET_WORD)
        snprintf(right, sizeof right, "one of: %s", e->words);
    else if (e->kind == SALA__SET_TEXT)
        snprintf(right, sizeof right, "%s", e->words);
    else if (e->kind == SALA__SET_TREE)
        sala__shape_advice(shown, right, sizeof right);
    else if (e->kind == SALA__SET_FLAG)
        snprintf(right, sizeof right, "0 or 1");
    else if (e->kind == SALA__SET_SEED)
        snprintf(right, sizeof right, "an integer from 0 to 18446744073709551615");
    else if (e->rules & SALA__SET_ABOVE)
        snprintf(right, sizeof right, "%s above %lld, at most %lld", kind, low, high);
    else
        snprintf(right, sizeof right, "%s, at least %lld and at most %lld%s%s", kind, low, high,
                 blocks, size);
    return sala__fail(err, SALA_E_ARGUMENT, "%s is \"%.64s\"; it must be %s", e->name, shown,
                      right);
}

// Check the fields of a struct that a program filled in.
static int sala__check_table(const sala__setting *table, int rows, const void *base,
                             sala_error *err) {
    for (const sala__setting *e = table; e < table + rows; e++) {
        const void *at = (const char *)base + e->offset;
        sala__value v = {0, 0, NULL};
        char shown[40];
        if (e->kind >= SALA__SET_WORD)
            v.word = *(const char *const *)at;
        else if (e->kind == SALA__SET_FLOAT)
            v.real = *(const float *)at;
        else
            v.integer = e->kind == SALA__SET_LONG ? *(const int64_t *)at : *(const int *)at;
        if (sala__value_fits(e, &v, 1)) continue;
        if (e->kind == SALA__SET_FLOAT)
            snprintf(shown, sizeof shown, "%g", (double)v.real);
        else
            snprintf(shown, sizeof shown, "%lld", (long long)v.integer);
        return sala__bad_setting(e, v.word ? v.word : shown, err);
    }
    return 0;
}

// ---- by name ----

// Levenshtein's distance, where '_' stands for '-'; names longer than 32 are far from everything.
static int sala__name_distance(const char *a, const char *b) {
    int row[33], n = (int)strlen(a);
    if (n > 32 || strlen(b) > 32) return 100;
    for (int i = 0; i <= n; i++) row[i] = i;
    for (int j = 0; b[j]; j++) {
        int diagonal = row[0];
        row[0] = j + 1;
        for (int i = 1; i <= n; i++) {
            int change = diagonal + (a[i - 1] != (b[j] == '_' ? '-' : b[j]));
            int shorter = (row[i] < row[i - 1] ? row[i] : row[i - 1]) + 1;
            diagonal = row[i];
            row[i] = change < shorter ? change : shorter;
        }
    }
    return row[n];
}

// Read `text` into the field that the row describes. The struct changes only on success.
static int sala__set(const sala__setting *e, void *base, const char *text, sala_error *err) {
    void *at = (char *)base + e->offset;
    sala__value v = {0, 0, NULL};
    int malformed = 0;
    if (!text && e->kind == SALA__SET_FLAG) text = "1";
    if (!text) return sala__fail(err, SALA_E_ARGUMENT, "%s needs a value", e->name);
    switch (e->kind) {
    case SALA__SET_WORD:
    case SALA__SET_TEXT:
    case SALA__SET_TREE: v.word = text; break;
    case SALA__SET_FLOAT: v.real = sala__read_number(text); break;
    case SALA__SET_FLAG: // an unknown word gives -1, which does not fit
        v.integer = sala__word_index(text, "0 1 false true off on no yes") % 2;
        break;
    default: malformed = sala__read_integer(e, text, &v.integer);
    }
    if (malformed || !sala__value_fits(e, &v, 0)) return sala__bad_setting(e, text, err);
    if ((e->rules & SALA__SET_NEVER) && v.integer == 0) v.integer = SALA_DENSE_NEVER;
    switch (e->kind) {
    case SALA__SET_WORD:
    case SALA__SET_TEXT:
    case SALA__SET_TREE: *(const char **)at = v.word; break;
    case SALA__SET_FLOAT: *(float *)at = v.real; break;
    case SALA__SET_SEED:
    case SALA__SET_LONG: *(int64_t *)at = v.integer; break;
    default: *(int *)at = (int)v.integer;
    }
    return 0;
}

static int sala__set_by_name(const sala__setting *table, int rows, const char *what, void *base,
                             const char *name, const char *value, sala_error *err) {
    int best = 100, at = 0;
    if (err) memset(err, 0, sizeof *err);
    if (!base || !name)
        return sala__fail(err, SALA_E_ARGUMENT, "setting a %s needs a struct and a name", what);
    for (int i = 0; i < rows; i++) {
        int d = sala__name_distance(table[i].name, name);
        if (d < best) best = d, at = i;
    }
    if (best == 0) return sala__set(&table[at], base, value, err);
    if (best <= 1 + (int)strlen(table[at].name) / 3)
        return sala__fail(err, SALA_E_ARGUMENT, "unknown %s \"%.64s\"; did you mean \"%s\"?", what,
                          name, table[at].name);
    char known[512];
    int used = 0;
    for (int i = 0; i < rows && used < (int)sizeof known; i++)
        used += snprintf(known + used, sizeof known - (size_t)used, " %s", table[i].name);
    return sala__fail(err, SALA_E_ARGUMENT, "unknown %s \"%.64s\"; known are%s", what, name, known);
}

SALA_API int sala_set_option(sala_options *options, const char *name, const char *value,
                             sala_error *error) {
    return sala__set_by_name(sala__option_table, SALA__ROWS(sala__option_table), "option", options,
                             name, value, error);
}

SALA_API int sala_set_request(sala_request *request, const char *name, const char *value,
                              sala_error *error) {
    return sala__set_by_name(sala__request_table, SALA__ROWS(sala__request_table), "request field",
                             request, name, value, error);
}

// ---- whole structs ----

static int sala__check_options(const sala_options *o, sala_error *err) {
    return sala__check_table(sala__option_table, SALA__ROWS(sala__option_table), o, err);
}

// An array of a request: its count must not be negative or above `most`, and with a count it must
// be there.
static int sala__check_array(const char *name, const char *count_name, const void *array,
                             int64_t count, int64_t most, sala_error *err) {
    if (count < 0 || count > most)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "%s is %lld; it must be at least 0 and at most %lld", count_name,
                          (long long)count, (long long)most);
    if (count > 0 && !array)
        return sala__fail(err, SALA_E_ARGUMENT, "%s is NULL, but %s is %lld", name, count_name,
                          (long long)count);
    return 0;
}

// What the sampler reads, without what depends on the vocabulary.
static int sala__check_sampling(const sala_request *r, sala_error *err) {
    int code = sala__check_table(sala__request_table, SALA__ROWS(sala__request_table), r, err);
    if (code == 0)
        code = sala__check_array("biases", "bias_count", r->biases, r->bias_count, INT32_MAX, err);
    for (int i = 0; code == 0 && i < r->bias_count; i++)
        if (!(r->biases[i].bias < INFINITY)) // NaN too; -infinity is the way to forbid a token
            code = sala__fail(err, SALA_E_ARGUMENT,
                              "biases: the bias of token %d is %g; it must be finite or -infinity",
                              (int)r->biases[i].token, (double)r->biases[i].bias);
    return code;
}

#define SALA__STOP_STRINGS 64
#define SALA__STOP_BYTES 1000
#define SALA__STOP_TOKENS 1024

// Everything in a request that can be judged without the model.
static int sala__check_request_fields(const sala_request *r, sala_error *err) {
    const struct {
        const char *name, *count_name;
        const void *array;
        int64_t count, most;
    } arrays[] = {
        {"tokens", "token_count", r->tokens, r->token_count, 1 << 30},
        {"force", "force_count", r->force, r->force_count, 1 << 30},
        {"guess", "guess_count", r->guess, r->guess_count, 1 << 30},
        {"stop", "stop_count", r->stop, r->stop_count, SALA__STOP_STRINGS},
        {"stop_tokens", "stop_token_count", r->stop_tokens, r->stop_token_count, SALA__STOP_TOKENS},
    };
    int code = sala__check_sampling(r, err);
    for (int i = 0; i < 5 && code == 0; i++)
        code = sala__check_array(arrays[i].name, arrays[i].count_name, arrays[i].array,
                                 arrays[i].count, arrays[i].most, err);
    if (code < 0) return code;
    if (r->text_bytes > 0 && !r->text)
        return sala__fail(err, SALA_E_ARGUMENT, "text is NULL, but text_bytes is %zu",
                          r->text_bytes);
    if (r->token_count > 0 && r->text)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "the request has both tokens and text; give one of them");
    if (r->token_count == 0 && !r->text && r->sequence == 0) // a kept sequence can just go on
        return sala__fail(err, SALA_E_ARGUMENT, "the request has no prompt; give tokens or text");
    for (int i = 0; i < r->stop_count; i++) {
        if (!r->stop[i] || !r->stop[i][0])
            return sala__fail(err, SALA_E_ARGUMENT, "stop string %d is %s", i,
                              r->stop[i] ? "empty" : "NULL");
        if (strlen(r->stop[i]) > SALA__STOP_BYTES)
            return sala__fail(err, SALA_E_ARGUMENT, "stop string %d is longer than %d bytes", i,
                              SALA__STOP_BYTES);
    }
    return 0;
}
/* ------------------------------------------------------------------------------------------------
   [6] SAMPLER: from one row of logits to one token

   The token is a function of the request, the tokens before it, the row of logits and the position
   alone: not of the place in a batch, the thread or the number of tokens drawn so far. Speculation
   rests on that: a verify row draws the token that plain decoding would draw (speculation by "draw,
   then match"), so it can only change the speed. The steps, in this order:

   1. bias        logit += bias of the token; -infinity forbids it.
   2. repetition  over prompt and output (Hugging Face's rule): l > 0 ? l / penalty : l * penalty.
   3. presence, frequency  over the output (OpenAI's rule): l -= presence + count * frequency where
      count > 0. Tokens of the tree path above a verify row count as output, for this call alone.
   4. temperature 0: the largest logit, of equal ones the lowest id. Nothing below is then used.
   5. weights     w = exp((l - largest) / temperature), rounded to a multiple of 2^-30 and held as
      an integer. Integer sums are exact, so no order of summation, vector width or thread count can
      change a decision, and a draw cannot land beyond the sum. The price: a token 2^31 times less
      likely than the best is never drawn (an FP32 running sum loses tokens from 2^24 on). exp is
      our own, without fma and without libm, so that every compiler and machine agrees on its bits.
   6. min-p, then top-k, then top-p (vLLM's order). All three keep a head of ONE ranking: larger
      logit first, of equal logits the lower id. min-p keeps w >= min_p * largest w, decided on
      logits; top-k the first k; top-p the shortest head that holds top_p of the weight that min-p
      and top-k left.
   7. draw        inverse CDF over the kept tokens in ascending id, with the random number of (seed,
      position): Philox4x32-10 (Salmon et al., SC 2011), key = seed, counter = position. It needs no
      state, and a GPU computes the same one.

   A row that holds NaN or +infinity, or nothing but -infinity, gives -1: an error, never a token.
   Reported log-probabilities are those of the raw logits, before step 1.
   ------------------------------------------------------------------------------------------------ */

typedef struct sala__sampler {
    int32_t vocab;
    float temperature;
    int32_t top_k;    // 0: all
    float top_p;      // 1: all
    float min_p_log;  // smallest (l - largest) / temperature that min-p keeps; -infinity: all
    float repetition; // 1: none
    float presence, frequency;
    uint64_t seed;
    int32_t logprobs; // 0: none; n: of the token and of the n best
    float *biases;    // [vocab] infinity: the token has none; NULL: no token has one
    int32_t *counts;  // [vocab] 2 * times in the output + 1 if in the prompt; NULL: no penalties
} sala__sampler;

static void sala__sampler_free(const sala__env *env, sala__sampler *s) {
    sala__release(env, s->biases);
    sala__release(env, s->counts);
    memset(s, 0, sizeof *s);
}

static int sala__sampler_biases(const sala__env *env, const sala_request *r, sala__sampler *s,
                                sala_error *err) {
    s->biases = (float *)sala__alloc(env, (size_t)s->vocab, sizeof(float), "logit biases", err);
    if (!s->biases) return SALA_E_MEMORY;
    for (int32_t t = 0; t < s->vocab; t++) s->biases[t] = INFINITY;
    for (int i = 0; i < r->bias_count; i++) {
        int32_t token = r->biases[i].token;
        if (token < 0 || token >= s->vocab)
            return sala__fail(err, SALA_E_ARGUMENT,
                              "biases: token %d is not in the vocabulary of %d tokens", (int)token,
                              (int)s->vocab);
        if (s->biases[token] < INFINITY)
            return sala__fail(err, SALA_E_ARGUMENT, "biases: token %d appears twice", (int)token);
        s->biases[token] = r->biases[i].bias;
    }
    return 0;
}

// Take the sampling fields of a request. On error nothing is left to free.
static int sala__sampler_init(const sala__env *env, const sala_request *r, int32_t vocab,
                              sala__sampler *s, sala_error *err) {
    memset(s, 0, sizeof *s);
    if (vocab < 1)
        return sala__fail(err, SALA_E_ARGUMENT, "a vocabulary of %d tokens cannot be sampled",
                          (int)vocab);
    int code = sala__check_sampling(r, err);
    if (code < 0) return code;
    s->vocab = vocab;
    s->temperature = r->temperature;
    s->top_k = r->top_k;
    s->top_p = r->top_p > 0 ? r->top_p : 1.0f;
    // In double, so that rounding to float hides the last bit of this machine's logarithm.
    s->min_p_log = r->min_p > 0 ? (float)log((double)r->min_p) : -INFINITY;
    s->repetition = r->repetition_penalty > 0 ? r->repetition_penalty : 1.0f;
    s->presence = r->presence_penalty;
    s->frequency = r->frequency_penalty;
    s->seed = r->seed;
    s->logprobs = r->logprobs;
    if (r->bias_count > 0) code = sala__sampler_biases(env, r, s, err);
    if (code == 0 && (s->repetition != 1.0f || s->presence != 0 || s->frequency != 0)) {
        s->counts = (int32_t *)sala__alloc(env, (size_t)vocab, sizeof(int32_t), "counts", err);
        if (!s->counts) code = SALA_E_MEMORY;
    }
    if (code < 0) sala__sampler_free(env, s);
    return code;
}

// Count a token of the prompt (is_output 0) or of the output (1). Costs nothing without penalties.
static void sala__sampler_note(sala__sampler *s, int32_t token, int is_output) {
    if (!s->counts || token < 0 || token >= s->vocab) return;
    if (is_output)
        s->counts[token] += 2;
    else
        s->counts[token] |= 1;
}

// ---- the steps ----

// The token of the largest value, of equal ones the lowest id; -1 when a value is NaN or +infinity
// or all are -infinity. Compilers vectorise an integer maximum, but not one of floats.
static int32_t sala__sampler_argmax(const float *x, int32_t vocab) {
    const int32_t low = sala_float_order(-INFINITY), high = sala_float_order(INFINITY);
    int32_t most = low, least = high, token = vocab;
    for (int32_t t = 0; t < vocab; t++) {
        int32_t k = sala_float_order(x[t]);
        most = k > most ? k : most;
        least = k < least ? k : least;
    }
    if (most == low || most >= high || least < low) return -1;
    for (int32_t t = 0; t < vocab; t++) {
        int32_t candidate = sala_float_order(x[t]) == most ? t : vocab;
        token = candidate < token ? candidate : token;
    }
    return token;
}

// Steps 1 to 3 for one token, whose count is `count` (see sala__sampler.counts).
static inline float sala__adjust(const sala__sampler *s, float x, int32_t token, int32_t count) {
    return sala_adjust(x, s->biases ? s->biases[token] : INFINITY, count, s->repetition,
                       s->presence, s->frequency);
}

static void sala__sampler_adjust(const sala__sampler *s, const float *logits, const int32_t *path,
                                 int path_count, float *out) {
    for (int32_t t = 0; t < s->vocab; t++)
        out[t] = sala__adjust(s, logits[t], t, s->counts ? s->counts[t] : 0);
    if (!s->counts) return;
    for (int i = 0; i < path_count; i++) { // again from the raw logit, with its times in the path
        int32_t t = path[i], times = 0;
        if (t < 0 || t >= s->vocab) continue;
        for (int j = 0; j < path_count; j++) times += path[j] == t;
        out[t] = sala__adjust(s, logits[t], t, s->counts[t] + 2 * times);
    }
}

// Step 5, with min-p: weight[t] in units of 2^-30, 0 where min-p drops the token. Returns the sum.
static uint64_t sala__sampler_weigh(const sala__sampler *s, const float *x, float largest,
                                    int32_t *weight) {
    // Copies: as far as a compiler knows, `weight` could be a part of the sampler.
    const float temperature = s->temperature, min_p_log = s->min_p_log;
    const int32_t vocab = s->vocab;
    uint64_t sum = 0;
    for (int32_t t = 0; t < vocab; t++) {
        float y = (x[t] - largest) / temperature;
        int32_t w = sala_draw_weight(y); // of all: no branch, so that it vectorises
        w = y >= min_p_log ? w : 0;
        weight[t] = w;
        sum += (uint32_t)w;
    }
    return sum;
}

// The tokens with weight and x >= floor_x, ascending. Returns how many.
static int32_t sala__sampler_gather(const float *x, const int32_t *weight, int32_t vocab,
                                    float floor_x, int32_t *list) {
    int32_t n = 0;
    for (int32_t t = 0; t < vocab; t++) {
        list[n] = t; // no branch: it could not be predicted
        n += x[t] >= floor_x && weight[t] != 0;
    }
    return n;
}

static uint64_t sala__sampler_sum(const int32_t *weight, const int32_t *list, int32_t n) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (uint32_t)weight[list[i]];
    return sum;
}

static inline uint32_t sala__sampler_key(float x) { // larger for larger x
    return (uint32_t)sala_float_order(x) ^ 0x80000000u;
}

// Shorten the list (ascending ids) to the shortest head of the ranking that has `count` tokens or
// the weight `need`, whichever comes first; both are at least 1 and not more than there is, but for
// one that plays no part. A radix selection, eight bits of the logits' order at a time: linear in n
// whatever the values are.
static int32_t sala__sampler_cut(const float *x, const int32_t *weight, int32_t *list, int32_t n,
                                 int64_t count, uint64_t need) {
    uint32_t cut = 0, mask = 0; // the upper digits of the last kept value
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t numbers[256] = {0};
        uint64_t sums[256] = {0};
        for (int32_t i = 0; i < n; i++) {
            uint32_t key = sala__sampler_key(x[list[i]]);
            if ((key & mask) != cut) continue;
            numbers[key >> shift & 255]++;
            sums[key >> shift & 255] += (uint32_t)weight[list[i]];
        }
        uint32_t digit = 255;
        for (; digit > 0 && numbers[digit] < count && sums[digit] < need; digit--) {
            count -= numbers[digit];
            need -= sums[digit];
        }
        cut |= digit << shift;
        mask |= 255u << shift;
    }
    // What `count` and `need` still ask for comes from the tokens at the cut, lowest ids first.
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t key = sala__sampler_key(x[list[i]]);
        uint64_t w = (uint32_t)weight[list[i]];
        int at_cut = key == cut && count > 0 && need > 0;
        list[kept] = list[i]; // no branch, as above
        kept += key > cut || at_cut;
        count -= at_cut;
        if (at_cut) need -= w < need ? w : need;
    }
    return kept;
}

// Steps 5 and 6: the kept tokens in `list`, ascending. Returns how many (at least 1), *sum their
// weight.
static int32_t sala__sampler_keep(const sala__sampler *s, const float *x, float largest,
                                  int32_t *weight, int32_t *list, uint64_t *sum) {
    uint64_t total = sala__sampler_weigh(s, x, largest, weight);
    double share = (double)s->top_p;
    int cut = s->top_k > 0 || share < 1;
    // A cut nearly always lies near the best token: those within a factor e^8 are tried first.
    float near = cut ? largest - 8 * s->temperature : -INFINITY;
    int32_t n = sala__sampler_gather(x, weight, s->vocab, near, list);
    if (s->top_k > 0 ? n < s->top_k
                     : (double)sala__sampler_sum(weight, list, n) < share * (double)total)
        n = sala__sampler_gather(x, weight, s->vocab, -INFINITY, list);
    if (s->top_k > 0 && n > s->top_k)
        n = sala__sampler_cut(x, weight, list, n, s->top_k, UINT64_MAX);
    *sum = sala__sampler_sum(weight, list, n);
    if (share >= 1) return n;
    uint64_t need = sala_top_p_need(s->top_p, s->top_k > 0 ? *sum : total, *sum);
    n = sala__sampler_cut(x, weight, list, n, n, need);
    *sum = sala__sampler_sum(weight, list, n);
    return n;
}

// Log-probabilities of the raw logits: of the chosen token, and of the s->logprobs best, best
// first. Tokens of probability 0 are not listed.
static void sala__sampler_report(const sala__sampler *s, const float *logits, float largest,
                                 int32_t token, float *logprob, sala_logprob *top, int *top_count) {
    const int32_t vocab = s->vocab;
    double sum = 0;
    for (int32_t t = 0; t < vocab; t++) sum += (double)sala_exp_negative(logits[t] - largest);
    double log_sum = log(sum);
    *logprob = (float)((double)logits[token] - (double)largest - log_sum);
    int n = 0;
    float last = -INFINITY; // what a token must exceed to be listed
    for (int32_t t = 0; t < vocab; t++) {
        if (!(logits[t] > last)) continue;
        int at = n < s->logprobs ? n++ : n - 1;
        for (; at > 0 && top[at - 1].logprob < logits[t]; at--) top[at] = top[at - 1];
        top[at].token = t;
        top[at].logprob = logits[t];
        if (n == s->logprobs) last = top[n - 1].logprob;
    }
    for (int i = 0; i < n; i++)
        top[i].logprob = (float)((double)top[i].logprob - (double)largest - log_sum);
    *top_count = n;
}

// Bytes of scratch that one call of sala__sample needs, aligned for float.
static size_t sala__sampler_scratch(int32_t vocab) {
    return (size_t)vocab * 3 * sizeof(float);
}

// Choose the token of `position` (absolute: its own place in the sequence). `path` are the tokens
// before it that the sampler has not been told of (a verify row's ancestors), counted as output.
// Returns -1 when the logits are unusable. `logprob`, `top` [s->logprobs] and `top_count` are
// filled when the request wants log-probabilities, else set to 0; they may be NULL then.
static int32_t sala__sample(const sala__sampler *s, const float *logits, int64_t position,
                            const int32_t *path, int path_count, void *scratch, float *logprob,
                            sala_logprob *top, int *top_count) {
    float *adjusted = (float *)scratch;                 // [vocab]
    int32_t *weight = (int32_t *)(adjusted + s->vocab); // [vocab]
    int32_t *list = weight + s->vocab;                  // [vocab]
    if (logprob) *logprob = 0;
    if (top_count) *top_count = 0;
    int32_t likeliest = sala__sampler_argmax(logits, s->vocab), token = likeliest;
    if (likeliest < 0) return -1;
    const float *x = logits;
    if (s->biases || s->counts) {
        sala__sampler_adjust(s, logits, path, path_count, adjusted);
        x = adjusted;
        token = sala__sampler_argmax(x, s->vocab);
        if (token < 0) return -1;
    }
    if (s->temperature > 0) {
        uint64_t sum;
        int32_t n = sala__sampler_keep(s, x, x[token], weight, list, &sum), i = 0;
        uint64_t at = sala_scale_random(sala_random(s->seed, (uint64_t)position), sum);
        while (i < n - 1 && at >= (uint32_t)weight[list[i]]) at -= (uint32_t)weight[list[i++]];
        token = list[i];
    }
    if (s->logprobs > 0)
        sala__sampler_report(s, logits, logits[likeliest], token, logprob, top, top_count);
    return token;
}
/* ------------------------------------------------------------------------------------------------
   [7] CPU BACK END

   One plain C body per operation. Together they are the definition of what a device kernel must
   compute; they are also fast enough to be used.

   SIMD. Vectors are a GCC and Clang type: sala__vec has the width of the machine, sala__v16 always
   16 FP32 lanes, in one AVX-512 register, two of AVX, four of SSE or NEON. +, -, * and / on them
   are IEEE operations of each lane. What the type cannot say is "multiply and add with one
   rounding": sala__fma_vec has intrinsics. So have two other places, for speed alone. So every
   machine computes the same bits. (GCC keeps a sala__v16 in memory where registers are narrower:
   correct but slow, so the matrix products are written with sala__vec.)

   THREADS. An operation is a number of items; threads take items from a shared counter. What an
   item computes depends on the item alone, and no two items write the same place. So neither the
   number of threads nor who took which item can change a bit.
   --------------------------------------------------------------------------------------------- */

#include <signal.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

// Vectors of 64 bytes are passed by value, but only between functions that are inlined, so it does
// not matter that -mavx512f changes how that is done.
#pragma GCC diagnostic ignored "-Wpsabi" // to the end: GCC gives it where the file ends

#define SALA__INLINE static inline __attribute__((always_inline, unused))

// Before a loop of few steps over arrays that are to be registers: unroll all of it. Clang does so
// by itself, and less well when it is told to.
#ifdef __clang__
#define SALA__UNROLL
#else
#define SALA__UNROLL _Pragma("GCC unroll 16")
#endif

// ---- vectors of the machine's own width ----

#if defined(__AVX512F__)
#define SALA__VEC 16
#elif defined(__AVX__)
#define SALA__VEC 8
#else
#define SALA__VEC 4
#endif

typedef float sala__vec __attribute__((vector_size(4 * SALA__VEC)));
typedef uint32_t sala__vec_bits __attribute__((vector_size(4 * SALA__VEC)));
typedef uint16_t sala__vec_half __attribute__((vector_size(2 * SALA__VEC)));
// The same in memory: at any address that suits an element, and under any other type.
typedef float sala__vec_memory __attribute__((vector_size(4 * SALA__VEC), aligned(4), may_alias));
typedef uint16_t sala__vec_half_memory
    __attribute__((vector_size(2 * SALA__VEC), aligned(2), may_alias));

SALA__INLINE sala__vec sala__set_vec(float x) {
#if defined(__AVX512F__) // one instruction; GCC makes sixteen of the loop
    return (sala__vec)_mm512_set1_ps(x);
#else
    sala__vec v;
    for (int i = 0; i < SALA__VEC; i++) v[i] = x;
    return v;
#endif
}

SALA__INLINE sala__vec sala__load_vec(const float *p) {
    return *(const sala__vec_memory *)p;
}

SALA__INLINE void sala__store_vec(float *p, sala__vec v) {
    *(sala__vec_memory *)p = v;
}

// a * b + c, rounded once.
SALA__INLINE sala__vec sala__fma_vec(sala__vec a, sala__vec b, sala__vec c) {
#if defined(__AVX512F__)
    return (sala__vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (sala__vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (sala__vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < SALA__VEC; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Numbers of 16 bits, each with zeros above it.
SALA__INLINE sala__vec_bits sala__widen_vec(const void *p) {
#if defined(__AVX512F__) // One instruction; GCC makes five of the other form.
    // "maskz": GCC's plain intrinsic takes an undefined register along and warns of it in C++.
    return (sala__vec_bits)_mm512_maskz_cvtepu16_epi32(0xFFFF,
                                                       _mm256_loadu_si256((const __m256i *)p));
#else
    return __builtin_convertvector(*(const sala__vec_half_memory *)p, sala__vec_bits);
#endif
}

SALA__INLINE int sala__weight_size(int32_t format) { // bytes
    return format == SALA_F32 ? 4 : 2;
}

SALA__INLINE sala__vec sala__choose_vec(sala__vec_bits mask, sala__vec_bits yes,
                                        sala__vec_bits no) {
    return (sala__vec)((mask & yes) | (~mask & no));
}

SALA__INLINE sala__vec sala__load_weight_vec(const void *p, int32_t format) {
    if (format == SALA_F32) return sala__load_vec((const float *)p);
    sala__vec_bits u = sala__widen_vec(p);
    if (format == SALA_BF16) return (sala__vec)(u << 16);
    sala__vec_bits magnitude = (u & 0x7FFFu) << 13, sign = (u & 0x8000u) << 16; // as sala_f16_f32
    sala__vec_bits finite = (sala__vec_bits)((sala__vec)magnitude * sala__set_vec(0x1p112f));
    sala__vec_bits large = (sala__vec_bits)(magnitude >= 0x0F800000u); // Inf, NaN
    return sala__choose_vec(large, sign | magnitude | 0x70000000u, sign | finite);
}

#ifdef SALA_ACT_FP32
SALA__INLINE sala__vec sala__load_act_vec(const sala_act *p) {
    return sala__load_vec(p);
}

SALA__INLINE void sala__store_act_vec(sala_act *p, sala__vec v) {
    sala__store_vec(p, v);
}
#else
SALA__INLINE sala__vec sala__load_act_vec(const sala_act *p) {
    return (sala__vec)(sala__widen_vec(p) << 16);
}

SALA__INLINE void sala__store_act_vec(sala_act *p, sala__vec v) { // as sala_f32_bf16
    sala__vec_bits u = (sala__vec_bits)v;
    sala__vec_bits nan = (sala__vec_bits)((u & 0x7FFFFFFFu) > 0x7F800000u);
    sala__vec_bits rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
    *(sala__vec_half_memory *)p =
        __builtin_convertvector((nan & quiet) | (~nan & rounded), sala__vec_half);
}
#endif

// ---- 16 lanes ----

typedef float sala__v16 __attribute__((vector_size(64)));
typedef uint32_t sala__v16_bits __attribute__((vector_size(64)));
typedef float sala__v16_memory __attribute__((vector_size(64), aligned(4), may_alias));
typedef float sala__v8_memory __attribute__((vector_size(32), aligned(4), may_alias));
typedef float sala__v4 __attribute__((vector_size(16)));
typedef float sala__v4_memory __attribute__((vector_size(16), aligned(4), may_alias));

SALA__INLINE sala__v16 sala__set16(float x) {
    sala__v16 v = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
    return v;
}

SALA__INLINE sala__v16 sala__load16(const float *p) {
    return *(const sala__v16_memory *)p;
}

SALA__INLINE void sala__store16(float *p, sala__v16 v) {
    *(sala__v16_memory *)p = v;
}

#if SALA__VEC == 16
SALA__INLINE sala__v16 sala__load_weight16(const void *data, int32_t format, size_t index) {
    const char *at = (const char *)data + index * (size_t)sala__weight_size(format);
    return sala__load_weight_vec(at, format);
}

SALA__INLINE sala__v16 sala__load_act16(const sala_act *p) {
    return sala__load_act_vec(p);
}

SALA__INLINE void sala__store_act16(sala_act *p, sala__v16 v) {
    sala__store_act_vec(p, v);
}

SALA__INLINE sala__v16 sala__fma16(sala__v16 a, sala__v16 b, sala__v16 c) {
    return sala__fma_vec(a, b, c);
}
#else // in pieces of the machine's width
SALA__INLINE sala__v16 sala__load_weight16(const void *data, int32_t format, size_t index) {
    float out[16];
    int size = sala__weight_size(format);
    const char *at = (const char *)data + index * (size_t)size;
    for (int i = 0; i < 16; i += SALA__VEC)
        sala__store_vec(out + i, sala__load_weight_vec(at + i * size, format));
    return sala__load16(out);
}

SALA__INLINE sala__v16 sala__load_act16(const sala_act *p) {
    float out[16];
    for (int i = 0; i < 16; i += SALA__VEC) sala__store_vec(out + i, sala__load_act_vec(p + i));
    return sala__load16(out);
}

SALA__INLINE void sala__store_act16(sala_act *p, sala__v16 v) {
    for (int i = 0; i < 16; i += SALA__VEC)
        sala__store_act_vec(p + i, sala__load_vec((const float *)&v + i));
}

SALA__INLINE sala__v16 sala__fma16(sala__v16 a, sala__v16 b, sala__v16 c) {
    float *to = (float *)&c;
    for (int i = 0; i < 16; i += SALA__VEC) {
        sala__vec x = sala__load_vec((const float *)&a + i),
                  y = sala__load_vec((const float *)&b + i);
        sala__store_vec(to + i, sala__fma_vec(x, y, sala__load_vec(to + i)));
    }
    return c;
}
#endif

// The fixed tree of a sum of 16 lanes: lanes i and i + 8, then i + 4, i + 2, i + 1.
SALA__INLINE float sala__sum16(sala__v16 v) {
    float lane[16];
    sala__store16(lane, v);
    const sala__v8_memory *half = (const sala__v8_memory *)lane;
    *(sala__v8_memory *)lane = half[0] + half[1];
    const sala__v4_memory *quarter = (const sala__v4_memory *)lane;
    sala__v4 four = quarter[0] + quarter[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

SALA__INLINE float sala__max16(sala__v16 v) { // of numbers: a NaN may get lost
    float m[16];
    sala__store16(m, v);
    for (int i = 0; i < 8; i++) m[i] = m[i] > m[i + 8] ? m[i] : m[i + 8];
    for (int i = 0; i < 4; i++) m[i] = m[i] > m[i + 4] ? m[i] : m[i + 4];
    for (int i = 0; i < 2; i++) m[i] = m[i] > m[i + 2] ? m[i] : m[i + 2];
    return m[0] > m[1] ? m[0] : m[1];
}

SALA__INLINE sala__v16 sala__choose16(sala__v16_bits mask, sala__v16 yes, sala__v16 no) {
    return (sala__v16)((mask & (sala__v16_bits)yes) | (~mask & (sala__v16_bits)no));
}

// e^x within 1 ulp: 2^n * e^r with n = round(x / ln 2), a polynomial for e^r, |r| <= ln(2) / 2.
// Subnormal results are rounded, not flushed. Below -104 it is 0, above 88.73 infinity. NaN stays.
SALA__INLINE sala__v16 sala__exp16(sala__v16 x) {
    const float round = 0x1.8p23f; // added, it leaves the nearest integer in the low bits
    x = sala__choose16((sala__v16_bits)(x < -104.0f), sala__set16(-104.0f), x);
    x = sala__choose16((sala__v16_bits)(x > 89.0f), sala__set16(89.0f), x);
    sala__v16 shifted = sala__fma16(x, sala__set16(1.44269504f), sala__set16(round));
    sala__v16 n = shifted - sala__set16(round);
    // x - n ln 2, with ln 2 in two parts: n times the first is exact.
    sala__v16 r = sala__fma16(n, sala__set16(-0x1.62e400p-1f), x);
    r = sala__fma16(n, sala__set16(-0x1.7f7d1cp-20f), r);
    sala__v16 p = sala__set16(1.9875691500e-4f);
    p = sala__fma16(p, r, sala__set16(1.3981999507e-3f));
    p = sala__fma16(p, r, sala__set16(8.3334519073e-3f));
    p = sala__fma16(p, r, sala__set16(4.1665795894e-2f));
    p = sala__fma16(p, r, sala__set16(1.6666665459e-1f));
    p = sala__fma16(p, r, sala__set16(5.0000001201e-1f));
    p = sala__fma16(p, r * r, r);
    p = p + sala__set16(1.0f);
    // 2^n as two factors, so that n may be -150 or 128.
    sala__v16_bits e = (sala__v16_bits)shifted - (sala_f32_bits(round) - 256u), half = e >> 1;
    sala__v16 low = (sala__v16)((half - 1u) << 23), high = (sala__v16)((e - half - 1u) << 23);
    return p * low * high;
}

SALA__INLINE sala__v16 sala__sigmoid16(sala__v16 x) { // 1 / (1 + e^-x)
    return sala__set16(1.0f) / (sala__set16(1.0f) + sala__exp16(-x));
}

SALA__INLINE sala__v16 sala__silu16(sala__v16 x) { // x * sigmoid(x)
    return x / (sala__set16(1.0f) + sala__exp16(-x));
}

// ---- threads ----
// A pool of threads - 1 threads; the caller's is thread 0. A decode step starts some hundreds of
// jobs a few microseconds apart, so threads without work spin for a while before they sleep.
//
// `state` holds the number of the job, whether it is open, and how many workers are in it. A worker
// enters an open job by counting itself in; the caller closes the job when no item is left and
// waits for those inside. A worker that wakes up too late finds the job closed: nobody waits for
// threads that the system keeps waiting.

#define SALA__MAX_THREADS 256
#define SALA__OPEN 0x8000u // in state; below it the workers inside, above it the job's number
#define SALA__SPIN_SECONDS 50e-6

typedef void (*sala__body)(void *context, int64_t item, int thread);

typedef struct sala__cpu sala__cpu;

typedef struct sala__worker {
    sala__cpu *cpu;
    pthread_t handle;
    int thread;
} sala__worker;

struct sala__cpu { // not to be moved or copied while open
    sala__env env;
    int threads, processors;
    int started;                             // workers that run: threads - 1 once open
    sala__worker *workers;                   // [threads - 1]
    unsigned char *scratch_memory, *scratch; // [threads, scratch_stride]
    size_t scratch_stride;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    // the job
    sala__body body;
    void *context;
    int64_t items, grain;
    char apart0[64]; // what threads write often does not share a cache line
    uint64_t state;
    char apart1[64];
    int64_t next;
    char apart2[64];
    int sleepers, stop;
};

static void sala__pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sala__take_items(sala__cpu *cpu, int thread) {
    sala__body body = cpu->body;
    void *context = cpu->context;
    int64_t items = cpu->items, grain = cpu->grain;
    for (;;) {
        int64_t from = __atomic_fetch_add(&cpu->next, grain, __ATOMIC_RELAXED);
        if (from >= items) break;
        int64_t to = items - from < grain ? items : from + grain;
        for (int64_t i = from; i < to; i++) body(context, i, thread);
    }
}

// Wait for a job after number `seen`. Returns the state, or 0 when the pool closes.
static uint64_t sala__await_job(sala__cpu *cpu, uint64_t seen) {
    double until = 0;
    for (unsigned spins = 0;; spins++) {
        uint64_t state = __atomic_load_n(&cpu->state, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&cpu->stop, __ATOMIC_ACQUIRE)) return 0;
        if ((state & SALA__OPEN) && state >> 16 != seen) return state;
        sala__pause();
        if (spins % 64 != 63) continue;
        if (cpu->threads > cpu->processors) sched_yield();
        double now = sala__now();
        if (until == 0) until = now + SALA__SPIN_SECONDS;
        if (now < until) continue;
        pthread_mutex_lock(&cpu->mutex);
        __atomic_fetch_add(&cpu->sleepers, 1, __ATOMIC_SEQ_CST);
        for (;;) {
            state = __atomic_load_n(&cpu->state, __ATOMIC_SEQ_CST);
            if (((state & SALA__OPEN) && state >> 16 != seen) ||
                __atomic_load_n(&cpu->stop, __ATOMIC_ACQUIRE))
                break;
            pthread_cond_wait(&cpu->wake, &cpu->mutex);
        }
        __atomic_fetch_sub(&cpu->sleepers, 1, __ATOMIC_SEQ_CST);
        pthread_mutex_unlock(&cpu->mutex);
        until = 0;
    }
}

static void *sala__worker_main(void *argument) {
    sala__worker *worker = (sala__worker *)argument;
    sala__cpu *cpu = worker->cpu;
    uint64_t seen = 0;
    for (;;) {
        uint64_t state = sala__await_job(cpu, seen);
        if (state == 0) return NULL;
        if (!__atomic_compare_exchange_n(&cpu->state, &state, state + 1, 0, __ATOMIC_ACQ_REL,
                                         __ATOMIC_RELAXED))
            continue;
        seen = state >> 16;
        sala__take_items(cpu, worker->thread);
        __atomic_fetch_sub(&cpu->state, 1, __ATOMIC_RELEASE);
    }
}

static void sala__wake_sleepers(sala__cpu *cpu) {
    if (__atomic_load_n(&cpu->sleepers, __ATOMIC_SEQ_CST) == 0) return;
    pthread_mutex_lock(&cpu->mutex);
    pthread_cond_broadcast(&cpu->wake);
    pthread_mutex_unlock(&cpu->mutex);
}

// Run body(context, i, thread) for i = 0 .. items - 1 and return when all are done. `thread`
// numbers who runs it, for scratch. A body may not start a job itself.
static void sala__parallel(sala__cpu *cpu, int64_t items, sala__body body, void *context) {
    if (items <= 1 || cpu->threads == 1) {
        for (int64_t i = 0; i < items; i++) body(context, i, 0);
        return;
    }
    cpu->body = body;
    cpu->context = context;
    cpu->items = items;
    cpu->grain = items / (16 * (int64_t)cpu->threads);
    if (cpu->grain < 1) cpu->grain = 1;
    __atomic_store_n(&cpu->next, 0, __ATOMIC_RELAXED);
    uint64_t job = (__atomic_load_n(&cpu->state, __ATOMIC_RELAXED) >> 16) + 1;
    __atomic_store_n(&cpu->state, job << 16 | SALA__OPEN, __ATOMIC_SEQ_CST);
    sala__wake_sleepers(cpu);
    sala__take_items(cpu, 0);
    uint64_t state = __atomic_and_fetch(&cpu->state, ~(uint64_t)SALA__OPEN, __ATOMIC_ACQ_REL);
    for (unsigned spins = 0; state & (SALA__OPEN - 1); spins++) {
        sala__pause();
        if (spins > 1000 || cpu->threads > cpu->processors) sched_yield();
        state = __atomic_load_n(&cpu->state, __ATOMIC_ACQUIRE);
    }
}

static void *sala__cpu_scratch(sala__cpu *cpu, int thread) { // 64-byte aligned, zeroed at open
    return cpu->scratch + (size_t)thread * cpu->scratch_stride;
}

// Processors that this process may use: its affinity mask, and the quota of its control group.
static int sala__processors(void) {
    int count = (int)sysconf(_SC_NPROCESSORS_ONLN);
#ifdef CPU_COUNT
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) count = CPU_COUNT(&set);
#endif
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file) {
        long long quota, period;
        if (fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0) {
            long long whole = (quota + period - 1) / period;
            if (whole < count) count = (int)whole;
        }
        fclose(file);
    }
    return count < 1 ? 1 : count > SALA__MAX_THREADS ? SALA__MAX_THREADS : count;
}

static void sala__cpu_close(sala__cpu *cpu) {
    if (cpu->threads == 0) return;
    __atomic_store_n(&cpu->stop, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&cpu->mutex);
    pthread_cond_broadcast(&cpu->wake);
    pthread_mutex_unlock(&cpu->mutex);
    for (int i = 0; i < cpu->started; i++) pthread_join(cpu->workers[i].handle, NULL);
    pthread_cond_destroy(&cpu->wake);
    pthread_mutex_destroy(&cpu->mutex);
    sala__release(&cpu->env, cpu->workers);
    sala__release(&cpu->env, cpu->scratch_memory);
    memset(cpu, 0, sizeof *cpu);
}

// Signals are for the threads of the host: workers are born with all of them blocked.
static int sala__cpu_start(sala__cpu *cpu, sala_error *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (int i = 0; i < cpu->threads - 1 && code == 0; i++) {
        sala__worker *worker = &cpu->workers[i];
        worker->cpu = cpu;
        worker->thread = i + 1;
        code = pthread_create(&worker->handle, NULL, sala__worker_main, worker);
        if (code == 0) cpu->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code == 0) return 0;
    return sala__fail(err, SALA_E_MEMORY,
                      "cannot start thread %d of %d: %s; set a smaller number of threads",
                      cpu->started + 2, cpu->threads, strerror(code));
}

static size_t sala__gemm_scratch(void);

// `threads` 0: one for each processor. `scratch_bytes` for each thread.
static int sala__cpu_open(const sala__env *env, int threads, size_t scratch_bytes, sala__cpu *cpu,
                          sala_error *err) {
    memset(cpu, 0, sizeof *cpu);
    cpu->env = *env;
    cpu->processors = sala__processors();
    if (threads <= 0) threads = cpu->processors;
    if (threads > SALA__MAX_THREADS)
        return sala__fail(err, SALA_E_ARGUMENT, "threads: %d is more than %d", threads,
                          SALA__MAX_THREADS);
    if (scratch_bytes < sala__gemm_scratch()) scratch_bytes = sala__gemm_scratch();
    if (scratch_bytes > SIZE_MAX / 2 / SALA__MAX_THREADS)
        return sala__fail(err, SALA_E_MEMORY, "out of memory: %zu bytes of scratch for each thread",
                          scratch_bytes);
    cpu->scratch_stride =
        (scratch_bytes + 4095) / 4096 * 4096 + 64; // threads do not meet in the same cache sets
    cpu->workers =
        (sala__worker *)sala__alloc(env, (size_t)threads, sizeof(sala__worker), "threads", err);
    if (!cpu->workers) return SALA_E_MEMORY;
    cpu->scratch_memory = (unsigned char *)sala__alloc(
        env, (size_t)threads * cpu->scratch_stride + 64, 1, "scratch of the threads", err);
    if (!cpu->scratch_memory) {
        sala__release(env, cpu->workers);
        return SALA_E_MEMORY;
    }
    cpu->scratch = cpu->scratch_memory + (64 - (uintptr_t)cpu->scratch_memory % 64) % 64;
    pthread_mutex_init(&cpu->mutex, NULL);
    pthread_cond_init(&cpu->wake, NULL);
    cpu->threads = threads;
    int code = sala__cpu_start(cpu, err);
    if (code < 0) sala__cpu_close(cpu);
    return code;
}

// ---- matrix products ----
// The definition of one element: the sum over k is cut into partial sums over SALA_GEMM_K elements,
// counted from k = 0 (the last may be shorter; k is a multiple of 16); a partial sum is 16
// interleaved fma chains (lane = k mod 16) that start at 0, folded by sala__sum16; the partial sums
// are added in order to 0, in FP32.

static SALA__UNUSED float sala__dot_reference(const float *x, const float *w, int k) { // [k] [k]
    float sum = 0;
    for (int from = 0; from < k; from += SALA_GEMM_K) {
        float lane[SALA_LANES] = {0};
        for (int i = from; i < k && i < from + SALA_GEMM_K; i++)
            lane[i % SALA_LANES] = fmaf(x[i], w[i], lane[i % SALA_LANES]);
        for (int half = SALA_LANES / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) lane[i] = lane[i] + lane[i + half];
        sum = sum + lane[0];
    }
    return sum;
}

// 4-bit weights are widened first, exactly: the same sums of w without alpha, which multiplies the
// result in FP32. A code is looked up in a table of the 16 numbers that it can mean.

static const float sala__e2m1[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static const float sala__codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// One row of a 4-bit matrix, and the group in which a walk along it stands.
typedef struct sala__row4 {
    const uint8_t *codes;
    const char *scales;  // [k/group]
    const uint8_t *zero; // [k/group] or NULL
    int32_t group, next; // INT4: where the next group begins
    float scale;         // NVFP4: of the group
    float table[16];     // INT4: what codes of the group mean
} sala__row4;

SALA__INLINE sala__row4 sala__row4_of(const sala_weight *w, int n) {
    sala__row4 r;
    size_t groups = (size_t)n * (size_t)(w->k / w->group);
    r.codes = (const uint8_t *)w->data + (size_t)n * (size_t)w->k / 2;
    r.scales = (const char *)w->scale + groups * (size_t)sala__scale_size(w->format);
    r.zero = w->zero ? w->zero + groups : NULL;
    r.group = w->group;
    r.next = 0;
    return r;
}

// Step to column k, a multiple of 16; the walk begins anywhere. Scales are finite: loading sees to
// it.
SALA__INLINE void sala__row4_step(sala__row4 *r, int32_t format, int k) {
    if (format == SALA_NVFP4) {
        uint32_t c = ((const uint8_t *)r->scales)[k / 16];
        r->scale = c >= 8 ? sala_bits_f32((c << 20) + (120u << 23)) : (float)c * 0x1p-9f;
        return;
    }
    if (k < r->next) return;
    int g = k / r->group;
    sala__vec scale = sala__set_vec(sala_bf16_f32(((const uint16_t *)(const void *)r->scales)[g]));
    sala__vec zero = sala__set_vec(r->zero ? (float)r->zero[g] : 8.0f);
    r->next = (g + 1) * r->group;
    for (int i = 0; i < 16; i += SALA__VEC) { // rounded to BF16 as sala_f32_bf16 does
        sala__vec_bits u = (sala__vec_bits)((sala__load_vec(sala__codes + i) - zero) * scale);
        u = (u + 0x7FFFu + (u >> 16 & 1u)) & 0xFFFF0000u;
        sala__store_vec(r->table + i, (sala__vec)u);
    }
}

// SALA__VEC weights from column k + part.
SALA__INLINE sala__vec sala__row4_load(const sala__row4 *r, int32_t format, int k, int part) {
    const float *table = format == SALA_NVFP4 ? sala__e2m1 : r->table;
    const uint8_t *codes = r->codes + (k + part) / 2;
    sala__vec v;
#if defined(__AVX512F__)
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    int32_t words[2];
    memcpy(words, codes, 8);
    __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32(words[0]), 0xFF00, words[1]);
    // A lookup reads the lowest four bits of its index alone.
    v = (sala__vec)_mm512_maskz_permutexvar_ps(0xFFFF, _mm512_maskz_srlv_epi32(0xFFFF, both, shift),
                                               _mm512_loadu_ps(table));
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    int32_t word;
    memcpy(&word, codes, 4);
    __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); // bit 3 where signs are
    v = (sala__vec)_mm256_blendv_ps(low, high, upper);
#else
    for (int i = 0; i < SALA__VEC; i++) v[i] = table[codes[i / 2] >> i % 2 * 4 & 15];
#endif
    return format == SALA_NVFP4 ? v * sala__set_vec(r->scale) : v;
}

// 16 weights of row n from column k on, both multiples of 16 as groups are, without alpha.
static inline void sala__load_weight4(const sala_weight *w, int n, int k, float out[16]) {
    sala__row4 r = sala__row4_of(w, n);
    sala__row4_step(&r, w->format, k);
    for (int i = 0; i < 16; i += SALA__VEC)
        sala__store_vec(out + i, sala__row4_load(&r, w->format, k, i));
}

// How it is made fast. An item is a block of rows and a panel of weight rows. Its part of x is
// widened to FP32 in the thread's scratch. Prefill goes through tiles: 4 weight rows and a few rows
// of x, whose sums stay in registers while the tile walks through one partial sum; both sides are
// packed in the order in which it reads them. Decode (few rows) is bound by memory: there each
// weight row is read once, from its beginning to its end, the pattern that processors fetch ahead
// best.

// Rows of x in a tile: as many as the registers hold. SALA__GEMM_DIRECT: up to so many rows it does
// not pay to pack the weights.
#if SALA__VEC == 16
#define SALA__TILE 4
#define SALA__GEMM_DIRECT 16
#else
#define SALA__TILE (SALA__VEC == 8 ? 3 : 4)
#define SALA__GEMM_DIRECT 0
#endif

#define SALA__GEMM_ROWS 64   // rows of x in a block: with SALA_GEMM_K columns they fit an L2 cache
#define SALA__GEMM_PANEL 256 // most weight rows in a panel
#define SALA__GEMM_NARROW 8192 // floats of x that fit an L1 cache beside the weights
#define SALA__GEMM_AHEAD 8192  // bytes: how far ahead of their use weights are fetched

typedef struct sala__gemm_job {
    sala__cpu *cpu;
    const sala_gemm_args *a;
    int64_t panels;                           // of all weights together
    int32_t block, panel;                     // rows in a block, weight rows in a panel
    int32_t whole;                            // all of x fits the scratch: a thread widens it once
    int32_t narrow;                           // few rows: walk along the weight rows
    unsigned char widened[SALA__MAX_THREADS]; // whole: this thread has done it
} sala__gemm_job;

// What an item works on, in the thread's scratch.
typedef struct sala__gemm_part {
    const sala_weight *w;
    int32_t row, rows, tiles, col, cols; // of y; tiles of rows
    float *x;       // blocks of SALA_GEMM_K columns: [tiles][columns / 16, rows of the tile, 16]
    float *weights; // [SALA_GEMM_K / 16, 4, 16]
    float *sums;    // [cols / 4, tiles][SALA__TILE, 4]
} sala__gemm_part;

static size_t sala__gemm_scratch(void) { // bytes for each thread
    size_t x = SALA__GEMM_ROWS * SALA_GEMM_K, weights = 4 * SALA_GEMM_K;
    size_t sums = SALA__GEMM_PANEL * (SALA__GEMM_ROWS + SALA__TILE);
    return sizeof(float) * (x + weights + sums);
}

// Widen columns from .. from + depth - 1 of the part's rows of x.
static void sala__gemm_widen_x(const sala_gemm_args *a, const sala__gemm_part *p, int from,
                               int depth, float *to) {
    for (int tile = 0; tile < p->rows; tile += SALA__TILE) {
        int height = p->rows - tile < SALA__TILE ? p->rows - tile : SALA__TILE;
        for (int r = 0; r < height; r++) {
            const sala_act *x = a->x + (size_t)(p->row + tile + r) * (size_t)p->w->k + from;
            float *out = to + tile * depth + 16 * r;
            for (int i = 0; i < depth; i += 16, out += 16 * height)
                for (int j = 0; j < 16; j += SALA__VEC)
                    sala__store_vec(out + j, sala__load_act_vec(x + i + j));
        }
    }
}

// Where weight row n (the last row, when there are fewer) has column `from`.
static const char *sala__weight_at(const sala_weight *w, int n, int from) {
    size_t index = (size_t)(n < w->n ? n : w->n - 1) * (size_t)w->k + (size_t)from;
    return (const char *)w->data + index * (size_t)sala__weight_size(w->format);
}

// Load into a register, once: left to itself GCC repeats the load in every fma that uses it.
SALA__INLINE sala__vec sala__load_once(const float *p) {
    sala__vec v = sala__load_vec(p);
#if defined(__AVX512F__)
    __asm__("" : "+v"(v));
#elif defined(__x86_64__)
    __asm__("" : "+x"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#endif
    return v;
}

// The 4 weight rows of a tile.
typedef struct sala__tile_weights {
    const float *packed;  // [steps, 4, 16] FP32
    const char *row[4];   // [16 * steps] as they are: read directly if BF16 and `direct`
    const char *ahead[4]; // [16 * steps] what to fetch into the cache meanwhile
} sala__tile_weights;

// lanes[r][c] = sum over `steps` of x[r] * w[c], for the SALA__VEC lanes from `part`.
SALA__INLINE void sala__tile_multiply(int rows, int direct, const float *x,
                                      const sala__tile_weights *w, int part, int steps,
                                      sala__vec lanes[][4]) {
    SALA__UNROLL
    for (int r = 0; r < rows; r++)
        lanes[r][0] = lanes[r][1] = lanes[r][2] = lanes[r][3] = sala__set_vec(0);
    for (int step = 0; step < steps; step++) {
        sala__vec xs[SALA__TILE];
        SALA__UNROLL
        for (int r = 0; r < rows; r++) xs[r] = sala__load_once(x + 16 * (step * rows + r) + part);
        if (direct && part == 0) { // two of the four rows: a cache line lasts for two steps
            const char *const *ahead = w->ahead + 2 * (step & 1);
            __builtin_prefetch(ahead[0] + 32 * (step & ~1));
            __builtin_prefetch(ahead[1] + 32 * (step & ~1));
        }
        SALA__UNROLL
        for (int c = 0; c < 4; c++) {
            sala__vec wc =
                direct ? sala__load_weight_vec(w->row[c] + 2 * (16 * step + part), SALA_BF16)
                       : sala__load_once(w->packed + 16 * (step * 4 + c) + part);
            SALA__UNROLL
            for (int r = 0; r < rows; r++) lanes[r][c] = sala__fma_vec(xs[r], wc, lanes[r][c]);
        }
    }
}

// sums[r][c] += sala__sum16 of the lanes: one partial sum of `rows` (at most SALA__TILE) rows of x
// with 4 weight rows. x: [steps, rows, 16], sums: [SALA__TILE, 4].
#if SALA__VEC == 16
// All 16 folds at once: a step adds the halves of two vectors and keeps both results in one.
SALA__INLINE void sala__tile_add(int rows, int direct, const float *x, const sala__tile_weights *w,
                                 int steps, float *sums) {
    sala__vec v[4][4];
    SALA__UNROLL
    for (int r = 0; r < 4; r++) v[r][0] = v[r][1] = v[r][2] = v[r][3] = sala__set_vec(0);
    sala__tile_multiply(rows, direct, x, w, 0, steps, v);
#define SALA__FOLD(shuffle, a, b, low, high)                                                       \
    ((sala__vec)shuffle(0xFFFF, (__m512)(a), (__m512)(b), low) +                                   \
     (sala__vec)shuffle(0xFFFF, (__m512)(a), (__m512)(b), high))
    SALA__UNROLL
    for (int c = 0; c < 4; c++) {
        v[0][c] = SALA__FOLD(_mm512_maskz_shuffle_f32x4, v[0][c], v[1][c], 0x44, 0xEE);
        v[2][c] = SALA__FOLD(_mm512_maskz_shuffle_f32x4, v[2][c], v[3][c], 0x44, 0xEE);
        v[0][c] = SALA__FOLD(_mm512_maskz_shuffle_f32x4, v[0][c], v[2][c], 0x88, 0xDD);
    }
    v[0][0] = SALA__FOLD(_mm512_maskz_shuffle_ps, v[0][0], v[0][1], 0x44, 0xEE);
    v[0][2] = SALA__FOLD(_mm512_maskz_shuffle_ps, v[0][2], v[0][3], 0x44, 0xEE);
    v[0][0] = SALA__FOLD(_mm512_maskz_shuffle_ps, v[0][0], v[0][2], 0x88, 0xDD);
#undef SALA__FOLD
    sala__store_vec(sums, sala__load_vec(sums) + v[0][0]);
}
#else
SALA__INLINE void sala__tile_add(int rows, int direct, const float *x, const sala__tile_weights *w,
                                 int steps, float *sums) {
    float out[SALA__TILE * 4][16];
    SALA__UNROLL
    for (int part = 0; part < 16; part += SALA__VEC) {
        sala__vec lanes[SALA__TILE][4];
        sala__tile_multiply(rows, direct, x, w, part, steps, lanes);
        SALA__UNROLL
        for (int i = 0; i < 4 * rows; i++) sala__store_vec(out[i] + part, lanes[i / 4][i % 4]);
    }
    for (int i = 0; i < 4 * rows; i++) {
        const sala__v4_memory *v = (const sala__v4_memory *)out[i];
        sala__v4 four = (v[0] + v[2]) + (v[1] + v[3]);
        sums[i] = sums[i] + ((four[0] + four[2]) + (four[1] + four[3]));
    }
}
#endif

// The same for all tiles of the part. x: [tiles][steps, rows of the tile, 16].
SALA__INLINE void sala__gemm_tiles(const sala__gemm_part *p, int direct, const float *x,
                                   const sala__tile_weights *w, int steps, float *sums) {
    int r = 0;
    for (; r + SALA__TILE <= p->rows;
         r += SALA__TILE, x += 16 * SALA__TILE * steps, sums += SALA__TILE * 4)
        sala__tile_add(SALA__TILE, direct, x, w, steps, sums);
    if (p->rows - r == 3) sala__tile_add(3, direct, x, w, steps, sums);
    if (p->rows - r == 2) sala__tile_add(2, direct, x, w, steps, sums);
    if (p->rows - r == 1) sala__tile_add(1, direct, x, w, steps, sums);
}

// Widen the 4 weight rows of a tile into `to`, and fetch the next ones into the cache.
SALA__INLINE void sala__gemm_pack(const sala__tile_weights *w, int32_t format, int depth,
                                  float *to) {
    int size = sala__weight_size(format);
    for (int i = 0; i < depth; i += 16) {
        SALA__UNROLL
        for (int c = 0; c < 4; c++, to += 16) {
            __builtin_prefetch(w->ahead[c] + size * i);
            for (int j = 0; j < 16; j += SALA__VEC)
                sala__store_vec(to + j, sala__load_weight_vec(w->row[c] + size * (i + j), format));
        }
    }
}

// The same for 4-bit weights, columns from .. from + depth - 1.
SALA__INLINE void sala__gemm_pack4(const sala__gemm_part *p, int32_t format, int n, int from,
                                   int depth, float *to) {
    for (int c = 0; c < 4; c++) {
        int row = p->col + n + c < p->w->n ? p->col + n + c : p->w->n - 1;
        sala__row4 r = sala__row4_of(p->w, row);
        for (int i = 0; i < depth; i += 16) {
            sala__row4_step(&r, format, from + i);
            for (int j = 0; j < 16; j += SALA__VEC)
                sala__store_vec(to + 4 * i + 16 * c + j, sala__row4_load(&r, format, from + i, j));
        }
    }
}

// Add one block of columns, for all weight rows of the part.
static void sala__gemm_columns(const sala__gemm_part *p, int from, int depth, const float *x) {
    int format = p->w->format, direct = format == SALA_BF16 && p->rows <= SALA__GEMM_DIRECT;
    int ahead = SALA__GEMM_AHEAD / (SALA_GEMM_K * sala__weight_size(format)); // weight rows
    for (int n = 0; n < p->cols; n += 4) {
        float *sums = p->sums + n / 4 * p->tiles * SALA__TILE * 4;
        sala__tile_weights w;
        w.packed = p->weights;
        if (sala__is_4bit(format)) {
            if (format == SALA_NVFP4) sala__gemm_pack4(p, SALA_NVFP4, n, from, depth, p->weights);
            if (format == SALA_INT4) sala__gemm_pack4(p, SALA_INT4, n, from, depth, p->weights);
            sala__gemm_tiles(p, 0, x, &w, depth / 16, sums);
            continue;
        }
        for (int c = 0; c < 4; c++) {
            w.row[c] = sala__weight_at(p->w, p->col + n + c, from);
            // + 63: where rows do not start with a cache line, the first line is there already,
            // from the block of columns before.
            w.ahead[c] = sala__weight_at(p->w, p->col + n + c + ahead, from) + 63;
        }
        if (direct) {
            sala__gemm_tiles(p, 1, x, &w, depth / 16, sums);
            continue;
        }
        if (format == SALA_BF16) sala__gemm_pack(&w, SALA_BF16, depth, p->weights);
        if (format == SALA_F16) sala__gemm_pack(&w, SALA_F16, depth, p->weights);
        if (format == SALA_F32) sala__gemm_pack(&w, SALA_F32, depth, p->weights);
        sala__gemm_tiles(p, 0, x, &w, depth / 16, sums);
    }
}

// sums[4 * r] += one partial sum of a weight row with `rows` (at most SALA__TILE) rows of x: of the
// row's columns from .. from + 16 * steps - 1. x: [steps, rows, 16].
SALA__INLINE void sala__row_add(int rows, int32_t format, const float *x, const sala_weight *weight,
                                int n, int from, int steps, float *sums) {
    enum { PARTS = 16 / SALA__VEC };
    const int four = sala__is_4bit(format), size = sala__weight_size(format);
    const char *w = four ? NULL : sala__weight_at(weight, n, from);
    sala__vec lanes[SALA__TILE][PARTS];
    sala__row4 row;
    if (four) row = sala__row4_of(weight, n);
    SALA__UNROLL
    for (int i = 0; i < rows * PARTS; i++) lanes[i / PARTS][i % PARTS] = sala__set_vec(0);
    for (int i = 0; i < 16 * steps; i += 16, x += 16 * rows) {
        if (four) sala__row4_step(&row, format, from + i);
        if (four ? i % 128 == 0 : i * size % 64 == 0)
            __builtin_prefetch((four ? (const char *)row.codes + (from + i) / 2 : w + i * size) +
                               SALA__GEMM_AHEAD);
        SALA__UNROLL
        for (int part = 0; part < PARTS; part++) {
            const float *xp = x + part * SALA__VEC;
            sala__vec v = four ? sala__row4_load(&row, format, from + i, part * SALA__VEC)
                               : sala__load_weight_vec(w + (i + part * SALA__VEC) * size, format);
            SALA__UNROLL
            for (int r = 0; r < rows; r++)
                lanes[r][part] = sala__fma_vec(sala__load_vec(xp + 16 * r), v, lanes[r][part]);
        }
    }
    SALA__UNROLL
    for (int r = 0; r < rows; r++) {
        float lane[16];
        SALA__UNROLL
        for (int i = 0; i < PARTS; i++) sala__store_vec(lane + i * SALA__VEC, lanes[r][i]);
        sums[4 * r] = sums[4 * r] + sala__sum16(sala__load16(lane));
    }
}

// All columns, for few rows: each weight row is read from its beginning to its end.
SALA__INLINE void sala__gemm_along(const sala__gemm_part *p, int rows, int32_t format) {
    int k = p->w->k;
    for (int n = 0; n < p->cols; n++) {
        float *sums = p->sums + n / 4 * SALA__TILE * 4 + n % 4;
        for (int from = 0; from < k; from += SALA_GEMM_K) {
            int depth = k - from < SALA_GEMM_K ? k - from : SALA_GEMM_K;
            sala__row_add(rows, format, p->x + from * rows, p->w, p->col + n, from, depth / 16,
                          sums);
        }
    }
}

SALA__INLINE void sala__gemm_narrow(const sala__gemm_part *p, int32_t format) {
    if (p->rows == 1) sala__gemm_along(p, 1, format);
    if (p->rows == 2) sala__gemm_along(p, 2, format);
    if (p->rows == 3) sala__gemm_along(p, 3, format);
    if (p->rows == 4 && SALA__TILE == 4) sala__gemm_along(p, SALA__TILE, format);
}

// Write y, rounded or not.
static void sala__gemm_finish(const sala_gemm_args *a, const sala__gemm_part *p) {
    int which = (int)(p->w - a->w);
    for (int r = 0; r < p->rows; r++) {
        for (int c = 0; c < p->cols; c += 16) {
            float value[16] = {0};
            sala_act rounded[16];
            int count = p->cols - c < 16 ? p->cols - c : 16;
            size_t to = (size_t)(p->row + r) * (size_t)p->w->n + (size_t)(p->col + c);
            for (int i = 0; i < count; i += 4) {
                int tile = (c + i) / 4 * p->tiles + r / SALA__TILE;
                memcpy(value + i, p->sums + (tile * SALA__TILE + r % SALA__TILE) * 4,
                       4 * sizeof(float));
            }
            for (int i = 0; i < count && p->w->alpha; i++) value[i] *= p->w->alpha[p->col + c + i];
            if (a->y_f32 && which == 0) {
                memcpy(a->y_f32 + to, value, (size_t)count * sizeof(float));
            } else {
                sala__store_act16(rounded, sala__load16(value));
                memcpy(a->y[which] + to, rounded, (size_t)count * sizeof(sala_act));
            }
        }
    }
}

static int64_t sala__gemm_panels(const sala_weight *w, int panel) {
    return (w->n + panel - 1) / panel;
}

static void sala__gemm_item(void *context, int64_t item, int thread) {
    sala__gemm_job *job = (sala__gemm_job *)context;
    const sala_gemm_args *a = job->a;
    sala__gemm_part p;
    int64_t panel = item % job->panels;
    for (p.w = a->w; panel >= sala__gemm_panels(p.w, job->panel); p.w++)
        panel -= sala__gemm_panels(p.w, job->panel);
    p.row = (int32_t)(item / job->panels) * job->block;
    p.rows = a->rows - p.row < job->block ? a->rows - p.row : job->block;
    p.tiles = (p.rows + SALA__TILE - 1) / SALA__TILE;
    p.col = (int32_t)panel * job->panel;
    p.cols = p.w->n - p.col < job->panel ? p.w->n - p.col : job->panel;
    p.x = (float *)sala__cpu_scratch(job->cpu, thread);
    p.weights = p.x + SALA__GEMM_ROWS * SALA_GEMM_K;
    p.sums = p.weights + 4 * SALA_GEMM_K;
    memset(p.sums, 0, sizeof(float) * (size_t)((p.cols + 3) / 4 * p.tiles * SALA__TILE * 4));
    int k = p.w->k, ready = job->whole && job->widened[thread];
    for (int from = 0; from < k; from += SALA_GEMM_K) {
        int depth = k - from < SALA_GEMM_K ? k - from : SALA_GEMM_K;
        float *x = job->whole ? p.x + from * p.rows : p.x;
        if (!ready) sala__gemm_widen_x(a, &p, from, depth, x);
        if (!job->narrow) sala__gemm_columns(&p, from, depth, x);
    }
    job->widened[thread] = 1;
    if (job->narrow && p.w->format == SALA_BF16) sala__gemm_narrow(&p, SALA_BF16);
    if (job->narrow && p.w->format == SALA_F16) sala__gemm_narrow(&p, SALA_F16);
    if (job->narrow && p.w->format == SALA_F32) sala__gemm_narrow(&p, SALA_F32);
    if (job->narrow && p.w->format == SALA_NVFP4) sala__gemm_narrow(&p, SALA_NVFP4);
    if (job->narrow && p.w->format == SALA_INT4) sala__gemm_narrow(&p, SALA_INT4);
    sala__gemm_finish(a, &p);
}

// ---- products of NVFP4 on both sides ----
// The definition (nvfp4.md 7): acc = fl(acc + p) for every group of 16 k in order, from 0, where p is
// the exact sum of the group's 16 products of codes and scales: 20 bits at most, so FP32 has it in
// whatever order it is summed. y = acc * (alpha[n] * scale of x). A lane is a weight row here.

enum { SALA__QUANT_COLS = 32, SALA__QUANT_TILE = 4 }; // weight rows of an item, rows of x at once

typedef struct sala__quant_job {
    sala__cpu *cpu;
    const sala_gemm_args *a;
    int64_t panels; // of SALA__QUANT_COLS rows of all weights together
} sala__quant_job;

// sums[r] += the groups of `depth` k; x: [SALA__QUANT_TILE, depth], w: [depth, SALA__QUANT_COLS].
static void sala__quant_tile(const float *x, const float *w, int depth, float *sums) {
    sala__v16 acc[SALA__QUANT_TILE][2], p[SALA__QUANT_TILE][2];
    memcpy(acc, sums, sizeof acc);
    for (int from = 0; from < depth; from += 16) {
        memset(p, 0, sizeof p);
        for (int k = from; k < from + 16; k++) {
            sala__v16 w0 = sala__load16(w + k * SALA__QUANT_COLS);
            sala__v16 w1 = sala__load16(w + k * SALA__QUANT_COLS + 16);
            SALA__UNROLL
            for (int r = 0; r < SALA__QUANT_TILE; r++) {
                sala__v16 v = sala__set16(x[r * depth + k]);
                p[r][0] = sala__fma16(v, w0, p[r][0]);
                p[r][1] = sala__fma16(v, w1, p[r][1]);
            }
        }
        for (int r = 0; r < SALA__QUANT_TILE; r++)
            acc[r][0] = acc[r][0] + p[r][0], acc[r][1] = acc[r][1] + p[r][1];
    }
    memcpy(sums, acc, sizeof acc);
}

// Rows of x and of w, columns from .. from + depth - 1, widened; w turned so that its rows are lanes.
// What lies beyond the last row of either is zero.
static void sala__quant_widen(const sala_gemm_args *a, const sala_weight *w, int row, int rows,
                              int col, int from, int depth, float *x, float *turned) {
    for (int r = 0; r < rows; r++) {
        sala__row4 walk;
        memset(&walk, 0, sizeof walk);
        walk.codes = a->qx.codes + (size_t)(row + r) * (size_t)w->k / 2;
        for (int k = from; k < from + depth; k += 16) {
            walk.scale = sala_e4m3_f32(a->qx.scales[sala_quant_place(&a->qx, row + r, k)]);
            for (int i = 0; i < 16; i += SALA__VEC)
                sala__store_vec(x + r * depth + (k - from) + i,
                                sala__row4_load(&walk, SALA_NVFP4, k, i));
        }
    }
    for (int n = 0; n < SALA__QUANT_COLS; n++)
        for (int k = 0; k < depth; k += 16) {
            float wide[16] = {0};
            if (col + n < w->n) sala__load_weight4(w, col + n, from + k, wide);
            for (int i = 0; i < 16; i++) turned[(k + i) * SALA__QUANT_COLS + n] = wide[i];
        }
}

static void sala__quant_item(void *context, int64_t item, int thread) {
    const sala__quant_job *job = (const sala__quant_job *)context;
    const sala_gemm_args *a = job->a;
    int64_t panel = item % job->panels;
    int which = 0, row = (int)(item / job->panels) * SALA__GEMM_ROWS;
    int rows = a->rows - row < SALA__GEMM_ROWS ? a->rows - row : SALA__GEMM_ROWS;
    for (; panel >= sala__gemm_panels(&a->w[which], SALA__QUANT_COLS); which++)
        panel -= sala__gemm_panels(&a->w[which], SALA__QUANT_COLS);
    const sala_weight *w = &a->w[which];
    int col = (int)panel * SALA__QUANT_COLS;
    float *x = (float *)sala__cpu_scratch(job->cpu, thread);
    float *turned = x + SALA__GEMM_ROWS * SALA_GEMM_K;
    float *sums = turned + SALA_GEMM_K * SALA__QUANT_COLS;
    memset(sums, 0, sizeof(float) * SALA__GEMM_ROWS * SALA__QUANT_COLS);
    for (int from = 0; from < w->k; from += SALA_GEMM_K) {
        int depth = w->k - from < SALA_GEMM_K ? w->k - from : SALA_GEMM_K;
        sala__quant_widen(a, w, row, rows, col, from, depth, x, turned);
        for (int r = 0; r < rows; r += SALA__QUANT_TILE) // its last rows may be of an earlier pass
            sala__quant_tile(x + r * depth, turned, depth, sums + r * SALA__QUANT_COLS);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < SALA__QUANT_COLS && col + c < w->n; c++) {
            float factor = (w->alpha ? w->alpha[col + c] : 1) * a->qx.scale;
            float y = sums[r * SALA__QUANT_COLS + c] * factor;
            size_t to = (size_t)(row + r) * (size_t)w->n + (size_t)(col + c);
            a->y[which][to] = sala_store(y);
        }
}

static void sala__gemm_quantized(sala__cpu *cpu, const sala_gemm_args *a) {
    sala__quant_job job = {cpu, a, 0};
    for (int i = 0; i < a->count; i++) job.panels += sala__gemm_panels(&a->w[i], SALA__QUANT_COLS);
    int64_t blocks = (a->rows + SALA__GEMM_ROWS - 1) / SALA__GEMM_ROWS;
    sala__parallel(cpu, job.panels * blocks, sala__quant_item, &job);
}

// One group of 16 of a row from column k on.
static void sala__quantize16(const sala_quant *q, const sala_act *x, int64_t row, int k,
                             int width) {
    uint16_t bits[16];
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) {
        bits[i] = sala_f32_bf16(sala_act_f32(x[i]));
        if ((bits[i] & 0x7FFFu) > most) most = bits[i] & 0x7FFFu;
    }
    uint8_t scale = sala_quant_scale(most, q->scale);
    float factor = sala_quant_factor(scale, q->scale);
    uint8_t *codes = q->codes + ((size_t)row * (size_t)width + (size_t)k) / 2;
    q->scales[sala_quant_place(q, (int32_t)row, k)] = scale;
    for (int i = 0; i < 8; i++) {
        uint8_t low = sala_f32_e2m1(sala_bf16_f32(bits[2 * i]) * factor);
        uint8_t high = sala_f32_e2m1(sala_bf16_f32(bits[2 * i + 1]) * factor);
        codes[i] = (uint8_t)(factor == 0 ? 0 : low | high << 4);
    }
}

static void sala__op_gemm(sala__cpu *cpu, const sala_gemm_args *a) {
    sala__gemm_job job;
    if (a->rows < 1) return;
    if (a->qx.codes) {
        sala__gemm_quantized(cpu, a);
        return;
    }
    int64_t floats = (int64_t)a->rows * a->w[0].k;
    job.cpu = cpu;
    job.a = a;
    job.block = a->rows < SALA__GEMM_ROWS ? a->rows : SALA__GEMM_ROWS;
    job.whole = a->rows <= SALA__GEMM_ROWS && floats <= SALA__GEMM_ROWS * SALA_GEMM_K;
    // 4 bits are widened for each walk: that costs more than x from an L2 cache.
    int64_t narrow =
        sala__is_4bit(a->w[0].format) ? SALA__GEMM_ROWS * SALA_GEMM_K : SALA__GEMM_NARROW;
    job.narrow = job.whole && (a->rows == 1 || (a->rows <= SALA__TILE && floats <= narrow));
    int64_t blocks = (a->rows + job.block - 1) / job.block;
    for (job.panel = SALA__GEMM_PANEL;;
         job.panel /= 2) { // small enough that all threads end at about the same time
        job.panels = 0;
        for (int i = 0; i < a->count; i++) job.panels += sala__gemm_panels(&a->w[i], job.panel);
        if (job.panel == 16 || job.panels * blocks >= (job.narrow ? 4 : 8) * cpu->threads) break;
    }
    memset(job.widened, 0, (size_t)cpu->threads);
    sala__parallel(cpu, job.panels * blocks, sala__gemm_item, &job);
}
// ---- operations, in the order in which a token meets them ----
// Each is the plain definition of what the kernel of the same name computes. Two helpers carry the
// work: products of small FP32 matrices in which every element is one fma chain in ascending k, and
// loops over 16 lanes. Neither depends on how many rows run beside a row, which is promise 1.

static void sala__op_embed_row(void *context, int64_t r, int thread) {
    const sala_embed_args *a = (const sala_embed_args *)context;
    (void)thread;
    int h = a->dims->hidden;
    size_t from = (size_t)a->rows->token[r] * (size_t)h;
    sala__v16 scale = sala__set16(a->dims->embed_scale);
    sala_act *x = a->x + r * h;
    for (int i = 0; i < h; i += 16) {
        sala__v16 e = sala__load_weight16(a->table.data, a->table.format, from + (size_t)i);
        sala__store_act16(x + i, e * scale);
    }
}

static void sala__op_embed(sala__cpu *cpu, const sala_embed_args *a) {
    sala__parallel(cpu, a->rows->count, sala__op_embed_row, (void *)(uintptr_t)a);
}

static void sala__op_rope_table_row(void *context, int64_t r, int thread) {
    const sala_rope_args *a = (const sala_rope_args *)context;
    (void)thread;
    float *out = a->cos_sin + r * a->dim;
    for (int i = 0; i < a->dim / 2; i++) {
        float angle = (float)a->rows->position[r] * a->frequency[i];
        out[2 * i] = (float)cos((double)angle);
        out[2 * i + 1] = (float)sin((double)angle);
    }
}

static void sala__op_rope_table(sala__cpu *cpu, const sala_rope_args *a) {
    sala__parallel(cpu, a->rows->count, sala__op_rope_table_row, (void *)(uintptr_t)a);
}

// 1 / sqrt(mean(x^2) + eps): 16 fma chains, folded as a tree.
static float sala__rms_inverse(const sala_act *x, int width, float eps) {
    sala__v16 sum = sala__set16(0);
    for (int i = 0; i < width; i += 16) {
        sala__v16 v = sala__load_act16(x + i);
        sum = sala__fma16(v, v, sum);
    }
    return 1.0f / sqrtf(sala__sum16(sum) / (float)width + eps);
}

// 16 elements of x * inverse * weight with upstream's two roundings.
static inline sala__v16 sala__normed16(const sala_act *x, float inverse, const sala_weight *w,
                                       int i) {
    sala_act rounded[16];
    sala__store_act16(rounded, sala__load_act16(x + i) * sala__set16(inverse));
    return sala__load_act16(rounded) * sala__load_weight16(w->data, w->format, (size_t)i);
}

static inline sala__v16 sala__round16(sala__v16 v) { // to the activation type and back
    sala_act rounded[16];
    sala__store_act16(rounded, v);
    return sala__load_act16(rounded);
}

static void sala__op_norm_row(void *context, int64_t r, int thread) {
    const sala_norm_args *a = (const sala_norm_args *)context;
    (void)thread;
    sala_act *x = a->x + r * a->width, *y = a->y ? a->y + r * a->width : NULL, rounded[16] = {0};
    if (a->branch) {
        const sala_act *b = a->branch + r * a->width;
        sala__v16 scale = sala__set16(a->scale);
        for (int i = 0; i < a->width; i += 16) {
            sala__v16 scaled = sala__round16(sala__load_act16(b + i) * scale);
            sala__store_act16(x + i, sala__load_act16(x + i) + scaled);
        }
    }
    float inverse = sala__rms_inverse(x, a->width, a->eps);
    for (int i = 0; i < a->width; i += 16) {
        sala__v16 v = sala__normed16(x, inverse, &a->weight, i);
        if (a->divisor != 1) v = sala__round16(v) / sala__set16(a->divisor);
        sala__store_act16(y ? y + i : rounded, v);
        if (a->quant.codes) sala__quantize16(&a->quant, y ? y + i : rounded, r, i, a->width);
    }
}

static void sala__op_norm(sala__cpu *cpu, const sala_norm_args *a) {
    sala__parallel(cpu, a->rows, sala__op_norm_row, (void *)(uintptr_t)a);
}

// One head: norm, then rotation of the pairs (i, i + dim/2).
static void sala__qk_head(const sala_qk_args *a, const sala_weight *norm, const float *cos_sin,
                          sala_act *x) {
    int d = a->dim, half = d / 2;
    if (norm->data) {
        float inverse = sala__rms_inverse(x, d, a->eps);
        for (int i = 0; i < d; i += 16)
            sala__store_act16(x + i, sala__normed16(x, inverse, norm, i));
    }
    if (!cos_sin) return;
    for (int i = 0; i < half; i++) {
        float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
        float lo = sala_act_f32(x[i]), hi = sala_act_f32(x[i + half]);
        x[i] = sala_store(fmaf(lo, c, -(hi * s)));
        x[i + half] = sala_store(fmaf(hi, c, lo * s));
    }
}

static void sala__op_qk_row(void *context, int64_t r, int thread) {
    const sala_qk_args *a = (const sala_qk_args *)context;
    (void)thread;
    const float *cos_sin = a->cos_sin ? a->cos_sin + r * a->dim : NULL;
    for (int h = 0; h < a->heads; h++)
        sala__qk_head(a, &a->q_norm, cos_sin, a->q + (r * a->heads + h) * a->dim);
    for (int h = 0; h < a->kv_heads; h++)
        sala__qk_head(a, &a->k_norm, cos_sin, a->k + (r * a->kv_heads + h) * a->dim);
}

static void sala__op_qk_norm_rope(sala__cpu *cpu, const sala_qk_args *a) {
    sala__parallel(cpu, a->rows, sala__op_qk_row, (void *)(uintptr_t)a);
}

// A tile of `rows` x 16 * `vectors` elements of the product below, kept in registers. Called with
// constants, so that every loop but the one over k unrolls.
SALA__INLINE void sala__matrix_tile(float *c, const float *a, int lda, const float *b, int k, int n,
                                    const int rows, const int vectors) {
    sala__v16 s[4][4];
    SALA__UNROLL
    for (int y = 0; y < rows; y++) SALA__UNROLL
    for (int x = 0; x < vectors; x++) s[y][x] = sala__load16(c + y * n + 16 * x);
    for (int i = 0; i < k; i++) {
        const float *bi = b + (size_t)i * (size_t)n;
        SALA__UNROLL
        for (int x = 0; x < vectors; x++) {
            sala__v16 w = sala__load16(bi + 16 * x);
            SALA__UNROLL
            for (int y = 0; y < rows; y++)
                s[y][x] = sala__fma16(sala__set16(a[y * lda + i]), w, s[y][x]);
        }
    }
    SALA__UNROLL
    for (int y = 0; y < rows; y++) SALA__UNROLL
    for (int x = 0; x < vectors; x++) sala__store16(c + y * n + 16 * x, s[y][x]);
}

// c[rows, n] += a[rows, k] * b[k, n]: each element one fma chain in ascending k, whatever the tile
// that holds it. n is a multiple of 16; lda, n and n are the distances between rows of a, b and c.
static void sala__matrix_add(float *c, const float *a, int lda, const float *b, int rows, int k,
                             int n) {
    for (int r = 0; r < rows;) {
        int step = rows - r < 4 ? 1 : 4, j = 0;
        const float *ar = a + (size_t)r * (size_t)lda;
        float *cr = c + (size_t)r * (size_t)n;
        for (; j + 64 <= n; j += 64) {
            if (step == 4)
                sala__matrix_tile(cr + j, ar, lda, b + j, k, n, 4, 4);
            else
                sala__matrix_tile(cr + j, ar, lda, b + j, k, n, 1, 4);
        }
        for (; j < n; j += 16) {
            if (step == 4)
                sala__matrix_tile(cr + j, ar, lda, b + j, k, n, 4, 1);
            else
                sala__matrix_tile(cr + j, ar, lda, b + j, k, n, 1, 1);
        }
        r += step;
    }
}

static void sala__load_row(float *out, const sala_act *in,
                           int width) { // widen; width a multiple of 16
    for (int i = 0; i < width; i += 16) sala__store16(out + i, sala__load_act16(in + i));
}

// ---- lightning attention ----

typedef struct sala__gla_job {
    sala__cpu *cpu;
    const sala_gla_args *a;
} sala__gla_job;

// Norm and rotation of the q and k of lightning attention, in place.
static sala_qk_args sala__gla_qk(const sala_dims *m, const sala_gla_args *a, int rows) {
    sala_qk_args qk;
    memset(&qk, 0, sizeof qk);
    qk.rows = rows;
    qk.heads = m->lin_heads;
    qk.kv_heads = m->lin_kv_heads;
    qk.dim = m->lin_dim;
    qk.eps = m->eps;
    qk.q_norm = a->q_norm;
    qk.k_norm = a->k_norm;
    qk.cos_sin = a->cos_sin;
    qk.q = a->q;
    qk.k = a->k;
    return qk;
}

// What comes before the state: k to its place, norm and rotation of q and k.
static void sala__gla_inputs(sala__cpu *cpu, const sala_gla_args *a) {
    const sala_dims *m = a->dims;
    if (!a->o) return;
    size_t count = (size_t)a->rows->count * (size_t)m->lin_kv_heads * (size_t)m->lin_dim;
    if (a->k != a->raw_k) memcpy(a->k, a->raw_k, count * sizeof(sala_act));
    sala_qk_args qk = sala__gla_qk(m, a, a->rows->count);
    sala__op_qk_norm_rope(cpu, &qk);
}

// One tile of up to 64 tokens in chunk form (model.md 4), for one head, from row `row` of the pass:
//   o_i = scale (l^(i+1) q_i S + sum_{j<=i} l^(i-j) (q_i.k_j) v_j),  S' = l^C S + sum_j l^(C-1-j)
//   k_j v_j^T
// All exponents are natural (l < 1, never divided by), so nothing overflows.
static void sala__gla_tile(const sala_gla_args *a, int h, int64_t row, int c, float *state,
                           float *scratch) {
    const sala_dims *m = a->dims;
    int d = m->lin_dim, nh = m->lin_heads, nkv = m->lin_kv_heads, g = h / (nh / nkv);
    float *q = scratch, *v = q + SALA_TILE * d, *kt = v + SALA_TILE * d; // [64, d] [64, d] [d, 64]
    float *score = kt + SALA_TILE * d, *o = score + SALA_TILE * SALA_TILE; // [64, 64] [64, d]
    float *k = o + SALA_TILE * d, *power = k + d;                          // [d] [65]
    for (int i = 0; i <= c; i++) power[i] = (float)exp(-(double)a->slopes[h] * i);
    memset(kt, 0, sizeof(float) * SALA_TILE * (size_t)d);
    memset(score, 0, sizeof(float) * SALA_TILE * SALA_TILE);
    memset(o, 0, sizeof(float) * SALA_TILE * (size_t)d);
    for (int i = 0; i < c; i++) {
        int64_t r = row + i;
        sala__load_row(q + i * d, a->q + (r * nh + h) * d, d);
        sala__load_row(v + i * d, a->v + (r * nkv + g) * d, d);
        sala__load_row(k, a->k + (r * nkv + g) * d, d);
        for (int x = 0; x < d; x++) kt[x * SALA_TILE + i] = k[x];
    }
    sala__matrix_add(score, q, d, kt, c, d, SALA_TILE);
    sala__matrix_add(o, q, d, state, c, d, d);
    for (int i = 0; i < c; i++) {
        float *oi = o + i * d, *si = score + i * SALA_TILE;
        for (int x = 0; x < d; x++) oi[x] *= power[i + 1];
        for (int j = 0; j <= i; j++) si[j] *= power[i - j];
        sala__matrix_add(oi, si, SALA_TILE, v, 1, i + 1,
                         d); // only j <= i: a later token never enters
        sala__v16 scale = sala__set16(m->lin_scale);
        sala_act *to = a->o + ((row + i) * nh + h) * d;
        for (int x = 0; x < d; x += 16) sala__store_act16(to + x, sala__load16(oi + x) * scale);
    }
    for (int x = 0; x < d; x++)
        for (int j = 0; j < c; j++) kt[x * SALA_TILE + j] *= power[c - 1 - j];
    for (int x = 0; x < d * d; x++) state[x] *= power[c];
    sala__matrix_add(state, kt, SALA_TILE, v, d, c, d);
}

static size_t sala__gla_scratch(const sala_dims *m) { // floats
    size_t d = (size_t)m->lin_dim, t = SALA_TILE;
    return 4 * t * d + t * t + d + t + 1;
}

static void sala__op_gla_prefill_head(void *context, int64_t item, int thread) {
    sala__gla_job *job = (sala__gla_job *)context;
    const sala_gla_args *a = job->a;
    const sala_dims *m = a->dims;
    const sala_seq *s = &a->rows->seqs[item / m->lin_heads];
    int h = (int)(item % m->lin_heads), d = m->lin_dim;
    float *state =
        a->state + ((size_t)s->slot * (size_t)m->lin_heads + (size_t)h) * (size_t)(d * d);
    float *scratch = (float *)sala__cpu_scratch(job->cpu, thread);
    for (int done = 0; done < s->rows;) { // tiles end at absolute multiples of 64
        int position = a->rows->position[s->first_row + done];
        int c = SALA_TILE - position % SALA_TILE;
        if (c > s->rows - done) c = s->rows - done;
        sala__gla_tile(a, h, s->first_row + done, c, state, scratch);
        done += c;
        for (int i = 0; i < a->copies; i++)
            if (a->copy_after[i] == done)
                memcpy(a->copy_to[i] + (size_t)h * (size_t)(d * d), state,
                       sizeof(float) * (size_t)(d * d));
    }
}

static void sala__op_gla_prefill(sala__cpu *cpu, const sala_gla_args *a) {
    sala__gla_job job = {cpu, a};
    sala__gla_inputs(cpu, a);
    sala__parallel(cpu, (int64_t)a->rows->seq_count * a->dims->lin_heads, sala__op_gla_prefill_head,
                   &job);
}

// The rows S[x][:] of a state do not mix until they are read, so a head is walked key row by key
// row: replay the pending path, store, then give every node of the tree its own copy of the row,
// made from its parent's.
static void sala__op_gla_verify_head(void *context, int64_t item, int thread) {
    sala__gla_job *job = (sala__gla_job *)context;
    const sala_gla_args *a = job->a;
    const sala_dims *m = a->dims;
    int d = m->lin_dim, nh = m->lin_heads, nkv = m->lin_kv_heads;
    int h = (int)(item % nh), g = h / (nh / nkv);
    const sala_seq *s = &a->rows->seqs[item / nh];
    float *state = a->state + ((size_t)s->slot * (size_t)nh + (size_t)h) * (size_t)(d * d);
    sala__v16 decay = sala__set16(a->decay[h]);
    int nodes = a->o ? s->rows : 0, past = s->pending;
    float *pv = (float *)sala__cpu_scratch(job->cpu, thread); // [pending, d]
    float *v = pv + SALA_MAX_PATH * d, *row = v + SALA_MAX_ROWS * d,
          *o = row + SALA_MAX_ROWS * d; // [rows, d]
    const sala_act *pending_k =
        a->pending_k + ((size_t)s->slot * SALA_MAX_PATH * (size_t)nkv + (size_t)g) * (size_t)d;
    const sala_act *pending_v =
        a->pending_v + ((size_t)s->slot * SALA_MAX_PATH * (size_t)nkv + (size_t)g) * (size_t)d;
    for (int i = 0; i < past; i++) sala__load_row(pv + i * d, pending_v + i * nkv * d, d);
    for (int i = 0; i < nodes; i++)
        sala__load_row(v + i * d, a->v + ((int64_t)(s->first_row + i) * nkv + g) * d, d);
    memset(o, 0, sizeof(float) * (size_t)nodes * (size_t)d);
    for (int x = 0; x < d; x++) {
        float *sx = state + x * d;
        for (int i = 0; i < past; i++) {
            sala__v16 k = sala__set16(sala_act_f32(pending_k[i * nkv * d + x]));
            for (int y = 0; y < d; y += 16)
                sala__store16(sx + y, sala__fma16(k, sala__load16(pv + i * d + y),
                                                  decay * sala__load16(sx + y)));
        }
        for (int i = 0; i < nodes; i++) {
            int r = s->first_row + i, depth = a->rows->position[r] - s->stored;
            const float *from =
                depth == 0
                    ? sx
                    : row + (a->rows->path[r * SALA_MAX_PATH + depth - 1] - s->first_row) * d;
            sala__v16 k = sala__set16(sala_act_f32(a->k[((int64_t)r * nkv + g) * d + x]));
            sala__v16 q = sala__set16(sala_act_f32(a->q[((int64_t)r * nh + h) * d + x]));
            for (int y = 0; y < d; y += 16) {
                sala__v16 n =
                    sala__fma16(k, sala__load16(v + i * d + y), decay * sala__load16(from + y));
                sala__store16(row + i * d + y, n);
                sala__store16(o + i * d + y, sala__fma16(q, n, sala__load16(o + i * d + y)));
            }
        }
    }
    sala__v16 scale = sala__set16(m->lin_scale);
    for (int i = 0; i < nodes; i++) {
        sala_act *to = a->o + ((int64_t)(s->first_row + i) * nh + h) * d;
        for (int y = 0; y < d; y += 16)
            sala__store_act16(to + y, sala__load16(o + i * d + y) * scale);
    }
}

static size_t sala__gla_verify_scratch(const sala_dims *m) { // floats
    return (size_t)m->lin_dim * (SALA_MAX_PATH + 3 * SALA_MAX_ROWS);
}

static void sala__op_gla_verify(sala__cpu *cpu, const sala_gla_args *a) {
    sala__gla_job job = {cpu, a};
    sala__gla_inputs(cpu, a);
    sala__parallel(cpu, (int64_t)a->rows->seq_count * a->dims->lin_heads, sala__op_gla_verify_head,
                   &job);
}

static void sala__op_gate_row(void *context, int64_t r, int thread) {
    const sala_gate_args *a = (const sala_gate_args *)context;
    const sala_act *o = a->o + r * a->width;
    float inverse = a->norm.data ? sala__rms_inverse(o, a->width, a->eps) : 0;
    (void)thread;
    for (int i = 0; i < a->width; i += 16) {
        sala__v16 v = a->norm.data ? sala__round16(sala__normed16(o, inverse, &a->norm, i))
                                   : sala__load_act16(o + i);
        if (a->gate)
            v = v * sala__round16(sala__sigmoid16(sala__load_act16(a->gate + r * a->width + i)));
        sala__store_act16(a->y + r * a->width + i, v);
    }
}

static void sala__op_gate(sala__cpu *cpu, const sala_gate_args *a) {
    sala__parallel(cpu, a->rows, sala__op_gate_row, (void *)(uintptr_t)a);
}

// ---- sparse attention: keys, values and compressed rows, wherever they lie ----

// The vector of K/V head g at position u, as row r sees it: in its page, or with the node of r's
// path.
static const sala_act *sala__kv_at(const sala_dims *m, const sala_rows *rows, const sala_seq *s,
                                   const sala_act *pool, const sala_act *nodes, int r, int g,
                                   int u) {
    size_t d = (size_t)m->head_dim, kvh = (size_t)m->kv_heads;
    if (u < s->stored) {
        size_t page = (size_t)s->pages[u / m->block];
        return pool + ((page * kvh + (size_t)g) * (size_t)m->block + (size_t)(u % m->block)) * d;
    }
    size_t node = (size_t)rows->path[(size_t)r * SALA_MAX_PATH + (size_t)(u - s->stored)];
    return nodes + (node * kvh + (size_t)g) * d;
}

// Where compressed row j of a tier lives: with the page that holds its last token.
static sala_act *sala__tier_slot(const sala_dims *m, const sala_seq *s, sala_act *pool, int tier,
                                 int g, int j) {
    int last = sala_tier_last(m, tier, j), stride = m->stride * (tier == 1 ? 1 : 4);
    size_t slots = (size_t)sala_tier_slots(m, tier), page = (size_t)s->pages[last / m->block];
    size_t index =
        (page * (size_t)m->kv_heads + (size_t)g) * slots + (size_t)(last % m->block / stride);
    return pool + index * (size_t)m->head_dim;
}

// The same for reading, as row r sees it: a row completed by a node of its own path lies with that
// node.
static const sala_act *sala__tier_at(const sala_dims *m, const sala_rows *rows, const sala_seq *s,
                                     const sala_pages *pages, const sala_nodes *nodes, int tier,
                                     int r, int g, int j) {
    int last = sala_tier_last(m, tier, j);
    if (last < s->stored)
        return sala__tier_slot(m, s, tier == 1 ? pages->tier1 : pages->tier2, tier, g, j);
    size_t node = (size_t)rows->path[(size_t)r * SALA_MAX_PATH + (size_t)(last - s->stored)];
    const sala_act *base = tier == 1 ? nodes->tier1 : nodes->tier2;
    return base + (node * (size_t)m->kv_heads + (size_t)g) * (size_t)m->head_dim;
}

// Compressed row j: the mean of its window's keys, summed in position order.
static void sala__tier_mean(const sala_store_args *a, const sala_seq *s, int tier, int r, int g,
                            int j, sala_act *out) {
    const sala_dims *m = a->dims;
    int scale = tier == 1 ? 1 : 4, kernel = m->kernel * scale, first = m->stride * scale * j;
    for (int x = 0; x < m->head_dim; x += 16) {
        sala__v16 sum = sala__set16(0);
        for (int u = first; u < first + kernel; u++)
            sum = sum +
                  sala__load_act16(sala__kv_at(m, a->rows, s, a->pages.k, a->nodes.k, r, g, u) + x);
        sala__store_act16(out + x, sum / sala__set16((float)kernel));
    }
}

static void sala__op_store_copy(void *context, int64_t r, int thread) {
    const sala_store_args *a = (const sala_store_args *)context;
    const sala_dims *m = a->dims;
    const sala_seq *s = &a->rows->seqs[a->rows->seq[r]];
    size_t d = (size_t)m->head_dim, kvh = (size_t)m->kv_heads, u = (size_t)a->rows->position[r];
    (void)thread;
    for (size_t g = 0; g < kvh; g++) {
        size_t page = (size_t)s->pages[u / (size_t)m->block];
        size_t to = ((page * kvh + g) * (size_t)m->block + u % (size_t)m->block) * d,
               from = ((size_t)r * kvh + g) * d;
        memcpy(a->pages.k + to, a->nodes.k + from, d * sizeof(sala_act));
        memcpy(a->pages.v + to, a->nodes.v + from, d * sizeof(sala_act));
    }
}

// The compressed rows (none, or one of each tier) that the token of row r completes.
static void sala__op_store_tiers(void *context, int64_t r, int thread) {
    const sala_store_args *a = (const sala_store_args *)context;
    const sala_dims *m = a->dims;
    const sala_seq *s = &a->rows->seqs[a->rows->seq[r]];
    int n = a->rows->position[r] + 1;
    (void)thread;
    for (int tier = 1; tier <= 2; tier++) {
        int j = sala_tier_rows(m, tier, n) - 1;
        if (j < 0 || sala_tier_last(m, tier, j) != n - 1) continue;
        for (int g = 0; g < m->kv_heads; g++) {
            sala_act *out;
            if (a->rows->verify) {
                out = (tier == 1 ? a->nodes.tier1 : a->nodes.tier2) +
                      ((size_t)r * (size_t)m->kv_heads + (size_t)g) * (size_t)m->head_dim;
            } else {
                out =
                    sala__tier_slot(m, s, tier == 1 ? a->pages.tier1 : a->pages.tier2, tier, g, j);
            }
            sala__tier_mean(a, s, tier, (int)r, g, j, out);
        }
    }
}

static void sala__op_store_prefill(sala__cpu *cpu, const sala_store_args *a) {
    sala__parallel(cpu, a->rows->count, sala__op_store_copy, (void *)(uintptr_t)a);
    sala__parallel(cpu, a->rows->count, sala__op_store_tiers, (void *)(uintptr_t)a);
}

// ---- tiles of query rows ----
// Selection and attention work on tiles of up to 16 consecutive rows of one sequence and one K/V
// head, so that a block of keys is widened and transposed once for all of them. Sharing changes no
// bit: every element below is computed from its own row alone, in an order fixed by absolute
// positions.

#define SALA__QUERY_TILE 16

typedef struct sala__tile {
    const sala_seq *s;
    int first, count, g; // rows of the pass, K/V head
} sala__tile;

static int64_t sala__tile_count(const sala_rows *rows, int kv_heads) {
    int64_t n = 0;
    for (int i = 0; i < rows->seq_count; i++)
        n += (rows->seqs[i].rows + SALA__QUERY_TILE - 1) / SALA__QUERY_TILE;
    return n * kv_heads;
}

static sala__tile sala__tile_get(const sala_rows *rows, int kv_heads, int64_t item) {
    sala__tile t = {NULL, 0, 0, (int)(item % kv_heads)};
    int64_t n = item / kv_heads;
    for (int i = 0; i < rows->seq_count; i++) {
        int tiles = (rows->seqs[i].rows + SALA__QUERY_TILE - 1) / SALA__QUERY_TILE;
        if (n < tiles) {
            t.s = &rows->seqs[i];
            t.first = t.s->first_row + (int)n * SALA__QUERY_TILE;
            t.count = t.s->first_row + t.s->rows - t.first;
            if (t.count > SALA__QUERY_TILE) t.count = SALA__QUERY_TILE;
            break;
        }
        n -= tiles;
    }
    return t;
}

static int sala__group(const sala_dims *m) { // query heads that share one K/V head
    return m->heads / m->kv_heads;
}

static int sala__round_up(int n, int multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

static void sala__tile_queries(const sala_dims *m, const sala__tile *t, const sala_act *q,
                               float *out) {
    int group = sala__group(m), d = m->head_dim; // out: [rows, group, d]
    for (int i = 0; i < t->count; i++)
        for (int h = 0; h < group; h++)
            sala__load_row(out + (i * group + h) * d,
                           q + ((int64_t)(t->first + i) * m->heads + t->g * group + h) * d, d);
}

static void sala__transpose_into(float *kt, int columns, int column, const sala_act *key, int d) {
    for (int x = 0; x < d; x++) kt[x * columns + column] = sala_act_f32(key[x]);
}

// ---- block selection (model.md 6 and 8) ----

#define SALA__SCORE_TILE 64 // compressed rows scored at a time, at absolute multiples of it

typedef struct sala__select_job {
    sala__cpu *cpu;
    const sala_select_args *a;
} sala__select_job;

static size_t sala__select_scratch(const sala_dims *m, int64_t context) { // floats
    size_t d = (size_t)m->head_dim, q = SALA__QUERY_TILE * (size_t)sala__group(m);
    size_t rows = (size_t)(context / m->stride) + SALA__SCORE_TILE,
           blocks = (size_t)(context / m->block) + 2;
    return q * d + d * SALA__SCORE_TILE + q * SALA__SCORE_TILE + 2 * q + SALA__QUERY_TILE * rows +
           2 * blocks;
}

// Scores q.k * attn_scale of compressed rows j0 .. j0+63 for all queries of a tile: out [rows,
// group, 64]. Rows that a node of a query's own path completes (verify) differ from query to query:
// those elements are computed one by one, by the same fma chain.
static void sala__tier_scores(const sala_select_args *a, const sala__tile *t, int tier, int j0,
                              const float *q, float *kt, float *out) {
    const sala_dims *m = a->dims;
    int d = m->head_dim, group = sala__group(m), queries = t->count * group;
    int last_position = 0;
    for (int i = 0; i < t->count; i++)
        if (a->rows->position[t->first + i] > last_position)
            last_position = a->rows->position[t->first + i];
    int visible = sala_tier_rows(m, tier, last_position + 1),
        shared = sala_tier_rows(m, tier, t->s->stored);
    memset(kt, 0, sizeof(float) * (size_t)d * SALA__SCORE_TILE);
    memset(out, 0, sizeof(float) * (size_t)queries * SALA__SCORE_TILE);
    for (int j = j0; j < j0 + SALA__SCORE_TILE && j < visible && j < shared; j++) {
        const sala_act *key =
            sala__tier_at(m, a->rows, t->s, &a->pages, &a->nodes, tier, t->first, t->g, j);
        sala__transpose_into(kt, SALA__SCORE_TILE, j - j0, key, d);
    }
    sala__matrix_add(out, q, d, kt, queries, d, SALA__SCORE_TILE);
    for (int i = 0; i < t->count; i++) {
        int own = sala_tier_rows(m, tier, a->rows->position[t->first + i] + 1);
        for (int j = j0 > shared ? j0 : shared; j < own && j < j0 + SALA__SCORE_TILE; j++) {
            const sala_act *key =
                sala__tier_at(m, a->rows, t->s, &a->pages, &a->nodes, tier, t->first + i, t->g, j);
            for (int h = 0; h < group; h++) {
                float sum = 0;
                for (int x = 0; x < d; x++)
                    sum = fmaf(q[(i * group + h) * d + x], sala_act_f32(key[x]), sum);
                out[(i * group + h) * SALA__SCORE_TILE + j - j0] = sum;
            }
        }
    }
    for (int x = 0; x < queries * SALA__SCORE_TILE; x++) out[x] *= m->attn_scale;
}

static inline sala__v16 sala__larger16(sala__v16 a, sala__v16 b) {
    sala__v16 r = b;
    for (int l = 0; l < 16; l++)
        if (a[l] > b[l]) r[l] = a[l];
    return r;
}

static inline sala__v16 sala__lanes_below(sala__v16 v, int count,
                                          float otherwise) { // keep the first `count` lanes
    for (int l = 0; l < 16; l++)
        if (l >= count) v[l] = otherwise;
    return v;
}

// One step of a running sum of exponentials over `count` of 64 scores: m and l describe what came
// before.
static void sala__softmax_step(const float *s, int count, int width, float *max, float *sum) {
    sala__v16 top = sala__set16(-INFINITY), total = sala__set16(0);
    for (int x = 0; x < width && x < count; x += 16)
        top = sala__larger16(top, sala__lanes_below(sala__load16(s + x), count - x, -INFINITY));
    float m = sala__max16(top);
    if (m < *max) m = *max;
    sala__v16 shift = sala__set16(m);
    for (int x = 0; x < width && x < count; x += 16)
        total = total +
                sala__exp16(sala__lanes_below(sala__load16(s + x), count - x, -INFINITY) - shift);
    *sum = fmaf(*sum, expf(*max - m), sala__sum16(total));
    *max = m;
}

// score[j] of every row of tier 1 for every query row of the tile: [rows, stride_scores].
static void sala__row_scores(const sala_select_args *a, const sala__tile *t, float *scratch,
                             float *score, size_t width) {
    const sala_dims *m = a->dims;
    int group = sala__group(m), queries = t->count * group, d = m->head_dim, n1 = 0, n2 = 0;
    float *q = scratch, *kt = q + SALA__QUERY_TILE * group * d, *s = kt + d * SALA__SCORE_TILE;
    float *max = s + SALA__QUERY_TILE * group * SALA__SCORE_TILE,
          *sum = max + SALA__QUERY_TILE * group;
    sala__tile_queries(m, t, a->q, q);
    for (int i = 0; i < queries; i++) max[i] = -INFINITY, sum[i] = 0;
    for (int i = 0; i < t->count; i++) {
        int n = a->rows->position[t->first + i] + 1;
        if (sala_tier_rows(m, 1, n) > n1) n1 = sala_tier_rows(m, 1, n);
        if (sala_tier_rows(m, 2, n) > n2) n2 = sala_tier_rows(m, 2, n);
    }
    for (int j = 0; j < n2; j += SALA__SCORE_TILE) { // the normaliser, from tier 2
        sala__tier_scores(a, t, 2, j, q, kt, s);
        for (int i = 0; i < queries; i++) {
            int own = sala_tier_rows(m, 2, a->rows->position[t->first + i / group] + 1) - j;
            if (own > 0)
                sala__softmax_step(s + i * SALA__SCORE_TILE, own, SALA__SCORE_TILE, &max[i],
                                   &sum[i]);
        }
    }
    for (int i = 0; i < queries; i++) max[i] += logf(sum[i]); // now log-sum-exp
    for (int j = 0; j < n1; j += SALA__SCORE_TILE) {
        sala__tier_scores(a, t, 1, j, q, kt, s);
        for (int i = 0; i < t->count; i++) {
            int n = a->rows->position[t->first + i] + 1;
            float *to = score + (size_t)i * width + j;
            for (int x = 0; x < SALA__SCORE_TILE; x += 16) {
                sala__v16 total = sala__set16(0);
                if (sala_tier_rows(m, 2, n) > 0)
                    for (int h = 0; h < group; h++) {
                        const float *from = s + (i * group + h) * SALA__SCORE_TILE + x;
                        total = total +
                                sala__exp16(sala__load16(from) - sala__set16(max[i * group + h]));
                    }
                sala__store16(to + x, total);
            }
        }
    }
}

static uint32_t sala__order_key(float x) { // monotone: a < b as floats <=> key(a) < key(b)
    uint32_t u = sala_f32_bits(x);
    if (u == 0x80000000u) u = 0; // -0 equals 0
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Mark what to take: the k largest of n values, the lower index first among equals. Radix select,
// four passes of eight bits: the result depends on the values alone. Writes k indices in ascending
// order.
static void sala__top_k(const float *value, int n, int k, int32_t *out) {
    uint32_t prefix = 0, mask = 0;
    int need = k, taken = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {0};
        for (int i = 0; i < n; i++) {
            uint32_t key = sala__order_key(value[i]);
            if ((key & mask) == prefix) count[key >> shift & 255]++;
        }
        int digit = 255;
        while (count[digit] < need) need -= count[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int i = 0; i < n; i++) { // above the threshold: all; equal to it: the first `need`
        uint32_t key = sala__order_key(value[i]);
        if (key > prefix || (key == prefix && need-- > 0)) out[taken++] = i;
    }
}

// Pool row scores to block scores (window R + kernel/stride - 1, so neighbours share rows), force
// the first blocks and the window, and take the top_k.
static void sala__select_row(const sala_select_args *a, int r, int g, const float *score,
                             float *block_score) {
    const sala_dims *m = a->dims;
    int n = a->rows->position[r] + 1, qb = (n - 1) / m->block, n1 = sala_tier_rows(m, 1, n);
    int per_block = m->block / m->stride, pad = m->kernel / m->stride - 1;
    int k = m->top_k < qb + 1 ? m->top_k : qb + 1;
    int32_t *blocks = a->blocks + ((int64_t)r * m->kv_heads + g) * m->top_k;
    a->count[(int64_t)r * m->kv_heads + g] = k;
    if (k == qb + 1) {
        for (int b = 0; b < k; b++) blocks[b] = b;
        return;
    }
    for (int b = 0; b <= qb; b++) {
        int from = per_block * b - pad, to = per_block * (b + 1);
        float best = -INFINITY;
        if (from < 0) from = 0;
        if (to > n1) to = n1;
        for (int j = from; j < to; j++)
            if (score[j] > best) best = score[j];
        block_score[b] = b < m->init_blocks || b >= qb - m->local_blocks ? INFINITY : best;
    }
    sala__top_k(block_score, qb + 1, k, blocks);
}

static void sala__op_select_tile(void *context, int64_t item, int thread) {
    sala__select_job *job = (sala__select_job *)context;
    const sala_select_args *a = job->a;
    const sala_dims *m = a->dims;
    sala__tile t = sala__tile_get(a->rows, m->kv_heads, item);
    int group = sala__group(m), d = m->head_dim, last = 0, needed = 0;
    for (int i = 0; i < t.count; i++) { // scores matter only where something can be dropped
        int position = a->rows->position[t.first + i];
        if (position > last) last = position;
        needed |= position + 1 >= m->dense_len && position / m->block + 1 > m->top_k;
    }
    float *scratch = (float *)sala__cpu_scratch(job->cpu, thread);
    float *score =
        scratch + SALA__QUERY_TILE * group * (d + SALA__SCORE_TILE + 2) + d * SALA__SCORE_TILE;
    size_t width = (size_t)sala__round_up(sala_tier_rows(m, 1, last + 1), SALA__SCORE_TILE);
    float *block_score = score + SALA__QUERY_TILE * width;
    if (needed) sala__row_scores(a, &t, scratch, score, width);
    for (int i = 0; i < t.count; i++) {
        int r = t.first + i;
        if (a->rows->position[r] + 1 < m->dense_len)
            a->count[(int64_t)r * m->kv_heads + t.g] = -1;
        else
            sala__select_row(a, r, t.g, score + (size_t)i * width, block_score);
    }
}

static void sala__op_select(sala__cpu *cpu, const sala_select_args *a) {
    sala__select_job job = {cpu, a};
    sala_store_args store = {a->dims, a->rows, a->nodes, a->pages};
    if (a->rows->verify) sala__parallel(cpu, a->rows->count, sala__op_store_tiers, &store);
    sala__parallel(cpu, sala__tile_count(a->rows, a->dims->kv_heads), sala__op_select_tile, &job);
}

// ---- attention over the selected blocks ----

typedef struct sala__attend_job {
    sala__cpu *cpu;
    const sala_attend_args *a;
} sala__attend_job;

typedef struct sala__attend_work { // one tile's working set, in per-thread scratch
    int columns;                   // block, rounded up to whole vectors
    float *q, *o;                  // [rows, group, d]
    float *kt;                     // [d, columns]
    float *v;                      // [columns, d]
    float *s;                      // [rows, group, columns]
    float *max, *sum;              // [rows, group]
} sala__attend_work;

static size_t sala__attend_scratch(const sala_dims *m) { // floats
    size_t d = (size_t)m->head_dim, q = SALA__QUERY_TILE * (size_t)sala__group(m);
    size_t columns = (size_t)sala__round_up(m->block, 16);
    return 2 * q * d + 2 * d * columns + q * columns + 2 * q;
}

static sala__attend_work sala__attend_layout(const sala_dims *m, float *scratch) {
    sala__attend_work w;
    int d = m->head_dim, q = SALA__QUERY_TILE * sala__group(m);
    w.columns = sala__round_up(m->block, 16);
    w.q = scratch;
    w.o = w.q + q * d;
    w.kt = w.o + q * d;
    w.v = w.kt + d * w.columns;
    w.s = w.v + d * w.columns;
    w.max = w.s + q * w.columns;
    w.sum = w.max + q;
    return w;
}

// Widen `count` keys and values of block b, as row r sees them.
static void sala__attend_gather(const sala_attend_args *a, const sala__tile *t,
                                const sala__attend_work *w, int r, int b, int count) {
    const sala_dims *m = a->dims;
    int d = m->head_dim;
    for (int j = 0; j < count; j++) {
        int u = b * m->block + j;
        const sala_act *k = sala__kv_at(m, a->rows, t->s, a->pages.k, a->nodes.k, r, t->g, u);
        const sala_act *v = sala__kv_at(m, a->rows, t->s, a->pages.v, a->nodes.v, r, t->g, u);
        sala__transpose_into(w->kt, w->columns, j, k, d);
        sala__load_row(w->v + j * d, v, d);
    }
}

// One block for rows i0 .. i1-1 of the tile: scores, then for each query one step of the running
// softmax.
static void sala__attend_block(const sala_attend_args *a, const sala__tile *t,
                               const sala__attend_work *w, int i0, int i1, int b) {
    const sala_dims *m = a->dims;
    int group = sala__group(m), d = m->head_dim, n = w->columns;
    float *s = w->s + i0 * group * n;
    memset(s, 0, sizeof(float) * (size_t)((i1 - i0) * group * n));
    sala__matrix_add(s, w->q + i0 * group * d, d, w->kt, (i1 - i0) * group, d, n);
    for (int i = i0 * group; i < i1 * group; i++) {
        int count = a->rows->position[t->first + i / group] + 1 - b * m->block;
        if (count > m->block) count = m->block;
        float *si = w->s + i * n, *oi = w->o + i * d;
        sala__v16 top = sala__set16(-INFINITY), total = sala__set16(0);
        for (int x = 0; x < n; x += 16) {
            sala__v16 v = sala__load16(si + x) * sala__set16(m->attn_scale);
            if (count - x < 16) v = sala__lanes_below(v, count - x, -INFINITY);
            sala__store16(si + x, v);
            top = sala__larger16(top, v);
        }
        float max = sala__max16(top);
        if (max < w->max[i]) max = w->max[i];
        for (int x = 0; x < n; x += 16) {
            sala__v16 p = sala__exp16(sala__load16(si + x) - sala__set16(max));
            sala__store16(si + x, p);
            total = total + p;
        }
        float carry = expf(w->max[i] - max);
        w->sum[i] = fmaf(w->sum[i], carry, sala__sum16(total));
        w->max[i] = max;
        if (carry != 1)
            for (int x = 0; x < d; x += 16)
                sala__store16(oi + x, sala__load16(oi + x) * sala__set16(carry));
        sala__matrix_add(oi, si, n, w->v, 1, count, d);
    }
}

// Does row i of the tile attend to block b? `cursor` walks its ascending list.
static int sala__attends(const sala_attend_args *a, const sala__tile *t, int i, int b,
                         int *cursor) {
    const sala_dims *m = a->dims;
    int64_t list = (int64_t)(t->first + i) * m->kv_heads + t->g;
    if (a->count[list] < 0) return b <= a->rows->position[t->first + i] / m->block;
    if (*cursor >= a->count[list] || a->blocks[list * m->top_k + *cursor] != b) return 0;
    ++*cursor;
    return 1;
}

static int sala__next_block(const sala_attend_args *a, const sala__tile *t, int after,
                            const int *cursor) {
    int next = INT_MAX; // the lowest block above `after` that any row of the tile attends to
    for (int i = 0; i < t->count; i++) {
        int64_t list = (int64_t)(t->first + i) * a->dims->kv_heads + t->g;
        int b = INT_MAX;
        if (a->count[list] < 0) {
            if (after + 1 <= a->rows->position[t->first + i] / a->dims->block) b = after + 1;
        } else if (cursor[i] < a->count[list]) {
            b = a->blocks[list * a->dims->top_k + cursor[i]];
        }
        if (b < next) next = b;
    }
    return next;
}

static void sala__op_attend_tile(void *context, int64_t item, int thread) {
    sala__attend_job *job = (sala__attend_job *)context;
    const sala_attend_args *a = job->a;
    const sala_dims *m = a->dims;
    sala__tile t = sala__tile_get(a->rows, m->kv_heads, item);
    sala__attend_work w = sala__attend_layout(m, (float *)sala__cpu_scratch(job->cpu, thread));
    int group = sala__group(m), d = m->head_dim, cursor[SALA__QUERY_TILE] = {0},
        takes[SALA__QUERY_TILE];
    sala__tile_queries(m, &t, a->q, w.q);
    memset(w.o, 0, sizeof(float) * (size_t)(t.count * group * d));
    memset(w.kt, 0, sizeof(float) * (size_t)(d * w.columns));
    for (int i = 0; i < t.count * group; i++) w.max[i] = -INFINITY, w.sum[i] = 0;
    for (int b = sala__next_block(a, &t, -1, cursor); b != INT_MAX;
         b = sala__next_block(a, &t, b, cursor)) {
        int shared =
            t.s->stored - b * m->block; // keys in the page; the others differ from path to path
        if (shared > m->block) shared = m->block;
        int own = shared < m->block && a->rows->verify;
        for (int i = 0; i < t.count; i++) takes[i] = sala__attends(a, &t, i, b, &cursor[i]);
        if (!own) sala__attend_gather(a, &t, &w, t.first, b, shared);
        for (int i = 0; i < t.count;) { // runs of rows that take this block
            int end = i + 1;
            if (takes[i]) {
                if (own) {
                    int count = a->rows->position[t.first + i] + 1 - b * m->block;
                    sala__attend_gather(a, &t, &w, t.first + i, b,
                                        count < m->block ? count : m->block);
                } else {
                    while (end < t.count && takes[end]) end++;
                }
                sala__attend_block(a, &t, &w, i, end, b);
            }
            i = end;
        }
    }
    for (int i = 0; i < t.count * group; i++) {
        sala_act *to =
            a->o + ((int64_t)(t.first + i / group) * m->heads + t.g * group + i % group) * d;
        sala__v16 sum = sala__set16(w.sum[i]);
        for (int x = 0; x < d; x += 16)
            sala__store_act16(to + x, sala__load16(w.o + i * d + x) / sum);
    }
}

static void sala__op_attend(sala__cpu *cpu, const sala_attend_args *a) {
    const sala_dims *m = a->dims;
    sala__attend_job job = {cpu, a};
    sala__parallel(cpu, sala__tile_count(a->rows, m->kv_heads), sala__op_attend_tile, &job);
    sala_gate_args gate = {a->rows->count,
                           m->heads * m->head_dim,
                           m->eps,
                           sala_plain_weight(NULL, 0, 0, 0),
                           a->gate,
                           a->o,
                           a->o};
    if (a->gate) sala__op_gate(cpu, &gate);
}

// ---- what follows a product; commit ----

static void sala__swiglu_row(void *context, int64_t r, int thread) { // y = silu(y) * scratch
    const sala_gemm_swiglu_args *a = (const sala_gemm_swiglu_args *)context;
    int width = a->gate.n;
    (void)thread;
    sala_act *y = a->y + r * width;
    const sala_act *up = a->scratch + r * width;
    for (int i = 0; i < width; i += 16) {
        sala__v16 g = sala__load_act16(y + i);
        g = sala__round16(g * sala__sigmoid16(g));
        sala__store_act16(y + i, g * sala__load_act16(up + i));
        if (a->quant.codes) sala__quantize16(&a->quant, y + i, r, i, width);
    }
}

static void sala__op_gemm_swiglu(sala__cpu *cpu, const sala_gemm_swiglu_args *a) {
    sala_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.rows = a->rows;
    gemm.count = 2;
    gemm.x = a->x;
    gemm.w[0] = a->gate;
    gemm.w[1] = a->up;
    gemm.y[0] = a->y;
    gemm.y[1] = a->scratch;
    gemm.qx = a->qx;
    sala__op_gemm(cpu, &gemm);
    sala__parallel(cpu, a->rows, sala__swiglu_row, (void *)(uintptr_t)a);
}

static void sala__quantize_row(void *context, int64_t r, int thread) {
    const sala_quantize_args *a = (const sala_quantize_args *)context;
    (void)thread;
    for (int k = 0; k < a->width; k += 16)
        sala__quantize16(&a->quant, a->x + r * a->width + k, r, k, a->width);
}

static void sala__op_quantize(sala__cpu *cpu, const sala_quantize_args *a) {
    sala__parallel(cpu, a->rows, sala__quantize_row, (void *)(uintptr_t)a);
}

static void sala__op_gemm_norm(sala__cpu *cpu, const sala_gemm_norm_args *a) {
    sala_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.rows = a->norm.rows;
    gemm.count = 1;
    gemm.x = a->input;
    gemm.w[0] = a->w;
    gemm.y[0] = (sala_act *)(uintptr_t)a->norm.branch;
    gemm.qx = a->qx;
    sala__op_gemm(cpu, &gemm);
    sala__op_norm(cpu, &a->norm);
}

static void sala__op_accept(sala__cpu *cpu, const sala_accept_args *a) {
    (void)cpu;
    for (int i = 0; i < a->rows->seq_count; i++) {
        const sala_seq *s = &a->rows->seqs[i];
        int n = 0;
        for (int r = s->first_row; r >= 0; r = sala_child_row(a->rows, s, r, a->chosen[r]))
            a->accepted_rows[i * SALA_MAX_PATH + n++] = r;
        a->accepted[i] = n;
    }
}

// One accepted node of a sparse layer: K, V and the compressed rows it completed go where prefill
// puts them.
static void sala__commit_sparse(const sala_commit_args *a, const sala_seq *s, int layer, int r) {
    const sala_dims *m = a->dims;
    const sala_nodes *nodes = &a->nodes[layer];
    const sala_pages *pages = &a->pages[layer];
    size_t d = (size_t)m->head_dim, kvh = (size_t)m->kv_heads;
    int u = a->rows->position[r];
    for (size_t g = 0; g < kvh; g++) {
        size_t from = ((size_t)r * kvh + g) * d;
        size_t to = (((size_t)s->pages[u / m->block] * kvh + g) * (size_t)m->block +
                     (size_t)(u % m->block)) *
                    d;
        memcpy(pages->k + to, nodes->k + from, d * sizeof(sala_act));
        memcpy(pages->v + to, nodes->v + from, d * sizeof(sala_act));
        for (int tier = 1; tier <= 2; tier++) {
            int j = sala_tier_rows(m, tier, u + 1) - 1;
            if (j < 0 || sala_tier_last(m, tier, j) != u) continue;
            sala_act *slot =
                sala__tier_slot(m, s, tier == 1 ? pages->tier1 : pages->tier2, tier, (int)g, j);
            memcpy(slot, (tier == 1 ? nodes->tier1 : nodes->tier2) + from, d * sizeof(sala_act));
        }
    }
}

static void sala__op_commit_seq(void *context, int64_t i, int thread) {
    const sala_commit_args *a = (const sala_commit_args *)context;
    const sala_seq *s = &a->rows->seqs[i];
    size_t width = (size_t)a->dims->lin_kv_heads * (size_t)a->dims->lin_dim;
    (void)thread;
    for (int n = 0; n < a->accepted[i]; n++) {
        int r = a->accepted_rows[i * SALA_MAX_PATH + n];
        for (int l = 0; l < a->sparse_layers; l++) sala__commit_sparse(a, s, l, r);
        for (int l = 0; l < a->lightning_layers; l++) {
            size_t from = ((size_t)l * (size_t)a->node_rows + (size_t)r) * width;
            size_t to =
                (((size_t)l * (size_t)a->slots + (size_t)s->slot) * SALA_MAX_PATH + (size_t)n) *
                width;
            memcpy(a->pending_k + to, a->node_k + from, width * sizeof(sala_act));
            memcpy(a->pending_v + to, a->node_v + from, width * sizeof(sala_act));
        }
    }
}

static void sala__op_commit(sala__cpu *cpu, const sala_commit_args *a) {
    sala__parallel(cpu, a->rows->seq_count, sala__op_commit_seq, (void *)(uintptr_t)a);
}

// ---- the draft head ----

static void sala__tree_root(sala_tree *t, int32_t token) {
    memset(t, 0, sizeof *t);
    t->count = 1;
    t->token[0] = token;
    t->parent[0] = -1;
}

static void sala__op_capture_row(void *context, int64_t r, int thread) {
    const sala_capture_args *a = (const sala_capture_args *)context;
    const sala_act *x = a->x + r * a->width;
    sala_act *to = a->features + (3 * r + a->third) * a->width;
    (void)thread;
    if (!a->norm.data) {
        memcpy(to, x, (size_t)a->width * sizeof *x);
        return;
    }
    float inverse = sala__rms_inverse(x, a->width, a->eps);
    for (int i = 0; i < a->width; i += 16)
        sala__store_act16(to + i, sala__normed16(x, inverse, &a->norm, i));
}

static void sala__op_capture(sala__cpu *cpu, const sala_capture_args *a) {
    sala__parallel(cpu, a->rows, sala__op_capture_row, (void *)(uintptr_t)a);
}

static void sala__op_keep(sala__cpu *cpu, const sala_keep_args *a) {
    size_t width = (size_t)a->width;
    (void)cpu;
    for (int i = 0; i < a->rows->seq_count; i++) {
        int place = a->place[a->rows->seqs[i].slot];
        for (int n = 0; n < a->accepted[i] && place >= 0; n++) {
            int r = a->accepted_rows[i * SALA_MAX_PATH + n];
            int to = place * SALA_DRAFT_DEBT + a->rows->position[r] % SALA_DRAFT_DEBT;
            memcpy(a->debt + (size_t)to * width, a->features + (size_t)r * width,
                   width * sizeof(sala_act));
        }
    }
}

static void sala__op_gather(sala__cpu *cpu, const sala_gather_args *a) {
    size_t width = (size_t)a->width;
    (void)cpu;
    for (int r = 0; r < a->rows; r++)
        if (a->from[r] >= 0)
            memcpy(a->to + (size_t)r * width, a->features + (size_t)a->from[r] * width,
                   width * sizeof(sala_act));
}

// Row r of a later step: which candidate of the step before it is.
static void sala__growth_choose(const sala_growth *g, int step, int r) {
    float score[SALA_MAX_TOPK * SALA_MAX_TOPK];
    int seq = r / g->topk, made = sala_growth_made(g, step - 1);
    for (int c = 0; c < made; c++) score[c] = sala_growth_score(g, step - 1, seq, c);
    for (int c = 0; c < made; c++)
        if (sala_growth_rank(score, made, c) == r % g->topk)
            sala_growth_take(g, step, seq, r % g->topk, c, score[c]);
}

static void sala__op_draft_input_row(void *context, int64_t r, int thread) {
    const sala_draft_input_args *a = (const sala_draft_input_args *)context;
    const sala_growth *g = &a->growth;
    int row = (int)r, h = a->width;
    sala_act *x = a->x + r * h, *u = a->u + r * 2 * h;
    (void)thread;
    if (a->step > 0) {
        row = sala_growth_row(g, a->step, 0, (int)r);
        int parent = g->parent[row] - sala_growth_row(g, a->step - 1, 0, 0);
        memcpy(x, a->f + (int64_t)parent * h, (size_t)h * sizeof *x);
    }
    for (int i = 0; i < h && a->bias.data && a->step == 0; i += 16)
        sala__store_act16(x + i, sala__load_act16(x + i) +
                                     sala__load_weight16(a->bias.data, a->bias.format, (size_t)i));
    size_t from = (size_t)g->token[row] * (size_t)h;
    for (int i = 0; i < h; i += 16) // the embedding where its norm will be
        sala__store_act16(u + i,
                          sala__load_weight16(a->embed.data, a->embed.format, from + (size_t)i));
    float e = sala__rms_inverse(u, h, a->eps), f = sala__rms_inverse(x, h, a->eps);
    for (int i = 0; i < h; i += 16) {
        sala__store_act16(u + i, sala__normed16(u, e, &a->input_norm, i));
        sala__store_act16(u + h + i, sala__normed16(x, f, &a->hidden_norm, i));
    }
}

static void sala__op_draft_input(sala__cpu *cpu, const sala_draft_input_args *a) {
    for (int r = 0; r < a->rows && a->step > 0; r++) sala__growth_choose(&a->growth, a->step, r);
    sala__parallel(cpu, a->rows, sala__op_draft_input_row, (void *)(uintptr_t)a);
}

static void sala__op_draft_turn(sala__cpu *cpu, const sala_draft_turn_args *a) {
    const sala_dims *m = a->dims;
    sala_store_args store;
    sala_qk_args qk;
    memset(&qk, 0, sizeof qk);
    qk.rows = a->count;
    qk.heads = a->heads;
    qk.kv_heads = m->kv_heads;
    qk.dim = m->head_dim;
    qk.cos_sin = a->cos_sin;
    qk.q = a->q;
    qk.k = a->k;
    sala__op_qk_norm_rope(cpu, &qk);
    memset(&store, 0, sizeof store);
    store.dims = a->dims;
    store.rows = a->rows;
    store.nodes.k = a->k;
    store.nodes.v = a->v;
    store.pages = a->pages;
    for (int r = 0; r < a->count && a->pages.k; r++)
        if (a->rows->seq[r] >= 0) sala__op_store_copy(&store, r, 0);
}

static void sala__op_draft_top_row(void *context, int64_t r, int thread) {
    const sala_draft_top_args *a = (const sala_draft_top_args *)context;
    const float *x = a->logits + r * a->vocab;
    uint64_t key[SALA_MAX_TOPK + 1] = {0}; // the best first
    double sum = 0;
    (void)thread;
    for (int i = 0; i < a->vocab; i++) {
        int j = a->topk;
        for (key[j] = sala_top_key(x[i], i); j > 0 && key[j] > key[j - 1]; j--) {
            uint64_t better = key[j];
            key[j] = key[j - 1];
            key[j - 1] = better;
        }
    }
    float max = sala_top_value(key[0]);
    for (int i = 0; i < a->vocab; i++) sum += (double)expf(x[i] - max);
    for (int j = 0; j < a->topk; j++) sala_top_put(a, r, j, key[j], key[0], max + logf((float)sum));
}

static void sala__op_draft_top(sala__cpu *cpu, const sala_draft_top_args *a) {
    sala__parallel(cpu, a->rows, sala__op_draft_top_row, (void *)(uintptr_t)a);
}

static void sala__op_draft_grow_seq(void *context, int64_t s, int thread) {
    const sala_draft_grow_args *a = (const sala_draft_grow_args *)context;
    const sala_growth *g = &a->growth;
    sala_tree *tree = &a->trees[s];
    float score[SALA_CANDIDATES];
    int32_t place[SALA_CANDIDATES], all = sala_growth_all(g);
    (void)thread;
    sala__tree_root(tree, g->token[s]);
    for (int c = 0; c < all; c++) score[c] = sala_growth_last(g, (int)s, c);
    for (int c = 0; c < all; c++) {
        place[c] = -1;
        if (score[c] == -INFINITY || sala_growth_rank(score, all, c) >= g->limit[2 * s + 1] - 1)
            continue;
        place[c] = tree->count++;
        sala_growth_node(g, (int)s, c, place[c], score[c], place, tree);
    }
}

static void sala__op_draft_grow(sala__cpu *cpu, const sala_draft_grow_args *a) {
    sala__parallel(cpu, a->growth.seqs, sala__op_draft_grow_seq, (void *)(uintptr_t)a);
}

// What one thread needs for the largest operation, in bytes.
static size_t sala__ops_scratch(const sala_dims *m, int64_t context) {
    size_t need = sala__gla_scratch(m), other[3];
    other[0] = sala__gla_verify_scratch(m);
    other[1] = sala__select_scratch(m, context);
    other[2] = sala__attend_scratch(m);
    for (int i = 0; i < 3; i++)
        if (other[i] > need) need = other[i];
    return need * sizeof(float);
}

// The dispatcher: the layer loop names an operation, the back end runs it.
enum {
#define SALA__OP_ID(name, args) SALA__OP_##name,
    SALA_OPERATIONS(SALA__OP_ID)
#undef SALA__OP_ID
        SALA__OP_COUNT
};

static void sala__run_cpu(sala__cpu *cpu, int operation, const void *args) {
    switch (operation) {
#define SALA__OP_CASE(name, args_name)                                                             \
    case SALA__OP_##name: sala__op_##name(cpu, (const sala_##args_name##_args *)args); break;
        SALA_OPERATIONS(SALA__OP_CASE)
#undef SALA__OP_CASE
    default: break;
    }
}
/* -----------------------------------------------------------------------------------------------
   [8] CUDA, THE DEVICE: driver, compiler, cache, memory

   Nothing of CUDA is needed to build this file: the driver and NVRTC (CUDA's compiler as a library)
   are opened at run time, through one table of function pointers. $SALA_CUDA and $SALA_NVRTC name
   other libraries to use instead; the kernel simulator of the tests is such a library.

   A good guest: the device's primary context is shared with whatever else the process does with
   CUDA, pushed at the start of a public call and popped at its end (sala__cuda_enter, _leave).
   Everything below that takes a sala__cuda and touches the device wants to stand between the two,
   except open and close, which enter by themselves.
   -------------------------------------------------------------------------------------------- */

#include <dirent.h>
#include <dlfcn.h>
#include <glob.h>
#include <signal.h>

/* The sources of the kernels, for NVRTC. The assembler finds them beside this header through the -I
   option, or in the folder where the compiler runs. */
__asm__(".pushsection .rodata\n"
        "sala__source_cu: .incbin \"sala.cu\"\n .byte 0\n"
        "sala__source_kernels: .incbin \"kernels.h\"\n .byte 0\n"
        ".popsection\n");
extern const char sala__source_cu[] __attribute__((visibility("hidden")));
extern const char sala__source_kernels[] __attribute__((visibility("hidden")));

// ---- the driver and the compiler, as far as they are used ----
// Layouts and numbers are those of cuda.h; tests/test_cuda_host.c compares them with a toolkit's.

typedef unsigned sala__cu_result;           // 0: success
typedef unsigned long long sala__cu_memory; // an address on the device
typedef int sala__cu_device;
typedef struct sala__cu_context_body *sala__cu_context;
typedef struct sala__cu_stream_body *sala__cu_stream;
typedef struct sala__cu_event_body *sala__cu_event;
typedef struct sala__cu_module_body *sala__cu_module;
typedef struct sala__cu_function_body *sala__cu_function;
typedef struct sala__cu_graph_body *sala__cu_graph;
typedef struct sala__cu_exec_body *sala__cu_exec; // an instantiated graph
typedef struct sala__cu_program_body *sala__cu_program;

typedef struct sala__cu_attribute { // CUlaunchAttribute
    unsigned id;
    char gap[4];
    union {
        char bytes[64];
        int allowed; // programmatic stream serialisation
        uint64_t alignment;
    } value;
} sala__cu_attribute;

typedef struct sala__cu_launch { // CUlaunchConfig
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    sala__cu_stream stream;
    sala__cu_attribute *attributes; // [attribute_count]
    unsigned attribute_count;
} sala__cu_launch;

enum { // values of cuda.h
    SALA__CU_OUT_OF_MEMORY = 2,
    SALA__CU_NO_DEVICE = 100,
    SALA__CU_NOT_FOUND = 500,
    SALA__CU_DEVICE_MULTIPROCESSORS = 16,
    SALA__CU_DEVICE_MAJOR = 75,
    SALA__CU_DEVICE_MINOR = 76,
    SALA__CU_DEVICE_SHARED = 97, // bytes that a block may ask for
    SALA__CU_FUNCTION_MAX_DYNAMIC_SHARED = 8,
    SALA__CU_FUNCTION_CARVEOUT = 9,
    SALA__CU_STREAM_NON_BLOCKING = 1,
    SALA__CU_CAPTURE_THREAD_LOCAL = 1,
    SALA__CU_LAUNCH_PROGRAMMATIC = 6
};

// X(exported name, parameters); all return a sala__cu_result.
#define SALA__CU_DRIVER(X)                                                                         \
    X(cuInit, (unsigned))                                                                          \
    X(cuDriverGetVersion, (int *))                                                                 \
    X(cuGetErrorName, (sala__cu_result, const char **))                                            \
    X(cuGetErrorString, (sala__cu_result, const char **))                                          \
    X(cuDeviceGetCount, (int *))                                                                   \
    X(cuDeviceGet, (sala__cu_device *, int))                                                       \
    X(cuDeviceGetName, (char *, int, sala__cu_device))                                             \
    X(cuDeviceGetAttribute, (int *, unsigned, sala__cu_device))                                    \
    X(cuDeviceTotalMem_v2, (size_t *, sala__cu_device))                                            \
    X(cuDevicePrimaryCtxRetain, (sala__cu_context *, sala__cu_device))                             \
    X(cuDevicePrimaryCtxRelease_v2, (sala__cu_device))                                             \
    X(cuCtxPushCurrent_v2, (sala__cu_context))                                                     \
    X(cuCtxPopCurrent_v2, (sala__cu_context *))                                                    \
    X(cuMemGetInfo_v2, (size_t *, size_t *))                                                       \
    X(cuMemAlloc_v2, (sala__cu_memory *, size_t))                                                  \
    X(cuMemFree_v2, (sala__cu_memory))                                                             \
    X(cuMemHostAlloc, (void **, size_t, unsigned))                                                 \
    X(cuMemFreeHost, (void *))                                                                     \
    X(cuMemcpyHtoDAsync_v2, (sala__cu_memory, const void *, size_t, sala__cu_stream))              \
    X(cuMemcpyDtoHAsync_v2, (void *, sala__cu_memory, size_t, sala__cu_stream))                    \
    X(cuMemcpyDtoDAsync_v2, (sala__cu_memory, sala__cu_memory, size_t, sala__cu_stream))           \
    X(cuMemsetD8Async, (sala__cu_memory, unsigned char, size_t, sala__cu_stream))                  \
    X(cuStreamCreate, (sala__cu_stream *, unsigned))                                               \
    X(cuStreamDestroy_v2, (sala__cu_stream))                                                       \
    X(cuStreamSynchronize, (sala__cu_stream))                                                      \
    X(cuStreamBeginCapture_v2, (sala__cu_stream, unsigned))                                        \
    X(cuStreamEndCapture, (sala__cu_stream, sala__cu_graph *))                                     \
    X(cuGraphInstantiateWithFlags, (sala__cu_exec *, sala__cu_graph, unsigned long long))          \
    X(cuGraphLaunch, (sala__cu_exec, sala__cu_stream))                                             \
    X(cuGraphExecDestroy, (sala__cu_exec))                                                         \
    X(cuGraphDestroy, (sala__cu_graph))                                                            \
    X(cuModuleLoadData, (sala__cu_module *, const void *))                                         \
    X(cuModuleUnload, (sala__cu_module))                                                           \
    X(cuModuleGetFunction, (sala__cu_function *, sala__cu_module, const char *))                   \
    X(cuFuncSetAttribute, (sala__cu_function, unsigned, int))                                      \
    X(cuFuncGetAttribute, (int *, unsigned, sala__cu_function))                                    \
    X(cuLaunchKernelEx, (const sala__cu_launch *, sala__cu_function, void **, void **))            \
    X(cuEventCreate, (sala__cu_event *, unsigned))                                                 \
    X(cuEventRecord, (sala__cu_event, sala__cu_stream))                                            \
    X(cuEventSynchronize, (sala__cu_event))                                                        \
    X(cuEventElapsedTime, (float *, sala__cu_event, sala__cu_event))                               \
    X(cuEventDestroy_v2, (sala__cu_event))

#define SALA__CU_COMPILER(X)                                                                       \
    X(nvrtcVersion, (int *, int *))                                                                \
    X(nvrtcCreateProgram, (sala__cu_program *, const char *, const char *, int,                    \
                           const char *const *, const char *const *))                              \
    X(nvrtcDestroyProgram, (sala__cu_program *))                                                   \
    X(nvrtcCompileProgram, (sala__cu_program, int, const char *const *))                           \
    X(nvrtcGetCUBINSize, (sala__cu_program, size_t *))                                             \
    X(nvrtcGetCUBIN, (sala__cu_program, char *))                                                   \
    X(nvrtcGetProgramLogSize, (sala__cu_program, size_t *))                                        \
    X(nvrtcGetProgramLog, (sala__cu_program, char *))

typedef struct sala__cuda_api {
#define SALA__CU_MEMBER(name, parameters) sala__cu_result(*name) parameters;
    SALA__CU_DRIVER(SALA__CU_MEMBER)
    SALA__CU_COMPILER(SALA__CU_MEMBER)
#undef SALA__CU_MEMBER
} sala__cuda_api;

typedef struct sala__cu_symbol {
    const char *name;
    size_t offset; // of its pointer in sala__cuda_api
} sala__cu_symbol;

#define SALA__CU_SYMBOL(name, parameters) {#name, offsetof(sala__cuda_api, name)},
static const sala__cu_symbol sala__cu_driver[] = {SALA__CU_DRIVER(SALA__CU_SYMBOL){NULL, 0}};
static const sala__cu_symbol sala__cu_compiler[] = {SALA__CU_COMPILER(SALA__CU_SYMBOL){NULL, 0}};
#undef SALA__CU_SYMBOL

// Fill the table. Returns the first name that the library lacks, or NULL.
static const char *sala__cuda_symbols(void *library, const sala__cu_symbol *symbol,
                                      sala__cuda_api *api) {
    const char *missing = NULL;
    for (; symbol->name; symbol++) {
        void *address = dlsym(library, symbol->name);
        memcpy((char *)api + symbol->offset, &address, sizeof address);
        if (!address && !missing) missing = symbol->name;
    }
    return missing;
}

// ---- opening a device ----

#define SALA__CUDA_MODULES 8

typedef struct sala__cuda { // zeroed while closed
    sala__env env;
    sala__cuda_api api;
    void *driver, *compiler; // libraries
    char label[320];         // names it in errors: "cuda:0 (NVIDIA H200)"
    int driver_version;      // 1000 * major + 10 * minor
    int compiler_version;    // the same of NVRTC
    int ordinal;
    sala__cu_device device;
    char name[256], architecture[16];  // "NVIDIA H200", "sm_90"
    int major, minor, multiprocessors; // compute capability
    int shared;                        // bytes that a block may ask for
    size_t total_bytes;                // memory of the device
    size_t taken_bytes;                // by sala__cuda_alloc
    sala__cu_context context;          // the primary one, retained
    sala__cu_stream stream;            // everything runs in it
    const char *source, *header;       // texts of sala.cu and kernels.h
    sala__cu_module modules[SALA__CUDA_MODULES];
    int module_count;
} sala__cuda;

static int sala__cuda_has_fp4(const sala__cuda *c) { // tensor cores that multiply NVFP4
    return c->major == 12 && c->minor <= 1;
}

static const char *sala__cuda_setting(const char *name) { // NULL when unset or empty
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

// Of the device, in MiB; 0 of 0 when the driver does not say.
static void sala__cuda_free_memory(const sala__cuda *c, double *free_mib, double *total_mib) {
    size_t available = 0, total = 0;
    if (c->api.cuMemGetInfo_v2(&available, &total)) available = total = 0;
    *free_mib = (double)available / 1048576;
    *total_mib = (double)total / 1048576;
}

// 0 for a driver call that succeeded, else an error; `what` says what was being done.
static int sala__cuda_check(const sala__cuda *c, sala__cu_result r, const char *what,
                            sala_error *err) {
    if (r == 0) return 0;
    const char *name = NULL, *text = NULL, *more = "";
    char memory[96];
    if (c->api.cuGetErrorName(r, &name) || !name) name = "unknown";
    if (c->api.cuGetErrorString(r, &text) || !text) text = "no description";
    if (r == 214 || r == 220 || r == 700 || r == 702 || r == 709 || r == 710 ||
        (r >= 714 && r <= 719)) // these leave a context in which nothing works any more
        more = "; this process can no longer use the device: restart it";
    if (r == SALA__CU_OUT_OF_MEMORY) {
        double available, total;
        sala__cuda_free_memory(c, &available, &total);
        snprintf(memory, sizeof memory, "; %.0f of its %.0f MiB are free", available, total);
        if (total > 0) more = memory;
    }
    return sala__fail(err, r == SALA__CU_OUT_OF_MEMORY ? SALA_E_MEMORY : SALA_E_DEVICE,
                      "%s: %s: error %u, %s (%s)%s", c->label, what, r, name, text, more);
}

static int sala__cuda_enter(const sala__cuda *c, sala_error *err) {
    return sala__cuda_check(c, c->api.cuCtxPushCurrent_v2(c->context), "entering the context", err);
}

static void sala__cuda_leave(const sala__cuda *c) {
    sala__cu_context popped;
    c->api.cuCtxPopCurrent_v2(&popped);
}

static void sala__cuda_close(sala__cuda *c) {
    if (c->context) {
        if (sala__cuda_enter(c, NULL) == 0) {
            if (c->stream) c->api.cuStreamSynchronize(c->stream);
            for (int i = 0; i < c->module_count; i++) c->api.cuModuleUnload(c->modules[i]);
            if (c->stream) c->api.cuStreamDestroy_v2(c->stream);
            sala__cuda_leave(c);
        }
        c->api.cuDevicePrimaryCtxRelease_v2(c->device);
    }
    if (c->compiler) dlclose(c->compiler);
    if (c->driver) dlclose(c->driver);
    memset(c, 0, sizeof *c);
}

// NODELETE: neither library may vanish under threads or exit handlers of its own.
#define SALA__CUDA_DLOPEN (RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)

static int sala__cuda_open_driver(sala__cuda *c, sala_error *err) {
    const char *path = sala__cuda_setting("SALA_CUDA");
    if (!path) path = "libcuda.so.1";
    snprintf(c->label, sizeof c->label, "CUDA driver %.256s", path);
    c->driver = dlopen(path, SALA__CUDA_DLOPEN);
    if (!c->driver)
        return sala__fail(err, SALA_E_DEVICE,
                          "cannot load the CUDA driver: %s; install the NVIDIA driver, or use "
                          "device cpu",
                          dlerror());
    const char *missing = sala__cuda_symbols(c->driver, sala__cu_driver, &c->api);
    if (c->api.cuDriverGetVersion) c->api.cuDriverGetVersion(&c->driver_version);
    if (missing || c->driver_version < 12000)
        return sala__fail(err, SALA_E_DEVICE,
                          "%s is version %d.%d%s%s, but 12.0 is needed: update the NVIDIA driver",
                          c->label, c->driver_version / 1000, c->driver_version % 1000 / 10,
                          missing ? " without " : "", missing ? missing : "");
    sala__cu_result result = c->api.cuInit(0);
    return sala__cuda_check(c, result == SALA__CU_NO_DEVICE ? 0 : result, "starting it", err);
}

static int sala__cuda_open_device(sala__cuda *c, int ordinal, sala_error *err) {
    int count = 0;
    if (c->api.cuDeviceGetCount(&count) || count < 1)
        return sala__fail(err, SALA_E_DEVICE,
                          "%s finds no device: see what nvidia-smi and CUDA_VISIBLE_DEVICES say, "
                          "or use device cpu",
                          c->label);
    if (ordinal >= count)
        return sala__fail(err, SALA_E_DEVICE, "there is no device cuda:%d, the last one is cuda:%d",
                          ordinal, count - 1);
    c->ordinal = ordinal;
    int code = sala__cuda_check(c, c->api.cuDeviceGet(&c->device, ordinal), "finding it", err);
    if (code < 0) return code;
    c->api.cuDeviceGetName(c->name, (int)sizeof c->name, c->device);
    snprintf(c->label, sizeof c->label, "cuda:%d (%s)", ordinal, c->name);
    c->api.cuDeviceTotalMem_v2(&c->total_bytes, c->device);
    c->api.cuDeviceGetAttribute(&c->multiprocessors, SALA__CU_DEVICE_MULTIPROCESSORS, c->device);
    c->api.cuDeviceGetAttribute(&c->major, SALA__CU_DEVICE_MAJOR, c->device);
    c->api.cuDeviceGetAttribute(&c->minor, SALA__CU_DEVICE_MINOR, c->device);
    c->api.cuDeviceGetAttribute(&c->shared, SALA__CU_DEVICE_SHARED, c->device);
    if (c->shared < SALA_GEMM4_SHARED) c->shared = SALA_GEMM4_SHARED; // all devices have that
    // Blackwell's desktop chips have their FP4 instructions only under the name with an "a".
    snprintf(c->architecture, sizeof c->architecture, "sm_%d%d%s", c->major, c->minor,
             sala__cuda_has_fp4(c) ? "a" : "");
    if (c->major >= 8) return 0;
    return sala__fail(err, SALA_E_DEVICE,
                      "%s has compute capability %d.%d, but 8.0 is needed: use another device, or "
                      "device cpu",
                      c->label, c->major, c->minor);
}

static int sala__cuda_open_context(sala__cuda *c, sala_error *err) {
    sala__cu_context context;
    sala__cu_result result = c->api.cuDevicePrimaryCtxRetain(&context, c->device);
    if (result) return sala__cuda_check(c, result, "creating a context", err);
    c->context = context;
    int code = sala__cuda_enter(c, err);
    if (code < 0) return code;
    result = c->api.cuStreamCreate(&c->stream, SALA__CU_STREAM_NON_BLOCKING);
    if (result) c->stream = NULL;
    code = sala__cuda_check(c, result, "creating a stream", err);
    sala__cuda_leave(c);
    return code;
}

// Take this NVRTC if it fits: it must know the device, and may not be newer than the driver by its
// first number, or the driver refuses what it makes. compiler_version is 0 when it did not load.
static int sala__cuda_try_compiler(sala__cuda *c, const char *path, sala_error *err) {
    int major = 0, minor = 0, need = c->major < 12 ? 12000 : c->minor == 1 ? 12090 : 12080;
    c->compiler_version = 0;
    c->compiler = dlopen(path, SALA__CUDA_DLOPEN);
    if (!c->compiler) return sala__fail(err, SALA_E_DEVICE, "cannot load NVRTC: %s", dlerror());
    const char *missing = sala__cuda_symbols(c->compiler, sala__cu_compiler, &c->api);
    if (!missing) c->api.nvrtcVersion(&major, &minor);
    c->compiler_version = 1000 * major + 10 * minor;
    if (c->compiler_version >= need && major <= c->driver_version / 1000) return 0;
    dlclose(c->compiler);
    c->compiler = NULL;
    if (c->compiler_version < need)
        return sala__fail(err, SALA_E_DEVICE,
                          "%s is NVRTC %d.%d, but %s needs %d.%d: install that, or let SALA_NVRTC "
                          "name it",
                          path, major, minor, c->architecture, need / 1000, need % 1000 / 10);
    return sala__fail(err, SALA_E_DEVICE,
                      "%s is NVRTC %d.%d, too new for the CUDA driver %d.%d: update the NVIDIA "
                      "driver, or let SALA_NVRTC name a libnvrtc.so.%d",
                      path, major, minor, c->driver_version / 1000, c->driver_version % 1000 / 10,
                      c->driver_version / 1000);
}

// Try libnvrtc.so.<major> wherever it may lie. `err` keeps the first that does not fit.
static int sala__cuda_search_compiler(sala__cuda *c, int major, sala_error *err) {
    static const char *const places[][2] = {
        {NULL, ""}, // where the loader looks
        {"CUDA_HOME", "/lib*/"},
        {"CUDA_PATH", "/lib*/"},
        {NULL, "/usr/local/cuda/lib64/"},
        {"CONDA_PREFIX", "/lib/"},
        {"CONDA_PREFIX", "/lib/python3*/site-packages/nvidia/*/lib/"},
        {"VIRTUAL_ENV", "/lib/python3*/site-packages/nvidia/*/lib/"},
        {"HOME", "/.local/lib/python3*/site-packages/nvidia/*/lib/"},
        {NULL, "/usr/local/lib/python3*/*-packages/nvidia/*/lib/"},
        {NULL, "/usr/lib/python3*/*-packages/nvidia/*/lib/"},
    };
    int found = 0;
    for (size_t i = 0; i < sizeof places / sizeof places[0] && !found; i++) {
        const char *base = places[i][0] ? sala__cuda_setting(places[i][0]) : "";
        if (!base) continue;
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s%slibnvrtc.so.%d", base, places[i][1], major);
        glob_t paths;
        if (glob(path, GLOB_NOCHECK, NULL, &paths)) continue;
        for (size_t k = 0; k < paths.gl_pathc && !found; k++) {
            sala_error reason;
            found = sala__cuda_try_compiler(c, paths.gl_pathv[k], &reason) == 0;
            if (!found && c->compiler_version && err->code == 0) *err = reason;
        }
        globfree(&paths);
    }
    return found ? 0 : SALA_E_DEVICE;
}

static int sala__cuda_open_compiler(sala__cuda *c, sala_error *err) {
    sala_error reason;
    memset(&reason, 0, sizeof reason);
    const char *own = sala__cuda_setting("SALA_NVRTC");
    if (own && sala__cuda_try_compiler(c, own, &reason) == 0) return 0;
    int newest = c->driver_version / 1000 < 13 ? 13 : c->driver_version / 1000;
    for (int major = newest; major >= 12 && !own; major--)
        if (sala__cuda_search_compiler(c, major, &reason) == 0) return 0;
    if (reason.code) return sala__fail(err, SALA_E_DEVICE, "%s", reason.text);
    return sala__fail(
        err, SALA_E_DEVICE,
        "there is no NVRTC, CUDA's compiler library libnvrtc.so.12 or .13, where the loader "
        "looks, below $CUDA_HOME or /usr/local/cuda, or among Python's packages: install the CUDA "
        "toolkit, or `pip install nvidia-cuda-nvrtc-cu12`, or let SALA_NVRTC name the library");
}

// Open device number `ordinal`. What fails is said in one sentence, and nothing stays open.
static int sala__cuda_open(const sala__env *env, int ordinal, sala__cuda *c, sala_error *err) {
    memset(c, 0, sizeof *c);
    c->env = *env;
    c->source = sala__source_cu;
    c->header = sala__source_kernels;
    int code = sala__cuda_open_driver(c, err);
    if (code == 0) code = sala__cuda_open_device(c, ordinal, err);
    if (code == 0) code = sala__cuda_open_compiler(c, err);
    if (code == 0) code = sala__cuda_open_context(c, err);
    if (code < 0) sala__cuda_close(c);
    return code;
}

enum { SALA__DEVICE_AUTO = 0, SALA__DEVICE_CPU = 1, SALA__DEVICE_CUDA = 2 };

// "auto" (also NULL), "cpu", "cuda" (device 0) or "cuda:N".
static int sala__parse_device(const char *text, int *kind, int *ordinal, sala_error *err) {
    *ordinal = 0;
    *kind = !text || strcmp(text, "auto") == 0 ? SALA__DEVICE_AUTO : SALA__DEVICE_CUDA;
    if (*kind == SALA__DEVICE_AUTO || strcmp(text, "cuda") == 0) return 0;
    if (strcmp(text, "cpu") == 0) {
        *kind = SALA__DEVICE_CPU;
        return 0;
    }
    size_t digits = strncmp(text, "cuda:", 5) == 0 ? strspn(text + 5, "0123456789") : 0;
    if (digits < 1 || digits > 4 || text[5 + digits])
        return sala__fail(err, SALA_E_ARGUMENT,
                          "device: \"%.64s\" is none of auto, cpu, cuda, cuda:N", text);
    *ordinal = atoi(text + 5);
    return 0;
}

// Is there a driver, or was one named? Where there is none, hardly anybody wants to read why no GPU is used.
static int sala__cuda_is_likely(void) {
    if (sala__cuda_setting("SALA_CUDA")) return 1;
    void *driver = dlopen("libcuda.so.1", SALA__CUDA_DLOPEN);
    if (driver) dlclose(driver);
    return driver != NULL;
}

// Open the device that an option names. Returns 1 for a GPU (in *c), 0 for the CPU, or an error.
static int sala__cuda_select(const sala__env *env, const char *text, sala__cuda *c,
                             sala_error *err) {
    int kind, ordinal;
    int code = sala__parse_device(text, &kind, &ordinal, err);
    if (code < 0 || kind == SALA__DEVICE_CPU) return code;
    sala_error reason;
    code = sala__cuda_open(env, ordinal, c, &reason);
    if (code == 0) return 1;
    if (kind == SALA__DEVICE_CUDA) return sala__fail(err, code, "%s", reason.text);
    if (sala__cuda_is_likely()) sala__log(env, SALA_LOG_INFO, "no GPU used: %s", reason.text);
    return 0;
}

// ---- memory ----
// Device memory is taken while the engine opens, and counted. Copies run in the engine's stream.

static int sala__cuda_alloc(sala__cuda *c, size_t bytes, const char *what, sala__cu_memory *memory,
                            sala_error *err) {
    char doing[160];
    snprintf(doing, sizeof doing, "taking %zu MiB for %.100s", bytes >> 20, what);
    sala__cu_result result = c->api.cuMemAlloc_v2(memory, bytes ? bytes : 1);
    if (result)
        *memory = 0;
    else
        c->taken_bytes += bytes;
    return sala__cuda_check(c, result, doing, err);
}

static void sala__cuda_release(sala__cuda *c, sala__cu_memory memory, size_t bytes) {
    if (!memory) return;
    c->api.cuMemFree_v2(memory);
    c->taken_bytes -= bytes;
}

// Page-locked memory of the host, for copies that shall overlap with work.
static int sala__cuda_alloc_host(sala__cuda *c, size_t bytes, const char *what, void **memory,
                                 sala_error *err) {
    char doing[160];
    snprintf(doing, sizeof doing, "locking %zu MiB of host memory for %.100s", bytes >> 20, what);
    sala__cu_result result = c->api.cuMemHostAlloc(memory, bytes ? bytes : 1, 0);
    if (result) *memory = NULL;
    return sala__cuda_check(c, result, doing, err);
}

static void sala__cuda_release_host(sala__cuda *c, void *memory) {
    if (memory) c->api.cuMemFreeHost(memory);
}

static int sala__cuda_fill(sala__cuda *c, sala__cu_memory to, int byte, size_t bytes,
                           sala_error *err) {
    return sala__cuda_check(c, c->api.cuMemsetD8Async(to, (unsigned char)byte, bytes, c->stream),
                            "filling memory", err);
}

static int sala__cuda_upload(sala__cuda *c, sala__cu_memory to, const void *from, size_t bytes,
                             sala_error *err) {
    return sala__cuda_check(c, c->api.cuMemcpyHtoDAsync_v2(to, from, bytes, c->stream),
                            "copying to the device", err);
}

// What stands at `to` is whole after the next sala__cuda_wait.
static int sala__cuda_download(sala__cuda *c, void *to, sala__cu_memory from, size_t bytes,
                               sala_error *err) {
    return sala__cuda_check(c, c->api.cuMemcpyDtoHAsync_v2(to, from, bytes, c->stream),
                            "copying from the device", err);
}

static int sala__cuda_copy(sala__cuda *c, sala__cu_memory to, sala__cu_memory from, size_t bytes,
                           sala_error *err) {
    return sala__cuda_check(c, c->api.cuMemcpyDtoDAsync_v2(to, from, bytes, c->stream),
                            "copying on the device", err);
}

// Wait for all work of the stream; errors of kernels come to light here.
static int sala__cuda_wait(sala__cuda *c, sala_error *err) {
    return sala__cuda_check(c, c->api.cuStreamSynchronize(c->stream), "running kernels", err);
}

// ---- compiling kernels ----
// Each unit is compiled by a thread of its own, with SALA_UNIT defined as its number, and makes one
// cubin: one file of the cache, one module. sala.cu is one unit: it compiles in 2 s.

#define SALA__CUDA_OPTIONS 32

typedef struct sala__cuda_unit {
    const sala__cuda *cuda;
    const char *options[SALA__CUDA_OPTIONS]; // [option_count]
    int option_count;
    char architecture[48], number[32]; // two of the options
    uint64_t key[2];                   // hash of everything that the cubin depends on
    char *path;                        // in the cache, or NULL
    char *cubin;                       // [size]
    size_t size;
    sala__cu_program program;
    sala__cu_result result;
    pthread_t thread;
    int started, threaded, done;
} sala__cuda_unit;

// Go on with two hashes of 64 bits, byte by byte.
static void sala__cuda_hash(uint64_t hash[2], const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    for (size_t i = 0; i < size; i++) {
        hash[0] = (hash[0] ^ bytes[i]) * 0x100000001B3u;
        hash[1] = (hash[1] ^ bytes[i]) * 0x9E3779B97F4A7C15u;
        hash[1] ^= hash[1] >> 32;
    }
}

static int sala__cuda_make_unit(const sala__cuda *c, int number, const char *const *options,
                                int count, const char *folder, sala__cuda_unit *u,
                                sala_error *err) {
    memset(u, 0, sizeof *u);
    if (count + 4 > SALA__CUDA_OPTIONS)
        return sala__fail(err, SALA_E_ARGUMENT, "%d options are too many for kernels", count);
    u->cuda = c;
    snprintf(u->architecture, sizeof u->architecture, "--gpu-architecture=%s", c->architecture);
    snprintf(u->number, sizeof u->number, "-DSALA_UNIT=%d", number);
    const char *own[4] = {u->architecture, u->number, "-std=c++17", "--fmad=false"};
    for (int i = 0; i < 4 + count; i++) u->options[i] = i < 4 ? own[i] : options[i - 4];
    u->option_count = 4 + count;

    char text[64];
    snprintf(text, sizeof text, "sala %s, NVRTC %d", SALA_VERSION, c->compiler_version);
    const char *sources[3] = {text, c->source, c->header};
    for (int i = 0; i < 3 + u->option_count; i++) { // with its zero: no two lists look alike
        const char *part = i < 3 ? sources[i] : u->options[i - 3];
        sala__cuda_hash(u->key, part, strlen(part) + 1);
    }
    snprintf(text, sizeof text, "%016llx%016llx.cubin", (unsigned long long)u->key[0],
             (unsigned long long)u->key[1]);
    u->path = folder ? sala__join(&c->env, folder, text, NULL) : NULL;
    return 0;
}

// The error for a unit that does not compile: NVRTC's log from its first error line on.
static int sala__cuda_compile_error(const sala__cuda *c, const sala__cuda_unit *u,
                                    sala_error *err) {
    size_t size = 0;
    char *log = NULL;
    if (u->program && c->api.nvrtcGetProgramLogSize(u->program, &size) == 0)
        log = (char *)sala__alloc(&c->env, size + 1, 1, "a log", NULL);
    if (log) c->api.nvrtcGetProgramLog(u->program, log);
    const char *from = log ? strstr(log, "error") : NULL;
    while (from && from > log && from[-1] != '\n') from--;
    for (char *at = log; at && *at; at++)
        if (*at == '\n') *at = ' ';
    if (!from) from = log ? log : "no log";
    int code = sala__fail(err, SALA_E_DEVICE,
                          "NVRTC %d.%d cannot compile sala.cu for %s, error %u: %.700s",
                          c->compiler_version / 1000, c->compiler_version % 1000 / 10,
                          c->architecture, u->result, from);
    sala__release(&c->env, log);
    return code;
}

// ---- the cache of compiled kernels ----
// One file a cubin in $SALA_CACHE, else $XDG_CACHE_HOME/sala, else ~/.cache/sala; SALA_CACHE=off
// means none. The name is the key. A file appears whole, by rename; one that is not exactly what
// would be written is compiled again. Failures here are never errors.

#define SALA__CUDA_PART "sala-part-" // begins the names of files that are being written

typedef struct sala__cuda_head {
    char magic[8];
    uint64_t key[2], size, sum[2]; // sum: hash of the cubin
} sala__cuda_head;

static void sala__cuda_make_head(const sala__cuda_unit *u, const void *cubin, size_t size,
                                 sala__cuda_head *head) {
    memset(head, 0, sizeof *head);
    memcpy(head->magic, "SALACUB1", 8);
    memcpy(head->key, u->key, sizeof head->key);
    head->size = size;
    sala__cuda_hash(head->sum, cubin, size);
}

// The folder, as a fresh string; NULL: no cache.
static char *sala__cuda_cache_folder(const sala__env *env) {
    const char *own = sala__cuda_setting("SALA_CACHE");
    const char *shared = sala__cuda_setting("XDG_CACHE_HOME"), *home = sala__cuda_setting("HOME");
    if (own) return strcmp(own, "off") == 0 ? NULL : sala__join(env, own, "", NULL);
    if (shared) return sala__join(env, shared, "sala", NULL);
    return home ? sala__join(env, home, ".cache/sala", NULL) : NULL;
}

static int sala__cuda_cache_read(const sala__env *env, sala__cuda_unit *u) { // 1: taken
    sala__file file;
    if (!u->path || sala__map_file(u->path, &file, NULL) < 0) return 0;
    sala__cuda_head head;
    const unsigned char *cubin = file.data + sizeof head;
    size_t size = file.size > (int64_t)sizeof head ? (size_t)file.size - sizeof head : 0;
    if (size) sala__cuda_make_head(u, cubin, size, &head);
    int good = size && memcmp(&head, file.data, sizeof head) == 0;
    if (good) {
        u->size = size;
        u->cubin = (char *)sala__alloc(env, size, 1, "compiled kernels", NULL);
        if (u->cubin) memcpy(u->cubin, cubin, size);
    } else {
        sala__log(env, SALA_LOG_INFO, "%s is damaged: compiling again", u->path);
    }
    sala__unmap_file(&file);
    return u->cubin != NULL;
}

// Make the folder ("/a/b" or "/a/b/"), and remove what processes killed a day ago left in it.
static void sala__cuda_cache_prepare(const sala__env *env, char *folder) {
    for (char *slash = folder; (slash = strchr(slash + 1, '/')) != NULL;) {
        *slash = 0;
        mkdir(folder, 0700);
        *slash = '/';
    }
    mkdir(folder, 0700);
    DIR *list = opendir(folder);
    for (struct dirent *entry; list && (entry = readdir(list)) != NULL;) {
        if (strncmp(entry->d_name, SALA__CUDA_PART, strlen(SALA__CUDA_PART)) != 0) continue;
        struct stat st;
        char *path = sala__join(env, folder, entry->d_name, NULL);
        if (path && lstat(path, &st) == 0 && time(NULL) - st.st_mtime > 86400) unlink(path);
        sala__release(env, path);
    }
    if (list) closedir(list);
}

static int sala__cuda_cache_write(const sala__env *env, char *folder, const sala__cuda_unit *u) {
    sala__cuda_head head;
    sala__cuda_make_head(u, u->cubin, u->size, &head);
    sala__cuda_cache_prepare(env, folder);
    char *part = sala__join(env, folder, SALA__CUDA_PART "XXXXXX", NULL);
    if (!part || !u->path) return sala__release(env, part), 0;
    int fd = mkostemp(part, O_CLOEXEC);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "wb");
    int good = file && fwrite(&head, sizeof head, 1, file) == 1 &&
               fwrite(u->cubin, u->size, 1, file) == 1 && fflush(file) == 0 &&
               rename(part, u->path) == 0;
    if (!good) {
        sala__log(env, SALA_LOG_WARNING,
                  "cannot write the kernel cache in %s: %s; every start will compile until "
                  "SALA_CACHE names another folder",
                  folder, strerror(errno));
        if (fd >= 0) unlink(part);
    }
    if (file)
        fclose(file);
    else if (fd >= 0)
        close(fd);
    sala__release(env, part);
    return good;
}

// ---- from source to functions ----

static void *sala__cuda_compile_main(void *argument) {
    sala__cuda_unit *u = (sala__cuda_unit *)argument;
    const sala__cuda *c = u->cuda;
    const char *name = "kernels.h";
    u->result = c->api.nvrtcCreateProgram(&u->program, c->source, "sala.cu", 1, &c->header, &name);
    if (u->result)
        u->program = NULL;
    else
        u->result = c->api.nvrtcCompileProgram(u->program, u->option_count, u->options);
    __atomic_store_n(&u->done, 1, __ATOMIC_RELEASE);
    return NULL;
}

// NVRTC does not tell how far it is: show that time passes, four times a second.
static void sala__cuda_await_units(const sala__cuda *c, const sala__cuda_unit *units, int count) {
    char what[64];
    snprintf(what, sizeof what, "compiling kernels for %s", c->architecture);
    const struct timespec nap = {0, 5000000};
    double start = sala__now(), shown = -1;
    for (int busy = 1; busy;) {
        busy = 0;
        for (int i = 0; i < count && i < SALA__CUDA_MODULES; i++)
            busy |= units[i].started && !__atomic_load_n(&units[i].done, __ATOMIC_ACQUIRE);
        double elapsed = sala__now() - start;
        if (busy && elapsed - shown < 0.25) {
            nanosleep(&nap, NULL);
            continue;
        }
        sala__progress(&c->env, what, busy ? elapsed / (elapsed + 8) : 1);
        shown = elapsed;
    }
}

static int sala__cuda_take_cubin(const sala__cuda *c, sala__cuda_unit *u, sala_error *err) {
    if (u->result == 0) u->result = c->api.nvrtcGetCUBINSize(u->program, &u->size);
    if (u->result) return sala__cuda_compile_error(c, u, err);
    u->cubin = (char *)sala__alloc(&c->env, u->size, 1, "compiled kernels", err);
    if (!u->cubin) return SALA_E_MEMORY;
    u->result = c->api.nvrtcGetCUBIN(u->program, u->cubin);
    return u->result ? sala__cuda_compile_error(c, u, err) : 0;
}

// Compile the units that have no cubin. Signals are for the threads of the host.
static int sala__cuda_build(const sala__cuda *c, sala__cuda_unit *units, int count, char *folder,
                            sala_error *err) {
    int code = 0, keep = folder != NULL;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes; // a compiler wants a large stack, whatever the process's limit
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)16 << 20);
    for (int i = 0; i < count; i++) {
        sala__cuda_unit *u = &units[i];
        u->started = u->cuda && !u->cubin;
        u->threaded =
            u->started && pthread_create(&u->thread, &attributes, sala__cuda_compile_main, u) == 0;
        if (u->started && !u->threaded) sala__cuda_compile_main(u);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    sala__cuda_await_units(c, units, count);
    for (int i = 0; i < count; i++) {
        sala__cuda_unit *u = &units[i];
        if (u->threaded) pthread_join(u->thread, NULL);
        if (u->started && code == 0) code = sala__cuda_take_cubin(c, u, err);
        if (u->started && code == 0 && keep) keep = sala__cuda_cache_write(&c->env, folder, u);
        if (u->program) c->api.nvrtcDestroyProgram(&u->program);
    }
    return code;
}

// Load the cubins as modules, or none of them.
static int sala__cuda_load(sala__cuda *c, sala__cuda_unit *units, int count, sala_error *err) {
    int first = c->module_count;
    sala__cu_result result = 0;
    for (int i = 0; i < count && result == 0; i++) {
        if (!units[i].cuda) continue;
        result = c->api.cuModuleLoadData(&c->modules[c->module_count], units[i].cubin);
        if (result == 0) c->module_count++;
    }
    while (result && c->module_count > first) c->api.cuModuleUnload(c->modules[--c->module_count]);
    return sala__cuda_check(c, result, "loading compiled kernels", err);
}

// Returns the number of cubins that came from the cache in *cached.
static int sala__cuda_make_modules(sala__cuda *c, const char *const *options, int option_count,
                                   unsigned wanted, int use_cache, int *cached, sala_error *err) {
    enum { count = SALA__CUDA_MODULES };
    sala__cuda_unit units[SALA__CUDA_MODULES];
    memset(units, 0, sizeof units);
    char *folder = sala__cuda_cache_folder(&c->env);
    int code = 0, missing = 0;
    *cached = 0;
    for (int i = 0; i < count && code == 0; i++) {
        if (!(wanted >> i & 1)) continue;
        code = sala__cuda_make_unit(c, i, options, option_count, folder, &units[i], err);
        if (code == 0 && use_cache) *cached += sala__cuda_cache_read(&c->env, &units[i]);
        missing += !units[i].cubin;
    }
    if (code == 0 && missing) code = sala__cuda_build(c, units, count, folder, err);
    if (code == 0) code = sala__cuda_load(c, units, count, err);
    for (int i = 0; i < count; i++) {
        sala__release(&c->env, units[i].cubin);
        sala__release(&c->env, units[i].path);
    }
    sala__release(&c->env, folder);
    return code;
}

// Compile (or take from the cache) and load units of sala.cu, one for each bit of `wanted`.
// `options`: -D of this model. May take seconds, with progress; a second call adds modules.
static int sala__cuda_compile(sala__cuda *c, const char *const *options, int option_count,
                              unsigned wanted, sala_error *err) {
    int cached;
    if (wanted == 0 || wanted >> SALA__CUDA_MODULES ||
        c->module_count + __builtin_popcount(wanted) > SALA__CUDA_MODULES)
        return sala__fail(err, SALA_E_ARGUMENT, "these units of kernels cannot be loaded");
    int code = sala__cuda_make_modules(c, options, option_count, wanted, 1, &cached, err);
    if (code != SALA_E_DEVICE || cached == 0) return code;
    sala__log(&c->env, SALA_LOG_INFO, "the driver refuses cached kernels: compiling again");
    sala__clear(err);
    return sala__cuda_make_modules(c, options, option_count, wanted, 0, &cached, err);
}

// ---- launching ----

typedef struct sala__cuda_kernel {
    sala__cu_function function;
    const char *name;
} sala__cuda_kernel;

// Find a kernel in the modules from `module` on; `shared_bytes` is the most dynamic shared memory that
// a launch will ask for.
static int sala__cuda_get_kernel(sala__cuda *c, int module, const char *name, unsigned shared_bytes,
                                 sala__cuda_kernel *kernel, sala_error *err) {
    char doing[160];
    snprintf(doing, sizeof doing, "preparing the kernel %.64s with %u bytes of shared memory", name,
             shared_bytes);
    kernel->name = name;
    sala__cu_result result = SALA__CU_NOT_FOUND;
    for (int i = module; i < c->module_count && result == SALA__CU_NOT_FOUND; i++)
        result = c->api.cuModuleGetFunction(&kernel->function, c->modules[i], name);
    if (result == 0)
        result = c->api.cuFuncSetAttribute(kernel->function, SALA__CU_FUNCTION_MAX_DYNAMIC_SHARED,
                                           (int)shared_bytes);
    if (result == 0) // the same for all: to divide its memory anew a multiprocessor must run empty
        c->api.cuFuncSetAttribute(kernel->function, SALA__CU_FUNCTION_CARVEOUT, 100);
    return sala__cuda_check(c, result, doing, err);
}

// Launch a kernel whose one parameter is the struct at `args` (copied). `early`: it may start while
// the kernel before it still runs (sm_90 and later), and waits by itself: see sala_wait_grid.
static int sala__cuda_launch(sala__cuda *c, const sala__cuda_kernel *kernel, unsigned grid_x,
                             unsigned grid_y, unsigned grid_z, unsigned threads,
                             unsigned shared_bytes, const void *args, int early, sala_error *err) {
    sala__cu_attribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = SALA__CU_LAUNCH_PROGRAMMATIC;
    attribute.value.allowed = 1;
    unsigned attributes = early && c->major >= 9;
    sala__cu_launch launch = {grid_x, grid_y,       grid_z,    threads,    1,
                              1,      shared_bytes, c->stream, &attribute, attributes};
    void *parameters[1] = {(void *)(uintptr_t)args};
    sala__cu_result result = c->api.cuLaunchKernelEx(&launch, kernel->function, parameters, NULL);
    if (result == 0) return 0;
    char doing[160];
    snprintf(doing, sizeof doing, "launching %.64s with %u x %u x %u blocks", kernel->name, grid_x,
             grid_y, grid_z);
    return sala__cuda_check(c, result, doing, err);
}

// ---- graphs ----
// What is launched between begin and end is recorded instead of run.

static int sala__cuda_capture_begin(sala__cuda *c, sala_error *err) {
    return sala__cuda_check(
        c, c->api.cuStreamBeginCapture_v2(c->stream, SALA__CU_CAPTURE_THREAD_LOCAL),
        "beginning a graph", err);
}

// To be called also when something failed since the beginning, with exec NULL.
static int sala__cuda_capture_end(sala__cuda *c, sala__cu_exec *exec, sala_error *err) {
    sala__cu_graph graph = NULL;
    sala__cu_result result = c->api.cuStreamEndCapture(c->stream, &graph);
    if (exec && result == 0) result = c->api.cuGraphInstantiateWithFlags(exec, graph, 0);
    if (exec && result) *exec = NULL;
    if (graph) c->api.cuGraphDestroy(graph);
    return exec ? sala__cuda_check(c, result, "making a graph", err) : 0;
}

static int sala__cuda_graph_launch(sala__cuda *c, sala__cu_exec exec, sala_error *err) {
    return sala__cuda_check(c, c->api.cuGraphLaunch(exec, c->stream), "launching a graph", err);
}

static void sala__cuda_graph_free(sala__cuda *c, sala__cu_exec exec) {
    if (exec) c->api.cuGraphExecDestroy(exec);
}
/* -----------------------------------------------------------------------------------------------
   [9] CUDA, THE KERNELS: launches, weights

   One function an operation says into how many blocks it is cut; block sizes stand in kernels.h.
   Grids depend on the bucket (rows and sequences rounded up to a power of two) and on capacities
   alone, so a recorded graph serves every step of its bucket: what changes lies in the step block,
   which the graph copies to the device first.
   -------------------------------------------------------------------------------------------- */

enum {
#define SALA__KERNEL_ID(name, args, threads, unit) SALA__KERNEL_##name,
    SALA_KERNELS(SALA__KERNEL_ID)
#undef SALA__KERNEL_ID
        SALA__KERNEL_COUNT
};

static const struct {
    const char *name;
    unsigned threads, unit;
} sala__kernels[SALA__KERNEL_COUNT] = {
#define SALA__KERNEL_ROW(name, args, threads, unit) {"sala_" #name, threads, unit},
    SALA_KERNELS(SALA__KERNEL_ROW)
#undef SALA__KERNEL_ROW
};

typedef struct sala__graph {    // a recorded verify pass
    int rows, seqs, tree_slots; // of its bucket
    int64_t used;               // when it last ran, in passes
    sala__cu_exec exec;
} sala__graph;

#define SALA__GRAPHS 40
#define SALA__SHARED_MOST 101376 // bytes a block may have on the smallest of our targets

typedef struct sala__gpu {
    sala__cuda cuda;
    const sala_dims *dims;
    int multiprocessors;
    int shared;              // bytes that a block may have, or (tests) fewer; see sala_gemm_run
    int rows, seqs;          // bucket of the pass that is being launched
    int tree_slots;          // saved states that the trees need, see sala_gla_verify; 0 for chains
    int early;               // kernels may start while the one before them ends (PDL)
    sala_gemm_norm_args due; // a norm that the next product makes; norm.rows 0: none
    int prefill;             // the pass is a chunk of a prompt: operations take that form
    void *unpacked; // scratch for 4-bit weights of a prefill's product, see sala__unpack_weights
    size_t unpacked_bytes;
    int fp4;        // tests: 1 compiles for FP4 tensor cores, 2 without; 0: as the device has them
    int shape;      // tests: 1 + the shape of tiles that prefill's products take, 0: the fastest
    unsigned units; // of kernels that are loaded, a bit each; 0: all (tests load what they need)
    int variant;    // kind of a product, for the next line
    int only;       // benchmarks: 1 + 4 * kernel + variant that is launched alone, 0: all
    int launches;
    int *log; // benchmarks: or NULL; [1024] 4 * kernel + variant of each launch
    sala__cuda_kernel kernels[SALA__KERNEL_COUNT];
    sala_error error; // the first of a pass's launches
    sala__graph graphs[SALA__GRAPHS];
    int graph_count, no_graphs; // no_graphs: one could not be made
    int64_t passes;             // that ran as graphs
    sala__cu_memory *taken;     // [taken_count] everything that was allocated
    size_t taken_count, taken_capacity;
} sala__gpu;

static void sala__launch(sala__gpu *g, int kernel, unsigned x, unsigned y, unsigned z,
                         size_t shared, const void *args) {
    if (g->error.code || x == 0 || y == 0 || z == 0 ||
        (g->only && g->only != 1 + 4 * kernel + g->variant))
        return;
    if (g->log && g->launches < 1024) g->log[g->launches] = 4 * kernel + g->variant;
    g->launches++;
    sala__cuda_launch(&g->cuda, &g->kernels[kernel], x, y, z, sala__kernels[kernel].threads,
                      (unsigned)shared, args, g->early, &g->error);
}

// Device memory until sala__gpu_close.
static void *sala__gpu_take(sala__gpu *g, size_t bytes, const char *what, sala_error *err) {
    sala__cu_memory memory;
    if (sala__grow(&g->cuda.env, (void **)&g->taken, &g->taken_capacity, g->taken_count + 1,
                   sizeof *g->taken, "a list of allocations", err) < 0)
        return NULL;
    if (sala__cuda_alloc(&g->cuda, bytes, what, &memory, err) < 0) return NULL;
    g->taken[g->taken_count++] = memory;
    return (void *)(uintptr_t)memory;
}

// Wait for all that was launched and copied; the first error of these.
static int sala__gpu_wait(sala__gpu *g, sala_error *err) {
    sala_error *e = &g->error;
    if (!e->code) sala__cuda_wait(&g->cuda, e);
    return e->code ? sala__fail(err, e->code, "%s", e->text) : 0;
}

static sala__cu_memory sala__on_gpu(const void *pointer) {
    return (sala__cu_memory)(uintptr_t)pointer;
}

#define SALA__GLA_SHARED 25664     // without saved states; sizeof(sala_gla_shared) in sala.cu
#define SALA__GLA_SAVED (16 << 10) // one saved state of a block

static void sala__launch_embed(sala__gpu *g, const sala_embed_args *a) {
    int shares = (g->dims->hidden + 2047) / 2048; // eight columns a thread
    sala__launch(g, SALA__KERNEL_embed, g->rows, shares, 1, 0, a);
}

static void sala__launch_rope_table(sala__gpu *g, const sala_rope_args *a) {
    sala__launch(g, SALA__KERNEL_rope_table, g->rows, 1, 1, 0, a);
}

static void sala__launch_qk_norm_rope(sala__gpu *g, const sala_qk_args *a) {
    int heads = a->rows * (a->heads + a->kv_heads); // four a block
    sala__launch(g, SALA__KERNEL_qk_norm_rope, (heads + 3) / 4, 1, 1, 0, a);
}

static void sala__launch_gate(sala__gpu *g, const sala_gate_args *a) {
    int shares = (a->width + 511) / 512;                              // two columns a thread
    sala__launch(g, SALA__KERNEL_gate, a->rows, shares, 1, 8 * 4, a); // a float a warp
}

// A block takes 32 columns of one head of one sequence.
static void sala__launch_gla_verify(sala__gpu *g, const sala_gla_args *a) {
    sala_gla_args with = *a;
    with.tree_slots = g->tree_slots;
    sala__launch(g, SALA__KERNEL_gla_verify, g->dims->lin_heads * (g->dims->lin_dim / 32), g->seqs,
                 1, SALA__GLA_SHARED + with.tree_slots * SALA__GLA_SAVED, &with);
}

static void sala__launch_accept(sala__gpu *g, const sala_accept_args *a) {
    sala__launch(g, SALA__KERNEL_accept, g->seqs, 1, 1, 0, a);
}

// Paths cannot be longer than the pass has rows.
static void sala__launch_commit(sala__gpu *g, const sala_commit_args *a) {
    int path = g->rows < SALA_MAX_PATH ? g->rows : SALA_MAX_PATH;
    sala__launch(g, SALA__KERNEL_commit, a->sparse_layers + a->lightning_layers, g->seqs, path, 0,
                 a);
}

// ---- launches: matrix products and norms ----

static void sala__launch_quantize(sala__gpu *g, const sala_quantize_args *a) {
    unsigned shares = (unsigned)(a->width + 2047) / 2048; // eight columns a thread
    sala__launch(g, SALA__KERNEL_quantize, (unsigned)a->rows, shares, 1, 0, a);
}

static void sala__launch_norm(sala__gpu *g, const sala_norm_args *a) {
    if (a->quant.codes) { // of prefill, whose branches are in x
        sala__launch(g, SALA__KERNEL_norm_quant, (unsigned)a->rows, 1, 1, 4 * 4, a);
        return;
    }
    sala__launch(g, SALA__KERNEL_norm, (unsigned)a->rows, 1, 1, SALA_GEMM_SHARED, a);
}

static const struct {
    int rows, tokens, clocks; // of weights, of x; see SALA_PREFILL_SHAPES
} sala__prefill_shapes[] = {
#define SALA__PREFILL_ROW(number, tall, wide, clocks) {32 * (tall), 16 * (wide), clocks},
    SALA_PREFILL_SHAPES(SALA__PREFILL_ROW)
#undef SALA__PREFILL_ROW
};

#define SALA__PREFILL_SHAPE_COUNT                                                                  \
    ((int)(sizeof sala__prefill_shapes / sizeof sala__prefill_shapes[0]))

// Cut a product into tiles of a shape. Returns about how long it takes: clocks of the rounds of two
// tiles a multiprocessor, where a single tile takes three fifths of the time of two.
static int64_t sala__prefill_cut(const sala__gpu *g, sala_product_args *a, int shape) {
    int rows = sala__prefill_shapes[shape].rows, tokens = sala__prefill_shapes[shape].tokens;
    int pair = a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1, tiles = 0;
    for (int i = 0; i < a->gemm.count; i++)
        tiles += a->tiles[i] = (pair * a->gemm.w[i].n + rows - 1) / rows;
    a->shape = shape;
    a->row_tiles = (a->gemm.rows + tokens - 1) / tokens;
    a->items = tiles * a->row_tiles;
    int64_t rounds = (a->items + g->multiprocessors - 1) / g->multiprocessors;
    return (rounds / 2 * 5 + rounds % 2 * 3) * sala__prefill_shapes[shape].clocks;
}

static int64_t sala__padded(int64_t rows) {
    return (rows + SALA_GEMM_ROWS - 1) / SALA_GEMM_ROWS * SALA_GEMM_ROWS;
}

// W4A16 in prefill: 4-bit weights become BF16 beside each other in scratch, exactly, and alpha stays for
// the product's end. For any number of rows, so that no bit depends on the chunk.
static void sala__unpack_weights(sala__gpu *g, sala_product_args *a) {
    char *to = (char *)g->unpacked, *end = to + g->unpacked_bytes;
    for (int i = 0; i < a->gemm.count; i++) {
        sala_weight *w = &a->gemm.w[i];
        if (!sala__is_4bit(w->format)) continue;
        int64_t rows = sala__padded((int64_t)w->n * (a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1));
        int64_t bytes = rows * w->k * 2, blocks = rows / 64 * (w->k / 64);
        sala_unpack4_args unpack = {(const uint8_t *)w->data,
                                    (uint16_t *)(void *)to,
                                    w->format,
                                    w->group,
                                    sala_block4(w->format, w->group, w->zero != NULL),
                                    (int32_t)rows,
                                    w->k};
        if (bytes > end - to)
            sala__fail(&g->error, SALA_E_STATE, "the plan has no room to unpack %d x %d weights",
                       w->n, w->k);
        sala__launch(g, SALA__KERNEL_unpack4, (unsigned)((blocks + 7) / 8), 1, 1, 0, &unpack);
        w->data = to;
        w->format = SALA_BF16;
        to += bytes;
    }
}

// The shape of tiles that takes the least time; the results do not depend on it.
static void sala__launch_prefill_product(sala__gpu *g, sala_product_args *a) {
    int best = 0;
    if (!a->gemm.qx.codes) sala__unpack_weights(g, a);
    for (int shape = 1; shape < SALA__PREFILL_SHAPE_COUNT; shape++)
        if (sala__prefill_cut(g, a, shape) < sala__prefill_cut(g, a, best)) best = shape;
    if (g->shape) best = g->shape - 1;
    sala__prefill_cut(g, a, best);
    g->variant = a->kind;
    if (a->gemm.qx.codes)
        sala__launch(g, SALA__KERNEL_prefill_fp4, (unsigned)a->items, 1, 1, SALA_FP4_SHARED, a);
    else
        sala__launch(g, SALA__KERNEL_prefill_gemm, (unsigned)a->items, 1, 1, SALA_PREFILL_SHARED,
                     a);
    g->variant = 0;
    if (a->kind != SALA_PRODUCT_NORM) return;
    a->norm.branch = NULL; // it is in x
    sala__launch_norm(g, &a->norm);
}

// A product's norm by a block of the kernel that would have it behind the product: the same bits.
static void sala__launch_due(sala__gpu *g) {
    sala_product_args p;
    memset(&p, 0, sizeof p);
    p.kind = SALA_PRODUCT_NORM;
    p.tokens = 8;
    p.row_tiles = 1;
    p.norm = g->due.norm;
    p.norm.branch = NULL; // it is in x
    p.arrivals = g->due.arrivals;
    g->due.norm.rows = 0;
    sala__launch(g, SALA__KERNEL_gemm_nvfp4, 1, 1, 1, SALA_GEMM4_SHARED, &p);
}

// The norm that is due is made by a product of it with `count` weights at w, or now.
static void sala__take_due(sala__gpu *g, const sala_act *x, const sala_weight *w, int count,
                           sala_product_args *p) {
    const sala_norm_args *norm = &g->due.norm;
    if (!norm->rows) return;
    int can = p && x == norm->y && norm->divisor == 1;
    for (int i = 0; can && i < count; i++) can = w[i].format == SALA_NVFP4;
    if (!can) {
        sala__launch_due(g);
        return;
    }
    p->due = 1;
    p->norm = *norm;
    g->due.norm.rows = 0;
}

// Can a product with a norm leave that to whoever reads it?
static int sala__is_whole(const sala_product_args *a) {
    const sala_weight *w = a->gemm.w;
    return a->kind == SALA_PRODUCT_NORM && a->gemm.rows <= 2 && w->format == SALA_NVFP4 &&
           w->n % 32 == 0 && w->n <= SALA_ROW_K && sala_gemm_splits(w->n, w->k) == 4;
}

// One or two rows of x, NVFP4: a product that has or leaves a norm.
static void sala__launch_row(sala__gpu *g, sala_product_args *a) {
    const sala_weight *w = a->gemm.w;
    int rows = a->whole ? 32 : 128, pair = a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1;
    a->depth = w->k / 64 / (a->whole ? 4 : 1);
    for (int i = 0; i < a->gemm.count; i++)
        a->items += a->tiles[i] = (pair * w[i].n + rows - 1) / rows;
    int grid = a->items < g->multiprocessors ? a->items : g->multiprocessors;
    g->variant = a->kind;
    sala__launch(g, SALA__KERNEL_gemm_nvfp4_row, (unsigned)grid, 1, 1, SALA_GEMM4_SHARED, a);
    g->variant = 0;
}

// More than 16 rows of x, 4 bits: is the kernel with tiles of 96 rows faster than that with up to `most`?
// As measured on an H200 (hundredths of a millisecond of all layers of the 9B); the bits are the same.
static int sala__is_broad(int rows, int most) {
    int tiles = (rows + most - 1) / most, each = (rows + tiles - 1) / tiles;
    int broad_tiles = (rows + SALA_BROAD_TOKENS - 1) / SALA_BROAD_TOKENS;
    int broad_each = (rows + broad_tiles - 1) / broad_tiles;
    return broad_tiles * (broad_each > 64 ? 665 : 555) < tiles * (each > 48 ? 480 : 380);
}

// A product of verify with weights of one format. Two blocks a multiprocessor take the items in turn,
// or, with 4 bits, one block that is twice as large.
static void sala__launch_verify_product(sala__gpu *g, sala_product_args *a) {
    const sala_weight *w = a->gemm.w;
    int four = sala__is_4bit(w->format), tokens = SALA_GEMM_TOKENS, most = 2 * g->multiprocessors;
    int broad = four && sala__is_broad(a->gemm.rows, SALA_GEMM4_TOKENS(g->shared));
    int pair = a->kind == SALA_PRODUCT_SWIGLU ? 2 : 1, kernel = SALA__KERNEL_gemm;
    int rows = SALA_GEMM_ROWS, tiles = 0, shared = SALA_GEMM_SHARED;
    if (four) tokens = broad ? SALA_BROAD_TOKENS : SALA_GEMM4_TOKENS(g->shared);
    a->splits = a->kind == SALA_PRODUCT_NORM    ? sala_gemm_splits(w->n, w->k)
                : a->kind == SALA_PRODUCT_PARTS ? a->gemm.splits
                                                : 1;
    a->depth = w->k / 64 / a->splits;
    a->row_tiles = (a->gemm.rows + tokens - 1) / tokens;
    a->tokens = tokens;
    if (four) { // as many rows of x in each tile, in groups of eight
        a->tokens = ((a->gemm.rows + a->row_tiles - 1) / a->row_tiles + 7) / 8 * 8;
        kernel = w->format == SALA_NVFP4 ? SALA__KERNEL_gemm_nvfp4 : SALA__KERNEL_gemm_int4;
        kernel += broad ? 2 : a->tokens > 16; // gemm_..._broad, gemm_..._wide
        shared = !broad && a->tokens > 16 ? g->shared : SALA_GEMM4_SHARED;
        rows = SALA_GEMM4_ROWS;
        most = g->multiprocessors;
    }
    for (int i = 0; i < a->gemm.count; i++)
        tiles += a->tiles[i] = (pair * w[i].n + rows - 1) / rows;
    a->items = tiles * a->splits * a->row_tiles;
    g->variant = a->kind;
    sala__launch(g, kernel, (unsigned)(a->items < most ? a->items : most), 1, 1, (size_t)shared, a);
    g->variant = 0;
}

// What all products have in common. Those of verify are a launch for each format.
static void sala__launch_product(sala__gpu *g, sala_product_args *a) {
    static const int32_t formats[] = {SALA_BF16, SALA_NVFP4, SALA_INT4};
    if (g->prefill && !a->gemm.y_f32) {
        sala__launch_prefill_product(g, a);
        return;
    }
    for (int f = 0; f < 3; f++) {
        sala_product_args part = *a;
        part.gemm.count = 0;
        for (int i = 0; i < a->gemm.count; i++) {
            if (a->gemm.w[i].format != formats[f]) continue;
            part.gemm.w[part.gemm.count] = a->gemm.w[i];
            part.gemm.parts_at[part.gemm.count] = a->gemm.parts_at[i];
            part.gemm.y[part.gemm.count++] = a->gemm.y[i];
        }
        if (part.gemm.count == 0) continue;
        part.whole = sala__is_whole(&part);
        if (part.whole || part.due)
            sala__launch_row(g, &part);
        else
            sala__launch_verify_product(g, &part);
    }
}

static void sala__launch_gemm(sala__gpu *g, const sala_gemm_args *a) {
    sala_product_args p;
    memset(&p, 0, sizeof p);
    p.kind = a->parts ? SALA_PRODUCT_PARTS : SALA_PRODUCT_PLAIN;
    p.gemm = *a;
    sala__take_due(g, a->x, a->w, a->count, a->parts || a->y_f32 ? NULL : &p);
    sala__launch_product(g, &p);
}

static void sala__launch_gemm_swiglu(sala__gpu *g, const sala_gemm_swiglu_args *a) {
    sala_product_args p;
    memset(&p, 0, sizeof p);
    p.kind = SALA_PRODUCT_SWIGLU;
    p.gemm.rows = a->rows;
    p.gemm.count = 1;
    p.gemm.x = a->x;
    p.gemm.w[0] = a->gate;
    p.gemm.y[0] = a->y;
    p.gemm.qx = a->qx;
    p.norm.quant = a->quant;
    sala__take_due(g, a->x, &a->gate, 1, &p);
    sala__launch_product(g, &p);
    sala_quantize_args quantize = {a->rows, a->gate.n, a->y, a->quant};
    if (a->quant.codes && !a->qx.codes)
        sala__launch_quantize(g, &quantize); // that was the BF16 kernel
}

static void sala__launch_gemm_norm(sala__gpu *g, const sala_gemm_norm_args *a) {
    sala_product_args p;
    memset(&p, 0, sizeof p);
    p.kind = SALA_PRODUCT_NORM;
    p.gemm.rows = a->norm.rows;
    p.gemm.count = 1;
    p.gemm.x = a->input;
    p.gemm.w[0] = a->w;
    p.gemm.qx = a->qx;
    p.norm = a->norm;
    p.partial = a->partial;
    p.arrivals = a->arrivals;
    sala__launch_product(g, &p);
    if (sala__is_whole(&p) && !g->prefill) g->due = *a;
}

// ---- launches: sparse attention ----

#define SALA_SELECT_NORMALISER_SHARED 70656 // sizes of the kernels' structs of shared memory
#define SALA_SELECT_SCORE_SHARED 72256
#define SALA_SELECT_TOP_SHARED (8464 + 4 * 16384) // less for short contexts
#define SALA_ATTEND_SHARED 70208
#define SALA_ATTEND_COMBINE_SHARED (8 * 512) // the shares of eight warps

// Blocks that share the parts of a list: with all lists, enough to fill the device evenly, `times` over.
static unsigned sala__list_blocks(const sala__gpu *g, int64_t parts, int times) {
    int64_t most = 8 * times * (int64_t)g->multiprocessors / ((int64_t)g->rows * g->dims->kv_heads);
    return (unsigned)(most < 1 ? 1 : most < parts ? most : parts);
}

static void sala__launch_select_top(sala__gpu *g, const sala_select_args *a) {
    unsigned lists = (unsigned)(g->rows * g->dims->kv_heads);
    size_t short_of = a->capacity < 16384 ? 4 * (size_t)(16384 - a->capacity) : 0;
    sala__launch(g, SALA__KERNEL_select_top, lists, 1, 1, SALA_SELECT_TOP_SHARED - short_of, a);
}

static void sala__launch_select(sala__gpu *g, const sala_select_args *a) {
    unsigned lists = (unsigned)(g->rows * g->dims->kv_heads);
    int64_t parts = (a->capacity + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
    sala__launch(g, SALA__KERNEL_select_normaliser, lists, sala__list_blocks(g, 1 + parts, 1), 1,
                 SALA_SELECT_NORMALISER_SHARED, a);
    sala__launch(g, SALA__KERNEL_select_score, lists, sala__list_blocks(g, parts, 1), 1,
                 SALA_SELECT_SCORE_SHARED, a);
    sala__launch_select_top(g, a);
}

static void sala__launch_attend(sala__gpu *g, const sala_attend_args *a) {
    unsigned lists = (unsigned)(g->rows * g->dims->kv_heads);
    if (g->rows > g->seqs) // every fourth list has the most to do
        sala__launch(g, SALA__KERNEL_attend_trees, lists, sala__list_blocks(g, a->parts, 3), 1,
                     SALA_ATTEND_SHARED, a);
    else
        sala__launch(g, SALA__KERNEL_attend, lists, sala__list_blocks(g, a->parts, 1), 1,
                     SALA_ATTEND_SHARED, a);
    sala__launch(g, SALA__KERNEL_attend_combine, (unsigned)g->rows, (unsigned)g->dims->heads, 1,
                 SALA_ATTEND_COMBINE_SHARED, a);
}

// Row tiles of 16 packed rows (of eight, in a pair) from `first` to `end` times the runs of 32 k,
// a warp each.
static int32_t sala__packed_blocks(int32_t first, int32_t end, int32_t n, int32_t k, int32_t pair) {
    int32_t rows = pair ? 8 : 16, to = pair ? SALA_GEMM_ROWS / 2 : SALA_GEMM_ROWS;
    if (end == n) end = (n + to - 1) / to * to; // the last call zeroes the padding
    int32_t tiles = (end + rows - 1) / rows - first / rows;
    return (tiles * (k / 32) + 7) / 8;
}

static int32_t sala__row_major_blocks(int64_t count) { // eight elements a thread
    return (int32_t)((count + 2047) / 2048);
}

static void sala__launch_pack(sala__gpu *g, const sala_pack_args *a) {
    if (a->rows == 0) return;
    int32_t blocks = sala__row_major_blocks((int64_t)a->rows * a->k);
    if (a->pair >= 0)
        blocks = sala__packed_blocks(a->first, a->first + a->rows, a->n, a->k, a->pair);
    sala__launch(g, SALA__KERNEL_pack, (unsigned)blocks, 1, 1, 0, a);
}

static void sala__launch_fill(sala__gpu *g, const sala_fill_args *a) {
    int32_t blocks = sala__row_major_blocks((int64_t)a->n * a->k);
    if (a->layout) blocks = sala__packed_blocks(0, a->n, a->n, a->k, a->layout - 1);
    sala__launch(g, SALA__KERNEL_fill, (unsigned)blocks, 1, 1, 0, a);
}

// Row tiles of sala_pack4 from `first` to `end` times the stages of 64 k, a warp each.
static unsigned sala__blocks4(int32_t first, int32_t end, int32_t n, int32_t k, int32_t pair) {
    int64_t rows = pair ? 8 : 16, last = end < n ? end : sala__padded(n * 16 / rows) / 16 * rows;
    return (unsigned)(((last - first + rows - 1) / rows * (k / 64) + 7) / 8);
}

static void sala__launch_pack4(sala__gpu *g, const sala_pack4_args *a) {
    unsigned blocks = sala__blocks4(a->first, a->first + a->rows, a->n, a->k, a->pair);
    sala__launch(g, SALA__KERNEL_pack4, blocks, 1, 1, 0, a);
}

static void sala__launch_fill4(sala__gpu *g, const sala_fill4_args *a) {
    sala__launch(g, SALA__KERNEL_fill4, sala__blocks4(0, a->n, a->n, a->k, a->pair), 1, 1, 0, a);
}

static void sala__launch_sample(sala__gpu *g, const sala_sample_args *a) {
    int tiles = (a->vocab + SALA_SAMPLE_TILE - 1) / SALA_SAMPLE_TILE;
    int blocks = g->multiprocessors / g->rows; // of a row, so that all run at once
    if (blocks > tiles) blocks = tiles;
    if (blocks < 1) blocks = 1;
    sala__launch(g, SALA__KERNEL_sample, (unsigned)blocks, (unsigned)g->rows, 1, SALA_SAMPLE_SHARED,
                 a);
}

// ---- launches: prefill ----

#define SALA_GLA_TILES_SHARED 95520 // sizeof(sala_gla_tiles) in sala.cu

// q and k in place, then four blocks a head, 32 columns each.
static void sala__launch_gla_prefill(sala__gpu *g, const sala_gla_args *a) {
    const sala_dims *m = g->dims;
    sala_qk_args qk = sala__gla_qk(m, a, g->rows);
    if (a->q_norm.data || a->k_norm.data || a->cos_sin) sala__launch_qk_norm_rope(g, &qk);
    sala__launch(g, SALA__KERNEL_prefill_gla, (unsigned)m->lin_heads * 4, 1, 1,
                 SALA_GLA_TILES_SHARED, a);
}

#define SALA_PREFILL_STORE_SHARED 32768
#define SALA_PREFILL_SCORE_SHARED 66048
#define SALA_PREFILL_SCORE_ROWS 32 // of a block: SALA_SCORE_TOKENS of each warp

static void sala__launch_store_prefill(sala__gpu *g, const sala_store_args *a) {
    unsigned blocks = (unsigned)g->rows / 64 + 2; // the chunk may begin and end inside a block
    sala__launch(g, SALA__KERNEL_prefill_store, blocks, (unsigned)g->dims->kv_heads, 1,
                 SALA_PREFILL_STORE_SHARED, a);
}

static void sala__launch_select_prefill(sala__gpu *g, const sala_select_args *a) {
    unsigned runs = ((unsigned)g->rows + SALA_PREFILL_SCORE_ROWS - 1) / SALA_PREFILL_SCORE_ROWS;
    sala__launch(g, SALA__KERNEL_prefill_score, runs, (unsigned)g->dims->kv_heads, 1,
                 SALA_PREFILL_SCORE_SHARED, a);
    sala__launch_select_top(g, a);
}

#define SALA_PREFILL_DENSE_SHARED 98304 // sizes of the kernels' structs of shared memory
#define SALA_PREFILL_SPARSE_SHARED(top_k) (74752 + 16 * ((top_k) + 1))

// Each kernel does the rows that are its kind.
static void sala__launch_attend_prefill(sala__gpu *g, const sala_attend_args *a) {
    const sala_dims *m = g->dims;
    int rows = g->rows * (m->heads / m->kv_heads); // of a K/V head, 128 a block
    if (m->dense_len > 1)
        sala__launch(g, SALA__KERNEL_prefill_dense, (unsigned)((rows + 127) / 128 * m->kv_heads), 1,
                     1, SALA_PREFILL_DENSE_SHARED, a);
    sala__launch(g, SALA__KERNEL_prefill_sparse, (unsigned)((g->rows + 1) / 2 * m->kv_heads), 1, 1,
                 SALA_PREFILL_SPARSE_SHARED(m->top_k), a);
}

// ---- launches: the draft head ----

#define SALA__DRAFT_INPUT_SHARED ((33 + 2 * SALA_MAX_TOPK * SALA_MAX_TOPK) * 4)
#define SALA__DRAFT_TOP_SHARED (8 * 8 + 8 * 4 + 16)
#define SALA__DRAFT_GROW_SHARED (3 * 256 * 4)

static void sala__launch_capture(sala__gpu *g, const sala_capture_args *a) {
    sala__launch(g, SALA__KERNEL_capture, (unsigned)a->rows, 1, 1, 32 * 4, a);
}

// Paths cannot be longer than the pass has rows: g->rows and g->seqs are those of the target's pass.
static void sala__launch_keep(sala__gpu *g, const sala_keep_args *a) {
    int path = g->rows < SALA_MAX_PATH ? g->rows : SALA_MAX_PATH;
    sala__launch(g, SALA__KERNEL_keep, (unsigned)g->seqs, (unsigned)path, 1, 0, a);
}

static void sala__launch_gather(sala__gpu *g, const sala_gather_args *a) {
    sala__launch(g, SALA__KERNEL_gather, (unsigned)a->rows, 1, 1, 0, a);
}

static void sala__launch_draft_input(sala__gpu *g, const sala_draft_input_args *a) {
    sala__launch(g, SALA__KERNEL_draft_input, (unsigned)a->rows, 1, 1, SALA__DRAFT_INPUT_SHARED, a);
}

static void sala__launch_draft_turn(sala__gpu *g, const sala_draft_turn_args *a) {
    int heads = a->count * (a->heads + 2 * g->dims->kv_heads); // four a block
    sala__launch(g, SALA__KERNEL_draft_turn, (unsigned)(heads + 3) / 4, 1, 1, 0, a);
}

static int sala__top_blocks(int vocab) { // of eight tiles
    return (vocab + 8 * SALA_TOP_TILE - 1) / (8 * SALA_TOP_TILE);
}

static void sala__launch_draft_top(sala__gpu *g, const sala_draft_top_args *a) {
    sala__launch(g, SALA__KERNEL_draft_top, (unsigned)sala__top_blocks(a->vocab), (unsigned)a->rows,
                 1, SALA__DRAFT_TOP_SHARED, a);
}

static void sala__launch_draft_grow(sala__gpu *g, const sala_draft_grow_args *a) {
    sala__launch(g, SALA__KERNEL_draft_grow, (unsigned)a->growth.seqs, 1, 1,
                 SALA__DRAFT_GROW_SHARED, a);
}

// One operation, in the form of the pass.
static void sala__run_gpu(sala__gpu *g, int operation, const void *args) {
    if (operation != SALA__OP_gemm && operation != SALA__OP_gemm_swiglu)
        sala__take_due(g, NULL, NULL, 0, NULL);
    switch (operation) {
    case SALA__OP_embed: sala__launch_embed(g, (const sala_embed_args *)args); break;
    case SALA__OP_rope_table: sala__launch_rope_table(g, (const sala_rope_args *)args); break;
    case SALA__OP_norm: sala__launch_norm(g, (const sala_norm_args *)args); break;
    case SALA__OP_gemm: sala__launch_gemm(g, (const sala_gemm_args *)args); break;
    case SALA__OP_qk_norm_rope: sala__launch_qk_norm_rope(g, (const sala_qk_args *)args); break;
    case SALA__OP_gla_verify: sala__launch_gla_verify(g, (const sala_gla_args *)args); break;
    case SALA__OP_gla_prefill: sala__launch_gla_prefill(g, (const sala_gla_args *)args); break;
    case SALA__OP_store_prefill:
        sala__launch_store_prefill(g, (const sala_store_args *)args);
        break;
    case SALA__OP_gate: sala__launch_gate(g, (const sala_gate_args *)args); break;
    case SALA__OP_quantize: sala__launch_quantize(g, (const sala_quantize_args *)args); break;
    case SALA__OP_select:
        if (g->prefill)
            sala__launch_select_prefill(g, (const sala_select_args *)args);
        else
            sala__launch_select(g, (const sala_select_args *)args);
        break;
    case SALA__OP_attend:
        if (g->prefill)
            sala__launch_attend_prefill(g, (const sala_attend_args *)args);
        else
            sala__launch_attend(g, (const sala_attend_args *)args);
        break;
    case SALA__OP_gemm_norm: sala__launch_gemm_norm(g, (const sala_gemm_norm_args *)args); break;
    case SALA__OP_gemm_swiglu:
        sala__launch_gemm_swiglu(g, (const sala_gemm_swiglu_args *)args);
        break;
    case SALA__OP_accept: sala__launch_accept(g, (const sala_accept_args *)args); break;
    case SALA__OP_commit: sala__launch_commit(g, (const sala_commit_args *)args); break;
    case SALA__OP_capture: sala__launch_capture(g, (const sala_capture_args *)args); break;
    case SALA__OP_keep: sala__launch_keep(g, (const sala_keep_args *)args); break;
    case SALA__OP_gather: sala__launch_gather(g, (const sala_gather_args *)args); break;
    case SALA__OP_draft_input:
        sala__launch_draft_input(g, (const sala_draft_input_args *)args);
        break;
    case SALA__OP_draft_turn: sala__launch_draft_turn(g, (const sala_draft_turn_args *)args); break;
    case SALA__OP_draft_top: sala__launch_draft_top(g, (const sala_draft_top_args *)args); break;
    case SALA__OP_draft_grow: sala__launch_draft_grow(g, (const sala_draft_grow_args *)args); break;
    default: sala__fail(&g->error, SALA_E_DEVICE, "operation %d has no kernel", operation); break;
    }
}

// What the kernels were not written for, by the names of config.json.
static int sala__gpu_supports(const sala_dims *m, sala_error *err) {
    const struct {
        int ok;
        const char *what;
        int value;
        const char *needed;
    } rules[] = {
        {m->head_dim == 128, "head_dim", m->head_dim, "128"},
        {m->lin_dim == 128, "lightning_head_dim", m->lin_dim, "128"},
        {m->kernel == 32, "kernel_size", m->kernel, "32"},
        {m->stride == 16, "kernel_stride", m->stride, "16"},
        {m->block == 64, "block_size", m->block, "64"},
        {m->heads / m->kv_heads <= 16, "num_attention_heads / num_key_value_heads",
         m->heads / m->kv_heads, "at most 16"},
        {m->heads <= 128, "num_attention_heads", m->heads, "at most 128"},
        {m->hidden % 64 == 0 && m->hidden <= 12288, "hidden_size", m->hidden,
         "a multiple of 64, at most 12288"},
        {m->ffn % 64 == 0, "intermediate_size", m->ffn, "a multiple of 64"},
        {SALA_PREFILL_SPARSE_SHARED(m->top_k) <= SALA__SHARED_MOST, "topk with the window",
         m->top_k, "fewer"},
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (!rules[i].ok)
            return sala__fail(err, SALA_E_MODEL,
                              "%s is %d, but the CUDA kernels need %s; use device cpu",
                              rules[i].what, rules[i].value, rules[i].needed);
    return 0;
}

// The model's shape as -DSALA_DIMS=..., in the order of the struct's members.
static void sala__gpu_dims_option(const sala_dims *m, char out[1024]) {
    const int32_t *integers = &m->vocab;
    const float *floats = &m->eps;
    const int integer_count = (int)(offsetof(sala_dims, eps) / sizeof(int32_t));
    const int float_count = (int)((sizeof(sala_dims) - offsetof(sala_dims, eps)) / sizeof(float));
    int n = snprintf(out, 1024, "-DSALA_DIMS=");
    for (int i = 0; i < integer_count; i++)
        n += snprintf(out + n, (size_t)(1024 - n), "%d,", (int)integers[i]);
    for (int i = 0; i < float_count; i++)
        n += snprintf(out + n, (size_t)(1024 - n), "%af%s", (double)floats[i],
                      i + 1 < float_count ? "," : "");
}

#define SALA__GPU_UNITS 8

static int sala__gpu_open(sala__gpu *g, const sala_dims *dims, sala_error *err) { // inside enter
    char dims_option[1024], shared_option[48];
    const char *options[4] = {dims_option, shared_option};
    const int trace = getenv("SALA_TRACE") != NULL; // see tools/bench_gpu.c
    if (!g->units) g->units = 7;                    // without 4-bit weights
    g->dims = dims;
    g->multiprocessors = g->cuda.multiprocessors;
    g->early = 1;
    if (!g->shared) g->shared = g->cuda.shared;
    snprintf(shared_option, sizeof shared_option, "-DSALA_TEAMS_SHARED=%d", g->shared);
    sala__gpu_dims_option(dims, dims_option);
    double start = sala__now();
    int count = 2;
    if (trace) options[count++] = "-DSALA_TRACE";
    if (g->fp4) options[count++] = g->fp4 == 1 ? "-DSALA_FP4=1" : "-DSALA_FP4=0";
    int code = sala__cuda_compile(&g->cuda, options, count, g->units, err);
    if (code == 0 && sala__now() - start > 1)
        sala__log(&g->cuda.env, SALA_LOG_INFO, "kernels compiled for %s in %.1f s",
                  g->cuda.architecture, sala__now() - start);
    for (int i = 0; i < SALA__KERNEL_COUNT && code == 0; i++) {
        unsigned unit = sala__kernels[i].unit, before = g->units & ((1u << unit) - 1);
        int module = __builtin_popcount(before); // units are loaded in order
        int wide = i == SALA__KERNEL_gemm_nvfp4_wide || i == SALA__KERNEL_gemm_int4_wide;
        unsigned most = wide ? (unsigned)g->shared : SALA__SHARED_MOST;
        if (g->units >> unit & 1)
            code = sala__cuda_get_kernel(&g->cuda, module, sala__kernels[i].name, most,
                                         &g->kernels[i], err);
    }
    return code;
}

static void sala__gpu_close(sala__gpu *g) {
    sala__env env = g->cuda.env;
    if (g->cuda.context && sala__cuda_enter(&g->cuda, NULL) == 0) {
        sala__cuda_wait(&g->cuda, NULL);
        for (int i = 0; i < g->graph_count; i++) sala__cuda_graph_free(&g->cuda, g->graphs[i].exec);
        for (size_t i = 0; i < g->taken_count; i++) sala__cuda_release(&g->cuda, g->taken[i], 0);
        sala__cuda_leave(&g->cuda);
    }
    sala__release(&env, g->taken);
    sala__cuda_close(&g->cuda);
    memset(g, 0, sizeof *g);
}

// ---- weights on the device ----

static sala_weight *sala__gate_of(const sala__item *item, sala__weights *w) {
    sala__layer *l = item->layer < 0 ? NULL : &w->layers[item->layer];
    return l && item->weight == &l->mlp_up ? &l->mlp_gate : NULL; // where an up projection goes
}

// How a tensor lies there.
typedef struct sala__gpu_place {
    int layout;                   // 0 a vector, 1 a matrix, 2 and 3 the two of a pair
    int32_t format, group, block; // SALA_BF16, or 4 bits: see sala_packed4
    int64_t rows;                 // of the matrix or the pair, padding included
    int64_t data, bytes;          // of the numbers; and with alpha, a multiple of 256. 0 for 3
} sala__gpu_place;

// gate and up share blocks where both are 4-bit alike; otherwise both become BF16.
static sala__gpu_place sala__gpu_place_of(const sala__item *item, sala__weights *w) {
    sala__layer *l = item->layer < 0 ? NULL : &w->layers[item->layer];
    int pair = l && (item->weight == &l->mlp_gate || item->weight == &l->mlp_up);
    const sala_weight *a = pair ? &l->mlp_gate : item->weight, *b = pair ? &l->mlp_up : a;
    sala__gpu_place p = {item->k > 1, SALA_BF16, 0, 0, item->n, 0, 0};
    if (pair) p.layout = a == item->weight ? 2 : 3;
    if (p.layout) p.rows = sala__padded(item->n) * (pair ? 2 : 1);
    if (sala__is_4bit(a->format) && a->format == b->format && a->group == b->group) {
        p.format = a->format;
        p.group = a->group;
        p.block = sala_block4(p.format, p.group, a->zero || b->zero);
    }
    if (p.layout == 3) return p;
    p.data = p.bytes = p.block ? p.rows / 64 * (item->k / 64) * p.block : p.rows * item->k * 2;
    if (p.block) p.bytes += p.rows * 4;
    p.bytes = (p.bytes + 255) / 256 * 256;
    return p;
}

static int64_t sala__gpu_weights_total(const sala__config *c, sala__weights *w) {
    sala__item item;
    int64_t bytes = 0;
    for (int i = 0; i < sala__item_count(c); i++)
        if (sala__item_at(c, w, i, &item)) bytes += sala__gpu_place_of(&item, w).bytes;
    return bytes;
}

// Bytes that the 4-bit weights of one product of prefill take in BF16, at most. NVFP4 is left out where
// prefill is W4A4.
static int64_t sala__gpu_unpack_bytes(const sala__config *c, sala__weights *w, int w4a4) {
    sala__item item;
    int64_t most = 0, sum = 0; // sum: of q, k, v and the gate
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item) || item.weight == &w->head) continue;
        const sala__layer *l = &w->layers[item.layer < 0 ? 0 : item.layer];
        const sala_weight *x = item.weight;
        sala__gpu_place p = sala__gpu_place_of(&item, w);
        int64_t bytes = p.block && p.layout != 3 ? p.rows * item.k * 2 : 0;
        if (w4a4 && p.format == SALA_NVFP4) bytes = 0;
        if (x == &l->q) sum = 0;
        if (x == &l->q || x == &l->k || x == &l->v || x == &l->gate) bytes = sum += bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

// What 4-bit weights ask of the GPU's kernels.
static int sala__gpu_takes(const sala__config *c, sala__weights *w, sala_error *err) {
    sala__item item;
    for (int i = 0; i < sala__item_count(c); i++) {
        if (!sala__item_at(c, w, i, &item) || item.weight->format != SALA_INT4) continue;
        int group = item.weight->group;
        if (group != 32 && group % 64)
            return sala__fail(err, SALA_E_MODEL,
                              "%s has groups of %d, but the CUDA kernels need 32 or a multiple of "
                              "64; use device cpu",
                              item.name, group);
    }
    return 0;
}

#define SALA__SLAB ((int64_t)64 << 20) // bytes of a matrix that pass through the device at a time

// A matrix (or vector) of the files to the device: slabs of rows as they are, packed there.
static void sala__gpu_upload(sala__gpu *g, const sala_weight *from, void *slab, void *to,
                             int layout) {
    int64_t row = (int64_t)from->k * (from->format == SALA_F32 ? 4 : 2);
    int32_t most = (int32_t)(SALA__SLAB / row) < from->n ? (int32_t)(SALA__SLAB / row) : from->n;
    for (int32_t first = 0; first < from->n && !g->error.code; first += most) {
        int32_t rows = from->n - first < most ? from->n - first : most;
        sala_pack_args a = {slab, (uint16_t *)to, from->format, first,
                            rows, from->n,        from->k,      layout == 0 ? -1 : layout - 1};
        if (sala__cuda_upload(&g->cuda, sala__on_gpu(slab), (const char *)from->data + first * row,
                              (size_t)(rows * row), &g->error) == 0)
            sala__launch_pack(g, &a);
        if (!g->error.code) sala__cuda_wait(&g->cuda, &g->error); // the slab is used again
    }
}

// The same for a 4-bit matrix: codes, scales and zeros of some rows lie in the slab one after the other.
static void sala__gpu_upload4(sala__gpu *g, const sala_weight *from, void *slab, uint8_t *to,
                              const sala__gpu_place *p) {
    int64_t groups = from->k / from->group, zero_row = from->zero ? groups : 0;
    int64_t code_row = from->k / 2, scale_row = groups * sala__scale_size(from->format);
    int32_t most = (int32_t)(SALA__SLAB / (code_row + scale_row + zero_row)) / 16 * 16;
    sala_error *e = &g->error;
    for (int32_t first = 0; first < from->n && !e->code; first += most) {
        int32_t rows = from->n - first < most ? from->n - first : most;
        uint8_t *codes = (uint8_t *)slab, *scales = codes + rows * code_row;
        uint8_t *zeros = from->zero ? scales + rows * scale_row : NULL;
        sala_pack4_args a = {codes,    scales, zeros, to,      from->format, from->group,
                             p->block, first,  rows,  from->n, from->k,      p->layout - 1};
        const struct {
            const void *from;
            uint8_t *to;
            int64_t row;
        } parts[] = {{from->data, codes, code_row},
                     {from->scale, scales, scale_row},
                     {from->zero, zeros, zero_row}};
        for (int i = 0; i < 3 && !e->code; i++)
            if (parts[i].row)
                sala__cuda_upload(&g->cuda, sala__on_gpu(parts[i].to),
                                  (const char *)parts[i].from + first * parts[i].row,
                                  (size_t)(rows * parts[i].row), e);
        sala__launch_pack4(g, &a);
        if (!e->code) sala__cuda_wait(&g->cuda, e); // the slab is used again
    }
}

// A 4-bit matrix whose partner in the pair is not: with alpha, as numbers of FP32.
static void sala__gpu_upload_wide(sala__gpu *g, const sala_weight *from, void *slab, void *to,
                                  int layout) {
    size_t row = (size_t)from->k;
    float *wide =
        (float *)sala__alloc(&g->cuda.env, (size_t)from->n * row, 4, "widening weights", &g->error);
    if (!wide) return;
    for (int n = 0; n < from->n; n++) {
        float *out = wide + (size_t)n * row;
        for (int k = 0; k < from->k; k += 16) sala__load_weight4(from, n, k, out + k);
        for (int k = 0; k < from->k && from->alpha; k++) out[k] *= from->alpha[n];
    }
    sala_weight plain = sala_plain_weight(wide, SALA_F32, from->n, from->k);
    sala__gpu_upload(g, &plain, slab, to, layout);
    sala__release(&g->cuda.env, wide);
}

// alpha of a matrix, or of gate and up in the pair's order; padding has 0.
static void sala__gpu_upload_alpha(sala__gpu *g, const sala_weight *from, const sala_weight *up,
                                   void *to, int64_t rows) {
    float *alpha =
        (float *)sala__alloc(&g->cuda.env, (size_t)rows, sizeof *alpha, "alphas", &g->error);
    if (!alpha) return;
    for (int n = 0; n < from->n; n++)
        alpha[up ? sala_packed_pair(n, 0) : n] = from->alpha ? from->alpha[n] : 1;
    for (int n = 0; up && n < up->n; n++)
        alpha[sala_packed_pair(n, 1)] = up->alpha ? up->alpha[n] : 1;
    if (sala__cuda_upload(&g->cuda, sala__on_gpu(to), alpha, (size_t)rows * sizeof *alpha,
                          &g->error) == 0)
        sala__cuda_wait(&g->cuda, &g->error);
    sala__release(&g->cuda.env, alpha);
}

// The numbers of one tensor, from the files or made by a hash; item and host are the same one.
static void sala__gpu_move_data(sala__gpu *g, const sala_weight *host, const sala__gpu_place *p,
                                const sala_fill_args *fill, int synthetic, void *slab) {
    uint8_t *to = (uint8_t *)fill->to;
    if (synthetic && p->block) {
        sala_fill4_args a = {to,       fill->seed, p->format, p->group,
                             p->block, fill->n,    fill->k,   p->layout - 1};
        sala__launch_fill4(g, &a);
    } else if (synthetic) {
        sala__launch_fill(g, fill);
    } else if (p->block) {
        sala__gpu_upload4(g, host, slab, to, p);
    } else if (sala__is_4bit(host->format)) {
        sala__gpu_upload_wide(g, host, slab, to, p->layout);
    } else {
        sala__gpu_upload(g, host, slab, to, p->layout);
    }
}

// All weights to the device: w becomes a copy of `from` whose data lies there, in one allocation: a
// driver rounds each up to 2 MiB.
static int sala__gpu_move(sala__gpu *g, const sala__config *c, sala__weights *from,
                          const sala_options *o, void *slab, sala__weights *w, sala_error *err) {
    sala__item host, item;
    sala_error *e = &g->error;
    int count = sala__item_count(c);
    char *at = (char *)sala__gpu_take(g, (size_t)sala__gpu_weights_total(c, from), "weights", e);
    for (int i = 0; i < count && !e->code; i++) {
        if (!sala__item_at(c, w, i, &item) || !sala__item_at(c, from, i, &host)) continue;
        sala__gpu_place p = sala__gpu_place_of(&host, from);
        sala_weight *to = item.weight;
        const sala_weight *gate = p.layout == 3 ? sala__gate_of(&item, w) : NULL;
        if (gate) *to = *gate;
        if (!gate) to->data = at;
        at += p.bytes;
        to->format = p.format;
        to->group = p.group;
        if (p.block == SALA_BLOCK4_BIAS) to->zero = (const uint8_t *)to->data;
        if (p.block) to->input_scale = host.weight->input_scale;
        if (p.block && !gate) {
            const sala_weight *up = p.layout == 2 ? &from->layers[host.layer].mlp_up : NULL;
            to->alpha = (const float *)(const void *)((const char *)to->data + p.data);
            sala__gpu_upload_alpha(g, host.weight, up, (void *)(uintptr_t)to->alpha, p.rows);
        }
        if (!p.block && sala__is_4bit(host.weight->format))
            sala__log(&g->cuda.env, SALA_LOG_WARNING,
                      "%s: gate_proj and up_proj have different formats: kept in BF16 on the GPU",
                      item.name);
        sala_fill_args fill = {(uint16_t *)(uintptr_t)to->data, 0, 0, 0, item.n, item.k, p.layout};
        sala__synthetic_shape(c, w, &item, o->synthetic_seed, i, &fill.seed, &fill.scale,
                              &fill.offset);
        if (!e->code) sala__gpu_move_data(g, host.weight, &p, &fill, o->synthetic, slab);
        sala__progress(&g->cuda.env, "weights to the GPU", 0.7 + 0.3 * i / count);
    }
    sala__weights_finish(c, w);
    return sala__gpu_wait(g, err);
}

static int sala__gpu_weights(sala__gpu *g, const sala__config *c, sala__weights *from,
                             const sala_options *o, sala__weights *w, sala_error *err) {
    sala__cu_memory slab = 0;
    int code = sala__weights_plan(&g->cuda.env, c, w, err);
    sala__clear(&g->error);
    if (code == 0 && !o->synthetic)
        code = sala__cuda_alloc(&g->cuda, (size_t)SALA__SLAB, "loading", &slab, err);
    if (code == 0) code = sala__gpu_move(g, c, from, o, (void *)(uintptr_t)slab, w, err);
    sala__cuda_release(&g->cuda, slab, (size_t)SALA__SLAB);
    return code;
}

// The same of a draft head; `target` has what it shares, there.
static int sala__gpu_draft_weights(sala__gpu *g, const sala__config *c, sala__weights *from,
                                   const sala__weights *target, const sala_options *o,
                                   sala__weights *w, sala_error *err) {
    size_t bytes = (size_t)c->draft_vocab * sizeof *w->target_ids;
    int code = sala__gpu_weights(g, c, from, o, w, err);
    if (code < 0) return code;
    sala__draft_share(c, w, target);
    w->target_ids = (int32_t *)sala__gpu_take(g, bytes, "the draft vocabulary", err);
    if (!w->target_ids) return err && err->code ? err->code : SALA_E_MEMORY;
    code = sala__cuda_upload(&g->cuda, sala__on_gpu(w->target_ids), from->target_ids, bytes, err);
    return code < 0 ? code : sala__cuda_wait(&g->cuda, err);
}
/* -----------------------------------------------------------------------------------------------
   [10] MODEL AND MEMORY: the plan of every byte, pages and slots

   sala_open does three things in order: read (config, weights, tokenizer), plan (how many bytes of
   what, and whether they fit), take. After that nothing grows but a request's own lists. K/V and
   compressed keys live in pages of one block; a sequence owns a list of them. Lightning states live
   in slots, one a sequence.
   -------------------------------------------------------------------------------------------- */

typedef struct sala__plan {
    int64_t pages;                          // of the pool, shared by all sequences
    int32_t slots;                          // sequences resident at once
    int32_t rows;                           // of the largest pass
    int32_t node_rows;                      // of the largest verify pass
    int32_t logits_rows;                    // of prefill whose logits a request can see; at least 1
    int64_t blocks, attend_parts;           // of the longest context: see kernels.h
    size_t page_kv, page_tier1, page_tier2; // elements of one page, one layer, one of K and V
    size_t state;                           // floats of one state, one layer
    size_t pending;        // elements of one pending path, one layer, one of k and v
    size_t thread_scratch; // bytes
    int32_t snapshots;     // of prefixes
    int64_t kv_bytes, state_bytes, pending_bytes, scratch_bytes, reuse_bytes;
    int64_t unpack_bytes;       // of sala__gpu_unpack_bytes
    int64_t weight_bytes;       // made or copied, not mapped
    int64_t draft_weight_bytes; // of the draft head, the same
    int64_t limit;              // bytes that these eight may take
} sala__plan;

// The draft head's cache of one sequence: pages of 64 tokens, the first one kept as an anchor, then a
// window. Keys carry their position; their places only say in which order they stand.
typedef struct sala__draft_cache {
    int32_t place;  // 1 + its place in the head's pools; 0: the head does not know it
    int32_t filled; // tokens in the pages
    int32_t seen;   // position of the next one to go there: the features of those behind it wait
} sala__draft_cache;

// From this position on tokens were prefilled, as one segment, or verified: numbers depend on it.
typedef struct sala__phase {
    int32_t first, verified;
} sala__phase;

// One sequence: what it holds, and where it stands.
typedef struct sala__sequence {
    int64_t id;      // 0: this slot is free
    int64_t request; // active request or 0
    int32_t root;    // the last chosen token, in no cache yet; -1: none
    int32_t pending; // nodes of its pending path
    int32_t stored;  // tokens whose K/V and compressed rows are in its pages
    int32_t *pages;  // [page_count]
    int32_t page_count, page_capacity;
    int32_t *tokens; // [token_count] its history: stored tokens, then the root
    size_t token_count, token_capacity;
    sala__phase *phases; // [phase_count] of the stored tokens
    size_t phase_count, phase_capacity;
    sala__draft_cache draft;
} sala__sequence;

// A prompt's beginning that another one can begin with, too: see "prefix reuse".
typedef struct sala__prefix {
    int32_t *tokens; // [length] then its pages [length / block]
    int32_t length;  // 0: this one is free
    int64_t used;    // the latest request that it was of use for
} sala__prefix;

// Speculation of one request: its index of n-grams, how drafts did, and what is tried next.
typedef struct sala__spec {
    // Places in the history of the sequence where four tokens end, plus 1: the last one of each hash,
    // and of each place the one before it with the same hash. 0: none.
    int32_t *chain_head, *chain_next; // [chain_mask + 1], [chain_room]
    uint32_t chain_mask;
    int64_t chain_room, indexed; // tokens of the sequence that are in it
    int32_t misses;              // chains in a row that failed
    // The chain that was planned last begins behind `place`; `aligned` is the place of the token that
    // stood there where the root stands now, 0: none. Resumed chains in a row that failed: `lost`.
    int64_t place, aligned;
    int32_t resumed, lost, run; // run: tokens that were right in this alignment
    // Of the latest 8 to 24 chains: tokens that they gave, and had to give to be worth their time. They are
    // cut to half their length: `halved`.
    int32_t chains, halved;
    double got, price;
    int32_t tree_steps, tree_sum;    // trees of a head in this window, and the tokens they gave
    int64_t step;                    // verifies of this request
    int64_t chains_from, trees_from; // no chain, no tree before this step
    int32_t pause;                   // steps that the last pause of trees took
    int64_t before;                  // tokens chosen when the tree was planned
    sala_tree tree;                  // of this verify
    int32_t source, level, paused;   // SALA_DRAFT_*, of the policy; see sala_event
    int32_t
        deepest; // depth that a node of the next tree may have; then it fits pages and max_tokens
    int32_t row[SALA_MAX_NODES]; // of each of its nodes, from the sequence's first row on
} sala__spec;

#define SALA__DRAFTS 16        // sequences for which the head drafts in one step
#define SALA__DRAFT_BAND 512   // rows of a pass that only fills its cache
#define SALA__DRAFT_EXTEND 128 // most tokens that a pass which grows trees puts into it
#define SALA__DRAFT_GRAPHS 48
#define SALA__DRAFT_VIEWS (2 + SALA_MAX_PATH) // see sala__draft_layout

typedef struct
    sala__draft_graph { // a recorded pass: of its bucket, of trees of this depth and width
    int32_t extend, seqs, depth, topk;
    sala__cu_exec exec;
} sala__draft_graph;

// What the head works with. Its rows: the last token of each sequence, then others of `extend` that it
// has not seen, then the nodes of the trees step by step (see sala_growth).
typedef struct sala__draft {
    sala__gpu gpu; // its kernels, with its dims; context, stream and memory are the engine's
    sala__draft_graph graphs[SALA__DRAFT_GRAPHS];
    int32_t graph_count, graph_next;
    // the plan
    int32_t places, seqs, blocks;  // sequences that it knows at once, pages of each
    int32_t slack;                 // tokens that are dropped together when those are full
    int32_t topk, step_rows, band; // of a node, of a step of trees, of a pass that only fills
    int32_t rows, parts;           // of a pass; see sala_attend_args
    size_t part_rows;              // heads times parts of all rows of a step
    int64_t kv_bytes;
    int32_t owner[SALA__DRAFTS]; // of each place: 1 + slot, or 0
    // pools
    sala_pages pages;        // k, v [places * blocks, kv_heads, 64, head_dim]
    int32_t *tables, *table; // [places, blocks] pages of each place; the same there
    int32_t *slots, *slot;   // [max_sequences] place of each slot or -1; the same there
    sala_act *debt;          // [places, SALA_DRAFT_DEBT, 3 hidden]
    // of a pass
    sala_act *features;      // [plan.rows, 3 hidden] of the target's pass
    sala_act *g;             // [band, 3 hidden]
    sala_act *x[2], *u, *y;  // [band or step_rows, hidden], [band, 2 hidden], [step_rows, hidden]
    sala_act *q, *k, *v, *o; // k, v: of all rows
    sala_act *ffn, *ffn_up, *branch;
    float *frequency, *cos_sin, *logits, *partial;
    float *parts_sum;                         // see sala_gemm_args
    int32_t *dense, *arrivals, *top_arrivals; // dense: -1, for all lists of attention
    sala_top *tops;
    int32_t *parent, *flat, *path, *best_token; // see sala_growth
    float *score, *best_score;
    sala_tree *trees, *trees_out; // [seqs]; on the host
    char *step, *gpu_step; // what the host says, one block as the loop's; the copy of it there
    size_t step_bytes;
    sala_rows *views;
    sala_seq *last, *grown; // [seqs] of the last tokens, of the trees
    int32_t *token, *position, *turn, *seq, *from, *limit; // turn: position of RoPE
} sala__draft;
#define SALA__LEVELS 3 // 0: the root alone
#define SALA__COSTS 16 // kinds of verify passes, by rows

typedef struct sala__least { // of seconds: see sala__least_add
    double now, before;
    int32_t count;
} sala__least;

// What the engine drafts, and what it has learnt about the price and the yield.
typedef struct sala__policy {
    int32_t on, chains, trees; // anything at all, n-gram chains, trees
    int32_t forced;            // asked for by name: measurements do not switch it off
    int32_t fixed;             // the shape was given: the load does not change it
    int32_t test, percent;     // SALA__TEST_*; how often an oracle is right
    sala__shape shape[SALA__LEVELS];
    int32_t cap, cap_calm;      // the level that the load allows; steps in a row that allow more
    int32_t level, level_calm;  // what runs; steps in a row in which another looked better
    int64_t step, retry_from;   // verifies; level 0 is left for a new trial from this one on
    int32_t retry;              // steps from one such trial to the next
    int32_t left;               // how often trees were left since they do not pay
    double yield[SALA__LEVELS]; // tokens of a verify, per sequence
    int32_t tried[SALA__LEVELS], given[SALA__LEVELS]; // trees since the trial began, their tokens
    sala__least draft[SALA__LEVELS];                  // seconds of making all trees of a step
    sala__least cost[SALA__COSTS];                    // seconds of a verify
} sala__policy;

enum { SALA__WAITING, SALA__PREFILL, SALA__DECODE };

typedef struct sala__request { // a list in order of arrival
    struct sala__request *next;
    int64_t id, sequence; // sequence id to continue, or 0; after admission: its sequence
    int32_t slot, state, cancelled, keep;
    int32_t *tokens; // [token_count] to prefill
    int64_t token_count, prefilled;
    int32_t took_root; // tokens[0] was the last chosen token of its sequence
    int32_t segment_start;
    int32_t shared;                 // tokens of the prompt that a prefix gave
    int64_t reused;                 // those, or the tokens of the sequence that it took over
    int64_t looked;                 // sala.prefix_clock when a prefix was looked for
    int32_t found;                  // 1 + that prefix, 0: none
    int32_t marks[SALA_GLA_COPIES]; // where it leaves prefixes: positions, ascending; 0: none
    int64_t max_tokens, chosen;
    int64_t
        counts_sent; // tokens of the history that the GPU's counts know of; 0: no table is there
    int32_t *force;  // [force_count]
    int64_t force_count;
    int32_t *stop_tokens; // [stop_token_count]
    int32_t stop_token_count, ignore_eos, logprobs, want_rows;
    char **stop; // [stop_count]
    int32_t stop_count;
    sala__sampler sampler;
    sala__stream stream;
    sala__string held; // decoded text that may be the beginning of a stop string
    double submitted, admitted, first_token, last_token;
    int64_t decode_bytes;
    int32_t want_trees;
    int32_t *guess; // [guess_count]
    int64_t guess_count;
    sala_bias *biases;  // [asked.bias_count]
    sala_request asked; // its fields as they were; not its lists, whose copies are above
    sala__spec spec;
    sala_timings counted; // what speculation did, see sala_timings
} sala__request;

typedef struct sala__choice {
    int32_t token;
    float logprob;
    int top_count;
    sala_logprob top[20];
} sala__choice;

typedef struct sala__event { // what its lists are: offsets until it is handed out
    sala_event event;
    size_t text, top, nodes;
} sala__event;

typedef struct sala__pass {
    sala_rows rows;
    sala__request **requests; // verify: [rows.seq_count] whose trees these are
    // Verify: what operations find out, in s->chosen; the loop reads it at the same offsets of s->result.
    int32_t *chosen;            // [bucket] the token that each row chooses
    int32_t *accepted;          // [bucket] of each sequence
    int32_t *accepted_rows;     // [bucket, SALA_MAX_PATH] of each sequence
    const sala_rows *on_device; // the same where the operations read it: on the CPU, `rows` itself
    sala_act *logits_x;         // [logits_rows, hidden] the rows whose logits are wanted, inside y
    int32_t logits_first, logits_rows;
    float *logits;   // [logits_rows, vocab]
    int show_logits; // GPU, prefill: bring all of them to the host
    int features;    // prefill: its rows' features to s->features
    int bucket;      // rows that the linear operations run with: at least rows.count
    int captures;    // prefill: the draft head wants the features of its rows
    // Prefill: behind so many rows the states are copied to these snapshots.
    int copies, copy_after[SALA_GLA_COPIES], copy_to[SALA_GLA_COPIES];
    float *hidden; // or NULL; element (state l, row r) begins at l * hidden_l + r * hidden_r
    size_t hidden_l, hidden_r;
    int32_t *blocks; // or NULL; the same with blocks_l, blocks_r
    size_t blocks_l, blocks_r;
} sala__pass;

struct sala {
    sala__env env;
    sala_options options;
    char *path;
    sala__config config;
    sala__checkpoint checkpoint;
    sala__weights weights;
    sala__tokenizer tokenizer;
    int has_tokenizer, sparse_layers, lightning_layers;
    sala__plan plan;
    int32_t default_snapshots; // of prefixes: what fits, up to 16
    sala__cpu cpu;
    int cpu_open;
    sala__gpu gpu;
    int on_gpu;                // operations run there, and what they read and write lies there
    sala__weights gpu_weights; // the same as `weights`, there
    int64_t gpu_weight_bytes, gpu_free;  // what they take there; what was free before
    int w4a4;                            // prefill quantises what goes into NVFP4 weights
    int formats;                         // of 4-bit weights, a bit each (1 << SALA_NVFP4)
    char *unpacked;                      // [plan.unpack_bytes] there
    float *slopes, *decay;               // [lin_heads] decay = exp(-slope)
    float *frequency, *sparse_frequency; // [lin_dim / 2], [head_dim / 2] of the rotary tables
    // pools
    sala_pages *pages;   // [sparse_layers]
    int32_t *free_pages; // [plan.pages] a stack
    int64_t free_page_count;
    int32_t *page_users, *page_cached; // [plan.pages] sequences and prefixes that hold a page
    int64_t idle_page_count;           // pages that only prefixes hold
    sala__prefix *prefixes;            // [plan.snapshots]
    float *snapshots;                  // [plan.snapshots, lightning_layers, plan.state]
    int64_t prefix_clock;              // goes on where one is made or dropped
    float *states;                     // [lightning_layers, slots, lin_heads, lin_dim, lin_dim]
    sala_act *pending_k,
        *pending_v;            // [lightning_layers, slots, SALA_MAX_PATH, lin_kv_heads, lin_dim]
    sala__sequence *sequences; // [slots]
    // one pass
    char *step;                              // what the host says about it, one block of memory,
    size_t step_bytes;                       // of which the pass uses this much:
    sala_rows *step_rows;                    // of the GPU: its own addresses
    sala_seq *seqs;                          // [node_rows]
    int32_t *token, *position, *seq, *paths; // [rows] x 3, [node_rows, SALA_MAX_PATH]
    int32_t *forks;                          // [node_rows] of the GPU, see sala_gla_args
    sala_sampling *sampling;                 // [node_rows] of the GPU
    char *gpu_step;                          // the copy of it there
    int32_t *page_tables;                    // [slots, plan.blocks] there
    sala_pages *gpu_pages;                   // [sparse_layers] `pages`, there
    sala_nodes *gpu_nodes;                   // [sparse_layers] `nodes`, there
    float *logits;                           // [node_rows, vocab] there
    int32_t *chosen, *result;                // [node_rows, 2 + SALA_MAX_PATH] see sala__pass, and
                                             // where the loop reads it: page-locked, or the same
    int32_t *counts;                         // [slots, vocab] there
    float *biases, *sample_weight;   // [slots, vocab], [node_rows, sala_sample_stride] there
    int32_t *sample_arrivals;        // [node_rows] there
    char *peek;                      // one activation of a pass, to be looked at
    sala_act *x, *y, *branch;        // [rows, hidden]
    sala_act *q, *gate, *o;          // [rows, heads * dim]
    sala_act *k, *v;                 // [rows, kv_heads * dim]
    sala_act *ffn_gate, *ffn_up;     // [rows, ffn]
    sala_quant quant, quant_ffn;     // [rows, hidden or heads * dim], [rows, ffn]
    float *cos_sin, *sparse_cos_sin; // [rows, lin_dim], [rows, head_dim]
    int32_t *blocks, *block_count;   // [rows, kv_heads, top_k], [rows, kv_heads]
    float *normaliser, *score, *part_o, *part_max_sum, *partial; // of kernels only, see kernels.h
    int32_t *arrivals;
    sala_nodes *nodes;         // [sparse_layers] of [node_rows, kv_heads, head_dim]
    sala_act *node_k, *node_v; // [lightning_layers, node_rows, lin_kv_heads, lin_dim]
    float *prefill_logits;     // [logits_rows, vocab]
    float *verify_logits;      // [node_rows, vocab]
    float *prefill_hidden,
        *verify_hidden; // [layers + 2, rows, hidden], [rows, layers + 2, hidden] or NULL
    sala_act *features; // [4, rows, hidden] on the host, see sala_event; or NULL
    int32_t *prefill_blocks,
        *verify_blocks;    // [sparse, rows, kv_heads, top_k], [rows, sparse, ...] or NULL
    char *sample_scratch;  // [threads, sala__sampler_scratch]
    sala__choice *choices; // [node_rows]
    // the draft head, if there is one
    int has_draft;
    sala__config draft_config;
    sala__checkpoint draft_checkpoint;
    sala__weights draft_weights, gpu_draft_weights;
    int64_t gpu_draft_weight_bytes;
    sala__draft draft;
    sala__policy policy;
    // requests and events
    sala__request *requests;
    int64_t next_id;
    uint64_t
        fingerprint[2];  // of the model and of the draft head, see sala__fingerprint; 0: not yet
    int failed;          // a step returned an error
    sala__event *events; // [event_count] of this step; event_taken are handed out
    size_t event_count, event_capacity, event_taken;
    sala__string event_text;
    sala_logprob *event_top;
    size_t event_top_count, event_top_capacity;
    int32_t *event_nodes; // of each tree [4, node_count]: token, parent, accepted, score
    size_t event_nodes_count, event_nodes_capacity;
    // tools/quantize.c: sees every operation before it runs; NULL otherwise
    void (*observe)(void *observer, int operation, const void *args);
    void *observer;
    // tests and tools/bench.c: puts other trees in the place of the planned ones; NULL otherwise
    void (*plant)(sala *s, sala__request **active, int count, int rows);
};

// ---- the plan ----

static int64_t sala__free_memory(void) { // what the system says it can give without swapping
    FILE *f = fopen("/proc/meminfo", "r");
    long long kib = 0;
    char line[128];
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1) break;
    if (f) fclose(f);
    if (kib > 0) return (int64_t)kib * 1024;
    return (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE) / 2;
}

static int sala__max(int a, int b) {
    return a > b ? a : b;
}

static int sala__query_width(const sala_dims *m) { // widest q (and gate, o) of the two layer kinds
    return sala__max(m->heads * m->head_dim, m->lin_heads * m->lin_dim);
}

static int sala__kv_width(const sala_dims *m) {
    return sala__max(m->kv_heads * m->head_dim, m->lin_kv_heads * m->lin_dim);
}

// All allocations but pages, in one table: open, close and the plan speak of the same things.
enum { // where a buffer lies
    SALA__HOST,
    SALA__DEVICE, // where the operations run
    SALA__CPU,    // only needed when that is the CPU
    SALA__GPU     // only needed when that is a GPU; there
};

typedef struct sala__buffer {
    void **pointer;
    size_t count, size;
    int place;
    const char *what;
} sala__buffer;

#define SALA__BUFFERS 110

static int sala__buffer_used(const sala *s, const sala__buffer *b) {
    return b->count && b->place != (s->on_gpu ? SALA__CPU : SALA__GPU);
}

static int sala__buffer_on_gpu(const sala *s, const sala__buffer *b) {
    return s->on_gpu && (b->place == SALA__DEVICE || b->place == SALA__GPU);
}

static size_t sala__step_layout(sala *s, int rows);
static size_t sala__draft_layout(sala *s, int rows, int seqs);

// Sizes of the draft head's buffers.
static void sala__draft_measure(sala *s) {
    const sala_dims *m = &s->draft_config.dims;
    const sala_options *o = &s->options;
    sala__draft *d = &s->draft;
    int64_t window = o->draft_window, act = sizeof(sala_act), context = (o->context + 63) / 64;
    sala__shape shape;
    if (!s->has_draft) return;
    d->topk = 2;
    if (o->spec_tree && sala__shape_read(o->spec_tree, &shape) == 0) d->topk = shape.topk;
    d->places = o->max_sequences < SALA__DRAFTS ? o->max_sequences : SALA__DRAFTS;
    d->slack = window < 4096 ? (int32_t)window / 64 * 64 : 4096;
    d->blocks = (int32_t)(1 + window / 64 + d->slack / 64);
    if (d->blocks > context + 1) d->blocks = (int32_t)context + 1;
    for (d->seqs = 1; d->seqs < d->places;) d->seqs *= 2; // of the largest bucket
    d->step_rows = d->seqs * d->topk;
    d->band = s->plan.rows < SALA__DRAFT_BAND ? s->plan.rows : SALA__DRAFT_BAND;
    d->band = sala__max(d->band, SALA__DRAFT_EXTEND);
    d->rows = sala__max(d->band, SALA__DRAFT_EXTEND + (SALA_MAX_PATH - 2) * d->step_rows);
    d->parts = (d->blocks + 1 + SALA_ATTEND_PART) / SALA_ATTEND_PART;
    d->part_rows = (size_t)d->step_rows * (size_t)d->parts * (size_t)m->heads;
    d->kv_bytes = (int64_t)d->places * act *
                  ((int64_t)d->blocks * 64 * 2 * m->kv_heads * m->head_dim +
                   (int64_t)SALA_DRAFT_DEBT * 3 * m->hidden);
}

// Its part of the table below.
static int sala__draft_buffers(sala *s, sala__buffer *b) {
    const sala_dims *m = &s->draft_config.dims;
    sala__draft *d = &s->draft;
    size_t act = sizeof(sala_act), hidden = (size_t)m->hidden, band = (size_t)d->band,
           step = (size_t)d->step_rows, rows = (size_t)d->rows, places = (size_t)d->places,
           slots = (size_t)s->options.max_sequences, ffn = (size_t)m->ffn;
    size_t kv = (size_t)m->kv_heads * (size_t)m->head_dim, topk = (size_t)d->topk,
           q = (size_t)m->heads * (size_t)m->head_dim, pages = places * (size_t)d->blocks,
           vocab = (size_t)s->draft_config.draft_vocab;
    size_t wide = step > SALA__DRAFT_EXTEND ? step : SALA__DRAFT_EXTEND;
    size_t splits = (size_t)sala__max(sala_gemm_splits(m->hidden, m->ffn),
                                      sala_gemm_splits(m->hidden, m->heads * m->head_dim));
    // Parts of fc in a band, of k and v there, and of q, k and v where trees grow.
    size_t parts = band * hidden * (size_t)sala_gemm_splits(m->hidden, 3 * m->hidden),
           kv_splits = (size_t)sala_gemm_splits((int)kv, 2 * m->hidden);
    if (parts < band * 2 * kv * kv_splits) parts = band * 2 * kv * kv_splits;
    if (parts < wide * (2 * kv + q) * kv_splits) parts = wide * (2 * kv + q) * kv_splits;
    const sala__buffer table[] = {
        {(void **)&d->pages.k, pages * 64 * kv, act, SALA__DEVICE, "the draft head's cache"},
        {(void **)&d->pages.v, pages * 64 * kv, act, SALA__DEVICE, "the draft head's cache"},
        {(void **)&d->debt, places * SALA_DRAFT_DEBT * 3 * hidden, act, SALA__DEVICE,
         "the draft head's features"},
        {(void **)&d->tables, pages, 4, SALA__HOST, "page tables"},
        {(void **)&d->table, pages, 4, SALA__GPU, "page tables"},
        {(void **)&d->slots, slots, 4, SALA__HOST, "page tables"},
        {(void **)&d->slot, slots, 4, SALA__GPU, "page tables"},
        {(void **)&d->features, (size_t)s->plan.rows * 3 * hidden, act, SALA__DEVICE, "features"},
        {(void **)&d->g, band * 3 * hidden, act, SALA__DEVICE, "features"},
        {(void **)&d->x[0], band * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&d->x[1], step * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&d->u, band * 2 * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&d->y, step * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&d->q, wide * q, act, SALA__DEVICE, "activations"},
        {(void **)&d->o, step * q, act, SALA__DEVICE, "activations"},
        {(void **)&d->k, rows * kv, act, SALA__DEVICE, "activations"},
        {(void **)&d->v, rows * kv, act, SALA__DEVICE, "activations"},
        {(void **)&d->ffn, step * ffn, act, SALA__DEVICE, "activations"},
        {(void **)&d->ffn_up, step * ffn, act, SALA__CPU, "activations"},
        {(void **)&d->branch, step * hidden, act, SALA__CPU, "activations"},
        {(void **)&d->frequency, (size_t)m->head_dim / 2, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&d->cos_sin, rows * (size_t)m->head_dim, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&d->logits, step * vocab, 4, SALA__DEVICE, "logits"},
        {(void **)&d->partial, splits * step * hidden, 4, SALA__GPU, "partial sums"},
        {(void **)&d->parts_sum, parts, 4, SALA__GPU, "partial sums"},
        {(void **)&d->dense, step * (size_t)m->kv_heads, 4, SALA__DEVICE, "block lists"},
        {(void **)&d->arrivals, 2, 4, SALA__GPU, "counters"},
        {(void **)&d->top_arrivals, step, 4, SALA__GPU, "counters"},
        {(void **)&d->tops, step * 8 * (size_t)sala__top_blocks((int)vocab), sizeof(sala_top),
         SALA__GPU, "candidates"},
        {(void **)&d->parent, rows, 4, SALA__DEVICE, "trees"},
        {(void **)&d->flat, rows, 4, SALA__DEVICE, "trees"},
        {(void **)&d->path, rows * SALA_MAX_PATH, 4, SALA__DEVICE, "trees"},
        {(void **)&d->score, rows, 4, SALA__DEVICE, "trees"},
        {(void **)&d->best_token, rows * topk, 4, SALA__DEVICE, "candidates"},
        {(void **)&d->best_score, rows * topk, 4, SALA__DEVICE, "candidates"},
        {(void **)&d->trees, (size_t)d->seqs, sizeof(sala_tree), SALA__DEVICE, "trees"},
        {(void **)&d->step, sala__draft_layout(s, d->rows, d->seqs), 1, SALA__CPU, "rows"},
        {(void **)&d->gpu_step, sala__draft_layout(s, d->rows, d->seqs), 1, SALA__GPU, "rows"},
    };
    memcpy(b, table, sizeof table);
    return (int)(sizeof table / sizeof table[0]);
}

static int sala__buffers(sala *s, sala__buffer *b) {
    const sala_dims *m = &s->config.dims;
    const sala__plan *p = &s->plan;
    size_t act = sizeof(sala_act), rows = (size_t)p->rows, nodes = (size_t)p->node_rows,
           slots = (size_t)p->slots, vocab = (size_t)m->vocab, blocks = (size_t)p->blocks;
    size_t wide = (size_t)sala__query_width(m), narrow = (size_t)sala__kv_width(m),
           hidden = (size_t)m->hidden, ffn = (size_t)m->ffn, heads = (size_t)m->heads;
    size_t kv_heads = (size_t)m->kv_heads, lists = kv_heads * (size_t)m->top_k;
    size_t lightning = (size_t)s->lightning_layers, sparse = (size_t)s->sparse_layers;
    size_t shown = (size_t)p->logits_rows, lin = (size_t)m->lin_kv_heads * (size_t)m->lin_dim;
    size_t show_hidden = s->options.hidden_states ? (size_t)(m->layers + 2) * hidden : 0;
    size_t show_blocks = s->options.hidden_states ? sparse * lists : 0;
    size_t show_features = s->options.features[2] > 0 ? 4 * rows * hidden : 0;
    size_t select_parts = (blocks + SALA_SELECT_PART - 1) / SALA_SELECT_PART;
    size_t attend_rows = nodes * (size_t)p->attend_parts * heads; // these are of verify alone
    size_t attend_o = attend_rows * (size_t)m->head_dim;          // and of the draft head, in turn
    size_t draft_rows = s->has_draft ? s->draft.part_rows : 0;
    size_t draft_o = draft_rows * (size_t)s->draft_config.dims.head_dim;
    if (attend_rows < draft_rows) attend_rows = draft_rows;
    if (attend_o < draft_o) attend_o = draft_o;
    size_t splits =
        (size_t)sala__max(sala_gemm_splits(m->hidden, m->ffn),
                          sala__max(sala_gemm_splits(m->hidden, m->heads * m->head_dim),
                                    sala_gemm_splits(m->hidden, m->lin_heads * m->lin_dim)));
    size_t quant = s->w4a4 ? rows : 0, most = wide > hidden ? wide : hidden;
    size_t words = s->w4a4 ? (rows + 3) / 4 * 16 : 0; // bytes of the scales of 64 k
    s->quant.rows = s->quant_ffn.rows = (int32_t)(words / 4);
    const sala__buffer table[] = {
        {(void **)&s->slopes, (size_t)m->lin_heads, 4, SALA__DEVICE, "slopes"},
        {(void **)&s->decay, (size_t)m->lin_heads, 4, SALA__DEVICE, "slopes"},
        {(void **)&s->frequency, (size_t)m->lin_dim / 2, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&s->sparse_frequency, (size_t)m->head_dim / 2, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&s->free_pages, (size_t)p->pages, 4, SALA__HOST, "the page list"},
        {(void **)&s->page_users, (size_t)p->pages, 4, SALA__HOST, "the page list"},
        {(void **)&s->page_cached, (size_t)p->pages, 4, SALA__HOST, "the page list"},
        {(void **)&s->prefixes, (size_t)p->snapshots, sizeof(sala__prefix), SALA__HOST, "prefixes"},
        {(void **)&s->snapshots, (size_t)p->snapshots * lightning * p->state, 4, SALA__DEVICE,
         "snapshots of prefixes"},
        {(void **)&s->states, lightning * slots * p->state, 4, SALA__DEVICE, "lightning states"},
        {(void **)&s->pending_k, lightning * slots * p->pending, act, SALA__DEVICE,
         "pending paths"},
        {(void **)&s->pending_v, lightning * slots * p->pending, act, SALA__DEVICE,
         "pending paths"},
        {(void **)&s->sequences, slots, sizeof(sala__sequence), SALA__HOST, "sequences"},
        {(void **)&s->step, sala__step_layout(s, p->rows), 1, SALA__CPU, "rows"},
        {(void **)&s->gpu_step, sala__step_layout(s, p->rows), 1, SALA__GPU, "rows"},
        {(void **)&s->page_tables, slots * blocks, 4, SALA__GPU, "page tables"},
        {(void **)&s->x, rows * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&s->y, rows * hidden, act, SALA__DEVICE, "activations"},
        {(void **)&s->branch, rows * hidden, act, SALA__CPU, "activations"},
        {(void **)&s->q, rows * wide, act, SALA__DEVICE, "activations"},
        {(void **)&s->gate, rows * wide, act, SALA__DEVICE, "activations"},
        {(void **)&s->o, rows * wide, act, SALA__DEVICE, "activations"},
        {(void **)&s->k, rows * narrow, act, SALA__DEVICE, "activations"},
        {(void **)&s->v, rows * narrow, act, SALA__DEVICE, "activations"},
        {(void **)&s->ffn_gate, rows * ffn, act, SALA__DEVICE, "activations"},
        {(void **)&s->ffn_up, rows * ffn, act, SALA__CPU, "activations"},
        {(void **)&s->quant.codes, quant * most / 2, 1, SALA__DEVICE, "activations"},
        {(void **)&s->quant.scales, words * ((most + 63) / 64), 1, SALA__DEVICE, "activations"},
        {(void **)&s->quant_ffn.codes, quant * ffn / 2, 1, SALA__DEVICE, "activations"},
        {(void **)&s->quant_ffn.scales, words * ((ffn + 63) / 64), 1, SALA__DEVICE, "activations"},
        {(void **)&s->cos_sin, rows * (size_t)m->lin_dim, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&s->sparse_cos_sin, rows * (size_t)m->head_dim, 4, SALA__DEVICE, "rotary tables"},
        {(void **)&s->choices, nodes, sizeof(sala__choice), SALA__HOST, "choices"},
        {(void **)&s->chosen, nodes * (2 + SALA_MAX_PATH), 4, SALA__DEVICE, "choices"},
        {(void **)&s->blocks, rows * lists, 4, SALA__DEVICE, "block lists"},
        {(void **)&s->block_count, rows * kv_heads, 4, SALA__DEVICE, "block lists"},
        {(void **)&s->node_k, lightning * nodes * lin, act, SALA__DEVICE, "verify scratch"},
        {(void **)&s->node_v, lightning * nodes * lin, act, SALA__DEVICE, "verify scratch"},
        {(void **)&s->prefill_logits, shown * vocab, 4, SALA__HOST, "logits"},
        {(void **)&s->verify_logits, nodes * vocab, 4, SALA__HOST, "logits"},
        {(void **)&s->prefill_hidden, shown * show_hidden, 4, SALA__HOST, "hidden states"},
        {(void **)&s->verify_hidden, nodes * show_hidden, 4, SALA__HOST, "hidden states"},
        {(void **)&s->features, show_features, act, SALA__CPU, "features"},
        {(void **)&s->prefill_blocks, shown * show_blocks, 4, SALA__HOST, "selected blocks"},
        {(void **)&s->verify_blocks, nodes * show_blocks, 4, SALA__HOST, "selected blocks"},
        {(void **)&s->sample_scratch, (size_t)s->options.threads * sala__sampler_scratch(m->vocab),
         1, SALA__CPU, "sampling"},
        {(void **)&s->gpu_pages, sparse, sizeof(sala_pages), SALA__GPU, "pages"},
        {(void **)&s->gpu_nodes, sparse, sizeof(sala_nodes), SALA__GPU, "verify scratch"},
        {(void **)&s->logits, nodes * vocab, 4, SALA__GPU, "logits"},
        {(void **)&s->counts, slots * vocab, 4, SALA__GPU, "sampling"},
        {(void **)&s->biases, slots * vocab, 4, SALA__GPU, "sampling"},
        {(void **)&s->sample_weight, nodes * (size_t)sala_sample_stride(m->vocab), 4, SALA__GPU,
         "sampling"},
        {(void **)&s->sample_arrivals, nodes, 4, SALA__GPU, "counters"},
        {(void **)&s->normaliser, nodes * heads * select_parts * 2, 4, SALA__GPU, "selection"},
        {(void **)&s->score, rows * kv_heads * blocks, 4, SALA__GPU, "selection"},
        {(void **)&s->part_o, attend_o, 4, SALA__GPU, "attention"},
        {(void **)&s->part_max_sum, attend_rows * 2, 4, SALA__GPU, "attention"},
        {(void **)&s->partial, splits * nodes * hidden, 4, SALA__GPU, "partial sums"},
        {(void **)&s->arrivals, 2, 4, SALA__GPU, "counters"},
        {(void **)&s->unpacked, (size_t)p->unpack_bytes, 1, SALA__GPU, "unpacked weights"},
        {(void **)&s->peek, show_hidden ? rows * hidden * act + rows * lists * 4 : 0, 1, SALA__HOST,
         "hidden states"},
    };
    memcpy(b, table, sizeof table);
    int count = (int)(sizeof table / sizeof table[0]);
    return s->has_draft ? count + sala__draft_buffers(s, b + count) : count;
}

// Cut the head's step block into its arrays for a pass of these rows and sequences. Views are the rows
// of the last tokens, of all tokens that extend the cache, of all positions of RoPE, and then of the
// steps of trees. Returns its bytes.
static size_t sala__draft_layout(sala *s, int rows, int seqs) {
    sala__draft *d = &s->draft;
    size_t each = (size_t)rows * 4, size = 0;
    const struct {
        void **pointer;
        size_t bytes;
    } parts[] = {
        {(void **)&d->views, SALA__DRAFT_VIEWS * sizeof(sala_rows)},
        {(void **)&d->last, (size_t)seqs * sizeof(sala_seq)},
        {(void **)&d->grown, (size_t)seqs * sizeof(sala_seq)},
        {(void **)&d->limit, (size_t)seqs * 8},
        {(void **)&d->token, each},
        {(void **)&d->position, each},
        {(void **)&d->turn, each},
        {(void **)&d->seq, each},
        {(void **)&d->from, each},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (d->step) *parts[i].pointer = d->step + size;
        size += (parts[i].bytes + 15) / 16 * 16;
    }
    d->step_bytes = size;
    return size;
}

// Cut the step block into its arrays for a pass of up to `rows` rows (addresses only when the block
// is there). Returns how much of it such a pass uses: verify, which sends it each step, lays it out
// for its bucket.
static size_t sala__step_layout(sala *s, int rows) {
    size_t nodes = (size_t)(rows < s->plan.node_rows ? rows : s->plan.node_rows);
    size_t each = (size_t)rows * 4, size = 0;
    const struct {
        void **pointer;
        size_t bytes;
    } parts[] = {
        {(void **)&s->step_rows, sizeof(sala_rows)},
        {(void **)&s->seqs, nodes * sizeof(sala_seq)},
        {(void **)&s->sampling, nodes * sizeof(sala_sampling)},
        {(void **)&s->paths, nodes * SALA_MAX_PATH * 4},
        {(void **)&s->forks, nodes * 4},
        {(void **)&s->token, each},
        {(void **)&s->position, each},
        {(void **)&s->seq, each},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (s->step) *parts[i].pointer = s->step + size;
        size += (parts[i].bytes + 15) / 16 * 16;
    }
    s->step_bytes = size;
    return size;
}

// Where a part of the step block lies for the operations.
static const void *sala__step_at(const sala *s, const void *part) {
    if (!s->on_gpu || !part) return part;
    return s->gpu_step + ((const char *)part - s->step);
}

static int sala__spec_is(const sala *s, const char *mode) {
    return strcmp(s->options.spec ? s->options.spec : "auto", mode) == 0;
}

static const char *sala__reuse_name(const sala *s) {
    const char *mode = s->options.reuse ? s->options.reuse : "prefix";
    return mode[0] == 'p' ? "prefix" : mode[0] == 'h' ? "history" : "off";
}

static int sala__reuse_is(const sala *s, const char *mode) {
    return strcmp(sala__reuse_name(s), mode) == 0;
}

// Snapshots that the plan has room for, each of all lightning layers' states.
static int32_t sala__plan_snapshots(const sala *s) {
    int64_t each = (int64_t)s->plan.state * 4 * s->lightning_layers,
            memory = s->options.reuse_memory;
    if (sala__reuse_is(s, "off")) return 0;
    if (!memory || !each) return s->default_snapshots;
    return (int32_t)(memory / each < 4096 ? memory / each : 4096);
}

// Rows of the largest verify pass: trees of eleven nodes for all sequences, or one of the largest.
static int sala__plan_nodes(const sala *s) {
    int most = s->options.max_sequences;
    if (sala__spec_is(s, "off")) return s->on_gpu ? sala__max(most, SALA_MAX_PATH) : most;
    most = sala__max((11 * most + 15) / 16 * 16, SALA_MAX_NODES);
    return most < SALA_MAX_ROWS ? most : SALA_MAX_ROWS;
}

// Fill the plan from the model's shape and the options. Returns the bytes that the memory limit is
// about, -1 when they are beyond all measure.
static int64_t sala__measure(sala *s) {
    const sala_dims *m = &s->config.dims;
    sala_options *o = &s->options;
    sala__plan *p = &s->plan;
    int64_t act = sizeof(sala_act);
    size_t dim = (size_t)m->head_dim, kv_heads = (size_t)m->kv_heads;
    p->slots = o->max_sequences;
    p->node_rows = sala__plan_nodes(s);
    int64_t chunk = (o->context + SALA_TILE - 1) / SALA_TILE * SALA_TILE; // no chunk is longer
    p->rows = sala__max(o->chunk < chunk ? o->chunk : (int)chunk, p->node_rows);
    p->logits_rows = sala__max(o->logits_rows, 1);
    p->blocks = (o->context + m->block - 1) / m->block;
    int64_t dense = ((int64_t)m->dense_len + m->block - 1) / m->block;
    if (dense > p->blocks) dense = p->blocks;
    if (dense < m->top_k) dense = m->top_k;
    p->attend_parts = (dense + SALA_ATTEND_PART - 1) / SALA_ATTEND_PART;
    p->pages = (o->kv_tokens + m->block - 1) / m->block;
    p->page_kv = kv_heads * (size_t)m->block * dim;
    p->page_tier1 = kv_heads * (size_t)sala_tier_slots(m, 1) * dim;
    p->page_tier2 = kv_heads * (size_t)sala_tier_slots(m, 2) * dim;
    p->state = (size_t)m->lin_heads * (size_t)m->lin_dim * (size_t)m->lin_dim;
    p->snapshots = sala__plan_snapshots(s);
    p->pending = (size_t)SALA_MAX_PATH * (size_t)m->lin_kv_heads * (size_t)m->lin_dim;
    p->thread_scratch = sala__ops_scratch(m, o->context);
    if (p->thread_scratch < sala__gemm_scratch()) p->thread_scratch = sala__gemm_scratch();
    sala__draft_measure(s);
    size_t draft_scratch = s->has_draft ? 4 * sala__attend_scratch(&s->draft_config.dims) : 0;
    if (p->thread_scratch < draft_scratch) p->thread_scratch = draft_scratch;
    // A config can name any geometry: no product below may overflow.
    double layers = m->layers + 2.0, most = (double)p->pages * (double)p->page_kv * layers;
    most += (double)p->slots * ((double)p->state + (double)p->pending) * layers;
    most += (double)p->snapshots * (double)p->state * layers;
    most +=
        (double)p->rows * ((double)m->hidden + m->ffn + (double)m->kv_heads * m->top_k) * layers;
    most += ((double)p->logits_rows + p->node_rows) * ((double)m->vocab + layers * m->hidden);
    most +=
        (double)p->rows * m->heads * ((double)p->attend_parts * m->head_dim + (double)p->blocks);
    if (most > 1e15) return -1;
    p->kv_bytes = p->pages * s->sparse_layers * act *
                  (int64_t)(2 * p->page_kv + p->page_tier1 + p->page_tier2);
    p->state_bytes = (int64_t)p->state * 4 * s->lightning_layers * p->slots;
    p->pending_bytes = (int64_t)p->pending * act * 2 * s->lightning_layers * p->slots;
    p->reuse_bytes = (int64_t)p->state * 4 * s->lightning_layers * p->snapshots;
    if (!s->on_gpu) p->unpack_bytes = 0;
    p->scratch_bytes = // less what the table below holds too
        -p->state_bytes - p->pending_bytes - p->unpack_bytes - s->draft.kv_bytes - p->reuse_bytes;
    if (!s->on_gpu) p->scratch_bytes += (int64_t)p->thread_scratch * o->threads;
    p->scratch_bytes += 4 * s->sparse_layers * p->node_rows * (int64_t)(kv_heads * dim) * act;
    sala__buffer b[SALA__BUFFERS];
    int n = sala__buffers(s, b);
    for (int i = 0; i < n; i++)
        if (sala__buffer_used(s, &b[i]) && sala__buffer_on_gpu(s, &b[i]) == s->on_gpu)
            p->scratch_bytes += (int64_t)(b[i].count * b[i].size);
    p->weight_bytes =
        o->synthetic ? s->weights.bytes : s->weights.copied; // the rest is the page cache's
    p->draft_weight_bytes = o->synthetic ? s->draft_weights.bytes : s->draft_weights.copied;
    if (s->on_gpu) p->weight_bytes = s->gpu_weight_bytes;
    if (s->on_gpu) p->draft_weight_bytes = s->gpu_draft_weight_bytes;
    return p->kv_bytes + p->state_bytes + p->pending_bytes + p->scratch_bytes + p->unpack_bytes +
           p->reuse_bytes + p->weight_bytes + p->draft_weight_bytes + s->draft.kv_bytes;
}

static int sala__formats_of(const sala__config *c,
                            sala__weights *w) { // 4-bit ones, see sala.formats
    sala__item item;
    int formats = 0;
    for (int i = 0; i < sala__item_count(c); i++)
        if (sala__item_at(c, w, i, &item) && sala__is_4bit(item.weight->format))
            formats |= 1 << item.weight->format;
    return formats;
}

// How prefill multiplies with 4-bit weights on this device (design.md 4).
static int sala__choose_prefill(sala *s, sala_error *err) {
    const char *ask = s->options.prefill ? s->options.prefill : "auto";
    const sala__cuda *cuda = &s->gpu.cuda;
    char lacking[sizeof(((sala__item *)0)->name)] = "";
    sala__item item;
    int nvfp4 = 0;
    s->formats = sala__formats_of(&s->config, &s->weights);
    for (int i = 0; i < sala__item_count(&s->config); i++) {
        if (!sala__item_at(&s->config, &s->weights, i, &item)) continue;
        const sala_weight *w = item.weight;
        if (w->format != SALA_NVFP4 || item.layer < 0) continue;
        nvfp4 = 1;
        if (!(w->input_scale > 0) && !*lacking) memcpy(lacking, item.name, sizeof lacking);
    }
    if (strcmp(ask, "w4a4") == 0 && !nvfp4)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "prefill w4a4: no linear layer of this model is NVFP4; leave it auto");
    if (strcmp(ask, "w4a4") == 0 && *lacking)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "prefill w4a4: %s has no input scale, so activations cannot be "
                          "quantised; use w4a16 or auto",
                          lacking);
    s->w4a4 = strcmp(ask, "w4a4") == 0 || (strcmp(ask, "auto") == 0 && nvfp4 && !*lacking &&
                                           s->on_gpu && sala__cuda_has_fp4(cuda));
    s->plan.unpack_bytes = s->on_gpu ? sala__gpu_unpack_bytes(&s->config, &s->weights, s->w4a4) : 0;
    return 0;
}

static unsigned sala__gpu_units(sala *s) { // of kernels that this model needs
    unsigned units = 7;
    if (s->formats) units |= 1 << 3;
    if (s->has_draft && sala__formats_of(&s->draft_config, &s->draft_weights)) units |= 1 << 3;
    if (s->formats >> SALA_NVFP4 & 1) units |= 1 << 4;
    if (s->formats >> SALA_INT4 & 1) units |= 1 << 5;
    return s->w4a4 ? units | 1 << 6 : units;
}

// Make the plan; an error when it does not fit.
static int sala__make_plan(sala *s, sala_error *err) {
    const sala_options *o = &s->options;
    sala__plan *p = &s->plan;
    double mib = 1.0 / (1 << 20);
    p->limit = o->memory_limit ? o->memory_limit : s->on_gpu ? s->gpu_free : sala__free_memory();
    int code = sala__choose_prefill(s, err);
    if (code < 0) return code;
    s->default_snapshots = 16;
    int64_t total = sala__measure(s);
    if (total > p->limit && p->reuse_bytes && !o->reuse_memory) { // they give way
        int64_t each = p->reuse_bytes / p->snapshots, excess = (total - p->limit + each - 1) / each;
        s->default_snapshots = excess < 16 ? 16 - (int32_t)excess : 0;
        if (o->reuse && !s->default_snapshots) s->default_snapshots = 1;
        total = sala__measure(s);
        if (!p->snapshots && total <= p->limit) s->options.reuse = "off";
    }
    if (total < 0) return sala__fail(err, SALA_E_MEMORY, "the plan takes more than 1000 TB");
    if (!p->snapshots && o->reuse_memory && !sala__reuse_is(s, "off"))
        return sala__fail(
            err, SALA_E_ARGUMENT,
            "reuse-memory (%lld) holds no snapshot of the lightning states, which are "
            "%lld bytes: raise it or set reuse off",
            (long long)o->reuse_memory, (long long)p->state * 4 * s->lightning_layers);
    if (total <= p->limit) return 0;
    return sala__fail(
        err, SALA_E_MEMORY,
        "the plan takes %.1f MiB (weights %.1f, draft head %.1f + %.1f, K/V %.1f, states "
        "%.1f, pending paths %.1f, prefixes %.1f, unpacking %.1f, scratch %.1f) but %.*f MiB are "
        "%s%s: lower context (%lld), kv-tokens (%lld), max-sequences (%d), chunk (%d) or "
        "reuse-memory",
        (double)total * mib, (double)p->weight_bytes * mib, (double)p->draft_weight_bytes * mib,
        (double)s->draft.kv_bytes * mib, (double)p->kv_bytes * mib, (double)p->state_bytes * mib,
        (double)p->pending_bytes * mib, (double)p->reuse_bytes * mib, (double)p->unpack_bytes * mib,
        (double)p->scratch_bytes * mib, p->limit < 1 << 20 ? 6 : 1, (double)p->limit * mib,
        o->memory_limit ? "allowed" : "free", s->on_gpu ? " on the GPU" : "", (long long)o->context,
        (long long)o->kv_tokens, o->max_sequences, o->chunk);
}

// The longest single sequence that would fit, everything else being as it is.
static int64_t sala__longest_context(const sala *s) {
    sala trial; // measured with other options, never opened
    memset(&trial, 0, sizeof trial);
    trial.config = s->config;
    trial.options = s->options;
    trial.sparse_layers = s->sparse_layers;
    trial.lightning_layers = s->lightning_layers;
    trial.weights.bytes = s->weights.bytes;
    trial.weights.copied = s->weights.copied;
    trial.draft_weights.bytes = s->draft_weights.bytes;
    trial.draft_weights.copied = s->draft_weights.copied;
    trial.on_gpu = s->on_gpu;
    trial.gpu_weight_bytes = s->gpu_weight_bytes;
    trial.gpu_draft_weight_bytes = s->gpu_draft_weight_bytes;
    trial.plan.unpack_bytes = s->plan.unpack_bytes;
    trial.has_draft = s->has_draft;
    trial.default_snapshots = s->options.reuse != NULL; // the others give way
    trial.draft_config = s->draft_config;
    int64_t block = s->config.dims.block, fits = 0, most = ((int64_t)1 << 30) / block;
    while (fits < most) {
        int64_t middle = fits + (most - fits + 1) / 2;
        trial.options.context = trial.options.kv_tokens = middle * block;
        int64_t total = sala__measure(&trial);
        if (total >= 0 && total <= s->plan.limit)
            fits = middle;
        else
            most = middle - 1;
    }
    return fits * block;
}

// ---- open and close ----

static int sala__default_options(sala *s, const sala_options *options, sala_error *err) {
    sala_options *o = &s->options;
    if (options) *o = *options;
    s->env = o->hooks;
    int code = sala__check_options(o, err);
    if (code < 0) return code;
    if (o->weights && !o->synthetic)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "weights (%s) is for synthetic models: a folder's files have theirs",
                          o->weights);
    if (!o->threads) o->threads = sala__processors();
    if (!o->max_sequences) o->max_sequences = 8;
    if (!o->context) o->context = 32768;
    if (!o->kv_tokens) o->kv_tokens = o->context + 4096 * (int64_t)(o->max_sequences - 1);
    if (o->kv_tokens < o->context)
        return sala__fail(
            err, SALA_E_ARGUMENT,
            "kv-tokens (%lld) is less than one context (%lld): raise it or lower context",
            (long long)o->kv_tokens, (long long)o->context);
    if (!o->chunk) o->chunk = 2048;
    return 0;
}

// The path of a folder's config.json, which a synthetic model's path is itself.
static int sala__config_path(const sala *s, const char *path, char **file, sala_error *err) {
    struct stat st;
    int synthetic = s->options.synthetic;
    if (!synthetic && stat(path, &st) < 0)
        return sala__fail(err, SALA_E_FILE, "%s: no such folder: %s", path, strerror(errno));
    if (!synthetic && !S_ISDIR(st.st_mode))
        return sala__fail(err, SALA_E_FILE,
                          "%s: not a folder; give the folder that holds config.json", path);
    *file = sala__join(&s->env, synthetic ? "" : path, synthetic ? path : "config.json", err);
    return *file ? 0 : SALA_E_MEMORY;
}

// Read config, weights and (unless only a plan is wanted) tokenizer.
static int sala__read_target(sala *s, const char *path, int tokenizer, sala_error *err) {
    char *file = NULL;
    int code = sala__config_path(s, path, &file, err);
    if (code < 0) return code;
    sala__progress(&s->env, "reading the configuration", 0);
    code = sala__config_read(&s->env, file, &s->config, err);
    sala__release(&s->env, file);
    if (code < 0) return code;
    sala_dims *m = &s->config.dims;
    if (s->options.dense_len)
        m->dense_len = s->options.dense_len == SALA_DENSE_NEVER ? 0 : s->options.dense_len;
    for (int l = 0; l < m->layers; l++) s->sparse_layers += s->config.sparse[l];
    s->lightning_layers = m->layers - s->sparse_layers;
    if (s->options.synthetic) // shapes and totals; the weights are made once the plan fits
        return sala__synthetic_plan(&s->env, &s->config, &s->weights, &s->options, err);
    if ((code = sala__generation_config_read(&s->env, path, &s->config, err)) < 0) return code;
    if ((code = sala__scheme_files_read(&s->env, path, &s->config, err)) < 0) return code;
    sala__progress(&s->env, "mapping the weights", 0.1);
    if ((code = sala__checkpoint_open(&s->env, path, &s->checkpoint, err)) < 0) return code;
    code = sala__weights_bind(&s->env, &s->checkpoint, &s->config, &s->weights, err);
    if (code < 0 || !tokenizer) return code;
    file = sala__join(&s->env, path, "tokenizer.json", err);
    if (!file) return SALA_E_MEMORY;
    int there = sala__file_exists(file);
    if (!there)
        sala__log(&s->env, SALA_LOG_WARNING,
                  "%s: not there: this model takes and gives token ids only", file);
    sala__release(&s->env, file);
    if (!there) return 0;
    sala__progress(&s->env, "reading the tokenizer", 0.5);
    code =
        sala__tokenizer_open(&s->env, path, m->vocab, s->options.chat_template, &s->tokenizer, err);
    s->has_tokenizer = code == 0;
    return code;
}

// The same of the draft head, if there is one and it may be used.
static int sala__read_draft(sala *s, sala_error *err) {
    const char *path = s->options.draft;
    sala__config *c = &s->draft_config;
    sala__weights *w = &s->draft_weights;
    char *file = NULL;
    if (!path || sala__spec_is(s, "off") || sala__spec_is(s, "ngram")) return 0;
    int code = sala__config_path(s, path, &file, err);
    if (code < 0) return code;
    code = sala__draft_config_read(&s->env, file, &s->config, c, err);
    sala__release(&s->env, file);
    if (code < 0) return code;
    s->has_draft = 1;
    if (!s->options.draft_window) s->options.draft_window = c->window;
    if (s->options.synthetic) return sala__synthetic_plan(&s->env, c, w, &s->options, err);
    if ((code = sala__scheme_files_read(&s->env, path, c, err)) < 0) return code;
    if ((code = sala__checkpoint_open(&s->env, path, &s->draft_checkpoint, err)) < 0) return code;
    return sala__draft_bind(&s->env, &s->draft_checkpoint, c, &s->config, &s->weights, w, err);
}

// The layers whose outputs requests can see, see sala_options.features.
static int sala__read_features(sala *s, sala_error *err) {
    int *f = s->options.features, own = f[0] < 0, layers = s->config.dims.layers;
    int64_t ids[3];
    if (!f[0] && !f[1] && !f[2]) return 0;
    sala__draft_layers(layers, ids);
    for (int i = 0; i < 3 && own; i++) f[i] = s->has_draft ? s->draft_config.aux[i] : (int)ids[i];
    if (f[0] < 0 || f[1] <= f[0] || f[2] <= f[1] || f[2] >= layers)
        return sala__fail(
            err, SALA_E_ARGUMENT,
            "features of the layers %d, %d, %d: they must be three rising ones of the "
            "%d that the model has, counted from 0",
            f[0], f[1], f[2], layers);
    if (sizeof(sala_act) == 2) return 0;
    return sala__fail(err, SALA_E_ARGUMENT, "features need activations in BF16, not in FP32");
}

static int sala__read_files(sala *s, const char *path, int tokenizer, sala_error *err) {
    int code = sala__read_target(s, path, tokenizer, err);
    if (code == 0) code = sala__read_draft(s, err);
    return code < 0 ? code : sala__read_features(s, err);
}

static void sala__frequencies(float theta, int dim, float *out) { // out: [dim / 2]
    for (int i = 0; i < dim / 2; i++) out[i] = (float)(1.0 / pow((double)theta, 2.0 * i / dim));
}

// Memory where the operations run, or (host) where the loop does.
static void *sala__take(sala *s, int on_gpu, size_t count, size_t size, const char *what,
                        sala_error *err) {
    if (!on_gpu) return sala__alloc(&s->env, count, size, what, err);
    void *memory = sala__gpu_take(&s->gpu, count * size, what, err);
    if (memory && sala__cuda_fill(&s->gpu.cuda, sala__on_gpu(memory), 0, count * size, err) < 0)
        return NULL;
    return memory;
}

static int sala__allocate_pages(sala *s, sala_error *err) {
    const sala_dims *m = &s->config.dims;
    const sala__plan *p = &s->plan;
    s->pages = (sala_pages *)sala__alloc(&s->env, (size_t)s->sparse_layers, sizeof *s->pages,
                                         "pages", err);
    s->nodes = (sala_nodes *)sala__alloc(&s->env, (size_t)s->sparse_layers, sizeof *s->nodes,
                                         "verify scratch", err);
    if (!s->pages || !s->nodes) return SALA_E_MEMORY;
    size_t act = sizeof(sala_act), pages = (size_t)p->pages;
    size_t node = (size_t)p->node_rows * (size_t)m->kv_heads * (size_t)m->head_dim;
    for (int l = 0; l < s->sparse_layers; l++) {
        sala_act *kv = (sala_act *)sala__take(
            s, s->on_gpu, pages * (2 * p->page_kv + p->page_tier1 + p->page_tier2), act,
            "the K/V cache", err);
        sala_act *scratch =
            (sala_act *)sala__take(s, s->on_gpu, 4 * node, act, "verify scratch", err);
        s->pages[l].k = kv; // owns the layer's one allocation
        s->nodes[l].k = scratch;
        if (!kv || !scratch) return SALA_E_MEMORY;
        s->pages[l].v = kv + pages * p->page_kv;
        s->pages[l].tier1 = s->pages[l].v + pages * p->page_kv;
        s->pages[l].tier2 = s->pages[l].tier1 + pages * p->page_tier1;
        s->nodes[l].v = scratch + node;
        s->nodes[l].tier1 = scratch + 2 * node;
        s->nodes[l].tier2 = scratch + 3 * node;
    }
    for (int64_t i = 0; i < p->pages; i++) s->free_pages[i] = (int32_t)(p->pages - 1 - i);
    s->free_page_count = p->pages;
    return 0;
}

// Write a table to where the operations read it.
static int sala__put(sala *s, void *to, const void *from, size_t bytes, sala_error *err) {
    if (!s->on_gpu) {
        memcpy(to, from, bytes);
        return 0;
    }
    int code = sala__cuda_upload(&s->gpu.cuda, sala__on_gpu(to), from, bytes, err);
    return code < 0 ? code : sala__cuda_wait(&s->gpu.cuda, err);
}

// Slopes of the lightning heads and rotary frequencies.
static int sala__fill_tables(sala *s, sala_error *err) {
    const sala_dims *m = &s->config.dims;
    size_t heads = (size_t)m->lin_heads, lin = (size_t)m->lin_dim / 2,
           dim = (size_t)m->head_dim / 2;
    float *t = (float *)sala__alloc(&s->env, 2 * heads + lin + dim, 4, "tables", err);
    if (!t) return SALA_E_MEMORY;
    sala__slopes(m->lin_heads, t);
    for (size_t h = 0; h < heads; h++) t[heads + h] = (float)exp(-(double)t[h]);
    sala__frequencies(m->rope_theta, m->lin_dim, t + 2 * heads);
    sala__frequencies(m->rope_theta, m->head_dim, t + 2 * heads + lin);
    int code = sala__put(s, s->slopes, t, heads * 4, err);
    if (code == 0) code = sala__put(s, s->decay, t + heads, heads * 4, err);
    if (code == 0) code = sala__put(s, s->frequency, t + 2 * heads, lin * 4, err);
    if (code == 0) code = sala__put(s, s->sparse_frequency, t + 2 * heads + lin, dim * 4, err);
    sala__release(&s->env, t);
    return code;
}

// What the draft head has beside the table of buffers, and what its tables hold.
static int sala__draft_allocate(sala *s, sala_error *err) {
    const sala_dims *m = &s->draft_config.dims;
    sala__draft *d = &s->draft;
    int code = 0, pages = d->places * d->blocks, lists = d->step_rows * m->kv_heads;
    size_t trees = (size_t)d->seqs * sizeof(sala_tree);
    void *step = d->step, *out = d->trees;
    if (!s->has_draft) return 0;
    if (s->on_gpu) {
        size_t bytes = sala__draft_layout(s, d->rows, d->seqs);
        code = sala__cuda_alloc_host(&s->gpu.cuda, bytes, "rows", &step, err);
        d->step = (char *)(code < 0 ? NULL : step);
        if (code == 0) code = sala__cuda_alloc_host(&s->gpu.cuda, trees, "trees", &out, err);
    }
    d->trees_out = (sala_tree *)(code < 0 ? NULL : out);
    int32_t *minus =
        code < 0 ? NULL : (int32_t *)sala__alloc(&s->env, (size_t)lists, 4, "block lists", err);
    if (!minus) return err && err->code ? err->code : SALA_E_MEMORY;
    for (int i = 0; i < lists; i++) minus[i] = -1;
    for (int i = 0; i < pages; i++) d->tables[i] = i;
    for (int i = 0; i < s->options.max_sequences; i++) d->slots[i] = -1;
    code = sala__put(s, d->dense, minus, (size_t)lists * 4, err);
    sala__release(&s->env, minus);
    if (code == 0)
        code =
            sala__put(s, d->frequency, s->draft_config.frequency, (size_t)m->head_dim / 2 * 4, err);
    if (!s->on_gpu || code < 0) return code;
    code = sala__put(s, d->table, d->tables, (size_t)pages * 4, err);
    return code < 0 ? code
                    : sala__put(s, d->slot, d->slots, (size_t)s->options.max_sequences * 4, err);
}

// Its kernels: the same sources with its dims, in the engine's context and stream.
static int sala__draft_open(sala *s, sala_error *err) {
    sala__gpu *g = &s->draft.gpu;
    g->cuda = s->gpu.cuda;
    g->cuda.module_count = 0;
    g->units = 1 | 1u << 7;
    const int formats = sala__formats_of(&s->draft_config, &s->draft_weights);
    for (int format = SALA_NVFP4; format <= SALA_INT4; format++)
        if (formats >> format & 1) g->units |= 1u << (format + 1) | 1u << 3;
    return sala__gpu_open(g, &s->draft_config.dims, err);
}

static void sala__draft_close(sala *s) { // inside enter, with the device idle
    sala__draft *d = &s->draft;
    sala__cuda *c = &d->gpu.cuda;
    for (int i = 0; i < d->graph_count; i++) sala__cuda_graph_free(c, d->graphs[i].exec);
    for (int i = 0; i < c->module_count; i++) c->api.cuModuleUnload(c->modules[i]);
    sala__cuda_release_host(&s->gpu.cuda, d->step);
    sala__cuda_release_host(&s->gpu.cuda, d->trees_out);
    memset(&d->gpu, 0, sizeof d->gpu);
    d->graph_count = d->graph_next = 0;
    d->step = NULL;
}

static int sala__allocate(sala *s, sala_error *err) {
    sala__buffer b[SALA__BUFFERS];
    int n = sala__buffers(s, b), code;
    for (int i = 0; i < n; i++) {
        if (!sala__buffer_used(s, &b[i])) continue;
        *b[i].pointer =
            sala__take(s, sala__buffer_on_gpu(s, &b[i]), b[i].count, b[i].size, b[i].what, err);
        if (!*b[i].pointer) return err && err->code ? err->code : SALA_E_MEMORY;
    }
    if (s->on_gpu) { // page-locked, so that copies need no one's help
        void *step, *out;
        code = sala__cuda_alloc_host(&s->gpu.cuda, sala__step_layout(s, s->plan.rows), "rows",
                                     &step, err);
        s->step = (char *)(code < 0 ? NULL : step);
        if (code < 0) return code;
        memset(step, 0, s->step_bytes);
        code =
            sala__cuda_alloc_host(&s->gpu.cuda, (size_t)s->plan.node_rows * (2 + SALA_MAX_PATH) * 4,
                                  "choices", &out, err);
        s->result = (int32_t *)(code < 0 ? NULL : out);
        if (code < 0) return code;
        size_t features = (size_t)(s->options.features[2] > 0) * 4 * (size_t)s->plan.rows *
                          (size_t)s->config.dims.hidden * sizeof(sala_act);
        if (features) code = sala__cuda_alloc_host(&s->gpu.cuda, features, "features", &out, err);
        s->features = (sala_act *)(code < 0 || !features ? NULL : out);
        if (code < 0) return code;
    } else {
        s->result = s->chosen;
    }
    sala__step_layout(s, s->plan.rows);
    if ((code = sala__draft_allocate(s, err)) < 0) return code;
    if ((code = sala__allocate_pages(s, err)) < 0) return code;
    size_t layers = (size_t)s->sparse_layers;
    if (s->on_gpu) code = sala__put(s, s->gpu_pages, s->pages, layers * sizeof *s->pages, err);
    if (s->on_gpu && code == 0)
        code = sala__put(s, s->gpu_nodes, s->nodes, layers * sizeof *s->nodes, err);
    return code < 0 ? code : sala__fill_tables(s, err);
}

static void sala__name_device(const sala *s, char *text, size_t size) {
#if defined(__AVX512F__)
    const char *simd = ", AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    const char *simd = ", AVX2";
#elif defined(__ARM_NEON)
    const char *simd = ", NEON";
#else
    const char *simd = ", no SIMD with fma: slow";
#endif
    const sala__cuda *c = &s->gpu.cuda;
    if (s->on_gpu)
        snprintf(text, size, "cuda:%d, %s, %.1f GiB, %s", c->ordinal, c->name,
                 (double)c->total_bytes / (1 << 30), c->architecture);
    else
        snprintf(text, size, "CPU, %d thread%s%s", s->options.threads,
                 s->options.threads == 1 ? "" : "s", simd);
}

// Left to the driver, and for a moment to weights on their way (see sala__gpu_weights).
#define SALA__DRIVER_NEEDS (SALA__SLAB + (256 << 20))

// Open the device that the options name, once the model's shape is known.
static int sala__choose_device(sala *s, sala_error *err) {
    sala_error reason;
    memset(&reason, 0, sizeof reason);
    const char *text = s->options.device;
    int code = sala__cuda_select(&s->env, text, &s->gpu.cuda, err);
    if (code <= 0) return code;
    code = sizeof(sala_act) == 2
               ? sala__gpu_supports(&s->config.dims, &reason)
               : sala__fail(&reason, SALA_E_DEVICE, "kernels have BF16 activations, not FP32");
    if (code == 0) code = sala__gpu_takes(&s->config, &s->weights, &reason);
    if (code < 0) {
        sala__cuda_close(&s->gpu.cuda);
        if (text && strcmp(text, "auto") != 0) return sala__fail(err, code, "%s", reason.text);
        sala__log(&s->env, SALA_LOG_INFO, "no GPU used: %s", reason.text);
        return 0;
    }
    s->on_gpu = 1;
    if (s->has_draft) { // never a reason to leave the GPU
        code = sala__gpu_supports(&s->draft_config.dims, &reason);
        if (code == 0) code = sala__gpu_takes(&s->draft_config, &s->draft_weights, &reason);
        if (code < 0) return sala__fail(err, code, "draft %s: %s", s->options.draft, reason.text);
    }
    double free_mib = 0, total_mib = 0;
    if ((code = sala__cuda_enter(&s->gpu.cuda, err)) < 0) return code;
    sala__cuda_free_memory(&s->gpu.cuda, &free_mib, &total_mib);
    sala__cuda_leave(&s->gpu.cuda);
    s->gpu_free = (int64_t)(free_mib * 1048576) - SALA__DRIVER_NEEDS;
    if (s->gpu_free < 0) s->gpu_free = 0;
    s->gpu_weight_bytes = sala__gpu_weights_total(&s->config, &s->weights);
    if (s->has_draft)
        s->gpu_draft_weight_bytes = sala__gpu_weights_total(&s->draft_config, &s->draft_weights) +
                                    4 * (int64_t)s->draft_config.draft_vocab;
    return 0;
}

static int sala__device_is_auto(const sala *s) {
    return !s->options.device || strcmp(s->options.device, "auto") == 0;
}

enum { SALA__FILL_PARTS = 64 };

static void sala__fill_part(void *context, int64_t part, int thread) {
    sala *s = (sala *)context;
    (void)thread;
    sala__weights_fill(&s->config, &s->weights, s->options.synthetic_seed, (int)part,
                       SALA__FILL_PARTS);
    if (s->has_draft)
        sala__weights_fill(&s->draft_config, &s->draft_weights, s->options.synthetic_seed,
                           (int)part, SALA__FILL_PARTS);
}

static int sala__open_cpu(sala *s, sala_error *err) {
    int code = sala__cpu_open(&s->env, s->options.threads, s->plan.thread_scratch, &s->cpu, err);
    if (code < 0) return code;
    s->cpu_open = 1;
    if (!s->options.synthetic) return 0;
    sala__progress(&s->env, "making weights", 0.7);
    sala__weights_free(&s->env, &s->weights);
    code = sala__weights_allocate(&s->env, &s->config, &s->weights, &s->options, err);
    if (code == 0 && s->has_draft) {
        sala__weights_free(&s->env, &s->draft_weights);
        code =
            sala__weights_allocate(&s->env, &s->draft_config, &s->draft_weights, &s->options, err);
        sala__draft_share(&s->draft_config, &s->draft_weights, &s->weights);
    }
    if (code == 0) sala__parallel(&s->cpu, SALA__FILL_PARTS, sala__fill_part, s);
    return code;
}

// Plan, take and fill everything that the operations work on.
static int sala__start(sala *s, sala_error *err) {
    int code = sala__make_plan(s, err);
    if (code == 0 && !s->options.synthetic)
        code = sala__weights_load(&s->env, &s->checkpoint, &s->config, &s->weights, err);
    if (code == 0 && !s->options.synthetic && s->has_draft)
        code = sala__weights_load(&s->env, &s->draft_checkpoint, &s->draft_config,
                                  &s->draft_weights, err);
    if (code == 0 && s->has_draft)
        sala__draft_share(&s->draft_config, &s->draft_weights, &s->weights);
    if (code == 0 && s->on_gpu) code = sala__cuda_enter(&s->gpu.cuda, err);
    if (code < 0) return code;
    s->gpu.units = sala__gpu_units(s);
    if (s->on_gpu) code = sala__gpu_open(&s->gpu, &s->config.dims, err);
    if (code == 0 && s->on_gpu && s->has_draft) code = sala__draft_open(s, err);
    sala__progress(&s->env, "allocating", 0.6);
    if (code == 0) code = sala__allocate(s, err);
    s->gpu.unpacked = s->unpacked;
    s->gpu.unpacked_bytes = (size_t)s->plan.unpack_bytes;
    if (code == 0 && s->on_gpu)
        code =
            sala__gpu_weights(&s->gpu, &s->config, &s->weights, &s->options, &s->gpu_weights, err);
    if (code == 0 && s->on_gpu && s->has_draft)
        code = sala__gpu_draft_weights(&s->gpu, &s->draft_config, &s->draft_weights,
                                       &s->gpu_weights, &s->options, &s->gpu_draft_weights, err);
    if (s->on_gpu) sala__cuda_leave(&s->gpu.cuda);
    return code == 0 && !s->on_gpu ? sala__open_cpu(s, err) : code;
}

// Undo the above, as far as it came; the engine may then start again.
static void sala__stop(sala *s) {
    sala__env env = s->env;
    if (s->on_gpu && sala__cuda_enter(&s->gpu.cuda, NULL) == 0) {
        sala__cuda_wait(&s->gpu.cuda, NULL); // nothing may still read what follows
        sala__draft_close(s);
        sala__cuda_release_host(&s->gpu.cuda, s->step);
        sala__cuda_release_host(&s->gpu.cuda, s->result);
        sala__cuda_release_host(&s->gpu.cuda, s->features);
        sala__cuda_leave(&s->gpu.cuda);
    }
    if (s->cpu_open) sala__cpu_close(&s->cpu);
    for (int l = 0; l < s->sparse_layers && !s->on_gpu; l++) {
        if (s->pages) sala__release(&env, s->pages[l].k);
        if (s->nodes) sala__release(&env, s->nodes[l].k);
    }
    sala__release(&env, s->pages);
    sala__release(&env, s->nodes);
    sala__buffer b[SALA__BUFFERS];
    int n = sala__buffers(s, b);
    for (int i = 0; i < n; i++) {
        if (!sala__buffer_on_gpu(s, &b[i]) && !(s->on_gpu && b[i].place == SALA__CPU))
            sala__release(&env, *b[i].pointer);
        *b[i].pointer = NULL;
    }
    if (s->on_gpu) sala__gpu_close(&s->gpu);
    sala__weights_free(&env, &s->gpu_weights);
    sala__weights_free(&env, &s->gpu_draft_weights);
    s->pages = NULL;
    s->nodes = NULL;
    s->cpu_open = s->on_gpu = 0;
}

static int sala__spec_open(sala *s, sala_error *err);

static int sala__open(sala *s, const char *path, sala_error *err) {
    int code = sala__read_files(s, path, 1, err);
    if (code < 0) return code;
    if ((code = sala__spec_open(s, err)) < 0) return code;
    if ((code = sala__choose_device(s, err)) < 0) return code;
    s->path = sala__join(&s->env, "", path, err);
    if (!s->path) return SALA_E_MEMORY;
    if (s->on_gpu && sala__device_is_auto(s)) {
        sala_error reason;
        if (sala__start(s, &reason) < 0) { // does not fit, say: the CPU may do
            sala__log(&s->env, SALA_LOG_INFO, "no GPU used: %s", reason.text);
            sala__stop(s);
            code = sala__start(s, err);
        }
    } else {
        code = sala__start(s, err);
    }
    if (code == 0 && s->on_gpu) {
        sala__weights_forget(&s->env, &s->config, &s->weights);
        if (s->has_draft) sala__weights_forget(&s->env, &s->draft_config, &s->draft_weights);
    }
    if (code == 0) sala__progress(&s->env, "ready", 1);
    return code;
}

static void sala__drop_request(sala *s, sala__request *r);
static void sala__spec_text(const sala *s, char *text, size_t size);

SALA_API void sala_close(sala *s) {
    if (!s) return;
    sala__env env = s->env;
    if (s->on_gpu && sala__cuda_enter(&s->gpu.cuda, NULL) == 0) {
        sala__cuda_wait(&s->gpu.cuda, NULL); // copies from what requests own may be under way
        sala__cuda_leave(&s->gpu.cuda);
    }
    while (s->requests) {
        sala__request *r = s->requests;
        s->requests = r->next;
        sala__drop_request(s, r);
    }
    for (int i = 0; s->sequences && i < s->plan.slots; i++) {
        sala__release(&env, s->sequences[i].pages);
        sala__release(&env, s->sequences[i].tokens);
        sala__release(&env, s->sequences[i].phases);
    }
    for (int i = 0; s->prefixes && i < s->plan.snapshots; i++)
        sala__release(&env, s->prefixes[i].tokens);
    sala__stop(s);
    sala__release(&env, s->events);
    sala__release(&env, s->event_text.data);
    sala__release(&env, s->event_top);
    sala__release(&env, s->event_nodes);
    if (s->has_tokenizer) sala__tokenizer_close(&s->tokenizer);
    sala__weights_free(&env, &s->draft_weights);
    sala__checkpoint_close(&s->draft_checkpoint);
    sala__config_free(&env, &s->draft_config);
    sala__weights_free(&env, &s->weights);
    sala__checkpoint_close(&s->checkpoint);
    sala__config_free(&env, &s->config);
    sala__release(&env, s->path);
    sala__release(&env, s);
}

static sala *sala__new(const sala_options *options, sala_error *err) {
    sala__env none = {NULL, NULL, NULL, NULL};
    const sala__env *env = options ? &options->hooks : &none;
    sala__clear(err);
    sala *s = (sala *)sala__alloc(env, 1, sizeof *s, "the engine", err);
    if (s) s->env = *env;
    if (s && sala__default_options(s, options, err) < 0) {
        sala_close(s);
        s = NULL;
    }
    return s;
}

SALA_API sala *sala_open(const char *path, const sala_options *options, sala_error *err) {
    sala *s = sala__new(options, err);
    if (!s) return NULL;
    if (!path) {
        sala__fail(err, SALA_E_ARGUMENT, "sala_open: no path given");
    } else if (sala__open(s, path, err) == 0) {
        return s;
    }
    sala_close(s);
    return NULL;
}

// ---- info ----

SALA_API const char *sala_version(void) {
    return SALA_VERSION;
}

static int64_t
sala__state_traffic(const sala *s) { // bytes of lightning state that one token reads and writes
    return 2 * (int64_t)s->plan.state * 4 * s->lightning_layers;
}

// What the draft head is: "437 M parameters, NVFP4, layers 1 15 28, window 32768".
static void sala__draft_text(sala *s, char out[160]) {
    char format[64], kinds[160];
    const int32_t *aux = s->draft_config.aux;
    double parameters = (double)s->draft_weights.parameters;
    sala__formats_name(&s->draft_config, &s->draft_weights, format, kinds);
    snprintf(out, 160, "%.*f M parameters, %s, layers %d %d %d, window %d%s%s", parameters < 1e7,
             parameters / 1e6, format, aux[0], aux[1], aux[2], s->options.draft_window,
             s->draft_config.own_embed ? ", own embedding" : "",
             s->draft_config.own_head ? "" : ", the model's head");
}

SALA_API void sala_get_info(sala *s, sala_info *info) {
    const sala_dims *m = &s->config.dims;
    const sala__plan *p = &s->plan;
    memset(info, 0, sizeof *info);
    info->path = s->path;
    sala__name_device(s, info->device, sizeof info->device);
    sala__formats_name(&s->config, &s->weights, info->weight_format, info->weight_kinds);
    snprintf(info->prefill, sizeof info->prefill, "%s%s",
             s->w4a4      ? "W4A4"
             : s->formats ? "W4A16"
                          : "BF16",
             s->w4a4 && s->on_gpu && !sala__cuda_has_fp4(&s->gpu.cuda) ? ", emulated" : "");
    info->chat_template = s->has_tokenizer ? s->tokenizer.template_name : "none";
    info->vocab = m->vocab;
    info->hidden = m->hidden;
    info->layers = m->layers;
    info->sparse_layers = s->sparse_layers;
    info->lightning_layers = s->lightning_layers;
    info->heads = m->heads;
    info->kv_heads = m->kv_heads;
    info->head_dim = m->head_dim;
    info->lightning_heads = m->lin_heads;
    info->lightning_kv_heads = m->lin_kv_heads;
    info->lightning_head_dim = m->lin_dim;
    info->intermediate = m->ffn;
    info->block = m->block;
    info->top_k = m->top_k;
    info->dense_len = m->dense_len;
    info->chunk = s->options.chunk;
    info->threads = s->options.threads;
    info->max_sequences = s->options.max_sequences;
    info->parameters = s->weights.parameters;
    info->bits_per_weight =
        s->weights.parameters ? 8.0 * (double)s->weights.bytes / (double)s->weights.parameters : 0;
    info->context = s->options.context;
    info->longest_context = sala__longest_context(s);
    info->weight_bytes = s->on_gpu ? s->gpu_weight_bytes : s->weights.bytes;
    info->kv_bytes = p->kv_bytes;
    info->state_bytes = p->state_bytes;
    info->pending_bytes = p->pending_bytes;
    info->unpack_bytes = p->unpack_bytes;
    info->scratch_bytes = p->scratch_bytes;
    info->reuse_bytes = p->reuse_bytes;
    info->reuse = sala__reuse_name(s);
    info->snapshots = p->snapshots;
    if (s->has_draft) {
        info->draft_weight_bytes = s->on_gpu ? s->gpu_draft_weight_bytes : s->draft_weights.bytes;
        sala__draft_text(s, info->draft);
        info->draft_kv_bytes = s->draft.kv_bytes;
    }
    info->total_bytes = info->weight_bytes + info->draft_weight_bytes + info->draft_kv_bytes +
                        p->kv_bytes + p->state_bytes + p->pending_bytes + p->unpack_bytes +
                        p->scratch_bytes + p->reuse_bytes;
    info->kv_bytes_per_token = p->pages ? p->kv_bytes / p->pages / m->block : 0;
    info->state_bytes_per_sequence = (int64_t)p->state * 4 * s->lightning_layers;
    info->node_bytes =
        (int64_t)sizeof(sala_act) *
        (4 * s->sparse_layers * (int64_t)m->kv_heads * m->head_dim + // both tiers too
         2 * s->lightning_layers * (int64_t)m->lin_kv_heads * m->lin_dim);
    info->decode_bytes = s->weights.decode_bytes + sala__state_traffic(s);
    sala__spec_text(s, info->spec, sizeof info->spec);
    for (int i = 0; s->sequences && i < p->slots; i++) {
        info->sequences_resident += s->sequences[i].id != 0;
    }
    for (const sala__request *r = s->requests; r; r = r->next) {
        if (r->state == SALA__WAITING)
            info->requests_waiting++;
        else
            info->requests_active++;
    }
    info->kv_tokens_total = p->pages * m->block;
    for (int i = 0; s->prefixes && i < p->snapshots; i++)
        info->prefixes += s->prefixes[i].length > 0;
    info->kv_tokens_reserved = (p->pages - s->free_page_count - s->idle_page_count) * m->block;
    info->kv_tokens_idle = s->idle_page_count * m->block;
    info->bos = s->has_tokenizer ? s->tokenizer.bos : s->config.bos;
    info->eos = s->config.eos;
    info->eos_count = s->config.eos_count;
}

SALA_API int sala_plan(const char *path, const sala_options *options, sala_info *info,
                       sala_error *err) {
    memset(info, 0, sizeof *info);
    sala *s = sala__new(options, err);
    if (!s) return err ? err->code : SALA_E_ARGUMENT;
    int code = path ? sala__read_files(s, path, 0, err)
                    : sala__fail(err, SALA_E_ARGUMENT, "sala_plan: no path given");
    if (code == 0) code = sala__spec_open(s, err);
    if (code == 0) code = sala__choose_device(s, err);
    if (code == 0) {
        code = sala__make_plan(s, err); // a plan that does not fit is still reported
        if (code < 0 && s->on_gpu && sala__device_is_auto(s)) { // as sala_open does
            sala__cuda_close(&s->gpu.cuda);
            s->on_gpu = 0;
            sala__clear(err);
            code = sala__make_plan(s, err);
        }
        s->free_page_count = s->plan.pages;
        sala_get_info(s, info);
        info->path = info->chat_template = NULL;
        info->eos = NULL;
        info->eos_count = 0;
    }
    sala_close(s);
    return code;
}
/* -----------------------------------------------------------------------------------------------
   [11] DRAFTS: trees, n-gram chains, the EAGLE-3 head, what runs when

   A draft is a guess at the next tokens, a small tree below the last chosen one. The loop verifies it
   with the same rows and kernels as plain decoding, so a guess can cost time, never change a token
   (speculation.md).
   -------------------------------------------------------------------------------------------- */

// ---- trees ----

// Add a node below `parent`. Returns its index.
static int sala__tree_add(sala_tree *t, int parent, int32_t token) {
    int i = t->count++;
    t->token[i] = token;
    t->parent[i] = parent;
    t->depth[i] = t->depth[parent] + 1;
    t->score[i] = 0;
    return i;
}

// ---- n-grams ----
//
// What came before often comes again: quotations, lists, code. The last four tokens are looked up in
// the history of the sequence; the longest match tells how the text may go on (speculation.md 5.2).

#define SALA__NGRAM 4
#define SALA__NGRAM_HOPS 8   // places that are looked at
#define SALA__NGRAM_MATCH 32 // tokens of a match that count

static uint32_t sala__ngram_hash(const int32_t *last) { // of the four tokens that end there
    uint64_t h = 0;
    for (int i = 0; i < SALA__NGRAM; i++)
        h = (h ^ (uint32_t)last[-i]) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(h >> 32);
}

// Bring the index up to date, but for the four tokens at the end: those are to be looked up.
static int sala__ngram_index(sala *s, sala__request *r, sala_error *err) {
    const sala__sequence *q = &s->sequences[r->slot];
    sala__spec *c = &r->spec;
    if (!c->chain_head) { // 8 to 12 bytes for each token that there will be
        int64_t room = (int64_t)q->token_count + r->max_tokens - r->chosen + 1, size = 64;
        while (size < room) size *= 2;
        c->chain_head =
            (int32_t *)sala__alloc(&s->env, (size_t)size, 4, "an index of n-grams", err);
        c->chain_next =
            (int32_t *)sala__alloc(&s->env, (size_t)room, 4, "an index of n-grams", err);
        if (!c->chain_head || !c->chain_next) return SALA_E_MEMORY;
        c->chain_mask = (uint32_t)(size - 1);
        c->chain_room = room;
        c->indexed = SALA__NGRAM - 1;
    }
    int64_t end = (int64_t)q->token_count - 1;
    for (; c->indexed < end && c->indexed < c->chain_room; c->indexed++) {
        int32_t *head = &c->chain_head[sala__ngram_hash(q->tokens + c->indexed) & c->chain_mask];
        c->chain_next[c->indexed] = *head;
        *head = (int32_t)c->indexed + 1;
    }
    return 0;
}

// The longest match of the end of the history, of equal ones the latest. Returns its length, *place is
// where it ends.
static int sala__ngram_match(const sala__spec *c, const int32_t *tokens, int64_t count,
                             int64_t *place) {
    int best = 0;
    if (!c->chain_head || count < SALA__NGRAM) return 0;
    const int32_t *last = tokens + count - 1;
    int32_t at = c->chain_head[sala__ngram_hash(last) & c->chain_mask];
    for (int hop = 0; at && hop < SALA__NGRAM_HOPS; hop++, at = c->chain_next[at - 1]) {
        const int32_t *there = tokens + at - 1;
        int n = 0; // below four when only the hash is the same
        while (n < SALA__NGRAM_MATCH && n < at && there[-n] == last[-n]) n++;
        if (n <= best) continue;
        best = n;
        *place = at - 1;
    }
    return best < SALA__NGRAM ? 0 : best;
}

// What the last chain of this request taught. A chain that can give no more than it did is no failure.
static void sala__ngram_learn(sala__spec *c, int accepted) {
    int offered = c->tree.count - 1, good = accepted >= 4 || accepted == offered;
    c->got += accepted;
    if (++c->chains == 24) c->chains = 12, c->got /= 2, c->price /= 2;
    c->aligned = accepted || c->resumed ? c->place + 1 + accepted : 0;
    c->run = accepted + (c->resumed ? c->run : 0);
    c->lost = c->resumed && !accepted ? c->lost + 1 : 0;
    if (c->lost == 3) c->aligned = c->lost = 0;
    if (c->resumed) return;
    if (good || (accepted >= 2 && c->misses < 2)) c->misses = 0;
    if (accepted < 2 && !good && ++c->misses >= 4) c->chains_from = c->step + 32;
}

// Length of the chain that a match of `match` tokens deserves, in place of a tree of a head or of
// nothing; 0: none. After two failures only long matches count, after four none for 32 steps.
static int sala__ngram_length(const sala__spec *c, int match, int instead_of_tree, int most) {
    int length = 4 * (match - 3), least = c->misses >= 2 ? 8 : instead_of_tree ? 6 : 4;
    if (match < least || c->step < c->chains_from) return 0;
    return length < most ? length : most;
}

// The chain itself: what followed the match; where that is the chain's own place, it goes on with itself.
// The token that refuted a chain is part of the history now, so no refuted chain is offered again.
static void sala__ngram_chain(sala_tree *t, const int32_t *tokens, int64_t count, int64_t place,
                              int length) {
    for (int i = 0; i < length; i++) {
        int64_t from = place + 1 + i;
        sala__tree_add(t, t->count - 1, from < count ? tokens[from] : t->token[from - count + 1]);
    }
}

// ---- the draft head ----
//
// An EAGLE-3 head (speculation.md 1, 2): a layer that reads what three layers of the target say of a
// token, and the token after it. Its keys and values depend on these alone, so that a prompt costs two
// small products, and what it attends to matters only where a tree grows.

static void sala__draft_op(sala *s, int operation, const void *args) {
    sala__gpu *g = &s->draft.gpu;
    if (!s->on_gpu) {
        sala__run_cpu(&s->cpu, operation, args);
        return;
    }
    sala__run_gpu(g, operation, args);
    if (g->error.code && !s->gpu.error.code) s->gpu.error = g->error;
    sala__clear(&g->error);
}

// The place of a sequence is free for others.
static void sala__draft_drop(sala *s, int slot) {
    sala__draft_cache *c = &s->sequences[slot].draft;
    if (c->place) s->draft.owner[c->place - 1] = 0;
    memset(c, 0, sizeof *c);
}

// Forget what the head knows of a sequence, which has `stored` tokens; it gets a place if there is one,
// or else that of a sequence that is only kept.
static int sala__draft_forget(sala *s, int slot, sala_error *err) {
    sala__draft *d = &s->draft;
    sala__draft_cache *c = &s->sequences[slot].draft;
    sala__draft_drop(s, slot);
    if (!s->has_draft) return 0;
    int at = 0;
    while (at < d->places && d->owner[at]) at++;
    if (at == d->places) {
        at = 0;
        while (at < d->places && s->sequences[d->owner[at] - 1].request) at++;
        if (at < d->places) sala__draft_drop(s, d->owner[at] - 1);
    }
    if (at < d->places) {
        d->owner[at] = 1 + slot;
        c->place = 1 + at;
    }
    c->seen = s->sequences[slot].stored;
    d->slots[slot] = c->place - 1;
    return s->on_gpu ? sala__put(s, d->slot + slot, d->slots + slot, 4, err) : 0;
}

// Behind layer l of a pass: its output, if the head reads it.
static void sala__draft_capture(sala *s, const sala__pass *p, int l) {
    const sala__weights *w = s->on_gpu ? &s->gpu_draft_weights : &s->draft_weights;
    if (!s->has_draft || !(p->rows.verify || p->captures)) return;
    for (int i = 0; i < 3; i++) {
        if (s->draft_config.aux[i] != l) continue;
        sala_capture_args a;
        memset(&a, 0, sizeof a);
        a.rows = p->bucket;
        a.width = s->config.dims.hidden;
        a.third = i;
        a.eps = s->draft_config.dims.eps;
        a.x = s->x;
        a.norm = w->fc_norm[i];
        a.features = s->draft.features;
        sala__draft_op(s, SALA__OP_capture, &a);
    }
}

// After the commit: features of what was accepted wait until the head is asked.
static void sala__draft_keep(sala *s, const sala__pass *p) {
    sala__draft *d = &s->draft;
    if (!s->has_draft) return;
    sala_keep_args a = {p->on_device,     3 * s->config.dims.hidden,      p->accepted,
                        p->accepted_rows, s->on_gpu ? d->slot : d->slots, d->features,
                        d->debt};
    d->gpu.rows = s->gpu.rows;
    d->gpu.seqs = s->gpu.seqs;
    sala__draft_op(s, SALA__OP_keep, &a);
}

static const void *sala__draft_at(const sala *s, const void *part) { // of its step block
    return s->on_gpu ? s->draft.gpu_step + ((const char *)part - s->draft.step) : part;
}

// A pass of the head. Counts are those of the bucket.
typedef struct sala__draft_pass {
    int32_t extend, seqs, depth, topk; // depth 0: it only fills the cache
    int32_t rows;                      // of all steps
    const sala_act *features;          // [extend, 3 hidden], or NULL: rows of the debt, by `from`
    sala_growth growth;
} sala__draft_pass;

// A pass that only puts rows of one sequence into the cache.
static sala__draft_pass sala__draft_filling(int32_t rows, const sala_act *features) {
    sala__draft_pass p;
    memset(&p, 0, sizeof p);
    p.extend = rows;
    p.seqs = p.topk = 1;
    p.features = features;
    return p;
}

static void sala__draft_view(sala *s, int view, int count, int seqs, int first,
                             const sala_seq *of) {
    sala__draft *d = &s->draft;
    sala_rows rows = {
        count,
        seqs,
        1,
        (const sala_seq *)sala__draft_at(s, of),
        (const int32_t *)sala__draft_at(s, d->token + first),
        (const int32_t *)sala__draft_at(s, (view == 2 ? d->turn : d->position) + first),
        (const int32_t *)sala__draft_at(s, d->seq + first),
        d->path + (size_t)first * SALA_MAX_PATH};
    d->views[view] = rows;
}

// Cut the step block for a pass and empty it; `count` sequences of the bucket exist.
static void sala__draft_begin(sala *s, sala__draft_pass *p, int count) {
    sala__draft *d = &s->draft;
    p->rows = p->extend + (p->depth > 1 ? (p->depth - 1) * p->seqs * p->topk : 0);
    sala_growth g = {p->seqs,   p->topk, p->depth, p->extend, NULL,          NULL,
                     d->parent, d->flat, d->score, d->path,   d->best_token, d->best_score};
    size_t bytes = sala__draft_layout(s, p->rows, p->seqs);
    memset(d->step, 0, bytes);
    for (int r = 0; r < p->rows; r++) d->seq[r] = d->from[r] = -1;
    g.limit = (const int32_t *)sala__draft_at(s, d->limit);
    g.token = (int32_t *)(uintptr_t)sala__draft_at(s, d->token);
    p->growth = g;
    sala__draft_view(s, 0, count, count, 0, d->last);
    sala__draft_view(s, 1, p->extend, count, 0, d->last);
    sala__draft_view(s, 2, p->rows, count, 0, d->last);
    for (int step = 1; step < p->depth; step++)
        sala__draft_view(s, 2 + step, count * p->topk, count, sala_growth_row(&g, step, 0, 0),
                         d->grown);
}

// Row r of a pass: the token at `position` of a sequence, for which the head reads the token after it.
static void sala__draft_row(sala *s, const sala__sequence *q, int r, int seq, int32_t position) {
    sala__draft *d = &s->draft;
    d->token[r] = q->tokens[position + 1];
    d->position[r] = q->draft.filled + position - q->draft.seen;
    d->turn[r] = position;
    d->seq[r] = seq;
    d->from[r] = (q->draft.place - 1) * SALA_DRAFT_DEBT + position % SALA_DRAFT_DEBT;
}

// The sequence once `filled` tokens are in its pages: `rows` rows of a step from `first` on.
static sala_seq sala__draft_seq(sala *s, const sala__sequence *q, int first, int rows, int filled) {
    sala__draft *d = &s->draft;
    const int32_t *pages = s->on_gpu ? d->table : d->tables;
    sala_seq seq = {q->draft.place - 1,
                    first,
                    rows,
                    filled,
                    0,
                    0,
                    pages + (size_t)(q->draft.place - 1) * (size_t)d->blocks};
    return seq;
}

// u, and from it k, v and (if trees grow) q of the rows of a step, turned; step 0 puts k and v into pages.
static void sala__draft_project(sala *s, const sala__draft_pass *p, int step) {
    const sala__weights *w = s->on_gpu ? &s->gpu_draft_weights : &s->draft_weights;
    const sala__layer *l = &w->layers[0];
    const sala_dims *m = &s->draft_config.dims;
    sala__draft *d = &s->draft;
    const int rows = step ? p->seqs * p->topk : p->extend, wants_q = p->depth > 0;
    size_t first = (size_t)sala_growth_row(&p->growth, step, 0, 0),
           at = first * (size_t)m->kv_heads * (size_t)m->head_dim;
    sala_draft_input_args input;
    memset(&input, 0, sizeof input);
    input.rows = rows;
    input.width = m->hidden;
    input.step = step;
    input.eps = m->eps;
    input.embed = w->embed;
    input.input_norm = l->input_norm;
    input.hidden_norm = w->hidden_norm;
    input.bias = w->fc_bias;
    input.f = step ? d->x[(step - 1) & 1] : NULL;
    input.parts = d->parts_sum;
    input.splits = sala_gemm_splits(w->fc.n, w->fc.k);
    input.x = d->x[step & 1];
    input.u = d->u;
    input.growth = p->growth;
    sala__draft_op(s, SALA__OP_draft_input, &input);
    const sala_weight *all[3] = {&l->k, &l->v, &l->q};
    sala_act *const y[3] = {d->k + at, d->v + at, d->q};
    sala_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.rows = rows;
    gemm.x = d->u;
    gemm.parts = d->parts_sum;
    gemm.splits = sala_gemm_splits(l->k.n, l->k.k); // the same with and without q
    for (int i = 0; i < 2 + wants_q; i++) {
        gemm.y[i] = y[i];
        gemm.w[i] = *all[i];
        gemm.parts_at[i] = gemm.parts_width;
        gemm.parts_width += all[i]->n;
        gemm.count++;
    }
    sala__draft_op(s, SALA__OP_gemm, &gemm);
    sala_draft_turn_args turn;
    memset(&turn, 0, sizeof turn);
    turn.dims = m;
    turn.rows = (const sala_rows *)sala__draft_at(s, &d->views[1]);
    turn.count = rows;
    turn.heads = wants_q ? m->heads : 0;
    turn.splits = gemm.splits;
    turn.parts = d->parts_sum;
    turn.cos_sin = d->cos_sin + first * (size_t)m->head_dim;
    turn.q = d->q;
    turn.k = d->k + at;
    turn.v = d->v + at;
    if (!step) turn.pages = d->pages;
    sala__draft_op(s, SALA__OP_draft_turn, &turn);
}

// Put the `extend` rows into the cache.
static void sala__draft_extend(sala *s, const sala__draft_pass *p) {
    const sala__weights *w = s->on_gpu ? &s->gpu_draft_weights : &s->draft_weights;
    const sala_dims *m = &s->draft_config.dims;
    sala__draft *d = &s->draft;
    const sala_rows *turns = (const sala_rows *)sala__draft_at(s, &d->views[2]);
    sala_rope_args rope = {turns, m->head_dim, d->frequency, d->cos_sin};
    d->gpu.rows = p->rows;
    sala__draft_op(s, SALA__OP_rope_table, &rope);
    sala_gather_args gather = {p->extend, 3 * m->hidden,
                               (const int32_t *)sala__draft_at(s, d->from), d->debt, d->g};
    if (!p->features) sala__draft_op(s, SALA__OP_gather, &gather);
    sala_gemm_args fc;
    memset(&fc, 0, sizeof fc);
    fc.rows = p->extend;
    fc.count = 1;
    fc.x = p->features ? p->features : d->g;
    fc.w[0] = w->fc;
    fc.y[0] = d->x[0];
    fc.parts = d->parts_sum;
    fc.splits = sala_gemm_splits(w->fc.n, w->fc.k);
    fc.parts_width = w->fc.n;
    sala__draft_op(s, SALA__OP_gemm, &fc);
    sala__draft_project(s, p, 0);
}

// From q, k, v of a step's rows to their candidates.
static void sala__draft_layer(sala *s, const sala__draft_pass *p, int step) {
    const sala__weights *w = s->on_gpu ? &s->gpu_draft_weights : &s->draft_weights;
    const sala__layer *l = &w->layers[0];
    const sala_dims *m = &s->draft_config.dims;
    sala__draft *d = &s->draft;
    const int rows = step ? p->seqs * p->topk : p->seqs;
    size_t best = (size_t)sala_growth_row(&p->growth, step, 0, 0) * (size_t)p->topk;
    sala_act *x = d->x[step & 1];
    const sala_rows *view = (const sala_rows *)sala__draft_at(s, &d->views[step ? 2 + step : 0]);
    sala_nodes nodes = {d->k, d->v, NULL, NULL};
    sala_attend_args attend = {m,        view, d->q, nodes,    d->pages,  NULL,
                               d->dense, NULL, d->o, d->parts, s->part_o, s->part_max_sum};
    d->gpu.rows = rows;
    sala__draft_op(s, SALA__OP_attend, &attend);
    sala_gemm_norm_args o;
    memset(&o, 0, sizeof o);
    o.input = d->o;
    o.w = l->o;
    o.partial = d->partial;
    o.arrivals = d->arrivals;
    o.norm.rows = rows;
    o.norm.width = m->hidden;
    o.norm.eps = m->eps;
    o.norm.scale = o.norm.divisor = 1;
    o.norm.branch = d->branch;
    o.norm.weight = l->post_norm;
    o.norm.x = x;
    o.norm.y = d->y;
    sala__draft_op(s, SALA__OP_gemm_norm, &o);
    sala_gemm_swiglu_args mlp;
    memset(&mlp, 0, sizeof mlp);
    mlp.rows = rows;
    mlp.x = d->y;
    mlp.gate = l->mlp_gate;
    mlp.up = l->mlp_up;
    mlp.y = d->ffn;
    mlp.scratch = d->ffn_up;
    sala__draft_op(s, SALA__OP_gemm_swiglu, &mlp);
    o.input = d->ffn;
    o.w = l->mlp_down;
    o.norm.weight = w->final_norm;
    sala__draft_op(s, SALA__OP_gemm_norm, &o);
    sala_gemm_args head;
    memset(&head, 0, sizeof head);
    head.rows = rows;
    head.count = 1;
    head.x = s->draft_config.raw_output ? x : d->y;
    head.w[0] = w->head;
    head.y_f32 = d->logits;
    sala__draft_op(s, SALA__OP_gemm, &head);
    sala_draft_top_args top = {rows,
                               s->draft_config.draft_vocab,
                               p->topk,
                               d->logits,
                               w->target_ids,
                               d->best_token + best,
                               d->best_score + best,
                               d->tops,
                               d->top_arrivals};
    sala__draft_op(s, SALA__OP_draft_top, &top);
}

static void sala__draft_send(sala *s) { // the step block's way to the device
    sala__draft *d = &s->draft;
    sala_error *e = &s->gpu.error;
    if (s->on_gpu && !e->code)
        sala__cuda_upload(&s->gpu.cuda, sala__on_gpu(d->gpu_step), d->step, d->step_bytes, e);
}

// All that a pass does, from the step block's way to the device to the trees' way back.
static void sala__draft_launch(sala *s, const sala__draft_pass *p) {
    sala__draft *d = &s->draft;
    sala_error *e = &s->gpu.error;
    sala__draft_send(s);
    sala__draft_extend(s, p);
    for (int step = 0; step < p->depth; step++) {
        if (step) sala__draft_project(s, p, step);
        sala__draft_layer(s, p, step);
    }
    if (!p->depth) return;
    sala_draft_grow_args grow = {p->growth, d->trees};
    sala__draft_op(s, SALA__OP_draft_grow, &grow);
    if (s->on_gpu && !e->code)
        sala__cuda_download(&s->gpu.cuda, d->trees_out, sala__on_gpu(d->trees),
                            (size_t)p->seqs * sizeof(sala_tree), e);
}

// The recorded pass; recorded now, in the place of the oldest, if it is not there. NULL: without.
static sala__cu_exec sala__draft_recorded(sala *s, const sala__draft_pass *p) {
    sala__draft *d = &s->draft;
    sala__cuda *c = &s->gpu.cuda;
    sala_error *e = &s->gpu.error;
    for (int i = 0; i < d->graph_count; i++) {
        const sala__draft_graph *g = &d->graphs[i];
        if (g->extend == p->extend && g->seqs == p->seqs && g->depth == p->depth &&
            g->topk == p->topk)
            return g->exec;
    }
    if (d->gpu.no_graphs || s->gpu.no_graphs) return NULL;
    sala__draft_graph graph = {p->extend, p->seqs, p->depth, p->topk, NULL};
    if (sala__cuda_capture_begin(c, e) == 0) {
        sala__draft_launch(s, p);
        sala__cuda_capture_end(c, e->code ? NULL : &graph.exec, e);
    }
    if (e->code) { // see sala__gpu_record
        sala__log(&s->env, SALA_LOG_WARNING, "drafts run without CUDA graphs: %s", e->text);
        sala__clear(e);
        d->gpu.no_graphs = 1;
        return NULL;
    }
    int at = d->graph_next++ % SALA__DRAFT_GRAPHS;
    if (at < d->graph_count)
        sala__cuda_graph_free(c, d->graphs[at].exec);
    else
        d->graph_count++;
    d->graphs[at] = graph;
    return graph.exec;
}

static int sala__draft_run(sala *s, const sala__draft_pass *p, sala_error *err) {
    sala_error *e = &s->gpu.error;
    sala__cu_exec graph = s->on_gpu && p->depth && !e->code ? sala__draft_recorded(s, p) : NULL;
    if (graph && !e->code)
        sala__cuda_graph_launch(&s->gpu.cuda, graph, e);
    else if (!e->code)
        sala__draft_launch(s, p);
    return s->on_gpu ? sala__gpu_wait(&s->gpu, err) : 0;
}

// Room for `more` tokens of a sequence: where its pages are full, the oldest behind the anchor go.
static int sala__draft_room(sala *s, sala__sequence *q, int more, sala_error *err) {
    sala__draft *d = &s->draft;
    int drop = d->slack / 64, changed = 0;
    int32_t *table = d->tables + (size_t)(q->draft.place - 1) * (size_t)d->blocks, old[64];
    for (; q->draft.filled + more > d->blocks * 64; changed = 1) {
        memcpy(old, table + 1, (size_t)drop * 4);
        memmove(table + 1, table + 1 + drop, (size_t)(d->blocks - 1 - drop) * 4);
        memcpy(table + d->blocks - drop, old, (size_t)drop * 4);
        q->draft.filled -= d->slack;
    }
    return changed && s->on_gpu
               ? sala__put(s, d->table + (table - d->tables), table, (size_t)d->blocks * 4, err)
               : 0;
}

// Put the tokens up to position `end` into the cache of a sequence: their features are in the debt, or
// are rows `features` of the pass. No bit depends on how they are divided into passes.
static int sala__draft_fill(sala *s, sala__sequence *q, int32_t end, const sala_act *features,
                            sala_error *err) {
    size_t width = 3 * (size_t)s->config.dims.hidden;
    int code = 0, most = s->draft.band < s->draft.slack ? s->draft.band : s->draft.slack;
    while (q->draft.seen < end && code == 0) {
        int n = end - q->draft.seen < most ? end - q->draft.seen : most;
        sala__draft_pass p = sala__draft_filling(n, features);
        if ((code = sala__draft_room(s, q, n, err)) < 0) return code;
        sala__draft_begin(s, &p, 1);
        for (int r = 0; r < n; r++) sala__draft_row(s, q, r, 0, q->draft.seen + r);
        s->draft.last[0] = sala__draft_seq(s, q, 0, n, q->draft.filled);
        code = sala__draft_run(s, &p, err);
        q->draft.filled += n;
        q->draft.seen += n;
        if (features) features += (size_t)n * width;
    }
    return code;
}

// Of a prompt that ends at `end` the head sees the first page and the last tokens, from this one on.
static int32_t sala__draft_window(const sala *s, int32_t end) {
    int32_t from = end - s->options.draft_window;
    return from > 64 ? from : 64;
}

// Does it want features of a chunk of a prompt?
static int sala__draft_wants(const sala *s, int slot, int32_t first, int32_t count, int32_t end) {
    return s->sequences[slot].draft.place &&
           (first < 64 || first + count > sala__draft_window(s, end));
}

// After a chunk of a prompt, whose rows are the tokens from position `first` on. The token after the
// prompt is not chosen yet: the features of its last token wait.
static int sala__draft_prefill(sala *s, int slot, int32_t first, int32_t count, int32_t end,
                               sala_error *err) {
    sala__sequence *q = &s->sequences[slot];
    sala__draft *d = &s->draft;
    size_t width = 3 * (size_t)s->config.dims.hidden;
    int32_t after = first + count, last = after < end ? after : end - 1;
    int32_t from = sala__draft_window(s, end), anchor = last < 64 ? last : 64;
    if (!q->draft.place) return 0;
    int code = sala__draft_fill(s, q, first, NULL, err); // what waits from before the prompt
    if (code == 0 && first < 64) code = sala__draft_fill(s, q, anchor, d->features, err);
    if (q->draft.seen < from) q->draft.seen = last < from ? last : from;
    if (code == 0 && q->draft.seen < last)
        code = sala__draft_fill(s, q, last, d->features + (size_t)(q->draft.seen - first) * width,
                                err);
    if (code < 0 || after < end) return code;
    sala__draft_pass p = sala__draft_filling(1, NULL);
    sala__draft_begin(s, &p, 1);
    d->from[0] = count - 1;
    int32_t to = (q->draft.place - 1) * SALA_DRAFT_DEBT + last % SALA_DRAFT_DEBT;
    sala_gather_args gather = {1, (int32_t)width, (const int32_t *)sala__draft_at(s, d->from),
                               d->features, d->debt + (size_t)to * width};
    sala__draft_send(s);
    sala__draft_op(s, SALA__OP_gather, &gather);
    return s->on_gpu ? sala__gpu_wait(&s->gpu, err) : 0; // the step block is free again
}

// Features of more tokens than can wait: the head sees them now, whether it is asked or not.
static int sala__draft_settle(sala *s, int slot, sala_error *err) {
    sala__sequence *q = &s->sequences[slot];
    if (!q->draft.place || q->stored - q->draft.seen <= SALA_DRAFT_DEBT - SALA_MAX_PATH) return 0;
    if (q->stored - q->draft.seen > SALA_DRAFT_DEBT) q->draft.seen = q->stored - SALA_DRAFT_DEBT;
    return sala__draft_fill(s, q, q->stored - 1, NULL, err);
}

// The rows of a pass that grows trees: what these sequences have not seen, and the places of the nodes.
static void sala__draft_lay(sala *s, sala__draft_pass *p, const int32_t *slots,
                            const sala__shape *shapes, int n) {
    sala__draft *d = &s->draft;
    int next = p->seqs;
    sala__draft_begin(s, p, n);
    for (int i = 0; i < n; i++) {
        const sala__sequence *q = &s->sequences[slots[i]];
        int filled = q->draft.filled + q->stored - q->draft.seen;
        for (int32_t t = q->draft.seen; t < q->stored - 1; t++) sala__draft_row(s, q, next++, i, t);
        sala__draft_row(s, q, i, i, q->stored - 1);
        d->last[i] = sala__draft_seq(s, q, i, 1, filled);
        d->grown[i] = sala__draft_seq(s, q, i * p->topk, p->topk, filled);
        d->limit[2 * i] = shapes[i].depth;
        d->limit[2 * i + 1] = shapes[i].nodes;
        for (int step = 1; step < p->depth; step++)
            for (int m = 0; m < p->topk; m++) {
                int r = sala_growth_row(&p->growth, step, i, m);
                d->position[r] = filled + step - 1;
                d->turn[r] = q->stored - 1 + step;
                d->seq[r] = i;
            }
    }
}

// Does the head know a token of the sequence, so that it can be asked for the next ones? Not yet where a
// session was loaded without its state.
static int sala__draft_ready(const sala__sequence *q) {
    return q->draft.place && q->stored > 0 && (q->draft.filled || q->draft.seen < q->stored);
}

static int sala__draft_bucket(int n, int least) {
    while (least < n) least *= 2;
    return least;
}

// One tree for each of these sequences, of at most its shape, by the head.
static int sala__draft_propose(sala *s, const int32_t *slots, const sala__shape *shapes, int n,
                               sala_tree *trees, sala_error *err) {
    sala__draft_pass p = sala__draft_filling(0, NULL);
    p.topk = 0;
    int code = 0, known = 0, most = SALA__DRAFT_EXTEND - SALA__DRAFTS, which[SALA__DRAFTS];
    int32_t of[SALA__DRAFTS];
    sala__shape shape[SALA__DRAFTS];
    for (int i = 0; i < n; i++) {
        sala__sequence *q = &s->sequences[slots[i]];
        sala__tree_root(&trees[i], q->root);
        if (!sala__draft_ready(q) || known == SALA__DRAFTS) continue;
        if ((code = sala__draft_settle(s, slots[i], err)) < 0) return code;
        if (q->draft.seen == q->stored && q->draft.filled) // asked once more
            q->draft.seen--, q->draft.filled--;
        p.depth = sala__max(p.depth, shapes[i].depth);
        p.topk = sala__max(p.topk, shapes[i].topk);
        p.extend += q->stored - q->draft.seen;
        which[known] = i;
        of[known] = slots[i];
        shape[known++] = shapes[i];
    }
    if (!known || p.depth < 1) return 0;
    if (p.topk > s->draft.topk || p.depth >= SALA_MAX_PATH)
        return sala__fail(err, SALA_E_STATE, "trees of %d levels of %d candidates: the plan has %d",
                          p.depth, p.topk, s->draft.topk);
    for (int i = 0; i < known; i++) {
        sala__sequence *q = &s->sequences[of[i]];
        if (p.extend > most) code = sala__draft_fill(s, q, q->stored - 1, NULL, err);
        if (code == 0) code = sala__draft_room(s, q, q->stored - q->draft.seen, err);
        if (code < 0) return code;
    }
    if (p.extend > most) p.extend = known;
    if (s->on_gpu) p.seqs = sala__draft_bucket(known, 1);
    if (!s->on_gpu) p.seqs = known;
    p.extend += p.seqs - known;
    if (s->on_gpu) p.extend = sala__draft_bucket(p.extend, 8);
    sala__draft_lay(s, &p, of, shape, known);
    if ((code = sala__draft_run(s, &p, err)) < 0) return code;
    for (int i = 0; i < known; i++) {
        sala__sequence *q = &s->sequences[of[i]];
        trees[which[i]] = s->draft.trees_out[i];
        q->draft.filled += q->stored - q->draft.seen;
        q->draft.seen = q->stored;
    }
    return 0;
}

// ---- drafts of tests ----

enum { SALA__TEST_NONE, SALA__TEST_ORACLE, SALA__TEST_RANDOM, SALA__TEST_ADVERSARY };

// A tree of this shape: a path down to its depth, each node of it before its siblings or (last) behind
// them; what is left hangs below the first sibling. path: [depth + 1] its nodes.
static void sala__tree_shape(sala_tree *t, const sala__shape *shape, int last, int32_t *path) {
    int spare = shape->nodes - 1 - shape->depth, side = 0;
    path[0] = 0;
    for (int d = 1; d <= shape->depth; d++) {
        if (!last) path[d] = sala__tree_add(t, path[d - 1], 0);
        for (int i = 1; i < shape->topk && spare > 0; i++, spare--) {
            int sibling = sala__tree_add(t, path[d - 1], 0);
            if (!side) side = sibling;
        }
        if (last) path[d] = sala__tree_add(t, path[d - 1], 0);
    }
    for (; side && spare > 0 && t->depth[side] < shape->depth; spare--)
        side = sala__tree_add(t, side, 0);
}

// A tree of the shape, its tokens from the request's guess (see sala_options.spec_test). Siblings differ:
// wrong ones stand at different distances behind the right one in the vocabulary.
static void sala__test_tree(const sala *s, sala__request *r, const sala__shape *shape) {
    const sala__policy *p = &s->policy;
    sala_tree *t = &r->spec.tree;
    uint32_t vocab = (uint32_t)s->config.dims.vocab;
    int64_t position = s->sequences[r->slot].stored, known = r->guess_count - r->chosen + 1;
    int32_t path[SALA_MAX_PATH];
    sala__tree_root(t, t->token[0]);
    sala__tree_shape(t, shape, p->test == SALA__TEST_ADVERSARY, path);
    for (int i = 1, right = 1; i < t->count; i++) {
        int d = t->depth[i];
        int64_t truth = d < known ? r->guess[r->chosen - 1 + d] : -1;
        uint64_t random = sala_random(r->sampler.seed, (uint64_t)(position + d));
        t->token[i] =
            (int32_t)((uint64_t)(truth + 1 + (int64_t)((random + (uint32_t)i) % (vocab - 1))) %
                      vocab);
        if (path[d] != i || truth < 0 || p->test == SALA__TEST_RANDOM) continue;
        if (p->test == SALA__TEST_ORACLE && (random >> 32) * 100 >> 32 >= (uint64_t)p->percent)
            right = 0;
        if (right) t->token[i] = (int32_t)truth;
    }
}

// ---- what runs when ----
//
// Drafts cost time whether they are right or not. How large a tree may be follows from the number of
// sequences that generate; whether it pays, from what steps took and gave so far (speculation.md 5.1).

// Many sequences get small trees: with four bits the rows beyond 16 of a pass cost as much as the first 16.
static const sala__shape sala__shapes[SALA__LEVELS] = {{0, 1, 1}, {3, 1, 4}, {7, 2, 15}};
static const double sala__hopes[SALA__LEVELS] = {1, 2.2, 3}; // tokens of a verify, unseen
static const double sala__credit = 8; // plain steps that a trial of trees may lose
// Steps: before the first trial on a CPU, where a tree may cost eight plain steps; to the next, doubled each time. On a
// CPU that comes soon: two trees beside other work look dearer than they are, those of several trials less so.
static const int sala__first_trial = 64, sala__first_retry = 1 << 10;
static const int sala__cost_rows[SALA__COSTS] = {1,  2,  3,  4,  6,  8,   12,  16,
                                                 24, 32, 48, 64, 96, 128, 192, 256};

// Take one more measurement. Other work on the machine only adds to it, so the least of the last 32 to 64
// counts; lasting change is followed.
static void sala__least_add(sala__least *m, double x) {
    if (m->count++ % 32 == 0) m->before = m->now, m->now = x;
    if (x < m->now) m->now = x;
}

static double sala__least_value(const sala__least *m) {
    return m->count > 32 && m->before < m->now ? m->before : m->now;
}

// The first one may hold what happens only once (kernels that are loaded, a graph that is recorded).
static int sala__least_known(const sala__least *m) {
    return m->count >= 2;
}

static int sala__cost_index(int rows) {
    int i = 0;
    while (i < SALA__COSTS - 1 && sala__cost_rows[i] < rows) i++;
    return i;
}

// Seconds of a pass of such a size: no more than the least of a larger one.
static double sala__cost_at(const sala__policy *p, int i) {
    double least = sala__least_value(&p->cost[i]);
    for (; i < SALA__COSTS; i++)
        if (sala__least_known(&p->cost[i])) least = fmin(least, sala__least_value(&p->cost[i]));
    return least;
}

// Seconds of a verify of so many rows: between measured ones in proportion, beyond them as the nearest,
// so that what is not known gets a trial. 0: nothing is known.
static double sala__cost(const sala__policy *p, int rows) {
    int i = sala__cost_index(rows), low = i, high = i;
    while (low >= 0 && !sala__least_known(&p->cost[low])) low--;
    while (high < SALA__COSTS && !sala__least_known(&p->cost[high])) high++;
    if (low < 0) return high < SALA__COSTS ? sala__cost_at(p, high) : 0;
    if (high == SALA__COSTS || high == low) return sala__cost_at(p, low);
    double share = (double)(sala__cost_rows[i] - sala__cost_rows[low]) /
                   (sala__cost_rows[high] - sala__cost_rows[low]),
           below = sala__cost_at(p, low);
    return below + share * (sala__cost_at(p, high) - below);
}

// The level that so many sequences allow: down at once, up after 16 steps that allow it.
static void sala__load_level(sala__policy *p, int sequences) {
    if (p->fixed) return;
    int down = sequences >= 17 ? 0 : sequences >= 3 ? 1 : 2;
    int up = sequences <= 1 ? 2 : sequences <= 14 ? 1 : 0;
    p->cap_calm = up > p->cap ? p->cap_calm + 1 : 0;
    if (down < p->cap) p->cap = down;
    if (p->cap_calm < 16) return;
    p->cap++;
    p->cap_calm = 0;
}

// Plain steps that a step with trees takes, by what was measured; 0: not known yet.
static double sala__price(const sala__policy *p, int level, int sequences) {
    const sala__least *draft = &p->draft[level];
    if (!sala__least_known(draft)) draft = &p->draft[SALA__LEVELS - level]; // the other one
    if (!sala__least_known(draft)) return 0;
    double step = sala__cost(p, sequences * p->shape[level].nodes) + sala__least_value(draft);
    double plain = sala__cost(p, sequences);
    return plain > 0 ? step / plain : 0;
}

// How much faster than plain decoding a level is; 0: not known yet.
static double sala__gain(const sala__policy *p, int level, int sequences) {
    double price = sala__price(p, level, sequences);
    double yield = p->yield[level]; // a larger tree of this head gives no less
    if (p->level && p->level < level) yield = fmax(yield, p->yield[p->level]);
    return price > 0 ? yield / price : 0;
}

// Have trees lost more time than a trial may, or 16 of them shown that they bring nothing?
static int sala__level_failed(const sala__policy *p, int sequences) {
    int tried = p->tried[p->level], given = p->given[p->level];
    if (!p->level || tried < 2 || tried >= 32) return 0;
    double price = sala__price(p, p->level, sequences);
    return given + sala__credit * sequences < tried * price || (tried >= 16 && given < 1.3 * tried);
}

// Were trees left since they do not pay?
static int sala__left(const sala__policy *p) {
    return p->cap && !p->level && p->left;
}

// The level of this step: what the load allows and measurements do not speak against for 16 steps.
static void sala__choose_level(sala__policy *p, int sequences) {
    sala__load_level(p, sequences);
    if (p->level > p->cap || p->forced) p->level = p->cap;
    if (p->forced) return;
    if (p->level == 0 && p->step >= p->retry_from) { // the text may have become another
        memcpy(p->yield, sala__hopes, sizeof p->yield);
        memset(p->tried, 0, sizeof p->tried);
        memset(p->given, 0, sizeof p->given);
        p->retry_from = p->step + p->retry;
    }
    int best = p->cap, failed = sala__level_failed(p, sequences);
    for (; best > 0 && !failed; best--) {
        double gain = sala__gain(p, best, sequences);
        if (gain == 0 ? p->yield[best] > 1 : gain > (best == p->level ? 1.03 : 1.10)) break;
    }
    if (failed) best = 0;
    p->level_calm = best == p->level ? 0 : p->level_calm + 1;
    if (p->level_calm < 16 && !failed) return;
    for (int l = 1; l < p->level; l++) // a smaller tree of this head gives no more
        if (p->yield[l] > p->yield[p->level]) p->yield[l] = p->yield[p->level];
    if (failed) p->yield[1] = p->yield[2] = 1; // until the next trial
    if (best == 0) {
        p->left++;
        p->retry = p->retry < 1 << 14 ? 2 * p->retry : 1 << 15;
        p->retry_from = p->step + p->retry;
    }
    p->level = best;
    p->level_calm = 0;
}

// What a verify of so many rows took.
static void sala__plan_learn(sala *s, int rows, double seconds) {
    if (s->policy.on) sala__least_add(&s->policy.cost[sala__cost_index(rows)], seconds);
}

// What the last tree of a request taught: it gave the tokens that were chosen since.
static void sala__plan_review(sala__policy *p, sala__request *r) {
    sala__spec *c = &r->spec;
    int given = (int)(r->chosen - c->before);
    if (c->source == SALA_DRAFT_NGRAM) sala__ngram_learn(c, given - 1);
    if (c->source != SALA_DRAFT_NGRAM && c->aligned) c->aligned += given;
    if (c->source == SALA_DRAFT_EAGLE) {
        p->given[c->level] += given;
        int tried = ++p->tried[c->level], sum = p->given[c->level];
        if (tried <= 16) p->yield[c->level] = (sum + (16 - tried) * sala__hopes[c->level]) / 16;
        if (p->tried[c->level] == 128) p->tried[c->level] /= 2, p->given[c->level] /= 2;
        if (p->tried[c->level] > 16) p->yield[c->level] += (given - p->yield[c->level]) / 64;
        c->tree_steps++;
        c->tree_sum += given;
    }
    c->before = r->chosen;
    c->source = SALA_DRAFT_NONE;
    c->paused = 0;
    c->step++;
    if (c->tree_steps < 64) return;
    int failed = !p->forced && c->tree_sum < 83; // 1.3 tokens a tree
    c->pause = !failed ? 0 : !c->pause ? 256 : c->pause < 4096 ? 2 * c->pause : 4096;
    if (failed) c->trees_from = c->step + c->pause;
    c->tree_steps = c->tree_sum = 0;
}

// How many more tokens a chain of `length` must give to be worth its time, where a step of `rows` rows gives
// at least `tokens`. Beside other work a long pass is disturbed more often than a short one: until many
// of its size were measured, no more than a quarter of a step a row is believed.
static double sala__chain_price(const sala__policy *p, int rows, int tokens, int length) {
    double plain = sala__cost(p, rows), price = 0;
    if (plain > 0) price = sala__cost(p, rows + length) / plain - 1;
    if (p->cost[sala__cost_index(rows + length)].count < 24) price = fmin(price, 0.25 * length);
    return price * tokens;
}

// The length that the request's chains have earned: all of it; half of it after eight and more that gave
// clearly less than their price; then none for a while.
static int sala__chain_that_pays(sala__spec *c, int length) {
    if (c->chains >= 8 && c->chains + c->got < 0.95 * (c->chains + c->price)) {
        c->chains = 0;
        c->got = c->price = 0;
        c->halved = !c->halved;
        if (!c->halved) c->chains_from = c->step + 128;
    }
    if (c->step < c->chains_from) return 0;
    return c->halved ? (length + 1) / 2 : length;
}

// A chain for one request, if its text has come before. Returns the nodes behind the root, or an error.
static int sala__plan_chain(sala *s, sala__request *r, int sequences, int rows, int most,
                            sala_error *err) {
    const sala__policy *p = &s->policy;
    const sala__sequence *q = &s->sequences[r->slot];
    sala__spec *c = &r->spec;
    int64_t count = (int64_t)q->token_count, place = 0;
    int room = c->deepest, beside = p->cap ? 10 : 4, tree = p->trees && p->level;
    if (!p->forced && (count < 32 || r->sampler.temperature > 1)) return 0;
    int code = sala__ngram_index(s, r, err);
    if (code < 0) return code;
    if (sequences > 1 && room > beside) room = beside;
    if (room > most) room = most;
    int match = sala__ngram_match(c, q->tokens, count, &place);
    int length = sala__ngram_length(c, match, tree, room);
    c->resumed = length == 0 && c->aligned && !tree && c->step >= c->chains_from;
    if (c->resumed) { // another value stood there, what surrounds it may go on as it did
        place = c->aligned;
        length = 4 * c->run >> c->lost;
        if (length > room) length = room;
    }
    if (length > 0 && !p->forced) {
        length = sala__chain_that_pays(c, length);
        if (length > 0) c->price += sala__chain_price(p, rows, sequences, length);
    }
    c->paused |= match && c->step < c->chains_from;
    if (length <= 0) return 0;
    sala__ngram_chain(&c->tree, q->tokens, count, place, length);
    c->place = place;
    c->source = SALA_DRAFT_NGRAM;
    return length;
}

// Trees for all requests that have none yet, of the level's shape, as far as the rows go.
static int sala__plan_heads(sala *s, sala__request **active, int count, int spare,
                            sala_error *err) {
    sala__policy *p = &s->policy;
    sala__request *which[SALA__DRAFTS];
    sala__shape shapes[SALA__DRAFTS];
    int32_t slots[SALA__DRAFTS];
    sala_tree trees[SALA__DRAFTS];
    int n = 0;
    for (int i = 0; i < count && n < SALA__DRAFTS; i++) {
        sala__request *r = active[i];
        sala__shape shape = p->shape[p->level];
        int room = r->spec.deepest;
        if (r->spec.source != SALA_DRAFT_NONE) continue;
        r->spec.paused |= r->spec.step < r->spec.trees_from;
        if (r->spec.step < r->spec.trees_from) continue;
        if (!p->test && !sala__draft_ready(&s->sequences[r->slot])) continue; // teaches nothing
        if (shape.depth > room) shape.depth = room;
        if (shape.nodes > spare + 1) shape.nodes = spare + 1;
        if (shape.depth > shape.nodes - 1) shape.depth = shape.nodes - 1;
        if (shape.depth < 1) continue;
        spare -= shape.nodes - 1;
        which[n] = r;
        slots[n] = r->slot;
        shapes[n++] = shape;
    }
    if (!n) return 0;
    double began = sala__now();
    int code = s->has_draft ? sala__draft_propose(s, slots, shapes, n, trees, err) : 0;
    for (int i = 0; i < n && code == 0; i++) {
        if (p->test)
            sala__test_tree(s, which[i], &shapes[i]);
        else
            which[i]->spec.tree = trees[i];
        which[i]->spec.source = SALA_DRAFT_EAGLE;
        which[i]->spec.level = p->level;
    }
    sala__least_add(&p->draft[p->level], sala__now() - began);
    return code;
}

// Decide what each of these requests verifies next, and build it: request->spec.tree and .source.
// Every sequence has page room for its whole tree; all trees together have at most `rows` nodes.
static int sala__plan_trees(sala *s, sala__request **active, int count, int rows, sala_error *err) {
    sala__policy *p = &s->policy;
    for (int i = 0; i < count; i++) {
        sala__plan_review(p, active[i]);
        sala__tree_root(&active[i]->spec.tree, s->sequences[active[i]->slot].root);
    }
    if (!p->on) return 0;
    p->step++;
    int level = p->level;
    sala__choose_level(p, count);
    if (p->trees && level && !p->level && p->cap && p->tried[level] && p->left == 1)
        sala__log(&s->env, SALA_LOG_INFO,
                  "the draft head does not pay: a tree gave %.2f tokens (mean of %d) in the time "
                  "of %.2f; "
                  "it gets another trial after %d steps",
                  (double)p->given[level] / p->tried[level], p->tried[level],
                  sala__price(p, level, count), p->retry);
    int used = count, known = p->forced || sala__least_known(&p->cost[sala__cost_index(count)]);
    for (int i = 0; i < count; i++) active[i]->spec.paused = p->trees && sala__left(p);
    for (int i = 0; i < count && p->chains; i++) {
        int more = sala__plan_chain(s, active[i], count, used, rows - used, err);
        if (more < 0) return more;
        used += more;
    }
    // A few steps without trees at each load: what trees are measured by.
    return p->trees && p->level && known ? sala__plan_heads(s, active, count, rows - used, err) : 0;
}

// ---- what was asked for ----

// Make a policy of the options, once it is known whether there is a draft head.
static int sala__spec_open(sala *s, sala_error *err) {
    const char *shape = s->options.spec_tree, *test = s->options.spec_test;
    sala__policy *p = &s->policy;
    memset(p, 0, sizeof *p);
    p->on = !sala__spec_is(s, "off");
    p->forced = sala__spec_is(s, "ngram") || sala__spec_is(s, "eagle");
    p->chains = p->on && !sala__spec_is(s, "eagle") && !test;
    p->trees = p->on && !sala__spec_is(s, "ngram") && (s->has_draft || test);
    if (sala__spec_is(s, "eagle") && !p->trees)
        return sala__fail(
            err, SALA_E_ARGUMENT,
            "spec eagle needs a draft head: name its folder in draft, or leave spec auto");
    if (test && !p->trees)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "spec-test is about trees: it does not go with spec %s", s->options.spec);
    if (test && s->config.dims.vocab <= SALA_MAX_NODES) // siblings must be able to differ
        return sala__fail(err, SALA_E_ARGUMENT,
                          "spec-test needs more than %d tokens, but the vocabulary has %d",
                          SALA_MAX_NODES, s->config.dims.vocab);
    if (test) {
        p->test = test[0] == 'o'   ? SALA__TEST_ORACLE
                  : test[0] == 'r' ? SALA__TEST_RANDOM
                                   : SALA__TEST_ADVERSARY;
        p->percent = test[0] == 'o' && test[6] ? atoi(test + 7) : 100;
    }
    memcpy(p->shape, sala__shapes, sizeof p->shape);
    memcpy(p->yield, sala__hopes, sizeof p->yield);
    p->fixed = shape != NULL && sala__shape_read(shape, &p->shape[1]) == 0;
    if (p->fixed) p->shape[2] = p->shape[1];
    p->cap = SALA__LEVELS - 1;
    p->level = p->cap;
    p->retry = sala__first_retry;
    if (!s->on_gpu && !p->forced && !test) { // after a while
        p->retry = sala__first_retry >> 3;
        p->level = 0;
        p->yield[1] = p->yield[2] = 1;
        p->retry_from = sala__first_trial;
    }
    return 0;
}

// What runs, and why, for sala_info.
static void sala__spec_text(const sala *s, char *text, size_t size) {
    const sala__policy *p = &s->policy;
    const sala__shape *one = &p->shape[2], *many = &p->shape[1];
    int n = snprintf(text, size, "%s: %s%s", s->options.spec ? s->options.spec : "auto",
                     p->chains  ? "n-gram chains"
                     : p->trees ? ""
                                : "every step gives one token",
                     p->chains && p->trees ? " and " : "");
    if (p->trees)
        n +=
            snprintf(text + n, size - (size_t)n, "%s trees of %d,%d,%d",
                     p->test ? s->options.spec_test : "EAGLE-3", one->depth, one->topk, one->nodes);
    if (p->trees && !p->fixed)
        n += snprintf(text + n, size - (size_t)n, ", from 3 sequences on %d,%d,%d, from 17 on none",
                      many->depth, many->topk, many->nodes);
    if (p->on && !p->trees && !p->forced)
        snprintf(text + n, size - (size_t)n, "; no draft head was named");
    if (p->trees && sala__left(p))
        snprintf(text + n, size - (size_t)n, "; at present no trees: measured, they do not pay");
}
/* -----------------------------------------------------------------------------------------------
   [12] THE LOOP: prefill, verify, events

   Two kinds of pass and no third. Prefill runs a chunk of one sequence's prompt. Verify runs, for
   every sequence that generates, a tree whose root is the last chosen token; plain decoding is a
   verify of one-node trees. sala__forward below is the only copy of the layer loop and serves both.
   -------------------------------------------------------------------------------------------- */

// ---- events ----

// Append an event. The pointer is good until the next one is appended.
static sala_event *sala__add_event(sala *s, const sala__request *r, int type, sala_error *err) {
    if (sala__grow(&s->env, (void **)&s->events, &s->event_capacity, s->event_count + 1,
                   sizeof *s->events, "events", err) < 0)
        return NULL;
    sala__event *e = &s->events[s->event_count++];
    memset(e, 0, sizeof *e);
    e->event.type = type;
    e->event.request = r->id;
    e->text = s->event_text.size;
    e->top = s->event_top_count;
    e->nodes = s->event_nodes_count;
    return &e->event;
}

SALA_API int sala_next_event(sala *s, sala_event *event) {
    if (s->event_taken == s->event_count) return 0;
    const sala__event *e = &s->events[s->event_taken++];
    *event = e->event;
    event->text = event->text_bytes ? s->event_text.data + e->text : "";
    event->top = event->top_count ? s->event_top + e->top : NULL;
    int n = event->node_count;
    const int32_t *nodes = n ? s->event_nodes + e->nodes : NULL;
    event->node_token = nodes;
    event->node_parent = n ? nodes + n : NULL;
    event->node_accepted = n ? nodes + 2 * n : NULL;
    event->node_score = n ? (const float *)(const void *)(nodes + 3 * n) : NULL;
    return 1;
}

// ---- requests ----

static void sala__drop_request(sala *s, sala__request *r) {
    const sala__env *env = &s->env;
    sala__release(env, r->tokens);
    sala__release(env, r->force);
    sala__release(env, r->guess);
    sala__release(env, r->biases);
    sala__release(env, r->spec.chain_head);
    sala__release(env, r->spec.chain_next);
    sala__release(env, r->stop_tokens);
    for (int i = 0; r->stop && i < r->stop_count; i++) sala__release(env, r->stop[i]);
    sala__release(env, r->stop);
    sala__sampler_free(env, &r->sampler);
    sala__release(env, r->held.data);
    sala__release(env, r);
}

static sala__sequence *sala__find_sequence(sala *s, int64_t id) {
    for (int i = 0; i < s->plan.slots; i++)
        if (id > 0 && s->sequences[i].id == id) return &s->sequences[i];
    return NULL;
}

static void *sala__copy(sala *s, const void *from, size_t count, size_t size, const char *what,
                        sala_error *err) {
    void *p = sala__alloc(&s->env, count, size, what, err);
    if (p && count) memcpy(p, from, count * size);
    return p;
}

static int sala__check_tokens(const sala *s, const int32_t *tokens, int64_t count,
                              const char *field, sala_error *err) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= s->config.dims.vocab)
            return sala__fail(err, SALA_E_ARGUMENT,
                              "%s[%lld] is %d, but the vocabulary has %d tokens", field,
                              (long long)i, tokens[i], s->config.dims.vocab);
    return 0;
}

// The prompt: given as ids, or encoded from text.
static int sala__request_prompt(sala *s, const sala_request *ask, sala__request *r,
                                sala_error *err) {
    if (!ask->text) {
        int code = sala__check_tokens(s, ask->tokens, ask->token_count, "tokens", err);
        if (code < 0) return code;
        r->token_count = ask->token_count;
        r->tokens =
            (int32_t *)sala__copy(s, ask->tokens, (size_t)ask->token_count, 4, "the prompt", err);
        return r->tokens ? 0 : SALA_E_MEMORY;
    }
    if (!s->has_tokenizer)
        return sala__fail(
            err, SALA_E_STATE,
            "this model has no tokenizer.json: give token ids instead of text (sala bench "
            "and sala logits do)");
    size_t bytes = ask->text_bytes ? ask->text_bytes : strlen(ask->text);
    int flags = SALA_PARSE_SPECIAL | (ask->sequence ? 0 : SALA_ADD_BOS);
    r->token_count = sala__encode(&s->tokenizer, ask->text, bytes, flags, &r->tokens, err);
    return r->token_count < 0 ? (int)r->token_count : 0;
}

static int sala__request_copy(sala *s, const sala_request *ask, sala__request *r, sala_error *err) {
    int code = sala__request_prompt(s, ask, r, err);
    if (code < 0) return code;
    r->sequence = ask->sequence;
    r->keep = ask->keep;
    r->max_tokens = ask->max_tokens ? ask->max_tokens : 256;
    r->ignore_eos = ask->ignore_eos;
    r->logprobs = ask->logprobs;
    r->want_rows = ask->want_rows;
    r->want_trees = ask->want_trees;
    if ((code = sala__check_tokens(s, ask->force, ask->force_count, "force", err)) < 0) return code;
    if ((code = sala__check_tokens(s, ask->guess, ask->guess_count, "guess", err)) < 0) return code;
    if ((code = sala__check_tokens(s, ask->stop_tokens, ask->stop_token_count, "stop_tokens",
                                   err)) < 0)
        return code;
    r->force =
        (int32_t *)sala__copy(s, ask->force, (size_t)ask->force_count, 4, "forced tokens", err);
    r->stop_tokens = (int32_t *)sala__copy(s, ask->stop_tokens, (size_t)ask->stop_token_count, 4,
                                           "stop tokens", err);
    r->stop =
        (char **)sala__alloc(&s->env, (size_t)ask->stop_count, sizeof(char *), "stop strings", err);
    r->guess = (int32_t *)sala__copy(s, ask->guess, (size_t)ask->guess_count, 4, "a guess", err);
    r->biases = (sala_bias *)sala__copy(s, ask->biases, (size_t)ask->bias_count, sizeof *r->biases,
                                        "logit biases", err);
    if (!r->force || !r->stop_tokens || !r->stop || !r->guess || !r->biases) return SALA_E_MEMORY;
    r->asked = *ask;
    r->force_count = ask->force_count;
    r->guess_count = ask->guess_count;
    r->stop_token_count = ask->stop_token_count;
    for (; r->stop_count < ask->stop_count; r->stop_count++) {
        const char *text = ask->stop[r->stop_count];
        r->stop[r->stop_count] =
            (char *)sala__copy(s, text, strlen(text) + 1, 1, "a stop string", err);
        if (!r->stop[r->stop_count]) return SALA_E_MEMORY;
    }
    r->stream.t = &s->tokenizer; // a loaded request's goes on
    r->stream.special = ask->special_text;
    r->stream.begun |= !ask->text && !ask->token_count; // what it goes on from has begun the text
    code = sala__sampler_init(&s->env, ask, s->config.dims.vocab, &r->sampler, err);
    for (int64_t i = 0; code == 0 && i < r->token_count; i++)
        sala__sampler_note(&r->sampler, r->tokens[i], 0);
    return code;
}

// What can be known at once about a request that can never run.
static int sala__request_fits(sala *s, const sala__request *r, const sala_request *ask,
                              sala_error *err) {
    const sala__sequence *q = r->sequence ? sala__find_sequence(s, r->sequence) : NULL;
    int64_t stored = 0;
    if (r->sequence) {
        if (!q)
            return sala__fail(err, SALA_E_ARGUMENT, "there is no sequence %lld",
                              (long long)r->sequence);
        if (q->request)
            return sala__fail(err, SALA_E_STATE, "sequence %lld is busy", (long long)r->sequence);
        stored = q->stored + (q->root >= 0);
    }
    if (r->token_count + (q && q->root >= 0) == 0)
        return sala__fail(err, SALA_E_ARGUMENT, "the prompt is empty: give at least one token");
    if (stored + r->token_count + r->max_tokens > s->options.context)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "the prompt (%lld tokens%s) and max-tokens (%lld) do not fit the context "
                          "of %lld: shorten it or raise "
                          "--context",
                          (long long)(stored + r->token_count),
                          q ? " with the sequence so far" : "", (long long)r->max_tokens,
                          (long long)s->options.context);
    if ((ask->want_rows & SALA_ROWS_ALL) && s->options.logits_rows < SALA_TILE)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "want_rows needs an engine opened with logits-rows of at least %d",
                          SALA_TILE);
    if ((ask->want_rows & SALA_ROWS_FEATURES) && !s->features)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "want_rows: SALA_ROWS_FEATURES needs an engine opened with features");
    if (ask->text == NULL && r->stop_count && !s->has_tokenizer)
        return sala__fail(err, SALA_E_STATE,
                          "this model has no tokenizer.json: stop strings cannot be matched");
    return 0;
}

static int sala__failed(sala_error *err) {
    return sala__fail(err, SALA_E_STATE, "an earlier sala_step failed: close this engine");
}

SALA_API int64_t sala_submit(sala *s, const sala_request *ask, sala_error *err) {
    sala__clear(err);
    if (s->failed) return sala__failed(err);
    int code = sala__check_request_fields(ask, err);
    if (code < 0) return code;
    sala__request *r = (sala__request *)sala__alloc(&s->env, 1, sizeof *r, "a request", err);
    if (!r) return SALA_E_MEMORY;
    code = sala__request_copy(s, ask, r, err);
    if (code == 0) code = sala__request_fits(s, r, ask, err);
    if (code < 0) {
        sala__drop_request(s, r);
        return code;
    }
    if (r->sequence) sala__find_sequence(s, r->sequence)->request = s->next_id + 1;
    r->id = ++s->next_id;
    r->slot = -1;
    r->submitted = sala__now();
    sala__request **end = &s->requests;
    while (*end) end = &(*end)->next;
    *end = r;
    return r->id;
}

SALA_API int sala_cancel(sala *s, int64_t request, sala_error *err) {
    sala__clear(err);
    for (sala__request *r = s->requests; r; r = r->next)
        if (r->id == request) {
            r->cancelled = 1;
            return 0;
        }
    return sala__fail(err, SALA_E_ARGUMENT, "there is no unfinished request %lld",
                      (long long)request);
}

// ---- pages ----
//
// Sequences hold pages, and prefixes do (see below). A page that nobody holds is free.

static void sala__page_use(sala *s, int32_t page) { // one sequence more
    if (!s->page_users[page]++ && s->page_cached[page]) s->idle_page_count--;
}

static void sala__page_leave(sala *s, int32_t page) { // one less
    if (--s->page_users[page]) return;
    if (s->page_cached[page])
        s->idle_page_count++;
    else
        s->free_pages[s->free_page_count++] = page;
}

static int32_t sala__page_take(sala *s) { // there must be a free one
    int32_t page = s->free_pages[--s->free_page_count];
    sala__page_use(s, page);
    return page;
}

static void sala__free_sequence(sala *s, sala__sequence *q) {
    for (int i = 0; i < q->page_count; i++) sala__page_leave(s, q->pages[i]);
    q->page_count = 0;
    q->id = 0;
    q->request = 0;
    q->token_count = q->phase_count = 0;
    sala__draft_drop(s, (int)(q - s->sequences));
}

SALA_API int sala_release(sala *s, int64_t sequence, sala_error *err) {
    sala__clear(err);
    sala__sequence *q = sala__find_sequence(s, sequence);
    if (!q)
        return sala__fail(err, SALA_E_ARGUMENT, "there is no sequence %lld", (long long)sequence);
    if (q->request)
        return sala__fail(err, SALA_E_STATE,
                          "sequence %lld is in use by request %lld: cancel that first",
                          (long long)sequence, (long long)q->request);
    sala__free_sequence(s, q);
    return 0;
}

SALA_API int64_t sala_history(sala *s, int64_t sequence, const int32_t **tokens, sala_error *err) {
    sala__clear(err);
    const sala__sequence *q = sala__find_sequence(s, sequence);
    if (!q)
        return sala__fail(err, SALA_E_ARGUMENT, "there is no sequence %lld", (long long)sequence);
    *tokens = q->tokens;
    return (int64_t)q->token_count;
}

// ---- the pass ----

static void sala__op(sala *s, int operation, const void *args) {
    if (s->observe) s->observe(s->observer, operation, args);
    if (s->on_gpu)
        sala__run_gpu(&s->gpu, operation, args);
    else
        sala__run_cpu(&s->cpu, operation, args);
}

// What an operation wrote, where the host can read it: on a GPU good until the next call.
static const void *sala__look(sala *s, const void *p, size_t bytes) {
    if (!s->on_gpu) return p;
    sala_error *e = &s->gpu.error;
    if (!e->code) sala__cuda_download(&s->gpu.cuda, s->peek, sala__on_gpu(p), bytes, e);
    if (!e->code) sala__cuda_wait(&s->gpu.cuda, e);
    return s->peek;
}

static void sala__show_hidden(sala *s, const sala__pass *p, int state, const sala_act *x) {
    if (!p->hidden) return;
    int width = s->config.dims.hidden;
    x = (const sala_act *)sala__look(s, x, (size_t)(p->rows.count * width) * sizeof(sala_act));
    for (int r = 0; r < p->rows.count; r++)
        sala__load_row(p->hidden + (size_t)state * p->hidden_l + (size_t)r * p->hidden_r,
                       x + (size_t)r * (size_t)width, width);
}

// Behind layer l of a prefill: its output to the host, if that is wanted; behind the last of all norms,
// as layer `layers`, what the head reads.
static void sala__show_features(sala *s, const sala__pass *p, int l, const sala_act *x) {
    size_t count = (size_t)p->rows.count * (size_t)s->config.dims.hidden, bytes = count * sizeof *x;
    sala_error *e = &s->gpu.error;
    for (int i = 0; i < 4 && p->features; i++) {
        sala_act *to = s->features + (size_t)i * count;
        if (l != (i < 3 ? s->options.features[i] : s->config.dims.layers)) continue;
        if (!s->on_gpu)
            memcpy(to, x, bytes);
        else if (!e->code)
            sala__cuda_download(&s->gpu.cuda, to, sala__on_gpu(x), bytes, e);
    }
}

static void sala__show_blocks(sala *s, const sala__pass *p, int sparse_layer) {
    if (!p->blocks) return;
    const sala_dims *m = &s->config.dims;
    int lists = p->rows.count * m->kv_heads, k = m->top_k;
    const int32_t *from = (const int32_t *)sala__look(s, s->block_count, (size_t)lists * 4);
    int32_t *to = p->blocks + (size_t)sparse_layer * p->blocks_l;
    for (int i = 0; i < lists; i++)
        to[(size_t)(i / m->kv_heads) * p->blocks_r + (size_t)(i % m->kv_heads * k)] = from[i];
    from = (const int32_t *)sala__look(s, s->blocks, (size_t)(lists * k) * 4);
    for (int i = 0; i < lists; i++) {
        int32_t *list = to + (size_t)(i / m->kv_heads) * p->blocks_r + i % m->kv_heads * k;
        int count = list[0];
        for (int j = 0; j < k; j++) list[j] = count < 0 ? -2 : j < count ? from[i * k + j] : -1;
    }
}

// Where the operations read the rows of a pass: on a GPU, its copy of them, which the next upload of
// the step block makes.
static const sala_rows *sala__publish_rows(sala *s, const sala_rows *rows) {
    if (!s->on_gpu) return rows;
    *s->step_rows = *rows;
    s->step_rows->seqs = (const sala_seq *)sala__step_at(s, rows->seqs);
    s->step_rows->token = (const int32_t *)sala__step_at(s, rows->token);
    s->step_rows->position = (const int32_t *)sala__step_at(s, rows->position);
    s->step_rows->seq = (const int32_t *)sala__step_at(s, rows->seq);
    s->step_rows->path = (const int32_t *)sala__step_at(s, rows->path);
    return (const sala_rows *)sala__step_at(s, s->step_rows);
}

static int sala__send_step(sala *s) { // the step block's way to the device
    sala__gpu *g = &s->gpu;
    if (g->error.code) return g->error.code;
    return sala__cuda_upload(&g->cuda, sala__on_gpu(s->gpu_step), s->step, s->step_bytes,
                             &g->error);
}

// Does this weight multiply x in NVFP4 in this pass? Verify never does, so that what it computes does not
// depend on how many rows it has.
static int sala__takes_quant(const sala *s, const sala__pass *p, const sala_weight *w) {
    return s->w4a4 && !p->rows.verify && w->format == SALA_NVFP4 && w->input_scale > 0;
}

// x of this weight in units of its input_scale, which weights that read the same x share.
static sala_quant sala__quant_for(const sala_quant *space, const sala_weight *w) {
    sala_quant q = *space;
    q.scale = w->input_scale;
    return q;
}

// The four (or three) projections of a mixer that read the normed input: y, or y quantised.
static void sala__project(sala *s, const sala__pass *p, const sala__layer *w, sala_act *k,
                          sala_act *v) {
    const sala_weight *all[SALA_GEMM_MAX] = {&w->q, &w->k, &w->v, &w->gate};
    sala_act *const y[SALA_GEMM_MAX] = {s->q, k, v, s->gate};
    for (int quant = 0; quant < 2; quant++) {
        sala_gemm_args a;
        memset(&a, 0, sizeof a);
        a.rows = p->bucket;
        a.x = s->y;
        for (int i = 0; i < SALA_GEMM_MAX; i++) {
            if (!all[i]->data || sala__takes_quant(s, p, all[i]) != quant) continue;
            if (quant) a.qx = sala__quant_for(&s->quant, all[i]);
            a.y[a.count] = y[i];
            a.w[a.count++] = *all[i];
        }
        if (a.count) sala__op(s, SALA__OP_gemm, &a);
    }
}

// The norm of x into y. Not an initialiser: padding that is left open looks like half of an address.
static void sala__norm_args(sala *s, int rows, const sala_weight *weight, float divisor,
                            sala_norm_args *a) {
    memset(a, 0, sizeof *a);
    a->rows = rows;
    a->width = s->config.dims.hidden;
    a->eps = s->config.dims.eps;
    a->weight = *weight;
    a->x = s->x;
    a->y = s->y;
    a->divisor = divisor;
}

// y of a norm in the form that its readers want: as it is, quantised or both. A layer's mixer reads it,
// or (mlp) its MLP, of which a GPU has gate and up in one; without a layer it is the head.
static void sala__norm_for(sala *s, const sala__pass *p, const sala__layer *reader, int mlp,
                           sala_norm_args *a) {
    const sala_weight *w[SALA_GEMM_MAX] = {NULL, NULL, NULL, NULL};
    int plain = reader ? 0 : 1;
    if (reader && mlp) w[0] = &reader->mlp_gate, w[1] = s->on_gpu ? NULL : &reader->mlp_up;
    if (reader && !mlp)
        w[0] = &reader->q, w[1] = &reader->k, w[2] = &reader->v, w[3] = &reader->gate;
    for (int i = 0; i < SALA_GEMM_MAX; i++) {
        if (!w[i] || !w[i]->data) continue;
        if (sala__takes_quant(s, p, w[i]))
            a->quant = sala__quant_for(&s->quant, w[i]);
        else
            plain = 1;
    }
    if (!plain) a->y = NULL;
}

// x += residual_scale * (input w^T); y = the norm that the next reader of x wants. The input may be
// quantised already.
static void sala__to_residual(sala *s, const sala__pass *p, const sala_act *input,
                              const sala_quant *qx, const sala_weight *w,
                              const sala_norm_args *norm) {
    sala_gemm_norm_args a;
    memset(&a, 0, sizeof a);
    a.input = input;
    a.w = *w;
    if (sala__takes_quant(s, p, w)) {
        a.qx = sala__quant_for(qx ? qx : &s->quant, w);
        sala_quantize_args quantize = {p->bucket, w->k, input, a.qx};
        if (!qx) sala__op(s, SALA__OP_quantize, &quantize);
    }
    a.norm = *norm;
    a.norm.scale = s->config.dims.residual_scale;
    a.norm.branch = s->branch;
    a.partial = s->partial;
    a.arrivals = s->arrivals;
    sala__op(s, SALA__OP_gemm_norm, &a);
}

static void sala__sparse_layer(sala *s, sala__pass *p, const sala__layer *w, int index) {
    const sala_dims *m = &s->config.dims;
    sala_nodes nodes = s->nodes[index];
    if (!p->rows.verify) { // prefill: k, v pass through the common buffers on their way into pages
        nodes.k = s->k;
        nodes.v = s->v;
    }
    sala__project(s, p, w, nodes.k, nodes.v);
    if (m->sparse_rope) { // not in the released model
        sala_qk_args qk;
        memset(&qk, 0, sizeof qk);
        qk.rows = p->bucket;
        qk.heads = m->heads;
        qk.kv_heads = m->kv_heads;
        qk.dim = m->head_dim;
        qk.cos_sin = s->sparse_cos_sin;
        qk.q = s->q;
        qk.k = nodes.k;
        sala__op(s, SALA__OP_qk_norm_rope, &qk);
    }
    sala_store_args store = {m, p->on_device, nodes, s->pages[index]};
    if (!p->rows.verify) sala__op(s, SALA__OP_store_prefill, &store);
    sala_select_args select = {m,
                               p->on_device,
                               s->q,
                               nodes,
                               s->pages[index],
                               s->blocks,
                               s->block_count,
                               (int32_t)s->plan.blocks,
                               s->normaliser,
                               s->score};
    sala__op(s, SALA__OP_select, &select);
    sala__show_blocks(s, p, index);
    sala_attend_args attend = {m,
                               p->on_device,
                               s->q,
                               nodes,
                               s->pages[index],
                               s->blocks,
                               s->block_count,
                               w->gate.data ? s->gate : NULL,
                               s->o,
                               (int32_t)s->plan.attend_parts,
                               s->part_o,
                               s->part_max_sum};
    sala__op(s, SALA__OP_attend, &attend);
}

static float *sala__state_at(const sala *s, int slot, int layer) { // of a lightning layer
    return s->states + ((size_t)layer * (size_t)s->plan.slots + (size_t)slot) * s->plan.state;
}

static float *sala__snapshot_at(const sala *s, int prefix, int layer) {
    size_t at = (size_t)prefix * (size_t)s->lightning_layers + (size_t)layer;
    return s->snapshots + at * s->plan.state;
}

static sala_gla_args sala__gla_args(sala *s, const sala_rows *rows, int verify, int index) {
    const sala_dims *m = &s->config.dims;
    const sala__plan *p = &s->plan;
    size_t slots = (size_t)p->slots, lin = (size_t)m->lin_kv_heads * (size_t)m->lin_dim;
    sala_gla_args a;
    memset(&a, 0, sizeof a);
    a.dims = m;
    a.rows = rows;
    a.cos_sin = m->lin_rope ? s->cos_sin : NULL;
    a.decay = s->decay;
    a.slopes = s->slopes;
    a.q = s->q;
    a.raw_k = s->k;
    a.k = verify ? s->node_k + (size_t)index * (size_t)p->node_rows * lin : s->k;
    a.v = verify ? s->node_v + (size_t)index * (size_t)p->node_rows * lin : s->v;
    a.state = s->states + (size_t)index * slots * p->state;
    a.pending_k = s->pending_k + (size_t)index * slots * p->pending;
    a.pending_v = s->pending_v + (size_t)index * slots * p->pending;
    a.o = s->o;
    a.forks = (const int32_t *)sala__step_at(s, s->forks);
    return a;
}

static void sala__lightning_layer(sala *s, sala__pass *p, const sala__layer *w, int index) {
    const sala_dims *m = &s->config.dims;
    sala_gla_args gla = sala__gla_args(s, p->on_device, p->rows.verify, index);
    gla.q_norm = w->q_norm;
    gla.k_norm = w->k_norm;
    gla.copies = p->copies;
    for (int i = 0; i < p->copies; i++) {
        gla.copy_after[i] = p->copy_after[i];
        gla.copy_to[i] = sala__snapshot_at(s, p->copy_to[i], index);
    }
    sala__project(s, p, w, s->k, (sala_act *)(uintptr_t)gla.v);
    sala__op(s, p->rows.verify ? SALA__OP_gla_verify : SALA__OP_gla_prefill, &gla);
    sala_gate_args gate;
    memset(&gate, 0, sizeof gate); // see sala__norm_args
    gate.rows = p->bucket;
    gate.width = m->lin_heads * m->lin_dim;
    gate.eps = m->eps;
    gate.norm = w->o_norm;
    gate.gate = w->gate.data ? s->gate : NULL;
    gate.o = s->o;
    gate.y = s->q; // which nobody reads any more
    sala__op(s, SALA__OP_gate, &gate);
}

// The logits that are wanted, to p->logits; on a GPU to s->logits, which has room for node_rows
// rows, and from there to the host where they are to be seen. The last of them stay on the GPU.
static void sala__head(sala *s, const sala__pass *p, const sala_weight *weight) {
    const sala_dims *m = &s->config.dims;
    int most = s->on_gpu ? s->plan.node_rows : p->logits_rows, rows;
    sala_error *e = &s->gpu.error;
    for (int first = 0; first < p->logits_rows; first += rows) {
        size_t at = (size_t)first * (size_t)m->vocab;
        sala_gemm_args head;
        memset(&head, 0, sizeof head);
        rows = p->logits_rows - first < most ? p->logits_rows - first : most;
        head.rows = s->on_gpu && p->rows.verify ? p->bucket : rows;
        head.count = 1;
        head.x = s->y + (size_t)(p->logits_first + first) * (size_t)m->hidden;
        head.w[0] = *weight;
        head.y_f32 = s->on_gpu ? s->logits : p->logits;
        sala__op(s, SALA__OP_gemm, &head);
        if (s->on_gpu && !p->rows.verify && p->show_logits && !e->code)
            sala__cuda_download(&s->gpu.cuda, p->logits + at, sala__on_gpu(s->logits),
                                (size_t)rows * (size_t)m->vocab * 4, e);
    }
}

// gate, up and down of a layer, behind them the norm that the next layer or the head reads.
static void sala__mlp(sala *s, const sala__pass *p, const sala__layer *w, int last) {
    const sala__weights *weights = s->on_gpu ? &s->gpu_weights : &s->weights;
    sala_gemm_swiglu_args mlp;
    sala_norm_args norm;
    memset(&mlp, 0, sizeof mlp);
    mlp.rows = p->bucket;
    mlp.x = s->y;
    mlp.gate = w->mlp_gate;
    mlp.up = w->mlp_up;
    mlp.y = s->ffn_gate;
    mlp.scratch = s->ffn_up;
    if (sala__takes_quant(s, p, &w->mlp_gate) && (s->on_gpu || sala__takes_quant(s, p, &w->mlp_up)))
        mlp.qx = sala__quant_for(&s->quant, &w->mlp_gate);
    if (sala__takes_quant(s, p, &w->mlp_down))
        mlp.quant = sala__quant_for(&s->quant_ffn, &w->mlp_down);
    sala__op(s, SALA__OP_gemm_swiglu, &mlp);
    sala__norm_args(s, p->bucket, last ? &weights->final_norm : &w[1].input_norm,
                    last && !p->hidden ? s->config.dims.logit_divisor : 1, &norm);
    sala__norm_for(s, p, last ? NULL : &w[1], 0, &norm);
    sala__to_residual(s, p, s->ffn_gate, &s->quant_ffn, &w->mlp_down, &norm);
}

// One layer for all rows: y, the normed input, is there (or quantised); leaves y normed for whoever
// reads x next. Of its kind it is the index-th layer.
static void sala__run_layer(sala *s, sala__pass *p, int l, int index) {
    const sala__weights *weights = s->on_gpu ? &s->gpu_weights : &s->weights;
    const sala__layer *w = &weights->layers[l];
    sala_norm_args norm;
    if (w->sparse)
        sala__sparse_layer(s, p, w, index);
    else
        sala__lightning_layer(s, p, w, index);
    sala__norm_args(s, p->bucket, &w->post_norm, 1, &norm);
    sala__norm_for(s, p, w, 1, &norm);
    sala__to_residual(s, p, w->sparse ? s->o : s->q, NULL, &w->o, &norm);
    sala__mlp(s, p, w, l == s->config.dims.layers - 1);
    sala__draft_capture(s, p, l);
    sala__show_features(s, p, l, s->x);
    sala__show_hidden(s, p, l + 1, s->x);
}

// All layers for all rows. Every token's path through the model is this function.
static void sala__forward(sala *s, sala__pass *p) {
    const sala_dims *m = &s->config.dims;
    const sala__weights *weights = s->on_gpu ? &s->gpu_weights : &s->weights;
    int of_kind[2] = {0, 0}; // lightning, sparse
    sala_embed_args embed = {m, p->on_device, weights->embed, s->x};
    sala__op(s, SALA__OP_embed, &embed);
    sala__show_hidden(s, p, 0, s->x);
    sala_rope_args rope = {p->on_device, m->lin_dim, s->frequency, s->cos_sin};
    sala__op(s, SALA__OP_rope_table, &rope);
    if (m->sparse_rope) { // not in the released model; the two kinds of heads may differ in width
        rope.dim = m->head_dim;
        rope.frequency = s->sparse_frequency;
        rope.cos_sin = s->sparse_cos_sin;
        sala__op(s, SALA__OP_rope_table, &rope);
    }
    sala_norm_args norm;
    sala__norm_args(s, p->bucket, &weights->layers[0].input_norm, 1, &norm);
    sala__norm_for(s, p, &weights->layers[0], 0, &norm);
    sala__op(s, SALA__OP_norm, &norm);
    for (int l = 0; l < m->layers; l++)
        sala__run_layer(s, p, l, of_kind[weights->layers[l].sparse]++);
    if (p->hidden) { // the final norm as it is, then once more with the division that the head wants
        sala__show_hidden(s, p, m->layers + 1, s->y);
        sala__norm_args(s, p->bucket, &weights->final_norm, m->logit_divisor, &norm);
        sala__op(s, SALA__OP_norm, &norm);
    }
    sala__show_features(s, p, m->layers, s->y);
    if (p->logits_rows) sala__head(s, p, &weights->head);
}

// After the choice: the paths that it goes along, which become part of their sequences.
static void sala__run_commit(sala *s, const sala__pass *p) {
    const sala__plan *plan = &s->plan;
    sala_accept_args accept = {p->on_device, p->chosen, p->accepted, p->accepted_rows};
    sala__op(s, SALA__OP_accept, &accept);
    sala_commit_args a = {&s->config.dims,
                          p->on_device,
                          s->sparse_layers,
                          s->lightning_layers,
                          plan->slots,
                          plan->node_rows,
                          p->accepted,
                          p->accepted_rows,
                          s->on_gpu ? s->gpu_nodes : s->nodes,
                          s->on_gpu ? s->gpu_pages : s->pages,
                          s->node_k,
                          s->node_v,
                          s->pending_k,
                          s->pending_v};
    sala__op(s, SALA__OP_commit, &a);
    sala__draft_keep(s, p);
}

// ---- the pass on a GPU ----

// Rows (or sequences) of the graph that serves n: a power of two up to 16, then eighths, then
// sixteenths, since products cost as many rows as they have.
static int sala__bucket(int n, int most) {
    int b = 1;
    while (b < n && b < 16) b *= 2;
    if (b < n) b = sala__round_up(n, n <= 64 ? 8 : 16);
    return b < most ? b : most;
}

// The choices of a pass; of prefill one, that of the last row, which sampling[0] says how to make.
static void sala__gpu_sample(sala *s, const sala__pass *p) {
    sala__gpu *g = &s->gpu;
    const float *logits = s->logits;
    if (!p->rows.verify) {
        logits += (size_t)((p->logits_rows - 1) % s->plan.node_rows) * (size_t)s->config.dims.vocab;
        g->rows = 1;
    }
    sala_sample_args a = {p->on_device,     s->config.dims.vocab,
                          logits,           (const sala_sampling *)sala__step_at(s, s->sampling),
                          s->counts,        s->biases,
                          s->sample_weight, s->sample_arrivals,
                          s->chosen};
    sala__launch_sample(g, &a);
}

// Everything between the step block's way to the device and the results' way back.
static void sala__gpu_launch_pass(sala *s, sala__pass *p) {
    sala__gpu *g = &s->gpu;
    sala_error *e = &g->error;
    if (sala__send_step(s)) return;
    sala__forward(s, p);
    if (!p->logits_rows) return;
    sala__gpu_sample(s, p);
    if (p->rows.verify) sala__run_commit(s, p);
    size_t words = p->rows.verify ? (size_t)p->bucket * (2 + SALA_MAX_PATH) : 1;
    if (!e->code) sala__cuda_download(&g->cuda, s->result, sala__on_gpu(s->chosen), words * 4, e);
}

// Record a pass. A graph that did not run for long gives way when there is no place.
static sala__graph *sala__gpu_record(sala *s, sala__pass *p) {
    sala__gpu *g = &s->gpu;
    sala__graph made = {g->rows, g->seqs, g->tree_slots, 0, NULL}, *graph = g->graphs;
    if (sala__cuda_capture_begin(&g->cuda, &g->error) == 0) {
        sala__gpu_launch_pass(s, p);
        sala__cu_exec *exec = g->error.code ? NULL : &made.exec;
        sala__cuda_capture_end(&g->cuda, exec, &g->error);
    }
    if (g->error.code) { // no memory for it, say: the pass runs without, a little slower
        sala__log(&s->env, SALA_LOG_WARNING, "steps run without CUDA graphs: %s", g->error.text);
        sala__clear(&g->error);
        g->no_graphs = 1;
        return NULL;
    }
    for (int i = 1; i < g->graph_count; i++)
        if (g->graphs[i].used < graph->used) graph = &g->graphs[i];
    if (g->graph_count < SALA__GRAPHS) graph = &g->graphs[g->graph_count++];
    sala__cuda_graph_free(&g->cuda, graph->exec);
    *graph = made;
    return graph;
}

// The recorded pass of this bucket; recorded now if it is not there. NULL: run it without.
static sala__cu_exec sala__gpu_graph(sala *s, sala__pass *p) {
    sala__gpu *g = &s->gpu;
    sala__graph *graph = NULL;
    for (int i = 0; i < g->graph_count && !graph; i++)
        if (g->graphs[i].rows == g->rows && g->graphs[i].seqs == g->seqs &&
            g->graphs[i].tree_slots == g->tree_slots)
            graph = &g->graphs[i];
    if (!graph && !g->no_graphs) graph = sala__gpu_record(s, p);
    if (!graph) return NULL;
    graph->used = ++g->passes;
    return graph->exec;
}

static int sala__gpu_pass(sala *s, sala__pass *p, sala_error *err) {
    sala__gpu *g = &s->gpu;
    sala_error *e = &g->error; // may hold what an upload before this pass met
    int verify = p->rows.verify;
    g->prefill = !verify;
    g->rows = p->bucket;
    g->seqs = sala__bucket(p->rows.seq_count, s->plan.node_rows); // of one-node trees: as the rows
    p->on_device = sala__publish_rows(s, &p->rows);
    sala__cu_exec graph = !verify || p->hidden || e->code ? NULL : sala__gpu_graph(s, p);
    if (!e->code && graph)
        sala__cuda_graph_launch(&g->cuda, graph, e);
    else if (!e->code)
        sala__gpu_launch_pass(s, p);
    return sala__gpu_wait(g, err);
}

typedef struct sala__walk {
    sala *s;
    const sala__pass *pass;
} sala__walk;

static void sala__walk_item(void *context, int64_t i, int thread);

static void sala__place_results(sala *s, sala__pass *p) {
    p->chosen = s->chosen;
    p->accepted = p->chosen + p->bucket;
    p->accepted_rows = p->accepted + p->bucket;
}

// One pass; in verify form the tokens are chosen, and the nodes that they go along are in the cache. It
// is for the caller to count them.
static int sala__run_pass(sala *s, sala__pass *p, sala_error *err) {
    if (!p->rows.verify) p->bucket = p->rows.count;
    sala__place_results(s, p);
    if (s->on_gpu) return sala__gpu_pass(s, p, err);
    p->on_device = &p->rows;
    sala__forward(s, p);
    if (!p->rows.verify) return 0;
    sala__walk walk = {s, p};
    sala__parallel(&s->cpu, p->rows.seq_count, sala__walk_item, &walk);
    sala__run_commit(s, p);
    return 0;
}

// ---- choosing tokens, text, the end of a request ----

// What the first of these events at index j of the output decides (speculation.md 5.4): an end
// token, a stop string, the number of tokens.
static int sala__is_stop_token(const sala *s, const sala__request *r, int32_t token) {
    for (int i = 0; i < r->stop_token_count; i++)
        if (r->stop_tokens[i] == token) return 1;
    for (int i = 0; !r->ignore_eos && i < s->config.eos_count; i++)
        if (s->config.eos[i] == token) return 1;
    return 0;
}

// How many bytes of the held text can be shown: all before the earliest place where a stop string
// stands whole (*stopped = 1), else all before the earliest place where one might still begin.
static size_t sala__stop_scan(const sala__request *r, int *stopped) {
    size_t size = r->held.size, partial = size;
    *stopped = 0;
    for (size_t at = 0; at < size; at++) {
        for (int i = 0; i < r->stop_count; i++) {
            size_t n = strlen(r->stop[i]), have = size - at < n ? size - at : n;
            if (memcmp(r->held.data + at, r->stop[i], have) != 0) continue;
            if (have == n) {
                *stopped = 1;
                return at;
            }
            if (at < partial) partial = at;
        }
    }
    return partial;
}

// Move the first `bytes` of the held text to the last event.
static int sala__emit_text(sala *s, sala__request *r, size_t bytes, sala_error *err) {
    int code = sala__append(&s->env, &s->event_text, r->held.data ? r->held.data : "", bytes, err);
    if (code < 0) return code;
    s->events[s->event_count - 1].event.text_bytes = bytes;
    r->held.size -= bytes;
    if (bytes) memmove(r->held.data, r->held.data + bytes, r->held.size);
    return 0;
}

static void sala__fill_timings(const sala__request *r, sala_timings *t) {
    *t = r->counted;
    t->prompt_tokens = r->prefilled - r->shared;
    t->reused_tokens = r->admitted > 0 ? r->reused : 0;
    t->output_tokens = r->chosen;
    t->queue_seconds = r->admitted > 0 ? r->admitted - r->submitted : 0;
    double until = r->first_token > 0 ? r->first_token : sala__now(); // cancelled in prefill
    t->prefill_seconds = r->admitted > 0 ? until - r->admitted : 0;
    t->decode_seconds = r->first_token > 0 ? r->last_token - r->first_token : 0;
    t->decode_bytes = r->decode_bytes;
}

// The request is over: a last event, then its sequence is kept or freed. The request itself goes at
// the end of the step (`slot` -2 marks it).
static int sala__finish(sala *s, sala__request *r, int reason, int show_rest, sala_error *err) {
    int code = 0;
    if (show_rest && s->has_tokenizer) code = sala__stream_flush(&r->stream, &r->held, err);
    if (code < 0) return code;
    if (!show_rest) r->held.size = 0;
    sala_event *e = sala__add_event(s, r, SALA_EVENT_FINISH, err);
    if (!e) return SALA_E_MEMORY;
    e->finish_reason = reason;
    sala__fill_timings(r, &e->timings);
    sala__sequence *q = r->slot >= 0  ? &s->sequences[r->slot]
                        : r->sequence ? sala__find_sequence(s, r->sequence)
                                      : NULL;
    if (q) {
        q->request = 0;
        if (r->took_root && r->prefilled == 0)
            q->root = r->tokens[0]; // cancelled before it was read
        q->token_count =
            (size_t)q->stored + (q->root >= 0); // cancelled in prefill: what was not read never was
        // One that never began leaves the sequence that it named; what its history would have taken
        // over is not its own.
        e->sequence = (r->slot < 0 ? !r->reused : r->keep) ? q->id : 0;
        if (!e->sequence && r->slot >= 0) sala__free_sequence(s, q);
    }
    r->slot = -2;
    return sala__emit_text(s, r, r->held.size, err);
}

static int sala__note_token(sala *s, sala__sequence *q, int32_t token, sala_error *err) {
    int code = sala__grow(&s->env, (void **)&q->tokens, &q->token_capacity, q->token_count + 1, 4,
                          "a history", err);
    if (code == 0) q->tokens[q->token_count++] = token;
    return code;
}

// The tokens from there on are of another phase.
static int sala__note_phase(sala *s, sala__sequence *q, int32_t first, int verified,
                            sala_error *err) {
    int code = sala__grow(&s->env, (void **)&q->phases, &q->phase_capacity, q->phase_count + 1,
                          sizeof *q->phases, "a history", err);
    if (code < 0) return code;
    sala__phase phase = {first, verified};
    q->phases[q->phase_count++] = phase;
    return 0;
}

// Take over a chosen token: history, event, text, and whether the request ends with it.
static int sala__take_token(sala *s, sala__request *r, const sala__choice *c, sala_error *err) {
    sala__sequence *q = &s->sequences[r->slot];
    int forced = r->chosen < r->force_count, stopped = 0, code;
    int32_t token = c->token;
    if (token < 0) return sala__finish(s, r, SALA_FINISH_NAN, 1, err);
    q->root = token;
    if ((code = sala__note_token(s, q, token, err)) < 0) return code;
    sala__sampler_note(&r->sampler, token, 1);
    r->chosen++;
    r->last_token = sala__now();
    if (r->chosen == 1) r->first_token = r->last_token;
    sala_event *e = sala__add_event(s, r, SALA_EVENT_TOKEN, err);
    if (!e) return SALA_E_MEMORY;
    e->token = token;
    e->position = q->stored;
    e->logprob = c->logprob;
    e->top_count = c->top_count;
    if (c->top_count) {
        size_t need = s->event_top_count + (size_t)c->top_count;
        code = sala__grow(&s->env, (void **)&s->event_top, &s->event_top_capacity, need,
                          sizeof(sala_logprob), "logprobs", err);
        if (code < 0) return code;
        memcpy(s->event_top + s->event_top_count, c->top,
               (size_t)c->top_count * sizeof(sala_logprob));
        s->event_top_count = need;
    }
    int end = !forced && sala__is_stop_token(s, r, token);
    if (s->has_tokenizer && (!end || r->stream.special)) {
        if ((code = sala__stream_push(&r->stream, token, &r->held, err)) < 0) return code;
    }
    size_t show = r->held.size;
    if (!end && r->stop_count) show = sala__stop_scan(r, &stopped);
    if ((code = sala__emit_text(s, r, show, err)) < 0) return code;
    if (end || stopped) return sala__finish(s, r, SALA_FINISH_STOP, !stopped, err);
    if (r->chosen >= r->max_tokens) return sala__finish(s, r, SALA_FINISH_LENGTH, 1, err);
    return 0;
}

// ---- prefix reuse ----
//
// What a prompt left behind can begin another one. A prefix is one prefilled segment from position 0 that
// ends with a whole page and a whole tile, below the end of the prompt: who goes on from there has the
// bits that it would have computed. Prefixes share the pages, which are written only behind them (a
// compressed row lives with the page of its last token). Lightning states know nothing but their
// present: prefill copies them as it comes by. Where? A prompt leaves three prefixes: up to its last
// whole tile (for who repeats or extends it), up to its last whole chunk (for another question about the
// same document) and up to where it parts from what is known (the third prompt of a kind finds what the
// first two have in common). Prefixes that were of no use for longest make room for others, and their
// pages for requests. Tokens that were decoded are in none: their bits are others.

static const int32_t *sala__prefix_pages(const sala__prefix *p) {
    return p->tokens + p->length;
}

static int32_t sala__prefix_unit(const sala *s) { // lengths are multiples of it
    int32_t unit = SALA_TILE;
    while (unit % s->config.dims.block) unit += SALA_TILE;
    return unit;
}

static void sala__prefix_drop(sala *s, sala__prefix *p) {
    const int32_t *pages = sala__prefix_pages(p);
    for (int i = 0; i < p->length / s->config.dims.block; i++) {
        if (--s->page_cached[pages[i]] || s->page_users[pages[i]]) continue;
        s->idle_page_count--;
        s->free_pages[s->free_page_count++] = pages[i];
    }
    sala__release(&s->env, p->tokens);
    memset(p, 0, sizeof *p);
    s->prefix_clock++;
}

// The prefix that was of no use for longest, of several the longest; NULL: there is none. `frees`: of
// those that alone hold a page, which then is their last one: sequences hold pages from the first on, so
// do longer prefixes.
static sala__prefix *sala__prefix_oldest(const sala *s, int frees) {
    sala__prefix *oldest = NULL;
    for (sala__prefix *p = s->prefixes; p && p < s->prefixes + s->plan.snapshots; p++) {
        if (!p->length || (oldest && oldest->used < p->used)) continue;
        if (oldest && oldest->used == p->used && oldest->length > p->length) continue;
        int32_t last = sala__prefix_pages(p)[p->length / s->config.dims.block - 1];
        if (!frees || (!s->page_users[last] && s->page_cached[last] == 1)) oldest = p;
    }
    return oldest;
}

// The longest prefix that a prompt begins with, and has tokens behind. *parts: a later place up to which
// it goes along with a prefix, or 0.
static sala__prefix *sala__prefix_find(const sala *s, const sala__request *r, int32_t *parts) {
    const int32_t unit = sala__prefix_unit(s);
    sala__prefix *best = NULL;
    *parts = 0;
    for (sala__prefix *p = s->prefixes; p && p < s->prefixes + s->plan.snapshots; p++) {
        int32_t most = p->length < r->token_count ? p->length : (int32_t)r->token_count - 1, n = 0;
        while (n < most && r->tokens[n] == p->tokens[n]) n++;
        if (n && n == p->length && (!best || best->length < n)) best = p;
        if (n / unit * unit > *parts) *parts = n / unit * unit;
    }
    if (best && *parts <= best->length) *parts = 0;
    return best;
}

static int sala__prefix_wanted(const sala *s, const sala__request *r) {
    const int rows = SALA_ROWS_PROMPT | SALA_ROWS_FEATURES; // these are to be computed
    return s->plan.snapshots && !(r->want_rows & rows);
}

// The prefix that a waiting request would begin with; looked for again when others are there.
static sala__prefix *sala__prefix_of(const sala *s, sala__request *r) {
    int32_t parts;
    if (!sala__prefix_wanted(s, r)) return NULL;
    if (r->looked != s->prefix_clock) {
        sala__prefix *p = sala__prefix_find(s, r, &parts);
        r->found = p ? 1 + (int32_t)(p - s->prefixes) : 0;
        r->looked = s->prefix_clock;
    }
    return r->found ? &s->prefixes[r->found - 1] : NULL;
}

// Begin a sequence where a prefix ends: its pages take the place of those that are there, if any.
static int sala__prefix_adopt(sala *s, sala__request *r, sala__sequence *q, sala__prefix *p,
                              sala_error *err) {
    const int32_t *pages = sala__prefix_pages(p);
    int block = s->config.dims.block, count = p->length / block, code = 0;
    int slot = (int)(q - s->sequences), from = (int)(p - s->prefixes);
    for (int i = 0; i < count; i++) {
        sala__page_use(s, pages[i]);
        if (i < q->page_count) sala__page_leave(s, q->pages[i]);
        q->pages[i] = pages[i];
    }
    if (q->page_count < count) q->page_count = count;
    for (int l = 0; l < s->lightning_layers && code == 0; l++) {
        float *to = sala__state_at(s, slot, l), *state = sala__snapshot_at(s, from, l);
        if (s->on_gpu)
            code = sala__cuda_copy(&s->gpu.cuda, sala__on_gpu(to), sala__on_gpu(state),
                                   s->plan.state * 4, err);
        else
            memcpy(to, state, s->plan.state * 4);
    }
    q->stored = q->draft.seen = r->shared = p->length; // the draft head sees what follows
    r->reused = r->prefilled = p->length;
    p->used = r->id;
    if (code == 0 && !q->phase_count) code = sala__note_phase(s, q, 0, 0, err);
    return code;
}

// Before the first chunk of a prompt: is there more to share by now? And where will it leave prefixes?
static int sala__prefix_begin(sala *s, sala__request *r, sala_error *err) {
    sala__sequence *q = &s->sequences[r->slot];
    int32_t parts, unit = sala__prefix_unit(s), last = (int32_t)r->token_count - 1, n = 0;
    if (r->sequence != r->id || r->segment_start > 0 || !sala__prefix_wanted(s, r))
        return 0; // it did not begin the sequence
    sala__prefix *p = sala__prefix_find(s, r, &parts);
    if (p && p->length > r->shared) {
        int code = sala__prefix_adopt(s, r, q, p, err);
        if (code == 0 && s->on_gpu)
            code = sala__put(s, s->page_tables + r->slot * s->plan.blocks, q->pages,
                             (size_t)q->page_count * 4, err);
        if (code < 0) return code;
    }
    int32_t chunk = last / s->options.chunk * s->options.chunk / unit * unit;
    const int32_t at[SALA_GLA_COPIES] = {parts < chunk ? parts : chunk,
                                         parts < chunk ? chunk : parts, last / unit * unit};
    for (int i = 0; i < SALA_GLA_COPIES; i++)
        if (at[i] > (n ? r->marks[n - 1] : r->shared)) r->marks[n++] = at[i];
    return 0;
}

// A new prefix: the first `length` tokens of a prompt. NULL: it is there already, or there is no memory,
// which only means less to reuse.
static sala__prefix *sala__prefix_new(sala *s, const sala__request *r, int32_t length) {
    int32_t pages = length / s->config.dims.block;
    sala__prefix *to = NULL;
    for (sala__prefix *p = s->prefixes; p < s->prefixes + s->plan.snapshots; p++) {
        if (p->length == length && !memcmp(p->tokens, r->tokens, (size_t)length * 4)) return NULL;
        if (!p->length) to = p;
    }
    int32_t *tokens =
        (int32_t *)sala__alloc(&s->env, (size_t)length + (size_t)pages, 4, "a prefix", NULL);
    if (!tokens) return NULL;
    if (!to) sala__prefix_drop(s, to = sala__prefix_oldest(s, 0));
    memcpy(tokens, r->tokens, (size_t)length * 4);
    memcpy(tokens + length, s->sequences[r->slot].pages, (size_t)pages * 4);
    for (int i = 0; i < pages; i++) s->page_cached[tokens[length + i]]++;
    to->tokens = tokens;
    to->length = length;
    to->used = r->id;
    s->prefix_clock++;
    return to;
}

// The prefixes that a chunk of a prompt leaves: its pass will copy the states.
static void sala__prefix_leave(sala *s, const sala__request *r, int start, int count,
                               sala__pass *p) {
    for (int i = 0; i < SALA_GLA_COPIES; i++) {
        int32_t at = r->marks[i];
        sala__prefix *to = at > start && at <= start + count ? sala__prefix_new(s, r, at) : NULL;
        if (!to) continue;
        p->copy_after[p->copies] = at - start;
        p->copy_to[p->copies++] = (int)(to - s->prefixes);
    }
}

// Reuse of histories: a prompt that begins with all that an idle kept sequence holds takes it over, the
// one that holds most.
static void sala__take_history(sala *s, sala__request *r) {
    sala__sequence *best = NULL;
    if (!sala__reuse_is(s, "history") || !sala__prefix_wanted(s, r)) return;
    const sala__prefix *p = sala__prefix_of(s, r);
    for (sala__sequence *q = s->sequences; q < s->sequences + s->plan.slots; q++) {
        int64_t count = (int64_t)q->token_count, most = r->token_count - (q->root < 0);
        if (!q->id || q->request || !count || count > most ||
            (best && count <= (int64_t)best->token_count))
            continue;
        if (!memcmp(q->tokens, r->tokens, (size_t)count * 4)) best = q;
    }
    if (!best || (p && p->length >= best->stored)) return;
    best->request = r->id;
    r->sequence = best->id;
    r->reused = best->stored;
    r->token_count -= (int64_t)best->token_count;
    memmove(r->tokens, r->tokens + best->token_count, (size_t)r->token_count * 4);
}

// ---- admission ----

static int64_t sala__pages_for(const sala *s, int64_t tokens) {
    return (tokens + s->config.dims.block - 1) / s->config.dims.block;
}

static int sala__clear_states(sala *s, int slot, sala_error *err) {
    int code = 0;
    for (int l = 0; l < s->lightning_layers && code == 0; l++) {
        float *state = sala__state_at(s, slot, l);
        if (s->on_gpu)
            code = sala__cuda_fill(&s->gpu.cuda, sala__on_gpu(state), 0, s->plan.state * 4, err);
        else
            memset(state, 0, s->plan.state * 4);
    }
    return code;
}

// Room for so many pages in a sequence's table.
static int sala__page_room(sala *s, sala__sequence *q, int64_t count, sala_error *err) {
    size_t capacity = (size_t)q->page_capacity;
    int code =
        sala__grow(&s->env, (void **)&q->pages, &capacity, (size_t)count, 4, "a page table", err);
    if (code == 0) q->page_capacity = (int32_t)capacity;
    return code;
}

// Pages for a sequence, which has room for them, until it has `count`: free ones, then those that only
// prefixes hold. The caller knows that there are enough.
static int sala__take_pages(sala *s, sala__sequence *q, int64_t count, sala_error *err) {
    while (s->free_page_count < count - q->page_count)
        sala__prefix_drop(s, sala__prefix_oldest(s, 1));
    while (q->page_count < count) q->pages[q->page_count++] = sala__page_take(s);
    if (!s->on_gpu) return 0;
    return sala__put(s, s->page_tables + (q - s->sequences) * s->plan.blocks, q->pages,
                     (size_t)q->page_count * 4, err);
}

// Reserve slot and pages for all that the request can ever need. Returns 1 admitted, 0 must wait,
// or an error.
static int sala__admit(sala *s, sala__request *r, sala_error *err) {
    if (!r->sequence) sala__take_history(s, r);
    int begins = !r->sequence, code = 0;
    sala__sequence *q = begins ? NULL : sala__find_sequence(s, r->sequence);
    for (int i = 0; !q && i < s->plan.slots; i++)
        if (!s->sequences[i].id) q = &s->sequences[i];
    if (!q) return 0;
    sala__prefix *prefix = begins ? sala__prefix_of(s, r) : NULL;
    int64_t had = begins ? 0 : q->stored + (q->root >= 0), idle = s->idle_page_count;
    int64_t count = sala__pages_for(s, had + r->token_count + r->max_tokens),
            need = count - (begins ? 0 : q->page_count);
    for (int i = 0; prefix && i < prefix->length / s->config.dims.block; i++, need--)
        idle -= !s->page_users[sala__prefix_pages(prefix)[i]];
    if (need > s->free_page_count + idle) return 0;
    code = sala__page_room(s, q, count, err);
    if (code < 0) return code;
    int slot = (int)(q - s->sequences);
    if (begins) {
        q->id = r->id; // a sequence is named after the request that began it
        q->stored = q->pending = 0;
        q->root = -1;
        code = prefix ? sala__prefix_adopt(s, r, q, prefix, err) : sala__clear_states(s, slot, err);
    }
    if (code == 0 && (begins || !q->draft.place)) code = sala__draft_forget(s, slot, err);
    if (code == 0) code = sala__take_pages(s, q, count, err);
    if (code < 0) return code;
    q->request = r->id;
    r->slot = slot;
    r->sequence = q->id;
    r->state = SALA__PREFILL;
    r->segment_start = begins ? 0 : q->stored;
    r->admitted = sala__now();
    return 1;
}

// A continued sequence begins its new segment with the pending root; and the penalties of a request
// see what the sequence held before.
static int sala__begin_segment(sala *s, sala__request *r, sala_error *err) {
    sala__sequence *q = &s->sequences[r->slot];
    size_t past = q->token_count;
    for (size_t i = 0; i < past; i++) sala__sampler_note(&r->sampler, q->tokens[i], 0);
    for (int64_t i = 0; i < r->token_count; i++) {
        int code = sala__note_token(s, q, r->tokens[i], err);
        if (code < 0) return code;
    }
    if (q->root < 0) return 0;
    int32_t *tokens =
        (int32_t *)sala__alloc(&s->env, (size_t)r->token_count + 1, 4, "the prompt", err);
    if (!tokens) return SALA_E_MEMORY;
    tokens[0] = q->root;
    memcpy(tokens + 1, r->tokens, (size_t)r->token_count * 4);
    sala__release(&s->env, r->tokens);
    r->tokens = tokens;
    r->token_count++;
    r->took_root = 1;
    q->root = -1;
    return 0;
}

// The page table of a sequence, where the operations read it.
static const int32_t *sala__pages_of(const sala *s, const sala__sequence *q) {
    return s->on_gpu ? s->page_tables + (q - s->sequences) * s->plan.blocks : q->pages;
}

static sala_rows sala__rows(sala *s, int count, int seq_count, int verify) {
    sala_rows rows = {count, seq_count, verify, s->seqs, s->token, s->position, s->seq, s->paths};
    return rows;
}

// Fold a sequence's pending path into its states: before a new segment is prefilled in chunk form.
static int sala__materialise(sala *s, int slot, sala_error *err) {
    sala__sequence *q = &s->sequences[slot];
    if (!q->pending) return 0;
    sala_seq seq = {slot, 0, 0, q->stored, 0, q->pending, sala__pages_of(s, q)};
    sala__step_layout(s, s->plan.node_rows);
    sala_rows rows = sala__rows(s, 0, 1, 1);
    s->seqs[0] = seq;
    const sala_rows *there = sala__publish_rows(s, &rows);
    sala__gpu *g = &s->gpu;
    g->rows = g->seqs = 1;
    if (s->on_gpu) sala__send_step(s);
    for (int l = 0; l < s->lightning_layers; l++) {
        sala_gla_args a = sala__gla_args(s, there, 1, l);
        a.o = NULL;
        sala__op(s, SALA__OP_gla_verify, &a);
    }
    q->pending = 0;
    return s->on_gpu ? sala__gpu_wait(g, err) : 0; // the step block is free again
}

static int sala__admit_waiting(sala *s, sala_error *err) {
    int running = 0;
    for (sala__request *r = s->requests; r; r = r->next) running += r->slot >= 0;
    for (sala__request *r = s->requests; r; r = r->next) {
        if (r->state != SALA__WAITING || r->slot == -2) continue;
        int code = sala__admit(s, r, err);
        if (code < 0) return code;
        if (code == 0) { // in order of arrival: nobody overtakes
            if (!running) return sala__finish(s, r, SALA_FINISH_MEMORY, 1, err);
            return 0;
        }
        running++;
        if ((code = sala__begin_segment(s, r, err)) < 0) return code;
        if ((code = sala__materialise(s, r->slot, err)) < 0) return code;
    }
    return 0;
}

// ---- prefill ----

static void sala__row(sala *s, int r, int seq, int32_t token, int32_t position) {
    s->token[r] = token;
    s->position[r] = position;
    s->seq[r] = seq;
}

// Bring the GPU's counts up to date: all of them once, then those of the tokens chosen since; and the
// biases.
static void sala__send_counts(sala *s, sala__request *r) {
    const sala__sampler *from = &r->sampler;
    const sala__sequence *q = &s->sequences[r->slot];
    size_t vocab = (size_t)from->vocab, at = (size_t)r->slot * vocab;
    sala__cuda *c = &s->gpu.cuda;
    if (from->counts && !r->counts_sent)
        sala__cuda_upload(c, sala__on_gpu(s->counts + at), from->counts, vocab * 4, &s->gpu.error);
    for (size_t i = (size_t)r->counts_sent; from->counts && i && i < q->token_count; i++)
        sala__cuda_upload(c, sala__on_gpu(s->counts + at + q->tokens[i]),
                          from->counts + q->tokens[i], 4, &s->gpu.error);
    if (from->biases && !r->counts_sent)
        sala__cuda_upload(c, sala__on_gpu(s->biases + at), from->biases, vocab * 4, &s->gpu.error);
    r->counts_sent = (int64_t)q->token_count;
}

// Tell the GPU how to choose the token behind a row, which stands `ahead` nodes below its root.
static void sala__set_sampling(sala *s, const sala__request *r, int row, int64_t position,
                               int ahead) {
    const sala__sampler *from = &r->sampler;
    int64_t index = r->chosen + ahead; // of the output
    sala_sampling to = {from->temperature,
                        from->top_p,
                        from->min_p_log,
                        from->repetition,
                        from->presence,
                        from->frequency,
                        from->top_k,
                        r->slot,
                        from->counts != NULL,
                        from->biases != NULL,
                        ahead,
                        index < r->force_count ? r->force[index] : -1,
                        sala_random(from->seed, (uint64_t)position)};
    s->sampling[row] = to;
}

// Choose the token that follows a row of the pass, which stands `ahead` nodes below its root; a GPU
// has done so. `logits` of that row: on a GPU only read where the request wants log-probabilities.
static void sala__sample_row(sala *s, const sala__request *r, int row, int ahead,
                             const float *logits, int thread, sala__choice *c) {
    int32_t path[SALA_MAX_PATH] = {0};
    int forced = r->chosen + ahead < r->force_count;
    c->top_count = 0;
    c->logprob = 0;
    if (!s->on_gpu) {
        char *scratch =
            s->sample_scratch + (size_t)thread * sala__sampler_scratch(s->config.dims.vocab);
        for (int i = 0; i < ahead; i++) path[i] = s->token[s->paths[row * SALA_MAX_PATH + 1 + i]];
        c->token = sala__sample(&r->sampler, logits, (int64_t)s->position[row] + 1, path, ahead,
                                scratch, &c->logprob, c->top, &c->top_count);
    }
    if (c->token < 0) return;
    if (forced) c->token = r->force[r->chosen + ahead];
    if (r->logprobs && (forced || s->on_gpu))
        sala__sampler_report(&r->sampler, logits,
                             logits[sala__sampler_argmax(logits, s->config.dims.vocab)], c->token,
                             &c->logprob, c->top, &c->top_count);
}

// The rows of a pass as an event.
static int sala__rows_event(sala *s, const sala__request *r, const sala__pass *p, int position,
                            int row, int count, sala_error *err) {
    sala_event *e = sala__add_event(s, r, SALA_EVENT_ROWS, err);
    if (!e) return SALA_E_MEMORY;
    e->sequence = r->sequence;
    e->first_position = position;
    e->row_count = count;
    if (p->rows.verify || (r->want_rows & SALA_ROWS_PROMPT))
        e->logits = p->logits + (size_t)(row - p->logits_first) * (size_t)s->config.dims.vocab;
    e->features = p->features ? (const uint16_t *)(const void *)s->features : NULL;
    e->hidden = p->hidden ? p->hidden + (size_t)row * p->hidden_r : NULL;
    e->blocks = p->blocks ? p->blocks + (size_t)row * p->blocks_r : NULL;
    return 0;
}

// What a chunk shows of its rows.
static void sala__prefill_shows(sala *s, int count, sala__pass *p) {
    const sala_dims *m = &s->config.dims;
    if (!s->prefill_hidden) return;
    p->hidden = s->prefill_hidden;
    p->hidden_l = (size_t)count * (size_t)m->hidden;
    p->hidden_r = (size_t)m->hidden;
    p->blocks = s->prefill_blocks;
    p->blocks_r = (size_t)m->kv_heads * (size_t)m->top_k;
    p->blocks_l = (size_t)count * p->blocks_r;
}

// One chunk of one prompt. It ends with the prompt or at an absolute multiple of 64, whatever the
// chunk size, so that tiles are cut at the same places (promise 2). Returns the tokens done, or an
// error.
static int sala__prefill_chunk(sala *s, sala__request *r, int budget, sala_error *err) {
    const sala_dims *m = &s->config.dims;
    sala__sequence *q = &s->sequences[r->slot];
    int shows = (r->want_rows & SALA_ROWS_PROMPT) != 0, code = 0;
    if (r->prefilled == r->shared) code = sala__prefix_begin(s, r, err);
    if (code < 0) return code;
    if (shows && budget > s->plan.logits_rows) budget = s->plan.logits_rows;
    int64_t left = r->token_count - r->prefilled;
    int start = q->stored, count = (start + budget) / SALA_TILE * SALA_TILE - start;
    if (count > left) count = (int)left;
    int last = count == left;
    sala__step_layout(s, s->plan.rows);
    for (int i = 0; i < count; i++) sala__row(s, i, 0, r->tokens[r->prefilled + i], start + i);
    sala_seq seq = {r->slot, 0, count, start + count, r->segment_start, 0, sala__pages_of(s, q)};
    s->seqs[0] = seq;
    sala__pass p;
    memset(&p, 0, sizeof p);
    p.rows = sala__rows(s, count, 1, 0);
    p.logits = s->prefill_logits;
    p.logits_rows = shows ? count : last;
    p.logits_first = shows ? 0 : count - 1;
    p.show_logits = shows || (last && r->logprobs);
    int32_t end = start + (int32_t)left;
    p.captures = sala__draft_wants(s, r->slot, start, count, end);
    p.features = (r->want_rows & SALA_ROWS_FEATURES) != 0;
    if (shows) sala__prefill_shows(s, count, &p);
    sala__prefix_leave(s, r, start, count, &p);
    if (s->on_gpu && last) sala__send_counts(s, r);
    if (s->on_gpu && last) sala__set_sampling(s, r, 0, start + count, 0);
    if (s->on_gpu && !last) s->sampling[0].slot = -1;
    if ((code = sala__run_pass(s, &p, err)) < 0) return code;
    if (r->prefilled == 0) code = sala__note_phase(s, q, q->stored, 0, err);
    if (code < 0) return code;
    q->stored += count;
    r->prefilled += count;
    if ((code = sala__draft_prefill(s, r->slot, start, count, end, err)) < 0) return code;
    sala_event *e = sala__add_event(s, r, SALA_EVENT_PREFILL, err);
    if (!e) return SALA_E_MEMORY;
    e->done = r->prefilled;
    e->total = r->token_count;
    if (shows || p.features) code = sala__rows_event(s, r, &p, start, 0, count, err);
    if (code == 0 && last) {
        sala__choice c;
        r->state = SALA__DECODE;
        const float *logits = p.logits + (size_t)(p.logits_rows - 1) * (size_t)m->vocab;
        c.token = s->result[0];
        sala__sample_row(s, r, count - 1, 0, logits, 0, &c);
        code = sala__take_token(s, r, &c, err);
    }
    return code < 0 ? code : count;
}

static int sala__prefill(sala *s, sala_error *err) {
    int budget = s->options.chunk;
    for (sala__request *r = s->requests; r; r = r->next)
        if (r->state == SALA__DECODE && r->slot >= 0 && budget > 512) budget = 512;
    for (sala__request *r = s->requests; r && budget >= SALA_TILE; r = r->next) {
        while (r->state == SALA__PREFILL && r->slot >= 0 && budget >= SALA_TILE) {
            int done = sala__prefill_chunk(s, r, budget, err);
            if (done < 0) return done;
            budget -= sala__round_up(done, SALA_TILE);
            if (r->state == SALA__DECODE && budget > 512) budget = 512; // it generates from now on
            if (r->want_rows & (SALA_ROWS_PROMPT | SALA_ROWS_FEATURES))
                return 0; // its event points into what this pass shows
        }
    }
    return 0;
}

// ---- verify ----

// Who generates, and how deep their trees may be.
static int sala__list_active(sala *s, sala__request *active[SALA_MAX_ROWS]) {
    int n = 0;
    for (sala__request *r = s->requests; r && n < s->plan.slots; r = r->next) {
        if (r->state != SALA__DECODE || r->slot < 0) continue;
        const sala__sequence *q = &s->sequences[r->slot];
        int64_t left = r->max_tokens - r->chosen, // a path of d nodes below the root gives d + 1
            room = (int64_t)q->page_count * s->config.dims.block - q->stored;
        if (left > room) left = room;
        r->spec.deepest = (int32_t)(left < SALA_MAX_PATH ? left : SALA_MAX_PATH) - 1;
        active[n++] = r;
    }
    return n;
}

// A tree that is none, or is too large, would write over others' memory: it must never come here.
static int sala__check_tree(const sala *s, const sala__request *r, sala_error *err) {
    const sala_tree *t = &r->spec.tree;
    int ok = t->count >= 1 && t->count <= SALA_MAX_NODES && t->parent[0] == -1 &&
             t->depth[0] == 0 && t->token[0] == s->sequences[r->slot].root;
    for (int n = 1; ok && n < t->count; n++) {
        int parent = t->parent[n];
        ok = parent >= 0 && parent < n && t->depth[n] == t->depth[parent] + 1 &&
             t->depth[n] <= r->spec.deepest && t->token[n] >= 0 &&
             t->token[n] < s->config.dims.vocab;
        for (int other = 1; ok && other < n; other++)
            ok = t->parent[other] != parent || t->token[other] != t->token[n];
    }
    if (ok) return 0;
    return sala__fail(err, SALA_E_STATE, "the draft of request %lld is no tree: this is a bug",
                      (long long)r->id);
}

// The order of a tree's rows: depth first, of siblings the one below which most states must wait last.
// Returns how many states wait at once (see sala_gla_verify): log2 of the leaves at most.
static int sala__tree_rows(const sala_tree *t, int32_t row[SALA_MAX_NODES]) {
    int size[SALA_MAX_NODES], wait[SALA_MAX_NODES], second[SALA_MAX_NODES], last[SALA_MAX_NODES],
        next[SALA_MAX_NODES];
    wait[0] = 0; // also of a tree without nodes, which nobody makes
    for (int n = 0; n < t->count; n++) {
        size[n] = 1;
        wait[n] = second[n] = last[n] = -1; // of its children the two largest, and the first's node
    }
    for (int n = t->count - 1; n >= 0; n--) {
        wait[n] = sala__max(sala__max(wait[n], second[n] + 1), 0);
        int up = t->parent[n];
        if (up < 0) break;
        size[up] += size[n];
        if (wait[n] > wait[up]) {
            second[up] = wait[up];
            wait[up] = wait[n];
            last[up] = n;
        } else if (wait[n] > second[up]) {
            second[up] = wait[n];
        }
    }
    row[0] = 0;
    next[0] = 1;
    for (int n = 1; n < t->count; n++) {
        int up = t->parent[n];
        if (last[up] == n) {
            row[n] = row[up] + size[up] - size[n];
        } else {
            row[n] = next[up];
            next[up] += size[n];
        }
        next[n] = row[n] + 1;
    }
    return wait[0];
}

// What each row does with the states that wait (see sala_gla_args): a stack, as rows come depth first.
static void sala__tree_forks(const sala_tree *t, const int32_t *row, int32_t *fork) {
    int up[SALA_MAX_NODES] = {0}, last[SALA_MAX_NODES] = {0}, wait = 0;
    for (int n = 1; n < t->count; n++) {
        up[row[n]] = row[t->parent[n]];
        last[up[row[n]]] = sala__max(last[up[row[n]]], row[n]);
    }
    for (int r = 0; r < t->count; r++) {
        fork[r] = 0;
        if (r > 0 && up[r] != r - 1) {
            fork[r] = wait;
            wait -= last[up[r]] == r;
        }
        if (last[r] > r + 1) fork[r] |= ++wait << 4;
    }
}

// The rows of request i's tree, from `first` on.
static void sala__lay_tree(sala *s, sala__request *r, int i, int first) {
    const sala_tree *t = &r->spec.tree;
    const sala__sequence *q = &s->sequences[r->slot];
    sala_seq seq = {r->slot, first, t->count, q->stored, 0, q->pending, sala__pages_of(s, q)};
    s->seqs[i] = seq;
    sala__tree_forks(t, r->spec.row, s->forks + first);
    if (s->on_gpu) sala__send_counts(s, r);
    for (int n = 0; n < t->count; n++) {
        int row = first + r->spec.row[n], depth = t->depth[n];
        int32_t *path = s->paths + row * SALA_MAX_PATH;
        sala__row(s, row, i, t->token[n], q->stored + depth);
        if (n) // parents come first
            memcpy(path, s->paths + (first + r->spec.row[t->parent[n]]) * SALA_MAX_PATH,
                   (size_t)depth * 4);
        path[depth] = row;
        if (s->on_gpu) sala__set_sampling(s, r, row, (int64_t)q->stored + depth + 1, depth);
    }
}

// The pass of all trees. p: zeros.
static int sala__lay_trees(sala *s, sala__request **active, int count, sala__pass *p,
                           sala_error *err) {
    const sala_dims *m = &s->config.dims;
    int rows = 0, first = 0, wait = 0;
    for (int i = 0; i < count; i++) {
        int code = sala__check_tree(s, active[i], err);
        if (code < 0) return code;
        rows += active[i]->spec.tree.count;
        wait = sala__max(wait, sala__tree_rows(&active[i]->spec.tree, active[i]->spec.row));
    }
    if (rows > s->plan.node_rows)
        return sala__fail(err, SALA_E_STATE, "drafts of %d nodes, but there is room for %d", rows,
                          s->plan.node_rows);
    p->bucket = s->on_gpu ? sala__bucket(rows, s->plan.node_rows) : rows;
    sala__step_layout(s, p->bucket);
    for (int i = 0; i < count; first += active[i++]->spec.tree.count)
        sala__lay_tree(s, active[i], i, first);
    s->gpu.tree_slots = sala__round_up(wait, 2);
    p->requests = active;
    p->rows = sala__rows(s, rows, count, 1);
    p->logits = s->verify_logits;
    p->logits_rows = rows;
    if (!s->verify_hidden) return 0;
    p->hidden = s->verify_hidden;
    p->hidden_l = (size_t)m->hidden;
    p->hidden_r = (size_t)(m->layers + 2) * (size_t)m->hidden;
    p->blocks = s->verify_blocks;
    p->blocks_l = (size_t)m->kv_heads * (size_t)m->top_k;
    p->blocks_r = (size_t)s->sparse_layers * p->blocks_l;
    return 0;
}

// Choose along a tree: the token behind the root, the one behind its child that has that token, ...
static void sala__walk_item(void *context, int64_t i, int thread) {
    const sala__walk *walk = (const sala__walk *)context;
    const sala__pass *p = walk->pass;
    const sala_seq *seq = &p->rows.seqs[i];
    size_t vocab = (size_t)walk->s->config.dims.vocab;
    int row = seq->first_row;
    for (int ahead = 0; row >= 0; ahead++) {
        sala__sample_row(walk->s, p->requests[i], row, ahead, p->logits + (size_t)row * vocab,
                         thread, &walk->s->choices[row]);
        p->chosen[row] = walk->s->choices[row].token;
        row = sala_child_row(&p->rows, seq, row, p->chosen[row]);
    }
}

static int sala__shows_logits(const sala__request *r) {
    return r->logprobs > 0 || (r->want_rows & SALA_ROWS_GENERATED);
}

// The path that was accepted of tree i, where the host reads it. Returns its length.
static int sala__path_of(const sala *s, const sala__pass *p, int i, const int32_t **rows) {
    *rows = s->result + 2 * p->bucket + i * SALA_MAX_PATH;
    return s->result[p->bucket + i];
}

// What a GPU chose along the paths, and their logits where they are to be seen.
static int sala__fetch_choices(sala *s, const sala__pass *p, sala_error *err) {
    sala__gpu *g = &s->gpu;
    size_t vocab = (size_t)s->config.dims.vocab;
    const int32_t *rows;
    int shows = 0, code = 0;
    for (int i = 0; i < p->rows.seq_count; i++) {
        if (!sala__shows_logits(p->requests[i])) continue;
        int count = sala__path_of(s, p, i, &rows);
        for (int j = 0; j < count && code == 0; j++) {
            size_t at = (size_t)rows[j] * vocab;
            code = sala__cuda_download(&g->cuda, p->logits + at, sala__on_gpu(s->logits + at),
                                       vocab * 4, err);
        }
        shows = 1;
    }
    if (shows && code == 0) code = sala__cuda_wait(&g->cuda, err);
    for (int i = 0; i < p->rows.seq_count && code == 0; i++) {
        int count = sala__path_of(s, p, i, &rows);
        for (int j = 0; j < count; j++) {
            sala__choice *c = &s->choices[rows[j]];
            c->token = s->result[rows[j]];
            sala__sample_row(s, p->requests[i], rows[j], j, p->logits + (size_t)rows[j] * vocab, 0,
                             c);
        }
    }
    return code;
}

// What one verify read, for the statistics: weights and states once, K/V of what attention can see of
// each sequence.
static int64_t sala__verify_bytes(const sala *s, int count) {
    const sala_dims *m = &s->config.dims;
    int64_t bytes = s->weights.decode_bytes, act = sizeof(sala_act);
    for (int i = 0; i < count; i++) {
        int64_t n = (int64_t)s->seqs[i].stored + 1;
        int64_t seen = n < m->dense_len ? n : (int64_t)m->top_k * m->block;
        if (seen > n) seen = n;
        if (n >= m->dense_len)
            seen += (sala_tier_rows(m, 1, (int32_t)n) + sala_tier_rows(m, 2, (int32_t)n)) / 2;
        bytes +=
            seen * 2 * act * m->kv_heads * m->head_dim * s->sparse_layers + sala__state_traffic(s);
    }
    return bytes;
}

// A tree as an event: `path` [count] are the rows that were accepted.
static int sala__tree_event(sala *s, const sala__request *r, const int32_t *path, int count,
                            sala_error *err) {
    const sala_tree *t = &r->spec.tree;
    size_t n = (size_t)t->count, at = s->event_nodes_count;
    sala_event *e = sala__add_event(s, r, SALA_EVENT_TREE, err);
    if (!e || sala__grow(&s->env, (void **)&s->event_nodes, &s->event_nodes_capacity, at + 4 * n, 4,
                         "a tree", err) < 0)
        return SALA_E_MEMORY;
    e->sequence = r->sequence;
    e->position = s->position[path[0]];
    e->token = s->choices[path[count - 1]].token;
    e->source = r->spec.source;
    e->paused = r->spec.paused;
    e->node_count = t->count;
    int32_t *to = s->event_nodes + at;
    memcpy(to, t->token, n * 4);
    memcpy(to + n, t->parent, n * 4);
    for (size_t i = 0; i < n; i++)
        to[2 * n + i] = t->depth[i] < count && path[t->depth[i]] == path[0] + r->spec.row[i];
    memcpy(to + 3 * n, t->score, n * 4);
    s->event_nodes_count += 4 * n;
    return 0;
}

// Statistics of the node at depth `depth` of the path, whose choice is the output's next token; `path`
// ends with it: `last`.
static void sala__count_node(sala__request *r, int depth, int last, int node, int32_t token) {
    const sala_tree *t = &r->spec.tree;
    int source = r->spec.source, below = 0;
    for (int n = 1; n < t->count; n++)
        below |= t->parent[n] >= 0 && r->spec.row[t->parent[n]] == node;
    r->counted.offered[source][depth]++;
    r->counted.accepted[source][depth]++;
    r->counted.verify_tokens[source] += token >= 0;
    if (last && below) r->counted.offered[source][depth + 1]++;
}

// Hand on what a verify gave request i, token by token until one ends it. Nodes that were accepted
// beyond that never were: nothing reads the cache beyond `stored` or the path beyond `pending`.
static int sala__take_path(sala *s, const sala__pass *p, int i, sala_error *err) {
    sala__request *r = p->requests[i];
    sala__sequence *q = &s->sequences[r->slot];
    const int32_t *path;
    int count = sala__path_of(s, p, i, &path), code = 0;
    if (r->want_trees) code = sala__tree_event(s, r, path, count, err);
    if (code == 0 && !q->phases[q->phase_count - 1].verified)
        code = sala__note_phase(s, q, q->stored, 1, err);
    r->counted.verifies[r->spec.source]++;
    for (int j = 0; j < count && code == 0 && r->slot >= 0; j++) {
        const sala__choice *c = &s->choices[path[j]];
        q->stored++;
        q->pending = j + 1;
        q->root = -1;
        if (r->want_rows & SALA_ROWS_GENERATED)
            code = sala__rows_event(s, r, p, s->position[path[j]], path[j], 1, err);
        sala__count_node(r, j, j == count - 1, path[j] - path[0], c->token);
        if (code == 0) code = sala__take_token(s, r, c, err);
    }
    return code;
}

static int sala__verify(sala *s, sala_error *err) {
    sala__request *active[SALA_MAX_ROWS];
    sala__pass p;
    int n = sala__list_active(s, active);
    if (!n) return 0;
    memset(&p, 0, sizeof p);
    double start = sala__now();
    int code = 0;
    for (int i = 0; i < n && code == 0; i++) code = sala__draft_settle(s, active[i]->slot, err);
    if (code == 0) code = sala__plan_trees(s, active, n, s->plan.node_rows, err);
    if (code == 0 && s->plant) s->plant(s, active, n, s->plan.node_rows);
    double planned = sala__now();
    if (code == 0) code = sala__lay_trees(s, active, n, &p, err);
    if (code == 0) code = sala__run_pass(s, &p, err);
    if (code == 0 && s->on_gpu) code = sala__fetch_choices(s, &p, err);
    if (code < 0) return code;
    double done = sala__now();
    int64_t bytes = sala__verify_bytes(s, n);
    sala__plan_learn(s, p.rows.count, done - planned);
    for (int i = 0; i < n && code == 0; i++) {
        active[i]->decode_bytes += bytes;
        active[i]->counted.draft_seconds += planned - start;
        active[i]->counted.verify_seconds += done - planned;
        code = sala__take_path(s, &p, i, err);
    }
    return code;
}

// ---- one turn ----

static int sala__cancel_marked(sala *s, sala_error *err) {
    for (sala__request *r = s->requests; r; r = r->next) {
        if (!r->cancelled || r->slot == -2) continue;
        int code = sala__finish(s, r, SALA_FINISH_CANCELLED, 1, err);
        if (code < 0) return code;
    }
    return 0;
}

static void sala__sweep(sala *s) { // drop the requests that finished
    for (sala__request **at = &s->requests; *at;) {
        sala__request *r = *at;
        if (r->slot == -2) {
            *at = r->next;
            sala__drop_request(s, r);
        } else {
            at = &r->next;
        }
    }
}

SALA_API int sala_step(sala *s, sala_error *err) {
    sala__clear(err);
    if (s->event_taken < s->event_count)
        return sala__fail(
            err, SALA_E_STATE,
            "%zu events wait: call sala_next_event until it returns 0, then sala_step",
            s->event_count - s->event_taken);
    if (s->failed) return sala__failed(err);
    s->event_count = s->event_taken = s->event_top_count = s->event_nodes_count = 0;
    s->event_text.size = 0;
    if (!s->requests) return 0;
    int code = s->on_gpu ? sala__cuda_enter(&s->gpu.cuda, err) : 0;
    if (code < 0) return code;
    sala__clear(&s->gpu.error);
    code = sala__cancel_marked(s, err);
    if (code == 0) code = sala__admit_waiting(s, err);
    if (code == 0) code = sala__prefill(s, err);
    if (code == 0) code = sala__verify(s, err);
    if (s->on_gpu) sala__cuda_leave(&s->gpu.cuda);
    if (code == 0) sala__sweep(s); // after a failure copies from their memory may be under way
    s->failed = code < 0; // a step is not undone half-way: what it left behind must not be used
    return code < 0 ? code : 1;
}

// ---- text, for callers ----

static int sala__need_tokenizer(const sala *s, sala_error *err) {
    sala__clear(err);
    if (s->has_tokenizer) return 0;
    return sala__fail(err, SALA_E_STATE,
                      "this model has no tokenizer.json: it takes and gives token ids only");
}

SALA_API int64_t sala_tokenize(sala *s, const char *text, size_t bytes, int flags, int32_t **tokens,
                               sala_error *err) {
    *tokens = NULL;
    int code = sala__need_tokenizer(s, err);
    return code < 0 ? code : sala__encode(&s->tokenizer, text, bytes, flags, tokens, err);
}

SALA_API char *sala_detokenize(sala *s, const int32_t *tokens, int64_t count, int special,
                               size_t *bytes, sala_error *err) {
    if (sala__need_tokenizer(s, err) < 0) return NULL;
    return sala__decode(&s->tokenizer, tokens, count, special, bytes, err);
}

SALA_API int64_t sala_chat_turn(sala *s, const char *role, const char *content, size_t bytes,
                                int first, int reply, int32_t **tokens, sala_error *err) {
    *tokens = NULL;
    int code = sala__need_tokenizer(s, err);
    return code < 0
               ? code
               : sala__chat_turn(&s->tokenizer, role, content, bytes, first, reply, tokens, err);
}

struct sala_text_stream {
    sala__env env;
    sala__stream stream;
    sala__string text;
};

SALA_API sala_text_stream *sala_stream_open(sala *s, int special, sala_error *err) {
    if (sala__need_tokenizer(s, err) < 0) return NULL;
    sala_text_stream *t =
        (sala_text_stream *)sala__alloc(&s->env, 1, sizeof *t, "a text stream", err);
    if (!t) return NULL;
    t->env = s->env;
    sala__stream_init(&s->tokenizer, special, &t->stream);
    return t;
}

SALA_API const char *sala_stream_next(sala_text_stream *t, int32_t token, size_t *bytes) {
    t->text.size = 0;
    int code = token < 0 ? sala__stream_flush(&t->stream, &t->text, NULL)
                         : sala__stream_push(&t->stream, token, &t->text, NULL);
    if (bytes) *bytes = code < 0 ? 0 : t->text.size;
    return code < 0 ? NULL : t->text.size ? t->text.data : "";
}

SALA_API void sala_stream_close(sala_text_stream *t) {
    if (!t) return;
    sala__release(&t->env, t->text.data);
    sala__env env = t->env;
    sala__release(&env, t);
}

SALA_API void sala_free(sala *s, void *pointer) {
    sala__release(&s->env, pointer);
}

SALA_API int sala_check_weights(sala *s, sala_error *err) {
    sala__clear(err);
    if (s->on_gpu && s->options.synthetic) return 0; // never on the host, and a hash makes no NaN
    int code = sala__weights_check(&s->env, &s->config, &s->weights,
                                   s->options.synthetic ? NULL : &s->checkpoint, err);
    if (code < 0 || !s->has_draft) return code;
    return sala__weights_check(&s->env, &s->draft_config, &s->draft_weights,
                               s->options.synthetic ? NULL : &s->draft_checkpoint, err);
}

/* -----------------------------------------------------------------------------------------------
   [13] SESSIONS: a sequence to a file and back

   Everything that the coming tokens depend on, as it lies in memory; nothing is computed, so that
   saving changes nothing. Numbers are little-endian; act is a BF16; a list is its length, int64, and
   so many elements.

      offset bytes
           0     8  "SALASES" and a zero
           8     4  version, see SALA__SESSION_VERSION
          12     4  zero
          16     8  P: bytes of what follows, without checksums
          24     -  blocks of 2^19 bytes, the last one shorter: a checksum of 8 bytes, then bytes of P
   P:      0    96  sala__session_head
                 -  list of int32: the history; list of sala__phase
                 -  if has_request: what sala__session_course moves; the fields of sala_request in
                    the order of sala__request_table; lists: forced tokens, guess and stop tokens (int32), biases
                    (sala_bias), text held back, then stop strings, each a list with its zero
                 -  of each sparse layer k, v, tier 1, tier 2: the rows that exist, page by page
                    [kv_heads, rows of the page, head_dim] act
                 -  of each lightning layer the state [lin_heads, lin_dim, lin_dim] f32, then k and v
                    of the pending path [pending, lin_kv_heads, lin_dim] act
                 -  if draft: k, v of the draft head [pages, kv_heads, rows of the page, head_dim] act,
                    features that wait [tokens, 3 hidden] act

   A checksum is of the one before it (the first: of the bytes before it) and the block's own sum, so
   that threads can sum blocks, and whatever is changed, missing or from another file does not fit.
   -------------------------------------------------------------------------------------------- */

// To be raised when the layout changes, or a number that a pass computes.
#define SALA__SESSION_VERSION 2
#ifndef SALA__SESSION_BLOCK // tests want many
#define SALA__SESSION_BLOCK ((size_t)1 << 19)
#endif
#define SALA__SESSION_START 24 // where the blocks begin
#define SALA__SESSION_WINDOW 8 // blocks, at most, that are read at once; locking 1 MiB takes 0.7 ms

typedef struct sala__session_head {
    uint64_t model, draft; // fingerprints; draft 0: the head knows nothing of the sequence
    char device[32];       // what computed it
    int32_t act_bytes, w4a4, dense_len, has_request;
    int32_t stored, pending, draft_filled, draft_seen; // of the sequence
    int64_t zero[2];
} sala__session_head;

typedef struct sala__session {
    sala *s;
    const char *path;
    sala_error *err;
    int code;    // of the first failure, behind which nothing happens
    int reading; // or writing; without memory, nothing is written, only measured
    int fd;
    sala__cpu pool;           // threads where the engine is on a GPU and has none
    unsigned char *memory;    // a window, or two page-locked ones where it is on a GPU
    unsigned char *window;    // the one at hand
    int64_t from, whole;      // where the window is in the file; bytes of the file
    int blocks, count, index; // windows hold so many; this one does; the block at hand
    size_t at, size;          // the next byte of it; where it ends
    uint64_t sum;             // of the block before
    int64_t total, left;      // P, and how much of it is still to come
    uint64_t sums[SALA__SESSION_WINDOW];
    int errors[SALA__SESSION_WINDOW];
} sala__session;

// ---- the file ----

static void sala__checksum_step(uint64_t lane[4], const void *bytes) { // 32 of them
    uint64_t word[4];
    memcpy(word, bytes, 32);
    for (int i = 0; i < 4; i++) {
        lane[i] = (lane[i] ^ word[i]) * UINT64_C(0x9E3779B97F4A7C15);
        lane[i] ^= lane[i] >> 29;
    }
}

// 64 bits of these bytes, and of the seed. Every step can be undone, so a change within one word always
// changes the sum; four lanes, since a product takes longer than a load.
static uint64_t sala__checksum(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    unsigned char tail[32] = {0};
    uint64_t lane[4] = {seed, seed + 1, seed + 2, seed + 3}, sum = bytes;
    for (; (size_t)(p - (const unsigned char *)data) + 32 <= bytes; p += 32)
        sala__checksum_step(lane, p);
    if (bytes % 32) memcpy(tail, p, bytes % 32);
    sala__checksum_step(lane, tail);
    for (int i = 0; i < 4; i++) {
        sum = (sum ^ lane[i]) * UINT64_C(0x9E3779B97F4A7C15);
        sum ^= sum >> 32;
    }
    return sum;
}

// The first failure counts: the path, then what is wrong with it.
static void sala__session_fail(sala__session *f, int code, const char *format, ...)
    SALA__PRINTF(3, 4);
static void sala__session_fail(sala__session *f, int code, const char *format, ...) {
    char text[600];
    va_list args;
    if (f->code) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    f->code = sala__fail(f->err, code, "%.400s: %s", f->path, text);
}

// A file whose checksums are right and whose numbers are not was made to deceive.
static void sala__session_must(sala__session *f, int holds, const char *what) {
    if (!holds) sala__session_fail(f, SALA_E_FILE, "a damaged session: %s cannot be", what);
}

// These bytes to or from a place of the file. Returns 0, an errno, or -1 where the file ends.
static int sala__session_move(const sala__session *f, void *bytes, size_t count, int64_t place) {
    for (char *p = (char *)bytes; count;) {
        ssize_t n = f->reading ? pread(f->fd, p, count, place) : pwrite(f->fd, p, count, place);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n ? errno : -1;
        p += n;
        place += n;
        count -= (size_t)n;
    }
    return 0;
}

static void sala__session_moved(sala__session *f, int error) {
    if (error < 0) sala__session_fail(f, SALA_E_FILE, "it became shorter while it was read");
    if (error > 0)
        sala__session_fail(f, SALA_E_FILE, "cannot %s: %s", f->reading ? "read" : "write",
                           strerror(error));
}

static int64_t sala__session_whole(int64_t total) { // bytes of a file of so many
    const int64_t payload = (int64_t)SALA__SESSION_BLOCK - 8;
    return SALA__SESSION_START + total + (total + payload - 1) / payload * 8;
}

static size_t sala__session_size(const sala__session *f, int64_t i) { // of a block of the window
    int64_t rest = f->whole - f->from - i * (int64_t)SALA__SESSION_BLOCK;
    return rest < (int64_t)SALA__SESSION_BLOCK ? (size_t)rest : SALA__SESSION_BLOCK;
}

// What threads do: read a block, and sum it.
static void sala__session_item(void *context, int64_t i, int thread) {
    sala__session *f = (sala__session *)context;
    unsigned char *block = f->window + (size_t)i * SALA__SESSION_BLOCK;
    size_t size = sala__session_size(f, i);
    int64_t place = f->from + i * (int64_t)SALA__SESSION_BLOCK;
    (void)thread;
    f->errors[i] = f->reading ? sala__session_move(f, block, size, place) : 0;
    if (!f->errors[i]) f->sums[i] = sala__checksum(0, block + 8, size - 8);
}

// Read a window and check it, while the device still copies from the other one; or write this one.
static void sala__session_window(sala__session *f) {
    sala *s = f->s;
    if (s->on_gpu && !f->reading) f->code = sala__cuda_wait(&s->gpu.cuda, f->err);
    if (f->code < 0) return;
    sala__parallel(s->on_gpu ? &f->pool : &s->cpu, f->count, sala__session_item, f);
    if (s->on_gpu && f->reading) f->code = sala__cuda_wait(&s->gpu.cuda, f->err);
    for (int i = 0; i < f->count && f->code == 0; i++) {
        unsigned char *block = f->window + (size_t)i * SALA__SESSION_BLOCK;
        int64_t place = f->from + i * (int64_t)SALA__SESSION_BLOCK;
        size_t size = sala__session_size(f, i);
        uint64_t sum = f->sum = sala__checksum(f->sum, &f->sums[i], 8);
        memcpy(f->reading ? (void *)&sum : block, f->reading ? block : (void *)&sum, 8);
        if (!f->reading) f->errors[i] = sala__session_move(f, block, size, place);
        sala__session_moved(f, f->errors[i]);
        if (sum != f->sum)
            sala__session_fail(f, SALA_E_FILE, "a damaged session: a checksum is wrong");
        sala__progress(&s->env, f->reading ? "loading" : "saving",
                       ((double)place + (double)size) / (double)f->whole);
    }
}

// The block is full, or read to its end: on to the next one.
static void sala__session_turn(sala__session *f) {
    if (++f->index == f->count) {
        if (!f->reading) sala__session_window(f);
        f->from += f->count * (int64_t)SALA__SESSION_BLOCK;
        int64_t rest =
            (f->whole - f->from + (int64_t)SALA__SESSION_BLOCK - 1) / (int64_t)SALA__SESSION_BLOCK;
        f->index = 0;
        f->count = rest < f->blocks ? (int)rest : f->blocks;
        sala__session_must(f, rest > 0, "its end");
        if (f->s->on_gpu) // what is copied stays whole
            f->window = f->window == f->memory ? f->memory + (size_t)f->blocks * SALA__SESSION_BLOCK
                                               : f->memory;
        if (f->reading && f->code == 0) sala__session_window(f);
    }
    f->at = 8;
    f->size = f->code < 0 ? f->at : sala__session_size(f, f->index);
}

// The next bytes of P: `p` to the file, or from it to `p`. `there`: p lies where operations run.
static void sala__session_io(sala__session *f, const void *p, size_t bytes, int there) {
    sala__cuda *c = &f->s->gpu.cuda;
    char *at = (char *)(uintptr_t)p;
    if (!f->memory) f->total += (int64_t)bytes;
    while (f->memory && bytes && f->code == 0) {
        size_t n = f->size - f->at < bytes ? f->size - f->at : bytes;
        if (n == 0) {
            sala__session_turn(f);
            continue;
        }
        unsigned char *b = f->window + (size_t)f->index * SALA__SESSION_BLOCK + f->at;
        if (!there || !f->s->on_gpu)
            memcpy(f->reading ? (void *)at : b, f->reading ? (void *)b : at, n);
        else if (f->reading)
            f->code = sala__cuda_upload(c, sala__on_gpu(at), b, n, f->err);
        else
            f->code = sala__cuda_download(c, b, sala__on_gpu(at), n, f->err);
        f->at += n;
        at += n;
        bytes -= n;
        f->left -= (int64_t)n;
    }
}

// A list. Reading, it is fresh memory, no larger than what is left of the file; NULL on error.
static void *sala__session_list(sala__session *f, const void *list, int64_t *count, size_t size) {
    sala__session_io(f, count, sizeof *count, 0);
    if (f->reading) {
        list = NULL;
        sala__session_must(f, *count >= 0 && *count <= f->left / (int64_t)size, "a list so long");
        if (f->code < 0) return NULL;
        list = sala__alloc(&f->s->env, (size_t)*count, size, "a session", f->err);
        if (!list) f->code = SALA_E_MEMORY;
    }
    if (*count) sala__session_io(f, list, (size_t)*count * size, 0);
    return (void *)(uintptr_t)list;
}

// ---- what made it ----

// A hash of a model (or draft head): shape, and of every tensor its name and what stands at 16 places.
static uint64_t sala__fingerprint(const sala *s, const sala__config *c,
                                  const sala__checkpoint *cp) {
    const char *weights = s->options.weights ? s->options.weights : "bf16";
    sala_dims m = c->dims;
    m.dense_len = 0; // an option; compared by itself
    uint64_t h = sala__checksum(SALA__SESSION_VERSION, &m, sizeof m);
    if (c->sparse) h = sala__checksum(h, c->sparse, (size_t)m.layers * 4);
    h = sala__checksum(h, c->aux, sizeof c->aux);
    h = sala__checksum(h, &c->draft_vocab, sizeof c->draft_vocab);
    if (s->options.synthetic) h = sala__checksum(h, weights, strlen(weights));
    if (s->options.synthetic) h = sala__checksum(h, &s->options.synthetic_seed, 8);
    for (size_t i = 0; i < cp->tensor_count; i++) {
        const sala__tensor *t = &cp->tensors[i];
        int64_t bytes = t->bytes < 64 ? t->bytes : 64;
        h = sala__checksum(h, t->name, strlen(t->name));
        h = sala__checksum(h, t->dtype, strlen(t->dtype));
        h = sala__checksum(h, t->shape, (size_t)t->rank * sizeof *t->shape);
        for (int64_t place = 0; place < 16; place++)
            h = sala__checksum(h, (const char *)t->data + (t->bytes - bytes) / 15 * place,
                               (size_t)bytes);
    }
    return h | 1; // never 0
}

static void sala__session_head_of(sala *s, sala__session_head *h) { // of what this engine makes
    memset(h, 0, sizeof *h);
    if (!s->fingerprint[0]) {
        s->fingerprint[0] = sala__fingerprint(s, &s->config, &s->checkpoint);
        if (s->has_draft)
            s->fingerprint[1] = sala__fingerprint(s, &s->draft_config, &s->draft_checkpoint);
    }
    h->model = s->fingerprint[0];
    h->draft = s->fingerprint[1];
    snprintf(h->device, sizeof h->device, "%s%s", s->on_gpu ? "cuda " : "cpu",
             s->on_gpu ? s->gpu.cuda.architecture : "");
    h->act_bytes = (int32_t)sizeof(sala_act);
    h->w4a4 = s->w4a4;
    h->dense_len = s->config.dims.dense_len;
}

// Could this engine have made it? Only then it goes on bit by bit as it would have.
static void sala__session_compare(sala__session *f, sala__session_head *h) {
    sala__session_head mine;
    if (f->code < 0) return;
    sala__session_head_of(f->s, &mine);
    h->device[sizeof h->device - 1] = 0;
    if (h->model != mine.model || h->act_bytes != mine.act_bytes)
        sala__session_fail(f, SALA_E_MODEL,
                           "a session of another model, or of other weights or another seed of it");
    if (strcmp(h->device, mine.device) != 0)
        sala__session_fail(f, SALA_E_DEVICE,
                           "made on %s, but this engine runs on %s, where numbers differ in their "
                           "last bits: it would not go on as it would have",
                           h->device, mine.device);
    if (h->dense_len != mine.dense_len)
        sala__session_fail(f, SALA_E_MODEL,
                           "made with dense-len %d, but this engine has %d: open it with that",
                           h->dense_len, mine.dense_len);
    if (h->w4a4 != mine.w4a4)
        sala__session_fail(f, SALA_E_MODEL,
                           "prompts were read in %s: open the engine with prefill %s",
                           h->w4a4 ? "W4A4" : "W4A16", h->w4a4 ? "w4a4" : "w4a16");
}

// ---- pages, states, the draft head's cache ----

// Which rows of its i-th page a sequence of `stored` tokens has, of a tier or (0) of K and V: what lies
// beside them may be another sequence's. Returns how many.
static int sala__session_rows(const sala_dims *m, int tier, int i, int32_t stored, int *from) {
    int32_t begin = i * m->block, end = begin + m->block < stored ? begin + m->block : stored;
    *from = 0;
    if (tier == 0) return end - begin;
    int first = sala_tier_rows(m, tier, begin);
    *from = sala_tier_last(m, tier, first) % m->block / (m->stride * (tier == 1 ? 1 : 4));
    return sala_tier_rows(m, tier, end) - first;
}

// One pool of a sequence. Full pages that lie one behind the other are one piece.
static void sala__session_pool(sala__session *f, const sala_dims *m, sala_act *pool, int tier,
                               const int32_t *pages, int32_t stored) {
    int count = (stored + m->block - 1) / m->block, from, run;
    int slots = tier ? sala_tier_slots(m, tier) : m->block;
    size_t row = (size_t)m->head_dim, head = (size_t)slots * row, page = (size_t)m->kv_heads * head;
    for (int i = 0; i < count; i += run) {
        sala_act *at = pool + (size_t)pages[i] * page;
        int rows = sala__session_rows(m, tier, i, stored, &from);
        for (int g = 0; g < m->kv_heads && rows < slots; g++)
            sala__session_io(f, at + (size_t)g * head + (size_t)from * row,
                             (size_t)rows * row * sizeof *at, 1);
        for (run = 1; rows == slots && i + run < count && pages[i + run] == pages[i] + run; run++)
            if (sala__session_rows(m, tier, i + run, stored, &from) < slots) break;
        if (rows == slots) sala__session_io(f, at, (size_t)run * page * sizeof *at, 1);
    }
}

static void sala__session_memory(sala__session *f, const sala__sequence *q) {
    sala *s = f->s;
    const sala_dims *m = &s->config.dims;
    size_t path = (size_t)q->pending * (size_t)m->lin_kv_heads * (size_t)m->lin_dim;
    for (int l = 0; l < s->sparse_layers; l++) {
        sala__session_pool(f, m, s->pages[l].k, 0, q->pages, q->stored);
        sala__session_pool(f, m, s->pages[l].v, 0, q->pages, q->stored);
        sala__session_pool(f, m, s->pages[l].tier1, 1, q->pages, q->stored);
        sala__session_pool(f, m, s->pages[l].tier2, 2, q->pages, q->stored);
    }
    for (int l = 0; l < s->lightning_layers; l++) {
        size_t place = (size_t)l * (size_t)s->plan.slots + (size_t)(q - s->sequences);
        sala__session_io(f, s->states + place * s->plan.state, s->plan.state * 4, 1);
        sala__session_io(f, s->pending_k + place * s->plan.pending, path * sizeof(sala_act), 1);
        sala__session_io(f, s->pending_v + place * s->plan.pending, path * sizeof(sala_act), 1);
    }
}

static void sala__session_draft(sala__session *f, const sala__sequence *q) {
    const sala__draft *d = &f->s->draft;
    const sala_dims *m = &f->s->draft_config.dims;
    size_t place = (size_t)(q->draft.place - 1), width = 3 * (size_t)f->s->config.dims.hidden;
    const int32_t *pages = d->tables + place * (size_t)d->blocks;
    int32_t t = q->draft.seen;
    if (t < q->stored - SALA_DRAFT_DEBT) t = q->stored - SALA_DRAFT_DEBT; // older ones are gone
    sala__session_pool(f, m, d->pages.k, 0, pages, q->draft.filled);
    sala__session_pool(f, m, d->pages.v, 0, pages, q->draft.filled);
    for (; t < q->stored; t++)
        sala__session_io(f,
                         d->debt + (place * SALA_DRAFT_DEBT + (size_t)t % SALA_DRAFT_DEBT) * width,
                         width * sizeof(sala_act), 1);
}

// ---- the request at work ----

// What was asked for, in either direction. Reading, its lists are fresh memory.
static void sala__session_ask(sala__session *f, sala_request *ask, sala__string *held,
                              const char **stop) {
    const sala__setting *e = sala__request_table;
    int64_t stop_tokens = ask->stop_token_count, biases = ask->bias_count, stops = ask->stop_count;
    int64_t bytes = (int64_t)held->size;
    for (; e < sala__request_table + SALA__ROWS(sala__request_table); e++)
        sala__session_io(f, (char *)ask + e->offset,
                         e->kind == SALA__SET_LONG || e->kind == SALA__SET_SEED ? 8 : 4, 0);
    ask->force = (int32_t *)sala__session_list(f, ask->force, &ask->force_count, 4);
    ask->guess = (int32_t *)sala__session_list(f, ask->guess, &ask->guess_count, 4);
    ask->stop_tokens = (int32_t *)sala__session_list(f, ask->stop_tokens, &stop_tokens, 4);
    ask->biases = (sala_bias *)sala__session_list(f, ask->biases, &biases, sizeof(sala_bias));
    held->data = (char *)sala__session_list(f, held->data, &bytes, 1);
    sala__session_io(f, &stops, sizeof stops, 0);
    sala__session_must(f,
                       stop_tokens <= SALA__STOP_TOKENS && biases <= f->s->config.dims.vocab &&
                           stops >= 0 && stops <= SALA__STOP_STRINGS,
                       "so many stops");
    if (!f->reading) stop = (const char **)(uintptr_t)ask->stop;
    for (int64_t i = 0, n; i < stops && f->code == 0; i++) {
        n = f->reading ? 0 : (int64_t)strlen(stop[i]) + 1;
        stop[i] = (char *)sala__session_list(f, stop[i], &n, 1);
        if (stop[i]) ask->stop_count = (int)i + 1; // to be released
        sala__session_must(f, n > 0 && stop[i] && !stop[i][n - 1], "a stop string without end");
    }
    ask->stop = stop;
    ask->stop_token_count = (int)stop_tokens;
    ask->bias_count = (int)biases;
    held->size = held->capacity = (size_t)bytes;
}

// How far it is, in either direction. Times are ages in a file, since clocks begin anew; -1: not yet.
static void sala__session_course(sala__session *f, sala__request *r) {
    sala__stream *t = &r->stream;
    double *const times[4] = {&r->submitted, &r->admitted, &r->first_token, &r->last_token};
    void *const longs[] = {&r->token_count, &r->prefilled, &r->chosen, &r->reused,
                           &r->decode_bytes};
    void *const ints[] = {&r->segment_start, &r->shared,    &r->took_root, &r->cancelled,
                          &t->begun,         &t->held_size, t->held};
    for (int i = 0; i < 5; i++) sala__session_io(f, longs[i], 8, 0);
    for (int i = 0; i < 7; i++) sala__session_io(f, ints[i], 4, 0);
    for (int i = 0; i < 4; i++) {
        double now = sala__now(), age = *times[i] > 0 ? now - *times[i] : -1;
        sala__session_io(f, &age, sizeof age, 0);
        if (f->reading) // of a machine that booted just now none is so long ago
            *times[i] = age >= 0 ? fmax(now - age, 1e-9) : 0;
    }
    sala__session_io(f, &r->counted, sizeof r->counted, 0);
}

static void sala__session_put_request(sala__session *f, const sala__request *r) {
    sala_request ask = r->asked;
    sala__string held = r->held;
    ask.max_tokens = r->max_tokens; // no longer "default"
    ask.sequence = 0;
    ask.force = r->force;
    ask.guess = r->guess;
    ask.stop_tokens = r->stop_tokens;
    ask.biases = r->biases;
    ask.stop = (const char *const *)r->stop;
    sala__session_course(f, (sala__request *)(uintptr_t)r);
    sala__session_ask(f, &ask, &held, NULL);
}

// Can a request that began there be where this one is? Sums of numbers up to the history do not overflow.
static int sala__session_agrees(const sala__session_head *h, int64_t history,
                                const sala__request *r) {
    const int64_t n[] = {r->token_count, r->prefilled, r->segment_start, r->chosen, r->reused};
    const int64_t *count = r->counted.verifies;
    int ok = r->token_count > 0 && (unsigned)(r->took_root | r->cancelled | r->stream.begun) <= 1;
    for (int i = 0; i < 5; i++) ok &= n[i] >= 0 && n[i] <= history;
    for (; ok && count < (const int64_t *)&r->counted.draft_seconds; count++)
        ok = *count >= 0 && *count < (int64_t)1 << 48; // statistics, to which more is added
    ok = ok && r->shared >= 0 && r->shared <= r->prefilled && (unsigned)r->stream.held_size <= 3;
    ok = ok && r->decode_bytes >= 0 && r->decode_bytes < (int64_t)1 << 60;
    ok = ok && history == r->segment_start + r->token_count + r->chosen;
    ok = ok && h->stored == r->segment_start + r->prefilled + (r->chosen ? r->chosen - 1 : 0);
    if (r->chosen == 0) return ok && r->prefilled < r->token_count && h->pending == 0;
    return ok && r->prefilled == r->token_count && h->pending < r->chosen;
}

static void sala__session_room(sala__session *f,
                               int64_t tokens) { // for the longest that it can become
    if (tokens > f->s->options.context)
        sala__session_fail(f, SALA_E_ARGUMENT,
                           "needs %lld tokens, more than the context of %lld: raise --context",
                           (long long)tokens, (long long)f->s->options.context);
}

// As if it were submitted, and all that has happened since.
static void sala__session_revive(sala__session *f, const sala_request *ask, sala__request *r,
                                 const sala__string *held) {
    sala *s = f->s;
    sala_error why;
    int code = sala__check_request_fields(ask, &why);
    if (code == 0) sala__session_room(f, r->segment_start + r->token_count + ask->max_tokens);
    if (f->code < 0) return;
    if (code == 0) code = sala__request_copy(s, ask, r, &why);
    if (code == 0) code = sala__request_fits(s, r, ask, &why);
    if (code == 0) code = sala__append(&s->env, &r->held, held->data, held->size, &why);
    if (code < 0) sala__session_fail(f, code, "its request cannot go on here: %s", why.text);
    r->spec.before = r->chosen;
    r->state = r->chosen ? SALA__DECODE : SALA__PREFILL;
}

static sala__request *sala__session_get_request(sala__session *f, const sala__session_head *h,
                                                const int32_t *tokens, int64_t count) {
    sala *s = f->s;
    const char *stop[SALA__STOP_STRINGS] = {NULL};
    sala__string held = {NULL, 0, 0};
    sala_request ask;
    sala__request *r = (sala__request *)sala__alloc(&s->env, 1, sizeof *r, "a request", f->err);
    if (!r) f->code = SALA_E_MEMORY;
    if (!r) return NULL;
    memset(&ask, 0, sizeof ask);
    sala__session_course(f, r);
    sala__session_must(f, sala__session_agrees(h, count, r), "where its request is");
    sala__session_ask(f, &ask, &held, stop);
    sala__session_must(f, ask.max_tokens > r->chosen && ask.sequence == 0,
                       "where its request ends");
    ask.tokens = f->code < 0 ? NULL : tokens + r->segment_start;
    ask.token_count = r->token_count;
    if (f->code == 0) sala__session_revive(f, &ask, r, &held);
    for (int64_t i = 0; f->code == 0 && i < count; i++)
        sala__sampler_note(&r->sampler, tokens[i], i >= count - r->chosen);
    const void *const lists[] = {ask.force, ask.guess, ask.stop_tokens, ask.biases, held.data};
    for (int i = 0; i < 5; i++) sala__release(&s->env, (void *)(uintptr_t)lists[i]);
    for (int i = 0; i < ask.stop_count; i++) sala__release(&s->env, (void *)(uintptr_t)stop[i]);
    return r;
}

// ---- saving ----

static void sala__session_put(sala__session *f, const sala__sequence *q, const sala__request *r) {
    int64_t tokens = (int64_t)q->token_count, phases = (int64_t)q->phase_count;
    sala__session_head h;
    sala__session_head_of(f->s, &h);
    h.has_request = r != NULL;
    h.stored = q->stored;
    h.pending = q->pending;
    h.draft_filled = q->draft.filled;
    h.draft_seen = q->draft.seen;
    if (!sala__draft_ready(q)) h.draft = 0;
    sala__session_io(f, &h, sizeof h, 0);
    sala__session_list(f, q->tokens, &tokens, 4);
    sala__session_list(f, q->phases, &phases, sizeof *q->phases);
    if (r) sala__session_put_request(f, r);
    sala__session_memory(f, q);
    if (h.draft) sala__session_draft(f, q);
}

// The first bytes of a file; the sum of its blocks goes on from theirs.
static void sala__session_start(sala__session *f, unsigned char start[SALA__SESSION_START]) {
    const uint32_t version[2] = {SALA__SESSION_VERSION, 0};
    memcpy(start, "SALASES", 8);
    memcpy(start + 8, version, 8);
    memcpy(start + 16, &f->total, 8);
    f->sum = sala__checksum(0, start, SALA__SESSION_START);
}

// The windows, and the device if there is one.
static void sala__session_begin(sala__session *f) {
    sala *s = f->s;
    void *memory = NULL;
    f->whole = sala__session_whole(f->total);
    f->from = SALA__SESSION_START;
    f->left = f->total;
    f->index = -1; // before the first block of a window that is done
    f->blocks = SALA__SESSION_WINDOW;
    if (f->whole < f->blocks * (int64_t)SALA__SESSION_BLOCK)
        f->blocks = (int)(f->whole / (int64_t)SALA__SESSION_BLOCK) + 1;
    size_t bytes = (size_t)f->blocks * SALA__SESSION_BLOCK;
    if (!s->on_gpu) {
        memory = sala__alloc(&s->env, bytes, 1, "a session", f->err);
        if (!memory) f->code = SALA_E_MEMORY;
    } else if ((f->code = sala__cuda_enter(&s->gpu.cuda, f->err)) == 0) {
        int threads = s->options.threads < f->blocks ? s->options.threads : f->blocks;
        f->code = sala__cpu_open(&s->env, threads, 0, &f->pool, f->err);
        if (f->code == 0)
            f->code = sala__cuda_alloc_host(&s->gpu.cuda, 2 * bytes, "a session", &memory, f->err);
        if (f->code < 0) sala__cuda_leave(&s->gpu.cuda);
    }
    f->memory = f->window = (unsigned char *)memory;
}

static void sala__session_end(sala__session *f) {
    sala__cuda *c = &f->s->gpu.cuda;
    if (f->memory && f->s->on_gpu) {
        int code = sala__cuda_wait(c, f->code ? NULL : f->err); // copies may be under way
        if (f->code == 0) f->code = code;
        sala__cuda_release_host(c, f->memory);
        sala__cuda_leave(c);
    } else if (f->memory) {
        sala__release(&f->s->env, f->memory);
    }
    sala__cpu_close(&f->pool);
}

// Write everything to a fresh file beside the path, which then takes the path's place.
static void sala__session_write(sala__session *f, const sala__sequence *q, const sala__request *r,
                                char *part) {
    unsigned char start[SALA__SESSION_START];
    f->fd = mkostemp(part, O_CLOEXEC);
    if (f->fd < 0) sala__session_fail(f, SALA_E_FILE, "cannot create: %s", strerror(errno));
    if (f->fd < 0) return;
    sala__session_start(f, start);
    sala__session_moved(f, sala__session_move(f, start, sizeof start, 0));
    sala__session_put(f, q, r);
    if (f->code == 0) sala__session_window(f);
    int bad = f->code == 0 && fsync(f->fd) != 0;
    bad |= close(f->fd) != 0;
    if (f->code == 0 && (bad || rename(part, f->path) != 0))
        sala__session_fail(f, SALA_E_FILE, "cannot finish: %s", strerror(errno));
    if (f->code < 0) unlink(part);
    char *slash = strrchr(part, '/'); // the new name too should last; not all file systems can
    if (slash) slash[1] = 0;
    int fd = open(slash ? part : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) fsync(fd);
    if (fd >= 0) close(fd);
}

SALA_API int sala_save(sala *s, int64_t id, const char *path, sala_error *err) {
    sala__session f;
    sala__string part = {NULL, 0, 0};
    struct stat st;
    char real[4096];
    sala__clear(err);
    if (s->failed) return sala__failed(err);
    if (!path || !*path) return sala__fail(err, SALA_E_ARGUMENT, "sala_save: no path given");
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return sala__fail(err, SALA_E_FILE, "%s: not a regular file", path);
    if (realpath(path, real)) path = real; // through a link, to where it points
    const sala__sequence *q = sala__find_sequence(s, id);
    const sala__request *r = s->requests;
    while (r && !(r->slot >= 0 && (r->id == id || (q && r->sequence == id)))) r = r->next;
    if (r) q = &s->sequences[r->slot];
    for (const sala__request *w = s->requests; w && !q; w = w->next)
        if (w->id == id)
            return sala__fail(
                err, SALA_E_STATE,
                "request %lld still waits, so there is nothing to save of it: sala_step "
                "begins it when there is room",
                (long long)id);
    if (!q)
        return sala__fail(err, SALA_E_ARGUMENT,
                          "there is no sequence %lld and no request of that number at work",
                          (long long)id);
    memset(&f, 0, sizeof f);
    f.s = s;
    f.path = path;
    f.err = err;
    sala__session_put(&f, q, r); // measure
    f.code = sala__append(&s->env, &part, path, strlen(path), err);
    if (f.code == 0) f.code = sala__append(&s->env, &part, ".part-XXXXXX", 12, err);
    if (f.code == 0) sala__session_begin(&f);
    if (f.code == 0) sala__session_write(&f, q, r, part.data);
    sala__session_end(&f);
    sala__release(&s->env, part.data);
    return f.code;
}

// ---- loading ----

// Open a file and look at its first bytes.
static void sala__session_open(sala__session *f) {
    unsigned char start[SALA__SESSION_START] = {0}, want[SALA__SESSION_START];
    uint32_t version;
    struct stat st;
    memset(&st, 0, sizeof st);
    f->fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0 || fstat(f->fd, &st) < 0)
        sala__session_fail(f, SALA_E_FILE, "cannot open: %s", strerror(errno));
    if (f->code < 0) return;
    int error = S_ISREG(st.st_mode) ? sala__session_move(f, start, sizeof start, 0) : 0;
    if (error > 0) sala__session_moved(f, error);
    if (memcmp(start, "SALASES", 8) != 0)
        sala__session_fail(f, SALA_E_FILE, "not a session that sala_save wrote");
    memcpy(&version, start + 8, 4);
    memcpy(&f->total, start + 16, 8);
    if (version != SALA__SESSION_VERSION)
        sala__session_fail(f, SALA_E_FILE, "a session of version %u, but sala %s reads version %d",
                           version, SALA_VERSION, SALA__SESSION_VERSION);
    sala__session_start(f, want);
    sala__session_must(
        f, memcmp(start, want, sizeof start) == 0 && f->total > 0 && f->total < INT64_MAX / 2,
        "how it begins");
    if (f->code < 0) return;
    int64_t whole = sala__session_whole(f->total);
    if (whole != st.st_size)
        sala__session_fail(f, SALA_E_FILE,
                           "a session cut short or altered: %lld bytes instead of %lld",
                           (long long)st.st_size, (long long)whole);
}

// What a file holds before its memory: read and judged into `q`, a sequence that is nobody's yet.
static sala__request *sala__session_get(sala__session *f, sala__session_head *h,
                                        sala__sequence *q) {
    const sala *s = f->s;
    int64_t tokens = 0, phases = 0;
    sala__session_io(f, h, sizeof *h, 0);
    sala__session_compare(f, h);
    sala__session_must(f, !h->zero[0] && !h->zero[1] && (unsigned)h->has_request <= 1, "its head");
    q->tokens = (int32_t *)sala__session_list(f, NULL, &tokens, 4);
    q->phases = (sala__phase *)sala__session_list(f, NULL, &phases, sizeof *q->phases);
    q->token_count = q->token_capacity = (size_t)tokens;
    q->phase_count = q->phase_capacity = (size_t)phases;
    q->stored = h->stored;
    q->pending = h->pending;
    sala__session_must(f,
                       h->stored >= 0 && h->stored <= tokens && h->pending >= 0 &&
                           h->pending <= h->stored && h->pending <= SALA_MAX_PATH &&
                           (h->has_request || tokens - h->stored <= 1),
                       "so many tokens");
    sala__session_must(f, (phases > 0) == (h->stored > 0), "how it came to be");
    for (int64_t i = 0; f->code == 0 && i < tokens; i++)
        sala__session_must(f, q->tokens[i] >= 0 && q->tokens[i] < s->config.dims.vocab, "a token");
    for (int64_t i = 0, last = -1; f->code == 0 && i < phases; last = q->phases[i++].first)
        sala__session_must(f,
                           q->phases[i].first > last && q->phases[i].first < h->stored &&
                               (i || !q->phases[i].first) &&
                               (unsigned)q->phases[i].verified <= (unsigned)(i > 0),
                           "how it came to be");
    sala__request *r = NULL;
    if (f->code == 0 && h->has_request) r = sala__session_get_request(f, h, q->tokens, tokens);
    q->root = f->code == 0 && tokens > h->stored && (!r || r->chosen) ? q->tokens[tokens - 1] : -1;
    return r;
}

// A slot and pages for it. What the request may still need is reserved, as at admission.
static sala__sequence *sala__session_place(sala__session *f, const sala__sequence *from,
                                           const sala__request *r) {
    sala *s = f->s;
    sala__sequence *q = NULL;
    int64_t tokens = (int64_t)from->token_count + (r ? r->max_tokens - r->chosen : 0);
    int64_t need = sala__pages_for(s, tokens);
    for (int i = 0; !q && i < s->plan.slots; i++)
        if (!s->sequences[i].id) q = &s->sequences[i];
    sala__session_room(f, tokens);
    if (!q)
        sala__session_fail(f, SALA_E_MEMORY,
                           "all %d sequences are taken: release one or raise --max-sequences",
                           s->plan.slots);
    if (need > s->free_page_count + s->idle_page_count)
        sala__session_fail(f, SALA_E_MEMORY,
                           "needs %lld pages of the K/V cache, of which %lld are free: release a "
                           "sequence or raise --kv-tokens",
                           (long long)need, (long long)(s->free_page_count + s->idle_page_count));
    if (f->code < 0) return NULL;
    q->stored = from->stored;
    q->pending = from->pending;
    f->code = sala__page_room(s, q, need, f->err);
    if (f->code == 0) f->code = sala__take_pages(s, q, need, f->err);
    if (f->code == 0) f->code = sala__draft_forget(s, (int)(q - s->sequences), f->err);
    return q;
}

// The rest of the file: the memory of the sequence, and what the draft head knows, if it is this one and
// its window holds that.
static void sala__session_fill(sala__session *f, sala__sequence *q, const sala__session_head *h) {
    int known = h->draft && h->draft == f->s->fingerprint[1] && q->draft.place;
    sala__session_must(f, h->draft_filled >= 0 && h->draft_seen >= 0 && h->draft_seen <= h->stored,
                       "what its draft head knows");
    sala__session_memory(f, q);
    if (f->code == 0 && known && h->draft_filled <= f->s->draft.blocks * 64) {
        q->draft.filled = h->draft_filled;
        q->draft.seen = h->draft_seen;
        sala__session_draft(f, q);
        known = 2;
    }
    sala__session_must(f, f->left == 0 || (h->draft && known < 2), "where it ends");
    while (f->left > 0 && f->code == 0) { // of another head: checksums only
        f->left -= (int64_t)(f->size - f->at);
        f->at = f->size;
        if (f->left > 0) sala__session_turn(f);
    }
}

// It is the engine's now: a sequence, and its request at work.
static void sala__session_adopt(sala *s, sala__sequence *q, const sala__sequence *from,
                                sala__request *r) {
    sala__request **end = &s->requests;
    sala__release(&s->env, q->tokens);
    sala__release(&s->env, q->phases);
    q->tokens = from->tokens;
    q->token_count = q->token_capacity = from->token_count;
    q->phases = from->phases;
    q->phase_count = q->phase_capacity = from->phase_count;
    q->root = from->root;
    q->id = ++s->next_id;
    q->request = r ? q->id : 0;
    if (!r) return;
    r->id = r->sequence = q->id;
    r->slot = (int32_t)(q - s->sequences);
    while (*end) end = &(*end)->next;
    *end = r;
}

SALA_API int64_t sala_load(sala *s, const char *path, sala_session *session, sala_error *err) {
    sala__session f;
    sala__session_head head;
    sala__sequence read, *q = NULL;
    sala__request *r = NULL;
    sala__clear(err);
    if (s->failed) return sala__failed(err);
    if (!path || !*path) return sala__fail(err, SALA_E_ARGUMENT, "sala_load: no path given");
    memset(&f, 0, sizeof f);
    memset(&head, 0, sizeof head);
    memset(&read, 0, sizeof read);
    f.s = s;
    f.path = path;
    f.err = err;
    f.reading = 1;
    sala__session_open(&f);
    if (f.code == 0) sala__session_begin(&f);
    if (f.code == 0) r = sala__session_get(&f, &head, &read);
    if (f.code == 0) q = sala__session_place(&f, &read, r);
    if (f.code == 0) sala__session_fill(&f, q, &head);
    sala__session_end(&f);
    if (f.fd >= 0) close(f.fd);
    if (f.code < 0) {
        if (q) sala__free_sequence(s, q);
        if (r) sala__drop_request(s, r);
        sala__release(&s->env, read.tokens);
        sala__release(&s->env, read.phases);
        return f.code;
    }
    sala__session_adopt(s, q, &read, r);
    sala_session found = {q->id, q->request, (int64_t)q->token_count, q->root};
    if (session) *session = found;
    return q->id;
}
#ifndef __clang__
#pragma GCC pop_options
#endif

#endif // SALA_IMPLEMENTED
#endif // SALA_IMPLEMENTATION

/*
    HISTORY
      0.8.0  a draft head's own window (sala_window), kernels for 17 to 64 rows with four bits
      0.7.0  loads sessions by threads (file version 2), sala_history, kernels for one or two rows
      0.6.0  sessions on disk, prefix reuse, features for the training of draft heads
      0.5.0  speculation: n-gram chains, EAGLE-3 heads, verify of trees
      0.4.0  four bits: NVFP4 and INT4 checkpoints, W4A16 and W4A4, the quantiser
      0.3.0  CUDA: kernels of prefill
      0.2.0  CUDA: kernels of the verify pass in BF16, compiled at run time
      0.1.0  the CPU: loader, tokenizer, sampler, prefill and verify, events

    LICENSE (MIT)
    Copyright (c) 2026 the sala authors

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation
    the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and
    to permit persons to whom the Software is furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial portions of
    the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
    THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
    AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
    CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
    IN THE SOFTWARE.
*/
