#include <algorithm>
#include <string_view>
#include <utility>

#include "store/core/keyspace.h"

// What watches the keys of a keyspace.
namespace resilient::store {

Status Keyspace::Compacted(const std::string& prefix, std::uint64_t from, std::uint64_t oldest) {
  return Status(StatusCode::kCompacted,
                "the changes of keys '" + prefix + "*' since revision " + std::to_string(from) +
                    " are not kept any more, the oldest to watch from is " +
                    std::to_string(oldest) + "; list the keys anew and watch from there");
}

Status Keyspace::AddWatch(WaitId id, std::uint64_t scope, const std::string& prefix) {
  Detach(id);
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, 1, prefix.size()));
  Wait& wait = Register(id, Kind::kWatch, scope, 1, prefix.size());
  wait.keys = {prefix};
  wait.from = journal_->revision() + 1;
  scopes_[scope].watches[prefix].insert(id);
  return {};
}

void Keyspace::NoteChange(std::uint64_t scope, const std::string& key, const std::string* value) {
  const std::uint64_t revision = journal_->NextRevision();
  if (!changes_.begun()) return;
  changes_.Note(revision, scope, key, value ? std::optional(*value) : std::nullopt);
  NoteWatches(scopes_.at(scope), key);
}

// Looks at the prefixes of the key alone: from one that is none the search goes on where the two
// part, which is shorter each time.
void Keyspace::NoteWatches(const Scope& scope, std::string_view key) {
  const auto& watches = scope.watches;
  std::string_view rest = key;
  while (true) {
    auto next = watches.upper_bound(rest);
    if (next == watches.begin()) return;
    const std::string_view prefix = (--next)->first;
    const auto parts = std::mismatch(prefix.begin(), prefix.end(), rest.begin(), rest.end());
    const auto common = static_cast<std::size_t>(parts.first - prefix.begin());
    if (common == prefix.size()) {
      changed_.insert(next->second.begin(), next->second.end());
      if (prefix.empty()) return;
      rest = prefix.substr(0, prefix.size() - 1);
    } else {
      rest = rest.substr(0, common);
    }
  }
}

void Keyspace::NoteDrop(std::uint64_t scope) {
  changes_.NoteDrop(journal_->NextRevision(), scope);
  const Scope* found = FindScope(scope);
  if (!found) return;
  for (const auto& [prefix, watches] : found->watches) {
    changed_.insert(watches.begin(), watches.end());
  }
}

void Keyspace::AnswerWatches(std::vector<EndedWait>& ended) {
  if (changed_.empty()) return;
  for (const WaitId id : std::exchange(changed_, {})) {
    const Wait* wait = FindWait(id);
    if (wait == nullptr || wait->kind != Kind::kWatch) continue;
    const std::string prefix = wait->keys.front();
    const std::uint64_t from = wait->from;
    ChangeLog::Changes changes = ChangesSince(from, wait->scope, prefix);
    EndedWait end{.wait = id};
    if (changes.compacted > 0) end.status = Compacted(prefix, from, changes.compacted);
    end.events = std::move(changes.events);
    end.revision = changes.seen;
    end.oldest = changes.compacted;
    Detach(id);
    ended.push_back(std::move(end));
  }
}

}  // namespace resilient::store
