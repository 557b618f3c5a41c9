#include <utility>

#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

using WorkPtr = ResilientBackend::WorkPtr;

WorkSpec ResilientBackend::SpecOf(Plan plan) {
  WorkSpec spec;
  spec.type = plan.type_;
  spec.title = plan.title_;
  spec.group = group_->name();
  if (!plan.operations_.empty()) spec.operation = OutlineOf(plan.operations_.front());
  spec.held = std::move(plan.held_);
  spec.outputs = std::move(plan.outputs_);
  spec.copies = std::move(plan.copies_);
  spec.finish = std::move(plan.finish_);
  return spec;
}

// What was added to the timeout ends with the Work that is the first behind it.
void ResilientBackend::BoundInTime(Plan& plan) const {
  if (plan.lease_.empty()) plan.lease_ = parts_.extension->Take();
  for (Operation& operation : plan.operations_) {
    context_->time().Bound(operation, options_->timeout, plan.lease_.total());
  }
}

void ResilientBackend::Raise(const Status& status) const {
  context_->heal().NoteRaised(status);
  host_->Throw(status);
}

void ResilientBackend::HealIfDue() {
  if (!context_->heal().due()) return;
  Status healed;
  host_->WithoutLock([&] { healed = context_->heal().Rebuild(); });
  if (!healed.ok()) Raise(healed);
}

WorkPtr ResilientBackend::Launch(Plan plan, bool waits) {
  context_->ledger()->Drain();
  HealIfDue();
  BoundInTime(plan);
  if (has_batch_.load(std::memory_order_relaxed)) {
    std::unique_lock lock(mutex_);
    if (batch_ && batch_->thread == std::this_thread::get_id()) {
      const std::shared_ptr<Progress> whole = batch_->progress;
      lock.unlock();
      whole->Hold(std::move(plan.lease_));  // All of a batch is one Work.
      const Operation first = OutlineOf(plan.operations_.front());
      auto work = Start(std::move(plan), whole);
      lock.lock();
      if (batch_ && batch_->progress == whole) {
        if (batch_->last_sequence == 0) batch_->first = first;
        batch_->last_sequence = work->getSequencenumber();
      }
      return work;
    }
  }
  if (waits && plan.IsOnePiece()) return RunHere(std::move(plan));
  return Start(std::move(plan), nullptr);
}

// The operation may end within this call: then there is no Work, unless somebody wants to know.
WorkPtr ResilientBackend::RunHere(Plan plan) {
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) {
    const std::vector<c10::IValue> inputs(plan.held_.begin(), plan.held_.end());
    profiled.before(plan.title(), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }
  Operation operation = std::move(plan.operations_.front());
  const Operation outline = OutlineOf(operation);
  operation.call_site = host_->CallSite();
  const std::uint64_t log_id = log_->Start(plan.name(), operation);
  const auto progress = std::make_shared<Progress>(*context_, 1, parts_.completion);
  progress->Hold(std::move(plan.lease_));
  const auto done = [progress, log = log_, log_id](const Status& status) {
    log->End(log_id, status);
    progress->Complete(status);
  };
  Status interrupted;
  const auto keep_waiting = [&] {
    if (interrupted.ok()) interrupted = host_->Interrupted();
    return interrupted.ok();
  };
  Result<Communicator::Ran> ran = Status(StatusCode::kInternal, "not run");
  host_->WithoutLock([&] { ran = group_->Run(std::move(operation), done, keep_waiting); });
  if (!ran.ok()) {
    log_->End(log_id, ran.status());
    Raise(ran.status());
  }
  NoteSequence(outline.kind, log_id, ran->seq);
  if (ran->outcome) {
    progress->EndLeases();
    log_->End(log_id, *ran->outcome);
    Status status = *std::move(ran->outcome);
    if (!status.ok() && status.detail().group.empty()) {
      status = status.WithOperation(group_->name(), ran->seq, Describe(outline));
    }
    if (!status.ok()) Raise(status);
    Check(*host_, interrupted);
    if (parts_.completion->empty()) return nullptr;
  }
  WorkSpec spec = SpecOf(std::move(plan));
  spec.title = nullptr;  // The profiler has it from here.
  spec.operation = outline;
  auto work = c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), progress);
  work->set_sequence(ran->seq);
  if (ran->outcome) {
    progress->Complete(Status::Ok());
  } else {
    progress->EnlistRunning(work);
  }
  Check(*host_, interrupted);
  return work;
}

