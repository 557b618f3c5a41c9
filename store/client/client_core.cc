#include "store/client/client_core.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"

namespace resilient::store {
namespace {

constexpr Duration kBackoffBase = Millis(20);
constexpr Duration kBackoffCap = std::chrono::seconds(1);
constexpr int kBackoffDoublings = 6;  // 20 ms * 2^6 exceeds the cap.

}  // namespace

ClientCore::ClientCore(Hello hello) : hello_(std::move(hello)) {}

// Seq 0 belongs to the connection: Hello, Cancel and heartbeats are never sent again by number.
Request ClientCore::MakeHello() const {
  Request request;
  request.first_unacked = first_unacked();
  request.op = hello_;
  return request;
}

Result<const Request*> ClientCore::Submit(Op op, std::uint64_t scope, std::uint64_t generation) {
  if (open_.size() >= kInFlightPerSessionMax) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("this session has ", open_.size(), " requests in flight, the limit is ",
                         kInFlightPerSessionMax, "; wait for answers before sending more"));
  }
  const std::uint64_t seq = next_seq_++;
  Request& request = open_.try_emplace(open_.end(), seq)->second;
  request.seq = seq;
  request.first_unacked = first_unacked();
  request.generation = generation;
  request.scope = scope;
  request.op = std::move(op);
  return &request;
}

std::vector<Request> ClientCore::Unanswered() const {
  std::vector<Request> requests;
  requests.reserve(open_.size());
  for (const auto& [seq, request] : open_) {
    requests.push_back(request);
    requests.back().first_unacked = first_unacked();
  }
  return requests;
}

bool ClientCore::OnReply(const Reply& reply) { return open_.erase(reply.seq) == 1; }

std::uint64_t ClientCore::Renumber(std::uint64_t seq) {
  auto node = open_.extract(seq);
  RESILIENT_CHECK(!node.empty());
  node.key() = next_seq_++;
  node.mapped().seq = node.key();
  return open_.insert(std::move(node)).position->first;
}

void ClientCore::Forget(std::uint64_t seq) { open_.erase(seq); }

std::uint64_t ClientCore::first_unacked() const {
  return open_.empty() ? next_seq_ : open_.begin()->first;
}

Duration Backoff::Next() {
  Random random(seed_);
  seed_ = random.Next();
  Duration ceiling = std::min(kBackoffCap, kBackoffBase * (1 << tries_));
  tries_ = std::min(tries_ + 1, kBackoffDoublings);
  return Duration(
      static_cast<Duration::rep>(random.Below(static_cast<std::uint64_t>(ceiling.count()) + 1)));
}

}  // namespace resilient::store
