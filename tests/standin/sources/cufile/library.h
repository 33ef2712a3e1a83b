/* What the parts of the stand-in for libcufile.so.0 share. */
#ifndef STANDIN_CUFILE_H
#define STANDIN_CUFILE_H

#define _GNU_SOURCE
#include <cufile.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include "../control.h"

#define SUCCESS ((CUfileError_t){CU_FILE_SUCCESS, CUDA_SUCCESS})
#define FAILURE(code) ((CUfileError_t){(CUfileOpError)(code), CUDA_SUCCESS})

/* Guards files, registrations and the figures below. */
extern pthread_mutex_t library_lock;

/* A registered file. Never freed, so that a deregistered handle is still known to be one. */
struct file {
    struct file *next;
    int fd;        /* the caller's */
    int own_fd;    /* of the same file, through the page cache, so that any alignment works */
    int alive;
    int uses;
};

/* Take a file for an operation; NULL if the handle is of no registered file. */
struct file *file_use(CUfileHandle_t handle);
void file_done(struct file *file);

/* Count bytes as moved through a registration, or through cuFile's own bounce buffers. */
void buffer_moved(const void *base, size_t offset, size_t nbytes);

/* Whether the caller is a forked child, which cuFile does not survive. */
int library_forked(void);
long library_gauge(const char *name);
long files_gauge(const char *name);

/* -- of the stand-in for libcuda.so.1 -------------------------------------------------------------- */

struct cuda {
    void *(*use)(const void *address, size_t nbytes);
    void (*done)(const void *address);
    int (*kind)(const void *address, size_t nbytes);
    void (*registered)(const void *address, int change);
    int (*enqueue)(CUstream stream, int (*work)(void *), void *argument);
};
const struct cuda *cuda(void);

/* Move bytes as cuFileRead and cuFileWrite do, after `verdict`. */
ssize_t transfer(int write, CUfileHandle_t handle, const void *base, size_t nbytes, off_t offset,
                 off_t base_offset, const struct verdict *verdict);

#define CUFILE_CALL()                                                    \
    ENTER(verdict, -1);                                                  \
    control_sleep(verdict.delay);                                        \
    if (verdict.code) return FAILURE(verdict.code);                      \
    if (library_forked()) return FAILURE(CU_FILE_DRIVER_NOT_INITIALIZED)

#endif
