#include "torch_plugin/csrc/work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/util/StringUtil.h>
#include <resilient/abort.h>

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

Progress::Progress(SessionContext& context, std::size_t parts)
    : ledger_(context.ledger()), finisher_(context.finisher()), pending_(parts) {}

void Progress::Attach(WorkImpl* work, std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  work_ = work;
  id_ = id;
}

bool Progress::RequireFinisher() {
  const std::lock_guard lock(mutex_);
  if (ended_) return false;
  requires_finisher_ = true;
  return true;
}

void Progress::Complete(const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok() && status_.ok()) status_ = status;
    if (--pending_ > 0) return;
    ended_ = true;
    if (!requires_finisher_) {
      ledger_->Retire(id_);  // First, so that the waiter's Drain finds it.
      done_ = true;
      changed_.notify_all();
      return;
    }
  }
  finisher_->Post([self = shared_from_this()] { self->FinishOnCallbackThread(); });
}

void Progress::FinishOnCallbackThread() {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    failed = !status_.ok();
  }
  Status copied;
  if (!failed) copied = work_->CopyBack();
  c10::intrusive_ptr<c10::ivalue::Future> future;  // Never the last reference: the Work has one.
  {
    const std::lock_guard lock(mutex_);
    if (!copied.ok()) status_ = copied;
    future = work_->future_;
    done_ = true;
    changed_.notify_all();
  }
  if (future) work_->CompleteFuture(*future);
  future.reset();
  ledger_->Retire(id_);
}

bool Progress::WaitFor(std::chrono::nanoseconds slice) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, slice, [this] { return done_; });
}

bool Progress::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

Status Progress::status() const {
  const std::lock_guard lock(mutex_);
  return done_ ? status_ : Status();
}

WorkImpl::WorkImpl(const std::shared_ptr<SessionContext>& context, int rank, WorkSpec spec,
                   std::size_t parts)
    : Work(rank, spec.type),
      context_(context),
      host_(context->host()),
      progress_(std::make_shared<Progress>(*context, parts)),
      spec_(std::move(spec)) {}

WorkImpl::~WorkImpl() = default;

bool WorkImpl::isCompleted() { return progress_->done(); }

bool WorkImpl::isSuccess() const { return progress_->done() && Outcome().ok(); }

std::exception_ptr WorkImpl::exception() const {
  if (!progress_->done()) return nullptr;
  const Status status = Outcome();
  return status.ok() ? nullptr : ToException(*host_, status);
}

std::vector<at::Tensor> WorkImpl::result() { return spec_.outputs; }

std::uint64_t WorkImpl::getSequencenumber() const { return sequence_.load(); }

Status WorkImpl::Outcome() const {
  Status status = progress_->status();
  if (status.ok()) {
    // A fence that nobody has acknowledged poisons what was completed before it, too.
    if (const auto context = context_.lock()) status = context->session().failure();
  }
  if (status.ok() || !status.detail().group.empty()) return status;
  return status.WithOperation(spec_.group, sequence_.load(), Describe(spec_.operation));
}

Status WorkImpl::WaitUntilDone(std::chrono::milliseconds timeout) {
  constexpr Duration kSlice = std::chrono::milliseconds(kInterruptPollMs);
  const SystemClock clock;
  const bool bounded = timeout > std::chrono::milliseconds::zero();
  const Deadline deadline = bounded ? Deadline::After(clock.Now(), timeout) : Deadline::Never();
  while (!progress_->WaitFor(bounded ? std::min(kSlice, deadline.LeftAt(clock.Now())) : kSlice)) {
    RESILIENT_RETURN_IF_ERROR(host_->Interrupted());
    if (deadline.ExpiredAt(clock.Now())) {
      return Status(
          StatusCode::kTimeout,
          c10::str("wait timeout after ", timeout.count(), " ms: ", Describe(spec_.operation), " #",
                   sequence_.load(), " of group '", spec_.group,
                   "' is still running; it goes on, and can be waited for again"));
    }
  }
  return Outcome();
}

bool WorkImpl::wait(std::chrono::milliseconds timeout) {
  Status status;
  host_->WithoutLock([&] { status = WaitUntilDone(timeout); });
  if (const auto context = context_.lock()) context->ledger()->Drain();
  Check(*host_, status);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkImpl::getFuture() {
  if (!progress_->done()) {
    if (const auto context = context_.lock()) Check(*host_, context->finisher()->Start());
  }
  auto fresh =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  {
    const std::lock_guard lock(progress_->mutex_);
    if (future_) return future_;
    future_ = fresh;
    if (!progress_->done_) {
      progress_->requires_finisher_ = true;  // Or it is at it already, and finds the future.
      return fresh;
    }
  }
  CompleteFuture(*fresh);
  return fresh;
}

Status WorkImpl::CopyBack() {
  try {
    const at::NoGradGuard no_grad;
    for (const auto& [to, from] : spec_.copies) to.copy_(from);
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, c10::str("the result of ", Describe(spec_.operation),
                                                  " could not be copied back: ", error.what()));
  }
  return Status::Ok();
}

void WorkImpl::CompleteFuture(c10::ivalue::Future& future) {
  if (host_->Ending()) return;  // Its callbacks belong to an interpreter that is gone.
  const Status status = Outcome();
  try {
    if (status.ok()) {
      future.markCompleted(c10::IValue(spec_.outputs));
    } else {
      future.setError(ToException(*host_, status));
    }
  } catch (const std::exception& error) {
    TORCH_WARN("a callback of the future of ", Describe(spec_.operation),
               " raised: ", error.what());
  }
}

}  // namespace resilient::plugin
