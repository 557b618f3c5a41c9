#include "runtime/comm/mismatch.h"

#include <algorithm>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/texts.h"
#include "runtime/comm/endpoint.h"
#include "runtime/comm/group_port.h"

namespace resilient {
namespace {

Operation OperationOf(const MessageHeader& header) {
  Operation op;
  op.kind = header.kind;
  op.dtype = header.dtype;
  op.reduce = header.reduce;
  op.root = header.root;
  op.tag = header.tag;
  op.count = header.count;
  op.factor = header.factor;
  return op;
}

std::string Entered(const MessageHeader& header) {
  return StrCat("entered ", Describe(OperationOf(header)), AtCallSite(header.call_site));
}

const GroupMember& MemberOf(const GroupSpec& spec, int rank) {
  return spec.members[static_cast<std::size_t>(rank)];
}

std::string Where(const GroupSpec& spec, std::uint64_t seq) {
  return StrCat(" (group ", spec.name, ", operation ", seq, ")");
}

// What most often lies behind it, and the ways out.
constexpr char kUnevenBatches[] =
    "; if these ranks have different numbers of batches, give all the same (drop_last, a sampler "
    "that pads) or train inside torch_resilient.join(model)";

// ", with 216 operations before it on both"; the count of each rank is what its operation says.
std::string Before(std::uint64_t seq) {
  if (seq < 2) return ", the first of the group on both";
  return StrCat(", after ", seq - 1, seq == 2 ? " operation" : " operations", " on each");
}

// "rank 1 (a, pid 7), rank 2 (b, pid 8) and 3 more"
std::string NamesOf(const GroupSpec& spec, const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  return ListOf(ranks, kNamed, [&](int rank) { return NameOf(MemberOf(spec, rank)); });
}

// What it still lacks, as a clause.
std::string Lacks(const GroupSpec& spec, const LateOp& late) {
  const bool one = late.missing.size() == 1;
  if (late.op.kind == OpKind::kRecv && late.op.peer == kAnyPeer) return "no rank has sent for it";
  if (!late.missing.empty()) {
    const std::string names = NamesOf(spec, late.missing);
    if (late.op.kind == OpKind::kSend) return names + " has not received it";
    if (late.op.kind == OpKind::kRecv) return names + " has not sent for it";
    return StrCat(names, one ? " has" : " have", " not entered it");
  }
  if (late.awaited.empty()) return "it has not begun";
  return StrCat("the part of ", NamesOf(spec, late.awaited), " is not complete");
}

Status TimedOut(const GroupSpec& spec, const LateOp& late, FailureDetail detail) {
  return Status(StatusCode::kCommFailed,
                StrCat(Describe(late.op), AtCallSite(late.op.call_site),
                       " has not ended within its timeout of ", ToSeconds(late.op.timeout),
                       " s: ", Lacks(spec, late), Where(spec, late.seq),
                       "; find out what keeps that rank, or give the group a longer timeout=; with "
                       "RESILIENT_TIMEOUT_POLICY=liveness ranks that live are waited for"),
                std::move(detail));
}

// The way between this rank and the first of those whose part is not complete.
std::string LinkOf(const GroupSpec& spec, const LateOp& late) {
  if (late.awaited.empty()) return {};
  const auto end = [](const GroupMember& member) {
    const std::string address = DecodeEndpoint(member.endpoint).address;
    return address.empty() ? member.host : StrCat(member.host, " (", address, ")");
  };
  return StrCat(", host ", end(MemberOf(spec, spec.rank)), " and host ",
                end(MemberOf(spec, late.awaited.front())));
}

Status Stalled(const GroupSpec& spec, const LateOp& late, FailureDetail detail) {
  return Status(
      StatusCode::kCommStalled,
      StrCat(late.awaited.empty() ? "the other ranks" : NamesOf(spec, late.awaited), " and ",
             NameOf(MemberOf(spec, spec.rank)), " have entered ", Describe(late.op),
             AtCallSite(late.op.call_site), " but nothing has moved between them for ",
             ToSeconds(late.op.stall), " s", Where(spec, late.seq),
             "; that is the deadline of what stands still (RESILIENT_OP_DEADLINE, or the timeout= "
             "of the group): look at the network between these hosts",
             LinkOf(spec, late), ", and at those processes, or raise it"),
      std::move(detail));
}

}  // namespace

std::string NameOf(const GroupMember& member) {
  return StrCat("rank ", member.global_rank, " (", member.host, ", pid ", member.pid, ")");
}

FailureDetail DetailOf(const GroupSpec& spec, int rank, std::uint64_t seq) {
  const GroupMember& member = MemberOf(spec, rank);
  return {.rank = member.global_rank,
          .host = member.host,
          .pid = member.pid,
          .generation = spec.generation,
          .group = spec.name,
          .seq = seq};
}

MessageHeader HeaderOf(const Operation& op, std::uint64_t seq) {
  MessageHeader header;
  const bool point_to_point = IsPointToPoint(op.kind);
  header.type = point_to_point ? MessageType::kPointToPoint : MessageType::kCollective;
  header.kind = op.kind;
  header.dtype = op.dtype;
  header.reduce = op.reduce;
  header.root = op.root;
  header.tag = op.tag;
  header.seq = seq;
  header.count = op.count;
  header.factor = op.factor;
  header.call_site = op.call_site;
  return header;
}

Status CollectiveMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                          const MessageHeader& ours) {
  return Status(StatusCode::kMismatch,
                StrCat(NameOf(MemberOf(spec, peer)), " ", Entered(theirs), " where ",
                       NameOf(MemberOf(spec, spec.rank)), " ", Entered(ours), Before(ours.seq),
                       Where(spec, ours.seq),
                       "; all ranks must submit the same collectives with the same arguments in "
                       "the same order: compare these two places of the program",
                       kUnevenBatches),
                DetailOf(spec, peer, ours.seq));
}

