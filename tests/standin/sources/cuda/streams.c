/* Streams: each a queue and a thread that works through it.
 *
 * The stream 0 (legacy) and the blocking streams of its context wait for one another, as CUDA
 * orders them; streams made with CU_STREAM_NON_BLOCKING do not.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct work {
    struct work *next;
    work_function *run;
    void *argument;
    long delay;
    CUresult late;
    struct point *waits;
    size_t wait_count;
};

/* Never freed, so that a handle of a destroyed stream is still known to be one. */
struct CUstream_st {
    CUstream next;
    CUcontext context;
    unsigned flags;
    int priority;
    int legacy, destroyed, held, running;
    pthread_t owner; /* of a per-thread stream */
    int per_thread;
    unsigned long queued, finished;
    struct work *first, *last;
    struct point *waits; /* for the work that is queued next */
    size_t wait_count;
    pthread_cond_t wake, progress;
};

static CUstream streams;

/* -- the thread of a stream ------------------------------------------------------------------------ */

static void await(struct point point)
{
    while (point.stream->finished < point.number)
        pthread_cond_wait(&point.stream->progress, &driver_lock);
}

static void work_off(CUstream stream)
{
    struct work *work = stream->first;
    for (size_t i = 0; i < work->wait_count; i++) await(work->waits[i]);
    pthread_mutex_unlock(&driver_lock);
    control_sleep(work->delay);
    CUresult result = work->run ? work->run(work->argument) : CUDA_SUCCESS;
    if (work->late) result = work->late;
    pthread_mutex_lock(&driver_lock);
    if (result && !stream->context->error) stream->context->error = result;
    stream->first = work->next;
    if (!stream->first) stream->last = NULL;
    stream->finished++;
    pthread_cond_broadcast(&stream->progress);
    free(work->waits);
    free(work);
}

static void *thread_of(void *argument)
{
    CUstream stream = argument;
    pthread_mutex_lock(&driver_lock);
    for (;;) {
        if (stream->first && !stream->held) work_off(stream);
        else if (stream->destroyed && !stream->first) break;
        else pthread_cond_wait(&stream->wake, &driver_lock);
    }
    stream->running = 0;
    pthread_mutex_unlock(&driver_lock);
    return NULL;
}

/* With the lock held. */
static int started(CUstream stream)
{
    if (stream->running) return 1;
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    stream->running = !pthread_create(&thread, &attributes, thread_of, stream);
    pthread_attr_destroy(&attributes);
    return stream->running;
}

/* -- names ----------------------------------------------------------------------------------------- */

static CUstream make(CUcontext context, unsigned flags, int priority)
{
    CUstream stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    pthread_cond_init(&stream->wake, NULL);
    pthread_cond_init(&stream->progress, NULL);
    stream->next = streams;
    streams = stream;
    return stream;
}

static CUstream legacy_of(CUcontext context)
{
    if (!context->legacy && (context->legacy = make(context, 0, 0))) context->legacy->legacy = 1;
    return context->legacy;
}

static CUstream thread_stream(CUcontext context)
{
    for (CUstream s = streams; s; s = s->next)
        if (s->per_thread && s->context == context && pthread_equal(s->owner, pthread_self()))
            return s;
    CUstream stream = make(context, 0, 0);
    if (stream) {
        stream->per_thread = 1;
        stream->owner = pthread_self();
    }
    return stream;
}

