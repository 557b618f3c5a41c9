#include "store/server/tls_functions.h"

namespace resilient::store {

TlsFunctions LinkedTlsFunctions() {
  TlsFunctions functions;
#define RESILIENT_TAKE(name) functions.name = &::name;
  RESILIENT_LIBSSL_FUNCTIONS(RESILIENT_TAKE)
  RESILIENT_LIBCRYPTO_FUNCTIONS(RESILIENT_TAKE)
#undef RESILIENT_TAKE
  return functions;
}

}  // namespace resilient::store
