#include "tests/sim/verdict_sim.h"

#include <algorithm>
#include <set>

#include "runtime/base/log.h"

namespace resilient::store::sim {
namespace {

using std::chrono::seconds;

constexpr Duration kLookEvery = Millis(100);
constexpr Duration kRunFor = seconds(90);
constexpr Duration kOutdatedBy = seconds(4);

}  // namespace

VerdictSim::VerdictSim(VerdictSimOptions options) : options_(options), random_(options.seed) {
  world_.ranks.resize(2 + random_.Below(Chance(20) ? 31 : 7));
  lines_.resize(world_.ranks.size());
  MakeGroups();
  MakeProgram();
  if (Chance(50)) SpoilProgram();
  if (Chance(25)) SpoilGroup();
  PlanSilences();
  PlanHangs();
}

Duration VerdictSim::Between(int low_ms, int high_ms) {
  const auto range = static_cast<std::uint64_t>(high_ms - low_ms + 1);
  return Millis(low_ms + static_cast<int>(random_.Below(range)));
}

void VerdictSim::MakeGroups() {
  std::vector<int> world(world_.ranks.size());
  for (std::size_t i = 0; i < world.size(); ++i) world[i] = static_cast<int>(i);
  world_.groups.push_back(world);
  for (std::uint64_t more = random_.Below(4); more > 0; --more) {
    std::vector<int> members;
    for (const int rank : world) {
      if (Chance(60)) members.push_back(rank);
    }
    if (members.size() < 2) continue;
    if (Chance(40)) on_device_.insert(static_cast<int>(world_.groups.size()));
    world_.groups.push_back(std::move(members));
  }
}

// One order of all steps, of which each rank runs those that it has a part in: so it comes to its
// end.
void VerdictSim::MakeProgram() {
  std::vector<std::uint64_t> seqs(world_.groups.size(), 0);
  for (int step = 0; step < 25; ++step) {
    if (Chance(35)) {
      const int from = static_cast<int>(random_.Below(world_.ranks.size()));
      const int to = static_cast<int>(random_.Below(world_.ranks.size()));
      if (from == to) continue;
      const Kind kind = Chance(40) ? Kind::kLargeSend : Kind::kSend;
      world_.Of(from).steps.push_back({.kind = kind, .peer = to});
      world_.Of(to).steps.push_back({.kind = Kind::kRecv, .peer = from});
      continue;
    }
    const auto group = random_.Below(world_.groups.size());
    Kind kind = Chance(50) ? Kind::kAll : (Chance(50) ? Kind::kChain : Kind::kBroadcast);
    if (on_device_.contains(static_cast<int>(group))) kind = Kind::kDevice;
    const Step shared{.kind = kind, .group = static_cast<int>(group), .seq = ++seqs[group]};
    for (const int rank : world_.groups[group]) world_.Of(rank).steps.push_back(shared);
  }
}

void VerdictSim::SpoilProgram() {
  Rank& rank = world_.ranks[random_.Below(world_.ranks.size())];
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

void VerdictSim::SpoilGroup() {
  const auto group = random_.Below(world_.groups.size());
  if (group == 0) return;
  const int number = static_cast<int>(group);
  std::vector<int> made = world_.groups[group];
  const std::size_t own = random_.Below(made.size());
  const int rank = made[own];
  const std::size_t at = (own + 1 + random_.Below(made.size() - 1)) % made.size();
  const int other = static_cast<int>(random_.Below(world_.ranks.size()));
  if (Chance(40)) {
    std::swap(made[own], made[at]);
  } else if (std::ranges::count(made, other) == 0 && Chance(50)) {
    made[at] = other;
  } else {
    made.erase(made.begin() + static_cast<std::ptrdiff_t>(at));
  }
  world_.Of(rank).made[number] = std::move(made);
}

void VerdictSim::PlanSilences() {
  for (std::uint64_t more = random_.Below(6); more > 0; --more) {
    const int from = static_cast<int>(random_.Below(world_.ranks.size()));
    const int to = static_cast<int>(random_.Below(world_.ranks.size()));
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
  const auto any = [this]() -> Rank& { return world_.ranks[random_.Below(world_.ranks.size())]; };
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
  Rank& self = world_.Of(rank);
  if (self.IsAtEnd()) {
    ++count_.ended;
    return;
  }
  self.acted = now_;
  At(now_ + Between(1, Chance(10) ? 3000 : 200), [this, rank] { Enter(rank); });
}

void VerdictSim::Enter(int rank) {
  Rank& self = world_.Of(rank);
  if (self.spins) return;  // For ever.
  self.in_call = true;
  self.since = self.acted = now_;
  const Kind kind = self.Current().kind;
  self.Current().IsMessage() ? EnterMessage(rank) : EnterCollective(rank);
  if (kind == Kind::kDevice) return;
  At(now_ + kWaitTellAfter, [this, rank, at = self.at] { Tell(rank, at); });
  Look(rank);
}

void VerdictSim::EnterCollective(int rank) {
  Rank& self = world_.Of(rank);
  const Step step = self.Current();
  self.entered[step.group] = step.seq;
  if (step.kind == Kind::kDevice) return GiveToDevice(rank);
  if (step.kind == Kind::kChain) return PassWord(rank, step.group, step.seq);
  const bool tells = step.kind == Kind::kAll || world_.MadeBy(rank, step.group).front() == rank;
  if (!tells) return;
  TellPeers(rank, step.group, [rank, step](Rank& peer) {
    std::uint64_t& heard = peer.heard[{step.group, rank}];
    heard = std::max(heard, step.seq);
  });
}

void VerdictSim::TellPeers(int rank, int group, std::function<void(Rank& peer)> what) {
  for (const int peer : world_.MadeBy(rank, group)) {
    if (peer == rank || world_.AreOfOtherRanks(rank, peer, group)) continue;
    OnLink(rank, peer, [this, peer, what] {
      what(world_.Of(peer));
      Look(peer);
    });
  }
}

// What it has to do before: nothing to speak of, or some things one after the other.
void VerdictSim::GiveToDevice(int rank) {
  Rank& self = world_.Of(rank);
  const Step step = self.Current();
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
  Rank& self = world_.Of(rank);
  if (self.device.hangs) return;
  const Step step = self.Current();
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
  Rank& self = world_.Of(rank);
  const std::vector<int>& members = world_.MadeBy(rank, group);
  const int place = world_.PlaceIn(group, rank);
  const auto neighbour = [&](int at) { return members[static_cast<std::size_t>(at)]; };
  const bool first = place == 0;
  const bool last = place + 1 == static_cast<int>(members.size());
  if (self.entered[group] < seq) return;
  const bool from_left = first || self.passed[{group, neighbour(place - 1)}] >= seq;
  const bool from_right = last ? from_left : self.passed[{group, neighbour(place + 1)}] >= seq;
  const auto pass = [&](int to) {
    if (world_.AreOfOtherRanks(rank, to, group)) return;
    OnLink(rank, to, [this, rank, to, group, seq] {
      std::uint64_t& passed = world_.Of(to).passed[{group, rank}];
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
  Rank& self = world_.Of(rank);
  const int peer = self.Current().peer;
  if (self.Current().kind == Kind::kRecv) {
    const std::uint64_t begun = ++self.begun[peer];
    OnLink(rank, peer, [this, rank, peer, begun] {
      world_.Of(peer).wanted[rank] = begun;
      Look(peer);
    });
    return;
  }
  const std::uint64_t sent = ++self.sent[peer];
  OnLink(rank, peer, [this, rank, peer, sent] {
    world_.Of(peer).arrived[rank] = sent;
    Look(peer);
  });
}

void VerdictSim::Look(int rank) {
  Rank& self = world_.Of(rank);
  if (!self.in_call || self.IsQueued() || !world_.MissingOf(rank).empty()) return;
  if (self.Current().kind == Kind::kDevice) self.device.moved = now_;
  self.in_call = false;
  ++self.at;
  Compute(rank);
}

// ---- Their lines to the server ----

void VerdictSim::Tell(int rank, std::size_t at) {
  Rank& self = world_.Of(rank);
  if (!self.in_call || self.at != at) return;
  ToServer(rank, ReportOf(rank));
  At(now_ + kWaitTellAfter, [this, rank, at] { Tell(rank, at); });
}

WaitingReport VerdictSim::ReportOf(int rank) {
  Rank& self = world_.Of(rank);
  WaitingReport report;
  report.generation = 1;
  report.stall = kVerdictStall;
  report.device_stall = kVerdictDeviceStall;
  if (!self.in_call || self.IsQueued() || now_ - self.since < kWaitTellAfter) return report;
  const Step& step = self.Current();
  WaitingCall call;
  call.group = VerdictWorld::NameOf(step.group);
  call.operation.point_to_point = step.IsMessage();
  call.operation.sends = step.kind == Kind::kLargeSend;
  call.operation.needs_all = !step.IsMessage() && step.kind != Kind::kBroadcast;
  call.operation.seq = step.IsMessage() ? self.at + 1 : step.seq;
  call.operation.age = now_ - self.since;
  call.operation.missing = world_.MissingOf(rank);
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
  AddMade(rank, step.group, &report);
  return report;
}

void VerdictSim::AddMade(int rank, int group, WaitingReport* report) {
  std::vector<int> ranks = world_.MadeBy(rank, group);
  if (std::ranges::count(world_.MembersOf(group), rank) == 0) return;  // It has not made it.
  if (options_.planted == PlantedAccount::kRanksSorted) std::ranges::sort(ranks);
  GroupMade made{VerdictWorld::NameOf(group), RanksOfGroup(ranks, StrCat("rank", rank, ".py:1")),
                 CountOf(world_.Of(rank).entered, group) > 0};
  if (options_.planted == PlantedAccount::kRanksOfALine)
    made.ranks.digest += static_cast<std::uint64_t>(rank);
  report->made.push_back(std::move(made));
}

DeviceProgress VerdictSim::DeviceOf(const Rank& rank, int group) const {
  DeviceProgress told;
  const bool hides = options_.planted == PlantedAccount::kNoDevice;
  told.begun = CountOf(hides ? rank.entered : rank.device.begun, group);
  const bool waits = rank.in_call && rank.Current().kind == Kind::kDevice;
  const bool queued = rank.IsQueued();
  told.runs = waits && !queued;
  const bool stands = options_.planted == PlantedAccount::kDeviceNotMoved;
  const Instant since = stands ? rank.device.given : std::max(rank.device.given, rank.device.moved);
  const bool busy = options_.planted == PlantedAccount::kDeviceNotStill;
  if (queued && !hides && !busy) told.still = now_ - since;
  return told;
}

// As the observer of a process does. In a call of ours a main thread sleeps, but one that waits for
// a device spins, as the driver has it.
void VerdictSim::Sample(int rank) {
  const Rank& self = world_.Of(rank);
  const double elapsed = std::chrono::duration<double>(now_.time_since_epoch()).count();
  const bool burns = self.spins || self.IsQueued();
  recovery::ProgressSample sample;
  sample.now = now_;
  recovery::WatchedThread& main = sample.threads.emplace_back();
  main.frame = 1 + self.at * 2 + (self.in_call ? 1 : 0);
  sample.operations = self.at;
  if (burns) sample.cpu_seconds = main.cpu_seconds = elapsed;
  if (options_.planted == PlantedAccount::kSpinCounts) main.cpu_seconds = 0;
  LineOf(rank).meter.Take(sample);
}

void VerdictSim::SampleAgain(int rank) {
  Sample(rank);
  At(now_ + seconds(5), [this, rank] { SampleAgain(rank); });
}

void VerdictSim::SayWhere(int rank) {
  Sample(rank);
  Line& line = LineOf(rank);
  Whereabouts where;
  where.no_progress = line.meter.no_progress();
  line.up = std::max(now_ + Between(0, 30), line.up);
  At(line.up, [this, rank, where] { diagnosis_.OnWhereabouts(rank, where, now_); });
}

GroupProgress VerdictSim::ProgressOf(int rank, int group) {
  Rank& self = world_.Of(rank);
  GroupProgress progress;
  progress.group = VerdictWorld::NameOf(group);
  progress.entered = self.entered[group];
  if (on_device_.contains(group)) progress.device = DeviceOf(self, group);
  if (options_.planted == PlantedAccount::kNothingEntered) progress.entered = 0;
  if (options_.planted == PlantedAccount::kAlwaysEntered) progress.entered = 1000;
  if (options_.planted == PlantedAccount::kLastNotCounted && progress.entered > 0)
    --progress.entered;
  for (int peer = 0; group == 0 && peer < world_.size(); ++peer) {
    PeerProgress with{.rank = peer, .sent = self.sent[peer], .received = self.arrived[peer]};
    if (options_.planted == PlantedAccount::kSentNotCounted) with.sent = 0;
    with.unclaimed = self.arrived[peer] > self.begun[peer];
    if (with.sent > 0 || with.received > 0) progress.peers.push_back(with);
  }
  if (options_.planted != PlantedAccount::kOutdated) return progress;
  auto& given = LineOf(rank).given[progress.group];
  given.emplace_back(now_, progress);
  const auto fits = [this](const auto& one) { return one.first + kOutdatedBy <= now_; };
  const auto old = std::find_if(given.rbegin(), given.rend(), fits);
  return old == given.rend() ? given.front().second : old->second;
}

void VerdictSim::Answer(int rank, const std::vector<std::string>& groups) {
  ++count_.suspected;
  WaitingReport report = ReportOf(rank);
  for (int group = 0; group < static_cast<int>(world_.groups.size()); ++group) {
    if (std::find(groups.begin(), groups.end(), VerdictWorld::NameOf(group)) == groups.end())
      continue;
    report.progress.push_back(ProgressOf(rank, group));
    AddMade(rank, group, &report);
  }
  ToServer(rank, std::move(report));
}

void VerdictSim::ToServer(int rank, WaitingReport report) {
  const Instant sent = now_ + (Chance(5) ? Between(0, 400) : Between(0, 30));
  Instant& up = LineOf(rank).up;
  up = std::max(sent, up);
  for (WaitingCall& call : report.calls)
    std::sort(call.operation.missing.begin(), call.operation.missing.end());
  At(up, [this, rank, report = std::move(report)] { diagnosis_.OnWaiting(rank, report, now_); });
}

void VerdictSim::AskServer() {
  Diagnosis::Steps steps = diagnosis_.Advance(now_, [](int /*rank*/) { return false; });
  for (const auto& [rank, calls] : steps.entered) {
    count_.entered += static_cast<int>(calls.size());
    for (const EnteredCall& call : calls) Violated(oracle_.OnEntered(rank, call));
  }
  for (auto& [rank, groups] : steps.ask_progress) {
    Instant& down = LineOf(rank).down;
    down = std::max(now_ + Between(0, 30), down);
    At(down, [this, rank = rank, groups = std::move(groups)] { Answer(rank, groups); });
  }
  for (const int rank : steps.ask) {
    Instant& down = LineOf(rank).down;
    down = std::max(now_ + Between(0, 30), down);
    At(down, [this, rank] { SayWhere(rank); });
  }
  if (!steps.verdict) return Violated(oracle_.CheckNothingMissed(now_));
  over_ = true;
  const Diagnosis::Verdict& verdict = *steps.verdict;
  ++(verdict.other_ranks       ? count_.other_ranks
     : !verdict.circle.empty() ? count_.deadlocks
     : verdict.device          ? count_.devices
                               : count_.stalls);
  Violated(oracle_.OnVerdict(*steps.verdict, now_));
}

void VerdictSim::Violated(const std::string& what) {
  if (what.empty() || !violation_.empty()) return;
  const double at = std::chrono::duration<double>(now_.time_since_epoch()).count() - 3600;
  violation_ = StrCat("seed ", options_.seed, ", at ", at, " s: ", what);
}

std::string VerdictSim::Run() {
  const Instant end = now_ + kRunFor;
  for (int rank = 0; rank < world_.size(); ++rank) {
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
