#define SALA_IMPLEMENTATION
#include "../../sala.h"
// Any bytes through the JSON parser; what it accepts must be a sound tree. The first byte may ask
// for an allocation to fail.
#include "fuzz.h"

// Every node except the root is the child of exactly one other and stands behind it: no cycle, none
// lost.
static void check_tree(const sala__json *j) {
    size_t linked = 0;
    for (size_t i = 0; i < j->node_count; i++) {
        const sala__json_node *n = &j->nodes[i];
        int count = 0;
        REQUIRE(n->type >= SALA__NULL && n->type <= SALA__OBJECT);
        for (int c = n->child; c >= 0; c = j->nodes[c].next, count++) {
            REQUIRE((size_t)c > i && (size_t)c < j->node_count);
            if (n->type == SALA__OBJECT) {
                REQUIRE(j->nodes[c].key + j->nodes[c].key_size < j->strings.size);
                REQUIRE(sala__json_key(j, c)[j->nodes[c].key_size] == 0);
            }
        }
        REQUIRE(count == n->count);
        REQUIRE(count == 0 || n->type == SALA__ARRAY || n->type == SALA__OBJECT);
        linked += (size_t)count;
        if (n->type == SALA__STRING) {
            REQUIRE(n->text + n->text_size < j->strings.size);
            REQUIRE(sala__json_text(j, (int)i)[n->text_size] == 0);
        }
        if (n->is_integer) REQUIRE(n->type == SALA__NUMBER && n->number == (double)n->integer);
        if (n->type == SALA__NUMBER) REQUIRE(!isnan(n->number));
    }
    REQUIRE(linked + 1 == j->node_count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_memory memory = {0, 0, 0};
    sala__env env = {&memory, fuzz_allocate, fuzz_log, NULL};
    sala__json j;
    sala_error err;
    if (size == 0) return 0;
    if (data[0] < 32) memory.fail_at = data[0];
    int code = sala__json_parse(&env, "fuzz", data + 1, size - 1, &j, &err);
    if (code < 0) {
        fuzz_error(code, &err);
    } else {
        check_tree(&j);
        for (int i = 0; i < (int)j.node_count; i++)
            if (j.nodes[i].type == SALA__OBJECT && j.nodes[i].child >= 0) {
                int first = j.nodes[i].child;
                const char *key = sala__json_key(&j, first);
                if (strlen(key) == j.nodes[first].key_size)
                    REQUIRE(sala__json_get(&j, i, key) >= first);
            }
        sala__json_free(&j);
    }
    REQUIRE(memory.live == 0);
    return 0;
}
