#include <utility>

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

using WorkPtr = ResilientBackend::WorkPtr;

WorkPtr ResilientBackend::LaunchInBatch(Plan& plan) {
  std::shared_ptr<Progress> whole;
  std::optional<Batch> forgotten;
  const std::uint64_t epoch = context_->session().epoch();
  {
    const std::lock_guard lock(mutex_);
    if (!batch_ || batch_->thread != std::this_thread::get_id()) return nullptr;
    if (batch_->epoch == epoch) {
      whole = batch_->progress;
    } else {
      forgotten = TakeBatchLocked();
    }
  }
  if (forgotten) Forget(*forgotten);
  if (!whole) return nullptr;
  whole->Hold(std::move(plan.lease_));  // All of a batch is one Work.
  const Operation first = OutlineOf(plan.operations_.front());
  const Channel channel = plan.channel_;
  std::optional<Prepared> held;
  c10::intrusive_ptr<WorkImpl> work;
  if (plan.IsMessageOnDevice()) {
    held = HoldBack(std::move(plan), whole);
    work = held->work;
  } else {
    work = Start(std::move(plan), whole);
  }
  std::unique_lock lock(mutex_);
  if (!batch_ || batch_->progress != whole) {  // Another thread's has taken its place.
    lock.unlock();
    Batch gone;
    if (held) gone.held.push_back(*std::move(held));
    Forget(gone);
    return work;
  }
  if (batch_->parts.empty()) {
    batch_->first = first;
    batch_->channel = channel;
  }
  batch_->parts.push_back(work->progress());
  if (held) {
    batch_->held.push_back(*std::move(held));
  } else {
    batch_->last_sequence = work->getSequencenumber();
  }
  return work;
}

// Two ranks that send to each other and receive, one behind the other, would wait for each other:
// on a device the first that waits for its peer holds up what is behind it.
ResilientBackend::Prepared ResilientBackend::HoldBack(Plan plan,
                                                      const std::shared_ptr<Progress>& whole) {
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  plan.Profile(profiled);
  Prepared prepared = Prepare(std::move(plan), whole);
  prepared.work->progress()->HoldBack();
  return prepared;
}

Result<std::uint64_t> ResilientBackend::SubmitHeld(std::vector<Prepared> held) {
  std::vector<Communicator::Submission> submissions;
  std::vector<Operation> outlines;
  std::vector<std::uint64_t> log_ids;
  for (Prepared& one : held) {
    Operation& operation = one.operations.front();
    outlines.push_back(OutlineOf(operation));
    log_ids.push_back(log_->Start(one.name, operation));
    submissions.push_back({std::move(operation), CompletionOf(one, log_ids.back())});
    one.work->progress()->LetGo();
  }
  const std::shared_ptr<LaunchMark> mark = submissions.back().op.mark;
  const auto sequences = group_->SubmitBatch(std::move(submissions));
  for (std::size_t i = 0; i < held.size(); ++i) {
    if (sequences.ok()) {
      NoteSequence(held[i].channel, outlines[i], log_ids[i], (*sequences)[i]);
      held[i].work->set_sequence((*sequences)[i]);
    } else {
      log_->End(log_ids[i], sequences.status());
      held[i].work->progress()->AwaitEnd();
      held[i].work->progress()->Complete(sequences.status());
    }
  }
  if (!sequences.ok()) return sequences.status();
  Check(*host_, AwaitCaptured(*held.back().work, mark.get()));
  return sequences->back();
}

std::optional<ResilientBackend::Batch> ResilientBackend::TakeBatchLocked() {
  std::optional<Batch> batch = std::move(batch_);
  batch_.reset();
  has_batch_.store(false, std::memory_order_relaxed);
  return batch;
}

void ResilientBackend::Forget(const Batch& batch) {
  for (const Prepared& one : batch.held) {
    const auto& progress = one.work->progress();
    progress->AwaitEnd();
    progress->LetGo();
    progress->Complete(Status(
        StatusCode::kCancelled,
        c10::str("group '", group_->name(), "': the batch in which it was started was never ",
                 "ended, and nothing of it was submitted")));
  }
}

// A batch that was never ended, because what was in it raised, is forgotten by the next one, and in
// the next generation. Until then it counts what the thread starts, and holds back its messages on
// devices.
void ResilientBackend::startCoalescing() {
  std::optional<Batch> forgotten;
  {
    const std::uint64_t epoch = context_->session().epoch();
    const std::lock_guard lock(mutex_);
    forgotten = TakeBatchLocked();
    batch_ = Batch{.thread = std::this_thread::get_id(),
                   .epoch = epoch,
                   // Ended by endCoalescing.
                   .progress = std::make_shared<Progress>(*context_, 1, parts_.completion),
                   .first = {},
                   .channel = channels_->main(),
                   .last_sequence = 0,
                   .parts = {},
                   .held = {}};
    has_batch_.store(true, std::memory_order_relaxed);
  }
  if (forgotten) Forget(*forgotten);
}

WorkPtr ResilientBackend::endCoalescing() {
  std::optional<Batch> batch;
  {
    const std::lock_guard lock(mutex_);
    batch = TakeBatchLocked();
  }
  if (!batch) {
    host_->Throw(
        Status(StatusCode::kFailedPrecondition,
               c10::str("group '", group_->name(), "': endCoalescing without startCoalescing")));
  }
  if (!batch->held.empty()) {
    const auto last = SubmitHeld(std::move(batch->held));
    if (!last.ok()) {
      batch->progress->Complete(Status::Ok());
      context_->ledger()->Drain();
      Raise(last.status());
    }
    batch->last_sequence = *last;
  }
  WorkSpec spec;
  spec.type = c10d::OpType::COALESCED;
  spec.title = nullptr;  // Its operations are in the profile.
  spec.group = batch->channel.group->name();
  spec.callbacks = batch->channel.callbacks;
  spec.operation = batch->first;
  // torch aborts groups within a batch, also behind a failure, and waits for that one.
  spec.nothing = batch->parts.empty();
  spec.parts = std::move(batch->parts);
  auto work = c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), batch->progress);
  work->set_sequence(batch->last_sequence);
  batch->progress->EnlistRunning(work);
  batch->progress->Complete(Status::Ok());
  return work;
}

}  // namespace resilient::plugin
