#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

namespace resilient::store {

inline constexpr std::size_t kTokenBytesMin = 16;  // A shorter one could be guessed.
inline constexpr std::size_t kTokenBytesMax = 4u << 10;
inline constexpr std::size_t kTokenFileBytesMax = 1u << 20;

// The tokens of a token file: on each line `TOKEN` (opens every job) or `JOB TOKEN` (opens that
// job; `*` means every job). Blank lines and lines that begin with # count for nothing. Several
// lines may open one job, so that a token can be replaced while both hold. No text made here shows
// a token. Thread: value type. Pure.
class TokenSet {
 public:
  struct Key {
    std::string token;
    bool confined = false;  // Opens one job, not the store as a whole.
  };

  // `origin`: the file's name, for texts. kSetting says which line is wrong.
  static Result<TokenSet> Parse(std::string_view text, std::string_view origin);

  // All that open `job`; those for every job only when `job` is empty (the store as a whole).
  std::vector<Key> Opening(const std::string& job) const;

  // What a client of `job` presents: the first line of its own, else the first for every job; null
  // when there is neither.
  const std::string* Presented(const std::string& job) const;

  std::size_t size() const { return lines_.size(); }
  friend bool operator==(const TokenSet&, const TokenSet&) = default;

 private:
  struct Line {
    std::string job;
    bool every_job = false;
    std::string token;
    friend bool operator==(const Line&, const Line&) = default;
  };

  std::vector<Line> lines_;
};

}  // namespace resilient::store
