// Products with a weight that lies contiguous along the steps, straight from memory: a register multiplies neighbouring
// steps of a row and of a column, and its lanes are added up at the end. Nothing is packed but the rows.
#pragma once

#include <type_traits>
#if defined(__unix__)
#include <unistd.h>
#endif

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

// Columns of a panel: the next one is asked for meanwhile. All of them side by side keep memory busy where there are
// few rows; with more, as many as stay in the first level of the cache.
constexpr int64_t kDotColumns = 8;
constexpr int64_t kFewRows = 8;

// product[r][c] (+)= <packed row r, column[c]> over k numbers. The same places of kAsk columns from `ask` on, which lie
// `gap` apart, are asked for.
template <class Isa, int kR, int kC, int kAsk, class Element>
void dots(const Element* const* column, const Element* ask, int64_t gap, int64_t k, const Lane* rows, int64_t lead,
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
      typename Isa::Lanes weight = load(column[c] + at);
      // Only where memory is waited for do operands in memory pay: fewer instructions, so the processor looks further.
      if constexpr (kR > 2 && kAsk < kC) weight = Isa::held(weight);
#pragma GCC unroll 4
      for (int r = 0; r < kR; r++) sum[r][c] = Isa::template multiply_add<Element>(row[r], weight, sum[r][c]);
    }
  };
  int64_t at = 0;
  for (; at + kWhole <= k; at += kWhole) {
#pragma GCC unroll 8
    for (int i = 0; i < kAsk; i++) __builtin_prefetch(ask + i * gap + at, 0, 2);
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

// Whether the first level of the cache keeps kDotColumns columns, of as many steps as are multiplied at a time, while
// rows pass by. Only speed depends on it.
inline bool keeps_panel() {
#if defined(MOK_FIRST_LEVEL)  // for tests
  static const int64_t size = MOK_FIRST_LEVEL;
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
  static const int64_t size = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#else
  static const int64_t size = 0;
#endif
  return kDotColumns * 2 * kSteps * static_cast<int64_t>(sizeof(Lane)) <= size * 3 / 4;
}

template <int kN>
using Number = std::integral_constant<int, kN>;

// product[r][c] (+)= <row r, column c> for n <= kDotColumns columns and `count` packed rows. Writes whole fours of
// columns. `ahead` says where the next columns lie.
template <class Isa, class Element>
void stream_dots(const Element* weight, int64_t stride, int64_t n, int64_t k, const Lane* rows, int64_t count,
                 float* product, int64_t ld, bool accumulate, const Ahead& ahead) {
  const int64_t lead = Isa::template lanes_streamed<Element>(streamed_steps(k, Isa::template kPerLane<Element>));
  // Columns that are not there are the last one once more.
  const Element* column[kDotColumns];
  for (int64_t c = 0; c < kDotColumns; c++) column[c] = weight + (c < n ? c : n - 1) * stride;
  const Element* next = ahead.rows ? reinterpret_cast<const Element*>(ahead.row) : weight;
  const int64_t gap = ahead.rows ? ahead.stride / static_cast<int64_t>(sizeof(Element)) : 0;
  const auto go = [&](auto some, auto wide, auto asks, int64_t r, int64_t c, int64_t asked) {
    dots<Isa, some.value, wide.value, asks.value>(column + c, next + asked * gap, gap, k, rows + r * lead, lead,
                                                  product + r * ld + c, ld, accumulate);
  };
  // Columns c .. c + width, kMost rows at a time.
  const auto columns = [&](auto width, auto most, int64_t c) {
    constexpr int kWidth = width.value, kMost = most.value;
    int64_t tiles = count / kMost, left = count % kMost;
    // One row by itself is the slowest: rather two and two.
    const bool pairs = kMost == 3 && left == 1 && tiles > 0;
    if (pairs) tiles--;
    // The more tiles there are, the fewer columns each asks for: memory answers evenly.
    int64_t each = kWidth, asked = 0;
    while (each > 1 && tiles * each >= 2 * kWidth) each /= 2;
    for (int64_t i = 0; i < tiles; i++, asked += each) {
      const auto tile = [&](auto asks) { go(most, width, asks, i * kMost, c, c + asked); };
      if (asked >= kWidth) {
        tile(Number<0>());
      } else if (each == 1) {
        tile(Number<1>());
      } else if (each == 2) {
        tile(Number<2>());
      } else if (each == 4) {
        tile(Number<4>());
      } else {
        tile(Number<kWidth>());
      }
    }
    const auto rest = [&](auto some, int64_t r) {
      r == 0 ? go(some, width, width, r, c, c) : go(some, width, Number<0>(), r, c, c);
    };
    const int64_t r = tiles * kMost;
    if (pairs && r == 0) {
      using Half = Number<kWidth / 2>;
      go(Number<2>(), width, Half(), 0, c, c);
      go(Number<2>(), width, Half(), 2, c, c + kWidth / 2);
    } else if (pairs) {
      rest(Number<2>(), r);
      rest(Number<2>(), r + 2);
    } else if (left == 1) {
      rest(Number<1>(), r);
    } else if (left == 2) {
      rest(Number<2>(), r);
    } else if (left == 3) {
      if constexpr (kMost > 3) rest(Number<3>(), r);
    }
  };
  using Wide = Number<kDotColumns>;
  constexpr int kWideRows = Isa::template kWideRows<Element>;
  if (n > 4) {
    if (count == 1) return go(Number<1>(), Wide(), Wide(), 0, 0, 0);
    if constexpr (kWideRows > 1)
      if (count == 2) return go(Number<2>(), Wide(), Wide(), 0, 0, 0);
    if constexpr (kWideRows > 2)
      if (count <= kFewRows || keeps_panel()) return columns(Wide(), Number<kWideRows>(), 0);
  }
  for (int64_t c = 0; c < n; c += 4) columns(Number<4>(), Number<Isa::kRowsAtOnce>(), c);
}

}  // namespace
}  // namespace mok
