#pragma once

#include <resilient/device.h>
#include <resilient/status.h>

#include "store/core/messages.h"

namespace resilient::store {

// kTooLarge for a claim with texts beyond kDeviceTextBytesMax. Pure.
Status CheckDeviceClaim(const DeviceClaim& claim);

}  // namespace resilient::store
