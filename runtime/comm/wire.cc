#include "runtime/comm/wire.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"
#include "runtime/comm/striped_stream.h"

namespace resilient {
namespace {

constexpr std::uint32_t kHelloMagic = 0x484d4352;    // "RCMH"
constexpr std::uint32_t kReplyMagic = 0x524d4352;    // "RCMR"
constexpr std::uint32_t kMessageMagic = 0x4d4d4352;  // "RCMM"
constexpr std::uint16_t kChecksumFlag = 1;
constexpr std::size_t kHelloLengthsAt = 32;  // What comes before them has a fixed place.

// Appends integers in little-endian order whatever the machine's order is.
class Writer {
 public:
  template <typename T>
  Writer& Put(T value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i, bits >>= 8)
      out_.push_back(static_cast<char>(bits & 0xff));
    return *this;
  }
  Writer& Append(std::string_view bytes) {
    out_.append(bytes);
    return *this;
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Get() {
    RESILIENT_CHECK(at_ + sizeof(T) <= bytes_.size());
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
      bits |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes_[at_ + i])) << (8 * i);
    at_ += sizeof(T);
    return static_cast<T>(bits);
  }

 private:
  std::string_view bytes_;
  std::size_t at_ = 0;
};

Status NotOurs(std::string_view what) {
  return Status(StatusCode::kProtocol,
                StrCat("received bytes that are no ", what,
                       " of a resilient communicator; does another program use this port?"));
}

bool KnownEnums(const MessageHeader& h) {
  return h.type >= MessageType::kCollective && h.type <= MessageType::kShm &&
         h.kind >= OpKind::kAllReduce && h.kind <= OpKind::kAllToAll &&
         h.dtype >= DataType::kFloat32 && h.dtype <= DataType::kFloat8E5M2 &&
         h.reduce <= ReduceOp::kPremulSum;
}

// A hello without its proof.
std::string SaidBy(const Hello& hello) {
  RESILIENT_CHECK(hello.nonce.size() == kHelloNonceBytes && hello.group.size() <= kMaxGroupName &&
                  hello.shm_offer.size() <= kMaxShmText &&
                  hello.made.text.size() <= kRanksTextMax &&
                  hello.made.made_at.size() <= kMadeAtMax);
  return Writer()
      .Put(kHelloMagic)
      .Put(kWireVersion)
      .Put(static_cast<std::uint8_t>(hello.lane))
      .Put(static_cast<std::uint8_t>(hello.stream))
      .Put(hello.generation)
      .Put(hello.attempt)
      .Put(static_cast<std::int32_t>(hello.from))
      .Put(static_cast<std::int32_t>(hello.to))
      .Put(static_cast<std::uint32_t>(hello.group.size()))
      .Put(static_cast<std::uint32_t>(hello.shm_offer.size()))
      .Put(static_cast<std::uint16_t>(hello.made.text.size()))
      .Put(static_cast<std::uint16_t>(hello.made.made_at.size()))
      .Put(static_cast<std::int32_t>(hello.from_world))
      .Put(hello.made.digest)
      .Put(hello.connector)
      .Append(hello.nonce)
      .Append(hello.group)
      .Append(hello.shm_offer)
      .Append(hello.made.text)
      .Append(hello.made.made_at)
      .Take();
}

// The labels keep a proof of one kind from being taken for one of the other.
std::string HelloProof(std::string_view said, std::string_view secret) {
  return HmacSha256(secret, StrCat("resilient link hello", said));
}

std::string ReplyProof(std::string_view head, std::string_view hello_proof, std::string_view fault,
                       std::string_view secret) {
  return HmacSha256(secret, StrCat("resilient link reply", hello_proof, head, fault));
}

// Whether there is such a message, and whether it may have that payload.
bool PointToPointIsValid(const MessageHeader& h) {
  if (h.phase > static_cast<std::uint8_t>(PointToPointPhase::kCredit)) return false;
  const auto phase = static_cast<PointToPointPhase>(h.phase);
  return h.payload_bytes == 0 || phase == PointToPointPhase::kEager ||
         phase == PointToPointPhase::kPayload;
}

}  // namespace

std::string EncodeHello(const Hello& hello, std::string_view secret) {
  std::string said = SaidBy(hello);
  said += HelloProof(said, secret);
  return said;
}

bool ProvesSecret(const Hello& hello, std::string_view secret) {
  return SameBytes(HelloProof(SaidBy(hello), secret), hello.proof);
}

std::string_view ProofOf(std::string_view encoded_hello) {
  RESILIENT_CHECK(encoded_hello.size() >= kHelloFixedBytes + kHmacBytes);
  return encoded_hello.substr(encoded_hello.size() - kHmacBytes);
}

