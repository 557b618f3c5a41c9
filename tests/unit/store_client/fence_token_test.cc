// Goal: fence tokens grow. Method: a pure function, called at its bounds.
#include <cstdint>

#include <gtest/gtest.h>

#include "store/client/fence_token.h"

namespace resilient::store {
namespace {

TEST(FenceToken, Grows_WithGenerationsAndWithStoresThatBeginAnew) {
  constexpr std::uint64_t kBegan = 1'800'000'000'000;
  static_assert(FenceTokenOf(kBegan, 1) > 0);
  static_assert(FenceTokenOf(kBegan, 2) > FenceTokenOf(kBegan, 1));
  static_assert(FenceTokenOf(kBegan + 1, 1) > FenceTokenOf(kBegan, 1'000'000));
  // It carries over, and never turns back within one store.
  constexpr std::uint64_t kMany = 1u << 20;
  EXPECT_GT(FenceTokenOf(kBegan, kMany), FenceTokenOf(kBegan, kMany - 1));
  // Of a signed column of a database, for two centuries.
  constexpr std::uint64_t kYear2200 = 7'258'118'400'000;
  EXPECT_LT(FenceTokenOf(kYear2200, kMany), std::uint64_t{1} << 63);
}

}  // namespace
}  // namespace resilient::store
