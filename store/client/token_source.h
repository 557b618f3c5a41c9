#pragma once

#include <memory>
#include <string>

#include <resilient/status.h>

#include "store/core/handshake.h"

namespace resilient::store {

// The token that a client presents for its job, as its file said once. Owner: Credentials. Thread:
// thread-safe.
class TokenSource {
 public:
  // Reads the file, for as long as its file system takes. Null when `path` is empty: no token.
  // kSetting when the file or libcrypto cannot be used, or the file has no token for `job`.
  static Result<std::shared_ptr<const TokenSource>> Open(const std::string& path,
                                                         const std::string& job);

  // As Open, of the same file.
  Result<std::shared_ptr<const TokenSource>> Reread() const;
  const std::string& path() const { return path_; }

  // Of the next connection. Lifetime: the handshake uses what this shares with all that were reread
  // from it.
  ClientHandshake Begin() const { return {*crypto_, token_}; }

 private:
  TokenSource(std::string path, std::string job, std::shared_ptr<const Crypto> crypto);
  Status Read();

  const std::string path_;
  const std::string job_;
  const std::shared_ptr<const Crypto> crypto_;
  std::string token_;  // Not changed once it is given out.
};

}  // namespace resilient::store
