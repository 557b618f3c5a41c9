#include "runtime/tls/library.h"

#include <dlfcn.h>

#include "runtime/base/dynamic_library.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr char kSslLibrary[] = "libssl.so.3";
constexpr char kCryptoLibrary[] = "libcrypto.so.3";

}  // namespace

Result<TlsFunctions> LoadTlsLibrary(std::string_view setting) {
  // They stay loaded: others in the process may have got them from us.
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
  TlsFunctions functions;
  void* library = dlopen(kSslLibrary, kFlags);
  bool found = library != nullptr;
#define RESILIENT_FIND(name) found = found && FindFunction(library, #name, &functions.name);
  RESILIENT_LIBSSL_FUNCTIONS(RESILIENT_FIND)
  if (found) library = dlopen(kCryptoLibrary, kFlags);
  RESILIENT_LIBCRYPTO_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
  if (found) return functions;
  const char* why = dlerror();
  return Status(StatusCode::kSetting,
                StrCat("TLS was asked for (", setting, "), and the library for it, ", kSslLibrary,
                       " of OpenSSL 3, cannot be loaded: ", why == nullptr ? "unknown error" : why,
                       "; install it (Debian: libssl3)"));
}

}  // namespace resilient
