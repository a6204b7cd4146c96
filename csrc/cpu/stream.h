// Products with a weight that lies contiguous along the steps, straight from memory: a register multiplies neighbouring
// steps of a row and of a column, and its lanes are added up at the end. Nothing is packed but the rows.
#pragma once

#include <type_traits>

#include "convert.h"

namespace mok {
namespace {

// Memory that the next product will read: `rows` pieces of `bytes` bytes. An inner loop asks for it line by line while
// it computes, so that packing does not wait for it. A hint: nothing depends on it, and it may be anywhere.
struct Ahead {
  uintptr_t row = 0;
  int64_t stride = 0, bytes = 0, rows = 0;
  int64_t at = 0;

  MOK_INLINE void ask() {
    if (rows == 0) return;
    __builtin_prefetch(reinterpret_cast<const char*>(row + at), 0, 2);
    at += 64;
    if (at < bytes) return;
    at = 0;
    row += stride;
    rows--;
  }
};

// Lanes along k numbers where weights are streamed: whole vectors of every instruction set.
constexpr int64_t streamed_steps(int64_t k, int64_t per_lane) { return ((k + per_lane - 1) / per_lane + 15) / 16 * 16; }

using Quad = float __attribute__((vector_size(16)));

// Columns at a time. For few rows all of them go side by side, which keeps memory busy; for many, four of them stay in
// the first level of the cache for all rows.
constexpr int64_t kDotColumns = 8;

// product[r][c] (+)= <packed row r, column c> over k numbers; with kAsk the same places of `next` are asked for.
template <class Isa, int kR, int kC, bool kAsk, class Element>
void dots(const Element* const* column, const Element* const* next, int64_t k, const Lane* rows, int64_t lead,
          float* product, int64_t ld, bool accumulate) {
  constexpr int64_t kPerLane = Isa::template kPerLane<Element>, kWhole = Isa::kLanes * kPerLane;
  typename Isa::Sums sum[kR][kC];
#pragma GCC unroll 4
  for (int r = 0; r < kR; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kC; c++) sum[r][c] = Isa::no_sums();
  const auto step = [&](int64_t at, auto load) {
    typename Isa::Lanes row[kR];
#pragma GCC unroll 4
    for (int r = 0; r < kR; r++) row[r] = Isa::packed_lanes(rows + r * lead + at / kPerLane);
#pragma GCC unroll 8
    for (int c = 0; c < kC; c++) {
      const typename Isa::Lanes weight = load(column[c] + at);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) sum[r][c] = Isa::template multiply_add<Element>(row[r], weight, sum[r][c]);
    }
  };
  int64_t at = 0;
  for (; at + kWhole <= k; at += kWhole) {
    if constexpr (kAsk) {
#pragma GCC unroll 8
      for (int c = 0; c < kC; c++) __builtin_prefetch(next[c] + at, 0, 2);
    }
    step(at, [](const Element* src) { return Isa::lanes(src); });
  }
  if (at < k) step(at, [&](const Element* src) { return Isa::lanes(src, k - at); });
#pragma GCC unroll 4
  for (int r = 0; r < kR; r++)
#pragma GCC unroll 2
    for (int c = 0; c < kC; c += 4) {
      float* out = product + r * ld + c;
      Quad total = Isa::add_across(sum[r][c], sum[r][c + 1], sum[r][c + 2], sum[r][c + 3]);
      if (accumulate) {
        Quad before;
        std::memcpy(&before, out, sizeof(before));
        total = before + total;
      }
      std::memcpy(out, &total, sizeof(total));
    }
}

// product[r][c] (+)= <row r, column c> for n <= kDotColumns columns and `count` packed rows. Writes whole fours of
// columns. `ahead` says where the next columns lie.
template <class Isa, class Element>
void stream_dots(const Element* weight, int64_t stride, int64_t n, int64_t k, const Lane* rows, int64_t count,
                 float* product, int64_t ld, bool accumulate, const Ahead& ahead) {
  const int64_t lead = Isa::template lanes_streamed<Element>(streamed_steps(k, Isa::template kPerLane<Element>));
  // Columns that are not there are the last one once more.
  const Element *column[kDotColumns], *next[kDotColumns];
  for (int64_t c = 0; c < kDotColumns; c++) {
    column[c] = weight + (c < n ? c : n - 1) * stride;
    next[c] = ahead.rows ? reinterpret_cast<const Element*>(ahead.row + c * ahead.stride) : column[c];
  }
  const auto go = [&](auto some, auto wide, int64_t r, int64_t c) {
    const auto ask = [&](auto asks) {
      dots<Isa, some.value, wide.value, asks.value>(column + c, next + c, k, rows + r * lead, lead,
                                                    product + r * ld + c, ld, accumulate);
    };
    r == 0 ? ask(std::true_type()) : ask(std::false_type());
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Three = std::integral_constant<int, 3>;
  using Four = std::integral_constant<int, 4>;
  using All = std::integral_constant<int, kDotColumns>;
  if (n > 4 && count == 1) return go(One(), All(), 0, 0);
  if constexpr (Isa::kFewRows > 1)
    if (n > 4 && count == 2) return go(Two(), All(), 0, 0);
  for (int64_t c = 0; c < n; c += 4) {
    int64_t r = 0;
    for (; r + Isa::kRowsAtOnce <= count; r += Isa::kRowsAtOnce)
      go(std::integral_constant<int, Isa::kRowsAtOnce>(), Four(), r, c);
    if (count - r == 1) go(One(), Four(), r, c);
    if (count - r == 2) go(Two(), Four(), r, c);
    if constexpr (Isa::kRowsAtOnce > 3)
      if (count - r == 3) go(Three(), Four(), r, c);
  }
}

}  // namespace
}  // namespace mok
