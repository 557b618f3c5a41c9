#include "runtime/net/sock_diag.h"

#include <sys/socket.h>

#include <cstdint>
#include <memory>

#include "runtime/net/socket.h"

namespace resilient {

namespace {

constexpr std::size_t kReadBytes = 32768;  // The most that the kernel puts into one read.

}  // namespace

bool AskSockDiag(std::span<const std::byte> question,
                 const std::function<bool(const nlmsghdr& answer)>& take) {
  const FileDescriptor kernel(
      socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_SOCK_DIAG));
  if (!kernel.valid()) return false;
  const ssize_t sent = send(kernel.get(), question.data(), question.size(), 0);
  if (sent != static_cast<ssize_t>(question.size())) return false;
  const auto answers = std::make_unique_for_overwrite<nlmsghdr[]>(kReadBytes / sizeof(nlmsghdr));
  for (int reads = 0; reads < kSockDiagReadsMax; ++reads) {
    const ssize_t size = recv(kernel.get(), answers.get(), kReadBytes, 0);
    if (size <= 0) return false;
    auto left = static_cast<std::uint32_t>(size);
    for (const nlmsghdr* one = answers.get(); NLMSG_OK(one, left); one = NLMSG_NEXT(one, left)) {
      if (one->nlmsg_type == NLMSG_DONE) return true;
      if (one->nlmsg_type == NLMSG_ERROR) return false;
      if (!take(*one)) return true;
    }
  }
  return false;
}

}  // namespace resilient
