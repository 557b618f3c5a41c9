#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

#include <resilient/store/client.h>

#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "store/client/identity.h"
#include "store/client/link.h"
#include "store/client/reply_parts.h"

namespace resilient::store {
namespace {

// Drives a link until its one request is answered. Owner: a function of this file, on the stack.
// Thread: the caller's.
class OneRequest {
 public:
  OneRequest(Hello hello, std::vector<HostPort> addresses, Credentials credentials,
             const Clock& clock)
      : clock_(clock),
        core_(std::move(hello)),
        link_(std::move(addresses), RandomSeed(), std::move(credentials)) {}

  Result<Reply> Run(Op op, Deadline deadline) {
    RESILIENT_RETURN_IF_ERROR(core_.Submit(std::move(op)).status());
    while (!answered_) {
      if (link_.refused()) return link_.trouble();
      if (deadline.ExpiredAt(clock_.Now())) return TimedOut();
      Step(deadline);
    }
    if (!outcome_.status.ok()) return outcome_.status;
    return std::move(outcome_);
  }

 private:
  void Step(Deadline deadline) {
    const LinkInput input = Perform(link_.NextStep(), wake_, clock_, deadline.when());
    std::vector<ServerMessage> inbox;
    link_.Advance(input, core_, clock_.Now(), inbox);
    if (link_.TakeOpened()) {
      for (const Request& unanswered : core_.Unanswered()) link_.Send(unanswered);
    }
    for (const ServerMessage& message : inbox) {
      const Reply* reply = std::get_if<Reply>(&message);
      if (reply == nullptr || !core_.OnReply(*reply)) continue;
      answered_ = true;
      outcome_ = *reply;
    }
  }

  Status TimedOut() const {
    if (!link_.trouble().ok()) return link_.trouble();
    return Status(StatusCode::kTimeout,
                  StrCat("the store at ", link_.peer(), " did not answer before the timeout"));
  }

  const Clock& clock_;
  WakeFd wake_;
  ClientCore core_;
  StoreLink link_;
  bool answered_ = false;
  Reply outcome_;
};

Result<Reply> Administer(const ConnectOptions& options, Op op, const Clock& clock,
                         Deadline deadline) {
  Result<std::vector<HostPort>> addresses = ParseAddresses(options.addresses);
  if (!addresses.ok()) return addresses.status();
  Result<Credentials> credentials = Credentials::Open(options, {}, clock, deadline);
  if (!credentials.ok()) return credentials.status();
  OneRequest request(MakeHello(options, Role::kAdmin), std::move(*addresses),
                     std::move(*credentials), clock);
  return request.Run(std::move(op), deadline);
}

}  // namespace

Status ReportExit(const ConnectOptions& options, const ExitNotice& notice, const Clock& clock,
                  Deadline deadline) {
  ExitReportOp report;
  report.process = ThisProcess();  // Host, boot and pid namespace are the launcher's.
  report.process.pid = notice.pid;
  report.process.start_time = notice.start_time;
  report.rank = notice.rank;
  report.exit_code = notice.exit_code;
  report.signal = notice.signal;
  report.text = notice.text;
  return Administer(options, std::move(report), clock, deadline).status();
}

Result<std::int64_t> HoldMembers(const ConnectOptions& options, const MemberSelection& which,
                                 Duration limit, const std::string& reason, const Clock& clock,
                                 Deadline deadline) {
  const auto millis = static_cast<std::uint64_t>(std::max<Duration::rep>(limit / Millis(1), 0));
  return NumberOf(
      Administer(options, HoldOp{which.rank, which.host, millis, reason}, clock, deadline));
}

Result<std::int64_t> ReleaseMembers(const ConnectOptions& options, const MemberSelection& which,
                                    const Clock& clock, Deadline deadline) {
  return NumberOf(Administer(options, ReleaseOp{which.rank, which.host}, clock, deadline));
}

Status DrainStore(const ConnectOptions& options, bool force, const Clock& clock,
                  Deadline deadline) {
  return Administer(options, DrainOp{force}, clock, deadline).status();
}

Result<std::string> FetchStatus(const ConnectOptions& options, const StatusQuery& query,
                                const Clock& clock, Deadline deadline) {
  Result<Reply> reply = Administer(options, OpOf(query), clock, deadline);
  if (!reply.ok()) return reply.status();
  return std::move(reply->status_json);
}

}  // namespace resilient::store
