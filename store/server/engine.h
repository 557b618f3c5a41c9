#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <resilient/status.h>

#include "store/core/journal.h"

namespace resilient::store {

// What an acknowledged change survives.
enum class Durability : std::uint8_t {
  kProcess,  // The end of this process, kill -9 included; not of the machine.
  kMachine,  // The end of the machine: it is on the disk.
};

// Rows on disk, sorted by name. Owner: Persister. Thread: confined to the writer thread after Load.
class Engine {
 public:
  virtual ~Engine() = default;

  // Calls `row` for every row, in order. Before the first Commit.
  virtual Status Load(
      const std::function<void(std::string_view name, std::string_view value)>& row) = 0;

  // One transaction: all of it is kept, as durable as the engine was opened for, or nothing.
  // REQUIRES: no Commit has failed. After a failure nothing more may be acknowledged: what a
  // failed write or fsync left behind is not known, and the process has to end.
  virtual Status Commit(const std::vector<Write>& writes) = 0;
};

// Opens or makes the store's file in `directory`, which is made when it is missing, and locks it.
// kSetting, with what to do: not a directory, not writable, of a newer version, held by another
// server (its pid), no space; kInternal: the file is corrupt.
Result<std::unique_ptr<Engine>> OpenSqliteEngine(const std::string& directory,
                                                 Durability durability);

}  // namespace resilient::store
