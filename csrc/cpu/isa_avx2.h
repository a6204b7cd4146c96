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

// row[i] holds 8 columns of row i; afterwards 8 rows of column i.
inline void transpose8(__m256 (&row)[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    row[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    row[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

struct Avx2 : Scalar {
  template <int kRowCount>
  static void rows(Left left, const Lane* right, int64_t w, float* product, int64_t ld, int64_t steps,
                   bool accumulate) {
    __m256 sum[kRowCount][2];
    for (auto& row : sum) row[0] = row[1] = _mm256_setzero_ps();
    const float* l = reinterpret_cast<const float*>(left.data);
    const float* b = reinterpret_cast<const float*>(right);
    for (int64_t s = 0; s < steps; s++, l += left.step, b += w) {
      const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
      for (int r = 0; r < kRowCount; r++) {
        const __m256 x = _mm256_broadcast_ss(l + r * left.row);
        sum[r][0] = _mm256_fmadd_ps(x, b0, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(x, b1, sum[r][1]);
      }
    }
    for (int r = 0; r < kRowCount; r++)
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

  template <class Element>
  static void transpose(Lane* dst, int64_t w, const Element* src, int64_t stride, int64_t n, int64_t k, int64_t steps) {
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
      const Element* from = src + c * stride;
      int64_t s = 0;
      for (; s + 8 <= k; s += 8) {
        __m256 row[8];
        for (int i = 0; i < 8; i++) row[i] = load8(from + i * stride + s);
        transpose8(row);
        for (int i = 0; i < 8; i++) _mm256_storeu_ps(reinterpret_cast<float*>(dst + (s + i) * w + c), row[i]);
      }
      for (; s < steps; s++)
        for (int i = 0; i < 8; i++) dst[s * w + c + i] = s < k ? bits_of(widen(from[i * stride + s])) : 0;
    }
    for (int64_t s = 0; s < steps; s++)
      for (int64_t i = c; i < w; i++) dst[s * w + i] = i < n && s < k ? bits_of(widen(src[i * stride + s])) : 0;
  }
};

}  // namespace
}  // namespace mok
