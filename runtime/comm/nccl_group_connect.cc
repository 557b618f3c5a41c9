#include <algorithm>
#include <utility>

#include "runtime/base/exit_watch.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl_group.h"
#include "runtime/comm/nccl_options.h"

// How the ranks of an NCCL communicator come together.
namespace resilient {
namespace {

// What a rank says of how connecting went; empty: well. The first line is the code.
std::string Say(const Status& failure) {
  if (failure.ok()) return {};
  std::string text = StrCat(CodeName(failure.code()), "\n", failure.message());
  if (text.size() > kMeetingBytes) text.resize(kMeetingBytes);
  return text;
}

Status Understand(std::string_view said, int attempts, FailureDetail detail) {
  const std::size_t line = std::min(said.find('\n'), said.size());
  const StatusCode code = CodeFromName(said.substr(0, line)).value_or(StatusCode::kCommFailed);
  return Status(
      code == StatusCode::kOk ? StatusCode::kCommFailed : code,
      StrCat(said.substr(std::min(line + 1, said.size())), "; that was attempt ", attempts),
      std::move(detail));
}

bool IsThere(const NcclUniqueId& id) {
  return std::any_of(id.bytes.begin(), id.bytes.end(), [](char byte) { return byte != 0; });
}

}  // namespace

std::string NcclGroup::ControlName() const { return spec_.name + kControlSuffix; }

void NcclGroup::Start() {
  GroupSpec spec = spec_;
  spec.name = ControlName();
  control_ = NcclControl::Make(context_.control.Create(std::move(spec), port_->abort_cell()),
                               kProgressBytes, context_.doorbell);
  control_->Listen();
  BeginMeeting();
}

void NcclGroup::BeginMeeting() {
  state_ = State::kMeeting;
  connect_failure_ = Status::Ok();
  NcclIdentity identity = context_.options.identity;
  identity.options = ToString(spec_.nccl);
  if (spec_.rank == 0) {
    const NcclResult made = nccl_.GetUniqueId(&identity.id);
    connect_failure_ = NcclStatus(made, "ncclGetUniqueId");
    if (!connect_failure_.ok()) identity.id = {};  // The others hear of it when they compare.
  }
  meeting_ = NcclMeeting::Begin(control_->link(), EncodeIdentity(identity), context_.doorbell);
}

void NcclGroup::AwaitMeeting() {
  if (!meeting_->IsOver()) return;
  const std::shared_ptr<NcclMeeting> meeting = std::exchange(meeting_, nullptr);
  if (!meeting->status().ok()) return End(meeting->status());
  context_.waits->Forget(ControlName(), spec_.generation);
  const auto identities = IdentitiesOf(*meeting, spec_);
  if (!identities.ok()) return End(identities.status());  // The same on all ranks.
  const Status lacks = CheckLibrariesHave(spec_, context_.options.identity.nccl_version, cuda_);
  if (!lacks.ok()) return End(lacks);
  if (!IsThere(identities->front().id)) return Compare();
  Connect(identities->front().id);
}

void NcclGroup::Connect(const NcclUniqueId& id) {
  state_ = State::kConnecting;
  Operation bounds;
  bounds.stall = context_.options.connect_timeout;
  connecting_ = OpTimeouts(bounds, context_.now);
  connecting_.OnAllEntered(context_.now);
  if (Failed(cuda_.SetDevice(context_.options.device), "cudaSetDevice")) return Compare();
  NcclConfig config = ConfigOf(spec_.nccl);
  const DriverCall call(StrCat("ncclCommInitRankConfig of ", Where()));
  // The handle is there before the call has ended, and must be released even if it fails.
  if (Failed(nccl_.CommInitRankConfig(&comm_, port_->size(), id, spec_.rank, &config),
             "ncclCommInitRankConfig"))
    return Compare();
  AwaitConnected();
}

void NcclGroup::AwaitConnected() {
  constexpr auto kInTime = OpTimeouts::Verdict::kInTime;
  const std::optional<NcclResult> result = AsyncResult("connecting");
  const bool late = connecting_.Check(context_.now, port_->held_until()) != kInTime;
  if (result == NcclResult::kInProgress && late) {
    connect_failure_ = Status(
        StatusCode::kCommStalled,
        StrCat(Where(), " was not connected by NCCL within ",
               std::chrono::ceil<Millis>(context_.options.connect_timeout).count(),
               " ms; see whether NCCL_SOCKET_IFNAME names an interface that the hosts share, and "
               "what NCCL_DEBUG=INFO says"),
        Detail());
  } else if (result == NcclResult::kInProgress) {
    return;
  }
  Compare();
}

// Nobody goes on in a world that is connected for some of its ranks.
void NcclGroup::Compare() {
  if (state_ > State::kComparing) return;
  state_ = State::kComparing;
  if (!connect_failure_.ok()) RESILIENT_LOG(kWarn, connect_failure_.message());
  if (!connect_failure_.ok() && connect_failure_.code() != StatusCode::kCancelled) {
    failed_attempt_ = Attempt();
    next_tell_ = context_.now;
  }
  meeting_ = NcclMeeting::Begin(control_->link(), Say(connect_failure_), context_.doorbell);
}

void NcclGroup::AwaitCompared() {
  if (!meeting_->IsOver()) return;
  const std::shared_ptr<NcclMeeting> meeting = std::exchange(meeting_, nullptr);
  if (!meeting->status().ok()) return End(meeting->status());
  std::optional<int> failed;
  for (int rank = port_->size() - 1; rank >= 0; --rank) {
    const std::string failure = meeting->HeardFrom(rank);
    // Who has given up because of another one says nothing that explains it.
    const bool explains = !failure.starts_with(CodeName(StatusCode::kCancelled));
    if (!failure.empty() && (explains || !failed)) failed = rank;
  }
  if (failed) {
    if (++attempt_ < kAttempts) return BeginAnew();
    return Fail(Understand(meeting->HeardFrom(*failed), attempt_, DetailOf(spec_, *failed, 0)));
  }
  state_ = State::kReady;
  context_.waits->Forget(ControlName(), spec_.generation);
  next_tell_ = context_.now;
  context_.events.OnConnected(spec_.name, spec_.generation);
  StartPending();
}

void NcclGroup::BeginAnew() {
  if (comm_ != nullptr) {
    std::vector<NcclRelease::Work> works(1);
    works.front().comm = std::exchange(comm_, nullptr);
    works.front().name = spec_.name;
    context_.discarded.push_back(std::make_shared<NcclRelease>(
        nccl_, cuda_, context_.options.device, std::move(works), context_.doorbell));
  }
  BeginMeeting();
}

}  // namespace resilient
