#include "runtime/recovery/submitters.h"

#include <unistd.h>

#include <algorithm>

#include "runtime/base/fork_guard.h"

namespace resilient::recovery {
namespace {

// To ask the kernel takes longer than all the rest of Note. In a forked child the thread has
// another id.
struct Self {
  ProcessMark mark;
  int id = gettid();
};

int ThisThread() {
  thread_local Self self;
  if (self.mark.InChild()) self = Self();
  return self.id;
}

}  // namespace

void Submitters::Note() {
  const int id = ThisThread();
  const std::uint64_t count = count_.load(std::memory_order_relaxed);
  const std::size_t latest = (count + kSubmittersKept - 1) % kSubmittersKept;
  if (changes_[latest].load(std::memory_order_relaxed) == id) return;
  const std::uint64_t mine = count_.fetch_add(1, std::memory_order_relaxed);
  changes_[mine % kSubmittersKept].store(id, std::memory_order_relaxed);
}

std::vector<int> Submitters::Latest() const {
  std::vector<int> latest;
  const std::uint64_t count = count_.load(std::memory_order_relaxed);
  for (std::uint64_t back = 1; back <= kSubmittersKept; ++back) {
    const std::size_t slot = (count + kSubmittersKept - back) % kSubmittersKept;
    const int id = changes_[slot].load(std::memory_order_relaxed);
    if (id != 0 && std::find(latest.begin(), latest.end(), id) == latest.end())
      latest.push_back(id);
  }
  return latest;
}

}  // namespace resilient::recovery
