#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/store/client.h>

#include "runtime/base/fork_guard.h"
#include "store/client/client_core.h"
#include "store/client/link.h"
#include "store/client/outage_log.h"

namespace resilient::store {

// The request connection. No thread of its own: among the callers that wait one leads, that is
// polls the socket and deals out the answers; the others sleep until their answer or the lead comes
// to them. The lead is given up before a caller runs its interrupt check (which may take long to
// get the GIL) and when its own answer is in. One who is alone first sleeps in recv for a moment:
// who comes meanwhile and needs the poll (to write what did not fit, to close) waits that long.
// Owner: Connect's caller, by shared_ptr. Thread: thread-safe.
class RequestClient final : public Client {
 public:
  RequestClient(const ConnectOptions& options, std::vector<HostPort> addresses,
                Credentials credentials, InterruptCheck interrupt, const Clock& clock);

  // Deletes it; in a forked child it is left alone.
  static void Release(RequestClient* client);

  // Until the first Welcome.
  Status Open(Deadline deadline);

  Status Set(const std::string& key, std::string value, const Call& call) override;
  Result<std::string> Get(const std::string& key, bool wait, const Call& call) override;
  Result<std::int64_t> Add(const std::string& key, std::int64_t amount, const Call& call) override;
  Result<std::string> CompareSet(const std::string& key, std::string expected, std::string desired,
                                 const Call& call) override;
  Result<bool> Check(const std::vector<std::string>& keys, const Call& call) override;
  Status Wait(const std::vector<std::string>& keys, const Call& call) override;
  Result<bool> Delete(const std::string& key, const Call& call) override;
  Result<std::int64_t> NumKeys(const Call& call) override;
  Result<std::int64_t> Append(const std::string& key, std::string value, const Call& call) override;
  Result<std::vector<std::string>> MultiGet(const std::vector<std::string>& keys, bool wait,
                                            const Call& call) override;
  Status MultiSet(const std::vector<std::string>& keys, std::vector<std::string> values,
                  const Call& call) override;
  Result<std::vector<std::string>> ListKeys(const std::string& prefix, const Call& call) override;
  Result<std::int64_t> QueuePush(const std::string& key, std::string value,
                                 const Call& call) override;
  Result<std::string> QueuePop(const std::string& key, bool wait, const Call& call) override;
  Result<std::int64_t> QueueLength(const std::string& key, const Call& call) override;
  Status Barrier(const std::string& key, std::int64_t size, const Call& call) override;
  Result<std::vector<std::string>> Exchange(const std::string& key, std::int64_t rank,
                                            std::int64_t size, std::string value,
                                            const Call& call) override;
  std::unique_ptr<KeyWatch> Watch(std::string prefix, std::uint64_t from_revision) override;
  Result<std::string> StatusJson(const StatusQuery& query, const Call& call) override;
  std::string server_id() const override;
  void Close() override;

 private:
  friend class WatchLine;
  // What a call is, for its texts, its limits, and for what an unknown outcome means.
  struct Ask {
    std::string_view name;
    std::span<const std::string> keys;
    bool mutation = false;
    bool meeting = false;  // Others have to come: the store can say who has not.
    std::size_t values = 0;
    std::size_t value_bytes = 0;  // Of all values.
    std::size_t largest = 0;      // Bytes of the largest one.

    Ask& With(const std::string& value);
    std::string ShowKeys() const;
  };
  struct Waiter {
    explicit Waiter(const Ask& what) : ask(what) {}
    const Ask& ask;
    std::uint64_t seq = 0;
    std::condition_variable ready;
    bool sent = false;
    bool cancelled = false;
    std::uint64_t received_at_cancel = 0;  // Of the link.
    Instant settled_by{};                  // When cancelled: the answer to it is waited for until.
    Status stopped;                        // Call::stop said so.
    bool done = false;
    Status failure;  // Ours; OK when the server answered.
    Reply reply;
  };
  using Lock = std::unique_lock<std::mutex>;

  Result<Reply> Perform(const Ask& ask, Op&& op, const Call& call);
  Status Await(Lock& lock, Waiter& waiter, const Call& call);
  bool Cancel(Waiter& waiter, const Call& call, Instant now);
  Status OnDeadline(Waiter& waiter, const Call& call, Instant begun, Instant now);
  bool OnStop(Waiter& waiter, const Call& call, Status stop);
  void Lead(Lock& lock, Instant until, bool quickly);
  void HandOver();
  // With a goodbye, so that the store need not remember the session.
  void CloseLink();
  void SendNow(const Request& request);
  void SendCancel(const Waiter& waiter);
  void Dispatch(ServerMessage& message);
  void OnOpened();
  Waiter* FindWaiter(std::uint64_t seq) const;
  void RenumberReads();
  void OnTrouble();
  void FailAll(const Status& why);
  Status Interrupted(const Call& call) const;

  static Status CheckSizes(const Ask& ask);
  static Status CheckCount(const Ask& ask, std::size_t got, std::size_t wanted);
  Status ForkedError(std::string_view name) const;
  std::string Where() const;
  Status TimeoutError(const Waiter& waiter, Duration waited) const;
  Status UnknownOutcome(const Waiter& waiter, std::string_view why) const;
  Status LostError(const Waiter& waiter, Duration waited, Instant now) const;

  // Constant.
  const Clock& clock_;
  const InterruptCheck interrupt_;
  const std::string job_;
  const std::int64_t made_by_pid_;
  // Self-synchronised.
  ProcessMark mark_;
  WakeFd wake_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  ClientCore core_;
  StoreLink link_;  // Advance, Drop and Close only while nobody leads, or by the leader.
  OutageLog outage_;
  std::vector<Waiter*> waiters_;
  std::vector<ServerMessage> inbox_;
  bool led_ = false;
  bool silent_ = false;  // This connection is to be replaced, by whoever leads next.
  bool closed_ = false;
  std::string server_id_;
  Status dead_;  // Set: every call fails with it.
};

}  // namespace resilient::store
