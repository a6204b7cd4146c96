// Patches of 16 rows x 32 columns, through which a warp reads as well as writes. Smaller than strips: several fit, and
// down_grad, whose epilogue reads h, gains more from early reads than from whole lines (with two pairs of strips it was
// 4 % slower).
#pragma once

#include "persistent.cuh"

namespace mok::sm90 {

// 16-byte chunk c of row r lies at chunk c ^ r / 2 % 4, so that neither eight rows of one chunk nor two whole rows meet
// in a bank.
constexpr uint32_t kPatchRow = 64, kPatch = 16 * kPatchRow;

// A warp's patches. Per lane, a patch looks two ways: as matrices, in accumulator fragments (fragment[2 * b + r]: block
// b of 8 columns, rows 8 * r to 8 * r + 7), and as lines, row lane / 4 (+ 8) and 16 bytes at column lane % 4 * 8.
struct Patches {
  uint32_t cell, line;  // addresses in patch 0

  __device__ __forceinline__ explicit Patches(const Warp& warp) {
    cell = place(warp.strips, Warp::lane() % 16, Warp::lane() / 16);
    line = place(warp.strips, Warp::lane() / 4, Warp::lane() % 4);
  }
  static __device__ __forceinline__ uint32_t place(uint32_t patch, int row, int chunk) {
    return patch + row * kPatchRow + ((chunk ^ row / 2 % 4) << 4);
  }
  static __device__ __forceinline__ int line_column() { return Warp::lane() % 4 * 8; }

  // One half, 16 columns, of patch kNumber.
  template <int kNumber>
  __device__ __forceinline__ void put(int half, const uint32_t* fragment) const {
    ptx::store_matrices((cell ^ half * 32) + kNumber * kPatch, fragment);
  }
  template <int kNumber>
  __device__ __forceinline__ void get(int half, uint32_t* fragment) const {
    ptx::load_matrices((cell ^ half * 32) + kNumber * kPatch, fragment);
  }
  template <int kNumber>
  __device__ __forceinline__ void put(const uint32_t* fragment) const {
    put<kNumber>(0, fragment);
    put<kNumber>(1, fragment + 4);
  }
  // A third way to look: `bytes` into row lane / 4 + 8 * r.
  __device__ __forceinline__ uint32_t in_row(int number, int bytes, int r) const {
    const uint32_t chunks = (bytes & ~15) ^ Warp::lane() % 4 * 16;  // from the lane's own, in which `line` lies
    return ptx::xor_here(line, chunks) + (bytes & 15) + number * kPatch + r * 8 * kPatchRow;
  }
  // `at` is this lane's place in the first line, `rows` the lines that exist from its own on.
  template <int kNumber, class T>
  __device__ __forceinline__ void store(T* at, int stride, int rows) const {
    const uint32_t from = line + kNumber * kPatch;
    if (rows > 0) *reinterpret_cast<uint4*>(at) = ptx::load_shared(from);
    if (rows > 8)
      *reinterpret_cast<uint4*>(at + 8 * static_cast<int64_t>(stride)) = ptx::load_shared(from + 8 * kPatchRow);
  }
  // The other way, without waiting: see copies_commit(). Lines that do not exist become zero.
  template <int kNumber, class T>
  __device__ __forceinline__ void fetch(const T* at, int stride, int rows) const {
    const uint32_t to = line + kNumber * kPatch;
    ptx::copy16(to, at, rows > 0 ? 16 : 0);
    ptx::copy16(to + 8 * kPatchRow, at + 8 * static_cast<int64_t>(stride), rows > 8 ? 16 : 0);
  }
};

}  // namespace mok::sm90
