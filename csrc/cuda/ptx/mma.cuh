// Warp matrix multiply: 16 x 8 x 16, operands in registers, float32 accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mok::ptx {

// d += a * b. Lane l holds of `a` [16, 16] rows l / 4 and l / 4 + 8 at columns 2 * (l % 4) (and one more), a[0] and
// a[1], and the same at columns 8 further, a[2] and a[3]; of `b` [16, 8] column l / 4 at rows 2 * (l % 4) (and one
// more), b[0], and 8 further, b[1]; of `d` [16, 8] rows l / 4, d[0] and d[1], and l / 4 + 8, d[2] and d[3], at columns
// 2 * (l % 4) and one more.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t* a, const uint32_t* b);

template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float (&d)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void multiply<__half>(float (&d)[4], const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace mok::ptx
