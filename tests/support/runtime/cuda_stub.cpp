// A CUDA without a device, for torch's real CUDA build: `make gpu-dry-run` preloads it.
//
// Torch's allocator, pools, graphs and stream bookkeeping run as they are. Kernels do nothing, so values are garbage.
// Copies move bytes when they are issued, and again when their graph is launched. What CUDA would refuse is refused and
// said on stderr: calls that a capture forbids, waits across captures, streams that do not lead back, copies in a
// capture from memory that is not pinned, and addresses that are not allocated. One library stands for the runtime, the
// few calls of the driver API that the project makes, and cuBLAS; cuDNN has to be switched off. `cudaStubRefusals` says
// how often something was refused.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr size_t kDeviceBytes = 79ull << 30;
constexpr size_t kPage = 2 << 20;

struct CopyNode {
  void *to;
  const void *from;
  size_t nbytes;
};

struct GraphImage {
  std::vector<CopyNode> copies;
  size_t kernels = 0;
};

// How many commands of each stream are known to come before a place.
using Progress = std::map<cudaStream_t, size_t>;

struct Capture {
  unsigned long long id;
  cudaStream_t origin;
  std::thread::id thread;
  bool everywhere;  // the mode forbids calls of other threads, too
  bool invalid = false;
  GraphImage *graph = new GraphImage;
  std::map<cudaStream_t, Progress> streams{};  // those that have joined
};

struct EventRecord {
  bool timed;
  double seconds = 0;
  unsigned long long capture = 0;
  Progress progress{};
};

struct Block {
  size_t nbytes;
  void *mapping = nullptr;
  size_t mapped = 0;
};

std::recursive_mutex lock_;
std::map<uintptr_t, Block> device_, pinned_;
std::map<unsigned long long, Capture *> captures_;
unsigned long long last_capture_ = 0;
size_t used_ = 0;
int refusals_ = 0;
thread_local cudaError_t error_ = cudaSuccess;
thread_local cudaStreamCaptureMode mode_ = cudaStreamCaptureModeGlobal;

#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock_)

cudaError_t refuse(cudaError_t error, const char *why) {
  LOCKED;
  refusals_++;
  std::fprintf(stderr, "cuda stub: %s (%d)\n", why, static_cast<int>(error));
  return error_ = error;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool holds(const std::map<uintptr_t, Block> &blocks, const void *start, size_t nbytes) {
  auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(start));
  if (next == blocks.begin()) return false;
  const auto &[address, block] = *std::prev(next);
  return reinterpret_cast<uintptr_t>(start) + nbytes <= address + block.nbytes;
}

Capture *capture_of(cudaStream_t stream) {
  for (auto &[id, capture] : captures_)
    if (capture->streams.count(stream)) return capture;
  return nullptr;
}

// Whether a call is made that a capture of this thread, or of any in the global mode, forbids.
bool forbidden(const char *call) {
  LOCKED;
  if (mode_ == cudaStreamCaptureModeRelaxed) return false;
  bool found = false;
  for (auto &[id, capture] : captures_)
    if (capture->everywhere || capture->thread == std::this_thread::get_id()) found = capture->invalid = true;
  if (found) refuse(cudaErrorStreamCaptureUnsupported, call);
  return found;
}

#define NOT_WHILE_CAPTURING(call) \
  if (forbidden(call " while capturing")) return cudaErrorStreamCaptureUnsupported

void advance(Capture *capture, cudaStream_t stream) { capture->streams[stream][stream]++; }

cudaError_t kernel(cudaStream_t stream) {
  LOCKED;
  if (Capture *capture = capture_of(stream)) {
    capture->graph->kernels++;
    advance(capture, stream);
  }
  return cudaSuccess;
}

cudaError_t move(const CopyNode &copy) {
  if (!copy.nbytes) return cudaSuccess;
  bool to_device = holds(device_, copy.to, copy.nbytes), from_device = holds(device_, copy.from, copy.nbytes);
  if (!to_device && !from_device) return refuse(cudaErrorInvalidValue, "a copy with neither end on the device");
  std::memmove(copy.to, copy.from, copy.nbytes);
  return cudaSuccess;
}

cudaError_t copy(void *to, const void *from, size_t nbytes, cudaStream_t stream) {
  LOCKED;
  CopyNode node{to, from, nbytes};
  Capture *capture = capture_of(stream);
  if (!capture) return move(node);
  for (const void *end : {static_cast<const void *>(to), from})
    if (!holds(device_, end, nbytes) && !holds(pinned_, end, nbytes)) {
      capture->invalid = true;
      return refuse(cudaErrorStreamCaptureUnsupported, "a copy of memory that is not pinned, while capturing");
    }
  capture->graph->copies.push_back(node);
  advance(capture, stream);
  return cudaSuccess;
}

