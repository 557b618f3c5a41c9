#include "store/core/wait_graph.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace resilient::store {
namespace {

// What is left of the graph.
class Reduction {
 public:
  explicit Reduction(const std::vector<BlockedRank>& blocked) {
    for (const BlockedRank& one : blocked) stuck_.emplace(one.rank, &one);
    for (const BlockedRank& one : blocked) {
      for (const BlockedCall& call : one.calls) AddCall(one.rank, call);
      if (one.calls.empty()) Free(one.rank);
    }
    while (!freed_.empty()) Spread();
  }

  const std::map<int, const BlockedRank*>& stuck() const { return stuck_; }

 private:
  struct Call {
    int rank = -1;
    std::size_t hopeless = 0;  // Missing ranks that are stuck.
    bool any = false;
    std::size_t missing = 0;
    bool MayGoOn() const { return any && missing > 0 ? hopeless < missing : hopeless == 0; }
  };

  void AddCall(int rank, const BlockedCall& call) {
    const std::set<int> missing(call.missing.begin(), call.missing.end());
    const std::size_t index = calls_.size();
    Call& added = calls_.emplace_back(Call{.rank = rank, .any = call.any});
    added.missing = missing.size();
    for (const int peer : missing) {
      if (!stuck_.contains(peer)) continue;
      ++added.hopeless;
      waiting_for_[peer].push_back(index);
    }
    if (added.MayGoOn()) Free(rank);
  }
  void Free(int rank) {
    if (stuck_.erase(rank) > 0) freed_.push_back(rank);
  }
  void Spread() {
    const int rank = freed_.back();
    freed_.pop_back();
    for (const std::size_t index : waiting_for_[rank]) {
      Call& call = calls_[index];
      --call.hopeless;
      if (call.MayGoOn()) Free(call.rank);
    }
  }

  std::map<int, const BlockedRank*> stuck_;
  std::vector<int> freed_;  // Whose waiters are still to be told.
  std::vector<Call> calls_;
  std::map<int, std::vector<std::size_t>> waiting_for_;
};

// Why `rank` is stuck: its first call, and the lowest stuck rank that is missing there.
WaitEdge EdgeOf(const BlockedRank& rank, const std::map<int, const BlockedRank*>& stuck) {
  const auto earlier = [](const BlockedCall& a, const BlockedCall& b) {
    return std::pair(a.group, a.seq) < std::pair(b.group, b.seq);
  };
  const auto call = std::min_element(rank.calls.begin(), rank.calls.end(), earlier);
  WaitEdge edge{.from = rank.rank, .to = -1, .call = *call};
  for (const int peer : call->missing) {
    if (stuck.contains(peer) && (edge.to < 0 || peer < edge.to)) edge.to = peer;
  }
  return edge;
}

}  // namespace

std::vector<WaitEdge> FindCircle(const std::vector<BlockedRank>& blocked) {
  const Reduction reduction(blocked);
  if (reduction.stuck().empty()) return {};
  // From anywhere among them the way leads into a circle.
  std::vector<WaitEdge> way;
  std::map<int, std::size_t> seen;
  int rank = reduction.stuck().begin()->first;
  while (seen.try_emplace(rank, way.size()).second) {
    way.push_back(EdgeOf(*reduction.stuck().at(rank), reduction.stuck()));
    rank = way.back().to;
  }
  way.erase(way.begin(), way.begin() + static_cast<std::ptrdiff_t>(seen.at(rank)));
  const auto lowest = std::min_element(
      way.begin(), way.end(), [](const WaitEdge& a, const WaitEdge& b) { return a.from < b.from; });
  std::rotate(way.begin(), lowest, way.end());
  return way;
}

}  // namespace resilient::store
