#include "runtime/recovery/observer.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string_view>
#include <system_error>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/log.h"
#include "runtime/base/texts.h"
#include "runtime/base/thread.h"
#include "runtime/recovery/progress_meter.h"
#include "runtime/recovery/submitters.h"

namespace resilient {
namespace recovery {
namespace {

constexpr std::size_t kQuestionsMax = 64;
constexpr std::size_t kExpectationsMax = 64;
constexpr Duration kExpectationMax = std::chrono::hours(24);
constexpr std::size_t kWhatBytesMax = 256;
constexpr Duration kWatchCloseBound = std::chrono::seconds(3);
constexpr Duration kCloseMax = std::chrono::hours(1);  // Standard waits overflow on "never".

// Never 0, which stands for a frame that is not known.
std::uint64_t FrameOf(const ThreadStack& seen) {
  if (seen.top.empty() && seen.stack.empty()) return 0;
  const std::hash<std::string_view> hash;
  return (hash(seen.stack) * 31 + hash(seen.top)) | 1;
}

// Not in the midst of a character of UTF-8.
std::string Shortened(std::string text) {
  if (text.size() <= kWhatBytesMax) return text;
  std::size_t size = kWhatBytesMax;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) --size;
  text.resize(size);
  return text;
}

// The main thread where another one is told of, and has submitted operations as well.
bool TellsOfMainToo(const ProgramStacks& seen, const std::vector<int>& submitters) {
  return seen.submitter && std::ranges::find(submitters, seen.main.id) != submitters.end();
}

// What the operations of the program tell. Thread: thread-safe.
struct Noted {
  std::atomic<std::uint64_t> operations{0};
  Submitters submitters;
};

// What the program is announced to do. Thread: value type.
struct Expectation {
  std::string what;
  Instant until{};
};

// The observer's thread and all that it shares with its callers. Owner: Process, and the thread
// itself, as an answer may drop the last reference to the observer. Thread: thread-safe.
class Watch {
 public:
  Watch(const Clock& clock, const ObserverParts& parts, std::shared_ptr<const Noted> noted)
      : clock_(clock), parts_(parts), noted_(std::move(noted)) {}

  void Ask(const std::shared_ptr<Watch>& self, Observer::Answer answer);
  std::uint64_t Expect(std::string what, Duration at_most);
  void EndExpectation(std::uint64_t token);
  void Close(Deadline deadline);
  // REQUIRES: Close was called.
  void Join();

 private:
  void Run();
  bool HasThread(const std::shared_ptr<Watch>& self);
  void AwaitWork(std::unique_lock<std::mutex>* lock);
  Whereabouts Look();
  void LookAtProgram(Whereabouts* seen, ProgressSample* sample);
  void AddExpectation(Whereabouts* seen);

  const Clock& clock_;
  const ObserverParts parts_;
  const std::shared_ptr<const Noted> noted_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable ended_wake_;
  std::deque<Observer::Answer> questions_;             // Guarded by mutex_.
  std::map<std::uint64_t, Expectation> expectations_;  // Guarded by mutex_.
  std::uint64_t next_token_ = 1;                       // Guarded by mutex_.
  Instant asked_at_{};                                 // Guarded by mutex_.
  bool closing_ = false;                               // Guarded by mutex_.
  bool running_ = false;                               // Guarded by mutex_.
  Thread thread_;                                      // Guarded by mutex_ until closing_.

