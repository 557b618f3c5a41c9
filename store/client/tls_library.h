#pragma once

#include <resilient/status.h>

#include "store/tls/functions.h"

namespace resilient::store {

// The system's libssl and libcrypto (OpenSSL 3), loaded when they are first asked for: who uses no
// TLS needs none. kSetting when they cannot be loaded.
Result<TlsFunctions> LoadTlsLibrary();

}  // namespace resilient::store
