#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/recovery/lost_links.h"
#include "runtime/recovery/replay_log.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_session.h"

// The parts of a Sim, for its files.
namespace resilient::store::sim {

inline constexpr Duration kTtl = std::chrono::seconds(2);
// What a pause of the server counts at most.
inline constexpr Duration kLateTick = 4 * kTickInterval;

// Each process holds a key of this name and its pid by its lease.
inline constexpr char kPresent[] = "present/";
// And commits to keys of this name and its rank.
inline constexpr char kCommits[] = "commit/";

inline double SecondsOf(Instant when) {
  return std::chrono::duration<double>(when.time_since_epoch()).count() - 3600;
}

struct Sim::Connection {
  ConnectionId id = 0;
  Process* process = nullptr;
  Line* line = nullptr;
  Instant last_up{};  // Deliveries keep their order.
  Instant last_down{};
  bool broken = false;      // Nothing passes any more.
  bool server_open = true;  // The server has not closed it nor heard that it is closed.
};

// One of the two lines of a process to the store.
struct Sim::Line {
  Line(Hello hello, std::uint64_t seed) : core(std::move(hello)), backoff(seed) {}
  ClientCore core;
  Backoff backoff;
  std::shared_ptr<Connection> connection;
  bool welcomed = false;
};

// What one rank has given to the collectives of a generation, by their order there.
struct Given {
  std::uint64_t epoch = 0;
  std::uint64_t number = 0;
  std::uint64_t input = 0;
};

// The layer of one process that runs again what a broken link has ended. One call at a time, as the
// program above it has one thread.
struct Replay {
  enum class Phase : std::uint8_t { kOpen, kHealing, kFailed };
  Phase phase = Phase::kOpen;
  std::uint64_t epoch = 0;  // Generation in which its numbers began; 0: none yet.
  recovery::ReplayLog log;
  std::map<std::uint64_t, std::uint64_t> inputs;  // As long as the log keeps them.
  std::uint64_t told = 0;                         // The last one whose result the program has.
  std::uint64_t running = 0;                      // In a communicator; 0: none.
  bool in_call = false;                           // With a number, or in a receive.
  bool blocked = false;                           // The program waits for its operation.
  bool queued = false;                            // It has no number yet.
  std::deque<std::uint64_t> again;                // To be run before anything else.
  std::string veto;
  bool aborts = false;  // As soon as operations start by themselves again.
  Status first_cause;
  std::uint64_t link_fence = 0;
  std::uint64_t acknowledged = 0;  // Generation.
  Instant heal_by{};
  // By generation what each rank has said, and the own part in that.
  std::map<std::uint64_t, std::map<int, std::string>> heard;
  std::shared_ptr<recovery::Flight> meeting;  // Null: in none.
  std::uint64_t place = 0;                    // Generation of the last meeting.
  Heal heal = Heal::kNot;                     // For the counts.
};

// What one rank put into a collective.
struct Sim::Contribution {
  std::uint64_t generation = 0;
  int number = 0;
};

// A rank of the job: a session, and a program that runs operations, adds to a counter of its own,
// commits, meets failures and rebuilds.
struct Sim::Process {
  int place = 0;  // Among those that its launcher starts: its rank before the world became smaller.
  int home = 0;   // The one for which it was started.
  int rank = 0;   // As it knows, and so the size.
  int size = 0;
  std::string presence;  // Its leased key.
  std::int64_t pid = 0;
  bool alive = true;
  bool stopped = false;
  bool doomed = false;  // Told that it is out: it ends.
  bool ran_before = false;
  std::deque<std::function<void()>> deferred;
  std::unique_ptr<Line> control;
  std::unique_ptr<Line> request;

  std::unique_ptr<SimSession> session;
  std::uint64_t generation() const { return session->generation(); }
  std::uint64_t round() const { return session->view().round; }
  bool running() const { return session->running(); }
  int refusals = 0;       // Of joins since it last ran.
  int tries = 0;          // Rebuilds that failed, likewise.
  int refused_least = 0;  // The world that it wanted when it was refused last, likewise.
  std::map<std::uint64_t, SimWish> wishes;  // Of each join.
  std::uint64_t synced = 0;                 // Generation of its last sync: of its commits.
  std::int64_t commit = 0;                  // Number of the last one.
  std::optional<std::uint64_t> left;        // Seq of its goodbye.
  // What is to happen to it in a state of its recovery.
  struct Doom {
    SessionState state;
    Blow blow;
  };
  std::optional<Doom> doom;

  std::int64_t applied = 0;  // Adds that were answered.
  int open_ops = 0;
  std::map<std::uint64_t, Op> sent;  // By seq: what an answer is checked against.
  std::int64_t pushed = 0;           // Asked for.
  std::int64_t popped = 0;
  std::deque<std::string> items;                 // Pushed for sure, and not popped yet.
  std::set<std::string> early;                   // Popped before the answer to the push came.
  std::map<std::uint64_t, int> arrivals;         // At the barrier, by generation.
  std::map<std::uint64_t, int> passed;           // Likewise, the answers.
  std::map<std::uint64_t, std::uint64_t> waits;  // Seq to generation.
  std::uint64_t beat = 0;

  std::int64_t written = 0;  // Changes of its own key that it asked for.
  bool writing = false;
  WatchCursor watch{"watched/", 0};
  int snapshots = 0;
  // Of each key the number of the last change that the watch told of; or of a key that is gone,
  // how, nobody said, that of the last change before.
  struct Watched {
    std::int64_t number = 0;
    bool exact = false;
  };
  std::map<std::string, Watched> watched;

  // The calls of one generation.
  struct Calls {
    std::shared_ptr<recovery::Flight> flight;
    int number = 0;    // Of calls.
    int entered = 0;   // Collectives,
    int finished = 0;  // and those of them that were right.
    bool waiting = false;
    int receives_from = -1;  // It waits for this rank instead of in a collective, and in vain.
    Instant since{};
    std::map<int, Contribution> known;  // The last one of each of the others.
    std::set<int> gone;                 // Their links are lost, and nobody was told so yet.
    recovery::LostLinks links;          // Those that its session knows.
    std::set<int> left;                 // They have said goodbye.
    std::vector<Given> given;
    bool synchronises = true;  // The present one; otherwise it is a broadcast of rank 0.
    std::set<int> told;        // Whom it has said to wait for.
    Duration stood_still{};    // At the longest.
  };
  std::map<std::uint64_t, Calls> calls;  // By generation.
  std::optional<Instant> stands_since;
  std::optional<Instant> stood_until;
  bool will_receive = false;
  bool will_stand_still = false;
  Replay replay;

  // Ghosts of the server's side.
  Instant last_arrival{};  // Of a frame of the control line, read or not.
  Instant last_hello{};
  ConnectionId greeted = 0;  // The control connection whose Hello came last.
  Instant last_close{};
  bool lost = false;
  bool has_left = false;
  Instant ended_at{};
  bool held = false;
  Instant held_until{};  // Of the last hold that has ended.
};

}  // namespace resilient::store::sim
