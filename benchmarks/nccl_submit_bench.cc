// What an operation on a device costs this library: `nccl_submit_bench [OPERATIONS]`. NCCL and CUDA
// are functions that return at once, so that what is left is ours. Prints one line of JSON: of the
// call of Submit on the caller's thread p50 and p99 in microseconds, of all of it (submission,
// launch, completion) the mean over operations of which up to 64 are under way, and allocations an
// operation once it has run for a while, of all threads. Then, of operations that come one after
// the other, p50 and p99 from the call until the caller's stream waits for the operation's end.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <semaphore>
#include <vector>

#include "runtime/comm/nccl_communicator.h"

namespace {

std::atomic<std::uint64_t> allocations{0};

}  // namespace

// Not inlined: the compiler would pair them with the functions that they call.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace resilient {
namespace {

using Microseconds = std::chrono::duration<double, std::micro>;

constexpr int kWarmUp = 2000;
constexpr std::ptrdiff_t kUnderWay = 64;
constexpr Duration kNeverSoLong = std::chrono::seconds(10);

class Events final : public CommunicatorEvents {
 public:
  void OnConnected(const std::string&, std::uint64_t) override {}
  void OnLinkLost(const std::string&, std::uint64_t, int, const Status& why) override { End(why); }
  void OnMismatch(const std::string&, std::uint64_t, const Status& why) override { End(why); }
  void OnStalled(const std::string&, std::uint64_t, const Status& why) override { End(why); }
  void OnUnreached(const std::string&, std::uint64_t, int, const Status&) override {}
  void OnWaiting(const std::string&, std::uint64_t, std::vector<WaitingOperation>) override {}
  void OnProgress(std::uint64_t, GroupProgress) override {}

