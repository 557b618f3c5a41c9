// Goal: at each limit of the server everything still works, beyond it the one who asks is refused
// with a text that says what to do, and nobody else notices. Method: the real binary with small
// limits, bare sockets.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/core/keyspace.h"
#include "tests/ranks/http_support.h"
#include "tests/ranks/store_limits_support.h"
#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

// `count` waits for one value of 4 MiB: its arrival puts them all before a peer that does not read.
std::unique_ptr<RawClient> Waiting(const TestServer& server, int count) {
  auto client = Greeted(server);
  for (int i = 0; i < count; ++i) EXPECT_TRUE(client->SendOp(GetOp{"big", true}));
  // On the same connection: answered after all waits were registered.
  EXPECT_TRUE(client->Call(CheckOp{{"big"}}));
  return client;
}

void SetBig(RawClient& client) {
  const auto set = client.Call(SetOp{"big", std::string(4 * kMebi, 'x')});
  ASSERT_TRUE(set && set->status.ok());
}

TEST(StoreLimits, Option_RefusesWhatIsNoLimit) {
  const auto refused = [](const std::string& limit, const std::string& mention) {
    const CommandOutcome outcome = RunCommand({"serve", "--limit", limit});
    EXPECT_EQ(outcome.exit_code, 2) << limit << ": " << outcome.errors;
    EXPECT_THAT(outcome.errors, HasSubstr(mention)) << limit;
    EXPECT_EQ(std::count(outcome.errors.begin(), outcome.errors.end(), '\n'), 1) << outcome.errors;
  };
  refused("colours=3", "the names are connections, before-hello");
  refused("connections", "from 1 to 131072");
  refused("connections=", "from 1 to 131072");
  refused("connections=0", "from 1 to 131072");
  refused("connections=131073", "from 1 to 131072");
  refused("connections=12x", "from 1 to 131072");
  refused("connections=1KiB", "from 1 to 131072");
  refused("bytes-per-job=3GiB", "from 1KiB to 2GiB");
  refused("bytes-per-job=99999999999999999999", "from 1KiB to 2GiB");
  refused("bytes-per-job=99999999999999999GiB", "from 1KiB to 2GiB");
  EXPECT_EQ(RunCommand({"serve", "--lease-ttl", "61min"}).exit_code, 2);
  EXPECT_THAT(RunCommand({"serve", "--help"}).output, HasSubstr("output-total-bytes"));
}

TEST(StoreLimits, Values_AreShownInMetricsAndWelcome) {
  TestServer server(WithLimits({"bytes-per-job=2MiB", "jobs=3"}));
  Samples samples = Scrape(server);
  EXPECT_EQ(samples["resilient_store_limit{limit=\"bytes-per-job\"}"], 2 * kMebi);
  EXPECT_EQ(samples["resilient_store_limit{limit=\"jobs\"}"], 3);
  EXPECT_EQ(samples["resilient_store_limit{limit=\"value-bytes\"}"], kValueBytesMax);
  EXPECT_GT(samples["resilient_store_limit{limit=\"connections\"}"], 0);
  RawClient client(server.address());
  const auto welcome = client.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(welcome);
  EXPECT_EQ(welcome->welcome->value_bytes_max, kValueBytesMax);
  EXPECT_EQ(welcome->welcome->keys_per_request_max, kKeysPerRequestMax);
  EXPECT_EQ(welcome->welcome->requests_in_flight_max, kInFlightPerSessionMax);
  EXPECT_EQ(welcome->welcome->frame_body_bytes_max, kMaxFrameBody);
}

