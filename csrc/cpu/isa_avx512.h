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
  static constexpr int64_t kPerLane = kPairsOfBf16 && std::is_same_v<Element, Bf16> ? 2 : 1;

  template <class Element>
  static constexpr bool kLanesInMemory = kPerLane<Element> == 2 || std::is_same_v<Element, F32>;

  // 16 lanes from the elements at src.
  static __m512i lanes(const F32* src) { return _mm512_loadu_si512(src); }
  static __m512i lanes(const F16* src) {
    return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src))));
  }
  static __m512i lanes(const Bf16* src) {
    if constexpr (kPairsOfBf16) return _mm512_loadu_si512(src);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src))), 16);
  }

  // The same from the first `n` elements; zeros after them.
  template <class Element>
  static __m512i lanes(const Element* src, int64_t n) {
    Element whole[16 * kPerLane<Element>] = {};
    if (n > 0) std::memcpy(whole, src, (n < 16 * kPerLane<Element> ? n : 16 * kPerLane<Element>)*sizeof(Element));
    return lanes(whole);
  }

  template <class Element>
  static __m512 multiply_add(__m512i left, __m512i right, __m512 sum) {
#if defined(__AVX512BF16__)
    if constexpr (kPairsOfBf16 && std::is_same_v<Element, Bf16>)
      return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
#endif
    return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sum);
  }

  static void leave() { _mm_sfence(); }  // after `write`

  // Whole cache lines past the cache: else the processor reads each from memory before it overwrites it.
  template <class Element>
  static void write(const float* src, Element* dst, int64_t n) {
    constexpr int64_t kLine = 64 / sizeof(Element);
    if (reinterpret_cast<uintptr_t>(dst) % 64 || n % kLine) return narrow_row(src, dst, n);
    for (int64_t i = 0; i < n; i += kLine) {
      alignas(64) char line[64];
      narrow_row(src + i, reinterpret_cast<Element*>(line), kLine);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_load_si512(line));
    }
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
    Ahead ahead = left.ahead ? *left.ahead : Ahead();
    for (int64_t s = 0; s < steps; s++, l += left.step, b += w) {
      ahead.ask();
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
    if (left.ahead) *left.ahead = ahead;
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
      const Left part{left.data + r * left.row, left.row, left.step, left.ahead};
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
  static void transpose_lanes(Lane* dst, int64_t dst_ld, const Lane* src, int64_t src_ld, int64_t w, int64_t steps) {
    for (int64_t s = 0; s < steps; s += 16) {
      for (int64_t c = 0; c < w; c += 16) {
        __m512i row[16];
        for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(src + (s + i) * src_ld + c);
        transpose16(row);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(dst + (c + i) * dst_ld + s, row[i]);
      }
    }
  }

  using Lanes = __m512i;
  using Sums = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRowsAtOnce = 4;
  template <class Element>
  static constexpr int kWideRows = kLanesInMemory<Element> ? 3 : 2;  // widening a column costs more, the fewer the rows

  static Lanes packed_lanes(const Lane* src) { return _mm512_loadu_si512(src); }
  static Sums no_sums() { return _mm512_setzero_ps(); }

  // In a register: the compiler would else read memory again for each product, more than the processor can.
  static Lanes held(Lanes lanes) {
    asm("" : "+v"(lanes));
    return lanes;
  }

  // The sums of each one's lanes.
  static __m128 add_across(__m512 a, __m512 b, __m512 c, __m512 d) {
    const auto halves = [](__m512 v, __m512 w) {
      return _mm512_add_ps(_mm512_unpacklo_ps(v, w), _mm512_unpackhi_ps(v, w));
    };
    const __m512d v = _mm512_castps_pd(halves(a, b)), w = _mm512_castps_pd(halves(c, d));
    const __m512 sum =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(v, w)), _mm512_castpd_ps(_mm512_unpackhi_pd(v, w)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
};

using Avx512 = Avx512Base<false>;

struct Avx512Bf16 : Avx512Base<true> {
  // to[i] = first[i] | second[i] << 16 for i < n.
  static void interleave(Lane* to, const Bf16* first, const Bf16* second, int64_t n) {
    // Unpacking works within quarters of a register: afterwards eight bytes of the one and the other take turns.
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      const __m512i a = _mm512_loadu_si512(first + i), b = _mm512_loadu_si512(second + i);
      const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
      _mm512_storeu_si512(to + i, _mm512_permutex2var_epi64(even, low, odd));
      _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi64(even, high, odd));
    }
    for (; i < n; i++) to[i] = first[i].bits | uint32_t{second[i].bits} << 16;
  }
};

}  // namespace
}  // namespace mok
