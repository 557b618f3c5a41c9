#include "store/client/tls_source.h"

#include <utility>

#include "runtime/base/log.h"
#include "store/client/tls_library.h"
#include "store/tls/context.h"

namespace resilient::store {

TlsSource::TlsSource(std::unique_ptr<TlsContext> context) : context_(std::move(context)) {}

TlsSource::~TlsSource() = default;

Result<std::unique_ptr<TlsSource>> TlsSource::Open(const TlsFiles& files) {
  if (files.empty()) return std::unique_ptr<TlsSource>();
  if (files.authority.empty()) {
    return Status(StatusCode::kSetting,
                  "RESILIENT_TLS_CERT or RESILIENT_TLS_KEY is set, and RESILIENT_TLS_CA is not: "
                  "without the certificate of the CA the store cannot be told from an impostor; "
                  "set RESILIENT_TLS_CA to its file, or unset the others for a plain connection");
  }
  if (files.certificate.empty() != files.key.empty()) {
    return Status(StatusCode::kSetting,
                  StrCat("RESILIENT_TLS_", files.key.empty() ? "CERT" : "KEY",
                         " is set and RESILIENT_TLS_", files.key.empty() ? "KEY" : "CERT",
                         " is not: a certificate and its key belong together, set both"));
  }
  const Result<TlsFunctions> functions = LoadTlsLibrary();
  if (!functions.ok()) return functions.status();
  Result<std::unique_ptr<TlsContext>> context =
      TlsContext::Open(*functions, TlsRole::kClient, files);
  if (!context.ok()) return context.status();
  return std::unique_ptr<TlsSource>(new TlsSource(std::move(*context)));
}

std::unique_ptr<TlsStream> TlsSource::Begin(const std::string& host) {
  const Result<bool> read = context_->Refresh();
  if (!read.ok()) {
    RESILIENT_LOG(kWarn, read.status().message(), "; going on with what was read before");
  }
  return context_->NewStream(host);
}

}  // namespace resilient::store
