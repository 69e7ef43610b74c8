/*  counted.h - memory whose allocations are counted and can be made to fail, for tests that include sala.h before. */
#ifndef COUNTED_H
#define COUNTED_H

typedef struct counter {
    int64_t live, bytes; // allocations that live; bytes asked for so far
    int calls, fail_at;  // the fail_at-th call fails
    int warnings, notes; // lines of the log
} counter;

static void *counting(void *user, void *pointer, size_t size) {
    counter *c = (counter *)user;
    if (size == 0) {
        c->live -= pointer != NULL;
        free(pointer);
        return NULL;
    }
    if (++c->calls == c->fail_at) return NULL;
    c->bytes += (int64_t)size;
    void *p = realloc(pointer, size);
    c->live += p && !pointer;
    return p;
}

static SALA__UNUSED void logging(void *user, int level, const char *line) {
    counter *c = (counter *)user;
    (void)line;
    if (level == SALA_LOG_WARNING)
        c->warnings++;
    else
        c->notes++;
}

#endif // COUNTED_H
