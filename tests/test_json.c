#define SALA_IMPLEMENTATION
#include "../sala.h"
// The JSON parser: what it takes, what it refuses, and that numbers are the nearest double.
#include "check.h"
#include "counted.h"
#include <locale.h>

static sala__env env; // no hooks

static int parse(const char *text, size_t size, sala__json *j, sala_error *err) {
    return sala__json_parse(&env, "test.json", text, size, j, err);
}

static void accepts(void) {
    static const char *const texts[] = {
        "null",
        "true",
        "false",
        "0",
        "-0",
        "1",
        "-1.5e+3",
        "1E5",
        "1e-5",
        "0.0",
        "0e0",
        "0E+0",
        "\"\"",
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        "{\"\":0}",
        "{\"a\":{\"b\":[1,2,{\"c\":null}]}}",
        " \t\r\n1 \t\r\n",
        "[1 , 2]",
        "{ \"a\" : 1 , \"b\" : 2 }",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
        "\"\\u0041\"",
        "\"\\uD834\\uDD1E\"",
        "\"\\uD800\"",
        "\"\\uDC00x\"",
        "\"\x7f\"",
        "\"\xff\xfe\"",
        "{\"a\":1,\"a\":2}",
        "123456789012345678901234567890",
        "1e400",
        "-1e400",
        "1e-400",
        "1e99999999999999999999",
        "[0.1,0.2]",
        "\"\xe2\x82\xac\"",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        sala__json j;
        sala_error err;
        int code = parse(texts[i], strlen(texts[i]), &j, &err);
        CHECK(code == 0, "%s: %s", texts[i], err.text);
        if (code == 0) sala__json_free(&j);
    }
}

