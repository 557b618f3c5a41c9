#include "torch_plugin/csrc/finisher.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace resilient::plugin {

struct Finisher::Shared {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;  // Guarded by mutex.
  bool running = false;                     // Guarded by mutex.
  bool stopping = false;                    // Guarded by mutex.
  std::thread thread;                       // Guarded by mutex.

  void Run() {
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [this] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      std::function<void()> task = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }
};

Finisher::Finisher() : shared_(std::make_shared<Shared>()) {}

Finisher::~Finisher() { Stop(false); }

Status Finisher::Start() {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->running || shared_->stopping) return Status::Ok();
  // The user's signal handlers run on the user's threads: the new thread inherits a full mask.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    shared_->thread = std::thread([shared = shared_] {
      pthread_setname_np(pthread_self(), "res-callback");
      shared->Run();
    });
    shared_->running = true;
  } catch (const std::system_error& error) {
    status = Status(StatusCode::kResourceExhausted,
                    std::string("no thread can be made for callbacks: ") + error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

void Finisher::Post(std::function<void()> task) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->running && !shared_->stopping) {
      shared_->queue.push_back(std::move(task));
      shared_->wake.notify_one();
      return;
    }
  }
  task();
}

void Finisher::Stop(bool in_forked_child) {
  if (in_forked_child) {
    // The mutex may have been held at the fork, and a std::thread that is joinable ends the process
    // in its destructor: leave both behind.
    new std::shared_ptr<Shared>(std::move(shared_));
    shared_ = std::make_shared<Shared>();
    shared_->stopping = true;
    return;
  }
  std::thread thread;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    shared_->running = false;
    shared_->wake.notify_all();
    thread = std::move(shared_->thread);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // A callback dropped the last reference to the session; Run ends after it.
  } else {
    thread.join();
  }
}

}  // namespace resilient::plugin
