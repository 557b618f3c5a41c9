#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/rendezvous.h>

#include "runtime/base/robust_token.h"

// Who watches whom on a host, and what follows from what is seen. Pure.
namespace resilient::recovery {

// What a rank tells the others of itself, as JoinRequest::endpoint carries it: how its communicator
// is reached, then its token and the host on which it can be seen, on a line of their own.
// Thread: value type.
struct SessionEndpoint {
  std::string communicator;  // CommunicatorFactory::endpoint().
  std::string token;         // RobustToken::EncodeOffer; empty: this rank cannot be watched.
  std::string host_id;       // ShortHostId(); empty with `token`.
};
std::string EncodeSessionEndpoint(const SessionEndpoint& endpoint);
SessionEndpoint DecodeSessionEndpoint(std::string_view text);

// ShmHostId in 16 hexadecimal digits, as there are as many of them in a view as ranks; "" of "".
// Should two be equal for once, the tokens still tell their processes apart.
std::string ShortHostId(std::string_view host_id);

// Another rank of this host. Thread: value type.
struct Neighbour {
  int rank = -1;
  std::string host;
  std::string incarnation;
  RobustToken::Offer token;

  friend bool operator==(const Neighbour&, const Neighbour&) = default;
};

// Of one rank; one word of a wait is the watcher's own.
inline constexpr std::size_t kNeighboursMax = 127;

// Whom the rank that joined with `own` watches: the processes of its host, from the one after it on
// in the order of ranks, round once and kNeighboursMax at most. So each has as many watchers.
std::vector<Neighbour> NeighboursOf(const View& view, int rank, const SessionEndpoint& own);

enum class TokenVerdict : std::uint8_t {
  kWatch,      // Its holder lives.
  kDied,       // Its process has come to its end.
  kLookAgain,  // The holder is dead, its process not yet as far as can be seen.
  kForget,     // Let go, or a thread ended alone: other evidence decides.
};

// How long a dead holder's process may take to show that it ends. All threads of a process are
// told to end at once; how soon each does is up to the scheduler.
inline constexpr Duration kEndShownWithin = std::chrono::seconds(2);

// `word`: of the token. `ending`: of its process. `dead_for`: since the word first said so.
TokenVerdict Judge(std::uint32_t word, bool ending, Duration dead_for);

}  // namespace resilient::recovery
