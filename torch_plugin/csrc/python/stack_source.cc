#include "torch_plugin/csrc/python/stack_source.h"

#include <Python.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {
namespace {

constexpr Duration kCloseBound = std::chrono::seconds(1);

// While it lives no garbage is collected: that would run finalisers of the user's on our thread, or
// give up the interpreter's lock in the midst of a look. REQUIRES: the interpreter's lock.
class NoCollection {
 public:
  NoCollection() : collects_(PyGC_Disable()) {}
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    PyErr_Clear();
    if (collects_ != 0) PyGC_Enable();
  }

 private:
  const int collects_;
};

// A thread that the interpreter knows. Owner: DescribeProgram. Thread: as that.
struct PythonThread {
  int id = 0;               // The kernel's; 0: not known.
  unsigned long ident = 0;  // As threading.get_ident() has it.
  pybind11::object frame;   // Null: it runs no Python code.

  PyFrameObject* innermost() const { return reinterpret_cast<PyFrameObject*>(frame.ptr()); }
};

// REQUIRES: as DescribeProgram.
std::vector<PythonThread> ThreadsOfInterpreter(const FrameNames& frames) {
  std::vector<PythonThread> threads;
  using pybind11::object;
  using pybind11::reinterpret_borrow;
  using pybind11::reinterpret_steal;
#if PY_VERSION_HEX >= 0x030B0000
  static_cast<void>(frames);
  PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Main());
  for (; state != nullptr; state = PyThreadState_Next(state)) {
    PyObject* frame = reinterpret_cast<PyObject*>(PyThreadState_GetFrame(state));
    threads.push_back({static_cast<int>(state->native_thread_id), state->thread_id,
                       reinterpret_steal<object>(frame)});
  }
#else
  PyObject* current_frames = PySys_GetObject("_current_frames");
  const auto by_thread = reinterpret_steal<object>(
      current_frames == nullptr ? nullptr : PyObject_CallNoArgs(current_frames));
  PyObject* ident = nullptr;
  PyObject* frame = nullptr;
  for (Py_ssize_t at = 0; by_thread && PyDict_Next(by_thread.ptr(), &at, &ident, &frame) != 0;) {
    const unsigned long thread = PyLong_AsUnsignedLong(ident);
    threads.push_back({frames.IdOf(thread), thread, reinterpret_borrow<object>(frame)});
  }
#endif
  return threads;
}

}  // namespace

ProgramStacks DescribeProgram(const FrameNames& frames, unsigned long main_thread,
                              const std::vector<int>& submitters) {
  const NoCollection no_collection;
  ProgramStacks seen;
  const std::vector<PythonThread> threads = ThreadsOfInterpreter(frames);
  const auto main = std::ranges::find(threads, main_thread, &PythonThread::ident);
  if (main != threads.end()) seen.main = frames.Describe(main->innermost());
  seen.main.id = main != threads.end() && main->id != 0 ? main->id : getpid();
  for (const int submitter : submitters) {
    if (submitter == seen.main.id) break;
    const auto thread = std::ranges::find(threads, submitter, &PythonThread::id);
    if (thread == threads.end() || frames.UsersLine(thread->innermost()).empty()) continue;
    seen.submitter = frames.Describe(thread->innermost());
    seen.submitter->id = submitter;
    seen.submitter->name = frames.NameOf(thread->ident);
    if (seen.submitter->name.empty()) seen.submitter->name = "tid " + std::to_string(submitter);
    break;
  }
  seen.threads.emplace();
  for (const PythonThread& thread : threads) {
    seen.threads->push_back(frames.DescribeThread(thread.id, thread.innermost()));
    seen.threads->back().name = frames.NameOf(thread.ident);
  }
  return seen;
}

// The thread and what it shares with who waits for it. Owner: Process, and the thread. Thread:
// thread-safe.
struct PythonStacks::Shared {
  Shared(std::shared_ptr<const FrameNames> frame_names, unsigned long main)
      : frames(std::move(frame_names)), main_thread(main) {}

  // Ends with the thread, also where the interpreter ends it inside of its own code.
  struct Presence {
    explicit Presence(Shared& whose) : shared(whose) {}
    Presence(const Presence&) = delete;
    Presence& operator=(const Presence&) = delete;
    ~Presence() {
      const std::lock_guard lock(shared.mutex);
      shared.present = false;
      shared.changed.notify_all();
    }
    Shared& shared;
  };

  void Run() {
    const Presence presence(*this);
    while (AwaitTask()) Look();
  }

