#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/fork_guard.h"

namespace resilient {

// A file descriptor that closes itself, is close-on-exec and is closed in forked children
// (ForkGuard): there its number is the program's to use, so the object that the child has inherited
// has none. Owner: whoever holds it; movable. Thread: caller-synchronised.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd);  // Takes over `fd` (or -1) and registers it with ForkGuard.
  ~FileDescriptor() { Reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  // -1: none. Async-signal-safe.
  int get() const { return mark_.InChild() ? -1 : fd_; }
  bool valid() const { return get() >= 0; }
  void Reset();

 private:
  int fd_ = -1;
  ProcessMark mark_;  // Of the process that owns fd_.
};

struct HostPort {
  std::string host;  // Name or numeric address, without brackets.
  std::uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// "host:port" or "[v6]:port". kSetting when malformed.
Result<HostPort> ParseHostPort(std::string_view text);
std::string FormatHostPort(const HostPort& address);  // Brackets for IPv6.

// A non-blocking listening TCP socket. kRefused when the port is taken, kUnreachable or kResolve
// otherwise. port 0: chosen by the kernel. Half a minute is the most that it waits for the
// resolver, where the host is a name.
Result<FileDescriptor> ListenTcp(const HostPort& address, int backlog);
Result<HostPort> LocalAddress(const FileDescriptor& socket);
// The numeric address of the other end; "?" when that has gone.
std::string PeerHost(const FileDescriptor& socket);

// The numeric address that this host has on the way to another one; sends nothing. kResolve (it is
// no number), kUnreachable.
Result<std::string> OwnAddressTowards(const std::string& numeric_host);

// Resolves and tries each address once, all of it until `deadline`; the socket has TCP_NODELAY, is
// probed while it is idle, and outlives silence. kResolve, kRefused (host is up, nothing listens),
// kUnreachable (no route, timed out: firewall?). `interrupt_fd` (or -1): readable means give up
// with kCancelled.
Result<FileDescriptor> ConnectTcp(const HostPort& address, const Clock& clock, Deadline deadline,
                                  int interrupt_fd);

// Starts one non-blocking connect to a numeric address; poll for writable, then ConnectOutcome.
Result<FileDescriptor> StartConnectTcp(const HostPort& numeric_address);
Status ConnectOutcome(const FileDescriptor& socket, const HostPort& address);

// Before it is closed: how long what it has still to send is tried is the kernel's own time again,
// since nobody ends that any more.
void LeaveToKernel(const FileDescriptor& socket);

// Accepts one connection, non-blocking; an invalid descriptor when none waits or the peer went
// away.
Result<FileDescriptor> AcceptTcp(const FileDescriptor& listener);

// poll() on a set of descriptors until `deadline`; EINTR is absorbed. Returns the number that are
// ready.
using PollEntry = pollfd;
int PollUntil(std::vector<PollEntry>& entries, const Clock& clock, Deadline deadline);

// An eventfd that wakes a poll from another thread. Thread: Wake is thread-safe and
// async-signal-safe. In a forked child there is none, and both do nothing.
class WakeFd {
 public:
  WakeFd();
  int fd() const { return fd_.get(); }
  void Wake() const;
  void Drain() const;

 private:
  FileDescriptor fd_;
};

}  // namespace resilient
