#include "runtime/comm/nccl_meeting.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"

namespace resilient {
namespace {

constexpr std::size_t kLengthBytes = sizeof(std::uint32_t);
constexpr std::size_t kPlaceBytes = kLengthBytes + kMeetingBytes;

}  // namespace

NcclMeeting::NcclMeeting(std::string_view said, int ranks)
    : said_(kPlaceBytes, '\0'), heard_(kPlaceBytes * static_cast<std::size_t>(ranks), '\0') {
  RESILIENT_CHECK(said.size() <= kMeetingBytes);
  const auto length = static_cast<std::uint32_t>(said.size());
  std::memcpy(said_.data(), &length, kLengthBytes);
  said.copy(said_.data() + kLengthBytes, said.size());
}

std::shared_ptr<NcclMeeting> NcclMeeting::Begin(Communicator& control, std::string_view said,
                                                std::shared_ptr<const Doorbell> doorbell) {
  std::shared_ptr<NcclMeeting> meeting(new NcclMeeting(said, control.size()));
  Operation op;
  op.kind = OpKind::kAllGather;
  op.data = meeting->said_.data();
  op.count = kPlaceBytes;
  for (int rank = 0; rank < control.size(); ++rank) {
    const std::size_t offset = kPlaceBytes * static_cast<std::size_t>(rank);
    op.outputs.push_back({.data = meeting->heard_.data() + offset, .count = kPlaceBytes});
  }
  const auto submitted = control.Submit(
      std::move(op), [meeting, doorbell = std::move(doorbell)](const Status& status) {
        meeting->End(status);
        doorbell->Ring();
      });
  if (!submitted.ok()) meeting->End(submitted.status());
  return meeting;
}

void NcclMeeting::End(const Status& status) {
  status_ = status;
  over_.store(true, std::memory_order_release);
}

std::string NcclMeeting::HeardFrom(int rank) const {
  const char* place = heard_.data() + kPlaceBytes * static_cast<std::size_t>(rank);
  std::uint32_t length = 0;
  std::memcpy(&length, place, kLengthBytes);
  if (length > kMeetingBytes) return {};
  return std::string(place + kLengthBytes, length);
}

}  // namespace resilient
