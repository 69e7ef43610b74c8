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
