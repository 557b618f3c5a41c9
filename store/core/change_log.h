#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/core/messages.h"
#include "store/core/quota.h"

namespace resilient::store {

// The latest changes of the keys of one job, for its watches: bounded in number and bytes, not kept
// over a restart of the server, and kept at all only from the first watch or such a restart on.
// Owner: Keyspace. Thread: caller-synchronised. Pure.
class ChangeLog {
 public:
  // `all`: what the bytes of all jobs are part of; outlives this, or is null.
  ChangeLog(std::size_t entries_max, std::size_t bytes_max, Pool* all = nullptr)
      : entries_max_(entries_max), bytes_(bytes_max, all) {}

  // From now on changes are kept; those up to `revision` are not known. The first call counts.
  void Begin(std::uint64_t revision);
  bool begun() const { return begun_; }

  // No-ops before Begin. REQUIRES: revisions ascend.
  void Note(std::uint64_t revision, std::uint64_t scope, std::string key,
            std::optional<std::string> value);
  // All keys of the scope are gone: whoever watches them begins anew.
  void NoteDrop(std::uint64_t revision, std::uint64_t scope);

  struct Changes {
    std::vector<KeyEvent> events;  // At most what one answer to a watch holds.
    std::uint64_t seen = 0;        // All up to this revision were looked at.
    // Not 0: some are not known any more; the oldest revision that a watch may begin from.
    std::uint64_t compacted = 0;
  };
  // What happened to the keys of a scope that begin with `prefix` in `from` or later; `present` is
  // the newest revision of the store. REQUIRES: begun().
  Changes Since(std::uint64_t from, std::uint64_t scope, std::string_view prefix,
                std::uint64_t present) const;

  std::size_t size() const { return entries_.size(); }
  std::size_t bytes() const { return bytes_.taken(); }

 private:
  struct Entry {
    std::uint64_t revision = 0;
    std::uint64_t scope = 0;
    bool drop = false;
    std::string key;
    std::optional<std::string> value;
  };
  void Add(Entry entry);
  static std::size_t BytesOf(const Entry& entry);

  const std::size_t entries_max_;
  std::deque<Entry> entries_;
  Quota bytes_;
  bool begun_ = false;
  std::uint64_t oldest_ = 0;  // All changes from this revision on are here.
};

}  // namespace resilient::store
