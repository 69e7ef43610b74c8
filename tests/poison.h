/*  poison.h - overwrite everything in an engine on the CPU that is not part of a sequence's history, between steps:
    whoever reads it gives NaN. Included after model.h. */
#ifndef SALA_TEST_POISON_H
#define SALA_TEST_POISON_H

HELPER void poison_fill(void *p, size_t bytes) { // all ones: NaN in FP32 and BF16, -1 as an index
    memset(p, 0xFF, bytes);
}

HELPER void poison_page_tail(sala *s,
                             const sala__sequence *q) { // what lies behind the last stored token
    const sala_dims *d = &s->config.dims;
    sala_seq seq = {0, 0, 0, q->stored, 0, 0, q->pages};
    size_t vector = (size_t)d->head_dim * sizeof(sala_act);
    int end = q->page_count * d->block;
    for (int l = 0; l < s->sparse_layers; l++)
        for (int g = 0; g < d->kv_heads; g++) {
            seq.stored = end;
            for (int u = q->stored; u < end; u++) {
                poison_fill(
                    (void *)(uintptr_t)sala__kv_at(d, NULL, &seq, s->pages[l].k, NULL, 0, g, u),
                    vector);
                poison_fill(
                    (void *)(uintptr_t)sala__kv_at(d, NULL, &seq, s->pages[l].v, NULL, 0, g, u),
                    vector);
            }
            for (int tier = 1; tier <= 2; tier++)
                for (int j = sala_tier_rows(d, tier, q->stored); j < sala_tier_rows(d, tier, end);
                     j++)
                    poison_fill(sala__tier_slot(d, &seq,
                                                tier == 1 ? s->pages[l].tier1 : s->pages[l].tier2,
                                                tier, g, j),
                                vector);
        }
}

HELPER void poison_pages(sala *s) { // all that are free
    size_t act = sizeof(sala_act);
    for (int l = 0; l < s->sparse_layers; l++)
        for (int64_t i = 0; i < s->free_page_count; i++) {
            size_t page = (size_t)s->free_pages[i];
            poison_fill(s->pages[l].k + page * s->plan.page_kv, s->plan.page_kv * act);
            poison_fill(s->pages[l].v + page * s->plan.page_kv, s->plan.page_kv * act);
            poison_fill(s->pages[l].tier1 + page * s->plan.page_tier1, s->plan.page_tier1 * act);
            poison_fill(s->pages[l].tier2 + page * s->plan.page_tier2, s->plan.page_tier2 * act);
        }
}

HELPER void poison_slot(sala *s, int slot) {
    const sala__sequence *q = &s->sequences[slot];
    size_t act = sizeof(sala_act),
           vector = (size_t)s->config.dims.lin_kv_heads * (size_t)s->config.dims.lin_dim;
    size_t pending = q->id ? (size_t)q->pending : 0;
    for (int l = 0; l < s->lightning_layers; l++) {
        size_t place = (size_t)l * (size_t)s->plan.slots + (size_t)slot;
        if (!q->id) poison_fill(s->states + place * s->plan.state, s->plan.state * 4);
        poison_fill(s->pending_k + place * s->plan.pending + pending * vector,
                    (s->plan.pending - pending * vector) * act);
        poison_fill(s->pending_v + place * s->plan.pending + pending * vector,
                    (s->plan.pending - pending * vector) * act);
    }
    if (q->id) poison_page_tail(s, q);
}

// Everything that a pass leaves behind and everything that nobody owns. Between steps nothing of it is needed.
HELPER void poison(sala *s) {
    sala__buffer b[SALA__BUFFERS];
    int n = sala__buffers(s, b);
    for (int i = 0; i < n; i++) {
        void *p = *b[i].pointer;
        int lasting =
            p == (void *)s->slopes || p == (void *)s->decay || p == (void *)s->frequency ||
            p == (void *)s->sparse_frequency || p == (void *)s->free_pages ||
            p == (void *)s->states || p == (void *)s->pending_k || p == (void *)s->pending_v ||
            p == (void *)s->sequences || p == (void *)s->page_users ||
            p == (void *)s->page_cached || p == (void *)s->prefixes || p == (void *)s->snapshots;
        if (p && !lasting) poison_fill(p, b[i].count * b[i].size);
    }
    size_t node = (size_t)s->plan.node_rows * (size_t)s->config.dims.kv_heads *
                  (size_t)s->config.dims.head_dim;
    for (int l = 0; l < s->sparse_layers; l++)
        poison_fill(s->nodes[l].k, 4 * node * sizeof(sala_act));
    poison_fill(s->cpu.scratch, s->cpu.scratch_stride * (size_t)s->cpu.threads);
    poison_pages(s);
    for (int i = 0; i < s->plan.slots; i++) poison_slot(s, i);
    for (int i = 0; i < s->plan.snapshots; i++)
        if (!s->prefixes[i].length)
            poison_fill(sala__snapshot_at(s, i, 0),
                        (size_t)s->lightning_layers * s->plan.state * 4);
}

#endif
