#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/module.h"

namespace resilient::plugin {

namespace py = pybind11;

void RegisterStore(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<ResilientStore, c10::intrusive_ptr<ResilientStore>>(m, "Store", c10d.attr("Store"))
      .def(py::init([host](std::vector<std::string> addresses, std::string job,
                           std::chrono::milliseconds timeout) {
             store::ConnectOptions options;
             options.addresses = std::move(addresses);
             options.job = std::move(job);
             const py::gil_scoped_release unlocked;
             return ValueOrThrow(*host, ResilientStore::Standalone(options, timeout, host));
           }),
           py::arg("addresses"), py::arg("job"), py::arg("timeout"))
      .def_property_readonly("session", [](const ResilientStore& self) { return self.context(); })
      .def_property_readonly("server_id", &ResilientStore::server_id)
      .def("close", &ResilientStore::Close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace resilient::plugin
