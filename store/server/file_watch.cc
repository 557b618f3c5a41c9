#include "store/server/file_watch.h"

#include <fcntl.h>

#include <csignal>
#include <cstdint>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::store {

FileWatch::FileWatch(UvLoop& loop, const Clock& clock, WatchedFile file, Duration interval,
                     std::function<Read()> next_read)
    : loop_(loop),
      clock_(clock),
      file_(std::move(file)),
      next_read_(std::move(next_read)),
      timer_(loop, [this] { Look(); }),
      sighup_(loop, SIGHUP, [this] { OnHangup(); }) {
  const auto interval_ms = static_cast<std::uint64_t>(interval / Millis(1));
  timer_.Start(interval_ms, interval_ms);
}

void FileWatch::OnHangup() {
  RESILIENT_LOG(kInfo, "SIGHUP: reading ", file_.path);
  trouble_.clear();
  again_ = reading_ != nullptr;  // What is read now may be from before.
  Look();
}

void FileWatch::Look() {
  if (reading_ != nullptr) {
    if (reading_->done()) {
      OnRead();
    } else {
      NoteSilence();
    }
    return;
  }
  again_ = false;
  silence_told_ = false;
  reading_ = Offloaded<TakeOver>::Start(
      "res-files", clock_.Now(), [read = next_read_()]() -> Result<TakeOver> { return read(); });
  // The loop closes what it watches; the other end of this one belongs to the thread as well.
  has_read_ = UvReadable::Watch(loop_, FileDescriptor(fcntl(reading_->fd(), F_DUPFD_CLOEXEC, 0)),
                                [this] { OnRead(); });
}

void FileWatch::OnRead() {
  has_read_.reset();
  const auto read = std::exchange(reading_, nullptr);
  if (silence_told_) {
    RESILIENT_LOG_RECORD(kInfo, file_.event, {{"file", file_.path}},
                         StrCat("its file system answers again, after ",
                                (clock_.Now() - read->since()) / Millis(1), " ms"));
  }
  Note(read->result().ok() ? (*read->result())() : read->result().status());
  if (again_) Look();
}

void FileWatch::NoteSilence() {
  const Duration silence = clock_.Now() - reading_->since();
  if (silence < kFileSilence || std::exchange(silence_told_, true)) return;
  RESILIENT_LOG_RECORD(kError, file_.event, {{"file", file_.path}},
                       StrCat("its file system has not answered for ", silence / Millis(1),
                              " ms; check its mount and its server (", file_.holds, ")"));
}

void FileWatch::Note(const Status& status) {
  if (trouble_ == status.message()) return;
  trouble_ = status.message();
  if (status.ok()) return;
  RESILIENT_LOG_RECORD(kError, file_.event, {{"file", file_.path}},
                       StrCat(trouble_, " (", file_.holds, ")"));
}

}  // namespace resilient::store
