// Goal: no body crashes the codec, and what it accepts survives a round trip. Method: the first
// byte chooses the frame's type, the rest is the body; encoding what was decoded and decoding that
// again gives the same bytes (the first encoding may differ from the input: protobuf has several
// spellings of a message). What is read by hand is what protobuf reads.
#include "store/core/codec.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime/base/check.h"

namespace {

using resilient::Frame;
using resilient::FrameType;
using resilient::StatusCode;

constexpr const char* kUnknownField = "\xa0\x3f\x01";  // 1012.

// A foreign body is refused by one of the two documented codes.
template <typename Decoded>
bool Accepted(const Decoded& decoded) {
  if (decoded.ok()) return true;
  const StatusCode code = decoded.status().code();
  RESILIENT_CHECK(code == StatusCode::kProtocol || code == StatusCode::kUnimplemented);
  RESILIENT_CHECK(!decoded.status().message().empty());
  return false;
}

template <typename Decode, typename Encode>
void RoundTrip(const Frame& frame, const Decode& decode, const Encode& encode) {
  const auto first = decode(frame);
  // With a field that nobody knows protobuf reads it, whatever is read by hand without.
  Frame unusual = frame;
  unusual.body.insert(0, kUnknownField);
  const auto by_protobuf = decode(unusual);
  RESILIENT_CHECK(by_protobuf.status().code() == first.status().code());
  if (!Accepted(first)) return;
  RESILIENT_CHECK(encode(*by_protobuf) == encode(*first));
  const Frame encoded = encode(*first);
  RESILIENT_CHECK(encoded.type == frame.type);
  const auto second = decode(encoded);
  RESILIENT_CHECK(second.ok());
  RESILIENT_CHECK(encode(*second) == encoded);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  Frame frame;
  frame.type = static_cast<FrameType>(1 + data[0] % 3);
  frame.seq = data[0];
  frame.body.assign(reinterpret_cast<const char*>(data + 1), size - 1);
  if (frame.type == FrameType::kRequest) {
    RoundTrip(frame, resilient::store::DecodeRequest, resilient::store::EncodeRequest);
  } else {
    RoundTrip(frame, resilient::store::DecodeServerMessage, resilient::store::EncodeServerMessage);
  }
  return 0;
}
