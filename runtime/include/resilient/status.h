#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace resilient {

// What can go wrong, by the names of docs/semantics.md section 5. The first block reaches users as
// Python exceptions whose text begins with "[resilient:NAME]"; the second block stays inside the
// library.
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kRankLost,
  kLeft,
  kStaleGeneration,
  kCommStalled,
  kCommFailed,
  kMismatch,
  kDeadlock,
  kStalled,
  kDeviceLost,
  kDeviceStalled,
  kGrowth,  // No failure: the world takes in more ranks.
  kDuplicateRank,
  kWorldSize,
  kJob,
  kDuplicateDevice,
  kSetting,
  kTorchVersion,
  kForked,
  kJoinTimeout,
  kStoreLost,
  kTimeout,
  kOutcomeUnknown,
  kRefused,
  kUnreachable,
  kResolve,
  kProtocol,
  kAuth,
  // Internal: never the first cause of a user-visible failure of a collective.
  kCancelled,
  kInterrupted,
  kInvalidArgument,
  kNotFound,
  kQueueEmpty,
  kWrongType,
  kTooLarge,
  kFailedPrecondition,
  kUnimplemented,
  kResourceExhausted,
  kCompacted,  // A watch is further behind than the store keeps changes.
  kInternal,
};

// "RANK_LOST" for kRankLost; the stable name used in texts, in Python and on the wire.
std::string_view CodeName(StatusCode code);

// The inverse of CodeName; nullopt for a name that this build does not know.
std::optional<StatusCode> CodeFromName(std::string_view name);

// Who and where: the attributes every exception carries. A field that is not known keeps its
// default. Thread: value type.
struct FailureDetail {
  int rank = -1;                 // The rank that caused it (global rank).
  std::string host;              // Host of that rank.
  std::int64_t pid = 0;          // Process id of that rank on its host.
  std::uint64_t generation = 0;  // The generation that the failure ended.
  std::string group;             // Group of the operation that waited.
  std::uint64_t seq = 0;         // Sequence number of that operation in its group, from 1.
  double since_unix_s = 0;       // Wall clock, for display only: when the condition began.

  friend bool operator==(const FailureDetail&, const FailureDetail&) = default;
};

// Outcome of an operation that may fail in a way the caller must handle. One null pointer when OK.
// Thread: value type; copies share an immutable representation.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // REQUIRES: code != kOk. `message` says what happened, who, since when, where, and what to do.
  Status(StatusCode code, std::string message, FailureDetail detail = {});

  static Status Ok() { return {}; }

  bool ok() const { return rep_ == nullptr; }
  StatusCode code() const { return rep_ ? rep_->code : StatusCode::kOk; }
  const std::string& message() const;
  const FailureDetail& detail() const;

  // "[resilient:RANK_LOST] rank 2 (host a, pid 7) ..." ; "OK" when ok().
  std::string ToString() const;

  // The same failure as seen by the operation `group` #`seq`; a no-op when OK.
  Status WithOperation(std::string_view group, std::uint64_t seq, std::string_view operation) const;

 private:
  struct Rep {
    StatusCode code;
    std::string message;
    FailureDetail detail;
  };
  std::shared_ptr<const Rep> rep_;
};

// A value or the Status that explains its absence; the std::expected API where it overlaps.
// Thread: value type.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : state_(std::in_place_index<1>, std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Status error)
      : state_(std::in_place_index<0>, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return state_.index() == 1; }
  explicit operator bool() const { return ok(); }

  // OK when a value is held.
  Status status() const { return ok() ? Status() : std::get<0>(state_); }

  T& value() & { return std::get<1>(state_); }
  const T& value() const& { return std::get<1>(state_); }
  T&& value() && { return std::get<1>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T> state_;
};

// Returns early with the Status of `expr` when it is not OK.
#define RESILIENT_RETURN_IF_ERROR(expr)                                      \
  do {                                                                       \
    if (::resilient::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

}  // namespace resilient