TEST(StoreLimits, KeysPerJob_AtTheLimitAndBeyond) {
  TestServer server(WithLimits({"keys-per-job=2"}));
  const auto client = Greeted(server);
  EXPECT_TRUE(client->Call(SetOp{"a", ""})->status.ok());
  EXPECT_TRUE(client->Call(SetOp{"b", ""})->status.ok());
  EXPECT_EQ(client->Call(SetOp{"c", ""})->status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(client->Call(SetOp{"b", "again"})->status.ok());
  EXPECT_TRUE(Greeted(server, "other")->Call(SetOp{"c", ""})->status.ok());
}

TEST(StoreLimits, QueueItems_AtTheLimitAndBeyond) {
  TestServer server(WithLimits({"queue-items=2"}));
  const auto client = Greeted(server);
  EXPECT_TRUE(client->Call(QueuePushOp{"q", ""})->status.ok());
  EXPECT_TRUE(client->Call(QueuePushOp{"q", ""})->status.ok());
  EXPECT_EQ(client->Call(QueuePushOp{"q", ""})->status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(client->Call(QueuePopOp{"q", false})->status.ok());
  EXPECT_TRUE(client->Call(QueuePushOp{"q", ""})->status.ok());
}

TEST(StoreLimits, BytesOfOneJobAndOfAll_AtTheLimitAndBeyond) {
  TestServer server(WithLimits({"bytes-per-job=2KiB", "bytes=3KiB"}));
  const auto one = Greeted(server, "one");
  const auto two = Greeted(server, "two");
  // 2 KiB with the key, and what keeping it takes.
  EXPECT_TRUE(one->Call(SetOp{"k", std::string(2047 - kKeyOverhead, 'v')})->status.ok());
  auto beyond = one->Call(AppendOp{"k", "v"});
  EXPECT_EQ(beyond->status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(beyond->status.message(), HasSubstr("the job take 2048 of 2048 bytes"));
  // Beyond what the first one leaves, up to an even share of all.
  EXPECT_TRUE(two->Call(SetOp{"k", std::string(1535 - kKeyOverhead, 'v')})->status.ok());
  beyond = two->Call(AppendOp{"k", "v"});
  EXPECT_EQ(beyond->status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(beyond->status.message(), HasSubstr("all jobs take 3584 of 3072 bytes"));
  // What is there can be read, and room that is given back can be used by the other.
  EXPECT_EQ(two->Call(GetOp{"k", false})->value.size(), 1535 - kKeyOverhead);
  EXPECT_TRUE(one->Call(DeleteOp{"k"})->status.ok());
  EXPECT_TRUE(two->Call(AppendOp{"k", "v"})->status.ok());
}

TEST(StoreLimits, Jobs_AtTheLimitAndBeyond) {
  TestServer server(WithLimits({"jobs=2"}));
  const auto one = Greeted(server, "one");
  const auto two = Greeted(server, "two");
  RawClient three(server.address());
  const auto refused = three.SayHello(MakeTestHello(Role::kRequest, "three"));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status.code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(three.ClosedBy(In(kPatience)));
  ExpectWorks(*two);
}

TEST(StoreLimits, Sessions_AtTheLimitAndBeyond) {
  TestServer server(WithLimits({"sessions=2"}));
  const auto one = Greeted(server);
  const auto two = Greeted(server);
  RawClient three(server.address());
  const auto refused = three.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status.code(), StatusCode::kResourceExhausted);
  ExpectWorks(*one);
}

TEST(StoreLimits, Sessions_AFloodOfOneJobKeepsNobodyOut) {
  TestServer server(WithLimits({"sessions=8"}));
  const auto other = Greeted(server, "other");
  for (int i = 0; i < 40; ++i) {
    const auto flood = Greeted(server, "flood");
    ASSERT_TRUE(flood->Call(SetOp{"k", "v"}));  // Its answer is never acknowledged.
  }
  ExpectWorks(*other);
  ExpectWorks(*Greeted(server, "third"));
  EXPECT_EQ(RunCommand({"status", "--store", server.address_text()}).exit_code, 0);
  EXPECT_LE(Scrape(server)["resilient_store_sessions"], 8);
}

TEST(StoreLimits, Sessions_OfClientsThatSayGoodbyeAreGone) {
  TestServer server(WithLimits({}));
  const auto there = Greeted(server);
  for (int i = 0; i < 5; ++i) {
    const auto set =
        RunCommand({"set", "k", "v", "--store", server.address_text(), "--job", "job"});
    ASSERT_EQ(set.exit_code, 0) << set.errors;
  }
  const SystemClock clock;
  for (const Deadline end = In(kPatience); Scrape(server)["resilient_store_sessions"] != 1;) {
    ASSERT_FALSE(end.ExpiredAt(clock.Now()));
  }
  ExpectWorks(*there);
}

TEST(StoreLimits, Connections_BeyondAreToldAndTheCommandLineStillGetsIn) {
  TestServer server(WithLimits({"connections=3"}));
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 3; ++i) clients.push_back(Greeted(server));
  RawClient late(server.address());
  const auto refused = late.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(refused->status.message(), HasSubstr("3 connections"));
  EXPECT_TRUE(late.ClosedBy(In(kPatience)));
  EXPECT_EQ(RunCommand({"status", "--store", server.address_text()}).exit_code, 0);
  ExpectWorks(*clients[0]);
  EXPECT_EQ(Scrape(server)["resilient_store_connections_refused_total{reason=\"connections\"}"], 1);
  // A client of ours keeps trying, and comes in when there is room.
  clients.pop_back();
  const auto set = RunCommand({"set", "k", "v", "--store", server.address_text(), "--job", "job"});
  EXPECT_EQ(set.exit_code, 0) << set.errors;
}

TEST(StoreLimits, FewOpenFiles_AreSaidAtTheStartAndInTheRefusal) {
  ChildProcess shell(
      {"/bin/sh", "-c",
       std::string("ulimit -n 200; exec ") + RESILIENT_STORE_BINARY + " serve --print-address"});
  const auto line = shell.ReadLine(In(kPatience));
  ASSERT_TRUE(line) << shell.ErrorText();
  const HostPort address = *ParseHostPort(line->substr(0, line->find(' ')));
  EXPECT_THAT(shell.ErrorText(), HasSubstr("takes 104 connections instead of 65536"));
  EXPECT_THAT(shell.ErrorText(), HasSubstr("limit of open files (ulimit -n)"));
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 104; ++i) {
    clients.push_back(std::make_unique<RawClient>(address));
    const auto welcome = clients.back()->SayHello(MakeTestHello(Role::kRequest));
    ASSERT_TRUE(welcome && welcome->status.ok()) << i;
  }
  RawClient late(address);
  const auto refused = late.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(refused);
  EXPECT_THAT(refused->status.message(), HasSubstr("ulimit -n"));
  // Far beyond, and silent: they give way to each other and to whoever speaks; nothing runs out.
  std::vector<std::unique_ptr<RawClient>> crowd;
  for (int i = 0; i < 100; ++i) crowd.push_back(std::make_unique<RawClient>(address));
  EXPECT_TRUE(crowd.front()->ClosedBy(In(kPatience)));
  EXPECT_THAT(shell.ErrorText(), HasSubstr("it did not say Hello in 0.1"));
  RawClient later(address);
  const auto again = later.SayHello(MakeTestHello(Role::kRequest));
  ASSERT_TRUE(again);
  EXPECT_THAT(again->status.message(), HasSubstr("ulimit -n"));
  ExpectWorks(*clients[0]);
}

TEST(StoreLimits, HelloSeconds_EndTheSilent) {
  TestServer server(WithLimits({"hello-seconds=1"}));
  const Instant start = Now();
  RawClient silent(server.address());
  EXPECT_TRUE(silent.ClosedBy(In(kPatience)));
  EXPECT_GE(Now() - start, Millis(900));
  EXPECT_LT(Now() - start, seconds(4));
  EXPECT_EQ(Scrape(server)["resilient_store_connections_refused_total{reason=\"silent\"}"], 1);
}

TEST(StoreLimits, SilentStrangers_KeepNobodyOutForLong) {
  constexpr int kStrangers = 640;
  TestServer server(WithLimits({"before-hello=64"}));
  std::vector<std::unique_ptr<RawClient>> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    strangers.push_back(std::make_unique<RawClient>(server.address()));
  }
  const Instant start = Now();
  RawClient rank(server.address());
  EXPECT_TRUE(rank.SayHello(MakeTestHello(Role::kControl)).has_value());
  // Ten times the places there are, each for a tenth of a second; it was a second.
  EXPECT_LT(Now() - start, seconds(4));
  EXPECT_FALSE(strangers.back()->ClosedBy(In(Duration::zero()))) << "there is room for it now";
}

