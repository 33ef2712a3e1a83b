/* The table of memory that the driver knows, and device and managed memory.
 *
 * One range of addresses is reserved for all devices, without access. Allocations of it are
 * aligned as the driver does it: 512 bytes for small ones, 2 MiB for large ones. An address of the
 * range that no allocation holds is no memory at all, so use after free is found.
 *
 * STANDIN_CUDA_REUSE  1: freed addresses are handed out again at once, as the driver may do
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define RANGE_BYTES ((size_t)256 << 30)
#define SMALL ((size_t)1 << 20)
#define POISON 0xcd

static struct memory *table; /* sorted by address */
static size_t count, room;
static unsigned long long next_id = 1;
static uintptr_t range, next_address;
static struct { uintptr_t base; size_t reserved; } freed[256];
static size_t freed_count;
static atomic_int reuse = -1;
static size_t used[MOST_DEVICES];
static long freed_registered, freed_in_use;
static pthread_cond_t unused = PTHREAD_COND_INITIALIZER;

/* -- the table ----------------------------------------------------------------------------------- */

/* The index of the first entry that starts behind `address`. With the lock held, as all here. */
static size_t behind(uintptr_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle].base <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct memory *entry_of(uintptr_t address)
{
    size_t i = behind(address);
    return i && address - table[i - 1].base < table[i - 1].nbytes ? &table[i - 1] : NULL;
}

static int insert(struct memory entry)
{
    if (count == room) {
        size_t wanted = room ? 2 * room : 256;
        struct memory *larger = realloc(table, wanted * sizeof *table);
        if (!larger) return 0;
        table = larger;
        room = wanted;
    }
    size_t i = behind(entry.base);
    memmove(table + i + 1, table + i, (count - i) * sizeof *table);
    entry.id = next_id++;
    table[i] = entry;
    count++;
    return 1;
}

static struct memory extract(struct memory *entry)
{
    struct memory taken = *entry;
    size_t i = (size_t)(entry - table);
    memmove(table + i, table + i + 1, (--count - i) * sizeof *table);
    return taken;
}

static int in_range(uintptr_t address)
{
    return range && address >= range && address < range + RANGE_BYTES;
}

int memory_find(uintptr_t address, struct memory *found)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(address);
    if (entry) *found = *entry;
    pthread_mutex_unlock(&driver_lock);
    return entry != NULL;
}

int memory_kind(uintptr_t address, size_t nbytes)
{
    struct memory found;
    if (!memory_find(address, &found)) return in_range(address) || !address ? -1 : 0;
    /* Copies of host memory may go beyond the part of it that is page-locked. */
    if (nbytes > found.base + found.nbytes - address) return found.kind < PAGE_LOCKED ? -1 : 0;
    return (int)found.kind;
}

void *memory_use(uintptr_t address, size_t nbytes)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(address);
    char *at = (char *)address;
    if (entry && entry->kind < PAGE_LOCKED) {
        int inside = nbytes <= entry->base + entry->nbytes - address;
        at = inside ? entry->view + (address - entry->base) : NULL;
        if (inside) entry->uses++;
    } else if (in_range(address)) {
        at = NULL;
    }
    pthread_mutex_unlock(&driver_lock);
    return at;
}

void memory_done(uintptr_t address)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(address);
    if (entry && entry->kind < PAGE_LOCKED && --entry->uses == 0) pthread_cond_broadcast(&unused);
    pthread_mutex_unlock(&driver_lock);
}

void memory_register(uintptr_t address, int change)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(address);
    if (entry) entry->registrations += change;
    pthread_mutex_unlock(&driver_lock);
}

int memory_overlaps(uintptr_t base, size_t nbytes)
{
    pthread_mutex_lock(&driver_lock);
    size_t i = behind(base + nbytes - 1);
    int found = i && base < table[i - 1].base + table[i - 1].nbytes;
    pthread_mutex_unlock(&driver_lock);
    return found;
}

