// Goal: texts that peers send for people are cut to the length of their field, and nothing else of
// a request changes. Method: requests with long texts, and short ones.

#include "store/core/text_limits.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace resilient::store {
namespace {

const std::string kLong(1u << 20, 'x');

template <typename One>
One Limited(One one) {
  Op op = std::move(one);
  CutTexts(op);
  return std::get<One>(op);
}

TEST(TextLimits, Report_IsCutInItsMessageAndItsNames) {
  FailureDetail detail;
  detail.rank = 3;
  detail.host = kLong;
  detail.group = kLong;
  const ReportOp cut = Limited(
      ReportOp{{ReportKind::kMismatch, 7, 1, Status(StatusCode::kMismatch, kLong, detail)}});
  EXPECT_EQ(cut.report.generation, 7u);
  EXPECT_EQ(cut.report.status.code(), StatusCode::kMismatch);
  EXPECT_LE(cut.report.status.message().size(), kTextBytesMax + 3);
  EXPECT_LE(cut.report.status.detail().host.size(), 255u);
  EXPECT_LE(cut.report.status.detail().group.size(), 1024u);
  EXPECT_EQ(cut.report.status.detail().rank, 3);
  EXPECT_TRUE(Limited(ReportOp{{ReportKind::kRoom, 7, -1, Status()}}).report.status.ok());
}

TEST(TextLimits, WaitingReport_IsCutInEachOfItsLists) {
  WaitingOp op;
  op.report.calls.resize(2);
  for (WaitingCall& call : op.report.calls) {
    call.group = call.operation.what = call.operation.call_site = kLong;
  }
  op.report.made.push_back({kLong, {5, kLong, kLong}, true});
  op.report.progress.resize(2);
  op.report.progress[0].group = kLong;
  op.report.progress[0].device.emplace();
  op.report.progress[0].device->name = op.report.progress[0].device->last = kLong;
  const WaitingReport cut = Limited(op).report;
  ASSERT_EQ(cut.calls.size(), 2u);
  for (const WaitingCall& call : cut.calls) {
    EXPECT_LE(call.group.size(), 1024u);
    EXPECT_LE(call.operation.what.size(), kTextBytesMax + 3);
    EXPECT_LE(call.operation.call_site.size(), kTextBytesMax + 3);
  }
  EXPECT_EQ(cut.made.front().group, cut.calls.front().group);  // Still the same group.
  EXPECT_LE(cut.made.front().ranks.text.size(), kRanksTextMax);
  EXPECT_LE(cut.made.front().ranks.made_at.size(), kMadeAtMax);
  EXPECT_LE(cut.progress.front().group.size(), 1024u);
  EXPECT_LE(cut.progress.front().device->name.size(), kTextBytesMax + 3);
  EXPECT_LE(cut.progress.front().device->last.size(), kTextBytesMax + 3);
}

TEST(TextLimits, WhatAdminsLaunchersAndProgramsSay_IsCut) {
  const WhereaboutsOp where = Limited(WhereaboutsOp{1, {kLong, kLong, kLong, {}, kLong}});
  for (const std::string* text : {&where.whereabouts.thread, &where.whereabouts.at,
                                  &where.whereabouts.stack, &where.whereabouts.expected_slow}) {
    EXPECT_LE(text->size(), kTextBytesMax + 3);
  }
  ExitReportOp report;
  report.text = kLong;
  EXPECT_LE(Limited(report).text.size(), kTextBytesMax + 3);
  const HoldOp hold = Limited(HoldOp{0, kLong, 5, kLong});
  EXPECT_LE(hold.host.size(), 255u);
  EXPECT_LE(hold.reason.size(), kTextBytesMax + 3);
  EXPECT_LE(Limited(ReleaseOp{0, kLong}).host.size(), 255u);
}

TEST(TextLimits, WhatStandsForSomething_IsLeftAsItIs) {
  EXPECT_EQ(Limited(SetOp{kLong, kLong}).value, kLong);
  EXPECT_EQ(Limited(SetOp{kLong, kLong}).key, kLong);
  EXPECT_EQ(Limited(HoldOp{0, "host", 5, "reason"}).reason, "reason");
}

}  // namespace
}  // namespace resilient::store
