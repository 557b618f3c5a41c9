#include "tests/sim/verdict_sim.h"

#include <algorithm>
#include <set>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

using std::chrono::seconds;

constexpr Duration kLookEvery = Millis(100);
constexpr Duration kRunFor = seconds(90);
// Semantics, row 8, from when its last rank has waited for a second; and what the lines take.
constexpr Duration kFoundWithin = seconds(6);
// Until the next question about progress, which comes every ten seconds, and its answer.
constexpr Duration kToldWithin = seconds(16);
constexpr Duration kOutdatedBy = seconds(4);
// Of the settings. What a device does before an operation takes less each, and more together.
constexpr Duration kStall = seconds(45);
constexpr Duration kDeviceStall = seconds(15);
constexpr Duration kSaidBefore = seconds(2);
// Semantics, rows 8b and 9, from when somebody waits; and until the first question.
constexpr Duration kHangFoundWithin = seconds(8);

std::string NameOfGroup(int group) { return StrCat("g", group); }

}  // namespace

VerdictSim::VerdictSim(VerdictSimOptions options) : options_(options), random_(options.seed) {
  ranks_.resize(2 + random_.Below(Chance(20) ? 31 : 7));
  MakeGroups();
  MakeProgram();
  if (Chance(50)) SpoilProgram();
  PlanSilences();
  PlanHangs();
}

Duration VerdictSim::Between(int low_ms, int high_ms) {
  const auto range = static_cast<std::uint64_t>(high_ms - low_ms + 1);
  return Millis(low_ms + static_cast<int>(random_.Below(range)));
}

void VerdictSim::MakeGroups() {
  std::vector<int> world(ranks_.size());
  for (std::size_t i = 0; i < world.size(); ++i) world[i] = static_cast<int>(i);
  groups_.push_back(world);
  for (std::uint64_t more = random_.Below(4); more > 0; --more) {
    std::vector<int> members;
    for (const int rank : world) {
      if (Chance(60)) members.push_back(rank);
    }
    if (members.size() < 2) continue;
    if (Chance(40)) on_device_.insert(static_cast<int>(groups_.size()));
    groups_.push_back(std::move(members));
  }
}

// One order of all steps, of which each rank runs those that it has a part in: so it comes to its
// end.
void VerdictSim::MakeProgram() {
  std::vector<std::uint64_t> seqs(groups_.size(), 0);
  for (int step = 0; step < 25; ++step) {
    if (Chance(35)) {
      const int from = static_cast<int>(random_.Below(ranks_.size()));
      const int to = static_cast<int>(random_.Below(ranks_.size()));
      if (from == to) continue;
      const Kind kind = Chance(40) ? Kind::kLargeSend : Kind::kSend;
      ranks_[static_cast<std::size_t>(from)].steps.push_back({.kind = kind, .peer = to});
      ranks_[static_cast<std::size_t>(to)].steps.push_back({.kind = Kind::kRecv, .peer = from});
      continue;
    }
    const auto group = random_.Below(groups_.size());
    Kind kind = Chance(50) ? Kind::kAll : (Chance(50) ? Kind::kChain : Kind::kBroadcast);
    if (on_device_.contains(static_cast<int>(group))) kind = Kind::kDevice;
    const Step shared{.kind = kind, .group = static_cast<int>(group), .seq = ++seqs[group]};
    for (const int rank : groups_[group])
      ranks_[static_cast<std::size_t>(rank)].steps.push_back(shared);
  }
}

void VerdictSim::SpoilProgram() {
  Rank& rank = ranks_[random_.Below(ranks_.size())];
  if (rank.steps.size() < 2) return;
  const std::size_t at = random_.Below(rank.steps.size() - 1);
  Step& one = rank.steps[at];
  Step& other = rank.steps[at + 1];
  if (one.kind == Kind::kSend || one.kind == Kind::kLargeSend) {
    rank.steps.erase(rank.steps.begin() + static_cast<std::ptrdiff_t>(at));
  } else if (one.peer != other.peer || one.group != other.group) {
    std::swap(one, other);  // The numbers of a group stay in order.
  }
}

