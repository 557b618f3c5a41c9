#pragma once

namespace resilient::testing {

// From now on torch believes that it has CUDA with as many devices as the fake, for good.
void InstallHooks();

}  // namespace resilient::testing
