#include "runtime/comm/nccl_memory.h"

#include <string_view>

#include "runtime/base/exit_watch.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl_events.h"

namespace resilient {
namespace {

class LoadedMemory final : public NcclMemory {
 public:
  explicit LoadedMemory(const NcclLibrary& library) : library_(library) {}

  Result<void*> Allocate(int device, std::size_t bytes) override {
    const CudaDeviceScope scope(library_.cuda, device);
    void* memory = nullptr;
    RESILIENT_RETURN_IF_ERROR(Told(scope, device, "ncclMemAlloc",
                                   [&] { return library_.nccl.MemAlloc(&memory, bytes); }));
    return memory;
  }
  Status Free(int device, void* memory) override {
    const CudaDeviceScope scope(library_.cuda, device);
    return Told(scope, device, "ncclMemFree", [&] { return library_.nccl.MemFree(memory); });
  }

 private:
  template <typename Call>
  Status Told(const CudaDeviceScope& scope, int device, std::string_view what,
              const Call& call) const {
    if (scope.result() != CudaResult::kSuccess) {
      return Status(StatusCode::kSetting, StrCat(what, " on device ", device, ": cudaSetDevice: ",
                                                 library_.cuda.GetErrorString(scope.result())));
    }
    const DriverCall under_way(StrCat(what, " on device ", device));
    const NcclResult result = call();
    if (result == NcclResult::kSuccess) return Status::Ok();
    return Status(StatusCode::kSetting, StrCat(what, " failed on device ", device, ": ",
                                               library_.nccl.GetErrorString(result)));
  }

  const NcclLibrary library_;
};

}  // namespace

Result<std::shared_ptr<NcclMemory>> MakeNcclMemory(const NcclLibrary& library) {
  if (library.nccl.MemAlloc == nullptr || library.nccl.MemFree == nullptr) {
    return Status(StatusCode::kSetting, StrCat("NCCL ", NcclVersionText(library.nccl_version),
                                               " allocates no memory: it has no ncclMemAlloc"));
  }
  return std::shared_ptr<NcclMemory>(std::make_shared<LoadedMemory>(library));
}

Result<std::shared_ptr<NcclMemory>> LoadNcclMemory(const CudaFabricOptions& options) {
  const auto library =
      LoadNcclLibrary({.nccl = options.nccl_library, .cuda_runtime = options.cuda_runtime});
  if (!library.ok()) return library.status();
  return MakeNcclMemory(*library);
}

}  // namespace resilient
