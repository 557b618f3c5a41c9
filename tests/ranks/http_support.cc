#include "tests/ranks/http_support.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <regex>
#include <sstream>
#include <vector>

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

bool Ready(const FileDescriptor& socket, short events, Deadline deadline) {
  std::vector<PollEntry> entries = {{socket.get(), events, 0}};
  return PollUntil(entries, SystemClock(), deadline) > 0;
}

// Sends, then reads to the end; nullopt: nobody there, or the deadline passed.
std::optional<std::string> Converse(const HostPort& address, std::string_view bytes) {
  const Deadline deadline = In(kPatience);
  const Result<FileDescriptor> socket = ConnectTcp(address, SystemClock(), deadline, -1);
  if (!socket.ok()) return std::nullopt;
  while (!bytes.empty()) {
    const ssize_t sent = send(socket->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno != EAGAIN || !Ready(*socket, POLLOUT, deadline)) {
      break;  // It closed before it had read all: what it answered still counts.
    }
  }
  std::string all;
  while (true) {
    if (!Ready(*socket, POLLIN, deadline)) return std::nullopt;
    char buffer[16384];
    const ssize_t count = recv(socket->get(), buffer, sizeof(buffer), 0);
    if (count < 0 && errno == EAGAIN) continue;
    if (count <= 0) return all;
    all.append(buffer, static_cast<std::size_t>(count));
  }
}

// The family that a sample belongs to.
std::string FamilyOf(const std::string& name, const std::map<std::string, std::string>& types) {
  for (const std::string suffix : {"_bucket", "_sum", "_count"}) {
    if (!name.ends_with(suffix)) continue;
    const auto type = types.find(name.substr(0, name.size() - suffix.size()));
    if (type != types.end() && type->second == "histogram") return type->first;
  }
  return name;
}

Status Wrong(const std::string& line, const char* why) {
  return Status(StatusCode::kInvalidArgument, std::string(why) + ": " + line);
}

Status CheckHistograms(const std::vector<std::pair<std::string, double>>& in_order) {
  double last = 0;
  for (const auto& [name, value] : in_order) {
    if (name.find("_bucket{") == std::string::npos) {
      last = name.find("_sum") == std::string::npos ? 0 : last;
      continue;
    }
    if (value < last) return Wrong(name, "buckets do not grow");
    last = value;
  }
  return {};
}

}  // namespace

HostPort MetricsAddress(const TestServer& server) {
  const std::string log = const_cast<TestServer&>(server).process().ErrorText();
  std::smatch found;
  if (std::regex_search(log, found, std::regex("http://([^/]+)/metrics"))) {
    const Result<HostPort> address = ParseHostPort(found[1].str());
    if (address.ok()) return *address;
  }
  ADD_FAILURE() << "no address of metrics in:\n" << log;
  return {"127.0.0.1", 0};
}

std::string HttpRaw(const HostPort& address, std::string_view bytes) {
  return Converse(address, bytes).value_or("");
}

std::optional<HttpReply> HttpGet(const HostPort& address, std::string_view path,
                                 std::string_view method) {
  const std::string request = std::string(method) + " " + std::string(path) +
                              " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
  const std::optional<std::string> all = Converse(address, request);
  if (!all) return std::nullopt;
  const std::size_t end = all->find("\r\n\r\n");
  if (end == std::string::npos || !all->starts_with("HTTP/1.1 ")) return std::nullopt;
  HttpReply reply;
  reply.head = all->substr(0, end);
  reply.body = all->substr(end + 4);
  std::from_chars(all->data() + 9, all->data() + 12, reply.status);
  return reply;
}

Result<Samples> ParseMetrics(const std::string& page) {
  static const std::regex help("# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) [^\\n]+");
  static const std::regex type(
      "# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (counter|gauge|histogram|summary|untyped)");
  static const std::regex sample(
      "([a-zA-Z_:][a-zA-Z0-9_:]*)"
      "(\\{[a-zA-Z_][a-zA-Z0-9_]*=\"[^\"\\\\\\n]*\"(,[a-zA-Z_][a-zA-Z0-9_]*=\"[^\"\\\\\\n]*\")*\\})"
      "?"
      " ([-+]?[0-9.]+([eE][-+]?[0-9]+)?|NaN|[-+]Inf)");
  if (!page.ends_with('\n')) return Wrong(page.substr(page.rfind('\n') + 1), "no end of line");
  std::map<std::string, std::string> types;
  std::vector<std::pair<std::string, double>> in_order;
  Samples samples;
  std::string helped;
  std::string current;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    std::smatch found;
    if (std::regex_match(line, found, help)) {
      helped = found[1];
    } else if (std::regex_match(line, found, type)) {
      current = found[1];
      if (current != helped) return Wrong(line, "a type without help");
      if (!types.emplace(current, found[2]).second) return Wrong(line, "declared twice");
      if ((found[2] == "counter") != current.ends_with("_total")) {
        return Wrong(line, "a counter ends with _total, others do not");
      }
    } else if (std::regex_match(line, found, sample)) {
      if (FamilyOf(found[1], types) != current) return Wrong(line, "outside of its family");
      const std::string name = found[1].str() + found[2].str();
      const double value = std::stod(found[4]);
      if (!samples.emplace(name, value).second) return Wrong(line, "said twice");
      in_order.emplace_back(name, value);
    } else {
      return Wrong(line, "not a line of the format");
    }
  }
  const Status histograms = CheckHistograms(in_order);
  if (!histograms.ok()) return histograms;
  return samples;
}

}  // namespace resilient::store
