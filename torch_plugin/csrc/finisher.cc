#include "torch_plugin/csrc/finisher.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch_plugin/csrc/thread.h"

namespace resilient::plugin {

namespace {

// As deep as callbacks outside of queues wait for operations that others finish, and no deeper.
constexpr int kThreadsMax = 8;

}  // namespace

struct Finisher::Shared : std::enable_shared_from_this<Finisher::Shared> {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;  // Guarded by mutex.
  bool stopping = false;                    // Guarded by mutex.
  std::size_t idle = 0;                     // Guarded by mutex.
  int limit = kThreadsMax;                  // Guarded by mutex. Of `threads`.
  std::vector<std::thread> threads;         // Guarded by mutex.

  void Run() {
    std::unique_lock lock(mutex);
    while (true) {
      ++idle;
      wake.wait(lock, [this] { return stopping || !queue.empty(); });
      --idle;
      if (queue.empty()) return;
      std::function<void()> task = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  // REQUIRES: mutex.
  Status AddThread() {
    Result<std::thread> thread =
        StartThread("res-callback", [shared = shared_from_this()] { shared->Run(); });
    if (thread.ok()) threads.push_back(std::move(*thread));
    return thread.status();
  }
};

Finisher::Finisher() : shared_(std::make_shared<Shared>()) {}

Finisher::~Finisher() { Stop(false); }

Status Finisher::Start() {
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->threads.empty() || shared_->stopping) return Status::Ok();
  return shared_->AddThread();
}

void Finisher::ChangeLimit(int by) {
  const std::lock_guard lock(shared_->mutex);
  shared_->limit += by;
}

void Finisher::Post(std::function<void()> task) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->threads.empty() && !shared_->stopping) {
      shared_->queue.push_back(std::move(task));
      shared_->wake.notify_one();
      const bool waits = shared_->queue.size() > shared_->idle;
      // Without another one the task waits for a thread that there is.
      const bool may = shared_->threads.size() < static_cast<std::size_t>(shared_->limit);
      if (waits && may) static_cast<void>(shared_->AddThread());
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
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    shared_->wake.notify_all();
    threads = std::exchange(shared_->threads, {});
  }
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      thread.detach();  // A callback dropped the last reference to the session; Run ends after it.
    } else {
      thread.join();
    }
  }
}

}  // namespace resilient::plugin
