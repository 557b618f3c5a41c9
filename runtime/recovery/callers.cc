#include "runtime/recovery/callers.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace resilient::recovery {

struct Callers::Book {
  const std::uint64_t id;
  std::mutex mutex;
  std::map<std::thread::id, std::optional<BlockedIn>> threads;  // Guarded by mutex.
};

namespace {

std::atomic<std::uint64_t> books_made{0};

// The books that a thread stands in; its end takes it out of them. Thread: confined.
class ThreadRecord {
 public:
  ~ThreadRecord() {
    for (const std::weak_ptr<Callers::Book>& entry : books_) {
      if (const auto book = entry.lock()) {
        const std::lock_guard lock(book->mutex);
        book->threads.erase(std::this_thread::get_id());
      }
    }
  }

  void Exempt() { exempt_ = true; }
  bool StandsIn(std::uint64_t book) const { return latest_ == book; }
  void Enter(const std::shared_ptr<Callers::Book>& book) {
    if (exempt_) return;
    latest_ = book->id;
    std::erase_if(books_, [](const auto& entry) { return entry.expired(); });
    const std::lock_guard lock(book->mutex);
    if (book->threads.try_emplace(std::this_thread::get_id()).second) books_.push_back(book);
  }

 private:
  bool exempt_ = false;
  std::uint64_t latest_ = 0;  // A program uses one session at a time, mostly.
  std::vector<std::weak_ptr<Callers::Book>> books_;
};

thread_local ThreadRecord this_thread_record;

}  // namespace

Callers::Callers() : book_(new Book{.id = ++books_made, .mutex = {}, .threads = {}}) {}

void Callers::ExemptThisThread() { this_thread_record.Exempt(); }

void Callers::Note() {
  if (!this_thread_record.StandsIn(book_->id)) this_thread_record.Enter(book_);
}

void Callers::Block(BlockedIn in) {
  Note();
  const std::lock_guard lock(book_->mutex);
  book_->threads[std::this_thread::get_id()] = std::move(in);
}

void Callers::Unblock() {
  const std::lock_guard lock(book_->mutex);
  const auto thread = book_->threads.find(std::this_thread::get_id());
  if (thread != book_->threads.end()) thread->second.reset();
}

Callers::Snapshot Callers::Look() const {
  Snapshot snapshot;
  const std::lock_guard lock(book_->mutex);
  snapshot.all = !book_->threads.empty();
  for (const auto& [thread, blocked] : book_->threads) {
    if (blocked) {
      snapshot.blocked.push_back(*blocked);
    } else {
      snapshot.all = false;
    }
  }
  return snapshot;
}

}  // namespace resilient::recovery
