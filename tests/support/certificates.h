#pragma once

#include <memory>
#include <string>
#include <vector>

#include <openssl/evp.h>
#include <openssl/x509.h>
#include <resilient/tls.h>

#include "tests/support/test_directory.h"

// A CA for tests, and the certificates that it signs, made with libcrypto: nothing that could
// expire lies in the repository.
namespace resilient {

// PEM text.
struct TestCertificate {
  std::string certificate;
  std::string key;
};

// What is to be signed. Times are seconds from now.
struct TestRequest {
  std::string names = "IP:127.0.0.1,DNS:localhost";  // As OpenSSL's configuration has them.
  std::string usage;                                 // "clientAuth"; empty: any.
  long valid_from_s = -3600;
  long valid_until_s = 86400;
};

class TestCa {
 public:
  TestCa();
  TestCertificate Issue(const TestRequest& request = {}) const;
  const std::string& certificate() const { return certificate_; }  // PEM.

 private:
  std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key_;
  std::unique_ptr<X509, void (*)(X509*)> own_;
  std::string certificate_;
};

// A key as PEM text that a password protects.
std::string LockedKey();

class TlsDirectory : public TestDirectory {
 public:
  using TestDirectory::Write;
  // NAME.pem and NAME.key, and the CA that the other side is checked against (empty: none).
  TlsFiles Write(const std::string& name, const TestCertificate& certificate,
                 const std::string& authority) const;
};

}  // namespace resilient
