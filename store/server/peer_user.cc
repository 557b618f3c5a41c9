#include "store/server/peer_user.h"

#include <arpa/inet.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "runtime/net/local_socket.h"
#include "runtime/net/sock_diag.h"
#include "runtime/net/socket.h"

namespace resilient::store {
namespace {

constexpr Duration kOwnConnectMax = std::chrono::seconds(1);

// One end of a connection, as inet_diag has it: in network order.
struct End {
  std::array<std::uint32_t, 4> address{};
  std::uint16_t port = 0;
  bool v6 = false;

  bool IsLoopback() const {
    if (!v6) return (ntohl(address[0]) >> 24) == IN_LOOPBACKNET;
    return std::ranges::equal(address, std::array<std::uint32_t, 4>{0, 0, 0, htonl(1)});
  }
};

using NameOf = int (*)(int, sockaddr*, socklen_t*);

std::optional<End> EndOf(int socket, NameOf name_of) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (name_of(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return std::nullopt;
  End end;
  if (storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
    end.address[0] = v4->sin_addr.s_addr;
    end.port = v4->sin_port;
    return end;
  }
  if (storage.ss_family != AF_INET6) return std::nullopt;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
  std::memcpy(end.address.data(), &v6->sin6_addr, sizeof end.address);
  end.port = v6->sin6_port;
  // The other end may be a socket of IPv4.
  end.v6 = !IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr);
  if (!end.v6) end.address = {end.address[3], 0, 0, 0};
  return end;
}

struct Question {
  nlmsghdr header;
  inet_diag_req_v2 asked;
};

Question QuestionOf(const End& here, const End& peer) {
  Question question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  inet_diag_req_v2& asked = question.asked;
  asked.sdiag_family = peer.v6 ? AF_INET6 : AF_INET;
  asked.sdiag_protocol = IPPROTO_TCP;
  asked.idiag_states = ~0u;
  asked.id.idiag_sport = peer.port;
  asked.id.idiag_dport = here.port;
  std::ranges::copy(peer.address, asked.id.idiag_src);
  std::ranges::copy(here.address, asked.id.idiag_dst);
  std::ranges::fill(asked.id.idiag_cookie, INET_DIAG_NOCOOKIE);
  return question;
}

std::optional<uid_t> Ask(const Question& question) {
  std::optional<uid_t> user;
  const auto take = [&user](const nlmsghdr& answer) {
    const bool found = answer.nlmsg_type == SOCK_DIAG_BY_FAMILY &&
                       answer.nlmsg_len >= NLMSG_LENGTH(sizeof(inet_diag_msg));
    if (!found) return false;
    const auto* socket = static_cast<const inet_diag_msg*>(NLMSG_DATA(&answer));
    // One that its process has closed has no inode, and to many kernels it is root's.
    if (socket->idiag_inode != 0) user = socket->idiag_uid;
    return false;
  };
  (void)AskSockDiag(std::as_bytes(std::span(&question, 1)), take);
  return user;
}

}  // namespace

PeerUser FindPeerUser(int socket) {
  if (const auto user = UserOfPeer(socket)) return {.is_here = true, .user = user};
  const auto here = EndOf(socket, getsockname);
  const auto peer = EndOf(socket, getpeername);
  if (!here || !peer) return {};
  const auto user = Ask(QuestionOf(*here, *peer));
  return {.is_here = user.has_value() || peer->IsLoopback(), .user = user};
}

bool KernelTellsPeerUsers() {
  const Result<FileDescriptor> listener = ListenTcp({.host = "127.0.0.1", .port = 0}, 1);
  if (!listener.ok()) return false;
  const Result<HostPort> address = LocalAddress(*listener);
  if (!address.ok()) return false;
  const Result<FileDescriptor> client = StartConnectTcp(*address);
  if (!client.ok()) return false;
  std::vector<PollEntry> entries{{.fd = listener->get(), .events = POLLIN, .revents = 0}};
  const SystemClock clock;
  PollUntil(entries, clock, Deadline::After(clock.Now(), kOwnConnectMax));
  const Result<FileDescriptor> accepted = AcceptTcp(*listener);
  return accepted.ok() && accepted->valid() && FindPeerUser(accepted->get()).user == geteuid();
}

}  // namespace resilient::store
