#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "runtime/base/thread.h"
#include "runtime/comm/nccl_api.h"
#include "tests/support/fake_nccl_meeting.h"

// What the handles of the fake (fake_nccl.h) point to. Thread: all under its lock.
namespace resilient {

// With the lock held; gives it back while it waits.
using StreamItem = std::function<void(std::unique_lock<std::mutex>&)>;
// What a graph holds becomes an item by each launch.
using StreamItemMaker = std::function<StreamItem()>;

struct NcclComm {
  struct Operator {
    NcclDataType type;
    double factor;
  };

  int rank = 0;
  int ranks = 0;
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
  int graphs = 0;  // That hold kernels of it.
  bool was_captured = false;
  std::map<NcclReduceOp, Operator> operators;
  int operators_made = 0;
};

struct CudaStream {
  std::deque<StreamItem> items;
  CudaGraphHandle graph = nullptr;  // Not null: what comes is captured in it.
  bool busy = false;                // With an item that is not among them any more.
  bool ended = false;               // Destroyed: what is on it still runs, as in CUDA.
  bool left = false;                // By its thread.
  int device = 0;
  NcclCommHandle last_launcher = nullptr;  // May be gone.
  Thread worker;
};

struct CudaEvent {
  // Of its last record; who waits for an earlier one has that one's.
  std::shared_ptr<bool> fired = std::make_shared<bool>(true);
  bool recorded = false;
  int device = 0;
  bool measures_time = false;
  std::shared_ptr<double> at = std::make_shared<double>(0);  // Of its last record, in ms.
  // Where it was recorded in a capture, and behind how much of that stream.
  CudaGraphHandle graph = nullptr;
  CudaStreamHandle captured_on = nullptr;
  std::size_t position = 0;
};

struct CudaUserObject {
  void* pointer = nullptr;
  void (*destroy)(void*) = nullptr;
};

// A capture, and the graph that comes of it, which is its own instance.
struct CudaGraph {
  unsigned long long id = 0;
  int mode = 0;
  std::thread::id thread;
  CudaStreamHandle origin = nullptr;
  bool capturing = true;
  bool spoilt = false;
  bool destroyed = false;
  int running = 0;                                  // Launches that have not ended.
  std::vector<StreamItemMaker> nodes;               // In an order in which they may run.
  std::map<CudaStreamHandle, std::size_t> streams;  // How much each has put into it.
  std::set<CudaStreamHandle> unjoined;  // What they have put last the origin does not wait for.
  std::set<NcclCommHandle> comms;
  std::vector<CudaUserObjectHandle> objects;
};

namespace testing {

// The device that cudaSetDevice has given this thread.
int& DeviceOfThread();

}  // namespace testing
}  // namespace resilient
