#include "tests/support/fake_nccl_world.h"

#include <cstring>
#include <vector>

#include "runtime/base/log.h"
#include "tests/support/fake_nccl_reduce.h"

namespace resilient::testing {
namespace {

std::size_t BytesOf(const NcclCall& call) { return call.count * SizeOf(call.type); }

}  // namespace

std::size_t BytesGiven(const NcclCall& call, int rank, int ranks) {
  if (call.kind == NcclCallKind::kRecv) return 0;
  if (call.kind == NcclCallKind::kBroadcast && call.peer != rank) return 0;
  const bool parts = call.kind == NcclCallKind::kReduceScatter;
  return BytesOf(call) * static_cast<std::size_t>(parts ? ranks : 1);
}

std::size_t BytesTaken(const NcclCall& call, int rank, int ranks) {
  if (call.kind == NcclCallKind::kSend) return 0;
  if (call.kind == NcclCallKind::kReduce && call.peer != rank) return 0;
  const bool parts = call.kind == NcclCallKind::kAllGather;
  return BytesOf(call) * static_cast<std::size_t>(parts ? ranks : 1);
}

void NcclWorld::Join(int ranks, int rank) {
  if (ranks_ == 0) ranks_ = ranks;
  if (ranks_ != ranks || !joined_.insert(rank).second)
    on_misuse_("two different groups by one unique id");
}

PostedCallPtr NcclWorld::Post(int rank, const NcclCall& call) {
  auto posted = std::make_shared<PostedCall>(PostedCall{.rank = rank, .call = call});
  if (call.kind == NcclCallKind::kSend) {
    Channel& channel = channels_[{rank, call.peer}];
    channel.sends.push_back(posted);
    Match(channel);
  } else if (call.kind == NcclCallKind::kRecv) {
    Channel& channel = channels_[{call.peer, rank}];
    channel.recvs.push_back(posted);
    Match(channel);
  } else {
    const std::uint64_t number = collectives_[rank]++;
    Meeting& meeting = meetings_[number];
    meeting[rank] = posted;
    if (meeting.size() == static_cast<std::size_t>(ranks_)) {
      Meet(meeting);
      meetings_.erase(number);
    }
  }
  return posted;
}

void NcclWorld::Match(Channel& channel) {
  while (!channel.sends.empty() && !channel.recvs.empty()) {
    PostedCall& send = *channel.sends.front();
    PostedCall& recv = *channel.recvs.front();
    if (send.broken || recv.broken) return;
    const std::size_t bytes = BytesOf(send.call);
    const std::size_t room = BytesOf(recv.call);
    if (bytes != room) {
      on_misuse_(StrCat("rank ", send.rank, " sends ", bytes, " bytes to rank ", send.call.peer,
                        ", which receives ", room));
      send.broken = recv.broken = true;
      return;
    }
    if (bytes > 0) std::memmove(recv.call.to, send.call.from, bytes);
    send.done = recv.done = true;
    channel.sends.pop_front();
    channel.recvs.pop_front();
  }
}

bool NcclWorld::AreAlike(const Meeting& meeting) {
  const NcclCall& first = meeting.begin()->second->call;
  for (const auto& [rank, posted] : meeting) {
    const NcclCall& call = posted->call;
    if (posted->broken) return false;  // Its rank has been told already.
    if (call.kind == first.kind && call.count == first.count && call.type == first.type &&
        call.op == first.op && call.factor == first.factor && call.peer == first.peer)
      continue;
    on_misuse_(StrCat("rank ", rank, " is in another collective than rank ", meeting.begin()->first,
                      ": of ", call.count, " elements and of ", first.count));
    return false;
  }
  return true;
}

void NcclWorld::Meet(const Meeting& meeting) {
  if (!AreAlike(meeting)) {
    for (const auto& [rank, posted] : meeting) posted->broken = true;
    return;
  }
  const NcclCall& first = meeting.begin()->second->call;
  const std::size_t bytes = BytesOf(first);
  std::vector<const std::byte*> inputs;
  inputs.reserve(meeting.size());
  for (const auto& [rank, posted] : meeting)
    inputs.push_back(static_cast<const std::byte*>(posted->call.from));
  const auto reduced = [&] {
    return ReduceAsNccl(first.type, first.op, first.factor, inputs, first.count);
  };
  std::vector<std::byte> everything;  // One for all ranks, or one behind the other.
  if (first.kind == NcclCallKind::kBroadcast) {
    const std::byte* from = inputs[static_cast<std::size_t>(first.peer)];
    everything.assign(from, from + bytes);
  } else if (first.kind == NcclCallKind::kAllGather) {
    for (const std::byte* from : inputs) everything.insert(everything.end(), from, from + bytes);
  } else if (first.kind == NcclCallKind::kReduceScatter) {
    for (std::size_t rank = 0; rank < meeting.size(); ++rank) {
      const std::vector<std::byte> part = reduced();
      everything.insert(everything.end(), part.begin(), part.end());
      for (const std::byte*& from : inputs) from += bytes;
    }
  } else {
    everything = reduced();
  }
  for (const auto& [rank, posted] : meeting) {
    posted->done = true;
    const std::size_t taken = BytesTaken(first, rank, ranks_);
    const bool parts = first.kind == NcclCallKind::kReduceScatter;
    const std::size_t at = parts ? static_cast<std::size_t>(rank) * bytes : 0;
    if (taken > 0) std::memcpy(posted->call.to, everything.data() + at, taken);
  }
}

}  // namespace resilient::testing
