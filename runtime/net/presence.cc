#include "runtime/net/presence.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "runtime/base/log.h"
#include "runtime/net/socket.h"
#include "runtime/net/unix_address.h"

namespace resilient {

namespace {

enum class Holder : std::uint8_t { kNobody, kThisUser, kUnknown };

// Who has which of a job's names. The owners are asked for once, when the first name is found
// bound. Owner: one call of PresentRanks. Thread: caller-synchronised.
class NameBook {
 public:
  NameBook(std::string job, const FindNameOwners& find_owners)
      : job_(std::move(job)),
        find_owners_(find_owners),
        socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {}

  // Another user who has it is nobody.
  Holder HolderOf(const std::string& name) {
    const auto address = UnixAddress::Abstract(name);
    if (!address || ::connect(socket_.get(), address->get(), address->size()) != 0) {
      return Holder::kNobody;
    }
    if (!owners_) owners_ = find_owners_(SOCK_DGRAM, job_ + "/");
    const auto owner = owners_->find(name);
    if (owner == owners_->end()) return Holder::kUnknown;
    return owner->second == geteuid() ? Holder::kThisUser : Holder::kNobody;
  }
  bool IsHeld(const std::string& name) { return HolderOf(name) != Holder::kNobody; }

 private:
  const std::string job_;
  const FindNameOwners& find_owners_;
  const FileDescriptor socket_;
  std::optional<NameOwners> owners_;
};

}  // namespace

RanksOnHost PresentRanks(const PresenceNames& names, int world_size, int self,
                         const FindNameOwners& find_owners) {
  RanksOnHost ranks;
  NameBook book(names.job, find_owners);
  for (int rank = 0; rank < std::min(world_size, kPresenceRanksMax); ++rank) {
    if (rank == self) continue;
    const std::string name = StrCat(names.job, "/", rank);
    const Holder holder = book.HolderOf(name);
    if (holder == Holder::kNobody) continue;
    const std::string in_this = StrCat(name, "/", names.init, "/");
    const bool in_another = book.IsHeld(name + "/init") && !book.IsHeld(StrCat(in_this, rank)) &&
                            !book.IsHeld(in_this + "any");
    if (in_another) continue;
    (holder == Holder::kThisUser ? ranks.present : ranks.unverified).push_back(rank);
  }
  return ranks;
}

}  // namespace resilient
