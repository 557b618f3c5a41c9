#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <resilient/status.h>

#include "runtime/base/hmac.h"
#include "runtime/net/frame.h"
#include "store/core/messages.h"
#include "store/core/tokens.h"

// How the two ends of a connection prove to each other that they know a token, without showing it:
//
//   client                                server
//   NONCE(client nonce), Hello    ->
//                                 <-      NONCE(server nonce)
//   PROOF(client)                 ->
//                                 <-      PROOF(server), then the answer to Hello
//
// A proof is the HMAC-SHA256, keyed with the token, of ProofText. docs/protocol.md has it exactly.
namespace resilient::store {

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kProofBytes = kHmacBytes;

// Which end proves itself: a proof of one is of no use as that of the other.
enum class Side { kClient, kServer };

// `hello`: the body of the Hello frame, so that nobody can change what it says.
std::string ProofText(Side side, std::string_view client_nonce, std::string_view server_nonce,
                      std::string_view hello);

// The server's end of one connection, up to the Hello that may be acted on. Owner: Access. Thread:
// caller-synchronised. Pure.
class ServerHandshake {
 public:
  struct Step {
    std::optional<Frame> send;
    std::optional<Frame> hello;  // Admitted: to be handled now.
    Status refused;              // Not OK: the peer is told, and its connection ends.
  };

  // `nonce`: kNonceBytes that nobody can guess; unused where no token is asked for.
  explicit ServerHandshake(std::string nonce) : server_nonce_(std::move(nonce)) {}

  // `tokens`: null when none is asked for. REQUIRES: not admitted, and not refused before.
  Step OnFrame(Frame frame, const TokenSet* tokens);

  bool admitted() const { return state_ == State::kAdmitted; }
  // Proved to know the token of its own job alone.
  bool confined() const { return confined_; }
  // What the peer says of itself; not proved while it is not admitted.
  const std::optional<Hello>& claimed() const { return claimed_; }

 private:
  enum class State { kBegin, kHello, kProof, kAdmitted };

  Step OnBegin(Frame frame, const TokenSet* tokens);
  Step OnHello(Frame frame);
  Step OnProof(const Frame& frame, const TokenSet& tokens);
  void NoteClaim(const Frame& frame);

  const std::string server_nonce_;
  State state_ = State::kBegin;
  std::string client_nonce_;
  Frame hello_;
  std::optional<Hello> claimed_;
  bool confined_ = false;
};

// The client's end of one connection. Owner: StoreLink. Thread: caller-synchronised. Pure.
class ClientHandshake {
 public:
  // `nonce`: kNonceBytes that nobody can guess.
  ClientHandshake(std::string token, std::string nonce)
      : token_(std::move(token)), client_nonce_(std::move(nonce)) {}

  // What goes out after the preamble.
  std::string Begin(const Frame& hello);

  // True for a frame that belongs to the handshake.
  static bool Owns(const Frame& frame);
  // The frame to answer with, if any; kAuth when the server does not know the token. REQUIRES:
  // Owns.
  Result<std::optional<Frame>> OnFrame(const Frame& frame);

  // The server has proved itself: its Welcome may be believed.
  bool proven() const { return proven_; }

 private:
  const std::string token_;
  const std::string client_nonce_;
  std::string server_nonce_;
  std::string hello_;
  bool proven_ = false;
};

}  // namespace resilient::store
