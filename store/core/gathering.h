#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace resilient::store {

// Handle of a session inside one server; never reused. 0: none.
using SessionId = std::uint64_t;

// A request that waits, by who asked and under which number.
struct WaitId {
  SessionId session = 0;
  std::uint64_t seq = 0;
  friend auto operator<=>(const WaitId&, const WaitId&) = default;
};

// Who has come to one barrier or exchange. Owner: Keyspace. Thread: caller-synchronised. Pure.
class Gathering {
 public:
  // `survivors_of`: not 0: the members of that generation that are left are enough.
  explicit Gathering(std::int64_t size, std::uint64_t survivors_of = 0)
      : size_(size), survivors_of_(survivors_of) {}

  // To a barrier; the same id comes once.
  void Arrive(WaitId id) { arrived_.emplace(id, kNoRank); }
  // To an exchange. REQUIRES: nobody holds the rank.
  void Arrive(WaitId id, std::int64_t rank, std::string value);
  void Withdraw(WaitId id);
  // All members of a generation are to come to it, so that one that has left is one too few.
  void set_of_members() { of_members_ = true; }
  bool of_members() const { return of_members_; }
  // Who has come as `rank`; null: nobody.
  const WaitId* Holder(std::int64_t rank) const;

  bool HasCome(SessionId session) const;

  std::int64_t size() const { return size_; }
  std::uint64_t survivors_of() const { return survivors_of_; }
  // Of an exchange: who came last.
  std::int64_t last_rank() const { return last_rank_; }
  bool empty() const { return arrived_.empty(); }
  bool complete() const { return static_cast<std::int64_t>(arrived_.size()) >= size_; }
  std::vector<WaitId> Ids() const;
  std::size_t value_bytes() const { return value_bytes_; }
  // In rank order, empty for those that have not come; the gathering is not to be used any more but
  // for Withdraw.
  std::vector<std::string> TakeValues();

  // "3 of 4 arrived", and of an exchange "; missing ranks 2".
  std::string Late() const;

 private:
  static constexpr std::int64_t kNoRank = -1;
  struct Seat {
    WaitId id;
    std::string value;
  };

  const std::int64_t size_;
  const std::uint64_t survivors_of_;
  bool of_members_ = false;
  std::int64_t last_rank_ = 0;
  std::map<WaitId, std::int64_t> arrived_;  // To the rank.
  std::map<std::int64_t, Seat> seats_;      // Of an exchange.
  std::size_t value_bytes_ = 0;
};

}  // namespace resilient::store
