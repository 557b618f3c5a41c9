#pragma once

#include <memory>

#include <resilient/status.h>

#include "store/core/handshake.h"

namespace resilient::store {

// The system's libcrypto (OpenSSL 3), loaded when it is first asked for: who uses no token needs
// none. kSetting when it cannot be loaded.
Result<std::unique_ptr<Crypto>> LoadCryptoLibrary();

}  // namespace resilient::store
