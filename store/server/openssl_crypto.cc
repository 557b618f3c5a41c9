#include "store/server/openssl_crypto.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "runtime/base/check.h"

namespace resilient::store {

std::string OpensslCrypto::RandomBytes(std::size_t count) const {
  std::string bytes(count, '\0');
  // It fails when the kernel gives no randomness: a nonce that can be guessed is no answer to that.
  RESILIENT_CHECK(
      RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(count)) == 1);
  return bytes;
}

std::string OpensslCrypto::HmacSha256(std::string_view key, std::string_view text) const {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned bytes = 0;
  RESILIENT_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                       reinterpret_cast<const unsigned char*>(text.data()), text.size(), out,
                       &bytes) != nullptr);
  return {reinterpret_cast<const char*>(out), bytes};
}

bool OpensslCrypto::Equal(std::string_view left, std::string_view right) const {
  return left.size() == right.size() && CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
}

}  // namespace resilient::store
