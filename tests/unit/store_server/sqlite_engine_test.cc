// Goal: the engine keeps what it committed, all of a transaction or nothing, and refuses every
// directory that it cannot use with a text that says what to do, leaving it as it was. Method: real
// directories; second processes by fork; limits of the file size instead of a full disk.

#include <sqlite3.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/store_server/engine_support.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

TEST(SqliteEngine, NewDirectory_IsMadeForThisUserAlone) {
  TestDirectory directory;
  const std::string deep = directory / "a/b/data/";
  EXPECT_EQ(RowsIn(deep), Rows());
  struct stat info {};
  ASSERT_EQ(stat(deep.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

unsigned ModeOf(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 0777;
}

TEST(SqliteEngine, Files_AreForThisUserAlone) {
  TestDirectory directory;
  {
    const auto engine = MustOpen(directory.path());
    MustCommit(*engine, {{"k", "v"}});
    for (const char* file : {"store.db", "store.db-wal", "lock"}) {
      EXPECT_EQ(ModeOf(directory / file), 0600u) << file;
    }
  }
  // As an earlier version has left them.
  ASSERT_EQ(chmod((directory / "store.db").c_str(), 0644), 0);
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"k", "v"}}));
  EXPECT_EQ(ModeOf(directory / "store.db"), 0600u);
}

TEST(SqliteEngine, DirectoryThatAllMayWrite_IsRefused) {
  TestDirectory directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0777), 0);
  const Status refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), HasSubstr("chmod o-w "));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(SqliteEngine, LinksInPlaceOfItsFiles_AreRefusedAndNotFollowed) {
  for (const char* file : {"store.db", "store.db-wal", "lock"}) {
    TestDirectory directory;
    TestDirectory elsewhere;
    WriteBytes(elsewhere / "precious", "text");
    std::filesystem::create_symlink(elsewhere / "precious", directory / file);
    EXPECT_FALSE(OpenError(directory.path()).ok()) << file;
    EXPECT_EQ(ReadBytes(elsewhere / "precious"), "text") << file;
  }
}

TEST(SqliteEngine, CommittedRows_AreThereAfterReopening) {
  for (const Durability durability : {Durability::kProcess, Durability::kMachine}) {
    TestDirectory directory;
    const std::string binary("\0\xff\n\0", 4);
    {
      const auto engine = MustOpen(directory.path(), durability);
      MustCommit(*engine, {{"b", "old"}, {"gone", "x"}, {binary, binary}, {"empty", ""}});
      MustCommit(*engine, {{"b", "new"}, {"gone", std::nullopt}, {"never", std::nullopt}});
      MustCommit(*engine, {{"twice", "1"}, {"twice", std::nullopt}, {"twice", "2"}});
      MustCommit(*engine, {});
    }
    const Rows expected = {{"b", "new"}, {binary, binary}, {"empty", ""}, {"twice", "2"}};
    EXPECT_EQ(RowsIn(directory.path()), expected);
  }
}

TEST(SqliteEngine, LargeValues_AreKept) {
  TestDirectory directory;
  const std::string large(8u << 20, 'x');
  const std::string long_name(20u << 10, 'k');
  {
    const auto engine = MustOpen(directory.path());
    MustCommit(*engine, {{"large", large}, {long_name, "v"}});
  }
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"large", large}, {long_name, "v"}}));
}

// Bytes that this process has read, also of what the kernel has in memory.
std::uint64_t BytesRead() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  std::uint64_t bytes = 0;
  counters >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

// Each row that was written read the values that it passed on its way: 800 MB of them.
TEST(SqliteEngine, LargeValues_AreNotReadForTheRowsBesideThem) {
  TestDirectory directory;
  const auto engine = MustOpen(directory.path());
  std::vector<Write> large;
  for (char row = 'a'; row < 'i'; ++row) {
    large.push_back({std::string(1, row), std::string(1u << 20, 'x')});
  }
  MustCommit(*engine, large);
  std::vector<Write> small;
  for (int row = 0; row < 4000; ++row) {
    small.push_back({std::string(1, static_cast<char>('a' + row % 8)) + std::to_string(row), "v"});
  }
  const std::uint64_t before = BytesRead();
  MustCommit(*engine, small);
  EXPECT_LT(BytesRead() - before, 64u << 20);
}

TEST(SqliteEngine, RowsOfFormat1_AreCarriedOver) {
  TestDirectory directory;
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((directory / "store.db").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db,
                         "PRAGMA journal_mode=WAL;"
                         "CREATE TABLE rows(name BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT "
                         "ROWID; PRAGMA application_id=1381190740; PRAGMA user_version=1;"
                         "INSERT INTO rows VALUES(x'62', x'00ff'), (x'61', x''), (x'63', "
                         "zeroblob(100000))",
                         nullptr, nullptr, nullptr),
            SQLITE_OK)
      << sqlite3_errmsg(db);
  sqlite3_close(db);
  const Rows rows = {{"b", std::string("\0\xff", 2)}, {"a", ""}, {"c", std::string(100000, '\0')}};
  EXPECT_EQ(RowsIn(directory.path()), rows);
  MustCommit(*MustOpen(directory.path()), {{"b", "new"}, {"c", std::nullopt}});
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"a", ""}, {"b", "new"}}));
}

