#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include <resilient/whereabouts.h>

#include "torch_plugin/csrc/python/frames.h"

namespace resilient::plugin {

// What the threads of the interpreter do at this moment: StackSource::Look, without a wait.
// `main_thread`: as threading.get_ident() has it. Runs no Python code. REQUIRES: the interpreter's
// lock, which is kept.
ProgramStacks DescribeProgram(const FrameNames& frames, unsigned long main_thread,
                              const std::vector<int>& submitters);

// The stacks of Python's threads. To wait for the interpreter's lock has no bound, so a thread
// of its own does it, "res-gil": started by the first Look, one at most. When a try is still
// waiting at the deadline, the next Look waits for that same try.
//
// Owner: the observer. Thread: as StackSource. Lifetime: Close before the interpreter shuts down;
// the thread is left to itself when it waits for the lock even then, and owns what it uses.
class PythonStacks final : public StackSource {
 public:
  // REQUIRES: the interpreter's lock. `main_thread`: as threading.get_ident() has it.
  PythonStacks(std::shared_ptr<const FrameNames> frames, unsigned long main_thread);
  ~PythonStacks() override;

  std::optional<ProgramStacks> Look(const std::vector<int>& submitters, Deadline deadline) override;
  void Close(Deadline deadline) override;

 private:
  struct Shared;
  struct Process;

  std::unique_ptr<Process> NewProcess() const;
  const std::shared_ptr<Shared>& OfThisProcess();

  const std::shared_ptr<const FrameNames> frames_;
  const unsigned long main_thread_;
  const SystemClock clock_;
  std::atomic<Process*> process_;
};

}  // namespace resilient::plugin
