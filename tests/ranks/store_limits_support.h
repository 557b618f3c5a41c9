#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tests/ranks/http_support.h"
#include "tests/ranks/store_server_support.h"
#include "tests/support/sanitizers.h"

// What tests of the server's limits have in common: small limits, bare clients, and what the server
// says and takes.
namespace resilient::store {

using testing::kSanitized;

inline constexpr std::size_t kMebi = 1u << 20;

// Arguments of a server with /metrics and these limits ("name=value").
std::vector<std::string> WithLimits(const std::vector<std::string>& limits);
// A client that has said Hello; a test failure when it is not welcome.
std::unique_ptr<RawClient> Greeted(const TestServer& server, const std::string& job = "job");
// The server answers it.
void ExpectWorks(RawClient& client);
Samples Scrape(const TestServer& server);
// Waits until the server has said `text`; false when it has not in time, or does not live.
bool Said(TestServer& server, const std::string& text);
// That the process has in memory now.
std::size_t ResidentBytes(pid_t pid);

}  // namespace resilient::store
