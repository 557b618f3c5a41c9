#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/store/client.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/host.h"

namespace resilient::plugin {

// c10d's Store over the exactly-once client. Standalone, its keys belong to the job; opened from a
// session, they belong to the session's init round, and its waits end with the first cause when the
// session is fenced. Timeouts are c10d's: strict, on this rank only.
//
// Owner: c10d and the user. Thread: thread-safe, but for setTimeout, as in c10d.
class ResilientStore final : public c10d::Store {
 public:
  // Connects. Blocks.
  static Result<c10::intrusive_ptr<ResilientStore>> Standalone(const store::ConnectOptions& options,
                                                               std::chrono::milliseconds timeout,
                                                               std::shared_ptr<Host> host);
  // kFailedPrecondition before the session's Init.
  static Result<c10::intrusive_ptr<ResilientStore>> OfSession(
      std::shared_ptr<SessionContext> context, std::chrono::milliseconds timeout);

  ResilientStore(std::shared_ptr<store::Client> client, std::shared_ptr<SessionContext> context,
                 std::shared_ptr<Host> host, std::chrono::milliseconds timeout);
  ~ResilientStore() override;

  c10::intrusive_ptr<c10d::Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  using Store::compareSet;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

  // Null for a standalone store.
  const std::shared_ptr<SessionContext>& context() const { return context_; }
  std::string server_id() const { return client_->server_id(); }
  // Ends a standalone store and its clones; that of a session ends with it.
  void Close();

 private:
  enum class Waits : std::uint8_t { kNo, kForKeys };

  // How long a call may take: `timeout`; for one that needs only the server's answer, no longer
  // than a session's budget.
  store::Client::Call MakeCall(std::chrono::milliseconds timeout, Waits waits) const;
  // Waits on a fenced session raise at once.
  Status Settled(Status status) const;
  void CheckSession() const;
  template <typename Body>
  auto Run(Body body) const;

  const std::shared_ptr<SessionContext> context_;
  const std::shared_ptr<store::Client> client_;
  const std::shared_ptr<Host> host_;
  const std::uint64_t scope_;
};

}  // namespace resilient::plugin
