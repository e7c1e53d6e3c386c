/* A fork-join pool. Every thread count gives the same bits, since an item is computed whole by one thread. */
#include "rlk.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MAX_THREADS 256
#define SPIN_ROUNDS 2000
#define SCRATCH_SLOTS 8

static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER; /* one parallel call at a time */
static pthread_mutex_t wake_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
/* Number of the call, shifted, and the threads that take part: one word, so that a thread that wakes late knows
 * whether the call it sees is its own. */
static _Atomic uint64_t call_word;
#define CALL_THREADS(WORD) ((int)((WORD) & 0xffffu))
static atomic_int pending;
static _Atomic i64 next_item;
static rlk_body current_body;
static void *current_context;
static i64 current_items;
static int thread_count = 1, started = 1;

/* Subnormal numbers are kept while a kernel runs, whatever mode the calling program left its thread in. */
#if defined(__x86_64__)
#define FLUSH_BITS 0x8040u /* FTZ, DAZ */
static unsigned keep_subnormals(void) {
    unsigned old = __builtin_ia32_stmxcsr();
    if (old & FLUSH_BITS) __builtin_ia32_ldmxcsr(old & ~FLUSH_BITS);
    return old;
}
static void restore_mode(unsigned old) {
    if (old & FLUSH_BITS) __builtin_ia32_ldmxcsr(old);
}
#elif defined(__aarch64__)
#define FLUSH_BITS (UINT64_C(1) << 24) /* FZ */
static uint64_t keep_subnormals(void) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    if (old & FLUSH_BITS) __asm__ volatile("msr fpcr, %0" : : "r"(old & ~FLUSH_BITS));
    return old;
}
static void restore_mode(uint64_t old) {
    if (old & FLUSH_BITS) __asm__ volatile("msr fpcr, %0" : : "r"(old));
}
#else
static int keep_subnormals(void) { return 0; }
static void restore_mode(int old) { (void)old; }
#endif

static void drain(int thread) {
    __typeof__(keep_subnormals()) mode = keep_subnormals();
    for (;;) {
        i64 item = atomic_fetch_add(&next_item, 1);
        if (item >= current_items) break;
        current_body(current_context, item, thread);
    }
    restore_mode(mode);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

typedef struct {
    int thread;
    uint64_t seen; /* the last call before the thread was made */
} birth;

static void *worker(void *argument) {
    int thread = ((birth *)argument)->thread;
    uint64_t seen = ((birth *)argument)->seen;
    free(argument);
    for (;;) {
        for (int i = 0; i < SPIN_ROUNDS && atomic_load(&call_word) == seen; i++) pause_briefly();
        if (atomic_load(&call_word) == seen) {
            pthread_mutex_lock(&wake_lock);
            while (atomic_load(&call_word) == seen) pthread_cond_wait(&wake, &wake_lock);
            pthread_mutex_unlock(&wake_lock);
        }
        seen = atomic_load(&call_word);
        if (thread < CALL_THREADS(seen)) {
            drain(thread);
            atomic_fetch_sub(&pending, 1);
        }
    }
    return NULL;
}

/* A forked child has none of its parent's threads and may have inherited a taken lock: it starts anew, alone. */
static void forget_threads(void) {
    pthread_mutex_init(&call_lock, NULL);
    pthread_mutex_init(&wake_lock, NULL);
    pthread_cond_init(&wake, NULL);
    thread_count = started = 1;
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_threads); }

void rlk_set_threads(int count) {
    pthread_mutex_lock(&call_lock);
    if (count < 1) count = 1;
    if (count > MAX_THREADS) count = MAX_THREADS;
    for (; started < count; started++) {
        pthread_t handle;
        pthread_attr_t attributes;
        birth *argument = malloc(sizeof *argument);
        if (!argument) break;
        *argument = (birth){started, atomic_load(&call_word)};
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&handle, &attributes, worker, argument);
        pthread_attr_destroy(&attributes);
        if (failed) {
            free(argument);
            break;
        }
    }
    thread_count = count < started ? count : started;
    pthread_mutex_unlock(&call_lock);
}

int rlk_get_threads(void) { return thread_count; }

void rlk_parallel(rlk_body body, void *context, i64 items) {
    if (items <= 0) return;
    pthread_mutex_lock(&call_lock);
    current_body = body;
    current_context = context;
    current_items = items;
    atomic_store(&next_item, 0);
    if (thread_count == 1 || items == 1) {
        drain(0);
        pthread_mutex_unlock(&call_lock);
        return;
    }
    atomic_store(&pending, thread_count - 1);
    pthread_mutex_lock(&wake_lock);
    uint64_t call = (atomic_load(&call_word) >> 16) + 1;
    atomic_store(&call_word, call << 16 | (uint64_t)thread_count);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&wake_lock);
    drain(0);
    while (atomic_load(&pending) > 0) pause_briefly();
    pthread_mutex_unlock(&call_lock);
}

void *rlk_scratch(int slot, size_t bytes) {
    static __thread void *memory[SCRATCH_SLOTS];
    static __thread size_t capacity[SCRATCH_SLOTS];
    if (capacity[slot] < bytes) {
        free(memory[slot]);
        bytes = (bytes + 4095) / 4096 * 4096;
        memory[slot] = aligned_alloc(64, bytes);
        if (!memory[slot]) abort();
        capacity[slot] = bytes;
    }
    return memory[slot];
}

/* The contract's values as they are compiled in, in the order that library.py names them. */
void rlk_constants(i64 *values) {
    const i64 compiled[] = {RLK_KV_BLOCK, RLK_KV_SPLIT, RLK_LOGP_TILE, RLK_FOLD_AXIS, RLK_GAIN_BLOCK};
    memcpy(values, compiled, sizeof compiled);
}

typedef struct {
    atomic_int started, flushed;
} denormals;

static void denormal_body(void *context, i64 item, int thread) {
    (void)item;
    (void)thread;
    denormals *check = context;
    volatile float smallest = 1.0e-40f;
    volatile float half = smallest * 0.5f;
    if (half == 0.0f) atomic_fetch_add(&check->flushed, 1);
    atomic_fetch_add(&check->started, 1);
    while (atomic_load(&check->started) < thread_count) sched_yield(); /* one item for every thread */
}

/* Threads of the pool, the caller included, that flush subnormal numbers inside a kernel: 0 where arithmetic is IEEE. */
i64 rlk_flushed(void) {
    denormals check = {0, 0};
    rlk_parallel(denormal_body, &check, thread_count);
    return atomic_load(&check.flushed);
}
