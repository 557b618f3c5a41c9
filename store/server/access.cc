#include "store/server/access.h"

#include <unistd.h>

#include <utility>

#include "runtime/base/file.h"
#include "runtime/base/log.h"
#include "runtime/base/random.h"
#include "store/server/peer_user.h"

namespace resilient::store {
namespace {

using TokenText = Access::TokenText;

constexpr uid_t kRoot = 0;

Result<TokenText> ReadTokens(const std::string& path) {
  const Result<FileText> file = ReadSmallFile(path, kTokenFileBytesMax);
  if (!file.ok()) return file.status();
  Result<TokenSet> tokens = TokenSet::Parse(file->text, path);
  if (!tokens.ok()) return tokens.status();
  return TokenText{std::move(*tokens), file->open_to_others};
}

Status OtherUser(std::optional<uid_t> user) {
  const std::string whose = user ? StrCat("user ", *user) : "a process that has gone";
  return {StatusCode::kAuth,
          StrCat("this store is for the processes of user ", geteuid(), " of its host, and this ",
                 "connection is of ", whose, "; run as that user, or give the job a token ",
                 "(RESILIENT_TOKEN_FILE), which lets its holders in whoever they are")};
}

}  // namespace

Access::Access(UvLoop& loop, const Clock& clock, std::string token_file, bool one_user)
    : loop_(loop), clock_(clock), token_file_(std::move(token_file)), one_user_(one_user) {}

Status Access::Open() {
  if (one_user_ && !KernelTellsPeerUsers()) {
    one_user_ = false;
    RESILIENT_LOG(kWarn, "every user of this host is admitted: the kernel does not say whose a ",
                  "connection is (sock_diag); a token keeps others out (--token-file)");
  }
  if (!asks_for_token()) return {};
  Result<TokenText> read = ReadTokens(token_file_);
  if (!read.ok()) return read.status();
  WarnOfOpenFile(*read);
  tokens_ = std::move(read->tokens);
  return {};
}

void Access::WarnOfOpenFile(const TokenText& read) {
  if (!read.open_to_others || std::exchange(openness_told_, true)) return;
  RESILIENT_LOG(kWarn, "every user of this host may read the token file ", token_file_,
                "; chmod o-rwx closes it");
}

void Access::Watch() {
  if (!asks_for_token()) return;
  watch_ = std::make_unique<FileWatch>(
      loop_, clock_,
      WatchedFile{
          .path = token_file_, .event = "tokens", .holds = "the tokens that were read before hold"},
      kTokenFileInterval, [this]() -> FileWatch::Read {
        return [this, path = token_file_]() -> FileWatch::TakeOver {
          return [this, read = ReadTokens(path)] { return TakeOver(read); };
        };
      });
}

void Access::Close() { watch_.reset(); }

Status Access::TakeOver(const Result<TokenText>& read) {
  if (!read.ok()) return read.status();
  WarnOfOpenFile(*read);
  if (read->tokens == *tokens_) return {};
  tokens_ = read->tokens;
  RESILIENT_LOG_RECORD(kInfo, "tokens",
                       {{"file", token_file_}, {"count", std::to_string(tokens_->size())}},
                       "read anew; connections that were admitted stay");
  return {};
}

void Access::Begin(ConnectionId id, int socket) {
  pending_.try_emplace(id, asks_for_token() ? RandomBytes(kNonceBytes) : std::string());
  if (!one_user_) return;
  const PeerUser peer = FindPeerUser(socket);
  if (!peer.is_here || peer.user == geteuid() || peer.user == kRoot) return;
  foreign_[id] = OtherUser(peer.user);
}

const Status* Access::Foreign(ConnectionId id) const {
  const auto found = foreign_.find(id);
  return found == foreign_.end() ? nullptr : &found->second;
}

ServerHandshake::Step Access::OnFrame(ConnectionId id, std::string_view peer, Frame frame) {
  if (const Status* foreign = Foreign(id)) {
    LogRefusal(peer, std::nullopt, foreign->code(), "it is of another user of this host");
    return {.refused = *foreign};
  }
  ServerHandshake& handshake = pending_.at(id);
  ServerHandshake::Step step = handshake.OnFrame(std::move(frame), tokens_ ? &*tokens_ : nullptr);
  if (!step.refused.ok()) {
    LogRefusal(peer, handshake.claimed(), step.refused.code(), TextOf(step.refused));
  }
  if (handshake.confined()) confined_[id] = handshake.claimed()->job;
  if (handshake.admitted()) pending_.erase(id);
  return step;
}

void Access::Forget(ConnectionId id) {
  pending_.erase(id);
  confined_.erase(id);
  foreign_.erase(id);
}

const std::string* Access::ConfinedTo(ConnectionId id) const {
  const auto found = confined_.find(id);
  return found == confined_.end() ? nullptr : &found->second;
}

void Access::NoteRefusal(std::string_view peer, StatusCode code, std::string_view text) {
  LogRefusal(peer, std::nullopt, code, text);
}

// The text of a wrong token names the job, which is in the fields, escaped.
std::string_view Access::TextOf(const Status& why) const {
  if (why.code() != StatusCode::kAuth) return "not the protocol of the handshake";
  return tokens_ ? "no token, or a wrong one" : "it asks for a proof, and this store has no token";
}

// A peer that tries without end must not fill the disk.
void Access::LogRefusal(std::string_view peer, const std::optional<Hello>& claimed, StatusCode code,
                        std::string_view text) {
  const std::optional<std::uint64_t> untold = refusal_limit_.May(clock_.Now());
  if (!untold) return;
  const Hello says = claimed.value_or(Hello());
  RESILIENT_LOG_RECORD(kWarn, "refused",
                       {{"peer", std::string(peer)},
                        {"says_host", says.process.host},
                        {"says_pid", claimed ? std::to_string(says.process.pid) : std::string()},
                        {"says_job", says.job},
                        {"code", std::string(CodeName(code))},
                        {"untold", *untold == 0 ? std::string() : std::to_string(*untold)}},
                       std::string(text));
}

}  // namespace resilient::store