/* With the lock held. */
static CUresult resolve(CUstream handle, CUstream *out)
{
    if ((uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD) {
        CUcontext here;
        CUresult result = current_context(&here);
        if (result) return result;
        *out = handle == CU_STREAM_PER_THREAD ? thread_stream(here) : legacy_of(here);
        return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (CUstream s = streams; s; s = s->next)
        if (s == handle && !s->destroyed) {
            *out = s;
            if (!s->context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
            return s->context->error;
        }
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult stream_resolve(CUstream handle, CUstream *stream)
{
    pthread_mutex_lock(&driver_lock);
    CUresult result = resolve(handle, stream);
    pthread_mutex_unlock(&driver_lock);
    return result;
}

CUcontext stream_context(CUstream stream) { return stream->context; }

/* -- queueing and waiting --------------------------------------------------------------------------- */

static void add_wait(CUstream stream, struct point point)
{
    if (point.stream == stream || point.stream->finished >= point.number) return;
    struct point *more = realloc(stream->waits, (stream->wait_count + 1) * sizeof *more);
    if (!more) abort();
    stream->waits = more;
    stream->waits[stream->wait_count++] = point;
}

void stream_add_wait(CUstream stream, struct point point)
{
    pthread_mutex_lock(&driver_lock);
    add_wait(stream, point);
    pthread_mutex_unlock(&driver_lock);
}

/* What the order of the legacy stream asks for. */
static void add_legacy_waits(CUstream stream)
{
    if (stream->flags & CU_STREAM_NON_BLOCKING) return;
    if (!stream->legacy) {
        CUstream legacy = stream->context->legacy;
        if (legacy) add_wait(stream, (struct point){legacy, legacy->queued});
        return;
    }
    for (CUstream s = streams; s; s = s->next)
        if (s->context == stream->context && !(s->flags & CU_STREAM_NON_BLOCKING))
            add_wait(stream, (struct point){s, s->queued});
}

static void append(CUstream stream, struct work *work)
{
    work->waits = stream->waits;
    work->wait_count = stream->wait_count;
    stream->waits = NULL;
    stream->wait_count = 0;
    if (stream->last) stream->last->next = work;
    else stream->first = work;
    stream->last = work;
    stream->queued++;
    pthread_cond_signal(&stream->wake);
}

CUresult stream_enqueue(CUstream handle, work_function *run, void *argument,
                        const struct verdict *verdict, struct point *point)
{
    struct work *work = calloc(1, sizeof *work);
    if (!work) return CUDA_ERROR_OUT_OF_MEMORY;
    *work = (struct work){.run = run, .argument = argument};
    if (verdict) {
        work->delay = verdict->delay;
        work->late = (CUresult)verdict->late;
    }
    CUstream stream;
    pthread_mutex_lock(&driver_lock);
    CUresult result = resolve(handle, &stream);
    if (!result && !started(stream)) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        add_legacy_waits(stream);
        append(stream, work);
        if (point) *point = (struct point){stream, stream->queued};
    }
    pthread_mutex_unlock(&driver_lock);
    if (result) free(work);
    return result;
}

int point_reached(struct point point)
{
    pthread_mutex_lock(&driver_lock);
    int reached = !point.stream || point.stream->finished >= point.number;
    pthread_mutex_unlock(&driver_lock);
    return reached;
}

void point_wait(struct point point)
{
    pthread_mutex_lock(&driver_lock);
    if (point.stream) await(point);
    pthread_mutex_unlock(&driver_lock);
}

void streams_wait(CUcontext context)
{
    pthread_mutex_lock(&driver_lock);
    for (CUstream s = streams; s; s = s->next)
        if (s->context == context) await((struct point){s, s->queued});
    pthread_mutex_unlock(&driver_lock);
}

void streams_abandon(CUcontext context)
{
    pthread_mutex_lock(&driver_lock);
    for (CUstream s = streams; s; s = s->next)
        if (s->context == context && !s->destroyed) {
            s->destroyed = 1;
            pthread_cond_signal(&s->wake);
        }
    context->legacy = NULL;
    pthread_mutex_unlock(&driver_lock);
}

/* Streams that someone created and did not destroy. */
long streams_gauge(const char *name, int device)
{
    long total = 0;
    (void)name;
    pthread_mutex_lock(&driver_lock);
    for (CUstream s = streams; s; s = s->next)
        total += !s->destroyed && !s->legacy && !s->per_thread &&
                 (device < 0 || s->context->device == device);
    pthread_mutex_unlock(&driver_lock);
    return total;
}

/* Keep a stream from working (1), or let it work again (0). */
EXPORTED CUresult standin_cuda_hold(CUstream handle, int hold);
EXPORTED CUresult standin_cuda_hold(CUstream handle, int hold)
{
    CUstream stream;
    pthread_mutex_lock(&driver_lock);
    CUresult result = resolve(handle, &stream);
    if (!result) {
        stream->held = hold;
        pthread_cond_signal(&stream->wake);
    }
    pthread_mutex_unlock(&driver_lock);
    return result;
}

/* -- entry points ------------------------------------------------------------------------------------ */

static CUresult create(CUstream *out, unsigned flags, int priority, CUcontext context)
{
    NEEDS(out && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING));
    pthread_mutex_lock(&driver_lock);
    *out = make(context, flags, priority);
    pthread_mutex_unlock(&driver_lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORTED CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned flags)
{
    CONTEXT_CALL();
    return create(out, flags, 0, here);
}

EXPORTED CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    CONTEXT_CALL();
    return create(out, flags, priority, here);
}

/* Returns at once; what is queued is still done. */
EXPORTED CUresult CUDAAPI cuStreamDestroy_v2(CUstream handle)
{
    DRIVER_CALL();
    CUstream stream;
    if ((uintptr_t)handle <= (uintptr_t)CU_STREAM_PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_ERROR_INVALID_HANDLE) return result;
    pthread_mutex_lock(&driver_lock);
    stream->destroyed = 1;
    pthread_cond_signal(&stream->wake);
    pthread_mutex_unlock(&driver_lock);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuStreamSynchronize(CUstream handle)
{
    CONTEXT_CALL();
    struct point point;
    CUresult result = stream_enqueue(handle, NULL, NULL, NULL, &point);
    if (result) return result;
    point_wait(point);
    return stream_context(point.stream)->error;
}

EXPORTED CUresult CUDAAPI cuStreamQuery(CUstream handle)
{
    CONTEXT_CALL();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result) return result;
    return point_reached((struct point){stream, stream->queued}) ? CUDA_SUCCESS
                                                                 : CUDA_ERROR_NOT_READY;
}

#define STREAM_FIELD(type, field)                          \
    DRIVER_CALL();                                         \
    CUstream stream;                                       \
    CUresult result = stream_resolve(handle, &stream);     \
    if (!result) *out = (type)stream->field;               \
    return result

EXPORTED CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned *out)
{
    STREAM_FIELD(unsigned, flags);
}

EXPORTED CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *out)
{
    STREAM_FIELD(int, priority);
}

