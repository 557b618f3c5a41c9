// Worlds of a Sim that go on with fewer ranks: what the programs want, which numbers their
// launchers give to those that come later, and what each decision of the server is held against.
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/log.h"
#include "store/core/causes.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

template <typename Process>
bool IsAmong(const std::vector<Process*>& members, const Process* process) {
  return std::find(members.begin(), members.end(), process) != members.end();
}

}  // namespace

// ---- What is wanted ----

SimWish Sim::PickWish(Process& process) {
  const SimWish whole{0, seat_wait_};
  if (all_want_less_) return {std::max(1, process.size - 1), Between(0, 1500)};
  switch (policy_) {
    case Policy::kNobody:
      return whole;
    case Policy::kAll:
      return Chance(85) ? SomeWish(process.size) : whole;
    case Policy::kSome:
      return process.place % 2 == 0 ? SomeWish(process.size) : whole;
    case Policy::kSecondThoughts:
      if (process.tries == 0 && process.refusals == 0) {
        return {Chance(50) ? 0 : process.size, seat_wait_};
      }
      return SomeWish(std::max(1, process.size - 1));
  }
  return whole;
}

SimWish Sim::SomeWish(int most) {
  const int least = Chance(60) ? 1 : 1 + static_cast<int>(random_.Below(most));
  if (Chance(40)) return {least, Duration::zero()};
  return {least, Chance(50) ? Between(0, 1500) : seat_wait_};
}

// And waits for it.
bool Sim::WantsLess(const Process& process) const {
  return process.session->state() == SessionState::kJoining &&
         process.session->wish().min_world > 0;
}

// ---- Numbers ----

// As SessionImpl::TakePlaceLocked.
void Sim::TakePlace(Process& process, const View& view) {
  const std::string own = StrCat("endpoint", process.pid);
  const auto size = static_cast<int>(view.members.size());
  const bool may_differ = options_.planted != Planted::kClaimKept || process.rank == kSpareRank;
  if (size != process.size || may_differ) {
    const auto place =
        std::find_if(view.members.begin(), view.members.end(),
                     [&own](const Member& member) { return member.endpoint == own; });
    if (place == view.members.end()) return Violated("a view without one who is told of it");
    const bool kept = options_.planted == Planted::kOldNumberKept && process.rank < size;
    process.rank = kept ? process.rank : place->rank;
    process.size = size;
  }
  // One that was stopped may hear of its seat when that is no more its own.
  if (spare_count_ > 0 && !process.lost) MoveTo(process, PlaceOf(process));
  if (view.members.at(static_cast<std::size_t>(process.rank)).pid == process.pid) return;
  Violated(StrCat("rank ", process.rank, " of generation ", view.generation,
                  " takes the place of another process"));
}

// Rank and size for a process in that place, by the latest view; nullopt: nobody is to be there.
std::optional<std::pair<int, int>> Sim::NumberOf(int place) const {
  if (place == given_up_) return std::nullopt;
  // Where worlds grow and become smaller by the way it knows those that it began with.
  if (secrets_.empty() || max_world_ > 0) return std::pair(place, ranks_);
  const std::vector<Process*>& members = views_.at(secrets_.rbegin()->first);
  const auto seat =
      std::find_if(members.begin(), members.end(),
                   [this, place](const Process* member) { return PlaceOf(*member) == place; });
  if (seat == members.end()) return std::nullopt;
  return std::pair(static_cast<int>(seat - members.begin()), static_cast<int>(members.size()));
}

// A launcher ends what it has started for a world that is no more.
void Sim::FollowWorld(const std::vector<Process*>& members) {
  const auto size = static_cast<int>(members.size());
  if (size == ranks_ || max_world_ > 0) return;
  for (Process* process : at_) {
    if (!process || IsAmong(members, process)) continue;
    if (process->size == size && NumberOf(process->place)) continue;
    After(Between(0, 3000), [this, process] { End(*process, 1 << 8); });
  }
}

// ---- What the server decides ----

void Sim::NumberAnew(Effects& effects) const {
  for (Effects::Outgoing& out : effects.send) {
    Event* event = std::get_if<Event>(&out.message);
    const View* view = event ? ViewOf(*event) : nullptr;
    if (!view || static_cast<int>(view->members.size()) == ranks_) continue;
    View anew = *view;
    std::reverse(anew.members.begin(), anew.members.end());
    int rank = 0;
    for (Member& member : anew.members) member.rank = rank++;
    *event = std::move(anew);
  }
}

