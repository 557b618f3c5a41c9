#include <chrono>
#include <utility>

#include "runtime/base/log.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/fake_nccl_state.h"

// Graphs of the fake: what is captured, and how it runs. A graph's nodes run one behind the other
// in the order of their capture, which is one that their dependencies allow.
namespace resilient::testing {
namespace {

thread_local int capture_mode = 0;

double NowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

// What CUDA calls unsafe: it breaks a capture that is to be safe from it.
void FakeNccl::CheckMode(const char* what) {
  if (capture_mode != 0) return;
  for (const auto& [handle, graph] : graphs_) {
    if (graph->capturing && (graph->mode == 0 || graph->thread == std::this_thread::get_id()))
      return Misuse(StrCat(what, " while a graph is captured"));
  }
}

CudaResult FakeNccl::BeginCapture(CudaStreamHandle stream, int mode) {
  Lock lock(mutex_);
  if (stream == nullptr || StreamOf(stream)->graph != nullptr) {
    Misuse("a capture of the default stream, or of one that is captured");
    return CudaResult::kInvalidValue;
  }
  auto graph = std::make_unique<CudaGraph>();
  graph->id = ++captures_;
  graph->mode = mode;
  graph->thread = std::this_thread::get_id();
  graph->origin = stream;
  stream->graph = graph.get();
  graph->streams[stream] = 0;
  ++counts_.graphs;
  graphs_[graph.get()] = std::move(graph);
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::EndCapture(CudaStreamHandle stream, CudaGraphHandle* graph) {
  Lock lock(mutex_);
  CudaGraph* captured = StreamOf(stream)->graph;
  if (captured == nullptr || captured->origin != stream) {
    Misuse("the end of a capture that did not begin there");
    return CudaResult::kInvalidValue;
  }
  if (!captured->spoilt && !captured->unjoined.empty())
    Misuse("a capture ends without a stream that is part of it");
  captured->capturing = false;
  for (const auto& [one, count] : captured->streams) {
    if (streams_.count(one) != 0) one->graph = nullptr;
  }
  *graph = captured->spoilt ? nullptr : captured;
  changed_.notify_all();
  if (!captured->spoilt) return CudaResult::kSuccess;
  Finish(lock, captured);
  return CudaResult::kStreamCaptureInvalidated;
}

void FakeNccl::SpoilCapture(CudaStreamHandle stream) {
  const Lock lock(mutex_);
  StreamOf(stream)->graph->spoilt = true;
}

CudaResult FakeNccl::LaunchGraph(CudaGraphHandle graph, CudaStreamHandle stream) {
  Lock lock(mutex_);
  if (graphs_.count(graph) == 0 || graph->capturing || graph->destroyed) {
    Misuse("a launch of a graph that is not there");
    return CudaResult::kInvalidValue;
  }
  std::vector<StreamItem> items;
  for (const StreamItemMaker& make : graph->nodes) items.push_back(make());
  ++graph->running;
  Enqueue(StreamOf(stream), [this, graph, items = std::move(items)](Lock& held) {
    for (const StreamItem& item : items) item(held);
    if (--graph->running == 0 && graph->destroyed) Finish(held, graph);
  });
  return CudaResult::kSuccess;
}

CudaResult FakeNccl::DestroyGraph(CudaGraphHandle graph) {
  Lock lock(mutex_);
  if (graphs_.count(graph) == 0 || graph->destroyed) {
    Misuse("cudaGraphDestroy of a graph that is not there");
    return CudaResult::kInvalidValue;
  }
  graph->destroyed = true;
  if (graph->running == 0) Finish(lock, graph);
  return CudaResult::kSuccess;
}

// Its last launch has ended, and nobody can launch it any more.
void FakeNccl::Finish(Lock& lock, CudaGraphHandle graph) {
  for (NcclCommHandle comm : graph->comms) {
    if (IsThere(comm, "the end of a graph with a kernel")) --comm->graphs;
  }
  const std::vector<CudaUserObjectHandle> objects = std::move(graph->objects);
  graphs_.erase(graph);
  lock.unlock();
  for (CudaUserObjectHandle object : objects) {
    object->destroy(object->pointer);
    delete object;
  }
  lock.lock();
  counts_.user_objects -= static_cast<int>(objects.size());
  --counts_.graphs;
  changed_.notify_all();
}

CudaResult FakeNccl::Record(CudaEventHandle event, CudaStreamHandle stream, unsigned int flags) {
  stream = StreamOf(stream);
  // Where it lands is open for the launch that is under way: it is not behind its kernel.
  const auto launcher = comms_.find(stream->last_launcher);
  if (launcher != comms_.end() && launcher->first->being_launched &&
      launcher->first->thread == std::this_thread::get_id())
    Misuse("an event on a stream where a collective is being launched");
  if (stream->graph != nullptr && stream->graph->spoilt)
    return CudaResult::kStreamCaptureInvalidated;
  event->recorded = true;
  event->graph = nullptr;
  if (stream->graph != nullptr && flags == kCudaEventRecordExternal) {
    RecordExternal(event, stream);
    return CudaResult::kSuccess;
  }
  Enqueue(stream, NextFiring(event));
  if (stream->graph == nullptr) return CudaResult::kSuccess;
  event->graph = stream->graph;
  event->captured_on = stream;
  event->position = stream->graph->streams[stream];
  return CudaResult::kSuccess;
}

// By each launch anew: who asks for it hears of the latest one.
void FakeNccl::RecordExternal(CudaEventHandle event, CudaStreamHandle stream) {
  event->fired = std::make_shared<bool>(true);
  EnqueueEach(stream, [this, event]() -> StreamItem {
    if (!IsUsable(event, "a launch of a graph with a record")) return [](Lock&) {};
    return NextFiring(event);
  });
}

StreamItem FakeNccl::NextFiring(CudaEventHandle event) {
  event->fired = std::make_shared<bool>(false);
  event->at = std::make_shared<double>(0);
  return [this, fired = event->fired, at = event->at](Lock&) {
    *fired = true;
    *at = NowMs();
    changed_.notify_all();
  };
}

// It takes the stream into the capture. Nothing is to be waited for in it: see above.
CudaResult FakeNccl::WaitForCaptured(CudaStreamHandle stream, CudaEventHandle event) {
  CudaGraph* graph = event->graph;
  const bool is_over = graph != nullptr && (graphs_.count(graph) == 0 || !graph->capturing);
  if (is_over && stream->graph == nullptr) return CudaResult::kCapturedEvent;
  if (graph != nullptr && !is_over && graph->spoilt) return CudaResult::kStreamCaptureInvalidated;
  if (graph == nullptr || is_over || (stream->graph != nullptr && stream->graph != graph)) {
    Misuse("a capture and what is not in it wait for one another");
    return CudaResult::kInvalidValue;
  }
  if (stream->graph == nullptr) {
    stream->graph = graph;
    graph->streams[stream] = 0;
  }
  if (graph->streams[event->captured_on] == event->position)
    graph->unjoined.erase(event->captured_on);
  if (stream != graph->origin) graph->unjoined.insert(stream);
  return CudaResult::kSuccess;
}

struct FakeGraphFunctions {
  using Lock = FakeNccl::Lock;

  static FakeNccl& fake() { return *FakeNccl::current; }
  static CudaResult ExchangeMode(int* mode) {
    std::swap(capture_mode, *mode);
    return CudaResult::kSuccess;
  }
  static CudaResult IsCapturing(CudaStreamHandle stream, int* capturing) {
    Lock lock(fake().mutex_);
    *capturing = fake().StreamOf(stream)->graph != nullptr ? 1 : 0;
    return CudaResult::kSuccess;
  }
  static CudaResult GetCaptureInfo(CudaStreamHandle stream, int* capturing, unsigned long long* id,
                                   CudaGraphHandle* graph, const void**, const void**,
                                   std::size_t*) {
    Lock lock(fake().mutex_);
    CudaGraph* captured = fake().StreamOf(stream)->graph;
    *capturing = captured != nullptr ? 1 : 0;
    if (captured == nullptr) return CudaResult::kSuccess;
    *id = captured->id;
    if (graph != nullptr) *graph = captured;
    return CudaResult::kSuccess;
  }
  static CudaResult RecordWithFlags(CudaEventHandle event, CudaStreamHandle stream,
                                    unsigned int flags) {
    Lock lock(fake().mutex_);
    if (!fake().IsUsable(event, "cudaEventRecordWithFlags")) return CudaResult::kInvalidValue;
    return fake().Record(event, stream, flags);
  }
  static CudaResult ElapsedTime(float* ms, CudaEventHandle from, CudaEventHandle to) {
    Lock lock(fake().mutex_);
    for (CudaEventHandle event : {from, to}) {
      if (!fake().IsUsable(event, "cudaEventElapsedTime")) return CudaResult::kInvalidValue;
      if (!event->measures_time || !event->recorded) return CudaResult::kInvalidValue;
      if (!*event->fired) return CudaResult::kNotReady;
    }
    *ms = static_cast<float>(*to->at - *from->at);
    return CudaResult::kSuccess;
  }
  static CudaResult MakeObject(CudaUserObjectHandle* object, void* pointer, void (*destroy)(void*),
                               unsigned int references, unsigned int flags) {
    Lock lock(fake().mutex_);
    if (references != 1 || flags != kCudaUserObjectNoDestructorSync)
      fake().Misuse("cudaUserObjectCreate with other arguments than those that there are");
    *object = new CudaUserObject{.pointer = pointer, .destroy = destroy};
    ++fake().counts_.user_objects;
    return CudaResult::kSuccess;
  }
  static CudaResult ReleaseObject(CudaUserObjectHandle object, unsigned int) {
    object->destroy(object->pointer);
    delete object;
    Lock lock(fake().mutex_);
    --fake().counts_.user_objects;
    return CudaResult::kSuccess;
  }
  static CudaResult Retain(CudaGraphHandle graph, CudaUserObjectHandle object, unsigned int,
                           unsigned int flags) {
    Lock lock(fake().mutex_);
    if (fake().graphs_.count(graph) == 0 || flags != kCudaGraphUserObjectMove) {
      fake().Misuse("cudaGraphRetainUserObject of a graph that is not there");
      return CudaResult::kInvalidValue;
    }
    graph->objects.push_back(object);
    return CudaResult::kSuccess;
  }
};

void FakeNccl::AddGraphs(CudaApi& api) {
  using F = FakeGraphFunctions;
  api.ThreadExchangeStreamCaptureMode = &F::ExchangeMode;
  api.StreamIsCapturing = &F::IsCapturing;
  api.StreamGetCaptureInfo = &F::GetCaptureInfo;
  api.EventRecordWithFlags = &F::RecordWithFlags;
  api.EventElapsedTime = &F::ElapsedTime;
  api.UserObjectCreate = &F::MakeObject;
  api.UserObjectRelease = &F::ReleaseObject;
  api.GraphRetainUserObject = &F::Retain;
}

}  // namespace resilient::testing
