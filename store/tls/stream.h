#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include <resilient/status.h>

#include "store/tls/failure.h"

struct bio_st;
struct ssl_st;

namespace resilient::store {

// Of the peer, until the handshake is over: room for a chain of several certificates.
inline constexpr std::size_t kTlsHandshakeBytesMax = 16u << 10;

// One end of a connection over TLS 1.3, without a socket: takes what came from the network, gives
// what is to be sent. Made by TlsContext. Owner: Connection or StoreLink.
// Thread: caller-synchronised. Pure.
class TlsStream {
 public:
  // Takes over `ssl`, and the two memory BIOs that belong to it.
  TlsStream(std::shared_ptr<const TlsFunctions> functions, ssl_st* ssl, bio_st* in, bio_st* out,
            TlsParty party);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // Takes bytes of the network (none: to begin) and appends what they say to `plain`. An error says
  // of the peer what is wrong, stays, and has left an alert for it in the output.
  Status Receive(std::string_view bytes, std::string& plain);

  // Encrypts it; until the handshake is over it is kept. Few large ones are cheaper than many.
  Status Send(std::string_view plain);

  // Tells the peer that nothing more comes.
  void End();

  // What is to be sent now.
  std::string TakeOutput();

  // The peer has proved itself, and what is sent goes out. (A server may still refuse a client's
  // certificate after the client has come so far.)
  bool established() const { return established_; }
  // The peer has said that nothing more comes.
  bool ended() const { return ended_; }

 private:
  Status Handshake();
  Status Read(std::string& plain);
  Status Fail(Status why);
  Status FailFrom(int result);
  void Drain();

  const std::shared_ptr<const TlsFunctions> table_;
  const TlsFunctions& functions_;
  const TlsParty party_;
  ssl_st* const ssl_;
  bio_st* const in_;
  bio_st* const out_;
  std::string opening_;  // The first bytes of the peer, until it is clear that they are TLS.
  std::string pending_;  // To be encrypted after the handshake.
  std::string output_;
  std::size_t handshake_bytes_ = 0;
  bool spoken_ = false;
  bool established_ = false;
  bool ended_ = false;
  Status error_;
};

}  // namespace resilient::store
