#pragma once

#include "tests/support/fake_nccl.h"

namespace resilient::testing {

// The fake of the shared library, made at the first call.
FakeNccl& FakeOfLibrary();

}  // namespace resilient::testing
