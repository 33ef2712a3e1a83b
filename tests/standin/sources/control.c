/* Settings, counters and rules; see control.h. */
#define _GNU_SOURCE
#include "control.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define NAMED(name) PASTE(STANDIN_PREFIX, name)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

enum { MOST_RULES = 64, LONGEST_NAME = 64 };

enum action { RETURN_CODE, RETURN_ERRNO, MOVE_LESS, DELAY, FAIL_LATE };

struct rule {
    char function[LONGEST_NAME];
    enum action action;
    long value, first, times, matched;
    long long from_offset;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct counter *counters;
static struct rule rules[MOST_RULES];
static atomic_int rule_count;
static FILE *trace;

long long control_setting(const char *variable, long long otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? strtoll(text, NULL, 0) : otherwise;
}

void control_sleep(long microseconds)
{
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    if (microseconds > 0) nanosleep(&time, NULL);
}

/* -- counters --------------------------------------------------------------------------------- */

static struct counter *found(const char *name, size_t length)
{
    for (struct counter *c = counters; c; c = c->next)
        if (strlen(c->name) == length && !strncmp(c->name, name, length)) return c;
    return NULL;
}

struct counter *control_counter(const char *function)
{
    size_t length = strlen(function);
    if (length > 3 && !strncmp(function + length - 3, "_v", 2)) length -= 3;
    pthread_mutex_lock(&lock);
    struct counter *counter = found(function, length);
    if (!counter && (counter = calloc(1, sizeof *counter))) {
        counter->name = strndup(function, length);
        counter->next = counters;
        counters = counter;
    }
    pthread_mutex_unlock(&lock);
    return counter;
}

EXPORTED unsigned long NAMED(_count)(const char *function);
EXPORTED unsigned long NAMED(_count)(const char *function)
{
    pthread_mutex_lock(&lock);
    struct counter *counter = found(function, strlen(function));
    pthread_mutex_unlock(&lock);
    return counter ? atomic_load(&counter->calls) : 0;
}

/* Write "name calls" lines into `text`; return how many bytes that takes. */
EXPORTED size_t NAMED(_counts)(char *text, size_t room);
EXPORTED size_t NAMED(_counts)(char *text, size_t room)
{
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (struct counter *c = counters; c; c = c->next)
        used += (size_t)snprintf(used < room ? text + used : NULL, used < room ? room - used : 0,
                                 "%s %lu\n", c->name, atomic_load(&c->calls));
    pthread_mutex_unlock(&lock);
    return used;
}

EXPORTED void NAMED(_reset_counts)(void);
EXPORTED void NAMED(_reset_counts)(void)
{
    pthread_mutex_lock(&lock);
    for (struct counter *c = counters; c; c = c->next) atomic_store(&c->calls, 0);
    pthread_mutex_unlock(&lock);
}

/* -- rules ------------------------------------------------------------------------------------ */

/* Parse one rule; return where it ends, or NULL if it is no rule. */
static const char *parsed(const char *text, struct rule *rule)
{
    static const struct { const char *word; enum action action; } words[] = {
        {"errno:", RETURN_ERRNO}, {"short:", MOVE_LESS}, {"delay:", DELAY}, {"late:", FAIL_LATE}};
    size_t length = strcspn(text, "=,");
    if (!length || text[length] != '=' || length >= LONGEST_NAME) return NULL;
    *rule = (struct rule){.first = 1, .times = -1, .from_offset = -1};
    memcpy(rule->function, text, length);
    text += length + 1;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strncmp(text, words[i].word, strlen(words[i].word))) {
            rule->action = words[i].action;
            text += strlen(words[i].word);
        }
    char *end;
    rule->value = strtol(text, &end, 10);
    if (end == text) return NULL;
    while (*end && *end != ',') {
        char condition = *end++;
        char *start = end;
        long long value = strtoll(start, &end, 0);
        if (end == start) return NULL;
        if (condition == '@') rule->first = (long)value;
        else if (condition == 'x') rule->times = (long)value;
        else if (condition == '>') rule->from_offset = value;
        else return NULL;
    }
    return end;
}

/* Replace all rules; return 0, or -1 (and leave them as they were) if the text is wrong. */
EXPORTED int NAMED(_rules)(const char *text);
EXPORTED int NAMED(_rules)(const char *text)
{
    struct rule read[MOST_RULES];
    int count = 0;
    while (*text) {
        if (count == MOST_RULES || !(text = parsed(text, &read[count]))) return -1;
        count++;
        if (*text == ',') text++;
    }
    pthread_mutex_lock(&lock);
    memcpy(rules, read, sizeof *rules * (size_t)count);
    atomic_store(&rule_count, count);
    pthread_mutex_unlock(&lock);
    return 0;
}

static int applies(struct rule *rule, const char *function, long long offset)
{
    size_t length = strlen(rule->function);
    int prefix = length && rule->function[length - 1] == '*';
    if (prefix ? strncmp(rule->function, function, length - 1) : strcmp(rule->function, function))
        return 0;
    if (offset < rule->from_offset) return 0;
    long call = ++rule->matched;
    return call >= rule->first && (rule->times < 0 || call < rule->first + rule->times);
}

struct verdict control_enter(struct counter *counter, long long offset)
{
    struct verdict verdict = {.most = -1};
    atomic_fetch_add(&counter->calls, 1);
    if (trace) fprintf(trace, "%s\n", counter->name);
    if (!atomic_load(&rule_count)) return verdict;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < atomic_load(&rule_count); i++) {
        if (!applies(&rules[i], counter->name, offset)) continue;
        long value = rules[i].value;
        switch (rules[i].action) {
        case RETURN_CODE: verdict.code = (int)value; break;
        case RETURN_ERRNO: verdict.error_number = (int)value; break;
        case MOVE_LESS: verdict.most = value; break;
        case DELAY: verdict.delay = value; break;
        case FAIL_LATE: verdict.late = (int)value; break;
        }
    }
    pthread_mutex_unlock(&lock);
    return verdict;
}

/* Another thread may have held the lock when this process was forked. */
static void in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void begin(void)
{
    pthread_atfork(NULL, NULL, in_child);
    const char *text = getenv(STANDIN_RULES_VARIABLE);
    if (text && NAMED(_rules)(text)) {
        fprintf(stderr, "%s: %s holds no rules: %s\n", TEXT(STANDIN_PREFIX),
                STANDIN_RULES_VARIABLE, text);
        abort();
    }
    text = getenv("STANDIN_TRACE");
    if (text && (trace = fopen(text, "ae"))) setvbuf(trace, NULL, _IOLBF, 0);
}
