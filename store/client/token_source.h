#pragma once

#include <memory>
#include <string>

#include <resilient/status.h>

#include "runtime/base/random.h"
#include "store/core/handshake.h"

namespace resilient::store {

// The token that a client presents for its job, as its file said once. Owner: Credentials. Thread:
// thread-safe.
class TokenSource {
 public:
  // Reads the file, for as long as its file system takes. Null when `path` is empty: no token.
  // kSetting when the file cannot be used, or has no token for `job`.
  static Result<std::shared_ptr<const TokenSource>> Open(const std::string& path,
                                                         const std::string& job);

  // As Open, of the same file.
  Result<std::shared_ptr<const TokenSource>> Reread() const;
  const std::string& path() const { return path_; }

  // Of the next connection.
  ClientHandshake Begin() const { return {token_, RandomBytes(kNonceBytes)}; }

 private:
  TokenSource(std::string path, std::string job);
  Status Read();

  const std::string path_;
  const std::string job_;
  std::string token_;  // Not changed once it is given out.
};

}  // namespace resilient::store
