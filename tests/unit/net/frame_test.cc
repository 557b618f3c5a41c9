// Goal: the splitter gives the same frames however the stream is cut, keeps its limits, and tells a
// user what a foreign peer is.
// Method: round trips under random chunking with a fixed seed; limits at the bound and one above;
// first bytes of real protocols.
#include "runtime/net/frame.h"

#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "runtime/base/random.h"

namespace resilient {
namespace {

struct Outcome {
  Status status;
  std::vector<Frame> frames;
};

Outcome FeedInChunks(std::string_view bytes, std::size_t limit, std::size_t chunk_max,
                     Random* random) {
  FrameSplitter splitter(limit);
  Outcome outcome;
  while (!bytes.empty()) {
    const std::size_t size = std::min<std::size_t>(1 + random->Below(chunk_max), bytes.size());
    outcome.status = splitter.Feed(bytes.substr(0, size));
    bytes.remove_prefix(size);
    while (splitter.HasFrame()) outcome.frames.push_back(splitter.TakeFrame());
  }
  outcome.status = splitter.Feed({});  // Judges what had to wait for the frames to be taken.
  return outcome;
}

// Everything in one call, then a last judgement of what had to wait for the frames to be taken.
Outcome FeedAtOnce(std::string_view bytes, std::size_t limit) {
  FrameSplitter splitter(limit);
  Outcome outcome;
  outcome.status = splitter.Feed(bytes);
  while (true) {
    while (splitter.HasFrame()) outcome.frames.push_back(splitter.TakeFrame());
    outcome.status = splitter.Feed({});
    if (!splitter.HasFrame()) return outcome;
  }
}

Frame RandomFrame(Random* random) {
  Frame frame;
  frame.type = static_cast<FrameType>(1 + random->Below(3));
  frame.flags = static_cast<std::uint8_t>(random->Next());
  frame.channel = static_cast<std::uint16_t>(random->Next());
  frame.seq = random->Next();
  const std::size_t size = random->Below(4) == 0 ? 0 : random->Below(300);
  for (std::size_t i = 0; i < size; ++i) frame.body.push_back(static_cast<char>(random->Next()));
  return frame;
}

TEST(Preamble, IsTheDocumentedOne) {
  EXPECT_EQ(EncodePreamble(), std::string("RSL1\x01\x00\x01\x00", kPreambleBytes));
}

TEST(EncodeFrame, IsTheDocumentedLayout) {
  const Frame frame{.type = FrameType::kReply,
                    .flags = 3,
                    .channel = 0x0504,
                    .seq = 0x0d0c0b0a09080706,
                    .body = "ab"};
  EXPECT_EQ(EncodeFrame(frame),
            std::string("\x02\x00\x00\x00\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d"
                        "ab",
                        kFrameHeaderBytes + 2));
}

TEST(FrameSplitter, RandomChunks_EqualOneShot) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    std::string stream = EncodePreamble();
    std::vector<Frame> sent;
    const std::uint64_t count = random.Below(20);
    for (std::uint64_t i = 0; i < count; ++i) {
      sent.push_back(RandomFrame(&random));
      stream += EncodeFrame(sent.back());
    }
    const Outcome once = FeedAtOnce(stream, kMaxFrameBody);
    ASSERT_TRUE(once.status.ok()) << once.status.message();
    ASSERT_EQ(once.frames, sent) << "seed " << seed;
    const Outcome chunked = FeedInChunks(stream, kMaxFrameBody, 1 + random.Below(64), &random);
    ASSERT_TRUE(chunked.status.ok()) << "seed " << seed;
    ASSERT_EQ(chunked.frames, sent) << "seed " << seed;
  }
}

TEST(FrameSplitter, BytewiseGarbage_GivesTheSameError) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    std::string stream = seed % 2 == 0 ? EncodePreamble() : std::string();
    for (int i = 0; i < 64; ++i) stream.push_back(static_cast<char>(random.Next()));
    const Outcome once = FeedAtOnce(stream, kMaxFrameBodyBeforeHello);
    const Outcome bytewise = FeedInChunks(stream, kMaxFrameBodyBeforeHello, 1, &random);
    EXPECT_EQ(once.status.message(), bytewise.status.message()) << "seed " << seed;
    EXPECT_EQ(once.frames, bytewise.frames) << "seed " << seed;
  }
}

std::string FrameOf(std::size_t body_bytes) {
  return EncodeFrame({.type = FrameType::kRequest, .seq = 1, .body = std::string(body_bytes, 'x')});
}

TEST(EncodeFrame, WrittenInPlace_IsTheSame) {
  std::string wire = "before";
  const std::size_t begin = BeginFrame(&wire);
  wire += "body";
  EndFrame(begin, FrameType::kReply, 7, &wire);
  EXPECT_EQ(wire, "before" + EncodeFrame({.type = FrameType::kReply, .seq = 7, .body = "body"}));
}

TEST(FrameSplitter, BodyAtTheLimit_IsTaken_OneAboveIsNot) {
  for (const std::size_t limit : {std::size_t{0}, kMaxFrameBodyBeforeHello, kMaxFrameBody - 1}) {
    FrameSplitter at(limit);
    EXPECT_TRUE(at.Feed(EncodePreamble() + FrameOf(limit)).ok());
    ASSERT_TRUE(at.HasFrame());
    EXPECT_EQ(at.TakeFrame().body.size(), limit);

    FrameSplitter above(limit);
    // The header alone decides: the body is never waited for.
    const std::string stream = EncodePreamble() + FrameOf(limit + 1).substr(0, kFrameHeaderBytes);
    const Status status = above.Feed(stream);
    EXPECT_EQ(status.code(), StatusCode::kProtocol);
    EXPECT_NE(status.message().find("the limit is " + std::to_string(limit)), std::string::npos)
        << status.message();
    EXPECT_FALSE(above.HasFrame());
  }
}

