#include <resilient/termination.h>

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <utility>
#include <vector>

#include <resilient/status.h>

#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/log_flush.h"
#include "runtime/base/thread.h"
#include "runtime/net/socket.h"

namespace resilient {
namespace recovery {
namespace {

// What the handler uses. The descriptor is never closed, for a handler may be about to use it.
std::atomic<const WakeFd*> wake{nullptr};
std::atomic<pid_t> owner{0};
std::atomic<bool> asked{false};

extern "C" void OnTerminate(int number) {
  const int error = errno;
  if (getpid() == owner.load()) {
    asked.store(true);
    wake.load()->Wake();
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
  TerminationImpl(std::shared_ptr<Session> session, const Clock& clock)
      : session_(std::move(session)), clock_(clock), thread_("res-term", [this] { Run(); }) {}
  ~TerminationImpl() override;

 private:
  void Run();
  void Act();

  const std::shared_ptr<Session> session_;
  const Clock& clock_;
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
  stop_.store(true);
  wake.load()->Wake();
  thread_.Join();
}

void TerminationImpl::Run() {
  const WakeFd& woken = *wake.load();
  while (!asked.load()) {
    if (stop_.load()) return;
    std::vector<PollEntry> entries{{woken.fd(), POLLIN, 0}};
    PollUntil(entries, clock_, Deadline::Never());
    woken.Drain();
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
  if (!HandlerIs(SIG_DFL)) return nullptr;
  if (wake.load() == nullptr) wake.store(new WakeFd());
  owner.store(getpid());
  asked.store(false);
  auto installed = std::make_unique<TerminationImpl>(std::move(session), clock);
  SetHandler(&OnTerminate);
  return installed;
}

}  // namespace resilient
