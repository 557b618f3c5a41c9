#include "store/server/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/base/log.h"

namespace resilient::store {
namespace {

// glibc 2.36 has a wrapper, older ones do not.
int OpenPidFd(std::int64_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
}

}  // namespace

ProcessWatch::ProcessWatch(UvLoop& loop, std::function<void(std::uint64_t)> on_exit)
    : loop_(loop),
      on_exit_(std::move(on_exit)),
      self_(ThisProcess()),
      gone_timer_(loop, [this] { OnGone(); }) {}

void ProcessWatch::Add(std::uint64_t watch, const ProcessIdentity& process) {
  // Elsewhere the same pid is another process. Without a start time a reused pid would not be seen.
  if (process.boot_id.empty() || process.boot_id != self_.boot_id) return;
  if (process.pid_namespace.empty() || process.pid_namespace != self_.pid_namespace) return;
  if (process.pid <= 0 || process.start_time == 0) return;
  switch (Open(watch, process)) {
    case Look::kWatched:
      return;
    case Look::kGone:
      if (gone_.empty()) gone_timer_.Start(0, 0);
      gone_.push_back(watch);
      return;
    case Look::kCannot:
      if (!complained_) {
        RESILIENT_LOG_RECORD(
            kWarn, "unwatched", {{"pid", std::to_string(process.pid)}},
            StrCat("cannot watch pid ", process.pid, " of this host (pidfd: ", std::strerror(errno),
                   "); its lease decides, as for other hosts"));
      }
      complained_ = true;
      return;
  }
}

ProcessWatch::Look ProcessWatch::Open(std::uint64_t watch, const ProcessIdentity& process) {
  if (StartTimeOf(process.pid) != process.start_time) return Look::kGone;
  const int raw = OpenPidFd(process.pid);
  if (raw < 0) return errno == ESRCH ? Look::kGone : Look::kCannot;
  FileDescriptor fd(raw);
  // Between the look and the open the pid may have been given to another process.
  if (StartTimeOf(process.pid) != process.start_time) return Look::kGone;
  auto readable = UvReadable::Watch(loop_, std::move(fd), [this, watch] { OnReadable(watch); });
  if (readable == nullptr) return Look::kCannot;
  watched_[watch] = std::move(readable);
  return Look::kWatched;
}

void ProcessWatch::Remove(std::uint64_t watch) {
  watched_.erase(watch);
  std::erase(gone_, watch);
}

void ProcessWatch::Clear() {
  watched_.clear();
  gone_.clear();
  gone_timer_.Close();
}

void ProcessWatch::OnReadable(std::uint64_t watch) {
  watched_.erase(
      watch);  // Our own callback's handle: its memory stays until libuv's close callback.
  on_exit_(watch);
}

void ProcessWatch::OnGone() {
  while (!gone_.empty()) {
    const std::uint64_t watch = gone_.back();
    gone_.pop_back();
    on_exit_(watch);
  }
}

}  // namespace resilient::store