void Sim::NoteSeats(const LogRecord& record) {
  constexpr std::string_view kJoined = "joined round ";
  if (record.event == "life") {
    truth_.seats.clear();
    truth_.members.clear();
    truth_.smaller.clear();
    truth_.begun.clear();
    truth_changed_ = true;
  } else if (record.event == "join") {
    Process& process = ProcessOf(record);
    const std::uint64_t round = std::strtoull(record.text.c_str() + kJoined.size(), nullptr, 10);
    const std::vector<Process*>& members = truth_.members[round];
    truth_.begun.emplace(round, now_);
    const auto rank = static_cast<std::size_t>(std::stoi(std::string(record.Value("rank"))));
    const bool added = !members.empty() && rank >= members.size();
    int place = added ? ++last_place_ : process.home;
    if (rank < members.size()) place = PlaceOf(*members[rank]);
    truth_.seats[{round, place}] = {.holder = &process};
    truth_.places[process.pid] = place;
    count_.spares_seated += truth_.spares.contains(process.pid) ? 1 : 0;
    truth_changed_ = true;
  } else if (record.event == "spare") {
    NoteSpare(ProcessOf(record));
  } else if (record.event == "growth_taken_back") {
    NoteGrowthTakenBack(std::strtoull(std::string(record.Value("round")).c_str(), nullptr, 10));
  } else if (record.event == "lost" || record.event == "expiry" || record.event == "leave") {
    const Process& process = ProcessOf(record);
    for (auto& [name, seat] : truth_.seats) {
      if (seat.holder != &process) continue;
      seat.gone = true;
      seat.left = record.event == "leave";
      seat.for_good = seat.left && (!supervised_ || truth_.ended_well.contains(process.pid));
      seat.since = now_;
      truth_changed_ = true;
    }
  }
}

// One that has left and ended well does not come again. An end with code 0 is a leave, too.
void Sim::NoteExit(const ExitReportOp& report) {
  if (!IsCleanEnd(report)) return;
  truth_.ended_well.insert(report.process.pid);
  truth_changed_ = true;
  for (auto& [name, seat] : truth_.seats) {
    if (seat.left && seat.holder->pid == report.process.pid) seat.for_good = true;
  }
}

void Sim::NoteJoin(Process& process, const JoinRequest& request) {
  std::uint64_t& heard = truth_.heard[process.pid];
  heard = std::max(heard, request.number);
  truth_changed_ = true;
}

// REQUIRES: its log has been noted.
void Sim::NoteDecided(Step& step) {
  ConnectionId greeted = 0;  // Told again what it may have missed, which was right by then.
  for (const Effects::Outgoing& out : step.effects.send) {
    const auto* reply = std::get_if<Reply>(&out.message);
    if (reply && reply->welcome) greeted = out.connection;
    const Event* event = std::get_if<Event>(&out.message);
    if (!event) continue;
    const auto to = connections_.find(out.connection);
    const auto* refused = std::get_if<JoinRefusedEvent>(event);
    const bool told_now = to != connections_.end() && out.connection != greeted;
    if (refused && told_now) CheckRefusal(*to->second->process, *refused);
    const View* view = ViewOf(*event);
    if (view && view->generation > truth_.generation) CheckMembers(*view);
  }
  if (!std::exchange(truth_changed_, false) || !durable_) return;
  step.truth = truth_;
  if (held_.empty() && step.effects.write.empty()) kept_truth_ = truth_;
}

