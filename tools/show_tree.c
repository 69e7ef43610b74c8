/*  show_tree.c - `sala run --show-tree`: what was drafted in each step and what of it was right, on stderr. Included by
    main.c. On a terminal the picture has colours and stands between the pieces of the text; elsewhere it is plain.

    steps 1 to 6: no draft (nothing like it before)
    step 7 at 61: tree of 8 nodes, 3 right, 4 tokens; so far 1.43 a step
     " the"
     |-+" brave"
     | |-+" little" +" fox" -" ran"
     | `--" dog"
     `--" old"
     =" Pip"                                                                                      */

typedef struct tree_shower {
    int64_t steps, tokens, most;
    int64_t plain_from;    // the first of the latest steps without a draft; 0: there are none
    const char *plain_why; // of all of them
    const sala_event *e;
    sala *engine;
    sala_info info;
    int colours, largest, children[SALA_MAX_NODES];
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

static void tree_begin(tree_shower *t, sala *engine, const sala_request *request) {
    t->engine = engine;
    t->most = request->max_tokens ? request->max_tokens : 256;
    t->colours = isatty(STDERR_FILENO) && !getenv("NO_COLOR");
    sala_get_info(engine, &t->info);
    fprintf(stderr,
            "Steps behind the first token: the last token, what was drafted behind it (+ right, - "
            "wrong), and = what the model chose next.\n");
}

// Say which steps up to the latest one had no draft, in one line.
static void tree_plain(tree_shower *t) {
    if (!t->plain_from) return;
    cli_fresh_line();
    fprintf(stderr, "%sstep", t->colours ? "\033[1m" : "");
    if (t->plain_from < t->steps)
        fprintf(stderr, "s %lld to %lld", (long long)t->plain_from, (long long)t->steps);
    else
        fprintf(stderr, " %lld", (long long)t->steps);
    fprintf(stderr, ": no draft (%s)%s\n", t->plain_why, t->colours ? "\033[0m" : "");
    t->plain_from = 0;
}

static const char *tree_why_none(const tree_shower *t) {
    if (strncmp(t->info.spec, "off", 3) == 0) return "off";
    if (t->e->paused) return "stopped for now: such drafts have not paid";
    if (t->tokens + 2 >= t->most) return "the last token";
    return t->info.draft[0] && strncmp(t->info.spec, "auto", 4) == 0
               ? "nothing like it before; trees are not tried yet, or do not pay"
               : "nothing like it before";
}

static void tree_heading(const tree_shower *t, int right) {
    const sala_event *e = t->e;
    int64_t left = t->most - t->tokens + right; // before this step
    fprintf(stderr, "%sstep %lld at %lld: %s of %d nodes", t->colours ? "\033[1m" : "",
            (long long)t->steps, (long long)e->position,
            e->source == SALA_DRAFT_NGRAM ? "n-gram chain" : "tree", e->node_count);
    if (e->source == SALA_DRAFT_EAGLE && e->node_count < t->largest)
        fprintf(stderr, " (%s)",
                left <= SALA_MAX_PATH ? "few tokens are left" : "a smaller one pays more");
    fprintf(stderr, ", %d right, %d token%s; so far %.2f a step%s\n", right, right + 1,
            right ? "s" : "", (double)t->tokens / (double)t->steps, t->colours ? "\033[0m" : "");
}

static void tree_show(tree_shower *t, const sala_event *e) {
    int right = -1;
    cli_progress_clear();
    t->e = e;
    memset(t->children, 0, sizeof t->children);
    for (int i = 0; i < e->node_count; i++) {
        if (i) t->children[e->node_parent[i]]++;
        right += e->node_accepted[i];
    }
    const char *why = e->node_count == 1 ? tree_why_none(t) : "";
    if (t->plain_from && strcmp(why, t->plain_why) != 0) tree_plain(t);
    t->tokens += right + 1;
    t->steps++;
    if (e->node_count == 1) {
        if (!t->plain_from) t->plain_from = t->steps;
        t->plain_why = why;
        return;
    }
    if (e->node_count > t->largest) t->largest = e->node_count;
    cli_fresh_line();
    tree_heading(t, right);
    tree_branch(t, 0, "");
    tree_token(t, '=', e->token);
    putc('\n', stderr);
}
