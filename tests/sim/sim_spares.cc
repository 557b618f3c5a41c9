// Spares of a Sim: processes that wait for a seat to be lost, those that replace the dead and find
// their seat taken, and what becomes of either.
#include <algorithm>
#include <string>

#include "runtime/base/log.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {
namespace {

constexpr int kNoPlace = -1;

}  // namespace

void Sim::SpawnSpare() {
  Process& process = NewProcess(kNoPlace, kSpareRank, ranks_);
  spares_.push_back(&process);
  Begin(process);
}

// A launcher knows what it has started for which rank, not who has taken whose seat.
void Sim::RespawnAtHome(const Process& process) {
  std::erase(spares_, &process);
  std::erase(at_, &process);
  const int home = process.home;
  if (home == given_up_ && home != kNoPlace) return;
  const std::optional<std::pair<int, int>> number =
      home == kNoPlace ? std::nullopt : NumberOf(home);
  if (!number) return SpawnSpare();
  Process& next = NewProcess(kNoPlace, number->first, number->second);
  next.home = home;
  const bool taken = std::any_of(at_.begin(), at_.end(), [home](const Process* other) {
    return other && other->place == home;
  });
  if (taken || IsGivenUp(home)) {
    spares_.push_back(&next);
  } else {
    MoveTo(next, home);
  }
  Begin(next);
}

// The world goes on without it. Its launcher does not know that.
bool Sim::IsGivenUp(int place) const {
  if (secrets_.empty()) return false;
  const std::vector<Process*>& members = views_.at(secrets_.rbegin()->first);
  return std::none_of(members.begin(), members.end(),
                      [this, place](const Process* member) { return PlaceOf(*member) == place; });
}

// As the server has decided; of one that has had no seat that for which it was started.
int Sim::PlaceOf(const Process& process) const {
  const auto place = truth_.places.find(process.pid);
  return place == truth_.places.end() ? process.place : place->second;
}

// It has learnt its place. Who was started for that place meanwhile waits for another.
void Sim::MoveTo(Process& process, int place) {
  if (process.place == place) return;
  std::erase(spares_, &process);
  std::erase(at_, &process);
  const auto there = std::find_if(at_.begin(), at_.end(), [place](const Process* other) {
    return other && other->place == place;
  });
  if (there != at_.end()) {
    (*there)->place = kNoPlace;
    if ((*there)->alive) spares_.push_back(*there);
    at_.erase(there);
  }
  process.place = place;
  const auto behind = std::find_if(at_.begin(), at_.end(), [place](const Process* other) {
    return other && other->place > place;
  });
  at_.insert(behind, &process);
}

// Also one whose world is refused before it has begun to work there.
void Sim::NoteSpare(Process& process) {
  ++count_.spares_waited;
  truth_.spares.insert(process.pid);
  truth_.places.erase(process.pid);
  truth_changed_ = true;
  for (auto& [name, seat] : truth_.seats) {
    if (seat.holder != &process || seat.gone) continue;
    ++count_.spares_taken_back;
    seat.gone = true;
    seat.holder = nullptr;
    seat.left = seat.for_good = false;
    seat.since = now_;
  }
}

bool Sim::IsFresh(const Process& process) const { return truth_.spares.contains(process.pid); }

Sim::Process* Sim::PickVictim() {
  const std::size_t which = random_.Below(at_.size() + spares_.size());
  return which < at_.size() ? at_[which] : spares_[which - at_.size()];
}

// With nothing else going wrong a spare takes a seat that nobody else fills.
void Sim::CheckSpares() {
  const bool one_fits = std::any_of(spares_.begin(), spares_.end(), [this](const Process* spare) {
    return spare->alive && spare->size == static_cast<int>(at_.size());
  });
  if (!one_fits || at_.size() < 2 || !violation_.empty()) return;
  Process& victim = *at_[random_.Below(at_.size())];
  const std::size_t size = at_.size();
  const std::uint64_t generation = victim.generation();
  given_up_ = victim.place;
  Crash(victim);
  const auto goes_on = [this, size, generation] {
    return at_.size() == size && at_.front()->generation() > generation && AllRun();
  };
  RunUntil(now_ + options_.settle, goes_on);
  given_up_ = -1;
  if (goes_on()) return;
  Violated("no spare has taken a seat that was lost: " +
           (core_ ? core_->StatusJson(now_) : "no server"));
}

}  // namespace resilient::store::sim
