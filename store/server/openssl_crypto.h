#pragma once

#include "store/core/handshake.h"

namespace resilient::store {

// Crypto by OpenSSL, which the server links. Owner: Access. Thread: thread-safe.
class OpensslCrypto final : public Crypto {
 public:
  std::string RandomBytes(std::size_t count) const override;
  std::string HmacSha256(std::string_view key, std::string_view text) const override;
  bool Equal(std::string_view left, std::string_view right) const override;
};

}  // namespace resilient::store
