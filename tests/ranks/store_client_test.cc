// Goal: the store client against the real server: every operation, waits across clients, many
// threads on one client, the largest value, exactly-once effects while connections are lost, and a
// membership line that joins, loses its connection and leaves. Method: the real binary as a child
// process, a proxy that cuts connections.
#include <csignal>

#include <atomic>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <resilient/store/client.h>

#include "runtime/base/log.h"
#include "tests/ranks/store_client_proxy.h"
#include "tests/ranks/store_server_support.h"

namespace resilient::store {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

class StoreClientTest : public ::testing::Test {
 protected:
  // A cut connection is a line of log each time.
  void SetUp() override { SetLogLevel(LogLevel::kError); }
  void TearDown() override { SetLogLevel(LogLevel::kWarn); }

  ConnectOptions OptionsFor(const std::string& address) {
    ConnectOptions options;
    options.addresses = {address};
    options.job = "train";
    return options;
  }
  std::shared_ptr<Client> ConnectTo(const std::string& address) {
    Result<std::shared_ptr<Client>> client =
        Connect(OptionsFor(address), {}, clock_, In(kPatience));
    EXPECT_TRUE(client.ok()) << client.status().ToString();
    return client.ok() ? *client : nullptr;
  }
  Client::Call Patient() { return Within(kPatience); }
  Client::Call Within(Duration time) {
    Client::Call call;
    call.deadline = In(time);
    return call;
  }

  SystemClock clock_;
  TestServer server_;
};

TEST_F(StoreClientTest, Operations_EachKind_DoWhatTheySay) {
  auto client = ConnectTo(server_.address_text());
  ASSERT_TRUE(client);
  const Client::Call call = Patient();
  EXPECT_EQ(client->server_id(), server_.server_id());
  EXPECT_TRUE(client->Set("a", "1", call).ok());
  EXPECT_EQ(*client->Get("a", true, call), "1");
  EXPECT_EQ(client->Get("missing", false, call).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(*client->Add("a", 41, call), 42);
  EXPECT_EQ(*client->Add("fresh", -3, call), -3);
  EXPECT_EQ(*client->Get("fresh", false, call), "-3");
  EXPECT_TRUE(client->Set("text", "hello", call).ok());
  EXPECT_EQ(client->Add("text", 1, call).status().code(), StatusCode::kWrongType);
  EXPECT_EQ(*client->CompareSet("text", "hello", "bye", call), "bye");
  EXPECT_EQ(*client->CompareSet("text", "hello", "again", call), "bye");
  EXPECT_EQ(*client->CompareSet("new", "", "made", call), "made");
  EXPECT_EQ(*client->CompareSet("none", "expected", "x", call), "expected");
  EXPECT_TRUE(*client->Check({"a", "text"}, call));
  EXPECT_FALSE(*client->Check({"a", "missing"}, call));
  EXPECT_TRUE(client->Wait({"a", "text", "new"}, call).ok());
  EXPECT_EQ(*client->NumKeys(call), 4);
  EXPECT_TRUE(*client->Delete("a", call));
  EXPECT_FALSE(*client->Delete("a", call));
  EXPECT_EQ(*client->NumKeys(call), 3);
  EXPECT_THAT(*client->StatusJson({}, call), HasSubstr(server_.server_id()));
  const std::string binary("\0\xff\n key", 7);
  EXPECT_TRUE(client->Set(binary, binary, call).ok());
  EXPECT_EQ(*client->Get(binary, true, call), binary);
}

TEST_F(StoreClientTest, BlockingGet_IsEndedByAnotherClientsSet) {
  auto waiter = ConnectTo(server_.address_text());
  auto setter = ConnectTo(server_.address_text());
  auto get = std::async(std::launch::async, [&] { return waiter->Get("late", true, Patient()); });
  auto wait = std::async(std::launch::async, [&] {
    return waiter->Wait({"x", "late"}, Patient());
  });
  EXPECT_TRUE(setter->Set("x", "1", Patient()).ok());
  EXPECT_TRUE(setter->Set("late", "now", Patient()).ok());
  EXPECT_EQ(*get.get(), "now");
  EXPECT_TRUE(wait.get().ok());
}

TEST_F(StoreClientTest, Deadline_OfAWait_IsATimeoutAndTheClientLivesOn) {
  auto client = ConnectTo(server_.address_text());
  Status status = client->Wait({"never", "ever"}, Within(Millis(50)));
  EXPECT_EQ(status.code(), StatusCode::kTimeout);
  EXPECT_THAT(status.message(), HasSubstr("timeout"));
  EXPECT_THAT(status.message(), HasSubstr("never, ever"));
  EXPECT_EQ(client->Get("never", true, Within(Millis(20))).status().code(), StatusCode::kTimeout);
  EXPECT_TRUE(client->Set("never", "1", Patient()).ok());
  EXPECT_EQ(*client->Get("never", true, Patient()), "1");
}

TEST_F(StoreClientTest, EightThreadsOnOneClient_EachGetTheirOwnAnswers) {
  auto client = ConnectTo(server_.address_text());
  constexpr int kThreads = 8;
  constexpr int kRounds = 200;
  std::vector<std::future<bool>> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.push_back(std::async(std::launch::async, [&, t] {
      bool right = true;
      for (int i = 1; i <= kRounds; ++i) {
        const std::string key = "t" + std::to_string(t);
        right &= client->Set(key, std::to_string(i), Patient()).ok();
        right &= *client->Get(key, true, Patient()) == std::to_string(i);
        right &= *client->Add("n" + key, 1, Patient()) == i;
        right &= client->Add("total", 1, Patient()).ok();
      }
      return right;
    }));
  }
  for (auto& thread : threads) EXPECT_TRUE(thread.get());
  EXPECT_EQ(*client->Add("total", 0, Patient()), kThreads * kRounds);
}

TEST_F(StoreClientTest, LargestValue_GoesThereAndBack) {
  auto client = ConnectTo(server_.address_text());
  std::string value(kValueBytesMax, '\0');
  for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<char>(i * 31 + i / 997);
  ASSERT_TRUE(client->Set("large", value, Patient()).ok());
  Result<std::string> back = client->Get("large", true, Patient());
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(*back == value);
  EXPECT_EQ(client->Set("large", value + "x", Patient()).code(), StatusCode::kTooLarge);
  const std::string key(kKeyBytesMax, 'k');
  EXPECT_TRUE(client->Set(key, "v", Patient()).ok());
  EXPECT_EQ(*client->Get(key, true, Patient()), "v");
}

TEST_F(StoreClientTest, ConcurrentAddsOfSeveralClients_SumUp) {
  constexpr int kClients = 4;
  constexpr int kAdds = 250;
  std::vector<std::future<void>> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.push_back(std::async(std::launch::async, [&] {
      auto client = ConnectTo(server_.address_text());
      for (int i = 0; i < kAdds; ++i) ASSERT_TRUE(client->Add("n", 1, Patient()).ok());
    }));
  }
  for (auto& client : clients) client.get();
  EXPECT_EQ(*ConnectTo(server_.address_text())->Add("n", 0, Patient()), kClients * kAdds);
}