EXPORTED CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    STREAM_FIELD(CUcontext, context);
}

EXPORTED CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice *out)
{
    STREAM_FIELD(CUdevice, context->device);
}

EXPORTED CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long *out)
{
    DRIVER_CALL();
    CUstream stream;
    CUresult result = stream_resolve(handle, &stream);
    if (!result) *out = (uintptr_t)stream;
    return result;
}

EXPORTED CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *out)
{
    DRIVER_CALL();
    (void)handle;
    *out = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

struct host_call {
    CUhostFn function;
    CUstreamCallback callback;
    CUstream stream;
    void *data;
};

static CUresult call_host(void *argument)
{
    struct host_call call = *(struct host_call *)argument;
    free(argument);
    if (call.function) call.function(call.data);
    else call.callback(call.stream, CUDA_SUCCESS, call.data);
    return CUDA_SUCCESS;
}

static CUresult queue_host_call(struct host_call call, const struct verdict *verdict)
{
    struct host_call *copy = malloc(sizeof *copy);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = call;
    CUresult result = stream_enqueue(call.stream, call_host, copy, verdict, NULL);
    if (result) free(copy);
    return result;
}

EXPORTED CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    CONTEXT_WORK();
    return queue_host_call((struct host_call){.function = function, .stream = handle,
                                              .data = data}, &verdict);
}

EXPORTED CUresult CUDAAPI cuStreamAddCallback(CUstream handle, CUstreamCallback callback,
                                              void *data, unsigned flags)
{
    CONTEXT_WORK();
    NEEDS(!flags);
    return queue_host_call((struct host_call){.callback = callback, .stream = handle,
                                              .data = data}, &verdict);
}
