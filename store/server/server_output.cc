// How what Server says goes out, and what it does about those who do not read it, or who do not end
// what they send.

#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "store/core/codec.h"
#include "store/server/server.h"

namespace resilient::store {
namespace {

// Large answers are handed to the kernel as they come, so that the queue limit counts only what the
// peer really leaves unread.
constexpr std::size_t kFlushAtBytes = 256u << 10;
// Of all connections: one step may tell thousands of them the same.
constexpr std::size_t kFlushAllAtBytes = 16u << 20;

std::size_t Mebibytes(std::size_t bytes) { return bytes >> 20; }

}  // namespace

void Server::SendTo(Effects::Outgoing&& outgoing) {
  Connection* connection = Find(outgoing.connection);
  if (connection == nullptr || connection->ending()) return;
  const std::size_t before = connection->UnflushedBytes();
  const Reply* reply = std::get_if<Reply>(&outgoing.message);
  const bool welcomes = reply != nullptr && reply->welcome != nullptr;
  connection->Send(std::move(outgoing.message));
  unflushed_ += connection->UnflushedBytes() - before;
  if (welcomes) connection->SetWelcomed();
  Touch(*connection);
  if (connection->UnflushedBytes() >= kFlushAtBytes) {
    FlushOut(*connection);
  } else if (unflushed_ >= kFlushAllAtBytes) {
    FlushTouched(touched_.size());
  }
}

void Server::Touch(Connection& connection) {
  if (connection.touched()) return;
  connection.set_touched(true);
  touched_.push_back(connection.id());
}

void Server::FlushTouched(std::size_t most) {
  while (most > 0 && !touched_.empty()) {  // They may become more.
    --most;
    Connection* connection = Find(touched_.front());
    touched_.pop_front();
    if (connection != nullptr) FlushTouched(*connection);
  }
  if (touched_.empty()) unflushed_ = 0;
  UpdateIdle();
}

void Server::FlushTouched(Connection& connection) {
  if (!connection.touched()) return;  // Meanwhile.
  connection.set_touched(false);
  if (!touched_.empty() && touched_.back() == connection.id()) touched_.pop_back();
  if (!FlushOut(connection)) return;
  // Room again without a word from libuv: everything fitted at once.
  if (connection.HasToDo()) Defer(connection);
  connection.UpdateReading();
}

// What one step has told thousands of clients goes out in parts, so that others have their turns
// in between.
void Server::FlushForAWhile() {
  if (touched_.empty()) return;
  const Instant until = clock_.Now() + kFlushPerTurn;
  do {
    FlushTouched(kFlushAtOnce);
  } while (!touched_.empty() && clock_.Now() < until);
}

bool Server::FlushOut(Connection& connection) {
  if (!connection.Flush()) {
    Drop(connection);
    return false;
  }
  NoteOutput(connection);
  const std::size_t queued = connection.QueuedBytes();
  const std::size_t most = options_.limits.output_bytes;
  if (queued > most) {
    Cut(connection, StrCat("it does not read: ", Mebibytes(queued),
                           " MiB wait for it, the limit is ", Mebibytes(most), " MiB"));
  } else if (output_.total() > options_.limits.output_total_bytes) {
    CutWorst();
  }
  return !connection.closed();
}

void Server::NoteOutput(Connection& connection) {
  const std::size_t queued = connection.QueuedBytes();
  if (queued == 0 && output_.empty()) return;
  output_.Note(connection.id(), {queued, connection.QueuedMemory(), connection.WrittenBytes()},
               clock_.Now());
}

void Server::RenewOutput() {
  for (const ConnectionId id : output_.All()) NoteOutput(*Find(id));
}

void Server::Cut(Connection& connection, std::string_view why) {
  metrics_.Refused(Refusal::kSlow);
  RESILIENT_LOG_RECORD(kWarn, connection.Record("cut", StrCat("cut the connection of ",
                                                              connection.name(), ": ", why)));
  Drop(connection);
}

void Server::CutWorst() {
  const std::size_t most = options_.limits.output_total_bytes;
  RenewOutput();
  while (output_.total() > most) {
    Connection& worst = *Find(*output_.Largest());
    Cut(worst, StrCat("it does not read: ", Mebibytes(worst.QueuedMemory()),
                      " MiB wait for it, the most of ", Mebibytes(output_.total()),
                      " MiB that wait for all clients; the limit is ", Mebibytes(most), " MiB"));
  }
}

void Server::OnPartialInput(Connection& connection, std::size_t bytes) {
  input_.Note(connection.id(), bytes);
  const std::size_t most = options_.limits.input_total_bytes;
  if (input_.total() <= most) return;
  while (input_.total() > most) {
    Connection& oldest = *Find(*input_.Oldest());
    Cut(oldest,
        StrCat("it does not end its request: ", Mebibytes(input_.Of(oldest.id())),
               " MiB of one have come, begun before the others of ", Mebibytes(input_.total()),
               " MiB that are not whole; the limit is ", Mebibytes(most), " MiB"));
  }
  Settle();
}

void Server::CutStuck(Instant now) {
  if (output_.empty()) return;
  RenewOutput();
  const auto patience = std::chrono::seconds(options_.limits.slow_seconds);
  for (const ConnectionId id : output_.Stuck(kOutputSoftLimit, now - patience)) {
    Connection& connection = *Find(id);
    Cut(connection, StrCat("it does not read: ", Mebibytes(connection.QueuedBytes()),
                           " MiB wait for it, and it has read nothing for ",
                           options_.limits.slow_seconds, " s"));
  }
}

}  // namespace resilient::store
