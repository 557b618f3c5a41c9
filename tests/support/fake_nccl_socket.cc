#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <resilient/clock.h>

#include "runtime/base/check.h"
#include "runtime/base/thread.h"
#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"
#include "tests/support/fake_nccl_hub.h"
#include "tests/support/fake_nccl_link.h"
#include "tests/support/fake_nccl_meeting.h"

namespace resilient::testing {
namespace {

// What a unique id holds.
struct HubAddress {
  char name[96] = {};
  std::uint64_t world = 0;
};
static_assert(sizeof(HubAddress) <= sizeof(NcclUniqueId));

FileDescriptor Connect(const std::string& name) {
  const auto address = UnixAddress::Abstract(name);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // At once, also where the hub's process stands still; or the hub is gone.
  if (!address || connect(socket.get(), address->get(), address->size()) != 0) return {};
  return socket;
}

// A rank's way to its hub; shared, as it may have to be flushed when its communicator is gone.
struct Membership {
  Membership(FileDescriptor socket, int rank_, int ranks_)
      : link(std::move(socket)), rank(rank_), ranks(ranks_) {}

  void Handle(const NcclMessage& message, const std::byte* payload) {
    complete = complete || message.type == NcclMessage::Type::kComplete;
    lost = lost || message.type == NcclMessage::Type::kLost;
    hub_left = hub_left || message.type == NcclMessage::Type::kHubLeft;
    if (message.type != NcclMessage::Type::kDone) return;
    const auto call = waiting.extract(message.ticket);
    if (call.empty()) return;  // Given up.
    call.mapped()->done = true;
    if (message.payload > 0) std::memcpy(call.mapped()->call.to, payload, message.payload);
  }

  NcclLink link;
  const int rank;
  const int ranks;
  bool complete = false;
  bool lost = false;
  bool hub_left = false;
  bool left = false;
  std::uint64_t tickets = 0;
  std::map<std::uint64_t, PostedCallPtr> waiting;  // By ticket.
};

class SocketMeetings final : public NcclMeetings {
 public:
  explicit SocketMeetings(NcclMeetingHost host) : host_(std::move(host)) {}
  ~SocketMeetings() override {
    {
      std::lock_guard lock(*host_.mutex);
      over_ = true;
    }
    wake_.Wake();
    if (thread_.Joinable()) thread_.Join();
  }

  NcclUniqueId NewId() override {
    if (hub_ == nullptr) hub_ = std::make_unique<NcclHub>(host_.on_misuse);
    HubAddress address{.world = hub_->NewWorld()};
    RESILIENT_CHECK(hub_->name().size() < sizeof(address.name));
    std::memcpy(address.name, hub_->name().c_str(), hub_->name().size());
    NcclUniqueId id;
    std::memcpy(id.bytes.data(), &address, sizeof(address));
    Attend();
    return id;
  }
  std::unique_ptr<NcclMeeting> Join(const NcclUniqueId& id, int ranks, int rank) override;
  // After a change of what is to be polled.
  void Attend() {
    // Not before it is needed: a process may be forked from one that has none.
    if (!thread_.Joinable()) thread_ = Thread("fake-nccl-hub", [this] { Run(); });
    wake_.Wake();
  }
  // Of a rank in the hub's process, which may end right away: the others are told before.
  void NoticeLeave() { hub_->Serve(); }
  bool IsFlushed(std::uint64_t world_of_hub) const { return hub_->IsFlushed(world_of_hub); }

 private:
  void Run() {
    const SystemClock clock;
    std::unique_lock lock(*host_.mutex);
    while (!over_) {
      std::vector<PollEntry> entries{{.fd = wake_.fd(), .events = POLLIN}};
      if (hub_ != nullptr) hub_->AddEntries(entries);
      for (const auto& membership : memberships_) entries.push_back(membership->link.entry());
      lock.unlock();
      PollUntil(entries, clock, Deadline::Never());
      wake_.Drain();
      lock.lock();
      if (hub_ != nullptr) hub_->Serve();
      for (const auto& membership : memberships_) {
        membership->link.Flush();
        membership->link.Receive([&](const NcclMessage& message, const std::byte* payload) {
          membership->Handle(message, payload);
        });
      }
      std::erase_if(memberships_, [](const auto& one) {
        return !one->link.is_open() || (one->left && one->link.is_flushed());
      });
      host_.changed->notify_all();
    }
  }

