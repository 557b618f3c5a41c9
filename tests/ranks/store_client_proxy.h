#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <resilient/clock.h>

#include "runtime/base/thread.h"
#include "runtime/net/socket.h"

namespace resilient::store {

// A TCP proxy in front of a store that can lose connections: after each `bytes_per_life` bytes of
// answers it drops what came last and resets both sides, so that some requests took effect and were
// never answered. Owner: a test. Thread: its own, ended by the destructor; the methods are
// thread-safe.
class CuttingProxy {
 public:
  explicit CuttingProxy(HostPort upstream);
  ~CuttingProxy();
  CuttingProxy(const CuttingProxy&) = delete;
  CuttingProxy& operator=(const CuttingProxy&) = delete;

  const std::string& address() const { return address_; }

  // From now on; 0: never.
  void CutEvery(std::uint64_t bytes_per_life) { bytes_per_life_ = bytes_per_life; }
  // Cuts what is connected now.
  void Cut();
  int cuts() const { return cuts_; }

  // All that has passed, of all connections.
  struct Recording {
    std::string requests;
    std::string answers;
  };
  Recording Recorded() const;

 private:
  struct Pair {
    FileDescriptor client;
    FileDescriptor server;
    std::uint64_t answered = 0;
    bool ended = false;
  };

  void Run();
  void Accept();
  void Forward(Pair& pair, bool from_client);

  const HostPort upstream_;
  const SystemClock clock_;
  std::string address_;
  FileDescriptor listener_;
  WakeFd wake_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> cut_now_{false};
  std::atomic<std::uint64_t> bytes_per_life_{0};
  std::atomic<int> cuts_{0};
  mutable std::mutex mutex_;
  Recording recording_;                       // Guarded by mutex_.
  std::vector<std::unique_ptr<Pair>> pairs_;  // Confined to the thread.
  Thread thread_;
};

}  // namespace resilient::store
