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
    const std::string step = queue.TakeStep();
    EXPECT_LE(step.size(), OutputQueue::kStepBytes);
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
  queue.JoinStep();
  EXPECT_EQ(queue.bytes(), 3u);
  EXPECT_EQ(queue.memory_bytes(), 3u);
  EXPECT_EQ(TakeAll(queue), "abc");
  EXPECT_TRUE(queue.empty());
}

TEST(OutputQueue, SharedParts_KeepTheirPlaceAmongOwnBytes) {
  constexpr std::size_t kLarge = OutputQueue::kStepBytes + 5;
  const auto part = Part(kLarge, 'x');
  OutputQueue queue;
  queue.tail() += "a";
  queue.Append(part);
  queue.tail() += "bc";
  queue.Append(Part(kLarge, 'y'));
  queue.Append(part);
  queue.tail() += "d";
  EXPECT_EQ(queue.bytes(), 3 * kLarge + 4);
  EXPECT_EQ(part.use_count(), 3);
  EXPECT_EQ(TakeAll(queue), "a" + *part + "bc" + std::string(kLarge, 'y') + *part + "d");
  EXPECT_EQ(part.use_count(), 1);
}

TEST(OutputQueue, SharedPart_CountsOnceForAllItsHolders) {
  constexpr std::size_t kSize = 6u << 20;
  auto part = Part(kSize, 'x');
  OutputQueue one;
  OutputQueue other;
  one.Append(part);
  other.Append(part);
  EXPECT_EQ(one.memory_bytes(), kSize / 3);
  part.reset();
  EXPECT_EQ(one.memory_bytes() + other.memory_bytes(), kSize);
  other.DropShared(kSize);
  EXPECT_EQ(one.memory_bytes(), kSize);
  EXPECT_TRUE(other.empty());
}

TEST(OutputQueue, FirstStepOfASharedPart_JoinsTheBytesBeforeIt) {
  OutputQueue queue;
  queue.tail() += "header";
  queue.Append(Part(OutputQueue::kStepBytes + 1, 'x'));
  queue.tail() += "behind";
  queue.JoinStep();
  EXPECT_EQ(queue.next_own(), "header" + std::string(OutputQueue::kStepBytes, 'x'));
  queue.next_own().clear();
  queue.JoinStep();
  EXPECT_TRUE(queue.next_own().empty());
  EXPECT_EQ(queue.next_shared(), "x");
  EXPECT_EQ(TakeAll(queue), "xbehind");
}

TEST(OutputQueue, WholeSharedPartThatJoins_BringsWhatIsBehindIt) {
  OutputQueue queue;
  queue.tail() += "header";
  queue.Append(Part(OutputQueue::kSharedBytesMin, 'x'));
  queue.tail() += "behind";
  queue.JoinStep();
  EXPECT_EQ(queue.bytes(), 12 + OutputQueue::kSharedBytesMin);
  EXPECT_EQ(queue.next_own(), "header" + std::string(OutputQueue::kSharedBytesMin, 'x') + "behind");
}

TEST(OutputQueue, BytesAppendedMeanwhile_Follow) {
  OutputQueue queue;
  queue.Append(Part(2 * OutputQueue::kStepBytes, 'x'));
  std::string all = queue.TakeStep();
  queue.tail() += "a";
  EXPECT_EQ(queue.bytes(), OutputQueue::kStepBytes + 1);
  all += queue.TakeStep();
  EXPECT_EQ(queue.next_own(), "a");
  queue.tail() += "b";
  EXPECT_EQ(all + TakeAll(queue), std::string(2 * OutputQueue::kStepBytes, 'x') + "ab");
}

TEST(OutputQueue, SmallSharedPart_IsCopied) {
  const auto small = Part(OutputQueue::kSharedBytesMin - 1, 'x');
  OutputQueue queue;
  queue.Append(small);
  EXPECT_EQ(small.use_count(), 1);
  EXPECT_EQ(queue.next_own(), *small);
  const auto large = Part(OutputQueue::kSharedBytesMin, 'x');
  queue.Append(large);
  EXPECT_EQ(large.use_count(), 2);
}

}  // namespace
}  // namespace resilient::store
