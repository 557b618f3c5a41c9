#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <resilient/clock.h>
#include <resilient/launch_mark.h>
#include <resilient/status.h>

#include "runtime/comm/group_port.h"
#include "runtime/comm/nccl_events.h"
#include "runtime/comm/nccl_loop.h"
#include "runtime/comm/nccl_watch.h"

namespace resilient {

// Whether this runtime has what it takes to follow operations into a graph: without it nobody could
// tell when the communicator may be freed.
bool CanCapture(const CudaApi& cuda);

// The capture that `stream` is part of; 0: it is not captured. Never 0 while it is, also where
// CanCapture is false. Not kSuccess: it is not known whether it is.
CudaResult CaptureOf(const CudaApi& cuda, CudaStreamHandle stream, std::uint64_t* capture);

// A graph with operations of a communicator, until CUDA has destroyed it and all that was
// instantiated of it. Owner: shared by the operations and by CUDA. Thread: thread-safe.
class HeldGraph;

// The operations of one communicator that are in graphs of CUDA.
//
// They are launched once, into the capture, on a stream of their own that takes part in it, and run
// by each replay, of which nobody is told. So each lies between two events that every replay
// records anew: between them it runs, and the time of the first tells one replay from the next. An
// event speaks of the latest launch of its graph: while one waits behind another, nothing shows.
//
// An operation is over for its caller when the capture is. What it is remembered by, and its
// events, stay until the graph is gone.
//
// Owner: NcclGroup. Thread: loop-confined.
class NcclCaptures {
 public:
  // In live graphs, of one communicator.
  static constexpr std::size_t kMaxOperations = 1u << 16;

  // One in which a replay is, or a batch.
  struct Replay {
    std::uint64_t number = 0;  // Among all that were captured, from 1.
    ReplayPlace place;
    SubmittedOp op;  // What is known of it: no memory. Its bounds count from `since`.
    Instant since{};
  };

  // `is_high_priority`: of its stream.
  NcclCaptures(const CudaApi& cuda, bool is_high_priority, std::shared_ptr<NcclEvents> pool,
               std::shared_ptr<NcclEvents> timed, std::shared_ptr<const Doorbell> doorbell);
  ~NcclCaptures();
  NcclCaptures(const NcclCaptures&) = delete;
  NcclCaptures& operator=(const NcclCaptures&) = delete;

  // Puts `ops`, one or a batch, behind what their stream has captured. `outside`: a stream that is
  // not captured. Not OK: they cannot be captured, and are still the caller's; nothing of them has
  // reached NCCL.
  Status Begin(std::vector<SubmittedOp>& ops, CudaStreamHandle outside);
  // Those that Begin has taken, until OnLaunched.
  std::vector<SubmittedOp>& launching() { return launching_; }
  const std::vector<SubmittedOp>& launching() const { return launching_; }
  // Where they are to be launched.
  CudaStreamHandle stream() const { return stream_; }
  // They are in the graph; or fail alone, where their capture was spoilt meanwhile. `where`: for
  // the text.
  CudaResult OnLaunched(const LaunchMark::Joiner& joiner, std::string_view where,
                        FinishedOps& finished);

  // Ends those whose capture is over, and forgets what was in graphs that are gone. Nothing while
  // some are being launched. Not kSuccess: the device does not say whether it is over.
  CudaResult Sweep(FinishedOps& finished);
  // Whether there is something for Sweep to see soon.
  bool is_capturing() const { return !captured_.empty(); }
  // Ends all that have not ended with `status`. Their memory is free: no graph has run with them.
  void EndAll(const Status& status, FinishedOps& finished);

  // Asks the device in which operation a replay is.
  CudaResult Look(Instant now);
  // As of the last Look; null: in none.
  Replay* replay() { return is_inside_ ? &replay_ : nullptr; }
  const Replay* replay() const { return is_inside_ ? &replay_ : nullptr; }

  // How many graphs are not gone.
  std::size_t graphs() const;
  // Whether no replay is under way, as far as events tell.
  bool IsIdle() const;
  // While there are graphs one completion that has run is kept, and one operation not counted as
  // completed: a replay may use their memory, so that a generation that ends is not quiet. True,
  // once: it is given up, and is to be counted now.
  bool TakeHold() { return std::exchange(hold_, nullptr) != nullptr; }
  // What must stay until the graphs are gone. The last call.
  std::shared_ptr<void> Keep();

 private:
  struct Remembered {
    std::uint64_t number = 0;
    ReplayPlace place;
    SubmittedOp op;     // Without memory, mark and completion.
    PooledEvent begin;  // Measures time.
    PooledEvent end;
    bool is_launched = false;  // `end` is in the graph.
    std::uint64_t capture = 0;
    std::shared_ptr<const HeldGraph> graph;
  };
  struct Captured {  // Of a capture that goes on.
    SubmittedOp op;
    PooledEvent joined;  // For who goes on behind it within the capture.
  };

  Status Prepare(std::vector<SubmittedOp>& ops, CudaStreamHandle outside);
  CudaResult MarkOrigin(CudaStreamHandle outside);
  ReplayPlace PlaceOf(const std::vector<SubmittedOp>& ops);
  CudaResult HoldGraph(std::uint64_t capture, std::shared_ptr<const HeldGraph>* held) const;
  CudaResult AskWhetherItIsOver(bool* is_over) const;

  const CudaApi& cuda_;
  const bool is_high_priority_;
  const std::shared_ptr<NcclEvents> pool_;
  const std::shared_ptr<NcclEvents> timed_;
  const std::shared_ptr<const Doorbell> doorbell_;
  CudaStreamHandle stream_ = nullptr;
  PooledEvent origin_;  // Of the time. Measures it.
  std::vector<SubmittedOp> launching_;
  std::vector<Captured> captured_;  // All of one capture.
  std::vector<Remembered> remembered_;
  std::shared_ptr<Completion> hold_;
  std::uint64_t count_ = 0;
  ReplayPlace last_;  // Of each kind the last that was captured.
  bool is_inside_ = false;
  Replay replay_;
  float replay_began_ = 0;  // In ms, from origin_.
};

}  // namespace resilient
