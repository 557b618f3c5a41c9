#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <resilient/device.h>
#include <resilient/session.h>
#include <resilient/status.h>
#include <resilient/tls.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace resilient {

// What a libtorch C++ program catches: torch's own classes, with our Status inside. what() begins
// with "[resilient:CODE]". Thread: immutable.
class BackendError : public c10::DistBackendError {
 public:
  BackendError(c10::SourceLocation where, Status status)
      : DistBackendError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

class StoreError : public c10::DistStoreError {
 public:
  StoreError(c10::SourceLocation where, Status status)
      : DistStoreError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

// A queue without an item, asked not to wait.
class QueueEmptyError : public c10::DistQueueEmptyError {
 public:
  QueueEmptyError(c10::SourceLocation where, Status status)
      : DistQueueEmptyError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

class NetworkError : public c10::DistNetworkError {
 public:
  NetworkError(c10::SourceLocation where, Status status)
      : DistNetworkError(where, status.ToString()), status_(std::move(status)) {}
  const Status& status() const { return status_; }

 private:
  Status status_;
};

// Who joins which world. Thread: value type.
struct WorldOptions {
  std::vector<std::string> addresses;  // Of the store, "host:port", tried in turn.
  std::string job;
  int rank = -1;
  int world_size = 0;
  Duration init_timeout = std::chrono::minutes(30);  // For peers that nobody has heard of.
  Duration budget = std::chrono::seconds(20);        // Machine time of one recovery.
  Duration seat_wait = Duration::zero();             // Waiting for a lost seat to be filled.
  std::optional<DeviceClaim> device;  // ClaimOf: no other rank may use it; nullopt: not known.
  std::chrono::milliseconds store_timeout = c10d::Store::kDefaultTimeout;  // Of `World::store`.
  std::string bind_address = "127.0.0.1";  // Where peers reach this process.
  std::uint64_t launcher_attempt = 0;
  std::string token_file;  // With the token that the store asks for; empty: none is presented.
  TlsFiles tls;            // With a CA connections to the store are encrypted.
};

// One world as a C++ program uses it. The three keep each other alive. Thread: thread-safe, as
// c10d's classes are.
struct World {
  std::shared_ptr<Session> session;  // Rebuild, membership, failure.
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

// Blocks until the world runs. Throws BackendError, StoreError or NetworkError.
World OpenWorld(const WorldOptions& options);

}  // namespace resilient
