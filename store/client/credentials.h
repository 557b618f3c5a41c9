#pragma once

#include <memory>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/status.h>
#include <resilient/store/client.h>

#include "runtime/net/offloaded.h"
#include "store/client/tls_source.h"
#include "store/client/token_source.h"

namespace resilient::store {

// What a link shows and asks for when it meets a store, as its files said once. Thread: value type.
struct Credentials {
  std::shared_ptr<const TokenSource> tokens;  // Null: none is presented.
  std::shared_ptr<const TlsSource> tls;       // Null: plain connections.

  bool empty() const { return tokens == nullptr && tls == nullptr; }

  // Reads the files on a thread of its own and waits for it: until `deadline` (kSetting, which
  // names the files), or for what `interrupt` says. kSetting when they cannot be used.
  static Result<Credentials> Open(const ConnectOptions& options, const InterruptCheck& interrupt,
                                  const Clock& clock, Deadline deadline);
};

// How long a connection waits for its files to be read again before it goes by what they said: time
// for any file system that works, short against a lease.
inline constexpr Duration kFreshFilesPatience = Millis(250);

// Credentials that are read again for each connection, so that a replaced token or a renewed
// certificate needs no new process; while the files cannot be read, or do not answer, what they
// said holds. The thread of a read that does not return keeps what it uses; there is one at a time.
// Owner: StoreLink. Thread: caller-synchronised.
class FreshCredentials {
 public:
  explicit FreshCredentials(Credentials credentials) : latest_(std::move(credentials)) {}

  // For the next connection: has them read again, unless there is nothing to read, or that is under
  // way. Returns when the read that is under way began.
  Instant Refresh(Instant now);
  bool reading() const { return reread_ != nullptr && !reread_->done(); }
  int fd() const { return reread_ == nullptr ? -1 : reread_->fd(); }  // Readable: not reading().
  // Lifetime: until the next call.
  const Credentials& Latest(Instant now);

 private:
  Credentials latest_;
  bool told_ = false;  // That the read under way does not answer.
  std::shared_ptr<const Offloaded<Credentials>> reread_;
};

}  // namespace resilient::store
