#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace resilient::testing {

// A child process with pipes to its standard input and output; killed when the test ends.
class Child {
 public:
  explicit Child(const std::vector<std::string>& command) {
    int to_child[2];
    int from_child[2];
    EXPECT_EQ(pipe2(to_child, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(from_child, O_CLOEXEC), 0);
    std::vector<char*> arguments;
    for (const std::string& argument : command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(to_child[0], STDIN_FILENO);
      dup2(from_child[1], STDOUT_FILENO);
      execv(arguments[0], arguments.data());
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    input_ = to_child[1];
    output_ = from_child[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    Signal(SIGKILL);
    Wait();
    close(input_);
    close(output_);
  }

  // The next line of its output; empty when none came within `timeout` or it ended.
  std::string Line(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::size_t end = 0;
    while ((end = buffered_.find('\n')) == std::string::npos) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
                            deadline - std::chrono::steady_clock::now())
                            .count();
      pollfd readable{output_, POLLIN, 0};
      if (left <= 0 || poll(&readable, 1, static_cast<int>(left)) <= 0) return {};
      char chunk[4096];
      const ssize_t size = read(output_, chunk, sizeof chunk);
      if (size <= 0) return {};
      buffered_.append(chunk, static_cast<std::size_t>(size));
    }
    std::string line = buffered_.substr(0, end);
    buffered_.erase(0, end + 1);
    return line;
  }

  void Say(const std::string& line) {
    const std::string text = line + "\n";
    EXPECT_EQ(write(input_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

  void Signal(int number) {
    if (pid_ > 0) kill(pid_, number);
  }

  // Exit status as of waitpid.
  int Wait() {
    int status = -1;
    if (pid_ > 0) waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string buffered_;
};

inline constexpr std::chrono::milliseconds kPatience{20'000};

// A store server, and this program as its ranks.
class RanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_ = std::make_unique<Child>(std::vector<std::string>{
        RESILIENT_STORE_BINARY, "serve", "--listen", "127.0.0.1:0", "--print-address"});
    const std::string line = server_->Line(kPatience);
    address_ = line.substr(0, line.find(' '));
    ASSERT_FALSE(address_.empty()) << "the store did not start";
  }

  std::unique_ptr<Child> StartRank(int rank, int world_size, const char* as = "--rank") {
    return std::make_unique<Child>(std::vector<std::string>{
        "/proc/self/exe", as, std::to_string(rank), std::to_string(world_size), address_});
  }

  std::unique_ptr<Child> server_;
  std::string address_;
};

}  // namespace resilient::testing
