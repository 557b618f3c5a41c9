// Goal: a watched file is read at its interval and when SIGHUP comes, and a trouble with it is told
// once, not at each look. Method: a real loop and real signals; the test says what each look finds.
#include "store/server/file_watch.h"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/support/captured_stderr.h"

namespace resilient::store {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr Duration kNever = std::chrono::hours(1);

class FileWatchTest : public testing::Test {
 protected:
  FileWatchTest()
      : guard_(loop_, [] {
          ADD_FAILURE() << "the loop waited for too long";
          std::abort();
        }) {
    guard_.Start(static_cast<std::uint64_t>(kPatience / Millis(1)), 0);
    SetLogLevel(LogLevel::kInfo);
  }
  ~FileWatchTest() override {
    SetLogLevel(LogLevel::kWarn);
    guard_.Close();
  }

  // The lines of log while one look after the other finds this. `by_signal`: each is asked for.
  std::vector<std::string> LogOf(const std::vector<Status>& found, Duration interval,
                                 bool by_signal) {
    std::size_t looks = 0;
    testing::internal::CaptureStderr();
    {
      const FileWatch watch(
          loop_, {.path = "/etc/tokens", .event = "tokens", .holds = "the old ones hold"}, interval,
          [&] {
            const Status status = found.at(looks++);
            if (looks == found.size()) {
              uv_stop(loop_.get());
            } else if (by_signal) {
              std::raise(SIGHUP);
            }
            return status;
          });
      if (by_signal) std::raise(SIGHUP);
      loop_.Run();
    }
    EXPECT_EQ(looks, found.size());
    return Lines(TakeCapturedStderr());
  }

 private:
  static std::vector<std::string> Lines(const std::string& text) {
    std::vector<std::string> lines;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return lines;
  }

  UvLoop loop_;
  UvTimer guard_;
};

const Status kMissing{StatusCode::kSetting, "no such file"};
const Status kBroken{StatusCode::kSetting, "line 3 is no token"};

TEST_F(FileWatchTest, Interval_SameTrouble_IsToldOnce) {
  EXPECT_THAT(
      LogOf({Status(), kMissing, kMissing, kBroken, kBroken, Status(), Status(), kBroken},
            Millis(1), /*by_signal=*/false),
      ElementsAre(EndsWith("event=tokens file=/etc/tokens: no such file (the old ones hold)"),
                  EndsWith("line 3 is no token (the old ones hold)"),
                  EndsWith("line 3 is no token (the old ones hold)")));
}

TEST_F(FileWatchTest, Interval_NoTrouble_SaysNothing) {
  EXPECT_THAT(LogOf({Status(), Status(), Status()}, Millis(1), /*by_signal=*/false), IsEmpty());
}

TEST_F(FileWatchTest, Hangup_LooksAtOnceAndTellsTheTroubleAgain) {
  EXPECT_THAT(LogOf({kMissing, kMissing, Status()}, kNever, /*by_signal=*/true),
              ElementsAre(EndsWith("SIGHUP: reading /etc/tokens"),
                          EndsWith("no such file (the old ones hold)"),
                          EndsWith("SIGHUP: reading /etc/tokens"),
                          EndsWith("no such file (the old ones hold)"),
                          EndsWith("SIGHUP: reading /etc/tokens")));
}

}  // namespace
}  // namespace resilient::store