// Large values have a table of their own; a row's value may become large, and small again.
TEST(SqliteEngine, RandomChangesOfAllSizes_AreKept) {
  TestDirectory directory;
  std::mt19937 random(11);
  const auto below = [&random](std::size_t most) { return random() % most; };
  constexpr std::size_t kSizes[] = {0, 1, 511, 512, 513, 1000, 5000, 100'000};
  Rows rows;
  for (int opened = 0; opened < 20; ++opened) {
    const auto engine = MustOpen(directory.path());
    EXPECT_EQ(LoadAll(*engine), rows);
    for (int commit = 0; commit < 10; ++commit) {
      std::vector<Write> writes;
      for (std::size_t i = below(12); i > 0; --i) {
        const std::string name = "row" + std::to_string(below(15));
        if (below(4) == 0) {
          writes.push_back({name, std::nullopt});
          rows.erase(name);
        } else {
          const char letter = static_cast<char>('a' + below(26));
          writes.push_back({name, std::string(kSizes[below(std::size(kSizes))], letter)});
          rows[name] = *writes.back().value;
        }
      }
      MustCommit(*engine, writes);
    }
  }
  EXPECT_EQ(RowsIn(directory.path()), rows);
}

// Neither the log nor the file grows with the number of changes.
TEST(SqliteEngine, ManyChanges_DoNotGrowTheFiles) {
  TestDirectory directory;
  const auto engine = MustOpen(directory.path());
  for (int round = 0; round < 200; ++round) {
    std::vector<Write> writes;
    for (int row = 0; row < 50; ++row) {
      writes.push_back({"row" + std::to_string(row), std::string(1024, 'a' + round % 26)});
    }
    MustCommit(*engine, writes);
  }
  EXPECT_LT(std::filesystem::file_size(directory / "store.db"), 512u << 10);
  EXPECT_LT(std::filesystem::file_size(directory / "store.db-wal"), 8u << 20);
  EXPECT_GT(std::filesystem::file_size(directory / "store.db"), 40u << 10) << "never carried over";
}

TEST(SqliteEngine, SecondEngine_IsToldWhoHoldsTheDirectory) {
  TestDirectory directory;
  auto engine = MustOpen(directory.path());
  MustCommit(*engine, {{"k", "v"}});
  const pid_t child = fork();
  if (child == 0) {
    const auto second = OpenSqliteEngine({.directory = directory.path()});
    const std::string pid = "pid " + std::to_string(getppid());
    const bool told = !second.ok() && second.status().code() == StatusCode::kSetting &&
                      second.status().message().find(pid) != std::string::npos;
    _exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  // Within one process, too: the lock belongs to the open file.
  EXPECT_THAT(OpenError(directory.path()).message(), HasSubstr("in use by another server: pid"));
  MustCommit(*engine, {{"k", "w"}});
  engine.reset();
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"k", "w"}}));
}

TEST(SqliteEngine, KilledHolder_LeavesTheDirectoryFree) {
  TestDirectory directory;
  const pid_t child = fork();
  if (child == 0) {
    const auto engine = OpenSqliteEngine({.directory = directory.path()});
    const bool kept = engine.ok() && (*engine)->Commit({{"k", "v"}}).ok();
    if (kept) raise(SIGKILL);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"k", "v"}}));
}

TEST(SqliteEngine, DirectoryThatIsAFile_Refused) {
  TestDirectory directory;
  WriteBytes(directory / "file", "text");
  const Status refused = OpenError(directory / "file");
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), HasSubstr("is not a directory"));
  const Status below = OpenError(directory / "file/data");
  EXPECT_EQ(below.code(), StatusCode::kSetting);
  EXPECT_THAT(below.message(), HasSubstr("cannot make the data directory"));
  EXPECT_EQ(ReadBytes(directory / "file"), "text");
}

// As root every mode may be written; /proc takes no files from anybody.
TEST(SqliteEngine, DirectoryThatTakesNoFiles_Refused) {
  const Status refused = OpenError("/proc/self/data");
  EXPECT_EQ(refused.code(), StatusCode::kSetting) << refused.ToString();
  EXPECT_THAT(refused.message(), HasSubstr("/proc/self/data"));
}

TEST(SqliteEngine, DirectoryWithoutWriteAccess_Refused) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  TestDirectory directory;
  std::filesystem::permissions(directory.path(), std::filesystem::perms(0500));
  const Status refused = OpenError(directory.path());
  std::filesystem::permissions(directory.path(), std::filesystem::perms(0700));
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), HasSubstr("--data names a directory that the server may write"));
}

