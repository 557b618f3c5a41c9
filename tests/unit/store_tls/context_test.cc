// Goal: certificate files that cannot be used are named with what to do; changed ones count from
// the next connection on, broken ones change nothing. Method: files in a temporary directory.
#include <sys/stat.h>

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/client/tls_source.h"
#include "store/server/encryption.h"
#include "store/server/tls_functions.h"
#include "store/tls/context.h"
#include "tests/support/certificates.h"

namespace resilient::store {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsFilesTest : public ::testing::Test {
 protected:
  static Status Open(const TlsFiles& files) {
    return TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer, files).status();
  }
  static void ExpectBad(const Status& status, const std::string& file, const std::string& mention) {
    EXPECT_EQ(status.code(), StatusCode::kSetting) << status.ToString();
    EXPECT_THAT(status.message(), AllOf(HasSubstr(file), HasSubstr(mention)));
  }

  const TlsDirectory folder_;
  const TestCa ca_;
};

TEST_F(TlsFilesTest, UnusableFile_IsNamed) {
  const TlsFiles good = folder_.Write("server", ca_.Issue(), ca_.certificate());
  EXPECT_TRUE(Open(good).ok()) << Open(good).ToString();
  TlsFiles files = good;
  files.certificate = folder_.path() + "/none.pem";
  ExpectBad(Open(files), files.certificate, "No such file");
  files = good;
  files.certificate = folder_.Write("words.pem", "no certificate\n");
  ExpectBad(Open(files), files.certificate, "holds no certificate");
  files = good;
  files.key = good.certificate;
  ExpectBad(Open(files), files.key, "holds no private key");
  files = good;
  files.authority = folder_.Write("empty.pem", "");
  ExpectBad(Open(files), files.authority, "holds no certificate of a CA");
  files = good;
  files.key = folder_.Write("locked.key", LockedKey());
  ExpectBad(Open(files), files.key, "without a password");
  files = good;
  files.key = folder_.Write("other.key", ca_.Issue().key);
  ExpectBad(Open(files), files.key, "does not belong to the certificate");
}

TEST_F(TlsFilesTest, ClientSettings_GoTogether) {
  const TlsFiles good = folder_.Write("client", ca_.Issue(), ca_.certificate());
  EXPECT_TRUE(TlsSource::Open(good).ok());
  EXPECT_TRUE(TlsSource::Open({"", "", good.authority}).ok());
  const auto plain = TlsSource::Open({});
  EXPECT_TRUE(plain.ok() && *plain == nullptr);
  ExpectBad(TlsSource::Open({good.certificate, good.key, ""}).status(), "", "set RESILIENT_TLS_CA");
  ExpectBad(TlsSource::Open({good.certificate, "", good.authority}).status(), "",
            "RESILIENT_TLS_KEY is not");
  ExpectBad(TlsSource::Open({"", good.key, good.authority}).status(), "",
            "RESILIENT_TLS_CERT is not");
}

TEST_F(TlsFilesTest, ServerSettings_GoTogether) {
  EXPECT_TRUE(CheckServerFiles({}).ok());
  EXPECT_TRUE(CheckServerFiles({"certificate", "key", ""}).ok());
  EXPECT_TRUE(CheckServerFiles({"certificate", "key", "ca"}).ok());
  ExpectBad(CheckServerFiles({"certificate", "", "ca"}), "", "--tls-key");
  ExpectBad(CheckServerFiles({"", "key", ""}), "", "--tls-cert");
  ExpectBad(CheckServerFiles({"", "", "ca"}), "", "needs a certificate of this store");
}

TEST_F(TlsFilesTest, ChangedFiles_CountAndBrokenOnesDoNot) {
  const TlsFiles files = folder_.Write("server", ca_.Issue(), ca_.certificate());
  auto context = TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer, files);
  ASSERT_TRUE(context.ok());
  EXPECT_EQ(*(*context)->Reread(), nullptr) << "nothing has changed";
  // A certificate whose key comes later.
  const TestCertificate next = ca_.Issue();
  folder_.Write("server.pem", next.certificate);
  ExpectBad((*context)->Reread().status(), files.key, "does not belong");
  EXPECT_NE((*context)->NewStream(""), nullptr) << "the old ones hold";
  folder_.Write("server.key", next.key);
  const auto changed = (*context)->Reread();
  ASSERT_TRUE(changed.ok() && *changed != nullptr);
  EXPECT_EQ(*(*changed)->Reread(), nullptr);
}

TEST_F(TlsFilesTest, KeyOpenToOthers_IsKnown) {
  const TlsFiles files = folder_.Write("server", ca_.Issue(), "");
  auto context = TlsContext::Open(LinkedTlsFunctions(), TlsRole::kServer, files);
  ASSERT_TRUE(context.ok());
  EXPECT_FALSE((*context)->key_open_to_others());
  ASSERT_EQ(chmod(files.key.c_str(), 0644), 0);
  const auto changed = (*context)->Reread();
  ASSERT_TRUE(changed.ok() && *changed != nullptr);
  EXPECT_TRUE((*changed)->key_open_to_others());
}

}  // namespace
}  // namespace resilient::store
