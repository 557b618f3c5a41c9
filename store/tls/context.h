#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <resilient/status.h>
#include <resilient/tls.h>

#include "store/tls/failure.h"
#include "store/tls/functions.h"
#include "store/tls/stream.h"

namespace resilient::store {

inline constexpr std::size_t kTlsFileBytesMax = 1u << 20;

// Certificate, key and CA of one side, and the streams made with them: TLS 1.3 alone, no tickets,
// no resumption. A server with a CA asks every client for a certificate; a client always checks
// that the server's certificate was signed by the CA and names the host that was asked for. Owner:
// Encryption (server), TlsSource (client). Thread: caller-synchronised. Lifetime: outlives its
// streams; those that were made stay as they are when the files change.
class TlsContext {
 public:
  // kSetting when a file cannot be used; the text names it. REQUIRES: certificate and key for a
  // server, the CA for a client; certificate and key together.
  static Result<std::unique_ptr<TlsContext>> Open(const TlsFunctions& functions, TlsRole role,
                                                  const TlsFiles& files);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // Looks at the files: true when they have changed and count from now on. As Open when the new
  // ones cannot be used; those that were read before hold.
  Result<bool> Refresh();

  // `host`: of the server as it was asked for, a name or a number; empty on a server.
  std::unique_ptr<TlsStream> NewStream(const std::string& host) const;

  bool asks_for_certificates() const { return !files_.authority.empty(); }
  // Users who are neither the key's owner nor in its group may read it.
  bool key_open_to_others() const { return key_open_to_others_; }
  const TlsFiles& files() const { return files_; }

 private:
  using Context = std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)>;
  TlsContext(const TlsFunctions& functions, TlsRole role, TlsFiles files);
  Result<std::string> ReadAll();
  Status Load(SSL_CTX* context) const;
  Status Bad(const std::string& file, const std::string& what) const;

  const TlsFunctions functions_;
  const TlsRole role_;
  const TlsFiles files_;
  Context context_;
  std::string texts_;  // Of the files, as they were read last.
  bool key_open_to_others_ = false;
};

}  // namespace resilient::store
