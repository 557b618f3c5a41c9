#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "store/core/messages.h"

// Requests for keys and plain answers, by hand: they are nearly all messages, and protobuf's
// objects cost more than all else that is done for one, and a copy of large values. Protobuf reads
// what is written here, and the other way round. Whatever else comes (another operation, an unknown
// field, a field of another type, a malformed body) is left to protobuf, so that nothing is judged
// here. Of codec.cc alone. Pure.
namespace resilient::store {

// Appends the encoded message, of a reply without the values that it shares. False, with nothing
// done: it is none of these.
bool AppendKeyRequest(const Request& request, std::string* body);
bool AppendPlainReply(const Reply& reply, std::string* body);

// Without the number, which is the frame's. nullopt: none of these.
std::optional<Request> ReadKeyRequest(std::string_view body);
// A large value takes over the memory of the body.
std::optional<Reply> ReadPlainReply(std::string& body);

}  // namespace resilient::store
