#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

namespace resilient::store {

// Drops every other job from the server's status.
void KeepJob(const std::string& job, nlohmann::json* status);

// The server's status as aligned text for a terminal. Pure.
std::string StatusTable(const nlohmann::json& status);

}  // namespace resilient::store
