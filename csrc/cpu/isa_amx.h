// AMX: bfloat16 in tile registers, 32 x 32 outputs at a time; the other dtypes as with AVX-512.
#pragma once

#include "isa_avx512.h"
#include "tile_registers.h"

namespace mok {
namespace {

struct Amx : Avx512Bf16 {
  static constexpr int64_t kStepMultiple = 16;
  static constexpr int64_t kRowMultiple = 16;
  template <class Element>
  static constexpr bool kInTiles = kPerLane<Element> == 2;
  // The weights are left operands of the transposed product, for which tile registers take rows as they lie in memory.
  template <class Element>
  static constexpr int64_t kPanel = kInTiles<Element> ? 32 : Avx512Bf16::kPanel<Element>;
  template <class Element>
  static constexpr int64_t kStreamedSteps = kInTiles<Element> ? kRight / 16 : Avx512Bf16::kStreamedSteps<Element>;

  template <class Element>
  static constexpr int64_t lanes_streamed(int64_t steps) {
    return kInTiles<Element> ? steps : Avx512Bf16::lanes_streamed<Element>(steps);
  }

  static void enter() { tiles_configure(); }
  static void leave() {
    tiles_release();
    Avx512Bf16::leave();
  }

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

  // A tile of a weight that is not whole: n <= 16 rows and `bytes` <= 64 of each, zeros around.
  template <int kTile>
  static void load_part(const Bf16* src, int64_t stride, int64_t n, int64_t bytes) {
    alignas(64) char whole[16][64] = {};
    for (int64_t i = 0; i < n; i++) std::memcpy(whole[i], src + i * stride, bytes);
    tile_load<kTile>(whole, 64);
  }

  // The transpose of tile kTile to product.
  template <int kTile>
  static void store_transposed(float* product, int64_t ld, bool accumulate) {
    alignas(64) float tile[16][16];
    tile_store<kTile>(tile, 64);
    __m512i row[16];
    for (int i = 0; i < 16; i++) row[i] = _mm512_load_si512(tile[i]);
    transpose16(row);
    for (int i = 0; i < 16; i++) {
      float* out = product + i * ld;
      const __m512 sum = _mm512_castsi512_ps(row[i]);
      _mm512_storeu_ps(out, accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sum) : sum);
    }
  }

  // Of 16 kW rows of a weight (n are there) and 16 kR packed rows.
  template <int kW, int kR, bool kWhole>
  static void stream_tiles(const Bf16* weight, int64_t stride, int64_t n, int64_t k, const Lane* rows, int64_t rows_ld,
                           float* product, int64_t ld, bool accumulate, Ahead& ahead, int64_t asks) {
    tile_zero<0>();
    if constexpr (kR > 1) tile_zero<1>();
    if constexpr (kW > 1) tile_zero<2>();
    if constexpr (kW > 1 && kR > 1) tile_zero<3>();
    const int64_t whole = kWhole ? k / 32 * 32 : 0;
    const auto multiply = [&](int64_t s) {
      tile_load<6>(rows + s * 8, 64);
      tile_multiply_add<0, 4, 6>();
      if constexpr (kW > 1) tile_multiply_add<2, 5, 6>();
      if constexpr (kR > 1) {
        tile_load<7>(rows + rows_ld + s * 8, 64);
        tile_multiply_add<1, 4, 7>();
        if constexpr (kW > 1) tile_multiply_add<3, 5, 7>();
      }
    };
    for (int64_t s = 0; s < whole; s += 32) {
      tile_load<4>(weight + s, stride * 2);
      if constexpr (kW > 1) tile_load<5>(weight + 16 * stride + s, stride * 2);
      for (int64_t i = 0; i < asks; i++) ahead.ask();
      multiply(s);
    }
    for (int64_t s = whole; s < k; s += 32) {
      const int64_t bytes = (k - s < 32 ? k - s : 32) * 2;
      load_part<4>(weight + s, stride, n < 16 ? n : 16, bytes);
      if constexpr (kW > 1) load_part<5>(weight + 16 * stride + s, stride, n - 16, bytes);
      multiply(s);
    }
    store_transposed<0>(product, ld, accumulate);
    if constexpr (kR > 1) store_transposed<1>(product + 16 * ld, ld, accumulate);
    if constexpr (kW > 1) store_transposed<2>(product + 16, ld, accumulate);
    if constexpr (kW > 1 && kR > 1) store_transposed<3>(product + 16 * ld + 16, ld, accumulate);
  }

  // product[r][c] (+)= <row r, row c of the weight> for n <= 32 rows of a weight and `count` packed rows.
  static void stream(const Bf16* weight, int64_t stride, int64_t n, int64_t k, const Lane* rows, int64_t count,
                     float* product, int64_t ld, bool accumulate, Ahead ahead) {
    const int64_t rows_ld = (k + 31) / 32 * 256;
    // The lines of the next panel, spread over the steps of this one.
    const int64_t passes = (count + 31) / 32, asks = (32 + passes - 1) / passes;
    for (int64_t r = 0; r < count; r += 32, rows += 2 * rows_ld, product += 32 * ld) {
      const auto go = [&](auto tall, auto wide, auto whole) {
        stream_tiles<tall.value, wide.value, whole.value>(weight, stride, n, k, rows, rows_ld, product, ld, accumulate,
                                                          ahead, asks);
      };
      using One = std::integral_constant<int, 1>;
      using Two = std::integral_constant<int, 2>;
      const auto with_rows = [&](auto tall, auto whole) {
        count - r > 16 ? go(tall, Two(), whole) : go(tall, One(), whole);
      };
      if (n == 32) {
        with_rows(Two(), std::true_type());
      } else if (n == 16) {
        with_rows(One(), std::true_type());
      } else if (n > 16) {
        with_rows(Two(), std::false_type());
      } else {
        with_rows(One(), std::false_type());
      }
    }
  }

  template <class Element>
  static void block(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t count, int64_t steps,
                    bool accumulate) {
    if constexpr (!kInTiles<Element>) {
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
