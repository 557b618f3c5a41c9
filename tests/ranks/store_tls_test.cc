// Goal: a store with a certificate speaks TLS 1.3 and nothing else, with a CA to clients of that CA
// alone; each mistake is an error at once, told apart from the others; renewed files count without
// a new process and cost no session. Method: the real binary and client, a proxy that records what
// passes, connections driven by hand, certificates made here.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/store/client.h>

#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "store/server/tls_functions.h"
#include "store/tls/context.h"
#include "tests/ranks/http_support.h"
#include "tests/ranks/store_client_proxy.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/certificates.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSecret[] = "a value that nobody else may read";

class StoreTls : public ::testing::Test {
 protected:
  StoreTls() { SetLogLevel(LogLevel::kError); }
  ~StoreTls() override { SetLogLevel(LogLevel::kWarn); }

  void SetUp() override {
    server_files_ = folder_.Write("server", ca_.Issue(), ca_.certificate());
    trust_.authority = server_files_.authority;
    member_ = folder_.Write("client", ca_.Issue({.names = ""}), ca_.certificate());
  }

  std::vector<std::string> Arguments(bool mutual) const {
    std::vector<std::string> arguments = {"--tls-cert", server_files_.certificate, "--tls-key",
                                          server_files_.key};
    if (mutual) arguments.insert(arguments.end(), {"--tls-ca", server_files_.authority});
    return arguments;
  }
  ConnectOptions OptionsFor(const std::string& address, const TlsFiles& files) const {
    ConnectOptions options;
    options.addresses = {address};
    options.job = "train";
    options.tls = files;
    return options;
  }
  Result<std::shared_ptr<Client>> ConnectWith(const std::string& address, const TlsFiles& files) {
    return Connect(OptionsFor(address, files), {}, clock_, In(kPatience));
  }
  static Client::Call Patient() {
    Client::Call call;
    call.deadline = In(kPatience);
    return call;
  }
  // Refused at once, that is without another try, with this text.
  void ExpectRefused(const std::string& address, const TlsFiles& files, StatusCode code,
                     const std::string& mention) {
    const Instant begun = Now();
    const Status status = ConnectWith(address, files).status();
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr(mention));
    EXPECT_THAT(status.message(), HasSubstr(address));
    EXPECT_LT(Now() - begun, kPatience / 2) << "it waited for what cannot come";
  }
  // Again and again until it holds; each try is a connection, so it is paced by the server.
  static bool Until(const std::function<bool()>& holds) {
    const Deadline deadline = In(kPatience);
    while (!holds()) {
      if (deadline.ExpiredAt(Now())) return false;
    }
    return true;
  }
  static bool Logged(TestServer& server, const std::string& text) {
    return server.process().ErrorText().find(text) != std::string::npos;
  }

  SystemClock clock_;
  const TlsDirectory folder_;
  const TestCa ca_;
  TlsFiles server_files_;
  TlsFiles trust_;   // Of a client that shows no certificate.
  TlsFiles member_;  // Of one that does.
};

TEST_F(StoreTls, EverythingWorksAndNothingIsReadOnTheWire) {
  TestServer server(Arguments(true));
  CuttingProxy proxy(server.address());
  auto client = ConnectWith(proxy.address(), member_);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_TRUE((*client)->Set("key", kSecret, Patient()).ok());
  const std::string large(4u << 20, 'x');
  EXPECT_TRUE((*client)->Set("large", large, Patient()).ok());
  EXPECT_TRUE(*(*client)->Get("large", true, Patient()) == large);
  proxy.Cut();
  EXPECT_EQ(*(*client)->Get("key", true, Patient()), kSecret) << "over a second connection";
  const ConnectOptions options = OptionsFor(proxy.address(), member_);
  EXPECT_TRUE(FetchStatus(options, {}, clock_, In(kPatience)).ok());
  ExitNotice notice;
  notice.rank = 0;
  notice.pid = 1;
  EXPECT_TRUE(ReportExit(options, notice, clock_, In(kPatience)).ok());
  const CuttingProxy::Recording seen = proxy.Recorded();
  EXPECT_THAT(seen.requests, Not(HasSubstr(kSecret)));
  EXPECT_THAT(seen.answers, Not(HasSubstr(kSecret)));
  EXPECT_THAT(seen.requests, Not(HasSubstr("RSL1")));
}

