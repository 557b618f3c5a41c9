#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <resilient/rendezvous.h>
#include <resilient/store/client.h>

#include "runtime/base/thread.h"
#include "store/client/client_core.h"
#include "store/client/link.h"
#include "store/client/outage_log.h"

namespace resilient::store {

// The control connection of a session: heartbeats, joins, pushed events. Its thread polls the
// socket and a wake descriptor, never blocks on anything else (names and files of credentials have
// threads of their own) and holds no lock while it calls events or tasks. It outlives any outage of
// the store: running collectives do not need it. Methods are those of Rendezvous. Owner:
// MakeRendezvous' result, which leaves it alone in a forked child. Thread: thread-safe.
class ControlClient {
 public:
  ControlClient(const ConnectOptions& options, std::vector<HostPort> addresses,
                InterruptCheck interrupt, const Clock& clock);
  ~ControlClient();

  Status Start(RendezvousEvents& events, Deadline deadline);
  void Join(const JoinRequest& request);
  void Ready(std::uint64_t generation);
  void Acknowledge(std::uint64_t generation);
  void Send(const Report& report);
  void Ask(const Report& report, std::function<void(const Status&)> answered);
  void Tell(const WaitingReport& report);
  void Tell(std::uint64_t ask, const Whereabouts& whereabouts);
  bool Post(std::function<void()> task);
  Duration lease();
  std::string service() const { return link_.peer(); }
  void Close(Deadline deadline);

 private:
  // How far the first connection has come, for Start.
  struct Beginning {
    bool open = false;
    bool refused = false;
    Status trouble;
    Duration lease{};
  };

  Status AwaitBeginning(Deadline deadline);
  bool closing();

  // From here on: on the control thread.
  void Run();
  bool Step();  // False: the thread ends.
  Instant NextWake(Instant now);
  void NotePause(Instant now);
  void NoteContact(Instant now);
  void BeginSilence(Instant now);  // The store is heard, or may not be judged by what was before.
  bool HostTakesBeats(Instant now) const;
  bool IsTooLong(Duration silence, Instant now) const;
  void Handle(ServerMessage& message);
  void Handle(Event& event);
  void Handle(const Reply& reply);
  void TellHeld(const HeldEvent& event);
  void OnOpened(Instant now);
  void OnTrouble();
  void LoseSession(const Status& why);
  void Beat(Instant now);       // To the server.
  void TellBeat(Instant now);   // To the session.
  std::uint64_t Submit(Op op);  // Its number; 0: not taken.
  void SendOnce(Op op);         // Not sent again after a lost connection.
  void RunTasks();
  void TellBeginning();
  bool GoodbyeDone(Instant now);
  Duration BeatInterval() const;
  Duration LeaseTtl() const;

  // Constant.
  const Clock& clock_;
  const InterruptCheck interrupt_;
  const ConnectOptions options_;
  const std::string job_;
  const std::string found_server_;  // That answered before this line began; empty: none was asked.
  // Self-synchronised.
  WakeFd wake_;     // Tasks, Close.
  WakeFd started_;  // The beginning has changed.
  // Guarded by mutex_.
  std::mutex mutex_;
  std::deque<std::function<void()>> tasks_;
  Beginning beginning_;
  bool closing_ = false;
  Deadline close_deadline_ = Deadline::Never();
  // Guarded by join_mutex_, which is held while the thread ends.
  std::mutex join_mutex_;
  Thread thread_;
  // Confined to the control thread once it runs.
  RendezvousEvents* events_ = nullptr;
  ClientCore core_;
  StoreLink link_;
  OutageLog outage_;
  std::vector<ServerMessage> inbox_;
  std::map<std::uint64_t, std::uint64_t> joins_;  // Unanswered: their numbers, by seq.
  std::map<std::uint64_t, std::function<void(const Status&)>> asked_;  // Likewise.
  std::string server_id_;  // Empty until the first Welcome.
  std::uint64_t beat_ = 0;
  std::uint64_t confirming_beat_ = 0;  // Not 0: its acknowledgement ends the doubt of a pause.
  std::uint64_t received_ = 0;         // Of the link, when contact was last noted.
  Instant last_tick_;
  Instant last_beat_{};
  Instant last_beat_event_{};
  Instant last_taken_{};  // All that was sent had been acknowledged then.
  Instant last_contact_{};
  Duration starved_{};           // How late this thread was run since, in sum.
  bool held_ = false;            // A member of the job, as far as was told.
  bool lost_ = false;            // This session is out: nothing is sent any more.
  std::uint64_t leave_seq_ = 0;  // Not 0: the goodbye is on its way.
  bool left_ = false;
};

}  // namespace resilient::store
