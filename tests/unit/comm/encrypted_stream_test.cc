// Goal: an encrypted stream carries bytes in order, whole, to the one that has its key and to
// nobody else, and its end is seen where it is. Method: two ends over a pair of sockets, driven by
// poll() as the loop does it; what passes between them is kept, and changed.
#include "runtime/comm/encrypted_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "runtime/comm/link_encryption.h"
#include "runtime/comm/striped_stream.h"
#include "runtime/tls/library.h"

namespace resilient {
namespace {

using State = IoResult::State;
using Use = EncryptedStream::Use;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kSecret[] = "of the view";

std::shared_ptr<const PskContext> ContextOf(std::uint64_t bytes_of_one_key) {
  const Result<TlsFunctions> functions = LoadTlsLibrary("a test");
  EXPECT_TRUE(functions.ok()) << functions.status().ToString();
  return PskContext::Make(*functions, bytes_of_one_key);
}

// Keeps what is written, and flips a bit of byte `flip` of what is read.
class Tap final : public ByteStream {
 public:
  explicit Tap(std::unique_ptr<ByteStream> stream) : stream_(std::move(stream)) {}
  int fd() const override { return stream_->fd(); }
  short PollFor(const StreamEvents& wanted) const override { return stream_->PollFor(wanted); }
  StreamEvents OnReady(short revents) override { return stream_->OnReady(revents); }
  IoResult Read(std::span<const iovec> into) override {
    const IoResult result = stream_->Read(into.first(1));
    const std::size_t begin = std::exchange(passed_, passed_ + result.bytes);
    if (flip >= begin && flip < passed_) static_cast<char*>(into[0].iov_base)[flip - begin] ^= 1;
    return result;
  }
  IoResult Write(std::span<const iovec> from) override {
    const IoResult result = stream_->Write(from.first(1));
    written.append(static_cast<const char*>(from[0].iov_base), result.bytes);
    return result;
  }
  void ShutdownWrite() override { stream_->ShutdownWrite(); }

  std::string written;
  std::size_t flip = ~std::size_t{0};

 private:
  const std::unique_ptr<ByteStream> stream_;
  std::size_t passed_ = 0;
};

std::array<std::unique_ptr<ByteStream>, 2> SocketPair() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {MakeTcpStream(FileDescriptor(fds[0])), MakeTcpStream(FileDescriptor(fds[1]))};
}

// One end, as its loop sees it.
struct End {
  std::unique_ptr<ByteStream> stream;
  std::string to_send;
  std::string received;
  IoResult last;  // Of the latest Read.
  bool shut_when_sent = false;
  bool room = true;

  void Turn() {
    while (room && !to_send.empty()) {
      const iovec piece{to_send.data(), to_send.size()};
      const IoResult result = stream->Write({&piece, 1});
      if (result.state != State::kMoved) room = false;
      to_send.erase(0, result.bytes);
    }
    if (to_send.empty() && std::exchange(shut_when_sent, false)) stream->ShutdownWrite();
    if (room && stream->holds_output() && stream->Flush().state != State::kMoved) room = false;
    Read();
  }
  void Read() {
    std::string space(70'000, 0);
    while (true) {
      // In two pieces, as a link reads.
      const std::array<iovec, 2> pieces = {iovec{space.data(), 333},
                                           iovec{space.data() + 333, space.size() - 333}};
      last = stream->Read(pieces);
      if (last.state != State::kMoved) return;
      received.append(space, 0, last.bytes);
    }
  }
  bool open() const { return last.state == State::kMoved || last.state == State::kBlocked; }
  pollfd Entry() const {
    const bool wants_room = !to_send.empty() || stream->holds_output();
    return {.fd = stream->fd(),
            .events = stream->PollFor({.bytes = open(), .room = wants_room && !room}),
            .revents = 0};
  }
  void OnReady(short revents) {
    if (stream->OnReady(revents).room) room = true;
  }
};

struct Ends {
  explicit Ends(const std::string& key_of_client = kSecret, std::uint64_t bytes_of_one_key = 0,
                Use use = Use::kBothWays)
      : encryption(ContextOf(bytes_of_one_key)) {
    auto sockets = SocketPair();
    auto first = std::make_unique<Tap>(std::move(sockets[0]));
    auto second = std::make_unique<Tap>(std::move(sockets[1]));
    tap = first.get();
    far_tap = second.get();
    client.stream =
        encryption.Wrap(std::move(first), TlsRole::kClient, key_of_client, "a hello", use);
    server.stream = encryption.Wrap(std::move(second), TlsRole::kServer, kSecret, "a hello");
  }
  // Until `done`. False: nothing moves any more, as what one writes the other one has at once.
  template <typename Condition>
  bool Run(Condition done) {
    while (true) {
      client.Turn();
      server.Turn();
      if (done()) return true;
      std::array<pollfd, 2> entries = {client.Entry(), server.Entry()};
      if (poll(entries.data(), entries.size(), 0) <= 0) return false;
      client.OnReady(entries[0].revents);
      server.OnReady(entries[1].revents);
    }
  }

