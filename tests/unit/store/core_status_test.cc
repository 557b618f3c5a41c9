// Goal: a status tells of everything, in pages of bounded size, whatever the sizes of worlds, the
// number of jobs and of spares. Method: the core alone; pages are asked for until none is named.

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "store/core/status_page.h"
#include "tests/unit/store/core_membership_fixture.h"

namespace resilient::store {
namespace {

using nlohmann::json;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CoreStatus : public CoreSpares {
 protected:
  ConnectionId Join(int process, const std::string& job, int rank, int size) {
    Hello hello = HelloOf(process, Role::kControl);
    hello.job = job;
    const ConnectionId control = Open(hello);
    Send(control, JoinOp{JoinOf(rank, size)});
    return control;
  }
  // All of them, until the last.
  std::vector<json> Pages(StatusOp asked = {}) {
    std::vector<json> pages;
    while (true) {
      const std::string text = core_->StatusJson(now_, asked);
      EXPECT_LE(text.size(), StatusPage::kMost / StatusPage::kTold * 400);
      pages.push_back(json::parse(text));
      const auto next = pages.back().find("next");
      if (next == pages.back().end()) return pages;
      asked.from_job = next->at("job");
      asked.from_round = next->at("round");
      asked.from_rank = next->at("rank");
    }
  }
  // "job/round/rank" of members and of seats that nobody has.
  static std::multiset<std::string> SeatsOf(const std::vector<json>& pages) {
    std::multiset<std::string> seats;
    for (const json& page : pages) {
      for (const json& job : page["jobs"]) {
        for (const json& world : job["worlds"]) {
          const std::string place =
              job["job"].get<std::string>() + "/" + world["round"].dump() + "/";
          for (const json& member : world["members"]) seats.insert(place + member["rank"].dump());
          for (const json& range : world["empty_seats"]) {
            for (int rank = range[0]; rank <= range[1]; ++rank) {
              seats.insert(place + std::to_string(rank));
            }
          }
        }
      }
    }
    return seats;
  }
};

TEST_F(CoreStatus, AnOrdinaryStore_IsOnePage) {
  Run(2);
  const std::vector<json> pages = Pages();
  ASSERT_THAT(pages, SizeIs(1));
  const json& world = pages[0]["jobs"][0]["worlds"][0];
  EXPECT_THAT(world["members"], SizeIs(2));
  EXPECT_THAT(world["empty_seats"], IsEmpty());
}

TEST_F(CoreStatus, LargeWorlds_AreToldInPages_EachSeatOnce) {
  Join(1, "a", 0, kWorldSizeMax);
  Join(2, "b", 5, kWorldSizeMax);
  Join(3, "c", kWorldSizeMax - 1, kWorldSizeMax);
  Join(4, "d", 0, 2);
  const std::vector<json> pages = Pages();
  EXPECT_GE(pages.size(), 3u);
  EXPECT_LE(pages.size(), 5u);
  const std::multiset<std::string> seats = SeatsOf(pages);
  EXPECT_EQ(seats.size(), 3u * kWorldSizeMax + 2);
  EXPECT_EQ(std::set<std::string>(seats.begin(), seats.end()).size(), seats.size());
}

TEST_F(CoreStatus, ManyMembersAndSpares_AreToldInPages) {
  constexpr int kRanks = 3000;
  constexpr int kSpares = 3000;
  std::vector<ConnectionId> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(Join(rank, "job", rank, kRanks + 2));
  Wait(kRanks, kSpares, kRanks + 2);
  const std::vector<json> pages = Pages();
  EXPECT_THAT(pages, SizeIs(2));
  std::set<std::string> members;
  std::set<std::string> spares;
  for (const json& page : pages) {
    const json& job = page["jobs"][0];
    for (const json& world : job["worlds"]) {
      for (const json& member : world["members"]) members.insert(member["session"]);
    }
    for (const json& spare : job["spares"]) spares.insert(spare["session"]);
  }
  EXPECT_THAT(members, SizeIs(kRanks));
  EXPECT_THAT(spares, SizeIs(kSpares));
}

TEST_F(CoreStatus, OfOneJob_TellsOfNoOther) {
  for (const char* job : {"a", "b", "c"}) Join(*job, job, 0, 2);
  const std::vector<json> pages = Pages({.job = "b"});
  ASSERT_THAT(pages, SizeIs(1));
  ASSERT_THAT(pages[0]["jobs"], SizeIs(1));
  EXPECT_EQ(pages[0]["jobs"][0]["job"], "b");
  EXPECT_THAT(Pages({.job = "none"})[0]["jobs"], IsEmpty());
}

TEST_F(CoreStatus, APageThatBeginsAtNoPlace_IsAnEmptyOne) {
  Run(2);
  EXPECT_THAT(Pages({.from_job = "zzz"})[0]["jobs"], IsEmpty());
  const json far = Pages({.from_job = "job", .from_round = 1, .from_rank = UINT64_MAX})[0];
  EXPECT_THAT(far["jobs"][0]["worlds"][0]["members"], IsEmpty());
  EXPECT_THAT(Pages({.from_job = "job", .from_round = UINT64_MAX})[0]["jobs"][0]["worlds"],
              IsEmpty());
}

}  // namespace
}  // namespace resilient::store
