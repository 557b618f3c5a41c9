#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <resilient/status.h>

#include "runtime/tls/failure.h"

struct bio_st;
struct ssl_st;

namespace resilient {

// Of the peer, until the handshake is over: room for a chain of several certificates.
inline constexpr std::size_t kTlsHandshakeBytesMax = 16u << 10;
// What SendEarly takes in sum.
inline constexpr std::size_t kTlsEarlyBytesMax = 16u << 10;

// What one stream is, beside its SSL. Thread: value type.
struct TlsOptions {
  TlsParty party;
  std::string plain_magic = {};  // A peer without TLS begins so; empty: it is not known.
  bool takes_early = false;      // What a client has sent early is received.
  // After so many bytes the key is changed that they are encrypted with; 0: it stays.
  std::uint64_t bytes_of_one_key = 0;
};

// One end of a connection over TLS 1.3, without a socket: takes what came from the network, gives
// what is to be sent. Made by a context (of certificates, of a shared key). Owner: Connection or
// StoreLink, or an EncryptedStream. Thread: caller-synchronised. Pure.
class TlsStream {
 public:
  // Takes over `ssl`, which has its context and its role.
  TlsStream(std::shared_ptr<const TlsFunctions> functions, ssl_st* ssl, TlsOptions options);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // Takes bytes of the network (none: to begin) and appends what they say to `plain`. An error says
  // of the peer what is wrong, stays, and has left an alert for it in the output.
  Status Receive(std::string_view bytes, std::string& plain);

  // Receive in two steps, so that what comes goes straight to its place.
  Status Take(std::string_view bytes);
  // `got`: bytes of `into` that were filled. 0 for `into` that is not empty: more bytes of the
  // network are missing.
  Status Read(std::span<std::byte> into, std::size_t& got);

  // Encrypts it; until the handshake is over it is kept. Few large ones are cheaper than many.
  Status Send(std::string_view plain);

  // Sends with the first bytes, without an answer of the peer: all of it before anything else is
  // sent, and nothing is received afterwards. The context keeps it from being replayed. kInternal
  // where it is more than kTlsEarlyBytesMax. REQUIRES: a client whose context has keys that are
  // shared.
  Status SendEarly(std::string_view plain);

  // Tells the peer that nothing more comes.
  void End();

  // What is to be sent now: as a whole, or from its front.
  std::string TakeOutput();
  std::string_view output() const { return std::string_view(output_).substr(output_begin_); }
  void ConsumeOutput(std::size_t bytes);

  // The peer has proved itself, and what is sent goes out. (A server may still refuse a client's
  // certificate after the client has come so far.)
  bool established() const { return established_; }
  // The peer has said that nothing more comes.
  bool ended() const { return ended_; }

 private:
  Status CheckOpening(std::string_view& bytes, std::string& opening);
  Status Handshake();
  Status TakeEarly();
  Status Fail(Status why);
  Status FailFrom(int result);
  void Drain();

  const std::shared_ptr<const TlsFunctions> table_;
  const TlsFunctions& functions_;
  const TlsOptions options_;
  ssl_st* const ssl_;
  bio_st* const in_;  // Of ssl_, as is out_.
  bio_st* const out_;
  std::string opening_;  // The first bytes of the peer, until it is clear that they are TLS.
  std::string early_;    // What the peer has sent early, and was not read yet.
  std::string pending_;  // To be encrypted after the handshake.
  std::string output_;
  std::size_t output_begin_ = 0;
  std::size_t handshake_bytes_ = 0;
  std::uint64_t sent_with_key_ = 0;
  bool spoken_ = false;
  bool taking_early_ = false;
  bool established_ = false;
  bool ended_ = false;
  Status error_;
};

}  // namespace resilient
