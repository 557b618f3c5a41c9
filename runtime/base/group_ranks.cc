#include <resilient/group_ranks.h>

#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

// FNV-1a over four bytes a rank, which says the order too.
std::uint64_t DigestOf(std::span<const int> ranks) {
  constexpr std::uint64_t kBasis = 0xcbf29ce484222325u;
  constexpr std::uint64_t kPrime = 0x100000001b3u;
  std::uint64_t digest = kBasis;
  for (const int rank : ranks) {
    auto bits = static_cast<std::uint32_t>(rank);
    for (int byte = 0; byte < 4; ++byte, bits >>= 8) digest = (digest ^ (bits & 0xff)) * kPrime;
  }
  return digest == 0 ? kBasis : digest;
}

// How many of the ranks from `at` on count up by one.
std::size_t RunAt(std::span<const int> ranks, std::size_t at) {
  std::size_t length = 1;
  while (at + length < ranks.size() && ranks[at + length] == ranks[at] + static_cast<int>(length))
    ++length;
  return length;
}

std::string TextOf(std::span<const int> ranks) {
  constexpr std::size_t kShortestRun = 3;
  std::string text;
  for (std::size_t at = 0; at < ranks.size();) {
    const std::size_t run = RunAt(ranks, at);
    const std::size_t taken = run < kShortestRun ? 1 : run;
    std::string part = StrCat(at == 0 ? "" : ",", ranks[at]);
    if (taken > 1) part += StrCat("-", ranks[at + taken - 1]);
    const std::string rest = StrCat(",... (", ranks.size(), " ranks)");
    if (text.size() + part.size() + rest.size() > kRanksTextMax) return text + rest;
    text += part;
    at += taken;
  }
  return text;
}

}  // namespace

GroupRanks RanksOfGroup(std::span<const int> ranks, std::string made_at) {
  if (made_at.size() > kMadeAtMax) made_at.resize(kMadeAtMax);
  return {.digest = DigestOf(ranks), .text = TextOf(ranks), .made_at = std::move(made_at)};
}

}  // namespace resilient
