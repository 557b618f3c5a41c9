#pragma once

#include <cstddef>
#include <string>

#include <resilient/status.h>

namespace resilient {

// Thread: value type.
struct FileText {
  std::string text;
  bool open_to_others = false;  // Users who are neither its owner nor in its group may read it.
};

// A regular file, as a whole. kSetting, with the file's name, when it cannot be read or holds more
// than `bytes_max`.
Result<FileText> ReadSmallFile(const std::string& path, std::size_t bytes_max);

}  // namespace resilient
