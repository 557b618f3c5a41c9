#pragma once

#include <linux/netlink.h>

#include <cstddef>
#include <functional>
#include <span>

namespace resilient {

// One question to the kernel about the sockets of this network namespace (sock_diag(7)), a netlink
// message with its header. `take` gets its answers in turn, and says whether it wants more. False:
// the kernel does not answer such questions here, or not to the end in kSockDiagReadsMax reads.
// Never blocks: the kernel makes an answer when it is read. Thread: thread-safe.
bool AskSockDiag(std::span<const std::byte> question,
                 const std::function<bool(const nlmsghdr& answer)>& take);

inline constexpr int kSockDiagReadsMax = 512;  // Of up to 32 KiB: some 100,000 sockets.

}  // namespace resilient
