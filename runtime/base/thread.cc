#include "runtime/base/thread.h"

#include <pthread.h>

#include <csignal>
#include <memory>
#include <utility>

#include "runtime/base/check.h"

namespace resilient {
namespace {

constexpr std::size_t kNameMax = 15;

// Blocks signals on the calling thread, so that a thread created in this scope is born with them
// blocked: none can be delivered to it before its first instruction. A fault of the thread itself
// stays deliverable, or crash reporters would see nothing.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&all, fault);
    }
    RESILIENT_CHECK(pthread_sigmask(SIG_BLOCK, &all, &before_) == 0);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Thread::Thread(std::string name, std::function<void()> body) {
  if (name.size() > kNameMax) name.resize(kNameMax);
  const SignalsBlocked blocked;
  thread_ = std::thread([name = std::move(name), body = std::move(body)] {
    pthread_setname_np(pthread_self(), name.c_str());
    body();
  });
}

Thread::~Thread() { Join(); }

void Thread::Join() {
  if (!Joinable()) return;
  RESILIENT_CHECK(!IsCurrent());
  thread_.join();
}

void Thread::AbandonInChild() {
  // Not detach(): that would touch the descriptor of a thread that this process does not have.
  std::construct_at(&thread_);
}

}  // namespace resilient
