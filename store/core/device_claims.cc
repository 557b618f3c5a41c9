#include "store/core/device_claims.h"

#include <string>

namespace resilient::store {

Status CheckDeviceClaim(const DeviceClaim& claim) {
  for (const std::string* text : {&claim.uuid, &claim.host, &claim.visible_devices}) {
    if (text->size() <= kDeviceTextBytesMax) continue;
    return Status(StatusCode::kTooLarge, "a device is described by " +
                                             std::to_string(text->size()) + " bytes; at most " +
                                             std::to_string(kDeviceTextBytesMax) + " are taken");
  }
  return {};
}

}  // namespace resilient::store
