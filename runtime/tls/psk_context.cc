#include "runtime/tls/psk_context.h"

#include <atomic>
#include <string>

#include "runtime/base/check.h"

namespace resilient {
namespace {

// RFC 8446, B.4. The only one that is offered: a PSK belongs to the hash of its suite.
constexpr char kSuite[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteNumber[2] = {0x13, 0x01};
// There is one key, so its name says nothing.
constexpr unsigned char kIdentity[] = {'l', 'i', 'n', 'k'};
constexpr int kUseIndex = 0;  // Of SSL_set_ex_data, which keeps it for the application.

// OpenSSL calls back with its SSL alone, and to ask that for anything takes a function of the
// library that was loaded. It is the same one for all contexts of a process.
std::atomic<decltype(&SSL_get_ex_data)> get_ex_data = nullptr;

}  // namespace

// What one stream was made of. Lives as long as the stream.
struct PskContext::Use {
  std::shared_ptr<const PskContext> context;
  std::string key;
};

std::shared_ptr<const PskContext> PskContext::Make(const TlsFunctions& functions,
                                                   std::uint64_t bytes_of_one_key) {
  get_ex_data = functions.SSL_get_ex_data;
  return std::shared_ptr<const PskContext>(new PskContext(functions, bytes_of_one_key));
}

PskContext::PskContext(const TlsFunctions& functions, std::uint64_t bytes_of_one_key)
    : functions_(functions),
      bytes_of_one_key_(bytes_of_one_key),
      context_(NewSslContext(functions_)) {
  SSL_CTX* const context = context_.get();
  functions_.SSL_CTX_ctrl(context, SSL_CTRL_SET_READ_AHEAD, 1, nullptr);
  functions_.SSL_CTX_set_max_early_data(context, kTlsEarlyBytesMax);
  RESILIENT_CHECK(functions_.SSL_CTX_set_ciphersuites(context, kSuite) == 1);
  functions_.SSL_CTX_set_psk_use_session_callback(context, &Offer);
  functions_.SSL_CTX_set_psk_find_session_callback(context, &Find);
}

PskContext::~PskContext() = default;

std::unique_ptr<TlsStream> PskContext::NewStream(TlsRole role, std::string_view key) const {
  RESILIENT_CHECK(key.size() == kPskBytes);
  const auto use = std::make_shared<Use>(Use{shared_from_this(), std::string(key)});
  SSL* const ssl = functions_.SSL_new(context_.get());
  RESILIENT_CHECK(ssl != nullptr && functions_.SSL_set_ex_data(ssl, kUseIndex, use.get()) == 1);
  if (role == TlsRole::kServer) {
    functions_.SSL_set_accept_state(ssl);
  } else {
    functions_.SSL_set_connect_state(ssl);
    // It takes no certificate in place of the key: no CA is known to have signed any.
    functions_.SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
  }
  return std::make_unique<TlsStream>(std::shared_ptr<const TlsFunctions>(use, &functions_), ssl,
                                     TlsOptions{.party = {.role = role},
                                                .takes_early = role == TlsRole::kServer,
                                                .bytes_of_one_key = bytes_of_one_key_});
}

int PskContext::Offer(SSL* ssl, const EVP_MD* digest, const unsigned char** identity,
                      std::size_t* identity_bytes, SSL_SESSION** session) {
  const Use& use = *static_cast<const Use*>(get_ex_data.load()(ssl, kUseIndex));
  static_cast<void>(digest);  // The one of the only suite.
  *identity = kIdentity;
  *identity_bytes = sizeof kIdentity;
  *session = use.context->SessionOf(ssl, use.key);
  return 1;
}

int PskContext::Find(SSL* ssl, const unsigned char* /*identity*/, std::size_t /*identity_bytes*/,
                     SSL_SESSION** session) {
  const Use& use = *static_cast<const Use*>(get_ex_data.load()(ssl, kUseIndex));
  *session = use.context->SessionOf(ssl, use.key);  // Another key shows in the binder of the PSK.
  return 1;
}

SSL_SESSION* PskContext::SessionOf(SSL* ssl, std::string_view key) const {
  SSL_SESSION* const session = functions_.SSL_SESSION_new();
  const SSL_CIPHER* const suite = functions_.SSL_CIPHER_find(ssl, kSuiteNumber);
  RESILIENT_CHECK(session != nullptr && suite != nullptr);
  functions_.SSL_SESSION_set1_master_key(
      session, reinterpret_cast<const unsigned char*>(key.data()), key.size());
  functions_.SSL_SESSION_set_cipher(session, suite);
  functions_.SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION);
  functions_.SSL_SESSION_set_max_early_data(session, kTlsEarlyBytesMax);
  return session;
}

}  // namespace resilient
