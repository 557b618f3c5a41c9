// Goal: a store with a token file admits exactly those who know a token of their job, fails the
// others at once with a word of what to do, never shows a token on the wire, follows the file, and
// listens on every address only then. Method: the real binary and client, a proxy that records what
// passes, connections driven by hand.
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/store/client.h>

#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "store/core/handshake.h"
#include "tests/ranks/store_client_proxy.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/test_directory.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kToken[] = "token-for-every-job-0123456789";
constexpr char kTrain[] = "token-of-train-0123456789";
constexpr char kEval[] = "token-of-eval-0123456789";
constexpr char kStranger[] = "token-of-a-stranger-0123456789";

class StoreSecurity : public ::testing::Test {
 protected:
  StoreSecurity() { SetLogLevel(LogLevel::kError); }
  ~StoreSecurity() override { SetLogLevel(LogLevel::kWarn); }

  ConnectOptions OptionsFor(const std::string& address, const std::string& token,
                            const std::string& job = "train") {
    ConnectOptions options;
    options.addresses = {address};
    options.job = job;
    if (!token.empty()) options.token_file = folder_.Write("token-of-the-client", token);
    return options;
  }
  Result<std::shared_ptr<Client>> ConnectWith(const std::string& address, const std::string& token,
                                              const std::string& job = "train") {
    return Connect(OptionsFor(address, token, job), {}, clock_, In(kPatience));
  }
  Client::Call Patient() {
    Client::Call call;
    call.deadline = In(kPatience);
    return call;
  }
  // Refused at once, that is without another try, with this text.
  void ExpectRefused(const std::string& address, const std::string& token, const std::string& job,
                     const std::string& mention) {
    const Instant begun = Now();
    const Status status = ConnectWith(address, token, job).status();
    EXPECT_EQ(status.code(), StatusCode::kAuth) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr(mention));
    EXPECT_THAT(status.message(), HasSubstr(address));
    EXPECT_LT(Now() - begun, kPatience / 2) << "it waited for what cannot come";
  }
  // Again and again until it holds; each try is a connection, so it is paced by the server.
  bool Until(const std::function<bool()>& holds) {
    const Deadline deadline = In(kPatience);
    while (!holds()) {
      if (deadline.ExpiredAt(Now())) return false;
    }
    return true;
  }
  bool Admits(const TestServer& server, const std::string& token) {
    return ConnectWith(server.address_text(), token).ok();
  }

  SystemClock clock_;
  const TestDirectory folder_;
};

TEST_F(StoreSecurity, RightToken_OpensAllAndIsNeverOnTheWire) {
  TestServer server({"--token-file", folder_.Write("tokens", std::string(kToken) + "\n")});
  CuttingProxy proxy(server.address());
  auto client = ConnectWith(proxy.address(), kToken);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_TRUE((*client)->Set("key", "value", Patient()).ok());
  proxy.Cut();
  EXPECT_EQ(*(*client)->Get("key", true, Patient()), "value") << "over a second connection";
  const ConnectOptions options = OptionsFor(proxy.address(), kToken);
  EXPECT_TRUE(FetchStatus(options, {}, clock_, In(kPatience)).ok());
  ExitNotice notice;
  notice.rank = 0;
  notice.pid = 1;
  EXPECT_TRUE(ReportExit(options, notice, clock_, In(kPatience)).ok());
  const CuttingProxy::Recording seen = proxy.Recorded();
  EXPECT_THAT(seen.requests, HasSubstr("value"));
  EXPECT_THAT(seen.requests, Not(HasSubstr(kToken)));
  EXPECT_THAT(seen.answers, Not(HasSubstr(kToken)));
  EXPECT_THAT(server.process().ErrorText(), Not(HasSubstr(kToken)));
}

TEST_F(StoreSecurity, RecordedHandshake_OpensNothingAgain) {
  TestServer server({"--token-file", folder_.Write("tokens", kToken)});
  std::string recorded;
  {
    CuttingProxy proxy(server.address());
    ASSERT_TRUE(ConnectWith(proxy.address(), kToken).ok());
    recorded = proxy.Recorded().requests;
  }
  ASSERT_GT(recorded.size(), 2 * kNonceBytes);
  RawClient replay(server.address());
  EXPECT_TRUE(replay.SendBytes(recorded));
  EXPECT_TRUE(replay.ClosedBy(In(kPatience)));
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=refused"));
}

