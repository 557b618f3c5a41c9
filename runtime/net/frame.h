#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

namespace resilient {

// The framing of the store protocol. A connection begins, in both directions, with an 8-byte
// preamble
// {"RSL1", u16 lowest version, u16 highest version}; then frames follow, each a 16-byte
// little-endian header {u32 body length, u8 type, u8 flags, u16 channel, u64 seq} and the body.
// docs/protocol.md is the full text.
inline constexpr std::size_t kPreambleBytes = 8;
inline constexpr std::size_t kFrameHeaderBytes = 16;
inline constexpr std::size_t kMaxFrameBody = 16u << 20;
inline constexpr std::size_t kMaxFrameBodyBeforeHello = 4u << 10;
inline constexpr std::uint16_t kProtocolVersionMin = 1;
inline constexpr std::uint16_t kProtocolVersionMax = 1;

// Value of the type byte: which proto message the body is, or bytes of the token handshake.
enum class FrameType : std::uint8_t {
  kRequest = 1,
  kReply = 2,
  kEvent = 3,
  kNonce = 4,
  kProof = 5
};

struct Frame {
  FrameType type = FrameType::kRequest;
  std::uint8_t flags = 0;
  std::uint16_t channel = 0;
  std::uint64_t seq = 0;
  std::string body;

  friend bool operator==(const Frame&, const Frame&) = default;
};

std::string EncodePreamble();
// REQUIRES: frame.body.size() <= kMaxFrameBody.
// The body's own memory is used when it has room for the header.
std::string EncodeFrame(Frame frame);
// A frame whose body is written where it is sent from: BeginFrame appends room for the header to
// `out` and returns its place; the body is appended; EndFrame writes the header. Of the body `rest`
// bytes may be sent behind `out`. REQUIRES: as above.
std::size_t BeginFrame(std::string* out);
void EndFrame(std::size_t begin, FrameType type, std::uint64_t seq, std::string* out,
              std::size_t rest = 0);

// Splits a byte stream into preamble and frames; never parses a byte twice. Thread:
// caller-synchronised. Pure.
class FrameSplitter {
 public:
  explicit FrameSplitter(std::size_t body_limit) : body_limit_(body_limit) {}

  // kProtocol when the stream is not ours; the text tells HTTP, TLS, TCPStore and garbage apart, or
  // names the version range of the peer. Sticky: after an error nothing more is accepted; frames
  // split before it can still be taken.
  Status Feed(std::string_view bytes);

  bool HasFrame() const { return taken_ < frames_.size(); }
  // Bytes kept of what is not whole yet.
  std::size_t PartialBytes() const { return current_.body.size() + held_.size() + head_.size(); }
  Frame TakeFrame();  // REQUIRES: HasFrame().

  bool preamble_seen() const { return preamble_seen_; }
  // For the frames that follow those already split. A frame over the old limit is not refused while
  // others wait to be taken, for taking them (a Hello) may raise the limit.
  void set_body_limit(std::size_t limit);

 private:
  void Split(std::string_view bytes);
  bool SplitPreamble(std::string_view* bytes);
  bool SplitHeader(std::string_view* bytes);
  bool SplitBody(std::string_view* bytes);
  void MoveToHead(std::string_view* bytes, std::size_t size);

  std::size_t body_limit_;
  bool preamble_seen_ = false;
  Status error_;
  std::string head_;           // The present preamble or header, as far as it has come.
  bool in_body_ = false;       // The header of current_ is read, its body is not complete.
  std::size_t body_left_ = 0;  // Bytes of that body still to come.
  Frame current_;
  std::string held_;  // Not split yet: a frame that waits for set_body_limit, and what follows it.
  std::vector<Frame> frames_;  // Those before taken_ are empty.
  std::size_t taken_ = 0;
};

}  // namespace resilient
