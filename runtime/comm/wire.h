#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <resilient/communicator.h>
#include <resilient/group_ranks.h>
#include <resilient/status.h>

#include "runtime/base/hmac.h"

namespace resilient {

// What goes over a link between two ranks, little-endian. The connecting side sends a Hello and
// waits for a HelloReply; then both sides send messages: a fixed header, the call site, the
// payload, and after a payload, where its sender was told so (RESILIENT_CHECKSUM), the checksum of
// all of the message before it. All of this file is pure.
//
// The secret of a view is never sent. A hello ends with a proof, the HMAC-SHA256 of all that it
// says, keyed with the secret; the nonce in it makes each one different. The reply proves in the
// same way that its sender knows the secret, and names the hello that it answers by that one's
// proof.
inline constexpr std::uint16_t kWireVersion = 7;
inline constexpr std::size_t kHelloFixedBytes = 80;
inline constexpr std::size_t kHelloReplyBytes = 8 + kHmacBytes;
inline constexpr std::size_t kHelloNonceBytes = 16;
inline constexpr std::size_t kMessageHeaderBytes = 56;
inline constexpr std::size_t kChecksumBytes = 8;
inline constexpr std::size_t kMaxCallSite = 120;
inline constexpr std::size_t kMaxGroupName = 1024;
inline constexpr std::size_t kMaxFaultText = 4096;
inline constexpr std::size_t kMaxShmText = 256;

// What a connection is for. Point-to-point data has connections of its own, one for each direction,
// so that it never queues behind a collective.
// A knock carries nothing: it asks for a reply, and is closed after it.
enum class Lane : std::uint8_t { kCollective = 1, kPointToPoint = 2, kKnock = 3 };

struct Hello {
  std::uint64_t generation = 0;
  std::uint64_t attempt = 0;
  int from = -1;  // Group ranks.
  int to = -1;
  Lane lane = Lane::kCollective;
  int stream = 0;  // Which socket of its link this one is; the others follow the first.
  // Which connector sends it: one that tries again says the same number.
  std::uint64_t connector = 0;
  std::string nonce = std::string(kHelloNonceBytes, '\0');  // From the kernel, for each attempt.
  std::string group;
  std::string shm_offer = {};  // ShmStreamOffer::text; empty: none.
  // What the sender has made the group of: `from` and `to` are positions there.
  GroupRanks made = {};
  int from_world = -1;  // The sender's rank of the world.
  // Set by the decoder: kHmacBytes.
  std::string proof = {};
};

// REQUIRES: the texts are within their limits, the nonce has kHelloNonceBytes.
std::string EncodeHello(const Hello& hello, std::string_view secret);
// Whether a decoded hello has come from somebody who knows the secret.
bool ProvesSecret(const Hello& hello, std::string_view secret);
// The proof at the end of an encoded hello.
std::string_view ProofOf(std::string_view encoded_hello);
// Of the first bytes of a hello, as many as there are: kProtocol when none of ours begins so.
Status CheckHelloBegin(std::string_view begin);
// Length of the whole hello that begins with `fixed`. kProtocol when it is none of ours.
Result<std::size_t> HelloLength(std::string_view fixed);
// REQUIRES: `bytes` is HelloLength() long. kProtocol when a field makes no sense.
Result<Hello> DecodeHello(std::string_view bytes);

enum class HelloVerdict : std::uint8_t {
  kAccepted = 1,
  kLeft = 2,  // That rank was in this group and has left it.
  // As kAccepted; the bytes go through the shared memory that was offered.
  kAcceptedShared = 3,
  // That rank has made the group of other ranks. EncodeFault() follows, of what both end with.
  kOtherRanks = 4
};
// Thread: value type.
struct HelloReply {
  HelloVerdict verdict = HelloVerdict::kAccepted;
  std::size_t fault_bytes = 0;  // So many follow.
};
// To the hello with that proof. `fault`, at most kMaxFaultText, follows.
std::string EncodeHelloReply(HelloVerdict verdict, std::string_view hello_proof,
                             std::string_view secret, std::string_view fault = {});
// REQUIRES: at least kHelloReplyBytes bytes.
Result<HelloReply> DecodeHelloReply(std::string_view bytes);
// Whether a whole reply, its fault included, has come from somebody who knows the secret and has
// read that hello.
bool ReplyProvesSecret(std::string_view reply, std::string_view hello_proof,
                       std::string_view secret);

enum class MessageType : std::uint8_t {
  kCollective = 1,
  // `phase` is a PointToPointPhase.
  kPointToPoint = 2,
  // The sender has left. `count` = number of point-to-point messages it has sent to this peer.
  kGoodbye = 3,
  // The sender's collectives have failed, or where a goodbye follows the whole group; the payload
  // is EncodeFault().
  kFault = 4,
  // About shared memory, between rank 0 and each other rank of a group; `phase` is a ShmMessage.
  kShm = 5
};

// What a point-to-point message is. `seq` is the number of the send, on its link.
enum class PointToPointPhase : std::uint8_t {
  // From the sender.
  kEager = 0,      // Header and payload, unasked.
  kAnnounced = 1,  // The header alone: the payload waits to be cleared.
  kPayload = 2,    // What was announced and cleared: the header again, and the payload.
  // From the receiver, on the same connection. `count`: bytes of credit that it returns.
  kClearToSend = 3,  // The recv for message `seq` is there.
  kUnmatched = 4,    // There is none for message `seq` yet.
  kCredit = 5
};

// `count` of an answer or a verdict: 1 = yes, 0 = no.
enum class ShmMessage : std::uint8_t {
  kOffer = 0,   // Rank 0: the payload says where its segment is.
  kAnswer = 1,  // To rank 0: attached or not.
  kVerdict = 2  // Rank 0: all have attached, and collectives go there.
};

// Thread: value type.
struct MessageHeader {
  MessageType type = MessageType::kCollective;
  OpKind kind = OpKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  ReduceOp reduce = ReduceOp::kNone;
  std::uint8_t phase = 0;  // Which message of the operation.
  int root = -1;
  std::uint32_t tag = 0;
  std::uint64_t seq = 0;
  // Elements of the whole operation where HasOneCount, else of the part that the receiver gets. In
  // a note of the latter kinds: what its sender's operation says, for texts only.
  std::uint64_t count = 0;
  double factor = 1.0;
  std::uint64_t payload_bytes = 0;
  std::string call_site;

  // Set by the decoder.
  std::size_t call_site_bytes = 0;  // The call site itself follows.
  bool checksum = false;            // Behind the payload.
};

// Header and call site; the call site is cut to kMaxCallSite. `checksum`: one follows the payload.
std::string EncodeMessage(const MessageHeader& header, bool checksum = false);
// Decodes the fixed part. kProtocol when it is no header of ours.
Result<MessageHeader> DecodeMessage(std::string_view fixed);

std::string EncodeChecksum(std::uint64_t checksum);
// REQUIRES: kChecksumBytes bytes.
std::uint64_t DecodeChecksum(std::string_view bytes);

// A failure as it is told to a peer.
std::string EncodeFault(const Status& status);
// nullopt when it is none.
std::optional<Status> DecodeFault(std::string_view text);

}  // namespace resilient
