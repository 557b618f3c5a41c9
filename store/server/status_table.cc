#include "store/server/status_table.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace resilient::store {
namespace {

using nlohmann::json;
using Row = std::vector<std::string>;

// A field as text; "-" when it is missing or empty.
std::string Text(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) return "-";
  if (found->is_string())
    return found->get<std::string>().empty() ? "-" : found->get<std::string>();
  return found->dump();
}

std::string Seconds(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", seconds);
  return text.data();
}

std::string SecondsField(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number() ? Seconds(found->get<double>()) : "-";
}

const json& List(const json& object, const char* name) {
  static const json empty = json::array();
  const auto found = object.find(name);
  return found != object.end() && found->is_array() ? *found : empty;
}

void Extend(json& more, json& list) {
  for (json& entry : more) list.push_back(std::move(entry));
}

// A range may go on in the next page.
void ExtendRanges(json& more, json& ranges) {
  if (!more.empty() && !ranges.empty() && ranges.back()[1] == more.front()[0].get<int>() - 1) {
    ranges.back()[1] = more.front()[1];
    more.erase(0);
  }
  Extend(more, ranges);
}

void AppendAligned(const std::vector<Row>& rows, std::string* out) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const Row& row : rows) {
    std::string line = "  ";
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    *out += line + "\n";
  }
}

// What is left of a lease of `ttl` seconds; only those with a seat and spares hold one.
std::string LeaseLeft(const json& member, double ttl) {
  const std::string state = Text(member, "state");
  const auto seen = member.find("last_seen_s");
  if (ttl <= 0 || seen == member.end() || !seen->is_number()) return "-";
  if (state != "joined" && state != "member" && state != "spare") return "-";
  if (Text(member, "held") == "true") return "held, " + SecondsField(member, "held_for_s");
  return Seconds(std::max(0.0, ttl - seen->get<double>()));
}

void AppendWorld(const json& world, double ttl, std::string* out) {
  *out += " round " + Text(world, "round") + ": generation " + Text(world, "generation") + ", " +
          Text(world, "phase") + ", world size " + Text(world, "world_size") + "\n";
  const std::string cause = Text(world, "first_cause");
  if (cause != "-") *out += "  last fence: " + cause + "\n";
  std::vector<Row> rows = {{"RANK", "HOST", "PID", "STATE", "LEASE LEFT", "LAST BEAT"}};
  for (const json& member : List(world, "members")) {
    const std::string beat = SecondsField(member, "last_seen_s");
    rows.push_back({Text(member, "rank"), Text(member, "host"), Text(member, "pid"),
                    Text(member, "state"), LeaseLeft(member, ttl),
                    beat == "-" ? beat : beat + " ago"});
  }
  for (const json& range : List(world, "empty_seats")) {
    std::string ranks = range.front().dump();
    if (range.front() != range.back()) ranks += "-" + range.back().dump();
    rows.push_back({std::move(ranks), "-", "-", "empty", "-", "-"});
  }
  AppendAligned(rows, out);
}

void AppendSpares(const json& job, double ttl, std::string* out) {
  const json& spares = List(job, "spares");
  if (spares.empty()) return;
  *out += " spares:\n";
  std::vector<Row> rows = {{"HOST", "PID", "LEASE LEFT", "LAST BEAT"}};
  for (const json& spare : spares) {
    rows.push_back({Text(spare, "host"), Text(spare, "pid"), LeaseLeft(spare, ttl),
                    SecondsField(spare, "last_seen_s") + " ago"});
  }
  AppendAligned(rows, out);
}

}  // namespace

void AddStatusPage(json page, json& status) {
  json jobs = status.contains("jobs") ? std::move(status["jobs"]) : json::array();
  for (json& job : page["jobs"]) {
    const bool goes_on = !jobs.empty() && Text(jobs.back(), "job") == Text(job, "job");
    if (!goes_on) {
      jobs.push_back(std::move(job));
      continue;
    }
    json& whole = jobs.back();
    for (json& world : job["worlds"]) {
      json& worlds = whole["worlds"];
      if (worlds.empty() || Text(worlds.back(), "round") != Text(world, "round")) {
        worlds.push_back(std::move(world));
        continue;
      }
      Extend(world["members"], worlds.back()["members"]);
      ExtendRanges(world["empty_seats"], worlds.back()["empty_seats"]);
    }
    Extend(job["spares"], whole["spares"]);
  }
  page["jobs"] = std::move(jobs);
  status = std::move(page);
}

json MembersJson(const json& status) {
  json members = json::array();
  for (const json& job : List(status, "jobs")) {
    for (const json& world : List(job, "worlds")) {
      for (json member : List(world, "members")) {
        member["job"] = Text(job, "job");
        member["round"] = world.value("round", std::uint64_t{0});
        member["generation"] = world.value("generation", std::uint64_t{0});
        members.push_back(std::move(member));
      }
    }
    for (json spare : List(job, "spares")) {
      spare["job"] = Text(job, "job");
      members.push_back(std::move(spare));
    }
  }
  return members;
}

std::string MembersTable(const json& status) {
  const auto ttl = status.find("lease_ttl_s");
  const double seconds = ttl != status.end() && ttl->is_number() ? ttl->get<double>() : 0;
  std::vector<Row> rows = {
      {"JOB", "ROUND", "GENERATION", "RANK", "HOST", "PID", "STATE", "LEASE LEFT", "LAST BEAT"}};
  for (const json& member : MembersJson(status)) {
    const std::string beat = SecondsField(member, "last_seen_s");
    rows.push_back({Text(member, "job"), Text(member, "round"), Text(member, "generation"),
                    Text(member, "rank"), Text(member, "host"), Text(member, "pid"),
                    Text(member, "state"), LeaseLeft(member, seconds),
                    beat == "-" ? beat : beat + " ago"});
  }
  if (rows.size() == 1) return "no members\n";
  std::string out;
  AppendAligned(rows, &out);
  return out;
}

std::string StatusTable(const json& status) {
  const auto ttl_field = status.find("lease_ttl_s");
  const double ttl =
      ttl_field != status.end() && ttl_field->is_number() ? ttl_field->get<double>() : 0;
  std::string out = "server " + Text(status, "server") + ", " + Text(status, "connections") +
                    " connections, lease " + SecondsField(status, "lease_ttl_s") + "\n";
  const json& jobs = List(status, "jobs");
  if (jobs.empty()) out += "no job\n";
  for (const json& job : jobs) {
    out += "job " + Text(job, "job") + ": life " + Text(job, "life") + ", generation " +
           Text(job, "generation") + ", " + Text(job, "keys") + " keys\n";
    for (const json& world : List(job, "worlds")) AppendWorld(world, ttl, &out);
    AppendSpares(job, ttl, &out);
  }
  return out;
}

}  // namespace resilient::store
