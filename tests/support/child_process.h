#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <functional>
#include <string>

#include "runtime/base/check.h"

namespace resilient {

// A forked process of a test: runs `body` with the end of a pipe to write to, and ends when that
// returns. Owner: the test; what still runs is killed. Thread: caller-synchronised.
class ChildProcess {
 public:
  // REQUIRES: this process has one thread, where the body starts others.
  explicit ChildProcess(const std::function<void(int pipe)>& body) {
    int ends[2];
    RESILIENT_CHECK(pipe(ends) == 0);
    pid_ = fork();
    RESILIENT_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      close(ends[0]);
      body(ends[1]);
      _exit(0);
    }
    close(ends[1]);
    pipe_ = ends[0];
  }
  ~ChildProcess() {
    Signal(SIGKILL);
    Wait();
    close(pipe_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  // What the body writes up to a line feed, or up to its end.
  std::string ReadLine() const {
    std::string line;
    for (char byte = 0; read(pipe_, &byte, 1) == 1 && byte != '\n';) line += byte;
    return line;
  }
  void Signal(int number) const {
    if (!ended_) kill(pid_, number);
  }
  // True once it can be waited for: then all that it had has been given back.
  bool HasEnded() { return ended_ || (ended_ = waitpid(pid_, &status_, WNOHANG) == pid_); }
  // As of waitpid; waits for its end.
  int Wait() {
    if (!ended_) RESILIENT_CHECK(waitpid(pid_, &status_, 0) == pid_);
    ended_ = true;
    return status_;
  }

 private:
  pid_t pid_ = 0;
  int pipe_ = -1;
  bool ended_ = false;
  int status_ = 0;
};

// For the body of a ChildProcess.
inline void WriteLine(int pipe, const std::string& text) {
  const std::string line = text + "\n";
  RESILIENT_CHECK(write(pipe, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
}

}  // namespace resilient
