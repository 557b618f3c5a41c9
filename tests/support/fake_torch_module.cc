#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "tests/support/fake_torch_guard.h"
#include "tests/support/fake_torch_hooks.h"
#include "tests/support/fake_torch_runtime.h"
#include "tests/support/fake_torch_tensors.h"

// The Python module fake_cuda: CUDA devices of torch's without a GPU.
namespace resilient::testing {
namespace {

namespace py = pybind11;
using MaybeStream = std::optional<c10::Stream>;
using WithoutLock = py::call_guard<py::gil_scoped_release>;

c10::Stream Given(const MaybeStream& stream) {
  return stream ? *stream : CurrentStream(FakeDevice(-1));
}

// What a stream stands at until it is released. Owner: Python and the stream. Thread: thread-safe.
class Hold {
 public:
  static std::shared_ptr<Hold> On(const MaybeStream& stream) {
    auto hold = std::make_shared<Hold>();
    Enqueue(Given(stream), [hold] { hold->Stand(); });
    return hold;
  }
  void Release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  bool reached() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }
  void WaitUntilReached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

 private:
  void Stand() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  bool released_ = false;
};

// A current stream until the end of a with statement. Thread: of one thread.
class StreamScope {
 public:
  explicit StreamScope(c10::Stream stream) : stream_(stream) {}
  c10::Stream Enter() {
    before_ = Exchange(stream_);
    return stream_;
  }
  void Exit(const py::args&) { Exchange(*before_); }

  static c10::Stream Exchange(c10::Stream stream) {
    return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->exchangeStream(stream);
  }