TEST_F(StoreClientTest, ConnectionsCutUnderLoad_EveryAddCountsOnce) {
  CuttingProxy proxy(server_.address());
  auto client = ConnectTo(proxy.address());
  proxy.CutEvery(1500);
  constexpr int kThreads = 4;
  constexpr int kAdds = 250;
  std::vector<std::future<std::vector<std::int64_t>>> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.push_back(std::async(std::launch::async, [&] {
      std::vector<std::int64_t> seen;
      for (int i = 0; i < kAdds; ++i) {
        Result<std::int64_t> sum = client->Add("n", 1, Patient());
        EXPECT_TRUE(sum.ok()) << sum.status().ToString();
        if (!sum.ok()) break;
        seen.push_back(*sum);
      }
      return seen;
    }));
  }
  // Each add has its own result: none was applied twice, none answered with another's.
  std::vector<bool> taken(kThreads * kAdds + 1, false);
  for (auto& thread : threads) {
    for (std::int64_t sum : thread.get()) {
      ASSERT_GT(sum, 0);
      ASSERT_LE(sum, kThreads * kAdds);
      EXPECT_FALSE(taken[static_cast<std::size_t>(sum)]);
      taken[static_cast<std::size_t>(sum)] = true;
    }
  }
  EXPECT_GT(proxy.cuts(), 5);
  proxy.CutEvery(0);
  EXPECT_EQ(*client->Add("n", 0, Patient()), kThreads * kAdds);
}

