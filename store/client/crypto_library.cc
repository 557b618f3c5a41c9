#include "store/client/crypto_library.h"

#include <dlfcn.h>

#include <string>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/dynamic_library.h"
#include "runtime/base/log.h"

namespace resilient::store {
namespace {

constexpr char kLibrary[] = "libcrypto.so.3";
constexpr unsigned kDigestBytesMax = 64;  // EVP_MAX_MD_SIZE.

// The functions of libcrypto that are used, with the types of its headers. The library stays
// loaded: others in the process may have got it from us.
struct Functions {
  int (*random_bytes)(unsigned char*, int) = nullptr;
  const void* (*sha256)() = nullptr;
  unsigned char* (*hmac)(const void* digest, const void* key, int key_bytes,
                         const unsigned char* text, std::size_t text_bytes, unsigned char* out,
                         unsigned* out_bytes) = nullptr;
  int (*compare)(const void*, const void*, std::size_t) = nullptr;
};

// Owner: TokenSource. Thread: thread-safe.
class CryptoLibrary final : public Crypto {
 public:
  explicit CryptoLibrary(const Functions& functions) : functions_(functions) {}

  std::string RandomBytes(std::size_t count) const override {
    std::string bytes(count, '\0');
    RESILIENT_CHECK(functions_.random_bytes(reinterpret_cast<unsigned char*>(bytes.data()),
                                            static_cast<int>(count)) == 1);
    return bytes;
  }

  std::string HmacSha256(std::string_view key, std::string_view text) const override {
    unsigned char out[kDigestBytesMax];
    unsigned bytes = 0;
    RESILIENT_CHECK(functions_.hmac(functions_.sha256(), key.data(), static_cast<int>(key.size()),
                                    reinterpret_cast<const unsigned char*>(text.data()),
                                    text.size(), out, &bytes) != nullptr);
    return {reinterpret_cast<const char*>(out), bytes};
  }

  bool Equal(std::string_view left, std::string_view right) const override {
    return left.size() == right.size() &&
           functions_.compare(left.data(), right.data(), left.size()) == 0;
  }

 private:
  const Functions functions_;
};

}  // namespace

Result<std::unique_ptr<Crypto>> LoadCryptoLibrary() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  Functions functions;
  if (library == nullptr || !FindFunction(library, "RAND_bytes", &functions.random_bytes) ||
      !FindFunction(library, "EVP_sha256", &functions.sha256) ||
      !FindFunction(library, "HMAC", &functions.hmac) ||
      !FindFunction(library, "CRYPTO_memcmp", &functions.compare)) {
    const char* why = dlerror();
    return Status(
        StatusCode::kSetting,
        StrCat("a token was given (RESILIENT_TOKEN_FILE), and the library that proves it, ",
               kLibrary, " of OpenSSL 3, cannot be loaded: ",
               why == nullptr ? "unknown error" : why, "; install it (Debian: libssl3)"));
  }
  return std::unique_ptr<Crypto>(std::make_unique<CryptoLibrary>(functions));
}

}  // namespace resilient::store
