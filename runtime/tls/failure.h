#pragma once

#include <string>

#include <resilient/status.h>

namespace resilient {

struct TlsFunctions;

enum class TlsRole { kServer, kClient };

// What the texts of a failure name. Thread: value type.
struct TlsParty {
  TlsRole role = TlsRole::kServer;  // Ours.
  std::string host;                 // That the peer's certificate has to name; empty for a server.
  std::string authority;            // The file; empty when no certificate is asked for.
};

// Why a connection failed, as a sentence about the peer ("its certificate has expired; ..."), from
// the oldest error of this thread's queue and the result of the verification. kAuth where a
// certificate is the cause, else kProtocol.
Status DescribeTlsFailure(const TlsFunctions& functions, const TlsParty& party, long verified);

// The reason of the oldest error of this thread's queue.
std::string TlsReason(const TlsFunctions& functions);

}  // namespace resilient
