#pragma once

#include <cstddef>

#include "runtime/comm/nccl_types.h"

// The functions of NCCL and of the CUDA runtime that are used, as two tables: nothing is linked,
// the process's own copies are found at run time (nccl_library.h), and tests put a fake in their
// place. A member is called as the C function is, without its prefix.
namespace resilient {

#define RESILIENT_NCCL_FUNCTIONS(DO) \
  DO(GetVersion)                     \
  DO(GetErrorString)                 \
  DO(GetLastError)                   \
  DO(GetUniqueId)                    \
  DO(CommInitRankConfig)             \
  DO(CommGetAsyncError)              \
  DO(CommFinalize)                   \
  DO(CommDestroy)                    \
  DO(CommAbort)                      \
  DO(GroupStart)                     \
  DO(GroupEnd)                       \
  DO(AllReduce)                      \
  DO(Reduce)                         \
  DO(Broadcast)                      \
  DO(AllGather)                      \
  DO(ReduceScatter)                  \
  DO(Send)                           \
  DO(Recv)

// Null where the library does not have them.
#define RESILIENT_NCCL_OPTIONAL_FUNCTIONS(DO) \
  DO(MemAlloc)                                \
  DO(MemFree)                                 \
  DO(RedOpCreatePreMulSum)                    \
  DO(RedOpDestroy)

// NOLINTBEGIN(readability-identifier-naming): they are called as functions, by the names of C.

// Thread: value type. Of what it points to: one thread at a time for one communicator.
struct NcclApi {
  NcclResult (*GetVersion)(int* version) = nullptr;
  const char* (*GetErrorString)(NcclResult result) = nullptr;
  const char* (*GetLastError)(NcclCommHandle comm) = nullptr;
  NcclResult (*GetUniqueId)(NcclUniqueId* id) = nullptr;
  NcclResult (*CommInitRankConfig)(NcclCommHandle* comm, int ranks, NcclUniqueId id, int rank,
                                   NcclConfig* config) = nullptr;
  NcclResult (*CommGetAsyncError)(NcclCommHandle comm, NcclResult* error) = nullptr;
  NcclResult (*CommFinalize)(NcclCommHandle comm) = nullptr;
  NcclResult (*CommDestroy)(NcclCommHandle comm) = nullptr;
  NcclResult (*CommAbort)(NcclCommHandle comm) = nullptr;
  NcclResult (*GroupStart)() = nullptr;
  NcclResult (*GroupEnd)() = nullptr;
  NcclResult (*AllReduce)(const void* from, void* to, std::size_t count, NcclDataType type,
                          NcclReduceOp op, NcclCommHandle comm, CudaStreamHandle stream) = nullptr;
  NcclResult (*Reduce)(const void* from, void* to, std::size_t count, NcclDataType type,
                       NcclReduceOp op, int root, NcclCommHandle comm,
                       CudaStreamHandle stream) = nullptr;
  NcclResult (*Broadcast)(const void* from, void* to, std::size_t count, NcclDataType type,
                          int root, NcclCommHandle comm, CudaStreamHandle stream) = nullptr;
  NcclResult (*AllGather)(const void* from, void* to, std::size_t count_per_rank, NcclDataType type,
                          NcclCommHandle comm, CudaStreamHandle stream) = nullptr;
  NcclResult (*ReduceScatter)(const void* from, void* to, std::size_t count_per_rank,
                              NcclDataType type, NcclReduceOp op, NcclCommHandle comm,
                              CudaStreamHandle stream) = nullptr;
  NcclResult (*Send)(const void* from, std::size_t count, NcclDataType type, int peer,
                     NcclCommHandle comm, CudaStreamHandle stream) = nullptr;
  NcclResult (*Recv)(void* to, std::size_t count, NcclDataType type, int peer, NcclCommHandle comm,
                     CudaStreamHandle stream) = nullptr;
  NcclResult (*RedOpCreatePreMulSum)(NcclReduceOp* op, void* scalar, NcclDataType type,
                                     NcclScalarResidence residence, NcclCommHandle comm) = nullptr;
  NcclResult (*RedOpDestroy)(NcclReduceOp op, NcclCommHandle comm) = nullptr;
  // On the calling thread's device.
  NcclResult (*MemAlloc)(void** memory, std::size_t bytes) = nullptr;
  NcclResult (*MemFree)(void* memory) = nullptr;
};

#define RESILIENT_CUDA_FUNCTIONS(DO) \
  DO(GetErrorName)                   \
  DO(GetErrorString)                 \
  DO(GetDevice)                      \
  DO(SetDevice)                      \
  DO(DeviceGetAttribute)             \
  DO(Free)                           \
  DO(FreeHost)                       \
  DO(MemcpyAsync)                    \
  DO(StreamCreateWithFlags)          \
  DO(StreamDestroy)                  \
  DO(StreamWaitEvent)                \
  DO(EventCreateWithFlags)           \
  DO(EventRecord)                    \
  DO(EventQuery)                     \
  DO(EventSynchronize)               \
  DO(EventDestroy)

// Null where the library does not have them.
#define RESILIENT_CUDA_OPTIONAL_FUNCTIONS(DO) \
  DO(DeviceGetStreamPriorityRange)            \
  DO(StreamCreateWithPriority)                \
  DO(StreamIsCapturing)                       \
  DO(ThreadExchangeStreamCaptureMode)

// Of CudaGraphApi; null where the library does not have them.
#define RESILIENT_CUDA_GRAPH_FUNCTIONS(DO) \
  DO(EventElapsedTime)                     \
  DO(EventRecordWithFlags)                 \
  DO(GraphRetainUserObject)                \
  DO(UserObjectCreate)                     \
  DO(UserObjectRelease)

// What it takes to follow operations into graphs. Thread: as CudaApi.
struct CudaGraphApi {
  // As CUDA 13 has it, and CUDA 12 from 12.3 on under the name with _v3: it came with these
  // parameters under three names. The last three may be null. `id`: another one for each capture;
  // `graph`: what has been captured so far, the caller's as long as nothing is put into it.
  CudaResult (*StreamGetCaptureInfo)(CudaStreamHandle stream, int* capturing,
                                     unsigned long long* id, CudaGraphHandle* graph,
                                     const void** dependencies, const void** edges,
                                     std::size_t* dependency_count) = nullptr;
  CudaResult (*EventRecordWithFlags)(CudaEventHandle event, CudaStreamHandle stream,
                                     unsigned int flags) = nullptr;
  // kNotReady until both have happened.
  CudaResult (*EventElapsedTime)(float* ms, CudaEventHandle from, CudaEventHandle to) = nullptr;
  // `destroy` is called once, on any thread, and may not call CUDA.
  CudaResult (*UserObjectCreate)(CudaUserObjectHandle* object, void* pointer,
                                 void (*destroy)(void*), unsigned int references,
                                 unsigned int flags) = nullptr;
  CudaResult (*UserObjectRelease)(CudaUserObjectHandle object, unsigned int references) = nullptr;
  // It lives as long as the graph, and what is instantiated of it.
  CudaResult (*GraphRetainUserObject)(CudaGraphHandle graph, CudaUserObjectHandle object,
                                      unsigned int references, unsigned int flags) = nullptr;
};

// Overloaded in the headers for C++.
#define RESILIENT_CUDA_OVERLOADED_FUNCTIONS(DO) \
  DO(Malloc)                                    \
  DO(HostAlloc)

// Thread: value type. What it points to is thread-safe; the device is that of the calling thread.
struct CudaApi : CudaGraphApi {
  const char* (*GetErrorName)(CudaResult error) = nullptr;
  const char* (*GetErrorString)(CudaResult error) = nullptr;
  CudaResult (*GetDevice)(int* device) = nullptr;
  CudaResult (*SetDevice)(int device) = nullptr;
  CudaResult (*DeviceGetAttribute)(int* value, CudaDeviceAttribute attribute, int device) = nullptr;
  CudaResult (*Malloc)(void** memory, std::size_t bytes) = nullptr;
  CudaResult (*Free)(void* memory) = nullptr;
  CudaResult (*HostAlloc)(void** memory, std::size_t bytes, unsigned int flags) = nullptr;
  CudaResult (*FreeHost)(void* memory) = nullptr;
  // Of memory of the host that HostAlloc has given: it does not wait for the copy.
  CudaResult (*MemcpyAsync)(void* to, const void* from, std::size_t bytes, CudaCopy direction,
                            CudaStreamHandle stream) = nullptr;
  CudaResult (*StreamCreateWithFlags)(CudaStreamHandle* stream, unsigned int flags) = nullptr;
  // The lower the number the higher the priority.
  CudaResult (*StreamCreateWithPriority)(CudaStreamHandle* stream, unsigned int flags,
                                         int priority) = nullptr;
  CudaResult (*DeviceGetStreamPriorityRange)(int* least, int* greatest) = nullptr;
  CudaResult (*StreamDestroy)(CudaStreamHandle stream) = nullptr;
  // `mode` is that of the calling thread, and becomes what was before.
  CudaResult (*ThreadExchangeStreamCaptureMode)(int* mode) = nullptr;
  // `capturing`: not 0 while it is being captured.
  CudaResult (*StreamIsCapturing)(CudaStreamHandle stream, int* capturing) = nullptr;
  CudaResult (*StreamWaitEvent)(CudaStreamHandle stream, CudaEventHandle event,
                                unsigned int flags) = nullptr;
  CudaResult (*EventCreateWithFlags)(CudaEventHandle* event, unsigned int flags) = nullptr;
  CudaResult (*EventRecord)(CudaEventHandle event, CudaStreamHandle stream) = nullptr;
  CudaResult (*EventQuery)(CudaEventHandle event) = nullptr;
  CudaResult (*EventSynchronize)(CudaEventHandle event) = nullptr;
  CudaResult (*EventDestroy)(CudaEventHandle event) = nullptr;
};

// NOLINTEND(readability-identifier-naming)

}  // namespace resilient
