#include <resilient/termination.h>

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <utility>
#include <vector>

#include <resilient/per_process.h>
#include <resilient/status.h>

#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/log_flush.h"
#include "runtime/base/thread.h"
#include "runtime/net/socket.h"

namespace resilient {
namespace recovery {
namespace {

// What the handler uses. Its descriptor is never closed, for a handler may be about to use it.
struct Signalled {
  const pid_t process = getpid();
  const WakeFd wake;
  std::atomic<bool> asked{false};
  std::atomic<bool> awaited{false};  // There is a thread that acts.
};
constinit PerProcess<Signalled> signalled;

extern "C" void OnTerminate(int number) {
  const int error = errno;
  Signalled* const own = signalled.Present();
  // The process is compared for those who make one by vfork or clone, of which nobody is told.
  if (own != nullptr && own->awaited.load() && own->process == getpid()) {
    own->asked.store(true);
    own->wake.Wake();
  } else {
    // A child has this handler, and no thread that would wait: it ends when the handler returns.
    (void)signal(number, SIG_DFL);
    (void)raise(number);
  }
  errno = error;
}

bool HandlerIs(void (*handler)(int)) {
  struct sigaction present = {};
  return sigaction(SIGTERM, nullptr, &present) == 0 && (present.sa_flags & SA_SIGINFO) == 0 &&
         present.sa_handler == handler;
}

void SetHandler(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  (void)sigaction(SIGTERM, &action, nullptr);
}

class TerminationImpl final : public Termination {
 public:
  TerminationImpl(std::shared_ptr<Session> session, const Clock& clock, Signalled& signalled_of)
      : session_(std::move(session)),
        clock_(clock),
        signalled_(signalled_of),
        thread_("res-term", [this] { Run(); }) {}
  ~TerminationImpl() override;

 private:
  void Run();
  void Act();

  const std::shared_ptr<Session> session_;
  const Clock& clock_;
  Signalled& signalled_;
  const ProcessMark mark_;
  std::atomic<bool> stop_{false};
  Thread thread_;  // Last: it uses everything above.
};

TerminationImpl::~TerminationImpl() {
  if (mark_.InChild()) {
    thread_.AbandonInChild();
    return;
  }
  if (HandlerIs(&OnTerminate)) SetHandler(SIG_DFL);
  signalled_.awaited.store(false);
  stop_.store(true);
  signalled_.wake.Wake();
  thread_.Join();
}

void TerminationImpl::Run() {
  while (!signalled_.asked.load()) {
    if (stop_.load()) return;
    std::vector<PollEntry> entries{{signalled_.wake.fd(), POLLIN, 0}};
    PollUntil(entries, clock_, Deadline::Never());
    signalled_.wake.Drain();
  }
  Act();
}

void TerminationImpl::Act() {
  const Status cause = session_->AwaitFailure(Deadline::After(clock_.Now(), kTerminationWait));
  if (cause.ok()) {
    RESILIENT_LOG(kInfo, "SIGTERM, and no failure of another rank is known here: this rank ends");
  } else {
    RESILIENT_LOG(kError, "SIGTERM ends this rank; what came first: ", cause.ToString());
    session_->Close();  // Its part of the incident is over: that has a line too.
  }
  (void)FlushLog();
  if (HandlerIs(&OnTerminate)) SetHandler(SIG_DFL);
  (void)kill(getpid(), SIGTERM);
}

}  // namespace
}  // namespace recovery

std::unique_ptr<Termination> HandleTermination(std::shared_ptr<Session> session,
                                               const Clock& clock) {
  using namespace recovery;  // NOLINT(google-build-using-namespace)
  Signalled& own = signalled.Get();
  // A forked child may have inherited our handler from a rank; then it is free for its own world.
  const bool free = HandlerIs(SIG_DFL) || (HandlerIs(&OnTerminate) && !own.awaited.load());
  if (!free) return nullptr;
  own.asked.store(false);
  auto installed = std::make_unique<TerminationImpl>(std::move(session), clock, own);
  own.awaited.store(true);
  SetHandler(&OnTerminate);
  return installed;
}

}  // namespace resilient
