// Warpgroup matrix multiply, 64 x N x 16 for N = 96, 128 and 192, both operands in shared memory, float32 accumulators.
//
// Element (row, column) of the accumulator: thread t of the warpgroup holds rows 16 * (t / 32) + t % 32 / 4 (+ 8) and,
// in each block j of 8 columns, columns 8 * j + 2 * (t % 4) (+ 1), as d[4 * j + 2 * (row >= 8) + column % 2].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace mok::ptx {

// Orders this warpgroup's register and shared-memory accesses before its next multiplies.
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operand in shared memory with the 128-byte swizzle (16-byte chunk c of row r lies at chunk c ^ (r % 8)), base aligned
// to 1024 bytes. A row is 128 bytes: 64 elements along K where K is contiguous; where the other dimension is, 64
// elements of it, and `chunk_stride` is the distance in bytes between consecutive groups of 64. This is the lower word
// of its descriptor: the upper one is always the same, so places are worked out in 32 bits.
__device__ __forceinline__ uint32_t mma_operand(uint32_t address, uint32_t chunk_stride) {
  return (address & 0x3FFFF) >> 4 | chunk_stride >> 4 << 16;
}

// What to add to an operand to move it by `bytes`.
__device__ __forceinline__ constexpr uint32_t mma_offset(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ uint64_t mma_descriptor(uint32_t operand) {
  constexpr uint64_t kSwizzle128 = 1, kRowGroup = 1024;  // bytes between groups of 8 rows
  return operand | (kRowGroup >> 4) << 32 | kSwizzle128 << 62;
}

// The registers of d as an instruction names them, and as its operands with a constraint.
#define MOK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MOK_NAMES_32 MOK_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOK_NAMES_48 MOK_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MOK_NAMES_64 MOK_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOK_NAMES_80 MOK_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MOK_NAMES_96 MOK_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOK_EIGHT(how, i) \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define MOK_REGISTERS_16(how) MOK_EIGHT(how, 0), MOK_EIGHT(how, 8)
#define MOK_REGISTERS_32(how) MOK_REGISTERS_16(how), MOK_EIGHT(how, 16), MOK_EIGHT(how, 24)
#define MOK_REGISTERS_48(how) MOK_REGISTERS_32(how), MOK_EIGHT(how, 32), MOK_EIGHT(how, 40)
#define MOK_REGISTERS_64(how) MOK_REGISTERS_48(how), MOK_EIGHT(how, 48), MOK_EIGHT(how, 56)
#define MOK_REGISTERS_80(how) MOK_REGISTERS_64(how), MOK_EIGHT(how, 64), MOK_EIGHT(how, 72)
#define MOK_REGISTERS_96(how) MOK_REGISTERS_80(how), MOK_EIGHT(how, 80), MOK_EIGHT(how, 88)

#define MOK_MMA(name, how, add, type, columns, count, a_at, b_at, ta_at, tb_at)                               \
  template <bool kTransposeA, bool kTransposeB>                                                               \
  static __device__ __forceinline__ void name(float (&d)[count], uint32_t a, uint32_t b) {                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" MOK_NAMES_##count \
                 "}, %" #a_at ", %" #b_at ", " #add ", 1, 1, %" #ta_at ", %" #tb_at ";\n"                     \
                 : MOK_REGISTERS_##count(how)                                                                 \
                 : "l"(mma_descriptor(a)), "l"(mma_descriptor(b)), "n"(kTransposeA ? 1 : 0),                  \
                   "n"(kTransposeB ? 1 : 0));                                                                 \
  }
#define MOK_MMA_PAIR(type, columns, count, ...)              \
  MOK_MMA(start, "=f", 0, type, columns, count, __VA_ARGS__) \
  MOK_MMA(add, "+f", 1, type, columns, count, __VA_ARGS__)

// start: d = a * b; add: d += a * b. A transposed operand is contiguous along M or N instead of K. `start` only writes
// the accumulators: were they also read, the compiler would keep them alive from one tile to the next.
#define MOK_MMAS(type)                        \
  MOK_MMA_PAIR(type, 96, 48, 48, 49, 50, 51)  \
  MOK_MMA_PAIR(type, 128, 64, 64, 65, 66, 67) \
  MOK_MMA_PAIR(type, 192, 96, 96, 97, 98, 99)

template <class T>
struct Mma;

template <>
struct Mma<__nv_bfloat16> {
  MOK_MMAS("bf16")
};

template <>
struct Mma<__half> {
  MOK_MMAS("f16")
};

#undef MOK_NAMES_16
#undef MOK_NAMES_32
#undef MOK_NAMES_48
#undef MOK_NAMES_64
#undef MOK_NAMES_80
#undef MOK_NAMES_96
#undef MOK_EIGHT
#undef MOK_REGISTERS_16
#undef MOK_REGISTERS_32
#undef MOK_REGISTERS_48
#undef MOK_REGISTERS_64
#undef MOK_REGISTERS_80
#undef MOK_REGISTERS_96
#undef MOK_MMA
#undef MOK_MMA_PAIR
#undef MOK_MMAS

}  // namespace mok::ptx
