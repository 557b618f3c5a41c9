// Goal: the tables are filled from the real libraries, and what is missing is named.
// Method: the libraries of this machine where it has some (no GPU is needed to load them), or those
// that RESILIENT_TEST_NCCL and RESILIENT_TEST_CUDART name; and a library that is not NCCL.

#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/comm/nccl_captures.h"
#include "runtime/comm/nccl_library.h"

namespace resilient {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

TEST(NcclLibrary, RealLibraries_FillTheTablesAndAnswerWithoutAGpu) {
  const NcclLibraryPaths paths{.nccl = FromEnvironment("RESILIENT_TEST_NCCL"),
                               .cuda_runtime = FromEnvironment("RESILIENT_TEST_CUDART")};
  const Result<NcclLibrary> library = LoadNcclLibrary(paths);
  if (!library.ok() && paths.nccl.empty())
    GTEST_SKIP() << "no NCCL here (RESILIENT_TEST_NCCL may name one): "
                 << library.status().message();
  ASSERT_TRUE(library.ok()) << library.status().message();
  EXPECT_GE(library->nccl_version, 22200);
  EXPECT_LT(library->nccl_version, 30000);
  EXPECT_STREQ(library->nccl.GetErrorString(NcclResult::kInProgress), "NCCL operation in progress");
  EXPECT_STREQ(library->cuda.GetErrorName(CudaResult::kNotReady), "cudaErrorNotReady");
  EXPECT_STREQ(library->cuda.GetErrorName(CudaResult::kLaunchFailure), "cudaErrorLaunchFailure");
  // In every version that is taken so far; asked for as a library may lack them.
  EXPECT_NE(library->nccl.RedOpCreatePreMulSum, nullptr);
  EXPECT_NE(library->nccl.RedOpDestroy, nullptr);
  RecordProperty("nccl", NcclVersionText(library->nccl_version));
  // Once more: the copy that is loaded, not a second one.
  const Result<NcclLibrary> again = LoadNcclLibrary();
  if (paths.nccl.empty()) {
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again->nccl.CommAbort, library->nccl.CommAbort);
  }
}

TEST(NcclLibrary, LibraryThatIsNotThere_IsNamed) {
  const Status status = LoadNcclLibrary({.nccl = "/nowhere/libnccl.so.2"}).status();
  EXPECT_EQ(status.code(), StatusCode::kSetting);
  EXPECT_THAT(status.message(), StartsWith("NCCL cannot be used: /nowhere/libnccl.so.2"));
}

TEST(NcclLibrary, LibraryThatIsAnotherOne_TheMissingFunctionIsNamed) {
  const Status status =
      LoadNcclLibrary({.nccl = "libm.so.6", .cuda_runtime = "libm.so.6"}).status();
  EXPECT_EQ(status.code(), StatusCode::kSetting);
  EXPECT_THAT(status.message(), HasSubstr("libm.so.6 has no function ncclGetVersion"));
}

TEST(NcclLibrary, CudaRuntimeAlone_NeedsNoNccl) {
  const NcclLibraryPaths paths{.nccl = "/nowhere/libnccl.so.2",
                               .cuda_runtime = FromEnvironment("RESILIENT_TEST_CUDART")};
  const Result<CudaApi> cuda = LoadCudaRuntime(paths);
  if (!cuda.ok() && paths.cuda_runtime.empty())
    GTEST_SKIP() << "no CUDA runtime here (RESILIENT_TEST_CUDART may name one): "
                 << cuda.status().message();
  ASSERT_TRUE(cuda.ok()) << cuda.status().message();
  EXPECT_STREQ(cuda->GetErrorName(CudaResult::kNotReady), "cudaErrorNotReady");
  EXPECT_NE(cuda->HostAlloc, nullptr);
  EXPECT_TRUE(CanCapture(*cuda)) << "from CUDA 12.3 on";
}

TEST(NcclLibrary, CudaRuntimeThatIsAnotherLibrary_TheMissingFunctionIsNamed) {
  const Status status = LoadCudaRuntime({.nccl = "", .cuda_runtime = "libm.so.6"}).status();
  EXPECT_EQ(status.code(), StatusCode::kSetting);
  EXPECT_THAT(status.message(), HasSubstr("libm.so.6 has no function cudaGetErrorName"));
}

TEST(NcclLibrary, Version_IsSaidAsNcclSaysIt) {
  EXPECT_EQ(NcclVersionText(23007), "2.30.7");
  EXPECT_EQ(NcclVersionText(22809), "2.28.9");
}

}  // namespace
}  // namespace resilient
