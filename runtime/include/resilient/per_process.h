#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace resilient {

// The identity of the process that made an object: tells a forked child from its parent. Thread:
// immutable.
class ProcessMark {
 public:
  ProcessMark();
  // True in a child (of any depth) of the process that made this object. One load;
  // async-signal-safe.
  bool InChild() const;

 private:
  unsigned long fork_count_;
};

// What each process has one of, and a forked child one of its own. Of what a child inherits the
// threads are not there, the descriptors are closed and their numbers may be files of the program's
// by now, and a lock may be held for ever by a thread that is not there. So each static that owns
// any of these is a PerProcess; tests/tidy.py has a rule for it, `static`.
//
// How it works: the first Get in a process makes the object. In a child the parent's is left as it
// is, untouched and reachable, and the first Get makes another one. Nothing in here takes a lock,
// because a fork may happen while another thread is in here. Threads that race for the first Get
// make an object each and delete it again but for one; so making and deleting one has no effect
// that others see, but that of registering a handler that finds the object by Present.
//
// Owner: whoever declares it, as a static and constinit, so that no order of initialisation
// matters. Thread: thread-safe; Present is async-signal-safe. Lifetime: neither it nor an object is
// ever destroyed, because threads and exit handlers use them until the end of the process.
template <typename T>
class PerProcess {
 public:
  constexpr PerProcess() = default;
  PerProcess(const PerProcess&) = delete;
  PerProcess& operator=(const PerProcess&) = delete;

  // The object of this process; made here where there is none yet.
  T& Get() {
    return Get([] { return std::make_unique<T>(); });
  }
  // The same; `make` returns it as a std::unique_ptr<T>.
  template <typename Make>
  T& Get(const Make& make) {
    Entry* present = current_.load(std::memory_order_acquire);
    while (present == nullptr || present->mark.InChild()) {
      auto mine = std::make_unique<Entry>(make(), present);
      if (current_.compare_exchange_strong(present, mine.get(), std::memory_order_acq_rel)) {
        present = mine.release();
      }
    }
    return *present->object;
  }
  // The same; null as long as this process has none.
  T* Present() const {
    const Entry* const present = current_.load(std::memory_order_acquire);
    return present == nullptr || present->mark.InChild() ? nullptr : present->object.get();
  }

 private:
  struct Entry {
    Entry(std::unique_ptr<T> made, const Entry* before)
        : object(std::move(made)), parents(before) {}

    const ProcessMark mark;
    const std::unique_ptr<T> object;
    const Entry* const parents;  // Null where the parent had none.
  };

  std::atomic<Entry*> current_{nullptr};
};

}  // namespace resilient
