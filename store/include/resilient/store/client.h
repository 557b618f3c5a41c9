#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>
#include <resilient/tls.h>

namespace resilient::store {

// How a process reaches a store and as whom. Thread: value type.
struct ConnectOptions {
  std::vector<std::string> addresses;  // "host:port", tried in turn.
  std::string job;
  std::string session;      // Empty: a new one. Rendezvous and Client of one session share it.
  std::string incarnation;  // Empty: this process's (random, once).
  std::uint64_t launcher_attempt = 0;
  bool supervised = false;
  // Id of the server that was found at the address; empty: any. A membership line to one that has
  // stopped since ends with kStoreLost instead of waiting for another to come.
  std::string expected_server;
  bool hosts_store = false;
  // Of a membership line: a key of the job that exists as long as the lease of its session, with
  // this value: presence without a seat. It goes with Close, with the process, with silence of one
  // lease; a process that was only silent has it again once it is heard. Empty: none.
  std::string leased_key;
  std::string leased_value;
  // With the token that the store asks for (docs/operations.md); empty: none is presented, and a
  // store that asks for one refuses with kAuth, at once.
  std::string token_file;
  // With a CA connections are encrypted, and a store whose certificate it has not signed, or that
  // names another host, is refused with kAuth, at once. Empty: plain connections.
  TlsFiles tls;
};

// New random session id. The id of this process, the same at every call in it (another in a forked
// child).
std::string NewSessionId();
std::string ThisIncarnation();

// What a watch of keys tells. Thread: value types.
struct KeyChange {
  std::uint64_t revision = 0;  // Ascending, not without gaps; 0 in a snapshot.
  std::string key;
  std::optional<std::string> value;  // nullopt: the key was deleted.
  friend bool operator==(const KeyChange&, const KeyChange&) = default;
};
struct WatchBatch {
  // These are all the keys there are, instead of what has changed: at the beginning, and when the
  // watch was further behind than the store keeps changes. What was told before is void.
  bool snapshot = false;
  std::vector<KeyChange> changes;
  std::uint64_t revision = 0;  // Everything up to it has been told.
};

class KeyWatch;

// Which part of a store's status is asked for. A page tells of some thousand members; where there
// are more it ends with "next":{"job":..,"round":..,"rank":..}, where the next one begins.
struct StatusQuery {
  std::string job;  // Only this one; empty: every one.
  std::string from_job;
  std::uint64_t from_round = 0;
  std::uint64_t from_rank = 0;
};

// Key operations of a session, each exactly once over lost connections. Callers drive the socket
// themselves: who waits reads (leader/follower), so concurrent callers do not block each other and
// no thread is involved. Every call waits until `deadline`, polling `interrupt`; on expiry it
// cancels and returns the definitive answer if one is to be had, else kTimeout (a wait that was not
// met) or kOutcomeUnknown (a mutation). A wait for others (Barrier, Exchange) that times out says
// who is late. While the store is unreachable calls wait and reconnect with backoff; when
// `deadline` passes in that state, kOutcomeUnknown for a mutation that was sent, kStoreLost for all
// else. kTooLarge, before anything is sent, for what exceeds a limit of docs/protocol.md; the keys
// and values of one call must fit in one message. kForked in a child. Owner: a c10d Store, by
// shared_ptr. Thread: thread-safe.
class Client {
 public:
  virtual ~Client() = default;

  struct Call {
    Deadline deadline = Deadline::Never();
    std::uint64_t scope = 0;       // Round; 0 = the job's own keys.
    std::uint64_t generation = 0;  // 0 = not fenced.
    // Further reasons to stop waiting (a fence of the session); empty = none. Polled with
    // interrupt.
    InterruptCheck stop;
    // Longer than zero: when the call is to end by `deadline` or `stop`, it is cancelled, and what
    // the store then says of it is waited for as long as this, over lost connections too. So that
    // all who take part in an Exchange hear the same of it.
    Duration settle = Duration::zero();
    // Of an Exchange. Not 0: it ends when all members of that generation have come that still are
    // members and have not gone on to a later one; the values of the others are empty.
    std::uint64_t survivors_of = 0;
  };

