#include "runtime/comm/nccl_events.h"

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

// After these no call on the device succeeds until the process ends.
constexpr std::array kDeviceLost = {
    CudaResult::kEccUncorrectable,
    CudaResult::kIllegalAddress,
    CudaResult::kLaunchTimeout,
    CudaResult::kContextIsDestroyed,
    CudaResult::kAssert,
    CudaResult::kHardwareStackError,
    CudaResult::kIllegalInstruction,
    CudaResult::kMisalignedAddress,
    CudaResult::kInvalidAddressSpace,
    CudaResult::kInvalidPc,
    CudaResult::kLaunchFailure,
};

bool IsDeviceLost(CudaResult result) {
  return std::find(kDeviceLost.begin(), kDeviceLost.end(), result) != kDeviceLost.end();
}

}  // namespace

bool IsOfCapture(CudaResult result) {
  return result >= CudaResult::kStreamCaptureUnsupported &&
         result <= CudaResult::kStreamCaptureWrongThread;
}

Status CudaStatus(const CudaApi& cuda, CudaResult result, std::string_view what,
                  std::string_view where, FailureDetail detail) {
  if (result == CudaResult::kSuccess) return Status::Ok();
  const bool lost = IsDeviceLost(result);
  return Status(
      lost ? StatusCode::kDeviceLost : StatusCode::kCommFailed,
      StrCat(what, " failed on ", where, ": ", cuda.GetErrorName(result), ", ",
             cuda.GetErrorString(result),
             lost ? "; the device is lost to this process: it must be started again" : ""),
      std::move(detail));
}

Status CaptureStatus(const CudaApi& cuda, CudaResult result, std::string_view what,
                     std::string_view where, FailureDetail detail) {
  Status status = CudaStatus(cuda, result, what, where, std::move(detail));
  if (status.code() != StatusCode::kCommFailed) return status;
  return Status(StatusCode::kFailedPrecondition,
                StrCat(status.message(), "; this capture has lost it: end it, and capture again"),
                status.detail());
}

CudaResult MakeStream(const CudaApi& cuda, bool is_high_priority, CudaStreamHandle* stream) {
  if (!is_high_priority) return cuda.StreamCreateWithFlags(stream, kCudaStreamNonBlocking);
  int least = 0;
  int greatest = 0;
  const CudaResult asked = cuda.DeviceGetStreamPriorityRange(&least, &greatest);
  if (asked != CudaResult::kSuccess) return asked;
  return cuda.StreamCreateWithPriority(stream, kCudaStreamNonBlocking, greatest);
}

void LeaveCapturesAlone(const CudaApi& cuda) {
  int mode = kCudaStreamCaptureModeThreadLocal;
  if (cuda.ThreadExchangeStreamCaptureMode != nullptr)
    (void)cuda.ThreadExchangeStreamCaptureMode(&mode);
}

CudaDeviceScope::CudaDeviceScope(const CudaApi& cuda, int device) : cuda_(cuda) {
  int before = -1;
  result_ = cuda_.GetDevice(&before);
  if (result_ != CudaResult::kSuccess || before == device) return;
  result_ = cuda_.SetDevice(device);
  before_ = before;
}

CudaDeviceScope::~CudaDeviceScope() {
  if (before_ >= 0) (void)cuda_.SetDevice(before_);
}

CudaResult NcclEvents::Take(PooledEvent* event) {
  CudaEventHandle handle = nullptr;
  const CudaResult taken = TakeHandle(&handle);
  if (taken == CudaResult::kSuccess) *event = PooledEvent(handle, ReturnEvent{shared_from_this()});
  return taken;
}

CudaResult NcclEvents::TakeHandle(CudaEventHandle* event) {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      *event = free_.back();
      free_.pop_back();
      return CudaResult::kSuccess;
    }
  }
  const CudaDeviceScope scope(cuda_, device_);
  if (scope.result() != CudaResult::kSuccess) return scope.result();
  return cuda_.EventCreateWithFlags(event, flags_);
}

void NcclEvents::Give(void* event) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) return free_.push_back(static_cast<CudaEventHandle>(event));
  }
  (void)cuda_.EventDestroy(static_cast<CudaEventHandle>(event));
}

CudaResult NcclEvents::Record(const PooledEvent& event, CudaStreamHandle stream) {
  const CudaDeviceScope scope(cuda_, device_);  // The default stream is that of a device.
  if (scope.result() != CudaResult::kSuccess) return scope.result();
  return cuda_.EventRecord(HandleOf(event), stream);
}

CudaResult NcclEvents::Mark(CudaStreamHandle stream, PooledEvent* mark) {
  const CudaResult taken = Take(mark);
  return taken == CudaResult::kSuccess ? Record(*mark, stream) : taken;
}

void NcclEvents::Close() {
  std::vector<CudaEventHandle> free;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    free = std::exchange(free_, {});
  }
  for (const CudaEventHandle event : free) (void)cuda_.EventDestroy(event);
}

}  // namespace resilient
