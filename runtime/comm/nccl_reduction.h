#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include <resilient/operation.h>
#include <resilient/status.h>

#include "runtime/comm/nccl_api.h"

namespace resilient {

// What NCCL can calculate depends on the library and on the device. Thread: value type.
struct NcclAbilities {
  bool premul_sum = false;  // The library makes operators that multiply.
  bool float8 = false;      // It reduces float8, and so does the device.
};

// Creates no context on the device. What cannot be asked is not there.
NcclAbilities AbilitiesOf(const NcclApi& nccl, const CudaApi& cuda, int device);

// A reduction as NCCL has it. Thread: value type.
struct NcclReduction {
  NcclDataType type = NcclDataType::kUInt8;
  std::size_t numbers = 1;               // Of `type`, in an element: a complex number is two.
  NcclReduceOp op = NcclReduceOp::kSum;  // Of kPremulSum: to be made first.
};

// kUnimplemented for what NCCL cannot reduce, kInvalidArgument for a factor that its type cannot
// hold; the text says why. REQUIRES: ValidateOperation.
Status CheckNcclReduction(const Operation& op, int ranks, const NcclAbilities& abilities);

// Among `ranks`. REQUIRES: CheckNcclReduction.
NcclReduction ReductionOf(const Operation& op, int ranks);

// REQUIRES: CheckNcclReduction.
NcclDataType NumberTypeOf(const Operation& op);

// The factor of kPremulSum as ncclRedOpCreatePreMulSum reads it: in the type of the numbers, so
// that a factor of a small float is rounded to it.
std::array<std::byte, 8> PremulScalar(const Operation& op);

// The operation does not run over NCCL.
Status NcclCannot(const Operation& op, std::string_view why);

}  // namespace resilient
