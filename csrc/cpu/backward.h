// The backward pass, tile by tile. With out = a @ down.T and y = sum of weight * out, the gradient of a routing weight
// is <dy, out> = <dy @ down, a>: the product that the gradient of a needs anyway.
#pragma once

#include "forward.h"

namespace mok {
namespace {

// <a, b>: sixteen partial sums, added in a fixed order.
inline float dot(const float* a, const float* b, int64_t n) {
  float sum[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int64_t j = 0; j < 16; j++) sum[j] += a[i + j] * b[i + j];
  for (int64_t j = 0; i < n; i++, j++) sum[j] += a[i] * b[i];
  for (int64_t width = 8; width > 0; width /= 2)
    for (int64_t j = 0; j < width; j++) sum[j] += sum[j + width];
  return sum[0];
}

// <a, b> of each kColumns columns of a tile, into the row's places of block.partial.
inline void partial_dots(const Block& block, const float* a, const float* b, int64_t row, const Tile& tile) {
  const int64_t S = block.T * block.K;
  for (int64_t c = tile.c0; c < tile.c1; c += kColumns, a += kColumns, b += kColumns)
    block.partial[c / kColumns * S + row] = dot(a, b, smaller(tile.c1 - c, kColumns));
}

template <class Element>
Rows<Element> rows_of_dy(const Block& block) {
  return {elements<Element>(block.dy), block.H, block.token};
}

// dh (gate columns first), a times its routing weight, and this tile's part of the routing weights' gradients, for rows
// [r0, r1) of an expert and columns [c0, c1) of I.
template <class Isa, class Element>
void dact_tile(const Block& block, Scratch& scratch, const Tile& tile, const Tile& next) {
  const int64_t rows = tile.r1 - tile.r0, n = tile.c1 - tile.c0, width = h_columns(block);
  const Strided<Element> down = transposed_columns_of<Element>(block.down[tile.expert], tile.c0);
  const Strided<Element> ahead = transposed_columns_of<Element>(block.down[next.expert], next.c0);
  multiply_weights<Isa, Element>(scratch, scratch.product, rows_of_dy<Element>(block), tile.r0, rows, block.H, 1, &down,
                                 &ahead, n, false);

  const int64_t per_block = kActivationBlock / n;
  for (int64_t r0 = 0; r0 < rows; r0 += per_block) {
    const int64_t count = smaller(rows - r0, per_block);
    for (int64_t r = 0; r < count; r++) {
      const int64_t row = tile.r0 + r0 + r;
      if (block.gated) load_half<Element>(block, row, gate_place(block), tile.c0, n, scratch.gate + r * n);
      load_half<Element>(block, row, up_place(block), tile.c0, n, scratch.up + r * n);
    }
    const Activation act = activate(block, scratch, true, count * n);
    for (int64_t r = 0; r < count; r++) {
      const int64_t row = tile.r0 + r0 + r;
      float* da = scratch.product + (r0 + r) * kLead;
      const float* a = act.value + r * n;
      const float weight = block.weight_on_input ? 1.0f : block.weight[row];
      if (block.partial && !block.weight_on_input) partial_dots(block, da, a, row, tile);
      for (int64_t i = 0; i < n; i++) da[i] *= weight;
      if (block.dh) {
        Element* dh = elements<Element>(block.dh) + row * width + tile.c0;
        float* out = scratch.row[0];
        for (int half = block.gated ? 0 : 1; half < 2; half++) {
          const float* d = half == 0 ? act.dgate : act.dup;
          for (int64_t i = 0; i < n; i++) out[i] = d ? da[i] * d[r * n + i] : 0.0f;
          narrow_row(out, dh + (half == 1 && block.gated ? block.I : 0), n);
        }
      }
      if (block.a) {
        float* out = scratch.row[0];
        for (int64_t i = 0; i < n; i++) out[i] = a[i] * weight;
        narrow_row(out, elements<Element>(block.a) + row * block.I + tile.c0, n);
      }
    }
  }
}

// dx = sum over a token's rows of dh @ up, for tokens [r0, r1) and columns [c0, c1) of H; with the routing weight on
// the input also its gradient <dh @ up, x>. Few steps at a time leave room for many columns: rows of `up` are far
// apart, and each piece costs a look-up of its page.
template <class Isa, class Element>
void dinput_tile(const Block& block, Scratch& scratch, const Tile& tile) {
  const int64_t n = tile.c1 - tile.c0;
  fill(scratch.sum, 0.0f, (tile.r1 - tile.r0) * n);
  for_rows_of_tokens(block, tile.r0, tile.r1, [&](int64_t e, int64_t lo, int64_t hi) {
    for (int half = block.gated ? 0 : 1; half < 2; half++) {
      const int64_t start = half == 1 && block.gated ? block.I : 0;
      const Rows<Element> dh{elements<Element>(block.dh) + start, h_columns(block)};
      const Strided<Element> weight = transposed_columns_of<Element>(half == 0 ? block.gate[e] : block.up[e], tile.c0);
      multiply_weights<Isa, Element>(scratch, scratch.product, dh, lo, hi - lo, block.I, 1, &weight, nullptr, n,
                                     start > 0, kSteps / 2);
    }
    for (int64_t r = lo; r < hi; r++) {
      const float* product = scratch.product + (r - lo) * kLead;
      const int64_t t = block.token[r];
      if (block.partial && block.weight_on_input) {
        widen_row(elements<Element>(block.x) + t * block.H + tile.c0, scratch.row[0], n);
        partial_dots(block, product, scratch.row[0], r, tile);
      }
      if (!block.dx) continue;
      const float weight = block.weight_on_input ? block.weight[r] : 1.0f;
      float* sum = scratch.sum + (t - tile.r0) * n;
      for (int64_t i = 0; i < n; i++) sum[i] += weight * product[i];
    }
  });
  if (!block.dx) return;
  for (int64_t t = tile.r0; t < tile.r1; t++)
    narrow_row(scratch.sum + (t - tile.r0) * n, elements<Element>(block.dx) + t * block.H + tile.c0, n);
}

// Gradient of one expert's matrix: the sum over its rows of left[row] outer right[row], rows ascending. The tile is a
// part of the gradient, or of its transpose (see is_transposed).
template <class Isa, class Element>
void dmatrix_tile(const Block& block, Scratch& scratch, const Tile& tile, Weight which) {
  using Pack = Packing<Isa, Element>;
  const bool is_down = which == Weight::kDown;
  Matrix grad = (is_down ? block.ddown : which == Weight::kGate ? block.dgate : block.dup)[tile.expert];
  const int64_t up_start = which == Weight::kUp && block.gated ? block.I : 0;
  Rows<Element> left{elements<Element>(block.dh) + up_start, h_columns(block)}, right = rows_of_x<Element>(block);
  if (is_down) {
    left = rows_of_dy<Element>(block);
    right = {elements<Element>(block.a), block.I};
  }
  if (is_transposed(grad)) {
    const Rows<Element> other = left;
    left = right;
    right = other;
    grad = {grad.data, grad.column, grad.row};
  }
  const int64_t first = tile.expert ? block.offsets[tile.expert - 1] : 0, k = block.offsets[tile.expert] - first;
  const int64_t rows = tile.r1 - tile.r0, columns = tile.c1 - tile.c0;
  Element* out = elements<Element>(grad.data) + tile.r0 * grad.row + tile.c0 * grad.column;
  // Row r and column c of the tile, n columns.
  const auto store = [&](const float* product, int64_t r, int64_t c, int64_t n) {
    Element* to = out + r * grad.row + c * grad.column;
    if (grad.column == 1) return block.past_cache ? Isa::write(product, to, n) : narrow_row(product, to, n);
    for (int64_t i = 0; i < n; i++) to[i * grad.column] = narrow<Element>(product[i]);
  };
  constexpr int64_t kBlock = kSteps * Pack::kPerLane;
  // With one block of steps, numbers are stored right after they are computed.
  const bool once = k <= kBlock;
  const int64_t lead = once ? kColumns : kLead;
  if (k == 0) fill(scratch.product, 0.0f, kColumns);
  for (int64_t k0 = 0; k0 == 0 || k0 < k; k0 += kBlock) {
    const int64_t part = smaller(k - k0, kBlock), steps = Pack::steps(part);
    scratch.packed = {};
    Pack::across(scratch, scratch.right, right, first + k0, part, tile.c0, columns);
    for (int64_t r0 = 0; r0 < rows; r0 += kRowsPacked) {
      const int64_t count = smaller(rows - r0, kRowsPacked);
      const Left packed = Pack::across_left(scratch, left, first + k0, part, tile.r0 + r0, count);
      for (int64_t c = 0; c < columns; c += kColumns) {
        const int64_t n = smaller(columns - c, kColumns);
        float* product = scratch.product + (once ? 0 : r0 * lead + c);
        if (k > 0)
          Isa::template block<Element>(packed, scratch.right + c * steps, round_up(n, 16), product, lead, count, steps,
                                       k0 > 0);
        if (k0 + part < k) continue;
        for (int64_t r = 0; r < count; r++) store(product + (k > 0 ? r * lead : 0), r0 + r, c, n);
      }
    }
  }
}

// Gradient of one expert's bias, columns [c0, c1): the sum of its rows, ascending.
template <class Element>
void dbias_tile(const Block& block, Scratch& scratch, const Tile& tile, Weight which) {
  const bool is_down = which == Weight::kDown;
  const Vector& grad = (is_down                  ? block.ddown_bias
                        : which == Weight::kGate ? block.dgate_bias
                                                 : block.dup_bias)[tile.expert];
  const int64_t n = tile.c1 - tile.c0, up_start = which == Weight::kUp && block.gated ? block.I : 0;
  Rows<Element> rows{elements<Element>(block.dh) + up_start, h_columns(block)};
  if (is_down) rows = rows_of_dy<Element>(block);
  const bool weighted = is_down && !block.weight_on_input;
  float sum[kColumns] = {};
  for (int64_t r = tile.r0; r < tile.r1; r++) {
    float* row = scratch.row[0];
    widen_row(rows[r] + tile.c0, row, n);
    if (weighted) {
      for (int64_t i = 0; i < n; i++) row[i] *= block.weight[r];
      round_row<Element>(row, n);
    }
    for (int64_t i = 0; i < n; i++) sum[i] += row[i];
  }
  for (int64_t i = 0; i < n; i++) elements<Element>(grad.data)[(tile.c0 + i) * grad.stride] = narrow<Element>(sum[i]);
}

// Gradients of the routing weights of rows [r0, r1) of an expert from their parts, in the order of the tiles.
template <class Element>
void dweight_tile(const Block& block, Scratch& scratch, const Tile& tile, int64_t tiles) {
  const int64_t S = block.T * block.K;
  const bool with_bias = block.down_bias && !block.weight_on_input;
  for (int64_t r = tile.r0; r < tile.r1; r++) {
    float sum = 0.0f;
    for (int64_t t = 0; t < tiles; t++) sum += block.partial[t * S + r];
    for (int64_t c0 = 0; with_bias && c0 < block.H; c0 += 2 * kSteps) {
      const int64_t n = smaller(block.H - c0, 2 * kSteps);
      load_bias<Element>(block.down_bias, tile.expert, c0, n, scratch.row[0]);
      widen_row(rows_of_dy<Element>(block)[r] + c0, scratch.row[1], n);
      sum += dot(scratch.row[0], scratch.row[1], n);
    }
    block.dweight[block.order[r]] = sum;
  }
}

}  // namespace
}  // namespace mok
