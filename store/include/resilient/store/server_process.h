#pragma once

#include <string>

#include <resilient/clock.h>
#include <resilient/status.h>

namespace resilient::store {

// A server that this process has started. Thread: value type.
struct ServerProcess {
  std::string address;  // "host:port" as it listens.
  std::string server_id;
  std::string log_path;  // Or where else its log is, for people.
};

// Starts a detached server (nobody's child, in a session of its own, without a descriptor of ours)
// that listens on `listen` ("host:port") and waits until it does. It ends by itself: when its last
// member has left, or `linger` after its members vanished. Its log is a file of the temporary
// folder, which it removes at its end; where none can be made, memory. kRefused: another process
// listens there; kSetting: it did not start, with the last line that it wrote. Thread: thread-safe.
Result<ServerProcess> StartServer(const std::string& program, const std::string& listen,
                                  Duration linger, const Clock& clock);

}  // namespace resilient::store