TEST_F(StoreSecurity, WrongOrNoToken_FailsAtOnceAndIsLogged) {
  TestServer server({"--token-file", folder_.Write("tokens", kToken)});
  ExpectRefused(server.address_text(), kStranger, "train", "wrong token");
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=refused peer=\"user "));
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("says_job=train code=AUTH"));
  ExpectRefused(server.address_text(), "", "train", "set RESILIENT_TOKEN_FILE");
  // The membership line as well.
  IgnoredEvents events;
  const auto line = MakeRendezvous(OptionsFor(server.address_text(), kStranger), {}, clock_);
  EXPECT_EQ(line->Start(events, In(kPatience)).code(), StatusCode::kAuth);
  const auto open = MakeRendezvous(OptionsFor(server.address_text(), kToken), {}, clock_);
  EXPECT_TRUE(open->Start(events, In(kPatience)).ok());
  open->Close(In(kPatience));
  // Nobody of them left a trace.
  const auto status =
      FetchStatus(OptionsFor(server.address_text(), kToken, ""), {}, clock_, In(kPatience));
  ASSERT_TRUE(status.ok()) << status.status().ToString();
  EXPECT_THAT(*status, HasSubstr("\"sessions\":2"));  // The open line, and this question.
}

TEST_F(StoreSecurity, StoreThatDoesNotKnowTheToken_IsNotBelieved) {
  TestServer server;
  ExpectRefused(server.address_text(), kToken, "train", "started without a token");
  // One that plays along: a Welcome without proof.
  const auto listener = ListenTcp({"127.0.0.1", 0}, 1);
  ASSERT_TRUE(listener.ok());
  const std::string address = FormatHostPort(*LocalAddress(*listener));
  auto connecting = std::async(std::launch::async, [&] { return ConnectWith(address, kToken); });
  std::vector<PollEntry> entries{{listener->get(), POLLIN, 0}};
  ASSERT_GT(PollUntil(entries, clock_, In(kPatience)), 0);
  const auto impostor = AcceptTcp(*listener);
  ASSERT_TRUE(impostor.ok());
  Welcome welcome;
  welcome.server = "0123456789abcdef0123456789abcdef";
  Reply reply;
  reply.welcome = std::make_shared<const Welcome>(welcome);
  const std::string bytes = EncodePreamble() + EncodeFrame(EncodeServerMessage(reply));
  ASSERT_EQ(::send(impostor->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  const Status status = connecting.get().status();
  EXPECT_EQ(status.code(), StatusCode::kAuth);
  EXPECT_THAT(status.message(), HasSubstr("did not prove that it knows"));
}

TEST_F(StoreSecurity, TokensPerJob_OpenTheirJobAlone) {
  TestServer server(
      {"--token-file", folder_.Write("tokens", std::string("train ") + kTrain + "\neval " + kEval +
                                                   "\n* " + kToken)});
  const std::string address = server.address_text();
  auto train = ConnectWith(address, kTrain, "train");
  auto eval = ConnectWith(address, kEval, "eval");
  auto all = ConnectWith(address, kToken, "other");
  ASSERT_TRUE(train.ok() && eval.ok() && all.ok());
  EXPECT_TRUE((*eval)->Set("key", "of eval", Patient()).ok());
  EXPECT_TRUE((*train)->Set("key", "of train", Patient()).ok());
  EXPECT_EQ(*(*eval)->Get("key", true, Patient()), "of eval");
  ExpectRefused(address, kTrain, "eval", "does not open job eval");
  ExpectRefused(address, kEval, "train", "does not open job train");
  ExpectRefused(address, kTrain, "unknown", "does not open job unknown");
  // Each sees its own job; the store as a whole is for the token of every job.
  const std::string own = *(*train)->StatusJson({}, Patient());
  EXPECT_THAT(own, HasSubstr("\"job\":\"train\""));
  EXPECT_THAT(own, Not(HasSubstr("eval")));
  EXPECT_EQ(FetchStatus(OptionsFor(address, kTrain, ""), {}, clock_, In(kPatience)).status().code(),
            StatusCode::kAuth);
  EXPECT_THAT(*FetchStatus(OptionsFor(address, kTrain, "train"), {}, clock_, In(kPatience)),
              Not(HasSubstr("eval")));
  EXPECT_THAT(*FetchStatus(OptionsFor(address, kToken, ""), {}, clock_, In(kPatience)),
              HasSubstr("\"job\":\"eval\""));
}

TEST_F(StoreSecurity, ChangedFile_CountsByItselfAndAdmittedOnesStay) {
  // As Kubernetes mounts a secret: a link to a link that is swapped.
  namespace fs = std::filesystem;
  for (const auto& [version, token] : {std::pair("1", kToken), std::pair("2", kStranger)}) {
    fs::create_directory(folder_ / version);
    folder_.Write(std::string(version) + "/token", token);
  }
  fs::create_directory_symlink("1", folder_ / "data");
  fs::create_symlink("data/token", folder_ / "token");
  TestServer server({"--token-file", folder_ / "token"});
  auto admitted = ConnectWith(server.address_text(), kToken);
  ASSERT_TRUE(admitted.ok()) << admitted.status().ToString();
  EXPECT_FALSE(Admits(server, kStranger));
  fs::create_directory_symlink("2", folder_ / "data.new");
  fs::rename(folder_ / "data.new", folder_ / "data");
  EXPECT_TRUE(Until([&] { return Admits(server, kStranger); }));
  EXPECT_FALSE(Admits(server, kToken));
  EXPECT_TRUE((*admitted)->Set("key", "value", Patient()).ok());
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=tokens"));
}

TEST_F(StoreSecurity, SigHup_ReadsTheFileAndABrokenOneChangesNothing) {
  const std::string path = folder_.Write("tokens", kToken);
  TestServer server({"--token-file", path});
  folder_.Write("tokens", "short");
  server.process().Signal(SIGHUP);
  EXPECT_TRUE(Until([&] {
    return Admits(server, kToken) &&
           server.process().ErrorText().find("(the tokens that were read before hold)") !=
               std::string::npos;
  }));
  std::filesystem::remove(path);
  server.process().Signal(SIGHUP);
  EXPECT_TRUE(Until([&] {
    return Admits(server, kToken) &&
           server.process().ErrorText().find("No such file") != std::string::npos;
  }));
  folder_.Write("tokens", std::string(kStranger) + "\n" + kToken);
  server.process().Signal(SIGHUP);
  EXPECT_TRUE(Until([&] { return Admits(server, kStranger); }));
  EXPECT_TRUE(Admits(server, kToken)) << "both hold while a token is replaced";
  EXPECT_FALSE(server.process().WaitExit(In(Millis(0))));
}

TEST_F(StoreSecurity, Wildcard_OnlyWithAToken) {
  const std::string path = folder_.Write("tokens", kToken);
  for (const char* address : {"0.0.0.0:0", "[::ffff:0.0.0.0]:0"}) {
    const CommandOutcome refused = RunCommand({"serve", "--listen", address});
    EXPECT_EQ(refused.exit_code, 2) << address;
    EXPECT_THAT(refused.errors, HasSubstr("--token-file"));
    TestServer server({"--listen", address, "--token-file", path});
    const std::string reached = "127.0.0.1:" + std::to_string(server.address().port);
    EXPECT_TRUE(ConnectWith(reached, kToken).ok()) << address;
    ExpectRefused(reached, kStranger, "train", "wrong token");
  }
}

TEST_F(StoreSecurity, BadTokenFile_EndsServeWithTwo) {
  const CommandOutcome missing =
      RunCommand({"serve", "--token-file", folder_ / "none", "--listen", "127.0.0.1:0"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.errors, HasSubstr("No such file"));
  const CommandOutcome broken = RunCommand(
      {"serve", "--token-file", folder_.Write("tokens", "short"), "--listen", "127.0.0.1:0"});
  EXPECT_EQ(broken.exit_code, 2);
  EXPECT_THAT(broken.errors, HasSubstr("line 1: a token needs at least 16"));
}

TEST_F(StoreSecurity, FileOpenToOthers_IsAWarning) {
  const std::string path = folder_.Write("tokens", kToken);
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  TestServer open({"--token-file", path});
  EXPECT_THAT(open.process().ErrorText(), HasSubstr("every user of this host may read"));
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  TestServer closed({"--token-file", path});
  EXPECT_THAT(closed.process().ErrorText(), Not(HasSubstr("every user")));
}

TEST_F(StoreSecurity, Commands_TakeTheTokenFromOptionOrEnvironment) {
  const std::string path = folder_.Write("tokens", kToken);
  TestServer server({"--token-file", path});
  const std::vector<std::string> at = {"--store", server.address_text(), "--job", "train"};
  const auto run = [&](std::vector<std::string> arguments, std::vector<std::string> environment) {
    arguments.insert(arguments.end(), at.begin(), at.end());
    return RunCommand(std::move(arguments), std::move(environment));
  };
  const std::string variable = "RESILIENT_TOKEN_FILE=" + path;
  EXPECT_EQ(run({"set", "--token-file", path, "key", "value"}, {}).exit_code, 0);
  EXPECT_EQ(run({"get", "key"}, {variable}).output, "value");
  EXPECT_EQ(run({"status"}, {variable}).exit_code, 0);
  EXPECT_EQ(run({"report", "--rank", "0", "--pid", "1", "--exit-code", "0"}, {variable}).exit_code,
            0);
  const CommandOutcome none = run({"get", "key"}, {});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.errors, HasSubstr("set RESILIENT_TOKEN_FILE (or --token-file)"));
  const CommandOutcome missing = run({"get", "key"}, {variable + ".none"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.errors, HasSubstr("No such file"));
}

// What holds before Hello holds until the proof is given.
TEST_F(StoreSecurity, BeforeTheProof_NothingIsDoneAndTheLimitsHold) {
  TestServer server({"--token-file", folder_.Write("tokens", kToken)});
  const Hello hello = MakeTestHello(Role::kRequest, "train");
  Frame nonce;
  nonce.type = FrameType::kNonce;
  nonce.body = std::string(kNonceBytes, 'n');
  const std::string begin =
      EncodePreamble() + EncodeFrame(nonce) + EncodeFrame(EncodeRequest(Request{.op = hello}));
  RawClient silent(server.address());
  ASSERT_TRUE(silent.SendBytes(begin));
  RawClient eager(server.address());
  ASSERT_TRUE(eager.SendBytes(begin));
  ASSERT_TRUE(eager.SendOp(SetOp{"key", "of a stranger"}));
  EXPECT_TRUE(eager.ClosedBy(In(kPatience)));
  RawClient large(server.address());
  ASSERT_TRUE(large.SendBytes(begin));
  EXPECT_TRUE(large.SendOp(SetOp{"key", std::string(8192, 'x')}));
  EXPECT_TRUE(large.ClosedBy(In(kPatience)));
  EXPECT_TRUE(silent.ClosedBy(In(kPatience))) << "who does not answer is cut off";
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("did not say Hello in"));
  auto client = ConnectWith(server.address_text(), kToken);
  ASSERT_TRUE(client.ok());
  EXPECT_EQ((*client)->Get("key", false, Patient()).status().code(), StatusCode::kNotFound);
}

// Who came, who went and why is in the log, in fields.
TEST(StoreAudit, JoinExpiryFenceAndLeave_AreLines) {
  TestServer server({"--lease-ttl", "1s"});
  std::vector<std::unique_ptr<RawClient>> members;
  for (int rank = 0; rank < 2; ++rank) {
    members.push_back(std::make_unique<RawClient>(server.address()));
    ASSERT_TRUE(members.back()->SayHello(MakeTestHello(Role::kControl, "the job")));
    ASSERT_TRUE(members.back()->Call(JoinOp{MakeJoin(rank, 2)}));
  }
  for (const auto& member : members) {
    const auto view = member->Await<View>(In(kPatience));
    ASSERT_TRUE(view);
    ASSERT_TRUE(member->Call(ReadyOp{view->generation}));
  }
  // Neither beats.
  for (const auto& member : members) {
    ASSERT_TRUE(member->Await<SessionLostEvent>(In(kPatience)));
  }
  RawClient leaver(server.address());
  ASSERT_TRUE(leaver.SayHello(MakeTestHello(Role::kControl, "other")));
  ASSERT_TRUE(leaver.Call(JoinOp{MakeJoin(0, 2)}));
  ASSERT_TRUE(leaver.Call(LeaveOp{}));
  const std::string log = server.process().ErrorText();
  EXPECT_THAT(log, HasSubstr("event=join job=\"the job\" rank=1 host="));
  EXPECT_THAT(log, HasSubstr("event=running job=\"the job\" generation=1 ranks=2: "));
  EXPECT_THAT(log, HasSubstr("event=expiry job=\"the job\" rank="));
  EXPECT_THAT(log, HasSubstr("event=fence job=\"the job\" round=1 generation=1 code=RANK_LOST: "));
  EXPECT_THAT(log, HasSubstr("event=leave job=other rank=0 host="));
}

}  // namespace
}  // namespace resilient::store
