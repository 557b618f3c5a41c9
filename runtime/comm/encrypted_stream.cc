#include "runtime/comm/encrypted_stream.h"

#include <cerrno>
#include <string_view>
#include <utility>

#include "runtime/base/log.h"

namespace resilient {
namespace {

// Encrypted ahead of the kernel: it shall find it in the cache.
constexpr std::size_t kEncryptAhead = 128u << 10;

constexpr char kNotBegun[] = "its encryption could not begin (RESILIENT_LINK_TLS)";
constexpr char kChanged[] =
    "its encrypted bytes were damaged, or changed by somebody, on the way (RESILIENT_LINK_TLS)";

constexpr IoResult Broken(const char* what) {
  return {.state = IoResult::State::kBroken, .error = EBADMSG, .what = what};
}

std::string_view TextOf(const iovec& piece, std::size_t bytes) {
  return {static_cast<const char*>(piece.iov_base), bytes};
}

}  // namespace

EncryptedStream::EncryptedStream(std::unique_ptr<ByteStream> stream, std::unique_ptr<TlsStream> tls,
                                 Use use, std::shared_ptr<std::vector<std::byte>> scratch)
    : stream_(std::move(stream)), tls_(std::move(tls)), use_(use), scratch_(std::move(scratch)) {
  if (use_ == Use::kBothWays) static_cast<void>(tls_->Take({}));
}

short EncryptedStream::PollFor(const StreamEvents& wanted) const {
  StreamEvents below = wanted;
  below.room = holds_output();
  if (opening()) {
    below.bytes = true;
  } else {
    below.room |= wanted.room;
  }
  return stream_->PollFor(below);
}

StreamEvents EncryptedStream::OnReady(short revents) {
  StreamEvents ready = stream_->OnReady(revents);
  if (!opening() || !ready.any()) return ready;
  while (opening() && TakeSome().state == IoResult::State::kMoved) {
  }
  // Whether there is something to read, or to write what the answer of TLS is, shows there.
  ready.bytes = ready.room = true;
  return ready;
}

IoResult EncryptedStream::TakeSome() {
  if (broken_.state != IoResult::State::kBlocked) return broken_;
  const iovec space{scratch_->data(), scratch_->size()};
  const IoResult result = stream_->Read({&space, 1});
  if (result.state == IoResult::State::kBlocked) return result;
  if (result.state != IoResult::State::kMoved) return broken_ = result;
  const bool began = !opening();
  const Status taken = tls_->Take(TextOf(space, result.bytes));
  if (taken.ok()) return result;
  Break(taken, began ? kChanged : kNotBegun);
  return broken_;
}

void EncryptedStream::Break(const Status& why, const char* what) {
  RESILIENT_LOG(kInfo, "the encryption of a link ends: ", why.message());
  broken_ = Broken(what);
}

IoResult EncryptedStream::Decrypt(std::span<const iovec> into) {
  std::size_t moved = 0;
  for (const iovec& piece : into) {
    std::span<std::byte> space(static_cast<std::byte*>(piece.iov_base), piece.iov_len);
    while (!space.empty()) {
      std::size_t got = 0;
      const Status read = tls_->Read(space, got);
      if (!read.ok() && moved == 0) {
        if (broken_.state != IoResult::State::kBroken) Break(read, kChanged);
        return broken_;
      }
      if (got == 0) {
        if (moved > 0) return {.state = IoResult::State::kMoved, .bytes = moved};
        return {.state = tls_->ended() ? IoResult::State::kEnd : IoResult::State::kBlocked};
      }
      moved += got;
      space = space.subspan(got);
    }
  }
  return {.state = IoResult::State::kMoved, .bytes = moved};
}

IoResult EncryptedStream::Read(std::span<const iovec> into) {
  if (use_ == Use::kLastWords) return Discard();
  while (true) {
    const IoResult decrypted = Decrypt(into);
    if (decrypted.state != IoResult::State::kBlocked) return decrypted;
    const IoResult taken = TakeSome();
    if (taken.state != IoResult::State::kMoved) return taken;
  }
}

IoResult EncryptedStream::Discard() {
  const iovec space{scratch_->data(), scratch_->size()};
  while (true) {
    const IoResult result = stream_->Read({&space, 1});
    if (result.state != IoResult::State::kMoved) return result;
  }
}

IoResult EncryptedStream::Write(std::span<const iovec> from) {
  if (opening()) {
    static_cast<void>(Flush());
    return {.state = IoResult::State::kBlocked};
  }
  std::size_t moved = 0;
  for (const iovec& piece : from) {
    std::string_view text = TextOf(piece, piece.iov_len);
    while (!text.empty()) {
      if (tls_->output().size() >= kEncryptAhead) {
        const IoResult flushed = Flush();
        if (flushed.state == IoResult::State::kBroken && moved == 0) return flushed;
      }
      if (tls_->output().size() >= kEncryptAhead || moved >= kMoveBytes) {
        if (moved == 0) return {.state = IoResult::State::kBlocked};
        return {.state = IoResult::State::kMoved, .bytes = moved};
      }
      const std::string_view chunk = text.substr(0, kEncryptAhead);
      const Status sent = use_ == Use::kLastWords ? tls_->SendEarly(chunk) : tls_->Send(chunk);
      if (!sent.ok()) return Broken("its encryption has ended");
      moved += chunk.size();
      text.remove_prefix(chunk.size());
    }
  }
  static_cast<void>(Flush());  // An error of it shows when it is tried again.
  return {.state = IoResult::State::kMoved, .bytes = moved};
}

IoResult EncryptedStream::Flush() {
  std::size_t moved = 0;
  while (!tls_->output().empty()) {
    const std::string_view output = tls_->output();
    const iovec piece{const_cast<char*>(output.data()), output.size()};
    const IoResult result = stream_->Write({&piece, 1});
    if (result.state != IoResult::State::kMoved) return result;
    tls_->ConsumeOutput(result.bytes);
    moved += result.bytes;
  }
  if (std::exchange(end_is_held_, false)) stream_->ShutdownWrite();
  return {.state = IoResult::State::kMoved, .bytes = moved};
}

void EncryptedStream::ShutdownWrite() {
  tls_->End();
  end_is_held_ = true;
  static_cast<void>(Flush());
}

}  // namespace resilient
