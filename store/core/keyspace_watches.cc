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
  RESILIENT_RETURN_IF_ERROR(CheckWait(id, prefix.size()));
  Wait& wait = Register(id, Kind::kWatch, scope, prefix.size());
  wait.keys = {prefix};
  wait.from = journal_->revision() + 1;
  scopes_[scope].watches[prefix].insert(id);
  return {};
}

void Keyspace::NoteChange(std::uint64_t scope, const std::string& key, const std::string* value) {
  const std::uint64_t revision = journal_->NextRevision();
  if (!changes_.begun()) return;
  changes_.Note(revision, scope, key, value ? std::optional(*value) : std::nullopt);
  for (const auto& [prefix, watches] : scopes_.at(scope).watches) {
    if (std::string_view(key).starts_with(prefix)) {
      changed_.insert(watches.begin(), watches.end());
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
    const auto waits = waits_of_.find(id.session);
    if (waits == waits_of_.end()) continue;
    const auto wait = waits->second.find(id.seq);
    if (wait == waits->second.end() || wait->second.kind != Kind::kWatch) continue;
    const std::string prefix = wait->second.keys.front();
    const std::uint64_t from = wait->second.from;
    ChangeLog::Changes changes = ChangesSince(from, wait->second.scope, prefix);
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