TEST(FrameSplitter, LimitRaisedByTheFirstFrame_HoldsForTheRestOfTheChunk) {
  const std::string stream = EncodePreamble() + FrameOf(10) + FrameOf(5000) + FrameOf(3);
  FrameSplitter splitter(kMaxFrameBodyBeforeHello);
  ASSERT_TRUE(splitter.Feed(stream).ok());
  ASSERT_TRUE(splitter.HasFrame());
  EXPECT_EQ(splitter.TakeFrame().body.size(), 10U);
  EXPECT_FALSE(splitter.HasFrame());
  splitter.set_body_limit(kMaxFrameBody);
  ASSERT_TRUE(splitter.HasFrame());
  EXPECT_EQ(splitter.TakeFrame().body.size(), 5000U);
  EXPECT_EQ(splitter.TakeFrame().body.size(), 3U);
}

TEST(FrameSplitter, LimitNotRaised_TheHeldFrameIsRefusedAtTheNextFeed) {
  FrameSplitter splitter(kMaxFrameBodyBeforeHello);
  ASSERT_TRUE(splitter.Feed(EncodePreamble() + FrameOf(10) + FrameOf(5000)).ok());
  EXPECT_TRUE(splitter.Feed("more").ok()) << "the first frame is not taken yet";
  splitter.TakeFrame();
  EXPECT_EQ(splitter.Feed("x").code(), StatusCode::kProtocol);
}

TEST(FrameSplitter, UnknownFrameType_IsRefused) {
  for (const unsigned char type : {0, 6, 255}) {
    std::string frame = FrameOf(0);
    frame[4] = static_cast<char>(type);
    FrameSplitter splitter(kMaxFrameBody);
    const Status status = splitter.Feed(EncodePreamble() + frame);
    EXPECT_EQ(status.code(), StatusCode::kProtocol) << int{type};
    EXPECT_NE(status.message().find("unknown type " + std::to_string(type)), std::string::npos)
        << status.message();
  }
}

TEST(FrameSplitter, Error_IsSticky) {
  FrameSplitter splitter(kMaxFrameBody);
  const Status first = splitter.Feed("GET / HTTP/1.1\r\n");
  ASSERT_FALSE(first.ok());
  EXPECT_EQ(splitter.Feed(EncodePreamble()).message(), first.message());
  EXPECT_FALSE(splitter.preamble_seen());
}

TEST(FrameSplitter, FramesBeforeAnError_CanBeTaken) {
  FrameSplitter splitter(kMaxFrameBody);
  std::string bad = FrameOf(0);
  bad[4] = 9;
  EXPECT_FALSE(splitter.Feed(EncodePreamble() + FrameOf(2) + bad).ok());
  ASSERT_TRUE(splitter.HasFrame());
  EXPECT_EQ(splitter.TakeFrame().body, "xx");
}

TEST(FrameSplitter, ForeignProtocols_AreNamed) {
  struct Case {
    std::string bytes;
    const char* named;
  };
  const Case kCases[] = {
      {"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "speaks HTTP"},
      {"POST /x HTTP/1.1\r\n", "speaks HTTP"},
      {"HTTP/1.1 400 Bad Request\r\n", "speaks HTTP"},
      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "speaks HTTP"},
      {std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 9), "speaks TLS"},
      {std::string("\x15\x03\x03\x00\x02\x02\x28\x00", 8), "speaks TLS"},
      {std::string("\x00\xce\xf7\x85\x3c", 5), "TCPStore"},
      {std::string("\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04", 10), "TCPStore"},
      {"SSH-2.0-OpenSSH_9.2\r\n", "speaks SSH"},
      {std::string("\x01\x02\xff\x00zz\x7f!tail", 12), "01 02 ff 00 7a 7a 7f 21"},
      {"RSL2\x01\x01\x01\x01", "52 53 4c 32"},
  };
  for (const Case& foreign : kCases) {
    const Outcome once = FeedAtOnce(foreign.bytes, kMaxFrameBodyBeforeHello);
    EXPECT_EQ(once.status.code(), StatusCode::kProtocol) << foreign.named;
    EXPECT_NE(once.status.message().find(foreign.named), std::string::npos)
        << once.status.message();
    Random random(1);
    const Outcome bytewise = FeedInChunks(foreign.bytes, kMaxFrameBodyBeforeHello, 1, &random);
    EXPECT_EQ(bytewise.status.message(), once.status.message());
  }
}

TEST(FrameSplitter, Versions_Table) {
  struct Case {
    std::uint16_t lowest;
    std::uint16_t highest;
    bool accepted;
  };
  const Case kCases[] = {{1, 1, true},  {0, 1, true},  {1, 9, true}, {0, 65535, true},
                         {2, 3, false}, {0, 0, false}, {2, 1, false}};
  for (const Case& peer : kCases) {
    std::string preamble = "RSL1";
    for (const std::uint16_t version : {peer.lowest, peer.highest}) {
      preamble.push_back(static_cast<char>(version & 0xff));
      preamble.push_back(static_cast<char>(version >> 8));
    }
    FrameSplitter splitter(kMaxFrameBody);
    const Status status = splitter.Feed(preamble);
    EXPECT_EQ(status.ok(), peer.accepted) << peer.lowest << "-" << peer.highest;
    EXPECT_EQ(splitter.preamble_seen(), peer.accepted);
    if (!peer.accepted) {
      EXPECT_NE(status.message().find("versions " + std::to_string(peer.lowest) + " to " +
                                      std::to_string(peer.highest)),
                std::string::npos)
          << status.message();
    }
  }
}

}  // namespace
}  // namespace resilient