void VerdictSim::PlanSilences() {
  for (std::uint64_t more = random_.Below(6); more > 0; --more) {
    const int from = static_cast<int>(random_.Below(ranks_.size()));
    const int to = static_cast<int>(random_.Below(ranks_.size()));
    const Duration length = Chance(20) ? Between(10000, 40000) : Between(500, 9000);
    const bool both = Chance(60);
    if (from == to) continue;
    ++count_.silences;
    At(now_ + Between(0, 20000), [this, from, to, length, both] {
      silent_until_[{from, to}] = now_ + length;
      if (both) silent_until_[{to, from}] = now_ + length;
    });
  }
}

void VerdictSim::PlanHangs() {
  const auto any = [this]() -> Rank& { return ranks_[random_.Below(ranks_.size())]; };
  if (Chance(30)) {
    Rank& rank = any();
    At(now_ + Between(0, 4000), [&rank] { rank.device.hangs = true; });
  }
  if (Chance(10)) {
    Rank& rank = any();
    At(now_ + Between(0, 4000), [&rank] { rank.spins = true; });
  }
}

// ---- The links ----

void VerdictSim::OnLink(int from, int to, std::function<void()> what) {
  const std::pair link(from, to);
  Instant when = now_ + (Chance(5) ? Between(0, 3000) : Between(0, 30));
  when = std::max({when, silent_until_[link] + Between(0, 30), link_[link]});
  link_[link] = when;
  At(when, std::move(what));
}

// ---- The ranks ----

void VerdictSim::Compute(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (self.at == self.steps.size()) {
    ++count_.ended;
    return;
  }
  self.acted = now_;
  At(now_ + Between(1, Chance(10) ? 3000 : 200), [this, rank] { Enter(rank); });
}

void VerdictSim::Enter(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (self.spins) return;  // For ever.
  self.in_call = true;
  self.since = self.acted = now_;
  const Kind kind = StepOf(self).kind;
  const bool message = kind == Kind::kSend || kind == Kind::kLargeSend || kind == Kind::kRecv;
  message ? EnterMessage(rank) : EnterCollective(rank);
  if (kind == Kind::kDevice) return;
  At(now_ + kWaitTellAfter, [this, rank, at = self.at] { Tell(rank, at); });
  Look(rank);
}

int VerdictSim::PlaceIn(int group, int rank) const {
  const std::vector<int>& members = MembersOf(group);
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

void VerdictSim::EnterCollective(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const Step step = StepOf(self);
  self.entered[step.group] = step.seq;
  if (step.kind == Kind::kDevice) return GiveToDevice(rank);
  if (step.kind == Kind::kChain) return PassWord(rank, step.group, step.seq);
  const bool tells = step.kind == Kind::kAll || MembersOf(step.group).front() == rank;
  if (!tells) return;
  for (const int peer : MembersOf(step.group)) {
    if (peer == rank) continue;
    OnLink(rank, peer, [this, rank, peer, step] {
      std::uint64_t& heard = ranks_[static_cast<std::size_t>(peer)].heard[{step.group, rank}];
      heard = std::max(heard, step.seq);
      Look(peer);
    });
  }
}

void VerdictSim::TellPeers(int rank, int group, std::function<void(Rank& peer)> what) {
  for (const int peer : MembersOf(group)) {
    if (peer == rank) continue;
    OnLink(rank, peer, [this, peer, what] {
      what(ranks_[static_cast<std::size_t>(peer)]);
      Look(peer);
    });
  }
}

bool VerdictSim::IsQueued(Rank& rank) {
  if (!rank.in_call || StepOf(rank).kind != Kind::kDevice) return false;
  return rank.device.begun[StepOf(rank).group] < StepOf(rank).seq;
}

// What it has to do before: nothing to speak of, or some things one after the other.
void VerdictSim::GiveToDevice(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const Step step = StepOf(self);
  self.device.given = now_;
  TellPeers(rank, step.group, [rank, step](Rank& peer) {
    std::uint64_t& submitted = peer.submitted[{step.group, rank}];
    submitted = std::max(submitted, step.seq);
  });
  Instant when = now_ + Between(0, 30);
  for (std::uint64_t before = Chance(10) ? 1 + random_.Below(4) : 0; before > 0; --before) {
    when += Between(1000, 9000);
    At(when, [this, &self] {
      if (!self.device.hangs) self.device.moved = now_;
    });
  }
  At(when, [this, rank, at = self.at] { Begin(rank, at); });
}

void VerdictSim::Begin(int rank, std::size_t at) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (self.device.hangs) return;
  const Step step = StepOf(self);
  self.device.begun[step.group] = step.seq;
  self.device.moved = self.since = now_;
  TellPeers(rank, step.group, [rank, step](Rank& peer) {
    std::uint64_t& heard = peer.heard[{step.group, rank}];
    heard = std::max(heard, step.seq);
  });
  At(now_ + kWaitTellAfter, [this, rank, at] { Tell(rank, at); });
  Look(rank);
}