TEST(StoreLimits, HeldBytes_ClientsAreLeftUnreadUntilTheDiskHasCaughtUp) {
  constexpr int kSets = 16;
  const std::string data = ::testing::TempDir() + "limits." + std::to_string(getpid());
  {
    std::vector<std::string> arguments = WithLimits({"held-bytes=1MiB"});
    arguments.insert(arguments.end(), {"--data", data, "--durability", "machine"});
    TestServer server(arguments);
    const auto client = Greeted(server);
    const auto witness = Greeted(server);
    for (int i = 0; i < kSets; ++i) {
      ASSERT_TRUE(client->SendOp(SetOp{"k" + std::to_string(i % 4), std::string(kMebi, 'v')}));
    }
    ExpectWorks(*witness);
    for (int i = 0; i < kSets; ++i) {
      const auto reply = client->Await<Reply>(In(kPatience));
      ASSERT_TRUE(reply) << i;
      EXPECT_TRUE(reply->status.ok()) << reply->status.ToString();
    }
    EXPECT_EQ(Scrape(server)["resilient_store_held_bytes"], 0);
  }
  std::filesystem::remove_all(data);
}

TEST(SlowConsumers, OutputOfOne_IsCutAndNamed) {
  TestServer server(WithLimits({"output-bytes=16MiB"}));
  const auto slow = Waiting(server, 12);  // 48 MiB; the kernel may take some of them.
  const auto witness = Greeted(server);
  SetBig(*witness);
  ExpectWorks(*witness);
  EXPECT_TRUE(Said(server, "it does not read")) << server.process().ErrorText();
  EXPECT_THAT(server.process().ErrorText(), HasSubstr("the limit is 16 MiB"));
  EXPECT_THAT(server.process().ErrorText(),
              HasSubstr("pid " + std::to_string(MakeTestHello(Role::kRequest).process.pid)));
  EXPECT_TRUE(slow->ClosedBy(In(kPatience)));
  EXPECT_EQ(Scrape(server)["resilient_store_connections_refused_total{reason=\"slow\"}"], 1);
  EXPECT_EQ(Scrape(server)["resilient_store_output_bytes"], 0);
}

