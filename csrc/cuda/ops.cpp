// The ops mok_sm90::*: tensors in, launches out. The callers (mok_compile/engines/sm90.py) allocate everything, have
// checked shapes and dtypes, and pass the stream, so that this library needs nothing of libtorch's CUDA part.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "sm90/arguments.h"

namespace mok::sm90 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using Doubles = std::vector<double>;

void require(const char* error) { STD_TORCH_CHECK(error == nullptr, "mok-compile, sm90 engine: ", error); }

Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Int:
      return Dtype::kInt32;
    case ScalarType::Long:
      return Dtype::kInt64;
    default:
      STD_TORCH_CHECK(false, "mok-compile, sm90 engine: unsupported dtype");
  }
}

const void* data_of(const MaybeTensor& t) { return t ? t->data_ptr() : nullptr; }
const void* data_of(const Tensors& list, size_t i) { return i < list.size() ? list[i].data_ptr() : nullptr; }

Layout layout_of(int64_t layout) { return static_cast<Layout>(layout); }

Activation activation_of(const Doubles& v) {
  STD_TORCH_CHECK(v.size() == 8, "mok-compile, sm90 engine: an activation has 8 numbers");
  return {int(v[0]), v[1] != 0, float(v[2]), float(v[3]), float(v[4]), float(v[5]), float(v[6]), float(v[7])};
}

Sizes sizes_of(const Tensor& x, const Tensor& ids, const Tensor& down) {
  return {x.size(0), x.size(1), down.size(2), down.size(0), ids.size(1)};
}

Plan plan_of(const Tensor& scratch, const Tensor& order, const Tensor& offsets, const Sizes& sizes) {
  STD_TORCH_CHECK(scratch.numel() >= Plan::scratch(sizes), "mok-compile, sm90 engine: the plan needs more room");
  return Plan::at(static_cast<int*>(scratch.data_ptr()), static_cast<const int*>(order.data_ptr()),
                  static_cast<const int*>(offsets.data_ptr()), sizes);
}

void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

int64_t plan_scratch(int64_t tokens, int64_t experts, int64_t top_k) {
  return Plan::scratch({tokens, 0, 0, experts, top_k});
}

int64_t sort_scratch(int64_t tokens, int64_t experts, int64_t top_k) {
  return schedule_scratch({tokens, 0, 0, experts, top_k});
}

int64_t score_rows(int64_t inner) { return score_tiles({0, 0, inner, 0, 0}); }

// y, h (if given), order, offsets; plan, counts, a and rows are scratch.
void forward_op(Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, Tensors up_bias, MaybeTensor down_bias,
                int64_t layout, bool transposed, Doubles activation, Tensor y, MaybeTensor h, Tensor order,
                Tensor offsets, Tensor plan, Tensor counts, Tensor a, Tensor rows, int64_t stream) {
  const Sizes sizes = sizes_of(x, ids, down);
  const Plan p = plan_of(plan, order, offsets, sizes);
  require(schedule(
      {sizes, ids.data_ptr(), dtype_of(ids), static_cast<int*>(order.data_ptr()), static_cast<int*>(offsets.data_ptr()),
       static_cast<int*>(counts.data_ptr()), p, const_cast<void*>(data_of(h)), h ? h->size(1) : 0},
      stream_of(stream)));
  require(forward({sizes,
                   dtype_of(x),
                   layout_of(layout),
                   transposed,
                   activation_of(activation),
                   p,
                   x.data_ptr(),
                   {data_of(up, 0), data_of(up, 1)},
                   down.data_ptr(),
                   {data_of(up_bias, 0), data_of(up_bias, 1)},
                   data_of(down_bias),
                   const_cast<void*>(data_of(h)),
                   a.data_ptr(),
                   rows.data_ptr()},
                  stream_of(stream)));
  require(combine({sizes, dtype_of(x), p, rows.data_ptr(), sizes.hidden, weights.data_ptr(), dtype_of(weights),
                   y.data_ptr(), dtype_of(y), sizes.hidden, nullptr, 0, nullptr},
                  stream_of(stream)));
}

// A weight gradient's operands: `dense` [S, columns], of which the columns from `first` on count, by sorted row, and
// `gathered` [T, columns] by token.
struct Outer {
  const void* dense;
  int64_t dense_columns, dense_stride, first;
  const Tensor& gathered;
};

// out = per expert the sum over its rows of dense outer gathered, or the other way round.
void outer(const Outer& in, bool dense_first, const Sizes& sizes, const Plan& plan, const Tensor& out, int ticket,
           int64_t stream) {
  const void* const dense = static_cast<const char*>(in.dense) + 2 * in.first;
  const void* const gathered = in.gathered.data_ptr();
  const int64_t columns = in.gathered.size(1);
  require(weight_grad({sizes, dtype_of(in.gathered), plan, dense_first ? dense : gathered,
                       dense_first ? gathered : dense, dense_first ? in.dense_columns : columns,
                       dense_first ? columns : in.dense_columns, in.dense_stride, !dense_first, out.data_ptr(), ticket},
                      stream_of(stream)));
}

