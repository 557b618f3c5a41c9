// Goal: no input crashes the splitter or makes it allocate beyond its limit, and how the stream is
// cut never matters. Method: the input's first bytes seed the cutting, the rest is the stream; one
// splitter gets it whole, one in pieces.
#include "runtime/net/frame.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/random.h"

namespace {

using resilient::Frame;
using resilient::FrameSplitter;
using resilient::Random;
using resilient::Status;

constexpr std::size_t kLimit = resilient::kMaxFrameBodyBeforeHello;

struct Outcome {
  Status status;
  std::vector<Frame> frames;
};

void Take(FrameSplitter* splitter, Outcome* outcome) {
  while (splitter->HasFrame()) {
    outcome->frames.push_back(splitter->TakeFrame());
    RESILIENT_CHECK(outcome->frames.back().body.size() <= kLimit);
  }
}

// Feeds `stream` in pieces of the sizes that `next_size` gives.
template <typename NextSize>
Outcome Run(std::string_view stream, const NextSize& next_size) {
  FrameSplitter splitter(kLimit);
  Outcome outcome;
  while (!stream.empty()) {
    const std::size_t size = std::min<std::size_t>(next_size(), stream.size());
    outcome.status = splitter.Feed(stream.substr(0, size));
    Take(&splitter, &outcome);
    stream.remove_prefix(size);
  }
  // An oversize frame behind others is judged only when these have been taken.
  outcome.status = splitter.Feed({});
  Take(&splitter, &outcome);
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view stream(reinterpret_cast<const char*>(data + 1), size - 1);
  Random random(data[0]);
  const Outcome whole = Run(stream, [&stream] { return stream.size(); });
  const Outcome pieces = Run(stream, [&random] { return 1 + random.Below(40); });
  RESILIENT_CHECK(whole.status.message() == pieces.status.message());
  RESILIENT_CHECK(whole.frames == pieces.frames);

  // What was split is what encoding the frames gives back: the stream's own beginning.
  std::string again = resilient::EncodePreamble();
  for (const Frame& frame : whole.frames) again += resilient::EncodeFrame(frame);
  if (!whole.frames.empty()) {
    RESILIENT_CHECK(stream.substr(resilient::kPreambleBytes)
                        .starts_with(std::string_view(again).substr(resilient::kPreambleBytes)));
  }
  return 0;
}