  LinkEncryption encryption;
  Tap* tap = nullptr;
  Tap* far_tap = nullptr;
  End client, server;
};

std::string Noise(std::size_t bytes) {
  std::mt19937_64 random(bytes);
  std::string noise(bytes, 0);
  for (char& byte : noise) byte = static_cast<char>(random());
  return noise;
}

TEST(EncryptedStream, CarriesBytesInOrder_BothWays_AndItsEnd) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{16} << 10, std::size_t{5'000'000}}) {
    Ends ends;
    const std::string there = Noise(bytes);
    const std::string back = Noise(bytes / 3 + 1);
    ends.client.to_send = there;
    ends.server.to_send = back;
    ends.client.shut_when_sent = ends.server.shut_when_sent = true;
    EXPECT_TRUE(ends.Run([&] { return !ends.client.open() && !ends.server.open(); }));
    EXPECT_TRUE(ends.server.received == there) << bytes;
    EXPECT_TRUE(ends.client.received == back) << bytes;
    EXPECT_EQ(ends.client.last.state, State::kEnd);
    EXPECT_EQ(ends.server.last.state, State::kEnd);
  }
}

TEST(EncryptedStream, NothingOfItIsReadableOnTheWay) {
  Ends ends;
  const std::string text = "the gradient of the embedding";
  ends.client.to_send = text;
  EXPECT_TRUE(ends.Run([&] { return ends.server.received == text; }));
  EXPECT_GT(ends.tap->written.size(), text.size());
  EXPECT_THAT(ends.tap->written, Not(HasSubstr("gradient")));
}

