#pragma once

#include <memory>
#include <string>

#include <resilient/clock.h>
#include <resilient/status.h>
#include <resilient/tls.h>

#include "store/server/file_watch.h"
#include "store/server/uv_handle.h"
#include "store/tls/context.h"

namespace resilient::store {

inline constexpr Duration kTlsFilesInterval =
    std::chrono::seconds(1);  // Between two looks at them.

// The TLS of the server's connections: certificate, key and CA, read again when a file changes or
// SIGHUP comes. Connections that were made stay. Owner: Server. Thread: the loop's.
class Encryption {
 public:
  // Without files connections are plain.
  Encryption(UvLoop& loop, const Clock& clock, TlsFiles files);

  // Reads the files. kSetting when they cannot be used, or one is missing.
  Status Open();
  // From now on the files are watched.
  void Watch();
  void Close();

  bool on() const { return context_ != nullptr; }
  // Every client has to show a certificate that the CA has signed.
  bool asks_for_certificates() const { return on() && context_->asks_for_certificates(); }
  // Of a connection that was accepted; null when it is plain.
  std::unique_ptr<TlsStream> NewStream() const;

 private:
  Status TakeOver(const Result<std::shared_ptr<const TlsContext>>& read);
  void WarnOfOpenKey();

  UvLoop& loop_;
  const Clock& clock_;
  const TlsFiles files_;
  std::shared_ptr<const TlsContext> context_;
  bool openness_told_ = false;
  std::unique_ptr<FileWatch> watch_;
};

// kSetting when the files of a server do not go together: a certificate without its key, a CA
// without a certificate.
Status CheckServerFiles(const TlsFiles& files);

}  // namespace resilient::store