c10::intrusive_ptr<WorkImpl> ResilientBackend::Start(Plan plan,
                                                     const std::shared_ptr<Progress>& whole) {
  std::vector<Operation> operations = std::move(plan.operations_);
  TimeoutExtension::Lease lease = std::move(plan.lease_);
  const char* name = plan.name();
  WorkSpec spec = SpecOf(std::move(plan));
  spec.operation = OutlineOf(operations.front());
  const auto progress = std::make_shared<Progress>(*context_, operations.size(), parts_.completion);
  progress->Hold(std::move(lease));
  auto work = c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), progress);
  if (work->NeedsFinisher()) Check(*host_, context_->finisher()->Start());
  Check(*host_, progress->Enlist(work));
  if (whole) progress->JoinTo(whole);
  const std::string call_site = host_->CallSite();
  bool any_started = false;
  for (Operation& operation : operations) {
    operation.call_site = call_site;
    if (operation.kind == OpKind::kRecv && operation.peer == kAnyPeer) {
      operation.sender = work->source();
    }
    const OpKind kind = operation.kind;
    const std::uint64_t log_id = log_->Start(name, operation);
    const auto sequence =
        group_->Submit(std::move(operation), [progress, log = log_, log_id](const Status& status) {
          log->End(log_id, status);
          progress->Complete(status);
        });
    if (sequence.ok()) {
      NoteSequence(kind, log_id, *sequence);
      work->set_sequence(*sequence);
      any_started = true;
      continue;
    }
    log_->End(log_id, sequence.status());
    if (!any_started) {
      progress->Discard(sequence.status());
      context_->ledger()->Drain();
      Raise(sequence.status());
    }
    progress->Complete(sequence.status());  // Told when the Work is waited for.
  }
  return work;
}

void ResilientBackend::NoteSequence(OpKind kind, std::uint64_t log_id, std::uint64_t sequence) {
  log_->SetSequence(log_id, sequence);
  if (!IsPointToPoint(kind)) last_sequence_.store(sequence, std::memory_order_relaxed);
}

// A batch that was never ended, because what was in it raised, is forgotten by the next one. Until
// then it only counts what the thread starts.
void ResilientBackend::startCoalescing() {
  const std::lock_guard lock(mutex_);
  batch_ = Batch{.thread = std::this_thread::get_id(),
                 // Ended by endCoalescing.
                 .progress = std::make_shared<Progress>(*context_, 1, parts_.completion),
                 .first = {},
                 .last_sequence = 0};
  has_batch_.store(true, std::memory_order_relaxed);
}

WorkPtr ResilientBackend::endCoalescing() {
  std::optional<Batch> batch;
  {
    const std::lock_guard lock(mutex_);
    batch = std::move(batch_);
    batch_.reset();
    has_batch_.store(false, std::memory_order_relaxed);
  }
  if (!batch) {
    host_->Throw(
        Status(StatusCode::kFailedPrecondition,
               c10::str("group '", group_->name(), "': endCoalescing without startCoalescing")));
  }
  WorkSpec spec;
  spec.type = c10d::OpType::COALESCED;
  spec.title = nullptr;  // Its operations are in the profile.
  spec.group = group_->name();
  spec.operation = batch->first;
  // torch aborts groups within a batch, also behind a failure, and waits for that one.
  spec.nothing = batch->last_sequence == 0;
  auto work = c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), batch->progress);
  work->set_sequence(batch->last_sequence);
  batch->progress->EnlistRunning(work);
  batch->progress->Complete(Status::Ok());
  return work;
}

}  // namespace resilient::plugin
