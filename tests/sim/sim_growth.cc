// Worlds of a Sim that take in spares: what the programs offer, and what each larger world is held
// against.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "runtime/base/log.h"
#include "tests/sim/sim_parts.h"

namespace resilient::store::sim {

// A program that has made a commit behind each collective.
void Sim::OfferRoom(Process& process, std::uint64_t generation) {
  if (max_world_ <= process.size || process.generation() != generation) return;
  Report offer;
  offer.kind = ReportKind::kRoom;
  offer.generation = generation;
  offer.max_world = max_world_;
  const int ahead = options_.planted == Planted::kOffersAhead ? 1 : 0;
  offer.commit = static_cast<std::uint64_t>(process.calls[generation].finished + ahead);
  Submit(process, *process.control, ReportOp{offer});
}

// It begins at a commit that all have made: nobody loses what the others have.
void Sim::CheckGrowth(std::uint64_t generation, const Status& cause) {
  if (cause.code() != StatusCode::kGrowth) return;
  constexpr std::string_view kCommit = " at commit ";
  const std::size_t found = cause.message().find(kCommit);
  if (found == std::string::npos) return Violated("growth without a commit: " + cause.message());
  const int commit = std::atoi(cause.message().c_str() + found + kCommit.size());
  for (Process* member : views_.at(generation)) {
    if (member->calls[generation].finished >= commit) continue;
    Violated(StrCat("rank ", member->rank,
                    " has not made the commit at which the world grows: ", cause.message()));
  }
}

void Sim::CheckLarger(const std::vector<Process*>& before, const std::vector<Process*>& members) {
  if (static_cast<int>(members.size()) > max_world_) {
    return Violated(StrCat("a world of ", before.size(), " has become one of ", members.size()));
  }
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const Process* process = members[rank];
    const bool newcomer = rank >= before.size();
    if (newcomer ? !IsFresh(*process) : process != before[rank]) {
      Violated(StrCat("rank ", rank, " of a larger world is another one"));
    }
  }
  ++count_.growths;
  count_.newcomers += static_cast<int>(members.size() - before.size());
}

// What was added is no more; its spares have been noted.
void Sim::NoteGrowthTakenBack(std::uint64_t round) {
  ++count_.growths_taken_back;
  const std::vector<Process*>& members = truth_.members[round];
  std::erase_if(truth_.seats, [&](const auto& entry) {
    return entry.first.first == round &&
           std::none_of(members.begin(), members.end(), [&](const Process* member) {
             return PlaceOf(*member) == entry.first.second;
           });
  });
  truth_changed_ = true;
}

// With every spare that is there, or is to come.
bool Sim::GrowthIsDue() const {
  if (static_cast<int>(at_.size()) >= max_world_) return false;
  return coming_ > 0 || std::any_of(spares_.begin(), spares_.end(),
                                    [](const Process* spare) { return spare->alive; });
}

}  // namespace resilient::store::sim
