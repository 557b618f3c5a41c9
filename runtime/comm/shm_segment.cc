#include "runtime/comm/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/log.h"
#include "runtime/base/numbers.h"
#include "runtime/base/process.h"

namespace resilient {
namespace {

constexpr std::size_t kPage = 4096;
// What all ranks together write in one step should stay in the caches.
constexpr std::size_t kBestSlotBytes = 256u << 10;
constexpr std::size_t kLeastSlotBytes = 16u << 10;

std::size_t RoundUp(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

std::string LinkTarget(const char* path) {
  std::array<char, 128> target{};
  const ssize_t n = readlink(path, target.data(), target.size());
  return n > 0 ? std::string(target.data(), static_cast<std::size_t>(n)) : std::string();
}

}  // namespace

std::optional<ShmGeometry> ShmGeometry::Within(std::size_t limit, int ranks) {
  ShmGeometry geometry{.ranks = ranks, .slot_bytes = 0};
  const std::size_t control = geometry.ControlEnd();
  if (limit <= control) return std::nullopt;
  const std::size_t room = (limit - control) / (kSlots * static_cast<std::size_t>(ranks));
  geometry.slot_bytes = std::min(kBestSlotBytes, room / kPage * kPage);
  // Each slot holds the head of an operation, the counts of every pair, and a part for every rank.
  const std::size_t least = std::max(kLeastSlotBytes, 256 * static_cast<std::size_t>(ranks));
  if (geometry.slot_bytes < least) return std::nullopt;
  return geometry;
}

std::size_t ShmGeometry::ControlEnd() const {
  return RoundUp(kControlBytes * static_cast<std::size_t>(ranks), kPage);
}

std::size_t ShmGeometry::TotalBytes() const {
  return ControlEnd() + kSlots * static_cast<std::size_t>(ranks) * slot_bytes;
}

std::string ShmSegment::EncodeOffer(const Offer& offer) {
  return StrCat(offer.pid, " ", offer.fd, " ", offer.bytes, " ", offer.inode);
}

std::optional<ShmSegment::Offer> ShmSegment::DecodeOffer(std::string_view text) {
  Offer offer;
  const bool read = ReadNumbers(text, &offer.pid, &offer.fd, &offer.bytes, &offer.inode);
  if (!read || offer.pid <= 0 || offer.fd < 0) return std::nullopt;
  return offer;
}

ShmSegment::ShmSegment(FileDescriptor file, std::span<std::byte> memory)
    : file_(std::move(file)), memory_(memory) {}

ShmSegment::~ShmSegment() {
  if (!mark_.InChild()) munmap(memory_.data(), memory_.size());
}

Result<std::unique_ptr<ShmSegment>> ShmSegment::Create(std::size_t bytes) {
  FileDescriptor file(memfd_create("resilient", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot make shared memory: ", std::strerror(errno)));
  }
  // Reserved now: memory that is missing later would be a SIGBUS in the middle of an operation.
  const auto size = static_cast<off_t>(bytes);
  int reserved = ftruncate(file.get(), size);
  if (reserved == 0) {
    do reserved = fallocate(file.get(), 0, 0, size);
    while (reserved != 0 && errno == EINTR);
  }
  if (reserved != 0) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot reserve ", bytes, " bytes of shared memory: ",
                         std::strerror(errno), "; RESILIENT_SHM_LIMIT bounds what a group takes"));
  }
  // Nobody can make it shorter under the others.
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return Map(std::move(file), bytes);
}

Result<std::unique_ptr<ShmSegment>> ShmSegment::Attach(const Offer& offer, std::size_t bytes) {
  const std::string path = StrCat("/proc/", offer.pid, "/fd/", offer.fd);
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) {
    return Status(StatusCode::kUnreachable, StrCat("cannot open shared memory of process ",
                                                   offer.pid, ": ", std::strerror(errno)));
  }
  struct stat found {};
  // Sealed: what could be made shorter would be a SIGBUS to come.
  const int seals = fcntl(file.get(), F_GET_SEALS);
  const bool same = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(file.get(), &found) == 0 &&
                    found.st_ino == offer.inode &&
                    static_cast<std::uint64_t>(found.st_size) == offer.bytes &&
                    offer.bytes == bytes;
  if (!same) {
    return Status(StatusCode::kUnreachable,
                  StrCat("the shared memory of process ", offer.pid, " is not what it offered"));
  }
  return Map(std::move(file), bytes);
}

Result<std::unique_ptr<ShmSegment>> ShmSegment::Map(FileDescriptor file, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) {
    return Status(StatusCode::kResourceExhausted,
                  StrCat("cannot map ", bytes, " bytes of shared memory: ", std::strerror(errno)));
  }
  // A forked child has no part in the group.
  madvise(memory, bytes, MADV_DONTFORK);
  const std::span<std::byte> mapped(static_cast<std::byte*>(memory), bytes);
  return std::unique_ptr<ShmSegment>(new ShmSegment(std::move(file), mapped));
}

ShmSegment::Offer ShmSegment::MakeOffer() const {
  RESILIENT_CHECK(file_.valid());
  struct stat found {};
  RESILIENT_CHECK(fstat(file_.get(), &found) == 0);
  return {.pid = getpid(), .fd = file_.get(), .bytes = memory_.size(), .inode = found.st_ino};
}

std::string ShmHostId() {
  const ProcessIdentity process = ThisProcess();
  const std::string network = LinkTarget("/proc/self/ns/net");
  if (process.boot_id.empty() || process.pid_namespace.empty() || network.empty()) return {};
  return StrCat(process.boot_id, "/", process.pid_namespace, "/", network, "/", getuid());
}

}  // namespace resilient
