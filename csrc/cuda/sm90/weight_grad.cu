#include "weight_grad.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, bool kFlipped>
const char* run(const WeightGradArguments& in, void* stream) {
  using Op = WeightGrad<T, kFlipped>;
  typename Op::Params p{};
  if (const char* error =
          panel_map(&p.dense, in.dtype, in.dense, in.parts.count * in.parts.panels() * in.plan.room, kTileK))
    return error;
  const cuuint64_t gathered = cuuint64_t(in.gathered_columns), dense = cuuint64_t(in.parts.columns),
                   parts = cuuint64_t(in.parts.count), line = 2 * (kFlipped ? gathered : parts * dense),
                   part = 2 * dense * (kFlipped ? gathered : 1), matrix = 2 * parts * dense * gathered;
  if (const char* error = encode_map<4>(
          &p.sent, in.dtype, in.out,
          {{kFlipped ? gathered : dense, kFlipped ? dense : gathered, parts, cuuint64_t(in.sizes.experts)},
           {line, part, matrix},
           {64, 64, 1}}))
    return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + in.ticket;
  p.gathered = in.gathered;
  p.experts = int(in.sizes.experts);
  p.gathered_columns = int(in.gathered_columns);
  p.gathered_tiles = int((in.gathered_columns + Op::kTileM - 1) / Op::kTileM);
  p.part = int(in.parts.panels());
  p.panels = int(in.parts.count) * p.part;
  p.dense_tiles = int((p.panels * kPanel + Op::kTileN - 1) / Op::kTileN);
  p.add = in.add;
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
