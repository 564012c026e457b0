/* Makes one chosen file operation of a process fail, or end the process, at an exact place.
 *
 *     cc -shared -fPIC -O2 -o fault.so fault.c -ldl
 *     FAULT_PATH=/run/out FAULT_AT=7 FAULT_DO=kill LD_PRELOAD=fault.so command
 *
 * Counted are the calls of libc that change files and concern a path holding FAULT_PATH.
 *
 *     FAULT_PATH   text to look for in absolute paths; several with ':' between them
 *     FAULT_AT     which counted call, from 1; without it calls are counted alone
 *     FAULT_DO     kill        SIGKILL before the call
 *                  kill-after  SIGKILL after it
 *                  stop, term  SIGSTOP or SIGTERM before it, then the call
 *                  short       writes half, if the call is a write
 *                  ENOSPC, EDQUOT, EIO, EROFS, EACCES   fails with it
 *     FAULT_STICKY 1: later calls fail too, those that the error would meet: see affects().
 *                  Any other text takes the place of FAULT_PATH for them.
 *     FAULT_LOG    file that receives "number TAB call TAB path TAB second path", before the call
 *     FAULT_RANK   only in the process whose RANK is this
 *     FAULT_PID    only in the process of this id
 *     FAULT_AFTER  counting begins once this file exists
 *     FAULT_READS  1: files opened for reading count too
 *
 * The settings are read when the library is loaded and at each fault_configure(), which a process
 * without an exec of its own calls. Processes it forks are left alone.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* What a call needs of a disk. */
enum { ROOM = 1, NAME = 2, OTHER = 4, READING = 8 };
/* What becomes of it. */
enum { GO, FAIL, HALF, LAST };

static struct {
    char path[4 * PATH_MAX], sticky[4 * PATH_MAX], log[PATH_MAX], after[PATH_MAX];
    char action[32];
    unsigned long at;
    pid_t pid;
    int error, reads;
} settings;
static atomic_ulong counted;
static atomic_int active, tripped, begun;

static const struct {
    const char *name;
    int number;
} errors[] = {
    {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EIO", EIO}, {"EROFS", EROFS}, {"EACCES", EACCES},
};

static void copy(char *to, size_t size, const char *name) {
    const char *value = getenv(name);
    snprintf(to, size, "%s", value ? value : "");
}

__attribute__((constructor, visibility("default"))) void fault_configure(void) {
    const char *at = getenv("FAULT_AT"), *rank = getenv("FAULT_RANK"), *pid = getenv("FAULT_PID");
    const char *sticky = getenv("FAULT_STICKY"), *reads = getenv("FAULT_READS");
    const char *own_rank = getenv("RANK");
    atomic_store(&active, 0);
    copy(settings.path, sizeof settings.path, "FAULT_PATH");
    copy(settings.log, sizeof settings.log, "FAULT_LOG");
    copy(settings.after, sizeof settings.after, "FAULT_AFTER");
    copy(settings.action, sizeof settings.action, "FAULT_DO");
    copy(settings.sticky, sizeof settings.sticky, "FAULT_STICKY");
    if (sticky && !strcmp(sticky, "1")) strcpy(settings.sticky, settings.path);
    settings.at = at ? strtoul(at, NULL, 10) : 0;
    settings.reads = reads && !strcmp(reads, "1");
    settings.pid = getpid();
    settings.error = 0;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(settings.action, errors[i].name)) settings.error = errors[i].number;
    atomic_store(&counted, 0);
    atomic_store(&tripped, 0);
    atomic_store(&begun, !settings.after[0]);
    if (!settings.path[0]) return;
    if (rank && rank[0] && (!own_rank || strcmp(rank, own_rank))) return;
    if (pid && pid[0] && atol(pid) != settings.pid) return;
    atomic_store(&active, 1);
}

/* Whether a path holds one of the ':'-separated texts. */
static int holds(const char *path, const char *texts) {
    char text[PATH_MAX];
    while (path && *texts) {
        size_t length = strcspn(texts, ":");
        if (length && length < sizeof text) {
            memcpy(text, texts, length);
            text[length] = 0;
            if (strstr(path, text)) return 1;
        }
        texts += length + (texts[length] == ':');
    }
    return 0;
}