TEST_F(StoreClientTest, Watch_OverLostConnections_TellsOfEachChangeOnce) {
  CuttingProxy proxy(server_.address());
  auto watcher = ConnectTo(proxy.address());
  auto writer = ConnectTo(server_.address_text());
  auto watch = watcher->Watch("k", 0);
  Result<WatchBatch> batch = watch->Next(Patient());
  ASSERT_TRUE(batch.ok()) << batch.status().ToString();
  EXPECT_TRUE(batch->snapshot);
  EXPECT_TRUE(batch->changes.empty());
  EXPECT_EQ(watch->Next(Within(Millis(20))).status().code(), StatusCode::kTimeout);
  proxy.CutEvery(1500);
  constexpr int kSets = 300;
  // The writer is never so far ahead that one batch does not fit between two cuts.
  std::counting_semaphore<8> untold(8);
  auto writing = std::async(std::launch::async, [&] {
    for (int i = 1; i <= kSets; ++i) {
      ASSERT_TRUE(untold.try_acquire_for(kPatience)) << "the watcher does not follow";
      ASSERT_TRUE(writer->Set("k", std::to_string(i), Patient()).ok());
      ASSERT_TRUE(writer->Set("other", "x", Patient()).ok());
    }
  });
  int told = 0;
  while (told < kSets) {
    batch = watch->Next(Patient());
    ASSERT_TRUE(batch.ok()) << batch.status().ToString();
    ASSERT_FALSE(batch->snapshot);
    for (const KeyChange& change : batch->changes) {
      ASSERT_EQ(change.value.value_or("deleted"), std::to_string(++told));
      untold.release();
    }
  }
  writing.get();
  // A watch of another client from a revision that was told.
  auto again = writer->Watch("k", batch->changes.back().revision);
  EXPECT_EQ(again->Next(Patient())->changes, std::vector<KeyChange>{batch->changes.back()});
}

TEST_F(StoreClientTest, WaitOlderThanTheServersMemory_SurvivesALostConnection) {
  CuttingProxy proxy(server_.address());
  auto client = ConnectTo(proxy.address());
  auto get = std::async(std::launch::async, [&] { return client->Get("late", true, Patient()); });
  const Deadline deadline = In(kPatience);
  while (client->StatusJson({}, Patient())->find("\"waits\":1") == std::string::npos) {
    ASSERT_FALSE(deadline.ExpiredAt(clock_.Now())) << "the wait did not arrive";
  }
  for (std::size_t i = 0; i < kInFlightPerSessionMax + 100; ++i) {
    ASSERT_TRUE(client->Add("n", 1, Patient()).ok());
  }
  proxy.Cut();
  EXPECT_TRUE(client->Set("late", "now", Patient()).ok());
  Result<std::string> value = get.get();
  ASSERT_TRUE(value.ok()) << value.status().ToString();
  EXPECT_EQ(*value, "now");
}

TEST_F(StoreClientTest, StoreKilled_CallsEndAtTheirDeadlineWithStoreLost) {
  auto client = ConnectTo(server_.address_text());
  auto get = std::async(std::launch::async,
                        [&] { return client->Get("late", true, Within(Millis(1500))); });
  EXPECT_TRUE(client->Set("k", "v", Patient()).ok());
  server_.process().Signal(SIGKILL);
  ASSERT_TRUE(server_.process().WaitExit(In(kPatience)));
  Status lost = client->Set("k", "w", Within(Millis(100)));
  // Unknown if it went into the connection before its end was seen.
  EXPECT_THAT(lost.code(), AnyOf(StatusCode::kStoreLost, StatusCode::kOutcomeUnknown))
      << lost.ToString();
  EXPECT_THAT(lost.message(), HasSubstr("is the store started?"));
  EXPECT_EQ(get.get().status().code(), StatusCode::kStoreLost);
}

TEST_F(StoreClientTest, StoreRestarted_SaysThatItsKeysAreLost) {
  auto client = ConnectTo(server_.address_text());
  ASSERT_TRUE(client->Set("k", "v", Patient()).ok());
  server_.process().Signal(SIGKILL);
  ASSERT_TRUE(server_.process().WaitExit(In(kPatience)));
  TestServer again({"--listen", server_.address_text()});
  Status lost = client->Get("k", true, Patient()).status();
  EXPECT_EQ(lost.code(), StatusCode::kStoreLost);
  EXPECT_THAT(lost.message(), HasSubstr("restarted"));
}

