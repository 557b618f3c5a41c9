#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "store/server/uv_handle.h"

namespace resilient::store {

// How the log names a watched file. The views are literals.
struct WatchedFile {
  std::string path;
  std::string_view event;  // Of the record of a trouble.
  std::string_view holds;  // What goes on then: "the tokens that were read before hold".
};

// Has a file read at an interval and when SIGHUP comes, and logs a trouble with it once, until it
// changes or SIGHUP asks again. Read rather than watched for events: a secret that is replaced by a
// changed symbolic link two directories up, or on a network file system, would be missed otherwise.
// Owner: Access, Encryption. Thread: the loop's. Lifetime: from its construction to its end the
// file is read; `read` uses its owner, which outlives it.
class FileWatch {
 public:
  // `read` takes over what the file says when that is new; otherwise its status is the trouble.
  FileWatch(UvLoop& loop, WatchedFile file, Duration interval, std::function<Status()> read);

 private:
  void Look();

  const WatchedFile file_;
  const std::function<Status()> read_;
  std::string trouble_;  // Told already.
  UvTimer timer_;
  UvSignal sighup_;
};

}  // namespace resilient::store
