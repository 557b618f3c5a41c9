#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/thread.h"
#include "runtime/net/socket.h"

namespace resilient {

// A call that may block for as long as somebody else likes (a resolver, a network file system) and
// that cannot be given up, made on a thread of its own. Whoever wants the result polls fd() beside
// what else he waits for, so that his deadline, his abort and his heartbeats stay his own.
//
// Owner: shared by those who wait and the thread, which nobody joins: it may outlive them all, and
// it does not keep the process. So `call` owns what it uses. In a forked child the thread does not
// exist and fd() is closed: there it is left alone. Thread: thread-safe.
template <typename T>
class Offloaded {
 public:
  using Call = std::function<Result<T>()>;

  // kResourceExhausted is the result where no thread is to be had.
  static std::shared_ptr<const Offloaded> Start(std::string thread_name, Instant now, Call call) {
    std::shared_ptr<Offloaded> made(new Offloaded(now));
    try {
      Thread(std::move(thread_name), [made, call = std::move(call)] {
        made->Finish(call());
      }).Detach();
    } catch (const std::system_error& error) {
      made->Finish(Status(StatusCode::kResourceExhausted,
                          StrCat("no thread can be started: ", error.what())));
    }
    return made;
  }

  // Readable from the result on, for good.
  int fd() const { return finished_.fd(); }
  bool done() const { return done_.load(std::memory_order_acquire); }
  // REQUIRES: done().
  const Result<T>& result() const {
    RESILIENT_CHECK(done());  // Who was woken by fd() alone sees the result by this.
    return *result_;
  }
  Instant since() const { return since_; }

 private:
  explicit Offloaded(Instant now) : since_(now) {}
  void Finish(Result<T> result) {
    result_.emplace(std::move(result));
    done_.store(true, std::memory_order_release);
    finished_.Wake();
  }

  const Instant since_;
  const WakeFd finished_;
  std::atomic<bool> done_{false};
  std::optional<Result<T>> result_;  // Not changed once done_ is set.
};

// Waits on the caller's thread until it is done, `deadline` has come (then it is not done), or
// `interrupt` says otherwise, which is asked at least every kInterruptPollMs; empty: never.
Status AwaitReadable(int fd, const std::function<Status()>& interrupt, const Clock& clock,
                     Deadline deadline);

}  // namespace resilient
