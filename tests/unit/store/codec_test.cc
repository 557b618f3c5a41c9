// Goal: every message survives the way through its frame, and what does not parse is an error,
// never a crash. Method: encode, decode, compare the second encoding; malformed and unknown bodies.
#include "store/core/codec.h"

#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

Request RequestOf(Op op) {
  Request request;
  request.seq = 7;
  request.first_unacked = 3;
  request.generation = 5;
  request.scope = 2;
  request.op = std::move(op);
  return request;
}

Status SomeFailure() {
  FailureDetail detail;
  detail.rank = 2;
  detail.host = "a";
  detail.pid = 7;
  detail.generation = 3;
  detail.group = "world";
  detail.seq = 9;
  detail.since_unix_s = 1.5;
  return Status(StatusCode::kRankLost, "rank 2 is lost", detail);
}

JoinRequest SomeJoin() {
  JoinRequest join;
  join.rank = 1;
  join.world_size = 4;
  join.endpoint = std::string("\0\xff", 2);
  join.join_timeout = Millis(1500);
  join.seat_wait = Millis(20);
  join.device = DeviceClaim{"GPU-1", "host", 1, 4, "0,1,2,3", -1};
  join.generation = 6;
  return join;
}

Hello SomeHello() {
  Hello hello;
  hello.job = "j";
  hello.session = "s";
  hello.incarnation = "i";
  hello.role = Role::kControl;
  hello.process = {"h", "b", "n", 12, 34};
  hello.launcher_attempt = 4;
  hello.supervised = true;
  hello.features = {"x", "y"};
  hello.expected_server = "e";
  hello.hosts_store = true;
  hello.leased_key = std::string("k\0", 2);
  hello.leased_value = std::string("\xff", 1);
  return hello;
}

WaitingReport SomeWaiting() {
  const WaitingOperation recv{.seq = 7,
                              .number = 9,
                              .point_to_point = true,
                              .what = "recv(float32[4])",
                              .call_site = "train.py:7 step",
                              .age = Millis(1500),
                              .missing = {0, 2},
                              .not_begun = {1, 3},
                              .any = true,
                              .sends = true,
                              .needs_all = true};
  const GroupProgress world{
      .group = "world",
      .entered = 6,
      .peers = {{2, 7, 8, true, 5, 4, 3}, {3, 0, 1, false}},
      .device = DeviceProgress{"GPU 0", 5, true, Millis(7), "barrier() #5", Millis(8)}};
  return {
      .generation = 3,
      .calls = {{"world", recv, true}},
      .blocked = true,
      .tell = true,
      .stall = Millis(60000),
      .device_stall = Millis(70000),
      .present = {4, 5},
      .unverified = {6},
      .progress = {world, {.group = "pair", .exists = false}},
      .made = {{"pair", {.digest = 77, .text = "0,2", .made_at = "train.py:3"}, true}, {"w", {}}}};
}

std::vector<Op> AllOps() {
  const Hello hello = SomeHello();
  Report report;
  report.kind = ReportKind::kMismatch;
  report.generation = 6;
  report.accused_rank = -1;
  report.status = SomeFailure();
  ExitReportOp exit;
  exit.process = hello.process;
  exit.rank = 3;
  exit.exit_code = -5;
  exit.signal = 9;
  exit.text = "t";
  return {hello,
          SetOp{std::string("k\0\xfe", 3), "v"},
          GetOp{"k", true},
          AddOp{"k", -3},
          CompareSetOp{"k", "e", "d"},
          CheckOp{{"a", ""}},
          WaitOp{{"a", "b"}},
          DeleteOp{"k"},
          NumKeysOp{},
          CancelOp{8},
          HeartbeatOp{11},
          JoinOp{SomeJoin()},
          ReadyOp{6, true},
          LeaveOp{},
          ReportOp{report},
          exit,
          StatusOp{"only", "from", 3, 70000},
          AppendOp{"k", std::string("\0v", 2)},
          MultiGetOp{{"a", "", "a"}, true},
          MultiSetOp{{"a", "b"}, {"", "v"}},
          ListKeysOp{"p", "q", true},
          QueuePushOp{"k", "v"},
          QueuePopOp{"k", true},
          QueueLengthOp{"k"},
          BarrierOp{"k", -3},
          ExchangeOp{"k", 2, 4, "v", 7},
          WatchOp{"p", 7, true},
          HoldOp{-1, "h", 1500, "why"},
          ReleaseOp{3, ""},
          DrainOp{true},
          WaitingOp{SomeWaiting()},
          WhereaboutsOp{3, {"trainer", "at", "stack", Millis(5), "save", Millis(9)}}};
}