  const NcclMeetingHost host_;
  const WakeFd wake_;
  // Guarded by the lock of the fake.
  bool over_ = false;
  std::unique_ptr<NcclHub> hub_;
  std::list<std::shared_ptr<Membership>> memberships_;
  Thread thread_;
};

class SocketMeeting final : public NcclMeeting {
 public:
  // `world_of_hub`: 0 where the hub is another process's.
  SocketMeeting(SocketMeetings& meetings, std::shared_ptr<Membership> membership,
                std::uint64_t world_of_hub)
      : meetings_(meetings), membership_(std::move(membership)), world_of_hub_(world_of_hub) {}
  ~SocketMeeting() override {
    membership_->waiting.clear();
    membership_->link.Send({.type = NcclMessage::Type::kLeave});
    membership_->left = true;
    if (world_of_hub_ != 0) meetings_.NoticeLeave();
    meetings_.Attend();
  }

  bool IsComplete() const override { return membership_->complete; }
  // A hub that has gone after its own ranks had left is missed by who still waits for something.
  bool IsLost() const override {
    const bool may_go =
        membership_->hub_left && membership_->complete && membership_->waiting.empty();
    return membership_->lost || (!membership_->link.is_open() && !may_go);
  }
  bool IsFlushed() const override {
    return membership_->link.is_flushed() &&
           (world_of_hub_ == 0 || meetings_.IsFlushed(world_of_hub_));
  }
  PostedCallPtr Post(const NcclCall& call) override {
    Membership& to = *membership_;
    auto posted = std::make_shared<PostedCall>(PostedCall{.rank = to.rank, .call = call});
    const std::uint64_t ticket = ++to.tickets;
    to.waiting[ticket] = posted;
    const NcclMessage message{.type = NcclMessage::Type::kCall,
                              .ticket = ticket,
                              .kind = call.kind,
                              .data_type = call.type,
                              .op = call.op,
                              .peer = call.peer,
                              .multiplies = call.factor.has_value(),
                              .factor = call.factor.value_or(0),
                              .count = call.count,
                              .payload = BytesGiven(call, to.rank, to.ranks)};
    to.link.Send(message, call.from);
    meetings_.Attend();
    return posted;
  }
  void GiveUp(const PostedCallPtr& posted) override {
    for (auto at = membership_->waiting.begin(); at != membership_->waiting.end(); ++at) {
      if (at->second != posted) continue;
      membership_->link.Send({.type = NcclMessage::Type::kGiveUp, .ticket = at->first});
      membership_->waiting.erase(at);
      return meetings_.Attend();
    }
  }

 private:
  SocketMeetings& meetings_;
  const std::shared_ptr<Membership> membership_;
  const std::uint64_t world_of_hub_;
};

std::unique_ptr<NcclMeeting> SocketMeetings::Join(const NcclUniqueId& id, int ranks, int rank) {
  HubAddress address;
  std::memcpy(&address, id.bytes.data(), sizeof(address));
  const std::string name(address.name, strnlen(address.name, sizeof(address.name)));
  const bool of_hub = hub_ != nullptr && hub_->name() == name;
  auto membership = std::make_shared<Membership>(Connect(name), rank, ranks);
  membership->link.Send({.type = NcclMessage::Type::kJoin,
                         .rank = rank,
                         .ranks = ranks,
                         .of_hub = of_hub,
                         .world = address.world});
  memberships_.push_back(membership);
  Attend();
  return std::make_unique<SocketMeeting>(*this, std::move(membership), of_hub ? address.world : 0);
}

}  // namespace

std::unique_ptr<NcclMeetings> MakeSocketMeetings(NcclMeetingHost host) {
  return std::make_unique<SocketMeetings>(std::move(host));
}

}  // namespace resilient::testing