Status CheckHelloBegin(std::string_view begin) {
  const std::string magic = Writer().Put(kHelloMagic).Take();
  const std::size_t known = std::min(begin.size(), magic.size());
  if (begin.substr(0, known) != std::string_view(magic).substr(0, known))
    return NotOurs("greeting");
  if (begin.size() < sizeof(kHelloMagic) + sizeof(kWireVersion)) return Status::Ok();
  const auto version = Reader(begin.substr(sizeof(kHelloMagic))).Get<std::uint16_t>();
  if (version == kWireVersion) return Status::Ok();
  return Status(StatusCode::kProtocol,
                StrCat("a peer speaks version ", version, " of the link protocol, this process ",
                       kWireVersion, "; install the same version of resilient on all hosts"));
}

Result<std::size_t> HelloLength(std::string_view fixed) {
  RESILIENT_CHECK(fixed.size() >= kHelloFixedBytes);
  RESILIENT_RETURN_IF_ERROR(CheckHelloBegin(fixed));
  Reader lengths(fixed.substr(kHelloLengthsAt));
  const auto group = lengths.Get<std::uint32_t>();
  const auto shm_offer = lengths.Get<std::uint32_t>();
  const auto ranks = lengths.Get<std::uint16_t>();
  const auto made_at = lengths.Get<std::uint16_t>();
  if (group > kMaxGroupName || shm_offer > kMaxShmText || ranks > kRanksTextMax ||
      made_at > kMadeAtMax)
    return NotOurs("greeting");
  return kHelloFixedBytes + group + shm_offer + ranks + made_at + kHmacBytes;
}

Result<Hello> DecodeHello(std::string_view bytes) {
  Reader in(bytes.substr(6));
  Hello hello;
  hello.lane = static_cast<Lane>(in.Get<std::uint8_t>());
  hello.stream = in.Get<std::uint8_t>();
  hello.generation = in.Get<std::uint64_t>();
  hello.attempt = in.Get<std::uint64_t>();
  hello.from = in.Get<std::int32_t>();
  hello.to = in.Get<std::int32_t>();
  const auto group = in.Get<std::uint32_t>();
  const auto shm_offer = in.Get<std::uint32_t>();
  const auto ranks = in.Get<std::uint16_t>();
  const auto made_at = in.Get<std::uint16_t>();
  hello.from_world = in.Get<std::int32_t>();
  hello.made.digest = in.Get<std::uint64_t>();
  hello.connector = in.Get<std::uint64_t>();
  const bool known_lane = hello.lane >= Lane::kCollective && hello.lane <= Lane::kKnock;
  if (!known_lane || hello.stream >= kMaxSocketStreams || hello.from < 0 || hello.to < 0 ||
      hello.from == hello.to)
    return NotOurs("greeting");
  std::string_view texts = bytes.substr(kHelloFixedBytes - kHelloNonceBytes);
  const auto take = [&texts](std::size_t length) {
    const std::string_view text = texts.substr(0, length);
    texts.remove_prefix(text.size());
    return std::string(text);
  };
  hello.nonce = take(kHelloNonceBytes);
  hello.group = take(group);
  hello.shm_offer = take(shm_offer);
  hello.made.text = take(ranks);
  hello.made.made_at = take(made_at);
  hello.proof = take(texts.size());
  return hello;
}

std::string EncodeHelloReply(HelloVerdict verdict, std::string_view hello_proof,
                             std::string_view secret, std::string_view fault) {
  RESILIENT_CHECK(fault.size() <= kMaxFaultText);
  const std::string head = Writer()
                               .Put(kReplyMagic)
                               .Put(static_cast<std::uint8_t>(verdict))
                               .Put(std::uint8_t{0})
                               .Put(static_cast<std::uint16_t>(fault.size()))
                               .Take();
  return StrCat(head, ReplyProof(head, hello_proof, fault, secret), fault);
}

bool ReplyProvesSecret(std::string_view reply, std::string_view hello_proof,
                       std::string_view secret) {
  constexpr std::size_t kHeadBytes = kHelloReplyBytes - kHmacBytes;
  const std::string right =
      ReplyProof(reply.substr(0, kHeadBytes), hello_proof, reply.substr(kHelloReplyBytes), secret);
  return SameBytes(right, reply.substr(kHeadBytes, kHmacBytes));
}

