#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "tests/support/fake_nccl_meeting.h"

namespace resilient::testing {
namespace {

class LocalMeeting final : public NcclMeeting {
 public:
  LocalMeeting(NcclWorld& world, int rank) : world_(world), rank_(rank) {}

  bool IsComplete() const override { return world_.complete(); }
  bool IsLost() const override { return false; }
  bool IsFlushed() const override { return true; }
  PostedCallPtr Post(const NcclCall& call) override { return world_.Post(rank_, call); }
  void GiveUp(const PostedCallPtr& posted) override { posted->broken = true; }

 private:
  NcclWorld& world_;
  const int rank_;
};

class LocalMeetings final : public NcclMeetings {
 public:
  explicit LocalMeetings(NcclMeetingHost host) : host_(std::move(host)) {}

  NcclUniqueId NewId() override {
    NcclUniqueId id;
    const int number = ++ids_;
    std::memcpy(id.bytes.data(), &number, sizeof(number));
    return id;
  }
  std::unique_ptr<NcclMeeting> Join(const NcclUniqueId& id, int ranks, int rank) override {
    NcclWorld& world = worlds_.try_emplace(id.bytes, host_.on_misuse).first->second;
    world.Join(ranks, rank);
    return std::make_unique<LocalMeeting>(world, rank);
  }

 private:
  const NcclMeetingHost host_;
  int ids_ = 0;
  std::map<std::array<char, 128>, NcclWorld> worlds_;
};

}  // namespace

std::unique_ptr<NcclMeetings> MakeLocalMeetings(NcclMeetingHost host) {
  return std::make_unique<LocalMeetings>(std::move(host));
}

}  // namespace resilient::testing