// Up along the members once each has entered, and down again.
void VerdictSim::PassWord(int rank, int group, std::uint64_t seq) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const std::vector<int>& members = MembersOf(group);
  const int place = PlaceIn(group, rank);
  const auto neighbour = [&](int at) { return members[static_cast<std::size_t>(at)]; };
  const bool first = place == 0;
  const bool last = place + 1 == static_cast<int>(members.size());
  if (self.entered[group] < seq) return;
  const bool from_left = first || self.passed[{group, neighbour(place - 1)}] >= seq;
  const bool from_right = last ? from_left : self.passed[{group, neighbour(place + 1)}] >= seq;
  const auto pass = [&](int to) {
    OnLink(rank, to, [this, rank, to, group, seq] {
      std::uint64_t& passed = ranks_[static_cast<std::size_t>(to)].passed[{group, rank}];
      if (passed >= seq) return;
      passed = seq;
      PassWord(to, group, seq);
      Look(to);
    });
  };
  if (from_left && !last) pass(neighbour(place + 1));
  if (from_right && !first) pass(neighbour(place - 1));
}

void VerdictSim::EnterMessage(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const int peer = StepOf(self).peer;
  if (StepOf(self).kind == Kind::kRecv) {
    const std::uint64_t begun = ++self.begun[peer];
    OnLink(rank, peer, [this, rank, peer, begun] {
      ranks_[static_cast<std::size_t>(peer)].wanted[rank] = begun;
      Look(peer);
    });
    return;
  }
  const std::uint64_t sent = ++self.sent[peer];
  OnLink(rank, peer, [this, rank, peer, sent] {
    ranks_[static_cast<std::size_t>(peer)].arrived[rank] = sent;
    Look(peer);
  });
}

std::vector<int> VerdictSim::Missing(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const Step& step = StepOf(self);
  switch (step.kind) {
    case Kind::kSend:
      return {};
    case Kind::kLargeSend:
      return self.wanted[step.peer] < self.sent[step.peer] ? std::vector<int>{step.peer}
                                                           : std::vector<int>{};
    case Kind::kRecv:
      return self.arrived[step.peer] < self.begun[step.peer] ? std::vector<int>{step.peer}
                                                             : std::vector<int>{};
    case Kind::kAll:
    case Kind::kDevice:
    case Kind::kChain:
    case Kind::kBroadcast:
      break;
  }
  std::vector<int> missing;
  const std::vector<int>& members = MembersOf(step.group);
  const int place = PlaceIn(step.group, rank);
  for (int at = 0; at < static_cast<int>(members.size()); ++at) {
    const int peer = members[static_cast<std::size_t>(at)];
    if (step.kind == Kind::kBroadcast && at > 0) break;
    if (peer == rank || (step.kind == Kind::kChain && std::abs(at - place) != 1)) continue;
    auto& heard = step.kind == Kind::kChain ? self.passed : self.heard;
    if (heard[{step.group, peer}] < step.seq) missing.push_back(peer);
  }
  return missing;
}

