// Goal: the commands about keys, members and the store do what their help says, as text and as
// JSON. Method: the real binary, run to its end or watched while it runs; members made of bare
// sockets.

#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// resilient-store for job "demo" of a server.
class StoreServerCommands : public ::testing::Test {
 protected:
  std::vector<std::string> Environment(const std::string& address) {
    return {"RESILIENT_STORE=" + address, "RESILIENT_JOB=demo"};
  }
  CommandOutcome Run(std::vector<std::string> arguments) {
    return RunCommand(std::move(arguments), Environment(server_.address_text()));
  }
  // Its output, when it ends well.
  std::string Good(std::vector<std::string> arguments) {
    const CommandOutcome outcome = Run(std::move(arguments));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.errors;
    return outcome.output;
  }

  TestServer server_;
};

TEST_F(StoreServerCommands, GetAndSet_AsJson) {
  EXPECT_EQ(Good({"set", "color", "gr\xc3\xbcn", "--json"}), "{\"bytes\":5,\"key\":\"color\"}\n");
  EXPECT_EQ(Good({"get", "color", "--json"}),
            "{\"bytes\":5,\"key\":\"color\",\"value\":\"gr\\\\xc3\\\\xbcn\"}\n");
  EXPECT_EQ(Good({"get", "color"}), "gr\xc3\xbcn");
}

TEST_F(StoreServerCommands, Keys_ArePagedAndEscaped) {
  for (const char* key : {"a/1", "a/2", "a/3", "b\n\\"}) Good({"set", key, "v"});
  EXPECT_EQ(Good({"keys"}), "a/1\na/2\na/3\nb\\x0a\\\\\n");
  EXPECT_EQ(Good({"keys", "a/", "--after", "a/1"}), "a/2\na/3\n");
  const CommandOutcome page = Run({"keys", "--limit", "1"});
  EXPECT_EQ(page.output, "a/1\n");
  EXPECT_THAT(page.errors, HasSubstr("3 keys more"));
  EXPECT_EQ(Good({"keys", "a/", "--limit", "2", "--json"}),
            "{\"keys\":[\"a/1\",\"a/2\"],\"more\":true}\n");
  EXPECT_EQ(Good({"keys", "none"}), "");
}

TEST_F(StoreServerCommands, Watch_TellsOfEachChangeUntilItIsStopped) {
  Good({"set", "a/1", "old"});
  ChildProcess watch({RESILIENT_STORE_BINARY, "watch", "a/"}, Environment(server_.address_text()));
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr("snapshot of 1 keys"));
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr(" is a/1 old"));
  Good({"set", "b", "other"});
  Good({"set", "a/1", "new"});
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr(" set a/1 new"));
  watch.Signal(SIGINT);
  EXPECT_EQ(watch.WaitExit(In(kPatience)), 0) << watch.ErrorText();
}

TEST_F(StoreServerCommands, Watch_FromARevision_CountsAndPrintsJson) {
  ChildProcess watch({RESILIENT_STORE_BINARY, "watch", "--json", "--count", "2"},
                     Environment(server_.address_text()));
  const std::string first = watch.ReadLine(In(kPatience)).value_or("");
  EXPECT_THAT(first, HasSubstr("\"snapshot_of\":0"));
  Good({"set", "a", "1"});
  Good({"set", "a", "2"});
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr("\"value\":\"1\""));
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr("\"value\":\"2\""));
  EXPECT_EQ(watch.WaitExit(In(kPatience)), 0) << watch.ErrorText();
  // Both are still known, so they are told again to who asks from the first on.
  const std::size_t at = first.find("\"revision\":") + 11;
  const std::string next = std::to_string(std::stoull(first.substr(at)) + 1);
  EXPECT_EQ(Good({"watch", "--from", next, "--count", "2"}),
            next + " set a 1\n" + std::to_string(std::stoull(next) + 1) + " set a 2\n");
  const CommandOutcome future = Run({"watch", "--from", "1000000"});
  EXPECT_EQ(future.exit_code, 1);
  EXPECT_THAT(future.errors, HasSubstr("revision 1000000"));
}