// The gradients that are given. dh is written first; then `scratch`, of S * max(H, I) elements, holds the weighted
// activation, after it the rows of dx. The gradients of up are written last: one of them may be the scratch.
void backward_op(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensors up, Tensor down, int64_t layout,
                 bool transposed, Doubles activation, Tensor h, Tensor order, Tensor offsets, Tensor plan, Tensor dh,
                 Tensor scratch, Tensor dscore, MaybeTensor dx, MaybeTensor dweights, Tensors dup, MaybeTensor ddown,
                 int64_t stream) {
  const Sizes sizes = sizes_of(x, ids, down);
  const Plan p = plan_of(plan, order, offsets, sizes);
  const Dtype dtype = dtype_of(x);
  STD_TORCH_CHECK(scratch.numel() >= sizes.slots() * std::max(sizes.hidden, sizes.inner),
                  "mok-compile, sm90 engine: backward needs more room");
  require(replan(sizes, p, stream_of(stream)));
  require(down_grad({sizes, dtype, layout_of(layout), transposed, activation_of(activation), p, dy.data_ptr(),
                     down.data_ptr(), h.data_ptr(), weights.data_ptr(), dtype_of(weights), dh.data_ptr(),
                     scratch.data_ptr(), static_cast<float*>(dscore.data_ptr())},
                    stream_of(stream)));
  if (ddown) outer({scratch.data_ptr(), sizes.inner, sizes.inner, 0, dy}, transposed, sizes, p, *ddown, 3, stream);
  CombineArguments sum{};
  sum.sizes = sizes;
  sum.dtype = sum.out_dtype = dtype;
  sum.plan = p;
  if (dx) {
    require(up_grad({sizes,
                     dtype,
                     layout_of(layout),
                     transposed,
                     p,
                     dh.data_ptr(),
                     {data_of(up, 0), data_of(up, 1)},
                     scratch.data_ptr(),
                     0,
                     sizes.hidden},
                    stream_of(stream)));
    sum.rows = scratch.data_ptr();
    sum.out = dx->data_ptr();
    sum.columns = sum.out_stride = sizes.hidden;
  }
  if (dweights) {
    sum.dscore = static_cast<const float*>(dscore.data_ptr());
    sum.dscore_tiles = score_tiles(sizes);
    sum.dweights = dweights->data_ptr();
    sum.weights_dtype = dtype_of(*dweights);
  }
  if (dx || dweights) require(combine(sum, stream_of(stream)));
  const int64_t columns = dh.size(1) / std::max<int64_t>(1, dup.size());
  for (size_t i = 0; i < dup.size(); ++i)
    outer({dh.data_ptr(), columns, dh.size(1), int64_t(i) * columns, x}, !transposed, sizes, p, dup[i], 4 + int(i),
          stream);
}

}  // namespace

STABLE_TORCH_LIBRARY(mok_sm90, m) {
  m.def("plan_scratch(int tokens, int experts, int top_k) -> int");
  m.def("sort_scratch(int tokens, int experts, int top_k) -> int");
  m.def("score_rows(int inner) -> int");
  m.def(
      "forward(Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, Tensor[] up_bias, Tensor? down_bias, "
      "int layout, bool transposed, float[] activation, Tensor(a!) y, Tensor(b!)? h, Tensor(c!) order, "
      "Tensor(d!) offsets, Tensor(e!) plan, Tensor(f!) counts, Tensor(g!) a, Tensor(i!) rows, int stream) -> ()");
  m.def(
      "backward(Tensor dy, Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor down, int layout, "
      "bool transposed, float[] activation, Tensor h, Tensor order, Tensor offsets, Tensor(a!) plan, Tensor(b!) dh, "
      "Tensor(c!) scratch, Tensor(d!) dscore, Tensor(e!)? dx, Tensor(f!)? dweights, Tensor(g!)[] dup, "
      "Tensor(i!)? ddown, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CompositeExplicitAutograd, m) {
  m.impl("plan_scratch", TORCH_BOX(&plan_scratch));
  m.impl("sort_scratch", TORCH_BOX(&sort_scratch));
  m.impl("score_rows", TORCH_BOX(&score_rows));
}

STABLE_TORCH_LIBRARY_IMPL(mok_sm90, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward_op));
  m.impl("backward", TORCH_BOX(&backward_op));
}

}  // namespace mok::sm90
