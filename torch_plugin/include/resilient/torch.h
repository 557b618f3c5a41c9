#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/device.h>
#include <resilient/nccl_options.h>
#include <resilient/session.h>
#include <resilient/torch_errors.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

// For libtorch programs without Python. The names that the package for Python has too are spelled
// and mean the same; failures are thrown as the classes of <resilient/torch_errors.h>.
namespace resilient {

// NOLINTBEGIN(readability-identifier-naming): spelled as in torch.distributed.

// A world or a part of it, as c10d knows it: also what torch's own C++ takes.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// Who joins which world. What is not set comes from the environment, where a launcher has put it;
// all else is RESILIENT_* variables (docs/semantics.md section 5). Thread: value type.
struct InitOptions {
  int rank = -1;        // -1: RANK
  int world_size = -1;  // -1: WORLD_SIZE
  // "host:port", tried in turn. Empty: RESILIENT_STORE, else MASTER_ADDR and MASTER_PORT, where the
  // store is started when nobody answers.
  std::vector<std::string> store;
  std::string job;  // Empty: RESILIENT_JOB, else the launcher's name of the job, else the address.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  // As of init in Python.
  std::optional<DeviceClaim> device;  // No other rank may use it; not set: not known.
  NcclOptions nccl;                   // Of the world's group, the same on all ranks.
};

// Joins the world; blocks until it runs. A process that takes the seat of a lost one joins the
// running life. The world lives until destroy_process_group, or until its last handle is dropped.
ProcessGroup init_process_group(const InitOptions& options = {});

// Says goodbye, ends the threads of the world; later calls on it throw. A process that ends without
// it, or without dropping the world, is lost to the others.
void destroy_process_group(const ProcessGroup& world);

// The session of a group of ours: membership, failure, last incident. Throws for another's.
std::shared_ptr<Session> session_of(const ProcessGroup& group);

// Acknowledges a failure and returns the new membership once the next generation is built. Waits
// for lost seats to be filled for `seat_wait`, default RESILIENT_SEAT_WAIT. When they stay empty
// the world goes on with `min_world` ranks at least, if all that are left want that; they are
// numbered anew, in their order, present_world(world) has the new rank and size, and groups made
// before throw until they are made anew. With 0, or with fewer ranks left, throws the first cause.
// `budget`: of the machine's part; default RESILIENT_BUDGET.
Membership rebuild(const ProcessGroup& world, std::optional<Duration> budget = std::nullopt,
                   int min_world = 0, std::optional<Duration> seat_wait = std::nullopt);

// The world's group with its present rank and size: `world` itself, or, where the world was resized
// and torch has rank and size of a group constant (2.13 and older), the one made for the world that
// goes on; operations of `world` throw then. All other functions here take either.
ProcessGroup present_world(const ProcessGroup& world);

// What a training run needs to go on after a rank was lost: named values that are committed
// together and restored together. What is kept by reference outlives the State.
//
//   resilient::State state(world);
//   state.add("model", *model).add("optimizer", optimizer).add("step", step);
//
// commit() keeps a copy in host memory and the per-rank part in the store, each for the last two
// commits; the generator of random numbers on the CPU always is in the per-rank part. Every rank
// adds the same names in the same order. Owner: the program. Thread: one at a time.
class State {
 public:
  enum class Part : std::uint8_t {
    kReplicated,  // The same on every rank.
    kPerRank,     // Differs by rank; at most 8 MiB in all.
  };

  explicit State(ProcessGroup world);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Parameters and buffers; `model` of a ModuleHolder is `*model`.
  State& add(const std::string& name, torch::nn::Module& module, Part part = Part::kReplicated);
  // All that torch::save writes of it.
  State& add(const std::string& name, torch::optim::Optimizer& optimizer,
             Part part = Part::kReplicated);
  // Restored in place: whoever holds the tensor sees the data of the commit, in its dtype and
  // shape.
  State& add(const std::string& name, at::Tensor tensor, Part part = Part::kReplicated);
  State& add(const std::string& name, std::int64_t& number, Part part = Part::kReplicated);
  State& add(const std::string& name, double& number, Part part = Part::kReplicated);

  // Keeps the present values. Throws the first cause when the session has failed, and keeps nothing
  // then.
  void commit();
  // Brings the replicated part of this rank back to its newest commit. Local.
  void restore();
  // Brings all ranks to the newest commit that is complete, or, without any, to rank 0's values.
  // Every rank of the world calls it; another failure in it throws and leaves the commits as they
  // are. kSetting on all ranks where they are not at the same place of the program (in different
  // elastic runs, or with different States), before anything is loaded, and where a value of any
  // rank cannot take what the commit has of it.
  void sync();
  // How many commits the present time line has.
  std::int64_t commits() const;
  const ProcessGroup& world() const;  // The present one, see present_world.

 private:
  friend class ElasticRun;
  struct Impl;
  // Commit 1 is complete on all ranks: from here on values change.
  void NoteBegun();
  // What its last use has thrown, all ranks throw.
  bool ThrownOnAll() const;
  // An elastic run with it has ended on all ranks. What uses it next begins with its values as they
  // are then.
  void EndRun();
  // `observer` is called after each commit; null: nobody.
  void Observe(std::function<void()> observer);

  const std::unique_ptr<Impl> impl_;
};

// Calls `fn(state)`; when the membership changes, again, on every rank, with the state of the
// newest complete commit. Before it nothing communicates but init_process_group. What is thrown for
// another reason than a failure of the session passes through; MISMATCH, DEADLOCK, STALLED and
// wrong starts are bugs and are not tried again. `max_restarts`: without a commit in between.
// `min_world`: as of rebuild; `fn` then finds another rank and size, in the world() of its state.
// `max_world`: at a commit that all ranks have made the run goes on with up to so many ranks, when
// spares wait; 0: it does not grow. They are the last ones, with the replicated part of that commit
// and their own per-rank part.
void elastic(State& state, const std::function<void(State&)>& fn, int max_restarts = 100,
             int min_world = 0, int max_world = 0);

// NOLINTEND(readability-identifier-naming)

}  // namespace resilient
