/* A stand-in for NVIDIA's driver library: the calls that map memory, over memfd, with the driver's ABI, rules and codes.
 *
 * It is loaded under the name libcuda.so.1, and NVIDIA's bindings find every call through cuGetProcAddress_v2. A device
 * has a budget of memory. New memory is not zero: it is full of 0xFF, which is NaN in every floating-point format. Work
 * that was submitted to a device and not waited for makes cuMemUnmap end as a kernel would that touches an unmapped page,
 * with CUDA_ERROR_ILLEGAL_ADDRESS, now and from then on: the work may touch all that was accessible when it was submitted.
 * Each thread has a stack of contexts. Where the documentation does not say whether a call needs one, it does. There are
 * two devices, of which CUDA_VISIBLE_DEVICES leaves those that it names by number or identifier, in its order and up to
 * the first name that is none, as it is when cuInit is called.
 *
 * Tests steer it through the functions called stand_in_*.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST 65536
#define DEVICES 2
#define CALLS 32
#define DEPTH 8

typedef struct {
    size_t size;
    int fd, device, created, mappings;
} Allocation;

typedef struct {
    uintptr_t start, end;
    int allocation; /* index; -1 for a reservation */
    int accessible, busy;
} Range;

typedef struct {
    const char *name;
    void *function;
    int calls;
    int fail_at, code;
    int delay_at, milliseconds;
} Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation allocations[MOST];
static Range reservations[MOST], mappings[MOST];
static int num_allocations, num_reservations, num_mappings;
static size_t budget = (size_t)1 << 30, granule = 2 << 20, used[DEVICES];
static int visible[DEVICES], num_visible; /* the driver's number of a device -> the machine's */
static const char *identifiers[DEVICES] = {"GPU-00000000-0000-4000-8000-000000000000", "MIG-11111111-0000-4000-8000-000000000000"};
static int initialized, broken, retained[DEVICES], shareable;
static struct CUctx_st {
    int device;
} contexts[DEVICES] = {{0}, {1}};
static __thread CUcontext stack[DEPTH];
static __thread int depth; /* the context on top is current */
static Call calls[CALLS];

/* The header gives some functions a version in their name: cuMemGetInfo is cuMemGetInfo_v2. */
static Call *named(const char *name) {
    for (Call *call = calls; call->name; call++) {
        const char *rest = name + strlen(call->name);
        if (!strncmp(call->name, name, strlen(call->name)) && (!*rest || !strcmp(rest, "_v2"))) return call;
    }
    abort();
}

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

static CUresult enter(const char *name, int needs_context) {
    Call *call = named(name);
    pthread_mutex_lock(&lock);
    int number = ++call->calls;
    if (number == call->delay_at) {
        struct timespec wait = {call->milliseconds / 1000, call->milliseconds % 1000 * 1000000L};
        pthread_mutex_unlock(&lock); /* other threads' calls go on */
        nanosleep(&wait, NULL);
        pthread_mutex_lock(&lock);
    }
    if (number == call->fail_at) return call->code;
    if (!initialized && strcmp(name, "cuInit")) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs_context && !current()) return CUDA_ERROR_INVALID_CONTEXT;
    return broken ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

#define ENTER(needs_context)                              \
    do {                                                  \
        CUresult entered = enter(__func__, needs_context); \
        if (entered) return leave(entered);               \
    } while (0)

