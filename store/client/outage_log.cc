#include "store/client/outage_log.h"

#include "runtime/base/log.h"

namespace resilient::store {

double SecondsOf(Duration duration) { return static_cast<double>(duration / Millis(1)) / 1000.0; }

void OutageLog::Note(const StoreLink& link, Instant now) {
  if (link.open()) {
    if (!open_ && ever_open_ && replaced_ && !told_) {
      RESILIENT_LOG(kInfo, what_, " has replaced its connection (", cause_.message(),
                    ", though its host took them): connected again to ", link.peer());
    } else if (!open_ && ever_open_) {
      RESILIENT_LOG(kWarn, what_, " was without its connection for ", SecondsOf(now - since_),
                    " s (", cause_.message(), "); connected again to ", link.peer());
    } else if (!open_ && told_) {
      RESILIENT_LOG(kWarn, what_, " reached the store at ", link.peer(), " after ",
                    SecondsOf(now - since_), " s");
    }
    open_ = true;
    ever_open_ = true;
    told_ = false;
    replaced_ = false;
    return;
  }
  if (open_) {
    open_ = false;
    since_ = now;
    cause_ = link.trouble();
  }
  if (!told_ && now - since_ >= kOutageWarnAfter && !link.trouble().ok()) {
    told_ = true;
    RESILIENT_LOG(kWarn, what_, " has no store for ", SecondsOf(now - since_),
                  " s and goes on trying: ", link.trouble().message());
  }
}

void OutageLog::NoteReplaced(const StoreLink& link, Instant now) {
  Note(link, now);
  replaced_ = true;
}

void OutageLog::NoteSilence(const StoreLink& link, Duration silence) {
  if (silence >= kOutageWarnAfter) {
    if (silence_ == Duration::zero()) {
      RESILIENT_LOG(kWarn, what_, " has had no answer of the store at ", link.peer(), " for ",
                    SecondsOf(silence), " s and goes on waiting: ",
                    link.local() ? "its process is there, but is stopped or gets no processor time"
                                 : "its host takes what is sent");
    }
    silence_ = silence;
  } else if (silence_ > Duration::zero()) {
    RESILIENT_LOG(kWarn, "the store at ", link.peer(), " answers ", what_, " again, after ",
                  SecondsOf(silence_), " s");
    silence_ = Duration::zero();
  }
}

}  // namespace resilient::store