int memory_add(struct memory entry)
{
    pthread_mutex_lock(&driver_lock);
    int added = insert(entry);
    pthread_mutex_unlock(&driver_lock);
    return added;
}

int memory_take(uintptr_t base, enum kind kind, struct memory *taken)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(base);
    int found = entry && entry->base == base && entry->kind == kind;
    if (found) *taken = extract(entry);
    pthread_mutex_unlock(&driver_lock);
    return found;
}

/* -- device and managed memory -------------------------------------------------------------------- */

/* Return an address for `nbytes`, and how many bytes of the range it takes; 0 if it is full. */
static uintptr_t reserve(size_t nbytes, size_t *reserved)
{
    size_t grain = nbytes < SMALL ? 512 : (size_t)2 << 20;
    *reserved = (nbytes + grain - 1) / grain * grain;
    if (reuse < 0) reuse = (int)control_setting("STANDIN_CUDA_REUSE", 0);
    for (size_t i = freed_count; reuse && i-- > 0;)
        if (freed[i].reserved == *reserved) {
            uintptr_t base = freed[i].base;
            freed[i] = freed[--freed_count];
            return base;
        }
    if (!range) {
        void *all = mmap(NULL, RANGE_BYTES, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) return 0;
        range = next_address = (uintptr_t)all;
    }
    uintptr_t base = (next_address + grain - 1) / grain * grain;
    if (*reserved > range + RANGE_BYTES - base) return 0;
    next_address = base + *reserved;
    return base;
}

