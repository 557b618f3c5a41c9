#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include <resilient/status.h>

#include "runtime/tls/functions.h"
#include "runtime/tls/ssl_context.h"
#include "runtime/tls/stream.h"

namespace resilient {

inline constexpr std::size_t kPskBytes = 32;

// What makes streams between two sides that share a key: TLS 1.3 with the key as an external PSK
// and a Diffie-Hellman exchange (RFC 8446, 2.2), without certificates. Whoever has recorded a
// stream and learns the key later can read none of it but what was sent early; whoever has no key
// ends in an error of the handshake. Owner: shared by a fabric and its streams. Thread:
// thread-safe.
class PskContext : public std::enable_shared_from_this<PskContext> {
 public:
  // After so many bytes one side changes the key that it encrypts with: AES-GCM may encrypt 2^24.5
  // full records with one (RFC 8446, 5.5), which a training job sends in minutes.
  static constexpr std::uint64_t kBytesOfOneKey = std::uint64_t{1} << 36;

  static std::shared_ptr<const PskContext> Make(const TlsFunctions& functions,
                                                std::uint64_t bytes_of_one_key = kBytesOfOneKey);
  ~PskContext();
  PskContext(const PskContext&) = delete;
  PskContext& operator=(const PskContext&) = delete;

  // REQUIRES: kPskBytes bytes, of one stream alone: what is sent early could be replayed on another
  // stream of the same key.
  std::unique_ptr<TlsStream> NewStream(TlsRole role, std::string_view key) const;

 private:
  struct Use;

  PskContext(const TlsFunctions& functions, std::uint64_t bytes_of_one_key);
  static int Offer(SSL* ssl, const EVP_MD* digest, const unsigned char** identity,
                   std::size_t* identity_bytes, SSL_SESSION** session);
  static int Find(SSL* ssl, const unsigned char* identity, std::size_t identity_bytes,
                  SSL_SESSION** session);
  SSL_SESSION* SessionOf(SSL* ssl, std::string_view key) const;

  const TlsFunctions functions_;
  const std::uint64_t bytes_of_one_key_;
  const SslContext context_;
};

}  // namespace resilient
