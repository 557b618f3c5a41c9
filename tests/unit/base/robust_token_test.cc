// Goal: the end of a process is seen in its token at once, however much memory it has; nothing else
// looks like it. Method: real processes with real memory, killed, stopped and forked.
#include "runtime/base/robust_token.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "runtime/base/futex.h"
#include "runtime/base/thread.h"
#include "tests/support/child_process.h"

namespace resilient {
namespace {

constexpr std::size_t kMuch = std::size_t{1} << 30;
constexpr auto kBound = std::chrono::seconds(30);

std::uint32_t WordOf(const TokenWatch& watch) {
  return __atomic_load_n(watch.word(), __ATOMIC_ACQUIRE);
}

// Sleeps until `done` is true of the word; false when it does not get so in time.
bool Await(const TokenWatch& watch, const std::function<bool(std::uint32_t)>& done) {
  const auto end = std::chrono::steady_clock::now() + kBound;
  for (;;) {
    const std::uint32_t word = WordOf(watch);
    if (done(word)) return true;
    if (std::chrono::steady_clock::now() > end) return false;
    const FutexWord awaited{watch.word(), word};
    FutexWaitAny({&awaited, 1}, Millis(100));
  }
}

bool AwaitEnding(const TokenWatch& watch) {
  const auto end = std::chrono::steady_clock::now() + kBound;
  while (!watch.OwnerEnd().ending) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// Holds a token, with `bytes` of touched memory, until it is killed.
void HoldAToken(int pipe, std::size_t bytes) {
  if (bytes > 0) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    RESILIENT_CHECK(memory != MAP_FAILED);
    madvise(memory, bytes, MADV_NOHUGEPAGE);  // As a program that has grown bit by bit.
    std::memset(memory, 1, bytes);
  }
  const auto token = std::move(RobustToken::Create()).value();
  Thread holder("holder", [&] {
    token->Take();
    WriteLine(pipe, RobustToken::EncodeOffer(token->offer()));
    for (;;) pause();
  });
  holder.Join();
}

RobustToken::Offer OfferOf(const ChildProcess& child) {
  const auto offer = RobustToken::DecodeOffer(child.ReadLine());
  RESILIENT_CHECK(offer.has_value());
  return *offer;
}

TEST(RobustToken, AKilledProcess_IsSeenBeforeItsMemoryIsGivenBack) {
  constexpr int kTries = 5;
  int before = 0;
  for (int i = 0; i < kTries; ++i) {
    ChildProcess child([](int pipe) { HoldAToken(pipe, kMuch); });
    auto watch = TokenWatch::Attach(OfferOf(child));
    ASSERT_TRUE(watch.ok()) << watch.status().ToString();
    ASSERT_TRUE(TokenWatch::Held(WordOf(**watch)));
    child.Signal(SIGKILL);
    ASSERT_TRUE(Await(**watch, TokenWatch::HolderDied));
    before += child.HasEnded() ? 0 : 1;
    ASSERT_TRUE(AwaitEnding(**watch));
    child.Wait();
    if (before > 0) break;  // On a loaded machine this process may be the slower one.
  }
  EXPECT_GT(before, 0);
}

TEST(RobustToken, TellsTheSignal) {
  ChildProcess child([](int pipe) { HoldAToken(pipe, kMuch / 16); });
  auto watch = TokenWatch::Attach(OfferOf(child));
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  EXPECT_FALSE((*watch)->OwnerEnd().ending);
  child.Signal(SIGKILL);
  ASSERT_TRUE(Await(**watch, TokenWatch::HolderDied));
  ASSERT_TRUE(AwaitEnding(**watch));
  // Not known of one that was collected; here nobody has done that.
  EXPECT_EQ((*watch)->OwnerEnd().wait_status, SIGKILL);
  child.Wait();
  EXPECT_TRUE((*watch)->OwnerEnd().ending);
  EXPECT_EQ((*watch)->OwnerEnd().wait_status, -1);
}

TEST(RobustToken, AStoppedProcess_IsNotDead) {
  ChildProcess child([](int pipe) { HoldAToken(pipe, 0); });
  auto watch = TokenWatch::Attach(OfferOf(child));
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  child.Signal(SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(child.pid(), &status, WUNTRACED), child.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_TRUE(TokenWatch::Held(WordOf(**watch)));
  EXPECT_FALSE((*watch)->OwnerEnd().ending);
  child.Signal(SIGKILL);
  EXPECT_TRUE(Await(**watch, TokenWatch::HolderDied));
}

TEST(RobustToken, ThatIsLetGo_IsNoDeath) {
  const auto token = std::move(RobustToken::Create()).value();
  auto watch = TokenWatch::Attach(token->offer());
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  EXPECT_FALSE(TokenWatch::Held(WordOf(**watch)));
  Thread holder("holder", [&] {
    token->Take();
    token->LetGo();
    token->LetGo();
  });
  EXPECT_TRUE(Await(**watch, [](std::uint32_t word) { return !TokenWatch::Held(word); }));
  holder.Join();
  EXPECT_FALSE(TokenWatch::HolderDied(WordOf(**watch)));
}

TEST(RobustToken, AHolderThatEndsAlone_DoesNotEndItsProcess) {
  auto token = std::move(RobustToken::Create()).value();
  auto watch = TokenWatch::Attach(token->offer());
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  Thread("holder", [&] { token->Take(); }).Join();
  EXPECT_TRUE(Await(**watch, TokenWatch::HolderDied));
  EXPECT_FALSE((*watch)->OwnerEnd().ending);
}

TEST(RobustToken, GoesOnAnotherThreadThanItsHolders) {
  auto token = std::move(RobustToken::Create()).value();
  auto watch = TokenWatch::Attach(token->offer());
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  Thread holder("holder", [&] {
    token->Take();
    char byte = 0;
    RESILIENT_CHECK(read(ends[0], &byte, 1) == 0);
  });
  ASSERT_TRUE(Await(**watch, TokenWatch::Held));
  token->LetGo();  // Not by whom it is held.
  EXPECT_TRUE(TokenWatch::Held(WordOf(**watch)));
  token.reset();
  close(ends[1]);
  holder.Join();
  close(ends[0]);
  EXPECT_TRUE(Await(**watch, TokenWatch::HolderDied)) << "its page was there up to the end";
}

TEST(RobustToken, AForkedChild_IsNotItsHolder) {
  const auto token = std::move(RobustToken::Create()).value();
  token->Take();
  auto watch = TokenWatch::Attach(token->offer());
  ASSERT_TRUE(watch.ok()) << watch.status().ToString();
  ChildProcess child([&](int) { _exit(fcntl(token->offer().fd, F_GETFD) == -1 ? 0 : 1); });
  EXPECT_EQ(child.Wait(), 0) << "the child had the descriptor";
  EXPECT_TRUE(TokenWatch::Held(WordOf(**watch)));
  EXPECT_FALSE(TokenWatch::HolderDied(WordOf(**watch)));
  token->LetGo();
}

TEST(TokenWatch, OfAnotherTokenOrProcess_IsRefused) {
  const auto token = std::move(RobustToken::Create()).value();
  const RobustToken::Offer good = token->offer();
  EXPECT_TRUE(TokenWatch::Attach(good).ok());
  RobustToken::Offer bad = good;
  bad.nonce ^= 1;
  EXPECT_EQ(TokenWatch::Attach(bad).status().code(), StatusCode::kUnreachable);
  bad = good;
  bad.inode ^= 1;
  EXPECT_EQ(TokenWatch::Attach(bad).status().code(), StatusCode::kUnreachable);
  bad = good;
  bad.fd = 0;
  EXPECT_EQ(TokenWatch::Attach(bad).status().code(), StatusCode::kUnreachable);
  bad = good;
  bad.pid = std::int64_t{1} << 40;
  EXPECT_EQ(TokenWatch::Attach(bad).status().code(), StatusCode::kUnreachable);
}

TEST(TokenOffer, IsReadAsItWasWritten) {
  const RobustToken::Offer offer{
      .pid = 7, .start_time = 5, .fd = 12, .inode = 99, .nonce = ~std::uint64_t{0}};
  EXPECT_EQ(RobustToken::DecodeOffer(RobustToken::EncodeOffer(offer)), offer);
  for (const char* text :
       {"", "7", "7 5 12 99", "7 5 12 99 x", "7 5 12 99 1 ", "0 5 12 99 1", "7 5 -1 9 1"}) {
    EXPECT_FALSE(RobustToken::DecodeOffer(text)) << text;
  }
}

}  // namespace
}  // namespace resilient
