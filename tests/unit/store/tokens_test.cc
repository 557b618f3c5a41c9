// Goal: a token file says what it says, a wrong one is refused with its line and without a token in
// the text, and each job is opened by its own tokens and those for every job. Method: Parse of
// texts.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/core/tokens.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kFirst(kTokenBytesMin, 'a');
const std::string kSecond(kTokenBytesMin, 'b');
const std::string kThird(kTokenBytesMin, 'c');

TokenSet Parsed(const std::string& text) {
  const Result<TokenSet> set = TokenSet::Parse(text, "/secret/token");
  EXPECT_TRUE(set.ok()) << set.status().ToString();
  return set.ok() ? *set : TokenSet();
}

TEST(TokenSet, OneLine_OpensEveryJobAndTheStore) {
  for (const std::string& text : {kFirst, kFirst + "\n", "\n# mine\n  " + kFirst + " \r\n\n"}) {
    const TokenSet set = Parsed(text);
    EXPECT_EQ(set.size(), 1u);
    for (const char* job : {"train", ""}) {
      const auto keys = set.Opening(job);
      ASSERT_EQ(keys.size(), 1u) << job;
      EXPECT_EQ(keys[0].token, kFirst);
      EXPECT_FALSE(keys[0].confined);
      ASSERT_NE(set.Presented(job), nullptr);
      EXPECT_EQ(*set.Presented(job), kFirst);
    }
  }
}

TEST(TokenSet, LinesOfJobs_OpenTheirOwn) {
  const TokenSet set = Parsed("train " + kFirst + "\nmy other\tjob " + kSecond + "\n* " + kThird);
  auto keys = set.Opening("train");
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].token, kFirst);
  EXPECT_TRUE(keys[0].confined);
  EXPECT_EQ(keys[1].token, kThird);
  EXPECT_FALSE(keys[1].confined);
  EXPECT_EQ(*set.Presented("train"), kFirst);
  EXPECT_EQ(*set.Presented("my other\tjob"), kSecond);
  EXPECT_EQ(*set.Presented("unknown"), kThird);
  EXPECT_EQ(*set.Presented(""), kThird);
  keys = set.Opening("");
  ASSERT_EQ(keys.size(), 1u);
  EXPECT_EQ(keys[0].token, kThird);
}

TEST(TokenSet, ATokenOfAnotherJob_OpensNothing) {
  const TokenSet set = Parsed("train " + kFirst);
  EXPECT_TRUE(set.Opening("eval").empty());
  EXPECT_TRUE(set.Opening("").empty());
  EXPECT_EQ(set.Presented("eval"), nullptr);
  EXPECT_EQ(set.Presented(""), nullptr);
}

TEST(TokenSet, SeveralLinesOfAJob_AllOpenAndTheFirstIsPresented) {
  const TokenSet set = Parsed("train " + kSecond + "\ntrain " + kFirst);
  EXPECT_EQ(set.Opening("train").size(), 2u);
  EXPECT_EQ(*set.Presented("train"), kSecond);
}

TEST(TokenSet, BadFile_IsRefusedWithLineAndWithoutToken) {
  struct Case {
    std::string text;
    const char* mention;
  };
  const std::string longest(kTokenBytesMax + 1, 'x');
  const Case kCases[] = {
      {"", "no token"},
      {"# only words\n\n", "no token"},
      {"secret", "line 1: a token needs at least 16"},
      {kFirst + "\ntrain secret\n", "line 2: a token needs at least 16"},
      {longest, "line 1: a token has at most"},
      {"secret-sécret-secret", "line 1: a token consists of printable"},
      {std::string("secret\0secretsecret", 19), "line 1: a token consists of printable"},
  };
  for (const Case& bad : kCases) {
    const Status status = TokenSet::Parse(bad.text, "/secret/file").status();
    EXPECT_EQ(status.code(), StatusCode::kSetting) << bad.mention;
    EXPECT_THAT(status.message(), HasSubstr("/secret/file"));
    EXPECT_THAT(status.message(), HasSubstr(bad.mention));
    EXPECT_THAT(status.message(), Not(HasSubstr("secretsecret")));
    EXPECT_THAT(status.message(), Not(HasSubstr("xxxx")));
  }
}

}  // namespace
}  // namespace resilient::store
