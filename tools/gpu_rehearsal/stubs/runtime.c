// A stand-in for libcudart. Device memory is host memory, made when it is touched; kernels do nothing; copies, sets,
// events and IPC work; streams are synchronous. A captured stream keeps CUDA's rules, and what breaks them is an error
// as on a device and a line in the log. A graph repeats its copies and sets, and counts its kernels.
//
// FAKECUDA_LOG: file of the log, else stderr. FAKECUDA_TRACE=1: a Python traceback with each error. FAKECUDA_VERBOSE=1:
// what each graph holds, as it is captured. FAKECUDA_HIST=1: at the end, how often each kernel was launched outside
// graphs. FAKECUDA_MIB: memory of the device.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

#define MOST_FORKS 16
// An operation that a graph repeats: 'k' a kernel, 'c' a copy, 's' a set.
typedef struct {
    char kind;
    void *dst;
    const void *src;
    size_t n;
    int value;
    const char *name;
} Op;
typedef struct {
    Op *ops;
    int n, cap, kernels, copies, sets, broken, ended;
    long replays;
    struct Stream *origin, *forks[MOST_FORKS];
    int nforks;
} Graph;
// `g`: what is being captured, or 0. `work`: how much was captured on it; `joined`: how much of that the origin, the
// stream that began the capture, waits for.
typedef struct Stream {
    Graph *g;
    int nonblocking;
    long work, joined;
} Stream;
// `stream`: where it was recorded, behind how much `work`.
typedef struct {
    Graph *g;
    Stream *stream;
    long work;
} Event;
// Memory that CUDA knows: of the device, or of the host and page-locked.
typedef struct {
    uintptr_t start, stop;
    int host;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[1 << 16];
static int nranges;
static Stream legacy;
static __thread int capture_mode = 0;
static __thread int mine; // captures that this thread has begun
static __thread cudaError_t last;
static size_t used;
static size_t total = 143771ULL << 20; // an H200's
long fk_launches, fk_graph_launches, fk_host_copies, fk_syncs;
static int ngraphs;
static int verbose;
static FILE *out;
static int hist_on;
#define TABLE (1 << 19)
static struct {
    const void *key;
    const char *name;
} names[TABLE];
typedef struct {
    char *name;
    long n;
} Count;
static Count hist[1 << 16];

// The log.

static void say(const char *f, ...) {
    va_list a;
    va_start(a, f);
    if (!out)
        out = stderr;
    fprintf(out, "FAKECUDA[%d] ", getpid());
    vfprintf(out, f, a);
    fputc('\n', out);
    fflush(out);
    va_end(a);
}
static void trace(void) {
    if (!getenv("FAKECUDA_TRACE"))
        return;
    void *(*f)(void) = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    if (f && f()) {
        void (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
        if (run)
            run("import traceback,sys\ntraceback.print_stack(limit=14)\n");
    }
}
void fk_note(const char *name) {
    say("UNIMPLEMENTED %s", name);
}
static cudaError_t fail(cudaError_t e, const char *what) {
    say("ERROR %s -> %d", what, e);
    trace();
    last = e;
    return e;
}
__attribute__((constructor)) static void begin(void) {
    const char *p = getenv("FAKECUDA_LOG");
    if (p)
        out = fopen(p, "a");
    p = getenv("FAKECUDA_MIB");
    if (p)
        total = strtoull(p, 0, 10) << 20;
    verbose = getenv("FAKECUDA_VERBOSE") != 0;
    hist_on = getenv("FAKECUDA_HIST") != 0;
}
static int by_count(const void *a, const void *b) {
    return ((Count *)b)->n > ((Count *)a)->n ? 1 : -1;
}
__attribute__((destructor)) static void end(void) {
    if (!fk_launches && !fk_graph_launches)
        return;
    say("END launches %ld, graph launches %ld, graphs %d, host copies %ld, syncs %ld, memory %zu MiB", fk_launches,
        fk_graph_launches, ngraphs, fk_host_copies, fk_syncs, used >> 20);
    if (hist_on) {
        qsort(hist, 1 << 16, sizeof(Count), by_count);
        for (int i = 0; i < 60 && hist[i].n; i++)
            say("KERNEL %8ld %.150s", hist[i].n, hist[i].name);
    }
}

// Ranges of memory.

static void add(void *p, size_t n, int host) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nranges; i++)
        if (!ranges[i].start) {
            ranges[i] = (Range){(uintptr_t)p, (uintptr_t)p + n, host};
            pthread_mutex_unlock(&lock);
            return;
        }
    ranges[nranges++] = (Range){(uintptr_t)p, (uintptr_t)p + n, host};
    pthread_mutex_unlock(&lock);
}
static size_t drop(void *p) {
    size_t n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nranges; i++)
        if (ranges[i].start == (uintptr_t)p) {
            n = ranges[i].stop - ranges[i].start;
            ranges[i] = (Range){0};
            break;
        }
    pthread_mutex_unlock(&lock);
    return n;
}
// 1: of the device, 2: page-locked, 0: neither.
int fk_kind(const void *p) {
    for (int i = 0; i < nranges; i++)
        if (ranges[i].start && ranges[i].start <= (uintptr_t)p && (uintptr_t)p < ranges[i].stop)
            return ranges[i].host ? 2 : 1;
    return 0;
}
void fk_add(void *p, size_t n, int host) {
    add(p, n, host);
}
size_t fk_drop(void *p) {
    return drop(p);
}

