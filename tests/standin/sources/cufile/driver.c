/* The driver's life, its properties and its parameters.
 *
 * STANDIN_CUFILE_NVFS       version of nvidia-fs as major.minor (2.26); 0.0 says that there is none
 * STANDIN_CUFILE_PINNED_KB  device memory that may be registered (32 GiB)
 */
#include "library.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARAMETERS = 32, LONGEST_TEXT = 256, VERSION = 1200 };

pthread_mutex_t library_lock = PTHREAD_MUTEX_INITIALIZER;

static int major = 2, minor = 26;
static atomic_long opened;
static atomic_int in_child;
static size_t sizes[PARAMETERS];
static bool flags[PARAMETERS];
static char texts[PARAMETERS][LONGEST_TEXT];
static struct cuda functions;

static void forked(void) { atomic_store(&in_child, 1); }

int library_forked(void) { return atomic_load(&in_child); }

__attribute__((constructor)) static void begin(void)
{
    const char *nvfs = getenv("STANDIN_CUFILE_NVFS");
    if (nvfs) sscanf(nvfs, "%d.%d", &major, &minor);
    sizes[CUFILE_PARAM_EXECUTION_MAX_IO_QUEUE_DEPTH] = 128;
    sizes[CUFILE_PARAM_EXECUTION_MAX_IO_THREADS] = 4;
    sizes[CUFILE_PARAM_EXECUTION_MIN_IO_THRESHOLD_SIZE_KB] = 8192;
    sizes[CUFILE_PARAM_EXECUTION_MAX_REQUEST_PARALLELISM] = 4;
    sizes[CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB] = 16384;
    sizes[CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB] = 131072;
    sizes[CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB] = 1024;
    sizes[CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB] =
        (size_t)control_setting("STANDIN_CUFILE_PINNED_KB", 32ll << 20);
    sizes[CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE] = 128;
    sizes[CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB] = 4;
    flags[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE] = true;
    pthread_atfork(NULL, NULL, forked);
}

static void *function_of(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "standin_cufile: libcuda.so.1 is no stand-in: %s\n", dlerror());
        abort();
    }
    return found;
}

static void connect_cuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&functions.use = function_of(library, "standin_cuda_use");
    *(void **)&functions.done = function_of(library, "standin_cuda_done");
    *(void **)&functions.kind = function_of(library, "standin_cuda_kind");
    *(void **)&functions.registered = function_of(library, "standin_cuda_register");
    *(void **)&functions.enqueue = function_of(library, "standin_cuda_enqueue");
}

const struct cuda *cuda(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, connect_cuda);
    return &functions;
}

long library_gauge(const char *name)
{
    if (!strcmp(name, "opened")) return atomic_load(&opened);
    if (!strcmp(name, "pinned limit"))
        return (long)sizes[CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB] << 10;
    return -1;
}

/* Return a count that goes up and down; -1 for an unknown name. */
EXPORTED long standin_cufile_gauge(const char *name);
EXPORTED long standin_cufile_gauge(const char *name)
{
    long value = library_gauge(name);
    return value < 0 ? files_gauge(name) : value;
}

/* -- the driver ------------------------------------------------------------------------------------ */

CUfileError_t cuFileDriverOpen(void)
{
    CUFILE_CALL();
    atomic_fetch_add(&opened, 1);
    return SUCCESS;
}

CUfileError_t cuFileDriverClose_v2(void)
{
    CUFILE_CALL();
    if (atomic_load(&opened) > 0) atomic_fetch_sub(&opened, 1);
    return SUCCESS;
}

#undef cuFileDriverClose
CUfileError_t cuFileDriverClose(void);
CUfileError_t cuFileDriverClose(void) { return cuFileDriverClose_v2(); }

long cuFileUseCount(void) { return atomic_load(&opened); }

