#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <resilient/per_process.h>
#include <resilient/status.h>

#include "runtime/net/socket.h"

namespace resilient {

// How a segment of `ranks` ranks is divided: a control block for each rank, then kSlots slots of
// `slot_bytes` for each. Pure. Thread: value type.
struct ShmGeometry {
  static constexpr std::size_t kSlots = 4;
  static constexpr std::size_t kControlBytes = 256;  // Of one rank.

  int ranks = 0;
  std::size_t slot_bytes = 0;

  // The best for `ranks` within `limit` bytes; nullopt when that is too little to be of use.
  static std::optional<ShmGeometry> Within(std::size_t limit, int ranks);

  std::size_t ControlEnd() const;
  std::size_t TotalBytes() const;
};

// Memory that ranks of one group on one host share. Its pages belong to no file system: they go
// with the last process that maps them, however it ends. One rank creates it and offers it to its
// peers, which open it through its descriptor in /proc. Not inherited by forked children.
//
// Owner: the lane of a group, or a stream. Thread: the mapping is immutable; what is in it belongs
// to ShmBoard or ShmStream.
class ShmSegment {
 public:
  // What a peer needs to attach. Text: "pid fd bytes inode".
  struct Offer {
    std::int64_t pid = 0;
    int fd = -1;
    std::uint64_t bytes = 0;
    std::uint64_t inode = 0;
  };
  static std::string EncodeOffer(const Offer& offer);
  static std::optional<Offer> DecodeOffer(std::string_view text);

  // Zeroed, its memory reserved. kResourceExhausted when the host has no room for it.
  static Result<std::unique_ptr<ShmSegment>> Create(std::size_t bytes);
  // kUnreachable when this process may not see that one's descriptors, it has closed it, or it is
  // not of `bytes`.
  static Result<std::unique_ptr<ShmSegment>> Attach(const Offer& offer, std::size_t bytes);

  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // REQUIRES: made by Create, before CloseOffer.
  Offer MakeOffer() const;
  // All peers have attached or never will.
  void CloseOffer() { file_.Reset(); }

  std::span<std::byte> memory() const { return memory_; }

 private:
  ShmSegment(FileDescriptor file, std::span<std::byte> memory);
  static Result<std::unique_ptr<ShmSegment>> Map(FileDescriptor file, std::size_t bytes);

  const ProcessMark mark_;  // In a forked child the memory is not there.
  FileDescriptor file_;
  const std::span<std::byte> memory_;
};

// Names the host as far as shared memory reaches: equal for two processes when each can open the
// other's descriptors and they share a network. Empty when the system does not tell.
std::string ShmHostId();

}  // namespace resilient
