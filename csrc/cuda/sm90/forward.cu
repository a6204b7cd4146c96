#include "forward.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, bool kGated, bool kPlain>
const char* run(const ForwardArguments& in, void* stream) {
  using Op = Forward<T, kGated, kPlain>;
  const int64_t hidden = in.sizes.hidden, inner = in.sizes.inner, experts = in.sizes.experts;
  const bool separate = in.layout == Layout::kSeparate;
  const int64_t up_rows = in.layout == Layout::kConcat ? 2 * inner : inner;
  typename Op::Params p{};
  for (int i = 0; i < 2; ++i) {
    const void* const up = in.up[separate ? i : 0];
    if (const char* error = weight_map(&p.up[i], in.dtype, up, experts, up_rows, hidden, kTileN / 2)) return error;
  }
  if (const char* error = weight_map(&p.down, in.dtype, in.down, experts, hidden, inner, kTileN / 2)) return error;
  if (const char* error = ragged_map(&p.a, in.dtype, in.a, in.sizes.slots(), inner, inner, kTileM)) return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets;
  p.x = static_cast<const T*>(in.x);
  p.h = static_cast<T*>(in.h);
  p.a_out = static_cast<T*>(in.a);
  p.rows = static_cast<T*>(in.rows);
  p.up_bias[0] = static_cast<const T*>(in.up_bias[0]);
  p.up_bias[1] = separate ? static_cast<const T*>(in.up_bias[1]) : p.up_bias[0] ? p.up_bias[0] + inner : nullptr;
  p.down_bias = static_cast<const T*>(in.down_bias);
  p.up_bias_stride = up_rows;
  p.activation = in.activation;
  p.hidden = int(hidden);
  p.inner = int(inner);
  p.second = in.layout == Layout::kConcat ? int(inner) : separate ? 0 : kTileN / 2;
  p.up_tiles = int((inner + Op::kWidth - 1) / Op::kWidth);
  p.down_tiles = int((hidden + kTileN - 1) / kTileN);
  return launch<Op>(p, stream);
}

template <class T>
const char* choose(const ForwardArguments& in, void* stream) {
  if (in.layout == Layout::kSingle) return run<T, false, false>(in, stream);
  const bool plain = is_plain_silu(in.activation) && !in.up_bias[0] && !in.down_bias;
  return plain ? run<T, true, true>(in, stream) : run<T, true, false>(in, stream);
}

}  // namespace

const char* forward(const ForwardArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? choose<__nv_bfloat16>(in, stream) : choose<__half>(in, stream);
}

}  // namespace mok::sm90
