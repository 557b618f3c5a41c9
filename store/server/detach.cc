#include "store/server/detach.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "store/server/cli.h"

namespace resilient::store {
namespace {

constexpr int kSignalled = 128;  // As shells tell it: plus the signal.

[[noreturn]] void AwaitServer(pid_t server, int ready) {
  char byte = 0;
  ssize_t got = 0;
  do {
    got = read(ready, &byte, 1);
  } while (got < 0 && errno == EINTR);
  if (got == 1) std::_Exit(kExitOk);
  int status = 0;
  while (waitpid(server, &status, 0) < 0 && errno == EINTR) {
  }
  std::_Exit(WIFEXITED(status) ? WEXITSTATUS(status) : kSignalled + WTERMSIG(status));
}

}  // namespace

Detachment::Detachment() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return;  // It serves as it is then.
  const pid_t server = fork();
  if (server > 0) {
    close(ends[1]);
    AwaitServer(server, ends[0]);
  }
  close(ends[0]);
  ready_ = FileDescriptor(ends[1]);
  if (server == 0) setsid();  // No end of a terminal, or of a group, is its own.
}

bool Detachment::TellReady() {
  const char byte = 1;
  const bool told = !ready_.valid() || write(ready_.get(), &byte, 1) == 1;
  ready_.Reset();
  return told;
}

}  // namespace resilient::store
