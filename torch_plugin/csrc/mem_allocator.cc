#include "torch_plugin/csrc/mem_allocator.h"

#include <dlfcn.h>

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <resilient/nccl_memory.h>
#include <resilient/per_process.h>

namespace resilient::plugin {
namespace {

using Allocate = std::function<void*(std::size_t bytes, int device, void* stream)>;
using Free = std::function<void(void* memory, std::size_t bytes, int device, void* stream)>;
// torch::cuda::CUDAPluggableAllocator::createCustomAllocator. What it makes is a c10::Allocator,
// the first base of each of its classes.
using Create = std::shared_ptr<c10::Allocator> (*)(Allocate allocate, Free free);

constexpr char kCreate[] =
    "_ZN5torch4cuda22CUDAPluggableAllocator21createCustomAllocatorESt8functionIFPvmiP11CUstream_"
    "stEES2_IFvS3_miS5_EE";

Create FindCreate() {
  void* library = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Create>(::dlsym(library, kCreate));
}

Result<std::shared_ptr<c10::Allocator>> Make(const CudaFabricOptions& options) {
  const Create create = FindCreate();
  if (create == nullptr) {
    return Status(StatusCode::kSetting,
                  "mem_allocator: this torch has no allocator for CUDA devices that takes others' "
                  "functions; it must be one that was built for CUDA");
  }
  auto loaded = LoadNcclMemory(options);
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<NcclMemory> memory = std::move(loaded).value();
  return create(
      [memory](std::size_t bytes, int device, void* /*stream*/) -> void* {
        const auto made = memory->Allocate(device, bytes);
        if (made.ok()) return *made;
        TORCH_WARN(made.status().message());
        return nullptr;  // Torch frees what it keeps, tries again, and says that memory is out.
      },
      [memory](void* gone, std::size_t /*bytes*/, int device, void* /*stream*/) {
        const Status freed = memory->Free(device, gone);
        if (!freed.ok()) {
          TORCH_WARN(freed.message());
        }
      });
}

struct Kept {
  std::mutex mutex;
  std::shared_ptr<c10::Allocator> made;  // Guarded by mutex.
};
// Never destroyed: pools may outlive all that is.
constinit PerProcess<Kept> of_process;

}  // namespace

Result<std::shared_ptr<c10::Allocator>> NcclAllocator(const CudaFabricOptions& options) {
  Kept& kept = of_process.Get();
  const std::lock_guard lock(kept.mutex);
  if (kept.made == nullptr) {
    auto allocator = Make(options);
    if (!allocator.ok()) return allocator.status();
    kept.made = std::move(allocator).value();
  }
  return kept.made;
}

}  // namespace resilient::plugin