TEST(SlowConsumers, OutputOfAll_TheWorstIsCutAndTheOthersLiveOn) {
  // The kernel's buffers take between nothing and 36 MiB for each connection (tcp_wmem and
  // tcp_rmem). Whatever they take, the worst is beyond the limit and the others together are not.
  TestServer server(WithLimits({"output-bytes=128MiB", "output-total-bytes=20MiB"}));
  const auto worst = Waiting(server, 16);  // 64 MiB.
  const auto second = Waiting(server, 2);  // 8 MiB each.
  const auto third = Waiting(server, 2);
  const auto witness = Greeted(server);
  SetBig(*witness);
  ExpectWorks(*witness);
  EXPECT_TRUE(Said(server, "the most of")) << server.process().ErrorText();
  EXPECT_TRUE(worst->ClosedBy(In(kPatience)));
  EXPECT_LE(Scrape(server)["resilient_store_output_bytes"], 20.0 * kMebi);
  for (RawClient* client : {second.get(), third.get()}) {
    for (int i = 0; i < 2; ++i) {
      const auto reply = client->Await<Reply>(In(kPatience));
      ASSERT_TRUE(reply) << i;
      EXPECT_EQ(reply->value.size(), 4 * kMebi);
    }
  }
  EXPECT_EQ(Scrape(server)["resilient_store_connections_refused_total{reason=\"slow\"}"], 1);
}

std::string ValueOf(int rank, int count) {
  return std::string(12 * kMebi / static_cast<std::size_t>(count), static_cast<char>('a' + rank));
}

// All ranks of an exchange but the last one, which has ended it: an answer of 12 MiB, and a small
// one, are on their way to each of them and not read.
std::vector<std::unique_ptr<RawClient>> Exchanging(const TestServer& server, int count) {
  std::vector<std::unique_ptr<RawClient>> ranks;
  for (int i = 0; i + 1 < count; ++i) {
    ranks.push_back(Greeted(server));
    ranks.back()->ShrinkReceiveBuffer();
    EXPECT_TRUE(ranks.back()->SendOp(ExchangeOp{"all", i, count, ValueOf(i, count)}));
    EXPECT_TRUE(ranks.back()->Call(CheckOp{{"end"}}));  // Answered when the other has arrived.
    EXPECT_TRUE(ranks.back()->SendOp(GetOp{"end", true}));
  }
  const auto last = Greeted(server);
  EXPECT_TRUE(last->Call(ExchangeOp{"all", count - 1, count, ValueOf(count - 1, count)}));
  EXPECT_TRUE(last->Call(SetOp{"end", "x"}));
  return ranks;
}

