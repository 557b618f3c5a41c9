#include "store/core/group_book.h"

#include "store/core/messages.h"

namespace resilient::store {
namespace {

// Groups that are told apart by their first account. Beyond, all are compared.
constexpr std::size_t kFirstAccountsMax = 4096;

}  // namespace

void GroupBook::Note(int rank, const std::vector<GroupMade>& made) {
  if (made.empty()) return;
  std::map<std::string, GroupMade>& known = made_[rank];
  // What is still waited for is told again.
  if (known.size() + made.size() > 2 * kMadeGroupsMax) known.clear();
  for (const GroupMade& one : made) {
    known.insert_or_assign(one.group, one);
    if (may_differ_ || one.ranks.digest == 0) continue;
    const auto first = first_.try_emplace(one.group, one.ranks).first;
    may_differ_ = first->second.Contradicts(one.ranks) || first_.size() > kFirstAccountsMax;
  }
}

const GroupMade* GroupBook::Find(int rank, const std::string& group) const {
  const auto groups = made_.find(rank);
  if (groups == made_.end()) return nullptr;
  const auto made = groups->second.find(group);
  return made == groups->second.end() ? nullptr : &made->second;
}

std::optional<GroupBook::Difference> GroupBook::Compare(int one, int other,
                                                        const std::string& group, bool used) const {
  const GroupMade* here = Find(one, group);
  const GroupMade* there = Find(other, group);
  if (here == nullptr || there == nullptr || !here->ranks.Contradicts(there->ranks))
    return std::nullopt;
  if (used && !(here->used && there->used)) return std::nullopt;
  return Difference{group, one, here->ranks, other, there->ranks};
}

std::uint64_t GroupBook::DigestOf(int rank, const std::string& group) const {
  const GroupMade* made = Find(rank, group);
  return made == nullptr ? 0 : made->ranks.digest;
}

void GroupBook::Forget(const std::set<int>& all_but) {
  std::erase_if(made_, [&](const auto& one) { return !all_but.contains(one.first); });
}

}  // namespace resilient::store
