#include "runtime/net/frame.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

constexpr std::string_view kMagic = "RSL1";
// What TCPStore's client says first: the query type VALIDATE (0) and 0x3C85F7CE, little-endian.
constexpr std::string_view kTcpStoreHello("\x00\xce\xf7\x85\x3c", 5);

template <typename Integer>
void WriteLittleEndian(Integer value, char* out) {
  for (std::size_t i = 0; i < sizeof value; ++i) {
    out[i] = static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i) & 0xff);
  }
}

template <typename Integer>
Integer ReadLittleEndian(std::string_view bytes, std::size_t offset) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value |= std::uint64_t{static_cast<unsigned char>(bytes[offset + i])} << (8 * i);
  }
  return static_cast<Integer>(value);
}

void WriteHeader(const Frame& frame, std::size_t body_bytes, char* out) {
  RESILIENT_CHECK(body_bytes <= kMaxFrameBody);
  WriteLittleEndian(static_cast<std::uint32_t>(body_bytes), out);
  WriteLittleEndian(static_cast<std::uint8_t>(frame.type), out + 4);
  WriteLittleEndian(frame.flags, out + 5);
  WriteLittleEndian(frame.channel, out + 6);
  WriteLittleEndian(frame.seq, out + 8);
}

std::string HexDump(std::string_view bytes) {
  std::string dump;
  for (const char byte : bytes) {
    char text[4];
    std::snprintf(text, sizeof text, "%02x ", static_cast<unsigned char>(byte));
    dump += text;
  }
  if (!dump.empty()) dump.pop_back();
  return dump;
}

bool StartsHttp(std::string_view bytes) {
  constexpr std::array<std::string_view, 10> kStarts = {"GET ",    "POST ",    "HEAD ",  "PUT ",
                                                        "DELETE ", "OPTIONS ", "PATCH ", "CONNECT ",
                                                        "TRACE ",  "PRI * HT"};
  return bytes.starts_with("HTTP/") ||
         std::any_of(kStarts.begin(), kStarts.end(),
                     [&](std::string_view start) { return bytes.starts_with(start); });
}

bool StartsTls(std::string_view bytes) {
  const char type = bytes[0];  // 0x16: a handshake, 0x15: an alert, as a server answers nonsense.
  return (type == '\x16' || type == '\x15') && bytes[1] == '\x03';
}

// `bytes` holds a preamble's length and does not begin with our magic.
Status Foreign(std::string_view bytes) {
  constexpr std::string_view kCheck =
      "; check that both sides name the address of a resilient store";
  if (StartsHttp(bytes)) {
    return {StatusCode::kProtocol, StrCat("the peer speaks HTTP, not the store protocol", kCheck)};
  }
  if (StartsTls(bytes)) {
    return {StatusCode::kProtocol,
            StrCat("the peer speaks TLS where the plain store protocol was expected", kCheck,
                   " and that both or neither use RESILIENT_TLS_*")};
  }
  if (bytes.starts_with("SSH-")) {
    return {StatusCode::kProtocol, StrCat("the peer speaks SSH, not the store protocol", kCheck)};
  }
  return {StatusCode::kProtocol, StrCat("the peer does not speak the store protocol; its first ",
                                        bytes.size(), " bytes are ", HexDump(bytes), kCheck)};
}

Status TcpStore() {
  return {
      StatusCode::kProtocol,
      "the peer is a client of PyTorch's TCPStore, not of the resilient store: another job or "
      "backend uses this address; give one of them another MASTER_PORT or set RESILIENT_STORE, or "
      "start the store with --tcpstore, which serves such clients"};
}

Status CheckVersions(std::string_view preamble) {
  const auto lowest = ReadLittleEndian<std::uint16_t>(preamble, 4);
  const auto highest = ReadLittleEndian<std::uint16_t>(preamble, 6);
  if (lowest <= highest && lowest <= kProtocolVersionMax && highest >= kProtocolVersionMin) {
    return {};
  }
  return {StatusCode::kProtocol,
          StrCat("the peer speaks versions ", lowest, " to ", highest,
                 " of the store protocol, this side speaks ", kProtocolVersionMin, " to ",
                 kProtocolVersionMax, "; install the same release of resilient on both sides")};
}

}  // namespace

std::string EncodePreamble() {
  std::string preamble(kMagic);
  preamble.resize(kPreambleBytes);
  WriteLittleEndian(kProtocolVersionMin, preamble.data() + 4);
  WriteLittleEndian(kProtocolVersionMax, preamble.data() + 6);
  return preamble;
}

std::string EncodeFrame(Frame frame) {
  char header[kFrameHeaderBytes];
  WriteHeader(frame, frame.body.size(), header);
  frame.body.insert(0, header, sizeof header);
  return std::move(frame.body);
}

