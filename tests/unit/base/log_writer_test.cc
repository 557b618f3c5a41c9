// Goal: who logs never waits for who reads, and no line is lost without being counted. Method: a
// writer over a pipe, a terminal, a socket or a file that takes nothing; each call has a bound.
#include "runtime/base/log_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/log.h"
#include "runtime/base/try_write.h"
#include "tests/support/test_directory.h"

namespace resilient {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

std::string Loss(std::uint64_t lines, int error) {
  return StrCat("lost ", lines, " ", error, "\n");
}

// Two ends of which the second is written to; what is a pipe has the least room that there is.
struct Ends {
  ~Ends() {
    if (reader >= 0) close(reader);
    close(writer);
  }
  int reader = -1;
  int writer = -1;
};

void MakePipe(Ends* ends) {
  int both[2];
  ASSERT_EQ(pipe2(both, O_CLOEXEC), 0);
  ends->reader = both[0];
  ends->writer = both[1];
  ASSERT_GE(fcntl(ends->writer, F_SETPIPE_SZ, PIPE_BUF), PIPE_BUF);
}

void MakeSocket(Ends* ends) {
  int both[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both), 0);
  ends->reader = both[0];
  ends->writer = both[1];
}

// As by Ctrl-S.
void MakeStoppedTerminal(Ends* ends) {
  termios raw{};
  cfmakeraw(&raw);
  ASSERT_EQ(openpty(&ends->reader, &ends->writer, nullptr, &raw, nullptr), 0);
  ASSERT_EQ(tcflow(ends->writer, TCOOFF), 0);
}

// What can be read until it is enough, up to the end, or the end of patience.
std::string Read(int fd, const std::function<bool(const std::string&)>& is_enough) {
  std::string all;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!is_enough(all)) {
    pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (left.count() <= 0 || poll(&entry, 1, static_cast<int>(left.count())) != 1) break;
    char buffer[65536];
    const ssize_t count = read(fd, buffer, sizeof buffer);
    if (count <= 0) break;
    all.append(buffer, static_cast<std::size_t>(count));
  }
  return all;
}

std::string ReadUntil(int fd, const std::string& wanted) {
  return Read(fd, [&wanted](const std::string& all) { return all.ends_with(wanted); });
}

std::string Line(int number) { return StrCat("line ", number, " ", std::string(100, '.'), "\n"); }

// So many lines, none of which may be waited for.
void WriteLines(LogWriter& writer, int first, int count, Ends& ends) {
  auto written = std::async(std::launch::async, [&writer, first, count] {
    for (int i = first; i < first + count; ++i) writer.Write(Line(i));
  });
  if (written.wait_for(kPatience) == std::future_status::ready) return;
  ADD_FAILURE() << "a line was waited for";
  close(std::exchange(ends.reader, -1));  // Lets go of who waits.
}

std::string Lines(int first, int count) {
  std::string lines;
  for (int i = first; i < first + count; ++i) lines += Line(i);
  return lines;
}

TEST(LogWriter, WhatIsRead_IsWrittenByTheCaller) {
  Ends ends;
  MakePipe(&ends);
  LogWriter writer(ends.writer, 1000, &Loss);
  writer.Write("one\n");
  char buffer[16];
  ASSERT_EQ(fcntl(ends.reader, F_SETFL, O_NONBLOCK), 0);
  ASSERT_EQ(read(ends.reader, buffer, sizeof buffer), 4);
  // The description is shared with others.
  EXPECT_EQ(fcntl(ends.writer, F_GETFL) & O_NONBLOCK, 0);
}

class UnreadTest : public testing::TestWithParam<std::pair<const char*, void (*)(Ends*)>> {};

TEST_P(UnreadTest, Lines_AreKeptCountedAndReported) {
  constexpr int kKept = 100000;  // Bytes.
  Ends ends;
  GetParam().second(&ends);
  LogWriter writer(ends.writer, kKept, &Loss);
  constexpr int kCount = 10000;  // A megabyte: more than any of them takes.
  WriteLines(writer, 0, kCount, ends);
  const auto lost = static_cast<int>(writer.lost());
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, kCount - kKept / static_cast<int>(Line(kCount).size()) + 1);
  EXPECT_FALSE(writer.Flush(std::chrono::milliseconds(1)));
  (void)tcflow(ends.writer, TCOON);
  const std::string report = Loss(static_cast<std::uint64_t>(lost), EAGAIN);
  // The oldest are kept: they name the cause.
  EXPECT_EQ(ReadUntil(ends.reader, report), Lines(0, kCount - lost) + report);
  EXPECT_TRUE(writer.Flush(kPatience));
  EXPECT_EQ(writer.lost(), 0u);
  writer.Write("read again\n");
  EXPECT_EQ(ReadUntil(ends.reader, "again\n"), "read again\n");
}

