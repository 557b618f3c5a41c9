#pragma once

#include <string>

#include <gtest/gtest.h>

#include "runtime/base/log_flush.h"

namespace resilient {

// The end of testing::internal::CaptureStderr(). What it captures is a file, into which the log
// writes by a thread of its own: waits for that first.
inline std::string TakeCapturedStderr() {
  EXPECT_TRUE(FlushLog(std::chrono::seconds(20)));
  return testing::internal::GetCapturedStderr();
}

}  // namespace resilient
