#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "store/core/server_core.h"

namespace resilient::store {

// The steps of the core that must not be seen yet, in order: those whose writes are not kept, and
// all later ones, which may tell of values that are not kept. Owner: Server. Thread: the loop's.
class HeldEffects {
 public:
  // `ticket`: of the newest write that the step may tell of. Ascends. `write_bytes`: of its own.
  // `begun`: when the request came that the step answers; none if it answers none.
  void Push(std::uint64_t ticket, std::size_t write_bytes, Effects effects,
            std::optional<Instant> begun = std::nullopt);
  struct Step {
    std::uint64_t ticket = 0;
    std::size_t bytes = 0;
    Effects effects;
    std::optional<Instant> begun;
  };
  // The oldest step, if everything up to `kept` being kept sets it free.
  std::optional<Step> Pop(std::uint64_t kept);

  bool empty() const { return steps_.empty(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::deque<Step> steps_;
  std::size_t bytes_ = 0;
};

std::size_t BytesOf(const std::vector<Write>& writes);
// Nothing at all follows from the step.
bool IsEmpty(const Effects& effects);

}  // namespace resilient::store
