#include "runtime/base/hmac.h"

#include <mbedtls/md.h>

#include "runtime/base/check.h"

namespace resilient {
namespace {

const unsigned char* Bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string HmacSha256(std::string_view key, std::string_view text) {
  std::string proof(kHmacBytes, '\0');
  // It fails for a digest that this build of the library lacks, and when memory runs out.
  RESILIENT_CHECK(mbedtls_md_hmac(mbedtls_md_info_from_type(MBEDTLS_MD_SHA256), Bytes(key),
                                  key.size(), Bytes(text), text.size(),
                                  reinterpret_cast<unsigned char*>(proof.data())) == 0);
  return proof;
}

bool SameBytes(std::string_view left, std::string_view right) {
  if (left.size() != right.size()) return false;
  // Volatile: the compiler may not stop at the first byte that differs.
  volatile unsigned char difference = 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    difference = static_cast<unsigned char>(
        difference | (static_cast<unsigned char>(left[i]) ^ static_cast<unsigned char>(right[i])));
  }
  return difference == 0;
}

}  // namespace resilient
