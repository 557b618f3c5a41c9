#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

using c10d::OpType;
using WorkPtr = ResilientBackend::WorkPtr;

namespace {

// Tags from here on are ours: those of users are not negative numbers of 32 bits.
constexpr std::uint32_t kMonitoredTags = 0x8000'0000;

// How much longer than rank 0 the others wait: rank 0 gives its verdict at the end of its time.
constexpr auto kVerdictDelay = std::chrono::milliseconds(500);

at::Tensor Bytes(std::int64_t count) { return at::zeros({count}, at::kByte); }

}  // namespace

void ResilientBackend::RequirePeer(Plan& plan, int peer, int tag) {
  if (tag < 0) plan.Refuse(c10::str("tag ", tag, ": a tag is not negative"));
  if (peer < 0 || peer >= getSize() || peer == getRank()) {
    plan.Refuse(c10::str("peer ", peer, " is not another rank of a group of ", getSize(),
                         "; this is rank ", getRank()));
  }
}

WorkPtr ResilientBackend::send(Tensors& tensors, int destination, int tag) {
  Plan plan = Begin(OpType::SEND, "resilient:send");
  RequirePeer(plan, destination, tag);
  const at::Tensor& tensor = Only(plan, tensors);
  plan.AddResult(tensor);
  Operation& operation = plan.Add(OpKind::kSend, plan.Input(tensor));
  operation.peer = destination;
  operation.tag = static_cast<std::uint32_t>(tag);
  return Launch(std::move(plan), false);
}

WorkPtr ResilientBackend::recv(Tensors& tensors, int source, int tag) {
  Plan plan = Begin(OpType::RECV, "resilient:recv");
  RequirePeer(plan, source, tag);
  Operation& operation = plan.Add(OpKind::kRecv, plan.Output(Only(plan, tensors)));
  operation.peer = source;
  operation.tag = static_cast<std::uint32_t>(tag);
  return Launch(std::move(plan), false);
}

WorkPtr ResilientBackend::recvAnysource(Tensors& tensors, int tag) {
  Plan plan = Begin(OpType::RECVANYSOURCE, "resilient:recvAnySource");
  if (tag < 0) plan.Refuse(c10::str("tag ", tag, ": a tag is not negative"));
  if (getSize() == 1) plan.Refuse("no other rank could send to the only one of its group");
  Operation& operation = plan.Add(OpKind::kRecv, plan.Output(Only(plan, tensors)));
  operation.peer = kAnyPeer;
  operation.tag = static_cast<std::uint32_t>(tag);
  return Launch(std::move(plan), false);
}

// Each call has a tag of its own, so that what a late rank sends is not taken for its part of the
// next one. Where ranks were replaced they begin with new counts: then all do.
std::uint32_t ResilientBackend::NextMonitoredTag() {
  const std::uint64_t epoch = context_->session().epoch();
  const std::lock_guard lock(mutex_);
  if (epoch != monitored_epoch_) {
    monitored_epoch_ = epoch;
    monitored_barriers_ = 0;
  }
  return kMonitoredTags | (monitored_barriers_++ % kMonitoredTags);
}

c10::intrusive_ptr<WorkImpl> ResilientBackend::StartMonitored(OpKind kind,
                                                              const at::Tensor& message, int peer,
                                                              std::uint32_t tag) {
  Plan plan =
      Begin(kind == OpKind::kSend ? OpType::SEND : OpType::RECV, "resilient:monitored_barrier");
  Operation& operation = plan.Add(kind, plan.Input(message));
  operation.peer = peer;
  operation.tag = tag;
  plan.channel_ = channels_->main();
  return Start(std::move(plan), nullptr);
}

void ResilientBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  RequirePresent();
  auto timeout = options.timeout;
  if (timeout == c10d::kUnsetTimeout) {
    TimeoutExtension::Lease lease = parts_.extension->Take();
    timeout = options_->timeout + lease.total();
    lease.End();  // Nothing else of this thread starts before this has ended.
  }
  context_->ledger()->Drain();
  const std::uint32_t tag = NextMonitoredTag();
  if (getRank() == 0) {
    AwaitOthers(tag, timeout, wait_all_ranks);
  } else {
    AwaitVerdict(tag, timeout);
  }
}

