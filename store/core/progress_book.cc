#include "store/core/progress_book.h"

#include <algorithm>

namespace resilient::store {
namespace {

// Null: they have sent each other nothing.
const PeerProgress* With(const GroupProgress& progress, int rank) {
  const auto peer = std::find_if(progress.peers.begin(), progress.peers.end(),
                                 [rank](const PeerProgress& one) { return one.rank == rank; });
  return peer == progress.peers.end() ? nullptr : &*peer;
}

}  // namespace

void ProgressBook::Note(int rank, const std::vector<GroupProgress>& progress, Instant now) {
  for (const GroupProgress& one : progress) {
    Account& account = accounts_[rank][one.group];
    account.progress = one;
    account.given = now;
    account.entered = std::max(account.entered, one.entered);
    if (one.device) account.begun = std::max(account.begun, one.device->begun);
  }
}

void ProgressBook::NoteCalls(int rank, const std::vector<WaitingCall>& calls) {
  for (const WaitingCall& call : calls) {
    if (call.operation.point_to_point) continue;
    std::uint64_t& entered = accounts_[rank][call.group].entered;
    entered = std::max(entered, call.operation.seq);
  }
}

const ProgressBook::Account* ProgressBook::Find(int rank, const std::string& group) const {
  const auto groups = accounts_.find(rank);
  if (groups == accounts_.end()) return nullptr;
  const auto account = groups->second.find(group);
  return account == groups->second.end() ? nullptr : &account->second;
}

ProgressBook::Standing ProgressBook::Of(const Wait& wait, int peer, Instant since) const {
  if (wait.call.operation.point_to_point) return OfMessages(wait, peer, since);
  const std::uint64_t seq = wait.call.operation.seq;
  const Account* account = Find(peer, wait.call.group);
  if (account == nullptr || seq == 0) return Standing::kUnknown;  // 0: it has no number.
  const bool on_device = account->progress.device.has_value();
  if (on_device && account->entered >= seq && account->begun < seq) return Standing::kNotBegun;
  if (account->entered >= seq) return Standing::kEntered;
  const bool fresh = account->given && *account->given >= since;
  return fresh ? Standing::kNotEntered : Standing::kUnknown;
}

// Messages on devices are numbered at both ends. nullopt: it is none, or was not submitted there.
std::optional<ProgressBook::Standing> ProgressBook::OnDevice(const Account& account,
                                                             const PeerProgress* with_waiter,
                                                             const WaitingOperation& message) {
  if (!account.progress.device || message.number == 0 || with_waiter == nullptr)
    return std::nullopt;
  const std::uint64_t given = message.sends ? with_waiter->recvs_given : with_waiter->sent;
  const std::uint64_t begun =
      message.sends ? with_waiter->recvs_on_device : with_waiter->sends_on_device;
  if (begun >= message.number) return Standing::kEntered;
  return given >= message.number ? std::optional(Standing::kNotBegun) : std::nullopt;
}

ProgressBook::Device ProgressBook::DeviceOf(int rank, const std::string& group,
                                            Instant since) const {
  const Account* account = Find(rank, group);
  const bool known = account != nullptr && account->given && *account->given >= since &&
                     account->progress.device.has_value();
  return known ? Device{&*account->progress.device, *account->given} : Device{};
}

// A recv is missed by its sender when all messages that were ever sent are accounted for, by what
// the waiter had received when it waited already. A send is missed by its receiver when that one
// holds it back for want of a recv.
ProgressBook::Standing ProgressBook::OfMessages(const Wait& wait, int peer, Instant since) const {
  const Account* there = Find(peer, wait.call.group);
  const Account* here = Find(wait.rank, wait.call.group);
  if (there == nullptr || !there->given || *there->given < since) return Standing::kUnknown;
  if (!there->progress.exists) return Standing::kNotEntered;
  const PeerProgress* with_waiter = With(there->progress, wait.rank);
  if (const auto on_device = OnDevice(*there, with_waiter, wait.call.operation)) return *on_device;
  if (wait.call.operation.sends) {
    const bool held_back = with_waiter != nullptr && with_waiter->unclaimed;
    return held_back ? Standing::kNotEntered : Standing::kUnknown;
  }
  if (here == nullptr || !here->given) return Standing::kUnknown;
  if (*here->given < std::max(since, wait.begun)) return Standing::kUnknown;
  const PeerProgress* with_peer = With(here->progress, peer);
  const std::uint64_t sent = with_waiter == nullptr ? 0 : with_waiter->sent;
  const std::uint64_t received = with_peer == nullptr ? 0 : with_peer->received;
  return sent <= received ? Standing::kNotEntered : Standing::kEntered;
}

void ProgressBook::Forget(const std::set<int>& all_but) {
  std::erase_if(accounts_, [&](const auto& one) { return !all_but.contains(one.first); });
}

}  // namespace resilient::store