 private:
  c10::Stream stream_;
  MaybeStream before_;
};

// What is put on a stream within its with statement, to be launched as often as is wanted. Owner:
// Python. Thread: of one thread.
class Graph {
 public:
  explicit Graph(c10::Stream stream) : stream_(stream), current_(stream) {}
  ~Graph() { Destroy(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void Enter() {
    current_.Enter();
    Check(Runtime().begin_capture(HandleOf(stream_), 0));
  }
  void Exit(const py::args& none) {
    const CudaResult ended = Runtime().end_capture(HandleOf(stream_), &graph_);
    current_.Exit(none);
    Check(ended);
  }
  void Replay() const { Check(Runtime().graph_launch(graph_, HandleOf(stream_))); }
  void Destroy() {
    if (graph_ != nullptr) (void)Runtime().graph_destroy(std::exchange(graph_, nullptr));
  }

 private:
  const c10::Stream stream_;
  StreamScope current_;
  CudaGraphHandle graph_ = nullptr;
};

void CallInOrder(py::function function, const MaybeStream& stream) {
  const auto shared =
      std::shared_ptr<py::function>(new py::function(std::move(function)), [](py::function* one) {
        const py::gil_scoped_acquire lock;
        delete one;
      });
  const c10::Stream on = Given(stream);
  const py::gil_scoped_release release;
  Enqueue(on, [shared] {
    const py::gil_scoped_acquire lock;
    try {
      (*shared)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("fake_cuda.enqueue");
    }
  });
}

// So that torch's Python side does not look for a driver, and names the same current device.
void InstallInPython() {
  const py::module_ cuda = py::module_::import("torch.cuda");
  const py::module_ inner = py::module_::import("torch._C");
  const auto set = [](int device) { Runtime().cuda.SetDevice(device); };
  const auto exchange = [set](int device) {
    const int before = FakeDevice(-1).index();
    if (device >= 0) set(device);
    return before;
  };
  cuda.attr("_initialized") = true;
  for (const char* name : {"manual_seed", "manual_seed_all"})  // Its generators need a driver.
    cuda.attr(name) = py::cpp_function([](const py::args&) {});
  cuda.attr("is_available") = py::cpp_function([] { return true; });
  cuda.attr("device_count") = py::cpp_function([] { return int{kFakeDevices}; });
  inner.attr("_cuda_getDevice") = py::cpp_function([] { return int{FakeDevice(-1).index()}; });
  inner.attr("_cuda_setDevice") = py::cpp_function(set);
  for (const char* name : {"_exchange_device", "_maybe_exchange_device"})
    cuda.attr(name) = py::cpp_function(exchange);
  inner.attr("_cuda_getDeviceCount") = py::cpp_function([] { return int{kFakeDevices}; });
  inner.attr("_cuda_synchronize") =
      py::cpp_function([] { Check(Runtime().device_synchronize()); }, WithoutLock());
}

// Streams and events of torch.cuda are those that torch has for any device.
void InstallStreamsInPython() {
  const py::module_ torch = py::module_::import("torch");
  const py::module_ cuda = py::module_::import("torch.cuda");
  const auto device_of = [](const py::object& device) {
    const py::object index = py::module_::import("torch.cuda._utils").attr("_get_device_index");
    return FakeDevice(index(device, true).cast<c10::DeviceIndex>());
  };
  cuda.attr("Stream") = torch.attr("Stream");
  cuda.attr("Event") = torch.attr("Event");
  cuda.attr("current_stream") = py::cpp_function(
      [device_of](const py::object& device) { return CurrentStream(device_of(device)); },
      py::arg("device") = py::none());
  cuda.attr("default_stream") = py::cpp_function(
      [device_of](const py::object& device) {
        return c10::Stream(c10::Stream::DEFAULT, device_of(device));
      },
      py::arg("device") = py::none());
  py::module_::import("torch._C").attr("_cuda_setStream") = py::cpp_function(
      [](c10::StreamId id, int device, int) {
        Check(Runtime().cuda.SetDevice(device));
        const c10::Device on = FakeDevice(static_cast<c10::DeviceIndex>(device));
        StreamScope::Exchange(c10::Stream(c10::Stream::UNSAFE, on, id));
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
}

void BindStreams(py::module_& m) {
  py::class_<Hold, std::shared_ptr<Hold>>(m, "Hold")
      .def("release", &Hold::Release)
      .def_property_readonly("reached", &Hold::reached)
      .def("wait_until_reached", &Hold::WaitUntilReached, WithoutLock())
      .def("__enter__", [](std::shared_ptr<Hold> self) { return self; })
      .def("__exit__", [](Hold& self, const py::args&) { self.Release(); });
  py::class_<StreamScope>(m, "StreamScope")
      .def("__enter__", &StreamScope::Enter)
      .def("__exit__", &StreamScope::Exit);
  py::class_<Graph>(m, "Graph")
      .def(py::init<c10::Stream>(), py::arg("stream"))
      .def(
          "__enter__",
          [](Graph& self) -> Graph& {
            self.Enter();
            return self;
          },
          py::return_value_policy::reference)
      .def("__exit__", &Graph::Exit)
      .def("replay", &Graph::Replay, WithoutLock())
      .def("destroy", &Graph::Destroy, WithoutLock());
  m.def(
      "new_stream", [](int device) { return NewStream(FakeDevice(device)); },
      py::arg("device") = -1);
  m.def(
      "current_stream", [](int device) { return CurrentStream(FakeDevice(device)); },
      py::arg("device") = -1);
  m.def(
      "stream",
      [](const MaybeStream& stream, int device) {
        return StreamScope(stream ? *stream : NewStream(FakeDevice(device)));
      },
      py::arg("stream") = py::none(), py::arg("device") = -1);
  m.def("native_handle",
        [](c10::Stream stream) { return reinterpret_cast<std::uintptr_t>(HandleOf(stream)); });
  m.def("hold", &Hold::On, py::arg("stream") = py::none(), WithoutLock());
  m.def(
      "copy",
      [](const at::Tensor& to, const at::Tensor& from, const MaybeStream& stream) {
        EnqueueCopy(Given(stream), to, from);
      },
      py::arg("to"), py::arg("from_"), py::arg("stream") = py::none(), WithoutLock());
  m.def("enqueue", &CallInOrder, py::arg("function"), py::arg("stream") = py::none());
  m.def(
      "synchronize",
      [](const MaybeStream& stream) {
        if (stream) return Synchronize(*stream);
        Check(Runtime().device_synchronize());
      },
      py::arg("stream") = py::none(), WithoutLock());
}

void BindControl(py::module_& m) {
  m.def("change", [](const std::string& script) {
    if (Runtime().change(script.c_str()) != 0) throw py::value_error("not a script: " + script);
  });
  m.def("counts", [] { return py::module_::import("json").attr("loads")(Runtime().counts()); });
  m.def(
      "wait",
      [](const std::string& name, int at_least) {
        return Runtime().wait(name.c_str(), at_least) == 0;
      },
      py::arg("name"), py::arg("at_least"), WithoutLock());
}

}  // namespace
}  // namespace resilient::testing

PYBIND11_MODULE(fake_cuda, m) {
  using namespace resilient::testing;  // NOLINT(google-build-using-namespace)
  py::module_::import("torch");
  m.attr("library") = Runtime().path;
  m.attr("DEVICES") = int{kFakeDevices};
  m.def("install", [] {
    InstallGuard();
    InstallHooks();
    InstallKernels();
    InstallInPython();
    InstallStreamsInPython();
  });
  m.def(
      "tensor", [](const at::Tensor& host, int device) { return OnFake(host, FakeDevice(device)); },
      py::arg("host"), py::arg("device") = 0);
  m.def("host", &OnHost, py::arg("tensor"));
  m.def("set_device", [](int device) { Check(Runtime().cuda.SetDevice(device)); });
  m.def("device", [] { return int{FakeDevice(-1).index()}; });
  BindStreams(m);
  BindControl(m);
}
