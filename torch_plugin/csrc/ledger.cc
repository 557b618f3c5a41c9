#include "torch_plugin/csrc/ledger.h"

#include <string>
#include <utility>

namespace resilient::plugin {

Result<std::uint64_t> Ledger::Add(WorkPtr work) {
  const std::lock_guard lock(mutex_);
  if (in_flight_.size() + retired_.size() >= kMaxWorks) {
    return Status(StatusCode::kResourceExhausted,
                  std::to_string(kMaxWorks) +
                      " operations are in flight in this process: wait for some of them (the Work "
                      "that async_op=True returned has wait()) before more are started");
  }
  return AddLocked(std::move(work));
}

std::uint64_t Ledger::AddRunning(WorkPtr work) {
  const std::lock_guard lock(mutex_);
  return AddLocked(std::move(work));
}

std::uint64_t Ledger::AddLocked(WorkPtr work) {
  // Room in retired_ is made here, so that Retire never allocates.
  retired_.reserve(retired_.size() + in_flight_.size() + 1);
  const std::uint64_t id = next_id_++;
  in_flight_.emplace(id, std::move(work));
  return id;
}

void Ledger::Retire(std::uint64_t id) {
  WorkPtr released;  // Destroyed after the lock.
  const std::lock_guard lock(mutex_);
  auto node = in_flight_.extract(id);
  if (node.empty()) return;
  if (closed_) {
    released = std::move(node.mapped());
    return;
  }
  retired_.push_back(std::move(node.mapped()));
  any_retired_.store(true, std::memory_order_release);
}

void Ledger::Drain() {
  if (!any_retired_.load(std::memory_order_acquire)) return;
  std::vector<WorkPtr> released;  // Destroyed after the lock: a destructor may run Python code.
  const std::lock_guard lock(mutex_);
  released.swap(retired_);
  any_retired_.store(false, std::memory_order_relaxed);
}

void Ledger::Close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  Drain();
}

std::vector<Ledger::WorkPtr> Ledger::InFlight() const {
  std::vector<WorkPtr> works;
  const std::lock_guard lock(mutex_);
  works.reserve(in_flight_.size());
  for (const auto& [id, work] : in_flight_) works.push_back(work);
  return works;
}

std::size_t Ledger::size() const {
  const std::lock_guard lock(mutex_);
  return in_flight_.size() + retired_.size();
}

}  // namespace resilient::plugin