// Each loss in the midst of a record; every addition counts once.
TEST_F(StoreTls, ThreadsOnOneClient_OverConnectionsThatBreak) {
  constexpr int kThreads = 4;
  constexpr int kAdditions = 50;
  TestServer server(Arguments(true));
  CuttingProxy proxy(server.address());
  const auto client = ConnectWith(proxy.address(), member_);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  proxy.CutEvery(60000);
  std::vector<std::future<int>> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.push_back(std::async(std::launch::async, [&client] {
      int failed = 0;
      for (int n = 0; n < kAdditions; ++n) {
        failed += (*client)->Add("sum", 1, Patient()).ok() ? 0 : 1;
        failed += (*client)->Set("large", std::string(5000, 'x'), Patient()).ok() ? 0 : 1;
        failed += (*client)->Get("large", false, Patient()).ok() ? 0 : 1;
      }
      return failed;
    }));
  }
  for (std::future<int>& thread : threads) EXPECT_EQ(thread.get(), 0);
  EXPECT_GT(proxy.cuts(), 5);
  proxy.CutEvery(0);
  EXPECT_EQ(*(*client)->Add("sum", 0, Patient()), kThreads * kAdditions);
}

// The server encrypts an answer of 6 MiB that is the same for both step by step.
TEST_F(StoreTls, LargeExchange_ReachesAllAndAnswersBehindItFollow) {
  constexpr std::size_t kValueBytes = 3u << 20;
  TestServer server(Arguments(true));
  const auto exchange = [&](int rank) {
    const auto client = ConnectWith(FormatHostPort(server.address()), member_);
    if (!client.ok()) return client.status();
    auto all = (*client)->Exchange("all", rank, 2, std::string(kValueBytes, 'x'), Patient());
    if (!all.ok()) return all.status();
    EXPECT_EQ(*all, std::vector<std::string>(2, std::string(kValueBytes, 'x')));
    return (*client)->Add("sum", 1, Patient()).status();
  };
  auto other = std::async(std::launch::async, exchange, 1);
  const Status one = exchange(0);
  EXPECT_TRUE(one.ok()) << one.ToString();
  const Status two = other.get();
  EXPECT_TRUE(two.ok()) << two.ToString();
}

TEST_F(StoreTls, MembershipLine_GoesOverTlsToo) {
  TestServer server(Arguments(true));
  IgnoredEvents events;
  const auto line = MakeRendezvous(OptionsFor(server.address_text(), member_), {}, clock_);
  EXPECT_TRUE(line->Start(events, In(kPatience)).ok());
  line->Close(In(kPatience));
  const auto refused = MakeRendezvous(OptionsFor(server.address_text(), trust_), {}, clock_);
  EXPECT_EQ(refused->Start(events, In(kPatience)).code(), StatusCode::kAuth);
}

TEST_F(StoreTls, WrongServerCertificate_IsToldApart) {
  TestServer server(Arguments(false));
  EXPECT_TRUE(ConnectWith(server.address_text(), trust_).ok());
  const TestCa stranger;
  TlsFiles strange;
  strange.authority = folder_.Write("stranger.pem", stranger.certificate());
  ExpectRefused(server.address_text(), strange, StatusCode::kAuth, "no CA of " + strange.authority);
  EXPECT_TRUE(Until([&] { return Logged(server, "it refused the certificate of this store"); }));

  server_files_ = folder_.Write("named", ca_.Issue({.names = "DNS:store.example"}), "");
  TestServer named(Arguments(false));
  ExpectRefused(named.address_text(), trust_, StatusCode::kAuth,
                "its certificate does not name 127.0.0.1");

  server_files_ = folder_.Write("expired", ca_.Issue({.valid_until_s = -60}), "");
  TestServer expired(Arguments(false));
  ExpectRefused(expired.address_text(), trust_, StatusCode::kAuth, "has expired");
}

