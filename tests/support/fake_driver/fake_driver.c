// Fake of the functions of both vendors' drivers that we call: records every call with its arguments,
// uses host memory as device memory, and fails on demand.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// Values that tests can set, in the order of fake_driver.py.
enum Setting {
    NUM_DEVICES, FREE, TOTAL, INTEGRATED, MAJOR, MINOR, PARAMETER_BYTES, VERSION, BUSY, SHOWN,
    TIMEOUT, BLOCK, NUM
};
static int64_t settings[NUM];
static char notes[1 << 16];
static char failing_name[64];
static int failing_status;
static uintptr_t num_handles;

void fake_reset(void) {
    static const int64_t usual[NUM] = {1, 1000, 4000, 0, 9, 0, 24, 12040, 0, 64, 0, 0};
    memcpy(settings, usual, sizeof usual);
    notes[0] = failing_name[0] = 0;
    num_handles = 0;
}
void fake_set(int setting, int64_t value) { settings[setting] = value; }
void fake_fail(const char *name, int status) {
    snprintf(failing_name, sizeof failing_name, "%s", name);
    failing_status = status;
}
const char *fake_notes(void) { return notes; }

static int note(const char *format, ...) {
    size_t used = strlen(notes), name_bytes = strcspn(format, " ");
    va_list values;
    va_start(values, format);
    vsnprintf(notes + used, sizeof notes - used - 2, format, values);
    va_end(values);
    strcat(notes, "\n");
    int fails = strlen(failing_name) == name_bytes && !strncmp(format, failing_name, name_bytes);
    return fails ? failing_status : 0;
}
static int handle(void **out, int status) {
    *out = status ? NULL : (void *)++num_handles;
    return status;
}

int cuInit(unsigned flags) { return note("init %u", flags); }
int cuDriverGetVersion(int *version) {
    *version = (int)settings[VERSION];
    return note("version");
}
int cuDeviceGetCount(int *count) {
    *count = (int)settings[NUM_DEVICES];
    return note("device_count");
}
int cuDeviceGet(int *device, int index) {
    *device = 100 + index;
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "Fake %d\n", device);
    return note("device_name");
}
int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, device, 16);
    return note("device_uuid");
}
int cuDeviceGetPCIBusId(char *name, int size, int device) {
    snprintf(name, size, "0000:%02x:00.0", device);
    return note("pci_bus_id");
}
int hipGetDevicePropertiesR0600(char *properties, int device) {
    snprintf(properties, 256, "gfx%d beside others", device);
    snprintf(properties + 1160, 256, "gfx1030:sramecc+:xnack-");
    return note("device_properties of %d", device);
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 16: case 63: *value = 7; break;
        case 17: *value = (int)settings[TIMEOUT]; break;
        case 18: *value = (int)settings[INTEGRATED]; break;
        case 75: *value = (int)settings[MAJOR]; break;
        case 76: *value = (int)settings[MINOR]; break;
        case 97: case 74: *value = 100000; break;
        case 102: *value = settings[BLOCK] > 0; break;
        default: *value = -1;
    }
    return note("device_attribute %d of %d", attribute, device);
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    return handle(context, note("retain_context %d", device));
}
int cuDevicePrimaryCtxRelease_v2(int device) { return note("release_context %d", device); }
int cuCtxSetCurrent(void *context) { return note("set_context %zu", (size_t)context); }
int hipSetDevice(int index) { return note("set_device %d", index); }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = (size_t)settings[FREE];
    *total = (size_t)settings[TOTAL];
    return note("memory_info");
}
int cuModuleLoadData(void **module, const char *image) {
    return handle(module, note("load_module %02x%.3s", (unsigned char)image[0], image + 1));
}
int cuModuleUnload(void *module) { return note("unload_module %zu", (size_t)module); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return handle(function, note("module_function %s of %zu", name, (size_t)module));
}
int cuFuncLoad(void *function) { return note("load_function %zu", (size_t)function); }
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    *offset = 0;
    *size = (size_t)settings[PARAMETER_BYTES];
    return note("parameter_info %zu of %zu", index, (size_t)function);
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = 512;
    return note("function_attribute %d of %zu", attribute, (size_t)function);
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return note("set_function_attribute %d of %zu = %d", attribute, (size_t)function, value);
}

