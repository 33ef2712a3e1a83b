/* Initialisation, versions, error names, and devices.
 *
 * STANDIN_CUDA_DEVICES         how many (1); 0 makes cuInit fail as it does without a GPU
 * STANDIN_CUDA_MEMORY          bytes of each (2 GiB)
 * STANDIN_CUDA_DRIVER_VERSION  what cuDriverGetVersion says (13000)
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
int device_count = 1;
size_t device_bytes = 2ull << 30;

static int version = 13000;
static atomic_int initialised, ended, forked;

static void in_child(void) { atomic_store(&forked, atomic_load(&initialised)); }

__attribute__((constructor)) static void begin(void)
{
    device_count = (int)control_setting("STANDIN_CUDA_DEVICES", device_count);
    if (device_count > MOST_DEVICES) device_count = MOST_DEVICES;
    device_bytes = (size_t)control_setting("STANDIN_CUDA_MEMORY", (long long)device_bytes);
    version = (int)control_setting("STANDIN_CUDA_DRIVER_VERSION", version);
    pthread_atfork(NULL, NULL, in_child);
}

/* The driver takes itself down in an exit handler; what runs later is told so. */
static void end(void) { atomic_store(&ended, 1); }

CUresult driver_ready(const struct verdict *verdict)
{
    /* CUDA does not survive a fork. */
    if (atomic_load(&forked) || !atomic_load(&initialised)) return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load(&ended)) return CUDA_ERROR_DEINITIALIZED;
    return (CUresult)verdict->code;
}

EXPORTED CUresult CUDAAPI cuInit(unsigned flags)
{
    ENTER(verdict, -1);
    control_sleep(verdict.delay);
    NEEDS(!flags);
    if (verdict.code) return (CUresult)verdict.code;
    if (atomic_load(&forked)) return CUDA_ERROR_NOT_INITIALIZED;
    if (device_count <= 0) return CUDA_ERROR_NO_DEVICE;
    if (!atomic_exchange(&initialised, 1)) atexit(end);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDriverGetVersion(int *out)
{
    ENTER(verdict, -1);
    NEEDS(out);
    *out = version;
    return (CUresult)verdict.code;
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
          "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static CUresult described(CUresult code, const char **out, int name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *out = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORTED CUresult CUDAAPI cuGetErrorName(CUresult code, const char **out)
{
    return described(code, out, 1);
}

EXPORTED CUresult CUDAAPI cuGetErrorString(CUresult code, const char **out)
{
    return described(code, out, 0);
}

/* -- devices ------------------------------------------------------------------------------------ */

#define KNOWN(device)                                                      \
    do {                                                                   \
        if ((device) < 0 || (device) >= device_count) return CUDA_ERROR_INVALID_DEVICE; \
    } while (0)

EXPORTED CUresult CUDAAPI cuDeviceGetCount(int *out)
{
    DRIVER_CALL();
    *out = device_count;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGet(CUdevice *out, int ordinal)
{
    DRIVER_CALL();
    KNOWN(ordinal);
    *out = ordinal;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGetName(char *out, int room, CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    snprintf(out, (size_t)room, "stand-in device %d", device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    *out = device_bytes;
    return CUDA_SUCCESS;
}

static CUresult uuid(CUuuid *out, CUdevice device)
{
    KNOWN(device);
    memcpy(out->bytes, "a stand-in dev.", 15);
    out->bytes[15] = (char)device;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *out, CUdevice device)
{
    DRIVER_CALL();
    return uuid(out, device);
}

EXPORTED CUresult CUDAAPI cuDeviceGetPCIBusId(char *out, int room, CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    snprintf(out, (size_t)room, "0000:%02x:00.0", 0x10 + device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *out, const char *text)
{
    DRIVER_CALL();
    unsigned bus;
    NEEDS(sscanf(text, "%*x:%x:%*x", &bus) == 1 && bus >= 0x10);
    KNOWN((int)bus - 0x10);
    *out = (int)bus - 0x10;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    *major = 9;
    *minor = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer)
{
    DRIVER_CALL();
    KNOWN(device);
    KNOWN(peer);
    *out = device != peer;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGetAttribute(int *out, CUdevice_attribute attribute,
                                               CUdevice device)
{
    DRIVER_CALL();
    KNOWN(device);
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *out = 0x10 + device; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = 4; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *out = 1000000; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *out = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *out = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *out = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *out = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *out = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *out = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *out = 2048; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out = 2; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *out = 1; break;
    default: *out = 0;
    }
    return CUDA_SUCCESS;
}

/* -- what tests look at -------------------------------------------------------------------------- */

/* Return a count that goes up and down, for one device or (-1) for all; -1 for an unknown name. */
EXPORTED long standin_cuda_gauge(const char *name, int device);
EXPORTED long standin_cuda_gauge(const char *name, int device)
{
    long total = 0;
    if (!strcmp(name, "contexts") || !strcmp(name, "contexts made")) {
        for (int i = 0; i < device_count; i++)
            if (device < 0 || device == i)
                total += name[8] ? (long)contexts_made(i) : (long)contexts_alive(i);
        return total;
    }
    if (!strcmp(name, "events")) return events_gauge();
    if (!strcmp(name, "streams")) return streams_gauge(name, device);
    return memory_gauge(name, device);
}
