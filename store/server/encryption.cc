#include "store/server/encryption.h"

#include <utility>

#include "runtime/base/log.h"
#include "store/server/tls_functions.h"

namespace resilient::store {

Status CheckServerFiles(const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    return {StatusCode::kSetting,
            StrCat(files.key.empty() ? "a certificate needs its key"
                                     : "a key needs the certificate that was made with it",
                   ": give --tls-cert and --tls-key (RESILIENT_TLS_CERT and RESILIENT_TLS_KEY)")};
  }
  if (!files.authority.empty() && files.certificate.empty()) {
    return {StatusCode::kSetting,
            "--tls-ca (RESILIENT_TLS_CA) asks clients for certificates over TLS, which needs a "
            "certificate of this store too: give --tls-cert and --tls-key (RESILIENT_TLS_CERT and "
            "RESILIENT_TLS_KEY), or leave it out for plain connections"};
  }
  return {};
}

Encryption::Encryption(UvLoop& loop, TlsFiles files) : loop_(loop), files_(std::move(files)) {}

Status Encryption::Open() {
  RESILIENT_RETURN_IF_ERROR(CheckServerFiles(files_));
  if (files_.empty()) return {};
  Result<std::unique_ptr<TlsContext>> context =
      TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer, files_);
  if (!context.ok()) return context.status();
  context_ = std::move(*context);
  WarnOfOpenKey();
  return {};
}

void Encryption::WarnOfOpenKey() {
  if (!context_->key_open_to_others() || std::exchange(openness_told_, true)) return;
  RESILIENT_LOG(kWarn, "every user of this host may read the key ", files_.key,
                "; chmod o-rwx closes it");
}

void Encryption::Watch() {
  if (!on()) return;
  watch_ = std::make_unique<FileWatch>(
      loop_,
      WatchedFile{.path = files_.certificate,
                  .event = "certificate",
                  .holds = "the certificate that was read before holds"},
      kTlsFilesInterval, [this] { return Reload(); });
}

void Encryption::Close() { watch_.reset(); }

Status Encryption::Reload() {
  const Result<bool> changed = context_->Refresh();
  if (!changed.ok()) return changed.status();
  if (!*changed) return {};
  WarnOfOpenKey();
  RESILIENT_LOG_RECORD(kInfo, "certificate", {{"file", files_.certificate}},
                       "read anew; connections that were made stay");
  return {};
}

std::unique_ptr<TlsStream> Encryption::NewStream() const {
  return on() ? context_->NewStream("") : nullptr;
}

}  // namespace resilient::store
