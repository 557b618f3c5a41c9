#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <resilient/clock.h>

namespace resilient {

// Where a process is, told to the ranks that wait for it. Thread: value type.
struct Whereabouts {
  std::string main_thread;       // "train.py:301 step"; empty: not known (a C++ program)
  std::string stack;             // The whole Python stack of the main thread; may be empty.
  Duration no_progress{};        // How long no progress has been seen.
  std::string expected_slow;     // What the program announced ("checkpoint"); empty: nothing.
  Duration expected_slow_for{};  // Of that, what is left.
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void Ask(std::function<void(const Whereabouts&)> answer) = 0;
  virtual void NoteOperation() = 0;
  virtual std::uint64_t Expect(std::string what, Duration at_most) = 0;
  virtual void EndExpectation(std::uint64_t token) = 0;
  virtual void Close(Deadline deadline) = 0;
};

}  // namespace resilient
