/* A double of the CUDA runtime for machines without a GPU; test_cuda.py compiles and drives it.
 *
 * 1. "Device memory" is ordinary memory. Copies, event records and event waits are only queued on
 *    their stream; they happen, in order, when somebody synchronizes with it. Whoever forgets to
 *    wait for an event, or to synchronize, meets old bytes.
 * 2. Any call can be told to fail. A failure is remembered for its thread until it is asked for.
 * 3. What the real library would punish is counted: fake_violations.
 * It knows nothing of how fast a GPU is, nor of what a driver refuses by itself.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COPY, RECORD, WAIT };
enum { DEVICES = 8, OPERATIONS = 4096, NAMES = 32, RELAXED = 2, INVALID_VALUE = 1 };

struct stream;
struct event {
    struct stream* stream;
    size_t position;
    int device;
};
struct operation {
    int kind;
    void* to;
    const void* from;
    size_t length;
    struct stream* stream; /* of a wait: what it waits for, as it was when it was queued */
    size_t position;
};
struct stream {
    int device;
    size_t queued, executed;
    struct operation operations[OPERATIONS];
};
struct counter {
    const char* name;
    long calls, skip;
    int failure;
};

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static struct counter counters[NAMES];
static struct stream* default_streams[DEVICES];
static int held, held_threads;
static long hold_after;
static long violations, unread_errors, streams_alive, events_alive, copies;
static void* registered;
static size_t registered_bytes;
static pid_t owner;
static __thread int current_device, last_error, capture_mode;

static struct counter* counter_of(const char* name) {
    for (int i = 0; i < NAMES; ++i) {
        if (counters[i].name == NULL) counters[i].name = strdup(name);
        if (strcmp(counters[i].name, name) == 0) return &counters[i];
    }
    abort();
}

/* Enters a call; returns the failure that it was told. Leave with `leave`. */
static int enter(const char* name) {
    pthread_mutex_lock(&mutex);
    if (getpid() != owner) ++violations;
    struct counter* const counter = counter_of(name);
    ++counter->calls;
    if (counter->failure == 0 || counter->skip-- > 0) return 0;
    if (last_error == 0) ++unread_errors;
    last_error = counter->failure;
    return counter->failure;
}

static int leave(int result) {
    pthread_mutex_unlock(&mutex);
    return result;
}

static struct stream* stream_of(struct stream* stream) {
    if (stream != NULL) return stream;
    struct stream** const own = &default_streams[current_device];
    if (*own == NULL) {
        *own = calloc(1, sizeof **own);
        (*own)->device = current_device;
    }
    return *own;
}

static void run(struct stream* stream, size_t position) {
    while (stream->executed < position) {
        const struct operation* const one = &stream->operations[stream->executed++ % OPERATIONS];
        if (one->kind == COPY) memcpy(one->to, one->from, one->length);
        if (one->kind == WAIT) run(one->stream, one->position);
    }
}

static void queue(struct stream* stream, struct operation operation) {
    if (stream->queued - stream->executed == OPERATIONS) abort();
    stream->operations[stream->queued++ % OPERATIONS] = operation;
}

/* ---- what CUDA has ---- */

int cudaGetDevice(int* device) {
    const int failure = enter("cudaGetDevice");
    *device = current_device;
    return leave(failure);
}

int cudaSetDevice(int device) {
    const int failure = enter("cudaSetDevice");
    if (failure == 0) current_device = device;
    return leave(failure);
}

int cudaStreamCreateWithFlags(struct stream** stream, unsigned flags) {
    const int failure = enter("cudaStreamCreateWithFlags");
    if (failure != 0) return leave(failure);
    if (flags != 1 || capture_mode != RELAXED) ++violations;
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = current_device;
    ++streams_alive;
    return leave(0);
}

int cudaStreamDestroy(struct stream* stream) {
    const int failure = enter("cudaStreamDestroy");
    --streams_alive;
    free(stream);
    return leave(failure);
}

int cudaMemcpyAsync(void* to, const void* from, size_t length, int kind, struct stream* stream) {
    const int failure = enter("cudaMemcpyAsync");
    if (failure != 0) return leave(failure);
    stream = stream_of(stream);
    if (kind != 2 || stream->device != current_device || length == 0) ++violations;
    queue(stream, (struct operation){COPY, to, from, length, NULL, 0});
    ++copies;
    return leave(0);
}

int cudaStreamSynchronize(struct stream* stream) {
    const int failure = enter("cudaStreamSynchronize");
    if (capture_mode != RELAXED) ++violations;
    ++held_threads;
    while (held && counter_of("cudaStreamSynchronize")->calls > hold_after)
        pthread_cond_wait(&released, &mutex);
    --held_threads;
    /* a stream that failed does no more harm, and no more good either */
    if (failure == 0) run(stream_of(stream), stream_of(stream)->queued);
    return leave(failure);
}

