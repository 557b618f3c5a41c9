#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include <resilient/clock.h>
#include <resilient/communicator.h>
#include <resilient/device.h>
#include <resilient/status.h>

namespace resilient {

// Options of the CPU communicator.
struct CpuFabricOptions {
  // Address that the mesh listens on, numeric; told to the peers.
  std::string bind_address = "127.0.0.1";
  // "eth1,eth0": listens at an address of the first one that exists instead.
  std::string interfaces;
  std::string name = "res-comm";  // Thread name.
  // Bytes of shared memory that a group may take on one host; the same on all ranks. 0, or too
  // little for the group: TCP inside the host as well.
  std::size_t shm_limit = 256u << 20;
  // A checksum goes with all data that this rank sends. Receivers follow the sender: ranks may
  // differ. What has come damaged fails the communicator with kCommFailed.
  bool checksums = false;
  // Reductions of groups that span hosts: ranks of one host first, in rank order, then the hosts,
  // in the order of each one's lowest rank; each host sends a partial result in place of the data
  // of each rank. The bits then depend on which ranks share a host, and on nothing else but the
  // values. A host is what shares memory: without shared memory each rank is one. The same on all
  // ranks: a group where it differs fails with kMismatch.
  bool hierarchical = false;
  // TCP connections of one link to a rank on another host, 1 to kMaxSocketStreams; the same on all
  // ranks, as `hierarchical`.
  int streams = 1;
  // Links over TCP are encrypted: TLS 1.3 with keys from GroupSpec::secret. The same on all ranks,
  // as `hierarchical`. kSetting where OpenSSL 3 (libssl) is not found.
  bool encrypted = false;
};

// Options of what serves memory of CUDA devices.
struct CudaFabricOptions {
  // Libraries to load; empty: the copy that the process has already, else what the linker finds.
  std::string nccl_library;
  std::string cuda_runtime;
  // What this rank says of a device; null: what NVML says. Without a uuid: ranks may share it.
  std::function<DeviceClaim(int device)> claim;
  SharedGpu shared_gpu = SharedGpu::kRefused;  // Else nothing is said of it.
  int eager_device = kHost;  // Groups are connected for it as they are made; kHost: for none.
  // From the ranks' arrival to the end of NCCL's own connecting, tried twice. Zero: no bound.
  Duration connect_timeout = std::chrono::seconds(60);
  // What Leave gives NCCL to let go once no peer awaits this rank.
  Duration flush_timeout = std::chrono::seconds(1);
  // How long an error of NCCL's, which names no rank, waits for the membership service to name one.
  Duration verdict_wait = std::chrono::seconds(3);
  std::string name = "res-nccl";  // Thread name.
};

// The CPU transport: one listener and one comm thread per session, links per group and pair, over
// TCP or inside a host through shared memory; shared memory for the collectives of groups inside
// one host.
// kUnreachable when the address cannot be bound, kSetting when no interface exists. `events`
// outlives the factory.
Result<std::unique_ptr<CommunicatorFactory>> MakeCpuFabric(CpuFabricOptions options,
                                                           const Clock& clock,
                                                           CommunicatorEvents& events);

// The same, and with it memory of CUDA devices through NCCL: a communicator routes each operation
// by its device. NCCL is loaded and connected at the first operation on a device, over a group of
// the CPU transport by which the ranks compare what they are before NCCL meets itself: a group of
// which two ranks share a GPU (kDuplicateDevice), or have other versions, settings or options of
// NCCL (kSetting), fails with that on all ranks. By the same way they notice what NCCL does not: a
// rank that is late, or in another operation. Operation::stall and OnWaiting are as on the CPU; a
// mismatch that does not block is noticed behind the fact.
//
// What differs from the CPU, as NCCL sends no headers of ours (docs/decisions/0012):
//   order      operations on a device run one after the other in the order of their submission, on
//              a stream of the communicator's: one that waits for a rank holds up all behind it.
//              Those of a batch run together
//   messages   tags are not sent: messages from one rank to another are received in the order in
//              which they were sent. kAnyPeer is refused
//   numbers    what is reduced is not reduced in rank order, and is rounded to its type at each
//              step: averages of integers of 8 bits overflow where their sums do. Whether a NaN
//              wins MIN and MAX is NCCL's choice
// Refused with kUnimplemented, before anything is submitted: reductions of 16-bit integers, of bits
// but for bools, products of complex numbers; of float8 and kPremulSum where the library or the
// device has none, and of both together in a group of one rank. kSetting where there is no NCCL or
// no CUDA.
//
// With SharedGpu::kThroughHost devices are served by the CPU transport on pinned memory instead
// (docs/decisions/0021): numbers are as there, nothing but kAnyPeer is refused, a LaunchMark is
// launched when the peers' part is there, and a rank that goes another way is kSetting on all.
Result<std::unique_ptr<CommunicatorFactory>> MakeCudaFabric(CpuFabricOptions cpu,
                                                            CudaFabricOptions cuda,
                                                            const Clock& clock,
                                                            CommunicatorEvents& events);

}  // namespace resilient