int take(void **address, size_t nbytes) {
  LOCKED;
  size_t taken = (nbytes + kPage - 1) / kPage * kPage;
  *address = nullptr;
  if (used_ + taken > kDeviceBytes) return cudaErrorMemoryAllocation;
  size_t mapped = taken + kPage;
  void *mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
  uintptr_t start = (reinterpret_cast<uintptr_t>(mapping) + kPage - 1) / kPage * kPage;
  device_[start] = Block{nbytes, mapping, mapped};
  used_ += taken;
  *address = reinterpret_cast<void *>(start);
  return cudaSuccess;
}

int give_back(uintptr_t address) {
  LOCKED;
  auto found = device_.find(address);
  if (found == device_.end()) return refuse(cudaErrorInvalidValue, "memory is freed that is not allocated");
  used_ -= (found->second.nbytes + kPage - 1) / kPage * kPage;
  munmap(found->second.mapping, found->second.mapped);
  device_.erase(found);
  return cudaSuccess;
}

int pin(void *start, size_t nbytes) {
  LOCKED;
  auto address = reinterpret_cast<uintptr_t>(start);
  auto next = pinned_.upper_bound(address + nbytes - 1);
  if (next != pinned_.begin() && std::prev(next)->first + std::prev(next)->second.nbytes > address)
    return refuse(cudaErrorHostMemoryAlreadyRegistered, "memory is pinned twice");
  pinned_[address] = Block{nbytes};
  return cudaSuccess;
}

int unpin(void *start) {
  LOCKED;
  if (!pinned_.erase(reinterpret_cast<uintptr_t>(start)))
    return refuse(cudaErrorHostMemoryNotRegistered, "memory is unpinned that is not pinned");
  return cudaSuccess;
}

EventRecord *record_of(cudaEvent_t event) { return reinterpret_cast<EventRecord *>(event); }

