#include "tests/support/fake_torch_hooks.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <cstring>

#include "tests/support/fake_torch_guard.h"

namespace resilient::testing {
namespace {

// What torch asks about CUDA as a whole: autograd does before it looks for a current stream. What
// is not said here is as in a torch without CUDA: no cuDNN, no pinned memory.
// Owner: none, never destroyed. Thread: immutable.
class FakeHooks final : public at::CUDAHooksInterface {
 public:
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return kFakeDevices; }
  int getNumGPUs() const override { return kFakeDevices; }
  at::DeviceIndex current_device() const override { return FakeDevice(-1).index(); }
  at::DeviceIndex getCurrentDevice() const override { return current_device(); }
};

}  // namespace

void InstallHooks() {
  static const auto* const kHooks = new FakeHooks;
  // Torch keeps its object for good and has no way to exchange it, so it takes over our methods.
  // None of these classes has a member, so the pointer to the methods is all that an object is.
  static_assert(sizeof(FakeHooks) == sizeof(void*));
  auto* torchs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(torchs), static_cast<const void*>(kHooks), sizeof(void*));
}

}  // namespace resilient::testing
