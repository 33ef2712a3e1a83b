/* Copies and fills. All are work of a stream; calls that CUDA makes wait for the end do so. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct copy {
    uintptr_t to, from;
    size_t nbytes;
};

/* Memory that was freed meanwhile ends the context, as an illegal access does on a device. */
static CUresult copy_work(void *argument)
{
    struct copy copy = *(struct copy *)argument;
    free(argument);
    void *to = memory_use(copy.to, copy.nbytes);
    void *from = memory_use(copy.from, copy.nbytes);
    if (to && from) memmove(to, from, copy.nbytes);
    if (from) memory_done(copy.from);
    if (to) memory_done(copy.to);
    return to && from ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult queue_copy(struct copy copy, CUstream stream, const struct verdict *verdict,
                           struct point *point)
{
    struct copy *argument = malloc(sizeof *argument);
    if (!argument) return CUDA_ERROR_OUT_OF_MEMORY;
    *argument = copy;
    CUresult result = stream_enqueue(stream, copy_work, argument, verdict, point);
    if (result) free(argument);
    return result;
}

enum wait { IF_PAGEABLE, IF_HOST };

/* Queue a copy, and wait for it where its host side is pageable (or, for the synchronous calls,
 * anywhere in host memory). `device` says which sides must be device memory: 1 to, 2 from. */
static CUresult move(uintptr_t to, uintptr_t from, size_t nbytes, int device, enum wait wait,
                     CUstream stream, const struct verdict *verdict)
{
    if (!nbytes) return CUDA_SUCCESS;
    int kinds[] = {memory_kind(to, nbytes), memory_kind(from, nbytes)};
    int waits = 0;
    for (int side = 0; side < 2; side++) {
        NEEDS(kinds[side] >= 0);
        int on_device = kinds[side] == DEVICE || kinds[side] == MANAGED;
        NEEDS(on_device || !(device & 1 << side));
        waits |= wait == IF_HOST ? !on_device : kinds[side] == 0;
    }
    struct point point;
    CUresult result = queue_copy((struct copy){to, from, nbytes}, stream, verdict, &point);
    if (result || !waits) return result;
    point_wait(point);
    return stream_context(point.stream)->error;
}

EXPORTED CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t nbytes)
{
    CONTEXT_WORK();
    return move(to, from, nbytes, 0, IF_HOST, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t nbytes)
{
    CONTEXT_WORK();
    return move(to, (uintptr_t)from, nbytes, 1, IF_HOST, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t nbytes)
{
    CONTEXT_WORK();
    return move((uintptr_t)to, from, nbytes, 2, IF_HOST, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes)
{
    CONTEXT_WORK();
    return move(to, from, nbytes, 3, IF_HOST, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes,
                                        CUstream stream)
{
    CONTEXT_WORK();
    return move(to, from, nbytes, 0, IF_PAGEABLE, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes,
                                               CUstream stream)
{
    CONTEXT_WORK();
    return move(to, (uintptr_t)from, nbytes, 1, IF_PAGEABLE, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes,
                                               CUstream stream)
{
    CONTEXT_WORK();
    return move((uintptr_t)to, from, nbytes, 2, IF_PAGEABLE, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes,
                                               CUstream stream)
{
    CONTEXT_WORK();
    return move(to, from, nbytes, 3, IF_PAGEABLE, stream, &verdict);
}

/* Like the driver, this one takes no stream 0. */
EXPORTED CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *nbytes,
                                                size_t count, CUmemcpyAttributes *attributes,
                                                size_t *indices, size_t attribute_count,
                                                CUstream stream)
{
    CONTEXT_WORK();
    (void)attributes, (void)indices;
    NEEDS(stream && count && attribute_count);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && !result; i++)
        result = move(to[i], from[i], nbytes[i], 0, IF_PAGEABLE, stream, &verdict);
    return result;
}

/* -- fills ----------------------------------------------------------------------------------------- */

struct fill {
    uintptr_t to;
    unsigned value;
    size_t width, count;
};

static CUresult fill_work(void *argument)
{
    struct fill fill = *(struct fill *)argument;
    free(argument);
    char *to = memory_use(fill.to, fill.width * fill.count);
    if (!to) return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (size_t i = 0; i < fill.count; i++) memcpy(to + i * fill.width, &fill.value, fill.width);
    memory_done(fill.to);
    return CUDA_SUCCESS;
}

static CUresult queue_fill(struct fill fill, CUstream stream, const struct verdict *verdict)
{
    if (!fill.count) return CUDA_SUCCESS;
    NEEDS(memory_kind(fill.to, fill.width * fill.count) > 0);
    struct fill *argument = malloc(sizeof *argument);
    if (!argument) return CUDA_ERROR_OUT_OF_MEMORY;
    *argument = fill;
    CUresult result = stream_enqueue(stream, fill_work, argument, verdict, NULL);
    if (result) free(argument);
    return result;
}

EXPORTED CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 1, count}, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 2, count}, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 4, count}, NULL, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                          CUstream stream)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 1, count}, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count,
                                           CUstream stream)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 2, count}, stream, &verdict);
}

EXPORTED CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                           CUstream stream)
{
    CONTEXT_WORK();
    return queue_fill((struct fill){to, value, 4, count}, stream, &verdict);
}
