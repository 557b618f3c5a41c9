#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "store/core/messages.h"

namespace resilient::store {

// How much of a status has been told, so that one answer takes a few milliseconds however many
// seats there are, and where the next page goes on. A job is told with its worlds by round, their
// ranks, then its spares. Owner: who makes a page. Thread: confined to it. Pure.
class StatusPage {
 public:
  // What is told in words costs so much, where a seat that is only passed costs one.
  static constexpr std::size_t kTold = 32;
  static constexpr std::size_t kMost = std::size_t{128} << 10;
  // The place in a job that is behind all its worlds.
  static constexpr std::uint64_t kSparesRound = UINT64_MAX;

  explicit StatusPage(StatusOp asked) : asked_(std::move(asked)) {}

  // Empty: every job.
  const std::string& only_job() const { return asked_.job; }
  const std::string& first_job() const { return asked_.from_job; }
  // Of `job`, where this page begins.
  std::uint64_t first_round(const std::string& job) const {
    return job == asked_.from_job ? asked_.from_round : 0;
  }
  std::uint64_t first_rank(const std::string& job, std::uint64_t round) const {
    return job == asked_.from_job && round == asked_.from_round ? asked_.from_rank : 0;
  }

  // Whether there is room for the next thing at this place, which then counts. If not, the page
  // ends, and the next one begins there.
  bool Take(std::size_t cost, const std::string& job, std::uint64_t round, std::uint64_t rank);
  // Appends what a page ends with: ,"next":{..} or nothing.
  void AppendNext(std::string& out) const;

 private:
  const StatusOp asked_;
  std::size_t taken_ = 0;
  std::optional<StatusOp> next_;
};

}  // namespace resilient::store
