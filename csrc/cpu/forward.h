// The forward pass, tile by tile.
#pragma once

#include <array>

#include "activation.h"
#include "product.h"

namespace mok {
namespace {

template <class Element>
Rows<Element> rows_of_x(const Block& block) {
  return {elements<Element>(block.x), block.H, block.token, block.weight_on_input ? block.weight : nullptr};
}

// Outputs from c0 on of a weight [out, in], for products with inputs.
template <class Element>
Strided<Element> columns_of(const Matrix& m, int64_t c0) {
  return {elements<Element>(m.data) + c0 * m.row, m.row, m.column};
}

// Inputs from c0 on, for products with gradients of outputs.
template <class Element>
Strided<Element> transposed_columns_of(const Matrix& m, int64_t c0) {
  return {elements<Element>(m.data) + c0 * m.column, m.column, m.row};
}

// The n elements of a bias from c0 on, as floats; zeros without bias.
template <class Element>
void load_bias(const Vector* bias, int64_t expert, int64_t c0, int64_t n, float* dst) {
  if (!bias) return fill(dst, 0.0f, n);
  const Vector& v = bias[expert];
  for (int64_t i = 0; i < n; i++) dst[i] = widen(elements<Element>(v.data)[(c0 + i) * v.stride]);
}

// Where gate and up of intermediate column c lie in a row of h: column * step + start.
struct HalfPlace {
  int64_t start;
  int64_t step;
};

inline HalfPlace gate_place(const Block& block) { return {0, block.interleaved ? 2 : 1}; }
inline HalfPlace up_place(const Block& block) {
  return {!block.gated ? 0 : block.interleaved ? 1 : block.I, block.interleaved ? 2 : 1};
}
inline int64_t h_columns(const Block& block) { return block.gated ? 2 * block.I : block.I; }

template <class Element>
void load_half(const Block& block, int64_t row, HalfPlace place, int64_t c0, int64_t n, float* dst) {
  const Element* src = elements<Element>(block.h) + row * h_columns(block) + place.start + c0 * place.step;
  if (place.step == 1) return widen_row(src, dst, n);
  for (int64_t i = 0; i < n; i++) dst[i] = widen(src[2 * i]);
}

template <class Element>
void store_half(const Block& block, int64_t row, HalfPlace place, int64_t c0, int64_t n, const float* src) {
  Element* dst = elements<Element>(block.h) + row * h_columns(block) + place.start + c0 * place.step;
  if (place.step == 1) return narrow_row(src, dst, n);
  for (int64_t i = 0; i < n; i++) dst[2 * i] = narrow<Element>(src[i]);
}

// h = x @ up.T + bias and a = activation(h) for rows [r0, r1) of an expert and columns [c0, c1) of I.
template <class Isa, class Element>
void up_tile(const Block& block, Scratch& scratch, const Tile& tile, const Tile& next) {
  const int64_t rows = tile.r1 - tile.r0, n = tile.c1 - tile.c0;
  // Without gate there is one, and it is up.
  const Matrix* first = block.gated ? block.gate : block.up;
  const auto weights_of = [&](const Tile& t) {
    return std::array{columns_of<Element>(first[t.expert], t.c0), columns_of<Element>(block.up[t.expert], t.c0)};
  };
  const auto weights = weights_of(tile), ahead = weights_of(next);
  multiply_weights<Isa, Element>(scratch, scratch.product, rows_of_x<Element>(block), tile.r0, rows, block.H,
                                 block.gated ? 2 : 1, weights.data(), ahead.data(), n, false);

  float bias[kGroups][kColumns];
  if (block.gated) load_bias<Element>(block.gate_bias, tile.expert, tile.c0, n, bias[0]);
  load_bias<Element>(block.up_bias, tile.expert, tile.c0, n, bias[1]);
  const int64_t per_block = kActivationBlock / kColumns;
  for (int64_t r0 = 0; r0 < rows; r0 += per_block) {
    const int64_t count = smaller(rows - r0, per_block);
    for (int64_t r = 0; r < count; r++) {
      const float* product = scratch.product + (r0 + r) * kLead;
      const float* up_product = product + (block.gated ? kColumns : 0);
      float* gate = scratch.gate + r * n;
      float* up = scratch.up + r * n;
      const int64_t row = tile.r0 + r0 + r;
      if (block.gated) {
        for (int64_t i = 0; i < n; i++) gate[i] = product[i] + bias[0][i];
        round_row<Element>(gate, n);
        if (block.h) store_half<Element>(block, row, gate_place(block), tile.c0, n, gate);
      }
      for (int64_t i = 0; i < n; i++) up[i] = up_product[i] + bias[1][i];
      round_row<Element>(up, n);
      if (block.h) store_half<Element>(block, row, up_place(block), tile.c0, n, up);
    }
    const Activation a = activate(block, scratch, false, count * n);
    for (int64_t r = 0; r < count; r++)
      narrow_row(a.value + r * n, elements<Element>(block.a) + (tile.r0 + r0 + r) * block.I + tile.c0, n);
  }
}

// The first row at or after `row` (and before `end`) whose token is at least `token`.
inline int64_t first_row(const int32_t* tokens, int64_t row, int64_t end, int64_t token) {
  while (row < end) {
    const int64_t middle = (row + end) / 2;
    if (tokens[middle] < token) {
      row = middle + 1;
    } else {
      end = middle;
    }
  }
  return row;
}

// Calls body(expert, first row, last row) for all rows of tokens [t0, t1), at most kRows at a time, in ascending order.
template <class Body>
void for_rows_of_tokens(const Block& block, int64_t t0, int64_t t1, Body body) {
  int64_t start = 0;
  for (int64_t e = 0; e < block.E; e++) {
    const int64_t end = block.offsets[e];
    const int64_t lo = first_row(block.token, start, end, t0), hi = first_row(block.token, lo, end, t1);
    const int64_t part = rows_per_tile(hi - lo);
    for (int64_t r = lo; r < hi; r += part) body(e, r, smaller(r + part, hi));
    start = end;
  }
}

// The next expert that has rows; `e` itself if there is none.
inline int64_t expert_after(const Block& block, int64_t e) {
  for (int64_t i = e + 1; i < block.E; i++)
    if (block.offsets[i] > block.offsets[e]) return i;
  return e;
}

inline void store_output(Dtype dtype, char* data, int64_t at, const float* src, int64_t n) {
  switch (dtype) {
    case Dtype::kFloat32:
      return narrow_row(src, elements<F32>(data) + at, n);
    case Dtype::kBfloat16:
      return narrow_row(src, elements<Bf16>(data) + at, n);
    case Dtype::kFloat16:
      return narrow_row(src, elements<F16>(data) + at, n);
  }
}

// y = sum over a token's rows of weight * (a @ down.T + bias) for tokens [r0, r1) and columns [c0, c1) of H: a token's
// rows in the order of their experts, which does not depend on other tokens.
template <class Isa, class Element>
void down_tile(const Block& block, Scratch& scratch, const Tile& tile) {
  const int64_t n = tile.c1 - tile.c0;
  const Rows<Element> a{elements<Element>(block.a), block.I};
  fill(scratch.sum, 0.0f, (tile.r1 - tile.r0) * n);
  for_rows_of_tokens(block, tile.r0, tile.r1, [&](int64_t e, int64_t lo, int64_t hi) {
    const Strided<Element> weight = columns_of<Element>(block.down[e], tile.c0);
    const Strided<Element> next = columns_of<Element>(block.down[expert_after(block, e)], tile.c0);
    multiply_weights<Isa, Element>(scratch, scratch.product, a, lo, hi - lo, block.I, 1, &weight, &next, n, false);
    float bias[kLead];
    load_bias<Element>(block.down_bias, e, tile.c0, n, bias);
    for (int64_t r = lo; r < hi; r++) {
      const float weight = block.weight_on_input ? 1.0f : block.weight[r];
      const float* product = scratch.product + (r - lo) * kLead;
      float* sum = scratch.sum + (block.token[r] - tile.r0) * n;
      for (int64_t i = 0; i < n; i++) sum[i] += weight * (product[i] + bias[i]);
    }
  });
  for (int64_t t = tile.r0; t < tile.r1; t++)
    store_output(block.out_dtype, block.y, t * block.H + tile.c0, scratch.sum + (t - tile.r0) * n, n);
}

// The sums of down_tile, to the bit, over products that experts elsewhere have computed.
inline void combine_tile(const Block& block, Scratch& scratch, const Tile& tile) {
  const int64_t n = tile.c1 - tile.c0;
  fill(scratch.sum, 0.0f, (tile.r1 - tile.r0) * n);
  for_rows_of_tokens(block, tile.r0, tile.r1, [&](int64_t, int64_t lo, int64_t hi) {
    for (int64_t r = lo; r < hi; r++) {
      const float weight = block.weight_on_input ? 1.0f : block.weight[r];
      const float* row = block.rows + r * block.H + tile.c0;
      float* sum = scratch.sum + (block.token[r] - tile.r0) * n;
      for (int64_t i = 0; i < n; i++) sum[i] += weight * row[i];
    }
  });
  for (int64_t t = tile.r0; t < tile.r1; t++)
    store_output(block.out_dtype, block.y, t * block.H + tile.c0, scratch.sum + (t - tile.r0) * n, n);
}

}  // namespace
}  // namespace mok
