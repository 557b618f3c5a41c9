// Goal: what nccl_types.h and nccl_api.h declare is what NCCL and CUDA declare.
// Method: where their headers are installed, every value, layout and signature is compared.

#include <gtest/gtest.h>

#include "runtime/comm/nccl_api.h"
#include "runtime/comm/nccl_options.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

namespace resilient {
namespace {

// Two types of the same kind and size are passed alike. Enumerations are integers.
template <typename Ours, typename Theirs>
constexpr bool kAlike =
    sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
    std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>&& std::is_class_v<Ours> ==
        std::is_class_v<Theirs>;

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
requires(sizeof...(Ours) ==
         sizeof...(Theirs)) struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<kAlike<OurResult, TheirResult> && (kAlike<Ours, Theirs> && ...)> {
};

#define RESILIENT_COMPARE(name) \
  static_assert(SameCall<decltype(NcclApi::name), decltype(&::nccl##name)>::value, #name);
RESILIENT_NCCL_FUNCTIONS(RESILIENT_COMPARE)
RESILIENT_NCCL_OPTIONAL_FUNCTIONS(RESILIENT_COMPARE)
#undef RESILIENT_COMPARE

#define RESILIENT_COMPARE(name)                                                             \
  static_assert(                                                                            \
      SameCall<decltype(CudaApi::name), std::add_pointer_t<decltype(::cuda##name)>>::value, \
      #name);
RESILIENT_CUDA_FUNCTIONS(RESILIENT_COMPARE)
RESILIENT_CUDA_OPTIONAL_FUNCTIONS(RESILIENT_COMPARE)
#undef RESILIENT_COMPARE
// These have overloads: the cast finds the one that is meant, and is not evaluated.
using MallocCall = decltype(static_cast<cudaError_t (*)(void**, std::size_t)>(&::cudaMalloc));
static_assert(SameCall<decltype(CudaApi::Malloc), MallocCall>::value);
using HostAllocCall =
    decltype(static_cast<cudaError_t (*)(void**, std::size_t, unsigned int)>(&::cudaHostAlloc));
static_assert(SameCall<decltype(CudaApi::HostAlloc), HostAllocCall>::value);

template <typename Ours, typename Theirs>
void ExpectSame(Ours ours, Theirs theirs) {
  EXPECT_EQ(static_cast<long>(ours), static_cast<long>(theirs));
}

TEST(NcclHeaders, Results_AreTheSame) {
  ExpectSame(NcclResult::kSuccess, ncclSuccess);
  ExpectSame(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError);
  ExpectSame(NcclResult::kSystemError, ncclSystemError);
  ExpectSame(NcclResult::kInternalError, ncclInternalError);
  ExpectSame(NcclResult::kInvalidArgument, ncclInvalidArgument);
  ExpectSame(NcclResult::kInvalidUsage, ncclInvalidUsage);
  ExpectSame(NcclResult::kRemoteError, ncclRemoteError);
  ExpectSame(NcclResult::kInProgress, ncclInProgress);
}

TEST(NcclHeaders, TypesAndReductions_AreTheSame) {
  ExpectSame(NcclReduceOp::kSum, ncclSum);
  ExpectSame(NcclReduceOp::kProduct, ncclProd);
  ExpectSame(NcclReduceOp::kMax, ncclMax);
  ExpectSame(NcclReduceOp::kMin, ncclMin);
  ExpectSame(NcclReduceOp::kAvg, ncclAvg);
  ExpectSame(NcclDataType::kInt8, ncclInt8);
  ExpectSame(NcclDataType::kUInt8, ncclUint8);
  ExpectSame(NcclDataType::kInt32, ncclInt32);
  ExpectSame(NcclDataType::kUInt32, ncclUint32);
  ExpectSame(NcclDataType::kInt64, ncclInt64);
  ExpectSame(NcclDataType::kUInt64, ncclUint64);
  ExpectSame(NcclDataType::kFloat16, ncclFloat16);
  ExpectSame(NcclDataType::kFloat32, ncclFloat32);
  ExpectSame(NcclDataType::kFloat64, ncclFloat64);
  ExpectSame(NcclDataType::kBFloat16, ncclBfloat16);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
  ExpectSame(NcclDataType::kFloat8E4M3, ncclFloat8e4m3);
  ExpectSame(NcclDataType::kFloat8E5M2, ncclFloat8e5m2);
#endif
  // A made operator is none of ours.
  EXPECT_GT(static_cast<int>(ncclNumOps), static_cast<int>(NcclReduceOp::kAvg));
  ExpectSame(NcclScalarResidence::kHostImmediate, ncclScalarHostImmediate);
}

TEST(NcclHeaders, Config_IsTheBeginningOfTheirs) {
  EXPECT_EQ(sizeof(NcclUniqueId), sizeof(ncclUniqueId));
  EXPECT_EQ(offsetof(NcclConfig, magic), offsetof(ncclConfig_t, magic));
  EXPECT_EQ(offsetof(NcclConfig, version), offsetof(ncclConfig_t, version));
  EXPECT_EQ(offsetof(NcclConfig, blocking), offsetof(ncclConfig_t, blocking));
  EXPECT_EQ(offsetof(NcclConfig, max_ctas), offsetof(ncclConfig_t, maxCTAs));
  EXPECT_EQ(offsetof(NcclConfig, net_name), offsetof(ncclConfig_t, netName));
  EXPECT_EQ(offsetof(NcclConfig, split_share), offsetof(ncclConfig_t, splitShare));
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_LE(ours.size, sizeof(ncclConfig_t));
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_LE(ours.version, theirs.version);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 26, 0)
  EXPECT_EQ(offsetof(NcclConfig, traffic_class), offsetof(ncclConfig_t, trafficClass));
  EXPECT_EQ(offsetof(NcclConfig, comm_name), offsetof(ncclConfig_t, commName));
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  EXPECT_EQ(offsetof(NcclConfig, collnet_enable), offsetof(ncclConfig_t, collnetEnable));
  EXPECT_EQ(offsetof(NcclConfig, cta_policy), offsetof(ncclConfig_t, CTAPolicy));
  EXPECT_EQ(offsetof(NcclConfig, shrink_share), offsetof(ncclConfig_t, shrinkShare));
  EXPECT_EQ(offsetof(NcclConfig, nvls_ctas), offsetof(ncclConfig_t, nvlsCTAs));
  EXPECT_LE(ConfigOf({.nvls_ctas = 1}).size, sizeof(ncclConfig_t));
  EXPECT_EQ(NCCL_CTA_POLICY_EFFICIENCY, 1);
  EXPECT_EQ(NCCL_CTA_POLICY_ZERO, 2);
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
  EXPECT_EQ(offsetof(NcclConfig, nchannels_per_net_peer),
            offsetof(ncclConfig_t, nChannelsPerNetPeer));
  EXPECT_EQ(offsetof(NcclConfig, nvlink_centric_sched), offsetof(ncclConfig_t, nvlinkCentricSched));
  EXPECT_LE(ConfigOf({.nvlink_centric_sched = 1}).size, sizeof(ncclConfig_t));
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 0)
  EXPECT_EQ(offsetof(NcclConfig, graph_usage_mode), offsetof(ncclConfig_t, graphUsageMode));
  EXPECT_EQ(offsetof(NcclConfig, rma_contexts), offsetof(ncclConfig_t, numRmaCtx));
  EXPECT_EQ(offsetof(NcclConfig, max_p2p_peers), offsetof(ncclConfig_t, maxP2pPeers));
  EXPECT_LE(ConfigOf({.max_p2p_peers = 1}).size, sizeof(ncclConfig_t));
#endif
}

TEST(NcclHeaders, CudaResults_AreTheSame) {
  ExpectSame(CudaResult::kSuccess, cudaSuccess);
  ExpectSame(CudaResult::kInvalidValue, cudaErrorInvalidValue);
  ExpectSame(CudaResult::kEccUncorrectable, cudaErrorECCUncorrectable);
  ExpectSame(CudaResult::kNotReady, cudaErrorNotReady);
  ExpectSame(CudaResult::kIllegalAddress, cudaErrorIllegalAddress);
  ExpectSame(CudaResult::kLaunchTimeout, cudaErrorLaunchTimeout);
  ExpectSame(CudaResult::kContextIsDestroyed, cudaErrorContextIsDestroyed);
  ExpectSame(CudaResult::kAssert, cudaErrorAssert);
  ExpectSame(CudaResult::kHardwareStackError, cudaErrorHardwareStackError);
  ExpectSame(CudaResult::kIllegalInstruction, cudaErrorIllegalInstruction);
  ExpectSame(CudaResult::kMisalignedAddress, cudaErrorMisalignedAddress);
  ExpectSame(CudaResult::kInvalidAddressSpace, cudaErrorInvalidAddressSpace);
  ExpectSame(CudaResult::kInvalidPc, cudaErrorInvalidPc);
  ExpectSame(CudaResult::kLaunchFailure, cudaErrorLaunchFailure);
  ExpectSame(CudaResult::kStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported);
  ExpectSame(CudaResult::kStreamCaptureInvalidated, cudaErrorStreamCaptureInvalidated);
  ExpectSame(CudaResult::kCapturedEvent, cudaErrorCapturedEvent);
  ExpectSame(CudaResult::kStreamCaptureWrongThread, cudaErrorStreamCaptureWrongThread);
  ExpectSame(CudaDeviceAttribute::kComputeCapabilityMajor, cudaDevAttrComputeCapabilityMajor);
  ExpectSame(CudaCopy::kHostToDevice, cudaMemcpyHostToDevice);
  ExpectSame(CudaCopy::kDeviceToHost, cudaMemcpyDeviceToHost);
  ExpectSame(kCudaStreamNonBlocking, cudaStreamNonBlocking);
  ExpectSame(kCudaEventDisableTiming, cudaEventDisableTiming);
  ExpectSame(kCudaEventDefault, cudaEventDefault);
  ExpectSame(kCudaEventRecordDefault, cudaEventRecordDefault);
  ExpectSame(kCudaEventRecordExternal, cudaEventRecordExternal);
  ExpectSame(kCudaUserObjectNoDestructorSync, cudaUserObjectNoDestructorSync);
  ExpectSame(kCudaGraphUserObjectMove, cudaGraphUserObjectMove);
  ExpectSame(kCudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeThreadLocal);
}

}  // namespace
}  // namespace resilient

#else

TEST(NcclHeaders, AreNotHere) { GTEST_SKIP() << "no <nccl.h> and <cuda_runtime_api.h> here"; }

#endif
