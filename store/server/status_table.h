#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

namespace resilient::store {

// Adds the next page of a status to those before it.
void AddStatusPage(nlohmann::json page, nlohmann::json& status);

// One line for each member, of all jobs and rounds.
std::string MembersTable(const nlohmann::json& status);
// The members as an array, each with its job, round and generation.
nlohmann::json MembersJson(const nlohmann::json& status);
// The server's status as aligned text for a terminal. Pure.
std::string StatusTable(const nlohmann::json& status);

}  // namespace resilient::store
