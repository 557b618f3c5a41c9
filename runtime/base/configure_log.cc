#include <string_view>

#include <resilient/settings.h>

#include "runtime/base/log.h"

namespace resilient {

Status ConfigureLog(const std::string& level, const std::string& tag) {
  constexpr std::string_view kJson = "json:";
  std::string_view name = level;
  const bool json = name.substr(0, kJson.size()) == kJson;
  if (json) name.remove_prefix(kJson.size());
  LogLevel parsed = LogLevel::kWarn;
  if (!ParseLogLevel(name, &parsed)) {
    return Status(StatusCode::kSetting,
                  StrCat("RESILIENT_LOG=", level, " is not a log level; accepted: debug, info, ",
                         "warn, error, off, each with an optional \"json:\" in front"));
  }
  SetLogLevel(parsed, json);
  if (!tag.empty()) SetLogTag(tag);
  return Status::Ok();
}

}  // namespace resilient