static void note_launch(const char *what, void *function, const unsigned *size, void *stream,
                        void **parameters) {
    char bytes[256] = "";
    for (int64_t i = 0; i < settings[PARAMETER_BYTES] && i < 100; i++)
        sprintf(bytes + 2 * i, "%02x", ((unsigned char *)parameters[0])[i]);
    note("%s %zu grid %u %u %u block %u %u %u shared %u stream %zu args %s", what,
         (size_t)function, size[0], size[1], size[2], size[3], size[4], size[5], size[6],
         (size_t)stream, bytes);
}
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void *stream, void **parameters, void **extra) {
    unsigned size[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes};
    note_launch(extra ? "launch with extra" : "launch", function, size, stream, parameters);
    return strcmp(failing_name, "launch") ? 0 : failing_status;
}
// As in cuda.h.
typedef struct {
    int id;
    char pad[8 - sizeof(int)];
    union { char pad[64]; int programmatic; } value;
} Attribute;
typedef struct {
    unsigned size[7];
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Config;
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    char what[64];
    snprintf(what, sizeof what, "launch_with %u attributes, first %d = %d%s, of",
             config->num_attributes, config->attributes[0].id,
             config->attributes[0].value.programmatic, extra ? " and extra" : "");
    note_launch(what, function, config->size, config->stream, parameters);
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
    return handle(stream, note("create_stream %u", flags));
}
int cuStreamDestroy_v2(void *stream) { return note("destroy_stream %zu", (size_t)stream); }
int cuStreamSynchronize(void *stream) { return note("synchronize_stream %zu", (size_t)stream); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    return handle(stream, note("create_stream_of_priority %u %d", flags, priority));
}
int cuStreamQuery(void *stream) {
    int status = note("query_stream %zu", (size_t)stream);
    return !status && settings[BUSY] && settings[BUSY]-- ? 600 : status;
}
int cuEventCreate(void **event, unsigned flags) {
    return handle(event, note("create_event %u", flags));
}
int cuEventDestroy_v2(void *event) { return note("destroy_event %zu", (size_t)event); }
int cuEventRecord(void *event, void *stream) {
    return note("record_event %zu in %zu", (size_t)event, (size_t)stream);
}
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return note("wait_for_event %zu in %zu flags %u", (size_t)event, (size_t)stream, flags);
}
int cuStreamBeginCapture_v2(void *stream, int mode) {
    return note("begin_capture %zu mode %d", (size_t)stream, mode);
}
int cuStreamEndCapture(void *stream, void **graph) {
    return handle(graph, note("end_capture %zu", (size_t)stream));
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    return handle(executable, note("instantiate_graph %zu flags %llu", (size_t)graph, flags));
}
int cuGraphLaunch(void *executable, void *stream) {
    return note("launch_graph %zu on %zu", (size_t)executable, (size_t)stream);
}
int cuGraphDestroy(void *graph) { return note("destroy_graph %zu", (size_t)graph); }
int cuGraphExecDestroy(void *graph) { return note("destroy_executable %zu", (size_t)graph); }

