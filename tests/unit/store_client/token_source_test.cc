// Goal: proofs are what docs/protocol.md says; the token a client presents is read from its file,
// again for each connection, and each has a nonce of its own. Method: known vectors; files in a
// temporary directory.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/file.h"
#include "store/client/credentials.h"
#include "store/client/token_source.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/hex.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Counting(char first) {
  std::string bytes;
  for (std::size_t i = 0; i < kNonceBytes; ++i) bytes += static_cast<char>(first + i);
  return bytes;
}

TEST(Proofs, AreThoseOfTheProtocolDocument) {
  const std::string token = "0123456789abcdef0123456789abcdef";
  const auto proof = [&](Side side) {
    const std::string text = ProofText(side, Counting(0), Counting(kNonceBytes), "hello");
    return Hex(HmacSha256(token, text));
  };
  EXPECT_EQ(proof(Side::kClient),
            "3231b30befad9917ebf1f159356e29a8e822a0333cfd4df5738f9df22cadf89e");
  EXPECT_EQ(proof(Side::kServer),
            "5dabdad2da358523aef2579d06680eb5da00ebf94403364bd424ca4b516f165b");
}

class TokenSourceTest : public ::testing::Test {
 protected:
  TokenSourceTest() : path_(::testing::TempDir() + "token." + std::to_string(::getpid())) {}
  ~TokenSourceTest() override { std::remove(path_.c_str()); }

  void Write(const std::string& text) { std::ofstream(path_) << text; }
  Status OpenStatus(const std::string& job) { return TokenSource::Open(path_, job).status(); }

  const std::string path_;
};

TEST_F(TokenSourceTest, NoPath_IsNoToken) {
  const auto source = TokenSource::Open("", "train");
  ASSERT_TRUE(source.ok());
  EXPECT_EQ(*source, nullptr);
}

TEST_F(TokenSourceTest, UnusableFile_IsASettingErrorThatNamesIt) {
  EXPECT_EQ(OpenStatus("train").code(), StatusCode::kSetting);
  EXPECT_THAT(OpenStatus("train").message(), HasSubstr(path_));
  EXPECT_THAT(OpenStatus("train").message(), HasSubstr("No such file"));
  Write("eval 0123456789abcdef\n");
  EXPECT_TRUE(OpenStatus("eval").ok());
  EXPECT_THAT(OpenStatus("train").message(), HasSubstr("no token for job train"));
  EXPECT_THAT(OpenStatus("").message(), HasSubstr("no token for all jobs"));
  Write(std::string(kTokenFileBytesMax + 1, 'x'));
  EXPECT_THAT(OpenStatus("train").message(), HasSubstr("larger than"));
  EXPECT_THAT(TokenSource::Open(::testing::TempDir(), "train").status().message(),
              HasSubstr("not a regular file"));
}

TEST_F(TokenSourceTest, ReplacedFile_CountsFromTheNextConnectionOn) {
  const auto server_proof = [](ClientHandshake& client, const std::string& token) {
    FrameSplitter splitter(kMaxFrameBody);
    Frame hello;
    hello.body = "hello";
    EXPECT_TRUE(splitter.Feed(EncodePreamble() + client.Begin(hello)).ok());
    const std::string client_nonce = splitter.TakeFrame().body;
    Frame nonce;
    nonce.type = FrameType::kNonce;
    nonce.body = Counting(0);
    const auto proof = client.OnFrame(nonce);
    EXPECT_TRUE(proof.ok());
    return (*proof)->body ==
           HmacSha256(token, ProofText(Side::kClient, client_nonce, nonce.body, "hello"));
  };
  Write("first-token-of-16-or-more");
  const auto source = TokenSource::Open(path_, "train");
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  ClientHandshake first = (*source)->Begin();
  EXPECT_NE(first.Begin(Frame()), (*source)->Begin().Begin(Frame()));
  EXPECT_TRUE(server_proof(first, "first-token-of-16-or-more"));
  Write("second-token-of-16-or-more");
  const auto reread = (*source)->Reread();
  ASSERT_TRUE(reread.ok()) << reread.status().ToString();
  ClientHandshake second = (*reread)->Begin();
  EXPECT_TRUE(server_proof(second, "second-token-of-16-or-more"));
  std::remove(path_.c_str());
  EXPECT_EQ((*reread)->Reread().status().code(), StatusCode::kSetting);
}

TEST_F(TokenSourceTest, Credentials_AreReadAgainForTheNextConnection) {
  const SystemClock clock;
  const Deadline patient = Deadline::After(clock.Now(), std::chrono::seconds(20));
  ConnectOptions options;
  options.token_file = path_;
  options.job = "train";
  Write("first-token-of-16-or-more");
  Result<Credentials> opened = Credentials::Open(options, {}, clock, patient);
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  const auto first = opened->tokens;
  FreshCredentials credentials(std::move(*opened));
  EXPECT_EQ(credentials.Latest(clock.Now()).tokens, first);

  credentials.Refresh(clock.Now());
  ASSERT_TRUE(AwaitReadable(credentials.fd(), {}, clock, patient).ok());
  const auto second = credentials.Latest(clock.Now()).tokens;
  EXPECT_NE(second, first);

  std::remove(path_.c_str());
  BeginToCaptureStderr();
  credentials.Refresh(clock.Now());
  ASSERT_TRUE(AwaitReadable(credentials.fd(), {}, clock, patient).ok());
  EXPECT_EQ(credentials.Latest(clock.Now()).tokens, second);
  EXPECT_THAT(TakeCapturedStderr(),
              AllOf(HasSubstr(path_), HasSubstr("going on with what was read before")));
}

TEST_F(TokenSourceTest, Credentials_WithoutFilesAreNotRead) {
  const SystemClock clock;
  const Result<Credentials> none =
      Credentials::Open({}, {}, clock, Deadline::After(clock.Now(), Duration::zero()));
  ASSERT_TRUE(none.ok());
  FreshCredentials credentials(*none);
  for (int i = 0; i < 2; ++i) {
    credentials.Refresh(clock.Now());
    EXPECT_FALSE(credentials.reading());
    EXPECT_EQ(credentials.fd(), -1);
  }
}

TEST_F(TokenSourceTest, ReadSmallFile_TellsWhetherOthersMayRead) {
  Write("text");
  ASSERT_EQ(::chmod(path_.c_str(), 0640), 0);
  EXPECT_FALSE(ReadSmallFile(path_, 16)->open_to_others);
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  EXPECT_TRUE(ReadSmallFile(path_, 16)->open_to_others);
  EXPECT_EQ(ReadSmallFile(path_, 16)->text, "text");
}

}  // namespace
}  // namespace resilient::store