TEST_F(StoreServerCommands, Watch_GoesOnOverARestartOfADurableStore) {
  const std::string data = ::testing::TempDir() + "watch." + std::to_string(getpid());
  auto server = std::make_unique<TestServer>(std::vector<std::string>{"--data", data});
  const std::string address = server->address_text();
  const auto set = [&](const char* value) {
    EXPECT_EQ(RunCommand({"set", "a", value}, Environment(address)).exit_code, 0);
  };
  set("0");
  ChildProcess watch({RESILIENT_STORE_BINARY, "watch", "--json"}, Environment(address));
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr("\"snapshot_of\":1"));
  EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""), HasSubstr("\"value\":\"0\""));
  const std::vector<const char*> values = {"1", "2", "3"};
  for (const char* value : values) {
    set(value);
    EXPECT_THAT(watch.ReadLine(In(kPatience)).value_or(""),
                HasSubstr("\"value\":\"" + std::string(value) + "\""));
    server->process().Signal(SIGKILL);
    ASSERT_TRUE(server->process().WaitExit(In(kPatience)));
    server =
        std::make_unique<TestServer>(std::vector<std::string>{"--data", data, "--listen", address});
  }
  watch.Signal(SIGTERM);
  EXPECT_EQ(watch.WaitExit(In(kPatience)), 0) << watch.ErrorText();
  // Neither told twice nor listed anew: there was nothing that it had missed.
  EXPECT_EQ(watch.ReadAll(In(kPatience)), "");
  std::filesystem::remove_all(data);
}

// Two worlds of the largest size are more than a page.
TEST_F(StoreServerCommands, Status_ShowsAllPages) {
  RawClient zero(server_.address());
  RawClient other(server_.address());
  ASSERT_TRUE(zero.SayHello(MakeTestHello(Role::kControl, "demo")));
  ASSERT_TRUE(other.SayHello(MakeTestHello(Role::kControl, "demo")));
  ASSERT_TRUE(zero.SendOp(JoinOp{MakeJoin(0, kWorldSizeMax)}));
  ASSERT_TRUE(other.SendOp(JoinOp{MakeJoin(kWorldSizeMax - 1, kWorldSizeMax)}));
  RawClient third(server_.address());
  ASSERT_TRUE(third.SayHello(MakeTestHello(Role::kControl, "third")));
  ASSERT_TRUE(third.SendOp(JoinOp{MakeJoin(7, kWorldSizeMax)}));
  ASSERT_TRUE(third.Call(CheckOp{{"k"}}));
  const std::string last = std::to_string(kWorldSizeMax - 1);
  const std::string text = Good({"status", "--job", ""});
  EXPECT_THAT(text, HasSubstr("job demo"));
  EXPECT_THAT(text, HasSubstr("\n  1-" + std::to_string(kWorldSizeMax - 2) + " "));
  EXPECT_THAT(text, HasSubstr("job third"));
  EXPECT_THAT(text, HasSubstr("\n  0-6 "));
  EXPECT_THAT(text, HasSubstr("\n  8-"));
  EXPECT_THAT(text, HasSubstr("-" + last + " "));
  EXPECT_THAT(Good({"status", "--job", "", "--json"}), Not(HasSubstr("\"next\"")));
  const std::string one = Good({"status", "--job", "third"});
  EXPECT_THAT(one, HasSubstr("job third"));
  EXPECT_THAT(one, Not(HasSubstr("job demo")));
}

