// The CPU's transports, for the suites of conformance.h.

#include "tests/support/sanitizers.h"
#include "tests/unit/comm/conformance.h"

namespace resilient::testing {
namespace {

std::vector<int> Sizes() {
  // Rounds over TCP take long where many instrumented ranks share two cores.
  if (kThreadSanitized) return {2, 3};
  if (kAddressSanitized) return {1, 2, 3, 5};
  return {1, 2, 3, 4, 5, 6, 7, 8};
}

}  // namespace

std::vector<ConformanceCase> ConformanceCases() {
  std::vector<ConformanceCase> cases;
  for (const Transport& transport : AllTransports()) {
    for (const int size : Sizes()) cases.push_back({.transport = transport, .size = size});
    // Two pairs.
    if (kSanitized && transport.host_of) cases.push_back({.transport = transport, .size = 4});
  }
  for (const Transport& transport : ChecksummedTransports()) {
    for (const int size : {2, 5}) {
      if (size == 2 || !kSanitized) cases.push_back({.transport = transport, .size = size});
    }
  }
  for (const int size : {2, 3}) cases.push_back({.transport = StripedTransport(3), .size = size});
  for (const Transport& transport : EncryptedTransports())
    cases.push_back({.transport = transport, .size = 3});
  for (const Transport& transport : AnnouncingTransports()) {
    // Where nothing is eager a send without its recv does not end, as some of the suite's must.
    const bool some_eager = transport.name.find("NoneEager") == std::string::npos;
    if (some_eager) cases.push_back({.transport = transport, .size = 3});
  }
  return cases;
}

std::vector<Transport> ProgramTransports() {
  std::vector<Transport> all = AllTransportsAndOrders();
  for (const Transport& transport : AnnouncingTransports()) all.push_back(transport);
  if (!kSanitized) all.push_back(EncryptedTransports()[0]);
  return all;
}

}  // namespace resilient::testing
