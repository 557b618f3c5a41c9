#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace resilient::store {

// One line for who reads logs by machine as well as by eye: "event=join job=train rank=3: text".
// Values come from peers: those with blanks or other odd characters are quoted and escaped, long
// ones are cut, empty ones are left out. The text must hold nothing of an unproved peer. Pure.
std::string AuditLine(std::string_view event,
                      std::initializer_list<std::pair<std::string_view, std::string>> fields,
                      std::string_view text);

}  // namespace resilient::store