// Captures and launches.

static Graph *open_one(Graph *g) {
    return g && !g->ended ? g : 0;
}
static Stream *of(cudaStream_t s) {
    Stream *found = (uintptr_t)s <= 2 ? &legacy : (Stream *)s;
    found->g = open_one(found->g); // a capture ends on all of its streams
    return found;
}
// Fails a call that no thread may make while it captures, unless it has asked for the relaxed mode.
static int unsafe(const char *what) {
    if (capture_mode == cudaStreamCaptureModeRelaxed || !mine)
        return 0;
    fail(cudaErrorStreamCaptureUnsupported, what);
    return 1;
}
static void put(Graph *g, Op op) {
    if (g->n == g->cap)
        g->ops = realloc(g->ops, (g->cap = g->cap ? 2 * g->cap : 64) * sizeof(Op));
    g->ops[g->n++] = op;
}
void fk_launch(const char *name, cudaStream_t s) {
    Stream *st = of(s);
    if (!name)
        name = "?";
    if (st->g) {
        put(st->g, (Op){'k', 0, 0, 0, 0, name});
        st->g->kernels++;
        st->work++;
        return;
    }
    fk_launches++;
    if (hist_on) {
        size_t h = 5381;
        for (const char *c = name; *c; c++)
            h = h * 33 + *c;
        for (h &= 65535;; h = (h + 1) & 65535) {
            if (!hist[h].name)
                hist[h].name = strdup(name);
            if (!strcmp(hist[h].name, name)) {
                hist[h].n++;
                break;
            }
        }
    }
}
static const char *name_of(const void *f) {
    for (size_t h = ((uintptr_t)f >> 4) & (TABLE - 1);; h = (h + 1) & (TABLE - 1)) {
        if (!names[h].key)
            return "?";
        if (names[h].key == f)
            return names[h].name;
    }
}

// Called by nvcc's code: it registers kernels by name, and launches them.

