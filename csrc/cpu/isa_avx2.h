// AVX2 with FMA: 6 x 16 outputs in registers. All dtypes are widened to float when packed.
#pragma once

#include <immintrin.h>

#include "isa_scalar.h"

namespace mok {
namespace {

inline __m256 load8(const F32* src) {
  return _mm256_loadu_ps(static_cast<const float*>(static_cast<const void*>(src)));
}
inline __m256 load8(const Bf16* src) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline __m256 load8(const F16* src) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))); }

struct Avx2 : Scalar {
  using Lanes = __m256;
  using Sums = __m256;
  static constexpr int kLanes = 8;

  static Lanes packed_lanes(const Lane* src) { return _mm256_loadu_ps(reinterpret_cast<const float*>(src)); }
  static Sums no_sums() { return _mm256_setzero_ps(); }
  static Lanes held(Lanes lanes) { return lanes; }
  template <class Element>
  static Lanes lanes(const Element* src) {
    return load8(src);
  }

  // From the first n < 8 numbers; zeros after them.
  template <class Element>
  static Lanes lanes(const Element* src, int64_t n) {
    Element whole[8] = {};
    std::memcpy(whole, src, n * sizeof(Element));
    return load8(whole);
  }

  template <class Element>
  static Sums multiply_add(Lanes left, Lanes right, Sums sum) {
    return _mm256_fmadd_ps(left, right, sum);
  }

  // The sums of each one's lanes.
  static __m128 add_across(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  }

  template <int kRowCount>
  static void rows(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t steps,
                   bool accumulate) {
    __m256 sum[kRowCount][2];
#pragma GCC unroll 6
    for (int r = 0; r < kRowCount; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    const float* l = reinterpret_cast<const float*>(left.data);
    const float* b = reinterpret_cast<const float*>(right);
    for (int64_t s = 0; s < steps; s++, l += left.step, b += w) {
      const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
      for (int r = 0; r < kRowCount; r++) {
        const __m256 x = _mm256_broadcast_ss(l + r * left.row);
        sum[r][0] = _mm256_fmadd_ps(x, b0, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(x, b1, sum[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRowCount; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float* out = product + r * ld + v * 8;
        _mm256_storeu_ps(out, accumulate ? _mm256_add_ps(_mm256_loadu_ps(out), sum[r][v]) : sum[r][v]);
      }
  }

  template <class Element>
  static void block(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t count, int64_t steps,
                    bool accumulate) {
    for (int64_t r = 0; r < count; r += 6) {
      const Left part{left.data + r * left.row, left.row, left.step};
      for (int64_t c = 0; c < w; c += 16) {
        float* out = product + r * ld + c;
        switch (count - r) {
          case 1:
            rows<1>(part, right + c, w, out, ld, steps, accumulate);
            break;
          case 2:
            rows<2>(part, right + c, w, out, ld, steps, accumulate);
            break;
          case 3:
            rows<3>(part, right + c, w, out, ld, steps, accumulate);
            break;
          case 4:
            rows<4>(part, right + c, w, out, ld, steps, accumulate);
            break;
          case 5:
            rows<5>(part, right + c, w, out, ld, steps, accumulate);
            break;
          default:
            rows<6>(part, right + c, w, out, ld, steps, accumulate);
            break;
        }
      }
    }
  }
};

}  // namespace
}  // namespace mok
