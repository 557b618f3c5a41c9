#include "store/tls/stream.h"

#include <algorithm>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/tls/functions.h"

namespace resilient::store {
namespace {

// Encrypted at a time, so that the memory BIO stays small.
constexpr std::size_t kSendChunk = 64u << 10;
constexpr std::size_t kReadChunk = 16u << 10;  // A record holds no more.
constexpr std::string_view kPlainMagic = "RSL1";

}  // namespace

TlsStream::TlsStream(std::shared_ptr<const TlsFunctions> functions, ssl_st* ssl, bio_st* in,
                     bio_st* out, TlsParty party)
    : table_(std::move(functions)),
      functions_(*table_),
      party_(std::move(party)),
      ssl_(ssl),
      in_(in),
      out_(out) {}

TlsStream::~TlsStream() { functions_.SSL_free(ssl_); }

Status TlsStream::Receive(std::string_view bytes, std::string& plain) {
  if (!error_.ok()) return error_;
  std::string opening;
  if (!spoken_ && !bytes.empty()) {
    // OpenSSL would tell a store without TLS from other strangers no more than we can.
    opening_.append(bytes);
    const bool plain_store = opening_.starts_with(kPlainMagic);
    if (plain_store) {
      return Fail(
          {StatusCode::kProtocol, "it speaks the plain store protocol where TLS was expected"});
    }
    if (kPlainMagic.starts_with(opening_)) return {};
    spoken_ = true;
    opening = std::exchange(opening_, {});
    bytes = opening;
  }
  if (!established_) handshake_bytes_ += bytes.size();
  if (!bytes.empty()) {
    const int taken = functions_.BIO_write(in_, bytes.data(), static_cast<int>(bytes.size()));
    RESILIENT_CHECK(taken == static_cast<int>(bytes.size()));  // Memory takes all.
  }
  if (!established_) RESILIENT_RETURN_IF_ERROR(Handshake());
  if (established_) return Read(plain);
  if (handshake_bytes_ > kTlsHandshakeBytesMax) {
    return Fail({StatusCode::kProtocol, StrCat("it sent ", handshake_bytes_,
                                               " bytes and had not finished the TLS handshake; the "
                                               "limit is ",
                                               kTlsHandshakeBytesMax)});
  }
  return {};
}

Status TlsStream::Handshake() {
  functions_.ERR_clear_error();
  const int result = functions_.SSL_do_handshake(ssl_);
  Drain();
  if (result != 1) return FailFrom(result);
  established_ = true;
  return Send(std::exchange(pending_, {}));
}

Status TlsStream::Read(std::string& plain) {
  char chunk[kReadChunk];
  std::size_t got = 0;
  while (!ended_) {
    functions_.ERR_clear_error();
    const int result = functions_.SSL_read_ex(ssl_, chunk, sizeof chunk, &got);
    if (result == 1) {
      plain.append(chunk, got);
      continue;
    }
    Drain();  // An alert, or the answer to an update of keys.
    return FailFrom(result);
  }
  return {};
}

// OK when more bytes of the network are all that is missing.
Status TlsStream::FailFrom(int result) {
  const int why = functions_.SSL_get_error(ssl_, result);
  if (why == SSL_ERROR_WANT_READ) return {};
  if (why == SSL_ERROR_ZERO_RETURN) {
    ended_ = true;
    return {};
  }
  Status described = DescribeTlsFailure(functions_, party_, functions_.SSL_get_verify_result(ssl_));
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
  }
  return {};
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

std::string TlsStream::TakeOutput() { return std::exchange(output_, {}); }

}  // namespace resilient::store
