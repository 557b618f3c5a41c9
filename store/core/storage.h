#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "store/core/keyspace.h"
#include "store/core/messages.h"

namespace resilient::store {

// Names of the rows that a durable store keeps. The first byte is the kind, numbers are eight bytes
// with the highest first, names within a name carry their length; so rows sort by kind, and within
// it by what they belong to. A kind comes after the kinds it refers to: Restore sees the job before
// its keys, the session before its results.
enum class RowKind : char {
  kStore = 'A',        // One: identity, epoch, counters.
  kSession = 'B',      // By session.
  kShared = 'C',       // By id (as index): values that several results have in common.
  kResult = 'D',       // By session, role, seq.
  kJob = 'E',          // By job.
  kWorld = 'F',        // By job, round (as scope).
  kSeat = 'G',         // By job, round (as scope), rank (as index).
  kView = 'H',         // By job, round (as scope): the world's newest view.
  kParticipant = 'I',  // By session; of the session's job.
  kKey = 'J',          // By job, scope, key.
  kQueueItem = 'K',    // By job, scope, key, index: in the order of the queue.
};

std::string StoreRow();
std::string SessionRow(SessionId session);
std::string SharedRow(std::uint64_t id);
std::string ResultRow(SessionId session, Role role, std::uint64_t seq);
std::string JobRow(std::string_view job);
std::string WorldRow(std::string_view job, std::uint64_t round);
std::string SeatRow(std::string_view job, std::uint64_t round, std::uint64_t rank);
std::string ViewRow(std::string_view job, std::uint64_t round);
std::string ParticipantRow(SessionId session);
// The value of these two is the bytes themselves.
std::string KeyRow(std::string_view job, std::uint64_t scope, std::string_view key);
std::string QueueRow(std::string_view job, std::uint64_t scope, std::string_view key,
                     std::uint64_t index);

// A row's name taken apart; what its kind does not have is empty.
struct RowName {
  RowKind kind = RowKind::kStore;
  SessionId session = 0;
  Role role = Role::kRequest;
  std::uint64_t seq = 0;
  std::string job;
  std::uint64_t scope = 0;
  std::string key;
  std::uint64_t index = 0;
};
// nullopt: no name that the functions above make.
std::optional<RowName> ParseRowName(std::string_view row);
// For messages: bytes that do not print are written as \xNN, and a long name is cut.
std::string PrintableRow(std::string_view row);

// All rows of a store, by name.
using Rows = std::map<std::string, std::string>;

}  // namespace resilient::store
