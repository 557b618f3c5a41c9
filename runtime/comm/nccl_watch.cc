#include "runtime/comm/nccl_watch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/checksum.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

constexpr std::size_t kNumbers = 17;
constexpr std::size_t kNumberBytes = sizeof(std::uint64_t);
static_assert(kNumbers * kNumberBytes + kMessageHeaderBytes + kMaxCallSite <= kProgressBytes);

std::uint64_t Add(std::uint64_t sum, std::uint64_t number) {
  const std::array numbers = {sum, number};
  return ChecksumOf(std::as_bytes(std::span(numbers)));
}

// Of what every rank knows alike where all are in one operation. Never 0.
std::uint64_t SumOf(std::uint64_t before, const Operation& op) {
  std::uint64_t sum = Add(before, static_cast<std::uint64_t>(op.kind));
  sum = Add(sum, static_cast<std::uint64_t>(op.dtype));
  sum = Add(sum, static_cast<std::uint64_t>(op.reduce));
  sum = Add(sum, static_cast<std::uint64_t>(op.root) + 1);
  sum = Add(sum, std::bit_cast<std::uint64_t>(op.factor));
  sum = Add(sum, op.one_block ? 1 : 0);
  if (HasOneCount(op.kind)) sum = Add(sum, op.count);
  const bool parts_alike = op.kind == OpKind::kAllGather || op.kind == OpKind::kReduceScatter;
  if (parts_alike) {
    for (const Part& part : op.kind == OpKind::kAllGather ? op.outputs : op.inputs)
      sum = Add(sum, part.count);
  }
  return sum == 0 ? 1 : sum;
}

}  // namespace

