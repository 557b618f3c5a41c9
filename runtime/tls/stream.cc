#include "runtime/tls/stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/tls/functions.h"

namespace resilient {
namespace {

// Encrypted at a time, so that the memory BIO stays small.
constexpr std::size_t kSendChunk = 64u << 10;
constexpr std::size_t kReadChunk = 16u << 10;  // A record holds no more.

BIO* NewMemory(const TlsFunctions& functions) {
  BIO* const memory = functions.BIO_new(functions.BIO_s_mem());
  RESILIENT_CHECK(memory != nullptr);
  functions.BIO_ctrl(memory, BIO_C_SET_BUF_MEM_EOF_RETURN, -1, nullptr);  // Empty: "later".
  return memory;
}

std::span<std::byte> BytesOf(char* memory, std::size_t bytes) {
  return std::as_writable_bytes(std::span<char>(memory, bytes));
}

}  // namespace

TlsStream::TlsStream(std::shared_ptr<const TlsFunctions> functions, ssl_st* ssl, TlsOptions options)
    : table_(std::move(functions)),
      functions_(*table_),
      options_(std::move(options)),
      ssl_(ssl),
      in_(NewMemory(functions_)),
      out_(NewMemory(functions_)),
      spoken_(options_.plain_magic.empty()),
      taking_early_(options_.takes_early) {
  functions_.SSL_set_bio(ssl_, in_, out_);
}

TlsStream::~TlsStream() { functions_.SSL_free(ssl_); }

Status TlsStream::Receive(std::string_view bytes, std::string& plain) {
  RESILIENT_RETURN_IF_ERROR(Take(bytes));
  char chunk[kReadChunk];
  for (std::size_t got = 1; got > 0;) {
    RESILIENT_RETURN_IF_ERROR(Read(BytesOf(chunk, sizeof chunk), got));
    plain.append(chunk, got);
  }
  return {};
}

// OpenSSL would tell a peer without TLS from other strangers no more than we can. `bytes` is what
// there is of TLS.
Status TlsStream::CheckOpening(std::string_view& bytes, std::string& opening) {
  if (spoken_ || bytes.empty()) return {};
  opening_.append(bytes);
  bytes = {};
  if (opening_.starts_with(options_.plain_magic)) {
    return Fail(
        {StatusCode::kProtocol, "it speaks the plain store protocol where TLS was expected"});
  }
  if (options_.plain_magic.starts_with(opening_)) return {};
  spoken_ = true;
  opening = std::exchange(opening_, {});
  bytes = opening;
  return {};
}

Status TlsStream::Take(std::string_view bytes) {
  if (!error_.ok()) return error_;
  std::string opening;
  const bool begins = bytes.empty();
  RESILIENT_RETURN_IF_ERROR(CheckOpening(bytes, opening));
  if (!begins && bytes.empty()) return {};
  if (!established_) handshake_bytes_ += bytes.size();
  if (!bytes.empty()) {
    const int taken = functions_.BIO_write(in_, bytes.data(), static_cast<int>(bytes.size()));
    RESILIENT_CHECK(taken == static_cast<int>(bytes.size()));  // Memory takes all.
  }
  if (established_) return {};
  RESILIENT_RETURN_IF_ERROR(Handshake());
  // Records add a little to what is sent early.
  const std::size_t limit =
      kTlsHandshakeBytesMax + (options_.takes_early ? 2 * kTlsEarlyBytesMax : 0);
  if (established_ || handshake_bytes_ <= limit) return {};
  return Fail({StatusCode::kProtocol, StrCat("it sent ", handshake_bytes_,
                                             " bytes and had not finished the TLS handshake; the "
                                             "limit is ",
                                             limit)});
}

Status TlsStream::Handshake() {
  RESILIENT_RETURN_IF_ERROR(TakeEarly());
  if (taking_early_) return {};
  functions_.ERR_clear_error();
  const int result = functions_.SSL_do_handshake(ssl_);
  Drain();
  if (result != 1) return FailFrom(result);
  established_ = true;
  return Send(std::exchange(pending_, {}));
}

Status TlsStream::TakeEarly() {
  char chunk[kReadChunk];
  while (taking_early_) {
    std::size_t got = 0;
    functions_.ERR_clear_error();
    const int result = functions_.SSL_read_early_data(ssl_, chunk, sizeof chunk, &got);
    Drain();
    early_.append(chunk, got);
    if (result == SSL_READ_EARLY_DATA_FINISH) taking_early_ = false;
    if (result == SSL_READ_EARLY_DATA_ERROR) return FailFrom(0);
  }
  return {};
}

Status TlsStream::Read(std::span<std::byte> into, std::size_t& got) {
  got = std::min(into.size(), early_.size());
  if (got > 0) {
    std::memcpy(into.data(), early_.data(), got);
    early_.erase(0, got);
    return {};
  }
  if (!error_.ok()) return error_;
  if (!established_ || ended_ || into.empty()) return {};
  functions_.ERR_clear_error();
  const int result = functions_.SSL_read_ex(ssl_, into.data(), into.size(), &got);
  if (result == 1) return {};
  got = 0;
  Drain();  // An alert, or the answer to an update of keys.
  return FailFrom(result);
}

// OK when more bytes of the network are all that is missing.
Status TlsStream::FailFrom(int result) {
  const int why = functions_.SSL_get_error(ssl_, result);
  if (why == SSL_ERROR_WANT_READ) return {};
  if (why == SSL_ERROR_ZERO_RETURN) {
    ended_ = true;
    return {};
  }
  Status described =
      DescribeTlsFailure(functions_, options_.party, functions_.SSL_get_verify_result(ssl_));
  functions_.ERR_clear_error();  // Others of this thread may use OpenSSL too.
  return Fail(std::move(described));
}

Status TlsStream::Fail(Status why) {
  error_ = std::move(why);
  pending_.clear();
  return error_;
}

Status TlsStream::Send(std::string_view plain) {
  if (!error_.ok()) return error_;
  if (!established_) {
    pending_.append(plain);
    return {};
  }
  while (!plain.empty()) {
    const std::string_view chunk = plain.substr(0, kSendChunk);
    std::size_t written = 0;
    functions_.ERR_clear_error();
    const int result = functions_.SSL_write_ex(ssl_, chunk.data(), chunk.size(), &written);
    Drain();
    if (result != 1) {
      // Nothing of TLS 1.3 makes a write wait for the peer.
      const Status failed = FailFrom(result);
      return failed.ok() ? Fail({StatusCode::kProtocol, "TLS takes no bytes of ours"}) : failed;
    }
    plain.remove_prefix(written);
    sent_with_key_ += written;
    if (options_.bytes_of_one_key == 0 || sent_with_key_ < options_.bytes_of_one_key) continue;
    sent_with_key_ = 0;
    RESILIENT_CHECK(functions_.SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) == 1);
  }
  return {};
}

