#pragma once

#include "store/core/messages.h"

#include <resilient/store/client.h>

namespace resilient::store {

// How this process introduces itself on a connection of `role`.
Hello MakeHello(const ConnectOptions& options, Role role);

}  // namespace resilient::store
