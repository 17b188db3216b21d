/* A machine with a faulty disk or a clock that jumps, for the process that preloads this library. What is wrong at
   the moment is in a file that the environment variable FAULTY_MACHINE names; see `faulty_machine.py`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct {
  int32_t writing, syncing, reading, opening; /* errno that these end with; 0 for none */
  int32_t times, unused;             /* how often */
  int64_t seconds;                   /* that the clock of the day is wrong */
  char below[488];                   /* a part of the paths of the files that are hit */
} none, *faults = &none;

__attribute__((constructor)) static void open_faults(void) {
  const char *path = getenv("FAULTY_MACHINE"), *process = getenv("JAX_PROCESS_ID");
  char own[4096];
  snprintf(own, sizeof own, "%s.%s", path ? path : "", process ? process : "0");
  FILE *file = fopen(own, "r+");
  if (!file) return; /* another process than those that a test disturbs */
  void *shared = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
  if (shared == MAP_FAILED) abort();
  faults = shared;
  fclose(file);
}

static int hits_path(const char *path, int32_t number) {
  if (!number || !strstr(path, faults->below)) return 0;
  if (__atomic_fetch_sub(&faults->times, 1, __ATOMIC_SEQ_CST) <= 0) return 0;
  errno = number;
  return 1;
}

static int hits(int fd, int32_t number) {
  char link[64], path[4096];
  if (!number) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return hits_path(path, number);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILING(kind, result, name, parameters, arguments)     \
  result name parameters {                                     \
    static __typeof__(&name) real;                             \
    if (!real) real = REAL(name);                              \
    return hits(fd, faults->kind) ? (result)-1 : real arguments; \
  }

FAILING(writing, ssize_t, write, (int fd, const void *bytes, size_t count), (fd, bytes, count))
FAILING(writing, ssize_t, pwrite, (int fd, const void *bytes, size_t count, off_t at), (fd, bytes, count, at))
FAILING(writing, ssize_t, pwrite64, (int fd, const void *bytes, size_t count, off64_t at), (fd, bytes, count, at))
FAILING(writing, ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
FAILING(writing, ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
FAILING(syncing, int, fsync, (int fd), (fd))
FAILING(syncing, int, fdatasync, (int fd), (fd))
FAILING(reading, ssize_t, read, (int fd, void *bytes, size_t count), (fd, bytes, count))
FAILING(reading, ssize_t, pread, (int fd, void *bytes, size_t count, off_t at), (fd, bytes, count, at))
FAILING(reading, ssize_t, pread64, (int fd, void *bytes, size_t count, off64_t at), (fd, bytes, count, at))

#define OPENING(name, parameters, arguments)                                \
  int name parameters {                                                     \
    static int (*real) parameters;                                          \
    if (!real) real = dlsym(RTLD_NEXT, #name);                              \
    return hits_path(path, faults->opening) ? -1 : real arguments;          \
  }

OPENING(open, (const char *path, int flags, mode_t mode), (path, flags, mode))
OPENING(open64, (const char *path, int flags, mode_t mode), (path, flags, mode))
OPENING(openat, (int folder, const char *path, int flags, mode_t mode), (folder, path, flags, mode))
OPENING(openat64, (int folder, const char *path, int flags, mode_t mode), (folder, path, flags, mode))

int clock_gettime(clockid_t clock, struct timespec *now) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += faults->seconds;
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  static __typeof__(&gettimeofday) real;
  if (!real) real = REAL(gettimeofday);
  int result = real(now, zone);
  if (!result) now->tv_sec += faults->seconds;
  return result;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}
