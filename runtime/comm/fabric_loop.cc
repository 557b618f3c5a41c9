#include "runtime/comm/fabric_loop.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

// Ended groups that are remembered. One more forgets the oldest.
constexpr std::size_t kMaxDeparted = 256;

}  // namespace

FabricLoop::FabricLoop(FileDescriptor listener, FabricRequests& requests, const Clock& clock,
                       CommunicatorEvents& events, std::uint64_t seed,
                       const CpuFabricOptions& options, std::size_t eager_limit,
                       std::unique_ptr<LinkEncryption> encryption)
    : requests_(requests),
      clock_(clock),
      context_{.events = events,
               .clock = clock,
               .now = clock.Now(),
               .shm_limit = options.shm_limit,
               .checksums = options.checksums,
               .eager_limit = eager_limit,
               .encryption = std::move(encryption),
               .finished = {}},
      seed_(seed),
      switchboard_(std::move(listener), *this),
      knocker_(events, seed) {}

void FabricLoop::Run() {
  while (true) {
    context_.now = clock_.Now();
    const bool busy = Turn();
    const bool ran = !context_.finished.empty();
    RunCompletions();
    RemoveDone();
    if (stopping_ && groups_.empty()) return;
    // A completion may have submitted the next operation.
    Wait(busy || ran);
  }
}

bool FabricLoop::Turn() {
  TakeRequests();
  knocker_.OnTime(context_.now);
  switchboard_.OnTime(context_.now);
  bool busy = false;
  for (const auto& group : groups_) {
    group->TakeMail();
    group->OnTime();
    busy = group->Pump() || busy;
  }
  return busy;
}

void FabricLoop::TakeRequests() {
  FabricRequests::Asked asked = requests_.Take();
  stopping_ = asked.stop;
  stop_by_ = asked.stop_by;
  for (auto& port : asked.created) AddGroup(std::move(port));
  if (!asked.created.empty()) switchboard_.Reroute();
  if (asked.knock) knocker_.Begin(std::move(*asked.knock), context_.now);
  if (!stopping_) return;
  for (const auto& group : groups_) {
    group->TakeMail();
    if (group->live()) group->Leave(SessionClosed());
    if (!stop_by_.ExpiredAt(context_.now)) continue;
    group->Pump();  // The goodbye goes out, however late this thread is run.
    group->End(SessionClosed());
  }
}

void FabricLoop::AddGroup(std::shared_ptr<GroupPort> port) {
  const GroupSpec& spec = port->spec();
  if (CommGroup* same = Find(spec.name, spec.generation, spec.attempt)) {
    if (same->live()) {
      const Status twice(StatusCode::kInvalidArgument,
                         StrCat("group ", spec.name, " exists already in generation ",
                                spec.generation, ", attempt ", spec.attempt));
      for (SubmittedOp& op : port->Close(twice))
        context_.finished.push_back({.port = port, .done = std::move(op.done), .status = twice});
      return;
    }
    same->End(SessionClosed());
  }
  std::erase_if(departed_, [&](const Departed& old) {
    return old.name == spec.name && old.generation == spec.generation &&
           old.attempt == spec.attempt;
  });
  if (std::pair(spec.generation, spec.attempt) > std::pair(newest_generation_, newest_attempt_)) {
    newest_generation_ = spec.generation;
    newest_attempt_ = spec.attempt;
  }
  seed_ += 0x9e3779b97f4a7c15u;
  groups_.push_back(std::make_unique<CommGroup>(std::move(port), context_, seed_));
}

void FabricLoop::RemoveDone() {
  std::erase_if(groups_, [&](const std::unique_ptr<CommGroup>& group) {
    if (!group->done()) return false;
    const GroupSpec& spec = group->spec();
    if (departed_.size() >= kMaxDeparted) departed_.pop_front();
    departed_.push_back({.name = spec.name,
                         .generation = spec.generation,
                         .attempt = spec.attempt,
                         .secret = spec.secret,
                         .made = group->made(),
                         .name_here = NameOf(spec.members[static_cast<std::size_t>(spec.rank)]),
                         .has_left = group->has_left()});
    return true;
  });
}

void FabricLoop::RunCompletions() {
  for (FinishedOp& finished : std::exchange(context_.finished, {})) {
    if (finished.done) finished.done(finished.status);
    finished.done = nullptr;  // What it holds goes before the communicator says it is quiet.
    finished.port->OnCompleted();
  }
}

CommGroup* FabricLoop::Find(const std::string& name, std::uint64_t generation,
                            std::uint64_t attempt) const {
  for (const auto& group : groups_) {
    const GroupSpec& spec = group->spec();
    if (!group->done() && spec.name == name && spec.generation == generation &&
        spec.attempt == attempt)
      return group.get();
  }
  return nullptr;
}

