#include "runtime/base/log_writer.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <system_error>
#include <utility>

#include "runtime/base/ring.h"
#include "runtime/base/thread.h"
#include "runtime/base/try_write.h"

namespace resilient {
namespace {

// Blocks until all of it is written; 0, or the error.
int WriteAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (written == 0) {
      return EIO;
    } else if (errno == EAGAIN) {  // Another owner of the description wants it so.
      pollfd entry{.fd = fd, .events = POLLOUT, .revents = 0};
      (void)poll(&entry, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

struct LogWriter::State {
  struct Entry {
    std::string text;
    std::uint64_t lines = 0;  // Lost with it: its own, or those that it reports.
  };

  State(int fd_of, std::size_t bytes, LossLine line)
      : fd(fd_of), bytes_max(bytes), loss_line(line) {}

  void LoseLocked(std::uint64_t lines, int error) {
    lost += lines;
    lost_by = error;
  }
  // Of the lines that were lost, the report; they count as reported.
  Entry TakeLossLocked() {
    Entry report{loss_line(lost, lost_by), lost};
    lost = 0;
    return report;
  }
  void WriteLocked(std::string line);
  void KeepLocked(Entry entry);
  bool StartLocked(const std::shared_ptr<State>& self);
  void Drain();

  const int fd;
  const std::size_t bytes_max;
  const LossLine loss_line;

  std::mutex mutex;
  std::condition_variable drained;
  // Guarded by mutex:
  Ring<Entry> backlog;
  std::size_t bytes = 0;  // Of the backlog, and of what is being written.
  bool draining = false;  // The thread is there.
  std::uint64_t lost = 0;
  int lost_by = 0;
};

void LogWriter::State::WriteLocked(std::string line) {
  if (draining || !backlog.empty()) {
    KeepLocked({std::move(line), 1});
    return;
  }
  // With the report in one write: either may be what the descriptor has no room for.
  const std::uint64_t reported = lost;
  if (reported > 0) line = TakeLossLocked().text + line;
  const TriedWrite tried = TryWrite(fd, line);
  if (tried.error == 0) return;
  if (tried.error != EAGAIN) {
    LoseLocked(reported + 1, tried.error);
    return;
  }
  line.erase(0, tried.written);
  KeepLocked({std::move(line), reported + 1});
}

void LogWriter::State::KeepLocked(Entry entry) {
  // What is lost is the newest: the first lines name the cause.
  if (bytes > 0 && bytes + entry.text.size() > bytes_max) {
    LoseLocked(entry.lines, EAGAIN);
    return;
  }
  bytes += entry.text.size();
  backlog.push_back(std::move(entry));
}

bool LogWriter::State::StartLocked(const std::shared_ptr<State>& self) {
  try {
    // Nobody can join it: its write may block for as long as the process lives.
    Thread("res-log", [self] { self->Drain(); }).Detach();
  } catch (const std::system_error&) {
    return false;  // No thread is to be had now; the next line tries again.
  }
  return true;
}

void LogWriter::State::Drain() {
  std::unique_lock lock(mutex);
  while (!backlog.empty()) {
    const Entry entry = backlog.pop_front();
    lock.unlock();
    const int error = WriteAll(fd, entry.text);
    lock.lock();
    bytes -= entry.text.size();  // Only now: what is being written takes room, too.
    if (error != 0) {
      LoseLocked(entry.lines, error);
    } else if (backlog.empty() && lost > 0) {
      KeepLocked(TakeLossLocked());
    }
  }
  draining = false;
  drained.notify_all();
}

LogWriter::LogWriter(int fd, std::size_t bytes_max, LossLine loss_line)
    : state_(std::make_shared<State>(fd, bytes_max, loss_line)) {}

LogWriter::~LogWriter() = default;

void LogWriter::Write(std::string line) {
  const std::lock_guard lock(state_->mutex);
  state_->WriteLocked(std::move(line));
  if (!state_->draining && !state_->backlog.empty()) {
    state_->draining = state_->StartLocked(state_);
  }
}

bool LogWriter::Flush(Duration patience) {
  std::unique_lock lock(state_->mutex);
  return state_->drained.wait_for(lock, patience,
                                  [this] { return !state_->draining && state_->backlog.empty(); });
}

std::uint64_t LogWriter::lost() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lost;
}

}  // namespace resilient