TEST_F(StoreTls, WithACa_ClientsNeedItsCertificate) {
  TestServer server(Arguments(true));
  EXPECT_TRUE(ConnectWith(server.address_text(), member_).ok());
  ExpectRefused(server.address_text(), trust_, StatusCode::kAuth,
                "set RESILIENT_TLS_CERT and RESILIENT_TLS_KEY");
  EXPECT_TRUE(Until([&] { return Logged(server, "it showed no certificate"); }));
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=refused peer=\"user "));
  const TestCa stranger;
  const TlsFiles strange = folder_.Write("strange", stranger.Issue(), ca_.certificate());
  ExpectRefused(server.address_text(), strange, StatusCode::kAuth,
                "it refused the certificate of this process");
}

TEST_F(StoreTls, PlainAndTls_TellEachOther) {
  TestServer encrypted(Arguments(false));
  ExpectRefused(encrypted.address_text(), {}, StatusCode::kAuth,
                "this store speaks TLS only; set RESILIENT_TLS_CA");
  EXPECT_TRUE(Until([&] { return Logged(encrypted, "it does not speak TLS"); }));
  TestServer plain;
  ExpectRefused(plain.address_text(), trust_, StatusCode::kProtocol,
                "speaks the plain store protocol where TLS was expected");
  EXPECT_TRUE(Until([&] { return Logged(plain, "the peer speaks TLS"); }));
  // A stranger on the port of TLS is recognised as ever.
  RawClient http(encrypted.address());
  EXPECT_TRUE(http.SendBytes("GET / HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(http.ClosedBy(In(kPatience)));
  EXPECT_TRUE(Until([&] { return Logged(encrypted, "the peer speaks HTTP"); }));
}

TEST_F(StoreTls, TokenIsAskedForInside) {
  const std::string token = folder_.Write("token", "a-token-of-the-tests-0123456789");
  std::vector<std::string> arguments = Arguments(false);
  arguments.insert(arguments.end(), {"--token-file", token});
  TestServer server(arguments);
  ConnectOptions options = OptionsFor(server.address_text(), trust_);
  EXPECT_EQ(Connect(options, {}, clock_, In(kPatience)).status().code(), StatusCode::kAuth);
  options.token_file = token;
  const auto client = Connect(options, {}, clock_, In(kPatience));
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  EXPECT_TRUE((*client)->Set("key", "value", Patient()).ok());
}

// A hello costs the server a signature. All of them, and a member's request after them, are there
// when the server looks.
TEST_F(StoreTls, FloodOfHandshakes_LeavesMembersTheirTurn) {
  constexpr int kStrangers = 200;
  TestServer server(Arguments(false));
  CuttingProxy proxy(server.address());
  const auto member = ConnectWith(proxy.address(), trust_);
  ASSERT_TRUE(member.ok()) << member.status().ToString();
  const auto context = TlsContext::Open(LinkedTlsFunctions(), TlsRole::kClient, trust_);
  ASSERT_TRUE(context.ok()) << context.status().ToString();
  std::vector<RawClient> strangers;
  for (int i = 0; i < kStrangers; ++i) strangers.emplace_back(server.address());
  for (int i = 0; i < 2; ++i) ASSERT_TRUE((*member)->Set("all", "accepted", Patient()).ok());

  server.process().Signal(SIGSTOP);
  for (RawClient& stranger : strangers) {
    const auto stream = (*context)->NewStream("127.0.0.1");
    std::string plain;
    ASSERT_TRUE(stream->Receive("", plain).ok());
    ASSERT_TRUE(stranger.SendBytes(stream->TakeOutput()));
  }
  const std::size_t before = proxy.Recorded().requests.size();
  auto answer = std::async(std::launch::async, [&] { return (*member)->Set("k", "", Patient()); });
  ASSERT_TRUE(Until([&] { return proxy.Recorded().requests.size() > before; }));
  server.process().Signal(SIGCONT);

  EXPECT_TRUE(answer.get().ok());
  const auto answered = [](RawClient& stranger) { return stranger.HasAnswer(); };
  EXPECT_LT(std::ranges::count_if(strangers, answered), kStrangers / 2);
  // They have their turns, too.
  EXPECT_TRUE(Until([&] { return std::ranges::all_of(strangers, answered); }));
}

// What holds before Hello holds before the handshake is over.
TEST_F(StoreTls, BeforeTheHandshake_TheLimitsHold) {
  TestServer server(Arguments(true));
  RawClient silent(server.address());
  RawClient half(server.address());
  ASSERT_TRUE(half.SendBytes(std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 9)));
  RawClient talker(server.address());
  // Records of a message that does not end.
  std::string flood("\x16\x03\x01\x40\x00\x01\x00\xff\xff", 9);
  flood.append(20000, 'x');
  EXPECT_TRUE(talker.SendBytes(flood));
  EXPECT_TRUE(talker.ClosedBy(In(kPatience)));
  EXPECT_TRUE(half.ClosedBy(In(kPatience)));
  EXPECT_TRUE(silent.ClosedBy(In(kPatience))) << "who says nothing is cut off";
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("did not say Hello in"));
  EXPECT_TRUE(ConnectWith(server.address_text(), member_).ok());
}