void VerdictSim::Look(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (!self.in_call || IsQueued(self) || !Missing(rank).empty()) return;
  if (StepOf(self).kind == Kind::kDevice) self.device.moved = now_;
  self.in_call = false;
  ++self.at;
  Compute(rank);
}

// ---- Their lines to the server ----

void VerdictSim::Tell(int rank, std::size_t at) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (!self.in_call || self.at != at) return;
  ToServer(rank, ReportOf(rank));
  At(now_ + kWaitTellAfter, [this, rank, at] { Tell(rank, at); });
}

WaitingReport VerdictSim::ReportOf(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  WaitingReport report;
  report.generation = 1;
  report.stall = kStall;
  report.device_stall = kDeviceStall;
  if (!self.in_call || IsQueued(self) || now_ - self.since < kWaitTellAfter) return report;
  const Step& step = StepOf(self);
  WaitingCall call;
  call.group = NameOfGroup(step.group);
  call.operation.point_to_point = step.peer >= 0;
  call.operation.sends = step.kind == Kind::kLargeSend;
  call.operation.needs_all = step.peer < 0 && step.kind != Kind::kBroadcast;
  call.operation.seq = step.peer >= 0 ? self.at + 1 : step.seq;
  call.operation.age = now_ - self.since;
  call.operation.missing = Missing(rank);
  if (step.kind == Kind::kDevice) {
    const auto late = std::ranges::stable_partition(call.operation.missing, [&](int peer) {
      return self.submitted[{step.group, peer}] < step.seq;
    });
    call.operation.not_begun.assign(late.begin(), late.end());
    call.operation.missing.erase(late.begin(), late.end());
  }
  call.blocked = true;
  report.blocked = true;
  report.calls.push_back(std::move(call));
  return report;
}

DeviceProgress VerdictSim::DeviceOf(Rank& rank, int group) const {
  DeviceProgress told;
  const bool hides = options_.planted == PlantedAccount::kNoDevice;
  told.begun = hides ? rank.entered[group] : rank.device.begun[group];
  const bool waits = rank.in_call && rank.steps[rank.at].kind == Kind::kDevice;
  const bool queued =
      waits && rank.device.begun[rank.steps[rank.at].group] < rank.steps[rank.at].seq;
  told.runs = waits && !queued;
  const bool stands = options_.planted == PlantedAccount::kDeviceNotMoved;
  const Instant since = stands ? rank.device.given : std::max(rank.device.given, rank.device.moved);
  if (queued && !hides) told.still = now_ - since;
  return told;
}

// As the observer of a process does. In a call of ours a main thread sleeps, but one that waits for
// a device spins, as the driver has it.
void VerdictSim::Sample(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const double elapsed = std::chrono::duration<double>(now_.time_since_epoch()).count();
  const bool burns = self.spins || IsQueued(self);
  recovery::ProgressSample sample;
  sample.now = now_;
  recovery::WatchedThread& main = sample.threads.emplace_back();
  main.frame = 1 + self.at * 2 + (self.in_call ? 1 : 0);
  sample.operations = self.at;
  if (burns) sample.cpu_seconds = main.cpu_seconds = elapsed;
  if (options_.planted == PlantedAccount::kSpinCounts) main.cpu_seconds = 0;
  self.meter.Take(sample);
}

void VerdictSim::SampleAgain(int rank) {
  Sample(rank);
  At(now_ + seconds(5), [this, rank] { SampleAgain(rank); });
}

void VerdictSim::SayWhere(int rank) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  Sample(rank);
  Whereabouts where;
  where.no_progress = self.meter.no_progress();
  self.line_up = std::max(now_ + Between(0, 30), self.line_up);
  At(self.line_up, [this, rank, where] { diagnosis_.OnWhereabouts(rank, where, now_); });
}

