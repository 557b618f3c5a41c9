#include "runtime/net/local_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/net/unix_address.h"

namespace resilient {
namespace {

constexpr int kSendBufferBytes = 1 << 20;
constexpr uid_t kRoot = 0;
// What the kernel calls a user that this user namespace has no number for: it may be anybody.
constexpr uid_t kUnmapped = 65534;

FileDescriptor NewUnixSocket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// By which a listener that this address reaches may have been bound; one of "::" takes both
// families, as a rule.
std::vector<std::string> ListeningHosts(const std::string& numeric_host) {
  if (numeric_host.find(':') != std::string::npos) return {numeric_host, "::"};
  return {numeric_host, "0.0.0.0", "::"};
}

bool IsOfThisHost(const std::string& numeric_host) {
  const Result<std::string> own = OwnAddressTowards(numeric_host);
  return own.ok() && (*own == numeric_host || numeric_host.starts_with("127."));
}

bool Connects(const FileDescriptor& made, uid_t user, const HostPort& listener) {
  const auto address = UnixAddress::Abstract(LocalSocketName(user, listener));
  return address && connect(made.get(), address->get(), address->size()) == 0;
}

}  // namespace

std::string LocalSocketName(uid_t user, const HostPort& listener) {
  return StrCat("resilient-listener-", user, "-", listener.port, "-", listener.host);
}

FileDescriptor ListenLocally(const HostPort& listener, int backlog) {
  const auto address = UnixAddress::Abstract(LocalSocketName(geteuid(), listener));
  FileDescriptor made = NewUnixSocket();
  const bool listens = address && made.valid() &&
                       bind(made.get(), address->get(), address->size()) == 0 &&
                       listen(made.get(), backlog) == 0;
  return listens ? std::move(made) : FileDescriptor();
}

FileDescriptor ConnectLocally(const HostPort& numeric_address) {
  const uid_t self = geteuid();
  if (self == kUnmapped || !IsOfThisHost(numeric_address.host)) return {};
  FileDescriptor made = NewUnixSocket();
  if (!made.valid()) return {};
  for (const uid_t user : {self, kRoot}) {
    for (const std::string& host : ListeningHosts(numeric_address.host)) {
      if (!Connects(made, user, {host, numeric_address.port})) continue;
      if (UserOfPeer(made.get()) == user) {
        WidenLocalSocket(made.get());
        return made;
      }
      made = NewUnixSocket();
    }
  }
  return {};
}

void WidenLocalSocket(int socket) {
  static_cast<void>(
      setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof kSendBufferBytes));
}

std::optional<uid_t> UserOfPeer(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  if (peer.pid == 0 && peer.uid == static_cast<uid_t>(-1)) return std::nullopt;
  return peer.uid;
}

}  // namespace resilient