std::size_t BeginFrame(std::string* out) {
  const std::size_t begin = out->size();
  out->append(kFrameHeaderBytes, '\0');
  return begin;
}

void EndFrame(std::size_t begin, FrameType type, std::uint64_t seq, std::string* out,
              std::size_t rest) {
  const std::size_t body_bytes = out->size() - begin - kFrameHeaderBytes + rest;
  WriteHeader(Frame{.type = type, .seq = seq, .body = {}}, body_bytes, out->data() + begin);
}

Status FrameSplitter::Feed(std::string_view bytes) {
  if (!error_.ok()) return error_;
  if (held_.empty()) {
    Split(bytes);
  } else {
    held_.append(bytes);
    const std::string held = std::exchange(held_, {});
    Split(held);
  }
  return error_;
}

Frame FrameSplitter::TakeFrame() {
  RESILIENT_CHECK(HasFrame());
  Frame frame = std::move(frames_[taken_++]);
  if (!HasFrame()) {
    frames_.clear();
    taken_ = 0;
  }
  return frame;
}

void FrameSplitter::set_body_limit(std::size_t limit) {
  body_limit_ = limit;
  if (!error_.ok() || held_.empty()) return;
  const std::string held = std::exchange(held_, {});
  Split(held);
}

// Each step takes what it can from `bytes` and says whether there is something left to do.
void FrameSplitter::Split(std::string_view bytes) {
  bool more = true;
  while (more) {
    if (!preamble_seen_) {
      more = SplitPreamble(&bytes);
    } else if (!in_body_) {
      more = SplitHeader(&bytes);
    } else {
      more = SplitBody(&bytes);
    }
  }
}

void FrameSplitter::MoveToHead(std::string_view* bytes, std::size_t size) {
  const std::size_t moved = std::min(size - head_.size(), bytes->size());
  head_.append(bytes->substr(0, moved));
  bytes->remove_prefix(moved);
}

bool FrameSplitter::SplitPreamble(std::string_view* bytes) {
  // TCPStore's client says these five bytes and waits for an answer: nothing more would come.
  if (head_.size() < kTcpStoreHello.size()) MoveToHead(bytes, kTcpStoreHello.size());
  if (head_ == kTcpStoreHello) {
    error_ = TcpStore();
    return false;
  }
  if (head_.size() >= kTcpStoreHello.size()) MoveToHead(bytes, kPreambleBytes);
  if (head_.size() < kPreambleBytes) return false;
  error_ = head_.starts_with(kMagic) ? CheckVersions(head_) : Foreign(head_);
  head_.clear();
  preamble_seen_ = error_.ok();
  return error_.ok();
}

bool FrameSplitter::SplitHeader(std::string_view* bytes) {
  // Mostly it came in one piece.
  const bool whole = head_.empty() && bytes->size() >= kFrameHeaderBytes;
  if (!whole) MoveToHead(bytes, kFrameHeaderBytes);
  if (!whole && head_.size() < kFrameHeaderBytes) return false;
  const std::string_view header = whole ? bytes->substr(0, kFrameHeaderBytes) : head_;
  const std::size_t body_bytes = ReadLittleEndian<std::uint32_t>(header, 0);
  const auto type = ReadLittleEndian<std::uint8_t>(header, 4);
  if (type < static_cast<std::uint8_t>(FrameType::kRequest) ||
      type > static_cast<std::uint8_t>(FrameType::kProof)) {
    error_ = Status(StatusCode::kProtocol,
                    StrCat("the peer sent a frame of the unknown type ", int{type}));
    return false;
  }
  if (body_bytes > body_limit_) {
    if (HasFrame()) {
      held_.append(*bytes);
      return false;
    }
    error_ = Status(StatusCode::kProtocol, StrCat("the peer announced a frame of ", body_bytes,
                                                  " bytes; the limit is ", body_limit_));
    return false;
  }
  current_.type = static_cast<FrameType>(type);
  current_.flags = ReadLittleEndian<std::uint8_t>(header, 5);
  current_.channel = ReadLittleEndian<std::uint16_t>(header, 6);
  current_.seq = ReadLittleEndian<std::uint64_t>(header, 8);
  current_.body.clear();
  current_.body.reserve(body_bytes);
  if (whole) bytes->remove_prefix(kFrameHeaderBytes);
  head_.clear();
  in_body_ = true;
  body_left_ = body_bytes;
  return true;
}

bool FrameSplitter::SplitBody(std::string_view* bytes) {
  const std::size_t moved = std::min(body_left_, bytes->size());
  current_.body.append(bytes->substr(0, moved));
  bytes->remove_prefix(moved);
  body_left_ -= moved;
  if (body_left_ > 0) return false;
  frames_.push_back(std::move(current_));
  in_body_ = false;
  return true;
}

}  // namespace resilient
