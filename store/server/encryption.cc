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

Encryption::Encryption(UvLoop& loop, const Clock& clock, TlsFiles files)
    : loop_(loop), clock_(clock), files_(std::move(files)) {}

Status Encryption::Open() {
  RESILIENT_RETURN_IF_ERROR(CheckServerFiles(files_));
  if (files_.empty()) return {};
  Result<std::shared_ptr<const TlsContext>> context =
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
      loop_, clock_,
      WatchedFile{.path = files_.certificate,
                  .event = "certificate",
                  .holds = "the certificate that was read before holds"},
      kTlsFilesInterval, [this]() -> FileWatch::Read {
        return [this, present = context_]() -> FileWatch::TakeOver {
          return [this, read = present->Reread()] { return TakeOver(read); };
        };
      });
}

void Encryption::Close() { watch_.reset(); }

Status Encryption::TakeOver(const Result<std::shared_ptr<const TlsContext>>& read) {
  if (!read.ok()) return read.status();
  if (*read == nullptr) return {};
  context_ = *read;
  WarnOfOpenKey();
  RESILIENT_LOG_RECORD(kInfo, "certificate", {{"file", files_.certificate}},
                       "read anew; connections that were made stay");
  return {};
}

std::unique_ptr<TlsStream> Encryption::NewStream() const {
  return on() ? context_->NewStream("") : nullptr;
}

}  // namespace resilient::store
