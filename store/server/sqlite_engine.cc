#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "store/server/data_directory.h"
#include "store/server/engine.h"

namespace resilient::store {
namespace {

constexpr char kFile[] = "store.db";
constexpr int kApplicationId = 0x52534c54;  // "RSLT", in the file's header.
constexpr int kFormat = 2;                  // Of the tables; the file's user_version.
// A large value has a place of its own: SQLite compares keys by reading whole records, so with all
// values beside their names (format 1) each write read those of megabytes that it passed.
constexpr std::size_t kLargeBytes = 512;
constexpr const char* kCreateTables[] = {
    "CREATE TABLE rows(name BLOB PRIMARY KEY, value BLOB NOT NULL, large INTEGER) WITHOUT ROWID",
    "CREATE TABLE large(id INTEGER PRIMARY KEY, name BLOB NOT NULL, value BLOB NOT NULL)"};
constexpr char kPutFormat1Aside[] = "ALTER TABLE rows RENAME TO rows_of_format_1";
constexpr const char* kCarryOverFromFormat1[] = {
    "INSERT INTO large(name, value) SELECT name, value FROM rows_of_format_1 "
    "WHERE length(value) > 512",
    "INSERT INTO rows SELECT name, value, NULL FROM rows_of_format_1 WHERE length(value) <= 512",
    "INSERT INTO rows SELECT name, x'', id FROM large", "DROP TABLE rows_of_format_1"};
static_assert(kLargeBytes == 512);
// Of the write-ahead log, before it is carried over into the file: 4 MiB, as SQLite itself would.
constexpr int kCheckpointPages = 1000;
// What a large transaction leaves of the log behind is cut back to this.
constexpr char kLogBytesPragma[] = "PRAGMA journal_size_limit=67108864";

constexpr std::size_t kHeaderBytes = 100;  // Of an SQLite file.
constexpr std::size_t kVersionOffset = 60;
constexpr std::size_t kApplicationOffset = 68;
constexpr std::string_view kMagic("SQLite format 3\0", 16);

struct CloseStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Statement = std::unique_ptr<sqlite3_stmt, CloseStatement>;

std::string_view BytesOf(const Statement& row, int column) {
  const auto* bytes = static_cast<const char*>(sqlite3_column_blob(row.get(), column));
  const auto size = static_cast<std::size_t>(sqlite3_column_bytes(row.get(), column));
  return bytes == nullptr ? std::string_view() : std::string_view(bytes, size);  // Null: none.
}

std::uint32_t BigEndian(const char* bytes) {
  std::uint32_t number = 0;
  for (int i = 0; i < 4; ++i) number = number << 8 | static_cast<unsigned char>(bytes[i]);
  return number;
}

std::optional<std::size_t> FileSize(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return std::nullopt;
  return static_cast<std::size_t>(info.st_size);
}

Status Damaged(const std::string& path, std::string_view how) {
  return Status(StatusCode::kInternal,
                StrCat("the store's file ", path, " is damaged: ", how,
                       "; it is left as it is. Put a copy of it back, or move the directory away "
                       "and start with an empty store"));
}

Status Foreign(const std::string& path) {
  return Status(StatusCode::kSetting,
                StrCat(path, " is a file of another program; --data names a directory of its own"));
}

Status Newer(const std::string& path, std::uint32_t format) {
  return Status(StatusCode::kSetting,
                StrCat(path, " was written by a newer version of resilient-store (format ", format,
                       ", this one knows ", kFormat, "); start that version"));
}

// What the header says, before SQLite touches anything. (The header is always in the file itself,
// never in the log alone, since a new store is carried over at once.)
Status CheckHeader(const std::string& path) {
  const std::optional<std::size_t> size = FileSize(path);
  if (size.value_or(0) == 0) {
    // SQLite would throw a log without its file away.
    if (FileSize(path + "-wal").value_or(0) == 0) return Status::Ok();
    return Damaged(path, StrCat("it is missing, but its log ", path, "-wal is there"));
  }
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return DataError(path, "open", errno);
  std::array<char, kHeaderBytes> header{};
  const ssize_t count = pread(file.get(), header.data(), header.size(), 0);
  if (count < 0) return DataError(path, "read", errno);
  if (static_cast<std::size_t>(count) < header.size() ||
      std::string_view(header.data(), kMagic.size()) != kMagic) {
    return Damaged(path, "it does not begin as such a file does");
  }
  const std::uint32_t application = BigEndian(&header[kApplicationOffset]);
  if (application != 0 && application != kApplicationId) return Foreign(path);
  const std::uint32_t format = BigEndian(&header[kVersionOffset]);
  if (application == kApplicationId && format > kFormat) return Newer(path, format);
  return Status::Ok();
}

class SqliteEngine final : public Engine {
 public:
  explicit SqliteEngine(const EngineOptions& options)
      : path_(StrCat(options.directory, "/", kFile)),
        durability_(options.durability),
        crash_points_(options.crash_points != nullptr ? *options.crash_points : no_crash_points_) {}
  ~SqliteEngine() override;

