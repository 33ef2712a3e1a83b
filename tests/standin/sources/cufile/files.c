/* Registered files and registered memory. */
#include "library.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_BUFFERS = 65536 };

static struct file *files;
static struct { uintptr_t base; size_t nbytes; } buffers[MOST_BUFFERS];
static size_t buffer_count, pinned;
static long deregistered_in_use, registered_moved, bounced;
static pthread_cond_t unused = PTHREAD_COND_INITIALIZER;

/* -- files ----------------------------------------------------------------------------------------- */

static int known(int fd)
{
    for (struct file *f = files; f; f = f->next)
        if (f->alive && f->fd == fd) return 1;
    return 0;
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *out, CUfileDescr_t *descriptor)
{
    CUFILE_CALL();
    if (!out || !descriptor || descriptor->type != CU_FILE_HANDLE_TYPE_OPAQUE_FD)
        return FAILURE(CU_FILE_INVALID_VALUE);
    int fd = descriptor->handle.fd, mode = fcntl(fd, F_GETFL);
    struct stat status;
    if (mode < 0 || fstat(fd, &status)) return FAILURE(CU_FILE_INVALID_VALUE);
    if (!S_ISREG(status.st_mode)) return FAILURE(CU_FILE_INVALID_FILE_TYPE);
    if (!(mode & O_DIRECT)) return FAILURE(CU_FILE_DIO_NOT_SET);
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    struct file *file = calloc(1, sizeof *file);
    int own = open(name, (mode & O_ACCMODE) | O_CLOEXEC);
    if (!file || own < 0) return FAILURE(CU_FILE_GETNEWFD_FAILED);
    pthread_mutex_lock(&library_lock);
    int twice = known(fd);
    *file = (struct file){.next = files, .fd = fd, .own_fd = own, .alive = !twice};
    files = file;
    pthread_mutex_unlock(&library_lock);
    if (twice) {
        close(own);
        return FAILURE(CU_FILE_HANDLE_ALREADY_REGISTERED);
    }
    *out = file;
    return SUCCESS;
}

/* With the lock held. */
static struct file *look_up(CUfileHandle_t handle)
{
    for (struct file *f = files; f; f = f->next)
        if (f == handle) return f->alive ? f : NULL;
    return NULL;
}

void cuFileHandleDeregister(CUfileHandle_t handle)
{
    ENTER(verdict, -1);
    control_sleep(verdict.delay);
    if (library_forked()) return;
    pthread_mutex_lock(&library_lock);
    struct file *file = look_up(handle);
    if (file) {
        file->alive = 0;
        if (file->uses) deregistered_in_use++;
        while (file->uses) pthread_cond_wait(&unused, &library_lock);
        close(file->own_fd);
    }
    pthread_mutex_unlock(&library_lock);
}

struct file *file_use(CUfileHandle_t handle)
{
    pthread_mutex_lock(&library_lock);
    struct file *file = look_up(handle);
    if (file) file->uses++;
    pthread_mutex_unlock(&library_lock);
    return file;
}

void file_done(struct file *file)
{
    pthread_mutex_lock(&library_lock);
    if (--file->uses == 0) pthread_cond_broadcast(&unused);
    pthread_mutex_unlock(&library_lock);
}

/* -- memory ---------------------------------------------------------------------------------------- */

static CUfileOpError add(uintptr_t base, size_t nbytes)
{
    for (size_t i = 0; i < buffer_count; i++)
        if (base < buffers[i].base + buffers[i].nbytes && buffers[i].base < base + nbytes)
            return CU_FILE_MEMORY_ALREADY_REGISTERED;
    if (pinned + nbytes > (size_t)library_gauge("pinned limit"))
        return CU_FILE_GPU_MEMORY_PINNING_FAILED;
    if (buffer_count == MOST_BUFFERS) return CU_FILE_NOMEM_ERROR;
    buffers[buffer_count].base = base;
    buffers[buffer_count++].nbytes = nbytes;
    pinned += nbytes;
    return CU_FILE_SUCCESS;
}

CUfileError_t cuFileBufRegister(const void *base, size_t nbytes, int options)
{
    CUFILE_CALL();
    (void)options;
    if (!base || !nbytes) return FAILURE(CU_FILE_INVALID_VALUE);
    if (cuda()->kind(base, nbytes) <= 0) return FAILURE(CU_FILE_CUDA_POINTER_RANGE_ERROR);
    pthread_mutex_lock(&library_lock);
    CUfileOpError code = add((uintptr_t)base, nbytes);
    pthread_mutex_unlock(&library_lock);
    if (code == CU_FILE_SUCCESS) cuda()->registered(base, 1);
    return FAILURE(code);
}

CUfileError_t cuFileBufDeregister(const void *base)
{
    CUFILE_CALL();
    CUfileOpError code = CU_FILE_MEMORY_NOT_REGISTERED;
    pthread_mutex_lock(&library_lock);
    for (size_t i = 0; i < buffer_count; i++)
        if (buffers[i].base == (uintptr_t)base) {
            pinned -= buffers[i].nbytes;
            buffers[i] = buffers[--buffer_count];
            code = CU_FILE_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&library_lock);
    if (code == CU_FILE_SUCCESS) cuda()->registered(base, -1);
    return FAILURE(code);
}

void buffer_moved(const void *base, size_t offset, size_t nbytes)
{
    uintptr_t start = (uintptr_t)base + offset;
    int inside = 0;
    pthread_mutex_lock(&library_lock);
    for (size_t i = 0; i < buffer_count && !inside; i++)
        inside = start >= buffers[i].base &&
                 start + nbytes <= buffers[i].base + buffers[i].nbytes;
    if (inside) registered_moved += (long)nbytes;
    else bounced += (long)nbytes;
    pthread_mutex_unlock(&library_lock);
}

long files_gauge(const char *name)
{
    long value = -1;
    pthread_mutex_lock(&library_lock);
    if (!strcmp(name, "registered buffers")) value = (long)buffer_count;
    else if (!strcmp(name, "pinned bytes")) value = (long)pinned;
    else if (!strcmp(name, "registered bytes moved")) value = registered_moved;
    else if (!strcmp(name, "bounced bytes moved")) value = bounced;
    else if (!strcmp(name, "deregistered in use")) value = deregistered_in_use;
    else if (!strcmp(name, "registered files")) {
        value = 0;
        for (struct file *f = files; f; f = f->next) value += f->alive;
    }
    pthread_mutex_unlock(&library_lock);
    return value;
}
