#include "store/core/shortening.h"

#include <string>
#include <utility>
#include <variant>

#include "runtime/net/frame.h"
#include "store/core/causes.h"
#include "store/core/text_limits.h"

namespace resilient::store {
namespace {

Status TooLarge(const char* what, std::size_t bytes) {
  return Status(StatusCode::kResourceExhausted,
                std::string(what) + " has " + std::to_string(bytes) + " bytes, and a message of " +
                    "the store holds at most " + std::to_string(kMaxFrameBody));
}

struct EventShortener {
  std::size_t bytes;

  // No world is made whose view is too large, see Membership::CheckRoomInView.
  Event operator()(const View&) const { return NoView(); }
  Event operator()(const SharedViewEvent&) const { return NoView(); }
  Event operator()(const Fence& event) const {
    return Fence{event.generation, CutTexts(event.cause)};
  }
  Event operator()(const JoinRefusedEvent& event) const {
    return JoinRefusedEvent{CutTexts(event.why), event.join};
  }
  Event operator()(const SessionLostEvent& event) const {
    return SessionLostEvent{CutTexts(event.why)};
  }
  Event operator()(const HeldEvent& event) const {
    HeldEvent cut = event;
    cut.host = Cut(event.host);
    cut.reason = Cut(event.reason);
    return cut;
  }
  Event operator()(const DrainingEvent& event) const { return DrainingEvent{Cut(event.reason)}; }
  Event operator()(const LateEvent& event) const {
    LateEvent cut = event;
    cut.notice.elsewhere = Cut(event.notice.elsewhere);
    for (LateRank& rank : cut.notice.ranks) rank.text = Cut(rank.text);
    return cut;
  }
  // A verdict that asks for less, or says less, is not given: ranks that wait are asked again.
  Event operator()(const AskProgressEvent& event) const {
    return AskProgressEvent{event.generation, {}};
  }
  Event operator()(const AllEnteredEvent& event) const {
    return AllEnteredEvent{event.generation, {}};
  }
  template <typename Fixed>
  Event operator()(const Fixed& event) const {
    return event;
  }

  Event NoView() const { return JoinRefusedEvent{TooLarge("the list of its members", bytes), 0}; }
};

}  // namespace

ServerMessage Shortened(const ServerMessage& message, std::size_t bytes) {
  const Reply* reply = std::get_if<Reply>(&message);
  if (reply == nullptr) return std::visit(EventShortener{bytes}, std::get<Event>(message));
  Reply refusal;
  refusal.seq = reply->seq;
  refusal.status = reply->status.ok() ? TooLarge("the answer", bytes) : CutTexts(reply->status);
  refusal.revision = reply->revision;
  return refusal;
}

}  // namespace resilient::store
