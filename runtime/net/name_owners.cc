#include "runtime/net/name_owners.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <linux/sock_diag.h>
#include <linux/unix_diag.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "runtime/net/sock_diag.h"

namespace resilient {

namespace {

// Since Linux 5.3; the headers may be older.
constexpr std::uint32_t kShowUser = 0x40;    // UDIAG_SHOW_UID
constexpr std::uint16_t kUserAttribute = 7;  // UNIX_DIAG_UID

struct Question {
  nlmsghdr header;
  unix_diag_req asked;
};

Question AllSockets() {
  Question question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  question.asked.sdiag_family = AF_UNIX;
  question.asked.udiag_states = ~0u;
  question.asked.udiag_show = UDIAG_SHOW_NAME | kShowUser;
  return question;
}

// What one answer says.
struct Bound {
  std::optional<std::string> name;  // In the abstract namespace, without its first byte.
  std::optional<uid_t> user;
};

Bound Read(const nlmsghdr& answer) {
  Bound bound;
  const auto* found = static_cast<const unix_diag_msg*>(NLMSG_DATA(&answer));
  const auto* attribute = reinterpret_cast<const rtattr*>(found + 1);
  auto left = static_cast<std::uint32_t>(answer.nlmsg_len - NLMSG_LENGTH(sizeof *found));
  for (; RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left)) {
    const auto* data = static_cast<const char*>(RTA_DATA(attribute));
    const std::size_t size = RTA_PAYLOAD(attribute);
    if (attribute->rta_type == UNIX_DIAG_NAME && size > 0 && data[0] == '\0') {
      bound.name.emplace(data + 1, size - 1);
    } else if (attribute->rta_type == kUserAttribute && size == sizeof(std::uint32_t)) {
      std::memcpy(&bound.user.emplace(), data, size);
    }
  }
  return bound;
}

}  // namespace

NameOwners OwnersOfNames(int type, std::string_view prefix) {
  NameOwners owners;
  const Question question = AllSockets();
  const auto take = [&owners, type, prefix](const nlmsghdr& answer) {
    if (answer.nlmsg_type != SOCK_DIAG_BY_FAMILY ||
        answer.nlmsg_len < NLMSG_LENGTH(sizeof(unix_diag_msg))) {
      return true;
    }
    const auto* found = static_cast<const unix_diag_msg*>(NLMSG_DATA(&answer));
    // A connection that its listener has not accepted has the listener's name, no inode, and to
    // many kernels it is root's.
    if (found->udiag_type != type || found->udiag_ino == 0) return true;
    Bound bound = Read(answer);
    if (bound.name && bound.user && bound.name->starts_with(prefix)) {
      owners.emplace(*std::move(bound.name), *bound.user);
    }
    return true;
  };
  // What has come of an answer that was cut short is true.
  (void)AskSockDiag(std::as_bytes(std::span(&question, 1)), take);
  return owners;
}

}  // namespace resilient
