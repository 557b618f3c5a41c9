// Goal: several sockets carry one stream of bytes: in order, whatever the sizes of the pieces, and
// whenever the sockets come; and its end is seen where it is.
// Method: two striped streams over pairs of sockets, driven by poll() as the loop does it.
#include "runtime/comm/striped_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/descriptors.h"

namespace resilient {
namespace {

using State = IoResult::State;
constexpr std::size_t kBlock = StripedStream::kBlockBytes;
constexpr int kBoundMs = 30'000;

struct Pair {
  std::unique_ptr<ByteStream> left;
  std::unique_ptr<ByteStream> right;
};

Pair MakePair() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {MakeTcpStream(FileDescriptor(fds[0])), MakeTcpStream(FileDescriptor(fds[1]))};
}

// Both ends, with as many of their sockets attached as asked for.
struct Ends {
  explicit Ends(int count, int attached) {
    for (int i = 0; i < count; ++i) pairs.push_back(MakePair());
    left = Take(StripedStream::Make(count));
    right = Take(StripedStream::Make(count));
    for (int i = 0; i < attached; ++i) Attach(i);
  }
  static std::unique_ptr<StripedStream> Take(Result<std::unique_ptr<StripedStream>> made) {
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    return std::move(*made);
  }
  void Attach(int i) {
    EXPECT_TRUE(left->Attach(i, std::move(pairs[static_cast<std::size_t>(i)].left)));
    EXPECT_TRUE(right->Attach(i, std::move(pairs[static_cast<std::size_t>(i)].right)));
  }
  std::vector<Pair> pairs;
  std::unique_ptr<StripedStream> left;
  std::unique_ptr<StripedStream> right;
};

// Waits until one of `wanted` is there; false when nothing is within `timeout_ms`.
bool Await(StripedStream& stream, const StreamEvents& wanted, int timeout_ms = kBoundMs) {
  pollfd entry{.fd = stream.fd(), .events = stream.PollFor(wanted), .revents = 0};
  if (poll(&entry, 1, timeout_ms) <= 0) return false;
  return stream.OnReady(entry.revents).any();
}

std::vector<std::byte> Noise(std::size_t bytes, std::mt19937_64& random) {
  std::vector<std::byte> noise(bytes);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  return noise;
}

IoResult WriteSome(StripedStream& stream, std::vector<std::byte>& bytes, std::size_t from,
                   std::size_t most) {
  const iovec piece{bytes.data() + from, std::min(most, bytes.size() - from)};
  return stream.Write({&piece, 1});
}

// Up to `most` bytes in three pieces, appended.
IoResult ReadSome(StripedStream& stream, std::vector<std::byte>* into, std::size_t most) {
  const std::size_t before = into->size();
  into->resize(before + most);
  const std::size_t part = most / 3;
  const std::array<iovec, 3> pieces = {iovec{into->data() + before, part},
                                       iovec{into->data() + before + part, part},
                                       iovec{into->data() + before + 2 * part, most - 2 * part}};
  const IoResult result = stream.Read(pieces);
  into->resize(before + result.bytes);
  return result;
}

TEST(StripedStream, CarriesBytesInOrder_WhateverTheSizesOfThePieces) {
  std::mt19937_64 random(7);
  for (const int count : {2, 3, 8}) {
    Ends ends(count, count);
    std::vector<std::byte> sent = Noise(5 * kBlock + 12'345, random);
    std::vector<std::byte> received;
    std::size_t written = 0;
    while (received.size() < sent.size()) {
      const std::size_t most = 1 + random() % (2 * kBlock);
      bool moved = false;
      if (written < sent.size()) {
        const IoResult result = WriteSome(*ends.left, sent, written, most);
        ASSERT_TRUE(result.state == State::kMoved || result.state == State::kBlocked);
        written += result.bytes;
        moved = result.bytes > 0;
      }
      const IoResult result = ReadSome(*ends.right, &received, 1 + random() % (2 * kBlock));
      ASSERT_TRUE(result.state == State::kMoved || result.state == State::kBlocked);
      if (moved || result.bytes > 0) continue;
      ASSERT_TRUE(Await(*ends.right, {.bytes = true}));
    }
    EXPECT_EQ(received, sent) << count;
  }
}

TEST(StripedStream, WritesWhatFits_AndSaysWhenThereIsRoomAgain) {
  Ends ends(2, 2);
  std::mt19937_64 random(8);
  std::vector<std::byte> sent = Noise(16 * kBlock, random);
  std::size_t written = 0;
  IoResult result;
  while ((result = WriteSome(*ends.left, sent, written, sent.size())).state == State::kMoved)
    written += result.bytes;
  ASSERT_EQ(result.state, State::kBlocked);
  ASSERT_LT(written, sent.size());
  EXPECT_FALSE(Await(*ends.left, {.room = true}, 0));
  std::vector<std::byte> received;
  while (ReadSome(*ends.right, &received, kBlock).state == State::kMoved) {
  }
  EXPECT_EQ(received.size(), written);
  EXPECT_TRUE(Await(*ends.left, {.room = true}));
  EXPECT_EQ(WriteSome(*ends.left, sent, written, 100).state, State::kMoved);
}

// A far end that keeps up with everything.
class Bottomless final : public ByteStream {
 public:
  int fd() const override { return -1; }
  short PollFor(const StreamEvents&) const override { return 0; }
  StreamEvents OnReady(short) override { return {}; }
  IoResult Read(std::span<const iovec> into) override { return Move(into); }
  IoResult Write(std::span<const iovec> from) override { return Move(from); }
  void ShutdownWrite() override {}

 private:
  static IoResult Move(std::span<const iovec> pieces) {
    IoResult result{.state = State::kMoved};
    for (const iovec& piece : pieces) result.bytes += piece.iov_len;
    return result;
  }
};

TEST(StripedStream, OneCallMovesABoundedPartOfWhatThereIs) {
  const auto stream = Ends::Take(StripedStream::Make(2));
  for (const int i : {0, 1}) ASSERT_TRUE(stream->Attach(i, std::make_unique<Bottomless>()));
  std::vector<std::byte> bytes(3 * kMoveBytes);
  std::vector<std::byte> received;
  for (int call = 0; call < 2; ++call) {
    EXPECT_EQ(WriteSome(*stream, bytes, 0, bytes.size()).bytes, kMoveBytes);
    EXPECT_EQ(ReadSome(*stream, &received, bytes.size()).bytes, kMoveBytes);
  }
}

TEST(StripedStream, ASocketThatIsNotThereYet_HoldsUpItsBlockOnly) {
  Ends ends(3, 1);
  std::mt19937_64 random(9);
  std::vector<std::byte> sent = Noise(3 * kBlock, random);
  std::vector<std::byte> received;
  std::size_t written = 0;
  const auto move = [&] {
    IoResult out;
    IoResult in;
    do {
      out = WriteSome(*ends.left, sent, written, sent.size());
      written += out.bytes;
      in = ReadSome(*ends.right, &received, kBlock);
    } while (written < sent.size() && (out.bytes > 0 || in.bytes > 0));
    while (ReadSome(*ends.right, &received, kBlock).bytes > 0) {
    }
  };
  move();
  EXPECT_EQ(received.size(), kBlock);
  // No busy loop while it is awaited.
  EXPECT_EQ(ends.left->PollFor({.room = true}), 0);
  EXPECT_FALSE(Await(*ends.right, {.bytes = true}, 0));
  ends.Attach(2);  // The order does not matter.
  move();
  EXPECT_EQ(received.size(), kBlock);
  ends.Attach(1);
  EXPECT_TRUE(Await(*ends.left, {.room = true}));
  move();
  EXPECT_EQ(received, sent);
  EXPECT_FALSE(ends.left->Attach(1, MakePair().left)) << "it is there already";
  EXPECT_FALSE(ends.left->Attach(3, MakePair().left)) << "there is none";
}

TEST(StripedStream, HalfClosed_TheRestArrivesThenTheEnd_AndTheOtherWayGoesOn) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{10}, kBlock, 2 * kBlock + 5}) {
    Ends ends(3, 2);
    std::mt19937_64 random(10);
    std::vector<std::byte> sent = Noise(bytes, random);
    std::vector<std::byte> received;
    std::size_t written = 0;
    ends.Attach(2);
    while (written < bytes) {
      written += WriteSome(*ends.left, sent, written, bytes).bytes;
      ReadSome(*ends.right, &received, kBlock / 2);
    }
    ends.left->ShutdownWrite();
    EXPECT_TRUE(Await(*ends.right, {.end = true}));
    IoResult result;
    while ((result = ReadSome(*ends.right, &received, kBlock)).state == State::kMoved) {
    }
    EXPECT_EQ(result.state, State::kEnd);
    EXPECT_EQ(received, sent);
    std::vector<std::byte> back(5);
    EXPECT_EQ(WriteSome(*ends.right, back, 0, 5).bytes, 5u);
    EXPECT_EQ(ReadSome(*ends.left, &received, 5).bytes, 5u);
  }
}