// Runs in a process of its own, as the limit is a process's. 0: as told; otherwise the exit code
// tells where it was not.
template <typename Body>
int WithFileSizeLimit(rlim_t bytes, Body body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, bytes};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(100);
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SqliteEngine, NoSpaceAtOpen_Refused) {
  TestDirectory directory;
  const int outcome = WithFileSizeLimit(2048, [&] {
    const auto opened = OpenSqliteEngine({.directory = directory.path()});
    if (opened.ok()) return 1;
    if (opened.status().code() != StatusCode::kSetting) return 2;
    return opened.status().message().find("make room") == std::string::npos ? 3 : 0;
  });
  EXPECT_EQ(outcome, 0);
  EXPECT_EQ(RowsIn(directory.path()), Rows());
}

TEST(SqliteEngine, NoSpaceAtCommit_FailsAndKeepsWhatWasCommitted) {
  TestDirectory directory;
  int kept[2];
  ASSERT_EQ(pipe(kept), 0);
  const int outcome = WithFileSizeLimit(256u << 10, [&] {
    const auto engine = OpenSqliteEngine({.directory = directory.path()});
    if (!engine.ok()) return 1;
    for (int i = 0; i < 1000; ++i) {
      Status committed = (*engine)->Commit({{"row" + std::to_string(i), std::string(3000, 'x')}});
      if (committed.ok()) committed = (*engine)->Tend();
      if (committed.ok()) {
        if (write(kept[1], "+", 1) != 1) return 4;
        continue;
      }
      if (committed.code() != StatusCode::kSetting) return 2;
      return committed.message().find("make room") == std::string::npos ? 3 : 0;
    }
    return 5;
  });
  close(kept[1]);
  EXPECT_EQ(outcome, 0);
  std::string marks(2000, ' ');
  const ssize_t count = read(kept[0], marks.data(), marks.size());
  close(kept[0]);
  ASSERT_GT(count, 10);
  Rows expected;
  for (ssize_t i = 0; i < count; ++i) {
    expected["row" + std::to_string(i)] = std::string(3000, 'x');
  }
  EXPECT_EQ(RowsIn(directory.path()), expected);
}

TEST(SqliteEngine, FileOfAnotherProgram_RefusedUntouched) {
  TestDirectory directory;
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((directory / "store.db").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(
      sqlite3_exec(db, "CREATE TABLE t(x); INSERT INTO t VALUES(1)", nullptr, nullptr, nullptr),
      SQLITE_OK);
  sqlite3_close(db);
  std::string before = ReadBytes(directory / "store.db");
  Status refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), HasSubstr("another program"));
  EXPECT_EQ(ReadBytes(directory / "store.db"), before);

  before.replace(68, 4, "abcd");  // With an application id.
  WriteBytes(directory / "store.db", before);
  refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_EQ(ReadBytes(directory / "store.db"), before);
}

TEST(SqliteEngine, NewerFormat_RefusedUntouched) {
  TestDirectory directory;
  MustCommit(*MustOpen(directory.path()), {{"k", "v"}});
  std::string file = ReadBytes(directory / "store.db");
  file[63] = 99;  // The last byte of user_version.
  WriteBytes(directory / "store.db", file);
  const Status refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kSetting);
  EXPECT_THAT(refused.message(), HasSubstr("newer version of resilient-store (format 99"));
  EXPECT_EQ(ReadBytes(directory / "store.db"), file);
}

// A crash may end the making of a store at any point: an empty file, or one without a table.
TEST(SqliteEngine, HalfMadeStore_IsMadeAnew) {
  TestDirectory directory;
  WriteBytes(directory / "store.db", "");
  EXPECT_EQ(RowsIn(directory.path()), Rows());

  TestDirectory other;
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open((other / "store.db").c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "PRAGMA journal_mode=WAL", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  ASSERT_GT(std::filesystem::file_size(other / "store.db"), 0u);
  EXPECT_EQ(RowsIn(other.path()), Rows());
}

TEST(SqliteEngine, FileOpenElsewhere_Refused) {
  TestDirectory directory;
  MustCommit(*MustOpen(directory.path()), {{"k", "v"}});
  // Another process, as locks of SQLite are a process's.
  int ready[2];
  int done[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(done), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(done[1]);
    sqlite3* db = nullptr;
    const bool held = sqlite3_open((directory / "store.db").c_str(), &db) == SQLITE_OK &&
                      sqlite3_exec(db, "PRAGMA locking_mode=EXCLUSIVE; BEGIN IMMEDIATE", nullptr,
                                   nullptr, nullptr) == SQLITE_OK;
    char byte = held ? '+' : '-';
    if (write(ready[1], &byte, 1) != 1) _exit(2);
    if (read(done[0], &byte, 1) != 0) _exit(3);  // Until the parent closes its end.
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, '+');
  const Status refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kSetting) << refused.ToString();
  EXPECT_THAT(refused.message(), HasSubstr("another program has"));
  close(done[1]);
  waitpid(child, nullptr, 0);
  for (const int fd : {ready[0], ready[1], done[0]}) close(fd);
  EXPECT_EQ(RowsIn(directory.path()), (Rows{{"k", "v"}}));
}

}  // namespace
}  // namespace resilient::store