const FabricLoop::Departed* FabricLoop::FindDeparted(const Hello& hello) const {
  const auto found = std::ranges::find_if(departed_, [&hello](const Departed& old) {
    return old.name == hello.group && old.generation == hello.generation &&
           old.attempt == hello.attempt && ProvesSecret(hello, old.secret);
  });
  return found == departed_.end() ? nullptr : &*found;
}

void FabricLoop::Answer(const Hello& hello, const FileDescriptor& socket) const {
  const std::string* secret = nullptr;
  if (const CommGroup* group = Find(hello.group, hello.generation, hello.attempt)) {
    if (ProvesSecret(hello, group->spec().secret)) secret = &group->spec().secret;
  }
  if (secret == nullptr) {
    const Departed* departed = FindDeparted(hello);
    if (departed == nullptr) return;
    secret = &departed->secret;
  }
  const std::string reply = EncodeHelloReply(HelloVerdict::kAccepted, hello.proof, *secret);
  send(socket.get(), reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::string FabricLoop::ReplyOf(const Departed& group, const Hello& hello) {
  if (hello.made.digest == group.made.digest) {
    return EncodeHelloReply(HelloVerdict::kLeft, hello.proof, group.secret);
  }
  const std::string sender = StrCat("rank ", hello.from_world);
  const Status mismatch = OtherRanks(hello, sender, group.name_here, group.made);
  return EncodeHelloReply(HelloVerdict::kOtherRanks, hello.proof, group.secret,
                          EncodeFault(mismatch));
}

Routing FabricLoop::Route(const Hello& hello, FileDescriptor& socket) {
  if (hello.lane == Lane::kKnock) {
    Answer(hello, socket);
    return Routing::kRefuse;
  }
  if (CommGroup* group = Find(hello.group, hello.generation, hello.attempt)) {
    if (ProvesSecret(hello, group->spec().secret)) return group->Adopt(hello, socket);
    return RefuseStranger(hello);
  }
  if (const Departed* old = FindDeparted(hello)) {
    if (old->has_left) {
      const std::string reply = ReplyOf(*old, hello);
      send(socket.get(), reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return Routing::kRefuse;
  }
  if (std::pair(hello.generation, hello.attempt) < std::pair(newest_generation_, newest_attempt_)) {
    if (const auto left_out = old_generations_.May(context_.now)) {
      RESILIENT_LOG(kInfo, "closed a connection of generation ", hello.generation, ", attempt ",
                    hello.attempt, ": this rank is in generation ", newest_generation_,
                    ", attempt ", newest_attempt_, MoreLikeIt(*left_out));
    }
    return Routing::kRefuse;
  }
  if (IsOfNoView(hello)) return RefuseStranger(hello);
  return stopping_ ? Routing::kRefuse : Routing::kPark;
}

bool FabricLoop::IsOfNoView(const Hello& hello) const {
  const std::string* secret = nullptr;  // All groups of a view have one.
  for (const auto& group : groups_) {
    const GroupSpec& spec = group->spec();
    if (spec.generation != hello.generation || spec.attempt != hello.attempt) continue;
    if (secret != nullptr && *secret == spec.secret) continue;
    secret = &spec.secret;
    if (ProvesSecret(hello, *secret)) return false;
  }
  return secret != nullptr;
}

Routing FabricLoop::RefuseStranger(const Hello& hello) {
  if (const auto left_out = wrong_secrets_.May(context_.now)) {
    RESILIENT_LOG(kWarn, "closed a connection that says it is rank ", hello.from, " of group ",
                  hello.group, ": it does not know the secret of this job", MoreLikeIt(*left_out));
  }
  return Routing::kRefuse;
}

void FabricLoop::Wait(bool busy) {
  entries_.clear();
  watches_.clear();
  entries_.push_back({.fd = requests_.doorbell()->wake().fd(), .events = POLLIN});
  switchboard_.AddInterest(context_.now, entries_);
  const std::size_t first_link = entries_.size();
  Instant next = stopping_ ? stop_by_.when() : kNever;
  for (const auto& group : groups_) {
    group->AddInterest(entries_, watches_);
    next = std::min(next, group->NextTime());
  }
  knocker_.AddInterest(entries_, watches_);
  next = std::min({next, knocker_.NextTime(), switchboard_.NextTime()});
  PollUntil(entries_, clock_, Deadline::At(busy ? context_.now : next));
  context_.now = clock_.Now();
  if (entries_.front().revents != 0) requests_.doorbell()->wake().Drain();
  for (std::size_t i = first_link; i < entries_.size(); ++i) {
    if (entries_[i].revents == 0) continue;
    const Watch& watch = watches_[i - first_link];
    if (watch.link != nullptr) watch.link->OnReady(entries_[i].revents);
    if (watch.connector != nullptr) watch.connector->OnReady(context_.now);
  }
  switchboard_.OnReady(context_.now, entries_.data() + 1);
}

}  // namespace resilient
