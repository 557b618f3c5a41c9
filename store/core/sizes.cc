#include "store/core/sizes.h"

#include "store/core/messages.h"

namespace resilient::store {
namespace {

Status TooLarge(const char* what, std::size_t bytes, std::size_t most, const char* remedy) {
  return Status(StatusCode::kTooLarge, std::string(what) + " of " + std::to_string(bytes) +
                                           " bytes is larger than the store takes (" +
                                           std::to_string(most) + " bytes); " + remedy);
}

}  // namespace

Status CheckKeySize(const std::string& key) {
  if (key.size() <= kKeyBytesMax) return {};
  return TooLarge("a key", key.size(), kKeyBytesMax, "use a shorter one");
}

Status CheckValueSize(std::size_t bytes, const char* what) {
  if (bytes <= kValueBytesMax) return {};
  return TooLarge(what, bytes, kValueBytesMax, "split it");
}

}  // namespace resilient::store
