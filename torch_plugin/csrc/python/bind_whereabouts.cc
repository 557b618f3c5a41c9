#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/durations.h"
#include "torch_plugin/csrc/python/module.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;

constexpr Duration kInterruptPoll = std::chrono::milliseconds(100);
constexpr Duration kCloseBound = std::chrono::seconds(1);

// Where the observer puts its answer. Owner: who asks, and the question. Thread: thread-safe.
class Reply {
 public:
  void Put(const Whereabouts& seen) {
    const std::lock_guard lock(mutex_);
    seen_ = seen;
    changed_.notify_all();
  }
  std::optional<Whereabouts> WaitFor(Duration at_most) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, at_most, [this] { return seen_.has_value(); });
    return seen_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Whereabouts> seen_;  // Guarded by mutex_.
};

// REQUIRES: the interpreter's lock is not held. None when no answer came.
std::optional<Whereabouts> Ask(PythonHost& host, Duration at_most) {
  const SystemClock clock;
  const Deadline deadline = Deadline::After(clock.Now(), at_most);
  const auto reply = std::make_shared<Reply>();
  host.observer()->Ask([reply](const Whereabouts& seen) { reply->Put(seen); });
  while (true) {
    const Duration left = deadline.LeftAt(clock.Now());
    if (auto seen = reply->WaitFor(std::min(left, kInterruptPoll))) return seen;
    if (left == Duration::zero()) return std::nullopt;
    Check(host, host.Interrupted());
  }
}

py::object ToObject(const std::optional<Whereabouts>& seen) {
  if (!seen) return py::none();
  py::dict fields;
  fields["thread"] = seen->thread;
  fields["at"] = seen->at;
  fields["stack"] = seen->stack;
  fields["no_progress"] = ToSeconds(seen->no_progress);
  fields["expected_slow"] = seen->expected_slow;
  fields["expected_slow_for"] = ToSeconds(seen->expected_slow_for);
  return fields;
}

// REQUIRES: the interpreter's lock.
py::list ListThreads(const PythonHost& host) {
  const ProgramStacks seen = host.DescribeThreads();
  const int told = seen.submitter ? seen.submitter->id : seen.main.id;
  py::list threads;
  for (const ProgramThread& thread : seen.threads.value_or(std::vector<ProgramThread>())) {
    if (thread.at.empty()) continue;  // It runs no Python code.
    py::dict fields;
    fields["id"] = thread.id;
    fields["name"] = thread.name;
    fields["at"] = thread.at;
    fields["told"] = thread.id == told;
    threads.append(std::move(fields));
  }
  return threads;
}

}  // namespace

void RegisterWhereabouts(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  m.def(
      "whereabouts",
      [host](double timeout) {
        std::optional<Whereabouts> seen;
        {
          const py::gil_scoped_release unlocked;
          seen = Ask(*host, FromSeconds(timeout));
        }
        return ToObject(seen);
      },
      py::arg("timeout") = 3.0);
  m.def("threads", [host] { return ListThreads(*host); });
  m.def(
      "expect_slow",
      [host](std::string what, double seconds) {
        return host->observer()->Expect(std::move(what), FromSeconds(seconds));
      },
      py::arg("what"), py::arg("seconds"));
  m.def(
      "end_expect_slow", [host](std::uint64_t token) { host->observer()->EndExpectation(token); },
      py::arg("token"));
  // Before the interpreter shuts down: afterwards it ends each thread that waits for its lock.
  py::module_::import("atexit").attr("register")(py::cpp_function([host] {
    const py::gil_scoped_release unlocked;
    host->observer()->Close(Deadline::After(SystemClock().Now(), kCloseBound));
  }));
}

}  // namespace resilient::plugin
