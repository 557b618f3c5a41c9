#include "store/client/credentials.h"

#include <utility>

namespace resilient::store {

Result<Credentials> Credentials::Open(const ConnectOptions& options) {
  Result<std::unique_ptr<TokenSource>> tokens = TokenSource::Open(options.token_file, options.job);
  if (!tokens.ok()) return tokens.status();
  Result<std::unique_ptr<TlsSource>> tls = TlsSource::Open(options.tls);
  if (!tls.ok()) return tls.status();
  return Credentials{std::move(*tokens), std::move(*tls)};
}

}  // namespace resilient::store