Status TlsStream::SendEarly(std::string_view plain) {
  if (!error_.ok()) return error_;
  std::size_t written = 0;
  functions_.ERR_clear_error();
  const int result = functions_.SSL_write_early_data(ssl_, plain.data(), plain.size(), &written);
  Drain();
  if (result == 1 && written == plain.size()) return {};
  functions_.ERR_clear_error();
  return Fail(
      {StatusCode::kInternal, StrCat(plain.size(), " bytes are too many to be sent early")});
}

void TlsStream::End() {
  if (!established_ || !error_.ok()) return;
  functions_.ERR_clear_error();
  functions_.SSL_shutdown(ssl_);  // The peer's own end is not waited for.
  Drain();
}

void TlsStream::Drain() {
  const long waiting = functions_.BIO_ctrl(out_, BIO_CTRL_PENDING, 0, nullptr);
  if (waiting <= 0) return;
  const std::size_t before = output_.size();
  output_.resize(before + static_cast<std::size_t>(waiting));
  const int got = functions_.BIO_read(out_, output_.data() + before, static_cast<int>(waiting));
  RESILIENT_CHECK(got == waiting);
}

std::string TlsStream::TakeOutput() {
  if (output_begin_ > 0) output_.erase(0, std::exchange(output_begin_, 0));
  return std::exchange(output_, {});
}

void TlsStream::ConsumeOutput(std::size_t bytes) {
  output_begin_ += bytes;
  if (output_begin_ < output_.size()) return;
  output_.clear();
  output_begin_ = 0;
}

}  // namespace resilient
