/* Page-locked host memory, allocated here or registered. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

static CUresult allocate(void **out, size_t nbytes, unsigned flags, CUcontext context)
{
    NEEDS(out && nbytes);
    void *memory;
    if (posix_memalign(&memory, PAGE, (nbytes + PAGE - 1) / PAGE * PAGE))
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory_add((struct memory){.base = (uintptr_t)memory, .nbytes = nbytes, .view = memory,
                               .kind = PAGE_LOCKED, .flags = flags, .context = context});
    *out = memory;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemHostAlloc(void **out, size_t nbytes, unsigned flags)
{
    CONTEXT_CALL();
    return allocate(out, nbytes, flags, here);
}

EXPORTED CUresult CUDAAPI cuMemAllocHost_v2(void **out, size_t nbytes)
{
    CONTEXT_CALL();
    return allocate(out, nbytes, 0, here);
}

EXPORTED CUresult CUDAAPI cuMemFreeHost(void *memory)
{
    CONTEXT_CALL();
    struct memory taken;
    /* Work that uses it comes first. */
    streams_wait(here);
    NEEDS(memory_take((uintptr_t)memory, PAGE_LOCKED, &taken));
    free(memory);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags)
{
    CONTEXT_CALL();
    NEEDS(memory && nbytes && !(flags & ~15u));
    if (memory_overlaps((uintptr_t)memory, nbytes))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    memory_add((struct memory){.base = (uintptr_t)memory, .nbytes = nbytes, .view = memory,
                               .kind = REGISTERED, .flags = flags, .context = here});
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemHostUnregister(void *memory)
{
    CONTEXT_CALL();
    struct memory taken;
    streams_wait(here);
    return memory_take((uintptr_t)memory, REGISTERED, &taken)
               ? CUDA_SUCCESS
               : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORTED CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *memory,
                                                       unsigned flags)
{
    CONTEXT_CALL();
    struct memory found;
    (void)flags;
    NEEDS(memory_find((uintptr_t)memory, &found) && found.kind >= PAGE_LOCKED);
    *out = (CUdeviceptr)memory;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemHostGetFlags(unsigned *out, void *memory)
{
    CONTEXT_CALL();
    struct memory found;
    NEEDS(memory_find((uintptr_t)memory, &found) && found.kind >= PAGE_LOCKED);
    *out = found.flags | CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
}
