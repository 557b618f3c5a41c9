// Goal: the commands of resilient-store do what their help says, and each bad input ends with one
// clear line and the right exit code. Method: the real binary, run to its end.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

using testing::TempDir;

void ExpectOneLine(const CommandOutcome& outcome, int exit_code, const std::string& mention) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.errors;
  EXPECT_EQ(std::count(outcome.errors.begin(), outcome.errors.end(), '\n'), 1) << outcome.errors;
  EXPECT_NE(outcome.errors.find(mention), std::string::npos) << outcome.errors;
}

TEST(StoreServerCli, WildcardAddresses_RefusedWithTheFix) {
  for (const char* address : {"0.0.0.0:0", "0:0", "[::]:0", "*:0", ":0", "[::ffff:0.0.0.0]:0"}) {
    SCOPED_TRACE(address);
    ExpectOneLine(RunCommand({"serve", "--listen", address}), 2, "--listen 127.0.0.1:29400");
  }
}

TEST(StoreServerCli, PortInUse_ExitsWithThree) {
  TestServer server;
  ExpectOneLine(RunCommand({"serve", "--listen", server.address_text()}), 3, server.address_text());
}

TEST(StoreServerCli, BadUsage_ExitsWithTwo) {
  ExpectOneLine(RunCommand({}), 2, "--help");
  ExpectOneLine(RunCommand({"frobnicate"}), 2, "no command 'frobnicate'");
  ExpectOneLine(RunCommand({"serve", "--listen", "localhost"}), 2, "--listen");
  ExpectOneLine(RunCommand({"serve", "--linger", "soon"}), 2, "'soon' is not a duration");
  ExpectOneLine(RunCommand({"serve", "--lease-ttl", "200ms"}), 2, "the least is 1s");
  ExpectOneLine(RunCommand({"serve", "--log-level", "loud"}), 2, "'loud' is not a log level");
  ExpectOneLine(RunCommand({"status"}), 2, "RESILIENT_STORE");
  ExpectOneLine(RunCommand({"get", "k", "--store", "127.0.0.1:1"}), 2, "RESILIENT_JOB");
  ExpectOneLine(RunCommand({"report", "--rank", "0", "--pid", "1"}), 2, "--exit-code");
  ExpectOneLine(RunCommand({"status"}, {"RESILIENT_LEASE_TTL=never"}), 2, "RESILIENT_LEASE_TTL");
}

TEST(StoreServerCli, UnreachableStore_OneLineAndOne) {
  HostPort free;
  {
    const auto listener = ListenTcp({"127.0.0.1", 0}, 1);
    ASSERT_TRUE(listener.ok());
    free = *LocalAddress(*listener);
  }
  const std::string address = FormatHostPort(free);
  ExpectOneLine(RunCommand({"status", "--store", address, "--timeout", "300ms"}), 1, address);
  ExpectOneLine(RunCommand({"get", "k", "--job", "j", "--store", address, "--timeout", "300ms"}), 1,
                address);
}

TEST(StoreServerCli, AddressFile_IsWrittenWholeOnceListening) {
  const std::string path = TempDir() + "address." + std::to_string(getpid());
  TestServer server({"--address-file", path});
  std::ifstream file(path);
  std::string address;
  std::string id;
  std::getline(file, address);
  std::getline(file, id);
  EXPECT_EQ(address, server.address_text());
  EXPECT_EQ(id, server.server_id());
  std::filesystem::remove(path);
}

TEST(StoreServerCli, AddressFileThatCannotBeWritten_Ends) {
  const CommandOutcome outcome =
      RunCommand({"serve", "--log-level", "off", "--address-file", "/nonexistent/address"});
  ExpectOneLine(outcome, 1, "/nonexistent/address");
}

TEST(StoreServerCli, HostName_IsToldAsGiven) {
  TestServer server({"--listen", "localhost:0"});
  EXPECT_EQ(server.address().host, "localhost");
  const auto status = RunCommand({"status", "--store", server.address_text()});
  EXPECT_EQ(status.exit_code, 0) << status.errors;
}

