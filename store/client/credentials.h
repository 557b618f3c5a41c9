#pragma once

#include <memory>

#include <resilient/status.h>
#include <resilient/store/client.h>

#include "store/client/tls_source.h"
#include "store/client/token_source.h"

namespace resilient::store {

// What a link shows and asks for when it meets a store. Owner: StoreLink. Thread: as its parts.
struct Credentials {
  std::unique_ptr<TokenSource> tokens;  // Null: no token.
  std::unique_ptr<TlsSource> tls;       // Null: plain connections.

  // kSetting when something of it cannot be used.
  static Result<Credentials> Open(const ConnectOptions& options);
};

}  // namespace resilient::store
