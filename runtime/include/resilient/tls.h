#pragma once

#include <string>

namespace resilient {

// The files, PEM text, of encrypted connections to a store: RESILIENT_TLS_CERT, RESILIENT_TLS_KEY,
// RESILIENT_TLS_CA. Thread: value type.
struct TlsFiles {
  std::string certificate;  // That this side shows; the certificates that lead to the CA follow it.
  std::string key;          // Of `certificate`.
  std::string authority;    // Who has to have signed the other side's certificate.

  bool empty() const { return certificate.empty() && key.empty() && authority.empty(); }
  friend bool operator==(const TlsFiles&, const TlsFiles&) = default;
};

}  // namespace resilient
