#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "runtime/comm/byte_stream.h"
#include "runtime/tls/stream.h"

namespace resilient {

// A stream whose bytes go over another one as TLS 1.3. Until the handshake is over nothing can be
// written, and nothing is there to read but what the peer has sent early. A stream of which the
// peer's end came without the end of its TLS has ended, too: so it is where the peer was killed,
// and whoever cuts a connection off can do no more than that, as a message that is not whole and a
// missing goodbye show.
// Owner: a MessageLink. Thread: loop-confined.
class EncryptedStream final : public ByteStream {
 public:
  enum class Use {
    kBothWays,
    // To a peer that may answer only after this process has gone: all goes out with the first
    // bytes, up to kTlsEarlyBytesMax, and nothing is read but the end.
    kLastWords
  };
  // `scratch`: memory for one read, which other streams of the loop may use between two calls.
  EncryptedStream(std::unique_ptr<ByteStream> stream, std::unique_ptr<TlsStream> tls, Use use,
                  std::shared_ptr<std::vector<std::byte>> scratch);

  int fd() const override { return stream_->fd(); }
  short PollFor(const StreamEvents& wanted) const override;
  StreamEvents OnReady(short revents) override;
  IoResult Read(std::span<const iovec> into) override;
  IoResult Write(std::span<const iovec> from) override;
  bool opening() const override { return use_ == Use::kBothWays && !tls_->established(); }
  bool holds_output() const override { return !tls_->output().empty() || end_is_held_; }
  IoResult Flush() override;
  void ShutdownWrite() override;
  bool Attach(int index, std::unique_ptr<ByteStream> socket) override {
    return stream_->Attach(index, std::move(socket));
  }

 private:
  // One piece of the network's bytes to TLS.
  IoResult TakeSome();
  IoResult Decrypt(std::span<const iovec> into);
  IoResult Discard();
  void Break(const Status& why, const char* what);

  const std::unique_ptr<ByteStream> stream_;
  const std::unique_ptr<TlsStream> tls_;
  const Use use_;
  const std::shared_ptr<std::vector<std::byte>> scratch_;
  bool end_is_held_ = false;  // ShutdownWrite, once all is out.
  IoResult broken_;           // Unless it is kBlocked: what every Read says.
};

}  // namespace resilient
