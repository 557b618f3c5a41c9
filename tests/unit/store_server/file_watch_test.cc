// Goal: a watched file is read at its interval and when SIGHUP comes, and a trouble with it is told
// once, not at each look; a file system that does not answer keeps nobody, and is named. Method: a
// real loop and real signals; the test says what each look finds, and when.
#include "store/server/file_watch.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/jumping_clock.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Duration kPatience = std::chrono::seconds(20);
constexpr Duration kSeldom = std::chrono::hours(1);

class FileWatchTest : public ::testing::Test {
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
    BeginToCaptureStderr();
    {
      const FileWatch watch(loop_, clock_, kFile, interval, [&]() -> FileWatch::Read {
        return [&, status = found.at(looks)]() -> FileWatch::TakeOver {
          return [&, status] {
            if (++looks == found.size()) {
              uv_stop(loop_.get());
            } else if (by_signal) {
              std::raise(SIGHUP);
            }
            return status;
          };
        };
      });
      if (by_signal) std::raise(SIGHUP);
      loop_.Run();
    }
    EXPECT_EQ(looks, found.size());
    return Lines(TakeCapturedStderr());
  }

  static std::vector<std::string> Lines(const std::string& text) {
    std::vector<std::string> lines;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return lines;
  }

  static inline const WatchedFile kFile{
      .path = "/etc/tokens", .event = "tokens", .holds = "the old ones hold"};
  testing::JumpingClock clock_;
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
  EXPECT_THAT(LogOf({kMissing, kMissing, Status()}, kSeldom, /*by_signal=*/true),
              ElementsAre(EndsWith("SIGHUP: reading /etc/tokens"),
                          EndsWith("no such file (the old ones hold)"),
                          EndsWith("SIGHUP: reading /etc/tokens"),
                          EndsWith("no such file (the old ones hold)"),
                          EndsWith("SIGHUP: reading /etc/tokens")));
}

// Of a file system that does not answer. Owner: the test and the thread that reads.
struct StuckRead {
  std::promise<void> begun;
  std::promise<void> answered;
};

TEST_F(FileWatchTest, NoAnswer_KeepsNobodyAndIsToldOnce) {
  const auto stuck = std::make_shared<StuckRead>();
  int reads = 0;
  BeginToCaptureStderr();
  {
    const FileWatch watch(loop_, clock_, kFile, Millis(1), [&]() -> FileWatch::Read {
      return [stuck, wait = reads++ == 0, &loop = loop_]() -> FileWatch::TakeOver {
        if (wait) {
          stuck->begun.set_value();
          stuck->answered.get_future().wait();
        }
        return [&loop, wait] {
          if (!wait) uv_stop(loop.get());
          return Status();
        };
      };
    });
    int turns = 0;
    UvTimer other(loop_, [&] {
      if (++turns == 1) stuck->begun.get_future().wait();
      if (turns == 10) clock_.Jump(2 * kFileSilence);
      if (turns == 20) stuck->answered.set_value();
    });
    other.Start(1, 1);
    loop_.Run();
    EXPECT_GE(turns, 20);
    other.Close();
  }
  EXPECT_EQ(reads, 2) << "one at a time";
  EXPECT_THAT(
      Lines(TakeCapturedStderr()),
      ElementsAre(AllOf(HasSubstr("file=/etc/tokens: its file system has not answered for "),
                        EndsWith("(the old ones hold)")),
                  HasSubstr("file=/etc/tokens: its file system answers again, after ")));
}

// Nothing waits for it, nor touches what is gone.
TEST_F(FileWatchTest, NoAnswer_OutlivesTheWatch) {
  const auto stuck = std::make_shared<StuckRead>();
  auto read = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = read;
  {
    const FileWatch watch(loop_, clock_, kFile, Millis(1), [&]() -> FileWatch::Read {
      return [stuck, owned = std::move(read)]() -> FileWatch::TakeOver {
        stuck->begun.set_value();
        stuck->answered.get_future().wait();
        return [] {
          ADD_FAILURE() << "nobody is there to take it over";
          return Status();
        };
      };
    });
    UvTimer end(loop_, [&] {
      stuck->begun.get_future().wait();
      uv_stop(loop_.get());
    });
    end.Start(5, 0);
    loop_.Run();
    end.Close();
  }
  EXPECT_FALSE(alive.expired());
  stuck->answered.set_value();
}

}  // namespace
}  // namespace resilient::store
