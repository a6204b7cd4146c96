#include "forward.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, Tiles kTiles, Columns kColumns, bool kPlain, bool kTransposed>
const char* run(const ForwardArguments& in, void* stream) {
  using Op = Forward<T, kTiles, kColumns, kPlain, kTransposed>;
  const int64_t hidden = in.sizes.hidden, inner = in.sizes.inner;
  const bool separate = in.layout == Layout::kSeparate;
  const bool halves = in.layout == Layout::kConcat;
  const int64_t up_rows = halves || in.layout == Layout::kInterleaved ? 2 * inner : inner;
  typename Op::Params p{};
  for (int i = 0; i < 2; ++i) {
    const Weight& up = in.up[separate ? i : 0];
    if (const char* error = weight_map<Op>(&p.up[i], in.dtype, up, up_rows, hidden, kTransposed)) return error;
    p.up_places[i] = up.places;
  }
  if (const char* error = weight_map<Op>(&p.down, in.dtype, in.down, hidden, inner, kTransposed)) return error;
  p.down_places = in.down.places;
  if (const char* error = panel_map(&p.a, in.dtype, in.a, panels_of(inner) * in.plan.room, Op::kBoxRows)) return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets;
  p.x = in.x;
  p.h = static_cast<T*>(in.h);
  p.a_out = static_cast<T*>(in.a);
  p.rows = static_cast<T*>(in.rows);
  p.up_bias[0] = static_cast<const T*>(in.up_bias[0]);
  p.up_bias[1] = separate ? static_cast<const T*>(in.up_bias[1]) : p.up_bias[0] ? p.up_bias[0] + inner : nullptr;
  p.down_bias = static_cast<const T*>(in.down_bias);
  p.up_bias_stride = up_rows;
  p.activation = in.activation;
  if (in.pull) p.pull = *in.pull;
  p.hidden = int(hidden);
  p.inner = int(inner);
  p.second = halves ? int(inner) : separate ? 0 : Op::kTileN / 2;
  // Whole panels of `a`, which are read as a whole.
  p.up_tiles = int((panels_of(inner) * kPanel + Op::kWidth - 1) / Op::kWidth);
  p.down_tiles = int((hidden + Op::kTileN - 1) / Op::kTileN);
  return launch<Op>(p, stream);
}

template <class T, Tiles kTiles>
const char* choose(const ForwardArguments& in, void* stream) {
  const bool plain = is_plain_silu(in.activation) && !in.up_bias[0] && !in.down_bias;
  if (in.layout == Layout::kInterleaved)
    return in.transposed ? run<T, kTiles, Columns::kInterleaved, false, true>(in, stream)
                         : run<T, kTiles, Columns::kInterleaved, false, false>(in, stream);
  if (in.layout == Layout::kSingle)
    return in.transposed ? run<T, kTiles, Columns::kSingle, false, true>(in, stream)
                         : run<T, kTiles, Columns::kSingle, false, false>(in, stream);
  if (in.transposed) return run<T, kTiles, Columns::kHalves, false, true>(in, stream);
  return plain ? run<T, kTiles, Columns::kHalves, true, false>(in, stream)
               : run<T, kTiles, Columns::kHalves, false, false>(in, stream);
}

}  // namespace

const char* forward(const ForwardArguments& in, void* stream) {
  const bool bf16 = in.dtype == Dtype::kBFloat16;
  switch (in.tiles) {
    case Tiles::kLow:
      return bf16 ? choose<__nv_bfloat16, Tiles::kLow>(in, stream) : choose<__half, Tiles::kLow>(in, stream);
    case Tiles::kTall:
      return bf16 ? choose<__nv_bfloat16, Tiles::kTall>(in, stream) : choose<__half, Tiles::kTall>(in, stream);
    default:
      return bf16 ? choose<__nv_bfloat16, Tiles::kWide>(in, stream) : choose<__half, Tiles::kWide>(in, stream);
  }
}

}  // namespace mok::sm90
