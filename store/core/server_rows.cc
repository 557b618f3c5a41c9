#include <iterator>
#include <optional>
#include <utility>

#include "store/core/row_codec.h"
#include "store/core/server_impl.h"

namespace resilient::store {
namespace {

// What a store keeps of itself. Thread: value type.
struct StoreState {
  std::uint64_t format = kRowFormat;
  std::string server_id;
  std::uint64_t epoch = 0;  // Starts, the present one included.
  SessionId last_session = 0;
  std::uint64_t generation_floor = 0;
  std::uint64_t revision = 0;
  std::uint64_t began_unix_ms = 0;
};

template <typename Archive>
void Fields(Archive& archive, StoreState& store) {
  archive(store.format, store.server_id, store.epoch, store.last_session, store.generation_floor,
          store.revision, store.began_unix_ms);
}

}  // namespace

std::string ServerCore::Impl::StoreRowValue() const {
  return EncodeRow(StoreState{kRowFormat, server_id_, epoch_, sessions_.last_kept(),
                              generation_floor_, journal_.revision(), began_unix_ms_});
}

void ServerCore::Impl::Finish(Effects& effects) {
  if (!journal_.on()) return;
  std::vector<Write> writes = journal_.Take();
  if (std::string row = StoreRowValue(); row != store_row_) {
    store_row_ = row;
    writes.push_back({StoreRow(), std::move(row)});
  }
  std::move(writes.begin(), writes.end(), std::back_inserter(effects.write));
}

Rows ServerCore::Impl::DumpRows() const {
  Rows rows;
  rows.emplace(StoreRow(), StoreRowValue());
  sessions_.AppendRows(rows);
  for (const auto& [name, job] : jobs_) {
    job.membership.AppendRows(rows);
    job.keys.AppendRows(rows);
  }
  return rows;
}

Status ServerCore::Impl::Restore(std::string_view row, std::string_view value) {
  const std::optional<RowName> name = ParseRowName(row);
  Status why(StatusCode::kInternal, "this is no row of a store");
  if (name) why = RestoreRow(*name, value);
  if (why.ok()) return {};
  return Status(StatusCode::kInternal,
                "the data of the store is damaged, at row '" + PrintableRow(row) + "' (" +
                    std::to_string(value.size()) + " bytes): " + why.message());
}

Status ServerCore::Impl::RestoreRow(const RowName& name, std::string_view value) {
  switch (name.kind) {
    case RowKind::kStore:
      return RestoreStore(value);
    case RowKind::kSession:
      return sessions_.RestoreSession(name.session, value);
    case RowKind::kShared:
      return sessions_.RestoreShared(name, value);
    case RowKind::kResult:
      return sessions_.RestoreResult(name, value);
    case RowKind::kParticipant: {
      const Session* session = sessions_.Find(name.session);
      Job* job = session ? FindJob(session->hello.job) : nullptr;
      if (!job) return Status(StatusCode::kInternal, "its session or its job is missing");
      return job->membership.Restore(name, value, &session->hello);
    }
    case RowKind::kJob: {
      if (name.job.empty()) return Status(StatusCode::kInternal, "it has no name");
      // Also where the limit is lower by now: what was kept is no damage.
      return AddJob(name.job)->membership.Restore(name, value, nullptr);
    }
    case RowKind::kWorld:
    case RowKind::kSeat:
    case RowKind::kView:
    case RowKind::kKey:
    case RowKind::kQueueItem:
      break;
  }
  Job* job = FindJob(name.job);
  if (!job) return Status(StatusCode::kInternal, "its job is missing");
  const bool of_membership =
      name.kind == RowKind::kWorld || name.kind == RowKind::kSeat || name.kind == RowKind::kView;
  return of_membership ? job->membership.Restore(name, value, nullptr)
                       : job->keys.Restore(name, value);
}

Status ServerCore::Impl::RestoreStore(std::string_view value) {
  StoreState store;
  const bool read = DecodeRow(value, store);
  if (store.format != kRowFormat) {
    return Status(StatusCode::kInternal, "the rows are of format " + std::to_string(store.format) +
                                             ", and this server reads format " +
                                             std::to_string(kRowFormat));
  }
  if (!read || store.server_id.empty()) return Status(StatusCode::kInternal, "this is no store");
  store_row_ = value;
  server_id_ = store.server_id;
  epoch_ = store.epoch;
  restored_last_session_ = store.last_session;
  generation_floor_ = store.generation_floor;
  began_unix_ms_ = store.began_unix_ms;
  journal_.RestoreRevision(store.revision);
  return {};
}

Status ServerCore::Impl::FinishRestore(Instant now, Effects& effects) {
  const Moment moment{clock_.Tick(now), Wall(now)};
  if (store_row_.empty() && (!jobs_.empty() || sessions_.sessions() > 0)) {
    return Status(StatusCode::kInternal,
                  "the data of the store is damaged: the row of the store itself is missing");
  }
  journal_.Take();  // What was restored is kept already.
  sessions_.FinishRestore(restored_last_session_, moment.now);
  for (const std::string& name : sessions_.Jobs()) {
    if (FindJob(name) != nullptr) continue;
    return Status(StatusCode::kInternal,
                  "the data of the store is damaged: job " + name + " has sessions and no row");
  }
  bool lived = false;
  bool ended_well = true;
  for (auto& [name, job] : jobs_) {
    MembershipEffects members;
    if (Status why = job.membership.FinishRestore(moment, members); !why.ok()) {
      return Status(StatusCode::kInternal, "the data of the store is damaged: " + why.message());
    }
    Apply(job, members, moment, effects);
    job.keys.BeginWatches();  // Who watched before has missed nothing so far.
    lived = lived || job.membership.generation() > 0;
    ended_well = ended_well && job.membership.EndedWell();
  }
  RestoreLeasedKeys(moment, effects);
  // The word of it may not have been said.
  effects.last_member_left = lived && ended_well && leases_.size() == 0;
  ++epoch_;
  return {};
}

}  // namespace resilient::store
