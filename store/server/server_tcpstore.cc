// What Server does for clients of torch's TCPStore: their connections are its own, with its limits,
// and what they ask goes to the same core.

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "runtime/base/log.h"
#include "store/server/server.h"
#include "store/tcpstore/client.h"

namespace resilient::store {
namespace {

bool IsOfThisHost(const std::string& peer) {
  const Result<HostPort> address = ParseHostPort(peer);
  if (!address.ok()) return false;
  return address->host == "::1" || address->host.starts_with("127.") ||
         address->host.starts_with("::ffff:127.");
}

}  // namespace

bool Server::ServesTcpStore(const Connection& connection) const {
  switch (options_.tcpstore) {
    case TcpStoreAccess::kOff:
      return false;
    case TcpStoreAccess::kLoopback:
      return IsOfThisHost(connection.name());
    case TcpStoreAccess::kAll:
      return true;
  }
  return false;
}

void Server::HandleQuery(Connection& connection, Instant begun) {
  tcpstore::Client& client = *connection.tcpstore();
  if (!connection.greeted()) {
    if (const Status* foreign = access_.Foreign(connection.id())) {
      return EndTcpStore(connection, *foreign);
    }
    if (IsFull()) {
      metrics_.Refused(Refusal::kConnections);
      return EndTcpStore(connection, Full());
    }
    ++clients_;
    ++tcpstore_clients_;
    newcomers_.Remove(connection.id());
    connection.SetTcpStore();
  }
  Effects effects;
  Status done = client.Answer({*core_, begun, effects});
  if (done.ok() && !connection.HasInput()) done = client.status();
  if (!done.ok()) EndTcpStore(connection, done);
  Apply(std::move(effects), begun);
}

// The protocol has no errors: the client sees its connection end, the log says why.
void Server::EndTcpStore(Connection& connection, const Status& why) {
  if (connection.ending()) return;
  metrics_.Refused(why.code() == StatusCode::kProtocol ? Refusal::kProtocol : Refusal::kRequest);
  if (MayComplain(StrCat("tcpstore ", CodeName(why.code())))) {
    RESILIENT_LOG_RECORD(
        kWarn, connection.Record("refused", StrCat("closed the connection of ", connection.name(),
                                                   ": ", why.message())));
  }
  EndGently(connection);
}

void Server::AnswerTcpStore(Effects& effects) {
  for (std::size_t i = 0; i < effects.send.size(); ++i) {  // They may become more.
    Effects::Outgoing& outgoing = effects.send[i];
    Connection* connection = Find(outgoing.connection);
    if (connection == nullptr || connection->tcpstore() == nullptr) continue;
    auto* reply = std::get_if<Reply>(&outgoing.message);
    if (reply == nullptr || tcpstore::IsBytes(*reply)) continue;
    const Reply ended = std::exchange(*reply, {});  // In its place: its answer.
    Result<std::string> bytes =
        connection->tcpstore()->OnWaitEnded(ended, {*core_, clock_.Now(), effects});
    if (bytes.ok()) {
      std::get<Reply>(effects.send[i].message).value = std::move(*bytes);
    } else {
      EndTcpStore(*connection, bytes.status());
    }
  }
}

void Server::NoteLastRequest(Connection& connection) {
  if (connection.tcpstore() == nullptr) return;
  if (connection.greeted()) --tcpstore_clients_;
  std::optional<Request> last = connection.tcpstore()->LastRequest();
  if (last && !shutting_down_) last_requests_.insert_or_assign(connection.id(), std::move(*last));
}

}  // namespace resilient::store
