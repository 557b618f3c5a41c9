#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include <resilient/rendezvous.h>
#include <resilient/store/announcement.h>
#include <resilient/store/client.h>

#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/python/durations.h"
#include "torch_plugin/csrc/python/module.h"
#include "torch_plugin/csrc/python/tls_files.h"

namespace resilient::plugin {
namespace {

namespace py = pybind11;

constexpr Duration kGoodbye = std::chrono::seconds(1);

// A membership line without a seat: the lease that holds a key. Its thread ("res-control") never
// enters Python. Owner: its Python object. Thread: thread-safe.
class Presence final : private RendezvousEvents {
 public:
  Presence(const store::ConnectOptions& options, const std::shared_ptr<PythonHost>& host)
      : line_(store::MakeRendezvous(
            options, [host] { return host->Interrupted(); }, clock_)) {}
  ~Presence() override { Close(); }

  Status Start(Duration at_most) {
    return line_->Start(*this, Deadline::After(clock_.Now(), at_most));
  }
  std::string lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  void Close() { line_->Close(Deadline::After(clock_.Now(), kGoodbye)); }

 private:
  void OnView(const View& /*view*/) override {}
  void OnRunning(std::uint64_t /*generation*/) override {}
  void OnFence(const Fence& /*fence*/) override {}
  void OnJoinRefused(std::uint64_t /*join*/, const Status& /*why*/) override {}
  void OnSessionLost(const Status& why) override {
    const std::lock_guard lock(mutex_);
    lost_ = why.ToString();
  }
  void OnHeld(Instant /*until*/) override {}

  const SystemClock clock_;
  mutable std::mutex mutex_;
  std::string lost_;  // Guarded by mutex_.
  const std::unique_ptr<Rendezvous> line_;
};

// A rank's announcement and its clock. Owner: its Python object. Thread: thread-safe.
class RankAnnouncement final {
 public:
  RankAnnouncement(store::ConnectOptions options, const store::AnnouncedRank& who)
      : announcement_(store::Announce(std::move(options), who, clock_)) {}
  void Close() { announcement_->Close(Deadline::After(clock_.Now(), kGoodbye)); }

 private:
  const SystemClock clock_;
  const std::unique_ptr<store::Announcement> announcement_;
};

}  // namespace

void RegisterPresence(py::module_& m, const std::shared_ptr<PythonHost>& host) {
  py::class_<Presence, std::shared_ptr<Presence>>(m, "Presence")
      .def(py::init([host](std::vector<std::string> addresses, std::string job, std::string key,
                           const py::bytes& value, double timeout, std::string token_file,
                           const TlsTuple& tls) {
             store::ConnectOptions options;
             options.addresses = std::move(addresses);
             options.job = std::move(job);
             options.leased_key = std::move(key);
             options.leased_value = std::string(value);
             options.token_file = std::move(token_file);
             options.tls = ToTlsFiles(tls);
             const py::gil_scoped_release unlocked;
             auto presence = std::make_shared<Presence>(options, host);
             Check(*host, presence->Start(FromSeconds(timeout)));
             return presence;
           }),
           py::arg("addresses"), py::arg("job"), py::arg("key"), py::arg("value"),
           py::arg("timeout"), py::arg("token_file") = "", py::arg("tls") = TlsTuple())
      .def_property_readonly("lost", &Presence::lost)
      .def("close", &Presence::Close, py::call_guard<py::gil_scoped_release>());
  py::class_<RankAnnouncement>(m, "Announcement")
      .def(py::init([](std::vector<std::string> addresses, std::string job, int rank,
                       int world_size, std::string token_file, const TlsTuple& tls) {
             store::ConnectOptions options;
             options.addresses = std::move(addresses);
             options.job = std::move(job);
             options.token_file = std::move(token_file);
             options.tls = ToTlsFiles(tls);
             return std::make_unique<RankAnnouncement>(
                 std::move(options), store::AnnouncedRank{.rank = rank, .world_size = world_size});
           }),
           py::arg("addresses"), py::arg("job"), py::arg("rank"), py::arg("world_size"),
           py::arg("token_file") = "", py::arg("tls") = TlsTuple())
      .def("close", &RankAnnouncement::Close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace resilient::plugin
