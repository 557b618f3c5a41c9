#include "store/client/token_source.h"

#include <utility>

#include "runtime/base/file.h"
#include "runtime/base/log.h"

namespace resilient::store {

TokenSource::TokenSource(std::string path, std::string job)
    : path_(std::move(path)), job_(std::move(job)) {}

Result<std::shared_ptr<const TokenSource>> TokenSource::Open(const std::string& path,
                                                             const std::string& job) {
  if (path.empty()) return std::shared_ptr<const TokenSource>();
  std::shared_ptr<TokenSource> source(new TokenSource(path, job));
  RESILIENT_RETURN_IF_ERROR(source->Read());
  return std::shared_ptr<const TokenSource>(std::move(source));
}

Result<std::shared_ptr<const TokenSource>> TokenSource::Reread() const {
  std::shared_ptr<TokenSource> source(new TokenSource(path_, job_));
  RESILIENT_RETURN_IF_ERROR(source->Read());
  return std::shared_ptr<const TokenSource>(std::move(source));
}

Status TokenSource::Read() {
  const Result<FileText> file = ReadSmallFile(path_, kTokenFileBytesMax);
  if (!file.ok()) return file.status();
  const Result<TokenSet> tokens = TokenSet::Parse(file->text, path_);
  if (!tokens.ok()) return tokens.status();
  const std::string* token = tokens->Presented(job_);
  if (token == nullptr) {
    return Status(StatusCode::kSetting,
                  StrCat("the token file ", path_, " has no token for ",
                         job_.empty() ? std::string("all jobs, which a request without a job needs")
                                      : StrCat("job ", job_),
                         "; add a line for it, or one with a token alone"));
  }
  token_ = *token;
  return {};
}

}  // namespace resilient::store
