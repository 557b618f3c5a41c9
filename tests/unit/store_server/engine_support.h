#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "store/server/engine.h"

// What the tests of the engine share.
namespace resilient::store {

using Rows = std::map<std::string, std::string>;

// An empty directory of its own for each test, removed at its end.
class TestDirectory {
 public:
  TestDirectory() {
    std::string name = testing::TempDir() + "resilient-engine-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "no directory for the test: " << name;
    path_ = name;
  }
  ~TestDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestDirectory(const TestDirectory&) = delete;
  TestDirectory& operator=(const TestDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::unique_ptr<Engine> MustOpen(const std::string& directory,
                                        Durability durability = Durability::kProcess) {
  auto opened = OpenSqliteEngine({.directory = directory, .durability = durability});
  EXPECT_TRUE(opened.ok()) << opened.status().ToString();
  return opened.ok() ? std::move(*opened) : nullptr;
}

inline Status OpenError(const std::string& directory) {
  auto opened = OpenSqliteEngine({.directory = directory});
  EXPECT_FALSE(opened.ok());
  return opened.status();
}

inline Rows LoadAll(Engine& engine) {
  Rows rows;
  const Status loaded = engine.Load([&](std::string_view name, std::string_view value) {
    if (!rows.empty()) {
      EXPECT_LT(rows.rbegin()->first, name) << "not in order";
    }
    rows.emplace(name, value);
  });
  EXPECT_TRUE(loaded.ok()) << loaded.ToString();
  return rows;
}

inline Rows RowsIn(const std::string& directory) {
  const auto engine = MustOpen(directory);
  return engine == nullptr ? Rows() : LoadAll(*engine);
}

inline void MustCommit(Engine& engine, const std::vector<Write>& writes) {
  const Status kept = engine.Commit(writes);
  ASSERT_TRUE(kept.ok()) << kept.ToString();
  const Status tended = engine.Tend();
  ASSERT_TRUE(tended.ok()) << tended.ToString();
}

inline std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  EXPECT_TRUE(file.good()) << path;
}

}  // namespace resilient::store
