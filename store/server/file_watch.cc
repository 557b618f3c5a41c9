#include "store/server/file_watch.h"

#include <csignal>
#include <cstdint>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::store {

FileWatch::FileWatch(UvLoop& loop, WatchedFile file, Duration interval,
                     std::function<Status()> read)
    : file_(std::move(file)),
      read_(std::move(read)),
      timer_(loop, [this] { Look(); }),
      sighup_(loop, SIGHUP, [this] {
        RESILIENT_LOG(kInfo, "SIGHUP: reading ", file_.path);
        trouble_.clear();
        Look();
      }) {
  const auto interval_ms = static_cast<std::uint64_t>(interval / Millis(1));
  timer_.Start(interval_ms, interval_ms);
}

void FileWatch::Look() {
  const Status status = read_();
  if (trouble_ == status.message()) return;
  trouble_ = status.message();
  if (status.ok()) return;
  RESILIENT_LOG_RECORD(kError, file_.event, {{"file", file_.path}},
                       StrCat(trouble_, " (", file_.holds, ")"));
}

}  // namespace resilient::store
