#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "torch_plugin/csrc/backend_options.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;
using OptionsClass = py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>>;
using Number = std::optional<int>;
using Text = std::optional<std::string>;

constexpr char kAbout[] =
    "What a group asks of NCCL: pg_options= of init_process_group, new_group and split_group.\n\n"
    "The fields are those of ProcessGroupNCCL.Options and its config. What is None is left to "
    "NCCL\n"
    "and its environment. All ranks of a group pass the same, or all of them raise ConfigError as\n"
    "it connects, as they do where their NCCL is older than what they ask for; a value that "
    "cannot\n"
    "be raises it here. A group keeps them over rebuilds and resizes, and its splits have them.";

void DefineInit(OptionsClass& options, const std::shared_ptr<PythonHost>& host) {
  options.def(py::init([host](bool is_high_priority_stream, Number cga_cluster_size,
                              Number min_ctas, Number max_ctas, Text net_name, Number traffic_class,
                              Text comm_name, Number collnet_enable, Number cta_policy,
                              Number nvls_ctas, Number nchannels_per_net_peer,
                              Number nvlink_centric_sched, Number max_p2p_peers) {
                NcclOptions nccl{.is_high_priority_stream = is_high_priority_stream,
                                 .cga_cluster_size = cga_cluster_size,
                                 .min_ctas = min_ctas,
                                 .max_ctas = max_ctas,
                                 .net_name = std::move(net_name).value_or(""),
                                 .traffic_class = traffic_class,
                                 .comm_name = std::move(comm_name).value_or(""),
                                 .collnet_enable = collnet_enable,
                                 .cta_policy = cta_policy,
                                 .nvls_ctas = nvls_ctas,
                                 .nchannels_per_net_peer = nchannels_per_net_peer,
                                 .nvlink_centric_sched = nvlink_centric_sched,
                                 .max_p2p_peers = max_p2p_peers};
                Check(*host, CheckNcclOptions(nccl));
                return c10::make_intrusive<BackendOptions>(kTorchDefaultTimeout, std::move(nccl));
              }),
              py::kw_only(), py::arg("is_high_priority_stream") = false,
              py::arg("cga_cluster_size") = py::none(), py::arg("min_ctas") = py::none(),
              py::arg("max_ctas") = py::none(), py::arg("net_name") = py::none(),
              py::arg("traffic_class") = py::none(), py::arg("comm_name") = py::none(),
              py::arg("collnet_enable") = py::none(), py::arg("cta_policy") = py::none(),
              py::arg("nvls_ctas") = py::none(), py::arg("nchannels_per_net_peer") = py::none(),
              py::arg("nvlink_centric_sched") = py::none(), py::arg("max_p2p_peers") = py::none());
}

template <auto kField>
void DefineField(OptionsClass& options, const char* name) {
  options.def_property_readonly(name, [](const BackendOptions& self) {
    const auto& value = self.nccl.*kField;
    if constexpr (std::is_same_v<decltype(value), const std::string&>) {
      return value.empty() ? Text() : Text(value);
    } else {
      return value;
    }
  });
}

void DefineFields(OptionsClass& options) {
  DefineField<&NcclOptions::is_high_priority_stream>(options, "is_high_priority_stream");
  DefineField<&NcclOptions::cga_cluster_size>(options, "cga_cluster_size");
  DefineField<&NcclOptions::min_ctas>(options, "min_ctas");
  DefineField<&NcclOptions::max_ctas>(options, "max_ctas");
  DefineField<&NcclOptions::net_name>(options, "net_name");
  DefineField<&NcclOptions::traffic_class>(options, "traffic_class");
  DefineField<&NcclOptions::comm_name>(options, "comm_name");
  DefineField<&NcclOptions::collnet_enable>(options, "collnet_enable");
  DefineField<&NcclOptions::cta_policy>(options, "cta_policy");
  DefineField<&NcclOptions::nvls_ctas>(options, "nvls_ctas");
  DefineField<&NcclOptions::nchannels_per_net_peer>(options, "nchannels_per_net_peer");
  DefineField<&NcclOptions::nvlink_centric_sched>(options, "nvlink_centric_sched");
  DefineField<&NcclOptions::max_p2p_peers>(options, "max_p2p_peers");
}

}  // namespace

void RegisterOptions(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  OptionsClass options(m, "NcclOptions", c10d.attr("Backend").attr("Options"), kAbout);
  options.attr("__module__") = "torch_resilient";
  DefineInit(options, host);
  DefineFields(options);
  options.def("__repr__", [](const BackendOptions& self) {
    return "NcclOptions(" + ToString(self.nccl) + ")";
  });
}

}  // namespace resilient::plugin