  bool AwaitTask() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return stopping || wanted != finished; });
    return !stopping;
  }

  // Waits for the lock as long as that takes. Where the interpreter shuts down meanwhile, this
  // thread ends in PyGILState_Ensure (from 3.14 on: stays there for ever), so nothing is held here.
  void Look() {
    ProgramStacks now;
    if (InterpreterIsEnding()) {
      now.main.top = "the interpreter shuts down";
    } else {
      const PyGILState_STATE state = PyGILState_Ensure();
      now = DescribeProgram(*frames, main_thread, LatestSubmitters());
      PyGILState_Release(state);
    }
    // An interpreter that does not tell of threads without a frame does not tell of all.
    if (PY_VERSION_HEX < 0x030B0000) now.threads.reset();
    const std::lock_guard lock(mutex);
    seen = std::move(now);
    finished = wanted;
    changed.notify_all();
  }

  std::vector<int> LatestSubmitters() {
    const std::lock_guard lock(mutex);
    return submitters;
  }

  const std::shared_ptr<const FrameNames> frames;
  const unsigned long main_thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t wanted = 0;     // Guarded by mutex; looks that were asked for.
  std::uint64_t finished = 0;   // Guarded by mutex; at most one behind `wanted`.
  std::vector<int> submitters;  // Guarded by mutex; as the latest Look was given them.
  ProgramStacks seen;           // Guarded by mutex; of the look that finished last.
  bool stopping = false;        // Guarded by mutex.
  bool present = false;         // Guarded by mutex; the thread runs.
  std::thread thread;           // Guarded by mutex.
};

// What belongs to one process: in a forked child the thread does not exist. Thread: immutable.
struct PythonStacks::Process {
  pid_t pid = 0;
  std::shared_ptr<Shared> shared;
};

PythonStacks::PythonStacks(std::shared_ptr<const FrameNames> frames, unsigned long main_thread)
    : frames_(std::move(frames)), main_thread_(main_thread), process_(NewProcess().release()) {}

PythonStacks::~PythonStacks() {
  const Process* process = process_.load();
  // In a forked child the mutex may have been held at the fork, and the thread is not there.
  if (process->pid != getpid()) return;
  Close(Deadline::After(clock_.Now(), kCloseBound));
  delete process;
}

std::unique_ptr<PythonStacks::Process> PythonStacks::NewProcess() const {
  auto process = std::make_unique<Process>();
  process->pid = getpid();
  process->shared = std::make_shared<Shared>(frames_, main_thread_);
  return process;
}

const std::shared_ptr<PythonStacks::Shared>& PythonStacks::OfThisProcess() {
  Process* process = process_.load();
  while (process->pid != getpid()) {
    std::unique_ptr<Process> fresh = NewProcess();
    if (process_.compare_exchange_strong(process, fresh.get())) process = fresh.release();
  }
  return process->shared;
}

std::optional<ProgramStacks> PythonStacks::Look(const std::vector<int>& submitters,
                                                Deadline deadline) {
  const std::shared_ptr<Shared>& shared = OfThisProcess();
  std::unique_lock lock(shared->mutex);
  if (shared->stopping) return std::nullopt;
  if (!shared->thread.joinable()) {
    Result<std::thread> thread = StartThread("res-gil", [shared] { shared->Run(); });
    if (!thread.ok()) {
      ProgramStacks unknown;
      unknown.main.top = "unknown: " + thread.status().message();
      return unknown;
    }
    shared->thread = std::move(*thread);
    shared->present = true;
  }
  shared->submitters = submitters;
  if (shared->wanted == shared->finished) {
    ++shared->wanted;
    shared->changed.notify_all();
  }
  shared->changed.wait_for(lock, deadline.LeftAt(clock_.Now()), [&] {
    return shared->stopping || !shared->present || shared->finished == shared->wanted;
  });
  if (shared->finished != shared->wanted) return std::nullopt;
  return shared->seen;
}

void PythonStacks::Close(Deadline deadline) {
  const std::shared_ptr<Shared>& shared = OfThisProcess();
  std::thread thread;
  bool present = false;
  {
    std::unique_lock lock(shared->mutex);
    shared->stopping = true;
    shared->changed.notify_all();
    // A try that waits for the lock has it soon: the caller has just given it up.
    shared->changed.wait_for(lock, std::min(kCloseBound, deadline.LeftAt(clock_.Now())),
                             [&] { return !shared->present; });
    present = shared->present;
    thread.swap(shared->thread);
  }
  if (!thread.joinable()) return;
  if (present) {
    thread.detach();
  } else {
    thread.join();
  }
}

}  // namespace resilient::plugin
