// Goal: both ends of the token handshake admit each other only with the same token, whatever the
// order and content of the frames; no token and no half of a proof can be used for anything else.
// Method: the two state machines against each other and against forged frames, with a digest of
// the test's own.
#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/core/codec.h"
#include "store/core/handshake.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

const std::string kToken(kTokenBytesMin, 'a');
const std::string kOther(kTokenBytesMin, 'b');

// Not a MAC, but of the right shape: it depends on every byte of key and text.
class TestCrypto final : public Crypto {
 public:
  std::string RandomBytes(std::size_t count) const override {
    return std::string(count, static_cast<char>(++random_));
  }
  std::string HmacSha256(std::string_view key, std::string_view text) const override {
    std::string digest;
    for (int i = 0; i < 4; ++i) {
      const std::string part = std::to_string(i) + std::string(key) + "|" + std::string(text);
      const std::size_t hash = std::hash<std::string>()(part);
      digest.append(reinterpret_cast<const char*>(&hash), sizeof hash);
    }
    return digest;
  }
  bool Equal(std::string_view left, std::string_view right) const override {
    ++compared_;
    return left == right;
  }
  int compared() const { return compared_; }

 private:
  mutable int random_ = 0;
  mutable int compared_ = 0;
};

Frame HelloFrame(const std::string& job) {
  Hello hello;
  hello.job = job;
  hello.session = "0123456789abcdef0123456789abcdef";
  hello.role = Role::kRequest;
  hello.process.host = "node7";
  return EncodeRequest(Request{.op = hello});
}

Frame OfType(FrameType type, std::string body) {
  Frame frame;
  frame.type = type;
  frame.body = std::move(body);
  return frame;
}

class Handshake : public ::testing::Test {
 protected:
  TokenSet Tokens(const std::string& text) { return *TokenSet::Parse(text, "tokens"); }

  // Runs both to their end; the server's last step.
  ServerHandshake::Step Meet(ServerHandshake& server, ClientHandshake& client,
                             const TokenSet& tokens, const Frame& hello) {
    FrameSplitter splitter(kMaxFrameBody);
    EXPECT_TRUE(splitter.Feed(EncodePreamble() + client.Begin(hello)).ok());
    ServerHandshake::Step step = server.OnFrame(splitter.TakeFrame(), &tokens, crypto_);
    EXPECT_TRUE(step.refused.ok() && !step.send && !step.hello);
    step = server.OnFrame(splitter.TakeFrame(), &tokens, crypto_);
    EXPECT_TRUE(step.refused.ok() && step.send && !step.hello);
    const Result<std::optional<Frame>> proof = client.OnFrame(*step.send);
    EXPECT_TRUE(proof.ok() && proof->has_value());
    EXPECT_FALSE(client.proven());
    return server.OnFrame(**proof, &tokens, crypto_);
  }

  TestCrypto crypto_;
};

TEST_F(Handshake, SameToken_AdmitsAndProvesBoth) {
  const TokenSet tokens = Tokens(kToken);
  ServerHandshake server;
  ClientHandshake client(crypto_, kToken);
  const Frame hello = HelloFrame("train");
  const ServerHandshake::Step last = Meet(server, client, tokens, hello);
  ASSERT_TRUE(last.refused.ok()) << last.refused.ToString();
  EXPECT_TRUE(server.admitted());
  EXPECT_FALSE(server.confined());
  ASSERT_TRUE(last.hello);
  EXPECT_EQ(*last.hello, hello);
  ASSERT_TRUE(last.send);
  EXPECT_TRUE(client.OnFrame(*last.send).ok());
  EXPECT_TRUE(client.proven());
  EXPECT_EQ(crypto_.compared(), 2) << "both proofs are compared in constant time";
}

