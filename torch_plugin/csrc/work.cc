#include "torch_plugin/csrc/work.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <resilient/abort.h>
#include <resilient/float_environment.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/device_stream.h"

namespace resilient::plugin {
namespace {

// How long an interrupted program is kept within a launch into its capture.
constexpr Duration kLaunchEnds = std::chrono::seconds(5);
// How soon what was captured has ended behind the end of the capture.
constexpr Duration kCaptureEnds = std::chrono::seconds(1);

struct AwaitedOperation {
  const std::string& group;
  int device = kHost;
  bool point_to_point = false;
  std::uint64_t seq = 0;
};

// A thread that waits for an operation, told to the session once it has waited for a while. Owner:
// the waiter's stack. Thread: confined.
class BlockedWait {
 public:
  BlockedWait(const std::weak_ptr<SessionContext>& context, AwaitedOperation operation)
      : context_(context), operation_(operation) {}
  ~BlockedWait() {
    if (const auto context = begun_ ? context_.lock() : nullptr) context->session().EndBlocked();
  }
  BlockedWait(const BlockedWait&) = delete;
  BlockedWait& operator=(const BlockedWait&) = delete;

  void Begin() {
    if (std::exchange(begun_, true)) return;
    if (const auto context = context_.lock()) {
      context->session().BeginBlocked(CommunicatorName(operation_.group, operation_.device),
                                      operation_.point_to_point, operation_.seq);
    }
  }

 private:
  const std::weak_ptr<SessionContext>& context_;
  const AwaitedOperation operation_;
  bool begun_ = false;
};

std::uint64_t NextKey() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

Progress::Progress(SessionContext& context, std::size_t parts,
                   std::shared_ptr<const CompletionHooks> hooks)
    : ledger_(context.ledger()),
      finisher_(context.finisher()),
      late_failure_(context.late_failure()),
      hooks_(std::move(hooks)),
      key_(NextKey()),
      pending_(parts) {}

Status Progress::Enlist(const c10::intrusive_ptr<WorkImpl>& work) {
  const auto id = ledger_->Add(work);
  if (!id.ok()) return id.status();
  const std::lock_guard lock(mutex_);
  work_ = work.get();
  id_ = *id;
  requires_finisher_ = requires_finisher_ || work->NeedsFinisher();
  return Status::Ok();
}

void Progress::EnlistRunning(const c10::intrusive_ptr<WorkImpl>& work) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  work_ = work.get();
  id_ = ledger_->AddRunning(work);
}

void Progress::Discard(const Status& why) {
  std::shared_ptr<Progress> whole;
  {
    const std::lock_guard lock(mutex_);
    status_ = why;
    ended_ = true;
    ended_at_ = clock_.Now();
    done_ = true;
    leases_.clear();  // They are for what is started next.
    whole = std::move(whole_);
    ledger_->Retire(id_);
  }
  if (whole) whole->Complete(Status::Ok());  // The caller is told at once.
}

void Progress::JoinTo(const std::shared_ptr<Progress>& whole) {
  {
    const std::lock_guard lock(whole->mutex_);
    ++whole->pending_;
  }
  const std::lock_guard lock(mutex_);
  whole_ = whole;
}

void Progress::Hold(TimeoutExtension::Lease lease) {
  if (lease.empty()) return;
  const std::lock_guard lock(mutex_);
  leases_.push_back(std::move(lease));
}

void Progress::EndLeases() {
  const std::lock_guard lock(mutex_);
  EndLeasesLocked();
}

void Progress::EndLeasesLocked() {
  for (TimeoutExtension::Lease& lease : leases_) lease.End();
  leases_.clear();
}

void Progress::Complete(const Status& status) {
  std::shared_ptr<Progress> whole;
  Status outcome;
  bool finish = false;
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok() && status_.ok()) status_ = status;
    if (--pending_ > 0) return;
    ended_ = true;
    ended_at_ = clock_.Now();
    EndLeasesLocked();  // Before a waiter goes on to what it starts next.
    if (!status_.ok() && joined_.load()) late_failure_->Note(status_, epoch_.load());
    finish = requires_finisher_;
    if (!finish) {
      RetireLocked();  // First, so that the waiter's Drain finds it.
      done_ = true;
      whole = std::move(whole_);
      outcome = status_;
      changed_.notify_all();
    }
  }
  if (finish) {
    finisher_->Post([self = shared_from_this()] { self->FinishOnCallbackThread(); });
  } else {
    RunHooks(outcome);
  }
  if (whole) whole->Complete(outcome);
}

