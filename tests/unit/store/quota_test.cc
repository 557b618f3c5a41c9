// Goal: a job may take its own limit and what the others leave, and never less than an even share;
// what is taken is given back. Method: quotas of one pool.

#include "store/core/quota.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace resilient::store {
namespace {

TEST(Quota, OwnLimit_IsExact) {
  Quota quota(10, nullptr);
  EXPECT_TRUE(quota.Fits(10));
  EXPECT_EQ(quota.RoomFor(11), Quota::Room::kNoneForJob);
  EXPECT_EQ(quota.RoomFor(SIZE_MAX), Quota::Room::kNoneForJob);
  quota += 10;
  EXPECT_TRUE(quota.Fits(0));
  EXPECT_FALSE(quota.Fits(1));
  quota += 5;  // What was kept before the limit was lower.
  EXPECT_FALSE(quota.Fits(0));
  quota -= 6;
  EXPECT_TRUE(quota.Fits(1));
}

TEST(Quota, OfAFullPool_AnEvenShareIsLeft) {
  Pool pool{.most = 90};
  Quota greedy(80, &pool);
  Quota second(80, &pool);
  greedy += 80;
  EXPECT_TRUE(second.Fits(45));
  second += 45;
  EXPECT_EQ(second.RoomFor(1), Quota::Room::kNoneForAll);
  EXPECT_FALSE(greedy.Fits(0));
  {
    Quota third(80, &pool);
    EXPECT_TRUE(third.Fits(30));
    EXPECT_FALSE(third.Fits(31));
    third += 30;
    EXPECT_EQ(pool.taken, 155u);
  }
  EXPECT_EQ(pool.taken, 125u);
  greedy -= 80;
  EXPECT_TRUE(second.Fits(35));
}

TEST(Charge, GivesBack_WhatItTook) {
  Quota quota(10, nullptr);
  {
    Charge charge(&quota);
    charge.Set(4);
    charge.Set(7);
    EXPECT_EQ(quota.taken(), 7u);
    Charge moved = std::move(charge);
    EXPECT_EQ(quota.taken(), 7u);
    moved.Set(2);
    EXPECT_EQ(quota.taken(), 2u);
    Charge other(&quota);
    other.Set(5);
    moved = std::move(other);
    moved.Set(6);
    EXPECT_EQ(quota.taken(), 8u);  // The one that was moved from holds the two until it ends.
  }
  EXPECT_EQ(quota.taken(), 0u);
  Charge(nullptr).Set(3);
}

}  // namespace
}  // namespace resilient::store
