#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <resilient/status.h>

#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_api.h"

namespace resilient {

// OK for kSuccess. kDeviceLost for an error after which no call on the device succeeds until the
// process ends, else kCommFailed: `what` failed on `where`.
Status CudaStatus(const CudaApi& cuda, CudaResult result, std::string_view what,
                  std::string_view where, FailureDetail detail);

// A stream beside the others, of the greatest priority of the device or of the default one.
CudaResult MakeStream(const CudaApi& cuda, bool is_high_priority, CudaStreamHandle* stream);

// Whether it says something of a capture alone: of one that the program, or another of its threads,
// has spoilt, say.
bool IsOfCapture(CudaResult result);

// The same of a call for an operation of a capture, which was not made part of it: kDeviceLost or
// kFailedPrecondition, for nobody waits for an operation of a graph that is not run.
Status CaptureStatus(const CudaApi& cuda, CudaResult result, std::string_view what,
                     std::string_view where, FailureDetail detail);

// What this thread calls from now on does not disturb a graph that another thread captures.
void LeaveCapturesAlone(const CudaApi& cuda);

inline CudaEventHandle HandleOf(const PooledEvent& event) {
  return static_cast<CudaEventHandle>(event.get());
}

// Makes a device that of the calling thread, for its life: what takes the default stream, and what
// is made, is that device's. Owner: the stack. Thread: confined.
class CudaDeviceScope {
 public:
  CudaDeviceScope(const CudaApi& cuda, int device);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  CudaResult result() const { return result_; }

 private:
  const CudaApi& cuda_;
  int before_ = -1;  // -1: nothing is to be restored.
  CudaResult result_;
};

// The events of one device, which are used again: to make or destroy one may wait for the device.
// Owner: shared by the fabric and the operations that have some. Thread: thread-safe.
class NcclEvents final : public EventPool, public std::enable_shared_from_this<NcclEvents> {
 public:
  // `flags`: of cudaEventCreateWithFlags.
  NcclEvents(const CudaApi& cuda, int device, unsigned int flags = kCudaEventDisableTiming)
      : cuda_(cuda), device_(device), flags_(flags) {}
  ~NcclEvents() override { Close(); }
  NcclEvents(const NcclEvents&) = delete;
  NcclEvents& operator=(const NcclEvents&) = delete;

  // One that comes back to here; makes one where none is left.
  CudaResult Take(PooledEvent* event);
  void Give(void* event) override;

  // It stands for what `stream` has by now.
  CudaResult Record(const PooledEvent& event, CudaStreamHandle stream);
  // Take, and Record.
  CudaResult Mark(CudaStreamHandle stream, PooledEvent* mark);

  // Destroys those that are here and whatever comes back later. On a thread that may wait for the
  // device.
  void Close();

 private:
  CudaResult TakeHandle(CudaEventHandle* event);

  const CudaApi cuda_;
  const int device_;
  const unsigned int flags_;
  std::mutex mutex_;
  bool closed_ = false;                // Guarded by mutex_.
  std::vector<CudaEventHandle> free_;  // Guarded by mutex_.
};

}  // namespace resilient
