#include "torch_plugin/csrc/python/stack_source.h"

#include <Python.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {
namespace {

constexpr Duration kCloseBound = std::chrono::seconds(1);

// REQUIRES: the interpreter's lock, which is kept: no Python code runs in between, and a collection
// of garbage, which would run finalisers of the user's on our thread, is put off.
MainThreadStack DescribeThread(const FrameNames& frames, unsigned long thread) {
  MainThreadStack seen;
  const int collects = PyGC_Disable();
  PyObject* current_frames = PySys_GetObject("_current_frames");
  PyObject* by_thread = current_frames == nullptr ? nullptr : PyObject_CallNoArgs(current_frames);
  PyObject* key = PyLong_FromUnsignedLong(thread);
  if (by_thread != nullptr && key != nullptr) {
    PyObject* frame = PyDict_GetItemWithError(by_thread, key);
    if (frame != nullptr) seen = frames.Describe(reinterpret_cast<PyFrameObject*>(frame));
  }
  Py_XDECREF(key);
  Py_XDECREF(by_thread);
  PyErr_Clear();
  if (collects != 0) PyGC_Enable();
  return seen;
}

// nullopt: this interpreter does not say. REQUIRES: as DescribeThread.
std::optional<std::vector<ProgramThread>> ListThreads(const FrameNames& frames) {
#if PY_VERSION_HEX >= 0x030B0000
  std::vector<ProgramThread> threads;
  const int collects = PyGC_Disable();
  PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Main());
  for (; state != nullptr; state = PyThreadState_Next(state)) {
    const int id = static_cast<int>(state->native_thread_id);
    PyFrameObject* frame = PyThreadState_GetFrame(state);
    threads.push_back(frames.DescribeThread(id, frame));
    Py_XDECREF(frame);
  }
  PyErr_Clear();
  if (collects != 0) PyGC_Enable();
  return threads;
#else
  static_cast<void>(frames);
  return std::nullopt;
#endif
}

}  // namespace

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
    MainThreadStack now;
    if (InterpreterIsEnding()) {
      now.top = "the interpreter shuts down";
    } else {
      const PyGILState_STATE state = PyGILState_Ensure();
      now = DescribeThread(*frames, main_thread);
      now.threads = ListThreads(*frames);
      PyGILState_Release(state);
    }
    const std::lock_guard lock(mutex);
    seen = std::move(now);
    finished = wanted;
    changed.notify_all();
  }

  const std::shared_ptr<const FrameNames> frames;
  const unsigned long main_thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t wanted = 0;    // Guarded by mutex; looks that were asked for.
  std::uint64_t finished = 0;  // Guarded by mutex; at most one behind `wanted`.
  MainThreadStack seen;        // Guarded by mutex; of the look that finished last.
  bool stopping = false;       // Guarded by mutex.
  bool present = false;        // Guarded by mutex; the thread runs.
  std::thread thread;          // Guarded by mutex.
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

std::optional<MainThreadStack> PythonStacks::Look(Deadline deadline) {
  const std::shared_ptr<Shared>& shared = OfThisProcess();
  std::unique_lock lock(shared->mutex);
  if (shared->stopping) return std::nullopt;
  if (!shared->thread.joinable()) {
    Result<std::thread> thread = StartThread("res-gil", [shared] { shared->Run(); });
    if (!thread.ok()) return MainThreadStack{"unknown: " + thread.status().message(), {}};
    shared->thread = std::move(*thread);
    shared->present = true;
  }
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
