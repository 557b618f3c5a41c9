#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <resilient/rendezvous.h>

#include "tests/unit/recovery/fakes.h"

namespace resilient::recovery {

class MembershipHub;

// One session's line to the hub. Thread: thread-safe.
class HubLine final : public Rendezvous {
 public:
  explicit HubLine(MembershipHub& hub) : hub_(hub), control_("hub-control") {}

  Status Start(RendezvousEvents& events, Deadline) override {
    events_ = &events;
    control_.Start();
    return Status::Ok();
  }
  void Join(const JoinRequest& request) override;
  void Ready(std::uint64_t generation) override;
  void Acknowledge(std::uint64_t) override {}  // The hub keeps nothing of older generations.
  void Send(const Report& report) override;
  void Ask(const Report&, std::function<void(const Status&)> answered) override {
    control_.Post([answered = std::move(answered)] { answered(Status::Ok()); });  // Nobody leaves.
  }
  void Tell(const WaitingReport&) override {}
  void Tell(std::uint64_t, const Whereabouts&) override {}
  bool Post(std::function<void()> task) override { return control_.Post(std::move(task)); }
  void Close(Deadline) override;
  void AbandonInChild() override { control_.AbandonInChild(); }

  // For the hub, which guards it: its process was given up.
  bool dead = false;
  void Deliver(std::function<void(RendezvousEvents&)> event) {
    control_.Post([this, event = std::move(event)] { event(*events_); });
  }

 private:
  MembershipHub& hub_;
  RendezvousEvents* events_ = nullptr;
  TaskThread control_;
};

// The rules of a membership service for one world, in one process: forming, building, running, and
// a fence that ends a generation for all. Thread: thread-safe. Lifetime: outlives its lines.
class MembershipHub {
 public:
  explicit MembershipHub(int world_size) : seats_(static_cast<std::size_t>(world_size)) {}

  std::unique_ptr<Rendezvous> NewLine() { return std::make_unique<HubLine>(*this); }

  // The process in that seat is dead; what is left of it is told that it is out.
  void Kill(int rank) {
    std::lock_guard lock(mutex_);
    Seat& seat = seats_[static_cast<std::size_t>(rank)];
    if (HubLine* line = std::exchange(seat, Seat{}).line; line != nullptr) {
      line->dead = true;
      line->Deliver([](RendezvousEvents& events) {
        events.OnSessionLost(Status(StatusCode::kStaleGeneration, "this process was given up"));
      });
    }
    Fence(Lost(rank));
  }

  // A link between two living ranks broke, as the service says when both have answered.
  void CutLink() {
    std::lock_guard lock(mutex_);
    FailureDetail detail;
    detail.generation = generation_;
    Fence(Status(StatusCode::kCommFailed, "the link between two ranks broke", detail));
  }

  // The service has judged: the generation ends with `cause`, which names `rank`.
  void Judge(StatusCode code, int rank) {
    std::lock_guard lock(mutex_);
    FailureDetail detail;
    detail.rank = rank;
    detail.generation = generation_;
    Fence(Status(code, "rank " + std::to_string(rank) + " was judged", detail));
  }

  std::uint64_t generation() const {
    std::lock_guard lock(mutex_);
    return generation_;
  }

 private:
  friend class HubLine;
  enum class Phase { kForming, kBuilding, kRunning };
  struct Seat {
    HubLine* line = nullptr;
    bool joined = false;
    bool ready = false;
    std::string endpoint;
  };

  void OnJoin(HubLine& line, const JoinRequest& request) {
    std::lock_guard lock(mutex_);
    ASSERT_EQ(request.world_size, static_cast<int>(seats_.size()));
    if (line.dead) return;  // It has not heard yet that it is out.
    Seat& seat = seats_[static_cast<std::size_t>(request.rank)];
    seat = {.line = &line, .joined = true, .ready = false, .endpoint = request.endpoint};
    const bool all =
        std::all_of(seats_.begin(), seats_.end(), [](const Seat& each) { return each.joined; });
    if (phase_ != Phase::kForming || !all) return;
    View view;
    view.life = 1;
    view.round = 1;
    view.generation = ++generation_;
    view.secret = "secret of " + std::to_string(generation_);
    for (std::size_t i = 0; i < seats_.size(); ++i) {
      const int rank = static_cast<int>(i);
      view.members.push_back(
          {rank, "i" + seats_[i].endpoint, "host", 100 + rank, seats_[i].endpoint});
      seats_[i].joined = false;
    }
    phase_ = Phase::kBuilding;
    Tell([view](RendezvousEvents& events) { events.OnView(view); });
  }

  void OnReady(HubLine& line, std::uint64_t generation) {
    std::lock_guard lock(mutex_);
    if (phase_ != Phase::kBuilding || generation != generation_) return;
    bool all = true;
    for (Seat& seat : seats_) {
      if (seat.line == &line) seat.ready = true;
      all = all && seat.ready;
    }
    if (!all) return;
    phase_ = Phase::kRunning;
    Tell([generation](RendezvousEvents& events) { events.OnRunning(generation); });
  }

  void OnReport(const Report& report) {
    std::lock_guard lock(mutex_);
    if (report.generation != generation_) return;
    if (report.kind == ReportKind::kNeedsLeaver) return;  // It has left a group; seats stay.
    if (report.kind != ReportKind::kLinkLost) return Fence(report.status);
    // It is alive, or the report would be of the past: the link alone is broken.
    Fence(Status(StatusCode::kCommFailed, report.status.message()));
  }

  void OnLeave(HubLine& line) {
    std::lock_guard lock(mutex_);
    for (Seat& seat : seats_) {
      if (seat.line == &line) seat = Seat{};
    }
  }

  // REQUIRES: mutex_.
  void Fence(const Status& cause) {
    if (phase_ == Phase::kForming) return;
    phase_ = Phase::kForming;
    for (Seat& seat : seats_) seat.joined = seat.ready = false;
    const struct Fence fence { generation_, cause };
    Tell([fence](RendezvousEvents& events) { events.OnFence(fence); });
  }

  // REQUIRES: mutex_.
  void Tell(const std::function<void(RendezvousEvents&)>& event) {
    for (Seat& seat : seats_) {
      if (seat.line != nullptr) seat.line->Deliver(event);
    }
  }

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Seat> seats_;
  Phase phase_ = Phase::kForming;
  std::uint64_t generation_ = 0;
};

inline void HubLine::Join(const JoinRequest& request) { hub_.OnJoin(*this, request); }
inline void HubLine::Ready(std::uint64_t generation) { hub_.OnReady(*this, generation); }
inline void HubLine::Send(const Report& report) { hub_.OnReport(report); }
inline void HubLine::Close(Deadline) {
  hub_.OnLeave(*this);
  control_.Stop();
}

}  // namespace resilient::recovery
