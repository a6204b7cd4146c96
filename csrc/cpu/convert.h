// Elements as they lie in tensors, and rows of them to and from float. Included by one translation unit per instruction
// set, so everything is in an unnamed namespace: the linker must not merge copies compiled with different flags.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "block.h"

// A call inside a loop would keep the loop from becoming vector code.
#define MOK_INLINE inline __attribute__((always_inline))

namespace mok {
namespace {

// Packed: weights mapped from a file may start at any byte.
struct __attribute__((packed)) F32 {
  float value;
};
struct __attribute__((packed)) Bf16 {
  uint16_t bits;
};
struct __attribute__((packed)) F16 {
  uint16_t bits;
};

MOK_INLINE uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}

MOK_INLINE float float_of(uint32_t u) {
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}

MOK_INLINE float widen(F32 v) { return v.value; }
MOK_INLINE float widen(Bf16 v) { return float_of(uint32_t{v.bits} << 16); }
MOK_INLINE float widen(F16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#else
  const uint32_t sign = uint32_t(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Scaling by 2^112 moves the exponent over and makes subnormals exact.
  return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000)));
#endif
}

template <class Element>
MOK_INLINE Element narrow(float v);

template <>
MOK_INLINE F32 narrow<F32>(float v) {
  return {v};
}

template <>
MOK_INLINE Bf16 narrow<Bf16>(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40;
  return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

template <>
MOK_INLINE F16 narrow<F16>(float v) {
#if defined(__F16C__)
  return {static_cast<uint16_t>(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t u = bits_of(v), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00 | ((rest >> 13) & 0x3ff))};
  if (rest >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};
  // Adding 0.5 makes the float adder round to the spacing of float16's subnormals.
  if (rest < 0x38800000) return {static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000))};
  return {static_cast<uint16_t>(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13))};
#endif
}

template <class Element>
inline void widen_row(const Element* src, float* dst, int64_t n) {
  for (int64_t i = 0; i < n; i++) dst[i] = widen(src[i]);
}

template <class Element>
inline void narrow_row(const float* src, Element* dst, int64_t n) {
  for (int64_t i = 0; i < n; i++) dst[i] = narrow<Element>(src[i]);
}

#if defined(__F16C__)
template <>
inline void widen_row<F16>(const F16* src, float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  for (; i < n; i++) dst[i] = widen(src[i]);
}

template <>
inline void narrow_row<F16>(const float* src, F16* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) dst[i] = narrow<F16>(src[i]);
}
#endif

// To the precision of Element and back.
template <class Element>
inline void round_row(float* row, int64_t n) {
  for (int64_t i = 0; i < n; i++) row[i] = widen(narrow<Element>(row[i]));
}

template <>
inline void round_row<F32>(float*, int64_t) {}

template <class Element>
inline const Element* elements(const char* data) {
  return reinterpret_cast<const Element*>(data);
}

template <class Element>
inline Element* elements(char* data) {
  return reinterpret_cast<Element*>(data);
}

}  // namespace
}  // namespace mok