/* Whether a disk with this error refuses such a call: a full one still renames and deletes, one
 * that is read-only or not ours still takes what an open file receives, a broken one nothing. */
static int affects(int error, int kind) {
    if (error == ENOSPC || error == EDQUOT) return kind & ROOM;
    if (error == EROFS || error == EACCES) return kind & NAME;
    return !(kind & READING);
}

static void end_here(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void note(unsigned long number, const char *call, const char *path, const char *other) {
    char line[2 * PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%lu\t%s\t%s\t%s\n", number, call, path, other);
    int file = (int)syscall(SYS_openat, AT_FDCWD, settings.log,
                            O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || syscall(SYS_write, file, line, (size_t)length) != length) abort();
    syscall(SYS_close, file);
}

static int decide(const char *call, int kind, const char *path, const char *other) {
    int later = atomic_load(&tripped) && settings.sticky[0] && affects(settings.error, kind) &&
                (holds(path, settings.sticky) || holds(other, settings.sticky));
    if ((kind & READING) && !settings.reads) return GO;
    if (holds(path, settings.path) || holds(other, settings.path)) {
        if (!atomic_load(&begun)) {
            if (syscall(SYS_faccessat, AT_FDCWD, settings.after, F_OK)) return GO;
            atomic_store(&begun, 1);
        }
        unsigned long number = atomic_fetch_add(&counted, 1) + 1;
        if (settings.log[0]) note(number, call, path, other);
        if (number == settings.at) {
            const char *action = settings.action;
            atomic_store(&tripped, settings.error != 0);
            if (!strcmp(action, "kill")) end_here();
            if (!strcmp(action, "kill-after")) return LAST;
            if (!strcmp(action, "short")) return HALF;
            if (!strcmp(action, "stop")) syscall(SYS_kill, getpid(), SIGSTOP);
            if (!strcmp(action, "term")) syscall(SYS_kill, getpid(), SIGTERM);
            if (settings.error) later = 1;
        }
    }
    if (!later) return GO;
    errno = settings.error;
    return FAIL;
}

/* The absolute form of a path relative to an open directory; NULL paths mean the file itself. */
static const char *whole(int directory, const char *path, char *into) {
    char link[64];
    ssize_t length = 0;
    if (path && path[0] == '/') return path;
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, into, (size_t)PATH_MAX) <= 0) return path;
        length = (ssize_t)strlen(into);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        length = readlink(link, into, PATH_MAX);
        if (length < 0) return path ? path : "";
    }
    into[length] = 0;
    if (path) snprintf(into + length, PATH_MAX, "/%s", path);
    return into;
}

static int ask(const char *call, int kind, int directory, const char *path) {
    char full[2 * PATH_MAX + 2];
    int before = errno, verdict;
    if (!atomic_load(&active) || getpid() != settings.pid) return GO;
    verdict = decide(call, kind, whole(directory, path, full), "");
    if (verdict != FAIL) errno = before;
    return verdict;
}