TEST_F(Handshake, WrongToken_IsRefusedWithAdvice) {
  const TokenSet tokens = Tokens("* " + kToken + "\ntrain " + kToken);
  ServerHandshake server;
  ClientHandshake client(crypto_, kOther);
  const ServerHandshake::Step last = Meet(server, client, tokens, HelloFrame("train"));
  EXPECT_EQ(last.refused.code(), StatusCode::kAuth);
  EXPECT_THAT(last.refused.message(), HasSubstr("wrong token: it does not open job train"));
  EXPECT_THAT(last.refused.message(), HasSubstr("RESILIENT_TOKEN_FILE"));
  EXPECT_FALSE(server.admitted());
  EXPECT_FALSE(last.hello);
  EXPECT_FALSE(last.send);
  EXPECT_EQ(crypto_.compared(), 2) << "every token that opens the job is compared";
}

TEST_F(Handshake, TokenOfOneJob_OpensItAloneAndConfines) {
  const TokenSet tokens = Tokens("train " + kToken + "\neval " + kOther);
  ServerHandshake own;
  ClientHandshake first(crypto_, kToken);
  EXPECT_TRUE(Meet(own, first, tokens, HelloFrame("train")).refused.ok());
  EXPECT_TRUE(own.confined());
  for (const char* job : {"eval", "", "unknown"}) {
    ServerHandshake other;
    ClientHandshake client(crypto_, kToken);
    const ServerHandshake::Step last = Meet(other, client, tokens, HelloFrame(job));
    EXPECT_EQ(last.refused.code(), StatusCode::kAuth) << job;
    EXPECT_FALSE(other.admitted()) << job;
  }
}

TEST_F(Handshake, WithoutTokens_HelloPassesAndANonceIsRefused) {
  ServerHandshake open;
  const ServerHandshake::Step step = open.OnFrame(HelloFrame("train"), nullptr, crypto_);
  EXPECT_TRUE(step.refused.ok());
  EXPECT_TRUE(step.hello);
  EXPECT_TRUE(open.admitted());
  ServerHandshake asked;
  const ServerHandshake::Step refused =
      asked.OnFrame(OfType(FrameType::kNonce, std::string(kNonceBytes, 'n')), nullptr, crypto_);
  EXPECT_EQ(refused.refused.code(), StatusCode::kAuth);
  EXPECT_THAT(refused.refused.message(), HasSubstr("without a token"));
}

TEST_F(Handshake, HelloWithoutNonce_IsRefusedAndNamesTheClaimant) {
  const TokenSet tokens = Tokens(kToken);
  ServerHandshake server;
  const ServerHandshake::Step step = server.OnFrame(HelloFrame("train"), &tokens, crypto_);
  EXPECT_EQ(step.refused.code(), StatusCode::kAuth);
  EXPECT_THAT(step.refused.message(), HasSubstr("none was offered"));
  EXPECT_FALSE(step.hello);
  ASSERT_TRUE(server.claimed());
  EXPECT_EQ(server.claimed()->process.host, "node7");
}

TEST_F(Handshake, FramesOutOfPlace_AreRefused) {
  const TokenSet tokens = Tokens(kToken);
  const Frame nonce = OfType(FrameType::kNonce, std::string(kNonceBytes, 'n'));
  {
    ServerHandshake server;
    EXPECT_EQ(server.OnFrame(OfType(FrameType::kNonce, "short"), &tokens, crypto_).refused.code(),
              StatusCode::kProtocol);
  }
  const Frame set = EncodeRequest(Request{.op = SetOp{"key", "value"}});
  for (const Frame& second : {nonce, set, OfType(FrameType::kRequest, "\xff\xff"),
                              OfType(FrameType::kProof, std::string(kProofBytes, 'p'))}) {
    ServerHandshake server;
    EXPECT_TRUE(server.OnFrame(nonce, &tokens, crypto_).refused.ok());
    const ServerHandshake::Step step = server.OnFrame(second, &tokens, crypto_);
    EXPECT_EQ(step.refused.code(), StatusCode::kProtocol);
    EXPECT_FALSE(step.hello);
  }
  for (const Frame& third :
       {nonce, set, HelloFrame("train"), OfType(FrameType::kProof, std::string(kProofBytes, 'p')),
        OfType(FrameType::kProof, "")}) {
    ServerHandshake server;
    EXPECT_TRUE(server.OnFrame(nonce, &tokens, crypto_).refused.ok());
    EXPECT_TRUE(server.OnFrame(HelloFrame("train"), &tokens, crypto_).refused.ok());
    EXPECT_EQ(server.OnFrame(third, &tokens, crypto_).refused.code(), StatusCode::kAuth);
    EXPECT_FALSE(server.admitted());
  }
}

