#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/net/frame.h"
#include "runtime/net/resolver.h"
#include "runtime/net/socket.h"
#include "store/client/client_core.h"
#include "store/client/credentials.h"
#include "store/core/messages.h"

namespace resilient::store {

// Most requests are answered within this: so long the one who waits may sleep in recv, which is one
// system call less than a poll and a recv.
inline constexpr Duration kQuickAnswer = Millis(4);

// What a link waits for; the caller performs it without holding its lock. Thread: value type.
struct LinkStep {
  int fd = -1;  // -1: nothing to poll.
  short events = 0;
  bool may_receive = false;  // PerformQuickly may be tried first.
  Instant due = kNever;      // Advance at the latest then.
};

// What came of a step. Thread: value type.
struct LinkInput {
  short revents = 0;
  // Of PerformQuickly: what recv returned, its error, and the bytes. There may be more to read.
  std::optional<ssize_t> received;
  int error = 0;
  std::array<char, 32768> bytes;
};

// Waits for `step`, for `wake`, and at most until `until`. Touches no link.
LinkInput Perform(const LinkStep& step, const WakeFd& wake, const Clock& clock, Instant until);

// Waits for bytes alone, about kQuickAnswer and not longer than kQuickAnswerMax: a wake has to
// wait. A signal ends it. Touches no link. REQUIRES: step.may_receive.
LinkInput PerformQuickly(const LinkStep& step);
inline constexpr Duration kQuickAnswerMax = 5 * kQuickAnswer;  // The kernel rounds up to its ticks.

// One connection to the store, made again whenever it is lost: resolves, connects to each address
// in turn (where the store is on this host, to the unix socket beside it), greets (TLS where it is
// asked for, preamble and Hello), then carries messages. Never blocks: NextStep says what to wait
// for and Advance goes on from there. Names and the files of credentials are looked up for each
// connection, by threads of their own; where they do not answer at once it goes on with what they
// were before. Numbering and sending again are the caller's (see TakeOpened). Owner: the request
// connection, the control connection, an exit report. Thread: caller-synchronised; only the thread
// that performs the steps calls Advance, Drop or Close, since they may close the descriptor that is
// being polled.
class StoreLink {
 public:
  StoreLink(std::vector<HostPort> addresses, std::uint64_t seed, Credentials credentials = {},
            Resolver& resolver = Resolver::OfProcess());
  ~StoreLink();
  StoreLink(const StoreLink&) = delete;
  StoreLink& operator=(const StoreLink&) = delete;

  // REQUIRES: nothing was done with it yet.
  void Use(Credentials credentials) { credentials_ = FreshCredentials(std::move(credentials)); }

  LinkStep NextStep() const;

  // Appends what was received to `inbox`. `core` supplies the Hello.
  void Advance(const LinkInput& input, const ClientCore& core, Instant now,
               std::vector<ServerMessage>& inbox);

  // True once for each connection that got its Welcome: send what was not answered.
  bool TakeOpened();

  // Queues a message and writes what the socket takes. False when the rest has to wait for the
  // poll, whose step must then be taken anew. REQUIRES: open().
  bool Send(const Request& request);

  // Gives the connection up for `why` and makes the next one. It is closed when the next one is
  // open: to the store a connection that ends without a goodbye is that of a process that has died.
  void Drop(Status why, Instant now);

  // For good.
  void Close();

  bool open() const { return state_ == State::kOpen; }
  const Welcome& welcome() const { return welcome_; }  // Of the latest connection.

