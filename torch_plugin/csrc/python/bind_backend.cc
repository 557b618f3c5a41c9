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
#include "torch_plugin/csrc/reconfigurable.h"
#include "torch_plugin/csrc/world.h"

namespace resilient::plugin {

namespace {

namespace py = pybind11;

py::dict ToDict(const LoggedOperation& entry) {
  py::dict fields;
  fields["id"] = entry.id;
  fields["seq"] = entry.seq;
  fields["name"] = entry.name;
  fields["dtype"] = std::string(DataTypeName(entry.dtype));
  fields["count"] = entry.count;
  fields["state"] = std::string(LoggedStateName(entry.state));
  fields["call_site"] = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      entry.call_site.data(), static_cast<Py_ssize_t>(entry.call_site.size()), "replace"));
  fields["started"] = entry.started_unix_s;
  fields["ended"] = entry.ended_unix_s;
  fields["failure"] = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      entry.failure.data(), static_cast<Py_ssize_t>(entry.failure.size()), "replace"));
  return fields;
}

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// REQUIRES: without the interpreter's lock.
c10::intrusive_ptr<ResilientBackend> OursOrThrow(PythonHost& host, const BackendPtr& backend) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (auto* chosen = dynamic_cast<ReconfigurableBackend*>(backend.get())) return chosen->Current();
#endif
  auto ours = c10::dynamic_intrusive_pointer_cast<ResilientBackend>(backend);
  if (ours) return ours;
  host.Throw(Status(StatusCode::kInvalidArgument, "the group is of another backend"));
}

py::list LoggedOperations(PythonHost& host, const BackendPtr& backend) {
  std::vector<LoggedOperation> entries;
  {
    const py::gil_scoped_release unlocked;
    entries = OursOrThrow(host, backend)->logged_operations();
  }
  py::list dicts;
  for (const LoggedOperation& entry : entries) dicts.append(ToDict(entry));
  return dicts;
}

void RegisterClass(py::module_& m) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<ResilientBackend, c10::intrusive_ptr<ResilientBackend>>(m, "ResilientBackend",
                                                                     c10d.attr("Backend"))
      // Torch asks it of ranks that a new group does not have: a split of NCCL's needs all ranks of
      // the parent. Ours needs nobody else.
      .def("perform_nocolor_split", [](ResilientBackend&, const py::object&) {})
      // That of Backend is of torch 2.14.
      .def("_add_ephemeral_timeout", &ResilientBackend::addEphemeralTimeout, py::arg("timeout"));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
BackendPtr CreateReconfigurable(PythonHost& host, std::shared_ptr<SessionContext> anchor,
                                const std::string& name, int rank, int size, bool is_world,
                                std::chrono::milliseconds timeout) {
  if (is_world) {
    return c10::make_intrusive<ReconfigurableBackend>(std::move(anchor), name, rank, size, timeout);
  }
  host.Throw(Status(StatusCode::kSetting,
                    "no group can be made of one with enable_reconfigure=True: its members change "
                    "by dist._reconfigure(uuid, handles) only"));
}

void RegisterReconfigurable(py::module_& m) {
  const auto c10d = py::module_::import("torch._C._distributed_c10d");
  py::class_<ReconfigurableBackend, c10::intrusive_ptr<ReconfigurableBackend>>(
      m, "ReconfigurableBackend", c10d.attr("Backend"))
      .def_property_readonly("session", &ReconfigurableBackend::context);
}
#endif

}  // namespace

void RegisterBackend(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  m.def(
      "create_backend",
      [host](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             std::chrono::milliseconds timeout, const std::string& group_name,
             std::vector<int> global_ranks,
             const c10::intrusive_ptr<BackendOptions>& nccl) -> BackendPtr {
        const py::gil_scoped_release unlocked;
        auto context = ValueOrThrow(*host, ContextOf(store));
#ifdef C10D_BACKEND_HAS_RECONFIGURE
        if (!context->options().reconfigure_scope.empty()) {
          return CreateReconfigurable(*host, std::move(context), group_name, rank, size,
                                      global_ranks.empty(), timeout);
        }
#endif
        return ValueOrThrow(*host, ResilientBackend::Create(std::move(context), group_name, rank,
                                                            size, std::move(global_ranks), timeout,
                                                            nccl ? nccl->nccl : NcclOptions()));
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
      py::arg("global_ranks"), py::arg("nccl") = py::none());
  RegisterClass(m);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  RegisterReconfigurable(m);
#endif
  // Whether a group's rank and size can change in place with this version of torch.
  m.attr("can_follow") = ResilientBackend::kCanFollow;
  m.def(
      "follow_world",
      [](const ProcessGroup& world, bool in_place) {
        const py::gil_scoped_release unlocked;
        return FollowWorld(world, in_place);
      },
      py::arg("world"), py::arg("in_place"));
  m.def(
      "abort_group",
      [host](const BackendPtr& backend, const std::string& why) {
        const py::gil_scoped_release unlocked;
        OursOrThrow(*host, backend)->Abort(why);
      },
      py::arg("backend"), py::arg("why"));
  m.def(
      "op_log", [host](const BackendPtr& backend) { return LoggedOperations(*host, backend); },
      py::arg("backend"));
}

}  // namespace resilient::plugin
