#pragma once

#include <array>
#include <climits>
#include <cstddef>

// What crosses the border to NCCL and to the CUDA runtime, declared by ourselves, so that the
// library is built where neither is installed. The C ABI of x86-64 and AArch64 Linux; the values
// hold for NCCL 2.22 ... 2.30 and CUDA 11 ... 13 (both only ever add). nccl_headers_test.cc holds
// them against the real headers where there are any.
namespace resilient {

struct NcclComm;  // Opaque: ncclComm_t is a pointer to it.
using NcclCommHandle = NcclComm*;

struct NcclUniqueId {
  std::array<char, 128> bytes{};
};

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

// The numbers behind these are operators that a communicator has made (ncclRedOpCreatePreMulSum).
enum class NcclReduceOp : int { kSum = 0, kProduct = 1, kMax = 2, kMin = 3, kAvg = 4 };

enum class NcclDataType : int {
  kInt8 = 0,
  kUInt8 = 1,
  kInt32 = 2,
  kUInt32 = 3,
  kInt64 = 4,
  kUInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,  // From NCCL 2.24 on, as the next.
  kFloat8E5M2 = 11
};

// Where the factor of ncclRedOpCreatePreMulSum is, and when it is read: within the call.
enum class NcclScalarResidence : int { kHostImmediate = 1 };

// The layout of NCCL 2.30. The library reads as many bytes as `size` says and takes its own
// defaults for every field that came after `version`: those of NCCL 2.18, where nothing else is set
// (nccl_options.h).
struct NcclConfig {
  static constexpr int kUndefined = INT_MIN;

  std::size_t size = 48;
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21801;
  int blocking = 0;  // The calls return kInProgress instead of waiting for the peers.
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;   // From NCCL 2.26 on.
  const char* comm_name = nullptr;  // 2.27, as the next four.
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int nchannels_per_net_peer = kUndefined;  // 2.28, as the next.
  int nvlink_centric_sched = kUndefined;
  int graph_usage_mode = kUndefined;  // 2.29, as the next.
  int rma_contexts = kUndefined;
  int max_p2p_peers = kUndefined;  // 2.30.
};

struct CudaStream;  // Opaque: cudaStream_t is a pointer to it; null is the device's default stream.
using CudaStreamHandle = CudaStream*;
struct CudaEvent;
using CudaEventHandle = CudaEvent*;
struct CudaGraph;
using CudaGraphHandle = CudaGraph*;
struct CudaUserObject;
using CudaUserObjectHandle = CudaUserObject*;

// Those that are told apart here; a result may be any other number.
enum class CudaResult : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kEccUncorrectable = 214,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailure = 719,
  kStreamCaptureUnsupported = 900,  // The first of those of captures,
  kStreamCaptureInvalidated = 901,
  kCapturedEvent = 907,
  kStreamCaptureWrongThread = 908  // and the last.
};

enum class CudaCopy : int { kHostToDevice = 1, kDeviceToHost = 2 };  // cudaMemcpyKind

enum class CudaDeviceAttribute : int { kComputeCapabilityMajor = 75 };

constexpr unsigned int kCudaStreamNonBlocking = 1;
constexpr unsigned int kCudaEventDefault = 0;
constexpr unsigned int kCudaEventDisableTiming = 2;
constexpr unsigned int kCudaEventRecordDefault = 0;
constexpr unsigned int kCudaEventRecordExternal = 1;
constexpr unsigned int kCudaUserObjectNoDestructorSync = 1;
constexpr unsigned int kCudaGraphUserObjectMove = 1;
constexpr int kCudaStreamCaptureModeThreadLocal = 1;

}  // namespace resilient
