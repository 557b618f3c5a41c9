#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/net/frame.h"
#include "runtime/tls/stream.h"
#include "store/core/server_core.h"
#include "store/server/output_queue.h"
#include "store/server/uv_handle.h"
#include "store/tcpstore/client.h"

namespace resilient::store {

// Bytes that may wait for one peer until nothing more is read from it, so that its own requests
// cannot fill the memory. What others push to it is bounded by ServerLimits::output_bytes.
inline constexpr std::size_t kOutputSoftLimit = 8u << 20;

// The bytes of one peer: TLS where the server has it, preamble, frames in, bounded queue of frames
// out. It knows nothing of what the frames mean. A peer whose first byte is that of torch's
// TCPStore gets a tcpstore::Client instead, where that is allowed: queries in, bytes out, the same
// bounds. Owner: Server. Thread: the loop's. Lifetime: Server destroys it in a turn of the loop
// after Close, never from inside one of its calls.
class Connection {
 public:
  // Called from the loop, never from inside a call of Connection's but GoOn. After Close: no more.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void OnFrames(Connection& connection) = 0;  // HasInput, or room for answers again.
    // So much has come of a request that is not whole; 0: it is. Small parts are not told of.
    virtual void OnPartialInput(Connection& connection, std::size_t bytes) = 0;
    // Bytes of a TLS handshake have come: GoOn takes them, once there is time for what they cost.
    // Nothing more is read from this peer meanwhile.
    virtual void OnHandshake(Connection& connection) = 0;
    // The peer is gone (ok: it closed), what it sends is not our protocol (kProtocol), or one side
    // refused the other's certificate (kAuth).
    virtual void OnEnd(Connection& connection, const Status& why) = 0;
  };

  // `tls`: null when the server has none.
  Connection(ConnectionId id, UvLoop& loop, Owner& owner, Instant accepted,
             std::unique_ptr<TlsStream> tls);

  // False when the peer went away before it was accepted. Sends the preamble, over TLS when the
  // peer has begun it.
  bool AcceptFrom(UvStream& listener);

  // The peer may be a TCPStore client. Before the first Flush.
  void RecogniseTcpStore();
  // Null: it is none, as far as is known.
  tcpstore::Client* tcpstore() { return tcpstore_.get(); }

  // After OnHandshake. Nothing to do when it is ending by now.
  void GoOn();

  // A frame, or a query of a TCPStore client.
  bool HasInput() const {
    return tcpstore_ != nullptr ? tcpstore_->HasQuery() : splitter_.HasFrame();
  }
  Frame TakeFrame() { return splitter_.TakeFrame(); }
  // Input is handled, and bytes read, only while this holds.
  bool WantsInput() const { return !ending_ && QueuedBytes() < kOutputSoftLimit; }

  bool HasToDo() const { return !closed() && WantsInput() && HasInput(); }

  // Queued; goes out with the next Flush.
  void Send(Frame frame);
  void Send(ServerMessage&& message);  // To a TCPStore client the bytes of its reply.
  // Hands on what the kernel has room for; the rest follows by itself. What is for a peer that has
  // closed is thrown away. False when the connection is broken.
  bool Flush();
  // What the peer has not been given, and the memory of it that falls to this peer.
  std::size_t QueuedBytes() const;
  std::size_t QueuedMemory() const;
  // That the kernel has taken since the connection was made.
  std::uint64_t WrittenBytes() const;

  // Reads on, or stops: nothing is read while input waits to be handled.
  void UpdateReading();

  // Bytes given to Send since the last Flush.
  std::size_t UnflushedBytes() const { return unflushed_; }

  // Input is thrown away from now on; what is queued still goes out, then the peer sees an end. The
  // socket lives until the peer closes too (a close with unread input would make the kernel throw
  // away what the peer has not read yet) or the owner loses patience.
  void BeginEnd(Instant now);
  void Close() { socket_.Close(); }
  bool closed() const { return socket_.closed(); }

  // Hello was accepted: larger frames are welcome.
  void SetHello(const Hello& hello);
  // A TCPStore client has said VALIDATE.
  void SetTcpStore();
  bool greeted() const { return greeted_; }
  // Bytes have come from the peer.
  bool has_spoken() const { return has_spoken_; }
  // False too where the server has TLS and the peer did not begin with it.
  bool encrypted() const { return tls_ != nullptr; }
  Role role() const { return role_; }
  const std::string& job() const { return job_; }  // REQUIRES: greeted().

  // The Welcome has gone out: from now on messages without order may overtake others.
  void SetWelcomed() { welcomed_ = true; }
  bool welcomed() const { return welcomed_; }

  ConnectionId id() const { return id_; }
  int descriptor() const { return socket_.Descriptor(); }  // -1: closed.
  Instant accepted() const { return accepted_; }
  bool ending() const { return ending_; }
  Instant ending_since() const { return ending_since_; }  // REQUIRES: ending().
  // "127.0.0.1:4711", after Hello "host a, pid 7 (127.0.0.1:4711)".
  const std::string& name() const { return name_; }
  // A line of the log about the peer, for machines and for people.
  LogRecord Record(std::string_view event, std::string text) const;

  // The owner's mark: it has something to be flushed.
  bool touched() const { return touched_; }
  void set_touched(bool touched) { touched_ = touched; }

  // How many requests the loop's turn number `turn` has already taken from this connection.
  int& TakenInTurn(std::uint64_t turn);

 private:
  void OnRead(std::string_view bytes);
  void Process(std::string_view bytes);
  void OnDecrypted(std::string_view bytes);
  void OnUnwritable();
  // Shows how the peer speaks. False when the connection is broken.
  bool Recognise(char first);
  void Take(std::string_view bytes);
  // What has come is split, and its owner has been told.
  void Split(std::string_view bytes);
  void TellOfPartialInput();
  // Nothing of ours can go out yet: it is open how the peer speaks, or TLS is being agreed on.
  bool Opening() const { return !spoken_ || (tls_ != nullptr && !tls_->established()); }
  void OnWritten();
  // False when the connection is broken.
  bool Write(std::string& bytes);
  bool WriteShared();
  std::size_t StepBytes() const {
    return tls_ == nullptr ? OutputQueue::kPlainStepBytes : OutputQueue::kStepBytes;
  }
  bool WriteTls();
  void WriteToSocket(std::string& bytes);
  void GiveUpWriting();
  bool EndIfWritten();

  const ConnectionId id_;
  const Instant accepted_;
  Owner& owner_;
  UvStream socket_;
  std::unique_ptr<TlsStream> tls_;  // Null: plain.
  std::string handshake_;           // For GoOn.
  bool spoken_ = false;             // The peer has shown how it speaks, or it need not.
  bool may_be_tcpstore_ = false;
  bool has_spoken_ = false;
  std::unique_ptr<tcpstore::Client> tcpstore_;
  FrameSplitter splitter_;
  bool partial_told_ = false;
  OutputQueue out_;
  std::size_t unflushed_ = 0;
  std::uint64_t flushed_ = 0;  // Bytes given to the socket.
  std::string name_;
  std::string peer_;  // "127.0.0.1:4711".
  // Of Hello.
  std::string job_;
  std::string host_;
  std::int64_t pid_ = 0;
  bool reading_ = false;
  bool greeted_ = false;
  bool welcomed_ = false;
  Role role_ = Role::kRequest;
  bool unwritable_ = false;  // The peer has closed its end. What it has sent is still read.
  bool ending_ = false;
  bool tls_ended_ = false;
  bool touched_ = false;
  Instant ending_since_{};
  std::uint64_t turn_ = 0;
  int taken_ = 0;
};

}  // namespace resilient::store