Result<HelloReply> DecodeHelloReply(std::string_view bytes) {
  Reader in(bytes);
  if (in.Get<std::uint32_t>() != kReplyMagic) return NotOurs("reply");
  HelloReply reply;
  reply.verdict = static_cast<HelloVerdict>(in.Get<std::uint8_t>());
  in.Get<std::uint8_t>();
  reply.fault_bytes = in.Get<std::uint16_t>();
  if (reply.verdict < HelloVerdict::kAccepted || reply.verdict > HelloVerdict::kOtherRanks)
    return NotOurs("reply");
  const bool has_fault = reply.verdict == HelloVerdict::kOtherRanks;
  if (reply.fault_bytes > kMaxFaultText || (reply.fault_bytes != 0) != has_fault)
    return NotOurs("reply");
  return reply;
}

std::string EncodeMessage(const MessageHeader& header, bool checksum) {
  const std::string_view site = std::string_view(header.call_site).substr(0, kMaxCallSite);
  return Writer()
      .Put(kMessageMagic)
      .Put(static_cast<std::uint8_t>(header.type))
      .Put(static_cast<std::uint8_t>(header.kind))
      .Put(static_cast<std::uint8_t>(header.dtype))
      .Put(static_cast<std::uint8_t>(header.reduce))
      .Put(header.phase)
      .Put(static_cast<std::uint8_t>(site.size()))
      .Put(checksum ? kChecksumFlag : std::uint16_t{0})
      .Put(static_cast<std::int32_t>(header.root))
      .Put(header.tag)
      .Put(std::uint32_t{0})
      .Put(header.seq)
      .Put(header.count)
      .Put(std::bit_cast<std::uint64_t>(header.factor))
      .Put(header.payload_bytes)
      .Append(site)
      .Take();
}

Result<MessageHeader> DecodeMessage(std::string_view fixed) {
  Reader in(fixed);
  if (in.Get<std::uint32_t>() != kMessageMagic) return NotOurs("message");
  MessageHeader header;
  header.type = static_cast<MessageType>(in.Get<std::uint8_t>());
  header.kind = static_cast<OpKind>(in.Get<std::uint8_t>());
  header.dtype = static_cast<DataType>(in.Get<std::uint8_t>());
  header.reduce = static_cast<ReduceOp>(in.Get<std::uint8_t>());
  header.phase = in.Get<std::uint8_t>();
  header.call_site_bytes = in.Get<std::uint8_t>();
  const auto flags = in.Get<std::uint16_t>();
  header.checksum = flags == kChecksumFlag;
  header.root = in.Get<std::int32_t>();
  header.tag = in.Get<std::uint32_t>();
  in.Get<std::uint32_t>();
  header.seq = in.Get<std::uint64_t>();
  header.count = in.Get<std::uint64_t>();
  header.factor = std::bit_cast<double>(in.Get<std::uint64_t>());
  header.payload_bytes = in.Get<std::uint64_t>();
  if (!KnownEnums(header) || header.call_site_bytes > kMaxCallSite || flags > kChecksumFlag)
    return NotOurs("message");
  if (header.type == MessageType::kGoodbye && header.payload_bytes != 0) return NotOurs("message");
  if (header.type == MessageType::kFault && header.payload_bytes > kMaxFaultText)
    return NotOurs("message");
  if (header.type == MessageType::kPointToPoint && !PointToPointIsValid(header))
    return NotOurs("message");
  const bool shm_phase = header.phase <= static_cast<std::uint8_t>(ShmMessage::kVerdict);
  if (header.type == MessageType::kShm && (!shm_phase || header.payload_bytes > kMaxShmText))
    return NotOurs("message");
  return header;
}

std::string EncodeChecksum(std::uint64_t checksum) { return Writer().Put(checksum).Take(); }

std::uint64_t DecodeChecksum(std::string_view bytes) { return Reader(bytes).Get<std::uint64_t>(); }

std::string EncodeFault(const Status& status) {
  const FailureDetail& detail = status.detail();
  const std::string head =
      StrCat(CodeName(status.code()), "\n", detail.rank, "\n", detail.pid, "\n", detail.generation,
             "\n", detail.seq, "\n", detail.host, "\n", detail.group, "\n");
  return (head + status.message()).substr(0, kMaxFaultText);
}

std::optional<Status> DecodeFault(std::string_view text) {
  std::vector<std::string_view> lines;
  constexpr std::size_t kFields = 7;
  while (lines.size() < kFields) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return std::nullopt;
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  FailureDetail detail;
  const std::optional<StatusCode> code = CodeFromName(lines[0]);
  if (!code || *code == StatusCode::kOk || !ReadNumbers(lines[1], &detail.rank) ||
      !ReadNumbers(lines[2], &detail.pid) || !ReadNumbers(lines[3], &detail.generation) ||
      !ReadNumbers(lines[4], &detail.seq)) {
    return std::nullopt;
  }
  detail.host = lines[5];
  detail.group = lines[6];
  return Status(*code, std::string(text), std::move(detail));
}

}  // namespace resilient
