// Goal: proofs are those of the standard, and comparing them is right. Method: the vectors of RFC
// 4231 with SHA-256.
#include "runtime/base/hmac.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/support/hex.h"

namespace resilient {
namespace {

TEST(HmacSha256, IsThatOfRfc4231) {
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Hex(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Hex(HmacSha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  // A key that is longer than a block of the digest.
  EXPECT_EQ(Hex(HmacSha256(std::string(131, '\xaa'),
                           "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(HmacSha256, EmptyKeyAndText_AreAllowed) {
  EXPECT_EQ(Hex(HmacSha256("", "")),
            "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(SameBytes, ComparesEachByteAndTheLength) {
  EXPECT_TRUE(SameBytes("", ""));
  EXPECT_TRUE(SameBytes("same", "same"));
  EXPECT_FALSE(SameBytes("same", "sane"));
  EXPECT_FALSE(SameBytes("same", "came"));
  EXPECT_FALSE(SameBytes("same", "same again"));
  EXPECT_FALSE(SameBytes(std::string(kHmacBytes, '\0'), ""));
}

}  // namespace
}  // namespace resilient
