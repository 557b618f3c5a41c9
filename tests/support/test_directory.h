#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace resilient {

// An empty directory of its own, removed at its end with all that is in it. Owner: a test.
class TestDirectory {
 public:
  TestDirectory() {
    std::string name = ::testing::TempDir() + "resilient-XXXXXX";
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

  // The path of a file with this text, mode 0600, replaced as a whole.
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = *this / name;
    std::ofstream(path + ".new") << text;
    chmod((path + ".new").c_str(), 0600);
    std::filesystem::rename(path + ".new", path);
    return path;
  }

 private:
  std::string path_;
};

}  // namespace resilient
