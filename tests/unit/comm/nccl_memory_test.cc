// Goal: memory that NCCL allocates comes from the device that is asked for and goes back to NCCL;
// what cannot be had is said.
// Method: the fake NCCL, which knows what it has given out and by which function.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_memory.h"
#include "tests/support/fake_nccl.h"

namespace resilient::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

NcclLibrary Library() {
  return {.nccl = FakeNccl::nccl(), .cuda = FakeNccl::cuda(), .nccl_version = 23007};
}

TEST(NcclMemoryTest, Memory_IsOfTheDeviceThatIsAskedFor_AndGoesBackToNccl) {
  FakeNccl fake;
  ASSERT_EQ(FakeNccl::cuda().SetDevice(3), CudaResult::kSuccess);
  const auto memory = MakeNcclMemory(Library());
  ASSERT_TRUE(memory.ok()) << memory.status().ToString();
  fake.Change(3, [](NcclScript& script) { script.refuse_memory = true; });
  const auto made = (*memory)->Allocate(1, 4096);
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  ASSERT_NE(*made, nullptr);
  EXPECT_EQ(fake.Counts().allocations, 1);
  int device = 0;
  EXPECT_EQ(FakeNccl::cuda().GetDevice(&device), CudaResult::kSuccess);
  EXPECT_EQ(device, 3) << "the caller's stays";
  EXPECT_NE(FakeNccl::cuda().Free(*made), CudaResult::kSuccess);
  EXPECT_THAT(fake.TakeMisuse(), ElementsAre(HasSubstr("cudaFree of memory that is not there")));
  EXPECT_TRUE((*memory)->Free(1, *made).ok());
  EXPECT_EQ(fake.Counts().allocations, 0);
  EXPECT_FALSE((*memory)->Free(1, *made).ok()) << "twice";
  EXPECT_THAT(fake.TakeMisuse(), ElementsAre(HasSubstr("ncclMemFree of memory")));
}

TEST(NcclMemoryTest, WhatCannotBeHad_IsSaid) {
  FakeNccl fake;
  const auto memory = MakeNcclMemory(Library());
  ASSERT_TRUE(memory.ok());
  fake.Change(2, [](NcclScript& script) { script.refuse_memory = true; });
  const Status refused = (*memory)->Allocate(2, 64).status();
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("ncclMemAlloc failed on device 2"),
                                       HasSubstr("unhandled cuda error")));
  NcclLibrary old = Library();
  old.nccl.MemAlloc = nullptr;
  const Status without = MakeNcclMemory(old).status();
  EXPECT_EQ(without.code(), StatusCode::kSetting);
  EXPECT_THAT(without.message(), HasSubstr("NCCL 2.30.7 allocates no memory"));
  EXPECT_EQ(LoadNcclMemory({.nccl_library = "/nowhere/libnccl.so.2"}).status().code(),
            StatusCode::kSetting);
  EXPECT_THAT(fake.TakeMisuse(), IsEmpty());
}

}  // namespace
}  // namespace resilient::testing
