#include <memory>
#include <string>
#include <utility>

#include <resilient/settings.h>
#include <resilient/transports.h>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/comm/eager_limit.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/fabric.h"
#include "runtime/comm/fabric_loop.h"
#include "runtime/comm/link_encryption.h"
#include "runtime/comm/step_observer.h"
#include "runtime/net/interfaces.h"

namespace resilient {
namespace {

constexpr int kListenBacklog = 1024;

Result<std::unique_ptr<CommunicatorFactory>> Make(CpuFabricOptions options, const Clock& clock,
                                                  CommunicatorEvents& events, StepObserver observer,
                                                  std::size_t eager_limit) {
  if (options.streams < 1 || options.streams > kMaxSocketStreams) {
    return Status(StatusCode::kSetting, StrCat(options.streams,
                                               " connections a link are not "
                                               "possible: RESILIENT_SOCKET_STREAMS is 1 to ",
                                               kMaxSocketStreams));
  }
  if (!options.interfaces.empty()) {
    const Result<std::vector<InterfaceAddress>> present = ListInterfaceAddresses();
    if (!present.ok()) return present.status();
    Result<std::string> chosen = ChooseInterfaceAddress(options.interfaces, *present);
    if (!chosen.ok()) return chosen.status();
    options.bind_address = std::move(*chosen);
  }
  Result<FileDescriptor> listener =
      ListenTcp({.host = options.bind_address, .port = 0}, kListenBacklog);
  if (!listener) {
    return Status(
        StatusCode::kUnreachable,
        StrCat("cannot listen on ", options.bind_address, ": ", listener.status().message(),
               "; RESILIENT_SOCKET_IFNAME names the interface to use"));
  }
  const Result<HostPort> address = LocalAddress(*listener);
  if (!address) return address.status();
  std::unique_ptr<LinkEncryption> encryption;
  if (options.encrypted) {
    Result<std::unique_ptr<LinkEncryption>> loaded = LinkEncryption::Load();
    if (!loaded.ok()) return loaded.status();
    encryption = std::move(*loaded);
  }
  auto requests = std::make_unique<FabricRequests>();
  auto loop =
      std::make_unique<FabricLoop>(std::move(*listener), *requests, clock, events, RandomSeed(),
                                   options, eager_limit, std::move(encryption));
  return MakeFabric(
      {.endpoint = EncodeEndpoint({.address = FormatHostPort(*address),
                                   .hierarchical = options.hierarchical,
                                   .streams = options.streams,
                                   .encrypted = options.encrypted,
                                   .host_id = options.shm_limit > 0 ? ShmHostId() : std::string()}),
       .thread_name = std::move(options.name),
       .requests = std::move(requests),
       .loop = std::move(loop),
       .admission = nullptr,
       .observer = std::move(observer)},
      clock);
}

}  // namespace

Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabric(CpuFabricOptions options,
                                                           const Clock& clock,
                                                           CommunicatorEvents& events) {
  return Make(std::move(options), clock, events, nullptr, kEagerLimitBytes);
}

Result<std::unique_ptr<CommunicatorFactory>> MakeObservedCpuFabric(CpuFabricOptions options,
                                                                   const Clock& clock,
                                                                   CommunicatorEvents& events,
                                                                   StepObserver observer) {
  return Make(std::move(options), clock, events, std::move(observer), kEagerLimitBytes);
}

Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabricWithEagerLimit(CpuFabricOptions options,
                                                                         const Clock& clock,
                                                                         CommunicatorEvents& events,
                                                                         std::size_t eager_limit) {
  return Make(std::move(options), clock, events, nullptr, eager_limit);
}

}  // namespace resilient