void Progress::FinishOnCallbackThread() {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    failed = !status_.ok();
  }
  Status finished;
  if (!failed) finished = work_->Finish();
  work_->EndProfiling();
  c10::intrusive_ptr<c10::ivalue::Future> future;  // Never the last reference: the Work has one.
  std::shared_ptr<Progress> whole;
  Status outcome;
  {
    const std::lock_guard lock(mutex_);
    if (!finished.ok()) status_ = std::move(finished);
    future = work_->future_;
    whole = std::move(whole_);
    outcome = status_;
    done_ = true;
    changed_.notify_all();
  }
  RunHooks(outcome);
  if (whole) whole->Complete(outcome);
  if (future) work_->CompleteFuture(*future);
  future.reset();
  const std::lock_guard lock(mutex_);
  RetireLocked();
}

// Behind a failure the device may still write into the memory: until the completions are destroyed.
void Progress::RetireLocked() {
  if (lent_ && !status_.ok()) {
    retires_behind_loan_ = true;
  } else {
    ledger_->Retire(id_);
  }
}

std::shared_ptr<void> Progress::Lend() {
  {
    const std::lock_guard lock(mutex_);
    lent_ = true;
  }
  return {nullptr, [self = shared_from_this()](std::nullptr_t) { self->EndLoan(); }};
}

void Progress::EndLoan() {
  const std::lock_guard lock(mutex_);
  lent_ = false;
  if (std::exchange(retires_behind_loan_, false)) ledger_->Retire(id_);
}

std::shared_ptr<LaunchMark> Progress::GoOnBehind(int device, std::uint64_t epoch) {
  epoch_.store(epoch);
  device_.store(device);
  return {shared_from_this(), &mark_};
}

bool Progress::WaitForLaunch(Duration slice) const { return done() || mark_.WaitFor(slice); }

Status Progress::Join() {
  const int device = this->device();
  if (device == kHost) return Status::Ok();  // Refused since: it is done.
  const Result<ExecutionStream> stream = CurrentStream(device);
  if (!stream.ok()) return stream.status();
  {
    // Who has ended by now has not been told of it.
    const std::lock_guard lock(mutex_);
    if (ended_) return Status::Ok();
    joined_.store(true);
  }
  return mark_.Join(*stream);
}

// Not before it is done: whoever hears of a Work later than of its end asks the Work.
void Progress::RunHooks(const Status& outcome) const {
  if (!outcome.ok() || hooks_->empty()) return;
  hooks_->Run(key_, std::chrono::duration<float, std::milli>(duration()).count());
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

Duration Progress::duration() const {
  const std::lock_guard lock(mutex_);
  return (ended_ ? ended_at_ : clock_.Now()) - started_;
}

WorkImpl::WorkImpl(const std::shared_ptr<SessionContext>& context, int rank, WorkSpec spec,
                   std::shared_ptr<Progress> progress)
    : Work(rank, spec.type, spec.title, spec.held),
      context_(context),
      host_(context->host()),
      progress_(std::move(progress)),
      spec_(std::move(spec)) {
  if (NeedsFinisher()) callers_state_.emplace();
}

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
  if (status.ok() && !spec_.nothing) {
    // A fence that nobody has acknowledged poisons what was completed before it, too.
    if (const auto context = context_.lock()) status = context->session().failure();
  }
  if (status.ok() || !status.detail().group.empty()) return status;
  return status.WithOperation(CommunicatorName(spec_.group, spec_.operation.device),
                              sequence_.load(), Describe(spec_.operation));
}

bool WorkImpl::NeedsFinisher() const {
  // A profiler that watches runs code of its own at the end of an operation.
  return !spec_.copies.empty() || spec_.finish || recordFunctionEndCallback_;
}

std::vector<std::shared_ptr<Progress>> WorkImpl::Parts() const {
  return spec_.parts.empty() ? std::vector{progress_} : spec_.parts;
}

bool WorkImpl::joined() const {
  const auto parts = Parts();
  return std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part->joined(); });
}