  virtual Status Set(const std::string& key, std::string value, const Call& call) = 0;
  // wait: until the key exists; otherwise kNotFound.
  virtual Result<std::string> Get(const std::string& key, bool wait, const Call& call) = 0;
  // Missing key counts as 0; kWrongType when the value is not a decimal number. Returns the new
  // value.
  virtual Result<std::int64_t> Add(const std::string& key, std::int64_t amount,
                                   const Call& call) = 0;
  // As c10d: returns the value afterwards, or `expected` when the key is missing and expected is
  // not empty.
  virtual Result<std::string> CompareSet(const std::string& key, std::string expected,
                                         std::string desired, const Call& call) = 0;
  virtual Result<bool> Check(const std::vector<std::string>& keys, const Call& call) = 0;
  virtual Status Wait(const std::vector<std::string>& keys, const Call& call) = 0;
  virtual Result<bool> Delete(const std::string& key, const Call& call) = 0;
  virtual Result<std::int64_t> NumKeys(const Call& call) = 0;
  // Returns the size of the value afterwards, in bytes.
  virtual Result<std::int64_t> Append(const std::string& key, std::string value,
                                      const Call& call) = 0;
  // The values, in the order of the keys. wait: until all keys exist; otherwise kNotFound.
  virtual Result<std::vector<std::string>> MultiGet(const std::vector<std::string>& keys, bool wait,
                                                    const Call& call) = 0;
  // All or none. REQUIRES: as many values as keys.
  virtual Status MultiSet(const std::vector<std::string>& keys, std::vector<std::string> values,
                          const Call& call) = 0;
  // Sorted. Collected page by page: keys set or deleted meanwhile may or may not be among them.
  virtual Result<std::vector<std::string>> ListKeys(const std::string& prefix,
                                                    const Call& call) = 0;
  // Returns the number of items afterwards.
  virtual Result<std::int64_t> QueuePush(const std::string& key, std::string value,
                                         const Call& call) = 0;
  // The oldest item. wait: until there is one, in the order of the callers; otherwise kQueueEmpty.
  virtual Result<std::string> QueuePop(const std::string& key, bool wait, const Call& call) = 0;
  virtual Result<std::int64_t> QueueLength(const std::string& key, const Call& call) = 0;
  // Until `size` callers have arrived at `key`, which then is free for the next barrier.
  virtual Status Barrier(const std::string& key, std::int64_t size, const Call& call) = 0;
  // All-gather: the values of all `size` ranks, in rank order, when all have arrived.
  // kInvalidArgument: ranks disagree on the size.
  virtual Result<std::vector<std::string>> Exchange(const std::string& key, std::int64_t rank,
                                                    std::int64_t size, std::string value,
                                                    const Call& call) = 0;
  // The keys that begin with `prefix`, as they are and as they change: each change once and in
  // order, over lost connections and restarts of a durable store. `from_revision`: the first
  // revision to be told of, one behind a batch's; 0: begins with a snapshot. The client outlives
  // it.
  virtual std::unique_ptr<KeyWatch> Watch(std::string prefix, std::uint64_t from_revision) = 0;
  // Admin: a page of the server's status as JSON.
  virtual Result<std::string> StatusJson(const StatusQuery& query, const Call& call) = 0;

  // Id of the server that answered Hello.
  virtual std::string server_id() const = 0;
  virtual void Close() = 0;
};

// A watch and where it stands; nothing is asked of the store between calls. Owner: the caller of
// Client::Watch. Thread: one at a time.
class KeyWatch {
 public:
  virtual ~KeyWatch() = default;
  // Waits until there is something to tell. As an operation of the client; after kTimeout the next
  // call goes on where this one was. Of a group's scope it ends with the fence of the group.
  virtual Result<WatchBatch> Next(const Client::Call& call) = 0;
};

// Connects (retrying what waiting can help until `deadline`). Errors: semantics row 15.
Result<std::shared_ptr<Client>> Connect(const ConnectOptions& options, InterruptCheck interrupt,
                                        const Clock& clock, Deadline deadline);

// The membership line of a session: own connection, own thread "res-control". See
// <resilient/rendezvous.h>. `started`, where it is not null, is the last that Start does, with its
// deadline, on its caller's thread and before a seat is asked for; not OK: Start fails with it.
std::unique_ptr<Rendezvous> MakeRendezvous(const ConnectOptions& options, InterruptCheck interrupt,
                                           const Clock& clock,
                                           std::function<Status(Deadline)> started = nullptr);

// How a process ended, told by its launcher. Admin; needs no session.
struct ExitNotice {
  int rank = -1;
  std::int64_t pid = 0;          // On this host.
  std::uint64_t start_time = 0;  // 0: not known, the pid on this host counts.
  int exit_code = 0;
  int signal = 0;
  std::string text;
};
Status ReportExit(const ConnectOptions& options, const ExitNotice& notice, const Clock& clock,
                  Deadline deadline);

// What an admin asks for: members of options.job whose silence is no sign of death for a while, as
// they are debugged, frozen or moved. A process that is gone is lost all the same.
struct MemberSelection {
  int rank = -1;     // -1: all ranks.
  std::string host;  // Empty: all hosts.
};
// How many members are held; kNotFound: none matches. `limit` zero, or above an hour: an hour.
Result<std::int64_t> HoldMembers(const ConnectOptions& options, const MemberSelection& which,
                                 Duration limit, const std::string& reason, const Clock& clock,
                                 Deadline deadline);
// How many were held.
Result<std::int64_t> ReleaseMembers(const ConnectOptions& options, const MemberSelection& which,
                                    const Clock& clock, Deadline deadline);
// The server tells its clients and ends as by SIGTERM. kFailedPrecondition without `force` when it
// keeps nothing beyond its memory.
Status DrainStore(const ConnectOptions& options, bool force, const Clock& clock, Deadline deadline);

// A page of the server's status as JSON. Admin; needs neither job nor session, and leaves none
// behind.
Result<std::string> FetchStatus(const ConnectOptions& options, const StatusQuery& query,
                                const Clock& clock, Deadline deadline);

}  // namespace resilient::store
