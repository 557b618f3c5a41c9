#include "store/core/gathering.h"

#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/texts.h"

namespace resilient::store {
namespace {

constexpr std::size_t kRanksNamed = 16;  // In a text; of more only the number is told.

}  // namespace

void Gathering::Arrive(WaitId id, std::int64_t rank, std::string value) {
  value_bytes_ += value.size();
  const bool is_new = seats_.try_emplace(rank, Seat{id, std::move(value)}).second;
  RESILIENT_CHECK(is_new);
  arrived_.emplace(id, rank);
  last_rank_ = rank;
}

void Gathering::Withdraw(WaitId id) {
  const auto arrived = arrived_.find(id);
  if (arrived == arrived_.end()) return;
  if (const auto seat = seats_.find(arrived->second); seat != seats_.end()) {
    value_bytes_ -= seat->second.value.size();
    seats_.erase(seat);
  }
  arrived_.erase(arrived);
}

bool Gathering::HasCome(SessionId session) const {
  const auto first = arrived_.lower_bound({session, 0});
  return first != arrived_.end() && first->first.session == session;
}

const WaitId* Gathering::Holder(std::int64_t rank) const {
  const auto seat = seats_.find(rank);
  return seat == seats_.end() ? nullptr : &seat->second.id;
}

std::vector<WaitId> Gathering::Ids() const {
  std::vector<WaitId> ids;
  ids.reserve(arrived_.size());
  for (const auto& [id, rank] : arrived_) ids.push_back(id);
  return ids;
}

std::vector<std::string> Gathering::TakeValues() {
  std::vector<std::string> values(static_cast<std::size_t>(size_));
  for (auto& [rank, seat] : seats_) values[static_cast<std::size_t>(rank)].swap(seat.value);
  value_bytes_ = 0;
  return values;
}

std::string Gathering::Late() const {
  std::string text = std::to_string(arrived_.size()) + " of " + std::to_string(size_) + " arrived";
  if (seats_.empty()) return text;
  const std::size_t missing = static_cast<std::size_t>(size_) - seats_.size();
  std::size_t named = 0;
  std::int64_t rank = 0;
  for (auto seat = seats_.begin(); rank < size_ && named < kRanksNamed; ++rank) {
    if (seat != seats_.end() && seat->first == rank) {
      ++seat;
      continue;
    }
    text += (named == 0 ? "; missing ranks " : ", ") + std::to_string(rank);
    ++named;
  }
  return text + AndMore(missing - named);
}

}  // namespace resilient::store
