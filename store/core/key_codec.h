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

// Of an operation in Request of store.proto; 0: it is left to protobuf.
template <typename OpType>
inline constexpr int kKeyOpField = 0;
template <>
inline constexpr int kKeyOpField<SetOp> = 11;
template <>
inline constexpr int kKeyOpField<GetOp> = 12;
template <>
inline constexpr int kKeyOpField<AddOp> = 13;
template <>
inline constexpr int kKeyOpField<CompareSetOp> = 14;
template <>
inline constexpr int kKeyOpField<CheckOp> = 15;
template <>
inline constexpr int kKeyOpField<WaitOp> = 16;
template <>
inline constexpr int kKeyOpField<DeleteOp> = 17;
template <>
inline constexpr int kKeyOpField<NumKeysOp> = 18;
template <>
inline constexpr int kKeyOpField<AppendOp> = 20;
template <>
inline constexpr int kKeyOpField<MultiGetOp> = 21;
template <>
inline constexpr int kKeyOpField<MultiSetOp> = 22;
template <>
inline constexpr int kKeyOpField<QueuePushOp> = 24;
template <>
inline constexpr int kKeyOpField<QueuePopOp> = 25;
template <>
inline constexpr int kKeyOpField<QueueLengthOp> = 26;

template <typename OpType>
concept CodedByHand = (kKeyOpField<OpType> != 0);

// Appends the encoded message, of a reply without the values that it shares. False, with nothing
// done: it is none of these (a request: its operation is not CodedByHand).
bool AppendKeyRequest(const Request& request, std::string* body);
bool AppendPlainReply(const Reply& reply, std::string* body);
// The head of a value of so many bytes, which are to follow.
void BeginReplyValue(std::size_t bytes, std::string* body);

// Without the number, which is the frame's. nullopt: none of these.
std::optional<Request> ReadKeyRequest(std::string_view body);
// A large value takes over the memory of the body.
std::optional<Reply> ReadPlainReply(std::string& body);

}  // namespace resilient::store
