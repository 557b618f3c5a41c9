// Goal: the parser reads what torch's client sends, however it is cut, and lets nobody fill the
// memory. Method: bytes as they are on the wire, whole, in pieces and with hostile lengths.
#include "store/tcpstore/query.h"

#include <gmock/gmock.h>

#include "store/core/messages.h"
#include "tests/unit/tcpstore/wire.h"

namespace resilient::store::tcpstore {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<Query> TakeAll(QueryParser& parser) {
  std::vector<Query> queries;
  while (parser.HasQuery()) queries.push_back(parser.Take());
  return queries;
}

// The queries of a stream behind VALIDATE.
std::vector<Query> Parse(std::string_view stream) {
  QueryParser parser;
  EXPECT_TRUE(parser.Feed(kValidate).ok());
  EXPECT_EQ(TakeAll(parser).size(), 1u);
  EXPECT_TRUE(parser.Feed(stream).ok());
  return TakeAll(parser);
}

// Why a stream behind VALIDATE is refused.
Status Refusal(std::string_view stream) {
  QueryParser parser;
  EXPECT_TRUE(parser.Feed(kValidate).ok());
  TakeAll(parser);
  return parser.Feed(stream);
}

bool Equal(const Query& a, const Query& b) {
  return a.type == b.type && a.keys == b.keys && a.values == b.values && a.number == b.number;
}

std::string OneOfEach() {
  std::string stream = Byte(QueryType::kPing) + std::string("\x01\x02\x03\x84", 4);
  stream += Texts(QueryType::kSet, {"/key", "value"});
  stream += Texts(QueryType::kCompareSet, {"/key", "", "desired"});
  stream += Texts(QueryType::kGet, {""});
  stream += Texts(QueryType::kAdd, {"/n"}) + Number(-7);
  stream += Keys(QueryType::kCheck, {});
  stream += Keys(QueryType::kWait, {"/a", "/b"});
  stream += Byte(QueryType::kNumKeys);
  stream += Texts(QueryType::kDeleteKey, {"/key"});
  stream += Texts(QueryType::kAppend, {"/key", std::string(300, 'x')});
  stream += Keys(QueryType::kMultiGet, {"/a"});
  stream += Many(QueryType::kMultiSet, 2, {"/a", "1", "/b", ""});
  stream += Byte(QueryType::kCancelWait);
  stream += Texts(QueryType::kQueuePush, {"/q", std::string("\0\xff", 2)});
  stream += Texts(QueryType::kQueuePop, {"/q"});
  stream += Texts(QueryType::kQueueLength, {"/q"});
  stream += Byte(QueryType::kListKeys);
  stream += Texts(QueryType::kBarrier, {"/b"}) + Number(4);
  return stream;
}

TEST(TcpStoreQuery, EachQuery_IsReadFromItsBytes) {
  const std::string set("\x01\x02\0\0\0\0\0\0\0/k\x03\0\0\0\0\0\0\0abc", 22);
  const std::vector<Query> one = Parse(set);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].type, QueryType::kSet);
  EXPECT_THAT(one[0].keys, ElementsAre("/k"));
  EXPECT_THAT(one[0].values, ElementsAre("abc"));

  const std::vector<Query> all = Parse(OneOfEach());
  ASSERT_EQ(all.size(), 18u);
  EXPECT_EQ(all[0].type, QueryType::kPing);
  EXPECT_EQ(all[0].number, 0x84030201);
  EXPECT_THAT(all[2].values, ElementsAre("", "desired"));
  EXPECT_THAT(all[3].keys, ElementsAre(""));
  EXPECT_EQ(all[4].number, -7);
  EXPECT_THAT(all[5].keys, IsEmpty());
  EXPECT_THAT(all[6].keys, ElementsAre("/a", "/b"));
  EXPECT_EQ(all[9].values[0].size(), 300u);
  EXPECT_THAT(all[11].keys, ElementsAre("/a", "/b"));
  EXPECT_THAT(all[11].values, ElementsAre("1", ""));
  EXPECT_EQ(all[17].type, QueryType::kBarrier);
  EXPECT_EQ(all[17].number, 4);
}

TEST(TcpStoreQuery, CutAtEachByte_TheSameQueries) {
  const std::string stream = kValidate + OneOfEach();
  std::vector<Query> whole;
  whole.push_back({});
  for (Query& query : Parse(OneOfEach())) whole.push_back(std::move(query));
  for (std::size_t cut = 0; cut <= stream.size(); ++cut) {
    QueryParser parser;
    ASSERT_TRUE(parser.Feed(std::string_view(stream).substr(0, cut)).ok());
    std::vector<Query> queries;
    if (cut % 2 == 0) queries = TakeAll(parser);  // Or they are still there with the next bytes.
    ASSERT_TRUE(parser.Feed(std::string_view(stream).substr(cut)).ok());
    for (Query& query : TakeAll(parser)) queries.push_back(std::move(query));
    ASSERT_EQ(queries.size(), whole.size()) << "cut at " << cut;
    for (std::size_t i = 1; i < whole.size(); ++i) {
      EXPECT_TRUE(Equal(queries[i], whole[i])) << NameOf(whole[i].type) << ", cut at " << cut;
    }
  }
  QueryParser parser;
  std::vector<Query> queries;
  for (const char byte : stream) {
    ASSERT_TRUE(parser.Feed(std::string_view(&byte, 1)).ok());
    for (Query& query : TakeAll(parser)) queries.push_back(std::move(query));
  }
  ASSERT_EQ(queries.size(), whole.size());
  for (std::size_t i = 1; i < whole.size(); ++i) EXPECT_TRUE(Equal(queries[i], whole[i]));
}

