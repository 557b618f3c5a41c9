#include <algorithm>
#include <utility>

#include "store.pb.h"
#include "store/core/codec.h"
#include "store/core/codec_parts.h"

namespace resilient::store {

namespace pb = ::resilient::store::v1;

std::uint64_t ToMillis(Duration duration) {
  const auto count = std::chrono::duration_cast<Millis>(duration).count();
  return count < 0 ? 0 : static_cast<std::uint64_t>(count);
}

Duration FromMillis(std::uint64_t millis) {
  constexpr std::uint64_t kMost =
      static_cast<std::uint64_t>(std::chrono::duration_cast<Millis>(Duration::max()).count());
  return millis >= kMost ? Duration::max() : Millis(static_cast<std::int64_t>(millis));
}

namespace {

void Put(const WaitingCall& call, pb::WaitingCall* out) {
  const WaitingOperation& operation = call.operation;
  out->set_group(Utf8(call.group));
  out->set_seq(operation.seq);
  out->set_point_to_point(operation.point_to_point);
  out->set_what(Utf8(operation.what));
  out->set_call_site(Utf8(operation.call_site));
  out->set_age_ms(ToMillis(operation.age));
  for (const int rank : operation.missing) out->add_missing(rank);
  out->set_any(operation.any);
  out->set_blocked(call.blocked);
  out->set_sends(operation.sends);
  out->set_needs_all(operation.needs_all);
  for (const int rank : operation.not_begun) out->add_not_begun(rank);
  out->set_number(operation.number);
}

void Put(const DeviceProgress& device, pb::DeviceProgress* out) {
  out->set_name(Utf8(device.name));
  out->set_begun(device.begun);
  out->set_runs(device.runs);
  out->set_still_ms(ToMillis(device.still));
  out->set_last(Utf8(device.last));
  out->set_last_ago_ms(ToMillis(device.last_ago));
}

void Put(const GroupProgress& progress, pb::GroupProgress* out) {
  out->set_group(Utf8(progress.group));
  out->set_absent(!progress.exists);
  out->set_entered(progress.entered);
  for (const PeerProgress& peer : progress.peers) {
    pb::PeerProgress* entry = out->add_peers();
    entry->set_rank(peer.rank);
    entry->set_sent(peer.sent);
    entry->set_received(peer.received);
    entry->set_unclaimed(peer.unclaimed);
    entry->set_sends_on_device(peer.sends_on_device);
    entry->set_recvs_given(peer.recvs_given);
    entry->set_recvs_on_device(peer.recvs_on_device);
  }
  if (progress.device) Put(*progress.device, out->mutable_device());
}

void Put(const GroupMade& made, pb::GroupMade* out) {
  out->set_group(Utf8(made.group));
  out->set_digest(made.ranks.digest);
  out->set_ranks(Utf8(made.ranks.text));
  out->set_made_at(Utf8(made.ranks.made_at));
  out->set_used(made.used);
}

GroupProgress ToProgress(const pb::GroupProgress& message) {
  GroupProgress progress;
  progress.group = message.group();
  progress.exists = !message.absent();
  progress.entered = message.entered();
  progress.peers.reserve(static_cast<std::size_t>(message.peers_size()));
  for (const pb::PeerProgress& peer : message.peers()) {
    progress.peers.push_back({.rank = peer.rank(),
                              .sent = peer.sent(),
                              .received = peer.received(),
                              .unclaimed = peer.unclaimed(),
                              .sends_on_device = peer.sends_on_device(),
                              .recvs_given = peer.recvs_given(),
                              .recvs_on_device = peer.recvs_on_device()});
  }
  if (!message.has_device()) return progress;
  const pb::DeviceProgress& device = message.device();
  progress.device = {.name = device.name(),
                     .begun = device.begun(),
                     .runs = device.runs(),
                     .still = FromMillis(device.still_ms()),
                     .last = device.last(),
                     .last_ago = FromMillis(device.last_ago_ms())};
  return progress;
}

WaitingCall ToCall(const pb::WaitingCall& message) {
  WaitingCall call;
  call.group = message.group();
  call.operation.seq = message.seq();
  call.operation.point_to_point = message.point_to_point();
  call.operation.what = message.what();
  call.operation.call_site = message.call_site();
  call.operation.age = FromMillis(message.age_ms());
  call.operation.missing.assign(message.missing().begin(), message.missing().end());
  call.operation.any = message.any();
  call.operation.sends = message.sends();
  call.operation.needs_all = message.needs_all();
  call.operation.not_begun.assign(message.not_begun().begin(), message.not_begun().end());
  call.operation.number = message.number();
  call.blocked = message.blocked();
  return call;
}

}  // namespace

void PutOp(const WaitingOp& op, pb::Request* out) {
  pb::WaitingRequest* message = out->mutable_waiting();
  message->set_generation(op.report.generation);
  for (const WaitingCall& call : op.report.calls) Put(call, message->add_calls());
  message->set_blocked(op.report.blocked);
  message->set_tell(op.report.tell);
  message->set_stall_ms(ToMillis(op.report.stall));
  message->set_device_stall_ms(ToMillis(op.report.device_stall));
  for (const int rank : op.report.present) message->add_present(rank);
  for (const int rank : op.report.unverified) message->add_unverified(rank);
  for (const GroupProgress& progress : op.report.progress) Put(progress, message->add_progress());
  for (const GroupMade& made : op.report.made) Put(made, message->add_made());
  message->set_threads(op.report.threads);
}

void PutOp(const WhereaboutsOp& op, pb::Request* out) {
  pb::WhereaboutsRequest* message = out->mutable_whereabouts();
  message->set_ask(op.ask);
  message->set_thread(Utf8(op.whereabouts.thread));
  message->set_at(Utf8(op.whereabouts.at));
  message->set_stack(Utf8(op.whereabouts.stack));
  message->set_no_progress_ms(ToMillis(op.whereabouts.no_progress));
  message->set_expected_slow(Utf8(op.whereabouts.expected_slow));
  message->set_expected_slow_ms(ToMillis(op.whereabouts.expected_slow_for));
}

std::optional<Op> ToWaitingOp(const pb::Request& message) {
  if (message.has_waiting()) {
    const pb::WaitingRequest& waiting = message.waiting();
    WaitingReport report;
    report.generation = waiting.generation();
    report.calls.reserve(static_cast<std::size_t>(waiting.calls_size()));
    for (const pb::WaitingCall& call : waiting.calls()) report.calls.push_back(ToCall(call));
    report.blocked = waiting.blocked();
    report.tell = waiting.tell();
    report.stall = FromMillis(waiting.stall_ms());
    report.device_stall = FromMillis(waiting.device_stall_ms());
    report.present.assign(waiting.present().begin(), waiting.present().end());
    report.unverified.assign(waiting.unverified().begin(), waiting.unverified().end());
    report.progress.reserve(static_cast<std::size_t>(waiting.progress_size()));
    for (const pb::GroupProgress& one : waiting.progress())
      report.progress.push_back(ToProgress(one));
    report.made.reserve(static_cast<std::size_t>(waiting.made_size()));
    for (const pb::GroupMade& made : waiting.made()) {
      report.made.push_back({.group = made.group(),
                             .ranks = {made.digest(), made.ranks(), made.made_at()},
                             .used = made.used()});
    }
    report.threads = waiting.threads();
    return WaitingOp{std::move(report)};
  }
  if (message.has_whereabouts()) {
    const pb::WhereaboutsRequest& where = message.whereabouts();
    return WhereaboutsOp{
        where.ask(),
        {where.thread(), where.at(), where.stack(), FromMillis(where.no_progress_ms()),
         where.expected_slow(), FromMillis(where.expected_slow_ms())}};
  }
  return std::nullopt;
}

void PutEvent(const WhereEvent& event, pb::Event* out) { out->mutable_where()->set_ask(event.ask); }

void PutEvent(const LateEvent& event, pb::Event* out) {
  const LateNotice& notice = event.notice;
  pb::LateEvent* message = out->mutable_late();
  message->set_generation(notice.generation);
  message->set_ready(static_cast<std::uint32_t>(std::max(notice.ready, 0)));
  message->set_world_size(static_cast<std::uint32_t>(std::max(notice.world_size, 0)));
  for (const LateRank& late : notice.ranks) {
    pb::LateRank* entry = message->add_ranks();
    entry->set_rank(late.rank);
    entry->set_text(Utf8(late.text));
    entry->set_of_network(late.of_network);
  }
  message->set_more(static_cast<std::uint32_t>(std::max(notice.more, 0)));
  message->set_elsewhere(Utf8(notice.elsewhere));
}

void PutEvent(const AskProgressEvent& event, pb::Event* out) {
  pb::AskProgressEvent* message = out->mutable_ask_progress();
  message->set_generation(event.generation);
  for (const std::string& group : event.groups) message->add_groups(Utf8(group));
}

void PutEvent(const AllEnteredEvent& event, pb::Event* out) {
  pb::AllEnteredEvent* message = out->mutable_all_entered();
  message->set_generation(event.generation);
  for (const EnteredCall& call : event.calls) {
    pb::EnteredCall* entry = message->add_calls();
    entry->set_group(Utf8(call.group));
    entry->set_point_to_point(call.point_to_point);
    entry->set_seq(call.seq);
  }
}

Event ToWaitingEvent(const pb::Event& message) {
  if (message.has_where()) return WhereEvent{message.where().ask()};
  if (message.has_ask_progress()) {
    const pb::AskProgressEvent& ask = message.ask_progress();
    return AskProgressEvent{ask.generation(), {ask.groups().begin(), ask.groups().end()}};
  }
  if (message.has_all_entered()) {
    AllEnteredEvent entered{message.all_entered().generation(), {}};
    for (const pb::EnteredCall& call : message.all_entered().calls())
      entered.calls.push_back({call.group(), call.point_to_point(), call.seq()});
    return entered;
  }
  const pb::LateEvent& late = message.late();
  LateNotice notice;
  notice.generation = late.generation();
  notice.ready =
      static_cast<int>(std::min(late.ready(), static_cast<std::uint32_t>(kWorldSizeMax)));
  notice.world_size =
      static_cast<int>(std::min(late.world_size(), static_cast<std::uint32_t>(kWorldSizeMax)));
  notice.ranks.reserve(static_cast<std::size_t>(late.ranks_size()));
  for (const pb::LateRank& entry : late.ranks())
    notice.ranks.push_back({entry.rank(), entry.text(), entry.of_network()});
  notice.more = static_cast<int>(std::min(late.more(), static_cast<std::uint32_t>(kWorldSizeMax)));
  notice.elsewhere = late.elsewhere();
  return LateEvent{std::move(notice)};
}

}  // namespace resilient::store
