#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/world.h"

namespace resilient::plugin {

namespace py = pybind11;

void RegisterBackend(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  m.def(
      "create_backend",
      [host](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const std::string& group_name,
             std::vector<int> global_ranks) -> c10::intrusive_ptr<c10d::Backend> {
        const py::gil_scoped_release unlocked;
        auto context = ValueOrThrow(*host, ContextOf(store));
        return ValueOrThrow(*host,
                            ResilientBackend::Create(std::move(context), group_name, rank, size,
                                                     std::move(global_ranks), timeout));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
      py::arg("global_ranks"));
}

}  // namespace resilient::plugin
