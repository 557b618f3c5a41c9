#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <resilient/clock.h>

namespace resilient {

// Writes lines to a descriptor, and never blocks who calls it: threads that beat, fence and decide
// log, and nobody may read what they say.
//
// How it works: a line is written by its caller where that cannot block (TryWrite), which is the
// ordinary case of a pipe or a terminal that is read. What the descriptor does not take at once
// waits in a backlog, which a thread, "res-log", writes in the order of the calls; the thread is
// there only while there is a backlog. A line that has no room in the backlog is lost, and so is
// one whose write fails (a full disk). Lost lines are counted, and the count is written as soon as
// a write succeeds again.
//
// What this costs: lines for a file on a disk are written by the thread, shortly after the call; a
// process that ends without exit() calls Flush first.
//
// Owner: whoever logs; the thread shares the state, as a write that blocks outlives any owner.
// Thread: thread-safe. A forked child makes one of its own (log.cc, PerProcess).
class LogWriter {
 public:
  // The line that reports lost lines. `error`: why the last of them was lost; EAGAIN: nobody read.
  using LossLine = std::string (*)(std::uint64_t lines, int error);

  // `bytes_max`: of the backlog. `fd` is not owned.
  LogWriter(int fd, std::size_t bytes_max, LossLine loss_line);
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // `line` ends with a newline.
  void Write(std::string line);
  // Waits until nothing is in the backlog; false when the patience ends first.
  bool Flush(Duration patience);
  // Lines that were lost and are not reported yet.
  std::uint64_t lost() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace resilient
