#pragma once

#include <functional>
#include <memory>
#include <string>

#include <resilient/clock.h>
#include <resilient/communicator.h>

#include "runtime/comm/nccl_api.h"

namespace resilient {

// How the unique id of a group gets from its rank 0 to the others. A key names the group, the
// generation and the attempt, and is used once: an id of an attempt that failed would poison the
// next. Owner: whoever makes the factory. Thread: thread-safe. Lifetime: outlives the factory;
// what it was given may be called, to no effect, after that.
class NcclIdExchange {
 public:
  using OnPublished = std::function<void(const Status&)>;
  using OnId = std::function<void(Result<NcclUniqueId>)>;
  virtual ~NcclIdExchange() = default;

  // Both return at once; the callback runs at most once, on any thread, and may run inline.
  virtual void Publish(const std::string& key, const NcclUniqueId& id, OnPublished done) = 0;
  virtual void Await(const std::string& key, OnId done) = 0;
};

// Options of the NCCL communicator.
struct NcclFabricOptions {
  NcclApi nccl;
  CudaApi cuda;
  int device = 0;  // The CUDA device of all communicators of the session.
  // From Create until all ranks are connected: NCCL itself waits for ever for a rank that does not
  // come, and tells nobody.
  Duration connect_timeout = Millis(120'000);
  // What Leave gives the peers to take what was sent, before the communicator is aborted.
  Duration flush_timeout = Millis(1000);
  std::string name = "res-nccl";  // Thread name.
};

// The NCCL transport: one thread a session that makes all calls into NCCL, and one for the end of
// each communicator. `ids` and `events` outlive the factory. Differences to the CPU transport, as
// NCCL sends no headers of ours (docs/decisions/0012):
//   failures   no rank is named when a link breaks, a mismatch is not noticed, a timeout ends the
//              communicator on this rank only, Operation::stall has no effect
//   order      the operations of a communicator run one after the other in the order of their
//              submission, on whatever streams: one that waits for a rank holds up all behind it,
//              so the ranks submit theirs in orders that fit together, messages among collectives.
//              Those of a batch run together. No two groups may use one stream: the order of their
//              launches is not the same on all ranks
//   messages   tags are not sent: the messages from one rank to another are received in the order
//              in which they were sent. One received in another order is not noticed where it is
//              as large, and waits for ever where it is not. kAnyPeer is refused
//   numbers    what is reduced is not reduced in rank order, and it is rounded to its type at each
//              step: averages of integers of 8 bits overflow where their sums do, and a factor of
//              kPremulSum is rounded to the type. Whether a NaN wins MIN and MAX is NCCL's choice
// Refused with kUnimplemented, before anything is submitted: reductions of 16-bit integers, of bits
// but for bools, products of complex numbers; of float8 and kPremulSum where the library or the
// device has none.
std::unique_ptr<CommunicatorFactory> MakeNcclFabric(const NcclFabricOptions& options,
                                                    NcclIdExchange& ids, const Clock& clock,
                                                    CommunicatorEvents& events);

}  // namespace resilient
