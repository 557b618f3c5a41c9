#include "torch_plugin/csrc/fnv.h"

#include <cstring>

namespace resilient::plugin {

void Fnv::Add(std::string_view text) {
  Add(text.size());
  for (; text.size() >= sizeof(std::uint64_t); text.remove_prefix(sizeof(std::uint64_t))) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data(), sizeof word);
    Add(word);
  }
  for (const char c : text) Add(std::uint64_t{static_cast<unsigned char>(c)});
}

}  // namespace resilient::plugin
