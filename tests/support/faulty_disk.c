/* Preloaded into a process: reads and writes of files called `slab` fail with EIO, or stand still, while a file of that name lies in $FAULTS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_set(const char *fault) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", getenv("FAULTS"), fault);
    return access(path, F_OK) == 0;
}

static int fails(int fd, const char *fault) {
    char link[64], target[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0) return 0;
    target[length] = 0;
    if (!strstr(target, "slab")) return 0;
    while (is_set("hang")) usleep(1000);
    return is_set(fault);
}

#define REAL(name, ...) ((ssize_t (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

/* What os.preadv and os.pwritev come to, with and without the calls that take flags. */
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    if (fails(fd, "read_eio")) return errno = EIO, -1;
    return REAL(preadv64, int, const struct iovec *, int, off64_t)(fd, parts, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    if (fails(fd, "read_eio")) return errno = EIO, -1;
    return REAL(preadv64v2, int, const struct iovec *, int, off64_t, int)(fd, parts, count, offset, flags);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    if (fails(fd, "write_eio")) return errno = EIO, -1;
    return REAL(pwritev64, int, const struct iovec *, int, off64_t)(fd, parts, count, offset);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    if (fails(fd, "write_eio")) return errno = EIO, -1;
    return REAL(pwritev64v2, int, const struct iovec *, int, off64_t, int)(fd, parts, count, offset, flags);
}
