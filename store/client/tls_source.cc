#include "store/client/tls_source.h"

#include <utility>

#include "runtime/base/log.h"
#include "runtime/tls/library.h"
#include "store/tls/context.h"

namespace resilient::store {

TlsSource::TlsSource(std::shared_ptr<const TlsContext> context) : context_(std::move(context)) {}

TlsSource::~TlsSource() = default;

Result<std::shared_ptr<const TlsSource>> TlsSource::Open(const TlsFiles& files) {
  if (files.empty()) return std::shared_ptr<const TlsSource>();
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
  const Result<TlsFunctions> functions = LoadTlsLibrary("RESILIENT_TLS_CA");
  if (!functions.ok()) return functions.status();
  Result<std::shared_ptr<const TlsContext>> context =
      TlsContext::Open(*functions, TlsRole::kClient, files);
  if (!context.ok()) return context.status();
  return std::shared_ptr<const TlsSource>(new TlsSource(std::move(*context)));
}

Result<std::shared_ptr<const TlsSource>> TlsSource::Reread() const {
  Result<std::shared_ptr<const TlsContext>> context = context_->Reread();
  if (!context.ok()) return context.status();
  return std::shared_ptr<const TlsSource>(*context == nullptr ? nullptr
                                                              : new TlsSource(std::move(*context)));
}

const TlsFiles& TlsSource::files() const { return context_->files(); }

std::unique_ptr<TlsStream> TlsSource::Begin(const std::string& host) const {
  return context_->NewStream(host);
}

}  // namespace resilient::store
