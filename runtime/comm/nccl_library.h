#pragma once

#include <string>

#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"

namespace resilient {

// Where to find them; empty: the copy that the process has loaded already (torch's), else the one
// that the dynamic linker finds. Never a second copy by accident: NCCL keeps state of its own.
struct NcclLibraryPaths {
  std::string nccl;
  std::string cuda_runtime;
};

struct NcclLibrary {
  NcclApi nccl;
  CudaApi cuda;
  int nccl_version = 0;  // 23007 for 2.30.7.
};

// The CUDA runtime alone: `cuda_runtime` of `paths`. As LoadNcclLibrary.
Result<CudaApi> LoadCudaRuntime(const NcclLibraryPaths& paths = {});

// kSetting, with the name of the library or the function that is missing, or with the version of an
// NCCL that is too old. Needs no GPU. The libraries stay loaded for the life of the process.
Result<NcclLibrary> LoadNcclLibrary(const NcclLibraryPaths& paths = {});

// "2.30.7"
std::string NcclVersionText(int version);

}  // namespace resilient
