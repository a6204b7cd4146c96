// AMX: bfloat16 in tile registers, 32 x 32 outputs at a time; the other dtypes as with AVX-512.
#pragma once

#include "isa_avx512.h"
#include "tile_registers.h"

namespace mok {
namespace {

struct Amx : Avx512Bf16 {
  static constexpr int64_t kStepMultiple = 16;
  static constexpr int64_t kRowMultiple = 16;
  static constexpr bool kLeftByRows = true;
  static constexpr int64_t kDirectRows = 0;  // its sums would not be those of the tile registers

  static void enter() { tiles_configure(); }
  static void leave() { tiles_release(); }

  // Products of kM x kN tiles; `left` and `product` have whole tiles, so rows that do not exist cost time but no case.
  template <int kM, int kN>
  static void tiles(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t steps,
                    bool accumulate) {
    const int64_t ld_bytes = ld * 4, w_bytes = w * 4, row_bytes = left.row * 4;
    if (accumulate) {
      tile_load<0>(product, ld_bytes);
      if constexpr (kN > 1) tile_load<1>(product + 16, ld_bytes);
      if constexpr (kM > 1) tile_load<2>(product + 16 * ld, ld_bytes);
      if constexpr (kM > 1 && kN > 1) tile_load<3>(product + 16 * ld + 16, ld_bytes);
    } else {
      tile_zero<0>();
      if constexpr (kN > 1) tile_zero<1>();
      if constexpr (kM > 1) tile_zero<2>();
      if constexpr (kM > 1 && kN > 1) tile_zero<3>();
    }
    for (int64_t s = 0; s < steps; s += 16) {
      tile_load<4>(left.data + s, row_bytes);
      tile_load<6>(right + s * w, w_bytes);
      tile_multiply_add<0, 4, 6>();
      if constexpr (kM > 1) {
        tile_load<5>(left.data + 16 * left.row + s, row_bytes);
        tile_multiply_add<2, 5, 6>();
      }
      if constexpr (kN > 1) {
        tile_load<7>(right + s * w + 16, w_bytes);
        tile_multiply_add<1, 4, 7>();
        if constexpr (kM > 1) tile_multiply_add<3, 5, 7>();
      }
    }
    tile_store<0>(product, ld_bytes);
    if constexpr (kN > 1) tile_store<1>(product + 16, ld_bytes);
    if constexpr (kM > 1) tile_store<2>(product + 16 * ld, ld_bytes);
    if constexpr (kM > 1 && kN > 1) tile_store<3>(product + 16 * ld + 16, ld_bytes);
  }

  template <class Element>
  static void block(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t count, int64_t steps,
                    bool accumulate) {
    if constexpr (!pairs<Element>) {
      Avx512Bf16::block<Element>(left, right, w, product, ld, count, steps, accumulate);
      return;
    }
    for (int64_t r = 0; r < count; r += 32) {
      const Left part{left.data + r * left.row, left.row, left.step};
      for (int64_t c = 0; c < w; c += 32) {
        float* out = product + r * ld + c;
        const bool tall = count - r > 16, wide = w - c > 16;
        if (tall && wide) tiles<2, 2>(part, right + c, w, out, ld, steps, accumulate);
        if (tall && !wide) tiles<2, 1>(part, right + c, w, out, ld, steps, accumulate);
        if (!tall && wide) tiles<1, 2>(part, right + c, w, out, ld, steps, accumulate);
        if (!tall && !wide) tiles<1, 1>(part, right + c, w, out, ld, steps, accumulate);
      }
    }
  }
};

}  // namespace
}  // namespace mok
