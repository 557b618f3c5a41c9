#include "store/server/fair_turns.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace resilient::store {
namespace {

// Of days of work; so that the product below does not overflow.
constexpr std::uint64_t kTurnsThatPayAll = 1'000'000'000;

}  // namespace

FairTurns::Account& FairTurns::Of(const std::string& job) {
  return accounts_.try_emplace(job, Account{share_, turn_}).first->second;
}

Duration FairTurns::LeftOf(const Account& account) const {
  const std::uint64_t turns = turn_ - account.turn;
  if (turns >= kTurnsThatPayAll) return share_;
  return std::min(account.left + static_cast<Duration::rep>(turns) * share_, share_);
}

void FairTurns::NextTurn() {
  ++turn_;
  order_.splice(order_.end(), spent_);
  if (accounts_.size() >= drop_at_) DropIdle();
}

void FairTurns::DropIdle() {
  std::erase_if(accounts_, [this](const auto& entry) {
    return !entry.second.is_queued && LeftOf(entry.second) == share_;
  });
  drop_at_ = std::max(kFewAccounts, 2 * accounts_.size());
}

Duration FairTurns::Left(const std::string& job) const {
  const auto found = accounts_.find(job);
  return found == accounts_.end() ? share_ : LeftOf(found->second);
}

void FairTurns::Charge(const std::string& job, Duration took) {
  Account& account = Of(job);
  account.left = std::max(LeftOf(account) - took, -kSharesOwedMax * share_);
  account.turn = turn_;
}

void FairTurns::Wait(const std::string& job, ConnectionId connection) {
  if (waiting_.contains(connection)) return;
  Account& account = Of(job);
  account.connections.push_back(connection);
  waiting_[connection] = {&account, std::prev(account.connections.end())};
  if (!std::exchange(account.is_queued, true)) order_.push_back(&account);
}

void FairTurns::Forget(ConnectionId connection) {
  const auto found = waiting_.find(connection);
  if (found == waiting_.end()) return;
  found->second.account->connections.erase(found->second.position);
  waiting_.erase(found);
}

void FairTurns::Clear() {
  while (!waiting_.empty()) Forget(waiting_.begin()->first);
}

std::vector<ConnectionId> FairTurns::Waiting() const {
  std::vector<ConnectionId> all;
  all.reserve(waiting_.size());
  for (const auto& [connection, place] : waiting_) all.push_back(connection);
  return all;
}

std::optional<ConnectionId> FairTurns::Next() {
  while (!order_.empty()) {
    Account& account = *order_.front();
    if (LeftOf(account) <= Duration::zero()) {
      spent_.splice(spent_.end(), order_, order_.begin());
      continue;
    }
    if (account.connections.empty()) {
      account.is_queued = false;
      order_.pop_front();
      continue;
    }
    const ConnectionId next = account.connections.front();
    Forget(next);
    order_.splice(order_.end(), order_, order_.begin());
    return next;
  }
  return std::nullopt;
}

}  // namespace resilient::store