void ExpectAnswers(RawClient& rank, int count) {
  const auto reply = rank.Await<Reply>(In(kPatience));
  ASSERT_TRUE(reply);
  ASSERT_EQ(reply->values.size(), static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    EXPECT_EQ(reply->values[static_cast<std::size_t>(i)], ValueOf(i, count));
  }
  const auto end = rank.Await<Reply>(In(kPatience));
  ASSERT_TRUE(end);
  EXPECT_EQ(end->value, "x");
}

TEST(SlowConsumers, WhatIsTheSameForAll_CountsOnceAndReachesAll) {
  constexpr int kRanks = 9;  // 96 MiB have to go out, of which the kernel takes 4 or 5 for each.
  TestServer server(WithLimits({"output-bytes=128MiB", "output-total-bytes=16MiB"}));
  const auto ranks = Exchanging(server, kRanks);
  EXPECT_LE(Scrape(server)["resilient_store_output_bytes"], 16.0 * kMebi);
  for (const auto& rank : ranks) ExpectAnswers(*rank, kRanks);
  EXPECT_EQ(Scrape(server)["resilient_store_connections_refused_total{reason=\"slow\"}"], 0);
  EXPECT_EQ(Scrape(server)["resilient_store_output_bytes"], 0);
}

TEST(SlowConsumers, Shutdown_SendsWhatIsUnreadBeforeItEndsConnections) {
  // One that reads: a server gives each connection a second from the signal on, which several, one
  // after the other, exceed on a busy machine.
  constexpr int kRanks = 2;
  TestServer server(WithLimits({}));
  const auto ranks = Exchanging(server, kRanks);
  server.process().Signal(SIGTERM);
  for (const auto& rank : ranks) {
    ExpectAnswers(*rank, kRanks);
    EXPECT_TRUE(rank->ClosedBy(In(kPatience)));
  }
}

TEST(SlowConsumers, NoProgress_IsCutAfterItsTime) {
  TestServer server(WithLimits({"output-bytes=128MiB", "slow-seconds=1"}));
  const auto slow = Waiting(server, 16);  // 64 MiB: below the limit of one, above the kernel's.
  const auto witness = Greeted(server);
  const Instant start = Now();
  SetBig(*witness);
  EXPECT_TRUE(Said(server, "it has read nothing for 1 s")) << server.process().ErrorText();
  EXPECT_GE(Now() - start, Millis(900));
  EXPECT_TRUE(slow->ClosedBy(In(kPatience)));
  ExpectWorks(*witness);
}

// As many as both processes have descriptors for, up to `most`.
void ExpectManyAreWelcomeAndCostLittle(std::size_t most) {
  constexpr std::size_t kOwn = 128;     // Descriptors of this test besides.
  constexpr std::size_t kAtOnce = 200;  // Below what may be open before Hello.
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  const std::size_t count = std::min<std::size_t>(most, limit.rlim_max - kOwn);
  Hello hello = MakeTestHello(Role::kRequest);
  TestServer server(WithLimits({}));
  const std::size_t before = ResidentBytes(server.process().pid());
  const Instant start = Now();
  std::vector<std::unique_ptr<RawClient>> clients;
  while (clients.size() < count) {
    const std::size_t first = clients.size();
    for (std::size_t i = first; i < std::min(count, first + kAtOnce); ++i) {
      clients.push_back(std::make_unique<RawClient>(server.address()));
      hello.session = "session-" + std::to_string(i);
      clients.back()->SendHello(hello);
    }
    for (std::size_t i = first; i < clients.size(); ++i) {
      const auto welcome = clients[i]->Await<Reply>(In(kPatience));
      ASSERT_TRUE(welcome && welcome->status.ok()) << i;
    }
  }
  const std::chrono::duration<double> took = Now() - start;
  const std::size_t bytes = (ResidentBytes(server.process().pid()) - before) / count;
  std::printf("%zu idle clients in %.1f s, %zu bytes of the server for each\n", count, took.count(),
              bytes);
  if (!kSanitized) {
    EXPECT_LT(bytes, 16u << 10);
  }
  EXPECT_EQ(Scrape(server)["resilient_store_connections"], count);
  ExpectWorks(*clients.front());
  ExpectWorks(*clients.back());
}

TEST(ManyConnections, Thousands_AreWelcomeAndCostLittle) {
  ExpectManyAreWelcomeAndCostLittle(3000);
}

// Takes 8 s and more; run by --gtest_also_run_disabled_tests.
TEST(ManyConnections, DISABLED_TwentyThousand_AreWelcomeAndCostLittle) {
  ExpectManyAreWelcomeAndCostLittle(20000);
}

