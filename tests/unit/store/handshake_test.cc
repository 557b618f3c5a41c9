// Goal: both ends of the token handshake admit each other only with the same token, whatever the
// order and content of the frames; no token and no half of a proof can be used for anything else.
// Method: the two state machines against each other and against forged frames.
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

std::string Nonce(char filled) { return std::string(kNonceBytes, filled); }

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
    ServerHandshake::Step step = server.OnFrame(splitter.TakeFrame(), &tokens);
    EXPECT_TRUE(step.refused.ok() && !step.send && !step.hello);
    step = server.OnFrame(splitter.TakeFrame(), &tokens);
    EXPECT_TRUE(step.refused.ok() && step.send && !step.hello);
    const Result<std::optional<Frame>> proof = client.OnFrame(*step.send);
    EXPECT_TRUE(proof.ok() && proof->has_value());
    EXPECT_FALSE(client.proven());
    return server.OnFrame(**proof, &tokens);
  }
};

TEST_F(Handshake, SameToken_AdmitsAndProvesBoth) {
  const TokenSet tokens = Tokens(kToken);
  ServerHandshake server(Nonce('s'));
  ClientHandshake client(kToken, Nonce('c'));
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
}

TEST_F(Handshake, WrongToken_IsRefusedWithAdvice) {
  const TokenSet tokens = Tokens("* " + kToken + "\ntrain " + kToken);
  ServerHandshake server(Nonce('s'));
  ClientHandshake client(kOther, Nonce('c'));
  const ServerHandshake::Step last = Meet(server, client, tokens, HelloFrame("train"));
  EXPECT_EQ(last.refused.code(), StatusCode::kAuth);
  EXPECT_THAT(last.refused.message(), HasSubstr("wrong token: it does not open job train"));
  EXPECT_THAT(last.refused.message(), HasSubstr("RESILIENT_TOKEN_FILE"));
  EXPECT_FALSE(server.admitted());
  EXPECT_FALSE(last.hello);
  EXPECT_FALSE(last.send);
}

TEST_F(Handshake, TokenOfOneJob_OpensItAloneAndConfines) {
  const TokenSet tokens = Tokens("train " + kToken + "\neval " + kOther);
  ServerHandshake own(Nonce('s'));
  ClientHandshake first(kToken, Nonce('c'));
  EXPECT_TRUE(Meet(own, first, tokens, HelloFrame("train")).refused.ok());
  EXPECT_TRUE(own.confined());
  for (const char* job : {"eval", "", "unknown"}) {
    ServerHandshake other(Nonce('s'));
    ClientHandshake client(kToken, Nonce('c'));
    const ServerHandshake::Step last = Meet(other, client, tokens, HelloFrame(job));
    EXPECT_EQ(last.refused.code(), StatusCode::kAuth) << job;
    EXPECT_FALSE(other.admitted()) << job;
  }
}

TEST_F(Handshake, WithoutTokens_HelloPassesAndANonceIsRefused) {
  ServerHandshake open(Nonce('s'));
  const ServerHandshake::Step step = open.OnFrame(HelloFrame("train"), nullptr);
  EXPECT_TRUE(step.refused.ok());
  EXPECT_TRUE(step.hello);
  EXPECT_TRUE(open.admitted());
  ServerHandshake asked(Nonce('s'));
  const ServerHandshake::Step refused =
      asked.OnFrame(OfType(FrameType::kNonce, std::string(kNonceBytes, 'n')), nullptr);
  EXPECT_EQ(refused.refused.code(), StatusCode::kAuth);
  EXPECT_THAT(refused.refused.message(), HasSubstr("without a token"));
}

TEST_F(Handshake, HelloWithoutNonce_IsRefusedAndNamesTheClaimant) {
  const TokenSet tokens = Tokens(kToken);
  ServerHandshake server(Nonce('s'));
  const ServerHandshake::Step step = server.OnFrame(HelloFrame("train"), &tokens);
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
    ServerHandshake server(Nonce('s'));
    EXPECT_EQ(server.OnFrame(OfType(FrameType::kNonce, "short"), &tokens).refused.code(),
              StatusCode::kProtocol);
  }
  const Frame set = EncodeRequest(Request{.op = SetOp{"key", "value"}});
  for (const Frame& second : {nonce, set, OfType(FrameType::kRequest, "\xff\xff"),
                              OfType(FrameType::kProof, std::string(kProofBytes, 'p'))}) {
    ServerHandshake server(Nonce('s'));
    EXPECT_TRUE(server.OnFrame(nonce, &tokens).refused.ok());
    const ServerHandshake::Step step = server.OnFrame(second, &tokens);
    EXPECT_EQ(step.refused.code(), StatusCode::kProtocol);
    EXPECT_FALSE(step.hello);
  }
  for (const Frame& third :
       {nonce, set, HelloFrame("train"), OfType(FrameType::kProof, std::string(kProofBytes, 'p')),
        OfType(FrameType::kProof, "")}) {
    ServerHandshake server(Nonce('s'));
    EXPECT_TRUE(server.OnFrame(nonce, &tokens).refused.ok());
    EXPECT_TRUE(server.OnFrame(HelloFrame("train"), &tokens).refused.ok());
    EXPECT_EQ(server.OnFrame(third, &tokens).refused.code(), StatusCode::kAuth);
    EXPECT_FALSE(server.admitted());
  }
}

// A proof binds the Hello, both nonces and who gives it.
TEST_F(Handshake, ProofOfAnythingElse_IsRefused) {
  const TokenSet tokens = Tokens(kToken);
  const std::string client_nonce(kNonceBytes, 'n');
  const Frame hello = HelloFrame("train");
  const auto answer = [&](auto&& proof_of) {
    ServerHandshake server(Nonce('s'));
    EXPECT_TRUE(server.OnFrame(OfType(FrameType::kNonce, client_nonce), &tokens).refused.ok());
    const std::string server_nonce = server.OnFrame(hello, &tokens).send->body;
    const std::string proof = HmacSha256(kToken, proof_of(server_nonce));
    return server.OnFrame(OfType(FrameType::kProof, proof), &tokens).refused.code();
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
  ClientHandshake client(kToken, Nonce('c'));
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

}  // namespace
}  // namespace resilient::store
