#include "runtime/recovery/flight.h"

#include <utility>

#include "runtime/base/log.h"

namespace resilient::recovery {

Status NotStarted(const Status& cause, const std::string& group, const std::string& what) {
  FailureDetail detail = cause.detail();
  detail.group = group;
  return Status(cause.code(),
                StrCat(cause.message(), "; ", what, " of group '", group,
                       "' was not started on this rank, which has not acknowledged this: catch "
                       "the error and call rebuild()"),
                std::move(detail));
}

bool IsOfCommunicator(StatusCode code) {
  return code == StatusCode::kMismatch || code == StatusCode::kCommStalled ||
         code == StatusCode::kCommFailed || code == StatusCode::kDeviceLost;
}

void Dismiss(Communicator& communicator, const Flight* flight) {
  if (flight != nullptr && flight->Ended()) {
    communicator.Abort(flight->cause());
  } else {
    communicator.Leave();
  }
}

OperationRecord::OperationRecord(std::shared_ptr<Flight> flight, std::shared_ptr<QuietBell> bell,
                                 std::string group, const Operation& operation)
    : flight_(std::move(flight)),
      bell_(std::move(bell)),
      group_(std::move(group)),
      summary_(OutlineOf(operation)) {}

Status OperationRecord::Outcome(const Status& status) {
  const bool ended = flight_->Ended();
  if (status.ok() && !ended) return status;
  if (IsOfCommunicator(status.code())) flight_->NoteBroken();
  // An operation that failed for a reason of its own says more than the fence that followed it.
  const bool own_reason = status.code() == StatusCode::kMismatch;
  std::lock_guard lock(submit_mutex_);
  const Status& told = ended && !own_reason ? flight_->cause() : status;
  return told.WithOperation(group_, seq_, Describe(summary_));
}

}  // namespace resilient::recovery