void ResilientBackend::AwaitOthers(std::uint32_t tag, std::chrono::milliseconds timeout,
                                   bool wait_all_ranks) {
  const Clock& clock = context_->clock();
  const Deadline deadline = Deadline::After(clock.Now(), Saturated(timeout));
  std::vector<c10::intrusive_ptr<WorkImpl>> arrivals;
  for (int peer = 1; peer < getSize(); ++peer) {
    arrivals.push_back(StartMonitored(OpKind::kRecv, Bytes(1), peer, tag));
  }
  std::vector<int> missing;
  for (int peer = 1; peer < getSize(); ++peer) {
    Status status;
    host_->WithoutLock(
        [&] { status = arrivals[static_cast<std::size_t>(peer - 1)]->WaitUntil(deadline); });
    if (status.code() == StatusCode::kTimeout) {
      missing.push_back(peer);
    } else {
      Check(*host_, status);
    }
  }
  at::Tensor verdict = Bytes(getSize());
  for (const int peer : missing) verdict[peer] = 1;
  std::vector<c10::intrusive_ptr<WorkImpl>> answers;
  for (int peer = 1; peer < getSize(); ++peer) {
    auto answer = StartMonitored(OpKind::kSend, verdict, peer, tag);
    // For those who have not come it is there when they do. The others wait for it: it must be on
    // its way before this rank says goodbye.
    if (std::find(missing.begin(), missing.end(), peer) == missing.end()) {
      answers.push_back(std::move(answer));
    }
  }
  for (const auto& answer : answers) answer->wait();
  if (missing.empty()) return;
  host_->Throw(
      Status(StatusCode::kTimeout, c10::str("Rank 0 timed out in monitoredBarrier: ",
                                            MissingText(missing, timeout, wait_all_ranks))));
}

void ResilientBackend::AwaitVerdict(std::uint32_t tag, std::chrono::milliseconds timeout) {
  const at::Tensor verdict = Bytes(getSize());
  const auto answer = StartMonitored(OpKind::kRecv, verdict, 0, tag);
  StartMonitored(OpKind::kSend, Bytes(1), 0, tag);
  const Deadline deadline =
      Deadline::After(context_->clock().Now(), Saturated(timeout) + kVerdictDelay);
  Status status;
  host_->WithoutLock([&] { status = answer->WaitUntil(deadline); });
  const std::string waited =
      c10::str("Rank ", getRank(), " successfully reached monitoredBarrier, but received errors ",
               "while waiting for send/recv from rank 0: ");
  if (status.code() == StatusCode::kTimeout) {
    status = Status(StatusCode::kTimeout,
                    c10::str(waited, "it has given no verdict within ", timeout.count(), " ms"));
  }
  Check(*host_, status);
  std::vector<int> missing;
  const auto* flags = verdict.const_data_ptr<std::uint8_t>();
  for (int peer = 0; peer < getSize(); ++peer) {
    if (flags[peer] != 0) missing.push_back(peer);
  }
  if (missing.empty()) return;
  host_->Throw(Status(StatusCode::kTimeout, c10::str(waited, MissingText(missing, timeout, true))));
}

// "Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms"; one rank first where that is asked for.
std::string ResilientBackend::MissingText(const std::vector<int>& missing,
                                          std::chrono::milliseconds timeout, bool all) const {
  const std::string ranks = c10::Join(", ", missing);
  const bool many = missing.size() > 1;
  std::string text = all && many ? c10::str("Ranks ", ranks) : c10::str("Rank ", missing.front());
  text += c10::str(" failed to pass monitoredBarrier in ", timeout.count(), " ms");
  if (!all && many) text += c10::str(" (all that are missing: ", ranks, ")");
  std::vector<std::uint64_t> global;
  global.reserve(missing.size());
  for (const int rank : missing) {
    global.push_back(options_->global_ranks_in_group[static_cast<std::size_t>(rank)]);
  }
  const bool differ = !std::equal(
      missing.begin(), missing.end(), global.begin(),
      [](int group, std::uint64_t world) { return static_cast<std::uint64_t>(group) == world; });
  if (differ) {
    text += c10::str("; in the world: ", c10::Join(", ", global), "; group '", group_->name(), "'");
  }
  return text;
}

}  // namespace resilient::plugin
