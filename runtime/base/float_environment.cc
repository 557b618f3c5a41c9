#include <resilient/float_environment.h>

#include <cfenv>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace resilient {
namespace {

#if defined(__x86_64__)

constexpr std::uint64_t kFlags = 0x3f;       // Exceptions that have occurred: no setting.
constexpr std::uint64_t kStandard = 0x1f80;  // All exceptions masked; the rest of the bits is 0.

std::uint64_t Read() { return _mm_getcsr(); }
void Write(std::uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }

#elif defined(__aarch64__)

constexpr std::uint64_t kFlags = 0;  // They are in another register.
constexpr std::uint64_t kStandard = 0;

std::uint64_t Read() {
  std::uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}

void Write(std::uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }

#else  // Processors that flush no subnormals: the rounding mode is all.

constexpr std::uint64_t kFlags = 0;
constexpr std::uint64_t kStandard = FE_TONEAREST;

std::uint64_t Read() { return static_cast<std::uint64_t>(std::fegetround()); }
void Write(std::uint64_t word) { std::fesetround(static_cast<int>(word)); }

#endif

}  // namespace

// Neither is inline, so that no compiler moves a computation across them.
FloatEnvironment::FloatEnvironment() : before_(Read()), changed_((before_ & ~kFlags) != kStandard) {
  if (changed_) Write(kStandard);
}

FloatEnvironment::~FloatEnvironment() {
  if (changed_) Write(before_);
}

}  // namespace resilient
