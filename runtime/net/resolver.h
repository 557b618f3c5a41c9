#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <resilient/abort.h>
#include <resilient/clock.h>
#include <resilient/status.h>

#include "runtime/net/offloaded.h"

namespace resilient {

// Numeric, in the resolver's order; at least one.
using Addresses = std::vector<std::string>;
using Lookup = Offloaded<Addresses>;

// The numeric text of an address that is a number ("0" is 0.0.0.0); nullopt for a name. Asks
// nobody.
std::optional<std::string> NumericForm(const std::string& host);

// Finds the addresses of names, and nobody waits for that longer than he means to: the call into
// the system's resolver, which may hang for as long as a name server is silent and cannot be given
// up, is made on a thread of its own. Numbers are no names: see NumericForm.
//
// One call for a name is under way at a time, whoever asks joins it: a resolver that hangs for ever
// costs one thread a name. The addresses that a name had last are kept, for the time that the
// resolver does not answer, or says that it cannot now.
//
// Owner: the process (OfProcess), or a test. Thread: thread-safe. Lifetime: lookups outlive it.
class Resolver {
 public:
  virtual ~Resolver() = default;

  // kResolve is its result when the name has no address.
  virtual std::shared_ptr<const Lookup> Begin(const std::string& host, Instant now) = 0;
  // What the name was last known to be; empty: nothing.
  virtual Addresses Known(const std::string& host) const = 0;

  // The one of this process, which asks the system; a forked child has one of its own. Never
  // destroyed.
  static Resolver& OfProcess();
};

// How long those who know what a name was wait for what it is now, before they go by the former:
// time for an answer of a name server that works, short against a lease. An address that somebody
// else has by now would cost much more.
inline constexpr Duration kFreshAnswerPatience = Millis(250);

// What a name server is given for a name that was never known, where others are to be tried too.
inline constexpr Duration kLookupPatience = std::chrono::seconds(5);

// kResolve, for a lookup that has not ended: since when, and what to look at.
Status NotResolvedYet(const std::string& host, const Lookup& lookup, Instant now);

// The addresses of `host`, waited for on the caller's thread until `deadline`, at most for
// kFreshAnswerPatience where some are known. kResolve; what `interrupt` says (empty: never).
Result<Addresses> ResolveWithin(Resolver& resolver, const std::string& host,
                                const InterruptCheck& interrupt, const Clock& clock,
                                Deadline deadline);

// What a lookup found. Thread: value type.
struct Found {
  Result<Addresses> addresses;
  bool temporary = false;  // It failed, and may not the next time.
};
// Makes a resolver that calls `look_up` on threads of its own: with a name, as often as asked.
std::unique_ptr<Resolver> MakeResolver(std::function<Found(const std::string&)> look_up);

}  // namespace resilient
