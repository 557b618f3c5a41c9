#pragma once

#include <optional>
#include <string>

#include "store/core/messages.h"

// Parts of the codec, of codec*.cc alone. Pure.
namespace resilient::store {

namespace v1 {
class Event;
class JoinRequest;
class Reply;
class Request;
class Welcome;
}  // namespace v1

// Text fields of proto3 must be UTF-8; what people and launchers hand in need not be.
std::string Utf8(const std::string& text);

// Negative ones are 0.
std::uint64_t ToMillis(Duration duration);
// Saturates, so that a huge number of milliseconds cannot overflow the nanoseconds of Duration.
Duration FromMillis(std::uint64_t millis);

void PutOp(const JoinOp& op, v1::Request* out);
Op ToJoin(const v1::JoinRequest& message);
void Put(const Welcome& welcome, v1::Welcome* out);
Welcome ToWelcome(const v1::Welcome& message);

void PutOp(const WatchOp& op, v1::Request* out);
void PutOp(const HoldOp& op, v1::Request* out);
void PutOp(const ReleaseOp& op, v1::Request* out);
void PutOp(const DrainOp& op, v1::Request* out);
// nullopt: none of these.
std::optional<Op> ToWatchOp(const v1::Request& message);

void PutEvent(const HeldEvent& event, v1::Event* out);
void PutEvent(const DrainingEvent& event, v1::Event* out);
// REQUIRES: it is one of these.
Event ToNotice(const v1::Event& message);

void PutOp(const WaitingOp& op, v1::Request* out);
void PutOp(const WhereaboutsOp& op, v1::Request* out);
// nullopt: neither of the two.
std::optional<Op> ToWaitingOp(const v1::Request& message);
void PutEvent(const WhereEvent& event, v1::Event* out);
void PutEvent(const LateEvent& event, v1::Event* out);
void PutEvent(const AskProgressEvent& event, v1::Event* out);
void PutEvent(const AllEnteredEvent& event, v1::Event* out);
// REQUIRES: it is one of these.
Event ToWaitingEvent(const v1::Event& message);

// The revision and the events of a reply.
void PutKeyEvents(const Reply& reply, v1::Reply* out);
void TakeKeyEvents(const v1::Reply& message, Reply* out);

}  // namespace resilient::store
