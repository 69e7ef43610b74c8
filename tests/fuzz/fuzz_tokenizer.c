#define SALA_IMPLEMENTATION
#include "../../sala.h"
// First byte even: the rest is a tokenizer.json (and, after a zero byte, a tokenizer_config.json);
// if it loads, texts go through it. Odd: the rest is text or tokens for the small tokenizer below.
// The second byte may ask for an allocation to fail.
#include "fuzz.h"

// Every kind of added token, both normalisers, bytes, Metaspace; "@BYTES@" is filled in.
static const char small_tokenizer[] =
    "{\"added_tokens\":[{\"id\":300,\"content\":\"<|im_start|>\",\"special\":true},"
    "{\"id\":301,\"content\":\"<|im_end|>\",\"special\":true},"
    "{\"id\":302,\"content\":\"  \",\"lstrip\":true,\"rstrip\":true},"
    "{\"id\":303,\"content\":\"xy\",\"rstrip\":true},"
    "{\"id\":304,\"content\":\"b c\",\"normalized\":true},{\"id\":305,\"content\":\"<|im_\"}],"
    "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"_"
    "\"},"
    "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"}]},"
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{"
    "\"String\":"
    "\"_\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},"
    "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},"
    "\"model\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_fallback\":true,"
    "\"merges\":[\"a b\",[\"_\",\"a\"],\"_ _\",\"__ __\",\"ab c\",\"c ab\",\"a a\",\"aa aa\"],"
    "\"vocab\":{@BYTES@\"<unk>\":256,\"a\":257,\"b\":258,\"c\":259,\"_\":260,\"ab\":261,\"_a\":262,"
    "\"__\":263,\"____\":264,\"abc\":265,\"cab\":266,\"aa\":267,\"aaaa\":268,\"\\u00e9\":269,"
    "\"\\u5c0f\":270,\"x\":271,\"y\":272,\"z\":273,\"A\":274,\"B\":275,\"C\":276,\"0\":277,\"1\":"
    "278,"
    "\"2\":279,\"3\":280,\"4\":281,\"5\":282,\"6\":283,\"7\":284,\"8\":285,\"9\":286,\"<\":287,"
    "\">\":288,\"|\":289,\".\":290,\",\":291,\"!\":292,\"?\":293,\"-\":294,\"+\":295,\"*\":296,"
    "\"/\":297,\"(\":298,\")\":299}}}";

static char *expand(const char *text) { // "@BYTES@" becomes the 256 byte tokens
    const char *mark = strstr(text, "@BYTES@");
    char *out = (char *)malloc(strlen(text) + 256 * 16);
    size_t n = (size_t)(mark - text);
    memcpy(out, text, n);
    for (int b = 0; b < 256; b++) n += (size_t)sprintf(out + n, "\"<0x%02X>\":%d,", (unsigned)b, b);
    strcpy(out + n, mark + 7);
    return out;
}

// Encode, decode at once and as a stream, and a chat turn. Errors may only be about memory.
static void use(const sala__tokenizer *t, const uint8_t *data, size_t size, int exact) {
    sala_error err;
    int32_t *ids;
    size_t bytes = 0;
    for (int flags = 0; flags < 4; flags++) {
        int64_t n = sala__encode(t, (const char *)data, size, flags, &ids, &err);
        if (n < 0) fuzz_error((int)n, &err);
        for (int64_t i = 0; i < n; i++) {
            REQUIRE(ids[i] >= 0 && ids[i] < t->size);
            if (t->tokens[ids[i]].flags & SALA__TOKEN_ADDED) exact = 0; // a space is put after it
            if (!(flags & SALA_PARSE_SPECIAL) && !(i == 0 && (flags & SALA_ADD_BOS)))
                REQUIRE(!(t->tokens[ids[i]].flags & SALA__TOKEN_CONTROL));
        }
        char *text = n < 0 ? NULL : sala__decode(t, ids, n, flags & 1, &bytes, &err);
        if (text && exact && flags == 0 && !memchr(data, ' ', size) && !memchr(data, '_', size))
            REQUIRE(bytes == size && memcmp(text, data, size) == 0);
        sala__release(t->env, text);
        sala__release(t->env, ids);
    }
    int64_t n = sala__chat_turn(t, "user", (const char *)data, size, 1, 1, &ids, &err);
    if (n < 0) fuzz_error((int)n, &err);
    if (n >= 0) {
        int ends = 0;
        for (int64_t i = 0; i < n; i++) ends += ids[i] == t->im_end;
        REQUIRE(ends == 1);
    }
    sala__release(t->env, ids);
}

// The bytes as token ids: pieces of the stream put together are the decoded text.
static void use_tokens(const sala__tokenizer *t, const uint8_t *data, size_t size) {
    sala_error err;
    sala__stream s;
    sala__string out = {NULL, 0, 0}, whole = {NULL, 0, 0};
    size_t bytes = 0;
    int32_t ids[512] = {0};
    int64_t n = 0;
    int code = 0, special = size & 1;
    for (size_t i = 0; i + 1 < size && n < 512; i += 2)
        ids[n++] = (data[i] | data[i + 1] << 8) % t->limit;
    char *text = sala__decode(t, ids, n, special, &bytes, &err);
    sala__stream_init(t, special, &s);
    for (int64_t i = 0; i <= n && code >= 0; i++) {
        out.size = 0;
        code =
            i < n ? sala__stream_push(&s, ids[i], &out, &err) : sala__stream_flush(&s, &out, &err);
        if (code >= 0) code = sala__append(t->env, &whole, out.data, out.size, &err);
        uint32_t c; // what has come out does not end inside a character of the whole
        for (size_t k = 1; text && code >= 0 && k <= 3 && k <= whole.size; k++)
            REQUIRE(sala__utf8_get((const unsigned char *)text + whole.size - k,
                                   bytes - whole.size + k, &c) <= (int)k);
    }
    if (text && code >= 0) REQUIRE(bytes == whole.size && memcmp(text, whole.data, bytes) == 0);
    sala__release(t->env, text);
    sala__release(t->env, out.data);
    sala__release(t->env, whole.data);
}

static int load(sala__tokenizer *t, const sala__env *env, const char *main_text, size_t main_size,
                const char *config, size_t config_size, sala_error *err) {
    sala__json j, c;
    memset(&c, 0, sizeof c);
    sala__tokenizer_start(t, env, 512);
    int code = sala__json_parse(env, "tokenizer.json", main_text, main_size, &j, err);
    if (code < 0) return code;
    if (config) code = sala__json_parse(env, "tokenizer_config.json", config, config_size, &c, err);
    if (code >= 0) code = sala__tokenizer_load(t, &j, config ? &c : NULL, NULL, err);
    sala__json_free(&j);
    sala__json_free(&c);
    if (code < 0) sala__tokenizer_close(t);
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char sample[] =
        "a b  ab <|im_end|> aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \xE5\xB0\x8F\xFF<s>\n";
    fuzz_memory memory = {0, 0, 0};
    sala__env env = {&memory, fuzz_allocate, fuzz_log, NULL};
    sala__tokenizer t;
    sala_error err;
    int code;
    if (size < 2) return 0;
    if (data[1] < 64) memory.fail_at = data[1];
    if (data[0] & 1) {
        char *text = expand(small_tokenizer);
        uint64_t fail_at = memory.fail_at;
        memory.fail_at = 0;
        code = load(&t, &env, text, strlen(text), NULL, 0, &err);
        if (code < 0) fprintf(stderr, "%s\n", err.text);
        REQUIRE(code == 0);
        t.template_name = "chatml";
        free(text);
        memory.fail_at = fail_at ? memory.calls + fail_at : 0;
        if (data[0] & 2)
            use_tokens(&t, data + 2, size - 2);
        else
            use(&t, data + 2, size - 2, 1);
        sala__tokenizer_close(&t);
    } else {
        const char *text = (const char *)data + 2, *zero = (const char *)memchr(text, 0, size - 2);
        size_t n = zero ? (size_t)(zero - text) : size - 2;
        char *copy = (char *)malloc(n + 1);
        memcpy(copy, text, n);
        copy[n] = 0;
        char *full = strstr(copy, "@BYTES@") ? expand(copy) : NULL;
        const char *main_text = full ? full : copy;
        code = load(&t, &env, main_text, strlen(main_text), zero ? zero + 1 : NULL,
                    zero ? size - 3 - n : 0, &err);
        if (code < 0) fuzz_error(code, &err);
        if (code >= 0) {
            use(&t, (const uint8_t *)sample, sizeof sample - 1, 0);
            use(&t, data, size < 64 ? size : 64, 0);
            use_tokens(&t, data, size);
            sala__tokenizer_close(&t);
        }
        free(full);
        free(copy);
    }
    REQUIRE(memory.live == 0);
    return 0;
}