  Status Open(FileDescriptor lock);

  Status Load(
      const std::function<void(std::string_view name, std::string_view value)>& row) override;
  Status Commit(const std::vector<Write>& writes) override;
  Status Tend() override;

 private:
  // The format is 0: there is no table yet.
  Status Check(std::uint32_t* format);
  Status Configure();
  // The tables of a new file, or of one of format 1, whose rows they get.
  Status Create(bool from_format_1);
  Status PrepareAll();
  Status FindLarge();
  Status Prepare(const char* sql, Statement* statement);
  // Runs to the end; `text` gets the first column of the first row.
  Status Query(const char* sql, std::string* text);
  Status Execute(const char* sql) { return Query(sql, nullptr); }
  Status QueryNumber(const char* sql, std::uint32_t* number);
  // A statement without rows, to be used again.
  Status Run(const Statement& statement);
  // With what it is about, from its first parameter on; the bytes stay until it has run.
  template <typename... Values>
  Status Run(const Statement& statement, const Values&... values);
  bool Bind(const Statement& statement, int index, std::string_view bytes) const;
  bool Bind(const Statement& statement, int index, std::int64_t number) const;
  Status Apply(const Write& write);
  Status PutLarge(const std::string& name, const std::string& value);
  Status DropLarge(const std::string& name);
  Status Error(const std::string& doing) const;
  // errno of the last system call that failed on the file or its log; 0: not known.
  int SystemError() const;
  // Leaves the log alone when the database is closed: nothing of the file changes.
  void KeepLogAtClose(bool keep);

