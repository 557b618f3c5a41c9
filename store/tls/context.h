#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <resilient/status.h>
#include <resilient/tls.h>

#include "runtime/tls/failure.h"
#include "runtime/tls/functions.h"
#include "runtime/tls/ssl_context.h"
#include "runtime/tls/stream.h"

namespace resilient::store {

inline constexpr std::size_t kTlsFileBytesMax = 1u << 20;

// Certificate, key and CA of one side, and the streams made with them: TLS 1.3 alone, no tickets,
// no resumption. A server with a CA asks every client for a certificate; a client always checks
// that the server's certificate was signed by the CA and names the host that was asked for. It is
// what the files said once: changed files make another one. Owner: Encryption (server), TlsSource
// (client), and whoever reads the files again meanwhile. Thread: thread-safe. Lifetime: streams
// that were made outlive it.
class TlsContext {
 public:
  // Reads the files, for as long as their file system takes. kSetting when one cannot be used; the
  // text names it. REQUIRES: certificate and key for a server, the CA for a client; certificate and
  // key together.
  static Result<std::shared_ptr<const TlsContext>> Open(const TlsFunctions& functions, TlsRole role,
                                                        const TlsFiles& files);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // Reads the files as Open does: null when nothing has changed.
  Result<std::shared_ptr<const TlsContext>> Reread() const;

  // `host`: of the server as it was asked for, a name or a number; empty on a server.
  std::unique_ptr<TlsStream> NewStream(const std::string& host) const;

  bool asks_for_certificates() const { return !files_.authority.empty(); }
  // Users who are neither the key's owner nor in its group may read it.
  bool key_open_to_others() const { return key_open_to_others_; }
  const TlsFiles& files() const { return files_; }

 private:
  TlsContext(std::shared_ptr<const TlsFunctions> functions, TlsRole role, TlsFiles files);
  Status ReadAll();
  Status Load();
  Status LoadFiles(SSL_CTX* context) const;
  Status Bad(const std::string& file, const std::string& what) const;

  const std::shared_ptr<const TlsFunctions> functions_;
  const TlsRole role_;
  const TlsFiles files_;
  // Not changed once it is given out.
  SslContext context_;
  std::string texts_;  // Of the files.
  bool key_open_to_others_ = false;
};

}  // namespace resilient::store
