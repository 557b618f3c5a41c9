#include "runtime/tls/ssl_context.h"

#include "runtime/base/check.h"

namespace resilient {

SslContext NewSslContext(const TlsFunctions& functions) {
  SslContext made(functions.SSL_CTX_new(functions.TLS_method()), functions.SSL_CTX_free);
  SSL_CTX* const context = made.get();
  RESILIENT_CHECK(context != nullptr);
  functions.SSL_CTX_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr);
  functions.SSL_CTX_ctrl(context, SSL_CTRL_SET_MAX_PROTO_VERSION, TLS1_3_VERSION, nullptr);
  functions.SSL_CTX_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
  functions.SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  functions.SSL_CTX_set_num_tickets(context, 0);
  return made;
}

}  // namespace resilient
