#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace resilient::store {

// One change of the durable state: a row is written or removed. Row names are of the core alone
// (see storage.h); an engine keeps them sorted and does not look inside. Thread: value type.
struct Write {
  std::string row;
  std::optional<std::string> value;  // nullopt: the row is removed.
  friend bool operator==(const Write&, const Write&) = default;
};

// What a step of the core changed in its durable state, in order. Its parts (Keyspace,
// SessionTable, Membership) note each change where they make it; ServerCore hands the writes of a
// step to the shell together with what the step has to say, which must not be said before they are
// kept. Off for a store in memory: then nothing is noted. It also numbers the changes of keys: one
// revision each, over all jobs, so that a job that is forgotten and comes back goes on above what
// anybody saw of it. Owner: ServerCore. Thread: caller-synchronised. Pure.
class Journal {
 public:
  explicit Journal(bool on) : on_(on) {}

  // To skip the encoding of what would not be kept.
  bool on() const { return on_; }
  void Put(std::string row, std::string value) {
    if (on_) writes_.push_back({std::move(row), std::move(value)});
  }
  void Remove(std::string row) {
    if (on_) writes_.push_back({std::move(row), std::nullopt});
  }
  // The number of the newest change.
  std::uint64_t revision() const { return revision_; }
  std::uint64_t NextRevision() { return ++revision_; }
  void RestoreRevision(std::uint64_t revision) { revision_ = revision; }
  // The writes since the last call.
  std::vector<Write> Take() { return std::exchange(writes_, {}); }

 private:
  const bool on_;
  std::vector<Write> writes_;
  std::uint64_t revision_ = 0;
};

}  // namespace resilient::store