bool WorkImpl::GoesOnInStream() const {
  const auto on_device = [](const auto& part) { return part->device() != kHost; };
  if (spec_.parts.empty()) return on_device(progress_);
  return std::all_of(spec_.parts.begin(), spec_.parts.end(), on_device);
}

// Its end comes behind the capture: who waits within it goes on in the stream, whatever the bound.
bool WorkImpl::IsCaptured() const {
  const auto parts = Parts();
  return std::any_of(parts.begin(), parts.end(),
                     [](const auto& part) { return part->mark_.captured(); });
}

// It would wait for ever: what is to end it comes behind it.
Status WorkImpl::CheckSubmitted() const {
  if (!progress_->held_back()) return Status::Ok();
  return Status(StatusCode::kFailedPrecondition,
                c10::str(Describe(spec_.operation), " of group '", spec_.group,
                         "' was started in a batch that has not ended: wait for it behind the "
                         "block of its coalescing manager (in C++: behind endCoalescing)"));
}

template <typename Reached>
Status WorkImpl::WaitWhileNot(const Reached& reached, Deadline deadline) {
  constexpr Duration kSlice = std::chrono::milliseconds(kInterruptPollMs);
  const SystemClock clock;
  const auto slice = [&] {
    return deadline.IsNever() ? kSlice : std::min(kSlice, deadline.LeftAt(clock.Now()));
  };
  BlockedWait blocked(context_, {spec_.group, spec_.operation.device,
                                 IsPointToPoint(spec_.operation.kind), sequence_.load()});
  while (!reached(slice())) {
    blocked.Begin();
    RESILIENT_RETURN_IF_ERROR(host_->Interrupted());
    if (!deadline.IsNever() && deadline.ExpiredAt(clock.Now())) {
      return Status(
          StatusCode::kTimeout,
          c10::str(Describe(spec_.operation), " #", sequence_.load(), " of group '", spec_.group,
                   "' is still running; it goes on, and can be waited for again"));
    }
  }
  return Status::Ok();
}

Status WorkImpl::WaitUntil(Deadline deadline) {
  RESILIENT_RETURN_IF_ERROR(CheckSubmitted());
  RESILIENT_RETURN_IF_ERROR(
      WaitWhileNot([this](Duration slice) { return progress_->WaitFor(slice); }, deadline));
  return Outcome();
}

Status WorkImpl::AwaitLaunch(const LaunchMark& mark) {
  const auto reached = [&mark](Duration slice) { return mark.WaitFor(slice); };
  const Status interrupted = WaitWhileNot(reached, Deadline::Never());
  // The program may end the capture then, which is not to happen within the launch.
  if (!interrupted.ok()) (void)mark.WaitFor(kLaunchEnds);
  return interrupted;
}

Status WorkImpl::JoinStream() {
  RESILIENT_RETURN_IF_ERROR(CheckSubmitted());
  for (const std::shared_ptr<Progress>& part : Parts()) {
    RESILIENT_RETURN_IF_ERROR(WaitWhileNot(
        [&part](Duration slice) { return part->WaitForLaunch(slice); }, Deadline::Never()));
    if (part->mark_.ended()) {
      // How it went is known in a moment: it may never have been launched.
      RESILIENT_RETURN_IF_ERROR(WaitWhileNot(
          [&part](Duration slice) { return part->WaitFor(slice); }, Deadline::Never()));
    } else {
      const Status joined = part->Join();
      // A capture that is over can be joined by nobody, and all that it had has ended.
      if (!joined.ok() && !(part->mark_.captured() && part->WaitFor(kCaptureEnds))) return joined;
    }
  }
  return Outcome();
}

bool WorkImpl::wait(std::chrono::milliseconds timeout) {
  const bool bounded = timeout > std::chrono::milliseconds::zero();
  const Deadline deadline =
      bounded ? Deadline::After(SystemClock().Now(), Saturated(timeout)) : Deadline::Never();
  const bool joins = GoesOnInStream() && (!bounded || IsCaptured());
  Status status;
  host_->WithoutLock([&] { status = joins ? JoinStream() : WaitUntil(deadline); });
  if (const auto context = context_.lock()) context->ledger()->Drain();
  if (status.code() == StatusCode::kTimeout && bounded && !progress_->done()) {
    status = Status(status.code(),
                    c10::str("wait timeout after ", timeout.count(), " ms: ", status.message()));
  }
  if (!status.ok()) {
    if (const auto context = context_.lock()) context->heal().NoteRaised(status);
    host_->Throw(status);
  }
  return true;
}

