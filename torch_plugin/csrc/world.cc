#include "torch_plugin/csrc/world.h"

#include <utility>

#include <resilient/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/convert.h"

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

}  // namespace plugin

World OpenWorld(const WorldOptions& options) {
  const std::shared_ptr<plugin::Host> host = plugin::NativeHost();
  plugin::ContextOptions context_options;
  context_options.connect.addresses = options.addresses;
  context_options.connect.job = options.job;
  context_options.connect.token_file = options.token_file;
  context_options.connect.tls = options.tls;
  context_options.connect.launcher_attempt = options.launcher_attempt;
  context_options.session.rank = options.rank;
  context_options.session.world_size = options.world_size;
  context_options.session.init_timeout = options.init_timeout;
  context_options.session.budget = options.budget;
  context_options.session.seat_wait = options.seat_wait;
  context_options.session.device = options.device;
  context_options.bind_address = options.bind_address;
  auto context =
      plugin::ValueOrThrow(*host, plugin::SessionContext::Open(std::move(context_options), host));
  plugin::Check(*host, context->Init());

  World world;
  world.session = plugin::SharedSession(context);
  world.store = plugin::ValueOrThrow(
      *host, plugin::ResilientStore::OfSession(context, options.store_timeout));
  const auto backend = plugin::ValueOrThrow(
      *host, plugin::ResilientBackend::Create(
                 context, "0", options.rank, options.world_size, {},
                 std::chrono::duration_cast<std::chrono::milliseconds>(options.init_timeout)));
  world.group =
      c10::make_intrusive<c10d::ProcessGroup>(world.store, options.rank, options.world_size);
  const auto custom = c10d::ProcessGroup::BackendType::CUSTOM;
  world.group->setBackend(c10::DeviceType::CPU, custom, backend);
  world.group->setBackend(c10::DeviceType::CUDA, custom, backend);
  world.group->setDefaultBackend(custom);
  world.group->setGroupName("0");
  return world;
}

}  // namespace resilient
