#include "torch_plugin/csrc/callback_queue.h"

#include <exception>
#include <optional>
#include <utility>

#include <ATen/core/jit_type.h>
#include <c10/core/DeviceGuard.h>

#include "torch_plugin/csrc/context.h"

namespace resilient::plugin {
namespace {

thread_local const CallbackQueue::Running* innermost = nullptr;

}  // namespace

CallbackQueue::Running::Running(const std::shared_ptr<CallbackQueue>& queue)
    : queue_(queue),
      epoch_([&] {
        const std::lock_guard lock(queue->mutex_);
        return queue->epoch_;
      }()),
      outer_(std::exchange(innermost, this)) {}

CallbackQueue::Running::~Running() { innermost = outer_; }

const CallbackQueue::Running* CallbackQueue::Running::Innermost() { return innermost; }

CallbackQueue::CallbackQueue(const std::shared_ptr<SessionContext>& context, std::string name,
                             int depth)
    : context_(context), name_(std::move(name)), depth_(depth) {
  context->finisher()->ChangeLimit(1);  // While its callback waits, others need their threads.
}

CallbackQueue::~CallbackQueue() {
  if (const auto context = context_.lock()) context->finisher()->ChangeLimit(-1);
}

CallbackQueue::FuturePtr CallbackQueue::TurnAfter(const c10::ivalue::Future& future) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get(), future.devices());
}

Status CallbackQueue::Add(FuturePtr future, FuturePtr turn) {
  const auto context = context_.lock();
  if (!context) {  // All of the session has ended, and so has the future.
    turn->markCompleted();
    return Status::Ok();
  }
  RESILIENT_RETURN_IF_ERROR(context->finisher()->Start());
  c10::ivalue::Future& awaited = *future;
  Entry entry{.future = std::move(future),
              .turn = std::move(turn),
              .state = at::ThreadLocalState(),
              .epoch = context->session().epoch()};
  bool is_front = false;
  {
    const std::lock_guard lock(mutex_);
    is_front = entries_.empty();
    entries_.push_back(std::move(entry));
  }
  if (is_front) RunWhenCompleted(awaited);
  return Status::Ok();
}

// The front's. The callback of torch's future is ours alone: it may run on any thread, here too.
void CallbackQueue::RunWhenCompleted(c10::ivalue::Future& future) {
  const auto post = [self = shared_from_this()](c10::ivalue::Future& /*future*/) {
    const auto context = self->context_.lock();
    if (!context) return self->RunCompleted();
    context->finisher()->Post([self] { self->RunCompleted(); });
  };
  future.addCallback(post, /*uses_future=*/false);
}

// The front has completed: it, and all behind it that have.
void CallbackQueue::RunCompleted() {
  const auto context = context_.lock();
  // Their callbacks belong to an interpreter that is gone.
  if (context && context->host()->Ending()) return;
  while (true) {
    Entry* front = nullptr;  // Nobody else takes it out, and a deque grows around it.
    {
      const std::lock_guard lock(mutex_);
      front = &entries_.front();
      epoch_ = front->epoch;
    }
    Run(*front);
    FuturePtr next;
    {
      std::optional<Entry> done;  // Destroyed without the lock.
      const std::lock_guard lock(mutex_);
      done.emplace(std::move(*front));
      entries_.pop_front();
      if (!entries_.empty()) next = entries_.front().future;
    }
    if (!next) return;
    if (!next->completed()) return RunWhenCompleted(*next);
  }
}

void CallbackQueue::Run(const Entry& entry) {
  try {
    const at::ThreadLocalStateGuard state(entry.state);
    c10::OptionalDeviceGuard device;
    if (!entry.future->devices().empty()) device.reset_device(entry.future->devices().front());
    entry.future->wait();  // This thread's streams go on behind what it carries.
    entry.turn->markCompleted();
  } catch (const std::exception& error) {
    TORCH_WARN("a callback of a future of group '", name_, "' raised: ", error.what());
  }
}

}  // namespace resilient::plugin
