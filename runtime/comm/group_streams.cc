#include <utility>

#include "runtime/base/log.h"
#include "runtime/comm/group.h"

// The part of CommGroup that makes links of several sockets, and encrypted ones. Who connects makes
// the first socket as any other, and the further ones once the peer has accepted it. Encryption
// stands above all of them, so its key is that of the first.

namespace resilient {

int CommGroup::StreamsTo(int peer) const {
  if (layout_.SameHost(spec_.rank, peer)) return 1;
  return endpoints_[static_cast<std::size_t>(spec_.rank)].streams;
}

std::unique_ptr<StripedStream> CommGroup::MakeStriped(int peer) {
  const int streams = StreamsTo(peer);
  if (streams == 1) return nullptr;
  Result<std::unique_ptr<StripedStream>> striped = StripedStream::Make(streams);
  if (striped.ok()) return std::move(*striped);
  FailCommunicator(
      Status(striped.status().code(), StrCat(striped.status().message(), " (group ", spec_.name,
                                             "); raise the limit of open files (ulimit -n)")));
  return nullptr;
}

std::unique_ptr<ByteStream> CommGroup::WithFirst(std::unique_ptr<StripedStream> striped,
                                                 std::unique_ptr<ByteStream> first) {
  if (striped == nullptr) return first;
  striped->Attach(0, std::move(first));
  return striped;
}

std::unique_ptr<ByteStream> CommGroup::Encrypted(std::unique_ptr<ByteStream> stream, TlsRole role,
                                                 std::string_view hello_proof,
                                                 EncryptedStream::Use use) {
  if (context_.encryption == nullptr) return stream;
  return context_.encryption->Wrap(std::move(stream), role, spec_.secret, hello_proof, use);
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
  if (slot == nullptr || slot->dead()) return Routing::kRefuse;
  if (!SendReply(hello, socket.get(), HelloVerdict::kAccepted)) return Routing::kRefuse;
  slot->Attach(hello.stream, MakeTcpStream(std::move(socket)));
  return Routing::kTaken;
}

}  // namespace resilient
