#include "runtime/tls/failure.h"

#include <string_view>

#include "runtime/base/log.h"
#include "runtime/tls/functions.h"

namespace resilient {
namespace {

constexpr std::string_view kOwnCertificate =
    "RESILIENT_TLS_CERT and RESILIENT_TLS_KEY (docs/operations.md, Security)";

std::string VerifyText(const TlsFunctions& functions, long verified) {
  const char* text = functions.X509_verify_cert_error_string(verified);
  return text == nullptr ? "unknown reason" : text;
}

// The peer's certificate does not hold.
Status DescribeCertificate(const TlsFunctions& functions, const TlsParty& party, long verified) {
  const std::string text = VerifyText(functions, verified);
  switch (verified) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return {StatusCode::kAuth, "its certificate, or that of its CA, has expired; renew it"};
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return {StatusCode::kAuth, "its certificate is not valid yet; is a clock wrong?"};
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return {StatusCode::kAuth,
              StrCat("its certificate does not name ", party.host,
                     "; reach it by a name that the certificate has, or issue one with a "
                     "subjectAltName of ",
                     verified == X509_V_ERR_IP_ADDRESS_MISMATCH ? "IP:" : "DNS:", party.host)};
    case X509_V_ERR_INVALID_PURPOSE:
      return {StatusCode::kAuth,
              StrCat("its certificate is not meant for ",
                     party.role == TlsRole::kServer ? "clients (extendedKeyUsage clientAuth)"
                                                    : "servers (extendedKeyUsage serverAuth)")};
    default:
      return {StatusCode::kAuth,
              StrCat("no CA of ", party.authority, " vouches for its certificate (", text, ")")};
  }
}

// It sent an alert. The numbers are those of the protocol (RFC 8446, 6.2).
Status DescribeAlert(const TlsParty& party, int alert, const std::string& reason) {
  switch (alert) {
    case SSL_AD_CERTIFICATE_REQUIRED:
      return {StatusCode::kAuth,
              StrCat("it asks for a certificate of its clients and this process shows none; set ",
                     kOwnCertificate)};
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_CERTIFICATE_EXPIRED:
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_UNKNOWN_CA:
    case SSL_AD_ACCESS_DENIED:
    case SSL_AD_DECRYPT_ERROR:
      return {StatusCode::kAuth,
              party.role == TlsRole::kServer
                  ? StrCat("it refused the certificate of this store (", reason, ")")
                  : StrCat("it refused the certificate of this process (", reason, "); look at ",
                           kOwnCertificate)};
    case SSL_AD_PROTOCOL_VERSION:
      return {StatusCode::kProtocol, StrCat("it speaks no TLS 1.3 (", reason, ")")};
    default:
      return {StatusCode::kProtocol, StrCat("it ended TLS (", reason, ")")};
  }
}

}  // namespace

std::string TlsReason(const TlsFunctions& functions) {
  const unsigned long error = functions.ERR_peek_error();
  const char* reason = error == 0 ? nullptr : functions.ERR_reason_error_string(error);
  return reason == nullptr ? "unknown reason" : reason;
}

Status DescribeTlsFailure(const TlsFunctions& functions, const TlsParty& party, long verified) {
  const int code = ERR_GET_REASON(functions.ERR_peek_error());
  const std::string reason = TlsReason(functions);
  if (code == SSL_R_CERTIFICATE_VERIFY_FAILED) {
    return DescribeCertificate(functions, party, verified);
  }
  if (code >= SSL_AD_REASON_OFFSET) {
    return DescribeAlert(party, code - SSL_AD_REASON_OFFSET, reason);
  }
  switch (code) {
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return {StatusCode::kAuth, "it showed no certificate, which this store asks for"};
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_NO_SHARED_CIPHER:
      return {StatusCode::kProtocol, StrCat("it speaks no TLS 1.3 (", reason, ")")};
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
      return {StatusCode::kProtocol, StrCat("it does not speak TLS (", reason, ")")};
    default:
      return {StatusCode::kProtocol, StrCat("TLS failed (", reason, ")")};
  }
}

}  // namespace resilient
