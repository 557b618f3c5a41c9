#include <cstddef>
#include <cstring>

#include "tests/support/fake_library_state.h"
#include "tests/support/fake_nccl.h"

// What libresilient_fake_nccl.so exports under the names of NCCL and of the CUDA runtime, with
// their C signatures (nccl_types.h): one process loads it in the place of both.
namespace resilient::testing {
namespace {

const NcclApi& Nccl() {
  FakeOfLibrary();
  static const NcclApi kApi = FakeNccl::nccl();
  return kApi;
}

const CudaApi& Cuda() {
  FakeOfLibrary();
  static const CudaApi kApi = FakeNccl::cuda();
  return kApi;
}

// As many as a machine has; none of them has memory of its own.
constexpr int kDevices = 8;

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): the names of C.
extern "C" {

const char* ncclGetErrorString(NcclResult result) { return Nccl().GetErrorString(result); }
const char* ncclGetLastError(NcclCommHandle comm) { return Nccl().GetLastError(comm); }
NcclResult ncclGetVersion(int* version) { return Nccl().GetVersion(version); }
NcclResult ncclGetUniqueId(NcclUniqueId* id) { return Nccl().GetUniqueId(id); }
NcclResult ncclCommInitRankConfig(NcclCommHandle* comm, int ranks, NcclUniqueId id, int rank,
                                  NcclConfig* config) {
  return Nccl().CommInitRankConfig(comm, ranks, id, rank, config);
}
NcclResult ncclCommGetAsyncError(NcclCommHandle comm, NcclResult* error) {
  return Nccl().CommGetAsyncError(comm, error);
}
NcclResult ncclCommFinalize(NcclCommHandle comm) { return Nccl().CommFinalize(comm); }
NcclResult ncclCommDestroy(NcclCommHandle comm) { return Nccl().CommDestroy(comm); }
NcclResult ncclCommAbort(NcclCommHandle comm) { return Nccl().CommAbort(comm); }
NcclResult ncclGroupStart() { return Nccl().GroupStart(); }
NcclResult ncclGroupEnd() { return Nccl().GroupEnd(); }
NcclResult ncclAllReduce(const void* from, void* to, std::size_t count, NcclDataType type,
                         NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().AllReduce(from, to, count, type, op, comm, stream);
}
NcclResult ncclReduce(const void* from, void* to, std::size_t count, NcclDataType type,
                      NcclReduceOp op, int root, NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().Reduce(from, to, count, type, op, root, comm, stream);
}
NcclResult ncclBroadcast(const void* from, void* to, std::size_t count, NcclDataType type, int root,
                         NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().Broadcast(from, to, count, type, root, comm, stream);
}
NcclResult ncclAllGather(const void* from, void* to, std::size_t count, NcclDataType type,
                         NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().AllGather(from, to, count, type, comm, stream);
}
NcclResult ncclReduceScatter(const void* from, void* to, std::size_t count, NcclDataType type,
                             NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().ReduceScatter(from, to, count, type, op, comm, stream);
}
NcclResult ncclSend(const void* from, std::size_t count, NcclDataType type, int peer,
                    NcclCommHandle comm, CudaStreamHandle stream) {
  return Nccl().Send(from, count, type, peer, comm, stream);
}
NcclResult ncclRecv(void* to, std::size_t count, NcclDataType type, int peer, NcclCommHandle comm,
                    CudaStreamHandle stream) {
  return Nccl().Recv(to, count, type, peer, comm, stream);
}
NcclResult ncclRedOpCreatePreMulSum(NcclReduceOp* op, void* scalar, NcclDataType type,
                                    NcclScalarResidence residence, NcclCommHandle comm) {
  return Nccl().RedOpCreatePreMulSum(op, scalar, type, residence, comm);
}
NcclResult ncclRedOpDestroy(NcclReduceOp op, NcclCommHandle comm) {
  return Nccl().RedOpDestroy(op, comm);
}
NcclResult ncclMemAlloc(void** memory, std::size_t bytes) { return Nccl().MemAlloc(memory, bytes); }
NcclResult ncclMemFree(void* memory) { return Nccl().MemFree(memory); }

const char* cudaGetErrorName(CudaResult error) { return Cuda().GetErrorName(error); }
const char* cudaGetErrorString(CudaResult error) { return Cuda().GetErrorString(error); }
CudaResult cudaGetDevice(int* device) { return Cuda().GetDevice(device); }
CudaResult cudaSetDevice(int device) { return Cuda().SetDevice(device); }
CudaResult cudaDeviceGetAttribute(int* value, CudaDeviceAttribute attribute, int device) {
  return Cuda().DeviceGetAttribute(value, attribute, device);
}
CudaResult cudaMalloc(void** memory, std::size_t bytes) { return Cuda().Malloc(memory, bytes); }
CudaResult cudaFree(void* memory) { return Cuda().Free(memory); }
CudaResult cudaHostAlloc(void** memory, std::size_t bytes, unsigned int flags) {
  return Cuda().HostAlloc(memory, bytes, flags);
}
CudaResult cudaFreeHost(void* memory) { return Cuda().FreeHost(memory); }
CudaResult cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, CudaCopy direction,
                           CudaStreamHandle stream) {
  return Cuda().MemcpyAsync(to, from, bytes, direction, stream);
}
CudaResult cudaStreamCreateWithFlags(CudaStreamHandle* stream, unsigned int flags) {
  return Cuda().StreamCreateWithFlags(stream, flags);
}
CudaResult cudaStreamCreateWithPriority(CudaStreamHandle* stream, unsigned int flags,
                                        int priority) {
  return Cuda().StreamCreateWithPriority(stream, flags, priority);
}
CudaResult cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return Cuda().DeviceGetStreamPriorityRange(least, greatest);
}
CudaResult cudaStreamDestroy(CudaStreamHandle stream) { return Cuda().StreamDestroy(stream); }
CudaResult cudaStreamWaitEvent(CudaStreamHandle stream, CudaEventHandle event, unsigned int flags) {
  return Cuda().StreamWaitEvent(stream, event, flags);
}
CudaResult cudaEventCreateWithFlags(CudaEventHandle* event, unsigned int flags) {
  return Cuda().EventCreateWithFlags(event, flags);
}
CudaResult cudaEventRecord(CudaEventHandle event, CudaStreamHandle stream) {
  return Cuda().EventRecord(event, stream);
}
CudaResult cudaEventQuery(CudaEventHandle event) { return Cuda().EventQuery(event); }
CudaResult cudaEventSynchronize(CudaEventHandle event) { return Cuda().EventSynchronize(event); }
CudaResult cudaEventDestroy(CudaEventHandle event) { return Cuda().EventDestroy(event); }
CudaResult cudaEventRecordWithFlags(CudaEventHandle event, CudaStreamHandle stream,
                                    unsigned int flags) {
  return Cuda().EventRecordWithFlags(event, stream, flags);
}
CudaResult cudaEventElapsedTime(float* ms, CudaEventHandle from, CudaEventHandle to) {
  return Cuda().EventElapsedTime(ms, from, to);
}
CudaResult cudaStreamIsCapturing(CudaStreamHandle stream, int* capturing) {
  return Cuda().StreamIsCapturing(stream, capturing);
}
CudaResult cudaThreadExchangeStreamCaptureMode(int* mode) {
  return Cuda().ThreadExchangeStreamCaptureMode(mode);
}
CudaResult cudaStreamGetCaptureInfo(CudaStreamHandle stream, int* capturing, unsigned long long* id,
                                    CudaGraphHandle* graph, const void** dependencies,
                                    const void** edges, std::size_t* dependency_count) {
  return Cuda().StreamGetCaptureInfo(stream, capturing, id, graph, dependencies, edges,
                                     dependency_count);
}
CudaResult cudaUserObjectCreate(CudaUserObjectHandle* object, void* pointer, void (*destroy)(void*),
                                unsigned int references, unsigned int flags) {
  return Cuda().UserObjectCreate(object, pointer, destroy, references, flags);
}
CudaResult cudaUserObjectRelease(CudaUserObjectHandle object, unsigned int references) {
  return Cuda().UserObjectRelease(object, references);
}
CudaResult cudaGraphRetainUserObject(CudaGraphHandle graph, CudaUserObjectHandle object,
                                     unsigned int references, unsigned int flags) {
  return Cuda().GraphRetainUserObject(graph, object, references, flags);
}

