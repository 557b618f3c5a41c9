#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/utf8.h"
#include "store.pb.h"
#include "store/core/codec.h"
#include "store/core/codec_parts.h"

namespace resilient::store {

namespace pb = ::resilient::store::v1;

std::string Utf8(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = Utf8Length(rest);
    out += length > 0 ? rest.substr(0, length) : "?";
    rest.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return out;
}

void PutOp(const WatchOp& op, pb::Request* out) {
  out->mutable_watch()->set_prefix(op.prefix);
  out->mutable_watch()->set_from_revision(op.from_revision);
  out->mutable_watch()->set_wait(op.wait);
}

void PutOp(const HoldOp& op, pb::Request* out) {
  pb::HoldRequest* message = out->mutable_hold();
  message->set_rank(op.rank);
  message->set_host(Utf8(op.host));
  message->set_for_ms(op.for_ms);
  message->set_reason(Utf8(op.reason));
}

void PutOp(const ReleaseOp& op, pb::Request* out) {
  out->mutable_release()->set_rank(op.rank);
  out->mutable_release()->set_host(Utf8(op.host));
}

void PutOp(const DrainOp& op, pb::Request* out) { out->mutable_drain()->set_force(op.force); }

std::optional<Op> ToWatchOp(const pb::Request& message) {
  if (message.has_watch()) {
    return WatchOp{message.watch().prefix(), message.watch().from_revision(),
                   message.watch().wait()};
  }
  if (message.has_hold()) {
    const pb::HoldRequest& hold = message.hold();
    return HoldOp{hold.rank(), hold.host(), hold.for_ms(), hold.reason()};
  }
  if (message.has_release()) return ReleaseOp{message.release().rank(), message.release().host()};
  if (message.has_drain()) return DrainOp{message.drain().force()};
  return std::nullopt;
}

void PutEvent(const HeldEvent& event, pb::Event* out) {
  pb::HeldEvent* message = out->mutable_held();
  message->set_rank(event.rank);
  message->set_host(Utf8(event.host));
  message->set_pid(event.pid);
  message->set_held(event.held);
  message->set_for_ms(event.for_ms);
  message->set_reason(Utf8(event.reason));
  message->set_job_for_ms(event.job_for_ms);
}

void PutEvent(const DrainingEvent& event, pb::Event* out) {
  out->mutable_draining()->set_reason(Utf8(event.reason));
}

Event ToNotice(const pb::Event& message) {
  if (message.has_draining()) return DrainingEvent{message.draining().reason()};
  const pb::HeldEvent& held = message.held();
  return HeldEvent{held.rank(),   held.host(),   held.pid(),       held.held(),
                   held.for_ms(), held.reason(), held.job_for_ms()};
}

void PutKeyEvents(const Reply& reply, pb::Reply* out) {
  out->set_revision(reply.revision);
  for (const KeyEvent& event : reply.events) {
    pb::KeyEvent* entry = out->add_events();
    entry->set_revision(event.revision);
    entry->set_key(event.key);
    if (event.value) {
      entry->set_value(*event.value);
    } else {
      entry->set_deleted(true);
    }
  }
}

void TakeKeyEvents(const pb::Reply& message, Reply* out) {
  out->revision = message.revision();
  out->events.reserve(static_cast<std::size_t>(message.events_size()));
  for (const pb::KeyEvent& entry : message.events()) {
    KeyEvent event{entry.revision(), entry.key(), std::nullopt};
    if (!entry.deleted()) event.value = entry.value();
    out->events.push_back(std::move(event));
  }
}

std::shared_ptr<const SharedValues> Share(std::vector<std::string> values) {
  pb::Reply message;
  for (const std::string& value : values) message.add_values(value);
  auto shared = std::make_shared<SharedValues>();
  shared->encoded = message.SerializeAsString();
  shared->values = std::move(values);
  return shared;
}

}  // namespace resilient::store
