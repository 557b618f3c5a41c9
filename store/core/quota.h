#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

namespace resilient::store {

// What all jobs together may take of one thing: bytes, seats. Its users are the Quotas of it.
// Owner: ServerCore. Thread: caller-synchronised.
struct Pool {
  std::size_t most = 0;
  std::size_t taken = 0;
  std::size_t quotas = 0;  // Jobs that may take some.

  // What no other job can take from one.
  std::size_t EvenShare() const { return most / std::max<std::size_t>(quotas, 1); }
};

// What one job takes of a pool, for as long as it lives, and how much it may take: its own limit,
// and what the others leave of the pool, but never less than an even share. So jobs that take all
// they can keep none of the others from its work; all together take at most twice the pool.
// Owner: what belongs to the job. Thread: caller-synchronised. Pure.
class Quota {
 public:
  // `pool` outlives this, or is null: there are no others.
  Quota(std::size_t most, Pool* pool) : most_(most), pool_(pool) {
    if (pool_ != nullptr) ++pool_->quotas;
  }
  ~Quota() {
    *this -= taken_;
    if (pool_ != nullptr) --pool_->quotas;
  }
  Quota(const Quota&) = delete;
  Quota& operator=(const Quota&) = delete;

  enum class Room { kThere, kNoneForJob, kNoneForAll };
  Room RoomFor(std::size_t more) const {
    if (more > most_ || taken_ > most_ - more) return Room::kNoneForJob;
    if (pool_ == nullptr || pool_->taken + more <= pool_->most) return Room::kThere;
    return taken_ + more <= pool_->EvenShare() ? Room::kThere : Room::kNoneForAll;
  }
  bool Fits(std::size_t more) const { return RoomFor(more) == Room::kThere; }

  // What is there already is taken whatever the limits are.
  Quota& operator+=(std::size_t more) {
    taken_ += more;
    if (pool_ != nullptr) pool_->taken += more;
    return *this;
  }
  Quota& operator-=(std::size_t less) {
    taken_ -= less;
    if (pool_ != nullptr) pool_->taken -= less;
    return *this;
  }
  std::size_t taken() const { return taken_; }
  std::size_t most() const { return most_; }
  const Pool* pool() const { return pool_; }

 private:
  const std::size_t most_;
  Pool* const pool_;
  std::size_t taken_ = 0;
};

// So much of a quota is taken by the owner of this. Thread: caller-synchronised.
class Charge {
 public:
  // `quota` outlives this, or is null: nothing is counted.
  explicit Charge(Quota* quota = nullptr) : quota_(quota) {}
  ~Charge() { Set(0); }
  Charge(Charge&& other) noexcept
      : quota_(std::exchange(other.quota_, nullptr)), amount_(std::exchange(other.amount_, 0)) {}
  Charge& operator=(Charge&& other) noexcept {
    std::swap(quota_, other.quota_);
    std::swap(amount_, other.amount_);
    return *this;
  }

  void Set(std::size_t amount) {
    if (quota_ != nullptr) (*quota_ += amount) -= amount_;
    amount_ = amount;
  }

 private:
  Quota* quota_;
  std::size_t amount_ = 0;
};

}  // namespace resilient::store