// Each request copies 8 MiB before it is refused; all of them, and one of another job, are there
// when the server looks.
TEST(StoreTurns, ManyHeavyRequestsOfOneJob_LeaveAnotherItsTurn) {
  constexpr int kClients = 8;
  constexpr int kEach = 16;
  TestServer server(WithLimits({}));
  const auto owner = Greeted(server, "tenant");
  ASSERT_TRUE(owner->Call(SetOp{"k", std::string(8 * kMebi, 'v')})->status.ok());
  std::vector<std::unique_ptr<RawClient>> tenants;
  for (int i = 0; i < kClients; ++i) tenants.push_back(Greeted(server, "tenant"));
  const auto other = Greeted(server, "other");

  server.process().Signal(SIGSTOP);
  for (const auto& tenant : tenants) {
    for (int i = 0; i < kEach; ++i) ASSERT_TRUE(tenant->SendOp(MultiGetOp{{"k", "k", "k"}}));
  }
  ASSERT_TRUE(other->SendOp(CheckOp{{"k"}}));
  server.process().Signal(SIGCONT);

  EXPECT_TRUE(other->Await<Reply>(In(kPatience)));
  Samples samples = Scrape(server);
  EXPECT_LT(
      samples["resilient_store_requests_total{operation=\"multi_get\",outcome=\"too_large\"}"],
      kClients * kEach / 2);
  EXPECT_GT(samples["resilient_store_deferred_total"], 0);
  for (const auto& tenant : tenants) {
    for (int i = 0; i < kEach; ++i) {
      const std::optional<Reply> reply = tenant->Await<Reply>(In(kPatience));
      ASSERT_TRUE(reply);
      EXPECT_EQ(reply->status.code(), StatusCode::kTooLarge);
    }
  }
}

// Members are heard in time, but not all of another job's first.
TEST(StoreTurns, ManyBeatsOfOneJob_LeaveAnotherItsTurn) {
  constexpr int kMembers = 200;
  constexpr int kEach = 64;
  TestServer server(WithLimits({}));
  std::vector<std::unique_ptr<RawClient>> tenants;
  for (int i = 0; i < kMembers; ++i) {
    tenants.push_back(std::make_unique<RawClient>(server.address()));
    ASSERT_TRUE(tenants.back()->SayHello(MakeTestHello(Role::kControl, "tenant")));
  }
  RawClient other(server.address());
  ASSERT_TRUE(other.SayHello(MakeTestHello(Role::kControl, "other")));

  server.process().Signal(SIGSTOP);
  for (const auto& tenant : tenants) {
    for (int i = 0; i < kEach; ++i) ASSERT_TRUE(tenant->Send({.op = HeartbeatOp{}}));
  }
  ASSERT_TRUE(other.Send({.op = HeartbeatOp{}}));
  server.process().Signal(SIGCONT);

  EXPECT_TRUE(other.Await<HeartbeatAckEvent>(In(kPatience)));
  const auto answered = [](const auto& tenant) { return tenant->HasAnswer(); };
  EXPECT_LT(std::ranges::count_if(tenants, answered), kMembers / 2);
  for (const auto& tenant : tenants) {
    for (int i = 0; i < kEach; ++i) {
      ASSERT_TRUE(tenant->Await<HeartbeatAckEvent>(In(kPatience)));
    }
  }
}

// More than are flushed in one turn.
TEST(StoreTurns, ManyWaitersOfOneKey_AreAllAnswered) {
  constexpr int kWaiters = 1500;
  TestServer server(WithLimits({}));
  std::vector<std::unique_ptr<RawClient>> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.push_back(Greeted(server));
    ASSERT_TRUE(waiters.back()->SendOp(WaitOp{{"k"}}));
    ASSERT_TRUE(waiters.back()->SendOp(CheckOp{{"k"}}));
    ASSERT_TRUE(waiters.back()->Await<Reply>(In(kPatience)));
  }
  ASSERT_TRUE(Greeted(server)->Call(SetOp{"k", ""}));
  for (const auto& waiter : waiters) {
    const std::optional<Reply> reply = waiter->Await<Reply>(In(kPatience));
    ASSERT_TRUE(reply);
    EXPECT_TRUE(reply->status.ok());
  }
}

}  // namespace
}  // namespace resilient::store
