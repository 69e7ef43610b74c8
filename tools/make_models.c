/*  make_models.c - writes a model with random numbers in a layout that 4-bit checkpoints have:

        make build/make_models
        build/make_models config.json OUT modelopt shards=2
        build/make_models bench/configs/eagle3-tiny.json OUT bf16 target=models/sala-tiny/config.json
        build/make_models bench/configs/eagle3-437m.json OUT modelopt fused=3 names=1 target=DIR/config.json

    For trying a loader, this one or another, where the real files cannot be had: sizes, names, types and
    configuration are theirs, at the geometry of any config.json. There is no tokenizer; copy one. */
#define SALA_IMPLEMENTATION
#include "../sala.h"
#include "../tests/quant_files.h"

static const char usage[] =
    "usage: make_models CONFIG.JSON OUT LAYOUT [NAME=NUMBER ...]\n\n"
    "layouts  modelopt, compressed-tensors, gptq; bf16: none; mixed: each of the four in turn\n"
    "names    group (gptq: 32, 64, 128 or -1, default 128), asymmetric, v2, f16, g_idx (gptq: 0 or "
    "1)\n"
    "         weight_only, fused (1: one F32 scale, 2: one each, 3: under the parts' names), head, "
    "beside\n"
    "         (configuration in a file of its own), shards, seed\n"
    "draft heads: CONFIG.JSON is that of an EAGLE-3 head, target=FILE its model's\n"
    "names    names (0: midlayer, 1: model.midlayer, 2: layers.0), bias, embed (its own), shared "
    "(the "
    "model's\n"
    "         head), tables (1: d2t, 2: t2d, 3: both, the default)\n";

static int fail(const char *what, const char *why) {
    fprintf(stderr, "make_models: %s: %s\n", what, why);
    return 2;
}

static int set(quant_options *o, const char *text) { // NAME=NUMBER
    const struct {
        const char *name;
        int *value;
    } names[] = {{"group", &o->group},   {"asymmetric", &o->asymmetric},
                 {"v2", &o->v2},         {"f16", &o->f16},
                 {"g_idx", &o->g_idx},   {"weight_only", &o->weight_only},
                 {"fused", &o->fused},   {"head", &o->head},
                 {"shards", &o->shards}, {"beside", &o->beside},
                 {"names", &o->names},   {"bias", &o->bias},
                 {"embed", &o->embed},   {"shared", &o->shared},
                 {"tables", &o->tables}};
    const char *equals = strchr(text, '=');
    char *end = NULL;
    long value = equals ? strtol(equals + 1, &end, 10) : 0;
    if (!equals || end == equals + 1 || *end || value < -1 || value > 99999) return 0;
    size_t size = (size_t)(equals - text);
    if (size == 4 && memcmp(text, "seed", 4) == 0) {
        o->seed = (uint64_t)value;
        return 1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i].name) == size && memcmp(names[i].name, text, size) == 0) {
            *names[i].value = (int)value;
            return 1;
        }
    return 0;
}

int main(int argc, char **argv) {
    static const char *const layouts[] = {"mixed", "bf16", "gptq", "compressed-tensors",
                                          "modelopt"};
    quant_options o;
    quant_model m;
    memset(&o, 0, sizeof o);
    if (argc < 4 || strcmp(argv[1], "--help") == 0) {
        fputs(usage, argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    o.kind = -1;
    o.group = 128;
    for (int i = 0; i < 5; i++)
        if (strcmp(argv[3], layouts[i]) == 0) o.kind = i;
    if (o.kind < 0) return fail(argv[3], "no such layout");
    o.tables = 3;
    for (int i = 4; i < argc; i++)
        if (strncmp(argv[i], "target=", 7) == 0)
            o.target = argv[i] + 7;
        else if (!set(&o, argv[i]))
            return fail(argv[i], "no such NAME=NUMBER");
    if (o.fused < 0 || o.fused > 3 || (o.fused && !o.kind))
        return fail("fused", "0 to 3, and not with mixed");
    if (o.names < 0 || o.names > 2) return fail("names", "0 to 2");
    if (o.group == 0 || o.group % 32 > 0 || o.shards < 0)
        return fail("group, shards", "out of range");
    quant_make(argv[1], &o, &m);
    for (int i = 0; i < m.layer_count && (o.kind == SALA__GPTQ || !o.kind); i++) {
        const quant_layer *l = &m.layers[i];
        if (l->kind == SALA__GPTQ && o.group > 0 && (l->group != o.group || l->item.k % l->group))
            return fail(l->item.name, "its inputs are no multiple of the group");
    }
    if (mkdir(argv[2], 0777) < 0)
        return fail(argv[2], errno == EEXIST ? "is there already: remove it, or name another folder"
                                             : strerror(errno));
    quant_write(&m, argv[2], argv[1]);
    printf("%s: %d tensors of %s\n", argv[2], m.tensor_count, layouts[o.kind]);
    quant_free(&m);
    return 0;
}
