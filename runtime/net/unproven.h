#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <resilient/clock.h>

namespace resilient {

// The connections of a port whose peers have not proved yet that they may use it, and which of them
// goes first when there are too many. Each is charged to the address that it comes from: who opens
// thousands loses their own, and the few of every other address stay. (sshd's MaxStartups and
// PerSourceMaxStartups have the same aim; they refuse the new ones by chance.)
//
// Pure. Owner: who accepts. Thread: caller-synchronised.
class UnprovenConnections {
 public:
  using Id = std::uint64_t;

  // REQUIRES: ids ascend with `accepted`, in whatever order they are added. `address`: without the
  // port.
  void Add(Id id, const std::string& address, Instant accepted);
  void Remove(Id id);  // Idempotent.
  void Clear();

  std::size_t size() const { return by_id_.size(); }
  bool empty() const { return by_id_.empty(); }
  bool Has(Id id) const { return by_id_.contains(id); }
  std::size_t CountOf(const std::string& address) const;
  std::string AddressOf(Id id) const;  // Empty: it is none of these.

  // Of the address that has most of them, the oldest first; where addresses have equally many, of
  // the one whose oldest is older. Empty: there are none.
  const std::set<Id>& OfHeaviest() const;
  // Those accepted at `before` or earlier, the oldest first.
  std::vector<Id> AcceptedBy(Instant before) const;
  std::optional<Instant> AcceptedAt(Id id) const;
  // When the oldest was accepted.
  std::optional<Instant> OldestAccepted() const;

 private:
  struct Entry {
    std::string address;
    Instant accepted;
  };
  // The heaviest first.
  struct Weight {
    std::size_t count;
    Id oldest;
    bool operator<(const Weight& other) const {
      return count != other.count ? count > other.count : oldest < other.oldest;
    }
  };

  // Edits the set of `address`, and keeps its weight.
  template <typename Edit>
  void Change(const std::string& address, Edit edit);

  std::map<Id, Entry> by_id_;
  std::map<std::string, std::set<Id>> by_address_;  // None is empty.
  std::map<Weight, const std::set<Id>*> by_weight_;
  const std::set<Id> none_;
};

// What an address is charged as: of IPv6 the network of 64 bits, which one host has to itself.
// `numeric` as getnameinfo writes it; anything else is charged as it stands. Pure.
std::string ChargedAddress(const std::string& numeric);

}  // namespace resilient
