#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "store/tcpstore/query.h"

// What torch's client sends and expects, for tests.
namespace resilient::store::tcpstore {

inline std::string Byte(QueryType type) { return std::string(1, static_cast<char>(type)); }
inline std::string Number(std::int64_t value) {
  std::string out;
  AppendNumber(value, out);
  return out;
}
inline std::string Text(std::string_view text) {
  std::string out;
  AppendText(text, out);
  return out;
}
// A query whose fields are texts.
inline std::string Texts(QueryType type, const std::vector<std::string>& texts) {
  std::string out = Byte(type);
  for (const std::string& text : texts) AppendText(text, out);
  return out;
}
// A query of a count of rounds; `texts`: of all rounds.
inline std::string Many(QueryType type, std::size_t count, const std::vector<std::string>& texts) {
  std::string out = Byte(type) + Number(static_cast<std::int64_t>(count));
  for (const std::string& text : texts) AppendText(text, out);
  return out;
}
inline std::string Keys(QueryType type, const std::vector<std::string>& keys) {
  return Many(type, keys.size(), keys);
}

inline const std::string kValidate("\x00\xce\xf7\x85\x3c", 5);
inline const std::string kStop(1, '\0');
inline const std::string kCancelled(1, '\1');
inline const std::string kYes(1, '\0');
inline const std::string kNo(1, '\1');

}  // namespace resilient::store::tcpstore
