#include "runtime/comm/reduce_stream.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"

namespace resilient {
namespace {

constexpr std::size_t kWindowBytes = 256u << 10;
// Combining less at a time costs more than it gains.
constexpr std::size_t kStepBytes = 16u << 10;

std::size_t TotalBytes(const ReduceStream::Plan& plan) {
  std::size_t count = 0;
  for (const ReduceStream::Piece& piece : plan.pieces) count += piece.count;
  return count * plan.element_bytes;
}

}  // namespace

std::size_t ReduceStream::WindowBytes(std::size_t bytes) {
  return std::min(kWindowBytes, (bytes + 15) / 16 * 16);
}

ReduceStream::ReduceStream(Plan plan, CollectiveHost& host, std::span<std::byte> windows)
    : plan_(std::move(plan)),
      host_(host),
      total_(TotalBytes(plan_)),
      ring_bytes_(WindowBytes(total_)) {
  for (std::size_t i = 0; i < plan_.ranks.size(); ++i)
    windows_.emplace_back(*this, windows.subspan(ring_bytes_ * i, ring_bytes_));
}

ReduceStream::Window& ReduceStream::WindowOf(int rank) {
  const auto found = std::find(plan_.ranks.begin(), plan_.ranks.end(), rank);
  RESILIENT_CHECK(found != plan_.ranks.end() && rank != plan_.own);
  return windows_[static_cast<std::size_t>(found - plan_.ranks.begin())];
}

PayloadSink* ReduceStream::SinkOf(int rank) { return &WindowOf(rank); }

void ReduceStream::OnMessage(int rank) {
  WindowOf(rank).OnMessage();
  Advance();
}

void ReduceStream::AddOwn(std::size_t count) {
  own_ready_ += count * plan_.element_bytes;
  Advance();
}

std::span<std::byte> ReduceStream::Window::Space() {
  const std::size_t end = std::min(owner_.combined_ + ring_.size(), owner_.total_);
  const std::size_t at = received_ % ring_.size();
  return ring_.subspan(at, std::min(end - received_, ring_.size() - at));
}

void ReduceStream::Window::Commit(std::size_t bytes) {
  received_ += bytes;
  owner_.Advance();
}

void ReduceStream::Advance() {
  std::size_t ready = own_ready_;
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    if (plan_.ranks[i] != plan_.own) ready = std::min(ready, windows_[i].received());
  }
  ready -= ready % plan_.element_bytes;
  const bool moves =
      ready > combined_ && ready - combined_ >= std::min(kStepBytes, own_ready_ - combined_);
  while (piece_ < plan_.pieces.size()) {
    if (piece_done_ == plan_.pieces[piece_].count * plan_.element_bytes) {
      if (!IsWhole(piece_)) break;
      piece_done_ = 0;
      plan_.on_piece(piece_++);
    } else if (moves && combined_ < ready) {
      CombineUpTo(ready);
    } else {
      break;
    }
  }
  for (const int rank : plan_.ranks) {
    if (moves && rank != plan_.own) host_.SpaceFreed(rank);
  }
}

bool ReduceStream::IsWhole(std::size_t piece) const {
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    if (plan_.ranks[i] != plan_.own && windows_[i].messages() <= piece) return false;
  }
  return true;
}

void ReduceStream::CombineUpTo(std::size_t ready) {
  const Piece& piece = plan_.pieces[piece_];
  const std::size_t piece_left = piece.count * plan_.element_bytes - piece_done_;
  const bool alone = plan_.ranks.size() == 1;
  const std::size_t until_wrap = alone ? piece_left : ring_bytes_ - combined_ % ring_bytes_;
  const std::size_t bytes = std::min({ready - combined_, piece_left, until_wrap});
  inputs_.clear();
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    inputs_.push_back(plan_.ranks[i] == plan_.own ? piece.own + piece_done_
                                                  : windows_[i].At(combined_));
  }
  const std::size_t count = bytes / plan_.element_bytes;
  const std::size_t done = piece_done_ / plan_.element_bytes;
  plan_.combine(inputs_, count, piece.out + done * plan_.out_element_bytes);
  combined_ += bytes;
  piece_done_ += bytes;
}

}  // namespace resilient
