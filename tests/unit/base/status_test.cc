// Goal: failures keep their code, text and detail on the way to the user.
// Method: tables over all codes; values built by hand.
#include <resilient/status.h>

#include <set>
#include <string>

#include <gtest/gtest.h>

namespace resilient {
namespace {

FailureDetail Detail(int rank, std::uint64_t generation) {
  FailureDetail detail;
  detail.rank = rank;
  detail.generation = generation;
  return detail;
}

constexpr int kCodeCount = static_cast<int>(StatusCode::kInternal) + 1;

TEST(StatusCode_Names, AreUniqueAndInvert) {
  std::set<std::string> names;
  for (int i = 0; i < kCodeCount; ++i) {
    const auto code = static_cast<StatusCode>(i);
    const std::string name(CodeName(code));
    EXPECT_FALSE(name.empty());
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(CodeFromName(name), code) << name;
  }
}

TEST(StatusCode_Names, AreThoseOfTheContract) {
  EXPECT_EQ(CodeName(StatusCode::kRankLost), "RANK_LOST");
  EXPECT_EQ(CodeName(StatusCode::kStaleGeneration), "STALE_GENERATION");
  EXPECT_EQ(CodeName(StatusCode::kDuplicateDevice), "DUPLICATE_DEVICE");
  EXPECT_EQ(CodeName(StatusCode::kOutcomeUnknown), "OUTCOME_UNKNOWN");
  EXPECT_EQ(CodeName(StatusCode::kAuth), "AUTH");
}

TEST(StatusCode_Names, UnknownName_IsNoCode) {
  EXPECT_EQ(CodeFromName("RANK_FOUND"), std::nullopt);
  EXPECT_EQ(CodeFromName(""), std::nullopt);
  EXPECT_EQ(CodeFromName("rank_lost"), std::nullopt);
}

TEST(Status_Default, IsOkAndEmpty) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.detail(), FailureDetail{});
  EXPECT_EQ(status.ToString(), "OK");
}

TEST(Status_Failure, TextBeginsWithTheCode) {
  const Status status(StatusCode::kRankLost, "rank 2 (host a, pid 7) is gone", Detail(2, 0));
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.ToString(), "[resilient:RANK_LOST] rank 2 (host a, pid 7) is gone");
  EXPECT_EQ(status.detail().rank, 2);
}

TEST(Status_Copy, SharesTheFailure) {
  const Status status(StatusCode::kLeft, "rank 1 left");
  const Status copy = status;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(&copy.message(), &status.message());
}

TEST(Status_OfCodeOk, IsABrokenInvariant) {
  EXPECT_DEATH({ const Status fine(StatusCode::kOk, "fine"); }, "internal error at .*status.cc");
}

TEST(Status_WithOperation, NamesTheWaitingOperationOnce) {
  const Status cause(StatusCode::kRankLost, "rank 2 is gone", Detail(2, 3));
  const Status seen = cause.WithOperation("world", 7, "all_reduce(float32[4], sum)");
  EXPECT_EQ(seen.code(), StatusCode::kRankLost);
  EXPECT_EQ(seen.detail().rank, 2);
  EXPECT_EQ(seen.detail().generation, 3U);
  EXPECT_EQ(seen.detail().group, "world");
  EXPECT_EQ(seen.detail().seq, 7U);
  EXPECT_EQ(seen.message(),
            "rank 2 is gone; ended all_reduce(float32[4], sum) #7 of group 'world' on this rank");
  EXPECT_EQ(seen.WithOperation("world", 7, "all_reduce(float32[4], sum)").message(),
            seen.message());
  EXPECT_EQ(cause.message(), "rank 2 is gone") << "the original is not touched";
}

TEST(Status_WithOperation, OfOk_IsOk) { EXPECT_TRUE(Status().WithOperation("g", 1, "x").ok()); }

Result<int> Half(int value) {
  if (value % 2 != 0) return Status(StatusCode::kInvalidArgument, "odd");
  return value / 2;
}

Status HalveTwice(int value, int* out) {
  RESILIENT_RETURN_IF_ERROR(Half(value).status());
  *out = *Half(value);
  return {};
}

TEST(Result_Value, AndError) {
  EXPECT_TRUE(Half(4).ok());
  EXPECT_TRUE(Half(4).status().ok());
  EXPECT_EQ(Half(4).value(), 2);
  EXPECT_FALSE(static_cast<bool>(Half(3)));
  EXPECT_EQ(Half(3).status().code(), StatusCode::kInvalidArgument);
}

TEST(ReturnIfError, PassesTheFailureOn) {
  int out = 0;
  EXPECT_TRUE(HalveTwice(4, &out).ok());
  EXPECT_EQ(out, 2);
  EXPECT_EQ(HalveTwice(5, &out).message(), "odd");
}

}  // namespace
}  // namespace resilient
