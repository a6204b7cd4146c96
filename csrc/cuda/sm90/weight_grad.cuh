// Weight gradients: per expert a product over its rows, both operands contiguous along the output's dimensions. One
// side is gathered, by cp.async; the other lies in sorted order and comes by the copy engine. Rows past an expert's end
// are zero on both sides: a zero against somebody else's NaN would not do.
#pragma once

#include "rows.cuh"

namespace mok::sm90 {

template <class T, bool kLeftGathered>
struct WeightGrad {
  using Element = T;
  static constexpr bool kTransposeA = true, kTransposeB = true;
  static constexpr bool kWaits = false, kGathers = true;
  static constexpr int kStages = 5, kPatches = 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr uint32_t kGatheredAt = kLeftGathered ? 0 : kBytesA, kDenseAt = kLeftGathered ? kBytesA : 0;
  static constexpr int kGatheredGroups = (kLeftGathered ? kTileM : kTileN) / 64;
  static constexpr int kDenseGroups = (kLeftGathered ? kTileN : kTileM) / 64;

  struct Params {
    CUtensorMap dense;  // ragged, boxes of 64 x 64
    Plan plan;
    int* error;
    int* ticket;
    const T* gathered;
    int gathered_columns;  // also the stride
    T* out;                // [experts, left_columns, right_columns]
    int experts, left_columns, right_columns, left_tiles, right_tiles;
  };

  static __device__ __forceinline__ Task task(const Params& p, int ticket) {
    const int tiles = p.left_tiles * p.right_tiles, expert = ticket / tiles;
    if (expert >= p.experts) return Task::none();
    const int2 at = raster(ticket - expert * tiles, p.left_tiles, p.right_tiles);
    const int start = expert ? p.plan.offsets[expert - 1] : 0, end = p.plan.offsets[expert], row = at.x * kTileM;
    return {0, expert, row, min(kTileM, p.left_columns - row), at.y * kTileN, steps_of(end - start), 0, start};
  }

  struct Boxes {
    // Groups of 64 columns of the dense side that exist. The others are not asked for: a ragged box that lies outside
    // altogether faults.
    static __device__ __forceinline__ int groups(const Params& p, const Task& task) {
      const int left = kLeftGathered ? p.right_columns - task.column : p.left_columns - task.row;
      return min(kDenseGroups, (left + 63) / 64);
    }
    static __device__ __forceinline__ uint32_t bytes(const Params& p, const Task& task) {
      return groups(p, task) * kChunk;
    }
    static __device__ __forceinline__ void weights(const Params&, const Task&, int, uint32_t, uint32_t) {}
    static __device__ __forceinline__ void rows(const Params& p, const Task& task, int step, uint32_t stage,
                                                uint32_t barrier) {
      const int column = kLeftGathered ? task.column : task.row, at = task.extra + step * kTileK;
      const int left = p.plan.offsets[task.expert] - at;
#pragma unroll
      for (int g = 0; g < kDenseGroups; ++g)
        if (g < groups(p, task))
          ragged_box(stage + kDenseAt + g * kChunk, &p.dense, column + g * 64, at, left, barrier);
    }
  };

  // One thread's share of each step's 64 gathered rows, in groups of 64 columns. A look-up of rows takes as long as a
  // step or two, so a warp looks up its rows of four steps at once, four steps ahead: lane l those of row l % 4 of its
  // own four, and of place l / 4.
  struct Gather {
    static constexpr int kStride = GatherPlace::kStride, kRows = (kTileK + kStride - 1) / kStride, kBatch = 4;
    static_assert(kRows * 4 <= 32, "a lane for each of the warp's rows of a step");

    GatherPlace place;
    bool last;      // whether the last of the rows lies in the stage
    const T* data;  // at this thread's first column
    int inside;     // groups of this thread that exist
    int row, end;   // the row that this lane looks up next, end of the expert's
    int token[kBatch], later[kBatch];

    __device__ __forceinline__ Gather(const Params& p, const Task& task, int thread) : place(thread) {
      const int first = thread / 8, column = (kLeftGathered ? task.row : task.column) + thread % 8 * 8;
      last = first + (kRows - 1) * kStride < kTileK;
      data = p.gathered + column;
      inside = (p.gathered_columns - column + 63) / 64;
      row = task.extra + thread / 32 * 4 + thread % 4 + thread % 32 / 4 * kStride;
      end = p.plan.offsets[task.expert];
      look_up(p, token);
      look_up(p, later);
    }
    __device__ __forceinline__ void look_up(const Params& p, int (&to)[kBatch]) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i, row += kTileK) to[i] = row < end ? p.plan.token[row] : -1;
    }
    __device__ __forceinline__ void step(const Params& p, const Task&, int step, uint32_t stage) {
      const int at = step % kBatch;
      const int own = at < 2 ? (at == 0 ? token[0] : token[1]) : (at == 2 ? token[2] : token[3]);
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int from = __shfl_sync(~0u, own, j * 4 + threadIdx.x % 32 / 8);
        if (j == kRows - 1 && !last) break;
        const T* const at = data + static_cast<int64_t>(max(from, 0)) * p.gathered_columns;
#pragma unroll
        for (int g = 0; g < kGatheredGroups; ++g)
          ptx::copy16(stage + kGatheredAt + g * kChunk + place.at(j), at + g * 64, from >= 0 && g < inside ? 16 : 0);
      }
      if (at == kBatch - 1) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) token[i] = later[i];
        look_up(p, later);
      }
    }
  };

  static __device__ __forceinline__ T* expert_out(const Params& p, const Task& task) {
    return p.out + static_cast<int64_t>(task.expert) * p.left_columns * p.right_columns;
  }

  template <int kHalves>
  static __device__ __forceinline__ void finish(const Params& p, const Task& task, Accumulators<kHalves>& acc,
                                                const Warp& warp) {
    store_tile<T, false, kHalves>(task, acc, warp, expert_out(p, task), p.right_columns, p.right_columns, nullptr);
  }

  // An expert without rows: exact zeros.
  static __device__ __forceinline__ void finish_empty(const Params& p, const Task& task, const Warp& warp) {
    for (int row = warp.index(); row < task.rows; row += 4) {
      T* const to = expert_out(p, task) + static_cast<int64_t>(task.row + row) * p.right_columns;
      const int column = task.column + warp.lane() * 8;
      if (warp.lane() < kTileN / 8 && column < p.right_columns)
        *reinterpret_cast<uint4*>(to + column) = make_uint4(0, 0, 0, 0);
    }
  }
};

}  // namespace mok::sm90
