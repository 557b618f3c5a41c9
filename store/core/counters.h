#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <variant>

#include <resilient/status.h>

#include "store/core/messages.h"

// What the core counts, for metrics. Plain numbers without a clock; the shell gives them their
// names.
namespace resilient::store {

// The name of an operation in metrics.
template <typename OpType>
struct OpName;
#define RESILIENT_OP_NAME(OP, TEXT)                 \
  template <>                                       \
  struct OpName<OP> {                               \
    static constexpr std::string_view kText = TEXT; \
  }
RESILIENT_OP_NAME(Hello, "hello");
RESILIENT_OP_NAME(SetOp, "set");
RESILIENT_OP_NAME(GetOp, "get");
RESILIENT_OP_NAME(AddOp, "add");
RESILIENT_OP_NAME(CompareSetOp, "compare_set");
RESILIENT_OP_NAME(CheckOp, "check");
RESILIENT_OP_NAME(WaitOp, "wait");
RESILIENT_OP_NAME(DeleteOp, "delete");
RESILIENT_OP_NAME(NumKeysOp, "num_keys");
RESILIENT_OP_NAME(AppendOp, "append");
RESILIENT_OP_NAME(MultiGetOp, "multi_get");
RESILIENT_OP_NAME(MultiSetOp, "multi_set");
RESILIENT_OP_NAME(ListKeysOp, "list_keys");
RESILIENT_OP_NAME(QueuePushOp, "queue_push");
RESILIENT_OP_NAME(QueuePopOp, "queue_pop");
RESILIENT_OP_NAME(QueueLengthOp, "queue_length");
RESILIENT_OP_NAME(BarrierOp, "barrier");
RESILIENT_OP_NAME(ExchangeOp, "exchange");
RESILIENT_OP_NAME(CancelOp, "cancel");
RESILIENT_OP_NAME(HeartbeatOp, "heartbeat");
RESILIENT_OP_NAME(JoinOp, "join");
RESILIENT_OP_NAME(ReadyOp, "ready");
RESILIENT_OP_NAME(LeaveOp, "leave");
RESILIENT_OP_NAME(ReportOp, "report");
RESILIENT_OP_NAME(ExitReportOp, "exit_report");
RESILIENT_OP_NAME(StatusOp, "status");
RESILIENT_OP_NAME(WatchOp, "watch");
RESILIENT_OP_NAME(HoldOp, "hold");
RESILIENT_OP_NAME(ReleaseOp, "release");
RESILIENT_OP_NAME(DrainOp, "drain");
RESILIENT_OP_NAME(WaitingOp, "waiting");
RESILIENT_OP_NAME(WhereaboutsOp, "whereabouts");
#undef RESILIENT_OP_NAME

inline constexpr std::size_t kOpKinds = std::variant_size_v<Op>;

namespace internal {
template <std::size_t... Index>
constexpr std::array<std::string_view, sizeof...(Index)> OpNames(std::index_sequence<Index...>) {
  return {OpName<std::variant_alternative_t<Index, Op>>::kText...};
}
}  // namespace internal

// By Op::index().
inline constexpr std::array<std::string_view, kOpKinds> kOpNames =
    internal::OpNames(std::make_index_sequence<kOpKinds>());

// Counts by how something ended: by StatusCode, and two that are none. Thread: value type.
class Outcomes {
 public:
  static constexpr std::size_t kSize = 64;
  static constexpr std::size_t kWaits = kSize - 2;     // Answered later.
  static constexpr std::size_t kRepeated = kSize - 1;  // Answered from memory.
  static_assert(static_cast<std::size_t>(StatusCode::kInternal) < kWaits);

  void Add(StatusCode code) { ++counts_[static_cast<std::size_t>(code)]; }
  void Add(std::size_t special) { ++counts_[special]; }
  std::uint64_t operator[](std::size_t outcome) const { return counts_[outcome]; }
  std::uint64_t operator[](StatusCode code) const {
    return counts_[static_cast<std::size_t>(code)];
  }

 private:
  std::array<std::uint64_t, kSize> counts_{};
};

// Since the core was made. Thread: value type.
struct CoreCounters {
  std::array<Outcomes, kOpKinds> requests{};  // By Op::index().
  Outcomes waits_ended;                       // With an answer; those dropped are not among them.
  Outcomes fences;                            // By the code of the first cause.
  std::uint64_t leases_expired = 0;
  std::uint64_t sessions_opened = 0;
  std::uint64_t sessions_resumed = 0;  // Hellos of a session that was known.
};

// At one moment. Thread: value type.
struct CoreGauges {
  std::uint64_t epoch = 0;  // 0: not durable.
  std::size_t connections = 0;
  std::size_t sessions = 0;
  std::size_t jobs = 0;
  std::size_t worlds = 0;
  std::size_t live_members = 0;
  std::size_t keys = 0;
  std::size_t bytes = 0;
  std::size_t waits = 0;
  std::size_t result_bytes = 0;  // Answers that may be asked for again.
  std::size_t change_bytes = 0;  // Changes that watches may ask for.
  std::size_t seats = 0;         // Of all worlds.
};

}  // namespace resilient::store
