#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/python/tls_files.h"

namespace resilient::plugin {

namespace py = pybind11;

namespace {

// `kMethod`: Agree, or AgreeAmongSurvivors.
template <auto kMethod>
std::vector<py::bytes> AgreeBy(ResilientStore& store, const std::string& key, std::int64_t rank,
                               std::int64_t size, const py::bytes& value, std::uint64_t generation,
                               std::chrono::milliseconds timeout) {
  std::string text = value;
  std::vector<std::string> values;
  {
    const py::gil_scoped_release unlocked;
    values = (store.*kMethod)(key, rank, size, std::move(text), generation, timeout);
  }
  return {values.begin(), values.end()};
}

}  // namespace

void RegisterStore(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<ResilientStore, c10::intrusive_ptr<ResilientStore>>(m, "Store", c10d.attr("Store"))
      .def(py::init([host](std::vector<std::string> addresses, std::string job,
                           std::chrono::milliseconds timeout, std::string token_file,
                           const TlsTuple& tls) {
             store::ConnectOptions options;
             options.addresses = std::move(addresses);
             options.job = std::move(job);
             options.token_file = std::move(token_file);
             options.tls = ToTlsFiles(tls);
             const py::gil_scoped_release unlocked;
             return ValueOrThrow(*host, ResilientStore::Standalone(options, timeout, host));
           }),
           py::arg("addresses"), py::arg("job"), py::arg("timeout"), py::arg("token_file") = "",
           py::arg("tls") = TlsTuple())
      .def_property_readonly("session", [](const ResilientStore& self) { return self.context(); })
      .def_property_readonly("server_id", &ResilientStore::server_id)
      // As c10d binds them, without its detour through vectors.
      .def("set", &ResilientStore::SetText, py::call_guard<py::gil_scoped_release>())
      .def("get",
           [](ResilientStore& self, const std::string& key) {
             std::string value;
             {
               const py::gil_scoped_release unlocked;
               value = self.GetText(key);
             }
             return py::bytes(value);
           })
      // c10d has it from torch 2.12 on.
      .def(
          "barrier",
          [](ResilientStore& self, const std::string& key, std::int64_t world_size,
             std::optional<std::chrono::milliseconds> timeout) {
            self.barrier(key, world_size, timeout.value_or(self.getTimeout()));
          },
          py::arg("key"), py::arg("world_size"), py::arg("timeout") = py::none(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "exchange",
          [](ResilientStore& self, const std::string& key, std::int64_t rank, std::int64_t size,
             const py::bytes& value, std::optional<std::chrono::milliseconds> timeout) {
            std::string text = value;
            std::vector<std::string> values;
            {
              const py::gil_scoped_release unlocked;
              values = self.Exchange(key, rank, size, std::move(text),
                                     timeout.value_or(self.getTimeout()));
            }
            return std::vector<py::bytes>(values.begin(), values.end());
          },
          py::arg("key"), py::arg("rank"), py::arg("size"), py::arg("value"),
          py::arg("timeout") = py::none())
      .def("agree", &AgreeBy<&ResilientStore::Agree>, py::arg("key"), py::arg("rank"),
           py::arg("size"), py::arg("value"), py::arg("generation"), py::arg("timeout"))
      .def("agree_among_survivors", &AgreeBy<&ResilientStore::AgreeAmongSurvivors>, py::arg("key"),
           py::arg("rank"), py::arg("size"), py::arg("value"), py::arg("generation"),
           py::arg("timeout"))
      .def("close", &ResilientStore::Close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace resilient::plugin