TEST(StoreServerCli, SetAndGet) {
  TestServer server;
  const std::vector<std::string> environment = {"RESILIENT_STORE=" + server.address_text(),
                                                "RESILIENT_JOB=demo"};
  const auto set = RunCommand({"set", "color", "green"}, environment);
  EXPECT_EQ(set.exit_code, 0) << set.errors;
  const auto got = RunCommand({"get", "color"}, environment);
  EXPECT_EQ(got.exit_code, 0) << got.errors;
  EXPECT_EQ(got.output, "green");
  ExpectOneLine(RunCommand({"get", "colour"}, environment), 1, "colour");
}

TEST(StoreServerCli, Status_ShowsMembersAndFilters) {
  TestServer server;
  Hello hello = MakeTestHello(Role::kControl, "trains");
  RawClient member(server.address());
  ASSERT_TRUE(member.SayHello(hello));
  ASSERT_TRUE(member.SendOp(JoinOp{MakeJoin(0, 1)}));
  ASSERT_TRUE(member.Await<View>(In(kPatience)));

  const auto table = RunCommand({"status", "--store", server.address_text()});
  EXPECT_EQ(table.exit_code, 0) << table.errors;
  for (const std::string& text :
       {std::string("job trains"), std::string("RANK"), std::string("LEASE LEFT"),
        std::string("BUILDING"), hello.process.host, std::to_string(hello.process.pid)}) {
    EXPECT_NE(table.output.find(text), std::string::npos) << text << " is not in\n" << table.output;
  }
  const auto other =
      RunCommand({"status", "--store", server.address_text(), "--job", "another", "--json"});
  EXPECT_EQ(other.exit_code, 0) << other.errors;
  EXPECT_EQ(other.output.find("trains"), std::string::npos) << other.output;
  EXPECT_NE(other.output.find("\"jobs\": []"), std::string::npos) << other.output;
}

TEST(StoreServerCli, Report_TellsTheOthersHowItEnded) {
  TestServer server;
  Sleeper victim;
  RawClient survivor(server.address());
  RawClient dead(server.address());
  Hello hello = MakeTestHello(Role::kControl);
  ASSERT_TRUE(survivor.SayHello(hello));
  Hello reported = MakeTestHello(Role::kControl);
  reported.process = victim.identity();
  ASSERT_TRUE(dead.SayHello(reported));
  ASSERT_TRUE(survivor.SendOp(JoinOp{MakeJoin(0, 2)}));
  ASSERT_TRUE(dead.SendOp(JoinOp{MakeJoin(1, 2)}));
  const auto view = survivor.Await<View>(In(kPatience));
  ASSERT_TRUE(view);
  const auto report = RunCommand({"report", "--store", server.address_text(), "--job", "job",
                                  "--rank", "1", "--pid", std::to_string(victim.identity().pid),
                                  "--start-time", std::to_string(victim.identity().start_time),
                                  "--signal", "11", "--text", "it was the GPU"});
  EXPECT_EQ(report.exit_code, 0) << report.errors;
  const auto fence = survivor.Await<Fence>(In(kPatience));
  ASSERT_TRUE(fence);
  EXPECT_EQ(fence->cause.code(), StatusCode::kRankLost);
  EXPECT_NE(fence->cause.message().find("signal 11"), std::string::npos) << fence->cause.message();
}

TEST(StoreServerCli, ParentDeath_EndsTheServer) {
  // The shell ends when its own output pipe is asked to; the server holds the pipe's other copy.
  ChildProcess shell(
      {"/bin/sh", "-c",
       std::string(RESILIENT_STORE_BINARY) + " serve --print-address --parent-death & wait"});
  ASSERT_TRUE(shell.ReadLine(In(kPatience)));
  shell.Signal(SIGKILL);
  const Instant killed = Now();
  shell.ReadAll(In(kPatience));  // Ends when the server, the last holder, is gone.
  EXPECT_LT(Now() - killed, std::chrono::seconds(5));
}

TEST(StoreServerCli, Version) {
  EXPECT_EQ(RunCommand({"version"}).output, RunCommand({"--version"}).output);
}

}  // namespace
}  // namespace resilient::store
