// Goal: readers of a session's events get them in order, and know of those that they came too late
// for. Method: an EventRing under the hands of the test.
#include "runtime/recovery/event_ring.h"

#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

SessionEvent EventOf(std::uint64_t generation) {
  SessionEvent event;
  event.generation = generation;
  return event;
}

TEST(EventRing, Empty_HasNone) {
  const EventRing ring;
  EXPECT_FALSE(ring.Next(0));
  EXPECT_EQ(ring.last(), 0u);
}

TEST(EventRing, EachReader_GetsThemInOrder) {
  EventRing ring;
  for (std::uint64_t number = 1; number <= 3; ++number) ring.Add(EventOf(10 + number));
  for (std::uint64_t after = 0; after < 3; ++after) {
    const auto event = ring.Next(after);
    ASSERT_TRUE(event);
    EXPECT_EQ(event->number, after + 1);
    EXPECT_EQ(event->generation, 11 + after);
    EXPECT_EQ(event->missed, 0u);
  }
  EXPECT_FALSE(ring.Next(3));
}

TEST(EventRing, AtItsLimit_MissesNothing_BeyondItTheOldest) {
  EventRing ring;
  for (std::uint64_t number = 1; number <= kSessionEventsKept; ++number) ring.Add(EventOf(number));
  EXPECT_EQ(ring.Next(0)->number, 1u);
  EXPECT_EQ(ring.Next(0)->missed, 0u);
  for (int more = 0; more < 5; ++more) ring.Add(EventOf(0));
  const auto event = ring.Next(2);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->number, 6u);
  EXPECT_EQ(event->generation, 6u);
  EXPECT_EQ(event->missed, 3u);
  EXPECT_EQ(ring.Next(event->number)->missed, 0u);
  EXPECT_EQ(ring.Next(ring.last() - 1)->number, kSessionEventsKept + 5);
}

}  // namespace
}  // namespace resilient::recovery
