#pragma once

#include <functional>
#include <string>
#include <thread>

namespace resilient {

// A named thread with all signals blocked, so that the user's handlers run on the user's threads.
// Owner: the shell that needs it; joined by Join or the destructor. Thread: caller-synchronised.
class Thread {
 public:
  Thread() = default;
  // `name` is cut to 15 characters (the kernel's limit).
  Thread(std::string name, std::function<void()> body);
  ~Thread();
  Thread(Thread&&) noexcept = default;
  Thread& operator=(Thread&&) noexcept = default;

  bool Joinable() const { return thread_.joinable(); }
  bool IsCurrent() const { return thread_.get_id() == std::this_thread::get_id(); }
  void Join();
  // Lets go of a thread that may never end; its body must own what it uses.
  void Detach() { thread_.detach(); }
  // In a forked child the thread does not exist: forget it without joining.
  void AbandonInChild();

 private:
  std::thread thread_;
};

}  // namespace resilient
