// Goal: a link comes about between two who know the secret of their view, and the secret is nowhere
// on the way. Method: an impostor at the port of a rank, and hellos that were recorded.
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "tests/unit/comm/comm_world.h"

namespace resilient::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// What stands where a rank should be. It takes one connection, reads its hello, and answers.
class Impostor {
 public:
  Impostor() {
    auto listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 16);
    EXPECT_TRUE(listener.ok());
    listener_ = std::move(*listener);
  }
  std::string address() const { return FormatHostPort(*LocalAddress(listener_)); }

  std::string Hear() {
    if (!Await(listener_)) return {};
    auto accepted = AcceptTcp(listener_);
    EXPECT_TRUE(accepted.ok());
    link_ = std::move(*accepted);
    std::string hello = Read(kHelloFixedBytes);
    return hello + Read(*HelloLength(hello) - hello.size());
  }
  void Say(const std::string& bytes) {
    EXPECT_EQ(send(link_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }

 private:
  bool Await(const FileDescriptor& fd) const {
    std::vector<PollEntry> entries{{.fd = fd.get(), .events = POLLIN}};
    return PollUntil(entries, clock_, Deadline::After(clock_.Now(), kBound)) == 1;
  }
  std::string Read(std::size_t bytes) const {
    std::string text;
    while (text.size() < bytes && Await(link_)) {
      std::string part(bytes - text.size(), 0);
      const ssize_t n = recv(link_.get(), part.data(), part.size(), MSG_DONTWAIT);
      if (n <= 0) break;
      text.append(part, 0, static_cast<std::size_t>(n));
    }
    EXPECT_EQ(text.size(), bytes);
    return text;
  }

  SystemClock clock_;
  FileDescriptor listener_;
  FileDescriptor link_;
};

TEST(LinkSecret, WhoAnswersWithoutIt_IsNotBelieved) {
  World world(AllTransports()[0], 2);
  Impostor impostor;
  GroupSpec spec = world.Spec("pair", 1);
  spec.members[0].endpoint = impostor.address();
  const auto group = world.Create(1, spec);
  const std::string hello = impostor.Hear();
  EXPECT_THAT(hello, Not(HasSubstr(kSecret)));
  impostor.Say(EncodeHelloReply(HelloVerdict::kAccepted, ProofOf(hello), "guess"));
  EXPECT_TRUE(world.log(1).WaitFor([](EventLog& log) { return log.unreached[0] >= 1; }));
  EXPECT_THAT(world.log(1).last_unreached.message(),
              HasSubstr("does not know the secret of this job"));
  // The right answer to another hello is none to the next.
  const std::string next = impostor.Hear();
  EXPECT_NE(next, hello);
  impostor.Say(EncodeHelloReply(HelloVerdict::kAccepted, ProofOf(hello), kSecret));
  EXPECT_THAT(impostor.Hear(), Not(::testing::IsEmpty())) << "it tries again";
  group->Abort(Status(StatusCode::kRankLost, "the end of the test"));
}

// What a rank answers on a connection of its own. Empty: it closes it.
std::optional<HelloVerdict> AnswerTo(World& world, const std::string& hello) {
  const Deadline deadline = Deadline::After(world.clock.Now(), kBound);
  const auto socket = ConnectTcp(*ParseHostPort(DecodeEndpoint(world.endpoint(0)).address),
                                 world.clock, deadline, -1);
  EXPECT_TRUE(socket.ok());
  EXPECT_EQ(send(socket->get(), hello.data(), hello.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(hello.size()));
  std::string reply(kHelloReplyBytes, 0);
  std::vector<PollEntry> entries{{.fd = socket->get(), .events = POLLIN}};
  EXPECT_EQ(PollUntil(entries, world.clock, deadline), 1);
  const ssize_t n = recv(socket->get(), reply.data(), reply.size(), MSG_DONTWAIT);
  if (n != static_cast<ssize_t>(reply.size())) return std::nullopt;
  EXPECT_TRUE(ReplyProvesSecret(reply, ProofOf(hello), kSecret));
  // The links live on until the group ends.
  static std::vector<FileDescriptor> kept;
  kept.push_back(FileDescriptor(dup(socket->get())));
  return DecodeHelloReply(reply)->verdict;
}

TEST(LinkSecret, RecordedHello_OpensNothing) {
  World world(StripedTransport(2), 2);
  const auto group = world.Create(0, world.Spec("pair", 0));
  Hello hello{.generation = 1,
              .from = 1,
              .to = 0,
              .lane = Lane::kPointToPoint,
              .stream = 1,
              .group = "pair",
              .made = RanksOf(world.Spec("pair", 1)),
              .from_world = 1};
  // Refused, as the first connection of the link is not there yet.
  const std::string recorded = SayHello(hello, kSecret);
  EXPECT_EQ(AnswerTo(world, recorded), std::nullopt);
  hello.stream = 0;
  EXPECT_EQ(AnswerTo(world, SayHello(hello, kSecret)), HelloVerdict::kAccepted);
  EXPECT_EQ(AnswerTo(world, recorded), std::nullopt);
  hello.stream = 1;
  EXPECT_EQ(AnswerTo(world, SayHello(hello, kSecret)), HelloVerdict::kAccepted);
}

}  // namespace
}  // namespace resilient::testing