// Many times in what is sent here.
TEST(EncryptedStream, KeysAreChangedOnTheWay) {
  Ends ends(kSecret, 100'000);
  const std::string there = Noise(3'000'000);
  const std::string back = Noise(1'000'000);
  ends.client.to_send = there;
  ends.server.to_send = back;
  EXPECT_TRUE(ends.Run([&] {
    return ends.server.received.size() == there.size() &&
           ends.client.received.size() == back.size();
  }));
  EXPECT_TRUE(ends.server.received == there);
  EXPECT_TRUE(ends.client.received == back);
}

TEST(EncryptedStream, WithoutTheKey_NothingIsTold) {
  Ends ends("another view's");
  ends.client.to_send = ends.server.to_send = "what only members may read";
  EXPECT_TRUE(ends.Run([&] { return !ends.client.open() && !ends.server.open(); }));
  EXPECT_EQ(ends.server.last.state, State::kBroken);
  EXPECT_THAT(ends.server.last.what, HasSubstr("could not begin"));
  EXPECT_EQ(ends.client.received + ends.server.received, "");
  EXPECT_THAT(ends.tap->written + ends.far_tap->written, Not(HasSubstr("members")));
}

TEST(EncryptedStream, AChangedByte_EndsIt_AndIsNeverTakenForWhatWasSent) {
  std::size_t whole = 0;
  {
    Ends ends;
    ends.client.to_send = Noise(2000);
    EXPECT_TRUE(ends.Run([&] { return ends.server.received.size() == 2000; }));
    whole = ends.tap->written.size();
  }
  for (std::size_t at = 0; at < whole; at += 7) {
    Ends ends;
    ends.far_tap->flip = at;
    const std::string sent = ends.client.to_send = Noise(2000);
    // The length of a record may be what was changed: then more is waited for.
    if (!ends.Run([&] { return !ends.server.open(); })) ends.client.stream.reset();
    ends.server.Read();
    EXPECT_FALSE(ends.server.open()) << at;
    EXPECT_TRUE(sent.starts_with(ends.server.received)) << at;
    EXPECT_LT(ends.server.received.size(), sent.size()) << at;
  }
}

TEST(EncryptedStream, BeforeThePeerHasAnswered_NothingCanBeWritten) {
  LinkEncryption encryption(ContextOf(0));
  auto sockets = SocketPair();
  const auto client = encryption.Wrap(std::move(sockets[0]), TlsRole::kClient, kSecret, "a hello");
  char text[] = "early";
  const iovec piece{text, sizeof text};
  EXPECT_EQ(client->Write({&piece, 1}).state, State::kBlocked);
  EXPECT_FALSE(client->holds_output()) << "its own first bytes are out";
  // Room is not what is missing.
  EXPECT_EQ(client->PollFor({.room = true}), POLLIN);
}

TEST(EncryptedStream, LastWords_AreHeardWithoutAnAnswer) {
  Ends ends(kSecret, 0, Use::kLastWords);
  ends.client.to_send = "goodbye";
  ends.client.shut_when_sent = true;
  ends.client.Turn();
  ends.client.stream.reset();  // The process has gone before the peer looks.
  EXPECT_THAT(ends.server.received, Not(HasSubstr("goodbye")));
  while (ends.server.open()) {
    ends.server.Turn();
    pollfd entry = ends.server.Entry();
    if (!ends.server.open()) break;
    ASSERT_EQ(poll(&entry, 1, 0), 1);
    ends.server.OnReady(entry.revents);
  }
  EXPECT_EQ(ends.server.received, "goodbye");
  EXPECT_EQ(ends.server.last.state, State::kEnd);
}

TEST(EncryptedStream, LastWordsOfAnotherKey_AreNotHeard) {
  Ends ends("another view's", 0, Use::kLastWords);
  ends.client.to_send = "goodbye";
  ends.client.shut_when_sent = true;
  ends.Run([&] { return !ends.server.open(); });
  EXPECT_EQ(ends.server.received, "");
}

TEST(EncryptedStream, LastWordsThatAreTooMany_AreNotSent) {
  Ends ends(kSecret, 0, Use::kLastWords);
  std::string words(kTlsEarlyBytesMax + 1, 'w');
  const iovec piece{words.data(), words.size()};
  EXPECT_EQ(ends.client.stream->Write({&piece, 1}).state, State::kBroken);
}

TEST(EncryptedStream, KilledPeer_HasEnded) {
  Ends ends;
  ends.client.to_send = "half of a message";
  EXPECT_TRUE(ends.Run([&] { return !ends.server.received.empty(); }));
  ends.client.stream.reset();
  ends.server.Read();
  EXPECT_EQ(ends.server.last.state, State::kEnd);
}

TEST(EncryptedStream, OverSeveralSockets) {
  LinkEncryption encryption(ContextOf(0));
  End client, server;
  auto left = StripedStream::Make(2);
  auto right = StripedStream::Make(2);
  ASSERT_TRUE(left.ok() && right.ok());
  auto first = SocketPair();
  (*left)->Attach(0, std::move(first[0]));
  (*right)->Attach(0, std::move(first[1]));
  client.stream = encryption.Wrap(std::move(*left), TlsRole::kClient, kSecret, "a hello");
  server.stream = encryption.Wrap(std::move(*right), TlsRole::kServer, kSecret, "a hello");
  // The other ones come later, and the block that is theirs waits for them.
  auto second = SocketPair();
  EXPECT_TRUE(client.stream->Attach(1, std::move(second[0])));
  EXPECT_TRUE(server.stream->Attach(1, std::move(second[1])));
  const std::string sent = client.to_send = Noise(5 * StripedStream::kBlockBytes);
  while (server.received.size() < sent.size()) {
    client.Turn();
    server.Turn();
    std::array<pollfd, 2> entries = {client.Entry(), server.Entry()};
    if (server.received.size() == sent.size()) break;
    ASSERT_GT(poll(entries.data(), entries.size(), 0), 0);
    client.OnReady(entries[0].revents);
    server.OnReady(entries[1].revents);
  }
  EXPECT_TRUE(server.received == sent);
}

}  // namespace
}  // namespace resilient
