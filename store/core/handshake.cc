#include "store/core/handshake.h"

#include <utility>
#include <variant>

#include "runtime/base/check.h"
#include "store/core/codec.h"

namespace resilient::store {
namespace {

constexpr std::string_view kClientLabel = "resilient store v1 client proof";
constexpr std::string_view kServerLabel = "resilient store v1 server proof";

Frame NonceFrame(std::string nonce) {
  Frame frame;
  frame.type = FrameType::kNonce;
  frame.body = std::move(nonce);
  return frame;
}

Frame ProofFrame(std::string proof) {
  Frame frame;
  frame.type = FrameType::kProof;
  frame.body = std::move(proof);
  return frame;
}

ServerHandshake::Step Refused(StatusCode code, std::string why) {
  return {std::nullopt, std::nullopt, Status(code, std::move(why))};
}

std::string NameOf(const std::string& job) {
  return job.empty() ? "the store as a whole" : "job " + job;
}

}  // namespace

std::string ProofText(Side side, std::string_view client_nonce, std::string_view server_nonce,
                      std::string_view hello) {
  std::string text(side == Side::kClient ? kClientLabel : kServerLabel);
  text.push_back('\0');
  text.append(client_nonce).append(server_nonce).append(hello);
  return text;
}

// ---- Server ----

ServerHandshake::Step ServerHandshake::OnFrame(Frame frame, const TokenSet* tokens) {
  RESILIENT_CHECK(!admitted());
  switch (state_) {
    case State::kBegin:
      return OnBegin(std::move(frame), tokens);
    case State::kHello:
      return OnHello(std::move(frame));
    case State::kProof:
      return OnProof(frame, *tokens);
    case State::kAdmitted:
      break;
  }
  return {};
}

ServerHandshake::Step ServerHandshake::OnBegin(Frame frame, const TokenSet* tokens) {
  const bool nonce = frame.type == FrameType::kNonce;
  if (tokens == nullptr) {
    if (nonce) {
      return Refused(StatusCode::kAuth,
                     "this store was started without a token and cannot prove who it is; start it "
                     "with --token-file, or unset RESILIENT_TOKEN_FILE for its clients");
    }
    state_ = State::kAdmitted;
    return {std::nullopt, std::move(frame), Status()};
  }
  if (!nonce) {
    NoteClaim(frame);
    return Refused(StatusCode::kAuth,
                   "this store asks for a token and none was offered; set RESILIENT_TOKEN_FILE (or "
                   "--token-file) to a file with the token that the store was started with");
  }
  if (frame.body.size() != kNonceBytes) {
    return Refused(StatusCode::kProtocol, "a nonce of " + std::to_string(frame.body.size()) +
                                              " bytes came, it has " + std::to_string(kNonceBytes));
  }
  client_nonce_ = std::move(frame.body);
  state_ = State::kHello;
  return {};
}

ServerHandshake::Step ServerHandshake::OnHello(Frame frame) {
  NoteClaim(frame);
  if (!claimed_) return Refused(StatusCode::kProtocol, "after the nonce comes Hello");
  hello_ = std::move(frame);
  state_ = State::kProof;
  return {NonceFrame(server_nonce_), std::nullopt, Status()};
}

ServerHandshake::Step ServerHandshake::OnProof(const Frame& frame, const TokenSet& tokens) {
  if (frame.type != FrameType::kProof) {
    return Refused(StatusCode::kAuth, "the proof of the token was expected, another message came");
  }
  const std::string text = ProofText(Side::kClient, client_nonce_, server_nonce_, hello_.body);
  // All are compared, so that the time does not tell which one fits.
  std::optional<TokenSet::Key> found;
  for (TokenSet::Key& key : tokens.Opening(claimed_->job)) {
    const bool fits = SameBytes(HmacSha256(key.token, text), frame.body);
    if (fits && (!found || found->confined)) found = std::move(key);
  }
  if (!found) {
    return Refused(StatusCode::kAuth,
                   "wrong token: it does not open " + NameOf(claimed_->job) +
                       "; compare the file of RESILIENT_TOKEN_FILE (or --token-file) with the one "
                       "that the store was started with");
  }
  confined_ = found->confined;
  state_ = State::kAdmitted;
  const std::string proof =
      HmacSha256(found->token, ProofText(Side::kServer, client_nonce_, server_nonce_, hello_.body));
  return {ProofFrame(proof), std::move(hello_), Status()};
}

void ServerHandshake::NoteClaim(const Frame& frame) {
  if (frame.type != FrameType::kRequest) return;
  const Result<Request> request = DecodeRequest(frame);
  if (!request.ok()) return;
  if (const Hello* hello = std::get_if<Hello>(&request->op)) claimed_ = *hello;
}

// ---- Client ----

std::string ClientHandshake::Begin(const Frame& hello) {
  hello_ = hello.body;
  return EncodeFrame(NonceFrame(client_nonce_)) + EncodeFrame(hello);
}

bool ClientHandshake::Owns(const Frame& frame) {
  return frame.type == FrameType::kNonce || frame.type == FrameType::kProof;
}

Result<std::optional<Frame>> ClientHandshake::OnFrame(const Frame& frame) {
  RESILIENT_CHECK(Owns(frame));
  if (frame.type == FrameType::kNonce) {
    if (!server_nonce_.empty() || frame.body.size() != kNonceBytes) {
      return Status(StatusCode::kProtocol, "it sent a nonce that the handshake has no place for");
    }
    server_nonce_ = frame.body;
    return std::optional<Frame>(ProofFrame(
        HmacSha256(token_, ProofText(Side::kClient, client_nonce_, server_nonce_, hello_))));
  }
  const bool right =
      !server_nonce_.empty() &&
      SameBytes(HmacSha256(token_, ProofText(Side::kServer, client_nonce_, server_nonce_, hello_)),
                frame.body);
  if (!right) {
    return Status(StatusCode::kAuth,
                  "it could not prove that it knows the token: another program may have taken the "
                  "address of the store");
  }
  proven_ = true;
  return std::optional<Frame>();
}

}  // namespace resilient::store
