#pragma once

#include <memory>
#include <string>
#include <vector>

#include <resilient/status.h>

#include "runtime/net/frame.h"
#include "store/core/messages.h"

// Between plain messages and frames with a protobuf body. codec.cc and codec_watch.cc are the only
// files that see
// *.pb.h. Pure.
namespace resilient::store {

Frame EncodeRequest(const Request& request);
// A message that no frame holds is shortened, see shortening.h.
Frame EncodeServerMessage(const ServerMessage& message);
// The same as bytes of a stream, appended to `wire`. Of a message to clients the part that it
// shares with others, or a value of kOwnPartBytesMin, is not copied but returned, and has to follow
// `wire`. Null: there is none.
void AppendRequest(const Request& request, std::string* wire);
[[nodiscard]] std::shared_ptr<const std::string> AppendServerMessage(ServerMessage&& message,
                                                                     std::string* wire);
inline constexpr std::size_t kOwnPartBytesMin = 64u << 10;
std::shared_ptr<const SharedValues> Share(std::vector<std::string> values);
SharedViewEvent Share(View view);

// kProtocol when the body is not a valid message of its type; kUnimplemented for an operation this
// build does not know (a newer peer): the connection lives on and the request is answered with it.
Result<Request> DecodeRequest(const Frame& frame);
Result<ServerMessage> DecodeServerMessage(Frame frame);

}  // namespace resilient::store
