#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <resilient/device.h>
#include <resilient/settings.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/durations.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/python/tls_files.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;

py::dict ToDict(const Settings& settings) {
  py::dict fields;
  fields["store"] = settings.store;
  fields["job"] = settings.job;
  fields["bind"] = settings.bind;
  fields["token_file"] = settings.token_file;
  fields["tls"] = ToTuple(settings.tls);
  fields["linger"] = ToSeconds(settings.linger);
  fields["lease_ttl"] = ToSeconds(settings.lease_ttl);
  fields["budget"] = ToSeconds(settings.budget);
  fields["seat_wait"] = ToSeconds(settings.seat_wait);
  fields["strict_timeouts"] = settings.strict_timeouts;
  fields["op_deadline"] = ToSeconds(settings.op_deadline);
  fields["wait_log"] = ToSeconds(settings.wait_log);
  fields["stall"] = ToSeconds(settings.stall);
  fields["device_stall"] = ToSeconds(settings.device_stall);
  fields["shm_limit"] = settings.shm_limit;
  fields["checksums"] = settings.checksums;
  fields["encrypted_links"] = settings.encrypted_links;
  fields["auto_heal"] = settings.auto_heal;
  fields["replay"] = settings.replay;
  fields["hierarchical_order"] = settings.hierarchical_order;
  fields["socket_ifname"] = settings.socket_ifname;
  fields["socket_streams"] = settings.socket_streams;
  fields["nccl_library"] = settings.nccl_library;
  fields["cuda_runtime"] = settings.cuda_runtime;
  fields["allow_shared_gpu"] = settings.shared_gpu != SharedGpu::kRefused;
  fields["shared_gpu"] = settings.shared_gpu;
  fields["fake_devices"] = settings.fake_devices;
  fields["log"] = settings.log;
  fields["owner"] = settings.owner;
  fields["supervised"] = settings.supervised;
  fields["replaces"] = settings.replaces;
  fields["attempt"] = settings.attempt;
  fields["spares"] = settings.spares;
  fields["host_watch"] = settings.host_watch;
  fields["warnings"] = settings.warnings;
  return fields;
}

using Environment = std::map<std::string, std::string>;

std::vector<std::pair<std::string, std::string>> ToPairs(const Environment& environment) {
  return {environment.begin(), environment.end()};
}

// How the claim of a process is found: who asks says which device it uses.
void RegisterDevices(py::module_& m) {
  py::enum_<SharedGpu>(m, "SharedGpu")
      .value("REFUSED", SharedGpu::kRefused)
      .value("THROUGH_HOST", SharedGpu::kThroughHost)
      .value("THROUGH_NCCL", SharedGpu::kThroughNccl);
  py::class_<DeviceClaim>(m, "DeviceClaim")
      .def_readwrite("uuid", &DeviceClaim::uuid)
      .def_readwrite("host", &DeviceClaim::host)
      .def_readwrite("ordinal", &DeviceClaim::ordinal)
      .def_readwrite("visible", &DeviceClaim::visible)
      .def_readwrite("visible_devices", &DeviceClaim::visible_devices)
      .def_readwrite("local_rank", &DeviceClaim::local_rank);
  m.def(
      "find_device",
      [](int ordinal, const Environment& environment) {
        const std::vector<std::pair<std::string, std::string>> pairs = ToPairs(environment);
        const py::gil_scoped_release unlocked;
        return ClaimOf(ordinal, ListGpus(), pairs);
      },
      py::arg("ordinal"), py::arg("environment"));
}

}  // namespace

void RegisterSettings(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  RegisterDevices(m);
  m.def("parse_settings", [host](const Environment& environment) {
    return ToDict(ValueOrThrow(*host, ParseSettings(ToPairs(environment))));
  });
  m.def(
      "set_log",
      [host](const std::string& level, const std::string& tag) {
        Check(*host, ConfigureLog(level, tag));
      },
      py::arg("level"), py::arg("tag"));
}

}  // namespace resilient::plugin
