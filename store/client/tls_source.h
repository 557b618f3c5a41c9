#pragma once

#include <memory>
#include <string>

#include <resilient/status.h>
#include <resilient/tls.h>

#include "store/tls/stream.h"

namespace resilient::store {

class TlsContext;

// The TLS of a client's connections. The files are looked at for each connection, so that a renewed
// certificate needs no new process; while they cannot be used the last ones hold. Owner: StoreLink.
// Thread: caller-synchronised. Lifetime: outlives its streams.
class TlsSource {
 public:
  // Null when there are no files: connections are plain. kSetting when OpenSSL or the files cannot
  // be used, and for a certificate without the CA that has to sign the store's.
  static Result<std::unique_ptr<TlsSource>> Open(const TlsFiles& files);
  ~TlsSource();

  // Of the next connection, to `host` as the user wrote it.
  std::unique_ptr<TlsStream> Begin(const std::string& host);

 private:
  explicit TlsSource(std::unique_ptr<TlsContext> context);

  const std::unique_ptr<TlsContext> context_;
};

}  // namespace resilient::store
