#include <chrono>
#include <cstdint>
#include <string>

#include <c10/util/StringUtil.h>
#include <resilient/torch.h>
#include <resilient/torch_errors.h>

#include "torch_plugin/csrc/c10d_store.h"
#include "torch_plugin/csrc/convert.h"
#include "torch_plugin/csrc/native_ending.h"
#include "torch_plugin/csrc/world.h"

namespace resilient {
namespace {

// A rank that is late is waited for as long as it lives.
constexpr std::chrono::hours kLong{24 * 365};

}  // namespace

// The loop around an elastic function. Owner: a call of elastic. Thread: the caller's.
class ElasticRun {
 public:
  ElasticRun(State& state, int max_restarts, int min_world, int max_world)
      : state_(state),
        max_restarts_(max_restarts),
        min_world_(min_world),
        max_world_(max_world),
        context_(plugin::ValueOrThrow(*plugin::NativeHost(), plugin::ContextOf(state.world()))) {
    number_ = context_->whereabouts().BeginRun();
    state_.Observe([this] { Committed(); });
  }
  ~ElasticRun() {
    state_.Observe(nullptr);
    context_->whereabouts().EndRun();
  }
  ElasticRun(const ElasticRun&) = delete;
  ElasticRun& operator=(const ElasticRun&) = delete;

  void Run(const std::function<void(State&)>& fn) {
    while (true) {
      Status cause;
      try {
        context_->whereabouts().BeginAgain(number_);
        Enter();
        fn(state_);
        // Nobody leaves while a peer may still need this rank to finish.
        state_.world()->barrier()->wait();
        End();
        return;
      } catch (...) {
        if (state_.ThrownOnAll()) throw;  // A rank that ends by it is no loss to go on after.
        cause = Failure(CodeOfCurrentException());
        if (cause.ok()) {
          plugin::NoteException();
          throw;
        }
      }
      // Outside of the handler: the exception, and what it held, is gone by now.
      Recover(cause);
    }
  }

 private:
  void Enter() {
    state_.sync();
    context_->whereabouts().Entered();
    if (state_.commits() == 0) state_.commit();
    // From here on commit 1 is complete, and only then may a rank change its values.
    state_.world()->barrier()->wait();
    state_.NoteBegun();
  }

  // All ranks end the run, or none does: a barrier that a failure meets ends on some only, and
  // these would be in what comes next while the others are in this run again.
  void End() {
    const std::uint64_t generation = context_->session().membership().generation;
    const std::string key = c10::str("elastic/", generation, "/", number_);
    const ProcessGroup world = state_.world();
    const auto store =
        plugin::ValueOrThrow(*context_->host(), plugin::ResilientStore::OfSession(context_, kLong));
    try {
      store->Agree(key, world->getRank(), world->getSize(), "end", generation, kLong);
    } catch (const StoreError& error) {
      if (error.status().code() != StatusCode::kStoreLost) throw;  // The result needs no store.
    }
    state_.EndRun();
  }

  void Committed() const {
    if (max_world_ <= state_.world()->getSize()) return;
    const auto commit = static_cast<std::uint64_t>(state_.commits());
    plugin::Check(*context_->host(), context_->session().OfferRoom(max_world_, commit));
  }

  // Of one of ours; kOk: it is another one.
  static StatusCode CodeOfCurrentException() {
    try {
      throw;
    } catch (const BackendError& error) {
      return error.status().code();
    } catch (...) {
      return StatusCode::kOk;
    }
  }

  // The session's failure, whatever exception it reached the program as; OK when there is none or
  // it is a bug. An operation may end by `raised` long before the store's word of it is here.
  Status Failure(StatusCode raised) const {
    const Duration grace =
        plugin::EndsGeneration(raised) ? context_->ladder().answer : plugin::kFenceGrace;
    Status cause =
        context_->session().AwaitFailure(Deadline::After(context_->clock().Now(), grace));
    return plugin::RetriedByElastic(cause.code()) ? cause : Status::Ok();
  }

  void Recover(const Status& first) {
    CountRestart(first);
    while (true) {
      const Status rebuilt = plugin::RebuildWorld(state_.world(), std::nullopt, min_world_);
      if (rebuilt.ok()) return;
      const bool retried =
          rebuilt.code() != StatusCode::kTimeout && plugin::RetriedByElastic(rebuilt.code());
      if (Over() || !retried) context_->host()->Throw(rebuilt);
      CountRestart(rebuilt);  // Lost another rank meanwhile.
    }
  }

  bool Over() const {
    const SessionState now = context_->session().membership().state;
    return now == SessionState::kFenced || now == SessionState::kFailed ||
           now == SessionState::kClosed;
  }

  void CountRestart(const Status& cause) {
    if (state_.commits() > commits_seen_) restarts_ = 0;
    commits_seen_ = state_.commits();
    if (++restarts_ > max_restarts_) context_->host()->Throw(cause);
  }

  State& state_;
  const int max_restarts_;
  const int min_world_;
  const int max_world_;
  const std::shared_ptr<plugin::SessionContext> context_;
  std::int64_t number_ = 0;  // Of the run.
  std::int64_t commits_seen_ = 0;
  int restarts_ = 0;
};

void elastic(State& state, const std::function<void(State&)>& fn, int max_restarts, int min_world,
             int max_world) {
  plugin::Check(*plugin::NativeHost(), plugin::CheckMinWorld(min_world));
  plugin::Check(*plugin::NativeHost(), plugin::CheckMaxWorld(max_world));
  ElasticRun(state, max_restarts, min_world, max_world).Run(fn);
}

}  // namespace resilient
