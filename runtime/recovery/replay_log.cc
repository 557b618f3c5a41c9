#include "runtime/recovery/replay_log.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "runtime/base/log.h"

namespace resilient::recovery {
namespace {

constexpr std::uint32_t kFormat = 1;

// Thread: confined.
class Writer {
 public:
  template <typename Number>
  void Put(Number number) {
    static_assert(std::is_integral_v<Number>);
    const auto wide = static_cast<std::uint64_t>(number);
    for (unsigned shift = 0; shift < 64; shift += 8) {
      bytes_.push_back(static_cast<char>((wide >> shift) & 0xff));
    }
  }
  void Put(const std::string& text) {
    Put(text.size());
    bytes_ += text;
  }
  void Put(const std::map<Stream, std::uint64_t>& counts) {
    Put(counts.size());
    for (const auto& [stream, count] : counts) {
      Put(stream.peer);
      Put(stream.tag);
      Put(count);
    }
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// False from any Get on: the bytes are none of a Writer's. Thread: confined.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename Number>
  bool Get(Number* number) {
    std::uint64_t wide = 0;
    if (bytes_.size() < sizeof(wide)) return false;
    for (unsigned index = 0; index < sizeof(wide); ++index) {
      wide |= std::uint64_t{static_cast<unsigned char>(bytes_[index])} << (8 * index);
    }
    bytes_.remove_prefix(sizeof(wide));
    *number = static_cast<Number>(wide);
    return true;
  }
  bool Get(std::string* text) {
    std::size_t size = 0;
    if (!Get(&size) || size > bytes_.size()) return false;
    *text = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }
  bool Get(std::map<Stream, std::uint64_t>* counts) {
    std::size_t size = 0;
    if (!Get(&size)) return false;
    for (std::size_t index = 0; index < size; ++index) {
      Stream stream;
      std::uint64_t count = 0;
      if (!Get(&stream.peer) || !Get(&stream.tag) || !Get(&count)) return false;
      (*counts)[stream] = count;
    }
    return true;
  }
  bool AtEnd() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

bool ReadGroup(Reader* reader, GroupSummary* group) {
  std::size_t size = 0;
  if (!reader->Get(&group->instance) || !reader->Get(&size)) return false;
  for (std::size_t index = 0; index < size; ++index) {
    int rank = -1;
    if (!reader->Get(&rank)) return false;
    group->ranks.push_back(rank);
  }
  return reader->Get(&group->next) && reader->Get(&group->first_pending) &&
         reader->Get(&group->kept_from) && reader->Get(&group->sent) &&
         reader->Get(&group->received);
}

std::uint64_t CountIn(const std::map<Stream, std::uint64_t>& counts, const Stream& stream) {
  const auto found = counts.find(stream);
  return found == counts.end() ? 0 : found->second;
}

// One group at all its members, in group order.
using Members = std::vector<GroupSummary>;

// REQUIRES: `told` is of a member that has made it. The others are told to have its ranks.
Members MembersOf(const std::vector<ReplaySummary>& all, const std::string& name,
                  const GroupSummary& told) {
  Members members;
  for (const int rank : told.ranks) {
    const auto& groups = all[static_cast<std::size_t>(rank)].groups;
    const auto found = groups.find(name);
    members.push_back(found == groups.end() ? GroupSummary{} : found->second);
    if (members.back().ranks.empty()) members.back().ranks = told.ranks;
  }
  return members;
}

std::string RefusalOfGroup(const std::string& name, const Members& members, std::uint64_t from) {
  for (std::size_t rank = 0; rank < members.size(); ++rank) {
    const GroupSummary& member = members[rank];
    const int global = members.front().ranks[rank];
    if (member.ranks != members.front().ranks || member.instance != members.front().instance) {
      return StrCat("group '", name, "' was made or closed on only some of its members");
    }
    if (member.next > from && member.kept_from > from) {
      return StrCat("rank ", global, " has the inputs of group '", name, "' from number ",
                    member.kept_from, " on, and number ", from, " is needed");
    }
    for (const auto& [stream, sent] : member.sent) {
      const bool known = stream.peer >= 0 && stream.peer < static_cast<int>(members.size());
      const Stream back{static_cast<int>(rank), stream.tag};
      const std::uint64_t received =
          known ? CountIn(members[static_cast<std::size_t>(stream.peer)].received, back) : 0;
      if (received < sent) {
        return StrCat("rank ", global, " has sent ", sent - received, " messages in group '", name,
                      "' that were lost on their way");
      }
    }
  }
  return {};
}

}  // namespace

bool IsLinkFailure(const Status& cause) {
  // An operation's and a program's own reasons name their group; the service's verdict on a link,
  // and an overdue build, concern all of them.
  return cause.code() == StatusCode::kCommFailed && cause.detail().group.empty();
}

std::string EncodeSummary(const ReplaySummary& summary) {
  Writer writer;
  writer.Put(kFormat);
  writer.Put(summary.epoch);
  writer.Put(summary.veto);
  writer.Put(summary.groups.size());
  for (const auto& [name, group] : summary.groups) {
    writer.Put(name);
    writer.Put(group.instance);
    writer.Put(group.ranks.size());
    for (const int rank : group.ranks) writer.Put(rank);
    writer.Put(group.next);
    writer.Put(group.first_pending);
    writer.Put(group.kept_from);
    writer.Put(group.sent);
    writer.Put(group.received);
  }
  return writer.Take();
}

std::optional<ReplaySummary> DecodeSummary(std::string_view bytes) {
  Reader reader(bytes);
  ReplaySummary summary;
  std::uint32_t format = 0;
  std::size_t groups = 0;
  if (!reader.Get(&format) || format != kFormat || !reader.Get(&summary.epoch) ||
      !reader.Get(&summary.veto) || !reader.Get(&groups)) {
    return std::nullopt;
  }
  for (std::size_t index = 0; index < groups; ++index) {
    std::string name;
    GroupSummary group;
    if (!reader.Get(&name) || !ReadGroup(&reader, &group)) return std::nullopt;
    summary.groups.emplace(std::move(name), std::move(group));
  }
  if (!reader.AtEnd()) return std::nullopt;
  return summary;
}

ReplayPlan PlanReplay(const std::vector<ReplaySummary>& members) {
  ReplayPlan plan;
  const auto size = static_cast<int>(members.size());
  for (int rank = 0; rank < size; ++rank) {
    const ReplaySummary& member = members[static_cast<std::size_t>(rank)];
    if (!member.veto.empty()) {
      plan.refusal = StrCat("rank ", rank, ": ", member.veto);
    } else if (member.epoch != members.front().epoch) {
      plan.refusal = StrCat("rank ", rank, " began in generation ", member.epoch, ", rank 0 in ",
                            members.front().epoch);
    }
    if (!plan.refusal.empty()) return plan;
  }
  for (const ReplaySummary& member : members) {
    for (const auto& [name, group] : member.groups) {
      if (plan.from.count(name) != 0 || group.ranks.empty()) continue;
      const bool fits = std::all_of(group.ranks.begin(), group.ranks.end(),
                                    [size](int rank) { return rank >= 0 && rank < size; });
      if (!fits) {
        plan.refusal = StrCat("group '", name, "' has ranks outside the world");
        return plan;
      }
      const Members in_group = MembersOf(members, name, group);
      std::uint64_t from = group.first_pending;
      for (const GroupSummary& one : in_group) from = std::min(from, one.first_pending);
      plan.refusal = RefusalOfGroup(name, in_group, from);
      if (!plan.refusal.empty()) return plan;
      plan.from[name] = from;
    }
  }
  return plan;
}

std::uint64_t ReceivedFrom(const std::vector<ReplaySummary>& members, const std::string& name,
                           int sender, const Stream& stream) {
  for (const ReplaySummary& member : members) {
    const auto found = member.groups.find(name);
    if (found == member.groups.end() || found->second.ranks.empty()) continue;
    const Members in_group = MembersOf(members, name, found->second);
    if (stream.peer < 0 || stream.peer >= static_cast<int>(in_group.size())) return 0;
    return CountIn(in_group[static_cast<std::size_t>(stream.peer)].received, {sender, stream.tag});
  }
  return 0;
}

void ReplayLog::Add(std::uint64_t number, std::size_t bytes, bool synchronises) {
  entries_[number] = {.bytes = bytes, .synchronises = synchronises};
  next_ = std::max(next_, number + 1);
}

std::vector<std::uint64_t> ReplayLog::Complete(std::uint64_t number) {
  const auto found = entries_.find(number);
  if (found == entries_.end() || found->second.completed) return {};
  found->second.completed = true;
  ++kept_operations_;
  kept_bytes_ += found->second.bytes;
  if (found->second.synchronises && number > last_) {
    last_but_one_ = last_;
    last_ = number;
  }
  std::vector<std::uint64_t> dropped;
  while (!entries_.empty() && entries_.begin()->second.completed) {
    const auto first = entries_.begin();
    const bool over = kept_operations_ > limits_.operations || kept_bytes_ > limits_.bytes;
    if (first->first >= last_but_one_ && !over) break;
    --kept_operations_;
    kept_bytes_ -= first->second.bytes;
    dropped.push_back(first->first);
    entries_.erase(first);
  }
  return dropped;
}

GroupSummary ReplayLog::Summary() const {
  GroupSummary summary;
  summary.next = next_;
  const auto pending = std::find_if(entries_.begin(), entries_.end(),
                                    [](const auto& entry) { return !entry.second.completed; });
  summary.first_pending = pending == entries_.end() ? next_ : pending->first;
  summary.kept_from = entries_.empty() ? next_ : entries_.begin()->first;
  summary.sent = sent_;
  summary.received = received_;
  return summary;
}

}  // namespace resilient::recovery
