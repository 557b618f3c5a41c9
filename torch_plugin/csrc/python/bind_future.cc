#include <memory>
#include <utility>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "torch_plugin/csrc/callback_queue.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {

namespace {

namespace py = pybind11;

using PythonFuture = torch::jit::PythonFutureWrapper;  // torch.futures.Future.
using PythonFuturePtr = std::shared_ptr<PythonFuture>;

}  // namespace

void RegisterFuture(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  py::class_<CallbackQueue, std::shared_ptr<CallbackQueue>>(m, "CallbackQueue")
      .def_property_readonly("name", &CallbackQueue::name)
      .def_static(
          "share",
          [](PythonFuture& target, const PythonFuture& source) {
            target.fut = source.fut;
            target.unwrap_func = source.unwrap_func;
          },
          py::arg("target"), py::arg("source"))
      .def(
          "turn_after",
          [](const CallbackQueue&, const PythonFuturePtr& future) {
            return std::make_shared<PythonFuture>(CallbackQueue::TurnAfter(*future->fut));
          },
          py::arg("future"))
      .def(
          "add",
          [host](CallbackQueue& queue, const PythonFuturePtr& future, const PythonFuturePtr& turn) {
            const py::gil_scoped_release unlocked;
            Check(*host, queue.Add(future->fut, turn->fut));
          },
          py::arg("future"), py::arg("turn"))
      .def(
          "run",
          [](const std::shared_ptr<CallbackQueue>& queue, const py::function& callback,
             const py::object& future) {
            const CallbackQueue::Running running(queue);
            return callback(future);
          },
          py::arg("callback"), py::arg("future"));
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<WorkImpl, c10::intrusive_ptr<WorkImpl>>(m, "ResilientWork", c10d.attr("Work"))
      .def_property_readonly("callbacks", &WorkImpl::callbacks);
}

}  // namespace resilient::plugin