static CUresult leave(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

static Range *find(Range *ranges, int count, uintptr_t start, uintptr_t end) {
    for (int i = 0; i < count; i++)
        if (ranges[i].start < end && start < ranges[i].end) return &ranges[i];
    return NULL;
}

static void drop_if_unused(Allocation *allocation) {
    if (allocation->created || allocation->mappings || allocation->fd < 0) return;
    close(allocation->fd);
    allocation->fd = -1;
    used[allocation->device] -= allocation->size;
    while (num_allocations && allocations[num_allocations - 1].fd < 0) num_allocations--; /* handles come again */
}

/* The machine's number of the device that a list of names begins with: a number, or the beginning of an identifier. */
static int device_named(const char *names) {
    size_t length = strcspn(names, ",");
    if (length == 1 && *names >= '0' && *names < '0' + DEVICES) return *names - '0';
    for (int i = 0; i < DEVICES; i++)
        if (length > 4 && length <= strlen(identifiers[i]) && !strncmp(names, identifiers[i], length)) return i;
    return -1;
}

/* A device, by the machine's number, has done all that was submitted. */
static void finish(int device) {
    for (int i = 0; i < num_mappings; i++)
        if (allocations[mappings[i].allocation].device == device) mappings[i].busy = 0;
}

CUresult cuInit(unsigned flags) {
    ENTER(0);
    if (flags) return leave(CUDA_ERROR_INVALID_VALUE);
    const char *named = getenv("CUDA_VISIBLE_DEVICES");
    num_visible = 0;
    for (int i = 0; !named && i < DEVICES; i++) visible[num_visible++] = i;
    for (int device; named && num_visible < DEVICES && (device = device_named(named)) >= 0;) {
        visible[num_visible++] = device;
        named = strchr(named, ',');
        if (named) named++;
    }
    if (!num_visible) return leave(CUDA_ERROR_NO_DEVICE);
    initialized = 1;
    return leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(0);
    *version = 13000;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(0);
    *count = num_visible;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(0);
    if (ordinal < 0 || ordinal >= num_visible) return leave(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(0);
    if (device < 0 || device >= num_visible || length <= 0) return leave(CUDA_ERROR_INVALID_DEVICE);
    strncpy(name, "Stand-In 1000", length);
    name[length - 1] = 0;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(0);
    if (device < 0 || device >= DEVICES) return leave(CUDA_ERROR_INVALID_DEVICE);
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(0);
    if (device < 0 || device >= DEVICES) return leave(CUDA_ERROR_INVALID_DEVICE);
    retained[device]++;
    *context = &contexts[device];
    return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(0);
    if (device < 0 || device >= DEVICES || !retained[device]) return leave(CUDA_ERROR_INVALID_CONTEXT);
    retained[device]--;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(0);
    if (context && !retained[context->device]) return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(0);
    if (!context || !retained[context->device] || depth == DEPTH) return leave(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(0);
    if (!depth) return leave(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context) *context = stack[depth];
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(0);
    *context = current();
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void) {
    ENTER(1);
    finish(visible[current()->device]);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
    ENTER(1);
    *available = budget - used[visible[current()->device]];
    *total = budget;
    return leave(CUDA_SUCCESS);
}

static int valid(const CUmemAllocationProp *property) {
    return property->type == CU_MEM_ALLOCATION_TYPE_PINNED && property->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           property->location.id >= 0 && property->location.id < num_visible;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *property,
                                              CUmemAllocationGranularity_flags option) {
    ENTER(0);
    if (!valid(property) || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) return leave(CUDA_ERROR_INVALID_VALUE);
    *size = granule;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags) {
    ENTER(1);
    (void)hint;
    if (!size || size % granule || flags || (alignment & (alignment - 1))) return leave(CUDA_ERROR_INVALID_VALUE);
    if (num_reservations == MOST) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    size_t align = alignment > granule ? alignment : granule;
    void *room = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    uintptr_t start = ((uintptr_t)room + align - 1) / align * align, end = start + size;
    if (start > (uintptr_t)room) munmap(room, start - (uintptr_t)room);
    munmap((void *)end, (uintptr_t)room + size + align - end);
    reservations[num_reservations++] = (Range){start, end, -1, 0, 0};
    *address = start;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER(1);
    Range *range = find(reservations, num_reservations, address, address + 1);
    if (!range || range->start != address || range->end != address + size || find(mappings, num_mappings, address, address + size))
        return leave(CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, size);
    *range = reservations[--num_reservations];
    return leave(CUDA_SUCCESS);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property,
                            unsigned long long flags) {
    ENTER(1);
    if (!size || size % granule || flags || !valid(property)) return leave(CUDA_ERROR_INVALID_VALUE);
    int device = visible[property->location.id];
    if (size > budget - used[device] || num_allocations == MOST) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    memset(pages, 0xFF, size);
    munmap(pages, size);
    allocations[num_allocations] = (Allocation){size, fd, device, 1, 0};
    used[device] += size;
    shareable = property->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = ++num_allocations;
    return leave(CUDA_SUCCESS);
}

static Allocation *allocation_of(CUmemGenericAllocationHandle handle) {
    if (!handle || handle > (unsigned)num_allocations || !allocations[handle - 1].created) return NULL;
    return &allocations[handle - 1];
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(1);
    Allocation *allocation = allocation_of(handle);
    if (!allocation) return leave(CUDA_ERROR_INVALID_VALUE);
    allocation->created = 0;
    drop_if_unused(allocation); /* what is mapped stays until it is unmapped */
    return leave(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    ENTER(1);
    Allocation *allocation = allocation_of(handle);
    Range *range = find(reservations, num_reservations, address, address + 1);
    if (!allocation || offset || flags || size != allocation->size || address % granule || !range ||
        address + size > range->end || find(mappings, num_mappings, address, address + size))
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (num_mappings == MOST) return leave(CUDA_ERROR_OUT_OF_MEMORY);
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    mappings[num_mappings++] = (Range){address, address + size, (int)handle - 1, 0, 0};
    allocation->mappings++;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(1);
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return leave(CUDA_ERROR_INVALID_VALUE);
    uintptr_t end = address + size;
    for (uintptr_t at = address; at < end;) { /* whole mappings, without a gap */
        Range *range = find(mappings, num_mappings, at, at + 1);
        if (!range || range->start != at || range->end > end || access->location.id < 0 ||
            access->location.id >= num_visible || allocations[range->allocation].device != visible[access->location.id])
            return leave(CUDA_ERROR_INVALID_VALUE);
        at = range->end;
    }
    if (!size || mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return leave(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < num_mappings; i++)
        if (mappings[i].start >= address && mappings[i].end <= end) mappings[i].accessible = 1;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER(1);
    Range *range = find(mappings, num_mappings, address, address + 1);
    if (!range || range->start != address || range->end != address + size) return leave(CUDA_ERROR_INVALID_VALUE);
    Allocation *allocation = &allocations[range->allocation];
    if (range->busy) {
        broken = 1;
        return leave(CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    if (mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    allocation->mappings--;
    *range = mappings[--num_mappings];
    drop_if_unused(allocation);
    return leave(CUDA_SUCCESS);
}

/* Of any address, unlike cuPointerGetAttribute. */
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr address) {
    ENTER(1);
    if (count != 1 || *attributes != CU_POINTER_ATTRIBUTE_MAPPED) return leave(CUDA_ERROR_INVALID_VALUE);
    *(int *)*data = find(mappings, num_mappings, address, address + 1) != NULL;
    return leave(CUDA_SUCCESS);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
        case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; break;
        case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case CUDA_ERROR_NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
        case CUDA_ERROR_NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
        case CUDA_ERROR_INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
        case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
        case CUDA_ERROR_ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

#define CALL(name) {#name, name, 0, 0, 0, 0, 0}
static Call calls[CALLS] = {
    CALL(cuInit), CALL(cuDriverGetVersion), CALL(cuDeviceGetCount), CALL(cuDeviceGet), CALL(cuDeviceGetName), CALL(cuDeviceGetAttribute),
    CALL(cuDevicePrimaryCtxRetain), CALL(cuDevicePrimaryCtxRelease), CALL(cuCtxSetCurrent), CALL(cuCtxGetCurrent),
    CALL(cuCtxPushCurrent), CALL(cuCtxPopCurrent), CALL(cuCtxSynchronize), CALL(cuMemGetInfo), CALL(cuMemGetAllocationGranularity), CALL(cuMemAddressReserve),
    CALL(cuMemAddressFree), CALL(cuMemCreate), CALL(cuMemRelease), CALL(cuMemMap), CALL(cuMemSetAccess),
    CALL(cuMemUnmap), CALL(cuPointerGetAttributes), CALL(cuGetErrorName),
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    *function = NULL;
    for (Call *call = calls; call->name; call++)
        if (!strcmp(call->name, name)) *function = call->function;
    if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* A device of `bytes` in granules of `size`, and no faults. What is allocated stays. */
void stand_in_reset(size_t bytes, size_t size) {
    pthread_mutex_lock(&lock);
    budget = bytes, granule = size, broken = 0;
    for (int i = 0; i < DEVICES; i++) finish(i);
    for (Call *call = calls; call->name; call++) call->calls = call->fail_at = call->delay_at = 0;
    pthread_mutex_unlock(&lock);
}

/* What an earlier test left behind: its memory and its addresses go. */
void stand_in_forget(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_allocations; i++)
        if (allocations[i].fd >= 0) close(allocations[i].fd);
    for (int i = 0; i < num_reservations; i++)
        munmap((void *)reservations[i].start, reservations[i].end - reservations[i].start);
    num_allocations = num_reservations = num_mappings = 0;
    memset(used, 0, sizeof used);
    memset(retained, 0, sizeof retained);
    pthread_mutex_unlock(&lock);
}

/* Fail the `number`-th call from now with `code`. */
void stand_in_fail(const char *name, int number, int code) {
    named(name)->fail_at = named(name)->calls + number, named(name)->code = code;
}

/* Let the `number`-th call from now take longer. */
void stand_in_delay(const char *name, int number, int milliseconds) {
    named(name)->delay_at = named(name)->calls + number, named(name)->milliseconds = milliseconds;
}

int stand_in_calls(const char *name) { return named(name)->calls; }

int stand_in_count(void) {
    int count = 0;
    while (calls[count].name) count++;
    return count;
}

const char *stand_in_name(int number) { return calls[number].name; }

/* A device, by the machine's number, works until somebody waits for it, on what is accessible now. */
void stand_in_submit(int device) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_mappings; i++)
        if (allocations[mappings[i].allocation].device == device) mappings[i].busy = mappings[i].accessible;
    pthread_mutex_unlock(&lock);
}

/* The calling thread has the context of a device and no other, or none. */
void stand_in_enter(int device) {
    depth = device >= 0;
    stack[0] = device < 0 ? NULL : &contexts[device];
}

/* The device whose context the calling thread has, or -1. */
int stand_in_current(void) { return current() ? current()->device : -1; }

/* How often the primary context of a device is held. */
int stand_in_retained(int device) { return retained[device]; }

/* Whether the handle that was made last can be exported as a file descriptor. */
int stand_in_shareable(void) { return shareable; }

/* Of a device by the machine's number. */
size_t stand_in_used(int device) { return used[device]; }

int stand_in_mappings(void) { return num_mappings; }

int stand_in_reservations(void) { return num_reservations; }

int stand_in_handles(void) {
    int count = 0;
    for (int i = 0; i < num_allocations; i++) count += allocations[i].created;
    return count;
}
