#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "store/core/journal.h"
#include "store/core/messages.h"
#include "store/core/storage.h"

namespace resilient::store {

// Values that many results of a durable store have in common: an exchange of n callers has n
// results of the same n values, which are one row here, and not n. Owner: SessionTable, whose
// ResultLogs hold them. Thread: caller-synchronised. Pure.
class SharedResults {
 public:
  // `journal` outlives this, or is null.
  explicit SharedResults(Journal* journal) : journal_(journal) {}
  SharedResults(const SharedResults&) = delete;
  SharedResults& operator=(const SharedResults&) = delete;

  // One more result has these values; the id of their row.
  std::uint64_t Hold(const std::shared_ptr<const SharedValues>& values);
  // One result less: the row goes with the last one.
  void Release(std::uint64_t id);

  // A row's value back. False: it is none.
  bool Restore(std::uint64_t id, std::string_view value);
  // Of a result that was restored. Null: there is no such row.
  std::shared_ptr<const SharedValues> Take(std::uint64_t id);
  // Forgets rows that no result has.
  void FinishRestore();
  void AppendRows(Rows& rows) const;

  std::size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::shared_ptr<const SharedValues> values;
    std::size_t holders = 0;
  };
  void Remove(std::map<std::uint64_t, Entry>::iterator entry);

  Journal* const journal_;
  std::map<std::uint64_t, Entry> entries_;
  std::unordered_map<const SharedValues*, std::uint64_t> ids_;
  std::uint64_t last_id_ = 0;
};

}  // namespace resilient::store
