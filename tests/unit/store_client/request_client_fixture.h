#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <resilient/store/client.h>

#include "tests/unit/store_client/scripted_server.h"

namespace resilient::store {

// The test plays the server step by step while calls run on other threads.
class RequestClientTest : public ::testing::Test {
 protected:
  ConnectOptions Options() {
    ConnectOptions options;
    options.addresses = {server_.address()};
    options.job = "train";
    options.session = "0123456789abcdef0123456789abcdef";
    return options;
  }

  Deadline In(Duration time) { return Deadline::After(clock_.Now(), time); }
  Client::Call Within(Duration time) {
    Client::Call call;
    call.deadline = In(time);
    return call;
  }
  Client::Call Patient() { return Within(kPatience); }

  std::future<Result<std::shared_ptr<Client>>> StartConnect(ConnectOptions options,
                                                            Deadline deadline) {
    return std::async(std::launch::async, [this, options, deadline] {
      return Connect(options, interrupt_, clock_, deadline);
    });
  }

  // A connected client; the server's side of its connection is `line_`.
  std::shared_ptr<Client> Connected() {
    auto connecting = StartConnect(Options(), In(kPatience));
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
    hello_ = line_->Greet(TestWelcome());
    Result<std::shared_ptr<Client>> client = connecting.get();
    EXPECT_TRUE(client.ok()) << client.status().ToString();
    return client.ok() ? *client : nullptr;
  }

  // The connection breaks and the client comes back.
  void Break(const Welcome& welcome) {
    line_.reset();
    line_ = std::make_unique<ScriptedConnection>(server_.Accept());
    EXPECT_EQ(line_->Greet(welcome), hello_);
  }

  std::future<Result<std::int64_t>> StartAdd(Client& client, std::string key, Client::Call call) {
    return std::async(std::launch::async,
                      [&client, key, call] { return client.Add(key, 1, call); });
  }
  std::future<Result<std::string>> StartGet(Client& client, std::string key, Client::Call call) {
    return std::async(std::launch::async,
                      [&client, key, call] { return client.Get(key, true, call); });
  }
  std::future<Status> StartWait(Client& client, std::vector<std::string> keys, Client::Call call) {
    return std::async(std::launch::async,
                      [&client, keys, call] { return client.Wait(keys, call); });
  }

  std::future<Result<std::string>> StartPop(Client& client, std::string key, Client::Call call) {
    return std::async(std::launch::async,
                      [&client, key, call] { return client.QueuePop(key, true, call); });
  }
  std::future<Status> StartBarrier(Client& client, std::string key, Client::Call call) {
    return std::async(std::launch::async,
                      [&client, key, call] { return client.Barrier(key, 4, call); });
  }

  SystemClock clock_;
  ScriptedServer server_;
  InterruptCheck interrupt_;
  std::unique_ptr<ScriptedConnection> line_;
  Hello hello_;
};

}  // namespace resilient::store
