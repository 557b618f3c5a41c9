#include <algorithm>
#include <cstring>
#include <iterator>

#include "runtime/base/log.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/fake_nccl_state.h"

// The CUDA runtime of the fake: streams, events, memory.
namespace resilient::testing {

int& DeviceOfThread() {
  thread_local int device = 0;
  return device;
}

CudaStreamHandle FakeNccl::NewStream() {
  auto* stream = new CudaStream;
  streams_.insert(stream);
  stream->device = DeviceOfThread();
  stream->worker = Thread("fake-stream", [this, stream] {
    Lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !stream->items.empty() || stream->ended; });
      stream->left = stream->items.empty();
      if (stream->left) return;
      const auto item = std::move(stream->items.front());
      stream->items.pop_front();
      stream->busy = true;
      item(lock);
      stream->busy = false;
      changed_.notify_all();
    }
  });
  return stream;
}

CudaResult FakeNccl::MakeStream(CudaStreamHandle* stream) {
  Lock lock(mutex_);
  // Those before it that have nothing more to do.
  JoinStreams(lock, [](CudaStreamHandle ended) { return ended->left; });
  *stream = NewStream();
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::EndStream(CudaStreamHandle stream) {
  if (streams_.erase(stream) == 0) {
    Misuse("cudaStreamDestroy of a stream that is not there");
    return CudaResult::kInvalidValue;
  }
  stream->ended = true;
  ended_streams_.insert(stream);
  changed_.notify_all();
  return CudaResult::kSuccess;
}

void FakeNccl::JoinStreams(Lock& lock, const std::function<bool(CudaStreamHandle)>& which) {
  std::vector<CudaStreamHandle> found;
  std::copy_if(ended_streams_.begin(), ended_streams_.end(), std::back_inserter(found), which);
  for (CudaStreamHandle stream : found) ended_streams_.erase(stream);
  lock.unlock();
  for (CudaStreamHandle stream : found) {
    stream->worker.Join();
    delete stream;
  }
  lock.lock();
}

CudaStreamHandle FakeNccl::StreamOf(CudaStreamHandle stream) {
  if (stream != nullptr && streams_.count(stream) != 0) return stream;
  if (stream != nullptr) Misuse("a stream that is not there");
  CudaStreamHandle& own = default_streams_[DeviceOfThread()];
  if (own == nullptr) own = NewStream();
  return own;
}

void FakeNccl::Enqueue(CudaStreamHandle stream, std::function<void(Lock&)> item) {
  EnqueueEach(stream, [item = std::move(item)] { return item; });
}

void FakeNccl::EnqueueEach(CudaStreamHandle stream,
                           std::function<std::function<void(Lock&)>()> make) {
  if (CudaGraph* graph = stream->graph) {
    ++graph->streams[stream];
    if (stream != graph->origin) graph->unjoined.insert(stream);
    graph->nodes.push_back(std::move(make));
    return;
  }
  stream->items.push_back(make());
  changed_.notify_all();
}

CudaResult FakeNccl::LaunchHostFunction(CudaStreamHandle stream, std::function<void()> function) {
  Lock lock(mutex_);
  Enqueue(StreamOf(stream), [function = std::move(function)](Lock& held) {
    held.unlock();
    function();
    held.lock();
  });
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::QueryStream(CudaStreamHandle stream) {
  Lock lock(mutex_);
  stream = StreamOf(stream);
  const bool idle = stream->items.empty() && !stream->busy;
  return idle ? CudaResult::kSuccess : CudaResult::kNotReady;
}

CudaResult FakeNccl::SynchronizeStream(CudaStreamHandle stream) {
  Lock lock(mutex_);
  AwaitIdle(lock, StreamOf(stream));
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::SynchronizeDevice() {
  Lock lock(mutex_);
  const std::set<CudaStreamHandle> all = streams_;
  for (CudaStreamHandle stream : all) {
    // It may have ended while another one was waited for.
    if (streams_.count(stream) != 0 && stream->device == DeviceOfThread()) AwaitIdle(lock, stream);
  }
  return CudaResult::kSuccess;
}

// Of what is on it now: others may add to it for ever.
void FakeNccl::AwaitIdle(Lock& lock, CudaStreamHandle stream) {
  const auto passed = std::make_shared<bool>(false);
  Enqueue(stream, [passed](Lock&) { *passed = true; });
  changed_.wait(lock, [&] { return over_ || *passed; });
}

bool FakeNccl::IsUsable(CudaEventHandle event, const char* what) {
  if (events_.count(event) != 0) return true;
  Misuse(StrCat(what, " of an event that is not there"));
  return false;
}

CudaResult FakeNccl::Allocate(Lock& lock, void** memory, std::size_t bytes, bool of_nccl) {
  const int device = DeviceOfThread();
  CheckMode(of_nccl ? "ncclMemAlloc" : "cudaMalloc");
  changed_.wait(lock, [&] { return over_ || !ScriptOf(device).hang_memory; });
  if (ScriptOf(device).refuse_memory) return CudaResult::kInvalidValue;
  Block block{.bytes = std::vector<std::byte>(bytes), .of_nccl = of_nccl};
  *memory = block.bytes.data();
  blocks_[block.bytes.data()] = std::move(block);
  ++counts_.allocations;
  changed_.notify_all();
  return CudaResult::kSuccess;
}

// Waits for the device, as cudaFree does.
CudaResult FakeNccl::Deallocate(Lock& lock, void* memory, bool of_nccl) {
  const int device = DeviceOfThread();
  CheckMode(of_nccl ? "ncclMemFree" : "cudaFree");
  changed_.wait(lock, [&] {
    const bool busy = std::any_of(comms_.begin(), comms_.end(), [&](const auto& comm) {
      return comm.second->device == device && comm.second->kernel_runs;
    });
    return over_ || (!busy && !ScriptOf(device).hang_memory);
  });
  const auto found = blocks_.find(static_cast<const std::byte*>(memory));
  if (found == blocks_.end() || found->second.freed || found->second.of_nccl != of_nccl) {
    Misuse(StrCat(of_nccl ? "ncclMemFree" : "cudaFree", " of memory that is not there"));
    return CudaResult::kInvalidValue;
  }
  found->second.freed = true;
  --counts_.allocations;
  ++counts_.frees;
  changed_.notify_all();
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::AllocatePinned(Lock& lock, void** memory, std::size_t bytes) {
  const int device = DeviceOfThread();
  changed_.wait(lock, [&] { return over_ || !ScriptOf(device).hang_memory; });
  if (ScriptOf(device).refuse_memory) return CudaResult::kInvalidValue;
  std::vector<std::byte> block(bytes);
  *memory = block.data();
  pinned_[block.data()] = std::move(block);
  counts_.pinned_most = std::max(counts_.pinned_most, ++counts_.pinned);
  changed_.notify_all();
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::DeallocatePinned(Lock& lock, void* memory) {
  const int device = DeviceOfThread();
  changed_.wait(lock, [&] { return over_ || !ScriptOf(device).hang_memory; });
  if (pinned_.erase(static_cast<const std::byte*>(memory)) == 0) {
    Misuse("cudaFreeHost of memory that is not there");
    return CudaResult::kInvalidValue;
  }
  --counts_.pinned;
  changed_.notify_all();
  return CudaResult::kSuccess;
}

bool FakeNccl::IsPinned(const void* memory, std::size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(memory);
  auto block = pinned_.upper_bound(at);
  if (block == pinned_.begin()) return false;
  --block;
  return at + bytes <= block->first + block->second.size();
}

CudaResult FakeNccl::Copy(void* to, const void* from, std::size_t bytes, CudaCopy direction,
                          CudaStreamHandle stream) {
  if (ScriptOf(DeviceOfThread()).lose_device) return CudaResult::kLaunchFailure;
  const void* on_host = direction == CudaCopy::kDeviceToHost ? to : from;
  stream = StreamOf(stream);
  Enqueue(stream, [this, to, from, bytes, on_host, device = stream->device,
                   lost = LossOf(stream->device)](Lock& lock) {
    changed_.wait(lock, [&] { return over_ || *lost || !ScriptOf(device).hold_copies; });
    if (over_ || *lost) return;  // The memory may be gone.
    if (!IsPinned(on_host, bytes)) return Misuse("a copy over memory that is not pinned");
    ++counts_.copies;
    changed_.notify_all();
    lock.unlock();
    std::memcpy(to, from, bytes);
    lock.lock();
  });
  return CudaResult::kSuccess;
}

void FakeNccl::CheckMemory(const Call& call) {
  for (const void* memory : {call.from, static_cast<const void*>(call.to)}) {
    const auto* at = static_cast<const std::byte*>(memory);
    auto block = blocks_.upper_bound(at);
    if (block == blocks_.begin()) continue;
    --block;
    const bool inside = at < block->first + block->second.bytes.size();
    if (inside && block->second.freed) Misuse("a kernel on memory that was freed");
  }
}

// The functions of the table: each takes the lock of the fake that is alive.
struct FakeCudaFunctions {
  using Lock = FakeNccl::Lock;

  static FakeNccl& fake() { return *FakeNccl::current; }
  static CudaResult EventCreate(CudaEventHandle* event, unsigned int flags) {
    Lock lock(fake().mutex_);
    // Device and rank are one number in the tests.
    if (fake().ScriptOf(DeviceOfThread()).refuse_events) return CudaResult::kInvalidValue;
    *event = new CudaEvent;
    fake().events_.insert(*event);
    (*event)->device = DeviceOfThread();
    (*event)->measures_time = (flags & kCudaEventDisableTiming) == 0;
    ++fake().counts_.events;
    fake().changed_.notify_all();
    return CudaResult::kSuccess;
  }
  static CudaResult EventRecord(CudaEventHandle event, CudaStreamHandle stream) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaEventRecord")) return CudaResult::kInvalidValue;
    if (event->measures_time) fake().Misuse("an event that measures time");
    if (fake().ScriptOf(event->device).lose_device) return CudaResult::kLaunchFailure;
    return fake().Record(event, stream, kCudaEventRecordDefault);
  }
  static CudaResult EventQuery(CudaEventHandle event) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaEventQuery")) return CudaResult::kInvalidValue;
    fake().CheckMode("cudaEventQuery");
    if (!event->recorded) fake().Misuse("query of an event that nobody recorded");
    if (event->graph != nullptr) fake().Misuse("query of an event that was captured");
    if (fake().ScriptOf(event->device).lose_device) return CudaResult::kLaunchFailure;
    return *event->fired ? CudaResult::kSuccess : CudaResult::kNotReady;
  }
  static CudaResult EventSynchronize(CudaEventHandle event) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaEventSynchronize")) return CudaResult::kInvalidValue;
    fake().CheckMode("cudaEventSynchronize");
    if (event->graph != nullptr) fake().Misuse("a wait on the host for an event of a capture");
    // The event may be gone when it fires.
    const std::shared_ptr<bool> fired = event->fired;
    const int device = event->device;
    fake().changed_.wait(
        lock, [&] { return fake().over_ || *fired || fake().ScriptOf(device).lose_device; });
    return *fired ? CudaResult::kSuccess : CudaResult::kLaunchFailure;
  }
  static CudaResult EventDestroy(CudaEventHandle event) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaEventDestroy")) return CudaResult::kInvalidValue;
    fake().events_.erase(event);
    delete event;
    --fake().counts_.events;
    fake().changed_.notify_all();
    return CudaResult::kSuccess;
  }
  static CudaResult StreamCreateWithPriority(CudaStreamHandle* stream, unsigned int, int priority) {
    {
      Lock lock(fake().mutex_);
      fake().counts_.priorities.push_back(priority);
    }
    return fake().MakeStream(stream);
  }
  static CudaResult StreamWaitEvent(CudaStreamHandle stream, CudaEventHandle event, unsigned int) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaStreamWaitEvent")) return CudaResult::kInvalidValue;
    stream = fake().StreamOf(stream);
    if (event->graph != nullptr || stream->graph != nullptr)
      return fake().WaitForCaptured(stream, event);
    fake().Enqueue(stream, [fired = event->fired, fake = FakeNccl::current](Lock& held) {
      fake->changed_.wait(held, [&] { return fake->over_ || *fired; });
    });
    return CudaResult::kSuccess;
  }
};

