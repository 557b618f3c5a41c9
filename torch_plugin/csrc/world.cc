#include "torch_plugin/csrc/world.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include <resilient/settings.h>
#include <resilient/store/locate.h>
#include <resilient/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/launch.h"
#include "torch_plugin/csrc/native_ending.h"

namespace resilient {
namespace plugin {

Result<std::shared_ptr<SessionContext>> ContextOf(const c10::intrusive_ptr<c10d::Store>& store) {
  c10d::Store* innermost = store.get();
  c10::intrusive_ptr<c10d::Store> unwrapped;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(innermost)) {
    unwrapped = prefixed->getUnderlyingNonPrefixStore();
    innermost = unwrapped.get();
  }
  const auto* ours = dynamic_cast<ResilientStore*>(innermost);
  if (ours != nullptr && ours->context() != nullptr) return ours->context();
  return Status(StatusCode::kFailedPrecondition,
                "this group was given a store that belongs to no session; start the world with "
                "init_process_group(backend=\"resilient\"), and make further groups with "
                "new_group()");
}

std::shared_ptr<Session> SharedSession(const std::shared_ptr<SessionContext>& context) {
  return std::shared_ptr<Session>(context, &context->session());
}

Result<std::shared_ptr<SessionContext>> ContextOf(const ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store =
      group ? group->getStore() : c10::intrusive_ptr<c10d::Store>();
  if (store) return ContextOf(store);
  return Status(StatusCode::kFailedPrecondition,
                "this group belongs to no session: make it with resilient::init_process_group()");
}

namespace {

Status CheckSize(const char* name, const char* which, int size) {
  if (size < 0) {
    return Status(StatusCode::kSetting, c10::str(name, " is ", size, ": it is the ", which,
                                                 " number of ranks to go on with, 0 when the ",
                                                 "world may not be resized like that"));
  }
  return Status::Ok();
}

// By this resilient-run knows who is no spare any more, and of how many seats the world is. Under
// Python its package does it, and has taken the name from the environment.
void TellOfSeat(std::size_t world_size) {
  for (const auto& [name, path] : ProcessEnvironment()) {
    if (name == "RESILIENT_SEATED") std::ofstream{path} << world_size;
  }
}

// Ours of its backends; null: none.
c10::intrusive_ptr<ResilientBackend> BackendOf(const ProcessGroup& group) {
  if (!group) return {};
  for (const c10::Device& device : group->getDeviceTypes()) {
    auto ours =
        c10::dynamic_intrusive_pointer_cast<ResilientBackend>(group->getBackend(device.type()));
    if (ours) return ours;
  }
  return {};
}

// A group like `before`, with `renewed` for what `former` serves there.
ProcessGroup WorldLike(const ProcessGroup& before, const ResilientBackend& former,
                       const c10::intrusive_ptr<ResilientBackend>& renewed) {
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  auto world = c10::make_intrusive<c10d::ProcessGroup>(before->getStore(), renewed->getRank(),
                                                       renewed->getSize());
  world->setBoundDeviceId(before->getBoundDeviceId());
  for (const c10::Device& device : before->getDeviceTypes()) {
    if (before->getBackend(device.type()).get() != &former) continue;
    world->setBackend(device.type(), custom, renewed);
  }
  world->setDefaultBackend(custom);
  world->setGroupName(before->getGroupName());
  world->setGroupDesc(before->getGroupDesc());
  return world;
}

}  // namespace

Status CheckMinWorld(int min_world) { return CheckSize("min_world", "least", min_world); }
Status CheckMaxWorld(int max_world) { return CheckSize("max_world", "largest", max_world); }

ProcessGroup PresentWorld(ProcessGroup world) {
  while (const auto backend = BackendOf(world)) {
    ProcessGroup next = backend->given_way_to();
    if (!next) break;
    world = std::move(next);
  }
  return world;
}

ProcessGroup FollowWorld(const ProcessGroup& world, bool in_place) {
  ProcessGroup present = PresentWorld(world);
  const auto backend = BackendOf(present);
  if (!backend || backend->IsPresent()) return present;
  if (in_place && ResilientBackend::kCanFollow) {
    backend->FollowGroup();
    // Whether the group reads its backend's numbers is seen in what it says.
    const bool follows =
        present->getRank() == backend->getRank() && present->getSize() == backend->getSize();
    if (follows) return present;
  }
  return backend->GiveWay(
      [&](const auto& renewed) { return WorldLike(present, *backend, renewed); });
}

Status RebuildWorld(const ProcessGroup& world, std::optional<Duration> budget, int min_world,
                    std::optional<Duration> seat_wait) {
  RESILIENT_RETURN_IF_ERROR(CheckMinWorld(min_world));
  const auto context = ContextOf(world);
  if (!context.ok()) return context.status();
  RESILIENT_RETURN_IF_ERROR((*context)->Rebuild(budget, min_world, seat_wait));
  FollowWorld(world);
  TellOfSeat((*context)->session().membership().members.size());
  return Status::Ok();
}

namespace {

std::string TagOf(int rank) {
  return rank == kSpareRank ? std::string("spare") : c10::str("rank ", rank);
}

void PrintWarnings(const Settings& settings) {
  for (const std::string& warning : settings.warnings) {
    // The program's thread, before there is a session. tidy: allow(blocking-write)
    std::fprintf(stderr, "[resilient] warning: %s\n", warning.c_str());
  }
}

ContextOptions MakeOptions(const InitOptions& init, const Settings& settings,
                           const Launch& launch) {
  ContextOptions options;
  options.connect.addresses = launch.store;
  options.connect.job = launch.job;
  options.connect.launcher_attempt = launch.attempt;
  options.connect.supervised = settings.supervised;
  options.connect.token_file = settings.token_file;
  options.connect.tls = settings.tls;
  options.session.rank = launch.rank;
  options.session.world_size = launch.world_size;
  options.session.budget = settings.budget;
  options.session.seat_wait = settings.seat_wait;
  options.session.spare_if_taken = settings.spares > 0 || settings.replaces;
  options.session.wait_log = settings.wait_log;
  options.session.stall = settings.stall;
  options.session.device_stall = settings.device_stall;
  options.session.op_deadline = settings.op_deadline;
  options.session.host_watch = settings.host_watch;
  options.session.device = init.device;
  options.session.nccl = init.nccl;
  options.session.replay = settings.replay;
  options.socket_ifname = settings.socket_ifname;
  options.socket_streams = settings.socket_streams;
  options.shm_limit = settings.shm_limit;
  options.checksums = settings.checksums;
  options.encrypted_links = settings.encrypted_links;
  options.hierarchical_order = settings.hierarchical_order;
  options.cuda.nccl_library = settings.nccl_library;
  options.cuda.cuda_runtime = settings.cuda_runtime;
  options.cuda.shared_gpu = settings.shared_gpu;
  options.auto_heal = settings.auto_heal;
  options.time.strict = settings.strict_timeouts;
  options.time.world_timeout = init.timeout;
  return options;
}

// One try to open and join a world, whose store is found or started first.
Result<std::shared_ptr<SessionContext>> Join(ContextOptions options, const Settings& settings,
                                             const Launch& launch,
                                             const std::shared_ptr<Host>& host, const Clock& clock,
                                             Deadline deadline) {
  if (!launch.store_given) {
    const store::LocateOptions locate{.connect = options.connect,
                                      .rank = launch.process,
                                      .bind = settings.bind,
                                      .linger = settings.linger};
    const auto located = store::FindOrStart(
        locate, [&] { return host->Interrupted(); }, clock, deadline);
    if (!located.ok()) return located.status();
    options.connect.expected_server = located->server_id;
    options.connect.hosts_store = located->spawned;
  }
  const auto own = store::AddressTowards(
      options.connect.addresses.front(), [&] { return host->Interrupted(); }, clock, deadline);
  if (!own.ok()) return own.status();
  options.bind_address = *own;
  options.session.init_timeout =
      std::max(deadline.LeftAt(clock.Now()), Duration(std::chrono::milliseconds(1)));
  auto context = SessionContext::Open(std::move(options), host);
  if (!context.ok()) return context;
  if (const Status joined = (*context)->Init(); !joined.ok()) {
    (*context)->Close();
    return joined;
  }
  return context;
}

// A store that was found may be ending, because its host has just left the world before: then the
// one of the next world is looked for. JOB: another server has the address by now.
Result<std::shared_ptr<SessionContext>> JoinWorld(const InitOptions& init, const Settings& settings,
                                                  const Launch& launch,
                                                  const std::shared_ptr<Host>& host) {
  const SystemClock clock;
  const Deadline deadline = Deadline::After(clock.Now(), plugin::Saturated(init.timeout));
  while (true) {
    auto context =
        Join(MakeOptions(init, settings, launch), settings, launch, host, clock, deadline);
    const StatusCode code = context.status().code();
    const bool ending = code == StatusCode::kStoreLost || code == StatusCode::kJob;
    if (launch.store_given || !ending || deadline.ExpiredAt(clock.Now())) return context;
  }
}

}  // namespace
}  // namespace plugin

