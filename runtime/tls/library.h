#pragma once

#include <string_view>

#include <resilient/status.h>

#include "runtime/tls/functions.h"

namespace resilient {

// The system's libssl and libcrypto (OpenSSL 3), loaded when they are first asked for: who uses no
// TLS needs none. kSetting when they cannot be loaded; the text says that `setting` has asked for
// TLS.
Result<TlsFunctions> LoadTlsLibrary(std::string_view setting);

}  // namespace resilient
