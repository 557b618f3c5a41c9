#include "store/core/text_limits.h"

#include <string>
#include <utility>
#include <variant>

#include "store/core/causes.h"

namespace resilient::store {
namespace {

constexpr std::size_t kHostBytesMax = 255;    // A DNS name.
constexpr std::size_t kGroupBytesMax = 1024;  // As the links between ranks take them.

void Limit(std::string& text, std::size_t most) {
  if (text.size() > most) text.resize(most);
}

// For people: it shows that it was cut.
void LimitText(std::string& text) {
  if (text.size() > kTextBytesMax) text = Cut(text);
}

void LimitReport(WaitingReport& report) {
  for (WaitingCall& call : report.calls) {
    Limit(call.group, kGroupBytesMax);
    LimitText(call.operation.what);
    LimitText(call.operation.call_site);
  }
  for (GroupMade& made : report.made) {
    Limit(made.group, kGroupBytesMax);
    Limit(made.ranks.text, kRanksTextMax);
    Limit(made.ranks.made_at, kMadeAtMax);
  }
  for (GroupProgress& progress : report.progress) {
    Limit(progress.group, kGroupBytesMax);
    if (!progress.device) continue;
    LimitText(progress.device->name);
    LimitText(progress.device->last);
  }
}

struct Limiter {
  void operator()(ReportOp& op) const { op.report.status = CutTexts(op.report.status); }
  void operator()(WaitingOp& op) const { LimitReport(op.report); }
  void operator()(WhereaboutsOp& op) const {
    LimitText(op.whereabouts.thread);
    LimitText(op.whereabouts.at);
    LimitText(op.whereabouts.stack);
    LimitText(op.whereabouts.expected_slow);
  }
  void operator()(ExitReportOp& op) const { LimitText(op.text); }
  void operator()(HoldOp& op) const {
    Limit(op.host, kHostBytesMax);
    LimitText(op.reason);
  }
  void operator()(ReleaseOp& op) const { Limit(op.host, kHostBytesMax); }
  template <typename Other>
  void operator()(Other&) const {}
};

}  // namespace

void CutTexts(Op& op) { std::visit(Limiter(), op); }

Status CutTexts(const Status& status) {
  if (status.ok()) return status;
  FailureDetail detail = status.detail();
  Limit(detail.host, kHostBytesMax);
  Limit(detail.group, kGroupBytesMax);
  std::string message = status.message();
  LimitText(message);
  return Status(status.code(), std::move(message), std::move(detail));
}

}  // namespace resilient::store
