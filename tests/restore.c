#define SALA_IMPLEMENTATION
#include "../sala.h"
// build/restore CONFIG DEVICE TOKENS FILE [THREADS]: a session of so many tokens with random weights, to FILE and back, in the
// middle of its output: seconds and GB/s of both beside writing and reading the same bytes plainly, the step
// after it, and whether it goes on with the same tokens. Not part of make test: see tools/gpu_check.sh.
#include <stdio.h>
#include <stdlib.h>

enum { MORE = 32 };

static void must(int64_t code, const sala_error *err) {
    if (code >= 0) return;
    fprintf(stderr, "restore: %s\n", err->text);
    exit(1);
}

// A step; tokens of this request are appended. Returns the seconds it took, -1 when idle.
static double step(sala *s, int64_t id, int32_t *tokens, int *count) {
    sala_error err;
    sala_event e;
    double began = sala__now();
    int code = sala_step(s, &err);
    must(code, &err);
    began = sala__now() - began;
    while (sala_next_event(s, &e))
        if (e.type == SALA_EVENT_TOKEN && e.request == id && *count < MORE)
            tokens[(*count)++] = e.token;
    return code ? began : -1;
}

// Read the whole file as plainly as can be, or copy it. Returns seconds.
static double plainly(const char *path, const char *copy) {
    enum { PIECE = 1 << 20 };
    char *piece = (char *)malloc(PIECE);
    FILE *from = fopen(path, "rb"), *to = copy ? fopen(copy, "wb") : NULL;
    double began = sala__now();
    if (!from || !piece || (copy && !to)) exit(1);
    for (size_t n; (n = fread(piece, 1, PIECE, from)) > 0;)
        if (to && fwrite(piece, 1, n, to) != n) exit(1);
    if (to && (fflush(to) || fsync(fileno(to)))) exit(1);
    fclose(from);
    if (to) fclose(to);
    free(piece);
    return sala__now() - began;
}

int main(int argc, char **argv) {
    if (argc < 5) return fprintf(stderr, "usage: restore CONFIG DEVICE TOKENS FILE [THREADS]\n"), 2;
    int32_t a[MORE], b[MORE];
    int counts[2] = {0, 0}, dummy = 0;
    char copy[1024];
    const char *file = argv[4];
    sala_options o;
    sala_request ask;
    sala_error err;
    memset(&o, 0, sizeof o);
    memset(&ask, 0, sizeof ask);
    int64_t n = atoll(argv[3]);
    o.device = argv[2];
    o.synthetic = 1;
    o.weights = "nvfp4";
    o.spec = "off";
    o.max_sequences = 2;
    o.context = n + 64;
    o.kv_tokens = 2 * o.context;
    o.chunk = 4096;
    o.threads = argc > 5 ? atoi(argv[5]) : 0;
    int32_t *prompt = (int32_t *)malloc((size_t)n * 4);
    sala *s = sala_open(argv[1], &o, &err);
    must(s && prompt ? 0 : -1, &err);
    for (int64_t i = 0; i < n; i++) prompt[i] = (int32_t)(sala_random(1, (uint64_t)i) % 1000);
    ask.tokens = prompt;
    ask.token_count = n;
    ask.max_tokens = MORE + 8;
    ask.ignore_eos = 1;
    int64_t id = sala_submit(s, &ask, &err);
    must(id, &err);
    while (!dummy) step(s, id, a, &dummy);
    double began = sala__now();
    must(sala_save(s, id, file, &err), &err);
    double saved = sala__now() - began;
    while (step(s, id, a, &counts[0]) >= 0) continue;
    began = sala__now();
    int64_t again = sala_load(s, file, NULL, &err);
    must(again, &err);
    double loaded = sala__now() - began, first = step(s, again, b, &counts[1]);
    while (step(s, again, b, &counts[1]) >= 0) continue;
    struct stat st;
    snprintf(copy, sizeof copy, "%s.copy", file);
    if (stat(file, &st) < 0) return 1;
    double bytes = (double)st.st_size, wrote = plainly(file, copy), read = plainly(file, NULL);
    unlink(copy);
    unlink(file);
    printf("a session of %lld tokens: %.2f GB\n", (long long)n, bytes / 1e9);
    printf("saved in %.3f s, %.2f GB/s; copied plainly: %.3f s\n", saved, bytes / saved / 1e9,
           wrote);
    printf("loaded in %.3f s, %.2f GB/s; read plainly: %.3f s\n", loaded, bytes / loaded / 1e9,
           read);
    int same = counts[0] == counts[1] && memcmp(a, b, (size_t)counts[0] * 4) == 0;
    printf("%s loading: %.2f times a plain read (wanted: at most 2, the disk's speed)\n",
           loaded <= 2 * read ? "met   " : "MISSED", loaded / read);
    printf("%s first token within one step: %d tokens after %.4f s\n",
           counts[1] ? "met   " : "MISSED", counts[1] > 0, first);
    printf("%s the same %d tokens\n", same ? "met   " : "MISSED", counts[0]);
    free(prompt);
    sala_close(s);
    return !same;
}