void WorkImpl::synchronize() {
  if (spec_.operation.device != kHost) wait();
}

void WorkImpl::blockCurrentStream() {
  if (spec_.operation.device == kHost) return Work::blockCurrentStream();
  wait();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkImpl::getFuture() {
  if (!progress_->done()) {
    if (const auto context = context_.lock()) Check(*host_, context->finisher()->Start());
  }
  std::vector<c10::Device> devices;
  if (spec_.operation.device != kHost) devices.push_back(ToDevice(spec_.operation.device));
  auto fresh = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::move(devices));
  {
    const std::lock_guard lock(progress_->mutex_);
    if (future_) return future_;
    future_ = fresh;
    if (!progress_->done_) {
      if (!callers_state_ && !progress_->ended_) callers_state_.emplace();
      progress_->requires_finisher_ = true;  // Or it is at it already, and finds the future.
      return fresh;
    }
  }
  CompleteFuture(*fresh);
  return fresh;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkImpl::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([result, host = host_](c10::ivalue::Future& future) {
    if (host->Ending()) return;
    const auto outcome =
        future.hasError() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    result->markCompleted(c10::IValue(static_cast<std::int64_t>(outcome)));
  });
  return result;
}

float WorkImpl::getDuration() const {
  return std::chrono::duration<float, std::milli>(progress_->duration()).count();
}

void WorkImpl::EndProfiling() {
  if (!recordFunctionEndCallback_ || host_->Ending()) return;
  recordFunctionEndCallback_();
  recordFunctionEndCallback_ = nullptr;
}

// Runs `body` with the thread-local state of the call that began the operation: what torch allows
// depends on it, and what a callback does may.
template <typename Body>
void WorkImpl::AsCaller(const Body& body) {
  std::optional<at::ThreadLocalStateGuard> guard;
  if (callers_state_) guard.emplace(*callers_state_);
  body();
}

Status WorkImpl::Finish() {
  try {
    AsCaller([this] {
      const at::NoGradGuard no_grad;
      const FloatEnvironment environment;  // A sum of sparse tensors is computed here.
      const int device = spec_.operation.device;
      const c10::DeviceGuard guard(ToDevice(device));
      for (const auto& [to, from] : spec_.copies) to.copy_(from);
      if (spec_.finish) spec_.finish();
      // This thread's stream is none that a caller goes on in.
      if (device != kHost) SynchronizeCurrentStream(device);
    });
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, c10::str("the result of ", Describe(spec_.operation),
                                                  " could not be put in place: ", error.what()));
  }
  return Status::Ok();
}

void WorkImpl::CompleteFuture(c10::ivalue::Future& future) {
  if (host_->Ending()) return;  // Its callbacks belong to an interpreter that is gone.
  const Status status = Outcome();
  try {
    AsCaller([&] {
      // The callbacks run on the device that is current here.
      const c10::DeviceGuard guard(ToDevice(spec_.operation.device));
      if (status.ok()) {
        future.markCompleted(c10::IValue(spec_.outputs));
      } else {
        future.setError(ToException(*host_, status));
      }
    });
  } catch (const std::exception& error) {
    TORCH_WARN("a callback of the future of ", Describe(spec_.operation),
               " raised: ", error.what());
  }
}

Status AwaitJoined(SessionContext& context) {
  Status first;
  context.host()->WithoutLock([&] {
    for (const auto& work : context.ledger()->InFlight()) {
      auto* ours = dynamic_cast<WorkImpl*>(work.get());
      if (ours == nullptr || !ours->joined() || ours->isCompleted()) continue;
      const Status status = ours->WaitUntil(Deadline::Never());
      if (first.ok()) first = status;
      if (status.code() == StatusCode::kInterrupted) return;
    }
  });
  context.ledger()->Drain();
  const Status late = context.late_failure()->Take(context.session().epoch());
  return first.ok() ? late : first;
}

}  // namespace resilient::plugin
