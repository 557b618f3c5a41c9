#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <resilient/status.h>

#include "runtime/comm/byte_stream.h"
#include "runtime/comm/shm_ring.h"
#include "runtime/comm/shm_segment.h"

namespace resilient {

// How the memory of a stream is divided: a page of control, the ring of who offers, the ring of the
// peer. Pure. Thread: value type.
struct ShmStreamGeometry {
  static constexpr std::size_t kControlBytes = 4096;
  static constexpr std::size_t kLeastRingBytes = 4096;
  static constexpr std::size_t kMostRingBytes = 64u << 20;

  std::size_t forward_bytes = 0;   // From who offers; powers of two both.
  std::size_t backward_bytes = 0;  // To it.

  bool Valid() const;
  std::size_t TotalBytes() const { return kControlBytes + forward_bytes + backward_bytes; }
};

// A stream over two rings in shared memory. The connection that it was negotiated on stays: a byte
// on it wakes a peer that has said in memory that it sleeps, and its end is the end of the peer,
// which is told behind what is left in the ring. An index that makes no sense breaks the stream.
class ShmStream final : public ByteStream {
 public:
  enum class Side { kOffers, kAttaches };

  // `memory` as FormatMemory has left it. `keeps` may be null; then `memory` outlives the stream.
  ShmStream(FileDescriptor bell, std::span<std::byte> memory, const ShmStreamGeometry& geometry,
            Side side, std::unique_ptr<ShmSegment> keeps);
  // For both sides, before the first stream is on it.
  static void FormatMemory(std::span<std::byte> memory);

  int fd() const override { return bell_.get(); }
  short PollFor(const StreamEvents& wanted) const override;
  StreamEvents OnReady(short revents) override;
  IoResult Read(std::span<const iovec> into) override;
  IoResult Write(std::span<const iovec> from) override;
  void ShutdownWrite() override;
  bool in_memory() const override { return true; }

 private:
  void Ring();
  // Of what was read.
  void TellWriter();

  FileDescriptor bell_;
  std::unique_ptr<ShmSegment> keeps_;
  ShmRingWriter out_;
  ShmRingReader in_;
  const std::size_t worth_waking_;  // Bytes for which a reader is woken in the midst of a Write.
  bool peer_ended_ = false;         // The connection is at its end, `peer_error_` says how.
  int peer_error_ = 0;
};

// Memory for a stream that the connecting side offers in its hello, until the peer has answered.
// Owner: a Connector. Thread: loop-confined.
class ShmStreamOffer {
 public:
  // kResourceExhausted when the host has no room for it. REQUIRES: geometry.Valid().
  static Result<std::unique_ptr<ShmStreamOffer>> Make(const ShmStreamGeometry& geometry);

  // What AttachShmStream reads: "pid fd bytes inode forward backward".
  std::string text() const;
  bool taken() const;
  // The peer can take it no more. False: it has taken it already.
  bool Withdraw();
  // The peer has taken it. At most once, and nothing else after it.
  std::unique_ptr<ByteStream> MakeStream(FileDescriptor connection);

 private:
  ShmStreamOffer(std::unique_ptr<ShmSegment> segment, const ShmStreamGeometry& geometry)
      : segment_(std::move(segment)), geometry_(geometry) {}

  std::unique_ptr<ShmSegment> segment_;
  const ShmStreamGeometry geometry_;
};

// Takes up what a peer has offered, and with it `connection`. Otherwise `connection` stays as it
// is: kProtocol when the text makes no sense, kUnreachable when that memory cannot be had,
// kCancelled when it was withdrawn.
Result<std::unique_ptr<ByteStream>> AttachShmStream(std::string_view offer,
                                                    FileDescriptor& connection);

}  // namespace resilient
