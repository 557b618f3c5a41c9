#include "tests/ranks/store_limits_support.h"

#include <unistd.h>

#include <fstream>

#include <gtest/gtest.h>

namespace resilient::store {

std::vector<std::string> WithLimits(const std::vector<std::string>& limits) {
  std::vector<std::string> arguments = {"--metrics", "127.0.0.1:0"};
  for (const std::string& limit : limits) arguments.insert(arguments.end(), {"--limit", limit});
  return arguments;
}

std::unique_ptr<RawClient> Greeted(const TestServer& server, const std::string& job) {
  auto client = std::make_unique<RawClient>(server.address());
  const auto welcome = client->SayHello(MakeTestHello(Role::kRequest, job));
  EXPECT_TRUE(welcome && welcome->status.ok());
  return client;
}

void ExpectWorks(RawClient& client) {
  const auto reply = client.Call(CheckOp{{"k"}});
  ASSERT_TRUE(reply);
  EXPECT_TRUE(reply->status.ok()) << reply->status.ToString();
}

Samples Scrape(const TestServer& server) {
  const auto reply = HttpGet(MetricsAddress(server), "/metrics");
  const Result<Samples> samples = ParseMetrics(reply.value_or(HttpReply()).body);
  EXPECT_TRUE(samples.ok()) << samples.status().message();
  return samples.ok() ? *samples : Samples();
}

bool Said(TestServer& server, const std::string& text) {
  const Deadline deadline = In(kPatience);
  while (server.process().ErrorText().find(text) == std::string::npos) {
    if (deadline.ExpiredAt(Now())) return false;
    if (HttpGet(MetricsAddress(server), "/healthz").value_or(HttpReply()).status != 200)
      return false;
  }
  return true;
}

std::size_t ResidentBytes(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::size_t size = 0;
  std::size_t resident = 0;
  file >> size >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace resilient::store
