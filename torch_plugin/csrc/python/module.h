#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include "torch_plugin/csrc/python/python_host.h"

namespace resilient::plugin {

// One function a concept; each adds its bindings to the module.
void RegisterErrors(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterSettings(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterSession(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterLocate(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterStore(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterPresence(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterEnding(pybind11::module_& m);
void RegisterOptions(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterBackend(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterFuture(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);
void RegisterWhereabouts(pybind11::module_& m, const std::shared_ptr<PythonHost>& host);

}  // namespace resilient::plugin
