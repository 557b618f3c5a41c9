#pragma once

#include <cstddef>
#include <string_view>

namespace resilient {

// What became of a write that must not block.
struct TriedWrite {
  std::size_t written = 0;
  // 0: all of it is written. EAGAIN: the rest could block, now or in general. Else: it failed.
  int error = 0;
};

// Writes to `fd` what it takes without blocking. O_NONBLOCK belongs to the open file description,
// which other processes share, so it is never set there:
//
// - A pipe or a terminal is opened once more, without blocking, through /proc/self/fd.
// - A socket is written to with MSG_DONTWAIT.
// - A file in memory (tmpfs, memfd) is written to, for that waits for no device.
// - A file on a disk or a server may block whatever is asked of it: EAGAIN, and nothing is written.
//
// A line of up to PIPE_BUF bytes goes into a pipe whole or not at all. Async-signal-safe in
// practice: neither allocates nor locks. Thread: thread-safe.
TriedWrite TryWrite(int fd, std::string_view text);

}  // namespace resilient
