#include "store/core/status_page.h"

#include "runtime/base/json.h"

namespace resilient::store {

bool StatusPage::Take(std::size_t cost, const std::string& job, std::uint64_t round,
                      std::uint64_t rank) {
  if (next_) return false;
  if (taken_ >= kMost) {
    next_ = StatusOp{asked_.job, job, round, rank};
    return false;
  }
  taken_ += cost;
  return true;
}

void StatusPage::AppendNext(std::string& out) const {
  if (!next_) return;
  out += ",\"next\":{\"job\":" + JsonString(next_->from_job) +
         ",\"round\":" + std::to_string(next_->from_round) +
         ",\"rank\":" + std::to_string(next_->from_rank) + "}";
}

}  // namespace resilient::store
