/* Looking entry points up by name, and what has no stand-in. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Names whose newest version has other parameters than the one before, and since which release. */
static const struct { const char *name; int since; const char *older; } changed[] = {
    {"cuCtxCreate", 12050, "cuCtxCreate_v2"},
};

static void *symbol(const char *name)
{
    static void *self;
    Dl_info found;
    if (!self && dladdr((void *)symbol, &found))
        self = dlopen(found.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    return self ? dlsym(self, name) : NULL;
}

/* The newest version that this library has: cuMemAlloc means cuMemAlloc_v2. */
static void *newest(const char *name)
{
    char versioned[128];
    void *found = NULL;
    for (int version = 4; version > 1 && !found; version--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        found = symbol(versioned);
    }
    return found ? found : symbol(name);
}

/* What CUDA has and this library has not. The runtime library inside others does not start unless it
 * finds all of the driver's names, most of which it never calls. */
static CUresult unsupported(void)
{
    static struct counter *counter;
    if (!counter) counter = control_counter("unsupported");
    struct verdict verdict = control_enter(counter, -1);
    return verdict.code ? (CUresult)verdict.code : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORTED CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **out, int version,
                                              cuuint64_t flags,
                                              CUdriverProcAddressQueryResult *status)
{
    ENTER(verdict, -1);
    (void)flags, (void)verdict;
    NEEDS(name && out);
    *out = NULL;
    for (size_t i = 0; i < sizeof changed / sizeof *changed; i++)
        if (!strcmp(name, changed[i].name) && version < changed[i].since)
            *out = symbol(changed[i].older);
    if (!*out) *out = newest(name);
    if (!*out && !strncmp(name, "cu", 2)) *out = (void *)unsupported;
    if (status)
        *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
EXPORTED CUresult CUDAAPI cuGetProcAddress(const char *name, void **out, int version,
                                           cuuint64_t flags);
EXPORTED CUresult CUDAAPI cuGetProcAddress(const char *name, void **out, int version,
                                           cuuint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

EXPORTED CUresult CUDAAPI cuGetExportTable(const void **out, const CUuuid *id)
{
    (void)id;
    *out = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* What libraries look for by name, in vain: kernels, virtual memory, other processes' memory. They
 * take any parameters, since they look at none. */
#define UNSUPPORTED(name)                              \
    EXPORTED int name##_(void) __asm__(#name);         \
    EXPORTED int name##_(void)                         \
    {                                                  \
        DRIVER_CALL();                                 \
        return CUDA_ERROR_NOT_SUPPORTED;               \
    }
UNSUPPORTED(cuCtxEnablePeerAccess)
UNSUPPORTED(cuIpcCloseMemHandle)
UNSUPPORTED(cuIpcGetEventHandle)
UNSUPPORTED(cuIpcGetMemHandle)
UNSUPPORTED(cuIpcOpenEventHandle)
UNSUPPORTED(cuIpcOpenMemHandle_v2)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLibraryLoadData)
UNSUPPORTED(cuMemcpyPeer)
UNSUPPORTED(cuMemcpyPeerAsync)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuStreamWaitValue32_v2)
UNSUPPORTED(cuStreamWriteValue32_v2)

/* -- what the stand-in for libcufile.so.0 needs ------------------------------------------------------ */

EXPORTED void *standin_cuda_use(const void *address, size_t nbytes);
EXPORTED void *standin_cuda_use(const void *address, size_t nbytes)
{
    return memory_use((uintptr_t)address, nbytes);
}

EXPORTED void standin_cuda_done(const void *address);
EXPORTED void standin_cuda_done(const void *address) { memory_done((uintptr_t)address); }

/* The kind of memory as in `memory_kind`. */
EXPORTED int standin_cuda_kind(const void *address, size_t nbytes);
EXPORTED int standin_cuda_kind(const void *address, size_t nbytes)
{
    return memory_kind((uintptr_t)address, nbytes);
}

/* Note that cuFile has (1) or no longer has (-1) a registration in the allocation of an address. */
EXPORTED void standin_cuda_register(const void *address, int change);
EXPORTED void standin_cuda_register(const void *address, int change)
{
    memory_register((uintptr_t)address, change);
}

EXPORTED int standin_cuda_enqueue(CUstream stream, int (*work)(void *), void *argument);
EXPORTED int standin_cuda_enqueue(CUstream stream, int (*work)(void *), void *argument)
{
    return (int)stream_enqueue(stream, (work_function *)work, argument, NULL, NULL);
}
