#include "runtime/comm/checksum.h"

// All of it is compiled in here: nothing is linked, and no other xxhash of the process is met.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/base/check.h"

namespace resilient {

static_assert(XXH_VERSION_NUMBER >= 800, "XXH3 is stable from xxhash 0.8.0 on");

struct RunningChecksum::State {
  XXH3_state_t hash;
};

std::uint64_t ChecksumOf(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

RunningChecksum::RunningChecksum() = default;
RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::Begin() {
  if (state_ == nullptr) state_ = std::make_unique<State>();
  XXH3_64bits_reset(&state_->hash);
}

void RunningChecksum::Update(std::span<const std::byte> bytes) {
  RESILIENT_CHECK(state_ != nullptr);
  XXH3_64bits_update(&state_->hash, bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::Value() const {
  RESILIENT_CHECK(state_ != nullptr);
  return XXH3_64bits_digest(&state_->hash);
}

}  // namespace resilient
