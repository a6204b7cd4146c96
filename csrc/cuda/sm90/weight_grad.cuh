// Weight gradients: per expert a product over its rows, both operands contiguous along the output's dimensions and both
// loaded by cp.async, so that either may be gathered and the rows past an expert's end are zero in both (a zero against
// somebody else's NaN would not do).
#pragma once

#include "rows.cuh"

namespace mok::sm90 {

template <class T>
struct WeightGrad {
  using Element = T;
  static constexpr bool kTransposeA = true, kTransposeB = true;
  static constexpr int kBoxBytes = 0;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  struct Side {
    const T* data;
    int64_t stride;
    int columns;
    const int* order;  // null: sorted rows; else row order[r] / top_k
  };

  struct Params {
    Plan plan;
    int* error;
    int* ticket;
    Side left, right;
    T* out;  // [experts, left.columns, right.columns]
    int experts, top_k, left_tiles, right_tiles;
  };

  static __device__ __forceinline__ int first_row(const Params& p, int expert) {
    return expert ? p.plan.offsets[expert - 1] : 0;
  }

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    const int tiles = p.left_tiles * p.right_tiles, expert = ticket / tiles;
    if (expert >= p.experts) return Task::none();
    const int2 at = raster(ticket - expert * tiles, p.left_tiles, p.right_tiles);
    const int start = first_row(p, expert), end = p.plan.offsets[expert], row = at.x * kTileM;
    return {0, expert, row, min(kTileM, p.left.columns - row), at.y * kTileN, (end - start + kTileK - 1) / kTileK,
            0, start};
  }

  // 16-byte chunk thread % 8 of rows thread / 8 + 16 * j of the stage, in each group of 64 columns.
  struct Loader {
    uint32_t to;
    int row, end, left, right;

    __device__ __forceinline__ Loader(const Params& p, const Task& task, int thread) {
      const int first = thread / 8, chunk = thread % 8;
      to = first * 128 + ((chunk ^ first % 8) << 4);
      row = task.extra + first;
      end = p.plan.offsets[task.expert];
      left = task.row + chunk * 8;
      right = task.column + chunk * 8;
    }
    static __device__ __forceinline__ bool ready(const Params&, const Task&) { return true; }
    static __device__ __forceinline__ void wait(const Params&, const Task&, const Ring&) {}
    static __device__ __forceinline__ void boxes(const Params&, const Task&, int, uint32_t, uint32_t) {}

    template <int kGroups>
    static __device__ __forceinline__ void copy(const Side& side, int64_t row, bool exists, int column, uint32_t to) {
      const T* const from = side.data + row * side.stride + column;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const bool inside = exists && column + g * 64 < side.columns;
        ptx::copy16(to + g * kChunk, inside ? from + g * 64 : side.data, inside ? 16 : 0);
      }
    }
    __device__ __forceinline__ void rows(const Params& p, const Task&, int step, uint32_t stage) const {
#pragma unroll
      for (int j = 0; j < kTileK / 16; ++j) {
        const int at = row + step * kTileK + 16 * j;
        const bool exists = at < end;
        const int token = exists ? p.plan.order[at] / p.top_k : 0;
        copy<kTileM / 64>(p.left, p.left.order ? token : at, exists, left, stage + to + j * 2048);
        copy<kTileN / 64>(p.right, p.right.order ? token : at, exists, right, stage + kBytesA + to + j * 2048);
      }
    }
  };

  static __device__ __forceinline__ T* expert_out(const Params& p, const Task& task) {
    return p.out + static_cast<int64_t>(task.expert) * p.left.columns * p.right.columns;
  }

  static __device__ __forceinline__ void finish(const Params& p, const Task& task, const float (&acc)[2][kAccumulators],
                                                const Warp& warp) {
    store_tile<T, false>(task, acc, warp, expert_out(p, task), p.right.columns, p.right.columns, nullptr);
  }

  // An expert without rows: exact zeros.
  static __device__ __forceinline__ void finish_empty(const Params& p, const Task& task, const Warp& warp) {
    for (int row = warp.index(); row < task.rows; row += 4) {
      T* const to = expert_out(p, task) + static_cast<int64_t>(task.row + row) * p.right.columns;
      const int column = task.column + warp.lane() * 8;
      if (warp.lane() < kTileN / 8 && column < p.right.columns)
        *reinterpret_cast<uint4*>(to + column) = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace mok::sm90
