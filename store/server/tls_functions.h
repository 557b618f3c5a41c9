#pragma once

#include "runtime/tls/functions.h"

namespace resilient::store {

// Those that the server is linked with.
TlsFunctions LinkedTlsFunctions();

}  // namespace resilient::store
