#include "tests/support/call_faults.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "tests/support/fake_nccl_state.h"

namespace resilient::testing {
namespace {

struct Caller {
  int rank = 0;
  int communicator = 0;
};

// The functions of the tables have no other way to it.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<CallFault> fault;
  bool hit = false;
  int releases = 0;
  std::map<int, std::map<std::string, int>> calls;  // By rank.
  int matching = 0;                                 // Calls that the fault could have been for.
  std::map<int, int> communicators;                 // Made so far, by rank.
  std::map<NcclCommHandle, Caller> callers;
};

State& Faults() {
  static State state;
  return state;
}

NcclCommHandle Pick(NcclCommHandle comm, NcclCommHandle) { return comm; }
template <typename Other>
NcclCommHandle Pick(const Other&, NcclCommHandle before) {
  return before;
}

// REQUIRES: the lock.
Caller CallerOf(const State& state, NcclCommHandle comm) {
  if (const auto found = state.callers.find(comm); found != state.callers.end())
    return found->second;
  const int rank = DeviceOfThread();
  const auto made = state.communicators.find(rank);
  return {rank, made == state.communicators.end() ? 0 : made->second};
}

// The fault, where it is this call's. REQUIRES: the lock.
std::optional<CallFault> Count(State& state, const std::string& name, Caller caller) {
  ++state.calls[caller.rank][name];
  if (!state.fault || state.fault->call != name || state.fault->rank != caller.rank) return {};
  const int wanted = state.fault->communicator;
  if (wanted != 0 && wanted != caller.communicator) return {};
  if (++state.matching != state.fault->nth) return {};
  state.hit = true;
  return state.fault;
}

template <auto kMember>
struct Wrapped;

template <typename Api, typename Answer, typename... Args, Answer (*Api::*kMember)(Args...)>
struct Wrapped<kMember> {
  using Result = Answer;
  static inline const char* name = "";
  static inline Answer (*real)(Args...) = nullptr;

  static Answer Call(Args... args) {
    State& state = Faults();
    std::unique_lock lock(state.mutex);
    NcclCommHandle comm = nullptr;
    ((comm = Pick(args, comm)), ...);
    const Caller caller = CallerOfCall(state, comm, args...);
    const std::optional<CallFault> fault = Count(state, name, caller);
    if (fault && fault->effect == CallFault::Effect::kFails)
      return static_cast<Answer>(fault->result);
    if (fault && fault->effect == CallFault::Effect::kStands)
      state.changed.wait(lock, [&, before = state.releases] { return state.releases > before; });
    lock.unlock();
    const Answer answer = real(args...);
    if constexpr (kMakes) Note(state, caller, args...);
    if (fault && fault->effect == CallFault::Effect::kComplains)
      return static_cast<Answer>(fault->result);
    return answer;
  }

 private:
  static constexpr bool kMakes =
      std::is_same_v<Answer (*)(Args...), decltype(NcclApi::CommInitRankConfig)>;

  static Caller CallerOfCall(const State& state, NcclCommHandle comm, const Args&... args) {
    if constexpr (kMakes) return Maker(state, args...);
    return CallerOf(state, comm);
  }
  static Caller Maker(const State& state, NcclCommHandle*, int, const NcclUniqueId&, int rank,
                      NcclConfig*) {
    const auto made = state.communicators.find(rank);
    return {rank, (made == state.communicators.end() ? 0 : made->second) + 1};
  }
  static void Note(State& state, Caller caller, NcclCommHandle* comm, int, const NcclUniqueId&, int,
                   NcclConfig*) {
    const std::lock_guard lock(state.mutex);
    state.communicators[caller.rank] = caller.communicator;
    state.callers[*comm] = caller;
  }
};

// But for what only gives a text.
template <auto kMember, typename Api>
void Wrap(Api& api, const char* name) {
  using Wrapper = Wrapped<kMember>;
  if constexpr (std::is_enum_v<typename Wrapper::Result>) {
    if (api.*kMember == nullptr) return;
    Wrapper::name = name;
    Wrapper::real = std::exchange(api.*kMember, &Wrapper::Call);
  }
}

}  // namespace

CallFaults::CallFaults() { Clear(); }
CallFaults::~CallFaults() { Release(); }

NcclApi CallFaults::Around(NcclApi api) {
#define RESILIENT_WRAP(NAME) Wrap<&NcclApi::NAME>(api, #NAME);
  RESILIENT_NCCL_FUNCTIONS(RESILIENT_WRAP)
  RESILIENT_NCCL_OPTIONAL_FUNCTIONS(RESILIENT_WRAP)
#undef RESILIENT_WRAP
  return api;
}

CudaApi CallFaults::Around(CudaApi api) {
#define RESILIENT_WRAP(NAME) Wrap<&CudaApi::NAME>(api, #NAME);
  RESILIENT_CUDA_FUNCTIONS(RESILIENT_WRAP)
  RESILIENT_CUDA_OPTIONAL_FUNCTIONS(RESILIENT_WRAP)
  RESILIENT_CUDA_OVERLOADED_FUNCTIONS(RESILIENT_WRAP)
  RESILIENT_CUDA_GRAPH_FUNCTIONS(RESILIENT_WRAP)
  RESILIENT_WRAP(StreamGetCaptureInfo)
#undef RESILIENT_WRAP
  return api;
}

void CallFaults::Set(CallFault fault) {
  Clear();
  const std::lock_guard lock(Faults().mutex);
  Faults().fault = std::move(fault);
}

void CallFaults::Clear() {
  const std::lock_guard lock(Faults().mutex);
  Faults().fault.reset();
  Faults().hit = false;
  Faults().matching = 0;
  Faults().calls.clear();
  Faults().communicators.clear();
}

void CallFaults::Release() {
  const std::lock_guard lock(Faults().mutex);
  Faults().fault.reset();
  ++Faults().releases;
  Faults().changed.notify_all();
}

bool CallFaults::Hit() const {
  const std::lock_guard lock(Faults().mutex);
  return Faults().hit;
}

std::map<std::string, int> CallFaults::Calls(int rank) const {
  const std::lock_guard lock(Faults().mutex);
  return Faults().calls[rank];
}

}  // namespace resilient::testing
