#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include <resilient/status.h>

#include "runtime/comm/byte_stream.h"
#include "runtime/comm/encrypted_stream.h"
#include "runtime/tls/psk_context.h"

namespace resilient {

// Encrypts the links of a rank (RESILIENT_LINK_TLS). The key of a stream comes from the secret of
// the view and from the proof of the hello that began it, so each stream has one of its own, which
// nobody but the members of the view can compute. Shared memory is left as it is. Owner: the
// fabric. Thread: loop-confined.
class LinkEncryption {
 public:
  // kSetting without OpenSSL 3.
  static Result<std::unique_ptr<LinkEncryption>> Load();
  explicit LinkEncryption(std::shared_ptr<const PskContext> context);

  // `role`: kClient for the side that has sent the hello, whose proof is `hello_proof`.
  std::unique_ptr<ByteStream> Wrap(std::unique_ptr<ByteStream> stream, TlsRole role,
                                   std::string_view secret, std::string_view hello_proof,
                                   EncryptedStream::Use use = EncryptedStream::Use::kBothWays);

 private:
  const std::shared_ptr<const PskContext> context_;
  const std::shared_ptr<std::vector<std::byte>> scratch_;
};

}  // namespace resilient
