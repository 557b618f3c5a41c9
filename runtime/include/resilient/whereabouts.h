#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>

namespace resilient {

// A thread in which an interpreter runs code. Thread: value type.
struct ProgramThread {
  int id = 0;                 // The kernel's.
  std::string at;             // "train.py:301 step"; may be empty.
  bool housekeeping = false;  // A loop of a library that submits no operation: a progress bar's.
  std::string name = {};      // As the program calls it: "trainer"; may be empty.
};

// A thread as its interpreter shows it. Thread: value type.
struct ThreadStack {
  int id = 0;         // The kernel's.
  std::string name;   // As ProgramThread::name; empty: the main thread.
  std::string top;    // "train.py:301 step"; empty: it is in no code that could be named.
  std::string stack;  // As Whereabouts::stack.
};

// What a process says about itself when others wait for it. It tells of one thread: the one that
// submitted an operation last, of those that are in code of the program; where there is none, the
// main thread. Thread: value type.
struct Whereabouts {
  std::string thread;  // As ThreadStack::name.
  // "train.py:301 step", or "native code holds the GIL for 12 s, last seen at train.py:301 step";
  // empty: not known (a C++ program).
  std::string at;
  // The Python stack of the thread, newest call last, at most 8 KiB; the last one that could be
  // read. May be empty.
  std::string stack;
  // How long no progress has been seen. Zero right after progress, at the first look, and at the
  // first after a time in which nobody looked or the process was stopped.
  Duration no_progress{};
  std::string expected_slow;     // What the program announced ("checkpoint"); empty: nothing.
  Duration expected_slow_for{};  // Of that, what is left.
  // The rest is for this process itself.
  // The thread that is told of, and the main thread where that is another one and has submitted
  // operations as well; as they were seen last. Empty: not known.
  std::vector<ThreadStack> submitting = {};
  // All threads that the interpreter knows. nullopt: not known.
  std::optional<std::vector<ProgramThread>> threads = {};
};

// "main thread", or "thread 'trainer'". `name`: as ThreadStack::name.
inline std::string TextOfThread(const std::string& name) {
  return name.empty() ? "main thread" : "thread '" + name + "'";
}

// What a program's interpreter shows of it. Thread: value type.
struct ProgramStacks {
  ThreadStack main;
  std::optional<ThreadStack> submitter;  // The thread to tell of, where that is not the main one.
  std::optional<std::vector<ProgramThread>> threads = {};  // As Whereabouts::threads.
};

// Where an observer gets the stacks of the program from: the Python extension has one.
//
// Owner: the observer, by shared_ptr. Thread: thread-safe; Look is called by one thread a process.
// A forked child uses the same object.
class StackSource {
 public:
  virtual ~StackSource() = default;
  // `submitters`: the kernel's ids of threads that have submitted operations, the latest first. The
  // one to tell of is the first of them in whose stack there is code of the program: what waits in
  // a pool for its next task, or runs backward passes for the program, is not where that is.
  // Blocks until `deadline` at most. None: the interpreter's lock could not be had by then, and may
  // be asked for still.
  virtual std::optional<ProgramStacks> Look(const std::vector<int>& submitters,
                                            Deadline deadline) = 0;
  // Ends a Look that is under way; later ones return none. Waits for its own threads until
  // `deadline` at most. Idempotent.
  virtual void Close(Deadline deadline) = 0;
};

// Looks at this process from outside the threads of its program. Once asked, it watches for
// progress every 5 s until nobody has asked for 2 min; otherwise it sleeps, and before the first
// question there is no thread.
//
// Two threads are watched: the one that is told of (Whereabouts), and the main thread. Progress, in
// a window of 60 s, is a new operation, another line of one of them, 5 % of a core or 1 MiB of
// input and output by the process and its children, without our own threads and without sockets.
// What one of them computes while it stays at one line does not count: it may spin in one call. So
// a busy loop over several lines is progress.
//
// Owner: the plugin or main, shared with the session; one a process is enough. Thread: thread-safe.
// Lifetime: the destructor closes. In a forked child it begins anew, without a thread, questions or
// announcements of the parent.
class Observer {
 public:
  using Answer = std::function<void(const Whereabouts&)>;

  virtual ~Observer() = default;

  // Returns at once; `answer` runs once, within ~3 s, on the observer's thread; it must not block.
  // Dropped after Close, beyond 64 that wait, and where no thread can be made.
  virtual void Ask(Answer answer) = 0;

  // The calling thread submits an operation (progress). Cheap: a few relaxed atomics.
  virtual void NoteOperation() = 0;
  // The kernel's ids of the threads that have submitted operations lately, the latest first.
  virtual std::vector<int> Submitters() const = 0;

  // Announces that the program may be silent, for 24 h at the most; returns a token for
  // EndExpectation. Of nested ones the one that lasts longest counts. 0: not taken, 64 are open.
  virtual std::uint64_t Expect(std::string what, Duration at_most) = 0;
  // Nothing happens for a token that is over, or 0.
  virtual void EndExpectation(std::uint64_t token) = 0;

  // Drops the questions and waits for the threads until `deadline` at most. Idempotent. REQUIRES:
  // under Python, the calling thread has given up the interpreter's lock.
  virtual void Close(Deadline deadline) = 0;
};

// `stacks` may be null: then where the program is remains unknown. `clock` outlives the
// observer.
std::shared_ptr<Observer> MakeObserver(const Clock& clock, std::shared_ptr<StackSource> stacks);

}  // namespace resilient
