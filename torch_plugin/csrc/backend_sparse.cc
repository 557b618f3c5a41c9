#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include "torch_plugin/csrc/backend.h"
#include "torch_plugin/csrc/convert.h"

namespace resilient::plugin {

using c10d::OpType;
using WorkPtr = ResilientBackend::WorkPtr;

namespace {

// Row of a rank in the table of shapes.
enum ShapeColumn : std::int64_t { kEntries = 0, kType, kSparseDims, kDims, kSizes };
constexpr std::int64_t kMaxDims = 16;

at::Tensor ShapeOf(const at::Tensor& tensor) {
  at::Tensor shape = at::zeros({kSizes + kMaxDims}, at::kLong);
  auto* row = shape.mutable_data_ptr<std::int64_t>();
  row[kEntries] = tensor._nnz();
  row[kType] = static_cast<std::int64_t>(tensor.scalar_type());
  row[kSparseDims] = tensor.sparse_dim();
  row[kDims] = tensor.dim();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) row[kSizes + dim] = tensor.size(dim);
  return shape;
}

// The first rank whose shape is not that of this rank's `shape`; -1: none.
std::int64_t OddRank(const at::Tensor& shapes, const at::Tensor& shape) {
  for (std::int64_t rank = 0; rank < shapes.size(0); ++rank) {
    if (!shapes[rank].slice(0, kType).equal(shape.slice(0, kType))) return rank;
  }
  return -1;
}

}  // namespace

at::Tensor ResilientBackend::SparseShapes(const at::Tensor& tensor) {
  Plan plan = Begin(OpType::_ALLREDUCE_SPARSE, "resilient:sparse_all_reduce");
  const at::Tensor shape = ShapeOf(tensor);
  at::Tensor shapes = at::empty({getSize(), shape.numel()}, at::kLong);
  PlanGather(plan, OpKind::kAllGather, shapes, shape);
  if (const WorkPtr work = Launch(std::move(plan), true)) work->wait();
  return shapes;
}

// The other ranks must know how many entries there are before they can receive them, so the sizes
// are exchanged first, while the caller waits: operations that he starts later come later on all
// ranks.
WorkPtr ResilientBackend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  Plan plan = Begin(OpType::_ALLREDUCE_SPARSE, "resilient:sparse_all_reduce");
  const at::Tensor& tensor = Only(plan, tensors);
  if (!tensor.defined() || tensor.layout() != at::kSparse || !tensor.device().is_cpu()) {
    plan.Refuse("it takes a sparse COO tensor on the CPU");
  }
  const at::Tensor own = tensor.detach().coalesce();
  const bool average = options.reduceOp.op_ == c10d::ReduceOp::AVG;
  if (options.reduceOp.op_ != c10d::ReduceOp::SUM && !average) {
    plan.Refuse("sparse tensors can be reduced by SUM and AVG only");
  }
  if (own.dim() > kMaxDims) plan.Refuse(c10::str("it has more than ", kMaxDims, " dimensions"));
  if (average && !own.is_floating_point() && !own.is_complex()) {
    plan.Refuse("AVG of a sparse tensor needs a floating point type");
  }
  plan.lease_ = parts_.extension->Take();  // The exchange of the sizes is a part of the Work.
  const at::Tensor shapes = SparseShapes(own);
  if (const std::int64_t odd = OddRank(shapes, ShapeOf(own)); odd >= 0) {
    plan.Refuse(c10::str("rank ", odd, " has a tensor of another shape or type than rank ",
                         getRank(), " with ", own.sizes(), " of ", own.scalar_type()));
  }
  Tensors indices;
  Tensors values;
  std::vector<std::int64_t> value_shape = own.values().sizes().vec();
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto entries = shapes[rank][kEntries].item<std::int64_t>();
    value_shape.front() = entries;
    indices.push_back(at::empty({own.sparse_dim(), entries}, at::kLong));
    values.push_back(at::empty(value_shape, own.values().options()));
  }
  PlanGatherToList(plan, OpKind::kAllGather, indices, own.indices());
  PlanGatherToList(plan, OpKind::kAllGather, values, own.values());
  plan.outputs_ = {tensor};
  plan.AtEnd([tensor, indices, values, sizes = own.sizes().vec(), average] {
    at::Tensor sum = at::_sparse_coo_tensor_unsafe(indices[0], values[0], sizes);
    for (std::size_t rank = 1; rank < indices.size(); ++rank) {
      sum = sum + at::_sparse_coo_tensor_unsafe(indices[rank], values[rank], sizes);
    }
    if (average) sum = sum / static_cast<std::int64_t>(indices.size());
    at::Tensor(tensor).copy_(sum.coalesce());
  });
  return Launch(std::move(plan), Waits(options));
}

}  // namespace resilient::plugin
