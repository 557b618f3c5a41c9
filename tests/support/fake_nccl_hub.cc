#include "tests/support/fake_nccl_hub.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "runtime/net/unix_address.h"

namespace resilient::testing {
namespace {

// More than any test has ranks: one that finds it full is lost.
constexpr int kBacklog = 1024;

NcclCall CallOf(const NcclMessage& message) {
  NcclCall call{.kind = message.kind,
                .count = message.count,
                .type = message.data_type,
                .op = message.op,
                .peer = message.peer};
  if (message.multiplies) call.factor = message.factor;
  return call;
}

}  // namespace

NcclHub::NcclHub(NcclWorld::OnMisuse on_misuse)
    : on_misuse_(std::move(on_misuse)),
      name_(StrCat("fake-nccl-", getpid(), "-", RandomHexId())),
      listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const auto address = UnixAddress::Abstract(name_);
  RESILIENT_CHECK(address && bind(listener_.get(), address->get(), address->size()) == 0);
  RESILIENT_CHECK(listen(listener_.get(), kBacklog) == 0);
}

void NcclHub::AddEntries(std::vector<PollEntry>& entries) const {
  entries.push_back({.fd = listener_.get(), .events = POLLIN});
  for (const Member& member : members_) entries.push_back(member.link.entry());
}

void NcclHub::Serve() {
  while (true) {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) break;
    members_.emplace_back(std::move(socket));
  }
  for (Member& member : members_) {
    member.link.Flush();
    member.link.Receive([&](const NcclMessage& message, const std::byte* payload) {
      Handle(member, message, payload);
    });
    if (member.link.is_open() || member.rank < 0 || member.left) continue;
    GiveUpAll(member);
    member.left = true;
    groups_.at(member.world).lost = true;
    Broadcast(member.world, NcclMessage::Type::kLost);
  }
  std::erase_if(members_, [](const Member& member) { return !member.link.is_open(); });
}

bool NcclHub::IsFlushed(std::uint64_t world) const {
  return std::all_of(members_.begin(), members_.end(), [&](const Member& member) {
    return member.world != world || member.link.is_flushed();
  });
}

void NcclHub::Handle(Member& member, const NcclMessage& message, const std::byte* payload) {
  switch (message.type) {
    case NcclMessage::Type::kJoin:
      return Join(member, message);
    case NcclMessage::Type::kCall:
      return Post(member, message, payload);
    case NcclMessage::Type::kGiveUp:
      if (const auto call = member.calls.extract(message.ticket); !call.empty())
        call.mapped().posted->broken = true;
      return;
    case NcclMessage::Type::kLeave:
      return Leave(member);
    case NcclMessage::Type::kComplete:
    case NcclMessage::Type::kDone:
    case NcclMessage::Type::kLost:
    case NcclMessage::Type::kHubLeft:
      break;
  }
  RESILIENT_CHECK(!"a message of the hub");
}

void NcclHub::Join(Member& member, const NcclMessage& message) {
  Group& group = groups_.try_emplace(message.world, on_misuse_).first->second;
  member.rank = message.rank;
  member.world = message.world;
  member.of_hub = message.of_hub;
  if (member.of_hub) ++group.ranks_of_hub;
  group.world.Join(message.ranks, message.rank);
  if (group.lost) member.link.Send({.type = NcclMessage::Type::kLost});
  if (group.world.complete()) Broadcast(member.world, NcclMessage::Type::kComplete);
}

void NcclHub::Post(Member& member, const NcclMessage& message, const std::byte* payload) {
  NcclWorld& world = groups_.at(member.world).world;
  OpenCall& open = member.calls[message.ticket];
  NcclCall call = CallOf(message);
  open.from.assign(payload, payload + message.payload);
  open.to.resize(BytesTaken(call, member.rank, world.ranks()));
  call.from = open.from.data();
  call.to = open.to.data();
  open.posted = world.Post(member.rank, call);
  FinishCalls(member.world);
}

void NcclHub::FinishCalls(std::uint64_t world) {
  for (Member& member : members_) {
    if (member.world != world) continue;
    for (auto& [ticket, call] : member.calls) {
      if (!call.posted->done) continue;
      const NcclMessage done{
          .type = NcclMessage::Type::kDone, .ticket = ticket, .payload = call.to.size()};
      member.link.Send(done, call.to.data());
    }
    std::erase_if(member.calls, [](const auto& call) { return call.second.posted->done; });
  }
}

void NcclHub::Leave(Member& member) {
  GiveUpAll(member);
  member.left = true;
  if (member.of_hub && --groups_.at(member.world).ranks_of_hub == 0)
    Broadcast(member.world, NcclMessage::Type::kHubLeft);
}

void NcclHub::Broadcast(std::uint64_t world, NcclMessage::Type type) {
  for (Member& member : members_) {
    if (member.world == world && !member.left) member.link.Send({.type = type});
  }
}

// Its memory goes with it.
void NcclHub::GiveUpAll(Member& member) {
  for (auto& [ticket, call] : member.calls) call.posted->broken = true;
  member.calls.clear();
}

}  // namespace resilient::testing