void **__cudaRegisterFatBinary(void *x) {
    static void *h[4];
    return h;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void **h, const char *hostFun, char *deviceFun, const char *deviceName, int l, void *a,
                            void *b, void *c, void *d, int *w) {
    for (size_t i = ((uintptr_t)hostFun >> 4) & (TABLE - 1);; i = (i + 1) & (TABLE - 1))
        if (!names[i].key || names[i].key == hostFun) {
            names[i].key = hostFun;
            names[i].name = deviceName;
            return;
        }
}
void __cudaRegisterVar(void **h, char *a, char *b, const char *c, int e, size_t s, int k, int g) {}
static __thread struct {
    dim3 g, b;
    size_t m;
    void *s;
} conf[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) {
    conf[depth].g = g;
    conf[depth].b = b;
    conf[depth].m = m;
    conf[depth++].s = s;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) {
    depth--;
    *g = conf[depth].g;
    *b = conf[depth].b;
    *m = conf[depth].m;
    *(void **)s = conf[depth].s;
    return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)f;
    return 0;
}
static cudaError_t sizes(dim3 g, dim3 b, const char *name) {
    if (!g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535 || b.x * b.y * b.z > 1024 || !b.x)
        return fail(cudaErrorInvalidConfiguration, name);
    return 0;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
    cudaError_t e = sizes(g, b, name_of(k));
    if (e)
        return e;
    fk_launch(name_of(k), s);
    return 0;
}
cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
    return __cudaLaunchKernel((cudaKernel_t)k, g, b, a, m, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    fk_launch(name_of(f), c->stream);
    return 0;
}

// The device.

cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return 0;
}
cudaError_t cudaGetDevice(int *n) {
    *n = 0;
    return 0;
}
cudaError_t cudaSetDevice(int n) {
    return n ? fail(cudaErrorInvalidDevice, "cudaSetDevice") : 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int n) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H200 (fake)");
    p->totalGlobalMem = total;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 60 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlockOptin = 232448;
    p->unifiedAddressing = 1;
    p->concurrentKernels = 1;
    p->textureAlignment = 512;
    p->maxBlocksPerMultiProcessor = 32;
    return 0;
}
int fk_attribute(int a) {
    switch (a) {
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMultiProcessorCount:
        return 132;
    case cudaDevAttrComputeCapabilityMajor:
        return 9;
    case cudaDevAttrComputeCapabilityMinor:
        return 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return 232448;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return 49152;
    case cudaDevAttrMaxRegistersPerBlock:
        return 65536;
    case cudaDevAttrMaxThreadsPerBlock:
        return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return 2048;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return 233472;
    case cudaDevAttrClockRate:
        return 1980000;
    case cudaDevAttrMemoryClockRate:
        return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return 6144;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return 65536;
    default:
        return 1;
    }
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    *v = fk_attribute(a);
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:01:00.0");
    return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) {
    *a = 0;
    *b = -5;
    return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *v, int a, int b) {
    *v = 0;
    return 0;
}
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned f) {
    return 0;
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
    if (unsafe("cudaDeviceSynchronize in a capture"))
        return last;
    fk_syncs++;
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
    *t = total;
    *f = total - used;
    return 0;
}

// Memory.

static cudaError_t take(void **p, size_t n) {
    if (used + n > total)
        return last = cudaErrorMemoryAllocation;
    n = (n + (2 << 20) - 1) & ~((2UL << 20) - 1);
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED)
        return last = cudaErrorMemoryAllocation;
    add(*p, n, 0);
    used += n;
    return 0;
}
cudaError_t cudaMalloc(void **p, size_t n) {
    if (unsafe("cudaMalloc in a capture"))
        return last;
    return take(p, n);
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) {
    return take(p, n);
}
cudaError_t cudaFree(void *p) {
    if (!p)
        return 0;
    if (unsafe("cudaFree in a capture"))
        return last;
    size_t n = drop(p);
    if (!n)
        return fail(cudaErrorInvalidValue, "cudaFree of unknown memory");
    munmap(p, n);
    used -= n;
    return 0;
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
    return cudaFree(p);
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
    if (unsafe("cudaHostAlloc in a capture"))
        return last;
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    add(*p, n, 1);
    return 0;
}
cudaError_t cudaFreeHost(void *p) {
    size_t n = drop(p);
    if (n)
        munmap(p, n);
    return 0;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
    say("cudaHostRegister %p %zu, offset in page %zu", p, n, (uintptr_t)p & 4095);
    if (fk_kind(p))
        return last = cudaErrorHostMemoryAlreadyRegistered;
    add(p, n, 1);
    return 0;
}
cudaError_t cudaHostUnregister(void *p) {
    drop(p);
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    int k = fk_kind(p);
    memset(a, 0, sizeof *a);
    a->type = k == 1 ? cudaMemoryTypeDevice : k == 2 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    a->device = k == 1 ? 0 : k == 2 ? 0 : -2;
    a->devicePointer = k ? (void *)p : 0;
    a->hostPointer = k == 2 ? (void *)p : 0;
    return 0;
}

