// Goal: whatever a crash has left of the log, the engine opens with the state after one of the
// transactions, never with anything else; a damaged file is refused as it is. Method: files copied
// while the engine has them open, then cut or spoiled at each place.

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/store_server/engine_support.h"

namespace resilient::store {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kFrameHeaderBytes = 24;
constexpr std::size_t kLogHeaderBytes = 32;
constexpr std::size_t kFrameBytes = kFrameHeaderBytes + kPageBytes;

// A store after some transactions that were not carried over from the log into the file: its bytes
// and the rows after each transaction.
struct Sample {
  std::string file;
  std::string log;
  std::vector<Rows> states;          // states[i]: after i transactions.
  std::vector<std::size_t> log_end;  // Bytes of the log that hold i transactions.
};

Sample MakeSample() {
  constexpr int kTransactions = 6;
  TestDirectory directory;
  const auto engine = MustOpen(directory.path());
  Sample sample;
  sample.states.push_back({});
  sample.log_end.push_back(0);
  Rows rows;
  for (int i = 1; i <= kTransactions; ++i) {
    // Each one changes all rows: a mixture of two states would show.
    std::vector<Write> writes;
    for (int row = 0; row < 4; ++row) {
      const std::string name = "row" + std::to_string(row);
      const std::string value = std::to_string(i) + std::string(1500, 'a' + i);
      writes.push_back({name, value});
      rows[name] = value;
    }
    MustCommit(*engine, writes);
    sample.states.push_back(rows);
    sample.log_end.push_back(std::filesystem::file_size(directory / "store.db-wal"));
  }
  sample.file = ReadBytes(directory / "store.db");
  sample.log = ReadBytes(directory / "store.db-wal");
  return sample;
}

// How many transactions the rows in a directory with these bytes are the result of; -1: none of
// the states.
int TransactionsIn(const Sample& sample, const std::string& log) {
  TestDirectory directory;
  WriteBytes(directory / "store.db", sample.file);
  WriteBytes(directory / "store.db-wal", log);
  const Rows rows = RowsIn(directory.path());
  for (std::size_t i = 0; i < sample.states.size(); ++i) {
    if (sample.states[i] == rows) return static_cast<int>(i);
  }
  return -1;
}

// The transactions that are wholly in the first `bytes` of the log.
int WholeIn(const Sample& sample, std::size_t bytes) {
  int whole = 0;
  for (std::size_t i = 1; i < sample.log_end.size(); ++i) {
    if (sample.log_end[i] <= bytes) whole = static_cast<int>(i);
  }
  return whole;
}

TEST(SqliteDamage, LogCutAtEachSector_OpensWithAPrefix) {
  const Sample sample = MakeSample();
  ASSERT_EQ(sample.log.size(), sample.log_end.back());
  for (std::size_t bytes = 0; bytes <= sample.log.size(); bytes += 512) {
    ASSERT_EQ(TransactionsIn(sample, sample.log.substr(0, bytes)), WholeIn(sample, bytes))
        << "cut at " << bytes << " of " << sample.log.size();
  }
}

TEST(SqliteDamage, LogCutAtEachByteOfTheLastFramesHeader_OpensWithAPrefix) {
  const Sample sample = MakeSample();
  ASSERT_EQ((sample.log.size() - kLogHeaderBytes) % kFrameBytes, 0u);
  const std::size_t frame = sample.log.size() - kFrameBytes;
  const int before_last = static_cast<int>(sample.states.size()) - 2;
  for (std::size_t bytes = frame - 1; bytes <= frame + kFrameHeaderBytes + 1; ++bytes) {
    ASSERT_EQ(TransactionsIn(sample, sample.log.substr(0, bytes)), before_last) << bytes;
  }
  EXPECT_EQ(TransactionsIn(sample, sample.log.substr(0, sample.log.size() - 1)), before_last);
  EXPECT_EQ(TransactionsIn(sample, sample.log), before_last + 1);
}

TEST(SqliteDamage, LogWithASpoiledByte_OpensWithAPrefix) {
  const Sample sample = MakeSample();
  for (std::size_t at = kLogHeaderBytes; at < sample.log.size(); at += 997) {
    std::string log = sample.log;
    log[at] = static_cast<char>(log[at] ^ 0x40);
    ASSERT_EQ(TransactionsIn(sample, log), WholeIn(sample, at)) << "spoiled at " << at;
  }
}

// Blocks that were allocated but never written.
TEST(SqliteDamage, LogWithZerosAtItsEnd_OpensWithAPrefix) {
  const Sample sample = MakeSample();
  for (const std::size_t zeros : {1u, 512u, 4096u, 10000u}) {
    std::string log = sample.log;
    log.replace(log.size() - zeros, zeros, zeros, '\0');
    // Where the log itself ends with zeros it is whole.
    const auto changed = std::mismatch(log.begin(), log.end(), sample.log.begin()).first;
    const auto intact = static_cast<std::size_t>(changed - log.begin());
    ASSERT_EQ(TransactionsIn(sample, log), WholeIn(sample, intact)) << zeros;
    ASSERT_EQ(TransactionsIn(sample, sample.log + std::string(zeros, '\0')),
              static_cast<int>(sample.states.size()) - 1);
  }
}

TEST(SqliteDamage, LogWithoutItsFile_RefusedUntouched) {
  const Sample sample = MakeSample();
  TestDirectory directory;
  WriteBytes(directory / "store.db-wal", sample.log);
  for (const bool empty_file : {false, true}) {
    if (empty_file) WriteBytes(directory / "store.db", "");
    const Status refused = OpenError(directory.path());
    EXPECT_EQ(refused.code(), StatusCode::kInternal) << refused.ToString();
    EXPECT_THAT(refused.message(), HasSubstr("is damaged"));
    EXPECT_EQ(ReadBytes(directory / "store.db-wal"), sample.log);
  }
}

TEST(SqliteDamage, FileWithAnotherBeginning_RefusedUntouched) {
  for (const std::string& bytes : {std::string("x"), std::string("SQLite format 3"),
                                   std::string(4096, 'x'), std::string(100, '\0')}) {
    TestDirectory directory;
    WriteBytes(directory / "store.db", bytes);
    const Status refused = OpenError(directory.path());
    EXPECT_EQ(refused.code(), StatusCode::kInternal) << refused.ToString();
    EXPECT_THAT(refused.message(), HasSubstr("is damaged"));
    EXPECT_EQ(ReadBytes(directory / "store.db"), bytes);
  }
}

// Each page spoiled in turn: refused, or (a page that holds nothing) all rows are there.
TEST(SqliteDamage, FileWithASpoiledPage_RefusedUntouchedOrWhole) {
  Rows rows;
  std::string whole;
  {
    TestDirectory directory;
    {
      const auto engine = MustOpen(directory.path());
      std::vector<Write> writes;
      for (int row = 0; row < 40; ++row) {
        rows["row" + std::to_string(row)] = std::string(700, 'v');
        writes.push_back({"row" + std::to_string(row), std::string(700, 'v')});
      }
      MustCommit(*engine, writes);
    }
    whole = ReadBytes(directory / "store.db");
  }
  int refusals = 0;
  for (std::size_t page = 0; page < whole.size() / kPageBytes; ++page) {
    TestDirectory directory;
    std::string file = whole;
    // The header of the page's tree, which in the first page follows the file's own.
    file.replace(page * kPageBytes + (page == 0 ? 100 : 0), 12, 12, '\x7f');
    WriteBytes(directory / "store.db", file);
    const auto opened = OpenSqliteEngine({.directory = directory.path()});
    if (opened.ok()) {
      EXPECT_EQ(LoadAll(**opened), rows) << "page " << page;
      continue;
    }
    ++refusals;
    EXPECT_EQ(opened.status().code(), StatusCode::kInternal) << opened.status().ToString();
    EXPECT_THAT(opened.status().message(), HasSubstr("is damaged"));
    EXPECT_EQ(ReadBytes(directory / "store.db"), file);
  }
  EXPECT_GE(refusals, 5);
}

TEST(SqliteDamage, FileCutShort_Refused) {
  TestDirectory directory;
  {
    const auto engine = MustOpen(directory.path());
    MustCommit(*engine, {{"a", std::string(20000, 'x')}});
  }
  const std::string cut = ReadBytes(directory / "store.db").substr(0, 2 * kPageBytes);
  WriteBytes(directory / "store.db", cut);
  const Status refused = OpenError(directory.path());
  EXPECT_EQ(refused.code(), StatusCode::kInternal) << refused.ToString();
  EXPECT_EQ(ReadBytes(directory / "store.db"), cut);
}

}  // namespace
}  // namespace resilient::store