INSTANTIATE_TEST_SUITE_P(, UnreadTest,
                         testing::Values(std::pair{"Pipe", &MakePipe},
                                         std::pair{"Socket", &MakeSocket},
                                         std::pair{"StoppedTerminal", &MakeStoppedTerminal}),
                         [](const auto& tested) { return tested.param.first; });

// A program that prints has found room, and another that has blocked in its own write takes it.
TEST(LogWriter, BesideAWriterThatBlocks_NobodyWaits) {
  Ends ends;
  MakePipe(&ends);
  const std::string noise(100000, '#');
  std::thread printing([&ends, &noise] {
    std::size_t done = 0;
    while (done < noise.size()) {
      const ssize_t count = write(ends.writer, noise.data() + done, noise.size() - done);
      if (count <= 0) return;
      done += static_cast<std::size_t>(count);
    }
  });
  LogWriter writer(ends.writer, 1 << 20, &Loss);
  WriteLines(writer, 0, 1000, ends);
  const std::size_t size = noise.size() + Lines(0, 1000).size();
  std::string all =
      Read(ends.reader, [size](const std::string& text) { return text.size() >= size; });
  printing.join();
  std::erase(all, '#');
  EXPECT_EQ(all, Lines(0, 1000));
}

TEST(LogWriter, LineThatFitsOnlyInPart_StaysWhole) {
  Ends ends;
  MakePipe(&ends);
  LogWriter writer(ends.writer, 10, &Loss);
  const std::string line = std::string(300000, 'x') + "\n";
  writer.Write(line);
  writer.Write("lost\n");
  EXPECT_EQ(ReadUntil(ends.reader, "lost 1 11\n"), line + "lost 1 11\n");
}

TEST(LogWriter, FullDisk_IsCountedAndReportedAfterwards) {
  Ends ends;
  ends.writer = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(ends.writer, 0);
  LogWriter writer(ends.writer, 1000, &Loss);
  for (int i = 0; i < 3; ++i) writer.Write("line\n");
  EXPECT_EQ(writer.lost(), 3u);
  Ends room;
  MakePipe(&room);
  ASSERT_GE(dup3(room.writer, ends.writer, O_CLOEXEC), 0);
  writer.Write("line\n");
  EXPECT_EQ(ReadUntil(room.reader, "line\n"), Loss(3, ENOSPC) + "line\n");
}

TEST(LogWriter, ReaderThatIsGone_IsNoSignalAndCounted) {
  Ends ends;
  MakePipe(&ends);
  close(std::exchange(ends.reader, -1));
  LogWriter writer(ends.writer, 1000, &Loss);
  writer.Write("line\n");
  EXPECT_EQ(writer.lost(), 1u);
}

TEST(LogWriter, FileOnADisk_IsWrittenByTheThreadInOrder) {
  const TestDirectory directory;
  const std::string path = directory / "log";
  Ends ends;
  ends.writer = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(ends.writer, 0);
  if (fcntl(ends.writer, F_GET_SEALS) >= 0) GTEST_SKIP() << "the tests' files are in memory";
  EXPECT_EQ(TryWrite(ends.writer, "x").error, EAGAIN);
  LogWriter writer(ends.writer, 1 << 20, &Loss);
  WriteLines(writer, 0, 1000, ends);
  ASSERT_TRUE(writer.Flush(kPatience));
  std::string text(Lines(0, 1000).size() + 1, '\0');
  text.resize(static_cast<std::size_t>(pread(ends.writer, text.data(), text.size(), 0)));
  EXPECT_EQ(text, Lines(0, 1000));
}

TEST(LogWriter, FileInMemory_IsWrittenByTheCaller) {
  Ends ends;
  ends.writer = memfd_create("log", MFD_CLOEXEC);
  LogWriter writer(ends.writer, 1000, &Loss);
  writer.Write("line\n");
  char buffer[16];
  EXPECT_EQ(pread(ends.writer, buffer, sizeof buffer, 0), 5);
}

}  // namespace
}  // namespace resilient
