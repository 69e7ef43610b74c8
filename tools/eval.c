/*  eval.c - `sala eval`: answers to a set of questions, scored; and the perplexity of a text.

    Part of main.c's translation unit (it reads JSON with the parser inside sala.h).

    The scores are those of the SOAR contest's script (OpenBMB/SOAR-Toolkit, eval_model.py): what is
    compared is the text after the last </think>, upper and lower case count as equal (here: of
    ASCII letters only), and

        mcq          the letter of the first "ANSWER: X", else of \boxed{\text{X}}, of \boxed{X}
        niah qa lcx  1 if any of the gold strings occurs
        cwe fwe      the share of the gold strings that occur
        any other    1 if the gold string occurs, here in the whole answer

    sala-tiny's tasks are read so: needle and needle_word are niah, freq is fwe, common is cwe, qa
    is qa; the rest, mc among them ("The answer is B." is its gold), are any other task, and where
    they give a list one of it suffices.

    A score alone hides answers that fall apart. So the report also counts answers that were exactly
    the whole `target`, answers that ended by themselves, and loops: somewhere in the answer a piece
    of 1 to 512 bytes stands at least five times in a row and fills at least 240 bytes. */

#include "cli.h"

enum {
    EVAL_TASKS = CLI_OWN,
    EVAL_PPL,
    EVAL_LIMIT,
    EVAL_ONLY,
    EVAL_OUT,
    EVAL_PARALLEL,
    EVAL_WINDOW
};

static const cli_option eval_options[] = {
    {EVAL_TASKS, "tasks", "FILE",
     "questions: JSON lines with task, question (or user), gold, target"},
    {EVAL_ONLY, "only", "TASK", "only questions of this task"},
    {EVAL_LIMIT, "limit", "N", "only the first N questions (of that task)"},
    {EVAL_OUT, "out", "FILE",
     "append each finished answer as a JSON line; a later run goes on from there; with --ppl: a "
     "line for each window"},
    {EVAL_PARALLEL, "parallel", "N", "questions in flight at once (default 8)"},
    {'n', "max-tokens", "N", "longest answer, tokens (default 256; SOAR takes 65536)"},
    {EVAL_PPL, "ppl", "FILE", "instead of tasks: the perplexity of this text"},
    {EVAL_WINDOW, "window", "N",
     "tokens of context at most, BOS included (default: the whole text if it fits)"},
    {CLI_JSON, "json", NULL, "print one JSON object instead of a table"},
    {0, NULL, NULL, NULL},
};

static const cli_command eval_command = {
    "eval",
    "eval [-m DIR] --tasks FILE [options]\n"
    "       sala eval [-m DIR] --ppl FILE [--window N] [options]\n\n"
    "Asks every question by the model's chat template, takes the likeliest token always, and\n"
    "scores the answers by the rules of the SOAR contest. Beside the score: answers equal to\n"
    "the target, answers that ended by themselves, answers caught in a loop, and lengths in\n"
    "tokens (end token included). With --ppl: nats per token, perplexity and bits per byte of a\n"
    "text. Windows do not overlap, and each begins with BOS.\n",
    eval_options,
    CLI_ENGINE,
    "  sala eval --tasks models/sala-tiny/eval_tasks.jsonl\n"
    "  sala eval --tasks questions.jsonl --only qa --limit 20 --out answers.jsonl\n"
    "  sala eval --ppl README.md --window 4096 --json\n",
};

/* ---- scoring -------------------------------------------------------------------------------- */

typedef struct eval_item {
    int index; // of its line in the tasks file, from 0
    char *task, *question;
    char *target;    // the exact answer, or NULL
    cli_buffer gold; // gold_count strings, each with its zero
    int gold_count;
    uint64_t key;    // of model and question: an old result must have the same
    int32_t *tokens; // [token_count] the prompt, while it waits
    int64_t token_count, request;
    // the result
    int done, ended;
    int64_t length; // tokens of the answer
    cli_buffer answer;
    double score;
    int exact, loop;
} eval_item;

static int eval_lower(int c) {
    return c >= 'A' && c <= 'Z' ? c + 32 : c;
}

