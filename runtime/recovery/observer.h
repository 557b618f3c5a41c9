#pragma once

#include <functional>
#include <memory>

#include <resilient/whereabouts.h>

#include "runtime/base/process.h"
#include "runtime/recovery/progress_meter.h"

namespace resilient::recovery {

inline constexpr Duration kLookBound = std::chrono::seconds(2);

// What an observer looks with. Thread: value type.
struct ObserverParts {
  std::shared_ptr<StackSource> stacks;  // May be null.
  std::function<ProcessUsage()> usage;  // Called on the observer's thread, as the next one.
  std::function<double(int)> seconds_of_thread = &SecondsOfThread;
  Duration look_bound = kLookBound;      // Of one look at the stack.
  Duration sample_every = kSampleEvery;  // While somebody asks.
};

// MakeObserver with parts of the caller's.
std::shared_ptr<Observer> MakeObserverOf(const Clock& clock, ObserverParts parts);

}  // namespace resilient::recovery
