#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

// The functions of OpenSSL 3 that are used, as a table, so that what speaks TLS is written once:
// the server links them, a client finds them in the system's libraries only when TLS is asked for.
namespace resilient {

// Each name once; the types are those of OpenSSL's own headers.
#define RESILIENT_LIBSSL_FUNCTIONS(DO)      \
  DO(SSL_CIPHER_find)                       \
  DO(SSL_CTX_check_private_key)             \
  DO(SSL_CTX_ctrl)                          \
  DO(SSL_CTX_free)                          \
  DO(SSL_CTX_load_verify_file)              \
  DO(SSL_CTX_new)                           \
  DO(SSL_CTX_set_ciphersuites)              \
  DO(SSL_CTX_set_default_passwd_cb)         \
  DO(SSL_CTX_set_max_early_data)            \
  DO(SSL_CTX_set_num_tickets)               \
  DO(SSL_CTX_set_options)                   \
  DO(SSL_CTX_set_psk_find_session_callback) \
  DO(SSL_CTX_set_psk_use_session_callback)  \
  DO(SSL_CTX_set_verify)                    \
  DO(SSL_CTX_use_PrivateKey_file)           \
  DO(SSL_CTX_use_certificate_chain_file)    \
  DO(SSL_SESSION_new)                       \
  DO(SSL_SESSION_set1_master_key)           \
  DO(SSL_SESSION_set_cipher)                \
  DO(SSL_SESSION_set_max_early_data)        \
  DO(SSL_SESSION_set_protocol_version)      \
  DO(SSL_ctrl)                              \
  DO(SSL_do_handshake)                      \
  DO(SSL_free)                              \
  DO(SSL_get0_param)                        \
  DO(SSL_get_error)                         \
  DO(SSL_get_ex_data)                       \
  DO(SSL_get_verify_result)                 \
  DO(SSL_key_update)                        \
  DO(SSL_new)                               \
  DO(SSL_read_early_data)                   \
  DO(SSL_read_ex)                           \
  DO(SSL_set1_host)                         \
  DO(SSL_set_accept_state)                  \
  DO(SSL_set_bio)                           \
  DO(SSL_set_connect_state)                 \
  DO(SSL_set_ex_data)                       \
  DO(SSL_set_hostflags)                     \
  DO(SSL_set_verify)                        \
  DO(SSL_shutdown)                          \
  DO(SSL_write_early_data)                  \
  DO(SSL_write_ex)                          \
  DO(TLS_method)

#define RESILIENT_LIBCRYPTO_FUNCTIONS(DO) \
  DO(BIO_ctrl)                            \
  DO(BIO_new)                             \
  DO(BIO_read)                            \
  DO(BIO_s_mem)                           \
  DO(BIO_write)                           \
  DO(ERR_clear_error)                     \
  DO(ERR_peek_error)                      \
  DO(ERR_reason_error_string)             \
  DO(X509_VERIFY_PARAM_set1_ip_asc)       \
  DO(X509_verify_cert_error_string)

// Thread: value type; what it points to is thread-safe as OpenSSL says.
struct TlsFunctions {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name that is declared.
#define RESILIENT_DECLARE(name) decltype(&::name) name = nullptr;
  RESILIENT_LIBSSL_FUNCTIONS(RESILIENT_DECLARE)
  RESILIENT_LIBCRYPTO_FUNCTIONS(RESILIENT_DECLARE)
#undef RESILIENT_DECLARE
};

}  // namespace resilient
