#include "store/client/watch_cursor.h"

#include <utility>

#include "runtime/base/log.h"

namespace resilient::store {

WatchCursor::WatchCursor(std::string prefix, std::uint64_t from_revision)
    : prefix_(std::move(prefix)),
      phase_(from_revision == 0 ? Phase::kListing : Phase::kFollowing),
      next_(from_revision) {}

Op WatchCursor::Next() const {
  switch (phase_) {
    case Phase::kListing:
      return ListKeysOp{prefix_, after_, true};
    case Phase::kCatchingUp:
      return WatchOp{prefix_, next_, false};
    case Phase::kFollowing:
      break;
  }
  return WatchOp{prefix_, next_, true};
}

Result<std::optional<WatchBatch>> WatchCursor::OnReply(Reply reply) {
  if (reply.status.code() == StatusCode::kCompacted && phase_ != Phase::kListing) {
    phase_ = Phase::kListing;
    keys_.clear();
    after_.clear();
    first_page_ = 0;
    return std::optional<WatchBatch>();
  }
  if (!reply.status.ok()) return reply.status;
  return phase_ == Phase::kListing ? OnPage(std::move(reply)) : OnChanges(std::move(reply));
}

Result<std::optional<WatchBatch>> WatchCursor::OnPage(Reply reply) {
  // Each page must lead on, or the listing would have no end.
  if (reply.flag && (reply.events.empty() || reply.events.back().key <= after_)) {
    return Status(StatusCode::kProtocol,
                  StrCat("a page of the keys '", prefix_, "*' does not lead on"));
  }
  if (first_page_ == 0) first_page_ = reply.revision;
  last_page_ = reply.revision;
  if (reply.flag) after_ = reply.events.back().key;
  for (KeyEvent& event : reply.events) {
    keys_.insert_or_assign(std::move(event.key), std::move(event.value).value_or(std::string()));
  }
  if (reply.flag) return std::optional<WatchBatch>();
  next_ = first_page_ + 1;
  if (next_ > last_page_) return std::optional(TakeSnapshot());
  phase_ = Phase::kCatchingUp;
  return std::optional<WatchBatch>();
}

Result<std::optional<WatchBatch>> WatchCursor::OnChanges(Reply reply) {
  RESILIENT_RETURN_IF_ERROR(CheckChanges(reply));
  next_ = reply.revision + 1;
  if (phase_ == Phase::kCatchingUp) {
    for (KeyEvent& event : reply.events) {
      if (event.value) {
        keys_.insert_or_assign(std::move(event.key), std::move(*event.value));
      } else {
        keys_.erase(event.key);
      }
    }
    if (next_ > last_page_) return std::optional(TakeSnapshot());
    return std::optional<WatchBatch>();
  }
  if (reply.events.empty()) return std::optional<WatchBatch>();
  WatchBatch batch;
  batch.revision = reply.revision;
  batch.changes.reserve(reply.events.size());
  for (KeyEvent& event : reply.events) {
    batch.changes.push_back({event.revision, std::move(event.key), std::move(event.value)});
  }
  return std::optional(std::move(batch));
}

// A change that was told before, or one out of order, would be applied to the wrong value.
Status WatchCursor::CheckChanges(const Reply& reply) const {
  std::uint64_t least = next_;
  for (const KeyEvent& event : reply.events) {
    if (event.revision < least || event.revision > reply.revision) {
      return Status(StatusCode::kProtocol,
                    StrCat("the store told of revision ", event.revision, " of key '", event.key,
                           "' where revisions ", least, " to ", reply.revision, " are due"));
    }
    least = event.revision + 1;
  }
  if (reply.revision + 1 >= next_) return Status();
  return Status(StatusCode::kProtocol, StrCat("the store is at revision ", reply.revision,
                                              ", and was at ", next_ - 1, " before"));
}

WatchBatch WatchCursor::TakeSnapshot() {
  phase_ = Phase::kFollowing;
  WatchBatch batch;
  batch.snapshot = true;
  batch.revision = next_ - 1;
  for (auto& [key, value] : std::exchange(keys_, {})) {
    batch.changes.push_back({0, key, std::move(value)});
  }
  after_.clear();
  first_page_ = 0;
  return batch;
}

}  // namespace resilient::store
