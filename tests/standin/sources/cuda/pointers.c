/* What a pointer points at. */
#include "driver.h"

#include <string.h>

static size_t size_of(CUpointer_attribute attribute)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return 8;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: return 1;
    default: return 4;
    }
}

#define GIVE(type, value)            \
    do {                             \
        type value_ = (value);       \
        memcpy(out, &value_, sizeof value_); \
    } while (0)

static CUresult attribute_of(const struct memory *memory, CUpointer_attribute attribute,
                             CUdeviceptr address, void *out)
{
    int on_device = memory->kind < PAGE_LOCKED;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: GIVE(CUcontext, memory->context); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        GIVE(unsigned, on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: GIVE(CUdeviceptr, address); break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (memory->kind == DEVICE) return CUDA_ERROR_INVALID_VALUE;
        GIVE(CUdeviceptr, address);
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: GIVE(unsigned long long, memory->id); break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: GIVE(char, memory->kind == MANAGED); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: GIVE(int, memory->context->device); break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: GIVE(CUdeviceptr, memory->base); break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: GIVE(size_t, memory->nbytes); break;
    case CU_POINTER_ATTRIBUTE_MAPPED: GIVE(char, 1); break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: GIVE(char, 0); break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: GIVE(void *, NULL); break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: GIVE(char, 0); break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: GIVE(int, 1); break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* Plain host memory and freed memory are invalid here, and all zero in the plural below. */
EXPORTED CUresult CUDAAPI cuPointerGetAttribute(void *out, CUpointer_attribute attribute,
                                                CUdeviceptr address)
{
    CONTEXT_CALL();
    struct memory found;
    NEEDS(memory_find(address, &found));
    return attribute_of(&found, attribute, address, out);
}

EXPORTED CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes,
                                                 void **out, CUdeviceptr address)
{
    CONTEXT_CALL();
    struct memory found;
    int known = memory_find(address, &found);
    for (unsigned i = 0; i < count; i++)
        if (!known || attribute_of(&found, attributes[i], address, out[i])) {
            memset(out[i], 0, size_of(attributes[i]));
            if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out[i] = -2;
        }
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                                                CUdeviceptr address)
{
    CONTEXT_CALL();
    struct memory found;
    (void)value, (void)attribute;
    NEEDS(memory_find(address, &found));
    return CUDA_SUCCESS;
}
