// Host side of the backward kernel. Each element type is compiled on its own, because that takes long.
#pragma once

#include "backward.cuh"
#include "launch.cuh"

namespace mok::sm90 {

// out = per expert the sum over its rows of `dense`, panels, outer `gathered` [T, columns], or the other way round.
struct Outer {
  const void* dense;
  Parts parts;  // of dense
  const void* gathered;
  int64_t gathered_columns;
  void* out;
};

template <class T, bool kFlipped>
const char* fill_weight(typename WeightGrad<T, kFlipped>::Params& p, const BackwardArguments& in, const Outer& outer) {
  if (const char* error =
          panel_map(&p.dense, in.dtype, outer.dense, outer.parts.count * outer.parts.panels() * in.plan.room, kTileK))
    return error;
  const cuuint64_t gathered = cuuint64_t(outer.gathered_columns), dense = cuuint64_t(outer.parts.columns),
                   parts = cuuint64_t(outer.parts.count), line = 2 * (kFlipped ? gathered : parts * dense),
                   part = 2 * dense * (kFlipped ? gathered : 1), matrix = 2 * parts * dense * gathered;
  if (const char* error = encode_map<4>(
          &p.sent, in.dtype, outer.out,
          {{kFlipped ? gathered : dense, kFlipped ? dense : gathered, parts, cuuint64_t(in.sizes.experts)},
           {line, part, matrix},
           {64, 64, 1}}))
    return error;
  p.plan = in.plan;
  p.gathered = static_cast<const T*>(outer.gathered);
  p.experts = int(in.sizes.experts);
  p.gathered_columns = int(outer.gathered_columns);
  p.gathered_tiles = int((outer.gathered_columns + kTileM - 1) / kTileM);
  p.part = int(outer.parts.panels());
  p.panels = int(outer.parts.count) * p.part;
  p.dense_tiles = int((p.panels * kPanel + kTileN - 1) / kTileN);
  return nullptr;
}

template <class Of>
const char* fill_down(typename Of::Params& p, const BackwardArguments& in, bool transposed) {
  if (const char* error =
          weight_map(&p.down, in.dtype, in.down, in.sizes.hidden, in.sizes.inner, transposed, transposed))
    return error;
  using T = typename Of::Element;
  p.places = in.down.places;
  p.plan = in.plan;
  p.dy = static_cast<const T*>(in.dy);
  p.h = static_cast<const T*>(in.h);
  p.weights = {const_cast<void*>(in.weights), in.weights_dtype};
  p.dh = static_cast<T*>(in.dh);
  p.a = static_cast<T*>(in.a);
  p.dscore = in.dscore;
  p.activation = in.activation;
  p.hidden = int(in.sizes.hidden);
  p.inner = int(in.sizes.inner);
  p.tiles = int(score_tiles(in.sizes));
  p.slots = int(in.sizes.slots());
  return nullptr;
}

template <class Of>
const char* fill_up(typename Of::Params& p, const BackwardArguments& in, bool transposed) {
  const bool separate = in.layout == Layout::kSeparate;
  const Parts parts = parts_of(in.layout, in.sizes.inner);
  const int64_t k = separate ? parts.columns : parts.columns * parts.count;
  for (int i = 0; i < 2; ++i) {
    const Weight& up = in.up[separate ? i : 0];
    if (const char* error = weight_map(&p.up[i], in.dtype, up, k, in.sizes.hidden, transposed, transposed))
      return error;
    p.places[i] = up.places;
  }
  const int64_t rows = parts.count * parts.panels() * in.plan.room;
  if (const char* error = panel_map(&p.dh, in.dtype, in.dh, rows, kTileM)) return error;
  p.plan = in.plan;
  p.part = int(parts.columns);
  p.parts = int(parts.count);
  p.second = separate ? 0 : int(parts.columns);
  p.rows = static_cast<typename Of::Element*>(in.rows);
  p.columns = int(in.sizes.hidden);
  p.tiles = int((in.sizes.hidden + kTileN - 1) / kTileN);
  return nullptr;
}

template <class T, Columns kColumns, bool kPlain, bool kTransposed>
const char* run_backward(const BackwardArguments& in, BackwardPhase first, BackwardPhase last, void* stream) {
  using Op = Backward<T, kColumns, kPlain, kTransposed>;
  const Sizes& sizes = in.sizes;
  const auto wanted = [&](BackwardPhase product, const void* result) {
    return result && first <= product && product < last;
  };
  const char* error = nullptr;
  typename Op::Params p{};
  p.down.plan = p.up.plan = in.plan;  // which blocks there are is looked up before how many tiles they have
  if (wanted(BackwardPhase::kDownGrad, in.dh)) error = fill_down<typename Op::Down>(p.down, in, kTransposed);
  if (!error && wanted(BackwardPhase::kDownWeight, in.ddown))
    error = fill_weight<T, kTransposed>(p.down_weight, in, {in.a, {sizes.inner, 1}, in.dy, sizes.hidden, in.ddown});
  if (!error && wanted(BackwardPhase::kUpGrad, in.rows)) error = fill_up<typename Op::Up>(p.up, in, kTransposed);
  const Parts all = parts_of(in.layout, sizes.inner), parts{all.columns, in.dup[1] ? 1 : all.count};
  for (int i = 0; i < 2; ++i) {
    if (error || !wanted(BackwardPhase::kUpWeight, in.dup[i])) continue;
    const T* const dh = static_cast<const T*>(in.dh) + i * all.panels() * in.plan.room * kPanel;
    error = fill_weight<T, !kTransposed>(p.up_weight[i], in, {dh, parts, in.x, sizes.hidden, in.dup[i]});
  }
  if (error) return error;
  p.plan = in.plan;
  p.error = in.plan.error;
  p.ticket = in.plan.tickets + 1 + int(first);
  if (in.pull && first == BackwardPhase::kDownGrad) p.pull = *in.pull;
  p.tiles = int(score_tiles(sizes));
  return launch<Op>(p, stream);
}

template <class T>
const char* start_backward(const BackwardArguments& in, BackwardPhase first, BackwardPhase last, void* stream) {
  const auto start = [&](auto run, auto run_transposed) {
    return (in.transposed ? run_transposed : run)(in, first, last, stream);
  };
  if (in.layout == Layout::kInterleaved)
    return start(run_backward<T, Columns::kInterleaved, false, false>,
                 run_backward<T, Columns::kInterleaved, false, true>);
  if (in.layout == Layout::kSingle)
    return start(run_backward<T, Columns::kSingle, false, false>, run_backward<T, Columns::kSingle, false, true>);
  if (is_plain_silu(in.activation) && !in.transposed)
    return run_backward<T, Columns::kHalves, true, false>(in, first, last, stream);
  return start(run_backward<T, Columns::kHalves, false, false>, run_backward<T, Columns::kHalves, false, true>);
}

extern template const char* start_backward<__nv_bfloat16>(const BackwardArguments&, BackwardPhase, BackwardPhase,
                                                          void*);
extern template const char* start_backward<__half>(const BackwardArguments&, BackwardPhase, BackwardPhase, void*);

}  // namespace mok::sm90