// What the tables have not: for who makes a device of torch's of it.
CudaResult cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return CudaResult::kSuccess;
}
CudaResult cudaMemcpy(void* to, const void* from, std::size_t bytes, int /*kind*/) {
  std::memcpy(to, from, bytes);
  return CudaResult::kSuccess;
}
CudaResult cudaLaunchHostFunc(CudaStreamHandle stream, void (*function)(void*), void* data) {
  return FakeOfLibrary().LaunchHostFunction(stream, [function, data] { function(data); });
}
CudaResult cudaStreamQuery(CudaStreamHandle stream) { return FakeOfLibrary().QueryStream(stream); }
CudaResult cudaStreamSynchronize(CudaStreamHandle stream) {
  return FakeOfLibrary().SynchronizeStream(stream);
}
CudaResult cudaDeviceSynchronize() { return FakeOfLibrary().SynchronizeDevice(); }
CudaResult cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return CudaResult::kSuccess;
}
CudaResult cudaStreamBeginCapture(CudaStreamHandle stream, int mode) {
  return FakeOfLibrary().BeginCapture(stream, mode);
}
CudaResult cudaStreamEndCapture(CudaStreamHandle stream, CudaGraphHandle* graph) {
  return FakeOfLibrary().EndCapture(stream, graph);
}
CudaResult cudaGraphLaunch(CudaGraphHandle graph, CudaStreamHandle stream) {
  return FakeOfLibrary().LaunchGraph(graph, stream);
}
CudaResult cudaGraphDestroy(CudaGraphHandle graph) { return FakeOfLibrary().DestroyGraph(graph); }

}  // extern "C"
// NOLINTEND(readability-identifier-naming)

}  // namespace resilient::testing
