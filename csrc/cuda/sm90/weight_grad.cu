#include "weight_grad.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T>
const char* run(const WeightGradArguments& in, void* stream) {
  using Op = WeightGrad<T>;
  typename Op::Params p{};
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + in.ticket;
  p.left = {static_cast<const T*>(in.left), in.left_stride, int(in.left_columns),
            in.left_gathered ? in.plan.order : nullptr};
  p.right = {static_cast<const T*>(in.right), in.right_stride, int(in.right_columns),
             in.right_gathered ? in.plan.order : nullptr};
  p.out = static_cast<T*>(in.out);
  p.experts = int(in.sizes.experts);
  p.top_k = int(in.sizes.top_k);
  p.left_tiles = int((in.left_columns + kTileM - 1) / kTileM);
  p.right_tiles = int((in.right_columns + kTileN - 1) / kTileN);
  return launch<Op>(p, stream);
}

}  // namespace

const char* weight_grad(const WeightGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16>(in, stream) : run<__half>(in, stream);
}

}  // namespace mok::sm90
