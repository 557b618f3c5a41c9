#include "runtime/recovery/flight.h"

#include <utility>

namespace resilient::recovery {
namespace {

// The pointers are the caller's and are not looked at again; its lists and call site would be
// copied for nothing.
Operation Summarise(const Operation& operation) {
  Operation summary;
  summary.kind = operation.kind;
  summary.dtype = operation.dtype;
  summary.reduce = operation.reduce;
  summary.root = operation.root;
  summary.peer = operation.peer;
  summary.tag = operation.tag;
  summary.count = operation.count;
  return summary;
}

}  // namespace

void Dismiss(Communicator& communicator, const Flight* flight) {
  if (flight != nullptr && flight->Ended()) {
    communicator.Abort(flight->cause());
  } else {
    communicator.Leave();
  }
}

OperationRecord::OperationRecord(std::shared_ptr<Flight> flight, std::string group,
                                 const Operation& operation)
    : flight_(std::move(flight)), group_(std::move(group)), summary_(Summarise(operation)) {}

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
