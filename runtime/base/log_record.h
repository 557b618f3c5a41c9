#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace resilient {

// What happened, for the log: event and fields for machines, the text for people. Values come from
// peers: they are escaped where they are shown. A pure core hands records to the thread that logs.
struct LogRecord {
  using Field = std::pair<std::string_view, std::string>;  // The name is a literal.

  std::string_view event;     // A literal.
  std::vector<Field> fields;  // An empty value is left out.
  std::string text;           // Holds nothing of an unproved peer.
  // A JSON object, for records that are data: a member of the line named by the event, or the end
  // of the line behind that name. Such a record has no fields.
  std::string object = {};

  // Empty: it has no such field.
  std::string_view Value(std::string_view field) const;
};

// A value as logs show it: escaped, and cut when it is long.
std::string ShownValue(std::string_view value);
// "event=join job=train rank=3: text"; values with blanks or other odd characters are quoted.
// "incident {...}" with an object, the text alone without an event.
std::string ToText(const LogRecord& record);

}  // namespace resilient
