#include "store/core/tokens.h"

#include <algorithm>
#include <utility>

namespace resilient::store {
namespace {

constexpr std::string_view kBlank = " \t\r";
constexpr std::string_view kEveryJob = "*";

std::string_view Trim(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

Status Bad(std::string_view origin, std::size_t line, const std::string& why) {
  return {StatusCode::kSetting, "the token file " + std::string(origin) + ", line " +
                                    std::to_string(line) + ": " + why +
                                    "; write one token, or lines of a job and its token"};
}

// Empty: it is a token.
std::string Fault(std::string_view token) {
  if (token.size() < kTokenBytesMin) {
    return "a token needs at least " + std::to_string(kTokenBytesMin) +
           " characters (openssl rand -hex 32 makes a good one)";
  }
  if (token.size() > kTokenBytesMax) {
    return "a token has at most " + std::to_string(kTokenBytesMax) + " characters";
  }
  const bool printable =
      std::all_of(token.begin(), token.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  return printable ? "" : "a token consists of printable ASCII characters";
}

}  // namespace

Result<TokenSet> TokenSet::Parse(std::string_view text, std::string_view origin) {
  TokenSet set;
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = Trim(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (line.empty() || line.front() == '#') continue;
    // The token is the last word; the name of a job may hold blanks.
    const std::size_t blank = line.find_last_of(kBlank);
    const bool alone = blank == std::string_view::npos;
    const std::string_view token = alone ? line : line.substr(blank + 1);
    const std::string_view job = alone ? kEveryJob : Trim(line.substr(0, blank));
    if (const std::string fault = Fault(token); !fault.empty()) return Bad(origin, number, fault);
    set.lines_.push_back({std::string(job), job == kEveryJob, std::string(token)});
  }
  if (set.lines_.empty()) {
    return Status(StatusCode::kSetting, "the token file " + std::string(origin) +
                                            " holds no token; write one line with at least " +
                                            std::to_string(kTokenBytesMin) + " characters");
  }
  return set;
}

std::vector<TokenSet::Key> TokenSet::Opening(const std::string& job) const {
  std::vector<Key> keys;
  for (const Line& line : lines_) {
    if (line.every_job) {
      keys.push_back({line.token, false});
    } else if (!job.empty() && line.job == job) {
      keys.push_back({line.token, true});
    }
  }
  return keys;
}

const std::string* TokenSet::Presented(const std::string& job) const {
  const auto own = std::find_if(lines_.begin(), lines_.end(), [&job](const Line& line) {
    return !line.every_job && !job.empty() && line.job == job;
  });
  if (own != lines_.end()) return &own->token;
  const auto every =
      std::find_if(lines_.begin(), lines_.end(), [](const Line& line) { return line.every_job; });
  return every == lines_.end() ? nullptr : &every->token;
}

}  // namespace resilient::store