int cuMemHostRegister_v2(void *address, size_t num_bytes, unsigned flags) {
    (void)address;
    return note("register_host %zu flags %u", num_bytes, flags);
}
int cuMemHostUnregister(void *address) {
    (void)address;
    return note("unregister_host");
}
int cuMemHostGetDevicePointer_v2(void **pointer, void *address, unsigned flags) {
    *pointer = (char *)address + 0x1000;
    return note("host_pointer flags %u", flags);
}
int cuMemAlloc_v2(void **address, size_t num_bytes) {
    return handle(address, note("allocate %zu", num_bytes));
}
int cuMemFree_v2(void *address) { return note("free %zu", (size_t)address); }
int cuMemcpyAsync(void *destination, const void *source, size_t num_bytes, void *stream) {
    memcpy(destination, source, num_bytes);
    return note("copy %zu on %zu", num_bytes, (size_t)stream);
}
int hipMemcpyAsync(void *destination, const void *source, size_t num_bytes, int kind, void *stream) {
    memcpy(destination, source, num_bytes);
    return note("copy %zu kind %d on %zu", num_bytes, kind, (size_t)stream);
}
int cuMemcpyHtoDAsync_v2(void *destination, const void *source, size_t num_bytes, void *stream) {
    memcpy(destination, source, num_bytes);
    return note("copy_to_device %zu on %zu", num_bytes, (size_t)stream);
}
int hipMemcpyHtoDAsync(void *destination, void *source, size_t num_bytes, void *stream) {
    return cuMemcpyHtoDAsync_v2(destination, source, num_bytes, stream);
}
int cuMemsetD8Async(void *address, unsigned char value, size_t num_bytes, void *stream) {
    if ((uintptr_t)address > num_handles) memset(address, value, num_bytes);  // memory from `allocate`
    return note("clear %zu on %zu", num_bytes, (size_t)stream);
}

// As in cuda.h.
typedef struct { int type, index; } Place;
typedef struct {
    int type, handle_types;
    Place place;
    void *meta_data;
    unsigned char flags[8];
} BlockProperties;
typedef struct { Place place; int flags; } BlockAccess;
int cuMemGetAllocationGranularity(size_t *bytes, const BlockProperties *of, int option) {
    *bytes = (size_t)settings[BLOCK];
    return note("block_granularity type %d of %d/%d, %d", of->type, of->place.type, of->place.index,
                option);
}
int cuMemAddressReserve(void **address, size_t num_bytes, size_t alignment, void *at, uint64_t flags) {
    int status = note("reserve_addresses %zu", num_bytes + alignment + (size_t)at + flags);
    *address = (void *)(uintptr_t)(status ? 0 : 1 << 30);
    return status;
}
int cuMemAddressFree(void *address, size_t num_bytes) {
    return note("free_addresses %zx %zu", (size_t)address, num_bytes);
}
int cuMemCreate(void **block, size_t num_bytes, const BlockProperties *of, uint64_t flags) {
    int is_zero = !of->handle_types && !of->meta_data && !flags && !memcmp(of->flags, "\0\0\0\0\0\0\0", 8);
    if ((int64_t)num_bytes > settings[FREE]) return note("create_block"), 2;
    settings[FREE] -= (int64_t)num_bytes;
    return handle(block, note("create_block %zu type %d of %d/%d%s", num_bytes, of->type, of->place.type,
                              of->place.index, is_zero ? "" : ", not zero"));
}
int cuMemRelease(void *block) { return note("release_block %zu", (size_t)block); }
int cuMemMap(void *address, size_t num_bytes, size_t offset, void *block, uint64_t flags) {
    return note("map_block %zx %zu of %zu", (size_t)address, num_bytes, (size_t)block + offset + flags);
}
int cuMemUnmap(void *address, size_t num_bytes) {
    settings[FREE] += (int64_t)num_bytes;
    return note("unmap_block %zx %zu", (size_t)address, num_bytes);
}
int cuMemSetAccess(void *address, size_t num_bytes, const BlockAccess *access, size_t count) {
    return note("allow_block %zx %zu: %d of %d/%d, %zu", (size_t)address, num_bytes, access->flags,
                access->place.type, access->place.index, count);
}

