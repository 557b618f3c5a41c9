// Goal: the pure parts of the CPU communicator. Method: tables of input and result.

#include <string>

#include <gtest/gtest.h>

#include "runtime/comm/schedule.h"
#include "runtime/comm/seen_nonces.h"
#include "runtime/comm/wire.h"

namespace resilient {
namespace {

TEST(Schedule, Chunks_CoverEverythingOnceAndDifferByOneAtMost) {
  for (const std::size_t count : {0u, 1u, 4u, 5u, 6u, 1000u}) {
    std::size_t next = 0;
    for (int index = 0; index < 5; ++index) {
      const Chunk chunk = ChunkOf(count, 5, index);
      EXPECT_EQ(chunk.begin, next);
      EXPECT_LE(chunk.count - count / 5, 1u);
      next += chunk.count;
    }
    EXPECT_EQ(next, count);
  }
}

TEST(Schedule, Plan_SmallInOneRound) {
  EXPECT_EQ(PlanAllReduce(8, 4), AllReducePlan::kOneRound);
  EXPECT_EQ(PlanAllReduce(kOneRoundLimitBytes / 4, 4), AllReducePlan::kOneRound);
  EXPECT_EQ(PlanAllReduce(kOneRoundLimitBytes / 4 + 1, 4), AllReducePlan::kTwoRounds);
}

TEST(Wire, Hello_RoundTrip) {
  const Hello hello{.generation = 7,
                    .attempt = 2,
                    .from = 3,
                    .to = 1,
                    .lane = Lane::kPointToPoint,
                    .stream = 7,
                    .connector = 1ull << 61,
                    .nonce = "0123456789abcdef",
                    .group = "world",
                    .shm_offer = "1 2 3 4 5 6",
                    .made = {.digest = 1ull << 60, .text = "0-4", .made_at = "train.py:7"},
                    .from_world = 5};
  const std::string bytes = EncodeHello(hello, "s3cret");
  EXPECT_EQ(bytes.find("s3cret"), std::string::npos);
  ASSERT_EQ(*HelloLength(std::string_view(bytes).substr(0, kHelloFixedBytes)), bytes.size());
  const auto back = DecodeHello(bytes);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->generation, 7u);
  EXPECT_EQ(back->attempt, 2u);
  EXPECT_EQ(back->from, 3);
  EXPECT_EQ(back->to, 1);
  EXPECT_EQ(back->lane, Lane::kPointToPoint);
  EXPECT_EQ(back->stream, 7);
  EXPECT_EQ(back->connector, 1ull << 61);
  EXPECT_EQ(back->nonce, "0123456789abcdef");
  EXPECT_EQ(back->group, "world");
  EXPECT_EQ(back->shm_offer, "1 2 3 4 5 6");
  EXPECT_EQ(back->made.digest, 1ull << 60);
  EXPECT_EQ(back->made.text, "0-4");
  EXPECT_EQ(back->made.made_at, "train.py:7");
  EXPECT_EQ(back->from_world, 5);
  EXPECT_EQ(back->proof, ProofOf(bytes));
  EXPECT_TRUE(ProvesSecret(*back, "s3cret"));
  EXPECT_FALSE(ProvesSecret(*back, "secret"));
}

TEST(Wire, ProofOfAHello_IsOfEachByte) {
  const Hello hello{.from = 0,
                    .to = 1,
                    .group = "world",
                    .shm_offer = "1 2",
                    .made = {.digest = 3, .text = "0-4", .made_at = "train.py:7"},
                    .from_world = 2};
  const std::string bytes = EncodeHello(hello, "s3cret");
  int read = 0;
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    const auto length = HelloLength(changed);
    if (!length.ok() || *length != changed.size()) continue;
    const auto back = DecodeHello(changed);
    if (!back.ok()) continue;
    ++read;
    EXPECT_FALSE(ProvesSecret(*back, "s3cret")) << "byte " << at;
  }
  EXPECT_GT(read, 100);
}

TEST(Wire, SeenNonces_AreThoseOfTheLatest) {
  SeenNonces seen;
  EXPECT_TRUE(seen.Add("first"));
  EXPECT_FALSE(seen.Add("first"));
  for (std::size_t i = 1; i < SeenNonces::kMax; ++i) EXPECT_TRUE(seen.Add(std::to_string(i)));
  EXPECT_FALSE(seen.Add("first"));
  EXPECT_TRUE(seen.Add("one too many"));
  EXPECT_FALSE(seen.Add("1"));
  EXPECT_TRUE(seen.Add("first")) << "it was the oldest";
}

TEST(Wire, BeginOfAHello_IsJudgedByWhatHasCome) {
  const std::string bytes = EncodeHello({.from = 0, .to = 1, .group = "g"}, "s");
  for (std::size_t length = 0; length <= bytes.size(); ++length)
    EXPECT_TRUE(CheckHelloBegin(std::string_view(bytes).substr(0, length)).ok()) << length;
  EXPECT_FALSE(CheckHelloBegin("G").ok());
  EXPECT_FALSE(CheckHelloBegin("GET / HTTP/1.1\r\n\r\n").ok());
  std::string other = bytes.substr(0, 6);
  other[4] = 5;
  EXPECT_TRUE(CheckHelloBegin(other.substr(0, 5)).ok());
  EXPECT_NE(CheckHelloBegin(other).message().find("version 5"), std::string::npos);
}

