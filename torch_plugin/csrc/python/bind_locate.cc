#include <string>
#include <utility>

#include <pybind11/stl.h>
#include <resilient/store/client.h>
#include <resilient/store/locate.h>
#include <resilient/store/server_process.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/durations.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/python/tls_files.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;

store::ConnectOptions OptionsFor(const std::string& address, const std::string& job,
                                 const std::string& token_file, const TlsTuple& tls) {
  store::ConnectOptions options;
  options.addresses = {address};
  options.job = job;
  options.token_file = token_file;
  options.tls = ToTlsFiles(tls);
  return options;
}

std::string ProbeStore(PythonHost& host, const store::ConnectOptions& options, double timeout) {
  const SystemClock clock;
  const py::gil_scoped_release unlocked;
  auto client = ValueOrThrow(host, store::Connect(
                                       options, [&host] { return host.Interrupted(); }, clock,
                                       Deadline::After(clock.Now(), FromSeconds(timeout))));
  std::string server = client->server_id();
  client->Close();
  return server;
}

std::pair<std::string, bool> FindStore(PythonHost& host, const store::LocateOptions& options,
                                       double timeout) {
  const SystemClock clock;
  const py::gil_scoped_release unlocked;
  store::Located located =
      ValueOrThrow(host, store::FindOrStart(
                             options, [&host] { return host.Interrupted(); }, clock,
                             Deadline::After(clock.Now(), FromSeconds(timeout))));
  return {std::move(located.server_id), located.spawned};
}

py::tuple StartServer(PythonHost& host, const std::string& listen, double linger) {
  const store::ServerProcess started = [&] {
    const SystemClock clock;
    const py::gil_scoped_release unlocked;
    const std::string program = ValueOrThrow(host, store::StoreProgram());
    return ValueOrThrow(host, store::StartServer(program, listen, FromSeconds(linger), clock));
  }();
  return py::make_tuple(started.address, started.server_id, started.log_path);
}

}  // namespace

void RegisterLocate(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  m.def(
      "probe_store",
      [host](const std::string& address, const std::string& job, double timeout,
             const std::string& expected_server, const std::string& token_file,
             const TlsTuple& tls) {
        store::ConnectOptions options = OptionsFor(address, job, token_file, tls);
        options.expected_server = expected_server;
        return ProbeStore(*host, options, timeout);
      },
      py::arg("address"), py::arg("job"), py::arg("timeout"), py::arg("expected_server") = "",
      py::arg("token_file") = "", py::arg("tls") = TlsTuple());
  m.def(
      "find_store",
      [host](const std::string& address, const std::string& job, double timeout, int rank,
             const std::string& bind, double linger, const std::string& token_file,
             const TlsTuple& tls) {
        const store::LocateOptions options{.connect = OptionsFor(address, job, token_file, tls),
                                           .rank = rank,
                                           .bind = bind,
                                           .linger = FromSeconds(linger)};
        return FindStore(*host, options, timeout);
      },
      py::arg("address"), py::arg("job"), py::arg("timeout"), py::arg("rank"), py::arg("bind"),
      py::arg("linger"), py::arg("token_file") = "", py::arg("tls") = TlsTuple());
  m.def(
      "start_server",
      [host](const std::string& listen, double linger) {
        return StartServer(*host, listen, linger);
      },
      py::arg("listen"), py::arg("linger"));
}

}  // namespace resilient::plugin
