#pragma once

#include <cstdint>
#include <string>

#include "store/core/secret_maker.h"

namespace resilient::store {

// Secrets that a test can repeat: each is another one, and easily guessed.
inline SecretMaker NumberedSecrets(std::uint64_t first = 1) {
  return [next = first]() mutable { return "secret-" + std::to_string(next++); };
}

}  // namespace resilient::store