// Copies and sets.

#define MOST_COPIED (64UL << 20) // larger ones would touch memory that this machine does not have
static void run(Op *o) {
    if (o->kind == 'c')
        memmove(o->dst, o->src, o->n);
    else if (o->kind == 's')
        memset(o->dst, o->value, o->n);
}
static cudaError_t copy(void *d, const void *s, size_t n, cudaStream_t st, const char *what) {
    Stream *q = of(st);
    int a = fk_kind(d), b = fk_kind(s);
    if (q->g) {
        if (!a || !b)
            say("WARNING %s of pageable memory in a capture (%d <- %d, %zu bytes)", what, a, b, n), trace();
        put(q->g, (Op){'c', d, s, n, 0, "memcpy"});
        q->g->copies++;
        q->work++;
        return 0;
    }
    if (a != 1 || b != 1)
        fk_host_copies++;
    else
        fk_launches++;
    if (n > MOST_COPIED)
        return 0;
    memmove(d, s, n);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) {
    return copy(d, s, n, st, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t st) {
    return copy(d, s, n, st, "cudaMemcpyPeerAsync");
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    if (unsafe("cudaMemcpy in a capture"))
        return last;
    return copy(d, s, n, 0, "cudaMemcpy");
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st) {
    Stream *q = of(st);
    if (q->g) {
        put(q->g, (Op){'s', d, 0, n, v, "memset"});
        q->g->sets++;
        q->work++;
        return 0;
    }
    fk_launches++;
    if (n <= MOST_COPIED)
        memset(d, v, n);
    return 0;
}
cudaError_t cudaMemset(void *d, int v, size_t n) {
    return cudaMemsetAsync(d, v, n, 0);
}
cudaError_t cudaMemcpyToSymbol(const void *s, const void *p, size_t n, size_t o, enum cudaMemcpyKind k) {
    return 0;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
    static char x[1 << 20];
    *p = x;
    return 0;
}

// Streams.

static cudaError_t made(cudaStream_t *s, unsigned f) {
    Stream *n = calloc(1, sizeof *n);
    n->nonblocking = f & 1;
    *s = (cudaStream_t)n;
    return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    return made(s, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    return made(s, f);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    return 0;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = 0;
    return 0;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    if (of(s)->g)
        return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery of a captured stream");
    return 0;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    Stream *q = of(s);
    if (q->g) {
        q->g->broken = 1;
        return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize of a captured stream");
    }
    fk_syncs++;
    return 0;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
    Event *v = (Event *)e;
    Stream *waits = of(s);
    Graph *g = open_one(v->g);
    if (!g)
        return 0;
    if (!waits->g) {
        if (g->nforks == MOST_FORKS)
            return fail(cudaErrorInvalidValue, "too many streams in a capture for this stand-in");
        waits->g = g;
        waits->work = waits->joined = 0;
        g->forks[g->nforks++] = waits;
    } else if (waits == g->origin && v->stream->joined < v->work)
        v->stream->joined = v->work;
    return 0;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void *u, unsigned f) {
    c(s, 0, u);
    return 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
    if (!of(s)->g)
        f(u);
    else
        say("WARNING a host function in a capture");
    return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *v) {
    *v = of(s)->g ? cudaStreamCaptureStatusActive : 0;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *v, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
    Stream *q = of(s);
    *v = q->g ? cudaStreamCaptureStatusActive : 0;
    if (id)
        *id = (unsigned long long)(uintptr_t)q->g;
    if (g)
        *g = (cudaGraph_t)q->g;
    if (d)
        *d = 0;
    if (e)
        *e = 0;
    if (n)
        *n = 0;
    return 0;
}

// Graphs.

static int named(Graph *g, const char *name) {
    int n = 0;
    for (int i = 0; i < g->n; i++)
        n += g->ops[i].kind == 'k' && strstr(g->ops[i].name, name) != 0;
    return n;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
    int was = capture_mode;
    capture_mode = *m;
    *m = was;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    if (of(s) == &legacy)
        return fail(cudaErrorStreamCaptureUnsupported, "capture of the legacy stream");
    if (of(s)->g)
        return fail(cudaErrorIllegalState, "a capture of a captured stream");
    Graph *g = calloc(1, sizeof *g);
    g->origin = of(s);
    of(s)->g = g;
    mine++;
    return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *r) {
    Graph *g = of(s)->g;
    if (!g)
        return fail(cudaErrorIllegalState, "cudaStreamEndCapture without one");
    for (int i = 0; i < g->nforks; i++)
        if (g->forks[i]->joined < g->forks[i]->work) {
            g->broken = 1;
            fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture: the origin does not wait for a forked stream");
        }
    g->ended = 1;
    mine--;
    if (g->broken) {
        *r = 0;
        return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
    }
    *r = (cudaGraph_t)g;
    ngraphs++;
    if (verbose)
        say("GRAPH launches %d attentions %d layers %d rounds %d", g->n, named(g, "attend_kernel"),
            named(g, "turn_kernel"), named(g, "best_kernel") + named(g, "decide_kernel") + named(g, "build_kernel"));
    return 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
    *e = (cudaGraphExec_t)g;
    return 0;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
    *e = (cudaGraphExec_t)g;
    return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    Graph *g = (Graph *)e;
    if (of(s)->g)
        return fail(cudaErrorStreamCaptureUnsupported, "a graph in a graph");
    g->replays++;
    fk_graph_launches++;
    for (int i = 0; i < g->n; i++)
        run(&g->ops[i]);
    return 0;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    return 0;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
    return 0;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *c) {
    *c = ((Graph *)g)->n;
    return 0;
}

// Events.

static cudaError_t event(cudaEvent_t *e) {
    *e = calloc(1, sizeof(Event));
    return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    return event(e);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
    return event(e);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    Stream *on = of(s);
    *(Event *)e = (Event){on->g, on, on->work};
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    return cudaEventRecord(e, s);
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    if (open_one(((Event *)e)->g))
        return fail(cudaErrorCapturedEvent, "cudaEventQuery of a captured event");
    if (unsafe("cudaEventQuery in a capture"))
        return last;
    return 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    if (open_one(((Event *)e)->g))
        return fail(cudaErrorCapturedEvent, "cudaEventSynchronize of a captured event");
    fk_syncs++;
    return 0;
}
cudaError_t cudaEventElapsedTime(float *t, cudaEvent_t a, cudaEvent_t b) {
    *t = 0.01f;
    return 0;
}

// Kernels' attributes, errors, and the way to the driver.

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 90;
    a->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m,
                                                                   unsigned fl) {
    *n = 2;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) {
    *n = 2;
    return 0;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t e = last;
    last = 0;
    return e;
}
cudaError_t cudaPeekAtLastError(void) {
    return last;
}
const char *cudaGetErrorString(cudaError_t e) {
    static char s[64];
    sprintf(s, "fake error %d", e);
    return s;
}
const char *cudaGetErrorName(cudaError_t e) {
    return cudaGetErrorString(e);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long fl,
                                             enum cudaDriverEntryPointQueryResult *r) {
    void *l = dlopen("libcuda.so.1", RTLD_NOW);
    char n[128];
    *f = l ? dlsym(l, s) : 0;
    if (!*f && l) {
        snprintf(n, 128, "%s_v2", s);
        *f = dlsym(l, n);
    }
    if (r)
        *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}
