// Element types: conversions between float and pairs of 16-bit numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "arguments.h"

namespace mok::sm90 {

template <class T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  }
};

__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

// An array whose element type is known at run time only.
struct Numbers {
  void* data;
  Dtype dtype;

  __device__ __forceinline__ float load(int64_t i) const {
    if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[i];
    if (dtype == Dtype::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    return __half2float(static_cast<const __half*>(data)[i]);
  }
  __device__ __forceinline__ void store(int64_t i, float v) const {
    if (dtype == Dtype::kFloat32) {
      static_cast<float*>(data)[i] = v;
    } else if (dtype == Dtype::kBFloat16) {
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(v);
    } else {
      static_cast<__half*>(data)[i] = __float2half_rn(v);
    }
  }
};

// sum += weight * part, of eight neighbours.
template <class T>
__device__ __forceinline__ void add8(float (&sum)[8], const uint4& part, float weight) {
  const uint32_t word[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = Pair<T>::unpack(word[i]);
    sum[2 * i] += weight * v.x;
    sum[2 * i + 1] += weight * v.y;
  }
}

// Eight neighbours from element `at` on, which lies at a multiple of 16 bytes, in float32 or T.
template <class T>
__device__ __forceinline__ void store8(const Numbers& to, int64_t at, const float (&v)[8]) {
  if (to.dtype == Dtype::kFloat32) {
    float4* const out = reinterpret_cast<float4*>(static_cast<float*>(to.data) + at);
    out[0] = make_float4(v[0], v[1], v[2], v[3]);
    out[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<T*>(to.data) + at) = make_uint4(
        Pair<T>::pack(v[0], v[1]), Pair<T>::pack(v[2], v[3]), Pair<T>::pack(v[4], v[5]), Pair<T>::pack(v[6], v[7]));
  }
}

}  // namespace mok::sm90