// Writes down what was called. Thread: thread-safe.
class EventLog final : public RendezvousEvents {
 public:
  void OnView(const View& view) override {
    generation_ = view.generation;
    Note("view of " + std::to_string(view.members.size()));
  }
  void OnRunning(std::uint64_t) override { Note("running"); }
  void OnFence(const Fence& fence) override {
    Note("fence " + std::string(CodeName(fence.cause.code())));
  }
  void OnJoinRefused(std::uint64_t, const Status& why) override {
    Note("refused " + std::string(CodeName(why.code())));
  }
  void OnSessionLost(const Status& why) override {
    Note("lost " + std::string(CodeName(why.code())));
  }
  void OnHeld(Instant) override { Note("held"); }
  // Until `text` was noted; each note is found once, in order.
  bool Await(const std::string& text) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] {
      while (read_ < lines_.size()) {
        if (lines_[read_++] == text) return true;
      }
      return false;
    });
  }
  std::uint64_t generation() const { return generation_; }

 private:
  void Note(std::string text) {
    std::lock_guard lock(mutex_);
    lines_.push_back(std::move(text));
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> lines_;  // Guarded by mutex_.
  std::size_t read_ = 0;            // Guarded by mutex_.
  std::atomic<std::uint64_t> generation_{0};
};

// One seat. Each has an incarnation of its own, as if it were a process of its own.
struct Seat {
  EventLog events;
  std::unique_ptr<Rendezvous> line;
};

class StoreMembershipTest : public StoreClientTest {
 protected:
  std::unique_ptr<Seat> Take(const std::string& address, int rank, int world_size) {
    ConnectOptions options = OptionsFor(address);
    options.incarnation = NewSessionId();
    auto seat = std::make_unique<Seat>();
    seat->line = MakeRendezvous(options, {}, clock_);
    Status started = seat->line->Start(seat->events, In(kPatience));
    EXPECT_TRUE(started.ok()) << started.ToString();
    seat->line->Join(MakeJoin(rank, world_size));
    return seat;
  }
  // Until the world runs on each of `seats`; others may be in it as well.
  void Run(std::vector<Seat*> seats, int world_size = 2) {
    for (Seat* seat : seats) {
      ASSERT_TRUE(seat->events.Await("view of " + std::to_string(world_size)));
      seat->line->Ready(seat->events.generation());
    }
    for (Seat* seat : seats) ASSERT_TRUE(seat->events.Await("running"));
  }
};

TEST_F(StoreMembershipTest, TwoSeats_RunLoseTheirConnectionsAndLeave) {
  CuttingProxy proxy(server_.address());
  auto zero = Take(proxy.address(), 0, 2);
  auto one = Take(proxy.address(), 1, 2);
  Run({zero.get(), one.get()});
  // Both come back within the grace of a lone close, so nobody is fenced.
  proxy.Cut();
  ASSERT_TRUE(zero->events.Await("running"));
  ASSERT_TRUE(one->events.Await("running"));
  Report report;
  report.kind = ReportKind::kCommFailed;
  report.generation = zero->events.generation();
  report.status = Status(StatusCode::kCommFailed, "the test says so");
  zero->line->Send(report);
  ASSERT_TRUE(zero->events.Await("fence COMM_FAILED"));
  ASSERT_TRUE(one->events.Await("fence COMM_FAILED"));
  for (Seat* seat : {zero.get(), one.get()}) {
    JoinRequest join = MakeJoin(seat == zero.get() ? 0 : 1, 2);
    join.generation = report.generation;
    seat->line->Join(join);
  }
  Run({zero.get(), one.get()});
  EXPECT_GT(zero->events.generation(), report.generation);
  zero->line->Close(In(kPatience));
  one->line->Close(In(kPatience));
}

TEST_F(StoreMembershipTest, ReportExit_FencesTheOthersAtOnce) {
  Sleeper worker;
  auto zero = Take(server_.address_text(), 0, 2);
  RawClient lost(server_.address());
  Hello hello = MakeTestHello(Role::kControl, "train");
  hello.process = worker.identity();
  hello.supervised = true;
  ASSERT_TRUE(lost.SayHello(hello));
  ASSERT_TRUE(lost.SendOp(JoinOp{MakeJoin(1, 2)}));
  auto view = lost.Await<View>(In(kPatience));
  ASSERT_TRUE(view);
  ASSERT_TRUE(lost.SendOp(ReadyOp{view->generation}));
  Run({zero.get()});
  ExitNotice notice;
  notice.rank = 1;
  notice.pid = worker.identity().pid;
  notice.start_time = worker.identity().start_time;
  notice.signal = 9;
  Status told = ReportExit(OptionsFor(server_.address_text()), notice, clock_, In(kPatience));
  EXPECT_TRUE(told.ok()) << told.ToString();
  EXPECT_TRUE(zero->events.Await("fence RANK_LOST"));
  zero->line->Close(In(kPatience));
}

}  // namespace
}  // namespace resilient::store