// A proof binds the Hello, both nonces and who gives it.
TEST_F(Handshake, ProofOfAnythingElse_IsRefused) {
  const TokenSet tokens = Tokens(kToken);
  const std::string client_nonce(kNonceBytes, 'n');
  const Frame hello = HelloFrame("train");
  const auto answer = [&](auto&& proof_of) {
    ServerHandshake server;
    EXPECT_TRUE(
        server.OnFrame(OfType(FrameType::kNonce, client_nonce), &tokens, crypto_).refused.ok());
    const std::string server_nonce = server.OnFrame(hello, &tokens, crypto_).send->body;
    const std::string proof = crypto_.HmacSha256(kToken, proof_of(server_nonce));
    return server.OnFrame(OfType(FrameType::kProof, proof), &tokens, crypto_).refused.code();
  };
  const auto right = [&](const std::string& nonce) {
    return ProofText(Side::kClient, client_nonce, nonce, hello.body);
  };
  EXPECT_EQ(answer(right), StatusCode::kOk);
  EXPECT_EQ(answer([&](const std::string& nonce) {
              return ProofText(Side::kServer, client_nonce, nonce, hello.body);
            }),
            StatusCode::kAuth);
  EXPECT_EQ(answer([&](const std::string& nonce) {
              return ProofText(Side::kClient, client_nonce, nonce, HelloFrame("other").body);
            }),
            StatusCode::kAuth);
  EXPECT_EQ(answer([&](const std::string&) {
              return ProofText(Side::kClient, client_nonce, std::string(kNonceBytes, 'o'),
                               hello.body);
            }),
            StatusCode::kAuth);
  EXPECT_EQ(answer([&](const std::string& nonce) {
              return ProofText(Side::kClient, std::string(kNonceBytes, 'o'), nonce, hello.body);
            }),
            StatusCode::kAuth);
}

TEST_F(Handshake, ServerThatDoesNotKnowTheToken_IsNotBelieved) {
  ClientHandshake client(crypto_, kToken);
  const std::string begin = client.Begin(HelloFrame("train"));
  EXPECT_EQ(begin.find(kToken), std::string::npos);
  // A proof before any nonce; a second nonce; the client's own proof sent back; garbage.
  EXPECT_EQ(
      client.OnFrame(OfType(FrameType::kProof, std::string(kProofBytes, 'p'))).status().code(),
      StatusCode::kAuth);
  EXPECT_EQ(client.OnFrame(OfType(FrameType::kNonce, "short")).status().code(),
            StatusCode::kProtocol);
  const Result<std::optional<Frame>> proof =
      client.OnFrame(OfType(FrameType::kNonce, std::string(kNonceBytes, 's')));
  ASSERT_TRUE(proof.ok() && proof->has_value());
  EXPECT_EQ(
      client.OnFrame(OfType(FrameType::kNonce, std::string(kNonceBytes, 't'))).status().code(),
      StatusCode::kProtocol);
  for (const std::string& forged : {(*proof)->body, std::string(kProofBytes, 'p'), std::string()}) {
    const Status status = client.OnFrame(OfType(FrameType::kProof, forged)).status();
    EXPECT_EQ(status.code(), StatusCode::kAuth);
    EXPECT_THAT(status.message(), HasSubstr("could not prove"));
  }
  EXPECT_FALSE(client.proven());
}

TEST_F(Handshake, EachConnection_HasNoncesOfItsOwn) {
  ClientHandshake first(crypto_, kToken);
  ClientHandshake second(crypto_, kToken);
  EXPECT_NE(first.Begin(HelloFrame("train")), second.Begin(HelloFrame("train")));
}

}  // namespace
}  // namespace resilient::store
