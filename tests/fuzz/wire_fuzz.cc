// Goal: whatever a stranger sends to the port of a rank is refused or read as what it says, and
// without the secret no hello and no reply passes. Method: the input's first byte chooses what the
// rest is taken for; what could be read is written again and must come out the same.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/comm/wire.h"

namespace {

using resilient::DecodeFault;
using resilient::DecodeHello;
using resilient::DecodeHelloReply;
using resilient::DecodeMessage;
using resilient::Hello;
using resilient::Result;
using resilient::Status;

constexpr std::string_view kSecret = "0123456789abcdef0123456789abcdef";

// As Switchboard reads it: the beginning at any length, then as much as it says.
void ReadHello(std::string_view bytes) {
  const Status begin = resilient::CheckHelloBegin(bytes);
  if (!begin.ok() || bytes.size() < resilient::kHelloFixedBytes) return;
  const Result<std::size_t> length = resilient::HelloLength(bytes);
  if (!length.ok() || *length > bytes.size()) return;
  const std::string_view whole = bytes.substr(0, *length);
  const Result<Hello> hello = DecodeHello(whole);
  if (!hello.ok()) return;
  RESILIENT_CHECK(!resilient::ProvesSecret(*hello, kSecret));
  const std::string again = resilient::EncodeHello(*hello, kSecret);
  const std::size_t said = whole.size() - resilient::kHmacBytes;
  RESILIENT_CHECK(again.substr(0, said) == whole.substr(0, said));
  const Result<Hello> proven = DecodeHello(again);
  RESILIENT_CHECK(proven.ok() && resilient::ProvesSecret(*proven, kSecret));
}

void ReadReply(std::string_view bytes) {
  if (bytes.size() < resilient::kHelloReplyBytes) return;
  const auto reply = DecodeHelloReply(bytes.substr(0, resilient::kHelloReplyBytes));
  if (!reply.ok() || bytes.size() < resilient::kHelloReplyBytes + reply->fault_bytes) return;
  const auto whole = bytes.substr(0, resilient::kHelloReplyBytes + reply->fault_bytes);
  RESILIENT_CHECK(!resilient::ReplyProvesSecret(whole, std::string(32, 'p'), kSecret));
}

void ReadMessage(std::string_view bytes) {
  if (bytes.size() < resilient::kMessageHeaderBytes) return;
  auto header = DecodeMessage(bytes.substr(0, resilient::kMessageHeaderBytes));
  if (!header.ok()) return;
  const std::string_view site = bytes.substr(resilient::kMessageHeaderBytes);
  if (site.size() < header->call_site_bytes) return;
  header->call_site = site.substr(0, header->call_site_bytes);
  const std::string again = resilient::EncodeMessage(*header, header->checksum);
  const auto back = DecodeMessage(again);
  RESILIENT_CHECK(back.ok() && back->payload_bytes == header->payload_bytes &&
                  back->call_site_bytes == header->call_site_bytes);
}

void ReadFault(std::string_view text) {
  const auto status = DecodeFault(text);
  if (!status) return;
  RESILIENT_CHECK(!status->ok());
  RESILIENT_CHECK(resilient::EncodeFault(*status).size() <= resilient::kMaxFaultText);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 4) {
    case 0:
      ReadHello(bytes);
      break;
    case 1:
      ReadReply(bytes);
      break;
    case 2:
      ReadMessage(bytes);
      break;
    default:
      ReadFault(bytes);
      break;
  }
  return 0;
}
