#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

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
  std::pair<ConnectionId, ConnectionId> JoinWithHost(Duration seat_wait = {}) {
    Hello host = HelloOf(0, Role::kControl, "a");
    host.hosts_store = true;
    const ConnectionId hosting = Open(host);
    const ConnectionId other = OpenControl(1);
    Send(hosting, JoinOp{JoinOf(0, 2, seat_wait)});
    Send(other, JoinOp{JoinOf(1, 2, seat_wait)});
    return {hosting, other};
  }
  ConnectionId admin_ = 0;
};

// And processes that wait for a seat.
class CoreSpares : public CoreMembership {
 protected:
  static JoinRequest SpareOf(int process, int size) {
    JoinRequest request = JoinOf(kSpareRank, size);
    request.endpoint = "e" + std::to_string(process);
    return request;
  }
  // Processes `first`.. wait for a seat in a world of `size`.
  std::vector<ConnectionId> Wait(int first, int count, int size) {
    std::vector<ConnectionId> control;
    for (int i = first; i < first + count; ++i) {
      control.push_back(OpenControl(i));
      Send(control.back(), JoinOp{SpareOf(i, size)});
    }
    return control;
  }
  void JoinAgain(ConnectionId control, int rank, int size) {
    JoinRequest request = JoinOf(rank, size);
    request.generation = 1;
    Send(control, JoinOp{request});
  }
  std::string MembersAt(ConnectionId control) {
    const std::optional<View> view = Take<View>(control);
    if (!view) return "no view";
    std::string text;
    for (const Member& member : view->members) {
      text += (text.empty() ? "" : " ") + member.incarnation;
    }
    return text;
  }
  StatusCode RefusalAt(ConnectionId control) {
    const std::optional<JoinRefusedEvent> refused = Take<JoinRefusedEvent>(control);
    return refused ? refused->why.code() : StatusCode::kOk;
  }
};

}  // namespace resilient::store
