#pragma once

#include <cstddef>
#include <optional>

#include "runtime/comm/schedule.h"
#include "runtime/comm/shm_stream.h"
#include "runtime/comm/wire.h"

namespace resilient {

// How much of a group's limit of shared memory the links may take that one rank offers. Every rank
// of a host has the same share of what the segment of the collectives leaves; links between ranks
// of different hosts are TCP, and so is what finds too little left.
// Pure. Owner: a group. Thread: loop-confined.
class ShmAllowance {
 public:
  // More gains little. Links of collectives have two rings, and are there whether used or not.
  static constexpr std::size_t kBestRingBytes = 1u << 20;
  static constexpr std::size_t kBestCollectiveRingBytes = 512u << 10;
  static constexpr std::size_t kLeastRingBytes = 128u << 10;  // With less, TCP is as fast.

  // Of `rank`. `limit`: bytes of the whole group on one host. `layout` outlives this.
  ShmAllowance(const HostLayout& layout, int rank, std::size_t limit);

  // Takes what a link is worth that this rank offers to `peer`; nullopt: TCP.
  std::optional<ShmStreamGeometry> Take(int peer, Lane lane);

 private:
  const HostLayout& layout_;
  const int rank_;
  std::size_t peers_here_ = 0;  // On this rank's host.
  // Bytes for the links of one lane.
  struct Pool {
    std::size_t all = 0;
    std::size_t left = 0;
  };
  Pool collective_;
  Pool point_to_point_;
};

}  // namespace resilient