TEST(Codec, ReportOfADeath_SurvivesTheWay) {
  for (const int wait_status : {-1, 0, 9, 0x8b, 255 << 8}) {
    Report death;
    death.kind = ReportKind::kProcessDied;
    death.accused_rank = 3;
    death.accused_incarnation = "i3";
    death.wait_status = wait_status;
    const Result<Request> decoded = DecodeRequest(EncodeRequest(RequestOf(ReportOp{death})));
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    const Report& read = std::get<ReportOp>(decoded->op).report;
    EXPECT_EQ(read.kind, ReportKind::kProcessDied);
    EXPECT_EQ(read.accused_incarnation, "i3");
    EXPECT_EQ(read.wait_status, wait_status);
  }
}

TEST(Codec, ReportOfADeath_EndsInNoWayThatThereIsNot) {
  Report death;
  death.kind = ReportKind::kProcessDied;
  death.wait_status = std::numeric_limits<int>::max() - 1;
  const Result<Request> decoded = DecodeRequest(EncodeRequest(RequestOf(ReportOp{death})));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  EXPECT_EQ(std::get<ReportOp>(decoded->op).report.wait_status, 0xffff);
}

TEST(Codec, ReportOfALeaverOrOfAnEnd_SurvivesTheWay) {
  for (const ReportKind kind :
       {ReportKind::kNeedsLeaver, ReportKind::kEnding, ReportKind::kRebuild}) {
    Report told;
    told.kind = kind;
    told.accused_rank = -1;
    if (kind == ReportKind::kEnding) told.status = Status(StatusCode::kRankLost, "sys.exit(3)");
    const Result<Request> decoded = DecodeRequest(EncodeRequest(RequestOf(ReportOp{told})));
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    const Report& read = std::get<ReportOp>(decoded->op).report;
    EXPECT_EQ(read.kind, kind);
    EXPECT_EQ(read.accused_rank, -1);
    EXPECT_EQ(read.status.ToString(), told.status.ToString());
  }
}

TEST(Codec, ReportOfRoom_SurvivesTheWay) {
  Report room;
  room.kind = ReportKind::kRoom;
  room.max_world = 4;
  room.commit = std::uint64_t{1} << 40;
  const Result<Request> decoded = DecodeRequest(EncodeRequest(RequestOf(ReportOp{room})));
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  const Report& read = std::get<ReportOp>(decoded->op).report;
  EXPECT_EQ(read.kind, ReportKind::kRoom);
  EXPECT_EQ(read.max_world, 4);
  EXPECT_EQ(read.commit, std::uint64_t{1} << 40);
}

TEST(Codec, EveryRequest_SurvivesTheWay) {
  const std::vector<Op> ops = AllOps();
  EXPECT_EQ(ops.size(), std::variant_size_v<Op>);
  for (const Op& op : ops) {
    const Frame frame = EncodeRequest(RequestOf(op));
    EXPECT_EQ(frame.type, FrameType::kRequest);
    const Result<Request> decoded = DecodeRequest(frame);
    ASSERT_TRUE(decoded.ok()) << op.index() << decoded.status().ToString();
    EXPECT_EQ(decoded->op.index(), op.index());
    EXPECT_EQ(decoded->seq, 7u);
    EXPECT_EQ(decoded->first_unacked, 3u);
    EXPECT_EQ(decoded->generation, 5u);
    EXPECT_EQ(decoded->scope, 2u);
    EXPECT_EQ(EncodeRequest(*decoded), frame) << op.index();
  }
}