  const std::string path_;
  const Durability durability_;
  CrashPoints no_crash_points_;
  CrashPoints& crash_points_;
  FileDescriptor lock_;
  sqlite3* db_ = nullptr;
  Statement begin_;
  Statement put_;
  Statement remove_;
  Statement put_place_;
  Statement add_large_;
  Statement set_large_;
  Statement remove_large_;
  Statement commit_;
  std::unordered_map<std::string, std::int64_t> large_;  // By name: the id of its large value.
  int log_pages_ = 0;
  bool failed_ = false;
};

SqliteEngine::~SqliteEngine() {
  for (Statement* statement : {&begin_, &put_, &remove_, &put_place_, &add_large_, &set_large_,
                               &remove_large_, &commit_}) {
    statement->reset();
  }
  if (db_ == nullptr) return;
  if (failed_) KeepLogAtClose(true);
  sqlite3_close(db_);
}

void SqliteEngine::KeepLogAtClose(bool keep) {
  sqlite3_db_config(db_, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, keep ? 1 : 0, nullptr);
}

// sqlite3_system_errno is that of failed opens alone; a failed write notes it with the file.
int SqliteEngine::SystemError() const {
  if (const int error = sqlite3_system_errno(db_); error != 0) return error;
  for (const int which : {SQLITE_FCNTL_JOURNAL_POINTER, SQLITE_FCNTL_FILE_POINTER}) {
    sqlite3_file* file = nullptr;
    if (sqlite3_file_control(db_, "main", which, static_cast<void*>(&file)) != SQLITE_OK) continue;
    if (file == nullptr || file->pMethods == nullptr) continue;
    int error = 0;
    if (file->pMethods->xFileControl(file, SQLITE_FCNTL_LAST_ERRNO, &error) != SQLITE_OK) continue;
    if (error != 0) return error;
  }
  return 0;
}

Status SqliteEngine::Error(const std::string& doing) const {
  const int code = sqlite3_extended_errcode(db_);
  const int system = SystemError();
  switch (code & 0xff) {
    case SQLITE_FULL:
      return DataError(path_, doing, ENOSPC);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return Damaged(path_, sqlite3_errmsg(db_));
    case SQLITE_READONLY:
      return DataError(path_, doing, EROFS);
    case SQLITE_BUSY:
      return Status(StatusCode::kSetting,
                    StrCat("another program has ", path_, " open; end it, then start the store"));
    default:
      break;
  }
  if (system != 0) return DataError(path_, doing, system);
  return Status(StatusCode::kInternal, StrCat("cannot ", doing, " ", path_, ": ",
                                              sqlite3_errmsg(db_), " (SQLite code ", code, ")"));
}

Status SqliteEngine::Prepare(const char* sql, Statement* statement) {
  sqlite3_stmt* prepared = nullptr;
  const int code = sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT, &prepared, nullptr);
  statement->reset(prepared);
  return code == SQLITE_OK ? Status::Ok() : Error("use");
}

Status SqliteEngine::Query(const char* sql, std::string* text) {
  Statement statement;
  RESILIENT_RETURN_IF_ERROR(Prepare(sql, &statement));
  int code = sqlite3_step(statement.get());
  if (code == SQLITE_ROW && text != nullptr) {
    const auto* column = sqlite3_column_text(statement.get(), 0);
    *text = column != nullptr ? reinterpret_cast<const char*>(column) : "";
  }
  while (code == SQLITE_ROW) code = sqlite3_step(statement.get());
  return code == SQLITE_DONE ? Status::Ok() : Error("open");
}

Status SqliteEngine::QueryNumber(const char* sql, std::uint32_t* number) {
  std::string text;
  RESILIENT_RETURN_IF_ERROR(Query(sql, &text));
  *number = static_cast<std::uint32_t>(std::strtoll(text.c_str(), nullptr, 10));
  return Status::Ok();
}

Status SqliteEngine::Open(FileDescriptor lock) {
  lock_ = std::move(lock);
  RESILIENT_RETURN_IF_ERROR(CheckHeader(path_));
  RESILIENT_RETURN_IF_ERROR(ProtectFile(path_, true));
  RESILIENT_RETURN_IF_ERROR(ProtectFile(path_ + "-wal", false));  // A new one is as the file is.
  const int code = sqlite3_open_v2(
      path_.c_str(), &db_,
      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE,
      nullptr);
  if (code != SQLITE_OK) return Error("open");
  KeepLogAtClose(true);
  std::uint32_t format = 0;
  RESILIENT_RETURN_IF_ERROR(Check(&format));
  if (sqlite3_db_readonly(db_, "main") == 1) return DataError(path_, "write", EROFS);
  RESILIENT_RETURN_IF_ERROR(Configure());
  if (format < kFormat) RESILIENT_RETURN_IF_ERROR(Create(format == 1));
  RESILIENT_RETURN_IF_ERROR(PrepareAll());
  RESILIENT_RETURN_IF_ERROR(FindLarge());
  KeepLogAtClose(false);
  return Status::Ok();
}

Status SqliteEngine::PrepareAll() {
  const std::pair<const char*, Statement*> all[] = {
      {"BEGIN IMMEDIATE", &begin_},
      {"REPLACE INTO rows(name, value) VALUES(?1, ?2)", &put_},
      {"DELETE FROM rows WHERE name = ?1", &remove_},
      {"REPLACE INTO rows(name, value, large) VALUES(?1, x'', ?2)", &put_place_},
      {"INSERT INTO large(name, value) VALUES(?1, ?2)", &add_large_},
      {"UPDATE large SET value = ?2 WHERE id = ?1", &set_large_},
      {"DELETE FROM large WHERE id = ?1", &remove_large_},
      {"COMMIT", &commit_}};
  for (const auto& [sql, statement] : all) RESILIENT_RETURN_IF_ERROR(Prepare(sql, statement));
  return Status::Ok();
}

// The values are not read for it: they come last in their records.
Status SqliteEngine::FindLarge() {
  Statement select;
  RESILIENT_RETURN_IF_ERROR(Prepare("SELECT name, id FROM large", &select));
  int code = sqlite3_step(select.get());
  for (; code == SQLITE_ROW; code = sqlite3_step(select.get())) {
    large_.emplace(BytesOf(select, 0), sqlite3_column_int64(select.get(), 1));
  }
  return code == SQLITE_DONE ? Status::Ok() : Error("read");
}

// Reads only; but the first read carries out what a crash has left to do.
Status SqliteEngine::Check(std::uint32_t* format) {
  // One process alone: no shared memory beside the file, and no lock to be taken for each step.
  RESILIENT_RETURN_IF_ERROR(Execute("PRAGMA locking_mode=EXCLUSIVE"));
  std::uint32_t tables = 0;
  std::uint32_t application = 0;
  RESILIENT_RETURN_IF_ERROR(QueryNumber("SELECT count(*) FROM sqlite_schema", &tables));
  RESILIENT_RETURN_IF_ERROR(QueryNumber("PRAGMA application_id", &application));
  RESILIENT_RETURN_IF_ERROR(QueryNumber("PRAGMA user_version", format));
  if (application == 0 && tables == 0) {
    *format = 0;
    return Status::Ok();
  }
  if (application != kApplicationId) return Foreign(path_);
  if (*format > kFormat) return Newer(path_, *format);
  std::string verdict;
  RESILIENT_RETURN_IF_ERROR(Query("PRAGMA quick_check(1)", &verdict));
  if (verdict != "ok") return Damaged(path_, verdict);
  return Status::Ok();
}

Status SqliteEngine::Configure() {
  // OFF: what was written is in the kernel's hands, where it survives this process.
  RESILIENT_RETURN_IF_ERROR(Execute(
      durability_ == Durability::kMachine ? "PRAGMA synchronous=FULL" : "PRAGMA synchronous=OFF"));
  std::string mode;
  RESILIENT_RETURN_IF_ERROR(Query("PRAGMA journal_mode=WAL", &mode));
  if (mode != "wal") {
    return Status(StatusCode::kSetting,
                  StrCat("the file system of ", path_, " cannot hold a store (journal mode ", mode,
                         "); name a directory on another one"));
  }
  RESILIENT_RETURN_IF_ERROR(Execute("PRAGMA wal_autocheckpoint=0"));  // In Tend instead.
  RESILIENT_RETURN_IF_ERROR(Execute(kLogBytesPragma));
  sqlite3_wal_hook(
      db_,
      [](void* engine, sqlite3*, const char*, int pages) {
        static_cast<SqliteEngine*>(engine)->log_pages_ = pages;
        return SQLITE_OK;
      },
      this);
  return Status::Ok();
}

Status SqliteEngine::Create(bool from_format_1) {
  RESILIENT_RETURN_IF_ERROR(Execute("BEGIN IMMEDIATE"));
  if (from_format_1) RESILIENT_RETURN_IF_ERROR(Execute(kPutFormat1Aside));
  for (const char* sql : kCreateTables) RESILIENT_RETURN_IF_ERROR(Execute(sql));
  if (from_format_1) {
    for (const char* sql : kCarryOverFromFormat1) RESILIENT_RETURN_IF_ERROR(Execute(sql));
  }
  RESILIENT_RETURN_IF_ERROR(Execute(StrCat("PRAGMA application_id=", kApplicationId).c_str()));
  RESILIENT_RETURN_IF_ERROR(Execute(StrCat("PRAGMA user_version=", kFormat).c_str()));
  RESILIENT_RETURN_IF_ERROR(Execute("COMMIT"));
  return Execute("PRAGMA wal_checkpoint(TRUNCATE)");
}

Status SqliteEngine::Load(
    const std::function<void(std::string_view name, std::string_view value)>& row) {
  crash_points_.Pass();
  Statement select;
  RESILIENT_RETURN_IF_ERROR(
      Prepare("SELECT rows.name, coalesce(large.value, rows.value), rows.large, large.id FROM rows "
              "LEFT JOIN large ON large.id = rows.large ORDER BY rows.name",
              &select));
  int code = sqlite3_step(select.get());
  for (; code == SQLITE_ROW; code = sqlite3_step(select.get())) {
    if (sqlite3_column_int64(select.get(), 2) != sqlite3_column_int64(select.get(), 3)) {
      return Damaged(path_, "a large value is missing");
    }
    row(BytesOf(select, 0), BytesOf(select, 1));
  }
  if (code != SQLITE_DONE) return Error("read");
  crash_points_.Pass();
  return Status::Ok();
}

Status SqliteEngine::Run(const Statement& statement) {
  const int code = sqlite3_step(statement.get());
  Status outcome = code == SQLITE_DONE ? Status::Ok() : Error("write");
  sqlite3_reset(statement.get());
  return outcome;
}

bool SqliteEngine::Bind(const Statement& statement, int index, std::string_view bytes) const {
  return sqlite3_bind_blob64(statement.get(), index, bytes.data(), bytes.size(), SQLITE_STATIC) ==
         SQLITE_OK;
}

bool SqliteEngine::Bind(const Statement& statement, int index, std::int64_t number) const {
  return sqlite3_bind_int64(statement.get(), index, number) == SQLITE_OK;
}

template <typename... Values>
Status SqliteEngine::Run(const Statement& statement, const Values&... values) {
  int index = 0;
  if (!(Bind(statement, ++index, values) && ...)) return Error("write");
  return Run(statement);
}

Status SqliteEngine::Apply(const Write& write) {
  if (write.value && write.value->size() > kLargeBytes) return PutLarge(write.row, *write.value);
  RESILIENT_RETURN_IF_ERROR(DropLarge(write.row));
  return write.value ? Run(put_, write.row, *write.value) : Run(remove_, write.row);
}

Status SqliteEngine::PutLarge(const std::string& name, const std::string& value) {
  const auto found = large_.find(name);
  if (found != large_.end()) return Run(set_large_, found->second, value);
  RESILIENT_RETURN_IF_ERROR(Run(add_large_, name, value));
  const std::int64_t id = sqlite3_last_insert_rowid(db_);
  large_.emplace(name, id);
  return Run(put_place_, name, id);
}

Status SqliteEngine::DropLarge(const std::string& name) {
  const auto found = large_.find(name);
  if (found == large_.end()) return Status::Ok();
  const std::int64_t id = found->second;
  large_.erase(found);
  return Run(remove_large_, id);
}

Status SqliteEngine::Commit(const std::vector<Write>& writes) {
  RESILIENT_CHECK(!failed_);
  crash_points_.Pass();
  Status outcome = Run(begin_);
  for (const Write& write : writes) {
    if (!outcome.ok()) break;
    crash_points_.Pass();
    outcome = Apply(write);
  }
  crash_points_.Pass();
  if (outcome.ok()) outcome = Run(commit_);
  failed_ = !outcome.ok();
  crash_points_.Pass();
  return outcome;
}

Status SqliteEngine::Tend() {
  RESILIENT_CHECK(!failed_);
  if (log_pages_ < kCheckpointPages) return Status::Ok();
  crash_points_.Pass();
  const int code =
      sqlite3_wal_checkpoint_v2(db_, nullptr, SQLITE_CHECKPOINT_PASSIVE, nullptr, nullptr);
  failed_ = code != SQLITE_OK;
  if (failed_) return Error("write");
  log_pages_ = 0;
  crash_points_.Pass();
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<Engine>> OpenSqliteEngine(const EngineOptions& options) {
  RESILIENT_RETURN_IF_ERROR(MakeDataDirectory(options.directory));
  Result<FileDescriptor> lock = LockDataDirectory(options.directory);
  if (!lock.ok()) return lock.status();
  auto engine = std::make_unique<SqliteEngine>(options);
  RESILIENT_RETURN_IF_ERROR(engine->Open(std::move(*lock)));
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace resilient::store
