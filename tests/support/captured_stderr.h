#pragma once

#include <string>

#include <gtest/gtest.h>

#include "runtime/base/log_flush.h"

namespace resilient {

// What is written to stderr between these two calls. Into a file, which the output of the tests may
// be, too, the log writes by a thread of its own: both wait for that first.
inline void BeginToCaptureStderr() {
  EXPECT_TRUE(FlushLog(std::chrono::seconds(20)));
  ::testing::internal::CaptureStderr();
}
inline std::string TakeCapturedStderr() {
  EXPECT_TRUE(FlushLog(std::chrono::seconds(20)));
  return ::testing::internal::GetCapturedStderr();
}

}  // namespace resilient
