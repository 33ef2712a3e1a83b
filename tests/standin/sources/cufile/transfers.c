/* Reads and writes: at once, in the order of a stream, and in batches. */
#include "library.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Move up to `nbytes`; return how many, or -1 with errno. The end of a file ends a read. */
static ssize_t move(int write, int fd, char *memory, size_t nbytes, off_t offset)
{
    size_t done = 0;
    while (done < nbytes) {
        ssize_t moved = write ? pwrite(fd, memory + done, nbytes - done, offset + (off_t)done)
                              : pread(fd, memory + done, nbytes - done, offset + (off_t)done);
        if (moved < 0) return -1;
        if (moved == 0) break;
        done += (size_t)moved;
    }
    return (ssize_t)done;
}

ssize_t transfer(int write, CUfileHandle_t handle, const void *base, size_t nbytes, off_t offset,
                 off_t base_offset, const struct verdict *verdict)
{
    control_sleep(verdict->delay);
    if (verdict->code) return -verdict->code;
    if (verdict->error_number) {
        errno = verdict->error_number;
        return -1;
    }
    if (library_forked()) return -CU_FILE_DRIVER_NOT_INITIALIZED;
    struct file *file = file_use(handle);
    if (!file) return -CU_FILE_HANDLE_NOT_REGISTERED;
    const char *start = (const char *)base + base_offset;
    char *memory = cuda()->use(start, nbytes);
    ssize_t moved = -CU_FILE_CUDA_POINTER_RANGE_ERROR;
    int error = 0;
    if (memory) {
        size_t most = verdict->most >= 0 && (size_t)verdict->most < nbytes ? (size_t)verdict->most
                                                                           : nbytes;
        moved = move(write, file->own_fd, memory, most, offset);
        error = errno;
        cuda()->done(start);
        if (moved > 0) buffer_moved(base, (size_t)base_offset, (size_t)moved);
    }
    file_done(file);
    errno = error;
    return moved;
}

ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t nbytes, off_t offset,
                   off_t base_offset)
{
    ENTER(verdict, offset);
    return transfer(0, handle, base, nbytes, offset, base_offset, &verdict);
}

ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t nbytes, off_t offset,
                    off_t base_offset)
{
    ENTER(verdict, offset);
    return transfer(1, handle, base, nbytes, offset, base_offset, &verdict);
}

/* -- in the order of a stream ------------------------------------------------------------------------ */

struct ordered {
    int write;
    CUfileHandle_t handle;
    void *base;
    size_t *nbytes;
    off_t *offset, *base_offset;
    ssize_t *moved;
    struct verdict verdict;
};

/* Sizes and offsets are looked at when the stream comes to it, not when it was asked for. */
static int ordered_work(void *argument)
{
    struct ordered o = *(struct ordered *)argument;
    free(argument);
    ssize_t moved =
        transfer(o.write, o.handle, o.base, *o.nbytes, *o.offset, *o.base_offset, &o.verdict);
    *o.moved = moved;
    return 0;
}

static CUfileError_t queue_ordered(struct ordered ordered, CUstream stream)
{
    if (!ordered.nbytes || !ordered.offset || !ordered.base_offset || !ordered.moved)
        return FAILURE(CU_FILE_INVALID_VALUE);
    /* What a rule says about the data path shows in the count; a code, in the call. */
    if (ordered.verdict.code) return FAILURE(ordered.verdict.code);
    ordered.verdict.code = ordered.verdict.late;
    if (library_forked()) return FAILURE(CU_FILE_DRIVER_NOT_INITIALIZED);
    struct ordered *copy = malloc(sizeof *copy);
    if (!copy) return FAILURE(CU_FILE_NOMEM_ERROR);
    *copy = ordered;
    int result = cuda()->enqueue(stream, ordered_work, copy);
    if (!result) return SUCCESS;
    free(copy);
    return (CUfileError_t){CU_FILE_CUDA_DRIVER_ERROR, (CUresult)result};
}

CUfileError_t cuFileReadAsync(CUfileHandle_t handle, void *base, size_t *nbytes, off_t *offset,
                              off_t *base_offset, ssize_t *moved, CUstream stream)
{
    ENTER(verdict, offset ? *offset : -1);
    return queue_ordered((struct ordered){0, handle, base, nbytes, offset, base_offset, moved,
                                          verdict}, stream);
}

CUfileError_t cuFileWriteAsync(CUfileHandle_t handle, void *base, size_t *nbytes, off_t *offset,
                               off_t *base_offset, ssize_t *moved, CUstream stream)
{
    ENTER(verdict, offset ? *offset : -1);
    return queue_ordered((struct ordered){1, handle, base, nbytes, offset, base_offset, moved,
                                          verdict}, stream);
}

CUfileError_t cuFileStreamRegister(CUstream stream, unsigned options)
{
    CUFILE_CALL();
    (void)stream;
    return options > 15 ? FAILURE(CU_FILE_INVALID_VALUE) : SUCCESS;
}

CUfileError_t cuFileStreamDeregister(CUstream stream)
{
    CUFILE_CALL();
    (void)stream;
    return SUCCESS;
}

/* -- batches ------------------------------------------------------------------------------------------ */

enum { MOST_ENTRIES = 128 };