TEST_F(StoreServerCommands, MembersHoldAndRelease) {
  EXPECT_EQ(Good({"members"}), "no members\n");
  RawClient zero(server_.address());
  RawClient one(server_.address());
  const Hello hello = MakeTestHello(Role::kControl, "demo");
  ASSERT_TRUE(zero.SayHello(hello));
  ASSERT_TRUE(one.SayHello(MakeTestHello(Role::kControl, "demo")));
  ASSERT_TRUE(zero.SendOp(JoinOp{MakeJoin(0, 2)}));
  ASSERT_TRUE(one.SendOp(JoinOp{MakeJoin(1, 2)}));
  ASSERT_TRUE(zero.Await<View>(In(kPatience)));
  const std::string members = Good({"members"});
  EXPECT_THAT(members, HasSubstr("GENERATION"));
  EXPECT_THAT(members, HasSubstr(std::to_string(hello.process.pid)));
  EXPECT_THAT(Good({"members", "--json"}), HasSubstr("\"held\": false"));

  EXPECT_EQ(Good({"hold", "--rank", "1", "--for", "90s", "--reason", "gdb"}),
            "held 1 member for at most 90 s\n");
  const auto held = zero.Await<HeldEvent>(In(kPatience));
  ASSERT_TRUE(held);
  EXPECT_EQ(held->rank, 1);
  EXPECT_EQ(held->reason, "gdb");
  EXPECT_THAT(Good({"members"}), HasSubstr("held, "));
  EXPECT_THAT(Good({"status"}), HasSubstr("held, "));
  EXPECT_EQ(Good({"release", "--all", "--json"}), "{\"released\":1}\n");
  EXPECT_THAT(Good({"members"}), Not(HasSubstr("held, ")));

  const CommandOutcome nobody = Run({"hold", "--rank", "7"});
  EXPECT_EQ(nobody.exit_code, 1);
  EXPECT_THAT(nobody.errors, HasSubstr("rank 7"));
  EXPECT_EQ(Run({"hold"}).exit_code, 2);
  EXPECT_EQ(Run({"hold", "--all", "--for", "2h"}).exit_code, 2);
}

TEST_F(StoreServerCommands, Drain_RefusesAStoreInMemoryUnlessForced) {
  RawClient member(server_.address());
  ASSERT_TRUE(member.SayHello(MakeTestHello(Role::kControl, "demo")));
  const CommandOutcome refused = Run({"drain"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.errors, HasSubstr("by force"));
  EXPECT_THAT(Good({"drain", "--force"}), HasSubstr("ends"));
  EXPECT_TRUE(member.Await<DrainingEvent>(In(kPatience)));
  EXPECT_EQ(server_.process().WaitExit(In(kPatience)), 0);
}

TEST_F(StoreServerCommands, Drain_KeepsWhatWasAcknowledged) {
  const std::string data = ::testing::TempDir() + "drain." + std::to_string(getpid());
  TestServer server({"--data", data});
  const std::string address = server.address_text();
  EXPECT_EQ(RunCommand({"set", "k", "v"}, Environment(address)).exit_code, 0);
  EXPECT_EQ(RunCommand({"drain", "--json"}, Environment(address)).exit_code, 0);
  EXPECT_EQ(server.process().WaitExit(In(kPatience)), 0);
  TestServer again({"--data", data, "--listen", address});
  EXPECT_EQ(RunCommand({"get", "k"}, Environment(address)).output, "v");
  std::filesystem::remove_all(data);
}

TEST_F(StoreServerCommands, EachHelp_HasAnExampleAndTheExitCodes) {
  for (const char* command :
       {"status", "report", "members", "keys", "get", "set", "watch", "hold", "release", "drain"}) {
    SCOPED_TRACE(command);
    const std::string help = RunCommand({command, "--help"}).output;
    EXPECT_THAT(help, HasSubstr("Example: resilient-store " + std::string(command)));
    EXPECT_THAT(help, HasSubstr("Exit codes: 0 "));
    if (std::string(command) != "report") {
      EXPECT_THAT(help, HasSubstr("--json"));
    }
  }
}

}  // namespace
}  // namespace resilient::store
