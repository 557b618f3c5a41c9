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
  spec.group = plan.channel_.group->name();
  if (!plan.IsMessage()) spec.callbacks = plan.channel_.callbacks;
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

Channel ResilientBackend::ChannelOf(const Plan& plan) {
  if (plan.IsMessage()) return channels_->main();
  Result<Channel> channel = channels_->OfCollective();
  if (!channel.ok()) Raise(channel.status());
  return *std::move(channel);
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

void ResilientBackend::RaiseLate() {
  if (!context_->late_failure()->any()) return;
  const Status late = context_->late_failure()->Take(context_->session().epoch());
  if (!late.ok()) Raise(late);
}

WorkPtr ResilientBackend::Launch(Plan plan, bool waits) {
  context_->ledger()->Drain();
  HealIfDue();
  RaiseLate();
  BoundInTime(plan);
  plan.Place();
  plan.channel_ = ChannelOf(plan);
  if (has_batch_.load(std::memory_order_relaxed)) {
    if (WorkPtr work = LaunchInBatch(plan)) return work;
  }
  if (waits && plan.IsOnePiece() && plan.device() == kHost) return RunHere(std::move(plan));
  return Start(std::move(plan), nullptr);
}

// The operation may end within this call: then there is no Work, unless somebody wants to know.
WorkPtr ResilientBackend::RunHere(Plan plan) {
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  plan.Profile(profiled);
  Operation operation = std::move(plan.operations_.front());
  const Operation outline = OutlineOf(operation);
  operation.call_site = host_->CallSite();
  const std::uint64_t log_id = log_->Start(plan.name(), operation);
  const Channel channel = plan.channel_;
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
  host_->WithoutLock([&] { ran = channel.group->Run(std::move(operation), done, keep_waiting); });
  if (!ran.ok()) {
    log_->End(log_id, ran.status());
    Raise(ran.status());
  }
  NoteSequence(channel, outline, log_id, ran->seq);
  if (ran->outcome) {
    progress->EndLeases();
    log_->End(log_id, *ran->outcome);
    Status status = *std::move(ran->outcome);
    if (!status.ok() && status.detail().group.empty()) {
      status = status.WithOperation(channel.group->name(), ran->seq, Describe(outline));
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

ResilientBackend::Prepared ResilientBackend::Prepare(Plan plan,
                                                     const std::shared_ptr<Progress>& whole) {
  Prepared prepared;
  prepared.name = plan.name();
  prepared.channel = plan.channel_;
  const bool ends_in_stream = plan.EndsInStream();
  std::vector<Operation>& operations = prepared.operations = std::move(plan.operations_);
  const int device = operations.front().device;
  const auto progress = std::make_shared<Progress>(*context_, operations.size(), parts_.completion);
  progress->Hold(std::move(plan.lease_));
  if (ends_in_stream)
    operations.back().mark = progress->GoOnBehind(device, context_->session().epoch());
  WorkSpec spec = SpecOf(std::move(plan));
  spec.operation = OutlineOf(operations.front());
  // The profiler has its launch. Its end would have to be waited for on the host.
  if (device != kHost) spec.title = nullptr;
  prepared.work = c10::make_intrusive<WorkImpl>(context_, getRank(), std::move(spec), progress);
  if (prepared.work->NeedsFinisher()) Check(*host_, context_->finisher()->Start());
  Check(*host_, progress->Enlist(prepared.work));
  if (whole) progress->JoinTo(whole);
  if (device != kHost) prepared.loan = progress->Lend();
  const std::string call_site = host_->CallSite();
  for (Operation& operation : operations) {
    operation.call_site = call_site;
    operation.ends_on_host = device != kHost && !ends_in_stream;
    if (operation.kind == OpKind::kRecv && operation.peer == kAnyPeer) {
      operation.sender = prepared.work->source();
    }
  }
  return prepared;
}

Completion ResilientBackend::CompletionOf(const Prepared& prepared, std::uint64_t log_id) const {
  return [progress = prepared.work->progress(), loan = prepared.loan, log = log_,
          log_id](const Status& status) {
    log->End(log_id, status);
    progress->Complete(status);
  };
}

// The last of several has one already; the others need one to be captured.
std::shared_ptr<LaunchMark> ResilientBackend::MarkOf(Operation& operation,
                                                     const Prepared& prepared) {
  const bool is_one_of_several = prepared.operations.size() > 1 && operation.device != kHost;
  if (operation.mark == nullptr && is_one_of_several)
    operation.mark = std::make_shared<LaunchMark>();
  return operation.mark;
}

// Two threads may not put something into one graph at once: the communicator's is done with it.
// Not OK: the program was interrupted meanwhile.
Status ResilientBackend::AwaitCaptured(WorkImpl& work, const LaunchMark* mark) {
  Status status;
  if (mark != nullptr && mark->captured())
    host_->WithoutLock([&] { status = work.AwaitLaunch(*mark); });
  return status;
}

c10::intrusive_ptr<WorkImpl> ResilientBackend::Start(Plan plan,
                                                     const std::shared_ptr<Progress>& whole) {
  std::optional<at::RecordFunction> profiled;
  if (plan.device() != kHost) plan.Profile(profiled.emplace(at::RecordScope::USER_SCOPE));
  Prepared prepared = Prepare(std::move(plan), whole);
  const auto& progress = prepared.work->progress();
  bool any_started = false;
  Status interrupted;
  for (Operation& operation : prepared.operations) {
    if (!interrupted.ok()) {
      progress->AwaitEnd();
      progress->Complete(interrupted);
      continue;
    }
    const Operation outline = OutlineOf(operation);
    const std::uint64_t log_id = log_->Start(prepared.name, operation);
    const std::shared_ptr<LaunchMark> mark = MarkOf(operation, prepared);
    const auto sequence =
        prepared.channel.group->Submit(std::move(operation), CompletionOf(prepared, log_id));
    if (sequence.ok()) {
      NoteSequence(prepared.channel, outline, log_id, *sequence);
      prepared.work->set_sequence(*sequence);
      any_started = true;
      interrupted = AwaitCaptured(*prepared.work, mark.get());
      continue;
    }
    log_->End(log_id, sequence.status());
    if (!any_started) {
      progress->Discard(sequence.status());
      context_->ledger()->Drain();
      Raise(sequence.status());
    }
    progress->AwaitEnd();
    progress->Complete(sequence.status());  // Told when the Work is waited for.
  }
  Check(*host_, interrupted);
  return prepared.work;
}

void ResilientBackend::NoteSequence(const Channel& channel, const Operation& outline,
                                    std::uint64_t log_id, std::uint64_t sequence) {
  log_->SetSequence(log_id, sequence);
  if (IsPointToPoint(outline.kind)) return;  // Not all ranks of the group take part.
  if (channel.group != group_) return;       // A callback's count apart.
  if (outline.device == kHost) {
    last_sequence_.store(sequence, std::memory_order_relaxed);
    return;
  }
  last_on_device_.store(sequence, std::memory_order_relaxed);
  const std::uint64_t epoch = context_->session().epoch();
  const std::lock_guard lock(mutex_);
  device_use_ = {.epoch = epoch, .device = outline.device};
}

}  // namespace resilient::plugin