TEST_F(StoreTls, RenewedCertificate_CountsByItselfAndSessionsStay) {
  // As Kubernetes mounts a secret: a link to a link that is swapped.
  namespace fs = std::filesystem;
  const TestCa next;
  const auto mount = [&](const std::string& version, const TestCa& ca) {
    fs::create_directory(folder_.path() + "/" + version);
    const TestCertificate issued = ca.Issue();
    folder_.Write(version + "/tls.crt", issued.certificate);
    folder_.Write(version + "/tls.key", issued.key);
    fs::create_directory_symlink(version, folder_.path() + "/data.new");
    fs::rename(folder_.path() + "/data.new", folder_.path() + "/data");
  };
  mount("1", ca_);
  server_files_.certificate = folder_.path() + "/data/tls.crt";
  server_files_.key = folder_.path() + "/data/tls.key";
  TestServer server(Arguments(false));
  const auto before = ConnectWith(server.address_text(), trust_);
  ASSERT_TRUE(before.ok()) << before.status().ToString();
  mount("2", next);
  TlsFiles trust_next;
  trust_next.authority = folder_.Write("next.pem", next.certificate());
  EXPECT_TRUE(Until([&] { return ConnectWith(server.address_text(), trust_next).ok(); }));
  EXPECT_TRUE((*before)->Set("key", "value", Patient()).ok()) << "on its old connection";
  ExpectRefused(server.address_text(), trust_, StatusCode::kAuth, "no CA of ");
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("event=certificate"));
}

TEST_F(StoreTls, SigHup_ReadsTheFilesAndBrokenOnesChangeNothing) {
  TestServer server(Arguments(false));
  folder_.Write("server.pem", "no certificate\n");
  server.process().Signal(SIGHUP);
  EXPECT_TRUE(Until([&] {
    return ConnectWith(server.address_text(), trust_).ok() &&
           Logged(server, "(the certificate that was read before holds)");
  }));
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("holds no certificate that can be used"));
  folder_.Write("server", ca_.Issue({.names = "DNS:localhost"}), ca_.certificate());
  server.process().Signal(SIGHUP);
  const std::string by_name = "localhost:" + std::to_string(server.address().port);
  EXPECT_TRUE(Until([&] { return !ConnectWith(server.address_text(), trust_).ok(); }));
  EXPECT_TRUE(ConnectWith(by_name, trust_).ok());
}

// A client that reconnects shows the certificate that its file holds by then.
TEST_F(StoreTls, RenewedClientCertificate_CountsWithTheNextConnection) {
  TestServer server(Arguments(true));
  CuttingProxy proxy(server.address());
  const auto client = ConnectWith(proxy.address(), member_);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  const TestCa next;
  const std::string both = ca_.certificate() + next.certificate();
  folder_.Write("server.ca", both);
  EXPECT_TRUE(Until([&] { return Logged(server, "event=certificate"); }));
  folder_.Write("client", next.Issue(), ca_.certificate());
  proxy.Cut();
  EXPECT_TRUE((*client)->Set("key", "value", Patient()).ok());
}

