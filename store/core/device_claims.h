#pragma once

#include <optional>
#include <string>
#include <vector>

#include <resilient/device.h>
#include <resilient/status.h>

#include "store/core/causes.h"
#include "store/core/messages.h"

// Whether two ranks of a world use one GPU. Pure.
namespace resilient::store {

// A rank that has a seat, with what it says about its GPU. Thread: value type.
struct DeviceHolder {
  Claimant who;
  const DeviceClaim* device = nullptr;  // Null: it does not say.
};

// kTooLarge for a claim with texts beyond kDeviceTextBytesMax.
Status CheckDeviceClaim(const DeviceClaim& claim);

// kDuplicateDevice when two of these use one GPU of one host: which ranks, which GPU, and how to
// mend it. MIG instances are GPUs of their own, and a UUID says nothing across hosts. `holders` in
// order of their ranks.
std::optional<Status> SharedDevice(const std::vector<DeviceHolder>& holders);

}  // namespace resilient::store
