#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

#include "store/core/journal.h"
#include "store/server/crash_points.h"

namespace resilient::store {

// What an acknowledged change survives.
enum class Durability : std::uint8_t {
  kProcess,  // The end of this process, kill -9 included; not of the machine.
  kMachine,  // The end of the machine: it is on the disk.
};

// Rows on disk, sorted by name. Owner: Persister. Thread: confined to the writer thread once that
// runs.
class Engine {
 public:
  virtual ~Engine() = default;

  // Calls `row` for every row, in order. Before the first Commit.
  virtual Status Load(
      const std::function<void(std::string_view name, std::string_view value)>& row) = 0;

  // One transaction: all of it is kept, as durable as the engine was opened for, or nothing.
  // REQUIRES: no call has failed. After a failure nothing more may be acknowledged: what a failed
  // write or fsync left behind is not known, and the process has to end.
  virtual Status Commit(const std::vector<Write>& writes) = 0;

  // Housekeeping that nobody's acknowledgement waits for; after each Commit. Failures as Commit's.
  virtual Status Tend() = 0;
};

struct EngineOptions {
  std::string directory;
  Durability durability = Durability::kProcess;
  CrashPoints* crash_points = nullptr;  // Outlives the engine; null: none.
};

// Opens or makes the store's file in the directory, which is made when it is missing, and locks it.
// kSetting, with what to do: not a directory, not writable, of a newer version, held by another
// server (its pid), no space; kInternal: the file is damaged. Then the file is as it was.
Result<std::unique_ptr<Engine>> OpenSqliteEngine(const EngineOptions& options);

}  // namespace resilient::store