  // Why there is no connection: the latest failure; after a round over several addresses, that of
  // each.
  const Status& trouble() const { return trouble_; }
  // Set while waiting does not help: all addresses were tried, and the one of the latest connection
  // (any, before the first) refuses this process: another protocol, another job, a refused Hello.
  // At once when a store says that this session has ended.
  bool refused() const { return refused_; }
  // True when trouble() ended a round over all addresses, and none of them is left to try.
  bool tried_all() const { return tried_all_; }
  // Whether anything that was sent is still to be acknowledged, by the kernel of the store's host
  // or of a proxy before it: else the network as far as there works. REQUIRES: open().
  bool unacknowledged() const;
  // Whether this connection does not leave the host, so that no network and no proxy can lose what
  // is sent on it: it lasts as long as the store's process, and another one would only wait, too.
  // REQUIRES: open().
  bool local() const { return local_; }
  // Bytes received, over all connections: tells that the peer is alive while a long message comes.
  std::uint64_t received() const { return received_; }

  // "10.0.0.1:29500", or all addresses when none was tried yet.
  std::string peer() const;

 private:
  enum class State { kPaused, kResolving, kConnecting, kPreparing, kGreeting, kOpen, kClosed };
  // One address of a round.
  struct Attempt {
    Status why;
    bool refused = false;
    bool over = false;
  };

  void TryNext(Instant now);
  void BeginRound();
  void AdvanceLookup(Instant now);
  void ConnectTo(const Addresses& hosts, Instant now);
  void StartConnect(Instant now);
  void FinishConnect(Instant now);
  void Greet(const ClientCore& core, Instant now);
  void Receive(const LinkInput& input, Instant now, std::vector<ServerMessage>& inbox);
  bool OnReceived(std::string_view bytes, Instant now, std::vector<ServerMessage>& inbox);
  bool Take(std::string_view bytes, Instant now, std::vector<ServerMessage>& inbox);
  bool TakeEncrypted(std::string_view bytes, Instant now, std::vector<ServerMessage>& inbox);
  void OnNothing(ssize_t got, int error, Instant now);
  bool TakeFrames(Instant now, std::vector<ServerMessage>& inbox);
  bool OnHandshake(const Frame& frame, Instant now);
  bool OnWelcome(const ServerMessage& message, Instant now);
  void OnClosed(Instant now);
  void Queue(std::string bytes);
  bool Flush();
  void Fail(Status why, bool refused, Instant now);
  void NoteAttempt(Status why, bool refused);
  Status RoundTrouble(std::size_t first) const;

  const std::vector<HostPort> addresses_;
  Resolver& resolver_;
  FreshCredentials credentials_;
  State state_ = State::kPaused;
  Backoff backoff_;
  std::size_t address_ = 0;               // Index of the address that is tried, or is next.
  std::optional<std::size_t> home_;       // That of the latest connection.
  std::vector<Attempt> round_;            // At each address, since all were tried.
  HostPort target_;                       // Address being tried, as given.
  std::shared_ptr<const Lookup> lookup_;  // Of its name, while that is waited for.
  std::deque<HostPort> numeric_;          // What it resolved to and was not tried yet.
  HostPort current_;                      // Numeric address of this connection.
  Instant due_{};                         // End of the pause or of the time to connect and greet.
  FileDescriptor socket_;
  bool local_ = false;              // It is a unix socket.
  FileDescriptor dropped_;          // Neither read nor written any more.
  bool may_receive_ = false;        // A recv of socket_ that may block ends after kQuickAnswer.
  std::unique_ptr<TlsStream> tls_;  // Of this connection; null: it is plain.
  std::string decrypted_;
  FrameSplitter splitter_;
  std::optional<ClientHandshake> handshake_;  // Of this connection, when a token is presented.
  std::deque<std::string> output_;
  std::size_t output_sent_ = 0;  // Bytes of output_.front() already written.
  bool write_failed_ = false;    // The reader will find out; it alone may close.
  bool opened_ = false;
  Welcome welcome_;
  Status trouble_;
  bool refused_ = false;
  bool tried_all_ = false;
  std::uint64_t received_ = 0;
};

// Parses every address. kSetting for a malformed one, or when there is none.
Result<std::vector<HostPort>> ParseAddresses(const std::vector<std::string>& addresses);

}  // namespace resilient::store
