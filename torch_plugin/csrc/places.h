#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace resilient::plugin {

// Unique in a world: the elastic run in which a State was first used (0: before any), and its
// number among the States first used there, from 1.
struct StateName {
  std::int64_t run = 0;
  std::int64_t number = 0;
  friend bool operator==(const StateName&, const StateName&) = default;
};

// Counts the elastic runs of a world and the States that are first used in each.
//
// A process that takes a lost rank's seat begins the program from its start: it is in its first
// elastic run while the others may be in a later one. What ranks exchange, and the names of what
// they keep in the store, therefore say where the rank is. Equal on all ranks that have come the
// same way through the program; what a run counts is counted from its beginning again whenever its
// function is called again. torch_resilient/_places.py is the same for Python.
//
// Owner: SessionContext. Thread: the one that uses the States.
class Whereabouts {
 public:
  // The number of the run, from 1.
  std::int64_t BeginRun();
  // The function of this run is called (again): what ran inside it has not been yet.
  void BeginAgain(std::int64_t run);
  // The State of the run has been used. It has its name from now, or from before.
  void Entered();
  void EndRun();
  // For a State that is used for the first time.
  StateName NameState();

  std::int64_t runs() const { return runs_; }
  // Numbers of the runs that have not ended, the outer one first.
  const std::vector<std::int64_t>& active() const { return active_; }

 private:
  std::int64_t runs_ = 0;
  std::vector<std::int64_t> active_;
  std::int64_t states_ = 0;  // First used since the newest run began.
};

// What ranks tell each other before they load anything. Thread: value type.
struct Place {
  std::int64_t runs = 0;
  std::vector<std::int64_t> active;
  StateName state;
  std::vector<std::string> names;  // Of the replicated values.

  // Equal for equal places, whatever the order of the names; equal on machines of one byte order.
  std::uint64_t Digest() const;
  // For people: "in elastic run 2, with its State (step, weights)".
  std::string Text() const;
};

// In which places the ranks are, from Place::Text of each, as a text for all ranks.
// REQUIRES: they are not all equal.
std::string DifferenceOf(const std::vector<std::string>& places);

}  // namespace resilient::plugin
