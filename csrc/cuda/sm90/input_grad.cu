#include "input_grad.cuh"

#include "launch.cuh"

namespace mok::sm90 {
namespace {

template <class T, Columns kColumns, bool kPlain, bool kTransposed>
const char* run_down(const DownGradArguments& in, void* stream) {
  using Op = DownGrad<T, kColumns, kPlain, kTransposed>;
  typename Op::Params p{};
  if (const char* error = weight_map<Op>(&p.down, in.dtype, in.down, in.sizes.hidden, in.sizes.inner, kTransposed))
    return error;
  p.places = in.down.places;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + 1;
  p.dy = in.dy;
  p.h = static_cast<const T*>(in.h);
  p.weights = {const_cast<void*>(in.weights), in.weights_dtype};
  p.dh = static_cast<T*>(in.dh);
  p.a = static_cast<T*>(in.a);
  p.dscore = in.dscore;
  p.activation = in.activation;
  if (in.pull) p.pull = *in.pull;
  p.hidden = int(in.sizes.hidden);
  p.inner = int(in.sizes.inner);
  p.tiles = int(score_tiles(in.sizes));
  p.slots = int(in.sizes.slots());
  return launch<Op>(p, stream);
}

template <class T>
const char* choose_down(const DownGradArguments& in, void* stream) {
  if (in.layout == Layout::kInterleaved)
    return in.transposed ? run_down<T, Columns::kInterleaved, false, true>(in, stream)
                         : run_down<T, Columns::kInterleaved, false, false>(in, stream);
  if (in.layout == Layout::kSingle)
    return in.transposed ? run_down<T, Columns::kSingle, false, true>(in, stream)
                         : run_down<T, Columns::kSingle, false, false>(in, stream);
  if (in.transposed) return run_down<T, Columns::kHalves, false, true>(in, stream);
  return is_plain_silu(in.activation) ? run_down<T, Columns::kHalves, true, false>(in, stream)
                                      : run_down<T, Columns::kHalves, false, false>(in, stream);
}

template <class T, bool kTransposed>
const char* run_up(const UpGradArguments& in, void* stream) {
  using Op = UpGrad<T, kTransposed>;
  const bool separate = in.layout == Layout::kSeparate;
  const Parts parts = parts_of(in.layout, in.sizes.inner);
  const int64_t k = separate ? parts.columns : parts.columns * parts.count;
  typename Op::Params p{};
  for (int i = 0; i < 2; ++i) {
    const Weight& up = in.up[separate ? i : 0];
    if (const char* error = weight_map<Op>(&p.up[i], in.dtype, up, k, in.sizes.hidden, kTransposed)) return error;
    p.places[i] = up.places;
  }
  const int64_t rows = parts.count * parts.panels() * in.plan.room;
  if (const char* error = panel_map(&p.dh, in.dtype, in.dh, rows, Op::kBoxRows)) return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + 2;
  p.part = int(parts.columns);
  p.parts = int(parts.count);
  p.second = separate ? 0 : int(parts.columns);
  p.rows = static_cast<T*>(in.rows);
  p.hidden = int(in.sizes.hidden);
  p.tiles = int((in.sizes.hidden + Op::kTileN - 1) / Op::kTileN);
  return launch<Op>(p, stream);
}

template <class T>
const char* choose_up(const UpGradArguments& in, void* stream) {
  return in.transposed ? run_up<T, true>(in, stream) : run_up<T, false>(in, stream);
}

}  // namespace

int64_t score_tiles(const Sizes& sizes) { return (sizes.inner + kScoreColumns - 1) / kScoreColumns; }

const char* down_grad(const DownGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? choose_down<__nv_bfloat16>(in, stream) : choose_down<__half>(in, stream);
}

const char* up_grad(const UpGradArguments& in, void* stream) {
  return in.dtype == Dtype::kBFloat16 ? choose_up<__nv_bfloat16>(in, stream) : choose_up<__half>(in, stream);
}

}  // namespace mok::sm90