TEST(TcpStoreQuery, NoGreeting_IsNoClient) {
  for (const auto& [bytes, why] : std::vector<std::pair<std::string, std::string>>{
           {std::string("\x00\xce\xf7\x85\x3d", 5), "wrong number"},
           {Texts(QueryType::kSet, {"/k", "v"}), "SET where it has to say VALIDATE first"},
           {"\x7f", "number 127"},
       }) {
    QueryParser parser;
    const Status status = parser.Feed(bytes);
    EXPECT_EQ(status.code(), StatusCode::kProtocol);
    EXPECT_THAT(status.message(), HasSubstr(why));
    EXPECT_EQ(parser.Feed(kValidate).message(), status.message()) << "not sticky";
    EXPECT_FALSE(parser.HasQuery());
  }
  EXPECT_THAT(Refusal(kValidate).message(), HasSubstr("said so before"));
  EXPECT_THAT(Refusal("\x13").message(), HasSubstr("number 19"));
}

TEST(TcpStoreQuery, HostileLengths_Refused) {
  const auto length = [](std::uint64_t value) { return Number(static_cast<std::int64_t>(value)); };
  const std::string key = Text("/k");
  for (const std::string& stream : {
           Byte(QueryType::kGet) + length(kKeyBytesMax + 1),
           Byte(QueryType::kGet) + length(UINT64_MAX),
           Byte(QueryType::kSet) + key + length(kValueBytesMax + 1),
           Byte(QueryType::kSet) + key + length(UINT64_MAX),
           Byte(QueryType::kWait) + length(kKeysPerQueryMax + 1),
           Byte(QueryType::kMultiSet) + length(UINT64_MAX),
           Byte(QueryType::kMultiGet) + length(std::uint64_t{1} << 63),
       }) {
    EXPECT_EQ(Refusal(stream).code(), StatusCode::kTooLarge);
  }
  EXPECT_TRUE(Refusal(Byte(QueryType::kGet) + length(kKeyBytesMax)).ok());
  EXPECT_TRUE(Refusal(Byte(QueryType::kSet) + key + length(kValueBytesMax)).ok());
  EXPECT_TRUE(Refusal(Byte(QueryType::kWait) + length(kKeysPerQueryMax)).ok());
}

TEST(TcpStoreQuery, ManyLargeValues_RefusedTogether) {
  const std::string round = Text("/k") + Text(std::string(kValueBytesMax, 'v'));
  QueryParser parser;
  ASSERT_TRUE(parser.Feed(kValidate).ok());
  parser.Take();
  ASSERT_TRUE(parser.Feed(Byte(QueryType::kMultiSet) + Number(5)).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(parser.Feed(round).ok()) << i;
  const Status full = parser.Feed(round);
  EXPECT_EQ(full.code(), StatusCode::kTooLarge);
  EXPECT_THAT(full.message(), HasSubstr("MULTI_SET"));
}

TEST(TcpStoreQuery, Flood_ComesOutOneAtATime) {
  constexpr std::size_t kFlood = 64u << 10;
  QueryParser parser;
  ASSERT_TRUE(parser.Feed(kValidate + std::string(kFlood, '\x07')).ok());
  std::size_t taken = 0;
  for (; parser.HasQuery(); ++taken) parser.Take();
  EXPECT_EQ(taken, kFlood + 1);
  ASSERT_TRUE(parser.Feed("\x07").ok());
  EXPECT_TRUE(parser.HasQuery());
}

TEST(TcpStoreQuery, WhatComesBeforeAnError_IsStillGiven) {
  QueryParser parser;
  const std::string stream = kValidate + Texts(QueryType::kSet, {"/k", "v"}) + "\x7f";
  ASSERT_TRUE(parser.Feed(stream).ok()) << "the error is not reached yet";
  parser.Take();
  ASSERT_TRUE(parser.HasQuery());
  EXPECT_TRUE(parser.status().ok());
  EXPECT_EQ(parser.Take().type, QueryType::kSet);
  EXPECT_FALSE(parser.HasQuery());
  EXPECT_EQ(parser.status().code(), StatusCode::kProtocol);
}

}  // namespace
}  // namespace resilient::store::tcpstore
