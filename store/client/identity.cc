#include "store/client/identity.h"

#include <atomic>
#include <memory>
#include <string>

#include "runtime/base/fork_guard.h"
#include "runtime/base/process.h"
#include "runtime/base/random.h"

namespace resilient::store {
namespace {

// The id of one process; a forked child makes its own and keeps its parent's alive behind it.
struct IncarnationEntry {
  ProcessMark mark;
  std::string id;
  const IncarnationEntry* parent = nullptr;
};

std::atomic<const IncarnationEntry*> this_incarnation{nullptr};

}  // namespace

std::string NewSessionId() { return RandomHexId(); }

// Without a lock, because a fork may happen while another thread is in here.
std::string ThisIncarnation() {
  const IncarnationEntry* present = this_incarnation.load(std::memory_order_acquire);
  while (present == nullptr || present->mark.InChild()) {
    auto fresh = std::make_unique<IncarnationEntry>();
    fresh->id = RandomHexId();
    fresh->parent = present;
    if (this_incarnation.compare_exchange_strong(present, fresh.get(), std::memory_order_acq_rel)) {
      present = fresh.release();
    }
  }
  return present->id;
}

Hello MakeHello(const ConnectOptions& options, Role role) {
  Hello hello;
  hello.job = options.job;
  hello.session = options.session.empty() ? NewSessionId() : options.session;
  hello.incarnation = options.incarnation.empty() ? ThisIncarnation() : options.incarnation;
  hello.role = role;
  hello.process = ThisProcess();
  hello.launcher_attempt = options.launcher_attempt;
  hello.supervised = options.supervised;
  hello.expected_server = options.expected_server;
  hello.hosts_store = options.hosts_store;
  if (role == Role::kControl) {
    hello.leased_key = options.leased_key;
    hello.leased_value = options.leased_value;
  }
  return hello;
}

}  // namespace resilient::store
