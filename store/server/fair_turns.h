#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <resilient/clock.h>

#include "store/core/server_core.h"

namespace resilient::store {

// Whose requests the loop handles next, so that no job keeps the others waiting: deficit round
// robin (Shreedhar and Varghese, 1995) over jobs, in time. In each turn of the loop a job has a
// share; what a request takes beyond it is owed, and comes off the shares of later turns: ten of
// them at most, as the time of a step that took longer was mostly another process's. A connection
// whose job has nothing left waits here, in the order in which it came, and jobs take turns. A job
// that is alone loses nothing, as turns in which nobody else has work are short.
//
// Pure: the owner measures. Owner: Server. Thread: the loop's.
class FairTurns {
 public:
  // `share`: of each job, in each turn.
  explicit FairTurns(Duration share) : share_(share) {}

  // Every job has a share again, less what it owes.
  void NextTurn();
  // Of the share of `job` in this turn; not positive: its requests wait for a later one.
  Duration Left(const std::string& job) const;
  // Work for `job` took so long.
  void Charge(const std::string& job, Duration took);

  // `connection` of `job` has requests that wait. Idempotent.
  void Wait(const std::string& job, ConnectionId connection);
  void Forget(ConnectionId connection);  // Idempotent.
  void Clear();                          // Of those that wait.
  // Takes out the one whose requests are to be handled next; nullopt: none in this turn.
  std::optional<ConnectionId> Next();
  bool any_waiting() const { return !waiting_.empty(); }
  std::vector<ConnectionId> Waiting() const;  // In no order.

 private:
  struct Account {
    Duration left;  // In turn number `turn`; negative: owed.
    std::uint64_t turn;
    bool is_queued = false;  // In order_ or spent_.
    std::list<ConnectionId> connections;
  };
  struct Place {
    Account* account;
    std::list<ConnectionId>::iterator position;
  };

  static constexpr std::size_t kFewAccounts = 64;
  static constexpr int kSharesOwedMax = 10;

  Account& Of(const std::string& job);
  Duration LeftOf(const Account& account) const;
  void DropIdle();

  const Duration share_;
  std::uint64_t turn_ = 0;
  // Of jobs that have taken something, until those that owe nothing are dropped. Nodes stay put.
  std::unordered_map<std::string, Account> accounts_;
  std::size_t drop_at_ = kFewAccounts;
  std::list<Account*> order_;  // Those with connections that wait, the next one first;
  std::list<Account*> spent_;  // those of them that can take nothing more in this turn.
  std::unordered_map<ConnectionId, Place> waiting_;
};

}  // namespace resilient::store
