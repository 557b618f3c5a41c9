#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <resilient/exit.h>

#include "torch_plugin/csrc/backend_options.h"
#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/durations.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/python/tls_files.h"
#include "torch_plugin/csrc/work.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;
using ContextPtr = std::shared_ptr<SessionContext>;

py::dict ToDict(const Membership& membership) {
  py::list members;
  for (const Member& member : membership.members) {
    py::dict entry;
    entry["rank"] = member.rank;
    entry["host"] = member.host;
    entry["pid"] = member.pid;
    entry["incarnation"] = member.incarnation;
    members.append(std::move(entry));
  }
  py::dict fields;
  fields["state"] = std::string(SessionStateName(membership.state));
  fields["life"] = membership.life;
  fields["round"] = membership.round;
  fields["generation"] = membership.generation;
  fields["fence_token"] = membership.fence_token;
  fields["rank"] = membership.rank;
  fields["members"] = std::move(members);
  return fields;
}

py::object ToObject(const std::optional<Incident>& incident) {
  if (!incident) return py::none();
  py::dict fields;
  fields["generation"] = incident->generation;
  fields["cause"] = incident->cause.ToString();
  fields["code"] = std::string(CodeName(incident->cause.code()));
  fields["known"] = incident->known_unix_s;
  fields["aborted"] = incident->aborted_unix_s;
  fields["joined"] = incident->joined_unix_s;
  fields["rebuilt"] = incident->rebuilt_unix_s;
  fields["running"] = incident->running_unix_s;
  return fields;
}

const char* EventName(SessionEvent::Kind kind) {
  switch (kind) {
    case SessionEvent::Kind::kFenced:
      return "fenced";
    case SessionEvent::Kind::kRebuilt:
      return "rebuilt";
    case SessionEvent::Kind::kRunning:
      return "running";
    case SessionEvent::Kind::kRefused:
      return "refused";
    case SessionEvent::Kind::kFailed:
      return "failed";
    case SessionEvent::Kind::kClosed:
      return "closed";
  }
  return "";
}

// The next event as a dictionary; None when there is none within `seconds`.
py::object EventObject(PythonHost& host, SessionContext& context, std::uint64_t after,
                       double seconds) {
  std::optional<Result<SessionEvent>> awaited;
  {
    const py::gil_scoped_release unlocked;
    const Deadline deadline = Deadline::After(context.clock().Now(), FromSeconds(seconds));
    awaited.emplace(context.session().AwaitEvent(after, deadline));
  }
  if (!awaited->ok() && awaited->status().code() == StatusCode::kTimeout) return py::none();
  const SessionEvent event = ValueOrThrow(host, std::move(*awaited));
  const FailureDetail& detail = event.cause.detail();
  py::dict fields;
  fields["event"] = EventName(event.kind);
  fields["number"] = event.number;
  fields["missed"] = event.missed;
  fields["generation"] = event.generation;
  fields["time"] = event.unix_s;
  fields["code"] = event.cause.ok() ? "" : std::string(CodeName(event.cause.code()));
  fields["text"] = event.cause.ok() ? "" : event.cause.ToString();
  fields["rank"] = detail.rank;
  fields["host"] = detail.host;
  fields["pid"] = detail.pid;
  return fields;
}

