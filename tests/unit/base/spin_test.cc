// Goal: threads wait awake only where each has a core.
#include <sched.h>

#include <thread>

#include <gtest/gtest.h>

#include "runtime/base/spin.h"

namespace resilient {
namespace {

TEST(Spin, OneThreadHasACore_AndSoManyHaveNone) {
  EXPECT_TRUE(HasCoresFor(1));
  EXPECT_FALSE(HasCoresFor(1'000'000));
}

// As launchers bind ranks to cores.
TEST(Spin, CoresAreThoseThatTheThreadMayRunOn) {
  std::thread bound([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_TRUE(HasCoresFor(1));
    EXPECT_FALSE(HasCoresFor(2));
  });
  bound.join();
}

}  // namespace
}  // namespace resilient
