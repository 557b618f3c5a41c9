#include "torch_plugin/csrc/thread.h"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <utility>

namespace resilient::plugin {

Result<std::thread> StartThread(const char* name, std::function<void()> body) {
  // The new one inherits a full mask.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  std::string failure;
  try {
    thread = std::thread([name, body = std::move(body)] {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    failure = std::string("the thread ") + name + " cannot be made: " + error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failure.empty()) return Status(StatusCode::kResourceExhausted, failure);
  return thread;
}

}  // namespace resilient::plugin
