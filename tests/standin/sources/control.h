/* What both stand-in libraries have in common: settings, counters, and faults made on purpose.
 *
 * Each library has its own copy; the exported names start with STANDIN_PREFIX, which the build
 * defines, so that neither copy stands in for the other.
 *
 * Faults are described by rules, separated by commas, in the variable STANDIN_<library>_RULES or at
 * run time:
 *
 *     rule    = function "=" action { condition }
 *     action  = CODE          the call returns this error code and does nothing else
 *             | "errno:" N    the call fails with this errno (cuFileRead and cuFileWrite)
 *             | "short:" N    at most N bytes are moved
 *             | "delay:" N    the work is done N microseconds later
 *             | "late:" CODE  the call returns success; the work fails, and the context with it
 *     condition = "@" N       from the Nth matching call on, counted from 1
 *             | "x" N         N times at most
 *             | ">" N         only where the file offset is N or more
 *
 * A name that ends in * stands for all functions that start so.
 */
#ifndef STANDIN_CONTROL_H
#define STANDIN_CONTROL_H

#include <stdatomic.h>
#include <stddef.h>

#define EXPORTED __attribute__((visibility("default")))

/* How often one function was called. */
struct counter {
    const char *name;
    atomic_ulong calls;
    struct counter *next;
};

/* What the rules want of one call; all zero (and `most` -1) where there is none. */
struct verdict {
    int code;
    int error_number;
    int late;
    long most;
    long delay;
};

/* Return the counter of a function; "cuMemAlloc_v2" counts as "cuMemAlloc". */
struct counter *control_counter(const char *function);

/* Count a call and look its rules up; `offset` is that in the file, or -1. */
struct verdict control_enter(struct counter *counter, long long offset);

/* Return a setting from the environment, or `otherwise` where it is not set. */
long long control_setting(const char *variable, long long otherwise);

void control_sleep(long microseconds);

/* Enter the function that this stands in: `verdict` is what the rules want of it. */
#define ENTER(verdict, offset)                                       \
    static struct counter *counter_;                                 \
    if (!counter_) counter_ = control_counter(__func__);             \
    struct verdict verdict = control_enter(counter_, offset)

#endif
