#pragma once

#include <functional>
#include <thread>

#include <resilient/status.h>

namespace resilient::plugin {

// A thread with that name (15 characters at most) and all signals blocked: the user's signal
// handlers run on the user's threads. kResourceExhausted when none can be made.
Result<std::thread> StartThread(const char* name, std::function<void()> body);

}  // namespace resilient::plugin
