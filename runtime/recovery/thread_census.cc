#include "runtime/recovery/thread_census.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/numbers.h"

namespace resilient::recovery {
namespace {

constexpr Duration kAskInterval = Millis(900);
constexpr std::size_t kThreadsMax = 4096;

enum class Sleep : std::uint8_t {
  kParked,   // Until another thread of this process wakes it.
  kTimed,    // Until a time has come, at the latest.
  kOutside,  // Until something comes from outside.
  kOther,
};

struct NamedCall {
  long number;
  const char* name;
  Sleep sleep;
};

// The calls in which threads are found; the kernel has not all of them on each machine.
constexpr NamedCall kCalls[] = {
    {SYS_futex, "futex", Sleep::kTimed},
    {SYS_nanosleep, "nanosleep", Sleep::kTimed},
    {SYS_clock_nanosleep, "clock_nanosleep", Sleep::kTimed},
    {SYS_restart_syscall, "restart_syscall", Sleep::kTimed},
#ifdef SYS_poll
    {SYS_poll, "poll", Sleep::kOutside},
#endif
#ifdef SYS_select
    {SYS_select, "select", Sleep::kOutside},
#endif
#ifdef SYS_epoll_wait
    {SYS_epoll_wait, "epoll_wait", Sleep::kOutside},
#endif
#ifdef SYS_accept
    {SYS_accept, "accept", Sleep::kOutside},
#endif
    {SYS_ppoll, "ppoll", Sleep::kOutside},
    {SYS_pselect6, "pselect6", Sleep::kOutside},
    {SYS_epoll_pwait, "epoll_pwait", Sleep::kOutside},
    {SYS_read, "read", Sleep::kOutside},
    {SYS_readv, "readv", Sleep::kOutside},
    {SYS_recvfrom, "recvfrom", Sleep::kOutside},
    {SYS_recvmsg, "recvmsg", Sleep::kOutside},
    {SYS_accept4, "accept4", Sleep::kOutside},
    {SYS_wait4, "wait4", Sleep::kOutside},
    {SYS_waitid, "waitid", Sleep::kOutside},
    {SYS_rt_sigtimedwait, "rt_sigtimedwait", Sleep::kOutside},
    {SYS_write, "write", Sleep::kOutside},
    {SYS_ioctl, "ioctl", Sleep::kOutside},
};

const NamedCall* Find(long number) {
  const auto* found = std::find_if(std::begin(kCalls), std::end(kCalls),
                                   [number](const NamedCall& one) { return one.number == number; });
  return found == std::end(kCalls) ? nullptr : found;
}

// Of the arguments of futex.
constexpr std::size_t kOperation = 1;
constexpr std::size_t kTimeout = 3;

bool IsUntimedFutex(const ThreadSample::Call& call) {
  if (call.number != SYS_futex || call.arguments[kTimeout] != 0) return false;
  const std::uint64_t command =
      call.arguments[kOperation] & static_cast<std::uint64_t>(FUTEX_CMD_MASK);
  return command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET || command == FUTEX_LOCK_PI ||
         command == FUTEX_LOCK_PI2;
}

// Not all that could be marked as private is: not pthread_join, nor std::future.
bool IsParked(const ThreadSample::Call& call) {
  const bool marked = (call.arguments[kOperation] & FUTEX_PRIVATE_FLAG) != 0;
  return IsUntimedFutex(call) && (marked || call.of_own_memory);
}

Sleep SleepOf(const ThreadSample::Call& call) {
  if (IsParked(call)) return Sleep::kParked;
  const NamedCall* known = Find(call.number);
  return known == nullptr ? Sleep::kOther : known->sleep;
}

std::string SleepText(const ThreadSample& thread, Sleep sleep) {
  if (!thread.call) return "runs";
  const NamedCall* known = Find(thread.call->number);
  const std::string name =
      known == nullptr ? StrCat("system call ", thread.call->number) : known->name;
  switch (sleep) {
    case Sleep::kTimed:
      if (thread.call->number == SYS_futex && thread.call->arguments[kTimeout] == 0) {
        return "waits for another process (futex)";
      }
      return StrCat("sleeps until a time has come (", name, ")");
    case Sleep::kOutside:
      return StrCat("waits for something from outside (", name, ")");
    case Sleep::kParked:
    case Sleep::kOther:
      break;
  }
  return StrCat("is in ", name);
}

// Threads of ours in which no code of the program runs. Threads that the program starts inherit the
// name of the thread that starts them, so those that run callbacks are left out: while they have
// none they are parked.
bool IsOurs(const ThreadSample& thread) {
  return thread.name.starts_with("res-") && thread.name != "res-callback" &&
         thread.name != "res-events";
}

// They wake up several times a second to look for something, and run nothing of the program's.
bool IsOfDriver(const ThreadSample& thread) { return thread.name.starts_with("cuda"); }

const ProgramThread* FindThread(const std::vector<ProgramThread>& threads, int id) {
  const auto found = std::find_if(threads.begin(), threads.end(),
                                  [id](const ProgramThread& one) { return one.id == id; });
  return found == threads.end() ? nullptr : &*found;
}

std::string Text(const ThreadSample& thread, Sleep sleep, const ProgramThread* known) {
  const bool named = known != nullptr && !known->name.empty();
  return StrCat("thread '", named ? known->name : thread.name, "' (tid ", thread.id,
                known == nullptr || known->at.empty() ? "" : ", ",
                known == nullptr ? "" : known->at, ") ", SleepText(thread, sleep));
}

// FNV-1a.
void Mix(std::uint64_t value, std::uint64_t* digest) {
  for (int shift = 0; shift < 64; shift += 8) {
    *digest = (*digest ^ ((value >> shift) & 0xff)) * 0x100000001b3U;
  }
}

// The start of a file of /proc; empty: it is not there (any more).
std::string ReadStart(int directory, const std::string& path) {
  const int file = openat(directory, path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  std::array<char, 4096> buffer;
  const ssize_t size = read(file, buffer.data(), buffer.size());
  close(file);
  return size <= 0 ? std::string() : std::string(buffer.data(), static_cast<std::size_t>(size));
}

std::uint64_t SwitchesIn(std::string_view status) {
  std::uint64_t sum = 0;
  for (const std::string_view key :
       {"\nvoluntary_ctxt_switches:\t", "\nnonvoluntary_ctxt_switches:\t"}) {
    const std::size_t at = status.find(key);
    if (at == std::string_view::npos) continue;
    const std::string_view rest = status.substr(at + key.size());
    sum += ParseNumber<std::uint64_t>(rest.substr(0, rest.find('\n'))).value_or(0);
  }
  return sum;
}

// Which futexes lie in mappings that are private to this process.
void MarkOwnMemory(std::vector<ThreadSample>* threads) {
  std::vector<ThreadSample::Call*> unmarked;
  for (ThreadSample& thread : *threads) {
    if (thread.call && IsUntimedFutex(*thread.call) && !IsParked(*thread.call)) {
      unmarked.push_back(&*thread.call);
    }
  }
  if (unmarked.empty()) return;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    const char* const last = line.data() + line.size();
    const auto first = std::from_chars(line.data(), last, begin, 16);
    if (first.ec != std::errc() || first.ptr == last) continue;
    const auto second = std::from_chars(first.ptr + 1, last, end, 16);
    // "7f00-7f08 rw-p": p is private.
    if (second.ec != std::errc() || last - second.ptr < 5 || second.ptr[4] != 'p') continue;
    for (ThreadSample::Call* call : unmarked) {
      if (call->arguments[0] >= begin && call->arguments[0] < end) call->of_own_memory = true;
    }
  }
}

// Empty: no timer of the program will run a handler.
std::string TimerText() {
  itimerval timer{};
  if (getitimer(ITIMER_REAL, &timer) != 0) return {};
  if (timer.it_value.tv_sec == 0 && timer.it_value.tv_usec == 0) return {};
  struct sigaction action {};
  if (sigaction(SIGALRM, nullptr, &action) != 0) return {};
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return {};
  return StrCat("a handler of SIGALRM runs in ", timer.it_value.tv_sec + 1, " s at the latest");
}

}  // namespace

std::optional<ThreadSample::Call> ParseCall(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  ThreadSample::Call call;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = std::from_chars(at, end, call.number);
  if (number.ec != std::errc() || call.number < 0) return std::nullopt;
  at = number.ptr;
  for (std::uint64_t& argument : call.arguments) {
    if (end - at < 4 || std::string_view(at, 3) != " 0x") return std::nullopt;
    const auto read = std::from_chars(at + 3, end, argument, 16);
    if (read.ec != std::errc()) return std::nullopt;
    at = read.ptr;
  }
  return call;
}

Census JudgeThreads(const ProcessSample& process, const std::vector<int>& blocked,
                    const ProgramThreads* program) {
  Census census;
  census.token = 0xcbf29ce484222325U;
  for (const ThreadSample& thread : process.threads) {
    if (std::binary_search(blocked.begin(), blocked.end(), thread.id)) continue;
    const bool asleep = thread.call.has_value();
    const Sleep sleep = asleep ? SleepOf(*thread.call) : Sleep::kOther;
    if (IsOurs(thread) || IsOfDriver(thread)) continue;
    const ProgramThread* known =
        program == nullptr ? nullptr : FindThread(program->run_code, thread.id);
    if (known != nullptr && known->housekeeping) continue;
    const bool of_library =
        program != nullptr && known == nullptr && sleep == Sleep::kOutside &&
        std::binary_search(program->present.begin(), program->present.end(), thread.id);
    if (sleep == Sleep::kParked || of_library) {
      Mix(static_cast<std::uint64_t>(thread.id), &census.token);
      Mix(thread.switches, &census.token);
      continue;
    }
    // The one that sleeps says more than one that happens to run.
    if (census.may_act.empty() || (asleep && census.may_act.ends_with(" runs"))) {
      census.may_act = Text(thread, sleep, known);
    }
    census.wants_program_threads = true;
  }
  if (census.may_act.empty() && !process.timer.empty()) {
    census.may_act = process.timer;
    census.wants_program_threads = true;
  }
  return census;
}

ThreadCensus::ThreadCensus(Sampler sample) : sample_(std::move(sample)) {}
ThreadCensus::ThreadCensus() : ThreadCensus(&SampleProcess) {}

Census ThreadCensus::Look(const std::vector<int>& blocked, Instant now) {
  if (latest_ && latest_blocked_ == blocked && now - looked_ < kCensusLife) return *latest_;
  const ProcessSample process = sample_();
  present_.clear();
  for (const ThreadSample& thread : process.threads) present_.push_back(thread.id);
  std::sort(present_.begin(), present_.end());
  if (program_ && now - learned_ > kProgramLife) program_.reset();
  latest_ = JudgeThreads(process, blocked, program_ ? &*program_ : nullptr);
  latest_blocked_ = blocked;
  looked_ = now;
  return *latest_;
}

bool ThreadCensus::MayAsk(Instant now) {
  if (asked_ != Instant::min() && now - asked_ < kAskInterval) return false;
  asked_ = now;
  asked_present_ = present_;
  return true;
}

void ThreadCensus::Learn(std::optional<std::vector<ProgramThread>> threads, Instant now) {
  learned_ = now;
  latest_.reset();
  program_.reset();
  if (threads) program_ = ProgramThreads{std::move(*threads), asked_present_};
}

ProcessSample SampleProcess() {
  ProcessSample process{.threads = {}, .timer = TimerText()};
  std::vector<ThreadSample>& threads = process.threads;
  const ThreadSample unknown{.id = 0, .name = "unknown", .call = {}, .switches = 0};
  DIR* directory = opendir("/proc/self/task");
  if (directory == nullptr) {
    threads.push_back(unknown);
    return process;
  }
  const int at = dirfd(directory);
  const int self = gettid();
  while (const dirent* entry = readdir(directory)) {
    const auto id = ParseNumber<int>(entry->d_name);
    if (!id || *id == self) continue;
    if (threads.size() >= kThreadsMax) {
      threads.push_back(unknown);
      break;
    }
    const std::string path = StrCat(*id, "/");
    ThreadSample thread;
    thread.id = *id;
    // Before and after: a thread that has run in between may be anywhere.
    const std::uint64_t before = SwitchesIn(ReadStart(at, path + "status"));
    thread.call = ParseCall(ReadStart(at, path + "syscall"));
    const std::string status = ReadStart(at, path + "status");
    if (status.empty()) continue;  // It has ended.
    thread.switches = SwitchesIn(status);
    if (thread.switches != before) thread.call.reset();
    thread.name = ReadStart(at, path + "comm");
    while (!thread.name.empty() && thread.name.back() == '\n') thread.name.pop_back();
    threads.push_back(std::move(thread));
  }
  closedir(directory);
  MarkOwnMemory(&threads);
  std::sort(threads.begin(), threads.end(),
            [](const ThreadSample& a, const ThreadSample& b) { return a.id < b.id; });
  return process;
}

}  // namespace resilient::recovery
