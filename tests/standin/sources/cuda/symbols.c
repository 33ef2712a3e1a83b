/* Looking entry points up by name, and what has no stand-in. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Names whose newest version has other parameters than the one before, and since which release. */
static const struct { const char *name; int since; const char *older; } changed[] = {
    {"cuCtxCreate", 13000, "cuCtxCreate_v2"},
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

/* Kernels don't run here. */
#define NO_KERNELS(name, ...)                                  \
    EXPORTED CUresult CUDAAPI name(__VA_ARGS__)                \
    {                                                          \
        DRIVER_CALL();                                         \
        return CUDA_ERROR_NOT_SUPPORTED;                       \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
NO_KERNELS(cuModuleLoadData, CUmodule *module, const void *image)
NO_KERNELS(cuModuleLoadDataEx, CUmodule *module, const void *image, unsigned count,
           CUjit_option *options, void **values)
NO_KERNELS(cuLibraryLoadData, CUlibrary *library, const void *code, CUjit_option *options,
           void **values, unsigned count, CUlibraryOption *library_options, void **library_values,
           unsigned library_count)
NO_KERNELS(cuLaunchKernel, CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
           unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
           void **parameters, void **extra)

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