CUfileError_t cuFileGetVersion(int *out)
{
    CUFILE_CALL();
    *out = VERSION;
    return SUCCESS;
}

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t *out)
{
    CUFILE_CALL();
    memset(out, 0, sizeof *out);
    out->nvfs.major_version = (unsigned)major;
    out->nvfs.minor_version = (unsigned)minor;
    out->nvfs.poll_thresh_size = sizes[CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB];
    out->nvfs.max_direct_io_size = sizes[CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB];
    out->nvfs.dstatusflags = 1u << CU_FILE_NVME_SUPPORTED;
    if (flags[CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE])
        out->nvfs.dcontrolflags |= 1u << CU_FILE_ALLOW_COMPAT_MODE;
    if (flags[CUFILE_PARAM_PROPERTIES_USE_POLL_MODE])
        out->nvfs.dcontrolflags |= 1u << CU_FILE_USE_POLL_MODE;
    out->fflags = 1u << CU_FILE_BATCH_IO_SUPPORTED | 1u << CU_FILE_STREAMS_SUPPORTED;
    out->max_device_cache_size =
        (unsigned)sizes[CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB];
    out->per_buffer_cache_size =
        (unsigned)sizes[CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB];
    out->max_device_pinned_mem_size =
        (unsigned)sizes[CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB];
    out->max_batch_io_size = (unsigned)sizes[CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE];
    return SUCCESS;
}

CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold)
{
    CUFILE_CALL();
    flags[CUFILE_PARAM_PROPERTIES_USE_POLL_MODE] = poll;
    sizes[CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB] = threshold;
    return SUCCESS;
}

#define SET_SIZE(name, parameter)               \
    CUfileError_t name(size_t value)            \
    {                                           \
        CUFILE_CALL();                          \
        sizes[parameter] = value;               \
        return SUCCESS;                         \
    }
SET_SIZE(cuFileDriverSetMaxDirectIOSize, CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB)
SET_SIZE(cuFileDriverSetMaxCacheSize, CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB)
SET_SIZE(cuFileDriverSetMaxPinnedMemSize, CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB)

CUfileError_t cuFileGetBARSizeInKB(int device, size_t *out)
{
    CUFILE_CALL();
    (void)device;
    *out = 256 << 10;
    return SUCCESS;
}

/* -- parameters: set before the driver is opened ----------------------------------------------------- */

#define CHECK(parameter)                                                             \
    if ((unsigned)(parameter) >= PARAMETERS) return FAILURE(CU_FILE_INVALID_VALUE)
#define CHECK_CLOSED() \
    if (atomic_load(&opened)) return FAILURE(CU_FILE_DRIVER_ALREADY_OPEN)

CUfileError_t cuFileGetParameterSizeT(CUFileSizeTConfigParameter_t parameter, size_t *out)
{
    CUFILE_CALL();
    CHECK(parameter);
    *out = sizes[parameter];
    return SUCCESS;
}

CUfileError_t cuFileGetParameterBool(CUFileBoolConfigParameter_t parameter, bool *out)
{
    CUFILE_CALL();
    CHECK(parameter);
    *out = flags[parameter];
    return SUCCESS;
}

CUfileError_t cuFileGetParameterString(CUFileStringConfigParameter_t parameter, char *out, int room)
{
    CUFILE_CALL();
    CHECK(parameter);
    snprintf(out, (size_t)room, "%s", texts[parameter]);
    return SUCCESS;
}

CUfileError_t cuFileSetParameterSizeT(CUFileSizeTConfigParameter_t parameter, size_t value)
{
    CUFILE_CALL();
    CHECK(parameter);
    CHECK_CLOSED();
    sizes[parameter] = value;
    return SUCCESS;
}

CUfileError_t cuFileSetParameterBool(CUFileBoolConfigParameter_t parameter, bool value)
{
    CUFILE_CALL();
    CHECK(parameter);
    CHECK_CLOSED();
    flags[parameter] = value;
    return SUCCESS;
}

CUfileError_t cuFileSetParameterString(CUFileStringConfigParameter_t parameter, const char *text)
{
    CUFILE_CALL();
    CHECK(parameter);
    CHECK_CLOSED();
    snprintf(texts[parameter], LONGEST_TEXT, "%s", text);
    return SUCCESS;
}