CudaApi FakeNccl::cuda() {
  using F = FakeCudaFunctions;
  CudaApi api;
  api.GetErrorName = [](CudaResult error) {
    return error == CudaResult::kLaunchFailure ? "cudaErrorLaunchFailure" : "cudaErrorInvalidValue";
  };
  api.GetErrorString = [](CudaResult) { return "the fake was told to"; };
  api.GetDevice = [](int* device) {
    *device = DeviceOfThread();
    return CudaResult::kSuccess;
  };
  api.SetDevice = [](int device) {
    DeviceOfThread() = device;
    return CudaResult::kSuccess;
  };
  api.StreamCreateWithFlags = [](CudaStreamHandle* stream, unsigned int) {
    return current->MakeStream(stream);
  };
  api.StreamCreateWithPriority = &F::StreamCreateWithPriority;
  api.DeviceGetStreamPriorityRange = [](int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return CudaResult::kSuccess;
  };
  api.StreamDestroy = [](CudaStreamHandle stream) {
    Lock lock(current->mutex_);
    return current->EndStream(stream);
  };
  api.StreamWaitEvent = &F::StreamWaitEvent;
  api.Malloc = [](void** memory, std::size_t bytes) {
    Lock lock(current->mutex_);
    return current->Allocate(lock, memory, bytes, false);
  };
  api.Free = [](void* memory) {
    Lock lock(current->mutex_);
    return current->Deallocate(lock, memory, false);
  };
  api.HostAlloc = [](void** memory, std::size_t bytes, unsigned int) {
    Lock lock(current->mutex_);
    return current->AllocatePinned(lock, memory, bytes);
  };
  api.FreeHost = [](void* memory) {
    Lock lock(current->mutex_);
    return current->DeallocatePinned(lock, memory);
  };
  api.MemcpyAsync = [](void* to, const void* from, std::size_t bytes, CudaCopy direction,
                       CudaStreamHandle stream) {
    Lock lock(current->mutex_);
    return current->Copy(to, from, bytes, direction, stream);
  };
  api.DeviceGetAttribute = [](int* value, CudaDeviceAttribute, int) {
    *value = 9;  // A Hopper.
    return CudaResult::kSuccess;
  };
  api.EventCreateWithFlags = &F::EventCreate;
  api.EventRecord = &F::EventRecord;
  api.EventQuery = &F::EventQuery;
  api.EventSynchronize = &F::EventSynchronize;
  api.EventDestroy = &F::EventDestroy;
  AddGraphs(api);
  return api;
}

}  // namespace resilient::testing
