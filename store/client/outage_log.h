#pragma once

#include <string>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "store/client/link.h"

namespace resilient::store {

// Tells a person about a connection that is not there, or on which the store is silent: once when
// that has lasted for kOutageWarnAfter, and once, with the duration, when it is over. Owner: the
// owner of the link. Thread: caller-synchronised.
class OutageLog {
 public:
  // `what`: "the request connection (job x)".
  OutageLog(std::string what, Instant now) : what_(std::move(what)), since_(now) {}

  // After each step of the link.
  void Note(const StoreLink& link, Instant now);

  // After the owner has dropped a connection that lost nothing, to be on the safe side. The next
  // one, if it comes in time, is logged at level info: a person has nothing to do about it.
  void NoteReplaced(const StoreLink& link, Instant now);

  // How long the store has answered nothing on the connection that stands: told once it has been
  // kOutageWarnAfter, and once, with the duration, when the store answers again.
  void NoteSilence(const StoreLink& link, Duration silence);

  // When the present outage began; REQUIRES: the link is not open.
  Instant since() const { return since_; }

 private:
  const std::string what_;
  bool open_ = false;
  bool ever_open_ = false;
  bool told_ = false;
  bool replaced_ = false;  // This outage was no loss.
  Instant since_;
  Status cause_;
  Duration silence_{};  // That was told; zero: none was.
};

inline constexpr Duration kOutageWarnAfter = std::chrono::seconds(10);

double SecondsOf(Duration duration);

}  // namespace resilient::store