std::string EncodeProgress(const NcclProgress& progress) {
  const std::uint64_t numbers[kNumbers] = {progress.asks ? 1u : 0u,
                                           progress.submitted,
                                           progress.entered,
                                           progress.ended,
                                           progress.sum,
                                           progress.about,
                                           progress.about_sum,
                                           progress.sends,
                                           progress.recvs,
                                           progress.sends_given,
                                           progress.recvs_given,
                                           progress.failed_attempt,
                                           progress.replay,
                                           progress.replay_of.sends.first,
                                           progress.replay_of.sends.last,
                                           progress.replay_of.recvs.first,
                                           progress.replay_of.recvs.last};
  std::string bytes(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  bytes += EncodeMessage(progress.head);
  bytes.resize(kProgressBytes, '\0');
  return bytes;
}

std::optional<NcclProgress> DecodeProgress(std::string_view bytes) {
  if (bytes.size() != kProgressBytes) return std::nullopt;
  std::uint64_t numbers[kNumbers];
  std::memcpy(numbers, bytes.data(), sizeof(numbers));
  bytes.remove_prefix(sizeof(numbers));
  Result<MessageHeader> head = DecodeMessage(bytes.substr(0, kMessageHeaderBytes));
  if (!head.ok() || head->call_site_bytes > kMaxCallSite) return std::nullopt;
  head->call_site = bytes.substr(kMessageHeaderBytes, head->call_site_bytes);
  return NcclProgress{
      .asks = numbers[0] != 0,
      .submitted = numbers[1],
      .entered = numbers[2],
      .ended = numbers[3],
      .sum = numbers[4],
      .about = numbers[5],
      .about_sum = numbers[6],
      .sends = numbers[7],
      .recvs = numbers[8],
      .sends_given = numbers[9],
      .recvs_given = numbers[10],
      .replay = numbers[12],
      .replay_of = {.sends = {numbers[13], numbers[14]}, .recvs = {numbers[15], numbers[16]}},
      .failed_attempt = numbers[11],
      .head = std::move(head).value()};
}

NcclWatch::NcclWatch(const GroupSpec& spec) : spec_(spec) {}

void NcclWatch::OnSubmitted(const Operation& op, std::uint64_t seq) {
  if (op.kind == OpKind::kSend) {
    ++messages_[op.peer].sends_given;
  } else if (op.kind == OpKind::kRecv) {
    ++messages_[op.peer].recvs_given;
  } else {
    submitted_ = seq;
  }
}

std::uint64_t NcclWatch::OnEntered(const Operation& op, std::uint64_t seq) {
  if (op.kind == OpKind::kSend) return ++messages_[op.peer].sends;
  if (op.kind == OpKind::kRecv) return ++messages_[op.peer].recvs;
  sums_[seq % kSumsMax] = SumOf(sums_[entered_ % kSumsMax], op);
  entered_ = seq;
  return seq;
}

std::optional<std::uint64_t> NcclWatch::SumAt(std::uint64_t collective) const {
  const bool kept = collective > 0 && collective <= entered_ && entered_ - collective < kSumsMax;
  return kept ? std::optional(sums_[collective % kSumsMax]) : std::nullopt;
}

NcclProgress NcclWatch::Tell(int peer, const Operation* head, std::uint64_t seq,
                             const ReplayPlace* replay) const {
  NcclProgress told;
  told.submitted = submitted_;
  told.entered = entered_;
  told.ended = ended_;
  told.sum = SumAt(ended_).value_or(0);
  if (const auto messages = messages_.find(peer); messages != messages_.end()) {
    told.sends = messages->second.sends;
    told.recvs = messages->second.recvs;
    told.sends_given = messages->second.sends_given;
    told.recvs_given = messages->second.recvs_given;
  }
  if (const auto heard = heard_.find(peer); heard != heard_.end()) {
    told.about = heard->second.head.seq;
    told.about_sum = SumAt(told.about).value_or(0);
  }
  if (replay != nullptr) {
    told.replay = replay->collective;
    if (const auto here = replay->messages.find(peer); here != replay->messages.end())
      told.replay_of = here->second;
  }
  if (head != nullptr && !IsPointToPoint(head->kind)) told.head = HeaderOf(*head, seq);
  return told;
}

Status NcclWatch::Hear(int peer, NcclProgress progress, const Operation* head, std::uint64_t seq) {
  NcclProgress& told = heard_[peer] = std::move(progress);
  const bool waits = head != nullptr && !IsPointToPoint(head->kind);
  if (waits && told.head.seq == seq) {
    const MessageHeader own = HeaderOf(*head, seq);
    if (!SameCollective(told.head, own)) return CollectiveMismatch(spec_, peer, told.head, own);
  }
  const bool about_own = waits && told.about == seq && told.about_sum != 0;
  if (about_own && told.about_sum != SumAt(seq).value_or(0)) return Different(peer, seq);
  return CompareWith(peer, told);
}

Status NcclWatch::Compare() {
  for (auto& [peer, told] : heard_) RESILIENT_RETURN_IF_ERROR(CompareWith(peer, told));
  return Status::Ok();
}

Status NcclWatch::CompareWith(int peer, NcclProgress& told) const {
  const auto own = SumAt(told.ended);
  if (!own || told.sum == 0) return Status::Ok();
  const std::uint64_t theirs = std::exchange(told.sum, 0);  // Compared once.
  return theirs == *own ? Status::Ok() : Different(peer, told.ended);
}

Status NcclWatch::Different(int peer, std::uint64_t collective) const {
  const GroupMember& own = spec_.members[static_cast<std::size_t>(spec_.rank)];
  const GroupMember& other = spec_.members[static_cast<std::size_t>(peer)];
  return Status(
      StatusCode::kMismatch,
      StrCat(
          NameOf(own), " and ", NameOf(other), " have run different collectives in group '",
          spec_.name, "', generation ", spec_.generation, ": at #", collective,
          " or before it their kinds, types, sizes, roots or reductions differ, and what came of "
          "it is not to be used; compare torch_resilient.status() of both ranks, or set "
          "NCCL_DEBUG=INFO, and let all ranks run the same collectives in the same order"),
      DetailOf(spec_, peer, collective));
}

std::vector<int> NcclWatch::Missing(const Operation& op, std::uint64_t number, Stage stage) const {
  const bool begun = stage == Stage::kBegun;
  std::vector<int> missing;
  for (int rank = 0; rank < static_cast<int>(spec_.members.size()); ++rank) {
    if (rank == spec_.rank || (IsPointToPoint(op.kind) && rank != op.peer)) continue;
    std::uint64_t reached = 0;
    if (const auto heard = heard_.find(rank); heard != heard_.end()) {
      const NcclProgress& told = heard->second;
      reached = op.kind == OpKind::kSend   ? (begun ? told.recvs : told.recvs_given)
                : op.kind == OpKind::kRecv ? (begun ? told.sends : told.sends_given)
                                           : (begun ? told.entered : told.submitted);
    }
    if (reached < number) missing.push_back(rank);
  }
  return missing;
}

std::vector<int> NcclWatch::NotBegun(const Operation& op, std::uint64_t number) const {
  const std::vector<int> late = Missing(op, number, Stage::kSubmitted);
  std::vector<int> ranks = Missing(op, number, Stage::kBegun);
  std::erase_if(ranks,
                [&late](int rank) { return std::binary_search(late.begin(), late.end(), rank); });
  return ranks;
}

void NcclWatch::OnReplay() {
  for (auto& [peer, told] : heard_) {
    told.replay = 0;
    told.replay_of = {};
  }
}

std::vector<int> NcclWatch::NotInReplay(const ReplayPlace& place) const {
  std::vector<int> missing;
  for (int rank = 0; rank < static_cast<int>(spec_.members.size()); ++rank) {
    if (rank == spec_.rank) continue;
    const auto heard = heard_.find(rank);
    const NcclProgress told = heard == heard_.end() ? NcclProgress{} : heard->second;
    bool inside = place.collective == 0 || told.replay == place.collective;
    if (const auto here = place.messages.find(rank); here != place.messages.end()) {
      const auto& [sends, recvs] = here->second;
      inside = inside && (sends.last == 0 || sends.Meets(told.replay_of.recvs)) &&
               (recvs.last == 0 || recvs.Meets(told.replay_of.sends));
    }
    if (!inside) missing.push_back(rank);
  }
  return missing;
}

bool NcclWatch::GoneBefore(int peer, const Operation& op, std::uint64_t number) const {
  if (IsPointToPoint(op.kind))
    return peer == op.peer && !Missing(op, number, Stage::kBegun).empty();
  const auto heard = heard_.find(peer);
  return heard == heard_.end() || heard->second.ended < number;
}

bool NcclWatch::HasAllOfOurs(int peer) const {
  const auto heard = heard_.find(peer);
  const NcclProgress told = heard == heard_.end() ? NcclProgress{} : heard->second;
  const auto messages = messages_.find(peer);
  return told.ended >= ended_ &&
         (messages == messages_.end() || told.recvs >= messages->second.sends);
}

GroupProgress NcclWatch::Progress(const std::vector<const Operation*>& waiting) const {
  GroupProgress progress;
  progress.group = spec_.name;
  progress.entered = submitted_;
  for (const auto& [peer, messages] : messages_) {
    const auto open = std::count_if(waiting.begin(), waiting.end(), [peer = peer](const auto* op) {
      return op->kind == OpKind::kRecv && op->peer == peer;
    });
    const auto heard = heard_.find(peer);
    const std::uint64_t begun_there = heard == heard_.end() ? 0 : heard->second.sends_given;
    progress.peers.push_back(
        {.rank = spec_.members[static_cast<std::size_t>(peer)].global_rank,
         .sent = messages.sends_given,
         .received = messages.recvs - std::min<std::uint64_t>(messages.recvs, open),
         .unclaimed = begun_there > messages.recvs_given,
         .sends_on_device = messages.sends,
         .recvs_given = messages.recvs_given,
         .recvs_on_device = messages.recvs});
  }
  return progress;
}

}  // namespace resilient
