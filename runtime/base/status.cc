#include <resilient/status.h>

#include <array>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

const std::string kNoMessage;
const FailureDetail kNoDetail;

struct CodeEntry {
  StatusCode code;
  std::string_view name;
};

// Every code once; the order is that of the enum, so that CodeName is an index.
constexpr std::array kCodes = {
    CodeEntry{StatusCode::kOk, "OK"},
    CodeEntry{StatusCode::kRankLost, "RANK_LOST"},
    CodeEntry{StatusCode::kLeft, "LEFT"},
    CodeEntry{StatusCode::kStaleGeneration, "STALE_GENERATION"},
    CodeEntry{StatusCode::kCommStalled, "COMM_STALLED"},
    CodeEntry{StatusCode::kCommFailed, "COMM_FAILED"},
    CodeEntry{StatusCode::kMismatch, "MISMATCH"},
    CodeEntry{StatusCode::kDeadlock, "DEADLOCK"},
    CodeEntry{StatusCode::kStalled, "STALLED"},
    CodeEntry{StatusCode::kDeviceLost, "DEVICE_LOST"},
    CodeEntry{StatusCode::kDeviceStalled, "DEVICE_STALLED"},
    CodeEntry{StatusCode::kGrowth, "GROWTH"},
    CodeEntry{StatusCode::kDuplicateRank, "DUPLICATE_RANK"},
    CodeEntry{StatusCode::kWorldSize, "WORLD_SIZE"},
    CodeEntry{StatusCode::kJob, "JOB"},
    CodeEntry{StatusCode::kDuplicateDevice, "DUPLICATE_DEVICE"},
    CodeEntry{StatusCode::kSetting, "SETTING"},
    CodeEntry{StatusCode::kTorchVersion, "TORCH_VERSION"},
    CodeEntry{StatusCode::kForked, "FORKED"},
    CodeEntry{StatusCode::kJoinTimeout, "JOIN_TIMEOUT"},
    CodeEntry{StatusCode::kStoreLost, "STORE_LOST"},
    CodeEntry{StatusCode::kTimeout, "TIMEOUT"},
    CodeEntry{StatusCode::kOutcomeUnknown, "OUTCOME_UNKNOWN"},
    CodeEntry{StatusCode::kRefused, "REFUSED"},
    CodeEntry{StatusCode::kUnreachable, "UNREACHABLE"},
    CodeEntry{StatusCode::kResolve, "RESOLVE"},
    CodeEntry{StatusCode::kProtocol, "PROTOCOL"},
    CodeEntry{StatusCode::kAuth, "AUTH"},
    CodeEntry{StatusCode::kCancelled, "CANCELLED"},
    CodeEntry{StatusCode::kInterrupted, "INTERRUPTED"},
    CodeEntry{StatusCode::kInvalidArgument, "INVALID_ARGUMENT"},
    CodeEntry{StatusCode::kNotFound, "NOT_FOUND"},
    CodeEntry{StatusCode::kQueueEmpty, "QUEUE_EMPTY"},
    CodeEntry{StatusCode::kWrongType, "WRONG_TYPE"},
    CodeEntry{StatusCode::kTooLarge, "TOO_LARGE"},
    CodeEntry{StatusCode::kFailedPrecondition, "FAILED_PRECONDITION"},
    CodeEntry{StatusCode::kUnimplemented, "UNIMPLEMENTED"},
    CodeEntry{StatusCode::kResourceExhausted, "RESOURCE_EXHAUSTED"},
    CodeEntry{StatusCode::kCompacted, "COMPACTED"},
    CodeEntry{StatusCode::kInternal, "INTERNAL"},
};

constexpr bool InEnumOrder() {
  for (std::size_t i = 0; i < kCodes.size(); ++i) {
    if (static_cast<std::size_t>(kCodes[i].code) != i) return false;
  }
  return kCodes.size() == static_cast<std::size_t>(StatusCode::kInternal) + 1;
}
static_assert(InEnumOrder());

}  // namespace

std::string_view CodeName(StatusCode code) {
  const auto index = static_cast<std::size_t>(code);
  RESILIENT_CHECK(index < kCodes.size());
  return kCodes[index].name;
}

std::optional<StatusCode> CodeFromName(std::string_view name) {
  for (const CodeEntry& entry : kCodes) {
    if (entry.name == name) return entry.code;
  }
  return std::nullopt;
}

Status::Status(StatusCode code, std::string message, FailureDetail detail)
    : rep_(std::make_shared<const Rep>(Rep{code, std::move(message), std::move(detail)})) {
  RESILIENT_CHECK(code != StatusCode::kOk);
}

const std::string& Status::message() const { return rep_ ? rep_->message : kNoMessage; }

const FailureDetail& Status::detail() const { return rep_ ? rep_->detail : kNoDetail; }

std::string Status::ToString() const {
  if (ok()) return "OK";
  return StrCat("[resilient:", CodeName(rep_->code), "] ", rep_->message);
}

Status Status::WithOperation(std::string_view group, std::uint64_t seq,
                             std::string_view operation) const {
  if (ok()) return *this;
  // Seen by this very operation already: naming it twice would only lengthen the text.
  if (rep_->detail.group == group && rep_->detail.seq == seq) return *this;
  FailureDetail detail = rep_->detail;
  detail.group = std::string(group);
  detail.seq = seq;
  return Status(rep_->code,
                StrCat(rep_->message, "; ended ", operation, " #", seq, " of group '", group,
                       "' on this rank"),
                std::move(detail));
}

}  // namespace resilient
