#include "store/client/credentials.h"

#include <string>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::store {
namespace {

constexpr char kThread[] = "res-files";

std::string NamesOf(const std::string& token_file, const TlsFiles& tls) {
  std::string names;
  for (const std::string* path : {&token_file, &tls.certificate, &tls.key, &tls.authority}) {
    if (!path->empty()) names += StrCat(names.empty() ? "" : ", ", *path);
  }
  return names;
}

std::string NamesOf(const Credentials& credentials) {
  return NamesOf(credentials.tokens == nullptr ? std::string() : credentials.tokens->path(),
                 credentials.tls == nullptr ? TlsFiles() : credentials.tls->files());
}

double SecondsSince(Instant then, Instant now) {
  return static_cast<double>((now - then) / Millis(1)) / 1000.0;
}

Result<Credentials> Read(const std::string& token_file, const std::string& job,
                         const TlsFiles& files) {
  auto tokens = TokenSource::Open(token_file, job);
  if (!tokens.ok()) return tokens.status();
  auto tls = TlsSource::Open(files);
  if (!tls.ok()) return tls.status();
  return Credentials{std::move(*tokens), std::move(*tls)};
}

// Whichever cannot be used stays as it was.
Credentials Reread(Credentials before) {
  const auto complain = [](const Status& why) {
    RESILIENT_LOG(kWarn, why.message(), "; going on with what was read before");
  };
  if (before.tokens != nullptr) {
    auto tokens = before.tokens->Reread();
    if (tokens.ok()) {
      before.tokens = std::move(*tokens);
    } else {
      complain(tokens.status());
    }
  }
  if (before.tls != nullptr) {
    auto tls = before.tls->Reread();
    if (!tls.ok()) {
      complain(tls.status());
    } else if (*tls != nullptr) {
      before.tls = std::move(*tls);
    }
  }
  return before;
}

}  // namespace

Result<Credentials> Credentials::Open(const ConnectOptions& options,
                                      const InterruptCheck& interrupt, const Clock& clock,
                                      Deadline deadline) {
  if (options.token_file.empty() && options.tls.empty()) return Credentials();
  const Instant begun = clock.Now();
  const auto read = Offloaded<Credentials>::Start(
      kThread, begun, [token_file = options.token_file, job = options.job, tls = options.tls] {
        return Read(token_file, job, tls);
      });
  RESILIENT_RETURN_IF_ERROR(AwaitReadable(read->fd(), interrupt, clock, deadline));
  if (read->done()) return read->result();
  return Status(StatusCode::kSetting,
                StrCat("the file system of ", NamesOf(options.token_file, options.tls),
                       " has not answered for ", SecondsSince(begun, clock.Now()),
                       " s; check its mount and its server, or name files on a local disk"));
}

Instant FreshCredentials::Refresh(Instant now) {
  if (latest_.empty()) return now;
  if (reread_ == nullptr || reread_->done()) {
    reread_ = Offloaded<Credentials>::Start(
        kThread, now, [before = latest_]() -> Result<Credentials> { return Reread(before); });
    told_ = false;
  }
  return reread_->since();
}

const Credentials& FreshCredentials::Latest(Instant now) {
  if (reread_ == nullptr) return latest_;
  if (reread_->done()) {
    if (reread_->result().ok()) latest_ = *reread_->result();
    if (told_) {
      RESILIENT_LOG(kWarn, "the file system of ", NamesOf(latest_),
                    " answers again, after at most ", SecondsSince(reread_->since(), now), " s");
    }
    reread_.reset();
  } else if (!std::exchange(told_, true)) {
    RESILIENT_LOG(kWarn, "the file system of ", NamesOf(latest_), " has not answered for ",
                  SecondsSince(reread_->since(), now),
                  " s; going on with what was read before; check its mount and its server");
  }
  return latest_;
}

}  // namespace resilient::store