TEST(StripedStream, ASocketThatComesBehindTheHalfClose_IsHalfClosedToo) {
  Ends ends(2, 1);
  ends.left->ShutdownWrite();
  ASSERT_TRUE(ends.left->Attach(1, std::move(ends.pairs[1].left)));
  std::byte byte;
  EXPECT_EQ(recv(ends.pairs[1].right->fd(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST(StripedStream, TheEndOfOne_IsToldOnceWhileAnotherIsAwaited) {
  Ends ends(3, 1);
  std::mt19937_64 random(11);
  std::vector<std::byte> sent = Noise(kBlock, random);
  std::vector<std::byte> received;
  for (std::size_t written = 0; written < sent.size();) {
    written += WriteSome(*ends.left, sent, written, sent.size()).bytes;
    ReadSome(*ends.right, &received, kBlock);
  }
  while (received.size() < kBlock) ReadSome(*ends.right, &received, kBlock);
  EXPECT_FALSE(Await(*ends.right, {.bytes = true}, 0));
  ends.left.reset();
  pollfd entry{
      .fd = ends.right->fd(), .events = ends.right->PollFor({.bytes = true}), .revents = 0};
  ASSERT_EQ(poll(&entry, 1, kBoundMs), 1);
  EXPECT_TRUE(ends.right->OnReady(entry.revents).end);
  EXPECT_EQ(ReadSome(*ends.right, &received, 1).state, State::kBlocked) << "it may come yet";
  EXPECT_FALSE(Await(*ends.right, {.bytes = true}, 0)) << "a busy loop";
}

TEST(StripedStream, ASocketThatEndsEarly_IsTheEndWhenItsTurnComes) {
  Ends ends(2, 1);
  ASSERT_TRUE(ends.right->Attach(1, std::move(ends.pairs[1].right)));
  ends.pairs[1].left.reset();
  std::mt19937_64 random(11);
  std::vector<std::byte> sent = Noise(kBlock, random);
  std::vector<std::byte> received;
  std::size_t written = 0;
  while (received.size() < kBlock) {
    if (written < kBlock) written += WriteSome(*ends.left, sent, written, kBlock).bytes;
    ReadSome(*ends.right, &received, kBlock - received.size());
  }
  EXPECT_EQ(received, sent);
  EXPECT_TRUE(Await(*ends.right, {.bytes = true}));
  EXPECT_EQ(ReadSome(*ends.right, &received, 1).state, State::kEnd);
  std::vector<std::byte> more(1);
  std::vector<std::byte> block(kBlock);
  std::size_t back = 0;
  while (back < kBlock) {
    back += WriteSome(*ends.right, block, back, kBlock).bytes;
    ReadSome(*ends.left, &received, kBlock);
  }
  const IoResult broken = WriteSome(*ends.right, more, 0, 1);
  EXPECT_EQ(broken.state, State::kBroken);
  EXPECT_EQ(broken.error, EPIPE);
}

TEST(StripedStream, KeepsNoDescriptor) {
  const std::size_t before = OpenDescriptors();
  for (int i = 0; i < 3; ++i) Ends ends(8, 5);
  EXPECT_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace resilient
