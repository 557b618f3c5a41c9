#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime/base/thread.h"
#include "runtime/comm/nccl_api.h"
#include "tests/support/fake_nccl_meeting.h"

// What the handles of the fake (fake_nccl.h) point to. Thread: all under its lock.
namespace resilient {

struct NcclComm {
  struct Operator {
    NcclDataType type;
    double factor;
  };

  int rank = 0;
  int device = 0;
  std::unique_ptr<testing::NcclMeeting> meeting;
  std::thread::id thread;
  bool aborted = false;
  bool finalizing = false;
  int polls_left = 0;  // Of the launch in progress.
  std::function<void()> being_launched;
  std::uint64_t kernels_launched = 0;
  std::uint64_t kernels_over = 0;
  bool kernel_runs = false;
  std::map<NcclReduceOp, Operator> operators;
  int operators_made = 0;
};

struct CudaStream {
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> items;
  bool busy = false;   // With an item that is not among them any more.
  bool ended = false;  // Destroyed: what is on it still runs, as in CUDA.
  bool left = false;   // By its thread.
  int device = 0;
  NcclCommHandle last_launcher = nullptr;  // May be gone.
  Thread worker;
};

struct CudaEvent {
  // Of its last record; who waits for an earlier one has that one's.
  std::shared_ptr<bool> fired = std::make_shared<bool>(true);
  bool recorded = false;
  int device = 0;
};

namespace testing {

// The device that cudaSetDevice has given this thread.
int& DeviceOfThread();

}  // namespace testing
}  // namespace resilient
