#include "torch_plugin/csrc/python/module.h"

#include <exception>
#include <optional>
#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/version.h>

#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

void RegisterErrors(pybind11::module_& m, const std::shared_ptr<PythonHost>& host) {
  m.def("install_error_factory",
        [host](const pybind11::function& factory) { host->InstallFactory(factory.ptr()); });
  m.def("retried_by_elastic", [](const std::string& code) {
    const std::optional<StatusCode> known = CodeFromName(code);
    return known && RetriedByElastic(*known);
  });
  m.def("ends_generation", [](const std::string& code) {
    const std::optional<StatusCode> known = CodeFromName(code);
    return known && EndsGeneration(*known);
  });
  // What PythonHost throws, wherever it comes out: out of our functions, or out of torch's bindings
  // of Store and Work.
  pybind11::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(std::move(pending));
    } catch (python_error& error) {
      error.restore();
    }
  });
}

}  // namespace resilient::plugin

PYBIND11_MODULE(_C, m) {
  using namespace resilient::plugin;  // NOLINT(google-build-using-namespace)
  m.attr("TORCH_VERSION") = TORCH_VERSION;
  m.attr("VERSION") = RESILIENT_VERSION;
  const auto host = std::make_shared<PythonHost>();
  RegisterErrors(m, host);
  RegisterSettings(m, host);
  RegisterOptions(m, host);
  RegisterSession(m, host);
  RegisterEnding(m);
  RegisterLocate(m, host);
  RegisterStore(m, host);
  RegisterPresence(m, host);
  RegisterBackend(m, host);
  RegisterFuture(m, host);
  RegisterWhereabouts(m, host);
}
