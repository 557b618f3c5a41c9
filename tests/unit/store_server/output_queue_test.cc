// Goal: bytes leave in the order in which they came, whoever stores them, and are counted. Method:
// parts of each kind around each other, taken as a connection does.

#include "store/server/output_queue.h"

#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace resilient::store {
namespace {

std::string TakeAll(OutputQueue& queue) {
  std::string all;
  while (!queue.empty()) {
    if (!queue.next_own().empty()) {
      all += std::exchange(queue.next_own(), {});
      continue;
    }
    const std::string step = queue.TakeShared();
    EXPECT_LE(step.size(), OutputQueue::kSharedStep);
    all += step;
  }
  return all;
}

std::shared_ptr<const std::string> Part(std::size_t size, char fill) {
  return std::make_shared<const std::string>(size, fill);
}

TEST(OutputQueue, OwnBytes_LeaveAtOnce) {
  OutputQueue queue;
  EXPECT_TRUE(queue.empty());
  queue.tail() += "ab";
  queue.tail() += "c";
  EXPECT_EQ(queue.bytes(), 3u);
  EXPECT_EQ(queue.own_bytes(), 3u);
  EXPECT_EQ(TakeAll(queue), "abc");
  EXPECT_TRUE(queue.empty());
}

TEST(OutputQueue, SharedParts_KeepTheirPlaceAmongOwnBytes) {
  constexpr std::size_t kLarge = OutputQueue::kSharedStep + 5;
  const auto part = Part(kLarge, 'x');
  OutputQueue queue;
  queue.tail() += "a";
  queue.Append(part);
  queue.tail() += "bc";
  queue.Append(Part(kLarge, 'y'));
  queue.Append(part);
  queue.tail() += "d";
  EXPECT_EQ(queue.own_bytes(), 4u);
  EXPECT_EQ(queue.bytes(), 3 * kLarge + 4);
  EXPECT_EQ(part.use_count(), 3);
  EXPECT_EQ(TakeAll(queue), "a" + *part + "bc" + std::string(kLarge, 'y') + *part + "d");
  EXPECT_EQ(part.use_count(), 1);
  EXPECT_EQ(queue.own_bytes(), 0u);
}

TEST(OutputQueue, BytesAppendedMeanwhile_AreCountedAndFollow) {
  OutputQueue queue;
  queue.Append(Part(2 * OutputQueue::kSharedStep, 'x'));
  EXPECT_EQ(queue.own_bytes(), 0u);
  std::string all = queue.TakeShared();
  queue.tail() += "a";
  EXPECT_EQ(queue.bytes(), OutputQueue::kSharedStep + 1);
  all += queue.TakeShared();
  EXPECT_EQ(queue.own_bytes(), 1u);
  queue.tail() += "b";
  EXPECT_EQ(all + TakeAll(queue), std::string(2 * OutputQueue::kSharedStep, 'x') + "ab");
}

TEST(OutputQueue, SmallSharedPart_IsCopied) {
  const auto part = Part(100, 'x');
  OutputQueue queue;
  queue.Append(part);
  EXPECT_EQ(part.use_count(), 1);
  EXPECT_EQ(queue.own_bytes(), 100u);
  EXPECT_EQ(TakeAll(queue), *part);
}

}  // namespace
}  // namespace resilient::store
