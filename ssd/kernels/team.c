/* The threads that share out the items of a loop. OpenMP says how many there are and to which cores they are bound, and
   torch sets both; but its own loops divide once, and end when the last thread has ended. Here a thread that is late,
   because another program has its core, costs at most the item in its hands: the others take the rest.

   A thread begins with a span of its own, so that it reads memory in order; then it takes from the ends of the others'.
   It looks for the next loop for a while before it sleeps. */

#define _GNU_SOURCE

#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define MAX_THREADS 256       /* threads */
#define AWAKE_NS 30000 /* that a thread waits before it sleeps: longer than most pauses between loops of a forward */
#define LINE 128       /* bytes that no two threads share */

/* One thread: the items of its span that nobody took, first << 32 | the one after the last; and if it sleeps. */
typedef struct {
    _Alignas(LINE) _Atomic uint64_t left;
    _Alignas(LINE) _Atomic uint32_t asleep;
} member_t;

static member_t members[MAX_THREADS];
static int64_t started = 1, most = MAX_THREADS; /* threads, with the caller's; and how many of them the system gives */

/* The last loop: its number, its threads, what is called, the items that are not done, and if the caller sleeps. */
static _Alignas(LINE) _Atomic uint32_t loops;
static _Atomic int64_t size;
static work_t *work_of;
static const void *arguments_of;
static _Alignas(LINE) _Atomic uint32_t undone;
static _Atomic uint32_t caller_sleeps;

static void sleep_while(_Atomic uint32_t *at, uint32_t value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until `at` has another value, for AWAKE_NS at most; returns if it has. */
static int changes(_Atomic uint32_t *at, uint32_t value) {
    for (int64_t end = 0; atomic_load_explicit(at, memory_order_acquire) == value;) {
        for (int i = 0; i < 64 && atomic_load_explicit(at, memory_order_relaxed) == value; i++) relax();
        const int64_t now = nanoseconds();
        if (!end) end = now + AWAKE_NS;
        else if (now > end) return 0;
    }
    return 1;
}

/* Takes an item of a thread's span, its first or last; returns -1 if none is left. */
static int64_t take(_Atomic uint64_t *from, int last) {
    uint64_t left = atomic_load_explicit(from, memory_order_relaxed);
    for (;;) {
        const uint64_t first = left >> 32, end = (uint32_t)left;
        if (first >= end) return -1;
        const uint64_t then = last ? left - 1 : left + (1ULL << 32);
        if (atomic_compare_exchange_weak_explicit(from, &left, then, memory_order_acquire, memory_order_relaxed))
            return (int64_t)(last ? end - 1 : first);
    }
}

/* Does what is left of the last loop. A thread may come late, even into the next loop. That is safe: while it holds an
   item, `undone` is not 0 and the caller does not go on; who takes an item from `left` sees the `work_of` and `undone`
   that were written before it; and a `size` that is too small or too large only leaves spans to others, or finds empty
   ones. */
static void work(int64_t thread) {
    const int64_t count = atomic_load_explicit(&size, memory_order_relaxed);
    uint32_t done = 0;
    for (int64_t i = 0, item; i < count; i++) {
        _Atomic uint64_t *from = &members[(thread + i) % count].left;
        for (; (item = take(from, i > 0)) >= 0; done++) work_of(arguments_of, item);
    }
    if (done && atomic_fetch_sub(&undone, done) == done && atomic_load(&caller_sleeps)) wake(&undone);
}

/* Binds a thread to OpenMP's place of its number. Without places it keeps the cores that the caller has now. */
static void bind(int64_t thread) {
#ifdef _OPENMP
    cpu_set_t cores;
    int found[CPU_SETSIZE];
    const int places = omp_get_num_places(), place = places ? (int)(thread % places) : 0;
    if (!places || omp_get_place_num_procs(place) > CPU_SETSIZE) return;
    omp_get_place_proc_ids(place, found);
    CPU_ZERO(&cores);
    for (int i = 0; i < omp_get_place_num_procs(place); i++) CPU_SET(found[i], &cores);
    sched_setaffinity(0, sizeof cores, &cores);
#endif
}

static void *serve(void *of) {
    const int64_t thread = (member_t *)of - members;
    _Atomic uint32_t *asleep = &members[thread].asleep;
    bind(thread);
    for (uint32_t seen = 0;;) {
        if (thread >= atomic_load(&size) || !changes(&loops, seen)) {
            atomic_store(asleep, 1);
            if (thread >= atomic_load(&size) || atomic_load(&loops) == seen) sleep_while(asleep, 1);
            atomic_store(asleep, 0);
        }
        seen = atomic_load(&loops);
        if (thread < atomic_load(&size)) work(thread);
    }
    return NULL;
}

static void forget(void) { started = 1, most = MAX_THREADS; } /* threads do not survive a fork */

static void start(int64_t count) {
    static int watched;
    pthread_t thread;
    if (!watched++) pthread_atfork(NULL, NULL, forget);
    for (; started < count; started++) {
        atomic_store(&members[started].asleep, 0);
        if (pthread_create(&thread, NULL, serve, &members[started])) {
            most = started; /* not asked for again */
            return;
        }
        pthread_detach(thread);
    }
}

int64_t team(void) {
#ifdef _OPENMP
    const int64_t count = omp_get_max_threads();
    return count < most ? count : most;
#else
    return 1;
#endif
}

void share(int64_t items, work_t *of, const void *arguments) {
    int64_t count = items > 1 ? team() : 1;
    if (count > started) start(count);
    count = count < started ? count : started;
    if (count <= 1) {
        for (int64_t item = 0; item < items; item++) of(arguments, item);
        return;
    }
    work_of = of, arguments_of = arguments;
    atomic_store_explicit(&undone, (uint32_t)items, memory_order_relaxed);
    atomic_store(&size, count);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t first = (uint64_t)(items * i / count), end = (uint64_t)(items * (i + 1) / count);
        atomic_store_explicit(&members[i].left, first << 32 | end, memory_order_release);
    }
    atomic_fetch_add(&loops, 1);
    for (int64_t i = 1; i < count; i++)
        if (atomic_load(&members[i].asleep) && atomic_exchange(&members[i].asleep, 0)) wake(&members[i].asleep);
    work(0);
    for (uint32_t left; (left = atomic_load(&undone));)
        if (!changes(&undone, left)) {
            atomic_store(&caller_sleeps, 1);
            if (atomic_load(&undone) == left) sleep_while(&undone, left);
            atomic_store(&caller_sleeps, 0);
        }
}