// The first cause as an exception object, or None when there is none within `seconds`.
py::object FailureObject(const PythonHost& host, SessionContext& context, double seconds) {
  Status failure;
  {
    const py::gil_scoped_release unlocked;
    const Deadline deadline = Deadline::After(context.clock().Now(), FromSeconds(seconds));
    failure = context.session().AwaitFailure(deadline);
  }
  if (failure.ok()) return py::none();
  PyObject* exception = host.MakeException(failure);
  if (exception == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(exception);
}

void Rebuild(PythonHost& host, SessionContext& context, std::optional<double> budget, int min_world,
             std::optional<double> seat_wait) {
  const auto duration = [](std::optional<double> seconds) {
    return seconds ? std::optional(FromSeconds(*seconds)) : std::nullopt;
  };
  const py::gil_scoped_release unlocked;
  Check(host, context.Rebuild(duration(budget), min_world, duration(seat_wait)));
}

using LinkProtection = std::pair<bool, bool>;  // Checksums, encryption.
// Paths of NCCL and of the CUDA runtime.
using CudaLibraries = std::pair<std::string, std::string>;
// How long an awaited rank may make no progress, and its device.
using Stalls = std::pair<double, double>;
using PresenceStrings = std::pair<std::string, std::string>;

void SetTimes(double op_deadline, double wait_log, const Stalls& stalls, SessionOptions* options) {
  options->op_deadline = FromSeconds(op_deadline);
  options->wait_log = FromSeconds(wait_log);
  options->stall = FromSeconds(stalls.first);
  options->device_stall = FromSeconds(stalls.second);
}

void DefineInit(py::class_<SessionContext, ContextPtr>& session,
                const std::shared_ptr<PythonHost>& host) {
  session.def(
      py::init([host](std::vector<std::string> addresses, std::string job, int rank, int world_size,
                      double init_timeout, double budget, double seat_wait, int min_world,
                      bool spare_if_taken, std::uint64_t launcher_attempt, bool supervised,
                      bool host_watch, std::string expected_server, bool hosts_store,
                      std::string bind_address, std::string token_file, const TlsTuple& tls,
                      std::string socket_ifname, int socket_streams, std::size_t shm_limit,
                      LinkProtection links, bool hierarchical_order, CudaLibraries cuda_libraries,
                      SharedGpu shared_gpu, int eager_device, bool auto_heal, bool replay,
                      bool strict_timeouts, double op_deadline, double wait_log,
                      const Stalls& stalls, PresenceStrings presence, std::string reconfigure_scope,
                      std::chrono::milliseconds timeout, std::optional<DeviceClaim> device,
                      const c10::intrusive_ptr<BackendOptions>& nccl) {
        ContextOptions options;
        options.connect.addresses = std::move(addresses);
        options.connect.job = std::move(job);
        options.connect.launcher_attempt = launcher_attempt;
        options.connect.supervised = supervised;
        options.connect.expected_server = std::move(expected_server);
        options.connect.hosts_store = hosts_store;
        options.connect.token_file = std::move(token_file);
        options.connect.tls = ToTlsFiles(tls);
        options.session.rank = rank;
        options.session.world_size = world_size;
        options.session.init_timeout = FromSeconds(init_timeout);
        options.session.budget = FromSeconds(budget);
        options.session.seat_wait = FromSeconds(seat_wait);
        options.session.min_world = min_world;
        options.session.spare_if_taken = spare_if_taken;
        options.session.host_watch = host_watch;
        options.session.device = std::move(device);
        if (nccl) options.session.nccl = nccl->nccl;
        options.bind_address = std::move(bind_address);
        options.socket_ifname = std::move(socket_ifname);
        options.socket_streams = socket_streams;
        options.shm_limit = shm_limit;
        std::tie(options.checksums, options.encrypted_links) = links;
        options.hierarchical_order = hierarchical_order;
        std::tie(options.cuda.nccl_library, options.cuda.cuda_runtime) = std::move(cuda_libraries);
        options.cuda.shared_gpu = shared_gpu;
        options.cuda.eager_device = eager_device;
        options.auto_heal = auto_heal;
        options.time.strict = strict_timeouts;
        SetTimes(op_deadline, wait_log, stalls, &options.session);
        options.session.replay = replay;
        std::tie(options.session.presence_job, options.session.presence_init) = std::move(presence);
        options.reconfigure_scope = std::move(reconfigure_scope);
        options.time.world_timeout = timeout;
        const py::gil_scoped_release unlocked;
        return ValueOrThrow(*host, SessionContext::Open(std::move(options), host));
      }),
      py::kw_only(), py::arg("addresses"), py::arg("job"), py::arg("rank"), py::arg("world_size"),
      py::arg("init_timeout"), py::arg("budget"), py::arg("seat_wait"), py::arg("min_world") = 0,
      py::arg("spare_if_taken") = false, py::arg("launcher_attempt") = 0,
      py::arg("supervised") = false, py::arg("host_watch") = true, py::arg("expected_server") = "",
      py::arg("hosts_store") = false, py::arg("bind_address") = "127.0.0.1",
      py::arg("token_file") = "", py::arg("tls") = TlsTuple(), py::arg("socket_ifname") = "",
      py::arg("socket_streams") = CpuFabricOptions().streams,
      py::arg("shm_limit") = CpuFabricOptions().shm_limit,
      py::arg("link_protection") = LinkProtection(), py::arg("hierarchical_order") = false,
      py::arg("cuda_libraries") = CudaLibraries(), py::arg("shared_gpu") = SharedGpu::kRefused,
      py::arg("eager_device") = kHost, py::arg("auto_heal") = false, py::arg("replay") = false,
      py::arg("strict_timeouts") = false, py::arg("op_deadline") = 120.0,
      py::arg("wait_log") = 30.0, py::arg("stalls") = Stalls(3600, 600),
      py::arg("presence") = PresenceStrings(), py::arg("reconfigure_scope") = "",
      py::arg("timeout") = kTorchDefaultTimeout, py::arg("device") = py::none(),
      py::arg("nccl") = py::none());
}

void AnnounceEnd(SessionContext& self, const std::string& why, double timeout) {
  const auto patience =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(timeout));
  self.session().AnnounceEnd(why, Deadline::After(self.clock().Now(), patience));
}

