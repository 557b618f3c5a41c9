#include "runtime/recovery/flight.h"

#include <utility>

namespace resilient::recovery {
void Dismiss(Communicator& communicator, const Flight* flight) {
  if (flight != nullptr && flight->Ended()) {
    communicator.Abort(flight->cause());
  } else {
    communicator.Leave();
  }
}

OperationRecord::OperationRecord(std::shared_ptr<Flight> flight, std::string group,
                                 const Operation& operation)
    : flight_(std::move(flight)), group_(std::move(group)), summary_(OutlineOf(operation)) {}

Status OperationRecord::Outcome(const Status& status) {
  const bool ended = flight_->Ended();
  if (status.ok() && !ended) return status;
  // An operation that failed for a reason of its own says more than the fence that followed it.
  const bool own_reason = status.code() == StatusCode::kMismatch;
  if (own_reason || status.code() == StatusCode::kCommStalled ||
      status.code() == StatusCode::kCommFailed) {
    flight_->NoteBroken();
  }
  std::lock_guard lock(submit_mutex_);
  const Status& told = ended && !own_reason ? flight_->cause() : status;
  return told.WithOperation(group_, seq_, Describe(summary_));
}

}  // namespace resilient::recovery