// A world is given up when a seat of it stays empty: its holder left, or ended and had no successor
// in time. Not for those who are content with what is left. A newcomer is refused when the world
// has become smaller meanwhile.
void Sim::CheckRefusal(const Process& process, const JoinRefusedEvent& refused) {
  std::uint64_t& before = truth_.refused[process.pid];
  if (refused.join <= before) return;  // Told again.
  before = refused.join;
  truth_changed_ = true;
  std::set<std::uint64_t> rounds;
  for (const auto& [name, seat] : truth_.seats) {
    if (seat.holder == &process && !seat.gone) rounds.insert(name.first);
  }
  const bool smaller = count_.shrinks + count_.first_shrinks > 0;
  if (refused.why.code() == StatusCode::kWorldSize && rounds.empty() && smaller) return;
  if (refused.why.code() == StatusCode::kJoinTimeout && process.ran_before) {
    const std::optional<SimWish> first = HeardOf(process);
    const auto awaited = [this, &first](std::uint64_t round) {
      return first && AwakeSince(truth_.begun[round]) >= first->seat_wait;
    };
    if (std::all_of(rounds.begin(), rounds.end(), awaited)) return;
  }
  // No world has come for so long that nobody needs it.
  if (refused.why.code() == StatusCode::kLeft && rounds.empty() && spare_count_ > 0) return;
  bool due = false;
  int live = 0;
  int least = 0;
  for (const auto& [name, seat] : truth_.seats) {
    if (!rounds.contains(name.first)) continue;
    due = due || (seat.gone && (seat.for_good || now_ - seat.since >= seat_wait_));
    if (seat.gone) continue;
    ++live;
    const std::optional<SimWish> wish = HeardOf(*seat.holder);
    least = std::max(least, wish ? wish->min_world : 0);
  }
  const std::optional<SimWish> wish = HeardOf(process);
  const std::string who = StrCat("rank ", process.rank, " (pid ", process.pid, ")");
  if (!due) Violated(StrCat("a join of ", who, " was refused: ", refused.why.ToString()));
  if (wish && wish->min_world > 0 && live >= least) {
    Violated(StrCat("a join of ", who, " was refused, which is content with the ", live,
                    " ranks that are left: ", refused.why.ToString()));
  }
}

// What it wanted when the server last heard of it.
std::optional<SimWish> Sim::HeardOf(const Process& process) const {
  const auto heard = truth_.heard.find(process.pid);
  if (heard == truth_.heard.end()) return std::nullopt;
  const auto wish = process.wishes.find(heard->second);
  return wish == process.wishes.end() ? std::nullopt : std::optional(wish->second);
}

void Sim::CheckMembers(const View& view) {
  truth_.generation = view.generation;
  truth_changed_ = true;
  std::vector<Process*> members;
  members.reserve(view.members.size());
  for (const Member& member : view.members) {
    Process* process = processes_.at(static_cast<std::size_t>(member.pid - 1)).get();
    if (member.rank != static_cast<int>(members.size())) Violated("a view out of order");
    if (IsAmong(members, process)) Violated("a view has a process twice");
    if (truth_.dropped.contains(process->pid)) {
      Violated(StrCat("rank ", member.rank, " is of a seat that was dropped"));
    }
    members.push_back(process);
  }
  std::vector<Process*>& before = truth_.members[view.round];
  if (before.size() > members.size()) {
    CheckSmaller(view.round, before, members);
  } else if (!before.empty() && before.size() < members.size()) {
    CheckLarger(before, members);
  } else if (before.empty() && spare_count_ == 0) {
    CheckFirst(view.round, members);
  } else if (!before.empty()) {
    bool replaced = false;
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      if (PlaceOf(*members[rank]) != PlaceOf(*before[rank])) {
        Violated("a view has ranks in other seats");
      }
      replaced = replaced || members[rank] != before[rank];
    }
    count_.late_replacements += replaced && truth_.smaller.contains(view.round) ? 1 : 0;
  }
  for (const Process* process : members) truth_.spares.erase(process->pid);
  before = std::move(members);
}

// Each has the number that it asked for. Of ranks that ran before those that came may go on, in
// their order, when all of them want that and the seats were empty for as long as they would wait.
void Sim::CheckFirst(std::uint64_t round, const std::vector<Process*>& members) {
  const int asked = members.front()->size;
  std::set<int> places;
  Duration wait{};
  const bool smaller = ran_before_ && static_cast<int>(members.size()) < asked;
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const Process& process = *members[rank];
    const int place = PlaceOf(process);
    const bool in_order = places.empty() || *places.rbegin() < place;
    const bool own = process.rank == static_cast<int>(rank) || (smaller && in_order);
    if (!own || process.size != asked || (!smaller && std::ssize(members) != asked)) {
      Violated("a first view with another number than was asked for");
    }
    places.insert(place);
    if (smaller && process.ran_before) CheckWish(process, members.size(), &wait);
  }
  if (!smaller) return;
  for (int place = 0; place < asked; ++place) {
    if (places.contains(place)) continue;
    const auto found = truth_.seats.find({round, place});
    const Truth::Seat seat = found == truth_.seats.end() ? Truth::Seat{} : found->second;
    if (seat.holder && !seat.gone) {
      Violated(StrCat("place ", place, " is taken, and a first world goes on without it"));
    }
    if (!seat.for_good && AwakeSince(std::max(truth_.begun[round], seat.since)) < wait) {
      Violated(StrCat("place ", place, " of a first world was dropped before its wait was over"));
    }
    if (seat.holder) truth_.dropped.insert(seat.holder->pid);
  }
  ++count_.first_shrinks;
  truth_.smaller.insert(round);
}

