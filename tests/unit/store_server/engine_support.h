#pragma once

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "store/server/engine.h"
#include "tests/support/test_directory.h"

// What the tests of the engine share.
namespace resilient::store {

using Rows = std::map<std::string, std::string>;

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
