#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <resilient/status.h>

#include "runtime/comm/byte_stream.h"
#include "runtime/comm/checksum.h"
#include "runtime/comm/wire.h"

namespace resilient {

class MessageLink;

// Where the payload of one message goes. The link asks for space, fills some of it and commits.
// Thread: loop-confined.
class PayloadSink {
 public:
  virtual ~PayloadSink() = default;
  // Where the next bytes belong. Empty: there is no room now; call MessageLink::Resume when there
  // is.
  virtual std::span<std::byte> Space() = 0;
  virtual void Commit(std::size_t bytes) = 0;
};

// A payload that goes to one run of memory.
class FlatSink final : public PayloadSink {
 public:
  FlatSink() = default;
  explicit FlatSink(std::span<std::byte> memory) : left_(memory) {}
  std::span<std::byte> Space() override { return left_; }
  void Commit(std::size_t bytes) override { left_ = left_.subspan(bytes); }

 private:
  std::span<std::byte> left_;
};

// The answer to a header.
struct HeaderVerdict {
  enum class Action {
    kTake,    // Read the payload into `sink`; a null sink drops it.
    kHold,    // Not now: keep the header and read nothing more until Resume.
    kInvalid  // Not allowed here: the link ends as if it had broken.
  };
  Action action = Action::kTake;
  PayloadSink* sink = nullptr;
};

// Told by a MessageLink, on the loop, from within Flush and Read. May kill the link.
class LinkListener {
 public:
  virtual ~LinkListener() = default;
  virtual HeaderVerdict OnHeader(MessageLink& link, const MessageHeader& header) = 0;
  // The payload of `header` is complete.
  virtual void OnMessage(MessageLink& link, const MessageHeader& header) = 0;
  // In place of OnMessage: what came is not what was sent. Its sink, if it had one, has it.
  virtual void OnDamaged(MessageLink& link, const MessageHeader& header) = 0;
  // A message sent with this token (not 0) is wholly with the stream: its memory is free.
  virtual void OnSent(MessageLink& link, std::uint64_t token) = 0;
  // Nothing more will be received. `why` is OK when the stream ended between two messages.
  virtual void OnEnd(MessageLink& link, const Status& why) = 0;
  // The stream has ended behind messages that wait to be taken; OnEnd follows when they are. Its
  // last message is `goodbye`, nullopt when it is none, or part of the stream has not come.
  virtual void OnEndAhead(MessageLink& link, const std::optional<MessageHeader>& goodbye) = 0;
};

// Messages over a byte stream. Sending: a queue that borrows payloads. Receiving: header first, the
// listener then says where the payload goes, or holds the header; that is the back-pressure. A
// sender that has checksums puts one behind each payload, summed up piece by piece shortly before
// it leaves; who receives it follows.
// Owner: a group. Thread: loop-confined. Lifetime: the listener outlives it.
class MessageLink {
 public:
  MessageLink(std::unique_ptr<ByteStream> stream, LinkListener& listener, int peer, Lane lane,
              bool checksums);

  int peer() const { return peer_; }
  Lane lane() const { return lane_; }
  // Nothing more will be received; what was sent may still be on its way.
  bool ended() const { return read_ended_; }
  bool dead() const { return stream_ == nullptr; }
  // What is sent waits for the peer to answer, which it has not yet.
  bool opening() const { return !dead() && !read_ended_ && stream_->opening(); }

  // Queues a message; `payload` is borrowed until OnSent(token), DetachSends or Kill.
  void Send(const MessageHeader& header, std::span<const std::byte> payload, std::uint64_t token);
  // Queues a message that owns its payload.
  void SendOwned(const MessageHeader& header, std::string payload);

  // Forgets all borrowed payloads: what has begun to leave goes on from a copy, so that the peer
  // still gets whole messages; the rest is dropped. No OnSent follows. Returns how many were
  // dropped.
  std::size_t DetachSends();
  // Drops the rest of the payload that is being received.
  void DetachReceive();
  // After the last queued message the peer sees the end of the stream.
  void FinishSending();
  bool finishing() const { return finishing_; }
  bool finished_sending() const { return finished_; }

  // Offers a held header, or a full sink, again at the next Read.
  void Resume();
  // Whether Read would do something without new bytes from the stream.
  bool wants_read() const { return resumed_ && !dead() && !read_ended_; }
  // Whether Flush would try to write.
  bool wants_flush() const { return !dead() && !write_blocked_ && HasOutput(); }

  // Writes what the stream takes. Reads until the stream has no more, a header is held, or the
  // turn's budget is spent, so that one peer cannot starve the others.
  void Flush();
  void Read();

  // Whether bytes have gone either way since the last call.
  bool TakeMoved() { return std::exchange(moved_, false); }

  // What to poll for; 0 when there is nothing to wait for.
  short Interest() const;
  int fd() const { return stream_->fd(); }
  void OnReady(short revents);
  // One more socket of a link over several.
  bool Attach(int index, std::unique_ptr<ByteStream> socket) {
    return !dead() && stream_->Attach(index, std::move(socket));
  }

  // Closes the stream at once. No callback follows.
  void Kill();

 private:
  struct Output {
    std::string head;   // Header and call site.
    std::string owned;  // The payload where it is not borrowed.
    std::span<const std::byte> payload;
    bool checksum = false;
    bool summing = false;    // The head has been.
    std::size_t summed = 0;  // Of the payload.
    std::string trailer;     // The checksum, once all is summed.
    std::size_t sent = 0;    // Of head, payload and trailer together.
    std::uint64_t token = 0;

    // Forgets what has left, and has a copy of its own of the rest of the payload.
    void KeepRest();
  };
  enum class Stage { kHeader, kCallSite, kHeld, kPayload, kTrailer };

  bool HasOutput() const {
    const bool held = !write_broken_ && stream_->holds_output();
    return !outbox_.empty() || held || (finishing_ && !finished_);
  }
  // As much of the outbox as one write takes.
  IoResult WriteSome();
  Output& Queue(const MessageHeader& header);
  // How much of its payload may leave now.
  std::size_t SumUp(Output& out);
  void AfterWrite(std::size_t bytes);
  // Handles what has been read. False when no more can be handled for now.
  bool Step();
  bool StepHeader();
  bool StepPayload();
  bool StepTrailer();
  // `bytes` of the payload are where the sink wanted them, if there is one.
  void Commit(std::span<const std::byte> bytes);
  bool Offer();
  void PayloadDone();
  void EndReading(const Status& why);
  // Reads all that is left into the staging buffer and looks at its end.
  void LookAhead();
  std::string_view Staged() const;
  void Consume(std::size_t bytes) { staged_begin_ += bytes; }

  LinkListener& listener_;
  const int peer_;
  const Lane lane_;
  const bool checksums_;
  std::unique_ptr<ByteStream> stream_;

  std::deque<Output> outbox_;
  bool write_blocked_ = false;
  bool write_broken_ = false;
  bool finishing_ = false;
  bool finished_ = false;
  RunningChecksum sent_sum_;  // Of the first message that is not summed to its end.

  std::vector<std::byte> staging_;  // Bytes read and not yet handled: [begin, end).
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  Stage stage_ = Stage::kHeader;
  MessageHeader header_;
  PayloadSink* sink_ = nullptr;
  std::uint64_t payload_left_ = 0;
  RunningChecksum received_sum_;
  bool stalled_ = false;  // A held header or a full sink.
  bool resumed_ = false;
  bool looked_ahead_ = false;
  bool read_ended_ = false;
  bool moved_ = false;
};

}  // namespace resilient
