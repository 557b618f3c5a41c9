#include "store/tls/context.h"

#include <string_view>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/base/log.h"

namespace resilient::store {
namespace {

constexpr std::string_view kPlainMagic = "RSL1";  // Of the store's protocol without TLS.

// Otherwise OpenSSL would ask the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

}  // namespace

TlsContext::TlsContext(std::shared_ptr<const TlsFunctions> functions, TlsRole role, TlsFiles files)
    : functions_(std::move(functions)),
      role_(role),
      files_(std::move(files)),
      context_(nullptr, functions_->SSL_CTX_free) {}

TlsContext::~TlsContext() = default;

Result<std::shared_ptr<const TlsContext>> TlsContext::Open(const TlsFunctions& functions,
                                                           TlsRole role, const TlsFiles& files) {
  RESILIENT_CHECK(files.certificate.empty() == files.key.empty());
  RESILIENT_CHECK(!(role == TlsRole::kServer ? files.certificate : files.authority).empty());
  std::shared_ptr<TlsContext> context(
      new TlsContext(std::make_shared<const TlsFunctions>(functions), role, files));
  RESILIENT_RETURN_IF_ERROR(context->ReadAll());
  RESILIENT_RETURN_IF_ERROR(context->Load());
  return std::shared_ptr<const TlsContext>(std::move(context));
}

Result<std::shared_ptr<const TlsContext>> TlsContext::Reread() const {
  std::shared_ptr<TlsContext> context(new TlsContext(functions_, role_, files_));
  RESILIENT_RETURN_IF_ERROR(context->ReadAll());
  const bool same =
      context->texts_ == texts_ && context->key_open_to_others_ == key_open_to_others_;
  if (same) return std::shared_ptr<const TlsContext>();
  RESILIENT_RETURN_IF_ERROR(context->Load());
  return std::shared_ptr<const TlsContext>(std::move(context));
}

Status TlsContext::ReadAll() {
  for (const std::string* path : {&files_.certificate, &files_.key, &files_.authority}) {
    if (path->empty()) continue;
    const Result<FileText> file = ReadSmallFile(*path, kTlsFileBytesMax);
    if (!file.ok()) return file.status();
    if (path == &files_.key) key_open_to_others_ = file->open_to_others;
    texts_ += StrCat(file->text.size(), ":", file->text);
  }
  return {};
}

Status TlsContext::Load() {
  context_ = NewSslContext(*functions_);
  Status loaded = LoadFiles(context_.get());
  functions_->ERR_clear_error();  // Others of this thread may use OpenSSL too.
  return loaded;
}

Status TlsContext::LoadFiles(SSL_CTX* context) const {
  const TlsFunctions& call = *functions_;
  call.SSL_CTX_ctrl(context, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS, nullptr);
  call.SSL_CTX_set_default_passwd_cb(context, &NoPassword);
  int verify = role_ == TlsRole::kClient ? SSL_VERIFY_PEER : SSL_VERIFY_NONE;
  call.ERR_clear_error();
  if (!files_.authority.empty()) {
    if (call.SSL_CTX_load_verify_file(context, files_.authority.c_str()) != 1) {
      return Bad(files_.authority, "certificate of a CA");
    }
    verify = SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
  }
  call.SSL_CTX_set_verify(context, verify, nullptr);
  if (files_.certificate.empty()) return {};
  // The key first: a certificate that comes after it and does not fit is found by the last check.
  if (call.SSL_CTX_use_PrivateKey_file(context, files_.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return Bad(files_.key, "private key without a password");
  }
  if (call.SSL_CTX_use_certificate_chain_file(context, files_.certificate.c_str()) != 1) {
    return Bad(files_.certificate, "certificate");
  }
  if (call.SSL_CTX_check_private_key(context) != 1) {
    return {StatusCode::kSetting,
            StrCat("the key in ", files_.key, " does not belong to the certificate in ",
                   files_.certificate, "; name the key that the certificate was made with")};
  }
  return {};
}

Status TlsContext::Bad(const std::string& file, const std::string& what) const {
  return {StatusCode::kSetting,
          StrCat(file, " holds no ", what, " that can be used (", TlsReason(*functions_),
                 "); it has to be PEM text (docs/operations.md, Security)")};
}

std::unique_ptr<TlsStream> TlsContext::NewStream(const std::string& host) const {
  const TlsFunctions& call = *functions_;
  SSL* ssl = call.SSL_new(context_.get());
  RESILIENT_CHECK(ssl != nullptr);
  TlsOptions options{.party = {role_, "", files_.authority},
                     .plain_magic = std::string(kPlainMagic)};
  if (role_ == TlsRole::kServer) {
    call.SSL_set_accept_state(ssl);
    return std::make_unique<TlsStream>(functions_, ssl, std::move(options));
  }
  // As certificates write it: without the scope of an IPv6 address, without a name's last dot.
  std::string name = host.substr(0, host.find('%'));
  if (name.ends_with('.')) name.pop_back();
  if (name.empty()) name = host;  // It resolves to nothing, and no certificate names it.
  call.SSL_set_connect_state(ssl);
  if (call.X509_VERIFY_PARAM_set1_ip_asc(call.SSL_get0_param(ssl), name.c_str()) != 1) {
    call.SSL_set_hostflags(
        ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
    RESILIENT_CHECK(call.SSL_set1_host(ssl, name.c_str()) == 1);
    call.SSL_ctrl(ssl, SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, name.data());
  }
  call.ERR_clear_error();
  options.party.host = name;
  return std::make_unique<TlsStream>(functions_, ssl, std::move(options));
}

}  // namespace resilient::store
