#pragma once

#include <memory>

#include "runtime/tls/functions.h"

namespace resilient {

using SslContext = std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)>;

// What all of ours have in common: TLS 1.3 alone, no tickets, no resumption, no renegotiation.
// REQUIRES: the library of `functions` outlives it.
SslContext NewSslContext(const TlsFunctions& functions);

}  // namespace resilient
