#include "runtime/comm/nccl_library.h"

#include <dlfcn.h>

#include <initializer_list>
#include <string_view>

#include "runtime/base/dynamic_library.h"
#include "runtime/base/log.h"

namespace resilient {
namespace {

// They stay loaded: others in the process may have got them from us, and a thread that hangs in
// one of them can never be called back.
constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
// The first in which the communicators of a device can be aborted as one group.
constexpr int kOldestVersion = 22200;
constexpr int kCuda13 = 13000;

Status CannotLoad(std::string_view what, std::string_view why) {
  return Status(StatusCode::kSetting,
                StrCat(what, " cannot be used: ", why,
                       "; a torch that is built for CUDA brings it (pip: nvidia-nccl-cu13 and "
                       "nvidia-cuda-runtime), and importing torch first makes it known"));
}

struct Opened {
  void* handle = nullptr;
  std::string name;
};

Result<Opened> Open(std::string_view what, const std::string& path,
                    std::initializer_list<const char*> names) {
  if (!path.empty()) {
    if (void* handle = dlopen(path.c_str(), kFlags)) return Opened{handle, path};
    const char* why = dlerror();
    return CannotLoad(what, why == nullptr ? path : why);
  }
  for (const int extra : {RTLD_NOLOAD, 0}) {
    for (const char* name : names) {
      if (void* handle = dlopen(name, kFlags | extra)) return Opened{handle, name};
    }
  }
  const char* why = dlerror();
  return CannotLoad(what, why == nullptr ? "it is not found" : why);
}

Status MissingFunction(const Opened& library, std::string_view function) {
  return Status(StatusCode::kSetting,
                StrCat(library.name, " has no function ", function,
                       "; it is another library or an older version than the one that is needed"));
}

Status FindAll(const Opened& library, NcclApi* api) {
#define RESILIENT_FIND(function)                                       \
  if (!FindFunction(library.handle, "nccl" #function, &api->function)) \
    return MissingFunction(library, "nccl" #function);
  RESILIENT_NCCL_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
#define RESILIENT_FIND(function) \
  (void)FindFunction(library.handle, "nccl" #function, &api->function);
  RESILIENT_NCCL_OPTIONAL_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
  return Status::Ok();
}

Status FindAll(const Opened& library, CudaApi* api) {
#define RESILIENT_FIND(function)                                       \
  if (!FindFunction(library.handle, "cuda" #function, &api->function)) \
    return MissingFunction(library, "cuda" #function);
  RESILIENT_CUDA_FUNCTIONS(RESILIENT_FIND)
  RESILIENT_CUDA_OVERLOADED_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
#define RESILIENT_FIND(function) \
  (void)FindFunction(library.handle, "cuda" #function, &api->function);
  RESILIENT_CUDA_OPTIONAL_FUNCTIONS(RESILIENT_FIND)
  RESILIENT_CUDA_GRAPH_FUNCTIONS(RESILIENT_FIND)
#undef RESILIENT_FIND
  // Before CUDA 13 the name without a number is that of an earlier function.
  int version = 0;
  int (*get_version)(int*) = nullptr;
  const bool is_asked = FindFunction(library.handle, "cudaRuntimeGetVersion", &get_version);
  const bool renamed = is_asked && get_version(&version) == 0 && version >= kCuda13;
  (void)FindFunction(library.handle,
                     renamed ? "cudaStreamGetCaptureInfo" : "cudaStreamGetCaptureInfo_v3",
                     &api->StreamGetCaptureInfo);
  return Status::Ok();
}

}  // namespace

std::string NcclVersionText(int version) {
  return StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

Result<CudaApi> LoadCudaRuntime(const NcclLibraryPaths& paths) {
  const Result<Opened> cuda = Open("the CUDA runtime", paths.cuda_runtime,
                                   {"libcudart.so.13", "libcudart.so.12", "libcudart.so"});
  if (!cuda.ok()) return cuda.status();
  CudaApi api;
  RESILIENT_RETURN_IF_ERROR(FindAll(*cuda, &api));
  return api;
}

Result<NcclLibrary> LoadNcclLibrary(const NcclLibraryPaths& paths) {
  const Result<Opened> nccl = Open("NCCL", paths.nccl, {"libnccl.so.2"});
  if (!nccl.ok()) return nccl.status();
  NcclLibrary library;
  RESILIENT_RETURN_IF_ERROR(FindAll(*nccl, &library.nccl));
  const Result<CudaApi> cuda = LoadCudaRuntime(paths);
  if (!cuda.ok()) return cuda.status();
  library.cuda = *cuda;
  const NcclResult result = library.nccl.GetVersion(&library.nccl_version);
  if (result != NcclResult::kSuccess)
    return CannotLoad("NCCL", StrCat("ncclGetVersion says ", library.nccl.GetErrorString(result)));
  if (library.nccl_version < kOldestVersion) {
    return CannotLoad(nccl->name, StrCat("it is NCCL ", NcclVersionText(library.nccl_version),
                                         ", and ", NcclVersionText(kOldestVersion),
                                         " is the oldest that can be aborted safely"));
  }
  return library;
}

}  // namespace resilient
