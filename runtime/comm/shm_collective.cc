#include "runtime/comm/shm_collective.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/comm/checksum.h"
#include "runtime/comm/mismatch.h"

namespace resilient {
namespace {

constexpr std::size_t kLine = 64;

// What a rank has entered, at the front of its slot in the first round.
struct Head {
  OpKind kind = OpKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  ReduceOp reduce = ReduceOp::kNone;
  std::uint8_t call_site_bytes = 0;
  std::int32_t root = -1;
  std::uint64_t seq = 0;
  std::uint64_t count = 0;  // Must be equal where HasOneCount.
  double factor = 1.0;
  std::array<char, kMaxCallSite> call_site;
};
constexpr std::size_t kHeadBytes = 192;
static_assert(sizeof(Head) <= kHeadBytes && kHeadBytes % kLine == 0);

const Head& HeadAt(const std::byte* slot) { return *reinterpret_cast<const Head*>(slot); }

MessageHeader HeaderOf(const Head& head) {
  MessageHeader header;
  header.kind = head.kind;
  header.dtype = head.dtype;
  header.reduce = head.reduce;
  header.root = head.root;
  header.seq = head.seq;
  header.count = head.count;
  header.factor = head.factor;
  header.call_site.assign(head.call_site.data(),
                          std::min<std::size_t>(head.call_site_bytes, kMaxCallSite));
  return header;
}

// Behind the head where each pair of ranks has a count of its own: what a rank sends to each rank,
// then what it expects of each.
const std::uint64_t* Counts(const std::byte* slot) {
  return reinterpret_cast<const std::uint64_t*>(slot + kHeadBytes);
}

std::uint64_t SentTo(const Operation& op, int peer) {
  if (!op.inputs.empty()) return op.inputs[static_cast<std::size_t>(peer)].count;
  const bool sends =
      op.kind == OpKind::kAllGather || (op.kind == OpKind::kGather && peer == op.root);
  return sends ? op.count : 0;
}

std::uint64_t ExpectedFrom(const Operation& op, int peer) {
  if (!op.outputs.empty()) return op.outputs[static_cast<std::size_t>(peer)].count;
  if (op.kind == OpKind::kReduceScatter) return op.count;
  return op.kind == OpKind::kScatter && peer == op.root ? op.count : 0;
}

}  // namespace

ShmCollective::ShmCollective(const Operation& op, std::uint64_t seq, const GroupSpec& spec,
                             ShmBoard& board)
    : op_(op), seq_(seq), spec_(spec), board_(board), element_(SizeOf(op.dtype)) {
  const auto n = static_cast<std::size_t>(board.size());
  const std::size_t counts = HasOneCount(op.kind) ? 0 : 2 * n * sizeof(std::uint64_t);
  sums_offset_ = kHeadBytes + counts;
  data_offset_ = (sums_offset_ + n * sizeof(std::uint64_t) + kLine - 1) / kLine * kLine;
  capacity_ = (board.slot_bytes() - data_offset_) / kLine * kLine;
  region_ = capacity_ / n / kLine * kLine;
  RESILIENT_CHECK(region_ > 0);
}

ShmCollective::Progress ShmCollective::Advance() {
  if (!published_) {
    if (round_ == 0) WriteHead(board_.NextSlot());
    Write(round_);
    board_.Publish();
    published_ = true;
    return Progress::kMoved;
  }
  if (board_.FirstMissing() >= 0) return Progress::kWaiting;
  if (round_ == 0) {
    if (!CompareHeads() || (!HasOneCount(op_.kind) && !ComparePairs())) return Progress::kFailed;
    rounds_ = std::max<std::uint64_t>(1, RoundsFor(LongestPart()));
  }
  Read(round_);
  if (!failure_.ok()) return Progress::kFailed;
  published_ = false;
  return ++round_ == rounds_ ? Progress::kDone : Progress::kMoved;
}

void ShmCollective::WriteHead(std::byte* slot) const {
  Head& head = *reinterpret_cast<Head*>(slot);
  head.kind = op_.kind;
  head.dtype = op_.dtype;
  head.reduce = op_.reduce;
  head.root = op_.root;
  head.seq = seq_;
  head.count = op_.count;
  head.factor = op_.factor;
  head.call_site_bytes = static_cast<std::uint8_t>(op_.call_site.size());
  std::memcpy(head.call_site.data(), op_.call_site.data(), op_.call_site.size());
  if (HasOneCount(op_.kind)) return;
  auto* counts = reinterpret_cast<std::uint64_t*>(slot + kHeadBytes);
  for (int peer = 0; peer < size(); ++peer) {
    counts[peer] = SentTo(op_, peer);
    counts[size() + peer] = ExpectedFrom(op_, peer);
  }
}

bool ShmCollective::CompareHeads() {
  const Head& own = HeadAt(board_.Slot(rank(), step()));
  for (int peer = 0; peer < size(); ++peer) {
    const Head& head = HeadAt(board_.Slot(peer, step()));
    if (head.seq == own.seq && SameCollective(head, own)) {
      // What it writes later may come to lie where its head is.
      if (board_.HasChecksums(peer)) call_sites_.resize(static_cast<std::size_t>(size()));
      if (!call_sites_.empty())
        call_sites_[static_cast<std::size_t>(peer)] = HeaderOf(head).call_site;
      continue;
    }
    failure_ = CollectiveMismatch(spec_, peer, HeaderOf(head), HeaderOf(own));
    return false;
  }
  return true;
}

bool ShmCollective::ComparePairs() {
  for (int from = 0; from < size(); ++from) {
    const std::byte* sender = board_.Slot(from, step());
    for (int to = 0; to < size(); ++to) {
      const std::byte* receiver = board_.Slot(to, step());
      const std::uint64_t sent = Counts(sender)[to];
      const std::uint64_t expected = Counts(receiver)[size() + from];
      if (sent == expected) continue;
      MessageHeader theirs = HeaderOf(HeadAt(sender));
      MessageHeader ours = HeaderOf(HeadAt(receiver));
      theirs.count = sent;
      ours.count = expected;
      failure_ = PartMismatch(spec_, from, theirs, to, ours);
      return false;
    }
  }
  return true;
}

void ShmCollective::Put(std::uint64_t step, int region, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  // Of where it comes from: the copy is part of the way.
  if (board_.HasChecksums(rank())) SumOf(rank(), step, region) = ChecksumOf({from, bytes});
  std::memcpy(Region(rank(), step, region), from, bytes);
}

const std::byte* ShmCollective::Get(int rank, std::uint64_t step, int region, std::size_t bytes) {
  const std::byte* data = Region(rank, step, region);
  if (bytes > 0 && board_.HasChecksums(rank) &&
      SumOf(rank, step, region) != ChecksumOf({data, bytes}))
    OnDamage(rank, bytes);
  return data;
}

void ShmCollective::OnDamage(int rank, std::size_t bytes) {
  if (!failure_.ok()) return;
  MessageHeader sent = HeaderOf(op_, seq_);
  sent.payload_bytes = bytes;
  if (!call_sites_.empty()) sent.call_site = call_sites_[static_cast<std::size_t>(rank)];
  failure_ = DamagedPayload(spec_, rank, sent, op_.call_site);
}

std::size_t ShmCollective::LongestPart() const {
  if (HasOneCount(op_.kind)) return op_.count * element_;
  std::uint64_t longest = 0;
  for (int from = 0; from < size(); ++from) {
    const std::uint64_t* counts = Counts(board_.Slot(from, step()));
    longest = std::max(longest, *std::max_element(counts, counts + size()));
  }
  return longest * element_;
}

}  // namespace resilient