 private:
  static void End(const Status& why) {
    std::fprintf(stderr, "nccl_submit_bench: %s\n", why.ToString().c_str());
    std::_Exit(1);
  }
};

// Any pointer will do: nobody looks behind it.
template <typename Handle>
Handle Something() {
  static int something = 0;
  return reinterpret_cast<Handle>(&something);
}

NcclApi Nccl() {
  NcclApi api;
  api.GetVersion = [](int* version) { return *version = 23007, NcclResult::kSuccess; };
  api.GetErrorString = [](NcclResult) { return ""; };
  api.GetLastError = [](NcclCommHandle) { return ""; };
  api.GetUniqueId = [](NcclUniqueId* id) { return id->bytes.fill('i'), NcclResult::kSuccess; };
  api.CommInitRankConfig = [](NcclCommHandle* comm, int, NcclUniqueId, int, NcclConfig*) {
    return *comm = Something<NcclCommHandle>(), NcclResult::kSuccess;
  };
  api.CommGetAsyncError = [](NcclCommHandle, NcclResult* error) {
    return *error = NcclResult::kSuccess, NcclResult::kSuccess;
  };
  api.CommFinalize = [](NcclCommHandle) { return NcclResult::kSuccess; };
  api.CommDestroy = [](NcclCommHandle) { return NcclResult::kSuccess; };
  api.CommAbort = [](NcclCommHandle) { return NcclResult::kSuccess; };
  api.AllReduce = [](const void*, void*, std::size_t, NcclDataType, NcclReduceOp, NcclCommHandle,
                     CudaStreamHandle) { return NcclResult::kSuccess; };
  return api;
}

CudaApi Cuda() {
  CudaApi api;
  api.GetErrorName = [](CudaResult) { return ""; };
  api.GetErrorString = [](CudaResult) { return ""; };
  api.GetDevice = [](int* device) { return *device = 0, CudaResult::kSuccess; };
  api.SetDevice = [](int) { return CudaResult::kSuccess; };
  api.DeviceGetAttribute = [](int* value, CudaDeviceAttribute, int) {
    return *value = 9, CudaResult::kSuccess;
  };
  api.StreamCreateWithFlags = [](CudaStreamHandle* stream, unsigned int) {
    return *stream = Something<CudaStreamHandle>(), CudaResult::kSuccess;
  };
  api.StreamDestroy = [](CudaStreamHandle) { return CudaResult::kSuccess; };
  api.StreamWaitEvent = [](CudaStreamHandle, CudaEventHandle, unsigned int) {
    return CudaResult::kSuccess;
  };
  api.EventCreateWithFlags = [](CudaEventHandle* event, unsigned int) {
    return *event = Something<CudaEventHandle>(), CudaResult::kSuccess;
  };
  api.EventRecord = [](CudaEventHandle, CudaStreamHandle) { return CudaResult::kSuccess; };
  api.EventQuery = [](CudaEventHandle) { return CudaResult::kSuccess; };
  api.EventSynchronize = [](CudaEventHandle) { return CudaResult::kSuccess; };
  api.EventDestroy = [](CudaEventHandle) { return CudaResult::kSuccess; };
  return api;
}

struct Figures {
  std::vector<double> submit_us;
  double whole_us = 0;
  double allocations = 0;
};

Operation Reduction(std::vector<float>& data) {
  Operation op;
  op.kind = OpKind::kAllReduce;
  op.dtype = DataType::kFloat32;
  op.reduce = ReduceOp::kSum;
  op.data = data.data();
  op.count = data.size();
  op.device = 0;
  return op;
}

Figures Measure(Communicator& communicator, int operations) {
  std::counting_semaphore<> free_places(kUnderWay);
  std::vector<float> data(256);
  Figures figures;
  figures.submit_us.reserve(static_cast<std::size_t>(operations));
  std::uint64_t before = 0;
  auto began = std::chrono::steady_clock::now();
  for (int i = -kWarmUp; i < operations; ++i) {
    if (i == 0) {
      before = allocations.load();
      began = std::chrono::steady_clock::now();
    }
    free_places.acquire();
    Operation op = Reduction(data);
    const auto start = std::chrono::steady_clock::now();
    const auto seq = communicator.Submit(std::move(op), [&free_places](const Status& status) {
      if (!status.ok()) std::abort();
      free_places.release();
    });
    const Microseconds took = std::chrono::steady_clock::now() - start;
    if (!seq.ok()) std::abort();
    if (i >= 0) figures.submit_us.push_back(took.count());
  }
  for (std::ptrdiff_t i = 0; i < kUnderWay; ++i) free_places.acquire();
  const Microseconds whole = std::chrono::steady_clock::now() - began;
  figures.whole_us = whole.count() / operations;
  figures.allocations = static_cast<double>(allocations.load() - before) / operations;
  std::sort(figures.submit_us.begin(), figures.submit_us.end());
  return figures;
}

// As a program does that looks at each result.
std::vector<double> MeasureInTurn(Communicator& communicator, int operations) {
  std::binary_semaphore ended(0);
  std::vector<float> data(256);
  std::vector<double> joined_us;
  for (int i = -kWarmUp; i < operations; ++i) {
    const auto mark = std::make_shared<LaunchMark>();
    Operation op = Reduction(data);
    op.mark = mark;
    const auto start = std::chrono::steady_clock::now();
    const auto seq = communicator.Submit(std::move(op), [&ended](const Status& status) {
      if (!status.ok()) std::abort();
      ended.release();
    });
    if (!seq.ok() || !mark->WaitFor(kNeverSoLong) || !mark->Join(nullptr).ok()) std::abort();
    const Microseconds took = std::chrono::steady_clock::now() - start;
    ended.acquire();
    if (i >= 0) joined_us.push_back(took.count());
  }
  std::sort(joined_us.begin(), joined_us.end());
  return joined_us;
}

int Run(int operations) {
  const SystemClock clock;
  Events events;
  auto host = MakeCpuFabric({}, clock, events);
  if (!host.ok()) return std::fprintf(stderr, "%s\n", host.status().ToString().c_str()), 1;
  NcclFabricOptions options;
  options.nccl = Nccl();
  options.cuda = Cuda();
  const auto fabric =
      MakeNcclFabric(options, **host, std::make_shared<ControlWaits>(), clock, events);
  GroupSpec spec;
  spec.name = "bench";
  spec.generation = 1;
  spec.members = {{.global_rank = 0, .endpoint = fabric->endpoint(), .host = "here", .pid = 1}};
  const auto communicator = fabric->Create(spec, nullptr);
  const Figures figures = Measure(*communicator, operations);
  const std::vector<double> joined_us = MeasureInTurn(*communicator, operations);
  const auto at = [operations](const std::vector<double>& sorted, double part) {
    return sorted[static_cast<std::size_t>(part * (operations - 1))];
  };
  std::printf(
      "{\"operations\": %d, \"submit_p50_us\": %.3f, \"submit_p99_us\": %.3f, "
      "\"whole_mean_us\": %.3f, \"allocations_per_operation\": %.4f, "
      "\"in_turn_p50_us\": %.3f, \"in_turn_p99_us\": %.3f}\n",
      operations, at(figures.submit_us, 0.5), at(figures.submit_us, 0.99), figures.whole_us,
      figures.allocations, at(joined_us, 0.5), at(joined_us, 0.99));
  return 0;
}

}  // namespace
}  // namespace resilient

int main(int argc, char** argv) {
  const int operations = argc > 1 ? std::atoi(argv[1]) : 100000;
  return operations > 0 ? resilient::Run(operations) : 2;
}
