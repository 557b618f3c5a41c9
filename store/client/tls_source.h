#pragma once

#include <memory>
#include <string>

#include <resilient/status.h>
#include <resilient/tls.h>

#include "runtime/tls/stream.h"

namespace resilient::store {

class TlsContext;

// The TLS of a client's connections, as its files said once. Owner: Credentials. Thread:
// thread-safe. Lifetime: its streams outlive it.
class TlsSource {
 public:
  // Reads the files, for as long as their file system takes. Null when there are none: connections
  // are plain. kSetting when OpenSSL or the files cannot be used, and for a certificate without the
  // CA that has to sign the store's.
  static Result<std::shared_ptr<const TlsSource>> Open(const TlsFiles& files);
  ~TlsSource();

  // As Open, of the same files: null when they say what they said.
  Result<std::shared_ptr<const TlsSource>> Reread() const;
  const TlsFiles& files() const;

  // Of the next connection, to `host` as the user wrote it.
  std::unique_ptr<TlsStream> Begin(const std::string& host) const;

 private:
  explicit TlsSource(std::shared_ptr<const TlsContext> context);

  const std::shared_ptr<const TlsContext> context_;
};

}  // namespace resilient::store