// As in cuda.h and hip_runtime_api.h.
typedef struct { char bytes[64]; } MemoryHandle;
int cuIpcGetMemHandle(MemoryHandle *shown, void *address) {
    memset(shown, (int)(uintptr_t)address, sizeof *shown);
    return note("export_memory %zu", (size_t)address);
}
int cuIpcOpenMemHandle_v2(void **address, MemoryHandle shown, unsigned flags) {
    return handle(address, note("import_memory %02x flags %u", (unsigned char)shown.bytes[63], flags));
}
int cuIpcCloseMemHandle(void *address) { return note("close_memory %zu", (size_t)address); }
// The range begins one byte before the exported memory.
int cuMemGetAddressRange_v2(void **begin, size_t *num_bytes, void *address) {
    *begin = (char *)address - 1;
    *num_bytes = (size_t)settings[SHOWN] + 1;
    return note("memory_range %zu", (size_t)address);
}

static char words[64];
const char *hipGetErrorString(int status) {
    snprintf(words, sizeof words, "the fake's error %d\n", status);
    return words;
}
int cuGetErrorString(int status, const char **text) {
    *text = status == 999 ? NULL : hipGetErrorString(status);
    return status == 999;
}

#define SAME(HIP, CUDA) __typeof__(CUDA) HIP __attribute__((alias(#CUDA)));
SAME(hipInit, cuInit)
SAME(hipDriverGetVersion, cuDriverGetVersion)
SAME(hipGetDeviceCount, cuDeviceGetCount)
SAME(hipDeviceGet, cuDeviceGet)
SAME(hipDeviceGetName, cuDeviceGetName)
SAME(hipDeviceGetUuid, cuDeviceGetUuid_v2)
SAME(hipDeviceGetPCIBusId, cuDeviceGetPCIBusId)
SAME(hipDeviceGetAttribute, cuDeviceGetAttribute)
SAME(hipMemGetInfo, cuMemGetInfo_v2)
SAME(hipModuleLoadData, cuModuleLoadData)
SAME(hipModuleUnload, cuModuleUnload)
SAME(hipModuleGetFunction, cuModuleGetFunction)
SAME(hipFuncGetAttribute, cuFuncGetAttribute)
SAME(hipModuleLaunchKernel, cuLaunchKernel)
SAME(hipStreamCreateWithFlags, cuStreamCreate)
SAME(hipStreamDestroy, cuStreamDestroy_v2)
SAME(hipStreamSynchronize, cuStreamSynchronize)
SAME(hipStreamCreateWithPriority, cuStreamCreateWithPriority)
SAME(hipStreamQuery, cuStreamQuery)
SAME(hipEventCreateWithFlags, cuEventCreate)
SAME(hipEventDestroy, cuEventDestroy_v2)
SAME(hipEventRecord, cuEventRecord)
SAME(hipStreamWaitEvent, cuStreamWaitEvent)
SAME(hipStreamBeginCapture, cuStreamBeginCapture_v2)
SAME(hipStreamEndCapture, cuStreamEndCapture)
SAME(hipGraphInstantiateWithFlags, cuGraphInstantiateWithFlags)
SAME(hipGraphLaunch, cuGraphLaunch)
SAME(hipGraphDestroy, cuGraphDestroy)
SAME(hipGraphExecDestroy, cuGraphExecDestroy)
SAME(hipHostRegister, cuMemHostRegister_v2)
SAME(hipHostUnregister, cuMemHostUnregister)
SAME(hipHostGetDevicePointer, cuMemHostGetDevicePointer_v2)
SAME(hipMalloc, cuMemAlloc_v2)
SAME(hipFree, cuMemFree_v2)
SAME(hipMemsetD8Async, cuMemsetD8Async)
SAME(hipIpcGetMemHandle, cuIpcGetMemHandle)
SAME(hipIpcOpenMemHandle, cuIpcOpenMemHandle_v2)
SAME(hipIpcCloseMemHandle, cuIpcCloseMemHandle)
SAME(hipMemGetAddressRange, cuMemGetAddressRange_v2)