GroupProgress VerdictSim::ProgressOf(int rank, int group) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  GroupProgress progress;
  progress.group = NameOfGroup(group);
  progress.entered = self.entered[group];
  if (on_device_.contains(group)) progress.device = DeviceOf(self, group);
  if (options_.planted == PlantedAccount::kNothingEntered) progress.entered = 0;
  if (options_.planted == PlantedAccount::kAlwaysEntered) progress.entered = 1000;
  if (options_.planted == PlantedAccount::kLastNotCounted && progress.entered > 0)
    --progress.entered;
  for (int peer = 0; group == 0 && peer < static_cast<int>(ranks_.size()); ++peer) {
    PeerProgress with{.rank = peer, .sent = self.sent[peer], .received = self.arrived[peer]};
    if (options_.planted == PlantedAccount::kSentNotCounted) with.sent = 0;
    with.unclaimed = self.arrived[peer] > self.begun[peer];
    if (with.sent > 0 || with.received > 0) progress.peers.push_back(with);
  }
  if (options_.planted != PlantedAccount::kOutdated) return progress;
  auto& given = self.given[progress.group];
  given.emplace_back(now_, progress);
  const auto fits = [this](const auto& one) { return one.first + kOutdatedBy <= now_; };
  const auto old = std::find_if(given.rbegin(), given.rend(), fits);
  return old == given.rend() ? given.front().second : old->second;
}

void VerdictSim::Answer(int rank, const std::vector<std::string>& groups) {
  ++count_.suspected;
  WaitingReport report = ReportOf(rank);
  for (int group = 0; group < static_cast<int>(groups_.size()); ++group) {
    if (std::find(groups.begin(), groups.end(), NameOfGroup(group)) != groups.end())
      report.progress.push_back(ProgressOf(rank, group));
  }
  ToServer(rank, std::move(report));
}

void VerdictSim::ToServer(int rank, WaitingReport report) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  const Instant sent = now_ + (Chance(5) ? Between(0, 400) : Between(0, 30));
  self.line_up = std::max(sent, self.line_up);
  for (WaitingCall& call : report.calls)
    std::sort(call.operation.missing.begin(), call.operation.missing.end());
  At(self.line_up,
     [this, rank, report = std::move(report)] { diagnosis_.OnWaiting(rank, report, now_); });
}

void VerdictSim::AskServer() {
  Diagnosis::Steps steps = diagnosis_.Advance(now_, [](int /*rank*/) { return false; });
  for (const auto& [rank, calls] : steps.entered) {
    for (const EnteredCall& call : calls) CheckEntered(rank, call);
  }
  for (auto& [rank, groups] : steps.ask_progress) {
    Instant& down = ranks_[static_cast<std::size_t>(rank)].line_down;
    down = std::max(now_ + Between(0, 30), down);
    At(down, [this, rank = rank, groups = std::move(groups)] { Answer(rank, groups); });
  }
  for (const int rank : steps.ask) {
    Instant& down = ranks_[static_cast<std::size_t>(rank)].line_down;
    down = std::max(now_ + Between(0, 30), down);
    At(down, [this, rank] { SayWhere(rank); });
  }
  if (steps.verdict)
    steps.verdict->circle.empty() ? CheckStall(*steps.verdict) : CheckCircle(*steps.verdict);
  CheckLiveness();
}

// ---- The oracle ----

bool VerdictSim::HasEntered(int peer, int waiter, const Step& step) {
  Rank& other = ranks_[static_cast<std::size_t>(peer)];
  Rank& self = ranks_[static_cast<std::size_t>(waiter)];
  if (step.kind == Kind::kRecv) return other.sent[waiter] >= self.begun[peer];
  if (step.kind == Kind::kLargeSend) return other.begun[waiter] >= self.sent[peer];
  if (step.kind == Kind::kDevice) return other.device.begun[step.group] >= step.seq;
  return other.entered[step.group] >= step.seq;
}

