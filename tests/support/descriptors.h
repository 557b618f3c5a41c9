#pragma once

#include <dirent.h>

#include <cstddef>

namespace resilient {

// Of this process, with what the count itself takes.
inline std::size_t OpenDescriptors() {
  std::size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace resilient