static void refuses(void) {
    static const struct {
        const char *text, *message;
        size_t at;
    } cases[] = {
        {"", "the text ends too early", 0},
        {"  ", "the text ends too early", 2},
        {"nul", "expected a value", 0},
        {"nulll", "text after the end", 4},
        {"True", "expected a value", 0},
        {"NaN", "expected a value", 0},
        {"Infinity", "expected a value", 0},
        {"-Infinity", "needs digits", 1},
        {"+1", "expected a value", 0},
        {"-", "needs digits", 1},
        {"01", "leading zero", 2},
        {"-01", "leading zero", 3},
        {"00", "leading zero", 2},
        {".5", "expected a value", 0},
        {"1.", "needs digits", 2},
        {"1.e5", "needs digits", 2},
        {"1e", "exponent needs digits", 2},
        {"1e+", "exponent needs digits", 3},
        {"0x10", "text after the end", 1},
        {"1 2", "text after the end", 2},
        {"1,", "text after the end", 1},
        {"[", "the text ends too early", 1},
        {"[1", "expected ',' or ']'", 2},
        {"[1,", "the text ends too early", 3},
        {"[1,]", "expected a value", 3},
        {"[,1]", "expected a value", 1},
        {"[1 2]", "expected ',' or ']'", 3},
        {"[1}", "expected ',' or ']'", 2},
        {"]", "expected a value", 0},
        {"{", "expected a key", 1},
        {"{\"a\"", "expected ':'", 4},
        {"{\"a\" 1}", "expected ':'", 5},
        {"{\"a\":}", "expected a value", 5},
        {"{\"a\":1,}", "expected a key", 7},
        {"{a:1}", "expected a key", 1},
        {"{1:1}", "expected a key", 1},
        {"{'a':1}", "expected a key", 1},
        {"{\"a\":1 \"b\":2}", "expected ',' or '}'", 7},
        {"'a'", "expected a value", 0},
        {"\"", "ends inside a string", 1},
        {"\"abc", "ends inside a string", 4},
        {"\"\\", "ends inside a string", 2},
        {"\"\\\"", "ends inside a string", 3},
        {"\"\\x41\"", "unknown escape", 2},
        {"\"\\a\"", "unknown escape", 2},
        {"\"\\u12\"", "four hex digits", 3},
        {"\"\\u12G4\"", "four hex digits", 3},
        {"\"\\u\"", "four hex digits", 3},
        {"\"\\uD800\\u12\"", "four hex digits", 9},
        {"\"a\nb\"", "control character", 2},
        {"\"a\tb\"", "control character", 2},
        {"\"\x1f\"", "control character", 1},
        {"[1]x", "text after the end", 3},
        {"/* c */1", "expected a value", 0},
        {"1//", "text after the end", 1},
        {"\xef\xbb\xbf"
         "1",
         "expected a value", 0}, // a byte order mark is not white space
        {"\xa0"
         "1",
         "expected a value", 0},
        {"\f1", "expected a value", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sala__json j;
        sala_error err = {0, ""};
        char at[64];
        int code = parse(cases[i].text, strlen(cases[i].text), &j, &err);
        snprintf(at, sizeof at, "test.json: not valid JSON at byte %zu: ", cases[i].at);
        CHECK(code == SALA_E_FILE && err.code == code, "%s gives %d", cases[i].text, code);
        CHECK(strncmp(err.text, at, strlen(at)) == 0 && strstr(err.text, cases[i].message),
              "%s: %s, expected %s...%s", cases[i].text, err.text, at, cases[i].message);
        CHECK(code == 0 || (j.nodes == NULL && j.strings.data == NULL), "%s leaks", cases[i].text);
        if (code == 0) sala__json_free(&j);
    }
}

// Every prefix of a valid text is refused and nothing beyond it is read (the copy has no room to
// spare, so that a sanitizer sees it).
static void prefixes(void) {
    static const char text[] =
        "{\"k\\u00e9\\uD834\\uDD1E\":[-12.5e-3,true,false,null,\"a\\n\"],\"z\":{\"y\":[[]]}}";
    for (size_t n = 0; n < sizeof text; n++) {
        char *copy = (char *)malloc(n ? n : 1);
        sala__json j;
        sala_error err;
        memcpy(copy, text, n);
        int code = parse(copy, n, &j, &err);
        CHECK((code == 0) == (n == sizeof text - 1), "prefix of %zu bytes: %d", n, code);
        if (code == 0) sala__json_free(&j);
        free(copy);
    }
}

static void zero_bytes(void) {
    sala__json j;
    sala_error err;
    CHECK(parse("1\0", 2, &j, &err) == SALA_E_FILE && strstr(err.text, "text after the end"), "%s",
          err.text);
    CHECK(parse("\0", 1, &j, &err) == SALA_E_FILE, "%s", err.text);
    CHECK(parse("\"a\0b\"", 5, &j, &err) == SALA_E_FILE && strstr(err.text, "control character"),
          "%s", err.text);
    static const char text[] = "{\"a\\u0000b\":\"c\\u0000d\",\"a\":5}";
    CHECK(parse(text, sizeof text - 1, &j, &err) == 0, "%s", err.text);
    int first = j.nodes[0].child;
    CHECK(j.nodes[first].key_size == 3 && memcmp(sala__json_key(&j, first), "a\0b", 4) == 0, "key");
    CHECK(j.nodes[first].text_size == 3 && memcmp(sala__json_text(&j, first), "c\0d", 4) == 0,
          "text");
    CHECK(!sala__json_is(&j, first, "c"), "a string is not its part before a zero byte");
    int a = sala__json_get(&j, 0, "a");
    CHECK(a >= 0 && a != first && j.nodes[a].integer == 5, "nor is a key");
    sala__json_free(&j);
}

static void strings(void) {
    static const struct {
        const char *text, *value;
    } cases[] = {
        {"\"\"", ""},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t"},
        {"\"\\u0041\\u007f\\u0080\\u07ff\\u0800\\uffff\"",
         "A\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf"},
        {"\"\\ud834\\udd1e\"", "\xf0\x9d\x84\x9e"},
        {"\"\\uD800\\uDC00\"", "\xf0\x90\x80\x80"},
        {"\"\\uDBFF\\uDFFF\"", "\xf4\x8f\xbf\xbf"},
        {"\"\\ud800\"", "\xef\xbf\xbd"},      // alone
        {"\"\\udc00\"", "\xef\xbf\xbd"},      // low alone
        {"\"\\ud800x\"", "\xef\xbf\xbdx"},    // not followed by an escape
        {"\"\\ud800\\n\"", "\xef\xbf\xbd\n"}, // by another escape
        {"\"\\ud800\\u0041\"", "\xef\xbf\xbd"
                               "A"},                                   // by another character
        {"\"\\ud800\\ud834\\udd1e\"", "\xef\xbf\xbd\xf0\x9d\x84\x9e"}, // by a pair
        {"\"\\udd1e\\ud834\"", "\xef\xbf\xbd\xef\xbf\xbd"},            // the wrong way round
        {"\"a\xc3\xa9\xf0\x9f\x98\x80z\"", "a\xc3\xa9\xf0\x9f\x98\x80z"},
        {"\"\xff\"", "\xff"}, // bytes pass as they are: file names and tokens need not be UTF-8
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sala__json j;
        sala_error err;
        int code = parse(cases[i].text, strlen(cases[i].text), &j, &err);
        CHECK(code == 0, "%s: %s", cases[i].text, err.text);
        if (code < 0) continue;
        CHECK(sala__json_is(&j, 0, cases[i].value), "%s gives \"%s\"", cases[i].text,
              sala__json_text(&j, 0));
        CHECK(j.nodes[0].text_size == strlen(cases[i].value), "%s: %zu bytes", cases[i].text,
              j.nodes[0].text_size);
        sala__json_free(&j);
    }
}

static void structure(void) {
    static const char text[] = "{\"a\":[1,[2,3],{}],\"b\":{\"c\":\"x\"},\"a\":7,\"d\":null}";
    sala__json j;
    sala_error err;
    CHECK(parse(text, sizeof text - 1, &j, &err) == 0, "%s", err.text);
    CHECK(j.nodes[0].type == SALA__OBJECT && j.nodes[0].count == 4, "root");
    int list = j.nodes[0].child;
    CHECK(j.nodes[list].type == SALA__ARRAY && j.nodes[list].count == 3, "list");
    int inner = j.nodes[j.nodes[list].child].next;
    CHECK(j.nodes[inner].count == 2 && j.nodes[j.nodes[inner].child].integer == 2, "inner list");
    CHECK(j.nodes[j.nodes[inner].next].type == SALA__OBJECT &&
              j.nodes[j.nodes[inner].next].child == -1,
          "empty");
    CHECK(sala__json_at(&j, sala__json_get(&j, 0, "a"))->integer == 7,
          "the last of equal keys counts");
    CHECK(sala__json_is(&j, sala__json_get(&j, sala__json_get(&j, 0, "b"), "c"), "x"), "b.c");
    CHECK(sala__json_get(&j, 0, "d") >= 0 &&
              sala__json_at(&j, sala__json_get(&j, 0, "d"))->type == SALA__NULL,
          "null");
    // Walking on from what is not there.
    CHECK(sala__json_get(&j, 0, "e") == -1 && sala__json_get(&j, -1, "a") == -1 &&
              sala__json_get(&j, list, "a") == -1,
          "get");
    CHECK(sala__json_text(&j, -1) == NULL && sala__json_text(&j, 0) == NULL &&
              !sala__json_is(&j, -1, ""),
          "text");
    sala__json_free(&j);
    sala__json_free(&j); // twice is fine
}

static void depth(void) {
    for (int kind = 0; kind < 2; kind++) {
        for (int n = 1; n <= 10000; n = n < 70 ? n + 1 : n + 993) {
            sala__json j;
            sala_error err;
            sala__string s = {NULL, 0, 0};
            for (int i = 0; i < n; i++)
                sala__append(&env, &s, kind ? "{\"a\":" : "[", kind ? 5 : 1, NULL);
            if (kind) sala__append(&env, &s, "0", 1, NULL);
            for (int i = 0; i < n; i++) sala__append(&env, &s, kind ? "}" : "]", 1, NULL);
            int code = parse(s.data, s.size, &j, &err);
            int limit = kind ? SALA__JSON_DEPTH
                             : SALA__JSON_DEPTH + 1; // levels below the root; the 0 is one
            CHECK((code == 0) == (n <= limit), "%d levels of %s: %d", n, kind ? "{" : "[", code);
            CHECK(code == 0 || strstr(err.text, "nested too deeply"), "%s", err.text);
            if (code == 0) sala__json_free(&j);
            sala__release(&env, s.data);
        }
    }
}

static void one_number(const char *text) {
    sala__json j;
    sala_error err;
    int code = parse(text, strlen(text), &j, &err);
    CHECK(code == 0, "%.100s: %s", text, err.text);
    if (code < 0) return;
    double want = strtod(text, NULL);
    CHECK(memcmp(&j.nodes[0].number, &want, 8) == 0, "%.100s gives %.17g, not %.17g", text,
          j.nodes[0].number, want);
    int integer = strspn(text, "-0123456789") == strlen(text);
    errno = 0;
    long long value = strtoll(text, NULL, 10);
    if (integer && errno == 0 && value != LLONG_MIN) {
        CHECK(j.nodes[0].is_integer && j.nodes[0].integer == value, "%.100s gives %lld", text,
              (long long)j.nodes[0].integer);
    } else {
        CHECK(!j.nodes[0].is_integer, "%.100s is no 64-bit integer", text);
    }
    sala__json_free(&j);
}

static void numbers(void) {
    static const char *const texts[] = {
        "0",
        "-0",
        "0.0",
        "-0.0",
        "1e-06",
        "0.1",
        "1e22",
        "1e23",
        "9007199254740993",
        "9007199254740993.0",
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775807",
        "-9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "100000000000000000000",
        "1.7976931348623157e308",
        "1.7976931348623159e308",
        "1e309",
        "-1e309",
        "4.9e-324",
        "2.4703282292062327e-324",
        "2.4703282292062328e-324",
        "2.2250738585072011e-308",
        "2.2250738585072014e-308",
        "1e-400",
        "123e-400",
        "0e99999",
        "0e999999999999",
        "1e99999999999",
        "1e-99999999999",
        "0.000000000000000000000000000000000000000000000000001e51",
        "10000000000000000000000000000000000000000000000000000e-52",
        "8.5e-1",
        "1E+2",
        "1e+00002",
        "1e-0",
        "7.0064923216240853546186479164495806564013097093825788587853e-46",
        "179769313486231580793728971405303415079934132710037826936173778980444968292764750946649017"
        "977587207096330286416692887910946"
        "555547851940402630657488671505820681908902000708383676273854845817711531764475730270069855"
        "571366959622842914819860834936475"
        "292719074168444365510704342711559699508093042880e0",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) one_number(texts[i]);
    check_seed = 11;
    for (int i = 0; i < 20000;
         i++) { // shortest and longest forms of random doubles, of all magnitudes
        uint64_t bits = check_random();
        double x;
        char text[64];
        memcpy(&x, &bits, 8);
        if (!isfinite(x)) continue;
        snprintf(text, sizeof text, "%.*e", (int)(check_random() % 20), x);
        one_number(text);
    }
    for (int i = 0; i < 20000; i++) { // random digits around a random point
        char text[1400];
        size_t n = 0;
        int whole = (int)(check_random() % 30), part = (int)(check_random() % 30);
        if (check_random() % 100 == 0) whole = 600, part = 600;
        if (check_random() % 2) text[n++] = '-';
        text[n++] = (char)('1' + check_random() % 9);
        for (int k = 0; k < whole; k++) text[n++] = (char)('0' + check_random() % 10);
        if (part) text[n++] = '.';
        for (int k = 0; k < part; k++) text[n++] = (char)('0' + check_random() % 10);
        text[n] = 0;
        if (check_random() % 2)
            snprintf(text + n, sizeof text - n, "e%d", (int)(check_random() % 700) - 350);
        one_number(text);
    }
}

// The exact middle of two doubles, and one unit beyond it 900 digits later.
static void long_numbers(void) {
    char *text = (char *)malloc(200100);
    strcpy(text, "9007199254740993.");
    size_t n = strlen(text);
    memset(text + n, '0', 900);
    text[n + 900] = 0;
    one_number(text);
    memcpy(text + n + 900, "1", 2);
    one_number(text);
    memset(text, '1', 200000); // far more digits than an exponent takes back
    strcpy(text + 200000, "e-199999");
    one_number(text);
    text[0] = '0';
    text[1] = '.';
    memset(text + 2, '0', 150000);
    strcpy(text + 150002, "15e150001");
    one_number(text);
    free(text);
}

static void other_locale(void) { // a host program may have set one whose decimal point is a comma
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
    const char *set = NULL;
    for (size_t i = 0; i < 4 && !set; i++) set = setlocale(LC_NUMERIC, names[i]);
    if (!set) printf("  (no locale with a decimal comma here: only the default one is tested)\n");
    sala__json j;
    sala_error err;
    CHECK(parse("[1.5,1e-06]", 11, &j, &err) == 0, "%s", err.text);
    CHECK(j.nodes[1].number == 1.5 && j.nodes[2].number == 1e-06, "%g %g", j.nodes[1].number,
          j.nodes[2].number);
    sala__json_free(&j);
    setlocale(LC_NUMERIC, "C");
}

static void failing_memory(void) {
    sala__string s = {NULL, 0, 0};
    for (int i = 0; i < 200; i++)
        sala__append(&env, &s, i ? ",{\"key\":\"value\"}" : "[1", i ? 16 : 2, NULL);
    sala__append(&env, &s, "]", 1, NULL);
    int done = 0, n = 1;
    for (; n < 100 && !done; n++) {
        counter c = {0, 0, 0, n, 0, 0};
        sala__env hooks = {&c, counting, NULL, NULL};
        sala__json j;
        sala_error err;
        int code = sala__json_parse(&hooks, "x", s.data, s.size, &j, &err);
        CHECK(code == 0 || (code == SALA_E_MEMORY && strstr(err.text, "out of memory")), "%d: %s",
              code, err.text);
        done = code == 0;
        if (done) sala__json_free(&j);
        CHECK(c.live == 0, "%lld blocks leak after failure %d", (long long)c.live, n);
    }
    CHECK(done && n > 5, "%d", n);
    sala__release(&env, s.data);
}

TEST_MAIN(TEST(accepts), TEST(refuses), TEST(prefixes), TEST(zero_bytes), TEST(strings),
          TEST(structure), TEST(depth), TEST(numbers), TEST(long_numbers), TEST(other_locale),
          TEST(failing_memory))
