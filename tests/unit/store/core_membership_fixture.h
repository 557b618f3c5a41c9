#pragma once

#include <string>
#include <utility>

#include "tests/unit/store/core_fixture.h"

namespace resilient::store {

// Ranks are control connections of processes 0, 1, ...
class CoreMembership : public CoreFixture {
 protected:
  static constexpr Duration kSecond = std::chrono::seconds(1);

  // Ends the process of a rank by its launcher's report.
  void Kill(int process, int signal = 9, int code = 0, std::string text = {}) {
    if (admin_ == 0) admin_ = Open(HelloOf(99, Role::kAdmin));
    ExitReportOp report;
    report.process = HelloOf(process, Role::kControl).process;
    report.rank = process;
    report.signal = signal;
    report.exit_code = code;
    report.text = std::move(text);
    EXPECT_TRUE(Ask(admin_, report).status.ok());
  }
  // Two ranks join; the first one's process hosts the store.
  std::pair<ConnectionId, ConnectionId> JoinWithHost() {
    Hello host = HelloOf(0, Role::kControl, "a");
    host.hosts_store = true;
    const ConnectionId hosting = Open(host);
    const ConnectionId other = OpenControl(1);
    Send(hosting, JoinOp{JoinOf(0, 2)});
    Send(other, JoinOp{JoinOf(1, 2)});
    return {hosting, other};
  }
  ConnectionId admin_ = 0;
};

}  // namespace resilient::store