TEST(Codec, FieldsOfRequests_ArriveWhereTheyBelong) {
  const std::vector<Op> ops = AllOps();
  const auto hello = DecodeRequest(EncodeRequest(RequestOf(ops[0])));
  EXPECT_EQ(std::get<Hello>(hello->op), std::get<Hello>(ops[0]));
  const auto join = std::get<JoinOp>(DecodeRequest(EncodeRequest(RequestOf(ops[11])))->op).request;
  EXPECT_EQ(join.rank, 1);
  EXPECT_EQ(join.world_size, 4);
  EXPECT_EQ(join.endpoint, std::string("\0\xff", 2));
  EXPECT_EQ(join.join_timeout, Millis(1500));
  EXPECT_EQ(join.seat_wait, Millis(20));
  EXPECT_EQ(join.device, (DeviceClaim{"GPU-1", "host", 1, 4, "0,1,2,3", -1}));
  EXPECT_EQ(join.generation, 6u);
  const auto report = std::get<ReportOp>(DecodeRequest(EncodeRequest(RequestOf(ops[14])))->op);
  EXPECT_EQ(report.report.status.code(), StatusCode::kRankLost);
  EXPECT_EQ(report.report.status.detail(), SomeFailure().detail());
}

TEST(Codec, FieldsOfKeyOperations_ArriveWhereTheyBelong) {
  const auto again = [](Op op) {
    return DecodeRequest(EncodeRequest(RequestOf(std::move(op))))->op;
  };
  const auto append = std::get<AppendOp>(again(AppendOp{"k", "v"}));
  EXPECT_EQ(append.key + "=" + append.value, "k=v");
  const auto multi_get = std::get<MultiGetOp>(again(MultiGetOp{{"a", "", "a"}, true}));
  EXPECT_EQ(multi_get.keys, (std::vector<std::string>{"a", "", "a"}));
  EXPECT_TRUE(multi_get.wait);
  const auto multi_set = std::get<MultiSetOp>(again(MultiSetOp{{"a", "b"}, {"", "v"}}));
  EXPECT_EQ(multi_set.keys, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(multi_set.values, (std::vector<std::string>{"", "v"}));
  const auto list = std::get<ListKeysOp>(again(ListKeysOp{"p", "q"}));
  EXPECT_EQ(list.prefix + "<" + list.after, "p<q");
  const auto push = std::get<QueuePushOp>(again(QueuePushOp{"k", "v"}));
  EXPECT_EQ(push.key + "=" + push.value, "k=v");
  const auto pop = std::get<QueuePopOp>(again(QueuePopOp{"k", true}));
  EXPECT_EQ(pop.key, "k");
  EXPECT_TRUE(pop.wait);
  EXPECT_EQ(std::get<QueueLengthOp>(again(QueueLengthOp{"k"})).key, "k");
  const auto barrier = std::get<BarrierOp>(again(BarrierOp{"k", -3}));
  EXPECT_EQ(barrier.key, "k");
  EXPECT_EQ(barrier.size, -3);
  const auto exchange = std::get<ExchangeOp>(again(ExchangeOp{"k", 2, 4, "v", 7}));
  EXPECT_EQ(exchange.survivors_of, 7U);
  EXPECT_TRUE(std::get<ReadyOp>(again(ReadyOp{6, true})).acknowledged);
  EXPECT_EQ(exchange.key + "=" + exchange.value, "k=v");
  EXPECT_EQ(exchange.rank, 2);
  EXPECT_EQ(exchange.size, 4);
}

TEST(Codec, SharedValues_LookLikeOwnOnes) {
  Reply own;
  own.seq = 4;
  own.number = 2;
  own.values = {"", std::string("a\0", 2), std::string(300, 'x')};
  Reply sharing = own;
  sharing.values.clear();
  sharing.shared_values = Share(own.values);
  const auto decoded = DecodeServerMessage(EncodeServerMessage(sharing));
  ASSERT_TRUE(decoded.ok());
  const Reply& reply = std::get<Reply>(*decoded);
  EXPECT_EQ(reply.values, own.values);
  EXPECT_EQ(reply.number, 2);
  EXPECT_EQ(EncodeServerMessage(reply), EncodeServerMessage(own));
  std::string wire;
  const auto part = AppendServerMessage(ServerMessage(sharing), &wire);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(wire + *part, EncodeFrame(EncodeServerMessage(sharing)));
  EXPECT_EQ(part->data(), sharing.shared_values->encoded.data()) << "it was copied";
}

TEST(Codec, LargeValue_IsSentFromWhereItIs) {
  for (const std::size_t size : {kOwnPartBytesMin - 1, kOwnPartBytesMin, kOwnPartBytesMin + 300}) {
    Reply reply;
    reply.seq = 4;
    reply.number = 2;
    reply.revision = 7;
    reply.value.assign(size, 'v');
    const char* const place = reply.value.data();
    Reply sent = reply;
    sent.value = std::move(reply.value);
    std::string wire;
    const auto part = AppendServerMessage(ServerMessage(std::move(sent)), &wire);
    ASSERT_EQ(part != nullptr, size >= kOwnPartBytesMin);
    if (part != nullptr) {
      EXPECT_EQ(part->data(), place) << "it was copied";
      wire += *part;
    }
    FrameSplitter splitter(kMaxFrameBody);
    ASSERT_TRUE(splitter.Feed(EncodePreamble() + wire).ok());
    ASSERT_TRUE(splitter.HasFrame());
    const auto decoded = DecodeServerMessage(splitter.TakeFrame());
    ASSERT_TRUE(decoded.ok());
    const Reply& arrived = std::get<Reply>(*decoded);
    EXPECT_EQ(arrived.value, std::string(size, 'v'));
    EXPECT_EQ(arrived.number, 2);
    EXPECT_EQ(arrived.revision, 7u);
  }
}

// ---- What is written and read without protobuf ----

std::string FromHex(std::string_view hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

Request Plain(Op op, std::uint64_t first_unacked = 0) {
  Request request;
  request.first_unacked = first_unacked;
  request.op = std::move(op);
  return request;
}

// The right side is of protoc --encode.
TEST(Codec, KeyRequests_AreTheBytesOfProtobuf) {
  Request set = Plain(SetOp{std::string("k\0", 2), "v"}, 3);
  set.generation = 300;
  set.scope = 2;
  EXPECT_EQ(EncodeRequest(set).body, FromHex("080310ac0218025a070a026b00120176"));
  EXPECT_EQ(EncodeRequest(Plain(AddOp{"n", -3}, 1)).body, FromHex("08016a050a016e1005"));
  EXPECT_EQ(EncodeRequest(Plain(CheckOp{{"a", ""}})).body, FromHex("7a050a01610a00"));
  EXPECT_EQ(EncodeRequest(Plain(NumKeysOp{})).body, FromHex("920100"));
  EXPECT_EQ(EncodeRequest(Plain(GetOp{"k", true})).body, FromHex("62050a016b1001"));
  EXPECT_EQ(EncodeRequest(Plain(MultiSetOp{{"a", "b"}, {"", "v"}})).body,
            FromHex("b2010b0a01610a01621200120176"));
  EXPECT_EQ(EncodeRequest(Plain(CompareSetOp{"k", "e", "d"}, ~std::uint64_t{0})).body,
            FromHex("08ffffffffffffffffff0172090a016b1201651a0164"));
}

TEST(Codec, PlainReplies_AreTheBytesOfProtobuf) {
  Reply reply;
  reply.value = std::string("v\0", 2);
  reply.number = -4;
  reply.flag = true;
  reply.values = {"", "a"};
  reply.revision = 300;
  EXPECT_EQ(EncodeServerMessage(reply).body, FromHex("12027600180720013a003a0161a001ac02"));
  EXPECT_EQ(EncodeServerMessage(Reply{}).body, "");
  Reply least;
  least.number = std::numeric_limits<std::int64_t>::min();
  const Frame frame = EncodeServerMessage(least);
  EXPECT_EQ(frame.body, FromHex("18ffffffffffffffffff01"));
  EXPECT_EQ(std::get<Reply>(*DecodeServerMessage(frame)).number, least.number);
}

// A field that this build does not know sends a body the way of protobuf.
TEST(Codec, BothWaysOfReading_SayTheSame) {
  const std::string unknown = FromHex("a03f01");  // Field 1012.
  for (const Op& op : AllOps()) {
    Frame frame = EncodeRequest(RequestOf(op));
    const Frame plain = frame;
    frame.body += unknown;
    const Result<Request> decoded = DecodeRequest(frame);
    ASSERT_TRUE(decoded.ok()) << op.index() << decoded.status().ToString();
    EXPECT_EQ(decoded->op.index(), op.index());
    EXPECT_EQ(EncodeRequest(*decoded), plain) << op.index();
  }
  Reply reply;
  reply.seq = 4;
  reply.value = std::string(300, 'x');
  reply.values = {"", "a"};
  reply.number = -70000;
  reply.revision = 9;
  Frame frame = EncodeServerMessage(reply);
  const Frame plain = frame;
  frame.body += unknown;
  EXPECT_EQ(EncodeServerMessage(*DecodeServerMessage(frame)), plain);
}

// Protobuf takes a tag or a length of up to five bytes, and so does what is read by hand.
TEST(Codec, BothWaysOfReading_AllowTheSameSpellings) {
  struct Row {
    const char* body;  // A Set of nothing.
    bool accepted;
  };
  for (const Row& row : {Row{"5a00", true}, Row{"5a8080808000", true}, Row{"5a808080808000", false},
                         Row{"da8080800000", true}, Row{"da808080800000", false},
                         Row{"5a070a808080808000", false}}) {
    SCOPED_TRACE(row.body);
    for (const char* unknown : {"", "a03f01"}) {
      Frame frame;
      frame.body = FromHex(unknown) + FromHex(row.body);
      EXPECT_EQ(DecodeRequest(frame).ok(), row.accepted) << (*unknown ? "protobuf" : "by hand");
    }
  }
}

TEST(Codec, OperationInTwoPieces_IsOne) {
  Frame frame = EncodeRequest(Plain(SetOp{"k", ""}));
  frame.body += EncodeRequest(Plain(SetOp{"", "v"})).body;
  const Result<Request> decoded = DecodeRequest(frame);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(std::get<SetOp>(decoded->op).key, "k");
  EXPECT_EQ(std::get<SetOp>(decoded->op).value, "v");
}

TEST(Codec, BytesOfAStream_AreTheFrames) {
  std::string wire = "before";
  std::string frames = wire;
  for (const Op& op : AllOps()) {
    AppendRequest(RequestOf(op), &wire);
    frames += EncodeFrame(EncodeRequest(RequestOf(op)));
  }
  EXPECT_EQ(wire, frames);
}

std::vector<ServerMessage> AllServerMessages() {
  Reply reply;
  reply.seq = 4;
  reply.status = SomeFailure();
  reply.value = std::string("v\0", 2);
  reply.values = {"", "a"};
  reply.number = -4;
  reply.flag = true;
  Welcome welcome{"server", 1, 5000, 1000, 10, 20, true};
  welcome.began_unix_ms = 1'800'000'000'000;
  reply.welcome = std::make_shared<const Welcome>(welcome);
  reply.status_json = "{}";
  reply.revision = 9;
  reply.events = {{8, std::string("k\0", 2), ""}, {9, "l", std::nullopt}};
  View view;
  view.life = 1;
  view.round = 2;
  view.generation = 3;
  view.attempt = 4;
  view.secret = "s";
  view.world_secret = "w";
  view.members = {{0, "i", "h", 5, std::string("\xff", 1)}, {1, "j", "g", 6, "e"}};
  return {reply,
          Reply{},
          Event(view),
          Event(RunningEvent{3}),
          Event(Fence{3, SomeFailure()}),
          Event(JoinRefusedEvent{SomeFailure(), 7}),
          Event(SessionLostEvent{SomeFailure()}),
          Event(HeartbeatAckEvent{8}),
          Event(PingEvent{9}),
          Event(HeldEvent{2, "h", 7, true, 1500, "why", 2000}),
          Event(DrainingEvent{"why"}),
          Event(WhereEvent{7}),
          Event(LateEvent{{3, 1, 4, {{2, "late", true}, {3, "later"}}, 5, "elsewhere"}}),
          Event(AskProgressEvent{3, {"world", "pair"}}),
          Event(AllEnteredEvent{3, {{"world", false, 7}, {"pair", true, 2}}})};
}

// Of each kind with a text one that no frame holds.
std::vector<ServerMessage> TooLargeServerMessages() {
  const std::string text(kMaxFrameBody + 1, 'x');
  FailureDetail detail;
  detail.rank = 2;
  detail.host = detail.group = text;
  const Status failure(StatusCode::kRankLost, text, detail);
  Reply failed;
  failed.seq = 5;
  failed.status = failure;
  Reply told;
  told.seq = 6;
  told.status_json = text;
  Reply shared;
  shared.seq = 7;
  shared.shared_values = Share(std::vector<std::string>{text});
  View view;
  view.members = {{0, "i", text, 5, "e"}};
  return {failed,
          told,
          shared,
          Event(view),
          Event(Share(view)),
          Event(Fence{3, failure}),
          Event(JoinRefusedEvent{failure, 7}),
          Event(SessionLostEvent{failure}),
          Event(HeldEvent{2, text, 7, true, 1500, text, 2000}),
          Event(DrainingEvent{text}),
          Event(LateEvent{{3, 1, 4, {{2, text, true}}, 5, text}}),
          Event(AskProgressEvent{3, {text}}),
          Event(AllEnteredEvent{3, {{text, false, 7}}})};
}

TEST(Codec, MessageThatNoFrameHolds_IsShortened) {
  for (const ServerMessage& message : TooLargeServerMessages()) {
    const Frame frame = EncodeServerMessage(message);
    EXPECT_LT(frame.body.size(), 64u << 10);
    std::string wire;
    EXPECT_EQ(AppendServerMessage(ServerMessage(message), &wire), nullptr);
    EXPECT_EQ(wire, EncodeFrame(frame));
    const Result<ServerMessage> decoded = DecodeServerMessage(frame);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    if (const Reply* reply = std::get_if<Reply>(&message)) {
      const Reply& refusal = std::get<Reply>(*decoded);
      EXPECT_EQ(refusal.seq, reply->seq);
      EXPECT_EQ(refusal.status.code(),
                reply->status.ok() ? StatusCode::kResourceExhausted : StatusCode::kRankLost);
    } else if (const Fence* fence = std::get_if<Fence>(&std::get<Event>(message))) {
      const Fence& brief = std::get<Fence>(std::get<Event>(*decoded));
      EXPECT_EQ(brief.generation, fence->generation);
      EXPECT_EQ(brief.cause.code(), StatusCode::kRankLost);
      EXPECT_EQ(brief.cause.detail().rank, 2);
    }
  }
}

TEST(Codec, EveryServerMessage_SurvivesTheWay) {
  for (const ServerMessage& message : AllServerMessages()) {
    const Frame frame = EncodeServerMessage(message);
    const Result<ServerMessage> decoded = DecodeServerMessage(frame);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    EXPECT_EQ(decoded->index(), message.index());
    EXPECT_EQ(EncodeServerMessage(*decoded), frame);
    std::string wire;
    EXPECT_EQ(AppendServerMessage(ServerMessage(message), &wire), nullptr);
    EXPECT_EQ(wire, EncodeFrame(frame));
  }
}

TEST(Codec, SharedView_LooksLikeAnOwnOne) {
  const auto own = std::get<Event>(AllServerMessages()[2]);
  const ServerMessage shared(Event(Share(std::get<View>(own))));
  const Frame frame = EncodeServerMessage(own);
  EXPECT_EQ(EncodeServerMessage(shared), frame);
  std::string wire;
  const auto part = AppendServerMessage(ServerMessage(shared), &wire);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(wire.size(), kFrameHeaderBytes);
  EXPECT_EQ(wire + *part, EncodeFrame(frame));
}

TEST(Codec, FieldsOfServerMessages_ArriveWhereTheyBelong) {
  const std::vector<ServerMessage> messages = AllServerMessages();
  const auto reply = std::get<Reply>(*DecodeServerMessage(EncodeServerMessage(messages[0])));
  EXPECT_EQ(reply.seq, 4u);
  EXPECT_EQ(reply.status.code(), StatusCode::kRankLost);
  EXPECT_EQ(reply.status.message(), "rank 2 is lost");
  EXPECT_EQ(reply.status.detail(), SomeFailure().detail());
  EXPECT_EQ(reply.number, -4);
  EXPECT_EQ(reply.revision, 9u);
  EXPECT_EQ(reply.events, std::get<Reply>(messages[0]).events);
  EXPECT_TRUE(reply.flag);
  EXPECT_EQ(reply.welcome->heartbeat_interval_ms, 1000u);
  EXPECT_TRUE(reply.welcome->session_known);
  EXPECT_EQ(reply.welcome->began_unix_ms, 1'800'000'000'000u);
  const auto event = std::get<Event>(*DecodeServerMessage(EncodeServerMessage(messages[2])));
  const View& view = std::get<View>(event);
  EXPECT_EQ(view.attempt, 4u);
  ASSERT_EQ(view.members.size(), 2u);
  EXPECT_EQ(view.members[0].endpoint, "\xff");
  EXPECT_EQ(view.members[1].pid, 6);
}

TEST(Codec, EveryStatusCode_KeepsItsName) {
  for (int code = 1; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    Reply reply;
    reply.status = Status(static_cast<StatusCode>(code), "m");
    const auto decoded = std::get<Reply>(*DecodeServerMessage(EncodeServerMessage(reply)));
    EXPECT_EQ(decoded.status.code(), reply.status.code());
  }
}

TEST(Codec, UnknownOperation_IsUnimplemented) {
  Frame frame;
  frame.seq = 1;
  EXPECT_EQ(DecodeRequest(frame).status().code(), StatusCode::kUnimplemented);
  frame.body = std::string("\xFA\x3E\x00", 3);  // Field 1007, empty: of a newer peer.
  EXPECT_EQ(DecodeRequest(frame).status().code(), StatusCode::kUnimplemented);
  frame.type = FrameType::kEvent;
  EXPECT_EQ(DecodeServerMessage(frame).status().code(), StatusCode::kUnimplemented);
}

TEST(Codec, MalformedBody_IsAProtocolError) {
  Frame frame;
  frame.body = "\xff\xff\xff";
  EXPECT_EQ(DecodeRequest(frame).status().code(), StatusCode::kProtocol);
  for (const FrameType type : {FrameType::kReply, FrameType::kEvent}) {
    frame.type = type;
    EXPECT_EQ(DecodeServerMessage(frame).status().code(), StatusCode::kProtocol);
  }
  EXPECT_EQ(DecodeRequest(frame).status().code(), StatusCode::kProtocol);
  frame.type = FrameType::kRequest;
  EXPECT_EQ(DecodeServerMessage(frame).status().code(), StatusCode::kProtocol);
}

TEST(Codec, CutBody_NeverCrashes) {
  for (const Op& op : AllOps()) {
    Frame frame = EncodeRequest(RequestOf(op));
    while (!frame.body.empty()) {
      frame.body.pop_back();
      (void)DecodeRequest(frame);
    }
  }
}

TEST(Codec, TextThatIsNoUtf8_IsMadeReadable) {
  ExitReportOp exit;
  exit.text = "caf\xc3\xa9 \xff\xc3 \xed\xa0\x80";
  const auto decoded = DecodeRequest(EncodeRequest(RequestOf(exit)));
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(std::get<ExitReportOp>(decoded->op).text, "caf\xc3\xa9 ?? ???");
}

TEST(Codec, HugeTimeout_Saturates) {
  JoinOp join;
  join.request.join_timeout = Duration::max();
  const auto decoded = DecodeRequest(EncodeRequest(RequestOf(join)));
  const Duration timeout = std::get<JoinOp>(decoded->op).request.join_timeout;
  EXPECT_GE(timeout, Duration::max() - Millis(1));
  join.request.join_timeout = Duration(-5);
  const auto negative = DecodeRequest(EncodeRequest(RequestOf(join)));
  EXPECT_EQ(std::get<JoinOp>(negative->op).request.join_timeout, Duration::zero());
}

}  // namespace
}  // namespace resilient::store