bool AwaitHooks(double seconds) {
  const auto patience =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  return AwaitAbortHooks(Deadline::After(SystemClock().Now(), patience));
}

template <auto kGet>
py::dict MembershipObject(SessionContext& context) {
  Membership membership;
  {
    const py::gil_scoped_release unlocked;
    membership = (context.session().*kGet)();
  }
  return ToDict(membership);
}

py::bytes WorldSecret(SessionContext& context) {
  std::string secret;
  {
    const py::gil_scoped_release unlocked;
    secret = context.session().acknowledged().world_secret;
  }
  return {secret};
}

void DefineEnd(py::module_& m) {
  m.def("exit_begins", &ExitBegins);
  m.def("await_abort_hooks", &AwaitHooks, py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void RegisterSession(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  DefineEnd(m);
  py::class_<SessionContext, ContextPtr> session(m, "Session");
  DefineInit(session, host);
  session
      .def("init",
           [host](SessionContext& self) {
             const py::gil_scoped_release unlocked;
             Check(*host, self.Init());
           })
      .def(
          "store",
          [host](const ContextPtr& self, std::chrono::milliseconds timeout) {
            return ValueOrThrow(*host, ResilientStore::OfSession(self, timeout));
          },
          py::arg("timeout"))
      .def("membership", &MembershipObject<&Session::membership>)
      .def("acknowledged", &MembershipObject<&Session::acknowledged>)
      .def("world_secret", &WorldSecret)
      .def(
          "epoch", [](SessionContext& self) { return self.session().epoch(); },
          py::call_guard<py::gil_scoped_release>())
      .def("failure", [host](SessionContext& self) { return FailureObject(*host, self, 0); })
      .def("await_joined",
           [host](SessionContext& self) {
             const py::gil_scoped_release unlocked;
             Check(*host, AwaitJoined(self));
           })
      .def(
          "await_failure",
          [host](SessionContext& self, double timeout) {
            return FailureObject(*host, self, timeout);
          },
          py::arg("timeout"))
      .def("last_incident",
           [](SessionContext& self) {
             std::optional<Incident> incident;
             {
               const py::gil_scoped_release unlocked;
               incident = self.session().last_incident();
             }
             return ToObject(incident);
           })
      .def(
          "await_event",
          [host](SessionContext& self, std::uint64_t after, double timeout) {
            return EventObject(*host, self, after, timeout);
          },
          py::arg("after"), py::arg("timeout"))
      .def(
          "rebuild",
          [host](SessionContext& self, std::optional<double> budget, int min_world,
                 std::optional<double> seat_wait) {
            Rebuild(*host, self, budget, min_world, seat_wait);
          },
          py::arg("budget") = py::none(), py::arg("min_world") = 0,
          py::arg("seat_wait") = py::none())
      .def(
          "offer_room",
          [host](SessionContext& self, int max_world, std::uint64_t commit) {
            const py::gil_scoped_release unlocked;
            Check(*host, self.session().OfferRoom(max_world, commit));
          },
          py::arg("max_world"), py::arg("commit"))
      .def("announce_end", &AnnounceEnd, py::arg("why"), py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("close", &SessionContext::Close, py::call_guard<py::gil_scoped_release>())
      .def("in_forked_child", [](SessionContext& self) { return self.session().InForkedChild(); });
}

}  // namespace resilient::plugin