static int ask_two(const char *call, int kind, int from_dir, const char *from, int to_dir,
                   const char *to) {
    char first[2 * PATH_MAX + 2], second[2 * PATH_MAX + 2];
    int before = errno, verdict;
    if (!atomic_load(&active) || getpid() != settings.pid) return GO;
    verdict = decide(call, kind, whole(from_dir, from, first), whole(to_dir, to, second));
    if (verdict != FAIL) errno = before;
    return verdict;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

/* ask first; then the call of libc, after which a process may have to end */
#define PASS(verdict, failed, ...)                \
    do {                                          \
        int verdict_ = (verdict);                 \
        if (verdict_ == FAIL) return failed;      \
        __typeof__(__VA_ARGS__) result_ = (__VA_ARGS__); \
        if (verdict_ == LAST) end_here();         \
        return result_;                           \
    } while (0)

#define LOOKED_UP(name)                                                 \
    static __typeof__(&name) known;                                     \
    if (!known) known = REAL(name)

/* ------------------------------------------------------------------------------------ opening */

static int kind_of_open(int flags) {
    if (flags & (O_CREAT | O_TRUNC)) return ROOM | NAME;
    return (flags & O_ACCMODE) == O_RDONLY ? READING : NAME;
}

#define MODE                                                            \
    mode_t mode = 0;                                                    \
    if (flags & (O_CREAT | O_TMPFILE)) {                                \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                   \
    }

#define OPEN(name)                                                                            \
    int name(const char *path, int flags, ...) {                                              \
        MODE;                                                                                 \
        LOOKED_UP(name);                                                                      \
        PASS(ask("open", kind_of_open(flags), AT_FDCWD, path), -1, known(path, flags, mode)); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                       \
    int name(int directory, const char *path, int flags, ...) {                            \
        MODE;                                                                              \
        LOOKED_UP(name);                                                                   \
        PASS(ask("open", kind_of_open(flags), directory, path), -1,                        \
             known(directory, path, flags, mode));                                         \
    }
OPENAT(openat)
OPENAT(openat64)

/* what a compiler makes of open without a mode */
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int directory, const char *path, int flags) { return openat(directory, path, flags); }
int __openat64_2(int directory, const char *path, int flags) {
    return openat64(directory, path, flags);
}

int creat(const char *path, mode_t mode) {
    return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) {
    return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

#define FOPEN(name)                                                                     \
    FILE *name(const char *path, const char *mode) {                                    \
        LOOKED_UP(name);                                                                \
        int kind = strchr("wa", mode[0]) ? ROOM | NAME : strchr(mode, '+') ? NAME : READING; \
        PASS(ask("fopen", kind, AT_FDCWD, path), NULL, known(path, mode));              \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* ------------------------------------------------------------------------------------ writing */

ssize_t write(int file, const void *data, size_t size) {
    LOOKED_UP(write);
    int verdict = ask("write", ROOM, file, NULL);
    PASS(verdict, -1, known(file, data, verdict == HALF ? (size + 1) / 2 : size));
}

#define PWRITE(name, offset_t)                                                             \
    ssize_t name(int file, const void *data, size_t size, offset_t offset) {               \
        LOOKED_UP(name);                                                                   \
        int verdict = ask("pwrite", ROOM, file, NULL);                                     \
        PASS(verdict, -1, known(file, data, verdict == HALF ? (size + 1) / 2 : size, offset)); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

/* the first part alone is half of several */
#define HALF_OF(parts, number)                                               \
    struct iovec half = number ? parts[0] : (struct iovec){0};               \
    if (verdict == HALF && number) {                                         \
        if (number == 1) half.iov_len = (half.iov_len + 1) / 2;              \
        parts = &half;                                                       \
        number = 1;                                                          \
    }

ssize_t writev(int file, const struct iovec *parts, int number) {
    LOOKED_UP(writev);
    int verdict = ask("writev", ROOM, file, NULL);
    HALF_OF(parts, number);
    PASS(verdict, -1, known(file, parts, number));
}

#define PWRITEV(name, offset_t)                                                          \
    ssize_t name(int file, const struct iovec *parts, int number, offset_t offset) {     \
        LOOKED_UP(name);                                                                 \
        int verdict = ask("pwritev", ROOM, file, NULL);                                  \
        HALF_OF(parts, number);                                                          \
        PASS(verdict, -1, known(file, parts, number, offset));                           \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size,
                        unsigned flags) {
    LOOKED_UP(copy_file_range);
    int verdict = ask("copy_file_range", ROOM, to, NULL);
    PASS(verdict, -1,
         known(from, from_at, to, to_at, verdict == HALF ? (size + 1) / 2 : size, flags));
}

ssize_t sendfile(int to, int from, off_t *at, size_t size);
ssize_t sendfile64(int to, int from, off64_t *at, size_t size);
#define SENDFILE(name, offset_t)                                                          \
    ssize_t name(int to, int from, offset_t *at, size_t size) {                           \
        LOOKED_UP(name);                                                                  \
        int verdict = ask("sendfile", ROOM, to, NULL);                                    \
        PASS(verdict, -1, known(to, from, at, verdict == HALF ? (size + 1) / 2 : size));  \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

/* ------------------------------------------------------------------------- sizes and the disk */

#define ON_FILE(name, label, kind, parameters, arguments)          \
    int name parameters {                                          \
        LOOKED_UP(name);                                           \
        PASS(ask(label, kind, file, NULL), -1, known arguments);   \
    }
ON_FILE(fsync, "fsync", OTHER, (int file), (file))
ON_FILE(fdatasync, "fdatasync", OTHER, (int file), (file))
ON_FILE(ftruncate, "ftruncate", ROOM, (int file, off_t size), (file, size))
ON_FILE(ftruncate64, "ftruncate", ROOM, (int file, off64_t size), (file, size))
ON_FILE(fallocate, "fallocate", ROOM, (int file, int mode, off_t at, off_t size),
        (file, mode, at, size))
ON_FILE(fallocate64, "fallocate", ROOM, (int file, int mode, off64_t at, off64_t size),
        (file, mode, at, size))
ON_FILE(fchmod, "chmod", NAME, (int file, mode_t mode), (file, mode))

/* these return the error */
#define POSIX_FALLOCATE(name, offset_t)                                                \
    int name(int file, offset_t at, offset_t size) {                                   \
        LOOKED_UP(name);                                                               \
        PASS(ask("fallocate", ROOM, file, NULL), settings.error, known(file, at, size)); \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

/* -------------------------------------------------------------------------------------- names */

#define ON_PATH(name, label, kind, directory, parameters, arguments) \
    int name parameters {                                            \
        LOOKED_UP(name);                                             \
        PASS(ask(label, kind, directory, path), -1, known arguments); \
    }
ON_PATH(mkdir, "mkdir", ROOM | NAME, AT_FDCWD, (const char *path, mode_t mode), (path, mode))
ON_PATH(mkdirat, "mkdir", ROOM | NAME, at, (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(unlink, "unlink", NAME, AT_FDCWD, (const char *path), (path))
ON_PATH(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", NAME, at,
        (int at, const char *path, int flags), (at, path, flags))
ON_PATH(rmdir, "rmdir", NAME, AT_FDCWD, (const char *path), (path))
ON_PATH(remove, "unlink", NAME, AT_FDCWD, (const char *path), (path))
ON_PATH(truncate, "truncate", ROOM | NAME, AT_FDCWD, (const char *path, off_t size), (path, size))
ON_PATH(truncate64, "truncate", ROOM | NAME, AT_FDCWD, (const char *path, off64_t size), (path, size))
ON_PATH(chmod, "chmod", NAME, AT_FDCWD, (const char *path, mode_t mode), (path, mode))
ON_PATH(fchmodat, "chmod", NAME, at, (int at, const char *path, mode_t mode, int flags),
        (at, path, mode, flags))
ON_PATH(symlink, "symlink", ROOM | NAME, AT_FDCWD, (const char *target, const char *path),
        (target, path))
ON_PATH(symlinkat, "symlink", ROOM | NAME, at, (const char *target, int at, const char *path),
        (target, at, path))

int rename(const char *from, const char *to) {
    LOOKED_UP(rename);
    PASS(ask_two("rename", NAME, AT_FDCWD, from, AT_FDCWD, to), -1, known(from, to));
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    LOOKED_UP(renameat);
    PASS(ask_two("rename", NAME, from_dir, from, to_dir, to), -1, known(from_dir, from, to_dir, to));
}
int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    LOOKED_UP(renameat2);
    PASS(ask_two("rename", NAME, from_dir, from, to_dir, to), -1,
         known(from_dir, from, to_dir, to, flags));
}
int link(const char *from, const char *to) {
    LOOKED_UP(link);
    PASS(ask_two("link", ROOM | NAME, AT_FDCWD, from, AT_FDCWD, to), -1, known(from, to));
}
int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    LOOKED_UP(linkat);
    PASS(ask_two("link", ROOM | NAME, from_dir, from, to_dir, to), -1,
         known(from_dir, from, to_dir, to, flags));
}
