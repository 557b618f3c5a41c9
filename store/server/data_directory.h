#pragma once

#include <string>

#include <resilient/status.h>

#include "runtime/net/socket.h"

namespace resilient::store {

// The directory of a durable store. Makes it (readable by this user alone) when it is missing.
// kSetting: it cannot be made, or is something else.
Status MakeDataDirectory(const std::string& directory);

// Held until the descriptor closes, at the latest with this process. kSetting: another server has
// it (its pid and host), or the directory cannot be written.
Result<FileDescriptor> LockDataDirectory(const std::string& directory);

// kSetting, or kInternal where it is nobody's setting: `doing` failed with `error` (an errno).
Status DataError(const std::string& path, const std::string& doing, int error);

}  // namespace resilient::store
