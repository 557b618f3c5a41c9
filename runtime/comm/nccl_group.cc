#include "runtime/comm/nccl_group.h"

#include <algorithm>
#include <array>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/mismatch.h"
#include "runtime/comm/nccl_launch.h"

namespace resilient {
namespace {

constexpr Duration kConnectPoll = Millis(5);
constexpr Duration kPoll = Millis(1);
// After a launch the thread does not sleep for this long: small operations take less than a
// sleep's granularity.
constexpr Duration kSpin = std::chrono::microseconds(200);
// How soon an error is noticed while nothing is in flight.
constexpr Duration kHealthInterval = Millis(100);

// After these no call on the device succeeds until the process ends.
constexpr std::array kDeviceLost = {
    CudaResult::kEccUncorrectable,
    CudaResult::kIllegalAddress,
    CudaResult::kLaunchTimeout,
    CudaResult::kContextIsDestroyed,
    CudaResult::kAssert,
    CudaResult::kHardwareStackError,
    CudaResult::kIllegalInstruction,
    CudaResult::kMisalignedAddress,
    CudaResult::kInvalidAddressSpace,
    CudaResult::kInvalidPc,
    CudaResult::kLaunchFailure,
};

bool IsDeviceLost(CudaResult result) {
  return std::find(kDeviceLost.begin(), kDeviceLost.end(), result) != kDeviceLost.end();
}

std::string IdKey(const GroupSpec& spec) {
  return StrCat("nccl/", spec.generation, "/", spec.attempt, "/", spec.name);
}

}  // namespace

void NcclIdMailbox::Put(Result<NcclUniqueId> id) {
  {
    std::lock_guard lock(mutex_);
    if (id_) return;
    id_ = std::move(id);
  }
  doorbell_->Ring();
}

std::optional<Result<NcclUniqueId>> NcclIdMailbox::Take() {
  std::lock_guard lock(mutex_);
  return std::exchange(id_, std::nullopt);
}

NcclGroup::NcclGroup(std::shared_ptr<GroupPort> port, NcclContext& context)
    : port_(std::move(port)),
      spec_(port_->spec()),
      context_(context),
      nccl_(context.options.nccl),
      cuda_(context.options.cuda),
      mailbox_(std::make_shared<NcclIdMailbox>(context.doorbell)),
      connect_by_(Deadline::After(context.now, context.options.connect_timeout)) {}

NcclGroup::~NcclGroup() {
  if (release_ == nullptr || release_->IsFinished()) return;
  RESILIENT_LOG(kError, "the end of ", Where(),
                " has not come back from NCCL; its memory and the thread stay until it does");
  std::vector<Completion> kept;
  for (Launched& one : launched_) kept.push_back(std::move(one.op.done));
  release_->Abandon(std::move(kept));
}

std::string NcclGroup::Where() const {
  return StrCat("rank ", spec_.rank, " (device ", context_.options.device, ") of group '",
                spec_.name, "', generation ", spec_.generation);
}

FailureDetail NcclGroup::Detail() const {
  return {.generation = spec_.generation, .group = spec_.name};
}

bool NcclGroup::Failed(NcclResult result, std::string_view what) {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return false;
  // The text is of the process, not of this communicator: it may be about another call.
  const char* last = nccl_.GetLastError(comm_);
  const std::string more =
      last == nullptr || *last == '\0' ? "" : StrCat(" (last error: ", last, ")");
  const Status status(StatusCode::kCommFailed,
                      StrCat(what, " failed on ", Where(), ": ", nccl_.GetErrorString(result), more,
                             "; NCCL_DEBUG=INFO makes NCCL tell more"),
                      Detail());
  RESILIENT_LOG(kWarn, status.message());
  End(status);
  return true;
}

bool NcclGroup::Failed(CudaResult result, std::string_view what) {
  if (result == CudaResult::kSuccess) return false;
  const bool lost = IsDeviceLost(result);
  const Status status(
      lost ? StatusCode::kDeviceLost : StatusCode::kCommFailed,
      StrCat(what, " failed on ", Where(), ": ", cuda_.GetErrorName(result), ", ",
             cuda_.GetErrorString(result),
             lost ? "; the device is lost to this process: it must be started again" : ""),
      Detail());
  RESILIENT_LOG(kWarn, status.message());
  End(status);
  return true;
}

void NcclGroup::FailToConnect(std::string_view why) {
  const Status status(
      StatusCode::kCommStalled,
      StrCat(Where(), " was not connected by NCCL within ",
             std::chrono::ceil<Millis>(context_.options.connect_timeout).count(), " ms: ", why,
             "; see whether all ranks make this group, and whether NCCL_SOCKET_IFNAME names an "
             "interface that they share"),
      Detail());
  RESILIENT_LOG(kWarn, status.message());
  End(status);
}

std::optional<NcclResult> NcclGroup::AsyncResult(std::string_view what) {
  NcclResult state = NcclResult::kSuccess;
  if (Failed(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError")) return std::nullopt;
  if (Failed(state, what)) return std::nullopt;
  return state;
}

void NcclGroup::Step() {
  // Not in the turn in which it began: completions run before their memory is let go.
  if (state_ == State::kReleasing) return AwaitReleased();
  TakeMail();
  Advance();
  CheckDeadline();  // Of what is complete by now nobody is told that it is late.
}

void NcclGroup::Advance() {
  switch (state_) {
    case State::kAwaitingId:
      return AwaitId();
    case State::kConnecting:
      return AwaitConnected();
    case State::kReady:
      CheckHealth();
      if (state_ == State::kReady) FinishLaunch();
      if (state_ == State::kReady) CompleteLaunched();
      if (state_ == State::kReady) StartPending();
      return;
    case State::kFlushing:
      return AwaitFlushed();
    case State::kReleasing:
    case State::kDone:
      return;
  }
}

void NcclGroup::TakeMail() {
  GroupPort::Mail mail = port_->Take();
  for (SubmittedOp& op : mail.ops) pending_.push_back(std::move(op));
  if (!mail.aborted.ok()) return End(mail.aborted);
  if (mail.leave) Leave(mail.left);
}

// The others wait for the first one, but for its batch, which goes with it.
void NcclGroup::CheckDeadline() {
  next_deadline_check_ = kNever;
  const bool any_launched = !launched_.empty();
  if (state_ > State::kReady || (!any_launched && pending_.empty())) return;
  const std::size_t rest = (any_launched ? launched_.front().op : pending_.front()).batch_rest;
  for (std::size_t i = 0; i <= rest; ++i) {
    if (EndIfLate(any_launched ? launched_[i].op : pending_[i])) return;
  }
}

bool NcclGroup::EndIfLate(SubmittedOp& op) {
  const OpTimeouts::Verdict verdict = op.timeouts.Check(context_.now, port_->held_until());
  next_deadline_check_ =
      std::min(next_deadline_check_, op.timeouts.NextCheck(context_.now, port_->held_until()));
  if (verdict == OpTimeouts::Verdict::kInTime) return false;
  FailureDetail detail = Detail();
  detail.seq = op.seq;
  detail.since_unix_s = LateSince(op, verdict, context_.now, context_.clock).since_unix_s;
  const Status status(
      StatusCode::kCommFailed,
      StrCat(Describe(op.op), " #", op.seq, " has not ended within its timeout of ",
             ToSeconds(op.op.timeout), " s on ", Where(),
             "; NCCL does not tell which rank it waits for: see what the others are in, or give "
             "the group a longer timeout="),
      std::move(detail));
  RESILIENT_LOG(kWarn, status.message());
  context_.events.OnStalled(spec_.name, spec_.generation, status);
  End(status);
  return true;
}

Instant NcclGroup::NextTime() const {
  switch (state_) {
    case State::kAwaitingId:
      return std::min(connect_by_.when(), next_deadline_check_);
    case State::kConnecting:
      return std::min(connect_by_.when(), context_.now + kConnectPoll);
    case State::kReady:
      if (launched_.empty()) return next_health_check_;
      return context_.now < spin_until_ ? context_.now : context_.now + kPoll;
    case State::kFlushing:
      return std::min(flush_by_.when(), context_.now + kPoll);
    case State::kReleasing:
    case State::kDone:
      return kNever;
  }
  return kNever;
}

void NcclGroup::Start() {
  const std::string key = IdKey(spec_);
  if (spec_.rank != 0) {
    return context_.ids.Await(
        key, [mailbox = mailbox_](Result<NcclUniqueId> id) { mailbox->Put(std::move(id)); });
  }
  NcclUniqueId id;
  if (Failed(nccl_.GetUniqueId(&id), "ncclGetUniqueId")) return;
  context_.ids.Publish(key, id, [mailbox = mailbox_, id](const Status& published) {
    mailbox->Put(published.ok() ? Result<NcclUniqueId>(id) : published);
  });
}

void NcclGroup::AwaitId() {
  const std::optional<Result<NcclUniqueId>> id = mailbox_->Take();
  if (id && id->ok()) return Connect(id->value());
  if (id) {
    return End(Status(
        id->status().code(),
        StrCat("the unique id of NCCL did not reach ", Where(), ": ", id->status().message()),
        Detail()));
  }
  if (connect_by_.ExpiredAt(context_.now)) FailToConnect("rank 0 has not published a unique id");
}

void NcclGroup::Connect(const NcclUniqueId& id) {
  if (Failed(cuda_.SetDevice(context_.options.device), "cudaSetDevice")) return;
  NcclConfig config;
  state_ = State::kConnecting;
  // The handle is there before the call has ended, and must be released even if it fails.
  if (Failed(nccl_.CommInitRankConfig(&comm_, port_->size(), id, spec_.rank, &config),
             "ncclCommInitRankConfig"))
    return;
  AwaitConnected();
}

void NcclGroup::AwaitConnected() {
  const std::optional<NcclResult> result = AsyncResult("connecting");
  if (!result) return;
  if (*result == NcclResult::kInProgress) {
    if (connect_by_.ExpiredAt(context_.now))
      FailToConnect("a rank is missing or cannot be reached");
    return;
  }
  state_ = State::kReady;
  context_.events.OnConnected(spec_.name, spec_.generation);
  StartPending();
}

// Nobody else would notice the failure of a communicator in which nothing moves.
void NcclGroup::CheckHealth() {
  if (launching_ || context_.now < next_health_check_) return;
  next_health_check_ = context_.now + kHealthInterval;
  (void)AsyncResult("the communicator");
}

void NcclGroup::FinishLaunch() {
  if (!launching_) return;
  const std::optional<NcclResult> result = AsyncResult("launching the last operation");
  if (!result || *result == NcclResult::kInProgress) return;
  OnLaunched();
}

void NcclGroup::OnLaunched() {
  launching_ = false;
  // What was launched with it has it by now.
  if (premul_sum_ && Failed(nccl_.RedOpDestroy(*std::exchange(premul_sum_, std::nullopt), comm_),
                            "ncclRedOpDestroy"))
    return;
  for (auto one = launched_.rbegin(); one != launched_.rend() && !one->mark.recorded; ++one) {
    if (Failed(cuda_.EventRecord(one->mark.event, one->mark.stream), "cudaEventRecord")) return;
    one->mark.recorded = true;
  }
}

void NcclGroup::CompleteLaunched() {
  bool any = false;
  busy_streams_.clear();
  for (Launched& one : launched_) {
    // Not asked behind one that is not done: it may have got done since, and would be overtaken.
    const auto busy = std::find(busy_streams_.begin(), busy_streams_.end(), one.mark.stream);
    if (busy != busy_streams_.end()) continue;
    const CudaResult result =
        one.mark.recorded ? cuda_.EventQuery(one.mark.event) : CudaResult::kNotReady;
    if (result == CudaResult::kNotReady) {
      busy_streams_.push_back(one.mark.stream);
      continue;
    }
    if (Failed(result, "work on the device")) return;
    one.left_device = true;
    any = true;
  }
  if (!any) return;
  // Asked after the events: a kernel that NCCL has stopped leaves the device as one that has done
  // its work. While a launch is under way the answer is not to be had.
  const std::optional<NcclResult> health = AsyncResult("the communicator");
  if (!health || *health == NcclResult::kInProgress) return;
  for (Launched& one : launched_) {
    if (!one.left_device) continue;
    if (one.op.op.sender != nullptr) *one.op.op.sender = one.op.op.peer;
    free_events_.push_back(one.mark.event);
    finished_.push_back({.done = std::move(one.op.done), .status = Status::Ok()});
  }
  std::erase_if(launched_, [](const Launched& one) { return one.left_device; });
}

void NcclGroup::StartPending() {
  while (state_ == State::kReady && !launching_ && !pending_.empty() &&
         launched_.size() < kMaxLaunched) {
    if (!LaunchNext()) return;
  }
}

bool NcclGroup::LaunchNext() {
  if (pending_.front().op.kind == OpKind::kBarrier && !IsScratchReady()) return false;
  if (!MakePremulSum(pending_.front().op)) return false;
  const std::size_t operations = pending_.front().batch_rest + 1;
  for (std::size_t i = 0; i < operations; ++i) {
    CudaEventHandle event = TakeEvent();
    if (event == nullptr) return false;
    launched_.push_back({.op = std::move(pending_.front())});
    pending_.pop_front();
    Launched& launched = launched_.back();
    launched.mark = {.event = event,
                     .stream = static_cast<CudaStreamHandle>(launched.op.op.stream)};
  }
  const NcclResult result = Launch(operations);
  const SubmittedOp& first = launched_[launched_.size() - operations].op;
  if (Failed(result, StrCat("launching ", Describe(first.op), " #", first.seq))) return false;
  spin_until_ = context_.now + kSpin;
  launching_ = result == NcclResult::kInProgress;
  if (!launching_) OnLaunched();
  return true;
}

// The last of launched_.
NcclResult NcclGroup::Launch(std::size_t operations) {
  const NcclLaunch launch{.nccl = nccl_,
                          .comm = comm_,
                          .rank = spec_.rank,
                          .premul_sum = premul_sum_.value_or(NcclReduceOp::kSum),
                          .scratch = scratch_ == nullptr ? nullptr : scratch_->memory()};
  if (operations == 1) return LaunchNccl(launch, launched_.back().op.op);
  std::vector<const Operation*> batch;
  for (std::size_t i = launched_.size() - operations; i < launched_.size(); ++i)
    batch.push_back(&launched_[i].op.op);
  return LaunchNcclBatch(launch, batch);
}

bool NcclGroup::IsScratchReady() {
  if (scratch_ == nullptr) {
    scratch_ = std::make_shared<NcclScratch>(cuda_, context_.options.device, context_.doorbell);
  }
  return scratch_->IsReady() && !Failed(scratch_->result(), "cudaMalloc");
}

// It must be made while nothing is under way, and is for one operation: they come with any factor.
bool NcclGroup::MakePremulSum(const Operation& op) {
  if (op.reduce != ReduceOp::kPremulSum) return true;
  std::array<std::byte, 8> scalar = PremulScalar(op);
  NcclReduceOp made = NcclReduceOp::kSum;
  if (Failed(nccl_.RedOpCreatePreMulSum(&made, scalar.data(), ReductionOf(op).type,
                                        NcclScalarResidence::kHostImmediate, comm_),
             "ncclRedOpCreatePreMulSum"))
    return false;
  premul_sum_ = made;
  return true;
}

CudaEventHandle NcclGroup::TakeEvent() {
  CudaEventHandle event = nullptr;
  if (!free_events_.empty()) {
    event = free_events_.back();
    free_events_.pop_back();
    return event;
  }
  if (Failed(cuda_.EventCreateWithFlags(&event, kCudaEventDisableTiming), "cudaEventCreate"))
    return nullptr;
  return event;
}

void NcclGroup::Leave(const Status& status) {
  if (state_ >= State::kFlushing) return;
  if (state_ != State::kReady || !launched_.empty() || !pending_.empty()) return End(status);
  end_status_ = status;
  for (SubmittedOp& op : port_->Close(status)) pending_.push_back(std::move(op));
  // An abort could take from the peers what NCCL has not sent yet.
  if (Failed(nccl_.CommFinalize(comm_), "ncclCommFinalize")) return;
  state_ = State::kFlushing;
  flush_by_ = Deadline::After(context_.now, context_.options.flush_timeout);
}

void NcclGroup::AwaitFlushed() {
  const std::optional<NcclResult> result = AsyncResult("leaving");
  if (!result) return;
  if (*result == NcclResult::kSuccess) return Release(NcclRelease::Kind::kDestroy);
  if (flush_by_.ExpiredAt(context_.now)) Release(NcclRelease::Kind::kAbort);
}

void NcclGroup::End(const Status& cause) {
  if (state_ >= State::kReleasing) return;
  if (end_status_.ok()) end_status_ = cause;
  for (SubmittedOp& op : port_->Close(end_status_)) pending_.push_back(std::move(op));
  Release(NcclRelease::Kind::kAbort);
}

void NcclGroup::Release(NcclRelease::Kind kind) {
  if (comm_ == nullptr) {
    state_ = State::kDone;
    return;
  }
  state_ = State::kReleasing;
  NcclRelease::Work work{.kind = kind,
                         .device = context_.options.device,
                         .comm = std::exchange(comm_, nullptr),
                         .marks = {},
                         .events = std::exchange(free_events_, {}),
                         .scratch = std::exchange(scratch_, nullptr),
                         .name = spec_.name};
  for (const Launched& one : launched_) work.marks.push_back(one.mark);
  release_ = std::make_unique<NcclRelease>(nccl_, cuda_, std::move(work), context_.doorbell);
}

void NcclGroup::AwaitReleased() {
  if (!release_->IsFinished()) return;
  release_.reset();
  for (Launched& one : std::exchange(launched_, {})) {
    one.op.done = nullptr;  // What it holds goes before the communicator says it is quiet.
    port_->OnCompleted();
  }
  state_ = State::kDone;
}

void NcclGroup::RunCompletions() {
  for (Finished& one : std::exchange(finished_, {})) {
    if (one.done) one.done(one.status);
    one.done = nullptr;
    port_->OnCompleted();
  }
  if (end_status_.ok()) return;
  for (Launched& one : launched_) {
    if (!std::exchange(one.told, true) && one.op.done) one.op.done(end_status_);
  }
  for (SubmittedOp& op : std::exchange(pending_, {})) {
    if (op.done) op.done(end_status_);
    op.done = nullptr;
    port_->OnCompleted();
  }
}

}  // namespace resilient
