#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/group.h"
#include "runtime/comm/striped_stream.h"

// The part of CommGroup that makes links of several sockets. Who connects makes the first one as
// any other, and the further ones once the peer has accepted it.

namespace resilient {

int CommGroup::StreamsTo(int peer) const {
  const auto host = [&](int rank) {
    return DecodeEndpoint(spec_.members[static_cast<std::size_t>(rank)].endpoint).host_id;
  };
  const std::string own = host(spec_.rank);
  return own.empty() || own != host(peer) ? context_.streams : 1;
}

std::unique_ptr<ByteStream> CommGroup::WithMore(int peer, std::unique_ptr<ByteStream> first) const {
  const int streams = StreamsTo(peer);
  if (streams == 1) return first;
  Result<std::unique_ptr<StripedStream>> striped = StripedStream::Make(streams, std::move(first));
  if (striped.ok()) return std::move(*striped);
  RESILIENT_LOG(kWarn, striped.status().message());
  return nullptr;
}

void CommGroup::ConnectMore(int peer, Lane lane) {
  for (int stream = 1; stream < StreamsTo(peer); ++stream)
    PeerAt(peer).more.push_back(MakeConnector(peer, lane, stream));
}

void CommGroup::OnMoreConnected(Connector& connector, std::unique_ptr<ByteStream> stream) {
  const Hello& hello = connector.hello();
  Peer& peer = PeerAt(hello.to);
  const auto& slot = hello.lane == Lane::kCollective ? peer.link : peer.outbound;
  if (slot != nullptr) slot->Attach(hello.stream, std::move(stream));
}

Routing CommGroup::AdoptMore(const Hello& hello, FileDescriptor& socket) {
  Peer& peer = PeerAt(hello.from);
  const auto& slot = hello.lane == Lane::kCollective ? peer.link : peer.inbound;
  // One that is refused is made again: by then the link is up here, or down there.
  if (slot == nullptr || slot->dead() || hello.streams != StreamsTo(hello.from))
    return Routing::kRefuse;
  if (!SendReply(socket.get(), HelloVerdict::kAccepted)) return Routing::kRefuse;
  slot->Attach(hello.stream, MakeTcpStream(std::move(socket)));
  return Routing::kTaken;
}

Status CommGroup::StreamsDiffer(const Hello& hello) const {
  const GroupMember& own = spec_.members[static_cast<std::size_t>(spec_.rank)];
  const GroupMember& member = spec_.members[static_cast<std::size_t>(hello.from)];
  return Status(
      StatusCode::kSetting,
      StrCat("RESILIENT_SOCKET_STREAMS is ", hello.streams, " on rank ", member.global_rank, " (",
             member.host, ") and ", StreamsTo(hello.from), " on rank ", own.global_rank, " (",
             own.host, "): set the same on all ranks of the job"),
      {.rank = member.global_rank,
       .host = member.host,
       .pid = member.pid,
       .generation = spec_.generation,
       .group = spec_.name});
}

}  // namespace resilient
