#include "weight_grad.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, bool kFlipped>
const char* run(const WeightGradArguments& in, void* stream) {
  using Op = WeightGrad<T, kFlipped>;
  typename Op::Params p{};
  if (const char* error =
          ragged_map(&p.dense, in.dtype, in.dense, in.sizes.slots(), in.dense_columns, in.dense_stride, 64))
    return error;
  const cuuint64_t across = cuuint64_t(kFlipped ? in.gathered_columns : in.dense_columns),
                   down = cuuint64_t(kFlipped ? in.dense_columns : in.gathered_columns);
  if (const char* error =
          encode_map<3>(&p.sent, in.dtype, in.out,
                        {{across, down, cuuint64_t(in.sizes.experts)}, {2 * across, 2 * across * down}, {64, 64}}))
    return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + in.ticket;
  p.gathered = static_cast<const T*>(in.gathered);
  p.out = static_cast<T*>(in.out);
  p.experts = int(in.sizes.experts);
  p.gathered_columns = int(in.gathered_columns);
  p.dense_columns = int(in.dense_columns);
  p.gathered_tiles = int((in.gathered_columns + kTileM - 1) / kTileM);
  p.dense_tiles = int((in.dense_columns + kTileN - 1) / kTileN);
  return launch<Op>(p, stream);
}

template <class T>
const char* choose(const WeightGradArguments& in, void* stream) {
  return in.dense_first ? run<T, true>(in, stream) : run<T, false>(in, stream);
}

}  // namespace

const char* weight_grad(const WeightGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? choose<__nv_bfloat16>(in, stream) : choose<__half>(in, stream);
}

}  // namespace mok::sm90
