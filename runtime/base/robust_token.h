#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <resilient/per_process.h>
#include <resilient/status.h>

#include "runtime/base/process.h"

namespace resilient {

// A sign of life that other processes of the host can watch: a robust mutex in a page of shared
// memory, held by one thread. When that thread ends without letting go the kernel marks the mutex
// and wakes a watcher, at the very start of the end of a process: before its memory is given back,
// which takes 0.1 s a GiB, and only after that its sockets and its pidfd tell.
//
// The page is of no file system and 4 KiB large: a watcher that still has it keeps nothing else of
// the process that made it. A forked child has neither the page nor the descriptor.
//
// Owner: a session. Thread: Take and LetGo on the thread that is to be watched, the rest anywhere.
class RobustToken {
 public:
  // What a watcher needs. Text: "pid start fd inode nonce".
  struct Offer {
    std::int64_t pid = 0;
    std::uint64_t start_time = 0;  // With the pid: that process and no other.
    int fd = -1;
    std::uint64_t inode = 0;
    std::uint64_t nonce = 0;  // Also in the page: a process that has got the same pid has not this.

    friend bool operator==(const Offer&, const Offer&) = default;
  };
  static std::string EncodeOffer(const Offer& offer);
  static std::optional<Offer> DecodeOffer(std::string_view text);

  // kResourceExhausted when the system has no memory or descriptor for it.
  static Result<std::unique_ptr<RobustToken>> Create();
  // Of a token that some other thread holds still, the page stays for as long as the process does.
  ~RobustToken();
  RobustToken(const RobustToken&) = delete;
  RobustToken& operator=(const RobustToken&) = delete;

  // From now on the end of the calling thread is to be seen. REQUIRES: called once.
  void Take();
  // No more. Does nothing on another thread than the one that took it.
  void LetGo();

  const Offer& offer() const { return offer_; }

 private:
  struct Page;
  friend class TokenWatch;
  RobustToken(Page* page, const Offer& offer) : page_(page), offer_(offer) {}

  const ProcessMark mark_;  // In a forked child neither page nor descriptor is ours.
  Page* const page_;
  const Offer offer_;
  std::atomic<std::int64_t> holder_{0};  // The thread that holds it; 0: none.
};

// A token as it is seen by another process. Owner: a watcher. Thread: immutable; the word changes
// by itself.
class TokenWatch {
 public:
  // kUnreachable: this process may not see that one's descriptors, or it is not that process, or it
  // has no such token any more.
  static Result<std::unique_ptr<TokenWatch>> Attach(const RobustToken::Offer& offer);
  ~TokenWatch();
  TokenWatch(const TokenWatch&) = delete;
  TokenWatch& operator=(const TokenWatch&) = delete;

  // To sleep on; it changes, and somebody is woken, when the holder lets go or ends.
  const std::uint32_t* word() const;
  // What the word says.
  static bool Held(std::uint32_t word);
  static bool HolderDied(std::uint32_t word);
  // Of several watchers the kernel wakes one.
  void WakeOtherWatchers() const;

  // Whether the process that made the token has come to its end.
  ProcessEnd OwnerEnd() const;

 private:
  explicit TokenWatch(const RobustToken::Page* page) : page_(page) {}

  const ProcessMark mark_;  // In a forked child the page is not there.
  const RobustToken::Page* const page_;
};

}  // namespace resilient