  // Of the thread alone.
  ProgressMeter meter_;
  Instant sampled_at_{};
  std::optional<ProgramStacks> last_seen_;
  Instant unseen_since_ = kNever;  // Since when the stacks could not be read.
};

void Watch::Ask(const std::shared_ptr<Watch>& self, Observer::Answer answer) {
  const std::lock_guard lock(mutex_);
  if (closing_ || questions_.size() >= kQuestionsMax || !HasThread(self)) return;
  questions_.push_back(std::move(answer));
  asked_at_ = clock_.Now();
  wake_.notify_all();
}

bool Watch::HasThread(const std::shared_ptr<Watch>& self) {
  if (thread_.Joinable()) return true;
  try {
    thread_ = Thread("res-observer", [self] { self->Run(); });
  } catch (const std::system_error& error) {
    RESILIENT_LOG(kWarn, "where the program is cannot be told: no thread can be made for it (",
                  error.what(), "); raise the limit of processes (ulimit -u) or of the container");
    return false;
  }
  running_ = true;
  return true;
}

std::uint64_t Watch::Expect(std::string what, Duration at_most) {
  const Instant now = clock_.Now();
  const std::lock_guard lock(mutex_);
  std::erase_if(expectations_, [now](const auto& entry) { return entry.second.until <= now; });
  if (expectations_.size() >= kExpectationsMax) return 0;
  const Duration length = std::clamp(at_most, Duration::zero(), kExpectationMax);
  expectations_[next_token_] = {Shortened(std::move(what)), now + length};
  return next_token_++;
}

void Watch::EndExpectation(std::uint64_t token) {
  const std::lock_guard lock(mutex_);
  expectations_.erase(token);
}

void Watch::Close(Deadline deadline) {
  std::deque<Observer::Answer> dropped;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    dropped.swap(questions_);
    wake_.notify_all();
  }
  dropped.clear();
  if (parts_.stacks != nullptr) parts_.stacks->Close(deadline);
  std::unique_lock lock(mutex_);
  if (thread_.IsCurrent()) return;
  const Duration left = std::min<Duration>(deadline.LeftAt(clock_.Now()), kCloseMax);
  ended_wake_.wait_for(lock, left, [this] { return !running_; });
}

void Watch::Join() {
  if (thread_.IsCurrent()) {
    thread_.Detach();  // An answer dropped the last reference; the thread ends after it.
  } else {
    thread_.Join();
  }
}

void Watch::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    AwaitWork(&lock);
    if (closing_) break;
    std::deque<Observer::Answer> questions;
    questions.swap(questions_);
    lock.unlock();
    Whereabouts seen = Look();
    lock.lock();
    const bool dropped = closing_;
    AddExpectation(&seen);
    lock.unlock();
    for (const Observer::Answer& answer : questions) {
      if (!dropped) answer(seen);
    }
    questions.clear();  // Without the mutex: this may end what asks, and the observer with it.
    lock.lock();
  }
  running_ = false;
  ended_wake_.notify_all();
}

void Watch::AwaitWork(std::unique_lock<std::mutex>* lock) {
  while (!closing_ && questions_.empty()) {
    const Instant next = NextSample(sampled_at_, asked_at_, parts_.sample_every);
    if (next == kNever) {
      wake_.wait(*lock);
      continue;
    }
    const Duration left = Deadline::At(next).LeftAt(clock_.Now());
    if (left == Duration::zero()) return;
    wake_.wait_for(*lock, left);
  }
}

Whereabouts Watch::Look() {
  Whereabouts seen;
  ProgressSample sample;
  if (parts_.stacks != nullptr) LookAtProgram(&seen, &sample);
  for (WatchedThread& thread : sample.threads)
    thread.cpu_seconds = parts_.seconds_of_thread(thread.id);
  const ProcessUsage usage = parts_.usage();
  sample.now = clock_.Now();
  sample.cpu_seconds = usage.cpu_seconds;
  sample.call_bytes = usage.call_bytes;
  sample.disk_bytes = usage.disk_bytes;
  sample.operations = noted_->operations.load(std::memory_order_relaxed);
  meter_.Take(sample);
  sampled_at_ = sample.now;
  seen.no_progress = meter_.no_progress();
  return seen;
}