std::vector<int> VerdictSim::Needed(int rank) {
  const Step& step = StepOf(ranks_[static_cast<std::size_t>(rank)]);
  std::vector<int> needed{step.peer};
  if (step.peer < 0) needed = MembersOf(step.group);
  if (step.kind == Kind::kBroadcast) needed.resize(1);
  return needed;
}

// Who is missing in a chain is known to its neighbours alone, and only once these are in it.
std::vector<int> VerdictSim::SeenMissing(int rank) {
  const Step& step = StepOf(ranks_[static_cast<std::size_t>(rank)]);
  if (step.kind != Kind::kAll && step.kind != Kind::kChain) return Missing(rank);
  std::vector<int> missing;
  for (const int member : MembersOf(step.group)) {
    Rank& other = ranks_[static_cast<std::size_t>(member)];
    if (!other.in_call || StepOf(other).group != step.group || StepOf(other).seq != step.seq)
      continue;
    const std::vector<int> there = Missing(member);
    missing.insert(missing.end(), there.begin(), there.end());
  }
  return missing;
}

bool VerdictSim::CanGoOn(int rank, const std::vector<bool>& goes_on, Sight sight) {
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (!self.in_call) return self.at < self.steps.size();
  if (IsQueued(self)) return true;  // That its device never begins is another sentence.
  const Step& step = StepOf(self);
  const std::vector<int> needed = sight == Sight::kAll ? Needed(rank) : SeenMissing(rank);
  return std::all_of(needed.begin(), needed.end(), [&](int peer) {
    return peer == rank || goes_on[static_cast<std::size_t>(peer)] || HasEntered(peer, rank, step);
  });
}

// A rank that has come to its end is not blocked: what waits for it waits for its goodbye.
bool VerdictSim::IsDeadlocked(Sight sight) {
  std::vector<bool> goes_on(ranks_.size(), false);
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
    goes_on[rank] = ranks_[rank].at == ranks_[rank].steps.size();
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (goes_on[rank] || !CanGoOn(static_cast<int>(rank), goes_on, sight)) continue;
      goes_on[rank] = changed = true;
    }
  }
  return std::find(goes_on.begin(), goes_on.end(), false) != goes_on.end();
}

void VerdictSim::CheckCircle(const Diagnosis::Verdict& verdict) {
  over_ = true;
  ++count_.deadlocks;
  if (!IsDeadlocked(Sight::kAll)) return Violated("no circle is there");
  for (const WaitEdge& edge : verdict.circle) {
    Rank& self = ranks_[static_cast<std::size_t>(edge.from)];
    if (!self.in_call) return Violated(StrCat("rank ", edge.from, " waits for nothing"));
  }
}

void VerdictSim::CheckStall(const Diagnosis::Verdict& verdict) {
  over_ = true;
  Rank& rank = ranks_[static_cast<std::size_t>(verdict.stalled)];
  if (!verdict.device) {
    ++count_.stalls;
    // It may have gone on since it was asked, each second by then.
    if (now_ - rank.acted < kStall - kSaidBefore)
      Violated("the rank has not stood still for so long");
    return;
  }
  ++count_.devices;
  const Device& device = rank.device;
  const bool stands =
      device.hangs && IsQueued(rank) && now_ - std::max(device.given, device.moved) >= kDeviceStall;
  if (!stands) Violated("the device works");
}

// From when somebody waits for it, and has for long enough to ask.
void VerdictSim::CheckHangsFound() {
  for (Rank& rank : ranks_) {
    if (!rank.spins && !(rank.device.hangs && IsQueued(rank))) continue;
    const bool spins = rank.spins && !rank.in_call && rank.at < rank.steps.size();
    if (!spins && !IsQueued(rank)) continue;
    const Step& step = StepOf(rank);
    if (step.peer >= 0 || step.kind == Kind::kBroadcast || step.kind == Kind::kChain) continue;
    Instant due =
        spins ? rank.acted + kStall : std::max(rank.device.given, rank.device.moved) + kDeviceStall;
    std::optional<Instant> waited;
    for (const int peer : MembersOf(step.group)) {
      Rank& other = ranks_[static_cast<std::size_t>(peer)];
      const bool waits = &other != &rank && other.in_call && !IsQueued(other) &&
                         StepOf(other).group == step.group && StepOf(other).seq == step.seq;
      if (waits) waited = std::min(waited.value_or(other.since), other.since);
    }
    if (!waited || over_) continue;
    due = std::max(due, *waited);
    if (now_ - due > kHangFoundWithin + (spins ? seconds(10) : seconds(0)))
      Violated(spins ? "a rank that spins was not found" : "a device that hangs was not found");
  }
}