cudaStreamCaptureStatus status_of(Capture *capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace

extern "C" {

int cudaStubRefusals() { return refusals_; }

// The device: an H100 in what torch asks for

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return device ? refuse(cudaErrorInvalidDevice, "there is one device") : cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int) {
  std::snprintf(id, length, "0000:01:00.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *its, int) {
  std::memset(its, 0, sizeof *its);
  std::strcpy(its->name, "a stub of an H100");
  std::memcpy(its->uuid.bytes, "stub-of-a-device", 16);
  its->major = 9;
  its->multiProcessorCount = 132;
  its->totalGlobalMem = kDeviceBytes;
  its->warpSize = 32;
  its->maxThreadsPerBlock = 1024;
  its->maxThreadsPerMultiProcessor = 2048;
  its->maxBlocksPerMultiProcessor = 32;
  its->sharedMemPerBlock = 48 << 10;
  its->sharedMemPerBlockOptin = 227 << 10;
  its->sharedMemPerMultiprocessor = 228 << 10;
  its->regsPerBlock = its->regsPerMultiprocessor = 64 << 10;
  its->l2CacheSize = 50 << 20;
  its->maxGridSize[0] = 0x7fffffff, its->maxGridSize[1] = its->maxGridSize[2] = 0xffff;
  its->maxThreadsDim[0] = its->maxThreadsDim[1] = 1024, its->maxThreadsDim[2] = 64;
  its->concurrentKernels = its->unifiedAddressing = 1;
  its->asyncEngineCount = 3;
  its->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known{
      {cudaDevAttrComputeCapabilityMajor, 9},     {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMultiProcessorCount, 132},      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxGridDimX, 0x7fffffff},       {cudaDevAttrMaxGridDimY, 0xffff},
      {cudaDevAttrMaxGridDimZ, 0xffff},           {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 1 : found->second;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  cudaError_t last = error_;
  error_ = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return error_; }
const char *cudaGetErrorName(cudaError_t error) {
  static thread_local char name[32];
  std::snprintf(name, sizeof name, "stubError%d", static_cast<int>(error));
  return name;
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  *entry = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// Memory

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  LOCKED;
  *total = kDeviceBytes, *free_bytes = kDeviceBytes - used_;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **address, size_t nbytes) {
  NOT_WHILE_CAPTURING("cudaMalloc");
  return error_ = static_cast<cudaError_t>(take(address, nbytes));
}
cudaError_t cudaFree(void *address) {
  if (!address) return cudaSuccess;
  NOT_WHILE_CAPTURING("cudaFree");
  return static_cast<cudaError_t>(give_back(reinterpret_cast<uintptr_t>(address)));
}
cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned) {
  NOT_WHILE_CAPTURING("cudaHostAlloc");
  *address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  return static_cast<cudaError_t>(pin(*address, nbytes));
}
cudaError_t cudaFreeHost(void *address) {
  NOT_WHILE_CAPTURING("cudaFreeHost");
  auto status = static_cast<cudaError_t>(unpin(address));
  std::free(address);
  return status;
}
cudaError_t cudaHostRegister(void *start, size_t nbytes, unsigned) {
  NOT_WHILE_CAPTURING("cudaHostRegister");
  return static_cast<cudaError_t>(pin(start, nbytes));
}
cudaError_t cudaHostUnregister(void *start) {
  NOT_WHILE_CAPTURING("cudaHostUnregister");
  return static_cast<cudaError_t>(unpin(start));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *its, const void *address) {
  LOCKED;
  std::memset(its, 0, sizeof *its);
  bool on_device = holds(device_, address, 1), is_pinned = holds(pinned_, address, 1);
  its->type = on_device ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (on_device || is_pinned) its->devicePointer = const_cast<void *>(address);
  if (!on_device) its->hostPointer = const_cast<void *>(address);
  if (!on_device && !is_pinned) its->device = cudaInvalidDeviceId;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, cudaMemcpyKind) {
  NOT_WHILE_CAPTURING("cudaMemcpy");
  return copy(to, from, nbytes, nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t nbytes, cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}
cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemset(void *start, int value, size_t nbytes) {
  LOCKED;
  if (holds(device_, start, nbytes)) std::memset(start, value, nbytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t nbytes, cudaStream_t stream) {
  LOCKED;
  return capture_of(stream) ? kernel(stream) : cudaMemset(start, value, nbytes);
}
cudaError_t cudaGetSymbolAddress(void **address, const void *) {
  static char symbol[4096];
  return *address = symbol, cudaSuccess;
}

// Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(new char[16]);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  NOT_WHILE_CAPTURING("cudaStreamSynchronize");
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  NOT_WHILE_CAPTURING("cudaStreamQuery");
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  NOT_WHILE_CAPTURING("cudaDeviceSynchronize");
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void *data) { return call(data), cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new EventRecord{!(flags & cudaEventDisableTiming)});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  LOCKED;
  delete record_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  LOCKED;
  EventRecord *record = record_of(event);
  Capture *capture = capture_of(stream);
  record->seconds = now();
  record->capture = capture ? capture->id : 0;
  record->progress = capture ? capture->streams[stream] : Progress{};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  LOCKED;
  EventRecord *record = record_of(event);
  Capture *mine = capture_of(stream);
  if (!record->capture) {
    if (mine && record->seconds) {
      mine->invalid = true;
      return refuse(cudaErrorStreamCaptureIsolation, "a capture waits for an event outside of it");
    }
    return cudaSuccess;
  }
  auto found = captures_.find(record->capture);
  if (found == captures_.end()) return refuse(cudaErrorCapturedEvent, "a wait for an event of an ended capture");
  if (mine && mine != found->second) return refuse(cudaErrorStreamCaptureMerge, "a wait between two captures");
  Progress &known = found->second->streams[stream];
  for (auto &[other, count] : record->progress) known[other] = std::max(known[other], count);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  NOT_WHILE_CAPTURING("cudaEventQuery");
  return record_of(event)->capture ? refuse(cudaErrorCapturedEvent, "a query of a captured event") : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  NOT_WHILE_CAPTURING("cudaEventSynchronize");
  return record_of(event)->capture ? refuse(cudaErrorCapturedEvent, "a captured event has no end") : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  EventRecord *from = record_of(start), *to = record_of(end);
  if (!from->timed || !to->timed || !from->seconds || !to->seconds)
    return refuse(cudaErrorInvalidResourceHandle, "the time between events that have none");
  *ms = static_cast<float>((to->seconds - from->seconds) * 1e3);
  return cudaSuccess;
}

// Captures and graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  LOCKED;
  if (capture_of(stream)) return refuse(cudaErrorIllegalState, "a stream is captured twice");
  auto *capture = new Capture{++last_capture_, stream, std::this_thread::get_id(), mode == cudaStreamCaptureModeGlobal};
  capture->streams[stream];
  captures_[capture->id] = capture;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  LOCKED;
  *graph = nullptr;
  Capture *capture = capture_of(stream);
  if (!capture) return refuse(cudaErrorIllegalState, "no capture to end");
  captures_.erase(capture->id);
  if (capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, "a capture that was invalidated");
  Progress &known = capture->streams[capture->origin];
  for (auto &[other, progress] : capture->streams)
    if (known[other] < progress[other])
      return refuse(cudaErrorStreamCaptureUnjoined, "a stream does not lead back to the one that is captured");
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  LOCKED;
  *status = status_of(capture_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  LOCKED;
  Capture *capture = capture_of(stream);
  *status = status_of(capture);
  if (capture && id) *id = capture->id;
  if (capture && graph) *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, mode_);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
  auto *image = reinterpret_cast<GraphImage *>(graph);
  return *count = image->kernels + image->copies.size(), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new GraphImage(*reinterpret_cast<GraphImage *>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<GraphImage *>(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return delete reinterpret_cast<GraphImage *>(executable), cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *count) {
  return *count = 0, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  LOCKED;
  for (const CopyNode &node : reinterpret_cast<GraphImage *>(executable)->copies)
    if (cudaError_t status = move(node)) return status;
  return cudaSuccess;
}

// Kernels

cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) { return kernel(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *, void **) {
  return kernel(config->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) {
  return kernel(stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t stream) { return kernel(stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *its, const void *) {
  std::memset(its, 0, sizeof *its);
  its->maxThreadsPerBlock = 1024, its->numRegs = 32, its->ptxVersion = its->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
  return *blocks = 4, cudaSuccess;
}

// What nvcc's generated code calls: the shape of a launch waits here between its two halves.
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} launch_;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launch_ = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = launch_.grid, *block = launch_.block, *shared = launch_.shared;
  *static_cast<void **>(stream) = launch_.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *) {
  static void *handle[1];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **) { return 1; }
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

// The driver API, as far as `runtime.cuda.libcuda` and torch call it

int cuInit(unsigned) { return 0; }
int cuCtxGetCurrent(void **context) { return *context = &device_, 0; }
int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuMemAlloc_v2(unsigned long long *address, size_t nbytes) {
  NOT_WHILE_CAPTURING("cuMemAlloc");
  return take(reinterpret_cast<void **>(address), nbytes);
}
int cuMemFree_v2(unsigned long long address) {
  NOT_WHILE_CAPTURING("cuMemFree");
  return give_back(address);
}
int cuMemHostRegister_v2(void *start, size_t nbytes, unsigned) {
  NOT_WHILE_CAPTURING("cuMemHostRegister");
  return pin(start, nbytes);
}
int cuMemHostUnregister(void *start) {
  NOT_WHILE_CAPTURING("cuMemHostUnregister");
  return unpin(start);
}
int cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR_OF_THE_STUB", 0; }

// cuBLAS: handles know their stream, and every product is a kernel

struct Handle {
  cudaStream_t stream = nullptr;
};
int cublasCreate_v2(Handle **handle) { return *handle = new Handle, 0; }
int cublasDestroy_v2(Handle *handle) { return delete handle, 0; }
int cublasSetStream_v2(Handle *handle, cudaStream_t stream) { return handle->stream = stream, 0; }

#define DOES_NOTHING(name) \
  int name() { return 0; }
#define IS_A_KERNEL(name) \
  int name(Handle *handle) { return kernel(handle->stream); }
#define MAKES_A_DESCRIPTION(name) \
  int name(void **made) { return *made = std::calloc(1, 64), 0; }

DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasGetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)
DOES_NOTHING(cublasGetPointerMode_v2)
IS_A_KERNEL(cublasSgemm_v2)
IS_A_KERNEL(cublasSgemmEx)
IS_A_KERNEL(cublasGemmEx)
IS_A_KERNEL(cublasSgemmStridedBatched)
IS_A_KERNEL(cublasGemmStridedBatchedEx)
IS_A_KERNEL(cublasSgemv_v2)
IS_A_KERNEL(cublasSdot_v2)
IS_A_KERNEL(cublasDotEx)
DOES_NOTHING(cublasLtGetVersion)
MAKES_A_DESCRIPTION(cublasLtMatmulDescCreate)
MAKES_A_DESCRIPTION(cublasLtMatmulPreferenceCreate)
MAKES_A_DESCRIPTION(cublasLtMatrixLayoutCreate)
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *, int *found) {
  return *found = 1, 0;
}
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                   void *, void *, void *, const void *, void *, size_t, cudaStream_t stream) {
  return kernel(stream);
}

}  // extern "C"
