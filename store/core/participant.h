#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>
#include <resilient/status.h>

#include "store/core/keyspace.h"
#include "store/core/messages.h"

namespace resilient::store {

enum class ParticipantState : std::uint8_t {
  kWaiting,  // For the holder of its seat to answer or to end.
  kSeated,
  kRefused,  // Alive, without a seat.
  kLeft,
  kLost,
  kSpare,  // For any seat to become free.
};

// A member's word that the links to another broke; looked into by a ping.
struct Accusation {
  std::uint64_t generation = 0;
  int reporter = -1;
  std::string text;
};

// While it lasts silence is no evidence of death: a debugger, a frozen container, a live migration.
struct Hold {
  Duration limit{};
  std::string reason;
};

// Whether a launcher that tells of `told` means `known`; it need not know start and namespace.
bool SameProcess(const ProcessIdentity& known, const ProcessIdentity& told);

// A session from its first join on. Owner: Membership. Thread: caller-synchronised.
struct Participant {
  // Kept with the session.
  SessionId session = 0;
  Hello hello;

  // Kept in a row of its own.
  JoinRequest request;
  ParticipantState state = ParticipantState::kRefused;
  std::uint64_t round = 0;               // Of its seat; of the last one for left and lost.
  Status out;                            // Why refused or lost.
  std::optional<Accusation> accusation;  // Its links broke.
  SessionId holder = 0;                  // In kWaiting: who must answer or end.
  int wanted_size = 0;                   // In kWaiting: of the holder's world.
  std::optional<Hold> hold;              // Only while Active().
  // Of a spare: the rank that it asked for, and has in the next world; negative: none. Less than
  // request.world_size, which a repeated join does not change.
  int claim = -1;
  bool fresh = false;  // Its seat was given to it as a spare, and it has had no view yet.
  // The generation of its first view, then the one that it has acknowledged last; 0: no view yet.
  std::uint64_t since = 0;

  // Not kept: found out anew by a server that starts.
  bool connected = true;  // Its control connection is up.
  Instant last_seen{};
  std::optional<Instant> closed_at;
  bool exited = false;               // Its process is gone; a report may still come.
  std::string ended;                 // How, as far as is known before the report.
  std::vector<SessionId> claimants;  // Wait for this one's seat.
  int answers_due = 0;               // Frames until it counts as alive.
  // A peer needs it in that generation and has its goodbye: when it leaves, that fences. Told again
  // by a rebuild.
  std::uint64_t needed_in = 0;
  std::string needed_by;  // With it: the member that needs this one, and for what.
  Instant held_until{};   // Of a hold; its limit anew when a server starts.
  // Of a spare while the job has no world: when it is sent away, and whether as one that nobody
  // needs any more.
  Instant bereft_until = kNever;
  bool outlived = false;

  bool Active() const {
    return state == ParticipantState::kWaiting || state == ParticipantState::kSeated ||
           state == ParticipantState::kRefused || state == ParticipantState::kSpare;
  }
};

}  // namespace resilient::store