Status PartMismatch(const GroupSpec& spec, int from, const MessageHeader& theirs, int to,
                    const MessageHeader& ours) {
  return Status(
      StatusCode::kMismatch,
      StrCat(NameOf(MemberOf(spec, from)), " ", Entered(theirs), " with ", theirs.count,
             " elements for ", NameOf(MemberOf(spec, to)), ", which ", Entered(ours),
             " and expects ", ours.count, " elements from it", Where(spec, ours.seq),
             "; every two ranks must agree on how much they exchange: compare the sizes at these "
             "two places of the program"),
      DetailOf(spec, from, ours.seq));
}

Status SkippedMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                       const MessageHeader& ours) {
  return Status(StatusCode::kMismatch,
                StrCat(NameOf(MemberOf(spec, peer)), " has gone on to operation ", theirs.seq, ", ",
                       Describe(OperationOf(theirs)), AtCallSite(theirs.call_site),
                       ", without its part in what ", NameOf(MemberOf(spec, spec.rank)), " ",
                       Entered(ours), Where(spec, ours.seq),
                       "; all ranks must submit the same collectives with the same arguments in "
                       "the same order",
                       kUnevenBatches),
                DetailOf(spec, peer, ours.seq));
}

GroupRanks RanksOf(const GroupSpec& spec) {
  std::vector<int> ranks;
  ranks.reserve(spec.members.size());
  for (const GroupMember& member : spec.members) ranks.push_back(member.global_rank);
  return RanksOfGroup(ranks, spec.made_at);
}

Status OtherRanks(const Hello& hello, const std::string& sender, const std::string& here,
                  const GroupRanks& ours) {
  return Status(StatusCode::kMismatch,
                OtherRanksText(hello.group, hello.generation, sender, hello.made, here, ours),
                {.rank = hello.from_world, .generation = hello.generation, .group = hello.group});
}

Status OtherRanks(const Hello& hello, const GroupSpec& spec, const GroupRanks& ours) {
  // It need not be a member here.
  const auto member = std::ranges::find(spec.members, hello.from_world, &GroupMember::global_rank);
  const std::string sender =
      member == spec.members.end() ? StrCat("rank ", hello.from_world) : NameOf(*member);
  return OtherRanks(hello, sender, NameOf(MemberOf(spec, spec.rank)), ours);
}

Status SettingsMismatch(const GroupSpec& spec, const std::vector<Endpoint>& endpoints) {
  const Endpoint& first = endpoints.front();
  for (std::size_t rank = 1; rank < endpoints.size(); ++rank) {
    const auto differs = [&](const char* name, auto theirs, auto ours) {
      return Status(StatusCode::kMismatch,
                    StrCat(NameOf(spec.members[rank]), " runs with ", name, "=", theirs, " where ",
                           NameOf(spec.members.front()), " runs with ", ours, " (group ", spec.name,
                           "); set it to the same value on all ranks of the job"),
                    DetailOf(spec, static_cast<int>(rank), 0));
    };
    const Endpoint& other = endpoints[rank];
    if (other.hierarchical != first.hierarchical) {
      return differs("RESILIENT_REDUCTION_ORDER", OrderName(other.hierarchical),
                     OrderName(first.hierarchical));
    }
    if (other.streams != first.streams)
      return differs("RESILIENT_SOCKET_STREAMS", other.streams, first.streams);
    if (other.encrypted != first.encrypted)
      return differs("RESILIENT_LINK_TLS", int{other.encrypted}, int{first.encrypted});
  }
  return Status::Ok();
}

