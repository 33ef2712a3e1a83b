/* Contexts: a primary one for each device, counted; others on demand; a stack in each thread. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 64 };

static struct CUctx_st primaries[MOST_DEVICES];
static unsigned references[MOST_DEVICES];
static unsigned alive[MOST_DEVICES];
static unsigned long made[MOST_DEVICES];

static __thread CUcontext stack[DEEPEST];
static __thread int depth;

#define KNOWN(device)                                                      \
    do {                                                                   \
        if ((device) < 0 || (device) >= device_count) return CUDA_ERROR_INVALID_DEVICE; \
    } while (0)

CUresult current_context(CUcontext *context)
{
    if (!depth || !stack[depth - 1]) return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[depth - 1];
    if (!(*context)->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return (*context)->error;
}

unsigned long contexts_made(int device) { return made[device]; }

unsigned contexts_alive(int device) { return alive[device]; }

/* With the lock held. */
static void start(CUcontext context, int device, int primary)
{
    *context = (struct CUctx_st){.device = device, .primary = primary, .alive = 1};
    made[device]++;
    alive[device]++;
}

/* Wait for its work, then free all that belongs to it. Without the lock. */
static void finish(CUcontext context)
{
    streams_wait(context);
    streams_abandon(context);
    memory_free_context(context);
    pthread_mutex_lock(&driver_lock);
    context->alive = 0;
    alive[context->device]--;
    pthread_mutex_unlock(&driver_lock);
}

/* -- primary contexts ---------------------------------------------------------------------------- */

EXPORTED CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    pthread_mutex_lock(&driver_lock);
    if (references[device]++ == 0) start(&primaries[device], device, 1);
    pthread_mutex_unlock(&driver_lock);
    *out = &primaries[device];
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    pthread_mutex_lock(&driver_lock);
    int held = references[device] > 0;
    int last = held && --references[device] == 0;
    pthread_mutex_unlock(&driver_lock);
    if (last) finish(&primaries[device]);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORTED CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    DRIVER_CALL();
    KNOWN(device);
    *flags = 0;
    *active = references[device] > 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    DRIVER_CALL();
    KNOWN(device);
    (void)flags;
    return CUDA_SUCCESS;
}

/* -- created contexts ---------------------------------------------------------------------------- */

static CUresult push(CUcontext context)
{
    NEEDS(depth < DEEPEST);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *out, CUdevice device)
{
    KNOWN(device);
    CUcontext context = calloc(1, sizeof *context);
    if (!context) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver_lock);
    start(context, device, 0);
    pthread_mutex_unlock(&driver_lock);
    *out = context;
    return push(context);
}

EXPORTED CUresult CUDAAPI cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *parameters,
                                         unsigned flags, CUdevice device)
{
    DRIVER_CALL();
    (void)parameters, (void)flags;
    return create(out, device);
}

EXPORTED CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    DRIVER_CALL();
    (void)flags;
    return create(out, device);
}

/* The memory of a created context stays, so that whoever still holds it is told that it is gone. */
EXPORTED CUresult CUDAAPI cuCtxDestroy_v2(CUcontext context)
{
    DRIVER_CALL();
    NEEDS(context && !context->primary);
    if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    finish(context);
    if (depth && stack[depth - 1] == context) depth--;
    return CUDA_SUCCESS;
}

/* -- which context is current -------------------------------------------------------------------- */

EXPORTED CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context)
{
    DRIVER_CALL();
    return push(context);
}

EXPORTED CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *out)
{
    DRIVER_CALL();
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out) *out = stack[depth];
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxSetCurrent(CUcontext context)
{
    DRIVER_CALL();
    if (depth) depth--;
    return context ? push(context) : CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxGetCurrent(CUcontext *out)
{
    DRIVER_CALL();
    *out = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxGetDevice(CUdevice *out)
{
    CONTEXT_CALL();
    *out = here->device;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxSynchronize(void)
{
    CONTEXT_CALL();
    streams_wait(here);
    return here->error;
}

EXPORTED CUresult CUDAAPI cuCtxGetApiVersion(CUcontext context, unsigned *out)
{
    DRIVER_CALL();
    (void)context;
    *out = 3020;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxGetId(CUcontext context, unsigned long long *out)
{
    CONTEXT_CALL();
    *out = (uintptr_t)(context ? context : here);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxGetFlags(unsigned *out)
{
    CONTEXT_CALL();
    *out = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CONTEXT_CALL();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}
