#pragma once

#include <string>

#include <resilient/status.h>

#include "runtime/net/socket.h"

namespace resilient::store {

// The directory of a durable store. Makes it (readable by this user alone) when it is missing.
// kSetting: it cannot be made, is something else, or every user may write there.
Status MakeDataDirectory(const std::string& directory);

// The file there is for this user alone from now on, as keys, secrets and sessions are in it; made
// if it is missing and `make`. kSetting: it is a link, or no file.
Status ProtectFile(const std::string& path, bool make);

// Held until the descriptor closes, at the latest with this process. kSetting: another server has
// it (its pid and host), or the directory cannot be written.
Result<FileDescriptor> LockDataDirectory(const std::string& directory);

// kSetting, or kInternal where it is nobody's setting: `doing` failed with `error` (an errno).
Status DataError(const std::string& path, const std::string& doing, int error);

}  // namespace resilient::store