// Of a world the present members are left, all of them, in their order; all want that, and no seat
// was dropped that might have been filled in time.
void Sim::CheckSmaller(std::uint64_t round, const std::vector<Process*>& before,
                       const std::vector<Process*>& members) {
  std::vector<int> places;
  for (const Process* process : members) places.push_back(PlaceOf(*process));
  std::vector<int> left;
  for (const Process* process : before) {
    const int place = PlaceOf(*process);
    if (std::find(places.begin(), places.end(), place) != places.end()) left.push_back(place);
  }
  if (left != places) return Violated("a smaller world has its ranks in another order");
  Duration wait{};
  for (const Process* process : members) {
    if (IsFresh(*process)) {
      ++count_.spares_in_smaller;
    } else {
      CheckWish(*process, members.size(), &wait);
    }
  }
  for (Process* process : before) {
    const int place = PlaceOf(*process);
    const Truth::Seat& seat = truth_.seats[{round, place}];
    const bool stays = std::find(places.begin(), places.end(), place) != places.end();
    const std::string who = StrCat("rank ", process->rank, " (pid ", process->pid, ")");
    if (stays && (!IsAmong(members, seat.holder) || seat.gone)) {
      Violated(who + " is in a smaller world and was gone before");
    }
    if (stays) continue;
    if (!seat.gone) Violated(who + " is there, and the world goes on without that seat");
    if (!seat.for_good && AwakeSince(seat.since) < wait) {
      Violated("the seat of " + who + " was dropped before its wait was over");
    }
    truth_.dropped.insert(process->pid);
    if (seat.holder) truth_.dropped.insert(seat.holder->pid);
  }
  ++count_.shrinks;
  if (!truth_.smaller.insert(round).second) ++count_.shrinks_again;
}

void Sim::CheckWish(const Process& process, std::size_t size, Duration* wait) {
  const std::optional<SimWish> wish = HeardOf(process);
  const std::string who = StrCat("rank ", process.rank, " (pid ", process.pid, ")");
  if (!wish) return Violated(who + " has not joined a smaller world");
  const auto& [least, seat_wait] = *wish;
  *wait = std::max(*wait, seat_wait);
  if (least == 0) Violated(StrCat(who, " did not want a world of ", size));
  if (static_cast<int>(size) < least) {
    Violated(StrCat(who, " wanted ", least, " ranks at least, and is in a world of ", size));
  }
  if (!process.session->WasAsked(*wish)) {
    Violated(StrCat(who, " is in a smaller world, which nobody asked for since it last ran"));
  }
  if (least < process.refused_least) ++count_.contents;
}

// With nothing else going wrong, and a place that is given up, those that are left go on.
void Sim::CheckShrinks() {
  if (policy_ == Policy::kNobody || at_.size() < 2 || !violation_.empty()) return;
  if (spare_count_ > 0) return;  // The seat would be filled.
  const std::size_t left = at_.size() - 1;
  Process& victim = *at_[random_.Below(at_.size())];
  all_want_less_ = true;
  given_up_ = victim.place;
  Crash(victim);
  const auto goes_on = [this, left] {
    return at_.size() == left && views_.at(at_.front()->generation()).size() == left && AllRun();
  };
  RunUntil(now_ + options_.settle, goes_on);
  if (goes_on()) return;
  Violated("a world does not go on with fewer ranks, and all want that: " +
           (core_ ? core_->StatusJson(now_) : "no server"));
}

}  // namespace resilient::store::sim
