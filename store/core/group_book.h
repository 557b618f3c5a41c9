#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <resilient/rendezvous.h>

namespace resilient::store {

// Of which ranks the members of one world have made their groups, each by its own account.
//
// How it works: groups have names, and two ranks that mean different groups by one name wait for
// each other for ever, or for a rank that has never heard of theirs. In one generation a name
// stands for one group of a rank once an operation was submitted there, also when it is closed. So
// two accounts of used groups that contradict each other are true for good, however old they are. A
// group that was made and not used may still be closed, and another one get its name.
//
// Owner: the Diagnosis of a world. Thread: caller-synchronised. Pure.
class GroupBook {
 public:
  // Two members and the group that they have made of different ranks. Thread: value type.
  struct Difference {
    std::string group;
    int one = -1;
    GroupRanks of_one;
    int other = -1;
    GroupRanks of_other;
  };

  void Note(int rank, const std::vector<GroupMade>& made);
  // Whether two accounts of a group may differ at all: as a rule none do, and none need be
  // compared.
  bool MayDiffer() const { return may_differ_; }
  // As far as both have given an account of `group`. `used`: only where both have used it.
  std::optional<Difference> Compare(int one, int other, const std::string& group, bool used) const;
  // GroupRanks::digest of what `rank` has made; 0: it has not said.
  std::uint64_t DigestOf(int rank, const std::string& group) const;
  void Forget(const std::set<int>& all_but);

 private:
  const GroupMade* Find(int rank, const std::string& group) const;

  std::map<int, std::map<std::string, GroupMade>> made_;  // By rank and group.
  std::map<std::string, GroupRanks> first_;               // By group: the account that came first.
  bool may_differ_ = false;
};

}  // namespace resilient::store