void Watch::LookAtProgram(Whereabouts* seen, ProgressSample* sample) {
  const Instant began = clock_.Now();
  const std::vector<int> submitters = noted_->submitters.Latest();
  std::optional<ProgramStacks> stacks =
      parts_.stacks->Look(submitters, Deadline::After(began, parts_.look_bound));
  const bool read = stacks.has_value();
  if (read) {
    seen->threads = std::exchange(stacks->threads, std::nullopt);
    last_seen_ = std::move(stacks);
    unseen_since_ = kNever;
  } else {
    unseen_since_ = std::min(unseen_since_, began);
    seen->at =
        StrCat("native code holds the GIL for ", WholeSeconds(clock_.Now() - unseen_since_), " s");
  }
  if (!last_seen_) return;
  const ThreadStack& main = last_seen_->main;
  const ThreadStack& told = last_seen_->submitter ? *last_seen_->submitter : main;
  seen->thread = told.name;
  seen->stack = told.stack;
  seen->submitting.push_back(told);
  if (TellsOfMainToo(*last_seen_, submitters)) seen->submitting.push_back(main);
  if (read) {
    seen->at = told.top;
  } else if (!told.top.empty()) {
    seen->at += ", last seen at " + told.top;
  }
  sample->threads.push_back({.id = told.id, .frame = read ? FrameOf(told) : 0});
  if (last_seen_->submitter) {
    sample->threads.push_back({.id = main.id, .frame = read ? FrameOf(main) : 0});
  }
}

// REQUIRES: mutex_.
void Watch::AddExpectation(Whereabouts* seen) {
  const Instant now = clock_.Now();
  for (const auto& [token, expectation] : expectations_) {
    const Duration left = Deadline::At(expectation.until).LeftAt(now);
    if (left <= seen->expected_slow_for) continue;
    seen->expected_slow = expectation.what;
    seen->expected_slow_for = left;
  }
}

// What of an observer belongs to one process. Owner: ObserverImpl. Thread: immutable.
struct Process {
  ProcessMark mark;
  std::shared_ptr<Watch> watch;
};

class ObserverImpl final : public Observer {
 public:
  ObserverImpl(const Clock& clock, ObserverParts parts)
      : clock_(clock), parts_(std::move(parts)), process_(NewProcess().release()) {}

  ~ObserverImpl() override {
    const std::unique_ptr<Process> process(process_.load());
    if (process->mark.InChild()) {
      LeakInChild(std::move(process->watch));
      return;
    }
    process->watch->Close(Deadline::After(clock_.Now(), kWatchCloseBound));
    process->watch->Join();
  }

  void Ask(Answer answer) override {
    const std::shared_ptr<Watch>& watch = ThisWatch();
    watch->Ask(watch, std::move(answer));
  }
  void NoteOperation() override {
    noted_->operations.fetch_add(1, std::memory_order_relaxed);
    noted_->submitters.Note();
  }
  std::vector<int> Submitters() const override { return noted_->submitters.Latest(); }
  std::uint64_t Expect(std::string what, Duration at_most) override {
    return ThisWatch()->Expect(std::move(what), at_most);
  }
  void EndExpectation(std::uint64_t token) override { ThisWatch()->EndExpectation(token); }
  void Close(Deadline deadline) override { ThisWatch()->Close(deadline); }

 private:
  std::unique_ptr<Process> NewProcess() const {
    auto process = std::make_unique<Process>();
    process->watch = std::make_shared<Watch>(clock_, parts_, noted_);
    return process;
  }

  // In a forked child the parent's mutex may be held for ever and its thread does not exist: they
  // are left behind.
  const std::shared_ptr<Watch>& ThisWatch() {
    Process* process = process_.load();
    while (process->mark.InChild()) {
      std::unique_ptr<Process> fresh = NewProcess();
      if (process_.compare_exchange_strong(process, fresh.get())) process = fresh.release();
    }
    return process->watch;
  }

  const Clock& clock_;
  const ObserverParts parts_;
  const std::shared_ptr<Noted> noted_ = std::make_shared<Noted>();
  std::atomic<Process*> process_;
};

}  // namespace

std::shared_ptr<Observer> MakeObserverOf(const Clock& clock, ObserverParts parts) {
  RESILIENT_CHECK(parts.usage != nullptr);
  return std::make_shared<ObserverImpl>(clock, std::move(parts));
}

}  // namespace recovery

std::shared_ptr<Observer> MakeObserver(const Clock& clock, std::shared_ptr<StackSource> stacks) {
  recovery::ObserverParts parts;
  parts.stacks = std::move(stacks);
  parts.usage = &UsageWithoutOurOwn;
  return recovery::MakeObserverOf(clock, std::move(parts));
}

}  // namespace resilient