int cudaEventCreateWithFlags(struct event** event, unsigned flags) {
    const int failure = enter("cudaEventCreateWithFlags");
    if (failure != 0) return leave(failure);
    if (flags != 2) ++violations;
    *event = calloc(1, sizeof **event);
    (*event)->device = current_device;
    ++events_alive;
    return leave(0);
}

int cudaEventDestroy(struct event* event) {
    const int failure = enter("cudaEventDestroy");
    if (event->device != current_device) ++violations;
    --events_alive;
    free(event);
    return leave(failure);
}

int cudaEventRecord(struct event* event, struct stream* stream) {
    const int failure = enter("cudaEventRecord");
    if (failure != 0) return leave(failure);
    stream = stream_of(stream);
    if (event->device != stream->device) ++violations;
    queue(stream, (struct operation){RECORD, NULL, NULL, 0, NULL, 0});
    event->stream = stream;
    event->position = stream->queued;
    return leave(0);
}

int cudaStreamWaitEvent(struct stream* stream, struct event* event, unsigned flags) {
    const int failure = enter("cudaStreamWaitEvent");
    if (failure != 0) return leave(failure);
    if (flags != 0) ++violations;
    queue(stream_of(stream),
          (struct operation){WAIT, NULL, NULL, 0, event->stream, event->position});
    return leave(0);
}

int cudaHostRegister(void* data, size_t length, unsigned flags) {
    const int failure = enter("cudaHostRegister");
    if (failure != 0) return leave(failure);
    if (flags != 1 || registered != NULL) ++violations;
    registered = data;
    registered_bytes = length;
    return leave(0);
}

int cudaHostUnregister(void* data) {
    const int failure = enter("cudaHostUnregister");
    if (data != registered) ++violations;
    registered = NULL;
    return leave(failure);
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
    const int failure = enter("cudaThreadExchangeStreamCaptureMode");
    if (failure != 0) return leave(failure);
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return leave(0);
}

int cudaGetLastError(void) {
    pthread_mutex_lock(&mutex);
    const int error = last_error;
    if (error != 0) --unread_errors;
    last_error = 0;
    return leave(error);
}

const char* cudaGetErrorString(int error) {
    return error == 2 ? "out of memory" : "a failure that was asked for";
}

/* ---- what the tests have ---- */

void fake_reset(void) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < NAMES; ++i) free((char*)counters[i].name);
    memset(counters, 0, sizeof counters);
    for (int i = 0; i < DEVICES; ++i) free(default_streams[i]);
    memset(default_streams, 0, sizeof default_streams);
    violations = unread_errors = streams_alive = events_alive = copies = 0;
    registered = NULL;
    owner = getpid();
    current_device = last_error = 0;
    pthread_mutex_unlock(&mutex);
}

/* The call fails with `error` from the one after the next `skip` on; 0: no more. */
void fake_fail(const char* name, long skip, int error) {
    pthread_mutex_lock(&mutex);
    counter_of(name)->skip = skip;
    counter_of(name)->failure = error;
    pthread_mutex_unlock(&mutex);
}

long fake_calls(const char* name) {
    pthread_mutex_lock(&mutex);
    const long calls = counter_of(name)->calls;
    pthread_mutex_unlock(&mutex);
    return calls;
}

/* A stream of the program's; work that is queued on it is done when somebody waits for it. */
void* fake_stream(int device) {
    struct stream* const stream = calloc(1, sizeof *stream);
    stream->device = device;
    return stream;
}

void fake_queue(struct stream* stream, void* to, const void* from, size_t length) {
    pthread_mutex_lock(&mutex);
    queue(stream_of(stream), (struct operation){COPY, to, from, length, NULL, 0});
    pthread_mutex_unlock(&mutex);
}

/* While held, nobody returns from cudaStreamSynchronize. */
void fake_hold(int hold) {
    pthread_mutex_lock(&mutex);
    held = hold;
    hold_after = 0;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&mutex);
}

/* The same from the call after so many of them. */
void fake_hold_after(long calls) {
    pthread_mutex_lock(&mutex);
    held = 1;
    hold_after = calls;
    pthread_mutex_unlock(&mutex);
}

#define READER(name, value)                \
    long fake_##name(void) {               \
        pthread_mutex_lock(&mutex);        \
        const long found = (long)(value);  \
        pthread_mutex_unlock(&mutex);      \
        return found;                      \
    }
READER(violations, violations)
READER(unread_errors, unread_errors)
READER(streams_alive, streams_alive)
READER(events_alive, events_alive)
READER(copies, copies)
READER(held_threads, held_threads)
READER(registered, registered)
READER(registered_bytes, registered_bytes)
READER(current_device, current_device)
