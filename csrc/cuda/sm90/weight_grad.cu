#include "weight_grad.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, bool kLeftGathered>
const char* run(const WeightGradArguments& in, void* stream) {
  using Op = WeightGrad<T, kLeftGathered>;
  typename Op::Params p{};
  const int64_t dense_columns = kLeftGathered ? in.right_columns : in.left_columns;
  if (const char* error = ragged_map(&p.dense, in.dtype, kLeftGathered ? in.right : in.left, in.sizes.slots(),
                                     dense_columns, in.dense_stride, 64))
    return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + in.ticket;
  p.gathered = static_cast<const T*>(kLeftGathered ? in.left : in.right);
  p.gathered_columns = int(kLeftGathered ? in.left_columns : in.right_columns);
  p.out = static_cast<T*>(in.out);
  p.experts = int(in.sizes.experts);
  p.left_columns = int(in.left_columns);
  p.right_columns = int(in.right_columns);
  p.left_tiles = int((in.left_columns + kTileM - 1) / kTileM);
  p.right_tiles = int((in.right_columns + kTileN - 1) / kTileN);
  return launch<Op>(p, stream);
}

template <class T>
const char* choose(const WeightGradArguments& in, void* stream) {
  return in.left_gathered ? run<T, true>(in, stream) : run<T, false>(in, stream);
}

}  // namespace

const char* weight_grad(const WeightGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? choose<__nv_bfloat16>(in, stream) : choose<__half>(in, stream);
}

}  // namespace mok::sm90