TEST(Wire, HelloReply_RoundTripAndGarbage) {
  const std::string hello(kHmacBytes, 'h');
  for (const auto verdict :
       {HelloVerdict::kAccepted, HelloVerdict::kLeft, HelloVerdict::kAcceptedShared}) {
    const std::string bytes = EncodeHelloReply(verdict, hello, "s");
    ASSERT_EQ(bytes.size(), kHelloReplyBytes);
    EXPECT_EQ(DecodeHelloReply(bytes)->verdict, verdict);
    EXPECT_EQ(DecodeHelloReply(bytes)->fault_bytes, 0u);
    EXPECT_TRUE(ReplyProvesSecret(bytes, hello, "s"));
  }
  const std::string refusal = EncodeHelloReply(HelloVerdict::kOtherRanks, hello, "s", "why");
  ASSERT_EQ(refusal.size(), kHelloReplyBytes + 3);
  const auto reply = DecodeHelloReply(refusal.substr(0, kHelloReplyBytes));
  EXPECT_EQ(reply->verdict, HelloVerdict::kOtherRanks);
  EXPECT_EQ(reply->fault_bytes, 3u);
  EXPECT_TRUE(ReplyProvesSecret(refusal, hello, "s"));
  EXPECT_FALSE(DecodeHelloReply(EncodeHelloReply(HelloVerdict::kOtherRanks, hello, "s")).ok());
  EXPECT_FALSE(DecodeHelloReply(EncodeHelloReply(HelloVerdict::kAccepted, hello, "s", "why")).ok());
  for (const char verdict : {0, 5}) {
    std::string bytes = EncodeHelloReply(HelloVerdict::kAccepted, hello, "s");
    bytes[4] = verdict;
    EXPECT_FALSE(DecodeHelloReply(bytes).ok());
  }
}

TEST(Wire, ProofOfAReply_IsOfEachByteAndOfTheHello) {
  const std::string hello(kHmacBytes, 'h');
  const std::string bytes = EncodeHelloReply(HelloVerdict::kOtherRanks, hello, "s", "why");
  EXPECT_FALSE(ReplyProvesSecret(bytes, hello, "another"));
  EXPECT_FALSE(ReplyProvesSecret(bytes, std::string(kHmacBytes, 'g'), "s"));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(ReplyProvesSecret(changed, hello, "s")) << "byte " << at;
  }
}

TEST(Wire, Message_RoundTripAndGarbage) {
  MessageHeader header;
  header.kind = OpKind::kBroadcast;
  header.dtype = DataType::kInt32;
  header.phase = 1;
  header.root = 3;
  header.tag = 4;
  header.seq = 1ull << 40;
  header.count = 9;
  header.payload_bytes = 36;
  header.call_site = std::string(200, 'x');
  const std::string bytes = EncodeMessage(header);
  ASSERT_EQ(bytes.size(), kMessageHeaderBytes + kMaxCallSite);
  const auto back = DecodeMessage(std::string_view(bytes).substr(0, kMessageHeaderBytes));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->kind, OpKind::kBroadcast);
  EXPECT_EQ(back->dtype, DataType::kInt32);
  EXPECT_EQ(back->root, 3);
  EXPECT_EQ(back->tag, 4u);
  EXPECT_EQ(back->seq, 1ull << 40);
  EXPECT_EQ(back->payload_bytes, 36u);
  EXPECT_EQ(back->call_site_bytes, kMaxCallSite);
  EXPECT_FALSE(back->checksum);
  std::string flagged = EncodeMessage(header, true).substr(0, kMessageHeaderBytes);
  EXPECT_TRUE(DecodeMessage(flagged)->checksum);
  flagged[10] = 2;  // A flag of a later version.
  EXPECT_FALSE(DecodeMessage(flagged).ok());
  EXPECT_EQ(DecodeChecksum(EncodeChecksum(~7ull)), ~7ull);
  for (std::size_t i = 0; i < 8; ++i) {  // Magic, type, kind, dtype, reduce.
    std::string broken = bytes.substr(0, kMessageHeaderBytes);
    broken[i] = '\x7f';
    EXPECT_FALSE(DecodeMessage(broken).ok()) << i;
  }
}

TEST(Wire, PointToPoint_OnlyEagerMessagesAndPayloads_HaveAPayload) {
  using Phase = PointToPointPhase;
  MessageHeader header;
  header.type = MessageType::kPointToPoint;
  const auto decodes = [&] {
    return DecodeMessage(std::string_view(EncodeMessage(header)).substr(0, kMessageHeaderBytes));
  };
  for (const Phase phase : {Phase::kEager, Phase::kAnnounced, Phase::kPayload, Phase::kClearToSend,
                            Phase::kUnmatched, Phase::kCredit}) {
    header.phase = static_cast<std::uint8_t>(phase);
    header.payload_bytes = 0;
    ASSERT_TRUE(decodes().ok());
    EXPECT_EQ(decodes()->phase, header.phase);
    header.payload_bytes = 4;
    EXPECT_EQ(decodes().ok(), phase == Phase::kEager || phase == Phase::kPayload);
  }
  header.payload_bytes = 0;
  header.phase = static_cast<std::uint8_t>(Phase::kCredit) + 1;
  EXPECT_FALSE(decodes().ok());
}

TEST(Wire, Fault_RoundTripAndGarbage) {
  const Status status(
      StatusCode::kMismatch, "line one\nline two",
      {.rank = 3, .host = "node3", .pid = 33, .generation = 5, .group = "world", .seq = 8});
  const auto back = DecodeFault(EncodeFault(status));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->code(), status.code());
  EXPECT_EQ(back->message(), status.message());
  EXPECT_EQ(back->detail(), status.detail());
  EXPECT_FALSE(DecodeFault("").has_value());
  EXPECT_FALSE(DecodeFault("NO_SUCH_CODE\n1\n2\n3\n4\nh\ng\ntext").has_value());
  EXPECT_FALSE(DecodeFault("MISMATCH\nx\n2\n3\n4\nh\ng\ntext").has_value());
}

}  // namespace
}  // namespace resilient