Status SendRecvMismatch(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                        const Operation& recv, std::uint64_t seq) {
  Operation sent = OperationOf(theirs);
  sent.kind = OpKind::kSend;
  sent.peer = spec.rank;
  return Status(StatusCode::kMismatch,
                StrCat(NameOf(MemberOf(spec, peer)), " entered ", Describe(sent),
                       AtCallSite(theirs.call_site), " where ", NameOf(MemberOf(spec, spec.rank)),
                       " entered ", Describe(recv), AtCallSite(recv.call_site), " (group ",
                       spec.name, ", point-to-point operation ", seq,
                       "); a send and its recv must agree in type and count"),
                DetailOf(spec, peer, seq));
}

Status DamagedPayload(const GroupSpec& spec, int peer, const MessageHeader& theirs,
                      const std::string& call_site) {
  const GroupMember& sender = MemberOf(spec, peer);
  const GroupMember& receiver = MemberOf(spec, spec.rank);
  const bool point_to_point = theirs.type == MessageType::kPointToPoint;
  std::string what = "a notice";
  if (point_to_point || theirs.type == MessageType::kCollective)
    what = Describe(OperationOf(theirs)) + AtCallSite(theirs.call_site);
  const std::string culprits =
      sender.host == receiver.host
          ? StrCat("the memory of host ", receiver.host,
                   " has changed them: look at its memory "
                   "errors (EDAC counters, kernel log) and run the job without it")
          : StrCat("the memory of host ", sender.host, " or ", receiver.host,
                   " or the network between them has changed them: look at the memory errors "
                   "(EDAC counters, kernel log) and the network adapters (ethtool -S, checksum "
                   "offload) of both and run the job without the one at fault");
  return Status(
      StatusCode::kCommFailed,
      StrCat(theirs.payload_bytes, " bytes of ", what, " from ", NameOf(sender),
             " have come damaged to ", NameOf(receiver), AtCallSite(call_site),
             ": they do not have the checksum with which they were sent (group ", spec.name,
             point_to_point ? ", message " : ", operation ", theirs.seq, "); ", culprits),
      DetailOf(spec, peer, theirs.seq));
}

Status NoMemory(const GroupSpec& spec, const SubmittedOp& op, std::size_t bytes) {
  return Status(
      StatusCode::kResourceExhausted,
      StrCat(NameOf(MemberOf(spec, spec.rank)), " has no memory for ", Describe(op.op),
             AtCallSite(op.op.call_site), ", which takes ", bytes, " bytes to work in",
             Where(spec, op.seq),
             ": free memory on that host or raise the limits of the process, or reduce less at a "
             "time; with RESILIENT_REDUCTION_ORDER=hierarchical it grows with the data, in rank "
             "order it is at most 256 KiB a rank"),
      DetailOf(spec, spec.rank, op.seq));
}

Status PeerLeft(const GroupSpec& spec, int peer, const std::string& waiting, std::uint64_t seq) {
  const std::string need =
      waiting.empty() ? std::string() : StrCat(" while operation ", seq, " ", waiting, " needs it");
  return Status(StatusCode::kLeft,
                StrCat(NameOf(MemberOf(spec, peer)), " has left the group ", spec.name, need,
                       "; it ended or called destroy_process_group before the others: check that "
                       "all ranks run the same number of operations",
                       kUnevenBatches),
                DetailOf(spec, peer, seq));
}

Status AllLeft(const GroupSpec& spec, const std::string& waiting, std::uint64_t seq) {
  FailureDetail detail;
  detail.generation = spec.generation;
  detail.group = spec.name;
  detail.seq = seq;
  return Status(StatusCode::kLeft,
                StrCat("all other ranks have left the group ", spec.name, " while operation ", seq,
                       " ", waiting,
                       " needs one of them; they ended or called "
                       "destroy_process_group before this rank: check that every recv has a send"),
                std::move(detail));
}

LateOp LateSince(const SubmittedOp& op, OpTimeouts::Verdict verdict, Instant now,
                 const Clock& clock) {
  return {.op = op.op,
          .seq = op.seq,
          .since_unix_s = clock.WallSeconds() - ToSeconds(now - op.timeouts.Since(verdict)),
          .missing = {},
          .awaited = {}};
}

Status LateStatus(const GroupSpec& spec, const LateOp& late, OpTimeouts::Verdict verdict) {
  const std::vector<int>& culprits = late.missing.empty() ? late.awaited : late.missing;
  FailureDetail detail;
  if (!culprits.empty()) detail = DetailOf(spec, culprits.front(), late.seq);
  detail.generation = spec.generation;
  detail.group = spec.name;
  detail.seq = late.seq;
  detail.since_unix_s = late.since_unix_s;
  return verdict == OpTimeouts::Verdict::kTimedOut ? TimedOut(spec, late, std::move(detail))
                                                   : Stalled(spec, late, std::move(detail));
}

}  // namespace resilient
