#pragma once

#include <unistd.h>

#include <gtest/gtest.h>

#include "runtime/base/check.h"

namespace resilient {

inline constexpr uid_t kNobody = 65534;

// What this process does meanwhile is another user's. REQUIRES: it is root's (SKIP_UNLESS_ROOT).
// Thread: of all threads, as glibc has it.
class AsUser {
 public:
  explicit AsUser(uid_t user) { RESILIENT_CHECK(seteuid(user) == 0); }
  ~AsUser() { RESILIENT_CHECK(seteuid(0) == 0); }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;
};

#define SKIP_UNLESS_ROOT() \
  if (geteuid() != 0) GTEST_SKIP() << "only root can be another user"

}  // namespace resilient
