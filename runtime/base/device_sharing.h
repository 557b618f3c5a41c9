#pragma once

#include <optional>
#include <vector>

#include <resilient/device.h>
#include <resilient/status.h>

#include "runtime/base/process.h"

// Whether two ranks use one GPU. Pure.
namespace resilient {

// A rank with what it says about its GPU. Thread: value type.
struct DeviceHolder {
  int rank = -1;
  ProcessIdentity process;
  const DeviceClaim* device = nullptr;  // Null: it does not say.
};

// kDuplicateDevice when two of these use one GPU of one host: which ranks, which GPU, and how to
// mend it. MIG instances are GPUs of their own, and a UUID says nothing across hosts. `holders` in
// order of their ranks.
std::optional<Status> SharedDevice(const std::vector<DeviceHolder>& holders);

}  // namespace resilient
