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

#include "runtime/base/random.h"
#include "store/client/client_core.h"
#include "store/core/server_core.h"

namespace resilient::store::sim {

// Faults of ours rather than of the world: each must be found by an invariant, or the simulator
// proves nothing.
enum class Planted : std::uint8_t {
  kNone,
  kRetryUnderNewSeq,  // A client repeats what was not answered as if it were new.
  kAlwaysDrained,     // The server's shell says that all input was read when it was not.
  kFenceDropped,      // A fence does not reach one of the members.
  kReadyForAll,       // A rank says Ready before it was given the view of that generation.
};

struct SimOptions {
  std::uint64_t seed = 1;
  Planted planted = Planted::kNone;
  bool trace = false;                          // Print what the server logs.
  Duration faults = std::chrono::seconds(20);  // Then the world is kind.
  Duration settle = std::chrono::seconds(20);  // And by then all ranks run.
};

// One job on a real ServerCore, with processes around real ClientCores, on one thread and virtual
// time. The network delays and cuts connections, the server pauses or reads late, processes stop,
// crash and are replaced. What must never happen is looked at in each step; what must happen, after
// the faults. The same seed gives the same run. Owner: the test.
class Sim {
 public:
  explicit Sim(SimOptions options);
  ~Sim();
  Sim(const Sim&) = delete;
  Sim& operator=(const Sim&) = delete;

  // Empty when all was well; otherwise what was violated, when, and the seed.
  std::string Run();

  // What a run was made of, to see that the faults do happen.
  struct Count {
    int crashes = 0;
    int cuts = 0;
    int fences = 0;
    int losses = 0;
    int views = 0;
    int adds = 0;
    int repeats = 0;  // Mutations sent again after a cut.
  };
  const Count& count() const { return count_; }

 private:
  struct Line;
  struct Process;
  struct Connection;

  // Time and chance.
  void At(Instant when, std::function<void()> what);
  void After(Duration delay, std::function<void()> what) { At(now_ + delay, std::move(what)); }
  Duration Between(int low_ms, int high_ms);
  bool Chance(int percent) { return random_.Below(100) < static_cast<std::uint64_t>(percent); }
  void RunUntil(Instant end, const std::function<bool()>& done);

  // The server and its shell.
  void ToServer(std::function<void(Effects&)> input);
  void Input(const std::function<void(Effects&)>& input);
  void Tick();
  void Perform(Effects effects);
  void OnServerSent(const Connection& connection, const ServerMessage& message,
                    std::map<std::uint64_t, std::set<Process*>>& fenced);
  void CheckFencesReachAll(const std::map<std::uint64_t, std::set<Process*>>& fenced);
  void CheckLoss(const std::string& line);
  Duration AwakeSince(Instant when) const;

  // The network.
  void Connect(Process& process, Line& line);
  void SendUp(Line& line, const Request& request);
  void SendDown(Connection& connection, const ServerMessage& message);
  void Break(const std::shared_ptr<Connection>& connection);

  // Processes and their launcher.
  void Spawn(int rank);
  void Do(Process& process, std::function<void()> what);
  void DoAfter(Process& process, Duration delay, std::function<void()> what);
  void Crash(Process& process);
  void Receive(Process& process, Line& line, const ServerMessage& message);
  void OnReply(Process& process, Line& line, const Reply& reply);
  void OnEvent(Process& process, const Event& event);
  void OnView(Process& process, const View& view);
  void Beat(Process& process);
  void Work(Process& process);
  void Submit(Process& process, Line& line, Op op, std::uint64_t scope = 0,
              std::uint64_t generation = 0);
  void JoinWorld(Process& process);

  void PlanFaults();
  void Fault();
  bool AllRun() const;
  void Violated(const std::string& what);

  const SimOptions options_;
  Random random_;
  Instant now_{std::chrono::hours(1)};
  std::multimap<Instant, std::function<void()>> queue_;
  std::string violation_;
  Count count_;
  int ranks_ = 0;
  bool supervised_ = false;
  bool kind_ = false;  // The faults are over.

  ServerCore core_;
  bool server_paused_ = false;    // It neither reads nor ticks.
  bool input_held_back_ = false;  // It ticks, but its input is not read yet.
  std::deque<std::function<void(Effects&)>> inbox_;
  std::vector<std::pair<Instant, Duration>> stalls_;  // When they ended, and how long they count.
  bool last_member_left_ = false;

  ConnectionId last_connection_ = 0;
  std::map<ConnectionId, std::shared_ptr<Connection>> connections_;
  std::vector<std::unique_ptr<Process>> processes_;  // All that ever were; pid = index + 1.
  std::vector<Process*> at_;                         // The present one of each rank.

  // Ghosts: what the truth is, as seen from outside.
  std::map<std::uint64_t, std::vector<Process*>> views_;  // Members by generation.
  std::map<std::uint64_t, std::string> secrets_;          // Of each view.
  std::set<std::pair<Process*, std::uint64_t>> ready_;    // Handed to the server.
  std::set<std::uint64_t> fenced_;                        // Generations.
  std::map<std::uint64_t, Process*> watches_;
};

}  // namespace resilient::store::sim
