#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

// Decimal numbers in texts that programs write for programs. Pure.
namespace resilient {

// All of `text`: a number for each of `numbers`, with a blank between. False: it is not that, or
// one does not fit; then some may be set.
template <typename... Numbers>
bool ReadNumbers(std::string_view text, Numbers*... numbers) {
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto read = [&](auto* number) {
    if (at != text.data()) {
      if (at == end || *at != ' ') return false;
      ++at;
    }
    const auto [next, error] = std::from_chars(at, end, *number);
    at = next;
    return error == std::errc();
  };
  return (read(numbers) && ...) && at == end;
}

// All of `text` as one number; nullopt: it is none, or does not fit.
template <typename Number>
std::optional<Number> ParseNumber(std::string_view text) {
  Number number{};
  return ReadNumbers(text, &number) ? std::optional(number) : std::nullopt;
}

}  // namespace resilient
