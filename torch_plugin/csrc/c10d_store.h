#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/store/client.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "torch_plugin/csrc/context.h"
#include "torch_plugin/csrc/host.h"

namespace resilient::plugin {

// c10d's Store over the exactly-once client. Standalone, its keys belong to the job; opened from a
// session, they belong to the session's init round, and its waits end with the first cause when the
// session is fenced. One that outlives its session goes on as long as a rank of that round is
// there, whose end takes the keys along. Timeouts are c10d's: strict, on this rank only. A call
// that waits holds up no call of another thread.
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

  // `options`: how the client was connected; not used for that of a session.
  ResilientStore(std::shared_ptr<store::Client> client, std::shared_ptr<SessionContext> context,
                 std::shared_ptr<Host> host, std::chrono::milliseconds timeout,
                 store::ConnectOptions options = {});
  ~ResilientStore() override;

  // Of a standalone store: a connection and session of its own, so also of use in a forked child.
  // Of a session's: another handle on the same.
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
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void queuePush(const std::string& key, const std::vector<std::uint8_t>& value) override;
  // DistQueueEmptyError when it is empty and block is false.
  std::vector<std::uint8_t> queuePop(const std::string& key, bool block) override;
  std::int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  using Store::barrier;
  void barrier(const std::string& key, std::int64_t world_size,
               const std::chrono::milliseconds& timeout) override;
#else
  void barrier(const std::string& key, std::int64_t world_size,
               const std::chrono::milliseconds& timeout);
#endif

  // As set and get, for those who have or want text: a copy less of what may be megabytes.
  void SetText(const std::string& key, std::string value);
  std::string GetText(const std::string& key);

  // Ours, not c10d's: the values of all `size` ranks, in rank order, once all have come.
  std::vector<std::string> Exchange(const std::string& key, std::int64_t rank, std::int64_t size,
                                    std::string value, const std::chrono::milliseconds& timeout);

  // Ours too: an exchange of all members of `generation`, which ends with it. Every caller gets the
  // values or none does, but for one that was lost or interrupted, or that has not reached the
  // store for the session's budget. `timeout`: then this caller has not taken part, and may come
  // again. REQUIRES: the store of a session.
  std::vector<std::string> Agree(const std::string& key, std::int64_t rank, std::int64_t size,
                                 std::string value, std::uint64_t generation,
                                 const std::chrono::milliseconds& timeout);

  // As Agree, of those members of `generation` that are alive and have not gone on to a later one:
  // goes on over a fence. The values of the others are empty.
  std::vector<std::string> AgreeAmongSurvivors(const std::string& key, std::int64_t rank,
                                               std::int64_t size, std::string value,
                                               std::uint64_t generation,
                                               const std::chrono::milliseconds& timeout);

  // Null for a standalone store.
  const std::shared_ptr<SessionContext>& context() const { return context_; }
  std::string server_id() const { return client_->server_id(); }
  // Ends a standalone store, not its clones; that of a session ends with it.
  void Close();

 private:
  enum class Waits : std::uint8_t { kNo, kForOthers };

  // How long a call may take: `timeout`; for one that needs only the server's answer, no longer
  // than a session's budget.
  store::Client::Call MakeCall(std::chrono::milliseconds timeout, Waits waits) const;
  Status Settled(Status status) const;
  template <typename T>
  Result<T> Settled(Result<T> result) const;
  // Performs a call that the server answers at once; returns its value or raises.
  template <typename Body>
  auto Ask(Body body) const;
  // The same for one that waits for what others do. On a fenced session it raises at once.
  template <typename Body>
  auto Await(std::chrono::milliseconds timeout, Body body) const;
  // The same for one that may be asked again: goes on over a broken link that the session gets over
  // by itself.
  template <typename Body>
  auto AwaitOverLinks(std::chrono::milliseconds timeout, Body body) const;
  bool IsGotOver(const Status& status) const;
  template <typename Body>
  auto Run(Body body) const;

  const std::shared_ptr<SessionContext> context_;
  const std::shared_ptr<store::Client> client_;
  const std::shared_ptr<Host> host_;
  const store::ConnectOptions options_;
  const std::uint64_t scope_;
};

}  // namespace resilient::plugin
