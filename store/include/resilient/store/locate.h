#pragma once

#include <string>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/status.h>
#include <resilient/store/client.h>

namespace resilient::store {

// How a rank that was told an address, and nothing of who listens there, gets a store at it.
// Thread: value type.
struct LocateOptions {
  ConnectOptions connect;  // Its one address is where the store is, or is to be.
  int rank = 0;
  std::string bind;  // Where a server that is started listens; empty: the host of the address.
  Duration linger = std::chrono::seconds(60);  // Of a server that is started.
};

struct Located {
  std::string server_id;  // Empty: not looked at, connecting retries.
  bool spawned = false;   // By this process.
  std::string log_path;   // Of a server that was spawned.
};

// The store at the address, as torch's own would be there: the one that answers, else one that this
// process starts, if the address is of this host or this is rank 0. One process of this user on a
// host at a time may start it. Started servers are detached: they outlive this process, and end by
// themselves. Blocks until `deadline`. kUnreachable: neither found nor started; kResolve: so too,
// as the name has no address yet; kSetting: could not be started, or the port is 0; kProtocol,
// kAuth at once; what `interrupt` returns.
Result<Located> FindOrStart(const LocateOptions& options, const InterruptCheck& interrupt,
                            const Clock& clock, Deadline deadline);

// Where a rank listens for its peers, numeric: the address of this host on the way to the store at
// "host:port". Loopback where the store is there, or its host has no address. kResolve: it is not
// known by `deadline`; what `interrupt` returns.
Result<std::string> AddressTowards(const std::string& store_address,
                                   const InterruptCheck& interrupt, const Clock& clock,
                                   Deadline deadline);
// The same with some seconds for the resolver; loopback where it does not answer.
std::string AddressTowards(const std::string& store_address);

// The server program that belongs to this library: beside it (bin/ or ../bin/), else in PATH.
// kSetting when there is none.
Result<std::string> StoreProgram();

}  // namespace resilient::store
