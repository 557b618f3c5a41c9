#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/log_limit.h"
#include "store/core/handshake.h"
#include "store/core/server_core.h"
#include "store/core/tokens.h"
#include "store/server/file_watch.h"
#include "store/server/uv_handle.h"

namespace resilient::store {

inline constexpr Duration kTokenFileInterval = std::chrono::seconds(1);  // Between two looks at it.

// Who may speak to the store: asks each connection for the token of its job before the core hears
// of it, and reads the token file again when it changes or SIGHUP comes. Connections that were
// admitted stay. A store of one user refuses the connections of other users of this host.
// Owner: Server. Thread: the loop's.
class Access {
 public:
  // What the token file said. Thread: value type.
  struct TokenText {
    TokenSet tokens;
    bool open_to_others = false;  // Users who are neither its owner nor in its group may read it.
  };

  // `token_file`: empty when no token is asked for. `one_user`: of this host only the user of this
  // process is admitted, and root.
  Access(UvLoop& loop, const Clock& clock, std::string token_file, bool one_user);

  // Reads the token file, and asks whether users can be told apart; where the kernel says nothing
  // of them all are admitted, with a warning. kSetting when the file cannot be used.
  Status Open();
  // From now on the file is watched.
  void Watch();
  void Close();

  bool asks_for_token() const { return !token_file_.empty(); }
  bool admits_one_user() const { return one_user_; }

  // `socket`: its connection's.
  void Begin(ConnectionId id, int socket);
  bool Admitted(ConnectionId id) const { return !pending_.contains(id); }
  // What one of another user is told, and nothing else. Null: it is none.
  const Status* Foreign(ConnectionId id) const;
  // REQUIRES: not Admitted, and not refused before. `peer`: its name, for the log of refusals.
  ServerHandshake::Step OnFrame(ConnectionId id, std::string_view peer, Frame frame);
  void Forget(ConnectionId id);
  // Logs that a connection was refused before it said anything of itself.
  void NoteRefusal(std::string_view peer, StatusCode code, std::string_view text);

  // The only job that this connection proved to have the token of; nullptr: no such limit.
  const std::string* ConfinedTo(ConnectionId id) const;

 private:
  void WarnOfOpenFile(const TokenText& read);
  Status TakeOver(const Result<TokenText>& read);
  void LogRefusal(std::string_view peer, const std::optional<Hello>& claimed, StatusCode code,
                  std::string_view text);
  std::string_view TextOf(const Status& why) const;

  UvLoop& loop_;
  const Clock& clock_;
  const std::string token_file_;
  std::optional<TokenSet> tokens_;
  bool openness_told_ = false;
  std::map<ConnectionId, ServerHandshake> pending_;
  std::map<ConnectionId, std::string> confined_;
  bool one_user_;
  std::map<ConnectionId, Status> foreign_;
  LogLimit refusal_limit_;
  std::unique_ptr<FileWatch> watch_;
};

}  // namespace resilient::store