/* Give managed memory pages of its own, which the host may touch. */
static char *managed(size_t nbytes)
{
    void *pages = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

static CUresult allocate(CUdeviceptr *out, size_t nbytes, enum kind kind, CUcontext context)
{
    NEEDS(out && nbytes);
    struct memory entry = {.nbytes = nbytes, .kind = kind, .context = context};
    pthread_mutex_lock(&driver_lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (nbytes <= device_bytes - used[context->device]) {
        if (kind == MANAGED) {
            entry.reserved = nbytes;
            entry.view = managed(nbytes);
            entry.base = (uintptr_t)entry.view;
        } else if ((entry.base = reserve(nbytes, &entry.reserved)) &&
                   posix_memalign((void **)&entry.view, 512, entry.reserved)) {
            entry.view = NULL;
        }
        if (entry.view) {
            /* Fresh memory is never zero by luck. */
            memset(entry.view, POISON, nbytes < SMALL ? nbytes : SMALL);
            if (insert(entry)) result = CUDA_SUCCESS;
        }
    }
    if (!result) used[context->device] += entry.nbytes;
    pthread_mutex_unlock(&driver_lock);
    if (!result) *out = entry.base;
    return result;
}

/* With the lock held; waits for operations that touch the memory. */
static void discard(uintptr_t base)
{
    struct memory *entry = entry_of(base);
    if (entry->registrations) freed_registered++;
    if (entry->uses) freed_in_use++;
    while (entry->uses) {
        pthread_cond_wait(&unused, &driver_lock);
        entry = entry_of(base);
    }
    struct memory gone = extract(entry);
    used[gone.context->device] -= gone.nbytes;
    if (gone.kind == MANAGED) {
        munmap(gone.view, gone.reserved);
        return;
    }
    free(gone.view);
    if (freed_count < sizeof freed / sizeof *freed) {
        freed[freed_count].base = gone.base;
        freed[freed_count++].reserved = gone.reserved;
    }
}

static CUresult release(CUdeviceptr address)
{
    pthread_mutex_lock(&driver_lock);
    struct memory *entry = entry_of(address);
    int mine = entry && entry->base == address && entry->kind < PAGE_LOCKED;
    if (mine) discard(address);
    pthread_mutex_unlock(&driver_lock);
    return mine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void memory_free_context(CUcontext context)
{
    pthread_mutex_lock(&driver_lock);
    for (size_t i = count; i-- > 0;)
        if (i < count && table[i].context == context && table[i].kind < PAGE_LOCKED)
            discard(table[i].base);
    pthread_mutex_unlock(&driver_lock);
}

long memory_gauge(const char *name, int device)
{
    if (!strcmp(name, "freed while registered")) return freed_registered;
    if (!strcmp(name, "freed in use")) return freed_in_use;
    int locked = !strncmp(name, "page-locked", 11);
    int bytes = !strcmp(name, "bytes") || !strcmp(name, "page-locked bytes");
    if (!bytes && !locked && strcmp(name, "allocations")) return -1;
    long total = 0;
    pthread_mutex_lock(&driver_lock);
    for (size_t i = 0; i < count; i++)
        if ((table[i].kind >= PAGE_LOCKED) == locked &&
            (device < 0 || table[i].context->device == device))
            total += bytes ? (long)table[i].nbytes : 1;
    pthread_mutex_unlock(&driver_lock);
    return total;
}

/* Whether freed addresses are handed out again at once. */
EXPORTED void standin_cuda_reuse(int wanted);
EXPORTED void standin_cuda_reuse(int wanted) { atomic_store(&reuse, wanted); }

/* -- entry points --------------------------------------------------------------------------------- */

EXPORTED CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *out, size_t nbytes)
{
    CONTEXT_CALL();
    return allocate(out, nbytes, DEVICE, here);
}

EXPORTED CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *out, size_t nbytes, unsigned flags)
{
    CONTEXT_CALL();
    (void)flags;
    return allocate(out, nbytes, MANAGED, here);
}

/* Waits for all work of the context, as the driver does. */
EXPORTED CUresult CUDAAPI cuMemFree_v2(CUdeviceptr address)
{
    CONTEXT_CALL();
    if (!address) return CUDA_SUCCESS;
    streams_wait(here);
    return release(address);
}

EXPORTED CUresult CUDAAPI cuMemGetInfo_v2(size_t *available, size_t *total)
{
    CONTEXT_CALL();
    *total = device_bytes;
    *available = device_bytes - used[here->device];
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes,
                                                  CUdeviceptr address)
{
    CONTEXT_CALL();
    struct memory found;
    if (!memory_find(address, &found) || found.kind == REGISTERED) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = found.base;
    if (nbytes) *nbytes = found.nbytes;
    return CUDA_SUCCESS;
}

/* -- stream-ordered allocation: memory is there at once, and goes in its turn ----------------------- */

EXPORTED CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *out, size_t nbytes, CUstream stream)
{
    CONTEXT_CALL();
    (void)stream;
    return allocate(out, nbytes, DEVICE, here);
}

EXPORTED CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t nbytes,
                                                  CUmemoryPool pool, CUstream stream)
{
    CONTEXT_CALL();
    (void)pool, (void)stream;
    return allocate(out, nbytes, DEVICE, here);
}

static CUresult free_work(void *argument) { return release((CUdeviceptr)argument); }

EXPORTED CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    CONTEXT_WORK();
    struct memory found;
    NEEDS(memory_find(address, &found) && found.base == address);
    return stream_enqueue(stream, free_work, (void *)address, &verdict, NULL);
}

static CUresult pool_of(CUmemoryPool *out, CUdevice device)
{
    NEEDS(device >= 0 && device < device_count);
    *out = (CUmemoryPool)(uintptr_t)(0x1000 + device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    DRIVER_CALL();
    return pool_of(out, device);
}

EXPORTED CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device)
{
    DRIVER_CALL();
    return pool_of(out, device);
}

EXPORTED CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                                void *out)
{
    DRIVER_CALL();
    (void)pool, (void)attribute;
    *(cuuint64_t *)out = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                                void *value)
{
    DRIVER_CALL();
    (void)pool, (void)attribute, (void)value;
    return CUDA_SUCCESS;
}
