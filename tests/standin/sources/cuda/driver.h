/* What the parts of the stand-in for libcuda.so.1 share.
 *
 * Device memory is an address range that the host can't touch, with a private view behind it that
 * only this library uses. A stream is a thread with a queue, so work happens after the call that
 * asked for it, and a missing wait reads or overwrites the wrong bytes as it does on a device.
 */
#ifndef STANDIN_DRIVER_H
#define STANDIN_DRIVER_H

/* Entry points are defined by the names that the library exports, versions included. */
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stddef.h>

#include "../control.h"

enum { MOST_DEVICES = 16 };

struct CUctx_st {
    int device;
    int primary;
    int alive;
    CUresult error;      /* of work that failed late; every later call returns it */
    CUstream legacy;     /* the stream 0, made when first used */
};

/* Guards contexts, streams, events and the table of memory. */
extern pthread_mutex_t driver_lock;
extern int device_count;
extern size_t device_bytes;

/* Whether the driver may be called, and whether a rule forbids this call. */
CUresult driver_ready(const struct verdict *verdict);
CUresult current_context(CUcontext *context);
unsigned long contexts_made(int device);
unsigned contexts_alive(int device);

/* -- memory ------------------------------------------------------------------------------------ */

enum kind { DEVICE = 1, MANAGED, PAGE_LOCKED, REGISTERED };

struct memory {
    uintptr_t base;
    size_t nbytes;
    size_t reserved;     /* of the address range, for device and managed memory */
    char *view;          /* where the bytes are */
    enum kind kind;
    unsigned flags;
    CUcontext context;
    unsigned long long id;
    int uses;            /* operations that touch it now */
    int registrations;   /* with cuFile */
};

/* Copy the entry that holds `address`; false if there is none. */
int memory_find(uintptr_t address, struct memory *found);

/* Return a readable address for `nbytes` at `address`, to be given back with `memory_done`.
 * NULL if that is not one allocation. Plain host memory is returned as it is. */
void *memory_use(uintptr_t address, size_t nbytes);
void memory_done(uintptr_t address);

/* Note that cuFile has one registration more or less in the allocation that holds `address`. */
void memory_register(uintptr_t address, int change);

/* Whether a range lies in one allocation (or in plain host memory), and which kind that is: 0 for
 * plain host memory, -1 for no memory at all. */
int memory_kind(uintptr_t address, size_t nbytes);

/* Add and take out page-locked ranges. */
int memory_add(struct memory entry);
int memory_take(uintptr_t base, enum kind kind, struct memory *taken);
int memory_overlaps(uintptr_t base, size_t nbytes);
void memory_free_context(CUcontext context);
long memory_gauge(const char *name, int device);

/* -- streams ----------------------------------------------------------------------------------- */

/* Does the work, then frees the argument; runs in the stream's thread. */
typedef CUresult work_function(void *argument);

struct CUstream_st;

/* A point in a stream: reached once `number` pieces of work are done. */
struct point {
    CUstream stream;
    unsigned long number;
};

/* Queue work on a stream of any name (0, legacy, per thread, created). */
CUresult stream_enqueue(CUstream handle, work_function *run, void *argument,
                        const struct verdict *verdict, struct point *point);
/* The stream that a name means in this thread. */
CUresult stream_resolve(CUstream handle, CUstream *stream);
CUcontext stream_context(CUstream stream);
/* Let later work of a stream wait for a point of another. */
void stream_add_wait(CUstream stream, struct point point);
int point_reached(struct point point);
void point_wait(struct point point);
/* Wait for all that is queued now in a context. */
void streams_wait(CUcontext context);
void streams_abandon(CUcontext context);
long streams_gauge(const char *name, int device);
long events_gauge(void);

/* -- prologues of entry points ------------------------------------------------------------------ */

/* Needs cuInit; `verdict` is what the rules want. */
#define DRIVER_WORK()                                                \
    ENTER(verdict, -1);                                              \
    do {                                                             \
        CUresult ready_ = driver_ready(&verdict);                    \
        if (ready_) return ready_;                                   \
    } while (0)
/* The same for a call that does its work at once. */
#define DRIVER_CALL()                                                \
    DRIVER_WORK();                                                   \
    control_sleep(verdict.delay)
/* Need a current context, `here`. */
#define CONTEXT_WORK()                                               \
    DRIVER_WORK();                                                   \
    CUcontext here;                                                  \
    do {                                                             \
        CUresult found_ = current_context(&here);                    \
        if (found_) return found_;                                   \
    } while (0)
#define CONTEXT_CALL()                                               \
    CONTEXT_WORK();                                                  \
    control_sleep(verdict.delay);                                    \
    (void)here
#define NEEDS(condition)                                             \
    do {                                                             \
        if (!(condition)) return CUDA_ERROR_INVALID_VALUE;           \
    } while (0)

#endif
