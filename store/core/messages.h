#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "runtime/base/process.h"

// The messages of store.proto as plain values, so that neither the cores nor their users see
// protobuf. Field meanings are those of store/proto/store.proto.
namespace resilient::store {

enum class Role : std::uint8_t { kRequest = 1, kControl = 2, kAdmin = 3 };

struct Hello {
  std::string job;
  std::string session;
  std::string incarnation;
  Role role = Role::kRequest;
  ProcessIdentity process;
  std::uint64_t launcher_attempt = 0;
  bool supervised = false;
  std::vector<std::string> features;
  std::string expected_server;
  bool hosts_store = false;
  // Of a control connection: a key that is there as long as the session's lease. Empty: none.
  std::string leased_key;
  std::string leased_value;
  friend bool operator==(const Hello&, const Hello&) = default;
};

struct SetOp {
  std::string key;
  std::string value;
};
struct GetOp {
  std::string key;
  bool wait = false;
};
struct AddOp {
  std::string key;
  std::int64_t amount = 0;
};
struct CompareSetOp {
  std::string key;
  std::string expected;
  std::string desired;
};
struct CheckOp {
  std::vector<std::string> keys;
};
struct WaitOp {
  // What an item does that is pushed to a key: ends all waits for it (kAll), or of those of kTake
  // the one that has waited longest, as its client will take it. kPassOn does not wait: the client
  // does not take it after all, and while there is one, the next of them ends. Not on the wire.
  enum class Turn : std::uint8_t { kAll, kTake, kPassOn };
  std::vector<std::string> keys;
  Turn turn = Turn::kAll;  // REQUIRES: one key, unless kAll.
};
struct DeleteOp {
  std::string key;
};
struct NumKeysOp {};
struct AppendOp {
  std::string key;
  std::string value;
};
struct MultiGetOp {
  std::vector<std::string> keys;
  bool wait = false;
};
struct MultiSetOp {
  std::vector<std::string> keys;
  std::vector<std::string> values;  // One for each key.
};
struct ListKeysOp {
  std::string prefix;
  std::string after;    // The page begins behind this key.
  bool values = false;  // The keys come with their values, as Reply::events.
};
// What happened to keys that begin with `prefix` in `from_revision` or later.
struct WatchOp {
  std::string prefix;
  std::uint64_t from_revision = 0;
  bool wait = false;  // Until something has happened.
};
struct QueuePushOp {
  std::string key;
  std::string value;
};
struct QueuePopOp {
  std::string key;
  bool wait = false;
};
struct QueueLengthOp {
  std::string key;
};
struct BarrierOp {
  std::string key;
  std::int64_t size = 0;
};
struct ExchangeOp {
  std::string key;
  std::int64_t rank = 0;
  std::int64_t size = 0;
  std::string value;
  std::uint64_t survivors_of = 0;  // Not 0: of the members of that generation that still run it.
};
struct CancelOp {
  std::uint64_t seq = 0;
};
struct HeartbeatOp {
  std::uint64_t beat = 0;
};
struct JoinOp {
  JoinRequest request;
};
struct ReadyOp {
  std::uint64_t generation = 0;
  bool acknowledged = false;  // The program has gone on to that generation, which runs.
};
struct LeaveOp {};
struct ReportOp {
  Report report;
};
struct ExitReportOp {
  ProcessIdentity process;
  int rank = -1;
  int exit_code = 0;
  int signal = 0;
  std::string text;
};
// A page of what there is, from a place on; the page before names it.
struct StatusOp {
  std::string job;  // Empty: every one.
  std::string from_job;
  std::uint64_t from_round = 0;
  std::uint64_t from_rank = 0;
};
// Silence of these members ends no lease for a while. Admin. Rank -1 and an empty host mean all.
struct HoldOp {
  int rank = -1;
  std::string host;
  std::uint64_t for_ms = 0;
  std::string reason;
};
struct ReleaseOp {
  int rank = -1;
  std::string host;
};
// The server is to end as by SIGTERM. Admin.
struct DrainOp {
  bool force = false;  // Even when it keeps nothing beyond its memory.
};
// What the sender waits for. Soft: not answered, not kept.
struct WaitingOp {
  WaitingReport report;
};
// Where the sender is.
struct WhereaboutsOp {
  std::uint64_t ask = 0;
  Whereabouts whereabouts;
};

using Op = std::variant<Hello, SetOp, GetOp, AddOp, CompareSetOp, CheckOp, WaitOp, DeleteOp,
                        NumKeysOp, AppendOp, MultiGetOp, MultiSetOp, ListKeysOp, QueuePushOp,
                        QueuePopOp, QueueLengthOp, BarrierOp, ExchangeOp, CancelOp, HeartbeatOp,
                        JoinOp, ReadyOp, LeaveOp, ReportOp, ExitReportOp, StatusOp, WatchOp, HoldOp,
                        ReleaseOp, DrainOp, WaitingOp, WhereaboutsOp>;

struct Request {
  std::uint64_t seq = 0;  // Of the frame.
  std::uint64_t first_unacked = 0;
  std::uint64_t generation = 0;
  std::uint64_t scope = 0;
  Op op;
};

struct Welcome {
  std::string server;
  std::uint32_t version = 0;
  std::uint64_t lease_ttl_ms = 0;
  std::uint64_t heartbeat_interval_ms = 0;
  std::uint64_t key_bytes_max = 0;
  std::uint64_t value_bytes_max = 0;
  bool session_known = false;
  std::uint64_t keys_per_request_max = 0;
  std::uint64_t requests_in_flight_max = 0;
  std::uint64_t frame_body_bytes_max = 0;
  std::uint64_t began_unix_ms = 0;
};

// Values that many replies have in common: kept once and encoded once. Made by Share() of codec.h.
// Thread: immutable.
struct SharedValues {
  std::vector<std::string> values;
  std::string encoded;
};

// A change of a key, or in a listing a key and its value.
struct KeyEvent {
  std::uint64_t revision = 0;  // 0 in a listing.
  std::string key;
  std::optional<std::string> value;  // nullopt: the key was deleted.
  friend bool operator==(const KeyEvent&, const KeyEvent&) = default;
};

struct Reply {
  std::uint64_t seq = 0;  // Of the frame.
  Status status;
  std::string value;
  std::vector<std::string> values;
  // Of a server, instead of values; a reply that was decoded has only values.
  std::shared_ptr<const SharedValues> shared_values;
  std::int64_t number = 0;
  bool flag = false;
  std::shared_ptr<const Welcome> welcome;  // Only in the answer to Hello; null otherwise.
  std::string status_json;
  // Of the store behind a key operation; of a watch the last one that it has seen.
  std::uint64_t revision = 0;
  std::vector<KeyEvent> events;
};

struct RunningEvent {
  std::uint64_t generation = 0;
};
struct JoinRefusedEvent {
  Status why;
  std::uint64_t join = 0;  // JoinRequest::number.
};
struct SessionLostEvent {
  Status why;
};
struct HeartbeatAckEvent {
  std::uint64_t beat = 0;
};
struct PingEvent {
  std::uint64_t ping = 0;
};
// A member of the receiver's job is held, or is so no longer.
struct HeldEvent {
  int rank = -1;
  std::string host;
  std::int64_t pid = 0;
  bool held = false;
  std::uint64_t for_ms = 0;  // At most so long.
  std::string reason;
  std::uint64_t job_for_ms = 0;  // How long at most some member of the job is held; 0: none is.
};
struct DrainingEvent {
  std::string reason;
};
// Somebody waits for the receiver, and asks where it is.
struct WhereEvent {
  std::uint64_t ask = 0;
};
struct LateEvent {
  LateNotice notice;
};
// A verdict about those who wait for the receiver hangs on how far it has come in these groups.
struct AskProgressEvent {
  std::uint64_t generation = 0;
  std::vector<std::string> groups;
};
// Every rank has entered these operations of the receiver, each by its own account.
struct AllEnteredEvent {
  std::uint64_t generation = 0;
  std::vector<EnteredCall> calls;
};
// A view for all its members: kept once and encoded once, as there are as many receivers as it has
// members. Made by Share() of codec.h. Thread: immutable.
struct SharedView {
  View view;
  std::string encoded;
};
// Of a server, instead of View; an event that was decoded has a View.
using SharedViewEvent = std::shared_ptr<const SharedView>;
using Event = std::variant<View, RunningEvent, Fence, JoinRefusedEvent, SessionLostEvent,
                           HeartbeatAckEvent, PingEvent, HeldEvent, DrainingEvent, WhereEvent,
                           LateEvent, AskProgressEvent, AllEnteredEvent, SharedViewEvent>;
// The view that an event tells of, of a server's or a decoded one; null: it tells of none.
inline const View* ViewOf(const Event& event) {
  if (const auto* shared = std::get_if<SharedViewEvent>(&event)) return &(*shared)->view;
  return std::get_if<View>(&event);
}

using ServerMessage = std::variant<Reply, Event>;

// Limits, each checked by the server and told in Welcome where a client must know it. Beyond:
// kTooLarge or kResourceExhausted as an answer; the connection lives on.
inline constexpr std::size_t kKeyBytesMax = 8u << 10;
inline constexpr std::size_t kValueBytesMax = 8u << 20;
inline constexpr std::size_t kKeysPerRequestMax = 16u << 10;
inline constexpr std::size_t kKeysPerPage = 4096;  // Of a listing.
inline constexpr std::size_t kQueueItemsMax = 1u << 20;
// Of the values of one reply, so that it fits a frame; a page of a listing ends below it.
inline constexpr std::size_t kReplyValuesBytesMax = 15u << 20;
inline constexpr std::size_t kPageBytesMax = 1u << 20;
inline constexpr std::size_t kInFlightPerSessionMax = 512;
inline constexpr std::size_t kKeysPerJobMax = 1u << 20;
inline constexpr std::size_t kBytesPerJobMax = 256u << 20;
inline constexpr std::size_t kSessionsMax = 131072;
inline constexpr int kWorldSizeMax = 131072;
inline constexpr std::size_t kJobsMax =
    4096;  // A job without sessions, keys and members is forgotten.
inline constexpr std::size_t kWorldsPerJobMax = 1024;  // At one time.
inline constexpr std::size_t kResultsPerLineMax = kInFlightPerSessionMax;
inline constexpr std::size_t kResultBytesPerLineMax = 16u << 20;
// Of the changes that are kept for watches; who is further behind gets COMPACTED.
inline constexpr std::size_t kChangesPerJobMax = 64u << 10;
inline constexpr std::size_t kChangeBytesPerJobMax = 16u << 20;
// Of one answer to a watch; it holds one change at least.
inline constexpr std::size_t kWatchBatchEventsMax = 1024;
inline constexpr std::size_t kWatchBatchBytesMax = 1u << 20;
inline constexpr Duration kHoldMax = std::chrono::hours(1);
inline constexpr std::size_t kEndpointBytesMax = 4u << 10;
inline constexpr std::size_t kDeviceTextBytesMax = 256;  // Of each text of a DeviceClaim.
// Of the members of one view, so that it fits a frame.
inline constexpr std::size_t kViewBytesMax = 15u << 20;
// Of one report of what a member waits for.
inline constexpr std::size_t kWaitingCallsMax = 64;
inline constexpr std::size_t kMissingRanksMax = 64;  // Of one call; the lowest ones.
inline constexpr std::size_t kLateRanksMax = 8;      // That a notice names.
// Of one question about progress, and of one report that answers.
inline constexpr std::size_t kProgressGroupsMax = 64;
// Of one report: those that its calls are in, and those that it was asked about.
inline constexpr std::size_t kMadeGroupsMax = kWaitingCallsMax + kProgressGroupsMax;
inline constexpr std::size_t kTextBytesMax = 4u << 10;  // Of reports; longer texts are cut.

}  // namespace resilient::store