void VerdictSim::CheckEntered(int rank, const EnteredCall& call) {
  ++count_.entered;
  Rank& self = ranks_[static_cast<std::size_t>(rank)];
  if (!self.in_call) return;  // It has heard of them meanwhile.
  const Step& step = StepOf(self);
  const bool meant = call.point_to_point ? step.kind == Kind::kRecv && call.seq == self.at + 1
                                         : step.peer < 0 && call.seq == step.seq &&
                                               call.group == NameOfGroup(step.group);
  if (!meant) return;
  heard_entered_[rank] = self.at + 1;
  for (const int peer : Missing(rank)) {
    if (!HasEntered(peer, rank, step)) Violated(StrCat("rank ", peer, " has not entered it"));
  }
}

// As long as a message is on its way nobody can say that it would change nothing.
bool VerdictSim::AllArrived() {
  for (std::size_t from = 0; from < ranks_.size(); ++from) {
    for (const auto& [to, sent] : ranks_[from].sent) {
      Rank& receiver = ranks_[static_cast<std::size_t>(to)];
      if (receiver.arrived[static_cast<int>(from)] < sent) return false;
    }
  }
  return true;
}

void VerdictSim::CheckLiveness() {
  const bool any_queued =
      std::ranges::any_of(ranks_, [this](Rank& rank) { return IsQueued(rank); });
  if (any_queued || !AllArrived() || !IsDeadlocked(Sight::kMissing)) {
    deadlocked_since_.reset();
  } else if (!deadlocked_since_) {
    deadlocked_since_ = now_;
  }
  if (deadlocked_since_ && now_ - *deadlocked_since_ > kFoundWithin && !over_)
    Violated("a circle was not found");
  CheckHangsFound();
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    Rank& self = ranks_[static_cast<std::size_t>(rank)];
    const std::vector<int> missing = self.in_call ? Missing(rank) : std::vector<int>();
    // A rank whose device has not begun the step waits for that, and reports nothing yet.
    const bool judged = self.in_call && StepOf(self).kind != Kind::kLargeSend && !IsQueued(self);
    const bool only_links =
        judged && !missing.empty() && std::all_of(missing.begin(), missing.end(), [&](int peer) {
          return HasEntered(peer, rank, StepOf(self));
        });
    if (!only_links || heard_entered_[rank] == self.at + 1) {
      only_links_since_.erase(rank);
    } else if (now_ - only_links_since_.try_emplace(rank, now_).first->second > kToldWithin) {
      return Violated(StrCat("rank ", rank, " waits for links alone, and does not hear it"));
    }
  }
}

void VerdictSim::Violated(const std::string& what) {
  if (!violation_.empty()) return;
  const double at = std::chrono::duration<double>(now_.time_since_epoch()).count() - 3600;
  violation_ = StrCat("seed ", options_.seed, ", at ", at, " s: ", what);
}

std::string VerdictSim::Run() {
  const Instant end = now_ + kRunFor;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    SampleAgain(rank);
    Compute(rank);
  }
  for (Instant look = now_; look < end && !over_ && violation_.empty(); look += kLookEvery) {
    while (!queue_.empty() && queue_.begin()->first <= look) {
      auto next = queue_.extract(queue_.begin());
      now_ = next.key();
      next.mapped()();
    }
    now_ = look;
    AskServer();
  }
  return violation_;
}

}  // namespace resilient::store::sim
