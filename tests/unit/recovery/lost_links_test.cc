// Goal: a link that ended without a goodbye is a need only where an operation waits for that peer
// over that link.
#include "runtime/recovery/lost_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace resilient::recovery {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

WaitingCall CallOf(const std::string& group, std::vector<int> missing) {
  WaitingCall call;
  call.group = group;
  call.operation.seq = 3;
  call.operation.what = "barrier()";
  call.operation.missing = std::move(missing);
  return call;
}

TEST(LostLinks, NobodyWaits_IsNoNeed) {
  LostLinks links;
  links.Note("world", 1);
  EXPECT_THAT(links.NeededBy({}), IsEmpty());
  EXPECT_THAT(links.NeededBy({CallOf("world", {2})}), IsEmpty());
  EXPECT_THAT(links.NeededBy({CallOf("another", {1})}), IsEmpty()) << "its own link may be up";
}

TEST(LostLinks, WhatWaitsOverIt_IsNamedOnce) {
  LostLinks links;
  links.Note("world", 1);
  const auto needs = links.NeededBy({CallOf("world", {1, 2}), CallOf("world", {1})});
  ASSERT_THAT(needs, SizeIs(1));
  EXPECT_EQ(needs.front().rank, 1);
  EXPECT_EQ(needs.front().what, "barrier() #3 of group 'world'");
  links.Clear();
  EXPECT_THAT(links.NeededBy({CallOf("world", {1})}), IsEmpty());
}

// It has entered, and the rest of its part does not come any more.
TEST(LostLinks, PeerThatHasEnteredAndIsSilent_IsNeeded) {
  LostLinks links;
  links.Note("world", 1);
  WaitingCall call = CallOf("world", {});
  call.operation.silent = {1, 2};
  EXPECT_THAT(links.NeededBy({call}), SizeIs(1));
}

TEST(LostLinks, RecvFromAny_NeedsThemWhenNoneIsLeft) {
  LostLinks links;
  links.Note("world", 1);
  WaitingCall call = CallOf("world", {1, 2});
  call.operation.any = true;
  EXPECT_THAT(links.NeededBy({call}), IsEmpty());
  links.Note("world", 2);
  EXPECT_THAT(links.NeededBy({call}), SizeIs(2));
}

}  // namespace
}  // namespace resilient::recovery
