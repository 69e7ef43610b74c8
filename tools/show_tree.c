/*  show_tree.c - `sala run --show-tree`: what was drafted in each step and what of it was right, on stderr. Included by
    main.c. On a terminal the picture has colours and stands between the pieces of the text; elsewhere it is plain.

    step 7 at 61: tree of 7 nodes, 3 right, 4 tokens; so far 3.14 a step
     " the"
     |-+" brave"
     | |-+" little" +" fox" -" ran"
     | `--" dog"
     `--" old"
     =" Pip"                                                                                      */

typedef struct tree_shower {
    int column; // a line of the text is not ended
    int64_t steps, tokens;
    const sala_event *e;
    sala *engine;
    int colours, children[SALA_MAX_NODES];
} tree_shower;

// A token as it would stand in JSON, as it reads behind another one; its id where there is no tokenizer.
static void tree_token(const tree_shower *t, int mark, int32_t token) {
    const char *colour = mark == '+'   ? "\033[32m"
                         : mark == '-' ? "\033[2m"
                         : mark == '=' ? "\033[1;36m"
                                       : "";
    int32_t twice[2] = {token, token};
    size_t first = 0, both = 0;
    char *one = sala_detokenize(t->engine, twice, 1, 1, &first, NULL);
    char *two = sala_detokenize(t->engine, twice, 2, 1, &both, NULL);
    fprintf(stderr, " %s", t->colours ? colour : "");
    if (mark) putc(mark, stderr);
    if (one && two && both >= first)
        cli_json_text(stderr, two + first, both - first);
    else
        fprintf(stderr, "%d", token);
    if (t->colours && *colour) fprintf(stderr, "\033[0m");
    sala_free(t->engine, one);
    sala_free(t->engine, two);
}

// A node and all below it: single children on its line, several each on one of their own.
static void tree_branch(const tree_shower *t, int node, const char *indent) {
    const sala_event *e = t->e;
    int left;
    for (;;) {
        int child = node + 1;
        tree_token(t, !node ? 0 : e->node_accepted[node] ? '+' : '-', e->node_token[node]);
        left = t->children[node];
        if (left != 1) break;
        while (e->node_parent[child] != node) child++;
        node = child;
    }
    if (e->node_count > 1) putc('\n', stderr);
    for (int child = node + 1; left > 0; child++) {
        char deeper[4 * SALA_MAX_NODES];
        if (e->node_parent[child] != node) continue;
        left--;
        fprintf(stderr, "%s %s", indent, left ? "|-" : "`-");
        snprintf(deeper, sizeof deeper, "%.100s %s", indent, left ? "| " : "  ");
        tree_branch(t, child, deeper);
    }
}

// Do the text and the trees go to the same place?
static int tree_in_text(void) {
    struct stat out, err;
    return fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
           out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

static void tree_show(tree_shower *t, sala *engine, const sala_event *e) {
    int right = -1;
    cli_progress_clear();
    t->e = e;
    t->engine = engine;
    t->colours = isatty(STDERR_FILENO) && !getenv("NO_COLOR");
    memset(t->children, 0, sizeof t->children);
    for (int i = 0; i < e->node_count; i++) {
        if (i) t->children[e->node_parent[i]]++;
        right += e->node_accepted[i];
    }
    t->tokens += right + 1;
    if (t->column && tree_in_text()) fprintf(stderr, "\n");
    t->column = 0;
    if (++t->steps == 1)
        fprintf(stderr, "Steps: the last token, what was drafted behind it (+ right, - wrong), and "
                        "= what the model chose next.\n");
    fprintf(stderr, "%sstep %lld at %lld: ", t->colours ? "\033[1m" : "", (long long)t->steps,
            (long long)e->position);
    if (e->node_count == 1)
        fprintf(stderr, "no draft");
    else
        fprintf(stderr, "%s of %d, %d right, %d token%s; %.2f a step so far",
                e->source == SALA_DRAFT_NGRAM ? "n-gram chain" : "tree", e->node_count - 1, right,
                right + 1, right ? "s" : "", (double)t->tokens / (double)t->steps);
    fprintf(stderr, "%s\n", t->colours ? "\033[0m" : "");
    tree_branch(t, 0, "");
    tree_token(t, '=', e->token);
    putc('\n', stderr);
}
