#include "torch_plugin/csrc/places.h"

#include <algorithm>
#include <map>

#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/fnv.h"

namespace resilient::plugin {
namespace {

std::string RanksText(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return c10::str("rank ", ranks.front(), " is");
  return c10::str("ranks ", c10::Join(", ", ranks), " are");
}

}  // namespace

std::int64_t Whereabouts::BeginRun() {
  active_.push_back(++runs_);
  states_ = 0;
  return runs_;
}

void Whereabouts::BeginAgain(std::int64_t run) {
  runs_ = run;
  states_ = 0;
}

void Whereabouts::Entered() { states_ = std::max<std::int64_t>(states_, 1); }

void Whereabouts::EndRun() { active_.pop_back(); }

StateName Whereabouts::NameState() { return {runs_, ++states_}; }

std::uint64_t Place::Digest() const {
  Fnv sum;
  sum.Add(static_cast<std::uint64_t>(runs));
  sum.Add(active.size());
  for (const std::int64_t run : active) sum.Add(static_cast<std::uint64_t>(run));
  sum.Add(static_cast<std::uint64_t>(state.run));
  sum.Add(static_cast<std::uint64_t>(state.number));
  std::vector<std::string> sorted = names;
  std::sort(sorted.begin(), sorted.end());
  for (const std::string& name : sorted) sum.Add(std::string_view(name));
  return sum.value();
}

std::string Place::Text() const {
  const std::string which = state == StateName{runs, 1}
                                ? std::string("its State")
                                : c10::str("State number ", state.number, " of run ", state.run);
  const std::string values = names.empty() ? "no replicated values" : c10::Join(", ", names);
  std::string where = "outside of elastic";
  if (!active.empty()) {
    where = c10::str("in elastic run ", c10::Join(" > ", active));
    if (runs != active.back()) where += c10::str(", after run ", runs, " in it");
  } else if (runs > 0) {
    where = c10::str("after elastic run ", runs);
  }
  return c10::str(where, ", with ", which, " (", values, ")");
}

std::string DifferenceOf(const std::vector<std::string>& places) {
  std::map<std::string, std::vector<int>> ranks_at;
  for (std::size_t rank = 0; rank < places.size(); ++rank)
    ranks_at[places[rank]].push_back(static_cast<int>(rank));
  std::vector<std::string> where;
  where.reserve(ranks_at.size());
  for (const auto& [place, ranks] : ranks_at) where.push_back(RanksText(ranks) + " " + place);
  return c10::str(
      "the ranks are not at the same place of the program: ", c10::Join("; ", where),
      ". Nothing was loaded. A process that replaces a lost rank begins the program from its "
      "start, and cannot be brought past a run or a State that the others have finished. Use one "
      "State and one elastic run for all of it: keep the number of the fold or phase in the State, "
      "and loop over these inside the function that elastic runs");
}

}  // namespace resilient::plugin