static int eval_space(int c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

// Does `needle` occur in text[0, size), case aside?
static int eval_contains(const char *text, size_t size, const char *needle) {
    size_t n = strlen(needle);
    for (size_t at = 0; at + n <= size; at++) {
        size_t i = 0;
        while (i < n && eval_lower(text[at + i]) == eval_lower(needle[i])) i++;
        if (i == n) return 1;
    }
    return 0;
}

// The part of the answer that counts: after the last </think>, then without space around it.
static const char *eval_final(const char *text, size_t *size) {
    static const char mark[] = "</think>";
    const char *end = text + *size, *from = text;
    for (const char *p = text; (size_t)(end - p) >= strlen(mark); p++)
        if (memcmp(p, mark, strlen(mark)) == 0) from = p + strlen(mark);
    if (from != text) {
        while (from < end && eval_space((unsigned char)*from)) from++;
        while (from < end && eval_space((unsigned char)end[-1])) end--;
    }
    *size = (size_t)(end - from);
    return from;
}

// The letter after the first "ANSWER\s*:\s*" (any case) that has one of A to D there; 0: none.
static int eval_answer_letter(const char *text, size_t size) {
    static const char word[] = "answer";
    for (size_t at = 0; at + strlen(word) <= size; at++) {
        size_t i = 0;
        while (i < strlen(word) && eval_lower(text[at + i]) == word[i]) i++;
        if (i < strlen(word)) continue;
        for (i += at; i < size && eval_space((unsigned char)text[i]);) i++;
        if (i == size || text[i++] != ':') continue;
        while (i < size && eval_space((unsigned char)text[i])) i++;
        int c = i < size ? eval_lower(text[i]) : 0;
        if (c >= 'a' && c <= 'd') return c - 32;
    }
    return 0;
}

// The letter of the first `before`X`after`; 0: none. The text ends with a zero.
static int eval_boxed_letter(const char *text, const char *before, const char *after) {
    size_t n = strlen(before);
    for (const char *p = strstr(text, before); p; p = strstr(p + 1, before))
        if (p[n] >= 'A' && p[n] <= 'D' && strncmp(p + n + 1, after, strlen(after)) == 0)
            return p[n];
    return 0;
}

static int eval_letter(const char *text, size_t size) {
    int letter = eval_answer_letter(text, size);
    if (!letter) letter = eval_boxed_letter(text, "\\boxed{\\text{", "}}");
    if (!letter) letter = eval_boxed_letter(text, "\\boxed{", "}");
    return letter;
}

enum { EVAL_LETTER, EVAL_ANY, EVAL_SHARE, EVAL_OTHER }; // the four rules

static int eval_rule(const char *task) {
    static const struct {
        const char *task;
        int rule;
    } rules[] = {
        {"mcq", EVAL_LETTER},   {"niah", EVAL_ANY},        {"qa", EVAL_ANY},
        {"lcx", EVAL_ANY},      {"cwe", EVAL_SHARE},       {"fwe", EVAL_SHARE},
        {"needle", EVAL_ANY},   {"needle_word", EVAL_ANY}, {"freq", EVAL_SHARE},
        {"common", EVAL_SHARE},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (strcmp(rules[i].task, task) == 0) return rules[i].rule;
    return EVAL_OTHER;
}

static double eval_score(const eval_item *item) {
    int rule = eval_rule(item->task), hits = 0;
    size_t size = item->answer.size;
    if (!size || !item->gold_count) return 0;
    const char *text =
        rule == EVAL_OTHER ? item->answer.data : eval_final(item->answer.data, &size);
    const char *gold = item->gold.data;
    if (rule == EVAL_LETTER) {
        int letter = eval_letter(text, size);
        return letter && gold[0] && eval_lower(gold[0]) == eval_lower(letter) && !gold[1];
    }
    for (int i = 0; i < item->gold_count; i++, gold += strlen(gold) + 1)
        hits += eval_contains(text, size, gold);
    return rule == EVAL_SHARE ? (double)hits / item->gold_count : hits > 0;
}

// The rule is in the head of this file. For each period, count how far the text repeats itself.
static int eval_loops(const char *text, size_t size) {
    for (size_t period = 1; period <= 512 && period < size; period++) {
        size_t need = 5 * period > 240 ? 5 * period : 240, run = period;
        if (need > size) continue;
        for (size_t i = period; i < size; i++) {
            run = text[i] == text[i - period] ? run + 1 : period;
            if (run >= need) return 1;
        }
    }
    return 0;
}

static void eval_judge(eval_item *item) {
    item->done = 1;
    cli_append(&item->answer, "", 0);
    item->score = eval_score(item);
    item->loop = eval_loops(item->answer.data, item->answer.size);
    item->exact = item->target && item->ended && strlen(item->target) == item->answer.size &&
                  memcmp(item->target, item->answer.data, item->answer.size) == 0;
}

/* ---- questions and results as JSON lines ---------------------------------------------------- */

typedef struct eval_job {
    cli_args *args;
    const char *tasks, *only, *out, *ppl;
    int64_t limit, parallel, window, max_tokens;
    sala *engine;
    eval_item *items; // [count]
    int count;
    FILE *results; // NULL: none are kept
    int resumed;   // items whose result was there already
} eval_job;

static const sala__env eval_env = {NULL, NULL, NULL, NULL}; // the C library's allocator

static char *eval_json_copy(const sala__json *j, int node) {
    const char *text = sala__json_text(j, node);
    return text ? cli_copy(text) : NULL;
}

static void eval_add_gold(eval_item *item, const sala__json *j, int node) {
    const sala__json_node *n = sala__json_at(j, node);
    char number[32];
    const char *text = sala__json_text(j, node);
    if (n->type == SALA__NUMBER) {
        snprintf(number, sizeof number, n->is_integer ? "%.0f" : "%.15g", n->number);
        text = number;
    }
    if (!text || !*text) return; // an empty answer would be found in every text
    cli_append(&item->gold, text, strlen(text) + 1);
    item->gold_count++;
}

// What a stored answer depends on: the model folder, the settings that matter, the question.
static uint64_t eval_key(const eval_job *job, const char *question) {
    char *folder = realpath(job->args->model, NULL);
    const char *path = folder ? folder : job->args->model;
    int64_t settings[2] = {job->max_tokens, job->args->options.dense_len};
    uint64_t h = cli_hash(CLI_HASH, path, strlen(path) + 1);
    h = cli_hash(h, settings, sizeof settings);
    const char *prefill = job->args->options.prefill; // W4A4 or not changes answers
    if (prefill) h = cli_hash(h, prefill, strlen(prefill) + 1);
    h = cli_hash(h, question, strlen(question));
    free(folder);
    return h;
}

// One line of the tasks file. Returns an exit code.
static int eval_parse_task(eval_job *job, eval_item *item, const char *where, const char *line,
                           size_t size) {
    sala__json j;
    sala_error err;
    if (sala__json_parse(&eval_env, where, line, size, &j, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    int question = sala__json_get(&j, 0, "question"), gold = sala__json_get(&j, 0, "gold");
    int target = sala__json_get(&j, 0, "target");
    if (question < 0) question = sala__json_get(&j, 0, "user");
    item->task = eval_json_copy(&j, sala__json_get(&j, 0, "task"));
    item->question = eval_json_copy(&j, question);
    item->target = eval_json_copy(&j, target);
    if (sala__json_at(&j, gold)->type == SALA__ARRAY)
        for (int n = j.nodes[gold].child; n >= 0; n = j.nodes[n].next) eval_add_gold(item, &j, n);
    else
        eval_add_gold(item, &j, gold >= 0 ? gold : target);
    sala__json_free(&j);
    if (!item->task || !item->question || !item->gold_count)
        return cli_fail(CLI_FAILED,
                        "%s: needs task, question (or user) and gold (text or a list of texts)",
                        where);
    item->key = eval_key(job, item->question);
    return CLI_OK;
}

// Call `take` with every line that is not blank. Returns the first exit code that is not 0.
static int eval_lines(eval_job *job, const char *path, const cli_buffer *file,
                      int (*take)(eval_job *job, const char *where, const char *line,
                                  size_t size)) {
    size_t at = 0;
    int code = CLI_OK;
    for (int number = 1; at < file->size && code == CLI_OK; number++) {
        const char *line = file->data + at,
                   *end = (const char *)memchr(line, '\n', file->size - at);
        size_t size = end ? (size_t)(end - line) : file->size - at, blank = 0;
        char where[512];
        snprintf(where, sizeof where, "%.480s:%d", path, number);
        while (blank < size && eval_space((unsigned char)line[blank])) blank++;
        if (blank < size) code = take(job, where, line, size);
        at += size + 1;
    }
    return code;
}

static int eval_take_task(eval_job *job, const char *where, const char *line, size_t size) {
    job->items = (eval_item *)cli_resize(job->items, ((size_t)job->count + 1) * sizeof *job->items);
    eval_item *item = &job->items[job->count];
    memset(item, 0, sizeof *item);
    item->index = job->count++;
    return eval_parse_task(job, item, where, line, size);
}

static void eval_free_item(eval_item *item) {
    free(item->task);
    free(item->question);
    free(item->target);
    free(item->tokens);
    cli_free(&item->gold);
    cli_free(&item->answer);
}

// Keep what --only and --limit leave; indices stay those of the file.
static void eval_select(eval_job *job) {
    int kept = 0;
    for (int i = 0; i < job->count; i++) {
        int wanted = (!job->only || strcmp(job->items[i].task, job->only) == 0) &&
                     (!job->limit || kept < job->limit);
        if (wanted)
            job->items[kept++] = job->items[i];
        else
            eval_free_item(&job->items[i]);
    }
    job->count = kept;
}

static int eval_load_tasks(eval_job *job) {
    cli_buffer file = {0};
    int code = cli_read_file(job->tasks, &file);
    if (code == CLI_OK) code = eval_lines(job, job->tasks, &file, eval_take_task);
    cli_free(&file);
    if (code != CLI_OK) return code;
    eval_select(job);
    if (job->count == 0)
        return cli_fail(CLI_FAILED, "%s: no questions%s%s", job->tasks,
                        job->only ? " of task " : "", job->only ? job->only : "");
    return CLI_OK;
}

// One line of an earlier run's results.
static int eval_take_result(eval_job *job, const char *where, const char *line, size_t size) {
    sala__json j;
    sala_error err;
    char key[32];
    if (sala__json_parse(&eval_env, where, line, size, &j, &err) < 0)
        return cli_fail(CLI_FAILED, "%s", err.text);
    int index = sala__json_get(&j, 0, "index"), answer = sala__json_get(&j, 0, "answer"),
        code = CLI_OK;
    for (int i = 0; i < job->count; i++) {
        eval_item *item = &job->items[i];
        if (item->done || index < 0 || item->index != (int)j.nodes[index].integer) continue;
        snprintf(key, sizeof key, "%016llx", (unsigned long long)item->key);
        if (answer < 0 || !sala__json_is(&j, sala__json_get(&j, 0, "key"), key)) {
            code = cli_fail(
                CLI_FAILED,
                "%s: a result of another model, question or setting: give --out another file",
                where);
            break;
        }
        item->ended = sala__json_is(&j, sala__json_get(&j, 0, "finish_reason"), "stop");
        item->length = sala__json_at(&j, sala__json_get(&j, 0, "tokens"))->integer;
        cli_append(&item->answer, j.strings.data + j.nodes[answer].text, j.nodes[answer].text_size);
        eval_judge(item);
        job->resumed++;
    }
    sala__json_free(&j);
    return code;
}

// Read what --out holds, cut off a last line that was not finished, and open it for more.
static int eval_open_results(eval_job *job) {
    struct stat st;
    cli_buffer file = {0};
    int code = CLI_OK;
    if (!job->out) return CLI_OK;
    if (stat(job->out, &st) == 0 && S_ISREG(st.st_mode)) {
        code = cli_read_file(job->out, &file);
        size_t whole = file.size;
        while (whole && file.data[whole - 1] != '\n') whole--;
        if (code == CLI_OK && whole < file.size && truncate(job->out, (off_t)whole) != 0)
            code = cli_fail(CLI_OUTPUT, "%s: cannot truncate: %s", job->out, strerror(errno));
        file.size = whole;
        if (code == CLI_OK) code = eval_lines(job, job->out, &file, eval_take_result);
    }
    cli_free(&file);
    if (code != CLI_OK) return code;
    job->results = fopen(job->out, "a");
    return job->results ? CLI_OK
                        : cli_fail(CLI_OUTPUT, "%s: cannot write: %s", job->out, strerror(errno));
}

static int eval_write_result(eval_job *job, const eval_item *item) {
    FILE *f = job->results;
    if (!f) return CLI_OK;
    fprintf(f, "{\"index\": %d, \"key\": \"%016llx\", \"task\": ", item->index,
            (unsigned long long)item->key);
    cli_json_text(f, item->task, strlen(item->task));
    fprintf(f,
            ", \"score\": %.6g, \"exact\": %s, \"loop\": %s, \"finish_reason\": \"%s\", "
            "\"tokens\": %lld, \"answer\": ",
            item->score, item->exact ? "true" : "false", item->loop ? "true" : "false",
            item->ended ? "stop" : "length", (long long)item->length);
    cli_json_text(f, item->answer.data, item->answer.size);
    fprintf(f, "}\n");
    if (fflush(f) == 0 && !ferror(f)) return CLI_OK;
    return cli_fail(CLI_OUTPUT, "%s: cannot write: %s", job->out, strerror(errno));
}

/* ---- asking --------------------------------------------------------------------------------- */

// Make the prompts of what is still to be asked, and see that each fits. Returns an exit code.
static int eval_prompts(eval_job *job) {
    sala_error err;
    sala_info info;
    sala_get_info(job->engine, &info);
    for (int i = 0; i < job->count; i++) {
        eval_item *item = &job->items[i];
        if (item->done) continue;
        int32_t *tokens;
        int64_t n = sala_chat_turn(job->engine, "user", item->question, strlen(item->question), 1,
                                   1, &tokens, &err);
        if (n < 0) return cli_fail(CLI_FAILED, "%s", err.text);
        item->token_count = n;
        item->tokens = (int32_t *)cli_resize(NULL, (size_t)n * sizeof *tokens);
        memcpy(item->tokens, tokens, (size_t)n * sizeof *tokens);
        sala_free(job->engine, tokens);
        if (n + job->max_tokens > info.context)
            return cli_fail(CLI_FAILED,
                            "question %d: %lld tokens and an answer of %lld do not fit the context "
                            "of %lld: set --context or "
                            "--max-tokens",
                            item->index, (long long)n, (long long)job->max_tokens,
                            (long long)info.context);
    }
    return CLI_OK;
}

static int eval_submit(eval_job *job, eval_item *item) {
    sala_request request = job->args->request;
    sala_error err;
    request.tokens = item->tokens;
    request.token_count = item->token_count;
    request.max_tokens = job->max_tokens;
    item->request = sala_submit(job->engine, &request, &err);
    free(item->tokens);
    item->tokens = NULL;
    return item->request < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

// Take over an event; *finished counts the answers that are complete. Returns an exit code.
static int eval_event(eval_job *job, const sala_event *e, int *finished) {
    eval_item *item = job->items;
    while (item->request != e->request) item++;
    if (e->type != SALA_EVENT_TOKEN && e->type != SALA_EVENT_FINISH) return CLI_OK;
    cli_append(&item->answer, e->text, e->text_bytes);
    if (e->type == SALA_EVENT_TOKEN) return CLI_OK;
    if (e->finish_reason != SALA_FINISH_STOP && e->finish_reason != SALA_FINISH_LENGTH)
        return cli_fail(CLI_FAILED, "question %d could not be answered (%s)", item->index,
                        e->finish_reason == SALA_FINISH_NAN
                            ? "the logits are not numbers: the weights are damaged"
                            : "the K/V cache is too small: raise --kv-tokens");
    item->ended = e->finish_reason == SALA_FINISH_STOP;
    item->length = e->timings.output_tokens;
    eval_judge(item);
    ++*finished;
    return eval_write_result(job, item);
}

// Keep `parallel` questions in flight until all are answered. Returns an exit code.
static int eval_ask(eval_job *job) {
    sala_error err;
    sala_event e;
    int next = 0, finished = 0, active = 0, code = CLI_OK, total = job->count - job->resumed;
    double start = cli_now();
    char what[96];
    while (code == CLI_OK && finished < total) {
        for (; next < job->count && active < job->parallel && code == CLI_OK; next++) {
            if (job->items[next].done) continue;
            code = eval_submit(job, &job->items[next]);
            active++;
        }
        if (code == CLI_OK && sala_step(job->engine, &err) < 0)
            code = cli_fail(CLI_FAILED, "%s", err.text);
        int before = finished;
        while (code == CLI_OK && sala_next_event(job->engine, &e))
            code = eval_event(job, &e, &finished);
        active -= finished - before;
        snprintf(what, sizeof what, "%d of %d answers", finished + job->resumed, job->count);
        cli_progress_since(what, (double)finished / total, start);
        if (cli_signal && code == CLI_OK) code = 128 + (int)cli_signal;
    }
    cli_progress_clear();
    if (code > 128)
        cli_fail(0, "interrupted with %d of %d answers%s", finished + job->resumed, job->count,
                 job->out ? "; the same command goes on from there" : "");
    return code;
}

/* ---- the report ----------------------------------------------------------------------------- */

typedef struct eval_row { // sums over the questions of a task
    const char *task;
    int n, targets, exact, ended, loops;
    double score;
    int64_t length, longest;
} eval_row;

static void eval_add(eval_row *row, const eval_item *item) {
    row->n++;
    row->score += item->score;
    row->targets += item->target != NULL;
    row->exact += item->exact;
    row->ended += item->ended;
    row->loops += item->loop;
    row->length += item->length;
    if (item->length > row->longest) row->longest = item->length;
}

// Fill a row for each task in the order of appearance, and one for all of them at the end. Returns
// the count.
static int eval_rows(const eval_job *job, eval_row **rows) {
    eval_row all = {"all", 0, 0, 0, 0, 0, 0, 0, 0};
    eval_row *r = (eval_row *)cli_resize(NULL, ((size_t)job->count + 1) * sizeof *r);
    int count = 0;
    for (int i = 0; i < job->count; i++) {
        const eval_item *item = &job->items[i];
        int at = 0;
        while (at < count && strcmp(r[at].task, item->task) != 0) at++;
        if (at == count) {
            memset(&r[count], 0, sizeof *r);
            r[count++].task = item->task;
        }
        eval_add(&r[at], item);
        eval_add(&all, item);
    }
    r[count++] = all;
    *rows = r;
    return count;
}

static void eval_print_table(const eval_row *rows, int count) {
    char exact[32];
    printf("%-16s %5s %7s %7s %7s %6s %9s %8s\n", "task", "n", "score", "exact", "ended", "loops",
           "mean len", "longest");
    for (int i = 0; i < count; i++) {
        const eval_row *r = &rows[i];
        snprintf(exact, sizeof exact, "-");
        if (r->targets) snprintf(exact, sizeof exact, "%.1f%%", 100.0 * r->exact / r->targets);
        printf("%-16s %5d %6.1f%% %7s %6.1f%% %6d %9.1f %8lld\n", r->task, r->n,
               100 * r->score / r->n, exact, 100.0 * r->ended / r->n, r->loops,
               (double)r->length / r->n, (long long)r->longest);
    }
}

static void eval_print_json(const eval_row *rows, int count) {
    for (int i = 0; i < count; i++) {
        const eval_row *r = &rows[i];
        printf(i == count - 1 ? "}, " : i ? ", " : "{\"tasks\": {");
        cli_json_text(stdout, r->task, strlen(r->task));
        printf(": {\"n\": %d, \"score\": %.6g, \"exact\": ", r->n, r->score / r->n);
        cli_json_number(stdout, r->targets ? (double)r->exact / r->targets : NAN);
        printf(", \"ended\": %.6g, \"loops\": %d, \"mean_tokens\": %.6g, \"longest\": %lld}",
               (double)r->ended / r->n, r->loops, (double)r->length / r->n, (long long)r->longest);
    }
}

static void eval_report(const eval_job *job, double seconds) {
    eval_row *rows;
    int count = eval_rows(job, &rows);
    double ori = 100 * rows[count - 1].score / rows[count - 1].n;
    double overall = fmin(round(ori / 80 * 10000) / 100, 100);
    if (job->args->json) {
        eval_print_json(rows, count);
        printf(", \"ori\": %.4f, \"overall\": %.2f, \"resumed\": %d, \"seconds\": %.3f, "
               "\"max_tokens\": %lld, \"model\": ",
               ori, overall, job->resumed, seconds, (long long)job->max_tokens);
        cli_json_text(stdout, job->args->model, strlen(job->args->model));
        printf("}\n");
    } else {
        eval_print_table(rows, count);
        printf("\nori %.2f (100 x mean score), overall %.2f (of 80, at most 100)\n", ori, overall);
        printf("%d answers in %.1f s", job->count - job->resumed, seconds);
        printf(job->resumed ? ", %d from an earlier run\n" : "\n", job->resumed);
    }
    free(rows);
}

/* ---- perplexity ----------------------------------------------------------------------------- */

static double eval_nats(const float *logits, int vocab,
                        int32_t token) { // -log softmax(logits)[token]
    double most = (double)logits[0], sum = 0;
    for (int i = 1; i < vocab; i++) most = fmax(most, (double)logits[i]);
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - most);
    return most + log(sum) - (double)logits[token];
}

// One window of tokens; adds to *nats what its tokens after the first cost. Returns an exit code.
static int eval_window(eval_job *job, const int32_t *tokens, int64_t count, double *nats) {
    sala_request request = job->args->request;
    sala_error err;
    sala_event e;
    sala_info info;
    int step;
    sala_get_info(job->engine, &info);
    request.tokens = tokens;
    request.token_count = count;
    request.max_tokens = 1;
    request.want_rows = SALA_ROWS_PROMPT;
    if (sala_submit(job->engine, &request, &err) < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    while ((step = sala_step(job->engine, &err)) > 0) {
        while (sala_next_event(job->engine, &e)) {
            if (e.type != SALA_EVENT_ROWS) continue;
            for (int r = 0; r < e.row_count && e.first_position + r + 1 < count; r++)
                *nats += eval_nats(e.logits + (size_t)r * (size_t)info.vocab, info.vocab,
                                   tokens[e.first_position + r + 1]);
        }
        if (cli_signal) return 128 + (int)cli_signal;
    }
    return step < 0 ? cli_fail(CLI_FAILED, "%s", err.text) : CLI_OK;
}

static void eval_print_ppl(const eval_job *job, double nats, int64_t tokens, int64_t windows,
                           size_t bytes) {
    double mean = nats / (double)tokens, bits = nats / log(2.0) / (double)bytes;
    if (job->args->json) {
        printf("{\"tokens\": %lld, \"bytes\": %zu, \"windows\": %lld, \"nats_per_token\": ",
               (long long)tokens, bytes, (long long)windows);
        cli_json_number(stdout, mean);
        printf(", \"ppl\": ");
        cli_json_number(stdout, exp(mean));
        printf(", \"bits_per_byte\": ");
        cli_json_number(stdout, bits);
        printf("}\n");
    } else {
        printf("tokens          %lld (in %lld window%s, %zu bytes)\n", (long long)tokens,
               (long long)windows, windows == 1 ? "" : "s", bytes);
        printf("nats per token  %.4f\nperplexity      %.4f\nbits per byte   %.4f\n", mean,
               exp(mean), bits);
    }
}

// The line of one window in --out, so that two models can be compared window by window.
static int eval_write_window(eval_job *job, int64_t window, int64_t tokens, double nats) {
    if (!job->results) return CLI_OK;
    fprintf(job->results, "{\"window\": %lld, \"tokens\": %lld, \"nats\": %.17g}\n",
            (long long)window, (long long)tokens, nats);
    if (fflush(job->results) == 0 && !ferror(job->results)) return CLI_OK;
    return cli_fail(CLI_OUTPUT, "%s: cannot write: %s", job->out, strerror(errno));
}

static int eval_ppl(eval_job *job, const cli_buffer *text) {
    sala_error err;
    sala_info info;
    int32_t *tokens = NULL, *window;
    int64_t n = sala_tokenize(job->engine, text->data, text->size, SALA_ADD_BOS, &tokens, &err);
    int64_t bos, scored = 0, windows = 0, at;
    int code = CLI_OK;
    double nats = 0, start = cli_now();
    if (n < 0) return cli_fail(CLI_FAILED, "%s", err.text);
    sala_get_info(job->engine, &info);
    bos = n > 0 && info.bos >= 0 && tokens[0] == info.bos;
    at = bos; // of the next text token; a window is BOS and window - bos of them
    int64_t size = job->window ? job->window : info.context - 1;
    if (size < 2) {
        sala_free(job->engine, tokens);
        return cli_fail(CLI_USAGE, "--context: perplexity needs a context of at least 3 tokens");
    }
    window = (int32_t *)cli_resize(NULL, (size_t)size * sizeof *window);
    while (code == CLI_OK && at < n) {
        int64_t part = n - at < size - bos ? n - at : size - bos;
        if (bos) window[0] = info.bos;
        memcpy(window + bos, tokens + at, (size_t)part * sizeof *window);
        double before = nats;
        code = eval_window(job, window, part + bos, &nats);
        if (code == CLI_OK) code = eval_write_window(job, windows, part + bos - 1, nats - before);
        scored += part + bos - 1;
        windows++;
        at += part;
        cli_progress_since("perplexity", (double)at / (double)n, start);
    }
    cli_progress_clear();
    free(window);
    sala_free(job->engine, tokens);
    if (code == CLI_OK && scored < 1)
        code = cli_fail(CLI_FAILED, "%s: the text is too short to score", job->ppl);
    if (code == CLI_OK) eval_print_ppl(job, nats, scored, windows, text->size);
    return code;
}

/* ---- the command ---------------------------------------------------------------------------- */

static int eval_arguments(cli_args *a, eval_job *job) { // returns 0, or -1: return a->code
    int id = 0, code = CLI_OK;
    sala_error err;
    while (code == CLI_OK && (id = cli_next(a)) > 0) {
        switch (id) {
        case EVAL_TASKS: job->tasks = a->value; break;
        case EVAL_PPL: job->ppl = a->value; break;
        case EVAL_ONLY: job->only = a->value; break;
        case EVAL_OUT: job->out = a->value; break;
        case EVAL_LIMIT: code = cli_integer("limit", a->value, 1, INT32_MAX, &job->limit); break;
        case EVAL_PARALLEL: code = cli_integer("parallel", a->value, 1, 256, &job->parallel); break;
        case EVAL_WINDOW: code = cli_integer("window", a->value, 2, 1 << 30, &job->window); break;
        default:
            if (sala_set_request(&a->request, "max-tokens", a->value, &err) == 0) break;
            code = cli_fail(CLI_USAGE, "--%s", err.text);
        }
    }
    if (code == CLI_OK && id < 0) return -1;
    if (code == CLI_OK && !job->tasks == !job->ppl)
        code = cli_fail(CLI_USAGE, "eval needs either --tasks FILE or --ppl FILE");
    if (code == CLI_OK && job->out && !*job->out)
        code = cli_fail(CLI_USAGE, "--out: the name is empty");
    if (code == CLI_OK && job->window && !job->ppl)
        code = cli_fail(CLI_USAGE, "--window belongs to --ppl");
    if (code == CLI_OK && job->ppl && (job->only || job->limit))
        code = cli_fail(CLI_USAGE, "--only and --limit belong to --tasks");
    if (a->request.max_tokens) job->max_tokens = a->request.max_tokens;
    a->code = code;
    return code == CLI_OK ? 0 : -1;
}

static int eval_close_results(eval_job *job, int code) { // returns the exit code so far, or its own
    if (job->results && fclose(job->results) != 0 && code == CLI_OK)
        code = cli_fail(CLI_OUTPUT, "%s: cannot finish: %s", job->out, strerror(errno));
    return code;
}

static int eval_run_tasks(cli_args *a, eval_job *job) {
    char room[4096];
    double start;
    int code;
    a->model =
        cli_model_path(a->model, room); // the keys of results need it before the model is open
    if (!a->model) return CLI_FAILED;
    if (a->options.max_sequences < (int)job->parallel)
        a->options.max_sequences = (int)job->parallel;
    code = eval_load_tasks(job);
    if (code == CLI_OK) code = eval_open_results(job);
    if (code == CLI_OK && (job->engine = cli_open(a)) == NULL) code = a->code;
    if (code == CLI_OK) code = eval_prompts(job);
    start = cli_now();
    if (code == CLI_OK) code = eval_ask(job);
    if (code == CLI_OK) eval_report(job, cli_now() - start);
    return eval_close_results(job, code);
}

static int eval_run_ppl(cli_args *a, eval_job *job) {
    cli_buffer text = {0};
    int code = cli_read_file(job->ppl, &text);
    // Rows of logits are wanted for a whole chunk: a small one keeps them small and changes no bit
    // of them.
    if (!a->options.chunk) a->options.chunk = 512;
    if (!a->options.max_sequences) a->options.max_sequences = 1;
    if (!a->options.context && job->window) a->options.context = job->window + 1;
    a->options.logits_rows = a->options.chunk;
    if (!a->options.reuse) a->options.reuse = "off"; // every row is to be computed
    if (code == CLI_OK && job->out && (job->results = fopen(job->out, "w")) == NULL)
        code = cli_fail(CLI_OUTPUT, "%s: cannot write: %s", job->out, strerror(errno));
    if (code == CLI_OK && (job->engine = cli_open(a)) == NULL) code = a->code;
    if (code == CLI_OK) code = eval_ppl(job, &text);
    cli_free(&text);
    return eval_close_results(job, code);
}

static int sala_eval(int argc, char **argv) {
    cli_args a;
    eval_job job;
    memset(&job, 0, sizeof job);
    job.args = &a;
    job.parallel = 8;
    job.max_tokens = 256;
    cli_start(&a, &eval_command, argc, argv);
    if (eval_arguments(&a, &job) == 0)
        a.code = job.tasks ? eval_run_tasks(&a, &job) : eval_run_ppl(&a, &job);
    for (int i = 0; i < job.count; i++) eval_free_item(&job.items[i]);
    free(job.items);
    sala_close(job.engine);
    cli_end(&a);
    return a.code;
}
