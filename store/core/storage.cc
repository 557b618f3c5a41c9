#include "store/core/storage.h"

#include "runtime/base/printable.h"

namespace resilient::store {
namespace {

constexpr std::size_t kNumberBytes = 8;

void AppendNumber(std::string& row, std::uint64_t number) {
  for (std::size_t i = kNumberBytes; i > 0; --i) {
    row += static_cast<char>(number >> (8 * (i - 1)) & 0xff);
  }
}

void AppendName(std::string& row, std::string_view name) {
  AppendNumber(row, name.size());
  row += name;
}

std::string Row(RowKind kind) { return std::string(1, static_cast<char>(kind)); }

std::string JobScopeRow(RowKind kind, std::string_view job, std::uint64_t scope,
                        std::size_t more = 0) {
  std::string row;
  row.reserve(1 + 2 * kNumberBytes + job.size() + more);
  row += static_cast<char>(kind);
  AppendName(row, job);
  AppendNumber(row, scope);
  return row;
}

std::string ItemRow(RowKind kind, std::string_view job, std::uint64_t scope, std::string_view key) {
  std::string row = JobScopeRow(kind, job, scope, 3 * kNumberBytes + key.size());
  AppendName(row, key);
  return row;
}

// Takes a name apart from its front. Thread: value type.
class NameTaker {
 public:
  explicit NameTaker(std::string_view row) : rest_(row) {}

  NameTaker& Number(std::uint64_t& number) {
    if (rest_.size() < kNumberBytes) return Fail();
    number = 0;
    for (std::size_t i = 0; i < kNumberBytes; ++i) {
      number = number << 8 | static_cast<unsigned char>(rest_[i]);
    }
    rest_.remove_prefix(kNumberBytes);
    return *this;
  }
  NameTaker& Name(std::string& name) {
    std::uint64_t size = 0;
    Number(size);
    if (size > rest_.size()) return Fail();
    name = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return *this;
  }
  NameTaker& TheRole(Role& role) {
    if (rest_.empty()) return Fail();
    role = static_cast<Role>(rest_.front());
    if (role != Role::kRequest && role != Role::kControl) return Fail();
    rest_.remove_prefix(1);
    return *this;
  }
  bool Done() const { return ok_ && rest_.empty(); }

 private:
  NameTaker& Fail() {
    ok_ = false;
    rest_ = {};
    return *this;
  }
  std::string_view rest_;
  bool ok_ = true;
};

bool Take(NameTaker& taker, RowName& name) {
  switch (name.kind) {
    case RowKind::kStore:
      return taker.Done();
    case RowKind::kSession:
    case RowKind::kParticipant:
      return taker.Number(name.session).Done();
    case RowKind::kShared:
      return taker.Number(name.index).Done();
    case RowKind::kResult:
      return taker.Number(name.session).TheRole(name.role).Number(name.seq).Done();
    case RowKind::kJob:
      return taker.Name(name.job).Done();
    case RowKind::kWorld:
    case RowKind::kView:
      return taker.Name(name.job).Number(name.scope).Done();
    case RowKind::kSeat:
      return taker.Name(name.job).Number(name.scope).Number(name.index).Done();
    case RowKind::kKey:
      return taker.Name(name.job).Number(name.scope).Name(name.key).Done();
    case RowKind::kQueueItem:
      taker.Name(name.job).Number(name.scope).Name(name.key).Number(name.index);
      return taker.Done();
  }
  return false;
}

}  // namespace

std::string StoreRow() { return Row(RowKind::kStore); }

std::string SessionRow(SessionId session) {
  std::string row = Row(RowKind::kSession);
  AppendNumber(row, session);
  return row;
}

std::string SharedRow(std::uint64_t id) {
  std::string row = Row(RowKind::kShared);
  AppendNumber(row, id);
  return row;
}

std::string ResultRow(SessionId session, Role role, std::uint64_t seq) {
  std::string row = Row(RowKind::kResult);
  AppendNumber(row, session);
  row += static_cast<char>(role);
  AppendNumber(row, seq);
  return row;
}

std::string JobRow(std::string_view job) {
  std::string row = Row(RowKind::kJob);
  AppendName(row, job);
  return row;
}

std::string WorldRow(std::string_view job, std::uint64_t round) {
  return JobScopeRow(RowKind::kWorld, job, round);
}

std::string SeatRow(std::string_view job, std::uint64_t round, std::uint64_t rank) {
  std::string row = JobScopeRow(RowKind::kSeat, job, round, kNumberBytes);
  AppendNumber(row, rank);
  return row;
}

std::string ViewRow(std::string_view job, std::uint64_t round) {
  return JobScopeRow(RowKind::kView, job, round);
}

std::string ParticipantRow(SessionId session) {
  std::string row = Row(RowKind::kParticipant);
  AppendNumber(row, session);
  return row;
}

std::string KeyRow(std::string_view job, std::uint64_t scope, std::string_view key) {
  return ItemRow(RowKind::kKey, job, scope, key);
}

std::string QueueRow(std::string_view job, std::uint64_t scope, std::string_view key,
                     std::uint64_t index) {
  std::string row = ItemRow(RowKind::kQueueItem, job, scope, key);
  AppendNumber(row, index);
  return row;
}

std::optional<RowName> ParseRowName(std::string_view row) {
  if (row.empty() || row.front() < static_cast<char>(RowKind::kStore) ||
      row.front() > static_cast<char>(RowKind::kQueueItem)) {
    return std::nullopt;
  }
  RowName name;
  name.kind = static_cast<RowKind>(row.front());
  NameTaker taker(row.substr(1));
  if (!Take(taker, name)) return std::nullopt;
  return name;
}

std::string PrintableRow(std::string_view row) {
  constexpr std::size_t kShownAtMost = 200;
  const std::string text = Printable(row.substr(0, kShownAtMost));
  return row.size() > kShownAtMost ? text + "..." : text;
}

}  // namespace resilient::store
