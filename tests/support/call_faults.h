#pragma once

#include <map>
#include <string>

#include "runtime/comm/nccl_api.h"

namespace resilient::testing {

// What one call into NCCL or CUDA does in place of what it should.
struct CallFault {
  enum class Effect {
    kFails,      // It says `result` and does nothing.
    kComplains,  // It does what it should, and says `result`.
    kStands      // It does not return until Release, then does what it should.
  };
  // Of the communicator; for a call without one the number of the calling thread's device.
  int rank = 0;
  std::string call;  // A member of NcclApi or CudaApi: "CommInitRankConfig".
  // In which communicator of that rank's, from 1: each attempt and each generation makes one. A
  // call without one counts to the last one made. 0: in any.
  int communicator = 0;
  int nth = 1;  // Which of these calls, from 1.
  Effect effect = Effect::kFails;
  int result = 0;  // NcclResult or CudaResult.
};

// Puts itself around the functions of a table and makes one call go wrong. The tables hold plain
// functions, so one at a time. Owner: the test. Thread: thread-safe. Lifetime: outlives what uses
// its tables, or the tables go on without faults.
class CallFaults {
 public:
  CallFaults();
  ~CallFaults();  // Releases.
  CallFaults(const CallFaults&) = delete;
  CallFaults& operator=(const CallFaults&) = delete;

  static NcclApi Around(NcclApi api);
  static CudaApi Around(CudaApi api);

  // In place of the one before. Counts from here on.
  void Set(CallFault fault);
  void Clear();
  void Release();
  // Whether the call was made.
  bool Hit() const;
  // How many calls a rank has made since Set or Clear, by their names.
  std::map<std::string, int> Calls(int rank) const;
};

}  // namespace resilient::testing
