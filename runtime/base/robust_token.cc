#include "runtime/base/robust_token.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/fork_guard.h"
#include "runtime/base/futex.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"
#include "runtime/base/random.h"

namespace resilient {

// All but the mutex is constant before anybody is told of it.
struct RobustToken::Page {
  std::uint64_t nonce;
  std::int64_t pid;
  std::uint64_t start_time;
  alignas(64) pthread_mutex_t mutex;
};

namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

std::int64_t ThisThread() { return syscall(SYS_gettid); }

Status Unreachable(const RobustToken::Offer& offer, std::string_view why) {
  return Status(StatusCode::kUnreachable,
                StrCat("cannot watch the life of process ", offer.pid, ": ", why));
}

// The word that the kernel and the C library share; the first of a mutex on all that is served.
std::uint32_t* WordOf(pthread_mutex_t& mutex) {
  static_assert(sizeof(mutex.__data.__lock) == sizeof(std::uint32_t));
  return reinterpret_cast<std::uint32_t*>(&mutex.__data.__lock);
}

void InitMutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  RESILIENT_CHECK(pthread_mutexattr_init(&attributes) == 0);
  RESILIENT_CHECK(pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0);
  RESILIENT_CHECK(pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0);
  RESILIENT_CHECK(pthread_mutex_init(mutex, &attributes) == 0);
  pthread_mutexattr_destroy(&attributes);
}

}  // namespace

std::string RobustToken::EncodeOffer(const Offer& offer) {
  return StrCat(offer.pid, " ", offer.start_time, " ", offer.fd, " ", offer.inode, " ",
                offer.nonce);
}

std::optional<RobustToken::Offer> RobustToken::DecodeOffer(std::string_view text) {
  Offer offer;
  const bool read =
      ReadNumbers(text, &offer.pid, &offer.start_time, &offer.fd, &offer.inode, &offer.nonce);
  if (!read || offer.pid <= 0 || offer.fd < 0) return std::nullopt;
  return offer;
}

Result<std::unique_ptr<RobustToken>> RobustToken::Create() {
  const int fd = memfd_create("resilient-life", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot make the memory of a life token: ", std::strerror(errno)));
  }
  void* memory = MAP_FAILED;
  struct stat made {};
  if (ftruncate(fd, kPageBytes) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0 &&
      fstat(fd, &made) == 0) {
    memory = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(fd);
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot map the memory of a life token: ", std::strerror(error)));
  }
  // A forked child is not the one whose life this is.
  madvise(memory, kPageBytes, MADV_DONTFORK);
  ForkGuard::Register(fd);
  const ProcessIdentity process = ThisProcess();
  const Offer offer{.pid = process.pid,
                    .start_time = process.start_time,
                    .fd = fd,
                    .inode = made.st_ino,
                    .nonce = RandomSeed()};
  Page* const page = static_cast<Page*>(memory);
  page->nonce = offer.nonce;
  page->pid = process.pid;
  page->start_time = process.start_time;
  InitMutex(&page->mutex);
  return std::unique_ptr<RobustToken>(new RobustToken(page, offer));
}

RobustToken::~RobustToken() {
  if (mark_.InChild()) return;
  LetGo();
  ForkGuard::Unregister(offer_.fd);
  close(offer_.fd);
  // The C library has a list of what each thread holds, and this is on another one's.
  if (holder_.load() != 0) return;
  munmap(page_, kPageBytes);
}

void RobustToken::Take() {
  RESILIENT_CHECK(holder_.load() == 0);
  RESILIENT_CHECK(pthread_mutex_lock(&page_->mutex) == 0);
  // The kernel wakes somebody at the holder's end, and the C library when it is let go, only where
  // somebody is said to wait. Said once and for all here, for watchers cannot write to the page.
  __atomic_fetch_or(WordOf(page_->mutex), FUTEX_WAITERS, __ATOMIC_RELAXED);
  holder_.store(ThisThread());
}

void RobustToken::LetGo() {
  if (holder_.load() != ThisThread()) return;
  RESILIENT_CHECK(pthread_mutex_unlock(&page_->mutex) == 0);
  FutexWake(WordOf(page_->mutex), INT_MAX);
  holder_.store(0);
}

Result<std::unique_ptr<TokenWatch>> TokenWatch::Attach(const RobustToken::Offer& offer) {
  const std::string path = StrCat("/proc/", offer.pid, "/fd/", offer.fd);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (fd < 0) return Unreachable(offer, std::strerror(errno));
  struct stat found {};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool same = seals >= 0 && (seals & kSeals) == kSeals && fstat(fd, &found) == 0 &&
                    found.st_ino == offer.inode &&
                    static_cast<std::size_t>(found.st_size) == kPageBytes;
  void* const memory = same ? mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (memory == MAP_FAILED) return Unreachable(offer, "its token is not what it offered");
  madvise(memory, kPageBytes, MADV_DONTFORK);
  std::unique_ptr<TokenWatch> watch(new TokenWatch(static_cast<const RobustToken::Page*>(memory)));
  if (watch->page_->nonce != offer.nonce || watch->page_->pid != offer.pid) {
    return Unreachable(offer, "its token is another one's");
  }
  return watch;
}

TokenWatch::~TokenWatch() {
  if (!mark_.InChild()) munmap(const_cast<RobustToken::Page*>(page_), kPageBytes);
}

const std::uint32_t* TokenWatch::word() const {
  return WordOf(const_cast<pthread_mutex_t&>(page_->mutex));
}

bool TokenWatch::Held(std::uint32_t word) { return (word & FUTEX_TID_MASK) != 0; }
bool TokenWatch::HolderDied(std::uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

void TokenWatch::WakeOtherWatchers() const { FutexWake(word(), INT_MAX); }

ProcessEnd TokenWatch::OwnerEnd() const { return EndOf(page_->pid, page_->start_time); }

}  // namespace resilient
