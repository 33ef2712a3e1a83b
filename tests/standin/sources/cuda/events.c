/* Events: the point that a stream had reached when the event was recorded. */
#include "driver.h"

#include <stdlib.h>
#include <time.h>

/* Never freed, so that a destroyed event is still known to be one. */
struct CUevent_st {
    CUevent next;
    CUcontext context;
    unsigned flags;
    int destroyed;
    struct point point;
    double milliseconds;
};

static CUevent events;
static long alive;

long events_gauge(void)
{
    pthread_mutex_lock(&driver_lock);
    long total = alive;
    pthread_mutex_unlock(&driver_lock);
    return total;
}

/* A copy of a live event. */
static CUresult look_up(CUevent handle, struct CUevent_st *copy)
{
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver_lock);
    for (CUevent e = events; e; e = e->next)
        if (e == handle && !e->destroyed) {
            *copy = *e;
            result = e->context->alive ? e->context->error : CUDA_ERROR_CONTEXT_IS_DESTROYED;
            break;
        }
    pthread_mutex_unlock(&driver_lock);
    return result;
}

EXPORTED CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned flags)
{
    CONTEXT_CALL();
    CUevent event = calloc(1, sizeof *event);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = here;
    event->flags = flags;
    pthread_mutex_lock(&driver_lock);
    event->next = events;
    events = event;
    alive++;
    pthread_mutex_unlock(&driver_lock);
    *out = event;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuEventDestroy_v2(CUevent handle)
{
    DRIVER_CALL();
    struct CUevent_st event;
    if (look_up(handle, &event) == CUDA_ERROR_INVALID_HANDLE) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&driver_lock);
    handle->destroyed = 1;
    alive--;
    pthread_mutex_unlock(&driver_lock);
    return CUDA_SUCCESS;
}

static CUresult stamp(void *argument)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((CUevent)argument)->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    return CUDA_SUCCESS;
}

static CUresult record(CUevent handle, CUstream stream_handle, const struct verdict *verdict)
{
    struct CUevent_st event;
    struct point point;
    CUstream stream;
    CUresult result = look_up(handle, &event);
    if (!result) result = stream_resolve(stream_handle, &stream);
    /* An event belongs to one context. */
    if (!result && stream_context(stream) != event.context) result = CUDA_ERROR_INVALID_HANDLE;
    if (!result) result = stream_enqueue(stream_handle, stamp, handle, verdict, &point);
    if (result) return result;
    pthread_mutex_lock(&driver_lock);
    handle->point = point;
    pthread_mutex_unlock(&driver_lock);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream)
{
    DRIVER_WORK();
    return record(event, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
    DRIVER_WORK();
    (void)flags;
    return record(event, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuEventQuery(CUevent handle)
{
    DRIVER_CALL();
    struct CUevent_st event;
    CUresult result = look_up(handle, &event);
    if (result) return result;
    return point_reached(event.point) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORTED CUresult CUDAAPI cuEventSynchronize(CUevent handle)
{
    DRIVER_CALL();
    struct CUevent_st event;
    CUresult result = look_up(handle, &event);
    if (result) return result;
    point_wait(event.point);
    return event.context->error;
}

static CUresult elapsed(float *out, CUevent start_handle, CUevent end_handle)
{
    struct CUevent_st start, end;
    CUresult result = look_up(start_handle, &start);
    if (!result) result = look_up(end_handle, &end);
    if (result) return result;
    if (!start.point.stream || !end.point.stream ||
        (start.flags | end.flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!point_reached(start.point) || !point_reached(end.point)) return CUDA_ERROR_NOT_READY;
    *out = (float)(end.milliseconds - start.milliseconds);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuEventElapsedTime_v2(float *out, CUevent start, CUevent end)
{
    DRIVER_CALL();
    return elapsed(out, start, end);
}

#undef cuEventElapsedTime
EXPORTED CUresult CUDAAPI cuEventElapsedTime(float *out, CUevent start, CUevent end);
EXPORTED CUresult CUDAAPI cuEventElapsedTime(float *out, CUevent start, CUevent end)
{
    DRIVER_CALL();
    return elapsed(out, start, end);
}

/* What is queued on the stream later waits for the record that the event has now. */
EXPORTED CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags)
{
    DRIVER_CALL();
    struct CUevent_st event;
    CUstream stream;
    (void)flags;
    CUresult result = look_up(event_handle, &event);
    if (!result) result = stream_resolve(handle, &stream);
    if (result) return result;
    if (event.point.stream) stream_add_wait(stream, event.point);
    return CUDA_SUCCESS;
}
