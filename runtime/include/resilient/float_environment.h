#pragma once

#include <cstdint>

namespace resilient {

// The floating-point environment in which results are computed, whatever thread computes them:
// round to nearest even, subnormals kept (FTZ and DAZ off), no traps. The processor keeps these
// settings for each thread, a program changes them for its own threads only
// (torch.set_flush_denormal, fesetround, libraries linked with -ffast-math), and any thread may run
// a reduction: without one environment for all, the ranks of one operation could hold different
// bits.
//
// The constructor sets the environment on the calling thread, the destructor restores what was set
// before. It takes a few nanoseconds, and writes nothing where the settings are these already.
// Owner: a stack frame. Thread: confined. Lifetime: instances nest.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  const std::uint64_t before_;  // The control register: MXCSR, FPCR.
  const bool changed_;
};

}  // namespace resilient
