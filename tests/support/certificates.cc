#include "tests/support/certificates.h"

#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <functional>

#include "runtime/base/check.h"

namespace resilient {
namespace {

constexpr char kCaName[] = "CA of a test";

std::string ToPem(const std::function<int(BIO*)>& write) {
  const std::unique_ptr<BIO, int (*)(BIO*)> memory(BIO_new(BIO_s_mem()), &BIO_free);
  RESILIENT_CHECK(write(memory.get()) == 1);
  char* data = nullptr;
  const long size = BIO_get_mem_data(memory.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

void Extend(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  RESILIENT_CHECK(extension != nullptr);
  RESILIENT_CHECK(X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

void Name(X509_NAME* name, const std::string& text) {
  RESILIENT_CHECK(X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8,
                                             reinterpret_cast<const unsigned char*>(text.c_str()),
                                             -1, -1, 0) == 1);
}

X509* Blank(EVP_PKEY* key, const std::string& name, long from_s, long until_s) {
  X509* certificate = X509_new();
  long serial = 0;
  RESILIENT_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1);
  X509_set_version(certificate, X509_VERSION_3);
  ASN1_INTEGER_set_int64(X509_get_serialNumber(certificate), serial & 0x7fffffff);
  X509_gmtime_adj(X509_getm_notBefore(certificate), from_s);
  X509_gmtime_adj(X509_getm_notAfter(certificate), until_s);
  Name(X509_get_subject_name(certificate), name);
  X509_set_pubkey(certificate, key);
  return certificate;
}

std::string KeyText(EVP_PKEY* key) {
  return ToPem([key](BIO* out) {
    return PEM_write_bio_PrivateKey(out, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
}

}  // namespace

TestCa::TestCa()
    : key_(EVP_EC_gen("P-256"), &EVP_PKEY_free),
      own_(Blank(key_.get(), kCaName, -3600, 86400), &X509_free) {
  X509_set_issuer_name(own_.get(), X509_get_subject_name(own_.get()));
  Extend(own_.get(), own_.get(), NID_basic_constraints, "critical,CA:TRUE");
  Extend(own_.get(), own_.get(), NID_subject_key_identifier, "hash");
  RESILIENT_CHECK(X509_sign(own_.get(), key_.get(), EVP_sha256()) > 0);
  certificate_ = ToPem([this](BIO* out) { return PEM_write_bio_X509(out, own_.get()); });
}

TestCertificate TestCa::Issue(const TestRequest& request) const {
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  const std::unique_ptr<X509, void (*)(X509*)> made(
      Blank(key.get(), "of a test", request.valid_from_s, request.valid_until_s), &X509_free);
  X509_set_issuer_name(made.get(), X509_get_subject_name(own_.get()));
  if (!request.names.empty()) {
    Extend(made.get(), own_.get(), NID_subject_alt_name, request.names);
  }
  if (!request.usage.empty()) Extend(made.get(), own_.get(), NID_ext_key_usage, request.usage);
  Extend(made.get(), own_.get(), NID_authority_key_identifier, "keyid");
  RESILIENT_CHECK(X509_sign(made.get(), key_.get(), EVP_sha256()) > 0);
  return {ToPem([&made](BIO* out) { return PEM_write_bio_X509(out, made.get()); }),
          KeyText(key.get())};
}

std::string LockedKey() {
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  return ToPem([&key](BIO* out) {
    const auto* password = reinterpret_cast<const unsigned char*>("password");
    return PEM_write_bio_PrivateKey(out, key.get(), EVP_aes_128_cbc(), password, 8, nullptr,
                                    nullptr);
  });
}

TlsFiles TlsDirectory::Write(const std::string& name, const TestCertificate& certificate,
                             const std::string& authority) const {
  TlsFiles files;
  files.key = Write(name + ".key", certificate.key);
  files.certificate = Write(name + ".pem", certificate.certificate);
  if (!authority.empty()) files.authority = Write(name + ".ca", authority);
  return files;
}

}  // namespace resilient
