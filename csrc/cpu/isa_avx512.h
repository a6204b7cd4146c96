// AVX-512: 6 x 64 outputs in registers. With AVX512_BF16 a lane is a pair of bfloat16 and one instruction adds both
// products; without it bfloat16 is widened when packed.
#pragma once

#include <type_traits>

#include "isa_avx2.h"

namespace mok {
namespace {

// row[i] holds 16 lanes of row i; afterwards 16 rows of lane i.
inline void transpose16(__m512i (&row)[16]) {
  __m512i t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // u[4g + j]: 128-bit block b holds rows 4g .. 4g+3 of lane 4b + j.
  for (int j = 0; j < 4; j++) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88),
                  d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
    row[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    row[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    row[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    row[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

template <bool kPairsOfBf16>
struct Avx512Base : Avx2 {
  template <class Element>
  static constexpr bool pairs = false;

  // 16 lanes from the first `n` of the elements at src.
  static __m512i lanes(const F32* src, int64_t n) { return _mm512_maskz_loadu_epi32(mask16(n), src); }
  static __m512i lanes(const F16* src, int64_t n) {
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask16(n), src)));
  }
  static __m512i lanes(const Bf16* src, int64_t n) {
    if constexpr (kPairsOfBf16) {
      return _mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, src);
    } else {
      return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask16(n), src)), 16);
    }
  }
  static __mmask16 mask16(int64_t n) { return n >= 16 ? 0xffff : (1 << n) - 1; }

  template <class Element>
  static __m512 multiply_add(__m512i left, __m512i right, __m512 sum) {
#if defined(__AVX512BF16__)
    if constexpr (kPairsOfBf16 && std::is_same_v<Element, Bf16>)
      return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
#endif
    return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
  }

  template <class Element, int kRowCount, int kVectors>
  static void rows(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t steps,
                   bool accumulate) {
    __m512 sum[kRowCount][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRowCount; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sum[r][v] = _mm512_setzero_ps();
    const Lane* l = left.data;
    const Lane* b = right;
    for (int64_t s = 0; s < steps; s++, l += left.step, b += w) {
      __m512i column[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) column[v] = _mm512_loadu_si512(b + v * 16);
#pragma GCC unroll 8
      for (int r = 0; r < kRowCount; r++) {
        const __m512i x = _mm512_set1_epi32(l[r * left.row]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) sum[r][v] = multiply_add<Element>(x, column[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRowCount; r++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        float* out = product + r * ld + v * 16;
        _mm512_storeu_ps(out, accumulate ? _mm512_add_ps(_mm512_loadu_ps(out), sum[r][v]) : sum[r][v]);
      }
  }

  template <class Element, int kVectors>
  static void columns(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t count, int64_t steps,
                      bool accumulate) {
    for (int64_t r = 0; r < count; r += 6) {
      const Left part{left.data + r * left.row, left.row, left.step};
      float* out = product + r * ld;
      switch (count - r) {
        case 1:
          rows<Element, 1, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
        case 2:
          rows<Element, 2, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
        case 3:
          rows<Element, 3, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
        case 4:
          rows<Element, 4, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
        case 5:
          rows<Element, 5, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
        default:
          rows<Element, 6, kVectors>(part, right, w, out, ld, steps, accumulate);
          break;
      }
    }
  }

  template <class Element>
  static void block(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t count, int64_t steps,
                    bool accumulate) {
    switch (w / 16) {
      case 1:
        columns<Element, 1>(left, right, w, product, ld, count, steps, accumulate);
        break;
      case 2:
        columns<Element, 2>(left, right, w, product, ld, count, steps, accumulate);
        break;
      case 3:
        columns<Element, 3>(left, right, w, product, ld, count, steps, accumulate);
        break;
      default:
        columns<Element, 4>(left, right, w, product, ld, count, steps, accumulate);
        break;
    }
  }

  // dst[c][s] = src[s][c] for multiples of 16 of both.
  static void transpose_lanes(Lane* dst, int64_t ld, const Lane* src, int64_t w, int64_t steps) {
    for (int64_t s = 0; s < steps; s += 16) {
      for (int64_t c = 0; c < w; c += 16) {
        __m512i row[16];
        for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(src + (s + i) * w + c);
        transpose16(row);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + (c + i) * ld + s, row[i]);
      }
    }
  }

  template <class Element>
  static void transpose(Lane* dst, int64_t w, const Element* src, int64_t stride, int64_t n, int64_t k, int64_t steps) {
    constexpr int64_t kPerLane = kPairsOfBf16 && std::is_same_v<Element, Bf16> ? 2 : 1;
    constexpr int64_t kAhead = 256 / sizeof(Element);
    for (int64_t c = 0; c < w; c += 16) {
      for (int64_t s = 0; s < steps; s += 16) {
        __m512i row[16];
        const int64_t k0 = s * kPerLane;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          const Element* from = src + (c + i) * stride + k0;
          row[i] = c + i < n && k0 < k ? lanes(from, k - k0) : _mm512_setzero_si512();
          if (c + i < n) _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        }
        transpose16(row);
        const int64_t count = steps - s < 16 ? steps - s : 16;
        if (count == 16) {
#pragma GCC unroll 16
          for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + (s + i) * w + c, row[i]);
        } else {
          for (int i = 0; i < count; i++) _mm512_storeu_si512(dst + (s + i) * w + c, row[i]);
        }
      }
    }
  }
};

using Avx512 = Avx512Base<false>;

struct Avx512Bf16 : Avx512Base<true> {
  template <class Element>
  static constexpr bool pairs = std::is_same_v<Element, Bf16>;
};

}  // namespace
}  // namespace mok