TEST_F(StoreTls, Wildcard_WithATokenOrCertificatesOfClients) {
  std::vector<std::string> open = {"serve", "--listen", "0.0.0.0:0"};
  const std::vector<std::string> own = Arguments(false);
  open.insert(open.end(), own.begin(), own.end());
  const CommandOutcome refused = RunCommand(open);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("--tls-ca"));
  std::vector<std::string> arguments = Arguments(true);
  arguments.insert(arguments.end(), {"--listen", "0.0.0.0:0"});
  TestServer server(arguments);
  const std::string reached = "127.0.0.1:" + std::to_string(server.address().port);
  EXPECT_TRUE(ConnectWith(reached, member_).ok());
  ExpectRefused(reached, trust_, StatusCode::kAuth, "RESILIENT_TLS_CERT");
}

TEST_F(StoreTls, BadFiles_EndServeWithTwo) {
  const CommandOutcome missing =
      RunCommand({"serve", "--tls-cert", folder_.path() + "/none", "--tls-key", server_files_.key});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_THAT(missing.errors, HasSubstr("No such file"));
  const CommandOutcome alone = RunCommand({"serve"}, {"RESILIENT_TLS_CA=" + trust_.authority});
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.errors, HasSubstr("needs a certificate of this store"));
}

TEST_F(StoreTls, Commands_TakeTheFilesFromOptionsOrEnvironment) {
  TestServer server(Arguments(true));
  const std::vector<std::string> at = {"--store", server.address_text(), "--job", "train"};
  const auto run = [&](std::vector<std::string> arguments, std::vector<std::string> environment) {
    arguments.insert(arguments.end(), at.begin(), at.end());
    return RunCommand(std::move(arguments), std::move(environment));
  };
  const std::vector<std::string> variables = {"RESILIENT_TLS_CA=" + member_.authority,
                                              "RESILIENT_TLS_CERT=" + member_.certificate,
                                              "RESILIENT_TLS_KEY=" + member_.key};
  EXPECT_EQ(run({"set", "--tls-ca", member_.authority, "--tls-cert", member_.certificate,
                 "--tls-key", member_.key, "key", "value"},
                {})
                .exit_code,
            0);
  EXPECT_EQ(run({"get", "key"}, variables).output, "value");
  EXPECT_EQ(run({"status"}, variables).exit_code, 0);
  EXPECT_EQ(run({"report", "--rank", "0", "--pid", "1", "--exit-code", "0"}, variables).exit_code,
            0);
  const CommandOutcome plain = run({"get", "key"}, {});
  EXPECT_EQ(plain.exit_code, 1);
  EXPECT_THAT(plain.errors, HasSubstr("set RESILIENT_TLS_CA"));
  const CommandOutcome half = run({"get", "key"}, {variables[1], variables[2]});
  EXPECT_EQ(half.exit_code, 2);
  EXPECT_THAT(half.errors, HasSubstr("RESILIENT_TLS_CA is not"));
}

TEST_F(StoreTls, PlainStore_IsCalledInsecure) {
  for (const bool encrypted : {false, true}) {
    std::vector<std::string> arguments = encrypted ? Arguments(false) : std::vector<std::string>();
    arguments.insert(arguments.end(), {"--metrics", "127.0.0.1:0", "--log-level", "info"});
    TestServer server(arguments);
    const auto page = HttpGet(MetricsAddress(server), "/metrics");
    ASSERT_TRUE(page);
    EXPECT_THAT(page->body,
                HasSubstr(encrypted ? "resilient_store_insecure 0" : "resilient_store_insecure 1"));
    EXPECT_EQ(Logged(server, "connections are not encrypted"), !encrypted);
  }
}

}  // namespace
}  // namespace resilient::store
