#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include <resilient/communicator.h>
#include <resilient/status.h>

#include "runtime/comm/endpoint.h"
#include "runtime/comm/op_timeouts.h"
#include "runtime/comm/wire.h"

namespace resilient {

struct SubmittedOp;

// Texts about two ranks of one group, and the comparison of what they do. Pure.

// "rank 2 (node1, pid 77)"
std::string NameOf(const GroupMember& member);

// Of what a rank of the group has brought about. `seq`: of the operation; 0: of none.
FailureDetail DetailOf(const GroupSpec& spec, int rank, std::uint64_t seq);

// What `op` says of itself on the wire; the sender adds phase, root of the message and payload.
MessageHeader HeaderOf(const Operation& op, std::uint64_t seq);

// Whether two ranks are in the same collective. Call sites may differ. `Entered`: what says of an
// operation what MessageHeader does.
template <typename Entered>
bool SameCollective(const Entered& a, const Entered& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.reduce == b.reduce && a.root == b.root &&
         std::bit_cast<std::uint64_t>(a.factor) == std::bit_cast<std::uint64_t>(b.factor) &&
         (!HasOneCount(a.kind) || a.count == b.count);
}

// kMismatch: `peer` (group rank) has entered `theirs` where this rank entered `ours`.
Status CollectiveMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                          const MessageHeader& ours);
// kMismatch: rank `from` entered `theirs` and sends `theirs.count` elements to rank `to`, which
// entered `ours` and expects `ours.count`.
Status PartMismatch(const GroupSpec& spec, int from, const MessageHeader& theirs, int to,
                    const MessageHeader& ours);
// kMismatch: `peer` has gone on to `theirs`, a later operation, without its part in `ours`.
Status SkippedMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                       const MessageHeader& ours);
// What this rank has made the group of.
GroupRanks RanksOf(const GroupSpec& spec);
// kMismatch: the sender of `hello` has made the group of other ranks than `here`, a rank that has
// made it of `ours`. `sender`: its name.
Status OtherRanks(const Hello& hello, const std::string& sender, const std::string& here,
                  const GroupRanks& ours);
// The same where `spec` is of this rank.
Status OtherRanks(const Hello& hello, const GroupSpec& spec, const GroupRanks& ours);
// kMismatch: one of the ranks runs with another setting than the first; the same text on all of
// them. `endpoints`: of the members.
Status SettingsMismatch(const GroupSpec& spec, const std::vector<Endpoint>& endpoints);
// kMismatch: the message that `peer` sent differs from what the local recv describes.
Status SendRecvMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                        const Operation& recv, std::uint64_t seq);
// kCommFailed: the payload that `peer` sent with `theirs` is not what has come. `call_site`: of the
// operation here, empty when it is not known.
Status DamagedPayload(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                      const std::string& call_site);
// kResourceExhausted: this process has not the `bytes` of working memory that `op` takes.
Status NoMemory(const GroupSpec& spec, const SubmittedOp& op, std::size_t bytes);
// kLeft: `peer` has left and `waiting` (empty: nothing in particular) needs it.
Status PeerLeft(const GroupSpec& spec, int peer, const std::string& waiting, std::uint64_t seq);
// kLeft: all other ranks have left and `waiting`, which any of them could have served, still waits.
Status AllLeft(const GroupSpec& spec, const std::string& waiting, std::uint64_t seq);

// An operation that takes too long, and the ranks (of the group) that it waits for.
struct LateOp {
  const Operation& op;
  std::uint64_t seq = 0;
  double since_unix_s = 0;
  std::vector<int> missing;  // Not known to have entered it.
  std::vector<int> awaited;  // Have entered it; their part is not complete.
};
// `op` by the verdict that it got at `now`, without the ranks. REQUIRES: not kInTime.
LateOp LateSince(const SubmittedOp& op, OpTimeouts::Verdict verdict, Instant now,
                 const Clock& clock);
// kCommFailed when it has timed out, kCommStalled when nothing moves. REQUIRES: not kInTime.
Status LateStatus(const GroupSpec& spec, const LateOp& late, OpTimeouts::Verdict verdict);

}  // namespace resilient
