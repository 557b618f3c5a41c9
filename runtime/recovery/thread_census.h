#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/clock.h>
#include <resilient/whereabouts.h>

namespace resilient::recovery {

// What a thread of this process does at one moment, as the kernel shows it. Thread: value type.
struct ThreadSample {
  // The call that it sleeps in.
  struct Call {
    long number = -1;
    std::uint64_t arguments[6] = {};
    bool of_own_memory = false;  // A futex that lies in memory of this process alone.
  };
  int id = 0;
  std::string name;            // At most 15 characters.
  std::optional<Call> call;    // nullopt: it runs, or is about to.
  std::uint64_t switches = 0;  // How often it has been taken off a processor; grows when it runs.
};

// All threads, and what else may run code of the program. Thread: value type.
struct ProcessSample {
  std::vector<ThreadSample> threads;
  std::string timer;  // "a handler of SIGALRM runs in 3 s at the latest"; empty: none is set.
};

// What is known of the threads of a program that an interpreter runs.
struct ProgramThreads {
  std::vector<ProgramThread> run_code;  // Those that the interpreter knows.
  std::vector<int> present;             // All there were when that was asked, ascending.
};

// What follows from one look at all threads. Thread: value type.
struct Census {
  // A thread that may submit an operation though none in flight ends: "thread 'worker' (tid 7,
  // train.py:12 prepare) sleeps until a time has come (clock_nanosleep)". Empty: there is none.
  std::string may_act;
  // Stands for all threads that sleep until another one wakes them, and for how often each has run.
  // The same in two looks: none of them has run in between.
  std::uint64_t token = 0;
  // What the interpreter knows of its threads would tell more.
  bool wants_program_threads = false;
};

// "230 0x0 0x1 0x0 0x0 0x0 0x0 0x7ffc 0x7f01", as /proc/<pid>/task/<tid>/syscall has it; nullopt:
// "running", or nothing that can be read. Pure.
std::optional<ThreadSample::Call> ParseCall(std::string_view text);

// Who may still act, of all threads but those in `blocked` (ascending): these are blocked in
// operations of ours. `program` may be null: a program that no interpreter runs, or not known yet.
//
// A thread that sleeps without a time on a futex of this process alone is parked: only a thread of
// this process can wake it, so it acts no sooner than another one does. Every other
// thread may act: it runs, it sleeps until a time has come, or it waits for something from outside.
// No actors are
//  - threads of ours, but those that run callbacks of the program,
//  - where the interpreter's threads are known, others that wait for something from outside: they
//    belong to libraries (drivers, servers), and count as parked, so that one that has run is
//    noticed,
//  - loops of libraries that submit nothing (ProgramThread::housekeeping). Pure.
Census JudgeThreads(const ProcessSample& process, const std::vector<int>& blocked,
                    const ProgramThreads* program);

// Looks at the threads of this process by /proc/self/task. Reads some ten microseconds a thread,
// and never waits. Where the system does not show what a thread sleeps in, each counts as running.
// Owner: SessionImpl. Thread: confined to the control thread.
class ThreadCensus {
 public:
  using Sampler = std::function<ProcessSample()>;
  explicit ThreadCensus(Sampler sample);
  ThreadCensus();

  // What was seen less than kCensusLife ago is said again while the same threads are blocked.
  Census Look(const std::vector<int>& blocked, Instant now);

  // When Census::wants_program_threads is to be followed: once a second at most.
  bool MayAsk(Instant now);
  // The answer to what was asked last, which counts for kProgramLife: the kernel gives the ids of
  // threads that have ended to others. nullopt: not known.
  void Learn(std::optional<std::vector<ProgramThread>> threads, Instant now);

 private:
  Sampler sample_;
  std::optional<Census> latest_;
  std::vector<int> latest_blocked_;
  Instant looked_ = Instant::min();
  Instant asked_ = Instant::min();
  std::vector<int> present_;        // At the latest look.
  std::vector<int> asked_present_;  // At the latest question.
  std::optional<ProgramThreads> program_;
  Instant learned_ = Instant::min();
};

inline constexpr Duration kCensusLife = Millis(200);
inline constexpr Duration kProgramLife = Millis(2500);

// This process, without the calling thread, which is ours.
ProcessSample SampleProcess();

}  // namespace resilient::recovery
