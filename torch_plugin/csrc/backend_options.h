#pragma once

#include <chrono>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <resilient/nccl_options.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace resilient::plugin {

// A group's options as c10d hands them around, with what the group asks of NCCL: what programs pass
// as pg_options, and what a split is told of its parent.
//
// Owner: shared, as all of c10d's options. Thread: `nccl` is immutable, the rest is the caller's to
// synchronise.
struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout, NcclOptions of_nccl = {})
      : Options("resilient", timeout), nccl(std::move(of_nccl)) {}

  // Overrides that of torch 2.15, by which torch makes those of a split; others have none.
  c10::intrusive_ptr<Options> clone() const {  // NOLINT(modernize-use-override)
    return c10::make_intrusive<BackendOptions>(*this);
  }

  const NcclOptions nccl;
};

}  // namespace resilient::plugin
