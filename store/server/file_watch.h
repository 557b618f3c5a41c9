#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/net/offloaded.h"
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
// It is read by a thread of its own, one read at a time, as the file system may not answer: the
// loop goes on with what was read before, and the log names the file and since when. Owner: Access,
// Encryption. Thread: the loop's. Lifetime: from its construction to its end the file is read; a
// read that does not return outlives it.
class FileWatch {
 public:
  // On the loop's thread: takes over what the file says when that is new; otherwise its status is
  // the trouble. It may use the watch's owner.
  using TakeOver = std::function<Status()>;
  // On a thread of its own: owns what it uses.
  using Read = std::function<TakeOver()>;

  // `next_read`: on the loop's thread, once a look.
  FileWatch(UvLoop& loop, const Clock& clock, WatchedFile file, Duration interval,
            std::function<Read()> next_read);

 private:
  void OnHangup();
  void Look();
  void OnRead();
  void NoteSilence();
  void Note(const Status& status);

  UvLoop& loop_;
  const Clock& clock_;
  const WatchedFile file_;
  const std::function<Read()> next_read_;
  std::string trouble_;  // Told already.
  std::shared_ptr<const Offloaded<TakeOver>> reading_;
  std::unique_ptr<UvReadable> has_read_;  // Null: the next look finds out.
  bool again_ = false;                    // SIGHUP came while it was read.
  bool silence_told_ = false;
  UvTimer timer_;
  UvSignal sighup_;
};

// A read that takes longer is told.
inline constexpr Duration kFileSilence = std::chrono::seconds(5);

}  // namespace resilient::store