ProcessGroup init_process_group(const InitOptions& options) {
  const std::shared_ptr<plugin::Host> host = plugin::NativeHost();
  const auto environment = ProcessEnvironment();
  const Settings settings = plugin::ValueOrThrow(*host, ParseSettings(environment));
  plugin::PrintWarnings(settings);
  const plugin::Launch launch =
      plugin::ValueOrThrow(*host, plugin::PlanLaunch(options, settings, environment));
  plugin::Check(*host, ConfigureLog(settings.log, plugin::TagOf(launch.rank)));
  const auto context =
      plugin::ValueOrThrow(*host, plugin::JoinWorld(options, settings, launch, host));
  plugin::WatchEnding(context);
  const c10::intrusive_ptr<c10d::Store> store =
      plugin::ValueOrThrow(*host, plugin::ResilientStore::OfSession(context, options.timeout));
  const Membership place = context->session().membership();  // A spare has its rank by now.
  plugin::TellOfSeat(place.members.size());
  const auto size = static_cast<int>(place.members.size());
  SetLogTag(plugin::TagOf(place.rank));
  const auto backend = plugin::ValueOrThrow(
      *host, plugin::ResilientBackend::Create(context, "0", place.rank, size, {}, options.timeout));
  ProcessGroup group = c10::make_intrusive<c10d::ProcessGroup>(store, place.rank, size);
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::DeviceType::CPU, custom, backend);
  group->setBackend(c10::DeviceType::CUDA, custom, backend);
  group->setDefaultBackend(custom);
  group->setGroupName("0");
  return group;
}

void destroy_process_group(const ProcessGroup& world) {
  plugin::ValueOrThrow(*plugin::NativeHost(), plugin::ContextOf(world))->Close();
}

std::shared_ptr<Session> session_of(const ProcessGroup& group) {
  return plugin::SharedSession(
      plugin::ValueOrThrow(*plugin::NativeHost(), plugin::ContextOf(group)));
}

ProcessGroup present_world(const ProcessGroup& world) { return plugin::PresentWorld(world); }

Membership rebuild(const ProcessGroup& world, std::optional<Duration> budget, int min_world,
                   std::optional<Duration> seat_wait) {
  const std::shared_ptr<plugin::Host> host = plugin::NativeHost();
  plugin::Check(*host, plugin::RebuildWorld(world, budget, min_world, seat_wait));
  return session_of(world)->membership();
}

}  // namespace resilient
