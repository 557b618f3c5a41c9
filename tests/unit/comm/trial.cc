#include "tests/unit/comm/trial.h"

#include <algorithm>

#include "runtime/base/log.h"
#include "runtime/comm/reduce.h"

namespace resilient::testing {
namespace {

constexpr std::byte kUntouched{0xee};

std::size_t RandomCount(std::size_t limit, Random& random) {
  switch (random.Below(4)) {
    case 0:
      return random.Below(4) % (limit + 1);
    case 1:
      return random.Below(std::min<std::size_t>(limit, 2000) + 1);
    default:
      return random.Below(limit + 1);
  }
}

bool Same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

void SetCounts(Call& call, int size, std::size_t count) {
  const auto n = static_cast<std::size_t>(size);
  call.counts.assign(n, std::vector<std::size_t>(n, count));
}

void SetRandomCounts(Call& call, int size, std::size_t limit, Random& random) {
  SetCounts(call, size, HasOneCount(call.kind) ? RandomCount(limit, random) : 0);
  if (HasOneCount(call.kind)) return;
  const bool even = call.one_block || random.Below(3) == 0;
  const std::size_t everywhere = RandomCount(limit, random);
  const auto n = static_cast<std::size_t>(size);
  const bool by_sender = call.kind == OpKind::kAllGather || call.kind == OpKind::kGather;
  const bool by_receiver = call.kind == OpKind::kScatter || call.kind == OpKind::kReduceScatter;
  for (std::size_t a = 0; a < n; ++a) {
    const std::size_t of_rank = even ? everywhere : RandomCount(limit, random);
    for (std::size_t b = 0; b < n; ++b) {
      if (by_sender) {
        call.counts[a][b] = of_rank;
      } else if (by_receiver) {
        call.counts[b][a] = of_rank;
      } else {
        call.counts[a][b] = even ? everywhere : RandomCount(limit, random);
      }
    }
  }
}

Call RandomCall(int size, std::size_t limit, Random& random) {
  Call call;
  call.kind = kCollectives[random.Below(std::size(kCollectives))];
  do {
    call.dtype = kTypes[random.Below(std::size(kTypes))];
    if (Reduces(call.kind)) call.reduce = kReduceOps[random.Below(std::size(kReduceOps))];
  } while (Reduces(call.kind) && !CanReduce(call.dtype, call.reduce));
  if (call.reduce == ReduceOp::kPremulSum) call.factor = 2.0;
  if (HasRoot(call.kind))
    call.root = static_cast<int>(random.Below(static_cast<std::uint64_t>(size)));
  call.in_place = random.Below(2) == 0;
  call.one_block = (call.kind == OpKind::kAllGather || call.kind == OpKind::kReduceScatter) &&
                   random.Below(2) == 0;
  SetRandomCounts(call, size, limit, random);
  return call;
}

void Trial::Pieces::Add(const Bytes& piece, bool to_block) {
  if (memory_.empty() || !to_block) memory_.emplace_back();
  Bytes& memory = memory_.back();
  places_.push_back({.in = memory_.size() - 1, .offset = memory.size(), .size = piece.size()});
  memory.insert(memory.end(), piece.begin(), piece.end());
}

std::span<std::byte> Trial::Pieces::At(std::size_t piece) {
  const Place& place = places_[piece];
  return std::span(memory_[place.in]).subspan(place.offset, place.size);
}

std::span<const std::byte> Trial::Pieces::At(std::size_t piece) const {
  const Place& place = places_[piece];
  return std::span(memory_[place.in]).subspan(place.offset, place.size);
}

Trial::Trial(const Call& call, Random& random) : call_(call) {
  std::vector<std::vector<Bytes>> sent;  // See ExpectedOutputs.
  for (int rank = 0; rank < call_.size(); ++rank) sent.push_back(MakeMemory(rank, random));
  now_ = before_;
  expected_ = ExpectedOutputs(call_, sent);
}

bool Trial::HasInputs(int rank) const {
  return call_.kind == OpKind::kReduceScatter || call_.kind == OpKind::kAllToAll ||
         (call_.kind == OpKind::kScatter && rank == call_.root);
}

bool Trial::HasOutputs(int rank) const {
  return call_.kind == OpKind::kAllGather || call_.kind == OpKind::kAllToAll ||
         (call_.kind == OpKind::kGather && rank == call_.root);
}

bool Trial::DataIsOutput(int rank) const {
  return call_.kind == OpKind::kAllReduce || call_.kind == OpKind::kBroadcast ||
         call_.kind == OpKind::kScatter || call_.kind == OpKind::kReduceScatter ||
         (call_.kind == OpKind::kReduce && rank == call_.root);
}

std::vector<Bytes> Trial::MakeMemory(int rank, Random& random) {
  const auto me = static_cast<std::size_t>(rank);
  Memory& memory = before_.emplace_back();
  if (call_.kind != OpKind::kBarrier && call_.kind != OpKind::kAllToAll)
    memory.data = RandomElements(call_.dtype, call_.reduce, call_.Count(rank, rank), random);
  if (call_.kind == OpKind::kScatter)
    memory.data.assign(call_.Count(call_.root, rank) * SizeOf(call_.dtype), kUntouched);
  std::vector<Bytes> sent(call_.counts.size(), memory.data);
  for (std::size_t peer = 0; peer < sent.size(); ++peer) {
    if (HasInputs(rank)) {
      const std::size_t count = call_.Count(rank, static_cast<int>(peer));
      sent[peer] = RandomElements(call_.dtype, call_.reduce, count, random);
      memory.inputs.Add(sent[peer], call_.one_block);
    }
    if (!HasOutputs(rank)) continue;
    Bytes output(call_.Count(static_cast<int>(peer), rank) * SizeOf(call_.dtype), kUntouched);
    // The input lies where the own part of the output belongs; see At for the rest.
    if (call_.in_place && peer == me) output = sent[me];
    memory.outputs.Add(output, call_.one_block);
  }
  return sent;
}

Operation Trial::At(int rank) {
  const auto me = static_cast<std::size_t>(rank);
  Memory& memory = now_[me];
  Operation op;
  op.kind = call_.kind;
  op.dtype = call_.dtype;
  op.reduce = call_.reduce;
  op.factor = call_.factor;
  op.root = call_.root;
  op.one_block = call_.one_block;
  op.data = memory.data.data();
  op.count = memory.data.size() / SizeOf(call_.dtype);
  const auto parts = [&](Pieces& all) {
    std::vector<Part> result;
    for (std::size_t i = 0; i < all.size(); ++i)
      result.push_back({.data = all.At(i).data(), .count = all.At(i).size() / SizeOf(call_.dtype)});
    return result;
  };
  op.inputs = parts(memory.inputs);
  op.outputs = parts(memory.outputs);
  if (!call_.in_place) return op;
  if (HasInputs(rank) && HasOutputs(rank)) {
    op.inputs[me] = op.outputs[me];
  } else if (HasInputs(rank)) {
    op.data = op.inputs[me].data;
  } else if (HasOutputs(rank)) {
    op.data = op.outputs[me].data;
  }
  return op;
}

std::vector<std::span<const std::byte>> Trial::Outputs(int rank) const {
  const auto me = static_cast<std::size_t>(rank);
  const Memory& memory = now_[me];
  std::vector<std::span<const std::byte>> result;
  if (HasOutputs(rank)) {
    for (std::size_t i = 0; i < memory.outputs.size(); ++i) result.push_back(memory.outputs.At(i));
  } else if (DataIsOutput(rank)) {
    const bool in_input = call_.in_place && HasInputs(rank);
    result.emplace_back(in_input ? memory.inputs.At(me) : std::span(memory.data));
  }
  return result;
}

std::string Trial::WhatIsWrong(int rank) const {
  const std::string written = WhatWasWritten(rank);
  if (!written.empty()) return written;
  const std::vector<std::span<const std::byte>> got = Outputs(rank);
  const std::vector<Bytes>& expected = expected_[static_cast<std::size_t>(rank)];
  if (got.size() != expected.size())
    return StrCat(Describe(call_), ": ", got.size(), " outputs where ", expected.size(),
                  " are expected");
  for (std::size_t part = 0; part < got.size(); ++part) {
    if (Same(got[part], expected[part])) continue;
    std::size_t at = 0;
    while (at < std::min(got[part].size(), expected[part].size()) &&
           got[part][at] == expected[part][at])
      ++at;
    return StrCat(Describe(call_), ": on rank ", rank, " output ", part, " of ", got.size(),
                  " differs at element ", at / SizeOf(call_.dtype), " of ",
                  expected[part].size() / SizeOf(call_.dtype));
  }
  return "";
}

std::string Trial::WhatWasWritten(int rank) const {
  const auto me = static_cast<std::size_t>(rank);
  const std::vector<std::span<const std::byte>> outputs = Outputs(rank);
  const auto wrong = [&](std::span<const std::byte> now, std::span<const std::byte> before) {
    const bool output = std::any_of(outputs.begin(), outputs.end(),
                                    [&](const auto& one) { return one.data() == now.data(); });
    return !output && !Same(now, before);
  };
  const std::string where = StrCat(Describe(call_), ": on rank ", rank, " ");
  if (wrong(now_[me].data, before_[me].data)) return where + "memory that is only read was written";
  for (std::size_t part = 0; part < now_[me].inputs.size(); ++part) {
    if (wrong(now_[me].inputs.At(part), before_[me].inputs.At(part)))
      return StrCat(where, "input ", part, " was written");
  }
  return "";
}

}  // namespace resilient::testing
