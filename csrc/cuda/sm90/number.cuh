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

}  // namespace mok::sm90
