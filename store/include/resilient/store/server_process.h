#pragma once

#include <string>

#include <resilient/clock.h>
#include <resilient/status.h>

namespace resilient::store {

// A server that this process has started. Thread: value type.
struct ServerProcess {
  std::string address;  // "host:port" as it listens.
  std::string server_id;
  std::string log_path;
};

// Starts a detached server (its own session, stdio to a log file, no descriptor of ours) that
// listens on `listen` ("host:port") and waits until it does. It ends by itself: when its last
// member has left, or `linger` after its members vanished. kRefused: another process listens there;
// kSetting: it did not start, with the last line that it wrote. A server that ended is collected at
// the next call or when this process ends. Thread: thread-safe.
Result<ServerProcess> StartServer(const std::string& program, const std::string& listen,
                                  Duration linger, const Clock& clock);

}  // namespace resilient::store
