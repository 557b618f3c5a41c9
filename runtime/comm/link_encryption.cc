#include "runtime/comm/link_encryption.h"

#include <string>
#include <utility>

#include "runtime/base/hmac.h"
#include "runtime/base/log.h"
#include "runtime/tls/library.h"

namespace resilient {
namespace {

constexpr std::size_t kReadBytes = 128u << 10;
// No other proof of the secret is one of this text.
constexpr std::string_view kKeyLabel = "resilient link key: ";
static_assert(kHmacBytes == kPskBytes);

}  // namespace

Result<std::unique_ptr<LinkEncryption>> LinkEncryption::Load() {
  const Result<TlsFunctions> functions = LoadTlsLibrary("RESILIENT_LINK_TLS");
  if (!functions.ok()) return functions.status();
  return std::make_unique<LinkEncryption>(PskContext::Make(*functions));
}

LinkEncryption::LinkEncryption(std::shared_ptr<const PskContext> context)
    : context_(std::move(context)),
      scratch_(std::make_shared<std::vector<std::byte>>(kReadBytes)) {}

std::unique_ptr<ByteStream> LinkEncryption::Wrap(std::unique_ptr<ByteStream> stream, TlsRole role,
                                                 std::string_view secret,
                                                 std::string_view hello_proof,
                                                 EncryptedStream::Use use) {
  if (stream->in_memory()) return stream;
  const std::string key = HmacSha256(secret, StrCat(kKeyLabel, hello_proof));
  return std::make_unique<EncryptedStream>(std::move(stream), context_->NewStream(role, key), use,
                                           scratch_);
}

}  // namespace resilient
