#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/group_ranks.h>
#include <resilient/rendezvous.h>

// Parts of texts for people that more than one component writes. Pure.
namespace resilient {

std::int64_t WholeSeconds(Duration duration);

// " and 4 more"; empty for none.
std::string AndMore(std::size_t left_out);

// "a, b and 4 more": at most the first `limit` of `items`, each as `text_of` says.
template <typename Items, typename TextOf>
std::string ListOf(const Items& items, std::size_t limit, const TextOf& text_of) {
  const std::size_t named = std::min(limit, items.size());
  std::string list;
  for (auto item = items.begin(); item != std::next(items.begin(), named); ++item) {
    if (item != items.begin()) list += ", ";
    list += text_of(*item);
  }
  return list + AndMore(items.size() - named);
}

// "rank 3", "ranks 2, 3 and 4 more".
std::string RanksText(const std::vector<int>& ranks);

// " at train.py:7"; empty where the program's line is not known.
std::string AtCallSite(const std::string& call_site);

// "all_reduce(float32[4], sum) #9 of group 'world' at train.py:7"
std::string CallText(const WaitingCall& call);

// Two ranks have made the group of one name of different ranks: who, of what and where, and what to
// do. `one`, `other`: "rank 1 (host a, pid 7)".
std::string OtherRanksText(const std::string& group, std::uint64_t generation,
                           const std::string& one, const GroupRanks& of_one,
                           const std::string& other, const GroupRanks& of_other);

}  // namespace resilient
