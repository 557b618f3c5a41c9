#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <resilient/status.h>

#include "runtime/net/socket.h"
#include "tests/ranks/store_server_support.h"

// What tests need to ask a server over HTTP, and to read what Prometheus would.
namespace resilient::store {

struct HttpReply {
  int status = 0;
  std::string head;
  std::string body;
};

// The address that a server started with --metrics says it serves; port 0 and a test failure when
// it does not.
HostPort MetricsAddress(const TestServer& server);
// One request on a connection of its own; nullopt: nobody there, or no answer in time.
std::optional<HttpReply> HttpGet(const HostPort& address, std::string_view path,
                                 std::string_view method = "GET");
// Sends the bytes and returns all that comes until the server closes.
std::string HttpRaw(const HostPort& address, std::string_view bytes);

// "name{labels}" to value.
using Samples = std::map<std::string, double>;
// Checks each line against the text format: families declared once and before their samples, names
// and labels well formed, samples unique, histograms cumulative. kInvalidArgument names the line.
Result<Samples> ParseMetrics(const std::string& page);

}  // namespace resilient::store