struct entry {
    CUfileIOParams_t what;
    struct verdict verdict;
    CUfileStatus_t status;
    ssize_t result;
};

/* Entries are worked off by one thread, in order; [taken, count) is what is not reported yet. */
struct batch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t worker;
    unsigned room, count, done, taken;
    int running, cancelled, to_join;
    struct entry entries[MOST_ENTRIES];
};

static void *batch_worker(void *argument)
{
    struct batch *batch = argument;
    pthread_mutex_lock(&batch->lock);
    while (batch->done < batch->count) {
        struct entry *entry = &batch->entries[batch->done];
        CUfileIOParams_t *what = &entry->what;
        int cancelled = batch->cancelled;
        pthread_mutex_unlock(&batch->lock);
        ssize_t result = cancelled ? 0
                                   : transfer(what->opcode == CUFILE_WRITE, what->fh,
                                              what->u.batch.devPtr_base, what->u.batch.size,
                                              what->u.batch.file_offset,
                                              what->u.batch.devPtr_offset, &entry->verdict);
        pthread_mutex_lock(&batch->lock);
        entry->result = result;
        entry->status = cancelled ? CUFILE_CANCELED : result < 0 ? CUFILE_FAILED : CUFILE_COMPLETE;
        batch->done++;
        pthread_cond_broadcast(&batch->changed);
    }
    batch->running = 0;
    pthread_cond_broadcast(&batch->changed);
    pthread_mutex_unlock(&batch->lock);
    return NULL;
}

CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t *out, unsigned entries)
{
    CUFILE_CALL();
    if (!entries || entries > MOST_ENTRIES) return FAILURE(CU_FILE_INVALID_VALUE);
    struct batch *batch = calloc(1, sizeof *batch);
    if (!batch) return FAILURE(CU_FILE_NOMEM_ERROR);
    pthread_mutex_init(&batch->lock, NULL);
    pthread_cond_init(&batch->changed, NULL);
    batch->room = entries;
    *out = batch;
    return SUCCESS;
}

/* One entry of a batch counts, and fails by the rules, as a call of "cuFileBatchEntry". */
static struct entry entry_of(CUfileIOParams_t what)
{
    static struct counter *counter;
    if (!counter) counter = control_counter("cuFileBatchEntry");
    struct entry entry = {.what = what, .status = CUFILE_PENDING};
    entry.verdict = control_enter(counter, what.u.batch.file_offset);
    return entry;
}

CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t handle, unsigned entries,
                                  CUfileIOParams_t *what, unsigned options)
{
    CUFILE_CALL();
    struct batch *batch = handle;
    if (options || !batch) return FAILURE(CU_FILE_INVALID_VALUE);
    CUfileError_t result = SUCCESS;
    pthread_mutex_lock(&batch->lock);
    if (batch->taken == batch->count && !batch->running) batch->taken = batch->done = batch->count = 0;
    if (batch->running) result = FAILURE(CU_FILE_BATCH_SUBMIT_FAILED);
    else if (batch->count + entries > batch->room) result = FAILURE(CU_FILE_BATCH_FULL);
    for (unsigned i = 0; !result.err && i < entries; i++)
        batch->entries[batch->count++] = entry_of(what[i]);
    if (!result.err) {
        if (batch->to_join) pthread_join(batch->worker, NULL);
        batch->running = batch->to_join =
            !pthread_create(&batch->worker, NULL, batch_worker, batch);
    }
    pthread_mutex_unlock(&batch->lock);
    return result;
}

/* Hand out entries that are done; wait for `least` of them, for a limited time if one is given. */
CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t handle, unsigned least, unsigned *count,
                                     CUfileIOEvents_t *events, struct timespec *timeout)
{
    CUFILE_CALL();
    struct batch *batch = handle;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    if (timeout) {
        until.tv_sec += timeout->tv_sec + (until.tv_nsec + timeout->tv_nsec) / 1000000000;
        until.tv_nsec = (until.tv_nsec + timeout->tv_nsec) % 1000000000;
    }
    unsigned handed = 0;
    pthread_mutex_lock(&batch->lock);
    while (batch->done - batch->taken < least && batch->running)
        if (timeout ? pthread_cond_timedwait(&batch->changed, &batch->lock, &until)
                    : pthread_cond_wait(&batch->changed, &batch->lock))
            break;
    for (; handed < *count && batch->taken < batch->done; batch->taken++) {
        struct entry *entry = &batch->entries[batch->taken];
        events[handed++] = (CUfileIOEvents_t){entry->what.cookie, entry->status,
                                              (size_t)entry->result};
    }
    pthread_mutex_unlock(&batch->lock);
    *count = handed;
    return SUCCESS;
}

CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t handle)
{
    CUFILE_CALL();
    struct batch *batch = handle;
    pthread_mutex_lock(&batch->lock);
    batch->cancelled = 1;
    pthread_mutex_unlock(&batch->lock);
    return SUCCESS;
}

void cuFileBatchIODestroy(CUfileBatchHandle_t handle)
{
    ENTER(verdict, -1);
    (void)verdict;
    struct batch *batch = handle;
    if (batch->to_join) pthread_join(batch->worker, NULL);
    free(batch);
}
