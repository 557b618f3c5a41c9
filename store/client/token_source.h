#pragma once

#include <memory>
#include <string>

#include <resilient/status.h>

#include "store/core/handshake.h"

namespace resilient::store {

// The token that a client presents for its job. The file is read anew for each connection, so that
// a replaced token needs no new process; while it cannot be read the last one holds. Owner:
// StoreLink. Thread: caller-synchronised.
class TokenSource {
 public:
  // Null when `path` is empty: no token. kSetting when the file or libcrypto cannot be used, or the
  // file has no token for `job`.
  static Result<std::unique_ptr<TokenSource>> Open(const std::string& path, const std::string& job);

  // Of the next connection.
  ClientHandshake Begin();

 private:
  TokenSource(std::string path, std::string job, std::unique_ptr<Crypto> crypto);
  Status Read();

  const std::string path_;
  const std::string job_;
  const std::unique_ptr<Crypto> crypto_;
  std::string token_;
};

}  // namespace resilient::store
